"""The logits of two heads at the same tokens and columns, in half the bytes of fp32 where hidden states are bf16.

A tile's logits are written relative to the largest one of their row in that tile, which is kept in fp32 beside them. So the
largest logits, which decide on a softmax, are exact, and one that is d below the largest of its tile is off by at most 2^-12 of
the power of two above d: 2^-9 for 8 nats, where a logit of 20 that bf16 holds is off by 2^-4. fp16 holds them, since it has
three bits of precision more than bf16, and nothing is as far below as its range ends. Beside fp16 and fp32 hidden states they
are fp32: there a dense head's own logits are as precise as these would be.

Everything that follows is computed from these numbers, the log-sum-exps too: what rounding leaves is the divergence, and the
gradient, of two heads whose logits are off by so much. Equal heads stay equal.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from cce_dist.kernels import Operands, Rows
from cce_dist.kernels.blocks import has_tma, kernel, operand, row_and_split, store_tile, tile_of_logits
from cce_dist.kernels.budget import cdiv
from cce_dist.kernels.tiles import Tiles, num_programs, precision

# Row blocks that walk the weight together: 12.0 ms where 16, those of other kernels, took 12.4 (a head of Llama-3-8B, N 8,192,
# one H200, 2026-11; cuBLAS 12.2).
GROUP = 8


class PairLogits(NamedTuple):
    """Both heads' logits of some tokens and whole tiles of columns: the student's are the first of two.

    Attributes:
        z_2RC: [2, R, B tiles of columns], fp16 or fp32: relative to ``top_2BR``.
        top_2BR: [2, B, R] fp32: the largest logit of each row in each tile; -inf where no logit is finite.
    """

    z_2RC: torch.Tensor
    top_2BR: torch.Tensor

    def gradient(self, dtype: torch.dtype) -> torch.Tensor:
        """Where backward writes the gradient of the student's logits: over them if its dtype is as wide. -> [R, columns]."""
        z_RC = self.z_2RC[0]
        return z_RC.view(dtype) if z_RC.dtype.itemsize == dtype.itemsize else torch.empty_like(z_RC, dtype=dtype)

    def of_rows(self, num_rows: int) -> PairLogits:
        """The same room for fewer rows."""
        return PairLogits(self.z_2RC[:, :num_rows], self.top_2BR[:, :, :num_rows])


def cell_bytes(dtype: torch.dtype) -> int:
    """Bytes of a cell in ``PairLogits``, and of its gradient where that needs room of its own, by the hidden states' dtype."""
    return {torch.bfloat16: 4, torch.float16: 10}.get(dtype, 8)


def new_pair_logits(num_rows: int, columns: int, tile_cols: int, like: torch.Tensor) -> PairLogits:
    """Return room for so many columns, a multiple of ``tile_cols``; ``like`` has the hidden states' dtype and device."""
    dtype = torch.float16 if like.dtype == torch.bfloat16 else torch.float32
    return PairLogits(
        like.new_empty(2, num_rows, columns, dtype=dtype),
        like.new_empty(2, columns // tile_cols, num_rows, dtype=torch.float32),
    )


def fill_logits(
    x: Operands, rows: Rows, pair: PairLogits, head: int, first_col: int, num_tiles: int, tiles: Tiles
) -> None:
    """Write one head's logits, ``head`` 0 or 1, of so many tiles from ``first_col``, a multiple of the tile, on.

    Columns past ``num_valid`` are -inf. Rows at or past ``num_kept`` are unwritten but for the last tile.
    """
    tile, logits = tiles.lse, x.logits
    num_rows, hidden_size = rows.hidden.shape
    z_RC, top_BR = pair.z_2RC[head], pair.top_2BR[head]
    tma = has_tma(rows.hidden, x.weight, z_RC)
    most = cdiv(num_rows, tile.rows) * num_tiles
    _pair_logits_kernel[(min(most, num_programs(z_RC.device)),)](
        # in
        operand(rows.hidden, tile.rows, tile.inner, tma), operand(x.weight, tile.cols, tile.inner, tma), x.bias,
        rows.num_kept,
        # out
        operand(z_RC, tile.rows, tile.cols // 2, tma), top_BR,
        # sizes
        num_rows, hidden_size, logits.num_valid, z_RC.stride(0), top_BR.stride(0), first_col, num_tiles,
        # options
        logits.logit_scale, logits.softcap,
        HAS_BIAS=x.bias is not None, HAS_SCALE=logits.logit_scale != 1.0, HAS_SOFTCAP=logits.capped,
        MASK_V=logits.num_valid % tile.cols != 0,
        # tiles
        BLOCK_N=tile.rows, BLOCK_V=tile.cols, BLOCK_D=tile.inner, GROUP=GROUP, TMA=tma,
        PRECISION=precision(rows.hidden.dtype), num_warps=tile.warps, num_stages=tile.stages,
    )


@kernel("hidden", "weight", "bias_ptr", "z", "hidden_size", "z_stride")
def _pair_logits_kernel(
    hidden,  # in: [R, D] descriptor or pointer
    weight,  # in: [V, D] descriptor or pointer
    bias_ptr,  # in: [V]
    num_kept_ptr,  # in: [1] int32
    z,  # out: [R, columns] descriptor or pointer
    top_ptr,  # out: [B, R] fp32
    num_rows,
    hidden_size,
    num_valid,
    z_stride,
    top_stride,
    first_col,
    num_tiles,
    logit_scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    MASK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # Programs stay for several tiles, so that the copy engine fetches the next one's operands while a tile is written.
    num_row_blocks = tl.cdiv(tl.load(num_kept_ptr), BLOCK_N)
    for number in tl.range(tl.program_id(0), num_row_blocks * num_tiles, tl.num_programs(0), flatten=True):
        row_block, tile = row_and_split(number, num_row_blocks, num_tiles, GROUP)
        row = row_block * BLOCK_N
        some = tile_of_logits(
            hidden, weight, bias_ptr, row, first_col + tile * BLOCK_V, num_rows, num_valid, hidden_size, logit_scale,
            softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP, MASK_V, BLOCK_N, BLOCK_V, BLOCK_D, TMA, PRECISION,
        )
        top = tl.max(some, 1)
        some -= tl.where(top > float("-inf"), top, 0.0)[:, None]
        store_tile(z, row, tile * BLOCK_V, some, num_rows, num_tiles * BLOCK_V, z_stride, BLOCK_N, BLOCK_V, TMA)
        offs_n = row + tl.arange(0, BLOCK_N)
        tl.store(top_ptr + tile * top_stride.to(tl.int64) + offs_n, top, mask=offs_n < num_rows)
