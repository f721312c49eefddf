"""Losses that a function of the caller makes of log-probabilities: the dense loss's numbers, in one pass and in two."""

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dense_scores import assert_same_loss
from shards import DEVICE, backends_of_ranks, needs_gpu
from support.dense import DTYPE, ROWS, N, V, assert_all_no_worse, assert_near, dense, large_operands, loss_of, operands
from support.refused import assert_changes_refused
from tiny_trainer import counted
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from cce_dist import TokenLossOutput, explain, groups, linear_cross_entropy, linear_log_probs, merge, objectives
from cce_dist.token_loss import TokenLoss
from cce_dist.tools.verify.cases import Gaussian, LossCase, Split, ignore, uneven, with_empty
from cce_dist.tools.verify.check import run_case
from cce_dist.tools.verify.loss import LOSS, TOKEN_LOSSES


def bonus(log_probs: Tensor, entropy: Tensor, advantages: Tensor, old: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A policy gradient with an entropy bonus, whose derivative goes through both arguments."""
    ratio = (log_probs - old).exp()
    return -advantages * ratio - 0.3 * entropy.square(), (ratio, ratio > 1)


bonus.needs_entropy = True  # type: ignore[attr-defined]
FUNCTIONS: dict[str, tuple[Callable[..., Any], int]] = {  # and the number of inputs
    "dft": (objectives.dft(), 0),
    "entropy-adaptive": (objectives.entropy_adaptive(2.0), 0),
    "clipped": (objectives.clipped_policy(0.2, 0.3, kl_coef=0.1, dual=2.0), 3),
    "bonus": (bonus, 2),
}


def with_inputs(biased: bool = True) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Hidden states, weight and bias that require gradients, labels, and inputs, which are NaN for ignored tokens."""
    tensors, labels = operands(biased)
    inputs = [torch.randn(N), -5 * torch.rand(N), -5 * torch.rand(N)]
    return tensors, labels, [values.to(DEVICE).masked_fill(labels == -100, torch.nan) for values in inputs]


@pytest.mark.parametrize("rows", [ROWS, None], ids=["one-pass", "two-passes"])
@pytest.mark.parametrize(
    ("name", "options", "factor", "backend"),
    [
        ("dft", {}, 1.0, "triton"),
        ("clipped", {"num_tokens": torch.tensor(33), "softcap": 3.0}, -2.0, "triton"),
        ("bonus", {"reduction": "sum", "logit_scale": 0.5}, 0.3, "torch"),
        ("bonus", {"reduction": "sum", "logit_scale": 0.5}, 0.3, "triton"),
        ("entropy-adaptive", {"num_tokens": 40, "softcap": 5.0}, 1.0, "torch"),
    ],
)
def test_same_numbers_as_dense(
    name: str, options: dict[str, Any], factor: float, backend: Any, rows: int | None
) -> None:
    """Catches: a derivative by log_probs with the sign of nll's, one by the entropy that is lost, inputs of another group's
    tokens, a divisor that is left out, NaN of ignored tokens, outputs of one group for another."""
    options = {key: value.to(DEVICE) if isinstance(value, Tensor) else value for key, value in options.items()}
    tensors, labels, inputs = with_inputs()
    function, count = FUNCTIONS[name]
    inputs = inputs[:count]
    call: dict[str, Any] = {"token_loss": function, "token_inputs": inputs, **options}
    each = call | {"reduction": "none"}
    truth, base = (
        (*dense(tensors, labels, dtype, factor, **call), dense(tensors, labels, dtype, 1.0, **each)[0])
        for dtype in (torch.float64, DTYPE)
    )
    with groups.of_rows(rows), counted(groups, "one_pass") as one_pass:
        out = loss_of(tensors, labels, backend=backend, return_aux=True, **call)
    assert one_pass.called == (rows is not None)
    gradients = torch.autograd.grad(factor * out.loss, tensors, retain_graph=True)
    counts = labels != -100
    assert_all_no_worse(("loss", "dE", "dC", "dbias", "losses"), (out.loss, *gradients, out.losses), base, truth)
    assert not gradients[0][~counts].any()
    assert all(map(torch.equal, torch.autograd.grad(factor * out.loss, tensors, retain_graph=True), gradients))
    assert_outputs(out, name, labels)
    if inputs and rows is not None:  # in two passes autograd watches what the function's own graph saves
        inputs[0].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(factor * out.loss, tensors)


def assert_outputs(out: TokenLossOutput, name: str, labels: Tensor) -> None:
    """Catches: an output that is not masked, has a graph, or is made although nobody asked for it."""
    assert (out.entropy is None) == (name in ("dft", "clipped"))
    assert (out.metrics is None) == (name not in ("clipped", "bonus"))
    assert name != "clipped" or out.metrics["clipped"].dtype == torch.bool
    for values in filter(torch.is_tensor, tree_leaves((out.log_probs, out.losses, out.entropy, out.metrics))):
        assert values.shape == labels.shape and not values.requires_grad
        assert not values[labels == -100].any() and (values.dtype == torch.bool or values[labels != -100].any())
    assert (out.log_probs <= 0).all()


def test_a_loss_of_whole_sequences_takes_two_calls() -> None:
    """The recipe of docs/rl.md beside one call with autograd. Catches: slopes of ignored tokens, or of another sign."""
    (hidden, weight), labels = operands(biased=False)
    tokens, ids = hidden.view(2, 11, -1), labels.view(2, 11)

    def of_sequences(log_probs: Tensor) -> Tensor:
        return -torch.nn.functional.logsigmoid(0.1 * log_probs.sum(1).diff()).sum()

    right = torch.autograd.grad(of_sequences(linear_log_probs(tokens, weight, ids).log_probs), (hidden, weight))
    with torch.no_grad():
        log_probs = linear_log_probs(tokens, weight, ids).log_probs
    slopes = torch.autograd.grad(of_sequences(log_probs.requires_grad_()), log_probs)
    how: Any = {"reduction": "sum", "token_loss": lambda log_probs, _, slopes: log_probs * slopes}
    for rows in (None, ROWS):
        with groups.of_rows(rows):
            loss = linear_cross_entropy(tokens, weight, ids, token_inputs=slopes, **how)
        assert_near(torch.autograd.grad(loss, (hidden, weight)), right)


def test_entropy_adaptive_is_llama_factorys() -> None:
    """LLaMA-Factory takes the entropy over the 20 largest logits. Catches: a gradient through the weight."""
    hidden, weight, labels = torch.randn(N, 16).double(), torch.randn(20, 16).double(), torch.arange(N) % 20
    weight.requires_grad_()
    logits = hidden @ weight.t()
    top = logits.detach().topk(20).values.softmax(-1)
    factor = (-(top * (top + 1e-10).log()).sum(-1) / 3) ** 1.5
    theirs = (torch.nn.functional.cross_entropy(logits, labels, reduction="none") * factor).mean()
    ours = linear_cross_entropy(hidden, weight, labels, token_loss=objectives.entropy_adaptive(1.5))
    assert_same_loss(ours, theirs, [weight], 1e-7)


def changing(log_probs: Tensor, entropy: Tensor) -> Tensor:
    return log_probs.exp_() * entropy.mul_(2)


def overwriting(log_probs: Tensor, _: None) -> Tensor:
    ratio = log_probs.exp()
    losses = 3 * ratio
    ratio.mul_(2)
    return losses


changing.needs_entropy = True  # type: ignore[attr-defined]


@pytest.mark.parametrize(("rows", "compiled"), [(ROWS, False), (None, False), (None, True)])
def test_a_function_may_change_its_arguments_in_place(rows: int | None, compiled: bool) -> None:
    """Catches: an ignored token with loss exp(0), outputs after the change, an error for a leaf that is changed, a wrong
    gradient of a function that overwrites what its own gradient needs."""
    (hidden, weight), labels = operands(biased=False)

    def kept(log_probs: Tensor, entropy: Tensor) -> Tensor:
        return log_probs.exp() * (entropy * 2)

    def call(function: Callable[..., Any]) -> TokenLossOutput:
        return linear_cross_entropy(hidden, weight, labels, token_loss=function, return_aux=True)

    kept.needs_entropy = True  # type: ignore[attr-defined]
    run = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    with groups.of_rows(rows):
        right, found = call(kept), run(changing)
        torch.testing.assert_close(found[:4], right[:4])
        torch.testing.assert_close(*(torch.autograd.grad(out.loss, (hidden, weight)) for out in (found, right)))
        if not compiled:  # a graph of torch.compile has no operations in place
            with pytest.raises(RuntimeError, match=r"in ?place"):
                call(overwriting).loss.backward()


@pytest.mark.parametrize("rows", [ROWS, None])
def test_a_checkpoint_computes_the_forward_twice(rows: int | None) -> None:
    """Catches: a checkpoint's hooks on the tensors that the function saves, with which each group starts the forward again."""
    (hidden, weight), labels, inputs = with_inputs(biased=False)
    function, count = FUNCTIONS["clipped"]
    counted = mock.Mock(side_effect=function, needs_entropy=False)

    def call(hidden: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, labels, token_loss=counted, token_inputs=inputs[:count])

    num_groups = 1 if rows is None else 4
    with groups.of_rows(rows):
        right = torch.autograd.grad(call(hidden), (hidden, weight))
        counted.reset_mock()
        loss = checkpoint(call, hidden, use_reentrant=False)
        assert counted.call_count == num_groups
        assert all(map(torch.equal, torch.autograd.grad(loss, (hidden, weight)), right))
    assert counted.call_count == 2 * num_groups


@pytest.mark.parametrize("kind", [torch.float32, torch.bool, torch.uint8, torch.int64])
def test_a_clipped_policy_of_any_ratio_and_advantage(kind: torch.dtype) -> None:
    """Catches: NaN gradients of a ratio that overflows, though the loss is clipped; -1 as a uint8; a missing reference."""
    log_probs = torch.tensor([-1.0, -1.0, -1.2, -1.0], requires_grad=True)
    advantages, old = torch.tensor([1, 0, 1, 1]).to(kind), torch.tensor([-torch.inf, -200.0, -1.1, -0.2])
    losses, _ = objectives.clipped_policy()(log_probs, None, advantages, old)
    ratios = (log_probs.detach() - old).exp()
    torch.testing.assert_close(losses, -torch.stack((torch.tensor(1.2), torch.tensor(0.0), *ratios[2:])))
    torch.testing.assert_close(torch.autograd.grad(losses.sum(), log_probs)[0], torch.tensor([0, 0, *-ratios[2:]]))
    assert torch.equal(objectives.clipped_policy(dual=3.0)(log_probs, None, advantages, old)[0], losses)
    losses, _ = objectives.clipped_policy(dual=3.0)(log_probs, None, -advantages.float(), old)
    torch.testing.assert_close(losses, torch.tensor([3.0, 0.0, ratios[2], 0.8]))
    assert torch.autograd.grad(losses.sum(), log_probs)[0].isfinite().all()
    with pytest.raises(ValueError, match="ref_log_probs"):
        objectives.clipped_policy(kl_coef=0.1)(log_probs, None, advantages, old)


def test_float64_and_half_precision() -> None:
    """Catches: fp32 inside a float64 loss; a function that runs under autocast."""
    tensors, labels, inputs = with_inputs(biased=False)
    hidden, weight = (tensor.detach().double().cpu().requires_grad_() for tensor in tensors)
    labels, inputs = labels.cpu(), [values.cpu() for values in inputs]
    function = FUNCTIONS["clipped"][0]
    right = dense([hidden, weight], labels, torch.float64, token_loss=function, token_inputs=inputs)
    loss = linear_cross_entropy(hidden, weight, labels, token_loss=function, token_inputs=inputs)
    assert loss.dtype == torch.float64
    torch.testing.assert_close((loss, *torch.autograd.grad(loss, (hidden, weight))), right, rtol=1e-12, atol=1e-12)
    dtypes = []

    def seen(log_probs: Tensor, _: None) -> Tensor:
        dtypes.append((log_probs.dtype, torch.is_autocast_enabled("cpu")))
        return -log_probs

    for rows in (None, ROWS):
        with groups.of_rows(rows), torch.autocast("cpu", torch.bfloat16):
            linear_cross_entropy(hidden.float(), weight.float(), labels, token_loss=seen)
    assert set(dtypes) == {(torch.float32, False)}


def test_no_tokens_no_labels_no_gradient() -> None:
    (hidden, weight), labels = operands(biased=False)
    for rows in (None, ROWS):
        for count, ids in ((N, torch.full_like(labels, -100)), (0, labels[:0])):
            with groups.of_rows(rows):
                loss = linear_cross_entropy(hidden[:count], weight, ids, token_loss=objectives.dft())
            assert not any(grad.any() for grad in torch.autograd.grad(loss, (hidden, weight))) and loss == 0
    with torch.no_grad():
        out = linear_cross_entropy(hidden, weight, labels, token_loss=objectives.dft(), return_aux=True)
    assert torch.equal(out.loss, out.losses.sum() / (labels != -100).sum())


def test_a_label_outside_the_vocabulary_is_nan_whatever_the_function_says() -> None:
    """Catches: a function that hides the NaN of such a label, as a GPU gives it."""
    token = TokenLoss(lambda log_probs, _: log_probs.nan_to_num(0.0), (), False, False, None, [])
    nll = torch.tensor([1.0, torch.nan, 0.0])
    losses, gradients = token.differentiated(nll, None, torch.tensor([5, -2, -1]), torch.full((3,), 0.5))
    assert losses.isnan().tolist() == [False, True, False] and losses[2] == 0
    assert gradients.nll is not None and gradients.nll[0] == -0.5


@pytest.mark.parametrize("rows", [ROWS, None])
def test_under_torch_compile(rows: int | None) -> None:
    """Catches: a graph that ends at the function, and gradients in forward, where the function is no part of the operator."""
    tensors, labels, inputs = with_inputs()

    def call(*tensors: Tensor) -> Any:
        return loss_of(tensors, labels, token_loss=bonus, token_inputs=inputs[:2], return_aux=True)

    with groups.of_rows(rows):
        out = torch.compile(call, fullgraph=True, backend="aot_eager")(*tensors)
    truth = dense(tensors, labels, torch.float64, token_loss=bonus, token_inputs=inputs[:2])
    assert_near((out.loss, *torch.autograd.grad(out.loss, tensors)), truth)
    assert_outputs(out, "bonus", labels)


def test_the_way_is_that_of_a_reduced_loss() -> None:
    """Catches: a token_loss that takes two passes where a plain mean takes one, and an entropy that is computed unasked."""

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta").requires_grad_(dtype.is_floating_point)

    inputs = meta(8192, 4096), meta(128256, 4096), meta(8192, dtype=torch.int64)
    for budget in (None, 256 << 20, 1 << 40):
        plain = explain(*inputs, workspace_bytes=budget)
        for function, aux in itertools.product((objectives.dft(), bonus), (False, True)):
            how: Any = {"token_loss": function, "return_aux": aux, "token_inputs": (inputs[2],)}
            assert explain(*inputs, workspace_bytes=budget, **how) == plain
        assert "all exponentials kept" in plain or "one pass" in plain
    assert "two passes" in explain(*inputs, workspace_bytes=256 << 20, token_loss=bonus, softcap=30.0)


BETA = torch.tensor(0.5, requires_grad=True)
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "not a function": ({"token_loss": 0.5}, TypeError, "must be a function"),
    "one tensor": ({"token_inputs": torch.ones(N)}, TypeError, "token_inputs a tuple"),
    "no function": ({"token_loss": None, "token_inputs": (torch.ones(N),)}, ValueError, "no token_loss"),
    "a number": ({"token_inputs": (0.5,)}, TypeError, r"token_inputs\[0\] must be a tensor"),
    "shape": ({"token_inputs": (torch.ones(N - 1),)}, ValueError, r"token_inputs\[0\] must be \(22,\)"),
    "device": ({"token_inputs": (torch.ones(N, device="meta"),)}, ValueError, "on meta"),
    "gradient": ({"token_inputs": (torch.ones(N, requires_grad=True),)}, TypeError, "detach it"),
    "weights": ({"weight": torch.ones(V)}, ValueError, "cannot be combined with weight"),
    "smoothing": ({"label_smoothing": 0.1, "z_loss_weight": 0.1}, ValueError, "label_smoothing, z_loss_weight"),
    "expected": ({"expected_weights": torch.ones(N), "reduction": "none"}, ValueError, "expected_weights"),
    "names": ({"return_aux": ("nll",)}, TypeError, "return_aux with token_loss must be a bool"),
    "returns a number": ({"token_loss": lambda log_probs, _: 0.5}, TypeError, r"got losses of type float"),
    "other shape": ({"token_loss": lambda p, _: p.repeat(2)}, ValueError, r"one number per token, \[\d+\], got losses \[\d+\]"),
    "sum": ({"token_loss": lambda log_probs, _: -log_probs.sum()}, ValueError, r"got losses \[\]"),
    "integers": ({"token_loss": lambda log_probs, _: log_probs.long()}, TypeError, "got torch.int64"),
    "bf16": ({"token_loss": lambda log_probs, _: log_probs.bfloat16()}, TypeError, "got torch.bfloat16"),
    "not made": ({"token_loss": objectives.dft}, TypeError, r"call it, objectives\.dft\(\)"),
    "no inputs": ({"token_loss": objectives.clipped_policy()}, TypeError, "and 0 token_inputs: missing .*'advantages'"),
    "no entropy": ({"token_loss": lambda log_probs, entropy: -log_probs - entropy}, TypeError, "unless .*needs_entropy"),
    "own error": ({"token_loss": lambda log_probs, _: -log_probs + "1"}, TypeError, "token_loss: unsupported operand"),
    "cut off": ({"token_loss": lambda log_probs, _: -log_probs.detach()}, ValueError, "have no gradient"),
    "metrics": (
        {"token_loss": lambda log_probs, _: (-log_probs, {"mean": log_probs.mean()}), "return_aux": True},
        ValueError,
        r"one number per token, \[\d+\], got metrics\['mean'\] \[\]: take means",
    ),
}  # fmt: skip


