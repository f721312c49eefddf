"""Tile sizes by device and dtype, and the GPU that a dry run (``dry_run.py``) chooses tiles for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
import triton

from cce_dist.kernels.precision import fp32_precision

_T = TypeVar("_T")


class Tile(NamedTuple):
    """Tile of a matrix product: ``rows`` x ``cols`` outputs, summed over ``inner`` elements at a time."""

    rows: int
    cols: int
    inner: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """Tiles of the four products, and the number of row blocks that walk the weight together (they share it in L2)."""

    lse: Tile
    dlogits: Tile
    grad_hidden: Tile
    grad_weight: Tile
    group: int


MAX_SIDE = 256  # most rows or columns of a tile; zeros behind gathered rows reach to a multiple of it
_WIDE = Tile(128, 256, 64, 8, 3)

# By (compute capability major, bits of the dtype or 0 for ieee fp32).
# (9, 16) was measured 2026-11 on one H200 and one H100 (torch 2.11, Triton 3.6). On the H100 groups of 8 and 32, 4 stages, and
# 256 x 128 were timed too, none was better on all four heads (benchmarks/results/h100-kept.json). The other rows are not tuned
# and have not run on their devices. tests/kernels/test_compiled.py checks that they fit in the device's shared memory (228 KiB
# for major number 10, 164 or 99 for 8, 99 for 12).
_TABLE = {
    (12, 16): Tiles(*(Tile(128, 64, 32, 4, 3),) * 4, 8),
    (12, 32): Tiles(*(Tile(64, 64, 32, 4, 2),) * 4, 8),
    (10, 16): Tiles(*(Tile(128, 128, 64, 8, 3),) * 4, 16),
    (10, 32): Tiles(*(Tile(128, 128, 32, 8, 3),) * 4, 16),
    (9, 16): Tiles(_WIDE, _WIDE, _WIDE, _WIDE, 16),
    (9, 32): Tiles(*(Tile(128, 128, 32, 8, 3),) * 4, 16),
    (8, 16): Tiles(*(Tile(128, 128, 32, 8, 3),) * 4, 8),
    (8, 32): Tiles(*(Tile(64, 64, 32, 4, 2),) * 4, 8),
}
_FALLBACK = Tiles(*(Tile(64, 64, 16, 4, 2),) * 4, 8)  # ieee fp32, and devices that no row names
_INTERPRETED = Tiles(*(Tile(16, 32, 16, 4, 1),) * 4, 2)  # small, so that small tests still cross tile edges


class Planned(NamedTuple):
    """A GPU for which host code chooses tiles, such as the one of a dry run."""

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


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return planned_device() is None and _in_interpreter()


@lru_cache(maxsize=1)
def _in_interpreter() -> bool:
    return bool(triton.knobs.runtime.interpret)


def choose_tiles(dtype: torch.dtype, device: torch.device) -> Tiles:
    """Return the tiles for a dtype on a device."""
    planned = planned_device()
    if planned is not None:
        return table_tiles(planned.major, 8 * dtype.itemsize)
    return _chosen(dtype, device, precision(dtype))


@lru_cache(maxsize=64)
def _chosen(dtype: torch.dtype, device: torch.device, dot_precision: str) -> Tiles:
    if interpreted():
        return _INTERPRETED
    bits = 0 if dtype == torch.float32 and dot_precision == "ieee" else dtype.itemsize * 8
    if torch.version.hip is not None:
        return _FALLBACK  # ROCm also reports 9.x, for devices with 64 KiB of shared memory
    return table_tiles(torch.cuda.get_device_capability(real_device(device))[0], bits)


def table_tiles(major: int, bits: int) -> Tiles:
    """Return the table's tiles for a compute capability's major number and a dtype's bits, 0 for ieee fp32."""
    return _TABLE.get((major, bits), _FALLBACK)


def sample_tile(tile: Tile, num_rows: int, itemsize: int, device: torch.device) -> Tile:
    """Return the tile for the matmul of a sample of tokens with all columns: all rows, and no more elements than ``tile`` has.

    It has one more stage if that fits (H200: 0.84 of the time).
    """
    tile = tile._replace(rows=num_rows, cols=max(16, min(tile.cols, tile.rows * tile.cols // num_rows)))
    if interpreted() or _gpu(device).major not in (9, 10):
        return tile
    most = (200 << 10) // ((tile.rows + tile.cols) * tile.inner * itemsize)
    return tile._replace(stages=max(tile.stages, min(tile.stages + 1, most)))


def stages_of_rows(num_bytes: int) -> int:
    """Return the pipeline stages of a loop that loads ``num_bytes`` per step: 4, or fewer if they do not fit in 48 KiB."""
    return min(4, 1 + (48 << 10) // num_bytes)


def num_programs(device: torch.device) -> int:
    """Return the number of programs that run at once if each fills a multiprocessor."""
    return _gpu(device).num_programs


def has_descriptors(device: torch.device) -> bool:
    """Return whether kernels can take tensor descriptors."""
    return _gpu(device).major >= 9


def _gpu(device: torch.device) -> Planned:
    """Return the GPU of this thread's dry run, or else ``device``."""
    return planned_device() or _own(device)


@lru_cache(maxsize=16)
def _own(device: torch.device) -> Planned:
    """Return what is known of a device. The interpreter has descriptors; ROCm has none, so its major number is 0 here."""
    if _in_interpreter():
        return Planned(9, 4)
    device = real_device(device)
    major = 0 if torch.version.hip is not None else torch.cuda.get_device_capability(device)[0]
    return Planned(major, torch.cuda.get_device_properties(device).multi_processor_count)


def beside_collectives() -> bool:
    """Whether the kernel of a collective may run at the same time, because this process has other ranks.

    The program of a loop over tiles keeps its multiprocessor until the kernel ends. A collective that finds none waits that
    long. On the other ranks the same collective holds multiprocessors meanwhile, and their own programs wait for these.
    """
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def real_device(device: torch.device) -> torch.device:
    """Return ``device``, or this process's own GPU for "meta": a dry run's tensors are on "meta"."""
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "meta" else device


def precision(dtype: torch.dtype) -> str:
    """Return the ``input_precision`` of ``tl.dot`` for a dtype: fp32 as in torch's own matrix products on a GPU."""
    return "ieee" if dtype != torch.float32 else fp32_precision()
