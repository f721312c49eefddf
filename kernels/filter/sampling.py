"""Corrections of the rank-1 control variate: sampled columns for d_hidden, the sampled tokens of ``shares.py`` for d_weight.

    d_hidden_i  =  r_i c
                   + factor * (sum_k g_ik centered_k  -  r_i / K sum_k centered_k)              centered_k = weight_k - c
    d_weight_j  =  share_j sum_i r_i e_i
                   + factor * (sum_s a_sj centered_s  -  share_j sum_s a_s centered_s)          centered_s = hidden_s - e

    g_ik = scale * P p_ik slope_ik / (K share_k)   where token i drops column k
    a_sj: token s's part of share_j, times what all tokens drop, with the sign of P;    a_s its sum over j

``compensation.py`` derives both. The K columns are sampled by their shares, so none is frequent. The factor of d_hidden is
estimated on the sampled tokens, that of d_weight on the sampled columns. Where the latter is 0, d_weight gets the shrinkage
target, whose factor is fitted on both samples.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from cce_dist.kernels import Operands, Rows, Softmax, compensation
from cce_dist.kernels.blocks import has_tma, kernel, operand, sloped, store_tile, tile_of_logits
from cce_dist.kernels.budget import cdiv
from cce_dist.kernels.filter.frequent import columns_of
from cce_dist.kernels.filter.shares import PART, TINY, Centered, Dropped, Sample
from cce_dist.kernels.tiles import Tiles, precision


class SampledColumns(NamedTuple):
    """The sampled columns, K of them."""

    column_K: Tensor  # int64, ascending; one may be there more than once
    inverse_share_K: Tensor  # fp32: 1 / (K share)
    x: Operands  # the columns as a shard of their own, but for its first id, which is that of the shard they are from
    centered_KD: Tensor  # their weight less the mean by share, in the weight's dtype
    square_K: Tensor  # fp32: the square of that


class Factors(NamedTuple):
    """The factors on the corrections of the control variate, 0-d fp32 tensors."""

    columns: Tensor  # on what the sampled columns add to d_hidden
    linear: Tensor  # on what a token's hidden state adds to d_hidden (``covariance.py``); 0 without
    tokens: Tensor  # on what the sampled tokens add to d_weight
    gain: Tensor  # that times what all tokens drop, in units of ``parts_SV``
    shrinkage: Tensor  # on what a column's own row adds to d_weight, times its share; 0 where ``tokens`` is not


class Fitted(NamedTuple):
    """What the sampled columns tell of the sampled tokens' d_hidden, 0-d fp32 tensors: two factors and the fit of the third."""

    columns: Tensor
    linear: Tensor
    shrinkage: Tensor  # over what all tokens drop


def sample_columns(dropped: Dropped, size: int, x: Operands) -> SampledColumns:
    """Sample columns by share, and copy their rows."""
    column_K = compensation.sample(dropped.share_V, size)
    inverse_share_K = compensation.inverse_share(dropped.share_V, column_K)
    sampled = columns_of(x, column_K)
    centered_KD = (sampled.weight - dropped.center_D).to(x.weight.dtype)
    return SampledColumns(column_K, inverse_share_K, sampled, centered_KD, centered_KD.float().square().sum(1))


