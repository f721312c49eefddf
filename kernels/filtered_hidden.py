"""Gradient of the hidden states from each token's list of columns: gathered rows of the weight, used twice while they are here.

    z_j = hidden . weight_j        g_j = scale * slope * (P p_j + LABEL [j = label])        d_hidden += sum_j g_j weight_j

for the listed columns j. The lists are a handful of columns long, so this is a matter of bytes: every row is read once, and
stays in registers between the dot product that gives g_j and the sum that uses it. The g_j go to memory for d_weight.

For the columns that neither the list nor the head holds, a stand-in: with m the mass of the token that they hold,

    d_hidden += scale * P * m * (share . weight) + scale * UNIFORM * (sum of their weight rows)

where ``share`` is their part of the dropped mass of all tokens (``filtered.py``). m is what is left of the mass after the
head's and the list's, so that the row sums of the softmax are right whatever was dropped.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from cce_dist.kernels import ShardLogits
from cce_dist.kernels.tiles import softcapped


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


def pieces(hidden_size: int) -> tuple[int, int]:
    """Split a row into two blocks, since a block's length is a power of two: the largest that fits, and the rest."""
    first = 1 << (hidden_size.bit_length() - 1)
    rest = hidden_size - first
    return first, max(16, triton.next_power_of_2(rest)) if rest else 0


