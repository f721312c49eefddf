"""Time loss and gradient of heads: every task on every workload, with the vocabulary whole or split over ranks.

    python benchmarks/heads.py --shapes llama-3-8b gemma-2-2b --tokens 8192
    torchrun --nproc-per-node 4 benchmarks/heads.py --shapes llama-3-8b
    python benchmarks/heads.py --show benchmarks/results/h200-heads.json --columns total MiB

Each table has a row for each method: this library, plain torch, other libraries. A method whose value or gradients are wrong
has no time. ``workload`` makes the input, ``tasks`` and ``problem`` say what is computed, ``methods`` names the rows of this
library and of its ``peers``, ``stage`` has the ends of frameworks' last pipeline stages, ``loop`` measures, ``report`` prints.
"""

import argparse
import os
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import command
from cce_dist import VocabShard
from cce_dist.kernels.divergence.heads import KINDS
from cce_dist.tools.arguments import number, whole, wholes
from loop import Method, show_progress
from methods import UNNAMED_MIB
from problem import measure_problem
from records import Case, Cases
from tasks import KEPT_IDS, LOG_PROBS, OBJECTIVES, Task, tasks_of
from workload import RUNGS, SHAPES, Workload, make_workload, read_workload, shape


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    parser = command.parser(__doc__)
    add = parser.add_argument
    add("--shapes", nargs="+", type=shape, metavar="SHAPE", help=f"heads: {', '.join(SHAPES)}; or D x V, 2048x32768")
    says = f"distribution of the softmax: {', '.join(RUNGS)}, or 'ladder' for all; or files of 'training.py --capture'"
    add("--workload", nargs="+", default=["trained"], metavar="RUNG", help=f"{says} (default: trained)")
    add("--ignored", type=number(0, below=1), default=0.0, metavar="SHARE", help="share of labels that are -100")
    says = "sizes of the groups of ranks that split the vocabulary (default: all ranks of torchrun)"
    add("--tp", type=wholes, metavar="T,T", help=says)
    tasks = [*LOG_PROBS, *KEPT_IDS]
    says = f"time log-probabilities, as reinforcement learning needs them: {', '.join(tasks)} (default: all)"
    add("--log-probs", nargs="*", choices=tasks, metavar="TASK", help=says)
    says = f"time the divergence of two heads: {', '.join(KINDS)} (default: all)"
    add("--kl", nargs="*", choices=KINDS, metavar="KIND", help=says)
    says = f"time losses of cce_dist.objectives, and the plain mean: {', '.join(OBJECTIVES)} (default: all)"
    add("--objectives", nargs="*", choices=OBJECTIVES, metavar="LOSS", help=says)
    add("--stage", choices=("megatron", "deepspeed"), help="time the end of this framework's last pipeline stage")
    add("--workspace", nargs="+", type=whole(1), metavar="MIB", help="budgets of cce-dist, a row each (default: 256)")
    says = "time synchronised calls by the wall clock: the host does not launch ahead, as it does otherwise"
    add("--wall", action="store_true", help=says)
    add("--no-forward", action="store_true", help="do not time forward alone: a third of the work")
    return parser


def complete(args: argparse.Namespace) -> bool:
    """Check the options, fill in their defaults, and return whether a process group is needed."""
    args.workload = [rung for name in args.workload for rung in (RUNGS if name == "ladder" else [name])]
    missing = [name for name in args.workload if name not in RUNGS and not os.path.isfile(name)]
    if missing:
        raise command.Refused(f"{missing[0]} is neither a rung ({', '.join(RUNGS)}) nor a file")
    name, tokens = ("llama-3-8b", 8192) if args.device.startswith("cuda") else ("toy", 512)
    args.shapes, args.tokens = args.shapes or [shape(name)], args.tokens or [tokens]
    if (args.log_probs, args.kl) != (None, None):
        args.ignored = 0.0  # every token counts
    there = command.num_ranks()
    args.tp = args.tp or [there]
    if args.stage and args.tp != [there]:
        raise command.Refused(f"--stage takes all {there} ranks as one group; leave --tp out")
    if max(args.tp) > there:
        raise command.Refused(f"--tp {max(args.tp)}, but torchrun has {there} ranks")
    # A framework's last stage needs a process group on one rank, too.
    return there > 1 or args.stage is not None


