"""Gradient of the hidden states: d_hidden = scale * (dlogits @ weight), a chunk of the vocabulary at a time.

A chunk's product is added to what earlier chunks left. The sum is kept as two 16-bit numbers, ``d_hidden`` itself and a
remainder ``low``: 16 bits of mantissa for half the workspace of an fp32 buffer.

d_hidden has few tiles, so a last wave that is not full takes long. Its tiles are cut along the vocabulary into parts that fill
one wave or two, and a second kernel adds the parts in order.

A filter's exact path often has no token, or a few, and only the device knows how many. There (OFTEN_EMPTY) the device cuts the
tiles into parts if they fill less than half of a wave. A part collects all chunks; the second kernel then adds the parts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from cce_dist.kernels import Rows
from cce_dist.kernels.blocks import halves, has_tma, kernel, load_tile, operand
from cce_dist.kernels.tiles import Tile, Tiles, cdiv, cut_last_wave, fitted, num_programs, precision


class Sum(NamedTuple):
    """d_hidden while chunks are added to it."""

    high_ND: torch.Tensor  # [N, D] in the hidden states' dtype: d_hidden itself
    low_RD: torch.Tensor | None  # [R, D] bf16: the remainder; None in fp32, or for one chunk
    # Only for calls that are often empty: scratch for cut tiles, which groups of at most ``few_rows`` tokens use
    parts_PRC: torch.Tensor | None = None
    few_rows: int = 0


def add_d_hidden(
    total: Sum,
    dlogits_RV: torch.Tensor,
    weight_VD: torch.Tensor,
    rows: Rows,
    scale_R: torch.Tensor | None,
    gain: torch.Tensor | None,
    tile: Tile,
    *,
    first: bool,
    outer: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Add gain * scale_R * (dlogits_RV @ weight_VD) at the tokens of the group; ``first`` sets it instead.

    ``outer``: [N] and [D] fp32; their outer product is added. If ``total`` has parts, launch one wave of programs; call
    ``add_parts`` after the last chunk. Otherwise ``first`` also sets d_hidden of tokens without a label to 0.
    """
    device, tma, write = weight_VD.device, has_tma(dlogits_RV, weight_VD), int(first)
    if total.low_RD is None and total.high_ND.itemsize == 2:
        # One chunk needs no remainder, but uses the kernel for several chunks, so that fewer kernels are compiled.
        assert first
        write, total = 2, total._replace(low_RD=torch.empty(0, dtype=torch.bfloat16, device=device))
    num_rows, at_once, dot_precision = dlogits_RV.shape[0], num_programs(device), precision(dlogits_RV.dtype)
    num_cols, hidden_size = weight_VD.shape
    tile, num_parts, num_set = fitted(tile, hidden_size), 0, num_rows if first and total.parts_PRC is None else 0
    num_tiles = cdiv(num_rows, tile.rows) * cdiv(hidden_size, tile.cols)
    often_empty = total.parts_PRC is not None
    if total.parts_PRC is not None:  # the device cuts
        num_whole, splits, programs = total.few_rows, total.parts_PRC.shape[0], min(num_tiles, at_once)
    else:
        num_whole, splits = cut_last_wave(num_tiles, cdiv(num_cols, tile.inner), at_once)
        num_parts = (num_tiles - num_whole) * splits
        parts_PRC = torch.empty(num_parts, tile.rows, tile.cols, dtype=torch.float32, device=device)
        total, programs = total._replace(parts_PRC=parts_PRC), num_whole + num_parts
    target, cut = _target(total, rows, scale_R, gain, outer), (num_whole, splits)
    _grad_hidden_kernel[(programs,)](
        operand(dlogits_RV, tile.rows, tile.inner, tma), operand(weight_VD, tile.inner, tile.cols, tma), *target,
        num_rows, num_cols, hidden_size, dlogits_RV.stride(0), write, num_set, *cut,
        BLOCK_N=tile.rows, BLOCK_D=tile.cols, OFTEN_EMPTY=often_empty, BLOCK_V=tile.inner, TMA=tma, PRECISION=dot_precision,
        num_warps=tile.warps, num_stages=tile.stages,
    )
    if num_parts:
        _add_parts_kernel[(num_tiles - num_whole, 4)](
            *target, hidden_size, write, num_set, *cut, BLOCK_N=tile.rows, BLOCK_D=tile.cols, OFTEN_EMPTY=False
        )


