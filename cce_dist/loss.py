"""linear_cross_entropy: the call, its checks, and the algebra of the loss.

hidden, labels ──► op.forward:  statistics of the shard (kernels) ─► one all-gather ─► merge (log-add-exp)
                                   ──► nll, lse, ... per token, [N] fp32, differentiable
loss            =  plain algebra on those [N] numbers, below
d_loss          ──► op.backward: gradients (kernels) ─► dC stays here, dE is summed over the group behind it
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import Unpack

from cce_dist import agree, checks, op, terms
from cce_dist.call import BACKENDS, DTYPES, Call, Layout, LossOptions, Options
from cce_dist.filter import FilterStats, GradFilter
from cce_dist.kernels import Filter, Operands, ShardLogits, Spec, Want
from cce_dist.shard import VocabShard, local_rows


class LinearCrossEntropyOutput(NamedTuple):
    """The loss and what it is made of; per-token tensors have target's shape, are fp32, and 0 where ignored.

    The first six are differentiable.

    Attributes:
        loss: As ``linear_cross_entropy`` returns it.
        nll: Negative log-likelihood of the label, in nats; no smoothing, no z-loss.
        lse: Log-sum-exp of the logits over the whole vocabulary.
        target_logit: Logit of the label.
        entropy: Entropy of the softmax, in nats; None if others were named.
        z_loss: ``z_loss_weight * lse**2``.
        filter_stats: What the filter dropped on this shard; None without a filter, and if others were named.
        max_logit: The largest logit; None if others were named.
        label_is_max: 1 where the label's logit reaches the largest one, else 0: the token accuracy is its mean over tokens with
            a label. Both logits are sums in fp32 in an order of their own, so they count as equal if they differ by less than
            ``TIE`` of their size. None if others were named.
    """

    loss: Tensor
    nll: Tensor
    lse: Tensor
    target_logit: Tensor
    entropy: Tensor | None
    z_loss: Tensor
    filter_stats: FilterStats | None
    max_logit: Tensor | None = None
    label_is_max: Tensor | None = None


TIE = 2.0**-17  # see LinearCrossEntropyOutput.label_is_max; relative to the larger of 1 and the largest logit's size


@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_aux: Literal[False] = False, **options: Unpack[LossOptions]
) -> Tensor: ...  # fmt: skip


@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_aux: Literal[True] | Collection[str],
    **options: Unpack[LossOptions],
) -> LinearCrossEntropyOutput: ...  # fmt: skip


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    ignore_index: int | None = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    logit_scale: float | Tensor = 1.0,
    softcap: float | None = None,
    z_loss_weight: float = 0.0,
    num_tokens: int | Tensor | None = None,
    shard: VocabShard | None = None,
    sequence_parallel: bool = False,
    input_grad: str = "summed",
    reduce_dtype: torch.dtype | None = None,
    grad_filter: GradFilter | None = None,
    return_aux: bool | Collection[str] = False,
    backend: str = "auto",
    workspace_bytes: int | None = None,
    grad_weight_out: Tensor | None = None,
) -> Tensor | LinearCrossEntropyOutput:
    """Cross-entropy of a language-model head, from hidden states, without ever holding the logits.

    The logits are ``softcap * tanh(u / softcap)`` with ``u = logit_scale * (input @ linear_weight.T + linear_bias)``,
    and the loss of a token is ``(1 - label_smoothing) * nll + label_smoothing * mean_j(lse - logit_j) +
    z_loss_weight * lse**2``, in nats. Argument names are those of ``torch.nn.functional.linear_cross_entropy``. Numbers may be
    0-d tensors that need no gradient: one that is on a GPU is read, which waits for it (``num_tokens`` is not).

    Args:
        input: [..., D] hidden states, fp32, bf16 or fp16 (under autocast: cast as ``F.linear`` would).
        linear_weight: [V_r, D] this rank's rows of the head weight, input's dtype; or a DTensor sharded on dim 0.
        target: [...] int64 or int32 labels, ids in the whole vocabulary; the same on every rank of the group.
        linear_bias: [V_r] bias of this rank's rows, or a DTensor split as linear_weight is.
        weight: [V] weights of the classes, of the whole vocabulary on every rank, without gradient. A token's loss is
            multiplied by the weight of its label, and the mean divides by the sum of those. The uniform part of label
            smoothing is ``label_smoothing * mean_j(weight_j * (lse - logit_j))`` instead, as in PyTorch; dE and dC are then
            sums of two terms, each rounded to input's dtype, and linear_weight is copied in fp32.
        ignore_index: Tokens with this label have loss 0 and gradient 0. None means -100, as in PyTorch.
        reduction: "none" (target's shape), "sum", or "mean" over tokens that are not ignored. If all are, the mean is 0.
        label_smoothing: In [0, 1], spread over the whole logical vocabulary.
        logit_scale: Multiplies the logits. A 0-d tensor that requires a gradient gets one, as exact as dE and dbias, which
            are rounded to input's and linear_bias's dtype (and filtered as dE is).
        softcap: Positive bound of the logits, or None.
        z_loss_weight: Weight of lse**2.
        num_tokens: Divisor of "mean", int or 0-d tensor: the global count over data and context parallel ranks and
            microbatches, so that the sum of all parts' gradients is that of the whole batch. A tensor may hold 0 where all
            labels are ignored.
        shard: Which rows of the vocabulary ``linear_weight`` is; None means all of them.
        sequence_parallel: input is this rank's slice of dim 0 (slices in group-rank order), target is whole.
        input_grad: "summed" over the group, or "partial": this shard's part, for a framework that sums it itself.
        reduce_dtype: What dE is summed over the group in: None for input's dtype, as Megatron does it, or torch.float32
            at twice the bytes of bf16 and without its roundings. Each rank's part is rounded to input's dtype in any case.
        grad_filter: None for exact gradients, or how to filter them.
        return_aux: Return ``LinearCrossEntropyOutput`` instead of the loss alone, with all outputs or with those named, such as
            ``("nll", "label_is_max")``. "entropy" and "filter_stats" cost time, and exponentials are not kept beside the
            entropy; the others are nearly free.
        backend: "triton", "torch", or "auto": Triton on a GPU, else torch. The environment variable CCE_DIST_BACKEND
            overrides "auto".
        workspace_bytes: Bound of the temporary memory for logits, and of what forward may keep for backward; the same on every
            rank of a group. None: as much as it takes to keep all exponentials, which saves a quarter of the time, but at most
            2 GiB and at least 256 MiB; 256 MiB where none can be kept. The shapes alone decide it. The extremes: 1 takes the
            least memory, 1 << 40 keeps everything and is fastest.
        grad_weight_out: [V_r, D] contiguous buffer (fp32, say, as Megatron's main_grad) that backward adds dC into;
            linear_weight itself then gets no gradient.

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
        keeps nothing of what it gathered. A learnable logit_scale may add an all-reduce of one number in backward, weight with
        label_smoothing one of D + 1 numbers in forward.
        Whether there is a collective in backward depends on whether input requires a gradient: it must on all ranks of the
        group or on none, else some wait for the others. No rank can tell that without waiting for its GPU.
        With CCE_DIST_DEBUG=1 one more exchange (not under torch.compile) checks that all ranks were called alike.

    Raises:
        ValueError, TypeError: Shapes, dtypes, devices, options or shard do not fit; before any kernel or collective.
        IndexError: A label outside the vocabulary (CPU, or CCE_DIST_DEBUG=1). On a GPU that token's loss is NaN instead,
            and it gives no gradient.
        RuntimeError: Double backward, forward mode, torch.func, vmap; ranks that disagree (CCE_DIST_DEBUG=1).

    Source:
        Cut Your Losses in Large-Vocabulary Language Models (Wijmans et al.); Online normalizer calculation for softmax
        (Milakov & Gimelshein); Megatron-LM's vocab-parallel cross-entropy for the sharding.
    """
    options = Options.of(
        ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing, logit_scale=logit_scale,
        softcap=softcap, z_loss_weight=z_loss_weight, num_tokens=num_tokens, sequence_parallel=sequence_parallel,
        input_grad=input_grad, reduce_dtype=reduce_dtype, grad_filter=grad_filter, return_aux=return_aux, backend=backend,
        workspace_bytes=workspace_bytes,
    )  # fmt: skip
    given = {"linear_bias": linear_bias, "weight": weight, "grad_weight_out": grad_weight_out}
    given = {name: tensor for name, tensor in given.items() if tensor is not None}
    checks.tensors(input=input, linear_weight=linear_weight, target=target, **given)
    linear_weight, linear_bias, shard = local_rows(linear_weight, linear_bias, shard)
    if torch.is_autocast_enabled(input.device.type):
        dtype = torch.get_autocast_dtype(input.device.type)
        input, linear_weight = input.to(dtype), linear_weight.to(dtype)
    _check_operands(input, linear_weight, target, linear_bias, shard)
    _check_target_shape(input, target, shard, sequence_parallel)
    if weight is not None:
        _check_class_weights(weight, input, shard, options, grad_weight_out)
    if grad_weight_out is not None:
        _check_buffer(grad_weight_out, linear_weight)
    if isinstance(options.num_tokens, Tensor) and options.num_tokens.device not in (input.device, torch.device("cpu")):
        raise ValueError(f"input is on {input.device}, num_tokens on {options.num_tokens.device}")
    forced_backend, debug = _environment()
    # Kernels take addresses, not strides: everything that enters one is made contiguous here.
    x = Operands(
        input.reshape(-1, input.shape[-1]).contiguous(), linear_weight.contiguous(),
        None if linear_bias is None else linear_bias.contiguous(), target.reshape(-1).long().contiguous(),
        ShardLogits(shard.start, shard.num_valid, options.logit_scale, options.softcap or 0.0),
    )  # fmt: skip
    if isinstance(logit_scale, Tensor) and logit_scale.requires_grad and torch.is_grad_enabled():
        part = sequence_parallel or input_grad == "partial"
        hidden, bias = terms.learn_scale(logit_scale, options.logit_scale, x.hidden, x.bias, shard.group, part)
        x = x._replace(hidden=hidden, bias=bias)
    call = Call(
        _spec(x, weight, shard, options), Layout.of(shard, options),
        _choose_backend(options.backend, forced_backend, input), debug,
    )  # fmt: skip
    if debug and shard.group is not None and not torch.compiler.is_compiling():
        agree.check_ranks(x, weight, shard, options, call.backend)
    nll, lse, target_logit, uniform_nll, entropy, filter_stats, largest, *_ = op.forward(
        x.hidden, x.weight, x.bias, x.ids, grad_weight_out, call
    )
    loss = nll if options.label_smoothing == 0 else (1 - options.label_smoothing) * nll
    if call.spec.want.uniform:
        loss = loss + options.label_smoothing * uniform_nll
    if options.z_loss_weight != 0:
        loss = loss + options.z_loss_weight * lse.square()
    class_weights = None
    if weight is not None:
        class_weights = terms.ClassWeights(weight, x, shard, options.ignore_index)
        loss = class_weights.weigh(loss, lse, options.label_smoothing)
    if reduction == "none":
        loss = loss.view(target.shape)
    else:
        loss = loss.sum()
        if reduction == "mean":
            loss = loss / _divisor(x, options, class_weights)
    if not return_aux:
        return loss
    per_token = [nll, lse, target_logit, entropy, options.z_loss_weight * lse.square(), largest]
    return _output(loss, per_token, filter_stats, target, call.spec)


def _spec(x: Operands, class_weights: Tensor | None, shard: VocabShard, options: Options) -> Spec:
    want = Want(
        grad=torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x.hidden, x.weight, x.bias)),
        uniform=options.label_smoothing > 0 and class_weights is None, entropy="entropy" in options.return_aux,
        filter_stats="filter_stats" in options.return_aux and options.grad_filter is not None,
        largest=not {"max_logit", "label_is_max"}.isdisjoint(options.return_aux),
    )  # fmt: skip
    f = options.grad_filter
    kept = Filter() if f is None else Filter(f.eps, f.compensate, f.hidden, f.weight)
    return Spec(x.logits, shard.vocab_size, options.ignore_index, kept, want, options.workspace_bytes)


def _output(
    loss: Tensor, per_token: list[Tensor], filter_stats: Tensor, target: Tensor, spec: Spec
) -> LinearCrossEntropyOutput:  # fmt: skip
    """Give the outputs target's shape, leave out those that are not wanted, and compare the label's logit with the largest."""
    nll, lse, target_logit, entropy, z_loss, largest = (
        x.view(target.shape) if x.numel() == target.numel() else x for x in per_token
    )
    want, label_is_max = spec.want, None
    stats = FilterStats(*filter_stats.unbind()) if want.filter_stats else None
    if want.largest:
        reached = target_logit.detach() + TIE * largest.abs().clamp(min=1) >= largest
        label_is_max = (reached & (target != spec.ignore_index)).float()
    return LinearCrossEntropyOutput(
        loss, nll, lse, target_logit, entropy if want.entropy else None, z_loss, stats,
        largest if want.largest else None, label_is_max,
    )  # fmt: skip


def _divisor(x: Operands, options: Options, class_weights: terms.ClassWeights | None) -> float | Tensor:
    """What "mean" divides by: a tensor of 0 counts as 1, so that the mean of nothing is 0."""
    divisor = options.num_tokens
    if divisor is None and class_weights is None:
        return (x.ids != options.ignore_index).sum().clamp(min=1)
    if divisor is None and class_weights is not None:
        divisor = class_weights.of_labels.sum()
    if not isinstance(divisor, Tensor):
        assert divisor is not None
        return divisor
    return (divisor + (divisor == 0)).float()


@torch.compiler.assume_constant_result
def _environment() -> tuple[str, bool]:
    """CCE_DIST_BACKEND and CCE_DIST_DEBUG."""
    return os.environ.get("CCE_DIST_BACKEND", "auto"), os.environ.get("CCE_DIST_DEBUG", "0") not in ("", "0")


def _choose_backend(backend: str, forced: str, input: Tensor) -> str:
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


def _check_operands(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, shard: VocabShard
) -> None:  # fmt: skip
    """Raise unless dtypes, devices and sizes fit each other and the shard."""
    for name, tensor in (("input", input), ("target", target)):
        if isinstance(tensor, DTensor):
            raise TypeError(
                f"{name} is a DTensor: pass its local tensor (to_local()); sequence_parallel says if it is a slice"
            )
    if input.dim() < 1:
        raise ValueError("input must be [..., D], got a number")
    if input.shape[-1] != weight.shape[1]:
        raise ValueError(f"input has hidden size {input.shape[-1]}, linear_weight {weight.shape[1]}")
    if input.shape[-1] == 0:
        raise ValueError(f"input has hidden size 0, got {tuple(input.shape)}")
    if input.dtype != weight.dtype:
        raise TypeError(f"input is {input.dtype}, linear_weight {weight.dtype}: cast one, or use autocast")
    if input.dtype not in DTYPES:
        raise TypeError(f"input must be float32, bfloat16 or float16, got {input.dtype}")
    if target.dtype not in (torch.int64, torch.int32):
        hint = " (class probabilities are not supported)" if target.is_floating_point() else ""
        raise TypeError(f"target must be int64 or int32 ids{hint}, got {target.dtype}")
    if bias is not None and bias.dtype not in DTYPES:
        raise TypeError(f"linear_bias must be float32, bfloat16 or float16, got {bias.dtype}")
    for name, tensor in (("linear_weight", weight), ("target", target), ("linear_bias", bias)):
        if tensor is not None and tensor.device != input.device:
            raise ValueError(f"input is on {input.device}, {name} on {tensor.device}")
    shard.check(weight, bias)


def _check_target_shape(input: Tensor, target: Tensor, shard: VocabShard, sequence_parallel: bool) -> None:
    expected = tuple(input.shape[:-1])
    if sequence_parallel:
        if not expected:
            raise ValueError("sequence_parallel needs an input with a dim 0 to split, got one vector")
        expected = (expected[0] * shard.group_size, *expected[1:])
    if tuple(target.shape) != expected:
        whole = f" ({shard.group_size} slices of dim 0)" if sequence_parallel else ""
        raise ValueError(f"target must be {expected} for input {tuple(input.shape)}{whole}, got {tuple(target.shape)}")


def _check_class_weights(
    weight: Tensor, input: Tensor, shard: VocabShard, options: Options, buffer: Tensor | None
) -> None:  # fmt: skip
    if weight.requires_grad:
        raise TypeError("weight has no gradient here: pass class weights that require none")
    if weight.dtype not in DTYPES:
        raise TypeError(f"weight must be float32, bfloat16 or float16, got {weight.dtype}")
    if weight.shape != (shard.vocab_size,):
        raise ValueError(f"weight must be [{shard.vocab_size}], one for each class, got {tuple(weight.shape)}")
    if weight.device != input.device:
        raise ValueError(f"input is on {input.device}, weight on {weight.device}")
    others = {
        "softcap": options.softcap is not None, "sequence_parallel": options.sequence_parallel,
        'input_grad="partial"': options.input_grad == "partial", "grad_weight_out": buffer is not None,
    }  # fmt: skip
    refused = [name for name, given in others.items() if given and options.label_smoothing != 0]
    if refused:
        raise ValueError(f"weight with label_smoothing does not go with {', '.join(refused)}")


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
    if not buffer.is_contiguous():
        raise ValueError(f"grad_weight_out must be contiguous, got strides {buffer.stride()}")
