"""Check each method's values and gradients, then time those that are right, next to plain matrix products.

Methods are timed in turns, in rounds of another order each, so that clocks and temperature drift for all alike.

Every rank of the group checks its own part of the gradients, then all time in turns. A row's errors are the worst rank's, its
time of each round is the slowest rank's, its memory the largest rank's.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist import VocabShard
from cce_dist import reference as specification
from cce_dist.bench.collectives import Collective, Collectives
from cce_dist.bench.methods import Method
from cce_dist.bench.workload import IGNORE_INDEX
from cce_dist.kernels.precision import ieee_products
from cce_dist.report import describe

# Relative, of the loss and (Frobenius norm) of dE and dC. Methods that round to bf16 have 2e-3 to 2e-2.
MAX_ERROR = 5e-2
REFERENCE_CHUNK_BYTES = 1 << 30
HEAT_SIDE, HEAT_PRODUCTS = 8192, 32  # square bf16 products before each timed job: about 50 ms on an H200

Function = Callable[..., Tensor]  # hidden, weight, and what else a problem has -> its values


@dataclass(frozen=True)
class Problem:
    """What the methods of a case compute, and on what."""

    tokens: tuple[Tensor, ...]  # hidden states [N, D], then labels [N], ids [N, K] or a teacher's hidden states
    weights: tuple[Tensor, ...]  # the head's weight [V, D], then a teacher's
    upstream: Tensor  # [N] or [N, M] gradient that reaches each of a token's outputs
    values: Function  # the specification: takes ``operands`` and returns the outputs, [N] or [N, M]
    reduced: bool = True  # a method returns the outputs' sum, weighted by ``upstream``, in place of the outputs
    grad: bool = True  # whether gradients of hidden states and weight are asked for
    again: int = 2  # how often a method that keeps no logits computes them

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """Hidden states and weight, which are differentiated, then the others, in the order in which a method takes them."""
        return self.tokens[0], self.weights[0], *self.tokens[1:], *self.weights[1:]

    @property
    def counts(self) -> list[int]:
        """The plain products of forward, of a step that keeps the logits, and of one that computes them again."""
        heads, gradients = len(self.weights), 2 * self.grad
        return [heads, heads + gradients, heads * self.again + gradients]


def loss_of(hidden: Tensor, weight: Tensor, labels: Tensor, softcap: float | None = None) -> Problem:
    """The mean loss over the labels that are not ignored."""
    kept = (labels != IGNORE_INDEX).double()
    return Problem((hidden, labels), (weight,), kept / kept.sum().clamp_min(1), partial(_losses, softcap=softcap))


def _losses(hidden: Tensor, weight: Tensor, labels: Tensor, softcap: float | None) -> Tensor:
    return specification.linear_cross_entropy(hidden, weight, labels, softcap=softcap, reduction="none").loss


class Reference(NamedTuple):
    """The truth: the values, 0-d where they are reduced, and where gradients are asked for dE [N, D] and dC [V, D]."""

    value: Tensor
    d_hidden: Tensor
    d_weight: Tensor


@dataclass(frozen=True)
class Errors:
    """Relative errors in the Frobenius norm; ``d_hidden_mean`` is that of dE averaged over tokens."""

    loss: float
    d_hidden: float
    d_weight: float
    d_hidden_mean: float

    def verdict(self) -> str:
        """Say in a few words if something is wrong, else nothing. NaN is wrong."""
        for name, error in (("dE", self.d_hidden), ("dC", self.d_weight)):
            if not error <= MAX_ERROR:
                return f"wrong gradient: relative error of {name} {error:.1e}, limit {MAX_ERROR:.0e}"
        if not self.loss <= MAX_ERROR:
            return f"wrong loss: relative error {self.loss:.1e}, limit {MAX_ERROR:.0e}"
        return ""


@dataclass
class Timing:
    """Seconds of each round, and those of the host, which launches; none of the host where it computes."""

    seconds: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def host_median(self) -> float | None:
        return statistics.median(self.host) if self.host else None

    @property
    def spread(self) -> float:
        """Interquartile range."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return high - low


@dataclass
class Row:
    """All that is known of one method."""

    name: str
    ours: bool
    problem: str = ""  # why there are no times, in one line
    missing: bool = False  # the library is not installed, or not for this device
    errors: Errors | None = None
    forward: Timing = field(default_factory=Timing)
    total: Timing = field(default_factory=Timing)
    peak_bytes: int | None = None  # of a step above inputs and gradients, of a whole step with them; None on a CPU
    first: float | None = None  # seconds of the first loss and gradient, with what is compiled; None if there was none
    value: float | None = None  # the loss itself; of whole steps alone
    longest: int | None = None  # tokens of the longest sequence that fits; of whole steps where it was asked for


