"""A loss whose forward computes its gradients, one group of tokens after another: three matrix products at any budget.

Tokens depend on each other only in the sum over tokens of d_weight. So if the exponentials of all tokens do not fit the budget,
forward finishes one group of tokens before it begins another: exponentials and log-sum-exp, statistics merged over the ranks,
d_hidden, and the group's part of d_weight, which is added to the sum of the previous groups. Nothing is computed twice. Each
group reads and writes d_weight once more. With many groups, the sum of d_weight has 8 additional bits.

Forward does not know the upstream gradient. The upstream gradient of a reduced loss is a scalar: backward multiplies by it, and
the kernel returns early if it is 1. The upstream gradients of per-token losses are expected to be proportional to weights:
backward multiplies d_hidden of each token by the token's own upstream gradient, and d_weight by the common factor if the device
finds one. Otherwise it sets d_weight to 0 and recomputes the logits' gradients for d_weight alone, by launches that return
early if there is a common factor. A second backward recomputes everything.
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
from cce_dist.autograd import differentiable_once, is_unobserved, is_wanted, refuse_transforms, without_autocast
from cce_dist.call import Call
from cce_dist.decide import Where
from cce_dist.kernels import IGNORED, Grads, Operands, Softmax, Upstream
from cce_dist.kernels.backends import named
from cce_dist.kernels.dry_run import compile_ahead
from cce_dist.kernels.memory import Groups
from cce_dist.kernels.precision import accumulator, widened
from cce_dist.op import decided, operands_of, sum_group_of
from cce_dist.token_loss import TokenLoss

# The minimum of expected weights, relative to the largest; it stands for 0.
MIN_WEIGHT = 2.0**-40
_FORCED: Groups | None = None


@contextmanager
def of_rows(rows: int | None, low: bool = False) -> Iterator[None]:
    """Test hook: force groups of ``rows`` tokens, on any backend and at any size. None restores the default."""
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
    """Decide the way of a call by ``op.decided`` and by the state of the process.

    A transform of torch.func, a dispatch mode and tensor subclasses need two passes. A test may force groups.
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
    reduced loss is the sum of the tokens' losses, divided by the divisor. With ``token`` the caller's function computes the
    tokens' losses.
    """

    divisor: float | Tensor | None  # None: losses are per token
    z_loss_weight: float | Tensor = 0.0  # no gradient
    label_smoothing: float = 0.0
    weight_N: Tensor | None = None  # fp32 class weights of the labels, 0 for ignored labels; None: 1
    token: TokenLoss | None = None

    def of_tokens(self, part: slice) -> Terms:
        weight_N = None if self.weight_N is None else self.weight_N[part]
        return self._replace(weight_N=weight_N, token=None if self.token is None else self.token.of_tokens(part))

    def losses(self, nll_N: Tensor, lse_N: Tensor, uniform_nll_N: Any) -> Tensor:
        """Return the tokens' losses before the division."""
        if self.label_smoothing:
            nll_N = (1 - self.label_smoothing) * nll_N + self.label_smoothing * uniform_nll_N
        if isinstance(self.z_loss_weight, Tensor) or self.z_loss_weight:
            nll_N = nll_N + self.z_loss_weight * lse_N.square()
        return nll_N if self.weight_N is None else nll_N * self.weight_N

    def gradients(self, upstream_N: Tensor, lse_N: Tensor) -> Upstream:
        """Turn the gradients of per-token losses into gradients of nll, lse and the uniform distribution's nll."""
        d_loss_N = upstream_N if self.weight_N is None else upstream_N * self.weight_N
        d_lse_N = d_uniform_N = None
        if isinstance(self.z_loss_weight, Tensor) or self.z_loss_weight:
            d_lse_N = d_loss_N * (2.0 * self.z_loss_weight * lse_N)
        d_nll_N = d_loss_N
        if self.label_smoothing:
            d_nll_N, d_uniform_N = (1 - self.label_smoothing) * d_loss_N, self.label_smoothing * d_loss_N
        return Upstream(nll=d_nll_N, lse=d_lse_N, uniform=d_uniform_N)


