"""The filter's kernels against a dense construction of the same filter, in float64: interpreted on the CPU, compiled on a GPU.

Only the frequent columns are read from what the kernels saved.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from shards import DEVICE, GPU, Problem, nan_memory, needs_gpu, upstream_of
from support.dense import assert_holds
from torch import Tensor
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

from cce_dist import GradFilter, linear_cross_entropy
from cce_dist.kernels import Filter, Grads, Operands, ShardLogits, Softmax, Spec, exact, filter, memory
from cce_dist.kernels.filter import bound, lists, sampling, shares
from cce_dist.kernels.tiles import choose_tiles, table_tiles
from cce_dist.tools.verify import cases as verify_cases
from cce_dist.tools.verify.check import assert_no_worse
from cce_dist.tools.verify.loss import LOSS

DTYPE = torch.bfloat16 if GPU else torch.float32  # the interpreter misreads bf16
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, on infinities inside the interpreter


class Case(NamedTuple):
    """A shard, its filter, and the limits it runs under; ``ids`` is the size of the whole vocabulary."""

    num_tokens: int = 18 if not GPU else 240
    hidden_size: int = 24 if not GPU else 96
    num_rows: int = 90 if not GPU else 5000
    num_valid: int | None = None
    start: int = 0
    ids: int | None = None
    ignored: float = 0.2
    logit_scale: float = 1.0
    softcap: float = 0.0
    coefs: str = "mean"
    grad_filter: Filter = Filter(2.0**-7 if not GPU else 2.0**-10)
    budget: int = 1 << 30
    slots: int = 128 if not GPU else 8192  # more than any list needs
    sampled: int = 0


CASES = [
    pytest.param(Case(), id="tails-of-all-axes"),
    pytest.param(Case(hidden_size=32, logit_scale=-0.8, softcap=9.0, sampled=32), id="negative-scale-softcap"),
    pytest.param(Case(hidden_size=19), id="rows-no-descriptor-can-describe"),
    pytest.param(Case(coefs="signed", sampled=64), id="upstream-of-both-signs-and-zero"),
    pytest.param(
        Case(start=50, num_valid=77, ids=300, sampled=32)
        if not GPU
        else Case(start=3000, num_valid=4100, ids=9000, sampled=96),
        id="padded-shard",
    ),
    pytest.param(Case(grad_filter=Case().grad_filter._replace(compensate=False)), id="plain"),
    pytest.param(
        Case(22, num_rows=150, coefs="large", slots=3, sampled=32)
        if not GPU
        else Case(coefs="large", slots=130, sampled=32),
        id="tokens-that-lists-cannot-serve",
    ),
    pytest.param(Case(num_tokens=40 if not GPU else 256, budget=1000, sampled=32), id="groups-of-tokens"),
    pytest.param(Case(slots=2 if not GPU else 20), id="lists-with-few-slots"),
]
OF_BOTH_SIGNS = Case(70 if GPU else 40, 32, logit_scale=0.8, softcap=9.0, coefs="signed", sampled=32)


def problem(case: Case, dtype: torch.dtype = DTYPE) -> Problem:
    """A Zipf unigram in no order, and a likely candidate or two for each token."""
    ids = case.ids or case.num_rows
    weight = 0.4 * torch.randn(ids, case.hidden_size)
    weight[:, 0] = -1.3 * torch.randperm(ids).add(1).log()
    hidden = 0.4 * torch.randn(case.num_tokens, case.hidden_size)
    for size in (6.0, 4.0):
        candidate = weight[(torch.rand(case.num_tokens) * ids).long()]
        candidate[:, 0] = 0.0
        hidden += size * candidate / candidate.square().sum(1, keepdim=True)
    hidden[:, 0] = 1.0
    gumbel = -(-torch.rand(case.num_tokens, ids).log()).log()
    labels = (hidden @ weight.T + gumbel).argmax(1)  # sampled from the softmax
    labels[::6] = torch.randint(ids, labels[::6].shape)  # labels that nothing else would list
    labels[torch.rand(case.num_tokens) < case.ignored] = -100
    num_valid = case.num_rows if case.num_valid is None else case.num_valid
    local = torch.full((case.num_rows, case.hidden_size), torch.nan)  # padding rows are not read
    local[:num_valid] = math.copysign(1.0, case.logit_scale) * weight[case.start : case.start + num_valid]

    coef = torch.zeros(4, case.num_tokens)
    coef[0], coef[1] = torch.ones(2, case.num_tokens) / case.num_tokens * torch.tensor([[1.0], [-1.0]])
    if case.coefs == "signed":
        coef *= torch.randn(case.num_tokens)
        coef[:, ::4] = 0.0
        coef[1, 1::4] = 0.0  # the gradient of the log-sum-exp alone
    elif case.coefs == "large":
        coef[0, ::5] *= 3.0
    coef[:, labels < 0] = 0.0
    logits = ShardLogits(case.start, num_valid, case.logit_scale, case.softcap)
    return Problem(hidden.to(DEVICE, dtype), local.to(DEVICE, dtype), None, labels.to(DEVICE), logits, coef.to(DEVICE))


class Dense(NamedTuple):
    """Logits and softmax of the valid rows (the shard is the whole vocabulary of the softmax), in float64."""

    z: Tensor
    p: Tensor
    slope: Tensor
    is_label: Tensor
    maximum: Tensor
    log_sum: Tensor


def dense(p: Problem) -> Dense:
    num_valid = p.logits.num_valid
    u = p.hidden.double() @ p.weight[:num_valid].double().T
    u = p.logits.logit_scale * u
    z = p.logits.softcap * torch.tanh(u / p.logits.softcap) if p.logits.softcap else u
    slope = 1 - (z / p.logits.softcap).square() if p.logits.softcap else torch.ones_like(z)
    column = torch.where(p.labels < 0, -1, p.labels - p.logits.start)
    is_label = column[:, None] == torch.arange(num_valid, device=DEVICE)
    maximum = z.amax(1)
    return Dense(z, z.softmax(1), slope, is_label, maximum, (z - maximum[:, None]).exp().sum(1).log())


def kept_of(saved: tuple[Tensor, ...], p: Problem) -> Tensor:
    """The mask of what frequent columns and lists hold."""
    _, columns, count_V, count, ids, *_ = saved
    kept = torch.zeros(len(p.labels), p.logits.num_valid, dtype=torch.bool, device=DEVICE)
    for row, length in enumerate(count.tolist()):
        listed = columns[row, :length].tolist() if length <= columns.shape[1] else []
        assert listed == sorted(set(listed))
        kept[row, listed] = True
    counted = kept.clone()
    for row in (count > columns.shape[1]).nonzero()[:, 0].tolist():
        first = columns[row].tolist()  # written, and counted, if the list was shortened but is still too long
        if all(0 <= a < b < kept.shape[1] for a, b in itertools.pairwise(first)):
            counted[row, first] = True
    assert torch.equal(count_V, counted.sum(0).int())
    assert not kept[:, ids].any()
    kept[:, ids] = True
    return kept


def kept_by(saved: tuple[Tensor, ...], p: Problem, d: Dense, eps: float) -> Tensor:
    """The mask of what the definition keeps, of the frequent columns, and of lists."""
    coef_p, coef_label = p.coef[:2].double().abs()[:, :, None]
    ratio = torch.where((coef_p == 0) | (coef_label == 0), 1.0, coef_label / coef_p)
    kept = (d.p >= eps * ratio) | d.is_label
    kept |= d.z >= saved[0][0, :, None].double() + math.log(eps / lists.SLACK)
    kept[:, saved[4]] = True
    return kept


def exact_tokens(saved: tuple[Tensor, ...], p: Problem, d: Dense) -> Tensor:
    """Which tokens are exact: from the lists' slots and the bound."""
    state, columns, _, count, *_ = saved
    gap = (state[0] - d.maximum - d.log_sum).exp()
    whole = (p.coef[0] == 0) | (p.coef[1] == 0)
    ratio = torch.where(whole, 1.0, p.coef[0].abs() / p.coef[1].abs())
    return (p.labels >= 0) & ((count > columns.shape[1]) | (gap * ratio > 1.125) | state[0].isnan())


