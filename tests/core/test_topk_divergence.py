"""KL on K ids of each token against dense logits in float64, and the cases in which a sum over a set is delicate."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.refused import assert_changes_refused
from torch import Tensor

from cce_dist import VocabShard, topk_kl_divergence
from cce_dist.divergence.topk import KINDS, OUTSIDE
from cce_dist.tools.verify.check import compare

N, D, V, K = 9, 8, 30, 6
ROUNDED = 2.0**-23 * 16  # what fp32 leaves of log-probabilities of 16 nats; those here go to 22
any_call: Any = topk_kl_divergence


def assert_near(got: Tensor, rough: Tensor, true: Tensor, quantity: str) -> None:
    """As ``assert_no_worse``, and with the rounding of log-probabilities, which processors leave in different places."""
    found = compare(quantity, got, rough, true, torch.float32)
    assert found.error <= found.bound + ROUNDED * true.abs().max(), found


def draw() -> tuple[Tensor, ...]:
    """Hidden states, weight, bias; the teacher's most likely ids and their log-probabilities; upstream gradients."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, D, generator=generator) for rows in (N, V))
    log_t, ids = (2 * torch.randn(N, V, generator=generator)).log_softmax(-1).topk(K)
    bias, upstream = torch.randn(V, generator=generator), torch.randn(N, generator=generator)
    ids[3, 2:], ids[5] = -100, -100
    log_t[3, 2:] = torch.nan
    return hidden, weight, bias, ids, log_t, upstream


data = pytest.fixture(draw, name="data")


def dense(data: tuple[Tensor, ...], kind: str, outside: str, dtype: torch.dtype) -> list[Tensor]:
    """Value, dE, dC and dbias, token by token, from probabilities."""
    hidden, weight, bias = (x.to(dtype).requires_grad_() for x in data[:3])
    ids, log_t, upstream = data[3:]
    p = (hidden @ weight.t() + bias).div(0.7).softmax(-1)
    values = []
    for row, row_ids, row_t in zip(p, ids, log_t, strict=True):
        chosen = row_ids >= 0
        q, t = row[row_ids[chosen]], row_t[chosen].to(dtype).exp()
        if outside == "renormalise":
            q, t = q / q.sum(), t / t.sum()
        if outside == "tail":
            q, t = (torch.cat((x, 1 - x.sum()[None])) for x in (q, t))
        a, b = (t, q) if kind == "forward" else (q, t)
        values.append((a * (a / b).log()).sum() if chosen.any() else row.sum() * 0)
    value = torch.stack(values)
    return [value.detach(), *torch.autograd.grad((value * upstream).sum(), (hidden, weight, bias))]


def ours(data: tuple[Tensor, ...], shard: VocabShard | None = None, **options: Any) -> list[Tensor]:
    hidden, weight, bias = data[:3]
    rows = slice(None) if shard is None else slice(shard.start, shard.stop)
    leaves = [x.clone().requires_grad_() for x in (hidden, weight[rows], bias[rows])]
    value = any_call(*leaves[:2], *data[3:5], linear_bias=leaves[2], temperature=0.7, shard=shard, **options)
    return [value.detach(), *torch.autograd.grad((value * data[5]).sum(), leaves)]


@pytest.mark.parametrize(("kind", "outside"), list(itertools.product(KINDS, OUTSIDE)))
def test_matches_dense(data, kind: str, outside: str) -> None:
    """Catches a softmax over the set where the whole one is meant, NaN of an id that is not in the set, t and p exchanged."""
    found = ours(data, kind=kind, outside=outside)
    baseline, truth = (dense(data, kind, outside, dtype) for dtype in (torch.float32, torch.float64))
    for name, got, rough, true in zip(("value", "dE", "dC", "dbias"), found, baseline, truth, strict=True):
        assert_near(got, rough, true, name)
    assert found[0][5] == 0 and not found[1][5].any()


def test_extremes_are_finite(data) -> None:
    """A set that holds all of the mass, a teacher's probability of 0, logits of +-80."""
    hidden, weight, bias, ids, _, _ = data
    hidden = (hidden * 40).requires_grad_()
    log_t = torch.full((N, K), -torch.inf)
    log_t[:, 0] = 0.0
    for outside in OUTSIDE:
        value = any_call(hidden, weight, ids, log_t, outside=outside, linear_bias=bias)
        assert value.isfinite().all()
        assert torch.autograd.grad(value.sum(), hidden)[0].isfinite().all()


