"""A loss with its gradients made in forward, a group of tokens at a time: three products, whatever the budget.

A token's gradient waits for other tokens in one place alone, the sum over tokens in dC. So where the exponentials of all tokens
do not fit the budget, one group of tokens is finished before the next begins: its exponentials with the log-sum-exp, its
statistics merged over the ranks, its dE, and its part of dC, which is added to the groups before. Nothing is computed twice.
More groups cost one more read and write of dC each. Where they are many, dC has 8 bits more while it is added up.

The upstream gradient is not known in forward. The upstream gradient of a reduced loss is a scalar. Backward multiplies by it,
and the kernel returns early if it is 1. The upstream gradients of per-token losses are expected to be proportional to weights.
Backward multiplies d_hidden of each token by the token's own upstream gradient. It multiplies d_weight by the common factor if
the device finds one. Otherwise it sets d_weight to 0 and computes the logits' gradients again for d_weight alone, with launches
that return early in the first case. A second backward makes all gradients again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import maybe_current_level
from torch.autograd import forward_ad

from cce_dist import checks, decide, merge
from cce_dist.agree import label_error
from cce_dist.autograd import differentiable_once, is_unobserved, refuse_transforms, replayed, without_autocast
from cce_dist.call import Call
from cce_dist.decide import Where
from cce_dist.kernels import IGNORED, Grads, Operands, Softmax
from cce_dist.kernels.backends import named
from cce_dist.kernels.dry_run import compile_ahead
from cce_dist.kernels.memory import Groups
from cce_dist.kernels.precision import accumulator, widened
from cce_dist.op import decided, operands_of, sum_group_of

# Expected weights of a token, relative to the largest: the least, which stands for 0, and what counts as rounding.
LEAST_WEIGHT, ROUNDING = 2.0**-40, 2.0**-20
_FORCED: Groups | None = None


@contextmanager
def of_rows(rows: int | None, low: bool = False) -> Iterator[None]:
    """Test hook: force groups of so many tokens, on any backend and at any size. None restores the default."""
    global _FORCED
    before, _FORCED = _FORCED, None if rows is None else Groups(checks.integer("rows", rows, 1), low)
    try:
        yield
    finally:
        _FORCED = before


def are_forced() -> bool:
    """Whether a test has forced groups."""
    return _FORCED is not None


def decided_now(call: Call, x: Operands, num_ranks: int, where: Where) -> Call:
    """Return the call with its way, as ``op.decided`` does, by the state of the process too.

    There are two passes inside a transform of torch.func, and where a dispatch mode or a tensor subclass looks at operators.
    A test may force groups.
    """
    in_transform = maybe_current_level() is not None or forward_ad._current_level >= 0
    if in_transform or not is_unobserved(x.hidden, x.weight):
        where = where._replace(upstream="unknown")
    call = decided(call, x.hidden, x.num_tokens, num_ranks, where)
    if _FORCED is None or not decide.may_take_one_pass(call.way.backend, call.spec, where):
        return call
    return call._replace(way=call.way._replace(passes="one", groups=_FORCED))


class Terms(NamedTuple):
    """How a token's loss is built from its negative log-likelihood.

    A token's loss is ``weight_N * ((1 - label_smoothing) * nll + label_smoothing * uniform_nll + z_loss_weight * lse^2)``. A
    reduced loss is the sum of the tokens' losses, divided by the divisor.
    """

    divisor: float | Tensor | None  # None: the loss is one for each token
    z_loss_weight: float | Tensor = 0.0  # no gradient
    label_smoothing: float = 0.0
    weight_N: Tensor | None = None  # fp32, of the labels' classes, 0 where the label is ignored; None: 1

    def losses(self, nll_N: Tensor, lse_N: Tensor, uniform_nll_N: Tensor) -> Tensor:
        """Return the tokens' losses before they are divided."""
        if self.label_smoothing:
            nll_N = (1 - self.label_smoothing) * nll_N + self.label_smoothing * uniform_nll_N
        if isinstance(self.z_loss_weight, Tensor) or self.z_loss_weight:
            nll_N = nll_N + self.z_loss_weight * lse_N.square()
        return nll_N if self.weight_N is None else nll_N * self.weight_N

    def gradients(self, upstream_N: Tensor, lse_N: Tensor) -> list[Tensor | None]:
        """Turn the gradients of per-token losses into gradients of nll, lse, target logit, uniform nll and entropy."""
        d_loss_N = upstream_N if self.weight_N is None else upstream_N * self.weight_N
        d_lse_N = d_uniform_N = None
        if isinstance(self.z_loss_weight, Tensor) or self.z_loss_weight:
            d_lse_N = d_loss_N * (2.0 * self.z_loss_weight * lse_N)
        d_nll_N = d_loss_N
        if self.label_smoothing:
            d_nll_N, d_uniform_N = (1 - self.label_smoothing) * d_loss_N, self.label_smoothing * d_loss_N
        return [d_nll_N, d_lse_N, None, d_uniform_N, None]


