"""CCE_DIST_DEBUG=1: check that the ranks of a group were called with matching arguments, and pass errors on to all ranks."""

from __future__ import annotations

import contextlib
import functools
import inspect
import traceback
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor

from cce_dist import merge
from cce_dist.autograd import refuse_transforms
from cce_dist.call import Call
from cce_dist.given import modes_of
from cce_dist.kernels import OUTSIDE
from cce_dist.operands import environment
from cce_dist.shard import VocabShard

_P = ParamSpec("_P")
_R = TypeVar("_R")


def check_labels(call: Call, labels: Tensor, ids: Tensor) -> None:
    """Raise IndexError for the first label outside the vocabulary, on a CPU or with CCE_DIST_DEBUG=1.

    Reading labels would wait for a GPU. There the token's loss is NaN instead.
    """
    if labels.is_meta or (labels.is_cuda and not call.debug):
        return
    outside = ids == OUTSIDE
    if outside.any():
        position = int(outside.nonzero()[0])
        raise IndexError(
            f"{call.argument}[{position}] (flattened) is {int(labels[position])}: neither in [0, {call.spec.vocab_size}) nor "
            f"ignore_index {call.spec.ignore_index}: label padding so, resize the head for more ids, or pass the shard of a "
            "split weight"
        )


# What the ranks of a group must share of an argument. An argument that is not listed must be equal on all ranks, a tensor in
# shape, dtype, requires_grad and values. docs/api.md has this table, too.
SHARED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("input", "teacher_input"), ("shape", "dtype", "requires_grad")),
    **dict.fromkeys(("linear_weight", "teacher_weight"), ("hidden size", "dtype", "requires_grad")),
    **dict.fromkeys(("linear_bias", "teacher_bias", "grad_weight_out"), ("dtype", "requires_grad")),
    **dict.fromkeys(
        ("expected_weights", "logit_scale", "temperature", "teacher_ids", "teacher_log_probs", "token_inputs"),
        ("shape", "dtype", "requires_grad", "values of counted tokens"),
    ),
    **dict.fromkeys(("shard", "teacher_shard"), ("vocab_size",)),
    "token_loss": ("needs_entropy", "losses", "derivatives"),  # ``TokenLoss`` compares what the function returns
    "options": (),
}
_READ: dict[str, Callable[[Any, Tensor | None], Any]] = {
    "shape": lambda x, _: tuple(x.shape),
    "hidden size": lambda x, _: x.shape[1],
    "dtype": lambda x, _: str(x.dtype),
    "requires_grad": lambda x, _: x.requires_grad,
    "values": lambda x, _: merge.digest(x),
    "values of counted tokens": lambda x, ignored: merge.digest(_counted(x, ignored)),
    "vocab_size": lambda x, _: x.vocab_size,
    "needs_entropy": lambda x, _: bool(getattr(x, "needs_entropy", False)),
}


# The outermost call of a public function; "compared" once the ranks have compared its arguments; None outside of calls.
_outermost: ContextVar[functools.partial | str | None] = ContextVar("outermost", default=None)


def _arguments(call: functools.partial) -> dict[str, Any]:
    parameters = inspect.signature(call.func).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    return defaults | dict(zip(parameters, call.args, strict=False)) | call.keywords


def _facts(name: str, value: Any, parts: tuple[str, ...], ignored: Tensor | None) -> dict[str, Any]:
    """Return what ranks must share of an argument. Tensors of a tuple are arguments of their own."""
    if isinstance(value, (tuple, list)) and all(each is None or isinstance(each, Tensor) for each in value):
        fields = getattr(value, "_fields", None)
        facts = {name: len(value)}
        for i, each in enumerate(value):
            facts |= _facts(f"{name}.{fields[i]}" if fields else f"{name}[{i}]", each, parts, ignored)
        return facts
    if not isinstance(value, (Tensor, VocabShard)) and not callable(value):
        return {name: value} if parts else {}
    return {name: "given"} | {f"{name} ({part})": _READ[part](value, ignored) for part in parts if part in _READ}


