"""Checks of single arguments. Each one raises a one-line error that names the argument.

The checks run in every call. torch.compile traces them too, so they must not read the value of a symbolic number.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch._guards import active_fake_mode
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor

LARGEST, SMALLEST = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
# Abstract types come last: isinstance is slow for them, and only numpy's numbers need them.
_INTEGERS: tuple[type, ...] = (int, torch.SymInt, Integral)
_NUMBERS: tuple[type, ...] = (float, int, torch.SymFloat, torch.SymInt, Real)
# Arguments that may be DTensors, or that another check refuses with more advice.
_DTENSORS = ("input", "target", "ids", "linear_weight", "linear_bias", "logit_scale")


def number(name: str, value: Any) -> float:
    """Return a number as a float. Raise unless it is finite in fp32 and neither a tensor nor a bool."""
    if isinstance(value, bool) or not isinstance(value, _NUMBERS):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not -LARGEST <= value <= LARGEST:  # math.isfinite would read the value of a symbolic number
        raise ValueError(f"{name} must be finite in fp32, got {value}")
    return float(value)


def positive(name: str, value: Any, otherwise: str = "") -> float:
    """Return a number as a float. Raise unless it is positive and finite in fp32, without losing digits."""
    wide = number(name, value)
    if not wide >= SMALLEST:
        raise ValueError(f"{name} must be positive in fp32{otherwise}, got {value}")
    return wide


def integer(name: str, value: Any, least: int = -(2**63)) -> int:
    """Return a 64-bit integer. Raise if it is a bool or less than ``least``."""
    if isinstance(value, bool) or not isinstance(value, _INTEGERS):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
    if value < least or value >= 2**63:
        wanted = f"at least {least}" if -(2**63) < least > value else "an integer of 64 bits"
        raise ValueError(f"{name} must be {wanted}, got {value}")
    return value if isinstance(value, int) else int(value)


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__}")
    return value


def choice(name: str, value: Any, allowed: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {allowed}, got {value!r}")
    return value


def kind(name: str, value: Any, wanted: type) -> Any:
    """Return an instance of ``wanted`` or None. Raise TypeError for anything else."""
    if value is not None and not isinstance(value, wanted):
        raise TypeError(f"{name} must be a {wanted.__name__} or None, got {type(value).__name__}")
    return value


def tensors(required: dict[str, Any], on_meta: bool = False, **optional: Any) -> None:
    """Raise unless every value is a dense tensor. Optional ones may be None.

    All tensors may be on "meta" only with ``on_meta``.
    """
    values = required | {name: value for name, value in optional.items() if value is not None}
    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
        if value.is_nested or value.layout != torch.strided:
            kind = "nested" if value.is_nested else "sparse"
            raise TypeError(f"{name} is {kind} ({value.layout}): pass a dense tensor")
        if isinstance(value, DTensor) and name not in _DTENSORS:
            raise TypeError(f"{name} is a DTensor: pass its local tensor (to_local())")
    if not on_meta and all(value.is_meta for value in values.values()):
        raise ValueError(f"{next(iter(values))} is on meta: it has no values")


def has_values(tensor: torch.Tensor) -> bool:
    """Whether values can be read: not in a compiled graph, nor of a ``FakeTensor``."""
    if torch.compiler.is_compiling() or isinstance(tensor, FakeTensor):
        return False
    return active_fake_mode() is None


def apart(buffer: torch.Tensor, **read: torch.Tensor | None) -> None:
    """Raise ValueError if a buffer for gradients shares memory with a tensor that the call reads."""
    if torch.compiler.is_compiling() or buffer.is_meta or type(buffer) not in (torch.Tensor, torch.nn.Parameter):
        return
    first, last = _extent(buffer)
    for name, tensor in read.items():
        tensor: Any = getattr(tensor, "_local_tensor", tensor)
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided:
            start, stop = _extent(tensor)
            if start < last and first < stop and tensor.device == buffer.device:
                raise ValueError(f"grad_weight_out shares memory with {name}, which backward would overwrite")


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and of the byte past its last one."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.itemsize


def like_target(name: str, value: Any, target: torch.Tensor) -> None:
    """Raise unless the value is a dense tensor of target's shape, on target's device."""
    tensors({name: value}, on_meta=True)
    if value.shape != target.shape or value.device != target.device:
        raise ValueError(
            f"{name} must be {tuple(target.shape)} on {target.device} as target, "
            f"got {tuple(value.shape)} on {value.device}"
        )
