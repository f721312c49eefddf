"""One shard's statistics and gradients with a filter: the kernels of this folder, in the order they run.

forward                                             backward
  logits of the hot columns, of the label and of      tokens that the lists cannot serve (lists.plan): the exact path
    some others bound each token's log-sum-exp          listed columns, and the stand-in for all that are dropped
    (hot, bound)                                        (lists.listed_gradients, shares)
  log-sum-exp; each logit that reaches the
    threshold is marked (lse)                         hot columns: dlogits, d_hidden and d_weight as matrix products,
  marks become lists of columns (lists)                 to which the listed ones are added (d_rows)

Each element is judged alone, and all that reach the threshold are kept: the hundred or so of a row of 10^5 that do are
scattered, so tiles of any size would keep thousands. Most belong to ids that are frequent everywhere: those hot columns are
kept whole, as a matrix. The rest are kept in lists and gathered.

A rank-1 matrix ``m_i share_j`` replaces what is dropped: m is the mass that token i has outside hot and listed columns, and
share the columns' part of all dropped mass, taken from a sample of the tokens. Row sums of the softmax are then right to
rounding, and column sums to the sample's error. A sample of the columns corrects it for d_hidden, and that of the tokens for
d_weight (drawn).

Some tokens are not filtered here but go through the exact kernels: their list would be too long, or the coefficients that
backward brings ask for more than forward kept, or the bound was too high, or something is not finite. There are few or none on
most steps, and those launches return at once. Where lists would cost more than the exact path, all tokens go through it. Only
the device knows which tokens they are: nothing here waits for it.

Source: the filter of *Cut Your Losses* (Wijmans et al., 2024, section 4.3), there by tiles of a sorted vocabulary. Lists, hot
columns and compensation are this project's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from cce_dist.kernels import Gradients, Grads, Operands, Rows, Softmax, Spec, Want, budget, exact
from cce_dist.kernels.blocks import on_device
from cce_dist.kernels.budget import FEW, NUM_PLANES, SAMPLE, cdiv
from cce_dist.kernels.d_hidden import Sum, add_d_hidden
from cce_dist.kernels.d_weight import add_d_bias, add_d_weight
from cce_dist.kernels.dlogits import dlogits_chunk
from cce_dist.kernels.filter.bound import bound_of_shard, draw_outside, drawn_sums
from cce_dist.kernels.filter.covariance import lines_of_sample, spread_of
from cce_dist.kernels.filter.d_hidden import Pair, add_products
from cce_dist.kernels.filter.d_rows import (
    ByColumn,
    add_listed_hidden,
    by_column,
    listed_bias,
    listed_weight,
    stand_in_weight,
)
from cce_dist.kernels.filter.frequent import Hot, gather_hot, most_labelled, num_hot, outside_hot
from cce_dist.kernels.filter.lists import (
    SLACK,
    Entries,
    Lists,
    Plan,
    list_columns,
    listed_gradients,
    new_entries,
    plan,
)
from cce_dist.kernels.filter.sampling import (
    Drawn,
    Factors,
    Tokens,
    draw_columns,
    drawn_gradients,
    factors_of,
    squares_of_columns,
    squares_of_tokens,
    weigh_tokens,
)
from cce_dist.kernels.filter.screen import First, screened_statistics
from cce_dist.kernels.filter.shares import dropped_shares, sample_tokens, shares_of
from cce_dist.kernels.lse import (
    NOTHING_MORE,
    Marks,
    Span,
    choose_splits,
    lse_partials,
    merge_splits,
    target_logits,
)
from cce_dist.kernels.tiles import Tiles, choose_tiles, screen_tile
from cce_dist.kernels.tokens import (
    coefficients,
    compact,
    gathered,
    label_ids,
    merged_lse,
    sums_of_rows,
    token_losses,
)

__all__ = [
    "coefficients", "default_workspace", "filter_stats", "gradients", "label_ids", "merged_lse", "rows_at_once",
    "saved_like", "saved_of_slices", "statistics", "token_losses",
]  # fmt: skip


def default_workspace(x: Operands, spec: Spec) -> int:
    return budget.LEAST_DEFAULT  # lists take the place of exponentials


def pays(x: Operands, spec: Spec) -> bool:
    """Return whether the filter takes less time than exact gradients, by the sizes and what is wanted alone.

    It does not depend on which gradients a rank needs, since all ranks of a group have to agree.
    """
    with_grad = spec._replace(want=spec.want._replace(grad=True))
    exact_sides = (not spec.filter.hidden) + (not spec.filter.weight)
    sizes = exact.sizes_of(x)._replace(alone=spec.alone)
    return budget.filter_pays(sizes, exact.keeps(x, with_grad), spec.workspace_bytes, exact_sides)


def rows_at_once(x: Operands, spec: Spec) -> int | None:
    return budget.most_rows(exact.sizes_of(x), spec.workspace_bytes)


def saved_of_slices(x: Operands, spec: Spec) -> list[torch.Tensor] | None:
    return None  # the lists come from all tokens


def saved_like(x: Operands, spec: Spec) -> list[torch.Tensor]:
    num_tokens, num_valid = x.num_tokens, x.logits.num_valid
    capacity = budget.list_capacity(num_tokens, num_valid, spec.workspace_bytes, x.hidden.itemsize)
    lists = Lists(
        x.hidden.new_empty(3, num_tokens, dtype=torch.float32),
        *(x.hidden.new_empty(n, dtype=torch.int32) for n in (capacity, num_tokens, num_tokens)),
        x.hidden.new_empty(num_hot(num_valid, spec.filter.eps), dtype=torch.int64),
    )
    return list(lists)


def statistics(
    x: Operands, spec: Spec, merge_bound: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return stats_KN as ``exact`` does, and ``Lists``."""
    num_tokens, num_valid = x.num_tokens, x.logits.num_valid
    stats_KN = torch.empty(spec.num_stats, num_tokens, dtype=torch.float32, device=x.hidden.device)
    lists = Lists(*saved_like(x, spec))
    if num_tokens == 0 or num_valid == 0:
        lists.count_N.zero_()
        stats_KN.zero_()[0] = float("-inf")
        bound_3N = torch.stack((merge_bound(stats_KN[:3]), torch.zeros_like(stats_KN[0]), stats_KN[0]))
        return stats_KN, list(lists._replace(bound_3N=bound_3N))
    with on_device(x.hidden):
        tiles = choose_tiles(x.hidden.dtype, x.hidden.device)
        unit = tiles.lse.cols
        if spec.screened:
            unit = max(unit, screen_tile(x.hidden.device, x.logits.softcap > 0.0).cols)
        num_words = cdiv(num_valid, unit) * unit // 32
        ids_H = most_labelled(x, lists.ids_H.shape[0])
        hot = gather_hot(ids_H, x, num_words)
        at_once, first_at_once = budget.filter_forward_rows(
            exact.sizes_of(x), num_words, spec.workspace_bytes, tiles.lse.rows, tiles.group
        )
        buffer_RD = x.hidden.new_empty(min(first_at_once, num_tokens), x.hidden.shape[1])
        first = _before_all_columns(x, hot, tiles, buffer_RD, stats_KN, merge_bound, spec)
        if spec.screened:
            del buffer_RD
            bound_3N, suspects_N = screened_statistics(x, hot, first, lists, stats_KN, spec, tiles)
            _look_again(x, suspects_N, stats_KN, spec, tiles)
        else:
            bound_3N = _marked_statistics(x, hot, first, lists, stats_KN, buffer_RD, at_once, spec)
    return stats_KN, list(lists._replace(bound_3N=bound_3N, ids_H=ids_H))


