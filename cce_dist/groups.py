"""A loss whose forward computes its gradients, one group of tokens after another: three matmuls.

Tokens depend on each other only in the sum over tokens of d_weight. So if the exponentials of all tokens do not fit the budget,
forward finishes one group of tokens before it begins another: exponentials and log-sum-exp, statistics merged over the ranks,
d_hidden, and the group's part of d_weight, which is added to the sum of the previous groups. With many groups, this sum has 8
additional bits.

Forward does not know the upstream gradient. If it is a scalar, backward multiplies by it. Upstream gradients of tokens are
expected to be proportional to weights: backward multiplies each token's d_hidden by its upstream gradient, and d_weight by the
common factor if the device finds one. Otherwise it recomputes d_weight, on Triton by launches that return early if there is a
common factor. A second backward recomputes everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cce_dist.autograd import (
    build,
    define,
    differentiable_once,
    flat,
    head_gradients,
    is_wanted,
    refuse_transforms,
    schema,
    without_autocast,
)
from cce_dist.call import Call, concrete, numbers_of
from cce_dist.debug_ranks import check_labels
from cce_dist.decide import Way, of_rows
from cce_dist.given import Given
from cce_dist.kernels import IGNORED, Grads, Operands, Softmax, accumulator, widened
from cce_dist.kernels.backends import named
from cce_dist.kernels.dry_run import compile_ahead
from cce_dist.kernels.outputs import NUM_LOSSES
from cce_dist.merge import Distributed
from cce_dist.op import operands_of, run_backward, run_forward
from cce_dist.terms import Terms

__all__ = ["of_rows", "one_pass"]

# The minimum of expected weights, relative to the largest; it stands for 0.
MIN_WEIGHT = 2.0**-40
_SCALED = 8 << 20  # bytes of a gradient that plain torch scales at a time


def one_pass(given: Given) -> tuple[Tensor, None]:
    """Compute a loss whose forward computes its gradients, too. Differentiable once."""
    x, options = given.x, given.options
    divides = isinstance(options.num_tokens, Tensor) and options.num_tokens.requires_grad and torch.is_grad_enabled()
    number = divisor = None
    if options.reduction != "none":
        number = given.divisor()
        # Autograd divides by a learned number of tokens, which then gets its gradient.
        divisor = 1.0 if divides else number
        if isinstance(divisor, Tensor):
            divisor = divisor.to(x.hidden.device)
        else:
            divisor = torch.full((), float(divisor), dtype=accumulator(x.hidden.dtype), device=x.hidden.device)
    if given.call.way.passes == "operator":
        loss = _by_operator(given, divisor)
    else:
        task = Task(given.terms, divisor, given.expected_N, given.call)
        loss = _InGroups.apply(task, x.ids, given.grad_weight_out, x.hidden, x.weight, *x.head.tensors.values())
    return loss / number if divides else loss, None  # type: ignore[operator]


class Task(NamedTuple):
    terms: Terms
    divisor: Tensor | None  # 0-d, on the operands' device; None: losses are per token
    expected_N: Tensor | None  # weights that the upstream gradients are expected to be proportional to; None: equal
    call: Call  # its way takes one pass


class _ForwardGradients(NamedTuple):
    """Gradients for the expected upstream gradient (None if not wanted), and what is needed to recompute them."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    ids_N: Tensor
    expected_N: Tensor
    softmax: Softmax


