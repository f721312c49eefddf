"""Lists: for each token the single columns that the filter keeps beside the hot ones, and their gradients.

Forward marks columns (``lse.py``) and ``list_columns`` turns the marks into lists. Backward knows the log-sum-exp and the
coefficients, and ``plan`` decides for each token whether the lists can serve it, and from which logit on they keep:

    kept: |P| p_j >= eps |LABEL|, that is z_j >= threshold = LSE + log(eps |LABEL| / |P|)     (eps alone where LABEL or P is 0)

The lists hold what is ``SLACK`` below ``bound + log eps``, so they serve unless the threshold is lower than that. A token whose
list is too long, or has no room, or that has anything that is not finite, is not served either. ``listed_gradients`` then
computes, for the listed columns j of a token,

    z_j = hidden . weight_j        g_j = scale * slope * (P p_j + LABEL [j = label])

The lists are a handful of columns long, so this is a matter of latency and bytes, not of arithmetic: a token is a program.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from cce_dist.kernels import Operands, Rows, Softmax
from cce_dist.kernels.blocks import kernel, softcap_slope, softcapped
from cce_dist.kernels.filter.hot import Hot

SLACK = 1.125  # the lists reach this much lower than the bound alone, so that a usual z-loss or smoothing is served
FARTHEST = tl.constexpr(30.0)  # nats between bound and LSE; the marks of lse.py mean nothing beyond its HEADROOM


class Lists(NamedTuple):
    """What forward keeps for backward.

    Attributes:
        bound_3N: [3, N] fp32: the bound of the log-sum-exp; the sum of exp outside the hot columns, times the softcap's slopes,
            relative to the shard's maximum; that maximum.
        columns_NL: [N, L] int32: each token's columns, ascending.
        count_N: [N] int32: how many there are, also where that is more than L.
        ids_H: [H] int64: the hot columns.
    """

    bound_3N: torch.Tensor
    columns_NL: torch.Tensor
    count_N: torch.Tensor
    ids_H: torch.Tensor


def list_columns(words_RW: torch.Tensor, hot: Hot, x: Operands, rows: Rows, lists: Lists) -> None:
    """Write the marked columns that are not hot, ascending, and the label's, to the lists of the group's tokens.

    The count is 0 for tokens without a label.
    """
    num_rows, num_words = words_RW.shape
    _list_columns_kernel[(num_rows,)](
        words_RW, hot.words_W, x.ids, rows.index, rows.num_kept,
        lists.columns_NL, lists.count_N,
        num_words, lists.columns_NL.shape[1], x.logits.start, x.logits.num_valid,
        BLOCK_W=512, num_warps=1,
    )  # fmt: skip


@triton.jit
def _bits_set(word):
    """Number of bits set in each uint32."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@kernel("words_ptr", "hot_words_ptr", "columns_ptr")