def _before_all_columns(
    x: Operands, hot: Hot, tiles: Tiles, buffer_RD: torch.Tensor, stats_KN: torch.Tensor,
    merge_bound: Callable[[torch.Tensor], torch.Tensor], spec: Spec,
) -> First:  # fmt: skip
    """Write the labels' logits to stats_KN, and bound each token's log-sum-exp by them, hot columns and some others."""
    order, num_tokens = compact(x.ids), x.num_tokens
    want = spec.want if spec.screened else NOTHING_MORE
    hot_KN = stats_KN.new_empty(3 + want.entropy, num_tokens)
    hot_3N, hot_moment_N = hot_KN[:3], hot_KN[3] if want.entropy else None
    hot_sloped_N = stats_KN.new_empty(num_tokens) if x.logits.softcap > 0.0 else None
    drawn_ids_S, drawn = draw_outside(hot, x)
    num_drawn = drawn_ids_S.shape[0]
    sums_3PN = stats_KN.new_empty(3, cdiv(num_drawn, tiles.lse.cols), num_tokens)
    for group in exact.token_groups(order, buffer_RD.shape[0]):
        rows = gathered(x.hidden, group, buffer_RD)
        target_logits(x, rows, stats_KN[2])
        _log_sum_exp(hot.x, rows, tiles, hot_KN, hot_sloped_N, want=want)
        if num_drawn:
            drawn_sums(drawn_ids_S, drawn, x.logits.start, rows, tiles, sums_3PN)
    shard_3N = bound_of_shard(hot_3N, stats_KN[2], sums_3PN, num_drawn, x, hot)
    return First(order, hot_3N, hot_sloped_N, hot_moment_N, shard_3N, merge_bound(shard_3N), drawn)


