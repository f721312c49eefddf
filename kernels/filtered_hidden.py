"""Gradients of the listed logits, and the gradient of the hidden states from them: gathered rows of the weight.

    z_j = hidden . weight_j        g_j = scale * slope * (P p_j + LABEL [j = label])        d_hidden += sum_j g_j weight_j

for the listed columns j. The lists are a handful of columns long, so this is a matter of latency and bytes, not of arithmetic:
the first kernel gives a token to a program, for the dot products; the second one a token and a part of D, for the sum.

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
from cce_dist.kernels.tiles import cdiv, softcap_slope, softcapped


class Entries(NamedTuple):
    """The listed gradients of all tokens, one after another; unused places have a column past the last, and nothing else.

    Attributes:
        column: [M] int32.
        token: [M] int32.
        grad: [M] fp32.
    """

    column: torch.Tensor
    token: torch.Tensor
    grad: torch.Tensor


def listed_gradients(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    labels_N: torch.Tensor,
    index_N: torch.Tensor,
    num_kept: torch.Tensor,
    columns_NL: torch.Tensor,
    count_N: torch.Tensor,
    end_N: torch.Tensor,
    mass_N: torch.Tensor,
    threshold_N: torch.Tensor,
    max_N: torch.Tensor,
    log_sum_N: torch.Tensor,
    coef_4N: torch.Tensor,
    logits: ShardLogits,
    compensate: bool,
    entries: Entries | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the listed gradients, and the mass that is dropped, of the first ``num_kept`` tokens of index_N.

    A listed logit below the threshold that backward knows is dropped all the same; its entry is one of no column.

    Args:
        index_N: All tokens in compact order.
        columns_NL: The lists, ``count_N`` long.
        end_N: Where a token's entries end, int32.
        mass_N: Softmax mass of the token outside the head, times the softcap's slopes.
        threshold_N: Logits below it are dropped, but for the label's.
        max_N: Merged maximum.
        log_sum_N: Merged logarithm of the sum.
        coef_4N: Coefficients as in ``cce_dist.kernels``; P, LABEL and UNIFORM are read.
        compensate: Whether anything stands in for what is dropped.
        entries: out: or None.

    Returns:
        What each token multiplies the stand-in by, scale * P * m (or 0) and scale * UNIFORM, [2, N]; without entries m alone,
        [N]. Then how many columns of the list are kept, [N] int32. All are 0 for the other tokens.
    """
    num_tokens, hidden_size = hidden_ND.shape
    num_listed_N = torch.empty_like(count_N)
    factor = torch.empty(
        (num_tokens,) if entries is None else (2, num_tokens), dtype=torch.float32, device=count_N.device
    )
    _listed_gradients_kernel[(num_tokens,)](
        # in
        hidden_ND, weight_VD, bias_V, labels_N, index_N, num_kept, columns_NL, count_N, end_N,
        mass_N, threshold_N, max_N, log_sum_N, coef_4N,
        # out
        factor, num_listed_N, *(entries or (None, None, None)),
        # sizes
        num_tokens, hidden_size, columns_NL.shape[1], logits.start, logits.num_valid,
        # options
        logits.logit_scale, logits.softcap,
        HAS_BIAS=bias_V is not None, HAS_SOFTCAP=logits.softcap > 0.0, WANT_ENTRIES=entries is not None,
        COMPENSATE=compensate,
        # tiles
        BLOCK_K=8, BLOCK_D=512, num_warps=4,
    )  # fmt: skip
    return factor, num_listed_N


@triton.jit(
    do_not_specialize=["num_tokens", "max_columns", "start", "num_valid"],
    do_not_specialize_on_alignment=[
        "labels_ptr", "index_ptr", "num_kept_ptr", "count_ptr", "end_ptr", "mass_ptr", "threshold_ptr", "max_ptr",
        "log_sum_ptr", "coef_ptr", "factor_ptr", "num_listed_ptr",
    ],
)  # fmt: skip
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


def filtered_hidden(
    weight_VD: torch.Tensor,
    index_R: torch.Tensor,
    num_kept: torch.Tensor,
    count_N: torch.Tensor,
    end_N: torch.Tensor,
    entries: Entries,
    factor_2N: torch.Tensor,
    shared_2D: torch.Tensor,
    low_RD: torch.Tensor | None,
    d_hidden_ND: torch.Tensor,
    num_valid: int,
) -> None:
    """Add the listed columns' part and the stand-in to d_hidden_ND at the tokens of index_R.

    Args:
        factor_2N: scale * P * m and scale * UNIFORM of each token, fp32.
        shared_2D: What they multiply: share . weight, and the sum of the weight rows outside the head, fp32.
        low_RD: in: remainder that d_hidden_ND could not hold.
        d_hidden_ND: in, out.
    """
    num_rows, hidden_size = index_R.shape[0], weight_VD.shape[1]
    _filtered_hidden_kernel[(num_rows, cdiv(hidden_size, 1024))](
        weight_VD, index_R, num_kept, count_N, end_N, entries.column, entries.grad, factor_2N, shared_2D, low_RD,
        d_hidden_ND,
        count_N.shape[0], hidden_size, num_valid,
        HAS_LOW=low_RD is not None, BLOCK_K=8, BLOCK_D=1024, num_warps=4,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_tokens", "num_valid"],
    do_not_specialize_on_alignment=["index_ptr", "num_kept_ptr", "count_ptr", "end_ptr", "factor_ptr"],
)
def _filtered_hidden_kernel(
    weight_ptr,  # in: [V, D]
    index_ptr,  # in: [R] int32
    num_kept_ptr,  # in: [1] int32
    count_ptr,  # in: [N] int32
    end_ptr,  # in: [N] int32
    entry_column_ptr,  # in: [M] int32
    entry_grad_ptr,  # in: [M] fp32
    factor_ptr,  # in: [2, N] fp32
    shared_ptr,  # in: [2, D] fp32
    low_ptr,  # in: [R, D]
    d_hidden_ptr,  # in, out: [N, D]
    num_tokens,
    hidden_size,
    num_valid,
    HAS_LOW: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0)
    if row >= tl.load(num_kept_ptr):
        return
    token = tl.load(index_ptr + row).to(tl.int64)
    end = tl.load(end_ptr + token)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_d = offs_d < hidden_size
    target = d_hidden_ptr + token * hidden_size + offs_d
    acc = tl.load(target, mask=in_d, other=0).to(tl.float32)
    if HAS_LOW:
        acc += tl.load(low_ptr + row.to(tl.int64) * hidden_size + offs_d, mask=in_d, other=0).to(tl.float32)
    acc += tl.load(factor_ptr + token) * tl.load(shared_ptr + offs_d, mask=in_d, other=0)
    uniform = tl.load(factor_ptr + num_tokens.to(tl.int64) + token)
    acc += uniform * tl.load(shared_ptr + hidden_size + offs_d, mask=in_d, other=0)
    for first in range(end - tl.load(count_ptr + token), end, BLOCK_K):
        offs_k = first + tl.arange(0, BLOCK_K)
        column = tl.load(entry_column_ptr + offs_k, mask=offs_k < end, other=num_valid).to(tl.int64)
        in_k = column < num_valid
        grad = tl.load(entry_grad_ptr + offs_k, mask=in_k, other=0)
        where = weight_ptr + column[:, None] * hidden_size + offs_d[None, :]
        w = tl.load(where, mask=in_k[:, None] & in_d[None, :], other=0).to(tl.float32)
        acc += tl.sum(grad[:, None] * w, 0)
    tl.store(target, acc.to(d_hidden_ptr.dtype.element_ty), mask=in_d)
