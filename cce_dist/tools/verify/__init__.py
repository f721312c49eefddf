"""``cce-dist verify``: the table of named traps, or random calls, on your own ranks and devices, before a long run.

Reading order: cases, check, loss, log_probs, divergence, matrix, fuzz, oracle.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial

from cce_dist.tools import arguments

FUNCTIONS = ("loss", "log-probs", "kept", "divergence")
TIMEOUT_SECONDS = 120.0  # before a collective that waits for another rank is an error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), type=_device, default="auto", help="default: cuda if there is one"
    )
    parser.add_argument("--backend", choices=("auto", "triton", "torch"), default="auto", help="backend of the loss")
    parser.add_argument("--function", choices=FUNCTIONS, help="function to check (default: loss; with --only, all)")
    parser.add_argument("--all", action="store_true", help="check all functions")
    parser.add_argument(
        "--only", metavar="TEXT", default="", type=_part_of_a_name, help="run the cases with TEXT in their name"
    )
    whole = arguments.whole
    parser.add_argument("--fuzz", type=whole(0), metavar="COUNT", default=0, help="run COUNT random cases instead")
    parser.add_argument("--seed", type=whole(0), default=0, help="seed of the random cases")
    parser.add_argument("--case", type=whole(0), default=0, help="number of the first random case")
    parser.add_argument(
        "--alike", type=whole(1), metavar="COUNT", default=1, help="random cases in a row that need the same kernels"
    )


def _device(text: str) -> str:
    return arguments.device(text) if text == "cuda" else text


def _part_of_a_name(text: str) -> str:
    from cce_dist.tools.verify.matrix import lines_of

    names = [case.name for _, case in lines_of(FUNCTIONS)]
    if not any(text in name for name in names):
        raise argparse.ArgumentTypeError(f"no case's name contains {text!r}; there are {', '.join(names)}")
    return text


def run(args: argparse.Namespace) -> int:
    """Run cases on every rank of torchrun, or in this process alone; return the exit code."""
    import torch
    import torch.distributed as dist

    from cce_dist.tools import ranks
    from cce_dist.tools.verify.fuzz import Setting, run_many
    from cce_dist.tools.verify.matrix import lines_of, run_matrix

    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.backend == "triton" and device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        print("cce-dist verify: --backend triton needs a GPU, or TRITON_INTERPRET=1", file=sys.stderr)
        return 2
    if args.fuzz and args.only:
        print("cce-dist verify: --only chooses from the table's cases: leave it out with --fuzz", file=sys.stderr)
        return 2
    world = int(os.environ.get("WORLD_SIZE", "1"))
    here = ranks.own_device(device)
    if world > 1:
        ranks.join(here, TIMEOUT_SECONDS)
        if device == "cpu":
            torch.set_num_threads(1)
    try:
        if args.fuzz:
            group = dist.group.WORLD if world > 1 else None
            failures = []
            for function in FUNCTIONS if args.all else [args.function or "loss"]:
                setting = Setting(args.seed, device, args.backend, group, args.alike, function)
                report = partial(print, flush=True) if setting.rank == 0 else lambda line: None
                failures += run_many(setting, args.case, args.fuzz, report)
        else:
            everything = args.all or bool(args.only and not args.function)
            lines = lines_of(FUNCTIONS if everything else [args.function or "loss"], args.only)
            failures = run_matrix(lines, device, args.backend)
    finally:
        if world > 1:
            dist.destroy_process_group()
    return 1 if failures else 0
