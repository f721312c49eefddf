"""Lists: for each token the infrequent columns that the filter keeps, and the gradients of these columns.

Forward marks columns (``lse.py``) and ``list_columns`` turns the marks into lists. In backward the log-sum-exp and the
coefficients are known. ``decide`` then decides for each token whether its list is complete, and from which logit on to keep:

    kept: |P| p_j >= eps |LABEL|, that is z_j >= threshold = LSE + log(eps |LABEL| / |P|)     (eps alone if LABEL or P is 0)

A list holds all logits above ``bound + log eps`` minus ``log SLACK``, so it can be used unless the threshold is lower. A short
list is kept whole: its rows of the weight have to be read in any case. A list cannot be used if it is too long, or if a number
of the token is not finite. Tokens without a usable list are *unserved*: their gradient is exact. All tokens are if the lists
overflow (``memory.list_capacity``). ``listed_gradients`` computes, for the listed columns j of a token,

    z_j = hidden . weight_j        g_j = scale * slope * (P p_j + LABEL [j = label])

Latency and memory traffic take the time, not arithmetic. A program handles a block of one token's columns, whose rows
of the weight it has in registers. If the block is the whole list, it also sums g_j weight_j, the list's part of d_hidden.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from cce_dist.kernels import Operands, Rows, Softmax
from cce_dist.kernels.blocks import kernel
from cce_dist.kernels.d_hidden import Sum
from cce_dist.kernels.filter.frequent import Frequent
from cce_dist.kernels.head import logits_of, slope_of, token_factors
from cce_dist.kernels.tiles import stages_of_rows
from cce_dist.kernels.waves import cdiv

SLACK = 1.125  # factor by which lists reach below the threshold of the bound: enough for a usual z-loss
LONGEST = 16384  # most columns of a list
BLOCK = 256  # listed columns per program
WARP_ELEMENTS = 1024  # elements of the weight's rows that a warp holds at a time: more registers would allow fewer programs
# With this limit four programs of 4 warps share a multiprocessor, without it three. ROCm's compiler has no such limit.
REGISTERS = {} if torch.version.hip else {"maxnreg": 128}
FARTHEST = tl.constexpr(30.0)  # most nats between bound and LSE: beyond HEADROOM of lse.py, marks are not valid


class Lists(NamedTuple):
    """The lists of all tokens, which forward saves for backward.

    Attributes:
        bound_3N: [3, N] fp32: the bound of the log-sum-exp; the sum of exp over infrequent columns, times the softcap's slope,
            relative to the shard's maximum; the shard's maximum.
        columns_M: [M] int32: the columns of all lists. Each token's columns are contiguous and ascending.
        begin_N: [N] int32: index of each token's first column. The order of tokens may differ from run to run.
        count_N: [N] int32: number of columns of each token, even if they do not fit.
        ids_F: [F] int64: the frequent columns.
    """

    bound_3N: torch.Tensor
    columns_M: torch.Tensor
    begin_N: torch.Tensor
    count_N: torch.Tensor
    ids_F: torch.Tensor


def list_columns(
    words_RW: torch.Tensor, frequent: Frequent, x: Operands, rows: Rows, lists: Lists, taken: torch.Tensor
) -> None:
    """Write marked infrequent columns, and the label if it is infrequent, to the lists of the group's tokens, ascending.

    The count is 0 for tokens without a label. ``taken``, [1] int64, is the number of list elements that earlier groups used.
    """
    num_rows, num_words = words_RW.shape
    aligned = min(16, num_words & -num_words)
    _list_columns_kernel[(num_rows,)](
        words_RW, frequent.slot_V, x.ids, rows.index, rows.num_labelled, taken,
        lists.columns_M, lists.begin_N, lists.count_N,
        num_words // aligned, lists.columns_M.shape[0], x.start, x.num_valid,
        BLOCK_W=512, ALIGNED=aligned, num_warps=1,
    )


@triton.jit
def _bits_set(word):
    """Return the number of bits set in each uint32."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _listed_words(words_ptr, frequent_words_ptr, label_word, label_bit, first, num_words, BLOCK_W: tl.constexpr):
    """Load words of a row's marks, set the label's bit, and clear the bits of frequent columns."""
    offs_w = first + tl.arange(0, BLOCK_W)
    in_w = offs_w < num_words
    word = tl.load(words_ptr + offs_w, mask=in_w, other=0).to(tl.uint32, bitcast=True)
    frequent = tl.load(frequent_words_ptr + offs_w, mask=in_w, other=0).to(tl.uint32, bitcast=True)
    word |= tl.where(offs_w == label_word, label_bit, 0)
    return word ^ (word & frequent)


