"""The products of listed tokens' d_hidden, in one pass: they are so short that each further pass over d_hidden would cost much.

    d_hidden_i  +=  sum of columns k  g_ik weight_k                   frequent and sampled columns (``sampling.py``)
                 +  (r_i - sum of sampled columns k  g_ik) center     the control variate
                 +  r_i linear (hidden_i covariance - line)           the linear correction, or nothing

The lists' part is there already (``lists.listed_gradients``). ``line`` is the product of the covariance with the mean hidden
state, the same for all tokens.
"""

from __future__ import annotations

import torch
import triton.language as tl

from cce_dist.kernels import Rows
from cce_dist.kernels.blocks import halves, has_tma, kernel, load_tile, operand
from cce_dist.kernels.d_hidden import Sum
from cce_dist.kernels.filter.lists import Decisions
from cce_dist.kernels.filter.sampling import COLUMNS, LINEAR, Compensation
from cce_dist.kernels.tiles import Tile, cdiv, precision


def add_products(
    total: Sum, rows: Rows, grads_RC: torch.Tensor, sums_BR: torch.Tensor, block_cols: int, how: Decisions,
    comp: Compensation, tile: Tile,
) -> None:
    """Add everything but lists to d_hidden at the tokens of the group.

    Args:
        total: d_hidden. Its remainder, which is by token, is added to it.
        grads_RC, sums_BR: As ``sampling.column_gradients`` writes them, in blocks of ``block_cols`` columns.
        comp: The control variate. If the factor COLUMNS or LINEAR is 0 its product is left out.
    """
    rows_CD, num_frequent, hidden_size = comp.columns.rows_CD, comp.columns.num_frequent, total.high_ND.shape[1]
    num_rows, hidden, covariance = rows.hidden.shape[0], None, None
    tma = has_tma(grads_RC, rows_CD, *(() if comp.covariance_DD is None else (rows.hidden, comp.covariance_DD)))
    if comp.covariance_DD is not None:
        hidden = operand(rows.hidden, tile.rows, tile.inner, tma)
        covariance = operand(comp.covariance_DD, tile.inner, tile.cols, tma)
    _hidden_products_kernel[(cdiv(num_rows, tile.rows) * cdiv(hidden_size, tile.cols),)](
        # in
        operand(grads_RC, tile.rows, tile.inner, tma), operand(rows_CD, tile.inner, tile.cols, tma), hidden, covariance,
        comp.factors_4, rows.index, rows.num_labelled, how.dropped_N, sums_BR, comp.columns.shared_2D, comp.line_D,
        total.low_RD,
        # in, out
        total.high_ND,
        # sizes
        num_rows, num_frequent, rows_CD.shape[0], hidden_size, num_frequent // block_cols, sums_BR.shape[0],
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
    hidden,  # in: [R, D] descriptor or pointer, or None without a linear correction
    covariance,  # in: [D, D] descriptor or pointer, or None
    factors_ptr,  # in: [4] fp32; COLUMNS and LINEAR are read; or None
    index_ptr,  # in: [R] int32
    num_labelled_ptr,  # in: [1] int32
    dropped_ptr,  # in: [N] fp32
    sums_ptr,  # in: [blocks of columns, R] fp32
    center_ptr,  # in: [D] fp32: the first row of a matrix
    line_ptr,  # in: [D] fp32, or None
    low_ptr,  # in: [N, D] bf16, or None
    d_hidden_ptr,  # in, out: [N, D]
    num_rows,
    num_frequent,
    num_columns,
    hidden_size,
    first_sums,
    num_sums,
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
    if covariance is not None:
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
            if covariance is not None:
                some -= by_line[:, None] * tl.load(line_ptr + offs_d, mask=in_d, other=0)[None, :]
            where = token[:, None] * hidden_size + offs_d[None, :]
            mask = live[:, None] & in_d[None, :]
            some += tl.load(d_hidden_ptr + where, mask=mask, other=0).to(tl.float32)
            if low_ptr is not None:
                some += tl.load(low_ptr + where, mask=mask, other=0).to(tl.float32)
            tl.store(d_hidden_ptr + where, some.to(d_hidden_ptr.dtype.element_ty), mask=mask)
