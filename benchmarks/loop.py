"""The measuring loop: check every method of a table, then time those that are right.

A table gives ``measure`` its methods and a function that makes a ``Trial`` of each. A trial first computes values and
gradients, which are compared with a reference. A method whose error is too large is not timed. The others are timed once per
round, in a new random order, so that changes of clock and temperature affect all of them alike.

With several ranks every rank calls ``measure`` with its own part of the input. A row has the largest error and the largest
memory over all ranks, and for each round the time of the slowest rank.
"""

import gc
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from collectives import Collectives
from records import Collective, Errors, Floor, Row, Timing, describe

ERROR_BLOCK = 8192  # rows that are compared at a time
HEAT_SIDE, HEAT_MATMULS = 8192, 32  # square bf16 matmuls before each timed job: about 50 ms on an H200

Progress = Callable[[str], None]


class Method(NamedTuple):
    """One row of a table."""

    build: Callable[..., Any]  # heads: shard, hidden states -> loss function; models: model -> module
    ours: bool = False
    sequence_parallel: bool = False  # hidden is this rank's slice, and so is its gradient
    needs_cuda: bool = False
    needs_group: bool = False  # no row where the vocabulary is whole
    needs_whole: bool = False  # no row where the vocabulary is split
    compiles_layers: bool = False  # models: torch.compile around each layer

    def is_for(self, num_ranks: int) -> bool:
        return not (self.needs_group if num_ranks == 1 else self.needs_whole)


class Limits(NamedTuple):
    """The largest relative errors of a method that is right."""

    loss: float
    gradient: float
    d_hidden: str  # names of the two gradients in messages
    d_weight: str

    def verdict(self, errors: Errors) -> str:
        """Return a few words on what is wrong, or an empty string. NaN is wrong."""
        measured = (
            ("loss", errors.loss, self.loss),
            (f"gradient of {self.d_hidden}", errors.d_hidden, self.gradient),
            (f"gradient of {self.d_weight}", errors.d_weight, self.gradient),
        )
        for name, error, limit in measured:
            if not error <= limit:
                return f"wrong {name}: relative error {error:.1e}, limit {limit:.0e}"
        return ""


class Trial(NamedTuple):
    """A method on the input of a table."""

    once: Callable[[], Sequence[Tensor | None]]  # computes values and gradients
    errors: Callable[..., Errors]  # compares them with the reference
    limits: Limits
    step: Callable[[], Sequence[Tensor]]  # the step whose memory is measured, without its outputs
    jobs: dict[str, Callable[[], object]]  # the calls to time, by the field of ``Row`` for the time
    resident_bytes: Callable[[], int] = lambda: 0  # memory that stays between steps, to be added


class Job(NamedTuple):
    """A call that is timed. A failure is written into ``owner.problem``."""

    owner: Row | Floor
    timing: Timing
    call: Callable[[], object]


class Measured(NamedTuple):
    """What ``measure`` returns; the fields of ``Case`` with the same names."""

    rows: list[Row]
    collectives: dict[str, list[Collective]]
    floor: Floor


def measure(
    methods: dict[str, Method],
    make: Callable[[Method], Trial],
    repeats: int,
    clock: "Clock",
    progress: Progress = lambda line: None,
    matmuls: Callable[[Floor], list[Job]] = lambda floor: [],
) -> Measured:
    """Check every method, then time those that are right, and the plain matmuls, for ``repeats`` rounds."""
    device, group = clock.meeting.device, clock.group
    rows, trials, sent = [Row(name, method.ours) for name, method in methods.items()], {}, {}
    # Make all before checking any, because making a compiled method resets torch's compiler.
    for row in rows:
        with _agreed(row, device, group):
            if methods[row.name].needs_cuda and device.type != "cuda":
                raise ImportError("needs a GPU")
            trials[row.name] = make(methods[row.name])
    for row in rows:
        if not row.problem:
            progress(f"checking {row.name}")
            with _agreed(row, device, group):
                check(row, trials[row.name])
        if not row.problem:
            with _agreed(row, device, group):
                sent[row.name] = _observe(row, trials[row.name], device, group)
        if row.problem:
            trials.pop(row.name, None)
    floor = Floor()
    jobs = matmuls(floor)
    for row in rows:
        calls = trials[row.name].jobs if row.name in trials else {}
        jobs += [Job(row, getattr(row, name), call) for name, call in calls.items()]
    time_in_turns(jobs, repeats, clock, progress)
    take_slowest(jobs, group)
    found = {}
    if group is not None:
        of_ranks = everyone(sent, group)
        found = {name: least_waiting([sent[name] for sent in of_ranks]) for name in trials}
    return Measured(rows, found, floor)


