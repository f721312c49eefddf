"""Gradients times the upstream gradient, which is most often 1: then a launch reads one number and ends."""

from __future__ import annotations

import torch
import triton.language as tl

from cce_dist.kernels.blocks import kernel, on_device
from cce_dist.kernels.budget import cdiv
from cce_dist.kernels.tiles import num_programs


def scale(values: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiply ``values`` in place by ``factor``, a 0-d fp32 tensor. A value of 0 stays 0, whatever the factor is."""
    if not values.numel():
        return
    num_blocks = cdiv(values.numel(), 8192)
    with on_device(values):
        _scale_kernel[(min(num_blocks, 8 * num_programs(values.device)),)](
            values, factor, values.numel(), num_blocks, BLOCK=8192, num_warps=8
        )


@kernel("values_ptr")
def _scale_kernel(
    values_ptr,  # in, out: [size]
    factor_ptr,  # in: [] fp32
    size,
    num_blocks,
    BLOCK: tl.constexpr,
):
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
            offs = block * tl.full((), BLOCK, tl.int64) + tl.arange(0, BLOCK)
            value = tl.load(values_ptr + offs, mask=offs < size, other=0)
            scaled = tl.where(value == 0, 0.0, value.to(tl.float32) * factor)
            tl.store(values_ptr + offs, scaled.to(values_ptr.dtype.element_ty), mask=offs < size)
