"""``Given``: the checked arguments of ``linear_cross_entropy``.

All checks and decisions of a call depend on sizes, dtypes and options, unless an option is a tensor. Their result is worked out
once for each kind of call. A later call of this kind takes the record, and only lays out its own tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import maybe_current_level
from torch.autograd import forward_ad

from cce_dist import checks, decide, operands, terms
from cce_dist.autograd import PLAIN, is_unobserved
from cce_dist.call import DTYPES, Call, Options, are_plain, checked, checked_num_tokens, numbers_of
from cce_dist.decide import Way
from cce_dist.kernels import Filter, Operands, ShardLogits, Spec, Want, accumulator
from cce_dist.kernels.dense import label_ids
from cce_dist.kernels.outputs import Outputs
from cce_dist.kernels.tiles import fp32_precision
from cce_dist.operands import environment
from cce_dist.shard import VocabShard
from cce_dist.terms import ClassWeights, Terms
from cce_dist.token_loss import TokenLossOutput, checked_token_loss

TIE = 2.0**-17  # for label_is_max, relative to max(1, |largest logit|)
MOST_KINDS = 256  # of calls whose records are kept; then the dictionary begins anew


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


class Given(NamedTuple):
    x: Operands  # with the labels as its ids
    target: Tensor
    shard: VocabShard
    options: Options
    call: Call
    terms: Terms
    scale: float | Tensor = 1.0  # logit_scale; a tensor inside a compiled graph, which does not read it
    grad_weight_out: Tensor | None = None
    class_weights: ClassWeights | None = None
    expected_N: Tensor | None = None  # expected weights of per-token losses, if they are a tensor
    numbers: Tensor | None = None  # of ``numbers_of``, inside a compiled graph

    def loss(self, found: Outputs) -> Tensor:
        """Return the loss from the operator's outputs: a reduced loss, or per-token losses [N]. Autograd differentiates it."""
        terms, options, token = self.terms, self.options, self.terms.token
        if self.call.spec.want.mean:
            return found.mean
        if token is not None:
            counts = label_ids(self.x.ids, options.ignore_index, self.shard.vocab_size) >= 0
            loss_N = token.losses(found.nll, found.entropy if token.needs_entropy else None, counts)
            token.check_gradient()
        else:
            uniform_nll = found.uniform_nll
            if self.class_weights is not None and terms.label_smoothing:
                uniform_nll = self.class_weights.uniform_nll(found.lse, self.scale)
            loss_N = terms.losses(found.nll, found.lse, uniform_nll)
        if options.reduction == "none":
            return loss_N
        loss = loss_N.sum()
        return loss / self.divisor() if options.reduction == "mean" else loss

    def divisor(self) -> float | Tensor:
        """Return the divisor of a reduced loss. A tensor that holds 0 counts as 1, so that the mean of no tokens is 0."""
        options, divisor = self.options, self.options.num_tokens
        if options.reduction == "sum":
            return 1.0
        if divisor is None:
            if self.class_weights is None:
                return (self.x.ids != options.ignore_index).sum().clamp(min=1)
            divisor = self.class_weights.of_labels.sum()
        if not isinstance(divisor, Tensor):
            return divisor
        return (divisor + (divisor == 0)).to(accumulator(self.x.hidden.dtype))

    def shaped(self, loss: Tensor, outputs: Outputs | None) -> Tensor | LinearCrossEntropyOutput | TokenLossOutput:
        shape, options = self.target.shape, self.options
        loss = loss.view(shape) if options.reduction == "none" else loss
        token = self.terms.token
        if token is not None and token.outputs is not None:
            return token.output(loss, shape)
        if outputs is None or not options.return_aux:
            return loss
        nll, lse, target_logit = (values.view(shape) for values in (outputs.nll, outputs.lse, outputs.target_logit))
        entropy = outputs.entropy.view(shape) if self.call.spec.want.entropy else None
        max_logit = label_is_max = None
        if outputs.max_logit is not None:
            max_logit = outputs.max_logit.view(shape)
            reached = target_logit.detach() + TIE * max_logit.abs().clamp(min=1) >= max_logit
            label_is_max = (reached & (self.target != options.ignore_index)).float()
        z_loss = options.z_loss_weight * lse.square()
        return LinearCrossEntropyOutput(loss, nll, lse, target_logit, entropy, z_loss, max_logit, label_is_max)


