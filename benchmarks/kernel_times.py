"""Time each kernel of a loss and its gradients, as table A2 of *Cut Your Losses* does for the parts of backward.

    python benchmarks/kernel_times.py gemma-2-2b --methods cce-dist-default torch-compile --out times.json

Prints a table for each method with the median time of each kernel over the rounds, and writes the seconds of every round.
Gradients that forward computes count as forward's; without a GPU the rows are operators of torch.
"""

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from cce_dist import VocabShard
from cce_dist.tools.arguments import whole
from cce_dist.tools.report import table
from loop import Clock, check, free_memory
from methods import methods_of
from problem import loss_of, reference_of, trial_of
from records import Row, describe, describe_environment
from workload import make_workload, shape

WARM_UP = 3  # steps before the first round
Times = dict[str, list[float]]  # "forward: " or "backward: " and the kernel's name -> seconds of each round


def kernels_of(call: Callable[[], Any], device: torch.device) -> tuple[Any, dict[str, float]]:
    """Call, and return the result with the seconds of each kernel by name."""
    kind = "CUDA" if device.type == "cuda" else "CPU"
    with torch.profiler.profile(activities=[getattr(torch.profiler.ProfilerActivity, kind)]) as seen:
        result = call()
        if device.type == "cuda":
            torch.cuda.synchronize()
    seconds: dict[str, float] = defaultdict(float)
    for event in seen.events() or ():
        if event.device_type.name == kind:
            seconds[event.name] += (event.self_cpu_time_total if kind == "CPU" else event.time_range.elapsed_us()) / 1e6
    return result, seconds


def measure(function: Callable[..., torch.Tensor], operands: Sequence[torch.Tensor], rounds: int) -> Times:
    """Return the times of each kernel of a loss function (hidden, weight, labels) -> loss."""
    hidden, weight, labels = operands
    hidden, weight = (tensor.detach().requires_grad_() for tensor in (hidden, weight))
    clock, times = Clock(hidden.device), defaultdict(list)
    for number in range(WARM_UP + rounds):
        clock.times(lambda: None)  # brings the card to its power limit
        loss, forward = kernels_of(lambda: function(hidden, weight, labels), hidden.device)
        _, backward = kernels_of(lambda loss=loss: torch.autograd.grad(loss, (hidden, weight)), hidden.device)
        if number >= WARM_UP:
            for phase, found in (("forward", forward), ("backward", backward)):
                for name, seconds in found.items():
                    times[f"{phase}: {name}"].append(seconds)
    return times


def shown(times: Times) -> list[str]:
    """Return a table of all kernels, and of their sum."""
    rows = {name: 1e3 * statistics.median(seconds) for name, seconds in times.items()}
    total = rows["sum"] = sum(rows.values())
    return table([{"kernel": name[:90], "ms": f"{ms:.3f}", "share": f"{ms / total:.1%}"} for name, ms in rows.items()])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script with these arguments (default: the process's own), and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", type=shape)
    parser.add_argument("--tokens", type=whole(1), default=8192)
    parser.add_argument("--methods", nargs="+", choices=methods_of(), default=["cce-dist-default", "torch"])
    parser.add_argument("--repeats", type=whole(1), default=10, help="rounds")
    parser.add_argument("--out", type=Path, default=Path("kernel_times.json"))
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    workload = make_workload(args.shape, args.tokens, device=device)
    problem = loss_of(*workload[:3])
    truth = reference_of(problem)
    found: dict[str, Times] = {}
    record = {"environment": describe_environment(device), "shape": args.shape, "tokens": args.tokens, "times": found}
    for name in args.methods:
        print(f"### {name}, {args.shape}, N {args.tokens:,}\n")
        row = Row(name, ours=False)
        try:
            function = methods_of()[name].build(VocabShard.even(len(workload.weight), None), workload.hidden)
            check(row, trial_of(function, problem, truth))
            if not row.problem:
                found[name] = measure(function, workload[:3], args.repeats)
        except Exception as error:  # other libraries raise anything, and the other methods go on
            row.problem = describe(error)
        print(row.problem or "\n".join(shown(found[name])), "\n", flush=True)
        free_memory(device)
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    return int(not found)


if __name__ == "__main__":
    sys.exit(main())
