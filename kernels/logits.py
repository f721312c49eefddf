"""Logits written to memory, a bounded chunk at a time: for the largest logits, and for the divergence of two heads.

The matrix product is ``tile_of_products``, as in all kernels. A token's logits do not depend on the other tokens of a chunk.
"""

from __future__ import annotations

import torch
import triton.language as tl

from cce_dist.kernels import Operands, Rows
from cce_dist.kernels.blocks import has_tma, kernel, operand, row_and_split, store_tile, tile_of_products
from cce_dist.kernels.head import logits_of, token_factors
from cce_dist.kernels.tiles import Tiles, beside_collectives, cdiv, num_programs, precision


def logits_chunk(
    x: Operands, rows: Rows, first_col: int, z_RV: torch.Tensor, tiles: Tiles, top_BR: torch.Tensor | None = None
) -> None:
    """Fill z_RV with the logits from ``first_col`` (a multiple of the tile) on; columns past ``num_valid`` are -inf.

    With ``top_BR`` [tiles, R] the largest logit of each row and tile is written to it, and z_RV holds logits relative to that.
    Rows at or past ``num_labelled`` are only written up to the end of their tile.
    """
    tile = tiles.lse
    (num_rows, num_cols), hidden_size = z_RV.shape, rows.hidden.shape[1]
    num_tiles = cdiv(num_cols, tile.cols)
    tma = has_tma(rows.hidden, x.weight, z_RV)
    programs = cdiv(num_rows, tile.rows) * num_tiles
    if not beside_collectives():
        programs = min(programs, num_programs(z_RV.device))
    _logits_kernel[(programs,)](
        # in
        operand(rows.hidden, tile.rows, tile.inner, tma), operand(x.weight, tile.cols, tile.inner, tma), x.head,
        rows.index, rows.num_labelled,
        # out
        operand(z_RV, tile.rows, tile.cols // 2, tma), top_BR,
        # sizes
        num_rows, hidden_size, x.num_valid, num_cols, z_RV.stride(0), 0 if top_BR is None else top_BR.stride(0),
        first_col, num_tiles,
        # options
        MASK_V=x.num_valid % tile.cols != 0,
        # tiles
        TILE=tile, GROUP=tiles.group, TMA=tma, PRECISION=precision(rows.hidden.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )


@kernel("hidden", "weight", "z", "hidden_size", "z_stride")
def _logits_kernel(
    hidden,  # in: [R, D] descriptor or pointer
    weight,  # in: [V, D] descriptor or pointer
    head,  # in: Head
    index_ptr,  # in: [R] int32
    num_labelled_ptr,  # in: [1] int32
    z,  # out: [R, columns of the chunk] descriptor or pointer
    top_ptr,  # out: [B, R] fp32 that logits are relative to, or None
    num_rows,
    hidden_size,
    num_valid,
    num_cols,
    z_stride,
    top_stride,
    first_col,
    num_tiles,
    MASK_V: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    BLOCK_N: tl.constexpr = TILE.rows
    BLOCK_V: tl.constexpr = TILE.cols
    # Unless collectives run beside it, each program computes several tiles z [BLOCK_N, BLOCK_V], so that operands of the next
    # tile load while one is stored.
    num_labelled = tl.load(num_labelled_ptr)
    num_row_blocks = tl.cdiv(num_labelled, BLOCK_N)
    for number in tl.range(tl.program_id(0), num_row_blocks * num_tiles, tl.num_programs(0), flatten=True):
        row_block, tile = row_and_split(number, num_row_blocks, num_tiles, GROUP)
        row = row_block * BLOCK_N
        offs_n = row + tl.arange(0, BLOCK_N)
        live = offs_n < num_labelled
        token = offs_n
        if head.factors is not None:
            token = tl.load(index_ptr + offs_n, mask=live, other=0)
        factors = token_factors(head, token, live)
        col = tile * BLOCK_V
        acc = tile_of_products(
            hidden, weight, row, first_col + col, num_rows, num_valid, hidden_size, TILE, TMA, PRECISION
        )
        offs_v = first_col + col + tl.arange(0, BLOCK_V)
        some = logits_of(acc, offs_v, offs_v < num_valid, head, factors, MASK_V)
        if top_ptr is not None:
            top = tl.max(some, 1)
            some -= tl.where(top > float("-inf"), top, 0.0)[:, None]
            tl.store(top_ptr + tile * top_stride.to(tl.int64) + offs_n, top, mask=offs_n < num_rows)
        store_tile(z, row, col, some, num_rows, num_cols, z_stride, BLOCK_N, BLOCK_V, TMA)
