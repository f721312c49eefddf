"""Call: all that forward and backward of one loss are told beside tensors, as plain values that an operator can take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple, TypedDict, get_type_hints

import torch
from torch import Tensor

from cce_dist.filter import GradFilter
from cce_dist.kernels import Spec
from cce_dist.shard import VocabShard

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class LossOptions(TypedDict, total=False):
    """The options of ``linear_cross_entropy``, where they are documented, but for ``return_aux``."""

    linear_bias: Tensor | None
    ignore_index: int
    reduction: str
    label_smoothing: float
    logit_scale: float
    softcap: float | None
    z_loss_weight: float
    num_tokens: int | Tensor | None
    shard: VocabShard | None
    sequence_parallel: bool
    input_grad: str
    reduce_dtype: torch.dtype | None
    grad_filter: GradFilter | None
    backend: str
    workspace_bytes: int
    grad_weight_out: Tensor | None


class Layout(NamedTuple):
    """How the tensors lie over ranks.

    Attributes:
        group_name: The vocabulary-parallel group; empty: the vocabulary is not split.
        sequence_parallel: Hidden states are this rank's slice of dim 0.
        partial: d_hidden stays this shard's part.
        reduce_dtype: Dtype that d_hidden is summed over the group in; empty: its own.
    """

    group_name: str = ""
    sequence_parallel: bool = False
    partial: bool = False
    reduce_dtype: str = ""

    @classmethod
    def of(
        cls, shard: VocabShard, sequence_parallel: bool, input_grad: str, reduce_dtype: torch.dtype | None
    ) -> Layout:  # fmt: skip
        """Check the arguments of ``linear_cross_entropy`` of those names.

        Raises:
            ValueError, TypeError: They do not fit each other.
        """
        if input_grad not in ("summed", "partial"):
            raise ValueError(f"input_grad must be one of ('summed', 'partial'), got {input_grad!r}")
        if sequence_parallel and input_grad == "partial":
            raise ValueError('input_grad="partial" has no meaning with sequence_parallel: dE comes back as the slice')
        if reduce_dtype is not None and reduce_dtype not in DTYPES:
            raise TypeError(f"reduce_dtype must be float32, bfloat16, float16 or None, got {reduce_dtype}")
        name = "" if reduce_dtype is None else str(reduce_dtype).removeprefix("torch.")
        return cls(shard.group_name, sequence_parallel, input_grad == "partial", name)


class Call(NamedTuple):
    """One call of the loss.

    Attributes:
        spec: What is computed on this shard.
        layout: How the tensors lie over ranks.
        backend: "torch" or "triton".
        debug: Check that the ranks were called alike.
    """

    spec: Spec
    layout: Layout = Layout()
    backend: str = "torch"
    debug: bool = False

    def flat(self) -> tuple:
        """The values of all fields in order, nested records flattened."""
        return tuple(_values(self))

    @classmethod
    def of(cls, flat: Iterable) -> Call:
        """The call that was flattened."""
        return _build(cls, iter(flat))


@cache
def _fields(record: type) -> tuple[tuple[str, type, bool], ...]:
    """Name and type of each field, and whether it is a record itself."""
    return tuple((name, kind, issubclass(kind, tuple)) for name, kind in get_type_hints(record).items())


def _values(record: tuple) -> Iterator[Any]:
    for value in record:
        if isinstance(value, tuple):
            yield from _values(value)
        else:
            yield value


def _build(record: type, values: Iterator[Any]) -> Any:
    return record(*[_build(kind, values) if nested else next(values) for _, kind, nested in _fields(record)])


def _schema(record: type, prefix: str = "") -> Iterator[str]:
    for name, kind, nested in _fields(record):
        if nested:
            yield from _schema(kind, f"{prefix}{name}_")
        else:
            yield f"{kind.__name__} {prefix}{name}"


SCHEMA = ", ".join(_schema(Call))  # of an operator's arguments that hold a flat call
