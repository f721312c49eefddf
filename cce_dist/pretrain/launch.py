"""From a command line to ranks: under torchrun this process is one, alone it starts them; and what a failure says.

A user's mistake, a full disk or a lost rank is one line on stderr and exit code 1; CCE_DIST_DEBUG=1 adds the traceback.
Anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import argparse
import logging
import os
import pickle
import sys
import traceback
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

from cce_dist.pretrain import data
from cce_dist.pretrain.checkpoint import CheckpointError
from cce_dist.pretrain.engines import Engine
from cce_dist.pretrain.ranks import Ranks, check_sizes, join
from cce_dist.pretrain.recipe import ENGINES, MEGATRON_FUSED, Recipe, UsageError
from cce_dist.pretrain.train import make_deterministic, train
from cce_dist.ranks import in_torchrun


def launch(args: argparse.Namespace) -> int:
    """Be a rank, or start them all, and return the exit code."""
    try:
        recipe = read_recipe(args)
        check_engine(recipe)
    except UsageError as error:
        return _report(error) if os.environ.get("RANK", "0") == "0" else 1
    if in_torchrun() or recipe.num_ranks == 1:
        return run_rank(recipe)
    try:
        data.prepare(*recipe.text)  # a bad corpus fails once here, not on every rank
    except data.CorpusError as error:
        return _report(error)
    return _start_ranks(recipe)


def read_recipe(args: argparse.Namespace) -> Recipe:
    """Return the recipe of a command line, in which the flags that fit themselves to the machine are decided."""
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    tp = args.tp
    if tp is None and args.zero_stage > 1:
        tp = 1
    elif tp is None and in_torchrun():
        tp = max(1, int(os.environ["WORLD_SIZE"]) // (args.dp * args.pp))
    elif tp is None:
        tp = 2 if device == "cpu" else max(1, min(2, torch.cuda.device_count()))
    return Recipe.of(args, device=device, tp=tp)


def _start_ranks(recipe: Recipe) -> int:
    """Start all ranks on this machine under torchrun's own agent."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Torchrun sets this to 1; here the ranks share all cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // recipe.num_ranks)))
    # The agent logs a report of a failed rank; the rank itself has said what happened.
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    config = LaunchConfig(
        run_id="cce-dist-pretrain", min_nodes=1, max_nodes=1, nproc_per_node=recipe.num_ranks,
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=recipe.max_restarts,
    )  # fmt: skip
    try:
        elastic_launch(config, _rank_process)(recipe)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            print(f"cce-dist pretrain: rank {rank} was ended by {failure.signal_name()}", file=sys.stderr)
        return 1
    except SignalException as error:
        return 128 + error.sigval
    return 0


def _rank_process(recipe: Recipe) -> None:
    try:
        code = run_rank(recipe)
    except Exception:
        traceback.print_exc()
        code = 1
    if code:
        sys.exit(code)


def run_rank(recipe: Recipe) -> int:
    """Set this rank up, train, and return its exit code."""
    try:
        ranks = join(recipe)
        train_on(recipe, ranks, data.prepare(*recipe.text, here=os.environ.get("LOCAL_RANK", "0") == "0"))
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
                dist.barrier()  # the agent ends all ranks once one has left: wait for the one that reports
            os._exit(code)
        return code
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return 0


def train_on(recipe: Recipe, ranks: Ranks, folder: Path) -> float:
    """Train on the corpus in ``folder`` with the engine that the recipe names; see ``train``."""
    check_sizes(recipe, ranks)
    corpus = data.Corpus(folder)
    batches, held_out = (
        data.Batches(ids, recipe.shape.seq_len, recipe.seed) for ids in (corpus.train, corpus.held_out)
    )
    make_deterministic(recipe.seed)
    # Only the engine's own module imports its framework.
    engine: type[Engine] = getattr(import_module(f"cce_dist.pretrain.engines.{recipe.engine}"), ENGINES[recipe.engine])
    return train(engine(recipe, ranks), corpus.key, batches, held_out)


def check_engine(recipe: Recipe) -> None:
    """Raise ``UsageError`` where the recipe asks for what its engine cannot do here."""
    engine, stage = recipe.engine, recipe.zero_stage
    problems = {
        f"--loss {MEGATRON_FUSED} needs --engine megatron": recipe.loss == MEGATRON_FUSED and engine != "megatron",
        "--zero-stage needs --engine deepspeed": stage > 1 and engine != "deepspeed",
        "--pp needs --engine megatron or deepspeed": recipe.pp > 1 and engine == "torch",
        "--compile is for --engine torch": recipe.compile and engine != "torch",
        "--engine megatron needs GPUs: megatron-core's schedules and buffers are theirs": (
            engine == "megatron" and recipe.device == "cpu"
        ),
        "--capture is for --engine torch on one rank (--tp 1)": bool(recipe.capture)
        and (engine != "torch" or recipe.num_ranks > 1),
        "--sequence-parallel is not for --engine deepspeed": recipe.sequence_parallel and engine == "deepspeed",
        "--zero-stage 2 and 3 need --pp 1 and --tp 1": stage > 1 and (recipe.pp > 1 or recipe.tp > 1),
        "--engine megatron needs megatron-core: pip install 'cce-dist[megatron]'": (
            engine == "megatron" and (find_spec("megatron") is None or find_spec("megatron.core") is None)
        ),
        "--engine deepspeed needs deepspeed: pip install 'cce-dist[deepspeed]'": (
            engine == "deepspeed" and find_spec("deepspeed") is None
        ),
    }
    for text, is_so in problems.items():
        if is_so:
            raise UsageError(text)


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
