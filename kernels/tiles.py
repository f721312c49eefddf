"""Tile sizes by device and dtype, how tiles fill a device, and the GPU that a dry run (``dry_run.py``) chooses tiles for.

A wave is a set of programs that run at the same time. It takes the time of one tile, however few programs it has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

_T = TypeVar("_T")


class Tile(NamedTuple):
    """Tile of a matrix product: ``rows`` x ``cols`` outputs, summed over ``inner`` elements at a time."""

    rows: int
    cols: int
    inner: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """Tiles of the four products, and how many row blocks share the weight in L2."""

    lse: Tile
    dlogits: Tile
    grad_hidden: Tile
    grad_weight: Tile
    group: int


MAX_SIDE = 256  # most rows or columns of a tile; gathered rows end with zeros up to a multiple
_WIDE = Tile(128, 256, 64, 8, 3)
SECOND_WAVE = 0.03  # cost of a second wave of d_hidden's parts, in waves
FULL_WAVES = 0.95  # wanted share of busy programs, on average, when the vocabulary is cut into parts
PROGRAMS = 132  # of an H100 or H200; budgets assume this number and _WIDE on every rank

# By (compute capability major, bits of the dtype or 0 for ieee fp32).
# (9, 16) was measured on an H200 and an H100 (torch 2.11, Triton 3.6; benchmarks/results/h100-kept.json). The others are not
# tuned; tests/kernels/test_compiled.py checks that they fit in shared memory.
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


class Rates(NamedTuple):
    """Rates of a GPU per second: operations of matmuls, bytes read or written."""

    operations: float
    bytes_moved: float


# By bytes per element, as measured: bf16 matmuls of 8,192 tokens, and elementwise passes over logits; for 4 bytes TF32's rate.
H200 = {2: Rates(7.0e14, 4.0e12), 4: Rates(3.5e14, 4.0e12)}


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
    """Let this thread's host code choose tiles for ``device``, unless that is None. No kernel can be launched."""
    token = _PLANNED.set(device)
    try:
        yield
    finally:
        _PLANNED.reset(token)


def thinned(items: list[_T]) -> list[_T]:
    """Return the items to loop over: all, or for a planned GPU the first two and the last."""
    return items if planned_device() is None or len(items) < 4 else [*items[:2], items[-1]]


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return planned_device() is None and _in_interpreter()


@lru_cache(maxsize=1)
def _in_interpreter() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)


def choose_tiles(dtype: torch.dtype, device: torch.device) -> Tiles:
    """Return the tiles for a dtype on a device."""
    planned = planned_device()
    if planned is None and _in_interpreter():
        return _INTERPRETED
    is_ieee = planned is None and dtype == torch.float32 and fp32_precision() == "ieee"
    # ROCm also reports 9.x, for devices with 64 KiB of shared memory; ``_own`` gives 0, for which the table has no row.
    return table_tiles((planned or _own(device)).major, 0 if is_ieee else 8 * dtype.itemsize)


def table_tiles(major: int, bits: int) -> Tiles:
    """Return the table's tiles for a compute capability's major number and a dtype's bits, 0 for ieee fp32."""
    return _TABLE.get((major, bits), _FALLBACK)


def sample_tile(tile: Tile, num_rows: int, itemsize: int, device: torch.device) -> Tile:
    """Return the tile for the matmul of a sample of tokens with all columns: all rows, and one more stage if that fits."""
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


def _own(device: torch.device) -> Planned:
    """Return what is known of a device, for "meta" of the current GPU."""
    if _in_interpreter():
        return Planned(9, 4)
    return _read(torch.cuda.current_device() if device.type == "meta" else device)


@lru_cache(maxsize=16)
def _read(device: torch.device | int) -> Planned:
    """Return what is known of a GPU. ROCm has no descriptors, so its major number is 0 here."""
    major = 0 if torch.version.hip is not None else torch.cuda.get_device_capability(device)[0]
    return Planned(major, torch.cuda.get_device_properties(device).multi_processor_count)


def beside_collectives() -> bool:
    """Whether the kernel of a collective may run at the same time, because this process has other ranks.

    The program of a loop over tiles keeps its multiprocessor until the kernel ends. A collective that finds none waits.
    """
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def precision(dtype: torch.dtype) -> str:
    """Return the ``input_precision`` of ``tl.dot`` for a dtype: fp32 as in torch's own matrix products on a GPU."""
    return "ieee" if dtype != torch.float32 else fp32_precision()


@torch.compiler.assume_constant_result
def fp32_precision() -> str:
    """Return "ieee" or "tf32": how torch multiplies fp32 matrices on a GPU.

    ``torch.get_float32_matmul_precision`` raises once the newer setting was used, so it is only called before torch 2.9.
    """
    newer = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    is_tf32 = torch.get_float32_matmul_precision() != "highest" if newer is None else newer == "tf32"
    return "tf32" if is_tf32 else "ieee"


