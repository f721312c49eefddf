"""linear_cross_entropy: the call, its checks, and the algebra of the loss.

hidden, labels ──► op.forward:  statistics of the shard (kernels) ─► one all-gather ─► merge (log-add-exp)
                                   ──► nll, lse, ... per token, [N] fp32, differentiable
loss            =  plain algebra on these [N] numbers, below
d_loss          ──► op.backward: gradients (kernels) ─► dC stays on its rank, dE is summed over the group
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from cce_dist import agree, checks, decide, groups, in_graph, op, operands, terms
from cce_dist.call import DTYPES, Call, LossOptions, Options, checked, numbers_of
from cce_dist.decide import Where
from cce_dist.filter import GradFilter
from cce_dist.kernels import Filter, Operands, Spec, Want
from cce_dist.kernels.dense import label_ids
from cce_dist.kernels.extras import Outputs
from cce_dist.kernels.precision import accumulator
from cce_dist.shard import VocabShard
from cce_dist.token_loss import TokenLoss, TokenLossOutput, checked_token_loss


class LinearCrossEntropyOutput(NamedTuple):
    """The loss and its parts. Per-token tensors are fp32, have target's shape, and hold 0 for ignored tokens.

    Gradients flow through ``loss``, ``nll``, ``lse``, ``target_logit``, ``entropy`` and ``z_loss``. An optional output is None
    unless ``return_aux`` is True or names it.

    Attributes:
        loss: The loss that ``linear_cross_entropy`` returns without ``return_aux``.
        nll: Negative log-likelihood of the label, in nats, without label smoothing and z-loss.
        lse: Log-sum-exp of the logits over the whole vocabulary.
        target_logit: Logit of the label.
        entropy: Entropy of the softmax, in nats. Optional.
        z_loss: ``z_loss_weight * lse**2``.
        max_logit: The largest logit. Optional.
        label_is_max: 1 where the label's logit is the largest one, else 0. Its mean over tokens with a label is the token
            accuracy. The two logits are summed in different orders, so a relative difference below ``TIE`` counts as a tie.
            Optional.
    """

    loss: Tensor
    nll: Tensor
    lse: Tensor
    target_logit: Tensor
    entropy: Tensor | None
    z_loss: Tensor
    max_logit: Tensor | None = None
    label_is_max: Tensor | None = None


TIE = 2.0**-17  # for label_is_max, relative to max(1, |largest logit|)


@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    return_aux: Literal[False] = False,
    token_loss: Callable[..., Any] | None = None,
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
    token_loss: Callable[..., Any],
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
    token_loss: Callable[..., Any] | None = None,
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
            as ``("nll", "label_is_max")``, returns one with these outputs. "entropy" takes time, and with a
            softcap it keeps no exponentials for backward. The other outputs are nearly free.
        backend: "triton", "torch", or "auto": Triton on an NVIDIA GPU, else torch. The environment variable
            CCE_DIST_BACKEND overrides "auto".
        workspace_bytes: Memory budget in bytes for logits and for what forward keeps for backward; identical on every rank of
            the group. None derives it from the shapes: enough to keep all exponentials, which saves a quarter of the time,
            within 256 and 2,100 MiB; 256 MiB if exponentials cannot be kept. 1 takes the least memory, 1 << 40 is fastest. If
            the exponentials do not fit, a call on Triton without return_aux computes its gradients in forward, one group of
            tokens after another, and holds them until backward.
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
        Forward: one all-gather of 3 to 6 fp32 numbers per token, and one more of 3 with a filter on Triton.
        Backward: one all-reduce of dE in reduce_dtype, or a reduce-scatter with sequence_parallel, overlapped with dC.
        If workspace_bytes splits the tokens into groups, each group's dE is reduced while the next group is computed; with
        sequence_parallel each slice is reduced to its rank. If forward computes the gradients, it also reduces dE.
        sequence_parallel all-gathers input in forward and again in backward; forward overlaps it with this rank's slice,
        unless there is a filter. A learnable logit_scale may all-reduce one number in backward; weight with label_smoothing
        all-reduces D + 1 numbers in forward.
        input must require a gradient on all ranks of the group or on none: otherwise ranks wait for a collective that others
        do not enter. CCE_DIST_DEBUG=1 adds an exchange that checks the ranks' arguments (not under torch.compile).

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
    x, shard, chosen, call, where, scale, expected, token = _prepare(
        input, linear_weight, target, linear_bias=linear_bias, weight=weight, ignore_index=ignore_index,
        reduction=reduction, label_smoothing=label_smoothing, logit_scale=logit_scale, softcap=softcap,
        z_loss_weight=z_loss_weight, num_tokens=num_tokens, shard=shard, sequence_parallel=sequence_parallel,
        input_grad=input_grad, reduce_dtype=reduce_dtype, grad_filter=grad_filter, return_aux=return_aux, backend=backend,
        workspace_bytes=workspace_bytes, expected_weights=expected_weights, grad_weight_out=grad_weight_out,
        token_loss=token_loss, token_inputs=token_inputs,
    )  # fmt: skip
    facts = {"weight": weight, "token_loss": token is not None}
    if token is not None and call.debug:  # ignored tokens may hold anything
        ignored = x.ids == chosen.ignore_index
        facts |= {f"token_inputs[{i}]": values.masked_fill(ignored, 0) for i, values in enumerate(token.inputs)}
    agree.check_ranks(x, facts, shard, chosen, call)
    class_weights = None if weight is None else terms.ClassWeights(weight, x, shard, chosen.ignore_index)
    as_operator = False
    if torch.compiler.is_compiling():
        as_operator = decide.takes_operator_of_both(call.spec, where, groups.are_forced())
    else:
        call = groups.decided_now(call, x, shard.group_size, where)
    if as_operator or call.way.passes == "one":
        is_learned = isinstance(num_tokens, Tensor) and num_tokens.requires_grad and torch.is_grad_enabled()
        divisor = None if reduction == "none" else 1.0 if is_learned else _divisor(x, chosen, class_weights)
        weight_N = None if class_weights is None else class_weights.of_labels
        terms_of_loss = groups.Terms(divisor, chosen.z_loss_weight, chosen.label_smoothing, weight_N, token)
        if as_operator:
            loss = in_graph.loss(x, terms_of_loss, call, chosen)
        else:
            loss = groups.loss(x, terms_of_loss, call, expected, grad_weight_out)
        if is_learned:  # autograd divides, and num_tokens gets its gradient
            loss = loss / _divisor(x, chosen, class_weights)
        loss = loss.view(target.shape) if reduction == "none" else loss
        return token.output(loss, target.shape) if token is not None and return_aux else loss
    found = op.forward(x, grad_weight_out, call, numbers_of(chosen.logit_scale, chosen.softcap))
    loss = found.nll if chosen.label_smoothing == 0 else (1 - chosen.label_smoothing) * found.nll
    if token is not None:
        counts = label_ids(x.ids, chosen.ignore_index, shard.vocab_size) >= 0
        loss = token.losses(found.nll, found.entropy if token.needs_entropy else None, counts)
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
    if token is not None:
        return token.output(loss, target.shape)
    return _output(loss, found, chosen.z_loss_weight * found.lse.square(), target, call.spec)


def explain(input: Tensor, linear_weight: Tensor, target: Tensor, **options: Any) -> str:
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
    given = inspect.signature(linear_cross_entropy).bind(input, linear_weight, target, **options)
    given.apply_defaults()
    del given.arguments["options"]
    x, shard, _, call, where, *_ = _prepare(on_meta=True, **given.arguments)
    way = op.decided(call, x.hidden, x.num_tokens, shard.group_size, where).way
    sizes = op.sizes_of_even_shard(x.hidden, x.num_tokens, shard.vocab_size, shard.group_size)
    return decide.in_words(way, sizes, call.spec, where)


class _Prepared(NamedTuple):
    """The checked arguments of a call."""

    x: Operands  # with the labels as its ids
    shard: VocabShard
    options: Options
    call: Call  # its way is not decided yet
    where: Where
    scale: float | Tensor  # logit_scale; a tensor inside a compiled graph, which does not read it
    expected: Tensor | None  # [N] expected weights
    token: TokenLoss | None


def _prepare(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None, weight: Tensor | None,
    shard: VocabShard | None, expected_weights: Tensor | bool, grad_weight_out: Tensor | None,
    on_meta: bool = False, **given: Any,
) -> _Prepared:  # fmt: skip
    """Check the arguments of ``linear_cross_entropy``. With ``on_meta`` all tensors may be on "meta"."""
    # A compiled graph reads no tensor, so the scale becomes a per-token factor. The filter supports no such factors.
    logit_scale, unread = given["logit_scale"], None
    if isinstance(logit_scale, Tensor) and logit_scale.dim() == 0 and given["grad_filter"] is None:
        unread = logit_scale.detach() if torch.compiler.is_compiling() else None
    given["logit_scale"] = logit_scale if unread is None else 1.0
    given["expected_weights"] = isinstance(expected_weights, Tensor) or expected_weights
    of_token_loss = given.pop("token_loss"), given.pop("token_inputs")
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
    excluded = {
        "weight": weight is not None,
        "label_smoothing": chosen.label_smoothing != 0,
        "z_loss_weight": chosen.has_z_loss,
        "grad_filter": chosen.grad_filter is not None,
        "expected_weights": isinstance(expected_weights, Tensor),
    }
    debug = operands.environment()[1]
    token = checked_token_loss(*of_token_loss, target, excluded, given["return_aux"], debug)
    if token is not None:  # TokenLossOutput has other outputs, without gradients
        chosen = chosen._replace(return_aux=())
    call = operands.call_of(x, _spec(x, weight, shard, chosen, token), shard, chosen)
    expected = _checked_expectation(expected_weights, target, chosen)
    # These terms of the loss are computed outside of the operator, by autograd.
    outside = unread is not None or isinstance(chosen.z_loss_weight, Tensor)
    outside = outside or (weight is not None and chosen.label_smoothing != 0)
    # A graph of torch.compile contains the function of a token_loss, which is no part of an operator.
    outside = outside or (token is not None and torch.compiler.is_compiling())
    returns_more = bool(chosen.return_aux) or outside
    upstream = decide.upstream_of(chosen.reduction, chosen.expected_weights and token is None, returns_more)
    where = op.where_of(call, x.hidden, shard.group_size, upstream, grad_weight_out is not None)
    return _Prepared(x, shard, chosen, call, where, scale, expected, token)


def _check_no_tokens(options: Options, x: Operands) -> None:
    """Raise ValueError if num_tokens is a tensor that holds 0, but not all labels are ignored.

    Skipped inside a compiled graph and on a GPU, where reading a value would wait for the device.
    """
    divisor = options.num_tokens
    if not isinstance(divisor, Tensor) or torch.compiler.is_compiling() or not (divisor.is_cpu and x.ids.is_cpu):
        return
    if divisor == 0 and (x.ids != options.ignore_index).any():
        raise ValueError(f"num_tokens is 0, and {options.labels} has labels that are not ignored")


def _spec(
    x: Operands, class_weights: Tensor | None, shard: VocabShard, options: Options, token: TokenLoss | None
) -> Spec:
    # The operator computes a plain mean itself, in one launch.
    plain = options.label_smoothing == 0 and not options.has_z_loss and class_weights is None and token is None
    want = Want(
        grad=torch.is_grad_enabled() and x.requires_grad,
        uniform=options.label_smoothing > 0 and class_weights is None,
        entropy="entropy" in options.return_aux or (token is not None and token.needs_entropy),
        largest=not {"max_logit", "label_is_max"}.isdisjoint(options.return_aux),
        mean=plain and options.reduction == "mean" and options.num_tokens is None,
    )
    f = options.grad_filter
    kept = Filter() if f is None else Filter(f.eps, f.compensate, f.hidden, f.weight, f.always)
    logits = operands.logits_of(shard, options.logit_scale, options.softcap, x.head.tensors)
    return Spec(logits, shard.vocab_size, options.ignore_index, kept, want, options.workspace_bytes)


def _checked_expectation(expected: Tensor | bool, target: Tensor, options: Options) -> Tensor | None:
    """Return the expected weights as [N], or None if they are no tensor."""
    if not isinstance(expected, Tensor):
        return None
    checks.like_target("expected_weights", expected, target)
    if expected.is_complex():
        raise TypeError(f"expected_weights must be real numbers, got {expected.dtype}")
    if options.reduction != "none":
        raise ValueError(f'expected_weights needs reduction="none"; reduction is "{options.reduction}"')
    return expected.detach().reshape(-1)


def _output(loss: Tensor, found: Outputs, z_loss: Tensor, target: Tensor, spec: Spec) -> LinearCrossEntropyOutput:
    """Return the requested outputs in target's shape, with ``label_is_max`` computed from the two logits."""

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
        max_logit,
        label_is_max,
    )


