"""Multiply gradients by the upstream gradient. It is usually 1, and then the kernel reads one number and returns."""

from __future__ import annotations

import torch
import triton.language as tl

from cce_dist.kernels.blocks import kernel, on_device
from cce_dist.kernels.tiles import cdiv, num_programs


def scale(values: torch.Tensor, factor: torch.Tensor, out: torch.Tensor | None = None) -> None:
    """Multiply ``values`` [R, D] or [D] in place by ``factor``, fp32: 0-d, or [R], one for each row.

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
