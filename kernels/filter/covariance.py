"""The linear correction of d_hidden: the covariance of the weight's rows, times how far a hidden state is from the mean.

    d_hidden_i  +=  r_i * linear * (e_i - e) @ covariance      covariance [D, D]  =  1 / Q  sum_q centered_q centered_q^T

``compensation.py`` derives it. The Q columns are sampled by their shares. The columns of ``sampling.py`` estimate the same sum,
so their linear part, times their factor, is taken off the matrix. Then a token needs ``e_i @ covariance`` alone: the mean's
product goes to what all tokens share.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cce_dist.kernels import Operands, Rows, compensation
from cce_dist.kernels.d_weight import add_d_weight
from cce_dist.kernels.filter.sampling import Factors, SampledColumns
from cce_dist.kernels.filter.shares import REWEIGHTING, Centered, Dropped
from cce_dist.kernels.tiles import Tiles
from cce_dist.kernels.tokens import sums_of_rows


def covariance_of(
    dropped: Dropped, size: int, at_once: int, sampled: SampledColumns, centered: Centered, factors: Factors,
    shared_2D: Tensor, x: Operands, tiles: Tiles,
) -> Tensor:
    """Return the covariance, and take its product with the mean hidden state off ``shared_2D``. -> [D, D]

    ``size`` columns are sampled, some at a time. Where the linear's factor is 0 the covariance is 0, and there are no products.
    """
    hidden_size, device = x.weight.shape[1], x.weight.device
    has_linear = (factors.linear > 0).to(torch.int32)[None]
    covariance_DD = x.weight.new_empty(hidden_size, hidden_size)

    def add(centered_QD: Tensor, gain: Tensor, *, first: bool) -> None:
        places = torch.arange(len(centered_QD), dtype=torch.int32, device=device)
        columns = Rows(places, has_linear * len(centered_QD), centered_QD)
        add_d_weight(covariance_DD, centered_QD, columns, gain, tiles.grad_weight, add=not first)

    place_Q, center_D = compensation.sample(dropped.share_V, size), dropped.center_D.to(x.weight.dtype)
    for first in range(0, size, at_once):
        weight_QD = x.weight.index_select(0, place_Q[first : first + at_once])
        add(weight_QD.sub_(center_D), torch.full((), 1.0 / size, device=device), first=first == 0)
    # The sampled columns add their own linear part, so it is taken off here.
    add(sampled.centered_KD, -factors.columns / len(sampled.centered_KD), first=False)
    # REWEIGHTING moved the shares from the sample's mean to that of all tokens. ``linear`` is the estimate of the right factor.
    shift_2D = sums_of_rows(torch.stack((centered.mean_hidden_D, centered.mean_shift_D.float())), covariance_DD)
    factors_2 = torch.stack((factors.linear, (factors.linear - REWEIGHTING * x.logits.logit_scale).clamp(min=0.0)))
    shared_2D[0].sub_((factors_2[:, None] * shift_2D).sum(0))
    return covariance_DD
