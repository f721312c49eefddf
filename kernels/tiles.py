"""Tile sizes, and the pieces that every kernel shares: how a tile is read, written, and becomes logits.

A matrix reaches a kernel in one of two forms, told apart by the constexpr ``TMA``: a tensor descriptor, which the copy
engine of Hopper and later reads and writes without address arithmetic in the loop, or a plain pointer for other devices.
The kernels are the same files either way. The masking of the vocabulary's tail is ``logits_of`` alone, so forward and
backward cannot disagree on it.
"""

from __future__ import annotations

import json
import os
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


class Tile(NamedTuple):
    """Tile of one product: ``rows`` x ``cols`` of the output, ``inner`` of the summed axis at a time."""

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


_WIDE = Tile(128, 256, 64, 8, 3)

# By (compute capability major, bits of the dtype or 0 for ieee fp32).
# Measured 2026-11 on one H200 (torch 2.11, Triton 3.6) for (9, 16); the other rows are the largest tiles whose stages fit
# the shared memory of the device, not yet tuned there.
_TABLE = {
    (9, 16): Tiles(_WIDE, _WIDE, _WIDE, _WIDE, 16),
    (9, 32): Tiles(*(Tile(128, 128, 32, 8, 3),) * 4, 16),
    (8, 16): Tiles(*(Tile(128, 128, 32, 8, 3),) * 4, 8),
    (8, 32): Tiles(*(Tile(64, 64, 32, 4, 2),) * 4, 8),
}
_FALLBACK = Tiles(*(Tile(64, 64, 16, 4, 2),) * 4, 8)  # ieee fp32, and devices that no row names
_INTERPRETED = Tiles(*(Tile(16, 32, 16, 4, 1),) * 4, 2)  # small, so that small tests still cross tile edges


