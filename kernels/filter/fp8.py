"""Rows of a matrix in 8 bits, less a vector that they share, with what it takes to read logits off their products.

    hidden_i . weight_j  =  (hidden_i - m) . (weight_j - b)  +  hidden_i . b  +  (weight_j - b) . m

The first product is the one that costs, and its operands are rounded to e4m3 with a scale for each row. The other two are a
number for each row in fp32, whatever m and b are. A trained weight's rows share a direction, and so do hidden states: what
rounding leaves along it would move a whole row of logits. So m is the mean hidden state, and b a mean of the weight's rows in
which the columns of the softmax's tail count most.

Rounding to e4m3 moves an element by 2.65 % (rms) whatever its size, so the product's standard error is near

    sqrt(2) * 0.0265 * |hidden_i - m| |weight_j - b| / sqrt(D)

``size`` is these lengths; ``ERROR`` is the factor before them but for the root of D.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from cce_dist.kernels.blocks import kernel
from cce_dist.kernels.budget import cdiv
from cce_dist.kernels.tiles import MAX_SIDE, interpreted

ERROR = 2**0.5 * 0.0265
MOST = tl.constexpr(448.0)  # the largest number of e4m3
LEAST = tl.constexpr(1e-30)  # rows whose elements are all smaller count as zeros
DTYPE = torch.float8_e4m3fn


class Rounded(NamedTuple):
    """Rows in 8 bits.

    Attributes:
        codes: [R, D or more] e4m3; zeros from column D on.
        numbers_3R: [3, R] fp32: the scale of the codes; the row's number of the sum above, bias counted; its length less the
            shared vector, -1 for a column that takes no part.
    """

    codes: torch.Tensor
    numbers_3R: torch.Tensor


def new_rounded(num_rows: int, hidden_size: int, inner: int, device: torch.device) -> Rounded:
    """Return room for rows, ``inner`` of whose columns are worked on at a time."""
    codes = torch.empty(num_rows, cdiv(hidden_size, inner) * inner, dtype=DTYPE, device=device)
    return Rounded(codes, torch.empty(3, num_rows, dtype=torch.float32, device=device))


def round_hidden(
    hidden_ND: torch.Tensor, index_R: torch.Tensor, num_kept: torch.Tensor, mean_D: torch.Tensor, beside_D: torch.Tensor,
    out: Rounded,
) -> None:  # fmt: skip
    """Gather and round a group's hidden states, less ``mean_D``; rows past ``num_kept`` in the last live tile are 0.

    The row's number is that of the whole hidden state and ``beside_D``.
    """
    _launch(hidden_ND, index_R, num_kept, None, None, mean_D, beside_D, out, 0, index_R.shape[0])


def round_weight(
    weight_VD: torch.Tensor, bias_V: torch.Tensor | None, slot_V: torch.Tensor, mean_D: torch.Tensor, beside_D: torch.Tensor,
    out: Rounded, first: int, num_valid: int,
) -> None:  # fmt: skip
    """Round rows of the weight from ``first`` on, less ``mean_D``. Hot columns and padding take no part.

    The row's number is that of the weight's row less ``mean_D`` and ``beside_D``.
    """
    _launch(weight_VD, None, None, bias_V, slot_V, mean_D, beside_D, out, first, num_valid)


def _launch(rows_RD, index_R, num_kept, bias_R, slot_R, mean_D, beside_D, out: Rounded, first: int, last: int) -> None:
    num_rows, num_inner = out.codes.shape
    _round_rows_kernel[(cdiv(num_rows, 4),)](
        rows_RD, index_R, num_kept, bias_R, slot_R, mean_D, beside_D,
        out.codes, out.numbers_3R,
        num_rows, rows_RD.shape[1], num_inner, first, last,
        HAS_INDEX=index_R is not None, HAS_BIAS=bias_R is not None, INTERPRETED=interpreted(), MAX_SIDE=MAX_SIDE,
        BLOCK_R=4, BLOCK_D=1024, num_warps=4,
    )  # fmt: skip


@kernel("rows_ptr", "codes_ptr", "hidden_size", "num_inner")
def _round_rows_kernel(
    rows_ptr,  # in: [N or V, D]
    index_ptr,  # in: [R] int32
    num_kept_ptr,  # in: [1] int32; with HAS_INDEX
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
    HAS_INDEX: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    MAX_SIDE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    if HAS_INDEX:
        num_kept = tl.load(num_kept_ptr)
        if tl.program_id(0) * BLOCK_R >= tl.maximum(tl.cdiv(num_kept, MAX_SIDE), 1) * MAX_SIDE:
            return
    offs_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    in_r = offs_r < num_rows
    if HAS_INDEX:
        live = in_r & (offs_r < num_kept)
        row = tl.load(index_ptr + offs_r, mask=live, other=0)
    else:
        row = first_row + offs_r
        live = in_r & (row < last_row)
        live &= tl.load(slot_ptr + row, mask=live, other=0) == 0
    rows_ptr += row.to(tl.int64)[:, None] * hidden_size

    most = tl.zeros((BLOCK_R,), tl.float32)
    number = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    square = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for inner in range(0, hidden_size, BLOCK_D):
        offs_d = inner + tl.arange(0, BLOCK_D)
        in_d = offs_d < hidden_size
        whole = tl.load(rows_ptr + offs_d[None, :], mask=live[:, None] & in_d[None, :], other=0).to(tl.float32)
        beside = tl.load(beside_ptr + offs_d, mask=in_d, other=0)[None, :]
        away = tl.where(live[:, None], whole - tl.load(mean_ptr + offs_d, mask=in_d, other=0)[None, :], 0.0)
        number += (whole if HAS_INDEX else away) * beside
        square += away * away
        most = tl.maximum(most, tl.max(tl.abs(away), 1), propagate_nan=tl.PropagateNan.ALL)
    number = tl.sum(number, 1)
    if HAS_BIAS:
        number += tl.load(bias_ptr + row, mask=live, other=0).to(tl.float32)
    # The square of a length may overflow: then everything is marked.
    size = tl.where(live, tl.sqrt(tl.sum(square, 1)), -1.0)
    most = tl.maximum(most, LEAST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(numbers_ptr + offs_r, tl.where(live, most / MOST, 0.0), mask=in_r)
    tl.store(numbers_ptr + num_rows.to(tl.int64) + offs_r, tl.where(live, number, 0.0), mask=in_r)
    tl.store(numbers_ptr + 2 * num_rows.to(tl.int64) + offs_r, size, mask=in_r)

    codes_ptr += offs_r.to(tl.int64)[:, None] * num_inner
    per_scale = MOST / most
    for inner in range(0, num_inner, BLOCK_D):
        offs_d = inner + tl.arange(0, BLOCK_D)
        in_d = offs_d < hidden_size
        read = live[:, None] & in_d[None, :]
        whole = tl.load(rows_ptr + offs_d[None, :], mask=read, other=0).to(tl.float32)
        away = whole - tl.load(mean_ptr + offs_d, mask=in_d, other=0)[None, :]
        scaled = tl.where(read, away * per_scale[:, None], 0.0)
        if INTERPRETED:
            # The interpreter loses a carry from the mantissa to the exponent: round to 3 bits first.
            bits = scaled.to(tl.int32, bitcast=True)
            bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
            scaled = bits.to(tl.float32, bitcast=True)
        mask = in_r[:, None] & (offs_d < num_inner)[None, :]
        tl.store(codes_ptr + offs_d[None, :], scaled.to(codes_ptr.dtype.element_ty), mask=mask)
