"""One shard's statistics and gradients with a filter: the kernels of this folder, in the order they run.

forward                                               backward
  logits of the frequent columns, of the label and      exact gradients of tokens that the lists cannot serve
    of sampled columns bound each token's                 (lists.decide, exact)
    log-sum-exp (bound)                                 listed columns (lists); a control variate for the others,
  log-sum-exp; each logit that reaches the                corrected by samples (shares, sampling)
    threshold is marked (lse)                           frequent columns: dlogits, d_hidden and d_weight as matrix
  marks become lists of columns (lists)                   products, to which the listed ones are added (d_weight)

Kept elements are scattered: about a hundred in a row of 10^5 logits, so keeping whole tiles would keep thousands. A rank-1
matrix, corrected by samples, replaces the dropped elements (sampling).

A token is unserved if its list is too long, backward needs unlisted columns, the bound was too high or far too low, or a
number is not finite. The exact kernels compute the gradients of unserved tokens, and return at once if there are none. Only the
device knows which tokens are unserved, and nothing waits for it.

Source: the filter of *Cut Your Losses* (Wijmans et al., 2025, section 4.3), which judges tiles of a sorted vocabulary. Lists,
frequent columns and compensation are this project's.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from cce_dist.kernels import Gradients, Grads, Operands, Rows, Softmax, Spec, Upstream, exact, memory
from cce_dist.kernels.blocks import on_device
from cce_dist.kernels.d_hidden import Sum
from cce_dist.kernels.d_weight import add_d_weight
from cce_dist.kernels.filter.bound import bound_of_shard, most_labelled, num_frequent
from cce_dist.kernels.filter.d_hidden import add_products
from cce_dist.kernels.filter.d_weight import add_listed
from cce_dist.kernels.filter.lists import SLACK, Decisions, Lists, decide, list_columns, listed_gradients
from cce_dist.kernels.filter.sampling import (
    Columns,
    Compensation,
    along,
    column_gradients,
    factors_of,
    linear_of,
    sample_columns,
)
from cce_dist.kernels.filter.shares import dropped_columns, sample_tokens
from cce_dist.kernels.losses import Finished, Results, finish, of_statistics, rows_per_program, token_losses
from cce_dist.kernels.lse import Marks, Span, lse_partials, shape_of_partials
from cce_dist.kernels.memory import SAMPLE
from cce_dist.kernels.passes import run
from cce_dist.kernels.tiles import Tiles, cdiv, choose_tiles, num_parts, num_programs
from cce_dist.kernels.tokens import coefficients, gathered, ordered_ids, token_groups

__all__ = [
    "gradients", "losses_alone", "ordered_ids", "run", "saved_like", "statistics", "token_losses",
]


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
    x: Operands, gather: Callable[[torch.Tensor], torch.Tensor], spec: Spec
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return stats_KN as ``exact`` does, and ``Lists``."""
    if x.num_tokens and x.num_valid:
        stats_KN, lists, _ = _sweep(x, spec, gather)
        return stats_KN, list(lists)
    stats_KN, _ = exact.statistics(x, None, spec)
    gather(stats_KN[:3])  # the other ranks merge their bounds
    return stats_KN, saved_like(x, spec)  # not read: nothing is filtered


def losses_alone(x: Operands, spec: Spec) -> Results:
    if not (x.num_tokens and x.num_valid):
        return of_statistics(x, spec, *statistics(x, lambda stats_3N: stats_3N[None], spec))
    stats_KN, lists, out = _sweep(x, spec, None)
    assert out is not None
    return out.losses, out.softmax, stats_KN[None], list(lists)


