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


def _divide_by_zero_on_the_last() -> None:
    if dist.get_rank() == 1:
        print(1 / 0)
    dist.barrier()  # in which the other rank waits for ever


def _fail_otherwise() -> None:
    raise ValueError(f"this is rank {dist.get_rank()}")


@pytest.mark.slow
def test_ranks_stay_until_one_fails(pool: Pool, tmp_path: Path) -> None:
    """Catches processes that are made anew for every body, a pool that waits for the ranks that the failed one has left alone,
    or sends them the next body."""
    one, other, start = processes(pool, tmp_path / "one"), processes(pool, tmp_path / "other"), time.monotonic()
    assert len(one) == 2 and one == other and all(name.split("-")[1] != str(os.getpid()) for name in one)
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2 failed in _divide.*print\(1 / 0\).*ZeroDivisionError"):
        pool.run(_divide_by_zero_on_the_last)
    assert time.monotonic() - start < 30  # a collective would wait for 120 s
    with pytest.raises(RankError, match=r"this is rank \d"):
        pool.run(_fail_otherwise)
    assert not one & processes(pool, tmp_path / "after")


def _hang_on_the_first() -> None:
    if dist.get_rank() == 0:
        time.sleep(600)


def _die_on_the_first() -> None:
    assert faulthandler.is_enabled()  # it writes where the rank was when it died
    if dist.get_rank() == 0:
        os.abort()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (_hang_on_the_first, r"_hang_on_the_first has not ended after 3 s on ranks 0$"),
        pytest.param(
            _die_on_the_first, r"_die_on_the_first\n\nthe process ended with exit code -6", marks=pytest.mark.slow
        ),
    ],
)
def test_ranks_that_hang_or_die_are_named_and_ended(pool: Pool, tmp_path: Path, monkeypatch, body, says: str) -> None:
    before = processes(pool, tmp_path / "before")
    monkeypatch.setattr(pool, "limit_seconds", 3.0)
    with pytest.raises(RankError, match=says):
        pool.run(body)
    for name in before:
        with pytest.raises(ProcessLookupError):
            os.kill(int(name.split("-")[1]), 0)