def cdiv(a: int, b: int) -> int:
    """Ceiling division."""
    return -(-a // b)


@lru_cache(maxsize=1024)
def num_parts(num_rows: int, num_tiles: int, tile_rows: int, at_once: int) -> int:
    """Return the number of parts that the log-sum-exp cuts ``num_tiles`` tiles of the vocabulary into.

    The usual number is a quarter of the programs that the device runs at a time, so that 16 row blocks make four whole waves.
    Many row blocks get fewer, few get more. If the last wave would be far from full, take the nearest number that fills it.
    """
    row_blocks = cdiv(num_rows, tile_rows)
    wanted = max(cdiv(at_once, row_blocks), min(at_once // 4, cdiv(16 * at_once, row_blocks)))

    def filled(parts: int) -> float:
        return row_blocks * parts / (cdiv(row_blocks * parts, at_once) * at_once)

    if filled(wanted) >= FULL_WAVES:
        return min(num_tiles, wanted)
    near = sorted(range(max(1, at_once // row_blocks), wanted + wanted // 2 + 1), key=lambda parts: abs(parts - wanted))
    return min(num_tiles, next((parts for parts in near if filled(parts) >= FULL_WAVES), max(near, key=filled)))


@lru_cache(maxsize=1024)
def cut_last_wave(num_tiles: int, num_steps: int, at_once: int) -> tuple[int, int]:
    """Return how many tiles of d_hidden stay whole, and into how many parts of the inner axis each other tile is cut."""
    last = num_tiles % at_once
    if not last:
        return num_tiles, 1
    most = max(1, min(2 * at_once // last, num_steps))
    splits = min(range(1, most + 1), key=lambda splits: _waves_of_parts(last, splits, at_once))
    return (num_tiles - last, splits) if splits > 1 else (num_tiles, 1)


def _waves_of_parts(num_tiles: int, splits: int, at_once: int) -> float:
    """Return the time of ``num_tiles`` tiles cut into ``splits`` parts each, in waves of whole tiles."""
    waves = cdiv(num_tiles * splits, at_once)
    return waves / splits + SECOND_WAVE * (waves - 1)


@lru_cache(maxsize=4096)
def usual_waves(num_rows: int, hidden_size: int) -> tuple[float, int]:
    """Return the waves that d_hidden of ``num_rows`` tokens takes on an H100, and the bytes of cut tiles' parts."""
    rows, cols = fitted(_WIDE, hidden_size)[:2]
    num_tiles = cdiv(num_rows, rows) * cdiv(hidden_size, cols)
    num_whole, splits = cut_last_wave(num_tiles, 2 * PROGRAMS, PROGRAMS)
    if splits == 1:
        return cdiv(num_tiles, PROGRAMS), 0
    cut = num_tiles - num_whole
    return num_whole / PROGRAMS + _waves_of_parts(cut, splits, PROGRAMS), cut * splits * rows * cols * 4


def fitted(tile: Tile, width: int) -> Tile:
    """Return the tile, with rows and columns swapped if that pads ``width`` less: 640 is five times 128."""
    swaps = cdiv(width, tile.rows) * tile.rows < cdiv(width, tile.cols) * tile.cols
    return tile._replace(rows=tile.cols, cols=tile.rows) if swaps else tile


@lru_cache(maxsize=1024)
def fill_waves(rows: int, num_cols: int, hidden_size: int, tiles: Tiles, at_once: int, most: int) -> int:
    """Return the width of dlogits' chunks, at most ``most``, with the least time in waves; d_hidden's last wave is cut."""
    grad_weight = fitted(tiles.grad_weight, hidden_size)

    def waves(tile: Tile, num_rows: int, num_cols: int, inner: int) -> int:
        blocks = cdiv(num_rows, tile.rows) * cdiv(num_cols, tile.cols)
        return cdiv(blocks, at_once) * tile.rows * tile.cols * inner

    def time(width: int) -> int:
        whole, rest = divmod(num_cols, width)
        return sum(
            count * (waves(tiles.dlogits, rows, cols, hidden_size) + waves(grad_weight, cols, hidden_size, rows))
            for count, cols in ((whole, width), (1, rest))
        )

    tile_cols = tiles.dlogits.cols
    chunks = max(1, cdiv(num_cols, most))
    even = max(1, cdiv(cdiv(num_cols, chunks), tile_cols)) * tile_cols
    return min(
        range(max(tile_cols, even - even // 4 // tile_cols * tile_cols), even + 1, tile_cols),
        key=lambda w: (time(w), -w),
    )
