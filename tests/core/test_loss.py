"""The public call on one process: the contract's edges, and torch's own function. test_verify.py has the matrix."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shards import nan_memory
from support.dense import assert_holds, draw
from tiny_trainer import counted
from torch import Tensor

from cce_dist import GradFilter, LinearCrossEntropyOutput, VocabParallelHead, groups, linear_cross_entropy, reference
from cce_dist.autograd import build, flat
from cce_dist.call import AUX, Call
from cce_dist.kernels import Filter, ShardLogits, Spec, Want, memory
from cce_dist.tools.verify.cases import BF16, CASES, FP32, Gaussian, LogProbCase, LossCase, ignore
from cce_dist.tools.verify.check import assert_no_worse
from cce_dist.tools.verify.log_probs import LOG_PROBS
from cce_dist.tools.verify.loss import LOSS

N, D, V = 19, 16, 101
OPS = []
if hasattr(F, "linear_cross_entropy"):
    from torch.testing._internal.common_methods_invocations import op_db

    OPS = [op for op in op_db if op.name.endswith("linear_cross_entropy")]


data = pytest.fixture(lambda: draw(N, D, V), name="data")


@pytest.mark.parametrize("name", ["padded-shards", "filter-padded-shards", "everything", "filter-softcap"])
def test_what_does_not_count_may_hold_anything(name: str) -> None:
    """Padding rows, and hidden states of ignored tokens. Catches 0 times NaN where a matrix is multiplied whole."""
    case = replace(next(case for case in CASES if case.name == name), padding=torch.nan, hidden_of_ignored=torch.nan)
    assert_holds(LOSS, case, device="cpu", backend="auto")


def test_names_of_aux_are_the_outputs():
    assert LinearCrossEntropyOutput._fields[1:] == AUX


@pytest.mark.slow
def test_compiles_as_one_graph(data):
    """Catches a graph break. ``opcheck`` below compares the fakes with the operators, so nothing has to be generated here."""
    hidden, _, target = data
    options = {"softcap": 8.0, "label_smoothing": 0.1, "return_aux": True}
    body, head = torch.nn.Linear(D, D), VocabParallelHead(D, V, grad_filter=GradFilter(always=True), **options)
    parameters = [*body.parameters(), *head.parameters()]

    def loss(x, y):
        return head(body(x), y)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for count in (N, N - 5):  # another number of tokens, too
        found, right = (function(hidden[:count], target[:count]) for function in (compiled, loss))
        torch.testing.assert_close((found.loss, found.entropy), (right.loss, right.entropy))
        torch.testing.assert_close(*(torch.autograd.grad(out.loss, parameters) for out in (found, right)))


@pytest.mark.parametrize("tensors", ["", "bias"])
def test_operators_pass_torchs_own_check(data, tensors: str):
    hidden, weight, target = data
    head = [torch.randn(V, requires_grad=True)] if tensors else []
    want = Want(uniform=True, entropy=True, largest=True)
    logits = ShardLogits(0, V, tensors=tensors)
    call = Call(Spec(logits, V, filter=Filter(2.0**-12, always=True), want=want, workspace_bytes=1 << 20))
    assert build(Call, iter(flat(call))) == call
    torch.library.opcheck(torch.ops.cce_dist.forward.default, (hidden, weight, head, target, None, *flat(call), None))


def test_named_outputs_alone_are_computed(data):
    """Catches an entropy that is paid for unasked, and a token accuracy that is not that of the logits."""
    hidden, weight, target = data
    target = target.clone()
    logits = hidden @ weight.T
    target[:3] = logits[:3].argmax(1)
    target[3:5] = -100
    out = linear_cross_entropy(hidden, weight, target, return_aux=["label_is_max", "nll"])
    assert out.entropy is None and out.label_is_max is not None
    assert torch.equal(out.label_is_max, (target == logits.argmax(1)).float())
    assert out.label_is_max[:3].all() and not out.label_is_max[3:5].any() and not out.label_is_max.requires_grad
    assert out.max_logit is not None and not out.max_logit[3:5].any()
    torch.testing.assert_close(out.max_logit[5:], logits.amax(1)[5:].detach())
    only_nll = linear_cross_entropy(hidden, weight, target, return_aux=("nll",))
    assert only_nll.max_logit is None and torch.equal(only_nll.loss, out.loss)


def test_environment_overrides_auto(data, monkeypatch):
    monkeypatch.setenv("CCE_DIST_BACKEND", "fast")
    with pytest.raises(ValueError, match="CCE_DIST_BACKEND"):
        linear_cross_entropy(*data)


def test_workspace_bounds_the_blocks_of_logits():
    for num_tokens, num_rows, workspace in ((8192, 256000, 256 << 20), (1 << 20, 32064, 256 << 20), (5, 7, 1)):
        rows, cols = memory.dense_block(num_tokens, num_rows, workspace)
        least = 4 * memory.BLOCK_N * memory.BLOCK_V * memory.LIVE_BLOCKS
        assert 4 * rows * cols * memory.LIVE_BLOCKS <= max(workspace, least)
        assert 1 <= rows <= num_tokens and 1 <= cols <= num_rows


def test_head_gives_logits_and_loss_and_ties():
    torch.manual_seed(1)
    embedding = torch.nn.Embedding(V, D)
    assert isinstance(embedding.weight, torch.nn.Parameter)
    head = VocabParallelHead(D, V, weight=embedding.weight, softcap=4.0, bias=True)
    hidden, labels = torch.randn(2, 3, D), torch.randint(V, (2, 3))
    logits = head(hidden)
    assert logits.shape == (2, 3, V) and logits.abs().max() <= 4.0
    expected = F.cross_entropy(logits.view(-1, V), labels.view(-1))
    assert_no_worse(head(hidden, labels), expected, expected.double())
    head(hidden, labels).backward()
    assert embedding.weight.grad is not None and head.weight is embedding.weight
    with pytest.raises(ValueError, match="tied weight"):
        VocabParallelHead(D + 1, V, weight=embedding.weight)


def test_a_columns_own_row_is_in_the_specification() -> None:
    """Where draws of tokens find nothing of dC, a multiple of the weight's own row is added. Catches a reference without it."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (scale * torch.randn(rows, 384, generator=generator) for rows, scale in ((300, 1.0), (1024, 0.02)))
    labels = (torch.rand(300, generator=generator) ** 8 * 1024).long()
    bias = -torch.arange(1, 1025).float().log()
    ours = weight.clone().requires_grad_()
    how = GradFilter(eps=2**-7)
    loss = linear_cross_entropy(
        hidden, ours, labels, linear_bias=bias, reduction="sum", grad_filter=how, backend="torch"
    )
    found = []
    for dtype in (torch.float64, torch.float32):
        x, w, b, ones = (tensor.to(dtype) for tensor in (hidden, weight, bias, torch.ones(300)))
        found.append(reference.filtered_gradients(x, w, labels, ones, how, [0], linear_bias=b)[1])
    truth, baseline = found
    assert_no_worse(torch.autograd.grad(loss, ours)[0], baseline, truth, torch.float32, "dC")


