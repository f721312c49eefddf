"""Files that are there whole or not at all, and their checksums."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path


def sha256(path: Path, seen: Callable[[int], object] = lambda num_bytes: None) -> str:
    """Return the SHA-256 of a file; ``seen`` is told how many bytes were read."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(1 << 20):
            digest.update(block)
            seen(len(block))
    return digest.hexdigest()


def write(path: Path, text: str) -> None:
    """Replace a file by one with this text, whole or not at all: the text is flushed to disk before it gets the name."""
    scratch = path.with_name(path.name + ".tmp")
    with open(scratch, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)
