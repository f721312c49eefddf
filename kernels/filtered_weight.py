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

from cce_dist.kernels.filtered_hidden import Entries
from cce_dist.kernels.tiles import cdiv, num_programs


class ByColumn(NamedTuple):
    """Entries in order of their column, then of their token.

    Attributes:
        first_V: [V + 1] int32: where each column's entries start.
        token: [M] int32.
        grad: [M] fp32.
    """

    first_V: torch.Tensor
    token: torch.Tensor
    grad: torch.Tensor


def by_column(entries: Entries, num_cols: int) -> ByColumn:
    """Turn the lists of tokens into lists of columns."""
    column, order = entries.column.sort(stable=True)
    capacity = column.shape[0]
    first_V = torch.empty(num_cols + 1, dtype=torch.int32, device=column.device)
    columns = ByColumn(first_V, torch.empty_like(entries.token), torch.empty_like(entries.grad))
    _by_column_kernel[(cdiv(max(capacity, num_cols + 1), 256),)](
        column, order, entries.token, entries.grad,
        *columns,
        capacity, num_cols, capacity.bit_length(),
        BLOCK=256,
    )  # fmt: skip
    return columns


@triton.jit(do_not_specialize=["capacity", "num_cols", "num_steps"])
def _by_column_kernel(
    column_ptr,  # in: [M] int32, ascending
    order_ptr,  # in: [M] int64: where each was
    token_ptr,  # in: [M] int32
    grad_ptr,  # in: [M] fp32
    first_ptr,  # out: [V + 1] int32
    token_out_ptr,  # out: [M] int32
    grad_out_ptr,  # out: [M] fp32
    capacity,
    num_cols,
    num_steps,
    BLOCK: tl.constexpr,
):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    used = tl.load(column_ptr + offs, mask=offs < capacity, other=num_cols) < num_cols
    order = tl.load(order_ptr + offs, mask=used, other=0)
    tl.store(token_out_ptr + offs, tl.load(token_ptr + order, mask=used, other=0), mask=used)
    tl.store(grad_out_ptr + offs, tl.load(grad_ptr + order, mask=used, other=0), mask=used)

    if tl.program_id(0) * BLOCK <= num_cols:  # the same places as columns: the first entry of each, by bisection
        first = tl.zeros((BLOCK,), tl.int32)
        last = first + capacity
        for _ in range(0, num_steps):
            middle = (first + last) // 2
            before = tl.load(column_ptr + middle, mask=first < last, other=num_cols) < offs
            first = tl.where(before, middle + 1, first)
            last = tl.where(before, last, middle)
        tl.store(first_ptr + offs, first, mask=offs <= num_cols)


