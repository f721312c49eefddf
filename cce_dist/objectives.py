"""Losses for ``linear_cross_entropy(..., token_loss=...)``: fine-tuning and policy losses.

    loss = linear_cross_entropy(hidden, weight, ids, token_loss=clipped_policy(), token_inputs=(advantages, old_log_probs))

Each function here takes the options of a loss and returns the function to pass as ``token_loss``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FARTHEST = 80.0  # nats: largest log-ratio of a clipped policy


def dft() -> Callable[..., Any]:
    """Dynamic fine-tuning: the negative log-likelihood times the label's detached probability.

    Source: https://arxiv.org/abs/2508.05629, TRL's ``loss_type="dft"``.
    """
    return lambda log_probs, _: -log_probs * log_probs.detach().exp()


def entropy_adaptive(alpha: float = 1.0, scale: float = 3.0) -> Callable[..., Any]:
    """Entropy-adaptive fine-tuning: the negative log-likelihood times ``(entropy / scale)**alpha``, detached.

    Source: https://arxiv.org/abs/2601.02151; LLaMA-Factory's ``use_eaft_loss``, whose entropy is over the 20 largest logits.
    """

    def function(log_probs: Tensor, entropy: Tensor) -> Tensor:
        return -log_probs * (entropy.detach() / scale) ** alpha

    function.needs_entropy = True  # type: ignore[attr-defined]
    return function


def clipped_policy(
    low: float = 0.2, high: float = 0.2, kl_coef: float = 0.0, entropy_coef: float = 0.0, dual: float | None = None
) -> Callable[..., Any]:
    """PPO's clipped loss. ``token_inputs`` are advantages and old_log_probs, then ref_log_probs if ``kl_coef`` is not 0.

    The metrics are "ratio" and "clipped". Source: https://arxiv.org/abs/1707.06347; TRL's GRPO, whose beta is ``kl_coef``
    (estimator k3); verl's ``compute_policy_loss``, whose clip_ratio_c is ``dual``. The log-ratio is at most 80,
    so that exp does not overflow; verl clamps it to [-20, 20].
    """

    def function(log_probs: Tensor, entropy: Any, advantages: Tensor, old: Tensor, *ref: Tensor) -> tuple[Tensor, dict]:
        if kl_coef and not ref:
            raise ValueError("kl_coef is not 0: pass token_inputs=(advantages, old_log_probs, ref_log_probs)")
        # If exp overflows, its gradient is NaN even where the loss is clipped.
        ratio = (log_probs - old).clamp(max=FARTHEST).exp()
        # The larger of the paper's two losses. A clipped token has no gradient.
        clipped = torch.where(advantages > 0, ratio > 1 + high, (ratio < 1 - low) & (advantages < 0))
        losses = -torch.where(clipped, ratio.detach().clamp(1 - low, 1 + high), ratio) * advantages
        if dual is not None:
            losses = torch.where(advantages < 0, torch.minimum(losses, -dual * advantages), losses)
        if kl_coef:
            losses = losses + kl_coef * (torch.expm1(ref[0] - log_probs) - (ref[0] - log_probs))
        if entropy_coef:
            losses = losses - entropy_coef * entropy
        return losses, {"ratio": ratio, "clipped": clipped}

    function.needs_entropy = entropy_coef != 0  # type: ignore[attr-defined]
    return function


def truncated_importance(high: float = 5.0) -> Callable[..., Any]:
    """CISPO: the policy gradient times a truncated, detached importance weight.

    ``token_inputs`` are advantages and old_log_probs; the metric is "ratio". Source: https://arxiv.org/abs/2506.13585; TRL's
    ``loss_type="cispo"``, whose epsilon_high is ``high``.
    """

    def function(log_probs: Tensor, _: Any, advantages: Tensor, old: Tensor) -> tuple[Tensor, dict]:
        ratio = (log_probs - old).detach().exp()
        return -ratio.clamp(max=high) * advantages * log_probs, {"ratio": ratio}

    return function
