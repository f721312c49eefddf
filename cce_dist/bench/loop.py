"""Check each method's loss and gradients, then time those that are right, in turns, next to plain matrix products.

A fast wrong gradient is worth nothing, so a method whose loss or gradients are off is refused a time. Methods that are right
are timed in turns (one step of each method, then the next round, in another order), so that clocks and temperature drift for
all alike and nobody always follows the same neighbour.

The vocabulary is split over a group, and one rank is a group too. Every rank checks its own part of the gradients, then all
time in turns. A row's errors are the worst rank's, its time of each round is the slowest rank's, its memory the largest
rank's. Ranks meet on the device before each timed job, so that no rank's delay is in another's time. The floor is the plain
products of one rank's shard.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist import VocabShard
from cce_dist.bench.collectives import Collective, Collectives
from cce_dist.bench.methods import Method
from cce_dist.bench.peers import LossFn
from cce_dist.bench.workload import IGNORE_INDEX, Workload
from cce_dist.kernels.precision import ieee_products
from cce_dist.report import describe

# Relative, of the loss and (Frobenius norm) of dE and dC. Methods that round to bf16 have 2e-3 to 2e-2.
MAX_ERROR = 5e-2
REFERENCE_CHUNK_BYTES = 1 << 30
HEAT_SIDE, HEAT_PRODUCTS = 8192, 32  # square bf16 products before each timed job: about 50 ms on an H200


class Reference(NamedTuple):
    """The truth: loss, dE [N, D] and dC [V, D] of the mean over labels that are not ignored."""

    loss: float
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
    """Seconds of each round, and those of the host, which launches; no host's where it computes, and in older files."""

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
    """All that is known of one method.

    Attributes:
        problem: Why there are no times, in one line; empty if there are.
        missing: The library is not installed, or not for this device.
        peak_bytes: Peak memory of a step above inputs and gradients; None on a CPU.
        first: Seconds of the first loss and gradient, what is compiled for it counted. Code that an earlier row, or a run
            before, left in a cache is not compiled again. None if there was none, and in older files.
    """

    name: str
    ours: bool
    problem: str = ""
    missing: bool = False
    errors: Errors | None = None
    forward: Timing = field(default_factory=Timing)
    total: Timing = field(default_factory=Timing)
    peak_bytes: int | None = None
    first: float | None = None


@dataclass
class Floor:
    """The matrix products that no method can do without, as plain ``torch.mm``.

    ``one`` is forward's, ``three`` adds those of dE and dC, ``four`` computes the logits twice. Each is timed as one job:
    a GPU at its power limit runs three products in a row slower than three alone.
    """

    one: Timing = field(default_factory=Timing)
    three: Timing = field(default_factory=Timing)
    four: Timing = field(default_factory=Timing)
    problem: str = ""

    def gemms(self, count: int) -> float:
        """Median seconds of 1, 3 or 4 products."""
        return {1: self.one, 3: self.three, 4: self.four}[count].median


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
    workload: Workload,
    shard: VocabShard,
    methods: dict[str, Method],
    repeats: int,
    progress: Callable[[str], None] = lambda line: None,
    forward: bool = True,
) -> Measured:
    """Check, then time; every rank of the shard's group calls it, and gets the same.

    Args:
        workload: The whole input, the same on every rank; hidden and weight need no gradient themselves.
        shard: This rank's rows.
        methods: What to compare, by name; those that are not for this size of group are left out.
        repeats: Rounds of timing.
        progress: Gets a line as each step begins.
        forward: Time forward by itself too.
    """
    progress("reference")
    parts = _parts(workload, shard)
    operands = parts[False].workload
    rows, steps, sent = [], {}, {}
    for name, method in methods.items():
        if not method.is_for(shard.group_size):
            continue
        progress(f"checking {name}")
        row, function = _checked(name, method, parts[method.sequence_parallel], shard)
        rows.append(_worst(_everyone(row, shard)))
        if not rows[-1].problem:
            steps[name] = function, parts[method.sequence_parallel].workload
            if shard.group_size > 1:
                with Collectives(shard.group_size) as seen:
                    step(*steps[name])
                sent[name] = _least_waiting(_everyone(seen.kinds, shard))
        free_memory(workload.hidden)
    # The timed steps need the truth's memory.
    del parts
    free_memory(workload.hidden)

    floor = Floor()
    jobs = _products(floor, operands)
    for row in rows:
        jobs += [] if row.problem else _jobs(row, *steps[row.name])[not forward :]
    time_in_turns(jobs, repeats, Clock(workload.hidden.device, shard), progress)
    ranks = _everyone([job.timing for job in jobs], shard)
    for job, of_ranks in zip(jobs, zip(*ranks, strict=True), strict=True):
        job.timing.seconds = _slowest([timing.seconds for timing in of_ranks])
        job.timing.host = _slowest([timing.host for timing in of_ranks])
    return Measured(rows, floor, sent)