def values(call: Any, input: Tensor, *args: Any, **options: Any) -> list[Tensor | None]:
    """Return a call's loss and its gradients, of weights other than 1 for losses of a token each."""
    leaves = [x for x in (input, *args, *options.values()) if isinstance(x, Tensor) and x.requires_grad]
    loss = call(input, *args, **options)
    upstream = torch.linspace(1, 2, loss.numel(), dtype=loss.dtype).view(loss.shape)
    return [loss, *torch.autograd.grad(loss, leaves, upstream, allow_unused=True)]


@pytest.mark.skipif(not OPS, reason="this torch has no linear_cross_entropy")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_torchs_own_samples(dtype: torch.dtype) -> None:
    """All samples with a [V, D] weight and class ids; the others are refused."""
    num_equal = 0
    for op in OPS:
        for sample in op.sample_inputs("cpu", dtype, requires_grad=True):
            weight, target = sample.args[:2]
            if weight.dim() != 2 or target.is_floating_point():
                with pytest.raises((ValueError, TypeError)):
                    linear_cross_entropy(sample.input, *sample.args, **sample.kwargs)
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch says where it ignores ``options``
                wanted = values(op.op, sample.input, *sample.args, **sample.kwargs)
            ours = values(linear_cross_entropy, sample.input, *sample.args, **sample.kwargs)
            torch.testing.assert_close(ours, wanted)
            num_equal += 1
    assert num_equal > 50


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum-smoothing": {"reduction": "sum", "label_smoothing": 0.1},
    "none-softcap-z": {"reduction": "none", "softcap": 3.0, "z_loss_weight": 0.1},
    "scale-divisor": {"logit_scale": 0.7, "num_tokens": 5},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradcheck(options: dict[str, Any]) -> None:
    """Catches a sum or a statistic of the torch backend that is not in float64."""
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(shape, dtype=torch.float64) for shape in ((6, 4), (9, 4), (9,)))
    labels = torch.tensor([0, 8, -100, 3, 3, 5])
    given = [x.requires_grad_() for x in (hidden, weight, bias)]
    assert torch.autograd.gradcheck(lambda h, w, b: linear_cross_entropy(h, w, labels, linear_bias=b, **options), given)


def test_float64_is_served_by_the_loss_on_the_torch_backend_alone() -> None:
    hidden, weight, labels = torch.randn(6, 4).double(), torch.randn(9, 4).double(), torch.arange(6)
    weights = torch.rand(9).double()
    loss = linear_cross_entropy(hidden, weight, labels, weight=weights, label_smoothing=0.1)
    torch.testing.assert_close(loss, F.cross_entropy(hidden @ weight.T, labels, weights, label_smoothing=0.1))
    filtered = linear_cross_entropy(hidden.requires_grad_(), weight, labels, grad_filter=GradFilter(always=True))
    assert torch.autograd.grad(filtered, hidden)[0].dtype == filtered.dtype == torch.float64
    with pytest.raises(TypeError, match="float64, which the torch backend alone takes"):
        linear_cross_entropy(hidden, weight, labels, backend="triton")


