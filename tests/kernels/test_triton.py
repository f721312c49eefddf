"""The Triton kernels against dense torch in float64: interpreted on the CPU, compiled on a GPU by the same command."""

import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from shards import DEVICE, GPU, Problem, launch_nothing, nan_memory, needs_gpu, upstream_of
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cce_dist import GradFilter, op, reference
from cce_dist.autograd import flat
from cce_dist.call import Call
from cce_dist.kernels import (
    IGNORED,
    OUTSIDE,
    Filter,
    Grads,
    Operands,
    Rows,
    ShardLogits,
    Softmax,
    Spec,
    Upstream,
    Want,
    d_hidden,
    direct,
    dry_run,
    exact,
    losses,
    memory,
    tiles,
    tokens,
)
from cce_dist.kernels import dense as dense_backend
from cce_dist.kernels.dry_run import Live
from cce_dist.merge import Layout
from cce_dist.tools.verify.check import assert_no_worse

KEPT_IN = torch.bfloat16 if GPU else torch.float32
DTYPES = [torch.float32, *([torch.bfloat16] if GPU else [])]  # the interpreter misreads bf16


class Case(NamedTuple):
    """A shard and what is asked of it. ``cached`` columns keep their exponentials; ``budget`` is workspace_bytes."""

    num_tokens: int = 37
    hidden_size: int = 24
    num_rows: int = 100
    num_valid: int | None = None
    start: int = 0
    ids: int | None = None  # labels are below this; default: all rows
    ignored: float = 0.3
    spread: float = 1.0
    offset: float = 0.0
    bias: bool = False
    logit_scale: float = 1.0
    softcap: float = 0.0
    uniform: bool = False
    entropy: bool = False
    cached: int = 0
    budget: int = 1 << 40


def sized(**fields) -> Case:
    """A case written for the interpreter's tiles (16 x 32 x 16), at the size that meets the same edges of a GPU's."""
    case = Case(**fields)
    if not GPU:
        return case
    grow = dict.fromkeys(("num_tokens", "num_rows", "num_valid", "start", "ids", "cached"), 8)
    grow, old = grow | {"hidden_size": 4, "budget": 64}, case._asdict()
    return case._replace(**{name: old[name] * by for name, by in grow.items() if (old[name] or 0) > 1})


PADDED: dict[str, Any] = {"start": 50, "num_valid": 77, "ids": 300}
CASES = [
    pytest.param(sized(num_tokens=32, hidden_size=32, num_rows=128, ignored=0.0), id="whole-tiles"),
    pytest.param(sized(), id="tails-of-all-axes"),
    pytest.param(sized(hidden_size=19, num_rows=101), id="rows-no-descriptor-can-describe"),
    pytest.param(sized(offset=-30.0), id="tail-negative-logits"),  # a phantom column at 0 would be the maximum
    pytest.param(sized(num_tokens=1, ignored=0.0), id="one-token"),
    pytest.param(sized(num_rows=1, ids=1), id="one-row"),
    pytest.param(sized(bias=True, logit_scale=0.7, softcap=3.0), id="bias-scale-softcap"),
    pytest.param(sized(**PADDED), id="padded-shard-in-the-middle"),
    pytest.param(sized(**PADDED, uniform=True, entropy=True, bias=True), id="smoothing-entropy"),
    pytest.param(sized(softcap=5.0, uniform=True, entropy=True, num_valid=90), id="softcap-smoothing-entropy"),
    pytest.param(sized(softcap=1e4), id="softcap-1e4"),  # 1 - exp(-2 u / softcap) would cancel
    pytest.param(sized(softcap=1e6), id="softcap-1e6"),
    pytest.param(sized(softcap=1e38), id="softcap-1e38"),
    pytest.param(sized(spread=100.0), id="gaps-of-hundreds"),
    pytest.param(sized(offset=1e4, bias=True), id="all-at-1e4"),
    pytest.param(sized(offset=-1e4, bias=True, entropy=True), id="all-at-minus-1e4"),
    pytest.param(sized(budget=6000), id="chunks-of-the-vocabulary"),
    pytest.param(sized(num_tokens=300, ignored=0.7, budget=2000), id="groups-of-tokens"),
    pytest.param(sized(num_tokens=300, ignored=0.7, budget=2000, bias=True, entropy=True), id="groups-with-bias"),
]
IN_FP16 = """tails-of-all-axes rows-no-descriptor-can-describe bias-scale-softcap smoothing-entropy all-at-1e4
chunks-of-the-vocabulary groups-with-bias"""
CACHED = [
    pytest.param(sized(cached=128), id="all"),
    pytest.param(sized(cached=64, budget=12000, bias=True), id="a-part"),
    pytest.param(sized(cached=128, **PADDED, bias=True), id="padded-shard-in-the-middle"),
    pytest.param(sized(cached=128, bias=True, logit_scale=0.5, softcap=3.0), id="bias-scale-softcap"),
    pytest.param(sized(cached=128, spread=300.0), id="references-to-level"),
    pytest.param(sized(cached=128, offset=-1e4, bias=True), id="all-at-minus-1e4"),
    pytest.param(sized(cached=128, uniform=True, bias=True, logit_scale=0.5), id="smoothing"),
    pytest.param(sized(cached=64, budget=12000, bias=True, uniform=True, entropy=True), id="smoothing-entropy-in-part"),
    pytest.param(sized(cached=128, **PADDED, uniform=True), id="smoothing-of-a-padded-shard"),
    pytest.param(sized(cached=128, entropy=True), id="entropy"),
    pytest.param(sized(cached=64, budget=12000, bias=True, logit_scale=0.5, entropy=True), id="entropy-of-a-part"),
    pytest.param(sized(cached=128, spread=100.0, entropy=True), id="entropy-with-references-to-level"),
    pytest.param(sized(cached=128, **PADDED, offset=-1e4, bias=True, entropy=True), id="entropy-of-a-padded-shard"),
]


