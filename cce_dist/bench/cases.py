"""All cases of a command: measured on the ranks of torchrun, on ranks that are started here, or in this process alone."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from cce_dist import VocabShard
from cce_dist.bench import report
from cce_dist.bench.loop import measure
from cce_dist.bench.methods import UNNAMED_MIB, Method
from cce_dist.bench.models import Way
from cce_dist.bench.shapes import SHAPES
from cce_dist.bench.tasks import Task, tasks_of
from cce_dist.bench.workload import RUNGS, Workload, make_workload, read_workload
from cce_dist.ranks import in_torchrun, join, own_device, run_ranks
from cce_dist.report import describe, describe_environment, write_json

T = TypeVar("T", Method, Way)

TIMEOUT_SECONDS = 600.0


def run(args: argparse.Namespace) -> int:
    """Measure; 0, or 1 if there is no case, or a row of this library has no time (wrong, or failed)."""
    is_rank = in_torchrun() and bool(args.tp or args.stage)
    sizes = args.tp or [1]
    if args.stage:
        world = int(os.environ["WORLD_SIZE"]) if is_rank else max(sizes)
        if args.tp not in (None, [world]):
            raise SystemExit(f"cce-dist bench: --stage takes all {world} ranks as one group; leave --tp out")
        sizes = [world]
    args.tp = sizes
    available = {name: method for task in tasks_of(args) for name, method in _available(task, args).items()}
    if args.methods == ["list"]:
        print("\n".join(available))
        return 0
    choose(args.methods, available)
    # The end of a framework's last stage wants a process group on one rank too.
    if not is_rank and max(sizes) == 1 and not args.stage:
        return _measure_all(args)
    return on_ranks(_measure_all, args, max(sizes), "--tp")


def on_ranks(body: Callable[[argparse.Namespace], int], args: argparse.Namespace, world: int, option: str) -> int:
    """Call ``body(args)`` on the ranks of torchrun, or on ``world`` that are started here; ``option`` asked for so many."""
    there = int(os.environ["WORLD_SIZE"]) if in_torchrun() else torch.cuda.device_count()
    if world > there and (in_torchrun() or args.device == "cuda"):
        where = f"torchrun has {there} ranks" if in_torchrun() else f"this machine has {there} GPUs"
        raise SystemExit(f"cce-dist bench: {option} {world}, but {where}")
    if in_torchrun():
        if args.device != "cuda":
            torch.set_num_threads(1)
        join(own_device(args.device), TIMEOUT_SECONDS)
        try:
            return body(args)
        finally:
            dist.destroy_process_group()
    result = args.out / "bench.json"
    result.unlink(missing_ok=True)
    run_ranks(body, world, args, device=args.device, timeout_seconds=TIMEOUT_SECONDS)
    return _exit_code(report.read_json(result).cases if result.exists() else [])


def choose(names: Sequence[str] | None, available: dict[str, T]) -> dict[str, T]:
    """The methods named, in the order of the table (None: all that need no name); ``cce-dist`` means each of its workspaces."""
    if names is None:
        return {name: method for name, method in available.items() if not method.by_name}
    known = {name: name.partition("@")[0] for name in available}
    unknown = set(names) - set(known) - set(known.values())
    if unknown:
        raise SystemExit(f"cce-dist bench: unknown method {min(unknown)}; choose from {', '.join(available)}")
    return {name: method for name, method in available.items() if name in names or known[name] in names}


def show_progress(line: str) -> None:
    """Overwrite one line of a terminal; a line each where the output is a file; nothing on other ranks than the first."""
    if dist.is_initialized() and dist.get_rank() > 0:
        return
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
    elif line:
        print(line, file=sys.stderr, flush=True)


def _available(task: Task, args: argparse.Namespace) -> dict[str, Method]:
    """The methods of a last stage, or those that are rows for any of the sizes of groups."""
    table = task.methods(args.workspace or [UNNAMED_MIB])
    return {name: method for name, method in table.items() if args.stage or any(map(method.is_for, args.tp))}


def current_device(name: str) -> torch.device:
    """The device that is asked for, made the current one where this process is alone; ranks have theirs."""
    device = torch.device(name)
    if device.type == "cuda" and not dist.is_initialized() and device.index is not None:
        torch.cuda.set_device(device)
    elif device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def _measure_all(args: argparse.Namespace) -> int:
    """Measure every case; the first rank reports each as soon as it is known."""
    alone = not dist.is_initialized()
    rank = 0 if alone else dist.get_rank()
    device = current_device(args.device)
    tasks = [(task, _available(task, args)) for task in tasks_of(args)]
    known = choose(args.methods, {name: method for _, table in tasks for name, method in table.items()})
    groups: dict[int, Any] = {size: dist.new_group(range(size)) if size > 1 else None for size in args.tp}
    results = report.Results(describe_environment(device), [])
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"cce-dist bench: {error}") from error
    # matplotlib is asked for before hours of measuring, not after.
    has_figure = find_spec("matplotlib") is not None
    shares: list[float] = args.ignored
    for (label, shape, rung, make), ignored in product(_workloads(args), shares):
        try:
            show_progress(f"{label}: drawing the workload")
            try:
                workload = make(ignored=ignored, dtype=getattr(torch, args.dtype), device=device)
            except (OSError, ValueError) as error:
                raise SystemExit(f"cce-dist bench: {error}") from error
            for tensor in () if alone else workload[:3]:
                dist.broadcast(tensor, src=0)
            for (task, table), (size, group) in product(tasks, groups.items()):
                if rank < size:
                    shard, head = VocabShard.even(len(workload.weight), group), f"{label}, {task.name} T {size}: "
                    problem = task.problem(workload)
                    chosen = {name: method for name, method in table.items() if name in known}
                    told = lambda line, head=head: show_progress(head + line)  # noqa: E731
                    found = measure(problem, shard, chosen, args.repeats, told, not args.no_forward)
                    where = {"num_ranks": size, "stage": args.stage or "", "rung": rung, "task": task.name}
                    results.cases.append(report.Case.of(shape, ignored, workload, problem, found, **where))
                report_last(results, args.out, has_figure)
                if not alone:
                    dist.barrier()
        except torch.OutOfMemoryError as error:
            # Other ranks would wait for this one.
            if not alone:
                raise
            show_progress("")
            print(f"{label}: {describe(error)}", file=sys.stderr)
    return finish(results, args.out, has_figure)


def _workloads(args: argparse.Namespace) -> Iterator[tuple[str, str, str, Callable[..., Workload]]]:
    """Label, shape, rung and maker of every rung at every shape and number of tokens, then of the captured files."""
    drawn = [name for name in args.workload if name in RUNGS]
    for shape, num_tokens, rung in product(args.shapes, args.tokens, drawn):
        make = partial(make_workload, SHAPES[shape], num_tokens, rung=rung)
        yield f"{shape}, {rung}, N {num_tokens:,}", shape, rung, make
    for name in args.workload:
        if name not in RUNGS:
            yield name, "captured", Path(name).stem, partial(read_workload, Path(name))


def report_last(results: report.Results, out: Path, has_figure: bool) -> None:
    """Print the last case and write all: after every case, so that an interrupted run leaves what it had."""
    show_progress("")
    if dist.is_initialized() and dist.get_rank() > 0:
        return
    print(report.table(results.cases[-1]) + "\n", flush=True)
    write_json(out / "bench.json", results)
    if has_figure:
        report.write_figure(out / "bench.png", results.environment, results.cases)


def finish(results: report.Results, out: Path, has_figure: bool) -> int:
    """Say what was measured with, and where it is; the exit code."""
    if dist.is_initialized() and dist.get_rank() > 0:
        return 0
    versions = ", ".join(f"{name} {version}" for name, version in results.environment["versions"].items())
    picture = "bench.png" if has_figure else "no figure: matplotlib is not installed (pip install 'cce-dist[bench]')"
    print(f"{results.environment['device']}; {versions}\n{out}: bench.json, {picture}")
    return _exit_code(results.cases)


def _exit_code(cases: Sequence[report.Case]) -> int:
    return int(not cases or any(row.ours and row.problem for case in cases for row in case.rows))
