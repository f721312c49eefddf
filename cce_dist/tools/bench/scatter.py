"""The README's picture: time over memory, a panel for each head and a point for each method, both beside torch.compile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cce_dist.tools import report
from cce_dist.tools.bench.records import Case, Row

BASE = "torch-compile"
MOST_TIME = 2.4  # slower methods are drawn at the edge, with their number
# What a reader calls each method, where its name goes, and the corner of the text that is put there.
LABELS: dict[str, tuple[str, tuple[float, float], str]] = {
    "cce-dist-default": ("cce_dist", (-9, -3), "right"),
    "cce-dist-filtered": ("cce_dist, filtered", (9, -3), "left"),
    "torch": ("PyTorch", (4, 11), "right"),
    BASE: ("torch.compile", (0, 11), "center"),
    "liger": ("Liger", (11, -4), "left"),
}


def draw(path: Path, files: Sequence[tuple[dict[str, Any], Case]]) -> None:
    """Draw one panel for each case, given with its file's environment. Needs matplotlib.

    Raises:
        ValueError: A case has no row of ``torch-compile``.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = 4 * len(files), 4.2
    figure, axes = plt.subplots(1, len(files), figsize=size, sharey=True, layout="constrained", squeeze=False)
    for axis, (environment, case) in zip(axes[0], files, strict=True):
        _panel(axis, environment, case)
    axes[0][0].set_ylabel("time / torch.compile's", fontsize=14)
    figure.supxlabel("memory / torch.compile's (logarithmic)", fontsize=14)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _panel(axis: Any, environment: dict[str, Any], case: Case) -> None:
    rows = {row.name: row for row in case.present if not row.problem and row.peak_bytes}
    if BASE not in rows:
        raise ValueError(f"{case.shape} has no row of {BASE}")
    axis.axhline(1, color="#d0d5db", zorder=0)
    axis.axvline(1, color="#d0d5db", zorder=0)
    for name, (label, offset, side) in LABELS.items():
        if name in rows:
            memory, time = _relative(rows[name], rows[BASE])
            color = report.OURS_COLOR if rows[name].ours else "#5b6773"
            beyond = time > MOST_TIME
            axis.plot(memory, min(time, MOST_TIME), "^" if beyond else "o", color=color, markersize=9)
            label = f"{label} {time:.1f}" if beyond else label
            axis.annotate(
                label, (memory, min(time, MOST_TIME)), offset, textcoords="offset points", ha=side, color=color,
                fontsize=13, weight="bold" if rows[name].ours else "normal",
            )  # fmt: skip
    axis.set_xscale("log")
    axis.set_xlim(0.0025, 12)
    axis.set_ylim(0, MOST_TIME + 0.2)
    axis.set_xticks([0.01, 0.1, 1, 10], ["1/100", "1/10", "1", "10"])
    axis.tick_params(labelsize=12)
    gpu = environment["device"].removeprefix("NVIDIA ").split()[0]
    axis.set_title(f"{case.shape}, {case.num_tokens:,} tokens, {gpu}", fontsize=14)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _relative(row: Row, base: Row) -> tuple[float, float]:
    """Return a row's peak memory and median time relative to the base's."""
    assert row.peak_bytes and base.peak_bytes
    return row.peak_bytes / base.peak_bytes, row.total.median / base.total.median
