"""One shard's statistics and gradients with a filter: the kernels of this folder, in the order they run.

forward                                               backward
  logits of the frequent columns, of the label and      exact gradients of tokens that the lists cannot serve
    of sampled columns bound each token's                 (lists.decide, exact)
    log-sum-exp (frequent, bound)                       listed columns (lists); a control variate for the others,
  log-sum-exp; each logit that reaches the                corrected by samples (shares, sampling, covariance)
    threshold is marked (lse)                           frequent columns: dlogits, d_hidden and d_weight as matrix
  marks become lists of columns (lists)                   products, to which the listed ones are added (d_weight)

Each element is judged by itself, and every element that reaches the threshold is kept: about a hundred in a row of 10^5
logits. They are scattered, so keeping whole tiles of any size would keep thousands. Most kept elements belong to ids that are
frequent in every text. These frequent columns are kept for all tokens, as a matrix. The other elements are kept in lists, and
their rows of the weight are gathered.

A rank-1 matrix ``m_i share_j`` replaces the dropped elements: m_i is the softmax mass of token i outside frequent and listed
columns, and share_j is column j's part of all dropped mass, estimated from sampled tokens. So the row sums of the softmax are
right to rounding, and its column sums to the sample's error. Sampled columns correct d_hidden, and sampled tokens correct
d_weight (sampling).

A token is unserved if its list is too long, backward needs more columns than forward listed, the bound was too high, or a
number is not finite. The exact kernels compute the gradients of unserved tokens. Most steps have none, and these kernels return
at once. Only the device knows which tokens are unserved, and nothing waits for it.

Source: the filter of *Cut Your Losses* (Wijmans et al., 2024, section 4.3), which judges tiles of a sorted vocabulary. Lists,
frequent columns and compensation are this project's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from cce_dist.kernels import Gradients, Grads, Operands, Rows, Softmax, Spec, Upstream, Want, exact, memory
from cce_dist.kernels.blocks import on_device
from cce_dist.kernels.d_hidden import Sum
from cce_dist.kernels.d_weight import add_d_weight
from cce_dist.kernels.direct import allocate
from cce_dist.kernels.filter.bound import bound_of_shard, sample_outside, sampled_sums
from cce_dist.kernels.filter.covariance import along, linear_of
from cce_dist.kernels.filter.d_hidden import Linear, Product, add_products
from cce_dist.kernels.filter.d_weight import by_column, compensated_weight, listed_weight
from cce_dist.kernels.filter.frequent import Frequent, gather_frequent, most_labelled, num_frequent, outside_frequent
from cce_dist.kernels.filter.lists import SLACK, Decisions, Entries, Lists, decide, list_columns, listed_gradients
from cce_dist.kernels.filter.sampling import (
    Columns,
    Given,
    SampledTokens,
    column_gradients,
    factors_of,
    sample_columns,
    squares,
    tile_of_sample,
)
from cce_dist.kernels.filter.shares import dropped_columns, sample_tokens
from cce_dist.kernels.losses import Results, finish, merged_lse, of_statistics, token_losses
from cce_dist.kernels.lse import (
    NOTHING_MORE,
    Marks,
    Span,
    gathered_with_targets,
    lse_partials,
    shape_of_partials,
)
from cce_dist.kernels.memory import SAMPLE
from cce_dist.kernels.tiles import Tiles, choose_tiles, num_programs
from cce_dist.kernels.tokens import (
    coefficients,
    first_rows,
    gathered,
    label_ids,
    ordered_ids,
    weighted_sums,
)
from cce_dist.kernels.waves import cdiv, num_parts

__all__ = [
    "gradients", "label_ids", "losses_alone", "merged_lse", "ordered_ids", "saved_like", "saved_of_slices", "statistics",
    "token_losses",
]


def saved_of_slices(x: Operands, spec: Spec) -> list[torch.Tensor] | None:
    return None  # the lists come from all tokens


def saved_like(x: Operands, spec: Spec) -> list[torch.Tensor]:
    num_tokens, num_slots = x.num_tokens, memory.list_slots(exact.sizes_of(x), spec.filter.eps, spec.workspace_bytes)
    return [
        torch.empty(shape, dtype=dtype, device=x.hidden.device)
        for shape, dtype in (
            ((3, num_tokens), torch.float32),
            ((num_tokens, num_slots), torch.int32),
            (x.num_valid, torch.int32),
            (num_tokens, torch.int32),
            (num_frequent(x.num_valid, spec.filter.eps), torch.int64),
        )
    ]


def statistics(
    x: Operands, spec: Spec, merge_bound: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return stats_KN as ``exact`` does, and ``Lists``."""
    num_tokens, num_valid = x.num_tokens, x.num_valid
    stats_KN = torch.empty(spec.num_stats, num_tokens, dtype=torch.float32, device=x.hidden.device)
    lists = Lists(*saved_like(x, spec))
    if num_tokens == 0 or num_valid == 0:
        lists.count_V.zero_()
        lists.count_N.zero_()
        stats_KN.zero_()[0] = float("-inf")
        bound_3N = torch.stack((merge_bound(stats_KN[:3]), torch.zeros_like(stats_KN[0]), stats_KN[0]))
        return stats_KN, list(lists._replace(bound_3N=bound_3N))
    with on_device(x.hidden):
        tiles = choose_tiles(x.hidden.dtype, x.hidden.device)
        num_words = cdiv(num_valid, tiles.lse.cols) * tiles.lse.cols // 32
        most_labelled(x, lists.ids_F, lists.count_V)
        frequent = gather_frequent(lists.ids_F, x, num_words)
        at_once, first_at_once = memory.filter_forward_rows(
            exact.sizes_of(x), num_words, spec.workspace_bytes, tiles.lse.rows, tiles.group
        )
        buffer_RD = new_rows(x, min(first_at_once, num_tokens))
        first = _before_all_columns(x, frequent, tiles, buffer_RD, stats_KN, merge_bound)
        _marked_statistics(x, frequent, first, lists, stats_KN, buffer_RD, at_once, spec)
    return stats_KN, list(lists)


