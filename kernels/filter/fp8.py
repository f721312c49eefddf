"""Rows of a matrix in 8 bits, less a vector that they share, with what it takes to read logits off their products.

    hidden_i . weight_j  =  (hidden_i - m) . (weight_j - b)  +  hidden_i . b  +  (weight_j - b) . m

The first product is the one that costs, and its operands are rounded to e4m3. The other two are a number for each row in fp32,
whatever m and b are. A trained weight's rows share a direction, and so do hidden states: what rounding leaves along it would
move a whole row of logits. So m is a middle of the hidden states, and b a mean of the weight's rows in which the columns of the
softmax's tail count most.

A hidden state has a scale of its own, all rows of the weight have one: an element of usual size becomes ``USUAL``, a tenth of
the largest number and 256 times the smallest that has all its bits. A row with an element that is too large for it is marked
for all tokens.

Rounding to e4m3 moves an element by 2.65 % (rms) whatever its size, so the product's standard error is near

    sqrt(2) * 0.0265 * |hidden_i - m| |weight_j - b| / sqrt(D)

``ERROR`` is the factor before these lengths but for the root of D. Hopper adds products up with fewer bits than fp32 has. That
error is 3.5 % of the one above with D 4,096 (H200, 2026-11), where the two vectors leave no direction that all rows share.

The errors of a hidden state's elements are the same in all of its logits: they average out over many elements, not over
columns. So a hidden state of which one element has more than half the square cannot be rounded, nor one whose logits would have
a standard error above ``MOST_ERROR``. Such a row gets an infinite length and codes of 0, and its token is computed in 16 bits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from cce_dist.kernels import Operands
from cce_dist.kernels.blocks import kernel
from cce_dist.kernels.budget import cdiv
from cce_dist.kernels.filter.middle import Middle
from cce_dist.kernels.tiles import MAX_SIDE, interpreted, num_programs

ERROR = 2**0.5 * 0.0265
MOST_ERROR = 0.25  # nats; with the default eps that is an error of 4e-3 of the log-sum-exp at most
MOST = tl.constexpr(448.0)  # the largest number of e4m3
USUAL = tl.constexpr(4.0)
LOG2_E = tl.constexpr(math.log2(math.e))
FARTHEST = tl.constexpr(
    100.0
)  # powers of 2 from the bound down to a token's number: exponentials are without the latter
LEAST = tl.constexpr(1e-30)  # rows whose elements are all smaller count as zeros
DTYPE = torch.float8_e4m3fn
# Elements of a row. A weight of 128,256 x 4,096 took 0.54 ms with 32, 0.61 with 16, 0.56 with 64 (H200, 2026-11).
PER_THREAD = 32


class Rounded(NamedTuple):
    """Rows in 8 bits.

    Attributes:
        codes: [R, D or more] e4m3; zeros from column D on.
        numbers_KR: [K, R] fp32. Of the weight the row's number of the sum above, bias counted, and its length less the shared
            vector; -inf and 0 of a column that takes no part. Of hidden states the scale of the product, the number less the
            bound, the length, the bound. Without a softcap scales and numbers are those of logits to base 2; with one they are
            those of logits before it, and the bound is not taken off.
    """

    codes: torch.Tensor
    numbers_KR: torch.Tensor


def new_rounded(num_rows: int, hidden_size: int, inner: int, num_numbers: int, device: torch.device) -> Rounded:
    """Return room for rows, ``inner`` of whose columns are worked on at a time."""
    codes = torch.empty(num_rows, cdiv(hidden_size, inner) * inner, dtype=DTYPE, device=device)
    return Rounded(codes, torch.empty(num_numbers, num_rows, dtype=torch.float32, device=device))


def some_of(rounded: Rounded, num_rows: int) -> Rounded:
    """Return the room of the first rows, as room for so many."""
    count = rounded.numbers_KR.shape[0]
    return Rounded(rounded.codes[:num_rows], rounded.numbers_KR.view(-1)[: count * num_rows].view(count, num_rows))


def round_hidden(
    x: Operands, index_R: torch.Tensor, num_kept: torch.Tensor, bound_N: torch.Tensor, around: Middle, out: Rounded
) -> None:
    """Gather and round a group's hidden states; rows past ``num_kept`` in the last live tile are 0."""
    _launch(x, (index_R, num_kept, bound_N), None, around, out, 0, index_R.shape[0])


