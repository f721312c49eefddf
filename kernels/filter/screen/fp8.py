"""Rows of a matrix in 8 bits, less a vector that they share, with what it takes to read logits off their products.

    hidden_i . weight_j  =  (hidden_i - m) . (weight_j - b)  +  hidden_i . b  +  (weight_j - b) . m

The first product is the one that costs, and its operands are rounded to e4m3. The other two are a number for each row in fp32.
A trained weight's rows share a direction, and so do hidden states: what rounding leaves along it would move a whole row of
logits. So m is a middle of the hidden states, and b a mean of the weight's rows in which the softmax's tail counts most.

A hidden state has a scale of its own, all rows of the weight have one: an element of usual size becomes ``USUAL``. A row with
an element that is too large for it is marked for all tokens.

Rounding to e4m3 moves an element by 2.65 % (rms) whatever its size, so the product's standard error is near

    sqrt(2) * 0.0265 * |hidden_i - m| |weight_j - b| / sqrt(D)

Hopper adds products up with fewer bits than fp32 has: an error of 3.5 % of that with D 4,096 (H200, 2026-11).

The errors of a hidden state's elements are the same in all of its logits: they average out over elements, not over columns. So
what they leave along the axes of ``centering.py`` is kept beside them, and the product has one column more for each axis:

    (hidden_i - m) . (weight_j - b)  ~  code_i . code_j  +  sum_k (hidden_i - m - code_i) . axis_k  (weight_j - b) . axis_k

These columns are in units of the rows' codes and in 8 bits too, enough for what is left of 2.65 %. A hidden state's are small
in these units and the weight's large, so a factor ``EVEN`` goes from one side to the other.

A hidden state of which one element has more than half the square cannot be rounded, nor one whose logits would have a standard
error above ``MOST_ERROR``. Such a row gets an infinite length and codes of 0, and its token is computed in 16 bits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from cce_dist.kernels import Operands
from cce_dist.kernels.blocks import kernel
from cce_dist.kernels.budget import RANK, cdiv, rounded_size
from cce_dist.kernels.filter.screen.centering import Centering
from cce_dist.kernels.tiles import MAX_SIDE, Tile, interpreted

ERROR = 2**0.5 * 0.0265
MOST_ERROR = 0.25  # nats; with the default eps that is an error of 4e-3 of the log-sum-exp at most
MOST = tl.constexpr(448.0)  # the largest number of e4m3
USUAL = tl.constexpr(4.0)
LOG2_E = tl.constexpr(math.log2(math.e))
FARTHEST = tl.constexpr(100.0)  # powers of 2 from the bound down to a token's number
LEAST = tl.constexpr(1e-30)  # rows whose elements are all smaller count as zeros
DTYPE = torch.float8_e4m3fn
# Of the products with the axes. A weight of 128,256 x 4,096 takes 0.70 ms, one of 256,000 x 2,304 0.92; with seven others
# 0.77 to 1.54 and 0.97 to 1.85 (H200, 2026-11).
TILE = Tile(64, RANK, 128, 4, 3)
EVEN = tl.constexpr(8.0)
PACKED = tl.constexpr(8)  # neighbours in a row that a thread has


class Rounded(NamedTuple):
    """Rows in 8 bits.

    Attributes:
        codes: [R, D + RANK or more] e4m3; what belongs to the axes from column D on, then zeros.
        numbers_KR: [K, R] fp32. Of the weight the row's number of the sum above, bias counted, and its length less the shared
            vector; -inf and 0 of a column that takes no part. Of hidden states the scale of the product, the number less the
            bound, the length, the bound. Without a softcap scales and numbers are those of logits to base 2; with one they are
            those of logits before it, and the bound is not taken off.
    """

    codes: torch.Tensor
    numbers_KR: torch.Tensor


def new_rounded(num_rows: int, hidden_size: int, inner: int, num_numbers: int, device: torch.device) -> Rounded:
    """Return memory for rows, ``inner`` of whose columns are worked on at a time."""
    codes = torch.empty(num_rows, rounded_size(hidden_size, inner), dtype=DTYPE, device=device)
    return Rounded(codes, torch.empty(num_numbers, num_rows, dtype=torch.float32, device=device))


def some_of(rounded: Rounded, num_rows: int) -> Rounded:
    """Return the memory of the first rows."""
    count = rounded.numbers_KR.shape[0]
    return Rounded(rounded.codes[:num_rows], rounded.numbers_KR.view(-1)[: count * num_rows].view(count, num_rows))


def round_hidden(
    x: Operands,
    index_R: torch.Tensor,
    num_kept: torch.Tensor,
    bound_N: torch.Tensor,
    centering: Centering,
    out: Rounded,
) -> None:
    """Gather and round a group's hidden states; rows past ``num_kept`` in the last live tile are 0."""
    _launch(x, (index_R, num_kept, bound_N), None, centering, out, 0, index_R.shape[0])


def round_weight(x: Operands, slot_V: torch.Tensor, centering: Centering, out: Rounded, first: int) -> None:
    """Round rows of the weight from ``first`` on. Frequent columns and padding take no part."""
    _launch(x, None, slot_V, centering, out, first, x.logits.num_valid)


