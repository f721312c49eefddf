"""What corrects the rank-1 stand-in: for d_hidden some columns, for d_weight the sampled tokens of ``shares.py``.

    d_hidden_i  =  r_i c              + shrink * (sum_k g_ik away_k  -  r_i / K sum_k away_k)          away_k = weight_k - c
    d_weight_j  =  share_j sum_i r_i e_i  + shrink * (sum_s a_sj away_s  -  share_j sum_s a_s away_s)  away_s = hidden_s - e

    g_ik = scale * P p_ik slope_ik / (K share_k)   where column k is dropped
    a_sj: token s's part of share_j, times what all tokens drop, with the sign of P;    a_s its sum over j

``stand_in.py`` says where that comes from. The K columns are drawn by the shares, so no hot column is drawn. The sampled tokens
decide on the shrinkage of the first, the drawn columns on that of the second.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from cce_dist.kernels import Operands, Rows, Softmax, stand_in
from cce_dist.kernels.blocks import has_tma, kernel, operand, sloped, store_tile, tile_of_logits
from cce_dist.kernels.budget import cdiv
from cce_dist.kernels.d_hidden import Sum, add_d_hidden
from cce_dist.kernels.d_weight import add_d_weight
from cce_dist.kernels.filter.shares import PART, Dropped, Sample
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


class Tokens(NamedTuple):
    """What the sampled tokens add to d_weight.

    Attributes:
        parts_SV: As in ``shares.Dropped``.
        rows: The tokens; their hidden states are away_s, in the hidden states' dtype.
        gain: The factor on the product, a 0-d fp32 tensor.
        less_D: [D] fp32: what share_j multiplies with the other sign.
    """

    parts_SV: torch.Tensor
    rows: Rows
    gain: torch.Tensor
    less_D: torch.Tensor


def gather_columns(columns: stand_in.Drawn, center_D: torch.Tensor, x: Operands) -> Drawn:
    """Copy the columns' rows out of the weight; ``center_D`` is the mean of all rows by share."""
    weight_KD = x.weight.index_select(0, columns.place)
    bias_K = None if x.bias is None else x.bias.index_select(0, columns.place)
    of_columns = x._replace(weight=weight_KD, bias=bias_K, logits=x.logits._replace(num_valid=weight_KD.shape[0]))
    return Drawn(*columns, of_columns, (weight_KD.float() - center_D).to(weight_KD.dtype))


def shrink_columns(
    drawn: Drawn, sample: Sample, rows_SD: torch.Tensor, mass_N: torch.Tensor, softmax: Softmax, coef_4N: torch.Tensor,
    threshold_N: torch.Tensor, tiles: Tiles,
) -> torch.Tensor:  # fmt: skip
    """Return the factor on what the columns add, a 0-d fp32 tensor.

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
    in_sample = torch.arange(size, device=rows_SD.device) < sample.size
    mass_S = torch.where(in_sample, mass_N.index_select(0, sample.token_S), 0.0)
    # A token stands for as many as have its mass together. K keeps fp16 away from its ends.
    terms_SK = (grads_SK.float() * num_columns - mass_S[:, None]) * mass_S.abs().rsqrt()[:, None]
    return _shrinkage(torch.where(mass_S[:, None] != 0, terms_SK, 0.0).to(rows_SD.dtype), drawn.away_KD, tiles)


def weigh_tokens(
    dropped: Dropped, columns: stand_in.Drawn, sample: Sample, rows_SD: torch.Tensor, mass_N: torch.Tensor, tiles: Tiles
) -> Tokens | None:
    """Return what the sample adds to d_weight; None where nothing was kept of it, or where it is all tokens.

    Args:
        dropped: What the sample drops.
        columns: The drawn columns.
        sample: Tokens.
        rows_SD: Their hidden states.
        mass_N: r: what every token drops.
        tiles: Tiles of the device.
    """
    if dropped.parts_SV is None or sample.mean_D is None or sample.share_S is None:
        return None
    sign_S = mass_N.index_select(0, sample.token_S).sign()
    away_SD = ((rows_SD.float() - sample.mean_D) * sign_S[:, None]).to(rows_SD.dtype)
    per_part = 1 / (PART.value * torch.where(dropped.total > 0, dropped.total, torch.inf))
    # A column stands for as many as have its share together. S and V keep fp16 away from its ends.
    share_K = dropped.shares_2V[0].index_select(0, columns.place)
    parts_KS = dropped.parts_SV.index_select(1, columns.place).t().contiguous().float() * per_part
    terms_KS = (parts_KS - share_K[:, None] * sample.share_S) * share_K.rsqrt()[:, None]
    terms_KS = terms_KS * (rows_SD.shape[0] * dropped.shares_2V.shape[1] ** 0.5)
    shrink = _shrinkage(torch.where(share_K[:, None] > 0, terms_KS, 0.0).to(rows_SD.dtype), away_SD, tiles)
    mass = shrink * mass_N.abs().sum()
    less_D = mass * (sample.share_S[:, None] * away_SD.float()).sum(0)
    return Tokens(dropped.parts_SV, Rows(sample.token_S, sample.size, away_SD), mass * per_part, less_D)


def add_tokens(d_weight_VD: torch.Tensor, tokens: Tokens, tiles: Tiles) -> None:
    """Add what the sample adds to rows of d_weight that are whole but for that; nothing where no token is sampled."""
    add_d_weight(d_weight_VD, tokens.parts_SV, tokens.rows, tokens.gain, tiles.grad_weight, add=True, skip_empty=True)


def _shrinkage(terms_RK: torch.Tensor, away_KD: torch.Tensor, tiles: Tiles) -> torch.Tensor:
    """Return the factor on ``terms_RK @ away_KD``, a 0-d fp32 tensor."""
    num_rows = terms_RK.shape[0]
    index = torch.arange(num_rows, dtype=torch.int32, device=terms_RK.device)
    estimate_RD = terms_RK.new_zeros(num_rows, away_KD.shape[1])
    rows = Rows(index, torch.full((1,), num_rows, dtype=torch.int32, device=index.device), estimate_RD)
    add_d_hidden(Sum(estimate_RD, None), terms_RK, away_KD, rows, None, None, tiles.grad_hidden, first=True)
    noise_K = terms_RK.float().square().sum(0) * away_KD.float().square().sum(1)
    return stand_in.shrink(estimate_RD.float().square().sum(), noise_K.sum())


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