def _marked_statistics(
    x: Operands,
    hot: Hot,
    first: First,
    lists: Lists,
    stats_KN: torch.Tensor,
    buffer_RD: torch.Tensor,
    at_once: int,
    spec: Spec,
) -> torch.Tensor:
    """Write the statistics of all columns to stats_KN, and the lists. Returns ``Lists.bound_3N``."""
    num_tokens, num_words = x.num_tokens, hot.words_W.shape[0]
    tiles = choose_tiles(x.hidden.dtype, x.hidden.device)
    sloped_N = None if first.hot_sloped_N is None else torch.empty_like(first.hot_sloped_N)
    taken = torch.zeros(1, dtype=torch.int64, device=x.hidden.device)
    words_RW = torch.empty(min(at_once, num_tokens), num_words, dtype=torch.int32, device=x.hidden.device)
    for group in exact.token_groups(first.order, at_once):
        if at_once < num_tokens:
            rows = gathered(x.hidden, group, buffer_RD)
        else:  # the first pass has gathered all
            rows = Rows(group[0], group[1], buffer_RD)
        words = words_RW[: group[0].shape[0]]
        marks = Marks(first.bound_N.index_select(0, group[0]), math.log(spec.filter.eps / SLACK), words)
        _log_sum_exp(x, rows, tiles, stats_KN, sloped_N, marks, spec.want)
        list_columns(words, hot, x, rows, lists, taken)
    hot_sum_N, sum_N = (
        (first.hot_3N[1], stats_KN[1])
        if sloped_N is None or first.hot_sloped_N is None
        else (first.hot_sloped_N, sloped_N)
    )
    return outside_hot(first.bound_N, first.hot_3N[0], hot_sum_N, stats_KN[0], sum_N)


def _look_again(x: Operands, suspects_N: torch.Tensor, stats_KN: torch.Tensor, spec: Spec, tiles: Tiles) -> None:
    """Take the statistics of tokens that have a label in ``suspects_N`` from all logits in 16 bits. There are few or none."""
    at_once = min(x.num_tokens, budget.forward_rows(exact.sizes_of(x), spec.workspace_bytes, False))
    buffer_RD = x.hidden.new_empty(at_once, x.hidden.shape[1])
    again_KN = torch.empty_like(stats_KN)
    for group in exact.token_groups(compact(suspects_N), at_once):
        _log_sum_exp(x, gathered(x.hidden, group, buffer_RD), tiles, again_KN, None, want=spec.want, expected=FEW)
    stats_KN[:2] = torch.where(suspects_N >= 0, again_KN[:2], stats_KN[:2])
    if spec.want.entropy:
        stats_KN[3] = torch.where(suspects_N >= 0, again_KN[3], stats_KN[3])


def _log_sum_exp(
    x: Operands, rows: Rows, tiles: Tiles, stats_KN: torch.Tensor, sloped_N: torch.Tensor | None,
    marks: Marks | None = None, want: Want = NOTHING_MORE, expected: int | None = None,
) -> None:  # fmt: skip
    """Run the log-sum-exp over all columns into stats_KN and sloped_N at the tokens of the group.

    ``expected``: how many of them have a label, if it is far from all.
    """
    num_rows = rows.index.shape[0]
    num_tiles = cdiv(x.logits.num_valid, tiles.lse.cols)
    parts = choose_splits(expected or num_rows, num_tiles, tiles.lse, stats_KN.device)
    partials_KPR = stats_KN.new_empty(NUM_PLANES, parts, num_rows)
    lse_partials(
        x, rows, tiles, Span(0, num_tiles, parts), partials_KPR, want=want, marks=marks, want_sloped=sloped_N is not None
    )  # fmt: skip
    merge_splits(partials_KPR, x, rows, stats_KN, want=want, sloped_N=sloped_N)


