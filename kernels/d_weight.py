"""Gradient of the weight and of the bias: d_weight = dlogits^T @ hidden, for a chunk of vocabulary rows; scaled gradients.

A chunk usually holds every token, so each output tile is summed in registers and written once: no atomics, no fp32 copy. With
``add`` the tile is added to what is there (Megatron's fp32 ``main_grad``).

A bf16 sum over many calls would be rounded in each of them. So d_weight may have 8 extra bits in an int8 tensor, in units of
1/256 of bf16's last place: the next byte of the sum in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cce_dist.kernels import Rows
from cce_dist.kernels.blocks import halves, has_tma, kernel, load_tile, on_device, operand, row_and_split, store_tile
from cce_dist.kernels.tiles import Tile, beside_collectives, cdiv, fitted, num_programs, precision

GROUP = tl.constexpr(8)  # row blocks that a loop over tiles walks together


def add_d_weight(
    d_weight_VD: torch.Tensor,
    dlogits_RV: torch.Tensor,
    rows: Rows,
    gain: torch.Tensor | None,
    tile: Tile,
    *,
    add: bool,
    low_VD: torch.Tensor | None = None,
    more_D: torch.Tensor | None = None,
    often_empty: bool = False,
) -> None:
    """Set d_weight_VD to gain * (dlogits_RV^T @ rows), or add the product to it with ``add``.

    ``low_VD``: int8, the 8 extra bits of d_weight_VD in bf16; set or added to together with it.
    ``more_D``: fp32, added to each row of the product.
    ``often_empty``: write nothing if no row is kept.

    Where shared memory allows a loop over tiles, calls that are often empty or set d_weight_VD launch only as many programs as
    run at a time. The loop overlaps a tile's first loads and its store with the tiles before and after. Beside collectives it
    can take twice as long.
    """
    tma = has_tma(dlogits_RV, rows.hidden, d_weight_VD)
    is_set = not add and low_VD is None
    in_one_wave = tma and d_weight_VD.itemsize == 2 and (often_empty or (is_set and not beside_collectives()))
    tile = fitted(tile, rows.hidden.shape[1])
    num_tiles = cdiv(d_weight_VD.shape[0], tile.rows) * cdiv(d_weight_VD.shape[1], tile.cols)
    _grad_weight_kernel[(min(num_tiles, num_programs(d_weight_VD.device)) if in_one_wave else num_tiles,)](
        # in
        operand(dlogits_RV, tile.inner, tile.rows, tma), operand(rows.hidden, tile.inner, tile.cols, tma), rows.num_labelled,
        gain, more_D,
        # out, or in and out
        operand(d_weight_VD, tile.rows, tile.cols // 2, tma and is_set), low_VD,
        # sizes
        rows.hidden.shape[0], *d_weight_VD.shape, dlogits_RV.stride(0),
        # options
        ADD=add, SKIP_EMPTY=often_empty, ONE_WAVE=in_one_wave,
        BLOCK_V=tile.rows, BLOCK_D=tile.cols, BLOCK_N=tile.inner, TMA=tma, PRECISION=precision(rows.hidden.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )


@kernel("dlogits", "hidden", "more_ptr", "d_weight", "low_ptr", "hidden_size")
def _grad_weight_kernel(
    dlogits,  # in: [R, columns] descriptor or pointer
    hidden,  # in: [R, D] descriptor or pointer
    num_labelled_ptr,  # in: [1] int32
    gain_ptr,  # in: [] fp32, or None
    more_ptr,  # in: [D] fp32, or None
    d_weight,  # out: [columns, D] descriptor or pointer; a pointer with low_ptr, in and out with ADD
    low_ptr,  # out, and in with ADD: [columns, D] int8, or None
    num_rows,
    num_cols,
    hidden_size,
    dlogits_stride,
    ADD: tl.constexpr,
    SKIP_EMPTY: tl.constexpr,
    ONE_WAVE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    num_labelled = tl.load(num_labelled_ptr)
    given = (
        dlogits, hidden, num_labelled, gain_ptr, more_ptr, d_weight, low_ptr, num_rows, num_cols, hidden_size, dlogits_stride,
    )
    num_row_blocks = tl.cdiv(num_cols, BLOCK_V)
    num_col_blocks = tl.cdiv(hidden_size, BLOCK_D)
    if ONE_WAVE:
        num_tiles = tl.where(num_labelled > 0 or not SKIP_EMPTY, num_row_blocks * num_col_blocks, 0)
        for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=not (ADD or low_ptr is not None)):
            row_block, col_block = row_and_split(tile, num_row_blocks, num_col_blocks, GROUP)
            row, col = row_block * BLOCK_V, col_block * BLOCK_D
            _write_tile(row, col, *given, ADD, BLOCK_V, BLOCK_D, BLOCK_N, TMA, PRECISION)
    elif not SKIP_EMPTY or num_labelled > 0:
        tile = tl.program_id(0)
        row, col = tile // num_col_blocks * BLOCK_V, tile % num_col_blocks * BLOCK_D
        _write_tile(row, col, *given, ADD, BLOCK_V, BLOCK_D, BLOCK_N, TMA, PRECISION)


@triton.jit
def _write_tile(
    row, col, dlogits, hidden, num_labelled, gain_ptr, more_ptr, d_weight, low_ptr, num_rows, num_cols, hidden_size,
    dlogits_stride,
    ADD: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    acc = tl.zeros((BLOCK_V, BLOCK_D), tl.float32)
    # acc [BLOCK_V, BLOCK_D] = dlogits [num_labelled, BLOCK_V].T @ hidden [num_labelled, BLOCK_D], BLOCK_N tokens at a time.
    for inner in range(0, num_labelled, BLOCK_N):
        g = load_tile(dlogits, inner, row, num_rows, num_cols, dlogits_stride, BLOCK_N, BLOCK_V, TMA)
        h = load_tile(hidden, inner, col, num_rows, hidden_size, hidden_size, BLOCK_N, BLOCK_D, TMA)
        acc = tl.dot(g.T, h, acc, input_precision=PRECISION)
    if more_ptr is not None:
        offs_d = col + tl.arange(0, BLOCK_D)
        acc += tl.load(more_ptr + offs_d, mask=offs_d < hidden_size, other=0)[None, :]
    if gain_ptr is not None:
        acc *= tl.load(gain_ptr)
    if ADD or low_ptr is not None:
        offs_v = row + tl.arange(0, BLOCK_V)
        # The tile is written a quarter at a time: the whole of it beside its addresses spills registers.
        for half in tl.static_range(2):
            for quarter in tl.static_range(2):
                part = halves(halves(acc)[half])[quarter]
                offs_d = col + (2 * half + quarter) * (BLOCK_D // 4) + tl.arange(0, BLOCK_D // 4)
                mask = (offs_v < num_cols)[:, None] & (offs_d < hidden_size)[None, :]
                where = offs_v.to(tl.int64)[:, None] * hidden_size + offs_d[None, :]
                if ADD:
                    before = tl.load(d_weight + where, mask=mask, other=0)
                    if low_ptr is not None:
                        part += joined(before, tl.load(low_ptr + where, mask=mask, other=0))
                    else:
                        part += before.to(tl.float32)
                rounded = part.to(d_weight.dtype.element_ty)
                tl.store(d_weight + where, rounded, mask=mask)
                if low_ptr is not None:
                    tl.store(low_ptr + where, low_byte(part, rounded), mask=mask)
    else:
        store_tile(d_weight, row, col, acc, num_cols, hidden_size, hidden_size, BLOCK_V, BLOCK_D, TMA)


@triton.jit
def low_byte(number, rounded):
    """Return an fp32 number minus ``rounded``, its value in bf16, in units of 1/256 of the last place of ``rounded``."""
    rest = number.to(tl.int32, bitcast=True) - (rounded.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return tl.minimum((rest + 128) >> 8, 127).to(tl.int8)


@triton.jit
def joined(rounded, low):
    """Combine a bf16 number and its ``low_byte`` to an fp32 number. An infinity stays infinite, and a NaN stays NaN."""
    bits = (rounded.to(tl.int16, bitcast=True).to(tl.int32) << 16) + (low.to(tl.int32) << 8)
    return bits.to(tl.float32, bitcast=True)


def add_d_bias(
    d_bias_V: torch.Tensor,
    dlogits_RV: torch.Tensor,
    rows: Rows,
    scale_R: torch.Tensor | None,
    gain: torch.Tensor | None,
) -> None:
    """Add gain * the column sums of (scale_R *) dlogits_RV to d_bias_V, in fp32."""
    num_cols = d_bias_V.shape[0]
    _grad_bias_kernel[(cdiv(num_cols, 128),)](
        dlogits_RV, rows.num_labelled, scale_R, gain,
        d_bias_V,
        num_cols, dlogits_RV.stride(0),
        BLOCK_V=128, BLOCK_N=32,
    )


@kernel("dlogits_ptr", "scale_ptr", "d_bias_ptr")
def _grad_bias_kernel(
    dlogits_ptr,  # in: [R, columns]
    num_labelled_ptr,  # in: [1] int32
    scale_ptr,  # in: [R] fp32, or None
    gain_ptr,  # in: [] fp32, or None
    d_bias_ptr,  # in, out: [columns] fp32
    num_cols,
    dlogits_stride,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    num_labelled = tl.load(num_labelled_ptr)
    offs_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_v = offs_v < num_cols
    total = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    # Sum dlogits [num_labelled, BLOCK_V] over the tokens, BLOCK_N at a time.
    for inner in range(0, num_labelled, BLOCK_N):
        offs_n = inner + tl.arange(0, BLOCK_N)
        live = offs_n < num_labelled
        where = dlogits_ptr + offs_n.to(tl.int64)[:, None] * dlogits_stride + offs_v[None, :]
        g = tl.load(where, mask=live[:, None] & in_v[None, :], other=0).to(tl.float32)
        if scale_ptr is not None:
            g *= tl.load(scale_ptr + offs_n, mask=live, other=0)[:, None]
        total += g
    bias = tl.sum(total, 0)
    if gain_ptr is not None:
        bias *= tl.load(gain_ptr)
    bias += tl.load(d_bias_ptr + offs_v, mask=in_v, other=0)
    tl.store(d_bias_ptr + offs_v, bias, mask=in_v)


def scale(values: torch.Tensor, factor: torch.Tensor, out: torch.Tensor | None = None) -> None:
    """Multiply ``values`` [R, D] or [D] in place by ``factor``, fp32: 0-d, or [R], one for each row.

    An upstream gradient is usually 1, and then the kernel reads one number and returns.

    With ``out``, of the shape of ``values``, the product is added to ``out`` instead. A product with a 0 is 0, even if the
    other number is NaN or infinite.
    """
    if not values.numel():
        return
    num_cols = values.shape[-1]
    num_rows = values.numel() // num_cols
    num_blocks = cdiv(num_rows, 32) * cdiv(num_cols, 256)
    with on_device(values):
        _scale_kernel[(min(num_blocks, 8 * num_programs(values.device)),)](
            values, factor, out,
            num_rows, num_cols, num_blocks,
            OF_ROWS=factor.dim() > 0, BLOCK_R=32, BLOCK_D=256, num_warps=8,
        )  # fmt: skip


@kernel("values_ptr", "out_ptr", "num_cols")
def _scale_kernel(
    values_ptr,  # in, out without out_ptr: [R, D]
    factor_ptr,  # in: [] fp32, or [R] with OF_ROWS
    out_ptr,  # in, out: [R, D], or None
    num_rows,
    num_cols,
    num_blocks,
    OF_ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    nothing_to_do = 1.0 if out_ptr is None else 0.0
    factor = tl.full((BLOCK_R,), 0.0, tl.float32) + tl.load(factor_ptr)
    if not OF_ROWS:
        num_blocks = tl.where(tl.load(factor_ptr) == nothing_to_do, 0, num_blocks)
    blocks_d = tl.cdiv(num_cols, BLOCK_D)
    # Each block is [BLOCK_R, BLOCK_D]; a block is skipped if none of its rows changes anything.
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        offs_r = block // blocks_d * BLOCK_R + tl.arange(0, BLOCK_R)
        offs_d = block % blocks_d * BLOCK_D + tl.arange(0, BLOCK_D)
        in_r = offs_r < num_rows
        if OF_ROWS:
            factor = tl.load(factor_ptr + offs_r, mask=in_r, other=nothing_to_do)
        if tl.max((factor != nothing_to_do).to(tl.int32), 0) > 0:
            offs = offs_r.to(tl.int64)[:, None] * num_cols + offs_d[None, :]
            mask = in_r[:, None] & (offs_d < num_cols)[None, :]
            value = tl.load(values_ptr + offs, mask=mask, other=0)
            is_zero = (value == 0) | (factor == 0)[:, None]
            scaled = tl.where(is_zero, 0.0, value.to(tl.float32) * factor[:, None])
            if out_ptr is None:
                tl.store(values_ptr + offs, scaled.to(values_ptr.dtype.element_ty), mask=mask)
            else:
                scaled += tl.load(out_ptr + offs, mask=mask, other=0).to(tl.float32)
                tl.store(out_ptr + offs, scaled.to(out_ptr.dtype.element_ty), mask=mask)