def losses_alone(x: Operands, spec: Spec, merge_bound: Callable[[torch.Tensor], torch.Tensor]) -> Results:
    return of_statistics(x, spec, *statistics(x, spec, merge_bound))


def new_rows(x: Operands, num_rows: int, num_columns: int | None = None) -> torch.Tensor:
    """Allocate [num_rows, num_columns] in the hidden states' dtype, by default for hidden states of ``num_rows`` tokens."""
    num_columns = x.hidden.shape[1] if num_columns is None else num_columns
    return torch.empty(num_rows, num_columns, dtype=x.hidden.dtype, device=x.hidden.device)


class _First(NamedTuple):
    """Statistics of each token that are computed before the pass over all columns.

    Attributes:
        order: The compact order of the tokens, as ``tokens.compact`` returns it.
        frequent_3N: Maximum and sum of exp over the frequent columns, fp32. The third row is not used.
        frequent_sloped_N: Sum of exp times the softcap's slope over the frequent columns, fp32; None without a softcap.
        bound_N: Lower bound of the log-sum-exp, fp32.
    """

    order: list[torch.Tensor]
    frequent_3N: torch.Tensor
    frequent_sloped_N: torch.Tensor | None
    bound_N: torch.Tensor


def _before_all_columns(
    x: Operands, frequent: Frequent, tiles: Tiles, buffer_RD: torch.Tensor, stats_KN: torch.Tensor,
    merge_bound: Callable[[torch.Tensor], torch.Tensor],
) -> _First:
    """Write the labels' logits to stats_KN. Bound log-sum-exps by labels, frequent columns, and a sample of other columns."""
    order, num_tokens, device = exact.order_of(x), x.num_tokens, x.hidden.device
    frequent_3N = torch.empty(3, num_tokens, dtype=torch.float32, device=device)
    frequent_sloped_N = None
    if x.head.softcap is not None:
        frequent_sloped_N = torch.empty(num_tokens, dtype=torch.float32, device=device)
    sampled_ids_S, sampled = sample_outside(frequent, x)
    num_sampled = sampled_ids_S.shape[0]
    sums_3PN = torch.empty(3, cdiv(num_sampled, tiles.lse.cols), num_tokens, dtype=torch.float32, device=device)
    for group in exact.token_groups(order, buffer_RD.shape[0]):
        rows = gathered_with_targets(x, group, buffer_RD, stats_KN, 2)
        _log_sum_exp(frequent.x, rows, tiles, frequent_3N, frequent_sloped_N)
        if num_sampled:
            sampled_sums(sampled_ids_S, sampled, x.start, rows, tiles, sums_3PN)
    shard_3N = bound_of_shard(frequent_3N, stats_KN, sums_3PN, num_sampled, x, frequent)
    return _First(order, frequent_3N, frequent_sloped_N, merge_bound(shard_3N))


