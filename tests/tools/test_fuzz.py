"""The fuzzer: some random calls on each backend and on two ranks, and that it sees what is wrong."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

from cce_dist import op, reference
from cce_dist.kernels import dense
from cce_dist.kernels.divergence import dense as dense_heads
from cce_dist.token_loss import TokenLoss
from cce_dist.tools import cli
from cce_dist.tools.verify import FUNCTIONS
from cce_dist.tools.verify.cases import CASES, PER_TOKEN, Gaussian, LogProbCase, Truth
from cce_dist.tools.verify.check import assert_no_worse, draw, run_case, shard_of
from cce_dist.tools.verify.fuzz import LUCK, SOURCES, Setting, draw_loss, run_many
from cce_dist.tools.verify.log_probs import LOG_PROBS
from cce_dist.tools.verify.loss import LOSS
from cce_dist.tools.verify.oracle import truth

GPU = torch.cuda.is_available()
OTHERS = ("log-probs", "kept", "divergence")


def failures(setting: Setting, count: int, first: int = 0) -> str:
    return "\n".join(run_many(setting, first, count, lambda line: None))


def test_torch():
    assert failures(Setting(seed=1, backend="torch"), 300) == ""


def test_triton():
    setting = Setting(seed=1, backend="triton", device="cuda" if GPU else "cpu")
    assert failures(setting, 300 if GPU else 30) == ""


def test_two_ranks():
    run_ranks(_on_ranks, 2, 80)


def _on_ranks(count: int) -> None:
    for function in FUNCTIONS:
        some = count if function == "loss" else count // 4
        assert failures(Setting(1, "cpu", "torch", dist.group.WORLD, function=function), some) == ""
    # A shard of one row: the dense baseline has its bias's gradient right to 8e-10, by luck.
    assert failures(Setting(77, "cpu", "torch", dist.group.WORLD, function="log-probs"), 1, 46) == ""


@pytest.mark.parametrize("function", OTHERS)
def test_torch_of(function: str, capsys: pytest.CaptureFixture[str]):
    assert FUNCTIONS == tuple(SOURCES) == ("loss", *OTHERS)
    assert cli.main(["verify", "--fuzz", "1", "--seed", "2", "--device", "cpu", "--function", function]) == 0
    assert "1 of 1 random cases hold, seed 2" in capsys.readouterr().out
    assert failures(Setting(1, backend="torch", function=function), 100) == ""
    # One token whose logits all reach the softcap: the dense baseline has hardly an error there, by luck.
    assert failures(Setting(31, backend="torch", function=function), 1, 442) == ""


@pytest.mark.parametrize("function", OTHERS)
@pytest.mark.slow
def test_triton_of(function: str):
    setting = Setting(1, "cuda" if GPU else "cpu", "triton", function=function)
    assert failures(setting, 100 if GPU else 2, 3) == ""  # these two have most options, and are small


def test_terms_of_a_bias_that_cancel():
    """Catches a bound without the rounding of terms that cancel over tokens, and one that is ten times as wide.

    Each of 176 columns is a shard of its own, and the baseline has it right by luck.
    """
    drawn = draw(LOG_PROBS, LogProbCase(problem=Gaussian(37, 16, 176, bias=True, scale=2.0)))
    truth = Truth(LOG_PROBS.reference(drawn, torch.float64, "cpu"))
    right = truth.values["dbias"]

    def is_off(ours: torch.Tensor, column: int) -> bool:
        def part(whole: torch.Tensor) -> torch.Tensor:
            return whole[column : column + 1]

        error = LOG_PROBS.judge(drawn, "dbias", part(ours), part, {"dbias": right}, truth)[0]
        return error.error > LUCK * error.bound

    rounded = LOG_PROBS.call(drawn, shard_of(drawn, None)[1], "torch", "cpu")["dbias"]
    assert not any(is_off(rounded, column) for column in range(176))
    coefs = sum(grad.abs() for grad in drawn.upstream.values())
    of_softmax = LOG_PROBS.reference(drawn._replace(upstream={"lse": coefs}), torch.float64, "cpu")["dbias"]
    # A log-sum-exp that is 1e-4 off.
    assert sum(is_off(right + 1e-4 * of_softmax, column) for column in range(176)) > 140


def of_field(name: str, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda found: found._replace(**{name: change(getattr(found, name))})


def of_row(row: int, change: Callable[[torch.Tensor], Any]) -> Callable[[Any], Any]:
    """Have a row of a shard's statistics be what ``change`` makes of them all, if they have the row."""

    def of(found: Any) -> Any:
        stats, saved = found[0].clone(), found[1]
        if row < len(stats):
            stats[row] = change(stats)
        return stats, saved

    return of


def small_term(row: int) -> Callable[[Any], Any]:
    """Have a coefficient P, LABEL, UNIFORM or ENTROPY be 1 % off."""
    return lambda coef: coef * torch.where(torch.arange(4) == row, 1.01, 1.0)[:, None]


