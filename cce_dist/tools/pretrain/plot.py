"""``cce-dist plot``: curves of one run, or of several laid over one another."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cce_dist.tools.arguments import figure
from cce_dist.tools.report import picture


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Draw train and validation loss of one or more runs into one figure."
    parser.add_argument("metrics", nargs="+", type=Path, help="metrics.jsonl of a run, or its folder")
    parser.add_argument("-o", "--out", type=figure, default=Path("curves.png"), help="figure to write")


def run(args: argparse.Namespace) -> int:
    try:
        draw(args.metrics, args.out)
    except (OSError, ValueError) as error:
        print(f"cce-dist plot: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    print(args.out)
    return 0


def draw(metrics: list[Path], out: Path) -> None:
    """Write the loss curves of metrics files, or run folders, to ``out``."""
    from cce_dist.tools.pretrain.log import read

    files = [path / "metrics.jsonl" if path.is_dir() else path for path in metrics]
    names = [path.parent.name if path.name == "metrics.jsonl" else path.stem for path in files]
    uniform = set()
    with picture(out, f"Loss of {', '.join(names)}", (8, 5), dpi=120) as figure:
        axes = figure.subplots()
        for index, (path, name) in enumerate(zip(files, names, strict=True)):
            records = read(path)
            if not records:
                raise ValueError(f"no records in {path}")
            for split, style in (("train", {"alpha": 0.5, "linewidth": 1}), ("val", {"marker": "o", "markersize": 3})):
                points = [(record["step"], record["loss"]) for record in records if record["split"] == split]
                if points:
                    label = f"{name} {split}".replace("$", r"\$")  # otherwise matplotlib reads a formula
                    # Curves of exact losses coincide: dashes show the one beneath.
                    style |= {"color": f"C{index}", "linestyle": "--" if index else "-", "label": label}
                    axes.plot(*zip(*points, strict=True), **style)
            uniform |= {record["uniform"] for record in records if "uniform" in record}
        for value in uniform:
            axes.axhline(value, color="grey", linestyle=":", label="ln V, of a model that knows nothing")
        axes.set(xlabel="step", ylabel="loss (nats per token)")
        axes.grid(alpha=0.3)
        axes.legend()
