"""One shard's statistics and gradients on a GPU: the kernels of this folder, in the order they run.

forward                                             backward
  target logit, one weight row per token              for each chunk of the vocabulary:
  log-sum-exp, tile by tile (lse)                       recompute its dlogits (dlogits)
  merge the parts into the statistics, or on one        add its part of d_hidden (d_hidden)
    rank into losses (losses)                           write its rows of d_weight (d_weight)
                                                      saved exponentials: the two matmuls alone

Tokens without a label come last in both. Nothing here waits for the device, so a CUDA graph can capture it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from cce_dist.kernels import Cells, Gradients, Grads, Operands, Rows, Softmax, Spec, Upstream, Want, memory
from cce_dist.kernels.blocks import on_device
from cce_dist.kernels.d_hidden import Sum, add_d_hidden, add_parts, with_parts
from cce_dist.kernels.d_weight import add_d_bias, add_d_weight
from cce_dist.kernels.dlogits import dlogits_chunk, logits_chunk, write_cells
from cce_dist.kernels.losses import Finished, Results, finish, of_statistics, rows_per_program, token_losses
from cce_dist.kernels.lse import NOTHING_MORE, Keep, Span, gathered_with_targets, lse_partials, shape_of_partials
from cce_dist.kernels.memory import Sizes
from cce_dist.kernels.outputs import NO_ID, largest, normalised
from cce_dist.kernels.passes import run
from cce_dist.kernels.saved_exp import Leveling, SavedExp, scaled_rows
from cce_dist.kernels.tiles import Tiles, cdiv, choose_tiles, num_parts, num_programs, thinned
from cce_dist.kernels.tokens import (
    coefficients,
    compact,
    gathered,
    ordered_ids,
    token_groups,
    weighted_sums,
)

__all__ = [
    "gradients", "losses_alone", "nothing_saved", "ordered_ids", "run", "saved_like", "statistics", "token_losses",
]


FIRST_TILE = Span(0, 1, 1)


def saved_columns(x: Operands, spec: Spec) -> int:
    if not spec.can_keep(str(x.hidden.dtype)):
        return 0
    return memory.saved_columns(sizes_of(x, spec.alone), spec.workspace_bytes)


def sizes_of(x: Operands, alone: bool = False) -> Sizes:
    return Sizes(x.ids.shape[0], x.hidden.shape[1], x.num_valid, x.hidden.itemsize, alone=alone)


def saved_like(x: Operands, spec: Spec) -> list[torch.Tensor]:
    order = [x.ids.new_empty(n, dtype=torch.int32) for n in (x.num_tokens, 2)]
    return new_saved(x, order, saved_columns(x, spec), spec.want.entropy).listed()


def nothing_saved(x: Operands) -> list[torch.Tensor]:
    return new_saved(x, order_of(x)).listed()


def new_saved(x: Operands, order: list[torch.Tensor], columns: int = 0, entropy: bool = False) -> SavedExp:
    """Allocate the saved tensors, with exponentials of the first ``columns`` columns."""
    device, num_rows = x.hidden.device, x.num_tokens if columns else 0
    exp_NV = torch.empty(x.num_tokens, columns, dtype=x.hidden.dtype, device=device)
    reference_N, target_N = (torch.empty(num_rows, dtype=torch.float32, device=device) for _ in range(2))
    overwritten = torch.zeros(1, dtype=torch.int32, device=device) if columns and entropy else None
    return SavedExp(*order, exp_NV, reference_N, target_N, overwritten)


def order_of(x: Operands) -> list[torch.Tensor]:
    return x.order or compact(x.ids)


def statistics(
    x: Operands, gather: Callable[[torch.Tensor], torch.Tensor] | None, spec: Spec
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return stats_KN, and ``SavedExp``. Tokens without a label hold MAX 0, SUM_EXP 1 and zeros."""
    order, stats_KN = order_of(x), _empty(x, spec.num_rows, x.num_tokens)
    saved = _saved_after_largest(x, spec, order, stats_KN)
    if x.num_tokens == 0 or x.num_valid == 0:
        stats_KN[: spec.first_top].zero_()[0] = float("-inf")
    else:
        _sweep(x, spec, saved, stats_KN)
    return stats_KN, saved.listed()


