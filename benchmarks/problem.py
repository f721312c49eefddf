"""What the methods of a table of heads compute, the reference that they are compared with, and their measurement."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cce_dist import VocabShard
from cce_dist import reference as specification
from loop import Clock, Job, Limits, Measured, Method, Progress, Trial, measure, relative_error
from records import Errors, Floor, describe
from workload import IGNORE_INDEX

LIMITS = Limits(5e-2, 5e-2, "hidden states", "the weight")  # methods that round to bf16 have 2e-3 to 2e-2
REFERENCE_CHUNK_BYTES = 1 << 30

Function = Callable[..., Tensor]  # the operands of a problem -> its outputs


@dataclass(frozen=True)
class Problem:
    """What the methods of a table compute, and on which input."""

    tokens: tuple[Tensor, ...]  # hidden states [N, D], then labels [N], ids [N, K] or a teacher's hidden states
    weights: tuple[Tensor, ...]  # the head's weight [V, D], then a teacher's
    upstream: Tensor  # gradient of each output, [N] or [N, M]
    values: Function  # the specification: takes ``operands`` and returns the outputs, [N] or [N, M]
    reduced: bool = True  # methods return the sum of all outputs weighted by ``upstream``, in place of the outputs
    grad: bool = True  # whether gradients of hidden states and weight are computed

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """The arguments of a method: hidden states and weight, which are differentiated, then the others."""
        return self.tokens[0], self.weights[0], *self.tokens[1:], *self.weights[1:]

    @property
    def counts(self) -> list[int]:
        """Number of matmuls: in forward, in a step that keeps the logits, and in a step that computes them again."""
        heads, gradients = len(self.weights), 2 * self.grad
        return [heads, heads + gradients, 2 * heads + gradients]


def loss_of(hidden: Tensor, weight: Tensor, labels: Tensor, softcap: float | None = None) -> Problem:
    """Return the problem of the mean loss over the labels that are not ignored."""

    def losses(*operands: Tensor) -> Tensor:
        return specification.linear_cross_entropy(*operands, softcap=softcap, reduction="none").loss

    kept = (labels != IGNORE_INDEX).double()
    return Problem((hidden, labels), (weight,), kept / kept.sum().clamp_min(1), losses)


def step(function: Function, problem: Problem) -> tuple[Tensor, ...]:
    """Compute the outputs and, if the problem has them, both gradients, on new leaves."""
    hidden, weight, *others = problem.operands
    hidden, weight = (tensor.detach().requires_grad_(problem.grad) for tensor in (hidden, weight))
    value = function(hidden, weight, *others)
    if not problem.grad:
        return (value,)
    upstream = None if problem.reduced else problem.upstream.to(value.dtype)
    return value.detach(), *torch.autograd.grad(value, (hidden, weight), upstream)


class Reference(NamedTuple):
    """The right outputs, 0-d if they are reduced, and the right gradients, zeros if the problem has none."""

    value: Tensor
    d_hidden: Tensor  # [N, D]
    d_weight: Tensor  # [V, D]


def reference_of(problem: Problem) -> Reference:
    """Compute a step in fp32 (in fp64 for fp32 inputs), a chunk of tokens at a time."""
    hidden, weight = problem.tokens[0], problem.weights[0]
    dtype = torch.float64 if hidden.dtype == torch.float32 else torch.float32
    weights = tuple(each.to(dtype) for each in problem.weights)
    rows = max(1, REFERENCE_CHUNK_BYTES // (len(weight) * weights[0].element_size()))
    values, d_hidden, d_weight = [], [], torch.zeros_like(weights[0])
    with _ieee_products():
        for start in range(0, len(hidden), rows):
            first, *others = (each[start : start + rows] for each in problem.tokens)
            others = (each.to(dtype) if each.is_floating_point() else each for each in others)
            upstream = problem.upstream[start : start + rows].to(dtype)
            chunk = replace(problem, tokens=(first.to(dtype), *others), weights=weights, upstream=upstream)
            value, *gradients = step(problem.values, replace(chunk, reduced=False))
            values.append(value)
            if problem.grad:
                d_hidden.append(gradients[0])
                d_weight += gradients[1]
    value = torch.cat(values)
    if problem.reduced:
        value = (value.double() * problem.upstream.double()).sum()
    return Reference(value, torch.cat(d_hidden) if d_hidden else torch.zeros_like(hidden), d_weight)


def parts_of(problem: Problem, reference: Reference, shard: VocabShard) -> dict[bool, tuple[Problem, Reference]]:
    """Return a rank's part of problem and reference, by whether it has only a slice of the tokens (sequence parallelism)."""
    if shard.group is None:
        return dict.fromkeys((False, True), (problem, reference))
    hidden, *others = problem.tokens
    size, rank = shard.group_size, shard.group.rank()
    rows = slice(shard.start, shard.stop)
    tokens = slice(rank * len(hidden) // size, (rank + 1) * len(hidden) // size)
    own = replace(problem, weights=tuple(weight[rows].clone() for weight in problem.weights))
    right = reference._replace(d_weight=reference.d_weight[rows])
    sliced = replace(own, tokens=(hidden[tokens].clone(), *others))
    return {False: (own, right), True: (sliced, right._replace(d_hidden=reference.d_hidden[tokens]))}


def trial_of(function: Function, problem: Problem, reference: Reference, forward: bool = True) -> Trial:
    """Return the trial of a method on a rank's part of a problem. With ``forward`` the forward pass is also timed alone."""
    run = partial(step, function, problem)

    def errors(value: Tensor, *gradients: Tensor) -> Errors:
        loss = relative_error([(value, reference.value)])
        if not gradients:
            return Errors(loss, 0.0, 0.0, 0.0)
        # A method that adds dC to a buffer returns a dummy gradient.
        d_hidden, d_weight = gradients[0], getattr(function, "main_grad", gradients[1])
        means = d_hidden.mean(0, dtype=reference.d_hidden.dtype), reference.d_hidden.mean(0)
        pairs = ((d_hidden, reference.d_hidden), (d_weight, reference.d_weight), means)
        return Errors(loss, *(relative_error([pair]) for pair in pairs))

    @torch.no_grad()
    def alone() -> None:
        function(*problem.operands)

    jobs: dict[str, Callable[[], object]] = {"forward": alone} if forward or not problem.grad else {}
    return Trial(run, errors, LIMITS, run, jobs | ({"total": run} if problem.grad else {}))


def matmuls(problem: Problem, floor: Floor) -> list[Job]:
    """Return the jobs of ``floor``: matmuls of the problem's own operands, because values affect power and clock."""
    (hidden, *_), (weight, *_) = problem.tokens, problem.weights
    heads = list(zip(problem.tokens, problem.weights, strict=False))  # a teacher's hidden states are tokens, too
    try:
        d_logits = torch.mm(hidden, weight.T)
        for chunk in d_logits.split(1024):
            chunk.copy_(chunk.float().softmax(1))
    except torch.OutOfMemoryError as error:
        floor.problem = describe(error)
        return []

    def multiply(logits: int, gradients: int) -> None:
        for _ in range(logits):
            for states, rows in heads:
                torch.mm(states, rows.T)
        for _ in range(gradients):
            torch.mm(d_logits, weight)
            torch.mm(d_logits.T, hidden)

    jobs = [Job(floor, floor.one, partial(multiply, 1, 0))]
    if problem.grad:
        jobs.append(Job(floor, floor.three, partial(multiply, 1, 1)))
        jobs.append(Job(floor, floor.four, partial(multiply, 2, 1)))
    return jobs


def measure_problem(
    problem: Problem,
    shard: VocabShard,
    methods: dict[str, Method],
    repeats: int,
    progress: Progress = lambda line: None,
    forward: bool = True,
    wall: bool = False,
) -> Measured:
    """Measure the methods that can run on this size of group, and the plain matmuls of one shard.

    ``problem`` is the whole input, on every rank. With ``forward`` the forward pass is timed alone, too. For ``wall`` see
    ``Clock``.
    """
    progress("reference")
    # The reference moves to the host, to leave the device's memory to the timed steps.
    parts = parts_of(problem, Reference(*(tensor.cpu() for tensor in reference_of(problem))), shard)
    num_tokens, device = len(problem.tokens[0]), problem.tokens[0].device

    def make(method: Method) -> Trial:
        if method.sequence_parallel and num_tokens % shard.group_size:
            raise ValueError(f"{num_tokens} tokens are not {shard.group_size} equal slices")
        part, reference = parts[method.sequence_parallel]
        return trial_of(method.build(shard, part.tokens[0]), part, reference, forward)

    chosen = {name: method for name, method in methods.items() if method.is_for(shard.group_size)}
    floor = partial(matmuls, parts[False][0])
    return measure(chosen, make, repeats, Clock(device, shard.group, wall), progress, floor)


@contextmanager
def _ieee_products() -> Iterator[None]:
    """Have torch multiply fp32 matrices without rounding their elements."""
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        was = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(was)
        return
    settings: Any = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # pyright: ignore
    before = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings:
            setting.fp32_precision = "ieee"
        yield
    finally:
        for setting, was in zip(settings, before, strict=True):
            setting.fp32_precision = was
