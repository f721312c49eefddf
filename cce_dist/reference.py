"""The loss and its filter, dense: the specification, and the oracle of every test. Any dtype, float64 included.

Everything is written for clarity on the whole vocabulary of one process; nothing is shared with the code it checks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cce_dist.filter import GradFilter
from cce_dist.kernels import TILE_N, TILE_V
from cce_dist.loss import LinearCrossEntropyOutput


def logits(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None = None, logit_scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """[..., V] logits in at least fp32; the product itself is rounded to input's dtype, as an eager model does it."""
    u = F.linear(input, linear_weight, linear_bias)
    u = (u if u.dtype == torch.float64 else u.float()) * logit_scale
    return u if softcap is None else softcap * torch.tanh(u / softcap)


def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None, ignore_index: int = -100,
    reduction: str = "mean", label_smoothing: float = 0.0, logit_scale: float = 1.0, softcap: float | None = None,
    z_loss_weight: float = 0.0, num_tokens: int | Tensor | None = None,
) -> LinearCrossEntropyOutput:  # fmt: skip
    """``cce_dist.linear_cross_entropy`` with the whole weight [V, D] and all logits in memory; always the aux outputs."""
    z = logits(input, linear_weight, linear_bias, logit_scale, softcap)
    return _loss_of(z, target, ignore_index, reduction, label_smoothing, z_loss_weight, num_tokens)


def _loss_of(
    z: Tensor, target: Tensor, ignore_index: int, reduction: str, label_smoothing: float, z_loss_weight: float,
    num_tokens: int | Tensor | None = None,
) -> LinearCrossEntropyOutput:  # fmt: skip
    valid = target != ignore_index
    log_p = z.log_softmax(-1)
    lse = z.logsumexp(-1)
    at_label = target.long().clamp(min=0).unsqueeze(-1)
    nll = -log_p.gather(-1, at_label).squeeze(-1)
    entropy = -(log_p.exp() * log_p).nan_to_num(0.0, 0.0, 0.0).sum(-1)
    z_loss = z_loss_weight * lse.square()
    loss = (1 - label_smoothing) * nll + z_loss
    if label_smoothing > 0:
        loss = loss - label_smoothing * log_p.mean(-1)
    target_logit = z.gather(-1, at_label).squeeze(-1)
    loss, nll, lse, target_logit, entropy, z_loss = (
        torch.where(valid, x, 0.0) for x in (loss, nll, lse, target_logit, entropy, z_loss)
    )
    if reduction != "none":
        loss = loss.sum()
    if reduction == "mean":
        loss = loss / (valid.sum().clamp(min=1) if num_tokens is None else num_tokens)
    return LinearCrossEntropyOutput(loss, nll, lse, target_logit, entropy, z_loss, None)


def filtered_gradients(
    input: Tensor, linear_weight: Tensor, target: Tensor, upstream: Tensor, grad_filter: GradFilter, starts: list[int],
    *, ignore_index: int = -100, label_smoothing: float = 0.0, logit_scale: float = 1.0, softcap: float | None = None,
    z_loss_weight: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dE [N, D] and dC [V, D] as ``GradFilter`` defines them, from the dense gradient of every logit.

    Args:
        input: [N, D].
        upstream: [N] gradient that reaches each token's loss.
        starts: First vocabulary id of each shard: tiles and compensation are a shard's own.
    """
    with torch.enable_grad():
        u = F.linear(input.detach(), linear_weight.detach()).requires_grad_()
        z = u * logit_scale if softcap is None else softcap * torch.tanh(u * logit_scale / softcap)
        slope = torch.autograd.grad(z.sum(), u, retain_graph=True)[0]
        loss = _loss_of(z, target, ignore_index, "none", label_smoothing, z_loss_weight).loss
        d_logits = torch.autograd.grad((loss * upstream).sum(), z)[0]
    valid = (target != ignore_index)[:, None]
    upstream = torch.where(valid, upstream[:, None], 0.0)
    at_label = F.one_hot(target.clamp(min=0), z.shape[1]) * valid
    label = -(1 - label_smoothing) * upstream * at_label
    uniform = -label_smoothing / z.shape[1] * upstream
    softmax_part = d_logits - label - uniform
    kept = softmax_part.clone()
    stand_in = torch.zeros_like(kept)
    for start, stop in zip(starts, [*starts[1:], z.shape[1]], strict=True):
        for first_v in range(start, stop, TILE_V):
            for first_n in range(0, len(target), TILE_N):
                tile = slice(first_n, first_n + TILE_N), slice(first_v, min(first_v + TILE_V, stop))
                threshold = grad_filter.eps * (1 - label_smoothing) * upstream[tile[0]].abs()
                matters = (softmax_part[tile].abs() >= threshold) & (upstream[tile[0]] != 0)
                if not matters.any() and not at_label[tile].any():
                    kept[tile] = 0
        if grad_filter.compensate:
            mine = slice(start, stop)
            dropped = ((softmax_part - kept) * slope)[:, mine]
            for rows in (softmax_part.sum(1) >= 0, softmax_part.sum(1) < 0):
                part = dropped * rows[:, None]
                if part.sum() != 0:
                    stand_in[:, mine] += part.sum(1, keepdim=True) * part.sum(0) / part.sum()
    exact = d_logits * slope
    filtered = (kept + label + uniform) * slope + stand_in
    d_hidden = (filtered if grad_filter.hidden else exact) @ linear_weight
    d_weight = (filtered if grad_filter.weight else exact).t() @ input
    return d_hidden, d_weight
