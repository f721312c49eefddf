"""The main job, ``cce-dist pretrain``: a GPT of our own, tensor-parallel, with a ``VocabParallelHead`` as its last layer.

Reading order: ``recipe`` (what a run is), ``launch`` (from a command line to ranks; what a failure says), ``train`` (the
loop), ``engine`` (model and optimizer, which the loop drives), ``build`` and ``model``, ``data`` (a folder of text files to
packed batches), ``ranks`` (device, mesh, microbatches), ``checkpoint``, ``log`` (metrics and progress bar), ``plot`` (the
figure).
"""

from __future__ import annotations

import argparse
import functools
import sys
from typing import NoReturn

from cce_dist.tools.arguments import whole
from cce_dist.tools.pretrain.exits import HOPELESS, UsageError, is_reporting_rank, tell_torchrun
from cce_dist.tools.pretrain.recipe import LOSSES, Recipe, add_flags

positive = whole(1)

__all__ = ["LOSSES", "Recipe", "UsageError", "add_arguments", "add_flags", "positive", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``cce-dist pretrain``."""
    parser.description = (
        "Pre-train a GPT on a folder of text files. Under torchrun every process is a rank; "
        "started alone it starts tp x dp ranks on this machine."
    )
    titles = {name: name for name in ("run", "loss", "model", "data", "optimization", "ranks", "device")}
    parser.error = functools.partial(_refuse, parser)  # pyright: ignore[reportAttributeAccessIssue]
    add_flags(parser, titles | {"loss": "loss: changes nothing else, so that curves compare"})


def _refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """End for a wrong argument, which one rank tells and no restart mends."""
    if is_reporting_rank():
        print(f"{parser.prog}: {message} (--help lists all options)", file=sys.stderr)
    tell_torchrun(HOPELESS)
    raise SystemExit(2)


def run(args: argparse.Namespace) -> int:
    """Run ``cce-dist pretrain`` and return its exit code."""
    from cce_dist.tools.pretrain.launch import launch

    return launch(args)
