"""Each column's share of the softmax mass that a filter drops, from a sample of the tokens.

    sum over sampled tokens i of p_ij slope_ij / m_i   where z_ij < threshold_i, j not frequent and not the label

Tokens differ more in how much mass they drop, m_i, than in which columns they drop. So a few hundred tokens are enough to
estimate the shares, while each token's own mass (``d_rows.py``) is exact. The sample is systematic, with probability
proportional to size (Madow, 1949): lay the tokens end to end, each |P_i| m_i long, and pick at equal distances.

The sample's mean hidden state differs from the mean of all tokens by a vector d. Moving a hidden state by -d multiplies its
probabilities by exp(-column . d), up to a constant, so the shares are multiplied by this factor, too. ``REWEIGHTING`` shrinks
its exponent, because kept elements cut off its upper end. With 0.7 the error in the mean of d_hidden falls from 0.022, 0.014,
0.010 and 0.011 to 0.007, 0.005, 0.005 and 0.007 on four rungs of the bench's ladder (V 16,384, D 512, N 4,096, 512 sampled,
fp32; 2026-11). With 256 tokens it is 0.020, 0.008, 0.006 and 0.005.

Four other estimates of the shares were tried and left out:

* Column sums in forward, with tokens weighted by their bounds. On ``spread`` (D 2,304) the error is 0.025, with the sample
  0.022: the bound's error varies by 0.4 nats over tokens.
* Shares shrunk towards a regression on mean logit and row length (Fay and Herriot, 1979). Frequent columns have the largest
  weights and the worst fit: rows that are no label are off by 0.109 instead of 0.078 (``early``, V 32,768, D 2,304, N 4,096).
* The second moment of the hidden states in addition to their mean. Errors change by a tenth, up and down, for a D x D product.
* A factor fitted to the sampled columns in place of ``REWEIGHTING``. It is 0.73 to 0.96, with the errors of 0.7. The best
  factor has them, too: what is left differs from column to column, and no common factor removes it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from cce_dist.kernels import Operands
from cce_dist.kernels.blocks import has_tma, kernel, operand, store_tile, tile_of_products
from cce_dist.kernels.filter import compensation
from cce_dist.kernels.head import logits_of, sloped, token_factors
from cce_dist.kernels.tiles import Tile, num_programs, precision, sample_tile, stages_of_rows
from cce_dist.kernels.tokens import gathered, sums_of_rows
from cce_dist.kernels.waves import cdiv

REWEIGHTING = 0.7
RUN = 1024  # columns in a run: their shares are summed as integers
PART = tl.constexpr(4096.0)  # scale of ``Dropped.parts_SV``, so that fp16 can hold the numbers
FARTHEST = tl.constexpr(20.0)  # nats: a log reweighting that is larger, or not finite, is not applied
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


class Sample(NamedTuple):
    """The sampled tokens.

    Attributes:
        token_S: int32: the tokens.
        numbers_3S: [3, S] fp32: P times the mass that the token drops, 0 for unused elements; the reference of exponentials
            ``exp(z - reference)``; the threshold below which logits are dropped, -inf for unused elements.
        label_S: int64: the labels of the tokens.
        size: [1] int32: number of sampled tokens; later elements are unused.
        centered: Centered hidden states for d_weight's correction; None if the sample is all tokens.
        means_2D: [2, D] fp32: the mean hidden state of all tokens, weighted by the mass they drop; the sample's mean minus
            this mean, rounded to the hidden states' dtype. None if the sample is all tokens.
    """

    token_S: torch.Tensor
    numbers_3S: torch.Tensor
    label_S: torch.Tensor
    size: torch.Tensor
    centered: Centered | None = None
    means_2D: torch.Tensor | None = None


class Centered(NamedTuple):
    """Hidden states of the sampled tokens minus the mean hidden state of all tokens.

    Attributes:
        rows_SD: The differences in the hidden states' dtype, with the sign of the token's dropped mass times P.
        square_S: Squared norms of the rows of ``rows_SD``, fp32.
        mean_D: Mean of ``rows_SD``, fp32.
        mass: Sum over all tokens of the absolute values of P times dropped mass; a 0-d fp32 tensor.
    """

    rows_SD: torch.Tensor
    square_S: torch.Tensor
    mean_D: torch.Tensor
    mass: torch.Tensor


class Dropped(NamedTuple):
    """The columns' shares, and the dropped gradients of the sample.

    Attributes:
        share_V: Each column's share: they sum to 1, or are 0 if nothing is dropped.
        count_B: [B] int64: shares as integers, summed over each run of ``RUN`` columns; see ``compensation.sample``.
        total: Sum of the reweighted parts without the factor ``PART``, a 0-d fp32 tensor.
        shared_2D: [2, D] fp32: mean row of the weight by share, from which ``factors_of`` subtracts; the mean row again,
            unchanged. None without a sample.
        reweighting_2V: [2, V] fp32: the reweighting factor of each column; the reweighted sums. None without a sample.
        parts_SV: [S, V or more] in the weight's dtype: ``PART`` times the dropped mass of each token in each column, divided by
            the token's dropped mass, without reweighting; 0 at frequent columns. None if it was not requested.
    """

    share_V: torch.Tensor
    count_B: torch.Tensor
    total: torch.Tensor
    shared_2D: torch.Tensor | None = None
    reweighting_2V: torch.Tensor | None = None
    parts_SV: torch.Tensor | None = None


def sample_tokens(
    hidden_ND: torch.Tensor,
    numbers_3N: torch.Tensor,
    labels_N: torch.Tensor,
    most: int,
) -> tuple[Sample, torch.Tensor]:
    """Sample ``most`` tokens, or take all if there are not more. Return the sample and its hidden states [S, D].

    Args:
        hidden_ND: Hidden states.
        numbers_3N: As in ``lists.Tokens``.
        labels_N: Labels of the tokens.
        most: Number of tokens in the sample, a power of 2.
    """
    (num_tokens, hidden_size), dtype, device = hidden_ND.shape, hidden_ND.dtype, hidden_ND.device
    take_all = num_tokens <= most
    sample = Sample(
        torch.empty(most, dtype=torch.int32, device=device),
        torch.empty(3, most, dtype=torch.float32, device=device),
        torch.empty(most, dtype=torch.int64, device=device),
        torch.empty(1, dtype=torch.int32, device=device),
    )
    size_3N = torch.empty(3, num_tokens, dtype=torch.float32, device=device)
    mass = torch.empty((), dtype=torch.float32, device=device)
    _sample_tokens_kernel[(1,)](
        numbers_3N, labels_N,
        size_3N, sample.token_S, sample.numbers_3S, sample.label_S, sample.size, mass,
        num_tokens, (num_tokens - 1).bit_length(),
        TAKE_ALL=take_all, SAMPLE=most, BLOCK=4096, num_warps=16,
    )
    rows_SD = torch.empty(most, hidden_size, dtype=dtype, device=device)
    if take_all:
        return sample, gathered(hidden_ND, [sample.token_S, sample.size], rows_SD).hidden
    means_2D = sums_of_rows(size_3N, hidden_ND)
    centered = Centered(
        torch.empty(most, hidden_size, dtype=dtype, device=device),
        torch.empty(most, dtype=torch.float32, device=device),
        torch.empty(hidden_size, dtype=torch.float32, device=device),
        mass,
    )
    _center_rows_kernel[(most,)](
        hidden_ND, sample.token_S, sample.numbers_3S, means_2D, sample.size,
        rows_SD, centered.rows_SD, centered.square_S,
        hidden_size,
        BLOCK_D=1024,
    )
    _means_kernel[(cdiv(hidden_size, 32),)](
        rows_SD, centered.rows_SD, sample.size, means_2D, centered.mean_D,
        hidden_size,
        SAMPLE=most, BLOCK_S=min(most, 64), BLOCK_D=32,
    )
    return sample._replace(centered=centered, means_2D=means_2D), rows_SD


@kernel("size_ptr", "token_ptr", "number_ptr", "label_ptr", "num_sampled_ptr", "mass_ptr")
def _sample_tokens_kernel(
    of_token_ptr,  # in: [3, N] fp32, as in ``lists.Tokens``
    labels_ptr,  # in: [N] int64
    size_ptr,  # out: [3, N] fp32: each token's part of all dropped mass; 0; the cumulative sum
    token_ptr,  # out: [S] int32
    number_ptr,  # out: [3, S] fp32, as in ``Sample``
    label_ptr,  # out: [S] int64
    num_sampled_ptr,  # out: [1] int32
    mass_ptr,  # out: [] fp32: the dropped mass of all tokens, without TAKE_ALL
    num_tokens,
    num_steps,
    TAKE_ALL: tl.constexpr,
    SAMPLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program, because the sample needs a prefix sum over all tokens.
    dropped_ptr = of_token_ptr + 2 * num_tokens.to(tl.int64)
    offs_s = tl.arange(0, SAMPLE)
    if TAKE_ALL:
        token = offs_s
        tl.store(num_sampled_ptr, num_tokens)
    else:
        total = tl.zeros((), tl.float32)
        for first in range(0, num_tokens, BLOCK):
            offs_n = first + tl.arange(0, BLOCK)
            total += tl.sum(tl.abs(tl.load(dropped_ptr + offs_n, mask=offs_n < num_tokens, other=0)), 0)
        zero_ptr = size_ptr + num_tokens.to(tl.int64)
        sum_ptr = zero_ptr + num_tokens
        before = tl.zeros((), tl.float32)
        for first in range(0, num_tokens, BLOCK):
            offs_n = first + tl.arange(0, BLOCK)
            part = tl.abs(tl.load(dropped_ptr + offs_n, mask=offs_n < num_tokens, other=0))
            part = tl.where(total > 0, part / total, 0.0)
            tl.store(size_ptr + offs_n, part, mask=offs_n < num_tokens)
            tl.store(zero_ptr + offs_n, tl.zeros_like(part), mask=offs_n < num_tokens)
            tl.store(sum_ptr + offs_n, before + tl.cumsum(part, 0), mask=offs_n < num_tokens)
            before += tl.sum(part, 0)
        tl.debug_barrier()  # other threads read the sums than wrote them
        # Find by bisection the first token whose cumulative sum reaches (s + 0.5) / S.
        wanted = (offs_s + 0.5) / SAMPLE
        token = tl.zeros((SAMPLE,), tl.int32)
        last = token + num_tokens - 1
        for _ in range(0, num_steps):
            middle = (token + last) // 2
            later = tl.load(sum_ptr + middle) < wanted
            token = tl.where(later, tl.minimum(middle + 1, last), token)
            last = tl.where(later, last, middle)
        tl.store(num_sampled_ptr, tl.where(total > 0, SAMPLE, 0))
        tl.store(mass_ptr, total)
    in_n = token < num_tokens
    mass = tl.load(dropped_ptr + token, mask=in_n, other=0)
    dropped = tl.abs(mass)
    threshold = tl.load(of_token_ptr + token, mask=in_n, other=0)
    reference = tl.load(of_token_ptr + num_tokens.to(tl.int64) + token, mask=in_n, other=0)
    if not TAKE_ALL:
        reference += tl.log(dropped)
    tl.store(token_ptr + offs_s, tl.where(in_n, token, 0))
    tl.store(number_ptr + offs_s, tl.where(dropped > 0, mass, 0.0))
    tl.store(number_ptr + SAMPLE + offs_s, tl.where(dropped > 0, reference, float("inf")))
    tl.store(number_ptr + 2 * SAMPLE + offs_s, tl.where(dropped > 0, threshold, float("-inf")))
    tl.store(label_ptr + offs_s, tl.load(labels_ptr + token, mask=in_n, other=-1))


@kernel("hidden_ptr", "mean_ptr", "rows_ptr", "centered_ptr", "hidden_size")
def _center_rows_kernel(
    hidden_ptr,  # in: [N, D]
    token_ptr,  # in: [S] int32
    mass_ptr,  # in: [S] fp32
    mean_ptr,  # in: [D] fp32: mean hidden state of all tokens, weighted by dropped mass
    num_sampled_ptr,  # in: [1] int32
    rows_ptr,  # out: [S, D]: the sample's hidden states
    centered_ptr,  # out: [S, D]: ``Centered.rows_SD``
    square_ptr,  # out: [S] fp32: ``Centered.square_S``
    hidden_size,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0)
    token = tl.load(token_ptr + row).to(tl.int64)
    live = row < tl.load(num_sampled_ptr)
    mass = tl.load(mass_ptr + row)
    sign = tl.where(mass > 0, 1.0, 0.0) - tl.where(mass < 0, 1.0, 0.0)
    square = tl.zeros((BLOCK_D,), tl.float32)
    # Copy and center one hidden state [D], BLOCK_D elements at a time.
    for first in range(0, hidden_size, BLOCK_D):
        offs_d = first + tl.arange(0, BLOCK_D)
        in_d = offs_d < hidden_size
        h = tl.load(hidden_ptr + token * hidden_size + offs_d, mask=tl.where(live, in_d, False), other=0)
        mean = tl.load(mean_ptr + offs_d, mask=in_d, other=0)
        centered = ((h.to(tl.float32) - mean) * sign).to(centered_ptr.dtype.element_ty)
        tl.store(rows_ptr + row * hidden_size + offs_d, h, mask=in_d)
        tl.store(centered_ptr + row * hidden_size + offs_d, centered, mask=in_d)
        square += centered.to(tl.float32) * centered.to(tl.float32)
    tl.store(square_ptr + row, tl.sum(square, 0))


@kernel("rows_ptr", "centered_ptr", "mean_ptr", "centered_mean_ptr", "hidden_size")
def _means_kernel(
    rows_ptr,  # in: [S, D]
    centered_ptr,  # in: [S, D]
    num_sampled_ptr,  # in: [1] int32
    mean_ptr,  # in, out: [2, D] fp32, as in ``Sample``; the second row is written
    centered_mean_ptr,  # out: [D] fp32
    hidden_size,
    SAMPLE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    num_sampled = tl.load(num_sampled_ptr)
    offs_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_d = offs_d < hidden_size
    rows_sum = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
    centered_sum = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
    # Sum the sample's rows [S, BLOCK_D], BLOCK_S at a time.
    for first in range(0, SAMPLE, BLOCK_S):
        offs_s = first + tl.arange(0, BLOCK_S)
        where = offs_s[:, None] * hidden_size + offs_d[None, :]
        mask = (offs_s < num_sampled)[:, None] & in_d[None, :]
        rows_sum += tl.load(rows_ptr + where, mask=mask, other=0).to(tl.float32)
        centered_sum += tl.load(centered_ptr + where, mask=mask, other=0).to(tl.float32)
    mean_shift = tl.sum(rows_sum, 0) / SAMPLE - tl.load(mean_ptr + offs_d, mask=in_d, other=0)
    mean_shift = tl.where(num_sampled > 0, mean_shift, 0.0).to(rows_ptr.dtype.element_ty)
    tl.store(mean_ptr + hidden_size + offs_d, mean_shift.to(tl.float32), mask=in_d)
    tl.store(centered_mean_ptr + offs_d, tl.sum(centered_sum, 0) / SAMPLE, mask=in_d)


def dropped_shares(
    rows_SD: torch.Tensor, x: Operands, sample: Sample, slot_V: torch.Tensor, tile: Tile,
    parts_SV: torch.Tensor | None = None,
) -> Dropped:
    """Estimate the columns' shares of dropped mass from the sample.

    Logits below the threshold are dropped, except at labels and frequent columns. A dropped logit counts exp(z - reference)
    times the softcap's slope times exp(-REWEIGHTING * scale * (column . shift)); ``shift`` is the second row of
    ``Sample.means_2D``. ``rows_SD``: the sample's hidden states. ``parts_SV``: out, or None: ``Dropped.parts_SV``.
    """
    num_rows, hidden_size = rows_SD.shape
    tile = sample_tile(tile, num_rows, rows_SD.itemsize, rows_SD.device)
    if x.head.softcap is not None:
        tile = tile._replace(cols=max(16, tile.cols // 2))  # the epilogue over a whole tile spills registers
    num_blocks = cdiv(num_rows, tile.rows)
    sums_BV = torch.empty(num_blocks, x.num_valid, dtype=torch.float32, device=rows_SD.device)
    tma = has_tma(rows_SD, x.weight)
    _dropped_sums_kernel[(cdiv(x.num_valid, tile.cols) * num_blocks,)](
        # in
        operand(rows_SD, tile.rows, tile.inner, tma), operand(x.weight, tile.cols, tile.inner, tma), x.head,
        sample.size, sample.numbers_3S, sample.label_S, slot_V,
        # out
        sums_BV, None if parts_SV is None else operand(parts_SV, tile.rows, tile.cols // 2, tma),
        # sizes
        num_rows, hidden_size, x.num_valid, x.start, 0 if parts_SV is None else parts_SV.shape[1],
        # options
        MASK_V=x.num_valid % tile.cols != 0,
        # tiles
        TILE=tile, TMA=tma, PRECISION=precision(rows_SD.dtype), num_warps=tile.warps, num_stages=tile.stages,
    )
    return _reweighted(sums_BV, x, sample)._replace(parts_SV=parts_SV)


def _reweighted(sums_BV: torch.Tensor, x: Operands, sample: Sample) -> Dropped:
    """Reweight the columns' sums, and average the weight's rows with them. The weight is read once for both."""
    (num_blocks, num_valid), hidden_size, device = sums_BV.shape, x.weight.shape[1], sums_BV.device
    main_d = triton.next_power_of_2(hidden_size)
    block_v, rest_d = min(16, max(1, 4096 // main_d)), 0
    if block_v == 1 and main_d > hidden_size:
        main_d //= 2  # hold a long row as two blocks, not as one block that is half empty
        rest_d = triton.next_power_of_2(hidden_size - main_d)
    parts = min(cdiv(num_valid, block_v), (6 if num_valid >= 1 << 16 else 4) * num_programs(device))
    reweighting_2V = torch.empty(2, num_valid, dtype=torch.float32, device=device)
    total_P = torch.empty(parts, dtype=torch.float32, device=device)
    mean_PD = torch.empty(parts, hidden_size, dtype=torch.float32, device=device)
    _reweight_kernel[(parts,)](
        sums_BV, x.weight, sample.means_2D, sample.size,
        reweighting_2V, total_P, mean_PD,
        num_valid, hidden_size, REWEIGHTING * x.head.multiplier,
        HAS_SHIFT=sample.means_2D is not None, NUM_BLOCKS=num_blocks, BLOCK_V=block_v, MAIN_D=main_d, REST_D=rest_d,
        STAGES=stages_of_rows(block_v * (main_d + rest_d) * x.weight.itemsize), num_warps=4,
    )
    return shares_of((reweighting_2V, total_P, mean_PD), num_valid, device)


@kernel("sums_ptr", "weight_ptr", "of_all_ptr", "mean_ptr", "hidden_size")
def _reweight_kernel(
    sums_ptr,  # in: [B, V] fp32
    weight_ptr,  # in: [V, D]
    of_all_ptr,  # in: [2, D] fp32, with HAS_SHIFT: the second row is the shift
    num_sampled_ptr,  # in: [1] int32: 0 if nothing is dropped
    reweighting_ptr,  # out: [2, V] fp32: the factors, and the reweighted sums
    total_ptr,  # out: [P] fp32: totals of the reweighted sums
    mean_ptr,  # out: [P, D] fp32: the weight's rows times the reweighted sums
    num_valid,
    hidden_size,
    strength,
    HAS_SHIFT: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    MAIN_D: tl.constexpr,
    REST_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    reweighted_ptr = reweighting_ptr + num_valid
    mean_shift_ptr = of_all_ptr + hidden_size if HAS_SHIFT else of_all_ptr
    offs_d = tl.arange(0, MAIN_D)
    in_d = offs_d < hidden_size
    mean = tl.zeros((MAIN_D,), tl.float32)
    mean_shift = tl.load(mean_shift_ptr + offs_d, mask=in_d, other=0) if HAS_SHIFT else mean
    if REST_D > 0:
        rest_d = MAIN_D + tl.arange(0, REST_D)
        in_rest = rest_d < hidden_size
        rest_mean = tl.zeros((REST_D,), tl.float32)
        rest_shift = tl.load(mean_shift_ptr + rest_d, mask=in_rest, other=0) if HAS_SHIFT else rest_mean
    live = tl.load(num_sampled_ptr) > 0
    if not live:
        for first in range(tl.program_id(0) * MAIN_D, num_valid, tl.num_programs(0) * MAIN_D):
            tl.store(reweighted_ptr + first + offs_d, mean, mask=first + offs_d < num_valid)
            tl.store(reweighting_ptr + first + offs_d, mean + 1, mask=first + offs_d < num_valid)
    total = tl.zeros((BLOCK_V,), tl.float32)
    end = tl.where(live, num_valid, 0)
    # For BLOCK_V columns at a time: reweight their sums [BLOCK_V] by weight [BLOCK_V, D] @ shift [D], and add sums @ weight to
    # mean [D]. The loop is pipelined: the next rows are loaded meanwhile.
    for first in tl.range(tl.program_id(0) * BLOCK_V, end, tl.num_programs(0) * BLOCK_V, num_stages=STAGES):
        offs_v = first + tl.arange(0, BLOCK_V)
        in_v = offs_v < num_valid
        where = weight_ptr + offs_v.to(tl.int64)[:, None] * hidden_size
        w = tl.load(where + offs_d[None, :], mask=in_v[:, None] & in_d[None, :], other=0).to(tl.float32)
        if REST_D > 0:
            rest = tl.load(where + rest_d[None, :], mask=in_v[:, None] & in_rest[None, :], other=0).to(tl.float32)
        sums = tl.zeros((BLOCK_V,), tl.float32)
        for block in tl.static_range(NUM_BLOCKS):
            sums += tl.load(sums_ptr + block * num_valid.to(tl.int64) + offs_v, mask=in_v, other=0)
        reweighting = tl.full((BLOCK_V,), 1.0, tl.float32)
        if HAS_SHIFT:
            along = tl.sum(w * mean_shift[None, :], 1)
            if REST_D > 0:
                along += tl.sum(rest * rest_shift[None, :], 1)
            along *= strength
            reweighting = tl.exp(-tl.where(tl.abs(along) < FARTHEST, along, 0.0))
        sums *= reweighting
        tl.store(reweighted_ptr + offs_v, sums, mask=in_v)
        tl.store(reweighting_ptr + offs_v, reweighting, mask=in_v)
        total += sums
        # The row of a column that no token drops may hold NaN.
        mean += tl.sum(tl.where(sums[:, None] > 0, sums[:, None] * w, 0.0), 0)
        if REST_D > 0:
            rest_mean += tl.sum(tl.where(sums[:, None] > 0, sums[:, None] * rest, 0.0), 0)
    tl.store(total_ptr + tl.program_id(0), tl.sum(total, 0))
    mean_ptr += tl.program_id(0).to(tl.int64) * hidden_size
    tl.store(mean_ptr + offs_d, mean, mask=in_d)
    if REST_D > 0:
        tl.store(mean_ptr + rest_d, rest_mean, mask=in_rest)


@kernel("hidden", "weight", "slot_ptr", "sums_ptr", "parts", "hidden_size")
def _dropped_sums_kernel(
    hidden,  # in: [S, D] descriptor or pointer
    weight,  # in: [V, D] descriptor or pointer
    head,  # in: Head
    num_sampled_ptr,  # in: [1] int32
    number_ptr,  # in: [3, S] fp32, as in ``Sample``
    labels_ptr,  # in: [S] int64
    slot_ptr,  # in: [V] int32
    sums_ptr,  # out: [B, V] fp32, a row for each block of rows
    parts,  # out: [S, columns] descriptor or pointer, or None
    num_rows,
    hidden_size,
    num_valid,
    start,
    parts_cols,
    MASK_V: tl.constexpr,
    TILE: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    BLOCK_N: tl.constexpr = TILE.rows
    BLOCK_V: tl.constexpr = TILE.cols
    num_sampled = tl.load(num_sampled_ptr)
    # Sum the dropped exponentials of a tile [BLOCK_N, BLOCK_V] over its tokens. Neighbouring programs read the same columns.
    num_blocks = tl.cdiv(num_rows, BLOCK_N)
    row = tl.program_id(0) % num_blocks * BLOCK_N
    col = tl.program_id(0) // num_blocks * BLOCK_V
    offs_v = col + tl.arange(0, BLOCK_V)
    in_v = offs_v < num_valid
    sums = tl.zeros((BLOCK_V,), tl.float32)
    if row < num_sampled:
        acc = tile_of_products(hidden, weight, row, col, num_rows, num_valid, hidden_size, TILE, TMA, PRECISION)
        offs_n = row + tl.arange(0, BLOCK_N)
        live = offs_n < num_sampled
        factors = token_factors(head, offs_n, live)
        z = logits_of(acc, offs_v, in_v, head, factors, MASK_V)
        reference = tl.load(number_ptr + num_rows + offs_n, mask=live, other=0)
        threshold = tl.load(number_ptr + 2 * num_rows + offs_n, mask=live, other=float("-inf"))
        label = (tl.load(labels_ptr + offs_n, mask=live, other=-1) - start).to(tl.int32)
        dropped = (z < threshold[:, None]) & (offs_v[None, :] != label[:, None])
        e = tl.where(dropped, tl.exp(z - reference[:, None]), 0.0)
        if head.softcap is not None:
            e = sloped(e, z, head, factors[1][:, None])
        is_frequent = tl.load(slot_ptr + offs_v, mask=in_v, other=0) > 0
        sums = tl.where(is_frequent, 0.0, tl.sum(e, 0))
        factor = tl.where(is_frequent, 0.0, PART)
        if parts is not None:
            store_tile(
                parts, row, col, e * factor[None, :], num_rows, parts_cols, parts_cols, BLOCK_N, BLOCK_V, TMA
            )
    where = sums_ptr + (tl.program_id(0) % num_blocks).to(tl.int64) * num_valid + offs_v
    tl.store(where, sums, mask=in_v)


def shares_of(
    sums: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None, num_valid: int, device: torch.device
) -> Dropped:
    """Return the shares of columns, and the mean row of the weight by share. Without sums the shares are 0.

    Args:
        sums: The outputs of ``_reweight_kernel``: ``Dropped.reweighting_2V``, partial totals [P], partial sums of rows [P, D].
        num_valid: Number of columns.
        device: Where the shares are.
    """
    reweighting_2V, total_P, mean_PD = sums or (None, None, None)
    num_parts, hidden_size = (0, 0) if mean_PD is None else mean_PD.shape
    num_runs = cdiv(num_valid, RUN)
    share_V = torch.empty(num_valid, dtype=torch.float32, device=device)
    total = torch.empty((), dtype=torch.float32, device=device)
    count_B = torch.empty(num_runs, dtype=torch.int64, device=device)
    shared_2D = torch.empty(2, hidden_size, dtype=torch.float32, device=device) if sums else None
    _shares_kernel[(num_runs,)](
        reweighting_2V, total_P, mean_PD,
        share_V, count_B, total, shared_2D,
        num_parts, num_valid, hidden_size, compensation.PARTS,
        HAS_SUMS=sums is not None, BLOCK_V=RUN, BLOCK_P=32, BLOCK_D=64,
    )
    return Dropped(share_V, count_B, total, shared_2D, reweighting_2V)


@kernel("sums_ptr", "part_ptr", "mean_ptr", "share_ptr", "count_ptr", "total_ptr", "hidden_size")
def _shares_kernel(
    sums_ptr,  # in: [2, V] fp32; the second row, the sums, is read
    part_ptr,  # in: [P] fp32
    mean_ptr,  # in: [P, D] fp32
    share_ptr,  # out: [V] fp32
    count_ptr,  # out: [runs] int64
    total_ptr,  # out: [] fp32
    shared_ptr,  # out: [2, D] fp32, as in ``Dropped``
    num_parts,
    num_valid,
    hidden_size,
    whole,
    HAS_SUMS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    stride = num_valid.to(tl.int64)
    offs_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_v = offs_v < num_valid
    share = tl.zeros((BLOCK_V,), tl.float32)
    if HAS_SUMS:
        share += tl.load(sums_ptr + stride + offs_v, mask=in_v, other=0)
        parts = tl.zeros((BLOCK_V,), tl.float32)
        # Every program adds up the total of all columns.
        for first in range(0, num_parts, BLOCK_V):
            offs_p = first + tl.arange(0, BLOCK_V)
            parts += tl.load(part_ptr + offs_p, mask=offs_p < num_parts, other=0)
        total = tl.sum(parts, 0)
        divisor = tl.where(total < TINY, TINY, total)
        share *= 1 / divisor
        tl.store(count_ptr + tl.program_id(0), tl.sum((share * whole.to(tl.float32)).to(tl.int64), 0))
        if tl.program_id(0) == 0:
            tl.store(total_ptr, total)
        # Add up the mean row of the weight, [BLOCK_P, BLOCK_D] at a time; the programs share the blocks.
        for first_d in range(tl.program_id(0) * BLOCK_D, hidden_size, tl.num_programs(0) * BLOCK_D):
            offs_d = first_d + tl.arange(0, BLOCK_D)
            in_d = offs_d < hidden_size
            mean = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
            for first in range(0, num_parts, BLOCK_P):
                offs_p = first + tl.arange(0, BLOCK_P)
                where = mean_ptr + offs_p[:, None] * hidden_size + offs_d[None, :]
                mean += tl.load(where, mask=(offs_p < num_parts)[:, None] & in_d[None, :], other=0)
            center = tl.sum(mean, 0) / divisor
            tl.store(shared_ptr + offs_d, center, mask=in_d)
            tl.store(shared_ptr + hidden_size + offs_d, center, mask=in_d)
    tl.store(share_ptr + offs_v, share, mask=in_v)
