"""Lists: for each token the infrequent columns that the filter keeps, and the gradients of these columns.

Forward marks columns (``lse.py``), and ``list_columns`` turns the marks into lists of at most L columns, in fixed slots. In
backward the log-sum-exp and the coefficients are known, so the logits to keep are known, too:

    kept: |P| p_j >= eps |LABEL|, that is z_j >= LSE + log(eps |LABEL| / |P|)     (eps alone if LABEL or P is 0)

A list holds all logits from its *threshold* ``bound + log eps - log SLACK`` on. Where the bound was so low that there are more
than L, the shard's own log-sum-exp, a lower bound, too, takes its place. A list can be used unless backward needs lower logits.
It is then used whole: its rows of the weight have to be read in any case. ``decide`` finds the tokens whose list cannot be
used. They are *unserved*: the exact kernels compute their gradient. ``listed_gradients`` computes, for the listed columns j of
each other token,

    z_j = hidden . weight_j        g_j = scale * slope * (P p_j + LABEL [j = label])

and sums g_j weight_j, the list's part of d_hidden, with rows of the weight in registers.

d_weight needs the gradients by column. Forward has counted the lists that hold each column, so each column has a range of
places, which the tokens take by an atomic counter, in any order. ``d_weight.py`` then sorts each range by token.
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
from cce_dist.kernels.filter.bound import Bound, num_before
from cce_dist.kernels.head import logits_of, slope_of, token_factors
from cce_dist.kernels.tiles import cdiv, stages_of_rows

SLACK = 1.125  # factor by which lists reach below the threshold of the bound: enough for a usual z-loss
WARP_ELEMENTS = 1024  # elements of the weight's rows that a warp holds at a time: more registers would allow fewer programs
# With this limit four programs of 4 warps share a multiprocessor, without it three. ROCm's compiler has no such limit.
REGISTERS = {} if torch.version.hip else {"maxnreg": 128}
NO_ROOM = tl.constexpr(0x7FFFFFFF)  # count of a list whose columns fit nowhere
FARTHEST = tl.constexpr(30.0)  # most nats between bound and LSE: beyond HEADROOM of lse.py, marks are not valid


class Lists(NamedTuple):
    """The lists of all tokens, which forward saves for backward.

    Attributes:
        bound_3N: [3, N] fp32: the bound of the log-sum-exp; the sum of exp over infrequent columns, times the softcap's slope,
            relative to the shard's maximum; the shard's maximum.
        columns_NL: [N, L] int32: the columns of each token, ascending; not used if the token needs more than L.
        count_V: [V] int32: number of lists that hold each column, counting the first L columns of lists that are too long.
        count_N: [N] int32: number of columns that each token needs.
        ids_F: [F] int64: the frequent columns.
    """

    bound_3N: torch.Tensor
    columns_NL: torch.Tensor
    count_V: torch.Tensor
    count_N: torch.Tensor
    ids_F: torch.Tensor


def list_columns(
    words_RW: torch.Tensor, frequent_W: torch.Tensor, x: Operands, rows: Rows, bound: Bound, stats_KN: torch.Tensor,
    sloped_N: torch.Tensor | None, log_eps: float, lists: Lists,
) -> None:
    """Fill the lists of the group's tokens.

    A list has the marked infrequent columns, and the label if it is infrequent. A token without a label needs 0 columns.

    Args:
        words_RW: The marks of the group (``lse.Marks``), and behind them room for a list. Columns overwrite them.
        frequent_W: Words with a bit set for each frequent column.
        bound: Its bound_N is the bound over all shards.
        stats_KN: Maximum and sum of exp over all columns.
        sloped_N: Sum of exp times the softcap's slope over all columns; None without a softcap.
        log_eps: As in ``lse.Marks``.
    """
    (num_rows, width), num_words, hidden_size = words_RW.shape, frequent_W.shape[0], x.hidden.shape[1]
    aligned = math.gcd(16, num_words, width)
    _list_columns_kernel[(num_rows,)](
        frequent_W, x.ids, rows.index, rows.num_labelled,
        words_RW,
        lists.count_N,
        num_words // aligned, width // aligned, x.start, x.num_valid,
        BLOCK_W=512, ALIGNED=aligned, num_warps=1,
    )
    _store_lists_kernel[(num_rows,)](
        x.hidden, x.weight, x.head, x.ids, rows.index, words_RW, bound, stats_KN, sloped_N,
        lists,
        hidden_size, x.num_tokens, width, lists.columns_NL.shape[1], x.start, x.num_valid, log_eps,
        BLOCK_K=256, BLOCK_D=32, STAGES=stages_of_rows(256 * 32 * x.weight.itemsize), num_warps=8,
    )


@triton.jit
def _bits_set(word):
    """Return the number of bits set in each uint32."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@kernel("words_ptr", "frequent_words_ptr")