@contextmanager
def _agreed(row: Row, device: torch.device, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Record a failure in the row. Afterwards all ranks have the same row."""
    try:
        yield
    except ImportError as error:
        row.problem, row.missing = describe(error), True
    except Exception as error:  # other libraries raise anything
        row.problem = describe(error)
    free_memory(device)
    vars(row).update(vars(worst(everyone(row, group))))


def check(row: Row, trial: Trial) -> None:
    """Call a method, and fill in its errors."""
    value, *_ = computed = trial.once()
    row.value = value.item() if value is not None and not value.ndim else None
    row.errors = trial.errors(*computed)
    row.problem = trial.limits.verdict(row.errors)


def _observe(row: Row, trial: Trial, device: torch.device, group: dist.ProcessGroup | None) -> list[Collective]:
    """Return the collectives of a step, and fill in its peak memory. The method was called before, so nothing compiles."""
    kinds = []
    if group is not None:
        with Collectives(group.size()) as seen:
            trial.step()
        kinds = seen.kinds
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        outputs = sum(tensor.nbytes for tensor in trial.step())
        torch.cuda.synchronize()
        above = torch.cuda.max_memory_allocated() - before - outputs
        row.peak_bytes = max(0, above) + trial.resident_bytes()
    return kinds


def relative_error(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return ||value - truth|| / ||truth||, where all pairs (value, truth) together make one long vector.

    The truth may be on another device. Blocks of rows are compared one by one, so that no large tensor is copied whole.
    """
    squares = []
    for value, truth in pairs:
        dtype = torch.promote_types(torch.promote_types(value.dtype, truth.dtype), torch.float32)
        blocks = (torch.atleast_1d(tensor.detach()).split(ERROR_BLOCK) for tensor in (value, truth))
        for some, true in zip(*blocks, strict=True):
            true = true.to(some.device, dtype)
            difference = some.to(dtype) - true
            squares.append(torch.stack([difference.square().sum(), true.square().sum()]).double())
    of_difference, of_truth = torch.stack(squares).sum(0)
    return (of_difference / of_truth).sqrt().item()


def time_in_turns(jobs: Sequence[Job], repeats: int, clock: "Clock", progress: Progress) -> None:
    """Time every job once a round, in a random order that all ranks share, after a round that warms up, on a GPU three."""
    turns, shuffled = list(jobs), random.Random(0)
    for repeat in range(-2 if clock.meeting.is_cuda else 0, repeats + 1):
        shuffled.shuffle(turns)
        progress(f"round {repeat} of {repeats}" if repeat > 0 else "warming up")
        for job in turns:
            if job.owner.problem:
                continue
            try:
                seconds, host = clock.times(job.call)
            # The method was right before. Its row records what happened, and the others go on.
            except Exception as error:
                job.owner.problem = describe(error)
                free_memory(clock.meeting.device)
                continue
            if repeat > 0:
                job.timing.seconds.append(seconds)
                job.timing.host += [] if host is None else [host]


def take_slowest(jobs: Sequence[Job], group: dist.ProcessGroup | None) -> None:
    """Give each round the time of the slowest rank."""
    ranks = everyone([job.timing for job in jobs], group)
    for job, of_ranks in zip(jobs, zip(*ranks, strict=True), strict=True):
        for name in ("seconds", "host"):
            rounds = zip(*(getattr(timing, name) for timing in of_ranks), strict=True)
            setattr(job.timing, name, list(map(max, rounds)))


class Clock:
    """Measures the seconds of a job, by CUDA events or on a CPU by the wall clock, after all ranks have met.

    On a GPU the same matmuls come before every job. They bring the card to its power limit, evict the job's data from
    the L2 cache, and let the host launch ahead. The host's time is the time of the call alone.

    With ``wall`` the host does not launch ahead: the device is idle when the call begins, and the wall clock runs until it is
    idle again.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None, wall: bool = False) -> None:
        self.group, self.wall = group, wall
        self.meeting = torch.zeros(1, device=device)
        if device.type == "cuda":
            self.heat = torch.randn(HEAT_SIDE, HEAT_SIDE, dtype=torch.bfloat16, device=device)
            self.heated = torch.empty_like(self.heat)

    def times(self, job: Callable[[], object]) -> tuple[float, float | None]:
        """Return the seconds of a job, and the seconds that the host takes to launch it; None on a CPU."""
        if not self.meeting.is_cuda:
            self._meet()
            start = time.perf_counter()
            job()
            return time.perf_counter() - start, None
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(HEAT_MATMULS):
            torch.mm(self.heat, self.heat, out=self.heated)
        self._meet()
        if self.wall:
            torch.cuda.synchronize()
        begin.record()
        start = time.perf_counter()
        job()
        host = time.perf_counter() - start
        end.record()
        torch.cuda.synchronize()
        return time.perf_counter() - start if self.wall else begin.elapsed_time(end) / 1e3, host

    def _meet(self) -> None:
        if self.group is not None:
            dist.all_reduce(self.meeting, group=self.group)


def everyone(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return the value of each rank."""
    if group is None:
        return [value]
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def worst(rows: Sequence[Row]) -> Row:
    """Join the ranks' rows of one method: the first problem, and the largest of each number."""
    found = rows[0]
    for row in rows[1:]:
        found.problem, found.missing = found.problem or row.problem, found.missing or row.missing
        if row.errors is not None and found.errors is not None:
            pairs = ((getattr(row.errors, name), getattr(found.errors, name)) for name in Errors.__dataclass_fields__)
            found.errors = Errors(*(max(pair) for pair in pairs))
        if found.peak_bytes is not None and row.peak_bytes is not None:
            found.peak_bytes = max(found.peak_bytes, row.peak_bytes)
    return found


def least_waiting(ranks: Sequence[list[Collective]]) -> list[Collective]:
    """Take each kind of collective from the rank where it was shortest, which waited least for the others."""
    alike: dict[tuple[str, int], list[Collective]] = {}
    # Ranks may see them in different orders, because gloo has threads of its own.
    for kind in chain.from_iterable(ranks):
        alike.setdefault((kind.name, kind.num_bytes), []).append(kind)
    return [min(same, key=lambda kind: kind.seconds or 0.0) for same in alike.values()]


def free_memory(device: torch.device) -> None:
    """Collect garbage, and return a GPU's cached memory to the driver."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def show_progress(*line: str) -> None:
    """Overwrite one line of a terminal, or append a line to a file; only on the first rank."""
    if dist.is_initialized() and dist.get_rank() > 0:
        return
    if sys.stderr.isatty():
        print("\r\033[K", *line, sep="", end="", file=sys.stderr, flush=True)
    elif any(line):
        print(*line, sep="", file=sys.stderr, flush=True)