def loss(x: Operands, terms: Terms, call: Call, expected_N: Tensor | None = None,
         grad_weight_out: Tensor | None = None) -> Tensor:  # fmt: skip
    """Return the sum of the tokens' losses, divided: 0-d fp32, differentiable once; without a divisor, the losses [N].

    Args:
        x: The operands; the labels in place of their ids. Under sequence parallelism hidden states are this rank's slice.
        terms: What the loss is made of.
        call: What is computed, in one pass.
        expected_N: [N] what upstream gradients of the losses are expected to be in proportion to; None: all are equal.
        grad_weight_out: Buffer that backward adds d_weight to.
    """
    if terms.divisor is not None:
        terms = terms._replace(divisor=on_device(terms.divisor, x.hidden.device))
    given = x.ids, grad_weight_out, terms, expected_N, call
    return _InGroups.apply(given, x.hidden, x.weight, *x.head.tensors.values())  # type: ignore[return-value]


def on_device(divisor: float | Tensor, device: torch.device) -> Tensor:
    """Return a divisor as a 0-d tensor there."""
    return divisor.to(device) if isinstance(divisor, Tensor) else torch.full((), float(divisor), device=device)


class _Made(NamedTuple):
    """Gradients for the upstream gradient ``expected_N``, None where none is wanted, and what makes them again."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    ids_N: Tensor
    expected_N: Tensor
    softmax: Softmax


class _InGroups(torch.autograd.Function):
    """One pass, as autograd sees it. Autograd tracks arguments, not lists, so the head's tensors come last."""

    @staticmethod
    def forward(ctx, given: tuple[Any, ...], hidden: Tensor, weight: Tensor, *head: Tensor) -> Tensor:
        labels, ctx.grad_weight_out, terms, expected_N, call = given
        ctx.save_for_backward(labels, hidden, weight, *head)
        ctx.told = terms, expected_N, call, ctx.needs_input_grad[1:]
        # No saved tensors: the first backward takes these away, scales them in place, and leaves them to the parameters.
        found, ctx.made = run(hidden, weight, [*head], labels, *ctx.told)
        return found

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Any:
        # First, and once: a checkpoint recomputes its forward here, and hands out each tensor a single time.
        labels, hidden, weight, *head = ctx.saved_tensors
        refuse_transforms("linear_cross_entropy", grads[0])
        with torch.no_grad():
            if ctx.made is None:
                ctx.made = run(hidden, weight, head, labels, *ctx.told)[1]
            found = _times_upstream(ctx, (hidden, weight, head), widened(grads[0]))
        if torch.is_grad_enabled():
            nothing = grads[0].new_empty(0)
            there = [nothing if tensor is None else tensor for tensor in found]
            once = differentiable_once("linear_cross_entropy", there, (hidden, weight, *head, grads[0]))
            found = [None if tensor is None else one for tensor, one in zip(found, once, strict=True)]
        return None, *found


