"""This node's ranks under torchrun's own agent, for a command that is started without torchrun.

Two things are added: the signals of ``exits`` end the ranks in order, and a second one ends them at once; on one machine the
rendezvous listens on the loopback interface alone.
"""

from __future__ import annotations

import inspect
import logging
import multiprocessing
import os
import signal
import socket
import uuid
from collections.abc import Callable
from multiprocessing import resource_tracker
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic import rendezvous
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from cce_dist.tools.pretrain.exits import AGAIN, HOPELESS, NO_RESTART, OUTSIDE, SIGNALS, say, signal_handlers
from cce_dist.tools.pretrain.recipe import Recipe

START_METHOD = "spawn"  # of the rank processes
PATIENCE = 300  # seconds that the ranks may take for their last checkpoint; older versions of torch give them 30


def run(body: Callable[[Recipe, int], None], recipe: Recipe, num_local: int) -> int:
    """Run ``body`` on this node's ranks, which end with the codes of ``exits``; return the command's exit code."""
    # The agent logs a report of a failed rank; the rank itself has said what happened.
    for name in logging.root.manager.loggerDict:
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # the others are heard here
    patience: dict[str, Any] = {"shutdown_timeout": PATIENCE}
    if "shutdown_timeout" not in inspect.signature(LocalElasticAgent).parameters:
        patience.clear()
    ranks: list[Any] = []  # processes, as the wish to stop has found them
    handler = None

    def stop(number: int) -> None:
        ranks.extend(multiprocessing.active_children())
        raise SignalException("asked to stop", signal.SIGTERM if number == NO_RESTART else signal.Signals(number))

    try:
        with signal_handlers((*SIGNALS, NO_RESTART), stop):
            handler = _rendezvous(recipe)
            spec = WorkerSpec(
                role="default",
                local_world_size=num_local,
                entrypoint=body,
                args=(recipe, os.getpid()),
                rdzv_handler=handler,
                max_restarts=recipe.max_restarts,
                monitor_interval=0.1,
            )
            result: Any = _Agent(spec, DefaultLogsSpecs(), START_METHOD, **patience).run()
    except SignalException as error:
        codes = {rank.exitcode for rank in ranks}
        if HOPELESS in codes:
            return HOPELESS
        if AGAIN not in codes:
            say(OUTSIDE.format(error.sigval.name))
        return AGAIN
    except (rendezvous.RendezvousError, dist.DistError) as error:
        say(f"the nodes did not meet: {error}")
        return AGAIN
    finally:
        _leave(handler)
    if result is None or not result.is_failed():  # None: the other nodes have finished without this one
        return 0
    rank, failure = min(result.failures.items(), key=lambda item: item[1].timestamp)
    if failure.exitcode < 0:
        say(f"rank {rank} was ended by {signal.Signals(-failure.exitcode).name}")
    return AGAIN if failure.exitcode == AGAIN or -failure.exitcode in SIGNALS else HOPELESS


class _Agent(LocalElasticAgent):
    """Starts ranks with signals blocked until it knows whom to end."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        resource_tracker.ensure_running()  # it unblocks SIGINT as it starts
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            return super()._start_workers(worker_group)  # pyright: ignore[reportCallIssue]
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _rendezvous(recipe: Recipe) -> rendezvous.RendezvousHandler:
    if recipe.nodes == 1:
        return _Loopback("127.0.0.1", 0, 0, 1, uuid.uuid4().hex, 600)
    settings = dict(each.split("=", 1) for each in (recipe.meet_conf or "").split(",") if "=" in each)
    nodes, place = recipe.nodes, recipe.meet or ""
    where = rendezvous.RendezvousParameters("c10d", place, recipe.run_id, nodes, nodes, **settings)
    return rendezvous.rendezvous_handler_registry.create_handler(where)


def _leave(handler: rendezvous.RendezvousHandler | None) -> None:
    """Leave the meeting, which stays open for nodes that come back.

    A thread of the handler says every few seconds that this node is alive. It must end before the interpreter does: if the node
    with the store has left first, its receive fails in a C++ frame that cannot be unwound.
    """
    if isinstance(handler, DynamicRendezvousHandler):
        handler._stop_heartbeats()  # torch's shutdown() stops them too, but also closes the meeting for good


class _Loopback(StaticTCPRendezvous):
    """One node's meeting with itself, at 127.0.0.1; torch's store would listen on every address."""

    def next_rendezvous(self) -> rendezvous.RendezvousInfo:
        if self._store is None:
            listener = socket.create_server((self.master_addr, 0))
            self.master_port = listener.getsockname()[1]
            self._store = dist.TCPStore(
                self.master_addr,
                self.master_port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        return rendezvous.RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(self.master_addr, self.master_port))
