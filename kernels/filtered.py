"""One shard's statistics and gradients with a filter: the kernels of this folder, in the order they run.

forward                                             backward
  keep the tokens that count, first (compact)         tokens that the lists cannot serve (filter_plan): the exact path
  the head of the vocabulary: logits of it, and of    the head: dlogits, d_hidden and d_weight as matrix products
    the label, bound each token's LSE (filter_lists)  listed columns, and the stand-in for all others, added to
  log-sum-exp, where what reaches the threshold is      d_hidden (filtered_hidden)
    marked (lse)                                      the lists turned over, and written as d_weight
  marks become lists of columns (filter_lists)          (filtered_weight)

Everything that reaches the threshold is kept, and each element is judged alone: the hundred or so of a row of 10^5 that do are
scattered, so tiles of any size would keep thousands. Most of them are of ids that are frequent everywhere, and those columns,
the head, are kept whole as a matrix. The rest are kept in lists and gathered.

What is dropped is replaced by a rank-1 matrix ``m_i share_j``: m is the mass that token i has outside its head and list, and
share the columns' part of all dropped mass, taken from a sample of the tokens (``filter_shares.py``). Row sums of the softmax
are then right to rounding, and column sums to the sample's error.

Three kinds of token are not filtered here but go through the exact kernels: their list would be too long, or the coefficients
that backward brings ask for more than forward kept, or something is not finite. There are none on most steps, and those
launches return at once. Which they are is known to the device alone: nothing here waits for it.

Source: the filter of *Cut Your Losses* (Wijmans et al., 2024, section 4.3), there by tiles of a sorted vocabulary. Lists, head
and compensation are this project's.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from cce_dist.kernels import Filter, ShardLogits, triton_ops
from cce_dist.kernels.compact import gathered, kept_first
from cce_dist.kernels.dlogits import dlogits_chunk
from cce_dist.kernels.filter_lists import (
    add_label,
    gather_head,
    head_size,
    list_columns,
    most_labelled,
    outside_head,
)
from cce_dist.kernels.filter_plan import SLACK, plan
from cce_dist.kernels.filter_shares import dropped_shares, sample_tokens, shares_of
from cce_dist.kernels.filtered_hidden import Entries, filtered_hidden, listed_gradients
from cce_dist.kernels.filtered_weight import by_column, filtered_bias, filtered_weight, sums_of_rows
from cce_dist.kernels.grad_hidden import grad_hidden
from cce_dist.kernels.grad_weight import grad_bias, grad_weight
from cce_dist.kernels.lse import NUM_PLANES, Marks, choose_splits, lse_partials, merge_splits
from cce_dist.kernels.target_logit import target_logits
from cce_dist.kernels.tiles import Tiles, cdiv, choose_tiles

MEAN_LIST = 64  # columns listed per token, on average over the batch, that backward has room for
ENTRY_BYTES = 48  # of one such column in backward: as it is made, sorted, and the sort's own
SAMPLE = 512  # tokens that the shares are taken from; a power of 2


def max_listed(num_tokens: int, workspace_bytes: int) -> int:
    """Return L, the longest list that a token may have."""
    return max(64, min(1024, workspace_bytes // (32 * max(1, num_tokens)) // 32 * 32))


def saved_shapes(
    num_tokens: int, num_valid: int, eps: float, workspace_bytes: int
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of the tensors that ``local_stats`` saves for backward."""
    return [
        ((3, num_tokens), torch.float32),
        ((num_tokens, max_listed(num_tokens, workspace_bytes)), torch.int32),
        ((num_tokens,), torch.int32),
        ((head_size(num_valid, eps),), torch.int64),
    ]


