"""What stands for the dropped part R [N, V] of a filtered gradient: a rank-1 matrix, corrected by some of R's columns and rows.

    R_ij  ~  r_i q_j            r_i = sum_j R_ij,    q_j = sum_i |R_ij| / sum_ij |R_ij|

That has the right row sums and (upstream gradients of one sign) column sums, but gives every token the same mix of columns. The
tokens of a trained model differ: the tail of one that expects a name holds other words than that of one that expects a number.
So K columns k are drawn, with probability q_k each, and what the tokens drop of them is computed; and S tokens s, with
probability p_s = |r_s| / sum_i |r_i| each:

    d_hidden_i  =  r_i c                + shrink * sum_k (R_ik - r_i q_k) / (K q_k) * (weight_k - c)    c = sum_j q_j weight_j
    d_weight_j  =  q_j sum_i r_i e_i    + shrink * sum_s (R_sj - r_s q_j) / (S p_s) * (e_s - e)         e = sum_i p_i e_i

where e_i is a hidden state, and each gradient has its own shrink. The sums over k and s are Monte Carlo estimates of a matrix
product (Drineas, Kannan and Mahoney, 2006). The rank-1 matrix is their control variate: a draw adds what R differs by. Row sums
stay as they are for d_hidden and column sums for d_weight. R_ik is what the filter drops, so a column that a token keeps adds
nothing. A model of the tail, such as its tilt by the hidden state, does not know where the filter cuts, and overshoots.

A draw is noise too, and on some softmaxes nothing else. The estimate is a sum of independent terms, so the square of its noise
is expected to be the sum of their squares. The best factor on the estimate leaves that out:

    shrink  =  1 - sum_ik |term_ik|^2 / sum_i |sum_k term_ik|^2        (at least 0; for d_weight likewise)

Most of what d_hidden's draws find is linear. A tail that is tilted by its token's hidden state has

    R_ij  ~  r_i q_j (1 + bend * (e_i - e) . (weight_j - c))

to first order, hence d_hidden_i += r_i * bend * (e_i - e) spread, with spread = sum_j q_j (weight_j - c)(weight_j - c)^T. The
latter comes from more columns than the draws can have, since a product with a matrix of D x D is all that a token
pays. The linear part is then taken off the draws' terms, as the rank-1 matrix is, and the draws are left with what bends
otherwise, such as the upper end that the filter keeps. ``bend`` is the factor that is expected to leave the least error.
With it, an eps that is four times as large leaves smaller errors of d_hidden.

For d_weight the same line says q_j * C (weight_j - c), with C the covariance of hidden states by what they drop, and that would
take D x D products for all columns. Its draws find a part of it. Where their factor is 0, C is taken to be the same in all
directions, a multiple of the identity (the target to which Ledoit and Wolf, 2004, shrink a covariance):

    d_weight_j  +=  isotropic * q_j (weight_j - c)

The sampled tokens and drawn columns decide on the factor, by least squares.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Factors below it are 0: such draws would leave more than three quarters of what they should correct.
LEAST_SHRUNK = 0.25
# Least square of what is corrected of d_hidden, over that of d_hidden: no product is worth less than a rounding of bf16.
LEAST_CORRECTED = 4e-6
# Least square of what a column's own row adds to its gradient, over that of the rank-1 matrix: less is not worth the reading.
LEAST_ISOTROPIC = 2.0**-10
BENDS = 32  # factors that are tried on the linear model, from 0 to 1
PARTS = 1 << 40  # shares are drawn from as whole numbers, whose sums have the same bits in any order


class Drawn(NamedTuple):
    """Columns or tokens, drawn with replacement by their share.

    Attributes:
        place: int64, ascending.
        worth: fp32: 1 / (draws * share), or 0 where all shares are.
    """

    place: Tensor
    worth: Tensor


def draw(share: Tensor, size: int) -> Drawn:
    """Draw ``size`` places by systematic sampling (Madow, 1949): they lie end to end by share, and one is taken each step."""
    end = (share * PARTS).long().cumsum(0)
    step = torch.arange(size, device=share.device)
    place = torch.searchsorted(end, (2 * step + 1) * (end[-1] // (2 * size)), right=True)
    place.clamp_(max=share.shape[0] - 1)
    drawn = share[place]
    return Drawn(place, torch.where(drawn > 0, 1 / (size * drawn), 0.0))


def shrink(signal: Tensor, noise: Tensor) -> Tensor:
    """Return the factor on an estimate from its square and the sum of its terms' squares."""
    factor = (1 - noise / torch.where(signal > 0, signal, torch.inf)).nan_to_num(0.0)
    return torch.where((factor > LEAST_SHRUNK) & (signal > 0), factor, 0.0)


def isotropic(along: Tensor, weighted: Tensor, mean_square: Tensor, usual: Tensor) -> Tensor:
    """Return the factor on a column's own row, a 0-d tensor.

    Args:
        along: sum_j q_j (estimate_j . away_j), of what the rank-1 matrix leaves of d_weight and away_j = weight_j - c.
        weighted: sum_j q_j^2 |away_j|^2.
        mean_square: sum_j q_j |away_j|^2.
        usual: Square of what the shares multiply. What adds less than ``LEAST_ISOTROPIC`` of it is left out.
    """
    factor = (along / torch.where(weighted > 0, weighted, torch.inf)).nan_to_num(0.0)
    return torch.where(factor.square() * mean_square > LEAST_ISOTROPIC * usual, factor, 0.0)


def bend(estimate: Tensor, lines: Tensor, noise_3: Tensor, noise_part: float, usual: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors on the linear model and on the draws' estimate of what it leaves, 0-d tensors.

    Of a few factors on the model the one is taken that leaves the least error, as expected: for the draws' part, true square
    times noise over the sum of the two, for the model's own noise its square.

    Args:
        estimate: The draws' estimate, of what the rank-1 matrix leaves.
        lines: Their estimate of the linear model.
        noise_3: Noise of the former, product of both, noise of the latter.
        noise_part: The model's own noise, in units of the last.
        usual: Square of d_hidden. What corrects less than ``LEAST_CORRECTED`` of it is left out.
    """
    factor = torch.linspace(0.0, 1.0, BENDS, device=estimate.device)
    square = factor.square()
    signal = estimate.square().sum() - 2 * factor * (estimate * lines).sum() + square * lines.square().sum()
    noise = noise_3[0] - 2 * factor * noise_3[1] + square * noise_3[2]
    part = shrink(signal, noise)
    left = torch.where(part > 0, part * noise, (signal - noise).clamp(min=0.0)) + square * noise_3[2] * noise_part
    best = left.nan_to_num(torch.inf).argmin()
    least = LEAST_CORRECTED * usual
    best = torch.where(left[0] - left[best] > least, best, 0)
    rank_1 = (signal[0] - noise[0]).clamp(min=0.0)
    return factor[best], torch.where(rank_1 - left[best] > least, part[best], 0.0)