@kernel("words_ptr", "slot_ptr", "taken_ptr", "columns_ptr")
def _list_columns_kernel(
    words_ptr,  # in: [R, W] int32
    slot_ptr,  # in: [33 W] int32, as in ``Frequent``; the words are read
    labels_ptr,  # in: [N] int64
    index_ptr,  # in: [R] int32
    num_labelled_ptr,  # in: [1] int32
    taken_ptr,  # in, out: [1] int64
    columns_ptr,  # out: [M] int32
    begin_ptr,  # out: [N] int32
    count_ptr,  # out: [N] int32
    num_units,  # number of units of ALIGNED words
    capacity,
    start,
    num_valid,
    BLOCK_W: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    row = tl.program_id(0)
    token = tl.load(index_ptr + row).to(tl.int64)
    if row >= tl.load(num_labelled_ptr):
        tl.store(begin_ptr + token, 0)
        tl.store(count_ptr + token, 0)
        return
    label = tl.load(labels_ptr + token) - start
    here = (label >= 0) & (label < num_valid)
    label_word = tl.where(here, label // 32, -1)
    label_bit = tl.full((), 1, tl.uint32) << (tl.where(here, label, 0) % 32).to(tl.uint32)
    num_words = num_units * ALIGNED  # a known multiple, so the compiler can use wide loads
    words_ptr += row.to(tl.int64) * num_words
    frequent_words_ptr = slot_ptr + 32 * num_words

    # Count the row's columns, [BLOCK_W] words at a time.
    counts = tl.zeros((BLOCK_W,), tl.int32)
    for first in range(0, num_words, BLOCK_W):
        counts += _bits_set(
            _listed_words(words_ptr, frequent_words_ptr, label_word, label_bit, first, num_words, BLOCK_W)
        )
    count = tl.sum(counts, 0)
    # Where a list is stored depends on which program comes first. Nothing else does: backward takes lists in token order.
    begin = tl.atomic_add(taken_ptr, count.to(tl.int64), sem="relaxed")
    stored = tl.minimum(tl.maximum(capacity - begin, 0), count).to(tl.int32)
    tl.store(begin_ptr + token, tl.minimum(begin, capacity).to(tl.int32))
    tl.store(count_ptr + token, count)
    columns_ptr += tl.minimum(begin, capacity)

    total = tl.zeros((), tl.int32)
    first = tl.zeros((), tl.int32)
    while total < stored:  # stop after the word with the last column
        word = _listed_words(words_ptr, frequent_words_ptr, label_word, label_bit, first, num_words, BLOCK_W)
        if tl.max(word, 0) > 0:
            counts = _bits_set(word)
            position = total + tl.cumsum(counts, 0) - counts
            total += tl.sum(counts, 0)
            # Store the column of one bit of every word at a time, lowest bits first, so that columns are ascending.
            while tl.max(word, 0) > 0:
                rest = word & (word - 1)
                column = (first + tl.arange(0, BLOCK_W)) * 32 + _bits_set((word ^ rest) - 1)
                tl.store(columns_ptr + position, column, mask=(word > 0) & (position < stored))
                position += (word > 0).to(tl.int32)
                word = rest
        first += BLOCK_W


class Decisions(NamedTuple):
    """How backward treats each labelled token: listed, which means that its list is used, or unserved.

    Attributes:
        listed_labels: [N] int64: the label if the token is listed, else -1.
        frequent_labels: [N] int64: position of a listed token's label among the frequent columns, else -1.
        index: [N] int32: the listed tokens in order, then the others.
        unserved: [N] int32: the unserved tokens in order; the rest is not written.
        ends_2N: [2, N] int32, for listed tokens: the end of the token's entries; the end of its blocks.
        numbers_3N: [3, N] fp32: the threshold, below which logits are dropped; the softmax mass of the shard's infrequent
            columns, times the softcap's slope; the reference, LSE minus log |P|, so that exp(z - reference) = |P| p.
        num_listed: [1] int32: number of listed tokens.
        num_unserved: [1] int32: number of unserved tokens.
        num_blocks: [1] int32: number of blocks of all tokens.
        block_token: int32: the token of each block. The entries of a token are cut into blocks of BLOCK.
        block: BLOCK.
    """

    listed_labels: torch.Tensor
    frequent_labels: torch.Tensor
    index: torch.Tensor
    unserved: torch.Tensor
    ends_2N: torch.Tensor
    numbers_3N: torch.Tensor
    num_listed: torch.Tensor
    num_unserved: torch.Tensor
    num_blocks: torch.Tensor
    block_token: torch.Tensor
    block: int

    @property
    def order(self) -> list[torch.Tensor]:
        """The compact order of the listed tokens."""
        return [self.index, self.num_listed]

    @property
    def unserved_order(self) -> list[torch.Tensor]:
        """The compact order of the unserved tokens."""
        return [self.unserved, self.num_unserved]


def decide(
    x: Operands, softmax: Softmax, coef_4N: torch.Tensor, lists: Lists, slot_V: torch.Tensor, eps: float
) -> Decisions:
    """Return the decisions. All tokens are unserved if the lists overflowed."""
    num_tokens, capacity = x.num_tokens, lists.columns_M.shape[0]

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=x.ids.device)

    how = Decisions(
        new(num_tokens, dtype=torch.int64), new(num_tokens, dtype=torch.int64), new(num_tokens), new(num_tokens),
        new(2, num_tokens), new(3, num_tokens, dtype=torch.float32),
        new(1), new(1), new(1), new(num_tokens + capacity // BLOCK), BLOCK,
    )
    _decide_kernel[(1,)](
        x.ids, softmax.max, softmax.log_sum, coef_4N, lists.bound_3N, lists.count_N, slot_V,
        *how[:-1],
        num_tokens, LONGEST, capacity, x.start, x.num_valid,
        math.log(eps), SLACK,
        ENTRIES=BLOCK, BLOCK=4096, num_warps=32,
    )
    return how


@triton.jit
def _served(
    max_ptr, log_sum_ptr, coef_ptr, bound_ptr, count_ptr, offs_n, in_n, num_tokens, longest, log_eps, slack, entries
):
    """Return whether each token's list can be used, its length, and the token's threshold, mass and reference."""
    stride = num_tokens.to(tl.int64)
    coef_p = tl.abs(tl.load(coef_ptr + offs_n, mask=in_n, other=0))
    coef_label = tl.abs(tl.load(coef_ptr + stride + offs_n, mask=in_n, other=0))
    bound = tl.load(bound_ptr + offs_n, mask=in_n, other=0)
    outside = tl.load(bound_ptr + stride + offs_n, mask=in_n, other=0)
    relative_to = tl.load(bound_ptr + 2 * stride + offs_n, mask=in_n, other=0)
    lse = tl.load(max_ptr + offs_n, mask=in_n, other=0) + tl.load(log_sum_ptr + offs_n, mask=in_n, other=0)
    count = tl.load(count_ptr + offs_n, mask=in_n, other=0)
    whole = (coef_p == 0) | (coef_label == 0)
    log_ratio = tl.where(whole, 0.0, tl.log(coef_label) - tl.log(coef_p))
    # Comparisons with NaN are false, too. The sum is finite only if all of its terms are.
    served = (count <= longest) & (lse - bound < FARTHEST) & (bound - lse - log_ratio <= tl.log(slack))
    served &= tl.abs(lse + bound + outside + relative_to + coef_p + coef_label) < float("inf")
    # All columns of a short list are kept: their rows are read anyway, to compute the logits.
    threshold = tl.where(count <= entries, bound - tl.log(slack), lse + log_ratio) + log_eps
    return served, count, threshold, outside * tl.exp(relative_to - lse), lse - tl.log(coef_p)


@kernel(
    "slot_ptr", "listed_labels_ptr", "frequent_labels_ptr", "index_ptr", "unserved_ptr", "ends_ptr", "out_ptr",
    "block_token_ptr",
)
def _decide_kernel(
    labels_ptr,  # in: [N] int64
    max_ptr,  # in: [N] fp32
    log_sum_ptr,  # in: [N] fp32
    coef_ptr,  # in: [4, N] fp32
    bound_ptr,  # in: [3, N] fp32: bound; sum over infrequent columns; reference of this sum
    count_ptr,  # in: [N] int32
    slot_ptr,  # in: [V] int32
    listed_labels_ptr,  # out: [N] int64
    frequent_labels_ptr,  # out: [N] int64
    index_ptr,  # out: [N] int32
    unserved_ptr,  # out: [N] int32
    ends_ptr,  # out: [2, N] int32: end of the entries; end of the blocks
    out_ptr,  # out: [3, N] fp32
    num_listed_ptr,  # out: [1] int32
    num_unserved_ptr,  # out: [1] int32
    num_blocks_ptr,  # out: [1] int32
    block_token_ptr,  # out: [blocks] int32
    num_tokens,
    longest,
    capacity,
    start,
    num_valid,
    log_eps,
    slack,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program, because positions of entries are running sums over the tokens. Forward stored the lists in any order: unless
    # all of them fit, it is not known which do.
    needed = tl.zeros((), tl.int64)
    for first in range(0, num_tokens, BLOCK):
        offs_n = first + tl.arange(0, BLOCK)
        needed += tl.sum(tl.load(count_ptr + offs_n, mask=offs_n < num_tokens, other=0).to(tl.int64), 0)

    stride = num_tokens.to(tl.int64)
    taken = tl.zeros((), tl.int32)
    num_listed = tl.zeros((), tl.int32)
    num_unserved = tl.zeros((), tl.int32)
    num_blocks = tl.zeros((), tl.int32)
    for first in range(0, num_tokens, BLOCK):
        offs_n = first + tl.arange(0, BLOCK)
        in_n = offs_n < num_tokens
        label = tl.load(labels_ptr + offs_n, mask=in_n, other=-1)
        served, count, threshold, mass, reference = _served(
            max_ptr, log_sum_ptr, coef_ptr, bound_ptr, count_ptr, offs_n, in_n, num_tokens, longest, log_eps, slack,
            ENTRIES,
        )
        tl.store(out_ptr + offs_n, threshold, mask=in_n)
        tl.store(out_ptr + stride + offs_n, mass, mask=in_n)
        tl.store(out_ptr + 2 * stride + offs_n, reference, mask=in_n)

        # tl.where, because Triton 3.9's interpreter takes no block & scalar of booleans.
        listed = tl.where(needed <= capacity, served & (label >= 0), False)
        unserved = ((label >= 0) & (listed == 0)).to(tl.int32)
        length = tl.where(listed, count, 0)
        tl.store(ends_ptr + offs_n, taken + tl.cumsum(length, 0), mask=in_n)
        taken += tl.sum(length, 0)

        tl.store(listed_labels_ptr + offs_n, tl.where(listed, label, -1), mask=in_n)
        here = listed & (label >= start) & (label - start < num_valid)
        slot = tl.load(slot_ptr + tl.where(here, label - start, 0), mask=here, other=0)
        tl.store(frequent_labels_ptr + offs_n, slot.to(tl.int64) - 1, mask=in_n)

        listed_before = num_listed + tl.cumsum(listed.to(tl.int32), 0) - listed.to(tl.int32)
        position = tl.where(listed, listed_before, num_tokens - 1 - (offs_n - listed_before))
        tl.store(index_ptr + position, offs_n, mask=in_n)
        num_listed += tl.sum(listed.to(tl.int32), 0)
        tl.store(unserved_ptr + num_unserved + tl.cumsum(unserved, 0) - unserved, offs_n, mask=unserved > 0)
        num_unserved += tl.sum(unserved, 0)

        blocks = (length + ENTRIES - 1) // ENTRIES
        block = num_blocks + tl.cumsum(blocks, 0)
        num_blocks += tl.sum(blocks, 0)
        tl.store(ends_ptr + stride + offs_n, block, mask=in_n)
        while tl.max(blocks, 0) > 0:
            tl.store(block_token_ptr + block - blocks, offs_n, mask=blocks > 0)
            blocks = tl.maximum(blocks - 1, 0)
    tl.store(num_listed_ptr, num_listed)
    tl.store(num_unserved_ptr, num_unserved)
    tl.store(num_blocks_ptr, num_blocks)


class Entries(NamedTuple):
    """The listed gradients of all tokens, in token order. Unused entries have the column ``num_valid``.

    Attributes:
        column: [M] int32.
        token: [M] int32.
        grad: [M] fp32.
    """

    column: torch.Tensor
    token: torch.Tensor
    grad: torch.Tensor


def new_entries(capacity: int, device: torch.device) -> Entries:
    """Allocate entries."""
    return Entries(
        torch.empty(capacity, dtype=torch.int32, device=device),
        torch.empty(capacity, dtype=torch.int32, device=device),
        torch.empty(capacity, dtype=torch.float32, device=device),
    )


def listed_gradients(
    x: Operands, softmax: Softmax, coef_4N: torch.Tensor, lists: Lists, how: Decisions, compensate: bool,
    entries: Entries, total: Sum | None,
) -> torch.Tensor:
    """Compute the gradients of listed columns, and the softmax mass that each listed token drops.

    A listed logit below backward's threshold is dropped; its entry gets the column ``num_valid``.

    Args:
        coef_4N: Coefficients as in ``cce_dist.kernels``; P and LABEL are read.
        compensate: Whether the control variate replaces dropped gradients.
        entries: out.
        total: out, or None: d_hidden of tokens whose list is one block is set to the list's part.

    Returns:
        Each token's factor on the control variate, scale * P * m (or 0), [N]; 0 if it is not listed.
    """
    num_tokens, hidden_size = x.hidden.shape
    most_blocks, device = how.block_token.shape[0], x.hidden.device
    factor_N = torch.empty(num_tokens, dtype=torch.float32, device=device)
    mass_B = torch.empty(most_blocks, dtype=torch.float32, device=device)
    block_d = triton.next_power_of_2(hidden_size)
    warps = 8 if block_d > 4096 else min(4, max(1, block_d // 256))
    block_k = min(8, max(1, warps * WARP_ELEMENTS // block_d))
    high_ND, low_ND = (None, None) if total is None else (total.high_ND, total.low_RD)
    # At least one program has no block. Programs without a block mark the unused entries.
    _listed_gradients_kernel[(most_blocks + 1,)](
        # in
        x.hidden, x.weight, x.head, x.ids, how.block_token, how.ends_2N, how.num_blocks,
        lists.columns_M, lists.begin_N, lists.count_N, how.numbers_3N, softmax.max, softmax.log_sum, coef_4N,
        # out
        mass_B, *entries, high_ND, low_ND,
        # sizes
        num_tokens, hidden_size, lists.columns_M.shape[0], x.start, x.num_valid,
        # options
        WANT_HIDDEN=total is not None, HAS_LOW=low_ND is not None,
        # tiles
        ENTRIES=BLOCK, BLOCK_K=block_k, BLOCK_D=block_d, STAGES=stages_of_rows(block_k * block_d * x.weight.itemsize),
        num_warps=warps, **REGISTERS,
    )
    _dropped_kernel[(cdiv(num_tokens, 128),)](
        mass_B, how.listed_labels, how.ends_2N, lists.count_N, how.numbers_3N, coef_4N,
        factor_N,
        num_tokens, x.head.multiplier,
        COMPENSATE=compensate, ENTRIES=BLOCK, BLOCK_N=128,
    )
    return factor_N


@kernel(
    "hidden_ptr", "weight_ptr", "columns_ptr", "entry_column_ptr", "entry_token_ptr", "entry_grad_ptr",
    "high_ptr", "low_ptr", "hidden_size",
)
def _listed_gradients_kernel(
    hidden_ptr,  # in: [N, D]
    weight_ptr,  # in: [V, D]
    head,  # in: Head
    labels_ptr,  # in: [N] int64
    block_token_ptr,  # in: [B] int32
    ends_ptr,  # in: [2, N] int32, as in ``Decisions``
    num_blocks_ptr,  # in: [1] int32
    columns_ptr,  # in: [M] int32
    begin_ptr,  # in: [N] int32
    count_ptr,  # in: [N] int32
    threshold_ptr,  # in: [N] fp32
    max_ptr,  # in: [N] fp32
    log_sum_ptr,  # in: [N] fp32
    coef_ptr,  # in: [4, N] fp32
    mass_ptr,  # out: [B] fp32: softmax mass of the block's columns that are kept
    entry_column_ptr,  # out: [M] int32
    entry_token_ptr,  # out: [M] int32
    entry_grad_ptr,  # out: [M] fp32
    high_ptr,  # out: [N, D]
    low_ptr,  # out: [N, D] bf16
    num_tokens,
    hidden_size,
    capacity,
    start,
    num_valid,
    WANT_HIDDEN: tl.constexpr,
    HAS_LOW: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    block = tl.program_id(0)
    num_blocks = tl.load(num_blocks_ptr)
    if block >= num_blocks:
        end = tl.load(ends_ptr + num_tokens - 1)  # entries after the last token's are unused
        step = (tl.num_programs(0) - num_blocks) * ENTRIES
        for first in range(end + (block - num_blocks) * ENTRIES, capacity, step):
            offs_m = first + tl.arange(0, ENTRIES)
            tl.store(entry_column_ptr + offs_m, tl.zeros((ENTRIES,), tl.int32) + num_valid, mask=offs_m < capacity)
        return
    token = tl.load(block_token_ptr + block).to(tl.int64)
    count = tl.load(count_ptr + token)
    number = tl.cdiv(count, ENTRIES) - (tl.load(ends_ptr + num_tokens + token) - block)
    columns_ptr += tl.load(begin_ptr + token)
    begin = tl.load(ends_ptr + token) - count
    factors = token_factors(head, token, True)
    before, after = factors
    coef_p = tl.load(coef_ptr + token) * before
    coef_label = tl.load(coef_ptr + num_tokens.to(tl.int64) + token) * before
    row_max = tl.load(max_ptr + token)
    log_sum = tl.load(log_sum_ptr + token)
    threshold = tl.load(threshold_ptr + token)
    label = tl.load(labels_ptr + token) - start

    offs_d = tl.arange(0, BLOCK_D)
    in_d = offs_d < hidden_size
    h = tl.load(hidden_ptr + token * hidden_size + offs_d, mask=in_d, other=0).to(tl.float32)
    d_hidden = tl.zeros((BLOCK_D,), tl.float32)
    listed = tl.zeros((BLOCK_K,), tl.float32)
    stop = tl.minimum(count, (number + 1) * ENTRIES)
    # Logits z [BLOCK_K] = weight rows [BLOCK_K, BLOCK_D] @ h [BLOCK_D], and their gradients; the next rows load meanwhile.
    for first in tl.range(number * ENTRIES, stop, BLOCK_K, num_stages=STAGES):
        offs_k = first + tl.arange(0, BLOCK_K)
        in_k = offs_k < stop
        column = tl.load(columns_ptr + offs_k, mask=in_k, other=0)
        where = weight_ptr + column.to(tl.int64)[:, None] * hidden_size + offs_d[None, :]
        w = tl.load(where, mask=in_k[:, None] & in_d[None, :], other=0)
        z = logits_of(tl.sum(w.to(tl.float32) * h[None, :], 1), column, in_k, head, factors, False)
        slope = tl.full((BLOCK_K,), 1.0, tl.float32)
        if head.softcap is not None:
            slope = slope_of(z, head, after)
        is_label = column == label
        kept = in_k & ((z >= threshold) | is_label)
        p = tl.where(kept, tl.exp((z - row_max) - log_sum) * slope, 0.0)
        listed += p
        grad = coef_p * p + tl.where(is_label, coef_label * slope, 0.0)
        tl.store(entry_column_ptr + begin + offs_k, tl.where(kept, column, num_valid), mask=in_k)
        tl.store(entry_token_ptr + begin + offs_k, tl.zeros_like(column) + token.to(tl.int32), mask=in_k)
        tl.store(entry_grad_ptr + begin + offs_k, grad, mask=in_k)
        if WANT_HIDDEN:
            d_hidden += tl.sum(tl.where(kept, grad, 0.0)[:, None] * w.to(tl.float32), 0)
    if WANT_HIDDEN:
        alone = tl.where(count <= ENTRIES, in_d, False)
        high = d_hidden.to(high_ptr.dtype.element_ty)
        tl.store(high_ptr + token * hidden_size + offs_d, high, mask=alone)
        if HAS_LOW:
            low = (d_hidden - high.to(tl.float32)).to(low_ptr.dtype.element_ty)
            tl.store(low_ptr + token * hidden_size + offs_d, low, mask=alone)
    tl.store(mass_ptr + block, tl.sum(listed, 0))


@kernel("factor_ptr")
def _dropped_kernel(
    mass_ptr,  # in: [B] fp32
    labels_ptr,  # in: [N] int64: negative if the token is not listed
    ends_ptr,  # in: [2, N] int32, as in ``Decisions``
    count_ptr,  # in: [N] int32
    numbers_ptr,  # in: [3, N] fp32, as in ``Decisions``; the second row is read
    coef_ptr,  # in: [4, N] fp32
    factor_ptr,  # out: [N] fp32
    num_tokens,
    logit_scale,
    COMPENSATE: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = offs_n < num_tokens
    live = tl.load(labels_ptr + offs_n, mask=in_n, other=-1) >= 0
    count = tl.load(count_ptr + offs_n, mask=live, other=0)
    stride = num_tokens.to(tl.int64)
    last = tl.load(ends_ptr + stride + offs_n, mask=live, other=0)
    block = last - (count + ENTRIES - 1) // ENTRIES
    dropped = tl.load(numbers_ptr + stride + offs_n, mask=live, other=0)
    kept = tl.zeros((BLOCK_N,), tl.float32)
    # Sum the masses of each token's blocks.
    for _ in range(0, tl.max(last - block, 0)):
        kept += tl.load(mass_ptr + block, mask=block < last, other=0)
        block += 1
    dropped = tl.maximum(dropped - kept, 0.0)
    coef_p = tl.load(coef_ptr + offs_n, mask=live, other=0) * logit_scale
    dropped *= coef_p if COMPENSATE else 0.0
    tl.store(factor_ptr + offs_n, dropped, mask=in_n)