def loss(x: Operands, terms: Terms, call: Call, expected_N: Tensor | None = None,
         grad_weight_out: Tensor | None = None) -> Tensor:  # fmt: skip
    """Return the reduced loss, 0-d fp32, or without a divisor the per-token losses, [N]. Differentiable once.

    Args:
        x: The operands, with the labels as its ids. Under sequence parallelism hidden states are this rank's slice.
        terms: How the loss is built from negative log-likelihoods.
        call: The call. Its way takes one pass.
        expected_N: [N] weights that the upstream gradients are expected to be proportional to; None: equal weights.
        grad_weight_out: Buffer that backward adds d_weight to.
    """
    if terms.divisor is not None:
        terms = terms._replace(divisor=on_device(terms.divisor, x.hidden))
    given = x.ids, grad_weight_out, terms, expected_N, call
    return _InGroups.apply(given, x.hidden, x.weight, *x.head.tensors.values())  # type: ignore[return-value]


def on_device(divisor: float | Tensor, hidden: Tensor) -> Tensor:
    """Return a divisor as a 0-d tensor on the device of ``hidden``; a number in the dtype of its losses."""
    if isinstance(divisor, Tensor):
        return divisor.to(hidden.device)
    return torch.full((), float(divisor), dtype=accumulator(hidden.dtype), device=hidden.device)


class _ForwardGradients(NamedTuple):
    """Gradients for the upstream gradient ``expected_N``, None if not wanted, and what recomputing them needs."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    ids_N: Tensor
    expected_N: Tensor
    softmax: Softmax


class _InGroups(torch.autograd.Function):
    """The autograd function of one pass. Autograd does not look into lists, so the head's tensors come last."""

    @staticmethod
    def forward(ctx, given: tuple[Any, ...], hidden: Tensor, weight: Tensor, *head: Tensor) -> Tensor:
        labels, ctx.grad_weight_out, terms, expected_N, call = given
        # A second backward reads the token inputs again, so autograd watches them, too.
        inputs = () if terms.token is None else terms.token.inputs
        ctx.save_for_backward(labels, hidden, weight, *head, *inputs)
        ctx.run_args = terms, expected_N, call, ctx.needs_input_grad[1:]
        # The gradients are no saved tensors: the first backward scales them in place and returns them to autograd.
        loss, ctx.gradients = run(hidden, weight, [*head], labels, *ctx.run_args)
        return loss

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Any:
        # Read saved_tensors first and only once: a checkpoint recomputes its forward here, and returns each tensor once.
        labels, hidden, weight, *others = ctx.saved_tensors
        head = others[: len(ctx.needs_input_grad) - 3]
        refuse_transforms("linear_cross_entropy", grads[0])
        with torch.no_grad():
            if ctx.gradients is None:
                ctx.gradients = run(hidden, weight, head, labels, *ctx.run_args)[1]
            if ctx.grad_weight_out is not None and ctx.gradients.weight is not None and not is_wanted(weight):
                ctx.gradients = ctx.gradients._replace(weight=None)
            found = _times_upstream(ctx, (hidden, weight, head), widened(grads[0]))
        if torch.is_grad_enabled():
            nothing = grads[0].new_empty(0)
            dense = [nothing if tensor is None else tensor for tensor in found]
            once = differentiable_once("linear_cross_entropy", dense, (hidden, weight, *head, grads[0]))
            found = [None if tensor is None else grad for tensor, grad in zip(found, once, strict=True)]
        return None, *found


