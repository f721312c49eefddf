"""One node's agent: it starts this node's ranks and watches them, as torchrun does, on torch's own ``LocalElasticAgent``.

It differs in four things. A signal that asks to stop is passed on, and the ranks may take the time that their checkpoint
needs. Ranks are started again only where that can help. Ranks that a lost one leaves in a collective are ended at once. On
one machine the rendezvous listens on the loopback interface alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from cce_dist.pretrain.exits import AGAIN, BUG, HOPELESS, say
from cce_dist.pretrain.stop import SAME_SECONDS, SIGNALS

START_METHOD = "spawn"  # of the rank processes
LEAVING = (HOPELESS, AGAIN)  # codes with which all ranks leave together


class Meeting(NamedTuple):
    """Where the nodes of a run meet: ``place`` is a host and a port, and None for one machine."""

    num_nodes: int
    place: str | None
    run_id: str
    settings: dict[str, str]


def run(body: Callable[..., None], args: tuple[Any, ...], num_local: int, max_restarts: int, meeting: Meeting) -> int:
    """Run ``body(*args)`` on this node's ranks, which end with the codes of ``exits``; return the command's exit code."""
    # The agent logs a report of a failed rank; the rank itself has said what happened.
    for name in ("torch.distributed.elastic", "torch.multiprocessing", "torch.distributed.elastic.multiprocessing.api"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGHUP,SIGQUIT"  # the others are ours
    agent: _Agent | None = None
    try:
        spec = WorkerSpec(
            role="default", local_world_size=num_local, entrypoint=body, args=args, rdzv_handler=_rendezvous(meeting),
            max_restarts=max_restarts, monitor_interval=0.1,
        )  # fmt: skip
        agent = _Agent(spec, DefaultLogsSpecs(), START_METHOD)
        with agent.hearing(), _place_at(spec.rdzv_handler):
            result: Any = agent.run()
    except _Asked as error:
        say(f"stopped by {error} before the ranks were started")
        return AGAIN
    except SignalException as error:
        return 128 + error.sigval
    except (RendezvousError, dist.DistError) as error:
        if agent is not None and agent.heard is not None:
            return AGAIN
        say(f"the nodes did not meet: {error}")
        return AGAIN
    if result is None or not result.is_failed():  # None: the other nodes have finished without this one
        return 0
    rank, failure = min(result.failures.items(), key=lambda item: item[1].timestamp)
    if failure.exitcode == AGAIN or (agent.heard is not None and failure.exitcode not in (HOPELESS, BUG)):
        return AGAIN
    if failure.exitcode < 0:
        say(f"rank {rank} was ended by {signal.Signals(-failure.exitcode).name}")
    return 1


class _Asked(Exception):
    """A signal came while there was no rank to pass it on to."""


class _Agent(LocalElasticAgent):
    """``heard`` is the first signal that asked to stop."""

    heard: signal.Signals | None = None
    _since = 0.0

    @contextlib.contextmanager
    def hearing(self) -> Iterator[None]:
        """Hear the signals that ask to stop."""
        former = {number: signal.signal(number, self._hear) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.heard is None:
            self.heard, self._since = signal.Signals(number), time.monotonic()
            if not self._pids():
                raise _Asked(self.heard.name)
            self._send(signal.SIGTERM)
        elif time.monotonic() - self._since > SAME_SECONDS:
            self._send(signal.SIGKILL)
            os._exit(128 + number)

    def _pids(self) -> list[int]:
        return [] if self._pcontext is None else [pid for pid in self._pcontext.pids().values() if pid is not None]

    def _send(self, number: signal.Signals) -> None:
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # Ranks are born with these signals held back, until they can answer them.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            started: Any = super()._start_workers(worker_group)  # pyright: ignore[reportCallIssue]
            for number in SIGNALS:
                signal.signal(number, self._hear)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._end_the_left()
        result: Any = super()._monitor_workers(worker_group)  # pyright: ignore[reportCallIssue]
        if result.state == WorkerState.FAILED:
            codes = {failure.exitcode for failure in result.failures.values()}
            if self.heard is not None or codes & set(LEAVING):
                self._remaining_restarts = 0
        return result

    def _end_the_left(self) -> None:
        """End all ranks where one was lost. Torch would ask them to stop, for which one that waits on a GPU has no ear."""
        for pid in self._pids():
            with contextlib.suppress(ChildProcessError):
                ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is not None and not (ended.si_code == os.CLD_EXITED and ended.si_status in (0, *LEAVING)):
                    self._send(signal.SIGKILL)
                    return


def _rendezvous(meeting: Meeting) -> RendezvousHandler:
    if meeting.place is None:
        return _Loopback(meeting.run_id)
    parameters = RendezvousParameters(
        "c10d", meeting.place, meeting.run_id, meeting.num_nodes, meeting.num_nodes, **meeting.settings
    )
    return get_rendezvous_handler(parameters)


@contextlib.contextmanager
def _place_at(handler: RendezvousHandler) -> Iterator[None]:
    """Hold this node's place at the meeting, which stays open for nodes that come back.

    A thread of the handler says every few seconds that this node is alive. It must have ended before the interpreter does:
    when the node with the store has left first, its receive fails in a C++ frame that cannot be unwound, which aborts.
    """
    try:
        yield
    finally:
        if isinstance(handler, DynamicRendezvousHandler):
            handler._stop_heartbeats()  # Torch's shutdown() stops them too, but also closes the meeting for good.


class _Loopback(RendezvousHandler):
    """The meeting of one node with itself, at a store that listens on 127.0.0.1; torch's would listen on every address."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._info = RendezvousInfo(store, 0, 1, RendezvousStoreInfo("127.0.0.1", port))

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "loopback"

    def next_rendezvous(self) -> RendezvousInfo:
        return self._info

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True
