"""The products of listed tokens' d_hidden, in one pass: they are so short that each further pass over d_hidden would cost much.

    d_hidden_i  +=  sum of columns k  g_ik weight_k                   frequent and sampled columns (``sampling.py``)
                 +  (r_i - sum of sampled columns k  g_ik) center     the control variate
                 +  r_i linear (hidden_i covariance - line)           the linear correction (``covariance.py``), or nothing

The lists' part is there already (``lists.listed_gradients``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from cce_dist.kernels import Rows
from cce_dist.kernels.blocks import halves, has_tma, kernel, load_tile, operand
from cce_dist.kernels.d_hidden import Sum
from cce_dist.kernels.filter.sampling import COLUMNS, LINEAR
from cce_dist.kernels.tiles import Tile, precision
from cce_dist.kernels.waves import cdiv


class Linear(NamedTuple):
    """The linear correction.

    Attributes:
        covariance_DD: [D, D] in the weight's dtype.
        line_D: Product of the covariance with the mean hidden state, fp32.
    """

    covariance_DD: torch.Tensor
    line_D: torch.Tensor


class Product(NamedTuple):
    """What all tokens' d_hidden have in common.

    Attributes:
        rows_CD: Rows of the weight of frequent and then sampled columns.
        num_frequent: Number of frequent columns.
        center_D: c of ``compensation.py``, fp32: the first row of a matrix.
        factors_4: As ``sampling.factors_of`` returns them, None for zeros. If COLUMNS or LINEAR is 0 its product is left out.
        linear: The linear correction, or None.
        dropped_N: r of each token, fp32.
    """

    rows_CD: torch.Tensor
    num_frequent: int
    center_D: torch.Tensor
    factors_4: torch.Tensor | None
    linear: Linear | None
    dropped_N: torch.Tensor


def add_products(
    total: Sum, rows: Rows, grads_RC: torch.Tensor, sums_BR: torch.Tensor, block_cols: int, product: Product, tile: Tile
) -> None:
    """Add everything but lists to d_hidden at the tokens of the group.

    Args:
        total: d_hidden. Its remainder, which is by token, is added to it.
        rows: The tokens.
        grads_RC, sums_BR: As ``sampling.column_gradients`` writes them, in blocks of ``block_cols`` columns.
        product: The other operands.
        tile: Tile of the product.
    """
    rows_CD, num_frequent, center_D, factors_4, linear, dropped_N = product
    hidden_size, num_rows = total.high_ND.shape[1], rows.hidden.shape[0]
    covariance_DD, line_D = linear or (None, None)
    of_linear = () if covariance_DD is None else (rows.hidden, covariance_DD)
    tma = has_tma(grads_RC, rows_CD, *of_linear)
    hidden, covariance = (
        operand(of_linear[0], tile.rows, tile.inner, tma), operand(of_linear[1], tile.inner, tile.cols, tma)
    ) if of_linear else (None, None)
    _hidden_products_kernel[(cdiv(num_rows, tile.rows) * cdiv(hidden_size, tile.cols),)](
        # in
        operand(grads_RC, tile.rows, tile.inner, tma), operand(rows_CD, tile.inner, tile.cols, tma), hidden, covariance,
        factors_4, rows.index, rows.num_labelled, dropped_N, sums_BR, center_D, line_D, total.low_RD,
        # in, out
        total.high_ND,
        # sizes
        num_rows, num_frequent, rows_CD.shape[0], hidden_size, num_frequent // block_cols, sums_BR.shape[0],
        # options
        HAS_LINEAR=linear is not None,
        # tiles
        BLOCK_N=tile.rows, BLOCK_D=tile.cols, BLOCK_V=tile.inner, TMA=tma, PRECISION=precision(rows.hidden.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )


@kernel(
    "grads", "rows", "hidden", "covariance", "center_ptr", "line_ptr", "low_ptr", "d_hidden_ptr", "hidden_size", "num_columns"
)
def _hidden_products_kernel(
    grads,  # in: [R, C] descriptor or pointer
    rows,  # in: [C, D] descriptor or pointer
    hidden,  # in: [R, D] descriptor or pointer, with HAS_LINEAR
    covariance,  # in: [D, D] descriptor or pointer, with HAS_LINEAR
    factors_ptr,  # in: [4] fp32; COLUMNS and LINEAR are read; or None
    index_ptr,  # in: [R] int32
    num_labelled_ptr,  # in: [1] int32
    dropped_ptr,  # in: [N] fp32
    sums_ptr,  # in: [blocks of columns, R] fp32
    center_ptr,  # in: [D] fp32
    line_ptr,  # in: [D] fp32, with HAS_LINEAR
    low_ptr,  # in: [N, D] bf16, or None
    d_hidden_ptr,  # in, out: [N, D]
    num_rows,
    num_frequent,
    num_columns,
    hidden_size,
    first_sums,
    num_sums,
    HAS_LINEAR: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    num_labelled = tl.load(num_labelled_ptr)
    num_col_blocks = tl.cdiv(hidden_size, BLOCK_D)
    row = tl.program_id(0) // num_col_blocks * BLOCK_N
    col = tl.program_id(0) % num_col_blocks * BLOCK_D
    if row >= num_labelled:
        return
    offs_n = row + tl.arange(0, BLOCK_N)
    live = offs_n < num_labelled
    token = tl.load(index_ptr + offs_n, mask=live, other=0).to(tl.int64)
    dropped = tl.load(dropped_ptr + token, mask=live, other=0)
    has_terms = (tl.load(factors_ptr + COLUMNS) != 0) if factors_ptr is not None else False

    # acc [BLOCK_N, BLOCK_D] = hidden @ covariance + gradients @ rows of the weight.
    acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    if HAS_LINEAR:
        by_line = dropped * tl.load(factors_ptr + LINEAR)
        for inner in range(0, tl.where(tl.load(factors_ptr + LINEAR) > 0, hidden_size, 0), BLOCK_V):
            h = load_tile(hidden, row, inner, num_rows, hidden_size, hidden_size, BLOCK_N, BLOCK_V, TMA)
            s = load_tile(covariance, inner, col, hidden_size, hidden_size, hidden_size, BLOCK_V, BLOCK_D, TMA)
            acc = tl.dot(h, s, acc, input_precision=PRECISION)
        acc *= by_line[:, None]
    for inner in range(0, tl.where(has_terms, num_columns, num_frequent), BLOCK_V):
        g = load_tile(grads, row, inner, num_rows, num_columns, num_columns, BLOCK_N, BLOCK_V, TMA)
        w = load_tile(rows, inner, col, num_columns, hidden_size, hidden_size, BLOCK_V, BLOCK_D, TMA)
        acc = tl.dot(g, w, acc, input_precision=PRECISION)

    by_center = dropped
    for block in range(first_sums, tl.where(has_terms, num_sums, first_sums)):
        by_center -= tl.load(sums_ptr + block * num_rows.to(tl.int64) + offs_n, mask=live, other=0)
    # The tile is stored a quarter at a time: the whole of it beside its addresses spills registers.
    for half in tl.static_range(2):
        for quarter in tl.static_range(2):
            some = halves(halves(acc)[half])[quarter]
            offs_d = col + (2 * half + quarter) * (BLOCK_D // 4) + tl.arange(0, BLOCK_D // 4)
            in_d = offs_d < hidden_size
            some += by_center[:, None] * tl.load(center_ptr + offs_d, mask=in_d, other=0)[None, :]
            if HAS_LINEAR:
                some -= by_line[:, None] * tl.load(line_ptr + offs_d, mask=in_d, other=0)[None, :]
            where = token[:, None] * hidden_size + offs_d[None, :]
            mask = live[:, None] & in_d[None, :]
            some += tl.load(d_hidden_ptr + where, mask=mask, other=0).to(tl.float32)
            if low_ptr is not None:
                some += tl.load(low_ptr + where, mask=mask, other=0).to(tl.float32)
            tl.store(d_hidden_ptr + where, some.to(d_hidden_ptr.dtype.element_ty), mask=mask)
