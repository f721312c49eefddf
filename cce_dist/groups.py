"""A loss of one number with its gradients made in forward, a group of tokens at a time: three products, whatever the budget.

A token's gradient waits for other tokens in one place alone, the sum over tokens in dC. So where the exponentials of all tokens
do not fit the budget, one group of tokens is finished before the next begins: its exponentials with the log-sum-exp, its
statistics merged over the ranks, its dE, and its part of dC, which is added to the groups before. Nothing is computed twice.
More groups cost one more read and write of dC each, and one more rounding of it.

The upstream gradient is not known in forward. It is one number, since the loss is: backward multiplies by it, and a launch that
finds 1 ends at once. A second backward makes the gradients anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import maybe_current_level
from torch.autograd import forward_ad

from cce_dist import merge
from cce_dist.agree import label_error
from cce_dist.autograd import differentiable_once, nobody_listens
from cce_dist.call import Call
from cce_dist.kernels import Grads, Operands, Softmax, Spec, budget
from cce_dist.kernels.backends import Backend
from cce_dist.kernels.launch.rehearsal import rehearse
from cce_dist.op import chosen, of_even_shard, sum_group_of

_FORCED: int | None = None


@contextmanager
def of_rows(rows: int | None) -> Iterator[None]:
    """Make calls in groups of so many tokens, on any backend and at any size, where they can be; None: as ever. For tests."""
    global _FORCED
    before, _FORCED = _FORCED, rows
    try:
        yield
    finally:
        _FORCED = before


def rows_of_groups(x: Operands, call: Call) -> int | None:
    """Return the tokens of a group, the same on every rank. None: the call is not made in groups."""
    if torch.compiler.is_compiling() or maybe_current_level() is not None or forward_ad._current_level >= 0:
        return None
    if not call.spec.want.grad or not nobody_listens(x.hidden, x.weight):
        return None
    if call.backend == "torch":
        return None if call.spec.filter.eps > 0 else _FORCED
    from cce_dist.kernels import exact

    group = merge.resolve(call.layout.group_name)
    backend, spec = chosen(call, x, group)
    if backend is not exact:
        return None
    if _FORCED is not None:
        return _FORCED
    even = of_even_shard(x, spec, 1 if group is None else group.size())
    if not exact.keeps(even, spec):
        return None
    return budget.rows_of_groups(exact.sizes_of(even)._replace(alone=spec.alone), spec.workspace_bytes)


class Terms(NamedTuple):
    """What a token's nll becomes its loss by: ``weight_N * (nll + z_loss_weight * lse^2) / divisor``."""

    divisor: Tensor  # 0-d
    z_loss_weight: float | Tensor = 0.0
    weight_N: Tensor | None = None  # fp32, of the labels' classes; None: 1

    def of_tokens(self, tokens: slice) -> Terms:
        return self if self.weight_N is None else self._replace(weight_N=self.weight_N[tokens])

    def losses(self, nll_N: Tensor, lse_N: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the tokens' losses before they are divided, and the gradients of their quotient by nll and by lse."""
        d_nll_N, d_lse_N = (1.0 / self.divisor.float()).expand(len(nll_N)), None
        if self.weight_N is not None:
            d_nll_N = d_nll_N * self.weight_N
        if isinstance(self.z_loss_weight, Tensor) or self.z_loss_weight:
            nll_N = nll_N + self.z_loss_weight * lse_N.square()
            d_lse_N = d_nll_N * (2.0 * self.z_loss_weight * lse_N)
        return nll_N if self.weight_N is None else nll_N * self.weight_N, d_nll_N, d_lse_N


def loss(x: Operands, divisor: float | Tensor, call: Call, rows: int, z_loss_weight: float | Tensor = 0.0,
         weight_N: Tensor | None = None) -> Tensor:  # fmt: skip
    """Return the sum of the tokens' losses, divided by ``divisor``: 0-d fp32, differentiable once.

    Args:
        x: The operands; the labels in place of their ids. Under sequence parallelism hidden states are this rank's slice.
        divisor: A number, or a 0-d tensor.
        call: What is computed.
        rows: Tokens of a group.
        z_loss_weight: Weight of the squared log-sum-exp; no gradient.
        weight_N: [N] fp32 weight of each token's class, 0 where the label is ignored; None: 1.
    """
    if not isinstance(divisor, Tensor):
        divisor = torch.full((), float(divisor), device=x.hidden.device)
    terms = Terms(divisor.to(x.hidden.device), z_loss_weight, weight_N)
    return _InGroups.apply(x.hidden, x.weight, x.bias, x.ids, terms, call, rows)  # type: ignore[return-value]


class _Made(NamedTuple):
    """Gradients for an upstream gradient of 1, None where none is wanted."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class _InGroups(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, terms: Terms, call: Call,
                rows: int) -> Tensor:  # fmt: skip
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.terms, ctx.call, ctx.rows = terms, call, rows
        # No saved tensors: the first backward takes these away, scales them in place, and leaves them to the parameters.
        found, ctx.made = _run(hidden, weight, bias, labels, terms, call, rows, ctx.needs_input_grad)
        return found

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Any:
        made, ctx.made = ctx.made, None
        with torch.no_grad():
            if made is None:
                hidden, weight, bias, labels = ctx.saved_tensors
                made = _run(hidden, weight, bias, labels, ctx.terms, ctx.call, ctx.rows, ctx.needs_input_grad)[1]
            for tensor in made:
                if tensor is not None:
                    _scale(tensor, grads[0].float(), ctx.call.backend)
        if torch.is_grad_enabled():
            nothing = grads[0].new_empty(0)
            there = [nothing if tensor is None else tensor for tensor in made]
            found = differentiable_once("linear_cross_entropy", there, (*ctx.saved_tensors[:3], grads[0]))
            made = [None if tensor is None else one for tensor, one in zip(made, found, strict=True)]
        return *made, None, None, None, None


def _scale(values: Tensor, factor: Tensor, backend: str) -> None:
    if backend == "torch":
        values.mul_(torch.where(values == 0, 1.0, factor))
    else:
        from cce_dist.kernels.scale import scale

        scale(values, factor)


def _run(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, terms: Terms, call: Call, rows: int,
    wanted: tuple[bool, ...],
) -> tuple[Tensor, _Made]:  # fmt: skip
    """Return the loss and its gradients, group by group."""
    layout, group = call.layout, merge.resolve(call.layout.group_name)
    x = Operands(hidden, weight, bias, labels, call.spec.logits)
    backend, spec = chosen(call, x, group)
    # The sum over ranks begins when a group is done, and nothing of the group waits for it.
    spec = spec._replace(alone=True)
    with torch.autocast(hidden.device.type, enabled=False):
        ids = backend.label_ids(labels, spec.ignore_index, spec.vocab_size)
        if call.debug or not labels.is_cuda:
            error = label_error(call.argument, labels, ids, spec.vocab_size, spec.ignore_index)
            if error:
                raise IndexError(error)
        if layout.sequence_parallel and group is not None:
            hidden = merge.SequenceGather(hidden, group).wait()
        rehearse(backend, spec, x._replace(hidden=hidden[:rows], ids=labels[:rows]), None)
        x = x._replace(hidden=hidden, ids=ids)
        loss_N = torch.empty(x.num_tokens, dtype=torch.float32, device=hidden.device)
        made = _Made(hidden.new_empty(hidden.shape) if wanted[0] else None, None, None)
        sum_group = sum_group_of(layout, group)
        hidden_sum = None
        if sum_group is not None and made.hidden is not None:
            dtype = getattr(torch, layout.reduce_dtype) if layout.reduce_dtype else None
            hidden_sum = merge.HiddenGradSum(sum_group, layout.sequence_parallel, dtype, x.num_tokens, rows)
        for first in range(0, max(x.num_tokens, 1), rows):
            part = slice(first, min(first + rows, x.num_tokens))
            grads = Grads(wanted[0], wanted[1], wanted[2] and bias is not None, made.weight)
            if made.hidden is not None:
                grads = grads._replace(hidden_out=made.hidden[part])
            loss_N[part], d_weight, d_bias = _finished(
                x.of_tokens(part, hidden[part]), terms.of_tokens(part), grads, backend, spec, group
            )
            if made.weight is None:  # Later groups add to it by themselves.
                made = made._replace(weight=d_weight)
            if d_bias is not None:
                made = made._replace(bias=d_bias if made.bias is None else made.bias + d_bias)
            if hidden_sum is not None and made.hidden is not None:
                hidden_sum.start(made.hidden[: part.stop])
        if hidden_sum is not None:
            made = made._replace(hidden=hidden_sum.wait())
        if made.bias is not None and bias is not None:
            made = made._replace(bias=made.bias.to(bias.dtype))
        return loss_N.sum() / terms.divisor, made


def _finished(
    x: Operands, terms: Terms, grads: Grads, backend: Backend, spec: Spec, group: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Finish the tokens of a group; the exponentials end with the call. -> their losses, d_weight and d_bias."""
    # Without a filter nobody merges a bound.
    stats_KN, saved = backend.statistics(x, spec, lambda stats_3N: stats_3N[0])
    nll_N, lse_N, *_, merged = backend.token_losses(merge.gather_stats(stats_KN, group), x.ids, spec)
    loss_N, *upstream = terms.losses(nll_N, lse_N)
    coef_4N = backend.coefficients([*upstream, None, None, None], x.ids, spec.vocab_size)
    softmax = Softmax(merged[0], merged[1], None)
    return loss_N, *backend.gradients(x, softmax, coef_4N, saved, grads, spec)[1:]