def _launch(
    x: Operands, group: tuple[torch.Tensor, ...] | None, slot_V: torch.Tensor | None, centering: Centering, out: Rounded,
    first: int, last: int,
) -> None:
    num_rows, num_inner = out.codes.shape
    hidden_size, scale, softcap = x.hidden.shape[1], x.logits.logit_scale, x.logits.softcap > 0.0
    index_R, num_kept, bound_N = group or (None, None, None)
    is_hidden = group is not None
    means = (centering.hidden_D, centering.weight_D) if is_hidden else (centering.weight_D, centering.hidden_D)
    tile = Tile(16, RANK, 128, 4, 1) if interpreted() else TILE
    assert num_inner <= hidden_size + RANK + tile.inner  # what is beyond them is set to 0 at once
    _round_rows_kernel[(cdiv(num_rows, tile.rows),)](
        x.hidden if is_hidden else x.weight, index_R, num_kept, bound_N, None if is_hidden else x.bias, slot_V, *means,
        centering.variance_P, centering.basis_KD,
        out.codes, out.numbers_KR,
        num_rows, hidden_size, num_inner, first, last, centering.variance_P.shape[0],
        scale if softcap else scale * math.log2(math.e), (scale * ERROR / MOST_ERROR) ** 2 / hidden_size,
        HAS_INDEX=is_hidden, HAS_BIAS=x.bias is not None and not is_hidden, HAS_SOFTCAP=softcap, INTERPRETED=interpreted(),
        MAX_SIDE=MAX_SIDE, RANK=tile.cols, BLOCK_N=tile.rows, BLOCK_D=tile.inner, STAGES=tile.stages, num_warps=tile.warps,
    )


