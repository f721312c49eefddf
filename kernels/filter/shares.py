"""Each column's share of the softmax mass that a filter drops, from a sample of the tokens.

    sum over sampled tokens i of p_ij slope_ij / m_i   where z_ij < threshold_i, j not frequent and not the label

Tokens differ more in how much mass they drop, m_i, than in which columns they drop. So a few hundred tokens are enough to
estimate the shares, while each token's own mass (``lists.py``) is exact. The sample is systematic, with probability
proportional to size (Madow, 1949): lay the tokens end to end, each |P_i| m_i long, and pick at equal distances. So the sums
are unbiased estimates of the sums over all tokens.

The sample's mean hidden state differs from the mean of all tokens by a vector d. Moving a hidden state by -d multiplies its
probabilities by exp(-column . d), up to a constant, so the shares are multiplied by this factor, too. The mean of all tokens is
a row of the sample's matrix, so ``column . d`` comes from products that are there already. ``REWEIGHTING`` shrinks the
exponent, because kept elements cut off its upper end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from cce_dist.kernels import Operands
from cce_dist.kernels.blocks import has_tma, kernel, operand, store_tile, tile_of_products
from cce_dist.kernels.filter.lists import Decisions
from cce_dist.kernels.head import logits_of, sloped, token_factors
from cce_dist.kernels.tiles import Tile, cdiv, precision, sample_tile
from cce_dist.kernels.tokens import weighted_sums

REWEIGHTING = 0.7  # the error in the mean of d_hidden falls to a third to two thirds
UNIT = tl.constexpr(2.0**32)  # integers of a whole: sums of integers have the same bits in any order
FARTHEST = tl.constexpr(20.0)  # nats: a log reweighting that is larger, or not finite, is not applied


@triton.jit
def sum_of_parts(partial_ptr, num_parts, stride, offs_d, in_d, BLOCK_P: tl.constexpr):
    """Add up partial sums, a row of [D] fp32 each ``stride`` numbers."""
    total = tl.zeros((BLOCK_P, offs_d.shape[0]), tl.float32)
    for first in range(0, num_parts, BLOCK_P):
        offs_p = first + tl.arange(0, BLOCK_P)
        where = partial_ptr + offs_p[:, None] * stride + offs_d[None, :]
        total += tl.load(where, mask=(offs_p < num_parts)[:, None] & in_d[None, :], other=0)
    return tl.sum(total, 0)


@triton.jit
def in_units(numbers, total):
    """Return numbers of a total as integers, UNIT of which are the total. Integers stay as they are."""
    if numbers.dtype != tl.int64:
        numbers = (tl.abs(numbers) / total * UNIT).to(tl.int64)
    return numbers


@triton.jit
def place(numbers_ptr, count, total, wanted, BLOCK: tl.constexpr):
    """Return the first index at which the running sum of ``in_units`` exceeds ``wanted``, and the sum before this index."""
    index = tl.zeros((), tl.int32)
    before = tl.zeros((), tl.int64)
    end = tl.zeros((), tl.int64)
    for first in range(0, count, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        part = in_units(tl.load(numbers_ptr + offs, mask=offs < count, other=0), total)
        sums = end + tl.cumsum(part, 0)
        passed = (sums <= wanted) & (offs < count)
        index += tl.sum(passed.to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(passed, sums, 0), 0))
        end += tl.sum(part, 0)
    return tl.minimum(index, count - 1), before


class Sample(NamedTuple):
    """The sampled tokens: S rows, of which the last is the mean of all tokens, unless all tokens are taken.

    Attributes:
        token_S: int32: the tokens.
        numbers_3S: [3, S] fp32: 1 / r (``sampling.py``), 0 for unused elements; the reference of exponentials
            ``exp(z - reference)``, which sum to 1 over tokens and dropped columns; the threshold below which logits are
            dropped, -inf for unused elements.
        label_S: int64: the labels of the tokens.
        size: [2] int32: number of sampled tokens, 0 if nothing is dropped; later tokens are unused. The second number is 0 and
            counts the programs of ``sampling.factors_of`` that are done.
        rows_SD: Hidden states of the tokens, then the mean hidden state.
        means_2D: [2, D] fp32: the sum of all hidden states by r; their mean by |r|.
        mass_2: [2] fp32: the sum of |r| over all tokens; the share of the softmax that they drop, on average.
    """

    token_S: torch.Tensor
    numbers_3S: torch.Tensor
    label_S: torch.Tensor
    size: torch.Tensor
    rows_SD: torch.Tensor
    means_2D: torch.Tensor
    mass_2: torch.Tensor


def sample_tokens(x: Operands, how: Decisions, most: int) -> Sample:
    """Sample ``most`` - 1 tokens, or take all if there are not more. ``most`` is a power of 2."""
    (num_tokens, hidden_size), device = x.hidden.shape, x.hidden.device
    partial_P2D = weighted_sums(how.dropped_N, x.hidden, absolute=True)
    sample = Sample(
        torch.empty(most, dtype=torch.int32, device=device),
        torch.empty(3, most, dtype=torch.float32, device=device),
        torch.empty(most, dtype=torch.int64, device=device),
        torch.empty(2, dtype=torch.int32, device=device),
        torch.empty(most, hidden_size, dtype=x.hidden.dtype, device=device),
        torch.empty(2, hidden_size, dtype=torch.float32, device=device),
        torch.empty(2, dtype=torch.float32, device=device),
    )
    _sample_tokens_kernel[(most + cdiv(hidden_size, 128),)](
        x.hidden, how, x.ids, partial_P2D,
        sample,
        num_tokens, partial_P2D.shape[0], hidden_size, abs(x.head.multiplier),
        TAKE_ALL=num_tokens < most, SAMPLE=most, BLOCK=4096, BLOCK_D=128, num_warps=8,
    )
    return sample


@kernel("hidden_ptr", "partial_ptr", "hidden_size")
def _sample_tokens_kernel(
    hidden_ptr,  # in: [N, D]
    how,  # in: Decisions
    labels_ptr,  # in: [N] int64
    partial_ptr,  # in: [P, 2, D] fp32: partial sums of hidden states by r and |r|
    sample,  # out: Sample
    num_tokens,
    num_parts,
    hidden_size,
    scale_size,  # absolute value of the logit scale
    TAKE_ALL: tl.constexpr,
    SAMPLE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # Every program adds up what all tokens drop. The first ones sample and copy a token each, the others average BLOCK_D
    # elements of the hidden states.
    row = tl.program_id(0)
    dropped = tl.zeros((BLOCK,), tl.float32)
    whole = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, num_tokens, BLOCK):
        offs_n = first + tl.arange(0, BLOCK)
        part = tl.abs(tl.load(how.dropped_N + offs_n, mask=offs_n < num_tokens, other=0))
        dropped += part
        whole += tl.abs(tl.load(how.coef_4N + offs_n, mask=part > 0, other=0))
    total = tl.sum(dropped, 0)
    num_sampled = tl.where(total > 0, num_tokens if TAKE_ALL else SAMPLE - 1, 0)
    if row >= SAMPLE:
        offs_d = (row - SAMPLE) * BLOCK_D + tl.arange(0, BLOCK_D)
        in_d = offs_d < hidden_size
        total_row = sum_of_parts(partial_ptr, num_parts, 2 * hidden_size, offs_d, in_d, 32)
        tl.store(sample.means_2D + offs_d, total_row, mask=in_d)
        mean = sum_of_parts(partial_ptr + hidden_size, num_parts, 2 * hidden_size, offs_d, in_d, 32)
        mean = tl.where(total > 0, mean / total, 0.0)
        tl.store(sample.means_2D + hidden_size + offs_d, mean, mask=in_d)
        if not TAKE_ALL:
            last_ptr = sample.rows_SD + (SAMPLE - 1) * hidden_size + offs_d
            tl.store(last_ptr, mean.to(hidden_ptr.dtype.element_ty), mask=in_d)
        if row == SAMPLE:
            tl.store(sample.size, num_sampled)
            tl.store(sample.size + 1, 0)
            tl.store(sample.mass_2, total)
            tl.store(sample.mass_2 + 1, tl.where(total > 0, total / (tl.sum(whole, 0) * scale_size), 0.0))
        return
    live = row < num_sampled
    token = tl.minimum(row, num_tokens - 1)
    weight = total
    if not TAKE_ALL:
        wanted = ((row + 0.5) / (SAMPLE - 1) * UNIT).to(tl.int64)
        token, _ = place(how.dropped_N, num_tokens, tl.where(total > 0, total, 1.0), wanted, BLOCK)
        weight = tl.abs(tl.load(how.dropped_N + token)) * (SAMPLE - 1)
    own = tl.load(how.dropped_N + token)
    live = live & (own != 0)
    reference = tl.load(how.numbers_3N + 2 * num_tokens.to(tl.int64) + token) + tl.log(weight / scale_size)
    tl.store(sample.token_S + row, token)
    tl.store(sample.numbers_3S + row, tl.where(live, 1 / own, 0.0))
    tl.store(sample.numbers_3S + SAMPLE + row, tl.where(live, reference, float("inf")))
    tl.store(sample.numbers_3S + 2 * SAMPLE + row, tl.where(live, tl.load(how.numbers_3N + token), float("-inf")))
    tl.store(sample.label_S + row, tl.load(labels_ptr + token))
    for first in range(0, tl.where(row < num_sampled, hidden_size, 0), 1024):
        offs_d = first + tl.arange(0, 1024)
        in_d = offs_d < hidden_size
        h = tl.load(hidden_ptr + token.to(tl.int64) * hidden_size + offs_d, mask=in_d, other=0)
        tl.store(sample.rows_SD + row * hidden_size + offs_d, h, mask=in_d)


class Dropped(NamedTuple):
    """What the sample drops in each column.

    Attributes:
        sums_V: fp32: reweighted sums, of which shares are the parts; 0 if nothing is dropped.
        count_T: [T] int64: the sums ``in_units``, added up over each run of ``run`` columns.
        run: Columns of a run.
    """

    sums_V: torch.Tensor
    count_T: torch.Tensor
    run: int


def dropped_columns(
    sample: Sample, x: Operands, slot_V: torch.Tensor, tile: Tile, parts_SV: torch.Tensor | None = None
) -> Dropped:
    """Sum what the sample drops in each column.

    Logits below the threshold are dropped, except at labels and frequent columns. A dropped logit counts exp(z - reference)
    times the softcap's slope. A column's sum is multiplied by exp(-REWEIGHTING * scale * (column . shift)); the shift is the
    mean hidden state of the sample less the mean of all tokens.

    ``parts_SV``: out, [S, V or more] in the weight's dtype, or None: each token's part in each column, centered over tokens,
    multiplied by the sign of r, centered again, then reweighted.
    """
    rows_SD, num_valid = sample.rows_SD, x.num_valid
    num_rows, hidden_size = rows_SD.shape
    tile = sample_tile(tile, num_rows, rows_SD.itemsize, rows_SD.device)
    if x.head.softcap is not None:
        tile = tile._replace(cols=max(16, tile.cols // 2))  # the epilogue over a whole tile spills registers
    num_tiles = cdiv(num_valid, tile.cols)
    dropped = Dropped(
        torch.empty(num_valid, dtype=torch.float32, device=rows_SD.device),
        torch.empty(num_tiles, dtype=torch.int64, device=rows_SD.device),
        tile.cols,
    )
    tma = has_tma(rows_SD, x.weight)
    _dropped_columns_kernel[(num_tiles,)](
        # in
        operand(rows_SD, tile.rows, tile.inner, tma), operand(x.weight, tile.cols, tile.inner, tma), x.head,
        sample, slot_V,
        # out
        dropped.sums_V, dropped.count_T, None if parts_SV is None else operand(parts_SV, tile.rows, tile.cols // 2, tma),
        # sizes
        hidden_size, num_valid, x.start, 0 if parts_SV is None else parts_SV.shape[1], REWEIGHTING * x.head.multiplier,
        # options
        HAS_MEAN=x.num_tokens >= num_rows, MASK_V=num_valid % tile.cols != 0,
        # tiles
        TILE=tile, TMA=tma, PRECISION=precision(rows_SD.dtype), num_warps=tile.warps, num_stages=tile.stages,
    )
    return dropped


@kernel("rows", "weight", "slot_ptr", "sums_ptr", "count_ptr", "parts", "hidden_size")
def _dropped_columns_kernel(
    rows,  # in: [S, D] descriptor or pointer; with HAS_MEAN the last row is the mean of all tokens
    weight,  # in: [V, D] descriptor or pointer
    head,  # in: Head
    sample,  # in: Sample
    slot_ptr,  # in: [V] int32
    sums_ptr,  # out: [V] fp32
    count_ptr,  # out: [tiles] int64
    parts,  # out: [S, columns] descriptor or pointer, or None
    hidden_size,
    num_valid,
    start,
    parts_cols,
    strength,
    HAS_MEAN: tl.constexpr,
    MASK_V: tl.constexpr,
    TILE: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # A tile [SAMPLE, BLOCK_V] has the whole sample, so sums over tokens are at hand.
    SAMPLE: tl.constexpr = TILE.rows
    BLOCK_V: tl.constexpr = TILE.cols
    num_sampled = tl.load(sample.size)
    col = tl.program_id(0) * BLOCK_V
    offs_v = col + tl.arange(0, BLOCK_V)
    in_v = offs_v < num_valid
    sums = tl.zeros((BLOCK_V,), tl.float32)
    if num_sampled > 0:
        acc = tile_of_products(rows, weight, 0, col, SAMPLE, num_valid, hidden_size, TILE, TMA, PRECISION)
        offs_s = tl.arange(0, SAMPLE)
        live = offs_s < num_sampled
        each = tl.where(live, 1.0 / num_sampled.to(tl.float32), 0.0)
        reweighting = tl.full((BLOCK_V,), 1.0, tl.float32)
        if HAS_MEAN:
            minus_mean = tl.where(offs_s == SAMPLE - 1, -1.0, each)
            along = tl.sum(acc * minus_mean[:, None], 0) * strength
            reweighting = tl.exp(-tl.where(tl.abs(along) < FARTHEST, along, 0.0))
        factors = token_factors(head, offs_s, live)
        z = logits_of(acc, offs_v, in_v, head, factors, MASK_V)
        inverse = tl.load(sample.numbers_3S + offs_s)
        reference = tl.load(sample.numbers_3S + SAMPLE + offs_s)
        threshold = tl.load(sample.numbers_3S + 2 * SAMPLE + offs_s)
        label = (tl.load(sample.label_S + offs_s, mask=live, other=-1) - start).to(tl.int32)
        infrequent = tl.load(slot_ptr + offs_v, mask=in_v, other=1) == 0
        dropped = (z < threshold[:, None]) & (offs_v[None, :] != label[:, None]) & infrequent[None, :]
        e = tl.where(dropped, tl.exp(z - reference[:, None]), 0.0)
        if head.softcap is not None:
            e = sloped(e, z, head, factors[1][:, None])
        sums = tl.sum(e, 0)
        if parts is not None:
            sign = tl.where(inverse > 0, 1.0, 0.0) - tl.where(inverse < 0, 1.0, 0.0)
            e = (e - each[:, None] * sums[None, :]) * sign[:, None]
            e = (e - each[:, None] * tl.sum(e, 0)[None, :]) * reweighting[None, :]
            store_tile(parts, 0, col, e, SAMPLE, parts_cols, parts_cols, SAMPLE, BLOCK_V, TMA)
        sums *= reweighting
    tl.store(sums_ptr + offs_v, sums, mask=in_v)
    tl.store(count_ptr + tl.program_id(0), tl.sum(in_units(sums, 1.0), 0))