def filtered_hidden(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    labels_N: torch.Tensor,
    index_R: torch.Tensor,
    num_kept: torch.Tensor,
    columns_NL: torch.Tensor,
    count_N: torch.Tensor,
    end_N: torch.Tensor,
    mass_N: torch.Tensor,
    max_N: torch.Tensor,
    log_sum_N: torch.Tensor,
    coef_4N: torch.Tensor,
    logits: ShardLogits,
    shared_2D: torch.Tensor | None,
    dropped_N: torch.Tensor,
    entries: Entries | None,
    d_hidden_ND: torch.Tensor | None,
    low_RD: torch.Tensor | None,
) -> None:
    """Add the listed columns' part and the stand-in to d_hidden_ND at the tokens of index_R.

    Args:
        columns_NL: The lists, ``count_N`` long.
        end_N: Where a token's entries end, int64.
        mass_N: Softmax mass of the token outside the head, times the softcap's slopes.
        max_N: Merged maximum.
        log_sum_N: Merged logarithm of the sum.
        coef_4N: Coefficients as in ``cce_dist.kernels``; ENTROPY is not read.
        shared_2D: share . weight, and the sum of the weight rows outside the head, fp32; or None for neither.
        dropped_N: out: m.
        entries: out: columns, tokens and gradients of the lists, or None.
        d_hidden_ND: in, out: or None.
        low_RD: in: remainder that d_hidden_ND could not hold.
    """
    num_rows, hidden_size = index_R.shape[0], hidden_ND.shape[1]
    first, rest = pieces(hidden_size)
    _filtered_hidden_kernel[(num_rows,)](
        # in
        hidden_ND, weight_VD, bias_V, labels_N, index_R, num_kept, columns_NL, count_N, end_N,
        mass_N, max_N, log_sum_N, coef_4N, shared_2D, low_RD,
        # out
        dropped_N, *(entries or (None, None, None)),
        # in, out
        d_hidden_ND,
        # sizes
        hidden_ND.shape[0], hidden_size, columns_NL.shape[1], logits.start, logits.num_valid,
        # options
        logits.logit_scale, logits.softcap,
        HAS_BIAS=bias_V is not None, HAS_SOFTCAP=logits.softcap > 0.0, HAS_SHARED=shared_2D is not None,
        HAS_LOW=low_RD is not None, WANT_ENTRIES=entries is not None, WANT_HIDDEN=d_hidden_ND is not None,
        # tiles
        BLOCK_K=8, FIRST=first, REST=rest, num_warps=max(1, min(16, (first + rest) // 256)),
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_tokens", "max_columns", "start", "num_valid"],
    do_not_specialize_on_alignment=[
        "labels_ptr", "index_ptr", "num_kept_ptr", "count_ptr", "end_ptr", "mass_ptr", "max_ptr", "log_sum_ptr",
        "coef_ptr", "dropped_ptr",
    ],
)  # fmt: skip
def _filtered_hidden_kernel(
    hidden_ptr,  # in: [N, D]
    weight_ptr,  # in: [V, D]
    bias_ptr,  # in: [V]
    labels_ptr,  # in: [N] int64
    index_ptr,  # in: [R] int32
    num_kept_ptr,  # in: [1] int32
    columns_ptr,  # in: [N, L] int32
    count_ptr,  # in: [N] int32
    end_ptr,  # in: [N] int64
    mass_ptr,  # in: [N] fp32
    max_ptr,  # in: [N] fp32
    log_sum_ptr,  # in: [N] fp32
    coef_ptr,  # in: [4, N] fp32
    shared_ptr,  # in: [2, D] fp32
    low_ptr,  # in: [R, D]
    dropped_ptr,  # out: [N] fp32
    entry_column_ptr,  # out: [entries] int32
    entry_token_ptr,  # out: [entries] int32
    entry_grad_ptr,  # out: [entries] fp32
    d_hidden_ptr,  # in, out: [N, D]
    num_tokens,
    hidden_size,
    max_columns,
    start,
    num_valid,
    logit_scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_LOW: tl.constexpr,
    WANT_ENTRIES: tl.constexpr,
    WANT_HIDDEN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
):
    row = tl.program_id(0)
    if row >= tl.load(num_kept_ptr):
        return
    token = tl.load(index_ptr + row).to(tl.int64)
    stride = num_tokens.to(tl.int64)
    coef_p = tl.load(coef_ptr + token) * logit_scale
    coef_label = tl.load(coef_ptr + stride + token) * logit_scale
    coef_uniform = tl.load(coef_ptr + 2 * stride + token) * logit_scale
    row_max = tl.load(max_ptr + token)
    log_sum = tl.load(log_sum_ptr + token)
    label = tl.load(labels_ptr + token) - start
    count = tl.load(count_ptr + token)
    begin = tl.load(end_ptr + token) - count

    # A row is two pieces: FIRST columns, a power of two, and the REST.
    offs_a = tl.arange(0, FIRST)
    hidden_a = tl.load(hidden_ptr + token * hidden_size + offs_a).to(tl.float32)
    acc_a = tl.zeros((FIRST,), tl.float32)
    if REST > 0:
        offs_b = FIRST + tl.arange(0, REST)
        in_b = offs_b < hidden_size
        hidden_b = tl.load(hidden_ptr + token * hidden_size + offs_b, mask=in_b, other=0).to(tl.float32)
        acc_b = tl.zeros((REST,), tl.float32)
    listed = tl.zeros((BLOCK_K,), tl.float32)
    for first in range(0, count, BLOCK_K):
        offs_k = first + tl.arange(0, BLOCK_K)
        in_k = offs_k < count
        column = tl.load(columns_ptr + token * max_columns + offs_k, mask=in_k, other=0)
        source = weight_ptr + column.to(tl.int64)[:, None] * hidden_size
        weight_a = tl.load(source + offs_a[None, :], mask=in_k[:, None], other=0)
        u = tl.sum(weight_a.to(tl.float32) * hidden_a[None, :], 1)
        if REST > 0:
            weight_b = tl.load(source + offs_b[None, :], mask=in_k[:, None] & in_b[None, :], other=0)
            u += tl.sum(weight_b.to(tl.float32) * hidden_b[None, :], 1)
        if HAS_BIAS:
            u += tl.load(bias_ptr + column, mask=in_k, other=0).to(tl.float32)
        z = u * logit_scale
        slope = tl.full((BLOCK_K,), 1.0, tl.float32)
        if HAS_SOFTCAP:
            z = softcapped(z, softcap)
            slope = 1.0 - (z / softcap) * (z / softcap)
        p = tl.where(in_k, tl.exp((z - row_max) - log_sum) * slope, 0.0)
        grad = coef_p * p + tl.where(in_k & (column == label), coef_label * slope, 0.0)
        listed += p
        if WANT_ENTRIES:
            tl.store(entry_column_ptr + begin + offs_k, column, mask=in_k)
            tl.store(entry_token_ptr + begin + offs_k, tl.zeros_like(column) + token.to(tl.int32), mask=in_k)
            tl.store(entry_grad_ptr + begin + offs_k, grad, mask=in_k)
        if WANT_HIDDEN:
            acc_a += tl.sum(grad[:, None] * weight_a.to(tl.float32), 0)
            if REST > 0:
                acc_b += tl.sum(grad[:, None] * weight_b.to(tl.float32), 0)

    dropped = tl.maximum(tl.load(mass_ptr + token) - tl.sum(listed, 0), 0.0)
    tl.store(dropped_ptr + token, dropped)
    if WANT_HIDDEN:
        target = d_hidden_ptr + token * hidden_size
        low = low_ptr + row.to(tl.int64) * hidden_size if HAS_LOW else target
        acc_a += tl.load(target + offs_a).to(tl.float32)
        if HAS_LOW:
            acc_a += tl.load(low + offs_a).to(tl.float32)
        if HAS_SHARED:
            acc_a += coef_p * dropped * tl.load(shared_ptr + offs_a)
            acc_a += coef_uniform * tl.load(shared_ptr + hidden_size + offs_a)
        tl.store(target + offs_a, acc_a.to(d_hidden_ptr.dtype.element_ty))
        if REST > 0:
            acc_b += tl.load(target + offs_b, mask=in_b, other=0).to(tl.float32)
            if HAS_LOW:
                acc_b += tl.load(low + offs_b, mask=in_b, other=0).to(tl.float32)
            if HAS_SHARED:
                acc_b += coef_p * dropped * tl.load(shared_ptr + offs_b, mask=in_b, other=0)
                acc_b += coef_uniform * tl.load(shared_ptr + hidden_size + offs_b, mask=in_b, other=0)
            tl.store(target + offs_b, acc_b.to(d_hidden_ptr.dtype.element_ty), mask=in_b)
