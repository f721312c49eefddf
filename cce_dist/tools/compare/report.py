"""What was measured: a Markdown table for the terminal, JSON, and a figure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib  # noqa: F401  fail before hours of training, not after

from cce_dist.tools import report
from cce_dist.tools.compare.probe import GRADIENTS
from cce_dist.tools.compare.runs import Measurement, Run
from cce_dist.tools.pretrain import UsageError

TITLES = {
    "dE": "dE",
    "mean dE": "dE, mean over tokens",
    "dC": "dC",
    "rare dC": "dC of tokens not in the batch",
}
COLUMNS = {  # names of --columns: headings of the table; {} is the baseline
    "val-loss": "val loss (sd)",
    "excess": "- {} (sd)",
    "excess-se": "- {} (s.e.)",
    "dE": "dE",
    "mean-dE": "mean dE",
    "mean-dE-error": "error of mean dE",
    "dC": "dC",
    "rare-dC": "rare dC",
    "kept": "kept",
    "tokens/s": "tokens/s",
}
OUTSIDE_RUNS = {"out", "methods", "seeds", "first_seed", "show", "columns", "cache"}  # options that change no run


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
        """Return the method that the others are compared with: dense, or a model's own."""
        return "stock" if self.options.get("model") else "dense"

    @property
    def title(self) -> str:
        o, sizes = self.options, self.sizes
        model = f"{o['model']}, " if o.get("model") else ""
        return (
            f"{model}{o['steps']} steps of {o['batch_size'] * sizes['seq_len']:,} tokens, "
            f"{len({run.seed for run in self.runs})} seeds; "
            f"{sizes['num_layers']} layers, D {sizes['hidden_size']:,}, V {sizes['vocab_size']:,}, {o['dtype']}, "
            f"eps {o['filter_eps']:.2g}"
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

    def by_rank(self, method: str) -> dict[int, list[float]]:
        """Return the mean probability of a token's 1st, 2nd, 4th, ... likeliest id after the last step, a value per seed."""
        ends = [run.measurements[-1].by_rank for run in self.runs if run.method == method and not run.problem]
        return {1 << power: list(values) for power, values in enumerate(zip(*ends, strict=False))}

    def _measurements(self, method: str) -> dict[tuple[int, int], Measurement]:
        """Return a method's measurements by seed and step."""
        runs = [run for run in self.runs if run.method == method]
        return {(run.seed, measured.step): measured for run in runs for measured in run.measurements}


def line(run: Run) -> str:
    """Return a run's line of progress."""
    if run.problem:
        return f"seed {run.seed}  {run.method}: {run.problem}"
    return f"seed {run.seed}  {run.method}: val loss {run.measurements[-1].val_loss:.4f}"


def table(comparison: Comparison) -> str:
    """Return the comparison as Markdown."""
    notes = [f"* seed {run.seed}, {run.method}: {run.problem}" for run in comparison.runs if run.problem]
    if comparison.missing:
        reasons = (f"{name} ({reason})" for name, reason in comparison.missing.items())
        notes.append(f"Not measured: {', '.join(reasons)}.")
    about = (
        "Validation loss after the last step, by the exact head, in nats per token: mean over seeds (and standard "
        f"deviation, or error of the mean); '- {comparison.baseline}' is paired by seed. Gradients are compared with dense "
        "ones in wider arithmetic, on the run's own weights and batch: 1 - cosine, and the norm over the dense one's, means "
        "over all measurements and seeds. Rare dC: the rows of tokens that are not in the batch. Kept: the share that the "
        "filter keeps."
    )
    heading = [f"### {comparison.title}", "", f"{report.where(comparison.environment)}. {about}"]
    return "\n".join([*heading, "", *summary(comparison), "", *notes])


def summary(comparison: Comparison, columns: Sequence[str] = tuple(COLUMNS)) -> list[str]:
    """Return the lines of the Markdown table, with the named columns of ``COLUMNS``."""
    unknown = set(columns) - set(COLUMNS)
    if unknown:
        raise UsageError(f"unknown column {min(unknown)!r}: choose from {', '.join(COLUMNS)}")
    rows = [_cells(comparison, method) for method in comparison.methods]
    kept = ["method", *(COLUMNS[name] for name in columns)]
    baseline = comparison.baseline
    return report.table([{name.format(baseline): row[name] for name in kept if name in row} for row in rows])


def _cells(comparison: Comparison, method: str) -> dict[str, str]:
    """Return a row's text by column."""
    last = comparison.options["steps"]

    def final(values: dict[int, list[float]], form: str, of_mean: bool = False) -> str:
        seeds = values.get(last, [])
        if not seeds:
            return "-"
        spread = spread_of(seeds) / (math.sqrt(len(seeds)) if of_mean else 1.0)
        return f"{statistics.fmean(seeds):{form}}" + ("" if math.isnan(spread) else f" ({spread:.4f})")

    def average(statistic: str, gradient: str = "") -> float:
        values = [value for values in comparison.series(method, statistic, gradient).values() for value in values]
        return statistics.fmean(values) if values else math.nan

    def or_dash(value: float, form: str) -> str:
        return "-" if math.isnan(value) else f"{value:{form}}"

    cells = {
        "method": method,
        COLUMNS["val-loss"]: final(comparison.series(method, "val_loss"), ".4f"),
        COLUMNS["excess"]: final(comparison.excess(method), "+.4f"),
        COLUMNS["excess-se"]: final(comparison.excess(method), "+.4f", of_mean=True),
    }
    for name in GRADIENTS:
        distance = 1 - average("cosine", name)
        cells[name] = f"{or_dash(distance, '.1e')}, {or_dash(average('norm', name), '.3f')}"
    cells[COLUMNS["mean-dE-error"]] = or_dash(average("error_of_mean"), ".1e")
    cells["kept"] = or_dash(average("kept_tiles"), ".2g")
    if comparison.options["device"] == "cuda":  # on a CPU a rate says little of the methods
        rates = comparison.series(method, "tokens_per_s").values()
        # The first stretch of steps compiles and tunes.
        settled = [rate for values in list(rates)[1:] or rates for rate in values]
        cells["tokens/s"] = f"{statistics.median(settled):,.0f}" if settled else "-"
    return cells


def spread_of(values: list[float]) -> float:
    """Return the sample standard deviation, NaN for a single value."""
    return statistics.stdev(values) if len(values) > 1 else math.nan


def joined(paths: Sequence[Path]) -> Comparison:
    """Read several compare.json, with different seeds or methods, as one. The environment is the first file's.

    Raises:
        UsageError: A file is no compare.json, was trained with other options, or repeats a run of another file.
    """
    try:
        first, *others = (report.read_json(path, Comparison, "compare.json") for path in paths)
    except ValueError as error:
        raise UsageError(str(error)) from error
    for path, other in zip(paths[1:], others, strict=True):
        names = sorted({*first.options, *other.options} - OUTSIDE_RUNS)
        differ = [name for name in names if first.options.get(name) != other.options.get(name)]
        if differ or first.sizes != other.sizes:
            what = f"--{differ[0].replace('_', '-')}" if differ else "sizes"
            raise UsageError(f"{path} was trained with other {what} than {paths[0]}")
        if twice := {(run.method, run.seed) for run in first.runs} & {(run.method, run.seed) for run in other.runs}:
            raise UsageError(f"{path} has a run of {min(twice)[0]} with seed {min(twice)[1]} again")
        first.runs += other.runs
    return first


def draw(comparison: Comparison, path: Path) -> None:
    """Write the figure: the loss and its difference from the baseline, and the direction and size of four gradients."""
    layout: Any = [
        ["loss", "excess", "excess", "softmax"],
        [f"cosine {name}" for name in GRADIENTS],
        [f"norm {name}" for name in GRADIENTS],
    ]
    title = f"{comparison.title}\n{report.where(comparison.environment)}"
    with report.picture(path, title, (14, 11), dpi=110) as figure:
        panels = figure.subplot_mosaic(layout, height_ratios=[1.4, 1, 1])
        _band_of_seeds(panels["excess"], comparison)
        for index, method in enumerate(comparison.methods):
            color = "black" if method == comparison.baseline else f"C{index % 10}"
            style = {"color": color, "linestyle": ("-", "--", ":")[index % 3], "label": method}
            _curve(panels["loss"], comparison.series(method, "val_loss"), style)
            _curve(panels["excess"], comparison.excess(method), style)
            _curve(panels["softmax"], comparison.by_rank(method), style)
            for name in GRADIENTS:
                cosines = comparison.series(method, "cosine", name)
                distances = {step: [max(1 - value, 1e-12) for value in values] for step, values in cosines.items()}
                _curve(panels[f"cosine {name}"], distances, style)
                _curve(panels[f"norm {name}"], comparison.series(method, "norm", name), style)

        panels["loss"].set(title="validation loss", ylabel="nats per token")
        panels["excess"].set(
            title=f"validation loss less {comparison.baseline}'s of the same seed", ylabel="nats per token"
        )
        softmax = panels["softmax"]
        softmax.set_title("probability by rank, last step")
        if any(map(comparison.by_rank, comparison.methods)):
            softmax.set(xscale="log", yscale="log")
            softmax.axhline(comparison.options["filter_eps"], color="black", linewidth=0.6, zorder=0)
        else:
            softmax.text(0.5, 0.5, "not recorded", ha="center", transform=softmax.transAxes)
        if max(map(abs, panels["excess"].get_ylim())) > 0.05:
            panels["excess"].set_yscale("symlog", linthresh=0.01)
        for name in GRADIENTS:
            panels[f"cosine {name}"].set(title=TITLES[name], yscale="log")
            panels[f"norm {name}"].axhline(1.0, color="black", linewidth=0.6, zorder=0)
            low, high = panels[f"norm {name}"].get_ylim()
            panels[f"norm {name}"].set_ylim(min(low, 0.9), max(high, 1.1))
        panels[f"cosine {GRADIENTS[0]}"].set_ylabel("1 - cosine with the dense gradient")
        panels[f"norm {GRADIENTS[0]}"].set_ylabel("norm / norm of the dense gradient")
        for name, panel in panels.items():
            panel.grid(alpha=0.3)
            panel.set_xlabel("step" if not name.startswith("cosine") else "")
        panels["softmax"].set_xlabel("rank")
        panels["loss"].legend()


def _curve(panel: Any, values: dict[int, list[float]], style: dict[str, str]) -> None:
    """Draw the mean over seeds, and shade the range from the smallest to the largest."""
    steps, of_seeds = list(values), list(values.values())
    panel.plot(steps, list(map(statistics.fmean, of_seeds)), marker="o", markersize=2.5, linewidth=1.4, **style)
    low, high = list(map(min, of_seeds)), list(map(max, of_seeds))
    panel.fill_between(steps, low, high, color=style["color"], alpha=0.15, linewidth=0)


def _band_of_seeds(panel: Any, comparison: Comparison) -> None:
    """Shade one standard deviation of the baseline over seeds."""
    losses = comparison.series(comparison.baseline, "val_loss")
    spreads = [spread_of(values) for values in losses.values()]
    if any(math.isfinite(spread) for spread in spreads):
        low = [-spread for spread in spreads]
        panel.fill_between(list(losses), low, spreads, color="0.85", linewidth=0, zorder=0)
        panel.plot([], [], color="0.85", linewidth=8, label=f"seeds of {comparison.baseline}: 1 sd")
        panel.legend(loc="best")
