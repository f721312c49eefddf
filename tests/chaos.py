"""A run is killed, asked to stop, starved of disk and damaged, round after round, and ends in the bits of an undisturbed one.

    python tests/chaos.py --rounds 200 --seed 0
    python tests/chaos.py --rounds 10 --device cuda
    python tests/chaos.py --ranks 4 --then 2 --device cuda

A round disturbs the real command once, on two ranks unless told otherwise; the next one goes on with what is left. Whenever a
run has finished, its losses and its last checkpoint are compared with those of a run that nothing happened to, and a new one
begins. ``--then`` kills the last rank alone: a run that is started again ends in the same bits, and another goes on with other
ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from commands import Command, descendants, has_taken, is_running, kill
from torch.utils._pytree import keystr, tree_flatten_with_path
from toy_runs import TEXT, history, newest

Act = Callable[[Command], None]
STEPS, EVERY, KEEP = 30, 4, 3
AGAIN = 75
ROUNDING = 1e-3  # nats; another number of ranks adds in another order


class Chaos:
    """The disturbances, by name; each starts the command and returns when it has ended."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.random = random.Random(options.seed)
        self.folder, self.cache = folder, folder / "cache"
        self.ranks = options.ranks
        self.device, self.log = options.device, folder / "log"
        self.start = "spawn" if self.device == "cuda" else "forkserver"
        # A disk of our own can be full in truth; where none may be mounted, a limit on the size of files stands for it.
        self.disk: Path | None = self.folder / "disk"
        self.disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "none", self.disk]
        if subprocess.run(mount, capture_output=True).returncode:
            self.disk = None
        self.out = (self.disk or self.folder) / "run-0"
        self.count = Counter[str]()
        self.finished = 0

    def __enter__(self) -> Chaos:
        return self

    def __exit__(self, *_: object) -> None:
        if self.disk is not None:
            subprocess.run(["umount", self.disk], check=True)

    def argv(self, out: Path, *more: str) -> list[str]:
        sizes = ["--preset", "toy", "--batch-size", "8", "--warmup", "4", "--steps", str(STEPS), "--eval-every", "10"]
        keep = ["--eval-batches", "2", "--checkpoint-every", str(EVERY), "--keep", str(KEEP), "--timeout", "60"]
        where = ["--tp", str(self.ranks), "--device", self.device, "--cache", str(self.cache), "--out", str(out)]
        return ["pretrain", *TEXT, *sizes, *keep, *where, *more]

    def run(self, *more: str, out: Path | None = None, limit: int | None = None, act: Act | None = None) -> int:
        """Start the command, let ``act`` happen to it, wait, and return its exit code; nobody is left behind."""
        self.log.unlink(missing_ok=True)
        with Command(self.argv(out or self.out, *more), self.log, start=self.start, file_limit=limit) as command:
            if act is not None:
                act(command)
            return command.wait(200)

    def tail(self) -> str:
        """Return what the last command said."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def some_time(self, command: Command) -> None:
        """Wait until a step or a moment that chance chooses."""
        goal = self.random.choice([None, self.newest() + self.random.randint(1, 8)])
        wait = self.random.random() * (2.0 if self.start == "forkserver" else 15.0)
        start = time.monotonic()
        while is_running(command.pid) and time.monotonic() - start < 60:
            if time.monotonic() - start > wait if goal is None else self.last_step() >= goal:
                break
            time.sleep(0.002)
        time.sleep(self.random.random() * 0.05)
        command.family |= set(descendants(command.pid))

    def newest(self) -> int:
        return newest(self.out)

    def last_step(self) -> int:
        with contextlib.suppress(OSError):
            text = (self.out / "metrics.jsonl").read_bytes()
            return max(map(int, re.findall(rb'{"step": (\d+), "split": "train"', text)), default=0)
        return 0

    def kill_a_rank(self, of_agent: bool = False) -> int:
        def act(command: Command) -> None:
            self.some_time(command)
            kill(self.random.choice((not of_agent and command.ranks()) or [command.pid]), signal.SIGKILL)

        return self.run("--max-restarts", self.random.choice("01"), act=act)

    def kill_the_agent(self) -> int:
        return self.kill_a_rank(of_agent=True)

    def ask_to_stop(self) -> int:
        asked = self.random.choice([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
        of_all = self.random.random() < 0.7

        def act(command: Command) -> None:
            self.some_time(command)
            everyone = command.ranks()
            kill(command.pid if of_all or not everyone else self.random.choice(everyone), asked)

        code = self.run(act=act)
        # A process that has not come to hear signals yet ends as the system has it: if it is one rank, it is lost to the other.
        is_lost = not of_all and "after step" not in self.tail() and "lost a peer" in self.tail()
        expected = (0, AGAIN, -asked, *[1] * is_lost)
        assert code in expected or not self.tail(), f"{asked.name}: exit code {code}\n{self.tail()}"
        if "after step" in self.tail():
            assert self.newest() == self.last_step(), "work was lost\n" + self.tail()
        elif code == AGAIN:
            assert re.search(" before the | was ended by ", self.tail()), self.tail()
        return code

    def fill_the_disk(self) -> int:
        room = self.random.choice([0, 4, 16, 64, 300, 400, 1000]) << 10
        if self.disk is None:
            code, reason = self.run(limit=room), "File too large"
        else:
            ballast, reason = self.disk / "ballast", "No space left on device"
            with open(ballast, "wb") as file:
                file.write(bytes(max(0, shutil.disk_usage(self.disk).free - room)))
            code = self.run()
            ballast.unlink()
        assert code in (0, 1), f"full disk: exit code {code}\n{self.tail()}"
        assert code == 0 or re.search(f"{reason}|is the disk full", self.tail()), self.tail()
        return code

    def damage(self) -> int:
        """Spoil what is on disk between two runs."""
        checkpoints = self.out / "checkpoints"
        there = sorted(checkpoints.glob("step-????????"))
        kinds = ["latest", "garbage", "scratch", "metrics"] + ["flip", "cut", "drop"] * 2 * (len(there) > 1)
        kind = self.random.choice(kinds)
        self.count[f"damage: {kind}"] += 1
        if not there:
            return self.run(act=self.stop_soon)
        files = sorted(path for path in there[-1].rglob("*") if path.is_file())
        chosen = self.random.choice(files)
        if kind == "latest":
            (checkpoints / "latest").unlink(missing_ok=True)
        elif kind == "garbage":
            (checkpoints / "latest").write_bytes(self.random.randbytes(20))
        elif kind == "scratch":
            shutil.copytree(there[-1], checkpoints / f"step-{STEPS:08d}.tmp")
        elif kind == "metrics":
            with open(self.out / "metrics.jsonl", "ab") as file:
                file.write(self.random.randbytes(30) + b'\n{"step": 5}\n[]\n{"ste')
        elif kind == "flip":
            content = bytearray(chosen.read_bytes())
            content[self.random.randrange(len(content))] ^= 1 << self.random.randrange(8)
            chosen.write_bytes(content)
        elif kind == "cut":
            os.truncate(chosen, self.random.randrange(chosen.stat().st_size))
        else:
            chosen.unlink()
        return self.run(act=self.stop_soon)

    def stop_soon(self, command: Command) -> None:
        self.some_time(command)
        if self.random.random() < 0.7:
            kill(command.pid, signal.SIGTERM)

    def play(self, rounds: int, seconds: float) -> int:
        """Play rounds until there were enough, or the time is up; return how many."""
        whole = self.folder / "whole"
        assert self.run(out=whole) == 0, self.tail()
        acts = [self.kill_a_rank, self.kill_the_agent, self.fill_the_disk, self.damage, *[self.ask_to_stop] * 2]
        start = time.monotonic()
        for number in range(rounds):
            if time.monotonic() - start > seconds:
                return number
            act = self.random.choice(acts)
            code = act()
            self.count[act.__name__] += 1
            print(
                f"round {number + 1}: {act.__name__}, exit code {code}, checkpoint of step {self.newest()}", flush=True
            )
            if self.newest() == STEPS:
                self.finish(whole)
        self.finish(whole)
        return rounds

    def lose_a_rank(self, then: int) -> None:
        """Lose the last rank of a run that is started again, and of one that goes on with ``then`` ranks."""

        def act(command: Command) -> None:
            command.wait_until(has_taken(self.out, EVERY + 2), 120)
            kill(command.ranks()[-1], signal.SIGKILL)

        whole, began = self.folder / "whole", time.monotonic()
        assert self.run(out=whole) == 0, self.tail()
        assert self.run("--max-restarts", "1", act=act) == 0 and "resumed after step" in self.tail(), self.tail()
        self.finish(whole)
        assert self.run(act=act) != 0, self.tail()
        self.ranks, former = then, self.ranks
        assert self.run() == 0 and "resumed after step" in self.tail(), self.tail()
        pairs = list(zip(history(self.out), history(whole), strict=True))
        apart = max(abs(ours[2] - theirs[2]) for ours, theirs in pairs)
        assert all(ours[:2] == theirs[:2] for ours, theirs in pairs) and apart < ROUNDING, pairs
        ends = f"started again in the same bits; with {then} ranks, losses {apart:.1e} apart at most"
        print(f"a rank of {former} killed: {ends}; {time.monotonic() - began:.0f} s")

    def finish(self, whole: Path) -> None:
        """Finish the run, compare it with the undisturbed one, and begin another."""
        code = self.run()
        assert code == 0, f"a run that nothing disturbs any more: exit code {code}\n{self.tail()}"
        assert history(self.out) == history(whole), f"{self.out} is not the run that it was\n{self.tail()}"
        name = f"step-{STEPS:08d}"
        assert_equal(self.out / "checkpoints" / name, whole / "checkpoints" / name)
        self.finished += 1
        shutil.rmtree(self.out)
        self.out = self.out.with_name(f"run-{self.finished}")


def assert_equal(one: Path, other: Path) -> None:
    """Compare checkpoints tensor by tensor; their files need not be laid out alike."""
    left, right = (read_whole(each) for each in (one, other))
    assert left.keys() == right.keys()
    for name, value in left.items():
        same = torch.equal(value, right[name]) if isinstance(value, torch.Tensor) else value == right[name]
        assert same, f"{name} of {one} is not that of {other}"


def read_whole(checkpoint: Path) -> dict[str, Any]:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with tempfile.TemporaryDirectory() as folder:
        dcp_to_torch_save(checkpoint, f"{folder}/whole.pt")
        tensors = torch.load(f"{folder}/whole.pt", weights_only=False)
    return {keystr(path): value for path, value in tree_flatten_with_path(tensors)[0]}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Disturb a run at random, and compare it with an undisturbed one.")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further round after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2, help="that share the vocabulary")
    parser.add_argument("--then", type=int, help="lose a rank, and go on with as many")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder, Chaos(options, Path(folder)) as chaos:
        if options.then:
            chaos.lose_a_rank(options.then)
            return 0
        count = chaos.play(options.rounds, options.seconds)
    counts = ", ".join(f"{name.replace('_', ' ')} {number}" for name, number in sorted(chaos.count.items()))
    print(f"{count} rounds ({counts}); {chaos.finished} finished runs, all bit for bit those of an undisturbed one")
    return 0


if __name__ == "__main__":
    sys.exit(main())
