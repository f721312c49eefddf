"""Checkpoints that a crash cannot spoil, by ``torch.distributed.checkpoint``.

A checkpoint is written to ``step-00000100.tmp``, renamed to ``step-00000100``, and only then named in the file ``latest``: a
crash at any moment loses the newest at most. Tensors are stored by their global shape, so a run goes on with any number of
ranks.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from cce_dist.pretrain.recipe import UsageError


class CheckpointError(Exception):
    """A checkpoint could not be written. Every rank raises it, with the same message."""


def latest(folder: Path) -> Path | None:
    """Return the newest whole checkpoint in ``folder``."""
    pointer = folder / "latest"
    return folder / pointer.read_text().strip() if pointer.exists() else None


def save(folder: Path, keep: int, save_tensors: Callable[[Path], None], state: dict[str, Any]) -> None:
    """Write model, optimizer, RNG and ``state`` (plain values; ``state["step"]`` names the checkpoint).

    ``save_tensors`` is the engine's. Only the ``keep`` newest checkpoints stay.

    Sharding: every rank writes the shards that it holds; ``folder`` is one that all ranks share.
    Communication: what ``torch.distributed.checkpoint`` needs to plan, and a barrier.

    Raises:
        CheckpointError: On every rank, where any could not write. Older checkpoints are untouched.
    """
    final = folder / f"step-{state['step']:08d}"
    scratch = final.with_suffix(".tmp")
    alone = not dist.is_initialized()
    first = alone or dist.get_rank() == 0
    failure: str | None = None
    if first:
        shutil.rmtree(scratch, ignore_errors=True)
    if not alone:
        dist.barrier()
    try:
        save_tensors(scratch)
    except dcp.CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        failure = f"cannot write checkpoint {final}: {reason}"
    if first and failure is None:
        try:
            with open(scratch / "state.pt", "wb") as file:
                torch.save({**state, "rng": _rng()}, file)
                file.flush()
                os.fsync(file.fileno())
            _publish(scratch, final, keep)
        except (OSError, RuntimeError) as error:
            failure = f"cannot write checkpoint {final}: {error}"
    if not alone:
        box = [failure]
        dist.broadcast_object_list(box, src=0)
        [failure] = box
    if failure is not None:
        if first:
            shutil.rmtree(scratch, ignore_errors=True)
        raise CheckpointError(failure)


def load(folder: Path, load_tensors: Callable[[Path], None], same: dict[str, Any]) -> dict[str, Any] | None:
    """Restore model, optimizer and RNG from the newest checkpoint; return its state, or None where there is none.

    Raises:
        UsageError: ``same``, what a run and its resumption must have in common, differs from ``state["same"]``.
    """
    newest = latest(folder)
    if newest is None:
        return None
    state = torch.load(newest / "state.pt", weights_only=True)
    there = state["same"]
    differing = [
        f"{name} {there.get(name)} there, {ours} here" for name, ours in same.items() if ours != there.get(name)
    ]
    if differing:
        reason = f"is of another run ({'; '.join(differing)})"
        raise UsageError(f"checkpoint {newest} {reason}: use another --out or --no-resume")
    load_tensors(newest)
    _set_rng(state.pop("rng"))
    return state


def write_tensors(folder: Path, tensors: dict[str, Any]) -> None:
    """Write nested dictionaries of tensors to a folder that is not there yet."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the warning only says that one process saves alone
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder, overwrite=False))


def read_tensors(folder: Path, tensors: dict[str, Any]) -> None:
    """Read into the tensors, in place."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder))


def clear(folder: Path) -> None:
    """Delete the checkpoints in ``folder``."""
    (folder / "latest").unlink(missing_ok=True)
    for old in folder.glob("step-*"):
        shutil.rmtree(old)


def _publish(scratch: Path, final: Path, keep: int) -> None:
    """Give a whole checkpoint its name, point ``latest`` at it, and drop the oldest."""
    shutil.rmtree(final, ignore_errors=True)  # left by a crash between the two renames below
    os.rename(scratch, final)
    pointer = final.with_name("latest")
    with open(pointer.with_suffix(".tmp"), "w") as file:
        file.write(final.name + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(pointer.with_suffix(".tmp"), pointer)
    finished = sorted(path for path in final.parent.glob("step-*") if path.suffix != ".tmp" and path.name <= final.name)
    for old in finished[: -max(keep, 1)]:
        shutil.rmtree(old, ignore_errors=True)


def _rng() -> dict[str, torch.Tensor]:
    """Return the generators' states; all ranks are seeded alike and draw alike, so one rank's stand for all."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_rng(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
