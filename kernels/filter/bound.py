"""A lower bound of each token's log-sum-exp, which the marks of forward are relative to.

    sum of exp over the frequent columns, + exp of the label, + an estimate of all other columns less its error

The lists are too long by as much as the bound is too low: two to three times with frequent columns and label alone. The
estimate comes from a stratified sample: the other columns are cut into runs of neighbours, which are about as frequent, and one
column is taken from each run. ``ERRORS`` standard errors are taken off the estimate.

Where the estimate is too high, the log-sum-exp shows it, and the token falls back (``lists.decide``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from cce_dist.kernels import Operands, Rows, Spec, Want, exact
from cce_dist.kernels.blocks import has_tma, kernel, operand, tile_of_logits
from cce_dist.kernels.budget import NUM_PLANES, bound_columns, cdiv
from cce_dist.kernels.filter.frequent import Frequent, columns_of
from cce_dist.kernels.lse import NOTHING_MORE, Marks, Span, choose_splits, lse_partials, merge_splits, target_logits
from cce_dist.kernels.tiles import Tiles, interpreted, precision
from cce_dist.kernels.tokens import compact, gathered

ERRORS = 2.0  # standard errors


class First(NamedTuple):
    """What is known of the tokens before the pass over all columns, [N] fp32 or as said."""

    order: list[Tensor]  # the compact order, as ``tokens.compact`` returns it
    frequent_3N: Tensor  # maximum and sum of exp over the frequent columns
    frequent_sloped_N: Tensor | None  # that sum times the softcap's slopes
    frequent_moment_N: Tensor | None  # that sum times what the logits are above the maximum, for a screen with the entropy
    shard_3N: Tensor  # the shard's part of the bound, maximum and sum
    bound_N: Tensor  # lower bound of the log-sum-exp
    sampled: Operands  # the columns that are sampled for it, as a shard of their own


def before_all_columns(
    x: Operands, frequent: Frequent, tiles: Tiles, buffer_RD: Tensor, stats_KN: Tensor,
    merge_bound: Callable[[Tensor], Tensor], spec: Spec,
) -> First:
    """Write the labels' logits to stats_KN, and bound each token's log-sum-exp by them, frequent columns and some others."""
    order, num_tokens = compact(x.ids), x.num_tokens
    want = spec.want if spec.screened else NOTHING_MORE
    frequent_KN = stats_KN.new_empty(3 + want.entropy, num_tokens)
    frequent_3N, frequent_moment_N = frequent_KN[:3], frequent_KN[3] if want.entropy else None
    frequent_sloped_N = stats_KN.new_empty(num_tokens) if x.logits.softcap > 0.0 else None
    sampled_ids_S, sampled = sample_outside(frequent, x)
    num_sampled = sampled_ids_S.shape[0]
    sums_3PN = stats_KN.new_empty(3, cdiv(num_sampled, tiles.lse.cols), num_tokens)
    for group in exact.token_groups(order, buffer_RD.shape[0]):
        rows = gathered(x.hidden, group, buffer_RD)
        target_logits(x, rows, stats_KN[2])
        log_sum_exp(frequent.x, rows, tiles, frequent_KN, frequent_sloped_N, want=want)
        if num_sampled:
            sampled_sums(sampled_ids_S, sampled, rows, tiles, sums_3PN)
    shard_3N = bound_of_shard(frequent_3N, stats_KN[2], sums_3PN, num_sampled, x, frequent)
    return First(order, frequent_3N, frequent_sloped_N, frequent_moment_N, shard_3N, merge_bound(shard_3N), sampled)


def log_sum_exp(
    x: Operands, rows: Rows, tiles: Tiles, stats_KN: Tensor, sloped_N: Tensor | None, marks: Marks | None = None,
    want: Want = NOTHING_MORE, expected: int | None = None,
) -> None:
    """Run the log-sum-exp over all columns into stats_KN and sloped_N at the tokens of the group.

    ``expected``: how many of them have a label, if it is far from all.
    """
    num_rows = rows.index.shape[0]
    num_tiles = cdiv(x.logits.num_valid, tiles.lse.cols)
    parts = choose_splits(expected or num_rows, num_tiles, tiles.lse, stats_KN.device)
    partials_KPR = stats_KN.new_empty(NUM_PLANES, parts, num_rows)
    lse_partials(
        x, rows, tiles, Span(0, num_tiles, parts), partials_KPR, want=want, marks=marks, want_sloped=sloped_N is not None
    )
    merge_splits(partials_KPR, x, rows, stats_KN, want=want, sloped_N=sloped_N)


def num_sampled(num_outside: int) -> int:
    """Return how many columns are sampled of those that are not frequent, in whole tiles."""
    return bound_columns(num_outside, 32 if interpreted() else 256)


def sample_outside(frequent: Frequent, x: Operands) -> tuple[Tensor, Operands]:
    """Return columns of the shard that are not frequent, [S] int32 ascending, and those columns as a shard of their own."""
    num_outside, device = x.logits.num_valid - frequent.ids_F.shape[0], x.weight.device
    size = num_sampled(num_outside)
    number_S = torch.arange(size + 1, device=device)
    run_S = number_S * num_outside // max(1, size)
    # A run's column is sampled by a hash of the run's number (Knuth's multiplicative one), the same in every step.
    hashed_S = (number_S * 2654435761 & 0xFFFFFFFF) >> 16
    place_S = run_S[:-1] + (hashed_S[:-1] * run_S.diff() >> 16)
    # ``place`` counts the columns that are not frequent. Beside it: how many of them stand before each frequent one.
    outside_F = frequent.ids_F - torch.arange(frequent.ids_F.shape[0], device=device)
    ids_S = place_S + torch.searchsorted(outside_F, place_S, right=True)
    return ids_S.int(), columns_of(x, ids_S)


def sampled_sums(
    ids_S: Tensor, sampled: Operands, rows: Rows, tiles: Tiles, sums_3PN: Tensor
) -> None:
    """Write maximum, sum of exp and sum of their squares over the sampled columns, but for the label, in P parts.

    Args:
        ids_S, sampled: The columns, as ``sample_outside`` returns them.
        rows: The group of tokens.
        tiles: Tiles of the device; a part is one tile of columns.
        sums_3PN: out: at the tokens of the group.
    """
    tile, logits = tiles.lse, sampled.logits
    num_rows, hidden_size = rows.hidden.shape
    tma = has_tma(rows.hidden, sampled.weight)
    _sampled_sums_kernel[(cdiv(num_rows, tile.rows) * sums_3PN.shape[1],)](
        # in
        operand(rows.hidden, tile.rows, tile.inner, tma), operand(sampled.weight, tile.cols, tile.inner, tma), sampled.bias,
        ids_S, sampled.ids, rows.index, rows.num_kept,
        # out
        sums_3PN,
        # sizes
        num_rows, hidden_size, logits.num_valid, logits.start, sums_3PN.shape[1], sampled.num_tokens,
        # options
        logits.logit_scale, logits.softcap,
        HAS_BIAS=sampled.bias is not None, HAS_SCALE=logits.logit_scale != 1.0, HAS_SOFTCAP=logits.capped,
        # tiles
        BLOCK_N=tile.rows, BLOCK_V=tile.cols, BLOCK_D=tile.inner, TMA=tma, PRECISION=precision(rows.hidden.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )


@kernel("hidden", "weight", "bias_ptr", "hidden_size")
def _sampled_sums_kernel(
    hidden,  # in: [R, D] descriptor or pointer
    weight,  # in: [S, D] descriptor or pointer
    bias_ptr,  # in: [S]
    ids_ptr,  # in: [S] int32
    labels_ptr,  # in: [N] int64
    index_ptr,  # in: [R] int32
    num_kept_ptr,  # in: [1] int32
    sums_ptr,  # out: [3, P, N] fp32
    num_rows,
    hidden_size,
    size,
    start,
    num_parts,
    num_tokens,
    logit_scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    part = tl.program_id(0) % num_parts
    row = tl.program_id(0) // num_parts * BLOCK_N
    num_kept = tl.load(num_kept_ptr)
    if row >= num_kept:
        return
    z = tile_of_logits(
        hidden, weight, bias_ptr, row, part * BLOCK_V, num_rows, size, hidden_size, logit_scale, softcap,
        HAS_BIAS, HAS_SCALE, HAS_SOFTCAP, True, BLOCK_N, BLOCK_V, BLOCK_D, TMA, PRECISION,
    )
    offs_n = row + tl.arange(0, BLOCK_N)
    live = offs_n < num_kept
    token = tl.load(index_ptr + offs_n, mask=live, other=0).to(tl.int64)
    label = (tl.load(labels_ptr + token, mask=live, other=-1) - start).to(tl.int32)
    offs_s = part * BLOCK_V + tl.arange(0, BLOCK_V)
    column = tl.load(ids_ptr + offs_s, mask=offs_s < size, other=-1)
    maximum = tl.max(z, 1)
    base = tl.where(maximum > float("-inf"), maximum, 0.0)
    # The label's exponential is added by itself.
    e = tl.where(column[None, :] == label[:, None], 0.0, tl.exp(z - base[:, None]))
    plane = num_parts.to(tl.int64) * num_tokens
    where = sums_ptr + part.to(tl.int64) * num_tokens + token
    tl.store(where, base, mask=live)
    tl.store(where + plane, tl.sum(e, 1), mask=live)
    tl.store(where + 2 * plane, tl.sum(e * e, 1), mask=live)


def bound_of_shard(
    frequent_3N: Tensor, target_N: Tensor, sums_3PN: Tensor, num_sampled: int, x: Operands, frequent: Frequent
) -> Tensor:
    """Return the shard's part of the bound as a maximum, a sum relative to it, and zeros, [3, N] fp32.

    ``target_N``, the label's logit, counts where the label is a column of the shard that is not frequent.
    """
    stats_3N = torch.empty_like(frequent_3N)
    num_outside = x.logits.num_valid - frequent.ids_F.shape[0]
    # The error of a mean of ``num_sampled`` out of ``num_outside``; it is 0 where all of them are sampled.
    left_out = 1.0 - num_sampled / num_outside if num_outside else 0.0
    error = ERRORS * (left_out / max(1, num_sampled - 1)) ** 0.5
    _bound_of_shard_kernel[(cdiv(x.num_tokens, 256),)](
        frequent_3N, target_N, sums_3PN, x.ids, frequent.slot_V,
        stats_3N,
        x.num_tokens, x.logits.start, x.logits.num_valid, sums_3PN.shape[1], max(1, num_sampled), num_outside, error,
        BLOCK_N=256,
    )
    return stats_3N


@kernel("frequent_ptr", "slot_ptr", "stats_ptr")
def _bound_of_shard_kernel(
    frequent_ptr,  # in: [3, N] fp32: maximum, sum, anything
    target_ptr,  # in: [N] fp32
    sums_ptr,  # in: [3, P, N] fp32: reference, sum, sum of squares
    labels_ptr,  # in: [N] int64
    slot_ptr,  # in: [V] int32
    stats_ptr,  # out: [3, N] fp32
    num_tokens,
    start,
    num_valid,
    num_parts,
    num_sampled,
    num_outside,
    error,
    BLOCK_N: tl.constexpr,
):
    stride = num_tokens.to(tl.int64)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = offs_n < num_tokens
    label = tl.load(labels_ptr + offs_n, mask=in_n, other=-1)
    here = (label >= 0) & (label >= start) & (label - start < num_valid)
    beside = tl.load(slot_ptr + tl.where(here, label - start, 0), mask=here, other=1) == 0
    target = tl.where(beside, tl.load(target_ptr + offs_n, mask=in_n, other=0), float("-inf"))
    frequent_max = tl.load(frequent_ptr + offs_n, mask=in_n, other=0)
    frequent_sum = tl.load(frequent_ptr + stride + offs_n, mask=in_n, other=0)

    # Tokens without a label have no sums.
    live = in_n & (label >= 0)
    plane = num_parts * stride
    reference = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    for part in range(0, num_parts):
        where = sums_ptr + part * stride + offs_n
        reference = tl.maximum(reference, tl.load(where, mask=live, other=0))
    total = tl.zeros((BLOCK_N,), tl.float32)
    squares = tl.zeros((BLOCK_N,), tl.float32)
    for part in range(0, num_parts):
        where = sums_ptr + part * stride + offs_n
        factor = tl.exp(tl.load(where, mask=live, other=0) - reference)
        total += tl.load(where + plane, mask=live, other=0) * factor
        squares += tl.load(where + 2 * plane, mask=live, other=0) * factor * factor
    mean = total / num_sampled
    deviation = tl.sqrt(tl.maximum(squares / num_sampled - mean * mean, 0.0))
    rest = num_outside * tl.maximum(mean - error * deviation, 0.0)
    reference = tl.where(rest > 0, reference, float("-inf"))

    maximum = tl.maximum(tl.maximum(frequent_max, target), reference)
    base = tl.where(maximum > float("-inf"), maximum, 0.0)
    # NaN of a frequent column must stay: the maximum may hide it, the sum does not.
    sum_exp = (
        frequent_sum * tl.exp(frequent_max - base)
        + tl.exp(target - base)
        + tl.where(rest > 0, rest * tl.exp(reference - base), 0.0)
    )
    tl.store(stats_ptr + offs_n, maximum, mask=in_n)
    tl.store(stats_ptr + stride + offs_n, sum_exp, mask=in_n)
    tl.store(stats_ptr + 2 * stride + offs_n, tl.zeros((BLOCK_N,), tl.float32), mask=in_n)
