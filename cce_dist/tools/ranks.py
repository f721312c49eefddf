"""The default process group, which nothing else in the package makes."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist


def in_torchrun() -> bool:
    """Return whether torchrun, or a launcher like it, started this process as a rank."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


def own_device(kind: str) -> torch.device:
    """Return the CPU, or the GPU with the local rank's number, which becomes the current one."""
    if kind != "cuda":
        return torch.device(kind)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def join(device: torch.device, timeout_seconds: float, *, bind: bool = False) -> None:
    """Join the group of the ranks that torchrun started: NCCL on a GPU, else gloo.

    Args:
        device: Where this rank computes.
        timeout_seconds: A collective that waits longer raises on its rank.
        bind: Bind the group to the GPU, so that NCCL connects now and not in the first collective.
    """
    timeout = datetime.timedelta(seconds=timeout_seconds)
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # A restarted group is given its predecessor's store: keep out of the old addresses. (A group with a store of its own
        # must not do this: a node that joins late counts fewer restarts than the others.)
        store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if on_gpu and bind else None,
    )


def join_alone(device: torch.device) -> None:
    """Make a group of this process alone where there is none: for frameworks that work on nothing less."""
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
