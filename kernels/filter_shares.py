"""Each column's share of the softmax mass that a filter drops, from a sample of the tokens.

    sum over sampled tokens i of |P_i| p_ij slope_ij where z_ij < threshold_i and j is not the label, outside the head

Tokens differ in how much they drop far more than in where, so the shares of a few hundred tokens stand for those of all, while
each token's own mass (``filtered_hidden.py``) is exact: at 512 tokens the mean of dE is off by about what bf16's rounding moves
it. Taken in forward over all tokens they would cost more, because sums over rows are shuffles between lanes, and be worse: a
token's LSE is not known there, and its bound is not one to weigh it with (measured 2026-11, gemma-2-2b: error 0.039).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cce_dist.kernels import ShardLogits
from cce_dist.kernels.tiles import Tile, has_tma, load_tile, logits_of, operand, precision, softcap_slope


def dropped_sums(
    rows_SD: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    num_sampled: torch.Tensor,
    reference_S: torch.Tensor,
    threshold_S: torch.Tensor,
    labels_S: torch.Tensor,
    slot_V: torch.Tensor,
    logits: ShardLogits,
    sums_V: torch.Tensor,
    tile: Tile,
) -> None:
    """Write the sums of exp(z - reference) times the softcap's slope where z < threshold, but for labels; 0 in the head."""
    num_rows, hidden_size = rows_SD.shape
    if logits.softcap > 0.0:
        tile = tile._replace(cols=max(16, tile.cols // 2))  # its epilogue over a whole one spills registers
    tma = has_tma(rows_SD, weight_VD)
    _dropped_sums_kernel[(triton.cdiv(logits.num_valid, tile.cols),)](
        # in
        operand(rows_SD, tile.rows, tile.inner, tma), operand(weight_VD, tile.cols, tile.inner, tma), bias_V,
        num_sampled, reference_S, threshold_S, labels_S, slot_V,
        # out
        sums_V,
        # sizes
        num_rows, hidden_size, logits.num_valid, logits.start,
        # options
        logits.logit_scale, logits.softcap,
        HAS_BIAS=bias_V is not None, HAS_SCALE=logits.logit_scale != 1.0, HAS_SOFTCAP=logits.softcap > 0.0,
        MASK_V=logits.num_valid % tile.cols != 0,
        # tiles
        BLOCK_N=tile.rows, BLOCK_V=tile.cols, BLOCK_D=tile.inner, TMA=tma, PRECISION=precision(rows_SD.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_rows", "num_valid", "start"],
    do_not_specialize_on_alignment=["num_sampled_ptr", "reference_ptr", "threshold_ptr", "labels_ptr"],
)
def _dropped_sums_kernel(
    hidden,  # in: [S, D] descriptor or pointer
    weight,  # in: [V, D] descriptor or pointer
    bias_ptr,  # in: [V]
    num_sampled_ptr,  # in: [1] int32
    reference_ptr,  # in: [S] fp32
    threshold_ptr,  # in: [S] fp32
    labels_ptr,  # in: [S] int64
    slot_ptr,  # in: [V] int32
    sums_ptr,  # out: [V] fp32
    num_rows,
    hidden_size,
    num_valid,
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
    num_sampled = tl.load(num_sampled_ptr)
    col = tl.program_id(0) * BLOCK_V
    offs_v = col + tl.arange(0, BLOCK_V)
    sums = tl.zeros((BLOCK_V,), tl.float32)
    for block in tl.range(0, tl.cdiv(num_sampled, BLOCK_N), flatten=True):
        row = block * BLOCK_N
        acc = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
        for inner in range(0, hidden_size, BLOCK_D):
            h = load_tile(hidden, row, inner, num_rows, hidden_size, hidden_size, BLOCK_N, BLOCK_D, TMA)
            w = load_tile(weight, col, inner, num_valid, hidden_size, hidden_size, BLOCK_V, BLOCK_D, TMA)
            acc = tl.dot(h, w.T, acc, input_precision=PRECISION)
        z = logits_of(acc, offs_v, bias_ptr, num_valid, logit_scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP, MASK_V)
        offs_n = row + tl.arange(0, BLOCK_N)
        live = offs_n < num_sampled
        reference = tl.load(reference_ptr + offs_n, mask=live, other=0)
        threshold = tl.load(threshold_ptr + offs_n, mask=live, other=float("-inf"))
        label = (tl.load(labels_ptr + offs_n, mask=live, other=-1) - start).to(tl.int32)
        dropped = (z < threshold[:, None]) & (offs_v[None, :] != label[:, None])
        e = tl.where(dropped, tl.exp(z - reference[:, None]), 0.0)
        if HAS_SOFTCAP:
            e = tl.where(e > 0, e * softcap_slope(z, softcap), 0.0)
        sums += tl.sum(e, 0)
    in_v = offs_v < num_valid
    in_head = tl.load(slot_ptr + offs_v, mask=in_v, other=0) >= 0
    tl.store(sums_ptr + offs_v, tl.where(in_head, 0.0, sums), mask=in_v)
