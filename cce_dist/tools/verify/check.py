"""The check that all functions share: one case on one group of ranks, compared with dense PyTorch."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist.shard import VocabShard
from cce_dist.tools.verify.cases import BF16, FP16, FP32, Bounds, Case, Drawn, Problem, Truth

# Rounding that a sum in another order may add, relative to the largest value: a few units in the last place.
EPS = {FP32: 2e-6, BF16: 2.0**-8, FP16: 2.0**-10}
GRADIENTS = ("dE", "dC", "dbias", "dscale")
LAYOUTS = ("contiguous", "strided", "transposed", "sliced", "unaligned", "expanded")
WRITABLE = ("contiguous", "unaligned")  # layouts of a buffer that the loss may write to
POISON_ID = -77_777
Part = Callable[[Tensor], Tensor]  # whole output or gradient -> this rank's part


class Error(NamedTuple):
    """The largest error of one quantity, and its bound."""

    quantity: str
    error: float
    bound: float

    @property
    def ok(self) -> bool:
        return self.error <= self.bound

    @property
    def badness(self) -> tuple[bool, float]:
        """A key that sorts the worst error last."""
        return not self.ok, self.error / self.bound if self.bound else self.error


class Function(NamedTuple):
    """How a public function is checked."""

    draw: Callable[[Any, torch.Generator], Drawn]  # draws the tensors of a case
    # Returns dense outputs and gradients, in a dtype on a device.
    reference: Callable[[Drawn, torch.dtype, str], dict[str, Tensor]]
    call: Callable[[Drawn, VocabShard, str, str], dict[str, Tensor]]  # the function's, on a shard, backend and device
    # Compares one of them: its name, this rank's value, its part of a whole, what ``reference`` gives in the tested dtype.
    judge: Callable[[Drawn, str, Tensor, Part, dict[str, Tensor], Truth], list[Error]]
    shared: Collection[str]  # outputs that must have the same bits on every rank
    truth: Callable[[Drawn, Bounds, str, str], Truth] | None = None  # None: ``reference`` in float64
    # Dtype of the dense outputs that ours are compared with; None: the tested one.
    outputs_in: torch.dtype | None = None


def run_case(
    function: Function, case: Case, group: dist.ProcessGroup | None, device: str, backend: str = "auto", salt: int = 0
) -> list[Error]:
    """Run a case on the ranks of ``group`` (None: this process alone); ``salt`` varies the data."""
    backend = ("torch" if device == "cpu" else "triton") if backend == "auto" else backend
    drawn = draw(function, case, salt)
    bounds, shard = shard_of(drawn, group)
    if function.truth is None:
        truth = Truth(function.reference(drawn, torch.float64, device))
    else:
        truth = function.truth(drawn, bounds, backend, device)
    drawn = drawn._replace(before=truth.noise.get("dC", drawn.before))
    baseline = function.reference(drawn, case.dtype, device)
    if function.outputs_in not in (None, case.dtype):
        baseline |= function.reference(drawn._replace(upstream={}), function.outputs_in, device)  # without gradients

    run = partial(function.call, drawn, shard, backend, device)
    first, errors = run(), []
    for name, ours in first.items():
        if not name.endswith(AGAIN):
            padding, ours, part = of_rank(name, ours, drawn.options, shard)
            errors += padding + function.judge(drawn, name, ours, part, baseline, truth)
    again = run() if case.twice or device == "cuda" else None
    return errors + same_bits(first, again, function.shared, group)


def draw(function: Function, case: Case, salt: int = 0) -> Drawn:
    """Draw the tensors of a case: the same on every rank and machine."""
    return function.draw(case, torch.Generator().manual_seed(zlib.crc32(case.name.encode()) + salt))


def shard_of(drawn: Drawn, group: dist.ProcessGroup | None) -> tuple[Bounds, VocabShard]:
    """Return the rows of every rank, and this rank's shard."""
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    vocab_size = len(drawn.problem.weight)
    bounds = drawn.case.shards(vocab_size, ranks)
    start, stop = bounds[rank]
    return bounds, VocabShard(start, stop, vocab_size, group)


AGAIN = " of a second backward"


