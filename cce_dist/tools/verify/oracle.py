"""The loss and its gradients in float64 by formulas derived by hand, without autograd and without code of ``reference.py``.

With u = logit_scale (E C^T + b), z = softcap tanh(u / softcap), p = softmax(z), H the entropy of p, y the label, and g the
gradient that reaches each quantity of a token, the gradient of a token's logits is

    dz = P p + LABEL [j = y] + UNIFORM - g_entropy p (log p + H)

    loss  = c_y ((1 - s) nll + w lse^2) + s mean_j(-c_j log p_j)      s: label_smoothing, w: z_loss_weight
    d_nll = (1 - s) c_y g_loss + g_nll                                LABEL   = g_target - d_nll
    P     = d_nll + s mean(c) g_loss + g_lse + 2 w lse (c_y g_loss + g_z)    UNIFORM = -s c_j g_loss / V

with c the weights of the classes, 1 if there are none. From there ``du = dz (1 - (z / softcap)^2)``, ``dE = logit_scale du C``
and ``dC = logit_scale du^T E``. Ignored tokens are taken out first, so that nothing of them is read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cce_dist.tools.verify.cases import BF16, PER_TOKEN, Problem, Truth
from cce_dist.tools.verify.check import EPS, largest, logit_sizes


class _Tokens(NamedTuple):
    """Quantities of the n tokens that are not ignored."""

    rows: Tensor
    label: Tensor
    product: Tensor
    z: Tensor
    p: Tensor
    log_p: Tensor
    lse: Tensor
    entropy: Tensor


def truth(
    problem: Problem,
    options: dict[str, Any],
    upstream: dict[str, Tensor],
    eps: float = 0.0,
    bounds: Sequence[tuple[int, int]] = (),
) -> Truth:
    """Compute what ``linear_cross_entropy`` has to return; upstream gradients that are absent are 0.

    ``eps`` is the threshold of the plain filter. Each shard's part of dE (``bounds``) is rounded before the sum over shards.
    """
    tokens = _forward(problem, options)
    smoothing, z_weight = options.get("label_smoothing", 0.0), options.get("z_loss_weight", 0.0)
    nll = -tokens.log_p.gather(1, tokens.label[:, None])[:, 0]
    z_loss = z_weight * tokens.lse.square()
    classes = _class_weights(problem, options)
    of_labels = classes[tokens.label]
    loss = of_labels * ((1 - smoothing) * nll + z_loss)
    if smoothing > 0:
        loss = loss - smoothing * (tokens.log_p * classes).mean(1)
    target_logit, max_logit = tokens.z.gather(1, tokens.label[:, None])[:, 0], tokens.z.amax(1)
    per_token = (nll, tokens.lse, target_logit, tokens.entropy, z_loss)
    others = {"max_logit": max_logit, "label_is_max": (target_logit == max_logit).double()}
    names = dict(zip(PER_TOKEN, per_token, strict=True)) | others
    values = {name: _whole(x, tokens.rows, problem) for name, x in names.items()}

    reduction, num_tokens = options.get("reduction", "mean"), options.get("num_tokens")
    total = of_labels.sum().item() or 1.0
    divisor = 1.0 if reduction != "mean" else total if num_tokens is None else float(num_tokens)
    values["loss"] = _whole(loss, tokens.rows, problem) if reduction == "none" else loss.sum() / divisor
    gradients, plain, sizes = _backward(problem, options, upstream, tokens, divisor, eps, bounds)

    # a tanh made of exponentials is right to two units in the last place of 1, EPS[float32] / 16
    of_softcap = (options.get("softcap") or 0.0) / 16
    logit_noise = abs(options.get("logit_scale", 1.0)) * largest(logit_sizes(problem)[tokens.rows]) + of_softcap
    one_token = max(map(largest, (loss, *per_token))) + (1 + 2 * abs(z_weight) * largest(tokens.lse)) * logit_noise
    of_loss = one_token * (1.0 if reduction == "none" else math.sqrt(len(loss)) / divisor)
    noise = {**dict.fromkeys(names, one_token), "loss": of_loss, **sizes}
    return Truth(values | gradients, plain, {}, noise, logit_noise)


def _class_weights(problem: Problem, options: dict[str, Any]) -> Tensor:
    weights = options.get("weight")
    return torch.ones(problem.weight.shape[0], dtype=torch.float64) if weights is None else weights.double()


def _forward(problem: Problem, options: dict[str, Any]) -> _Tokens:
    rows = (problem.labels != options.get("ignore_index", -100)).nonzero()[:, 0]
    product = problem.hidden[rows] @ problem.weight.t()
    if problem.bias is not None:
        product = product + problem.bias
    z, softcap = product * options.get("logit_scale", 1.0), options.get("softcap")
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    below = z - z.amax(1, keepdim=True)
    total = below.exp().sum(1, keepdim=True)
    log_p, p = below - total.log(), below.exp() / total
    lse = (z.amax(1, keepdim=True) + total.log())[:, 0]
    entropy = -torch.where(p == 0, 0.0, p * log_p).sum(1)
    return _Tokens(rows, problem.labels[rows].long(), product, z, p, log_p, lse, entropy)


def _backward(
    problem: Problem,
    options: dict[str, Any],
    upstream: dict[str, Tensor],
    tokens: _Tokens,
    divisor: float,
    eps: float,
    bounds: Sequence[tuple[int, int]],
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, float]]:
    """Return gradients, those under the plain filter, and the noise of all, as ``Truth`` describes it."""
    smoothing, z_weight = options.get("label_smoothing", 0.0), options.get("z_loss_weight", 0.0)
    zeros = torch.zeros(len(problem.labels), dtype=torch.float64)
    g_loss, *g_aux = ((zeros + upstream.get(name, 0.0))[tokens.rows] for name in ("loss", *PER_TOKEN))
    g_loss = g_loss / divisor
    g_nll, g_lse, g_target, g_entropy, g_z = g_aux

    classes = _class_weights(problem, options)
    weighted = g_loss * classes[tokens.label]
    d_nll = (1 - smoothing) * weighted + g_nll
    d_uniform, d_z = smoothing * g_loss * classes.mean(), 2 * z_weight * (weighted + g_z)
    softmax_coef = d_nll + d_uniform + g_lse + d_z * tokens.lse
    label_coef, uniform_coef = g_target - d_nll, -smoothing * g_loss[:, None] * classes / len(classes)
    p = tokens.p
    surprise = torch.where(p == 0, 0.0, p * (tokens.log_p + tokens.entropy[:, None]))
    softmax_part = softmax_coef[:, None] * p - g_entropy[:, None] * surprise
    is_label = torch.zeros_like(p).scatter_(1, tokens.label[:, None], 1.0)
    rest = label_coef[:, None] * is_label + uniform_coef

    scale, softcap = options.get("logit_scale", 1.0), options.get("softcap")
    bend = torch.ones_like(p) if softcap is None else 1 - (tokens.z / softcap).square()

    def gradients(dz: Tensor, hidden: Tensor, weight: Tensor) -> dict[str, Tensor]:
        du = dz * scale * bend
        return {"dE": _whole(du @ weight, tokens.rows, problem), "dC": du.t() @ hidden, "dbias": du.sum(0)}

    hidden, weight = problem.hidden[tokens.rows], problem.weight
    exact = gradients(softmax_part + rest, hidden, weight)
    d_scale = (softmax_part + rest) * bend * tokens.product
    exact["dscale"] = d_scale[tokens.product.isfinite()].sum()
    # The threshold is relative to the label's gradient, or to P where the label has none. With an entropy's gradient nothing
    # is dropped.
    threshold = eps * ("entropy" not in upstream) * torch.where(label_coef != 0, label_coef, softmax_coef).abs()
    matters = (softmax_part.abs() >= threshold[:, None]) | (is_label > 0)
    plain = gradients(softmax_part * matters + rest, hidden, weight)

    parts = (d_nll, d_uniform, g_lse, d_z * (tokens.lse.abs() + 1))
    size = torch.stack(parts).abs().sum(0)[:, None] * p + g_entropy.abs()[:, None] * (surprise.abs() + p)
    size = size + label_coef.abs()[:, None] * is_label + uniform_coef.abs()
    terms = size * scale * bend
    sizes = _root_of_squares(terms, hidden, weight, "")
    of_equal = sums(terms.abs(), hidden.abs(), weight.abs())
    sizes |= {f"{name} alike": largest(x) for name, x in of_equal.items()}
    du = (softmax_part + rest) * scale * bend
    parts = [du[:, start:stop] @ weight[start:stop] for start, stop in bounds]
    sizes["parts of dE"] = sum(map(largest, parts))
    # dscale is made of dE, and each rank has rounded its part of that.
    of_scale = [part * hidden for part in (exact["dE"][tokens.rows], *parts)]
    if problem.bias is not None:
        of_scale.append(exact["dbias"] * torch.where(problem.bias.isfinite(), problem.bias, 0.0))
    products = torch.where(tokens.product.isfinite(), tokens.product, 0.0)
    # Each logit's gradient is rounded before its product with the weight, and in dE they may cancel.
    of_scale.append(size * bend * products * scale)
    sizes["dscale"] = math.hypot(*(x.norm().item() for x in of_scale)) / abs(scale) if scale else 0.0
    sizes["dscale alike"] = sum(x.abs().sum().item() for x in of_scale) / abs(scale) if scale else 0.0
    sizes["dscale unbent"] = (size * products).abs().sum().item()
    sizes["dscale lost"] = _lost(parts, hidden) / abs(scale) if parts and scale else 0.0
    return exact, plain, sizes | _root_of_squares(size * scale, hidden, weight, " unbent")


def _lost(parts: list[Tensor], hidden: Tensor) -> float:
    """Return what dscale loses where ranks sum parts of dE in 16 bits: what the largest part swallows."""
    stacked = torch.stack(parts)
    most = stacked.gather(0, stacked.abs().argmax(0, keepdim=True))[0]
    rest = stacked.sum(0) - most
    return abs((rest * hidden)[rest.abs() < EPS[BF16] * most.abs()].sum().item())


def _root_of_squares(terms: Tensor, hidden: Tensor, weight: Tensor, suffix: str) -> dict[str, float]:
    """Return the largest root of the sum of squares of the terms, for dE, dC and dbias."""
    squares = sums(terms.square(), hidden.square(), weight.square())
    return {name + suffix: math.sqrt(largest(x)) for name, x in squares.items()}


def sums(terms: Tensor, hidden: Tensor, weight: Tensor) -> dict[str, Tensor]:
    return {"dE": terms @ weight, "dC": terms.t() @ hidden, "dbias": terms.sum(0)}


def _whole(of_kept: Tensor, rows: Tensor, problem: Problem) -> Tensor:
    """Put the rows of the tokens that count among zeros. [n, ...] -> [N, ...]."""
    return of_kept.new_zeros(len(problem.labels), *of_kept.shape[1:]).index_copy_(0, rows, of_kept)
