"""Time loss and gradient of ``cce_dist.objectives`` beside the plain mean's, in several budgets.

    python tests/objective_times.py llama-3-8b gemma-3-270m --rounds 8 --out times.json

All losses and budgets take turns, in a new random order each round. Prints each loss's median time over the mean's in the same
budget, and writes the seconds of every round.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path

import torch

from cce_dist import linear_cross_entropy, objectives
from cce_dist.tools.bench.loop import Clock, free_memory
from cce_dist.tools.bench.shapes import shape, shape_of
from cce_dist.tools.bench.workload import make_workload
from cce_dist.tools.report import describe_environment, table

BUDGETS = {"256 MiB": 256 << 20, "default": None, "all": 1 << 40}
MEAN = "mean"  # the plain mean, which the other losses are compared with
LOSSES = {
    "dft": objectives.dft(),
    "clipped": objectives.clipped_policy(0.2, 0.28),
    "clipped-entropy": objectives.clipped_policy(0.2, 0.28, entropy_coef=0.01),
    "truncated": objectives.truncated_importance(2.0),
}
WITH_POLICY = ("clipped", "clipped-entropy", "truncated")  # they take advantages and old log-probabilities
Times = dict[str, dict[str, list[float]]]  # budget -> loss -> seconds of each round


def measure(name: str, num_tokens: int, rounds: int, device: torch.device) -> Times:
    """Return the times of all losses and budgets on a head of this shape."""
    hidden, weight, labels, *_ = make_workload(shape_of(name), num_tokens, device=device)
    hidden, weight = (tensor.detach().requires_grad_() for tensor in (hidden, weight))
    with torch.no_grad():
        log_probs = -linear_cross_entropy(hidden, weight, labels, reduction="none")
    policy = (torch.randn_like(log_probs), log_probs + 0.3 * torch.randn_like(log_probs))

    def step(loss_name: str, workspace_bytes: int | None) -> None:
        how = {}
        if loss_name != MEAN:
            how = {"token_loss": LOSSES[loss_name], "token_inputs": policy if loss_name in WITH_POLICY else ()}
        loss = linear_cross_entropy(hidden, weight, labels, workspace_bytes=workspace_bytes, **how)
        torch.autograd.grad(loss, (hidden, weight))

    clock, turns = Clock(device), [(budget, loss) for budget in BUDGETS for loss in (MEAN, *LOSSES)]
    times: Times = {budget: {loss: [] for loss in (MEAN, *LOSSES)} for budget in BUDGETS}
    for number in range(rounds + 1):  # the first round compiles
        random.shuffle(turns)
        for budget, loss in turns:
            seconds, _ = clock.times(lambda budget=budget, loss=loss: step(loss, BUDGETS[budget]))
            if number:
                times[budget][loss].append(seconds)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", type=shape)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("objective_times.json"))
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[str, Times] = {}
    record = {"environment": describe_environment(device), "tokens": args.tokens, "times": found}
    for name in args.shapes:
        found[name] = measure(name, args.tokens, args.rounds, device)
        free_memory(device)
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    rows = []
    for name, budgets in found.items():
        for budget, losses in budgets.items():
            medians = {loss: statistics.median(seconds) for loss, seconds in losses.items()}
            ratios = {loss: f"{median / medians[MEAN]:.3f}" for loss, median in medians.items() if loss != MEAN}
            rows.append({"head": name, "budget": budget, "mean, ms": f"{medians[MEAN] * 1e3:.2f}", **ratios})
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
