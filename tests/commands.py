"""The real command in processes of its own, for tests that send real signals: quick, because all of them are forked from one
process that has imported what they need; and other programs that start it.
"""

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from support import ranks

from cce_dist.tools import cli
from cce_dist.tools.pretrain import torchrun


class Program:
    """A program that starts the command, such as torchrun, its output added to a file. As a context, leaves nobody."""

    process: Any

    def __init__(self, argv: list[str], output: Path, environment: dict[str, str] | None = None) -> None:
        self.output = output
        self.family: set[int] = set()
        with open(output, "a") as file:
            self.process = subprocess.Popen(argv, env=os.environ | (environment or {}), stdout=file, stderr=file)
        self.pid: int = self.process.pid

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End the program and all that it has started, as a power failure does."""
        for pid in [*reversed(list(descendants(self.pid))), *self.family, self.pid]:
            kill(pid, signal.SIGKILL)
        self.join(20)

    def join(self, seconds: float) -> int | None:
        """Wait for the end, and return the exit code, or None if it has not come."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.process.returncode

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    def wait_until(self, happened: Callable[[], bool], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not happened():
            assert is_running(self.pid) and time.monotonic() < deadline, self.text
            time.sleep(0.002)
        self.family |= set(descendants(self.pid))

    def wait(self, seconds: float = 150) -> int:
        """Wait for the end, and return the exit code; nobody may be left behind."""
        deadline = time.monotonic() + seconds
        while (code := self.join(0.02)) is None:
            assert time.monotonic() < deadline, f"the command hangs\n{self.text}"
            self.family |= set(descendants(self.pid))
        deadline = time.monotonic() + 20
        while left := [pid for pid in self.family if is_running(pid)]:
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.02)
        return code


class Command(Program):
    """``cce-dist`` with some arguments.

    Args:
        argv: Its arguments.
        output: File that its output is added to.
        start: How its processes start. A GPU needs "spawn", which takes seconds more.
        environment: What its environment has besides.
        main: Another program: a function that takes the arguments and returns the exit code.
    """

    def __init__(
        self,
        argv: list[str],
        output: Path,
        *,
        start: str = "forkserver",
        environment: dict[str, str] | None = None,
        main: Callable[[list[str]], int] = cli.main,
    ) -> None:
        context: Any = multiprocessing.get_context(start)
        if start == "forkserver":
            ranks.preload()
        self.output, self.family = output, set()
        how = (argv, output, "fork" if start == "forkserver" else start, environment or {}, main)
        self.process = context.Process(target=_run, args=how)
        self.process.start()
        self.pid = self.process.pid

    def join(self, seconds: float) -> int | None:
        self.process.join(seconds)
        return self.process.exitcode

    def ranks(self) -> list[int]:
        found = []
        for child in descendants(self.pid):
            with contextlib.suppress(OSError):
                if b"resource_tracker" not in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(child)
        return sorted(found)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def environments_of(num_ranks: int) -> list[dict[str, str]]:
    """Return the environment of each of torchrun's ranks."""
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num_ranks)}
    return [group | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


def outputs_of(
    main: Callable[[list[str]], int], argv: list[str], folder: Path, num_ranks: int | None = None
) -> list[str]:
    """Run a program to its end, and return its output; with ``num_ranks`` once a rank, in the environment of torchrun's ranks.

    Args:
        folder: Takes a file of output for each process.
    """
    environments = [{}] if num_ranks is None else environments_of(num_ranks)
    how: dict[str, Any] = {"start": ranks.START_METHOD, "main": main}
    with contextlib.ExitStack() as stack:
        commands = []
        for rank, each in enumerate(environments):
            command = Command(argv, folder / f"output{rank}", environment=each, **how)
            commands.append(stack.enter_context(command))
        for command in commands:
            assert command.wait(280) == 0, command.text
    return [command.text for command in commands]


def _run(argv: list[str], output: Path, start: str, environment: dict[str, str], main: Callable) -> None:
    for number in (signal.SIGHUP, signal.SIGINT):  # ``nohup`` and a shell's ``&`` have the tests ignore them
        signal.signal(number, signal.SIG_DFL if number == signal.SIGHUP else signal.default_int_handler)
    os.setsid()
    handle = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.environ.update({"OMP_NUM_THREADS": "1"} | environment)
    torch.set_num_threads(1)  # this process was forked from one that had read the variable already
    torchrun.START_METHOD = ranks.START_METHOD = start
    try:
        code = main(argv)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def has_taken(out: Path, step: int) -> Callable[[], bool]:
    """Return whether a run has come to a step, as something to ask again and again."""
    metrics = out / "metrics.jsonl"
    return lambda: metrics.exists() and f'{{"step": {step},' in metrics.read_text(errors="replace")


def descendants(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield int(child)
            yield from descendants(int(child))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
