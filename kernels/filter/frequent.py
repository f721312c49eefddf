"""Frequent columns: the few columns that the filter keeps for every token.

In a trained softmax some hundred logits per token reach a useful threshold. Nearly all of them belong to the few hundred ids
that are frequent in any text. These columns, the most frequent labels of the batch, are kept whole, as a matrix.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from cce_dist.kernels import Operands
from cce_dist.kernels.blocks import kernel
from cce_dist.kernels.memory import frequent_columns
from cce_dist.kernels.tiles import interpreted
from cce_dist.kernels.tokens import first_rows
from cce_dist.kernels.waves import cdiv


class Frequent(NamedTuple):
    """The F frequent columns of a shard.

    Attributes:
        ids_F: Indices of the frequent columns, int64, ascending.
        slot_V: [33 W] int32. The first 32 W numbers are each column's slot: 1 plus its position in ``ids_F``, or 0 for other
            columns. The last W numbers are words with a bit set for each frequent column, like a row of ``lse.Marks``.
        num_words: W.
        x: Operands with the frequent columns alone. Its ids are the call's labels, not slots.
        rows_CD: The rows of the weight in ``x``, and room behind them for sampled columns.
    """

    ids_F: torch.Tensor
    slot_V: torch.Tensor
    num_words: int
    x: Operands
    rows_CD: torch.Tensor


def num_frequent(num_valid: int, eps: float) -> int:
    """Return F in whole tiles: at most 1,024, 1/eps, or 1/16 of the shard.

    At most 1/eps ids can have an average probability of eps, so more columns need not be kept for all tokens. With 512 frequent
    columns the error of d_hidden is 1.2 to 1.3 times as large (H200, eps 2**-10, V 32,000 to 256,000, two rungs of the bench's
    ladder, 2026-11), and no head took less time.
    """
    return frequent_columns(num_valid, eps, 32 if interpreted() else 256)


def most_labelled(x: Operands, ids_F: torch.Tensor, zeros_V: torch.Tensor) -> None:
    """Fill ids_F with the columns that are labels most often, ascending; of equally frequent ones the first.

    zeros_V, int32, is set to 0.
    """
    num_tokens, num_valid = x.num_tokens, x.num_valid
    counts = torch.zeros(num_valid + num_tokens, dtype=torch.int32, device=x.ids.device)
    _count_labels_kernel[(cdiv(num_tokens, 1024),)](x.ids, counts, num_tokens, x.start, num_valid, BLOCK_N=1024)
    _most_labelled_kernel[(cdiv(num_valid, 4096),)](
        counts, ids_F, zeros_V, num_tokens, num_valid, ids_F.shape[0], num_tokens.bit_length(), BLOCK_V=4096, num_warps=8
    )


@kernel("count_ptr")
def _count_labels_kernel(
    labels_ptr,  # in: [N] int64
    count_ptr,  # in, out: [V + N] int32: labels of each column; how many columns are the label more than 0, 1, ... times
    num_tokens,
    start,
    num_valid,
    BLOCK_N: tl.constexpr,
):
    above_ptr = count_ptr + num_valid
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    label = tl.load(labels_ptr + offs_n, mask=offs_n < num_tokens, other=-1)
    column = label - start
    here = (label >= 0) & (column >= 0) & (column < num_valid)
    # A label's n-th occurrence increments above[n - 1]. Integer atomics commute, so the result is deterministic.
    before = tl.where(here, tl.atomic_add(count_ptr + column, 1, mask=here), 0)
    tl.atomic_add(above_ptr, tl.sum((here & (before == 0)).to(tl.int32), 0))
    tl.atomic_add(above_ptr + before, 1, mask=before > 0)


@kernel("count_ptr", "ids_ptr", "zeros_ptr")
def _most_labelled_kernel(
    count_ptr,  # in: [V + N] int32, as ``_count_labels_kernel`` leaves it; the last N descend
    ids_ptr,  # out: [F] int64
    zeros_ptr,  # out: [V] int32
    num_tokens,
    num_valid,
    size,
    num_steps,
    BLOCK_V: tl.constexpr,
):
    # Find ``least`` by bisection: all columns with more labels are chosen, and the first ``num_equal`` that have that many.
    above_ptr = count_ptr + num_valid
    least = tl.zeros((), tl.int32)
    last = least + num_tokens
    for _ in range(0, num_steps):
        middle = (least + last) // 2
        too_many = tl.load(above_ptr + middle, mask=least < last, other=0) > size
        least = tl.where(too_many, middle + 1, least)
        last = tl.where(too_many, last, middle)
    num_equal = size - tl.load(above_ptr + least)

    # Count the chosen columns before this program's own.
    more = tl.zeros((BLOCK_V,), tl.int32)
    equal = tl.zeros((BLOCK_V,), tl.int32)
    for first in range(0, tl.program_id(0) * BLOCK_V, BLOCK_V):
        count = tl.load(count_ptr + first + tl.arange(0, BLOCK_V))
        more += (count > least).to(tl.int32)
        equal += (count == least).to(tl.int32)
    equal_before = tl.sum(equal, 0)
    position = tl.sum(more, 0) + tl.minimum(equal_before, num_equal)

    offs_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    tl.store(zeros_ptr + offs_v, tl.zeros_like(offs_v), mask=offs_v < num_valid)
    count = tl.load(count_ptr + offs_v, mask=offs_v < num_valid, other=-1)
    equal = (count == least).to(tl.int32)
    chosen = (count > least) | ((equal > 0) & (equal_before + tl.cumsum(equal, 0) <= num_equal))
    position += tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(ids_ptr + position, offs_v.to(tl.int64), mask=chosen)


def gather_frequent(ids_F: torch.Tensor, x: Operands, num_words: int, room: int = 0) -> Frequent:
    """Copy the frequent columns' rows of the weight, and record each column's slot. ``room``: rows left for other columns."""
    size, hidden_size = ids_F.shape[0], x.weight.shape[1]
    slot_V = torch.empty(33 * num_words, dtype=torch.int32, device=ids_F.device)
    rows_CD = torch.empty(size + room, hidden_size, dtype=x.weight.dtype, device=x.weight.device)
    _gather_frequent_kernel[(cdiv(size, 16), cdiv(hidden_size, 256))](
        ids_F, x.weight,
        slot_V, rows_CD,
        size, hidden_size, num_words, size.bit_length(),
        BLOCK_F=16, BLOCK_D=256, BLOCK_W=16,
    )
    columns = x._replace(weight=first_rows(rows_CD, size), start=0, num_valid=size)
    return Frequent(ids_F, slot_V, num_words, columns, rows_CD)


@kernel("weight_ptr", "slot_ptr", "weight_out_ptr", "hidden_size")
def _gather_frequent_kernel(
    ids_ptr,  # in: [F] int64, ascending
    weight_ptr,  # in: [V, D]
    slot_ptr,  # out: [33 W] int32: slots and words, as in ``Frequent``
    weight_out_ptr,  # out: [F, D]
    size,
    hidden_size,
    num_words,
    num_steps,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    offs_f = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_f = offs_f < size
    mask = in_f[:, None] & (offs_d < hidden_size)[None, :]
    column = tl.load(ids_ptr + offs_f, mask=in_f, other=0)
    row = tl.load(weight_ptr + column[:, None] * hidden_size + offs_d[None, :], mask=mask, other=0)
    tl.store(weight_out_ptr + offs_f.to(tl.int64)[:, None] * hidden_size + offs_d[None, :], row, mask=mask)

    # The programs share the columns and write their slots. Bisection finds how many frequent columns come before each column.
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    for word in range(program * BLOCK_W, num_words, tl.num_programs(0) * tl.num_programs(1) * BLOCK_W):
        offs_v = 32 * word + tl.arange(0, 32 * BLOCK_W)
        in_v = offs_v < 32 * num_words
        num_before = tl.zeros((32 * BLOCK_W,), tl.int32)
        last = num_before + size
        for _ in range(0, num_steps):
            middle = (num_before + last) // 2
            before = tl.load(ids_ptr + middle, mask=num_before < last, other=0) < offs_v
            before = before & (num_before < last)
            last = tl.where(before, last, middle)
            num_before = tl.where(before, middle + 1, num_before)
        is_frequent = tl.load(ids_ptr + num_before, mask=num_before < size, other=-1) == offs_v
        tl.store(slot_ptr + offs_v, tl.where(is_frequent, num_before + 1, 0), mask=in_v)
        bits = tl.where(is_frequent, 1 << (offs_v % 32), 0)
        offs_w = word + tl.arange(0, BLOCK_W)
        words = tl.sum(tl.reshape(bits, (BLOCK_W, 32)), 1).to(tl.int32)
        tl.store(slot_ptr + 32 * num_words + offs_w, words, mask=offs_w < num_words)


def outside_frequent(
    bound_N: torch.Tensor,
    frequent_3N: torch.Tensor,
    frequent_sloped_N: torch.Tensor | None,
    stats_KN: torch.Tensor,
    sloped_N: torch.Tensor | None,
    bound_3N: torch.Tensor,
) -> None:
    """Fill bound_3N: the bound; the sum of exp over infrequent columns, relative to the maximum; and the maximum.

    Args:
        bound_N: The bound.
        frequent_3N: Maximum and sum of exp over the frequent columns.
        frequent_sloped_N: Sum of exp times the softcap's slope over the frequent columns; None without a softcap.
        stats_KN: Maximum and sum of exp over all columns.
        sloped_N: Sum of exp times the softcap's slope over all columns; None without a softcap.
        bound_3N: out.
    """
    num_tokens = bound_N.shape[0]
    _outside_frequent_kernel[(cdiv(num_tokens, 256),)](
        bound_N, frequent_3N, frequent_sloped_N, stats_KN, sloped_N,
        bound_3N,
        num_tokens,
        BLOCK_N=256,
    )


@kernel("state_ptr")
def _outside_frequent_kernel(
    bound_ptr,  # in: [N] fp32
    frequent_ptr,  # in: [3, N] fp32: maximum, sum, anything
    frequent_sloped_ptr,  # in: [N] fp32, or None
    stats_ptr,  # in: [K, N] fp32: maximum, sum, ...
    sloped_ptr,  # in: [N] fp32, or None
    state_ptr,  # out: [3, N] fp32
    num_tokens,
    BLOCK_N: tl.constexpr,
):
    stride = num_tokens.to(tl.int64)
    frequent_sum_ptr = frequent_ptr + stride if frequent_sloped_ptr is None else frequent_sloped_ptr
    sum_ptr = stats_ptr + stride if sloped_ptr is None else sloped_ptr
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = offs_n < num_tokens
    state_ptr += offs_n
    maximum = tl.load(stats_ptr + offs_n, mask=in_n, other=0)
    below = tl.load(frequent_ptr + offs_n, mask=in_n, other=0) - maximum
    frequent = tl.load(frequent_sum_ptr + offs_n, mask=in_n, other=0) * tl.exp(below)
    outside = tl.load(sum_ptr + offs_n, mask=in_n, other=0) - frequent
    tl.store(state_ptr, tl.load(bound_ptr + offs_n, mask=in_n, other=0), mask=in_n)
    tl.store(state_ptr + stride, tl.where(outside < 0, 0.0, outside), mask=in_n)  # NaN stays
    tl.store(state_ptr + 2 * stride, maximum, mask=in_n)
