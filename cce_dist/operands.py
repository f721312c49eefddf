"""The tensors of a call, whichever function is called: checked against each other and the shard, and laid out for kernels."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cce_dist import checks
from cce_dist.call import BACKENDS, DTYPES, Call, Layout, LogProbOptions, Options
from cce_dist.kernels import Operands, ShardLogits, Spec
from cce_dist.shard import VocabShard, local_rows


def prepare(
    input: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, buffer: Tensor | None, shard: VocabShard | None,
    logit_scale: float, options: Options | LogProbOptions,
) -> tuple[Operands, VocabShard]:  # fmt: skip
    """Check the tensors, cast them as autocast asks, and return them as kernels take them, and the shard.

    Args:
        labels: One id of each token, or with ``linear_log_probs`` several.
        buffer: ``grad_weight_out``.
    """
    given = {"input": input, "linear_weight": weight, options.labels: labels}
    if bias is not None:
        given["linear_bias"] = bias
    if buffer is not None:
        given["grad_weight_out"] = buffer
    checks.tensors(**given)
    if shard is None and type(weight) in (Tensor, torch.nn.Parameter) and weight.dim() == 2 and len(weight) > 0:
        shard = None if torch.compiler.is_compiling() else _whole(len(weight))
    weight, bias, shard = local_rows(weight, bias, shard)
    if torch.is_autocast_enabled(input.device.type):
        dtype = torch.get_autocast_dtype(input.device.type)
        input, weight = input.to(dtype), weight.to(dtype)
    _check_operands(input, weight, labels, bias, shard, options.labels)
    tokens = shape_of_tokens(input, shard, options.sequence_parallel)
    _check_label_shape(input, labels, tokens, shard, options)
    if buffer is not None:
        check_buffer(buffer, weight)
    several = labels.shape[len(tokens) :].numel() > 1
    # Kernels take addresses, not strides: everything that enters one is made contiguous here.
    ids, hidden = labels.long(), input
    if ids.dim() != 1 + several:  # a view costs the host as much as all of these checks, and autograd one more step
        ids = ids.reshape(-1, ids.shape[-1]) if several else ids.reshape(-1)
    if hidden.dim() != 2:
        hidden = hidden.reshape(-1, hidden.shape[-1])
    logits = ShardLogits(shard.start, shard.num_valid, logit_scale, options.softcap or 0.0)
    bias = None if bias is None else bias.contiguous()
    return Operands(hidden.contiguous(), weight.contiguous(), bias, ids.contiguous(), logits), shard


@lru_cache(maxsize=64)
def _whole(num_rows: int) -> VocabShard:
    return VocabShard(0, num_rows, num_rows)


def call_of(x: Operands, spec: Spec, shard: VocabShard, options: Options | LogProbOptions) -> Call:
    """Return what the operator is told of a call."""
    forced, debug = environment()
    return Call(
        spec, Layout.of(shard, options), choose_backend(options.backend, forced, x.hidden), debug, options.labels
    )


@torch.compiler.assume_constant_result
def environment() -> tuple[str, bool]:
    """CCE_DIST_BACKEND and CCE_DIST_DEBUG."""
    return os.environ.get("CCE_DIST_BACKEND", "auto"), os.environ.get("CCE_DIST_DEBUG", "0") not in ("", "0")


def choose_backend(backend: str, forced: str, input: Tensor) -> str:
    """Return the backend that will run, "triton" or "torch"."""
    checks.choice("CCE_DIST_BACKEND", forced, BACKENDS)
    if backend == "auto":
        backend = forced
    if backend == "auto":
        return "triton" if input.is_cuda and torch.version.cuda is not None else "torch"
    if backend == "triton" and not input.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"backend='triton' needs a GPU (or Triton's interpreter, TRITON_INTERPRET=1), input is on {input.device}"
        )
    if backend == "triton" and not input.is_cuda and input.dtype == torch.bfloat16:
        raise TypeError("input is bfloat16, which Triton's interpreter misreads: use float32, float16, or a GPU")
    return backend


class Names(NamedTuple):
    """Names of a head's arguments in messages."""

    input: str
    weight: str
    bias: str
    shard: str


