"""Lists: for each token the infrequent columns that the filter keeps, and the gradients of these columns.

Forward marks columns (``lse.py``), and ``list_columns`` turns the marks into lists of at most L columns, in fixed slots. In
backward the log-sum-exp and the coefficients are known, so the logits to keep are known, too:

    kept: |P| p_j >= eps |LABEL|, that is z_j >= LSE + log(eps |LABEL| / |P|)     (eps alone if LABEL or P is 0)

A list holds all logits from its *threshold* ``bound + log eps - log SLACK`` on. It can be used unless backward needs lower
ones. It is then used whole: its rows of the weight have to be read in any case. A token whose list cannot be used, because it
is too long or a number of the token is not finite, is *unserved*: its gradient is exact (``unserved.py``).

``listed_gradients`` computes, for the listed columns j of a token,

    z_j = hidden . weight_j        g_j = scale * slope * (P p_j + LABEL [j = label])

and sums g_j weight_j, the list's part of d_hidden. Latency and memory traffic take the time, not arithmetic. The gradients
become *entries*, which d_weight needs by column: forward has counted the entries of each column, so each gets a range, in which
atomic operations give places. ``d_weight.py`` then sorts each range by token, so the order of the atomic operations does not
matter.
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
WARP_ELEMENTS = 1024  # elements of the weight's rows that a warp holds at a time: more registers would allow fewer programs
# With this limit four programs of 4 warps share a multiprocessor, without it three. ROCm's compiler has no such limit.
REGISTERS = {} if torch.version.hip else {"maxnreg": 128}
FARTHEST = tl.constexpr(30.0)  # most nats between bound and LSE: beyond HEADROOM of lse.py, marks are not valid


class Lists(NamedTuple):
    """What forward saves for backward.

    Attributes:
        bound_3N: [3, N] fp32: the bound of the log-sum-exp; the sum of exp over infrequent columns, times the softcap's slope,
            relative to the shard's maximum; the shard's maximum.
        columns_NL: [N, L] int32: the columns of each token, ascending.
        count_N: [N] int32: number of columns of each token. If it exceeds L, there are no columns.
        count_V: [V] int32: number of lists that hold each column.
        ids_F: [F] int64: the frequent columns.
        index_N: [N] int32: the compact order of the tokens, as ``tokens.compact`` returns it.
        num_kept: [1] int32: number of labelled tokens.
    """

    bound_3N: torch.Tensor
    columns_NL: torch.Tensor
    count_N: torch.Tensor
    count_V: torch.Tensor
    ids_F: torch.Tensor
    index_N: torch.Tensor
    num_kept: torch.Tensor


def list_columns(words_RW: torch.Tensor, frequent: Frequent, x: Operands, rows: Rows, lists: Lists) -> None:
    """Write marked infrequent columns, and the label if it is infrequent, to the lists of the group's tokens, and count them.

    The count is 0 for tokens without a label.
    """
    num_rows, num_words = words_RW.shape
    aligned = min(16, num_words & -num_words)
    _list_columns_kernel[(num_rows,)](
        words_RW, frequent.slot_V, x.ids, rows.index, rows.num_kept,
        lists.columns_NL, lists.count_N, lists.count_V,
        num_words // aligned, lists.columns_NL.shape[1], x.start, x.num_valid,
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
def _listed_words(
    words_ptr, frequent_words_ptr, label_word, label_bit, first, num_words, num_valid, BLOCK_W: tl.constexpr
):
    """Load words of a row's marks, set the label's bit, and clear the bits of frequent columns and past the last column."""
    offs_w = first + tl.arange(0, BLOCK_W)
    in_w = offs_w < num_words
    word = tl.load(words_ptr + offs_w, mask=in_w, other=0).to(tl.uint32, bitcast=True)
    frequent = tl.load(frequent_words_ptr + offs_w, mask=in_w, other=0).to(tl.uint32, bitcast=True)
    word |= tl.where(offs_w == label_word, label_bit, 0)
    # Marks of a token with NaN are set past the last column, too.
    left = tl.minimum(tl.maximum(num_valid - 32 * offs_w, 0), 32).to(tl.int64)
    valid = ((tl.full((BLOCK_W,), 1, tl.int64) << left) - 1).to(tl.uint32)
    word &= valid
    return word ^ (word & frequent)


@kernel("words_ptr", "slot_ptr", "columns_ptr")
def _list_columns_kernel(
    words_ptr,  # in: [R, W] int32
    slot_ptr,  # in: [33 W] int32, as in ``Frequent``; the words are read
    labels_ptr,  # in: [N] int64
    index_ptr,  # in: [R] int32
    num_kept_ptr,  # in: [1] int32
    columns_ptr,  # out: [N, L] int32
    count_ptr,  # out: [N] int32
    column_count_ptr,  # in, out: [V] int32
    num_units,  # number of units of ALIGNED words
    num_slots,
    start,
    num_valid,
    BLOCK_W: tl.constexpr,
    ALIGNED: tl.constexpr,
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
    num_words = num_units * ALIGNED  # a known multiple, so the compiler can use wide loads
    words_ptr += row.to(tl.int64) * num_words
    frequent_words_ptr = slot_ptr + 32 * num_words

    # Count the row's columns, [BLOCK_W] words at a time.
    counts = tl.zeros((BLOCK_W,), tl.int32)
    for first in range(0, num_words, BLOCK_W):
        word = _listed_words(words_ptr, frequent_words_ptr, label_word, label_bit, first, num_words, num_valid, BLOCK_W)
        counts += _bits_set(word)
    count = tl.sum(counts, 0)
    tl.store(count_ptr + token, count)
    columns_ptr += token * num_slots

    stored = tl.where(count <= num_slots, count, 0)
    total = tl.zeros((), tl.int32)
    first = tl.zeros((), tl.int32)
    while total < stored:  # stop after the word with the last column
        word = _listed_words(words_ptr, frequent_words_ptr, label_word, label_bit, first, num_words, num_valid, BLOCK_W)
        if tl.max(word, 0) > 0:
            counts = _bits_set(word)
            position = total + tl.cumsum(counts, 0) - counts
            total += tl.sum(counts, 0)
            # Store the column of one bit of every word at a time, lowest bits first, so that columns are ascending.
            while tl.max(word, 0) > 0:
                rest = word & (word - 1)
                column = (first + tl.arange(0, BLOCK_W)) * 32 + _bits_set((word ^ rest) - 1)
                tl.store(columns_ptr + position, column, mask=word > 0)
                tl.atomic_add(column_count_ptr + column, 1, mask=word > 0, sem="relaxed")
                position += (word > 0).to(tl.int32)
                word = rest
        first += BLOCK_W


class Entries(NamedTuple):
    """The listed gradients of all tokens by column.

    Attributes:
        first_V: [V + 1] int32: index of each column's first entry. Their number may be smaller than the range's length.
        end_V: [V] int32: end of each column's entries.
        entry_3M: [3, M] int32: column, token, and bits of the fp32 gradient, in any order within a column.
        sorted_2M: [2, M] int32: token and bits of the gradient, ascending by token within a column (``d_weight.py``).
    """

    first_V: torch.Tensor
    end_V: torch.Tensor
    entry_3M: torch.Tensor
    sorted_2M: torch.Tensor


class Tokens(NamedTuple):
    """How backward treats each token.

    Attributes:
        coef_4N: [4, N] fp32: P and LABEL as in ``cce_dist.kernels``, 0 unless the token's list is used; zeros.
        numbers_3N: [3, N] fp32: the threshold below which logits are dropped; the reference, LSE minus log |P|, so that
            exp(z - reference) = |P| p; the factor on the control variate, scale * P * dropped mass (or 0).
        frequent_labels: [N] int64: position of the label among the frequent columns, else -1.
        state_N: [N] int8: 1 for unserved tokens, 2 for tokens whose list is used, else 0.
        unserved: [N] int32: the unserved tokens in order; the rest is not written.
        counters_5: [5] int32. 0 and 1: zeros, for ``unserved.py``. 2: number of unserved tokens. 3: number of tokens whose list
            is used. 4: number of labelled tokens, or 0 if the list of none is used.
    """

    coef_4N: torch.Tensor
    numbers_3N: torch.Tensor
    frequent_labels: torch.Tensor
    state_N: torch.Tensor
    unserved: torch.Tensor
    counters_5: torch.Tensor


def begin_backward(lists: Lists, num_valid: int, capacity: int) -> tuple[Entries, Tokens]:
    """Allocate entries and decisions; give each column its range of entries, and set the counters to 0."""
    device, num_tokens = lists.count_N.device, lists.count_N.shape[0]

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    entries = Entries(new(num_valid + 1), new(num_valid), new(3, capacity), new(2, capacity))
    tokens = Tokens(
        new(4, num_tokens, dtype=torch.float32), new(3, num_tokens, dtype=torch.float32),
        new(num_tokens, dtype=torch.int64), new(num_tokens, dtype=torch.int8), new(num_tokens), new(5),
    )
    _begin_kernel[(cdiv(num_valid + 1, 4096),)](
        lists.count_V, entries.first_V, entries.end_V, tokens.counters_5, num_valid, COUNTERS=8, BLOCK=4096, num_warps=8
    )
    return entries, tokens


@kernel("count_ptr", "first_ptr", "end_ptr")
def _begin_kernel(
    count_ptr,  # in: [V] int32
    first_ptr,  # out: [V + 1] int32
    end_ptr,  # out: [V] int32: the same numbers, from which places are taken
    counter_ptr,  # out: [5] int32: zeros
    num_valid,
    COUNTERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if tl.program_id(0) == 0:
        offs_c = tl.arange(0, COUNTERS)
        tl.store(counter_ptr + offs_c, tl.zeros_like(offs_c), mask=offs_c < 5)
    # Each program adds up the counts before its own columns.
    before = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, tl.program_id(0) * BLOCK, BLOCK):
        before += tl.load(count_ptr + first + tl.arange(0, BLOCK))
    offs_v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(count_ptr + offs_v, mask=offs_v < num_valid, other=0)
    place = tl.sum(before, 0) + tl.cumsum(count, 0) - count
    tl.store(first_ptr + offs_v, place, mask=offs_v <= num_valid)
    tl.store(end_ptr + offs_v, place, mask=offs_v < num_valid)


def listed_gradients(
    x: Operands, softmax: Softmax, coef_4N: torch.Tensor, lists: Lists, entries: Entries, tokens: Tokens, slot_V: torch.Tensor,
    total: Sum | None, eps: float, compensate: bool,
) -> None:
    """Decide how each token is treated; compute its entries, its part of d_hidden, and the softmax mass that it drops.

    Args:
        coef_4N: Coefficients as in ``cce_dist.kernels``; P and LABEL are read.
        entries: ``end_V`` is changed, and ``entry_3M`` is written.
        tokens: out.
        total: out, or None: d_hidden, which is 0 where the token has no label. Rows of unserved tokens are not written.
        compensate: Whether the control variate replaces dropped gradients.
    """
    num_tokens, hidden_size = x.hidden.shape
    block_d = triton.next_power_of_2(hidden_size)
    warps = 8 if block_d > 4096 else min(4, max(1, block_d // 256))
    block_k = min(8, max(1, warps * WARP_ELEMENTS // block_d))
    high_ND, low_ND = (None, None) if total is None else (total.high_ND, total.low_RD)
    _listed_gradients_kernel[(num_tokens,)](
        # in
        x.hidden, x.weight, x.head, x.ids, softmax.max, softmax.log_sum, coef_4N, lists.bound_3N, lists.columns_NL,
        lists.count_N, entries.first_V, slot_V,
        # in, out
        entries.end_V,
        # out
        entries.entry_3M, *tokens[:4], tokens.counters_5, high_ND, low_ND,
        # sizes
        num_tokens, hidden_size, lists.columns_NL.shape[1], entries.entry_3M.shape[1], x.start, x.num_valid,
        math.log(eps) - math.log(SLACK), math.log(SLACK), x.head.multiplier if compensate else 0.0,
        # tiles
        BLOCK_K=block_k, BLOCK_D=block_d, STAGES=stages_of_rows(block_k * block_d * x.weight.itemsize), num_warps=warps,
        **REGISTERS,
    )


@kernel("hidden_ptr", "weight_ptr", "columns_ptr", "entry_ptr", "high_ptr", "low_ptr", "hidden_size")
def _listed_gradients_kernel(
    hidden_ptr,  # in: [N, D]
    weight_ptr,  # in: [V, D]
    head,  # in: Head
    labels_ptr,  # in: [N] int64
    max_ptr,  # in: [N] fp32
    log_sum_ptr,  # in: [N] fp32
    coef_ptr,  # in: [4, N] fp32
    bound_ptr,  # in: [3, N] fp32
    columns_ptr,  # in: [N, L] int32
    count_ptr,  # in: [N] int32
    first_ptr,  # in: [V + 1] int32; the last number is read
    slot_ptr,  # in: [V] int32
    end_ptr,  # in, out: [V] int32
    entry_ptr,  # out: [3, M] int32
    served_coef_ptr,  # out: [4, N] fp32
    number_ptr,  # out: [3, N] fp32
    frequent_label_ptr,  # out: [N] int64
    state_ptr,  # out: [N] int8
    counter_ptr,  # in, out: [5] int32; the third and the fourth are added to
    high_ptr,  # out: [N, D], or None
    low_ptr,  # out: [N, D] bf16, or None
    num_tokens,
    hidden_size,
    num_slots,
    capacity,
    start,
    num_valid,
    log_eps,
    log_slack,
    compensation,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    plane = num_tokens.to(tl.int64)
    label = tl.load(labels_ptr + token)
    live = label >= 0
    label -= start
    coef_p = tl.load(coef_ptr + token)
    coef_label = tl.load(coef_ptr + plane + token)
    row_max = tl.load(max_ptr + token)
    log_sum = tl.load(log_sum_ptr + token)
    lse = row_max + log_sum
    bound = tl.load(bound_ptr + token)
    outside = tl.load(bound_ptr + plane + token)
    relative_to = tl.load(bound_ptr + 2 * plane + token)
    count = tl.load(count_ptr + token)
    is_whole = (coef_p == 0) | (coef_label == 0)
    log_ratio = tl.where(is_whole, 0.0, tl.log(tl.abs(coef_label)) - tl.log(tl.abs(coef_p)))
    # Comparisons with NaN are false, too. The sum is finite only if all of its terms are.
    served = live & (count <= num_slots) & (tl.load(first_ptr + num_valid) <= capacity)
    served &= (lse - bound < FARTHEST) & (bound - lse - log_ratio <= log_slack)
    served &= tl.abs(lse + bound + outside + relative_to + tl.abs(coef_p) + tl.abs(coef_label)) < float("inf")
    coef_p = tl.where(served, coef_p, 0.0)
    coef_label = tl.where(served, coef_label, 0.0)

    factors = token_factors(head, token, True)
    before, after = factors
    offs_d = tl.arange(0, BLOCK_D)
    in_d = offs_d < hidden_size
    h = tl.load(hidden_ptr + token * hidden_size + offs_d, mask=tl.where(served, in_d, False), other=0).to(tl.float32)
    d_hidden = tl.zeros((BLOCK_D,), tl.float32)
    listed = tl.zeros((BLOCK_K,), tl.float32)
    stop = tl.where(served, count, 0)
    # Logits z [BLOCK_K] = weight rows [BLOCK_K, BLOCK_D] @ h [BLOCK_D], and their gradients; the next rows load meanwhile.
    for first in tl.range(0, stop, BLOCK_K, num_stages=STAGES):
        offs_k = first + tl.arange(0, BLOCK_K)
        in_k = offs_k < stop
        column = tl.load(columns_ptr + token * num_slots + offs_k, mask=in_k, other=0)
        where = weight_ptr + column.to(tl.int64)[:, None] * hidden_size + offs_d[None, :]
        w = tl.load(where, mask=in_k[:, None] & in_d[None, :], other=0)
        z = logits_of(tl.sum(w.to(tl.float32) * h[None, :], 1), column, in_k, head, factors, False)
        slope = tl.full((BLOCK_K,), 1.0, tl.float32)
        if head.softcap is not None:
            slope = slope_of(z, head, after)
        p = tl.where(in_k, tl.exp((z - row_max) - log_sum) * slope, 0.0)
        listed += p
        grad = before * (coef_p * p + tl.where(in_k & (column == label), coef_label * slope, 0.0))
        place = tl.atomic_add(end_ptr + column, 1, mask=in_k, sem="relaxed")
        tl.store(entry_ptr + place, column, mask=in_k)
        tl.store(entry_ptr + capacity + place, tl.zeros_like(column) + token.to(tl.int32), mask=in_k)
        tl.store(entry_ptr + 2 * capacity.to(tl.int64) + place, grad.to(tl.int32, bitcast=True), mask=in_k)
        if high_ptr is not None:
            d_hidden += tl.sum(grad[:, None] * w.to(tl.float32), 0)
    if high_ptr is not None:
        written = tl.where(served | (live == 0), in_d, False)
        high = d_hidden.to(high_ptr.dtype.element_ty)
        tl.store(high_ptr + token * hidden_size + offs_d, high, mask=written)
        if low_ptr is not None:
            low = (d_hidden - high.to(tl.float32)).to(low_ptr.dtype.element_ty)
            tl.store(low_ptr + token * hidden_size + offs_d, low, mask=written)
    dropped = tl.maximum(outside * tl.exp(relative_to - lse) - tl.sum(listed, 0), 0.0)
    tl.store(served_coef_ptr + token, coef_p)
    tl.store(served_coef_ptr + plane + token, coef_label)
    tl.store(served_coef_ptr + 2 * plane + token, 0.0)
    tl.store(served_coef_ptr + 3 * plane + token, 0.0)
    tl.store(number_ptr + token, bound + log_eps)
    tl.store(number_ptr + plane + token, lse - tl.log(tl.abs(coef_p)))
    tl.store(number_ptr + 2 * plane + token, tl.where(served, dropped * coef_p * compensation, 0.0))
    here = served & (label >= 0) & (label < num_valid)
    slot = tl.load(slot_ptr + tl.where(here, label, 0), mask=here, other=0)
    tl.store(frequent_label_ptr + token, slot.to(tl.int64) - 1)
    tl.store(state_ptr + token, tl.where(served, 2, tl.where(live, 1, 0)).to(tl.int8))
    tl.atomic_add(counter_ptr + tl.where(served, 3, 2), 1, mask=live, sem="relaxed")


def collect_unserved(lists: Lists, tokens: Tokens) -> None:
    """Write the unserved tokens in order, and how many rows the filter's own products have."""
    num_tokens = tokens.state_N.shape[0]
    _collect_kernel[(1,)](
        tokens.state_N, lists.num_kept, tokens.unserved, tokens.counters_5, num_tokens, BLOCK=8192, num_warps=16
    )


@kernel("state_ptr", "unserved_ptr")
def _collect_kernel(
    state_ptr,  # in: [N] int8
    num_kept_ptr,  # in: [1] int32
    unserved_ptr,  # out: [N] int32
    counter_ptr,  # in, out: [5] int32
    num_tokens,
    BLOCK: tl.constexpr,
):
    tl.store(counter_ptr + 4, tl.where(tl.load(counter_ptr + 3) > 0, tl.load(num_kept_ptr), 0))
    taken = tl.zeros((), tl.int32)
    for first in range(0, tl.where(tl.load(counter_ptr + 2) > 0, num_tokens, 0), BLOCK):
        offs_n = first + tl.arange(0, BLOCK)
        is_unserved = (tl.load(state_ptr + offs_n, mask=offs_n < num_tokens, other=0) == 1).to(tl.int32)
        tl.store(unserved_ptr + taken + tl.cumsum(is_unserved, 0) - is_unserved, offs_n, mask=is_unserved > 0)
        taken += tl.sum(is_unserved, 0)
