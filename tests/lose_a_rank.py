"""Kill the last rank of a run: started again, it ends in the bits of an undisturbed run; with other ranks it goes on.

python tests/lose_a_rank.py --ranks 2 --then 1
python tests/lose_a_rank.py --ranks 4 --then 2 --device cuda
"""

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from commands import Command, has_taken, kill
from torch.utils._pytree import keystr, tree_flatten_with_path
from toy_runs import TEXT, history

STEPS, EVERY = 30, 4
ROUNDING = 1e-3  # nats; another number of ranks adds in another order


def lose_a_rank(device: str, ranks: int, then: int, folder: Path) -> None:
    """Lose the last rank of a run that is started again, and of one that goes on with ``then`` ranks."""
    whole, restarted, fewer = (folder / name for name in ("whole", "restarted", "fewer"))
    sizes = ["--preset", "toy", "--batch-size", "8", "--warmup", "4", "--steps", str(STEPS), "--eval-every", "10"]
    sizes += ["--eval-batches", "2", "--checkpoint-every", str(EVERY), "--timeout", "60"]
    where = ["--device", device, "--cache", str(folder / "cache")]

    def run(out: Path, num_ranks: int, *more: str, lose: bool = False) -> tuple[int, str]:
        """Run the command, without its last rank from some step on, and return its exit code and what it said."""
        argv = ["pretrain", *TEXT, *sizes, *where, "--tp", str(num_ranks), "--out", str(out), *more]
        log = folder / "log"
        log.unlink(missing_ok=True)
        with Command(argv, log, start="spawn" if device == "cuda" else "forkserver") as command:
            if lose:
                command.wait_until(has_taken(out, EVERY + 2), 120)
                kill(command.ranks()[-1], signal.SIGKILL)
            return command.wait(200), command.text

    began = time.monotonic()
    code, said = run(whole, ranks)
    assert code == 0, said
    code, said = run(restarted, ranks, "--max-restarts", "1", lose=True)
    assert code == 0 and "resumed after step" in said and history(restarted) == history(whole), said
    name = f"checkpoints/step-{STEPS:08d}"
    assert_equal(restarted / name, whole / name)
    code, said = run(fewer, ranks, lose=True)
    assert code != 0, said
    code, said = run(fewer, then)
    assert code == 0 and "resumed after step" in said, said
    pairs = list(zip(history(fewer), history(whole), strict=True))
    apart = max(abs(ours[2] - theirs[2]) for ours, theirs in pairs)
    assert all(ours[:2] == theirs[:2] for ours, theirs in pairs) and apart < ROUNDING, pairs
    ends = f"started again in the same bits; with {then} ranks, losses {apart:.1e} apart at most"
    print(f"a rank of {ranks} killed: {ends}; {time.monotonic() - began:.0f} s")


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
        lose_a_rank(options.device, options.ranks, options.then, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