def found(
    out: dict[str, Any],
    upstream: dict[str, Tensor],
    leaves: dict[str, Any],
    case: Case | None = None,
    elsewhere: str = "",
) -> dict[str, Tensor]:
    """Return the outputs of a call that are not None, and the gradients of ``leaves`` by the leaves' names.

    ``case`` is None for a reference. Names of a second backward's gradients end in ``AGAIN``; the gradient of the leaf
    ``elsewhere`` is added to a buffer.
    """
    outputs = {name: x for name, x in out.items() if isinstance(x, Tensor)}
    values = {name: x.detach() for name, x in outputs.items()}
    inputs = {name: x for name, x in leaves.items() if x is not None and x.requires_grad}
    roots, above = [outputs[name] for name in upstream], []
    for name, root in zip(upstream, roots, strict=True):
        gradient = upstream[name].to(root).view(root.shape)
        above.append(gradient if case is None else view_of(gradient, case.layout(name)))
    twice = case is not None and case.twice and not elsewhere
    for suffix in ("", AGAIN)[: (1 + twice) * bool(inputs and roots)]:
        again = twice and not suffix
        grads = torch.autograd.grad(roots, list(inputs.values()), above, retain_graph=again, allow_unused=True)
        for (name, leaf), grad in zip(inputs.items(), grads, strict=True):
            assert (grad is None) == (name == elsewhere), f"{name}: a gradient beside its buffer, or none at all"
            if grad is not None:
                assert (grad.dtype, grad.shape) == (leaf.dtype, leaf.shape), f"{name} is {grad.dtype} {grad.shape}"
                values[name + suffix] = grad
    return values


def draw_problem(case: Case, generator: torch.Generator) -> Problem:
    """Draw the whole problem, with values that the dtypes and layouts of the case can hold."""
    problem = case.problem(generator)
    arguments = {"hidden": "input", "weight": "linear_weight", "labels": "target", "bias": "linear_bias"}
    for name, argument in arguments.items():
        values = getattr(problem, name)
        if values is not None and case.layout(argument) == "expanded":
            problem = replace(problem, **{name: constant(values)})
    return problem.rounded(case.held, case.bias or case.dtype)


def draw_upstream(case: Case, shapes: dict[str, tuple[int, ...]], generator: torch.Generator) -> dict[str, Tensor]:
    """Draw the gradients of the outputs that are differentiated, 0 for every fifth token."""
    scale = 1.0 if case.scale is None else case.scale
    upstream = {}
    for name in case.upstream:
        shape = shapes[name]
        if not shape and case.scale is None:
            upstream[name] = torch.ones(())
            continue
        gradient = torch.randn(shape, generator=generator) * scale
        if shape:
            gradient[4::5] = 0.0
        repeated = shape and case.layout(name) == "expanded"
        upstream[name] = constant(gradient.view(case.shape or shape)).view(shape) if repeated else gradient
    return upstream


