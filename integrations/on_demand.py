"""A tensor that is computed at the first look: the logits of an evaluation, where most callers want the loss alone.

It is a real ``torch.Tensor`` without memory, because Trainer, accelerate, DeepSpeed and autograd ask for one, from Python and
from C++. Shape, dtype and device are known without a look, and ``detach`` looks at nothing. Every other function computes the
tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

NO_LOOK = {"__get__", "dim", "size", "numel", "is_contiguous", "is_floating_point", "is_complex", "detach", "__hash__"}
SAME = {torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.view.default}


class OnDemand(Tensor):
    """What ``compute()`` returns, from the first look on; ``compute`` remembers its result."""

    compute: Callable[[], Tensor]

    @staticmethod
    def __new__(cls, shape: torch.Size, dtype: torch.dtype, device: torch.device, compute: Callable[[], Tensor]) -> Any:
        new: Any = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        new.compute = compute
        return new

    def __init__(self, *_: Any) -> None:
        """``__new__`` has done it all."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.__name__ not in NO_LOOK:
            args, kwargs = looked_at(args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args else None
        if function in SAME and isinstance(first, cls) and (len(args) == 1 or tuple(args[1]) == tuple(first.shape)):
            return cls(first.shape, first.dtype, first.device, first.compute)
        args, kwargs = looked_at(args, kwargs)
        return function(*args, **kwargs)

    def __repr__(self, **_: Any) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"OnDemand(shape={tuple(self.shape)}, dtype={self.dtype})"


def looked_at(args: Any, kwargs: Any) -> Any:
    """Return arguments with the tensors themselves."""
    return pytree.tree_map_only(OnDemand, lambda tensor: tensor.compute(), (args, kwargs or {}))