def filter_stats(x: Operands, softmax: Softmax, saved: list[torch.Tensor], spec: Spec) -> torch.Tensor:
    num_tokens, num_valid = x.num_tokens, x.logits.num_valid
    if num_tokens == 0 or num_valid == 0:
        return softmax.max.new_zeros(3)
    lists = Lists(*saved)
    with on_device(x.hidden):
        # Coefficients of the plain loss, but for the sign, which decides nothing here.
        coef_4N = torch.zeros(4, num_tokens, dtype=torch.float32, device=x.hidden.device)
        coef_4N[:2] = 1.0
        how = plan(x, softmax, coef_4N, lists, None, spec.filter.eps)
        dropped_N, num_listed_N = listed_gradients(x, softmax, coef_4N, lists, how, True, None, None)
        num_labelled = (x.ids >= 0).sum().clamp(min=1)
        kept_N = torch.where(how.listed_labels >= 0, num_listed_N + lists.ids_H.shape[0], 0)
        num_kept = kept_N.sum() + (how.num_dense[0] + how.num_few[0]).long() * num_valid
        return torch.stack((num_kept / (num_labelled * num_valid), dropped_N.sum() / num_labelled, dropped_N.amax()))


def gradients(
    x: Operands, softmax: Softmax, coef_4N: torch.Tensor, saved: list[torch.Tensor], grads: Grads, spec: Spec
) -> Gradients:
    """Return d_hidden, d_weight and d_bias, filtered; see ``Backend.gradients``.

    An element is kept where ``|P p| >= eps |LABEL|`` (eps |P| where LABEL is 0), at the label, and wherever forward kept more.
    Where the entropy is differentiated, which has no rank-1 stand-in, all is exact. With UNIFORM there is no softcap.
    """
    sides = spec.filter

    def exactly(wanted: Grads) -> Gradients:
        return exact.gradients(x, softmax, coef_4N, [*compact(x.ids), *exact.new_kept(x)], wanted, spec)

    if x.num_tokens == 0 or x.logits.num_valid == 0 or softmax.entropy is not None:
        return exactly(grads)
    d_hidden = d_weight = d_bias = None
    if grads.want_hidden and not sides.hidden:
        d_hidden = exactly(grads._replace(want_weight=False, want_bias=False, weight_out=None))[0]
    here = grads._replace(
        want_hidden=grads.want_hidden and sides.hidden, want_weight=grads.want_weight and sides.weight,
        want_bias=grads.want_bias and sides.weight, weight_out=grads.weight_out if sides.weight else None,
    )  # fmt: skip
    if here.want_hidden or here.want_weight or here.want_bias:
        filtered = _filtered_gradients(x, softmax, coef_4N, Lists(*saved), here, spec)
        d_hidden = d_hidden if filtered[0] is None else filtered[0]
        d_weight, d_bias = filtered[1:]
    if (grads.want_weight or grads.want_bias) and not sides.weight:
        _, d_weight, d_bias = exactly(grads._replace(want_hidden=False, hidden_ready=None))
    return d_hidden, d_weight, d_bias


class _StandIn(NamedTuple):
    """The stand-in for what is dropped.

    Attributes:
        share_V: What each column multiplies it by; see ``shares_of``.
        shared_hidden_2D: What the tokens' factors multiply in d_hidden; None where d_hidden is not wanted.
        shared_weight_2D: What shares and 1 multiply in d_weight; None where d_weight is not wanted.
        drawn: The columns that correct it for d_hidden, or None.
        tokens: The tokens that correct it for d_weight, or None.
        factors: The factors on these, or None.
        spread_DD: What hidden states are multiplied by in d_hidden, times ``factors.bend`` and the token's factor, or None.
    """

    share_V: torch.Tensor
    shared_hidden_2D: torch.Tensor | None
    shared_weight_2D: torch.Tensor | None
    drawn: Drawn | None = None
    tokens: Tokens | None = None
    factors: Factors | None = None
    spread_DD: torch.Tensor | None = None


