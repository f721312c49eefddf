"""The part of the stand-in that is d_hidden's alone: what is dropped of some columns, computed for every token.

    stand-in of d_hidden_i  =  r_i c + shrink * (sum_k g_ik away_k  -  r_i / K sum_k away_k)
    g_ik = scale * P p_ik slope_ik / (K share_k)   where column k is dropped,       away_k = weight_k - c

``stand_in.py`` says where that comes from. The K columns are drawn by the shares of ``shares.py``, so no hot column is drawn.
The sampled tokens of ``shares.py`` decide on ``shrink``: they stand for all, each for as many as have its mass together.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from cce_dist.kernels import Operands, Rows, Softmax, budget, stand_in
from cce_dist.kernels.blocks import has_tma, kernel, operand, sloped, store_tile, tile_of_logits
from cce_dist.kernels.budget import cdiv
from cce_dist.kernels.d_hidden import Sum, add_d_hidden
from cce_dist.kernels.filter.shares import Sample
from cce_dist.kernels.tiles import Tiles, precision


class Drawn(NamedTuple):
    """The drawn columns.

    Attributes:
        column_K: [K] int64, ascending; one may be there more than once.
        worth_K: [K] fp32: 1 / (K share).
        x: They as a shard of their own, but for its first id, which is that of the shard they are from.
        away_KD: Their weight less the mean by share, in the weight's dtype.
    """

    column_K: torch.Tensor
    worth_K: torch.Tensor
    x: Operands
    away_KD: torch.Tensor


def draw_columns(share_V: torch.Tensor, center_D: torch.Tensor, x: Operands) -> Drawn | None:
    """Draw columns by their share, whose mean weight is ``center_D``; None where the shard has too few."""
    if budget.stand_in_columns(x.logits.num_valid) == 0:
        return None
    column_K, worth_K = stand_in.draw(share_V)
    weight_KD = x.weight.index_select(0, column_K)
    bias_K = None if x.bias is None else x.bias.index_select(0, column_K)
    columns = x._replace(weight=weight_KD, bias=bias_K, logits=x.logits._replace(num_valid=column_K.shape[0]))
    return Drawn(column_K, worth_K, columns, (weight_KD.float() - center_D).to(weight_KD.dtype))


def shrinkage(
    drawn: Drawn, sample: Sample, rows_SD: torch.Tensor, mass_N: torch.Tensor, softmax: Softmax, coef_4N: torch.Tensor,
    threshold_N: torch.Tensor, tiles: Tiles,
) -> torch.Tensor:  # fmt: skip
    """Return the factor on the estimate, a 0-d fp32 tensor.

    Args:
        drawn: The columns.
        sample: Tokens.
        rows_SD: Their hidden states.
        mass_N: r: what every token drops, in the units of ``coef_4N`` times the logit scale.
        softmax: Statistics of the whole vocabulary.
        coef_4N: As ``drawn_gradients`` gets them.
        threshold_N: Logits below it are dropped.
        tiles: Tiles of the device.
    """
    size, num_columns = rows_SD.shape[0], drawn.column_K.shape[0]
    grads_SK = rows_SD.new_empty(size, num_columns)
    drawn_gradients(drawn, Rows(sample.token_S, sample.size, rows_SD), softmax, coef_4N, threshold_N, grads_SK, tiles)
    place_S = torch.arange(size, dtype=torch.int32, device=rows_SD.device)
    mass_S = torch.where(place_S < sample.size, mass_N.index_select(0, sample.token_S), 0.0)
    # Any common factor will do. This one keeps fp16 away from its ends.
    terms_SK = (grads_SK.float() * num_columns - mass_S[:, None]) * mass_S.abs().rsqrt()[:, None]
    terms_SK = torch.where(mass_S[:, None] != 0, terms_SK, 0.0).to(rows_SD.dtype)
    estimate = Sum(torch.zeros_like(rows_SD), None)
    add_d_hidden(
        estimate, terms_SK, drawn.away_KD, Rows(place_S, sample.size, rows_SD), None, None, tiles.grad_hidden, first=True
    )  # fmt: skip
    noise_K = terms_SK.float().square().sum(0) * drawn.away_KD.float().square().sum(1)
    return stand_in.shrink(estimate.high_ND.float().square().sum(), noise_K.sum())


def drawn_gradients(
    drawn: Drawn, rows: Rows, softmax: Softmax, coef_4N: torch.Tensor, threshold_N: torch.Tensor, grads_RK: torch.Tensor,
    tiles: Tiles,
) -> None:  # fmt: skip
    """Write g of the group's tokens to grads_RK. Rows at or past ``num_kept`` are 0 up to the end of their tile, and
    unwritten after it.
    """
    tile, x, logits = tiles.dlogits, drawn.x, drawn.x.logits
    num_rows, hidden_size = rows.hidden.shape
    num_columns = logits.num_valid
    tma = has_tma(rows.hidden, x.weight, grads_RK)
    _drawn_gradients_kernel[(cdiv(num_rows, tile.rows) * cdiv(num_columns, tile.cols),)](
        # in
        operand(rows.hidden, tile.rows, tile.inner, tma), operand(x.weight, tile.cols, tile.inner, tma), x.bias,
        drawn.column_K, drawn.worth_K, x.ids, rows.index, rows.num_kept, threshold_N, softmax.max, softmax.log_sum, coef_4N,
        # out
        operand(grads_RK, tile.rows, tile.cols // 2, tma),
        # sizes
        num_rows, hidden_size, num_columns, logits.start,
        # options
        logits.logit_scale, logits.softcap,
        HAS_BIAS=x.bias is not None, HAS_SCALE=logits.logit_scale != 1.0, HAS_SOFTCAP=logits.softcap > 0.0,
        MASK_V=num_columns % tile.cols != 0,
        # tiles
        BLOCK_N=tile.rows, BLOCK_V=tile.cols, BLOCK_D=tile.inner, TMA=tma, PRECISION=precision(rows.hidden.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@kernel("hidden", "weight", "bias_ptr", "grads", "hidden_size")
def _drawn_gradients_kernel(
    hidden,  # in: [R, D] descriptor or pointer
    weight,  # in: [K, D] descriptor or pointer
    bias_ptr,  # in: [K]
    column_ptr,  # in: [K] int64
    worth_ptr,  # in: [K] fp32
    labels_ptr,  # in: [N] int64
    index_ptr,  # in: [R] int32
    num_kept_ptr,  # in: [1] int32
    threshold_ptr,  # in: [N] fp32
    max_ptr,  # in: [N] fp32
    log_sum_ptr,  # in: [N] fp32
    coef_ptr,  # in: [4, N] fp32
    grads,  # out: [R, K] descriptor or pointer
    num_rows,
    hidden_size,
    num_columns,
    start,
    logit_scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    MASK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # Blocks of columns that read the same tokens run side by side, so that these come from memory once.
    num_col_blocks = tl.cdiv(num_columns, BLOCK_V)
    row = tl.program_id(0) // num_col_blocks * BLOCK_N
    col = tl.program_id(0) % num_col_blocks * BLOCK_V
    num_kept = tl.load(num_kept_ptr)
    if row >= num_kept:
        return
    z = tile_of_logits(
        hidden, weight, bias_ptr, row, col, num_rows, num_columns, hidden_size, logit_scale, softcap,
        HAS_BIAS, HAS_SCALE, HAS_SOFTCAP, MASK_V, BLOCK_N, BLOCK_V, BLOCK_D, TMA, PRECISION,
    )  # fmt: skip
    offs_n = row + tl.arange(0, BLOCK_N)
    live = offs_n < num_kept
    token = tl.load(index_ptr + offs_n, mask=live, other=0)
    threshold = tl.load(threshold_ptr + token, mask=live, other=float("-inf"))
    row_max = tl.load(max_ptr + token, mask=live, other=0)
    log_sum = tl.load(log_sum_ptr + token, mask=live, other=0)
    coef_p = tl.load(coef_ptr + token, mask=live, other=0) * logit_scale
    label = tl.load(labels_ptr + token, mask=live, other=-1) - start
    offs_k = col + tl.arange(0, BLOCK_V)
    in_k = offs_k < num_columns
    column = tl.load(column_ptr + offs_k, mask=in_k, other=-1)
    worth = tl.load(worth_ptr + offs_k, mask=in_k, other=0)
    dropped = (z < threshold[:, None]) & (column.to(tl.int32)[None, :] != label.to(tl.int32)[:, None])
    p = tl.where(dropped, tl.exp((z - row_max[:, None]) - log_sum[:, None]), 0.0)
    if HAS_SOFTCAP:
        p = sloped(p, z, softcap)
    store_tile(
        grads, row, col, p * coef_p[:, None] * worth[None, :], num_rows, num_columns, num_columns, BLOCK_N, BLOCK_V, TMA
    )
