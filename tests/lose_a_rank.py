"""Kill the last rank of a run: started again, it ends in the bits of an undisturbed run; with other ranks it goes on.

python tests/lose_a_rank.py --ranks 2 --then 1
python tests/lose_a_rank.py --ranks 4 --then 2 --device cuda
"""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from commands import Command, has_taken, kill
from torch.utils._pytree import keystr, tree_flatten_with_path
from toy_runs import TEXT, history

STEPS, EVERY = 30, 4
ROUNDING = 1e-3  # nats; another number of ranks adds in another order


class Job:
    """Runs of the real command in one folder; each is started, disturbed if asked, and waited for."""

    def __init__(self, device: str, ranks: int, folder: Path) -> None:
        self.device, self.ranks, self.folder = device, ranks, folder
        self.log = folder / "log"

    def run(self, out: Path, *more: str, act: Callable[[Command], None] | None = None) -> int:
        """Start the command, let ``act`` happen to it, wait, and return its exit code; nobody is left behind."""
        sizes = ["--preset", "toy", "--batch-size", "8", "--warmup", "4", "--steps", str(STEPS), "--eval-every", "10"]
        keep = ["--eval-batches", "2", "--checkpoint-every", str(EVERY), "--timeout", "60"]
        where = ["--tp", str(self.ranks), "--device", self.device, "--cache", str(self.folder / "cache")]
        self.log.unlink(missing_ok=True)
        start = "spawn" if self.device == "cuda" else "forkserver"
        with Command(
            ["pretrain", *TEXT, *sizes, *keep, *where, "--out", str(out), *more], self.log, start=start
        ) as command:
            if act is not None:
                act(command)
            return command.wait(200)

    def tail(self) -> str:
        """Return what the last command said."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


def lose_a_rank(job: Job, then: int) -> None:
    """Lose the last rank of a run that is started again, and of one that goes on with ``then`` ranks."""
    whole, restarted, fewer = (job.folder / name for name in ("whole", "restarted", "fewer"))

    def lose(out: Path) -> Callable[[Command], None]:
        def act(command: Command) -> None:
            command.wait_until(has_taken(out, EVERY + 2), 120)
            kill(command.ranks()[-1], signal.SIGKILL)

        return act

    began = time.monotonic()
    assert job.run(whole) == 0, job.tail()
    assert job.run(restarted, "--max-restarts", "1", act=lose(restarted)) == 0, job.tail()
    assert "resumed after step" in job.tail() and history(restarted) == history(whole), job.tail()
    name = f"checkpoints/step-{STEPS:08d}"
    assert_equal(restarted / name, whole / name)
    assert job.run(fewer, act=lose(fewer)) != 0, job.tail()
    job.ranks, former = then, job.ranks
    assert job.run(fewer) == 0 and "resumed after step" in job.tail(), job.tail()
    pairs = list(zip(history(fewer), history(whole), strict=True))
    apart = max(abs(ours[2] - theirs[2]) for ours, theirs in pairs)
    assert all(ours[:2] == theirs[:2] for ours, theirs in pairs) and apart < ROUNDING, pairs
    ends = f"started again in the same bits; with {then} ranks, losses {apart:.1e} apart at most"
    print(f"a rank of {former} killed: {ends}; {time.monotonic() - began:.0f} s")


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
    parser = argparse.ArgumentParser(description="Kill a rank of a run, and compare it with an undisturbed one.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2, help="that share the vocabulary")
    parser.add_argument("--then", type=int, default=1, help="ranks to go on with")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="lose-a-rank-") as folder:
        lose_a_rank(Job(options.device, options.ranks, Path(folder)), options.then)
    return 0


if __name__ == "__main__":
    sys.exit(main())
