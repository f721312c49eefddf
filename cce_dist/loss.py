"""linear_cross_entropy: the call, its checks, and the algebra of the loss.

hidden, labels ──► op.forward:  statistics of the shard (kernels) ─► one all-gather ─► merge (log-add-exp)
                                   ──► nll, lse, ... per token, [N] fp32, differentiable
loss            =  plain algebra on those [N] numbers, below
d_loss          ──► op.backward: gradients (kernels) ─► dC stays here, dE is summed over the group behind it
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from cce_dist import agree, checks, decide, groups, in_graph, op, operands, terms
from cce_dist.call import DTYPES, Call, LossOptions, Options, checked, numbers_of
from cce_dist.decide import Where
from cce_dist.filter import FilterStats, GradFilter
from cce_dist.kernels import Filter, Operands, Spec, Want
from cce_dist.kernels.extras import Outputs
from cce_dist.kernels.precision import accumulator
from cce_dist.shard import VocabShard


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
            ``TIE`` (2**-17) of their size. None if others were named.
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
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    return_aux: Literal[False] = False,
    **options: Unpack[LossOptions],
) -> Tensor: ...


@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    return_aux: Literal[True] | Collection[str],
    **options: Unpack[LossOptions],
) -> LinearCrossEntropyOutput: ...


@agree.errors_reach_all_ranks
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
    z_loss_weight: float | Tensor = 0.0,
    num_tokens: int | Tensor | None = None,
    shard: VocabShard | None = None,
    sequence_parallel: bool = False,
    input_grad: str = "summed",
    reduce_dtype: torch.dtype | None = None,
    grad_filter: GradFilter | None = None,
    return_aux: bool | Collection[str] = False,
    backend: str = "auto",
    workspace_bytes: int | None = None,
    expected_weights: Tensor | bool = True,
    grad_weight_out: Tensor | None = None,
    options: Any = None,
) -> Tensor | LinearCrossEntropyOutput:
    """Cross-entropy of a language-model head, from hidden states, without ever holding the logits.

    The logits are ``softcap * tanh(u / softcap)`` with ``u = logit_scale * (input @ linear_weight.T + linear_bias)``,
    and the loss of a token is ``(1 - label_smoothing) * nll + label_smoothing * mean_j(lse - logit_j) +
    z_loss_weight * lse**2``, in nats. Arguments are named as in ``torch.nn.functional.linear_cross_entropy``. Numbers may be
    0-d tensors that need no gradient. A tensor on a GPU is read, which waits for the device (``num_tokens`` is not read). Under
    ``torch.compile(fullgraph=True)``, which reads none, only ``num_tokens``, ``z_loss_weight`` and, without a filter,
    ``logit_scale`` may be tensors. Numbers that change from call to call are compiled twice at most.

    Args:
        input: [..., D] hidden states, fp32, bf16 or fp16 (under autocast: cast as ``F.linear`` would).
            float64 runs on the torch backend, and the loss is then float64.
        linear_weight: [V_r, D] this rank's rows of the head weight, input's dtype; or a DTensor sharded on dim 0.
        target: [...] int64 or int32 labels, ids in the whole vocabulary; the same on every rank of the group.
        linear_bias: [V_r] bias of this rank's rows, or a DTensor split as linear_weight is.
        weight: [V] weights of the classes, of the whole vocabulary on every rank, without gradient. A token's loss is
            multiplied by the weight of its label, and the mean divides by the sum of those. The uniform part of label
            smoothing is ``label_smoothing * mean_j(weight_j * (lse - logit_j))`` instead, as in PyTorch; dE and dC are then
            sums of two terms, each rounded to input's dtype, and linear_weight is copied in fp32. Together with label
            smoothing it is refused beside softcap, sequence_parallel, input_grad="partial" and grad_weight_out.
        ignore_index: Tokens with this label have loss 0 and gradient 0. None means -100, as in PyTorch.
        reduction: "none" (target's shape), "sum", or "mean" over tokens that are not ignored. If all are, the mean is 0.
        label_smoothing: In [0, 1], spread over the whole logical vocabulary.
        logit_scale: Multiplies the logits. A 0-d tensor that requires a gradient gets one, as exact as dE and dbias, which
            are rounded to input's and linear_bias's dtype (and filtered as dE is).
        softcap: Positive bound of the logits, or None.
        z_loss_weight: Weight of lse**2.
        num_tokens: Divisor of "mean", int or 0-d tensor: the global count over data and context parallel ranks and
            microbatches, so that the parts' gradients sum to the whole batch's gradient. A tensor may hold 0 where all
            labels are ignored. One that requires a gradient gets it.
        shard: Which rows of the vocabulary ``linear_weight`` is; None means all of them.
        sequence_parallel: input is this rank's slice of dim 0 (slices in group-rank order), target is whole.
        input_grad: "summed" over the group, or "partial": this shard's part, for a framework that sums it itself.
        reduce_dtype: What dE is summed over the group in: None for input's dtype, as Megatron does it, or torch.float32
            at twice the bytes of bf16 and without its roundings. Each rank's part is rounded to input's dtype in any case.
        grad_filter: None for exact gradients, or how to filter them.
        return_aux: Return ``LinearCrossEntropyOutput`` instead of the loss alone, with all outputs or with those named, such as
            ``("nll", "label_is_max")``. "entropy" and "filter_stats" cost time, and under a softcap exponentials are not kept
            beside the entropy; the others are nearly free.
        backend: "triton", "torch", or "auto": Triton on a GPU, else torch. The environment variable CCE_DIST_BACKEND
            overrides "auto".
        workspace_bytes: Bound of the temporary memory for logits, and of what forward may keep for backward; the same on every
            rank of a group. None: enough to keep all exponentials, which saves a quarter of the time, but at least 256 and at
            most 2,100 MiB; 256 MiB where none can be kept. The shapes alone decide it. The extremes: 1 takes the least memory,
            1 << 40 keeps everything and is fastest. Where not all can be kept, a call on Triton without return_aux makes its
            gradients in forward, group by group of tokens; they are held until backward.
        expected_weights: What upstream gradients of a loss of "none" will be in proportion to, for gradients that are made in
            forward: a tensor of target's shape, as a mask by which losses are multiplied; True: they are equal. Backward
            compares. Where it is not so, dC takes two products more. False: expect nothing, make no gradients in forward.
        grad_weight_out: [V_r, D] contiguous buffer, fp32 (Megatron's main_grad) or the weight's dtype, that backward adds dC
            into; linear_weight itself then gets no gradient.
        options: Ignored. ``torch.nn.functional.linear_cross_entropy`` chooses how it saves memory by this argument; here
            ``workspace_bytes`` does.

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
        reduce of each slice to its rank). Where forward makes the gradients, all of it is in forward, for each group.
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
    x, shard, chosen, call, where, scale, expected = _prepare(
        input, linear_weight, target, linear_bias=linear_bias, weight=weight, ignore_index=ignore_index,
        reduction=reduction, label_smoothing=label_smoothing, logit_scale=logit_scale, softcap=softcap,
        z_loss_weight=z_loss_weight, num_tokens=num_tokens, shard=shard, sequence_parallel=sequence_parallel,
        input_grad=input_grad, reduce_dtype=reduce_dtype, grad_filter=grad_filter, return_aux=return_aux, backend=backend,
        workspace_bytes=workspace_bytes, expected_weights=expected_weights, grad_weight_out=grad_weight_out,
    )  # fmt: skip
    agree.check_ranks(x, {"weight": weight}, shard, chosen, call)
    class_weights = None if weight is None else terms.ClassWeights(weight, x, shard, chosen.ignore_index)
    in_operator = False
    if torch.compiler.is_compiling():
        in_operator = decide.takes_operator_of_both(call.spec, where, groups.are_forced())
    else:
        call = groups.decided_now(call, x, shard.group_size, where)
    if in_operator or call.way.passes == "one":
        is_learned = isinstance(num_tokens, Tensor) and num_tokens.requires_grad and torch.is_grad_enabled()
        divisor = None if reduction == "none" else 1.0 if is_learned else _divisor(x, chosen, class_weights)
        of_labels = None if class_weights is None else class_weights.of_labels
        made_of = groups.Terms(divisor, chosen.z_loss_weight, chosen.label_smoothing, of_labels)
        if in_operator:
            loss = in_graph.loss(x, made_of, call, chosen)
        else:
            loss = groups.loss(x, made_of, call, expected, grad_weight_out)
        if is_learned:  # autograd divides, and num_tokens gets its gradient
            return loss / _divisor(x, chosen, class_weights)
        return loss.view(target.shape) if reduction == "none" else loss
    found = op.forward(x, grad_weight_out, call, numbers_of(chosen.logit_scale, chosen.softcap))
    loss = found.nll if chosen.label_smoothing == 0 else (1 - chosen.label_smoothing) * found.nll
    if call.spec.want.uniform:
        loss = loss + chosen.label_smoothing * found.uniform_nll
    if chosen.has_z_loss:
        loss = loss + chosen.z_loss_weight * found.lse.square()
    if class_weights is not None:
        loss = class_weights.weigh(loss, found.lse, chosen.label_smoothing, scale)
    if reduction == "none":
        loss = loss.view(target.shape)
    elif call.spec.want.mean:
        loss = found.mean
    else:
        loss = loss.sum()
        if reduction == "mean":
            loss = loss / _divisor(x, chosen, class_weights)
    if not return_aux:
        return loss
    return _output(loss, found, chosen.z_loss_weight * found.lse.square(), target, call.spec)


def explain(input: Tensor, linear_weight: Tensor, target: Tensor, **options: Any) -> str:
    """Return one sentence about how ``linear_cross_entropy`` goes with the same arguments: the way, its budget, and why.

    Nothing is computed or communicated. Tensors may be on "meta", which stands for a GPU. Gradients count as wanted by
    ``requires_grad``, as in the call itself.

    Args:
        input: [..., D] hidden states.
        linear_weight: [V_r, D] this rank's rows of the head weight.
        target: [...] labels.
        options: The same as for ``linear_cross_entropy``.

    Returns:
        A sentence such as "exact, one pass in 3 groups of 2,816 tokens, 2,100 MiB; the filter is off because exact is faster
        at these sizes". The number of MiB is the memory budget.

    Raises:
        ValueError, TypeError: As ``linear_cross_entropy``, but for labels' values, which are not read.
    """
    given = inspect.signature(linear_cross_entropy).bind(input, linear_weight, target, **options)
    given.apply_defaults()
    del given.arguments["options"]
    x, shard, _, call, where, *_ = _prepare(on_meta=True, **given.arguments)
    way = op.decided(call, x.hidden, x.num_tokens, shard.group_size, where).way
    sizes = op.sizes_of_even_shard(x.hidden, x.num_tokens, shard.vocab_size, shard.group_size)
    return decide.in_words(way, sizes, call.spec, where)


class _Prepared(NamedTuple):
    """The arguments of a call, checked.

    Attributes:
        x: The operands, with labels in place of ids.
        shard: Which rows of the vocabulary are here.
        options: The options.
        call: What the operator is told; its way is not decided yet.
        where: What the way follows from.
        scale: Scale of the logits: a number, or a tensor that a compiled graph does not read.
        expected: [N] expected weights, or None.
    """

    x: Operands
    shard: VocabShard
    options: Options
    call: Call
    where: Where
    scale: float | Tensor
    expected: Tensor | None


def _prepare(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None, weight: Tensor | None,
    shard: VocabShard | None, expected_weights: Tensor | bool, grad_weight_out: Tensor | None,
    on_meta: bool = False, **given: Any,
) -> _Prepared:  # fmt: skip
    """Check the arguments of ``linear_cross_entropy``; with ``on_meta`` tensors may all be without values."""
    # A compiled graph reads no tensor: the scale is then a factor of every token, which the filter does not know.
    logit_scale, unread = given["logit_scale"], None
    if isinstance(logit_scale, Tensor) and logit_scale.dim() == 0 and given["grad_filter"] is None:
        unread = logit_scale.detach() if torch.compiler.is_compiling() else None
    given["logit_scale"] = logit_scale if unread is None else 1.0
    given["expected_weights"] = isinstance(expected_weights, Tensor) or expected_weights
    chosen = checked(Options, **given)
    x, shard = operands.prepare(
        input, linear_weight, target, linear_bias, grad_weight_out, shard, chosen.logit_scale, chosen, on_meta
    )
    if weight is not None:
        check_class_weights("weight", weight, shard.vocab_size, on_meta)
        _check_weighted(weight, input, chosen, grad_weight_out)
    if isinstance(chosen.num_tokens, Tensor) and chosen.num_tokens.device not in (input.device, torch.device("cpu")):
        raise ValueError(f"input is on {input.device}, num_tokens on {chosen.num_tokens.device}")
    _check_no_tokens(chosen, x)
    scale = chosen.logit_scale if unread is None else unread
    if isinstance(logit_scale, Tensor) and logit_scale.requires_grad and torch.is_grad_enabled():
        part = chosen.sequence_parallel or chosen.input_grad == "partial"
        hidden, bias = terms.learn_scale(logit_scale, scale, x.hidden, x.head.bias, shard.group, part)
        x = x._replace(hidden=hidden, head=x.head._replace(bias=bias))
    if unread is not None:
        x = terms.with_factors(x, unread, 1.0, target.shape, chosen.ignore_index)
    call = operands.call_of(x, _spec(x, weight, shard, chosen), shard, chosen)
    expected = _checked_expectation(expected_weights, target, chosen)
    # Factors of tokens, a z-loss whose weight a graph does not read, and classes' own parts of a uniform term.
    outside = unread is not None or isinstance(chosen.z_loss_weight, Tensor)
    outside = outside or (weight is not None and chosen.label_smoothing != 0)
    returns_more = bool(chosen.return_aux) or outside
    upstream = decide.upstream_of(chosen.reduction, chosen.expected_weights, returns_more)
    where = op.where_of(call, x.hidden, shard.group_size, upstream, grad_weight_out is not None)
    return _Prepared(x, shard, chosen, call, where, scale, expected)


def _check_no_tokens(options: Options, x: Operands) -> None:
    """Raise ValueError if there are labels, and 0 tokens by a tensor; a graph reads neither, and reading waits for a GPU."""
    divisor = options.num_tokens
    if not isinstance(divisor, Tensor) or torch.compiler.is_compiling() or not (divisor.is_cpu and x.ids.is_cpu):
        return
    if divisor == 0 and (x.ids != options.ignore_index).any():
        raise ValueError(f"num_tokens is 0, and {options.labels} has labels that are not ignored")


def _spec(x: Operands, class_weights: Tensor | None, shard: VocabShard, options: Options) -> Spec:
    # The mean of nll is taken by the operator itself, so that its launches can be replayed.
    plain = options.label_smoothing == 0 and not options.has_z_loss and class_weights is None
    want = Want(
        grad=torch.is_grad_enabled() and x.requires_grad,
        uniform=options.label_smoothing > 0 and class_weights is None,
        entropy="entropy" in options.return_aux,
        filter_stats="filter_stats" in options.return_aux and options.grad_filter is not None,
        largest=not {"max_logit", "label_is_max"}.isdisjoint(options.return_aux),
        mean=plain and options.reduction == "mean" and options.num_tokens is None,
    )
    f = options.grad_filter
    kept = Filter() if f is None else Filter(f.eps, f.compensate, f.hidden, f.weight, f.always)
    logits = operands.logits_of(shard, options.logit_scale, options.softcap, x.head.tensors)
    return Spec(logits, shard.vocab_size, options.ignore_index, kept, want, options.workspace_bytes)


def _checked_expectation(expected: Tensor | bool, target: Tensor, options: Options) -> Tensor | None:
    """Return expected weights in one dimension; None: there are none."""
    if not isinstance(expected, Tensor):
        return None
    checks.tensors({"expected_weights": expected}, on_meta=True)
    if expected.is_complex():
        raise TypeError(f"expected_weights must be real numbers, got {expected.dtype}")
    if options.reduction != "none":
        raise ValueError(f'expected_weights is of a loss for each token; reduction is "{options.reduction}"')
    if expected.shape != target.shape or expected.device != target.device:
        raise ValueError(
            f"expected_weights must be {tuple(target.shape)} on {target.device} as target, "
            f"got {tuple(expected.shape)} on {expected.device}"
        )
    return expected.detach().reshape(-1)


def _output(loss: Tensor, found: Outputs, z_loss: Tensor, target: Tensor, spec: Spec) -> LinearCrossEntropyOutput:
    """Give the outputs target's shape, leave out those that are not wanted, and compare the label's logit with the largest."""

    def shaped(values: Tensor) -> Tensor:
        return values.view(target.shape)

    max_logit = label_is_max = None
    target_logit = shaped(found.target_logit)
    if found.max_logit is not None:
        max_logit = shaped(found.max_logit)
        reached = target_logit.detach() + TIE * max_logit.abs().clamp(min=1) >= max_logit
        label_is_max = (reached & (target != spec.ignore_index)).float()
    return LinearCrossEntropyOutput(
        loss,
        shaped(found.nll),
        shaped(found.lse),
        target_logit,
        shaped(found.entropy) if spec.want.entropy else None,
        shaped(z_loss),
        None if found.filter_stats is None else FilterStats(*found.filter_stats.unbind()),
        max_logit,
        label_is_max,
    )


def _divisor(x: Operands, options: Options, class_weights: terms.ClassWeights | None) -> float | Tensor:
    """Return the divisor of "mean". A tensor that holds 0 counts as 1, so that the mean of nothing is 0."""
    divisor = options.num_tokens
    if options.reduction == "sum":
        return 1.0
    if divisor is None:
        if class_weights is None:
            return (x.ids != options.ignore_index).sum().clamp(min=1)
        divisor = class_weights.of_labels.sum()
    return (divisor + (divisor == 0)).to(accumulator(x.hidden.dtype)) if isinstance(divisor, Tensor) else divisor


def check_class_weights(name: str, weight: Tensor, vocab_size: int, on_meta: bool = False) -> None:
    """Raise unless these can be weights of so many classes."""
    checks.tensors({name: weight}, on_meta)
    if weight.requires_grad:
        raise TypeError(f"{name} has no gradient here: pass class weights that require none")
    if weight.dtype not in (*DTYPES, torch.float64):
        raise TypeError(f"{name} must be float64, float32, bfloat16 or float16, got {weight.dtype}")
    if weight.shape != (vocab_size,):
        raise ValueError(f"{name} must be [{vocab_size}], one for each class, got {tuple(weight.shape)}")


def _check_weighted(weight: Tensor, input: Tensor, options: Options, buffer: Tensor | None) -> None:
    """Raise unless class weights go with the other arguments."""
    if weight.device != input.device:
        raise ValueError(f"input is on {input.device}, weight on {weight.device}")
    others = {
        "softcap": options.softcap is not None,
        "sequence_parallel": options.sequence_parallel,
        'input_grad="partial"': options.input_grad == "partial",
        "grad_weight_out": buffer is not None,
    }
    refused = [name for name, given in others.items() if given and options.label_smoothing != 0]
    if refused:
        raise ValueError(f"weight with label_smoothing does not go with {', '.join(refused)}")