def _target(
    total: Sum, rows: Rows, scale_R: torch.Tensor | None, gain: torch.Tensor | None,
    outer: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor | None, ...]:
    factors = scale_R, gain, *(outer or (None, None))
    return (rows.index, rows.num_labelled, *factors, total.high_ND, total.low_RD, total.parts_PRC)


def with_parts(total: Sum, dlogits_RV: torch.Tensor, tiles: Tiles) -> Sum:
    """Return the sum with parts for few tokens, which take the second half of the rows of ``dlogits_RV``."""
    hidden_size, num_rows = total.high_ND.shape[1], dlogits_RV.shape[0]
    tile = fitted(tiles.grad_hidden, hidden_size)
    unit = max(tile.rows, tiles.dlogits.rows)
    few_rows = num_rows // 2 // unit * unit
    num_tiles = cdiv(num_rows, tile.rows) * cdiv(hidden_size, tile.cols)
    free = dlogits_RV[few_rows:].view(-1).view(torch.float32)
    num_parts = min(num_tiles, num_programs(free.device), free.numel() // (tile.rows * tile.cols))
    parts_PRC = free[: num_parts * tile.rows * tile.cols].view(num_parts, tile.rows, tile.cols)
    return total._replace(parts_PRC=parts_PRC, few_rows=few_rows)


def add_parts(total: Sum, rows: Rows, gain: torch.Tensor | None) -> None:
    """Set d_hidden to the sum of ``Sum.parts_PRC`` if the device has cut the tiles."""
    assert total.parts_PRC is not None
    num_parts, block_n, block_d = total.parts_PRC.shape
    if num_parts > 1 and total.few_rows > 0:
        numbers = total.high_ND.shape[1], 2, 0, total.few_rows, num_parts
        _add_parts_kernel[(num_parts // 2, 4)](
            *_target(total, rows, None, gain, None), *numbers,
            BLOCK_N=block_n, BLOCK_D=block_d, OFTEN_EMPTY=True,
        )


@kernel("dlogits", "weight", "scale_ptr", "of_column_ptr", "d_hidden_ptr", "low_ptr", "parts_ptr", "hidden_size")
def _grad_hidden_kernel(
    dlogits,  # in: [R, columns] descriptor or pointer
    weight,  # in: [columns, D] descriptor or pointer
    index_ptr,  # in: [R] int32
    num_labelled_ptr,  # in: [1] int32
    scale_ptr,  # in: [R] fp32, or None
    gain_ptr,  # in: [] fp32, or None
    of_token_ptr,  # in: [N] fp32, or None
    of_column_ptr,  # in: [D] fp32, or None
    d_hidden_ptr,  # in, out: [N, D]
    low_ptr,  # in, out: [R, D] bf16, or None
    parts_ptr,  # out: [parts, BLOCK_N, BLOCK_D] fp32
    num_rows,
    num_cols,
    hidden_size,
    dlogits_stride,
    first,  # 0: add; 1: set; 2: set, and there is no remainder
    num_set,  # rows to set, those without a label to 0; 0: only labelled rows
    num_whole,  # whole tiles; with OFTEN_EMPTY ``few_rows``
    splits,  # parts of each other tile; with OFTEN_EMPTY of all tiles together
    OFTEN_EMPTY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    num_labelled = tl.load(num_labelled_ptr)
    target = (index_ptr, num_labelled, scale_ptr, gain_ptr, of_token_ptr, of_column_ptr, d_hidden_ptr, low_ptr)
    given = (dlogits, weight, parts_ptr, target, (hidden_size, first, num_set), num_rows, num_cols, dlogits_stride)
    if OFTEN_EMPTY:
        num_tiles, splits = _tiles_and_splits(num_labelled, hidden_size, num_whole, splits, BLOCK_N, BLOCK_D)
        num_whole = tl.where(splits > 1, 0, num_tiles)
        for piece in range(tl.program_id(0), num_tiles * splits, tl.num_programs(0)):
            _write_piece(piece, *given, num_whole, splits, OFTEN_EMPTY, BLOCK_N, BLOCK_D, BLOCK_V, TMA, PRECISION)
    else:
        piece = tl.program_id(0)
        _write_piece(piece, *given, num_whole, splits, OFTEN_EMPTY, BLOCK_N, BLOCK_D, BLOCK_V, TMA, PRECISION)


@triton.jit
def _tiles_and_splits(num_labelled, hidden_size, few_rows, num_parts, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    num_row_blocks = tl.cdiv(num_labelled, BLOCK_N)
    num_tiles = num_row_blocks * tl.cdiv(hidden_size, BLOCK_D)
    splits = tl.where(num_row_blocks * BLOCK_N <= few_rows, num_parts // tl.maximum(num_tiles, 1), 1)
    return num_tiles, tl.maximum(splits, 1)


@triton.jit
def _write_piece(
    piece, dlogits, weight, parts_ptr, target, sizes, num_rows, num_cols, dlogits_stride, num_whole, splits,
    OFTEN_EMPTY: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
):
    """Write a whole tile of d_hidden, or a part of a tile that is cut; see ``_add``."""
    num_labelled = target[1]
    hidden_size, first, num_set = sizes
    num_col_blocks = tl.cdiv(hidden_size, BLOCK_D)
    part = piece - num_whole  # negative: a whole tile
    steps = tl.cdiv(tl.cdiv(num_cols, BLOCK_V), splits) * BLOCK_V
    begin = tl.where(part < 0, 0, part % splits * steps)
    end = tl.where(part < 0, num_cols, tl.minimum(begin + steps, num_cols))
    tile = num_whole + tl.where(part < 0, part, part // splits)
    row = tile // num_col_blocks * BLOCK_N
    col = tile % num_col_blocks * BLOCK_D
    if row < tl.where(part < 0, tl.maximum(num_labelled, num_set), num_labelled):
        end = tl.where(row < num_labelled, end, begin)
        acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        # acc [BLOCK_N, BLOCK_D] = dlogits [BLOCK_N, begin:end] @ weight [begin:end, BLOCK_D], BLOCK_V columns at a time.
        for inner in range(begin, end, BLOCK_V):
            g = load_tile(dlogits, row, inner, num_rows, num_cols, dlogits_stride, BLOCK_N, BLOCK_V, TMA)
            w = load_tile(weight, inner, col, num_cols, hidden_size, hidden_size, BLOCK_V, BLOCK_D, TMA)
            acc = tl.dot(g, w, acc, input_precision=PRECISION)

        adds = first == 0 if OFTEN_EMPTY else False
        # The tile is stored a quarter at a time: the whole of it beside its addresses spills registers.
        for half in tl.static_range(2):
            for quarter in tl.static_range(2):
                some = halves(halves(acc)[half])[quarter]
                number = 2 * half + quarter
                if part >= 0:
                    where = _part(parts_ptr, part, number, BLOCK_N, BLOCK_D)
                    if adds:
                        some += tl.load(where)
                    tl.store(where, some)
                else:
                    _add(some, row, col + number * (BLOCK_D // 4), target, sizes, BLOCK_N, BLOCK_D // 4)


@kernel("scale_ptr", "of_column_ptr", "d_hidden_ptr", "low_ptr", "parts_ptr", "hidden_size")
def _add_parts_kernel(
    index_ptr,  # this and the next pointers are described at _grad_hidden_kernel
    num_labelled_ptr,
    scale_ptr,
    gain_ptr,
    of_token_ptr,
    of_column_ptr,
    d_hidden_ptr,
    low_ptr,
    parts_ptr,  # in: [parts, BLOCK_N, BLOCK_D] fp32, the parts of a tile one after another
    hidden_size,
    first,
    num_set,
    num_whole,
    splits,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OFTEN_EMPTY: tl.constexpr,
):
    num_labelled = tl.load(num_labelled_ptr)
    num_col_blocks = tl.cdiv(hidden_size, BLOCK_D)
    cut = tl.program_id(0)
    quarter = tl.program_id(1)
    if OFTEN_EMPTY:
        num_tiles, splits = _tiles_and_splits(num_labelled, hidden_size, num_whole, splits, BLOCK_N, BLOCK_D)
        num_whole = 0
        if (cut >= num_tiles) | (splits == 1):
            return
    row = (num_whole + cut) // num_col_blocks * BLOCK_N
    col = (num_whole + cut) % num_col_blocks * BLOCK_D
    if row >= tl.maximum(num_labelled, num_set):
        return
    num_parts = tl.where(row < num_labelled, splits, 0)
    some = tl.zeros((BLOCK_N, BLOCK_D // 4), tl.float32)
    # Add the parts of a quarter of a tile, [BLOCK_N, BLOCK_D / 4].
    for split in range(num_parts):
        some += tl.load(_part(parts_ptr, cut * splits + split, quarter, BLOCK_N, BLOCK_D))
    target = (index_ptr, num_labelled, scale_ptr, gain_ptr, of_token_ptr, of_column_ptr, d_hidden_ptr, low_ptr)
    _add(some, row, col + quarter * (BLOCK_D // 4), target, (hidden_size, first, num_set), BLOCK_N, BLOCK_D // 4)


@triton.jit
def _part(parts_ptr, part, quarter, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = quarter * (BLOCK_D // 4) + tl.arange(0, BLOCK_D // 4)
    return parts_ptr + (part * BLOCK_N + offs_n)[:, None] * BLOCK_D + offs_d[None, :]


@triton.jit
def _add(some, row, col, target, sizes, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Add ``some``, [ROWS, COLS] fp32 at (row, col) of dlogits @ weight, to d_hidden and its remainder.

    The first chunk sets them instead, without a label to 0. ``target`` and ``sizes`` are arguments of the kernels.
    """
    index_ptr, num_labelled, scale_ptr, gain_ptr, of_token_ptr, of_column_ptr, d_hidden_ptr, low_ptr = target
    hidden_size, first, num_set = sizes
    offs_n = row + tl.arange(0, ROWS)
    offs_d = col + tl.arange(0, COLS)
    live = offs_n < num_labelled
    written = offs_n < tl.maximum(num_labelled, num_set)
    if scale_ptr is not None:
        some *= tl.load(scale_ptr + offs_n, mask=live, other=0)[:, None]
    token = tl.load(index_ptr + offs_n, mask=written, other=0)
    if of_token_ptr is not None:
        of_column = tl.load(of_column_ptr + offs_d, mask=offs_d < hidden_size, other=0)
        some += tl.load(of_token_ptr + token, mask=live, other=0)[:, None] * of_column[None, :]
    if gain_ptr is not None:
        some *= tl.load(gain_ptr)
    some = tl.where(live[:, None], some, 0.0)
    mask = written[:, None] & (offs_d < hidden_size)[None, :]
    high = d_hidden_ptr + token.to(tl.int64)[:, None] * hidden_size + offs_d[None, :]
    low = low_ptr + offs_n.to(tl.int64)[:, None] * hidden_size + offs_d[None, :] if low_ptr is not None else high
    if first == 0:
        some += tl.load(high, mask=mask, other=0).to(tl.float32)
        if low_ptr is not None:
            some += tl.load(low, mask=mask, other=0).to(tl.float32)
    rounded = some.to(d_hidden_ptr.dtype.element_ty)
    if low_ptr is not None:
        tl.store(
            low, (some - rounded.to(tl.float32)).to(low_ptr.dtype.element_ty), mask=tl.where(first != 2, mask, False)
        )
    tl.store(high, rounded, mask=mask)