@pytest.mark.parametrize(
    ("rows", "divisor", "is_compiled"), [(4, 7, False), (4, None, True), (None, 7, True), (None, None, False)]
)
def test_float64_in_groups_and_in_a_graph(rows: int | None, divisor: int | None, is_compiled: bool) -> None:
    """Catches a fake that promises fp32, and the reciprocal of a divisor in fp32, which is off by 3e-8."""
    hidden, weight, labels = torch.randn(6, 4).double(), torch.randn(9, 4).double(), torch.arange(6)
    x, w = hidden.requires_grad_(), weight.requires_grad_()
    ours: Any = linear_cross_entropy
    if is_compiled:
        ours = torch.compile(ours, backend="aot_eager", fullgraph=True)
    with groups.of_rows(rows):
        loss = ours(x, w, labels, num_tokens=divisor)
    wanted = F.cross_entropy(x @ w.T, labels, reduction="sum") / (divisor or 6)
    found, right = ((value, *torch.autograd.grad(value, (x, w))) for value in (loss, wanted))
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-13)


def test_float64_upstream_gradients_that_differ_in_the_ninth_digit() -> None:
    """Catches fp32's rounding as the measure of a common factor, and expected weights in fp32."""
    x, w = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((6, 4), (9, 4)))
    labels, upstream = torch.arange(6), torch.linspace(1, 2, 6, dtype=torch.float64)
    apart = 1 + 1e-9 * torch.arange(6).double()
    wanted = torch.autograd.grad(F.cross_entropy(x @ w.T, labels, reduction="none"), (x, w), upstream * apart)
    for expected in (upstream, upstream * apart):
        with groups.of_rows(4):
            loss = linear_cross_entropy(x, w, labels, reduction="none", expected_weights=expected)
        found = torch.autograd.grad(loss, (x, w), upstream * apart)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)


SMALL = Gaussian(37, 24, 100, bias=True)
A_GROUP_WITHOUT_LABELS = Gaussian(37, 24, 100, bias=True, labels=ignore(slice(0, 16)))
NO_BIAS = Gaussian(37, 24, 100)


def case_of(name: str, problem: Any = NO_BIAS, options: dict[str, Any] | None = None, **fields: Any) -> LossCase:
    return LossCase(name, options=options or {}, problem=problem, dtype=BF16, twice=False, **fields)


SMOOTHED = dict(label_smoothing=0.1, z_loss_weight=torch.tensor(0.1), logit_scale=0.7)
IN_BF16 = [
    LogProbCase("log-probs", problem=NO_BIAS, dtype=BF16, num_ids=3, twice=False),
    case_of("kept"),
    case_of("groups", in_groups=15, low=True),
    case_of("groups-in-a-buffer", in_groups=15, low=True, buffer=FP32),
    case_of("every-option", SMALL, dict(label_smoothing=0.1, z_loss_weight=0.1, softcap=3.0, logit_scale=0.7)),
    case_of("every-option-in-groups", A_GROUP_WITHOUT_LABELS, SMOOTHED, in_groups=15),
    case_of("softcap-in-groups", A_GROUP_WITHOUT_LABELS, dict(reduction="sum", softcap=3.0), in_groups=15, scale=0.3),
    case_of("divisor-in-groups", A_GROUP_WITHOUT_LABELS, dict(num_tokens=33), in_groups=15, num_tokens=torch.int64),
    case_of("made-again", SMALL, dict(workspace_bytes=1)),
    case_of("each-token", NO_BIAS, dict(reduction="none")),
    case_of("classes", NO_BIAS, in_groups=15, classes=True),
    case_of("a-loss-of-tokens", NO_BIAS, in_groups=15, token_loss="policy"),
    case_of("filter", SMALL, dict(grad_filter=GradFilter(always=True))),
]


@pytest.mark.parametrize("case", IN_BF16, ids=[case.name for case in IN_BF16])
def test_bf16_matches_dense(case: LossCase | LogProbCase) -> None:
    """The default path, compiled or interpreted: in bf16 alone exponentials are kept, gradients are made in forward group by
    group, and dC may hold 8 more bits.

    Catches: rounding of an exponential, of a group's part of dC, or of a sum that fp32 hides; of groups an upstream gradient
    left out, a divisor of the group's own tokens, weights of another group's classes, and a group that sets dC; gradients of a
    log-probability and of an entropy that read exponentials of another tile."""
    function: Any = LOSS if isinstance(case, LossCase) else LOG_PROBS
    with nan_memory(), counted(groups, "one_pass") as one_pass:
        assert_holds(function, case)
    assert one_pass.called == (getattr(case, "in_groups", None) is not None)
