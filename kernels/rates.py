"""Rates of an H200, from which ``filter/costs.py`` and ``cce-dist plan`` predict times. They exist once, so the two agree."""

from __future__ import annotations

from typing import NamedTuple


class Rates(NamedTuple):
    """Rates of a GPU per second: operations of matmuls, bytes read or written."""

    operations: float
    bytes_moved: float


# By bytes per element, as reached in practice at the power limit. Read on November 21, 2026: three plain bf16 matmuls of 8,192
# tokens of Llama-3-8B's and Gemma-2-2B's heads; bytes per second of F.cross_entropy's elementwise passes over their logits,
# which are larger than the cache. Operations of 4-byte elements are those of tf32; ieee fp32 was not measured.
H200 = {2: Rates(7.0e14, 4.0e12), 4: Rates(3.5e14, 4.0e12)}
