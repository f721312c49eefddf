"""linear_cross_entropy: the call, its checks, and the algebra of the loss.

hidden, labels ──► op.forward:  statistics of the shard (kernels) ─► one all-gather ─► merge (log-add-exp)
                                   ──► nll, lse, ... per token, [N] fp32, differentiable
loss            =  plain algebra on those [N] numbers, below
d_loss          ──► op.backward: gradients (kernels) ─► dC stays here, dE is summed over the group behind it
"""

from __future__ import annotations

import math
import os
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import Unpack

from cce_dist import op
from cce_dist.call import DTYPES, Call, Layout, LossOptions
from cce_dist.filter import FilterStats, GradFilter
from cce_dist.kernels import Filter, ShardLogits, Spec, Want
from cce_dist.shard import VocabShard, local_rows

BACKENDS = ("auto", "triton", "torch")


class LinearCrossEntropyOutput(NamedTuple):
    """The loss and what it is made of; per-token tensors have target's shape, are fp32, and 0 where ignored.

    All but ``filter_stats`` are differentiable.

    Attributes:
        loss: As ``linear_cross_entropy`` returns it.
        nll: Negative log-likelihood of the label, in nats; no smoothing, no z-loss.
        lse: Log-sum-exp of the logits over the whole vocabulary.
        target_logit: Logit of the label.
        entropy: Entropy of the softmax, in nats.
        z_loss: ``z_loss_weight * lse**2``.
        filter_stats: What the filter dropped on this shard; None without a filter.
    """

    loss: Tensor
    nll: Tensor
    lse: Tensor
    target_logit: Tensor
    entropy: Tensor
    z_loss: Tensor
    filter_stats: FilterStats | None


@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_aux: Literal[False] = False, **options: Unpack[LossOptions]
) -> Tensor: ...  # fmt: skip


