"""A GPU that need not be here, for which host code chooses tiles in a dry run (``dry_run.py``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple, TypeVar

_T = TypeVar("_T")


class Planned(NamedTuple):
    """A GPU of NVIDIA that need not be here: what the host code of a dry run takes for its device."""

    major: int  # of the compute capability
    num_programs: int  # multiprocessors


_PLANNED: ContextVar[Planned | None] = ContextVar("cce_dist_planned", default=None)


def planned_device() -> Planned | None:
    """Return the GPU that this thread plans for; None: it has its own device."""
    return _PLANNED.get()


@contextmanager
def planned(device: Planned | None) -> Iterator[None]:
    """Have this thread's host code choose tiles for a GPU that need not be here; None: for its own device.

    Nothing can be launched.
    """
    token = _PLANNED.set(device)
    try:
        yield
    finally:
        _PLANNED.reset(token)


def thinned(items: list[_T]) -> list[_T]:
    """Return what a loop goes through: all items, but for a planned GPU the first two and the last. Others allocate alike."""
    return items if planned_device() is None or len(items) < 4 else [*items[:2], items[-1]]
