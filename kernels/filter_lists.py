"""What a filter keeps: the head of the vocabulary, and for each token a list of single columns beside it.

A trained softmax is above a useful threshold at some hundred logits a token. Nearly all of them are of the few hundred ids
that are frequent anywhere: those columns, the *head*, are kept whole. The batch's own labels tell which they are, so the
vocabulary's order does not matter. What is left is a handful of columns a token, too few for tiles: they are kept one by one.

The head also gives the bound that the threshold is relative to: the log-sum-exp over the head and the token's label is a true
lower bound of the whole one, before the whole one is known.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from cce_dist.kernels import ShardLogits
from cce_dist.kernels.tiles import cdiv, interpreted


class Head(NamedTuple):
    """The columns of a shard that are kept whole; H of them.

    Attributes:
        ids_H: Their columns, int64.
        slot_V: Each column's place in the head, from 1 on, or 0; int32, as many as the words have bits.
        words_W: The head as bits, int32, like a row of the marks of ``lse.py``.
        weight_HD: Their rows of the weight.
        bias_H: Their biases, or None.
        logits: The head as a shard of its own; labels are slots.
    """

    ids_H: torch.Tensor
    slot_V: torch.Tensor
    words_W: torch.Tensor
    weight_HD: torch.Tensor
    bias_H: torch.Tensor | None
    logits: ShardLogits


def head_size(num_valid: int, eps: float) -> int:
    """Return H, whole tiles: 1/4 eps, or 1/16 of the shard if that is less.

    At most 1/eps ids are likely enough on average to be kept everywhere. Of a Zipf's unigram a tenth of that are, whatever V
    is; shorter heads leave many to the lists (H200, eps 2**-12, V 32,000 to 256,000, 2026-11: 1,024 is best, 2,048 costs 0.04
    to 0.09 of a GEMM more, 512 costs 0.1 to 0.4, and 256 at V 32,000 more than two).
    """
    unit = 32 if interpreted() else 256
    return min(num_valid, max(1, round(min(0.25 / eps, num_valid / 16) / unit)) * unit)


def most_labelled(labels_N: torch.Tensor, logits: ShardLogits, size: int) -> torch.Tensor:
    """Return the ``size`` columns of the shard that are the label most often, ascending; of equals, the first."""
    num_tokens, num_valid = labels_N.shape[0], logits.num_valid
    zeros = torch.zeros(num_valid + num_tokens, dtype=torch.int32, device=labels_N.device)
    count_V, above_N = zeros.split((num_valid, num_tokens))
    _count_labels_kernel[(cdiv(num_tokens, 1024),)](
        labels_N, count_V, above_N, num_tokens, logits.start, num_valid, BLOCK_N=1024
    )
    ids_H = labels_N.new_empty(size)
    _most_labelled_kernel[(cdiv(num_valid, 4096),)](
        count_V, above_N, ids_H, num_tokens, num_valid, size, num_tokens.bit_length(), BLOCK_V=4096, num_warps=8
    )
    return ids_H


@triton.jit(
    do_not_specialize=["num_tokens", "start", "num_valid"], do_not_specialize_on_alignment=["labels_ptr", "above_ptr"]
)
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
    # Of integers: their order does not matter. Each count passes each number below it once.
    before = tl.where(here, tl.atomic_add(count_ptr + column, 1, mask=here), 0)
    tl.atomic_add(above_ptr, tl.sum((here & (before == 0)).to(tl.int32), 0))
    tl.atomic_add(above_ptr + before, 1, mask=before > 0)


@triton.jit(
    do_not_specialize=["num_tokens", "num_valid", "size", "num_steps"], do_not_specialize_on_alignment=["above_ptr"]
)
def _most_labelled_kernel(
    count_ptr,  # in: [V] int32
    above_ptr,  # in: [N] int32, descending
    ids_ptr,  # out: [H] int64
    num_tokens,
    num_valid,
    size,
    num_steps,
    BLOCK_V: tl.constexpr,
):
    # All columns of more labels than ``least`` have room, and as many of just so many as ``room``: by bisection.
    least = tl.zeros((), tl.int32)
    last = least + num_tokens
    for _ in range(0, num_steps):
        middle = (least + last) // 2
        too_many = tl.load(above_ptr + middle, mask=least < last, other=0) > size
        least = tl.where(too_many, middle + 1, least)
        last = tl.where(too_many, last, middle)
    room = size - tl.load(above_ptr + least)

    # Every program counts for itself what is before its columns.
    more = tl.zeros((BLOCK_V,), tl.int32)
    equal = tl.zeros((BLOCK_V,), tl.int32)
    for first in range(0, tl.program_id(0) * BLOCK_V, BLOCK_V):
        count = tl.load(count_ptr + first + tl.arange(0, BLOCK_V))
        more += (count > least).to(tl.int32)
        equal += (count == least).to(tl.int32)
    equal_before = tl.sum(equal, 0)
    place = tl.sum(more, 0) + tl.minimum(equal_before, room)

    offs_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    count = tl.load(count_ptr + offs_v, mask=offs_v < num_valid, other=-1)
    equal = (count == least).to(tl.int32)
    chosen = (count > least) | ((equal > 0) & (equal_before + tl.cumsum(equal, 0) <= room))
    place += tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(ids_ptr + place, offs_v.to(tl.int64), mask=chosen)


def gather_head(
    ids_H: torch.Tensor, weight_VD: torch.Tensor, bias_V: torch.Tensor | None, logits: ShardLogits, num_words: int
) -> Head:
    """Copy the head's rows out of the weight, and note where they are."""
    size, hidden_size = ids_H.shape[0], weight_VD.shape[1]
    slot_V, words_W = torch.zeros(33 * num_words, dtype=torch.int32, device=ids_H.device).split(32 * num_words)
    weight_HD = weight_VD.new_empty(size, hidden_size)
    bias_H = None if bias_V is None else bias_V.new_empty(size)
    _gather_head_kernel[(cdiv(size, 16), cdiv(hidden_size, 256))](
        ids_H, weight_VD, bias_V,
        slot_V, words_W, weight_HD, bias_H,
        size, hidden_size,
        HAS_BIAS=bias_V is not None, BLOCK_H=16, BLOCK_D=256,
    )  # fmt: skip
    return Head(ids_H, slot_V, words_W, weight_HD, bias_H, logits._replace(start=0, num_valid=size))


