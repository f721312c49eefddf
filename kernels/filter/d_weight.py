"""Rows of d_weight from the listed gradients g, the control variate and its correction by sampled tokens.

For a column j, with m_i the softmax mass of token i outside listed and frequent columns,

    d_weight_j  = sum_i g_ij hidden_i    + share_j sum_i scale P_i m_i hidden_i    + the correction of column j

where ``share_j`` is column j's part of the mass that all tokens drop (``shares.py``). A kernel sorts each column's gradients by
token. So each row of d_weight is summed in registers, in token order, and written once: no atomics on floats, and the same bits
every run. Rows of frequent columns come from a matrix product (``filter/__init__.py``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cce_dist.kernels.blocks import halves, has_tma, kernel, load_tile, operand
from cce_dist.kernels.filter.lists import Decisions, Lists
from cce_dist.kernels.filter.sampling import GAIN, Compensation
from cce_dist.kernels.tiles import Tile, cdiv, num_programs, precision


def add_listed(
    d_weight_VD: torch.Tensor, hidden_ND: torch.Tensor, lists: Lists, how: Decisions, frequent_FD: torch.Tensor,
    comp: Compensation, tile: Tile, *, add: bool,
) -> None:
    """Set the rows of d_weight_VD to the sum of all their parts, or with ``add`` add the sum.

    If there are unserved tokens, d_weight_VD holds their gradient and is added to. If no token is listed beside them, nothing
    is written. If the factor GAIN is not 0, the sampled tokens' correction comes first and writes all parts except listed
    gradients, which are then added.

    Args:
        d_weight_VD: in, out: rows past the last column are left alone.
        frequent_FD: The frequent columns' rows of the gradient.
        comp: The control variate. Each column's ``sums_V`` times the second row of ``Columns.shared_2D`` is added.
        tile: Tile of a long product.
    """
    num_cols, hidden_size = how.end_V.shape[0], hidden_ND.shape[1]
    others = (how, frequent_FD, comp.sums_V, comp.columns.shared_2D, comp.factors_4)
    if comp.parts_SV is not None and comp.sample is not None:
        # Half of the tile's columns: this product is short, so its time is mostly stores, which a second program on the same
        # multiprocessor hides.
        tile = tile._replace(cols=max(16, tile.cols // 2), warps=max(1, tile.warps // 2))
        tma, rows_SD = has_tma(comp.parts_SV, comp.sample.rows_SD), comp.sample.rows_SD
        num_tiles = cdiv(num_cols, tile.rows) * cdiv(hidden_size, tile.cols)
        _compensated_weight_kernel[(min(num_tiles, 2 * num_programs(rows_SD.device)),)](
            # in
            operand(comp.parts_SV, tile.inner, tile.rows, tma), operand(rows_SD, tile.inner, tile.cols, tma),
            comp.sample.size, *others,
            # in, out
            d_weight_VD,
            # sizes
            rows_SD.shape[0], num_cols, hidden_size, comp.parts_SV.stride(0), num_tiles, int(add),
            # tiles
            BLOCK_V=tile.rows, BLOCK_D=tile.cols, BLOCK_S=tile.inner, TMA=tma, PRECISION=precision(rows_SD.dtype),
            num_warps=tile.warps, num_stages=tile.stages,
        )

    # The gradients by column, then by token. Column j has those from ``first_V[j]`` to ``end_V[j]``.
    token_M, grad_M = torch.empty_like(how.slot_M), torch.empty_like(how.slot_M, dtype=torch.float32)
    capacity, block = token_M.shape[0], 64
    _by_column_kernel[(max(1, min(cdiv(capacity, block), 8 * num_programs(token_M.device))),)](
        lists.columns_NL, how,
        token_M, grad_M,
        lists.columns_NL.shape[1], num_cols, capacity,
        BLOCK=block,
    )
    block_v = 4
    block_d = next((size for size in (1024, 512) if cdiv(hidden_size, size) * size <= 1.125 * hidden_size), 256)
    num_items = cdiv(num_cols, block_v) * cdiv(hidden_size, block_d)
    _filtered_weight_kernel[(cdiv(num_items, 2),)](
        # in
        hidden_ND, token_M, grad_M, *others,
        # in, out
        d_weight_VD,
        # sizes
        num_cols, hidden_size, num_items, int(add),
        # tiles
        BLOCK_V=block_v, BLOCK_D=block_d, BLOCK_K=8, SHORT=8, num_warps=block_d // 256,
    )


@kernel("column_ptr", "token_ptr", "grad_ptr")
def _by_column_kernel(
    column_ptr,  # in: [N, L] int32
    how,  # in: Decisions
    token_ptr,  # out: [N L] int32
    grad_ptr,  # out: [N L] fp32
    num_slots,
    num_valid,
    capacity,
    BLOCK: tl.constexpr,
):
    total = tl.load(how.first_V + num_valid)
    for begin in range(tl.program_id(0) * BLOCK, total, tl.num_programs(0) * BLOCK):
        offs_m = begin + tl.arange(0, BLOCK)
        slot = tl.load(how.slot_M + offs_m, mask=offs_m < total, other=-1)
        # Unused places hold garbage. Ignore them if the slot is out of range, or if its column does not own the place.
        used = (slot >= 0) & (slot < capacity)
        column = tl.load(column_ptr + slot, mask=used, other=-1)
        used &= (column >= 0) & (column < num_valid)
        low = tl.load(how.first_V + column, mask=used, other=0)
        high = tl.load(how.end_V + column, mask=used, other=0)
        used &= (low <= offs_m) & (offs_m < high)
        low = tl.where(used, low, total)
        high = tl.where(used, high, 0)
        rank = tl.zeros((BLOCK,), tl.int32)
        # Compare the BLOCK slots with all slots of their columns, BLOCK at a time: most columns have a few.
        for first in range(tl.min(low, 0), tl.max(high, 0), BLOCK):
            offs_o = first + tl.arange(0, BLOCK)
            other = tl.load(how.slot_M + offs_o, mask=offs_o < total, other=0)
            of_column = (offs_o[None, :] >= low[:, None]) & (offs_o[None, :] < high[:, None])
            rank += tl.sum((of_column & (other[None, :] < slot[:, None])).to(tl.int32), 1)
        tl.store(token_ptr + low + rank, slot // num_slots, mask=used)
        tl.store(grad_ptr + low + rank, tl.load(how.grad_NL + slot, mask=used, other=0), mask=used)


@kernel("hidden_ptr", "frequent_ptr", "shared_ptr", "d_weight_ptr", "hidden_size")
def _filtered_weight_kernel(
    hidden_ptr,  # in: [N, D]
    token_ptr,  # in: [N L] int32
    grad_ptr,  # in: [N L] fp32
    how,  # in: Decisions
    frequent_ptr,  # in: [F, D]
    share_ptr,  # in: [V] fp32
    shared_ptr,  # in: [2, D] fp32, as in ``Columns``; the second row is read
    factors_ptr,  # in: [4] fp32, as ``sampling.factors_of`` returns them, or None; GAIN is read
    d_weight_ptr,  # in, out: [V, D]
    num_cols,
    hidden_size,
    num_items,
    add,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SHORT: tl.constexpr,
):
    num_unserved = tl.load(how.num_unserved)
    if (num_unserved > 0) & (tl.load(how.num_listed) == 0):
        return
    num_blocks_v = tl.cdiv(num_cols, BLOCK_V)
    others_done = (tl.load(factors_ptr + GAIN) != 0) if factors_ptr is not None else False
    adding = (add != 0) | (num_unserved > 0) | others_done
    # An item is [BLOCK_V, BLOCK_D] of d_weight. Neighbouring programs share BLOCK_D elements of hidden states in the cache.
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        # An item's columns are far apart, to balance the work: neighbours often have many entries together.
        offs_v = item % num_blocks_v + tl.arange(0, BLOCK_V) * num_blocks_v
        offs_d = item // num_blocks_v * BLOCK_D + tl.arange(0, BLOCK_D)
        in_v = offs_v < num_cols
        in_d = offs_d < hidden_size
        begin = tl.load(how.first_V + offs_v, mask=in_v, other=0)
        end = tl.load(how.end_V + offs_v, mask=in_v, other=0)
        slot = tl.load(how.slot_V + offs_v, mask=in_v, other=0)
        share = tl.load(share_ptr + offs_v, mask=in_v, other=0)
        by_share = tl.load(shared_ptr + hidden_size + offs_d, mask=in_d, other=0)

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


@kernel("parts", "rows", "frequent_ptr", "shared_ptr", "d_weight_ptr", "hidden_size")
def _compensated_weight_kernel(
    parts,  # in: [S, V or more] descriptor or pointer
    rows,  # in: [S, D] descriptor or pointer
    size_ptr,  # in: [2] int32, as in ``Sample``
    how,  # in: Decisions
    frequent_ptr,  # in: [F, D]
    share_ptr,  # in: [V] fp32
    shared_ptr,  # in: [2, D] fp32, as in ``Columns``; the second row is read
    factors_ptr,  # in: [4] fp32, as ``sampling.factors_of`` returns them, or None; GAIN is read
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
    num_sampled = tl.load(size_ptr)
    num_unserved = tl.load(how.num_unserved)
    adding = (add != 0) | (num_unserved > 0)
    num_col_blocks = tl.cdiv(hidden_size, BLOCK_D)
    nothing = ((num_unserved > 0) & (tl.load(how.num_listed) == 0)) | (gain == 0)
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
        slot = tl.load(how.slot_V + offs_v, mask=in_v, other=0)
        share = tl.load(share_ptr + offs_v, mask=in_v, other=0)
        is_frequent = (slot > 0)[:, None]
        # The tile is stored a quarter at a time: the whole of it beside its addresses spills registers.
        for half in tl.static_range(2):
            for quarter in tl.static_range(2):
                part = halves(halves(acc)[half])[quarter]
                offs_d = col + (2 * half + quarter) * (BLOCK_D // 4) + tl.arange(0, BLOCK_D // 4)
                in_d = offs_d < hidden_size
                by_share = tl.load(shared_ptr + hidden_size + offs_d, mask=in_d, other=0)
                part += by_share[None, :] * share[:, None]
                frequent = frequent_ptr + (slot.to(tl.int64) - 1)[:, None] * hidden_size + offs_d[None, :]
                part = tl.where(
                    is_frequent, tl.load(frequent, mask=is_frequent & in_d[None, :], other=0).to(tl.float32), part
                )
                where = d_weight_ptr + offs_v.to(tl.int64)[:, None] * hidden_size + offs_d[None, :]
                mask = in_v[:, None] & in_d[None, :]
                part += tl.load(where, mask=tl.where(adding, mask, False), other=0).to(tl.float32)
                tl.store(where, part.to(d_weight_ptr.dtype.element_ty), mask=mask)
