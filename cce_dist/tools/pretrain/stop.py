"""Signals that ask a run to stop, and how all ranks come to stop after the same step."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist.tools.pretrain.exits import AGAIN, CheckpointError, say, writing
from cce_dist.tools.pretrain.ranks import Ranks

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
FAILED = 1000  # no signal's number
SAME_SECONDS = 2.0  # a terminal, a scheduler and an agent may each pass one wish on
OUTSIDE = "stopped by {} before the first step or after the last"


@contextlib.contextmanager
def signal_handlers(numbers: Sequence[signal.Signals], once: Callable[[int], None]) -> Iterator[None]:
    """Have the first of some signals call ``once``; one of ``SIGNALS`` that comes ``SAME_SECONDS`` later ends the process.

    A SIGHUP that ``nohup`` keeps from the process is left alone.
    """
    first: list[float] = []  # its time

    def hear(number: int, frame: FrameType | None) -> None:
        if not first:
            first.append(time.monotonic())
            once(number)
        elif number in SIGNALS and time.monotonic() - first[0] > SAME_SECONDS:
            os._exit(128 + number)  # ranks die with their agent

    heard = [n for n in numbers if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
    former = {number: signal.signal(number, hear) for number in heard}
    try:
        yield
    finally:
        for number, handler in former.items():
            # Who passes a signal on may do so again, while the process says what happened. A block inside may have heard it.
            is_heard = first or signal.getsignal(number) is signal.SIG_IGN
            signal.signal(number, signal.SIG_IGN if is_heard else handler)


def exit_before_training(number: int) -> NoReturn:
    """End a process that is the whole run, outside of the training loop: nothing can be lost there."""
    say(OUTSIDE.format(signal.Signals(number).name))
    os._exit(AGAIN)


class Agreement:
    """Has all ranks stop after the same step.

    Each step begins with an all-reduce of a number: the signal that a rank has heard, or 0. Its result is read one step later,
    so that no host waits for the step that its GPU has under way.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._asked = ranks, 0
        self._failure: CheckpointError | None = None
        self._flag: Tensor | None = None

    def remember(self, number: int) -> None:
        """Note a signal that asks this rank to stop."""
        self._asked = number

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
        wish = self._asked if self._failure is None else FAILED
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
