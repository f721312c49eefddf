"""Exponentials and logarithms to base 2 by one instruction, where Triton's take four and thirty.

Triton's care for numbers below 2^-126, which passes over all logits need not: next to the largest of a row they are nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cce_dist.kernels.tiles import interpreted

LOG2_E, LOG_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


def has_fast_math() -> bool:
    """Whether a kernel may hold NVIDIA's instructions: the constexpr ``FAST`` of those that do."""
    return torch.version.hip is None and not interpreted()


@triton.jit
def fast_exp2(x, FAST: tl.constexpr):
    """2^x within 2^-22 of it; with FAST 0 instead of numbers below 2^-126."""
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