def _sweep(
    x: Operands, spec: Spec, gather: Callable[[torch.Tensor], torch.Tensor] | None
) -> tuple[torch.Tensor, Lists, Finished | None]:
    """Return stats_KN, the lists, and losses if ``gather`` is None: this shard is the whole vocabulary."""
    num_tokens, device = x.num_tokens, x.hidden.device
    stats_KN = torch.empty(spec.num_stats, num_tokens, dtype=torch.float32, device=device)
    lists, out = Lists(*saved_like(x, spec)), None
    with on_device(x.hidden):
        tiles, order = choose_tiles(x.hidden.dtype, device), exact.order_of(x)
        num_tiles = cdiv(x.num_valid, tiles.lse.cols)
        num_words = num_tiles * tiles.lse.cols // 32
        frequent_W = most_labelled(x, lists.ids_F, lists.count_V, num_words)
        at_once, first_at_once = memory.filter_forward_rows(
            exact.sizes_of(x), num_words, spec.workspace_bytes, tiles.lse.rows, tiles.group
        )
        buffer_RD = x.hidden.new_empty(min(first_at_once, num_tokens), x.hidden.shape[1])
        bound = bound_of_shard(x, lists.ids_F, frequent_W, order, tiles.lse, buffer_RD, stats_KN)
        if gather is not None:
            merged = token_losses(gather(bound.shard_3N), x, Spec(spec.logits, spec.vocab_size))[0]
            bound = bound._replace(bound_N=merged.lse)

        # All columns, a group of tokens at a time.
        groups, programs, log_eps = token_groups(order, at_once), 0, math.log(spec.filter.eps / SLACK)
        if gather is None:
            all_programs = sum(cdiv(index.shape[0], rows_per_program(False)) for index, _ in groups)
            out = Finished.new(x, order[1], spec.want, all_programs)
        sloped_N = None if x.head.softcap is None else torch.empty_like(bound.bound_N)
        # Marks, followed by space for a list.
        width = num_words + lists.columns_NL.shape[1]
        words_RW = torch.empty(min(at_once, num_tokens), width, dtype=torch.int32, device=device)
        for group in groups:
            if at_once < num_tokens:
                rows = gathered(x.hidden, group, buffer_RD)
            else:  # the bound's pass has gathered all
                rows = Rows(group[0], group[1], buffer_RD)
            num_rows = rows.index.shape[0]
            words, parts = words_RW[:num_rows], num_parts(num_rows, num_tiles, tiles.lse.rows, num_programs(device))
            partials_KPR = torch.empty(shape_of_partials(parts, num_rows, spec.want), dtype=torch.float32, device=device)
            lse_partials(
                x, rows, tiles, Span(0, num_tiles, parts), partials_KPR, want=spec.want,
                marks=Marks(bound.bound_N, log_eps, words), want_sloped=sloped_N is not None,
            )
            programs += finish(
                x, rows, partials_KPR, want=spec.want, target_N=None if out is None else stats_KN[2],
                vocab_size=spec.vocab_size, stats_KN=stats_KN, sloped_N=sloped_N, out=out, first_program=programs,
            )
            list_columns(words, frequent_W, x, rows, bound, stats_KN, sloped_N, log_eps, lists)
    return stats_KN, lists, out


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
        return exact.gradients(x, softmax, upstream, exact.new_saved(x, exact.order_of(x)), wanted, spec, coef_4N)

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
        filtered_hidden, d_weight = _filtered_gradients(x, softmax, coef_4N, Lists(*saved), here, spec)
        d_hidden = d_hidden if filtered_hidden is None else filtered_hidden
    if grads.want_weight and not sides.weight:
        d_weight = exactly(grads._replace(want_hidden=False, hidden_ready=None))[1]
    return d_hidden, d_weight, None


