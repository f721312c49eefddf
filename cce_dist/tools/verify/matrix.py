"""Run tables of cases on every layout of the ranks: a line for each case.

On a GPU the kernels of the next cases compile in threads while the present case runs. A cold run of the table compiles more
than a hundred.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from cce_dist.kernels.direct import launching, load
from cce_dist.kernels.dry_run import compiles_ahead, num_threads
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
Say = Callable[[str], None]
Kernels = dict[Future, str]  # name of each kernel that compiles
_LOG = logging.getLogger("cce_dist")
RULE = """\
Each line has the worst error of a case against the float64 reference. The bound is twice the error of dense PyTorch in the same
dtype (for outputs in fp32), plus eps (fp32 2e-6, bf16 2^-8, fp16 2^-10) times the largest value."""


def lines_of(functions: Sequence[str], only: str = "") -> list[Line]:
    """Return the cases of these functions whose names contain ``only``."""
    tables = (TABLES[name] for name in functions)
    return [(function, case) for function, cases in tables for case in cases if only in case.name]


def layouts(world: int) -> list[tuple[int, list[list[int]]]]:
    """Return the groups to try, by size: all ranks, halves side by side, each rank alone, all but the last."""
    sizes = {world, 1} | ({world // 2} if world % 2 == 0 else set()) | ({world - 1} if world > 2 else set())
    return [
        (size, [list(range(start, start + size)) for start in range(0, world - size + 1, size)])
        for size in sorted(sizes)
    ]


def run_matrix(lines: Sequence[Line], device: str, backend: str = "auto", report: bool = True) -> list[str]:
    """Run cases on every layout of the ranks. Returns a line for each failure, on every rank."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    backend = ("torch" if device == "cpu" else "triton") if backend == "auto" else backend
    say: Say = partial(print, flush=True) if rank == 0 and report else lambda line: None
    failures, count, began = [], 0, time.monotonic()
    is_ahead = (device, backend) == ("cuda", "triton") and compiles_ahead()
    with Ahead() if is_ahead else contextlib.nullcontext() as ahead:
        say(RULE)
        for size, members in layouts(world):
            made: Any = [dist.new_group(ranks) if size > 1 else None for ranks in members]
            mine = next((place for place, ranks in enumerate(members) if rank in ranks), None)
            where = None if mine is None else (made[mine], device, backend, mine)
            # Sequence parallelism splits 24 tokens or a multiple.
            fitting = [line for line in lines if 24 % size == 0 or not line[1].options.get("sequence_parallel")]
            for case, worst in _run(fitting, where, ahead, say):
                line = _line(size, case, worst)
                failures += [] if worst.ok else [line]
                count += 1
                say(line)
        on = torch.cuda.get_device_name() if device == "cuda" else "CPU"
        held = f"{count - len(failures)} of {count} cases hold on {world} rank(s), {on}, torch {torch.__version__}"
        say(f"{held}, {time.monotonic() - began:.0f} s")
    return failures


def _run(
    lines: Sequence[Line], where: tuple[Any, ...] | None, ahead: Ahead | None, say: Say
) -> Iterator[tuple[Case, Error]]:
    """Run cases on one layout, and yield each with its worst error over all ranks.

    ``where`` has the last arguments of ``run_case``; it is None on a rank that is left out.
    """
    begun: list[Kernels] = []
    for number, (function, case) in enumerate(lines):
        worst = None
        if where is not None:
            # The first case waits for no kernels but its own. The order is the same on all ranks.
            while ahead is not None and len(begun) < min(len(lines), 1 + 3 * number):
                begun.append(ahead.begin(_call(*lines[len(begun)], *where)))
            if ahead is not None:
                _await(begun[number], case, say)
            worst = max(run_case(function, case, *where), key=lambda error: error.badness)
        everyone: list[Any] = [worst]
        if dist.is_initialized():
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, worst)
        yield case, max(filter(None, everyone), key=lambda error: error.badness)


def _call(function: Function, case: Case, group: Any, device: str, backend: str, salt: int) -> Callable[[], Any]:
    drawn = draw(function, case, salt)
    return partial(function.call, drawn, shard_of(drawn, group)[1], backend, device)


def _await(kernels: Kernels, case: Case, say: Say) -> None:
    while pending := wait(kernels, timeout=3.0).not_done:
        names = sorted({kernels[future] for future in pending})
        others = f" and {len(names) - 3} more" if len(names) > 3 else ""
        say(f"     {case.name} waits for {len(pending)} kernels to compile: {', '.join(names[:3])}{others}")


def _line(size: int, case: Case, worst: Error) -> str:
    digits = 2 if 0 < worst.bound < 2 * worst.error else 1
    line = f"{'ok  ' if worst.ok else 'FAIL'} T={size} {case.name:26} {worst.quantity:20} "
    line += f"error {worst.error:.{digits}e} bound {worst.bound:.{digits}e}"
    return line if worst.ok else f"{line}  <- {case.catches}?"


class Ahead(contextlib.ExitStack):
    """Compiles what calls launch, in a thread for each core of this rank.

    Each call is made once without its launches, on tensors of zeros: a launch only asks Triton for its kernel. This finds all
    kernels, because what a call launches never follows from values.
    """

    def __init__(self) -> None:
        import triton

        super().__init__()
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.threads = ThreadPoolExecutor(num_threads())
        self.callback(self.threads.shutdown, cancel_futures=True)
        self.mode = triton.AsyncCompileMode(self.threads, ignore_errors=True)

    def begin(self, call: Callable[[], Any]) -> Kernels:
        """Begin to compile a call's kernels. An error here will come again at a launch."""
        kernels: Kernels = {}
        try:
            contextvars.copy_context().run(self._without_launches, call, kernels)
        except Exception as error:
            _LOG.debug("verify does not compile ahead: %r", error)
        return kernels

    def _without_launches(self, call: Callable[[], Any], kernels: Kernels) -> None:
        self.mode.__enter__()  # Leaving the mode would wait for its kernels. It ends with the copied context.
        with launching(partial(self._compile, kernels)), torch.autograd.set_multithreading_enabled(False), _Zeros():
            call()

    def _compile(self, kernels: Kernels, kernel: Any, args: Any, grid: Any, kwargs: dict[str, Any]) -> None:
        compiled = kernel.warmup(*args, grid=(1,), **kwargs)
        if hasattr(compiled, "future"):  # not compiled by an earlier call
            kernels[self.threads.submit(self._load, compiled)] = kernel.__name__

    def _load(self, compiled: Any) -> None:
        """Wait for a kernel and load it onto the device, as its first launch would."""
        with torch.cuda.device(self.device):
            load(compiled.result())


ZEROED = {
    torch.empty: torch.zeros,
    torch.empty_like: torch.zeros_like,
    torch.Tensor.new_empty: torch.Tensor.new_zeros,
}


class _Zeros(TorchFunctionMode):
    """Fills new tensors with zeros, because the host code may use what kernels write as indices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return ZEROED.get(func, func)(*args, **(kwargs or {}))
