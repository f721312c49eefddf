"""Whether an argument is of its kind: each check raises one line that names the argument, before any kernel or collective.

The checks run at every call, and torch.compile traces them: they ask no symbolic number for its value.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import torch

LARGEST = torch.finfo(torch.float32).max
# The abstract ones come last: they are slow to ask, and numpy's numbers alone need them.
_INTEGERS: tuple[type, ...] = (int, torch.SymInt, Integral)
_NUMBERS: tuple[type, ...] = (float, int, torch.SymFloat, torch.SymInt, Real)


def number(name: str, value: Any) -> float:
    """Return a number that is finite in fp32; a tensor is none, nor is a bool."""
    if isinstance(value, bool) or not isinstance(value, _NUMBERS):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not -LARGEST <= value <= LARGEST:  # math.isfinite would ask a symbolic number for its value
        raise ValueError(f"{name} must be finite in fp32, got {value}")
    return float(value)


def integer(name: str, value: Any, least: int = -(2**63)) -> int:
    """Return an integer of 64 bits, at least ``least``; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, _INTEGERS):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
    if value < least or value >= 2**63:
        wanted = f"at least {least}" if -(2**63) < least > value else "an integer of 64 bits"
        raise ValueError(f"{name} must be {wanted}, got {value}")
    return value if isinstance(value, int) else int(value)


def boolean(name: str, value: Any) -> bool:
    """Return a bool, or raise TypeError."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__}")
    return value


def choice(name: str, value: Any, allowed: Sequence[str]) -> str:
    """Return one of the allowed values, or raise ValueError."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {allowed}, got {value!r}")
    return value


def kind(name: str, value: Any, wanted: type) -> Any:
    """Return None or a value of that class, or raise TypeError."""
    if value is not None and not isinstance(value, wanted):
        raise TypeError(f"{name} must be a {wanted.__name__} or None, got {type(value).__name__}")
    return value


def tensors(required: dict[str, Any], on_meta: bool = False, **optional: Any) -> None:
    """Raise TypeError unless every value is a dense tensor (or, if optional, None).

    Raise ValueError if all of them are on "meta", unless ``on_meta``.
    """
    values = required | {name: value for name, value in optional.items() if value is not None}
    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
        if value.is_nested or value.layout != torch.strided:
            kind = "nested" if value.is_nested else "sparse"
            raise TypeError(f"{name} is {kind} ({value.layout}): pass a dense tensor")
    if not on_meta and all(value.is_meta for value in values.values()):
        raise ValueError(f"{next(iter(values))} is on meta: it has no values")
