"""Rows of d_hidden and d_weight from the listed gradients g and the control variate.

For a token, with m its softmax mass outside listed and frequent columns, and for a column j,

    d_hidden   += sum_j g_j weight_j    + scale P m (share . weight)
    d_weight_j  = sum_i g_i hidden_i    + share_j sum_i scale P_i m_i hidden_i

where ``share_j`` is column j's part of the mass that all tokens drop (``shares.py``). m is computed by subtraction, so the row
sums of the softmax are right whatever was dropped.

A stable sort orders the entries by column. So each row of d_weight is summed in registers, in token order, and written once: no
atomics, and the same bits every run. Rows of frequent columns come from a matrix product (``filter/__init__.py``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from cce_dist.kernels import Operands, Rows
from cce_dist.kernels.blocks import halves, has_tma, kernel, load_tile, operand
from cce_dist.kernels.d_hidden import Sum
from cce_dist.kernels.filter.lists import Decisions, Entries, Lists
from cce_dist.kernels.filter.sampling import GAIN, SampledTokens
from cce_dist.kernels.tiles import Tile, num_programs, precision
from cce_dist.kernels.waves import cdiv


def add_listed_hidden(
    total: Sum, x: Operands, rows: Rows, lists: Lists, how: Decisions, entries: Entries, *, longer_than: int
) -> None:
    """Add the listed columns' part to d_hidden for the group's tokens whose lists are longer than ``longer_than``."""
    num_rows, hidden_size = rows.index.shape[0], x.weight.shape[1]
    _filtered_hidden_kernel[(num_rows, cdiv(hidden_size, 1024))](
        x.weight, rows.index, rows.num_labelled, lists.count_N, how.ends_2N, entries.column, entries.grad,
        total.low_RD,
        total.high_ND,
        hidden_size, x.num_valid, longer_than,
        HAS_LOW=total.low_RD is not None, BY_TOKEN=total.by_token, BLOCK_K=8, BLOCK_D=1024, num_warps=4,
    )


@kernel("weight_ptr", "entry_column_ptr", "entry_grad_ptr", "low_ptr", "d_hidden_ptr", "hidden_size")
def _filtered_hidden_kernel(
    weight_ptr,  # in: [V, D]
    index_ptr,  # in: [R] int32
    num_labelled_ptr,  # in: [1] int32
    count_ptr,  # in: [N] int32
    end_ptr,  # in: [N] int32: end of the token's entries
    entry_column_ptr,  # in: [M] int32
    entry_grad_ptr,  # in: [M] fp32
    low_ptr,  # in: [R, D]
    d_hidden_ptr,  # in, out: [N, D]
    hidden_size,
    num_valid,
    longer_than,
    HAS_LOW: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0)
    if row >= tl.load(num_labelled_ptr):
        return
    token = tl.load(index_ptr + row).to(tl.int64)
    count = tl.load(count_ptr + token)
    if count <= longer_than:
        return
    end = tl.load(end_ptr + token)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_d = offs_d < hidden_size
    target = d_hidden_ptr + token * hidden_size + offs_d
    acc = tl.load(target, mask=in_d, other=0).to(tl.float32)
    if HAS_LOW:
        low_row = token if BY_TOKEN else row.to(tl.int64)
        acc += tl.load(low_ptr + low_row * hidden_size + offs_d, mask=in_d, other=0).to(tl.float32)
    offs_k = end - count + tl.arange(0, BLOCK_K)
    column = tl.load(entry_column_ptr + offs_k, mask=offs_k < end, other=num_valid)
    grad = tl.load(entry_grad_ptr + offs_k, mask=column < num_valid, other=0)
    # acc [BLOCK_D] += grad [BLOCK_K] @ weight rows [BLOCK_K, BLOCK_D], over the token's list.
    for _ in range(end - count, end, BLOCK_K):
        w = _rows(weight_ptr, column, column < num_valid, offs_d, in_d, hidden_size)
        offs_k += BLOCK_K  # load the next entries while these rows arrive
        next_column = tl.load(entry_column_ptr + offs_k, mask=offs_k < end, other=num_valid)
        next_grad = tl.load(entry_grad_ptr + offs_k, mask=offs_k < end, other=0)
        acc += tl.sum(grad[:, None] * w, 0)
        column = next_column
        grad = tl.where(column < num_valid, next_grad, 0.0)
    tl.store(target, acc.to(d_hidden_ptr.dtype.element_ty), mask=in_d)


class ByColumn(NamedTuple):
    """Entries sorted by column, then by token.

    Attributes:
        first_V: [V + 1] int32: index of each column's first entry.
        token: [M] int32.
        grad: [M] fp32.
    """

    first_V: torch.Tensor
    token: torch.Tensor
    grad: torch.Tensor


def by_column(entries: Entries, num_cols: int) -> ByColumn:
    """Sort the entries by column."""
    column, order = entries.column.sort(stable=True)
    capacity = column.shape[0]
    first_V = torch.empty(num_cols + 1, dtype=torch.int32, device=column.device)
    columns = ByColumn(
        first_V,
        torch.empty(capacity, dtype=torch.int32, device=column.device),
        torch.empty(capacity, dtype=torch.float32, device=column.device),
    )
    _by_column_kernel[(cdiv(max(capacity, num_cols + 1), 256),)](
        column, order, entries.token, entries.grad,
        *columns,
        capacity, num_cols, capacity.bit_length(),
        BLOCK=256,
    )
    return columns


@kernel("column_ptr", "order_ptr", "token_ptr", "grad_ptr", "first_ptr", "token_out_ptr", "grad_out_ptr")
def _by_column_kernel(
    column_ptr,  # in: [M] int32, ascending
    order_ptr,  # in: [M] int64: index of each in the unsorted entries
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

    if tl.program_id(0) * BLOCK <= num_cols:  # here ``offs`` are columns: bisection finds the first entry of each
        first = tl.zeros((BLOCK,), tl.int32)
        last = first + capacity
        for _ in range(0, num_steps):
            middle = (first + last) // 2
            before = tl.load(column_ptr + middle, mask=first < last, other=num_cols) < offs
            first = tl.where(before, middle + 1, first)
            last = tl.where(before, last, middle)
        tl.store(first_ptr + offs, first, mask=offs <= num_cols)


def listed_weight(
    d_weight_VD: torch.Tensor, hidden_ND: torch.Tensor, entries: ByColumn, slot_V: torch.Tensor, frequent_FD: torch.Tensor,
    share_V: torch.Tensor, shared_D: torch.Tensor, how: Decisions, factors_4: torch.Tensor | None, *,
    add: bool,
) -> None:
    """Set the rows of d_weight_VD to the sum of all their parts, or add the sum.

    Args:
        d_weight_VD: in, out: rows past the last column are left alone.
        slot_V: As in ``Frequent``: 1 plus the position among the frequent columns, or 0.
        frequent_FD: The frequent columns' rows of the gradient.
        share_V: Each column's part of the dropped mass, times any number.
        shared_D: sum_i scale P_i m_i hidden_i, divided by this number, fp32.
        how: If some tokens fall back, d_weight_VD holds their gradient and is added to. If all are exact, nothing is written.
        factors_4: If GAIN is not 0, ``compensated_weight`` has set the rows to all other parts.
        add: Add to d_weight_VD in any case.
    """
    num_cols, hidden_size = entries.first_V.shape[0] - 1, hidden_ND.shape[1]
    block_v = 4
    block_d = next((size for size in (1024, 512) if cdiv(hidden_size, size) * size <= 1.125 * hidden_size), 256)
    num_items = cdiv(num_cols, block_v) * cdiv(hidden_size, block_d)
    _filtered_weight_kernel[(cdiv(num_items, 2),)](
        # in
        hidden_ND, entries.first_V, entries.token, entries.grad, slot_V, frequent_FD, share_V, shared_D,
        how.num_exact, how.num_fallback, factors_4,
        # in, out
        d_weight_VD,
        # sizes
        num_cols, hidden_size, num_items, int(add),
        # options
        HAS_FACTORS=factors_4 is not None,
        # tiles
        BLOCK_V=block_v, BLOCK_D=block_d, BLOCK_K=8, SHORT=8, num_warps=block_d // 256,
    )


@kernel(
    "hidden_ptr", "first_ptr", "slot_ptr", "frequent_ptr", "shared_ptr", "d_weight_ptr", "hidden_size"
)
def _filtered_weight_kernel(
    hidden_ptr,  # in: [N, D]
    first_ptr,  # in: [V + 1] int32
    token_ptr,  # in: [M] int32
    grad_ptr,  # in: [M] fp32
    slot_ptr,  # in: [V] int32
    frequent_ptr,  # in: [F, D]
    share_ptr,  # in: [V] fp32
    shared_ptr,  # in: [D] fp32
    num_exact_ptr,  # in: [1] int32
    num_fallback_ptr,  # in: [1] int32
    factors_ptr,  # in: [4] fp32, as ``sampling.factors_of`` returns them; with HAS_FACTORS
    d_weight_ptr,  # in, out: [V, D]
    num_cols,
    hidden_size,
    num_items,
    add,
    HAS_FACTORS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SHORT: tl.constexpr,
):
    if tl.load(num_exact_ptr) > 0:
        return
    num_blocks_v = tl.cdiv(num_cols, BLOCK_V)
    adding = (add != 0) | (tl.load(num_fallback_ptr) > 0)
    others_done = (tl.load(factors_ptr + GAIN) != 0) if HAS_FACTORS else False
    adding |= others_done
    # An item is [BLOCK_V, BLOCK_D] of d_weight. Neighbouring programs share BLOCK_D elements of hidden states in the cache.
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        # An item's columns are far apart, to balance the work: neighbours often have many entries together.
        offs_v = item % num_blocks_v + tl.arange(0, BLOCK_V) * num_blocks_v
        offs_d = item // num_blocks_v * BLOCK_D + tl.arange(0, BLOCK_D)
        in_v = offs_v < num_cols
        in_d = offs_d < hidden_size
        begin = tl.load(first_ptr + offs_v, mask=in_v, other=0)
        end = tl.load(first_ptr + offs_v + 1, mask=in_v, other=0)
        slot = tl.load(slot_ptr + offs_v, mask=in_v, other=0)
        share = tl.load(share_ptr + offs_v, mask=in_v, other=0)
        by_share = tl.load(shared_ptr + offs_d, mask=in_d, other=0)

        # Most columns have few entries or none. These are summed together, so that many rows are loaded at once. The next
        # entries are loaded while the rows of these arrive.
        few = in_v & (end - begin <= SHORT)
        part = tl.zeros((BLOCK_V, BLOCK_D), tl.float32)
        if not others_done:
            frequent = frequent_ptr + (slot.to(tl.int64) - 1)[:, None] * hidden_size + offs_d[None, :]
            is_frequent = (slot > 0)[:, None]
            part = tl.load(frequent, mask=is_frequent & in_d[None, :], other=0).to(tl.float32)
            part = tl.where(is_frequent, part, by_share[None, :] * share[:, None])
        target = d_weight_ptr + offs_v.to(tl.int64)[:, None] * hidden_size + offs_d[None, :]
        mask = (few & tl.where(others_done, end > begin, True))[:, None] & in_d[None, :]
        part += tl.load(target, mask=tl.where(adding, mask, False), other=0).to(tl.float32)
        offs_k = begin
        token, grad = _entries(token_ptr, grad_ptr, offs_k, few & (offs_k < end))
        for _ in range(0, tl.max(tl.where(few, end - begin, 0), 0)):
            rows = _rows(hidden_ptr, token, few & (offs_k < end), offs_d, in_d, hidden_size)
            offs_k += 1
            next_token, next_grad = _entries(token_ptr, grad_ptr, offs_k, few & (offs_k < end))
            part += grad[:, None] * rows
            token, grad = next_token, next_grad
        tl.store(target, part.to(d_weight_ptr.dtype.element_ty), mask=mask)

        bit = 1 << tl.arange(0, BLOCK_V)
        to_do = tl.sum(tl.where(end - begin > SHORT, bit, 0), 0)
        while to_do > 0:  # then the columns with more entries, one after another
            this = bit == (to_do & -to_do)
            where = tl.sum(tl.where(this, offs_v, 0), 0).to(tl.int64) * hidden_size + offs_d
            row = d_weight_ptr + where
            acc = tl.zeros((BLOCK_D,), tl.float32)
            if not others_done:
                this_share = tl.sum(tl.where(this, share, 0.0), 0)
                acc += by_share * this_share
            acc += tl.load(row, mask=tl.where(adding, in_d, False), other=0).to(tl.float32)
            row_begin, row_end = tl.sum(tl.where(this, begin, 0), 0), tl.sum(tl.where(this, end, 0), 0)
            these_k = row_begin + tl.arange(0, BLOCK_K)
            tokens, grads = _entries(token_ptr, grad_ptr, these_k, these_k < row_end)
            for _ in range(row_begin, row_end, BLOCK_K):
                rows = _rows(hidden_ptr, tokens, these_k < row_end, offs_d, in_d, hidden_size)
                these_k += BLOCK_K
                next_tokens, next_grads = _entries(token_ptr, grad_ptr, these_k, these_k < row_end)
                acc += tl.sum(grads[:, None] * rows, 0)
                tokens, grads = next_tokens, next_grads
            tl.store(row, acc.to(d_weight_ptr.dtype.element_ty), mask=in_d)
            to_do &= to_do - 1


@triton.jit
def _entries(token_ptr, grad_ptr, offs_k, in_k):
    """Load token and gradient of the entries at ``offs_k``."""
    return tl.load(token_ptr + offs_k, mask=in_k, other=0), tl.load(grad_ptr + offs_k, mask=in_k, other=0)


@triton.jit
def _rows(rows_ptr, number, in_k, offs_d, in_d, hidden_size):
    """Load the elements ``offs_d`` of the rows ``number`` of a matrix, in fp32."""
    where = rows_ptr + number.to(tl.int64)[:, None] * hidden_size + offs_d[None, :]
    return tl.load(where, mask=in_k[:, None] & in_d[None, :], other=0).to(tl.float32)


def compensated_weight(
    d_weight_VD: torch.Tensor, tokens: SampledTokens, factors_4: torch.Tensor, slot_V: torch.Tensor, frequent_FD: torch.Tensor,
    share_V: torch.Tensor, shared_D: torch.Tensor, how: Decisions, tile: Tile, *, add: bool,
) -> None:
    """Set d_weight_VD to the sum of all parts except listed gradients, or add it. The sampled tokens' correction is included.

    Args:
        d_weight_VD: in, out: rows past the last column are left alone.
        tokens: The sampled tokens.
        factors_4: GAIN is the factor on the sampled tokens' correction. If it is 0, nothing is written.
        tile: Tile of a long product. Half of its columns are taken: this product is short, so its time is mostly stores, which
            a second program on the same multiprocessor hides.
        slot_V, frequent_FD, share_V, shared_D, how, add: As in ``listed_weight``.
    """
    num_cols, hidden_size = share_V.shape[0], d_weight_VD.shape[1]
    parts_SV, rows_SD = tokens.parts_SV, tokens.rows.hidden
    tile = tile._replace(cols=max(16, tile.cols // 2), warps=max(1, tile.warps // 2))
    tma = has_tma(parts_SV, rows_SD)
    num_tiles = cdiv(num_cols, tile.rows) * cdiv(hidden_size, tile.cols)
    _compensated_weight_kernel[(min(num_tiles, 2 * num_programs(rows_SD.device)),)](
        # in
        operand(parts_SV, tile.inner, tile.rows, tma), operand(rows_SD, tile.inner, tile.cols, tma),
        tokens.rows.num_labelled, factors_4, slot_V, frequent_FD, share_V, shared_D, how.num_exact, how.num_fallback,
        # in, out
        d_weight_VD,
        # sizes
        rows_SD.shape[0], num_cols, hidden_size, parts_SV.stride(0), num_tiles, int(add),
        # tiles
        BLOCK_V=tile.rows, BLOCK_D=tile.cols, BLOCK_S=tile.inner, TMA=tma, PRECISION=precision(rows_SD.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )


@kernel("parts", "rows", "slot_ptr", "frequent_ptr", "shared_ptr", "d_weight_ptr", "hidden_size")
def _compensated_weight_kernel(
    parts,  # in: [S, V or more] descriptor or pointer
    rows,  # in: [S, D] descriptor or pointer
    num_sampled_ptr,  # in: [1] int32
    factors_ptr,  # in: [4] fp32, as ``sampling.factors_of`` returns them; GAIN is read
    slot_ptr,  # in: [V] int32
    frequent_ptr,  # in: [F, D]
    share_ptr,  # in: [V] fp32
    shared_ptr,  # in: [D] fp32
    num_exact_ptr,  # in: [1] int32
    num_fallback_ptr,  # in: [1] int32
    d_weight_ptr,  # in, out: [V, D]
    num_rows,
    num_cols,
    hidden_size,
    parts_stride,
    num_tiles,
    add,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    gain = tl.load(factors_ptr + GAIN)
    num_sampled = tl.load(num_sampled_ptr)
    adding = (add != 0) | (tl.load(num_fallback_ptr) > 0)
    num_col_blocks = tl.cdiv(hidden_size, BLOCK_D)
    nothing = (tl.load(num_exact_ptr) > 0) | (gain == 0)
    # For each tile: acc [BLOCK_V, BLOCK_D] = parts [S, BLOCK_V].T @ rows [S, BLOCK_D], then the other parts are added.
    for tile in range(tl.program_id(0), tl.where(nothing, 0, num_tiles), tl.num_programs(0)):
        row = tile // num_col_blocks * BLOCK_V
        col = tile % num_col_blocks * BLOCK_D
        acc = tl.zeros((BLOCK_V, BLOCK_D), tl.float32)
        for inner in range(0, num_sampled, BLOCK_S):
            p = load_tile(parts, inner, row, num_rows, num_cols, parts_stride, BLOCK_S, BLOCK_V, TMA)
            h = load_tile(rows, inner, col, num_rows, hidden_size, hidden_size, BLOCK_S, BLOCK_D, TMA)
            acc = tl.dot(p.T, h, acc, input_precision=PRECISION)
        offs_v = row + tl.arange(0, BLOCK_V)
        in_v = offs_v < num_cols
        acc *= gain
        slot = tl.load(slot_ptr + offs_v, mask=in_v, other=0)
        share = tl.load(share_ptr + offs_v, mask=in_v, other=0)
        is_frequent = (slot > 0)[:, None]
        # The tile is stored a quarter at a time: the whole of it beside its addresses spills registers.
        for half in tl.static_range(2):
            for quarter in tl.static_range(2):
                part = halves(halves(acc)[half])[quarter]
                offs_d = col + (2 * half + quarter) * (BLOCK_D // 4) + tl.arange(0, BLOCK_D // 4)
                in_d = offs_d < hidden_size
                part += tl.load(shared_ptr + offs_d, mask=in_d, other=0)[None, :] * share[:, None]
                frequent = frequent_ptr + (slot.to(tl.int64) - 1)[:, None] * hidden_size + offs_d[None, :]
                part = tl.where(
                    is_frequent, tl.load(frequent, mask=is_frequent & in_d[None, :], other=0).to(tl.float32), part
                )
                where = d_weight_ptr + offs_v.to(tl.int64)[:, None] * hidden_size + offs_d[None, :]
                mask = in_v[:, None] & in_d[None, :]
                part += tl.load(where, mask=tl.where(adding, mask, False), other=0).to(tl.float32)
                tl.store(where, part.to(d_weight_ptr.dtype.element_ty), mask=mask)
