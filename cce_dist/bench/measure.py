"""Check each method's loss and gradients, then time those that are right, in turns, next to plain matrix products.

A fast wrong gradient is worth nothing, so a method whose loss or gradients are off is refused a time. What is right is
timed in turns (one step of each method, then the next round, in another order), so that clocks and temperature drift for
all alike and nobody always follows the same neighbour.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from cce_dist.bench.methods import LossFn, Method
from cce_dist.bench.workload import IGNORE_INDEX, Workload

MAX_ERROR = (
    5e-2  # relative, of the loss and (Frobenius norm) of dE and dC; methods that round to bf16 have 2e-3 to 2e-2
)
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
        """What is wrong in a few words, or nothing. NaN is wrong."""
        for name, error in (("dE", self.d_hidden), ("dC", self.d_weight)):
            if not error <= MAX_ERROR:
                return f"wrong gradient: relative error of {name} {error:.1e}, limit {MAX_ERROR:.0e}"
        if not self.loss <= MAX_ERROR:
            return f"wrong loss: relative error {self.loss:.1e}, limit {MAX_ERROR:.0e}"
        return ""


@dataclass
class Timing:
    """Seconds of each round."""

    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Interquartile range."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return high - low


@dataclass
class Row:
    """What is known of one method.

    Attributes:
        problem: Why there are no times, in one line; empty if there are.
        missing: The library is not installed, or not for this device.
        peak_bytes: Peak memory of a step above inputs and gradients; None on a CPU.
    """

    name: str
    ours: bool
    problem: str = ""
    missing: bool = False
    errors: Errors | None = None
    forward: Timing = field(default_factory=Timing)
    total: Timing = field(default_factory=Timing)
    peak_bytes: int | None = None


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


def measure(
    workload: Workload,
    methods: dict[str, Method],
    repeats: int,
    progress: Callable[[str], None] = lambda line: None,
) -> tuple[list[Row], Floor]:
    """Check, then time.

    Args:
        workload: Input; hidden and weight need no gradient themselves.
        methods: What to compare, by name.
        repeats: Rounds of timing.
        progress: Gets a line as each step begins.

    Returns:
        A row for each method, in order, and the matrix products of the same run.
    """
    rows = [Row(name, method.ours) for name, method in methods.items()]
    progress("reference")
    truth = reference(workload)
    steps: dict[str, tuple[LossFn, Workload]] = {}
    for row in rows:
        progress(f"checking {row.name}")
        method = methods[row.name]
        try:
            if method.needs_cuda and not workload.hidden.is_cuda:
                raise ImportError("needs a GPU")
            function = method.build(workload.hidden, workload.weight, workload.labels)
            check(row, function, workload, truth)
            steps[row.name] = function, workload
        except ImportError as error:
            row.problem, row.missing = describe(error), True
        except Exception as error:  # whatever another library raises, the rest goes on
            row.problem = describe(error)
        free_memory(workload.hidden)
    del truth
    free_memory(workload.hidden)

    floor = Floor()
    timed = [row for row in rows if not row.problem]
    time_in_turns(workload, timed, steps, floor, repeats, progress, Clock(workload.hidden.device))
    return rows, floor


def reference(workload: Workload) -> Reference:
    """Loss and gradients with fp32 logits and sums (fp64 for fp32 inputs), a chunk of tokens at a time."""
    hidden, weight, labels = workload.hidden, workload.weight, workload.labels
    dtype = torch.float64 if hidden.dtype == torch.float32 else torch.float32
    num_valid = (labels != IGNORE_INDEX).sum().clamp_min(1).to(dtype)
    wide_weight = weight.to(dtype)
    loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
    d_hidden = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    d_weight = torch.zeros(weight.shape, dtype=dtype, device=hidden.device)
    rows = max(1, REFERENCE_CHUNK_BYTES // (weight.shape[0] * wide_weight.element_size()))
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
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
    finally:
        torch.set_float32_matmul_precision(precision)
    return Reference((loss / num_valid).item(), d_hidden, d_weight)


def relative_error(value: Tensor, truth: Tensor) -> float:
    """||value - truth|| / ||truth||, a block of rows at a time so that no second copy of a large tensor is made."""
    difference = torch.zeros((), dtype=torch.float64, device=truth.device)
    norm = torch.zeros_like(difference)
    for some, true in zip(value.split(8192), truth.split(8192), strict=True):
        difference += (some.to(truth.dtype) - true).square().sum()
        norm += true.square().sum()
    return (difference / norm).sqrt().item()


def describe(error: Exception) -> str:
    """An exception in one line."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed"
    first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    text = first_line if isinstance(error, ImportError) else f"{type(error).__name__}: {first_line}"
    return text if len(text) <= 120 else text[:117] + "..."


