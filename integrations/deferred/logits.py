"""Logits that nobody has computed, which the model's own code may scale: the part that every adapter shares."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


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
