"""The reports of commands: one Markdown table, one JSON round trip, one style of bars. ``bench`` and ``compare`` use them.

A table is a list of rows, each a dict from column to text, so that a row is written beside the names of its numbers. A file
is a dataclass of dataclasses, lists and dicts; its fields are the keys of the JSON.
"""

from __future__ import annotations

import json
import math
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

PACKAGES = [
    "triton",
    "cut-cross-entropy",
    "liger-kernel",
    "quack-kernels",
    "nvidia-cutlass-dsl",
    "fla-core",
    "trl",
    "torchtune",
    "megatron-core",
    "deepspeed",
]
OURS_COLOR, OTHER_COLOR = "#1f6fb4", "#9aa5b1"

Record = TypeVar("Record")


def describe_environment(device: Any) -> dict[str, Any]:
    """Return the device, the versions of what is compared, the date and the command."""
    import torch

    versions = {"torch": str(torch.__version__)}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})",
        "torch": versions["torch"],
        "versions": versions,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["cce-dist", *sys.argv[1:]]),
    }


def where(environment: dict[str, Any]) -> str:
    """Device, version of torch and day of a run, in a line."""
    return f"{environment['device']}, torch {environment['torch']}, {environment['date'][:10]}"


def describe(error: Exception) -> str:
    """An exception in one line of at most 120 characters."""
    if type(error).__name__ == "OutOfMemoryError":
        return "out of memory"
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed"
    first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    text = first_line if isinstance(error, ImportError) else f"{type(error).__name__}: {first_line}"
    return text if len(text) <= 120 else text[:117] + "..."


def table(rows: Sequence[dict[str, str]]) -> list[str]:
    """The lines of a Markdown table: text by column, the first aligned left, the others right."""
    if not rows:
        return []
    widths = [max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]]

    def line(cells: Sequence[str]) -> str:
        first, *numbers = [f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)]
        return f"| {' | '.join([f'{first.strip():<{widths[0]}}', *numbers])} |"

    rule = "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])])
    return [line(list(rows[0])), f"|{rule}|", *(line(list(row.values())) for row in rows)]


def write_json(path: Path, record: Any) -> None:
    """Write a dataclass with all that it holds; NaN and infinities become null."""
    path.write_text(json.dumps(_finite(asdict(record)), indent=1, allow_nan=False) + "\n")


def read_json(path: Path, kind: type[Record], name: str) -> Record:
    """Read back what ``write_json`` wrote; null becomes NaN where the field is a float.

    Raises:
        ValueError: The file does not hold a ``kind``, as a ``name`` of this version does.
    """
    try:
        return _restored(kind, json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a {name} of this version ({type(error).__name__}: {error})") from error


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _restored(kind: Any, value: Any) -> Any:
    """Turn what JSON holds into the type that the dataclass's annotation names."""
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{name: _restored(hints[name], inner) for name, inner in value.items()})  # pyright: ignore[reportCallIssue]
    if get_origin(kind) is list:
        return [_restored(get_args(kind)[0], inner) for inner in value]
    if get_origin(kind) is dict:
        return {name: _restored(get_args(kind)[1], inner) for name, inner in value.items()}
    if NoneType in get_args(kind):  # X | None
        return None if value is None else _restored(get_args(kind)[0], value)
    return math.nan if value is None and kind is float else value


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


def bars(
    axis: Any, rows: Sequence[tuple[str, bool]], values: list[float], labels: list[str], spreads: list[float]
) -> None:
    """Draw a horizontal bar a row, the first on top; ours have a colour, ``spreads`` are whiskers, labels stand beyond."""
    names, colors = [name for name, _ in rows], [OURS_COLOR if ours else OTHER_COLOR for _, ours in rows]
    whiskers = [spread / 2 for spread in spreads]
    axis.barh(
        names, values, xerr=whiskers if any(whiskers) else None, color=colors, height=0.7, error_kw={"linewidth": 0.8}
    )
    room = max([*values, 1e-9]) * 1.4
    # The white box keeps a label readable where it crosses a line of the picture.
    blank = {"facecolor": "white", "edgecolor": "none", "pad": 0.3}
    for position, (value, whisker, label) in enumerate(zip(values, whiskers, labels, strict=True)):
        axis.text(value + whisker + 0.01 * room, position, label, va="center", fontsize=7, bbox=blank)
    axis.set_xlim(0, room)
    axis.invert_yaxis()
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