class Truth(NamedTuple):
    stats: Tensor
    merged: tuple[Tensor, Tensor, Tensor]
    d_hidden: Tensor
    d_weight: Tensor
    d_bias: Tensor


def problem(case: Case, dtype: torch.dtype) -> Problem:
    hidden = torch.randn(case.num_tokens, case.hidden_size)
    weight = torch.randn(case.num_rows, case.hidden_size) * case.spread / case.hidden_size**0.5
    bias = torch.randn(case.num_rows) if case.bias else None
    if bias is not None:
        bias += case.offset
    elif case.offset:
        hidden[:, 0], weight[:, 0] = 8.0, case.offset / 8
    labels = torch.randint(0, case.ids or case.num_rows, (case.num_tokens,))
    labels[torch.rand(case.num_tokens) < case.ignored] = -100
    coef = torch.rand(4, case.num_tokens) / case.num_tokens
    coef[1] = -coef[0]
    coef[2] *= -0.1 / case.num_rows if case.uniform else 0.0
    coef[3] *= 1.0 if case.entropy else 0.0
    coef[:, labels < 0] = 0.0
    num_valid = case.num_rows if case.num_valid is None else case.num_valid
    weight[num_valid:] = torch.nan  # padding rows are not read
    logits = ShardLogits(case.start, num_valid, case.logit_scale, case.softcap)
    # a bias beyond fp16's integers cannot be rounded to it without changing the case
    bias = None if bias is None else bias.to(DEVICE, torch.float32 if case.offset else dtype)
    return Problem(hidden.to(DEVICE, dtype), weight.to(DEVICE, dtype), bias, labels.to(DEVICE), logits, coef.to(DEVICE))


def dense(p: Problem, case: Case, dtype: torch.dtype) -> Truth:
    """The same by the reference and autograd: matmuls in ``dtype``, everything between them in at least fp32."""
    num_valid, wide = p.logits.num_valid, torch.promote_types(dtype, torch.float32)
    leaves = [x.to(dtype).requires_grad_() for x in (p.hidden, p.weight[:num_valid])]
    bias = torch.zeros(num_valid, device=DEVICE) if p.bias is None else p.bias[:num_valid]
    leaves.append(bias.to(wide).requires_grad_())
    # The bias is added in fp32, as kernels add it.
    z = p.logits.logit_scale * (reference.logits(leaves[0], leaves[1]) + leaves[2])
    z = p.logits.softcap * torch.tanh(z / p.logits.softcap) if p.logits.softcap else z
    column = p.labels - p.logits.start
    here = (p.labels >= 0) & (column >= 0) & (column < num_valid)
    of_tokens = reference.cross_entropy(z, torch.where(here, column, 0), reduction="none")
    outputs: Any = of_tokens.lse, here * of_tokens.target_logit, z.sum(1), of_tokens.entropy
    grads = torch.autograd.grad((p.coef.to(wide) * torch.stack(outputs)).sum(), leaves)

    assert of_tokens.max_logit is not None and of_tokens.entropy is not None
    below = z.detach() - of_tokens.max_logit[:, None]
    exp = below.exp()
    rows = [of_tokens.max_logit, exp.sum(1), outputs[1].detach()]
    rows += [-below.sum(1), torch.full_like(rows[0], num_valid)] if case.uniform else []
    rows += [(exp * below).sum(1)] if case.entropy else []
    merged = rows[0].float(), rows[1].log().float(), of_tokens.entropy.detach().float()
    padding = (0, 0, 0, len(p.weight) - num_valid)
    return Truth(torch.stack(rows), merged, grads[0], F.pad(grads[1], padding), F.pad(grads[2], padding[2:]))


def spec_of(p: Problem, case: Case) -> Spec:
    want = Want(uniform=case.uniform, entropy=case.entropy)
    return Spec(p.logits, case.ids or case.num_rows, want=want, workspace_bytes=case.budget, alone=True)


def local_stats(p: Problem, case: Case) -> tuple[Tensor, ...]:
    """The statistics, and what is saved; ``case`` says how many columns keep their exponentials, in any dtype."""
    with mock.patch.object(exact, "saved_columns", lambda *_: case.cached):
        stats, saved = exact.statistics(p.operands, None, spec_of(p, case))
    return stats, *saved


def gradients(p: Problem, case: Case, merged: tuple[Tensor, ...], saved: Sequence[Tensor], **how: Any) -> Any:
    softmax = Softmax(*merged[: 2 + case.entropy])
    grads = Grads(want_bias=p.bias is not None)._replace(**how)
    spec = spec_of(p, case)
    return exact.gradients(p.operands, softmax, upstream_of(p.coef, spec.vocab_size), list(saved), grads, spec)


def prepared(case: Case, dtype: torch.dtype = KEPT_IN) -> tuple[Problem, tuple[Tensor, ...], list[Tensor]]:
    """A problem, its softmax's numbers by dense torch, and what forward saves for backward."""
    p = problem(case, dtype)
    return p, dense(p, case, torch.float64).merged, list(local_stats(p, case)[1:])


def both(p: Problem, case: Case, merged: tuple[Tensor, ...] | None = None) -> list[Tensor]:
    """The statistics, d_hidden, d_weight, and d_bias if there is one; without ``merged`` from the statistics themselves."""
    stats, *cache = local_stats(p, case)
    grads = gradients(p, case, merged or (stats[0], stats[1].log()), cache)
    return [stats, *(grad for grad in grads if grad is not None)]


def same_bits(ours: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, other, strict=True))


