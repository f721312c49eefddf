"""Files that outlive a power failure: what a name points at is on disk before the name is.

``write`` and ``publish`` follow the same order: the content is flushed, then it gets its name, then the folder that holds
the name is flushed.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def sync(path: Path) -> None:
    """Flush a file, or a folder's list of names, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path, seen: Callable[[int], object] = lambda num_bytes: None) -> str:
    """Return the SHA-256 of a file; ``seen`` is told how many bytes were read."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(1 << 20):
            digest.update(block)
            seen(len(block))
    return digest.hexdigest()


def write(path: Path, text: str) -> None:
    """Replace a file by one with this text, whole or not at all."""
    scratch = path.with_name(path.name + ".tmp")
    with open(scratch, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)
    sync(path.parent)


def publish(scratch: Path, final: Path) -> None:
    """Rename a folder whose files are flushed already."""
    for folder, _, _ in os.walk(scratch, topdown=False):
        sync(Path(folder))
    os.rename(scratch, final)
    sync(final.parent)


def why_not(error: BaseException, folder: Path) -> OSError | None:
    """Return the system's reason for a failed write.

    Writers of torch tell no more than that a write failed. A file of a MiB, written beside theirs, meets the same reason
    while the disk is full.
    """
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, OSError) and chain.errno is not None:
            return chain
        chain = chain.__cause__ or chain.__context__
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(1 << 20))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as found:
        return found
    return None