@dataclass
class Floor:
    """The matrix products of ``Problem.counts``, as plain ``torch.mm``: ``one`` is forward's, ``three`` those of a step.

    Each is one job: a GPU at its power limit runs three products in a row slower than three alone.
    """

    one: Timing = field(default_factory=Timing)
    three: Timing = field(default_factory=Timing)
    four: Timing = field(default_factory=Timing)
    problem: str = ""


class Measured(NamedTuple):
    """A row for each method in order, the products of one shard in the same run, and what a step of each method sends."""

    rows: list[Row]
    floor: Floor
    collectives: dict[str, list[Collective]]


class Job(NamedTuple):
    """A call that is timed, and where its seconds and its failure go."""

    owner: Row | Floor
    timing: Timing
    call: Callable[[], object]


def measure(
    problem: Problem,
    shard: VocabShard,
    methods: dict[str, Method],
    repeats: int,
    progress: Callable[[str], None] = lambda line: None,
    forward: bool = True,
) -> Measured:
    """Check, then time the methods that are for this size of group; every rank of the group calls it.

    ``problem`` is the whole input on every rank. ``progress`` gets a line as each step begins.
    """
    progress("reference")
    parts = _parts(problem, shard)
    hidden = problem.tokens[0]
    rows, steps, sent = [], {}, {}
    for name, method in methods.items():
        if not method.is_for(shard.group_size):
            continue
        progress(f"checking {name}")
        own, truth = parts[method.sequence_parallel]
        row, function = _checked(name, method, own, truth, shard)
        rows.append(worst(everyone(row, shard)))
        if function is not None and not rows[-1].problem:
            steps[name] = function, own
            if shard.group_size > 1:
                with Collectives(shard.group_size) as seen:
                    step(*steps[name])
                sent[name] = least_waiting(everyone(seen.kinds, shard))
        free_memory(hidden)
    # The timed steps need the truth's memory.
    own, parts, truth = parts[False][0], {}, None
    free_memory(hidden)

    floor = Floor()
    jobs = _products(floor, own)
    for row in rows:
        jobs += [] if row.problem else _jobs(row, steps[row.name], forward)
    time_in_turns(jobs, repeats, Clock(hidden.device, shard), progress)
    take_slowest(jobs, shard)
    return Measured(rows, floor, sent)