def test_mask_and_reductions(data) -> None:
    hidden, weight, _, ids, log_t, _ = data
    mask = torch.arange(N) % 2 == 0
    each = any_call(hidden, weight, ids, log_t, mask=mask)
    assert not each[~mask].any()
    counted = mask & (ids >= 0).any(-1)
    for reduction, expected in (("mean", each.sum() / counted.sum()), ("sum", each.sum())):
        torch.testing.assert_close(any_call(hidden, weight, ids, log_t, mask=mask, reduction=reduction), expected)
    assert any_call(hidden, weight, ids, log_t, mask=mask & ~mask, reduction="mean") == 0


@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [64, 4000])
def test_a_teacher_rounded_to_16_bits_is_one(dtype: torch.dtype, k: int, outside: str) -> None:
    """Even probabilities, whose rounded logarithms are all too large. Catches: a bound that does not know of thousands."""
    hidden, weight = torch.randn(2, D), torch.randn(k + 5, D)
    ids = torch.arange(k).expand(2, -1)
    exact = torch.full((2, k), -float(k)).abs().log().neg()
    spread = torch.finfo(dtype).eps / 2.01 * exact.abs()  # the largest error that rounding may have
    largest = exact + spread if dtype == torch.bfloat16 else exact
    for log_t in (exact.to(dtype), exact.to(dtype).float(), largest.float()):
        value = any_call(hidden, weight, ids, log_t, outside=outside)
        assert value.isfinite().all()
        if outside == "renormalise":
            expected = -(hidden @ weight.t())[:, :k].double().log_softmax(-1).mean(-1) - torch.tensor(float(k)).log()
            torch.testing.assert_close(value.double(), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="sum is above 1"):
        any_call(hidden, weight, ids, exact + 0.05, outside=outside)


def _on_ranks() -> None:
    data, shard = draw(), VocabShard.even(V, dist.group.WORLD)
    for kind, outside in (("forward", "tail"), ("reverse", "renormalise")):
        found, truth = ours(data, shard, kind=kind, outside=outside), dense(data, kind, outside, torch.float64)
        baseline, rows = dense(data, kind, outside, torch.float32), slice(shard.start, shard.stop)
        for number, (got, rough, true) in enumerate(zip(found, baseline, truth, strict=True)):
            mine = rows if number > 1 else slice(None)
            assert_near(got, rough[mine], true[mine], f"{kind}, {number}")


def test_two_ranks(ranks2: Callable) -> None:
    ranks2(_on_ranks)


BAD = [
    (dict(kind="jsd"), ValueError, "kind must be one of"),
    (dict(outside="rest"), ValueError, "outside must be one of"),
    (dict(teacher_ids=torch.zeros(N, K)), TypeError, "teacher_ids must be int64"),
    (dict(teacher_log_probs=torch.zeros(N, K + 1)), ValueError, "teacher_log_probs must be .9, 6"),
    (dict(teacher_log_probs=torch.zeros(N, K).int()), TypeError, "floating-point dtype"),
    (dict(teacher_ids=torch.zeros(N).long()), ValueError, r"teacher_ids must be \[\.\.\., K\]"),
    (dict(teacher_ids=torch.zeros(N, K).long()), ValueError, r"teacher_ids has an id twice at token 0 "),
    (dict(teacher_log_probs=torch.ones(N, K)), ValueError, r"teacher_log_probs has .* above 0 at token 0 "),
    (dict(teacher_log_probs=-torch.ones(N, K)), ValueError, r"teacher_log_probs has .* sum is above 1 at token 0 "),
    (dict(mask=torch.ones(N)), TypeError, "mask must be bool"),
    (dict(mask=torch.ones(N, K, dtype=torch.bool)), ValueError, r"mask must be \(9,\)"),
]


def test_bad_input_is_one_line(data) -> None:
    hidden, weight, _, ids, log_t, _ = data
    arguments = dict(input=hidden, linear_weight=weight, teacher_ids=ids, teacher_log_probs=log_t)
    assert_changes_refused(any_call, arguments, BAD)


@pytest.mark.parametrize(("kind", "outside"), list(itertools.product(KINDS, OUTSIDE)))
def test_nan_stays_nan(data, kind: str, outside: str) -> None:
    """Of the token that has it alone, in the student's hidden state or in the teacher's numbers."""
    data[0][0], data[4][1, 0] = torch.nan, torch.nan
    value, d_hidden, *_ = ours(data, kind=kind, outside=outside)
    assert value[:2].isnan().all() and value[2:].isfinite().all()
    assert d_hidden[0].isnan().all() and d_hidden[2:].isfinite().all()


def test_what_is_no_softmax_is_nan_where_it_is_not_read(data, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, of such a token alone."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    hidden, weight, _, ids, log_t, _ = data
    ids[0, 1], log_t[1, 0] = ids[0, 0], 1.0
    value = any_call(hidden, weight, ids, log_t, outside="tail")
    assert value[:2].isnan().all() and value[2:].isfinite().all()
