"""Frequent columns: the few columns that the filter keeps for every token.

In a trained softmax some hundred logits per token reach a useful threshold. Nearly all of them belong to the few hundred ids
that are frequent in any text. These columns, the most frequent labels of the batch, are kept whole, as a matrix.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cce_dist.kernels import Operands
from cce_dist.kernels.blocks import kernel
from cce_dist.kernels.memory import frequent_columns
from cce_dist.kernels.tiles import cdiv, interpreted


def num_frequent(num_valid: int, eps: float) -> int:
    """Return F in whole tiles: at most 1,024, 1/eps, or 1/16 of the shard.

    At most 1/eps ids can have an average probability of eps, so more columns need not be kept for all tokens. With 512 frequent
    columns the error of d_hidden is 1.2 to 1.3 times as large (H200, eps 2**-10, V 32,000 to 256,000, two rungs of the bench's
    ladder, 2026-11), and no head took less time.
    """
    return frequent_columns(num_valid, eps, 32 if interpreted() else 256)


@triton.jit
def num_before(ids_ptr, size, num_steps, wanted, RANKED: tl.constexpr):
    """Return how many of the ascending frequent ids are below each wanted id, by bisection.

    ``num_steps``: bits of ``size``. RANKED: what is wanted are ranks, which number the infrequent columns.
    """
    before = tl.zeros(wanted.shape, tl.int32)
    last = before + size
    for _ in range(0, num_steps):
        middle = (before + last) // 2
        frequent = tl.load(ids_ptr + middle, mask=before < last, other=0).to(tl.int32)
        is_before = (frequent - middle <= wanted) if RANKED else (frequent < wanted)
        is_before &= before < last
        last = tl.where(is_before, last, middle)
        before = tl.where(is_before, middle + 1, before)
    return before


def most_labelled(x: Operands, ids_F: torch.Tensor, zeros_V: torch.Tensor, num_words: int) -> torch.Tensor:
    """Fill ids_F with the columns that are labels most often, ascending, of equals the first; fill zeros_V with 0.

    Returns:
        [W] int32: words with a bit set for each frequent column, like a row of ``lse.Marks``.
    """
    num_tokens, num_valid = x.num_tokens, x.num_valid
    counts = torch.zeros(num_valid + num_tokens, dtype=torch.int32, device=x.ids.device)
    words_W = torch.empty(num_words, dtype=torch.int32, device=x.ids.device)
    _count_labels_kernel[(cdiv(num_tokens, 1024),)](x.ids, counts, num_tokens, x.start, num_valid, BLOCK_N=1024)
    _most_labelled_kernel[(cdiv(32 * num_words, 4096),)](
        counts, ids_F, words_W, zeros_V,
        num_tokens, num_valid, ids_F.shape[0], num_words, num_tokens.bit_length(),
        BLOCK_V=4096, num_warps=8,
    )
    return words_W


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


@kernel("count_ptr", "ids_ptr", "words_ptr", "zeros_ptr")
def _most_labelled_kernel(
    count_ptr,  # in: [V + N] int32, as ``_count_labels_kernel`` leaves it; the last N descend
    ids_ptr,  # out: [F] int64
    words_ptr,  # out: [W] int32
    zeros_ptr,  # out: [V] int32
    num_tokens,
    num_valid,
    size,
    num_words,
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
        offs_v = first + tl.arange(0, BLOCK_V)
        count = tl.load(count_ptr + offs_v, mask=offs_v < num_valid, other=-1)
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
    bits = tl.where(chosen, 1 << (offs_v % 32), 0)
    words = tl.sum(tl.reshape(bits, (BLOCK_V // 32, 32)), 1).to(tl.int32)
    offs_w = tl.program_id(0) * (BLOCK_V // 32) + tl.arange(0, BLOCK_V // 32)
    tl.store(words_ptr + offs_w, words, mask=offs_w < num_words)