def _marked_statistics(
    x: Operands,
    frequent: Frequent,
    first: _First,
    lists: Lists,
    stats_KN: torch.Tensor,
    buffer_RD: torch.Tensor,
    at_once: int,
    spec: Spec,
) -> None:
    """Write the statistics of all columns to stats_KN, and fill the lists."""
    num_tokens, num_words = x.num_tokens, frequent.num_words
    tiles = choose_tiles(x.hidden.dtype, x.hidden.device)
    sloped_N = None if first.frequent_sloped_N is None else torch.empty_like(first.frequent_sloped_N)
    words_RW = torch.empty(min(at_once, num_tokens), num_words, dtype=torch.int32, device=x.hidden.device)
    for group in exact.token_groups(first.order, at_once):
        if at_once < num_tokens:
            rows = gathered(x.hidden, group, buffer_RD)
        else:  # the first pass has gathered all
            rows = Rows(group[0], group[1], buffer_RD)
        words = first_rows(words_RW, group[0].shape[0])
        marks = Marks(first.bound_N, math.log(spec.filter.eps / SLACK), words)
        _log_sum_exp(x, rows, tiles, stats_KN, sloped_N, marks, spec.want)
        list_columns(words, frequent, x, rows, lists)
    outside_frequent(
        first.bound_N, first.frequent_3N, first.frequent_sloped_N, stats_KN, sloped_N, lists.bound_3N
    )


def _log_sum_exp(
    x: Operands, rows: Rows, tiles: Tiles, stats_KN: torch.Tensor, sloped_N: torch.Tensor | None,
    marks: Marks | None = None, want: Want = NOTHING_MORE,
) -> None:
    """Run the log-sum-exp over all columns into stats_KN and sloped_N at the tokens of the group."""
    num_rows = rows.index.shape[0]
    num_tiles = cdiv(x.num_valid, tiles.lse.cols)
    parts = num_parts(num_rows, num_tiles, tiles.lse.rows, num_programs(stats_KN.device))
    (partials_KPR,) = allocate(stats_KN.device, shape_of_partials(parts, num_rows, want))
    lse_partials(
        x, rows, tiles, Span(0, num_tiles, parts), partials_KPR, want=want, marks=marks, want_sloped=sloped_N is not None
    )
    finish(x, rows, partials_KPR, want=want, stats_KN=stats_KN, sloped_N=sloped_N)


def gradients(
    x: Operands, softmax: Softmax, upstream: Upstream, saved: list[torch.Tensor], grads: Grads, spec: Spec
) -> Gradients:
    """Return the filtered d_hidden and d_weight, and None; see ``Backend.gradients``. A call with a bias is exact.

    An element is kept if ``|P p| >= eps |LABEL|`` (``eps |P|`` if LABEL is 0), if it is the label's, if its column is frequent,
    or if the token's list holds it. All gradients are exact if the entropy is differentiated, which has no control variate.
    """
    sides = spec.filter
    coef_4N = coefficients(upstream, x.ids, spec.vocab_size)

    def exactly(wanted: Grads) -> Gradients:
        return exact.gradients_by(x, softmax, coef_4N, exact.new_saved(x, exact.order_of(x)), wanted, spec)

    if x.num_tokens == 0 or x.num_valid == 0 or softmax.entropy is not None:
        return exactly(grads)
    d_hidden = d_weight = None
    if grads.want_hidden and not sides.hidden:
        d_hidden = exactly(grads._replace(want_weight=False, weight_out=None))[0]
    here = grads._replace(
        want_hidden=grads.want_hidden and sides.hidden, want_weight=grads.want_weight and sides.weight,
        weight_out=grads.weight_out if sides.weight else None,
    )
    if here.want_hidden or here.want_weight:
        filtered = _filtered_gradients(x, softmax, coef_4N, Lists(*saved), here, spec)
        d_hidden = d_hidden if filtered[0] is None else filtered[0]
        d_weight = filtered[1]
    if grads.want_weight and not sides.weight:
        d_weight = exactly(grads._replace(want_hidden=False, hidden_ready=None))[1]
    return d_hidden, d_weight, None


