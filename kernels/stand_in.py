"""What stands for the dropped part R [N, V] of a filtered gradient: a rank-1 matrix, and for d_hidden a sample of R's columns.

    R_ij  ~  r_i q_j            r_i = sum_j R_ij,    q_j = sum_i |R_ij| / sum_ij |R_ij|

has the right row sums and (upstream gradients of one sign) column sums, but gives all tokens the same mix of columns. Tokens of a
trained model differ in it: the tail of one that expects a name holds other words than that of one that expects a number, and
d_hidden is wrong by as much. So K columns k are drawn, with probability q_k each, and their R is computed:

    d_hidden_i  =  r_i c + shrink * sum_k (R_ik - r_i q_k) / (K q_k) * (weight_k - c)        c = sum_j q_j weight_j

The sum over k is the Monte Carlo estimate of a matrix product of Drineas, Kannan and Mahoney (2006), and the rank-1 matrix is its
control variate: a draw adds only what R differs from it. Row and column sums stay as they are. R_ik is that of the filter, so a
column that a token keeps adds nothing: there is no overshoot, as there is where the tail is modelled by a softmax.

A draw is noise too, and some softmaxes have nothing else to estimate. The estimate is a sum over draws, so the expected square of
its noise is the sum of its terms' squares, and the best factor on it is the rest:

    shrink  =  1 - sum_ik |term_ik|^2 / sum_i |sum_k term_ik|^2        at least 0

It is 0.9 to 1 on hidden states of training and 0.1 to 0.5 on drawn ones, whose tails are noise (``bench/workload.py``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cce_dist.kernels.budget import stand_in_columns

PARTS = 1 << 40  # shares are drawn from as whole numbers, whose sums have the same bits in any order


class Drawn(NamedTuple):
    """Columns of the shard, drawn with replacement by their share.

    Attributes:
        column: [K] int64, ascending.
        worth: [K] fp32: 1 / (K share), or 0 where all shares are.
    """

    column: Tensor
    worth: Tensor


def draw(share_V: Tensor) -> Drawn:
    """Draw columns by systematic sampling (Madow, 1949): laid end to end, each as long as its share, one at equal steps."""
    size = stand_in_columns(share_V.shape[0])
    end_V = (share_V.double() * PARTS).round().long().cumsum(0)
    step = torch.arange(size, device=share_V.device)
    column = torch.searchsorted(end_V, (2 * step + 1) * (end_V[-1] // (2 * size)), right=True)
    column.clamp_(max=share_V.shape[0] - 1)
    share = share_V[column]
    return Drawn(column, torch.where(share > 0, 1 / (size * share), 0.0))


def shrink(signal: Tensor, noise: Tensor) -> Tensor:
    """Return the factor on the estimate from its square and the sum of its terms' squares, 0-d tensors."""
    return (1 - noise / torch.where(signal > 0, signal, torch.inf)).clamp(min=0.0).nan_to_num(0.0)