class _Work(NamedTuple):
    """The common ground of the gradients of rows and of columns.

    Attributes:
        hot: The hot columns.
        how: The decision for each token.
        lists: The lists of forward.
        entries: The listed gradients.
        factor_2N: What each token multiplies the stand-in by; see ``listed_gradients``.
        stand_in: The stand-in for what is dropped.
        tiles: Tiles of the device.
    """

    hot: Hot
    how: Plan
    lists: Lists
    entries: Entries
    factor_2N: torch.Tensor
    stand_in: _StandIn
    tiles: Tiles


def _filtered_gradients(
    x: Operands, softmax: Softmax, coef_4N: torch.Tensor, lists: Lists, grads: Grads, spec: Spec
) -> Gradients:
    num_valid, device = x.logits.num_valid, x.hidden.device
    with on_device(x.hidden):
        tiles = choose_tiles(x.hidden.dtype, device)
        hot = gather_hot(lists.ids_H, x, cdiv(num_valid, 32))
        how = plan(x, softmax, coef_4N, lists, hot.slot_V, spec.filter.eps)
        # The first gradients are those of the tokens that are exact: all of them, or a few. The others are added.
        d_hidden, d_weight, d_bias = exact.gradients(
            x._replace(ids=how.dense_labels), softmax, coef_4N, [*how.dense_order, *exact.new_kept(x)],
            grads._replace(hidden_ready=None, ready_rows=None), spec, often_empty=True,
        )  # fmt: skip
        target = d_weight if grads.weight_out is None else grads.weight_out
        _add_few(x, softmax, coef_4N, how, (d_hidden, target, d_bias), grads, spec)
        entries = new_entries(lists.columns_M.shape[0], num_valid, device)
        total = _listed_sum(d_hidden, x, spec)
        factor_2N, _ = listed_gradients(x, softmax, coef_4N, lists, how, spec.filter.compensate, entries, total)
        stand = _stand_in(x, softmax, coef_4N, hot, how, factor_2N, tiles, grads, spec)
        work = _Work(hot, how, lists, entries, factor_2N, stand, tiles)

        num_hot_columns = lists.ids_H.shape[0]
        hot_weight_HD = target.new_empty(num_hot_columns, x.hidden.shape[1]) if target is not None else None
        hot_bias_H = None if d_bias is None else torch.zeros(num_hot_columns, dtype=torch.float32, device=device)
        _add_rows((d_hidden, hot_weight_HD, hot_bias_H), total, x, softmax, coef_4N, work, grads, spec)
        # The entries are sorted in the room of these.
        del total
        stand = stand._replace(drawn=None, spread_DD=None)
        work = work._replace(stand_in=stand)
        if target is not None or d_bias is not None:
            columns = by_column(entries, num_valid)
            if target is not None and hot_weight_HD is not None:
                _finish_weight(target, x, columns, hot_weight_HD, work, add=grads.weight_out is not None)
            if d_bias is not None and hot_bias_H is not None:
                listed_bias(d_bias, columns, hot.slot_V, hot_bias_H, stand.share_V, factor_2N.sum(1))
    return d_hidden, d_weight, d_bias


def _finish_weight(
    target: torch.Tensor, x: Operands, columns: ByColumn, hot_weight_HD: torch.Tensor, work: _Work, *, add: bool
) -> None:
    """Put all parts of d_weight together, in ``target``."""
    stand, parts = work.stand_in, (work.hot.slot_V, hot_weight_HD, work.stand_in.share_V)
    assert stand.shared_weight_2D is not None
    if stand.tokens is not None and stand.factors is not None:
        rows_VD, gain = target[: x.logits.num_valid], stand.factors.gain
        stand_in_weight(
            rows_VD, stand.tokens, gain, *parts, stand.shared_weight_2D, work.how, work.tiles.grad_weight, add=add
        )  # fmt: skip
    listed_weight(
        target, x.hidden, columns, *parts, stand.shared_weight_2D, work.how, stand.factors, x.weight, add=add
    )  # fmt: skip


