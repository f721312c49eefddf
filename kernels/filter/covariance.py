"""The linear correction of d_hidden: the covariance of the weight's rows, times how far a hidden state is from the mean.

    d_hidden_i  +=  r_i * linear * (e_i - e) @ covariance      covariance [D, D]  =  1 / Q  sum_q centered_q centered_q^T

``compensation.py`` derives it. The Q columns are sampled by their shares. The columns of ``sampling.py`` estimate the same sum,
so their linear part, times their factor, is taken off the matrix. Then a token needs ``e_i @ covariance`` alone: the mean's
product goes to what all tokens share.
"""

from __future__ import annotations

import torch

from cce_dist.kernels import Head, Operands, Rows
from cce_dist.kernels.d_weight import add_d_weight
from cce_dist.kernels.filter.sampling import Factors, SampledColumns, sample_centered
from cce_dist.kernels.filter.shares import REWEIGHTING, Dropped, Sample
from cce_dist.kernels.logits import logits_chunk
from cce_dist.kernels.tiles import Tiles
from cce_dist.kernels.tokens import sums_of_rows


def lines_of_sample(sampled: SampledColumns, sample: Sample, x: Operands, tiles: Tiles) -> torch.Tensor:
    """Return the linear correction at the sampled columns: the product of both samples less their means. -> [S, K] fp32"""
    assert sample.centered is not None
    centered_SD, num_sampled = sample.centered.rows_SD, sampled.centered_KD.shape[0]
    lines_SK = torch.empty(centered_SD.shape[0], num_sampled, dtype=torch.float32, device=centered_SD.device)
    plain = Operands(centered_SD, sampled.centered_KD, Head(), x.ids, 0, num_sampled)
    logits_chunk(plain, Rows(_places(centered_SD), sample.size, centered_SD), 0, lines_SK, tiles)
    return lines_SK


def covariance_of(
    dropped: Dropped, size: int, at_once: int, sampled: SampledColumns, sample: Sample, factors: Factors,
    shared_2D: torch.Tensor,
    x: Operands, tiles: Tiles,
) -> torch.Tensor:
    """Return the covariance, and take its product with the mean hidden state off ``shared_2D``. -> [D, D]

    ``size`` columns are sampled, some at a time. Where the linear's factor is 0 the covariance is 0, and the products cost
    nothing.
    """
    assert sample.mean_D is not None and sample.mean_shift_D is not None and dropped.center_D is not None
    hidden_size, device = x.weight.shape[1], x.weight.device
    has_linear = (factors.linear > 0).to(torch.int32)[None]
    covariance_DD = x.weight.new_empty(hidden_size, hidden_size)
    gain = torch.full((), 1.0 / size, dtype=torch.float32, device=device)
    for first in range(0, size, at_once):
        centered_QD = sample_centered(
            dropped, first, min(at_once, size - first), size, dropped.center_D, x, factors.linear
        )
        columns = Rows(_places(centered_QD), has_linear * len(centered_QD), centered_QD)
        add_d_weight(covariance_DD, centered_QD, columns, gain, tiles.grad_weight, add=first > 0)
    # The sampled columns add their own linear part, so it is taken off here.
    columns = Rows(sampled.column_K, has_linear * len(sampled.centered_KD), sampled.centered_KD)
    add_d_weight(covariance_DD, sampled.centered_KD, columns, factors.lines, tiles.grad_weight, add=True)
    # REWEIGHTING moved the shares from the sample's mean to that of all tokens. ``linear`` is the estimate of the right factor.
    shift_2D = sums_of_rows(torch.stack((sample.mean_D, sample.mean_shift_D.float())), covariance_DD)
    factors_2 = torch.stack((factors.linear, (factors.linear - REWEIGHTING * x.head.multiplier).clamp(min=0.0)))
    shared_2D[0].sub_((factors_2[:, None] * shift_2D).sum(0))
    return covariance_DD


def _places(rows: torch.Tensor) -> torch.Tensor:
    return torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
