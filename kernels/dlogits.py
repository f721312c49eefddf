"""Gradient of the logits, recomputed for a chunk of the vocabulary and written in the hidden states' dtype.

    dL/du = scale * slope * (P p + LABEL [j = label] + UNIFORM - ENTROPY p (log p + H)),  p = exp(z - max - log_sum)

with the coefficients of ``kernels/__init__.py``. This is the backward recomputation of *Cut Your Losses* (Wijmans et al., 2024,
algorithm 3), except that the tile goes to memory, a bounded chunk at a time. The two products that follow are then plain matrix
multiplications, which write each output once and need neither locks nor atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cce_dist.kernels import Operands, Rows, Softmax
from cce_dist.kernels.blocks import (
    has_tma,
    kernel,
    operand,
    row_and_split,
    softcap_slope,
    store_tile,
    tile_of_logits,
)
from cce_dist.kernels.budget import cdiv
from cce_dist.kernels.fast_math import LOG2_E, fast_exp2, has_fast_math
from cce_dist.kernels.lse import choose_splits
from cce_dist.kernels.tiles import Tiles, num_programs, precision

LOWEST = tl.constexpr(-1e4)  # nats: stands for any log-probability that far down, whose probability is 0


def dlogits_chunk(
    x: Operands,
    rows: Rows,
    softmax: Softmax,
    coef_4N: torch.Tensor,
    first_col: int,
    dlogits_RV: torch.Tensor,
    tiles: Tiles,
    *,
    one_wave: bool = False,
) -> None:
    """Fill dlogits_RV with the columns from ``first_col`` (a multiple of the tile) on.

    ``one_wave``: as many programs as run at a time do the work of all, in the same order. Often no row is kept, and thousands
    that return would take longer than these.

    Rows at or past ``num_kept`` are 0 up to the end of their tile, and unwritten after it; columns past ``num_valid`` are 0.
    """
    tile, logits = tiles.dlogits, x.logits
    num_rows, hidden_size = rows.hidden.shape
    num_tiles = cdiv(min(dlogits_RV.shape[1], logits.num_valid - first_col), tile.cols)
    splits = choose_splits(num_rows, num_tiles, tile, dlogits_RV.device)
    tma = has_tma(rows.hidden, x.weight, dlogits_RV)
    if one_wave:  # Nobody takes what another has left, so all parts are alike.
        splits = num_tiles
    programs = cdiv(num_rows, tile.rows) * splits
    _dlogits_kernel[(min(programs, num_programs(dlogits_RV.device)) if one_wave else programs,)](
        # in
        operand(rows.hidden, tile.rows, tile.inner, tma), operand(x.weight, tile.cols, tile.inner, tma), x.bias,
        x.ids, rows.index, rows.num_kept, softmax.max, softmax.log_sum, softmax.entropy, coef_4N, x.factors_N2,
        # out
        operand(dlogits_RV, tile.rows, tile.cols // 2, tma),
        # sizes
        num_rows, hidden_size, logits.num_valid, logits.start, x.num_tokens, dlogits_RV.shape[1], first_col, num_tiles,
        splits,
        # options
        logits.logit_scale, logits.softcap,
        HAS_BIAS=x.bias is not None, HAS_SOFTCAP=logits.capped,
        HAS_SCALE=logits.logit_scale != 1.0 or x.factors_N2 is not None, HAS_FACTORS=x.factors_N2 is not None,
        HAS_ENTROPY=softmax.entropy is not None, FAST=has_fast_math(), MASK_V=logits.num_valid % tile.cols != 0,
        ONE_WAVE=one_wave,
        # tiles
        BLOCK_N=tile.rows, BLOCK_V=tile.cols, BLOCK_D=tile.inner, GROUP=tiles.group, TMA=tma,
        PRECISION=precision(rows.hidden.dtype), num_warps=tile.warps, num_stages=tile.stages,
    )


@kernel("hidden", "weight", "bias_ptr", "dlogits", "hidden_size")
def _dlogits_kernel(
    hidden,  # in: [R, D] descriptor or pointer
    weight,  # in: [V, D] descriptor or pointer
    bias_ptr,  # in: [V]
    labels_ptr,  # in: [N] int64
    index_ptr,  # in: [R] int32
    num_kept_ptr,  # in: [1] int32
    max_ptr,  # in: [N] fp32
    log_sum_ptr,  # in: [N] fp32
    entropy_ptr,  # in: [N] fp32
    coef_ptr,  # in: [4, N] fp32
    factor_ptr,  # in: [N, 2] fp32
    dlogits,  # out: [R, columns of the chunk] descriptor or pointer
    num_rows,
    hidden_size,
    num_valid,
    start,
    num_tokens,
    dlogits_cols,
    first_col,
    num_tiles,
    num_splits,
    logit_scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    FAST: tl.constexpr,
    MASK_V: tl.constexpr,
    ONE_WAVE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    num_kept = tl.load(num_kept_ptr)
    num_row_blocks = tl.cdiv(num_kept, BLOCK_N)
    pid = tl.program_id(0)
    num_parts = num_row_blocks * num_splits
    given = (
        hidden, weight, bias_ptr, labels_ptr, index_ptr, max_ptr, log_sum_ptr, entropy_ptr, coef_ptr, factor_ptr, dlogits,
        num_kept, num_rows, hidden_size, num_valid, start, num_tokens, dlogits_cols, first_col, num_tiles, num_splits,
        logit_scale, softcap,
    )
    if ONE_WAVE:
        for part in range(pid, num_parts, tl.num_programs(0)):
            _write_part(
                part, num_row_blocks, *given, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP, HAS_ENTROPY, HAS_FACTORS, FAST, MASK_V,
                BLOCK_N, BLOCK_V, BLOCK_D, GROUP, TMA, PRECISION,
            )
        return
    if pid >= num_parts:
        return
    _write_part(
        pid, num_row_blocks, *given, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP, HAS_ENTROPY, HAS_FACTORS, FAST, MASK_V,
        BLOCK_N, BLOCK_V, BLOCK_D, GROUP, TMA, PRECISION,
    )


@triton.jit
def _write_part(
    part, num_row_blocks,
    hidden, weight, bias_ptr, labels_ptr, index_ptr, max_ptr, log_sum_ptr, entropy_ptr, coef_ptr, factor_ptr, dlogits,
    num_kept, num_rows, hidden_size, num_valid, start, num_tokens, dlogits_cols, first_col, num_tiles, num_splits,
    logit_scale, softcap,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ENTROPY: tl.constexpr,
    HAS_FACTORS: tl.constexpr, FAST: tl.constexpr, MASK_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):
    """Write the tiles that a block of rows has in a part of the columns."""
    row_block, split = row_and_split(part, num_row_blocks, num_splits, GROUP)
    row = row_block * BLOCK_N
    offs_n = row + tl.arange(0, BLOCK_N)
    live = offs_n < num_kept
    token = tl.load(index_ptr + offs_n, mask=live, other=0)
    # A maximum of +inf makes every p of a dead row 0.
    row_max = tl.load(max_ptr + token, mask=live, other=float("inf"))
    log_sum = tl.load(log_sum_ptr + token, mask=live, other=0)
    label = (tl.load(labels_ptr + token, mask=live, other=-1) - start - first_col).to(tl.int32)
    coef = coef_ptr + token
    stride = num_tokens.to(tl.int64)
    scale = logit_scale
    bound = softcap
    if HAS_FACTORS:
        factor = factor_ptr + 2 * token.to(tl.int64)
        scale = tl.load(factor, mask=live, other=1)
        logit_scale = scale[:, None]
        if HAS_SOFTCAP:
            after = tl.load(factor + 1, mask=live, other=1)
            scale *= after
            bound = softcap * after[:, None]
    coef_p = tl.load(coef, mask=live, other=0) * scale
    coef_label = tl.load(coef + stride, mask=live, other=0) * scale
    coef_uniform = tl.load(coef + 2 * stride, mask=live, other=0) * scale
    if HAS_ENTROPY:
        coef_entropy = tl.load(coef + 3 * stride, mask=live, other=0) * scale
        coef_p -= coef_entropy * tl.load(entropy_ptr + token, mask=live, other=0)

    for tile in tl.range(split * num_tiles // num_splits, (split + 1) * num_tiles // num_splits, flatten=True):
        col = tile * BLOCK_V
        z = tile_of_logits(
            hidden, weight, bias_ptr, row, first_col + col, num_rows, num_valid, hidden_size, logit_scale, softcap,
            HAS_BIAS, HAS_SCALE, HAS_SOFTCAP, MASK_V, BLOCK_N, BLOCK_V, BLOCK_D, TMA, PRECISION,
        )
        if HAS_FACTORS and HAS_SOFTCAP:
            z *= after[:, None]
        offs_v = col + tl.arange(0, BLOCK_V)
        log_p = (z - row_max[:, None]) - log_sum[:, None]
        if HAS_ENTROPY:
            p = fast_exp2(log_p * LOG2_E, FAST)
            # A probability that underflows would make 0 * -inf.
            grad = p * (coef_p[:, None] - coef_entropy[:, None] * tl.maximum(log_p, LOWEST)) + coef_uniform[:, None]
        else:
            p = tl.exp(log_p)
            grad = coef_p[:, None] * p + coef_uniform[:, None]
        grad = tl.where(offs_v[None, :] == label[:, None], grad + coef_label[:, None], grad)
        if HAS_SOFTCAP:
            grad *= softcap_slope(z, bound)
        if MASK_V:
            grad = tl.where((first_col + offs_v < num_valid)[None, :], grad, 0.0)
        store_tile(dlogits, row, col, grad, num_rows, dlogits_cols, dlogits_cols, BLOCK_N, BLOCK_V, TMA)