def _times_upstream(
    ctx: Any, operands: tuple[Tensor, Tensor, list[Tensor]], upstream: Tensor
) -> tuple[Tensor | None, ...]:
    """Scale forward's gradients in place by the upstream gradient, return them, and remove them from ``ctx``."""
    gradients, ctx.gradients = ctx.gradients, None
    (terms, _, call, *_), out = ctx.run_args, ctx.grad_weight_out
    ids_N, factor_N, factor, may_differ = gradients.ids_N, upstream, upstream, False
    if terms.divisor is None and len(ids_N) == 0:
        factor_N = factor = torch.ones((), device=upstream.device)  # all gradients are 0
    elif terms.divisor is None:
        factor_N = upstream / gradients.expected_N
        group = merge.resolve(call.layout.group_name)
        if call.layout.sequence_parallel and group is not None:
            factor_N = factor_N.chunk(group.size())[group.rank()]
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
        _recompute_weight_gradients(operands, gradients._replace(ids_N=ids_N), upstream, terms, call)
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
    terms: Terms,
    call: Call,
) -> None:
    """Recompute the gradients of weight and bias and add them. Launches return early if no token has a label."""
    hidden, weight, head = operands
    group = merge.resolve(call.layout.group_name)
    backend, spec = named(call.way.backend), call.spec
    with without_autocast(hidden.device.type):
        if call.layout.sequence_parallel and group is not None:
            hidden = merge.SequenceGather(hidden, group).wait()
        x = operands_of(hidden, weight, head, gradients.ids_N, spec)
        # Logits of a token without a label count as 0, so its maximum must not be far below 0.
        softmax = Softmax(*(torch.where(x.ids >= 0, numbers_N, 0.0) for numbers_N in gradients.softmax[:2]))
        upstream = terms.gradients(upstream_N, softmax.max + softmax.log_sum)
        # A pass without gradients keeps no exponentials.
        saved = backend.saved_of_slices(x, spec._replace(want=spec.want._replace(grad=False)))
        grads = Grads(
            False, gradients.weight is not None, gradients.bias is not None, gradients.weight, often_empty=True
        )
        d_bias = backend.gradients(x, softmax, upstream, saved or [], grads, spec)[2]
        if gradients.bias is not None and d_bias is not None:
            gradients.bias.add_(d_bias)


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
    """Return the product in at least fp32, with 0 * inf = 0."""
    return torch.where((values == 0) | (factor == 0), 0.0, widened(values) * factor)


