"""The arithmetic of one shard in plain torch, a bounded block of logits at a time: CPUs, and GPUs without Triton.

The loop runs over blocks of the vocabulary (and of the tokens, where one block of all tokens would not fit), so that
each row of dC is written once and dE is summed in fp32. It is also the specification of the filter's arithmetic: see
``gradients``.

Source: chunking as in mgmalek's efficient_cross_entropy and Liger-Kernel, which chunk tokens and so round dC once a
chunk; ours chunks the vocabulary. The online softmax is Milakov & Gimelshein's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cce_dist.kernels import IGNORED, OUTSIDE, TILE_N, TILE_V, Filter, ShardLogits

FLOOR = torch.finfo(torch.float32).min  # stands for a maximum of -inf where a difference of infinities would be NaN
LIVE_BLOCKS = 8  # fp32 blocks of logits that are alive at the same time, at most


def local_stats(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    logits: ShardLogits,
    *,
    want_uniform: bool,
    want_entropy: bool,
    want_tiles: bool = False,
    workspace_bytes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Statistics of this shard's logits (rows as in ``cce_dist.kernels``), and, if asked, those of every tile.

    Returns:
        stats [K, N] fp32; and with ``want_tiles`` each token's maximum and sum of exp over every tile of TILE_V columns,
        two [N, ceil(num_valid / TILE_V)] fp32 tensors (else empty ones).
    """
    num_tokens, device = hidden_ND.shape[0], hidden_ND.device
    stats_KN = torch.zeros(3 + want_uniform + want_entropy, num_tokens, device=device)
    stats_KN[0] = -torch.inf
    num_tiles = -(-logits.num_valid // TILE_V) if want_tiles else 0
    tile_max, tile_sum = (torch.empty(num_tokens if want_tiles else 0, num_tiles, device=device) for _ in range(2))
    all_cols, all_rows = _blocks(num_tokens, logits.num_valid, workspace_bytes)
    for cols, rows in itertools.product(all_cols, all_rows):
        z = _block_logits(hidden_ND[rows], weight_VD[cols], None if bias_V is None else bias_V[cols], logits)
        max_N, sum_N, target_N, *more = stats_KN[:, rows]
        column_N = _column(labels_N[rows], logits.start + cols.start)
        here_N = (column_N >= 0) & (column_N < z.shape[1])
        target_N += torch.where(here_N, z.gather(1, column_N.clamp(0, z.shape[1] - 1)[:, None])[:, 0], 0.0)
        if want_tiles:
            tiles = slice(cols.start // TILE_V, -(-cols.stop // TILE_V))
            padded = torch.nn.functional.pad(z, (0, -z.shape[1] % TILE_V), value=-torch.inf)
            padded = padded.view(z.shape[0], -1, TILE_V)
            tile_max[rows, tiles] = padded.amax(2)
            tile_sum[rows, tiles] = (padded - tile_max[rows, tiles][..., None].clamp(min=FLOOR)).exp().sum(2)
        new_max = torch.maximum(max_N, z.amax(1))
        # old maximum below the new one; where both are -inf (no finite logit yet) the step is 0, not NaN
        step = torch.where(max_N == new_max, 0.0, max_N - new_max)
        if want_uniform:
            below_N = more[0]
            if cols.start > 0:
                below_N += torch.where(step == 0, 0.0, -step * cols.start)
            below_N += (new_max[:, None] - z).sum(1)
        scale = step.exp()
        z -= new_max.clamp(min=FLOOR)[:, None]
        if want_entropy:
            moment_N = more[-1]
            shifted = torch.where(sum_N == 0, 0.0, step * sum_N)
            moment_N.copy_(torch.where(scale == 0, 0.0, scale * (moment_N + shifted)))
            moment_N += torch.where(z == -torch.inf, 0.0, z.exp() * z).sum(1)
        sum_N.copy_(sum_N * scale + z.exp_().sum(1))
        max_N.copy_(new_max)
    return stats_KN, tile_max, tile_sum


def gradients(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    logits: ShardLogits,
    max_N: Tensor,
    log_sum_N: Tensor,
    entropy_N: Tensor | None,
    coef_4N: Tensor,
    *,
    grad_filter: Filter,
    want_hidden: bool,
    want_weight: bool,
    want_bias: bool,
    d_weight_out: Tensor | None = None,
    workspace_bytes: int,
    hidden_ready: Callable[[Tensor], None] | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """This shard's part of dE, and dC and dbias of its rows, from the merged statistics and the coefficients.

    With a filter (eps > 0), a tile of TILE_N tokens x TILE_V columns survives where it holds a label or where any
    ``|P p - ENTROPY p (log p + H)| >= eps |LABEL|`` (the larger of P's and ENTROPY's size where LABEL is 0). Elsewhere that
    part of the gradient is dropped; the LABEL and UNIFORM terms never are. Compensated, the dropped R [N, V] (gradients
    with respect to ``hidden @ weight.T``) is replaced by ``r_i q_j``: r its row sums, q its column sums over their
    total, for the tokens with P >= 0 and those with P < 0 apart. dbias, the column sums, is exact.

    Args:
        d_weight_out: [V, D] buffer that dC is added into; the dC returned is then None.
        hidden_ready: Called with d_hidden as soon as it is whole.

    Returns:
        d_hidden [N, D] in hidden's dtype, d_weight [V, D] in weight's dtype, d_bias [V] fp32; None where not wanted.
    """
    num_tokens, device = hidden_ND.shape[0], hidden_ND.device
    # fp16 cannot hold 1/N times a small probability: gradients are computed for a largest coefficient of 1
    unit = torch.ones((), device=device)
    if hidden_ND.dtype == torch.float16 and num_tokens:
        largest = coef_4N.abs().nan_to_num(0.0, 0.0, 0.0).amax()
        unit = torch.where(largest > 0, largest, unit)
        coef_4N = coef_4N / unit

    d_hidden_ND = torch.zeros(hidden_ND.shape, device=device)
    d_weight_VD = torch.zeros_like(weight_VD) if d_weight_out is None else d_weight_out
    d_bias_V = torch.zeros(weight_VD.shape[0], device=device)
    sign_2N = torch.stack((coef_4N[0] >= 0, coef_4N[0] < 0)).float()
    dropped_rows_N = torch.zeros(num_tokens, device=device)
    dropped_columns_2V = torch.zeros(2, weight_VD.shape[0], device=device)

    all_cols, all_rows = _blocks(num_tokens, logits.num_valid, workspace_bytes)
    for cols in all_cols:
        weight, bias = weight_VD[cols], None if bias_V is None else bias_V[cols]
        d_weight = torch.zeros(weight.shape, device=device)
        for rows in all_rows:
            hidden = hidden_ND[rows]
            whole, dropped = _block_gradients(
                _block_logits(hidden, weight, bias, logits),
                _column(labels_N[rows], logits.start + cols.start),
                max_N[rows], log_sum_N[rows], None if entropy_N is None else entropy_N[rows], coef_4N[:, rows],
                logits, grad_filter.eps,
            )  # fmt: skip
            kept = whole
            if dropped is not None:
                kept = whole - dropped
                dropped_rows_N[rows] += dropped.sum(1)
                dropped_columns_2V[:, cols] += sign_2N[:, rows] @ dropped
            if want_bias:
                d_bias_V[cols] += whole.sum(0)
            if want_hidden:
                d_hidden_ND[rows] += _matmul(kept if grad_filter.hidden else whole, weight)
            if want_weight:
                d_weight += _matmul((kept if grad_filter.weight else whole).t(), hidden)
        if want_weight:
            d_weight_VD[cols] += (d_weight * unit).to(d_weight_VD.dtype)

    if grad_filter.eps > 0 and grad_filter.compensate:
        totals_2, sizes_2 = sign_2N @ dropped_rows_N, sign_2N @ dropped_rows_N.abs()
        # a total that cancels (entropy terms of both signs) has no direction to stand in for: leave that group out
        sound_2 = totals_2.abs() > 0.5 * sizes_2
        scale_2 = torch.where(sound_2, 1 / totals_2, 0.0)
        share_2V, rows_2N = dropped_columns_2V * scale_2[:, None], sign_2N * dropped_rows_N
        if want_hidden and grad_filter.hidden:
            d_hidden_ND += rows_2N.t() @ (share_2V @ weight_VD.float())
        if want_weight and grad_filter.weight:
            d_weight_VD += (share_2V.t() @ (rows_2N @ hidden_ND.float()) * unit).to(d_weight_VD.dtype)
    d_hidden_ND = (d_hidden_ND * unit).to(hidden_ND.dtype)
    if want_hidden and hidden_ready is not None:
        hidden_ready(d_hidden_ND)
    return (
        d_hidden_ND if want_hidden else None,
        d_weight_VD if want_weight and d_weight_out is None else None,
        d_bias_V * unit if want_bias else None,
    )


def filter_stats(
    tile_max: Tensor,
    tile_sum: Tensor,
    max_N: Tensor,
    log_sum_N: Tensor,
    labels_N: Tensor,
    logits: ShardLogits,
    eps: float,
) -> Tensor:
    """Share of tiles kept, and softmax mass dropped (mean and maximum over tokens), if the softmax alone decides. -> [3]."""
    num_tokens, num_tiles = tile_max.shape
    if num_tokens == 0 or num_tiles == 0:
        return torch.zeros(3, device=tile_max.device)
    lse_N1, labeled_N1 = (max_N + log_sum_N)[:, None], (labels_N >= 0)[:, None]
    tile_of_label = _column(labels_N, logits.start) // TILE_V
    hit = (tile_max - lse_N1).exp() >= eps
    hit |= torch.arange(num_tiles, device=hit.device) == tile_of_label[:, None]
    kept = _any_per_tile(hit & labeled_N1, 1)
    mass_N = (tile_sum * (tile_max - lse_N1).exp()).masked_fill(_spread(kept, hit.shape, 1) | ~labeled_N1, 0.0).sum(1)
    return torch.stack((kept.float().mean(), mass_N.sum() / labeled_N1.sum().clamp(min=1), mass_N.amax()))


def label_ids(labels_N: Tensor, ignore_index: int, vocab_size: int) -> Tensor:
    """Return each label, or IGNORED, or OUTSIDE. [N] int64 -> [N] int64."""
    inside = (labels_N >= 0) & (labels_N < vocab_size)
    return torch.where(inside, labels_N, OUTSIDE).masked_fill_(labels_N == ignore_index, IGNORED)


class Merged(NamedTuple):
    """Statistics of the whole vocabulary, all [N] fp32: the LSE is ``max + log_sum``, kept apart for exactness."""

    max: Tensor
    log_sum: Tensor
    target: Tensor
    mean_below: Tensor  # mean_j (max - z_j)
    entropy: Tensor


def merge(stats_TKN: Tensor, vocab_size: int, want_uniform: bool, want_entropy: bool) -> Merged:
    """Merge the shards' statistics (rows as in ``cce_dist.kernels``) by log-add-exp, in rank order.

    Every rank computes the same bits from the same gathered numbers. With smoothing, a row with the number of valid
    vocabulary rows of each shard stands behind SUM_BELOW.
    """
    max_TN, sum_TN, target_TN = stats_TKN[:, 0], stats_TKN[:, 1], stats_TKN[:, 2]
    max_N = max_TN.amax(0)
    # an empty shard and a row of -inf logits have max -inf: no difference of infinities may become NaN there
    below_TN = torch.where(max_TN == max_N, 0.0, max_TN - max_N)
    weight_TN = below_TN.exp()
    sum_N = (weight_TN * sum_TN).sum(0)
    log_sum = sum_N.log()
    mean_below = entropy = torch.zeros_like(max_N)
    if want_uniform:
        count_TN = stats_TKN[:, 4]
        shift_TN = torch.where(count_TN > 0, -below_TN * count_TN, 0.0)
        mean_below = (stats_TKN[:, 3] + shift_TN).sum(0) / vocab_size
    if want_entropy:
        moment_TN = torch.where(weight_TN == 0, 0.0, weight_TN * (stats_TKN[:, -1] + below_TN * sum_TN))
        entropy = log_sum - moment_TN.sum(0) / sum_N
    return Merged(max_N, log_sum, target_TN.sum(0), mean_below, entropy)


def token_losses(
    stats_TKN: Tensor, ids_N: Tensor, vocab_size: int, want_uniform: bool, want_entropy: bool
) -> tuple[Tensor, ...]:
    """Merge the shards' statistics into what the loss is made of; 0 where a label is ignored, NaN where it is outside.

    Returns:
        nll, lse, target logit, nll of the uniform distribution and entropy, [N] fp32, the last two empty unless wanted; what
        backward needs, [2 or 3, N] fp32: maximum, log of the sum, entropy if wanted.
    """
    merged = merge(stats_TKN, vocab_size, want_uniform, want_entropy)
    nll, lse = merged.max - merged.target + merged.log_sum, merged.max + merged.log_sum
    losses = torch.stack((nll, lse, merged.target, merged.mean_below + merged.log_sum, merged.entropy))
    losses = losses.masked_fill_(ids_N == IGNORED, 0.0).masked_fill_(ids_N == OUTSIDE, torch.nan)
    wanted = (True, True, True, want_uniform, want_entropy)
    backward = (merged.max, merged.log_sum, merged.entropy)[: 2 + want_entropy]
    return *(x.clone() if w else x.new_empty(0) for x, w in zip(losses, wanted, strict=True)), torch.stack(backward)


def coefficients(grads: Sequence[Tensor | None], ids_N: Tensor, vocab_size: int) -> Tensor:
    """Return coef_4N, 0 where there is no label.

    Args:
        grads: Gradients of the five [N] that ``token_losses`` returned; None: 0.
        ids_N: From ``label_ids``.
        vocab_size: Rows of the logical vocabulary.
    """
    zeros = torch.zeros(ids_N.shape, device=ids_N.device)
    d_nll, d_lse, d_target, d_uniform, d_entropy = (
        zeros if d is None else d.masked_fill(ids_N < 0, 0.0) for d in grads
    )
    return torch.stack((d_nll + d_lse + d_uniform, d_target - d_nll, d_uniform / -vocab_size, d_entropy))


def _blocks(num_tokens: int, num_valid: int, workspace_bytes: int) -> tuple[list[slice], list[slice]]:
    """Blocks of columns and of rows, whole filter tiles each, so that LIVE_BLOCKS of them fit the workspace."""
    elements = max(workspace_bytes // (4 * LIVE_BLOCKS), TILE_N * TILE_V)
    num_rows = min(num_tokens, elements // TILE_V // TILE_N * TILE_N) or 1
    num_cols = min(num_valid, elements // num_rows // TILE_V * TILE_V) or 1
    return (
        [slice(start, min(start + num_cols, num_valid)) for start in range(0, num_valid, num_cols)],
        [slice(start, min(start + num_rows, num_tokens)) for start in range(0, num_tokens, num_rows)],
    )


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in b's dtype with fp32 accumulators and an fp32 result."""
    if b.dtype == torch.float32:
        return a.float() @ b
    if b.is_cuda:
        return torch.mm(a.to(b.dtype), b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _block_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, logits: ShardLogits) -> Tensor:
    z = _matmul(hidden, weight.t())
    if bias is not None:
        z += bias.float()
    if logits.logit_scale != 1.0:
        z *= logits.logit_scale
    return z.div_(logits.softcap).tanh_().mul_(logits.softcap) if logits.softcap else z


def _column(labels_N: Tensor, first: int) -> Tensor:
    """The labels as columns counted from a first id; negative for skipped tokens and for ids before it."""
    return torch.where(labels_N >= 0, labels_N - first, -1)


def _block_gradients(
    z: Tensor,
    column_N: Tensor,
    max_N: Tensor,
    log_sum_N: Tensor,
    entropy_N: Tensor | None,
    coef_4N: Tensor,
    logits: ShardLogits,
    eps: float,
) -> tuple[Tensor, Tensor | None]:
    """Gradients with respect to ``hidden @ weight.T + bias`` of one block of logits: all of them, and the dropped ones."""
    p_coef, label_coef, uniform_coef, entropy_coef = coef_4N[:, :, None].unbind()
    slope = logits.logit_scale * (1 - (z / logits.softcap).square()) if logits.softcap else logits.logit_scale
    log_p = z.sub_(max_N[:, None]).sub_(log_sum_N[:, None])
    if entropy_N is None:
        grad = log_p.exp_().mul_(p_coef)
    else:
        p = log_p.exp()
        surprise = torch.where(p == 0, 0.0, p * (log_p + entropy_N[:, None]))
        grad = p_coef * p - entropy_coef * surprise
    here_N = (column_N >= 0) & (column_N < z.shape[1])
    column_N1 = column_N.clamp(0, z.shape[1] - 1)[:, None]

    dropped = None
    if eps > 0:
        scale = torch.where(label_coef != 0, label_coef.abs(), torch.maximum(p_coef.abs(), entropy_coef.abs()))
        hit = ~(grad.abs() < eps * scale) & (scale > 0)  # NaN survives
        hit.scatter_(1, column_N1, hit.gather(1, column_N1) | here_N[:, None])
        survives = _spread(_any_per_tile(hit, TILE_V), grad.shape, TILE_V)
        dropped = grad.masked_fill(survives, 0.0) * slope
    grad += uniform_coef
    grad.scatter_(1, column_N1, grad.gather(1, column_N1) + torch.where(here_N[:, None], label_coef, 0.0))
    return grad.mul_(slope), dropped


def _any_per_tile(hit: Tensor, tile_v: int) -> Tensor:
    """Whether any element of each TILE_N x tile_v tile is set; tiles at the edges may be smaller."""
    rows, cols = hit.shape
    hit = torch.nn.functional.pad(hit, (0, -cols % tile_v, 0, -rows % TILE_N))
    return hit.view(-(-rows // TILE_N), TILE_N, -(-cols // tile_v), tile_v).any(3).any(1)


def _spread(kept: Tensor, shape: torch.Size, tile_v: int) -> Tensor:
    """The tile map as a mask of elements."""
    return kept.repeat_interleave(TILE_N, 0).repeat_interleave(tile_v, 1)[: shape[0], : shape[1]]