def _ignored(arguments: dict[str, Any]) -> Tensor | None:
    """Return a mask of the labels that do not count; None if the function has no labels."""
    if "ignore_index" not in arguments:
        return None
    labels = next(arguments[name] for name in ("target", "ids", "teacher_ids") if name in arguments)
    ignored = labels == (-100 if arguments["ignore_index"] is None else arguments["ignore_index"])
    mask = arguments.get("mask")
    return ignored if mask is None else ignored | ~mask[..., None]


def _counted(values: Tensor, ignored: Tensor | None) -> Tensor:
    if ignored is not None and values.shape == ignored.shape[:-1]:
        ignored = ignored.all(-1)
    return values if ignored is None or values.shape != ignored.shape else values[~ignored]


def check_ranks(shard: VocabShard, debug: bool) -> None:
    """With CCE_DIST_DEBUG=1 raise an error on every rank if the ranks' arguments differ. Skipped under torch.compile."""
    if not debug or shard.group is None or torch.compiler.is_compiling():
        return
    call = _outermost.get()
    if not isinstance(call, functools.partial):
        return
    name_of_function, arguments, facts = call.func.__name__, _arguments(call), {}
    refuse_transforms(name_of_function, arguments["input"])  # inside of them values cannot be read
    ignored = _ignored(arguments)
    parts = {name: SHARED.get(name, ("shape", "dtype", "requires_grad", "values")) for name in arguments}
    # Errors name the first difference: what differs only because other tokens count comes last.
    for name in sorted(arguments, key=lambda name: "values of counted tokens" in parts[name]):
        facts |= _facts(name, arguments[name], parts[name], ignored)
    facts |= {"vocab_size": shard.vocab_size} | modes_of(arguments["input"])
    merge.check_alive(shard.group)
    _outermost.set("compared")
    merge.assert_ranks_agree(name_of_function, facts, (shard.start, shard.stop), shard.group, shard.vocab_size)


def errors_reach_all_ranks(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a public function: with CCE_DIST_DEBUG=1, all ranks raise the error that one rank raises for its arguments.

    The other ranks receive the error in ``check_ranks``. An error stays on its rank if it comes later, unless a ``token_loss``
    raises it. All errors do if the arguments do not contain the vocabulary-parallel group.
    """

    @functools.wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_compiling() or _outermost.get() is not None:
            return function(*args, **kwargs)
        call = functools.partial(function, *args, **kwargs)
        token = _outermost.set(call)
        try:
            # Before an argument is read, which a batched one does not allow.
            if not _NUMBERS.isdisjoint(kwargs):
                numbers = [value for name, value in kwargs.items() if name in _NUMBERS and isinstance(value, Tensor)]
                refuse_transforms(function.__name__, *numbers)
            return function(*args, **kwargs)
        except Exception as raised:
            arguments = _arguments(call)
            error = _of_subclass(raised, arguments) or raised
            group = _group_of(arguments) if environment()[1] and _outermost.get() is call else None
            if merge.is_alive(group):
                merge.tell(function.__name__, group, error)
            if error is raised:
                raise
            raise error from raised
        finally:
            _outermost.reset(token)

    return checked


_NUMBERS = frozenset({"logit_scale", "z_loss_weight", "num_tokens", "weight"})


def _of_subclass(raised: Exception, given: dict[str, Any]) -> TypeError | None:
    *_, (frame, _) = traceback.walk_tb(raised.__traceback__)
    if frame.f_globals.get("__name__", "").startswith("cce_dist."):
        return None
    for name, value in given.items():
        kind: Any = type(value)
        own = isinstance(value, Tensor) and kind.__torch_dispatch__ is not cast(Any, Tensor).__torch_dispatch__
        if own and not isinstance(value, (DTensor, FakeTensor)):
            return TypeError(
                f"{name} is a {type(value).__name__}, which does not run the operators of cce_dist: pass a plain tensor, for a "
                "quantized weight the dequantized one"
            )
    return None


def _group_of(arguments: dict[str, Any]) -> Any:
    for name in ("shard", "teacher_shard"):
        shard = arguments.get(name)
        if isinstance(shard, VocabShard) and shard.group is not None:
            return shard.group
    weight = arguments.get("linear_weight")
    if isinstance(weight, DTensor):
        with contextlib.suppress(ValueError):
            return VocabShard.from_dtensor(weight).group
    return None