class _InGroups(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, task: Task, labels: Tensor, grad_weight_out: Tensor | None, hidden: Tensor, weight: Tensor, *head: Tensor
    ) -> Tensor:
        token = task.terms.token
        # A second backward reads the token inputs again, so autograd watches them, too.
        inputs = () if token is None else token.inputs
        ctx.save_for_backward(labels, hidden, weight, *head, *inputs)
        ctx.task, ctx.grad_weight_out, ctx.wanted = task, grad_weight_out, ctx.needs_input_grad[3:]
        # The gradients are no saved tensors: the first backward scales them in place and returns them to autograd.
        loss, ctx.gradients = run(hidden, weight, [*head], labels, task, ctx.wanted)
        return loss

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Any:
        # Read saved_tensors first and only once: a checkpoint recomputes its forward here, and returns each tensor once.
        labels, hidden, weight, *others = ctx.saved_tensors
        head = others[: len(ctx.wanted) - 2]
        refuse_transforms("linear_cross_entropy", grads[0])
        with torch.no_grad():
            if ctx.gradients is None:
                ctx.gradients = run(hidden, weight, head, labels, ctx.task, ctx.wanted)[1]
            if ctx.grad_weight_out is not None and ctx.gradients.weight is not None and not is_wanted(weight):
                ctx.gradients = ctx.gradients._replace(weight=None)
            found = _times_upstream(ctx, (hidden, weight, head), widened(grads[0].resolve_neg()))
        if torch.is_grad_enabled():
            found = differentiable_once("linear_cross_entropy", found, (hidden, weight, *head, grads[0]))
        return None, None, None, *found


def _times_upstream(
    ctx: Any, operands: tuple[Tensor, Tensor, list[Tensor]], upstream: Tensor
) -> tuple[Tensor | None, ...]:
    """Scale forward's gradients in place by the upstream gradient, return them, and remove them from ``ctx``."""
    gradients, ctx.gradients = ctx.gradients, None
    task, out, call = ctx.task, ctx.grad_weight_out, ctx.task.call
    ids_N, factor_N, factor, may_differ = gradients.ids_N, upstream, upstream, False
    if task.divisor is None and len(ids_N) == 0:
        factor_N = factor = torch.ones((), device=upstream.device)  # all gradients are 0
    elif task.divisor is None:
        factor_N = Distributed(call.layout).own(upstream / gradients.expected_N)
        may_differ = gradients.weight is not None or gradients.bias is not None
    if may_differ:
        factor, differs = _common_factor(upstream, gradients)
        ids_N = torch.where(differs, ids_N, IGNORED)
    _scale(gradients.hidden, factor_N, call.backend)
    _scale(gradients.weight, factor, call.backend, out)
    _scale(gradients.bias, factor, call.backend)
    if out is not None:
        gradients = gradients._replace(weight=None if gradients.weight is None else out)  # frees forward's d_weight
    if may_differ:
        _recompute_weight_gradients(operands, gradients._replace(ids_N=ids_N), upstream, task)
    return gradients.hidden, gradients.weight if out is None else None, *call.spec.logits.listed(bias=gradients.bias)


def _common_factor(upstream_N: Tensor, gradients: _ForwardGradients) -> tuple[Tensor, Tensor]:
    """Return the common factor of the upstream gradients to ``expected_N``, or 0, and whether there is none."""
    has_label_N = gradients.ids_N >= 0
    size_N = torch.where(has_label_N, gradients.expected_N.abs(), -1.0)
    largest = size_N.argmax(0, keepdim=True)
    factor = upstream_N.index_select(0, largest) / gradients.expected_N.index_select(0, largest)
    # An upstream gradient of 0 matches a weight of MIN_WEIGHT. NaN and infinity match nothing.
    rounding = 8 * torch.finfo(upstream_N.dtype).eps
    tolerance_N = torch.where(upstream_N == 0, 2 * MIN_WEIGHT, rounding * size_N)
    close_N = (upstream_N - factor * gradients.expected_N).abs() <= factor.abs() * tolerance_N
    differs = ~torch.where(has_label_N, close_N, True).all()
    return torch.where(differs, 0.0, factor).view(()), differs


