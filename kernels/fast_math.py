"""Base-2 exponentials and logarithms in one instruction; Triton's own take four and thirty.

Triton's versions are exact below 2^-126, too, where exponentials no longer matter next to a row's largest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cce_dist.kernels.tiles import interpreted

LOG2_E, LOG_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


def has_fast_math() -> bool:
    """Whether kernels may contain NVIDIA's PTX instructions: the value of their constexpr ``FAST``."""
    return torch.version.hip is None and not interpreted()


@triton.jit
def fast_exp2(x, FAST: tl.constexpr):
    """Return 2^x with a relative error of at most 2^-22; with FAST, results below 2^-126 are 0."""
    if FAST:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@triton.jit
def fast_log2(x, FAST: tl.constexpr):
    """Return the logarithm to base 2. With FAST it is within 2^-22, and numbers below 2^-126 count as 0."""
    if FAST:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)
