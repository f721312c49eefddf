"""The search finds the fastest tiles it can reach, and the loss can read what it wrote. No GPU: the race is a function."""

import math

import pytest

from cce_dist import cli
from cce_dist.bench.tune import GROUPS, merge_into, search
from cce_dist.kernels.tiles import Tile, Tiles, read_tiles

TILE = Tile(128, 128, 32, 8, 3)
START = Tiles(TILE, TILE, TILE, TILE, GROUPS[0])
GOAL = START._replace(lse=Tile(128, 256, 64, 8, 4), grad_weight=Tile(64, 128, 32, 4, 2), group=GROUPS[-1])


def seconds(tiles):
    """One unit for each number that is not the goal's."""
    flat, goal = ([*sum(t[:-1], ()), t.group] for t in (tiles, GOAL))
    return 10 + sum(have != want for have, want in zip(flat, goal, strict=True))


def race(best, candidate):
    return seconds(candidate) / seconds(best)


def test_search_reaches_the_fastest():
    assert search(START, race) == GOAL


def test_search_keeps_what_it_has_where_all_candidates_fail_or_tie():
    assert search(START, lambda best, candidate: math.inf) == START
    assert search(START, lambda best, candidate: 0.999) == START  # within noise


def test_the_loss_reads_what_was_written_and_other_devices_stay(tmp_path):
    path = tmp_path / "tiles.json"
    merge_into(path, "GPU A", "bfloat16", START)
    merge_into(path, "GPU B", "bfloat16", GOAL)
    assert read_tiles(str(path)) == {("GPU A", "bfloat16"): START, ("GPU B", "bfloat16"): GOAL}


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a GPU"):
        cli.main(["tune"])
