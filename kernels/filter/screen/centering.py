"""What hidden states and weight are rounded to 8 bits less of, and along which axes that is mended; see ``fp8.py``.

All of it comes from a sample of both. What rounding a hidden state leaves moves all logits of its token: by its product with
the mean column of what the token has below the threshold, the log-sum-exp is off. The mean over all tokens, b, is taken off the
weight. The tokens' own means differ from it along a few axes. Groups of sampled tokens span them:

    y_k = sum_s  mass_ks (weight_s - b)      over the sampled columns s; mass_ks is what group k has below the threshold there

and the axes are the rows y_k, made orthonormal by Gram and Schmidt's process. 32 groups of 8 tokens leave the error that 32
singular vectors of all sampled tokens' means do, within 10 % (two states of training, V 32,768 and 8,192, D 256 and 128; e4m3
in torch on a CPU, 2026-11).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from cce_dist.kernels import Operands
from cce_dist.kernels.blocks import has_tma, kernel, operand, tile_of_logits
from cce_dist.kernels.budget import RANK, cdiv
from cce_dist.kernels.tiles import Tile, interpreted, precision

CENTERING_TOKENS = 256  # tokens that say which columns the tail consists of
# An axis is left out if less than this part of its square is not along the ones before: rounding would turn it.
LEAST_NEW = 1e-2


class Centering(NamedTuple):
    """What the operands are rounded less of, in fp32, and along which axes that is mended.

    Attributes:
        hidden_D: m: each element's median over some hidden states. A few of them that are huge do not move it.
        weight_D: b: the mean row of the weight, by the columns' shares of what these tokens have below the threshold.
        variance_P: In parts: mean square of the rows' distance from b, by the same shares.
        basis_KD: Orthonormal rows, or rows of 0; the hidden states' dtype.
    """

    hidden_D: torch.Tensor
    weight_D: torch.Tensor
    variance_P: torch.Tensor
    basis_KD: torch.Tensor


def find_centering(
    x: Operands, sampled: Operands, order: Sequence[torch.Tensor], bound_N: torch.Tensor, eps: float
) -> Centering:
    """Find what the operands are rounded less of, from some tokens and the sampled columns.

    Anything will do but for the errors, so what is not finite becomes 0.
    """
    logits, hidden_size = x.logits, x.hidden.shape[1]
    size = sampled.weight.shape[0]
    tile = Tile(16, 32, 16, 4, 1) if interpreted() else Tile(128, 64, 64, 4, 3)
    rows_TD, blocks_d = x.hidden.new_empty(CENTERING_TOKENS, hidden_size), cdiv(hidden_size, 32)
    hidden_D, weight_D = bound_N.new_empty(2, hidden_size).unbind()
    mass_KS, variance_P = bound_N.new_empty(RANK, size), bound_N.new_empty(blocks_d)
    span_KD, basis_KD = bound_N.new_empty(RANK, hidden_size), x.hidden.new_empty(RANK, hidden_size)
    _median_kernel[(cdiv(hidden_size, 16),)](
        x.hidden, *order, rows_TD, hidden_D, hidden_size, CENTERING_TOKENS=CENTERING_TOKENS, BLOCK_D=16
    )
    if size:
        tma = has_tma(rows_TD, sampled.weight)
        _tail_masses_kernel[(cdiv(size, tile.cols) * (CENTERING_TOKENS // tile.rows),)](
            operand(rows_TD, tile.rows, tile.inner, tma), operand(sampled.weight, tile.cols, tile.inner, tma), sampled.bias,
            *order, bound_N, mass_KS,
            CENTERING_TOKENS, size, hidden_size, logits.logit_scale, logits.softcap, math.log(eps),
            HAS_BIAS=sampled.bias is not None, HAS_SCALE=logits.logit_scale != 1.0, HAS_SOFTCAP=logits.capped,
            BLOCK_N=tile.rows, BLOCK_V=tile.cols, BLOCK_D=tile.inner, TOKENS=CENTERING_TOKENS // RANK, TMA=tma,
            PRECISION=precision(rows_TD.dtype), num_warps=tile.warps, num_stages=tile.stages,
        )
    _tail_mean_kernel[(blocks_d,)](
        sampled.weight, mass_KS, weight_D, variance_P, span_KD, size, hidden_size, RANK=RANK, BLOCK_S=64, BLOCK_D=32
    )
    _basis_kernel[(cdiv(hidden_size, 64),)](
        span_KD, basis_KD, hidden_size, LEAST_NEW, RANK=RANK, BLOCK_D=64, num_warps=2
    )
    return Centering(hidden_D, weight_D, variance_P, basis_KD)


@kernel("hidden_ptr", "rows_ptr", "hidden_size")
def _median_kernel(
    hidden_ptr,  # in: [N, D]
    index_ptr,  # in: [N] int32
    num_kept_ptr,  # in: [1] int32
    rows_ptr,  # out: [T, D]: hidden states of tokens at equal steps
    median_ptr,  # out: [D] fp32
    hidden_size,
    CENTERING_TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    place = tl.arange(0, CENTERING_TOKENS)
    token = tl.load(index_ptr + place.to(tl.int64) * tl.load(num_kept_ptr) // CENTERING_TOKENS).to(tl.int64)
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
        reached = tl.sum((keys < middle[:, None]).to(tl.int32), 1) <= CENTERING_TOKENS // 2
        least = tl.where(reached, middle, least)
        last = tl.where(reached, last, middle - 1)
    median = (_ordered(least) << 16).to(tl.float32, bitcast=True)
    tl.store(median_ptr + offs_d, tl.where(tl.abs(median) < float("inf"), median, 0.0), mask=in_d)


@triton.jit
def _ordered(bits):
    """Turn the bits of numbers into integers of their order, or back."""
    return tl.where(bits < 0, bits ^ 0x7FFF, bits)


@kernel("hidden", "weight", "bias_ptr", "sums_ptr", "hidden_size")
def _tail_masses_kernel(
    hidden,  # in: [T, D] descriptor or pointer
    weight,  # in: [S, D] descriptor or pointer: the sampled columns
    bias_ptr,  # in: [S]
    index_ptr,  # in: [N] int32
    num_kept_ptr,  # in: [1] int32
    bound_ptr,  # in: [N] fp32
    sums_ptr,  # out: [K, S] fp32: exponentials below the threshold, a row for each group of tokens
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
    TOKENS: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    num_blocks = tl.cdiv(num_rows, BLOCK_N)
    row, col = tl.program_id(0) % num_blocks * BLOCK_N, tl.program_id(0) // num_blocks * BLOCK_V
    z = tile_of_logits(
        hidden, weight, bias_ptr, row, col, num_rows, size, hidden_size, logit_scale, softcap,
        HAS_BIAS, HAS_SCALE, HAS_SOFTCAP, True, BLOCK_N, BLOCK_V, BLOCK_D, TMA, PRECISION,
    )
    place = row + tl.arange(0, BLOCK_N)
    token = tl.load(index_ptr + place.to(tl.int64) * tl.load(num_kept_ptr) // num_rows)
    below = z - tl.load(bound_ptr + token)[:, None]
    mass = tl.where(below < log_eps, tl.exp(below), 0.0)
    groups = tl.sum(tl.reshape(mass, (BLOCK_N // TOKENS, TOKENS, BLOCK_V)), 1)
    offs_k = row // TOKENS + tl.arange(0, BLOCK_N // TOKENS)
    offs_s = col + tl.arange(0, BLOCK_V)
    tl.store(sums_ptr + offs_k[:, None] * size + offs_s[None, :], groups, mask=(offs_s < size)[None, :])


@kernel("weight_ptr", "mass_ptr", "mean_ptr", "hidden_size")
def _tail_mean_kernel(
    weight_ptr,  # in: [S, D]
    mass_ptr,  # in: [K, S] fp32
    mean_ptr,  # out: [D] fp32: the mean row by all masses
    variance_ptr,  # out: [P] fp32: the mean square of the distance from it, of a program's elements
    span_ptr,  # out: [K, D] fp32: sums of rows less the mean, by each group's masses, relative to the sum of all masses
    size,
    hidden_size,
    RANK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    offs_k = tl.arange(0, RANK)
    offs_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_d = offs_d < hidden_size
    total = tl.zeros((BLOCK_S,), tl.float32)
    mean = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
    square = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
    span = tl.zeros((RANK, BLOCK_D), tl.float32)
    of_group = tl.zeros((RANK, BLOCK_S), tl.float32)
    for first in range(0, size, BLOCK_S):
        offs_s = first + tl.arange(0, BLOCK_S)
        mass = tl.load(mass_ptr + offs_k[:, None] * size + offs_s[None, :], mask=(offs_s < size)[None, :], other=0)
        mass = tl.where(mass < float("inf"), mass, 0.0)
        share = tl.sum(mass, 0)
        where = weight_ptr + offs_s[:, None] * hidden_size + offs_d[None, :]
        w = tl.load(where, mask=(share > 0)[:, None] & in_d[None, :], other=0)
        mass = mass.to(w.dtype)  # anything will do, but the same in both sums
        span = tl.dot(mass, w, span)
        of_group += mass.to(tl.float32)
        w = w.to(tl.float32)
        total += share
        mean += share[:, None] * w
        square += share[:, None] * w * w
    per_share = 1 / tl.maximum(tl.sum(total, 0), 1e-30)
    mean = tl.sum(mean, 0) * per_share
    mean = tl.where(tl.abs(mean) < float("inf"), mean, 0.0)
    tl.store(mean_ptr + offs_d, mean, mask=in_d)
    tl.store(variance_ptr + tl.program_id(0), tl.sum(tl.sum(square, 0) * per_share - mean * mean, 0))
    span = (span - tl.sum(of_group, 1)[:, None] * mean[None, :]) * per_share
    span = tl.where(tl.abs(span) < float("inf"), span, 0.0)
    tl.store(span_ptr + offs_k[:, None] * hidden_size + offs_d[None, :], span, mask=in_d[None, :])


@kernel("span_ptr", "basis_ptr", "hidden_size")
def _basis_kernel(
    span_ptr,  # in: [K, D] fp32
    basis_ptr,  # out: [K, D]: orthonormal rows of the same span, or rows of 0
    hidden_size,
    least_new,
    RANK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # Each program has the products of all rows with one another, and makes its own columns of the result. Two warps and 64
    # columns take 88 us with D 4,096; one or four warps, 32 or 128 columns 95 to 130 (H200, 2026-11).
    offs_k = tl.arange(0, RANK)
    products = tl.zeros((RANK, RANK), tl.float32)
    for first in range(0, hidden_size, BLOCK_D):
        offs_d = first + tl.arange(0, BLOCK_D)
        where = span_ptr + offs_k[:, None] * hidden_size + offs_d[None, :]
        rows = tl.load(where, mask=(offs_d < hidden_size)[None, :], other=0)
        products = tl.dot(rows, tl.trans(rows), products, input_precision="tf32x3")
    same = offs_k[:, None] == offs_k[None, :]
    square = tl.sum(tl.where(same, products, 0.0), 1)
    # Row k becomes what makes the k-th axis of the rows; products keep what is left of the rows from k on.
    makes = same.to(tl.float32)
    for k in range(0, RANK):
        here = offs_k == k
        left = tl.sum(tl.where(here[:, None], products, 0.0), 0)
        along = tl.sum(tl.where(here, left, 0.0), 0)
        is_new = along > least_new * tl.sum(tl.where(here, square, 0.0), 0)
        left = tl.where(is_new, left, 0.0)
        per_length = tl.where(is_new, tl.rsqrt(tl.where(is_new, along, 1.0)), 0.0)
        axis = tl.sum(tl.where(here[:, None], makes, 0.0), 0) * per_length
        share = tl.where(offs_k > k, left * per_length, 0.0)
        products -= share[:, None] * (left * per_length)[None, :]
        makes = tl.where(here[:, None], axis[None, :], makes - share[:, None] * axis[None, :])
    offs_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_d = (offs_d < hidden_size)[None, :]
    where = offs_k[:, None] * hidden_size + offs_d[None, :]
    axes = tl.dot(makes, tl.load(span_ptr + where, mask=in_d, other=0), input_precision="tf32x3")
    tl.store(basis_ptr + where, axes.to(basis_ptr.dtype.element_ty), mask=in_d)