@pytest.fixture(autouse=True)
def _nan_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fill what torch.empty returns, and let budgets of a few kilobytes count."""
    monkeypatch.setattr(memory, "LEAST_BYTES", 1 << 10)
    with nan_memory():
        yield


MATCHED = [
    *(pytest.param(*case.values, dtype, id=f"{case.id}-{dtype}") for case in CASES for dtype in DTYPES),
    *(pytest.param(*case.values, torch.float16, id=f"{case.id}-fp16") for case in CASES if case.id in IN_FP16.split()),
    *(pytest.param(*case.values, KEPT_IN, id=f"{case.id}-kept") for case in CACHED),
]


@pytest.mark.parametrize(("case", "dtype"), MATCHED)
def test_matches_dense(case: Case, dtype: torch.dtype) -> None:
    """Catches: the vocabulary mask removed, a bias or scale left out or added per chunk, a chunk's edge off by a tile, the
    softcap's slope left out, sums not moved when the maximum moves, the maximum floored at 0; in fp16 a descriptor of another
    dtype, a sum that is made in 16 bits. Of kept exponentials: rows left with two references, the label's cell or its slope not
    written, the scale put on the rows of the recomputed part, the remainder of d_hidden dropped between the two parts; 0 times
    the logarithm of 0, an entropy whose logarithm is relative to another number than log p, a label's cell written before the
    others."""
    p = problem(case, dtype)
    truth, baseline = dense(p, case, torch.float64), dense(p, case, dtype)
    stats, *cache = local_stats(p, case)
    kept = p.labels >= 0
    for row in range(len(stats)):
        # products of 16-bit numbers are exact in fp32, whatever the dtype: so are the statistics
        exact = dense(p, case, torch.float32)
        assert_no_worse(stats[row, kept], exact.stats[row, kept], truth.stats[row, kept], torch.float32, f"row {row}")
    assert stats.isfinite().all()
    # the shard is the whole vocabulary: its own statistics are the merged ones
    d_hidden, d_weight, d_bias = gradients(p, case, (stats[0], stats[1].log(), truth.merged[2]), cache)
    assert_no_worse(d_hidden, baseline.d_hidden, truth.d_hidden, dtype, "d_hidden")
    assert_no_worse(d_weight, baseline.d_weight, truth.d_weight, dtype, "d_weight")
    if d_bias is not None:
        # sums of dlogits as they were rounded for the products
        assert_no_worse(d_bias, baseline.d_bias.to(dtype), truth.d_bias, dtype, "d_bias")
    assert (d_hidden[~kept] == 0).all()
    assert (d_weight[p.logits.num_valid :] == 0).all()


@pytest.mark.parametrize("with_entropy", [False, True])
def test_cached_label_beside_no_probability(with_entropy: bool) -> None:
    """A label's gradient where P p is nothing: P = 0, or another shard far above this one. Catches: the least scale removed,
    0 by 0 where neither P nor the entropy has a gradient."""
    case = sized(cached=128, ignored=0.0, entropy=with_entropy)
    p, (maximum, log_sum, entropy), cache = prepared(case)
    p.coef[0, ::2] = p.coef[3, ::4] = 0.0
    d_hidden, d_weight, _ = gradients(p, case, (maximum + 1e4, log_sum, entropy), cache)
    label_only = torch.zeros(len(p.hidden), len(p.weight), dtype=torch.float64, device=DEVICE)
    label_only[torch.arange(len(p.hidden)), p.labels] = p.coef[1].double()
    for ours, grad, factor in ((d_hidden, label_only, p.weight), (d_weight, label_only.T, p.hidden)):
        assert_no_worse(ours, grad.to(factor.dtype) @ factor, grad @ factor.double(), factor.dtype)


@pytest.mark.parametrize(("cached", "entropy"), [(0, True), (64, False), (64, True), (128, True)])
def test_second_backward_has_the_same_bits(cached: int, entropy: bool) -> None:
    """Also after one with other coefficients, and one that differentiates no entropy. Catches: the cache turned into gradients
    in place, and not made anew."""
    case = sized(cached=cached, budget=12000, entropy=entropy)
    p, merged, cache = prepared(case)
    results = []
    for each in (p, p._replace(coef=3 * p.coef), p):
        results.append([grad for of in (merged, merged[:2]) for grad in gradients(each, case, of, cache)[:2]])
    assert same_bits(results[0], results[2])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"bias": True}, id="plain"),
        pytest.param({"spread": 300.0}, id="references-to-level"),
        pytest.param({"entropy": True, "spread": 100.0}, id="entropy"),
        pytest.param({**PADDED, "logit_scale": 0.5, "softcap": 3.0}, id="padded-shard"),
    ],
)
def test_exponentials_of_groups_have_the_same_bits(options: dict[str, Any], monkeypatch) -> None:
    """A budget that has room for the hidden states of some tokens alone. Catches: exponentials or references of a group that
    are written where another's are, a group left out, or made anew in others than forward's."""
    monkeypatch.setattr(memory, "SAVED_ROWS", 512 if GPU else 64)
    whole = sized(num_tokens=100, cached=128, **options)
    p, groups = problem(whole, KEPT_IN), whole._replace(budget=1)
    made = mock.Mock(wraps=exact._keep_exponentials)
    monkeypatch.setattr(exact, "_keep_exponentials", made)
    merged, results = dense(p, whole, torch.float64).merged, []
    for case in (whole, groups):
        stats, *cache = local_stats(p, case)
        results.append([stats, *(grad for _ in range(2) for grad in gradients(p, case, merged, cache)[:2])])
    counts = {len(call.args[1].index) for call in made.call_args_list}
    assert len(counts) == 3, "all tokens, whole groups and a last one"
    assert same_bits(*results)


@pytest.mark.parametrize(
    "options",
    [
        {"bias": True},
        {"entropy": True},
        {"num_valid": 90, "spread": 300.0},
        {"bias": True, "budget": 6000, "cached": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("into", [False, True])
def test_where_gradients_lie_and_who_waits(options: dict[str, Any], into: bool) -> None:
    """The same bits whether somebody waits for d_hidden, which then comes first, or its storage has the rows that d_weight is
    made of. Catches: d_weight made of rows that are overwritten, and such a row left to a token without a label; hidden_ready
    called per chunk, or before the last chunk's part is in; a buffer that is set instead of added to, or gets d_weight rounded
    to the weight's dtype."""
    case = sized(**{"num_tokens": 70, "ignored": 0.5, "cached": 128, **options})
    p, merged, cache = prepared(case)
    before = torch.randn(p.weight.shape, device=DEVICE) * 1e-3
    results, seen = [], []
    for ready in (None, lambda d_hidden: seen.append(d_hidden.clone())):
        buffer = before.clone() if into else None
        found = gradients(p, case, merged, cache, hidden_ready=ready, weight_out=buffer)
        assert (found[1] is None) == into
        results.append([grad for grad in (*found, buffer) if grad is not None])
    assert same_bits(*results) and len(seen) == 1
    assert torch.equal(results[0][0], seen[0]) and (seen[0][p.labels < 0] == 0).all()
    if into:
        baseline, truth = (before + dense(p, case, dtype).d_weight for dtype in (p.hidden.dtype, torch.float64))
        if "spread" not in options:  # logits of 1,000 are rounded to 1e-4, wherever the gradient goes
            assert_no_worse(results[0][-1], baseline, truth, torch.float32)
        return
    for number, whole in enumerate(results[0]):
        flags = {f"want_{name}": place == number for place, name in enumerate(("hidden", "weight", "bias"))}
        part = gradients(p, case, merged, cache, **flags)
        assert [grad is not None for grad in part] == list(flags.values()) and torch.equal(part[number], whole)


