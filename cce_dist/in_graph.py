"""A reduced loss and its gradients as one operator, for graphs of torch.compile.

The operator's forward computes the gradients: group by group if the exponentials do not fit the budget (``groups.py``), else by
running forward and backward one after the other. Its backward multiplies them by the upstream gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cce_dist import groups, merge, op
from cce_dist.autograd import head_gradients
from cce_dist.call import Call, Options, build, concrete, flat, numbers_of, schema
from cce_dist.kernels import Operands
from cce_dist.kernels.precision import accumulator


def loss(x: Operands, terms: groups.Terms, call: Call, options: Options) -> Tensor:
    """Return a reduced loss like ``groups.loss``, by an operator that torch.compile takes into its graph.

    See ``groups.loss`` for the arguments.
    """
    divisor, z_loss_weight, label_smoothing, weight_N, _ = terms
    assert divisor is not None and not isinstance(z_loss_weight, Tensor)
    numbers = numbers_of(options.logit_scale, options.softcap, z_loss_weight, label_smoothing)
    divisor = groups.on_device(divisor, x.hidden)
    head = [*x.head.tensors.values()]
    want = [tensor.requires_grad for tensor in (x.hidden, x.weight, *head)]
    return torch.ops.cce_dist.loss_and_gradients(
        x.hidden, x.weight, head, x.ids, divisor, weight_N, concrete(z_loss_weight), concrete(label_smoothing), want,
        *flat(call), numbers,
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
    terms = groups.Terms(divisor, z_loss_weight, label_smoothing, weight_N)
    x, group = op.operands_of(hidden, weight, head, labels, call.spec), merge.resolve(call.layout.group_name)
    num_ranks = merge.size_of(group)
    call = groups.decided_now(call, x, num_ranks, op.where_of(call, hidden, num_ranks, "number"))
    if call.way.passes == "one":
        loss, gradients = groups.run(hidden, weight, head, labels, terms, None, call, tuple(want))
        d_hidden, d_weight, d_head = gradients.hidden, gradients.weight, call.spec.logits.listed(bias=gradients.bias)
    else:
        call = call._replace(spec=call.spec._replace(want=call.spec.want._replace(mean=False)))
        nll_N, lse_N, _, uniform_nll_N, *_, saved = op._run_forward(hidden, weight, head, labels, None, call)
        loss = terms.losses(nll_N, lse_N, uniform_nll_N).sum() / divisor
        d_losses = [*terms.gradients(groups.expectation(None, labels, divisor, hidden), lse_N)[:-1]]
        d_hidden, d_weight, d_head_KV = op._run_backward(d_losses, hidden, weight, head, saved, None, want, call)
        d_head = head_gradients(d_head_KV, head, want[2:])
    d_hidden, d_weight, *d_head = (hidden.new_empty(0) if x is None else x for x in (d_hidden, d_weight, *d_head))
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
        groups.times(grad, upstream).to(grad.dtype) if wanted else None
        for grad, wanted in zip(ctx.saved_tensors, (want_hidden, want_weight, *want_head), strict=True)
    )
    return d_hidden, d_weight, d_head, *(None,) * (ctx.num_inputs - 3)


_LIBRARY = torch.library.Library("cce_dist", "FRAGMENT")  # the operator exists as long as this object
_LIBRARY.define(
    "loss_and_gradients(Tensor hidden, Tensor weight, Tensor[] head, Tensor labels, Tensor divisor, Tensor? class_weight, "
    f"float z_loss_weight, float label_smoothing, bool[] want, {', '.join(schema(Call))}, Tensor? numbers) "
    "-> (Tensor, Tensor, Tensor, Tensor[])"
)
_LIBRARY.impl("loss_and_gradients", _loss_and_gradients, "CompositeExplicitAutograd")
torch.library.register_fake("cce_dist::loss_and_gradients", _loss_and_gradients_fake, lib=_LIBRARY)
torch.library.register_autograd(
    "cce_dist::loss_and_gradients", _gradients_times, setup_context=_save_gradients, lib=_LIBRARY
)
