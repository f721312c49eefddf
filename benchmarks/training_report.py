"""What ``training.py`` measures: the record, a Markdown table, and a figure."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib  # noqa: F401  fail before hours of training, not after

from cce_dist.tools.report import picture
from cce_dist.tools.report import table as markdown
from records import read_json, where

GRADIENTS: tuple[str, ...] = ("dE", "mean dE", "dC", "rare dC")
COLUMNS = {  # names of --columns: headings of the table; {} is the baseline
    "val-loss": "val loss (sd)",
    "excess-se": "- {} (s.e.)",
    "dE": "dE",
    "mean-dE": "mean dE",
    "mean-dE-error": "error of mean dE",
    "dC": "dC",
    "rare-dC": "rare dC",
}
# Options that change no run.
OUTSIDE_RUNS = {"out", "methods", "seeds", "first_seed", "capture", "show", "columns", "cache"}


@dataclass
class Measurement:
    """The state of a run after ``step`` optimizer steps.

    Gradients are those of ``GRADIENTS``. Fields about them are empty or NaN if gradients were not compared.
    """

    step: int
    val_loss: float  # nats per token, by the exact head, always on the same batches
    train_loss: float = math.nan  # by the method, mean over the steps since the last measurement
    cosine: dict[str, float] = field(default_factory=dict)  # with the dense gradient
    norm: dict[str, float] = field(default_factory=dict)  # of the method's gradient, over the norm of the dense one
    dense_norm: dict[str, float] = field(default_factory=dict)
    batch_loss: float = math.nan  # dense loss of the batch
    # Only in older files: tokens/s, the share of logits that the filter kept, the probability of the 1st, 2nd, 4th, ... id.
    tokens_per_s: float = math.nan
    kept_tiles: float = math.nan
    by_rank: list[float] = field(default_factory=list)

    @property
    def error_of_mean(self) -> float:
        """Relative error of the mean of dE over tokens, from its cosine and norm."""
        cosine, norm = (values.get("mean dE", math.nan) for values in (self.cosine, self.norm))
        return math.sqrt(max(1 + norm * norm - 2 * norm * cosine, 0.0))


@dataclass
class Run:
    """One training."""

    method: str
    seed: int
    measurements: list[Measurement] = field(default_factory=list)
    problem: str = ""  # why it ended early, or compares nothing; empty: no problem


@dataclass
class Comparison:
    """All runs, with the environment and the options that they were made with."""

    environment: dict[str, Any]
    options: dict[str, Any]  # of the command line
    sizes: dict[str, int]  # of the model
    missing: dict[str, str]  # methods that cannot run here, each with the reason
    runs: list[Run] = field(default_factory=list)

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(run.method for run in self.runs))

    @property
    def baseline(self) -> str:
        """Return the method that the others are compared with: "stock", "dense" in files of a small GPT, or the first."""
        return next((name for name in ("stock", "dense", *self.methods) if name in self.methods), "stock")

    @property
    def title(self) -> str:
        o, sizes = self.options, self.sizes
        model = f"{o['model']}, " if o.get("model") else ""
        return (
            f"{model}{o['steps']} steps of {o['batch_size'] * sizes['seq_len']:,} tokens, "
            f"{len({run.seed for run in self.runs})} seeds; "
            f"{sizes['num_layers']} layers, D {sizes['hidden_size']:,}, V {sizes['vocab_size']:,}, {o['dtype']}"
        )

    def series(self, method: str, statistic: str, gradient: str = "") -> dict[int, list[float]]:
        """Return the finite values of an attribute of ``Measurement``: by step, one value per seed."""
        values: dict[int, list[float]] = {}
        for measured in self._measurements(method).values():
            value = getattr(measured, statistic)
            value = value.get(gradient, math.nan) if gradient else value
            if math.isfinite(value):
                values.setdefault(measured.step, []).append(value)
        return values

    def excess(self, method: str) -> dict[int, list[float]]:
        """Return the validation loss minus the baseline's for the same seed, by step."""
        baseline = self._measurements(self.baseline)
        values: dict[int, list[float]] = {}
        for place, measured in self._measurements(method).items():
            if place in baseline and math.isfinite(measured.val_loss - baseline[place].val_loss):
                values.setdefault(measured.step, []).append(measured.val_loss - baseline[place].val_loss)
        return values

    def _measurements(self, method: str) -> dict[tuple[int, int], Measurement]:
        """Return a method's measurements by seed and step."""
        runs = [run for run in self.runs if run.method == method]
        return {(run.seed, measured.step): measured for run in runs for measured in run.measurements}


def line(run: Run) -> str:
    """Return a run's line of progress."""
    return f"seed {run.seed}  {run.method}: {run.problem or f'val loss {run.measurements[-1].val_loss:.4f}'}"


