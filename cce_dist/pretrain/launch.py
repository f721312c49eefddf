"""From a command line to ranks: under torchrun this process is one, alone it starts them; and what a failure says.

A user's mistake, a full disk or a lost rank is one line on stderr and exit code 1; CCE_DIST_DEBUG=1 adds the traceback. What
is none of these is a bug and keeps its traceback.
"""

from __future__ import annotations

import argparse
import copy
import logging
import os
import pickle
import sys
import traceback
from importlib.util import find_spec

import torch
import torch.distributed as dist

from cce_dist.pretrain import MEGATRON_FUSED, UsageError, data
from cce_dist.pretrain.checkpoint import CheckpointError
from cce_dist.pretrain.model import PRESETS
from cce_dist.pretrain.ranks import join
from cce_dist.pretrain.train import train


def launch(args: argparse.Namespace) -> int:
    """Be a rank, or start them all, and return the exit code."""
    args = copy.copy(args)
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.vocab_size is None:
        args.vocab_size = PRESETS[args.preset].vocab_size
    problem = _problem_with_engine(args)
    if problem:
        return _report(UsageError(problem)) if os.environ.get("RANK", "0") == "0" else 1
    if args.zero_stage > 1:
        args.tp = 1
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        args.tp = args.tp or max(1, int(os.environ["WORLD_SIZE"]) // (args.dp * args.pp))
        return run_rank(args)
    args.tp = args.tp or (2 if args.device == "cpu" else max(1, min(2, torch.cuda.device_count())))
    if args.tp * args.dp * args.pp == 1:
        return run_rank(args)
    try:
        # Here a bad corpus fails once.
        data.prepare(args.corpus, args.pattern, args.vocab_size, args.cache, args.corpus_mib)
    except data.CorpusError as error:
        return _report(error)
    return _start_ranks(args)


def _start_ranks(args: argparse.Namespace) -> int:
    """Start ``tp * dp * pp`` ranks on this machine under torchrun's own agent."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    world_size = args.tp * args.dp * args.pp
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
    except SignalException as error:
        return 128 + error.sigval
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
    try:
        ranks = join(args, args.pp if args.engine != "torch" else None)
        prepare = data.prepare if int(os.environ.get("LOCAL_RANK", "0")) == 0 else data.wait_for
        folder = prepare(args.corpus, args.pattern, args.vocab_size, args.cache, args.corpus_mib)
        train(args, ranks, folder)
    except KeyboardInterrupt:
        if dist.is_initialized():
            os._exit(130)  # a group that lost a rank cannot be taken down in order
        return 130
    except (UsageError, CheckpointError, data.CorpusError, OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _is_lost_peer(error):
            raise
        everywhere = isinstance(error, (UsageError, CheckpointError))
        code = _report(error) if not everywhere or os.environ.get("RANK", "0") == "0" else 1
        if dist.is_initialized():
            if everywhere:
                dist.barrier()  # or the agent, seeing another rank leave, ends the one that reports
            os._exit(code)
        return code
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return 0


def _problem_with_engine(args: argparse.Namespace) -> str | None:
    """Return why ``args.engine`` cannot do what is asked for, if so."""
    if args.loss == MEGATRON_FUSED and args.engine != "megatron":
        return f"--loss {MEGATRON_FUSED} needs --engine megatron"
    if args.zero_stage > 1 and args.engine != "deepspeed":
        return "--zero-stage needs --engine deepspeed"
    if args.pp > 1 and args.engine == "torch":
        return "--pp needs --engine megatron or deepspeed"
    if args.compile and args.engine != "torch":
        return "--compile is for --engine torch"
    if args.engine == "megatron":
        if args.device == "cpu":
            return "--engine megatron needs GPUs: megatron-core's schedules and buffers are theirs"
        if find_spec("megatron") is None or find_spec("megatron.core") is None:
            return "--engine megatron needs megatron-core: pip install 'cce-dist[megatron]'"
    if args.engine == "deepspeed":
        if args.sequence_parallel:
            return "--sequence-parallel is not for --engine deepspeed"
        if args.zero_stage > 1 and (args.pp > 1 or (args.tp or 1) > 1):
            return "--zero-stage 2 and 3 need --pp 1 and --tp 1"
        if find_spec("deepspeed") is None:
            return "--engine deepspeed needs deepspeed: pip install 'cce-dist[deepspeed]'"
    return None


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
