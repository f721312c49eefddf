"""What the scripts that print tables share: options, ranks, and showing results again.

A script's ``Table`` says which rows there are and measures its cases, on the ranks of torchrun or in this process alone.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import report
from cce_dist.tools.arguments import device, folder, whole
from cce_dist.tools.ranks import in_torchrun, join, join_alone, own_device
from loop import Method, show_progress
from records import Cases, Results, describe, describe_environment, read_json, select, write_json

TIMEOUT_SECONDS = 600.0


class Refused(SystemExit):
    """What was asked for cannot be done; the message says why, in one line."""

    def __init__(self, reason: object) -> None:
        super().__init__(f"{Path(sys.argv[0]).name}: {reason}")


class Table(NamedTuple):
    """A script's kind of tables."""

    complete: Callable[[argparse.Namespace], bool]  # fills in defaults; whether a process group is needed
    methods: Callable[[argparse.Namespace], dict[str, Method]]  # the rows
    cases: Callable[[argparse.Namespace, dict[str, Method], torch.device], Cases]


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return the options that all tables have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tokens", nargs="+", type=whole(1), metavar="N", help="numbers of tokens (default: 8192; on a CPU 512)")
    add("--methods", nargs="+", metavar="METHOD", help="rows of the table; 'list' prints them")
    add("--repeats", type=whole(1), default=20, help="rounds; each times every method once")
    add("--device", type=device, help="cuda, cuda:1, cpu (default: cuda if there is one)")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="dtype of hidden states and weight")
    add("--out", type=folder, default=Path("runs/bench"), metavar="DIR", help="folder for bench.json")
    says = "measure nothing; print each bench.json again, or its part with these --shapes, --models, --tokens, --methods, --tp"
    add("--show", nargs="+", type=Path, metavar="JSON", help=says)
    says = f"with --show: print one table with these numbers, a column per case: {', '.join(report.COLUMNS)}"
    add("--columns", nargs="+", choices=report.COLUMNS, metavar="COLUMN", help=says)
    add("--scatter", type=Path, metavar="PNG", help="with --show: draw time over memory, both over torch-compile's")
    return parser


def run(table: Table, args: argparse.Namespace) -> int:
    """Show stored results, or measure.

    Returns:
        0, or 1 if there is no case, or if a row of this library is wrong or failed.
    """
    if args.show:
        return _show(args)
    if args.device is None:
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    needs_group = table.complete(args)
    available = table.methods(args)
    if args.methods == ["list"]:
        print("\n".join(available))
        return 0
    chosen, device = choose(args.methods, available), own_device(args.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not needs_group:
        return _measure_all(table, args, chosen, device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    if in_torchrun():
        join(device, TIMEOUT_SECONDS)
    else:
        join_alone(device)
    try:
        return _measure_all(table, args, chosen, device)
    finally:
        dist.destroy_process_group()


def choose(names: Sequence[str] | None, available: dict[str, Method]) -> dict[str, Method]:
    """Return the named methods in the order of the table; None: all methods.

    A name without its budget, such as "cce-dist", means the rows of all budgets.
    """
    if names is None:
        return available
    known = {name: name.partition("@")[0] for name in available}
    unknown = set(names) - set(known) - set(known.values())
    if unknown:
        raise Refused(f"unknown method {min(unknown)}; choose from {', '.join(available)}")
    return {name: method for name, method in available.items() if name in names or known[name] in names}


def num_ranks() -> int:
    """Return how many ranks torchrun has started; 1 without torchrun."""
    return int(os.environ["WORLD_SIZE"]) if in_torchrun() else 1


def _measure_all(table: Table, args: argparse.Namespace, chosen: dict[str, Method], device: torch.device) -> int:
    """Measure every case; the first rank reports each as soon as it is known."""
    results = Results(describe_environment(device), [])
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(error) from error
    for label, cases in table.cases(args, chosen, device):
        try:
            for case in cases:
                results.cases.append(case)
                show_progress("")
                if is_first:
                    print(report.table(case) + "\n", flush=True)
                    # After every case, so that an interrupted run keeps what it measured.
                    write_json(args.out / "bench.json", results)
        except torch.OutOfMemoryError as error:
            # Other ranks would wait for this one.
            if dist.is_initialized():
                raise
            show_progress("")
            print(f"{label}: {describe(error)}", file=sys.stderr)
    if is_first:
        versions = ", ".join(f"{name} {version}" for name, version in results.environment["versions"].items())
        print(f"{results.environment['device']}; {versions}\n{args.out / 'bench.json'}")
    return int(not results.cases or any(row.ours and row.problem for case in results.cases for row in case.rows))


def _show(args: argparse.Namespace) -> int:
    """Print stored files: a table for each case, or one table with the chosen columns."""
    shapes = [shape.name for shape in getattr(args, "shapes", None) or []] or getattr(args, "models", None)
    asked: dict[str, Any] = {"shape": shapes, "num_tokens": args.tokens, "num_ranks": getattr(args, "tp", None)}
    try:
        files = {path: read_json(path, Results) for path in args.show}
        shown = {path: select(results.cases, asked, args.methods) for path, results in files.items()}
        every = [case for cases in shown.values() for case in cases]
        if not every:
            raise ValueError(f"nothing of what is asked for is in {', '.join(map(str, args.show))}")
        if args.scatter:
            pairs = [(files[path].environment, case) for path, cases in shown.items() for case in cases]
            report.write_scatter(args.scatter, pairs)
        elif args.columns:
            print("\n".join(report.summary(every, args.columns)))
        else:
            print("\n\n".join(map(report.table, every)))
    except (OSError, ValueError) as error:
        raise Refused(error) from error
    return 0
