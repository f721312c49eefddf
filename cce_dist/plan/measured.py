"""Predictions beside measurements: each row of a bench.json that a plan can say something of.

A row's name says its budget: "@64MiB", "-default" for the one that the loss chooses, and 256 MiB where it says nothing. A
file's date says whether the exact backward had room of its own for hidden states: those files are predicted with it.

Rows of other libraries, and of DeepSpeed's loss without logits, are not predicted: two measurements of the last differ by 15 %.
Rows of the filter have a range, and the tests hold them to it, and to its times on six softmaxes in docs/results.md.
"""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cce_dist.plan.devices import DEVICES, Device
from cce_dist.plan.head import DENSE, Cost, Head, cost
from cce_dist.plan.layers import Layout
from cce_dist.plan.sizes import Model
from cce_dist.plan.steps import Step, step

OURS = re.compile(r"cce-dist(-cached|-default|-main-grad)?(-sp)?(-fp32-sum)?(?:@(\d+)MiB)?")
IN_PLACE = "2026-11-22T16:00"  # since then hidden states lie in d_hidden's storage
UNSAID = 256 << 20  # the budget of rows and runs that name none: the default of all of them, until it was chosen


class Pair(NamedTuple):
    """A prediction and its measurement.

    Attributes:
        file: Name of the bench.json.
        head: What was measured.
        stage: The framework whose last stage it was, or nothing.
        row: Name of the row.
        said: The prediction.
        seconds: Median of the rounds, forward and backward.
        peak_bytes: Above inputs and gradients.
    """

    file: str
    head: Head
    stage: str
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
    from cce_dist.bench.report import read_json

    results = read_json(path)
    device = device_of(results.environment["device"])
    for case in results.cases:
        if case.ignored:
            continue
        own_rows = results.environment["date"] < IN_PLACE
        head = Head(case.num_tokens, case.hidden_size, case.vocab_size, case.num_ranks, own_rows=own_rows)
        for row in case.rows:
            if row.problem or row.peak_bytes is None or not row.total.seconds:
                continue
            said = predict(head, row.name, case.stage, device)
            if said is not None:
                yield Pair(path.name, head, case.stage, row.name, said, row.total.median, row.peak_bytes)


def device_of(name: str) -> Device:
    """Return the table's GPU of a name as torch gives it. Raises ValueError."""
    for device in DEVICES.values():
        if device.name in name.lower():
            return device
    raise ValueError(f"the table of GPUs has no {name}; it has {', '.join(DEVICES)}")


def predict(head: Head, row: str, stage: str, device: Device) -> Cost | None:
    """Return the prediction for a row of ``cce-dist bench`` by its name; None for rows that no plan predicts."""
    found = OURS.fullmatch(row)
    if found is not None:
        kind, sliced, wide, mib = found.groups()
        loss = "kept" if kind == "-cached" else "budget"
        options: dict[str, Any] = {"sequence_parallel": bool(sliced), "main_grad": kind == "-main-grad"}
        head = dataclasses.replace(head, **options, sum_itemsize=4 if wide else 0)
        workspace = int(mib) << 20 if mib else None if kind == "-default" else UNSAID
        return cost(head, loss, device, workspace)
    name = row.removesuffix("-sp")
    if name == "torch-compile" and head.is_split:
        name = "torch-compile-tp"
    if name == "deepspeed" and stage != "deepspeed":
        return None  # DeepSpeed's loss without logits has that name there
    if name == "deepspeed" and not head.is_split:
        name = "torch"
    if name not in DENSE:
        return None
    return cost(dataclasses.replace(head, sequence_parallel=row.endswith("-sp")), name, device)


class StepPair(NamedTuple):
    """A step of the training job: its prediction, and its measurement.

    Attributes:
        row: Engine, model, loss with its budget, and layers of each stage.
        said: The prediction.
        seconds: Median of the steps.
        peak_bytes: Of each rank; empty where other models were still in memory.
    """

    row: str
    said: Step
    seconds: float
    peak_bytes: list[int]

    @property
    def time_error(self) -> float:
        return self.said.seconds / self.seconds - 1


def is_steps(path: Path) -> bool:
    """Whether a file is one of ``tests/steps_for_plan.py``."""
    return path.read_text(errors="ignore").lstrip().startswith("[")


def step_pairs(path: Path) -> Iterator[StepPair]:
    """Yield the runs of a file of ``tests/steps_for_plan.py``. Raises ValueError where a run lacks something."""
    for run in json.loads(path.read_text()):
        try:
            yield _step_pair(run)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} has a run that is none of a step ({type(error).__name__}: {error})") from error


def _step_pair(run: dict[str, Any]) -> StepPair:
    shape = run["shape"]
    names = ("hidden_size", "vocab_size", "num_layers", "num_heads", "num_ffn")
    tokens = run["batch_size"] // run["accumulate"] * shape["seq_len"]
    layout = Layout(num_tokens=tokens, seq_len=shape["seq_len"], pp=run["pp"])
    cut = run["layers_per_stage"]
    layers = None if cut == "even" else [int(count) for count in cut.split(",")]
    loss = "budget" if run["loss"] == "exact" else run["loss"]
    device = device_of(run["device"])
    model = Model(*(shape[name] for name in names))
    workspace = run.get("workspace_bytes", UNSAID) or None  # 0: chosen
    said = step(model, run["engine"], loss, layout, run["accumulate"], device, layers, workspace)
    stages = cut if layers else f"pp {run['pp']}"
    given = "" if run["loss"] == "dense" else f" in {workspace >> 20} MiB" if workspace else " in a chosen budget"
    row = f"{run['engine']} {run['model']}, {run['loss']}{given}, {stages}"
    return StepPair(row, said, statistics.median(run["seconds"]), run["peak_bytes"])