@pytest.mark.parametrize("rows", [ROWS, None])
def test_what_is_refused(rows: int | None) -> None:
    hidden, weight = (x.detach().float().cpu().requires_grad_() for x in operands(False)[0])
    given = dict(input=hidden, linear_weight=weight, target=torch.arange(N), token_loss=objectives.dft())
    assert_changes_refused(linear_cross_entropy, given, WRONG.values(), lambda: groups.of_rows(rows))


@pytest.mark.parametrize("rows", [None, 6])
def test_a_parameter_of_the_function_is_refused(rows: int | None) -> None:
    """Catches: a parameter whose gradient one pass loses, also behind other operations; an argument taken for a parameter."""
    (hidden, weight), labels = operands(biased=False)
    beta = BETA.to(DEVICE)
    with groups.of_rows(rows):
        for function in (lambda log_probs, _: -log_probs * beta, lambda log_probs, _: -log_probs + 2 * beta.exp()):
            with pytest.raises(ValueError, match="requires a gradient"):
                linear_cross_entropy(hidden, weight, labels, token_loss=function)
        fixed = linear_cross_entropy(hidden, weight, labels, token_loss=lambda log_probs, _: -log_probs * beta.detach())
        fixed.backward()


@pytest.mark.parametrize("rows", [ROWS, None])
def test_debug_finds_a_function_that_is_not_elementwise(rows: int | None, monkeypatch) -> None:
    """Catches: a baseline made of a group's tokens."""
    monkeypatch.setenv("CCE_DIST_DEBUG", "1")
    (hidden, weight), labels, inputs = with_inputs(biased=False)
    with groups.of_rows(rows):
        with pytest.raises(ValueError, match="not elementwise"):
            function = lambda log_probs, _, a: -log_probs * (a - a.nanmean())  # noqa: E731
            linear_cross_entropy(hidden, weight, labels, token_loss=function, token_inputs=inputs[:1])
        for function, count in FUNCTIONS.values():
            linear_cross_entropy(hidden, weight, labels, token_loss=function, token_inputs=inputs[:count])


