"""The frequent columns, and a lower bound of each token's log-sum-exp. Forward marks logits relative to the bound.

Nearly all logits that reach a useful threshold belong to the few hundred ids that are frequent in any text. These columns, the
most frequent labels of the batch, are kept for every token, as a matrix. The bound is the logarithm of

    sum of exp over the frequent columns, + exp of the label, + an estimate of all other columns less its error

A bound that is too low makes lists too long: two to three times as long with frequent columns and label alone. The estimate
comes from a stratified sample. The other columns are cut into runs of neighbours, whose frequencies are similar, and one column
is taken from each run. ``ERRORS`` standard errors are subtracted from the estimate.

If the estimate is too high, the log-sum-exp shows it, and the token falls back (``lists.decide``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from cce_dist.kernels import Operands
from cce_dist.kernels.blocks import has_tma, kernel, operand, tile_of_products
from cce_dist.kernels.head import logits_of, sloped, token_factors
from cce_dist.kernels.lse import gathered_with_targets
from cce_dist.kernels.memory import bound_columns, frequent_columns
from cce_dist.kernels.tiles import Tile, cdiv, interpreted, precision
from cce_dist.kernels.tokens import token_groups

ERRORS = 2.0  # standard errors that are subtracted from the estimate


def num_frequent(num_valid: int, eps: float) -> int:
    """Return F in whole tiles: at most 1,024, 1/eps, or 1/16 of the shard.

    At most 1/eps ids can have an average probability of eps.
    """
    return frequent_columns(num_valid, eps, 32 if interpreted() else 256)


@triton.jit
def num_before(ids_ptr, size, num_steps, wanted, RANKED: tl.constexpr):
    """Return how many of the ascending frequent ids are below each wanted id, by bisection.

    ``num_steps``: bits of ``size``. RANKED: what is wanted are ranks, which number the infrequent columns.
    """
    before = tl.zeros(wanted.shape, tl.int32)
    last = before + size
    for _ in range(0, num_steps):
        middle = (before + last) // 2
        frequent = tl.load(ids_ptr + middle, mask=before < last, other=0).to(tl.int32)
        is_before = (frequent - middle <= wanted) if RANKED else (frequent < wanted)
        is_before &= before < last
        last = tl.where(is_before, last, middle)
        before = tl.where(is_before, middle + 1, before)
    return before


def most_labelled(x: Operands, ids_F: torch.Tensor, zeros_V: torch.Tensor, num_words: int) -> torch.Tensor:
    """Fill ids_F with the columns that are labels most often, ascending, of equals the first; fill zeros_V with 0.

    Returns:
        [W] int32: words with a bit set for each frequent column, like a row of ``lse.Marks``.
    """
    num_tokens, num_valid = x.num_tokens, x.num_valid
    counts = torch.zeros(num_valid + num_tokens, dtype=torch.int32, device=x.ids.device)
    words_W = torch.empty(num_words, dtype=torch.int32, device=x.ids.device)
    _count_labels_kernel[(cdiv(num_tokens, 1024),)](x.ids, counts, num_tokens, x.start, num_valid, BLOCK_N=1024)
    _most_labelled_kernel[(cdiv(32 * num_words, 4096),)](
        counts, ids_F, words_W, zeros_V,
        num_tokens, num_valid, ids_F.shape[0], num_words, num_tokens.bit_length(),
        BLOCK_V=4096, num_warps=8,
    )
    return words_W


@kernel("count_ptr")
def _count_labels_kernel(
    labels_ptr,  # in: [N] int64
    count_ptr,  # in, out: [V + N] int32: labels of each column; how many columns are the label more than 0, 1, ... times
    num_tokens,
    start,
    num_valid,
    BLOCK_N: tl.constexpr,
):
    above_ptr = count_ptr + num_valid
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    label = tl.load(labels_ptr + offs_n, mask=offs_n < num_tokens, other=-1)
    column = label - start
    here = (label >= 0) & (column >= 0) & (column < num_valid)
    # A label's n-th occurrence increments above[n - 1]. Integer atomics commute, so the result is deterministic.
    before = tl.where(here, tl.atomic_add(count_ptr + column, 1, mask=here), 0)
    tl.atomic_add(above_ptr, tl.sum((here & (before == 0)).to(tl.int32), 0))
    tl.atomic_add(above_ptr + before, 1, mask=before > 0)


@kernel("count_ptr", "ids_ptr", "words_ptr", "zeros_ptr")
def _most_labelled_kernel(
    count_ptr,  # in: [V + N] int32, as ``_count_labels_kernel`` leaves it; the last N descend
    ids_ptr,  # out: [F] int64
    words_ptr,  # out: [W] int32
    zeros_ptr,  # out: [V] int32
    num_tokens,
    num_valid,
    size,
    num_words,
    num_steps,
    BLOCK_V: tl.constexpr,
):
    # Find ``least`` by bisection: all columns with more labels are chosen, and the first ``num_equal`` that have that many.
    above_ptr = count_ptr + num_valid
    least = tl.zeros((), tl.int32)
    last = least + num_tokens
    for _ in range(0, num_steps):
        middle = (least + last) // 2
        too_many = tl.load(above_ptr + middle, mask=least < last, other=0) > size
        least = tl.where(too_many, middle + 1, least)
        last = tl.where(too_many, last, middle)
    num_equal = size - tl.load(above_ptr + least)

    # Count the chosen columns before this program's own.
    more = tl.zeros((BLOCK_V,), tl.int32)
    equal = tl.zeros((BLOCK_V,), tl.int32)
    for first in range(0, tl.program_id(0) * BLOCK_V, BLOCK_V):
        offs_v = first + tl.arange(0, BLOCK_V)
        count = tl.load(count_ptr + offs_v, mask=offs_v < num_valid, other=-1)
        more += (count > least).to(tl.int32)
        equal += (count == least).to(tl.int32)
    equal_before = tl.sum(equal, 0)
    position = tl.sum(more, 0) + tl.minimum(equal_before, num_equal)

    offs_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    tl.store(zeros_ptr + offs_v, tl.zeros_like(offs_v), mask=offs_v < num_valid)
    count = tl.load(count_ptr + offs_v, mask=offs_v < num_valid, other=-1)
    equal = (count == least).to(tl.int32)
    chosen = (count > least) | ((equal > 0) & (equal_before + tl.cumsum(equal, 0) <= num_equal))
    position += tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(ids_ptr + position, offs_v.to(tl.int64), mask=chosen)
    bits = tl.where(chosen, 1 << (offs_v % 32), 0)
    words = tl.sum(tl.reshape(bits, (BLOCK_V // 32, 32)), 1).to(tl.int32)
    offs_w = tl.program_id(0) * (BLOCK_V // 32) + tl.arange(0, BLOCK_V // 32)
    tl.store(words_ptr + offs_w, words, mask=offs_w < num_words)


class Bound(NamedTuple):
    """What ``bound_of_shard`` returns, fp32.

    Attributes:
        shard_3N: The shard's part of the bound: a maximum, a sum of exp relative to it, and zeros.
        bound_N: Their log-sum-exp, the bound if this shard is the whole vocabulary.
        frequent_2N: Maximum of the frequent columns, and sum of their exp times the softcap's slope.
    """

    shard_3N: torch.Tensor
    bound_N: torch.Tensor
    frequent_2N: torch.Tensor


def bound_of_shard(
    x: Operands, ids_F: torch.Tensor, frequent_W: torch.Tensor, order: list[torch.Tensor], tile: Tile, buffer_RD: torch.Tensor,
    stats_KN: torch.Tensor,
) -> Bound:
    """Compute the shard's part of the bound, and write the labels' logits to the row TARGET of stats_KN.

    Args:
        ids_F, frequent_W: The frequent columns, as ``most_labelled`` writes them.
        tile: Tile of the log-sum-exp. No tile has both frequent and sampled columns.
        buffer_RD: Buffer for the hidden states of a group of tokens.
        stats_KN: out.
    """
    (num_tokens, hidden_size), num_frequent = x.hidden.shape, ids_F.shape[0]
    num_outside = x.num_valid - num_frequent
    size = bound_columns(num_outside, 32 if interpreted() else 256)
    num_columns = num_frequent + size
    sampled_S = torch.empty(size, dtype=torch.int32, device=x.weight.device)
    few_CD = torch.empty(num_columns, hidden_size, dtype=x.weight.dtype, device=x.weight.device)
    _gather_few_kernel[(cdiv(num_columns, 16), cdiv(hidden_size, 256))](
        ids_F, x.weight,
        sampled_S, few_CD,
        num_frequent, size, num_outside, hidden_size, num_frequent.bit_length(),
        BLOCK_C=16, BLOCK_D=256,
    )
    frequent_parts = cdiv(num_frequent, tile.cols)
    num_parts = frequent_parts + cdiv(size, tile.cols)
    shapes = (3, num_parts, num_tokens), (3, num_tokens), (num_tokens,), (2, num_tokens)
    sums_3PN, *outputs = [torch.empty(shape, dtype=torch.float32, device=x.hidden.device) for shape in shapes]
    bound = Bound(*outputs)
    for group in token_groups(order, buffer_RD.shape[0]):
        rows = gathered_with_targets(x, group, buffer_RD, stats_KN, 2)
        num_rows, tma = rows.index.shape[0], has_tma(rows.hidden, few_CD)
        _column_sums_kernel[(cdiv(num_rows, tile.rows) * num_parts,)](
            # in
            operand(rows.hidden, tile.rows, tile.inner, tma), operand(few_CD, tile.cols, tile.inner, tma), x.head,
            sampled_S, x.ids, rows.index, rows.num_labelled,
            # out
            sums_3PN,
            # sizes
            num_rows, hidden_size, num_columns, num_frequent, x.start, num_parts, num_tokens,
            # tiles
            TILE=tile, TMA=tma, PRECISION=precision(few_CD.dtype), num_warps=tile.warps, num_stages=tile.stages,
        )
    # ERRORS standard errors of a mean of ``size`` out of ``num_outside`` columns, in standard deviations.
    left_out = 1.0 - size / num_outside if num_outside else 0.0
    error = ERRORS * (left_out / max(1, size - 1)) ** 0.5
    _bound_of_shard_kernel[(cdiv(num_tokens, 128),)](
        stats_KN, sums_3PN, x.ids, frequent_W,
        bound,
        num_tokens, x.start, x.num_valid, frequent_parts, num_parts, max(1, size), num_outside, error,
        BLOCK_N=128,
    )
    return bound


@kernel("weight_ptr", "sampled_ptr", "rows_ptr", "hidden_size")
def _gather_few_kernel(
    frequent_ptr,  # in: [F] int64, ascending
    weight_ptr,  # in: [V, D]
    sampled_ptr,  # out: [S] int32, ascending: the sampled columns
    rows_ptr,  # out: [F + S, D]: the rows of the frequent columns, then of the sampled ones
    num_frequent,
    size,
    num_outside,
    hidden_size,
    num_steps,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    offs_s = offs_c - num_frequent
    in_c = offs_s < size
    # A run's column is chosen by Knuth's multiplicative hash of the run's number, so it is the same in every step.
    runs = tl.maximum(size, 1)
    first = (offs_s.to(tl.int64) * num_outside // runs).to(tl.int32)
    length = ((offs_s + 1).to(tl.int64) * num_outside // runs).to(tl.int32) - first
    hashed = (offs_s.to(tl.uint32) * 2654435761) >> 16
    rank = first + (hashed.to(tl.int64) * length >> 16).to(tl.int32)
    column = rank + num_before(frequent_ptr, num_frequent, num_steps, rank, True)
    is_frequent = offs_s < 0
    column = tl.where(is_frequent, tl.load(frequent_ptr + offs_c, mask=is_frequent, other=0).to(tl.int32), column)

    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = in_c[:, None] & (offs_d < hidden_size)[None, :]
    row = tl.load(weight_ptr + column.to(tl.int64)[:, None] * hidden_size + offs_d[None, :], mask=mask, other=0)
    tl.store(rows_ptr + offs_c.to(tl.int64)[:, None] * hidden_size + offs_d[None, :], row, mask=mask)
    if tl.program_id(1) == 0:
        tl.store(sampled_ptr + offs_s, column, mask=in_c & (offs_s >= 0))


@kernel("hidden", "few", "hidden_size")
def _column_sums_kernel(
    hidden,  # in: [R, D] descriptor or pointer
    few,  # in: [F + S, D] descriptor or pointer
    head,  # in: Head
    sampled_ptr,  # in: [S] int32
    labels_ptr,  # in: [N] int64
    index_ptr,  # in: [R] int32
    num_labelled_ptr,  # in: [1] int32
    sums_ptr,  # out: [3, P, N] fp32: of each tile of columns the maximum, the sum of exp relative to it, and a third sum
    num_rows,
    hidden_size,
    num_columns,
    num_frequent,
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
    sampled_part = part - tl.cdiv(num_frequent, BLOCK_V)
    is_sampled = sampled_part >= 0
    col = tl.where(is_sampled, num_frequent + sampled_part * BLOCK_V, part * BLOCK_V)
    acc = tile_of_products(hidden, few, row, col, num_rows, num_columns, hidden_size, TILE, TMA, PRECISION)
    offs_n = row + tl.arange(0, BLOCK_N)
    live = offs_n < num_labelled
    offs_c = col + tl.arange(0, BLOCK_V)
    in_c = offs_c < tl.where(is_sampled, num_columns, num_frequent)
    factors = token_factors(head, offs_n, live)
    z = logits_of(acc, offs_c, in_c, head, factors, True)
    token = tl.load(index_ptr + offs_n, mask=live, other=0).to(tl.int64)
    label = (tl.load(labels_ptr + token, mask=live, other=-1) - start).to(tl.int32)
    column = tl.load(sampled_ptr + offs_c - num_frequent, mask=tl.where(is_sampled, in_c, False), other=0x7FFFFFFF)
    maximum = tl.max(z, 1)
    base = tl.where(maximum > float("-inf"), maximum, 0.0)
    # The label is left out of the sample: its exponential is added separately.
    e = tl.where(column[None, :] == label[:, None], 0.0, tl.exp(z - base[:, None]))
    # The third sum is of squared exp for sampled columns, and of exp times the softcap's slope for frequent ones.
    third = e * tl.where(is_sampled, e, 1.0)
    if head.softcap is not None:
        third = tl.where(is_sampled, third, sloped(e, z, head, factors[1][:, None]))
    plane = num_parts.to(tl.int64) * num_tokens
    where = sums_ptr + part.to(tl.int64) * num_tokens + token
    tl.store(where, maximum, mask=live)
    tl.store(where + plane, tl.sum(e, 1), mask=live)
    tl.store(where + 2 * plane, tl.sum(third, 1), mask=live)


@kernel()
def _bound_of_shard_kernel(
    stats_ptr,  # in: [K, N] fp32; TARGET is read
    sums_ptr,  # in: [3, P, N] fp32
    labels_ptr,  # in: [N] int64
    words_ptr,  # in: [W] int32
    bound,  # out: Bound
    num_tokens,
    start,
    num_valid,
    frequent_parts,
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
    live = label >= 0  # tokens without a label have no sums
    label -= start
    here = live & (label >= 0) & (label < num_valid)
    word = tl.load(words_ptr + label // 32, mask=here, other=-1)
    is_infrequent = ((word >> (label % 32).to(tl.int32)) & 1) == 0
    target = tl.load(stats_ptr + 2 * stride + offs_n, mask=here, other=0)
    target = tl.where(here & is_infrequent, target, float("-inf"))
    sums_ptr += offs_n
    frequent_max, frequent_sum, sloped_sum, _ = _merged(sums_ptr, live, stride, 0, frequent_parts, num_parts)
    reference, total, _, squares = _merged(sums_ptr, live, stride, frequent_parts, num_parts, num_parts)
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
    maximum = tl.where(live, maximum, 0.0)
    sum_exp = tl.where(live, sum_exp, 1.0)
    tl.store(bound.shard_3N + offs_n, maximum, mask=in_n)
    tl.store(bound.shard_3N + stride + offs_n, sum_exp, mask=in_n)
    tl.store(bound.shard_3N + 2 * stride + offs_n, tl.zeros((BLOCK_N,), tl.float32), mask=in_n)
    tl.store(bound.bound_N + offs_n, maximum + tl.log(sum_exp), mask=in_n)
    tl.store(bound.frequent_2N + offs_n, tl.where(live, frequent_max, 0.0), mask=in_n)
    tl.store(bound.frequent_2N + stride + offs_n, tl.where(live, sloped_sum, 1.0), mask=in_n)


@triton.jit
def _merged(sums_ptr, live, stride, first, stop, num_parts):
    """Merge some parts. Return the maximum, the sum of exp, and the third sum of frequent and of sampled columns."""
    plane = num_parts * stride
    maximum = tl.full(live.shape, float("-inf"), tl.float32)
    for part in range(first, stop):
        maximum = tl.maximum(maximum, tl.load(sums_ptr + part * stride, mask=live, other=0))
    base = tl.where(maximum > float("-inf"), maximum, 0.0)
    total = tl.zeros(live.shape, tl.float32)
    third = tl.zeros(live.shape, tl.float32)
    squares = tl.zeros(live.shape, tl.float32)
    for part in range(first, stop):
        where = sums_ptr + part * stride
        factor = tl.exp(tl.load(where, mask=live, other=0) - base)
        part_third = tl.load(where + 2 * plane, mask=live, other=0) * factor
        total += tl.load(where + plane, mask=live, other=0) * factor
        third += part_third
        squares += part_third * factor
    return maximum, total, third, squares
