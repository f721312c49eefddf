"""Frequent columns: the few that the filter keeps for every token.

A trained softmax is above a useful threshold at some hundred logits a token. Nearly all of them are of the few hundred ids
that are frequent anywhere: those columns are kept whole, as a matrix. The batch's own labels tell which they are, so the
vocabulary's order does not matter.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from cce_dist.kernels import Operands
from cce_dist.kernels.blocks import kernel
from cce_dist.kernels.budget import cdiv, frequent_columns
from cce_dist.kernels.tiles import interpreted


class Frequent(NamedTuple):
    """The frequent columns of a shard; F of them.

    Attributes:
        ids_F: Their columns, int64.
        slot_V: Each column's place among them, from 1 on, or 0; int32, as many as the words have bits.
        words_W: The frequent columns as bits, int32, like a row of the marks of ``lse.py``.
        x: Frequent columns as a shard of their own. Its labels are those of the call, not slots.
    """

    ids_F: torch.Tensor
    slot_V: torch.Tensor
    words_W: torch.Tensor
    x: Operands


def num_frequent(num_valid: int, eps: float) -> int:
    """Return F, whole tiles: 1,024, or 1/eps or 1/16 of the shard if that is less.

    At most 1/eps ids are likely enough on average to be kept everywhere. With 512 frequent columns dE is off by 1.2 to 1.3
    times as much (H200, eps 2**-10, V 32,000 to 256,000, two rungs of the bench's ladder, 2026-11), and no head took less
    time.
    """
    return frequent_columns(num_valid, eps, 32 if interpreted() else 256)


def most_labelled(x: Operands, size: int) -> torch.Tensor:
    """Return the ``size`` columns of the shard that are the label most often, ascending; of equals, the first."""
    num_tokens, num_valid = x.num_tokens, x.num_valid
    zeros = torch.zeros(num_valid + num_tokens, dtype=torch.int32, device=x.ids.device)
    count_V, above_N = zeros.split((num_valid, num_tokens))
    _count_labels_kernel[(cdiv(num_tokens, 1024),)](
        x.ids, count_V, above_N, num_tokens, x.start, num_valid, BLOCK_N=1024
    )
    ids_F = x.ids.new_empty(size)
    _most_labelled_kernel[(cdiv(num_valid, 4096),)](
        count_V, above_N, ids_F, num_tokens, num_valid, size, num_tokens.bit_length(), BLOCK_V=4096, num_warps=8
    )
    return ids_F


@kernel("count_ptr")
def _count_labels_kernel(
    labels_ptr,  # in: [N] int64
    count_ptr,  # in, out: [V] int32
    above_ptr,  # in, out: [N] int32: how many columns are the label more than 0, 1, ... times
    num_tokens,
    start,
    num_valid,
    BLOCK_N: tl.constexpr,
):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    label = tl.load(labels_ptr + offs_n, mask=offs_n < num_tokens, other=-1)
    column = label - start
    here = (label >= 0) & (column >= 0) & (column < num_valid)
    # Integer atomics commute, so the result is deterministic. A label's n-th occurrence increments above[n - 1] once.
    before = tl.where(here, tl.atomic_add(count_ptr + column, 1, mask=here), 0)
    tl.atomic_add(above_ptr, tl.sum((here & (before == 0)).to(tl.int32), 0))
    tl.atomic_add(above_ptr + before, 1, mask=before > 0)


@kernel("count_ptr", "ids_ptr")
def _most_labelled_kernel(
    count_ptr,  # in: [V] int32
    above_ptr,  # in: [N] int32, descending
    ids_ptr,  # out: [F] int64
    num_tokens,
    num_valid,
    size,
    num_steps,
    BLOCK_V: tl.constexpr,
):
    # Bisection for ``least``: all columns with more labels than that are chosen, and ``places`` of those with exactly so many.
    least = tl.zeros((), tl.int32)
    last = least + num_tokens
    for _ in range(0, num_steps):
        middle = (least + last) // 2
        too_many = tl.load(above_ptr + middle, mask=least < last, other=0) > size
        least = tl.where(too_many, middle + 1, least)
        last = tl.where(too_many, last, middle)
    places = size - tl.load(above_ptr + least)

    # Every program counts for itself the chosen columns before its own.
    more = tl.zeros((BLOCK_V,), tl.int32)
    equal = tl.zeros((BLOCK_V,), tl.int32)
    for first in range(0, tl.program_id(0) * BLOCK_V, BLOCK_V):
        count = tl.load(count_ptr + first + tl.arange(0, BLOCK_V))
        more += (count > least).to(tl.int32)
        equal += (count == least).to(tl.int32)
    equal_before = tl.sum(equal, 0)
    place = tl.sum(more, 0) + tl.minimum(equal_before, places)

    offs_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    count = tl.load(count_ptr + offs_v, mask=offs_v < num_valid, other=-1)
    equal = (count == least).to(tl.int32)
    chosen = (count > least) | ((equal > 0) & (equal_before + tl.cumsum(equal, 0) <= places))
    place += tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(ids_ptr + place, offs_v.to(tl.int64), mask=chosen)


def gather_frequent(ids_F: torch.Tensor, x: Operands, num_words: int) -> Frequent:
    """Copy the frequent columns' rows out of the weight, and note where they are."""
    size, hidden_size = ids_F.shape[0], x.weight.shape[1]
    slot_V, words_W = torch.zeros(33 * num_words, dtype=torch.int32, device=ids_F.device).split(32 * num_words)
    weight_FD = x.weight.new_empty(size, hidden_size)
    bias_F = None if x.head.bias is None else x.head.bias.new_empty(size)
    _gather_frequent_kernel[(cdiv(size, 16), cdiv(hidden_size, 256))](
        ids_F, x.weight, x.head.bias,
        slot_V, words_W, weight_FD, bias_F,
        size, hidden_size,
        BLOCK_F=16, BLOCK_D=256,
    )
    columns = x._replace(weight=weight_FD, head=x.head._replace(bias=bias_F), start=0, num_valid=size)
    return Frequent(ids_F, slot_V, words_W, columns)


@kernel("weight_ptr", "bias_ptr", "slot_ptr", "words_ptr", "weight_out_ptr", "bias_out_ptr", "hidden_size")
def _gather_frequent_kernel(
    ids_ptr,  # in: [F] int64
    weight_ptr,  # in: [V, D]
    bias_ptr,  # in: [V], or None
    slot_ptr,  # in, out: [32 W] int32
    words_ptr,  # in, out: [W] int32
    weight_out_ptr,  # out: [F, D]
    bias_out_ptr,  # out: [F], or None
    size,
    hidden_size,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    offs_f = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_f = offs_f < size
    mask = in_f[:, None] & (offs_d < hidden_size)[None, :]
    column = tl.load(ids_ptr + offs_f, mask=in_f, other=0)
    row = tl.load(weight_ptr + column[:, None] * hidden_size + offs_d[None, :], mask=mask, other=0)
    tl.store(weight_out_ptr + offs_f.to(tl.int64)[:, None] * hidden_size + offs_d[None, :], row, mask=mask)
    if tl.program_id(1) == 0:
        tl.store(slot_ptr + column, offs_f + 1, mask=in_f)
        bit = tl.full((BLOCK_F,), 1, tl.int32) << (column % 32).to(tl.int32)
        tl.atomic_or(words_ptr + column // 32, bit, mask=in_f)  # Bits commute, so the result is deterministic.
        if bias_ptr is not None:
            tl.store(bias_out_ptr + offs_f, tl.load(bias_ptr + column, mask=in_f, other=0), mask=in_f)


def outside_frequent(
    bound_N: torch.Tensor,
    frequent_max_N: torch.Tensor,
    frequent_sum_N: torch.Tensor,
    max_N: torch.Tensor,
    sum_N: torch.Tensor,
) -> torch.Tensor:
    """Return bound_3N: the bound; ``sum_N`` less the frequent columns, relative to ``max_N``; and that maximum."""
    num_tokens = bound_N.shape[0]
    bound_3N = torch.empty(3, num_tokens, dtype=torch.float32, device=bound_N.device)
    _outside_frequent_kernel[(cdiv(num_tokens, 256),)](
        bound_N, frequent_max_N, frequent_sum_N, max_N, sum_N, bound_3N, num_tokens, BLOCK_N=256
    )
    return bound_3N


@kernel("state_ptr")
def _outside_frequent_kernel(
    bound_ptr,  # in: [N] fp32
    frequent_max_ptr,  # in: [N] fp32
    frequent_sum_ptr,  # in: [N] fp32
    max_ptr,  # in: [N] fp32
    sum_ptr,  # in: [N] fp32
    state_ptr,  # out: [3, N] fp32
    num_tokens,
    BLOCK_N: tl.constexpr,
):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = offs_n < num_tokens
    state_ptr += offs_n
    maximum = tl.load(max_ptr + offs_n, mask=in_n, other=0)
    below = tl.load(frequent_max_ptr + offs_n, mask=in_n, other=0) - maximum
    frequent = tl.load(frequent_sum_ptr + offs_n, mask=in_n, other=0) * tl.exp(below)
    outside = tl.load(sum_ptr + offs_n, mask=in_n, other=0) - frequent
    tl.store(state_ptr, tl.load(bound_ptr + offs_n, mask=in_n, other=0), mask=in_n)
    tl.store(state_ptr + num_tokens.to(tl.int64), tl.where(outside < 0, 0.0, outside), mask=in_n)  # NaN stays
    tl.store(state_ptr + 2 * num_tokens.to(tl.int64), maximum, mask=in_n)