class Compensation(NamedTuple):
    """The control variate for the dropped gradients, and its corrections.

    Attributes:
        share_V: As ``shares.Dropped.sums_V``.
        shared_weight_D: Each column's share times this row is added to d_weight.
        columns: Columns whose gradients are computed for all tokens.
        center_D: c of ``compensation.py``: the first row of a matrix.
        tokens: Tokens that correct d_weight, or None.
        factors_4: Factors of the corrections, or None without any.
        linear: The linear correction of d_hidden (``covariance.py``), or None.
        along_N: What ``column_gradients`` needs for it.
    """

    share_V: torch.Tensor
    shared_weight_D: torch.Tensor
    columns: Columns
    center_D: torch.Tensor
    tokens: SampledTokens | None = None
    factors_4: torch.Tensor | None = None
    linear: Linear | None = None
    along_N: torch.Tensor | None = None


class _Work(NamedTuple):
    """Inputs that d_hidden and d_weight share.

    Attributes:
        frequent: The frequent columns.
        how: The decision for each token.
        lists: The lists of forward.
        compensation: The control variate and its corrections.
        tiles: Tiles of the device.
    """

    frequent: Frequent
    how: Decisions
    lists: Lists
    compensation: Compensation
    tiles: Tiles


def _filtered_gradients(
    x: Operands, softmax: Softmax, coef_4N: torch.Tensor, lists: Lists, grads: Grads, spec: Spec
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    with on_device(x.hidden):
        tiles = choose_tiles(x.hidden.dtype, x.hidden.device)
        room = memory.sampled_columns(x.num_valid) if spec.filter.compensate else 0
        frequent = gather_frequent(lists.ids_F, x, cdiv(x.num_valid, 32), room)
        how, entries = decide(x, softmax, coef_4N, lists, spec.filter.eps)
        # First set the exact gradients of unserved tokens, then add the filtered ones. Chunks of the vocabulary are cut for the
        # case that all tokens are unserved.
        d_hidden, d_weight, _ = exact.gradients_by(
            x, softmax, coef_4N, exact.new_saved(x, how.unserved_order),
            grads._replace(hidden_ready=None, ready_rows=None, often_empty=True), spec,
        )
        target = None
        if grads.want_weight:
            target = d_weight if grads.weight_out is None else grads.weight_out
        total = None
        if d_hidden is not None:
            keeps = memory.keeps_remainder(exact.sizes_of(x), spec.workspace_bytes)
            total = Sum(d_hidden, exact.remainder(x.hidden, x.num_tokens) if keeps else None, by_token=True)
        factor_N = listed_gradients(x, softmax, coef_4N, lists, how, spec.filter.compensate, entries, total)
        given = Given(x, softmax, coef_4N, how.numbers_3N, factor_N)
        comp = _compensation(x, given, frequent, how, tiles, grads, spec)
        work = _Work(frequent, how, lists, comp, tiles)
        frequent_weight_FD = None
        if target is not None:
            frequent_weight_FD = torch.empty_like(frequent.x.weight, dtype=target.dtype)
        _add_rows(total, frequent_weight_FD, given, work, grads, spec)
        if target is not None and frequent_weight_FD is not None:
            _finish_weight(target, x, entries, frequent_weight_FD, work, add=grads.weight_out is not None)
    return d_hidden, d_weight


def _finish_weight(
    target: torch.Tensor, x: Operands, entries: Entries, frequent_weight_FD: torch.Tensor, work: _Work, *, add: bool
) -> None:
    """Sum all parts of d_weight in ``target``."""
    comp, how = work.compensation, work.how
    parts = (work.frequent.slot_V, frequent_weight_FD, comp.share_V, comp.shared_weight_D)
    columns = by_column(work.lists, entries)
    if comp.tokens is not None and comp.factors_4 is not None:
        compensated_weight(target, comp.tokens, comp.factors_4, *parts, how, work.tiles.grad_weight, add=add)
    listed_weight(target, x.hidden, columns, *parts, how, comp.factors_4, add=add)


def _compensation(
    x: Operands, given: Given, frequent: Frequent, how: Decisions, tiles: Tiles, grads: Grads, spec: Spec
) -> Compensation:
    """Sample tokens and columns, and estimate the control variate and the factors on its corrections."""
    num_valid, budget = x.num_valid, spec.workspace_bytes
    if not spec.filter.compensate:
        zeros_V, zeros_2D = (torch.zeros(shape, device=x.hidden.device) for shape in (num_valid, (2, x.weight.shape[1])))
        none = torch.empty(0, dtype=torch.int32, device=x.hidden.device)
        columns = Columns(frequent.ids_F, none, zeros_V, frequent.x.weight, zeros_2D, zeros_V)
        return Compensation(zeros_V, zeros_2D[1], columns, zeros_2D)
    sample = sample_tokens(x, given.dropped_N, given.coef_4N, how.numbers_3N, SAMPLE)
    parts_SV = None
    if grads.want_weight and memory.keeps_sample(x.num_tokens, num_valid, x.hidden.itemsize, budget):
        parts_SV = new_rows(x, SAMPLE, cdiv(num_valid, memory.ROWS) * memory.ROWS)
    dropped = dropped_columns(sample, x, frequent.slot_V, tiles.lse, parts_SV)
    partial_P1D = weighted_sums(dropped.sums_V, x.weight[:num_valid])
    num_columns = frequent.rows_CD.shape[0] - frequent.ids_F.shape[0]
    columns = sample_columns(dropped, partial_P1D, sample, x, frequent, num_columns)
    comp = Compensation(dropped.sums_V, columns.shared_2D[1], columns, columns.shared_2D)
    rows = Rows(sample.token_S, sample.size, sample.rows_SD)
    tokens = None if parts_SV is None else SampledTokens(parts_SV, rows)
    if num_columns == 0 or not (grads.want_hidden or tokens is not None):
        return comp
    along_N, size = None, memory.covariance_columns(exact.sizes_of(x), budget) if grads.want_hidden else 0
    if size:
        along_N = along(x, columns, sample)
    terms = [new_rows(x, SAMPLE, num_columns) for _ in range(2 if size else 1)]
    tile = tile_of_sample(tiles.dlogits)
    sums_BS = torch.empty(cdiv(num_columns, tile.cols), SAMPLE, dtype=torch.float32, device=x.hidden.device)
    for line_N, terms_SK in zip((None, along_N), terms, strict=False):
        column_gradients(columns, rows, given, None, line_N, tile, terms_SK, sums_BS, num_frequent=0)
    of_columns = of_tokens = None
    inverse_S = sample.numbers_3S[0]
    if grads.want_hidden:
        of_columns = squares(terms, inverse_S, None, columns.sampled_KD, columns.shared_2D, sample.size)
    if tokens is not None:
        of_tokens = squares(
            [terms[0].T], columns.numbers_3K[1], inverse_S, sample.rows_SD, sample.means_2D[1], sample.size
        )
    factors_4, num_used = factors_of(of_columns, of_tokens, sample, columns, size)
    linear = linear_of(dropped, size, columns, num_used, sample, x, tiles.grad_weight) if size else None
    return comp._replace(tokens=tokens, factors_4=factors_4, linear=linear, along_N=along_N)


def _add_rows(
    total: Sum | None, frequent_weight_FD: torch.Tensor | None, given: Given, work: _Work, grads: Grads, spec: Spec
) -> None:
    """Finish d_hidden, a group of tokens at a time, and compute the frequent columns' rows of d_weight."""
    x, how, comp, tiles = given.x, work.how, work.compensation, work.tiles
    columns, num_frequent = comp.columns, work.frequent.ids_F.shape[0]
    if total is None:
        columns = columns._replace(rows_CD=work.frequent.x.weight)
    num_columns, block_cols = columns.rows_CD.shape[0], tiles.dlogits.cols
    at_once = memory.filter_backward_rows(exact.sizes_of(x), num_columns, spec.workspace_bytes)
    buffer_RD, buffer_RC = new_rows(x, at_once), new_rows(x, at_once, num_columns)
    sums_BR = torch.empty(cdiv(num_columns, block_cols), at_once, dtype=torch.float32, device=x.hidden.device)
    product = Product(columns.rows_CD, num_frequent, comp.center_D, comp.factors_4, comp.linear, given.dropped_N)
    groups = exact.finished_groups(how.listed_labels, how.order, at_once, grads.ready_rows)
    for number, (*group, num_final) in enumerate(groups):
        rows = gathered(x.hidden, group, buffer_RD)
        grads_RC = first_rows(buffer_RC, rows.index.shape[0])
        column_gradients(
            columns, rows, given, comp.factors_4, comp.along_N, tiles.dlogits, grads_RC, sums_BR, num_frequent=num_frequent
        )
        if total is not None:
            add_products(total, rows, grads_RC, sums_BR, block_cols, product, tiles.grad_hidden)
            if grads.hidden_ready is not None and num_final:
                grads.hidden_ready(total.high_ND[:num_final])
        if frequent_weight_FD is not None:
            add_d_weight(frequent_weight_FD, grads_RC, rows, None, tiles.grad_weight, add=number > 0)
