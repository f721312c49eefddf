"""Ranks that this process starts: they form one default process group, and run one body after another."""

import contextlib
import datetime
import faulthandler
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

START_METHOD = "spawn"  # of a pool's processes
# What a server has imported, from which processes are forked. A module that is not installed is passed over. The server does
# not know the folder of the tests.
MODULES: str = """cce_dist.tools.cli cce_dist.tools.verify cce_dist.tools.pretrain.launch cce_dist.tools.pretrain.torchrun
cce_dist.tools.pretrain.engine torch._dynamo torch.distributed.checkpoint.state_dict torch.distributed.fsdp
torch.distributed.tensor torch.testing megatron.core.models.gpt.gpt_layer_specs megatron.core.optimizer deepspeed.pipe
transformers.models.llama.modeling_llama transformers.trainer"""


def preload() -> None:
    """Name the modules to the server, which begins with the first process."""
    multiprocessing.set_forkserver_preload(MODULES.split())


def run_ranks(body: Callable, world: int, *args, timeout_seconds: float = 120) -> None:
    """Call ``body(*args)`` on ``world`` new processes that form a group, and wait. ``Pool`` explains the rest."""
    with Pool(world, timeout_seconds) as pool:
        pool.run(body, *args)


class RankError(Exception):
    """A rank failed, died or hung. The message has its traceback, if it left one."""


class Pool(contextlib.AbstractContextManager):
    """Ranks on this machine that stay: they form a group once, and then run one body after another.

    The group is gloo's, with one thread a rank. Ranks meet at a file, so no port is needed. The first body starts the
    processes. A body that fails ends them, because ranks may then wait for one another in a collective that never comes; the
    next body gets new ones. Groups that a body makes live as long as the processes.

    A collective that waits longer than ``timeout_seconds`` raises on its rank; a body that takes longer than ``limit_seconds``
    has failed. ``seed`` seeds torch before every body.
    """

    def __init__(
        self,
        world: int,
        timeout_seconds: float = 120,
        limit_seconds: float | None = None,
        seed: int | None = None,
    ) -> None:
        self.world, self.limit_seconds, self.seed = world, limit_seconds, seed
        self._group = world, datetime.timedelta(seconds=timeout_seconds)
        self._ranks: list[tuple[Any, Connection]] = []  # process, pipe
        self._folder: tempfile.TemporaryDirectory | None = None

    def __exit__(self, *error: object) -> None:
        """Have the ranks leave their group and end."""
        for _, pipe in self._ranks:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process, _ in self._ranks:
            process.join(60)
        self._kill()

    def run(self, body: Callable, *args: Any) -> None:
        """Call ``body(*args)`` on every rank and wait. Both are pickled, so the body stands at the top of a module.

        Raises:
            RankError: With the traceback of the first rank that failed.
        """
        try:
            if not self._ranks:
                self._start()
            for _, pipe in self._ranks:
                pipe.send((body, args, self.seed))
            self._wait(body)
        except BaseException:
            self._kill()
            raise

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        context: Any = mp.get_context(START_METHOD)
        for rank in range(self.world):
            ours, its = context.Pipe()
            store = os.path.join(self._folder.name, "store")
            process = context.Process(target=_serve, args=(its, store, rank, *self._group), name=f"rank {rank}")
            process.start()
            its.close()  # so that the end of the process is the end of the pipe
            self._ranks.append((process, ours))

    def _wait(self, body: Callable) -> None:
        """Wait until every rank has said that it is done; raise what the first that is not says."""
        deadline = None if self.limit_seconds is None else time.monotonic() + self.limit_seconds
        working: dict[Any, int] = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks)}
        while working:
            ready: list[Any] = wait(working, None if deadline is None else max(0.0, deadline - time.monotonic()))
            if not ready:
                late = ", ".join(map(str, working.values()))
                raise RankError(f"{body.__name__} has not ended after {self.limit_seconds:g} s on ranks {late}")
            for pipe in ready:
                rank = working.pop(pipe)
                try:
                    failure = pipe.recv()
                except (EOFError, OSError):
                    process = self._ranks[rank][0]
                    process.join(10)
                    failure = f"the process ended with exit code {process.exitcode}"
                if failure:
                    raise RankError(f"rank {rank} of {self.world} failed in {body.__name__}\n\n{failure}")

    def _kill(self) -> None:
        for process, pipe in self._ranks:
            process.kill()
            process.join()
            pipe.close()
        self._ranks.clear()
        if self._folder is not None:
            self._folder.cleanup()


@contextlib.contextmanager
def shared_folder() -> Iterator[str]:
    """Give all ranks one temporary folder."""
    with tempfile.TemporaryDirectory() as own:
        name = [own]
        dist.broadcast_object_list(name)
        yield name[0]
        dist.barrier()


def _serve(pipe: Connection, store: str, rank: int, world: int, timeout: datetime.timedelta) -> None:
    """Run what the pipe brings, on one rank; answer None, or the traceback of a failure."""
    faulthandler.enable()  # a rank that aborts prints where it was
    torch.set_num_threads(1)
    meeting = dist.FileStore(store, world)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=world, timeout=timeout)
    with contextlib.suppress(EOFError, BrokenPipeError):  # the process that sends has ended
        while (task := pipe.recv()) is not None:
            pipe.send(_failure(*task))
        dist.destroy_process_group()


def _failure(body: Callable, args: tuple, seed: int | None) -> str | None:
    try:
        if seed is not None:
            torch.manual_seed(seed)
        body(*args)
    except BaseException:  # the rank lives on: its end would make its peers fail too, and hide the reason
        return traceback.format_exc()
    finally:
        sys.stdout.flush()  # a rank that fails is killed soon
    return None
