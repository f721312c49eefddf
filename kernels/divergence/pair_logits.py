"""The logits of two heads at the same tokens and columns, in half the bytes of fp32 where hidden states are bf16.

A tile's logits are written relative to the largest one of their row in that tile, which is kept in fp32 beside them. So the
largest logits, which decide on a softmax, are exact, and one that is d below the largest of its tile is off by at most 2^-12
of the power of two above d: 2^-9 for 8 nats, where a logit of 20 that bf16 holds is off by 2^-4. They are fp16, which has
three bits more than bf16; beside fp16 and fp32 hidden states fp32, as a dense head's own logits are as precise as fp16 would
be.

Everything that follows, the log-sum-exps too, is computed from these numbers. Equal heads stay equal.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from cce_dist.kernels import Operands, Rows
from cce_dist.kernels.logits import logits_chunk
from cce_dist.kernels.tiles import Tiles

# Row blocks that walk the weight together: 12.0 ms, where the 16 of other kernels took 12.4 (a head of Llama-3-8B, N 8,192,
# one H200, 2026-11; cuBLAS 12.2).
GROUP = 8


class PairLogits(NamedTuple):
    """Both heads' logits of some tokens and whole tiles of columns: the student's are the first of two."""

    z_2RC: torch.Tensor  # [2, R, B tiles of columns], fp16 or fp32: relative to ``top_2BR``
    top_2BR: torch.Tensor  # [2, B, R] fp32: the largest logit of each row in each tile; -inf where no logit is finite
    # [1] int32, 1 once a backward has overwritten the student's logits with gradients. [0] where logits are not kept.
    overwritten: torch.Tensor

    def gradient(self, dtype: torch.dtype) -> torch.Tensor:
        """Return where backward writes the gradient of the student's logits: over them if the widths agree. -> [R, columns]."""
        z_RC = self.z_2RC[0]
        return z_RC.view(dtype) if z_RC.dtype.itemsize == dtype.itemsize else torch.empty_like(z_RC, dtype=dtype)

    @property
    def columns(self) -> int:
        return self.z_2RC.shape[2]


def new_pair_logits(num_rows: int, columns: int, tile_cols: int, like: torch.Tensor, kept: bool = False) -> PairLogits:
    """Allocate the logits of ``columns``, a multiple of ``tile_cols``. ``like`` has the hidden states' dtype and device."""
    dtype = torch.float16 if like.dtype == torch.bfloat16 else torch.float32
    return PairLogits(
        like.new_empty(2, num_rows, columns, dtype=dtype),
        like.new_empty(2, columns // tile_cols, num_rows, dtype=torch.float32),
        like.new_zeros(int(kept), dtype=torch.int32),
    )


def fill_logits(
    x: Operands, rows: Rows, pair: PairLogits, head: int, first_col: int, num_tiles: int, tiles: Tiles
) -> None:
    """Write one head's logits, ``head`` 0 or 1, of so many tiles from ``first_col`` on; see ``logits_chunk``."""
    columns = num_tiles * tiles.lse.cols
    logits_chunk(x, rows, first_col, pair.z_2RC[head, :, :columns], tiles._replace(group=GROUP), pair.top_2BR[head])