def fit_columns(
    sampled: SampledColumns, sample: Sample, rows_SD: Tensor, softmax: Softmax, coef_4N: Tensor, gain: Tensor | None,
    threshold_N: Tensor, dropped: Dropped, tiles: Tiles, num_covariance: int,
) -> Fitted:
    """Fit the factors on what the columns add to the sampled tokens' d_hidden.

    Args:
        rows_SD: The tokens' hidden states.
        coef_4N: As ``sampled_gradients`` gets them.
        gain: What they were divided by, or None.
        threshold_N: Logits below it are dropped.
        num_covariance: How many columns the covariance would be taken from; 0: there is none.
    """
    num_columns = sampled.column_K.shape[0]
    grads_SK = rows_SD.new_empty(rows_SD.shape[0], num_columns)
    sampled_gradients(sampled, Rows(sample.token_S, sample.size, rows_SD), softmax, coef_4N, threshold_N, grads_SK, tiles)
    mass_S1 = (sample.mass_S if gain is None else sample.mass_S / gain)[:, None]
    # A token stands for as many as have its mass together. K keeps fp16 away from its ends.
    root_S1, dead_S1 = mass_S1.abs().sqrt(), mass_S1 == 0
    per_root_S1 = (1 / root_S1).masked_fill_(dead_S1, 0.0)
    terms_SK = ((grads_SK.float() * num_columns - mass_S1) * per_root_S1).masked_fill_(dead_S1, 0.0)
    estimate_SD = compensation.matmul(terms_SK, sampled.centered_KD)
    noise = terms_SK.square().sum(0) @ sampled.square_K
    nothing, centered = torch.zeros_like(noise), sample.centered
    if num_covariance == 0 or centered is None:
        return Fitted(compensation.signal_share(estimate_SD.square().sum(), noise), nothing, nothing)
    lines_SK = compensation.matmul(centered.rows_SD, sampled.centered_KD.t()) * root_S1
    both_SK = terms_SK * lines_SK
    noise_3 = torch.stack((noise, both_SK.sum(0) @ sampled.square_K, lines_SK.square().sum(0) @ sampled.square_K))
    # A gradient of d_hidden is about as long as a row of the weight, times its token's coefficient.
    coef_S1 = coef_4N[0].index_select(0, sample.token_S)[:, None] * sampled.x.logits.logit_scale
    usual = (coef_S1 * per_root_S1).square().sum() * num_columns * sampled.square_K.sum()
    linear, columns = compensation.linear(
        estimate_SD, compensation.matmul(lines_SK, sampled.centered_KD), noise_3, num_columns / num_covariance, usual
    )
    share_K = dropped.share_V.index_select(0, sampled.column_K)
    along = (both_SK @ share_K * per_root_S1[:, 0].square() * mass_S1[:, 0].sign()).mean()
    shrinkage = compensation.shrinkage(
        along, sampled.square_K @ share_K, sampled.square_K.mean(), centered.mean_hidden_D.square().sum()
    )
    return Fitted(columns, linear, shrinkage)


def fit_tokens(dropped: Dropped, centered: Centered, sampled: SampledColumns) -> Tensor:
    """Return the factor on what the tokens, whose parts ``dropped`` has, add to d_weight: fitted on the sampled columns."""
    assert dropped.parts_SV is not None
    share_K, reweighting_K = (
        each.index_select(0, sampled.column_K)[:, None] for each in (dropped.share_V, dropped.reweighting_V)
    )
    parts_KS = dropped.parts_SV.index_select(1, sampled.column_K).t().float()
    terms_KS = parts_KS * (reweighting_K / _parts_of(dropped)) - share_K * centered.share_S
    # A column stands for as many as have its share together. S and V keep fp16 away from its ends.
    units = centered.share_S.shape[0] * dropped.share_V.shape[0] ** 0.5
    terms_KS = (terms_KS * (units * share_K.rsqrt())).masked_fill_(share_K <= 0, 0.0)
    signal = compensation.matmul(terms_KS, centered.rows_SD).square().sum()
    return compensation.signal_share(signal, terms_KS.square().sum(0) @ centered.square_S)


def _parts_of(dropped: Dropped) -> Tensor:
    """Return what all shares are in units of ``parts_SV``."""
    return PART.value * dropped.total.clamp(min=TINY.value)


def factors_of(
    fitted: Fitted, tokens: Tensor, sampled: SampledColumns, dropped: Dropped, centered: Centered | None,
    shared_hidden_2D: Tensor | None, shared_weight_2D: Tensor | None,
) -> Factors:
    """Return the factors, and take what the samples add on average off what the tokens' factors and the shares multiply.

    Args:
        fitted: As ``fit_columns`` returns it.
        tokens: As ``fit_tokens`` returns it, or 0.
        shared_hidden_2D: in, out: what the tokens' factors multiply in d_hidden, or None.
        shared_weight_2D: in, out: what the shares multiply in d_weight, or None.
    """
    if shared_hidden_2D is not None:
        shared_hidden_2D[0].sub_(fitted.columns * sampled.centered_KD.mean(0, dtype=torch.float32))
    gain = shrinkage = torch.zeros_like(tokens)
    if centered is not None and shared_weight_2D is not None:
        gain = tokens * centered.mass / _parts_of(dropped)
        # A gain of 0 says that the tokens add nothing, as where it is too small for a number.
        tokens = torch.where(gain != 0, tokens, 0.0)
        shrinkage = torch.where(tokens == 0, fitted.shrinkage * centered.mass, 0.0)
        shared_weight_2D[0].sub_(tokens * centered.mass * centered.mean_D + shrinkage * dropped.center_D)
    return Factors(fitted.columns, fitted.linear, tokens, gain, shrinkage)


