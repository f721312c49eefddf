"""What the adapters for reinforcement learning are compared with: log-probabilities and entropies from logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cce_dist.tools.verify.check import assert_no_worse

HIDDEN, VOCAB, TOKENS = 16, 64, 12


def operands(batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states [batch, TOKENS, HIDDEN], the whole weight [VOCAB, HIDDEN] and labels [batch, TOKENS]."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(batch, TOKENS, HIDDEN, generator=generator),
        torch.randn(VOCAB, HIDDEN, generator=generator),
    )
    return hidden, weight, torch.randint(VOCAB, (batch, TOKENS), generator=generator)


def dense_scores(logits: Tensor, labels: Tensor, temperature: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of labels and entropies, of labels' shape [...], from logits [..., V]."""
    log_softmax = (
        logits / (temperature.unsqueeze(-1) if isinstance(temperature, Tensor) else temperature)
    ).log_softmax(-1)
    picked = log_softmax.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return picked, -(log_softmax.exp() * log_softmax).sum(-1)


def policy_loss(log_probs: Tensor, entropy: Tensor) -> Tensor:
    """Return a loss with an entropy bonus, whose upstream gradients have both signs and very different sizes."""
    count = log_probs.numel()
    advantages = torch.arange(count).sin() * 10.0 ** torch.linspace(-3, 1, count)
    return -(advantages.to(log_probs.dtype) * log_probs.reshape(-1)).sum() - 0.1 * entropy.sum()


def compare(
    ours: Callable, dense: Callable, hidden: Tensor, weight: Tensor, mine: Any = slice(None), rows: Any = slice(None)
) -> None:
    """Raise unless scores and gradients are as right as those of dense arithmetic in fp32; float64 is the truth.

    Args:
        ours, dense: Functions of hidden states and weight that return log-probabilities and entropies.
        hidden, weight: What ``dense`` is given.
        mine, rows: The part of hidden states and the rows of the weight that ``ours`` is given on this rank.
    """
    results = []
    for function, parts, dtype in (
        (ours, (mine, rows), torch.float32),
        *((dense, (slice(None),) * 2, t) for t in DTYPES),
    ):
        leaves = [x.detach()[part].to(dtype).requires_grad_() for x, part in zip((hidden, weight), parts, strict=True)]
        scores = function(*leaves)
        results.append([*scores, *torch.autograd.grad(policy_loss(*scores), leaves)])
    for which, part in ((2, mine), (3, rows)):
        for result in results[1:]:
            result[which] = result[which][part]
    for name, *values in zip(("log_probs", "entropy", "d_hidden", "d_weight"), *results, strict=True):
        assert values[0].shape == values[1].shape, f"{name}: {tuple(values[0].shape)}, not {tuple(values[1].shape)}"
        assert_no_worse(*values, quantity=name)


DTYPES = torch.float32, torch.float64  # of the baseline, and of the truth
