"""Log-sum-exp of the logits of a shard, tile by tile; optionally the exponentials are kept, or what a filter keeps is marked.

Online softmax (Milakov and Gimelshein, 2018) over the vocabulary for a block of rows, as in the linear-cross-entropy
forward of *Cut Your Losses* (Wijmans et al., 2024, algorithm 2). Two things differ. Each program owns a row block and a part of
the vocabulary and writes fp32 partials that a second kernel merges in order, so there is no lock, no atomic, and the same bits
every run. The loops over tiles and over D are flattened into one, so the copy engine works through the epilogue.

Kept exponentials are ``exp(z - reference)`` in bf16, times the softcap's slope, with one reference per row. A float's relative
precision does not depend on its exponent, so the reference need only be near the row's maximum: the maximum of the first
tile serves unless a later logit is more than ``HEADROOM`` above it. Such rows are brought to one reference at the end
(``kept.py``), so any gap between logits is exact.

Marks of a filter are one bit per logit that is not below its row's threshold. A branch with stores of the tile in this loop
would spill registers; this reduction and its small unconditional store do not.

The logit of each token's label is a kernel of its own, the indexed matrix-vector product of *Cut Your Losses* (algorithm 1):
inside the loop above it would cost registers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from cce_dist.kernels import Operands, Rows, Want
from cce_dist.kernels.blocks import (
    has_tma,
    kernel,
    load_tile,
    logits_of,
    operand,
    row_and_split,
    softcap_slope,
    softcapped,
    store_tile,
)
from cce_dist.kernels.budget import cdiv
from cce_dist.kernels.tiles import Tile, Tiles, num_programs, precision

HEADROOM = tl.constexpr(40.0)  # nats; exp(40) leaves the sums of fp32 and the products of bf16 far from overflow

# Planes of the partials: running maximum, what the sums are relative to, sum of exp, then the optional sums.
MAX, SHIFT, SUM, MOMENT, BELOW, COUNT, SLOPED = (tl.constexpr(i) for i in range(7))
NUM_PLANES = 7
NOTHING_MORE = Want()


class Span(NamedTuple):
    """Tiles [first, last) of the columns, cut into ``num_parts`` parts whose partials are ``first_part`` and the next ones."""

    first: int
    last: int
    num_parts: int
    first_part: int = 0


class Keep(NamedTuple):
    """Where exponentials are kept.

    Attributes:
        reference_R: in: the value that a row's exponentials are first relative to, fp32.
        exp_RV: out: the exponentials.
        tile_reference_BR: out: the value that those of each tile are relative to, fp32.
    """

    reference_R: torch.Tensor
    exp_RV: torch.Tensor
    tile_reference_BR: torch.Tensor


class Marks(NamedTuple):
    """The bits that a filter wants of the logits.

    Attributes:
        bound_R: in: lower bound of each row's log-sum-exp, fp32.
        log_eps: A logit is kept unless it is below ``bound + log_eps``.
        words_RW: out: int32, bit k of word w is column 32 w + k; for all columns of the last tile.
    """

    bound_R: torch.Tensor
    log_eps: float
    words_RW: torch.Tensor


def lse_partials(
    x: Operands,
    rows: Rows,
    tiles: Tiles,
    span: Span,
    partials_KPR: torch.Tensor,
    *,
    want: Want = NOTHING_MORE,
    keep: Keep | None = None,
    marks: Marks | None = None,
    want_sloped: bool = False,
) -> None:
    """Write the partials of a span of tiles; fill what ``keep`` or ``marks`` ask for.

    ``want_sloped`` adds the sum of exp times the softcap's slope.
    """
    tile, logits = tiles.lse, x.logits
    num_rows, hidden_size = rows.hidden.shape
    reference_R, exp_RV, tile_reference_BR = keep or (None, None, None)
    tma = has_tma(rows.hidden, x.weight) and (exp_RV is None or has_tma(exp_RV))
    bound_R, log_eps, words_RW = marks or (reference_R, 0.0, None)
    grid = (cdiv(num_rows, tile.rows) * span.num_parts,)
    _lse_kernel[grid](
        # in
        operand(rows.hidden, tile.rows, tile.inner, tma), operand(x.weight, tile.cols, tile.inner, tma), x.bias,
        rows.num_kept, bound_R,
        # out
        partials_KPR, None if exp_RV is None else operand(exp_RV, tile.rows, tile.cols // 2, tma), tile_reference_BR,
        words_RW,
        # sizes
        num_rows, hidden_size, logits.num_valid, partials_KPR.shape[1], span.first, span.last, span.num_parts,
        span.first_part, 0 if exp_RV is None else exp_RV.shape[1], 0 if words_RW is None else words_RW.shape[1],
        # options
        logits.logit_scale, logits.softcap, log_eps,
        HAS_BIAS=x.bias is not None, HAS_SCALE=logits.logit_scale != 1.0, HAS_SOFTCAP=logits.softcap > 0.0,
        MASK_V=logits.num_valid % tile.cols != 0, WANT_BELOW=want.uniform, WANT_MOMENT=want.entropy,
        KEEP_EXP=exp_RV is not None, WANT_SLOPED=want_sloped, MARK=marks is not None,
        # tiles
        BLOCK_N=tile.rows, BLOCK_V=tile.cols, BLOCK_D=tile.inner, GROUP=tiles.group, TMA=tma,
        PRECISION=precision(rows.hidden.dtype), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def choose_splits(num_rows: int, num_tiles: int, tile: Tile, device: torch.device) -> int:
    """Return the number of parts that the vocabulary is cut into.

    A quarter of the device's programs: a group of 16 row blocks then is four whole waves. Fewer where there are so many row
    blocks that their partials would be large, more where there are so few that they would not fill the device.
    """
    at_once = num_programs(device)
    row_blocks = cdiv(num_rows, tile.rows)
    wanted = max(cdiv(at_once, row_blocks), min(at_once // 4, cdiv(16 * at_once, row_blocks)))
    return min(num_tiles, wanted)


@kernel("hidden", "weight", "bias_ptr", "partial_ptr", "exp", "words_ptr", "hidden_size", "exp_cols")
def _lse_kernel(
    hidden,  # in: [R, D] descriptor or pointer
    weight,  # in: [V, D] descriptor or pointer
    bias_ptr,  # in: [V]
    num_kept_ptr,  # in: [1] int32
    reference_ptr,  # in: [R] fp32; the bound with MARK
    partial_ptr,  # out: [K, P, R] fp32
    exp,  # out: [R, B * BLOCK_V] descriptor or pointer
    tile_reference_ptr,  # out: [B, R] fp32
    words_ptr,  # out: [R, W] int32
    num_rows,
    hidden_size,
    num_valid,
    partial_splits,
    first_tile,
    last_tile,
    num_splits,
    first_split,
    exp_cols,
    num_words,
    logit_scale,
    softcap,
    log_eps,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    MASK_V: tl.constexpr,
    WANT_BELOW: tl.constexpr,
    WANT_MOMENT: tl.constexpr,
    KEEP_EXP: tl.constexpr,
    WANT_SLOPED: tl.constexpr,
    MARK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    num_kept = tl.load(num_kept_ptr)
    num_row_blocks = tl.cdiv(num_kept, BLOCK_N)
    pid = tl.program_id(0)
    if pid >= num_row_blocks * num_splits:
        return
    row_block, split = row_and_split(pid, num_row_blocks, num_splits, GROUP)
    row = row_block * BLOCK_N
    offs_n = row + tl.arange(0, BLOCK_N)
    in_n = offs_n < num_rows
    num_tiles = last_tile - first_tile
    start = first_tile + split * num_tiles // num_splits
    stop = first_tile + (split + 1) * num_tiles // num_splits

    running_max = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    shift = tl.zeros((BLOCK_N,), tl.float32)
    sum_exp = tl.zeros((BLOCK_N,), tl.float32)
    below = tl.zeros((BLOCK_N,), tl.float32)
    moment = tl.zeros((BLOCK_N,), tl.float32)
    sloped = tl.zeros((BLOCK_N,), tl.float32)
    count = 0.0
    reference = tl.zeros((BLOCK_N,), tl.float32)
    threshold = tl.zeros((BLOCK_N,), tl.float32)
    if KEEP_EXP:
        reference = tl.load(reference_ptr + offs_n, mask=in_n, other=0)
        reference = tl.where(reference > float("-inf"), reference, 0.0)
    if MARK:
        # A bound of +inf makes every exponential of a dead row 0.
        reference = tl.load(reference_ptr + offs_n, mask=offs_n < num_kept, other=float("inf"))
        threshold = reference + log_eps
        reference = tl.where(reference > float("-inf"), reference, 0.0)

    for tile in tl.range(start, stop, flatten=True):
        acc = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
        for inner in range(0, hidden_size, BLOCK_D):
            h = load_tile(hidden, row, inner, num_rows, hidden_size, hidden_size, BLOCK_N, BLOCK_D, TMA)
            w = load_tile(weight, tile * BLOCK_V, inner, num_valid, hidden_size, hidden_size, BLOCK_V, BLOCK_D, TMA)
            acc = tl.dot(h, w.T, acc, input_precision=PRECISION)
        offs_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        z = logits_of(acc, offs_v, bias_ptr, num_valid, logit_scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP, MASK_V)
        new_max = tl.maximum(running_max, tl.max(z, 1))
        if KEEP_EXP or MARK:
            new_shift = tl.where(new_max > reference + HEADROOM, new_max, reference)
        else:
            new_shift = tl.where(new_max > float("-inf"), new_max, 0.0)
        drop = new_shift - shift  # of an empty sum too: 0 stays 0
        e = tl.exp(z - new_shift[:, None])
        if WANT_BELOW:
            in_v = (offs_v < num_valid)[None, :]
            below += count * tl.where(count > 0, drop, 0.0) + tl.sum(tl.where(in_v, new_shift[:, None] - z, 0.0), 1)
            count += tl.minimum(num_valid - tile * BLOCK_V, BLOCK_V).to(tl.float32)
        if WANT_MOMENT:
            # 0 * -inf where a logit is -inf
            term = tl.sum(tl.where(e > 0, e * (z - new_shift[:, None]), 0.0), 1)
            moment = tl.where(sum_exp > 0, tl.exp(-drop) * (moment - drop * sum_exp), 0.0) + term
        sum_exp = tl.where(sum_exp > 0, sum_exp * tl.exp(-drop), sum_exp) + tl.sum(e, 1)
        if MARK:
            # Of e, not of z, which need not stay in registers. NaN is kept, and all of a row whose limit underflows.
            dropped = e < tl.exp(threshold - new_shift)[:, None]
            bits = tl.where(dropped, 0, 1 << (tl.arange(0, BLOCK_V) % 32)[None, :])
            words = tl.sum(tl.reshape(bits, (BLOCK_N, BLOCK_V // 32, 32)), 2).to(tl.int32)
            offs_w = tile * (BLOCK_V // 32) + tl.arange(0, BLOCK_V // 32)
            tl.store(words_ptr + offs_n.to(tl.int64)[:, None] * num_words + offs_w[None, :], words, mask=in_n[:, None])
        if WANT_SLOPED:
            e = tl.where(e > 0, e * softcap_slope(z, softcap), 0.0)
            sloped = tl.where(sloped > 0, sloped * tl.exp(-drop), sloped) + tl.sum(e, 1)
        running_max = new_max
        shift = new_shift
        if KEEP_EXP:
            if HAS_SOFTCAP:
                e = tl.where(e > 0, e * softcap_slope(z, softcap), 0.0)
            store_tile(exp, row, tile * BLOCK_V, e, num_rows, exp_cols, exp_cols, BLOCK_N, BLOCK_V, TMA)
            tl.store(tile_reference_ptr + tile * num_rows.to(tl.int64) + offs_n, shift, mask=in_n)

    plane = partial_splits.to(tl.int64) * num_rows
    where = partial_ptr + (first_split + split).to(tl.int64) * num_rows + offs_n
    tl.store(where + MAX * plane, running_max, mask=in_n)
    tl.store(where + SHIFT * plane, shift, mask=in_n)
    tl.store(where + SUM * plane, sum_exp, mask=in_n)
    if WANT_BELOW:
        tl.store(where + BELOW * plane, below, mask=in_n)
        tl.store(where + COUNT * plane, tl.zeros((BLOCK_N,), tl.float32) + count, mask=in_n)
    if WANT_MOMENT:
        tl.store(where + MOMENT * plane, moment, mask=in_n)
    if WANT_SLOPED:
        tl.store(where + SLOPED * plane, sloped, mask=in_n)


def merge_splits(
    partials_KPR: torch.Tensor,
    x: Operands,
    rows: Rows,
    stats_KN: torch.Tensor,
    *,
    want: Want = NOTHING_MORE,
    sloped_N: torch.Tensor | None = None,
) -> None:
    """Merge the partials of all parts, in order, into stats_KN at the tokens of the group (TARGET is left alone).

    Ignored tokens get a maximum of 0, a sum of 1, and zeros. ``sloped_N`` takes the sum with the softcap's slope.
    """
    num_rows = rows.index.shape[0]
    _merge_splits_kernel[(cdiv(num_rows, 128),)](
        partials_KPR, rows.index, rows.num_kept,
        stats_KN, sloped_N,
        num_rows, stats_KN.shape[1], partials_KPR.shape[1], x.logits.num_valid,
        WANT_BELOW=want.uniform, WANT_MOMENT=want.entropy, WANT_SLOPED=sloped_N is not None, BLOCK_N=128,
    )  # fmt: skip


@kernel("partial_ptr")
def _merge_splits_kernel(
    partial_ptr,  # in: [K, P, R] fp32
    index_ptr,  # in: [R] int32
    num_kept_ptr,  # in: [1] int32
    stats_ptr,  # out: [K, N] fp32
    sloped_ptr,  # out: [N] fp32
    num_rows,
    num_tokens,
    num_splits,
    num_valid,
    WANT_BELOW: tl.constexpr,
    WANT_MOMENT: tl.constexpr,
    WANT_SLOPED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = offs_n < num_rows
    live = offs_n < tl.load(num_kept_ptr)
    row_stride = num_rows.to(tl.int64)
    plane = num_splits * row_stride
    merged_max = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    for split in range(0, num_splits):
        where = partial_ptr + split * row_stride + offs_n
        merged_max = tl.maximum(merged_max, tl.load(where + MAX * plane, mask=live, other=0))
    base = tl.where(merged_max > float("-inf"), merged_max, 0.0)

    sum_exp = tl.zeros((BLOCK_N,), tl.float32)
    below = tl.zeros((BLOCK_N,), tl.float32)
    moment = tl.zeros((BLOCK_N,), tl.float32)
    sloped = tl.zeros((BLOCK_N,), tl.float32)
    for split in range(0, num_splits):
        where = partial_ptr + split * row_stride + offs_n
        drop = base - tl.load(where + SHIFT * plane, mask=live, other=0)
        part = tl.load(where + SUM * plane, mask=live, other=0)
        # An empty sum stays empty whatever it is relative to; anything else, NaN too, is carried over.
        rescale = tl.where(part == 0, 1.0, tl.exp(-drop))
        sum_exp += part * rescale
        if WANT_BELOW:
            columns = tl.load(where + COUNT * plane, mask=live, other=0)
            below += tl.load(where + BELOW * plane, mask=live, other=0) + columns * drop
        if WANT_MOMENT:
            part_moment = tl.load(where + MOMENT * plane, mask=live, other=0)
            moment += tl.where(part == 0, 0.0, rescale * (part_moment - drop * part))
        if WANT_SLOPED:
            sloped += tl.load(where + SLOPED * plane, mask=live, other=0) * rescale

    token = tl.load(index_ptr + offs_n, mask=in_n, other=0)
    stats = stats_ptr + token
    stride = num_tokens.to(tl.int64)
    tl.store(stats, tl.where(live, merged_max, 0.0), mask=in_n)
    tl.store(stats + stride, tl.where(live, sum_exp, 1.0), mask=in_n)
    if WANT_BELOW:
        tl.store(stats + 3 * stride, tl.where(live, below, 0.0), mask=in_n)
        tl.store(stats + 4 * stride, tl.zeros((BLOCK_N,), tl.float32) + num_valid, mask=in_n)
    if WANT_MOMENT:
        tl.store(stats + (3 + 2 * WANT_BELOW) * stride, tl.where(live, moment, 0.0), mask=in_n)
    if WANT_SLOPED:
        tl.store(sloped_ptr + token, tl.where(live, sloped, 0.0), mask=in_n)


def target_logits(x: Operands, rows: Rows, target_N: torch.Tensor) -> None:
    """Write z at the label to target_N at the tokens of the group; 0 where the label is no valid row of this shard."""
    num_rows, hidden_size = rows.hidden.shape
    logits = x.logits
    _target_logit_kernel[(cdiv(num_rows, 4),)](
        rows.hidden, x.weight, x.bias, x.ids, rows.index, rows.num_kept,
        target_N,
        num_rows, hidden_size, logits.start, logits.num_valid,
        logits.logit_scale, logits.softcap,
        HAS_BIAS=x.bias is not None, HAS_SOFTCAP=logits.softcap > 0.0, BLOCK_N=4, BLOCK_D=512,
    )  # fmt: skip


@kernel("rows_ptr", "weight_ptr", "bias_ptr", "hidden_size")
def _target_logit_kernel(
    rows_ptr,  # in: [R, D]
    weight_ptr,  # in: [V, D]
    bias_ptr,  # in: [V]
    labels_ptr,  # in: [N] int64
    index_ptr,  # in: [R] int32
    num_kept_ptr,  # in: [1] int32
    target_ptr,  # out: [N] fp32
    num_rows,
    hidden_size,
    start,
    num_valid,
    logit_scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = offs_n < num_rows
    token = tl.load(index_ptr + offs_n, mask=in_n, other=0)
    live = in_n & (offs_n < tl.load(num_kept_ptr))
    label = tl.load(labels_ptr + token, mask=live, other=-1) - start
    live &= (label >= 0) & (label < num_valid)
    label = tl.where(live, label, 0)

    products = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for inner in range(0, hidden_size, BLOCK_D):
        offs_d = inner + tl.arange(0, BLOCK_D)
        mask = live[:, None] & (offs_d < hidden_size)[None, :]
        h = tl.load(rows_ptr + offs_n.to(tl.int64)[:, None] * hidden_size + offs_d[None, :], mask=mask, other=0)
        w = tl.load(weight_ptr + label[:, None] * hidden_size + offs_d[None, :], mask=mask, other=0)
        products += h.to(tl.float32) * w.to(tl.float32)
    u = tl.sum(products, 1)
    if HAS_BIAS:
        u += tl.load(bias_ptr + label, mask=live, other=0).to(tl.float32)
    u *= logit_scale
    if HAS_SOFTCAP:
        u = softcapped(u, softcap)
    tl.store(target_ptr + token, tl.where(live, u, 0.0), mask=in_n)
