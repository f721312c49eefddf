"""From a command line to ranks: under torchrun this process is one, alone it starts them.

A user's mistake, a full disk or a lost rank is one line on stderr, with its traceback under CCE_DIST_DEBUG=1.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
import traceback
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

from cce_dist import GradFilter
from cce_dist.tools.pretrain import data, exits
from cce_dist.tools.pretrain.exits import AGAIN, HOPELESS, LOST, SIGNALS, CheckpointError, Stopped, UsageError
from cce_dist.tools.pretrain.ranks import Ranks, check_gpus, join
from cce_dist.tools.pretrain.recipe import Recipe
from cce_dist.tools.pretrain.train import train
from cce_dist.tools.ranks import in_torchrun


def launch(args: argparse.Namespace) -> int:
    """Be a rank, or start them all, and return the exit code."""
    try:
        recipe = read_recipe(args)
        check_flags(recipe)
        recipe.check_sizes()
        is_rank = in_torchrun() or (recipe.num_ranks == 1 and recipe.nodes == 1)
        num_local = recipe.ranks_per_node or recipe.num_ranks // recipe.nodes
        if not is_rank:
            check_gpus(recipe, num_local)
    except UsageError as error:
        code = _report(error) if exits.is_reporting_rank() else HOPELESS
        exits.tell_torchrun(code)
        return code
    if not is_rank:
        return _start_ranks(recipe, num_local)
    code = run_rank(recipe)
    exits.tell_torchrun(code)
    return 1 if code == LOST else code


def read_recipe(args: argparse.Namespace) -> Recipe:
    """Return the recipe of a command line, in which the machine has decided what flags leave open."""
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    num_local, world_size = args.ranks_per_node, None
    if in_torchrun():
        world_size = int(os.environ["WORLD_SIZE"])
    elif num_local is None and args.nodes > 1 and device == "cuda":
        num_local = max(1, torch.cuda.device_count())
    if world_size is None and num_local is not None:
        world_size = args.nodes * num_local
    tp = args.tp
    if tp is None and world_size is not None:
        tp = max(1, world_size // args.dp)
    elif tp is None:
        tp = 2 if device == "cpu" else max(1, min(2, torch.cuda.device_count()))
    return Recipe.of(args, device=device, tp=tp)


def _start_ranks(recipe: Recipe, num_local: int) -> int:
    from cce_dist.tools.pretrain import torchrun

    # Torchrun sets this to 1; here the ranks share all cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_local)))
    if recipe.nodes == 1 and "lo" in dict(socket.if_nameindex()).values():
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    return torchrun.run(_rank_process, recipe, num_local)


def _rank_process(recipe: Recipe, agent: int) -> None:
    os.environ[exits.AGENT] = str(agent)
    # Outside of the training loop a signal ends a rank as the system has it.
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        code = run_rank(recipe)
    except Exception:
        traceback.print_exc()
        code = 1
    if code:
        sys.stderr.flush()
        sys.exit(code)


def run_rank(recipe: Recipe) -> int:
    """Set this rank up, train, and return its exit code, one of ``exits``."""
    _end_with_agent()
    with contextlib.nullcontext() if in_torchrun() else exits.signal_handlers(SIGNALS, exits.exit_before_training):
        try:
            ranks = join(recipe)
            train(recipe, ranks, _prepare(recipe, ranks))
        except Exception as error:
            return _end_early(error)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return 0


def _end_early(error: Exception) -> int:
    """Say what ended this rank's training, and return its exit code, or leave with it; a bug is raised."""
    is_lost = _is_lost_peer(error)
    everywhere = isinstance(error, (Stopped, UsageError, CheckpointError))  # all ranks raise it
    if not (everywhere or is_lost or isinstance(error, (data.CorpusError, OSError))):
        raise error
    code = AGAIN if isinstance(error, Stopped) else LOST if is_lost else HOPELESS
    if not everywhere or exits.is_reporting_rank():
        _report(error)
    if dist.is_initialized():
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if everywhere:
            dist.barrier()  # the agent ends all ranks once one has left: wait for the one that reports
        exits.tell_torchrun(code)
        os._exit(code)  # a group that lost a rank cannot be taken down in order
    return code


def _end_with_agent() -> None:
    """Have this process end when its agent does: it must not write into a run that goes on without it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or not sys.platform.startswith("linux"):
        return
    parent, set_signal_of_parents_death = os.getppid(), 1
    ctypes.CDLL(None).prctl(set_signal_of_parents_death, signal.SIGKILL)
    if os.getppid() != parent or str(parent) != os.environ.get(exits.AGENT, str(parent)):
        os._exit(LOST)  # it has ended meanwhile


def _prepare(recipe: Recipe, ranks: Ranks) -> Path:
    """Have one rank of each node tokenize the corpus, and return its folder. All fail if one does."""
    if ranks.world_size == 1:
        return data.prepare(*recipe.text)
    node = os.environ.get("GROUP_RANK", socket.gethostname())
    everyone = ranks.gather(node)
    nodes = {node: everyone.index(node) for node in everyone}  # the first rank of each
    store = dist.PrefixStore("corpus", dist.distributed_c10d._get_default_store())
    folder = failure = None
    if nodes[node] == ranks.rank:
        try:
            folder = data.prepare(*recipe.text)
        except data.CorpusError as error:
            failure = UsageError(f"rank {ranks.rank}: {error}" if len(nodes) > 1 else str(error))
        store.set(node, "done")
    # Nobody waits in a collective: tokenizing may take longer than its time-out.
    while not store.check(list(nodes)):
        time.sleep(0.2)

    def found() -> Path | None:
        if failure is not None:
            raise failure
        return folder

    folders = ranks.together(found)
    if len({each.name for each in folders if each is not None}) > 1:
        raise UsageError("the nodes have corpora that differ in names or content")
    return folders[nodes[node]]


def check_flags(recipe: Recipe) -> None:
    """Raise ``UsageError`` where flags do not go together, or a package is missing."""
    uneven = recipe.num_ranks % recipe.nodes != 0 and recipe.ranks_per_node is None
    problems = {
        f"--filter-eps and --filter-always need a --loss that filters, not {recipe.loss}": recipe.grad_filter is None
        and (recipe.filter_always or recipe.filter_eps != GradFilter.eps),
        "--meet HOST:PORT is needed for several nodes": recipe.nodes > 1 and recipe.meet is None,
        f"--nodes {recipe.nodes} cannot share {recipe.num_ranks} ranks: --ranks-per-node says how many are here": uneven,
    }
    for text, is_so in problems.items():
        if is_so:
            raise UsageError(text)
    for package, is_asked in {"tensorboard": recipe.tensorboard, "wandb": recipe.wandb is not None}.items():
        if is_asked and find_spec(package) is None:
            raise UsageError(f"--{package} needs {package}, which is not installed: pip install {package}")


def _report(error: BaseException) -> int:
    text = str(error)
    if _is_lost_peer(error):
        text = f"{'time-out' if 'Timed out' in text else 'lost a peer'} in a collective: {text.split('. ')[0]}"
    if "RANK" in os.environ and not isinstance(error, Stopped):
        text = f"rank {os.environ['RANK']}: {text}"
    exits.say(text)
    if os.environ.get("CCE_DIST_DEBUG") == "1":
        traceback.print_exception(error)
    return HOPELESS


def _is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because a peer is gone or silent; gloo says so in a bare RuntimeError."""
    if isinstance(error, dist.DistError):
        return True
    signs = ("Timed out", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
