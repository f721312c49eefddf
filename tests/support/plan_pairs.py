"""Predictions of ``cce-dist plan`` beside the rows of stored measurements.

A row's name says its budget: "@64MiB", "-default" for the one that the loss chooses, and the benchmark's own if it has none.
"""

import dataclasses
import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cce_dist.kernels import memory
from cce_dist.tools.plan.devices import DENSE, DEVICES, Device
from cce_dist.tools.plan.head import Cost, Head, cost

UNNAMED_MIB = 256  # the budget of a row whose name has none
MOST_DEFAULT = 2 << 30  # the largest default budget when the stored rounds were measured
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


def pairs(path: Path, in_groups: bool = True) -> Iterator[Pair]:
    """Yield the rows of a file that were measured and can be predicted; no ignored labels can.

    Without ``in_groups`` rows that a loss makes group by group are left out: the file is older than these groups.
    """
    results = json.loads(path.read_text())
    if "cases" not in results:
        return
    name = results["environment"]["device"].lower()
    (device,) = (device for device in DEVICES.values() if device.name in name)
    for case in results["cases"]:
        if case["ignored"]:
            continue
        stage = case.get("stage", "")
        sizes = (case[key] for key in ("num_tokens", "hidden_size", "vocab_size", "num_ranks"))
        head = Head(*sizes, one_number=stage != "megatron")
        for row in case["rows"]:
            if row["problem"] or row.get("peak_bytes") is None or not row["total"]["seconds"]:
                continue
            said = predict(head, row["name"], stage, device)
            if said is not None and (in_groups or "saved" in said.items or "logits" in said.items):
                yield Pair(head, row["name"], said, statistics.median(row["total"]["seconds"]), row["peak_bytes"])


def predict(head: Head, row: str, stage: str, device: Device) -> Cost | None:
    """Return the prediction for a row of benchmarks/heads.py by its name; None for rows that no plan predicts."""
    head = dataclasses.replace(head, sequence_parallel=row.partition("@")[0].endswith("-sp"))
    found = OURS.fullmatch(row)
    if found is not None:
        kind, _, mib = found.groups()
        workspace = int(mib or UNNAMED_MIB) << 20
        if kind == "-default":
            workspace = min(MOST_DEFAULT, memory.default_workspace(head.sizes, keeps=True))
        return cost(head, "kept" if kind == "-cached" else "budget", device, workspace)
    name = row.removesuffix("-sp")
    if name == "torch-compile" and head.is_split:
        name = "torch-compile-tp"
    if name == "deepspeed" and stage != "deepspeed":
        return None  # DeepSpeed's loss without logits has that name there
    if name == "deepspeed" and not head.is_split:
        name = "torch"
    return cost(head, name, device) if name in DENSE else None