def cdiv(a: int, b: int) -> int:
    """Ceiling division; Triton's own takes two microseconds a call on the host."""
    return -(-a // b)


@lru_cache(maxsize=1)
def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return bool(triton.knobs.runtime.interpret)


def choose_tiles(dtype: torch.dtype, device: torch.device) -> Tiles:
    """Return the tiles for a dtype on a device: the user's own (the file that CCE_DIST_TILES names), else the table's."""
    return _chosen(dtype, device, os.environ.get("CCE_DIST_TILES"), precision(dtype))


@lru_cache(maxsize=64)
def _chosen(dtype: torch.dtype, device: torch.device, path: str | None, dot_precision: str) -> Tiles:
    if interpreted():
        return _INTERPRETED
    if path:
        tuned = read_tiles(path).get((torch.cuda.get_device_name(device), str(dtype).removeprefix("torch.")))
        if tuned is not None:
            return tuned
    bits = 0 if dtype == torch.float32 and dot_precision == "ieee" else dtype.itemsize * 8
    return _TABLE.get((torch.cuda.get_device_capability(device)[0], bits), _FALLBACK)


@lru_cache(maxsize=8)
def read_tiles(path: str) -> dict[tuple[str, str], Tiles]:
    """Read a file that ``cce-dist tune`` wrote: {"device": {"dtype": {"lse": [rows, cols, inner, warps, stages], ...}}}.

    Raises:
        ValueError: The file is not of that form, or a size is not a power of two.
    """
    try:
        with open(path) as file:
            content = json.load(file)
        table = {
            (device, dtype): Tiles(*(Tile(*row[name]) for name in Tiles._fields[:-1]), row["group"])
            for device, by_dtype in content.items()
            for dtype, row in by_dtype.items()
        }
    except (OSError, TypeError, KeyError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not a tile file of `cce-dist tune` ({error!r})") from error
    _validate(path, table)
    return table


def _validate(path: str, table: dict[tuple[str, str], Tiles]) -> None:
    for key, tiles in table.items():
        for tile in tiles[:-1]:
            powers = all(isinstance(n, int) and n > 0 and n & (n - 1) == 0 for n in tile[:4])
            if not powers or min(tile[:3]) < 16 or max(tile[:3]) > MAX_SIDE or tile.stages < 1:
                raise ValueError(f"{path}: {tile} of {key}: sides are powers of two from 16 to {MAX_SIDE}, stages >= 1")
        if (
            tiles.grad_hidden.inner > min(tiles.lse.cols, tiles.dlogits.cols)
            or tiles.grad_weight.inner > tiles.dlogits.rows
        ):
            raise ValueError(f"{path}: {key}: a product's inner side is longer than the dlogits tile that fills it")


def write_tiles(path: str, device: str, dtype: str, tiles: Tiles) -> None:
    """Add or replace one row of a tile file; raises as ``read_tiles`` does."""
    table = {**(read_tiles(path) if os.path.exists(path) else {}), (device, dtype): tiles}
    _validate(path, table)
    content: dict[str, dict[str, dict]] = {}
    for (on, of), row in table.items():
        content.setdefault(on, {})[of] = row._asdict()
    with open(path, "w") as file:
        json.dump(content, file, indent=1)
    read_tiles.cache_clear()
    _chosen.cache_clear()


MAX_SIDE = 256  # of a tile; gather_rows writes zeros as far past the last kept row


@lru_cache(maxsize=16)
def num_programs(device: torch.device) -> int:
    """Programs that run at once when each fills a multiprocessor."""
    return 4 if interpreted() else torch.cuda.get_device_properties(device).multi_processor_count


def has_tma(*matrices: torch.Tensor) -> bool:
    """Whether tensor descriptors can describe these row-major matrices here (16-byte base and rows)."""
    aligned = all(m.data_ptr() % 16 == 0 and m.stride(0) * m.itemsize % 16 == 0 for m in matrices)
    if interpreted():
        return aligned and all(m.dtype != torch.bfloat16 for m in matrices)  # its descriptors misread bf16
    return aligned and _has_copy_engine(matrices[0].device)


@lru_cache(maxsize=16)
def _has_copy_engine(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


def operand(matrix: torch.Tensor, rows: int, cols: int, tma: bool) -> TensorDescriptor | torch.Tensor:
    """Return a matrix in the form a kernel reads: a descriptor of [rows, cols] blocks, or itself."""
    return TensorDescriptor.from_tensor(matrix, [rows, cols]) if tma else matrix


def precision(dtype: torch.dtype) -> str:
    """``input_precision`` of a dot: what torch.set_float32_matmul_precision asks for."""
    return "ieee" if dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest" else "tf32"


@triton.jit
def load_tile(source, row, col, num_rows, num_cols, stride, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr):
    """Read [ROWS, COLS] at (row, col) of a row-major [num_rows, num_cols] matrix; cells outside are 0."""
    if TMA:
        tile = source.load([row, col])
    else:
        offs_r = row + tl.arange(0, ROWS)
        offs_c = col + tl.arange(0, COLS)
        mask = (offs_r < num_rows)[:, None] & (offs_c < num_cols)[None, :]
        tile = tl.load(source + offs_r.to(tl.int64)[:, None] * stride + offs_c[None, :], mask=mask, other=0)
    return tile


@triton.jit
def halves(tile):
    """Cut a tile into its left and its right half."""
    rows: tl.constexpr = tile.shape[0]
    cols: tl.constexpr = tile.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(tile, (rows, 2, cols)), (0, 2, 1)))


@triton.jit
def store_tile(
    target, row, col, tile, num_rows, num_cols, stride, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr
):
    """Write [ROWS, COLS] at (row, col), cut at the matrix's edge.

    A descriptor writes half a tile at a time: a whole one in bf16 next to its fp32 source spills registers.
    """
    if TMA:
        left, right = halves(tile)
        target.store([row, col], left.to(target.dtype))
        target.store([row, col + COLS // 2], right.to(target.dtype))
    else:
        offs_r = row + tl.arange(0, ROWS)
        offs_c = col + tl.arange(0, COLS)
        mask = (offs_r < num_rows)[:, None] & (offs_c < num_cols)[None, :]
        where = target + offs_r.to(tl.int64)[:, None] * stride + offs_c[None, :]
        tl.store(where, tile.to(target.dtype.element_ty), mask=mask)


@triton.jit
def softcapped(u, softcap):
    """softcap * tanh(u / softcap), by one exponential that cannot overflow."""
    t = tl.exp(-2.0 * tl.abs(u) / softcap)
    bounded = softcap * (1.0 - t) / (1.0 + t)
    return tl.where(u < 0, -bounded, bounded)


@triton.jit
def softcap_slope(z, softcap):
    """Derivative of ``softcapped`` with respect to u, from its value z."""
    capped = z / softcap
    return 1.0 - capped * capped


@triton.jit
def logits_of(
    acc,  # [BLOCK_N, BLOCK_V] fp32 products
    offs_v,
    bias_ptr,  # in: [V]
    num_valid,
    logit_scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    MASK_V: tl.constexpr,
):
    """Turn products into logits; columns at or past ``num_valid`` are -inf."""
    z = acc
    if HAS_BIAS:
        z += tl.load(bias_ptr + offs_v, mask=offs_v < num_valid, other=0).to(tl.float32)[None, :]
    if HAS_SCALE:
        z *= logit_scale
    if HAS_SOFTCAP:
        z = softcapped(z, softcap)
    if MASK_V:
        z = tl.where((offs_v < num_valid)[None, :], z, float("-inf"))
    return z


@triton.jit
def row_and_split(pid, num_row_blocks, num_splits, GROUP: tl.constexpr):
    """Order a grid of row blocks x splits so that GROUP row blocks stay in L2 while all of the weight passes by once."""
    group = pid // (GROUP * num_splits)
    first = group * GROUP
    size = tl.minimum(num_row_blocks - first, GROUP)
    within = pid - first * num_splits
    return first + within % size, within // size