@triton.jit(do_not_specialize=["size"], do_not_specialize_on_alignment=["ids_ptr"])
def _gather_head_kernel(
    ids_ptr,  # in: [H] int64
    weight_ptr,  # in: [V, D]
    bias_ptr,  # in: [V]
    slot_ptr,  # in, out: [32 W] int32
    words_ptr,  # in, out: [W] int32
    weight_out_ptr,  # out: [H, D]
    bias_out_ptr,  # out: [H]
    size,
    hidden_size,
    HAS_BIAS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    offs_h = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_h = offs_h < size
    mask = in_h[:, None] & (offs_d < hidden_size)[None, :]
    column = tl.load(ids_ptr + offs_h, mask=in_h, other=0)
    row = tl.load(weight_ptr + column[:, None] * hidden_size + offs_d[None, :], mask=mask, other=0)
    tl.store(weight_out_ptr + offs_h.to(tl.int64)[:, None] * hidden_size + offs_d[None, :], row, mask=mask)
    if tl.program_id(1) == 0:
        tl.store(slot_ptr + column, offs_h + 1, mask=in_h)
        bit = tl.full((BLOCK_H,), 1, tl.int32) << (column % 32).to(tl.int32)
        tl.atomic_or(words_ptr + column // 32, bit, mask=in_h)  # of bits: their order does not matter
        if HAS_BIAS:
            tl.store(bias_out_ptr + offs_h, tl.load(bias_ptr + column, mask=in_h, other=0), mask=in_h)


def add_label(
    head_3N: torch.Tensor, target_N: torch.Tensor, labels_N: torch.Tensor, slot_V: torch.Tensor, logits: ShardLogits
) -> torch.Tensor:
    """Add each label's exponential to the head's maximum and sum, where the label is a column of the shard beside the head."""
    num_tokens = labels_N.shape[0]
    stats_3N = torch.empty_like(head_3N)
    _add_label_kernel[(cdiv(num_tokens, 256),)](
        head_3N, target_N, labels_N, slot_V, stats_3N, num_tokens, logits.start, logits.num_valid, BLOCK_N=256
    )
    return stats_3N


@triton.jit(
    do_not_specialize=["num_tokens", "start", "num_valid"], do_not_specialize_on_alignment=["target_ptr", "labels_ptr"]
)
def _add_label_kernel(
    head_ptr,  # in: [3, N] fp32: maximum, sum, 0
    target_ptr,  # in: [N] fp32
    labels_ptr,  # in: [N] int64
    slot_ptr,  # in: [V] int32
    stats_ptr,  # out: [3, N] fp32
    num_tokens,
    start,
    num_valid,
    BLOCK_N: tl.constexpr,
):
    stride = num_tokens.to(tl.int64)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = offs_n < num_tokens
    label = tl.load(labels_ptr + offs_n, mask=in_n, other=-1)
    here = (label >= 0) & (label >= start) & (label - start < num_valid)
    beside = tl.load(slot_ptr + tl.where(here, label - start, 0), mask=here, other=1) == 0
    target = tl.where(beside, tl.load(target_ptr + offs_n, mask=in_n, other=0), float("-inf"))
    head_max = tl.load(head_ptr + offs_n, mask=in_n, other=0)
    head_sum = tl.load(head_ptr + stride + offs_n, mask=in_n, other=0)
    maximum = tl.maximum(head_max, target)
    base = tl.where(maximum > float("-inf"), maximum, 0.0)
    # A head of NaN must stay one: the maximum may hide it, the sum does not.
    total = head_sum * tl.exp(head_max - base) + tl.exp(target - base)
    tl.store(stats_ptr + offs_n, maximum, mask=in_n)
    tl.store(stats_ptr + stride + offs_n, total, mask=in_n)
    tl.store(stats_ptr + 2 * stride + offs_n, tl.zeros((BLOCK_N,), tl.float32), mask=in_n)


def outside_head(
    bound_N: torch.Tensor, head_max_N: torch.Tensor, head_sum_N: torch.Tensor, max_N: torch.Tensor, sum_N: torch.Tensor
) -> torch.Tensor:
    """Return, [3, N]: the bound; what ``sum_N`` has more than the head, relative to ``max_N``; and that maximum."""
    num_tokens = bound_N.shape[0]
    state_3N = torch.empty(3, num_tokens, dtype=torch.float32, device=bound_N.device)
    _outside_head_kernel[(cdiv(num_tokens, 256),)](
        bound_N, head_max_N, head_sum_N, max_N, sum_N, state_3N, num_tokens, BLOCK_N=256
    )
    return state_3N


@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["bound_ptr", "head_max_ptr", "head_sum_ptr", "max_ptr", "sum_ptr"],
)
def _outside_head_kernel(
    bound_ptr,  # in: [N] fp32
    head_max_ptr,  # in: [N] fp32
    head_sum_ptr,  # in: [N] fp32
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
    below = tl.load(head_max_ptr + offs_n, mask=in_n, other=0) - maximum
    head = tl.load(head_sum_ptr + offs_n, mask=in_n, other=0) * tl.exp(below)
    outside = tl.load(sum_ptr + offs_n, mask=in_n, other=0) - head
    tl.store(state_ptr, tl.load(bound_ptr + offs_n, mask=in_n, other=0), mask=in_n)
    tl.store(state_ptr + num_tokens.to(tl.int64), tl.where(outside < 0, 0.0, outside), mask=in_n)  # NaN stays
    tl.store(state_ptr + 2 * num_tokens.to(tl.int64), maximum, mask=in_n)


def list_columns(
    words_RW: torch.Tensor,
    head_words_W: torch.Tensor,
    labels_N: torch.Tensor,
    index_R: torch.Tensor,
    num_kept: torch.Tensor,
    logits: ShardLogits,
    columns_NL: torch.Tensor,
    count_N: torch.Tensor,
) -> None:
    """Write the marked columns that are not in the head, ascending, and the label's, to columns_NL at the tokens of index_R.

    ``count_N`` is how many there are, also where that is more than the L that are written; 0 past ``num_kept``.
    """
    num_rows, num_words = words_RW.shape
    _list_columns_kernel[(num_rows,)](
        words_RW, head_words_W, labels_N, index_R, num_kept,
        columns_NL, count_N,
        num_words, columns_NL.shape[1], logits.start, logits.num_valid,
        BLOCK_W=512, num_warps=1,
    )  # fmt: skip


@triton.jit
def _bits_set(word):
    """Number of bits set in each uint32."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit(
    do_not_specialize=["num_words", "max_columns", "start", "num_valid"],
    do_not_specialize_on_alignment=["labels_ptr", "index_ptr", "num_kept_ptr", "count_ptr"],
)
def _list_columns_kernel(
    words_ptr,  # in: [R, W] int32
    head_words_ptr,  # in: [W] int32
    labels_ptr,  # in: [N] int64
    index_ptr,  # in: [R] int32
    num_kept_ptr,  # in: [1] int32
    columns_ptr,  # out: [N, L] int32
    count_ptr,  # out: [N] int32
    num_words,
    max_columns,
    start,
    num_valid,
    BLOCK_W: tl.constexpr,
):
    row = tl.program_id(0)
    token = tl.load(index_ptr + row).to(tl.int64)
    if row >= tl.load(num_kept_ptr):
        tl.store(count_ptr + token, 0)
        return
    label = tl.load(labels_ptr + token) - start
    here = (label >= 0) & (label < num_valid)
    label_word = tl.where(here, label // 32, -1)
    label_bit = tl.full((), 1, tl.uint32) << (tl.where(here, label, 0) % 32).to(tl.uint32)

    total = tl.zeros((), tl.int32)
    for first in range(0, num_words, BLOCK_W):
        offs_w = first + tl.arange(0, BLOCK_W)
        in_w = offs_w < num_words
        word = tl.load(words_ptr + row.to(tl.int64) * num_words + offs_w, mask=in_w, other=0).to(
            tl.uint32, bitcast=True
        )
        head = tl.load(head_words_ptr + offs_w, mask=in_w, other=0).to(tl.uint32, bitcast=True)
        word |= tl.where(offs_w == label_word, label_bit, 0)
        word ^= word & head
        if tl.max(word, 0) > 0:
            count = _bits_set(word)
            place = total + tl.cumsum(count, 0) - count
            total += tl.sum(count, 0)
            # One bit of every word at a time, lowest first: the columns of a row come out ascending.
            while tl.max(word, 0) > 0:
                rest = word & (word - 1)
                column = offs_w * 32 + _bits_set((word ^ rest) - 1)
                tl.store(columns_ptr + token * max_columns + place, column, mask=(word > 0) & (place < max_columns))
                place += (word > 0).to(tl.int32)
                word = rest
    tl.store(count_ptr + token, total)
