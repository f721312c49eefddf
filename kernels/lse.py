"""Log-sum-exp of a shard's logits, tile by tile. Optionally keep the exponentials, or mark the logits that a filter keeps.

Online softmax (Milakov and Gimelshein, 2018) over the vocabulary for a block of rows, as in the forward of *Cut Your Losses*
(Wijmans et al., 2025, algorithm 2). Two things differ. Each program owns a row block and a part of the vocabulary and writes
fp32 partials that another kernel (``losses.py``) merges in order: no lock, no atomic, the same bits every run. The loops over
tiles and over D are flattened into one, so the copy engine works through the epilogue.

Saved exponentials are ``exp(z - reference)`` in bf16, times the softcap's slope, with one reference per row. A float's
relative precision does not depend on its exponent, so the reference need only be near the row's maximum. It is the maximum of
the first tile, or if a later logit is more than ``HEADROOM`` above it, later tiles get another, and ``saved_exp.py`` levels.

A filter's marks are one bit per logit: 0 if it is below its row's threshold. The logit of each token's label has a kernel of
its own (*Cut Your Losses*, algorithm 1): inside the loop above it would cost registers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from cce_dist.kernels import Operands, Rows, Want
from cce_dist.kernels.blocks import (
    LOG2_E,
    fast_exp2,
    has_fast_math,
    has_tma,
    kernel,
    operand,
    row_and_split,
    rows_with_zeros,
    store_tile,
    tile_of_products,
)
from cce_dist.kernels.head import logits_of, sloped, token_factors
from cce_dist.kernels.tiles import MAX_SIDE, Tiles, cdiv, precision

HEADROOM = tl.constexpr(40.0)  # nats; sums and products with exp(40) are far from overflow
NUM_PLANES = 7  # planes of the partials that are always allocated
# Planes of the partials: running maximum, reference of the sums, sum of exp, then the optional sums. The last two, sum of
# squares and bits of the best column, are allocated only if wanted.
MAX, SHIFT, SUM, MOMENT, BELOW, COUNT, SLOPED, SQUARE, BEST = (tl.constexpr(i) for i in range(9))
# Exponentials reach exp(40) where they are kept. Multiplied by 2^-32, they have squares whose sums stay in fp32's range.
SMALLER = tl.constexpr(2.0**-32)
NOTHING_MORE = Want()


class Sums(NamedTuple):
    """Flags for the optional planes of the partials: one constexpr."""

    below: bool
    moment: bool
    sloped: bool
    square: bool
    best: bool

    @classmethod
    def of(cls, want: Want, want_sloped: bool) -> Sums:
        return cls(want.uniform, want.entropy, want_sloped, want.sum_p_squared, want.best)


class Span(NamedTuple):
    """Tiles [first, last) of the columns, cut into ``num_parts`` parts. Part i writes the partials ``first_part + i``."""

    first: int
    last: int
    num_parts: int
    first_part: int = 0


class Keep(NamedTuple):
    """Tensors for saved exponentials."""

    reference_R: torch.Tensor  # in: each row's first reference, fp32
    tile_reference_BR: torch.Tensor  # out: the reference of each tile's exponentials, fp32


class Marks(NamedTuple):
    """Tensors for a filter's marks."""

    bound_N: torch.Tensor  # in: lower bound of each token's log-sum-exp, fp32
    log_eps: float  # A logit is kept unless it is below ``bound + log_eps``
    words_RW: torch.Tensor  # out: int32, bit k of word w is column 32 w + k


def shape_of_partials(parts: int, num_rows: int, want: Want) -> tuple[int, int, int]:
    """Return [K, P, R], the shape of the partials of ``parts`` parts, fp32."""
    return NUM_PLANES + (2 if want.sum_p_squared or want.best else 0), parts, num_rows


