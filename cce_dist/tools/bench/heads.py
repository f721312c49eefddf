"""Tables of heads: every task on every workload, with the vocabulary whole or split over ranks."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Container, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from cce_dist import VocabShard
from cce_dist.tools.bench.loop import Measured, Progress, Trial, measure, show_progress
from cce_dist.tools.bench.methods import UNNAMED_MIB, Method
from cce_dist.tools.bench.problem import Problem, Reference, parts_of, products, reference_of, trial_of
from cce_dist.tools.bench.records import Case, Cases
from cce_dist.tools.bench.shapes import shape_of
from cce_dist.tools.bench.tasks import Task, tasks_of
from cce_dist.tools.bench.workload import RUNGS, Workload, make_workload, read_workload
from cce_dist.tools.ranks import in_torchrun

DEFAULTS = {  # by device: shapes and tokens that take minutes, not hours
    "cuda": (["gemma-2-2b", "llama-3-8b", "phi-3.5"], [8192]),
    "cpu": (["toy"], [512]),
}


def complete(args: argparse.Namespace) -> int:
    """Check the options, fill in their defaults, and return the number of ranks; 0 is this process alone."""
    shapes, tokens = DEFAULTS[torch.device(args.device).type]
    args.workload = [rung for name in args.workload for rung in (RUNGS if name == "ladder" else [name])]
    missing = [name for name in args.workload if name not in RUNGS and not os.path.isfile(name)]
    if missing:
        raise SystemExit(f"cce-dist bench: {missing[0]} is neither a rung ({', '.join(RUNGS)}) nor a file")
    args.shapes, args.tokens = args.shapes or shapes, args.tokens or tokens
    args.ignored = args.ignored or [0.0]
    if args.log_probs is not None or args.kl is not None:
        args.ignored = [0.0]  # every token counts
    is_rank = in_torchrun() and bool(args.tp or args.stage)
    sizes = args.tp or [1]
    if args.stage:
        world = int(os.environ["WORLD_SIZE"]) if is_rank else max(sizes)
        if args.tp not in (None, [world]):
            raise SystemExit(f"cce-dist bench: --stage takes all {world} ranks as one group; leave --tp out")
        sizes = [world]
    args.tp = sizes
    # A framework's last stage needs a process group on one rank, too.
    return max(sizes) if is_rank or args.stage or max(sizes) > 1 else 0


def methods(args: argparse.Namespace) -> dict[str, Method]:
    """Return the rows of all tasks that the options ask for."""
    return {name: method for task in tasks_of(args) for name, method in _rows(task, args).items()}


def _rows(task: Task, args: argparse.Namespace) -> dict[str, Method]:
    """Return the rows of a task: with --stage all, else the methods that at least one size of group can run."""
    table = task.methods(args.workspace or [UNNAMED_MIB])
    return {name: method for name, method in table.items() if args.stage or any(map(method.is_for, args.tp))}


class Source(NamedTuple):
    """Where a workload comes from."""

    label: str
    shape: str
    rung: str
    make: Callable[..., Workload]


def _sources(args: argparse.Namespace) -> Iterator[Source]:
    """Yield every rung at every shape and number of tokens, then the captured files."""
    drawn = [name for name in args.workload if name in RUNGS]
    for shape, num_tokens, rung in product(args.shapes, args.tokens, drawn):
        make = partial(make_workload, shape_of(shape), num_tokens, rung=rung)
        yield Source(f"{shape}, {rung}, N {num_tokens:,}", shape, rung, make)
    for name in args.workload:
        if name not in RUNGS:
            yield Source(name, "captured", Path(name).stem, partial(read_workload, Path(name)))


def cases(args: argparse.Namespace, chosen: Container[str], device: torch.device) -> Cases:
    """Yield each workload's label and cases. Every rank calls this, and gets the cases of groups that it belongs to."""
    groups: dict[int, Any] = {}
    for size in args.tp:
        groups[size] = dist.new_group(range(size)) if size > 1 else None
    shares: list[float] = args.ignored
    for source, ignored in product(_sources(args), shares):
        yield source.label, _cases_of(source, ignored, args, chosen, device, groups)


def _cases_of(
    source: Source,
    ignored: float,
    args: argparse.Namespace,
    chosen: Container[str],
    device: torch.device,
    groups: dict[int, Any],
) -> Iterator[Case]:
    show_progress(f"{source.label}: drawing the workload")
    try:
        workload = source.make(ignored=ignored, dtype=getattr(torch, args.dtype), device=device)
    except (OSError, ValueError) as error:
        raise SystemExit(f"cce-dist bench: {error}") from error
    is_rank = dist.is_initialized()
    for task, (size, group) in product(tasks_of(args), groups.items()):
        if not is_rank or dist.get_rank() < size:
            shard, problem = VocabShard.even(len(workload.weight), group), task.problem(workload)
            # On a GPU the same seed draws some tokens differently each time: torch.multinomial sums in no fixed order.
            for tensor in (*problem.tokens, *problem.weights, problem.upstream) if group is not None else ():
                dist.broadcast(tensor, src=0, group=group)
            rows = {name: method for name, method in _rows(task, args).items() if name in chosen}
            told = partial(show_progress, f"{source.label}, {task.name} T {size}: ")
            found = measure_problem(problem, shard, rows, args.repeats, told, not args.no_forward)
            num_tokens, hidden_size = workload.hidden.shape
            yield Case(
                shape=source.shape,
                num_tokens=num_tokens,
                hidden_size=hidden_size,
                vocab_size=len(workload.weight),
                dtype=args.dtype,
                on_gpu=device.type == "cuda",
                num_ranks=size,
                task=task.name,
                stage=args.stage or "",
                rung=source.rung,
                ignored=ignored,
                teacher_size=problem.weights[-1].shape[1] if len(problem.weights) > 1 else 0,
                counts=problem.counts,
                **workload.drawn,
                **found._asdict(),
            )
        if is_rank:
            dist.barrier()


def measure_problem(
    problem: Problem,
    shard: VocabShard,
    methods: dict[str, Method],
    repeats: int,
    progress: Progress = lambda line: None,
    forward: bool = True,
) -> Measured:
    """Measure the methods that can run on this size of group, and the plain products of one shard.

    ``problem`` is the whole input, on every rank. With ``forward`` the forward pass is also timed alone.
    """
    progress("reference")
    # The reference moves to the host, to leave the device's memory to the timed steps.
    parts = parts_of(problem, Reference(*(tensor.cpu() for tensor in reference_of(problem))), shard)
    num_tokens, device = len(problem.tokens[0]), problem.tokens[0].device

    def make(method: Method) -> Trial:
        if method.sequence_parallel and num_tokens % shard.group_size:
            raise ValueError(f"{num_tokens} tokens are not {shard.group_size} equal slices")
        part, reference = parts[method.sequence_parallel]
        return trial_of(method.build(shard, part.tokens[0]), part, reference, forward)

    chosen = {name: method for name, method in methods.items() if method.is_for(shard.group_size)}
    floor = partial(products, parts[False][0])
    return measure(chosen, make, repeats, device, shard.group, progress, floor)
