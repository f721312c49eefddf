"""A task of several methods, checked and timed: what the benches of log-probabilities and of divergences share.

The rules are those of ``cce-dist bench``: a method whose values or gradients are wrong gets no time, and the others are timed
in turns, beside the plain products that no method can do without.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cce_dist.arguments import device, folder, whole
from cce_dist.bench.loop import Clock, Errors, Floor, Job, Row, Timing, free_memory, relative_error, time_in_turns
from cce_dist.bench.shapes import SHAPES
from cce_dist.report import describe

Step = Callable[[], tuple[Tensor, ...]]  # -> value, and where gradients are asked for d_hidden and d_weight


class Measured(NamedTuple):
    """A row for each method, and the seconds of so many plain products."""

    rows: list[Row]
    products: dict[int, Timing]


def add_arguments(parser: argparse.ArgumentParser, methods: Iterable[str], file: str) -> None:
    """Add the options that both benches have; ``parse`` reads them."""
    add = parser.add_argument
    add("--shape", choices=SHAPES, help="the head (default: llama-3-8b; on a CPU toy)")
    add("--tokens", type=whole(1), help="number of tokens (default: 8192; on a CPU 256)")
    add("--methods", nargs="+", choices=methods, default=list(methods))
    add("--repeats", type=whole(1), default=20)
    add("--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--out", type=folder, help=f"folder for {file}")


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the command line; a shape and a number of tokens that it does not give are those that fit the device."""
    args = parser.parse_args()
    on_gpu = torch.device(args.device).type == "cuda"
    args.shape = args.shape or ("llama-3-8b" if on_gpu else "toy")
    args.tokens = args.tokens or (8192 if on_gpu else 256)
    return args


def measure(
    methods: dict[str, Callable[[], Step]], expected: tuple[Tensor, ...], products: Mapping[int, Callable[[], object]],
    repeats: int,
) -> Measured:  # fmt: skip
    """Check every method, then time those that are right, in turns.

    Args:
        methods: By name, what builds the step of each.
        expected: The true values of a step.
        products: Plain products, by their number.
        repeats: Rounds.
    """
    found = [_checked(name, build, expected) for name, build in methods.items()]
    owner, floor = Floor(), {count: Timing() for count in products}
    jobs = [Job(owner, floor[count], call) for count, call in products.items()]
    jobs += [Job(row, row.total, step) for row, step in found if step is not None]
    time_in_turns(jobs, repeats, Clock(expected[0].device), lambda line: None)
    return Measured([row for row, _ in found], floor)


def _checked(name: str, build: Callable[[], Step], expected: tuple[Tensor, ...]) -> tuple[Row, Step | None]:
    """Build and check a method: its row, and its step if that is right."""
    row, step = Row(name, name.startswith("cce-dist")), None
    try:
        step = build()
        row.errors = _errors(step(), expected)
        row.problem = row.errors.verdict()
        if expected[0].is_cuda and not row.problem:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            outputs = sum(x.nbytes for x in step())
            torch.cuda.synchronize()
            row.peak_bytes = max(0, torch.cuda.max_memory_allocated() - before - outputs)
    except ImportError as error:
        row.problem, row.missing = describe(error), True
    # Whatever another library raises, the other methods go on.
    except Exception as error:
        row.problem = describe(error)
    free_memory(expected[0])
    return row, None if row.problem else step


def _errors(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> Errors:
    """Relative errors; those of gradients are 0 where there are none."""
    of_value, *of_grads = (
        relative_error(x.reshape(-1, 1), y.reshape(-1, 1)) for x, y in zip(found, expected, strict=True)
    )
    if not of_grads:
        return Errors(of_value, 0.0, 0.0, 0.0)
    of_mean = (found[1].mean(0, keepdim=True, dtype=torch.float32), expected[1].mean(0, keepdim=True))
    d_hidden, d_weight = of_grads
    return Errors(of_value, d_hidden, d_weight, relative_error(*of_mean))


def lines(measured: Measured) -> list[dict[str, str]]:
    """The table: the products, then a line for each method."""
    counts = sorted(measured.products)
    columns = ["ms", *(_over(count) for count in counts), "MiB", "err value", "err dE", "err dC"]
    table = []
    for count in counts:
        ms = 1e3 * measured.products[count].median
        table.append({"method": _over(count)[1:], **dict.fromkeys(columns, ""), "ms": f"{ms:.2f}"})
    return [*table, *(_line(row, measured, columns) for row in measured.rows)]


def _over(count: int) -> str:
    return f"/{count} GEMM{'s' * (count > 1)}"


def _line(row: Row, measured: Measured, columns: Sequence[str]) -> dict[str, str]:
    line = {"method": row.name, **dict.fromkeys(columns, "")}
    if row.problem or row.errors is None:
        return line | {"ms": row.problem}
    ratios = {_over(count): f"{row.total.median / timing.median:.3f}" for count, timing in measured.products.items()}
    numbers = {"err value": row.errors.loss, "err dE": row.errors.d_hidden, "err dC": row.errors.d_weight}
    return line | ratios | {
        "ms": f"{1e3 * row.total.median:.2f}", "MiB": "" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:.0f}",
    } | {name: f"{error:.1e}" for name, error in numbers.items()}  # fmt: skip
