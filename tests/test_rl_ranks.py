"""The adapters for reinforcement learning on two tensor-parallel ranks, with and without sequence parallelism."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("megatron.core")

import test_megatron_scores
import test_nemo_rl
import test_verl
from megatron_on_cpu import use_cpu

from cce_dist.ranks import run_ranks

BODIES: list[Callable[[bool], None]] = [
    test_verl.over_two_ranks,
    test_nemo_rl.over_two_ranks,
    test_megatron_scores.over_two_ranks,
]


def both_ways() -> None:
    use_cpu()
    for body in BODIES:
        for sequence_parallel in (True, False):
            try:
                body(sequence_parallel)
            except Exception as error:
                raise AssertionError(f"{body.__module__}, sequence_parallel={sequence_parallel}: {error}") from error


@pytest.mark.slow
def test_two_tensor_parallel_ranks() -> None:
    run_ranks(both_ways, 2)
