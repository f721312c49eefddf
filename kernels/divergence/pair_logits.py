"""The logits of two heads at the same tokens and columns; with bf16 hidden states they take half the bytes of fp32.

In each tile of columns a row's logits are stored relative to the row's largest one, which is kept in fp32. So the largest
logits, which dominate a softmax, are exact. A logit that is d below its tile's largest is off by at most 2^-12 of the power of
two above d: 2^-9 for 8 nats. A logit of 20 in bf16 would be off by 2^-4. The stored numbers are fp16, which has three bits more
than bf16. With fp16 or fp32 hidden states they are fp32, because a dense head's own logits are as precise as fp16.

All statistics, the log-sum-exps too, are computed from the stored numbers, so equal heads stay equal.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from cce_dist.kernels import Operands, Rows
from cce_dist.kernels.logits import logits_chunk
from cce_dist.kernels.tiles import Tiles

# Row blocks that read the weight together: 12.0 ms with 8, 12.4 with the 16 of other kernels (a head of Llama-3-8B, N 8,192,
# one H200, 2026-11; cuBLAS 12.2).
GROUP = 8


class PairLogits(NamedTuple):
    """Logits of both heads (student first) for a group of tokens and whole tiles of columns."""

    z_2RC: torch.Tensor  # [2, R, B tiles of columns], fp16 or fp32: relative to ``top_2BR``
    top_2BR: torch.Tensor  # [2, B, R] fp32: the largest logit of each row in each tile; -inf where no logit is finite
    # [1] int32: 1 once a backward has overwritten the student's logits with gradients. [0] if logits are not kept.
    overwritten: torch.Tensor

    def gradient(self, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for the gradient of the student's logits: the logits' own if the widths agree. -> [R, columns]."""
        z_RC = self.z_2RC[0]
        return z_RC.view(dtype) if z_RC.dtype.itemsize == dtype.itemsize else torch.empty_like(z_RC, dtype=dtype)

    @property
    def columns(self) -> int:
        return self.z_2RC.shape[2]


def new_pair_logits(num_rows: int, columns: int, tile_cols: int, like: torch.Tensor, saved: bool = False) -> PairLogits:
    """Allocate the logits of ``columns``, a multiple of ``tile_cols``. ``like`` has the hidden states' dtype and device."""
    dtype = torch.float16 if like.dtype == torch.bfloat16 else torch.float32
    return PairLogits(
        like.new_empty(2, num_rows, columns, dtype=dtype),
        like.new_empty(2, columns // tile_cols, num_rows, dtype=torch.float32),
        like.new_zeros(int(saved), dtype=torch.int32),
    )


def fill_logits(
    x: Operands, rows: Rows, pair: PairLogits, head: int, first_col: int, num_tiles: int, tiles: Tiles
) -> None:
    """Write the logits of head 0 or 1 for ``num_tiles`` tiles from ``first_col`` on; see ``logits_chunk``."""
    columns = num_tiles * tiles.lse.cols
    logits_chunk(x, rows, first_col, pair.z_2RC[head, :, :columns], tiles._replace(group=GROUP), pair.top_2BR[head])
