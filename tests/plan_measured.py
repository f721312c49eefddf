"""Predictions of ``cce-dist plan`` beside stored measurements: rows of a bench.json, and runs of ``steps_for_plan.py``.

    python tests/plan_measured.py docs/results/*.json      how far predictions are off, a line for each file

A row's name says its budget: "@64MiB", "-default" for the one that the loss chooses, and the bench's own where it says nothing.
Rows of other libraries, and of DeepSpeed's loss without logits, are not predicted: two measurements of the last differ by 15 %.
Rows of the filter have a range, and test_filter_costs.py holds them to it.
"""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cce_dist import report
from cce_dist.bench.methods import UNNAMED_MIB
from cce_dist.bench.report import read_json
from cce_dist.plan.devices import DENSE, Device, device_of
from cce_dist.plan.head import Cost, Head, cost
from cce_dist.plan.layers import Layout
from cce_dist.plan.sizes import Model
from cce_dist.plan.steps import Step, step

OURS = re.compile(r"cce-dist(-cached|-default)?(-sp)?(?:@(\d+)MiB)?")


class Pair(NamedTuple):
    """A prediction and its measurement; ``peak_bytes`` are above inputs and gradients."""

    head: Head
    row: str
    said: Cost
    seconds: float
    peak_bytes: int

    @property
    def time_error(self) -> float:
        return self.said.seconds / self.seconds - 1

    @property
    def memory_error(self) -> int:
        return self.said.workspace - self.peak_bytes


def pairs(path: Path) -> Iterator[Pair]:
    """Yield the rows of a bench.json that were measured and can be predicted; no ignored labels can."""
    results = read_json(path)
    device = device_of(results.environment["device"])
    for case in results.cases:
        if case.ignored:
            continue
        head = Head(case.num_tokens, case.hidden_size, case.vocab_size, case.num_ranks)
        for row in case.rows:
            if row.problem or row.peak_bytes is None or not row.total.seconds:
                continue
            said = predict(head, row.name, case.stage, device)
            if said is not None:
                yield Pair(head, row.name, said, row.total.median, row.peak_bytes)


def predict(head: Head, row: str, stage: str, device: Device) -> Cost | None:
    """Return the prediction for a row of ``cce-dist bench`` by its name; None for rows that no plan predicts."""
    head = dataclasses.replace(head, sequence_parallel=row.partition("@")[0].endswith("-sp"))
    found = OURS.fullmatch(row)
    if found is not None:
        kind, _, mib = found.groups()
        workspace = None if kind == "-default" else int(mib or UNNAMED_MIB) << 20
        return cost(head, "kept" if kind == "-cached" else "budget", device, workspace)
    name = row.removesuffix("-sp")
    if name == "torch-compile" and head.is_split:
        name = "torch-compile-tp"
    if name == "deepspeed" and stage != "deepspeed":
        return None  # DeepSpeed's loss without logits has that name there
    if name == "deepspeed" and not head.is_split:
        name = "torch"
    return cost(head, name, device) if name in DENSE else None


class StepPair(NamedTuple):
    """A step of the training job: engine, model, loss and cut; its prediction, and its measurement."""

    row: str
    said: Step
    seconds: float
    peak_bytes: list[int]

    @property
    def time_error(self) -> float:
        return self.said.seconds / self.seconds - 1


def step_pairs(path: Path) -> Iterator[StepPair]:
    """Yield the runs of a file of ``steps_for_plan.py``; the plan's filter is one that is used."""
    for run in json.loads(path.read_text()):
        if run["loss"] != "filtered":
            yield _step_pair(run)


def _step_pair(run: dict[str, Any]) -> StepPair:
    shape, cut = run["shape"], run["layers_per_stage"]
    sizes = (shape[name] for name in ("hidden_size", "vocab_size", "num_layers", "num_heads", "num_ffn"))
    tokens = run["batch_size"] // run["accumulate"] * shape["seq_len"]
    layout = Layout(num_tokens=tokens, seq_len=shape["seq_len"], pp=run["pp"])
    layers = None if cut == "even" else [int(count) for count in cut.split(",")]
    loss = "budget" if run["loss"] == "exact" else run["loss"]
    workspace = run["workspace_bytes"] or None  # 0: chosen
    device = device_of(run["device"])
    said = step(Model(*sizes), run["engine"], loss, layout, run["accumulate"], device, layers, workspace)
    row = f"{run['engine']} {run['model']}, {run['loss']}, {cut if layers else 'pp ' + str(run['pp'])}"
    return StepPair(row, said, statistics.median(run["seconds"]), run["peak_bytes"])


def show(files: list[str]) -> None:
    """Print the largest errors of each file."""
    rows = []
    for path in map(Path, files):
        if path.read_text().startswith("["):
            found = [
                (
                    pair.time_error,
                    max(abs(s / p - 1) for s, p in zip(pair.said.peak_bytes, pair.peak_bytes, strict=True)),
                )
                for pair in step_pairs(path)
            ]
        else:
            found = [(pair.time_error, abs(pair.memory_error) / max(1, pair.peak_bytes)) for pair in pairs(path)]
        times = [time for time, _ in found]
        cells = {"time off": f"{min(times):+.1%} to {max(times):+.1%}", "memory off": f"{max(m for _, m in found):.1%}"}
        rows.append({"file": path.name, "rows": str(len(found)), **cells})
    print("\n".join(report.table(rows)))


if __name__ == "__main__":
    show(sys.argv[1:])
