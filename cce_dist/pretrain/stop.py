"""Signals that ask a run to stop, and how all ranks come to stop after the same step.

The first rank grants steps: its host says, one step ahead, up to where all may go. The other hosts read that before each step.
So a wish to stop, wherever it is heard, ends the grants, and every rank stops where they end. Only hosts wait, for one
another and never for a GPU.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist

from cce_dist.pretrain.exits import AGAIN, Stopped, say, speaks_for_all, tell_torchrun
from cce_dist.pretrain.ranks import Ranks

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
SAME_SECONDS = 2.0  # a terminal, a scheduler and an agent may each pass one wish on


class Notice:
    """As a context, hears SIGTERM, SIGINT, SIGUSR1 and SIGHUP (which ``nohup`` keeps from it).

    Outside of the training loop, where nothing can be lost, the first one raises ``Stopped`` at once. A thread ends the process
    after ``SAME_SECONDS`` if that has not come through: the main thread may wait in C++ for a rank that has left. In the loop,
    while ``patient``, a signal is remembered. A second one that comes ``SAME_SECONDS`` later ends the process.

    Attributes:
        name: Of the first signal.
        raised: What it raised outside of the loop. Code that it came through may have made another exception of it.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.raised: Stopped | None = None
        self.patient = False
        self._since = 0.0
        self._former: dict[signal.Signals, Any] = {}
        self._left = threading.Event()
        self._pipe = self._former_pipe = -1

    def __enter__(self) -> Notice:
        if threading.current_thread() is threading.main_thread():
            heard, self._pipe = os.pipe()
            os.set_blocking(self._pipe, False)
            threading.Thread(target=self._watch, args=(heard,), daemon=True).start()
            heard_here = [number for number in SIGNALS if not is_kept_away(number)]
            self._former = {number: signal.signal(number, self._hear) for number in heard_here}
            self._former_pipe = signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
            try:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # an agent starts its ranks with signals held back
            except Stopped:
                self.__exit__()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        for number, handler in self._former.items():
            # Who passes a signal on may do so again, while the process says what happened.
            signal.signal(number, handler if self.name is None else signal.SIG_IGN)
        if self._pipe >= 0:
            signal.set_wakeup_fd(self._former_pipe)
            os.close(self._pipe)
            self._pipe = -1

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.name is None:
            self.name, self._since = signal.Signals(number).name, time.monotonic()
            if not self.patient:
                self.raised = Stopped(_early(self.name))
                raise self.raised
        elif time.monotonic() - self._since > SAME_SECONDS:
            os._exit(128 + number)

    def _watch(self, heard: int) -> None:
        """End the process if a signal outside of the loop has not ended it; on a thread of its own."""
        with open(heard, "rb", buffering=0) as pipe:
            while number := pipe.read(1):
                if number[0] not in SIGNALS or self._left.wait(SAME_SECONDS) or self.patient:
                    continue
                if speaks_for_all():
                    say(_early(signal.Signals(number[0]).name))
                tell_torchrun(AGAIN)
                os._exit(AGAIN)


def is_kept_away(number: signal.Signals) -> bool:
    """Whether a process was started by ``nohup``, and this is the signal that it is not to hear."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


def _early(name: str) -> str:
    return f"stopped by {name} before the first step"


class Stop(NamedTuple):
    """Why all ranks stop: a signal's name, or what went wrong on the first rank."""

    reason: str
    failed: bool = False
    passing: bool = False


class Agreement:
    """Has all ranks stop after the same step.

    Args:
        ranks: This process's place.
        notice: The signals of this process.
        timeout_seconds: A rank that hears nothing of the first one for so long raises.
    """

    _numbers = itertools.count()

    def __init__(self, ranks: Ranks, notice: Notice, timeout_seconds: float) -> None:
        self._is_first, self._notice, self._timeout = ranks.rank == 0, notice, timeout_seconds
        self._granted: int | None = None
        self._stop: Stop | None = None
        self._asked = False
        number = next(self._numbers)  # ranks make the same ones in the same order
        self._store: dist.Store | None = None
        if ranks.world_size > 1:
            self._store = dist.PrefixStore(f"stop-{number}", dist.distributed_c10d._get_default_store())

    def fail(self, reason: str, passing: bool = False) -> None:
        """Have all ranks stop because of what went wrong on this one, the first."""
        self._stop = self._stop or Stop(reason, True, passing)

    def before(self, step: int) -> Stop | None:
        """Return None if all ranks take this step, else why none does. Every rank calls it, before each step."""
        if self._is_first:
            self._grant(step)
        elif self._store is not None:
            if self._notice.name is not None and not self._asked:
                self._store.set("asked", self._notice.name)
                self._asked = True
            self._await(step, self._store)
        assert self._granted is not None
        return None if step <= self._granted else self._stop

    def settle(self) -> Stop | None:
        """Return what went wrong on the first rank after the last grant. Every rank calls it, at the end."""
        stop = self._stop if self._stop is not None and self._stop.failed else None
        if self._store is None:
            return stop
        box = [stop]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def _grant(self, step: int) -> None:
        ahead = 0 if self._store is None else 1  # alone, nobody has to hear of it first
        if self._granted is None:
            self._granted = step - 1
        if self._stop is None:
            name = self._notice.name
            if name is None and self._store is not None and self._store.check(["asked"]):
                name = self._store.get("asked").decode()
            self._stop = None if name is None else Stop(name)
        if self._stop is None:
            self._granted = step + ahead
        if self._store is not None:
            self._store.set("granted", json.dumps([self._granted, self._stop]))

    def _await(self, step: int, store: dist.Store) -> None:
        deadline, pause = time.monotonic() + self._timeout, 0.0002
        while self._stop is None and (self._granted is None or self._granted < step):
            if store.check(["granted"]):
                granted, stop = json.loads(store.get("granted"))
                self._granted, self._stop = granted, None if stop is None else Stop(*stop)
                if granted >= step:
                    return
            if time.monotonic() > deadline:
                raise RuntimeError(f"Timed out: the first rank has not come to step {step} for {self._timeout:g} s")
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