def methods(args: argparse.Namespace) -> dict[str, Method]:
    """Return the rows of all tasks that the options ask for."""
    return {name: method for task in tasks_of(args) for name, method in _rows(task, args).items()}


def _rows(task: Task, args: argparse.Namespace) -> dict[str, Method]:
    """Return the rows of a task: with --stage all, else the methods that at least one size of group can run."""
    table = task.methods(args.workspace or [UNNAMED_MIB])
    return {name: method for name, method in table.items() if args.stage or any(map(method.is_for, args.tp))}


def _sources(args: argparse.Namespace) -> Iterator[tuple[dict[str, str], Callable[..., Workload]]]:
    """Yield names and how to make the workload: every rung at every shape and size, then the captured files."""
    drawn = [name for name in args.workload if name in RUNGS]
    for head, num_tokens, rung in product(args.shapes, args.tokens, drawn):
        yield {"shape": head.name, "rung": rung}, partial(make_workload, head, num_tokens, rung=rung)
    for name in args.workload:
        if name not in RUNGS:
            yield {"shape": "captured", "rung": Path(name).stem}, partial(read_workload, Path(name))


def cases(args: argparse.Namespace, chosen: Container[str], device: torch.device) -> Cases:
    """Yield each workload's label and cases. Every rank calls this, and gets the cases of groups that it belongs to."""
    groups = {size: dist.new_group(range(size)) if size > 1 else None for size in args.tp}
    for names, make in _sources(args):
        draw = partial(make, ignored=args.ignored, dtype=getattr(torch, args.dtype), device=device)
        yield ", ".join(names.values()), _cases_of(names, draw, args, chosen, groups)


def _cases_of(
    names: dict[str, str],
    draw: Callable[[], Workload],
    args: argparse.Namespace,
    chosen: Container[str],
    groups: dict[int, Any],
) -> Iterator[Case]:
    label = ", ".join(names.values())
    show_progress(f"{label}: drawing the workload")
    try:
        workload = draw()
    except (OSError, ValueError) as error:
        raise command.Refused(error) from error
    is_rank = dist.is_initialized()
    for task, (size, group) in product(tasks_of(args), groups.items()):
        if not is_rank or dist.get_rank() < size:
            shard, problem = VocabShard.even(len(workload.weight), group), task.problem(workload)
            # On a GPU the same seed draws some tokens differently each time: torch.multinomial sums in no fixed order.
            for tensor in (*problem.tokens, *problem.weights, problem.upstream) if group is not None else ():
                dist.broadcast(tensor, src=0, group=group)
            rows = {name: method for name, method in _rows(task, args).items() if name in chosen}
            told = partial(show_progress, f"{label}, {task.name} T {size}: ")
            found = measure_problem(problem, shard, rows, args.repeats, told, not args.no_forward, args.wall)
            num_tokens, hidden_size = workload.hidden.shape
            yield Case(
                **names,
                num_tokens=num_tokens,
                hidden_size=hidden_size,
                vocab_size=len(workload.weight),
                dtype=args.dtype,
                on_gpu=workload.hidden.is_cuda,
                num_ranks=size,
                task=task.name,
                stage=args.stage or "",
                ignored=args.ignored,
                wall=args.wall,
                counts=problem.counts,
                **workload.drawn,
                **found._asdict(),
            )
        if is_rank:
            dist.barrier()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script with these arguments (default: the process's own), and return its exit code."""
    return command.run(command.Table(complete, methods, cases), parser().parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
