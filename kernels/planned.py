"""The GPU for which host code chooses tiles in a dry run (``dry_run.py``). This machine need not have it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple, TypeVar

_T = TypeVar("_T")


class Planned(NamedTuple):
    """An NVIDIA GPU for which the host code of a dry run chooses tiles."""

    major: int  # Major number of the compute capability
    num_programs: int  # Number of multiprocessors


_PLANNED: ContextVar[Planned | None] = ContextVar("cce_dist_planned", default=None)


def planned_device() -> Planned | None:
    """Return the GPU of this thread's dry run, or None if it uses its own device."""
    return _PLANNED.get()


@contextmanager
def planned(device: Planned | None) -> Iterator[None]:
    """Let this thread's host code choose tiles for ``device``, or for its own if that is None. No kernel can be launched."""
    token = _PLANNED.set(device)
    try:
        yield
    finally:
        _PLANNED.reset(token)


def thinned(items: list[_T]) -> list[_T]:
    """Return the items to loop over: for a planned GPU the first two and the last, since others allocate alike; else all."""
    return items if planned_device() is None or len(items) < 4 else [*items[:2], items[-1]]