def checked_call(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None, weight: Tensor | None,
    shard: VocabShard | None, num_tokens: float | Tensor | None, expected_weights: Tensor | bool,
    grad_weight_out: Tensor | None, **options: Any,
) -> Given:  # fmt: skip
    kind, token_loss, token_inputs = None, options.pop("token_loss"), options.pop("token_inputs")
    if weight is None and token_loss is None and isinstance(token_inputs, tuple) and not token_inputs:
        tensors = input, linear_weight, target, linear_bias, grad_weight_out
        # The number of tokens may change in every step.
        kind = _kind_of(*tensors, shard, (num_tokens is None, expected_weights, *options.values()))
    known = None if kind is None else _KNOWN.get(kind)
    if known is not None:
        if grad_weight_out is not None:
            checks.apart(grad_weight_out, input=input, linear_weight=linear_weight, linear_bias=linear_bias)
        given = _with_tensors(known, input, linear_weight, target, linear_bias, grad_weight_out, shard)
        if num_tokens is None:
            return given
        options_now = given.options._replace(num_tokens=checked_num_tokens("num_tokens", num_tokens))
        check_divisor(options_now, given.x.ids)
        return given._replace(options=options_now)
    given = check_all(
        input, linear_weight, target, linear_bias=linear_bias, weight=weight, shard=shard, num_tokens=num_tokens,
        expected_weights=expected_weights, grad_weight_out=grad_weight_out, token_loss=token_loss,
        token_inputs=token_inputs, **options,
    )  # fmt: skip
    if kind is not None:
        if len(_KNOWN) >= MOST_KINDS:
            _KNOWN.clear()
        _KNOWN[kind] = _without_tensors(given)
    return given


def _kind_of(
    input: Any, weight: Any, target: Any, bias: Any, buffer: Any, shard: VocabShard | None, options: tuple[Any, ...]
) -> tuple[Any, ...] | None:
    """Return all that the checks and decisions of a call depend on, or None if they depend on more than plain values."""
    if torch.compiler.is_compiling() or _is_observed(input, weight):
        return None
    if type(target) is not Tensor or target.is_neg() or not are_plain(options):
        return None
    if input.is_meta or input.is_nested or weight.is_nested or target.is_nested:  # no values, or no shape
        return None
    key = [_facts_of(input), _facts_of(weight), target.shape, target.dtype, target.device, target.layout]
    for tensor in (bias, buffer):
        if tensor is None:
            key.append(None)
            continue
        if type(tensor) not in PLAIN or tensor.is_nested or tensor.layout != torch.strided or tensor.is_neg():
            return None
        key += [_facts_of(tensor), tensor.is_contiguous()]
    if shard is not None:
        if type(shard) is not VocabShard:
            return None
        # Not the group itself: its threads would live as long as the key.
        key.append((shard.start, shard.stop, shard.vocab_size, shard.group_name, shard.group_size))
    return (*key, *modes_of(input).values(), options, tuple(map(type, options)))


def modes_of(input: Tensor) -> dict[str, Any]:
    """Return what a call depends on besides its arguments."""
    return {
        "grad_mode": torch.is_grad_enabled(),
        "autocast": _autocast_dtype(input.device),
        "fp32_precision": fp32_precision() if input.dtype == torch.float32 else None,
        "environment": environment(),
        "groups": decide.forced_groups,
    }


_KNOWN: dict[tuple[Any, ...], tuple[Given, torch.dtype | None]] = {}


def _facts_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad, tensor.layout


def _is_observed(*tensors: Any) -> bool:
    """Whether transforms of torch.func, forward mode, a dispatch mode, tensor subclasses or negated views are at work."""
    if maybe_current_level() is not None or forward_ad._current_level >= 0:
        return True
    return not is_unobserved(*tensors) or any(map(Tensor.is_neg, tensors))


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _without_tensors(given: Given) -> tuple[Given, torch.dtype | None]:
    """Return what calls of a kind have in common: the record without tensors and shard, and autocast's dtype."""
    x, options = given.x, given.options
    nothing: Any = None
    if isinstance(options.num_tokens, Tensor):
        options = options._replace(num_tokens=None)
    x = Operands(nothing, nothing, x.head._replace(bias=None), nothing, x.start, x.num_valid)
    shard = given.shard if given.shard.group is None else nothing
    dtype = _autocast_dtype(given.target.device)
    return given._replace(x=x, target=nothing, options=options, grad_weight_out=None, shard=shard), dtype


