"""``cce-dist bench``: time, memory and error of the loss and its gradients, against other libraries and plain products.

A table is a task on an input, with a row for each method. Reading order:

* ``cases`` runs a command: ranks, tables, files;
* ``loop`` checks every method of a table and times those that are right;
* ``heads`` makes tables of heads: ``shapes`` and ``workload`` make the input, ``tasks`` and ``problem`` say what is computed,
  ``methods`` names the rows: this library, ``peers``, and ``stage`` for the ends of frameworks' last pipeline stages;
* ``steps`` and ``fsdp`` make tables of whole training steps, on one rank and on several; ``models`` has their rows;
* ``records`` defines bench.json, ``collectives`` records what a step sends, ``report`` prints and draws.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from cce_dist.kernels.divergence.heads import KINDS
from cce_dist.tools.arguments import device, file, folder, number, pattern, whole, wholes
from cce_dist.tools.bench.shapes import COLUMNS, COMPILE, KEPT_IDS, LOG_PROBS, SHAPES, shape

STAGES = ("megatron", "deepspeed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``cce-dist bench``."""
    add = parser.add_argument
    add("--shapes", nargs="+", type=shape, metavar="SHAPE", help=f"heads: {', '.join(SHAPES)}; or D x V, 2048x32768")
    add("--tokens", nargs="+", type=whole(1), metavar="N", help="numbers of tokens (default: 8192; on a CPU 512)")
    add(
        "--workload",
        nargs="+",
        default=["trained"],
        metavar="RUNG",
        help="distribution of the softmax: unigram, early, spread, middle, trained, sharp, or 'ladder' for all; or files that "
        "'cce-dist pretrain --capture' wrote, which have their own shape and tokens (default: trained)",
    )
    add("--methods", nargs="+", metavar="METHOD", help="rows of the table; 'list' prints them")
    add(
        "--ignored",
        nargs="+",
        type=number(0, below=1),
        metavar="SHARE",
        help="shares of labels that are -100 (default: 0)",
    )
    add(
        "--tp",
        type=wholes,
        metavar="T,T",
        help="split the vocabulary over this number of ranks, under torchrun or alone",
    )
    add(
        "--log-probs",
        nargs="*",
        choices=[*LOG_PROBS, *KEPT_IDS],
        metavar="TASK",
        help="time log-probabilities and entropies, as reinforcement learning needs them: "
        f"{', '.join([*LOG_PROBS, *KEPT_IDS])} (default: all)",
    )
    add(
        "--kl",
        nargs="*",
        choices=KINDS,
        metavar="KIND",
        help=f"time the divergence of two heads: {', '.join(KINDS)} (default: all)",
    )
    add(
        "--teacher-size", type=whole(1), metavar="D", help="hidden size of the teacher of --kl (default: the student's)"
    )
    add("--stage", choices=STAGES, help="time the end of this framework's last pipeline stage")
    add("--workspace", nargs="+", type=whole(1), metavar="MIB", help="budgets of cce-dist, a row each (default: 256)")
    _add_models(parser)
    add("--repeats", type=whole(1), default=20, help="rounds; each times every method once")
    add("--no-forward", action="store_true", help="do not time forward alone: a third of the work")
    add("--device", type=device, help="cuda, cuda:1, cpu (default: cuda if there is one)")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="dtype of hidden states and weight")
    add("--out", type=folder, default=Path("runs/bench"), metavar="DIR", help="folder for bench.json and bench.png")
    add(
        "--show",
        nargs="+",
        type=file,
        metavar="JSON",
        help="measure nothing; print each bench.json again and draw its figure. With --shapes, --models, --tokens, "
        "--methods, --ignored or --tp print a part, and draw nothing",
    )
    add(
        "--columns",
        nargs="+",
        choices=COLUMNS,
        metavar="COLUMN",
        help=f"with --show: print one table, a column per case, with these numbers, and draw nothing: {', '.join(COLUMNS)}",
    )
    add("--scatter", type=Path, metavar="PNG", help="with --show: draw time over memory, both over torch-compile's")


def _add_models(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("whole training steps of models, after training them on text").add_argument
    add("--models", nargs="+", metavar="MODEL", help="models of transformers; 'list' prints them")
    add("--layers", type=whole(1), metavar="L", help="layers of each model (default: all)")
    add("--length", type=whole(2), default=2048, metavar="N", help="tokens of a sequence (default: 2048)")
    add(
        "--compile",
        choices=COMPILE,
        default="no",
        help="torch.compile around each layer, or around the whole model (yes), or also without it (both)",
    )
    add(
        "--fsdp",
        nargs="?",
        const=0,
        type=whole(2),
        metavar="T",
        help="steps of T data-parallel ranks under FSDP2, with untrained weights and --tokens per rank; under torchrun or "
        "alone (default: all ranks or GPUs)",
    )
    add("--train-steps", type=whole(1), default=300, metavar="STEPS", help="training before (default: 300)")
    add("--corpus", type=folder, metavar="DIR", help="UTF-8 text files (default: Python's standard library)")
    add("--pattern", type=pattern, help="file names to read, such as '*.txt'")
    add("--cache", type=folder, metavar="DIR", help="tokenized text (default: ~/.cache/cce-dist)")


def run(args: argparse.Namespace) -> int:
    """Show stored measurements, or measure. Returns the exit code."""
    if args.show:
        return _show(args)
    import torch

    from cce_dist.tools.bench import cases

    if args.device is None:
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    return cases.run(args)


def _show(args: argparse.Namespace) -> int:
    """Print stored files: a table and a figure for each, or one table with the chosen columns."""
    from cce_dist.tools.bench import records, report, scatter

    asked = {
        "shape": args.shapes or args.models,
        "num_tokens": args.tokens,
        "ignored": args.ignored,
        "num_ranks": args.tp,
    }
    try:
        files = {path: records.read_json(path) for path in args.show}
        shown = {path: records.select(results.cases, asked, args.methods) for path, results in files.items()}
        if not any(shown.values()):
            raise ValueError(f"nothing of what is asked for is in {', '.join(map(str, args.show))}")
        every = [case for cases in shown.values() for case in cases]
        lines = report.summary(every, args.columns) if args.columns else []
    except (OSError, ValueError) as error:
        raise SystemExit(f"cce-dist bench: {error}") from error
    if args.scatter:
        pairs = [(files[path].environment, case) for path, cases in shown.items() for case in cases]
        scatter.draw(args.scatter, pairs)
        return 0
    print("\n".join(lines) if lines else "\n\n".join(map(report.table, every)))
    if not any((args.columns, *asked.values(), args.methods)):
        for path, results in files.items():
            report.write_figure(path.with_suffix(".png"), results.environment, results.cases)
    return 0
