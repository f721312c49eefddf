"""``cce-dist bench --tp`` and ``--stage``: the comparison with the vocabulary split over ranks, against others that split it.

Every rank checks its own part of the gradients, then all time in turns. A row's errors are the worst rank's, its time of each
round is the slowest rank's, its memory the largest rank's; ranks meet on the device before each timed job, so that no one's
delay is in another's time. The floor is the plain products of one rank's shard.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from cce_dist import VocabShard
from cce_dist import bench as command
from cce_dist.bench import report
from cce_dist.bench.collectives import Collective, Collectives
from cce_dist.bench.measure import (
    Clock,
    Errors,
    Floor,
    Reference,
    Row,
    check,
    describe,
    free_memory,
    reference,
    step,
    time_in_turns,
)
from cce_dist.bench.peers import GroupMethod, group_methods
from cce_dist.bench.shapes import SHAPES
from cce_dist.bench.stage import stage_methods
from cce_dist.bench.workload import Workload, make_workload
from cce_dist.ranks import in_torchrun, join, own_device, run_ranks

TIMEOUT_SECONDS = 600.0


def run(args: argparse.Namespace) -> int:
    """Measure every case on every size of group, as a rank of torchrun or, alone, on ranks of this machine.

    Returns:
        0, or 1 if a row of this library itself has no time (wrong, or failed).
    """
    if args.methods == ["list"]:
        print("\n".join(_methods(args)))
        return 0
    command.choose(args.methods, _methods(args))  # an unknown name fails here, once
    if args.stage:
        world = int(os.environ["WORLD_SIZE"]) if in_torchrun() else max(args.tp or [1])
        if args.tp not in (None, [world]):
            raise SystemExit(f"cce-dist bench: --stage takes all {world} ranks as one group; leave --tp out")
        args.tp = [world]
    if in_torchrun():
        _join(args)
        try:
            return _run_rank(args)
        finally:
            dist.destroy_process_group()
    if args.device == "cuda" and max(args.tp) > torch.cuda.device_count():
        raise SystemExit(f"cce-dist bench: --tp {max(args.tp)}, but this machine has {torch.cuda.device_count()} GPUs")
    result = args.out / "bench.json"
    result.unlink(missing_ok=True)
    run_ranks(_run_rank, max(args.tp), args, device=args.device, timeout_seconds=TIMEOUT_SECONDS)
    return command.exit_code(report.read_json(result)[1] if result.exists() else [])


def _methods(args: argparse.Namespace) -> dict[str, GroupMethod]:
    return stage_methods(args.stage) if args.stage else group_methods()


def _join(args: argparse.Namespace) -> None:
    if max(args.tp) > int(os.environ["WORLD_SIZE"]):
        raise SystemExit(f"cce-dist bench: --tp {max(args.tp)}, but torchrun has {os.environ['WORLD_SIZE']} ranks")
    if args.device != "cuda":
        torch.set_num_threads(1)
    join(own_device(args.device), TIMEOUT_SECONDS)


def _run_rank(args: argparse.Namespace) -> int:
    """Measure every case; the first rank reports each as soon as it is known."""
    rank = dist.get_rank()
    device = torch.device("cuda", torch.cuda.current_device()) if args.device == "cuda" else torch.device("cpu")
    methods = command.choose(args.methods, _methods(args))
    groups: dict[int, Any] = {tp: dist.new_group(range(tp)) if tp > 1 else None for tp in args.tp}
    environment, stage = command.describe_environment(device), args.stage or ""
    args.out.mkdir(parents=True, exist_ok=True)
    cases: list[report.Case] = []
    for shape in args.shapes:
        for num_tokens in args.tokens:
            for ignored in args.ignored:
                label = f"{shape}, N {num_tokens:,}"
                _progress(f"{label}: drawing the workload and its gradients")
                dtype = getattr(torch, args.dtype)
                workload = make_workload(SHAPES[shape], num_tokens, ignored=ignored, dtype=dtype, device=device)
                for tensor in workload[:3]:
                    dist.broadcast(tensor, src=0)
                truth = reference(workload)
                for tp, group in groups.items():
                    if rank < tp:
                        shard = VocabShard.even(SHAPES[shape].vocab_size, group)
                        progress = partial(_progress, f"{label}, T {tp}: ")
                        rows, floor, traffic = measure(workload, truth, shard, methods, args.repeats, progress)
                        cases.append(report.Case.of(shape, ignored, workload, rows, floor, tp, traffic, stage))
                        if rank == 0:
                            _progress("")
                            print(report.table(cases[-1]) + "\n", flush=True)
                            report.write_json(args.out / "bench.json", environment, cases)
                    dist.barrier()
    if rank > 0:
        return 0
    has_figure = find_spec("matplotlib") is not None
    if has_figure:
        report.write_figure(args.out / "bench.png", environment, cases)
    command.say_where(args.out, environment, has_figure)
    return command.exit_code(cases)


def measure(
    workload: Workload,
    truth: Reference,
    shard: VocabShard,
    methods: dict[str, GroupMethod],
    repeats: int,
    progress: Callable[[str], None],
) -> tuple[list[Row], Floor, dict[str, list[Collective]]]:
    """Check, then time; every rank of the group calls it, and gets the same.

    Args:
        workload: The whole input, the same on every rank.
        truth: Its loss and gradients.
        shard: This rank's rows.
        methods: What to compare, by name.
        repeats: Rounds of timing.
        progress: Gets a line as each step begins.

    Returns:
        A row for each method in order, the products of one shard, and the collectives of a step of each method.
    """
    size, rank = shard.group_size, 0 if shard.group is None else shard.group.rank()
    num_tokens, rows_here = workload.hidden.shape[0], slice(shard.start, shard.stop)
    tokens_here = slice(rank * num_tokens // size, (rank + 1) * num_tokens // size)
    whole = workload._replace(weight=workload.weight[rows_here].clone())
    sliced = whole._replace(hidden=workload.hidden[tokens_here].clone())

    methods = {name: method for name, method in methods.items() if size > 1 or not method.needs_group}
    rows, steps, traffic = [], {}, {}
    for name, method in methods.items():
        progress(f"checking {name}")
        row = Row(name, method.ours)
        local, tokens = (sliced, tokens_here) if method.sequence_parallel else (whole, slice(None))
        try:
            if method.needs_cuda and not workload.hidden.is_cuda:
                raise ImportError("needs a GPU")
            if method.sequence_parallel and num_tokens % size:
                raise ValueError(f"{num_tokens} tokens are not {size} equal slices")
            function = method.build(shard, workload.hidden.device)
            check(row, function, local, Reference(truth.loss, truth.d_hidden[tokens], truth.d_weight[rows_here]))
            steps[name] = function, local
        except ImportError as error:
            row.problem, row.missing = describe(error), True
        except Exception as error:  # whatever another library raises, the rest goes on
            row.problem = describe(error)
        rows.append(_worst(_everyone(row, shard)))
        if not rows[-1].problem and size > 1:
            with Collectives(size) as seen:
                step(*steps[name])
            traffic[name] = _least_waiting(_everyone(seen.kinds, shard))
        free_memory(workload.hidden)

    floor = Floor()
    timed = [row for row in rows if not row.problem]
    time_in_turns(whole, timed, steps, floor, repeats, progress, GroupClock(workload.hidden.device, shard))
    timings = [floor.one, floor.three, floor.four, *(t for row in timed for t in (row.forward, row.total))]
    ranks = _everyone([timing.seconds for timing in timings], shard)
    for timing, of_ranks in zip(timings, zip(*ranks, strict=True), strict=True):
        timing.seconds = [max(seconds) for seconds in zip(*of_ranks, strict=True)]
    return rows, floor, traffic


def _everyone(value: Any, shard: VocabShard) -> list[Any]:
    """Each rank's value."""
    if shard.group is None:
        return [value]
    values: list[Any] = [None] * shard.group_size
    dist.all_gather_object(values, value, group=shard.group)
    return values