def _list_columns_kernel(
    words_ptr,  # in: [R, W] int32
    hot_words_ptr,  # in: [W] int32
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
        hot = tl.load(hot_words_ptr + offs_w, mask=in_w, other=0).to(tl.uint32, bitcast=True)
        word |= tl.where(offs_w == label_word, label_bit, 0)
        word ^= word & hot
        if tl.max(word, 0) > 0:
            count = _bits_set(word)
            place = total + tl.cumsum(count, 0) - count
            total += tl.sum(count, 0)
            # One bit of every word at a time, the lowest first: the columns of a row come out ascending.
            while tl.max(word, 0) > 0:
                rest = word & (word - 1)
                column = offs_w * 32 + _bits_set((word ^ rest) - 1)
                tl.store(columns_ptr + token * max_columns + place, column, mask=(word > 0) & (place < max_columns))
                place += (word > 0).to(tl.int32)
                word = rest
    tl.store(count_ptr + token, total)


class Plan(NamedTuple):
    """The decision for each token, [N]; rows of tokens that are not listed hold nothing but the labels.

    Attributes:
        listed_labels: The label if hot columns and list serve the token, else -1; int64.
        dense_labels: The label if the exact path must, else -1; int64.
        hot_labels: The label's place among the hot columns if it has one and the token is listed, else -1; int64.
        end: Where the token's entries end; int32.
        index: The listed tokens, in order, then the others, as ``tokens.compact`` has them; int32.
        threshold: Logits below it are dropped, fp32.
        mass: Softmax mass of the shard's columns that are not hot, times the softcap's slopes, fp32.
        reference: LSE less log |P|, fp32: exp(z - reference) = |P| p.
        num_dense: [1] int32.
        num_listed: [1] int32.
    """

    listed_labels: torch.Tensor
    dense_labels: torch.Tensor
    hot_labels: torch.Tensor
    end: torch.Tensor
    index: torch.Tensor
    threshold: torch.Tensor
    mass: torch.Tensor
    reference: torch.Tensor
    num_dense: torch.Tensor
    num_listed: torch.Tensor

    @property
    def order(self) -> list[torch.Tensor]:
        """The listed tokens first, and their number."""
        return [self.index, self.num_listed]


def plan(
    x: Operands, softmax: Softmax, coef_4N: torch.Tensor, lists: Lists, slot_V: torch.Tensor | None, eps: float, capacity: int
) -> Plan:  # fmt: skip
    """Decide for every token; ``capacity`` is the number of entries that all lists have room for.

    Without ``slot_V`` there are no hot_labels.
    """
    num_tokens, device = x.num_tokens, x.ids.device
    fp32_3N = torch.empty(3, num_tokens, dtype=torch.float32, device=device)
    int64_3N = torch.empty(3, num_tokens, dtype=torch.int64, device=device)
    int32_2N, num_2 = (torch.empty(2, n, dtype=torch.int32, device=device) for n in (num_tokens, 1))
    _plan_kernel[(1,)](
        x.ids, softmax.max, softmax.log_sum, coef_4N, lists.bound_3N, lists.count_N, slot_V,
        int64_3N, int32_2N, fp32_3N, num_2,
        num_tokens, lists.columns_NL.shape[1], capacity, x.logits.start, x.logits.num_valid,
        math.log(eps), SLACK,
        HAS_SLOT=slot_V is not None, BLOCK=4096, num_warps=16,
    )  # fmt: skip
    return Plan(*int64_3N.unbind(), *int32_2N.unbind(), *fp32_3N.unbind(), *num_2.unbind())


@kernel("slot_ptr", "out_labels_ptr", "end_ptr", "out_ptr", "num_ptr")
def _plan_kernel(
    labels_ptr,  # in: [N] int64
    max_ptr,  # in: [N] fp32
    log_sum_ptr,  # in: [N] fp32
    coef_ptr,  # in: [4, N] fp32
    bound_ptr,  # in: [3, N] fp32: bound, sum outside the hot columns, what that is relative to
    count_ptr,  # in: [N] int32
    slot_ptr,  # in: [V] int32
    out_labels_ptr,  # out: [3, N] int64
    end_ptr,  # out: [2, N] int32: where the entries end; the compact order
    out_ptr,  # out: [3, N] fp32
    num_ptr,  # out: [2] int32: tokens that are dense; that are listed
    num_tokens,
    longest,
    capacity,
    start,
    num_valid,
    log_eps,
    slack,
    HAS_SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program, as in tokens.py: the places of the entries are a running sum.
    stride = num_tokens.to(tl.int64)
    room_taken = tl.zeros((), tl.int32)
    num_dense = tl.zeros((), tl.int32)
    num_listed = tl.zeros((), tl.int32)
    for first in range(0, num_tokens, BLOCK):
        offs_n = first + tl.arange(0, BLOCK)
        in_n = offs_n < num_tokens
        label = tl.load(labels_ptr + offs_n, mask=in_n, other=-1)
        coef_p = tl.abs(tl.load(coef_ptr + offs_n, mask=in_n, other=0))
        coef_label = tl.abs(tl.load(coef_ptr + stride + offs_n, mask=in_n, other=0))
        coef_uniform = tl.load(coef_ptr + 2 * stride + offs_n, mask=in_n, other=0)
        bound = tl.load(bound_ptr + offs_n, mask=in_n, other=0)
        outside = tl.load(bound_ptr + stride + offs_n, mask=in_n, other=0)
        relative_to = tl.load(bound_ptr + 2 * stride + offs_n, mask=in_n, other=0)
        lse = tl.load(max_ptr + offs_n, mask=in_n, other=0) + tl.load(log_sum_ptr + offs_n, mask=in_n, other=0)
        count = tl.load(count_ptr + offs_n, mask=in_n, other=0)

        whole = (coef_p == 0) | (coef_label == 0)
        log_ratio = tl.where(whole, 0.0, tl.log(coef_label) - tl.log(coef_p))
        # Also false where anything is NaN; a sum is finite where all its terms are.
        served = (count <= longest) & (lse - bound < FARTHEST) & (whole | (bound - lse - log_ratio <= tl.log(slack)))
        served &= tl.abs(lse + bound + outside + relative_to + coef_p + coef_label + coef_uniform) < float("inf")
        tl.store(out_ptr + offs_n, lse + log_eps + log_ratio, mask=in_n)
        tl.store(out_ptr + stride + offs_n, outside * tl.exp(relative_to - lse), mask=in_n)
        tl.store(out_ptr + 2 * stride + offs_n, lse - tl.log(coef_p), mask=in_n)

        live = label >= 0
        length = tl.where(live & served, count, 0)
        end = room_taken + tl.cumsum(length, 0)
        room_taken += tl.sum(length, 0)
        served &= (length == 0) | (end <= capacity)
        tl.store(end_ptr + offs_n, end, mask=in_n)
        dense = live & (served == 0)
        num_dense += tl.sum(dense.to(tl.int32), 0)

        tl.store(out_labels_ptr + offs_n, tl.where(served, label, -1), mask=in_n)
        tl.store(out_labels_ptr + stride + offs_n, tl.where(dense, label, -1), mask=in_n)
        if HAS_SLOT:
            here = live & served & (label >= start) & (label - start < num_valid)
            slot = tl.load(slot_ptr + tl.where(here, label - start, 0), mask=here, other=0)
            tl.store(out_labels_ptr + 2 * stride + offs_n, slot.to(tl.int64) - 1, mask=in_n)

        listed = (live & served).to(tl.int32)
        listed_before = num_listed + tl.cumsum(listed, 0) - listed
        place = tl.where(listed > 0, listed_before, num_tokens - 1 - (offs_n - listed_before))
        num_listed += tl.sum(listed, 0)
        tl.store(end_ptr + stride + place, offs_n, mask=in_n)
    tl.store(num_ptr, num_dense)
    tl.store(num_ptr + 1, num_listed)


class Entries(NamedTuple):
    """The listed gradients of all tokens, one after another; unused places have a column past the last.

    Attributes:
        column: [M] int32.
        token: [M] int32.
        grad: [M] fp32.
    """

    column: torch.Tensor
    token: torch.Tensor
    grad: torch.Tensor


def new_entries(capacity: int, num_cols: int, device: torch.device) -> Entries:
    """Return room for entries, all of it unused."""
    return Entries(
        torch.full((capacity,), num_cols, dtype=torch.int32, device=device),
        torch.empty(capacity, dtype=torch.int32, device=device),
        torch.empty(capacity, dtype=torch.float32, device=device),
    )


def listed_gradients(
    x: Operands,
    softmax: Softmax,
    coef_4N: torch.Tensor,
    lists: Lists,
    how: Plan,
    compensate: bool,
    entries: Entries | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the listed gradients, and the mass that is dropped, of the listed tokens.

    A listed logit below the threshold that backward knows is dropped all the same; its entry is one of no column.

    Args:
        coef_4N: Coefficients as in ``cce_dist.kernels``; P, LABEL and UNIFORM are read.
        compensate: Whether anything stands in for what is dropped.
        entries: out: or None.

    Returns:
        What each token multiplies the stand-in by, scale * P * m (or 0) and scale * UNIFORM, [2, N]; without entries m alone,
        [N]. Then how many columns of the list are kept, [N] int32. All are 0 for the other tokens.
    """
    num_tokens, hidden_size = x.hidden.shape
    num_listed_N = torch.empty_like(lists.count_N)
    shape = (num_tokens,) if entries is None else (2, num_tokens)
    factor = torch.empty(shape, dtype=torch.float32, device=num_listed_N.device)
    _listed_gradients_kernel[(num_tokens,)](
        # in
        x.hidden, x.weight, x.bias, x.ids, how.index, how.num_listed, lists.columns_NL, lists.count_N, how.end,
        how.mass, how.threshold, softmax.max, softmax.log_sum, coef_4N,
        # out
        factor, num_listed_N, *(entries or (None, None, None)),
        # sizes
        num_tokens, hidden_size, lists.columns_NL.shape[1], x.logits.start, x.logits.num_valid,
        # options
        x.logits.logit_scale, x.logits.softcap,
        HAS_BIAS=x.bias is not None, HAS_SOFTCAP=x.logits.softcap > 0.0, WANT_ENTRIES=entries is not None,
        COMPENSATE=compensate,
        # tiles
        BLOCK_K=8, BLOCK_D=512, num_warps=4,
    )  # fmt: skip
    return factor, num_listed_N


@kernel(
    "hidden_ptr",
    "weight_ptr",
    "bias_ptr",
    "columns_ptr",
    "entry_column_ptr",
    "entry_token_ptr",
    "entry_grad_ptr",
    "hidden_size",
)
def _listed_gradients_kernel(
    hidden_ptr,  # in: [N, D]
    weight_ptr,  # in: [V, D]
    bias_ptr,  # in: [V]
    labels_ptr,  # in: [N] int64
    index_ptr,  # in: [N] int32
    num_kept_ptr,  # in: [1] int32
    columns_ptr,  # in: [N, L] int32
    count_ptr,  # in: [N] int32
    end_ptr,  # in: [N] int32
    mass_ptr,  # in: [N] fp32
    threshold_ptr,  # in: [N] fp32
    max_ptr,  # in: [N] fp32
    log_sum_ptr,  # in: [N] fp32
    coef_ptr,  # in: [4, N] fp32
    factor_ptr,  # out: [2, N] fp32; without entries [N], the mass alone
    num_listed_ptr,  # out: [N] int32
    entry_column_ptr,  # out: [M] int32
    entry_token_ptr,  # out: [M] int32
    entry_grad_ptr,  # out: [M] fp32
    num_tokens,
    hidden_size,
    max_columns,
    start,
    num_valid,
    logit_scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    WANT_ENTRIES: tl.constexpr,
    COMPENSATE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0)
    stride = num_tokens.to(tl.int64)
    token = tl.load(index_ptr + row).to(tl.int64)
    if row >= tl.load(num_kept_ptr):
        tl.store(factor_ptr + token, 0.0)
        if WANT_ENTRIES:
            tl.store(factor_ptr + stride + token, 0.0)
        tl.store(num_listed_ptr + token, 0)
        return
    coef_p = tl.load(coef_ptr + token) * logit_scale
    coef_label = tl.load(coef_ptr + stride + token) * logit_scale
    row_max = tl.load(max_ptr + token)
    log_sum = tl.load(log_sum_ptr + token)
    threshold = tl.load(threshold_ptr + token)
    label = tl.load(labels_ptr + token) - start
    count = tl.load(count_ptr + token)
    begin = tl.load(end_ptr + token) - count

    listed = tl.zeros((BLOCK_K,), tl.float32)
    num_listed = tl.zeros((BLOCK_K,), tl.int32)
    for first in range(0, count, BLOCK_K):
        offs_k = first + tl.arange(0, BLOCK_K)
        in_k = offs_k < count
        column = tl.load(columns_ptr + token * max_columns + offs_k, mask=in_k, other=0)
        products = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
        for inner in range(0, hidden_size, BLOCK_D):
            offs_d = inner + tl.arange(0, BLOCK_D)
            in_d = offs_d < hidden_size
            h = tl.load(hidden_ptr + token * hidden_size + offs_d, mask=in_d, other=0).to(tl.float32)
            where = weight_ptr + column.to(tl.int64)[:, None] * hidden_size + offs_d[None, :]
            products += tl.load(where, mask=in_k[:, None] & in_d[None, :], other=0).to(tl.float32) * h[None, :]
        z = tl.sum(products, 1)
        if HAS_BIAS:
            z += tl.load(bias_ptr + column, mask=in_k, other=0).to(tl.float32)
        z *= logit_scale
        slope = tl.full((BLOCK_K,), 1.0, tl.float32)
        if HAS_SOFTCAP:
            z = softcapped(z, softcap)
            slope = softcap_slope(z, softcap)
        is_label = column == label
        kept = in_k & ((z >= threshold) | is_label)
        p = tl.where(kept, tl.exp((z - row_max) - log_sum) * slope, 0.0)
        listed += p
        num_listed += kept.to(tl.int32)
        if WANT_ENTRIES:
            grad = coef_p * p + tl.where(is_label, coef_label * slope, 0.0)
            tl.store(entry_column_ptr + begin + offs_k, tl.where(kept, column, num_valid), mask=in_k)
            tl.store(entry_token_ptr + begin + offs_k, tl.zeros_like(column) + token.to(tl.int32), mask=in_k)
            tl.store(entry_grad_ptr + begin + offs_k, grad, mask=in_k)
    dropped = tl.maximum(tl.load(mass_ptr + token) - tl.sum(listed, 0), 0.0)
    if WANT_ENTRIES:
        dropped *= coef_p if COMPENSATE else 0.0
        tl.store(factor_ptr + stride + token, tl.load(coef_ptr + 2 * stride + token) * logit_scale)
    tl.store(factor_ptr + token, dropped)
    tl.store(num_listed_ptr + token, tl.sum(num_listed, 0))