def _divisor(x: Operands, options: Options, class_weights: terms.ClassWeights | None) -> float | Tensor:
    """Return the divisor of a reduced loss. A tensor that holds 0 counts as 1, so that the mean of no tokens is 0."""
    divisor = options.num_tokens
    if options.reduction == "sum":
        return 1.0
    if divisor is None:
        if class_weights is None:
            return (x.ids != options.ignore_index).sum().clamp(min=1)
        divisor = class_weights.of_labels.sum()
    return (divisor + (divisor == 0)).to(accumulator(x.hidden.dtype)) if isinstance(divisor, Tensor) else divisor


def check_class_weights(name: str, weight: Tensor, vocab_size: int, on_meta: bool = False) -> None:
    """Raise unless ``weight`` is a [vocab_size] tensor of floats that requires no gradient."""
    checks.tensors({name: weight}, on_meta)
    if weight.requires_grad:
        raise TypeError(f"{name} gets no gradient: pass class weights that do not require one")
    if weight.dtype not in (*DTYPES, torch.float64):
        raise TypeError(f"{name} must be float64, float32, bfloat16 or float16, got {weight.dtype}")
    if weight.shape != (vocab_size,):
        raise ValueError(f"{name} must be [{vocab_size}], one for each class, got {tuple(weight.shape)}")


def _check_weighted(weight: Tensor, input: Tensor, options: Options, buffer: Tensor | None) -> None:
    """Raise if class weights are on another device than input, or exclude another argument."""
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
        raise ValueError(f"weight with label_smoothing cannot be combined with {', '.join(refused)}")
