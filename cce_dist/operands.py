"""Check the tensors of a public function against each other and the shard, and lay them out for the kernels."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cce_dist import checks
from cce_dist.call import DTYPES, Call, Options, concrete, layout_of
from cce_dist.decide import choose_backend
from cce_dist.kernels import Operands, ShardLogits, Spec
from cce_dist.shard import VocabShard, local_rows


def prepare(
    input: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, buffer: Tensor | None, shard: VocabShard | None,
    logit_scale: float, options: Options, on_meta: bool = False,
) -> tuple[Operands, VocabShard, ShardLogits]:  # fmt: skip
    """Check the tensors, apply autocast, and return the operands of the kernels, the shard, and how it makes logits."""
    dtypes = (*DTYPES, torch.float64) if options.labels == "target" else DTYPES
    head = head_of(input, weight, bias, shard, on_meta, dtypes)
    if buffer is not None:
        checks.tensors({"grad_weight_out": buffer}, on_meta)
        checks.apart(buffer, input=input, linear_weight=weight, linear_bias=bias)
    checks.tensors({options.labels: labels, "input": head.input}, on_meta)
    _check_labels(labels, head, options)
    if buffer is not None:
        check_buffer(buffer, head.weight)
    several = labels.dim() >= max(1, input.dim()) and labels.shape[-1] > 1
    hidden, weight, tensors = head.operands()
    logits = logits_of(head.shard, logit_scale, options.softcap, tensors)
    return Operands.of(hidden, weight, flat_ids(labels, several), logits, **tensors), head.shard, logits


def flat_ids(labels: Tensor, several: bool = False) -> Tensor:
    """Return labels as contiguous int64 ids, [N], or with ``several`` [N, I]."""
    ids = labels if labels.dtype == torch.int64 else labels.long()
    if ids.dim() != 1 + several:  # a view is one more node for autograd
        ids = ids.reshape(-1, ids.shape[-1]) if several else ids.reshape(-1)
    return plain(ids)


def logits_of(shard: VocabShard, logit_scale: float, softcap: float | None, tensors: Iterable[str]) -> ShardLogits:
    softcap = 0.0 if softcap is None else concrete(softcap)
    return ShardLogits(shard.start, shard.num_valid, concrete(logit_scale), softcap, " ".join(tensors))


class LocalHead(NamedTuple):
    input: Tensor  # [..., D]
    weight: Tensor  # [V_r, D]
    bias: Tensor | None  # [V_r]
    shard: VocabShard

    def operands(self) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return hidden states [N, D], the weight, and the tensors of ``kernels.Head`` by name, all contiguous."""
        hidden = self.input if self.input.dim() == 2 else self.input.reshape(-1, self.input.shape[-1])
        tensors = {} if self.bias is None else {"bias": plain(self.bias)}
        return plain(hidden), plain(self.weight), tensors


