"""Divergence of two heads on Triton: write the logits of both heads, then compute statistics and gradients from the logits.

Matrix products (``dlogits.py``) write the logits of both heads: the first columns' into memory that is saved for backward, the
others chunk by chunk. In forward, a pass over the logits sums up five numbers per token (``heads.py`` has the formulas). A
second pass reads the logits again, or computes them again. In backward, a pass turns the student's logits into their gradient,
in place, and the products follow. A second backward computes the overwritten logits again, with the same bits.

In each tile of columns a row's logits are stored relative to the row's largest one, which is kept in fp32, so the largest
logits are exact. With bf16 hidden states they are stored in fp16: a logit that is d below its tile's largest is off by at most
2^-12 of the power of two above d; a logit of 20 in bf16 would be off by 2^-4. With fp16 or fp32 hidden states they are fp32.
All statistics are computed from the stored numbers, so equal heads give a divergence and a gradient of exactly 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from cce_dist.kernels import Gradients, Grads, Rows, memory
from cce_dist.kernels.blocks import LOG2_E, LOG_2, fast_exp2, fast_log2, has_fast_math, kernel, on_device
from cce_dist.kernels.d_hidden import Sum
from cce_dist.kernels.divergence import heads
from cce_dist.kernels.divergence.heads import KINDS, Divergence, Heads, Merge, Pair, Sums, pair_of
from cce_dist.kernels.dlogits import logits_chunk
from cce_dist.kernels.exact import Output, add_chunks, finished_groups, new_gradients, remainder, token_groups
from cce_dist.kernels.head import slope_of, token_factors
from cce_dist.kernels.outputs import normalised
from cce_dist.kernels.tiles import MAX_SIDE, Tiles, cdiv, choose_tiles, num_programs
from cce_dist.kernels.tokens import compact, gathered

FORWARD, REVERSE, JSD, TV, LK = (tl.constexpr(i) for i in range(len(KINDS)))  # in the order of KINDS
FARTHEST = tl.constexpr(heads.FARTHEST)
SUMS_TILES = 4  # tiles that a warp of ``_pair_sums_kernel`` reads at a time
# Warps per row of that kernel. Sums stay within one warp; but kinds with a second pass work on few rows at a time.
SUMS_WARPS, FEW_ROWS_WARPS = 1, 4
BLOCK_N = 16  # rows per program of ``_pair_gradients_kernel``
GROUP = 8  # row blocks that read the weight together


class PairLogits(NamedTuple):
    """Logits of both heads (student first) for a group of tokens and whole tiles of columns."""

    z_2RC: torch.Tensor  # [2, R, B tiles of columns], fp16 or fp32: relative to ``top_2BR``
    top_2BR: torch.Tensor  # [2, B, R] fp32: each row's largest logit in each tile; -inf where none is finite
    # [1] int32: 1 once a backward has overwritten the student's logits with gradients. [0] if logits are not kept.
    overwritten: torch.Tensor

    def gradient(self, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for the gradient of the student's logits: the logits' own if the widths agree. -> [R, columns]."""
        z_RC = self.z_2RC[0]
        return z_RC.view(dtype) if z_RC.dtype.itemsize == dtype.itemsize else torch.empty_like(z_RC, dtype=dtype)

    @property
    def columns(self) -> int:
        return self.z_2RC.shape[2]


