"""Forward over all columns in 8 bits: it finds the few logits that matter, and sums the others; those are computed exactly.

The product of ``fp8.py`` costs half of the one in 16 bits, and its logits are some hundredths of a nat off. Its epilogue marks
each logit that may reach the threshold, its error counted, and adds the exponentials of the others. Marks become lists as
always (``lists.py``). The marked logits are then computed from the operands themselves, as the hot columns and the label are:

    sum of exp  =  hot columns (16 bits)  +  marked columns (16 bits)  +  all others (8 bits)

Everything is relative to the token's bound. What is not marked is below it, so no maximum runs along, and the bound is the same
on all shards.

A token is computed again in 16 bits, all columns, where the sum cannot be trusted: something is not finite, its hidden state
cannot be rounded (``fp8.py``), its list is too long or found no room, or its bound was too high. Only the device knows: the
launches return at once where there is none. The error that is counted is that of the row and the column, so a row that is
larger than others has more marks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from cce_dist.kernels import Operands, Rows, Spec, budget, exact
from cce_dist.kernels.blocks import (
    has_tma,
    kernel,
    load_tile,
    operand,
    row_and_split,
    softcap_slope,
    softcapped,
    tile_of_logits,
)
from cce_dist.kernels.budget import cdiv
from cce_dist.kernels.filter import lists as lists_
from cce_dist.kernels.filter.fp8 import (
    ERROR,
    LOG2_E,
    Middle,
    Rounded,
    new_rounded,
    round_hidden,
    round_weight,
    some_of,
    sum_of_parts,
)
from cce_dist.kernels.filter.hot import Hot
from cce_dist.kernels.filter.lists import FARTHEST, SLACK, Lists, list_columns
from cce_dist.kernels.tiles import Tile, Tiles, interpreted, num_programs, precision, screen_tile

ERRORS = 4.0  # standard errors that a logit may be higher than it is screened
SAMPLE = 256  # tokens that say which columns the tail consists of


class First(NamedTuple):
    """What is known of the tokens before the pass over all columns, [N] fp32 or as said.

    Attributes:
        order: The compact order, as ``tokens.compact`` returns it.
        hot_3N: Maximum and sum of exp over the hot columns.
        hot_sloped_N: That sum times the softcap's slopes, or None.
        shard_3N: The shard's part of the bound, maximum and sum.
        bound_N: Lower bound of the log-sum-exp.
        drawn: The columns that are drawn for it, as a shard of their own.
    """

    order: list[torch.Tensor]
    hot_3N: torch.Tensor
    hot_sloped_N: torch.Tensor | None
    shard_3N: torch.Tensor
    bound_N: torch.Tensor
    drawn: Operands


def middle(x: Operands, first: First, eps: float) -> Middle:
    """Find what the operands are rounded less of, from some tokens and the drawn columns.

    Anything will do but for the errors, so what is not finite becomes 0.
    """
    drawn, logits, hidden_size = first.drawn, x.logits, x.hidden.shape[1]
    size = drawn.weight.shape[0]
    tile = Tile(16, 32, 16, 4, 1) if interpreted() else Tile(128, 64, 64, 4, 3)
    rows_TD, blocks_d = x.hidden.new_empty(SAMPLE, hidden_size), cdiv(hidden_size, 32)
    hidden_D, weight_D = first.bound_N.new_empty(2, hidden_size).unbind()
    sums_BS, spread_P = first.bound_N.new_empty(SAMPLE // tile.rows, size), first.bound_N.new_empty(blocks_d)
    _median_kernel[(cdiv(hidden_size, 16),)](
        x.hidden, *first.order, rows_TD, hidden_D, hidden_size, SAMPLE=SAMPLE, BLOCK_D=16
    )
    if size:
        tma = has_tma(rows_TD, drawn.weight)
        _tail_sums_kernel[(cdiv(size, tile.cols) * sums_BS.shape[0],)](
            operand(rows_TD, tile.rows, tile.inner, tma), operand(drawn.weight, tile.cols, tile.inner, tma), drawn.bias,
            *first.order, first.bound_N, sums_BS,
            SAMPLE, size, hidden_size, logits.logit_scale, logits.softcap, math.log(eps),
            HAS_BIAS=drawn.bias is not None, HAS_SCALE=logits.logit_scale != 1.0, HAS_SOFTCAP=logits.softcap > 0.0,
            BLOCK_N=tile.rows, BLOCK_V=tile.cols, BLOCK_D=tile.inner, TMA=tma, PRECISION=precision(rows_TD.dtype),
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    _tail_mean_kernel[(blocks_d,)](
        drawn.weight, sums_BS, weight_D, spread_P, size, hidden_size, BLOCKS=sums_BS.shape[0], BLOCK_S=64, BLOCK_D=32
    )
    return Middle(hidden_D, weight_D, spread_P)


@kernel("hidden_ptr", "rows_ptr", "hidden_size")
def _median_kernel(
    hidden_ptr,  # in: [N, D]
    index_ptr,  # in: [N] int32
    num_kept_ptr,  # in: [1] int32
    rows_ptr,  # out: [T, D]: hidden states of tokens at equal steps
    median_ptr,  # out: [D] fp32
    hidden_size,
    SAMPLE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    place = tl.arange(0, SAMPLE)
    token = tl.load(index_ptr + place.to(tl.int64) * tl.load(num_kept_ptr) // SAMPLE).to(tl.int64)
    offs_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_d = offs_d < hidden_size
    h = tl.load(hidden_ptr + token[None, :] * hidden_size + offs_d[:, None], mask=in_d[:, None], other=0)
    tl.store(rows_ptr + place[None, :] * hidden_size + offs_d[:, None], h, mask=in_d[:, None])
    value = h.to(tl.float32)
    # The upper 16 bits of a number as an integer of the same order: bisection finds the middle one bit by bit.
    keys = _ordered(tl.where(value == value, value, 0.0).to(tl.int32, bitcast=True) >> 16)
    least = tl.full((BLOCK_D,), -32768, tl.int32)
    last = tl.full((BLOCK_D,), 32767, tl.int32)
    for _ in range(0, 16):
        middle = (least + last + 1) >> 1
        reached = tl.sum((keys < middle[:, None]).to(tl.int32), 1) <= SAMPLE // 2
        least = tl.where(reached, middle, least)
        last = tl.where(reached, last, middle - 1)
    median = (_ordered(least) << 16).to(tl.float32, bitcast=True)
    tl.store(median_ptr + offs_d, tl.where(tl.abs(median) < float("inf"), median, 0.0), mask=in_d)


@triton.jit
def _ordered(bits):
    """Turn the bits of numbers into integers of their order, or back."""
    return tl.where(bits < 0, bits ^ 0x7FFF, bits)


@kernel("hidden", "weight", "bias_ptr", "sums_ptr", "hidden_size")
def _tail_sums_kernel(
    hidden,  # in: [T, D] descriptor or pointer
    weight,  # in: [S, D] descriptor or pointer: the drawn columns
    bias_ptr,  # in: [S]
    index_ptr,  # in: [N] int32
    num_kept_ptr,  # in: [1] int32
    bound_ptr,  # in: [N] fp32
    sums_ptr,  # out: [B, S] fp32: exponentials below the threshold, a row for each block of tokens
    num_rows,
    size,
    hidden_size,
    logit_scale,
    softcap,
    log_eps,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    num_blocks = tl.cdiv(num_rows, BLOCK_N)
    row, col = tl.program_id(0) % num_blocks * BLOCK_N, tl.program_id(0) // num_blocks * BLOCK_V
    z = tile_of_logits(
        hidden, weight, bias_ptr, row, col, num_rows, size, hidden_size, logit_scale, softcap,
        HAS_BIAS, HAS_SCALE, HAS_SOFTCAP, True, BLOCK_N, BLOCK_V, BLOCK_D, TMA, PRECISION,
    )  # fmt: skip
    place = row + tl.arange(0, BLOCK_N)
    token = tl.load(index_ptr + place.to(tl.int64) * tl.load(num_kept_ptr) // num_rows)
    below = z - tl.load(bound_ptr + token)[:, None]
    sums = tl.sum(tl.where(below < log_eps, tl.exp(below), 0.0), 0)
    offs_s = col + tl.arange(0, BLOCK_V)
    tl.store(sums_ptr + row // BLOCK_N * size + offs_s, sums, mask=offs_s < size)


@kernel("weight_ptr", "sums_ptr", "mean_ptr", "hidden_size")
def _tail_mean_kernel(
    weight_ptr,  # in: [S, D]
    sums_ptr,  # in: [B, S] fp32
    mean_ptr,  # out: [D] fp32: the mean row by the sums
    spread_ptr,  # out: [P] fp32: the mean square of the distance from it, of a program's elements
    size,
    hidden_size,
    BLOCKS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    offs_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_d = offs_d < hidden_size
    total = tl.zeros((BLOCK_S,), tl.float32)
    mean = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
    square = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
    for first in range(0, size, BLOCK_S):
        offs_s = first + tl.arange(0, BLOCK_S)
        share = tl.zeros((BLOCK_S,), tl.float32)
        for block in range(0, BLOCKS):
            share += tl.load(sums_ptr + block * size + offs_s, mask=offs_s < size, other=0)
        share = tl.where(share < float("inf"), share, 0.0)
        where = weight_ptr + offs_s[:, None] * hidden_size + offs_d[None, :]
        w = tl.load(where, mask=(share > 0)[:, None] & in_d[None, :], other=0).to(tl.float32)
        total += share
        mean += share[:, None] * w
        square += share[:, None] * w * w
    per_share = 1 / tl.maximum(tl.sum(total, 0), 1e-30)
    mean = tl.sum(mean, 0) * per_share
    mean = tl.where(tl.abs(mean) < float("inf"), mean, 0.0)
    tl.store(mean_ptr + offs_d, mean, mask=in_d)
    tl.store(spread_ptr + tl.program_id(0), tl.sum(tl.sum(square, 0) * per_share - mean * mean, 0))


def screened_statistics(
    x: Operands, hot: Hot, first: First, lists: Lists, stats_KN: torch.Tensor, spec: Spec, tiles: Tiles
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write maximum and sum of exp of each token to stats_KN, and the lists with their logits.

    The "maximum" is the bound, which is near the log-sum-exp.

    Returns:
        ``Lists.bound_3N``, with a bound of NaN where the token's sum cannot be trusted, so that lists do not serve it; and the
        labels of those tokens, -1 for all others, [N] int64.
    """
    device, num_tokens = x.hidden.device, x.num_tokens
    tile = screen_tile(device, x.logits.softcap > 0.0)
    num_words, hidden_size = hot.words_W.shape[0], x.hidden.shape[1]
    around = middle(x, first, spec.filter.eps)
    unit = max(tile.cols, tiles.lse.cols)
    at_once, cols = budget.screen_chunks(
        exact.sizes_of(x), num_words, spec.workspace_bytes, tile.rows, tiles.group, unit
    )
    columns = [(col, min(col + cols, 32 * num_words)) for col in range(0, 32 * num_words, cols)]
    row_blocks = min(at_once, num_tokens)
    splits = [
        budget.num_parts(row_blocks, (last - col) // tile.cols, tile.rows, num_programs(device))
        for col, last in columns
    ]

    bound_3N = torch.empty(3, num_tokens, dtype=torch.float32, device=device)
    suspects_N = torch.empty_like(x.ids)
    taken = torch.zeros(1, dtype=torch.int64, device=device)
    words_RW = torch.empty(row_blocks, num_words, dtype=torch.int32, device=device)
    hidden = new_rounded(row_blocks, hidden_size, tile.inner, 4, device)
    weight = new_rounded(cols, hidden_size, tile.inner, 2, device)
    sums = 1 + (x.logits.softcap > 0.0)
    listed = 2 if interpreted() else budget.LISTED_PARTS
    for index_R, num_kept in exact.token_groups(first.order, at_once):
        num_rows = index_R.shape[0]
        parts = stats_KN.new_empty(sums, sum(splits) + listed, num_rows)
        out = Screened(parts, words_RW[:num_rows], sum(splits))
        rounded = some_of(hidden, num_rows)
        round_hidden(x, index_R, num_kept, first.bound_N, around, rounded)
        part = 0
        for (col, last), split in zip(columns, splits, strict=True):
            chunk = some_of(weight, last - col)
            round_weight(x, hot.slot_V, around, chunk, col)
            screen_chunk(
                rounded, chunk, num_kept, x, math.log(spec.filter.eps / SLACK), col, range(part, part + split), out, tile,
                tiles.group,
            )  # fmt: skip
            part += split
        rows = Rows(index_R, num_kept, x.hidden)
        list_columns(out.words_RW, hot, x, rows, lists, taken)
        _add_listed(x, rows, lists, taken, first.bound_N, out)
        _merge(x, rows, first, lists, taken, rounded, around, out, (stats_KN, bound_3N, suspects_N))
    return bound_3N, suspects_N


class Screened(NamedTuple):
    """What is found of a group of tokens.

    Attributes:
        sums_KPR: out: sum of exp relative to the bound, and with a softcap that times its slopes; in P parts; fp32.
        words_RW: out: the marks, as in ``lse.py``.
        num_screened: So many parts are of what is not marked, the others of lists.
    """

    sums_KPR: torch.Tensor
    words_RW: torch.Tensor
    num_screened: int


def screen_chunk(
    hidden: Rounded, weight: Rounded, num_kept: torch.Tensor, x: Operands, log_eps: float, first: int, parts: range,
    out: Screened, tile: Tile, group: int,
) -> None:  # fmt: skip
    """Screen a chunk of columns from ``first`` on, whole tiles, for a group of tokens.

    Args:
        hidden: The group's hidden states.
        weight: The chunk.
        num_kept: [1] int32: tokens of the group that count.
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
        hidden.numbers_KR, weight.numbers_KR, num_kept,
        # out
        out.sums_KPR, out.words_RW,
        # sizes
        num_rows, num_inner, weight.codes.shape[0], out.words_RW.shape[1], out.sums_KPR.shape[1], len(parts), parts.start,
        first // 32,
        # options
        logits.softcap, log_eps,
        abs(logits.logit_scale) * ERRORS * ERROR / x.hidden.shape[1] ** 0.5, HAS_SOFTCAP=logits.softcap > 0.0,
        # tiles
        BLOCK_N=tile.rows, BLOCK_V=tile.cols, BLOCK_D=tile.inner, GROUP=group, TMA=tma,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@kernel("hidden", "weight", "sums_ptr", "words_ptr", "num_inner", "num_cols")
def _screen_kernel(
    hidden,  # in: [R, D or more] e4m3, descriptor or pointer
    weight,  # in: [C, D or more] e4m3, descriptor or pointer
    row_ptr,  # in: [4, R] fp32: scale, number, length, bound
    col_ptr,  # in: [2, C] fp32: number, length
    num_kept_ptr,  # in: [1] int32
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

    row_plane = num_rows.to(tl.int64)
    row_ptr += offs_n
    row_scale = tl.load(row_ptr, mask=in_n, other=0)[:, None]
    row_number = tl.load(row_ptr + row_plane, mask=in_n, other=float("-inf"))
    length = tl.load(row_ptr + 2 * row_plane, mask=in_n, other=0)
    # Nothing is marked of a row that could not be rounded: its token is computed again.
    limit = tl.where(length < float("inf"), log_eps * LOG2_E, float("inf"))
    row_error = tl.where(length < float("inf"), length * (error * LOG2_E), 0.0)[:, None]
    if HAS_SOFTCAP:
        bound = tl.load(row_ptr + 3 * row_plane, mask=in_n, other=0)[:, None]
    else:
        # A token's number is the same in all of its logits: exponentials are without it until they are added up.
        limit = limit - row_number
    sum_exp = tl.zeros((BLOCK_N,), tl.float32)
    sum_sloped = tl.zeros((BLOCK_N,), tl.float32)

    for tile in tl.range(start, stop, flatten=True):
        acc = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
        for inner in range(0, num_inner, BLOCK_D):
            h = load_tile(hidden, row, inner, num_rows, num_inner, num_inner, BLOCK_N, BLOCK_D, TMA)
            w = load_tile(weight, tile * BLOCK_V, inner, num_cols, num_inner, num_inner, BLOCK_V, BLOCK_D, TMA)
            acc = tl.dot(h, w.T, acc)
        offs_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        col_number = tl.load(col_ptr + offs_v)
        col_error = tl.load(col_ptr + num_cols + offs_v)
        # Logarithms are to base 2 from here on, relative to the bound.
        y = acc * row_scale + col_number[None, :]
        if HAS_SOFTCAP:
            z = softcapped(y + row_number[:, None], softcap)
            y = tl.where((col_number > float("-inf"))[None, :], (z - bound) * LOG2_E, float("-inf"))
        # NaN counts as marked.
        others = y + row_error * col_error[None, :] < limit[:, None]
        e = tl.where(others, tl.exp2(y), 0.0)
        sum_exp += tl.sum(e, 1)
        if HAS_SOFTCAP:
            sum_sloped += tl.sum(e * tl.where(others, softcap_slope(z, softcap), 0.0), 1)
        bits = tl.where(others, 0, 1 << (tl.arange(0, BLOCK_V) % 32)[None, :])
        words = tl.sum(tl.reshape(bits, (BLOCK_N, BLOCK_V // 32, 32)), 2).to(tl.int32)
        offs_w = first_word + tile * (BLOCK_V // 32) + tl.arange(0, BLOCK_V // 32)
        where = words_ptr + offs_n.to(tl.int64)[:, None] * num_words + offs_w[None, :]
        tl.store(where, words, mask=in_n[:, None])

    if not HAS_SOFTCAP:
        sum_exp *= tl.exp2(row_number)
    where = sums_ptr + (first_split + split).to(tl.int64) * num_rows + offs_n
    tl.store(where, sum_exp, mask=in_n)
    if HAS_SOFTCAP:
        tl.store(where + num_parts.to(tl.int64) * num_rows, sum_sloped, mask=in_n)


def _add_listed(
    x: Operands, rows: Rows, lists: Lists, taken: torch.Tensor, bound_N: torch.Tensor, screened: Screened
) -> None:  # fmt: skip
    """Compute the logits of the lists, and write the sums of those that are marked: their parts of the sums.

    A label that is listed but not marked has been counted where it was screened.
    """
    sums_KPR, words_RW, first_part = screened
    parts, hidden_size = sums_KPR.shape[1] - first_part, x.hidden.shape[1]
    _listed_sums_kernel[(rows.index.shape[0] * parts,)](
        # in
        x.hidden, x.weight, x.bias, x.ids, rows.index, rows.num_kept, words_RW, lists.columns_M, lists.begin_N, lists.count_N,
        taken, bound_N,
        # out
        sums_KPR,
        # sizes
        rows.index.shape[0], hidden_size, x.logits.start, x.logits.num_valid, words_RW.shape[1], lists.columns_M.shape[0],
        lists_.LONGEST, sums_KPR.shape[1], first_part, parts,
        # options
        x.logits.logit_scale, x.logits.softcap, HAS_BIAS=x.bias is not None, HAS_SOFTCAP=x.logits.softcap > 0.0,
        # tiles
        BLOCK_K=16, BLOCK_D=min(256, triton.next_power_of_2(hidden_size)), STAGES=1 if interpreted() else 4, num_warps=4,
    )  # fmt: skip


@kernel("hidden_ptr", "weight_ptr", "bias_ptr", "words_ptr", "columns_ptr", "sums_ptr", "hidden_size")
def _listed_sums_kernel(
    hidden_ptr,  # in: [N, D]
    weight_ptr,  # in: [V, D]
    bias_ptr,  # in: [V]
    labels_ptr,  # in: [N] int64
    index_ptr,  # in: [R] int32
    num_kept_ptr,  # in: [1] int32
    words_ptr,  # in: [R, W] int32
    columns_ptr,  # in: [M] int32
    begin_ptr,  # in: [N] int32
    count_ptr,  # in: [N] int32
    taken_ptr,  # in: [1] int64
    bound_ptr,  # in: [N] fp32
    sums_ptr,  # out: [K, P, R] fp32
    num_rows,
    hidden_size,
    start,
    num_valid,
    num_words,
    capacity,
    longest,
    num_parts,
    first_part,
    parts,
    logit_scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    # A warp has some columns to itself, so that the only sums between lanes are those of the whole products.
    row = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    if row >= tl.load(num_kept_ptr):
        return
    token = tl.load(index_ptr + row).to(tl.int64)
    bound = tl.load(bound_ptr + token)
    begin = tl.load(begin_ptr + token)
    count = tl.load(count_ptr + token)
    count = tl.where((count <= longest) & (tl.load(taken_ptr) <= capacity), count, 0)
    label = tl.load(labels_ptr + token) - start
    words_ptr += row.to(tl.int64) * num_words

    sum_exp = tl.zeros((BLOCK_K,), tl.float32)
    sum_sloped = tl.zeros((BLOCK_K,), tl.float32)
    for first in range(part * BLOCK_K, count, parts * BLOCK_K):
        offs_k = first + tl.arange(0, BLOCK_K)
        in_k = offs_k < count
        column = tl.load(columns_ptr + begin + offs_k, mask=in_k, other=0)
        in_k &= column < num_valid  # NaN may have marked padding
        products = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
        for inner in tl.range(0, hidden_size, BLOCK_D, num_stages=STAGES):
            offs_d = inner + tl.arange(0, BLOCK_D)
            in_d = offs_d < hidden_size
            where = weight_ptr + column.to(tl.int64)[:, None] * hidden_size + offs_d[None, :]
            w = tl.load(where, mask=in_k[:, None] & in_d[None, :], other=0)
            h = tl.load(hidden_ptr + token * hidden_size + offs_d, mask=in_d, other=0)
            products += w.to(tl.float32) * h.to(tl.float32)[None, :]
        z = tl.sum(products, 1)
        if HAS_BIAS:
            z += tl.load(bias_ptr + column, mask=in_k, other=0).to(tl.float32)
        z *= logit_scale
        if HAS_SOFTCAP:
            z = softcapped(z, softcap)
        marked = (tl.load(words_ptr + column // 32, mask=in_k & (column == label), other=-1) >> (column % 32)) & 1
        e = tl.where(in_k & (marked > 0), tl.exp(z - bound), 0.0)
        sum_exp += e
        if HAS_SOFTCAP:
            sum_sloped += e * softcap_slope(z, softcap)
    where = sums_ptr + (first_part + part).to(tl.int64) * num_rows + row
    tl.store(where, tl.sum(sum_exp, 0))
    if HAS_SOFTCAP:
        tl.store(where + num_parts.to(tl.int64) * num_rows, tl.sum(sum_sloped, 0))


def _merge(
    x: Operands, rows: Rows, first: First, lists: Lists, taken: torch.Tensor, hidden: Rounded, around: Middle,
    screened: Screened, out: tuple[torch.Tensor, ...],
) -> None:  # fmt: skip
    """Write stats_KN, bound_3N and the labels of suspects at the tokens of the group; see ``screened_statistics``."""
    num_rows, sums_KPR = rows.index.shape[0], screened.sums_KPR
    error = ERROR * x.logits.logit_scale
    _merge_screened_kernel[(cdiv(num_rows, 128),)](
        sums_KPR, hidden.numbers_KR, around.spread_P, first.hot_3N, first.shard_3N, first.bound_N, lists.count_N, taken,
        x.ids, rows.index, rows.num_kept,
        *out,
        num_rows, x.num_tokens, sums_KPR.shape[1], screened.num_screened, around.spread_P.shape[0], lists.columns_M.shape[0],
        lists_.LONGEST, error * error / (2 * x.hidden.shape[1]), SLACK,
        HAS_SOFTCAP=x.logits.softcap > 0.0, BLOCK_N=128,
    )  # fmt: skip


@kernel("sums_ptr", "stats_ptr", "state_ptr", "suspects_ptr")
def _merge_screened_kernel(
    sums_ptr,  # in: [K, P, R] fp32: screened parts first
    row_ptr,  # in: [4, R] fp32: anything, anything, length, anything
    spread_ptr,  # in: [P] fp32
    hot_ptr,  # in: [3, N] fp32: maximum, sum
    shard_ptr,  # in: [3, N] fp32: maximum, sum
    bound_ptr,  # in: [N] fp32
    count_ptr,  # in: [N] int32
    taken_ptr,  # in: [1] int64
    labels_ptr,  # in: [N] int64
    index_ptr,  # in: [R] int32
    num_kept_ptr,  # in: [1] int32
    stats_ptr,  # out: [K, N] fp32: maximum, sum, ...
    state_ptr,  # out: [3, N] fp32
    suspects_ptr,  # out: [N] int64
    num_rows,
    num_tokens,
    num_parts,
    num_screened,
    num_spread,
    capacity,
    longest,
    half_variance,
    slack,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = offs_n < num_rows
    live = offs_n < tl.load(num_kept_ptr)
    token = tl.load(index_ptr + offs_n, mask=in_n, other=0)
    stride = num_tokens.to(tl.int64)
    row_stride = num_rows.to(tl.int64)
    bound = tl.load(bound_ptr + token, mask=live, other=0)

    # A number that is rounded to nearest lies around its code, so a logit lies around the one that is screened, and its
    # exponential is exp(variance / 2) larger on average.
    length = tl.load(row_ptr + 2 * row_stride + offs_n, mask=live, other=0)
    gain = tl.exp(tl.minimum(length * length * sum_of_parts(spread_ptr, num_spread) * half_variance, 1.0))
    others = tl.zeros((BLOCK_N,), tl.float32)
    sloped = tl.zeros((BLOCK_N,), tl.float32)
    for part in range(0, num_parts):
        factor = tl.where(part < num_screened, gain, 1.0)
        where = sums_ptr + part * row_stride + offs_n
        others += factor * tl.load(where, mask=live, other=0)
        if HAS_SOFTCAP:
            sloped += factor * tl.load(where + num_parts * row_stride, mask=live, other=0)
    if not HAS_SOFTCAP:
        sloped = others
    hot_max = tl.load(hot_ptr + token, mask=live, other=0)
    hot_sum = tl.load(hot_ptr + stride + token, mask=live, other=0)
    total = others + hot_sum * tl.exp(hot_max - bound)
    # The estimate in the bound was not too high if this shard's part of it is none that this shard does not have.
    shard_max = tl.load(shard_ptr + token, mask=live, other=0)
    claimed = tl.load(shard_ptr + stride + token, mask=live, other=0) * tl.exp(shard_max - bound)
    count = tl.load(count_ptr + token, mask=live, other=0)
    # Lists find room in any order, so it is enough for all of the group or for none. NaN makes this false too.
    trusted = (
        (count <= longest) & (tl.load(taken_ptr) <= capacity) & (total < tl.exp(FARTHEST)) & (claimed <= slack * total)
    )
    trusted &= (tl.abs(bound) < float("inf")) & (length < float("inf"))

    tl.store(stats_ptr + token, bound, mask=in_n)
    tl.store(stats_ptr + stride + token, tl.where(live, total, 1.0), mask=in_n)
    tl.store(state_ptr + token, tl.where(live & (trusted == 0), float("nan"), bound), mask=in_n)
    tl.store(state_ptr + stride + token, tl.where(live, sloped, 0.0), mask=in_n)
    tl.store(state_ptr + 2 * stride + token, bound, mask=in_n)
    label = tl.load(labels_ptr + token, mask=in_n, other=-1)
    tl.store(suspects_ptr + token, tl.where(live & (trusted == 0), label, -1), mask=in_n)
