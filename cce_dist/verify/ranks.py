"""run_ranks: run a function on several processes of this machine that form a process group."""

from __future__ import annotations

import datetime
import os
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(body: Callable, world: int, *args, device: str = "cpu", timeout_seconds: float = 120) -> None:
    """Call ``body(*args)`` on ``world`` new processes of one default process group, and wait.

    NCCL if ``device`` is "cuda" (one GPU a rank), else gloo with one thread a rank. They meet at a file, so no port is
    needed. A collective that waits longer than the time-out raises on its rank.

    Raises:
        torch.multiprocessing.ProcessRaisedException: With the traceback of the first rank that failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (world, body, args, device, timeout_seconds, os.path.join(folder, "store")), nprocs=world)


def _rank(
    rank: int, world: int, body: Callable, args: tuple, device: str, timeout_seconds: float, store: str
) -> None:  # fmt: skip
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=timeout_seconds),
    )
    try:
        body(*args)
    finally:
        dist.destroy_process_group()