def new_pair_logits(num_rows: int, columns: int, tile_cols: int, like: torch.Tensor, saved: bool = False) -> PairLogits:
    """Allocate the logits of ``columns``, a multiple of ``tile_cols``. ``like`` has the hidden states' dtype and device."""
    dtype = torch.float16 if like.dtype == torch.bfloat16 else torch.float32
    return PairLogits(
        like.new_empty(2, num_rows, columns, dtype=dtype),
        like.new_empty(2, columns // tile_cols, num_rows, dtype=torch.float32),
        like.new_zeros(int(saved), dtype=torch.int32),
    )


def saved_columns(x: Heads, spec: Divergence) -> int:
    can_keep = spec.can_keep(str(x.student.hidden.dtype))
    return memory.saved_columns(x.sizes, spec.workspace_bytes) if can_keep else 0


def saved_like(x: Heads, spec: Divergence) -> list[torch.Tensor]:
    return list(_new_saved(x, spec))


def _new_saved(x: Heads, spec: Divergence) -> PairLogits:
    hidden, columns = x.student.hidden, saved_columns(x, spec)
    tile_cols = choose_tiles(hidden.dtype, hidden.device).lse.cols if columns else 1
    return new_pair_logits(x.student.num_tokens, columns, tile_cols, hidden, columns > 0)


def statistics(x: Heads, spec: Divergence, merged: Merge, rows: int) -> Sums:
    """Return the sums, and the saved ``PairLogits``. For a second pass, ranks merge each group of ``rows`` tokens."""
    student, saved = x.student, _new_saved(x, spec)
    stats_5N = student.hidden.new_zeros(5, student.num_tokens, dtype=torch.float32)
    stats_5N[::2][:2].fill_(float("-inf"))
    sums_2N = None if spec.empty_sum is None else stats_5N.new_full((2, student.num_tokens), spec.empty_sum)
    if student.num_tokens and (student.num_valid or sums_2N is not None):
        _sweep(x, spec, saved, stats_5N, sums_2N, merged, rows)
    return merged(stats_5N) if sums_2N is None else stats_5N, sums_2N, list(saved)


class _Work(NamedTuple):
    """Sizes and buffers of a pass over the columns."""

    at_once: int  # Tokens of a group
    hidden: tuple[torch.Tensor, torch.Tensor]  # Buffers for a group's hidden states
    chunk: PairLogits  # For a chunk of both heads' logits; without columns if all are saved
    tiles: Tiles  # Tiles of the device

    def chunks(self, first: int, last: int) -> list[tuple[int, int]]:
        cols = self.chunk.columns or 1
        return [(col, min(col + cols, last)) for col in range(first, last, cols)]


def _work(x: Heads, spec: Divergence, saved: PairLogits, rows: int = 0) -> _Work:
    """Allocate buffers. With ``rows`` they hold all logits of so many tokens that are not saved."""
    (student, teacher), sizes = x, x.sizes
    tiles = choose_tiles(student.hidden.dtype, student.hidden.device)
    left = sizes._replace(num_columns=max(0, sizes.num_columns - saved.columns))
    at_once, cols = memory.exact_chunks(
        left, spec.workspace_bytes, saved.z_2RC.nbytes + saved.top_2BR.nbytes, tiles, num_programs(student.hidden.device)
    )
    if rows:
        at_once, cols = rows, cdiv(left.num_columns, tiles.lse.cols) * tiles.lse.cols
    at_once = min(at_once, sizes.num_tokens)
    hidden = tuple(head.hidden.new_empty(at_once, head.hidden.shape[1]) for head in (student, teacher))
    chunk = new_pair_logits(at_once, cols if left.num_columns else 0, tiles.lse.cols, student.hidden)
    return _Work(at_once, (hidden[0], hidden[1]), chunk, tiles)


def _gather(x: Heads, order: list[torch.Tensor], work: _Work) -> tuple[Rows, Rows]:
    return gathered(x.student.hidden, order, work.hidden[0]), gathered(x.teacher.hidden, order, work.hidden[1])


def _fill(
    x: Heads, made: Iterable[tuple[int, Rows]], logits: PairLogits, first: int, last: int, tiles: Tiles
) -> None:
    """Write the logits of columns [first, last). ``made`` yields the heads, 0 or 1, each with the rows to compute."""
    columns = cdiv(last - first, tiles.lse.cols) * tiles.lse.cols
    for head, rows in made:
        z_RC, top_BR = logits.z_2RC[head, :, :columns], logits.top_2BR[head]
        logits_chunk(x[head], rows, first, z_RC, tiles._replace(group=GROUP), top_BR)


def _sweep(
    x: Heads, spec: Divergence, saved: PairLogits, stats_5N: torch.Tensor, sums_2N: torch.Tensor | None, merged: Merge,
    rows: int,
) -> None:
    """Write the saved logits and each token's statistics; with ``sums_2N``, merge these and write the sums of a second pass.

    The second pass reads the logits of each group of ``rows`` tokens before the next group overwrites them. With 0 rows it
    follows the first pass, and computes the logits that are not saved again.
    """
    with on_device(x.student.hidden):
        work, num_valid = _work(x, spec, saved, rows), x.student.num_valid
        last_saved = min(saved.columns, num_valid)
        groups = list(enumerate(token_groups(compact(x.student.ids), work.at_once)))

        def one_pass(number: int, both: tuple[Rows, Rows], pair: Pair | None, sums_KN: torch.Tensor, fill_from: int) -> None:
            own = slice(number * work.at_once, (number + 1) * work.at_once)
            of_group = saved._replace(z_2RC=saved.z_2RC[:, own], top_2BR=saved.top_2BR[:, :, own])
            parts = [(of_group, 0, last_saved)] if last_saved else []
            parts += [(work.chunk, *chunk) for chunk in work.chunks(last_saved, num_valid)]
            for logits, first, last in parts:
                if first >= fill_from:
                    _fill(x, enumerate(both), logits, first, last, work.tiles)
                _add_up(both[0], pair, sums_KN, spec, work.tiles, logits, first, last)

        for number, order in groups:
            both = _gather(x, order, work)
            one_pass(number, both, None, stats_5N, 0)
            if sums_2N is not None and rows:
                stats_5N[:, order[0]] = merged(stats_5N[:, order[0]])
                one_pass(number, both, pair_of(stats_5N, spec), sums_2N, num_valid)
        if sums_2N is not None and not rows:
            stats_5N.copy_(merged(stats_5N))
            pair = pair_of(stats_5N, spec)
            for number, order in groups:
                one_pass(number, _gather(x, order, work), pair, sums_2N, last_saved)


@triton.jit
def _shift_of(maximum):
    """Return the reference of sums of exponentials: the maximum, or 0 if no logit is finite yet."""
    return tl.where(maximum > float("-inf"), maximum, 0.0)


@triton.jit
def _moved(total, drop):
    """Rescale a sum of exponentials to a reference that is ``drop`` higher. A sum of 0 stays 0, even if ``drop`` is NaN."""
    return tl.where(total > 0, total * tl.exp(-drop), total)


@triton.jit
def _moved_moment(moment, total, drop, other_drop):
    """Rescale the moment to references that are ``drop`` and ``other_drop`` higher; ``total`` is the leading head's old sum."""
    factor = tl.exp(-drop)
    # A part that underflows or is empty adds 0, even if its moment is infinite.
    return tl.where((total > 0) & (factor > 0), factor * (moment - (drop - other_drop) * total), 0.0)


@triton.jit
def _moment(e, difference):
    """Sum e times a difference of logits over a block, with 0 times infinity as 0."""
    return tl.sum(tl.sum(tl.where(e == 0, 0.0, e * difference), 1), 0)


@triton.jit
def _log_mixture(change, mixture, FAST_LOG: tl.constexpr):
    """Return the logarithm of ``mixture``, 1 + ``change``: near 1 as a series, so that no digit is lost."""
    series = 1.0 / 3 - change * (0.25 - change * (0.2 - change * (1.0 / 6)))
    near = change * (1.0 - change * (0.5 - change * series))
    return tl.where(tl.abs(change) < 0.0625, near, fast_log2(mixture, FAST_LOG) * LOG_2)


@triton.jit
def _above_mixture(log_p, log_t, beta, rest, FAST: tl.constexpr, FAST_LOG: tl.constexpr):
    """Return p, t, log p - log m and log t - log m for m = beta * t + rest * p.

    m is computed relative to the larger of p and t, so exponentials do not overflow, and equal heads give exactly 0. If m is
    nearly the smaller one, its distance from m is a series of its own: the difference of two logarithms would lose its digits.
    """
    difference = log_p - log_t
    larger = fast_exp2(tl.maximum(log_p, log_t) * LOG2_E, FAST)
    # If both logits are -inf, their difference is NaN.
    far = tl.where(larger == 0, 0.0, -tl.abs(difference))
    ratio = fast_exp2(far * LOG2_E, FAST)
    leads = difference > 0
    of_smaller = tl.where(leads, beta, rest)
    of_larger = tl.where(leads, rest, beta)
    log_m = _log_mixture(of_smaller * (ratio - 1.0), of_larger + of_smaller * ratio, FAST_LOG)
    above_larger = -log_m
    change = of_larger * (1.0 - ratio) / ratio
    above_smaller = tl.where(change < 0.0625, -_log_mixture(change, 1.0, FAST_LOG), far - log_m)
    smaller = larger * ratio
    return (
        tl.where(leads, larger, smaller),
        tl.where(leads, smaller, larger),
        tl.where(leads, above_larger, above_smaller),
        tl.where(leads, above_smaller, above_larger),
    )


def _add_up(
    rows: Rows, pair: Pair | None, sums_KN: torch.Tensor, spec: Divergence, tiles: Tiles, logits: PairLogits, first: int,
    last: int,
) -> None:
    """Add columns [first, last) to the group's sums; column 0 sets the sums of the first pass (no ``pair``)."""
    num_rows, (z_2RC, top_2BR, _) = rows.index.shape[0], logits
    num_warps = SUMS_WARPS if spec.empty_sum is None else FEW_ROWS_WARPS
    _pair_sums_kernel[(num_rows,)](
        # in
        z_2RC[0], z_2RC[1], top_2BR[0], top_2BR[1], rows.index, rows.num_labelled,
        *((None,) * 4 if pair is None else pair[:4]),
        # in and out
        sums_KN,
        # sizes
        sums_KN.shape[1], z_2RC.stride(1), top_2BR.stride(1), cdiv(last - first, tiles.lse.cols),
        int(first > 0 or pair is not None),
        # options
        spec.beta, spec.rest,
        TASK=KINDS.index(spec.kind), SECOND=pair is not None, FAST=has_fast_math(),
        FAST_LOG=has_fast_math() and z_2RC.itemsize == 2, BLOCK_V=tiles.lse.cols, TILES=SUMS_TILES * num_warps,
        num_warps=num_warps,
    )


@kernel("z_s_ptr", "z_t_ptr", "z_stride")
def _pair_sums_kernel(
    z_s_ptr,  # in: [R, B * BLOCK_V]
    z_t_ptr,  # in: [R, B * BLOCK_V]
    top_s_ptr,  # in: [B, R] fp32
    top_t_ptr,  # in: [B, R] fp32
    index_ptr,  # in: [R] int32
    num_labelled_ptr,  # in: [1] int32
    max_s_ptr,  # in: [N] fp32, for a second pass, else None
    log_sum_s_ptr,  # in: [N] fp32, for a second pass, else None
    max_t_ptr,  # in: [N] fp32, for a second pass, else None
    log_sum_t_ptr,  # in: [N] fp32, for a second pass, else None
    sums_ptr,  # in, out: [5, N] fp32; [2, N] for a second pass
    num_tokens,
    z_stride,
    top_stride,
    num_tiles,
    goes_on,
    beta,
    rest,
    TASK: tl.constexpr,
    SECOND: tl.constexpr,
    FAST: tl.constexpr,
    FAST_LOG: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TILES: tl.constexpr,
):
    num_labelled = tl.load(num_labelled_ptr)
    row = tl.program_id(0)
    if row >= num_labelled:
        return
    token = tl.load(index_ptr + row)
    sums = sums_ptr + token
    stride = num_tokens.to(tl.int64)
    before = goes_on > 0
    sum_s = tl.load(sums + stride, mask=before, other=0)
    if SECOND:
        # sum_t and sum_s are the two sums of ``heads.py``, in its order.
        sum_t = tl.load(sums, mask=before, other=0)
        shift_s = tl.load(max_s_ptr + token)
        shift_t = tl.load(max_t_ptr + token)
        log_sum_s = tl.load(log_sum_s_ptr + token)
        log_sum_t = tl.load(log_sum_t_ptr + token)
    else:
        max_s = tl.load(sums, mask=before, other=float("-inf"))
        max_t = tl.load(sums + 2 * stride, mask=before, other=float("-inf"))
        sum_t = tl.load(sums + 3 * stride, mask=before, other=0)
        moment = tl.load(sums + 4 * stride, mask=before, other=0)

    if SECOND and TASK == LK:
        # Until they are stored, sum_t and sum_s are sums of exponentials relative to ``largest``.
        largest = sum_t
        sum_t = tl.exp(sum_t - _shift_of(largest))
        sum_s = tl.exp(sum_s - _shift_of(largest))
    offs_t = tl.arange(0, TILES)
    cells = row.to(tl.int64) * z_stride + offs_t[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    top_rows = top_stride.to(tl.int64)
    tops = offs_t * top_rows + row
    # Online softmax over the row's logits of both heads, [TILES, BLOCK_V] at a time: all sums of the row are scalars.
    for tile in range(0, num_tiles, TILES):
        here = tile + offs_t < num_tiles
        z_s = tl.load(z_s_ptr + tile * BLOCK_V + cells, mask=here[:, None], other=float("-inf"))
        z_t = tl.load(z_t_ptr + tile * BLOCK_V + cells, mask=here[:, None], other=float("-inf"))
        top_s = tl.load(top_s_ptr + tile * top_rows + tops, mask=here, other=float("-inf"))
        top_t = tl.load(top_t_ptr + tile * top_rows + tops, mask=here, other=float("-inf"))
        if not SECOND:
            new_max_s = tl.maximum(max_s, tl.max(top_s, 0))
            new_max_t = tl.maximum(max_t, tl.max(top_t, 0))
            shift_s = _shift_of(new_max_s)
            shift_t = _shift_of(new_max_t)
        base_s = _shift_of(top_s) - shift_s
        base_t = _shift_of(top_t) - shift_t
        if SECOND:
            base_s -= log_sum_s
            base_t -= log_sum_t
        # Logits relative to the references of the sums; in a second pass log p and log t.
        z_s = z_s.to(tl.float32) + base_s[:, None]
        z_t = z_t.to(tl.float32) + base_t[:, None]
        if SECOND and TASK == JSD:
            p, t, above_p, above_t = _above_mixture(z_s, z_t, beta, rest, FAST, FAST_LOG)
            sum_t += _moment(t, above_t)
            sum_s += _moment(p, above_p)
        elif SECOND and TASK == TV:
            p = fast_exp2(z_s * LOG2_E, FAST)
            # A NaN is not >=, so it is passed on.
            above = tl.where(z_s >= z_t, 0.0, fast_exp2(z_t * LOG2_E, FAST) - p)
            sum_t += tl.sum(tl.sum(above, 1), 0)
            sum_s += tl.sum(tl.sum(tl.where(z_s < z_t, p, 0.0), 1), 0)
        elif SECOND:
            smaller = tl.minimum(z_s, z_t, propagate_nan=tl.PropagateNan.ALL)
            new_largest = tl.maximum(largest, tl.max(tl.max(smaller, 1), 0))
            drop = _shift_of(new_largest) - _shift_of(largest)
            e = fast_exp2((smaller - _shift_of(new_largest)) * LOG2_E, FAST)
            sum_t = _moved(sum_t, drop) + tl.sum(tl.sum(e, 1), 0)
            sum_s = _moved(sum_s, drop) + tl.sum(tl.sum(tl.where(z_s < z_t, e, 0.0), 1), 0)
            largest = new_largest
        else:
            drop_s = shift_s - _shift_of(max_s)
            drop_t = shift_t - _shift_of(max_t)
            e_s = fast_exp2(z_s * LOG2_E, FAST)
            e_t = fast_exp2(z_t * LOG2_E, FAST)
            if TASK == FORWARD:
                moment = _moved_moment(moment, sum_t, drop_t, drop_s) + _moment(e_t, z_t - z_s)
            if TASK == REVERSE:
                moment = _moved_moment(moment, sum_s, drop_s, drop_t) + _moment(e_s, z_s - z_t)
            sum_s = _moved(sum_s, drop_s) + tl.sum(tl.sum(e_s, 1), 0)
            sum_t = _moved(sum_t, drop_t) + tl.sum(tl.sum(e_t, 1), 0)
            max_s = new_max_s
            max_t = new_max_t

    if SECOND and TASK == LK:
        sum_t = _shift_of(largest) + tl.log(sum_t)
        sum_s = _shift_of(largest) + tl.log(sum_s)
    tl.store(sums + stride, sum_s)
    if SECOND:
        tl.store(sums, sum_t)
    else:
        tl.store(sums, max_s)
        tl.store(sums + 2 * stride, max_t)
        tl.store(sums + 3 * stride, sum_t)
        tl.store(sums + 4 * stride, moment)


def gradients(
    x: Heads, pair: Pair, coef_N: torch.Tensor, saved_of_forward: list[torch.Tensor], grads: Grads, spec: Divergence
) -> Gradients:
    """Return the student's gradients; ``coef_N`` is the gradient of each token's divergence."""
    student, saved = x.student, PairLogits(*saved_of_forward)
    d_hidden, d_weight, d_bias = new_gradients(student, grads)
    returned = (d_hidden, None if grads.weight_out is not None else d_weight, d_bias)
    if student.num_tokens == 0 or student.num_valid == 0:
        return returned
    with on_device(student.hidden):
        _, coef_N, gain = normalised(student, coef_N)
        work, dtype = _work(x, spec, saved), student.hidden.dtype
        last_saved = min(saved.columns, student.num_valid)
        chunks = work.chunks(last_saved, student.num_valid)
        several = len(chunks) + (last_saved > 0) > 1
        low_RD = remainder(student.hidden, work.at_once) if several and d_hidden is not None else None
        total = None if d_hidden is None else Sum(d_hidden, low_RD)
        out = Output(student, total, d_weight, d_bias, gain, grads, work.tiles)
        ready_rows = None if last_saved else grads.ready_rows
        groups = finished_groups(student.ids, compact(student.ids), work.at_once, ready_rows)
        for group, (*order, num_final) in enumerate(groups):
            both = _gather(x, order, work)
            add = partial(add_chunks, out, both[0], add=grads.weight_out is not None or group > 0)
            if last_saved:
                # Compute the student's logits again if an earlier backward has overwritten them. Otherwise num_labelled is 0.
                again = both[0]._replace(num_labelled=both[0].num_labelled * saved.overwritten)
                # Through .data, as kernels write: autograd would refuse a saved tensor whose version has changed.
                saved.overwritten.data.fill_(1)
                fill = partial(_write_gradients, x, [(0, again)], both[0], saved, pair, coef_N, spec, work.tiles)
                final = 0 if chunks else num_final
                add([(0, last_saved)], saved.gradient(dtype), fill, num_final=final)
            if chunks:
                made = [*enumerate(both)]
                fill = partial(_write_gradients, x, made, both[0], work.chunk, pair, coef_N, spec, work.tiles)
                add(chunks, work.chunk.gradient(dtype), fill, num_final=num_final, sets_hidden=not last_saved)
    return returned


def _write_gradients(
    x: Heads, made: Iterable[tuple[int, Rows]], rows: Rows, logits: PairLogits, pair: Pair, coef_N: torch.Tensor,
    spec: Divergence, tiles: Tiles, first: int, grads_RV: torch.Tensor,
) -> None:
    student, (z_2RC, top_2BR, _), num_rows = x.student, logits, rows.index.shape[0]
    num_cols = min(grads_RV.shape[1], student.num_valid - first)
    _fill(x, made, logits, first, first + num_cols, tiles)
    _pair_gradients_kernel[(cdiv(num_cols, tiles.lse.cols), cdiv(num_rows, BLOCK_N))](
        # in
        z_2RC[0], z_2RC[1], top_2BR[0], top_2BR[1], student.head, rows.index, rows.num_labelled, *pair, coef_N,
        # out
        grads_RV,
        # sizes
        num_rows, z_2RC.stride(1), top_2BR.stride(1),
        # options
        spec.beta, spec.rest,
        TASK=KINDS.index(spec.kind), FAST=has_fast_math(),
        FAST_LOG=has_fast_math() and z_2RC.itemsize == 2, BLOCK_N=BLOCK_N, BLOCK_V=tiles.lse.cols, MAX_SIDE=MAX_SIDE,
    )


@kernel("z_s_ptr", "z_t_ptr", "dlogits_ptr", "z_stride")
def _pair_gradients_kernel(
    z_s_ptr,  # in: [R, B * BLOCK_V]
    z_t_ptr,  # in: [R, B * BLOCK_V]
    top_s_ptr,  # in: [B, R] fp32
    top_t_ptr,  # in: [B, R] fp32
    head,  # in: Head of the student, without factors
    index_ptr,  # in: [R] int32
    num_labelled_ptr,  # in: [1] int32
    max_s_ptr,  # in: [N] fp32
    log_sum_s_ptr,  # in: [N] fp32
    max_t_ptr,  # in: [N] fp32
    log_sum_t_ptr,  # in: [N] fp32
    offset_ptr,  # in: [N] fp32
    log_overlap_ptr,  # in: [N] fp32, for TV and LK, else None
    coef_ptr,  # in: [N] fp32
    dlogits_ptr,  # out: [R, B * BLOCK_V], in bf16 and fp32 the memory of z_s
    num_rows,
    z_stride,
    top_stride,
    beta,
    rest,
    TASK: tl.constexpr,
    FAST: tl.constexpr,
    FAST_LOG: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    MAX_SIDE: tl.constexpr,
):
    # Compute the gradient of a tile [BLOCK_N, BLOCK_V] of logits. Programs that run together read contiguous memory.
    tile = tl.program_id(0)
    row = tl.program_id(1) * BLOCK_N
    num_labelled = tl.load(num_labelled_ptr)
    # The products read whole tiles of rows.
    if row >= tl.cdiv(num_labelled, MAX_SIDE) * MAX_SIDE:
        return
    offs_n = row + tl.arange(0, BLOCK_N)
    live = offs_n < num_labelled
    token = tl.load(index_ptr + offs_n, mask=live, other=0)
    tops = tile * top_stride.to(tl.int64) + offs_n
    top_s = _shift_of(tl.load(top_s_ptr + tops, mask=live, other=0))
    top_t = _shift_of(tl.load(top_t_ptr + tops, mask=live, other=0))
    # log p and log t of a tile's largest logit
    one_s = top_s - tl.load(max_s_ptr + token, mask=live, other=0) - tl.load(log_sum_s_ptr + token, mask=live, other=0)
    one_t = top_t - tl.load(max_t_ptr + token, mask=live, other=0) - tl.load(log_sum_t_ptr + token, mask=live, other=0)
    offset = tl.load(offset_ptr + token, mask=live, other=0)
    before, after = token_factors(head, token, live)
    coef = tl.load(coef_ptr + token, mask=live, other=0) * before

    cells = offs_n.to(tl.int64)[:, None] * z_stride + tile * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    # Rows past num_labelled get logits of -inf, so all of their p and t are 0.
    z_s = tl.load(z_s_ptr + cells, mask=live[:, None], other=float("-inf")).to(tl.float32)
    z_t = tl.load(z_t_ptr + cells, mask=live[:, None], other=float("-inf")).to(tl.float32)
    log_p = z_s + one_s[:, None]
    log_t = z_t + one_t[:, None]
    if TASK == FORWARD:
        grad = fast_exp2(log_p * LOG2_E, FAST) - fast_exp2(log_t * LOG2_E, FAST)
    elif TASK == REVERSE:
        p = fast_exp2(log_p * LOG2_E, FAST)
        # Avoid 0 * -inf = NaN where p underflows.
        grad = tl.where(p == 0, 0.0, p * ((log_p - log_t) - offset[:, None]))
    elif TASK >= TV:
        log_overlap = tl.load(log_overlap_ptr + token, mask=live, other=0)[:, None]
        below = tl.where(log_p < log_t, fast_exp2((log_p - log_overlap) * LOG2_E, FAST), 0.0)
        grad = fast_exp2(log_p * LOG2_E, FAST) * offset[:, None] - below
    else:
        coef *= rest
        p = fast_exp2(log_p * LOG2_E, FAST)
        ratio = fast_exp2(tl.minimum(log_t - log_p, FARTHEST) * LOG2_E, FAST)
        log_m = _log_mixture(beta * (ratio - 1.0), rest + beta * ratio, FAST_LOG)
        # Avoid 0 * NaN where p underflows.
        grad = tl.where(p == 0, 0.0, p * (-log_m - offset[:, None]))
    grad *= coef[:, None]
    if head.softcap is not None:
        # The slope at a logit of -inf, as in padding columns, is not finite.
        grad = tl.where(grad == 0, 0.0, grad * slope_of(z_s + top_s[:, None], head, after[:, None]))
    tl.store(dlogits_ptr + cells, grad.to(dlogits_ptr.dtype.element_ty), mask=(offs_n < num_rows)[:, None])
