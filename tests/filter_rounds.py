"""Measure what no row of ``cce-dist bench`` has of a filter, on a GPU, and show it: no test, a program for docs/results.md.

    python tests/filter_rounds.py fallback FILE     a filter that can drop nothing beside exact gradients of the same budget
    python tests/filter_rounds.py rare FILE         the error of dC's rows whose token is no label
    python tests/filter_rounds.py show FILE         the table of a file of either

Where nothing can be filtered, since its threshold is far below the softmax, a filter takes the exact kernels, and the rest is
what it costs to find that out. The reference of the errors is the gradient with all exponentials kept.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cce_dist import GradFilter, linear_cross_entropy
from cce_dist.bench.loop import Clock, Job, Row, relative_error, time_in_turns
from cce_dist.bench.shapes import SHAPES
from cce_dist.bench.workload import Workload, make_workload
from cce_dist.report import describe_environment, read_json, table, write_json

RUNGS = ("early", "spread", "middle", "sharp")
NOTHING_DROPPED = 2.0**-20
MIB = 256


@dataclass
class Measured:
    """One head at one size: seconds of each round by method, or errors by rung and seed."""

    head: str
    num_tokens: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, list[float]] = field(default_factory=dict)


@dataclass
class Results:
    environment: dict[str, Any]
    heads: list[Measured]


def step(workload: Workload, **options: Any) -> torch.Tensor:
    """Loss and gradient; return that of the weight."""
    hidden, weight = (tensor.detach().requires_grad_() for tensor in workload[:2])
    linear_cross_entropy(hidden, weight, workload.labels, **options).backward()
    assert weight.grad is not None
    return weight.grad


def fallback(head: str, num_tokens: int, args: argparse.Namespace) -> Measured:
    """Time both in turns."""
    workload = make_workload(SHAPES[head], num_tokens, rung="early", device="cuda", seed=args.seeds[0])
    ways = {"exact": None, "filtered": GradFilter(NOTHING_DROPPED, always=True)}
    rows = {name: Row(name, ours=True) for name in ways}
    jobs = [
        Job(row, row.total, partial(step, workload, workspace_bytes=MIB << 20, grad_filter=ways[name]))
        for name, row in rows.items()
    ]
    for job in jobs * 2:
        job.call()
    time_in_turns(jobs, args.repeats, Clock(workload.hidden.device), lambda line: None)
    assert not any(row.problem for row in rows.values()), rows
    return Measured(head, num_tokens, {name: row.total.seconds for name, row in rows.items()})


def rare(head: str, num_tokens: int, args: argparse.Namespace) -> Measured:
    """Compare the rows of dC whose token is no label of the batch."""
    measured = Measured(head, num_tokens)
    for rung in RUNGS:
        for seed in args.seeds:
            workload = make_workload(SHAPES[head], num_tokens, rung=rung, device="cuda", seed=seed)
            is_rare = torch.bincount(workload.labels, minlength=len(workload.weight)) == 0
            exact = step(workload, workspace_bytes=1 << 40)[is_rare]
            ours = step(workload, grad_filter=GradFilter(always=True))[is_rare]
            measured.errors.setdefault(rung, []).append(relative_error(ours.float(), exact.float()))
            del workload, exact, ours
    return measured


def ratio(case: Measured) -> tuple[float, float]:
    """Filtered over exact: the median of the rounds' ratios, and their interquartile range."""
    ratios = [a / b for a, b in zip(case.seconds["filtered"], case.seconds["exact"], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return statistics.median(ratios), high - low


def show(argv: list[str]) -> None:
    """Print the table of a file."""
    print(text(read_json(Path(argv[0]), Results, "file of this program")))


def text(results: Results) -> str:
    """Rounds or errors as a table."""
    rows: dict[str, dict[str, str]] = {}
    for case in results.heads:
        if case.seconds:
            row = rows.setdefault(case.head, {"filtered / exact (IQR)": case.head})
            row[f"N {case.num_tokens:,}"] = "{:.3f} ({:.3f})".format(*ratio(case))
        else:
            row = rows.setdefault(case.head, {"error of rows of no label": case.head})
            row |= {rung: "; ".join(f"{error:.1e}" for error in errors) for rung, errors in case.errors.items()}
    return "\n".join(table(list(rows.values())))


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["fallback", "rare", "show"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--heads", nargs="+", default=["llama-3-8b", "gemma-2-2b"])
    parser.add_argument("--tokens", nargs="+", type=int, help="default: 2048 8192 32768; of rare 8192")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--repeats", type=int, default=8)
    args = parser.parse_args(argv)
    if args.what == "show":
        return show([args.file])
    measure, tokens = (fallback, [2048, 8192, 32768]) if args.what == "fallback" else (rare, [8192])
    heads = []
    for head in args.heads:
        for num_tokens in args.tokens or tokens:
            heads.append(measure(head, num_tokens, args))
            print(text(Results({}, heads[-1:])), flush=True)
    write_json(args.file, Results(describe_environment(torch.device("cuda")), heads))


if __name__ == "__main__":
    main(sys.argv[1:])