def filtered_weight(
    hidden_ND: torch.Tensor,
    entries: ByColumn,
    slot_V: torch.Tensor,
    head_HD: torch.Tensor,
    share_V: torch.Tensor,
    shared_2D: torch.Tensor,
    num_added: torch.Tensor,
    d_weight_VD: torch.Tensor,
    *,
    add: bool,
) -> None:
    """Set the rows of d_weight_VD to the sum of all their parts, or add it.

    Args:
        slot_V: Row of the head for each column, from 1 on, or 0.
        head_HD: The head's rows of the gradient.
        share_V: Each column's part of the dropped mass.
        shared_2D: sum_i scale P_i m_i hidden_i and sum_i scale UNIFORM_i hidden_i, fp32.
        num_added: [1] int32: if not 0, d_weight_VD holds the gradient of other tokens, to add to.
        d_weight_VD: in, out: may have more rows than there are columns; those are left alone.
        add: Add to d_weight_VD in any case.
    """
    num_cols, hidden_size = entries.first_V.shape[0] - 1, hidden_ND.shape[1]
    block_v, block_d = 8, 512
    _filtered_weight_kernel[(cdiv(num_cols, block_v) * cdiv(hidden_size, block_d),)](
        # in
        hidden_ND, entries.first_V, entries.token, entries.grad, slot_V, head_HD, share_V, shared_2D, num_added,
        # in, out
        d_weight_VD,
        # sizes
        num_cols, hidden_size, int(add),
        # tiles
        BLOCK_V=block_v, BLOCK_D=block_d, BLOCK_K=8, num_warps=2,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_cols", "add"],
    do_not_specialize_on_alignment=["token_ptr", "grad_ptr", "share_ptr", "num_added_ptr"],
)
def _filtered_weight_kernel(
    hidden_ptr,  # in: [N, D]
    first_ptr,  # in: [V + 1] int32
    token_ptr,  # in: [M] int32
    grad_ptr,  # in: [M] fp32
    slot_ptr,  # in: [V] int32
    head_ptr,  # in: [H, D]
    share_ptr,  # in: [V] fp32
    shared_ptr,  # in: [2, D] fp32
    num_added_ptr,  # in: [1] int32
    d_weight_ptr,  # in, out: [V, D]
    num_cols,
    hidden_size,
    add,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    num_col_blocks = tl.cdiv(hidden_size, BLOCK_D)
    # Columns far apart: neighbours are often frequent together, and each has entries to go through one after another.
    offs_v = tl.program_id(0) // num_col_blocks + tl.arange(0, BLOCK_V) * tl.cdiv(num_cols, BLOCK_V)
    offs_d = tl.program_id(0) % num_col_blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    in_v = offs_v < num_cols
    in_d = offs_d < hidden_size
    begin = tl.load(first_ptr + offs_v, mask=in_v, other=0)
    end = tl.load(first_ptr + offs_v + 1, mask=in_v, other=0)
    slot = tl.load(slot_ptr + offs_v, mask=in_v, other=0)
    share = tl.load(share_ptr + offs_v, mask=in_v, other=0)
    adding = (add != 0) | (tl.load(num_added_ptr) > 0)
    by_share = tl.load(shared_ptr + offs_d, mask=in_d, other=0)
    by_column = tl.load(shared_ptr + hidden_size + offs_d, mask=in_d, other=0)

    # Columns of no entries, nearly all: a row of the head or the stand-in.
    head = head_ptr + (slot.to(tl.int64) - 1)[:, None] * hidden_size + offs_d[None, :]
    in_head = (slot > 0)[:, None]
    part = tl.load(head, mask=in_head & in_d[None, :], other=0).to(tl.float32)
    part = tl.where(in_head, part, by_share[None, :] * share[:, None] + by_column[None, :])
    target = d_weight_ptr + offs_v.to(tl.int64)[:, None] * hidden_size + offs_d[None, :]
    mask = (in_v & (end == begin))[:, None] & in_d[None, :]
    part += tl.load(target, mask=mask & adding, other=0).to(tl.float32)
    tl.store(target, part.to(d_weight_ptr.dtype.element_ty), mask=mask)

    bit = 1 << tl.arange(0, BLOCK_V)
    to_do = tl.sum(tl.where(end > begin, bit, 0), 0)
    while to_do > 0:  # the others, one after another
        this = bit == (to_do & -to_do)
        row = d_weight_ptr + tl.sum(tl.where(this, offs_v, 0), 0).to(tl.int64) * hidden_size + offs_d
        acc = by_share * tl.sum(tl.where(this, share, 0.0), 0) + by_column
        acc += tl.load(row, mask=in_d & adding, other=0).to(tl.float32)
        row_end = tl.sum(tl.where(this, end, 0), 0)
        for first in range(tl.sum(tl.where(this, begin, 0), 0), row_end, BLOCK_K):
            offs_k = first + tl.arange(0, BLOCK_K)
            in_k = offs_k < row_end
            token = tl.load(token_ptr + offs_k, mask=in_k, other=0).to(tl.int64)
            grad = tl.load(grad_ptr + offs_k, mask=in_k, other=0)
            where = hidden_ptr + token[:, None] * hidden_size + offs_d[None, :]
            h = tl.load(where, mask=in_k[:, None] & in_d[None, :], other=0).to(tl.float32)
            acc += tl.sum(grad[:, None] * h, 0)
        tl.store(row, acc.to(d_weight_ptr.dtype.element_ty), mask=in_d)
        to_do &= to_do - 1


def filtered_bias(
    entries: ByColumn,
    slot_V: torch.Tensor,
    head_H: torch.Tensor,
    share_V: torch.Tensor,
    factor_2: torch.Tensor,
    d_bias_V: torch.Tensor,
) -> None:
    """Add the column sums of the listed gradients, of the head and of the stand-in to d_bias_V.

    Args:
        slot_V: As in ``filtered_weight``.
        head_H: The head's part, fp32.
        factor_2: sum_i scale P_i m_i and sum_i scale UNIFORM_i.
    """
    num_cols = entries.first_V.shape[0] - 1
    _filtered_bias_kernel[(cdiv(num_cols, 128),)](
        entries.first_V, entries.grad, slot_V, head_H, share_V, factor_2,
        d_bias_V,
        num_cols,
        BLOCK_V=128,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_cols"], do_not_specialize_on_alignment=["grad_ptr", "share_ptr"])
def _filtered_bias_kernel(
    first_ptr,  # in: [V + 1] int32
    grad_ptr,  # in: [M] fp32
    slot_ptr,  # in: [V] int32
    head_ptr,  # in: [H] fp32
    share_ptr,  # in: [V] fp32
    factor_ptr,  # in: [2] fp32
    d_bias_ptr,  # in, out: [V] fp32
    num_cols,
    BLOCK_V: tl.constexpr,
):
    offs_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_v = offs_v < num_cols
    begin = tl.load(first_ptr + offs_v, mask=in_v, other=0)
    end = tl.load(first_ptr + offs_v + 1, mask=in_v, other=0)
    slot = tl.load(slot_ptr + offs_v, mask=in_v, other=0)
    share = tl.load(share_ptr + offs_v, mask=in_v, other=0)
    stand_in = share * tl.load(factor_ptr) + tl.load(factor_ptr + 1)
    part = tl.where(slot > 0, tl.load(head_ptr + slot - 1, mask=slot > 0, other=0), stand_in)
    total = tl.load(d_bias_ptr + offs_v, mask=in_v, other=0) + part
    for step in range(0, tl.max(end - begin, 0)):
        total += tl.load(grad_ptr + begin + step, mask=begin + step < end, other=0)
    tl.store(d_bias_ptr + offs_v, total, mask=in_v)


def sums_of_rows(coef_2R: torch.Tensor, rows_RD: torch.Tensor) -> torch.Tensor:
    """Return coef_2R @ rows_RD in fp32, [2, D]; rows whose coefficients are both 0 are not read, whatever they hold."""
    num_rows, hidden_size = rows_RD.shape
    block_r, block_d = 32, 256
    blocks_d = cdiv(hidden_size, block_d)
    parts = max(1, min(cdiv(num_rows, block_r), 8 * num_programs(rows_RD.device) // blocks_d))
    partial_P2D = torch.empty(parts, 2, hidden_size, dtype=torch.float32, device=rows_RD.device)
    _sums_of_rows_kernel[(parts, blocks_d)](
        coef_2R, rows_RD,
        partial_P2D,
        num_rows, hidden_size,
        BLOCK_R=block_r, BLOCK_D=block_d, num_warps=8,
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
