"""linear_cross_entropy: the public call.

checked_call    arguments -> Given: checks, and how the call runs (given.py, decide.py)
two_passes      forward: statistics of the shard (kernels), one all-gather, merge (log-add-exp), plain algebra on [N] numbers
                backward: gradients (kernels); dC stays on its rank, dE is summed over the group (op.py)
one_pass        forward computes the gradients, too, group by group (groups.py)
shaped          the loss in target's shape, or a record with further outputs
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any, Concatenate, Literal, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from cce_dist import debug_ranks, decide, groups, op
from cce_dist.call import Backend, ExplainOptions, InputGrad, LossOptions, Reduction
from cce_dist.filter import GradFilter
from cce_dist.given import LinearCrossEntropyOutput, check_all, checked_call
from cce_dist.shard import VocabShard
from cce_dist.token_loss import TokenLossOutput

__all__ = ["LinearCrossEntropyOutput", "explain", "linear_cross_entropy"]


@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    return_aux: Literal[False] = False,
    token_loss: Callable[Concatenate[Tensor, Any, ...], Any] | None = None,
    token_inputs: Sequence[Tensor] = (),
    **options: Unpack[LossOptions],
) -> Tensor: ...


@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    return_aux: Literal[True],
    token_loss: Callable[Concatenate[Tensor, Any, ...], Any],
    token_inputs: Sequence[Tensor] = (),
    **options: Unpack[LossOptions],
) -> TokenLossOutput: ...


@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    return_aux: Literal[True] | Collection[str],
    **options: Unpack[LossOptions],
) -> LinearCrossEntropyOutput: ...


@debug_ranks.errors_reach_all_ranks
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    ignore_index: int | None = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    logit_scale: float | Tensor = 1.0,
    softcap: float | None = None,
    z_loss_weight: float | Tensor = 0.0,
    num_tokens: float | Tensor | None = None,
    shard: VocabShard | None = None,
    sequence_parallel: bool = False,
    input_grad: InputGrad = "summed",
    reduce_dtype: torch.dtype | None = None,
    grad_filter: GradFilter | None = None,
    return_aux: bool | Collection[str] = False,
    backend: Backend = "auto",
    workspace_bytes: int | None = None,
    expected_weights: Tensor | bool = True,
    grad_weight_out: Tensor | None = None,
    token_loss: Callable[Concatenate[Tensor, Any, ...], Any] | None = None,
    token_inputs: Sequence[Tensor] = (),
    options: Any = None,
) -> Tensor | LinearCrossEntropyOutput | TokenLossOutput:
    """Compute the cross-entropy of a language-model head from its hidden states, without holding the logits.

    The logits are ``softcap * tanh(u / softcap)`` with ``u = logit_scale * (input @ linear_weight.T + linear_bias)``.
    A token's loss, in nats, is ``(1 - label_smoothing) * nll + label_smoothing * mean_j(lse - logit_j) +
    z_loss_weight * lse**2``. Arguments are named as in ``torch.nn.functional.linear_cross_entropy``. D is the hidden size, V
    the size of the vocabulary, V_r the number of this rank's rows, dE the gradient of input and dC of linear_weight.

    ``label_smoothing``, ``logit_scale``, ``softcap``, ``z_loss_weight`` and ``num_tokens`` may be 0-d tensors. Reading a tensor
    on a GPU waits for the device; ``num_tokens`` is never read. Under ``torch.compile(fullgraph=True)`` only ``num_tokens``,
    ``z_loss_weight`` and, without a filter, ``logit_scale`` may be tensors. A number that changes from call to call is compiled
    at most twice.

    Args:
        input: [..., D] hidden states in fp32, bf16 or fp16, or in float64 on the torch backend. Autocast casts input and
            linear_weight as it does for ``F.linear``.
        linear_weight: [V_r, D] this rank's rows of the head weight, in input's dtype; or a DTensor sharded on dim 0.
        target: [...] int64 or int32 labels: ids in the whole vocabulary. Identical on every rank of the group.
        linear_bias: [V_r] bias of this rank's rows, or a DTensor split like linear_weight.
        weight: [V] class weights of the whole vocabulary, on every rank. It gets no gradient. A token's loss is multiplied by
            its label's weight, and "mean" divides by the sum of the labels' weights. Label smoothing then adds
            ``label_smoothing * mean_j(weight_j * (lse - logit_j))``, as in PyTorch; dE and dC become sums of two terms, each
            rounded to input's dtype, and linear_weight is copied in fp32. With label smoothing it excludes softcap,
            sequence_parallel, ``input_grad="partial"`` and grad_weight_out.
        ignore_index: Tokens with this label have loss 0 and gradient 0. None means -100, as in PyTorch.
        reduction: "none" (target's shape), "sum", or "mean" over tokens that are not ignored. If all are, the mean is 0.
        label_smoothing: Probability in [0, 1] that is spread evenly over the V ids of the vocabulary.
        logit_scale: Factor of the logits before the softcap. A 0-d tensor that requires a gradient gets one, and must not hold
            0. It is computed from dE and the bias gradient after these are rounded to their dtypes (and filtered, with
            grad_filter).
        softcap: Positive bound of the logits, or None.
        z_loss_weight: Factor of lse**2. It gets no gradient.
        num_tokens: Divisor of "mean", a positive number or a 0-d tensor. None divides by the number of tokens that are not
            ignored. If microbatches, data-parallel or context-parallel ranks share a batch, pass the batch's token count: their
            gradients then add up to the batch's gradient. A tensor may hold 0 if all labels are ignored, and gets a gradient
            if it requires one.
        shard: Which rows of the vocabulary linear_weight holds, and the process group. None means all rows, or the
            DTensor's own sharding.
        sequence_parallel: Whether input is this rank's slice of dim 0, in the order of group ranks. target stays whole.
        input_grad: "summed": dE is summed over the group. "partial": dE is this shard's part, for a framework that sums it.
        reduce_dtype: Dtype in which dE is summed over the group. None means input's dtype, as in Megatron. torch.float32
            sends twice the bytes of bf16 and avoids roundings of the sum; each rank's part is rounded to input's dtype first.
        grad_filter: A ``GradFilter`` that skips negligible elements of the gradient, or None for exact gradients.
        return_aux: True returns a ``LinearCrossEntropyOutput`` with all outputs in place of the loss; a sequence of names, such
            as ``("nll", "label_is_max")``, returns one with these outputs. "entropy" takes time, and
            "entropy" with a softcap keeps no exponentials for backward. The other outputs are nearly free.
        backend: "triton", "torch", or "auto": Triton on an NVIDIA GPU, else torch. In fp32 "auto" is torch on a GPU, too, where
            cuBLAS is faster, unless TF32 is on or there is a filter. The environment variable CCE_DIST_BACKEND overrides
            "auto".
        workspace_bytes: Memory budget in bytes for logits and for what forward keeps for backward; identical on every rank of
            the group. None derives it from the shapes: enough to keep all exponentials, which saves a quarter of the time,
            within 256 and 2,100 MiB; 256 MiB if exponentials cannot be kept. 1 takes the least memory, 1 << 40 is fastest. If
            the exponentials do not fit, or if torch can keep them, a call without return_aux computes its gradients in forward,
            one group of tokens after another, and holds them until backward.
        expected_weights: For ``reduction="none"`` if forward computes the gradients: a tensor of target's shape that the
            upstream gradients will be proportional to, such as your loss mask. True expects equal upstream gradients.
            Backward compares; if they differ, it computes dC again, which takes two more matrix products. False expects
            nothing, so forward computes no gradients.
        grad_weight_out: [V_r, D] contiguous buffer in fp32 or linear_weight's dtype, such as Megatron's main_grad. Backward
            adds dC to it, and linear_weight itself gets no gradient.
        token_loss: A function that computes another loss instead of the negative log-likelihood: ``token_loss(log_probs,
            entropy, *token_inputs) -> losses``, or ``(losses, metrics)`` with a dict or tuple of further tensors. It is called
            for groups of tokens. All tensors have shape [n], and log_probs and losses are fp32. A token's loss must not
            depend on other tokens. entropy is None unless ``token_loss.needs_entropy`` is True. Only log_probs and entropy
            get gradients, by autograd; another tensor that requires one is refused. Cannot be combined with weight,
            label_smoothing, z_loss_weight, grad_filter or expected_weights. ``cce_dist.objectives`` has examples.
        token_inputs: Tensors of target's shape, without gradient, that token_loss gets. They stay whole under
            sequence_parallel. Their values for ignored tokens do not matter.
        options: Ignored. In ``torch.nn.functional.linear_cross_entropy`` it selects how memory is saved; here
            workspace_bytes does.

    Returns:
        The loss in fp32 (float64 for float64 inputs): 0-d, or of target's shape for "none". With return_aux a
        ``LinearCrossEntropyOutput``, or a ``TokenLossOutput`` with token_loss. Results are bitwise identical on every rank of
        the group and in every run.

    Sharding:
        input and target are replicated over the group (with sequence_parallel, input is split on dim 0); linear_weight and
        linear_bias are split on dim 0. The loss is replicated. dC and the bias gradient are split like the weight. dE is
        replicated, or split with sequence_parallel, or partial with ``input_grad="partial"``. Padding rows get gradient 0.

    Communication:
        Forward: one all-gather of 3 to 6 fp32 numbers per token of a group, and one more of 3 with a filter on Triton.
        Backward: one all-reduce of dE in reduce_dtype, or a reduce-scatter with sequence_parallel, overlapped with dC.
        If workspace_bytes splits the tokens into groups, each group's dE is reduced while the next group is computed; with
        sequence_parallel each slice is reduced to its rank. If forward computes the gradients, it also reduces dE.
        sequence_parallel all-gathers input in forward and again in backward. A learnable logit_scale may all-reduce one
        number in backward; weight with label_smoothing all-reduces D + 1 numbers in forward.
        input must require a gradient on all ranks of the group or on none: otherwise ranks wait for a collective that others
        do not enter. CCE_DIST_DEBUG=1 adds an exchange that checks the ranks' arguments, and one for each group of tokens that
        compares the losses of token_loss (not under torch.compile).

    Raises:
        ValueError, TypeError: Shapes, dtypes, devices, options or shard do not fit. Raised before any kernel or collective.
        IndexError: A label is outside the vocabulary (on a CPU, or with CCE_DIST_DEBUG=1). On a GPU the token's loss is NaN
            instead, and its gradient is 0.
        RuntimeError: For double backward, forward-mode derivatives, torch.func and vmap; or if ranks disagree
            (with CCE_DIST_DEBUG=1).

    Source:
        Cut Your Losses in Large-Vocabulary Language Models (Wijmans et al.); Online normalizer calculation for softmax
        (Milakov & Gimelshein); Megatron-LM's vocab-parallel cross-entropy for the sharding.
    """
    given = checked_call(
        input, linear_weight, target, linear_bias=linear_bias, weight=weight, ignore_index=ignore_index,
        reduction=reduction, label_smoothing=label_smoothing, logit_scale=logit_scale, softcap=softcap,
        z_loss_weight=z_loss_weight, num_tokens=num_tokens, shard=shard, sequence_parallel=sequence_parallel,
        input_grad=input_grad, reduce_dtype=reduce_dtype, grad_filter=grad_filter, return_aux=return_aux, backend=backend,
        workspace_bytes=workspace_bytes, expected_weights=expected_weights, grad_weight_out=grad_weight_out,
        token_loss=token_loss, token_inputs=token_inputs,
    )  # fmt: skip
    debug_ranks.check_ranks(given.shard, given.call.debug)
    loss, outputs = op.two_passes(given) if given.call.way.passes == "two" else groups.one_pass(given)
    return given.shaped(loss, outputs)


def explain(input: Tensor, linear_weight: Tensor, target: Tensor, **options: Unpack[ExplainOptions]) -> str:
    """Describe in one sentence how ``linear_cross_entropy`` would compute a call with these arguments.

    Nothing is computed or communicated. Tensors may be on "meta", which stands for a GPU. ``requires_grad`` of the tensors
    says which gradients are wanted.

    Args:
        input: [..., D] hidden states.
        linear_weight: [V_r, D] this rank's rows of the head weight.
        target: [...] labels. Their values are not read.
        options: Keyword arguments of ``linear_cross_entropy``.

    Returns:
        The backend, the passes, the memory budget in MiB, and reasons. For example "exact, one pass in 3 groups of 2,816
        tokens, 2,100 MiB; the filter is off because exact is faster at these sizes".

    Raises:
        ValueError, TypeError: Arguments that ``linear_cross_entropy`` would refuse.
    """
    bound = inspect.signature(linear_cross_entropy).bind(input, linear_weight, target, **options)
    bound.apply_defaults()
    del bound.arguments["options"]
    given = check_all(on_meta=True, **bound.arguments)
    sizes = decide.sizes_of_even_shard(
        given.x.hidden, given.x.num_tokens, given.shard.vocab_size, given.shard.group_size
    )
    where = given.call.where(given.x.hidden, given.shard.group_size)
    return decide.in_words(given.call.way, sizes, given.call.spec, where)
