"""All outputs per token as one record, and the merge over shards of outputs that the loss does not need. Plain torch.

Each function's order of operations is fixed: the bits are the same in every run and on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cce_dist.kernels import IGNORED, OUTSIDE, Cells, Operands, Softmax, Spec, Want
from cce_dist.kernels.memory import piece_columns

NO_ID = torch.iinfo(torch.int32).max  # after the ids of all columns


def any_id(ids_NI: Tensor) -> Tensor:
    """Return one id per token: a valid one if there is any, else OUTSIDE, else IGNORED. -> [N]."""
    largest = ids_NI.amax(1)
    return torch.where(largest >= 0, largest, ids_NI.amin(1))


class Outputs(NamedTuple):
    """The operator's outputs, fp32 except ids; 0 where a token's label is IGNORED, NaN where it is OUTSIDE.

    The first NUM_LOSSES are differentiable. An output that is not wanted is None; torch.library replaces it by an empty tensor.
    """

    nll: Any  # [N]; [N, I] with several ids a token
    lse: Any  # [N]
    target_logit: Any  # [N]
    uniform_nll: Any  # [N] nll of the uniform distribution
    entropy: Any  # [N]
    mean: Any  # [] mean of nll over the labels that are not ignored
    max_logit: Tensor | None = None  # [N]
    sum_p_squared: Tensor | None = None  # [N]
    argmax: Tensor | None = None  # [N] int64, the smallest id of equal logits; -1 where there is no id
    top_log_probs: Tensor | None = None  # [N, k], in falling order
    top_ids: Tensor | None = None  # [N, k] int64; -1 where there is no id

    @classmethod
    def of(cls, results: Sequence[Any], want: Want) -> Outputs:
        """Return the record of the operator's results: NUM_LOSSES tensors, then a list of the others that are wanted."""
        losses, others = results[:NUM_LOSSES], results[NUM_LOSSES]
        return cls(*losses, **dict(zip(listed(want, 0), others, strict=True))) if others else cls(*losses)


NUM_LOSSES = 6


def listed(want: Want, num_tokens: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return name, shape and dtype of the wanted outputs that follow the losses, in order."""
    fp32, ids = torch.float32, torch.int64
    every = {
        "max_logit": (want.largest, (num_tokens,), fp32),
        "sum_p_squared": (want.sum_p_squared, (num_tokens,), fp32),
        "argmax": (want.best, (num_tokens,), ids),
        "top_log_probs": (want.top_k, (num_tokens, want.top_k), fp32),
        "top_ids": (want.top_k, (num_tokens, want.top_k), ids),
    }
    return {name: (shape, dtype) for name, (wanted, shape, dtype) in every.items() if wanted}


def merge_listed(stats_TKN: Tensor | None, softmax: Softmax, ids_N: Tensor, spec: Spec) -> dict[str, Tensor]:
    """Merge the shards' statistics of the outputs in ``listed``."""
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
        z_NK, ids_NK = merge_top(stats_TKN, spec)
        log_p_NK = (z_NK - max_N[:, None]) - log_sum_N[:, None]
        found["top_log_probs"] = masked(log_p_NK, ids_N[:, None])
        found["top_ids"] = ids_NK.masked_fill(ids_N[:, None] < 0, -1)
    return found


def merge_cells(stats_TKN: Tensor, softmax: Softmax, ids_NI: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """Return the negative log-probabilities of several ids, and their logits, [N, I] each."""
    target_NI = stats_TKN[:, spec.first_target : spec.first_top].sum(0).t().contiguous()  # 0 on all other shards
    nll_NI = softmax.max[:, None] - target_NI + softmax.log_sum[:, None]
    return masked(nll_NI, ids_NI), target_NI


def merge_top(stats_TKN: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """Return the largest logits of all shards and their int64 ids, [N, k] each, in the order of ``largest``."""
    z_TKN, bits_TKN = stats_TKN[:, spec.first_top :].chunk(2, 1)
    z_NC, ids_NC = (of_shards.permute(2, 0, 1).flatten(1) for of_shards in (z_TKN, bits_TKN.view(torch.int32).long()))
    return (z_NC, ids_NC) if stats_TKN.shape[0] == 1 else merge_largest(z_NC, ids_NC, spec.want.top_k)


def masked(values: Tensor, ids: Tensor) -> Tensor:
    """Set values to 0 where an id is IGNORED, and to NaN where it is OUTSIDE."""
    return values.masked_fill(ids == IGNORED, 0.0).masked_fill(ids == OUTSIDE, torch.nan)


def distinct(ids_NI: Tensor, target_NI: Tensor, grad_NI: Tensor) -> Cells:
    """Sum the gradients of equal ids into one of them, by a segmented scan (Hillis and Steele, 1986); others become IGNORED."""
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
    """Return the cells of backward, and the gradients of log-sum-exps that come from ids, [N]."""
    grad_NI = torch.zeros_like(target_NI) if d_nll_NI is None else d_nll_NI.masked_fill(ids_NI < 0, 0.0)
    return distinct(ids_NI, target_NI, -grad_NI), grad_NI.sum(1)


def normalised(x: Operands, coef: Tensor) -> tuple[Operands, Tensor, Tensor | None]:
    """Divide fp16 coefficients and cells by their largest finite magnitude, so that gradients of a mean do not underflow.

    Return operands, coefficients [..., N], and the divisor (None in other dtypes).
    """
    if x.hidden.dtype != torch.float16 or not x.num_tokens:
        return x, coef, None
    cells: Any = x.cells
    given = [coef] if cells is None else [coef, cells.grad_NI]
    gain = torch.stack([g.abs().nan_to_num(0.0, 0.0, 0.0).amax() for g in given]).amax()
    gain = torch.where(gain > 0, gain, 1.0)
    if cells is not None:
        x = x._replace(cells=cells._replace(grad_NI=cells.grad_NI / gain))
    return x, coef / gain, gain


# Equal logits are in ascending order of ids. torch.topk does not promise which of them it returns, so these functions sort.


def largest(z_RV: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the ``top_k`` largest logits of each row, and their columns. -> [R, k] each.

    Columns are cut into pieces. Only the ``top_k`` pieces with the largest maxima are sorted; of pieces with equal maxima the
    first are taken. All of these maxima come before any logit of another piece, so none of its logits is among the largest.
    """
    piece = piece_columns(z_RV.shape[1], top_k)
    if z_RV.shape[1] % piece:
        z_RV = torch.nn.functional.pad(z_RV, (0, -z_RV.shape[1] % piece), value=-torch.inf)
    z_RPC = z_RV.unflatten(1, (-1, piece))
    best_RP = z_RPC.amax(2).sort(dim=1, descending=True, stable=True).indices[:, :top_k].sort(dim=1).values
    z_RC = z_RPC.gather(1, best_RP[:, :, None].expand(-1, -1, piece)).flatten(1)
    z_RC, order_RC = z_RC.sort(dim=1, descending=True, stable=True)
    order_RK = order_RC[:, :top_k]
    return z_RC[:, :top_k], best_RP.gather(1, order_RK // piece) * piece + order_RK % piece


def merge_largest(z_NC: Tensor, ids_NC: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the ``top_k`` largest logits of each row, and their ids, which are in any order. -> [N, k] each."""
    ids_NC, order_NC = ids_NC.sort(dim=1)
    z_NC, order_NC = z_NC.gather(1, order_NC).sort(dim=1, descending=True, stable=True)
    return z_NC[:, :top_k], ids_NC.gather(1, order_NC[:, :top_k])