def _worst(rows: Sequence[Row]) -> Row:
    """What the ranks know of one method, as one row."""
    worst = rows[0]
    for row in rows[1:]:
        worst.problem, worst.missing = worst.problem or row.problem, worst.missing or row.missing
        if row.errors is not None and worst.errors is not None:
            pairs = ((getattr(row.errors, name), getattr(worst.errors, name)) for name in Errors.__dataclass_fields__)
            worst.errors = Errors(*(max(pair) for pair in pairs))
        if row.peak_bytes is not None and worst.peak_bytes is not None:
            worst.peak_bytes = max(row.peak_bytes, worst.peak_bytes)
    return worst


def _least_waiting(ranks: Sequence[list[Collective]]) -> list[Collective]:
    """Of each kind that of the rank where it took least: a collective's time includes the wait for ranks that come late."""
    return [min(same, key=lambda kind: kind.seconds or 0.0) for same in zip(*ranks, strict=True)]


class GroupClock(Clock):
    """Seconds that a job takes on this rank from when all ranks of the group are there, on the device."""

    def __init__(self, device: torch.device, shard: VocabShard) -> None:
        super().__init__(device)
        self.group, self.meeting = shard.group, torch.zeros(1, device=device)

    def __call__(self, job: Callable[[], object]) -> float:
        if not self.meeting.is_cuda:
            self._meet()
            start = time.perf_counter()
            job()
            return time.perf_counter() - start
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

        def met() -> None:
            self._meet()
            begin.record()
            job()
            end.record()

        super().__call__(met)  # which prepares the device for it, and waits for the end
        return begin.elapsed_time(end) / 1e3

    def _meet(self) -> None:
        if self.group is not None:
            dist.all_reduce(self.meeting, group=self.group)


def _progress(*parts: str) -> None:
    if dist.get_rank() == 0:
        command.show_progress("".join(parts))