@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_aux: Literal[True], **options: Unpack[LossOptions]
) -> LinearCrossEntropyOutput: ...  # fmt: skip


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    z_loss_weight: float = 0.0,
    num_tokens: int | Tensor | None = None,
    shard: VocabShard | None = None,
    sequence_parallel: bool = False,
    input_grad: str = "summed",
    reduce_dtype: torch.dtype | None = None,
    grad_filter: GradFilter | None = None,
    return_aux: bool = False,
    backend: str = "auto",
    workspace_bytes: int = 256 << 20,
    grad_weight_out: Tensor | None = None,
) -> Tensor | LinearCrossEntropyOutput:
    """Cross-entropy of a language-model head, from hidden states, without ever holding the logits.

    The logits are ``softcap * tanh(u / softcap)`` with ``u = logit_scale * (input @ linear_weight.T + linear_bias)``,
    and the loss of a token is ``(1 - label_smoothing) * nll + label_smoothing * mean_j(lse - logit_j) +
    z_loss_weight * lse**2``, in nats. Argument names are those of ``torch.nn.functional.linear_cross_entropy``.

    Args:
        input: [..., D] hidden states, fp32, bf16 or fp16 (under autocast: cast as ``F.linear`` would).
        linear_weight: [V_r, D] this rank's rows of the head weight, input's dtype; or a DTensor sharded on dim 0.
        target: [...] int64 or int32 labels, ids in the whole vocabulary; the same on every rank of the group.
        linear_bias: [V_r] bias of this rank's rows, or a DTensor split as linear_weight is.
        ignore_index: Tokens with this label have loss 0 and gradient 0.
        reduction: "none" (target's shape), "sum", or "mean" over tokens that are not ignored. If all are, the mean is 0.
        label_smoothing: In [0, 1], spread over the whole logical vocabulary.
        logit_scale: Multiplies the logits.
        softcap: Positive bound of the logits, or None.
        z_loss_weight: Weight of lse**2.
        num_tokens: Divisor of "mean", int or 0-d tensor: the global count over data and context parallel ranks and
            microbatches, so that the sum of all parts' gradients is that of the whole batch.
        shard: Which rows of the vocabulary ``linear_weight`` is; None means all of them.
        sequence_parallel: input is this rank's slice of dim 0 (slices in group-rank order), target is whole.
        input_grad: "summed" over the group, or "partial": this shard's part, for a framework that sums it itself.
        reduce_dtype: What dE is summed over the group in: None for input's dtype, as Megatron does it, or torch.float32
            at twice the bytes of bf16 and without its roundings. Each rank's part is rounded to input's dtype in any case.
        grad_filter: None for exact gradients, or how to filter them.
        return_aux: Return ``LinearCrossEntropyOutput`` instead of the loss alone.
        backend: "triton", "torch", or "auto": Triton on a GPU, else torch. The environment variable CCE_DIST_BACKEND
            overrides "auto".
        workspace_bytes: Bound of the temporary memory for logits, and of what forward may keep for backward; the same on every
            rank of a group.
        grad_weight_out: [V_r, D] buffer (fp32, say, as Megatron's main_grad) that backward adds dC into; linear_weight
            itself then gets no gradient.

    Returns:
        The loss, fp32: 0-d, or target's shape for "none". The same bits on every rank of the group, and in every run.

    Sharding:
        input and target replicated over the group (or, with sequence_parallel, input split on dim 0); weight and bias
        split on dim 0. The loss is replicated; dC and dbias stay with their rows; dE is replicated (or its slice),
        or partial with ``input_grad="partial"``. Padding rows get gradient exactly 0.

    Communication:
        Forward: one all-gather of 3 to 6 fp32 numbers per token; with a filter on Triton one more, of 3. Backward: one
        all-reduce of dE in reduce_dtype, which becomes a reduce-scatter with sequence_parallel, behind the last of dC. Where
        workspace_bytes splits the tokens, one for each group of them, each behind the next group (with sequence_parallel a
        reduce of each slice to its rank).
        Sequence parallelism all-gathers input in both, in forward while its own slice is worked on (without a filter), and
        keeps nothing of what it gathered.
        With CCE_DIST_DEBUG=1 one more exchange checks that all ranks were called alike.

    Raises:
        ValueError, TypeError: Shapes, dtypes, devices, options or shard do not fit; before any kernel or collective.
        IndexError: A label outside the vocabulary (CPU, or CCE_DIST_DEBUG=1). On a GPU that token's loss is NaN instead,
            and it gives no gradient.
        RuntimeError: Double backward; ranks that disagree (CCE_DIST_DEBUG=1).

    Source:
        Cut Your Losses in Large-Vocabulary Language Models (Wijmans et al.); Online normalizer calculation for softmax
        (Milakov & Gimelshein); Megatron-LM's vocab-parallel cross-entropy for the sharding.
    """
    linear_weight, linear_bias, shard = local_rows(linear_weight, linear_bias, shard)
    if torch.is_autocast_enabled(input.device.type):
        dtype = torch.get_autocast_dtype(input.device.type)
        input, linear_weight = input.to(dtype), linear_weight.to(dtype)
    _check_tensors(input, linear_weight, target, linear_bias, shard, sequence_parallel)
    _check_numbers(label_smoothing, logit_scale, softcap, z_loss_weight, workspace_bytes)
    _check_reduction(reduction, num_tokens)
    if grad_filter is not None and not isinstance(grad_filter, GradFilter):
        raise TypeError(f"grad_filter must be a GradFilter or None, got {type(grad_filter).__name__}")
    if grad_weight_out is not None:
        _check_buffer(grad_weight_out, linear_weight)
    forced_backend, debug = _environment()
    tensors = (input, linear_weight, linear_bias)
    want = Want(
        grad=torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors),
        uniform=label_smoothing > 0, entropy=return_aux, filter_stats=return_aux and grad_filter is not None,
    )  # fmt: skip
    logits = ShardLogits(shard.start, shard.num_valid, float(logit_scale), float(softcap or 0.0))
    f = grad_filter
    kept = Filter() if f is None else Filter(f.eps, f.compensate, f.hidden, f.weight)
    call = Call(
        Spec(logits, shard.vocab_size, ignore_index, kept, want, workspace_bytes),
        Layout.of(shard, sequence_parallel, input_grad, reduce_dtype),
        _choose_backend(backend, forced_backend, input),
        debug,
    )
    # Kernels take addresses, not strides: everything that enters one is made contiguous here.
    hidden = input.reshape(-1, input.shape[-1]).contiguous()
    labels = target.reshape(-1).long().contiguous()
    bias = None if linear_bias is None else linear_bias.contiguous()
    nll, lse, target_logit, uniform_nll, entropy, filter_stats, *_ = op.forward(
        hidden, linear_weight.contiguous(), bias, labels, grad_weight_out, call
    )

    loss = nll if label_smoothing == 0 else (1 - label_smoothing) * nll + label_smoothing * uniform_nll
    if z_loss_weight != 0:
        loss = loss + z_loss_weight * lse.square()
    if reduction == "none":
        loss = loss.view(target.shape)
    else:
        loss = loss.sum()
        if reduction == "mean":
            if num_tokens is None:
                num_tokens = (labels != ignore_index).sum().clamp(min=1)
            loss = loss / num_tokens
    if not return_aux:
        return loss
    z_loss = z_loss_weight * lse.square()
    nll, lse, target_logit, entropy, z_loss = (x.view(target.shape) for x in (nll, lse, target_logit, entropy, z_loss))
    stats = FilterStats(*filter_stats.unbind()) if grad_filter is not None else None
    return LinearCrossEntropyOutput(loss, nll, lse, target_logit, entropy, z_loss, stats)


