"""The loss in Megatron's layout, as plain functions of hidden states, weight, labels and group."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from cce_dist import LogProbs, VocabShard, linear_cross_entropy, linear_log_probs, merge
from cce_dist.call import InputGrad
from cce_dist.integrations import options as shared
from cce_dist.kernels import memory
from cce_dist.shard import check_alone

IGNORED = -100


@dataclasses.dataclass(frozen=True)
class Options(shared.ScoreOptions):
    """How a converted model computes its loss.

    Args:
        vocab_size: True size of the vocabulary. The logits of Megatron's padding rows are then -inf, and these rows get no
            gradient. None is Megatron's own loss: padding rows take part in the softmax.
        **shared: As in ``ScoreOptions``. The loss ignores ``batch_invariant``.
    """

    vocab_size: int | None = None


def vocab_parallel_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    tp_group: dist.ProcessGroup | None,
    *,
    sequence_parallel: bool = False,
    input_grad: InputGrad = "summed",
    main_grad: Tensor | None = None,
    expected_weights: Tensor | bool = True,
    options: Options | None = None,
    **scaling: Any,
) -> Tensor:
    """Compute the cross-entropy of every token in Megatron's layout, as ``compute_language_model_loss`` does.

    Args:
        hidden: [s, b, h], or with ``sequence_parallel`` [s/tp, b, h]; cast to the weight's dtype.
        weight: [V/tp, h] this rank's rows of the head.
        labels: [b, s] ids. A label outside the vocabulary, such as SFT's -100, has loss 0 and no gradient.
        tp_group: The tensor-parallel group; None if the whole vocabulary is on this rank.
        sequence_parallel: Whether hidden is this rank's slice of the sequence.
        input_grad: "summed" over tp_group, or "partial": this rank's part, for a caller that sums it.
        main_grad: [V/tp, h] buffer, ``weight.main_grad``, that backward adds the weight's gradient to. ``weight`` gets a dummy
            gradient and ``grad_added_to_main_grad``, as from Megatron's fused accumulation.
        expected_weights: [b, s] loss mask, by which losses will be multiplied; or a bool as in ``linear_cross_entropy``.
        options: See ``Options``.
        **scaling: ``logit_scale`` (MuP) and ``softcap`` of ``linear_cross_entropy``.

    Returns:
        [b, s] fp32, neither masked nor reduced; the same bits on every rank of the group.

    Sharding, Communication: As ``linear_cross_entropy``: one all-gather in forward, one reduction of d_hidden in backward.

    Raises:
        ValueError: ``options.vocab_size`` is more than the rows there are; and what ``linear_cross_entropy`` raises.
    """
    options = options or Options()
    operands, call = _prepared(hidden, weight, labels, tp_group, sequence_parallel, main_grad, options)
    loss = linear_cross_entropy(
        *operands,
        reduction="none",
        input_grad=input_grad,
        grad_filter=options.grad_filter,
        expected_weights=expected_weights.t() if isinstance(expected_weights, Tensor) else expected_weights,
        **scaling,
        **call,
    )
    return loss.t().contiguous()


def vocab_parallel_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    tp_group: dist.ProcessGroup | None,
    *,
    sequence_parallel: bool = False,
    input_grad: InputGrad = "summed",
    main_grad: Tensor | None = None,
    logit_scale: float = 1.0,
    temperature: float | Tensor = 1.0,
    options: Options | None = None,
    **wanted: Any,
) -> LogProbs:
    """Compute log-probabilities of every token's label, and statistics of its softmax, in Megatron's layout.

    Args:
        hidden, weight, labels, tp_group, sequence_parallel, input_grad, main_grad: As in ``vocab_parallel_loss``.
            For a label outside the vocabulary all outputs of its token are 0.
        logit_scale: Multiplies the logits (MuP).
        temperature: Divides the logits: a number, or a [b, s] tensor.
        options: See ``Options``. The filter is not used: upstream gradients have both signs.
        **wanted: ``entropy``, ``sum_p_squared``, ``argmax``, ``top_k`` of ``linear_log_probs``.

    Returns:
        ``LogProbs`` of [b, s] tensors ([b, s, top_k] for the last two).

    Sharding, Communication: As ``linear_log_probs``: one all-gather in forward, one reduction of d_hidden in backward.

    Raises:
        ValueError: ``options.vocab_size`` is more than the rows there are; and what ``linear_log_probs`` raises.
    """
    options = options or Options()
    operands, call = _prepared(hidden, weight, labels, tp_group, sequence_parallel, main_grad, options)
    if isinstance(temperature, Tensor):
        temperature = temperature.expand_as(labels).t()
    found = linear_log_probs(
        *operands,
        logit_scale=logit_scale,
        temperature=temperature,
        input_grad=input_grad,
        batch_invariant=options.batch_invariant,
        **wanted,
        **call,
    )
    return LogProbs._make(None if x is None else x.transpose(0, 1).contiguous() for x in found)


def _prepared(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    tp_group: Any,
    sequence_parallel: bool,
    main_grad: Any,
    options: Options,
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """Return hidden states, weight and labels [s, b], and the keyword arguments of both calls."""
    shard = shard_of(weight.shape[0], tp_group, options.vocab_size)
    labels = labels.t()
    labels = labels.masked_fill((labels < 0) | (labels >= shard.vocab_size), IGNORED)
    if main_grad is not None:
        weight = _GradientInMainGrad.apply(weight)
    call = {
        "ignore_index": IGNORED,
        "shard": shard,
        "sequence_parallel": sequence_parallel and shard.group is not None,
        "grad_weight_out": main_grad,
        **options.call(),
    }
    return (hidden.to(weight.dtype), weight, labels), call


def vocab_parallel_max(
    hidden: Tensor,
    weight: Tensor,
    tp_group: dist.ProcessGroup | None,
    *,
    sequence_parallel: bool = False,
    gathered: bool = False,
    options: Options | None = None,
) -> tuple[Tensor, Tensor]:
    """Return each token's largest logit and its index. Logits are computed in parts that fit the workspace (None: 256 MiB).

    Args:
        hidden, weight, tp_group, sequence_parallel, options: As in ``vocab_parallel_loss``.
        gathered: Whether to search the whole vocabulary. Else the index is relative to this rank's first row.

    Returns:
        Values [s, b] in the weight's dtype and int64 indices [s, b], without gradient.

    Communication: With ``sequence_parallel`` an all-gather of hidden, with ``gathered`` two of one number per token.
    """
    options = options or Options()
    shard = shard_of(weight.shape[0], tp_group, options.vocab_size)
    with torch.no_grad():
        hidden = hidden.to(weight.dtype)
        if sequence_parallel and shard.group is not None:
            hidden = merge.gather_sequence(hidden, shard.group)
        workspace = options.workspace_bytes or memory.LEAST_DEFAULT
        tokens = max(1, workspace // (weight.shape[0] * weight.element_size()))
        parts = []
        for part in hidden.flatten(0, 1).split(tokens):
            logits = F.linear(part, weight)
            logits[:, shard.num_valid :] = -torch.inf
            parts.append(logits.max(dim=-1))
        values, indices = (torch.cat(each).view(hidden.shape[:2]) for each in zip(*parts, strict=True))
        if gathered and shard.group is not None:
            values, indices = (
                merge.gather_sequence(each[None], shard.group) for each in (values, indices + shard.start)
            )
            winner = values.argmax(0, keepdim=True)
            values, indices = values.gather(0, winner)[0], indices.gather(0, winner)[0]
    return values, indices


def shard_of(num_rows: int, tp_group: dist.ProcessGroup | None, vocab_size: int | None) -> VocabShard:
    """Return the shard of a rank with ``num_rows`` rows; ``vocab_size`` None counts padding rows as part of the vocabulary."""
    if tp_group is None:
        check_alone()
    rank, size = (0, 1) if tp_group is None else (tp_group.rank(), tp_group.size())
    padded = num_rows * size
    if vocab_size is not None and vocab_size > padded:
        raise ValueError(f"vocab_size {vocab_size}, but the head has {padded} rows")
    return VocabShard(rank * num_rows, (rank + 1) * num_rows, vocab_size or padded, tp_group if size > 1 else None)


class _GradientInMainGrad(torch.autograd.Function):
    """Pass the weight through. In backward, which has added the gradient to main_grad, return the dummy that Megatron expects.

    Megatron's hooks need a gradient to overlap the reduction with backward. It must be 0 if the embedding uses the weight, too.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, _: None) -> Tensor | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        weight = ctx.weight
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)