def _with_tensors(
    known: tuple[Given, torch.dtype | None], input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None,
    buffer: Tensor | None, shard: VocabShard | None,
) -> Given:  # fmt: skip
    given, dtype = known
    if dtype is not None and input.dtype != torch.float64:
        input, weight = input.to(dtype), weight.to(dtype)
    x, hidden = given.x, input if input.dim() == 2 else input.reshape(-1, input.shape[-1])
    hidden = hidden if hidden.is_contiguous() else hidden.contiguous()
    head = x.head if bias is None else x.head._replace(bias=bias.contiguous())
    weight = weight if weight.is_contiguous() else weight.contiguous()
    x = Operands(hidden, weight, head, operands.flat_ids(target), x.start, x.num_valid)
    return Given(x, target, given.shard or shard, given.options, given.call, given.terms, given.scale, buffer)


def check_all(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None, weight: Tensor | None,
    shard: VocabShard | None, expected_weights: Tensor | bool, grad_weight_out: Tensor | None,
    on_meta: bool = False, **chosen: Any,
) -> Given:  # fmt: skip
    # A compiled graph reads no tensor, so the scale becomes a per-token factor. The filter supports no such factors.
    logit_scale, unread = chosen["logit_scale"], None
    if isinstance(logit_scale, Tensor) and logit_scale.dim() == 0 and chosen["grad_filter"] is None:
        unread = logit_scale.detach() if torch.compiler.is_compiling() else None
    chosen["logit_scale"] = logit_scale if unread is None else 1.0
    chosen["expected_weights"] = isinstance(expected_weights, Tensor) or expected_weights
    of_token_loss = chosen.pop("token_loss"), chosen.pop("token_inputs")
    options = checked(**chosen)
    x, shard, logits = operands.prepare(
        input, linear_weight, target, linear_bias, grad_weight_out, shard, options.logit_scale, options, on_meta
    )
    if weight is not None:
        check_class_weights("weight", weight, shard.vocab_size, on_meta)
        _check_weighted(weight, input, options, grad_weight_out)
    check_divisor(options, x.ids)
    parts = Terms(options.z_loss_weight, options.label_smoothing)
    scale = options.logit_scale if unread is None else unread
    if isinstance(logit_scale, Tensor) and logit_scale.requires_grad and torch.is_grad_enabled():
        part = options.sequence_parallel or options.input_grad == "partial"
        x = terms.learn_scale(x, logit_scale, scale, shard.group, part)
    if unread is not None:
        x = terms.with_factors(x, unread, 1.0, target.shape, options.ignore_index)
    excluded = {
        "weight": weight is not None,
        "label_smoothing": options.label_smoothing != 0,
        "z_loss_weight": parts.has_z_loss,
        "grad_filter": options.grad_filter is not None,
        "expected_weights": isinstance(expected_weights, Tensor),
    }
    token = checked_token_loss(*of_token_loss, target, excluded, chosen["return_aux"], environment()[1])
    if token is not None:  # TokenLossOutput has other outputs, without gradients
        if token.debug and not torch.compiler.is_compiling():
            token = token._replace(group=shard.group)
        options = options._replace(return_aux=())
    class_weights, parts = None, parts._replace(token=token)
    if weight is not None and not on_meta:
        class_weights = ClassWeights(weight, x, shard, options.ignore_index)
        parts = parts._replace(weight_N=class_weights.of_labels)
    expected_N = _checked_expectation(expected_weights, target, options)
    # These terms of the loss are computed outside of the operator, by autograd.
    outside = unread is not None or isinstance(options.z_loss_weight, Tensor)
    outside = outside or (weight is not None and options.label_smoothing != 0)
    # A learnable scale or per-token factors are among the head's tensors by now.
    logits = logits._replace(tensors=" ".join(x.head.tensors))
    spec = _spec(x, logits, weight is not None, shard, parts, options)
    if torch.compiler.is_compiling():
        # A graph of torch.compile contains the function of a token_loss, which is no part of an operator.
        outside = outside or token is not None
    else:
        outside = outside or _is_observed(x.hidden, x.weight)  # transforms and dispatch modes need two passes
    upstream = "number"
    if outside or options.return_aux:
        upstream = "unknown"
    elif options.reduction == "none":
        upstream = "tokens" if options.expected_weights and token is None else "unknown"
    call = operands.call_of(x, spec, shard, options, needs_kernels=spec.filter.eps > 0)
    where = call.where(x.hidden, shard.group_size, upstream, grad_weight_out is not None)
    if torch.compiler.is_compiling():  # sizes may be symbols, so operators choose the way when they run
        call = call._replace(way=Way(passes="operator" if decide.takes_operator(spec, where) else "two"))
    else:
        call = call.decided(x.hidden, x.num_tokens, shard.group_size, where)
    numbers = numbers_of(options.logit_scale, options.softcap)
    return Given(x, target, shard, options, call, parts, scale, grad_weight_out, class_weights, expected_N, numbers)


