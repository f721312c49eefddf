"""Each column's share of the softmax mass that a filter drops, from a sample of the tokens.

    sum over sampled tokens i of weight_i p_ij slope_ij / m_i   where z_ij < threshold_i, j not frequent and not the label

Tokens differ in how much they drop, the m_i, more than in where, so the shares of a few hundred stand for those of all, while
each token's own mass (``d_rows.py``) is exact. Two ideas of survey sampling make the most of them:

* The sample is systematic, with probability proportional to size (Madow, 1949): tokens lie end to end, each |P_i| m_i long,
  and one is taken at equal steps.
* It is calibrated (Deville and Sarndal, 1992): its tokens are weighted so that their mean hidden state has the component along
  the mean of all that the mean of all has. That direction carries how frequent ids are. With 512 tokens it takes the error of
  the mean of dE from 0.006 to 0.0033 (gemma-2-2b's shape, 2026-11; bf16 alone moves it by 0.004 to 0.009).

In all other directions the sample's mean hidden state stays off by some d. A softmax whose hidden state is moved by -d has its
probabilities multiplied by exp(-column . d), up to a constant, so the shares are too. ``REWEIGHTING`` shrinks that, since what
is kept cuts the upper end of what would move. With 0.7 the error in the mean of dE falls from 0.022, 0.014, 0.010 and 0.011 to
0.007, 0.005, 0.005 and 0.007 on four rungs of the bench's ladder (V 16,384, D 512, N 4,096, 512 sampled, fp32; 2026-11); with
256 tokens it is 0.020, 0.008, 0.006 and 0.005.

Four other ways to the shares were tried likewise, and left out:

* Sums over the columns in forward, of tokens weighed by their bounds. On ``spread`` (D 2,304) they leave 0.025 and the sample
  0.022: the bound's error varies by 0.4 nats over tokens there.
* Shares sampled towards a fit of the mean logit and the row's length (Fay and Herriot, 1979). Frequent columns weigh most
  and fit worst: rows that are no label are off by 0.109 in place of 0.078 (``early``, V 32,768, D 2,304, N 4,096).
* The second moment of the hidden states beside their mean. Errors move by a tenth, up and down, for a product of D x D.
* A factor fitted to the sampled columns in place of ``REWEIGHTING``. It is 0.73 to 0.96, and leaves what 0.7 does. The best
  factor that there is does no better: what is left is each column's own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cce_dist.kernels import Operands, compensation
from cce_dist.kernels.blocks import has_tma, kernel, operand, sloped, store_tile, tile_of_logits
from cce_dist.kernels.budget import ROWS, cdiv
from cce_dist.kernels.tiles import Tile, num_programs, precision, sample_tile, stages_of_rows
from cce_dist.kernels.tokens import sums_of_rows

REWEIGHTING = 0.7
PART = tl.constexpr(4096.0)  # factor on what a token drops of a column, in units of its mass, where fp16 must hold it
FARTHEST = tl.constexpr(20.0)  # nats; a column that is moved farther is not finite, or nothing is known of it
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


class Sample(NamedTuple):
    """A sample of tokens, S of them."""

    token_S: Tensor  # int32
    reference_S: Tensor  # fp32: their exponentials are exp(z - reference)
    threshold_S: Tensor  # fp32: logits below it are dropped; -inf for a token that drops nothing
    label_S: Tensor  # int64
    size: Tensor  # [1] int32: S, or 0 where no token drops anything
    mass_S: Tensor  # fp32: P times the mass that the token drops
    centered: Centered | None = None  # None where the sample is all tokens


class Centered(NamedTuple):
    """The sampled tokens, as far as they are not the mean of all."""

    rows_SD: Tensor  # hidden state less the mean of all, with the sign of what the token drops; in the hidden states' dtype
    square_S: Tensor  # fp32: its square
    share_S: Tensor  # fp32: the weights of the sample, of 1 in all
    mean_D: Tensor  # fp32: mean of the rows by these weights
    mass: Tensor  # [] fp32: what all tokens drop together, of absolute values
    mean_hidden_D: Tensor  # fp32: mean hidden state of all tokens, weighted by what they drop
    mean_shift_D: Tensor  # that of the weighted sample less it, in the hidden states' dtype


class Dropped(NamedTuple):
    """What the sample drops."""

    share_V: Tensor  # fp32: each column's share, of 1 in all; 0 where nothing is dropped
    total: Tensor  # [] fp32: sum of all parts before ``PART``
    center_D: Tensor  # fp32: the columns' rows of the weight, averaged by their shares
    reweighting_V: Tensor  # fp32: the factor on each column's parts
    # [S, V or more] in the weight's dtype: ``PART`` times what each token drops of each column, in units of its own mass,
    # before reweighting; 0 at frequent columns; None where it was not asked for.
    parts_SV: Tensor | None


def sample_tokens(
    hidden_ND: Tensor, dropped_N: Tensor, reference_N: Tensor, threshold_N: Tensor, labels_N: Tensor, most: int
) -> tuple[Sample, Tensor]:
    """Return ``most`` tokens and their hidden states [S, D]; or all tokens if there are not more.

    Args:
        hidden_ND: Hidden states.
        dropped_N: P times the mass that the token drops, of either sign; 0 where the token is not filtered.
        reference_N: exp(z - reference) = |P| p.
        threshold_N: Logits below it are dropped.
        labels_N: Their labels.
        most: Tokens in the sample.
    """
    num_tokens, device = dropped_N.shape[0], dropped_N.device
    if num_tokens <= most:
        token_S = torch.arange(num_tokens, dtype=torch.int32, device=device)
        size = torch.full((1,), num_tokens, dtype=torch.int32, device=device)
        reference_S = reference_N.masked_fill(dropped_N == 0, torch.inf)
        threshold_S = threshold_N.masked_fill(dropped_N == 0, -torch.inf)
        return Sample(token_S, reference_S, threshold_S, labels_N, size, dropped_N), hidden_ND
    total = dropped_N.abs().sum()
    share_N = dropped_N.abs() / total.clamp(min=TINY.value)
    token_S = compensation.sample(share_N, most)
    mass_S, reference_S, threshold_S, label_S = (
        each.index_select(0, token_S) for each in (dropped_N, reference_N, threshold_N, labels_N)
    )
    nothing = total == 0
    rows_SD = hidden_ND.index_select(0, token_S).masked_fill_(nothing, 0.0)
    mean_D = sums_of_rows(torch.stack((share_N, torch.zeros_like(share_N))), hidden_ND)[0]
    centered, weight_S = _calibrated(rows_SD, mass_S, mean_D, total)
    sample = Sample(
        token_S.int(),
        (reference_S + (mass_S.abs() / weight_S).log()).masked_fill(nothing, torch.inf),
        threshold_S.masked_fill(nothing, -torch.inf),
        label_S,
        torch.where(nothing, 0, most).int()[None],
        mass_S,
        centered,
    )
    return sample, rows_SD


def _calibrated(rows_SD: Tensor, mass_S: Tensor, mean_D: Tensor, mass: Tensor) -> tuple[Centered, Tensor]:
    """Return the sample relative to ``mean_D``, the mean hidden state of all tokens, and its weights before they are shares.

    The weights are 1 + t (x - mean x), x being the component along the mean, and t is such that the weighted mean of x is that
    of all tokens, |mean_D|^2. A token may not stand for too many, nor for none.
    """
    wide_SD = rows_SD.float()
    along_S = wide_SD @ mean_D
    variance, mean = torch.var_mean(along_S, correction=0)
    strength = ((mean_D @ mean_D - mean) / variance).masked_fill(~(variance > 0), 0.0)
    weight_S = (1 + strength * (along_S - mean)).clamp(0.125, 8.0)
    share_S = weight_S / weight_S.sum()
    centered_SD = ((wide_SD - mean_D) * mass_S.sign()[:, None]).to(rows_SD.dtype)
    wide_centered_SD, shift_D = centered_SD.float(), (share_S @ wide_SD - mean_D).masked_fill(mass == 0, 0.0)
    square_S, centered_mean_D = wide_centered_SD.square().sum(1), share_S @ wide_centered_SD
    shift_D = shift_D.to(rows_SD.dtype)
    return Centered(centered_SD, square_S, share_S, centered_mean_D, mass, mean_D, shift_D), weight_S


def dropped_shares(
    rows_SD: Tensor, x: Operands, sample: Sample, slot_V: Tensor, tile: Tile, *, want_parts: bool
) -> Dropped:
    """Return each column's share of what the sample drops, and the parts that it is made of.

    A column is dropped where z < threshold, but for labels and frequent columns; it counts exp(z - reference) times the
    softcap's slope, and exp(-REWEIGHTING * scale * (column . mean_shift_D)). ``rows_SD`` are the sample's hidden states.
    """
    num_rows, hidden_size = rows_SD.shape
    logits = x.logits
    tile = sample_tile(tile, num_rows, rows_SD.itemsize, rows_SD.device)
    if logits.softcap > 0.0:
        tile = tile._replace(cols=max(16, tile.cols // 2))  # the epilogue over a whole tile spills registers
    num_blocks = cdiv(num_rows, tile.rows)
    sums_BV = torch.empty(num_blocks, logits.num_valid, dtype=torch.float32, device=rows_SD.device)
    parts_SV = x.weight.new_empty(num_rows, cdiv(logits.num_valid, ROWS) * ROWS) if want_parts else None
    tma = has_tma(rows_SD, x.weight)
    _dropped_sums_kernel[(cdiv(logits.num_valid, tile.cols) * num_blocks,)](
        # in
        operand(rows_SD, tile.rows, tile.inner, tma), operand(x.weight, tile.cols, tile.inner, tma), x.bias,
        sample.size, sample.reference_S, sample.threshold_S, sample.label_S, slot_V,
        # out
        sums_BV, None if parts_SV is None else operand(parts_SV, tile.rows, tile.cols // 2, tma),
        # sizes
        num_rows, hidden_size, logits.num_valid, logits.start, 0 if parts_SV is None else parts_SV.shape[1],
        # options
        logits.logit_scale, logits.softcap,
        HAS_BIAS=x.bias is not None, HAS_SCALE=logits.logit_scale != 1.0,
        HAS_SOFTCAP=logits.capped, WANT_PARTS=parts_SV is not None,
        MASK_V=logits.num_valid % tile.cols != 0,
        # tiles
        BLOCK_N=tile.rows, BLOCK_V=tile.cols, BLOCK_D=tile.inner, TMA=tma, PRECISION=precision(rows_SD.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )
    return _reweighted(sums_BV, x, sample, parts_SV)


def _reweighted(sums_BV: Tensor, x: Operands, sample: Sample, parts_SV: Tensor | None) -> Dropped:
    """Reweight the columns' sums, and average the columns' rows by them: the weight is read once for both."""
    (num_blocks, num_valid), hidden_size, device = sums_BV.shape, x.weight.shape[1], sums_BV.device
    main_d = triton.next_power_of_2(hidden_size)
    block_v, rest_d = min(16, max(1, 4096 // main_d)), 0
    if block_v == 1 and main_d > hidden_size:
        main_d //= 2  # A long row is in registers as two blocks, not as one that is half empty.
        rest_d = triton.next_power_of_2(hidden_size - main_d)
    parts = min(cdiv(num_valid, block_v), (6 if num_valid >= 1 << 16 else 4) * num_programs(device))
    mean_shift_D = None if sample.centered is None else sample.centered.mean_shift_D
    sums_V, reweighting_V = torch.empty(2, num_valid, dtype=torch.float32, device=device).unbind()
    total_P, mean_PD = (
        torch.empty(shape, dtype=torch.float32, device=device) for shape in (parts, (parts, hidden_size))
    )
    _reweight_kernel[(parts,)](
        sums_BV, x.weight, mean_shift_D, sample.size,
        sums_V, reweighting_V, total_P, mean_PD,
        num_valid, hidden_size, REWEIGHTING * x.logits.logit_scale,
        HAS_SHIFT=mean_shift_D is not None, NUM_BLOCKS=num_blocks, BLOCK_V=block_v, MAIN_D=main_d, REST_D=rest_d,
        STAGES=stages_of_rows(block_v * (main_d + rest_d) * x.weight.itemsize), num_warps=4,
    )
    total = total_P.sum()
    per_total = 1 / total.clamp(min=TINY.value)
    return Dropped(sums_V * per_total, total, mean_PD.sum(0) * per_total, reweighting_V, parts_SV)


@kernel("sums_ptr", "weight_ptr", "mean_shift_ptr", "mean_ptr", "hidden_size")
def _reweight_kernel(
    sums_ptr,  # in: [B, V] fp32
    weight_ptr,  # in: [V, D]
    mean_shift_ptr,  # in: [D], with HAS_SHIFT
    num_sampled_ptr,  # in: [1] int32: nobody drops anything where it is 0
    reweighted_ptr,  # out: [V] fp32
    reweighting_ptr,  # out: [V] fp32: the factors
    total_ptr,  # out: [P] fp32: sums of the reweighted ones
    mean_ptr,  # out: [P, D] fp32: rows of the weight times the reweighted ones
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
    offs_d = tl.arange(0, MAIN_D)
    in_d = offs_d < hidden_size
    mean = tl.zeros((MAIN_D,), tl.float32)
    mean_shift = tl.load(mean_shift_ptr + offs_d, mask=in_d, other=0).to(tl.float32) if HAS_SHIFT else mean
    if REST_D > 0:
        rest_d = MAIN_D + tl.arange(0, REST_D)
        in_rest = rest_d < hidden_size
        rest_mean = tl.zeros((REST_D,), tl.float32)
        rest_shift = tl.load(mean_shift_ptr + rest_d, mask=in_rest, other=0).to(tl.float32) if HAS_SHIFT else rest_mean
    live = tl.load(num_sampled_ptr) > 0
    if not live:
        for first in range(tl.program_id(0) * MAIN_D, num_valid, tl.num_programs(0) * MAIN_D):
            tl.store(reweighted_ptr + first + offs_d, mean, mask=first + offs_d < num_valid)
            tl.store(reweighting_ptr + first + offs_d, mean + 1, mask=first + offs_d < num_valid)
    total = tl.zeros((BLOCK_V,), tl.float32)
    end = tl.where(live, num_valid, 0)
    # Rows are on their way to shared memory while others are summed.
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
        # A column that nobody drops may hold anything.
        mean += tl.sum(tl.where(sums[:, None] > 0, sums[:, None] * w, 0.0), 0)
        if REST_D > 0:
            rest_mean += tl.sum(tl.where(sums[:, None] > 0, sums[:, None] * rest, 0.0), 0)
    tl.store(total_ptr + tl.program_id(0), tl.sum(total, 0))
    mean_ptr += tl.program_id(0).to(tl.int64) * hidden_size
    tl.store(mean_ptr + offs_d, mean, mask=in_d)
    if REST_D > 0:
        tl.store(mean_ptr + rest_d, rest_mean, mask=in_rest)


@kernel("hidden", "weight", "bias_ptr", "slot_ptr", "sums_ptr", "parts", "hidden_size")
def _dropped_sums_kernel(
    hidden,  # in: [S, D] descriptor or pointer
    weight,  # in: [V, D] descriptor or pointer
    bias_ptr,  # in: [V]
    num_sampled_ptr,  # in: [1] int32
    reference_ptr,  # in: [S] fp32
    threshold_ptr,  # in: [S] fp32
    labels_ptr,  # in: [S] int64
    slot_ptr,  # in: [V] int32
    sums_ptr,  # out: [B, V] fp32, a row for each block of rows
    parts,  # out: [S, columns] descriptor or pointer, with WANT_PARTS
    num_rows,
    hidden_size,
    num_valid,
    start,
    parts_cols,
    logit_scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    WANT_PARTS: tl.constexpr,
    MASK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    num_sampled = tl.load(num_sampled_ptr)
    # Blocks of rows that read the same columns run side by side, so that these come from memory once.
    num_blocks = tl.cdiv(num_rows, BLOCK_N)
    row = tl.program_id(0) % num_blocks * BLOCK_N
    col = tl.program_id(0) // num_blocks * BLOCK_V
    offs_v = col + tl.arange(0, BLOCK_V)
    in_v = offs_v < num_valid
    sums = tl.zeros((BLOCK_V,), tl.float32)
    if row < num_sampled:
        z = tile_of_logits(
            hidden, weight, bias_ptr, row, col, num_rows, num_valid, hidden_size, logit_scale, softcap,
            HAS_BIAS, HAS_SCALE, HAS_SOFTCAP, MASK_V, BLOCK_N, BLOCK_V, BLOCK_D, TMA, PRECISION,
        )
        offs_n = row + tl.arange(0, BLOCK_N)
        live = offs_n < num_sampled
        reference = tl.load(reference_ptr + offs_n, mask=live, other=0)
        threshold = tl.load(threshold_ptr + offs_n, mask=live, other=float("-inf"))
        label = (tl.load(labels_ptr + offs_n, mask=live, other=-1) - start).to(tl.int32)
        dropped = (z < threshold[:, None]) & (offs_v[None, :] != label[:, None])
        e = tl.where(dropped, tl.exp(z - reference[:, None]), 0.0)
        if HAS_SOFTCAP:
            e = sloped(e, z, softcap)
        is_frequent = tl.load(slot_ptr + offs_v, mask=in_v, other=0) > 0
        sums = tl.where(is_frequent, 0.0, tl.sum(e, 0))
        factor = tl.where(is_frequent, 0.0, PART)
        if WANT_PARTS:
            store_tile(
                parts, row, col, e * factor[None, :], num_rows, parts_cols, parts_cols, BLOCK_N, BLOCK_V, TMA
            )
    where = sums_ptr + (tl.program_id(0) % num_blocks).to(tl.int64) * num_valid + offs_v
    tl.store(where, sums, mask=in_v)
