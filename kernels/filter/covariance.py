"""The linear correction of d_hidden: the covariance of the weight's rows, times how far a hidden state is from the mean.

    d_hidden_i  +=  r_i * linear * (e_i - e) @ covariance      covariance [D, D]  =  1 / Q  sum_q centered_q centered_q^T

``compensation.py`` derives it. The Q columns are sampled by their shares. The K columns of ``sampling.py`` estimate the linear
part, too, so their contribution, times their factor, is subtracted from the matrix. Each token then needs only
``e_i @ covariance``: the product with the mean hidden state is subtracted once, from the row that all tokens share.
"""

from __future__ import annotations

import torch
import triton.language as tl

from cce_dist.kernels import Head, Operands, Rows
from cce_dist.kernels.blocks import kernel
from cce_dist.kernels.d_weight import add_d_weight
from cce_dist.kernels.filter.sampling import LINEAR, Factors, SampledColumns, sample_centered
from cce_dist.kernels.filter.shares import REWEIGHTING, Dropped, Sample
from cce_dist.kernels.logits import logits_chunk
from cce_dist.kernels.tiles import Tiles
from cce_dist.kernels.waves import cdiv


def lines_of_sample(sampled: SampledColumns, sample: Sample, x: Operands, tiles: Tiles) -> torch.Tensor:
    """Return the linear correction at sampled tokens and columns: the product of their centered rows. -> [S, K] fp32"""
    assert sample.centered is not None
    centered_SD, num_sampled = sample.centered.rows_SD, sampled.centered_KD.shape[0]
    lines_SK = torch.empty(centered_SD.shape[0], num_sampled, dtype=torch.float32, device=centered_SD.device)
    plain = Operands(centered_SD, sampled.centered_KD, Head(), x.ids, 0, num_sampled)
    logits_chunk(plain, Rows(sample.token_S, sample.size, centered_SD), 0, lines_SK, tiles)
    return lines_SK


def covariance_of(
    dropped: Dropped, size: int, at_once: int, sampled: SampledColumns, sample: Sample, factors: Factors, x: Operands,
    tiles: Tiles,
) -> torch.Tensor:
    """Return the covariance [D, D], and subtract its product with the mean hidden state from ``Dropped.shared_2D``.

    ``size`` columns are sampled, ``at_once`` at a time. If LINEAR is 0 the covariance is 0, and the products cost nothing.
    """
    assert factors.of_covariance is not None
    gain, lines, num_apart, num_sampled = factors.of_covariance
    hidden_size = x.weight.shape[1]
    covariance_DD = torch.empty(hidden_size, hidden_size, dtype=x.weight.dtype, device=x.weight.device)
    for first in range(0, size, at_once):
        # The last group may be smaller; rows past its end count as 0.
        centered_QD = sample_centered(dropped, first, min(at_once, size - first), size, x, factors)
        columns = Rows(sampled.column_K, num_apart, centered_QD)
        add_d_weight(covariance_DD, centered_QD, columns, gain, tiles.grad_weight, add=first > 0)
    # The sampled columns add their own linear part, so subtract it here.
    columns = Rows(sampled.column_K, num_sampled, sampled.centered_KD)
    add_d_weight(covariance_DD, sampled.centered_KD, columns, lines, tiles.grad_weight, add=True)
    _subtract_mean_kernel[(cdiv(hidden_size, 32),)](
        sample.means_2D, covariance_DD, factors.values_4,
        dropped.shared_2D,
        hidden_size, REWEIGHTING * x.head.multiplier,
        BLOCK_R=256, BLOCK_D=32, num_warps=8,
    )
    return covariance_DD


@kernel("mean_ptr", "covariance_ptr", "shared_ptr", "hidden_size")
def _subtract_mean_kernel(
    mean_ptr,  # in: [2, D] fp32: the mean hidden state of all tokens; the sample's mean minus that of all tokens
    covariance_ptr,  # in: [D, D]
    factors_ptr,  # in: [4] fp32; LINEAR is read
    shared_ptr,  # in, out: [D] fp32
    hidden_size,
    reweighting,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    linear = tl.load(factors_ptr + LINEAR)
    if linear == 0:
        return
    offs_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_d = offs_d < hidden_size
    of_mean = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    of_shift = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    # Multiply both rows of the means [2, D] with the covariance [D, BLOCK_D], BLOCK_R rows at a time.
    for first in range(0, hidden_size, BLOCK_R):
        offs_r = first + tl.arange(0, BLOCK_R)
        in_r = offs_r < hidden_size
        where = covariance_ptr + offs_r.to(tl.int64)[:, None] * hidden_size + offs_d[None, :]
        row = tl.load(where, mask=in_r[:, None] & in_d[None, :], other=0).to(tl.float32)
        of_mean += tl.load(mean_ptr + offs_r, mask=in_r, other=0)[:, None] * row
        of_shift += tl.load(mean_ptr + hidden_size + offs_r, mask=in_r, other=0)[:, None] * row
    # REWEIGHTING has moved the shares from the sample's mean to the mean of all tokens. LINEAR estimates the right factor.
    more = tl.maximum(linear - reweighting, 0.0)
    subtracted = linear * tl.sum(of_mean, 0) + more * tl.sum(of_shift, 0)
    shared = tl.load(shared_ptr + offs_d, mask=in_d, other=0)
    tl.store(shared_ptr + offs_d, shared - subtracted, mask=in_d)