def losses_alone(x: Operands, spec: Spec) -> Results:
    if x.num_tokens == 0 or x.num_valid == 0:
        return of_statistics(x, spec, *statistics(x, None, spec))
    stats_TKN = _empty(x, 1, spec.num_rows, x.num_tokens) if spec.num_rows > spec.num_stats else None
    stats_KN = None if stats_TKN is None else stats_TKN[0]
    saved = _saved_after_largest(x, spec, order_of(x), stats_KN)
    out = _sweep(x, spec, saved, stats_KN, alone=True)
    assert out is not None
    return out.losses, out.softmax, stats_TKN, saved.listed()


def _empty(x: Operands, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device=x.hidden.device)


def _saved_after_largest(x: Operands, spec: Spec, order: list[torch.Tensor], stats_KN: torch.Tensor | None) -> SavedExp:
    """Return ``new_saved``. The largest logits are written first, before the exponentials take their memory."""
    if stats_KN is not None and spec.want.top_k:
        _write_largest(x, spec, order, stats_KN[spec.first_top :])
    return new_saved(x, order, saved_columns(x, spec), spec.want.entropy)


def _write_largest(x: Operands, spec: Spec, order: list[torch.Tensor], top_2KN: torch.Tensor) -> None:
    z_KN, ids_KN = top_2KN[: spec.want.top_k], top_2KN[spec.want.top_k :].view(torch.int32)
    z_KN.fill_(float("-inf"))  # stays where the shard has fewer columns than k
    ids_KN.fill_(NO_ID)
    top_k = min(spec.want.top_k, x.num_valid)
    if top_k == 0 or x.num_tokens == 0:
        return
    with on_device(x.hidden):
        tiles = choose_tiles(x.hidden.dtype, x.hidden.device)
        cols = cdiv(x.num_valid, tiles.lse.cols) * tiles.lse.cols
        at_once = memory.top_rows(sizes_of(x)._replace(num_columns=cols), top_k, spec.workspace_bytes)
        buffer_RD = x.hidden.new_empty(at_once, x.hidden.shape[1])
        z_RV = torch.empty(at_once, cols, dtype=torch.float32, device=x.hidden.device)
        for group in token_groups(order, at_once):
            rows = gathered(x.hidden, group, buffer_RD)
            group_z_RV = z_RV[: rows.index.shape[0]]
            logits_chunk(x, rows, 0, group_z_RV, tiles)
            z_RK, columns_RK = largest(group_z_RV, top_k)
            z_KN[:top_k].index_copy_(1, rows.index.long(), z_RK.t())
            ids_KN[:top_k].index_copy_(1, rows.index.long(), (columns_RK + x.start).int().t())


def _sweep(x: Operands, spec: Spec, saved: SavedExp, stats_KN: torch.Tensor | None, *, alone: bool = False) -> Finished | None:
    """Fill the saved exponentials, and unless it is None stats_KN, except for the largest logits.

    If this shard is ``alone``, return ``Finished``. Then stats_KN has no TARGET.
    """
    if stats_KN is not None and spec.several:
        stats_KN[2].zero_()
    with on_device(x.hidden):
        tiles = choose_tiles(x.hidden.dtype, x.hidden.device)
        how = _sweep_of(sizes_of(x), spec, saved.exp_NV.shape[1], tiles, num_programs(x.hidden.device))
        buffer_RD = x.hidden.new_empty(how.at_once, x.hidden.shape[1])
        all_programs = cdiv(x.num_tokens, rows_per_program(how.keeping is not None))
        out = Finished.new(x, saved.num_labelled, spec.want, all_programs) if alone else None
        targets, programs = _targets(spec, saved, stats_KN, out), 0
        target_N = None if out is None or spec.several else targets[0]
        for number, group in enumerate(token_groups(saved.order, how.at_once)):
            rows, leveling = gathered_with_targets(x, group, buffer_RD, *targets), None
            partials_KPR = _empty(x, *shape_of_partials(how.num_parts, rows.index.shape[0], spec.want))
            if how.keeping is not None:
                leveling = _keep_exponentials(x, rows, how, partials_KPR, saved.of_group(number, how.at_once), spec.want)
            if how.others is not None:
                lse_partials(x, rows, tiles, how.others, partials_KPR, want=spec.want)
            programs += finish(
                x, rows, partials_KPR, want=spec.want, leveling=leveling, target_N=target_N, vocab_size=spec.vocab_size,
                stats_KN=stats_KN, out=out, first_program=programs,
            )
        if stats_KN is not None and spec.want.best:  # columns become ids
            stats_KN[spec.best_row].view(torch.int32).add_(x.start)
        return out


