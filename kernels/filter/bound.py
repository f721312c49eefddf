"""A lower bound of each token's log-sum-exp. Forward marks logits relative to it.

    sum of exp over the frequent columns, + exp of the label, + an estimate of all other columns less its error

A bound that is too low makes lists too long: two to three times as long with frequent columns and label alone. The estimate
comes from a stratified sample. The other columns are cut into runs of neighbours, whose frequencies are similar, and one column
is taken from each run. ``ERRORS`` standard errors are subtracted from the estimate.

If the estimate is too high, the log-sum-exp shows it, and the token falls back (``lists.decide``).
"""

from __future__ import annotations

import torch
import triton.language as tl

from cce_dist.kernels import Operands, Rows
from cce_dist.kernels.blocks import has_tma, kernel, operand, tile_of_products
from cce_dist.kernels.filter.frequent import Frequent
from cce_dist.kernels.head import logits_of, token_factors
from cce_dist.kernels.memory import bound_columns
from cce_dist.kernels.tiles import Tiles, interpreted, precision
from cce_dist.kernels.waves import cdiv

ERRORS = 2.0  # standard errors that are subtracted from the estimate


def num_sampled(num_outside: int) -> int:
    """Return how many of the ``num_outside`` infrequent columns are sampled, in whole tiles."""
    return bound_columns(num_outside, 32 if interpreted() else 256)


def sample_outside(frequent: Frequent, x: Operands) -> tuple[torch.Tensor, Operands]:
    """Sample infrequent columns. Return their indices, [S] int32 ascending, and operands with these columns alone."""
    num_valid, hidden_size = x.num_valid, x.weight.shape[1]
    num_outside = num_valid - frequent.ids_F.shape[0]
    size = num_sampled(num_outside)
    ids_S = torch.empty(size, dtype=torch.int32, device=x.weight.device)
    weight_SD = torch.empty(size, hidden_size, dtype=x.weight.dtype, device=x.weight.device)
    if size:
        _sample_outside_kernel[(cdiv(size, 16), cdiv(hidden_size, 256))](
            frequent.ids_F, x.weight,
            ids_S, weight_SD,
            size, num_outside, num_valid - num_outside, hidden_size, (num_valid - num_outside).bit_length(),
            BLOCK_S=16, BLOCK_D=256,
        )
    return ids_S, x._replace(weight=weight_SD, start=0, num_valid=size)