def leaves_of(case: Case, problem: Problem, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Return hidden states, weight and bias under the names of their gradients."""
    problem = problem.rounded(case.dtype, FP32) if case.autocast else problem
    tensors = (problem.hidden, problem.weight, problem.bias)
    leaves = (None if x is None else x.to(device, dtype).requires_grad_() for x in tensors)
    return dict(zip(GRADIENTS, leaves, strict=False))


def local_leaves(
    case: Case, problem: Problem, device: str, shard: VocabShard, rows: VocabShard | None = None
) -> dict[str, Any]:
    """Return this rank's part of the leaves, with these rows or the shard's, in the layouts of the case."""
    hidden, rows = problem.hidden, rows or shard
    hidden = hidden if case.shape is None else hidden.view(*case.shape, hidden.shape[1])
    if case.options.get("sequence_parallel") and shard.group is not None:
        hidden = hidden.chunk(shard.group_size)[shard.group.rank()]

    def local(whole: Tensor, argument: str, dtype: torch.dtype) -> Tensor:
        held = whole.new_full((rows.num_rows, *whole.shape[1:]), case.padding)
        held[: rows.num_valid] = whole[rows.start : rows.start + rows.num_valid]
        held = constant(held) if case.layout(argument) == "expanded" and rows.num_valid else held
        return view_of(held.to(device, dtype), case.layout(argument))

    tensors = (
        view_of(hidden.to(device, case.held), case.layout("input")),
        local(problem.weight, "linear_weight", case.held),
        None if problem.bias is None else local(problem.bias, "linear_bias", case.bias or case.held),
    )
    named = zip(GRADIENTS, tensors, case.wanted, strict=False)
    return {name: None if x is None else x.requires_grad_(wanted) for name, x, wanted in named}


def of_rank(name: str, ours: Tensor, options: dict[str, Any], shard: VocabShard) -> tuple[list[Error], Tensor, Part]:
    """Return the error of padding rows, the value without them, and how to cut out this rank's part."""
    if name in ("dC", "dbias"):
        rows = slice(shard.start, shard.start + shard.num_valid)
        padding = Error(f"{name} of padding", ours[shard.num_valid :].abs().sum().item(), 0.0)
        return [padding], ours[: shard.num_valid], lambda whole: whole[rows]
    group = shard.group
    if name == "dE" and group is not None:
        if options.get("input_grad") == "partial":
            ours = ours.double()
            dist.all_reduce(ours, group=group)
        if options.get("sequence_parallel"):
            return [], ours, lambda whole: whole.chunk(group.size())[group.rank()]
    return [], ours, lambda whole: whole


def compare(
    quantity: str, ours: Tensor, baseline: Tensor, truth: Tensor, dtype: torch.dtype, more: float = 0.0
) -> Error:
    """Compare max|ours - truth| with ``bound_of`` and ``more``. Both must be non-finite at the same places."""
    ours, truth = (x.detach().double().cpu() for x in (ours, truth))
    if ours.shape != truth.shape:
        raise AssertionError(f"{quantity} has shape {tuple(ours.shape)}, expected {tuple(truth.shape)}")
    if not torch.equal(ours.isfinite(), truth.isfinite()):
        return Error(quantity, float("inf"), 0.0)
    return Error(quantity, largest(ours - truth), bound_of(baseline, truth, dtype) + more)


def bound_of(baseline: Tensor, truth: Tensor, dtype: torch.dtype) -> float:
    """Return 2 max|baseline - truth| + eps max|truth|. Source: tests of flash-attention and QuACK."""
    baseline, truth = (x.detach().double().cpu() for x in (baseline, truth))
    return 2 * largest(baseline - truth) + EPS[dtype] * largest(truth)


def largest(values: Any) -> float:
    """Return the largest finite absolute value of a tensor or number, or 0."""
    values = torch.as_tensor(values)
    values = values[values.isfinite()]
    return values.abs().max().item() if values.numel() else 0.0


def logit_sizes(problem: Problem) -> Tensor:
    """Return the root of the sum of squares of each logit's terms, [N, V]."""
    squares = problem.hidden.square() @ problem.weight.square().t()
    return (squares if problem.bias is None else squares + problem.bias.square()).sqrt()


def assert_no_worse(
    ours: Tensor, baseline: Tensor, truth: Tensor, dtype: torch.dtype | None = None, quantity: str = "value"
) -> None:
    """Raise AssertionError if the error exceeds its bound. ``dtype`` chooses eps."""
    result = compare(quantity, ours, baseline, truth, dtype or ours.dtype)
    assert result.ok, f"{result.quantity}: error {result.error:.3g} > bound {result.bound:.3g}"


def same_bits(
    first: dict[str, Tensor], again: dict[str, Tensor] | None, shared: Iterable[str], group: dist.ProcessGroup | None
) -> list[Error]:
    """Count tensors whose bits differ: in a second backward or run or, if ``shared``, between ranks."""

    def error(what: str, pairs: list[tuple[Tensor, Tensor]]) -> Error:
        return Error(f"bits {what}", float(sum(not torch.equal(bits(a), bits(b)) for a, b in pairs)), 0.0)

    second = [name for name in first if name.endswith(AGAIN)]
    errors = [error(AGAIN.strip(), [(first[name.removesuffix(AGAIN)], first[name]) for name in second])]
    if again is not None:
        errors.append(error("of run 2", [(first[name], again[name]) for name in first]))
    if group is not None:
        pairs = []
        for ours in (first[name].contiguous() for name in shared if name in first):
            everyone = [torch.empty_like(ours) for _ in range(group.size())]
            dist.all_gather(everyone, ours, group=group)
            pairs += [(theirs, ours) for theirs in everyone]
        errors.append(error("over ranks", pairs))
    return errors


def bits(x: Tensor) -> Tensor:
    """Return the bytes of a tensor, which can be compared where NaN is."""
    return x.detach().flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def constant(values: Tensor) -> Tensor:
    """Replace every entry of dim 0 by the first one: an expanded view can hold the result."""
    return values[:1].expand_as(values).clone() if values.dim() and values.shape[0] else values


def view_of(values: Tensor, layout: str) -> Tensor:
    """Return a view that holds ``values`` in another memory layout, without autograd history.

    The memory around the numbers holds NaN, or an id that no vocabulary has.

    "strided" takes every second element of the last dim, "transposed" has the first dim innermost, "sliced" is a window of a
    larger buffer, "unaligned" begins one element behind an aligned address, "expanded" has stride 0 on dim 0: see ``constant``.
    A vector or a number that would be transposed is strided.
    """
    values, shape = values.detach(), tuple(values.shape)
    if layout == "contiguous":
        return values.clone()
    if layout == "unaligned":
        return _poison((values.numel() + 1,), values)[1:].view(shape).copy_(values)
    if not shape:
        return _poison((3,), values)[1].copy_(values)
    if layout == "expanded" and shape[0]:
        return values[:1].clone().expand(shape)
    if layout == "sliced":
        window = _poison(tuple(size + 5 for size in shape), values)
        for dim, size in enumerate(shape):
            window = window.narrow(dim, 2, size)
        return window.copy_(values)
    if layout == "transposed" and len(shape) > 1:
        return values.transpose(0, -1).clone(memory_format=torch.contiguous_format).transpose(0, -1)
    return _poison((*shape[:-1], 2 * values.shape[-1]), values)[..., ::2].copy_(values)


def _poison(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return like.new_full(shape, torch.nan if like.is_floating_point() else POISON_ID)
