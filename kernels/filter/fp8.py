"""Rows of a matrix in 8 bits, less a vector that they share, with what it takes to read logits off their products.

    hidden_i . weight_j  =  (hidden_i - m) . (weight_j - b)  +  hidden_i . b  +  (weight_j - b) . m

The first product is the one that costs, and its operands are rounded to e4m3 with a scale for each row. The other two are a
number for each row in fp32, whatever m and b are. A trained weight's rows share a direction, and so do hidden states: what
rounding leaves along it would move a whole row of logits. So m is a mean hidden state, and b a mean of the weight's rows in
which the columns of the softmax's tail count most.

Rounding to e4m3 moves an element by 2.65 % (rms) whatever its size, so the product's standard error is near

    sqrt(2) * 0.0265 * |hidden_i - m| |weight_j - b| / sqrt(D)

``ERROR`` is the factor before these lengths but for the root of D.

The errors of a hidden state's elements are the same in all of its logits: they average out over many elements, not over
columns. So a hidden state of which one element has more than half the square cannot be rounded, nor one whose logits would have
a standard error above ``MOST_ERROR``. Such a row gets an infinite length and codes of 0, and its token is computed in 16 bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from cce_dist.kernels.blocks import kernel
from cce_dist.kernels.budget import cdiv
from cce_dist.kernels.tiles import MAX_SIDE, interpreted, num_programs

ERROR = 2**0.5 * 0.0265
MOST_ERROR = 0.25  # nats; with the default eps that is an error of 4e-3 of the log-sum-exp at most
MOST = tl.constexpr(448.0)  # the largest number of e4m3
LEAST = tl.constexpr(1e-30)  # rows whose elements are all smaller count as zeros
DTYPE = torch.float8_e4m3fn
# Elements of a row. A weight of 128,256 x 4,096 takes 0.54 ms with 32, 0.61 with 16 and 0.56 with 64 (H200, 2026-11).
PER_THREAD = 32


class Rounded(NamedTuple):
    """Rows in 8 bits.

    Attributes:
        codes: [R, D or more] e4m3; zeros from column D on.
        numbers_3R: [3, R] fp32: the scale of the codes; the row's number of the sum above, bias counted; its length less the
            shared vector, -1 for a column that takes no part, infinite for a hidden state that cannot be rounded.
    """

    codes: torch.Tensor
    numbers_3R: torch.Tensor


def new_rounded(num_rows: int, hidden_size: int, inner: int, device: torch.device) -> Rounded:
    """Return room for rows, ``inner`` of whose columns are worked on at a time."""
    codes = torch.empty(num_rows, cdiv(hidden_size, inner) * inner, dtype=DTYPE, device=device)
    return Rounded(codes, torch.empty(3, num_rows, dtype=torch.float32, device=device))


def round_hidden(
    hidden_ND: torch.Tensor, index_R: torch.Tensor, num_kept: torch.Tensor, mean_D: torch.Tensor, beside_D: torch.Tensor,
    spread_P: torch.Tensor, logit_scale: float, out: Rounded,
) -> None:  # fmt: skip
    """Gather and round a group's hidden states, less ``mean_D``; rows past ``num_kept`` in the last live tile are 0.

    The row's number is that of the whole hidden state and ``beside_D``. The standard error of its logits is that of columns
    whose mean square is the sum of ``spread_P``.
    """
    group = index_R, num_kept, spread_P
    _launch(hidden_ND, group, None, None, mean_D, beside_D, out, 0, index_R.shape[0], logit_scale)


def round_weight(
    weight_VD: torch.Tensor, bias_V: torch.Tensor | None, slot_V: torch.Tensor, mean_D: torch.Tensor, beside_D: torch.Tensor,
    out: Rounded, first: int, num_valid: int,
) -> None:  # fmt: skip
    """Round rows of the weight from ``first`` on, less ``mean_D``. Hot columns and padding take no part.

    The row's number is that of the weight's row less ``mean_D`` and ``beside_D``.
    """
    _launch(weight_VD, None, bias_V, slot_V, mean_D, beside_D, out, first, num_valid)


def _launch(
    rows_RD: torch.Tensor, group: tuple[torch.Tensor, ...] | None, bias_R: torch.Tensor | None, slot_R: torch.Tensor | None,
    mean_D: torch.Tensor, beside_D: torch.Tensor, out: Rounded, first: int, last: int, logit_scale: float = 1.0,
) -> None:  # fmt: skip
    index_R, num_kept, spread_P = (None, None, None) if group is None else group
    num_rows, num_inner = out.codes.shape
    block = max(128, 1 << (num_inner - 1).bit_length())
    warps = min(16, max(1, block // (32 * PER_THREAD)))
    at_once = num_programs(rows_RD.device) * (1 if interpreted() else max(1, 32 // warps))
    _round_rows_kernel[(min(num_rows, at_once),)](
        rows_RD, index_R, num_kept, spread_P, bias_R, slot_R, mean_D, beside_D,
        out.codes, out.numbers_3R,
        num_rows, rows_RD.shape[1], num_inner, first, last, 0 if spread_P is None else spread_P.shape[0],
        (logit_scale * ERROR / MOST_ERROR) ** 2 / rows_RD.shape[1],
        HAS_INDEX=index_R is not None, HAS_BIAS=bias_R is not None, INTERPRETED=interpreted(), MAX_SIDE=MAX_SIDE,
        BLOCK_D=block, num_warps=warps,
    )  # fmt: skip


@kernel("rows_ptr", "codes_ptr", "hidden_size", "num_inner")
def _round_rows_kernel(
    rows_ptr,  # in: [N or V, D]
    index_ptr,  # in: [R] int32
    num_kept_ptr,  # in: [1] int32; with HAS_INDEX
    spread_ptr,  # in: [P] fp32; with HAS_INDEX
    bias_ptr,  # in: [V]
    slot_ptr,  # in: [V] int32; without HAS_INDEX
    mean_ptr,  # in: [D] fp32
    beside_ptr,  # in: [D] fp32
    codes_ptr,  # out: [R, D or more] e4m3
    numbers_ptr,  # out: [3, R] fp32
    num_rows,
    hidden_size,
    num_inner,
    first_row,
    last_row,
    num_spread,
    per_square,
    HAS_INDEX: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    MAX_SIDE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # A program keeps the two vectors in registers and goes through many rows. It reads each once, while it works on the one
    # before.
    offs_d = tl.arange(0, BLOCK_D)
    in_d = offs_d < hidden_size
    mean = tl.load(mean_ptr + offs_d, mask=in_d, other=0)
    beside = tl.load(beside_ptr + offs_d, mask=in_d, other=0)
    stop = num_rows
    num_live = num_rows
    if HAS_INDEX:
        num_live = tl.load(num_kept_ptr)
        stop = tl.minimum(num_rows, tl.maximum(tl.cdiv(num_live, MAX_SIDE), 1) * MAX_SIDE)
        per_square *= sum_of_parts(spread_ptr, num_spread)
    place = tl.program_id(0)
    row, live = _row_at(  # pyright: ignore[reportGeneralTypeIssues]
        place, index_ptr, slot_ptr, stop, num_live, first_row, last_row, HAS_INDEX
    )
    ahead = tl.load(rows_ptr + row.to(tl.int64) * hidden_size + offs_d, mask=in_d & live, other=0)
    while place < stop:
        here, here_live, whole = row, live, ahead.to(tl.float32)
        following = place + tl.num_programs(0)
        row, live = _row_at(following, index_ptr, slot_ptr, stop, num_live, first_row, last_row, HAS_INDEX)
        ahead = tl.load(rows_ptr + row.to(tl.int64) * hidden_size + offs_d, mask=in_d & live, other=0)

        away = tl.where(here_live, whole - mean, 0.0)
        # NaN counts as infinite here.
        far = tl.where(away == away, tl.abs(away), float("inf"))
        sums = ((whole if HAS_INDEX else away) * beside, away * away, far)
        number, square, most = tl.reduce(sums, 0, _add_add_most)
        if HAS_BIAS:
            number += tl.load(bias_ptr + here, mask=here_live, other=0).to(tl.float32)
        most = tl.maximum(most, LEAST)
        # The square of a column's length may overflow: then all tokens have it marked.
        length = tl.sqrt(square)
        if HAS_INDEX:
            # NaN makes this false.
            fits = (square * per_square < 1.0) & ((square >= 2.0 * most * most) | (square < LEAST))
            length = tl.where(fits, length, float("inf"))
            number = tl.where(fits, number, 0.0)
            away = tl.where(fits, away, 0.0)
        tl.store(numbers_ptr + place, tl.where(here_live, most / MOST, 0.0))
        tl.store(numbers_ptr + num_rows.to(tl.int64) + place, tl.where(here_live, number, 0.0))
        tl.store(numbers_ptr + 2 * num_rows.to(tl.int64) + place, tl.where(here_live, length, -1.0))

        codes = away * (MOST / most)
        if INTERPRETED:
            # The interpreter loses a carry from the mantissa to the exponent: round to 3 bits first.
            bits = codes.to(tl.int32, bitcast=True)
            bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
            codes = bits.to(tl.float32, bitcast=True)
        where = codes_ptr + place * num_inner.to(tl.int64) + offs_d
        tl.store(where, codes.to(codes_ptr.dtype.element_ty), mask=offs_d < num_inner)
        place = following


@triton.jit
def sum_of_parts(parts_ptr, num_parts):
    """Add a few numbers up; fp32."""
    total = tl.zeros((128,), tl.float32)
    for first in range(0, num_parts, 128):
        offs = first + tl.arange(0, 128)
        total += tl.load(parts_ptr + offs, mask=offs < num_parts, other=0)
    return tl.sum(total, 0)


@triton.jit
def _row_at(place, index_ptr, slot_ptr, stop, num_live, first_row, last_row, HAS_INDEX: tl.constexpr):
    """Return the row at a place, and whether it takes part."""
    if HAS_INDEX:
        live = (place < stop) & (place < num_live)
        row = tl.load(index_ptr + place, mask=live, other=0)
    else:
        row = first_row + place
        live = (place < stop) & (row < last_row)
        live &= tl.load(slot_ptr + row, mask=live, other=0) == 0
    return row, live


@triton.jit
def _add_add_most(a, b, most, other_a, other_b, other_most):
    return a + other_a, b + other_b, tl.maximum(most, other_most)