@pytest.mark.parametrize("cached", [0, 128])
def test_ignored_tokens_do_not_matter(cached: int) -> None:
    """Wherever they stand and whatever they hold, bit for bit. Catches: an ignored row that enters a product, a gather in
    another order."""
    case = sized(num_tokens=70, ignored=0.6, cached=cached)
    p = problem(case, KEPT_IN)
    p.hidden[p.labels < 0] = torch.nan
    kept = p.labels >= 0
    order = torch.cat((kept.nonzero()[:, 0], (~kept).nonzero()[:, 0]))
    hidden, coef = p.hidden[order].nan_to_num(1.0), p.coef[:, order].contiguous()
    last = p._replace(hidden=hidden, labels=p.labels[order], coef=coef)
    results = [both(q, case, dense(q, case, torch.float64).merged) for q in (p, last)]
    stats, d_hidden, d_weight = results[0]
    assert same_bits((stats[:, order], d_hidden[order], d_weight), results[1])
    assert (d_hidden[~kept] == 0).all()
    assert stats[:, ~kept].isfinite().all()


@pytest.mark.parametrize("cached", [0, 128])
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
def test_non_finite_token_stays_alone(value: float, cached: int) -> None:
    """Catches: a row's values used for another, a non-finite row hidden by the running maximum."""
    case = sized(ignored=0.0, cached=cached)
    p = problem(case, KEPT_IN)
    broken = p._replace(hidden=p.hidden.clone())
    broken.hidden[5, 3] = value
    others = torch.arange(len(p.hidden), device=DEVICE) != 5
    merged = dense(p, case, torch.float64).merged
    results = []
    for q in (p, broken):
        stats, *cache = local_stats(q, case)
        max_N, log_sum_N = torch.where(others, merged[0], stats[0]), torch.where(others, merged[1], stats[1].log())
        results.append((stats, gradients(q, case, (max_N, log_sum_N, merged[2]), cache)[0]))
    (stats, d_hidden), (stats_broken, d_hidden_broken) = results
    assert torch.equal(stats[:, others], stats_broken[:, others])
    assert torch.equal(d_hidden[others], d_hidden_broken[others])
    assert not stats_broken[:2, 5].isfinite().all()
    assert not d_hidden_broken[5].isfinite().any()


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(sized(num_tokens=0, bias=True), id="no-tokens"),
        pytest.param(sized(num_rows=0, ids=5, bias=True), id="no-rows"),
        pytest.param(sized(num_valid=0, bias=True, uniform=True, entropy=True), id="only-padding"),
        pytest.param(sized(ignored=2.0, bias=True), id="all-ignored"),
        pytest.param(sized(ignored=2.0, cached=128), id="all-ignored-cached"),
    ],
)
def test_nothing_to_do(case: Case) -> None:
    """Catches: outputs left unwritten where no tile exists."""
    p = problem(case, torch.float32)
    stats, *cache = local_stats(p, case)
    assert stats.shape == (3 + 2 * case.uniform + case.entropy, case.num_tokens)
    if p.logits.num_valid == 0:
        assert (stats[0] == -torch.inf).all() and (stats[1:] == 0).all()
    zeros = torch.zeros(case.num_tokens, device=DEVICE)
    seen = []
    grads = gradients(p, case, (zeros, zeros, zeros), cache, hidden_ready=seen.append)
    assert len(seen) == 1
    for grad, like in zip(grads, (p.hidden, p.weight, p.bias), strict=True):
        if like is not None:
            assert grad.shape == like.shape and not grad.any()


def test_fp16_keeps_gradients_of_a_mean_over_many_tokens() -> None:
    """Coefficients of 1e-7 times probabilities of 1e-2 are 0 in fp16. Catches: coefficients used as they come."""
    case = sized(ignored=0.0)
    p = problem(case, torch.float16)
    p = p._replace(coef=p.coef * 1e-6, weight=p.weight * 64, logits=p.logits._replace(logit_scale=1 / 64))
    truth = dense(p, case, torch.float64)
    _, *cache = local_stats(p, case)
    buffer = torch.zeros(p.weight.shape, device=DEVICE)
    gradients(p, case, truth.merged, cache, weight_out=buffer)
    larger = p._replace(coef=p.coef * 1e6)
    baseline = dense(larger, case, torch.float16).d_weight.double() * 1e-6
    assert_no_worse(buffer, baseline, truth.d_weight, torch.float16)


