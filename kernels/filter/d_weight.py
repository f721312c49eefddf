"""Rows of d_weight: a matrix product for what all columns have, then the entries of each column.

    d_weight_j  =  sum_i g_ij hidden_i  +  share_j sum_i r_i hidden_i  +  factor * (the sampled tokens' correction)_j

g are the listed gradients, r_i is the token's factor on the control variate, and share_j is column j's part of the mass that
all tokens drop (``shares.py``). Rows of frequent columns are matrix products of their own (``filter/__init__.py``).

``sort_entries`` sorts each column's entries by token. So its row is summed in registers, in token order, and written once: no
atomics on floats, and the same bits in every run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cce_dist.kernels.blocks import halves, has_tma, kernel, load_tile, operand
from cce_dist.kernels.filter.lists import Entries, Tokens
from cce_dist.kernels.filter.sampling import GAIN, Factors, SampledTokens
from cce_dist.kernels.tiles import Tile, num_programs, precision
from cce_dist.kernels.waves import cdiv


def sort_entries(entries: Entries) -> None:
    """Write ``sorted_2M``. An entry's place is the number of its column's entries with an earlier token."""
    capacity = entries.entry_3M.shape[1]
    device, num_valid = entries.first_V.device, entries.end_V.shape[0]
    _sort_entries_kernel[(min(cdiv(capacity, 64), 8 * num_programs(device)),)](
        entries.first_V, entries.end_V, entries.entry_3M, entries.sorted_2M, num_valid, capacity, BLOCK=64
    )


@kernel("first_ptr", "end_ptr", "entry_ptr", "sorted_ptr")
def _sort_entries_kernel(
    first_ptr,  # in: [V + 1] int32
    end_ptr,  # in: [V] int32
    entry_ptr,  # in: [3, M] int32, as in ``Entries``
    sorted_ptr,  # out: [2, M] int32, as in ``Entries``
    num_valid,
    capacity,
    BLOCK: tl.constexpr,
):
    plane = capacity.to(tl.int64)
    total = tl.minimum(tl.load(first_ptr + num_valid), capacity)
    for begin in range(tl.program_id(0) * BLOCK, total, tl.num_programs(0) * BLOCK):
        offs_m = begin + tl.arange(0, BLOCK)
        column = tl.load(entry_ptr + offs_m, mask=offs_m < total, other=-1)
        # Places that no entry took hold any number, which is no column whose entries include this place.
        used = (column >= 0) & (column < num_valid)
        low = tl.load(first_ptr + column, mask=used, other=total)
        high = tl.load(end_ptr + column, mask=used, other=0)
        used &= (low <= offs_m) & (offs_m < high)
        low = tl.where(used, low, total)
        high = tl.where(used, high, 0)
        token = tl.load(entry_ptr + plane + offs_m, mask=used, other=0)
        rank = tl.zeros((BLOCK,), tl.int32)
        # Compare BLOCK entries with all entries of their columns, BLOCK at a time: most columns have a few.
        for first in range(tl.min(low, 0), tl.max(high, 0), BLOCK):
            offs_o = first + tl.arange(0, BLOCK)
            of_other = tl.load(entry_ptr + plane + offs_o, mask=offs_o < total, other=0)
            together = (offs_o[None, :] >= low[:, None]) & (offs_o[None, :] < high[:, None])
            rank += tl.sum((together & (of_other[None, :] < token[:, None])).to(tl.int32), 1)
        tl.store(sorted_ptr + low + rank, token, mask=used)
        grad = tl.load(entry_ptr + 2 * plane + offs_m, mask=used, other=0)
        tl.store(sorted_ptr + plane + low + rank, grad, mask=used)


def set_weight(
    d_weight_VD: torch.Tensor, sampled: SampledTokens | None, factors: Factors | None, slot_V: torch.Tensor,
    frequent_FD: torch.Tensor, share_V: torch.Tensor, shared_D: torch.Tensor, tokens: Tokens, tile: Tile, *, add: bool,
) -> None:
    """Set d_weight_VD to the sum of all parts except entries, or add the sum.

    Args:
        d_weight_VD: out, or in and out: rows past the last column are left alone. It is added to if there are unserved tokens,
            whose gradient it holds, and left alone if all tokens are.
        sampled, factors: The sampled tokens' correction with its factor GAIN, or None.
        slot_V: As in ``Frequent``: 1 plus the position among the frequent columns, or 0.
        frequent_FD: The frequent columns' rows of the gradient.
        share_V: Each column's part of the dropped mass.
        shared_D: sum_i r_i hidden_i, fp32.
        tile: Tile of a long product. Half of its columns are taken: this product is short, so its time is mostly stores, which
            a second program on the same multiprocessor hides.
    """
    num_cols, hidden_size = share_V.shape[0], d_weight_VD.shape[1]
    tile = tile._replace(cols=max(16, tile.cols // 2), warps=max(1, tile.warps // 2))
    num_tiles = cdiv(num_cols, tile.rows) * cdiv(hidden_size, tile.cols)
    parts = rows = reweighting_2V = values_4 = None
    num_sampled = stride = 0
    tma = True
    if sampled is not None and factors is not None:
        parts_SV, rows_SD = sampled.parts_SV, sampled.rows.hidden
        tma, num_sampled, stride = has_tma(parts_SV, rows_SD), rows_SD.shape[0], parts_SV.stride(0)
        parts, rows = operand(parts_SV, tile.inner, tile.rows, tma), operand(rows_SD, tile.inner, tile.cols, tma)
        reweighting_2V, values_4 = sampled.reweighting_2V, factors.values_4
    _set_weight_kernel[(min(num_tiles, 2 * num_programs(d_weight_VD.device)),)](
        # in
        parts, rows, values_4, reweighting_2V, slot_V, frequent_FD, share_V, shared_D, tokens.counters_5,
        # out, or in and out
        d_weight_VD,
        # sizes
        num_sampled, num_cols, hidden_size, stride, num_tiles, int(add),
        # tiles
        BLOCK_V=tile.rows, BLOCK_D=tile.cols, BLOCK_S=tile.inner, TMA=tma, PRECISION=precision(frequent_FD.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )


@kernel("parts", "rows", "slot_ptr", "frequent_ptr", "shared_ptr", "d_weight_ptr", "hidden_size")
def _set_weight_kernel(
    parts,  # in: [S, V or more] descriptor or pointer, or None
    rows,  # in: [S, D] descriptor or pointer, or None
    factors_ptr,  # in: [4] fp32, as in ``Factors``, or None; GAIN is read
    reweighting_ptr,  # in: [V] fp32, or None
    slot_ptr,  # in: [V] int32
    frequent_ptr,  # in: [F, D]
    share_ptr,  # in: [V] fp32
    shared_ptr,  # in: [D] fp32
    counter_ptr,  # in: [5] int32, as in ``Tokens``
    d_weight_ptr,  # out, or in and out: [V, D]
    num_sampled,
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
    num_unserved = tl.load(counter_ptr + 2)
    adding = (add != 0) | (num_unserved > 0)
    all_unserved = (num_unserved > 0) & (tl.load(counter_ptr + 3) == 0)
    num_col_blocks = tl.cdiv(hidden_size, BLOCK_D)
    # For each tile: acc [BLOCK_V, BLOCK_D] = parts [S, BLOCK_V].T @ rows [S, BLOCK_D], then the other parts are added.
    for tile in range(tl.program_id(0), tl.where(all_unserved, 0, num_tiles), tl.num_programs(0)):
        row = tile // num_col_blocks * BLOCK_V
        col = tile % num_col_blocks * BLOCK_D
        offs_v = row + tl.arange(0, BLOCK_V)
        in_v = offs_v < num_cols
        acc = tl.zeros((BLOCK_V, BLOCK_D), tl.float32)
        if parts is not None:
            gain = tl.load(factors_ptr + GAIN)
            for inner in range(0, tl.where(gain != 0, num_sampled, 0), BLOCK_S):
                p = load_tile(parts, inner, row, num_sampled, num_cols, parts_stride, BLOCK_S, BLOCK_V, TMA)
                h = load_tile(rows, inner, col, num_sampled, hidden_size, hidden_size, BLOCK_S, BLOCK_D, TMA)
                acc = tl.dot(p.T, h, acc, input_precision=PRECISION)
            acc *= (gain * tl.load(reweighting_ptr + offs_v, mask=in_v, other=0))[:, None]
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


def add_entries(d_weight_VD: torch.Tensor, hidden_ND: torch.Tensor, entries: Entries) -> None:
    """Add the entries to d_weight_VD; rows of columns without entries are left alone."""
    num_cols, hidden_size = entries.end_V.shape[0], hidden_ND.shape[1]
    block_v = 4
    block_d = next((size for size in (1024, 512) if cdiv(hidden_size, size) * size <= 1.125 * hidden_size), 256)
    num_items = cdiv(num_cols, block_v) * cdiv(hidden_size, block_d)
    _add_entries_kernel[(cdiv(num_items, 2),)](
        hidden_ND, entries.first_V, entries.end_V, entries.sorted_2M,
        d_weight_VD,
        num_cols, hidden_size, num_items, entries.sorted_2M.shape[1],
        BLOCK_V=block_v, BLOCK_D=block_d, BLOCK_K=8, SHORT=8, num_warps=block_d // 256,
    )


@kernel("hidden_ptr", "first_ptr", "end_ptr", "d_weight_ptr", "hidden_size")
def _add_entries_kernel(
    hidden_ptr,  # in: [N, D]
    first_ptr,  # in: [V + 1] int32
    end_ptr,  # in: [V] int32
    sorted_ptr,  # in: [2, M] int32, as in ``Entries``
    d_weight_ptr,  # in, out: [V, D]
    num_cols,
    hidden_size,
    num_items,
    capacity,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SHORT: tl.constexpr,
):
    num_blocks_v = tl.cdiv(num_cols, BLOCK_V)
    # An item is [BLOCK_V, BLOCK_D] of d_weight. Neighbouring programs share BLOCK_D elements of hidden states in the cache.
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        # An item's columns are far apart, to balance the work: neighbours often have many entries together.
        offs_v = item % num_blocks_v + tl.arange(0, BLOCK_V) * num_blocks_v
        offs_d = item // num_blocks_v * BLOCK_D + tl.arange(0, BLOCK_D)
        in_v = offs_v < num_cols
        in_d = offs_d < hidden_size
        begin = tl.load(first_ptr + offs_v, mask=in_v, other=0)
        end = tl.load(end_ptr + offs_v, mask=in_v, other=0)

        # Most columns have few entries or none. These are summed together, so that many rows are loaded at once. The next
        # entries are loaded while the rows of these arrive.
        few = (end > begin) & (end - begin <= SHORT)
        target = d_weight_ptr + offs_v.to(tl.int64)[:, None] * hidden_size + offs_d[None, :]
        mask = few[:, None] & in_d[None, :]
        part = tl.load(target, mask=mask, other=0).to(tl.float32)
        offs_k = begin
        token, grad = _entries(sorted_ptr, capacity, offs_k, few & (offs_k < end))
        for _ in range(0, tl.max(tl.where(few, end - begin, 0), 0)):
            rows = _rows(hidden_ptr, token, few & (offs_k < end), offs_d, in_d, hidden_size)
            offs_k += 1
            next_token, next_grad = _entries(sorted_ptr, capacity, offs_k, few & (offs_k < end))
            part += grad[:, None] * rows
            token, grad = next_token, next_grad
        tl.store(target, part.to(d_weight_ptr.dtype.element_ty), mask=mask)

        bit = 1 << tl.arange(0, BLOCK_V)
        to_do = tl.sum(tl.where(end - begin > SHORT, bit, 0), 0)
        while to_do > 0:  # then the columns with more entries, one after another
            this = bit == (to_do & -to_do)
            where = tl.sum(tl.where(this, offs_v, 0), 0).to(tl.int64) * hidden_size + offs_d
            acc = tl.load(d_weight_ptr + where, mask=in_d, other=0).to(tl.float32)
            row_begin, row_end = tl.sum(tl.where(this, begin, 0), 0), tl.sum(tl.where(this, end, 0), 0)
            these_k = row_begin + tl.arange(0, BLOCK_K)
            tokens, grads = _entries(sorted_ptr, capacity, these_k, these_k < row_end)
            for _ in range(row_begin, row_end, BLOCK_K):
                rows = _rows(hidden_ptr, tokens, these_k < row_end, offs_d, in_d, hidden_size)
                these_k += BLOCK_K
                next_tokens, next_grads = _entries(sorted_ptr, capacity, these_k, these_k < row_end)
                acc += tl.sum(grads[:, None] * rows, 0)
                tokens, grads = next_tokens, next_grads
            tl.store(d_weight_ptr + where, acc.to(d_weight_ptr.dtype.element_ty), mask=in_d)
            to_do &= to_do - 1


@triton.jit
def _entries(sorted_ptr, capacity, offs_k, in_k):
    """Load token and gradient of the entries at ``offs_k``."""
    grad = tl.load(sorted_ptr + capacity.to(tl.int64) + offs_k, mask=in_k, other=0).to(tl.float32, bitcast=True)
    return tl.load(sorted_ptr + offs_k, mask=in_k, other=0), grad


@triton.jit
def _rows(rows_ptr, number, in_k, offs_d, in_d, hidden_size):
    """Load the elements ``offs_d`` of the rows ``number`` of a matrix, in fp32."""
    where = rows_ptr + number.to(tl.int64)[:, None] * hidden_size + offs_d[None, :]
    return tl.load(where, mask=in_k[:, None] & in_d[None, :], other=0).to(tl.float32)
