"""From a command line to ranks: under torchrun this process is one, alone it starts them; and what a failure says.

A user's mistake, a full disk or a lost rank is one line on stderr and exit code 1; CCE_DIST_DEBUG=1 adds the traceback. What
is none of these is a bug and keeps its traceback.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import datetime
import logging
import os
import pickle
import sys
import traceback
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cce_dist.pretrain import data
from cce_dist.pretrain.checkpoint import CheckpointError
from cce_dist.pretrain.model import PRESETS


@dataclasses.dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks.

    Attributes:
        device: Where it computes.
        rank, world_size: Place and number of all ranks.
        tp, dp: Tensor- and data-parallel size; ``tp * dp == world_size``.
        mesh: [dp, tp] device mesh, or None where there is one rank only.
    """

    device: torch.device
    rank: int = 0
    world_size: int = 1
    tp: int = 1
    dp: int = 1
    mesh: DeviceMesh | None = None

    @property
    def dp_rank(self) -> int:
        return self.rank // self.tp

    @property
    def tp_mesh(self) -> DeviceMesh | None:
        return self.mesh["tp"] if self.mesh is not None and self.tp > 1 else None

    @property
    def dp_mesh(self) -> DeviceMesh | None:
        return self.mesh["dp"] if self.mesh is not None and self.dp > 1 else None


def launch(args: argparse.Namespace) -> int:
    """Be a rank, or start them all, and return the exit code."""
    args = copy.copy(args)
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.vocab_size is None:
        args.vocab_size = PRESETS[args.preset].vocab_size
    if "WORLD_SIZE" in os.environ:
        args.tp = args.tp or max(1, int(os.environ["WORLD_SIZE"]) // args.dp)
        return run_rank(args)
    args.tp = args.tp or (2 if args.device == "cpu" else min(2, torch.cuda.device_count()))
    if args.tp * args.dp == 1:
        return run_rank(args)
    try:
        data.prepare(args.corpus, args.pattern, args.vocab_size, args.cache)  # a bad corpus fails once, here
    except (OSError, data.CorpusError) as error:
        return _report(error)
    return _start_ranks(args)


def _start_ranks(args: argparse.Namespace) -> int:
    """Start ``tp * dp`` ranks on this machine under torchrun's own agent."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    world_size = args.tp * args.dp
    # As torchrun does, but with all cores in use.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world_size)))
    # The agent logs a report of a failed rank; the rank itself has said what happened.
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    config = LaunchConfig(
        run_id="cce-dist-pretrain", min_nodes=1, max_nodes=1, nproc_per_node=world_size,
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=args.max_restarts,
    )  # fmt: skip
    try:
        elastic_launch(config, _rank_process)(args)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            print(f"cce-dist pretrain: rank {rank} was ended by {failure.signal_name()}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _rank_process(args: argparse.Namespace) -> None:
    try:
        code = run_rank(args)
    except Exception:
        traceback.print_exc()
        code = 1
    if code:
        sys.exit(code)


def run_rank(args: argparse.Namespace) -> int:
    """Set this rank up, train, and return its exit code."""
    from cce_dist.pretrain.train import train

    try:
        ranks = join(args)
        prepare = data.prepare if int(os.environ.get("LOCAL_RANK", "0")) == 0 else data.wait_for
        folder = prepare(args.corpus, args.pattern, args.vocab_size, args.cache)
        train(args, ranks, folder)
    except (ValueError, OSError, data.CorpusError, CheckpointError, dist.DistError, RuntimeError) as error:
        if type(error) is RuntimeError and not _is_lost_peer(error):
            raise
        everywhere = isinstance(error, (CheckpointError, ValueError))
        code = _report(error) if not everywhere or os.environ.get("RANK", "0") == "0" else 1
        if dist.is_initialized():
            if everywhere:
                dist.barrier()  # or the agent, seeing another rank leave, ends the one that reports
            os._exit(code)  # a group that lost a rank cannot be taken down in order
        return code
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return 0


def join(args: argparse.Namespace) -> Ranks:
    """Join the process group, where there is one, with ``args.timeout`` on every collective."""
    # cuBLAS is deterministic with this workspace alone, and reads it when it starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # The flight recorder remembers collectives, so that a time-out can name the one that hung.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "64")
    device = torch.device(args.device)
    if args.device == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("--device cuda, but torch sees no GPU")
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if num_local > torch.cuda.device_count():
            raise ValueError(f"{num_local} ranks, but {torch.cuda.device_count()} GPUs on this machine")
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == args.tp * args.dp == 1:
        return Ranks(device)

    timeout = datetime.timedelta(seconds=args.timeout)
    # On CPUs it falls back from all-to-all to all-gather, and says so on every rank.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    backend = "nccl" if args.device == "cuda" else "gloo"
    store, rank, _ = next(dist.rendezvous("env://", timeout=timeout))
    # A restarted group may be given its predecessor's store (torchrun --standalone does so): keep out of the old addresses.
    store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timeout,
        device_id=device if args.device == "cuda" else None,
    )  # fmt: skip
    if args.tp * args.dp != world_size:
        raise ValueError(f"--tp {args.tp} x --dp {args.dp} does not make the {world_size} ranks of torchrun")
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
    return Ranks(device, dist.get_rank(), dist.get_world_size(), tp, dp, mesh)


def _report(error: BaseException) -> int:
    """Print one line about ``error`` and return the exit code."""
    rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
    text = _name_collective(error) if _is_lost_peer(error) else str(error)
    print(f"cce-dist pretrain: {rank}{' '.join(text.split())}", file=sys.stderr, flush=True)
    if os.environ.get("CCE_DIST_DEBUG") == "1":
        traceback.print_exception(error)
    return 1


def _is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because a peer is gone or silent; gloo says so in a bare RuntimeError."""
    if isinstance(error, dist.DistError):
        return True
    signs = ("Timed out", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def _name_collective(error: BaseException) -> str:
    """Return what happened, with the collective that this rank entered last."""
    try:
        from torch._C._distributed_c10d import _dump_fr_trace  # pyright: ignore[reportAttributeAccessIssue]

        entries = pickle.loads(_dump_fr_trace())["entries"]
    except (ImportError, KeyError, RuntimeError):
        entries = []
    happened = "time-out" if "Timed out" in str(error) else "lost a peer"
    reason = str(error).split(". ")[0]
    if not entries:
        return f"{happened} in a collective: {reason}"
    last = max(entries, key=lambda entry: entry["time_created_ns"])
    ours = [frame for frame in last["frames"] if f"{os.sep}torch{os.sep}" not in frame["filename"]]
    where = f", called at {os.path.relpath(ours[0]['filename'])}:{ours[0]['line']}" if ours else ""
    group = last["process_group"][1]
    return f"{happened} in {last['profiling_name']} of {last['input_sizes']} in group {group!r}{where}: {reason}"