def gradient_of_logits(saved: tuple[Tensor, ...], p: Problem, d: Dense, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """The [N, V] matrix that stands for the filtered gradient, the exact one, and the tokens that are exact.

    SampledColumns columns correct the first for d_hidden: see ``correction``.
    """
    kept = kept_by(saved, p, d, case.grad_filter.eps)
    coef_p, coef_label = p.coef[:2].double()[:, :, None].unbind()
    softmax_part = coef_p * d.p * d.slope
    rest = coef_label * d.is_label * d.slope
    exact = exact_tokens(saved, p, d)
    served = (p.labels >= 0) & ~exact
    dropped = torch.where(kept | ~served[:, None], 0.0, d.p * d.slope)
    share = (coef_p.abs() * dropped).sum(0)
    share = share / share.sum().clamp_min(1e-300) * case.grad_filter.compensate
    # the control variate is a whole row of shares, at the listed columns too: only so it is of rank 1
    compensation = torch.where(exact[:, None], 0.0, coef_p * dropped.sum(1, keepdim=True) * share)
    filtered_part = torch.where(kept | exact[:, None], softmax_part, 0.0) + compensation
    valid = (p.labels >= 0)[:, None] * p.logits.logit_scale
    return (filtered_part + rest) * valid, (softmax_part + rest) * valid, exact


def correction(saved: tuple[Tensor, ...], p: Problem, d: Dense, case: Case, column: Tensor) -> tuple[Tensor, Tensor]:
    """What the sampled columns add to the matrix of d_hidden, [N, V], and the factor on it that is in it."""
    weight = p.weight[: p.logits.num_valid].double()
    part = dropped_part(p, d, kept_by(saved, p, d, case.grad_filter.eps) | exact_tokens(saved, p, d)[:, None])
    share = part.abs().sum(0) / part.abs().sum()
    terms = (part - part.sum(1, keepdim=True) * share)[:, column] / (len(column) * share[column])
    centered = weight[column] - share @ weight
    by_mass = terms.square() / part.sum(1, keepdim=True).abs().clamp_min(1e-300)
    signal = ((terms @ centered).square() / part.sum(1, keepdim=True).abs().clamp_min(1e-300)).sum()
    signal_share = 1 - (by_mass * centered.square().sum(1)).sum() / signal
    signal_share = torch.where(signal_share > sampling.LEAST_SIGNAL, signal_share, 0.0)
    whole = torch.zeros_like(part).index_add_(1, column, terms) - terms.sum(1, keepdim=True) * share
    return signal_share * whole, signal_share


def systematic_sample(share: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Draw ``size`` indices by systematic sampling (Madow, 1949): lay the shares end to end, and pick at equal distances.

    Return ids, int64 and ascending, and 1 / (size * share) of each, or 0 for a share of 0.
    """
    end = (share * shares.UNIT.value).long().cumsum(0)
    step = torch.arange(size, device=share.device)
    place = torch.searchsorted(end, (2 * step + 1) * (end[-1] // (2 * size)), right=True)
    place.clamp_(max=share.shape[0] - 1)
    sampled = share[place]
    return place, torch.where(sampled > 0, 1 / (size * sampled), 0.0)


def linear_factors(estimate: Tensor, lines: Tensor, noise_3: Tensor, noise_part: float) -> tuple[Tensor, Tensor]:
    """Return two 0-d factors: on the linear correction, and on the samples' estimate of the error that remains.

    Args:
        estimate: The samples' estimate of the rank-1 matrix's error.
        lines: The samples' estimate of the linear correction.
        noise_3: Squared noise of ``estimate``, product of both noises, squared noise of ``lines``.
        noise_part: Squared noise of the linear correction itself, divided by the squared noise of ``lines``.
    """
    factor = torch.linspace(0.0, 1.0, sampling.LINEAR_FACTORS, device=estimate.device)
    square = factor.square()
    signal = estimate.square().sum() - 2 * factor * (estimate * lines).sum() + square * lines.square().sum()
    noise = noise_3[0] - 2 * factor * noise_3[1] + square * noise_3[2]
    part = (1 - noise / torch.where(signal > 0, signal, torch.inf)).nan_to_num(0.0)
    part = torch.where((part > sampling.LEAST_SIGNAL) & (signal > 0), part, 0.0)
    left = torch.where(part > 0, part * noise, (signal - noise).clamp(min=0.0)) + square * noise_3[2] * noise_part
    best = left.nan_to_num(torch.inf).argmin()
    return factor[best], part[best]


def spec_of(p: Problem, case: Case) -> Spec:
    return Spec(p.logits, case.ids or case.num_rows, filter=case.grad_filter, workspace_bytes=case.budget)


def whole(stats: Tensor) -> Tensor:
    """The bound where this shard is all."""
    return stats[0] + stats[1].log()


def local_stats(p: Problem, case: Case, merge_bound: Callable[[Tensor], Tensor] = whole) -> tuple[Any, ...]:
    def gather(stats: Tensor) -> Tensor:  # the statistics of one rank whose log-sum-exp is the bound
        lse = merge_bound(stats)
        return torch.stack((lse, torch.ones_like(lse), torch.zeros_like(lse)))[None]

    stats, saved = filter.statistics(p.operands, gather, spec_of(p, case))
    return stats, *saved


def prepared(
    case: Case, dtype: torch.dtype = DTYPE, nats: Tensor | float | None = None
) -> tuple[Problem, Dense, list[Any]]:
    """A problem, its dense construction, and what forward saves for backward; ``nats`` as ``bound_above`` takes them."""
    p = problem(case, dtype)
    d = dense(p)
    return p, d, list(local_stats(p, case, whole if nats is None else bound_above(d, nats))[1:])


def bound_above(d: Dense, nats: Tensor | float) -> Callable[[Tensor], Tensor]:
    """Return a ``merge_bound`` that is ``nats`` above the log-sum-exp, so that lists do not hold what they should."""
    return lambda _: (d.maximum + d.log_sum + nats).float()


def dropped_part(p: Problem, d: Dense, kept: Tensor) -> Tensor:
    """The softmax's part of the logits' gradient that is neither kept nor of a token without a label, times the scale."""
    dropped = torch.where(kept | (p.labels < 0)[:, None], 0.0, d.p * d.slope)
    return p.coef[0, :, None].double() * dropped * p.logits.logit_scale


def gradients(p: Problem, case: Case, merged: Dense | Softmax, saved, **how) -> list[Any]:
    if isinstance(merged, Dense):
        merged = Softmax(merged.maximum.float(), merged.log_sum.float())
    grads = Grads(want_bias=False)._replace(**how)
    spec = spec_of(p, case)
    return list(filter.gradients(p.operands, merged, upstream_of(p.coef, spec.vocab_size), list(saved), grads, spec))


def exact_gradients(p: Problem, case: Case, d: Dense) -> list[Any]:
    """Return the gradients of a call that keeps nothing for backward."""
    x, spec = p.operands, spec_of(p, case)
    softmax = Softmax(d.maximum.float(), d.log_sum.float())
    saved: Any = list(exact.new_saved(x, exact.compact(p.labels)))
    return list(exact.gradients(x, softmax, upstream_of(p.coef, spec.vocab_size), saved, Grads(want_bias=False), spec))


@pytest.fixture(autouse=True)
def _nan_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(memory, "LEAST_BYTES", 1 << 10)
    monkeypatch.setattr(memory, "list_slots", lambda *_: Case().slots)
    monkeypatch.setattr(memory, "sampled_columns", lambda _: 0)
    monkeypatch.setattr(sampling, "LEAST_SIGNAL", 0.0)  # draws that are mostly noise are added all the same
    monkeypatch.setattr(filter, "SAMPLE", 64 if not GPU else 256)  # all tokens: then the column sums are exact
    # fewer than the labels
    monkeypatch.setattr(filter, "num_frequent", lambda num_valid, _: min(num_valid, 100 if GPU else 13))
    with nan_memory():
        yield


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch):
    def set_limits(case: Case) -> None:
        monkeypatch.setattr(memory, "list_slots", lambda *_: case.slots)
        monkeypatch.setattr(memory, "sampled_columns", lambda _: case.sampled)
        monkeypatch.setattr(memory, "ROWS", memory.ROWS if GPU else 16)  # groups of a few tokens

    return set_limits


def watched(monkeypatch: pytest.MonkeyPatch, *names: str) -> dict[str, Any]:
    """Keep what the last call of each of the filter's functions gave, and under "given to NAME" what it was given."""
    seen: dict[str, Any] = {}

    def spied(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def spy(*args: Any, **options: Any) -> Any:
            seen[name] = call(*args, **options)
            seen[f"given to {name}"] = args
            return seen[name]

        return spy

    for name in names:
        monkeypatch.setattr(filter, name, spied(name, getattr(filter, name)))
    return seen


def factor(seen: dict[str, Any], which: Any) -> Tensor:
    """One of the factors that ``factors_of`` found."""
    return seen["factors_of"][0][which.value]


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The columns that a backward draws, and the factors on what they add."""
    return watched(monkeypatch, "sample_columns", "factors_of")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_matches_dense(case: Case, limits, sampled: dict[str, Any]) -> None:
    """Catches: a hit left out of the list, a label that is not frequent lost, frequent columns twice, the slope left
    out, a control variate for kept columns, coefficients that ask for more served all the same, padding with gradient, the
    logarithm of a negative scale.

    Of sampled columns: what is kept counted as dropped, a label or a mean not taken off, the factor left out.
    """
    limits(case)
    p = problem(case)
    d = dense(p)
    stats, *saved = local_stats(p, case)
    labelled = p.labels >= 0
    lse = d.maximum + d.log_sum
    assert_no_worse((stats[0] + stats[1].log())[labelled], lse.float()[labelled], lse[labelled])

    state, columns, _, count, *_ = saved
    listed = labelled & ((state[0] - lse).exp() <= 1.125)
    assert listed.sum() >= 0.9 * labelled.sum()
    must_keep = (d.p > case.grad_filter.eps * 1.0001) | d.is_label
    assert not (must_keep & ~kept_of(tuple(saved), p))[listed & (count <= columns.shape[1])].any()
    assert (count[~labelled] == 0).all()

    grad, exact_grad, exact = gradient_of_logits(tuple(saved), p, d, case)
    d_hidden, d_weight, _ = gradients(p, case, d, saved)
    weight, hidden = p.weight[: p.logits.num_valid], p.hidden
    rounded, of_hidden = grad.to(DTYPE), grad
    assert ("factors_of" in sampled) == (case.sampled > 0)
    if case.sampled and not exact[labelled].all():
        added, signal_share = correction(tuple(saved), p, d, case, sampled["sample_columns"].sampled().ids_C)
        columns = factor(sampled, sampling.COLUMNS).double()
        # 1 - noise / signal; a GPU's terms are in bf16
        torch.testing.assert_close(columns, signal_share, rtol=0.05 if GPU else 1e-3, atol=0.02 if GPU else 0)
        assert 0.01 < signal_share < 0.99
        of_hidden = grad + added
    assert_no_worse(d_hidden, of_hidden.to(DTYPE) @ weight, of_hidden @ weight.double(), DTYPE, "d_hidden")
    baseline = torch.zeros_like(d_weight[: p.logits.num_valid])
    for group in labelled.nonzero()[:, 0].split(case.num_tokens if case.budget > 1000 else memory.ROWS):
        baseline += rounded[group].T @ hidden[group]  # rounded once a group, as rows of frequent columns are
    assert_no_worse(d_weight[: p.logits.num_valid], baseline, grad.T @ hidden.double(), DTYPE, "d_weight")
    assert (d_weight[p.logits.num_valid :] == 0).all()
    assert (d_hidden[~labelled] == 0).all()

    # the case is one: something is dropped, and where the name says so, some tokens are exact and some are not
    served = labelled & ~exact
    assert (grad - exact_grad)[served].abs().sum() > 0
    assert exact.any() == (case.coefs == "large" or case.slots < 100)


@pytest.mark.slow
def test_two_shards(limits, sampled: dict[str, Any]) -> None:
    """Their d_hidden add up, each with its own frequent columns, lists, shares and draws, under one bound.

    Catches: a bound or a threshold of the shard's own, a label of the other shard listed, mass relative to the shard's LSE.
    """
    case = Case(sampled=32)
    limits(case)
    whole = problem(case)
    d = dense(whole)
    cut = case.num_rows // 3
    halves = []
    for rows, start in ((slice(0, cut), 0), (slice(cut, None), cut)):
        logits = ShardLogits(start, len(whole.weight[rows]))
        halves.append(whole._replace(weight=whole.weight[rows], logits=logits))
    bounds: list[Tensor] = []
    for half in halves:
        local_stats(half, case, merge_bound=lambda stats: bounds.append(stats[0] + stats[1].log()) or bounds[-1])
    bound = torch.logaddexp(*bounds)
    d_hidden = torch.zeros_like(d.p[:, : case.hidden_size])
    expected, rounded = d_hidden.clone(), torch.zeros_like(whole.hidden)
    for half in halves:
        rows = slice(half.logits.start, half.logits.start + len(half.weight))
        _, *saved = local_stats(half, case, merge_bound=lambda _: bound)
        assert torch.equal(saved[0][0][whole.labels >= 0], bound[whole.labels >= 0])
        part = d._replace(z=d.z[:, rows], p=d.p[:, rows], slope=d.slope[:, rows], is_label=d.is_label[:, rows])
        grad = gradient_of_logits(tuple(saved), half, part, case)[0]
        ours = gradients(half, case, part, saved)
        of_hidden = grad + correction(tuple(saved), half, part, case, sampled["sample_columns"].sampled().ids_C)[0]
        d_hidden += ours[0].double()
        expected += of_hidden @ half.weight.double()
        rounded += of_hidden.to(DTYPE) @ half.weight
        assert_no_worse(ours[1], grad.to(DTYPE).T @ half.hidden, grad.T @ half.hidden.double(), DTYPE, "d_weight")
    assert_no_worse(d_hidden, rounded, expected, DTYPE, "d_hidden")


def test_sample_stands_for_all_tokens() -> None:
    """Catches: a token that drops nothing, one taken more or less often than its mass says, a sign or a reference forgotten,
    a hidden state that is not filtered and not finite."""
    torch.manual_seed(0)
    num_tokens, size = 5000, 255
    dropped = torch.randn(num_tokens, dtype=torch.float64).exp() * torch.randn(num_tokens).sign()
    dropped[::3] = 0.0
    dropped[1000] = dropped.abs().sum() / 50
    mass = dropped.abs()
    hidden = torch.randn(num_tokens, 40) + torch.randn(num_tokens, 1) + 1.0
    hidden[::30] = float("nan")
    reference, threshold, labels = torch.randn(num_tokens), torch.randn(num_tokens), torch.arange(num_tokens) + 7
    numbers = torch.stack((threshold, torch.full_like(threshold, float("nan")), reference))
    hidden, dropped_N, numbers, labels = (each.to(DEVICE) for each in (hidden, dropped.float(), numbers, labels))
    coef = torch.full((4, num_tokens), 2.0, device=DEVICE)

    def sample_of(count: int, dropped_N: Tensor) -> shares.Sample:
        logits = ShardLogits(0, 1, 0.5)
        x = Operands.of(hidden[:count], hidden[:1], labels[:count], logits)
        coef_4N, numbers_3N = (each[:, :count].contiguous() for each in (coef, numbers))
        how = lists.Decisions(*(labels,) * 15)
        how = how._replace(coef_4N=coef_4N, dropped_N=dropped_N[:count], numbers_3N=numbers_3N)
        return shares.sample_tokens(x, how, size + 1)

    sample = sample_of(num_tokens, dropped_N)
    token, rows = sample.token_S[:size].long(), sample.rows_SD
    assert sample.size.tolist() == [size, 0]
    assert torch.equal(rows[:size], hidden[token])
    wanted = size * mass / mass.sum()
    taken = torch.bincount(token.cpu(), minlength=num_tokens)
    assert ((taken - wanted).abs() < 1.001).all() and taken[1000] >= 4
    assert (taken[dropped == 0] == 0).all()
    inverse_S, reference_S, threshold_S = sample.numbers_3S
    assert torch.equal(threshold_S[:size], threshold.to(DEVICE)[token])
    assert torch.equal(sample.label_S[:size], labels[token])
    torch.testing.assert_close(inverse_S[:size], 1 / dropped_N[token])
    assert inverse_S[size] == 0 and threshold_S[size] == -math.inf
    expected = (reference + (2 * size * mass).log())[token.cpu()].float()
    torch.testing.assert_close(reference_S[:size].cpu(), expected)
    expected = torch.stack((mass.sum(), mass.sum() / (dropped != 0).sum()))
    torch.testing.assert_close(sample.mass_2.cpu().double(), expected)
    means = torch.stack((dropped, mass / mass.sum())) @ hidden.nan_to_num().cpu().double()
    torch.testing.assert_close(sample.means_2D.cpu().double(), means, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rows[size], sample.means_2D[1].to(rows.dtype), rtol=0, atol=0)
    assert sample_of(num_tokens, torch.zeros_like(dropped_N)).size[0] == 0

    few = sample_of(100, dropped_N)
    assert few.size[0] == 100 and few.token_S[:100].tolist() == list(range(100))
    used = (few.numbers_3S[1] < float("inf")).cpu()
    assert used.nonzero()[:, 0].tolist() == dropped[:100].nonzero()[:, 0].tolist()
    expected = reference[:100][used[:100]] + (2 * mass[:100].sum()).log().float()
    torch.testing.assert_close(few.numbers_3S[1].cpu()[used], expected)


@pytest.mark.parametrize("hidden_size", [16, 2304])
def test_shares_are_reweighted_to_the_mean_of_all_tokens(hidden_size: int) -> None:
    """Catches: a strength the wrong way, without the logit scale, or taken as another column's; a weight that is not
    finite; the end of a long row left out; a part without its sign or its mean; columns that the shares do not say."""
    torch.manual_seed(0)
    size, num_valid, scale = 32, 90, 0.5
    rows, weight = (torch.randn(n, hidden_size).to(DEVICE, DTYPE) for n in (size, num_valid))
    weight *= (16 / hidden_size) ** 0.5
    weight[7] = float("nan")
    rows[-1] = rows[:-1].mean(0) - 0.3 * torch.randn(hidden_size).to(DEVICE, DTYPE)
    ids = torch.tensor([3, 50], device=DEVICE)
    numbers = torch.zeros(3, size, device=DEVICE)
    numbers[0] = torch.where(torch.arange(size, device=DEVICE) % 3 > 0, 1.0, -1.0)
    numbers[1] = 5.0  # the reference
    numbers[2] = 0.4  # the threshold
    numbers[:, -1] = torch.tensor([0.0, math.inf, -math.inf], device=DEVICE)
    labels = torch.full((size,), -1, device=DEVICE)
    labels[5] = 11
    means = torch.randn(2, hidden_size, device=DEVICE)
    sample = shares.Sample(
        labels.int(), numbers, labels, torch.full_like(labels[:1].int(), size - 1), rows, means, means[0]
    )  # fmt: skip
    x = Operands.of(rows, weight, labels, ShardLogits(0, num_valid, scale))
    slots = torch.zeros(num_valid, dtype=torch.int32, device=DEVICE)
    slots[ids] = 1
    parts = torch.empty(size, 96, dtype=DTYPE, device=DEVICE)
    dropped = shares.dropped_columns(sample, x, slots, choose_tiles(DTYPE, rows.device).lse, parts)
    z = scale * rows[:-1].double() @ weight.double().T
    e = torch.where(z < 0.4, (z - 5.0).exp(), 0.0)
    e[5, 11] = e[:, 3] = e[:, 50] = 0.0
    shift = rows[:-1].double().mean(0) - rows[-1].double()
    reweighting = (-shares.REWEIGHTING * scale * (weight.double() @ shift)).nan_to_num().exp()
    sums = e.sum(0) * reweighting
    rtol = 3e-2 if GPU else 1e-4
    torch.testing.assert_close(dropped.sums_V.double(), sums, rtol=rtol, atol=1e-6)
    signed = numbers[0, :-1, None].double() * (e - e.mean(0))
    expected = (signed - signed.mean(0)) * reweighting
    torch.testing.assert_close(parts[:-1, :num_valid].double(), expected, rtol=rtol, atol=1e-3 if GPU else 1e-6)
    assert (parts[-1, :num_valid] == 0).all()

    columns = sampling.sample_columns(dropped, sample, x, ids, 8)
    share = sums / sums.sum()
    torch.testing.assert_close(columns.total[0].double(), sums.sum(), rtol=rtol, atol=0)
    atol = 1e-2 if GPU else 1e-5
    center = share @ weight.double().nan_to_num()
    torch.testing.assert_close(columns.shared_2D[0].double(), center, rtol=rtol, atol=atol)
    torch.testing.assert_close(columns.shared_2D[1].double(), means[0].double() / sums.sum(), rtol=rtol, atol=0)
    taken, inverse_share = systematic_sample(dropped.sums_V / dropped.sums_V.sum(), 8)
    assert torch.equal(columns.ids_C.long(), torch.cat((ids, taken)))
    torch.testing.assert_close(columns.numbers_3K[0], inverse_share, rtol=rtol, atol=0)
    torch.testing.assert_close(columns.numbers_3K[1].double(), share[taken], rtol=rtol, atol=0)
    along = weight[taken].double() @ means[1].double()
    torch.testing.assert_close(columns.numbers_3K[2].double(), along, rtol=rtol, atol=atol)
    assert torch.equal(columns.rows_CD, weight[torch.cat((ids, taken))])


@pytest.mark.parametrize("dtype", dict.fromkeys((torch.float32, DTYPE)), ids=str)
@pytest.mark.slow
def test_sampled_tokens_correct_d_weight(dtype: torch.dtype, limits, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a part of a frequent, kept or label's column, a part without slope or strength, the mean hidden state left
    in or taken off twice, a sign lost, the factor left out, a sum that is written over, a sample that is left out and
    waited for."""
    case = OF_BOTH_SIGNS
    limits(case)
    size = 32
    monkeypatch.setattr(filter, "SAMPLE", size)
    monkeypatch.setattr(memory, "SAMPLE", size)
    p, d, saved = prepared(case, dtype)
    seen = watched(monkeypatch, "dropped_columns", "sample_columns", "factors_of")
    ours = gradients(p, case, d, saved)[1]
    first, sample_bytes = dict(seen), memory.sample_bytes
    monkeypatch.setattr(memory, "sample_bytes", lambda *_: 0)
    alone = gradients(p, case, d, saved)[1]
    monkeypatch.setattr(memory, "sample_bytes", sample_bytes)
    monkeypatch.setattr(sampling, "LEAST_SIGNAL", 0.999)
    assert torch.equal(gradients(p, case, d, saved)[1], alone)

    sums_V, sample = first["dropped_columns"].sums_V.double(), first["given to dropped_columns"][0]
    column = first["sample_columns"].sampled().ids_C
    assert sample.size[0] == size - 1
    token, share = sample.token_S[: size - 1].long(), sums_V / sums_V.sum()
    part = dropped_part(p, d, kept_by(tuple(saved), p, d, case.grad_filter.eps))
    mass = part.sum(1).abs().sum()
    mean = part.sum(1).abs() @ p.hidden.double() / mass
    shift = p.hidden[token].double().mean(0) - mean.to(dtype).double()
    reweighting = (-shares.REWEIGHTING * p.logits.logit_scale * (p.weight.double() @ shift)).exp()
    parts = part[token] / part[token].sum(1, keepdim=True)
    reweighted = parts.mean(0) * reweighting
    torch.testing.assert_close(reweighted / reweighted.sum(), share, rtol=2e-2 if GPU else 1e-4, atol=1e-7)
    sign = part[token].sum(1).sign()
    terms = (sign * (parts[:, column] / share[column] - 1).T) * share[column, None].sqrt()
    centered = p.hidden[token].double() - mean
    signal_share = 1 - (terms.square().sum(0) * centered.square().sum(1)).sum() / (terms @ centered).square().sum()
    assert 0.05 < signal_share < 0.99
    of_tokens = factor(first, sampling.TOKENS).double()
    torch.testing.assert_close(of_tokens, signal_share, rtol=0.05 if GPU else 1e-3, atol=0)
    added_parts = sign[:, None] * (parts - parts.mean(0))
    added_parts = (added_parts - added_parts.mean(0)) * reweighting / reweighted.sum() / (size - 1)
    expected = signal_share * mass * added_parts.T @ centered
    added = ours.double() - alone.double()
    if dtype != torch.float32:  # 16 bits round each number of the correction, not the sum of all.
        assert (added - expected).abs().max() < 2**-7 * alone.abs().max()
        assert abs((added * expected).sum() / expected.square().sum() - 1) < 0.1
    else:
        assert (added - expected).abs().max() < 2e-3 * expected.abs().max()


def test_the_linear_correction(limits, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: the sampled columns' linear part left in, the mean hidden state left in, a mass or a sign lost, the wrong
    columns in the covariance, a factor fitted on other terms than those that are added."""
    case = OF_BOTH_SIGNS if GPU else OF_BOTH_SIGNS._replace(num_tokens=48, num_rows=200)
    limits(case)
    torch.manual_seed(2)  # a problem with a factor between 0 and 1
    size, num_covariance = 32, 48
    monkeypatch.setattr(filter, "SAMPLE", size)
    p, d, saved = prepared(case, torch.float32)
    seen = watched(monkeypatch, "sample_tokens", "dropped_columns", "sample_columns", "factors_of")
    monkeypatch.setattr(memory, "covariance_columns", lambda *_: num_covariance)
    bent = gradients(p, case, d, saved)[0]
    seen = dict(seen)
    factors = factor(seen, sampling.LINEAR), factor(seen, sampling.COLUMNS)
    limits(case._replace(sampled=0))
    monkeypatch.setattr(memory, "covariance_columns", lambda *_: 0)
    rank_1 = gradients(p, case, d, saved)[0]

    sample, column = seen["sample_tokens"], seen["sample_columns"].sampled().ids_C
    share = seen["dropped_columns"].sums_V / seen["dropped_columns"].sums_V.sum()
    center = share.double() @ p.weight.double()
    part = dropped_part(p, d, kept_by(tuple(saved), p, d, case.grad_filter.eps))
    mass = part.sum(1, keepdim=True)
    centered = p.weight[column].double() - center
    strength = mass * (p.hidden.double() - sample.means_2D[1].double())
    terms = part[:, column] / (len(column) * share[column].double()) - mass / len(column)
    lines = strength @ centered.T / len(column)
    apart = p.weight[systematic_sample(share, num_covariance)[0]].double() - center

    # A sampled token stands for as many as have its mass together.
    token = sample.token_S[: size - 1].long()
    weight = mass[token].abs().rsqrt()
    some, straight = terms[token] * weight, lines[token] * weight
    pairs = (some, some), (some, straight), (straight, straight)
    noises = [(a * b * centered.square().sum(1)).sum() for a, b in pairs]
    fitted = linear_factors(some @ centered, straight @ centered, torch.stack(noises), len(column) / num_covariance)
    for ours, theirs in zip(factors, fitted, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=0.05 if GPU else 1e-3, atol=1e-3)
    assert 0.05 < factors[0] < 1.0
    whole, of_draws = factors[0].double(), factors[1].double()
    expected = whole * strength @ (apart.T @ apart) / num_covariance + of_draws * (terms - whole * lines) @ centered
    assert expected.abs().max() > 0.002 * rank_1.abs().max()
    assert (bent.double() - rank_1.double() - expected).abs().max() < 2e-3 * expected.abs().max()


@pytest.mark.parametrize("side", ["hidden", "weight"])
@pytest.mark.slow
def test_one_side_stays_exact(side: str) -> None:
    """FullE and FullC. Catches: the flag of one read for the other, what is exact computed from lists."""
    case = Case()
    p, d, saved = prepared(case)
    both = gradients(p, case, d, saved)
    one = case._replace(grad_filter=case.grad_filter._replace(**{side: False}))
    grads = gradients(p, one, d, saved)
    plain = exact_gradients(p, case, d)
    expected = (plain[0], both[1]) if side == "hidden" else (both[0], plain[1])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(grads, expected, strict=False))
    assert not torch.equal(both[0], plain[0])
    assert not torch.equal(both[1], plain[1])


@pytest.fixture
def gpu_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An H200's tiles, interpreted or not."""
    if not GPU:
        monkeypatch.setattr("cce_dist.kernels.tiles._INTERPRETED", table_tiles(9, 16))
    yield


@pytest.mark.parametrize(
    "case",
    [
        Case(140, 40, 300, ignored=0.0, grad_filter=Filter(2.0**-5)),
        Case(140, 33, 300, softcap=9.0, logit_scale=0.8, coefs="signed", ignored=0.0, budget=1),
        Case(140, 40, 90, start=60, ids=200, num_valid=73, ignored=0.0, grad_filter=Filter(2.0**-14)),
    ],
    ids=["whole", "options-in-groups", "padded-shard-with-a-small-eps"],
)
@pytest.mark.parametrize("num_unserved", [0, 1, 129, 140] if GPU else [1, 140])
@pytest.mark.usefixtures("gpu_tiles")
@pytest.mark.slow
def test_unserved_tokens_are_exact(case: Case, num_unserved: int, limits, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of tokens whose bound is too high, with a GPU's tiles. Catches: lists that are trusted, a token that is
    forgotten or counted twice, rows of another token, a chunk left out, results that depend on the order of programs, and a
    d_weight of exact tokens alone that differs from one without a filter."""
    limits(case)
    monkeypatch.setattr(filter, "SAMPLE", 256)
    nats = torch.zeros(case.num_tokens, device=DEVICE)
    nats[torch.randperm(case.num_tokens)[:num_unserved]] = 1.0
    p, d, saved = prepared(case, nats=nats)
    grad, exact_grad, unserved = gradient_of_logits(tuple(saved), p, d, case)
    assert torch.equal(unserved, nats > 0)
    assert_saved_as_said(p, case, saved)
    ours, again = (gradients(p, case, d, saved) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(ours[:2], again[:2], strict=True))
    if num_unserved == case.num_tokens and case.budget > 1:  # one group, as without a filter
        assert torch.equal(ours[1], exact_gradients(p, case, d)[1])
    weight, hidden = p.weight[: p.logits.num_valid], p.hidden
    assert_no_worse(ours[0], grad.to(DTYPE) @ weight, grad @ weight.double(), DTYPE, "d_hidden")
    assert_no_worse(ours[1][: len(weight)], grad.to(DTYPE).T @ hidden, grad.T @ hidden.double(), DTYPE, "d_weight")
    if num_unserved:  # compared apart, because larger errors of other tokens would hide an error here
        exact_grad = exact_grad[unserved]
        baseline, truth = exact_grad.to(DTYPE) @ weight, exact_grad @ weight.double()
        assert_no_worse(ours[0][unserved], baseline, truth, DTYPE, "d_hidden of unserved tokens")


def test_long_lists_are_shortened(limits) -> None:
    """Tokens whose bound is 2 nats too low have lists by the shard's own log-sum-exp. Catches: such tokens exact, a label lost,
    another threshold in backward than in the list, columns written over marks that are read later."""
    case = Case(24, 24, 1800, softcap=9.0, logit_scale=0.8, coefs="signed", slots=12, grad_filter=Filter(2.0**-5))
    limits(case)
    nats = torch.where(torch.arange(24, device=DEVICE) % 3 > 0, -2.0, 0.0)
    p, d, saved = prepared(case, nats=nats)
    bounds, _, _, count, ids, *_ = saved
    lse, labelled = d.maximum + d.log_sum, p.labels >= 0
    marked = (d.z >= (lse + nats + math.log(case.grad_filter.eps / lists.SLACK))[:, None]) | d.is_label
    marked[:, ids] = False
    long = labelled & (marked.sum(1) > case.slots)
    assert long.sum() > 6 and (labelled & ~long).sum() > 2
    torch.testing.assert_close(
        bounds[0].double()[labelled], torch.where(long, lse, lse + nats)[labelled], rtol=0, atol=1e-4
    )
    grad, _, unserved = gradient_of_logits(tuple(saved), p, d, case)
    assert not unserved.any() and (count <= case.slots).all()
    assert torch.equal(kept_of(tuple(saved), p)[labelled], kept_by(tuple(saved), p, d, case.grad_filter.eps)[labelled])
    ours, weight = gradients(p, case, d, saved), p.weight[: p.logits.num_valid]
    assert_no_worse(ours[0], grad.to(DTYPE) @ weight, grad @ weight.double(), DTYPE, "d_hidden")
    assert_no_worse(ours[1][: len(weight)], grad.to(DTYPE).T @ p.hidden, grad.T @ p.hidden.double(), DTYPE, "d_weight")


@pytest.mark.skipif(GPU, reason="the interpreter counts")
@pytest.mark.parametrize("unserved", [True, False], ids=["all-unserved", "none-unserved"])
def test_nothing_is_computed_for_what_nobody_will_read(unserved: bool, limits, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without listed tokens, backward multiplies what the exact path multiplies, and the filter's own kernels read no matrix;
    without unserved tokens it is the other way round. Catches: a control variate, its squares or its sample where nothing is
    dropped, an exact path that does not return at once."""
    case = Case(37, 16, 420, sampled=32)
    limits(case)
    for module in (memory, filter):
        monkeypatch.setattr(module, "SAMPLE", 16)
    p, d, saved = prepared(case, nats=1.0 if unserved else 0.0)
    read, products = count_work(monkeypatch)
    exact_gradients(p, case, d)
    expected, in_exact = Counter(products), set(read)
    read.clear()
    products.clear()
    if not unserved:
        exact_path = exact.gradients

        def nothing(*args: Any) -> Any:
            read.clear()
            found = exact_path(*args)
            assert not +products and sum(read.values()) < case.num_rows, read  # each program reads one number
            return found

        monkeypatch.setattr(exact, "gradients", nothing)
        gradients(p, case, d, saved)
        assert +products
        return
    gradients(p, case, d, saved)
    assert +products == expected
    of_filter = {name: n for name, n in read.items() if name not in in_exact}
    work = {"_factors_kernel", "_weighted_sums_kernel", "_dropped_columns_kernel", "_compensated_weight_kernel"}
    assert work <= of_filter.keys()
    # Columns are counted, tokens and columns sampled, and the frequent columns' rows gathered, whatever there is.
    always = {"_decide_kernel", "_sample_tokens_kernel", "_sample_columns_kernel"}
    assert all(n < 3 * case.num_rows for name, n in of_filter.items() if name not in always), of_filter


def count_work(monkeypatch: pytest.MonkeyPatch) -> tuple[Counter[str], Counter[str]]:
    """Elements that each kernel reads, and its products of tiles, from here on."""
    read: Counter[str] = Counter()
    products: Counter[str] = Counter()
    name = ""
    run, builder = GridExecutor.__call__, InterpreterBuilder
    load, dot = builder.create_masked_load, builder.create_dot

    def running(executor: Any, *args: Any, **options: Any) -> None:
        nonlocal name
        name = executor.fn.__name__
        run(executor, *args, **options)

    def loading(builder: Any, pointers: Any, mask: Any, *args: Any, **options: Any) -> Any:
        read[name] += int(np.sum(mask if isinstance(mask, np.ndarray) else mask.data))
        return load(builder, pointers, mask, *args, **options)

    def multiplying(builder: Any, *args: Any) -> Any:
        products[name] += 1
        return dot(builder, *args)

    monkeypatch.setattr(GridExecutor, "__call__", running)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", loading)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", multiplying)
    return read, products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_d_hidden_with_and_without_a_remainder(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the budget has room for the remainder of all tokens, or not. Catches: a list added twice or not at all, a remainder
    that another token gets, one that is not there."""
    case = Case(num_tokens=26, budget=1 << 14)
    p, d, saved = prepared(case, dtype)
    grad = gradient_of_logits(tuple(saved), p, d, case)[0]
    for kept in (1, 0):
        monkeypatch.setattr(memory, "remainder_bytes", lambda *_, kept=kept: kept)
        d_hidden = gradients(p, case, d, saved, want_weight=False)[0]
        assert_no_worse(d_hidden, grad.to(dtype) @ p.weight, grad @ p.weight.double(), dtype, "d_hidden")


def test_second_backward_and_buffers() -> None:
    """Same bits again; parts wanted alone are the same; a given buffer is added to. Catches: saved tensors changed in place, a
    row of the buffer set, d_hidden announced before it is whole."""
    case = Case(coefs="large")
    p, d, saved = prepared(case)
    seen: list[Tensor] = []
    first = gradients(p, case, d, saved, hidden_ready=lambda d_hidden: seen.append(d_hidden.clone()))
    assert len(seen) == 1
    assert torch.equal(seen[0], first[0])
    only = gradients(p, case, d, saved, want_hidden=False)
    assert only[0] is None
    assert torch.equal(only[1], first[1])
    buffer = torch.ones(p.weight.shape, device=DEVICE)
    again = gradients(p, case, d, saved, weight_out=buffer)
    assert torch.equal(again[0], first[0])
    assert again[1] is None
    assert_no_worse(buffer - 1, first[1].float(), first[1].double(), torch.bfloat16 if GPU else torch.float16)


def test_non_finite_and_ignored_tokens_stay_alone() -> None:
    """Catches: NaN in the shares, an ignored token's row read, a non-finite one's list used."""
    case = Case()
    p = problem(case)
    broken = p._replace(hidden=p.hidden.clone())
    broken.hidden[p.labels < 0] = torch.nan
    victim = int((p.labels >= 0).nonzero()[3])
    broken.hidden[victim, 3] = torch.inf
    others = torch.arange(case.num_tokens, device=DEVICE) != victim
    d = dense(p)
    results = []
    for q in (p._replace(labels=torch.where(others, p.labels, -1)), broken):
        stats, *saved = local_stats(q, case)
        maximum = torch.where(others, d.maximum.float(), stats[0]).double()
        log_sum = torch.where(others, d.log_sum.float(), stats[1].log()).double()
        results.append(gradients(q, case, d._replace(maximum=maximum, log_sum=log_sum), saved))
    (d_hidden, _, _), (d_hidden_broken, d_weight_broken, _) = results
    assert not d_hidden_broken[victim].isfinite().any()
    assert d_hidden_broken[others].isfinite().all()
    # the victim's label is not counted in one of them, which may change frequent columns: no bits to compare, but nearly the
    # same
    assert (d_hidden - d_hidden_broken)[others].abs().max() < 0.1 * d_hidden.abs().max()
    assert not d_weight_broken.isfinite().all()


def assert_saved_as_said(p: Problem, case: Case, saved: list[Tensor]) -> None:
    """What the fakes of the operator say is what is saved."""
    for tensor, like in zip(saved, filter.saved_like(p.operands, spec_of(p, case)), strict=True):
        assert (tensor.shape, tensor.dtype) == (like.shape, like.dtype)


@pytest.mark.parametrize(
    "case", [Case(num_tokens=0), Case(num_rows=9, num_valid=0, ids=9), Case(ignored=2.0), Case(num_rows=1, ids=1)],
    ids=["no-tokens", "only-padding", "all-ignored", "one-row"],
)  # fmt: skip
def test_nothing_to_do(case: Case) -> None:
    """Catches: outputs left unwritten where no tile exists, a share of 0 / 0."""
    p = problem(case)
    stats, *saved = local_stats(p, case)
    assert_saved_as_said(p, case, saved)
    zeros = torch.zeros(case.num_tokens, device=DEVICE).double()
    d = Dense(zeros, zeros, zeros, zeros, stats[0].double(), stats[1].log().double())
    for found, given in zip(gradients(p, case, d, saved), (p.hidden, p.weight), strict=False):
        assert found.shape == given.shape and found.isfinite().all()
        assert (found == 0).all() or case.num_rows == 1


def test_a_sample_that_drops_nothing(limits, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches rows of d_weight that two kernels leave to each other, where what is dropped weighs nothing."""
    case = OF_BOTH_SIGNS._replace(logit_scale=1.0, softcap=0.0, coefs="mean")
    limits(case)
    monkeypatch.setattr(filter, "SAMPLE", 32)
    monkeypatch.setattr(memory, "SAMPLE", 32)
    p = problem(case)
    p = p._replace(coef=torch.zeros_like(p.coef))
    _, *saved = local_stats(p, case)
    seen = watched(monkeypatch, "dropped_columns")
    d_hidden, d_weight, _ = gradients(p, case, dense(p), saved)
    assert seen["given to dropped_columns"][-1] is not None
    assert (d_hidden == 0).all() and (d_weight == 0).all()


PUBLIC = [
    verify_cases.filter_trap("softcap", "", {"softcap": 20.0}, dtype=torch.float32, buffer=torch.float32),
    verify_cases.filter_trap("full-c", "", {"z_loss_weight": 1e-4}, dtype=torch.float32),
]


@pytest.mark.parametrize("case", PUBLIC, ids=lambda case: case.name)
def test_linear_cross_entropy(case: verify_cases.LossCase) -> None:
    """The operators around the kernels, as verify runs them on ranks. Catches: a tensor saved in one place, read in another."""
    grad_filter = GradFilter(2.0**-6, weight=case.name != "full-c", always=True)
    draw = verify_cases.Zipf(18, 16, 130, labels=verify_cases.ignore(slice(0, None, 4)))
    assert_holds(LOSS, replace(case, options={**case.options, "grad_filter": grad_filter}, problem=draw))


def test_small_heads_are_exact_unless_the_filter_is_forced() -> None:
    """Catches: a filter that runs where it costs more, a rule that looks at a rank's own shard, one that backward forgets."""
    p = problem(Case(num_tokens=18, num_rows=80 if not GPU else 500, ignored=0.0))  # more than are frequent
    results = []
    for grad_filter in (None, GradFilter(2.0**-6), GradFilter(2.0**-6, always=True)):
        leaves = [p.hidden.detach().clone().requires_grad_(), p.weight.detach().clone().requires_grad_()]
        loss = linear_cross_entropy(leaves[0], leaves[1], p.labels, grad_filter=grad_filter, backend="triton")
        results.append(torch.autograd.grad(loss, leaves))
    exact_grads, grads, forced_grads = results
    assert all(torch.equal(a, b) for a, b in zip(exact_grads, grads, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(exact_grads, forced_grads, strict=True))


BIG = Case(num_tokens=1000, hidden_size=512, num_rows=6000, grad_filter=Filter(2.0**-12), budget=64 << 20)


@needs_gpu
def test_same_bits_every_run() -> None:
    """Catches: atomics on floats, a race between programs."""
    p = problem(BIG)
    d = dense(p)
    results = []
    for _ in range(5):
        stats, *saved = local_stats(p, BIG)
        results.append((stats, *gradients(p, BIG, d, saved)[:2]))
        assert all(map(torch.equal, results[0], results[-1]))


@needs_gpu
def test_nothing_waits_for_the_device() -> None:
    """Catches: a count read back, a tensor made from numbers of the host."""
    torch.use_deterministic_algorithms(False)
    p = problem(BIG)
    hidden, weight = (x.clone().requires_grad_() for x in (p.hidden, p.weight))
    for return_aux in (False, True, False):
        how: Any = {"grad_filter": verify_cases.FILTERED, "return_aux": return_aux}
        out = linear_cross_entropy(hidden, weight, p.labels, **how)
        torch.cuda.set_sync_debug_mode("default")
        (out.loss if return_aux else out).backward()
        torch.cuda.set_sync_debug_mode("error")  # from the second call on: the first one compiles
    torch.cuda.set_sync_debug_mode("default")


def test_sampled_columns_bound_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: frequent columns sampled, columns that are not spread evenly, a label counted twice, the error left out or
    taken twice, and an error where every column is sampled."""
    num_frequent, num_rows, size = 100 if GPU else 13, 600, 64
    p = problem(Case(start=20, num_rows=num_rows, ids=700, ignored=0.0))
    d = dense(p)
    lse, num_outside = d.maximum + d.log_sum, num_rows - num_frequent
    sampled: list[Tensor] = []
    spy, gather = mock.MagicMock(), bound._gather_few_kernel
    spy.__getitem__.return_value = lambda *args, **options: (
        gather[spy.__getitem__.call_args.args[0]](*args, **options),
        sampled.append(args[2].long()),
    )
    monkeypatch.setattr(bound, "_gather_few_kernel", spy)
    monkeypatch.setattr(bound, "bound_columns", lambda num_outside, _: num_outside)
    every = local_stats(p, Case())[1][0].double()
    assert len(sampled[0].unique()) == num_outside
    torch.testing.assert_close(every, lse, rtol=0, atol=2e-2 if GPU else 1e-5)

    monkeypatch.setattr(bound, "bound_columns", lambda *_: size)
    _, *saved = local_stats(p, Case())
    ids, frequent_ids = sampled[1], saved[4]
    assert not torch.isin(ids, frequent_ids).any()
    gaps = ids.diff()
    assert len(ids) == size and gaps.min() > 0 and gaps.max() < 4 * num_rows / size
    e = (d.z - lse[:, None]).exp()
    is_frequent = torch.zeros(num_rows, dtype=torch.bool, device=DEVICE).index_fill(0, frequent_ids, True)
    sample = torch.where(d.is_label, 0.0, e)[:, ids]
    error = bound.ERRORS * ((1 - size / num_outside) / (size - 1)) ** 0.5 * sample.std(1, correction=0)
    rest = num_outside * (sample.mean(1) - error).clamp_min(0)
    expected = lse + (torch.where(is_frequent | d.is_label, e, 0.0).sum(1) + rest).log()
    torch.testing.assert_close(saved[0][0].double(), expected, rtol=0, atol=2e-2 if GPU else 1e-4)
    assert (rest > 0).any() and (rest == 0).any()


def test_slots_are_what_eps_the_budget_and_the_cost_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a share of the budget that lists exceed, lists that cost more than the exact gradient, an eps left out."""
    monkeypatch.undo()

    def slots(num_tokens: int, num_columns: int, exponent: int, mib: int = 256) -> int:
        return memory.list_slots(memory.Sizes(num_tokens, 4096, num_columns, 2), 2.0**exponent, mib << 20)

    assert [slots(8192, 128_256, exponent) for exponent in (-4, -10, -11)] == [256, 256, 512]
    assert 600 < slots(8192, 128_256, -14) < 640 and slots(8192, 128_256, -14, 4096) == 2000
    assert slots(8192, 16_032, -10) == 240 and slots(8192, 500, -10) == slots(1 << 24, 128_256, -10) == 16
    assert slots(0, 32_000, -10) == 256
    for num_tokens in (8192, 32_768, 131_072):
        taken = slots(num_tokens, 256_000, -10) * num_tokens * 20 + 256 * 256_000 * 2
        assert taken <= 256 << 20


def test_a_buffer_beside_a_weight_that_needs_no_gradient() -> None:
    """Catches: a buffer that becomes the target of a d_weight that nobody wants."""
    p = problem(Case())
    hidden, labels = p.hidden.clone().requires_grad_(), p.labels.clamp(min=0) % len(p.weight)
    buffer = torch.zeros(p.weight.shape, device=DEVICE)
    options: dict[str, Any] = {"grad_filter": GradFilter(always=True), "backend": "triton"}
    linear_cross_entropy(hidden, p.weight, labels, grad_weight_out=buffer, **options).backward()
    assert hidden.grad is not None and hidden.grad.isfinite().all() and not buffer.any()


@pytest.mark.parametrize("gap", [60.0, 88.0, 95.0, 103.0, 130.0])
def test_a_shard_far_below_the_others(gap: float) -> None:
    """Its largest logit is ``gap`` nats below the log-sum-exp. Catches: a sum of denormal numbers times an infinite factor."""
    case = Case(ignored=0.0)
    p = problem(case)
    lse = torch.logsumexp(p.hidden.float() @ p.weight.float().T, 1) + gap
    stats, *_ = local_stats(p, case, merge_bound=lambda _: lse)
    others = torch.stack((lse, torch.ones_like(lse), torch.zeros_like(lse)))
    x = p.operands._replace(ids=p.labels)
    found, _ = filter.token_losses(torch.stack((stats, others)), x, spec_of(p, case))
    torch.testing.assert_close(found.lse, lse, rtol=1e-6, atol=0)


def test_frequent_columns_are_those_labelled_most() -> None:
    """Catches: ties broken by chance, labels of other shards or ignored ones counted."""
    labels = torch.tensor([7, 7, 7, 5, 5, 9, 3, 3, -1, -100, 100, 0], device=DEVICE)
    nothing = torch.zeros(0, device=DEVICE)
    ids = torch.empty(6, dtype=torch.int64, device=DEVICE)
    zeros = torch.ones(20, dtype=torch.int32, device=DEVICE)
    words = bound.most_labelled(Operands.of(nothing, nothing, labels, ShardLogits(3, 20)), ids, zeros, 2)
    assert words.tolist() == [0b1011111, 0] and not zeros.any()
    assert ids.tolist() == [0, 1, 2, 3, 4, 6]  # counts 2, 0, 2, 0, 3, 1: of those never seen the first
