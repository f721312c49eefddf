"""How tiles fill a device: arithmetic on sizes.

A wave is a set of programs that run at the same time. It takes the time of one tile, however few programs it has.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cce_dist.kernels.tiles import Tile, Tiles

SECOND_WAVE = 0.03  # cost of a second wave of d_hidden's parts, in waves
FULL_WAVES = 0.95  # wanted share of busy programs, on average, when the vocabulary is cut into parts
# Budgets must give the same groups on every rank, so they assume an H100's or H200's programs, and this tile of d_hidden.
PROGRAMS, USUAL_ROWS, USUAL_COLS = 132, 128, 256


def cdiv(a: int, b: int) -> int:
    """Ceiling division; Triton's own takes two microseconds a call on the host."""
    return -(-a // b)


@lru_cache(maxsize=1024)
def num_parts(num_rows: int, num_tiles: int, tile_rows: int, at_once: int) -> int:
    """Return the number of parts that the log-sum-exp cuts ``num_tiles`` tiles of the vocabulary into.

    The usual number is a quarter of the programs that the device runs at a time, so that 16 row blocks make four whole waves.
    Many row blocks get fewer parts, to keep partials small; few row blocks get more, to fill the device. If the last wave would
    be far from full, take the nearest number of parts that fills it.
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
    """Return how many tiles of d_hidden stay whole, and into how many parts of the inner axis each other tile is cut.

    The parts take one wave or two: 87 tiles in three parts each, on 132 programs, take the time of two thirds of a wave.
    """
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
    """Return the waves that d_hidden of ``num_rows`` tokens takes on an H100 or H200, and the bytes of its cut tiles' parts."""
    rows, cols = _fitted(USUAL_ROWS, USUAL_COLS, hidden_size)
    num_tiles = cdiv(num_rows, rows) * cdiv(hidden_size, cols)
    num_whole, splits = cut_last_wave(num_tiles, 2 * PROGRAMS, PROGRAMS)
    if splits == 1:
        return cdiv(num_tiles, PROGRAMS), 0
    cut = num_tiles - num_whole
    return num_whole / PROGRAMS + _waves_of_parts(cut, splits, PROGRAMS), cut * splits * rows * cols * 4


def fitted(tile: Tile, width: int) -> Tile:
    """Return the tile, with rows and columns swapped if that pads ``width`` columns less."""
    rows, cols = _fitted(tile.rows, tile.cols, width)
    return tile._replace(rows=rows, cols=cols)


def _fitted(rows: int, cols: int, width: int) -> tuple[int, int]:
    """``fitted`` for plain numbers: 640 columns are five times 128, not 2.5 times 256."""
    return (cols, rows) if cdiv(width, rows) * rows < cdiv(width, cols) * cols else (rows, cols)


@lru_cache(maxsize=1024)
def fill_waves(rows: int, num_cols: int, hidden_size: int, tiles: Tiles, at_once: int, most: int) -> int:
    """Return the chunk width of the logits' gradient, at most ``most``, with the least time in partly filled waves.

    A last wave of a few programs takes as long as a wave of ``at_once``. d_hidden does not count: its last wave is cut.
    """
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