@pytest.mark.parametrize("num_tokens", [0, 1, 2048, 8192, 65536])
@pytest.mark.parametrize("num_columns", [0, 1, 16384, 32064, 128256, 256000])
def test_the_budget_that_is_chosen(num_tokens, num_columns):
    """Catches a default that keeps less than it could, one that grows without bound, and one that a dtype cannot use."""
    sizes = memory.Sizes(num_tokens, 4096, num_columns, 2)
    chosen = memory.default_workspace(sizes, True)
    assert 256 << 20 <= chosen <= 2100 << 20 and memory.default_workspace(sizes, False) == 256 << 20
    if memory.bytes_of_all(sizes) <= 2100 << 20:
        assert memory.saved_columns(sizes, chosen) >= num_columns * (num_tokens > 0)
    else:
        assert chosen == 2100 << 20
    assert memory.saved_columns(sizes, chosen) >= memory.saved_columns(sizes, 256 << 20)


@pytest.mark.parametrize(
    ("num_tokens", "hidden_size", "num_columns", "rows"),
    [
        pytest.param(8192, 4096, 128_256, 8192, id="llama-3-8b"),
        pytest.param(8192, 8192, 128_256, 4096, id="llama-3-70b"),
        pytest.param(4096, 4096, 128_256, 4096, id="llama-3-8b-that-fits"),
        pytest.param(65536, 4096, 15_872, 14336, id="many-tokens"),
        pytest.param(8192, 768, 134_144, None, id="parts-of-the-last-wave-do-not-fit"),
        pytest.param(8192, 4096, 134_400, None, id="exponentials-take-all"),
    ],
)
def test_the_default_keeps_all_that_fits(num_tokens: int, hidden_size: int, num_columns: int, rows: int | None):
    """Catches a default that keeps a part where 2,100 MiB hold all beside a group's hidden states, groups where all tokens fit,
    and a default that counts on d_hidden's storage where ranks sum d_hidden."""
    sizes = memory.Sizes(num_tokens, hidden_size, num_columns, 2, alone=True)
    chosen = memory.default_workspace(sizes, True)
    kept = memory.saved_columns(sizes, chosen)
    assert (kept >= num_columns) == (rows is not None)
    if rows is not None:
        assert memory.forward_rows(sizes, chosen, kept) == rows
    summed = sizes._replace(alone=False)
    assert memory.default_workspace(summed, True) == chosen
    of_part = memory.saved_columns(summed, chosen)
    assert (of_part >= num_columns) == (memory.bytes_of_all(summed) <= 2100 << 20) == (rows == num_tokens)
    assert of_part == 0 or memory.forward_rows(summed, chosen, of_part) == num_tokens


@pytest.mark.parametrize("num_columns", [262_144, 262_208, 262_400])
@pytest.mark.parametrize("hidden_size", [640, 1152, 2048, 2560, 3840, 5376, 8192])
def test_the_default_halves_8192_tokens_of_a_large_vocabulary(hidden_size: int, num_columns: int) -> None:
    """Gemma 3 and 3n have such heads. Catches a default that misses two even groups by a few MiB."""
    sizes = memory.Sizes(8192, hidden_size, num_columns, 2, alone=True)
    assert memory.groups_of(sizes, memory.default_workspace(sizes, True)) == (4096, False)
    assert memory.saved_columns(sizes._replace(num_tokens=4096), 2100 << 20) >= num_columns


def test_who_waits_for_d_hidden() -> None:
    """Catches: room that is counted on where a group sums d_hidden, or not where each rank's part is returned or there is one
    rank. Under sequence parallelism that rank takes its slice, too."""
    hidden, spec = torch.zeros(8, 16, dtype=torch.bfloat16), Spec(ShardLogits(0, 8), 8)
    plain, partial, sliced = Layout("tp"), Layout("tp", partial=True), Layout("tp", sequence_parallel=True)
    waits = {(Layout(), 1): False, (plain, 1): False, (partial, 2): False, (plain, 2): True}
    for (layout, num_ranks), there in (waits | {(sliced, 1): True, (sliced, 2): True}).items():
        assert Call(spec, layout, "triton").decided(hidden, 8, num_ranks).spec.alone != there


def test_where_exponentials_are_kept() -> None:
    """Catches: kept where they do not say the gradient, or where 16 bits are too few."""
    rows = torch.zeros(8, 16, dtype=torch.bfloat16)
    logits = ShardLogits(0, 8)
    x, spec = Operands.of(rows, rows, torch.zeros(8), logits), Spec(logits, 8)
    assert exact.saved_columns(x, spec) == 256
    assert exact.saved_columns(x._replace(hidden=x.hidden.half()), spec) == 0
    assert exact.saved_columns(x, spec._replace(want=Want(grad=False))) == 0
    assert exact.saved_columns(x, spec._replace(invariant=True)) == 0, "they would depend on other tokens"
    for want in (Want(entropy=True), Want(uniform=True)):
        assert exact.saved_columns(x, spec._replace(want=want)) == 256
        assert exact.saved_columns(x, spec._replace(want=want, logits=ShardLogits(0, 8, softcap=30.0))) == 0
    assert exact.saved_columns(x, Spec(logits._replace(tensors="factors"), 8, want=Want(uniform=True))) == 0


