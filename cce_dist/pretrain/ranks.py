"""This process's place among the ranks: device, process group, mesh."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import logging
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cce_dist.pretrain import UsageError


@dataclasses.dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks.

    Attributes:
        device: Where it computes.
        rank, world_size: Place and number of all ranks.
        tp, dp, pp: Tensor-parallel, data-parallel and pipeline size, the first varying fastest from rank to rank;
            ``tp * dp * pp == world_size``.
        mesh: [dp, tp] device mesh, or None where there is one rank only, or an engine that makes its own groups.
    """

    device: torch.device
    rank: int = 0
    world_size: int = 1
    tp: int = 1
    dp: int = 1
    pp: int = 1
    mesh: DeviceMesh | None = None

    @property
    def dp_rank(self) -> int:
        return self.rank // self.tp % self.dp

    @property
    def tp_mesh(self) -> DeviceMesh | None:
        return self.mesh["tp"] if self.mesh is not None and self.tp > 1 else None

    @property
    def dp_mesh(self) -> DeviceMesh | None:
        return self.mesh["dp"] if self.mesh is not None and self.dp > 1 else None


def join(args: argparse.Namespace, pp: int | None = None) -> Ranks:
    """Join the process group, where there is one, with ``args.timeout`` on every collective.

    With ``pp``, pipeline stages, no mesh is made: it is for an engine that makes its own groups.
    """
    # cuBLAS is deterministic with this workspace alone, and reads it when it starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # The flight recorder remembers collectives, so that a time-out can name the one that hung.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    device = torch.device(args.device)
    if args.device == "cuda":
        if not torch.cuda.is_available():
            raise UsageError("--device cuda, but torch sees no GPU")
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if num_local > torch.cuda.device_count():
            raise UsageError(f"{num_local} ranks, but {torch.cuda.device_count()} GPUs on this machine")
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == args.tp * args.dp * (pp or 1) == 1:
        return Ranks(device)

    timeout = datetime.timedelta(seconds=args.timeout)
    # On CPUs it falls back from all-to-all to all-gather, and says so on every rank.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    backend = "nccl" if args.device == "cuda" else "gloo"
    store, rank, _ = next(dist.rendezvous("env://", timeout=timeout))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # A restarted group is given its predecessor's store: keep out of the old addresses. (A group with a store of its own
        # must not do this: a node that joins late counts fewer restarts than the others.)
        store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timeout,
        device_id=device if args.device == "cuda" else None,
    )  # fmt: skip
    if args.tp * args.dp * (pp or 1) != world_size:
        stages = f" x --pp {pp}" if pp else ""
        raise UsageError(f"--tp {args.tp} x --dp {args.dp}{stages} does not make the {world_size} ranks of torchrun")
    if pp:
        return Ranks(device, rank, world_size, args.tp, args.dp, pp)
    return make_mesh(device, args.tp, args.dp, timeout)


def make_mesh(device: torch.device, tp: int, dp: int, timeout: datetime.timedelta) -> Ranks:
    """Return this rank's place in a [dp, tp] mesh over the default group; tensor-parallel ranks are neighbours."""
    grid = torch.arange(dp * tp).view(dp, tp)
    # init_device_mesh would make these groups with the default time-out.
    groups: Any = [
        dist.new_subgroups_by_enumeration(lines.tolist(), timeout=timeout, group_desc=name)[0]
        for name, lines in (("dp", grid.T), ("tp", grid))
    ]
    mesh = DeviceMesh.from_group(groups, device.type, mesh=grid, mesh_dim_names=("dp", "tp"))
    return Ranks(device, dist.get_rank(), dist.get_world_size(), tp, dp, mesh=mesh)


def start_deepspeed(device: torch.device) -> None:
    """Have DeepSpeed work on the process group that there is, and meet what else it expects of a launcher."""
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    # Else it compiles a collective of its own at start, on CPUs.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # pyright: ignore[reportAttributeAccessIssue]
    deepspeed.init_distributed(dist.get_backend(), auto_mpi_discovery=False, verbose=False)