@kernel("frequent_ptr", "weight_ptr", "ids_ptr", "weight_out_ptr", "hidden_size")
def _sample_outside_kernel(
    frequent_ptr,  # in: [F] int64: the frequent columns, ascending
    weight_ptr,  # in: [V, D]
    ids_ptr,  # out: [S] int32
    weight_out_ptr,  # out: [S, D]
    size,
    num_outside,
    num_frequent,
    hidden_size,
    num_steps,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    offs_s = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    in_s = offs_s < size
    # A run's column is chosen by Knuth's multiplicative hash of the run's number, so it is the same in every step.
    first = (offs_s.to(tl.int64) * num_outside // size).to(tl.int32)
    length = ((offs_s + 1).to(tl.int64) * num_outside // size).to(tl.int32) - first
    hashed = (offs_s.to(tl.uint32) * 2654435761) >> 16
    rank = first + (hashed.to(tl.int64) * length >> 16).to(tl.int32)
    # ``rank`` numbers the infrequent columns. Bisection finds how many frequent columns come before each sampled one.
    num_before = tl.zeros((BLOCK_S,), tl.int32)
    last = num_before + num_frequent
    for _ in range(0, num_steps):
        middle = (num_before + last) // 2
        frequent = tl.load(frequent_ptr + middle, mask=in_s & (num_before < last), other=0).to(tl.int32)
        before = (frequent - middle <= rank) & (num_before < last)
        num_before = tl.where(before, middle + 1, num_before)
        last = tl.where(before, last, middle)
    column = rank + num_before

    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = in_s[:, None] & (offs_d < hidden_size)[None, :]
    row = tl.load(weight_ptr + column.to(tl.int64)[:, None] * hidden_size + offs_d[None, :], mask=mask, other=0)
    tl.store(weight_out_ptr + offs_s.to(tl.int64)[:, None] * hidden_size + offs_d[None, :], row, mask=mask)
    if tl.program_id(1) == 0:
        tl.store(ids_ptr + offs_s, column, mask=in_s)


def sampled_sums(
    ids_S: torch.Tensor, sampled: Operands, start: int, rows: Rows, tiles: Tiles, sums_3PN: torch.Tensor
) -> None:
    """Write maximum, sum of exp and sum of squared exp over the sampled columns without the label, in P parts.

    Args:
        ids_S: The columns, as ``sample_outside`` returns them.
        sampled: Operands with the sampled columns alone.
        start: First id of the shard.
        rows: A group of tokens.
        tiles: Tiles of the device; a part is one tile of columns.
        sums_3PN: out: written at the tokens of the group.
    """
    tile = tiles.lse
    num_rows, hidden_size = rows.hidden.shape
    tma = has_tma(rows.hidden, sampled.weight)
    _sampled_sums_kernel[(cdiv(num_rows, tile.rows) * sums_3PN.shape[1],)](
        # in
        operand(rows.hidden, tile.rows, tile.inner, tma), operand(sampled.weight, tile.cols, tile.inner, tma), sampled.head,
        ids_S, sampled.ids, rows.index, rows.num_labelled,
        # out
        sums_3PN,
        # sizes
        num_rows, hidden_size, sampled.num_valid, start, sums_3PN.shape[1], sampled.num_tokens,
        # tiles
        TILE=tile, TMA=tma, PRECISION=precision(rows.hidden.dtype), num_warps=tile.warps, num_stages=tile.stages,
    )


@kernel("hidden", "weight", "hidden_size")
def _sampled_sums_kernel(
    hidden,  # in: [R, D] descriptor or pointer
    weight,  # in: [S, D] descriptor or pointer
    head,  # in: Head
    ids_ptr,  # in: [S] int32
    labels_ptr,  # in: [N] int64
    index_ptr,  # in: [R] int32
    num_labelled_ptr,  # in: [1] int32
    sums_ptr,  # out: [3, P, N] fp32
    num_rows,
    hidden_size,
    size,
    start,
    num_parts,
    num_tokens,
    TILE: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    BLOCK_N: tl.constexpr = TILE.rows
    BLOCK_V: tl.constexpr = TILE.cols
    part = tl.program_id(0) % num_parts
    row = tl.program_id(0) // num_parts * BLOCK_N
    num_labelled = tl.load(num_labelled_ptr)
    if row >= num_labelled:
        return
    acc = tile_of_products(hidden, weight, row, part * BLOCK_V, num_rows, size, hidden_size, TILE, TMA, PRECISION)
    offs_n = row + tl.arange(0, BLOCK_N)
    live = offs_n < num_labelled
    offs_s = part * BLOCK_V + tl.arange(0, BLOCK_V)
    z = logits_of(acc, offs_s, offs_s < size, head, token_factors(head, offs_n, live), True)
    token = tl.load(index_ptr + offs_n, mask=live, other=0).to(tl.int64)
    label = (tl.load(labels_ptr + token, mask=live, other=-1) - start).to(tl.int32)
    column = tl.load(ids_ptr + offs_s, mask=offs_s < size, other=-1)
    maximum = tl.max(z, 1)
    base = tl.where(maximum > float("-inf"), maximum, 0.0)
    # The label is left out: its exponential is added separately.
    e = tl.where(column[None, :] == label[:, None], 0.0, tl.exp(z - base[:, None]))
    plane = num_parts.to(tl.int64) * num_tokens
    where = sums_ptr + part.to(tl.int64) * num_tokens + token
    tl.store(where, base, mask=live)
    tl.store(where + plane, tl.sum(e, 1), mask=live)
    tl.store(where + 2 * plane, tl.sum(e * e, 1), mask=live)


def bound_of_shard(
    frequent_3N: torch.Tensor, stats_KN: torch.Tensor, sums_3PN: torch.Tensor, num_sampled: int, x: Operands,
    frequent: Frequent,
) -> torch.Tensor:
    """Return the shard's part of the bound as a maximum, a sum relative to it, and zeros, [3, N] fp32.

    Args:
        frequent_3N: Maximum and sum of exp over the frequent columns.
        stats_KN: Its row TARGET is the label's logit, which is added if the label is an infrequent column of this shard.
        sums_3PN: The output of ``sampled_sums``.
        num_sampled: Number of sampled columns.
        x: Operands of the shard.
        frequent: Frequent columns of the shard.
    """
    stats_3N = torch.empty(3, x.num_tokens, dtype=torch.float32, device=frequent_3N.device)
    num_outside = x.num_valid - frequent.ids_F.shape[0]
    # ERRORS standard errors of a mean of ``num_sampled`` out of ``num_outside`` columns, in standard deviations.
    left_out = 1.0 - num_sampled / num_outside if num_outside else 0.0
    error = ERRORS * (left_out / max(1, num_sampled - 1)) ** 0.5
    _bound_of_shard_kernel[(cdiv(x.num_tokens, 256),)](
        frequent_3N, stats_KN, sums_3PN, x.ids, frequent.slot_V,
        stats_3N,
        x.num_tokens, x.start, x.num_valid, sums_3PN.shape[1], max(1, num_sampled), num_outside, error,
        BLOCK_N=256,
    )
    return stats_3N


@kernel("frequent_ptr", "slot_ptr", "stats_ptr")
def _bound_of_shard_kernel(
    frequent_ptr,  # in: [3, N] fp32: maximum, sum, anything
    shard_ptr,  # in: [K, N] fp32; TARGET is read
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
    target_ptr = shard_ptr + 2 * stride
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = offs_n < num_tokens
    label = tl.load(labels_ptr + offs_n, mask=in_n, other=-1)
    here = (label >= 0) & (label >= start) & (label - start < num_valid)
    beside = tl.load(slot_ptr + tl.where(here, label - start, 0), mask=here, other=1) == 0
    target = tl.where(beside, tl.load(target_ptr + offs_n, mask=in_n, other=0), float("-inf"))
    frequent_max = tl.load(frequent_ptr + offs_n, mask=in_n, other=0)
    frequent_sum = tl.load(frequent_ptr + stride + offs_n, mask=in_n, other=0)

    # Merge the maxima, then the sums of all parts, [BLOCK_N]. Tokens without a label have no sums.
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
    # NaN of a frequent column must reach the result: the maximum may hide it, the sum does not.
    sum_exp = (
        frequent_sum * tl.exp(frequent_max - base)
        + tl.exp(target - base)
        + tl.where(rest > 0, rest * tl.exp(reference - base), 0.0)
    )
    tl.store(stats_ptr + offs_n, maximum, mask=in_n)
    tl.store(stats_ptr + stride + offs_n, sum_exp, mask=in_n)
    tl.store(stats_ptr + 2 * stride + offs_n, tl.zeros((BLOCK_N,), tl.float32), mask=in_n)