def check_divisor(options: Options, ids: Tensor) -> None:
    """Raise ValueError if num_tokens is a tensor on another GPU, or holds 0 although not all labels are ignored.

    The value is not read inside a compiled graph and on a GPU, where reading would wait for the device.
    """
    divisor = options.num_tokens
    if not isinstance(divisor, Tensor):
        return
    if divisor.device not in (ids.device, torch.device("cpu")):
        raise ValueError(f"input is on {ids.device}, num_tokens on {divisor.device}")
    if not (checks.has_values(divisor) and divisor.is_cpu and ids.is_cpu):
        return
    if divisor == 0 and (ids != options.ignore_index).any():
        raise ValueError(f"num_tokens is 0, and {options.labels} has labels that are not ignored")


def _spec(x: Operands, logits: ShardLogits, weighted: bool, shard: VocabShard, parts: Terms, options: Options) -> Spec:
    # The operator computes a plain mean itself, in one launch.
    plain = options.label_smoothing == 0 and not parts.has_z_loss and not weighted and parts.token is None
    mean = plain and options.reduction == "mean" and options.num_tokens is None
    want = Want(
        grad=torch.is_grad_enabled() and x.requires_grad,
        uniform=options.label_smoothing > 0 and not weighted,
        entropy="entropy" in options.return_aux or (parts.token is not None and parts.token.needs_entropy),
        largest=not {"max_logit", "label_is_max"}.isdisjoint(options.return_aux),
        mean=mean,
        tokens=not mean or bool(options.return_aux),
    )
    f = options.grad_filter
    kept = Filter() if f is None else Filter(f.eps, f.compensate, f.hidden, f.weight, f.always)
    return Spec(logits, shard.vocab_size, options.ignore_index, kept, want, options.workspace_bytes)


def _checked_expectation(expected: Tensor | bool, target: Tensor, options: Options) -> Tensor | None:
    if not isinstance(expected, Tensor):
        return None
    checks.like_target("expected_weights", expected, target)
    if expected.is_complex():
        raise TypeError(f"expected_weights must be real numbers, got {expected.dtype}")
    if options.reduction != "none":
        raise ValueError(f'expected_weights needs reduction="none"; reduction is "{options.reduction}"')
    return expected.detach().reshape(-1)


def check_class_weights(name: str, weight: Tensor, vocab_size: int, on_meta: bool = False) -> None:
    checks.tensors({name: weight}, on_meta)
    if weight.requires_grad:
        raise TypeError(f"{name} gets no gradient: pass class weights that do not require one")
    if weight.dtype not in (*DTYPES, torch.float64):
        raise TypeError(f"{name} must be float64, float32, bfloat16 or float16, got {weight.dtype}")
    if weight.is_cpu and checks.has_values(weight):
        size = weight.double().abs()
        tiny = (size > 0) & (size < checks.SMALLEST)
        fits = weight.dtype != torch.float64 or (size <= checks.LARGEST).all()
        if tiny.any() or not fits:
            raise ValueError(f"{name} must be finite in fp32, and 0 or at least {checks.SMALLEST:g}")
    if weight.shape != (vocab_size,):
        raise ValueError(f"{name} must be [{vocab_size}], one for each class, got {tuple(weight.shape)}")


def _check_weighted(weight: Tensor, input: Tensor, options: Options, buffer: Tensor | None) -> None:
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