def round_weight(x: Operands, slot_V: torch.Tensor, around: Middle, out: Rounded, first: int) -> None:
    """Round rows of the weight from ``first`` on. Hot columns and padding take no part."""
    _launch(x, None, slot_V, around, out, first, x.logits.num_valid)


def _launch(
    x: Operands, group: tuple[torch.Tensor, ...] | None, slot_V: torch.Tensor | None, around: Middle, out: Rounded,
    first: int, last: int,
) -> None:  # fmt: skip
    num_rows, num_inner = out.codes.shape
    hidden_size, scale, softcap = x.hidden.shape[1], x.logits.logit_scale, x.logits.softcap > 0.0
    # A row is a power of 2 and a rest: it has all lanes busy, and D 2,304 does not take as long as 4,096.
    block = 1 << (hidden_size.bit_length() - 1)
    rest = 0 if num_inner == block else 1 << (num_inner - block - 1).bit_length()
    warps = min(16, max(1, block // (32 * PER_THREAD)))
    # Registers have room for 12 warps where a row has no rest. A weight of 128,256 x 4,096 takes 0.48 ms with as many at once,
    # and 0.52 with 32. One of 256,000 x 2,304, whose rows have a rest, takes 0.60 with 32, and 0.81 with 6 (H200, 2026-11).
    at_once = num_programs(x.hidden.device) * (1 if interpreted() else max(1, (32 if rest else 12) // warps))
    index_R, num_kept, bound_N = group or (None, None, None)
    is_hidden = group is not None
    means = (around.hidden_D, around.weight_D) if is_hidden else (around.weight_D, around.hidden_D)
    _round_rows_kernel[(min(num_rows, at_once),)](
        x.hidden if is_hidden else x.weight, index_R, num_kept, bound_N, None if is_hidden else x.bias, slot_V, *means,
        around.spread_P,
        out.codes, out.numbers_KR,
        num_rows, hidden_size, num_inner, first, last, around.spread_P.shape[0],
        scale if softcap else scale * math.log2(math.e), (scale * ERROR / MOST_ERROR) ** 2 / hidden_size,
        HAS_INDEX=is_hidden, HAS_BIAS=x.bias is not None and not is_hidden, HAS_SOFTCAP=softcap, INTERPRETED=interpreted(),
        MAX_SIDE=MAX_SIDE, BLOCK_D=block, REST=rest, num_warps=warps,
    )  # fmt: skip


@kernel("rows_ptr", "codes_ptr", "hidden_size", "num_inner")
def _round_rows_kernel(
    rows_ptr,  # in: [N or V, D]
    index_ptr,  # in: [R] int32
    num_kept_ptr,  # in: [1] int32; with HAS_INDEX
    bound_ptr,  # in: [N] fp32; with HAS_INDEX
    bias_ptr,  # in: [V]
    slot_ptr,  # in: [V] int32; without HAS_INDEX
    mean_ptr,  # in: [D] fp32
    beside_ptr,  # in: [D] fp32
    spread_ptr,  # in: [P] fp32
    codes_ptr,  # out: [R, D or more] e4m3
    numbers_ptr,  # out: [4, R] fp32; without HAS_INDEX [2, R]
    num_rows,
    hidden_size,
    num_inner,
    first_row,
    last_row,
    num_spread,
    unit,
    per_square,
    HAS_INDEX: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    INTERPRETED: tl.constexpr,
    MAX_SIDE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST: tl.constexpr,
):
    # A program keeps the two vectors in registers and goes through many rows. It reads each once, while it works on the one
    # before.
    offs_d = tl.arange(0, BLOCK_D)
    in_d = offs_d < hidden_size
    mean = tl.load(mean_ptr + offs_d, mask=in_d, other=0)
    beside = tl.load(beside_ptr + offs_d, mask=in_d, other=0)
    offs_e = BLOCK_D + tl.arange(0, REST if REST else 1)
    in_e = offs_e < hidden_size
    if REST:
        rest_mean = tl.load(mean_ptr + offs_e, mask=in_e, other=0)
        rest_beside = tl.load(beside_ptr + offs_e, mask=in_e, other=0)
    spread = sum_of_parts(spread_ptr, num_spread)
    per_square *= spread
    usual = tl.maximum(tl.sqrt(spread / hidden_size), LEAST) * (1 / USUAL)
    stop = num_rows
    num_live = num_rows
    if HAS_INDEX:
        num_live = tl.load(num_kept_ptr)
        stop = tl.minimum(num_rows, tl.maximum(tl.cdiv(num_live, MAX_SIDE), 1) * MAX_SIDE)
    place = tl.program_id(0)
    row, live = _row_at(  # pyright: ignore[reportGeneralTypeIssues]
        place, index_ptr, slot_ptr, stop, num_live, first_row, last_row, HAS_INDEX
    )
    ahead = tl.load(rows_ptr + row.to(tl.int64) * hidden_size + offs_d, mask=in_d & live, other=0)
    if REST:
        rest_ahead = tl.load(rows_ptr + row.to(tl.int64) * hidden_size + offs_e, mask=in_e & live, other=0)
    while place < stop:
        here, here_live, whole = row, live, ahead.to(tl.float32)
        following = place + tl.num_programs(0)
        row, live = _row_at(following, index_ptr, slot_ptr, stop, num_live, first_row, last_row, HAS_INDEX)
        ahead = tl.load(rows_ptr + row.to(tl.int64) * hidden_size + offs_d, mask=in_d & live, other=0)
        away = tl.where(here_live, whole - mean, 0.0)
        number, square, most = _sums_of_row(  # pyright: ignore[reportGeneralTypeIssues]
            whole if HAS_INDEX else away, away, beside
        )
        if REST:
            whole = rest_ahead.to(tl.float32)
            rest_ahead = tl.load(rows_ptr + row.to(tl.int64) * hidden_size + offs_e, mask=in_e & live, other=0)
            rest = tl.where(here_live, whole - rest_mean, 0.0)
            more = _sums_of_row(whole if HAS_INDEX else rest, rest, rest_beside)
            number, square, most = number + more[0], square + more[1], tl.maximum(most, more[2])
        if HAS_BIAS:
            number += tl.load(bias_ptr + here, mask=here_live, other=0).to(tl.float32)
        number *= unit
        # The square of a column's length may overflow: then all tokens have it marked.
        length = tl.sqrt(square)
        scale = usual
        numbers_here = numbers_ptr + place
        if HAS_INDEX:
            most = tl.maximum(most, LEAST)
            scale = most / MOST
            bound = tl.load(bound_ptr + here, mask=here_live, other=0)
            if not HAS_SOFTCAP:
                number -= bound * LOG2_E
            # NaN makes this false.
            fits = (square * per_square < 1.0) & ((square >= 2.0 * most * most) | (square < LEAST))
            fits &= tl.abs(bound) < float("inf")
            if not HAS_SOFTCAP:
                fits &= (number > -FARTHEST) & (number < FARTHEST / 4)
            away = tl.where(fits, away, 0.0)
            if REST:
                rest = tl.where(fits, rest, 0.0)
            tl.store(numbers_here, tl.where(fits, scale * usual * unit, 0.0))
            number = tl.where(fits, number, 0.0)
            tl.store(numbers_here + num_rows.to(tl.int64), tl.where(here_live, number, float("-inf")))
            tl.store(numbers_here + 2 * num_rows.to(tl.int64), tl.where(fits | (here_live == 0), length, float("inf")))
            tl.store(numbers_here + 3 * num_rows.to(tl.int64), bound)
        else:
            length = tl.where(most <= usual * MOST, length, float("inf"))
            tl.store(numbers_here, tl.where(here_live, number, float("-inf")))
            tl.store(numbers_here + num_rows.to(tl.int64), tl.where(here_live, length, 0.0))
        where = codes_ptr + place * num_inner.to(tl.int64)
        _store_codes(where, away * (1 / scale), offs_d, num_inner, INTERPRETED)
        if REST:
            _store_codes(where, rest * (1 / scale), offs_e, num_inner, INTERPRETED)
        place = following


@triton.jit
def _sums_of_row(whole, away, beside):
    """Return a row's number, its square and its largest element; NaN counts as infinite."""
    far = tl.where(away == away, tl.abs(away), float("inf"))
    return tl.reduce((whole * beside, away * away, far), 0, _add_add_most)


@triton.jit
def _store_codes(where, codes, offs_d, num_inner, INTERPRETED: tl.constexpr):
    codes = tl.minimum(tl.maximum(codes, -MOST), MOST)
    if INTERPRETED:
        # The interpreter loses a carry from the mantissa to the exponent: round to 3 bits first.
        bits = codes.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
        codes = bits.to(tl.float32, bitcast=True)
    tl.store(where + offs_d, codes.to(where.dtype.element_ty), mask=offs_d < num_inner)


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
