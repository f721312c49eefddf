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

KEPT = {  # variants of the kept path's kernels, by their names in the files; "mms" are the plain products
    "old": "before their last changes",
    "new": "as they are",
    "base": "as they are: 128 x 256, 3 stages, 16 row blocks together",
    "g8": "8 row blocks together",
    "g32": "32 row blocks together",
    "lse4": "log-sum-exp: 4 stages",
    "gh4": "dE: 4 stages",
    "gw4": "dC: 4 stages",
    "ghR": "dE: 256 x 128",
    "gwR": "dC: 256 x 128",
}
SIZES = {"": "2,048 tokens, D 768, 16,384 rows", "large ": "8,192 tokens, D 768, 32,768 rows"}
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
    """A row of each variant, a column of each file's heads: medians over the products', in brackets the rounds' spread."""
    rows: dict[str, dict[str, str]] = {}
    for file in stored:
        for head, variants in file["milliseconds"].items():
            column = f"{head}, {file['device'].split()[1]}"
            floor = statistics.median(variants["mms"]["total"])
            for name, label in KEPT.items():
                if name in variants:
                    low, middle, high = statistics.quantiles(variants[name]["total"], n=4, method="inclusive")
                    cell = f"{middle / floor:.3f} ({(high - low) / floor:.3f})"
                    rows.setdefault(name, {"/ 3 GEMMs (IQR)": label})[column] = cell
    columns = dict.fromkeys(column for row in rows.values() for column in row)
    return [{column: row.get(column, "-") for column in columns} for row in rows.values()]


def host(stored: list[dict]) -> list[dict[str, str]]:
    """A row of each loss and size: the host's median for forward and backward, in brackets its least; then with the wait."""
    table = []
    for file in stored:
        for prefix, size in SIZES.items():
            for loss, label in LOSSES.items():
                rounds = {way: file["rounds"].get(f"{prefix}{loss} {way}") for way in WAYS}
                if prefix + loss in file["rounds"]:
                    rounds["graphs"] = file["rounds"][prefix + loss]  # whatever runs, it is launched one way
                if not any(rounds.values()):
                    continue
                row = {"the host's part of": f"{file['device'].split()[1]}: {size}, {label}"}
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
