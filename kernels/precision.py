"""How torch multiplies fp32 matrices. Of its two settings the newer one decides, if it exists. No Triton is needed."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums, statistics and losses of operands in ``dtype``: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def widened(x: Tensor) -> Tensor:
    """Cast to ``accumulator`` of the tensor's dtype."""
    return x.to(accumulator(x.dtype))


@functools.cache
def _multiplies_bf16() -> bool:
    """Return whether oneDNN multiplies bf16 numbers on this CPU. Torch before 2.9 has no setting for fp32 results of them."""
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    return hasattr(matmul, "fp32_precision") and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def product_on_cpu(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in fp32 on a CPU. Sums are in fp32; a CPU with AMX rounds elements to bf16.

    oneDNN computes it: in half of MKL's time on an AMD EPYC, with the same error. The setting is the process's: a matmul of
    fp32 that another thread starts in these moments is computed so, too.
    """
    if not _multiplies_bf16():
        return a.float() @ b.float()
    backends: Any = torch.backends
    matmul = backends.mkldnn.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        return a.float() @ b.float()
    finally:
        matmul.fp32_precision = before


@torch.compiler.assume_constant_result
def fp32_precision() -> str:
    """Return "ieee" or "tf32": how torch multiplies fp32 matrices on a GPU.

    ``torch.get_float32_matmul_precision`` raises once the newer setting was used, so it is only called before torch 2.9.
    """
    newer = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    is_tf32 = torch.get_float32_matmul_precision() != "highest" if newer is None else newer == "tf32"
    return "tf32" if is_tf32 else "ieee"