def lse_partials(
    x: Operands,
    rows: Rows,
    tiles: Tiles,
    span: Span,
    partials_KPR: torch.Tensor,
    *,
    want: Want = NOTHING_MORE,
    keep: Keep | None = None,
    exp_RV: torch.Tensor | None = None,
    marks: Marks | None = None,
    want_sloped: bool = False,
) -> None:
    """Write the partials of a span of tiles. With ``marks``, also write marks, with ``keep`` exponentials and references."""
    tile, (_, num_splits, num_rows) = tiles.lse, partials_KPR.shape
    tma = has_tma(rows.hidden, x.weight) and (exp_RV is None or has_tma(exp_RV))
    _lse_kernel[(cdiv(num_rows, tile.rows) * span.num_parts,)](
        # in
        operand(rows.hidden, tile.rows, tile.inner, tma), operand(x.weight, tile.cols, tile.inner, tma), x.head,
        rows.index, rows.num_labelled,
        # out
        partials_KPR, None if exp_RV is None else operand(exp_RV, tile.rows, tile.cols // 2, tma), keep, marks,
        # sizes
        num_rows, rows.hidden.shape[1], x.num_valid, num_splits, span.first, span.last, span.num_parts, span.first_part,
        *longest_first(span.last - span.first, span.num_parts), 0 if exp_RV is None else exp_RV.shape[1],
        0 if marks is None else marks.words_RW.shape[1],
        # options
        WANT=Sums.of(want, want_sloped), MASK_V=x.num_valid % tile.cols != 0,
        FAST=has_fast_math() and not want.best,  # with all outputs together, fast math would spill registers
        # tiles
        TILE=tile, GROUP=tiles.group, TMA=tma, PRECISION=precision(rows.hidden.dtype), num_warps=tile.warps,
        num_stages=tile.stages,
    )


def longest_first(num_tiles: int, num_parts: int) -> tuple[int, int]:
    """Return ``alike`` and ``step``: numbers by which the kernel runs the parts that have one tile more first.

    In column order a longer part may run last, and the device waits for it. With P = num_parts and r = num_tiles mod P, part s
    has an extra tile if s r mod P >= P - r. That value repeats every P / alike parts, where ``alike`` is the greatest common
    divisor of r and P. ``step`` is the inverse of r / alike modulo P / alike, so the parts (P / alike - 1 - k) ``step``,
    k = 0, 1, ..., have falling values of s r mod P.
    """
    alike = math.gcd(num_tiles, num_parts)
    return alike, pow(num_tiles // alike, -1, num_parts // alike)


@kernel("hidden", "weight", "partial_ptr", "exp", "hidden_size", "exp_cols")
def _lse_kernel(
    hidden,  # in: [R, D] descriptor or pointer
    weight,  # in: [V, D] descriptor or pointer
    head,  # in: Head
    index_ptr,  # in: [R] int32
    num_labelled_ptr,  # in: [1] int32
    partial_ptr,  # out: [K, P, R] fp32
    exp,  # out: [R, B * BLOCK_V] descriptor or pointer, or None
    keep,  # in, out: Keep, or None where ``exp`` is None
    marks,  # in, out: Marks, or None
    num_rows,
    hidden_size,
    num_valid,
    partial_splits,
    first_tile,
    last_tile,
    num_splits,
    first_split,
    alike,
    step,
    exp_cols,
    num_words,
    WANT: tl.constexpr,  # Sums
    MASK_V: tl.constexpr,
    FAST: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    BLOCK_N: tl.constexpr = TILE.rows
    BLOCK_V: tl.constexpr = TILE.cols
    num_labelled = tl.load(num_labelled_ptr)
    num_row_blocks = tl.cdiv(num_labelled, BLOCK_N)
    pid = tl.program_id(0)
    if pid >= num_row_blocks * num_splits:
        return
    row_block, turn = row_and_split(pid, num_row_blocks, num_splits, GROUP)
    period = num_splits // alike
    split = turn % alike * period + (period - 1 - turn // alike) * step % period  # see longest_first
    row = row_block * BLOCK_N
    offs_n = row + tl.arange(0, BLOCK_N)
    in_n = offs_n < num_rows
    live = offs_n < num_labelled
    num_tiles = last_tile - first_tile
    start = first_tile + split * num_tiles // num_splits
    stop = first_tile + (split + 1) * num_tiles // num_splits

    running_max = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    shift = tl.zeros((BLOCK_N,), tl.float32)
    sum_exp = tl.zeros((BLOCK_N,), tl.float32)
    below = tl.zeros((BLOCK_N,), tl.float32)
    moment = tl.zeros((BLOCK_N,), tl.float32)
    sum_sloped = tl.zeros((BLOCK_N,), tl.float32)
    square = tl.zeros((BLOCK_N,), tl.float32)
    best = tl.zeros((BLOCK_N,), tl.int32)
    count = 0.0
    reference = tl.zeros((BLOCK_N,), tl.float32)
    threshold = tl.zeros((BLOCK_N,), tl.float32)
    if exp is not None:
        reference = tl.load(keep.reference_R + offs_n, mask=in_n, other=0)
        reference = tl.where(reference > float("-inf"), reference, 0.0)
    if marks is not None:
        # Rows without a label get a bound of +inf, which makes all of their exponentials 0.
        token = tl.load(index_ptr + offs_n, mask=live, other=0)
        reference = tl.load(marks.bound_N + token, mask=live, other=float("inf"))
        threshold = reference + marks.log_eps
        reference = tl.where(reference > float("-inf"), reference, 0.0)
    token = offs_n
    if head.factors is not None:
        token = tl.load(index_ptr + offs_n, mask=in_n, other=0)
    factors = token_factors(head, token, live)
    after = factors[1][:, None]

    # For each tile: add logits z [BLOCK_N, BLOCK_V] = hidden[rows] @ weight[columns].T to maxima and sums, [BLOCK_N] each.
    for tile in tl.range(start, stop, flatten=True):
        acc = tile_of_products(
            hidden, weight, row, tile * BLOCK_V, num_rows, num_valid, hidden_size, TILE, TMA, PRECISION
        )
        offs_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        in_v = offs_v < num_valid
        z = logits_of(acc, offs_v, in_v, head, factors, MASK_V)
        tile_max = tl.max(z, 1)
        new_max = tl.maximum(running_max, tile_max)
        if WANT.best:
            column = tl.min(tl.where(z == tile_max[:, None], offs_v[None, :], 0x7FFFFFFF), 1)
            best = tl.where(tile_max > running_max, column, best)
        if exp is not None or marks is not None:
            new_shift = tl.where(new_max > reference + HEADROOM, new_max, reference)
        else:
            new_shift = tl.where(new_max > float("-inf"), new_max, 0.0)
        drop = new_shift - shift  # not used while the sum is still 0
        above = z - new_shift[:, None]
        if WANT.below:
            below += count * tl.where(count > 0, drop, 0.0) - tl.sum(tl.where(in_v[None, :], above, 0.0), 1)
            count += tl.minimum(num_valid - tile * BLOCK_V, BLOCK_V).to(tl.float32)
        e = _exp(above, FAST)
        if WANT.moment:
            if exp is not None or marks is not None:
                moment = _moment(moment, sum_exp, e, z, new_max, drop, new_max - running_max)
            else:
                moment = _moment(moment, sum_exp, e, z, new_shift, drop, drop)
        sum_exp = tl.where(sum_exp > 0, sum_exp * tl.exp(-drop), sum_exp) + tl.sum(e, 1)
        if WANT.square:
            small = e * SMALLER
            square = tl.where(square > 0, square * tl.exp(-2 * drop), square) + tl.sum(small * small, 1)
        if marks is not None:
            _mark(marks.words_RW, e, threshold - new_shift, tile, offs_n, in_n, num_words, BLOCK_N, BLOCK_V, FAST)
        if WANT.sloped:
            e = sloped(e, z, head, after)
            sum_sloped = tl.where(sum_sloped > 0, sum_sloped * tl.exp(-drop), sum_sloped) + tl.sum(e, 1)
        running_max = new_max
        shift = new_shift
        if exp is not None:
            if head.softcap is not None:
                e = sloped(e, z, head, after)
            store_tile(exp, row, tile * BLOCK_V, e, num_rows, exp_cols, exp_cols, BLOCK_N, BLOCK_V, TMA)
            tl.store(keep.tile_reference_BR + tile * num_rows.to(tl.int64) + offs_n, shift, mask=in_n)

    plane = partial_splits.to(tl.int64) * num_rows
    where = partial_ptr + (first_split + split).to(tl.int64) * num_rows + offs_n
    tl.store(where + MAX * plane, running_max, mask=in_n)
    tl.store(where + SHIFT * plane, shift, mask=in_n)
    tl.store(where + SUM * plane, sum_exp, mask=in_n)
    if WANT.below:
        tl.store(where + BELOW * plane, below, mask=in_n)
        tl.store(where + COUNT * plane, tl.zeros((BLOCK_N,), tl.float32) + count, mask=in_n)
    if WANT.moment:
        tl.store(where + MOMENT * plane, moment, mask=in_n)
    if WANT.sloped:
        tl.store(where + SLOPED * plane, sum_sloped, mask=in_n)
    if WANT.square:
        tl.store(where + SQUARE * plane, square, mask=in_n)
    if WANT.best:
        tl.store(where + BEST * plane, best.to(tl.float32, bitcast=True), mask=in_n)


@triton.jit
def _moment(moment, sum_exp, e, z, top, drop, rise):
    """Add a tile to sum_j exp(z_j - shift) (z_j - top); shift has grown by ``drop``, top, the maximum, by ``rise``."""
    # Avoid 0 * -inf = NaN for a logit of -inf.
    term = tl.sum(tl.where(e > 0, e * (z - top[:, None]), 0.0), 1)
    return tl.where(sum_exp > 0, tl.exp(-drop) * (moment - rise * sum_exp), 0.0) + term


@triton.jit
def _exp(x, FAST: tl.constexpr):
    """Return tl.exp(x), by FAST in two instructions instead of five, with 0 for results below 2^-126."""
    if FAST:
        return fast_exp2(x * LOG2_E, FAST)
    else:
        return tl.exp(x)


@triton.jit
def _mark(
    words_ptr, e, limit, tile, offs_n, in_n, num_words, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, FAST: tl.constexpr
):
    """Store one bit per logit of a tile, 0 where its exponential is below exp(``limit``)."""
    # Compare exponentials, so that the logits' registers are free. NaN is kept, and whole rows if the limit underflows.
    dropped = e < _exp(limit, FAST)[:, None]
    bits = tl.where(dropped, 0, 1 << (tl.arange(0, BLOCK_V) % 32)[None, :])
    words = tl.sum(tl.reshape(bits, (BLOCK_N, BLOCK_V // 32, 32)), 2).to(tl.int32)
    offs_w = tile * (BLOCK_V // 32) + tl.arange(0, BLOCK_V // 32)
    tl.store(words_ptr + offs_n.to(tl.int64)[:, None] * num_words + offs_w[None, :], words, mask=in_n[:, None])


def gathered_with_targets(
    x: Operands, order: Sequence[torch.Tensor], buffer_RD: torch.Tensor, out_KN: torch.Tensor | None, row: int,
    copy_N: torch.Tensor | None = None,
) -> Rows:
    """Gather the hidden states of a group as ``tokens.gathered`` does, and write each label's logit; 0: no row of this shard.

    The logits go to row ``row`` of out_KN, with several ids a token to I rows from there on, and to ``copy_N``, if given.
    """
    rows = Rows(order[0], order[1], buffer_RD[: order[0].shape[0]])
    num_rows, hidden_size = rows.hidden.shape
    ids, num_ids = x.ids, None
    if x.cells is not None:
        ids, num_ids = x.cells.ids_NI, x.cells.ids_NI.shape[1]
    _gather_targets_kernel[(cdiv(num_rows, 4) * (num_ids or 1),)](
        x.hidden, x.weight, x.head, ids, rows.index, rows.num_labelled,
        rows.hidden, out_KN, copy_N,
        num_rows, hidden_size, ids.shape[0], row, x.start, x.num_valid, num_ids,
        MAX_SIDE=MAX_SIDE, BLOCK_N=4, BLOCK_D=512,
    )
    return rows


@kernel("hidden_ptr", "weight_ptr", "rows_ptr", "hidden_size")
def _gather_targets_kernel(
    hidden_ptr,  # in: [N, D]
    weight_ptr,  # in: [V, D]
    head,  # in: Head
    labels_ptr,  # in: [N] int64; [N, I] with num_ids
    index_ptr,  # in: [R] int32
    num_labelled_ptr,  # in: [1] int32
    rows_ptr,  # out: [R, D]
    out_ptr,  # out: rows from first_row on of [K, N] fp32, one, or with num_ids I of them
    copy_ptr,  # out: [N] fp32, or None
    num_rows,
    hidden_size,
    num_tokens,
    first_row,
    start,
    num_valid,
    num_ids,  # I, or None for one label per token
    MAX_SIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    block = tl.program_id(0)
    target_ptr = out_ptr + first_row.to(tl.int64) * num_tokens
    if num_ids is not None:
        # Neighbouring programs read the same hidden states, which stay in the cache.
        which = block % num_ids
        block = block // num_ids
    num_labelled = tl.load(num_labelled_ptr)
    offs_n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = offs_n < num_rows
    token = tl.load(index_ptr + offs_n, mask=in_n, other=0)
    kept = in_n & (offs_n < num_labelled)
    written = in_n & (offs_n < rows_with_zeros(num_labelled, MAX_SIDE))
    live = kept
    if num_ids is not None:
        written = tl.where(which == 0, written, False)
        label = tl.load(labels_ptr + token.to(tl.int64) * num_ids + which, mask=live, other=-1)
        live &= label >= 0
        label -= start
        target_ptr += which.to(tl.int64) * num_tokens
    else:
        label = tl.load(labels_ptr + token, mask=live, other=-1) - start
    live &= (label >= 0) & (label < num_valid)
    label = tl.where(live, label, 0)

    products = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    # Sum hidden[token] * weight[label] over D, [BLOCK_N, BLOCK_D] at a time, and copy hidden[token] to the gathered rows.
    for inner in range(0, hidden_size, BLOCK_D):
        offs_d = inner + tl.arange(0, BLOCK_D)
        in_d = (offs_d < hidden_size)[None, :]
        row = hidden_ptr + token.to(tl.int64)[:, None] * hidden_size + offs_d[None, :]
        h = tl.load(row, mask=kept[:, None] & in_d, other=0)
        where = rows_ptr + offs_n.to(tl.int64)[:, None] * hidden_size + offs_d[None, :]
        tl.store(where, h, mask=written[:, None] & in_d)
        w = tl.load(weight_ptr + label[:, None] * hidden_size + offs_d[None, :], mask=live[:, None] & in_d, other=0)
        products += h.to(tl.float32) * w.to(tl.float32)
    z = logits_of(tl.sum(products, 1), label, live, head, token_factors(head, token, live), False)
    z = tl.where(live, z, 0.0)
    tl.store(target_ptr + token, z, mask=in_n)
    if copy_ptr is not None:
        tl.store(copy_ptr + token, z, mask=in_n)
