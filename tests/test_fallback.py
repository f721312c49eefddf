"""Where the lists of a filter would cost more than exact gradients: what then runs, and what the device decides."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shards import DEVICE

from cce_dist.kernels import Filter, Operands, ShardLogits, Softmax, Spec, filter


def test_statistics_count_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens times columns pass 2^32 where all tokens are exact. Catches: a product of 32 bits, whose sign or size is any."""
    size = 70_000
    ids = torch.zeros(size, dtype=torch.int64, device=DEVICE)
    nothing = torch.zeros(size, device=DEVICE)
    how = SimpleNamespace(
        listed_labels=ids - 1, num_dense=torch.tensor([size], dtype=torch.int32, device=DEVICE),
        num_few=torch.zeros(1, dtype=torch.int32, device=DEVICE),
    )  # fmt: skip
    monkeypatch.setattr(filter, "plan", lambda *_: how)
    monkeypatch.setattr(filter, "listed_gradients", lambda *_: (nothing, nothing.int()))
    logits = ShardLogits(0, size)
    x = Operands(nothing[:, None], nothing[:, None], None, ids, logits)
    saved: list[Any] = filter.saved_like(
        x, spec := Spec(logits, size, filter=Filter(2.0**-12), workspace_bytes=1 << 20)
    )
    assert filter.filter_stats(x, Softmax(nothing, nothing), saved, spec).tolist() == [1.0, 0.0, 0.0]
