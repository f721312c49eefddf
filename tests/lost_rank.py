"""A rank of a group is killed in the middle of a run: the run goes on in the same bits, or with another number of ranks.

    python tests/lost_rank.py --ranks 4 --then 2 --device cuda

Three runs of the real command, side by side on GPUs: one that nothing happens to; one whose last rank is killed, and which its
launcher starts again; and one that is lost with its rank, and which goes on with ``--then`` ranks.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from chaos import assert_equal
from commands import Command, has_taken, kill
from toy_runs import history

STEPS, EVERY = 12, 5
LAST = f"step-{STEPS:08d}"
ROUNDING = 1e-3  # nats; another number of ranks adds in another order


class Group:
    """Runs of one command in folders of their own."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.ranks, self.then = options.ranks, options.then
        self.device, self.folder = options.device, folder
        self.start = "spawn" if options.device == "cuda" else "forkserver"

    def run(self, name: str, ranks: int, *more: str, kill_one: bool = False) -> int:
        """Run to the end, or until a rank is killed after step EVERY + 1; return the exit code."""
        out, text = self.folder / name, ["--corpus", str(Path(__file__).parent), "--pattern", "*.py"]
        sizes = ["--preset", "toy", "--batch-size", "16", "--steps", str(STEPS), "--warmup", "4", "--eval-every", "6"]
        keep = ["--eval-batches", "2", "--checkpoint-every", str(EVERY), "--timeout", "60"]
        place = ["--tp", str(ranks), "--device", self.device, "--cache", str(self.folder / "cache"), "--out", str(out)]
        argv = ["pretrain", *text, *sizes, *keep, *place, *more]
        with Command(argv, self.folder / f"{name}.log", start=self.start) as command:
            if kill_one:
                command.wait_until(has_taken(out, EVERY + 1), 120)
                kill(command.ranks()[-1], signal.SIGKILL)
            return command.wait()

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def whole(self) -> None:
        assert self.run("whole", self.ranks) == 0, self.said("whole")

    def restarted(self) -> None:
        code = self.run("restarted", self.ranks, "--max-restarts", "1", kill_one=True)
        assert code == 0 and f"resumed after step {EVERY}" in self.said("restarted"), self.said("restarted")

    def other_ranks(self) -> None:
        code = self.run("lost", self.ranks, kill_one=True)
        assert code != 0, self.said("lost")
        assert self.run("lost", self.then) == 0, self.said("lost")
        assert f"resumed after step {EVERY}" in self.said("lost"), self.said("lost")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Kill a rank of a group, and go on with as many ranks, or with others."
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--then", type=int, default=1, help="ranks that the second lost run goes on with")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args(argv)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lost-rank-") as folder:
        group = Group(options, Path(folder))
        with ThreadPoolExecutor(3 if options.device == "cuda" else 1) as lanes:
            for lane in [lanes.submit(each) for each in (group.whole, group.restarted, group.other_ranks)]:
                lane.result()
        whole, restarted, lost = (history(group.folder / name) for name in ("whole", "restarted", "lost"))
        assert [record[:2] for record in lost] == [record[:2] for record in whole]
        apart = max(abs(one[2] - other[2]) for one, other in zip(lost, whole, strict=True))
        assert apart < ROUNDING, f"{options.then} ranks train to losses that are {apart} away\n{lost}\n{whole}"
        print(
            f"a rank of {options.ranks} killed: gone on with {options.then} ranks, losses {apart:.1e} apart at most",
            flush=True,
        )
        assert restarted == whole, f"the run that was started again is another\n{restarted}\n{whole}"
        assert_equal(*(group.folder / name / "checkpoints" / LAST for name in ("restarted", "whole")))
    print(f"a rank of {options.ranks} killed: started again in the same bits; {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
