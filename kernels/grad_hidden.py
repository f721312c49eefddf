"""Gradient of the hidden states: d_hidden = scale * (dlogits @ weight), a chunk of the vocabulary at a time.

A chunk's product is added to what earlier chunks left. The sum is kept as two 16-bit numbers, ``d_hidden`` itself and a
remainder ``low``: 16 bits of mantissa for half the workspace of an fp32 buffer, rounding to the output's dtype as it goes.
(Adding into d_hidden alone would round once per chunk; torch.mm cannot stop at a row count that only the device knows.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cce_dist.kernels.tiles import Tile, halves, has_tma, load_tile, operand, precision


def grad_hidden(
    dlogits_RV: torch.Tensor,
    weight_VD: torch.Tensor,
    index_R: torch.Tensor,
    num_kept: torch.Tensor,
    scale_R: torch.Tensor | None,
    gain: torch.Tensor | None,
    d_hidden_ND: torch.Tensor,
    low_RD: torch.Tensor | None,
    tile: Tile,
    *,
    first: bool,
) -> None:
    """Add gain * scale_R * (dlogits_RV @ weight_VD) to d_hidden_ND at the tokens of index_R; ``first`` sets it instead."""
    num_rows, num_cols = dlogits_RV.shape[0], weight_VD.shape[0]
    hidden_size = weight_VD.shape[1]
    tma = has_tma(dlogits_RV, weight_VD)
    num_tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(hidden_size, tile.cols)
    _grad_hidden_kernel[(num_tiles,)](
        # in
        operand(dlogits_RV, tile.rows, tile.inner, tma), operand(weight_VD, tile.inner, tile.cols, tma),
        index_R, num_kept, scale_R, gain,
        # in, out
        d_hidden_ND, low_RD,
        # sizes
        num_rows, num_cols, hidden_size, dlogits_RV.stride(0), int(first),
        # options
        HAS_SCALE=scale_R is not None, HAS_GAIN=gain is not None, HAS_LOW=low_RD is not None,
        # tiles
        BLOCK_N=tile.rows, BLOCK_D=tile.cols, BLOCK_V=tile.inner, TMA=tma, PRECISION=precision(dlogits_RV.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_rows", "num_cols", "dlogits_stride", "first"],
    do_not_specialize_on_alignment=["index_ptr", "num_kept_ptr", "gain_ptr"],
)
def _grad_hidden_kernel(
    dlogits,  # in: [R, columns] descriptor or pointer
    weight,  # in: [columns, D] descriptor or pointer
    index_ptr,  # in: [R] int32
    num_kept_ptr,  # in: [1] int32
    scale_ptr,  # in: [R] fp32
    gain_ptr,  # in: [] fp32
    d_hidden_ptr,  # in, out: [N, D]
    low_ptr,  # in, out: [R, D] bf16
    num_rows,
    num_cols,
    hidden_size,
    dlogits_stride,
    first,
    HAS_SCALE: tl.constexpr,
    HAS_GAIN: tl.constexpr,
    HAS_LOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    num_kept = tl.load(num_kept_ptr)
    num_col_blocks = tl.cdiv(hidden_size, BLOCK_D)
    row = tl.program_id(0) // num_col_blocks * BLOCK_N
    col = tl.program_id(0) % num_col_blocks * BLOCK_D
    if row >= num_kept:
        return
    acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for inner in range(0, num_cols, BLOCK_V):
        g = load_tile(dlogits, row, inner, num_rows, num_cols, dlogits_stride, BLOCK_N, BLOCK_V, TMA)
        w = load_tile(weight, inner, col, num_cols, hidden_size, hidden_size, BLOCK_V, BLOCK_D, TMA)
        acc = tl.dot(g, w, acc, input_precision=PRECISION)

    offs_n = row + tl.arange(0, BLOCK_N)
    live = offs_n < num_kept
    if HAS_SCALE:
        acc *= tl.load(scale_ptr + offs_n, mask=live, other=0)[:, None]
    if HAS_GAIN:
        acc *= tl.load(gain_ptr)
    token = tl.load(index_ptr + offs_n, mask=live, other=0)
    # A quarter of the tile at a time: all of it beside its addresses spills registers.
    for half in tl.static_range(2):
        for quarter in tl.static_range(2):
            part = halves(halves(acc)[half])[quarter]
            offs_d = col + (2 * half + quarter) * (BLOCK_D // 4) + tl.arange(0, BLOCK_D // 4)
            mask = live[:, None] & (offs_d < hidden_size)[None, :]
            high = d_hidden_ptr + token.to(tl.int64)[:, None] * hidden_size + offs_d[None, :]
            low = low_ptr + offs_n.to(tl.int64)[:, None] * hidden_size + offs_d[None, :] if HAS_LOW else high
            if first == 0:
                part += tl.load(high, mask=mask, other=0).to(tl.float32)
                if HAS_LOW:
                    part += tl.load(low, mask=mask, other=0).to(tl.float32)
            rounded = part.to(d_hidden_ptr.dtype.element_ty)
            if HAS_LOW:
                tl.store(low, (part - rounded.to(tl.float32)).to(low_ptr.dtype.element_ty), mask=mask)
            tl.store(high, rounded, mask=mask)
