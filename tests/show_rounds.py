"""Print stored rounds that no ``cce-dist bench`` measured: no test, a program for tables of docs/results.md.

python tests/show_rounds.py kept docs/results/h200-kept.json more.json      loss and gradient over three plain products
python tests/show_rounds.py host docs/results/h200-host.json more.json      the host's part of loss and gradient
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

from cce_dist import report

AS_THEY_ARE = {
    "new",
    "base",
}  # the names of today's kernels in the files; "mms" are the plain products, the others were tried
LOSSES = {
    "default": "exponentials kept",
    "filtered": "filtered, `always=True`",
    "torch.compile": "`torch.compile`, dense",
}
WAYS = {"ordinary": "ordinary, ms", "launches": "launches", "graphs": "graphs"}


def show(argv: list[str]) -> None:
    stored = [json.loads(Path(name).read_text()) for name in argv[1:]]
    rows = {"kept": kept, "host": host}[argv[0]](stored)
    print("\n".join(report.table(rows)))


def kept(stored: list[dict]) -> list[dict[str, str]]:
    """A column of each file's heads: the median over the products', in brackets the rounds' spread."""
    row = {"/ 3 GEMMs (IQR)": "kept"}
    for file in stored:
        for head, variants in file["milliseconds"].items():
            floor = statistics.median(variants["mms"]["total"])
            (name,) = AS_THEY_ARE & variants.keys()
            low, middle, high = statistics.quantiles(variants[name]["total"], n=4, method="inclusive")
            row[f"{head}, {file['device'].split()[1]}"] = f"{middle / floor:.3f} ({(high - low) / floor:.3f})"
    return [row]


def host(stored: list[dict]) -> list[dict[str, str]]:
    """A row of each loss: the host's median for forward and backward, in brackets its least; then with the wait."""
    table = []
    for file in stored:
        for loss, label in LOSSES.items():
            rounds = {way: file["rounds"].get(f"{loss} {way}") for way in WAYS}
            if loss in file["rounds"]:
                rounds["graphs"] = file["rounds"][loss]  # whatever runs, it is launched one way
            row = {"the host's part of": f"{file['device'].split()[1]}, {label}"}
            row |= {column: _host_cell(rounds[way]) for way, column in WAYS.items()}
            waited = (rounds["graphs"] or {}).get("waited")
            table.append(row | {"with the wait": f"{statistics.median(waited) / 1e3:.2f}" if waited else "-"})
    return table


def _host_cell(times: dict[str, list[float]] | None) -> str:
    if times is None:
        return "-"
    both = [one + other for one, other in zip(times["forward"], times["backward"], strict=True)]
    return f"{statistics.median(both) / 1e3:.2f} ({min(both) / 1e3:.2f})"


if __name__ == "__main__":
    show(sys.argv[1:])
