"""The products of listed tokens' d_hidden, in one pass: they are so short that each further pass over d_hidden would cost much.

    d_hidden_i  +=  sum of frequent j  g_ij weight_j            gradients g from ``dlogits.py``
                 +  sum of sampled k  g_ik centered_k            the correction from samples (``sampling.py``)
                 +  r_i linear * (hidden_i covariance)      the linear correction (``covariance.py``)
                 +  r_i shared                             control variate, and means of the two corrections

Short lists are added before (``lists.listed_gradients``), longer lists after (``d_rows.py``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from cce_dist.kernels import Rows
from cce_dist.kernels.blocks import halves, has_tma, kernel, load_tile, operand
from cce_dist.kernels.d_hidden import Sum
from cce_dist.kernels.filter.lists import Lists
from cce_dist.kernels.filter.sampling import COLUMNS, LINEAR, Factors
from cce_dist.kernels.tiles import Tile, precision
from cce_dist.kernels.waves import cdiv


class Pair(NamedTuple):
    """The two operands of a product.

    Attributes:
        given_RC: [R, columns] in the hidden states' dtype: gradients of the group's tokens.
        rows_CD: [columns or fewer, D] in the hidden states' dtype: rows of the weight.
    """

    given_RC: torch.Tensor
    rows_CD: torch.Tensor


def add_products(
    total: Sum, rows: Rows, frequent: Pair, sampled: Pair | None, covariance_DD: torch.Tensor | None, factors: Factors | None,
    factor_N: torch.Tensor, shared_D: torch.Tensor, later: tuple[Lists, int], tile: Tile, *,
    first: bool,
) -> None:
    """Add everything but lists to d_hidden at the tokens of the group; ``first`` sets it instead.

    Args:
        total: d_hidden. Its remainder is only written for tokens whose list is added later.
        frequent: Operands of the frequent columns.
        sampled: Operands of the sampled columns, or None.
        covariance_DD: As ``covariance.covariance_of`` returns it, or None.
        factors: With ``sampled`` or ``covariance_DD``: a product whose factor is 0 is left out.
        factor_N: r_i of each token, fp32.
        shared_D: shared, fp32: the first row of a matrix.
        later: The lists, and the greatest length of lists added before. Only the tokens of these have a remainder already.
    """
    hidden_size, num_rows = total.high_ND.shape[1], rows.hidden.shape[0]
    others = [*(sampled or ()), *(() if covariance_DD is None else (rows.hidden, covariance_DD))]
    tma = has_tma(*frequent, *others)

    def pair(given: torch.Tensor, of_rows: torch.Tensor) -> list[object]:
        return [operand(given, tile.rows, tile.inner, tma), operand(of_rows, tile.inner, tile.cols, tma)]

    _hidden_products_kernel[(cdiv(num_rows, tile.rows) * cdiv(hidden_size, tile.cols),)](
        # in
        *pair(*frequent), *([None, None] if sampled is None else pair(*sampled)),
        *([None, None] if covariance_DD is None else pair(rows.hidden, covariance_DD)),
        None if factors is None else factors.values_4,
        rows.index, rows.num_labelled, factor_N, shared_D, later[0].count_N,
        # in, out
        total.high_ND, total.low_RD,
        # sizes
        num_rows, *(0 if each is None else each.rows_CD.shape[0] for each in (frequent, sampled)), hidden_size,
        frequent.given_RC.stride(0), 0 if sampled is None else sampled.given_RC.stride(0), later[1], int(first),
        # options
        HAS_SAMPLED=sampled is not None, HAS_COVARIANCE=covariance_DD is not None,
        HAS_LOW=total.low_RD is not None, BY_TOKEN=total.by_token,
        # tiles
        BLOCK_N=tile.rows, BLOCK_D=tile.cols, BLOCK_V=tile.inner, TMA=tma, PRECISION=precision(rows.hidden.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )


@kernel(
    "frequent_grads", "frequent_weight", "sampled_grads", "sampled_weight", "hidden", "covariance", "shared_ptr",
    "d_hidden_ptr", "low_ptr", "hidden_size",
)
def _hidden_products_kernel(
    frequent_grads,  # in: [R, columns] descriptor or pointer
    frequent_weight,  # in: [F, D] descriptor or pointer
    sampled_grads,  # in: [R, K] descriptor or pointer, with HAS_SAMPLED
    sampled_weight,  # in: [K, D] descriptor or pointer, with HAS_SAMPLED
    hidden,  # in: [R, D] descriptor or pointer, with HAS_COVARIANCE
    covariance,  # in: [D, D] descriptor or pointer, with HAS_COVARIANCE
    factors_ptr,  # in: [4] fp32, as in ``Factors``; with HAS_SAMPLED or HAS_COVARIANCE
    index_ptr,  # in: [R] int32
    num_labelled_ptr,  # in: [1] int32
    factor_ptr,  # in: [N] fp32
    shared_ptr,  # in: [D] fp32
    count_ptr,  # in: [N] int32
    d_hidden_ptr,  # in, out: [N, D]
    low_ptr,  # in, out: [R or N, D] bf16
    num_rows,
    num_frequent,
    num_sampled,
    hidden_size,
    frequent_stride,
    sampled_stride,
    num_before,
    first,
    HAS_SAMPLED: tl.constexpr,
    HAS_COVARIANCE: tl.constexpr,
    HAS_LOW: tl.constexpr,
    BY_TOKEN: tl.constexpr,
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
    mass = tl.load(factor_ptr + token, mask=live, other=0)

    # acc [BLOCK_N, BLOCK_D] = hidden @ covariance + sampled gradients @ weight rows + frequent gradients @ weight rows.
    acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    if HAS_COVARIANCE:
        linear = tl.load(factors_ptr + LINEAR)
        for inner in range(0, tl.where(linear > 0, hidden_size, 0), BLOCK_V):
            h = load_tile(hidden, row, inner, num_rows, hidden_size, hidden_size, BLOCK_N, BLOCK_V, TMA)
            s = load_tile(covariance, inner, col, hidden_size, hidden_size, hidden_size, BLOCK_V, BLOCK_D, TMA)
            acc = tl.dot(h, s, acc, input_precision=PRECISION)
        acc *= (mass * linear)[:, None]
    if HAS_SAMPLED:
        for inner in range(0, tl.where(tl.load(factors_ptr + COLUMNS) > 0, num_sampled, 0), BLOCK_V):
            g = load_tile(sampled_grads, row, inner, num_rows, num_sampled, sampled_stride, BLOCK_N, BLOCK_V, TMA)
            w = load_tile(sampled_weight, inner, col, num_sampled, hidden_size, hidden_size, BLOCK_V, BLOCK_D, TMA)
            acc = tl.dot(g, w, acc, input_precision=PRECISION)
    for inner in range(0, num_frequent, BLOCK_V):
        g = load_tile(frequent_grads, row, inner, num_rows, num_frequent, frequent_stride, BLOCK_N, BLOCK_V, TMA)
        w = load_tile(frequent_weight, inner, col, num_frequent, hidden_size, hidden_size, BLOCK_V, BLOCK_D, TMA)
        acc = tl.dot(g, w, acc, input_precision=PRECISION)

    count = tl.load(count_ptr + token, mask=live, other=0)
    later = live & (count > num_before)
    has_low = live & (count > 0) & (count <= num_before)
    low_row = token if BY_TOKEN else offs_n.to(tl.int64)
    # The tile is stored a quarter at a time: the whole of it beside its addresses spills registers.
    for half in tl.static_range(2):
        for quarter in tl.static_range(2):
            some = halves(halves(acc)[half])[quarter]
            offs_d = col + (2 * half + quarter) * (BLOCK_D // 4) + tl.arange(0, BLOCK_D // 4)
            in_d = offs_d < hidden_size
            some += mass[:, None] * tl.load(shared_ptr + offs_d, mask=in_d, other=0)[None, :]
            high = d_hidden_ptr + token[:, None] * hidden_size + offs_d[None, :]
            before = tl.where(first == 0, live[:, None] & in_d[None, :], False)
            some += tl.load(high, mask=before, other=0).to(tl.float32)
            if HAS_LOW:
                low = low_ptr + low_row[:, None] * hidden_size + offs_d[None, :]
                some += tl.load(low, mask=before & has_low[:, None], other=0).to(tl.float32)
            rounded = some.to(d_hidden_ptr.dtype.element_ty)
            if HAS_LOW:
                rest = (some - rounded.to(tl.float32)).to(low_ptr.dtype.element_ty)
                tl.store(low, rest, mask=later[:, None] & in_d[None, :])
            tl.store(high, rounded, mask=live[:, None] & in_d[None, :])
