"""Signals that ask a run to stop, and how all ranks come to stop after the same step."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist.pretrain.exits import AGAIN, CheckpointError, Stopped, say, speaks_for_all, tell_torchrun, writing
from cce_dist.pretrain.ranks import Ranks

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
FAILED = 1000  # no signal's number
SAME_SECONDS = 2.0  # a terminal, a scheduler and an agent may each pass one wish on


@contextlib.contextmanager
def hearing(
    numbers: Sequence[signal.Signals], once: Callable[[int], None], at_last: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Have the first of some signals call ``once``; one of ``SIGNALS`` that comes ``SAME_SECONDS`` later ends the process.

    A SIGHUP that ``nohup`` keeps from the process is left alone.
    """
    first: list[float] = []  # its time

    def hear(number: int, frame: FrameType | None) -> None:
        if not first:
            first.append(time.monotonic())
            once(number)
        elif number in SIGNALS and time.monotonic() - first[0] > SAME_SECONDS:
            at_last()
            os._exit(128 + number)

    heard = [n for n in numbers if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
    former = {number: signal.signal(number, hear) for number in heard}
    try:
        yield
    finally:
        for number, handler in former.items():
            # Who passes a signal on may do so again, while the process says what happened.
            signal.signal(number, signal.SIG_IGN if first else handler)


class Notice:
    """As a context, hears what asks a rank to stop.

    Outside of the training loop, where nothing can be lost, the first signal raises ``Stopped`` at once. A thread ends the
    process after ``SAME_SECONDS`` if that has not come through: the main thread may wait in C++ for a rank that has left. In
    the loop, while ``patient``, a signal is remembered.
    """

    def __init__(self) -> None:
        self.name: str | None = None  # of the first signal
        self.raised: Stopped | None = None  # code that it came through may have made another exception of it
        self.patient = False
        self._left = threading.Event()
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> Notice:
        if threading.current_thread() is threading.main_thread():
            with contextlib.ExitStack() as exits:
                heard, pipe = os.pipe()
                os.set_blocking(pipe, False)
                threading.Thread(target=self._watch, args=(heard,), daemon=True).start()
                exits.callback(os.close, pipe)
                exits.enter_context(hearing(SIGNALS, self._hear))
                exits.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(pipe, warn_on_full_buffer=False))
                exits.callback(self._left.set)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # an agent starts its ranks with signals held back
                self._exits = exits.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def _hear(self, number: int) -> None:
        self.name = signal.Signals(number).name
        if not self.patient:
            self.raised = Stopped(_early(self.name))
            raise self.raised

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


def _early(name: str) -> str:
    return f"stopped by {name} before the first step"


class Agreement:
    """Has all ranks stop after the same step.

    Each step begins with an all-reduce of a number: the signal that a rank has heard, or 0. Its result is read one step later,
    so that no host waits for the step that its GPU has under way.
    """

    def __init__(self, ranks: Ranks, notice: Notice) -> None:
        self._ranks, self._notice = ranks, notice
        self._failure: CheckpointError | None = None
        self._flag: Tensor | None = None

    @contextlib.contextmanager
    def noting(self, path: Path) -> Iterator[None]:
        """Note what goes wrong on the first rank while it writes to ``path``: all ranks stop a little later."""
        try:
            with writing(path):
                yield
        except CheckpointError as error:
            self._failure = self._failure or error

    def before_step(self) -> str | None:
        """Return None if all ranks take the next step, else the name of the signal that asks them to stop.

        Every rank calls it, and raises what was noted on the first one.
        """
        asked = 0 if self._notice.name is None else int(signal.Signals[self._notice.name])
        wish = asked if self._failure is None else FAILED
        if self._ranks.world_size > 1:
            flag = torch.full((), wish, dtype=torch.int32, device=self._ranks.device)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            flag, self._flag = self._flag, flag
            wish = 0 if flag is None else int(flag)
        if wish == FAILED:
            self.settle()
        return signal.Signals(wish).name if wish else None

    def settle(self) -> None:
        """Raise, on every rank, what was noted on the first one. Every rank calls it."""
        failure = self._ranks.gather(self._failure)[0]
        if failure is not None:
            raise failure