def sampled_gradients(
    sampled: SampledColumns, rows: Rows, softmax: Softmax, coef_4N: Tensor, threshold_N: Tensor, grads_RK: Tensor,
    tiles: Tiles, factor: Tensor | None = None,
) -> None:
    """Write g of the group's tokens to grads_RK, times a factor if one is given; where that is 0, nothing.

    Rows at or past ``num_kept`` are 0 up to the end of their tile, and unwritten after it.
    """
    tile, x, logits = tiles.dlogits, sampled.x, sampled.x.logits
    num_rows, hidden_size = rows.hidden.shape
    num_columns = logits.num_valid
    tma = has_tma(rows.hidden, x.weight, grads_RK)
    _sampled_gradients_kernel[(cdiv(num_rows, tile.rows) * cdiv(num_columns, tile.cols),)](
        # in
        operand(rows.hidden, tile.rows, tile.inner, tma), operand(x.weight, tile.cols, tile.inner, tma), x.bias,
        sampled.column_K, sampled.inverse_share_K, x.ids, rows.index, rows.num_kept, threshold_N, softmax.max,
        softmax.log_sum, coef_4N,
        factor,
        # out
        operand(grads_RK, tile.rows, tile.cols // 2, tma),
        # sizes
        num_rows, hidden_size, num_columns, logits.start,
        # options
        logits.logit_scale, logits.softcap,
        HAS_BIAS=x.bias is not None, HAS_SCALE=logits.logit_scale != 1.0, HAS_SOFTCAP=logits.capped,
        HAS_FACTOR=factor is not None, MASK_V=num_columns % tile.cols != 0,
        # tiles
        BLOCK_N=tile.rows, BLOCK_V=tile.cols, BLOCK_D=tile.inner, TMA=tma, PRECISION=precision(rows.hidden.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )


@kernel("hidden", "weight", "bias_ptr", "grads", "hidden_size")
def _sampled_gradients_kernel(
    hidden,  # in: [R, D] descriptor or pointer
    weight,  # in: [K, D] descriptor or pointer
    bias_ptr,  # in: [K]
    column_ptr,  # in: [K] int64
    inverse_share_ptr,  # in: [K] fp32
    labels_ptr,  # in: [N] int64
    index_ptr,  # in: [R] int32
    num_kept_ptr,  # in: [1] int32
    threshold_ptr,  # in: [N] fp32
    max_ptr,  # in: [N] fp32
    log_sum_ptr,  # in: [N] fp32
    coef_ptr,  # in: [4, N] fp32
    factor_ptr,  # in: [] fp32
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
    HAS_FACTOR: tl.constexpr,
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
    nobody_reads = (tl.load(factor_ptr) == 0) if HAS_FACTOR else False
    if nobody_reads:
        return
    z = tile_of_logits(
        hidden, weight, bias_ptr, row, col, num_rows, num_columns, hidden_size, logit_scale, softcap,
        HAS_BIAS, HAS_SCALE, HAS_SOFTCAP, MASK_V, BLOCK_N, BLOCK_V, BLOCK_D, TMA, PRECISION,
    )
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
    inverse_share = tl.load(inverse_share_ptr + offs_k, mask=in_k, other=0)
    if HAS_FACTOR:
        inverse_share *= tl.load(factor_ptr)
    dropped = (z < threshold[:, None]) & (column.to(tl.int32)[None, :] != label.to(tl.int32)[:, None])
    p = tl.where(dropped, tl.exp((z - row_max[:, None]) - log_sum[:, None]), 0.0)
    if HAS_SOFTCAP:
        p = sloped(p, z, softcap)
    store_tile(
        grads,
        row,
        col,
        p * coef_p[:, None] * inverse_share[None, :],
        num_rows,
        num_columns,
        num_columns,
        BLOCK_N,
        BLOCK_V,
        TMA,
    )