class Part(NamedTuple):
    """A rank's part of the input, and of what should come out."""

    workload: Workload
    truth: Reference


def _parts(workload: Workload, shard: VocabShard) -> dict[bool, Part]:
    """This rank's rows of the weight with all tokens (False), and with its slice of them for sequence parallelism (True)."""
    truth = reference(*workload[:3])
    if shard.group is None:
        return dict.fromkeys((False, True), Part(workload, truth))
    size, rank, num_tokens = shard.group_size, shard.group.rank(), len(workload.hidden)
    rows, tokens = slice(shard.start, shard.stop), slice(rank * num_tokens // size, (rank + 1) * num_tokens // size)
    whole = Part(workload._replace(weight=workload.weight[rows].clone()), truth._replace(d_weight=truth.d_weight[rows]))
    hidden, d_hidden = workload.hidden[tokens].clone(), truth.d_hidden[tokens]
    return {False: whole, True: Part(whole.workload._replace(hidden=hidden), whole.truth._replace(d_hidden=d_hidden))}


def _checked(name: str, method: Method, part: Part, shard: VocabShard) -> tuple[Row, LossFn | None]:
    """Build and check a method: this rank's row, and the loss function if it is right."""
    row, function = Row(name, method.ours), None
    try:
        if method.needs_cuda and not part.workload.hidden.is_cuda:
            raise ImportError("needs a GPU")
        if method.sequence_parallel and len(part.workload.labels) % shard.group_size:
            raise ValueError(f"{len(part.workload.labels)} tokens are not {shard.group_size} equal slices")
        function = method.build(shard, part.workload.hidden)
        check(row, function, part.workload, part.truth)
    except ImportError as error:
        row.problem, row.missing = describe(error), True
    # Whatever another library raises, the other methods go on.
    except Exception as error:
        row.problem = describe(error)
    return row, None if row.problem else function


def reference(hidden: Tensor, weight: Tensor, labels: Tensor) -> Reference:
    """Mean loss and gradients with fp32 logits and sums (fp64 for fp32 inputs), a chunk of tokens at a time.

    Args:
        hidden: [N, D].
        weight: [V, D], the whole vocabulary.
        labels: [N], -100 where ignored.
    """
    dtype = torch.float64 if hidden.dtype == torch.float32 else torch.float32
    num_valid = (labels != IGNORE_INDEX).sum().clamp_min(1).to(dtype)
    wide_weight = weight.to(dtype)
    loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
    d_hidden = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    d_weight = torch.zeros(weight.shape, dtype=dtype, device=hidden.device)
    rows = max(1, REFERENCE_CHUNK_BYTES // (weight.shape[0] * wide_weight.element_size()))
    with ieee_products():
        for start in range(0, hidden.shape[0], rows):
            chunk, label = hidden[start : start + rows].to(dtype), labels[start : start + rows]
            kept = (label != IGNORE_INDEX).to(dtype)
            label = label.clamp_min(0)[:, None]
            log_probability = (chunk @ wide_weight.T).log_softmax(1)
            loss -= (log_probability.gather(1, label).squeeze(1) * kept).sum()
            d_logits = log_probability.exp_()
            d_logits.scatter_add_(1, label, torch.full_like(label, -1, dtype=dtype))
            d_logits *= (kept / num_valid)[:, None]
            torch.mm(d_logits, wide_weight, out=d_hidden[start : start + rows])
            d_weight.addmm_(d_logits.T, chunk)
    return Reference((loss / num_valid).item(), d_hidden, d_weight)


def relative_error(value: Tensor, truth: Tensor) -> float:
    """||value - truth|| / ||truth||, a block of rows at a time so that no second copy of a large tensor is made."""
    difference = torch.zeros((), dtype=torch.float64, device=truth.device)
    norm = torch.zeros_like(difference)
    for some, true in zip(value.split(8192), truth.split(8192), strict=True):
        difference += (some.to(truth.dtype) - true).square().sum()
        norm += true.square().sum()
    return (difference / norm).sqrt().item()


def check(row: Row, function: LossFn, workload: Workload, truth: Reference) -> None:
    """Fill in errors and the time of the first call, and peak memory if errors are small enough."""
    start = time.perf_counter()
    loss, d_hidden, d_weight = step(function, workload)
    if workload.hidden.is_cuda:
        torch.cuda.synchronize()
    row.first = time.perf_counter() - start
    # A framework that adds up dC itself returns a dummy.
    d_weight = getattr(function, "main_grad", d_weight)
    row.errors = Errors(
        loss=abs(loss.item() - truth.loss) / max(abs(truth.loss), 1e-30),
        d_hidden=relative_error(d_hidden, truth.d_hidden),
        d_weight=relative_error(d_weight, truth.d_weight),
        d_hidden_mean=relative_error(
            d_hidden.mean(0, keepdim=True, dtype=truth.d_hidden.dtype), truth.d_hidden.mean(0, keepdim=True)
        ),
    )
    row.problem = row.errors.verdict()
    del loss, d_hidden, d_weight
    if workload.hidden.is_cuda and not row.problem:
        # A second step is free of compilation and autotuning.
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients = step(function, workload)
        torch.cuda.synchronize()
        outputs = sum(tensor.numel() * tensor.element_size() for tensor in gradients)
        row.peak_bytes = max(0, torch.cuda.max_memory_allocated() - before - outputs)


def step(function: LossFn, workload: Workload) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and both gradients. The leaves are fresh, so that nothing is accumulated."""
    hidden = workload.hidden.detach().requires_grad_()
    weight = workload.weight.detach().requires_grad_()
    loss = function(hidden, weight, workload.labels)
    d_hidden, d_weight = torch.autograd.grad(loss, (hidden, weight))
    return loss.detach(), d_hidden, d_weight


def _jobs(row: Row, function: LossFn, workload: Workload) -> list[Job]:
    """Forward alone, and the step."""

    def forward() -> None:
        with torch.no_grad():
            function(workload.hidden, workload.weight, workload.labels)

    return [Job(row, row.forward, forward), Job(row, row.total, partial(step, function, workload))]


def _products(floor: Floor, workload: Workload) -> list[Job]:
    """The plain products of the real operands: the power that a product draws, and so its clock, depends on the values."""
    hidden, weight = workload.hidden, workload.weight
    try:
        d_logits = torch.mm(hidden, weight.T)
        for chunk in d_logits.split(1024):
            chunk.copy_(chunk.float().softmax(1))
    except torch.OutOfMemoryError as error:
        floor.problem = describe(error)
        return []

    def products(logits: int, gradients: int) -> None:
        for _ in range(logits):
            torch.mm(hidden, weight.T)
        for _ in range(gradients):
            torch.mm(d_logits, weight)
            torch.mm(d_logits.T, hidden)

    counts = ((floor.one, 1, 0), (floor.three, 1, 1), (floor.four, 2, 1))
    return [Job(floor, timing, partial(products, *count)) for timing, *count in counts]


def time_in_turns(jobs: Sequence[Job], repeats: int, clock: Clock, progress: Callable[[str], None]) -> None:
    """Time every job in rounds of shuffled order, the same order on every rank; a round before the first warms up.

    Args:
        jobs: Get their seconds of each round, or their owner the problem that came up.
        repeats: Rounds.
        clock: Times one job.
        progress: Gets a line as each round begins.
    """
    turns, shuffled = list(jobs), random.Random(0)
    for repeat in range(repeats + 1):
        shuffled.shuffle(turns)
        progress(f"round {repeat} of {repeats}" if repeat else "warming up")
        for job in turns:
            if job.owner.problem:
                continue
            try:
                times = clock.times(job.call)
            # The method was right once, so its row says what happened, and the others go on.
            except Exception as error:
                job.owner.problem = describe(error)
                free_memory(clock.meeting)
                continue
            if repeat:
                job.timing.seconds.append(times.seconds)
                job.timing.host += [] if times.host is None else [times.host]


class Times(NamedTuple):
    """Seconds of a job, and of the host to launch it; None where the host computes."""

    seconds: float
    host: float | None


class Clock:
    """Seconds that a job takes on this rank from when all ranks are there: CUDA events on a GPU, the wall clock on a CPU.

    On a GPU every job comes after the same matrix products, as it would in a training step: they bring the card to its
    power limit, whatever ran before, empty the L2 cache of the job's data, and let the host get ahead with launching. The
    host's time is that of the job's call, which returns when all is launched.
    """

    def __init__(self, device: torch.device, shard: VocabShard | None = None) -> None:
        self.group = shard.group if shard is not None else None
        self.meeting = torch.zeros(1, device=device)
        if device.type == "cuda":
            self.heat = torch.randn(HEAT_SIDE, HEAT_SIDE, dtype=torch.bfloat16, device=device)
            self.heated = torch.empty_like(self.heat)

    def __call__(self, job: Callable[[], object]) -> float:
        return self.times(job).seconds

    def times(self, job: Callable[[], object]) -> Times:
        if not self.meeting.is_cuda:
            self._meet()
            start = time.perf_counter()
            job()
            return Times(time.perf_counter() - start, None)
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
        return Times(begin.elapsed_time(end) / 1e3, host)

    def _meet(self) -> None:
        if self.group is not None:
            dist.all_reduce(self.meeting, group=self.group)


def _everyone(value: Any, shard: VocabShard) -> list[Any]:
    """Each rank's value."""
    if shard.group is None:
        return [value]
    values: list[Any] = [None] * shard.group_size
    dist.all_gather_object(values, value, group=shard.group)
    return values


def _worst(rows: Sequence[Row]) -> Row:
    """Join the ranks' rows of one method."""
    worst = rows[0]
    for row in rows[1:]:
        worst.problem, worst.missing = worst.problem or row.problem, worst.missing or row.missing
        if row.errors is not None and worst.errors is not None:
            pairs = ((getattr(row.errors, name), getattr(worst.errors, name)) for name in Errors.__dataclass_fields__)
            worst.errors = Errors(*(max(pair) for pair in pairs))
        if row.peak_bytes is not None and worst.peak_bytes is not None:
            worst.peak_bytes = max(row.peak_bytes, worst.peak_bytes)
        if row.first is not None and worst.first is not None:
            worst.first = max(row.first, worst.first)
    return worst


def _slowest(ranks: Sequence[list[float]]) -> list[float]:
    """The slowest rank's seconds of each round."""
    return [max(seconds) for seconds in zip(*ranks, strict=True)]


def _least_waiting(ranks: Sequence[list[Collective]]) -> list[Collective]:
    """Each kind as on the rank where it took least: a collective's time includes the wait for ranks that come late."""
    return [min(same, key=lambda kind: kind.seconds or 0.0) for same in zip(*ranks, strict=True)]


def free_memory(tensor: Tensor) -> None:
    gc.collect()
    if tensor.is_cuda:
        torch.cuda.empty_cache()
