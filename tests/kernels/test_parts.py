"""The order of the log-sum-exp's parts, as its kernel computes it."""

import pytest

pytest.importorskip("triton")
from cce_dist.kernels.lse import longest_first


def order(num_tiles: int, num_parts: int) -> list[int]:
    alike, step = longest_first(num_tiles, num_parts)
    period = num_parts // alike
    return [turn % alike * period + (period - 1 - turn // alike) * step % period for turn in range(num_parts)]


def test_every_part_has_its_turn_and_longer_ones_come_first() -> None:
    for num_parts in range(1, 50):
        for num_tiles in range(num_parts, 4 * num_parts + 1):
            parts = order(num_tiles, num_parts)
            sizes = [(s + 1) * num_tiles // num_parts - s * num_tiles // num_parts for s in parts]
            assert sorted(parts) == list(range(num_parts))
            assert sizes == sorted(sizes, reverse=True)
