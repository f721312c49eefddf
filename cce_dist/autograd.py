"""An operator that is differentiable once: what it saves, who computes its gradients, and the derivatives that it refuses.

Its two functions are replayed where they can be (``kernels/launch/replay.py``).

torch.library serves torch.compile and whoever looks at operators (dispatch modes, tensors of a class of their own). Everybody
else gets the same functions through ``Operator.eager``, without half a millisecond of torch.library on the host a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor, maybe_current_level
from torch.autograd import forward_ad

from cce_dist import merge
from cce_dist.call import build, flat, schema
from cce_dist.kernels.launch import replay
from cce_dist.kernels.launch.replay import Replayed
from cce_dist.kernels.precision import accumulator


class Operator(NamedTuple):
    """A pair of functions, forward and backward, and the operators of the same meaning in torch.library.

    forward takes ``hidden, weight, head, *others, grad_weight_out, call`` and returns its outputs and, last, a list of tensors
    that backward needs. ``head`` is the list of the tensors of ``kernels.Head`` that there are; the call names them. backward
    takes the outputs' gradients, the kept arguments of forward, what forward saved, ``grad_weight_out``, which gradients are
    wanted, and the call. It returns the gradients of hidden states and weight, and [K, V] fp32 with a row for each tensor of
    the head whose gradient is wanted: an operator that writes to an argument cannot return a list. The operators of
    torch.library take the call's flat values in place of the call, and behind them the tensor of ``call.numbers_of``.

    Attributes:
        public_name: Of the function that the user called, for what is refused.
        forward_name: Of the operator in ``torch.ops.cce_dist``.
        backward_name: Likewise.
        tensors: Schema of forward's tensors and lists of tensors.
        results: Schema of forward's results.
        call: The record that a call is.
        num_outputs: The first results of forward, which are differentiable; others and what is saved are not.
        num_kept: The first arguments of forward, hidden, weight and head counted, that backward needs too.
    """

    public_name: str
    forward: Callable[..., tuple[Any, ...]]
    backward: Callable[..., tuple[Tensor | None, Tensor | None, Tensor | None]]
    forward_name: str
    backward_name: str
    tensors: str
    results: str
    call: type
    num_outputs: int
    num_kept: int

    @property
    def num_tensors(self) -> int:
        """The number of forward's arguments before the call."""
        return self.tensors.count(",") + 1

    def apply(
        self, hidden: Tensor, weight: Tensor, head: list[Tensor], *others: Any, call: Any, needs_grad: bool,
        numbers: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """Call forward; what it saves may be left out of its results."""
        refuse_transforms(self.public_name, hidden, weight, *head)
        if torch.compiler.is_compiling() or not needs_grad:
            operator = getattr(torch.ops.cce_dist, self.forward_name)
            return operator(hidden, weight, head, *others, *flat(call), numbers)
        return _Eager.apply(self, others, call, hidden, weight, *head)

    def register(self, forward_fake: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Put both operators into torch.library, and return their functions, which take a call's flat values."""
        kept, values = ", ".join(self.tensors.split(", ")[: self.num_kept]), ", ".join(schema(self.call))
        forward = self._of_flat_call(self.forward, self.num_tensors, 0)
        backward = self._of_flat_call(self.backward, self.num_kept + 4, 1)
        library = torch.library.Library("cce_dist", "FRAGMENT")
        _LIBRARIES.append(library)
        for name, arguments, results, function, fake in (
            (self.forward_name, self.tensors, self.results, forward, forward_fake),
            (
                self.backward_name,
                f"Tensor?[] d_outputs, {kept}, Tensor[] saved, Tensor(a!)? grad_weight_out, bool[] want",
                "(Tensor, Tensor, Tensor)",
                backward,
                self.backward_fake,
            ),
        ):
            library.define(f"{name}({arguments}, {values}, Tensor? numbers) -> {results}")
            library.impl(name, function, "CompositeExplicitAutograd")
            torch.library.register_fake(f"cce_dist::{name}", fake, lib=library)
        torch.library.register_autograd(
            f"cce_dist::{self.forward_name}", self.differentiate_operator, setup_context=self.save, lib=library
        )
        return forward, backward

    def _of_flat_call(self, function: Callable[..., Any], num_others: int, hidden_at: int) -> Callable[..., Any]:
        """Return a function that takes a call's flat values and returns an empty tensor in place of None."""

        def of_flat_call(*given: Any) -> tuple[Any, ...]:
            found = function(*given[:num_others], called(self.call, given[num_others:]))
            return tuple(given[hidden_at].new_empty(0) if value is None else value for value in found)

        return of_flat_call

    def save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Keep what backward needs; ``inputs`` end in a call, or in its flat values."""
        tensors, others = inputs[: self.num_tensors], output[self.num_outputs :]
        ctx.told, ctx.grad_weight_out = inputs[self.num_tensors :], tensors[-1]
        # A context saves tensors, no lists of tensors.
        ctx.lengths = [len(value) if isinstance(value, list) else None for value in tensors]
        kept = tensors[: self.num_kept]
        flattened = [tensor for value in kept for tensor in (value if isinstance(value, list) else [value])]
        ctx.save_for_backward(*flattened, *others[-1])
        ctx.mark_non_differentiable(*(tensor for other in others for tensor in other))
        ctx.set_materialize_grads(False)

    def differentiate(self, ctx: Any, want: list[bool], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients that are wanted of hidden states, weight and each of the head's tensors, else None."""
        d_outputs = list(grads[: self.num_outputs])
        if all(d is None for d in d_outputs):
            return [None] * len(want)
        refuse_transforms(self.public_name, *d_outputs)
        tensors = iter(ctx.saved_tensors)
        operands: list[Any] = [
            next(tensors) if length is None else [next(tensors) for _ in range(length)]
            for length in ctx.lengths[: self.num_kept]
        ]
        hidden, weight, head, *_ = operands
        twice = torch.is_grad_enabled()
        with torch.no_grad():
            given = (d_outputs, *operands, [*tensors], ctx.grad_weight_out, want)
            if nobody_listens(hidden, weight):
                call = ctx.told[0] if len(ctx.told) == 1 else called(self.call, ctx.told)
                d_hidden, d_weight, d_head_KV = self.backward(*given, call)
            else:
                told = (*flat(ctx.told[0]), None) if len(ctx.told) == 1 else ctx.told
                d_hidden, d_weight, d_head_KV = getattr(torch.ops.cce_dist, self.backward_name)(*given, *told)
            found = [d_hidden, d_weight, *head_gradients(d_head_KV, head, want[2:])]
        if twice:
            found = [hidden.new_empty(0) if grad is None else grad for grad in found]
            found = differentiable_once(self.public_name, found, (hidden, weight, *head, *d_outputs))
        returned = [want[0], want[1] and ctx.grad_weight_out is None, *want[2:]]
        return [grad if wanted else None for grad, wanted in zip(found, returned, strict=True)]

    def differentiate_operator(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Return the gradients of all arguments of forward's operator, as torch.library asks for them."""
        of_hidden, of_weight, of_head = ctx.needs_input_grad[:3]
        d_hidden, d_weight, *d_head = self.differentiate(ctx, [of_hidden, of_weight, *of_head], grads)
        others = (None if length is None else [None] * length for length in ctx.lengths[3:])
        return d_hidden, d_weight, d_head, *others, *(None for _ in ctx.told)

    def backward_fake(self, d_outputs: list[Tensor | None], *others: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Shapes and dtypes of the operator's gradients, for torch.compile."""
        hidden, weight = others[:2]
        _, grad_weight_out, want = others[self.num_kept :][:3]
        nothing = hidden.new_empty(0)
        return (
            torch.empty_like(hidden) if want[0] else nothing,
            torch.empty_like(weight) if want[1] and grad_weight_out is None else torch.empty_like(nothing),
            weight.new_empty((sum(want[2:]), weight.shape[0]), dtype=accumulator(weight.dtype))
            if any(want[2:])
            else torch.empty_like(nothing),
        )


def called(record: type, values: Sequence[Any]) -> Any:
    """Return the call of an operator's flat values, with the numbers of the tensor behind them if there is one."""
    *plain, numbers = values
    call = build(record, iter(plain))
    return call if numbers is None else call.with_numbers(numbers)


def head_rows(found: Sequence[Tensor | None], want: Sequence[bool]) -> Tensor | None:
    """Return the gradients that are wanted of the head's tensors, [V] fp32 each, as rows. -> [K, V], or None for no row."""
    rows = [grad for grad, wanted in zip(found, want, strict=True) if wanted and grad is not None]
    if not rows:
        return None
    return torch.stack(rows) if len(rows) > 1 else rows[0][None]


def head_gradients(d_head_KV: Tensor | None, head: Sequence[Tensor], want: Sequence[bool]) -> list[Tensor | None]:
    """Return what ``head_rows`` has for each tensor, in the tensor's dtype; None where nothing is wanted."""
    if d_head_KV is None or not any(want):
        return [None] * len(head)
    rows = iter(d_head_KV.unbind())
    return [next(rows).to(x.dtype) if wanted else None for x, wanted in zip(head, want, strict=True)]


_LIBRARIES: list[torch.library.Library] = []  # operators live as long as these


def replayed(function: Callable[..., Any]) -> Replayed:
    """Return an operator's forward or backward, whose last argument is the call, such that calls of one kind are replayed."""
    return Replayed(function, _replayable)


def _replayable(call: Any) -> tuple | None:
    """Return the rest of a call's key: its rank and group size. None: the call is not replayed."""
    if call.backend != "triton" or getattr(call, "debug", False) or not replay.available():
        return None
    group = merge.resolve(call.layout.group_name)
    return () if group is None else (group.rank(), group.size())


class _Eager(torch.autograd.Function):
    """The operator without torch.library. Autograd tracks arguments, not lists, so the head's tensors come last."""

    @staticmethod
    def forward(
        ctx, operator: Operator, others: tuple[Any, ...], call: Any, hidden: Tensor, weight: Tensor, *head: Tensor
    ):
        tensors = hidden, weight, list(head), *others
        if nobody_listens(hidden, weight):
            output = operator.forward(*tensors, call)
        else:
            output = getattr(torch.ops.cce_dist, operator.forward_name)(*tensors, *flat(call), None)
        ctx.operator = operator
        operator.save(ctx, (*tensors, call), output)
        return output[:-1]

    @staticmethod
    def backward(ctx, *grads: Any):
        return None, None, None, *ctx.operator.differentiate(ctx, list(ctx.needs_input_grad[3:]), grads)


def nobody_listens(*tensors: Tensor) -> bool:
    """Whether an operator may be called as a function: no dispatch mode is on, and no tensor is of a class of its own."""
    plain = all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in tensors)
    return plain and torch._C._len_torch_dispatch_stack() == 0


def without_autocast(device_type: str) -> AbstractContextManager:
    """Turn autocast off, if it is on: entering ``torch.autocast`` takes the host longer than asking."""
    is_on = torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if is_on else nullcontext()


def differentiable_once(public_name: str, found: Sequence[Tensor], depends_on: Sequence[Tensor | None]) -> list[Tensor]:
    """Return gradients such that differentiating them, with respect to what they depend on, raises RuntimeError."""
    tracked = [x for x in depends_on if x is not None and x.requires_grad]
    return list(_Refuse.apply(public_name, len(found), *found, *tracked))  # type: ignore[arg-type]


class _Refuse(torch.autograd.Function):
    """Gradients that were asked for with create_graph=True: usable, but not differentiable.

    The tensors that they depend on come along, so that whoever differentiates with respect to those arrives here.
    """

    @staticmethod
    def forward(ctx, public_name: str, num_found: int, *tensors: Tensor) -> Any:
        ctx.public_name = public_name
        return tuple(tensor.clone() for tensor in tensors[:num_found])

    @staticmethod
    def backward(ctx, *grads: Any):
        raise RuntimeError(f"{ctx.public_name} is differentiable once: double backward is not supported")


def refuse_transforms(public_name: str, *tensors: Tensor | None) -> None:
    """Raise RuntimeError inside a transform of torch.func, for batched gradients, and for dual numbers of forward mode."""
    if torch.compiler.is_compiling():
        return
    batched = any(tensor is not None and is_legacy_batchedtensor(tensor) for tensor in tensors)
    if batched or maybe_current_level() is not None:
        raise RuntimeError(f"{public_name} works with backward() and torch.autograd.grad, not with torch.func or vmap")
    if forward_ad._current_level >= 0:
        for tensor in tensors:
            if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
                raise RuntimeError(f"{public_name} has no forward-mode derivative: use backward()")
