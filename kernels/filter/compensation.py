"""The control variate that replaces the dropped part R [N, V] of a filtered gradient, and the samples that correct it.

    R_ij  ~  r_i q_j            r_i = sum_j R_ij,    q_j = sum_i |R_ij| / sum_ij |R_ij|

This rank-1 matrix has the right row sums and (upstream gradients of one sign) column sums, but gives every token the same mix
of columns. The tokens of a trained model differ: before a name the tail holds other words than before a number. So K columns
k are sampled with probabilities q_k, and S tokens s with probabilities p_s = |r_s| / sum_i |r_i|, and R is computed there:

    d_hidden_i  =  r_i c                + factor * sum_k (R_ik - r_i q_k) / (K q_k) * (weight_k - c)    c = sum_j q_j weight_j
    d_weight_j  =  q_j sum_i r_i e_i    + factor * sum_s (R_sj - r_s q_j) / (S p_s) * (e_s - e)         e = sum_i p_i e_i

where e_i is a hidden state, and each gradient has its own factor. The sums over k and s are Monte Carlo estimates of a matrix
product (Drineas, Kannan and Mahoney, 2006) with inverse-probability weights 1 / (K q_k) and 1 / (S p_s). The rank-1 matrix is
their control variate: a sample adds the difference between R and that matrix. Row sums stay as they are for d_hidden, and
column sums for d_weight. R_ik is 0 where token i keeps column k.

Samples add noise, and for some softmaxes nothing but noise. The estimate is a sum of independent terms, so the expected square
of its noise is the sum of their squares. The factor that minimises the expected error is the signal's share of the square:

    signal_share  =  1 - sum_ik |term_ik|^2 / sum_i |sum_k term_ik|^2        (at least 0; for d_weight likewise)

Most of the correction of d_hidden is linear. A tail that is reweighted by exp of a linear function of its token's hidden
state has

    R_ij  ~  r_i q_j (1 + linear * (e_i - e) . (weight_j - c))

to first order, hence d_hidden_i += r_i * linear * (e_i - e) covariance, with covariance = sum_j q_j (weight_j - c)(weight_j -
c)^T. The covariance may be estimated from more columns than the K. The linear part is subtracted from the samples' terms, like
the rank-1 matrix. ``linear`` minimises the expected error. With it d_hidden has smaller errors even at four times the eps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Smaller factors become 0: these samples would leave more than three quarters of the error.
LEAST_SIGNAL = 0.25
# d_hidden is corrected if the correction's square exceeds this share of d_hidden's: bf16 rounds away anything smaller.
LEAST_CORRECTED = 4e-6
LINEAR_FACTORS = 32  # factors of the linear correction that are tried, from 0 to 1
PARTS = 1 << 40  # shares become integers in this unit before sampling: integer sums have the same bits in any order


class Sampled(NamedTuple):
    """Columns or tokens, sampled with replacement by their share.

    Attributes:
        place: int64, ascending.
        inverse_share: fp32: 1 / (number of samples * share), or 0 for a share of 0.
    """

    place: Tensor
    inverse_share: Tensor


def sample(share: Tensor, size: int) -> Sampled:
    """Draw ``size`` indices by systematic sampling (Madow, 1949): lay the shares end to end, and pick at equal distances."""
    end = (share * PARTS).long().cumsum(0)
    step = torch.arange(size, device=share.device)
    place = torch.searchsorted(end, (2 * step + 1) * (end[-1] // (2 * size)), right=True)
    place.clamp_(max=share.shape[0] - 1)
    sampled = share[place]
    return Sampled(place, torch.where(sampled > 0, 1 / (size * sampled), 0.0))


def signal_share(signal: Tensor, noise: Tensor) -> Tensor:
    """Return ``signal_share`` of the module docstring: the factor on an estimate.

    Args:
        signal: Square of the estimate.
        noise: Sum of the squares of its terms.
    """
    factor = (1 - noise / torch.where(signal > 0, signal, torch.inf)).nan_to_num(0.0)
    return torch.where((factor > LEAST_SIGNAL) & (signal > 0), factor, 0.0)


def linear(estimate: Tensor, lines: Tensor, noise_3: Tensor, noise_part: float, usual: Tensor) -> tuple[Tensor, Tensor]:
    """Return two 0-d factors: on the linear correction, and on the samples' estimate of the error that remains.

    The factor on the linear correction is chosen from a grid, so that the expected error is smallest. This error is what the
    samples leave after their own factor, plus the noise of the linear correction.

    Args:
        estimate: The samples' estimate of the rank-1 matrix's error.
        lines: The samples' estimate of the linear correction.
        noise_3: Squared noise of ``estimate``, product of both noises, squared noise of ``lines``.
        noise_part: Squared noise of the linear correction itself, divided by the squared noise of ``lines``.
        usual: Square of d_hidden. A correction of less than ``LEAST_CORRECTED`` of it becomes 0.
    """
    factor = torch.linspace(0.0, 1.0, LINEAR_FACTORS, device=estimate.device)
    square = factor.square()
    signal = estimate.square().sum() - 2 * factor * (estimate * lines).sum() + square * lines.square().sum()
    noise = noise_3[0] - 2 * factor * noise_3[1] + square * noise_3[2]
    part = signal_share(signal, noise)
    left = torch.where(part > 0, part * noise, (signal - noise).clamp(min=0.0)) + square * noise_3[2] * noise_part
    best = left.nan_to_num(torch.inf).argmin()
    least = LEAST_CORRECTED * usual
    best = torch.where(left[0] - left[best] > least, best, 0)
    rank_1 = (signal[0] - noise[0]).clamp(min=0.0)
    return factor[best], torch.where(rank_1 - left[best] > least, part[best], 0.0)
