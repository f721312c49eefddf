"""The algebra of the loss on a few numbers per token: its terms, a learnable scale, per-token scales, class weights."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist import checks, merge
from cce_dist.call import is_symbol
from cce_dist.kernels import Operands, Upstream, accumulator, widened
from cce_dist.operands import environment
from cce_dist.shard import VocabShard
from cce_dist.token_loss import TokenLoss


class Terms(NamedTuple):
    """How a token's loss is built from its negative log-likelihood.

    A token's loss is ``weight_N * ((1 - label_smoothing) * nll + label_smoothing * uniform_nll + z_loss_weight * lse^2)``; with
    class weights ``uniform_nll`` already contains them, see ``ClassWeights``. With ``token`` the caller's function computes the
    tokens' losses.
    """

    z_loss_weight: float | Tensor = 0.0  # no gradient
    label_smoothing: float = 0.0
    weight_N: Tensor | None = None  # fp32 class weights of the labels, 0 for ignored labels; None: 1
    token: TokenLoss | None = None

    @property
    def has_z_loss(self) -> bool:
        return isinstance(self.z_loss_weight, Tensor) or self.z_loss_weight != 0

    def of_tokens(self, part: slice) -> Terms:
        weight_N = None if self.weight_N is None else self.weight_N[part]
        return self._replace(weight_N=weight_N, token=None if self.token is None else self.token.of_tokens(part))

    def losses(self, nll_N: Tensor, lse_N: Tensor, uniform_nll_N: Any) -> Tensor:
        loss_N, smoothing = nll_N, self.label_smoothing
        if smoothing:
            loss_N = (1 - smoothing) * loss_N
        if smoothing and self.weight_N is None:
            loss_N = loss_N + smoothing * uniform_nll_N
        if self.has_z_loss:
            loss_N = loss_N + self.z_loss_weight * lse_N.square()
        if self.weight_N is not None:
            loss_N = loss_N * self.weight_N
            if smoothing:
                loss_N = loss_N + smoothing * uniform_nll_N
        return loss_N

    def gradients(self, upstream_N: Tensor, lse_N: Tensor) -> Upstream:
        """Turn the gradients of per-token losses into gradients of nll, lse and uniform nll.

        Class weights with label smoothing are left to autograd (``losses``).
        """
        d_loss_N = upstream_N if self.weight_N is None else upstream_N * self.weight_N
        d_lse_N = d_uniform_N = None
        if self.has_z_loss:
            d_lse_N = d_loss_N * (2.0 * self.z_loss_weight * lse_N)
        d_nll_N = d_loss_N
        if self.label_smoothing:
            d_nll_N = (1 - self.label_smoothing) * d_loss_N
            d_uniform_N = self.label_smoothing * d_loss_N
        return Upstream(nll=d_nll_N, lse=d_lse_N, uniform=d_uniform_N)


def learn_scale(
    x: Operands, scale: Tensor, value: float | Tensor, group: dist.ProcessGroup | None, hidden_is_part: bool
) -> Operands:
    """Return the operands with hidden states and bias connected to ``scale``, so that backward computes its gradient.

    The logits are a function of scale * (hidden @ weight.T + bias). Hence scale * d_scale = sum(hidden * d_hidden) +
    sum(bias * d_bias), which needs no pass over the vocabulary. It is as exact as d_hidden, which is rounded to hidden's dtype.

    Args:
        value: The value of scale, not 0; a tensor inside a compiled graph, which does not read it.
        hidden_is_part: Whether d_hidden is this rank's part or slice, so that the products must be summed over ranks.
    """
    if not isinstance(value, Tensor) and abs(value) < checks.SMALLEST:
        raise ValueError(
            f"logit_scale is {value} and learnable: its gradient would be taken from dE, which is then 0 in fp32"
        )
    hidden, bias = _LearnScale.apply(scale, x.hidden, x.head.bias, value, group, hidden_is_part)  # type: ignore[misc]
    return x._replace(hidden=hidden, head=x.head._replace(bias=bias))


class _LearnScale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scale, hidden, bias, value, group, hidden_is_part):
        ctx.save_for_backward(hidden, bias)
        ctx.dtype, ctx.value, ctx.group, ctx.hidden_is_part = scale.dtype, value, group, hidden_is_part
        ctx.set_materialize_grads(False)
        return hidden.view_as(hidden), None if bias is None else bias.view_as(bias)

    @staticmethod
    def backward(ctx, *grads):
        d_hidden, d_bias = grads
        hidden, bias = ctx.saved_tensors
        replicated, part = (0.0, _dot(hidden, d_hidden)) if ctx.hidden_is_part else (_dot(hidden, d_hidden), 0.0)
        part = part + (0.0 if bias is None else _dot(bias, d_bias))
        if ctx.group is not None and isinstance(part, Tensor):
            part = merge.sum_over_ranks(part, ctx.group)
        d_scale = (replicated + part) / ctx.value
        return d_scale.to(ctx.dtype), d_hidden, d_bias, None, None, None


def _dot(x: Tensor, d_x: Tensor | None) -> Tensor:
    """Return the sum of x times its gradient. Where the gradient is 0, x may hold anything."""
    if d_x is None:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    return torch.where(d_x == 0, 0.0, widened(x) * widened(d_x)).sum()


def with_factors(
    x: Operands, logit_scale: float | Tensor, temperature: float | Tensor, tokens: torch.Size, ignore_index: int,
    has_values: bool = False,
) -> Operands:  # fmt: skip
    """Return the operands with per-token factors before and after the softcap.

    An invalid factor becomes NaN. On a CPU, or with CCE_DIST_DEBUG=1, it raises ValueError if its token counts, unless the ids
    have no values, as in a compiled graph.
    """
    counts = x.ids != ignore_index
    counts = counts.any(1) if counts.dim() == 2 else counts
    # Reading values would wait for a GPU.
    readable = has_values and (environment()[1] or not x.ids.is_cuda)
    checked_N = counts if readable else None
    scale_N = _in_fp32("logit_scale", _of_tokens("logit_scale", logit_scale, x, tokens), checked_N)
    temperature_N = _in_fp32("temperature", _of_tokens("temperature", temperature, x, tokens), checked_N, True)
    if x.head.softcap is None:
        factor_N = _in_fp32("logit_scale / temperature", scale_N / temperature_N, checked_N)
        factors = torch.stack((factor_N, torch.ones_like(scale_N)), 1)
    else:
        factors = torch.stack((scale_N, 1.0 / temperature_N), 1)
    return x._replace(head=x.head._replace(factors=factors.to(accumulator(x.hidden.dtype))))


def _in_fp32(name: str, wide_N: Tensor, counts_N: Tensor | None, positive: bool = False) -> Tensor:
    good_N = (wide_N >= (checks.SMALLEST if positive else -checks.LARGEST)) & (wide_N <= checks.LARGEST)
    bad: Any = () if counts_N is None else (~good_N & counts_N).nonzero()
    if len(bad):
        wanted, position = "positive and finite" if positive else "finite", int(bad[0])
        raise ValueError(f"{name}[{position}] (flattened) must be {wanted} in fp32, got {wide_N[position].item():g}")
    return torch.where(good_N, wide_N, torch.nan)


def _of_tokens(name: str, value: float | Tensor, x: Operands, tokens: torch.Size) -> Tensor:
    """Return one float64 number per token. [...] or [] -> [N]."""
    like = torch.empty(0, dtype=torch.float64, device=x.ids.device)
    if not isinstance(value, Tensor):
        # new_full would compile one graph per value of a symbol; an addition keeps the symbol.
        return like.new_zeros(x.num_tokens) + value if is_symbol(value) else like.new_full((x.num_tokens,), value)
    if value.dim() and value.device != x.ids.device:
        raise ValueError(f"input is on {x.ids.device}, {name} on {value.device}")
    if value.dim() and value.shape != tokens:
        raise ValueError(f"{name} must be a number or {tuple(tokens)}, one for each token, got {tuple(value.shape)}")
    return value.to(like).reshape(-1).expand(x.num_tokens)


class ClassWeights:
    """Weights of the classes, for one call. ``of_labels`` [N] are the labels' weights, 0 where a label is ignored."""

    def __init__(self, weight: Tensor, x: Operands, shard: VocabShard, ignore_index: int) -> None:
        self.weight, self.x, self.shard = weight.to(accumulator(x.hidden.dtype)), x, shard
        self.counted = x.ids != ignore_index
        self.of_labels = torch.where(self.counted, self.weight[x.ids.clamp(0, shard.vocab_size - 1)], 0.0)

    def uniform_nll(self, lse: Tensor, scale: float | Tensor) -> Tensor:
        """Return the mean over the vocabulary of ``weight_j * (lse - logit_j)``, 0 for ignored tokens. [N] -> [N].

        A token's sum of products times class weights is sum_j w_j (weight_j . hidden + bias_j) = (sum_j w_j weight_j) . hidden
        + sum_j w_j bias_j. The vector and the number, D + 1 numbers in all, serve all tokens, and are summed over the group.
        """
        x, here = self.x, slice(0, self.shard.num_valid)
        with torch.autocast(x.hidden.device.type, enabled=False):
            w_V = self.weight[self.shard.start : self.shard.start + self.shard.num_valid]
            of_bias = torch.zeros_like(w_V) if x.head.bias is None else x.head.bias[here].to(w_V.dtype)
            vector = torch.cat((w_V @ widened(x.weight[here]), (w_V @ of_bias)[None]))
            if self.shard.group is not None:
                vector = merge.SumOverRanks.apply(vector, self.shard.group)
            assert isinstance(vector, Tensor)
            # Hidden states of ignored tokens may hold anything, and 0 * inf is not 0.
            hidden = widened(x.hidden).masked_fill(~self.counted[:, None], 0.0)
            products = hidden @ vector[:-1] + vector[-1]
        uniform_nll = (self.weight.sum() * lse - scale * products) / self.shard.vocab_size
        return torch.where(self.counted, uniform_nll, 0.0)
