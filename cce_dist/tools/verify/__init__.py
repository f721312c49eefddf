"""``cce-dist verify``: the whole matrix of cases on your own ranks and devices, before a long run.

Reading order: ``cases`` (the matrix), ``check`` (one case against the dense reference), ``log_probs`` and ``divergence`` (the
same of the other functions), ``fuzz`` (random cases of the loss, against ``oracle``), ``fuzz_cases`` (of the others).
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from typing import Any

from cce_dist.tools import arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), type=_device, default="auto", help="default: cuda if there is one"
    )
    parser.add_argument("--backend", choices=("auto", "triton", "torch"), default="auto", help="backend of the loss")
    parser.add_argument(
        "--only", metavar="TEXT", default="", type=_part_of_a_name, help="run the cases whose name contains TEXT"
    )
    parser.add_argument(
        "--fuzz", type=arguments.whole(0), metavar="COUNT", default=0, help="run COUNT random cases instead"
    )
    parser.add_argument(
        "--function",
        choices=("loss", "log-probs", "kept", "divergence"),
        default="loss",
        help="whose random cases (default loss)",
    )
    parser.add_argument("--seed", type=arguments.whole(0), default=0, help="of the random cases")
    parser.add_argument("--case", type=arguments.whole(0), default=0, help="number of the first random case")
    parser.add_argument(
        "--alike",
        type=arguments.whole(1),
        metavar="COUNT",
        default=1,
        help="random cases in a row that need the same kernels (default 1)",
    )
    parser.add_argument(
        "--timeout",
        type=arguments.number(below=1e6, positive=True),
        default=120.0,
        help="seconds before a waiting collective is an error",
    )


def _device(text: str) -> str:
    return arguments.device(text) if text == "cuda" else text


def _part_of_a_name(text: str) -> str:
    cases = [case for case, _ in _matrix()]
    if not any(text in case.name for case in cases):
        names = ", ".join(case.name for case in cases)
        raise argparse.ArgumentTypeError(f"no case's name contains {text!r}; there are {names}")
    return text


def run(args: argparse.Namespace) -> int:
    """Run the matrix on every rank of torchrun (or on this process alone); 0 if every case kept its bound."""
    import torch
    import torch.distributed as dist

    from cce_dist.tools import ranks

    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.backend == "triton" and device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        print("cce-dist verify: --backend triton needs a GPU, or TRITON_INTERPRET=1", file=sys.stderr)
        return 2
    world = int(os.environ.get("WORLD_SIZE", "1"))
    here = ranks.own_device(device)
    if world > 1:
        ranks.join(here, args.timeout)
        if device == "cpu":
            torch.set_num_threads(1)
    try:
        failures = run_fuzz(args, device) if args.fuzz else run_matrix(device, args.backend, args.only)
    finally:
        if world > 1:
            dist.destroy_process_group()
    return 1 if failures else 0


def run_fuzz(args: argparse.Namespace, device: str) -> list[str]:
    """Run random cases on the default process group (or alone). Returns a line for each failure, the same on every rank."""
    import torch.distributed as dist

    from cce_dist.tools.verify.fuzz import Setting, run_many
    from cce_dist.tools.verify.fuzz_cases import FUNCTIONS

    group = dist.group.WORLD if dist.is_initialized() else None
    report = print if group is None or group.rank() == 0 else _silent
    setting = Setting(args.seed, device, args.backend, group, args.alike, args.function)
    return run_many(setting, args.case, args.fuzz, report, FUNCTIONS[args.function])


def _silent(line: str) -> None: ...


def layouts(world: int) -> list[tuple[int, list[list[int]]]]:
    """Sizes of group to try in a world, with the groups of each: all ranks, halves, each rank alone, all but the last."""
    sizes = {world, 1} | ({world // 2} if world % 2 == 0 else set()) | ({world - 1} if world > 2 else set())
    return [
        (size, [list(range(start, start + size)) for start in range(0, world - size + 1, size)])
        for size in sorted(sizes)
    ]


def _matrix() -> list[tuple[Any, Any]]:
    """Every case, and the function that runs it."""
    from cce_dist.tools.verify import check, divergence, log_probs
    from cce_dist.tools.verify.cases import CASES

    of_log_probs = [(case, log_probs.run_case) for case in log_probs.LOG_PROB_CASES]
    of_divergence = [(case, divergence.run_case) for case in divergence.DIVERGENCE_CASES]
    return [*((case, check.run_case) for case in CASES), *of_log_probs, *of_divergence]


def _fits(case: Any, size: int) -> bool:
    """Return whether a group of so many ranks can split the case's 24 tokens, if it does."""
    return not case.options.get("sequence_parallel") or 24 % size == 0


def _how_bad(error: Any) -> tuple[bool, float]:
    return not error.ok, error.error / error.bound if error.bound else error.error


def _line(size: int, case: Any, worst: Any) -> str:
    line = f"{'ok  ' if worst.ok else 'FAIL'} T={size} {case.name:26} {worst.quantity:20} error {worst.error:.1e} "
    line += f"bound {worst.bound:.1e}"
    return line if worst.ok else f"{line}  <- {case.catches}?"


def run_matrix(device: str, backend: str = "auto", only: str = "", report: bool = True) -> list[str]:
    """Run every case on every layout of the default process group (or alone). Returns a line for each failure, as above."""
    import torch
    import torch.distributed as dist

    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    say: Any = partial(print, flush=True) if rank == 0 and report else _silent
    failures, count = [], 0
    for size, members in layouts(world):
        made: Any = [dist.new_group(ranks) if size > 1 else None for ranks in members]
        mine = next((number for number, ranks in enumerate(members) if rank in ranks), None)
        cases = [(case, run_case) for case, run_case in _matrix() if only in case.name and _fits(case, size)]
        found: list[list[Any]] = [[] for _ in cases]
        for step in range(len(cases)):
            worst = None
            if mine is not None:
                # Groups side by side begin at different cases: one compiles a kernel, and the others find it in the cache.
                index = (step + mine * len(cases) // len(members)) % len(cases)
                case, run_case = cases[index]
                worst = index, max(run_case(case, made[mine], device, backend, mine), key=_how_bad)
            everyone: list[Any] = [worst]
            if world > 1:
                everyone = [None] * world
                dist.all_gather_object(everyone, worst)
            for index, error in filter(None, everyone):
                found[index].append(error)
                if len(found[index]) < size * len(members):
                    continue
                worst = max(found[index], key=_how_bad)
                line = _line(size, cases[index][0], worst)
                failures += [] if worst.ok else [line]
                count += 1
                say(line)
            if len(members) > 1 and step % 12 == 11:  # most lines come at the end
                say(f"     T={size} {step + 1} of {len(cases)} cases")
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    say(f"{count - len(failures)} of {count} cases hold on {world} rank(s), {where}, torch {torch.__version__}")
    return failures