NAMES = Names("input", "linear_weight", "linear_bias", "shard")


def check_head(input: Tensor, weight: Tensor, bias: Tensor | None, names: Names = NAMES) -> None:
    """Raise unless dtypes, devices and sizes of a head's tensors fit each other."""
    if isinstance(input, DTensor):
        raise TypeError(_needs_local(names.input))
    if input.dim() < 1:
        raise ValueError(f"{names.input} must be [..., D], got a number")
    if input.shape[-1] != weight.shape[1]:
        raise ValueError(f"{names.input} has hidden size {input.shape[-1]}, {names.weight} {weight.shape[1]}")
    if input.shape[-1] == 0:
        raise ValueError(f"{names.input} has hidden size 0, got {tuple(input.shape)}")
    if input.dtype != weight.dtype:
        raise TypeError(f"{names.input} is {input.dtype}, {names.weight} {weight.dtype}: cast one, or use autocast")
    if input.dtype not in DTYPES:
        raise TypeError(f"{names.input} must be float32, bfloat16 or float16, got {input.dtype}")
    if bias is not None and bias.dtype not in DTYPES:
        raise TypeError(f"{names.bias} must be float32, bfloat16 or float16, got {bias.dtype}")
    for name, tensor in ((names.weight, weight), (names.bias, bias)):
        if tensor is not None and tensor.device != input.device:
            raise ValueError(f"{names.input} is on {input.device}, {name} on {tensor.device}")


def _needs_local(name: str) -> str:
    return f"{name} is a DTensor: pass its local tensor (to_local()); sequence_parallel says if it is a slice"


def _check_operands(
    input: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, shard: VocabShard, name: str
) -> None:
    """Raise unless dtypes, devices and sizes fit each other and the shard."""
    check_head(input, weight, bias)
    if isinstance(labels, DTensor):
        raise TypeError(_needs_local(name))
    if labels.dtype not in (torch.int64, torch.int32):
        hint = " (class probabilities are not supported)" if labels.is_floating_point() and name == "target" else ""
        raise TypeError(f"{name} must be int64 or int32 ids{hint}, got {labels.dtype}")
    if labels.device != input.device:
        raise ValueError(f"input is on {input.device}, {name} on {labels.device}")
    shard.check(weight, bias)


def shape_of_tokens(input: Tensor, shard: VocabShard, sequence_parallel: bool) -> tuple[int, ...]:
    """The leading dimensions of all tokens of the group."""
    shape = tuple(input.shape[:-1])
    if not sequence_parallel:
        return shape
    if not shape:
        raise ValueError("sequence_parallel needs an input with a dim 0 to split, got one vector")
    return (shape[0] * shard.group_size, *shape[1:])


def _check_label_shape(
    input: Tensor, labels: Tensor, tokens: tuple[int, ...], shard: VocabShard, options: Options | LogProbOptions
) -> None:
    shape, several = tuple(labels.shape), isinstance(options, LogProbOptions)
    if shape == tokens or (several and shape[:-1] == tokens and labels.dim() == len(tokens) + 1 and shape[-1] > 0):
        return
    whole = f" ({shard.group_size} slices of dim 0)" if options.sequence_parallel else ""
    wanted = f"{tokens} or {(*tokens, 'K')} with K > 0" if several else f"{tokens}"
    raise ValueError(f"{options.labels} must be {wanted} for input {tuple(input.shape)}{whole}, got {shape}")


def check_buffer(buffer: Tensor, weight: Tensor) -> None:
    if isinstance(buffer, DTensor):
        raise TypeError("grad_weight_out is a DTensor: pass its local tensor (to_local())")
    if (
        buffer.shape != weight.shape
        or buffer.device != weight.device
        or buffer.dtype not in (torch.float32, weight.dtype)
    ):
        raise ValueError(
            f"grad_weight_out must be {tuple(weight.shape)} on {weight.device}, float32 or {weight.dtype}, "
            f"got {tuple(buffer.shape)} on {buffer.device}, {buffer.dtype}"
        )
    if not buffer.is_contiguous():
        raise ValueError(f"grad_weight_out must be contiguous, got strides {buffer.stride()}")