LAYOUTS: list[tuple[dict[str, Any], Split]] = [
    ({}, uneven),
    ({"sequence_parallel": True}, with_empty),
    ({"input_grad": "partial"}, uneven),
]


def _on_ranks(backend: str) -> None:
    """Whole and in groups, over shards that are uneven or empty, with and without sequence parallelism."""
    problem = Gaussian(24, 16, V, bias=True, labels=ignore(slice(0, 9, 4)))
    for rows, name, (options, shards) in itertools.product((ROWS, None), TOKEN_LOSSES, LAYOUTS):
        case = LossCase("token-loss", "", options, problem, shards, token_loss=name, in_groups=rows, twice=False)
        with counted(merge, "HiddenGradSum") as sums:
            errors = run_case(LOSS, case, dist.group.WORLD, "cpu", backend)
        assert all(error.ok for error in errors), f"{name} {rows} {options}: {errors}"
        assert sums.called == (options.get("input_grad") != "partial")


@backends_of_ranks
def test_on_two_ranks(ranks2, backend: str) -> None:
    """Catches: inputs that are cut for sequence parallelism, a function of one shard's log-probabilities."""
    ranks2(_on_ranks, backend)


@needs_gpu
@pytest.mark.parametrize("name", ["plain", *FUNCTIONS])
def test_kept_exponentials_serve_each_group(name: str) -> None:
    """The default path on a GPU: three products, in the budget's bytes, and no less exact than the gradients of one group.

    Catches: an entropy's gradient that reads the exponentials of another group.
    """
    function, count = FUNCTIONS.get(name, (None, 0))
    inputs = [torch.randn(5000, device="cuda"), *(-10 * torch.rand(5000, device="cuda") for _ in range(2))][:count]
    how: dict[str, Any] = {"token_loss": function, "token_inputs": inputs} if function else {}
    tensors, labels = large_operands()
    labels[::3] = -100
    found, peaks = [], []
    for mib in (1 << 14, 160):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with counted(groups, "one_pass") as made_in_groups:
            loss = loss_of(tensors, labels, workspace_bytes=mib << 20, **how)
        found.append((loss, *torch.autograd.grad(loss, tensors)))
        peaks.append(torch.cuda.max_memory_allocated() - before)
        assert made_in_groups.call_count == (mib == 160)
    outputs = sum(grad.nbytes for grad in found[1][1:])
    assert how or peaks[1] <= outputs + (164 << 20) < peaks[0]
    for ours, whole, true in zip(found[1], found[0], dense(tensors, labels, torch.float64, **how), strict=True):
        assert (ours - true).norm() <= 1.3 * (whole - true).norm() + 1e-6 * true.norm()