@torch.compiler.assume_constant_result
def _environment() -> tuple[str, bool]:
    """CCE_DIST_BACKEND and CCE_DIST_DEBUG."""
    return os.environ.get("CCE_DIST_BACKEND", "auto"), os.environ.get("CCE_DIST_DEBUG", "0") not in ("", "0")


def _choose_backend(backend: str, forced: str, input: Tensor) -> str:
    """Return the backend that will run, "triton" or "torch"."""
    _check_choice("backend", backend, BACKENDS)
    _check_choice("CCE_DIST_BACKEND", forced, BACKENDS)
    if backend == "auto":
        backend = forced
    if backend == "auto":
        return "triton" if input.is_cuda and torch.version.cuda is not None else "torch"
    if backend == "triton" and not input.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"backend='triton' needs a GPU (or Triton's interpreter, TRITON_INTERPRET=1), input is on {input.device}"
        )
    return backend


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {allowed}, got {value!r}")


def _check_tensors(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, shard: VocabShard, sequence_parallel: bool
) -> None:
    """Raise unless shapes, dtypes and devices fit each other and the shard."""
    for name, tensor in (("input", input), ("target", target)):
        if isinstance(tensor, DTensor):
            raise TypeError(
                f"{name} is a DTensor: pass its local tensor (to_local()); sequence_parallel says if it is a slice"
            )
    if input.dim() < 1:
        raise ValueError("input must be [..., D], got a number")
    if input.shape[-1] != weight.shape[1]:
        raise ValueError(f"input has hidden size {input.shape[-1]}, linear_weight {weight.shape[1]}")
    if input.dtype != weight.dtype:
        raise TypeError(f"input is {input.dtype}, linear_weight {weight.dtype}: cast one, or use autocast")
    if input.dtype not in DTYPES:
        raise TypeError(f"input must be float32, bfloat16 or float16, got {input.dtype}")
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"target must be int64 or int32, got {target.dtype}")
    for name, tensor in (("linear_weight", weight), ("target", target), ("linear_bias", bias)):
        if tensor is not None and tensor.device != input.device:
            raise ValueError(f"input is on {input.device}, {name} on {tensor.device}")
    shard.check(weight, bias)
    expected = tuple(input.shape[:-1])
    if sequence_parallel:
        if not expected:
            raise ValueError("sequence_parallel needs an input with a dim 0 to split, got one vector")
        expected = (expected[0] * shard.group_size, *expected[1:])
    if tuple(target.shape) != expected:
        whole = f" ({shard.group_size} slices of dim 0)" if sequence_parallel else ""
        raise ValueError(f"target must be {expected} for input {tuple(input.shape)}{whole}, got {tuple(target.shape)}")


def _check_numbers(
    label_smoothing: float, logit_scale: float, softcap: float | None, z_loss_weight: float, workspace_bytes: int
) -> None:
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive or None, got {softcap}")
    for name, value in (("logit_scale", logit_scale), ("z_loss_weight", z_loss_weight)):
        if not math.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value}")
    if workspace_bytes <= 0:
        raise ValueError(f"workspace_bytes must be positive, got {workspace_bytes}")


def _check_reduction(reduction: str, num_tokens: int | Tensor | None) -> None:
    _check_choice("reduction", reduction, ("none", "mean", "sum"))
    if num_tokens is None:
        return
    if reduction != "mean":
        raise ValueError(f'num_tokens divides the mean; reduction is "{reduction}"')
    if isinstance(num_tokens, Tensor) and num_tokens.dim() != 0:
        raise ValueError(f"num_tokens must be a number or a 0-d tensor, got shape {tuple(num_tokens.shape)}")
    if not isinstance(num_tokens, Tensor) and num_tokens <= 0:
        raise ValueError(f"num_tokens must be positive, got {num_tokens}")


def _check_buffer(buffer: Tensor, weight: Tensor) -> None:
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