def expectation(expected_N: Tensor | None, ids_N: Tensor, divisor: float | Tensor | None, hidden: Tensor) -> Tensor:
    """Return the upstream gradients, [N] in the dtype of the losses, that forward computes the gradients for."""
    dtype = accumulator(hidden.dtype)
    if divisor is not None:
        return (1.0 / on_device(divisor, hidden).to(dtype)).expand(len(ids_N))
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
    hidden: Tensor, weight: Tensor, head: list[Tensor], labels: Tensor, terms: Terms, expected_N: Tensor | None,
    call: Call, wanted: tuple[bool, ...],
) -> tuple[Tensor, _ForwardGradients]:  # fmt: skip
    """Compute the loss and its gradients. ``wanted``: which of hidden states, weight and head's tensors get a gradient."""
    layout, group, rows = call.layout, merge.resolve(call.layout.group_name), call.way.groups.rows
    # A group is computed as if this rank were alone, because d_hidden is summed over ranks only after the whole group.
    backend, spec = named(call.way.backend), call.spec._replace(alone=True, want=call.spec.want._replace(mean=False))
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
        compile_ahead(backend, spec, x._replace(hidden=hidden[:rows], ids=labels[:rows]), None, merge.size_of(group))
        x = x._replace(hidden=hidden, ids=ids)
        loss_N = torch.empty(x.num_tokens, dtype=accumulator(hidden.dtype), device=hidden.device)
        softmax = Softmax(torch.empty_like(loss_N), torch.empty_like(loss_N))
        d_hidden = hidden.new_empty(hidden.shape) if wanted[0] else None
        has_low = call.way.groups.low and wanted[1] and call.backend != "torch" and weight.dtype == torch.bfloat16
        low = weight.new_empty(weight.shape, dtype=torch.int8) if has_low else None
        gradients = _ForwardGradients(
            d_hidden, None, None, ids, expectation(expected_N, ids, terms.divisor, hidden), softmax
        )
        sum_group = sum_group_of(layout, group)
        hidden_sum = None
        if sum_group is not None and gradients.hidden is not None:
            dtype = getattr(torch, layout.reduce_dtype) if layout.reduce_dtype else None
            hidden_sum = merge.HiddenGradSum(sum_group, layout.sequence_parallel, dtype, x.num_tokens, rows)
        for first in range(0, max(x.num_tokens, 1), rows):
            part = slice(first, min(first + rows, x.num_tokens))
            numbers = (gradients.expected_N, *softmax[:2], loss_N)
            d_weight, d_bias = _finish(
                x._replace(hidden=hidden[part], ids=ids[part]),
                terms.of_tokens(part),
                *(numbers_N[part] for numbers_N in numbers),
                Grads(
                    wanted[0],
                    wanted[1],
                    spec.logits.named(wanted[2:]).get("bias", False),
                    gradients.weight,
                    hidden_out=None if gradients.hidden is None else gradients.hidden[part],
                    weight_low=low,
                ),
                call_of_group,
            )
            if gradients.weight is None:  # later groups add to this tensor
                gradients = gradients._replace(weight=d_weight)
            if d_bias is not None:
                gradients = gradients._replace(bias=d_bias if gradients.bias is None else gradients.bias + d_bias)
            if hidden_sum is not None and gradients.hidden is not None:
                hidden_sum.start(gradients.hidden[: part.stop])
        if hidden_sum is not None:
            gradients = gradients._replace(hidden=hidden_sum.wait())
        if gradients.bias is not None and x.head.bias is not None:
            gradients = gradients._replace(bias=gradients.bias.to(x.head.bias.dtype))
        return loss_N if terms.divisor is None else loss_N.sum() / terms.divisor, gradients


def _finish(
    x: Operands,
    terms: Terms,
    expected_N: Tensor,
    max_N: Tensor,
    log_sum_N: Tensor,
    loss_N: Tensor,
    grads: Grads,
    call: Call,
) -> tuple[Tensor | None, Tensor | None]:
    """Compute one group: write its softmax, losses and d_hidden, and add its part to d_weight if there is one.

    The exponentials of the group are freed at the end.

    Args:
        x, terms: Of the group's tokens.
        expected_N: Expected upstream gradients.
        max_N, log_sum_N, loss_N: Outputs.
        grads: The wanted gradients, with the tensors that take d_hidden and d_weight.

    Returns:
        A new d_weight, and d_bias; None for what is not wanted or not new.
    """
    backend, spec, group = named(call.way.backend), call.spec, merge.resolve(call.layout.group_name)
    # Only the filter merges a bound over ranks, and it takes two passes.
    if merge.size_of(group) == 1:
        found, merged, _, saved = backend.losses_alone(x, spec, lambda stats_3N: stats_3N[0])
    else:
        stats_KN, saved = backend.statistics(x, spec, lambda stats_3N: stats_3N[0])
        found, merged = backend.token_losses(merge.gather_stats(stats_KN, group), x, spec)
    if terms.token is None:
        losses_N, upstream = terms.losses(found.nll, found.lse, found.uniform), terms.gradients(expected_N, found.lse)
    else:
        losses_N, upstream = terms.token.differentiated(found.nll, found.entropy, x.ids, expected_N)
    loss_N.copy_(losses_N)
    max_N.copy_(merged.max)
    log_sum_N.copy_(merged.log_sum)
    softmax = Softmax(max_N, log_sum_N, None if upstream.entropy is None else merged.entropy)
    _, d_weight, d_bias = backend.gradients(x, softmax, upstream, saved, grads, spec)
    return d_weight, d_bias
