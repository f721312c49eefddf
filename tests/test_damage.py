"""What is stored is whole, finite and safe to read, by all three engines: NaN, full disks, damage, other people's files."""

from __future__ import annotations

import errno
import importlib.util
import json
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("tokenizers")

from toy_runs import SHORT, TOY, losses, options, prepared, records

from cce_dist import cli
from cce_dist.pretrain import checkpoint, engines, launch, log
from cce_dist.pretrain.exits import CheckpointError, Stopped, UsageError
from cce_dist.pretrain.launch import train_on
from cce_dist.pretrain.ranks import Ranks
from cce_dist.pretrain.stop import Notice
from cce_dist.ranks import run_ranks

ALONE = Ranks(torch.device("cpu"))
EIGHT = "step-00000008"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def finished(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps with checkpoints after four and eight."""
    out = tmp_path_factory.mktemp("finished")
    train_on(options(cache, out), ALONE, prepared(cache))
    return out


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of that run, to be spoiled."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def go_on(cache: Path, out: Path, *more: str) -> None:
    train_on(options(cache, out, *more), ALONE, prepared(cache))


# All engines, on two ranks -------------------------------------------------------------------------------------------------


def _engine_loses_nothing(name: str, cache: Path, out: Path) -> None:
    """The body of two ranks: D1, D5, D6 and D19 with one engine."""
    ranks = Ranks(torch.device("cpu"), dist.get_rank(), 2, tp=2)
    if name == "megatron":
        from megatron_on_cpu import use_cpu

        use_cpu()
    engine = getattr(__import__(f"cce_dist.pretrain.engines.{name}", fromlist=["x"]), launch.ENGINES[name])

    def train(folder: str, *more: str, notice: Notice | None = None) -> Path:
        _forget_groups(name)
        recipe = options(cache, out / folder, "--engine", name, "--log-every", "100", *more)
        try:
            train_on(recipe, ranks, prepared(cache), notice)
        finally:
            torch.use_deterministic_algorithms(False)
        return out / folder

    whole = train("whole", "--log-every", "1")

    # D5: the last rank alone hears a signal in its third step.
    with Notice() as notice, _before_step(engine, 3, lambda: os.kill(os.getpid(), signal.SIGUSR1), only_rank=1):
        with pytest.raises(Stopped, match="after step [45]"):
            train("stopped", "--log-every", "1", "--checkpoint-every", "100", notice=notice)
    assert losses(train("stopped", "--log-every", "1")) == losses(whole)

    # D1: not a number in the sixth step, between two records and two checkpoints.
    with (
        _not_finite(engine, 6),
        pytest.raises(UsageError, match=r"not finite at step 6.*newest checkpoint is of step 4"),
    ):
        train("nan", "--eval-every", "100")
    assert (out / "nan" / "checkpoints" / "latest").read_text() == "step-00000004\n"
    assert not (out / "nan" / "checkpoints" / EIGHT).exists()

    # D6: the newest checkpoint is damaged.
    dist.barrier()
    if ranks.rank == 0:
        largest = max((whole / "checkpoints" / EIGHT).rglob("*"), key=lambda path: path.stat().st_size)
        with open(largest, "r+b") as file:
            file.seek(largest.stat().st_size // 2)
            file.write(b"damage")
    dist.barrier()
    before = losses(whole)
    assert losses(train("whole", "--log-every", "1")) == before

    # D19: one rank's disk is full.
    with _full_disk(only_rank=1), pytest.raises(CheckpointError, match="No space left on device"):
        train("full")
    dist.barrier()
    assert not list((out / "full" / "checkpoints").glob("step-*"))


class _before_step:  # noqa: N801 - reads as what it does
    """Have something happen on one rank before a step of an engine."""

    def __init__(self, engine: type, number: int, act: Callable[[], Any], only_rank: int) -> None:
        self.engine, self.step = engine, engine.step
        self.number, self.act, self.only_rank = number, act, only_rank

    def __enter__(self) -> None:
        def step(engine: Any, number: int, *batch: Any) -> engines.Step:
            if number == self.number and engine.ranks.rank == self.only_rank:
                self.act()
            return self.step(engine, number, *batch)

        self.engine.step = step

    def __exit__(self, *_: object) -> None:
        self.engine.step = self.step


class _not_finite(_before_step):  # noqa: N801
    """Have the gradient of a step, on all ranks, not be a number."""

    def __init__(self, engine: type, number: int) -> None:
        super().__init__(engine, number, lambda: None, -1)

    def __enter__(self) -> None:
        def step(engine: Any, number: int, *batch: Any) -> engines.Step:
            done = self.step(engine, number, *batch)
            return done._replace(grad_norm=done.grad_norm * math.nan) if number == self.number else done

        self.engine.step = step


class _full_disk:  # noqa: N801
    """Have torch's writers meet a full disk on one rank."""

    def __init__(self, only_rank: int) -> None:
        self.is_here, self.save = dist.get_rank() == only_rank, torch.save

    def __enter__(self) -> None:
        def save(*_: Any, **__: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        if self.is_here:
            torch.save = save
            self.fsync, os.fsync = os.fsync, save

    def __exit__(self, *_: object) -> None:
        if self.is_here:
            torch.save, os.fsync = self.save, self.fsync


def _forget_groups(name: str) -> None:
    """Frameworks keep the groups of one model for the next."""
    if name == "deepspeed":
        from deepspeed.utils import groups

        groups._release_process_group_references()
    elif name == "megatron":
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("engine", ["torch", "deepspeed", "megatron"])
@pytest.mark.timeout(280)
def test_every_engine_loses_nothing(tmp_path: Path, cache: Path, engine: str) -> None:
    """D1, D5, D6, D19."""
    if engine != "torch" and importlib.util.find_spec(engine) is None:
        pytest.skip(f"{engine} is not installed")
    prepared(cache)
    run_ranks(_engine_loses_nothing, 2, engine, cache, tmp_path)