def seen_of(
    spec: Spec, num_tokens: int, needs: tuple[bool, bool], into: bool = False, backwards: int = 1
) -> tuple[list[Tensor], int, int]:
    """Return what is saved by a step whose launches are left out, and the most bytes in forward and in any backward.

    Neither what is saved counts, nor outputs and gradients.
    """
    hidden = torch.zeros(num_tokens, 2048, dtype=torch.bfloat16, device=DEVICE)
    weight, labels = hidden[:3000].clone(), torch.zeros(num_tokens, dtype=torch.int64, device=DEVICE)
    buffer = torch.zeros_like(weight, dtype=torch.float32) if into else None
    call, peaks = (*flat(Call(spec, backend="triton")), None), []
    with Live() as live:
        losses = op._forward(hidden, weight, [], labels, buffer, *call)
        kept = sum(x.nbytes for x in tree_leaves(losses))
        forward, saved = live.peak - kept, losses[-1]
        for _ in range(backwards):
            live.peak = 0
            upstream = [losses[0], None, None, None, losses[4] if spec.want.entropy else None, None]
            grads = op._backward(upstream, hidden, weight, [], saved, buffer, [*needs], *call)
            peaks.append(live.peak - kept - sum(x.nbytes for x in grads))
            del grads
    return saved, forward, max(peaks)


@pytest.mark.parametrize("grad_filter", [Filter(), Filter(GradFilter().eps, always=True)], ids=["exact", "filtered"])
@pytest.mark.parametrize(("mib", "num_tokens"), [(32, 65536), (256, 65536), (448, 65536), (64, 4096), (128, 2048)])
def test_what_is_alive_keeps_the_budget(mib: int, num_tokens: int, grad_filter: Filter, monkeypatch) -> None:
    """Catches: rows of one group of tokens that live on while those of the next are gathered, a cache that leaves no room to
    recompute the rest, and a dry run that goes another way than the call."""
    spec = Spec(ShardLogits(0, 3000), 3000, filter=grad_filter, workspace_bytes=mib << 20)
    sizes = memory.Sizes(num_tokens, 2048, 3000, 2, alone=True)
    said = dry_run.peak("filter" if grad_filter.eps else "exact", sizes, spec._replace(alone=True), None)
    launch_nothing(monkeypatch)
    (saved, forward, backward), workspace = seen_of(spec, num_tokens, (True, True)), mib << 20
    kept = sum(x.nbytes for x in tree_leaves(saved))
    for name, ours, true in (("forward", said.forward, forward), ("backward", said.backward, backward)):
        assert abs(ours - true - kept) <= 2 << 20, f"{name}: said {ours >> 20} MiB, seen {true + kept >> 20}"
    if not grad_filter.eps:
        workspace = max(0, workspace - sum(x.nbytes for x in saved[2:]))
    few = 16 << 20  # a few numbers for each token and each column, and the rows of a filter's head
    assert max(forward, backward) <= workspace + few


