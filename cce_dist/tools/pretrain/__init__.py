"""The main job, ``cce-dist pretrain``: a tensor-parallel GPT with a ``VocabParallelHead``.

Reading order: recipe, launch, torchrun, exits, train, folder, engine, model, data, ranks, checkpoint, log, plot.
"""

from __future__ import annotations

import argparse
import functools
import sys
from typing import NoReturn

from cce_dist.tools.pretrain.exits import HOPELESS, is_reporting_rank, tell_torchrun
from cce_dist.tools.pretrain.recipe import add_flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Pre-train a GPT on a folder of text files. Under torchrun every process is a rank; "
        "started alone it starts tp x dp ranks on this machine."
    )
    parser.error = functools.partial(_refuse, parser)  # pyright: ignore[reportAttributeAccessIssue]
    add_flags(parser)


def _refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """End for a wrong argument, which one rank tells and no restart mends."""
    if is_reporting_rank():
        print(f"{parser.prog}: {message} (--help lists all options)", file=sys.stderr)
    tell_torchrun(HOPELESS)
    raise SystemExit(2)


def run(args: argparse.Namespace) -> int:
    from cce_dist.tools.pretrain.launch import launch

    return launch(args)
