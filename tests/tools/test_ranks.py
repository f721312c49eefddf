"""Ranks that stay: they run one body after another, and a body that fails, hangs or dies harms no other."""

import faulthandler
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks import Pool, RankError

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2) as pool:
        yield pool


def _write_pid(folder: Path) -> None:
    number = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(number)
    assert number == 3
    (folder / f"{dist.get_rank()}-{os.getpid()}").touch()


def processes(pool: Pool, folder: Path) -> set[str]:
    """Return rank and process id of each rank, which have met in a collective."""
    folder.mkdir()
    pool.run(_write_pid, folder)
    return set(os.listdir(folder))


def test_ranks_stay(pool: Pool, tmp_path: Path) -> None:
    """Catches processes that are made anew for every body."""
    one, other = processes(pool, tmp_path / "one"), processes(pool, tmp_path / "other")
    assert len(one) == 2 and one == other and all(name.split("-")[1] != str(os.getpid()) for name in one)


def _divide_by_zero_on_the_last() -> None:
    if dist.get_rank() == 1:
        print(1 / 0)
    dist.barrier()  # in which the other rank waits for ever


def _fail_otherwise() -> None:
    raise ValueError(f"this is rank {dist.get_rank()}")


@pytest.mark.slow
def test_the_first_failure_is_raised_and_the_next_body_meets_new_ranks(pool: Pool, tmp_path: Path) -> None:
    """Catches a pool that waits for the ranks that the failed one has left alone, or sends them the next body."""
    before, start = processes(pool, tmp_path / "before"), time.monotonic()
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2 failed in _divide.*print\(1 / 0\).*ZeroDivisionError"):
        pool.run(_divide_by_zero_on_the_last)
    assert time.monotonic() - start < 30  # a collective would wait for 120 s
    with pytest.raises(RankError, match=r"this is rank \d"):
        pool.run(_fail_otherwise)
    assert not before & processes(pool, tmp_path / "after")


def _hang_on_the_first() -> None:
    if dist.get_rank() == 0:
        time.sleep(600)


def test_ranks_that_hang_are_ended(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = processes(pool, tmp_path / "before")
    monkeypatch.setattr(pool, "limit_seconds", 3.0)
    with pytest.raises(RankError, match=r"_hang_on_the_first has not ended after 3 s on ranks 0$"):
        pool.run(_hang_on_the_first)
    for name in before:
        with pytest.raises(ProcessLookupError):
            os.kill(int(name.split("-")[1]), 0)


def _die_on_the_first() -> None:
    assert faulthandler.is_enabled()  # it writes where the rank was when it died
    if dist.get_rank() == 0:
        os.abort()


@pytest.mark.slow
def test_a_rank_that_dies_is_named(pool: Pool) -> None:
    message = "rank 0 of 2 failed in _die_on_the_first\n\nthe process ended with exit code -6"
    with pytest.raises(RankError, match=message):
        pool.run(_die_on_the_first)
