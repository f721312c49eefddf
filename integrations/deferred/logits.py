"""Logits that nobody has computed: what the model's own code scales, and a tensor that is computed at its first use.

``DeferredLogits`` is the part that every adapter shares. The caller of an evaluation usually reads the loss alone, so its
logits are ``OnDemand``: a ``torch.Tensor``, as Trainer, accelerate, DeepSpeed and autograd need one in Python and in C++, but
without memory. Any use but of shape, dtype, device and ``detach`` computes it. If the weights have changed by then, the logits
would not fit the loss beside them; ``Versions`` detects that at no cost.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

NO_LOOK = {"__get__", "dim", "size", "numel", "is_contiguous", "is_floating_point", "is_complex", "detach", "__hash__"}
SAME = {torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.view.default}


class NotComputedError(AttributeError, TypeError):
    """Logits that nobody has computed were used: an AttributeError for ``hasattr``, a TypeError as operators raise it."""


class DeferredLogits:
    """Logits that nobody has computed: ``scale * head(hidden)``, or after a tanh ``softcap * tanh(scale * head(hidden))``.

    A subclass adds methods. Its ``ANSWERED`` maps functions of torch to the methods that answer them. Every other use raises
    ``NotComputedError``.
    """

    ANSWERED: dict[Callable, str] = {torch.tanh: "tanh", torch.Tensor.tanh: "tanh"}  # noqa: RUF012, constant
    HINT = "a model without labels computes them"

    def __init__(self, head: Any, task: Any, hidden: Tensor, **given: Any) -> None:
        self._head, self._task, self._hidden, self._given = head, task, hidden, given
        self._factor, self._softcap = 1.0, None  # before the tanh, and after it
        self._made_with_grad = torch.is_grad_enabled()
        self._training = task.training(head)

    def __mul__(self, factor: Any) -> Any:
        if not isinstance(factor, (int, float)):
            return self._other_use(f"multiplication by a {type(factor).__name__}", "__mul__", factor)
        if self._softcap is None:
            return self._with(factor=self._factor * factor)
        return self._with(softcap=self._softcap * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Any:
        if not isinstance(divisor, (int, float)):
            return self._other_use(f"division by a {type(divisor).__name__}", "__truediv__", divisor)
        return self * (1 / divisor)

    def tanh(self) -> Any:
        if self._softcap is not None:
            return self._other_use("a second tanh", "tanh")
        return self._with(softcap=1.0)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        first, *rest = args or (kwargs.pop("input", None),)
        if function in cls.ANSWERED and isinstance(first, cls):
            return getattr(first, cls.ANSWERED[function])(*rest, **kwargs)
        raise cls._refused(getattr(function, "__name__", str(function)))

    def __getattr__(self, name: str) -> Any:
        raise self._refused(name)

    @classmethod
    def _refused(cls, use: str) -> NotComputedError:
        return NotComputedError(f"cce_dist: {use} of logits that are not computed; {cls.HINT}")

    def _other_use(self, use: str, name: str, *args: Any, **kwargs: Any) -> Any:
        """Answer a call of the tensor's method ``name`` that leads to no loss; ``use`` describes it in an error."""
        raise self._refused(use)

    def _with(self, **changes: Any) -> Any:
        new = copy.copy(self)
        vars(new).update({f"_{name}": value for name, value in changes.items()})
        return new

    def _scaling(self) -> dict[str, Any]:
        if self._softcap is None:
            return {"logit_scale": self._factor, "softcap": None}
        if self._softcap <= 0:
            raise ValueError(f"cce_dist: a softcap must be positive, got {self._softcap}")
        return {"logit_scale": self._factor * self._softcap, "softcap": self._softcap}

    def _ask(self, compute: Callable) -> Any:
        """Call the head again and return ``compute(head, hidden, ...)``, in the head's forward, where its weight is whole."""
        if torch.is_grad_enabled() and not self._made_with_grad:
            raise RuntimeError(
                "cce_dist: the head ran without gradients, inside a reentrant activation checkpoint or no_grad: its loss "
                "would have none; leave the head out of it"
            )
        return self._head(self._hidden, ask=compute, **self._given)


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
