"""Measure all cases of a command: on the ranks of torchrun, on ranks started here, or in this process alone."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

from cce_dist.tools.bench import heads, report
from cce_dist.tools.bench.loop import show_progress
from cce_dist.tools.bench.methods import Method
from cce_dist.tools.bench.models import CONFIGS
from cce_dist.tools.bench.records import Case, Results, read_json
from cce_dist.tools.ranks import in_torchrun, join, own_device, run_ranks
from cce_dist.tools.report import describe, describe_environment, write_json

TIMEOUT_SECONDS = 600.0


def run(args: argparse.Namespace) -> int:
    """Measure. Returns 0, or 1 if there is no case, or if a row of this library is wrong or failed."""
    table = _table(args)
    if args.models == ["list"]:
        print("\n".join(CONFIGS))
        return 0
    world = table.complete(args)
    available = table.methods(args)
    if args.methods == ["list"]:
        print("\n".join(available))
        return 0
    choose(args.methods, available)
    return _on_ranks(_measure_all, args, world) if world else _measure_all(args)


def _table(args: argparse.Namespace) -> ModuleType:
    """Return the module of the table, which has ``complete``, ``methods`` and ``cases``."""
    if not args.models:
        return heads
    try:
        from cce_dist.tools.bench import fsdp, steps
    except ImportError as error:
        raise SystemExit(f"cce-dist bench: --models needs a package that is not installed: {error}") from error
    return steps if args.fsdp is None else fsdp


def choose(names: Sequence[str] | None, available: dict[str, Method]) -> dict[str, Method]:
    """Return the named methods in the order of the table; None: all methods but those that must be named.

    A name without its budget, such as "cce-dist", means the rows of all budgets.
    """
    if names is None:
        return {name: method for name, method in available.items() if not method.by_name}
    known = {name: name.partition("@")[0] for name in available}
    unknown = set(names) - set(known) - set(known.values())
    if unknown:
        raise SystemExit(f"cce-dist bench: unknown method {min(unknown)}; choose from {', '.join(available)}")
    return {name: method for name, method in available.items() if name in names or known[name] in names}


def _on_ranks(body: Callable[[argparse.Namespace], int], args: argparse.Namespace, world: int) -> int:
    """Call ``body(args)`` on the ranks of torchrun, or on ``world`` ranks that are started here."""
    there = int(os.environ["WORLD_SIZE"]) if in_torchrun() else torch.cuda.device_count()
    if world > there and (in_torchrun() or args.device == "cuda"):
        where = f"torchrun has {there} ranks" if in_torchrun() else f"this machine has {there} GPUs"
        raise SystemExit(f"cce-dist bench: {'--fsdp' if args.models else '--tp'} {world}, but {where}")
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
    return _exit_code(read_json(result).cases if result.exists() else [])


def _measure_all(args: argparse.Namespace) -> int:
    """Measure every case; the first rank reports each as soon as it is known."""
    device, table = _current_device(args.device), _table(args)
    chosen = choose(args.methods, table.methods(args))
    results = Results(describe_environment(device), [])
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"cce-dist bench: {error}") from error
    # matplotlib is looked for before hours of measuring, not after.
    has_figure = find_spec("matplotlib") is not None
    for label, cases in table.cases(args, chosen, device):
        try:
            for case in cases:
                results.cases.append(case)
                _report_last(results, args.out, has_figure)
        except torch.OutOfMemoryError as error:
            # Other ranks would wait for this one.
            if dist.is_initialized():
                raise
            show_progress("")
            print(f"{label}: {describe(error)}", file=sys.stderr)
    return _finish(results, args.out, has_figure)


def _current_device(name: str) -> torch.device:
    """Return the chosen device, and make it the current one if this process is alone. Ranks have their own current device."""
    device = torch.device(name)
    if device.type == "cuda" and not dist.is_initialized() and device.index is not None:
        torch.cuda.set_device(device)
    elif device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def _report_last(results: Results, out: Path, has_figure: bool) -> None:
    """Print the last case and write all of them. After every case, so that an interrupted run keeps what it measured."""
    show_progress("")
    if dist.is_initialized() and dist.get_rank() > 0:
        return
    print(report.table(results.cases[-1]) + "\n", flush=True)
    write_json(out / "bench.json", results)
    if has_figure:
        report.write_figure(out / "bench.png", results.environment, results.cases)


def _finish(results: Results, out: Path, has_figure: bool) -> int:
    """Print versions, and where the files are. Returns the exit code."""
    if dist.is_initialized() and dist.get_rank() > 0:
        return 0
    versions = ", ".join(f"{name} {version}" for name, version in results.environment["versions"].items())
    picture = "bench.png" if has_figure else "no figure: matplotlib is not installed (pip install matplotlib)"
    print(f"{results.environment['device']}; {versions}\n{out}: bench.json, {picture}")
    return _exit_code(results.cases)


def _exit_code(cases: Sequence[Case]) -> int:
    return int(not cases or any(row.ours and row.problem for case in cases for row in case.rows))
