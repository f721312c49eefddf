"""The products that make d_hidden of listed tokens, in one pass over it: it is large beside products as short as these.

    d_hidden_i  +=  sum of hot j  g_ij weight_j            their gradients, as ``dlogits.py`` writes them
                 +  sum of drawn k  g_ik away_k            what corrects the stand-in (``sampling.py``)
                 +  r_i bend * (hidden_i spread)           how hidden states bend it (``covariance.py``)
                 +  r_i shared_0 + u_i shared_1            the stand-in and the uniform part, with what is left of the two above

The lists of tokens are added before (``lists.listed_gradients``), those that are too long for that after (``d_rows.py``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from cce_dist.kernels import Rows
from cce_dist.kernels.blocks import halves, has_tma, kernel, load_tile, operand
from cce_dist.kernels.budget import cdiv
from cce_dist.kernels.d_hidden import Sum
from cce_dist.kernels.filter.lists import Lists
from cce_dist.kernels.filter.sampling import Factors
from cce_dist.kernels.tiles import Tile, precision


class Pair(NamedTuple):
    """Gradients of the group's tokens, and what they multiply.

    Attributes:
        given_RC: [R, columns] in the hidden states' dtype.
        rows_CD: [columns or fewer, D], likewise.
    """

    given_RC: torch.Tensor
    rows_CD: torch.Tensor


def add_products(
    total: Sum, rows: Rows, hot: Pair, drawn: Pair | None, spread_DD: torch.Tensor | None, factors: Factors | None,
    gain: torch.Tensor | None, factor_2N: torch.Tensor, shared_2D: torch.Tensor, later: tuple[Lists, int], tile: Tile, *,
    first: bool,
) -> None:  # fmt: skip
    """Add everything but lists to d_hidden at the tokens of the group; ``first`` sets it instead.

    Args:
        total: The remainder is written where lists are to come, and nowhere else.
        hot: Of the hot columns.
        drawn: Of the drawn columns, or None.
        spread_DD: As ``bend.spread_of`` returns it, or None.
        factors: With ``drawn`` or ``spread_DD``: a product whose factor is 0 is left out.
        gain: Multiplies the products of both pairs, 0-d fp32; or None.
        factor_2N: r_i and u_i of each token, fp32.
        shared_2D: What they multiply, fp32.
        later: The lists, and the length of those that were added before.
    """
    hidden_size, num_rows = total.high_ND.shape[1], rows.hidden.shape[0]
    others = [*(drawn or ()), *(() if spread_DD is None else (rows.hidden, spread_DD))]
    tma = has_tma(*hot, *others)

    def pair(given: torch.Tensor, of_rows: torch.Tensor) -> list[object]:
        return [operand(given, tile.rows, tile.inner, tma), operand(of_rows, tile.inner, tile.cols, tma)]

    _hidden_products_kernel[(cdiv(num_rows, tile.rows) * cdiv(hidden_size, tile.cols),)](
        # in
        *pair(*hot), *([None, None] if drawn is None else pair(*drawn)),
        *([None, None] if spread_DD is None else pair(rows.hidden, spread_DD)),
        *((None, None) if factors is None else (factors.columns, factors.bend)),
        rows.index, rows.num_kept, gain, factor_2N, shared_2D, later[0].count_N,
        # in, out
        total.high_ND, total.low_RD,
        # sizes
        num_rows, *(0 if each is None else each.rows_CD.shape[0] for each in (hot, drawn)), hidden_size, factor_2N.shape[1],
        hot.given_RC.stride(0), 0 if drawn is None else drawn.given_RC.stride(0), later[1], int(first),
        # options
        HAS_DRAWN=drawn is not None, HAS_SPREAD=spread_DD is not None, HAS_GAIN=gain is not None,
        HAS_LOW=total.low_RD is not None, BY_TOKEN=total.by_token,
        # tiles
        BLOCK_N=tile.rows, BLOCK_D=tile.cols, BLOCK_V=tile.inner, TMA=tma, PRECISION=precision(rows.hidden.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@kernel(
    "hot_grads", "hot_weight", "drawn_grads", "drawn_weight", "hidden", "spread", "shared_ptr", "d_hidden_ptr", "low_ptr",
    "hidden_size",
)  # fmt: skip
def _hidden_products_kernel(
    hot_grads,  # in: [R, columns] descriptor or pointer
    hot_weight,  # in: [H, D] descriptor or pointer
    drawn_grads,  # in: [R, K] descriptor or pointer, with HAS_DRAWN
    drawn_weight,  # in: [K, D] descriptor or pointer, with HAS_DRAWN
    hidden,  # in: [R, D] descriptor or pointer, with HAS_SPREAD
    spread,  # in: [D, D] descriptor or pointer, with HAS_SPREAD
    drawn_factor_ptr,  # in: [] fp32, with HAS_DRAWN
    bend_ptr,  # in: [] fp32, with HAS_SPREAD
    index_ptr,  # in: [R] int32
    num_kept_ptr,  # in: [1] int32
    gain_ptr,  # in: [] fp32
    factor_ptr,  # in: [2, N] fp32
    shared_ptr,  # in: [2, D] fp32
    count_ptr,  # in: [N] int32
    d_hidden_ptr,  # in, out: [N, D]
    low_ptr,  # in, out: [R or N, D] bf16
    num_rows,
    num_hot,
    num_drawn,
    hidden_size,
    num_tokens,
    hot_stride,
    drawn_stride,
    num_before,
    first,
    HAS_DRAWN: tl.constexpr,
    HAS_SPREAD: tl.constexpr,
    HAS_GAIN: tl.constexpr,
    HAS_LOW: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    num_kept = tl.load(num_kept_ptr)
    num_col_blocks = tl.cdiv(hidden_size, BLOCK_D)
    row = tl.program_id(0) // num_col_blocks * BLOCK_N
    col = tl.program_id(0) % num_col_blocks * BLOCK_D
    if row >= num_kept:
        return
    offs_n = row + tl.arange(0, BLOCK_N)
    live = offs_n < num_kept
    token = tl.load(index_ptr + offs_n, mask=live, other=0).to(tl.int64)
    mass = tl.load(factor_ptr + token, mask=live, other=0)
    gain = tl.load(gain_ptr) if HAS_GAIN else 1.0

    acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    if HAS_SPREAD:
        bend = tl.load(bend_ptr)
        for inner in range(0, tl.where(bend > 0, hidden_size, 0), BLOCK_V):
            h = load_tile(hidden, row, inner, num_rows, hidden_size, hidden_size, BLOCK_N, BLOCK_V, TMA)
            s = load_tile(spread, inner, col, hidden_size, hidden_size, hidden_size, BLOCK_V, BLOCK_D, TMA)
            acc = tl.dot(h, s, acc, input_precision=PRECISION)
        acc *= (mass * (bend / gain))[:, None]
    if HAS_DRAWN:
        for inner in range(0, tl.where(tl.load(drawn_factor_ptr) > 0, num_drawn, 0), BLOCK_V):
            g = load_tile(drawn_grads, row, inner, num_rows, num_drawn, drawn_stride, BLOCK_N, BLOCK_V, TMA)
            w = load_tile(drawn_weight, inner, col, num_drawn, hidden_size, hidden_size, BLOCK_V, BLOCK_D, TMA)
            acc = tl.dot(g, w, acc, input_precision=PRECISION)
    for inner in range(0, num_hot, BLOCK_V):
        g = load_tile(hot_grads, row, inner, num_rows, num_hot, hot_stride, BLOCK_N, BLOCK_V, TMA)
        w = load_tile(hot_weight, inner, col, num_hot, hidden_size, hidden_size, BLOCK_V, BLOCK_D, TMA)
        acc = tl.dot(g, w, acc, input_precision=PRECISION)
    if HAS_GAIN:
        acc *= gain

    uniform = tl.load(factor_ptr + num_tokens.to(tl.int64) + token, mask=live, other=0)
    later = live & (tl.load(count_ptr + token, mask=live, other=0) > num_before)
    low_row = token if BY_TOKEN else offs_n.to(tl.int64)
    # The tile is stored a quarter at a time: the whole of it beside its addresses spills registers.
    for half in tl.static_range(2):
        for quarter in tl.static_range(2):
            some = halves(halves(acc)[half])[quarter]
            offs_d = col + (2 * half + quarter) * (BLOCK_D // 4) + tl.arange(0, BLOCK_D // 4)
            in_d = offs_d < hidden_size
            some += mass[:, None] * tl.load(shared_ptr + offs_d, mask=in_d, other=0)[None, :]
            some += uniform[:, None] * tl.load(shared_ptr + hidden_size + offs_d, mask=in_d, other=0)[None, :]
            high = d_hidden_ptr + token[:, None] * hidden_size + offs_d[None, :]
            before = (live & (first == 0))[:, None] & in_d[None, :]
            some += tl.load(high, mask=before, other=0).to(tl.float32)
            if HAS_LOW:
                low = low_ptr + low_row[:, None] * hidden_size + offs_d[None, :]
                some += tl.load(low, mask=before, other=0).to(tl.float32)
            rounded = some.to(d_hidden_ptr.dtype.element_ty)
            if HAS_LOW:
                rest = (some - rounded.to(tl.float32)).to(low_ptr.dtype.element_ty)
                tl.store(low, rest, mask=later[:, None] & in_d[None, :])
            tl.store(high, rounded, mask=live[:, None] & in_d[None, :])