def _parts(problem: Problem, shard: VocabShard) -> dict[bool, tuple[Problem, Reference]]:
    """This rank's part of the input and of what should come out: with all tokens (False), or its slice of them (True)."""
    truth = truth_of(problem)
    if shard.group is None:
        return dict.fromkeys((False, True), (problem, truth))
    (hidden, *others), size, rank = problem.tokens, shard.group_size, shard.group.rank()
    rows, tokens = slice(shard.start, shard.stop), slice(rank * len(hidden) // size, (rank + 1) * len(hidden) // size)
    own = replace(problem, weights=tuple(weight[rows].clone() for weight in problem.weights))
    truth = truth._replace(d_weight=truth.d_weight[rows])
    sliced = replace(own, tokens=(hidden[tokens].clone(), *others))
    return {False: (own, truth), True: (sliced, truth._replace(d_hidden=truth.d_hidden[tokens]))}


def _checked(
    name: str, method: Method, problem: Problem, truth: Reference, shard: VocabShard
) -> tuple[Row, Function | None]:
    """Build and check a method: this rank's row, and the function if it is right."""
    row, function, hidden = Row(name, method.ours), None, problem.tokens[0]
    with noted(row):
        if method.needs_cuda and not hidden.is_cuda:
            raise ImportError("needs a GPU")
        num_tokens = len(problem.tokens[1])
        if method.sequence_parallel and num_tokens % shard.group_size:
            raise ValueError(f"{num_tokens} tokens are not {shard.group_size} equal slices")
        function = method.build(shard, hidden)
        check(row, function, problem, truth)
    return row, None if row.problem else function


@contextmanager
def noted(row: Row) -> Iterator[None]:
    """Write into a row what goes wrong, so that the others go on."""
    try:
        yield
    except ImportError as error:
        row.problem, row.missing = describe(error), True
    except Exception as error:  # whatever another library raises
        row.problem = describe(error)


def truth_of(problem: Problem) -> Reference:
    """The values of a step with fp32 logits and sums (fp64 for fp32 inputs), a chunk of tokens at a time."""
    hidden, weight = problem.tokens[0], problem.weights[0]
    dtype = torch.float64 if hidden.dtype == torch.float32 else torch.float32
    weights = [each.to(dtype) for each in problem.weights]
    rows = max(1, REFERENCE_CHUNK_BYTES // (len(weight) * weights[0].element_size()))
    values, d_hidden, d_weight = [], [], torch.zeros_like(weights[0])
    upstream = problem.upstream.to(dtype)
    with ieee_products():
        for start in range(0, len(hidden), rows):
            some = slice(start, start + rows)
            first, *others = (each[some] for each in problem.tokens)
            others = tuple(each.to(dtype) if each.is_floating_point() else each for each in others)
            chunk = replace(problem, tokens=(first.to(dtype), *others), weights=tuple(weights), upstream=upstream[some])
            value, *gradients = step(problem.values, replace(chunk, reduced=False))
            values.append(value)
            if problem.grad:
                d_hidden.append(gradients[0])
                d_weight += gradients[1]
    value = torch.cat(values)
    if problem.reduced:
        value = (value.double() * problem.upstream.double()).sum()
    return Reference(value, torch.cat(d_hidden) if d_hidden else torch.zeros_like(hidden), d_weight)


def relative_error(value: Tensor, truth: Tensor) -> float:
    """||value - truth|| / ||truth||, a block of rows at a time so that no second copy of a large tensor is made."""
    difference = torch.zeros((), dtype=torch.float64, device=truth.device)
    norm = torch.zeros_like(difference)
    for some, true in zip(value.split(8192), truth.split(8192), strict=True):
        difference += (some.to(truth.dtype) - true).square().sum()
        norm += true.square().sum()
    return (difference / norm).sqrt().item()


def check(row: Row, function: Function, problem: Problem, truth: Reference) -> None:
    """Fill in errors and the time of the first call, and peak memory if errors are small enough."""
    on_gpu = problem.tokens[0].is_cuda
    start = time.perf_counter()
    value, *gradients = step(function, problem)
    if on_gpu:
        torch.cuda.synchronize()
    row.first = time.perf_counter() - start
    row.errors = Errors(relative_error(value.reshape(-1, 1), truth.value.reshape(-1, 1)), 0.0, 0.0, 0.0)
    if problem.grad:
        # A framework that adds up dC itself returns a dummy.
        d_hidden, d_weight = gradients[0], getattr(function, "main_grad", gradients[1])
        means = (d.mean(0, keepdim=True, dtype=truth.d_hidden.dtype) for d in (d_hidden, truth.d_hidden))
        row.errors = replace(
            row.errors,
            d_hidden=relative_error(d_hidden, truth.d_hidden),
            d_weight=relative_error(d_weight, truth.d_weight),
            d_hidden_mean=relative_error(*means),
        )
        del d_hidden, d_weight, means
    row.problem = row.errors.verdict()
    del value, gradients
    if on_gpu and not row.problem:
        # A second step is free of compilation and autotuning.
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        outputs = sum(tensor.nbytes for tensor in step(function, problem))
        torch.cuda.synchronize()
        row.peak_bytes = max(0, torch.cuda.max_memory_allocated() - before - outputs)


def step(function: Function, problem: Problem) -> tuple[Tensor, ...]:
    """The values, and where they are asked for both gradients. The leaves are fresh, so that nothing is accumulated."""
    hidden, weight, *others = problem.operands
    hidden, weight = (tensor.detach().requires_grad_(problem.grad) for tensor in (hidden, weight))
    value = function(hidden, weight, *others)
    if not problem.grad:
        return (value,)
    upstream = None if problem.reduced else problem.upstream.to(value.dtype)
    return value.detach(), *torch.autograd.grad(value, (hidden, weight), upstream)


def _jobs(row: Row, call: tuple[Function, Problem], forward: bool) -> list[Job]:
    """Forward alone if it is asked for, and the step where there are gradients."""

    function, problem = call

    def alone() -> None:
        with torch.no_grad():
            function(*problem.operands)

    jobs = [Job(row, row.forward, alone)] if forward or not problem.grad else []
    return jobs + [Job(row, row.total, partial(step, function, problem))] * problem.grad


def _products(floor: Floor, problem: Problem) -> list[Job]:
    """The plain products of the real operands: the power that a product draws, and so its clock, depends on the values."""
    (hidden, *_), (weight, *_) = problem.tokens, problem.weights
    heads = list(zip(problem.tokens, problem.weights, strict=False))  # a teacher's tokens are hidden states, too
    try:
        d_logits = torch.mm(hidden, weight.T)
        for chunk in d_logits.split(1024):
            chunk.copy_(chunk.float().softmax(1))
    except torch.OutOfMemoryError as error:
        floor.problem = describe(error)
        return []

    def products(logits: int, gradients: int) -> None:
        for _ in range(logits):
            for states, rows in heads:
                torch.mm(states, rows.T)
        for _ in range(gradients):
            torch.mm(d_logits, weight)
            torch.mm(d_logits.T, hidden)

    jobs = [Job(floor, floor.one, partial(products, 1, 0))]
    if problem.grad:
        jobs.append(Job(floor, floor.three, partial(products, 1, 1)))
        jobs.append(Job(floor, floor.four, partial(products, problem.again, 1)))
    return jobs


def time_in_turns(jobs: Sequence[Job], repeats: int, clock: Clock, progress: Callable[[str], None]) -> None:
    """Time every job in rounds of shuffled order, the same on every rank, after a round that warms up."""
    turns, shuffled = list(jobs), random.Random(0)
    for repeat in range(repeats + 1):
        shuffled.shuffle(turns)
        progress(f"round {repeat} of {repeats}" if repeat else "warming up")
        for job in turns:
            if job.owner.problem:
                continue
            try:
                seconds, host = clock.times(job.call)
            # The method was right once, so its row says what happened, and the others go on.
            except Exception as error:
                job.owner.problem = describe(error)
                free_memory(clock.meeting)
                continue
            if repeat:
                job.timing.seconds.append(seconds)
                job.timing.host += [] if host is None else [host]


def take_slowest(jobs: Sequence[Job], shard: VocabShard) -> None:
    """Give each round the time of the slowest rank."""
    ranks = everyone([job.timing for job in jobs], shard)
    for job, of_ranks in zip(jobs, zip(*ranks, strict=True), strict=True):
        for name in ("seconds", "host"):
            rounds = zip(*(getattr(timing, name) for timing in of_ranks), strict=True)
            setattr(job.timing, name, list(map(max, rounds)))


class Clock:
    """Seconds that a job takes on this rank from when all ranks are there: CUDA events on a GPU, the wall clock on a CPU.

    On a GPU every job comes after the same matrix products: they bring the card to its power limit, empty the L2 cache of the
    job's data, and let the host get ahead with launching. The host's time is that of the job's call.
    """

    def __init__(self, device: torch.device, shard: VocabShard | None = None) -> None:
        self.group = shard.group if shard is not None else None
        self.meeting = torch.zeros(1, device=device)
        if device.type == "cuda":
            self.heat = torch.randn(HEAT_SIDE, HEAT_SIDE, dtype=torch.bfloat16, device=device)
            self.heated = torch.empty_like(self.heat)

    def __call__(self, job: Callable[[], object]) -> float:
        return self.times(job)[0]

    def times(self, job: Callable[[], object]) -> tuple[float, float | None]:
        """Seconds of a job, and of the host to launch it; None where the host computes."""
        if not self.meeting.is_cuda:
            self._meet()
            start = time.perf_counter()
            job()
            return time.perf_counter() - start, None
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(HEAT_PRODUCTS):
            torch.mm(self.heat, self.heat, out=self.heated)
        self._meet()
        begin.record()
        start = time.perf_counter()
        job()
        host = time.perf_counter() - start
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3, host

    def _meet(self) -> None:
        if self.group is not None:
            dist.all_reduce(self.meeting, group=self.group)


def everyone(value: Any, shard: VocabShard) -> list[Any]:
    """Each rank's value."""
    if shard.group is None:
        return [value]
    values: list[Any] = [None] * shard.group_size
    dist.all_gather_object(values, value, group=shard.group)
    return values


def worst(rows: Sequence[Row]) -> Row:
    """Join the ranks' rows of one method."""
    found = rows[0]
    for row in rows[1:]:
        found.problem, found.missing = found.problem or row.problem, found.missing or row.missing
        if row.errors is not None and found.errors is not None:
            pairs = ((getattr(row.errors, name), getattr(found.errors, name)) for name in Errors.__dataclass_fields__)
            found.errors = Errors(*(max(pair) for pair in pairs))
        for name in ("peak_bytes", "first"):
            mine, theirs = getattr(found, name), getattr(row, name)
            setattr(found, name, max(mine, theirs) if None not in (mine, theirs) else mine)
    return found


def least_waiting(ranks: Sequence[list[Collective]]) -> list[Collective]:
    """Each kind as on the rank where it took least: a collective's time includes the wait for ranks that come late."""
    alike: dict[tuple[str, int], list[Collective]] = {}
    # Ranks may see them in another order: a CPU's group has threads of its own.
    for kind in chain.from_iterable(ranks):
        alike.setdefault((kind.name, kind.num_bytes), []).append(kind)
    return [min(same, key=lambda kind: kind.seconds or 0.0) for same in alike.values()]


def free_memory(tensor: Tensor) -> None:
    if tensor.is_cuda:
        gc.collect()
        torch.cuda.empty_cache()
