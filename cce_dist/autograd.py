"""An operator that is differentiable once: what it saves for backward, and which derivatives it refuses.

torch.library serves torch.compile, dispatch modes and tensor subclasses. Ordinary calls skip it through ``_Eager``, which saves
half a millisecond of host time per step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor
from torch._C import _functions
from torch._C._functorch import is_legacy_batchedtensor, maybe_current_level
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge

from cce_dist.kernels import accumulator


class Operator(NamedTuple):
    """A forward and a backward function, and the two operators of torch.library that call them.

    ``forward(hidden, weight, head, *others, grad_weight_out, call)`` returns its outputs and, as the last result, a list of
    tensors that backward needs. ``head`` lists tensors of ``kernels.Head``; the call names them.

    ``backward(d_outputs, *inputs, saved, grad_weight_out, want, call)`` returns the gradients of hidden states, weight and bias
    ([V] fp32); other tensors of the head have none. ``want`` has a bool for hidden states, weight, and each tensor of the head.
    """

    public_name: str  # of the function that the user called, for error messages
    forward: Callable[..., tuple[Any, ...]]
    backward: Callable[..., tuple[Tensor | None, Tensor | None, Tensor | None]]
    forward_name: str  # in ``torch.ops.cce_dist``
    backward_name: str
    tensors: str  # schema of forward's arguments before the call
    results: str  # schema of forward's results
    call: type
    num_outputs: int  # forward's differentiable results, which come first
    num_saved: int  # forward's first arguments, which are backward's ``inputs``

    def apply(
        self, hidden: Tensor, weight: Tensor, head: list[Tensor], *others: Any, call: Any, numbers: Tensor | None = None
    ) -> Any:
        refuse_transforms(self.public_name, hidden, weight, *head)
        if torch.compiler.is_compiling():
            operator = getattr(torch.ops.cce_dist, self.forward_name)
            return operator(hidden, weight, head, *others, *flat(call), numbers)
        return _Eager.apply(self, others, call, hidden, weight, *head)

    def register(self, forward_fake: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
        tensors, values = self.tensors.split(", "), ", ".join(schema(self.call))
        forward = self._of_flat_call(self.forward, len(tensors), 0)
        backward = self._of_flat_call(self.backward, self.num_saved + 4, 1)
        define(
            self.forward_name, f"({self.tensors}, {values}, Tensor? numbers) -> {self.results}", forward, forward_fake,
            self.differentiate_operator, self.save_operator,
        )  # fmt: skip
        inputs = ", ".join(tensors[: self.num_saved])
        arguments = f"Tensor?[] d_outputs, {inputs}, Tensor[] saved, Tensor(a!)? grad_weight_out, bool[] want"
        results = "(Tensor, Tensor, Tensor)"
        define(
            self.backward_name, f"({arguments}, {values}, Tensor? numbers) -> {results}", backward, self.backward_fake
        )
        return forward, backward

    def _of_flat_call(self, function: Callable[..., Any], num_others: int, hidden_at: int) -> Callable[..., Any]:
        """Wrap ``function`` to take a call's flat values, and to return an empty tensor in place of None."""

        def with_flat_call(*args: Any) -> tuple[Any, ...]:
            results = function(*args[:num_others], call_of_flat(self.call, args[num_others:]))
            return tuple(args[hidden_at].new_empty(0) if value is None else value for value in results)

        return with_flat_call

    def save_operator(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """``save`` for torch.library, whose autograd looks into lists."""
        num_tensors = self.tensors.count(",") + 1
        self.save(ctx, inputs[:num_tensors], inputs[num_tensors:], output)
        ctx.mark_non_differentiable(*(tensor for other in output[self.num_outputs :] for tensor in other))

    def save(self, ctx: Any, tensors: tuple[Any, ...], values: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Save what backward needs of forward's arguments and results. ``values``: the call alone, or its flat values."""
        ctx.call_values, ctx.grad_weight_out = values, tensors[-1]
        # save_for_backward takes no lists of tensors.
        ctx.lengths = [len(value) if isinstance(value, list) else None for value in tensors]
        inputs = tensors[: self.num_saved]
        flattened = [tensor for value in inputs for tensor in (value if isinstance(value, list) else [value])]
        ctx.save_for_backward(*flattened, *output[-1])
        ctx.set_materialize_grads(False)

    def differentiate(self, ctx: Any, want: list[bool], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        d_outputs = [
            grad.resolve_neg() if grad is not None and grad.is_neg() else grad for grad in grads[: self.num_outputs]
        ]
        if all(d is None for d in d_outputs):
            return [None] * len(want)
        refuse_transforms(self.public_name, *d_outputs)
        tensors = iter(ctx.saved_tensors)
        operands: list[Any] = [
            next(tensors) if length is None else [next(tensors) for _ in range(length)]
            for length in ctx.lengths[: self.num_saved]
        ]
        hidden, weight, head, *_ = operands
        create_graph = torch.is_grad_enabled()
        with torch.no_grad() if create_graph else nullcontext():
            args = (d_outputs, *operands, [*tensors], ctx.grad_weight_out, want)
            values = ctx.call_values
            if is_unobserved(hidden, weight):
                if ctx.grad_weight_out is not None:
                    want[1] = want[1] and is_wanted(weight)
                call = values[0] if len(values) == 1 else call_of_flat(self.call, values)
                d_hidden, d_weight, d_bias = self.backward(*args, call)
            else:
                values = (*flat(values[0]), None) if len(values) == 1 else values
                d_hidden, d_weight, d_bias = getattr(torch.ops.cce_dist, self.backward_name)(*args, *values)
            returns_weight = want[1] and ctx.grad_weight_out is None
            gradients = [d_hidden if want[0] else None, d_weight if returns_weight else None]
            gradients += head_gradients(d_bias, head, want[2:])
        if create_graph:
            return differentiable_once(self.public_name, gradients, (hidden, weight, *head, *d_outputs))
        return gradients

    def differentiate_operator(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        want_hidden, want_weight, want_head = ctx.needs_input_grad[:3]
        d_hidden, d_weight, *d_head = self.differentiate(ctx, [want_hidden, want_weight, *want_head], grads)
        others = (None if length is None else [None] * length for length in ctx.lengths[3:])
        return d_hidden, d_weight, d_head, *others, *(None for _ in ctx.call_values)

    def backward_fake(self, d_outputs: list[Tensor | None], *others: Any) -> tuple[Tensor, Tensor, Tensor]:
        hidden, weight = others[:2]
        _, grad_weight_out, want = others[self.num_saved :][:3]
        d_hidden, d_weight, d_bias = hidden.new_empty(0), hidden.new_empty(0), hidden.new_empty(0)
        if want[0]:
            d_hidden = torch.empty_like(hidden)
        if want[1] and grad_weight_out is None:
            d_weight = torch.empty_like(weight)
        if any(want[2:]):
            d_bias = weight.new_empty(weight.shape[0], dtype=accumulator(weight.dtype))
        return d_hidden, d_weight, d_bias


LIBRARY = torch.library.Library("cce_dist", "FRAGMENT")  # operators live as long as it


def define(
    name: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None, save: Callable[..., Any] | None = None,
) -> None:  # fmt: skip
    """Register an operator in torch.library. ``backward`` and ``save`` make it differentiable."""
    LIBRARY.define(name + schema)
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"cce_dist::{name}", fake, lib=LIBRARY)
    if backward is not None:
        torch.library.register_autograd(f"cce_dist::{name}", backward, setup_context=save, lib=LIBRARY)


# A record such as ``Call`` passes through an operator as the flat list of its values.


@cache
def _fields(record: type) -> tuple[tuple[str, type, bool], ...]:
    """Return name and type of each field, and whether the field is a record itself."""
    return tuple((name, hint, issubclass(hint, tuple)) for name, hint in get_type_hints(record).items())


def flat(record: tuple) -> tuple[Any, ...]:
    """Return the values of all fields in order, with nested records flattened."""
    return tuple(value for field in record for value in (flat(field) if isinstance(field, tuple) else (field,)))


def build(record: type, values: Iterator[Any]) -> Any:
    return record(*[build(hint, values) if nested else next(values) for _, hint, nested in _fields(record)])


def schema(record: type, prefix: str = "") -> Iterator[str]:
    """Yield type and name of each flat value, as in a schema of torch.library."""
    for name, hint, nested in _fields(record):
        if nested:
            yield from schema(hint, f"{prefix}{name}_")
        else:
            yield f"{hint.__name__} {prefix}{name}"


def call_of_flat(record: type, values: Sequence[Any]) -> Any:
    """Rebuild a call from an operator's flat values. The last value is the tensor of ``call.numbers_of``, or None."""
    *plain, numbers = values
    call = build(record, iter(plain))
    return call if numbers is None else call.with_numbers(numbers)


def head_gradients(d_bias: Tensor | None, head: Sequence[Tensor], want: Sequence[bool]) -> list[Tensor | None]:
    return [d_bias.to(x.dtype) if wanted and d_bias is not None else None for x, wanted in zip(head, want, strict=True)]


class _Eager(torch.autograd.Function):
    """An operator's call without torch.library. Autograd does not look into lists, so the head's tensors come last."""

    @staticmethod
    def forward(
        ctx, operator: Operator, others: tuple[Any, ...], call: Any, hidden: Tensor, weight: Tensor, *head: Tensor
    ):
        tensors = hidden, weight, list(head), *others
        if is_unobserved(hidden, weight):
            output = operator.forward(*tensors, call)
        else:
            output = getattr(torch.ops.cce_dist, operator.forward_name)(*tensors, *flat(call), None)
        ctx.operator = operator
        operator.save(ctx, tensors, (call,), output)
        return output[:-1]

    @staticmethod
    def backward(ctx, *grads: Any):
        return None, None, None, *ctx.operator.differentiate(ctx, list(ctx.needs_input_grad[3:]), grads)


PLAIN = frozenset({Tensor, torch.nn.Parameter})


def is_unobserved(*tensors: Tensor) -> bool:
    """Whether a call may skip the dispatcher: no dispatch mode is active, and no tensor is of a subclass."""
    return PLAIN.issuperset(map(type, tensors)) and torch._C._len_torch_dispatch_stack() == 0


def is_wanted(tensor: Tensor) -> bool:
    """Whether the backward that is running now also computes this tensor's gradient.

    ``needs_input_grad`` does not tell: ``torch.autograd.grad`` and ``backward(inputs=...)`` may leave a tensor out.
    """
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(tensor).node)
    except RuntimeError:  # it is a leaf that ``torch.autograd.grad`` returns the gradient of
        return True


def leaves_of(tensor: Tensor, done: Iterable[Any] = ()) -> Iterator[Tensor]:
    """Yield the leaves that a tensor's gradient goes to, without those behind the nodes ``done``."""
    nodes: list[Any] = [tensor.grad_fn]
    seen = {None, *done}
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            if hasattr(node, "variable"):
                yield node.variable
            nodes += [following for following, _ in node.next_functions]


def without_autocast(device_type: str) -> AbstractContextManager:
    """Turn autocast off if it is on."""
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()


def differentiable_once(
    public_name: str, gradients: Sequence[Tensor | None], depends_on: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return gradients of create_graph=True, connected to ``depends_on`` so that differentiating them raises RuntimeError."""
    message = f"{public_name} is differentiable once: double backward is not supported"
    tensors = (*gradients, *depends_on)
    refusing: Any = _functions.DelayedError(message, len(tensors))
    return refusing(*tensors)[: len(gradients)]


def refuse_transforms(public_name: str, *tensors: Tensor | None) -> None:
    """Raise RuntimeError inside a transform of torch.func, for batched tensors, and for forward-mode dual numbers."""
    if torch.compiler.is_compiling():
        return
    given = [tensor for tensor in tensors if tensor is not None]
    if maybe_current_level() is not None or any(map(is_legacy_batchedtensor, given)):
        raise RuntimeError(f"{public_name} works with backward() and torch.autograd.grad, not with torch.func or vmap")
    if forward_ad._current_level >= 0:
        for tensor in given:
            if forward_ad.unpack_dual(tensor).tangent is not None:
                raise RuntimeError(f"{public_name} has no forward-mode derivative: use backward()")
