"""The first rank's records of a run: metrics.jsonl, TensorBoard where it is installed, a progress bar."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

from tqdm import tqdm


class Log:
    """Metrics of one run as one clean history, however often it was resumed.

    Records are JSON objects, one a line: ``step`` counts finished optimizer steps; ``split`` is "train" or "val"; ``loss`` is
    in nats per token. Records past ``step``, left by a run that went on after its last checkpoint, are dropped.

    Args:
        out: Folder of the run.
        step: Step from which the run goes on.
        num_steps: Steps of the whole run.
    """

    def __init__(self, out: Path, step: int, num_steps: int) -> None:
        path = out / "metrics.jsonl"
        kept = [record for record in read(path) if record["step"] <= step] if path.exists() and step else []
        rewritten = path.with_suffix(".tmp")
        rewritten.write_text("".join(json.dumps(record) + "\n" for record in kept))
        os.replace(rewritten, path)
        # The file has no buffer: a record is on disk or its write raised, and nothing is left to fail at exit.
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the run
        self._board = _tensorboard(out, step)
        # The bar keeps silent where nobody watches a terminal; ``note`` prints its lines everywhere.
        self._bar = tqdm(total=num_steps, initial=step, unit="step", dynamic_ncols=True, disable=None)

    def write(self, record: dict[str, Any]) -> None:
        """Append one record.

        Raises:
            OSError: With the file's name, where it could not be written whole.
        """
        line = (json.dumps(record) + "\n").encode()
        try:
            written = self._file.write(line)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._file.name)) from error
        if written != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._file.name))
        if self._board is not None:
            for name, value in record.items():
                if isinstance(value, (int, float)) and name != "step":
                    self._board.add_scalar(f"{record['split']}/{name}", value, record["step"])
        if record["split"] == "train":
            numbers = {name: f"{record[name]:,.0f}" for name in ("tokens_per_s", "peak_mb")}
            self._bar.set_postfix({"loss": f"{record['loss']:.3f}", **numbers})

    def advance(self) -> None:
        """Count one step."""
        self._bar.update()

    def note(self, line: str) -> None:
        """Print a line above the bar."""
        tqdm.write(line)

    def close(self) -> None:
        self._bar.close()
        self._file.close()
        if self._board is not None:
            self._board.close()


def read(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics file, up to the line that a crash or a full disk cut short."""
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def _tensorboard(out: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(out / "tensorboard"), purge_step=step + 1)