class _Sweep(NamedTuple):
    """How a forward of given sizes and options sweeps over the vocabulary."""

    at_once: int  # Tokens of a group
    tiles: Tiles
    first_tiles: Tiles  # For the first tile of columns, whose maximum saved exponentials are relative to
    keeping: Span | None  # Tiles whose exponentials are saved
    others: Span | None  # The tiles after them
    num_parts: int  # Of both spans


def _sweep_of(sizes: Sizes, spec: Spec, saved: int, tiles: Tiles, programs: int) -> _Sweep:
    """Return how to sweep if ``saved`` columns are saved. The device runs ``programs`` at a time."""
    at_once, tile = min(sizes.num_tokens, memory.forward_rows(sizes, spec.workspace_bytes, saved)), tiles.lse
    num_tiles = cdiv(sizes.num_columns, tile.cols)
    num_kept = min(saved // tile.cols, num_tiles)
    kept_parts = num_parts(at_once, num_kept, tile.rows, programs) if num_kept else 0
    other_parts = 0
    if num_kept < num_tiles:
        # ``invariant`` calls always use the number of parts that 400 to 8,192 tokens get.
        other_parts = num_parts(16 * tile.rows if spec.invariant else at_once, num_tiles - num_kept, tile.rows, programs)
    keeping = Span(0, num_kept, kept_parts) if num_kept else None
    others = Span(num_kept, num_tiles, other_parts, kept_parts) if other_parts else None
    if tile.warps >= 8:  # one tile per block of rows occupies half of a device: halve them
        tile = tile._replace(rows=tile.rows // 2, warps=tile.warps // 2)
    return _Sweep(at_once, tiles, tiles._replace(lse=tile), keeping, others, kept_parts + other_parts)


def _targets(
    spec: Spec, saved: SavedExp, stats_KN: torch.Tensor | None, out: Finished | None
) -> tuple[torch.Tensor | None, int, torch.Tensor | None]:
    """Return tensor, row and copy for the labels' logits, as ``gathered_with_targets`` takes them."""
    if spec.several:
        return stats_KN, spec.first_target, None
    saved_N = saved.target_N if saved.exp_NV.shape[1] else None
    if out is None:
        return stats_KN, 2, saved_N
    return out.losses.target if saved_N is None else saved_N, 0, None


def _keep_exponentials(
    x: Operands, rows: Rows, how: _Sweep, partials_KPR: torch.Tensor, saved: SavedExp, want: Want
) -> Leveling:
    """Run the log-sum-exp over a span and keep its exponentials, relative to the maximum of each row's first tile.

    ``finish`` still has to level them.
    """
    assert how.keeping is not None
    num_rows = rows.index.shape[0]
    first_KPR = _empty(x, *shape_of_partials(1, num_rows, NOTHING_MORE))
    tile_reference_BR = _empty(x, how.keeping.last, num_rows)
    lse_partials(x, rows, how.first_tiles, FIRST_TILE, first_KPR)
    keep = Keep(first_KPR, tile_reference_BR)
    lse_partials(x, rows, how.tiles, how.keeping, partials_KPR, keep=keep, exp_RV=saved.exp_NV, want=want)
    return Leveling(saved.exp_NV, tile_reference_BR, saved.reference_N, how.tiles.lse.cols)


def _recompute_exponentials(x: Operands, saved: SavedExp, tiles: Tiles, spec: Spec) -> None:
    """Compute exponentials again that an earlier backward has overwritten. Otherwise launches return at once."""
    assert saved.overwritten is not None
    # The same groups, cut into the same parts, as in forward.
    how = _sweep_of(sizes_of(x), spec, saved.exp_NV.shape[1], tiles, num_programs(x.hidden.device))
    buffer_RD = x.hidden.new_empty(how.at_once, x.hidden.shape[1])
    for number, group in enumerate(token_groups([saved.index_N, saved.num_labelled * saved.overwritten], how.at_once)):
        rows = gathered(x.hidden, group, buffer_RD)
        partials_KPR = _empty(x, *shape_of_partials(how.num_parts, rows.index.shape[0], spec.want))
        leveling = _keep_exponentials(x, rows, how, partials_KPR, saved.of_group(number, how.at_once), spec.want)
        finish(x, rows, None, want=NOTHING_MORE, leveling=leveling)


class Output(NamedTuple):
    """Operands, and the gradients of all tokens and columns, to which the products of chunks are added."""

    x: Operands
    hidden: Sum | None  # d_hidden and its remainder, or None
    weight: torch.Tensor | None  # d_weight, or the buffer that it is added to, or None
    bias: torch.Tensor | None  # d_bias, or None
    gain: torch.Tensor | None  # A factor on all gradients, or None
    grads: Grads
    tiles: Tiles
    weight_first: bool = False  # Before d_hidden, whose storage holds scaled hidden states until then


class Uniform(NamedTuple):
    """Label smoothing's part beside saved exponentials: one number per token, so its products are sums of rows."""

    coef_N: torch.Tensor  # The gradient of each token's logits, fp32
    d_weight_D: torch.Tensor  # Added to every row of d_weight, fp32
    columns_D: torch.Tensor  # The sum of the weight's rows, fp32; d_hidden gets coef_N times this row

    @classmethod
    def of(cls, x: Operands, coef_4N: torch.Tensor, num_columns: int) -> Uniform:
        ones_V = torch.ones(num_columns, dtype=torch.float32, device=x.weight.device)
        columns_D = weighted_sums(ones_V, x.weight[:num_columns]).sum((0, 1))
        coef_N = coef_4N[2] if x.head.scale is None else coef_4N[2] * x.head.scale
        return cls(coef_N, weighted_sums(coef_N, x.hidden).sum((0, 1)), columns_D)


def gradients(
    x: Operands, softmax: Softmax, upstream: Upstream, tensors: Sequence[torch.Tensor | None], grads: Grads, spec: Spec,
    coef_4N: torch.Tensor | None = None,
) -> Gradients:
    """See ``Backend.gradients``; ``tensors`` are those of ``SavedExp``. Recomputed columns use ``coef_4N`` if it is given."""
    saved, last = SavedExp(*tensors), x.num_valid  # type: ignore[arg-type]
    num_saved = min(saved.exp_NV.shape[1], last)
    d_hidden, d_weight, d_bias = new_gradients(x, grads)
    returned = d_hidden, None if grads.weight_out is not None else d_weight, d_bias
    if x.num_tokens == 0 or x.num_valid == 0:
        return returned
    # Only d_weight needs the scaled hidden states. They are kept in d_hidden's storage if d_hidden may be computed last.
    weight_first = 0 < num_saved == last and grads.want_hidden and grads.want_weight and grads.hidden_ready is None
    with on_device(x.hidden):
        tiles = choose_tiles(x.hidden.dtype, x.hidden.device)
        gain = None
        # Saved exponentials of all columns need no coefficients, unless the gradient has terms beside P and LABEL.
        has_other_terms = x.cells is not None or softmax.entropy is not None or spec.want.uniform
        if coef_4N is None and (num_saved < last or has_other_terms):
            coef_4N = coefficients(upstream, x.ids, spec.vocab_size)
        if coef_4N is not None:
            x, coef_4N, gain = normalised(x, coef_4N)
        if saved.overwritten is not None:
            _recompute_exponentials(x, saved, tiles, spec)
            # Through .data, as kernels write: autograd would refuse a saved tensor whose version has changed.
            saved.overwritten.data.fill_(softmax.entropy is not None)
        at_once, cols = x.num_tokens, 1
        if num_saved < last:
            at_once, cols = memory.exact_chunks(
                sizes_of(x)._replace(num_columns=last - num_saved), spec.workspace_bytes, saved.exp_NV.nbytes, tiles,
                num_programs(x.hidden.device),
            )
        chunks = [(col, min(col + cols, last)) for col in range(num_saved, last, cols)]
        num_parts = len(chunks) + (num_saved > 0)
        gathers = (bool(chunks) or d_weight is not None) and not weight_first
        like_hidden = {"dtype": x.hidden.dtype, "device": x.hidden.device}
        if weight_first and d_hidden is not None:
            buffer_RD = d_hidden
        else:
            buffer_RD = torch.empty(at_once if gathers else 0, x.hidden.shape[1], **like_hidden)
        dlogits_RV = torch.empty(at_once, cols, **like_hidden) if chunks else saved.exp_NV
        low_RD = remainder(x.hidden, at_once) if num_parts > 1 and d_hidden is not None else None
        total = None if d_hidden is None else Sum(d_hidden, low_RD)
        if total is not None and grads.often_empty:
            total = with_parts(total, dlogits_RV, tiles)
        out = Output(x, total, d_weight, d_bias, gain, grads, tiles, weight_first)

        add = grads.weight_out is not None
        if chunks:
            assert coef_4N is not None
            # A group of tokens and a chunk of columns at a time. Beside saved columns one group has all tokens.
            ready_rows = None if num_saved else grads.ready_rows
            for group, (*compact_order, num_final) in enumerate(finished_groups(x.ids, saved.order, at_once, ready_rows)):
                rows = gathered(x.hidden, compact_order, buffer_RD)
                fill = partial(_fill_chunk, x, rows, softmax, coef_4N, tiles, grads.often_empty)
                final = 0 if num_saved else num_final
                add_chunks(out, rows, chunks, dlogits_RV, fill, add=add or group > 0, num_final=final)
        if num_saved:
            rows, uniform = Rows(saved.index_N, saved.num_labelled, buffer_RD), None
            scale_R = scaled_rows(saved, x, rows, softmax, upstream, spec.vocab_size, gather=d_weight is not None)
            if coef_4N is not None:
                _write_label_cells(saved, x, rows, softmax, coef_4N, scale_R)
                uniform = Uniform.of(x, coef_4N, num_saved) if spec.want.uniform else None
            add_chunks(
                out, rows, [(0, num_saved)], saved.exp_NV, None, add=add, num_final=x.num_tokens, sets_hidden=not chunks,
                scale_R=scale_R, uniform=uniform,
            )
    return returned


def _write_label_cells(
    saved: SavedExp, x: Operands, rows: Rows, softmax: Softmax, coef_4N: torch.Tensor, scale_R: torch.Tensor
) -> None:
    if softmax.entropy is not None and x.cells is None:
        x = x._replace(cells=Cells(x.ids[:, None], saved.target_N[:, None], coef_4N[1][:, None]))
    if x.cells is not None:
        write_cells(x, rows, softmax, coef_4N, 0, saved.exp_NV, scale_R)


def _fill_chunk(
    x: Operands, rows: Rows, softmax: Softmax, coef_4N: torch.Tensor, tiles: Tiles, one_wave: bool, first: int,
    grads_RV: torch.Tensor,
) -> None:
    dlogits_chunk(x, rows, softmax, coef_4N, first, grads_RV, tiles, one_wave=one_wave)
    if x.cells is not None:
        write_cells(x, rows, softmax, coef_4N, first, grads_RV)


def add_chunks(
    out: Output, rows: Rows, chunks: list[tuple[int, int]], dlogits_RV: torch.Tensor,
    fill: Callable[[int, torch.Tensor], None] | None, *, add: bool, num_final: int, sets_hidden: bool = True,
    scale_R: torch.Tensor | None = None, uniform: Uniform | None = None,
) -> None:
    """Add the products of the logits' gradient, for each chunk [first, stop) of columns, at the tokens of a group.

    Args:
        fill: Writes a chunk's gradient to dlogits_RV; None: it is there.
        add: Add to d_weight instead of setting it.
        num_final: d_hidden of the first ``num_final`` tokens is final after the last chunk; 0: of no token.
        sets_hidden: The first chunk sets d_hidden instead of adding to it.
        scale_R: A factor on each row of dlogits_RV. The rows of ``rows.hidden`` have it already.
        uniform: Label smoothing's part, added to the products.
    """
    grads, grads_RV = out.grads, dlogits_RV[: rows.index.shape[0]]

    def add_hidden(first: int, stop: int) -> None:
        if out.hidden is None:
            return
        add_d_hidden(
            out.hidden, grads_RV, out.x.weight[first:stop], rows, scale_R, out.gain, out.tiles.grad_hidden,
            first=sets_hidden and first == chunks[0][0],
            outer=None if uniform is None else (uniform.coef_N, uniform.columns_D),
        )
        if grads.often_empty and stop == chunks[-1][1]:
            add_parts(out.hidden, rows, out.gain)
        if grads.hidden_ready is not None and num_final and stop == chunks[-1][1]:
            grads.hidden_ready(out.hidden.high_ND[:num_final])

    for first, stop in thinned(chunks):
        if fill is not None:
            fill(first, grads_RV)
        if not out.weight_first:
            add_hidden(first, stop)
        if out.weight is not None:
            add_d_weight(
                out.weight[first:stop], grads_RV, rows, out.gain, out.tiles.grad_weight, add=add,
                low_VD=None if grads.weight_low is None else grads.weight_low[first:stop],
                more_D=None if uniform is None else uniform.d_weight_D, often_empty=grads.often_empty,
            )
        if out.bias is not None:
            add_d_bias(out.bias[first:stop], grads_RV, rows, scale_R, out.gain)
            if uniform is not None:
                out.bias[first:stop].add_(uniform.coef_N.sum())
        if out.weight_first:
            add_hidden(first, stop)


def new_gradients(x: Operands, grads: Grads) -> Gradients:
    """Allocate the wanted gradients. d_bias and padding rows start as 0.

    Without tokens or columns all gradients do, and ``hidden_ready`` is called.
    """
    d_hidden, num_written = None, x.num_valid if x.num_tokens else 0
    if grads.want_hidden:
        d_hidden = torch.empty_like(x.hidden) if grads.hidden_out is None else grads.hidden_out
        if not num_written:  # ``add_d_hidden`` sets rows without a label to 0
            d_hidden.zero_()
            if grads.hidden_ready is not None:
                grads.hidden_ready(d_hidden)
    num_rows = x.weight.shape[0]
    d_bias = torch.zeros(num_rows, dtype=torch.float32, device=x.weight.device) if grads.want_bias else None
    if not grads.want_weight or grads.weight_out is not None:
        return d_hidden, grads.weight_out if grads.want_weight else None, d_bias
    d_weight = torch.empty_like(x.weight)
    if num_written < num_rows:
        d_weight[num_written:].zero_()
    return d_hidden, d_weight, d_bias


def remainder(hidden_ND: torch.Tensor, num_rows: int) -> torch.Tensor | None:
    """Allocate the remainder of d_hidden: the bits of the sum that its 16 bits cannot hold. None in fp32."""
    if hidden_ND.itemsize != 2:
        return None
    return torch.empty(num_rows, hidden_ND.shape[1], dtype=torch.bfloat16, device=hidden_ND.device)


def finished_groups(
    ids_N: torch.Tensor, order: list[torch.Tensor], rows: int, ready_rows: int | None
) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """Cut the tokens into ranges of ``ready_rows`` (None: one range), and each range into groups of ``rows`` tokens.

    Returns:
        For each group: its index, its number of labelled tokens, and the end of its range if it is the range's last group, else
        0. d_hidden of all tokens before that end is then final.
    """
    num_tokens = ids_N.shape[0]
    if ready_rows is None or ready_rows >= num_tokens:
        ranges = [(order, num_tokens)]
    else:
        ranges = []
        for start in range(0, num_tokens, ready_rows):
            index_R, num_labelled = compact(ids_N[start : start + ready_rows])
            ranges.append(([index_R.add_(start), num_labelled], start + index_R.shape[0]))
    groups = []
    for compact_order, num_final in ranges:
        *others, last = token_groups(compact_order, rows)
        groups += [*((*order, 0) for order in others), (last[0], last[1], num_final)]
    return groups
