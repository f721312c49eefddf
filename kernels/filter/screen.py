"""Forward over all columns in 8 bits: it finds the few logits that matter, and sums the others; those are computed exactly.

The product of ``fp8.py`` costs half of the one in 16 bits, and its logits are some hundredths of a nat off. Its epilogue marks
each logit that may reach the threshold, its error counted, and adds the exponentials of the others. Marks become lists as
always (``lists.py``). The marked logits are then computed from the operands themselves, as the hot columns and the label are:

    sum of exp  =  hot columns (16 bits)  +  marked columns (16 bits)  +  all others (8 bits)

Everything is relative to the token's bound. What is not marked is below it, so no maximum runs along, and the bound is the same
on all shards. The logits of the lists stay for backward, which gathers nothing for them a second time.

A token is computed again in 16 bits, all columns, where the sum cannot be trusted: something is not finite, its list is too long
or found no room, or its bound was too high. Only the device knows: the launches return at once where there is none. Rows that
are far larger than others, or that one element fills, are among those, or their marks are many: the error counted is theirs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton.language as tl

from cce_dist.kernels import Operands, Rows
from cce_dist.kernels.blocks import (
    has_tma,
    kernel,
    load_tile,
    operand,
    row_and_split,
    softcap_slope,
    softcapped,
)
from cce_dist.kernels.budget import cdiv
from cce_dist.kernels.filter.fp8 import ERROR, Rounded
from cce_dist.kernels.tiles import Tile, Tiles

ERRORS = 4.0  # standard errors that a logit may be higher than it is screened
LOG2_E = tl.constexpr(math.log2(math.e))


class Screened(NamedTuple):
    """What the screen writes for a group of tokens.

    Attributes:
        sums_KPR: out: sum of exp of what is not marked, relative to the bound, and with a softcap that times its slopes; in
            P parts; fp32.
        words_RW: out: the marks, as in ``lse.py``.
    """

    sums_KPR: torch.Tensor
    words_RW: torch.Tensor


def screen_chunk(
    hidden: Rounded, weight: Rounded, num_kept: torch.Tensor, bound_R: torch.Tensor, x: Operands, log_eps: float,
    first: int, parts: range, out: Screened, tile: Tile, group: int,
) -> None:  # fmt: skip
    """Screen a chunk of columns from ``first`` on, whole tiles, for a group of tokens.

    Args:
        hidden: The group's hidden states.
        weight: The chunk.
        num_kept: [1] int32: tokens of the group that count.
        bound_R: Lower bound of each token's log-sum-exp.
        x: For the options of its logits.
        log_eps: Logits from ``bound + log_eps`` on are marked.
        first: First column.
        parts: The parts of the sums that the chunk fills.
        out: Sums and marks.
        tile: Of the product.
        group: Row blocks that walk the weight together.
    """
    num_rows, num_inner = hidden.codes.shape
    logits = x.logits
    tma = has_tma(hidden.codes, weight.codes)
    _screen_kernel[(cdiv(num_rows, tile.rows) * len(parts),)](
        # in
        operand(hidden.codes, tile.rows, tile.inner, tma), operand(weight.codes, tile.cols, tile.inner, tma),
        hidden.numbers_3R, weight.numbers_3R, num_kept, bound_R,
        # out
        out.sums_KPR, out.words_RW,
        # sizes
        num_rows, num_inner, weight.codes.shape[0], out.words_RW.shape[1], out.sums_KPR.shape[1], len(parts), parts.start,
        first // 32,
        # options
        logits.logit_scale, logits.softcap, log_eps,
        abs(logits.logit_scale) * ERRORS * ERROR / x.hidden.shape[1] ** 0.5, HAS_SOFTCAP=logits.softcap > 0.0,
        # tiles
        BLOCK_N=tile.rows, BLOCK_V=tile.cols, BLOCK_D=tile.inner, GROUP=group, TMA=tma,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@kernel("hidden", "weight", "sums_ptr", "words_ptr", "num_inner", "num_cols")
def _screen_kernel(
    hidden,  # in: [R, D or more] e4m3, descriptor or pointer
    weight,  # in: [C, D or more] e4m3, descriptor or pointer
    row_ptr,  # in: [3, R] fp32: scale, number, length
    col_ptr,  # in: [3, C] fp32: scale, number, length or -1
    num_kept_ptr,  # in: [1] int32
    bound_ptr,  # in: [R] fp32
    sums_ptr,  # out: [K, P, R] fp32
    words_ptr,  # out: [R, W] int32
    num_rows,
    num_inner,
    num_cols,
    num_words,
    num_parts,
    num_splits,
    first_split,
    first_word,
    logit_scale,
    softcap,
    log_eps,
    error,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
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
    num_tiles = num_cols // BLOCK_V
    start = split * num_tiles // num_splits
    stop = (split + 1) * num_tiles // num_splits

    # A bound of +inf makes every exponential of a dead row 0.
    bound = tl.load(bound_ptr + offs_n, mask=offs_n < num_kept, other=float("inf"))
    reference = tl.where(bound > float("-inf"), bound, 0.0)
    limit = (bound - reference + log_eps) * LOG2_E
    limit = tl.where(offs_n < num_kept, limit, 0.0)
    row_plane = num_rows.to(tl.int64)
    row_scale = tl.load(row_ptr + offs_n, mask=in_n, other=0)
    row_number = tl.load(row_ptr + row_plane + offs_n, mask=in_n, other=0)
    row_error = tl.load(row_ptr + 2 * row_plane + offs_n, mask=in_n, other=0) * (error * LOG2_E)
    if not HAS_SOFTCAP:
        row_number = row_number * (logit_scale * LOG2_E) - reference * LOG2_E
        logit_scale *= LOG2_E
    sum_exp = tl.zeros((BLOCK_N,), tl.float32)
    sum_sloped = tl.zeros((BLOCK_N,), tl.float32)

    for tile in tl.range(start, stop, flatten=True):
        acc = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
        for inner in range(0, num_inner, BLOCK_D):
            h = load_tile(hidden, row, inner, num_rows, num_inner, num_inner, BLOCK_N, BLOCK_D, TMA)
            w = load_tile(weight, tile * BLOCK_V, inner, num_cols, num_inner, num_inner, BLOCK_V, BLOCK_D, TMA)
            acc = tl.dot(h, w.T, acc)
        offs_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        col_scale = tl.load(col_ptr + offs_v) * logit_scale
        col_number = tl.load(col_ptr + num_cols + offs_v) * logit_scale
        col_error = tl.load(col_ptr + 2 * num_cols + offs_v)
        # Logarithms are to base 2 from here on, relative to the bound.
        if HAS_SOFTCAP:
            z = acc * row_scale[:, None] * col_scale[None, :] + col_number[None, :] + row_number[:, None] * logit_scale
            z = softcapped(z, softcap)
            y = tl.where((col_error >= 0)[None, :], (z - reference[:, None]) * LOG2_E, float("-inf"))
        else:
            col_number = tl.where(col_error >= 0, col_number, float("-inf"))
            y = acc * row_scale[:, None] * col_scale[None, :] + (col_number[None, :] + row_number[:, None])
        # NaN counts as marked.
        others = y + row_error[:, None] * tl.maximum(col_error, 0.0)[None, :] < limit[:, None]
        e = tl.where(others, tl.exp2(y), 0.0)
        sum_exp += tl.sum(e, 1)
        if HAS_SOFTCAP:
            sum_sloped += tl.sum(e * tl.where(others, softcap_slope(z, softcap), 0.0), 1)
        bits = tl.where(others, 0, 1 << (tl.arange(0, BLOCK_V) % 32)[None, :])
        words = tl.sum(tl.reshape(bits, (BLOCK_N, BLOCK_V // 32, 32)), 2).to(tl.int32)
        offs_w = first_word + tile * (BLOCK_V // 32) + tl.arange(0, BLOCK_V // 32)
        where = words_ptr + offs_n.to(tl.int64)[:, None] * num_words + offs_w[None, :]
        tl.store(where, words, mask=in_n[:, None])

    where = sums_ptr + (first_split + split).to(tl.int64) * num_rows + offs_n
    tl.store(where, sum_exp, mask=in_n)
    if HAS_SOFTCAP:
        tl.store(where + num_parts.to(tl.int64) * num_rows, sum_sloped, mask=in_n)
