"""Predictions of ``cce-dist plan`` beside stored measurements: the rows of a bench.json.

    python tests/plan_measured.py docs/results/*.json      how far predictions are off, a line for each file

A row's name says its budget: "@64MiB", "-default" for the one that the loss chooses, and the bench's own where it says nothing.
Rows of other libraries, and of DeepSpeed's loss without logits, are not predicted: two measurements of the last differ by 15 %.
Rows of the filter have a range, and test_filter_costs.py holds them to it.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cce_dist.kernels import memory
from cce_dist.tools import report
from cce_dist.tools.bench.methods import UNNAMED_MIB
from cce_dist.tools.bench.records import read_json
from cce_dist.tools.plan.devices import DENSE, DEVICES, Device
from cce_dist.tools.plan.head import Cost, Head, cost

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
    """Yield the rows of a bench.json that were measured and can be predicted; no ignored labels can.

    Without ``in_groups`` rows that a loss makes group by group are left out: the file is of a time before it did.
    """
    results = read_json(path)
    name = results.environment["device"].lower()
    (device,) = (device for device in DEVICES.values() if device.name in name)
    for case in results.cases:
        if case.ignored:
            continue
        one_number = case.stage != "megatron"
        head = Head(case.num_tokens, case.hidden_size, case.vocab_size, case.num_ranks, one_number=one_number)
        for row in case.rows:
            if row.problem or row.peak_bytes is None or not row.total.seconds:
                continue
            said = predict(head, row.name, case.stage, device)
            if said is not None and (in_groups or "saved" in said.items or "logits" in said.items):
                yield Pair(head, row.name, said, row.total.median, row.peak_bytes)


def predict(head: Head, row: str, stage: str, device: Device) -> Cost | None:
    """Return the prediction for a row of ``cce-dist bench`` by its name; None for rows that no plan predicts."""
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


def show(files: list[str]) -> None:
    """Print the largest errors of each file."""
    rows = []
    for path in map(Path, files):
        found = list(pairs(path))
        times, memory = zip(*((p.time_error, abs(p.memory_error) / max(1, p.peak_bytes)) for p in found), strict=True)
        cells = {"time off": f"{min(times):+.1%} to {max(times):+.1%}", "memory off": f"{max(memory):.1%}"}
        rows.append({"file": path.name, "rows": str(len(found)), **cells})
    print("\n".join(report.table(rows)))


if __name__ == "__main__":
    show(sys.argv[1:])
