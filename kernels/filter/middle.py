"""The two vectors that hidden states and weight are rounded to 8 bits less of, from a sample of both; see ``fp8.py``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from cce_dist.kernels import Operands
from cce_dist.kernels.blocks import has_tma, kernel, operand, tile_of_logits
from cce_dist.kernels.budget import cdiv
from cce_dist.kernels.tiles import Tile, interpreted, precision

SAMPLE = 256  # tokens that say which columns the tail consists of


class Middle(NamedTuple):
    """What the operands are rounded less of; fp32.

    Attributes:
        hidden_D: m: each element's median over some hidden states. A few of them that are huge do not move it.
        weight_D: b: the mean row of the weight, by the columns' shares of what these tokens have below the threshold.
        spread_P: In parts: mean square of the rows' distance from b, by the same shares.
    """

    hidden_D: torch.Tensor
    weight_D: torch.Tensor
    spread_P: torch.Tensor


def middle(x: Operands, drawn: Operands, order: Sequence[torch.Tensor], bound_N: torch.Tensor, eps: float) -> Middle:
    """Find what the operands are rounded less of, from some tokens and the drawn columns.

    Anything will do but for the errors, so what is not finite becomes 0.
    """
    logits, hidden_size = x.logits, x.hidden.shape[1]
    size = drawn.weight.shape[0]
    tile = Tile(16, 32, 16, 4, 1) if interpreted() else Tile(128, 64, 64, 4, 3)
    rows_TD, blocks_d = x.hidden.new_empty(SAMPLE, hidden_size), cdiv(hidden_size, 32)
    hidden_D, weight_D = bound_N.new_empty(2, hidden_size).unbind()
    sums_BS, spread_P = bound_N.new_empty(SAMPLE // tile.rows, size), bound_N.new_empty(blocks_d)
    _median_kernel[(cdiv(hidden_size, 16),)](
        x.hidden, *order, rows_TD, hidden_D, hidden_size, SAMPLE=SAMPLE, BLOCK_D=16
    )
    if size:
        tma = has_tma(rows_TD, drawn.weight)
        _tail_sums_kernel[(cdiv(size, tile.cols) * sums_BS.shape[0],)](
            operand(rows_TD, tile.rows, tile.inner, tma), operand(drawn.weight, tile.cols, tile.inner, tma), drawn.bias,
            *order, bound_N, sums_BS,
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
