"""Gradient of the weight from the listed gradients, and the sums of rows that stand in for all that is not listed.

    d_weight_j = sum over its entries of g hidden  +  share_j * sum_i scale P_i m_i hidden_i  +  sum_i scale UNIFORM_i hidden_i

(symbols as in ``filtered_hidden.py``). The entries come token by token; a stable sort by column turns them over, so each row of
d_weight is summed in registers, in the order of the tokens, and written once: no atomics, and the same bits every run. Rows of
the head come from the product that made them (``filtered.py``) and are only carried to their place.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from cce_dist.kernels.filtered_hidden import Entries, pieces
from cce_dist.kernels.tiles import num_programs


class ByColumn(NamedTuple):
    """Entries in order of their column, then of their token.

    Attributes:
        first_V: [V + 1] int64: where each column's entries start.
        token: [M] int32.
        grad: [M] fp32.
    """

    first_V: torch.Tensor
    token: torch.Tensor
    grad: torch.Tensor


def by_column(entries: Entries, num_cols: int) -> ByColumn:
    """Turn the lists of tokens into lists of columns."""
    column, order = entries.column.sort(stable=True)
    columns = torch.arange(num_cols + 1, dtype=torch.int32, device=column.device)
    return ByColumn(torch.searchsorted(column, columns), entries.token[order], entries.grad[order])


def filtered_weight(
    hidden_ND: torch.Tensor,
    entries: ByColumn,
    slot_V: torch.Tensor,
    head_HD: torch.Tensor | None,
    head_bias_H: torch.Tensor | None,
    share_V: torch.Tensor | None,
    shared_2D: torch.Tensor | None,
    shared_bias_2: torch.Tensor | None,
    num_added: torch.Tensor,
    d_weight_VD: torch.Tensor | None,
    d_bias_V: torch.Tensor | None,
    *,
    add: bool,
) -> None:
    """Set the rows of d_weight_VD and d_bias_V to the sum of all their parts, or add it.

    Args:
        slot_V: Row of the head for each column, or -1.
        head_HD: The head's rows of the gradient.
        share_V: Each column's part of the dropped mass, or None for no stand-in.
        shared_2D: sum_i (scale P_i m_i hidden_i) and sum_i (scale UNIFORM_i hidden_i), fp32; or None for neither.
        shared_bias_2: The same sums without hidden.
        num_added: [1] int32: if not 0, d_weight_VD holds the gradient of other tokens, to add to.
        d_weight_VD: in, out: may have fewer rows than entries has columns.
        d_bias_V: in, out: always added to.
        add: Add to d_weight_VD in any case.
    """
    num_cols, hidden_size = entries.first_V.shape[0] - 1, hidden_ND.shape[1]
    first, rest = pieces(hidden_size)
    _filtered_weight_kernel[(num_cols,)](
        # in
        hidden_ND, entries.first_V, entries.token, entries.grad, slot_V, head_HD, head_bias_H,
        share_V, shared_2D, shared_bias_2, num_added,
        # in, out
        d_weight_VD, d_bias_V,
        # sizes
        hidden_size, int(add),
        # options
        HAS_SHARED=shared_2D is not None, HAS_SHARE=share_V is not None,
        WANT_WEIGHT=d_weight_VD is not None, WANT_BIAS=d_bias_V is not None,
        # tiles
        BLOCK_K=8, FIRST=first, REST=rest, num_warps=max(1, min(8, (first + rest) // 512)),
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["add"], do_not_specialize_on_alignment=["token_ptr", "grad_ptr", "share_ptr", "num_added_ptr"]
)
def _filtered_weight_kernel(
    hidden_ptr,  # in: [N, D]
    first_ptr,  # in: [V + 1] int64
    token_ptr,  # in: [M] int32
    grad_ptr,  # in: [M] fp32
    slot_ptr,  # in: [V] int32
    head_ptr,  # in: [H, D]
    head_bias_ptr,  # in: [H] fp32
    share_ptr,  # in: [V] fp32
    shared_ptr,  # in: [2, D] fp32
    shared_bias_ptr,  # in: [2] fp32
    num_added_ptr,  # in: [1] int32
    d_weight_ptr,  # in, out: [V, D]
    d_bias_ptr,  # in, out: [V] fp32
    hidden_size,
    add,
    HAS_SHARED: tl.constexpr,
    HAS_SHARE: tl.constexpr,
    WANT_WEIGHT: tl.constexpr,
    WANT_BIAS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
):
    column = tl.program_id(0).to(tl.int64)
    begin = tl.load(first_ptr + column)
    end = tl.load(first_ptr + column + 1)
    slot = tl.load(slot_ptr + column).to(tl.int64)
    in_head = slot >= 0
    share = 0.0
    if HAS_SHARE:
        share = tl.load(share_ptr + column)

    offs_a = tl.arange(0, FIRST)
    acc_a = tl.zeros((FIRST,), tl.float32)
    if REST > 0:
        offs_b = FIRST + tl.arange(0, REST)
        in_b = offs_b < hidden_size
        acc_b = tl.zeros((REST,), tl.float32)
    bias = tl.zeros((BLOCK_K,), tl.float32)
    for first in range(begin, end, BLOCK_K):
        offs_k = first + tl.arange(0, BLOCK_K)
        in_k = offs_k < end
        token = tl.load(token_ptr + offs_k, mask=in_k, other=0).to(tl.int64)
        grad = tl.load(grad_ptr + offs_k, mask=in_k, other=0)
        bias += grad
        if WANT_WEIGHT:
            source = hidden_ptr + token[:, None] * hidden_size
            hidden_a = tl.load(source + offs_a[None, :], mask=in_k[:, None], other=0).to(tl.float32)
            acc_a += tl.sum(grad[:, None] * hidden_a, 0)
            if REST > 0:
                hidden_b = tl.load(source + offs_b[None, :], mask=in_k[:, None] & in_b[None, :], other=0).to(tl.float32)
                acc_b += tl.sum(grad[:, None] * hidden_b, 0)

    adding = (add != 0) | (tl.load(num_added_ptr) > 0)
    if WANT_WEIGHT:
        target = d_weight_ptr + column * hidden_size
        head = head_ptr + slot * hidden_size
        acc_a += tl.load(head + offs_a, mask=in_head & (offs_a < hidden_size), other=0).to(tl.float32)
        acc_a += tl.load(target + offs_a, mask=adding & (offs_a < hidden_size), other=0).to(tl.float32)
        if HAS_SHARED:
            outside = (offs_a < hidden_size) & (slot < 0)
            acc_a += share * tl.load(shared_ptr + offs_a, mask=outside, other=0)
            acc_a += tl.load(shared_ptr + hidden_size + offs_a, mask=outside, other=0)
        tl.store(target + offs_a, acc_a.to(d_weight_ptr.dtype.element_ty))
        if REST > 0:
            acc_b += tl.load(head + offs_b, mask=in_head & in_b, other=0).to(tl.float32)
            acc_b += tl.load(target + offs_b, mask=adding & in_b, other=0).to(tl.float32)
            if HAS_SHARED:
                outside = in_b & (slot < 0)
                acc_b += share * tl.load(shared_ptr + offs_b, mask=outside, other=0)
                acc_b += tl.load(shared_ptr + hidden_size + offs_b, mask=outside, other=0)
            tl.store(target + offs_b, acc_b.to(d_weight_ptr.dtype.element_ty), mask=in_b)
    if WANT_BIAS:
        total = tl.sum(bias, 0) + tl.load(d_bias_ptr + column) + tl.load(head_bias_ptr + slot, mask=in_head, other=0)
        if HAS_SHARED:
            total += tl.where(in_head, 0.0, share * tl.load(shared_bias_ptr) + tl.load(shared_bias_ptr + 1))
        tl.store(d_bias_ptr + column, total)


def sums_of_rows(coef_2R: torch.Tensor, rows_RD: torch.Tensor) -> torch.Tensor:
    """Return coef_2R @ rows_RD in fp32, [2, D]; rows whose coefficients are both 0 are not read, whatever they hold."""
    num_rows, hidden_size = rows_RD.shape
    block_r, block_d = 32, 256
    blocks_d = triton.cdiv(hidden_size, block_d)
    parts = max(1, min(triton.cdiv(num_rows, block_r), 8 * num_programs(rows_RD.device) // blocks_d))
    partial_P2D = torch.empty(parts, 2, hidden_size, dtype=torch.float32, device=rows_RD.device)
    _sums_of_rows_kernel[(parts, blocks_d)](
        coef_2R, rows_RD,
        partial_P2D,
        num_rows, hidden_size,
        BLOCK_R=block_r, BLOCK_D=block_d,
    )  # fmt: skip
    return partial_P2D.sum(0)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["coef_ptr"])
def _sums_of_rows_kernel(
    coef_ptr,  # in: [2, R] fp32
    rows_ptr,  # in: [R, D]
    partial_ptr,  # out: [P, 2, D] fp32
    num_rows,
    hidden_size,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    part = tl.program_id(0)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_d = offs_d < hidden_size
    first_sum = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    second_sum = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for first in range(part * BLOCK_R, num_rows, tl.num_programs(0) * BLOCK_R):
        offs_r = first + tl.arange(0, BLOCK_R)
        in_r = offs_r < num_rows
        first_coef = tl.load(coef_ptr + offs_r, mask=in_r, other=0)
        second_coef = tl.load(coef_ptr + num_rows.to(tl.int64) + offs_r, mask=in_r, other=0)
        mask = ((first_coef != 0) | (second_coef != 0))[:, None] & in_d[None, :]
        where = rows_ptr + offs_r.to(tl.int64)[:, None] * hidden_size + offs_d[None, :]
        row = tl.load(where, mask=mask, other=0).to(tl.float32)
        first_sum += first_coef[:, None] * row
        second_sum += second_coef[:, None] * row
    target = partial_ptr + part.to(tl.int64) * 2 * hidden_size + offs_d
    tl.store(target, tl.sum(first_sum, 0), mask=in_d)
    tl.store(target + hidden_size, tl.sum(second_sum, 0), mask=in_d)