@kernel("rows_ptr", "basis_ptr", "codes_ptr", "hidden_size", "num_inner")
def _round_rows_kernel(
    rows_ptr,  # in: [N or V, D]
    index_ptr,  # in: [R] int32
    num_kept_ptr,  # in: [1] int32; with HAS_INDEX
    bound_ptr,  # in: [N] fp32; with HAS_INDEX
    bias_ptr,  # in: [V]
    slot_ptr,  # in: [V] int32; without HAS_INDEX
    mean_ptr,  # in: [D] fp32
    beside_ptr,  # in: [D] fp32
    variance_ptr,  # in: [P] fp32
    basis_ptr,  # in: [K, D]
    codes_ptr,  # out: [R, D + K or more] e4m3
    numbers_ptr,  # out: [4, R] fp32; without HAS_INDEX [2, R]
    num_rows,
    hidden_size,
    num_inner,
    first_row,
    last_row,
    num_variance,
    unit,
    per_square,
    HAS_INDEX: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    INTERPRETED: tl.constexpr,
    MAX_SIDE: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = place < num_rows
    if HAS_INDEX:
        num_live = tl.load(num_kept_ptr)
        if tl.program_id(0) * BLOCK_N >= tl.maximum(tl.cdiv(num_live, MAX_SIDE), 1) * MAX_SIDE:
            return
        live = in_n & (place < num_live)
        row = tl.load(index_ptr + place, mask=live, other=0)
    else:
        row = first_row + place
        live = in_n & (row < last_row)
        live &= tl.load(slot_ptr + row, mask=live, other=0) == 0
    variance = sum_of_parts(variance_ptr, num_variance)
    usual = tl.maximum(tl.sqrt(variance / hidden_size), LEAST) * (1 / USUAL)
    rows_ptr += row.to(tl.int64)[:, None] * hidden_size
    codes_ptr += place.to(tl.int64)[:, None] * num_inner
    numbers_ptr += place
    plane = num_rows.to(tl.int64)

    # Sums of a thread's own elements; those of a row come last.
    number = tl.zeros((BLOCK_N, BLOCK_D // PACKED), tl.float32)
    square = tl.zeros((BLOCK_N, BLOCK_D // PACKED), tl.float32)
    most = tl.zeros((BLOCK_N, BLOCK_D // PACKED), tl.int32)
    along = tl.zeros((BLOCK_N, RANK), tl.float32)
    for inner in tl.range(0, hidden_size, BLOCK_D, num_stages=STAGES):
        offs_d = inner + tl.arange(0, BLOCK_D)
        in_d = offs_d < hidden_size
        whole, centered = _centered(rows_ptr, mean_ptr, live, offs_d, in_d)  # pyright: ignore[reportGeneralTypeIssues]
        beside = tl.load(beside_ptr + offs_d, mask=in_d, other=0)
        number += tl.sum(_packed((whole if HAS_INDEX else centered) * beside[None, :]), 2)
        square += tl.sum(_packed(centered * centered), 2)
        # Numbers without their signs are in the order of their bits, and NaN is above them all.
        most = tl.maximum(most, tl.max(_packed(centered.to(tl.int32, bitcast=True) & 0x7FFFFFFF), 2))
        if not HAS_INDEX:
            centered *= 1 / usual
            _codes_at(codes_ptr + offs_d[None, :], centered, in_n[:, None] & in_d[None, :], INTERPRETED)
            along = _add_along(along, centered, basis_ptr, offs_d, hidden_size, RANK)
    number = tl.sum(number, 1)
    # The square of a column's length may overflow: then all tokens have it marked.
    square = tl.sum(square, 1)
    length = tl.sqrt(square)
    most = tl.max(most, 1).to(tl.float32, bitcast=True)
    most = tl.where(most == most, most, float("inf"))
    if HAS_BIAS:
        number += tl.load(bias_ptr + row, mask=live, other=0).to(tl.float32)
    number *= unit
    if HAS_INDEX:
        most = tl.maximum(most, LEAST)
        scale = most / MOST
        bound = tl.load(bound_ptr + row, mask=live, other=0)
        if not HAS_SOFTCAP:
            number -= bound * LOG2_E
        # NaN makes this false.
        fits = (square * per_square * variance < 1.0) & ((square >= 2.0 * most * most) | (square < LEAST))
        fits &= tl.abs(bound) < float("inf")
        if not HAS_SOFTCAP:
            fits &= (number > -FARTHEST) & (number < FARTHEST / 4)
        tl.store(numbers_ptr, tl.where(fits, scale * usual * unit, 0.0), mask=in_n)
        number = tl.where(fits, number, 0.0)
        tl.store(numbers_ptr + plane, tl.where(live, number, float("-inf")), mask=in_n)
        tl.store(numbers_ptr + 2 * plane, tl.where(fits | (live == 0), length, float("inf")), mask=in_n)
        tl.store(numbers_ptr + 3 * plane, bound, mask=in_n)
        per_scale = (1 / scale)[:, None]
        for inner in tl.range(0, hidden_size, BLOCK_D, num_stages=STAGES):
            offs_d = inner + tl.arange(0, BLOCK_D)
            in_d = offs_d < hidden_size
            _, centered = _centered(rows_ptr, mean_ptr, live & fits, offs_d, in_d)  # pyright: ignore[reportGeneralTypeIssues]
            centered *= per_scale
            codes = _codes_at(codes_ptr + offs_d[None, :], centered, in_n[:, None] & in_d[None, :], INTERPRETED)
            along = _add_along(along, centered - codes.to(tl.float32), basis_ptr, offs_d, hidden_size, RANK)
    else:
        length = tl.where(most <= usual * MOST, length, float("inf"))
        tl.store(numbers_ptr, tl.where(live, number, float("-inf")), mask=in_n)
        tl.store(numbers_ptr + plane, tl.where(live, length, 0.0), mask=in_n)
    # A column whose products are not finite has an infinite length, so that all tokens have it marked.
    along = tl.where(tl.abs(along) < float("inf"), along, 0.0)
    codes_ptr += hidden_size
    along *= EVEN if HAS_INDEX else 1 / EVEN
    _codes_at(codes_ptr + tl.arange(0, RANK)[None, :], along, in_n[:, None], INTERPRETED)
    offs_d = RANK + tl.arange(0, BLOCK_D)
    nothing = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    _codes_at(
        codes_ptr + offs_d[None, :], nothing, in_n[:, None] & (offs_d < num_inner - hidden_size)[None, :], INTERPRETED
    )


@triton.jit
def _centered(rows_ptr, mean_ptr, live, offs_d, in_d):
    """Return some columns of rows, and those less their mean; 0 of rows that take no part; fp32."""
    rows = tl.load(rows_ptr + offs_d[None, :], mask=live[:, None] & in_d[None, :], other=0).to(tl.float32)
    mean = tl.load(mean_ptr + offs_d, mask=in_d, other=0)
    return rows, tl.where(live[:, None], rows - mean[None, :], 0.0)


@triton.jit
def _packed(rows):
    return tl.reshape(rows, (rows.shape[0], rows.shape[1] // PACKED, PACKED))


@triton.jit
def _add_along(along, rows, basis_ptr, offs_d, hidden_size, RANK: tl.constexpr):
    """Add the products of some columns of rows with the axes."""
    where = basis_ptr + tl.arange(0, RANK)[None, :] * hidden_size + offs_d[:, None]
    axes = tl.load(where, mask=(offs_d < hidden_size)[:, None], other=0)
    return tl.dot(rows.to(axes.dtype), axes, along)


@triton.jit
def _codes_at(where, numbers, mask, INTERPRETED: tl.constexpr):
    """Round to e4m3, store that, and return it."""
    numbers = tl.minimum(tl.maximum(numbers, -MOST), MOST)
    if INTERPRETED:
        # The interpreter loses a carry from the mantissa to the exponent: round to 3 bits first.
        bits = numbers.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
        numbers = bits.to(tl.float32, bitcast=True)
    codes = numbers.to(where.dtype.element_ty)
    tl.store(where, codes, mask=mask)
    return codes


@triton.jit
def sum_of_parts(parts_ptr, num_parts):
    """Add a few numbers up; fp32."""
    total = tl.zeros((128,), tl.float32)
    for first in range(0, num_parts, 128):
        offs = first + tl.arange(0, 128)
        total += tl.load(parts_ptr + offs, mask=offs < num_parts, other=0)
    return tl.sum(total, 0)
