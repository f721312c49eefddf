"""Print how far the predictions of ``cce-dist plan`` are off stored measurements, a line for each file.

    python benchmarks/plan_measured.py benchmarks/results/h200-*.json

Rows of other libraries, and of DeepSpeed's loss without logits, are not predicted: two measurements of the last differ by 15 %.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from support.plan_pairs import pairs

from cce_dist.tools.report import table


def main(argv: Sequence[str]) -> int:
    """Print the largest errors of each file that has rows which a plan predicts."""
    rows = []
    for path in map(Path, argv):
        if found := list(pairs(path)):
            times = [pair.time_error for pair in found]
            memory = max(abs(pair.memory_error) / max(1, pair.peak_bytes) for pair in found)
            cells = {"time off": f"{min(times):+.1%} to {max(times):+.1%}", "memory off": f"{memory:.1%}"}
            rows.append({"file": path.name, "rows": str(len(found)), **cells})
    print("\n".join(table(rows)))
    return int(not rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
