"""linear_log_probs on two ranks: kernels on uneven shards, collectives, ranks that were called differently.

``test_verify.py`` runs the matrix, whose last rows are those of ``linear_log_probs``, on groups of one to four ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from cce_dist import VocabShard, linear_log_probs, merge
from cce_dist.kernels.tiles import interpreted
from cce_dist.tools.verify.cases import LOG_PROB_CASES
from cce_dist.tools.verify.check import run_case
from cce_dist.tools.verify.log_probs import LOG_PROBS


def _check_kernels() -> None:
    cases = {case.name: case for case in LOG_PROB_CASES}
    for name in ("log-probs-uneven-shards", "log-probs-sequence-parallel"):
        for error in run_case(LOG_PROBS, cases[name], dist.group.WORLD, "cpu", "triton"):
            assert error.ok, f"{name}: {error}"


def _check_collectives() -> None:
    shard = VocabShard.even(40, dist.group.WORLD)
    hidden, weight, ids = torch.randn(5, 8), torch.randn(shard.num_rows, 8), torch.arange(15).view(5, 3)
    everything: dict[str, Any] = {"argmax": True, "entropy": True, "top_k": 7}
    for options, counts in (({}, [4 * 6 * 5]), (everything, [4 * (8 + 14) * 5])):
        with mock.patch.object(merge, "_all_gather_into", wraps=merge._all_gather_into) as gather:
            linear_log_probs(hidden, weight, ids, shard=shard, **options)
        assert [call.args[1].nbytes for call in gather.call_args_list] == counts


def _check_disagreement() -> None:
    rank = dist.get_rank()
    shard = VocabShard.even(40, dist.group.WORLD)
    hidden, weight, ids = torch.ones(5, 8), torch.ones(shard.num_rows, 8), torch.zeros(5, 2).long()
    different: list[tuple[str, Any]] = [
        ("temperature", {"temperature": torch.full((5,), 1.0 + rank)}),
        ("logit_scale", {"logit_scale": 1.0 + rank}),
        ("top_k", {"top_k": rank}),
        ("ids", {"ids": ids + rank}),
    ]
    with mock.patch.dict(os.environ, CCE_DIST_DEBUG="1"):
        linear_log_probs(hidden, weight, ids, shard=shard)
        for name, options in different:
            with pytest.raises(RuntimeError, match=f"linear_log_probs: the ranks of the group disagree on {name}"):
                linear_log_probs(hidden, weight, **{"ids": ids, "shard": shard, **options})
        with pytest.raises(IndexError, match=r"linear_log_probs: rank 1 of the group: ids\[0\]"):
            linear_log_probs(hidden, weight, ids + 40 * rank, shard=shard)


def _bodies() -> None:
    if interpreted():  # the ranks are on CPUs
        _check_kernels()
    _check_collectives()
    _check_disagreement()


@pytest.mark.slow
def test_two_ranks(ranks2: Callable[..., None]) -> None:
    """Catches: the largest logits of one shard alone, ids of a shard's start, another number of collectives."""
    ranks2(_bodies)