def _times_upstream(
    ctx: Any, operands: tuple[Tensor, Tensor, list[Tensor]], upstream: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients of hidden states, weight and head, in the storage of those that were made, and take these away."""
    made, ctx.made = ctx.made, None
    (terms, _, call, *_), out = ctx.told, ctx.grad_weight_out
    ids_N, factor_N, factor, anew = made.ids_N, upstream, upstream, False
    if terms.divisor is None and len(ids_N) == 0:
        factor_N = factor = torch.ones((), device=upstream.device)  # All are zeros.
    elif terms.divisor is None:
        factor_N = upstream / made.expected_N
        group = merge.resolve(call.layout.group_name)
        if call.layout.sequence_parallel and group is not None:
            factor_N = factor_N.chunk(group.size())[group.rank()]
        anew = made.weight is not None or made.bias is not None
    if anew:
        factor, differs = _common_factor(upstream, made)
        ids_N = torch.where(differs, ids_N, IGNORED)
    _scale(made.hidden, factor_N, call.backend)
    _scale(made.weight, factor, call.backend, out)
    _scale(made.bias, factor, call.backend)
    if out is not None:
        made = made._replace(weight=None if made.weight is None else out)  # The other's memory is free.
    if anew:
        _add_anew(operands, made._replace(ids_N=ids_N), upstream, terms, call)
    return made.hidden, made.weight if out is None else None, *call.spec.logits.listed(bias=made.bias)


def _common_factor(upstream_N: Tensor, made: _Made) -> tuple[Tensor, Tensor]:
    """Return the common factor of the upstream gradients, and whether they differ from it; the factor is 0 if they do."""
    has_label_N = made.ids_N >= 0
    size_N = torch.where(has_label_N, made.expected_N.abs(), -1.0)
    largest = size_N.argmax(0, keepdim=True)
    factor = upstream_N.index_select(0, largest) / made.expected_N.index_select(0, largest)
    # LEAST_WEIGHT stands for 0 where the upstream gradient is 0. A NaN is not close to anything, nor is an infinity.
    reach_N = torch.where(upstream_N == 0, 2 * LEAST_WEIGHT, ROUNDING * size_N)
    close_N = (upstream_N - factor * made.expected_N).abs() <= factor.abs() * reach_N
    differs = ~torch.where(has_label_N, close_N, True).all()
    return torch.where(differs, 0.0, factor).view(()), differs


def _add_anew(
    operands: tuple[Tensor, Tensor, list[Tensor]], made: _Made, upstream_N: Tensor, terms: Terms, call: Call
) -> None:
    """Add the gradients of weight and bias; launches end at once where all tokens are without a label."""
    hidden, weight, head = operands
    group = merge.resolve(call.layout.group_name)
    backend, spec = named(call.way.backend), call.spec
    with without_autocast(hidden.device.type):
        if call.layout.sequence_parallel and group is not None:
            hidden = merge.SequenceGather(hidden, group).wait()
        x = operands_of(hidden, weight, head, made.ids_N, spec)
        # Logits without a label count as 0, and shall not be compared with a maximum that is far below.
        softmax = Softmax(*(torch.where(x.ids >= 0, numbers_N, 0.0) for numbers_N in made.softmax[:2]))
        d_losses = terms.gradients(upstream_N, softmax.max + softmax.log_sum)
        coef_4N = backend.coefficients(d_losses, x.ids, spec.vocab_size)
        # A pass without gradients keeps no exponentials.
        saved_ = backend.saved_of_slices(x, spec._replace(want=spec.want._replace(grad=False)))
        grads = Grads(False, made.weight is not None, made.bias is not None, made.weight, often_empty=True)
        d_bias = backend.gradients(x, softmax, coef_4N, saved_ or [], grads, spec)[2]
        if made.bias is not None and d_bias is not None:
            made.bias.add_(d_bias)


def _scale(values: Tensor | None, factor: Tensor, backend: str, out: Tensor | None = None) -> None:
    if values is None:
        return
    if backend != "torch":
        from cce_dist.kernels.scale import scale

        scale(values, factor, out)
        return
    factor = factor[:, None] if factor.dim() else factor
    scaled = times(values, factor)
    values.copy_(scaled) if out is None else out.add_(scaled)


def times(values: Tensor, factor: Tensor) -> Tensor:
    """Return the product in fp32, in which 0 times an infinity is 0."""
    return torch.where((values == 0) | (factor == 0), 0.0, widened(values) * factor)


def expectation(expected_N: Tensor | None, ids_N: Tensor, divisor: float | Tensor | None) -> Tensor:
    """Return the upstream gradients, [N] fp32, that gradients are made for."""
    if divisor is not None:
        return (1.0 / on_device(divisor, ids_N.device).float()).expand(len(ids_N))
    if expected_N is None:
        return torch.ones((), device=ids_N.device).expand(len(ids_N))
    expected_N = expected_N.double().nan_to_num(0.0, 0.0, 0.0)  # fp32 does not hold weights of every dtype
    expected_N = torch.where(ids_N >= 0, expected_N, 0.0)
    largest = expected_N.abs().amax() if len(ids_N) else expected_N.sum()
    # Weights that are all 0 are in proportion to nothing, so equal upstream gradients are expected instead.
    expected_N = torch.where(largest > 0, expected_N / largest, 1.0).float()
    # d_hidden of a token is multiplied by its own upstream gradient, so none is made for 0.
    return torch.where(expected_N.abs() < LEAST_WEIGHT, LEAST_WEIGHT, expected_N)


def run(
    hidden: Tensor, weight: Tensor, head: list[Tensor], labels: Tensor, terms: Terms, expected_N: Tensor | None,
    call: Call, wanted: tuple[bool, ...],
) -> tuple[Tensor, _Made]:  # fmt: skip
    """Return the loss and its gradients, group by group. ``wanted``: which of hidden states, weight and head get a gradient."""
    layout, group, rows = call.layout, merge.resolve(call.layout.group_name), call.way.groups.rows
    # The sum over ranks begins when a group is done, and nothing of the group waits for it.
    backend, spec = named(call.way.backend), call.spec._replace(alone=True)
    x = operands_of(hidden, weight, head, labels, spec)
    call_of_group = call._replace(spec=spec)
    with without_autocast(hidden.device.type):
        ids = backend.label_ids(labels, spec.ignore_index, spec.vocab_size)
        if call.debug or not labels.is_cuda:
            error = label_error(call.argument, labels, ids, spec.vocab_size, spec.ignore_index)
            if error:
                raise IndexError(error)
        if layout.sequence_parallel and group is not None:
            hidden = merge.SequenceGather(hidden, group).wait()
        compile_ahead(backend, spec, x._replace(hidden=hidden[:rows], ids=labels[:rows]), None)
        x = x._replace(hidden=hidden, ids=ids)
        loss_N = torch.empty(x.num_tokens, dtype=accumulator(hidden.dtype), device=hidden.device)
        softmax = Softmax(torch.empty_like(loss_N), torch.empty_like(loss_N))
        d_hidden = hidden.new_empty(hidden.shape) if wanted[0] else None
        has_low = call.way.groups.low and wanted[1] and call.backend != "torch" and weight.dtype == torch.bfloat16
        low = weight.new_empty(weight.shape, dtype=torch.int8) if has_low else None
        made = _Made(d_hidden, None, None, ids, expectation(expected_N, ids, terms.divisor), softmax)
        sum_group = sum_group_of(layout, group)
        hidden_sum = None
        if sum_group is not None and made.hidden is not None:
            dtype = getattr(torch, layout.reduce_dtype) if layout.reduce_dtype else None
            hidden_sum = merge.HiddenGradSum(sum_group, layout.sequence_parallel, dtype, x.num_tokens, rows)
        for first in range(0, max(x.num_tokens, 1), rows):
            part = slice(first, min(first + rows, x.num_tokens))
            of_part = [made.expected_N, *softmax[:2], loss_N, terms.weight_N, made.hidden]
            of_part = [tensor if tensor is None else tensor[part] for tensor in of_part]
            tensors = hidden[part], weight, head, ids[part], of_part, [made.weight, low]
            numbers = [terms.z_loss_weight, terms.label_smoothing]
            d_weight, d_bias = _finish(*tensors, numbers, wanted[1:], call_of_group)
            if made.weight is None and wanted[1]:  # Later groups add to it by themselves.
                made = made._replace(weight=d_weight)
            if spec.logits.named(wanted[2:]).get("bias", False):
                made = made._replace(bias=d_bias if made.bias is None else made.bias + d_bias)
            if hidden_sum is not None and made.hidden is not None:
                hidden_sum.start(made.hidden[: part.stop])
        if hidden_sum is not None:
            made = made._replace(hidden=hidden_sum.wait())
        if made.bias is not None and x.head.bias is not None:
            made = made._replace(bias=made.bias.to(x.head.bias.dtype))
        return loss_N if terms.divisor is None else loss_N.sum() / terms.divisor, made


def _finished(
    hidden: Tensor, weight: Tensor, head: list[Tensor], ids_N: Tensor, of_tokens: list[Tensor | None],
    d_weight: list[Tensor | None], numbers: list[Any], wanted: tuple[bool, ...], call: Call,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Finish the tokens of a group: write their softmax, losses and d_hidden, and add to d_weight if there is one.

    The exponentials end with the call. ``of_tokens`` are the expected upstream gradients, the maximum and the logarithm of the
    sum, the losses, the weights of classes and d_hidden. Beside d_weight stands what 16 bits of it do not hold. ``numbers`` are
    the weight of the z-loss and the label smoothing.

    Returns:
        A new d_weight, and d_bias; an empty tensor for what is not wanted, or not new.
    """
    expected_N, max_N, log_sum_N, loss_N, weight_N, d_hidden = of_tokens
    assert expected_N is not None and max_N is not None and log_sum_N is not None and loss_N is not None
    group, x = merge.resolve(call.layout.group_name), operands_of(hidden, weight, head, ids_N, call.spec)
    z_loss_weight, label_smoothing = numbers
    backend, spec = named(call.way.backend), call.spec
    terms = Terms(None, z_loss_weight, label_smoothing, weight_N)
    # Without a filter nobody merges a bound.
    stats_KN, saved = backend.statistics(x, spec, lambda stats_3N: stats_3N[0])
    nll_N, lse_N, _, uniform_nll_N, *_, merged = backend.token_losses(merge.gather_stats(stats_KN, group), ids_N, spec)
    loss_N.copy_(terms.losses(nll_N, lse_N, uniform_nll_N))
    max_N.copy_(merged[0])
    log_sum_N.copy_(merged[1])
    coef_4N = backend.coefficients(terms.gradients(expected_N, lse_N), ids_N, spec.vocab_size)
    weight_out, weight_low = d_weight
    grads = Grads(
        d_hidden is not None,
        wanted[0],
        spec.logits.named(wanted[1:]).get("bias", False),
        weight_out,
        hidden_out=d_hidden,
        weight_low=weight_low,
    )
    _, made, d_bias = backend.gradients(x, Softmax(max_N, log_sum_N), coef_4N, saved, grads, spec)
    nothing = hidden.new_empty(0)
    return nothing if made is None else made, nothing if d_bias is None else d_bias


_finish = replayed(_finished)
