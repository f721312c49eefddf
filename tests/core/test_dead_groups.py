"""Groups that a process has lost, or does not have yet: no call uses another group in their place."""

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.refused import result_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import cce_dist
from cce_dist import VocabParallelHead, VocabShard, linear_cross_entropy
from cce_dist.integrations.deepspeed.layers import CCEEmbedding
from cce_dist.tools.ranks import join_alone

N, D, V = 6, 8, 20


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(V, D), nn.Linear(D, V, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = self.lm_head(self.embed(input_ids))
        return logits if labels is None else nn.functional.cross_entropy(logits, labels)


@pytest.mark.slow
def test_a_destroyed_group() -> None:
    """Catches a group that is looked up by its name, which the next ``init_process_group`` gives to another group."""
    run_ranks(_destroyed, 2)


def _destroyed() -> None:
    weight = torch.randn(V, D, generator=torch.Generator().manual_seed(0))
    hidden, labels = torch.randn(N, D, generator=torch.Generator().manual_seed(1)), torch.arange(N)
    shard, mesh = VocabShard.even(V, dist.group.WORLD), init_device_mesh("cpu", (2,))
    own = weight[shard.start : shard.stop].clone().requires_grad_()
    split = distribute_tensor(weight, mesh, [Shard(0)])
    of_teacher = labels[:, None], torch.zeros(N, 1)
    kept = cce_dist.KeptIds(torch.arange(N + 1), torch.arange(N))
    plain, over = VocabParallelHead(D, V, group=dist.group.WORLD), VocabParallelHead(D, V, shard_over=mesh)
    tied = cce_dist.convert(Small(), shard_over=mesh)
    embedding = CCEEmbedding(D, V, tp_rank=dist.get_rank(), tp_size=2)
    embedding.rows.join(dist.group.WORLD)
    before = linear_cross_entropy(hidden, own, labels, shard=shard, workspace_bytes=1)  # two passes
    calls: dict[str, Callable[[], Any]] = {
        "loss": lambda: linear_cross_entropy(hidden, own, labels, shard=shard),
        "log_probs": lambda: cce_dist.linear_log_probs(hidden, own, labels, shard=shard),
        "kept": lambda: cce_dist.linear_log_probs(hidden, own, labels, shard=shard, kept=kept),
        "divergence": lambda: cce_dist.linear_kl_divergence(hidden, own, hidden, own, shard=shard),
        "top-k": lambda: cce_dist.topk_kl_divergence(hidden, own, *of_teacher, shard=shard, outside="drop"),
        "DTensor": lambda: linear_cross_entropy(hidden, split, labels),
        "head": lambda: plain(hidden, labels),
        "head's logits": lambda: plain(hidden),
        "head's state": lambda: plain.state_dict(),
        "shard_over": lambda: over(hidden, labels),
        "converted": lambda: tied(labels, labels=labels),
        "embedding": lambda: embedding(labels),
        "replace": lambda: shard.with_group(shard.group),
    }
    for call in calls.values():
        call()
    dist.barrier()
    dist.destroy_process_group()
    for again in (False, True):
        if again:
            join_alone(torch.device("cpu"))
        for debug in "01":
            for name, call in calls.items():
                with mock.patch.dict(os.environ, CCE_DIST_DEBUG=debug):
                    found = result_of(call)
                assert "destroyed" in str(found), f"{name}, again {again}, debug {debug}: {found!r}"
    assert "destroyed" in str(result_of(before.backward))
    new = VocabShard.even(V, dist.group.WORLD)
    whole = linear_cross_entropy(hidden, weight, labels)
    torch.testing.assert_close(linear_cross_entropy(hidden, weight, labels, shard=new), whole)
    assert len(over.state_dict()) == 1


def test_no_group_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches each of several ranks that takes the whole vocabulary, because dist.group.WORLD was None."""
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    for num_ranks, refused in (("2", True), ("1", False), ("", False)):
        monkeypatch.setenv("WORLD_SIZE", num_ranks)
        for make in (lambda: VocabShard.even(V, None), lambda: VocabParallelHead(D, V, group=None).shard):
            if not refused:
                assert make().num_rows == V
                continue
            with pytest.raises(RuntimeError, match="WORLD_SIZE is 2: call init_process_group first"):
                make()
        assert VocabShard(0, V, V).num_rows == VocabParallelHead(D, V).shard.num_rows == V
    with pytest.raises(ValueError, match="WORLD is None before init_process_group"):
        VocabShard(0, V // 2, V, None)
