"""One number and its gradients as an operator, for graphs of torch.compile.

Its forward makes the gradients: group by group where the exponentials do not fit the budget (``groups.py``), else by forward
and backward one after another. Its derivative multiplies them by the upstream gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cce_dist import groups, op
from cce_dist.call import Call, build, flat, schema
from cce_dist.kernels import Operands


def serves(hidden: Tensor, call: Call, grad_weight_out: Tensor | None, z_loss_weight: float | Tensor) -> bool:
    """Whether one number's gradients are made in forward where torch.compile takes the call into a graph."""
    if not call.spec.want.grad or call.spec.filter.eps > 0 or grad_weight_out is not None:
        return False
    if isinstance(z_loss_weight, Tensor):
        return False
    # fp16 is too short for gradients that a loss scale multiplies afterwards; fp32 keeps no exponentials.
    return groups.are_forced() or (call.backend == "triton" and hidden.dtype == torch.bfloat16)


def loss(x: Operands, terms: groups.Terms, call: Call) -> Tensor:
    """Return what ``groups.loss`` does of one number, by an operator that torch.compile takes into its graph.

    Its gradients are made in forward also where they are not made in groups. Arguments are those of ``groups.loss``.
    """
    divisor, z_loss_weight, label_smoothing, weight_N = terms
    assert divisor is not None
    divisor = groups.on_device(divisor, x.hidden.device)
    want = [tensor is not None and tensor.requires_grad for tensor in (x.hidden, x.weight, x.head.bias)]
    return torch.ops.cce_dist.loss_and_gradients(
        x.hidden, x.weight, x.head.bias, x.ids, divisor, weight_N, z_loss_weight, label_smoothing, want, *flat(call)
    )[0]


def _loss_and_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, divisor: Tensor, weight_N: Tensor | None,
    z_loss_weight: float, label_smoothing: float, want: list[bool], *flat_call: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The operator: the loss, 0-d fp32, and the gradients that are wanted, as if upstream's were 1."""
    call, terms = build(Call, iter(flat_call)), groups.Terms(divisor, z_loss_weight, label_smoothing, weight_N)
    parts = groups.groups_of(Operands.of(hidden, weight, labels, call.spec.logits, bias), call, False, None)
    if parts is not None:
        loss, made = groups.run(hidden, weight, bias, labels, terms, None, call, parts, tuple(want))
        found = made[:3]
    else:
        call = call._replace(spec=call.spec._replace(want=call.spec.want._replace(mean=False)))
        nll_N, lse_N, _, uniform_nll_N, *_, saved = op._forward_again(hidden, weight, bias, labels, None, None, call)
        loss = terms.losses(nll_N, lse_N, uniform_nll_N).sum() / divisor
        d_losses = [*terms.gradients(groups.expectation(None, labels, divisor), lse_N), None]
        found = op._backward_again(d_losses, hidden, weight, bias, saved, None, want, call)
    d_hidden, d_weight, d_bias = (hidden.new_empty(0) if tensor is None else tensor for tensor in found)
    return loss, d_hidden, d_weight, d_bias


def _loss_and_gradients_fake(hidden: Tensor, weight: Tensor, bias: Tensor | None, *others: Any) -> Any:
    want = next(value for value in others if isinstance(value, list))
    gradients = [
        torch.empty_like(tensor) if wanted and tensor is not None else hidden.new_empty(0)
        for tensor, wanted in zip((hidden, weight, bias), want, strict=True)
    ]
    return hidden.new_empty((), dtype=torch.float32), *gradients


def _save_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.num_inputs = len(inputs)


def _gradients_times(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Any, ...]:
    scaled = [
        groups.times(made, upstream).to(made.dtype) if wanted else None
        for made, wanted in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
    ]
    return *scaled, *(None,) * (ctx.num_inputs - 3)


_LIBRARY = torch.library.Library("cce_dist", "FRAGMENT")  # lives as long as its operator
_LIBRARY.define(
    "loss_and_gradients(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, Tensor divisor, Tensor? class_weight, "
    f"float z_loss_weight, float label_smoothing, bool[] want, {', '.join(schema(Call))}) -> (Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.impl("loss_and_gradients", _loss_and_gradients, "CompositeExplicitAutograd")
torch.library.register_fake("cce_dist::loss_and_gradients", _loss_and_gradients_fake, lib=_LIBRARY)
torch.library.register_autograd(
    "cce_dist::loss_and_gradients", _gradients_times, setup_context=_save_gradients, lib=_LIBRARY
)