@pytest.mark.parametrize(
    ("what", "needs"),
    [
        ("plain", (True, True)),
        ("plain", (False, True)),
        ("entropy", (True, False)),
        ("entropy", (True, True)),
        ("main_grad", (True, True)),
        ("main_grad", (False, True)),
    ],
    ids=str,
)
def test_all_kept_in_the_least_budget(what: str, needs: tuple[bool, bool], monkeypatch) -> None:
    """Exponentials of all columns, in the least budget that keeps them; a second backward too. Catches: hidden states of all
    tokens in forward, in backward or where exponentials are made anew. Where d_hidden is not asked for, hidden states take the
    room that it would have had."""
    launch_nothing(monkeypatch)
    num_tokens, hidden_bytes = 32768, 32768 * 2048 * 2
    least = memory.bytes_of_all(memory.Sizes(num_tokens, 2048, 3000, 2, alone=True))
    spec = Spec(ShardLogits(0, 3000), 3000, want=Want(entropy=what == "entropy"), workspace_bytes=least)
    saved, forward, backward = seen_of(spec, num_tokens, needs, what == "main_grad", backwards=2)
    exponentials = max(x.nbytes for x in saved)
    assert exponentials == 2 * num_tokens * 3072
    room, few = least - exponentials, 12 << 20  # a few numbers for each token and each column
    assert room < 0.3 * hidden_bytes and forward <= room + few
    assert backward <= max(room, 0 if needs[0] else hidden_bytes) + few


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(sized(), id="nothing-kept"),
        pytest.param(sized(num_tokens=300, ignored=0.7, budget=2000, uniform=True, entropy=True), id="groups"),
        pytest.param(sized(cached=128, spread=300.0), id="kept"),
        pytest.param(sized(num_tokens=100, cached=128, budget=1, uniform=True), id="kept-in-groups"),
        pytest.param(sized(cached=64, entropy=True), id="a-part-kept"),
        pytest.param(sized(num_tokens=0), id="no-tokens"),
        pytest.param(sized(num_valid=0, entropy=True), id="only-padding"),
    ],
)
@pytest.mark.parametrize("further", [False, True])
def test_one_rank_finishes_in_one_launch(case: Case, further: bool, monkeypatch) -> None:
    """The bits of the statistics and of the losses that are merged from them. Catches: a label's logit that is read where
    it was not written, parts of a group's mean that overwrite another group's, rows that are not levelled."""
    monkeypatch.setattr(memory, "SAVED_ROWS", memory.SAVED_ROWS if GPU else 48)
    monkeypatch.setattr(exact, "saved_columns", lambda *_: case.cached)
    p = problem(case, KEPT_IN)
    p.labels[1:2] = p.labels[5:7] = -100
    ids = tokens.ordered_ids(p.labels, -100, 1 << 20)[0]
    x, spec = p.operands._replace(ids=ids), spec_of(p, case)
    want = spec.want._replace(mean=True, sum_p_squared=further, best=further)
    x, spec = x._replace(order=tokens.compact(ids)), spec._replace(want=want)
    with nan_memory():  # rows of tokens without a label are not written
        stats, saved = exact.statistics(x, None, spec)
        expected, softmax = losses.token_losses(stats[None], x, spec)
        for _ in range(2):  # the counter of arrivals starts anew
            ours, ours_softmax, stats_TKN, ours_saved = exact.losses_alone(x, spec)
            assert (stats_TKN is not None) == (further or case.num_tokens == 0 or case.num_valid == 0)
            if stats_TKN is not None:
                rows = [row for row in range(spec.num_rows) if row != 2]
                assert torch.equal(stats_TKN[0, rows], stats[rows])
            found, right = [*ours[:5], *ours_softmax, *ours_saved], [*expected[:5], *softmax, *saved]
            torch.testing.assert_close(found, right, rtol=0, atol=0, equal_nan=True)
            count = (ids != IGNORED).sum().clamp(min=1)
            torch.testing.assert_close((ours.mean, ours.count), ((ours.nll.double().sum() / count).float(), count))


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize(("uniform", "entropy"), [(False, False), (True, False), (False, True), (True, True)])
def test_numbers_of_a_token_as_in_torch(num_shards: int, uniform: bool, entropy: bool):
    """Catches a wrong plane, order of shards forgotten, NaN from -inf - -inf, tokens that should be 0 or NaN."""
    num_tokens, vocab_size = 300, 1000
    labels = torch.randint(vocab_size, (num_tokens,), device=DEVICE)
    labels[::7], labels[3::11], labels[5::11] = -100, vocab_size, -1
    ids = tokens.ordered_ids(labels, -100, vocab_size)[0]
    assert torch.equal(ids, dense_backend.label_ids(labels, -100, vocab_size))
    assert (ids == IGNORED).any() and (ids == OUTSIDE).any()
    assert torch.equal(tokens.ordered_ids(labels, 5, vocab_size)[0], dense_backend.label_ids(labels, 5, vocab_size))
    for some in (labels, torch.full_like(labels, -100), labels.repeat(60), labels[:0]):
        ordered, order = tokens.ordered_ids(some, -100, vocab_size)
        assert torch.equal(ordered, dense_backend.label_ids(some, -100, vocab_size))
        kept = (ordered >= 0).nonzero().view(-1)
        assert torch.equal(order[0][: len(kept)], kept.int()) and order[1].tolist() == [len(kept), 0]
        assert torch.equal(order[0].sort().values, torch.arange(len(some), device=DEVICE).int())

    stats = torch.rand(num_shards, 3 + 2 * uniform + entropy, num_tokens, device=DEVICE) * 50 + 1
    stats[:, 0] -= 30
    if uniform:
        stats[:, 4] = torch.tensor([700.0, 300.0, 0.0], device=DEVICE)[:num_shards, None]
    if num_shards == 3:  # the last one is empty
        stats[2] = 0
        stats[2, 0] = -torch.inf
    stats[0, 1, 8], stats[0, 0, 9], stats[:, 0, 10] = torch.nan, torch.inf, -torch.inf
    spec = Spec(ShardLogits(0, 0), vocab_size, want=Want(uniform=uniform, entropy=entropy, mean=True))
    hidden = torch.zeros(num_tokens, 1, device=DEVICE)
    finite = ids.masked_fill(ids == OUTSIDE, IGNORED)
    finite[8:11] = IGNORED
    for some in (ids, finite, torch.full_like(ids, IGNORED), ids[:0]):
        x = Operands.of(hidden, hidden, some, spec.logits)._replace(order=tokens.compact(some))
        given = stats[:, :, : len(some)]
        got = [losses.token_losses(given, x, spec) for _ in range(2)]  # the counter of arrivals starts anew
        want = dense_backend.token_losses(given, x, spec)
        for ours, theirs in ((got[0], want), (got[1], got[0])):
            found, right = ([*values, *softmax] for values, softmax in (ours, theirs))
            torch.testing.assert_close(found, right, rtol=1e-6, atol=2e-6, equal_nan=True)
        assert want[0].mean is not None and want[0].mean.isnan() == (some is ids)

    one = torch.randn((), device=DEVICE).expand(num_tokens)  # what a mean sends back: stride 0
    strided = list(torch.randn(num_tokens, 5, device=DEVICE).unbind(1))
    of_mean = torch.tensor(2.5, device=DEVICE), torch.tensor(37, device=DEVICE)
    for given in ([one], [*[None] * 5, *of_mean], [None, *strided[1:]], [*strided, *of_mean]):
        ours, theirs = (backend.coefficients(Upstream(*given), ids, vocab_size) for backend in (tokens, dense_backend))
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
        assert (ours[:, ids < 0] == 0).all()


def test_one_chunk_and_several_run_the_same_kernels(monkeypatch) -> None:
    """Launches are left out. Catches: a constexpr, or a tensor given or not, that follows the number of chunks, so of tokens,
    and an integer inside a tuple, which Triton always specializes on: the kernel would compile in the middle of training."""
    launch_nothing(monkeypatch)
    seen: list[dict[str, set[tuple[Any, ...]]]] = []

    def kind(arg: Any) -> Any:
        if isinstance(arg, tuple):
            assert not any(isinstance(item, int) for item in arg)
            return tuple(map(kind, arg))
        return getattr(arg, "dtype", arg is None)

    def record(kernel: Any, args: Any, _: Any, options: dict[str, Any]) -> None:
        seen[-1].setdefault(kernel.fn.__name__, set()).add((*map(kind, args), *options.items()))

    monkeypatch.setattr(exact, "saved_columns", lambda *_: 0)
    for num_tokens in (1024, 1000, 30000):
        seen.append({})
        hidden = torch.zeros(num_tokens, 256, dtype=torch.bfloat16, device=DEVICE)
        labels = torch.zeros(num_tokens, dtype=torch.int64, device=DEVICE)
        logits = ShardLogits(0, 1000)
        x = Operands.of(hidden, hidden[:1000], labels, logits)
        spec = Spec(logits, 1000, workspace_bytes=64 << 20)
        with direct.launching(record):
            stats, saved = exact.statistics(x, None, spec)
            upstream = Upstream(torch.zeros(num_tokens, device=DEVICE))
            exact.gradients(x, Softmax(stats[0], stats[1]), upstream, saved, Grads(), spec)
    assert seen[0].keys() >= {"_lse_kernel", "_dlogits_kernel", "_grad_hidden_kernel", "_grad_weight_kernel"}
    sizes = [memory.Sizes(n, 256, 1000, 2) for n in (1024, 30000)]
    on = tiles.choose_tiles(torch.bfloat16, torch.device(DEVICE)), tiles.num_programs(torch.device(DEVICE))
    assert [memory.exact_chunks(each, 64 << 20, 0, *on).cols < 1000 for each in sizes] == [False, True]
    for other in seen[1:]:
        assert all(other[name] <= variants for name, variants in seen[0].items() if name in other)