def _list_columns_kernel(
    frequent_words_ptr,  # in: [W] int32
    labels_ptr,  # in: [N] int64
    index_ptr,  # in: [R] int32
    num_labelled_ptr,  # in: [1] int32
    words_ptr,  # in, out: [R, width] int32: first W words, then at the end the columns
    count_ptr,  # out: [N] int32
    num_units,  # W / ALIGNED
    width_units,  # width / ALIGNED
    start,
    num_valid,
    BLOCK_W: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    row = tl.program_id(0)
    token = tl.load(index_ptr + row).to(tl.int64)
    if row >= tl.load(num_labelled_ptr):
        tl.store(count_ptr + token, 0)
        return
    label = tl.load(labels_ptr + token) - start
    here = (label >= 0) & (label < num_valid)
    # Known multiples, so the compiler can use wide loads.
    num_words = num_units * ALIGNED
    width = width_units * ALIGNED
    label_word = tl.where(here, label // 32, -1)
    label_bit = tl.full((), 1, tl.uint32) << (tl.where(here, label, 0) % 32).to(tl.uint32)
    words_ptr += row.to(tl.int64) * width

    # Write the columns over the words that are read, [BLOCK_W] at a time, from the end: most marks are in front.
    count = tl.zeros((), tl.int32)
    first = (num_words - 1) // BLOCK_W * BLOCK_W
    while first >= 0:
        offs_w = first + tl.arange(0, BLOCK_W)
        in_w = offs_w < num_words
        word = tl.load(words_ptr + offs_w, mask=in_w, other=0).to(tl.uint32, bitcast=True)
        frequent = tl.load(frequent_words_ptr + offs_w, mask=in_w, other=0).to(tl.uint32, bitcast=True)
        word |= tl.where(offs_w == label_word, label_bit, 0)
        word = word ^ (word & frequent)
        if tl.max(word, 0) > 0:
            counts = _bits_set(word)
            count += tl.sum(counts, 0)
            position = width - count + tl.cumsum(counts, 0) - counts
            if first > width - count:
                count = tl.full((), NO_ROOM, tl.int32)
                first = tl.zeros((), tl.int32)
                word = tl.zeros((BLOCK_W,), tl.uint32)
            # Store the column of one bit of every word at a time, lowest bits first, so that columns are ascending.
            while tl.max(word, 0) > 0:
                rest = word & (word - 1)
                tl.store(words_ptr + position, offs_w * 32 + _bits_set((word ^ rest) - 1), mask=word > 0)
                position += (word > 0).to(tl.int32)
                word = rest
        first -= BLOCK_W
    tl.store(count_ptr + token, count)


@kernel("hidden_ptr", "weight_ptr", "hidden_size")
def _store_lists_kernel(
    hidden_ptr,  # in: [N, D]
    weight_ptr,  # in: [V, D]
    head,  # in: Head
    labels_ptr,  # in: [N] int64
    index_ptr,  # in: [R] int32
    columns_ptr,  # in: [R, width] int32: each row ends with its token's columns
    bound,  # in: Bound
    stats_ptr,  # in: [K, N] fp32: maximum, sum, ...
    sloped_ptr,  # in: [N] fp32, or None
    lists,  # in, out: Lists, except ids_F; count_V is counted up
    hidden_size,
    num_tokens,
    width,
    num_slots,
    start,
    num_valid,
    log_eps,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.program_id(0)
    token = tl.load(index_ptr + row).to(tl.int64)
    stride = num_tokens.to(tl.int64)
    maximum = tl.load(stats_ptr + token)
    sum_exp = tl.load(stats_ptr + stride + token)
    outside = sum_exp if sloped_ptr is None else tl.load(sloped_ptr + token)
    outside -= tl.load(bound.frequent_2N + stride + token) * tl.exp(tl.load(bound.frequent_2N + token) - maximum)
    count = tl.load(lists.count_N + token)
    is_long = count > num_slots
    own_bound = maximum + tl.log(sum_exp)
    nats = own_bound - tl.load(bound.bound_N + token)
    # Comparisons with NaN are false.
    is_used = (is_long == 0) | ((count != NO_ROOM) & (nats > 0) & (nats < FARTHEST))
    lower_bound = tl.where(is_long & is_used, own_bound, tl.load(bound.bound_N + token))
    tl.store(lists.bound_3N + token, lower_bound)
    tl.store(lists.bound_3N + stride + token, tl.where(outside < 0, 0.0, outside))  # NaN stays
    tl.store(lists.bound_3N + 2 * stride + token, maximum)
    if is_used == 0:
        return
    label = tl.load(labels_ptr + token) - start
    columns_ptr += (row + 1).to(tl.int64) * width - count
    factors = token_factors(head, token, True)
    num_kept = tl.zeros((), tl.int32)
    for first in range(0, count, BLOCK_K):
        offs_k = first + tl.arange(0, BLOCK_K)
        column = tl.load(columns_ptr + offs_k, mask=offs_k < count, other=num_valid)
        kept = column < num_valid  # marks of a token with NaN are set past the last column, too
        if is_long:
            # Logits z [BLOCK_K] = weight rows [BLOCK_K, D] @ h [D], BLOCK_D elements at a time.
            z = tl.zeros((BLOCK_K,), tl.float32)
            for inner in tl.range(0, hidden_size, BLOCK_D, num_stages=STAGES):
                offs_d = inner + tl.arange(0, BLOCK_D)
                in_d = offs_d < hidden_size
                h = tl.load(hidden_ptr + token * hidden_size + offs_d, mask=in_d, other=0).to(tl.float32)
                where = weight_ptr + column.to(tl.int64)[:, None] * hidden_size + offs_d[None, :]
                w = tl.load(where, mask=kept[:, None] & in_d[None, :], other=0).to(tl.float32)
                z += tl.sum(w * h[None, :], 1)
            z = logits_of(z, column, kept, head, factors, False)
            kept = kept & ((z >= lower_bound + log_eps) | (column == label))
        position = num_kept + tl.cumsum(kept.to(tl.int32), 0) - 1
        num_kept += tl.sum(kept.to(tl.int32), 0)
        kept = kept & (position < num_slots)
        tl.store(lists.columns_NL + token * num_slots + position, column, mask=kept)
        tl.atomic_add(lists.count_V + column, 1, mask=kept, sem="relaxed")
    tl.store(lists.count_N + token, num_kept)


class Decisions(NamedTuple):
    """What backward knows of tokens and columns. A labelled token is listed, which means that its list is used, or unserved.

    Attributes:
        max_N, log_sum_N: As in ``Softmax``.
        coef_4N: Coefficients as in ``cce_dist.kernels``; P and LABEL are read.
        listed_labels: [N] int64: the label if the token is listed, else -1.
        index: [N] int32: the listed tokens in order, then the others.
        unserved: [N] int32: the unserved tokens in order; the rest is not written.
        numbers_3N: [3, N] fp32: the threshold, below which logits are dropped; the softmax mass of the shard's infrequent
            columns, times the softcap's slope; the reference, LSE minus log |P|, so that exp(z - reference) = |P| p.
        num_listed: [1] int32: number of listed tokens.
        num_unserved: [1] int32: number of unserved tokens.
        slot_V: [V] int32: 1 plus the column's position among the frequent columns, or 0.
        first_V: [V + 1] int32: the first of each column's places, then the number of places of all columns.

    ``listed_gradients`` writes

        end_V: [V] int32: the end of the places that the column's gradients have taken; before that ``first_V``. Lists of
            unserved tokens take none.
        dropped_N: [N] fp32: r of ``sampling.py``, scale * P * (the mass that the token drops); 0 if it is not listed.
        grad_NL: [N, L] fp32: the gradients of the columns in ``Lists.columns_NL``; not written for unserved tokens.
        slot_M: [N L] int32: the slot at each place, as an index into ``grad_NL``, in any order within a column.
    """

    max_N: torch.Tensor
    log_sum_N: torch.Tensor
    coef_4N: torch.Tensor
    listed_labels: torch.Tensor
    index: torch.Tensor
    unserved: torch.Tensor
    numbers_3N: torch.Tensor
    num_listed: torch.Tensor
    num_unserved: torch.Tensor
    slot_V: torch.Tensor
    first_V: torch.Tensor
    end_V: torch.Tensor
    dropped_N: torch.Tensor
    grad_NL: torch.Tensor
    slot_M: torch.Tensor


def decide(x: Operands, softmax: Softmax, coef_4N: torch.Tensor, lists: Lists, eps: float) -> Decisions:
    """Decide which tokens are listed, and number the slots of frequent columns and the places of listed ones."""
    (num_tokens, num_slots), num_valid, num_frequent = lists.columns_NL.shape, x.num_valid, lists.ids_F.shape[0]

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=x.ids.device)

    fp32 = torch.float32
    how = Decisions(
        softmax.max, softmax.log_sum, coef_4N,
        new(num_tokens, dtype=torch.int64), new(num_tokens), new(num_tokens), new(3, num_tokens, dtype=fp32), new(1), new(1),
        new(num_valid), new(num_valid + 1), new(num_valid),
        new(num_tokens, dtype=fp32), new(num_tokens, num_slots, dtype=fp32), new(num_tokens * num_slots),
    )
    _decide_kernel[(1 + cdiv(num_valid + 1, 4096),)](
        x.ids, lists,
        how,
        num_tokens, num_slots, num_valid, num_frequent, num_frequent.bit_length(),
        math.log(eps), SLACK,
        BLOCK=4096, num_warps=32,
    )
    return how


@kernel()
def _decide_kernel(
    labels_ptr,  # in: [N] int64
    lists,  # in: Lists
    how,  # in, out: Decisions
    num_tokens,
    num_slots,
    num_valid,
    num_frequent,
    num_steps,
    log_eps,
    slack,
    BLOCK: tl.constexpr,
):
    # All programs but the first one: slots and places of BLOCK columns each. A column's places come after those of the columns
    # before it.
    if tl.program_id(0) > 0:
        begin = (tl.program_id(0) - 1) * BLOCK
        before = tl.zeros((BLOCK,), tl.int32)
        for first in range(0, begin, BLOCK):
            before += tl.load(lists.count_V + first + tl.arange(0, BLOCK))
        offs_v = begin + tl.arange(0, BLOCK)
        count = tl.load(lists.count_V + offs_v, mask=offs_v < num_valid, other=0)
        place = tl.sum(before, 0) + tl.cumsum(count, 0) - count
        tl.store(how.first_V + offs_v, place, mask=offs_v <= num_valid)
        tl.store(how.end_V + offs_v, place, mask=offs_v < num_valid)
        slot = num_before(lists.ids_F, num_frequent, num_steps, offs_v, False)
        is_frequent = tl.load(lists.ids_F + slot, mask=slot < num_frequent, other=-1) == offs_v
        tl.store(how.slot_V + offs_v, tl.where(is_frequent, slot + 1, 0), mask=offs_v < num_valid)
        return

    # The first program: the tokens, BLOCK at a time, with running sums for the two compact orders.
    stride = num_tokens.to(tl.int64)
    num_listed = tl.zeros((), tl.int32)
    num_unserved = tl.zeros((), tl.int32)
    for first in range(0, num_tokens, BLOCK):
        offs_n = first + tl.arange(0, BLOCK)
        in_n = offs_n < num_tokens
        label = tl.load(labels_ptr + offs_n, mask=in_n, other=-1)
        coef_p = tl.abs(tl.load(how.coef_4N + offs_n, mask=in_n, other=0))
        coef_label = tl.abs(tl.load(how.coef_4N + stride + offs_n, mask=in_n, other=0))
        bound = tl.load(lists.bound_3N + offs_n, mask=in_n, other=0)
        outside = tl.load(lists.bound_3N + stride + offs_n, mask=in_n, other=0)
        relative_to = tl.load(lists.bound_3N + 2 * stride + offs_n, mask=in_n, other=0)
        lse = tl.load(how.max_N + offs_n, mask=in_n, other=0) + tl.load(how.log_sum_N + offs_n, mask=in_n, other=0)
        whole = (coef_p == 0) | (coef_label == 0)
        log_ratio = tl.where(whole, 0.0, tl.log(coef_label) - tl.log(coef_p))
        # Comparisons with NaN are false, too. The sum is finite only if all of its terms are.
        listed = (label >= 0) & (tl.load(lists.count_N + offs_n, mask=in_n, other=0) <= num_slots)
        listed &= (lse - bound < FARTHEST) & (bound - lse - log_ratio <= tl.log(slack))
        listed &= tl.abs(lse + bound + outside + relative_to + coef_p + coef_label) < float("inf")
        tl.store(how.numbers_3N + offs_n, bound - tl.log(slack) + log_eps, mask=in_n)
        tl.store(how.numbers_3N + stride + offs_n, outside * tl.exp(relative_to - lse), mask=in_n)
        tl.store(how.numbers_3N + 2 * stride + offs_n, lse - tl.log(coef_p), mask=in_n)

        tl.store(how.listed_labels + offs_n, tl.where(listed, label, -1), mask=in_n)
        chosen = listed.to(tl.int32)
        chosen_before = num_listed + tl.cumsum(chosen, 0) - chosen
        position = tl.where(listed, chosen_before, num_tokens - 1 - (offs_n - chosen_before))
        tl.store(how.index + position, offs_n, mask=in_n)
        num_listed += tl.sum(chosen, 0)
        unserved = ((label >= 0) & (chosen == 0)).to(tl.int32)
        tl.store(how.unserved + num_unserved + tl.cumsum(unserved, 0) - unserved, offs_n, mask=unserved > 0)
        num_unserved += tl.sum(unserved, 0)
    tl.store(how.num_listed, num_listed)
    tl.store(how.num_unserved, num_unserved)


def listed_gradients(x: Operands, lists: Lists, how: Decisions, compensate: bool, total: Sum | None) -> None:
    """Compute the gradients of listed columns, and what each listed token drops.

    Args:
        compensate: Whether the control variate replaces dropped gradients; if not, r is 0.
        total: out, or None: d_hidden is set to the list's part, or to 0 for tokens without a label. Rows of unserved tokens are
            left alone.
    """
    (num_tokens, num_slots), hidden_size = lists.columns_NL.shape, x.hidden.shape[1]
    block_d = triton.next_power_of_2(hidden_size)
    warps = 8 if block_d > 4096 else min(4, max(1, block_d // 256))
    block_k = min(8, max(1, warps * WARP_ELEMENTS // block_d))
    high_ND, low_ND = (None, None) if total is None else (total.high_ND, total.low_RD)
    _listed_gradients_kernel[(num_tokens,)](
        # in
        x.hidden, x.weight, x.head, x.ids, lists,
        # in, out
        how,
        # out
        high_ND, low_ND,
        # sizes
        num_tokens, hidden_size, num_slots, x.start, x.head.multiplier if compensate else 0.0,
        # tiles
        BLOCK_L=256, BLOCK_K=block_k, BLOCK_D=block_d, STAGES=stages_of_rows(block_k * block_d * x.weight.itemsize),
        num_warps=warps, **REGISTERS,
    )


@kernel("hidden_ptr", "weight_ptr", "high_ptr", "low_ptr", "hidden_size")
def _listed_gradients_kernel(
    hidden_ptr,  # in: [N, D]
    weight_ptr,  # in: [V, D]
    head,  # in: Head
    labels_ptr,  # in: [N] int64
    lists,  # in: Lists
    how,  # in, out: Decisions
    high_ptr,  # out: [N, D], or None
    low_ptr,  # out: [N, D] bf16, or None
    num_tokens,
    hidden_size,
    num_slots,
    start,
    compensation,
    BLOCK_L: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    listed_label = tl.load(how.listed_labels + token)
    is_listed = listed_label >= 0
    label = listed_label - start
    stop = tl.where(is_listed, tl.load(lists.count_N + token), 0)
    first_slot = token * num_slots
    # Integer atomics: which of a column's places a slot takes depends on which program comes first.
    for first in range(0, stop, BLOCK_L):
        offs_l = first + tl.arange(0, BLOCK_L)
        column = tl.load(lists.columns_NL + first_slot + offs_l, mask=offs_l < stop, other=0)
        place = tl.atomic_add(how.end_V + column, 1, mask=offs_l < stop, sem="relaxed")
        tl.store(how.slot_M + place, (first_slot + offs_l).to(tl.int32), mask=offs_l < stop)

    factors = token_factors(head, token, True)
    before, after = factors
    given_p = tl.load(how.coef_4N + token)
    coef_p = given_p * before
    coef_label = tl.load(how.coef_4N + num_tokens.to(tl.int64) + token) * before
    row_max = tl.load(how.max_N + token)
    log_sum = tl.load(how.log_sum_N + token)
    offs_d = tl.arange(0, BLOCK_D)
    in_d = offs_d < hidden_size
    h = tl.load(hidden_ptr + token * hidden_size + offs_d, mask=in_d, other=0).to(tl.float32)
    d_hidden = tl.zeros((BLOCK_D,), tl.float32)
    listed = tl.zeros((BLOCK_K,), tl.float32)
    # Logits z [BLOCK_K] = weight rows [BLOCK_K, BLOCK_D] @ h [BLOCK_D], and their gradients; the next rows load meanwhile.
    for first in tl.range(0, stop, BLOCK_K, num_stages=STAGES):
        offs_k = first + tl.arange(0, BLOCK_K)
        in_k = offs_k < stop
        column = tl.load(lists.columns_NL + first_slot + offs_k, mask=in_k, other=0)
        where = weight_ptr + column.to(tl.int64)[:, None] * hidden_size + offs_d[None, :]
        w = tl.load(where, mask=in_k[:, None] & in_d[None, :], other=0)
        z = logits_of(tl.sum(w.to(tl.float32) * h[None, :], 1), column, in_k, head, factors, False)
        slope = tl.full((BLOCK_K,), 1.0, tl.float32)
        if head.softcap is not None:
            slope = slope_of(z, head, after)
        p = tl.where(in_k, tl.exp((z - row_max) - log_sum) * slope, 0.0)
        listed += p
        grad = coef_p * p + tl.where(in_k & (column == label), coef_label * slope, 0.0)
        tl.store(how.grad_NL + first_slot + offs_k, grad, mask=in_k)
        if high_ptr is not None:
            d_hidden += tl.sum(grad[:, None] * w.to(tl.float32), 0)
    if high_ptr is not None:
        written = tl.where(is_listed | (tl.load(labels_ptr + token) < 0), in_d, False)
        high = d_hidden.to(high_ptr.dtype.element_ty)
        tl.store(high_ptr + token * hidden_size + offs_d, high, mask=written)
        if low_ptr is not None:
            low = (d_hidden - high.to(tl.float32)).to(low_ptr.dtype.element_ty)
            tl.store(low_ptr + token * hidden_size + offs_d, low, mask=written)
    mass = tl.load(how.numbers_3N + num_tokens.to(tl.int64) + token) - tl.sum(listed, 0)
    dropped = tl.maximum(mass, 0.0) * given_p * compensation
    tl.store(how.dropped_N + token, tl.where(is_listed, dropped, 0.0))