def plain(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor without the negative bit of ``torch.Tensor.is_neg``, which kernels would not see."""
    if _is_negated(tensor):
        tensor = tensor.resolve_neg()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _is_negated(tensor: Tensor) -> bool:
    return not torch.compiler.is_compiling() and tensor.is_neg()  # a graph calls operators, for which torch resolves it


def head_of(
    input: Tensor, weight: Tensor, bias: Tensor | None, shard: VocabShard | None, on_meta: bool = False,
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> LocalHead:  # fmt: skip
    """Return the local tensors of a head, cast by autocast. Raise unless dtypes, devices and sizes fit each other."""
    checks.tensors({"input": input, "linear_weight": weight}, on_meta, linear_bias=bias)
    weight, bias, shard = local_rows(weight, bias, shard)
    autocast_type = "cuda" if input.is_meta else input.device.type
    if torch.is_autocast_enabled(autocast_type):
        dtype = torch.get_autocast_dtype(autocast_type)
        # Autocast leaves float64 and integers alone.
        casts = (x.is_floating_point() and x.dtype != torch.float64 for x in (input, weight))
        input, weight = (x.to(dtype) if cast else x for x, cast in zip((input, weight), casts, strict=True))
    if isinstance(input, DTensor):
        raise TypeError(_needs_local("input"))
    if input.dim() < 1:
        raise ValueError("input must be [..., D], got a number")
    if input.shape[-1] != weight.shape[1]:
        shape = list(weight.shape)
        raise ValueError(
            f"input has hidden size {input.shape[-1]}, linear_weight {shape[1]}: it is [V, D], got {shape}"
        )
    if input.shape[-1] == 0:
        raise ValueError(f"input has hidden size 0, got {tuple(input.shape)}")
    if input.dtype != weight.dtype:
        raise TypeError(f"input is {input.dtype}, linear_weight {weight.dtype}: cast one, or use autocast")
    for name, tensor in (("input", input), ("linear_bias", bias)):
        if tensor is not None and tensor.dtype not in dtypes:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise TypeError(f"{name} must be one of {names}, got {tensor.dtype}")
    for name, tensor in (("linear_weight", weight), ("linear_bias", bias)):
        if tensor is not None and tensor.device != input.device:
            raise ValueError(f"input is on {input.device}, {name} on {tensor.device}")
    shard.check(weight, bias)
    return LocalHead(input, weight, bias, shard)


def call_of(x: Operands, spec: Spec, shard: VocabShard, options: Options, needs_kernels: bool = False) -> Call:
    forced, debug = environment()
    backend = choose_backend(options.backend, forced, x.hidden.device.type, x.hidden.dtype, needs_kernels)
    return Call(spec, layout_of(shard, options), backend, debug, options.labels)


@torch.compiler.assume_constant_result
def environment() -> tuple[str, bool]:
    """Return the environment variable CCE_DIST_BACKEND, and whether CCE_DIST_DEBUG is set."""
    return os.environ.get("CCE_DIST_BACKEND", "auto"), os.environ.get("CCE_DIST_DEBUG", "0") not in ("", "0")


def _needs_local(name: str) -> str:
    return f"{name} is a DTensor: pass its local tensor (to_local()), with sequence_parallel=True if it is a slice of dim 0"


def _check_labels(labels: Tensor, head: LocalHead, options: Options) -> None:
    name, input = options.labels, head.input
    if isinstance(labels, DTensor):
        raise TypeError(_needs_local(name))
    if labels.dtype not in (torch.int64, torch.int32):
        hint = " (class probabilities are not supported)" if labels.is_floating_point() and name == "target" else ""
        raise TypeError(f"{name} must be int64 or int32 ids{hint}, got {labels.dtype}")
    if labels.device != input.device:
        raise ValueError(f"input is on {input.device}, {name} on {labels.device}")
    shape, tokens = tuple(labels.shape), shape_of_tokens(head, options.sequence_parallel)
    several = options.labels == "ids"
    if several and shape[:-1] == tokens and labels.dim() == len(tokens) + 1 and shape[-1] > 0:
        return
    wanted = f"{tokens} or {(*tokens, 'K')} with K > 0" if several else f"{tokens}"
    check_shape(name, labels, tokens, wanted, head, options.sequence_parallel)


def shape_of_tokens(head: LocalHead, sequence_parallel: bool) -> tuple[int, ...]:
    shape = tuple(head.input.shape[:-1])
    if not sequence_parallel:
        return shape
    if not shape:
        raise ValueError("sequence_parallel needs an input with a dim 0 to split, got a single vector")
    return (shape[0] * head.shard.group_size, *shape[1:])


def check_shape(
    name: str, tensor: Tensor, tokens: tuple[int, ...], wanted: str, head: LocalHead, sequence_parallel: bool
) -> None:
    if tuple(tensor.shape) != tokens:
        whole = f" ({head.shard.group_size} slices of dim 0)" if sequence_parallel else ""
        raise ValueError(
            f"{name} must be {wanted} for input {tuple(head.input.shape)}{whole}, got {tuple(tensor.shape)}"
        )


def check_buffer(buffer: Tensor, weight: Tensor) -> None:
    if (
        buffer.shape != weight.shape
        or buffer.device != weight.device
        or buffer.dtype not in (torch.float32, weight.dtype)
    ):
        raise ValueError(
            f"grad_weight_out must be {tuple(weight.shape)} on {weight.device}, float32 or {weight.dtype}, "
            f"got {tuple(buffer.shape)} on {buffer.device}, {buffer.dtype}"
        )
    if not buffer.is_contiguous() or _is_negated(buffer):
        negated = " of a negated view" if _is_negated(buffer) else ""
        raise ValueError(f"grad_weight_out must be contiguous, got strides {buffer.stride()}{negated}")