def local_stats(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    labels_N: torch.Tensor,
    logits: ShardLogits,
    *,
    grad_filter: Filter,
    want_uniform: bool,
    want_entropy: bool,
    merge_bound: Callable[[torch.Tensor], torch.Tensor],
    workspace_bytes: int,
) -> tuple[torch.Tensor, ...]:
    """Return stats_KN as ``triton_ops.local_stats`` does, and what the filtered backward needs.

    Args:
        hidden_ND: [N, D] contiguous; fp32, bf16 or fp16.
        weight_VD: [V, D] contiguous, the same dtype.
        bias_V: [V] or None.
        labels_N: [N] int64, ids in the whole vocabulary; negative: ignored.
        logits: The shard.
        grad_filter: The filter, eps > 0.
        want_uniform: Add SUM_BELOW to the statistics.
        want_entropy: Add SUM_MOMENT.
        merge_bound: Turns this shard's maximum, sum of exp and 0 over head and label, [3, N], into the log-sum-exp [N] of all
            shards' heads and the labels. Called once, on every rank.
        workspace_bytes: Budget for everything allocated here.

    Returns:
        stats [K, N]; state [3, N] fp32 (the bound; the sum of exp outside the head, times the softcap's slopes, relative to the
        shard's maximum; that maximum); columns [N, L] int32, the lists; their lengths [N] int32; the head's columns [H] int64.
    """
    num_tokens, hidden_size = hidden_ND.shape
    logits = logits._replace(num_valid=min(logits.num_valid, weight_VD.shape[0]))
    device, num_valid = hidden_ND.device, logits.num_valid
    fp32 = {"dtype": torch.float32, "device": device}
    stats_KN = torch.empty(3 + want_uniform + want_entropy, num_tokens, **fp32)
    count_N = torch.empty(num_tokens, dtype=torch.int32, device=device)
    columns_NL = torch.empty(num_tokens, max_listed(num_tokens, workspace_bytes), dtype=torch.int32, device=device)
    if num_tokens == 0 or num_valid == 0:
        count_N.zero_()
        stats_KN.zero_()[0] = float("-inf")
        state_3N = torch.stack((merge_bound(stats_KN[:3]), torch.zeros_like(stats_KN[0]), stats_KN[0]))
        return stats_KN, state_3N, columns_NL, count_N, labels_N.new_empty(head_size(num_valid, grad_filter.eps))

    with triton_ops.on_device(hidden_ND):
        tiles = choose_tiles(hidden_ND.dtype, device)
        num_tiles = cdiv(num_valid, tiles.lse.cols)
        num_words = num_tiles * tiles.lse.cols // 32
        ids_H = most_labelled(labels_N, logits, head_size(num_valid, grad_filter.eps))
        head = gather_head(ids_H, weight_VD, bias_V, logits, num_words)

        row_bytes = hidden_size * hidden_ND.itemsize
        budget = max(workspace_bytes, triton_ops.LEAST_BYTES)
        rows = budget * 3 // 4 // (row_bytes + 4 * num_words)
        unit = tiles.lse.rows * tiles.group if rows >= tiles.lse.rows * tiles.group else tiles.lse.rows
        rows = min(max(unit, rows // unit * unit), cdiv(num_tokens, tiles.lse.rows) * tiles.lse.rows)
        index_N, kept = kept_first(labels_N)

        sloped = logits.softcap > 0.0
        sloped_2N = torch.empty(2, num_tokens, **fp32) if sloped else None
        head_3N = torch.empty(3, num_tokens, **fp32)
        first_rows = max(rows, budget // 2 // row_bytes // 128 * 128)
        buffer_RD = hidden_ND.new_empty(min(first_rows, num_tokens), hidden_size)
        for index_R, num_kept in triton_ops.token_groups(index_N, kept, first_rows):
            rows_RD = gathered(hidden_ND, index_R, num_kept, buffer_RD)
            target_logits(rows_RD, weight_VD, bias_V, labels_N, index_R, num_kept, logits, stats_KN[2])
            operands = (rows_RD, head.weight_HD, head.bias_H, num_kept, head.logits)
            _log_sum_exp(operands, tiles, index_R, head_3N, None if sloped_2N is None else sloped_2N[0], None)
        bound_N = merge_bound(add_label(head_3N, stats_KN[2], labels_N, head.slot_V, logits))

        words_RW = torch.empty(min(rows, num_tokens), num_words, dtype=torch.int32, device=device)
        for index_R, num_kept in triton_ops.token_groups(index_N, kept, rows):
            if rows < num_tokens:  # else they are all here
                rows_RD = gathered(hidden_ND, index_R, num_kept, buffer_RD)
            operands = (rows_RD, weight_VD, bias_V, num_kept, logits)
            words = words_RW[: index_R.shape[0]]
            marks = Marks(bound_N.index_select(0, index_R), math.log(grad_filter.eps / SLACK), words)
            _log_sum_exp(
                operands, tiles, index_R, stats_KN, None if sloped_2N is None else sloped_2N[1], marks,
                want_uniform, want_entropy,
            )  # fmt: skip
            list_columns(words, head.words_W, labels_N, index_R, num_kept, logits, columns_NL, count_N)

        head_sum_N, sum_N = (head_3N[1], stats_KN[1]) if sloped_2N is None else sloped_2N.unbind()
        state_3N = outside_head(bound_N, head_3N[0], head_sum_N, stats_KN[0], sum_N)
    return stats_KN, state_3N, columns_NL, count_N, ids_H


def filter_stats(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    labels_N: torch.Tensor,
    logits: ShardLogits,
    max_N: torch.Tensor,
    log_sum_N: torch.Tensor,
    state_3N: torch.Tensor,
    columns_NL: torch.Tensor,
    count_N: torch.Tensor,
    ids_H: torch.Tensor,
    *,
    grad_filter: Filter,
) -> torch.Tensor:
    """Share of the shard's logits that are kept, and softmax mass dropped (mean and maximum over labelled tokens). -> [3]."""
    logits = logits._replace(num_valid=min(logits.num_valid, weight_VD.shape[0]))
    num_tokens, num_valid = labels_N.shape[0], logits.num_valid
    if num_tokens == 0 or num_valid == 0:
        return torch.zeros(3, device=hidden_ND.device)
    with triton_ops.on_device(hidden_ND):
        nll_4N = torch.zeros(4, num_tokens, device=hidden_ND.device)
        nll_4N[:2] = 1.0  # coefficients of the plain loss, but for the sign, which decides nothing here
        how = plan(
            labels_N, max_N, log_sum_N, nll_4N, state_3N, count_N, None, logits, grad_filter.eps, columns_NL.shape[1],
            2**31 - 1,
        )  # fmt: skip
        dropped_N, num_listed_N = listed_gradients(
            hidden_ND, weight_VD, bias_V, labels_N, how.index, how.num_listed, columns_NL, count_N, how.end, how.mass,
            how.threshold, max_N, log_sum_N, nll_4N, logits, True, None,
        )  # fmt: skip
        num_labelled = (labels_N >= 0).sum().clamp(min=1)
        kept_N = torch.where(how.listed_labels >= 0, num_listed_N + ids_H.shape[0], 0)
        num_kept = kept_N.sum() + how.num_dense[0] * num_valid
        return torch.stack((num_kept / (num_labelled * num_valid), dropped_N.sum() / num_labelled, dropped_N.amax()))


def gradients(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    labels_N: torch.Tensor,
    logits: ShardLogits,
    max_N: torch.Tensor,
    log_sum_N: torch.Tensor,
    entropy_N: torch.Tensor | None,
    coef_4N: torch.Tensor,
    state_3N: torch.Tensor,
    columns_NL: torch.Tensor,
    count_N: torch.Tensor,
    ids_H: torch.Tensor,
    *,
    grad_filter: Filter,
    want_hidden: bool,
    want_weight: bool,
    want_bias: bool,
    d_weight_out: torch.Tensor | None = None,
    workspace_bytes: int,
    hidden_ready: Callable[[torch.Tensor], None] | None = None,
    ready_rows: int | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return d_hidden, d_weight and d_bias as ``triton_ops.gradients`` does, filtered.

    An element is kept where ``|P p| >= eps |LABEL|`` (eps |P| where LABEL is 0), at the label, and wherever forward kept more.
    Where the entropy is differentiated, which has no rank-1 stand-in, all is exact. With UNIFORM there is no softcap.

    Args:
        state_3N: What ``local_stats`` saved, with the four arguments after it.
        grad_filter: The filter that ``local_stats`` was called with; ``hidden=False``, ``weight=False`` leave that one exact.
    """
    logits = logits._replace(num_valid=min(logits.num_valid, weight_VD.shape[0]))
    num_tokens, num_valid = labels_N.shape[0], logits.num_valid
    whole = (hidden_ND, weight_VD, bias_V, labels_N, logits, max_N, log_sum_N)
    exact = {"workspace_bytes": workspace_bytes, "d_weight_out": d_weight_out}
    if num_tokens == 0 or num_valid == 0 or entropy_N is not None:
        return triton_ops.gradients(
            *whole, entropy_N, coef_4N, *_no_cache(hidden_ND), want_hidden=want_hidden, want_weight=want_weight,
            want_bias=want_bias, hidden_ready=hidden_ready, ready_rows=ready_rows, **exact,
        )  # fmt: skip
    d_hidden = d_weight = d_bias = None
    if want_hidden and not grad_filter.hidden:
        d_hidden = triton_ops.gradients(
            *whole, None, coef_4N, *_no_cache(hidden_ND), want_hidden=True, want_weight=False, want_bias=False,
            hidden_ready=hidden_ready, ready_rows=ready_rows, **exact,
        )[0]  # fmt: skip
    exact_weight = not grad_filter.weight and (want_weight or want_bias)
    if (want_hidden and grad_filter.hidden) or ((want_weight or want_bias) and grad_filter.weight):
        filtered = _filtered_gradients(
            *whole, coef_4N, state_3N, columns_NL, count_N, ids_H, grad_filter,
            want_hidden and grad_filter.hidden, want_weight and grad_filter.weight, want_bias and grad_filter.weight,
            d_weight_out, workspace_bytes, hidden_ready, ready_rows,
        )  # fmt: skip
        d_hidden = d_hidden if filtered[0] is None else filtered[0]
        d_weight, d_bias = filtered[1:]
    if exact_weight:
        _, d_weight, d_bias = triton_ops.gradients(
            *whole, None, coef_4N, *_no_cache(hidden_ND), want_hidden=False, want_weight=want_weight, want_bias=want_bias,
            **exact,
        )  # fmt: skip
    return d_hidden, d_weight, d_bias


def _filtered_gradients(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    labels_N: torch.Tensor,
    logits: ShardLogits,
    max_N: torch.Tensor,
    log_sum_N: torch.Tensor,
    coef_4N: torch.Tensor,
    state_3N: torch.Tensor,
    columns_NL: torch.Tensor,
    count_N: torch.Tensor,
    ids_H: torch.Tensor,
    grad_filter: Filter,
    want_hidden: bool,
    want_weight: bool,
    want_bias: bool,
    d_weight_out: torch.Tensor | None,
    workspace_bytes: int,
    hidden_ready: Callable[[torch.Tensor], None] | None,
    ready_rows: int | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    num_tokens, hidden_size = hidden_ND.shape
    num_valid, device = logits.num_valid, hidden_ND.device
    budget = max(workspace_bytes, triton_ops.LEAST_BYTES)
    with triton_ops.on_device(hidden_ND):
        capacity = max(1, min(MEAN_LIST * num_tokens, budget // 4 // ENTRY_BYTES))
        head = gather_head(ids_H, weight_VD, bias_V, logits, cdiv(num_valid, 32))
        how = plan(
            labels_N, max_N, log_sum_N, coef_4N, state_3N, count_N, head.slot_V, logits, grad_filter.eps,
            columns_NL.shape[1], capacity,
        )  # fmt: skip
        d_hidden, d_weight, d_bias = triton_ops.gradients(
            hidden_ND, weight_VD, bias_V, how.dense_labels, logits, max_N, log_sum_N, None, coef_4N,
            *_no_cache(hidden_ND), want_hidden=want_hidden, want_weight=want_weight, want_bias=want_bias,
            d_weight_out=d_weight_out, workspace_bytes=workspace_bytes, often_empty=True,
        )  # fmt: skip

        tiles = choose_tiles(hidden_ND.dtype, device)
        gained_4N, gain = triton_ops.normalised(coef_4N) if hidden_ND.dtype == torch.float16 else (coef_4N, None)

        entries = _empty_entries(capacity, num_valid, device)
        factor_2N, _ = listed_gradients(
            hidden_ND, weight_VD, bias_V, labels_N, how.index, how.num_listed, columns_NL, count_N, how.end, how.mass,
            how.threshold, max_N, log_sum_N, coef_4N, logits, grad_filter.compensate, entries,
        )  # fmt: skip
        if grad_filter.compensate:
            sample, rows_SD = sample_tokens(hidden_ND, factor_2N[0], how.reference, how.threshold, labels_N, SAMPLE)
            shares_2V = dropped_shares(rows_SD, weight_VD, bias_V, sample, head.slot_V, logits, tiles.lse)
        else:
            shares_2V = shares_of(None, head.slot_V, num_valid)

        target = d_weight if d_weight_out is None else d_weight_out
        head_d_weight = target.new_empty(ids_H.shape[0], hidden_size) if want_weight and target is not None else None
        head_d_bias = torch.zeros(ids_H.shape[0], dtype=torch.float32, device=device) if want_bias else None
        shared_2D = sums_of_rows(shares_2V, weight_VD[:num_valid]) if want_hidden else None
        cols = cdiv(ids_H.shape[0], tiles.dlogits.cols) * tiles.dlogits.cols
        row_bytes = (
            hidden_size * (hidden_ND.itemsize + triton_ops.low_bytes(hidden_ND.dtype)) + cols * hidden_ND.itemsize
        )
        rows = min(num_tokens, max(128, budget // 2 // row_bytes // 128 * 128))
        buffer_RD, dlogits_RH = hidden_ND.new_empty(rows, hidden_size), hidden_ND.new_empty(rows, cols)
        low_RD = None
        if want_hidden and hidden_ND.itemsize == 2:
            low_RD = torch.empty(rows, hidden_size, dtype=torch.bfloat16, device=device)
        groups = triton_ops.finished_groups(how.listed_labels, (how.index, how.num_listed), rows, ready_rows)
        for group, (index_R, num_kept, num_final) in enumerate(groups):
            rows_RD = gathered(hidden_ND, index_R, num_kept, buffer_RD)
            grads_RH = dlogits_RH[: index_R.shape[0]]
            dlogits_chunk(
                rows_RD, head.weight_HD, head.bias_H, how.head_labels, index_R, num_kept, max_N, log_sum_N, None, gained_4N,
                head.logits, 0, grads_RH, tiles.dlogits, tiles.group,
            )  # fmt: skip
            if d_hidden is not None and shared_2D is not None:
                grad_hidden(
                    grads_RH, head.weight_HD, index_R, num_kept, None, gain, d_hidden, low_RD, tiles.grad_hidden, first=True
                )  # fmt: skip
                filtered_hidden(
                    weight_VD, index_R, num_kept, count_N, how.end, entries, factor_2N, shared_2D, low_RD, d_hidden,
                    num_valid,
                )  # fmt: skip
                if hidden_ready is not None and num_final:
                    hidden_ready(d_hidden[:num_final])
            if head_d_weight is not None:
                grad_weight(grads_RH, rows_RD, num_kept, gain, head_d_weight, tiles.grad_weight, add=group > 0)
            if head_d_bias is not None:
                grad_bias(grads_RH, num_kept, None, gain, head_d_bias)

        if want_weight or want_bias:
            columns = by_column(entries, num_valid)
            if target is not None and head_d_weight is not None:
                filtered_weight(
                    hidden_ND, columns, head.slot_V, head_d_weight, shares_2V[0], sums_of_rows(factor_2N, hidden_ND),
                    how.num_dense, target, add=d_weight_out is not None,
                )  # fmt: skip
            if d_bias is not None and head_d_bias is not None:
                filtered_bias(columns, head.slot_V, head_d_bias, shares_2V[0], factor_2N.sum(1), d_bias)
    return d_hidden, d_weight, d_bias


def _log_sum_exp(
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, ShardLogits],
    tiles: Tiles,
    index_R: torch.Tensor,
    stats_KN: torch.Tensor,
    sloped_N: torch.Tensor | None,
    marks: Marks | None,
    want_uniform: bool = False,
    want_entropy: bool = False,
) -> None:
    """Run the log-sum-exp over all columns into stats_KN and sloped_N at the tokens of index_R."""
    rows_RD, _, _, num_kept, logits = operands
    num_tiles = cdiv(logits.num_valid, tiles.lse.cols)
    splits = choose_splits(rows_RD.shape[0], num_tiles, tiles.lse, rows_RD.device)
    partials_KSR = torch.empty(NUM_PLANES, splits, rows_RD.shape[0], dtype=torch.float32, device=rows_RD.device)
    lse_partials(
        *operands, tiles, first_tile=0, last_tile=num_tiles, num_splits=splits, partials_KSR=partials_KSR,
        want_below=want_uniform, want_moment=want_entropy, want_sloped=sloped_N is not None, marks=marks,
    )  # fmt: skip
    merge_splits(
        partials_KSR, index_R, num_kept, stats_KN, want_below=want_uniform, want_moment=want_entropy, sloped_N=sloped_N
    )


def _empty_entries(capacity: int, num_cols: int, device: torch.device) -> Entries:
    return Entries(
        torch.full((capacity,), num_cols, dtype=torch.int32, device=device),
        torch.empty(capacity, dtype=torch.int32, device=device),
        torch.empty(capacity, dtype=torch.float32, device=device),
    )


def _no_cache(hidden_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``triton_ops.gradients`` takes where no exponentials were kept."""
    return hidden_ND.new_empty(hidden_ND.shape[0], 0), hidden_ND.new_empty(2, 0, dtype=torch.float32)