def _recompute_weight_gradients(
    operands: tuple[Tensor, Tensor, list[Tensor]],
    gradients: _ForwardGradients,
    upstream_N: Tensor,
    task: Task,
) -> None:
    hidden, weight, head = operands
    backend, spec = named(task.call.way.backend), task.call.spec
    with without_autocast(hidden.device.type):
        hidden = Distributed(task.call.layout).whole(hidden)
        x = operands_of(hidden, weight, head, gradients.ids_N, spec)
        # Logits of a token without a label count as 0, so its maximum must not be far below 0.
        softmax = Softmax(*(torch.where(x.ids >= 0, numbers_N, 0.0) for numbers_N in gradients.softmax[:2]))
        upstream = task.terms.gradients(upstream_N, softmax.max + softmax.log_sum)
        grads = Grads(
            False, gradients.weight is not None, gradients.bias is not None, gradients.weight, often_empty=True
        )
        d_bias = backend.run(backend.gradients, x, softmax, upstream, backend.nothing_saved(x), grads, spec)[2]
        if gradients.bias is not None and d_bias is not None:
            gradients.bias.add_(d_bias)


def _scale(values: Tensor | None, factor: Tensor, backend: str, out: Tensor | None = None) -> None:
    if values is None:
        return
    if backend != "torch":
        from cce_dist.kernels.d_weight import scale

        scale(values, factor, out)
        return
    rows = max(1, _SCALED // max(1, values[:1].nbytes))  # at a time, because there are temporary copies
    for first in range(0, len(values), rows):
        part = slice(first, first + rows)
        scaled = times(values[part], factor[part, None] if factor.dim() else factor)
        values[part].copy_(scaled) if out is None else out[part].add_(scaled)


def times(values: Tensor, factor: Tensor) -> Tensor:
    """Return the product in at least fp32, with 0 * inf = 0."""
    return torch.where((values == 0) | (factor == 0), 0.0, widened(values) * factor)


def expectation(expected_N: Tensor | None, ids_N: Tensor, divisor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the upstream gradients, [N] in the dtype of the losses, that forward computes the gradients for."""
    if divisor is not None:
        return (1.0 / divisor.to(dtype)).expand(len(ids_N))
    if expected_N is None:
        return torch.ones((), dtype=dtype, device=ids_N.device).expand(len(ids_N))
    expected_N = expected_N.double().nan_to_num(0.0, 0.0, 0.0)  # float64 and int64 weights may overflow fp32
    expected_N = torch.where(ids_N >= 0, expected_N, 0.0)
    largest = expected_N.abs().amax() if len(ids_N) else expected_N.sum()
    # If all weights are 0, expect equal upstream gradients.
    expected_N = torch.where(largest > 0, expected_N / largest, 1.0).to(dtype)
    # Backward divides by the expected gradient of a token, so it must not be 0.
    return torch.where(expected_N.abs() < MIN_WEIGHT, MIN_WEIGHT, expected_N)


def run(
    hidden: Tensor, weight: Tensor, head: list[Tensor], labels: Tensor, task: Task, wanted: Sequence[bool]
) -> tuple[Tensor, _ForwardGradients]:
    """Compute the loss and its gradients. ``wanted``: which of hidden states, weight and head's tensors get a gradient."""
    terms, divisor, expected_N, call = task
    ranks, rows = Distributed(call.layout), call.way.groups.rows
    # A group is computed as if this rank were alone, because d_hidden is summed over ranks only after the whole group.
    backend, want = named(call.way.backend), call.spec.want.of_tokens()
    spec = call.spec._replace(alone=True, once=True, want=want)
    call = call._replace(spec=spec)
    x = operands_of(hidden, weight, head, labels, spec)
    with without_autocast(hidden.device.type):
        ids = backend.ordered_ids(labels, spec.ignore_index, spec.vocab_size)[0]
        check_labels(call, labels, ids)
        hidden = ranks.whole(hidden)
        compile_ahead(backend, spec, x._replace(hidden=hidden[:rows], ids=labels[:rows]), None, ranks.size)
        x = x._replace(hidden=hidden, ids=ids)
        loss_N = torch.empty(x.num_tokens, dtype=accumulator(hidden.dtype), device=hidden.device)
        softmax = Softmax(torch.empty_like(loss_N), torch.empty_like(loss_N))
        d_hidden = hidden.new_empty(hidden.shape) if wanted[0] else None
        has_low = call.way.groups.low and wanted[1] and call.backend != "torch" and weight.dtype == torch.bfloat16
        low = weight.new_empty(weight.shape, dtype=torch.int8) if has_low else None
        upstream_N = expectation(expected_N, ids, divisor, loss_N.dtype)
        d_weight = d_bias = None
        hidden_sum = ranks.hidden_sum(x.num_tokens, rows) if d_hidden is not None else None
        for first in range(0, max(x.num_tokens, 1), rows):
            part = slice(first, min(first + rows, x.num_tokens))
            group = x.of_tokens(part, hidden[part])
            out = None if d_hidden is None else d_hidden[part]
            grads = Grads(wanted[0], wanted[1], any(wanted[2:]), d_weight, hidden_out=out, weight_low=low)
            outputs = loss_N[part], Softmax(softmax.max[part], softmax.log_sum[part])
            found = _finish(group, terms.of_tokens(part), upstream_N[part], outputs, grads, call, ranks)
            d_weight = found[0] if d_weight is None else d_weight  # later groups add to this tensor
            d_bias = found[1] if d_bias is None or found[1] is None else d_bias + found[1]
            if hidden_sum is not None and d_hidden is not None:
                hidden_sum.start(d_hidden[: part.stop])
        if terms.token is not None:
            terms.token.check_gradient()
        if hidden_sum is not None:
            d_hidden = hidden_sum.wait()
        if d_bias is not None and x.head.bias is not None:
            d_bias = d_bias.to(x.head.bias.dtype)
        gradients = _ForwardGradients(d_hidden, d_weight, d_bias, ids, upstream_N, softmax)
        return loss_N if divisor is None else loss_N.sum() / divisor, gradients


def _finish(
    x: Operands, terms: Terms, expected_N: Tensor, outputs: tuple[Tensor, Softmax], grads: Grads, call: Call,
    ranks: Distributed,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Compute one group of tokens: write its outputs and d_hidden, and add its part to d_weight if there is one.

    The exponentials of the group are freed at the end. ``outputs`` are the losses, [N], and the softmax without entropy. Return
    a new d_weight, and d_bias; None for what is not wanted or not new.
    """
    backend, spec = named(call.way.backend), call.spec
    if ranks.size == 1:
        found, merged, _, saved = backend.run(backend.losses_alone, x, spec)
    else:
        stats_KN, saved = backend.run(backend.statistics, x, ranks.gather, spec)
        found, merged = backend.run(backend.token_losses, ranks.gather(stats_KN), x, spec)
    if terms.token is None:
        losses_N = terms.losses(found.nll, found.lse, found.uniform)
        upstream = terms.gradients(expected_N, found.lse)
    else:
        losses_N, upstream = terms.token.differentiated(found.nll, found.entropy, x.ids, expected_N)
    loss_N, softmax = outputs
    loss_N.copy_(losses_N)
    softmax.max.copy_(merged.max)
    softmax.log_sum.copy_(merged.log_sum)
    softmax = softmax._replace(entropy=None if upstream.entropy is None else merged.entropy)
    _, d_weight, d_bias = backend.run(backend.gradients, x, softmax, upstream, saved, grads, spec)
    return d_weight, d_bias


# A graph of torch.compile takes the loss and its gradients as one operator. Its forward computes the gradients, group by group
# or by running forward and backward one after the other. Its backward multiplies them by the upstream gradient.


def _by_operator(given: Given, divisor: Tensor | None) -> Tensor:
    x, terms, options, call = given.x, given.terms, given.options, given.call
    call = call._replace(way=Way())
    assert not isinstance(terms.z_loss_weight, Tensor)
    numbers = numbers_of(options.logit_scale, options.softcap, terms.z_loss_weight, terms.label_smoothing)
    head = [*x.head.tensors.values()]
    want = [tensor.requires_grad for tensor in (x.hidden, x.weight, *head)]
    return torch.ops.cce_dist.loss_and_gradients(
        x.hidden, x.weight, head, x.ids, divisor, terms.weight_N, concrete(terms.z_loss_weight),
        concrete(terms.label_smoothing), want, *flat(call), numbers,
    )[0]  # fmt: skip


def _loss_and_gradients(
    hidden: Tensor, weight: Tensor, head: list[Tensor], labels: Tensor, divisor: Tensor, weight_N: Tensor | None,
    z_loss_weight: float, label_smoothing: float, want: list[bool], *given: Any,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """Compute the loss, 0-d fp32, and its wanted gradients for an upstream gradient of 1."""
    *flat_call, numbers = given
    call = build(Call, iter(flat_call))
    if numbers is not None:
        call, (z_loss_weight, label_smoothing) = call.with_numbers(numbers[:2]), numbers[2:].tolist()
    terms = Terms(z_loss_weight, label_smoothing, weight_N)
    num_ranks = Distributed(call.layout).size
    call = call.decided(hidden, labels.shape[0], num_ranks, call.where(hidden, num_ranks, "number"))
    if call.way.passes == "one":
        loss, gradients = run(hidden, weight, head, labels, Task(terms, divisor, None, call), want)
        d_hidden, d_weight, d_bias = gradients.hidden, gradients.weight, gradients.bias
    else:
        call = call._replace(spec=call.spec._replace(want=call.spec.want.of_tokens()))
        nll_N, lse_N, _, uniform_nll_N, *_, saved = run_forward(hidden, weight, head, labels, None, call)
        loss = terms.losses(nll_N, lse_N, uniform_nll_N).sum() / divisor
        d_losses = [*terms.gradients(expectation(None, labels, divisor, nll_N.dtype), lse_N)][:NUM_LOSSES]
        d_hidden, d_weight, d_bias = run_backward(d_losses, hidden, weight, head, saved, None, want, call)
    found = (d_hidden, d_weight, *head_gradients(d_bias, head, want[2:]))
    d_hidden, d_weight, *d_head = (hidden.new_empty(0) if x is None else x for x in found)
    return loss, d_hidden, d_weight, d_head


def _loss_and_gradients_fake(hidden: Tensor, weight: Tensor, head: list[Tensor], *others: Any) -> Any:
    want = next(value for value in others if isinstance(value, list))
    d_hidden, d_weight, *d_head = (
        torch.empty_like(x) if wanted else hidden.new_empty(0)
        for x, wanted in zip((hidden, weight, *head), want, strict=True)
    )
    return hidden.new_empty((), dtype=accumulator(hidden.dtype)), d_hidden, d_weight, d_head


def _save_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    _, d_hidden, d_weight, d_head = output
    ctx.save_for_backward(d_hidden, d_weight, *d_head)
    ctx.mark_non_differentiable(d_hidden, d_weight, *d_head)
    ctx.num_inputs = len(inputs)


def _gradients_times(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Any, ...]:
    want_hidden, want_weight, want_head = ctx.needs_input_grad[:3]
    d_hidden, d_weight, *d_head = (
        times(grad, upstream).to(grad.dtype) if wanted else None
        for grad, wanted in zip(ctx.saved_tensors, (want_hidden, want_weight, *want_head), strict=True)
    )
    return d_hidden, d_weight, d_head, *(None,) * (ctx.num_inputs - 3)


define(
    "loss_and_gradients",
    "(Tensor hidden, Tensor weight, Tensor[] head, Tensor labels, Tensor divisor, Tensor? class_weight, "
    f"float z_loss_weight, float label_smoothing, bool[] want, {', '.join(schema(Call))}, Tensor? numbers) "
    "-> (Tensor, Tensor, Tensor, Tensor[])",
    _loss_and_gradients,
    _loss_and_gradients_fake,
    _gradients_times,
    _save_gradients,
)
