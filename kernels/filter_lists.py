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
from cce_dist.kernels.tiles import interpreted


class Head(NamedTuple):
    """The columns of a shard that are kept whole; H of them.

    Attributes:
        ids_H: Their columns, int64.
        slot_V: Each column's place in the head, or -1; int32, as many as the words have bits.
        weight_HD: Their rows of the weight.
        bias_H: Their biases, or None.
        logits: The head as a shard of its own; labels are slots.
    """

    ids_H: torch.Tensor
    slot_V: torch.Tensor
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
    """Return the ``size`` columns of the shard that are the label most often; of equals, the first."""
    count_V = torch.zeros(logits.num_valid, dtype=torch.int32, device=labels_N.device)
    num_tokens = labels_N.shape[0]
    _count_labels_kernel[(triton.cdiv(num_tokens, 1024),)](
        labels_N, count_V, num_tokens, logits.start, logits.num_valid, BLOCK_N=1024
    )
    return count_V.sort(descending=True, stable=True).indices[:size]


@triton.jit(do_not_specialize=["num_tokens", "start", "num_valid"], do_not_specialize_on_alignment=["labels_ptr"])
def _count_labels_kernel(
    labels_ptr,  # in: [N] int64
    count_ptr,  # in, out: [V] int32
    num_tokens,
    start,
    num_valid,
    BLOCK_N: tl.constexpr,
):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    label = tl.load(labels_ptr + offs_n, mask=offs_n < num_tokens, other=-1)
    column = label - start
    here = (label >= 0) & (column >= 0) & (column < num_valid)
    tl.atomic_add(count_ptr + column, 1, mask=here)  # of integers: their order does not matter


def gather_head(
    ids_H: torch.Tensor, weight_VD: torch.Tensor, bias_V: torch.Tensor | None, logits: ShardLogits, num_words: int
) -> Head:
    """Copy the head's rows out of the weight."""
    size = ids_H.shape[0]
    slot_V = torch.full((32 * num_words,), -1, dtype=torch.int32, device=ids_H.device)
    slot_V[ids_H] = torch.arange(size, dtype=torch.int32, device=ids_H.device)
    bias_H = None if bias_V is None else bias_V[ids_H]
    return Head(ids_H, slot_V, weight_VD[ids_H], bias_H, logits._replace(start=0, num_valid=size))


def head_words(head: Head) -> torch.Tensor:
    """The head as bits, [W] int32, like a row of the marks of ``lse.py``."""
    num_words = head.slot_V.shape[0] // 32
    words_W = torch.empty(num_words, dtype=torch.int32, device=head.slot_V.device)
    _head_words_kernel[(triton.cdiv(num_words, 128),)](head.slot_V, words_W, num_words, BLOCK_W=128)
    return words_W


@triton.jit(do_not_specialize=["num_words"])
def _head_words_kernel(
    slot_ptr,  # in: [32 W] int32
    words_ptr,  # out: [W] int32
    num_words,
    BLOCK_W: tl.constexpr,
):
    offs_w = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    bit = tl.arange(0, 32)
    slot = tl.load(slot_ptr + offs_w[:, None] * 32 + bit[None, :], mask=(offs_w < num_words)[:, None], other=-1)
    word = tl.sum(tl.where(slot >= 0, 1 << bit[None, :], 0), 1).to(tl.int32)
    tl.store(words_ptr + offs_w, word, mask=offs_w < num_words)


def add_label(
    head_3N: torch.Tensor, target_N: torch.Tensor, labels_N: torch.Tensor, slot_V: torch.Tensor, logits: ShardLogits
) -> torch.Tensor:
    """Add each label's exponential to the head's maximum and sum, where the label is a column of the shard beside the head."""
    num_tokens = labels_N.shape[0]
    stats_3N = torch.empty_like(head_3N)
    _add_label_kernel[(triton.cdiv(num_tokens, 256),)](
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
    beside = tl.load(slot_ptr + tl.where(here, label - start, 0), mask=here, other=0) < 0
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

    ``count_N`` is how many there are, also where that is more than the L that are written.
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
    if row >= tl.load(num_kept_ptr):
        return
    token = tl.load(index_ptr + row).to(tl.int64)
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
