"""``cce-dist bench``: time, memory and error of the loss and its gradients, against other libraries and plain products.

Reading order: ``shapes`` (heads by name), ``workload`` (input with a trained model's statistics), ``methods`` (what is
compared), ``measure`` (check, then time), ``report`` (table, JSON, figure); and over ranks ``group``, with ``peers`` (what is
compared) or ``stage`` (ends of a framework's last stage), and ``collectives`` (what is sent).
"""

from __future__ import annotations

import argparse
import platform
import sys
from datetime import datetime, timezone
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cce_dist.bench.shapes import SHAPES

DEFAULTS = {  # by device: shapes and tokens that take minutes, not hours
    "cuda": (["gemma-2-2b", "llama-3-8b", "phi-3.5"], [8192]),
    "cpu": (["toy"], [512]),
}
STAGES = ("megatron", "deepspeed")
NO_MATPLOTLIB = "matplotlib is not installed (pip install 'cce-dist[bench]')"
PACKAGES = (
    "triton", "cut-cross-entropy", "liger-kernel", "quack-kernels", "nvidia-cutlass-dsl", "megatron-core", "deepspeed",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``cce-dist bench``."""
    add = parser.add_argument
    add("--shapes", nargs="+", choices=SHAPES, metavar="SHAPE", help=f"heads to time: {', '.join(SHAPES)}")
    add("--tokens", nargs="+", type=int, metavar="N", help="numbers of tokens (default: 8192; on a CPU 512)")
    add("--methods", nargs="+", metavar="METHOD", help="rows of the table; 'list' prints them (default: all)")
    add("--ignored", nargs="+", type=float, metavar="SHARE", help="shares of labels that are -100 (default: 0)")
    add("--tp", type=_sizes, metavar="T,T", help="split the vocabulary over so many ranks, under torchrun or alone")
    add("--stage", choices=STAGES, help="time the end of its last pipeline stage by its means and ours, likewise")
    add("--workspace", nargs="+", type=int, metavar="MIB", help="workspaces of cce-dist, a row each (default: 256)")
    add("--repeats", type=int, default=20, help="rounds of timing, methods in turns")
    add("--device", help="cuda, cuda:1, cpu (default: cuda if there is one)")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of hidden states and weight")
    add("--out", type=Path, default=Path("runs/bench"), metavar="DIR", help="folder for bench.json and bench.png")
    add("--show", type=Path, metavar="JSON", help="measure nothing; print this bench.json again and draw its figure")


def run(args: argparse.Namespace) -> int:
    """Measure every case and report it as soon as it is known.

    Returns:
        0, or 1 if a row of this library itself has no time (wrong, or failed).
    """
    import torch

    from cce_dist.bench import methods, report

    if args.show:
        environment, cases = report.read_json(args.show)
        print("\n\n".join(map(report.table, cases)))
        report.write_figure(args.show.with_suffix(".png"), environment, cases)
        return 0
    if args.device is None:
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes, tokens = DEFAULTS[torch.device(args.device).type]
    args.shapes, args.tokens, args.ignored = args.shapes or shapes, args.tokens or tokens, args.ignored or [0.0]
    if args.tp or args.stage:
        from cce_dist.bench import group

        return group.run(args)
    from cce_dist.bench.measure import describe, measure
    from cce_dist.bench.workload import make_workload

    available = methods.all_methods(args.workspace or [256])
    if args.methods == ["list"]:
        print("\n".join(available))
        return 0
    chosen = choose(args.methods, available)
    device = torch.device(args.device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    environment = describe_environment(device)
    args.out.mkdir(parents=True, exist_ok=True)
    has_figure = find_spec("matplotlib") is not None  # asked before hours of measuring, not after

    cases = []
    for shape in args.shapes:
        for num_tokens in args.tokens:
            for ignored in args.ignored:
                label = f"{shape}, N {num_tokens:,}"
                show_progress(f"{label}: drawing the workload")
                try:
                    workload = make_workload(
                        SHAPES[shape], num_tokens, ignored=ignored, dtype=getattr(torch, args.dtype), device=device
                    )
                    rows, floor = measure(
                        workload, chosen, args.repeats, lambda line, label=label: show_progress(f"{label}: {line}")
                    )
                except torch.OutOfMemoryError as error:
                    show_progress("")
                    print(f"{label}: {describe(error)}", file=sys.stderr)
                    continue
                show_progress("")
                cases.append(report.Case.of(shape, ignored, workload, rows, floor))
                print(report.table(cases[-1]) + "\n", flush=True)
                # After every case, so that an interrupted run leaves what it had.
                report.write_json(args.out / "bench.json", environment, cases)
                if has_figure:
                    report.write_figure(args.out / "bench.png", environment, cases)
    say_where(args.out, environment, has_figure)
    return exit_code(cases)


def say_where(out: Path, environment: dict[str, Any], has_figure: bool) -> None:
    """Print what was measured on, and where the results are."""
    print(f"{environment['device']}; " + ", ".join(f"{k} {v}" for k, v in environment["versions"].items()))
    print(f"{out}: bench.json" + (", bench.png" if has_figure else f"; no figure: {NO_MATPLOTLIB}"))


def exit_code(cases: list[Any]) -> int:
    """0, or 1 if there is no case, or a row of this library itself has no time."""
    return int(not cases or any(row.ours and row.problem for case in cases for row in case.rows))


def _sizes(text: str) -> list[int]:
    sizes = [int(size) for size in text.split(",")]
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"sizes of groups are positive, got {text}")
    return sizes


def choose(names: list[str] | None, available: dict[str, Any]) -> dict[str, Any]:
    """The methods named, in the order of the table (None: all); ``cce-dist`` means each of its workspaces."""
    if names is None:
        return available
    known = {name: name.partition("@")[0] for name in available}
    unknown = set(names) - set(known) - set(known.values())
    if unknown:
        raise SystemExit(f"cce-dist bench: unknown method {min(unknown)}; choose from {', '.join(available)}")
    return {name: method for name, method in available.items() if name in names or known[name] in names}


def describe_environment(device: Any) -> dict[str, Any]:
    """Return the device, the versions of what is compared, the date and the command."""
    import torch

    versions = {"torch": str(torch.__version__)}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})",
        "torch": versions["torch"],
        "versions": versions,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["cce-dist", *sys.argv[1:]]),
    }


def show_progress(line: str) -> None:
    """Overwrite one line of a terminal; a line each where the output is a file."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
    elif line:
        print(line, file=sys.stderr, flush=True)
