"""All outputs per token as one record, and the merge over shards of outputs that the loss does not need. Plain torch.

These tensors have a few numbers per token or id, so every backend shares the functions. Each function's order of operations is
fixed: the bits are the same in every run and on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cce_dist.kernels import IGNORED, OUTSIDE, Cells, Softmax, Spec, Want

LEAST_KEY = torch.iinfo(torch.int64).min  # below the key of every column
_LOW_BITS = (1 << 32) - 1


def any_id(ids_NI: Tensor) -> Tensor:
    """Return one id per token: a valid one if there is any, else OUTSIDE, else IGNORED. -> [N]."""
    largest = ids_NI.amax(1)
    return torch.where(largest >= 0, largest, ids_NI.amin(1))


class Outputs(NamedTuple):
    """The operator's outputs, fp32 except ids; 0 where a token's label is IGNORED, NaN where it is OUTSIDE.

    The first NUM_LOSSES are differentiable. An output that is not wanted is None; torch.library replaces it by an empty tensor.
    """

    nll: Tensor  # [N]; [N, I] with several ids a token
    lse: Tensor  # [N]
    target_logit: Tensor  # [N]
    uniform_nll: Any  # [N] nll of the uniform distribution
    entropy: Any  # [N]
    mean: Any  # [] mean of nll over the labels that are not ignored
    filter_stats: Tensor | None = None  # [3]
    max_logit: Tensor | None = None  # [N]
    sum_p_squared: Tensor | None = None  # [N]
    argmax: Tensor | None = None  # [N] int64, the smallest id of equal logits; -1 where there is no id
    top_log_probs: Tensor | None = None  # [N, k], in falling order
    top_ids: Tensor | None = None  # [N, k] int64; -1 where there is no id

    @classmethod
    def of(cls, results: Sequence[Any], want: Want) -> Outputs:
        """Return the record of the operator's results: NUM_LOSSES tensors, then a list of the others that are wanted."""
        return cls(*results[:NUM_LOSSES], **dict(zip(listed(want, 0), results[NUM_LOSSES], strict=True)))


NUM_LOSSES = 6


