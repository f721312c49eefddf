"""How a filter samples, and the factors on its corrections, in plain torch; ``kernels/filter/sampling.py`` derives them."""

import torch
from torch import Tensor

from cce_dist.kernels.filter import sampling
from cce_dist.kernels.filter.shares import UNIT


def sample(share: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Draw ``size`` indices by systematic sampling (Madow, 1949): lay the shares end to end, and pick at equal distances.

    Return ids, int64 and ascending, and 1 / (size * share) of each, or 0 for a share of 0.
    """
    end = (share * UNIT.value).long().cumsum(0)
    step = torch.arange(size, device=share.device)
    place = torch.searchsorted(end, (2 * step + 1) * (end[-1] // (2 * size)), right=True)
    place.clamp_(max=share.shape[0] - 1)
    sampled = share[place]
    return place, torch.where(sampled > 0, 1 / (size * sampled), 0.0)


def signal_share(signal: Tensor, noise: Tensor) -> Tensor:
    """Return ``signal_share`` of ``kernels/filter/sampling.py``: the factor on an estimate.

    Args:
        signal: Square of the estimate.
        noise: Sum of the squares of its terms.
    """
    factor = (1 - noise / torch.where(signal > 0, signal, torch.inf)).nan_to_num(0.0)
    return torch.where((factor > sampling.LEAST_SIGNAL) & (signal > 0), factor, 0.0)


def linear(estimate: Tensor, lines: Tensor, noise_3: Tensor, noise_part: float) -> tuple[Tensor, Tensor]:
    """Return two 0-d factors: on the linear correction, and on the samples' estimate of the error that remains.

    Args:
        estimate: The samples' estimate of the rank-1 matrix's error.
        lines: The samples' estimate of the linear correction.
        noise_3: Squared noise of ``estimate``, product of both noises, squared noise of ``lines``.
        noise_part: Squared noise of the linear correction itself, divided by the squared noise of ``lines``.
    """
    factor = torch.linspace(0.0, 1.0, sampling.LINEAR_FACTORS, device=estimate.device)
    square = factor.square()
    signal = estimate.square().sum() - 2 * factor * (estimate * lines).sum() + square * lines.square().sum()
    noise = noise_3[0] - 2 * factor * noise_3[1] + square * noise_3[2]
    part = signal_share(signal, noise)
    left = torch.where(part > 0, part * noise, (signal - noise).clamp(min=0.0)) + square * noise_3[2] * noise_part
    best = left.nan_to_num(torch.inf).argmin()
    return factor[best], part[best]
