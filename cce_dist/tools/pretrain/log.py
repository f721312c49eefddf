"""The first rank's records: metrics.jsonl, a progress bar, TensorBoard and Weights & Biases."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from cce_dist.tools.arguments import MOST
from cce_dist.tools.pretrain.folder import write_whole
from cce_dist.tools.pretrain.recipe import Recipe

# The default lock holds a named semaphore, which would leak when a rank leaves by os._exit.
tqdm.set_lock(threading.RLock())

SILENCE = 10  # seconds without a line, at most, where output goes to a file or a pipe


class Log:
    """Metrics of one run as one clean history, however often it was resumed.

    Records are JSON objects, one a line: ``split`` is "train" or "val", ``loss`` is in nats per token. Records past ``step``,
    from which the run goes on, are dropped. Methods raise ``OSError`` where the file could not be written whole.
    """

    def __init__(self, recipe: Recipe, step: int) -> None:
        path = recipe.out / "metrics.jsonl"
        kept = [record for record in read(path) if record["step"] <= step] if path.exists() and step else []
        write_whole(path, "".join(json.dumps(record) + "\n" for record in kept))
        # The file has no buffer: a record is on disk or its write raised, and nothing is left to fail at exit.
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the run
        self._board: Any = _tensorboard(recipe.out, step) if recipe.tensorboard else None
        self._wandb: Any = _wandb(recipe) if recipe.wandb else None
        # Without a terminal there is no bar: ``advance`` prints a line from time to time instead.
        self._bar = tqdm(total=recipe.steps, initial=step, unit="step", dynamic_ncols=True, disable=None)
        self._step, self._steps, self._loss, self._told = step, recipe.steps, "", time.monotonic()

    def write(self, record: dict[str, Any]) -> None:
        line = (json.dumps(record) + "\n").encode()
        if self._file.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._file.name))
        numbers = {
            f"{record['split']}/{name}": value for name, value in record.items() if name not in ("step", "split")
        }
        if self._board is not None:
            for name, value in numbers.items():
                self._board.add_scalar(name, value, record["step"])
        if self._wandb is not None:
            self._wandb.log(numbers, step=record["step"])
        if record["split"] == "train":
            shown = {name: f"{record[name]:,.0f}" for name in ("tokens_per_s", "peak_mb")}
            self._bar.set_postfix({"loss": f"{record['loss']:.3f}", **shown})
            self._loss = f"  loss {record['loss']:.4f}"

    def advance(self) -> None:
        """Count one step. Where there is no bar, print a line if none was printed for ten seconds."""
        self._bar.update()
        self._step += 1
        if self._bar.disable and time.monotonic() - self._told >= SILENCE:
            self.note(f"step {self._step:>6} of {self._steps}{self._loss}")

    def note(self, line: str) -> None:
        """Print a line above the bar. Training goes on, in silence, if the reader of our output has ended."""
        try:
            tqdm.write(line)
            sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        self._told = time.monotonic()

    def close(self) -> None:
        """Close all writers. A second call does nothing."""
        self._bar.close()
        self._file.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()
        self._board = self._wandb = None


def read(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics file, without lines that a crash cut short."""
    records = []
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # neither JSON nor UTF-8
            continue
        if _is_record(record):
            records.append(record)
    return records


def _is_record(value: Any) -> bool:
    if not isinstance(value, dict) or value.get("split") not in ("train", "val"):
        return False
    numbers = isinstance(value.get("loss"), float) and isinstance(value.get("uniform", 0.0), float)
    return numbers and isinstance(value.get("step"), int) and 0 <= value["step"] <= MOST


def _tensorboard(out: Path, step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(out / "tensorboard"), purge_step=step + 1)


def _wandb(recipe: Recipe) -> Any:
    import wandb  # pyright: ignore[reportMissingImports]

    # The folder names the run, so that a resumed one goes on there.
    name = hashlib.sha256(os.fsencode(recipe.out.absolute())).hexdigest()[:16]
    config = recipe.arguments()
    try:
        return wandb.init(
            project=recipe.wandb, id=name, name=recipe.out.name, resume="allow", dir=recipe.out, config=config
        )
    except wandb.Error as error:  # such as a key that is missing, or a server that does not answer
        raise OSError(errno.EACCES, str(error), "to Weights & Biases") from error
