"""Run tables of cases on every layout of the ranks: a line for each case, and a line every few seconds."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from cce_dist.kernels.dry_run import compiles_ahead
from cce_dist.tools.verify.ahead import Ahead, Kernels
from cce_dist.tools.verify.cases import CASES, DIVERGENCE_CASES, KEPT_CASES, LOG_PROB_CASES, Case
from cce_dist.tools.verify.check import Error, Function, draw, run_case, shard_of
from cce_dist.tools.verify.divergence import DIVERGENCE
from cce_dist.tools.verify.log_probs import LOG_PROBS
from cce_dist.tools.verify.loss import LOSS

TABLES: dict[str, tuple[Function, Sequence[Case]]] = {
    "loss": (LOSS, CASES),
    "log-probs": (LOG_PROBS, LOG_PROB_CASES),
    "kept": (LOG_PROBS, KEPT_CASES),
    "divergence": (DIVERGENCE, DIVERGENCE_CASES),
}
Line = tuple[Function, Case]
RULE = """\
Each line has the worst error of a case against the float64 reference. The bound is twice the error of dense PyTorch in the same
dtype (for outputs in fp32), plus eps (fp32 2e-6, bf16 2^-8, fp16 2^-10) times the largest value."""


def lines_of(functions: Sequence[str], only: str = "") -> list[Line]:
    """Return the cases of these functions whose names contain ``only``."""
    tables = (TABLES[name] for name in functions)
    return [(function, case) for function, cases in tables for case in cases if only in case.name]


class Progress:
    """Prints lines, and after some seconds without a line what is being done."""

    def __init__(self, shown: bool, seconds: float = 3.0) -> None:
        self.shown, self.seconds, self.doing = shown, seconds, "starts"
        self.began = self.said = time.monotonic()
        self.ended = threading.Event()

    @contextlib.contextmanager
    def told(self) -> Iterator[Progress]:
        thread = threading.Thread(target=self._tell, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.ended.set()
            thread.join()

    def say(self, line: str) -> None:
        self.said = time.monotonic()
        if self.shown:
            print(line, flush=True)

    def _tell(self) -> None:
        while not self.ended.wait(0.5):
            if time.monotonic() - self.said >= self.seconds:
                self.say(f"     {time.monotonic() - self.began:3.0f} s: {self.doing}")


def layouts(world: int) -> list[tuple[int, list[list[int]]]]:
    """Return the groups to try, by size: all ranks, halves side by side, each rank alone, all but the last."""
    sizes = {world, 1} | ({world // 2} if world % 2 == 0 else set()) | ({world - 1} if world > 2 else set())
    return [
        (size, [list(range(start, start + size)) for start in range(0, world - size + 1, size)])
        for size in sorted(sizes)
    ]


class Where(NamedTuple):
    """Where this rank runs cases."""

    group: dist.ProcessGroup | None  # None: this process alone
    place: int  # of the group among the groups side by side
    device: str
    backend: str


def run_matrix(lines: Sequence[Line], device: str, backend: str = "auto", report: bool = True) -> list[str]:
    """Run cases on every layout of the default process group, or alone. Returns a line for each failure, on every rank."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    backend = ("torch" if device == "cpu" else "triton") if backend == "auto" else backend
    failures, count = [], 0
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(Progress(rank == 0 and report).told())
        progress.say(RULE)
        ahead = stack.enter_context(Ahead()) if (device, backend) == ("cuda", "triton") and compiles_ahead() else None
        for size, members in layouts(world):
            made: Any = [dist.new_group(ranks) if size > 1 else None for ranks in members]
            mine = next((place for place, ranks in enumerate(members) if rank in ranks), None)
            where = None if mine is None else Where(made[mine], mine, device, backend)
            # Sequence parallelism splits 24 tokens or a multiple.
            fitting = [line for line in lines if 24 % size == 0 or not line[1].options.get("sequence_parallel")]
            for case, worst in _run(fitting, where, ahead, progress):
                line = _line(size, case, worst)
                failures += [] if worst.ok else [line]
                count += 1
                progress.say(line)
        on = torch.cuda.get_device_name() if device == "cuda" else "CPU"
        held = f"{count - len(failures)} of {count} cases hold on {world} rank(s), {on}, torch {torch.__version__}"
        progress.say(f"{held}, {time.monotonic() - progress.began:.0f} s")
    return failures


def _run(
    lines: Sequence[Line], where: Where | None, ahead: Ahead | None, progress: Progress
) -> Iterator[tuple[Case, Error]]:
    """Run cases on one layout, and yield each with its worst error over all ranks. ``where`` is None on a rank left out."""
    begun: list[Kernels] = []
    for number, (function, case) in enumerate(lines):
        worst = None
        if where is not None and ahead is not None:
            # The first case waits for no kernels but its own. The order is the same on all ranks, as calls have collectives.
            while len(begun) < min(len(lines), 1 + 3 * number):
                begun.append(ahead.begin(_call(*lines[len(begun)], where)))
            _await(begun[number], case, progress)
        progress.doing = f"case {number + 1} of {len(lines)}, {case.name}, runs"
        if where is not None:
            errors = run_case(function, case, where.group, where.device, where.backend, where.place)
            worst = max(errors, key=lambda error: error.badness)
        everyone: list[Any] = [worst]
        if dist.is_initialized():
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, worst)
        yield case, max(filter(None, everyone), key=lambda error: error.badness)


def _call(function: Function, case: Case, where: Where) -> Callable[[], Any]:
    """Return the call of a case."""
    drawn = draw(function, case, where.place)
    shard = shard_of(drawn, where.group)[1]
    return partial(function.call, drawn, shard, where.backend, where.device)


def _await(kernels: Kernels, case: Case, progress: Progress) -> None:
    while pending := [future for future in kernels if not future.done()]:
        names = sorted({kernels[future] for future in pending})
        others = f" and {len(names) - 3} more" if len(names) > 3 else ""
        progress.doing = f"{case.name} waits for {len(pending)} kernels to compile: {', '.join(names[:3])}{others}"
        wait(pending, timeout=0.5)


def _line(size: int, case: Case, worst: Error) -> str:
    digits = 2 if 0 < worst.bound < 2 * worst.error else 1
    line = f"{'ok  ' if worst.ok else 'FAIL'} T={size} {case.name:26} {worst.quantity:20} "
    line += f"error {worst.error:.{digits}e} bound {worst.bound:.{digits}e}"
    return line if worst.ok else f"{line}  <- {case.catches}?"
