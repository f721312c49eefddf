"""The filter's kernels on two shards, each with frequent columns and lists of its own, over rungs of the bench's ladder.

Interpreted, on CPUs. The truth is the dense reference in float64; ``cce-dist verify`` has the same, and other, traps on a
sampled softmax. ``reference.filtered_gradients`` says what a filter without a control variate leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from shards import GPU

from cce_dist import GradFilter, VocabShard, linear_cross_entropy
from cce_dist.kernels import filter, memory
from cce_dist.kernels.filter import lists
from cce_dist.tools.bench.shapes import HeadShape
from cce_dist.tools.bench.workload import make_workload
from cce_dist.tools.verify.cases import Drawn, LossCase, Problem, even
from cce_dist.tools.verify.check import EPS
from cce_dist.tools.verify.loss import LOSS

SHAPE, NUM_TOKENS, FREQUENT = HeadShape(16, 400), 48, 13
FILTER = GradFilter(2.0**-7, always=True)
CASES: list[tuple[str, dict[str, Any]]] = [  # rung and further options; of all, two thirds of the labels are ignored
    ("middle", {}),
    ("sharp", {"softcap": 12.0}),
]


def _check(rung: str, options: dict[str, Any]) -> None:
    sampled = make_workload(SHAPE, NUM_TOKENS, rung=rung, ignored=0.67, dtype=torch.float32)
    problem = Problem(sampled.hidden.double(), sampled.weight.double(), sampled.labels)
    case = LossCase(rung, options=options | {"grad_filter": FILTER})
    drawn = Drawn(case, problem, case.options, {"loss": torch.ones(())})
    assert LOSS.truth is not None
    truth = LOSS.truth(drawn, even(SHAPE.vocab_size, 2), "triton", "cpu")
    shard = VocabShard.even(SHAPE.vocab_size, dist.group.WORLD)
    rows = slice(shard.start, shard.stop)
    leaves = [sampled.hidden.clone().requires_grad_(), sampled.weight[rows].clone().requires_grad_()]
    out: Any = linear_cross_entropy(
        leaves[0],
        leaves[1],
        sampled.labels,
        shard=shard,
        backend="triton",
        return_aux=("filter_stats",),
        **case.options,
    )
    assert 0.05 < out.filter_stats.kept < 0.2 and out.filter_stats.dropped_mass_mean > 1e-3, out.filter_stats
    d_hidden, d_weight = torch.autograd.grad(out.loss, leaves)
    rounding = EPS[torch.float32]
    largest = (problem.hidden @ problem.weight.T).abs().max()  # 20 to 400: no loss is more exact than its logits
    assert (out.loss - truth.values["loss"]).abs() <= torch.finfo(torch.float32).eps * largest, "the loss is wrong"
    pairs = ("dE", d_hidden, slice(None)), ("dC", d_weight, rows)
    for name, ours, part in pairs:
        exact, dropped = truth.values[name][part], truth.plain[name][part]
        error, without = (ours - exact).norm(), (dropped - exact).norm()
        # Exact gradients would be as near as rounding; the plain filter is as far as what is dropped.
        assert 100 * rounding * exact.norm() < error < 0.8 * without, f"{name}: {error:.1e} of {without:.1e}"
    assert (d_hidden - truth.values["dE"]).sum(0).norm() <= 10 * rounding * truth.values["dE"].norm(), (
        "the mean of dE is wrong"
    )


def _on_two_ranks() -> None:
    limits = {"LEAST_BYTES": 1 << 10, "list_capacity": lambda *_: 2048, "sampled_columns": lambda _: 32}
    small = {"num_frequent": lambda num_valid, _: min(num_valid, FREQUENT), "SAMPLE": 64}
    with (
        mock.patch.multiple(memory, **limits),
        mock.patch.multiple(filter, **small),
        mock.patch.object(lists, "BLOCK", 16),
    ):
        for rung, options in CASES:
            try:
                _check(rung, options)
            except AssertionError as error:
                raise AssertionError(f"{rung}, {options}: {error}") from error


@pytest.mark.skipif(GPU, reason="of the interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, on infinities inside the interpreter
@pytest.mark.slow
def test_rungs_on_two_shards(ranks2: Callable[..., None]) -> None:
    """Catches: a dropped mass of both shards in place of one's; a control variate without the softcap's slope; exact
    gradients in place of a filter's."""
    ranks2(_on_two_ranks)