BIG = Case(num_tokens=1000, hidden_size=512, num_rows=5000, budget=16 << 20)


@needs_gpu
@pytest.mark.parametrize("cached", [0, 2560, 5120])
def test_same_bits_every_run(cached: int) -> None:
    """Catches: atomics, locks, a race between programs."""
    case = BIG._replace(cached=cached)
    p = problem(case, torch.bfloat16)
    merged = dense(p, case, torch.float64).merged
    first, *others = (both(p, case, merged) for _ in range(5))
    assert all(same_bits(first, other) for other in others)


@needs_gpu
def test_other_token_counts_compile_nothing(monkeypatch) -> None:
    """Catches: a size or an address that a kernel is specialised on."""
    from triton import knobs

    compiled = []
    for num_tokens in (1024, 1000, 999, 17, 1, 4096):
        for cached in (0, 5120):
            case = BIG._replace(num_tokens=num_tokens, cached=cached, ignored=0.0)
            p = problem(case, torch.bfloat16)
            stats, *cache = local_stats(p, case)
            gradients(p, case, (stats[0].clone(), stats[1].log()), cache)
        if num_tokens == 1024:
            monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda *, fn, **_: bool(compiled.append(fn.name)))
    assert compiled == []


@needs_gpu
@pytest.mark.skipif(bool(os.environ.get("CI")), reason="needs 25 GB of GPU memory")
@pytest.mark.parametrize("cached", [False, True])
def test_more_than_2_to_31_elements(cached: bool) -> None:
    """The last token and the last row of a shard with N V > 2^31. Catches: 32-bit offsets."""
    torch.use_deterministic_algorithms(False)
    num_tokens, num_rows = 20000, 120000
    columns = -(-num_rows // 256) * 256 if cached else 0
    case = Case(num_tokens, 64, num_rows, ignored=0.0, cached=columns, budget=8 << 30)
    p = problem(case, torch.bfloat16)
    p.labels[-1] = num_rows - 1
    stats, d_hidden, d_weight = both(p, case)
    tail = p._replace(hidden=p.hidden[-300:], labels=p.labels[-300:], coef=p.coef[:, -300:].contiguous())
    truth, baseline = dense(tail, case, torch.float64), dense(tail, case, torch.bfloat16)
    assert_no_worse(stats[1, -300:], truth.stats[1].float(), truth.stats[1], torch.float32)
    assert_no_worse(d_hidden[-300:], baseline.d_hidden, truth.d_hidden)
    rows = (p.weight[-300:].float() @ p.hidden.float().T).double()
    grad = p.coef[0].double() * (rows - stats[0].double() - stats[1].double().log()).exp()
    ids = torch.arange(num_rows - 300, num_rows, device=DEVICE)
    grad += p.coef[1].double() * (p.labels == ids[:, None])
    assert_no_worse(d_weight[-300:], grad.bfloat16() @ p.hidden, grad @ p.hidden.double())


@pytest.mark.parametrize("num_labelled", [0, 1, 30, 64], ids=["none", "one", "few", "all"])
def test_few_tokens_keep_all_programs_busy(num_labelled: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that often have no token, three chunks. Catches: a part that is left out, added twice or kept from before, rows of
    tokens without a label that are written, and tiles that are not cut."""
    monkeypatch.setattr(d_hidden, "num_programs", lambda device: 12)
    # Tiles are larger on a GPU.
    dtype, scale, hidden_size = (torch.bfloat16, 16, 256) if GPU else (torch.float32, 1, 32)
    num_rows, num_labelled, width = 64 * scale, num_labelled * scale, 64 * scale
    chosen = tiles.choose_tiles(dtype, torch.device(DEVICE))
    like, unit = {"dtype": dtype, "device": DEVICE}, chosen.dlogits.rows
    weight = torch.randn(3 * width, hidden_size, **like)
    grads = torch.zeros(num_rows, 3 * width, **like)
    grads[:num_labelled].normal_()
    index = torch.randperm(num_rows, device=DEVICE).int()
    rows = Rows(index, torch.tensor([num_labelled, 0], dtype=torch.int32, device=DEVICE), torch.empty(0, **like))
    high, buffer = torch.full((num_rows, hidden_size), torch.nan, **like), torch.empty(num_rows, width, **like)
    total = d_hidden.Sum(high, exact.remainder(high, num_rows))
    total = d_hidden.with_parts(total, buffer, chosen)
    for first in range(0, 3 * width, width):
        used = min(num_rows, -(-num_labelled // unit) * unit)  # of the last tile, too
        buffer[:used] = grads[:used, first : first + width]
        part = weight[first : first + width]
        d_hidden.add_d_hidden(total, buffer, part, rows, None, None, chosen.grad_hidden, first=first == 0)
    assert num_labelled == num_rows or high.isnan().all()  # few tokens: parts alone
    d_hidden.add_parts(total, rows, None)
    labelled, others = index[:num_labelled].long(), index[num_labelled:].long()
    assert high[others].isnan().all()
    exactly = grads[:num_labelled].double() @ weight.double()
    assert_no_worse(high[labelled], grads[:num_labelled] @ weight, exactly, dtype, "d_hidden")