def check(row: Row, function: LossFn, workload: Workload, truth: Reference) -> None:
    """Fill in errors, and peak memory if they are small enough."""
    loss, d_hidden, d_weight = step(function, workload)
    d_weight = getattr(function, "main_grad", d_weight)  # of a framework that adds it up itself, and returns a dummy
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
    if workload.hidden.is_cuda and not row.problem:  # a second step, free of compilation and autotuning
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients = step(function, workload)
        torch.cuda.synchronize()
        outputs = sum(tensor.numel() * tensor.element_size() for tensor in gradients)
        row.peak_bytes = max(0, torch.cuda.max_memory_allocated() - before - outputs)


def step(function: LossFn, workload: Workload) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and both gradients. Fresh leaves, so that nothing is accumulated."""
    hidden = workload.hidden.detach().requires_grad_()
    weight = workload.weight.detach().requires_grad_()
    loss = function(hidden, weight, workload.labels)
    d_hidden, d_weight = torch.autograd.grad(loss, (hidden, weight))
    return loss.detach(), d_hidden, d_weight


def _forward(function: LossFn, workload: Workload) -> None:
    with torch.no_grad():
        function(workload.hidden, workload.weight, workload.labels)


def time_in_turns(
    workload: Workload,
    rows: Sequence[Row],
    steps: dict[str, tuple[LossFn, Workload]],
    floor: Floor,
    repeats: int,
    progress: Callable[[str], None],
    clock: Clock,
) -> None:
    """Time every row's forward and step, and the products of ``workload``, in rounds of shuffled order.

    Args:
        workload: Operands of the products.
        rows: Get their times, or the problem that came up.
        steps: By row's name the function and its input.
        floor: Gets the times of the products.
        repeats: Rounds, after one that warms up.
        progress: Gets a line as each round begins.
        clock: Times one job.
    """
    hidden, weight = workload.hidden, workload.weight
    jobs: list[tuple[Row | Floor, Timing, Callable[[], object]]] = []
    try:
        # The real operands: the power that a product draws, and so its clock, depends on the values.
        d_logits = torch.mm(hidden, weight.T)
        for chunk in d_logits.split(1024):
            chunk.copy_(chunk.float().softmax(1))

        def products(logits: int, gradients: int) -> None:
            for _ in range(logits):
                torch.mm(hidden, weight.T)
            for _ in range(gradients):
                torch.mm(d_logits, weight)
                torch.mm(d_logits.T, hidden)

        jobs += [
            (floor, floor.one, lambda: products(1, 0)),
            (floor, floor.three, lambda: products(1, 1)),
            (floor, floor.four, lambda: products(2, 1)),
        ]
    except torch.OutOfMemoryError as error:
        floor.problem = describe(error)
    for row in rows:
        jobs += [
            (row, row.forward, partial(_forward, *steps[row.name])),
            (row, row.total, partial(step, *steps[row.name])),
        ]
    shuffled = random.Random(0)
    for repeat in range(repeats + 1):  # the first round warms up
        shuffled.shuffle(jobs)
        progress(f"round {repeat} of {repeats}" if repeat else "warming up")
        for owner, timing, job in jobs:
            if owner.problem:
                continue
            try:
                seconds = clock(job)
            except Exception as error:  # it was right once; say what happened, and go on with the others
                owner.problem = describe(error)
                free_memory(hidden)
                continue
            if repeat:
                timing.seconds.append(seconds)


class Clock:
    """Seconds that a job takes on its device: CUDA events on a GPU, the wall clock on a CPU.

    On a GPU every job comes after the same matrix products, as it would in a training step: they bring the card to its
    power limit, whatever ran before, empty the L2 cache of the job's data, and let the host get ahead with launching.
    """

    def __init__(self, device: torch.device) -> None:
        self.heat = None
        if device.type == "cuda":
            self.heat = torch.randn(HEAT_SIDE, HEAT_SIDE, dtype=torch.bfloat16, device=device)
            self.heated = torch.empty_like(self.heat)

    def __call__(self, job: Callable[[], object]) -> float:
        if self.heat is None:
            start = time.perf_counter()
            job()
            return time.perf_counter() - start
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(HEAT_PRODUCTS):
            torch.mm(self.heat, self.heat, out=self.heated)
        begin.record()
        job()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3


def free_memory(tensor: Tensor) -> None:
    gc.collect()
    if tensor.is_cuda:
        torch.cuda.empty_cache()
