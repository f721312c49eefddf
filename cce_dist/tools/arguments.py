"""Types for argparse that check their range: a bad value is one line of usage, before anything starts."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path

LONGEST_NAME = 255  # bytes, on every usual file system
FIGURES = (".png", ".pdf", ".svg", ".jpg", ".jpeg")  # kinds that matplotlib writes
MOST = 2**31 - 1  # no count of steps, tokens, ranks or files comes near it


def whole(least: int = 1, most: int = MOST) -> Callable[[str], int]:
    """Return a type that reads a whole number in [least, most]."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
        if not least <= value <= most:
            limit = f"at least {least}" if value < least else f"at most {most}"
            raise argparse.ArgumentTypeError(f"must be {limit}, got {value}")
        return value

    return read


def wholes(text: str) -> list[int]:
    """Read whole numbers of at least 1 with commas between."""
    return [whole(1)(part) for part in text.split(",")]


def number(least: float = 0.0, below: float = math.inf, *, positive: bool = False) -> Callable[[str], float]:
    """Return a type that reads a number in [least, below); ``positive`` leaves ``least`` out."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None
        if not (least <= value < below) or (positive and value == least):
            limit = f"{'above' if positive else 'at least'} {least:g}"
            limit += " and finite" if math.isinf(below) else f" and below {below:g}"
            raise argparse.ArgumentTypeError(f"must be {limit}, got {text}")
        return value

    return read


def text(value: str) -> str:
    if not value.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    return value


def pattern(value: str) -> str:
    """Read a pattern of file names, relative to a folder."""
    if not Path(value).parts or Path(value).is_absolute() or "\0" in value:
        raise argparse.ArgumentTypeError(f"must be a relative pattern such as '*.txt', got {value!r}")
    return value


def folder(value: str) -> Path:
    """Read the name of a folder, which need not be there yet."""
    path = _path(value)
    there = next((each for each in (path, *path.parents) if os.path.exists(each)), None)
    if there is not None and not there.is_dir():
        raise argparse.ArgumentTypeError(f"{there} is not a folder")
    return path


def figure(value: str) -> Path:
    """Read the name of a figure to write, in a folder that is there."""
    path = _path(value)
    if path.suffix.lower() not in FIGURES:
        raise argparse.ArgumentTypeError(f"must end in {', '.join(FIGURES)}; got {value!r}")
    if not path.parent.is_dir() or not os.access(path if os.path.exists(path) else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot be written: {value!r}")
    return path


def device(value: str) -> str:
    """Read a device such as cpu, cuda or cuda:1 that this machine has."""
    import torch

    try:
        asked = torch.device(value)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"{value!r} is no device; name cpu, cuda or cuda:1") from None
    count = torch.cuda.device_count() if asked.type == "cuda" else 1
    if asked.type not in ("cpu", "cuda") or (asked.index or 0) >= count:
        raise argparse.ArgumentTypeError(f"this machine has no device {value!r}")
    return value


def _path(value: str) -> Path:
    if not value or "\0" in value:
        raise argparse.ArgumentTypeError("must not be empty")
    path = Path(value).expanduser()
    if any(len(os.fsencode(part)) > LONGEST_NAME for part in path.parts):
        raise argparse.ArgumentTypeError(f"has a name of more than {LONGEST_NAME} bytes")
    return path
