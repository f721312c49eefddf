"""Dense versions of the loss, its filter, log-probabilities and divergences: the specification, and what tests compare with.

They take any dtype and one process with the whole vocabulary. They share no code with the code under test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cce_dist.filter import GradFilter
from cce_dist.given import LinearCrossEntropyOutput
from cce_dist.kept_ids import KeptIds
from cce_dist.log_probs import LogProbs

IGNORE_INDEX = -100  # ignored label, unless another one is given


def logits(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None = None,
    logit_scale: float | Tensor = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Return logits, [..., V], in at least fp32. The matrix product is rounded to input's dtype, as in an eager model."""
    u = F.linear(input, linear_weight, linear_bias)
    u = (u if u.dtype == torch.float64 else u.float()) * logit_scale
    return u if softcap is None else softcap * torch.tanh(u / softcap)


def softmax_of(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-softmax [..., V], log-sum-exp [...] and entropy [...] of logits [..., V]. Logits may be -inf."""
    log_p = z.log_softmax(-1)
    return log_p, z.logsumexp(-1), -(log_p.exp() * log_p).nan_to_num(0.0, 0.0, 0.0).sum(-1)


def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None,
    logit_scale: float | Tensor = 1.0, softcap: float | None = None, **options: Any,
) -> LinearCrossEntropyOutput:  # fmt: skip
    """Compute ``cce_dist.linear_cross_entropy`` from all logits. The other options are those of ``cross_entropy``."""
    return cross_entropy(logits(input, linear_weight, linear_bias, logit_scale, softcap), target, **options)


def cross_entropy(
    z: Tensor, target: Tensor, *, ignore_index: int = IGNORE_INDEX, reduction: str = "mean", label_smoothing: float = 0.0,
    z_loss_weight: float = 0.0, num_tokens: float | Tensor | None = None, weight: Tensor | None = None,
    token_loss: Callable[..., Any] | None = None, token_inputs: Sequence[Tensor] = (),
) -> LinearCrossEntropyOutput:  # fmt: skip
    """Compute the loss of logits [..., V], with all outputs of ``return_aux``."""
    valid = target != ignore_index
    log_p, lse, entropy = softmax_of(z)
    at_label = target.long().clamp(min=0).unsqueeze(-1)
    nll = -log_p.gather(-1, at_label).squeeze(-1)
    z_loss = z_loss_weight * lse.square()
    loss, divisor = (1 - label_smoothing) * nll + z_loss, valid.sum().clamp(min=1)
    if weight is not None:
        of_label = weight.to(z.dtype)[at_label.squeeze(-1)]
        loss, divisor = loss * of_label, (of_label * valid).sum()
        divisor = divisor + (divisor == 0)
    if label_smoothing > 0:
        loss = loss - label_smoothing * (log_p if weight is None else log_p * weight.to(z.dtype)).mean(-1)
    target_logit = z.gather(-1, at_label).squeeze(-1)
    loss, nll, lse, target_logit, entropy, z_loss = (
        torch.where(valid, x, 0.0) for x in (loss, nll, lse, target_logit, entropy, z_loss)
    )
    if token_loss is not None:
        found = token_loss(-nll[valid], entropy[valid], *(values[valid] for values in token_inputs))
        loss = torch.zeros_like(nll).masked_scatter(valid, found[0] if isinstance(found, tuple) else found)
    if reduction != "none":
        loss = loss.sum()
    if reduction == "mean":
        loss = loss / (divisor if num_tokens is None else num_tokens)
    max_logit = torch.where(valid, z.amax(-1), 0.0).detach()
    is_max = (valid & (target_logit == max_logit)).to(z.dtype)
    return LinearCrossEntropyOutput(loss, nll, lse, target_logit, entropy, z_loss, max_logit, is_max)


def linear_log_probs(
    input: Tensor, linear_weight: Tensor, ids: Tensor, *, linear_bias: Tensor | None = None,
    logit_scale: float | Tensor = 1.0, softcap: float | None = None, temperature: float | Tensor = 1.0, **options: Any,
) -> LogProbs:  # fmt: skip
    """Compute ``cce_dist.linear_log_probs`` from all logits. The other options are those of ``log_probs``."""
    scale = logit_scale.unsqueeze(-1) if isinstance(logit_scale, Tensor) else logit_scale
    return log_probs(logits(input, linear_weight, linear_bias, scale, softcap), ids, temperature, **options)


def log_probs(
    z: Tensor, ids: Tensor, temperature: float | Tensor = 1.0, *, ignore_index: int = IGNORE_INDEX, top_k: int = 1,
    kept: KeptIds | None = None,
) -> LogProbs:  # fmt: skip
    """Compute the outputs of ``linear_log_probs`` from logits [..., V]. A temperature is a number, or one for each token."""
    z = z / (temperature.unsqueeze(-1) if isinstance(temperature, Tensor) else temperature)
    several = ids if ids.dim() == z.dim() else ids.unsqueeze(-1)
    counts = several != ignore_index
    if kept is not None:
        return _log_probs_of_lists(z, ids, counts, kept)
    log_p, lse, entropy = softmax_of(z)
    of_ids = torch.where(counts, log_p.gather(-1, several.long().clamp(min=0)), 0.0).view(ids.shape)
    max_logit, argmax = z.detach().max(-1)
    top_log_probs, top_ids = (x[..., :top_k] for x in log_p.detach().sort(dim=-1, descending=True, stable=True))
    live = counts.any(-1)
    lse, entropy, squares, max_logit = (
        torch.where(live, x, 0.0) for x in (lse, entropy, (2 * log_p.detach()).exp().sum(-1), max_logit)
    )
    argmax = torch.where(live, argmax, -1)
    top_log_probs = torch.where(live[..., None], top_log_probs, 0.0)
    top_ids = torch.where(live[..., None], top_ids, -1)
    return LogProbs(of_ids, lse, entropy, squares, max_logit, argmax, top_log_probs, top_ids)


def _log_probs_of_lists(z: Tensor, ids: Tensor, counts: Tensor, kept: KeptIds) -> LogProbs:
    offsets, labels = kept.offsets.tolist(), ids.flatten().tolist()
    whole = [] if kept.whole is None else kept.whole.tolist()
    rows = [z.new_zeros(5, 0)]
    for number, (row, live) in enumerate(zip(z.view(-1, z.shape[-1]), counts.flatten().tolist(), strict=True)):
        listed = row if number in whole else row[kept.ids[offsets[number] : offsets[number + 1]].long()]
        values = (row.new_zeros(()),) * 5
        if live and len(listed):
            _, lse, entropy = softmax_of(listed)
            full = row.detach().log_softmax(-1)[labels[number]]
            mass = (lse - row.logsumexp(-1)).detach().exp()
            values = (row[labels[number]] - lse, lse, entropy, full, mass)
        rows.append(torch.stack(values)[:, None])
    log_probs, lse, entropy, full, mass = torch.cat(rows, 1)
    lse, entropy, mass = (x.view(z.shape[:-1]) for x in (lse, entropy, mass.detach()))
    log_probs, full = (x.view(ids.shape) for x in (log_probs, full.detach()))
    return LogProbs(log_probs, lse, entropy, full_log_probs=full, kept_mass=mass)


def linear_kl_divergence(
    input: Tensor, linear_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor, *, kind: str = "forward",
    beta: float = 0.5, logit_scale: float = 1.0, teacher_logit_scale: float = 1.0, softcap: float | None = None,
    teacher_softcap: float | None = None, linear_bias: Tensor | None = None, teacher_bias: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute ``cce_dist.linear_kl_divergence`` from all logits of both heads, [...]."""
    log_p = logits(input, linear_weight, linear_bias, logit_scale, softcap).log_softmax(-1)
    log_t = logits(teacher_input, teacher_weight, teacher_bias, teacher_logit_scale, teacher_softcap).log_softmax(-1)

    def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
        return (log_a.exp() * (log_a - log_b)).sum(-1)

    if kind == "jsd":
        log_m = torch.logaddexp(log_t + math.log(beta), log_p + math.log1p(-beta))
        value = beta * kl(log_t, log_m) + (1 - beta) * kl(log_p, log_m)
    elif kind in ("tv", "lk"):
        below = log_p < log_t
        log_overlap = torch.where(below, log_p, log_t).logsumexp(-1)
        value = torch.where(below, log_t.exp() - log_p.exp(), 0.0).sum(-1) if kind == "tv" else -log_overlap
    else:
        value = kl(log_t, log_p) if kind == "forward" else kl(log_p, log_t)
    return value if mask is None else torch.where(mask, value, 0.0)


def filtered_gradients(
    input: Tensor, linear_weight: Tensor, target: Tensor, upstream: Tensor, grad_filter: GradFilter, starts: list[int],
    *, linear_bias: Tensor | None = None, label_smoothing: float = 0.0, softcap: float | None = None,
    z_loss_weight: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dE [N, D], dC [V, D] and the bias gradient [V] under a ``GradFilter``, from the dense gradient of every logit.

    Args:
        input: [N, D].
        upstream: [N] upstream gradient of each token's loss.
        starts: First vocabulary id of each shard. Each shard compensates for its own dropped elements.
    """
    with torch.enable_grad():
        bias = None if linear_bias is None else linear_bias.detach()
        u = F.linear(input.detach(), linear_weight.detach(), bias).requires_grad_()
        z = u if softcap is None else softcap * torch.tanh(u / softcap)
        slope = torch.autograd.grad(z.sum(), u, retain_graph=True)[0]
        options: dict[str, Any] = {"label_smoothing": label_smoothing, "z_loss_weight": z_loss_weight}
        loss = cross_entropy(z, target, reduction="none", **options).loss
        d_logits = torch.autograd.grad((loss * upstream).sum(), z)[0]
    valid = (target != IGNORE_INDEX)[:, None]
    upstream = torch.where(valid, upstream[:, None], 0.0)
    is_label = (F.one_hot(target.clamp(min=0), z.shape[1]) * valid).bool()
    rest = -(1 - label_smoothing) * upstream * is_label - label_smoothing / z.shape[1] * upstream
    softmax_part = d_logits - rest
    # If the label's coefficient is 0, compare with the softmax's coefficient, the sum over the vocabulary.
    at_label = (1 - label_smoothing) * upstream
    size = torch.where(at_label != 0, at_label, softmax_part.sum(1, keepdim=True)).abs()
    kept = (softmax_part.abs() >= grad_filter.eps * size) | is_label
    dropped = softmax_part.masked_fill(kept, 0.0) * slope
    filtered = d_logits * slope - dropped
    if grad_filter.compensate:
        for start, stop in zip(starts, [*starts[1:], z.shape[1]], strict=True):
            part = dropped[:, start:stop]
            if part.any():
                filtered[:, start:stop] += part.sum(1, keepdim=True) * part.abs().sum(0) / part.abs().sum()
    exact = d_logits * slope
    d_hidden = (filtered if grad_filter.hidden else exact).to(linear_weight.dtype) @ linear_weight
    d_weight = (filtered if grad_filter.weight else exact).to(input.dtype).t() @ input
    return d_hidden, d_weight, filtered.sum(0)
