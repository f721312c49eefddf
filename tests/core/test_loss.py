"""The public call on one process: the contract's edges. The matrix of options is in test_verify.py."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from shards import nan_memory
from support.dense import assert_holds, draw
from tiny_trainer import counted

from cce_dist import GradFilter, LinearCrossEntropyOutput, VocabParallelHead, groups, linear_cross_entropy, reference
from cce_dist.autograd import build, flat
from cce_dist.call import AUX, Call
from cce_dist.kernels import Filter, ShardLogits, Spec, Want, memory
from cce_dist.tools.verify.cases import BF16, CASES, FP32, Gaussian, LogProbCase, LossCase, ignore
from cce_dist.tools.verify.check import assert_no_worse
from cce_dist.tools.verify.log_probs import LOG_PROBS
from cce_dist.tools.verify.loss import LOSS

N, D, V = 19, 16, 101


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
    expected = torch.nn.functional.cross_entropy(logits.view(-1, V), labels.view(-1))
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