def _listed_sum(d_hidden: torch.Tensor | None, x: Operands, spec: Spec) -> Sum | None:
    """Return d_hidden with the remainder of all tokens, if there is room for that: then lists are added to it first."""
    if d_hidden is None or not budget.keeps_remainder(exact.sizes_of(x), spec.workspace_bytes):
        return None
    low_ND = exact.remainder(x.hidden, x.num_tokens)
    return Sum(d_hidden, None if low_ND is None else low_ND.zero_(), by_token=True)


def _stand_in(
    x: Operands, softmax: Softmax, coef_4N: torch.Tensor, hot: Hot, how: Plan, factor_2N: torch.Tensor, tiles: Tiles,
    grads: Grads, spec: Spec,
) -> _StandIn:  # fmt: skip
    num_valid, weight = x.logits.num_valid, x.weight[: x.logits.num_valid]
    shared_weight_2D = sums_of_rows(factor_2N, x.hidden) if grads.want_weight else None
    if not spec.filter.compensate:
        shares_2V = shares_of(None, None, hot.slot_V, num_valid, spec.want.uniform).shares_2V
        return _StandIn(shares_2V[0], sums_of_rows(shares_2V, weight) if grads.want_hidden else None, shared_weight_2D)
    sample, rows_SD = sample_tokens(x.hidden, factor_2N[0], how.reference, how.threshold, x.ids, SAMPLE)
    parts_SV = None
    if grads.want_weight and budget.keeps_sample(x.num_tokens, num_valid, x.hidden.itemsize, spec.workspace_bytes):
        parts_SV = x.hidden.new_empty(SAMPLE, cdiv(num_valid, budget.ROWS) * budget.ROWS)
    dropped = dropped_shares(rows_SD, x, sample, hot.slot_V, tiles.lse, parts_SV, spec.want.uniform)
    share_V, num_columns = dropped.shares_2V[0], budget.stand_in_columns(num_valid)
    tokens = weigh_tokens(dropped, sample) if num_columns else None
    assert dropped.center_D is not None
    other_D = torch.zeros_like(dropped.center_D)
    if spec.want.uniform and grads.want_hidden:
        other_D = sums_of_rows(dropped.shares_2V, weight)[1]
    shared_2D = torch.stack((dropped.center_D, other_D))
    stand = _StandIn(share_V, shared_2D if grads.want_hidden else None, shared_weight_2D)
    if num_columns == 0 or not (grads.want_hidden or tokens is not None):
        return stand
    drawn = draw_columns(dropped, num_columns, dropped.center_D, x)
    of_columns = of_tokens = lines_SK = None
    at_once = budget.spread_rows(exact.sizes_of(x), spec.workspace_bytes) if sample.away is not None else 0
    num_spread = budget.spread_columns(num_valid, x.hidden.shape[1]) if at_once and grads.want_hidden else 0
    if tokens is not None:
        of_tokens = squares_of_tokens(tokens, dropped, drawn, tiles)
    if grads.want_hidden:
        if num_spread:
            lines_SK = lines_of_sample(drawn, sample, x, tiles)
        coef_4N, gain = exact.normalised(coef_4N, x.hidden.dtype)
        of_columns = squares_of_columns(
            drawn, sample, rows_SD, gain, softmax, coef_4N, how.threshold, tiles, lines_SK
        )  # fmt: skip
    factors = factors_of(
        of_columns, of_tokens, drawn, dropped, sample, tokens, shared_2D, shared_weight_2D, num_spread
    )  # fmt: skip
    if num_spread:
        spread_DD = spread_of(dropped, num_spread, at_once, drawn, sample, factors, shared_2D, x, tiles)
        stand = stand._replace(spread_DD=spread_DD)
    return stand._replace(drawn=drawn if grads.want_hidden else None, tokens=tokens, factors=factors)


