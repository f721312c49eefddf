"""One shard's statistics and gradients on a GPU: the kernels of this folder, in the order they run.

forward                                             backward
  keep the tokens that count, first (compact)         the same, then for each chunk of the vocabulary:
  target logit, one weight row per token                recompute its dlogits (dlogits)
  log-sum-exp, tile by tile (lse)                       add its part of d_hidden (grad_hidden)
  merge the splits into the statistics                  write its rows of d_weight (grad_weight)
                                                      kept exponentials: the two products alone (exp_cache)

``workspace_bytes`` bounds what is alive beside inputs and outputs: how many rows and columns a chunk has follows from it
(``_plan``), and a budget above that keeps exponentials of the first columns for the backward (``cache_columns``). The chunk is
one of the vocabulary, not of tokens: a chunk of the vocabulary finishes its rows of d_weight, the large output, while d_hidden,
the small one, is added to. Only where two bytes per element of d_hidden exceed the budget are tokens split too, and d_weight
is then added to in its own dtype.

Nothing here waits for the device, so a CUDA graph can capture it; shapes known on the host alone decide the launches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import NamedTuple

import torch

from cce_dist.kernels import ShardLogits
from cce_dist.kernels.compact import gather_rows, gathered, kept_first
from cce_dist.kernels.dlogits import dlogits_chunk
from cce_dist.kernels.exp_cache import level, row_scales
from cce_dist.kernels.grad_hidden import grad_hidden
from cce_dist.kernels.grad_weight import grad_bias, grad_weight
from cce_dist.kernels.lse import MAX, NUM_PLANES, choose_splits, lse_partials, merge_splits
from cce_dist.kernels.target_logit import target_logits
from cce_dist.kernels.tiles import Tile, Tiles, cdiv, choose_tiles, interpreted, num_programs

LEAST_BYTES = 32 << 20  # below this the rows of a chunk would no longer fill a device
CHUNK_COST = 2500  # fixed cost of a chunk, in columns recomputed: 175 us at 55 to 100 ns each (H200, N 8,192, 2026-11)
_ROWS = 128  # token groups are cut at multiples of this


class _Plan(NamedTuple):
    rows: int  # tokens at a time
    cols: int  # vocabulary columns whose dlogits are alive at a time


def low_bytes(dtype: torch.dtype) -> int:
    return 2 if dtype.itemsize == 2 else 0  # the remainder that d_hidden cannot hold (grad_hidden.py)


def most_rows(hidden_size: int, dtype: torch.dtype, workspace_bytes: int) -> int:
    """Tokens at a time, at most, where exponentials are not kept: gathered rows and remainder are half of the budget."""
    row_bytes = hidden_size * (dtype.itemsize + low_bytes(dtype))
    return max(_ROWS, max(workspace_bytes, LEAST_BYTES) // (2 * row_bytes) // _ROWS * _ROWS)


def _plan(
    num_tokens: int,
    num_cols: int,
    hidden_size: int,
    dtype: torch.dtype,
    tiles: Tiles,
    at_once: int,
    workspace_bytes: int,
    cache_bytes: int,
) -> _Plan:
    """Split num_tokens x num_cols dlogits so that gathered rows, remainder and dlogits fit the workspace beside the cache."""
    budget = max(workspace_bytes, LEAST_BYTES) - cache_bytes
    tile_cols = tiles.dlogits.cols
    row_bytes = hidden_size * (dtype.itemsize + low_bytes(dtype))
    rows = num_tokens
    if cache_bytes == 0:  # else every token has its row in the cache, and cache_columns left room for all of them
        # at least one tile of columns beside the rows
        rows = max(_ROWS, budget // (row_bytes + 2 * tile_cols * dtype.itemsize) // _ROWS * _ROWS)
        rows = min(num_tokens, rows, most_rows(hidden_size, dtype, workspace_bytes))
    cols = max(tile_cols, (budget - rows * row_bytes) // (rows * dtype.itemsize) // tile_cols * tile_cols)
    return _Plan(rows, _fill_waves(rows, num_cols, hidden_size, tiles, at_once, cols))


@lru_cache(maxsize=1024)
def _fill_waves(rows: int, num_cols: int, hidden_size: int, tiles: Tiles, at_once: int, most: int) -> int:
    """Return the width of a chunk, at most ``most``, at which its kernels' programs wait least for one another.

    Programs run ``at_once`` at a time, and a last wave of a few takes as long as a full one. (d_hidden's is cut: see
    grad_hidden.py.)
    """

    def waves(tile: Tile, num_rows: int, num_cols: int, inner: int) -> int:
        blocks = cdiv(num_rows, tile.rows) * cdiv(num_cols, tile.cols)
        return cdiv(blocks, at_once) * tile.rows * tile.cols * inner

    def time(width: int) -> int:
        whole, rest = divmod(num_cols, width)
        return sum(
            count * (waves(tiles.dlogits, rows, cols, hidden_size) + waves(tiles.grad_weight, cols, hidden_size, rows))
            for count, cols in ((whole, width), (1, rest))
        )

    tile_cols = tiles.dlogits.cols
    chunks = max(1, cdiv(num_cols, most))
    even = max(1, cdiv(cdiv(num_cols, chunks), tile_cols)) * tile_cols
    return min(
        range(max(tile_cols, even - even // 4 // tile_cols * tile_cols), even + 1, tile_cols),
        key=lambda w: (time(w), -w),
    )


def cache_columns(
    num_tokens: int,
    num_rows: int,
    hidden_size: int,
    dtype: torch.dtype,
    logits: ShardLogits,
    want_uniform: bool,
    want_entropy: bool,
    workspace_bytes: int,
    tile_cols: int = 256,
) -> int:
    """Return how many of the shard's first vocabulary columns keep their exponentials within the budget.

    0 where the gradient is not a multiple of them (label smoothing, entropy), in fp16, whose exponent is too short, and in
    fp32, whose precision a 16-bit cache would cost.

    Args:
        num_tokens: Tokens, ignored ones counted.
        num_rows: Weight rows of the shard.
        hidden_size: D.
        dtype: Of hidden states and weight.
        logits: The shard.
        want_uniform: Label smoothing is on.
        want_entropy: The entropy is differentiated.
        workspace_bytes: The budget.
        tile_cols: Columns of a tile of the log-sum-exp, of which the answer is a multiple.
    """
    num_valid = min(logits.num_valid, num_rows)
    if dtype != torch.bfloat16 or want_uniform or want_entropy or num_tokens == 0 or num_valid == 0:
        return 0
    num_tiles = cdiv(num_valid, tile_cols)
    # the exponentials, and a reference per row while they are made
    tile_bytes = num_tokens * (tile_cols * dtype.itemsize + 4)
    gathered = num_tokens * hidden_size * dtype.itemsize
    if gathered + num_tiles * tile_bytes <= workspace_bytes:
        return num_tiles * tile_cols
    # The other columns are recomputed in chunks, which come first: rows of every token, the remainder, and dlogits so
    # wide that a column more of them saves as much (CHUNK_COST * V / width chunks) as a column more of cache.
    width = math.isqrt(CHUNK_COST * num_valid)
    recompute = 2 * gathered + num_tokens * width * dtype.itemsize
    tiles = (workspace_bytes - recompute) // tile_bytes
    return tiles * tile_cols if tiles >= 16 else 0


def local_stats(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    labels_N: torch.Tensor,
    logits: ShardLogits,
    *,
    want_uniform: bool,
    want_entropy: bool,
    num_cached: int,
    workspace_bytes: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return stats_KN fp32, cache_NV [N, num_cached] and cache_max [2, N]: references of its rows, targets of all tokens.

    Rows of ignored tokens (negative labels) hold MAX 0, SUM_EXP 1 and zeros. The cache's rows are the kept tokens in order.

    Args:
        hidden_ND: [N, D] contiguous; fp32, bf16 or fp16.
        weight_VD: [V, D] contiguous, the same dtype.
        bias_V: [V] or None.
        labels_N: [N] int64, ids in the whole vocabulary; negative: ignored.
        logits: The shard.
        want_uniform: Add SUM_BELOW to the statistics.
        want_entropy: Add SUM_MOMENT.
        num_cached: What ``cache_columns`` returned.
        workspace_bytes: Budget for everything allocated here, the cache included.
    """
    num_tokens, hidden_size = hidden_ND.shape
    logits = logits._replace(num_valid=min(logits.num_valid, weight_VD.shape[0]))
    fp32 = {"dtype": torch.float32, "device": hidden_ND.device}
    stats_KN = torch.zeros(3 + want_uniform + want_entropy, num_tokens, **fp32)
    cache_NV = hidden_ND.new_empty(num_tokens, num_cached)
    cache_max = torch.empty(2, num_tokens if num_cached else 0, **fp32)
    if num_tokens == 0:
        return stats_KN, cache_NV, cache_max
    if logits.num_valid == 0:
        stats_KN[0] = float("-inf")
        return stats_KN, cache_NV, cache_max

    with on_device(hidden_ND):
        tiles = choose_tiles(hidden_ND.dtype, hidden_ND.device)
        index_N, kept = kept_first(labels_N)
        row_bytes = hidden_size * hidden_ND.itemsize
        rows = num_tokens if num_cached else max(_ROWS, max(workspace_bytes, LEAST_BYTES) // row_bytes // _ROWS * _ROWS)
        num_tiles = cdiv(logits.num_valid, tiles.lse.cols)
        cached_tiles = min(num_cached // tiles.lse.cols, num_tiles)
        splits, cached_splits = (
            choose_splits(min(rows, num_tokens), n, tiles.lse, hidden_ND.device) if n > 0 else 0
            for n in (num_tiles - cached_tiles, cached_tiles)
        )

        buffer_RD = hidden_ND.new_empty(min(rows, num_tokens), hidden_size)
        for index_R, num_kept in token_groups(index_N, kept, rows):
            rows_RD = gathered(hidden_ND, index_R, num_kept, buffer_RD)
            target_logits(rows_RD, weight_VD, bias_V, labels_N, index_R, num_kept, logits, stats_KN[2])
            partials_KSR = torch.empty(NUM_PLANES, cached_splits + splits, index_R.shape[0], **fp32)
            operands = (rows_RD, weight_VD, bias_V, num_kept, logits)
            if cached_tiles:
                _keep_exponentials(operands, tiles, cached_tiles, cached_splits, partials_KSR, cache_NV, cache_max[0])
                cache_max[1] = stats_KN[2]
            if splits:
                lse_partials(
                    *operands, tiles, first_tile=cached_tiles, last_tile=num_tiles, num_splits=splits,
                    partials_KSR=partials_KSR, first_split=cached_splits, want_below=want_uniform, want_moment=want_entropy,
                )  # fmt: skip
            merge_splits(partials_KSR, index_R, num_kept, stats_KN, want_below=want_uniform, want_moment=want_entropy)
    return stats_KN, cache_NV, cache_max


def _keep_exponentials(
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, ShardLogits],
    tiles: Tiles,
    num_tiles: int,
    num_splits: int,
    partials_KSR: torch.Tensor,
    exp_RV: torch.Tensor,
    reference_R: torch.Tensor,
) -> None:
    """Run the log-sum-exp over the first ``num_tiles`` tiles, keeping their exponentials and each row's reference."""
    num_rows = exp_RV.shape[0]
    first_KSR = partials_KSR.new_empty(NUM_PLANES, 1, num_rows)
    lse_partials(*operands, tiles, first_tile=0, last_tile=1, num_splits=1, partials_KSR=first_KSR)
    tile_reference_TR = partials_KSR.new_empty(num_tiles, num_rows)
    lse_partials(
        *operands, tiles, first_tile=0, last_tile=num_tiles, num_splits=num_splits, partials_KSR=partials_KSR,
        reference_R=first_KSR[MAX.value, 0], exp_RV=exp_RV, tile_reference_TR=tile_reference_TR,
    )  # fmt: skip
    level(exp_RV, tile_reference_TR, operands[3], reference_R, tiles.lse.cols)


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
    cache_NV: torch.Tensor,
    cache_max: torch.Tensor,
    *,
    want_hidden: bool,
    want_weight: bool,
    want_bias: bool,
    d_weight_out: torch.Tensor | None = None,
    workspace_bytes: int,
    hidden_ready: Callable[[torch.Tensor], None] | None = None,
    ready_rows: int | None = None,
    often_empty: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return d_hidden (hidden's dtype), d_weight (weight's dtype) and d_bias (fp32), each None unless wanted.

    Args:
        hidden_ND: As in ``local_stats``, with the four arguments after it.
        weight_VD: [V, D].
        bias_V: [V] or None.
        labels_N: [N]; a row with a negative label gets a d_hidden of exactly 0 and adds nothing elsewhere.
        logits: The shard.
        max_N: Maximum merged over all shards, fp32.
        log_sum_N: Logarithm of the merged sum relative to it, fp32.
        entropy_N: Merged entropy, where its coefficients are used.
        coef_4N: Coefficients P, LABEL, UNIFORM, ENTROPY, fp32; UNIFORM is read where nothing is cached.
        cache_NV: From ``local_stats``; left so that a second call gives the same bits.
        cache_max: From ``local_stats``.
        want_hidden: Compute d_hidden.
        want_weight: Compute d_weight.
        want_bias: Compute d_bias.
        d_weight_out: Buffer [V, D] that d_weight is added to instead of being returned.
        workspace_bytes: Budget for everything allocated here, the cache included.
        hidden_ready: Called with d_hidden as soon as it is whole on the current stream.
        ready_rows: Call ``hidden_ready`` before that with the first ``ready_rows`` rows, then twice as many, and so on, each as
            soon as they are final, if tokens are split.
        often_empty: All labels may be negative, and then d_weight need not be written at all.
    """
    num_tokens, hidden_size = hidden_ND.shape
    num_rows = weight_VD.shape[0]
    logits = logits._replace(num_valid=min(logits.num_valid, num_rows))
    d_hidden = torch.zeros_like(hidden_ND) if want_hidden else None
    d_bias = torch.zeros(num_rows, dtype=torch.float32, device=weight_VD.device) if want_bias else None
    d_weight = d_weight_out
    if want_weight and d_weight_out is None:
        d_weight = torch.empty_like(weight_VD)
        num_written = logits.num_valid if num_tokens else 0
        if num_written < num_rows:
            d_weight[num_written:].zero_()  # padding
    if num_tokens == 0 or logits.num_valid == 0:
        if d_hidden is not None and hidden_ready is not None:
            hidden_ready(d_hidden)
        return d_hidden, None if d_weight_out is not None else d_weight, d_bias

    with on_device(hidden_ND):
        tiles = choose_tiles(hidden_ND.dtype, hidden_ND.device)
        index_N, kept = kept_first(labels_N)
        gain = None
        if hidden_ND.dtype == torch.float16:
            coef_4N, gain = normalised(coef_4N)
        num_cached = cache_NV.shape[1]
        num_recomputed = max(0, logits.num_valid - num_cached)
        rows, cols = _plan(
            num_tokens,
            num_recomputed,
            hidden_size,
            hidden_ND.dtype,
            tiles,
            num_programs(hidden_ND.device),
            workspace_bytes,
            cache_NV.nbytes,
        )
        chunks = [(col, min(col + cols, logits.num_valid)) for col in range(num_cached, logits.num_valid, cols)]
        parts = [*chunks, (0, min(num_cached, logits.num_valid))] if num_cached else chunks
        buffer_RD = hidden_ND.new_empty(rows, hidden_size)
        dlogits = hidden_ND.new_empty(rows, cols) if chunks else cache_NV
        low_RD = None
        if want_hidden and len(parts) > 1 and hidden_ND.itemsize == 2:
            low_RD = torch.empty(rows, hidden_size, dtype=torch.bfloat16, device=hidden_ND.device)

        if num_cached:
            ready_rows = None  # the cache's rows are the kept ones of all tokens, in order
        groups = finished_groups(labels_N, (index_N, kept), rows, ready_rows)
        for group, (index_R, num_kept, num_final) in enumerate(groups):
            rows_RD = buffer_RD[: index_R.shape[0]]
            tokens = (labels_N, index_R, num_kept, max_N, log_sum_N)
            if chunks:
                gather_rows(hidden_ND, index_R, num_kept, None, rows_RD)
            for number, (first, stop) in enumerate(parts):
                if number < len(chunks):
                    grads_RV, scale_R = dlogits[: index_R.shape[0]], None
                    dlogits_chunk(
                        rows_RD, weight_VD, bias_V, *tokens, entropy_N, coef_4N, logits, first, grads_RV,
                        tiles.dlogits, tiles.group, one_wave=often_empty,
                    )  # fmt: skip
                else:
                    grads_RV = cache_NV
                    scale_R = row_scales(cache_NV, cache_max[0], cache_max[1], *tokens, coef_4N, logits)
                if want_weight and scale_R is not None:
                    gather_rows(hidden_ND, index_R, num_kept, scale_R, rows_RD)
                if d_hidden is not None:
                    grad_hidden(
                        grads_RV, weight_VD[first:stop], index_R, num_kept, scale_R, gain, d_hidden, low_RD,
                        tiles.grad_hidden, first=number == 0,
                    )  # fmt: skip
                    if hidden_ready is not None and num_final and number == len(parts) - 1:
                        hidden_ready(d_hidden[:num_final])
                if want_weight and d_weight is not None:
                    add = d_weight_out is not None or group > 0
                    grad_weight(
                        grads_RV, rows_RD, num_kept, gain, d_weight[first:stop], tiles.grad_weight, add=add,
                        skip_empty=often_empty,
                    )  # fmt: skip
                if d_bias is not None:
                    grad_bias(grads_RV, num_kept, scale_R, gain, d_bias[first:stop])
    return d_hidden, None if d_weight_out is not None else d_weight, d_bias


def token_groups(index_N: torch.Tensor, kept: torch.Tensor, rows: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Cut the compact order into groups of ``rows``: each one's index and its number of kept tokens, on the device."""
    num_tokens = index_N.shape[0]
    if rows >= num_tokens:
        return [(index_N, kept)]
    starts = torch.arange(0, num_tokens, rows, dtype=torch.int32, device=index_N.device)
    kept_G = (kept - starts).clamp_(0, rows)
    return [(index_N[i : i + rows], kept_G[g : g + 1]) for g, i in enumerate(range(0, num_tokens, rows))]


def finished_groups(
    labels_N: torch.Tensor, compact: tuple[torch.Tensor, torch.Tensor], rows: int, ready_rows: int | None
) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """Cut into groups as ``token_groups`` does, but finish ``ready_rows`` tokens after another, each compacted by themselves.

    Args:
        labels_N: [N]; negative: ignored.
        compact: ``kept_first(labels_N)``.
        rows: Size of a group.
        ready_rows: None: all tokens.

    Returns:
        Index and number of kept tokens of each group, and how many tokens, from the first on, are finished with it: 0 for a
        group that finishes none.
    """
    num_tokens = labels_N.shape[0]
    if ready_rows is None or ready_rows >= num_tokens:
        ranges = [(*compact, num_tokens)]
    else:
        ranges = []
        for start in range(0, num_tokens, ready_rows):
            index_R, num_kept = kept_first(labels_N[start : start + ready_rows])
            ranges.append((index_R.add_(start), num_kept, start + index_R.shape[0]))
    groups = []
    for index_R, num_kept, num_final in ranges:
        *others, last = token_groups(index_R, num_kept, rows)
        groups += [*((*group, 0) for group in others), (*last, num_final)]
    return groups


def normalised(coef_4N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return coefficients divided by their largest finite magnitude, and that: fp16 dlogits of a mean would underflow."""
    size = coef_4N.abs()
    gain = torch.where(size.isfinite(), size, 0.0).amax()
    gain = torch.where(gain > 0, gain, 1.0)
    return coef_4N / gain, gain


def on_device(tensor: torch.Tensor) -> AbstractContextManager:
    """Launch on the tensor's device."""
    return nullcontext() if interpreted() else torch.cuda.device(tensor.device)
