"""How torch multiplies fp32 matrices. Of its two settings the newer one decides, if it exists. No Triton is needed."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums, statistics and losses of operands in ``dtype``: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def widened(x: Tensor) -> Tensor:
    """Cast to ``accumulator`` of the tensor's dtype."""
    return x.to(accumulator(x.dtype))


@torch.compiler.assume_constant_result
def fp32_precision() -> str:
    """Return "ieee" or "tf32": how torch multiplies fp32 matrices on a GPU.

    ``torch.get_float32_matmul_precision`` raises once the newer setting was used, so it is only called before torch 2.9.
    """
    newer = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    is_tf32 = torch.get_float32_matmul_precision() != "highest" if newer is None else newer == "tf32"
    return "tf32" if is_tf32 else "ieee"
