"""``cce-dist compare``: does the way in which the head's gradient is computed change what is learned?

The same model is pre-trained from the same weights on the same batches, once for each method and seed, in one process. Every
few steps the exact head computes the validation loss, and the method's gradient is compared with the dense one at the run's own
weights and batch.

Reading order: ``runs`` (training), ``heads`` (our GPT with each head), ``models`` (models of transformers), ``probe`` (compares
gradients), ``report`` (table, JSON, figure).
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from functools import partial
from pathlib import Path
from typing import Any

from cce_dist import GradFilter
from cce_dist.tools import pretrain
from cce_dist.tools.arguments import file, folder, number, whole
from cce_dist.tools.pretrain.recipe import FILTERS

METHODS = (*pretrain.LOSSES, "cce", "cce-kahan-full-c")
MODEL_METHODS = ("stock", "default", "filtered")  # of --model
DEFAULTS: dict[str, dict[str, Any]] = {  # by device, or for --model
    "cuda": {
        "preset": "wide",
        "steps": 400,
        "batch_size": 32,
        "dtype": "bfloat16",
        "lr": 6e-4,
        "warmup": 40,
        "seeds": 3,
        "measure_every": 50,
        "filter_eps": GradFilter.eps,
    },
    "cpu": {
        "preset": "small",
        "steps": 30,
        "batch_size": 8,
        "dtype": "float32",
        "lr": 1e-3,
        "warmup": 5,
        "seeds": 2,
        "measure_every": 10,
        "filter_eps": 2**-8,  # a smaller vocabulary has larger probabilities
    },
    "model": {
        "seq_len": 2048,
        "steps": 2000,
        "batch_size": 2,
        "dtype": "bfloat16",
        "lr": 3e-4,
        "warmup": 200,
        "seeds": 2,
        "measure_every": 100,
        "filter_eps": GradFilter.eps,
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``cce-dist compare``."""
    parser.description = (
        "Pre-train the same GPT with several ways of computing the head's gradient, one after another, and write table, "
        "JSON and figure: validation loss, and each gradient's distance from the dense one through training.\n\n"
        "Options without a default here take one that fits the device, or --model:\n"
        + "\n".join(f"  {device:<5} {_as_options(values)}" for device, values in DEFAULTS.items())
    )
    run = parser.add_argument_group("run")
    run.add_argument("--out", type=folder, default=Path("runs/compare"), help="folder of compare.json and compare.png")
    run.add_argument(
        "--model", metavar="MODEL", help="train a model of transformers, one that 'cce-dist bench --models list' prints"
    )
    run.add_argument(
        "--methods",
        nargs="+",
        metavar="METHOD",
        help="dense (all logits in memory), exact, filtered (and compensated), filtered-plain (not compensated), "
        "full-c (dC exact, dE filtered), full-c-plain, or another library's row of 'cce-dist bench' "
        f"(default: {' '.join(METHODS)}). With --model the rows of 'cce-dist bench --models', ours without cce-dist- "
        f"(default: {' '.join(MODEL_METHODS)})",
    )
    run.add_argument("--seeds", type=whole(1), metavar="N", help="runs of each method, a seed each")
    run.add_argument("--first-seed", type=whole(0), default=0, metavar="SEED", help="the first of N seeds (default: 0)")
    run.add_argument("--steps", type=whole(1), help="optimizer steps of a run")
    run.add_argument("--measure-every", type=whole(1), metavar="STEPS", help="steps between measurements of the loss")
    run.add_argument(
        "--gradients-every",
        type=whole(1),
        metavar="STEPS",
        help="steps between comparisons of gradients, a multiple of --measure-every (default: the same)",
    )
    run.add_argument("--eval-batches", type=whole(1), default=8, metavar="BATCHES")
    run.add_argument(
        "--filter-eps", type=number(0, below=1), metavar="P", help="probability below which the filter drops a gradient"
    )
    run.add_argument(
        "--show",
        type=file,
        nargs="+",
        metavar="JSON",
        help="train nothing; print and draw a stored compare.json, or several with different seeds or methods as one",
    )
    run.add_argument(
        "--columns", nargs="+", metavar="COLUMN", help="with --show: print these columns, and draw nothing"
    )
    pretrain.add_flags(parser, {name: name for name in ("model", "data", "optimization", "device")})
    parser.set_defaults(**dict.fromkeys((*DEFAULTS["cuda"], *DEFAULTS["model"])))


def run(args: argparse.Namespace) -> int:
    """Train each method with each seed. Prints a line and writes JSON after each run, and table and figure at the end.

    Returns:
        0, or 1 if options are wrong or a method of this library failed.
    """
    from cce_dist.tools.compare import report
    from cce_dist.tools.pretrain.data import CorpusError

    try:
        if args.show:
            comparison = report.joined(args.show)
            if args.columns:
                print("\n".join(report.summary(comparison, args.columns)))
                return 0
            figure = args.show[0].with_suffix(".png")
        else:
            comparison = _compare(args)
            figure = args.out / "compare.png"
        print(report.table(comparison))
        report.draw(comparison, figure)
    except (pretrain.UsageError, CorpusError, OSError) as error:
        print(f"cce-dist compare: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"cce-dist compare: stopped; --show {args.out / 'compare.json'} has what was finished", file=sys.stderr)
        return 130
    print(f"\n{figure}, {figure.with_suffix('.json')}")
    return int(any(run.problem for run in comparison.runs if run.method in (*pretrain.LOSSES, *MODEL_METHODS)))


def _compare(args: argparse.Namespace) -> Any:
    """Train; return the ``Comparison``, which is written to ``args.out`` after every run."""
    import torch
    from tqdm import tqdm

    from cce_dist.tools.compare import heads, models, report, runs
    from cce_dist.tools.pretrain import data, ranks
    from cce_dist.tools.report import describe_environment, write_json

    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.methods = args.methods or list(MODEL_METHODS if args.model else METHODS)
    if args.filter_eps is not None and not {*FILTERS} & {*args.methods}:
        raise pretrain.UsageError(f"--filter-eps needs a method that filters: {', '.join(FILTERS)}")
    for name, value in DEFAULTS["model" if args.model else args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    gradients_every = args.gradients_every or args.measure_every
    if gradients_every % args.measure_every:
        raise pretrain.UsageError("--gradients-every must be a multiple of --measure-every")
    # One rank. The model is built and evaluated with the exact loss.
    recipe = models.recipe_of(args) if args.model else pretrain.Recipe.of(args)
    here = ranks.join(recipe)
    recipe.check_sizes()
    chosen, missing = (models if args.model else heads).choose(args.methods, recipe, here)
    folder = data.prepare(*recipe.text)
    args.out.mkdir(parents=True, exist_ok=True)

    options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    sizes = dataclasses.asdict(recipe.shape)
    comparison = report.Comparison(describe_environment(here.device), options, sizes, missing)
    num_steps = args.seeds * len(chosen) * args.steps
    with tqdm(total=num_steps, unit="step", dynamic_ncols=True, disable=None) as bar:
        seeds = range(args.first_seed, args.first_seed + args.seeds)
        kind: Any = partial(models.ModelLearner, args.model) if args.model else heads.GPTLearner
        learner = kind(recipe, here, data.Corpus(folder), chosen)
        for run in runs.train_all(recipe, learner, seeds, args.measure_every, gradients_every, bar.update):
            comparison.runs.append(run)
            write_json(args.out / "compare.json", comparison)
            tqdm.write(report.line(run))
    return comparison


def _as_options(values: dict[str, Any]) -> str:
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in values.items())
