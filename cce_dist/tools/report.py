"""Markdown tables and pictures that several programs print and draw."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

OURS_COLOR = "#1f6fb4"


def table(rows: Sequence[dict[str, str]]) -> list[str]:
    """Return the lines of a Markdown table. A row is a dict from column to text."""
    if not rows:
        return []
    widths = [max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]]

    def line(cells: Sequence[str]) -> str:
        first, *numbers = [f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)]
        return f"| {' | '.join([f'{first.strip():<{widths[0]}}', *numbers])} |"

    rule = "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])])
    return [line(list(rows[0])), f"|{rule}|", *(line(list(row.values())) for row in rows)]


@contextmanager
def picture(path: Path, title: str, size: tuple[float, float], dpi: int = 130) -> Iterator[Any]:
    """Give an empty matplotlib figure of ``size`` inches, and write it to ``path`` once it is drawn."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=size, layout="constrained")
    try:
        yield figure
        figure.suptitle(title.replace("$", r"\$"), fontsize=10)  # otherwise matplotlib reads a formula
        figure.savefig(path, dpi=dpi)
    finally:
        pyplot.close(figure)
