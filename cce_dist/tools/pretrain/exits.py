"""How a run ends: exit codes, the errors behind them, and the signals that ask it to stop.

| code | of the command | of a rank under an agent |
|---|---|---|
| 0 | finished | finished |
| 2 | an argument that cannot be read | |
| 1 | a restart does not help: usage, corpus, a loss that is not finite, a full disk; or a bug | the same |
| 76 | | a lost peer: the agent starts the ranks again |
| 75 | stopped on request: the same command goes on | the same |
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

AGENT = "CCE_DIST_AGENT"  # the process id of the agent, where this package has started it
HOPELESS, AGAIN, LOST = 1, 75, 76  # the last two as BSD's sysexits.h has them
NO_RESTART = signal.SIGUSR2  # tells our agent that its ranks leave, and are not to be started again
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
SAME_SECONDS = 2.0  # a terminal, a scheduler and an agent may each pass one wish on
OUTSIDE = "stopped by {} before the first step or after the last"


class UsageError(Exception):
    """The run that was asked for cannot be done. Every rank raises it, with the same message."""


class CheckpointError(Exception):
    """Something of the run could not be stored. Every rank raises it."""


class Stopped(Exception):
    """A signal asked the run to stop. Every rank raises it, after the same step."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise the system's refusal to write as a ``CheckpointError``."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot write {error.filename or path}: {error.strerror or error}") from error


def is_reporting_rank() -> bool:
    """Whether this process tells what all ranks know: rank 0, or a process that is no rank."""
    return os.environ.get("RANK", "0") == "0"


def say(line: str) -> None:
    """Print one line about the run on stderr."""
    print(f"cce-dist pretrain: {' '.join(line.split())}", file=sys.stderr, flush=True)


def tell_torchrun(code: int) -> None:
    """Tell the agent to end. After any exit code of a rank but 0 it would start all ranks again."""
    if code in (HOPELESS, AGAIN) and "TORCHELASTIC_RUN_ID" in os.environ:
        if os.environ.get("LOCAL_RANK") == "0":
            ours = os.environ.get(AGENT) == str(os.getppid())
            os.kill(os.getppid(), NO_RESTART if ours else signal.SIGTERM)
        else:
            time.sleep(1)  # a rank that left before the agent knows would be restarted


@contextlib.contextmanager
def signal_handlers(numbers: Sequence[signal.Signals], once: Callable[[int], None]) -> Iterator[None]:
    """Have the first of some signals call ``once``; one that comes ``SAME_SECONDS`` later ends the process.

    A SIGHUP that ``nohup`` keeps from the process is left alone.
    """
    first: list[float] = []  # its time

    def hear(number: int, _: object) -> None:
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
            # Who passes a signal on may do so again. A block inside may have heard it.
            is_heard = first or signal.getsignal(number) is signal.SIG_IGN
            signal.signal(number, signal.SIG_IGN if is_heard else handler)


def exit_before_training(number: int) -> NoReturn:
    """End a process that is the whole run, outside of the training loop: nothing can be lost there."""
    say(OUTSIDE.format(signal.Signals(number).name))
    os._exit(AGAIN)