def table(comparison: Comparison) -> str:
    """Return the comparison as Markdown."""
    notes = [f"* seed {run.seed}, {run.method}: {run.problem}" for run in comparison.runs if run.problem]
    about = (
        "Validation loss after the last step, by the exact head, in nats per token: mean over seeds, and standard "
        f"deviation; '- {comparison.baseline}' is paired by seed, with the error of the mean. Gradients are compared with "
        "dense ones in wider arithmetic, on the run's own weights and batch: 1 - cosine, and the norm over the dense one's, "
        "means over all measurements and seeds. Rare dC: the rows of tokens that are not in the batch."
    )
    heading = [f"### {comparison.title}", "", f"{where(comparison.environment)}. {about}"]
    return "\n".join([*heading, "", *summary(comparison), "", *notes])


def summary(comparison: Comparison, columns: Sequence[str] = tuple(COLUMNS)) -> list[str]:
    """Return the lines of the Markdown table, with the named columns of ``COLUMNS``."""
    rows = []
    for method in comparison.methods:
        cells = _cells(comparison, method)
        named = {COLUMNS[name].format(comparison.baseline): cells[name] for name in columns}
        rows.append({"method": method} | named)
    return markdown(rows)


def _cells(comparison: Comparison, method: str) -> dict[str, str]:
    """Return a row's text by what ``--columns`` calls each column."""
    last = comparison.options["steps"]
    losses = comparison.series(method, "val_loss").get(last, [])
    excess = comparison.excess(method).get(last, [])
    cells = {
        "val-loss": _with_spread(losses, 1.0, ".4f"),
        "excess-se": _with_spread(excess, math.sqrt(len(excess) or 1), "+.4f"),
        "mean-dE-error": _mean(comparison.series(method, "error_of_mean"), ".1e"),
    }
    for name in GRADIENTS:
        distances = {step: [1 - c for c in each] for step, each in comparison.series(method, "cosine", name).items()}
        norms = comparison.series(method, "norm", name)
        cells[name.replace(" ", "-")] = f"{_mean(distances, '.1e')}, {_mean(norms, '.3f')}"
    return cells


def _with_spread(values: list[float], divisor: float, form: str) -> str:
    """Return the mean over seeds, and in brackets their standard deviation over ``divisor``."""
    if not values:
        return "-"
    spread = f" ({statistics.stdev(values) / divisor:.4f})" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{form}}{spread}"


def _mean(series: dict[int, list[float]], form: str) -> str:
    values = [value for each in series.values() for value in each]
    return f"{statistics.fmean(values):{form}}" if values else "-"


def joined(paths: Sequence[Path]) -> Comparison:
    """Read several files, with different seeds or methods, as one. The environment is the first file's.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file holds something else, was trained with other options, or repeats a run of another file.
    """
    first, *others = (read_json(path, Comparison) for path in paths)
    for path, other in zip(paths[1:], others, strict=True):
        names = sorted({*first.options, *other.options} - OUTSIDE_RUNS)
        differ = [name for name in names if first.options.get(name) != other.options.get(name)]
        if differ or first.sizes != other.sizes:
            what = f"--{differ[0].replace('_', '-')}" if differ else "sizes"
            raise ValueError(f"{path} was trained with other {what} than {paths[0]}")
        if twice := {(run.method, run.seed) for run in first.runs} & {(run.method, run.seed) for run in other.runs}:
            raise ValueError(f"{path} has a run of {min(twice)[0]} with seed {min(twice)[1]} again")
        first.runs += other.runs
    return first


def draw(comparison: Comparison, path: Path) -> None:
    """Write the figure: the loss, its difference from the baseline, and the direction of four gradients."""
    layout: Any = [["loss", "loss", "excess", "excess"], list(GRADIENTS)]
    title = f"{comparison.title}\n{where(comparison.environment)}"
    with picture(path, title, (14, 8), dpi=110) as figure:
        panels = figure.subplot_mosaic(layout, height_ratios=[1.4, 1])
        for index, method in enumerate(comparison.methods):
            color = "black" if method == comparison.baseline else f"C{index % 10}"
            style = {"color": color, "linestyle": ("-", "--", ":")[index % 3], "label": method}
            _curve(panels["loss"], comparison.series(method, "val_loss"), style)
            _curve(panels["excess"], comparison.excess(method), style)
            for name in GRADIENTS:
                cosines = comparison.series(method, "cosine", name)
                distances = {step: [max(1 - value, 1e-12) for value in values] for step, values in cosines.items()}
                _curve(panels[name], distances, style)
        panels["loss"].set(title="validation loss", ylabel="nats per token")
        panels["loss"].legend()
        panels["excess"].set(title=f"validation loss less {comparison.baseline}'s of the same seed")
        for name, panel in panels.items():
            panel.grid(alpha=0.3)
            panel.set_xlabel("step")
            if name in GRADIENTS:
                panel.set(title=f"{name}: 1 - cosine with the dense gradient", yscale="log")


def _curve(panel: Any, values: dict[int, list[float]], style: dict[str, str]) -> None:
    """Draw the mean over seeds, and shade the range from the smallest to the largest."""
    steps, of_seeds = list(values), list(values.values())
    panel.plot(steps, list(map(statistics.fmean, of_seeds)), marker="o", markersize=2.5, linewidth=1.4, **style)
    low, high = list(map(min, of_seeds)), list(map(max, of_seeds))
    panel.fill_between(steps, low, high, color=style["color"], alpha=0.15, linewidth=0)
