"""Tensors that are computed at their first use: the logits of an evaluation, whose caller usually reads the loss alone.

``OnDemand`` is a ``torch.Tensor`` without memory: Trainer, accelerate, DeepSpeed and autograd need a tensor, in Python and in
C++. Its shape, dtype and device are known in advance, and ``detach`` computes nothing. Any other function computes the tensor.
If the weights have changed by then, the logits would not fit the loss beside them; ``Versions`` detects that at no cost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

NO_LOOK = {"__get__", "dim", "size", "numel", "is_contiguous", "is_floating_point", "is_complex", "detach", "__hash__"}
SAME = {torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.view.default}


class ChangedError(RuntimeError):
    """A tensor that logits are computed from changed after the model's forward."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"cce_dist: these logits are stale: {what} after the forward that they are from: use them before that, or keep a "
            "copy (logits.clone())"
        )


class Versions:
    """Tensors with their versions, the counts of in-place changes, which leave out changes through ``.data``.

    Some tensors are not compared: inference tensors and tensors in compiled code have no version, and gathering a DTensor or a
    parameter of ZeRO-3 changes it.
    """

    def __init__(self, *tensors: Tensor | None) -> None:
        self._counts = [(tensor, _count_of(tensor)) for tensor in tensors]

    def check(self, what: str) -> None:
        """Raise ChangedError if one of the tensors was changed. ``what`` names them in the message."""
        for tensor, count in self._counts:
            if count is not None and count != _count_of(tensor):
                raise ChangedError(f"{what} changed")


def is_sharded(tensor: Any) -> bool:
    """Return whether FSDP2 or ZeRO-3 replaces a tensor with the gathered one around a module's forward."""
    return isinstance(tensor, DTensor) or hasattr(tensor, "ds_id")


def _count_of(tensor: Any) -> int | None:
    """Return a tensor's version, or None where versions cannot be compared."""
    if torch.compiler.is_compiling() or tensor is None or is_sharded(tensor):
        return None
    return None if tensor.is_inference() else tensor._version


class OnDemand(Tensor):
    """Stands for the tensor that ``compute()`` returns. ``compute`` caches its result."""

    compute: Callable[[], Tensor]

    @staticmethod
    def __new__(cls, shape: torch.Size, dtype: torch.dtype, device: torch.device, compute: Callable[[], Tensor]) -> Any:
        new: Any = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        new.compute = compute
        return new

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
    """Return arguments with each ``OnDemand`` replaced by its tensor."""
    return pytree.tree_map_only(OnDemand, lambda tensor: tensor.compute(), (args, kwargs or {}))