def listed(want: Want, num_tokens: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return name, shape and dtype of the wanted outputs that follow the losses, in order."""
    fp32, ids = torch.float32, torch.int64
    every = {
        "filter_stats": (want.filter_stats, (3,), fp32),
        "max_logit": (want.largest, (num_tokens,), fp32),
        "sum_p_squared": (want.sum_p_squared, (num_tokens,), fp32),
        "argmax": (want.best, (num_tokens,), ids),
        "top_log_probs": (want.top_k, (num_tokens, want.top_k), fp32),
        "top_ids": (want.top_k, (num_tokens, want.top_k), ids),
    }
    return {name: (shape, dtype) for name, (wanted, shape, dtype) in every.items() if wanted}


def merge_listed(stats_TKN: Tensor | None, softmax: Softmax, ids_N: Tensor, spec: Spec) -> dict[str, Tensor]:
    """Merge the shards' statistics of the outputs in ``listed``, except "filter_stats"."""
    max_N, log_sum_N, want = softmax.max, softmax.log_sum, spec.want
    found = {}
    if want.largest:
        found["max_logit"] = masked(max_N, ids_N)
    if stats_TKN is None:
        return found
    if want.sum_p_squared:
        # An empty shard or a row of -inf logits has a maximum of -inf, and -inf - -inf would be NaN.
        below_TN = torch.where(stats_TKN[:, 0] == max_N, 0.0, stats_TKN[:, 0] - max_N)
        squares_N = (stats_TKN[:, spec.square_row] * (2 * below_TN).exp()).sum(0)
        found["sum_p_squared"] = masked(squares_N * (-2 * log_sum_N).exp(), ids_N)
    if want.best:
        ids_TN = stats_TKN[:, spec.best_row].contiguous().view(torch.int32)
        here = stats_TKN[:, 0] == max_N
        best_N = torch.where(here, ids_TN, torch.iinfo(torch.int32).max).amin(0).long()
        found["argmax"] = best_N.masked_fill((ids_N < 0) | ~here.any(0), -1)  # no shard equals a maximum of NaN
    if want.top_k:
        z_NC, ids_NC = of_keys(merge_top(stats_TKN, spec))
        log_p_NC = (z_NC - max_N[:, None]) - log_sum_N[:, None]
        found["top_log_probs"] = masked(log_p_NC, ids_N[:, None])
        found["top_ids"] = ids_NC.masked_fill(ids_N[:, None] < 0, -1)
    return found


def merge_cells(stats_TKN: Tensor, softmax: Softmax, ids_NI: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """Return the negative log-probabilities of several ids, and their logits, [N, I] each."""
    target_NI = stats_TKN[:, spec.first_target : spec.first_top].sum(0).t().contiguous()  # 0 on all other shards
    nll_NI = softmax.max[:, None] - target_NI + softmax.log_sum[:, None]
    return masked(nll_NI, ids_NI), target_NI


def merge_top(stats_TKN: Tensor, spec: Spec) -> Tensor:
    """Merge the shards' largest keys, which are in falling order. -> [N, k], in falling order."""
    upper_TKN, lower_TKN = stats_TKN[:, spec.first_top :].view(torch.int32).long().chunk(2, 1)
    keys_NK = ((upper_TKN << 32) | (lower_TKN & _LOW_BITS)).permute(2, 0, 1).flatten(1)
    return keys_NK if stats_TKN.shape[0] == 1 else largest_keys([keys_NK], spec.want.top_k)


def masked(values: Tensor, ids: Tensor) -> Tensor:
    """Set values to 0 where an id is IGNORED, and to NaN where it is OUTSIDE."""
    return values.masked_fill(ids == IGNORED, 0.0).masked_fill(ids == OUTSIDE, torch.nan)


def distinct(ids_NI: Tensor, target_NI: Tensor, grad_NI: Tensor) -> Cells:
    """Sort each token's ids, and sum the gradients of equal ids into one of them; the others become IGNORED.

    The sums are computed by a segmented scan (Hillis and Steele, 1986) in log2(I) steps.
    """
    ids, order = ids_NI.sort(dim=1, stable=True)
    target, grad = target_NI.gather(1, order), grad_NI.gather(1, order)
    step = 1
    while step < ids.shape[1]:
        # Ids are sorted: if two are equal, so are all between them.
        before = torch.where(ids[:, step:] == ids[:, :-step], grad[:, :-step], 0.0)
        grad = torch.cat((grad[:, :step], grad[:, step:] + before), 1)
        step *= 2
    repeated = torch.zeros_like(ids, dtype=torch.bool)
    repeated[:, :-1] = ids[:, :-1] == ids[:, 1:]
    return Cells(ids.masked_fill_(repeated, IGNORED), target, grad)


def cell_gradients(d_nll_NI: Tensor | None, target_NI: Tensor, ids_NI: Tensor) -> tuple[Cells, Tensor]:
    """Return the cells of backward, and the part of each log-sum-exp's gradient that comes from the token's ids, [N]."""
    grad_NI = torch.zeros_like(target_NI) if d_nll_NI is None else d_nll_NI.masked_fill(ids_NI < 0, 0.0)
    return distinct(ids_NI, target_NI, -grad_NI), grad_NI.sum(1)


# The largest logits. A key is an int64 that orders columns by logit, then by id, smaller ids first. No two keys are equal, so
# the choice of the largest does not depend on the order of the search.


def keys_of(z_RC: Tensor, first_id: int) -> Tensor:
    """Return the keys of a block of logits, whose first column has the id ``first_id``."""
    ids = torch.arange(first_id, first_id + z_RC.shape[1], device=z_RC.device)
    bits = (z_RC + 0.0).view(torch.int32)  # -0 becomes 0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    return (ordered.long() << 32) | (_LOW_BITS - ids)


def rows_of_keys(keys_NK: Tensor) -> Tensor:
    """Return keys as rows of a shard's statistics: the upper halves, then the lower halves, as bits of fp32. -> [2 k, N]."""
    lower_NK, upper_NK = keys_NK.contiguous().view(torch.int32).unflatten(1, (-1, 2)).unbind(2)
    return torch.cat((upper_NK, lower_NK), 1).t().contiguous().view(torch.float32)


def largest_keys(keys: list[Tensor], top_k: int) -> Tensor:
    """Return the ``top_k`` largest keys of each row of the concatenated blocks, in falling order. -> [R, top_k]."""
    return torch.cat(keys, 1).topk(top_k, 1).values


def of_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits and the ids of keys."""
    ordered = (keys >> 32).int()
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return bits.view(torch.float32), _LOW_BITS - (keys & _LOW_BITS)