def _add_few(
    x: Operands, softmax: Softmax, coef_4N: torch.Tensor, how: Plan, out: Gradients, grads: Grads, spec: Spec
) -> None:
    """Set the exact gradients of the few tokens that lists do not serve while they serve others.

    They are one tile of rows, so chunks of the vocabulary are long. Where there are none, the launches return at once, and
    d_weight is not written.
    """
    d_hidden, d_weight, d_bias = out
    num_valid = x.logits.num_valid
    tiles = choose_tiles(x.hidden.dtype, x.hidden.device)
    coef_4N, gain = exact.normalised(coef_4N, x.hidden.dtype)
    rows = gathered(x.hidden, (how.few, how.num_few), x.hidden.new_empty(FEW, x.hidden.shape[1]))
    cols = budget.few_columns(num_valid, FEW, x.hidden.itemsize, spec.workspace_bytes, tiles.dlogits.cols)
    dlogits_RV = x.hidden.new_empty(FEW, cols)
    total = None if d_hidden is None else Sum(d_hidden, exact.remainder(x.hidden, FEW))
    for first in range(0, num_valid, cols):
        columns = slice(first, min(first + cols, num_valid))
        dlogits_chunk(x, rows, softmax, coef_4N, first, dlogits_RV, tiles)
        if total is not None:
            add_d_hidden(
                total, dlogits_RV, x.weight[columns], rows, None, gain, tiles.grad_hidden, first=first == 0
            )  # fmt: skip
        if d_weight is not None:
            add_d_weight(
                d_weight[columns], dlogits_RV, rows, gain, tiles.grad_weight, add=grads.weight_out is not None,
                often_empty=True,
            )  # fmt: skip
        if d_bias is not None:
            add_d_bias(d_bias[columns], dlogits_RV, rows, None, gain)


def _add_rows(
    out: Gradients, listed: Sum | None, x: Operands, softmax: Softmax, coef_4N: torch.Tensor, work: _Work, grads: Grads,
    spec: Spec,
) -> None:  # fmt: skip
    """Finish d_hidden, a group of tokens at a time, and make the hot columns' gradients of weight and bias on the way.

    ``listed`` is d_hidden where ``listed_gradients`` has begun it.
    """
    d_hidden, hot_weight_HD, hot_bias_H = out
    hot, tiles = work.hot.x._replace(ids=work.how.hot_labels), work.tiles
    coef_4N, gain = exact.normalised(coef_4N, x.hidden.dtype)
    cols = cdiv(hot.logits.num_valid, tiles.dlogits.cols) * tiles.dlogits.cols
    drawn, shared_2D, factors = work.stand_in.drawn, work.stand_in.shared_hidden_2D, work.stand_in.factors
    num_drawn = 0 if drawn is None else drawn.column_K.shape[0]
    at_once = budget.filter_backward_rows(exact.sizes_of(x), cols + num_drawn, spec.workspace_bytes)
    buffer_RD, dlogits_RH = x.hidden.new_empty(at_once, x.hidden.shape[1]), x.hidden.new_empty(at_once, cols)
    total = listed
    if total is None and d_hidden is not None:
        total = Sum(d_hidden, exact.remainder(x.hidden, at_once))
    drawn_RK = None if drawn is None else x.hidden.new_empty(at_once, num_drawn)
    groups = exact.finished_groups(work.how.listed_labels, work.how.order, at_once, grads.ready_rows)
    for number, (*group, num_final) in enumerate(groups):
        rows = gathered(x.hidden, group, buffer_RD)
        grads_RH = dlogits_RH[: rows.index.shape[0]]
        dlogits_chunk(hot, rows, softmax, coef_4N, 0, grads_RH, tiles)
        if total is not None and shared_2D is not None:
            of_drawn = None
            if drawn is not None and drawn_RK is not None and factors is not None:
                of_drawn = Pair(drawn_RK[: rows.index.shape[0]], drawn.away_KD)
                drawn_gradients(
                    drawn, rows, softmax, coef_4N, work.how.threshold, of_drawn.given_RC, tiles, factors.columns
                )  # fmt: skip
            longest = work.how.block if listed is not None else 0
            add_products(
                total, rows, Pair(grads_RH, hot.weight), of_drawn, work.stand_in.spread_DD, factors, gain, work.factor_2N,
                shared_2D, (work.lists, longest), tiles.grad_hidden, first=listed is None,
            )  # fmt: skip
            add_listed_hidden(total, x, rows, work.lists, work.how, work.entries, longer_than=longest)
            if grads.hidden_ready is not None and num_final:
                grads.hidden_ready(total.high_ND[:num_final])
        if hot_weight_HD is not None:
            add_d_weight(hot_weight_HD, grads_RH, rows, gain, tiles.grad_weight, add=number > 0)
        if hot_bias_H is not None:
            add_d_bias(hot_bias_H, grads_RH, rows, None, gain)