RANDOM = "cce-dist verify --fuzz 1 --seed 1 --case"
# A function, what becomes of its result, what random calls say, and which case of the matrix says so.
MUTATIONS: dict[str, tuple[Any, str, Callable, str, tuple[str, ...], str]] = {
    "target-logit-off": (dense, "statistics", of_row(2, lambda s: s[2] + 1e-3), "loss", (RANDOM, "nll: error"), "plain"),
    "mean-off": (dense, "statistics", of_row(3, lambda s: 1.01 * s[3]), "loss", ("loss: error",), "label-smoothing"),
    "entropy-off": (  # the last of four or six rows is the moment
        dense, "statistics", of_row(-1, lambda s: s[-1] - 1e-2 * (len(s) % 2 == 0) * s[1]), "loss", ("entropy: error",), "aux",
    ),
    "log-sum-off": (dense, "statistics", of_row(1, lambda s: s[1] ** 1.0001), "loss", ("lse: error",), "plain"),
    "maximum-floored": (
        dense, "statistics", of_row(0, lambda s: s[0].clamp(min=0)), "loss", ("lse: error",), "logits-at-minus-1e4",
    ),
    "reference": (
        reference, "cross_entropy", of_field("loss", lambda x: 1.01 * x), "loss", ("the reference's own loss",), "",
    ),
    "log-probs": (
        op, "merge_cells", lambda found: (1.001 * found[0], found[1]), "log-probs",
        ("verify --fuzz 1 --seed 1 --case", "--function log-probs", "log_probs: error"), "",
    ),
    "divergence": (
        dense_heads, "_block_gradients", lambda found: 1.001 * found, "divergence",
        ("--function divergence", "dE: error"), "",
    ),
    "small-P": (dense, "coefficients", small_term(0), "loss", (), "label-smoothing"),
    "small-LABEL": (dense, "coefficients", small_term(1), "loss", (), "plain"),
    "small-UNIFORM": (dense, "coefficients", small_term(2), "loss", (), "label-smoothing"),
    "small-ENTROPY": (dense, "coefficients", small_term(3), "loss", (), "aux"),
}  # fmt: skip


@pytest.mark.parametrize(("owner", "name", "change", "kind", "says", "case"), MUTATIONS.values(), ids=MUTATIONS)
def test_a_mutation_is_seen(owner, name, change, kind, says, case, monkeypatch):
    """Catches a bound so wide that nothing fails, options that are never drawn, a baseline that is wrong, and a case in bf16
    whose rounding hides a small term."""
    function = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **options: change(function(*args, **options)))
    if says:
        found = failures(Setting(seed=1, backend="torch", function=kind), 60 if kind == "loss" else 30)
        assert all(said in found for said in says) and "divergence: error" not in found
    for line in CASES:
        if line.name == case:
            assert not all(result.ok for result in run_case(LOSS, line, None, "cpu"))


def test_a_mutation_of_a_token_loss_is_seen(monkeypatch):
    """Catches a function of the caller that is hardly ever drawn, or whose bounds are too wide."""

    def off(*args, differentiated=TokenLoss.differentiated):
        losses, upstream = differentiated(*args)
        return losses, upstream._replace(nll=None if upstream.nll is None else 1.01 * upstream.nll)

    monkeypatch.setattr(TokenLoss, "differentiated", off)
    setting = Setting(seed=1, backend="torch")
    with_one = [number for number in range(500) if draw_loss(setting, number).token_loss]
    found = "\n".join(failures(setting, 1, number) for number in with_one)
    assert "token_loss=dft" in found and "token_loss=policy" in found and "dE: error" in found


def test_a_case_is_a_function_of_its_number():
    setting = Setting(seed=3, backend="torch")
    assert str(draw_loss(setting, 17)) == str(draw_loss(setting, 17)) != str(draw_loss(setting, 18))
    assert str(draw_loss(setting._replace(seed=4), 17)) != str(draw_loss(setting, 17))


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_oracle_agrees_with_the_reference(softcap):
    """Formulas by hand, and autograd of the definition; the scale's gradient too."""
    problem = Gaussian(bias=True)(torch.Generator().manual_seed(1))
    problem.labels[::4] = -100
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    options = {"label_smoothing": 0.1, "softcap": softcap, "z_loss_weight": 0.02, "reduction": "none"}
    assert problem.bias is not None
    inputs = [x.clone().requires_grad_() for x in (problem.hidden, problem.weight, problem.bias)]
    out = reference.linear_cross_entropy(
        inputs[0], inputs[1], problem.labels, linear_bias=inputs[2], logit_scale=scale, **options  # type: ignore[arg-type]
    )  # fmt: skip
    results = {name: getattr(out, name) for name in ("loss", *PER_TOKEN)}
    upstream = {name: torch.randn(x.shape, dtype=torch.float64) for name, x in results.items()}
    gradients = torch.autograd.grad(list(results.values()), [*inputs, scale], list(upstream.values()))
    values = truth(problem, options | {"logit_scale": 0.7}, upstream).values
    for name, right in [*results.items(), *zip(("dE", "dC", "dbias", "dscale"), gradients, strict=True)]:
        assert_no_worse(values[name].float(), right.float(), right.detach(), quantity=name)
