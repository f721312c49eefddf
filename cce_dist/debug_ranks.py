"""CCE_DIST_DEBUG=1: check that the ranks of a group were called with matching arguments, and pass errors on to all ranks."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import inspect
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor

from cce_dist import merge
from cce_dist.autograd import refuse_transforms
from cce_dist.call import Call, LogProbOptions, Options
from cce_dist.kernels import OUTSIDE, Operands
from cce_dist.kernels.dense import label_ids
from cce_dist.operands import environment
from cce_dist.shard import VocabShard

if TYPE_CHECKING:
    from cce_dist.given import Given

_P = ParamSpec("_P")
_R = TypeVar("_R")


def label_error(name: str, labels: Tensor, ids: Tensor, vocab_size: int, ignore_index: int) -> str:
    """Return the error message for the first label outside the vocabulary, or "". Waits for the labels' device."""
    outside = ids == OUTSIDE
    if not outside.any():
        return ""
    position = int(outside.nonzero()[0])
    return (
        f"{name}[{position}] (flattened) is {int(labels[position])}: neither in [0, {vocab_size}) "
        f"nor ignore_index {ignore_index}"
    )


def check_labels(call: Call, labels: Tensor, ids: Tensor) -> None:
    """Raise IndexError for a label outside the vocabulary, on a CPU or with CCE_DIST_DEBUG=1.

    Reading labels would wait for a GPU. There the token's loss is NaN instead.
    """
    if call.debug or not labels.is_cuda:
        error = label_error(call.argument, labels, ids, call.spec.vocab_size, call.spec.ignore_index)
        if error:
            raise IndexError(error)


def check_loss(given: Given) -> None:
    """Call ``check_ranks`` for ``linear_cross_entropy``."""
    if not given.call.debug:
        return
    token, weights = given.terms.token, given.class_weights
    facts = {"weight": None if weights is None else weights.weight, "token_loss": token is not None}
    if token is not None:  # ignored tokens may hold anything
        ignored = given.x.ids == given.options.ignore_index
        facts |= {f"token_inputs[{i}]": values.masked_fill(ignored, 0) for i, values in enumerate(token.inputs)}
    check_ranks(given.x, facts, given.shard, given.options, given.call)


def check_ranks(
    x: Operands, others: dict[str, Any], shard: VocabShard, options: Options | LogProbOptions, call: Call
) -> None:
    """With CCE_DIST_DEBUG=1 raise an error on every rank if the ranks' arguments differ. Skipped under torch.compile.

    Args:
        x: The operands, with the labels as its ids.
        others: Further arguments by name, numbers or tensors.
    """
    if not call.debug or shard.group is None or torch.compiler.is_compiling():
        return
    facts = facts_of(x.hidden, x.weight, x.head.bias)
    facts |= {"number of tokens": x.num_tokens, "vocab_size": shard.vocab_size} | options._asdict()
    if isinstance(options, Options) and isinstance(options.num_tokens, Tensor):
        facts["num_tokens"] = options.num_tokens.item()
    facts |= {"backend": call.backend, options.labels: (tuple(x.ids.shape), digest(x.ids))}
    facts |= {name: digest(value) if isinstance(value, Tensor) else value for name, value in others.items()}
    labels = x.ids.view(-1)
    ids = label_ids(labels, options.ignore_index, shard.vocab_size)
    error = label_error(options.labels, labels, ids, shard.vocab_size, options.ignore_index)
    rows = (shard.start, shard.stop)
    wrong = IndexError(error) if error else None
    merge.assert_ranks_agree(options.function, facts, rows, shard.group, shard.vocab_size, wrong)


def errors_reach_all_ranks(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a public function: with CCE_DIST_DEBUG=1, all ranks raise the error that one rank raises for its arguments.

    The other ranks receive the error in ``check_ranks``. An error after this exchange stays on its rank, and so does an error
    of a call whose arguments do not contain the vocabulary-parallel group. The error of a tensor subclass that cannot run the
    operators is replaced by one that says so.
    """
    parameters = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        before = merge.num_exchanges
        try:
            # Before an argument is read, which a batched one does not allow.
            numbers = [kwargs[name] for name in _NUMBERS if name in kwargs]
            numbers = [each for each in numbers if isinstance(each, Tensor)]
            if numbers:
                refuse_transforms(function.__name__, *numbers)
            return function(*args, **kwargs)
        except Exception as raised:
            error = _of_subclass(raised, dict(zip(parameters, args, strict=False)) | kwargs) or raised
            group = _group_of(args, kwargs) if environment()[1] else None
            if group is not None and merge.is_alive(group) and merge.num_exchanges == before:
                with contextlib.suppress(Exception):  # it raises this error again
                    merge.assert_ranks_agree(function.__name__, {}, (0, 0), group, 0, error)
            if error is raised:
                raise
            raise error from raised

    return checked


_NUMBERS = ("logit_scale", "z_loss_weight", "num_tokens", "weight")


def _of_subclass(raised: Exception, given: dict[str, Any]) -> TypeError | None:
    """Return the error for a tensor subclass, such as a quantized weight, in whose own code an operator has failed."""
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


def _group_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the vocabulary-parallel group of a call's arguments, or None."""
    for name in ("shard", "teacher_shard"):
        shard = kwargs.get(name)
        if isinstance(shard, VocabShard) and shard.group is not None:
            return shard.group
    weight = args[1] if len(args) > 1 else kwargs.get("linear_weight")
    if not isinstance(weight, DTensor):
        return None
    with contextlib.suppress(ValueError):
        return VocabShard.from_dtensor(weight).group
    return None


def facts_of(input: Tensor, weight: Tensor, bias: Tensor | None) -> dict[str, Any]:
    """Return the properties of a head's tensors that must be equal on all ranks."""
    return {
        "input": (tuple(input.shape), str(input.dtype)),
        "linear_weight": (weight.shape[1], str(weight.dtype)),
        "linear_bias": bias is not None,
        "input (needs a gradient)": torch.is_grad_enabled() and input.requires_grad,
    }


def digest(values: Tensor) -> str:
    """Return a hash of a tensor's bytes."""
    values = values.detach().cpu().contiguous()
    return hashlib.blake2b(ctypes.string_at(values.data_ptr(), values.nbytes), digest_size=8).hexdigest()
