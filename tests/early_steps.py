"""Train the first steps with an engine, dense and filtered, and show how the validation losses differ: no test, a program.

    python tests/early_steps.py run early-megatron.json --engine megatron --seeds 0 1 2 --preset base --steps 150 --eval-every 5
    python tests/early_steps.py join early-torch.json part-0.json part-1.json
    python tests/early_steps.py show early-torch.json early-megatron.json early-deepspeed.json
    python tests/early_steps.py draw early.png early-torch.json early-megatron.json early-deepspeed.json

"run" takes the options of ``cce-dist pretrain``, and its runs are that command's: both losses of a seed start from the same
weights, read the same batches and are judged by their own engine on the same text. The filter is forced. A file is a
compare.json of ``cce-dist compare``, which shows it, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import signal
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from cce_dist import pretrain
from cce_dist.arguments import whole
from cce_dist.compare import report as comparisons
from cce_dist.compare.report import Comparison
from cce_dist.compare.runs import Measurement, Run
from cce_dist.pretrain import data, ranks
from cce_dist.pretrain.launch import read_recipe, train_on
from cce_dist.report import describe_environment, picture, table, where, write_json

STEPS = (5, 10, 20, 40, 60, 100, 150)
COLORS = {"torch": "#1f6fb4", "megatron": "#d62728", "deepspeed": "#2a9d4e"}


def run(argv: list[str]) -> None:
    """Train all losses with each seed, as long as there is time for one more seed, and write the file after each run.

    A run that ends early is in the file as far as it came.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("json", type=Path)
    parser.add_argument("--seeds", type=whole(0), nargs="+", default=[0, 1, 2])
    parser.add_argument("--losses", nargs="+", default=["dense", "filtered"])
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no seed that would end later")
    pretrain.add_arguments(parser)
    args = parser.parse_args(argv)
    file, seeds, losses, limit = (vars(args).pop(name) for name in ("json", "seeds", "losses", "seconds"))
    args.tp, args.filter_always, args.checkpoint_every, args.resume = 1, True, 0, False
    recipe = read_recipe(args)
    here = ranks.join(recipe)
    args.device = recipe.device
    comparison = Comparison.of(describe_environment(here.device), args, recipe.shape, {})
    folder = data.prepare(*recipe.text)
    start, longest = time.monotonic(), 0.0
    for seed in seeds:
        began = time.monotonic()
        if began - start + longest > limit:
            break
        for loss in losses:
            out = recipe.out / f"{recipe.engine}-{seed}-{loss}"
            try:
                train_on(dataclasses.replace(recipe, seed=seed, loss=loss, out=out), here, folder)
            finally:
                comparison.runs.append(Run(loss, seed, measurements(out / "metrics.jsonl")))
                write_json(file, comparison)
            forget(recipe.engine)
            taken = f"{recipe.engine}, {time.monotonic() - start:.0f} s"
            print(f"{taken}: {comparisons.line(comparison.runs[-1])}", flush=True)
        longest = max(longest, time.monotonic() - began)


def forget(engine: str) -> None:
    """Take down the groups that a framework keeps of a run."""
    if engine == "megatron":
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
    elif engine == "deepspeed":
        from deepspeed.utils import groups

        groups._release_process_group_references()


def measurements(metrics: Path) -> list[Measurement]:
    """Return a run's validation losses, each with the mean of the training losses that were logged since the one before."""
    measured, losses, kept = [], [], math.nan
    for record in map(json.loads, metrics.read_text().splitlines()):
        if record["split"] == "train":
            losses.append(record["loss"])
            kept = record.get("kept_tiles", math.nan)
        else:
            train_loss = statistics.fmean(losses) if losses else math.nan
            measured.append(Measurement(record["step"], record["loss"], train_loss, kept_tiles=kept))
            losses = []
    return measured


def by_engine(files: list[str]) -> dict[str, Comparison]:
    """Return the files of each engine as one comparison."""
    paths: dict[str, list[Path]] = {}
    for path in map(Path, files):
        paths.setdefault(comparisons.read_json(path).options["engine"], []).append(path)
    return {engine: comparisons.joined(some) for engine, some in paths.items()}


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Return mean and standard error, NaN where there are too few values."""
    mean, spread = comparisons.mean_and_spread(values)
    return mean, spread / math.sqrt(max(1, len(values)))


def show(files: list[str]) -> None:
    """Print the mean of filtered - dense over seeds, and its standard error, by engine and step."""
    rows = []
    for engine, comparison in by_engine(files).items():
        excess = comparison.excess("filtered")
        cells = {"engine": engine, "seeds": str(max(map(len, excess.values()), default=0))}
        for step in STEPS:
            if step <= comparison.options["steps"]:
                mean, error = mean_and_error(excess.get(step, []))
                spread = "" if math.isnan(error) else f" ({error:.4f})"
                cells[f"step {step}"] = "-" if math.isnan(mean) else f"{mean:+.4f}{spread}"
        rows.append(cells)
    print("\n".join(table(rows)))


def draw(files: list[str]) -> None:
    """Draw into the first file the same at every step that was judged, above the mean validation loss of the dense runs."""
    engines = by_engine(files[1:])
    first = next(iter(engines.values()))
    title = f"filtered - dense, mean over seeds and its standard error\n{first.title}\n{where(first.environment)}"
    with picture(Path(files[0]), title, (9, 7)) as figure:
        panels: Any = figure.subplots(len(engines) + 1, 1, sharex=True)
        for panel, (engine, comparison) in zip(panels, engines.items(), strict=False):
            excess = {step: mean_and_error(values) for step, values in comparison.excess("filtered").items()}
            means, errors = [mean for mean, _ in excess.values()], [error for _, error in excess.values()]
            style = {"color": COLORS[engine], "linewidth": 1.2, "marker": "o", "markersize": 2.5, "capsize": 2}
            panel.errorbar(list(excess), means, yerr=errors, **style)
            panel.axhline(0.0, color="black", linewidth=0.6, zorder=0)
            panel.set_ylabel(f"{engine}, nats")
            losses = comparison.series("dense", "val_loss")
            panels[-1].plot(
                list(losses), list(map(statistics.fmean, losses.values())), color=COLORS[engine], label=engine
            )
        panels[-1].set(ylabel="loss, dense", xlabel="step")
        panels[-1].legend()
        for panel in panels:
            panel.grid(alpha=0.3)


def join(files: list[str]) -> None:
    """Write into the first file the others, of one engine and other seeds."""
    out, *parts = map(Path, files)
    write_json(out, comparisons.joined(parts))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what is there is written
    command, *rest = sys.argv[1:]
    {"run": run, "join": join, "show": show, "draw": draw}[command](rest)