def _filtered_gradients(
    x: Operands, softmax: Softmax, coef_4N: torch.Tensor, lists: Lists, grads: Grads, spec: Spec
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    with on_device(x.hidden):
        tiles = choose_tiles(x.hidden.dtype, x.hidden.device)
        how = decide(x, softmax, coef_4N, lists, spec.filter.eps)
        # First set the exact gradients of unserved tokens, then add the filtered ones. Chunks of the vocabulary are cut for the
        # case that all tokens are unserved.
        d_hidden, d_weight, _ = exact.gradients(
            x, softmax, Upstream(), exact.new_saved(x, [how.unserved, how.num_unserved]),
            grads._replace(hidden_ready=None, ready_rows=None, often_empty=True), spec, coef_4N,
        )
        total = target = frequent_weight_FD = None
        if d_hidden is not None:
            keeps = memory.remainder_bytes(exact.sizes_of(x), spec.workspace_bytes) > 0
            total = Sum(d_hidden, exact.remainder(x.hidden, x.num_tokens) if keeps else None)
        listed_gradients(x, lists, how, spec.filter.compensate, total)
        comp = _compensation(x, how, lists.ids_F, tiles, grads, spec)
        if grads.want_weight:
            target = d_weight if grads.weight_out is None else grads.weight_out
        if target is not None:
            frequent_weight_FD = target.new_empty(lists.ids_F.shape[0], x.weight.shape[1])
        _add_rows(total, frequent_weight_FD, x, how, comp, tiles, grads, spec)
        if frequent_weight_FD is not None and target is not None:
            add_listed(
                target, x.hidden, lists, how, frequent_weight_FD, comp, tiles.grad_weight, add=grads.weight_out is not None
            )
    return d_hidden, d_weight


def _compensation(x: Operands, how: Decisions, ids_F: torch.Tensor, tiles: Tiles, grads: Grads, spec: Spec) -> Compensation:
    """Sample tokens and columns, and estimate the control variate and the factors on its corrections."""
    num_valid, device, budget = x.num_valid, x.hidden.device, spec.workspace_bytes
    if not spec.filter.compensate:
        zeros_V, zeros_2D, numbers_3K = (
            torch.zeros(shape, dtype=torch.float32, device=device) for shape in (num_valid, (2, x.weight.shape[1]), (3, 0))
        )
        return Compensation(zeros_V, Columns(ids_F.int(), x.weight[ids_F], numbers_3K, zeros_2D, zeros_V[:1]))
    sample = sample_tokens(x, how, SAMPLE)
    parts_SV = None
    if grads.want_weight and memory.sample_bytes(exact.sizes_of(x), budget):
        parts_SV = x.hidden.new_empty(SAMPLE, cdiv(num_valid, memory.ROWS) * memory.ROWS)
    dropped = dropped_columns(sample, x, how.slot_V, tiles.lse, parts_SV)
    num_columns = memory.sampled_columns(num_valid)
    columns = sample_columns(dropped, sample, x, ids_F, num_columns)
    if num_columns == 0 or not (grads.want_hidden or parts_SV is not None):
        return Compensation(dropped.sums_V, columns, sample)

    # The corrections. First the terms of the sampled tokens at the sampled columns, which the factors are estimated from.
    # These are few: a small tile makes them many programs.
    rows, sampled, tile = Rows(sample.token_S, sample.size, sample.rows_SD), columns.sampled(), tiles.dlogits
    tile = tile._replace(rows=min(64, tile.rows), cols=min(64, tile.cols), warps=min(4, tile.warps))
    num_covariance = memory.covariance_columns(exact.sizes_of(x), budget) if grads.want_hidden else 0
    along_N = along(x, columns, sample) if num_covariance else None
    terms = [x.hidden.new_empty(SAMPLE, num_columns) for _ in range(2 if num_covariance else 1)]
    sums_BS = torch.empty(cdiv(num_columns, tile.cols), SAMPLE, dtype=torch.float32, device=device)
    for line_N, terms_SK in zip((None, along_N), terms, strict=False):
        column_gradients(sampled, rows, x, how, None, line_N, tile, terms_SK, sums_BS)
    factors_4, num_used = factors_of(
        terms, sample, sampled, num_covariance, of_columns=grads.want_hidden, of_tokens=parts_SV is not None
    )
    linear = None, None
    if num_covariance:
        linear = linear_of(dropped, num_covariance, columns, num_used, sample, x, tiles.grad_weight)
    return Compensation(dropped.sums_V, columns, sample, parts_SV, factors_4, *linear, along_N)


def _add_rows(
    total: Sum | None, frequent_weight_FD: torch.Tensor | None, x: Operands, how: Decisions, comp: Compensation, tiles: Tiles,
    grads: Grads, spec: Spec,
) -> None:
    """Finish d_hidden, a group of tokens at a time, and compute the frequent columns' rows of d_weight."""
    columns = comp.columns if total is not None else comp.columns.frequent()
    num_columns, block_cols = columns.rows_CD.shape[0], tiles.dlogits.cols
    (num_tokens, num_slots), budget = how.grad_NL.shape, spec.workspace_bytes
    ready_rows = min(num_tokens, grads.ready_rows or num_tokens)
    at_once = memory.filter_backward_rows(exact.sizes_of(x), num_columns, num_slots, budget, ready_rows)
    buffer_RD, buffer_RC = (x.hidden.new_empty(at_once, cols) for cols in (x.hidden.shape[1], num_columns))
    sums_BR = torch.empty(cdiv(num_columns, block_cols), at_once, dtype=torch.float32, device=x.hidden.device)
    groups = exact.finished_groups(how.listed_labels, [how.index, how.num_listed], at_once, grads.ready_rows)
    for number, (*group, num_final) in enumerate(groups):
        rows = gathered(x.hidden, group, buffer_RD)
        grads_RC = buffer_RC[: rows.index.shape[0]]
        column_gradients(columns, rows, x, how, comp.factors_4, comp.along_N, tiles.dlogits, grads_RC, sums_BR)
        if total is not None:
            add_products(total, rows, grads_RC, sums_BR, block_cols, how, comp, tiles.grad_hidden)
            if grads.hidden_ready is not None and num_final:
                grads.hidden_ready(total.high_ND[:num_final])
        if frequent_weight_FD is not None:
            add_d_weight(frequent_weight_FD, grads_RC, rows, None, tiles.grad_weight, add=number > 0)
