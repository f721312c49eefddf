"""Checkpoints whose damage is found, whether a crash, a full disk or a power failure has caused it.

A checkpoint is written to ``step-00000100.tmp`` with a manifest of sizes and checksums, renamed to ``step-00000100``, and
only then named in the file ``latest``. Loading passes a damaged one over. Tensors are stored by their global shape, so a run
goes on with any number of ranks. The file ``stored`` beside the folder names the newest one, too: a run whose checkpoints are
gone does not begin at step 0, and keeps its records.

A manifest is no signature. Torch reads the metadata of tensors as a pickle: go on from folders alone that you trust.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from cce_dist.tools.pretrain.exits import CheckpointError, UsageError, say
from cce_dist.tools.pretrain.folder import sha256, write_whole
from cce_dist.tools.pretrain.ranks import Ranks

MANIFEST, STATE, LATEST = "manifest.json", "state.pt", "latest"
STORED = "stored"  # in the folder of the run
NAME = re.compile(r"step-\d{8,}")


def save(folder: Path, keep: int, save_tensors: Callable[[Path], None], state: dict[str, Any], ranks: Ranks) -> None:
    """Write model, optimizer and ``state``, whose "step" names the checkpoint; keep the ``keep`` newest.

    Ranks share the reading of all files for the manifest. All raise ``CheckpointError`` where any could not write.
    """
    final = folder / f"step-{state['step']:08d}"
    scratch = final.with_suffix(".tmp")

    tried = _writing(final)
    try:
        ranks.on_first(tried(lambda: shutil.rmtree(scratch) if scratch.exists() else None))
        ranks.together(tried(lambda: save_tensors(scratch)))
        files = ranks.on_first(tried(lambda: _add_state(scratch, state)))
        mine = files[ranks.rank :: ranks.world_size]
        parts = ranks.together(tried(lambda: {name: checksum(scratch / name) for name in mine}))
        sums = {name: sum for part in parts for name, sum in part.items()}
        ranks.on_first(tried(lambda: _publish(scratch, final, keep, sums)))
    except CheckpointError:
        if ranks.rank == 0:
            shutil.rmtree(scratch, ignore_errors=True)
        raise


def load(
    folder: Path, load_tensors: Callable[[Path], None], same: dict[str, Any], ranks: Ranks
) -> dict[str, Any] | None:
    """Restore model and optimizer from the newest whole checkpoint; return its state, or None.

    ``same`` is what a run and its resumption must have in common.

    Raises:
        UsageError: ``same`` differs from ``state["same"]``, or all checkpoints are damaged or gone; on every rank.
    """
    candidates = ranks.on_first(lambda: _candidates(folder))
    for path in candidates:
        damage = _damage(path, ranks)
        if damage is None:
            return _load(path, load_tensors, same)
        if ranks.rank == 0:
            say(f"checkpoint {path} is damaged and passed over: {damage}")
    if candidates:
        raise UsageError(f"no checkpoint in {folder} is whole: --no-resume starts anew")
    return None


def clear(folder: Path) -> None:
    """Delete the checkpoints in ``folder`` and the two files that name the newest, and nothing else."""
    (folder / LATEST).unlink(missing_ok=True)
    folder.with_name(STORED).unlink(missing_ok=True)
    for old in _ours(folder):
        shutil.rmtree(old)


def checksum(path: Path) -> list[Any]:
    return [path.stat().st_size, sha256(path)]


@contextlib.contextmanager
def _writing(final: Path) -> Iterator[None]:
    """Raise ``CheckpointError`` where the context, or the function that this decorates, cannot write."""
    try:
        yield
    except (OSError, dcp.CheckpointException) as error:
        wrapped = isinstance(error, dcp.CheckpointException)
        cause = next(iter(error.failures.values()))[0] if wrapped else error
        reason = getattr(cause, "strerror", None) or f"{cause} (is the disk full?)"  # torch's own say no more
        raise CheckpointError(f"cannot write checkpoint {final}: {reason}") from error


def _load(path: Path, load_tensors: Callable[[Path], None], same: dict[str, Any]) -> dict[str, Any]:
    try:
        state = torch.load(path / STATE, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"cannot read checkpoint {path}: {reason}: --no-resume starts anew") from error
    there = state["same"]
    differing = [
        f"{name} {there.get(name)} there, {ours} here" for name, ours in same.items() if there.get(name) != ours
    ]
    if differing:
        reason = f"is of another run ({'; '.join(differing)})"
        raise UsageError(f"checkpoint {path} {reason}: use another --out or --no-resume")
    load_tensors(path)
    return state


def _candidates(folder: Path) -> list[Path]:
    """Return the checkpoints up to the one that ``latest`` names, or all if it is gone, the newest first."""
    found = _ours(folder)[::-1]
    try:
        newest = (folder / LATEST).read_text(errors="replace").strip()
    except FileNotFoundError:
        stored = folder.with_name(STORED)
        if found or not stored.exists():
            return found
        newest = stored.read_text(errors="replace").strip()
        raise UsageError(
            f"the checkpoints in {folder} are gone, of which {newest} was the newest: put them back, or start anew with "
            "--no-resume, which overwrites metrics.jsonl"
        ) from None
    if not found:
        gone = f"names {newest!r}, which is gone, and there is no other checkpoint"
        raise UsageError(f"{folder / LATEST} {gone}: --no-resume starts anew")
    return [path for path in found if path.name <= newest] if folder / newest in found else found


def _ours(folder: Path) -> list[Path]:
    """Return the folders that are checkpoints of ours, whole or damaged, the oldest first."""

    def is_ours(path: Path) -> bool:
        if not NAME.fullmatch(path.name) or not path.is_dir():
            return False
        files = {each.name for each in path.iterdir()}
        return not files or bool(files & {MANIFEST, STATE, ".metadata"})

    return sorted(filter(is_ours, folder.glob("step-*")))


def _damage(path: Path, ranks: Ranks) -> str | None:
    """Return what is wrong with a checkpoint, on every rank; the ranks share the reading."""
    problem, files = None, {}
    try:
        files = json.loads((path / MANIFEST).read_text())["files"]
        mine = list(files.items())[ranks.rank :: ranks.world_size]
        wrong = [name for name, sum in mine if (path / name).stat().st_size != sum[0] or checksum(path / name) != sum]
        problem = f"{wrong[0]} is not what was written" if wrong else None
    except FileNotFoundError as error:
        problem = f"{Path(error.filename).relative_to(path)} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        problem = f"{MANIFEST} cannot be read"
    except OSError as error:
        problem = f"{error.filename}: {error.strerror}"
    return next((each for each in ranks.gather(problem) if each is not None), None)


def _add_state(scratch: Path, state: dict[str, Any]) -> list[str]:
    """Write the state to a checkpoint, and return the names of all its files."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    (scratch / STATE).write_bytes(buffer.getbuffer())
    return sorted(path.relative_to(scratch).as_posix() for path in scratch.rglob("*") if path.is_file())


def _publish(scratch: Path, final: Path, keep: int, sums: dict[str, list[Any]]) -> None:
    """Give a whole checkpoint its manifest and its name, point ``latest`` at it, and drop the oldest."""
    write_whole(scratch / MANIFEST, json.dumps({"files": sums}, indent=1) + "\n")
    if final in _ours(final.parent):
        shutil.rmtree(final)  # damaged, or left by a crash between the two renames below
    scratch.rename(final)
    write_whole(final.with_name(LATEST), final.name + "\n")
    write_whole(final.parent.with_name(STORED), final.name + "\n")
    finished = [path for path in _ours(final.parent) if path.name <= final.name]
    for old in finished[: -max(keep, 1)]:
        with contextlib.suppress(OSError):
            shutil.rmtree(old)
