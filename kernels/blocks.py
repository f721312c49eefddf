"""Functions that kernels share: declare a kernel, load, multiply and store tiles, and take exponentials and logarithms.

A kernel takes a matrix in one of two forms, as the constexpr ``TMA`` says: a tensor descriptor, which the copy engine of Hopper
and later GPUs reads and writes without address arithmetic in the loop, or a plain pointer for other devices.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from cce_dist.kernels.direct import Kernel
from cce_dist.kernels.tiles import has_descriptors, interpreted

LOG2_E, LOG_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


def kernel(*specialized: str) -> Callable[[Callable], Kernel]:
    """Declare a Triton kernel that compiles anew only for the arguments named here, and for its constexprs and dtypes.

    Triton compiles a kernel anew where an integer becomes 1 or a multiple of 16, or a pointer one of 16 bytes. Here only sizes
    and matrices that decide how wide a load is do so: nothing compiles in the middle of training.
    """

    def declare(function: Callable) -> Kernel:
        parameters = inspect.signature(function).parameters
        assert parameters.keys() >= set(specialized)
        free = [
            name
            for name, parameter in parameters.items()
            if "constexpr" not in str(parameter.annotation) and name not in specialized
        ]
        declared = triton.jit(
            do_not_specialize=[name for name in free if not name.endswith("_ptr")],
            do_not_specialize_on_alignment=[name for name in free if name.endswith("_ptr")],
        )
        return Kernel(declared(function))

    return declare


def on_device(tensor: torch.Tensor) -> AbstractContextManager:
    """Return a context in which launches go to the tensor's device, nearly always the current one."""
    device = tensor.device
    is_current = device.type != "cuda" or device.index == torch._C._cuda_getDevice()
    return nullcontext() if is_current else torch.cuda.device(device)


def has_tma(*matrices: torch.Tensor) -> bool:
    """Whether the device has tensor descriptors, and can describe these row-major matrices (16-byte base and rows)."""
    for matrix in matrices:
        if matrix.data_ptr() % 16 or matrix.stride(0) * matrix.itemsize % 16:
            return False
    return has_descriptors(matrices[0].device)


def operand(matrix: torch.Tensor, rows: int, cols: int, tma: bool) -> TensorDescriptor | torch.Tensor:
    """Return a matrix in the form a kernel reads: a descriptor of [rows, cols] blocks, or itself."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, cols]) if tma else matrix


@triton.jit
def load_tile(source, row, col, num_rows, num_cols, stride, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr):
    """Load [ROWS, COLS] at (row, col) of a row-major [num_rows, num_cols] matrix; elements outside are 0."""
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
    """Store [ROWS, COLS] at (row, col) of a matrix; elements outside the matrix are left out.

    With a descriptor half a tile is stored at a time: a whole bf16 tile beside its fp32 source spills registers.
    """
    if TMA:
        left, right = halves(tile)  # pyright: ignore[reportGeneralTypeIssues]
        target.store([row, col], left.to(target.dtype))
        target.store([row, col + COLS // 2], right.to(target.dtype))
    else:
        offs_r = row + tl.arange(0, ROWS)
        offs_c = col + tl.arange(0, COLS)
        mask = (offs_r < num_rows)[:, None] & (offs_c < num_cols)[None, :]
        where = target + offs_r.to(tl.int64)[:, None] * stride + offs_c[None, :]
        tl.store(where, tile.to(target.dtype.element_ty), mask=mask)


@triton.jit
def tile_of_products(
    hidden,  # in: [R, D] descriptor or pointer
    weight,  # in: [V, D] descriptor or pointer
    row,
    col,
    num_rows,
    num_cols,
    hidden_size,
    TILE: tl.constexpr,  # ``tiles.Tile``
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return hidden [BLOCK_N rows from ``row``, D] @ weight [BLOCK_V rows from ``col``, D].T in fp32."""
    BLOCK_N: tl.constexpr = TILE.rows
    BLOCK_V: tl.constexpr = TILE.cols
    BLOCK_D: tl.constexpr = TILE.inner
    acc = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    for inner in range(0, hidden_size, BLOCK_D):
        h = load_tile(hidden, row, inner, num_rows, hidden_size, hidden_size, BLOCK_N, BLOCK_D, TMA)
        w = load_tile(weight, col, inner, num_cols, hidden_size, hidden_size, BLOCK_V, BLOCK_D, TMA)
        acc = tl.dot(h, w.T, acc, input_precision=PRECISION)
    return acc


@triton.jit
def rows_with_zeros(num_labelled, MAX_SIDE: tl.constexpr):
    """Return the number of gathered rows including zeros: ``num_labelled`` rounded up to a multiple of the largest tile.

    The zeros keep products finite: dlogits is 0 in these rows, and 0 times uninitialized memory may be NaN.
    """
    return tl.maximum(tl.cdiv(num_labelled, MAX_SIDE), 1) * MAX_SIDE


@triton.jit
def row_and_split(pid, num_row_blocks, num_splits, GROUP: tl.constexpr):
    """Return row block and split of a program, so that GROUP row blocks stay in L2 while the weight is read once."""
    group = pid // (GROUP * num_splits)
    first = group * GROUP
    size = tl.minimum(num_row_blocks - first, GROUP)
    within = pid - first * num_splits
    return first + within % size, within // size


def has_fast_math() -> bool:
    """Whether kernels may contain NVIDIA's PTX instructions: the value of their constexpr ``FAST``."""
    return torch.version.hip is None and not interpreted()


@triton.jit
def fast_exp2(x, FAST: tl.constexpr):
    """Return 2^x within 2^-22. FAST takes one instruction instead of four, and results below 2^-126 are 0."""
    if FAST:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@triton.jit
def fast_log2(x, FAST: tl.constexpr):
    """Return log2(x). FAST takes one instruction instead of thirty, is within 2^-22, and takes x < 2^-126 for 0."""
    if FAST:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)
