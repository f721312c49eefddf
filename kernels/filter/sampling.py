"""Corrections of the rank-1 control variate: sampled columns for d_hidden, the sampled tokens of ``shares.py`` for d_weight.

    d_hidden_i  =  r_i c
                   + factor * (sum_k g_ik centered_k  -  r_i / K sum_k centered_k)              centered_k = weight_k - c
    d_weight_j  =  share_j sum_i r_i e_i
                   + factor * (sum_s a_sj centered_s  -  share_j sum_s a_s centered_s)          centered_s = hidden_s - e

    g_ik = scale * P p_ik slope_ik / (K share_k)   where token i drops column k, else 0
    a_sj: token s's part of share_j, times the dropped mass of all tokens, with the sign of P;    a_s its sum over j

``compensation.py`` derives both. The K columns are sampled by their shares, so none is frequent. d_hidden's factor is
estimated on the sampled tokens, d_weight's on the sampled columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from cce_dist.kernels import Operands, Rows, Softmax
from cce_dist.kernels.blocks import has_tma, kernel, operand, store_tile, tile_of_products
from cce_dist.kernels.filter import compensation
from cce_dist.kernels.filter.shares import PART, RUN, Centered, Dropped, Sample
from cce_dist.kernels.head import logits_of, sloped, token_factors
from cce_dist.kernels.tiles import Tile, Tiles, precision
from cce_dist.kernels.waves import cdiv


class SampledColumns(NamedTuple):
    """The sampled columns.

    Attributes:
        column_K: [K] int64, ascending; a column may be sampled more than once.
        numbers_2K: [2, K] fp32: 1 / (K share); squared norm of the row of ``centered_KD``.
        x: Operands with the sampled columns alone. ``start`` is still the original shard's.
        centered_KD: Rows of the weight minus the mean row by share, in the weight's dtype.
    """

    column_K: torch.Tensor
    numbers_2K: torch.Tensor
    x: Operands
    centered_KD: torch.Tensor


class SampledTokens(NamedTuple):
    """The sampled tokens' correction of d_weight, without its factor.

    Attributes:
        parts_SV: As in ``shares.Dropped``.
        reweighting_2V: As in ``shares.Dropped``.
        rows: The sampled tokens, with centered_s as hidden states.
        centered: ``Sample.centered``.
    """

    parts_SV: torch.Tensor
    reweighting_2V: torch.Tensor
    rows: Rows
    centered: Centered


# Indices of ``Factors.values_4``
COLUMNS, TOKENS, GAIN, LINEAR = (tl.constexpr(i) for i in range(4))


class Factors(NamedTuple):
    """The factors on the corrections of the control variate.

    Attributes:
        values_4: [4] fp32. COLUMNS: on the sampled columns' correction of d_hidden. TOKENS: on the sampled tokens' correction
            of d_weight. GAIN: TOKENS times the dropped mass of all tokens, in units of ``parts_SV``. LINEAR: on the linear
            correction of d_hidden (``covariance.py``), 0 without a covariance.
        of_covariance: Factors for computing the covariance, or None without a covariance.
    """

    values_4: torch.Tensor
    of_covariance: OfCovariance | None


class OfCovariance(NamedTuple):
    """Factors and numbers of rows of the two products that are added up to the covariance.

    Attributes:
        gain: 1 / Q, a 0-d fp32 tensor.
        lines: -COLUMNS / K, a 0-d fp32 tensor, which subtracts the linear part of the sampled columns.
        num_apart: [1] int32: rows of a group of the Q columns; 0 if LINEAR is 0.
        num_sampled: [1] int32: K; 0 if LINEAR is 0.
    """

    gain: torch.Tensor
    lines: torch.Tensor
    num_apart: torch.Tensor
    num_sampled: torch.Tensor


def sample_columns(dropped: Dropped, size: int, x: Operands) -> SampledColumns:
    """Sample columns by share, by systematic sampling (Madow, 1949), and copy their rows of the weight."""
    dtype, device, hidden_size = x.weight.dtype, x.weight.device, x.weight.shape[1]
    column_K = torch.empty(size, dtype=torch.int64, device=device)
    numbers_2K = torch.empty(2, size, dtype=torch.float32, device=device)
    weight_KD, centered_KD = (torch.empty(size, hidden_size, dtype=dtype, device=device) for _ in range(2))
    _launch_sampling(dropped, 0, size, x, centered_KD, column_K, numbers_2K, weight_KD)
    of_columns = x._replace(weight=weight_KD, num_valid=size)
    return SampledColumns(column_K, numbers_2K, of_columns, centered_KD)


def sample_centered(
    dropped: Dropped, first: int, count: int, size: int, x: Operands, factors: Factors
) -> torch.Tensor:
    """Return the centered weight of samples ``first`` to ``first + count``, if ``size`` columns are sampled.

    Nothing is written if LINEAR is 0.
    """
    centered_QD = torch.empty(count, x.weight.shape[1], dtype=x.weight.dtype, device=x.weight.device)
    _launch_sampling(dropped, first, size, x, centered_QD, factors=factors)
    return centered_QD


def _launch_sampling(
    dropped: Dropped, first: int, size: int, x: Operands, centered_KD: torch.Tensor, *copies: torch.Tensor | None,
    factors: Factors | None = None,
) -> None:
    """Launch a program for each row of centered_KD. ``copies``: output for column, numbers and weight, or nothing."""
    column_K, numbers_2K, weight_KD = copies or (None,) * 3
    num_runs = dropped.count_B.shape[0]
    _sample_columns_kernel[(centered_KD.shape[0],)](
        dropped.share_V, dropped.count_B, dropped.shared_2D, x.weight,
        None if factors is None else factors.values_4,
        column_K, numbers_2K, weight_KD, centered_KD,
        first, num_runs, x.num_valid, x.weight.shape[1], size, compensation.PARTS,
        CENTERED_ALONE=column_K is None, RUN=RUN, RUNS=1 << (num_runs - 1).bit_length(),
        BLOCK_D=1024,
    )


@kernel(
    "share_ptr", "count_ptr", "shared_ptr", "weight_ptr", "weight_out_ptr", "centered_ptr", "hidden_size"
)
def _sample_columns_kernel(
    share_ptr,  # in: [V] fp32
    count_ptr,  # in: [runs] int64: shares as integers, summed over each run
    shared_ptr,  # in: [2, D] fp32, as in ``Dropped``; the last row is read
    weight_ptr,  # in: [V, D]
    factors_ptr,  # in: [4] fp32, with CENTERED_ALONE
    column_ptr,  # out: [K] int64
    number_ptr,  # out: [2, K] fp32, as in ``SampledColumns``
    weight_out_ptr,  # out: [K, D]
    centered_ptr,  # out: [K, D]
    first_sample,
    num_runs,
    num_valid,
    hidden_size,
    size,
    whole,
    CENTERED_ALONE: tl.constexpr,
    RUN: tl.constexpr,
    RUNS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    unused = (tl.load(factors_ptr + LINEAR) == 0) if CENTERED_ALONE else False
    if unused:
        return
    center_ptr = shared_ptr + hidden_size
    row = tl.program_id(0).to(tl.int64)
    number = first_sample + row
    offs_b = tl.arange(0, RUNS)
    count = tl.load(count_ptr + offs_b, mask=offs_b < num_runs, other=0)
    wanted = (2 * number + 1) * (tl.sum(count, 0) // (2 * size))
    # Find the first run, then its first column, whose cumulative share exceeds ``wanted``.
    run = tl.sum(((tl.cumsum(count, 0) <= wanted) & (offs_b < num_runs)).to(tl.int32), 0)
    run = tl.minimum(run, num_runs - 1)
    before = tl.sum(tl.where(offs_b < run, count, 0), 0)
    offs_v = run * RUN + tl.arange(0, RUN)
    in_v = offs_v < num_valid
    share = tl.load(share_ptr + offs_v, mask=in_v, other=0)
    end = before + tl.cumsum((share * whole.to(tl.float32)).to(tl.int64), 0)
    column = run * RUN + tl.sum(((end <= wanted) & in_v).to(tl.int32), 0)
    column = tl.minimum(column, num_valid - 1)
    if not CENTERED_ALONE:
        share = tl.load(share_ptr + column)
        tl.store(column_ptr + row, column.to(tl.int64))
        tl.store(number_ptr + row, tl.where(share > 0, 1 / (size * share), 0.0))

    # Copy and center one row of the weight [D], BLOCK_D elements at a time.
    square = tl.zeros((BLOCK_D,), tl.float32)
    for first in range(0, hidden_size, BLOCK_D):
        offs_d = first + tl.arange(0, BLOCK_D)
        in_d = offs_d < hidden_size
        w = tl.load(weight_ptr + column.to(tl.int64) * hidden_size + offs_d, mask=in_d, other=0)
        centered = w.to(tl.float32) - tl.load(center_ptr + offs_d, mask=in_d, other=0)
        centered = centered.to(centered_ptr.dtype.element_ty)
        tl.store(centered_ptr + row * hidden_size + offs_d, centered, mask=in_d)
        if not CENTERED_ALONE:
            tl.store(weight_out_ptr + row * hidden_size + offs_d, w, mask=in_d)
            square += centered.to(tl.float32) * centered.to(tl.float32)
    if not CENTERED_ALONE:
        tl.store(number_ptr + size + row, tl.sum(square, 0))


def weigh_tokens(dropped: Dropped, sample: Sample) -> SampledTokens | None:
    """Return the correction of d_weight; None if the parts were not kept, or if the sample is all tokens."""
    if dropped.parts_SV is None or dropped.reweighting_2V is None or sample.centered is None:
        return None
    return SampledTokens(
        dropped.parts_SV,
        dropped.reweighting_2V,
        Rows(sample.token_S, sample.size, sample.centered.rows_SD),
        sample.centered,
    )


def squares_of_columns(
    sampled: SampledColumns, sample: Sample, rows_SD: torch.Tensor, softmax: Softmax,
    coef_4N: torch.Tensor, numbers_3N: torch.Tensor, tiles: Tiles, lines_SK: torch.Tensor | None,
) -> OfColumns:
    """Compute the signal and noise of the columns' correction at the sampled tokens, for ``factors_of``.

    ``OfColumns.squares_6P`` has two rows of partial sums: the square of the correction, and the sum of its terms' squares. With
    ``lines_SK`` four more rows follow: the product of the correction with the linear one, the sum of their terms' products, the
    square of the linear correction, and the sum of its terms' squares.

    Args:
        sampled: The sampled columns.
        sample: The sampled tokens.
        rows_SD: Hidden states of the sampled tokens.
        softmax: Statistics of the whole vocabulary.
        coef_4N: As in ``sampled_gradients``.
        numbers_3N: As in ``lists.Decisions``; the threshold is read.
        tiles: Tiles of the device.
        lines_SK: As ``covariance.lines_of_sample`` returns them, or None.
    """
    size, num_columns = rows_SD.shape[0], sampled.column_K.shape[0]
    grads_SK = torch.empty(size, num_columns, dtype=rows_SD.dtype, device=rows_SD.device)
    sampled_gradients(
        sampled, Rows(sample.token_S, sample.size, rows_SD), softmax, coef_4N, numbers_3N, grads_SK, tiles
    )
    # Tokens are sampled by mass, so terms are divided by the root of the token's mass.
    squares_6P = _squares(
        grads_SK, sample.numbers_3S, size, sampled.centered_KD, sampled.numbers_2K[1], tiles.lse, lines_SK=lines_SK
    )
    return OfColumns(squares_6P, sample.numbers_3S, coef_4N)


def squares_of_tokens(tokens: SampledTokens, dropped: Dropped, sampled: SampledColumns, tiles: Tiles) -> torch.Tensor:
    """Return partial sums of the squared correction of d_weight at sampled columns, and of its terms' squares. -> [2, P]"""
    # Columns are sampled by share, so terms are divided by the root of the share.
    return _squares(
        tokens.parts_SV, sampled.column_K, sampled.column_K.shape[0], tokens.centered.rows_SD, tokens.centered.square_S,
        tiles.lse, dropped,
    )


def _squares(
    given: torch.Tensor, of_rows: torch.Tensor, num_rows: int, centered_ID: torch.Tensor, square_I: torch.Tensor, tile: Tile,
    dropped: Dropped | None = None, lines_SK: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return partial sums of the squares of ``terms @ centered_ID`` and of its terms.

    For the columns' correction R are the sampled tokens and I the sampled columns, for the tokens' correction the other way
    round. ``square_I`` are the squared norms of the rows of ``centered_ID``. ``tile`` gives the block of the inner axis.
    """
    num_inner, hidden_size = centered_ID.shape
    block_r, block_d = 64, 512 // centered_ID.itemsize
    blocks_r, blocks_d = cdiv(num_rows, block_r), cdiv(hidden_size, block_d)
    parts = blocks_r * (blocks_d + 1)
    squares_6P = torch.empty(2 if lines_SK is None else 6, parts, dtype=torch.float32, device=centered_ID.device)
    share_V, reweighting_2V, total = (
        (None,) * 3 if dropped is None else (dropped.share_V, dropped.reweighting_2V, dropped.total)
    )
    _squares_kernel[(parts,)](
        given, of_rows, centered_ID, square_I, share_V, reweighting_2V, total, lines_SK,
        squares_6P,
        num_rows, num_inner, hidden_size, given.stride(0), 1.0 if share_V is None else share_V.shape[0] ** 0.5,
        OF_TOKENS=dropped is not None, HAS_LINES=lines_SK is not None, BLOCK_R=block_r, BLOCK_D=block_d,
        BLOCK_I=tile.inner, PRECISION=precision(centered_ID.dtype), num_warps=8, num_stages=tile.stages,
    )
    return squares_6P


@kernel(
    "given_ptr", "of_rows_ptr", "centered_ptr", "column_share_ptr", "lines_ptr", "squares_ptr", "num_inner", "hidden_size",
    "given_stride",
)
def _squares_kernel(
    given_ptr,  # in: [S, K]: g of the columns; with OF_TOKENS [S, V or more]: ``Dropped.parts_SV``
    of_rows_ptr,  # in: [S] fp32: dropped mass of each token; with OF_TOKENS [K] int64: the columns
    centered_ptr,  # in: [K or S, D]
    square_ptr,  # in: [K or S] fp32: squared norms of the rows of centered_ptr
    column_share_ptr,  # in: [V] fp32, with OF_TOKENS
    reweighting_ptr,  # in: [V] fp32, with OF_TOKENS
    total_ptr,  # in: [] fp32, with OF_TOKENS
    lines_ptr,  # in: [S, K] fp32, with HAS_LINES
    squares_ptr,  # out: [2 or 6, P] fp32, as in ``OfColumns``
    num_rows,
    num_inner,
    hidden_size,
    given_stride,
    root,
    OF_TOKENS: tl.constexpr,
    HAS_LINES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_I: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # In each block of rows the last program sums the squares of terms. Each other program computes a block of the product
    # acc [BLOCK_R, BLOCK_D] = terms [BLOCK_R, I] @ centered [I, BLOCK_D], and sums its square.
    blocks = tl.cdiv(hidden_size, BLOCK_D) + 1
    offs_r = tl.program_id(0) // blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    block_d = tl.program_id(0) % blocks
    in_r = offs_r < num_rows
    if OF_TOKENS:
        column = tl.load(of_rows_ptr + offs_r, mask=in_r, other=0)
        own = tl.load(column_share_ptr + column, mask=in_r, other=0)
        total = tl.load(total_ptr)
        factor = tl.where(total > 0, 1 / (PART * total), 0.0) * tl.load(reweighting_ptr + column, mask=in_r, other=0)
        given_ptr += column[:, None]
    else:
        own = tl.load(of_rows_ptr + offs_r, mask=in_r, other=0)
        factor = tl.zeros((BLOCK_R,), tl.float32) + num_inner
        given_ptr += offs_r.to(tl.int64)[:, None] * given_stride
        root_of_lines = tl.sqrt(tl.abs(own))
    root_of_own = tl.where(own != 0, 1 / tl.sqrt(tl.abs(own)), 0.0)
    if OF_TOKENS:
        root_of_own *= num_inner * root
    lines_row = offs_r.to(tl.int64)[:, None] * num_inner
    end = tl.where(tl.max((own != 0).to(tl.int32), 0) > 0, num_inner, 0)  # rows with own = 0 drop nothing
    sums_ptr = squares_ptr + tl.program_id(0)
    num_parts = tl.num_programs(0)
    if block_d < blocks - 1:
        offs_d = block_d * BLOCK_D + tl.arange(0, BLOCK_D)
        acc = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
        line_acc = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
        for first in range(0, end, BLOCK_I):
            offs_i = first + tl.arange(0, BLOCK_I)
            in_i = offs_i < num_inner
            mask = (own != 0)[:, None] & in_i[None, :]
            term = _terms(
                given_ptr, num_inner, offs_i, mask, given_stride, factor, own, root_of_own,
                centered_ptr.dtype.element_ty, OF_TOKENS,
            )
            centered = tl.load(
                centered_ptr + offs_i.to(tl.int64)[:, None] * hidden_size + offs_d[None, :],
                mask=in_i[:, None] & (offs_d < hidden_size)[None, :], other=0,
            )
            acc = tl.dot(term, centered, acc, input_precision=PRECISION)
            if HAS_LINES:
                line = _lines(lines_ptr + lines_row, offs_i, mask, root_of_lines, centered_ptr.dtype.element_ty)
                line_acc = tl.dot(line, centered, line_acc, input_precision=PRECISION)
        tl.store(sums_ptr, _sum_of_all(acc * acc))
        tl.store(sums_ptr + num_parts, 0.0)
        if HAS_LINES:
            tl.store(sums_ptr + 2 * num_parts, _sum_of_all(acc * line_acc))
            tl.store(sums_ptr + 3 * num_parts, 0.0)
            tl.store(sums_ptr + 4 * num_parts, _sum_of_all(line_acc * line_acc))
            tl.store(sums_ptr + 5 * num_parts, 0.0)
    else:
        noise = tl.zeros((BLOCK_R, BLOCK_I), tl.float32)
        both_noise = tl.zeros((BLOCK_R, BLOCK_I), tl.float32)
        line_noise = tl.zeros((BLOCK_R, BLOCK_I), tl.float32)
        for first in range(0, end, BLOCK_I):
            offs_i = first + tl.arange(0, BLOCK_I)
            in_i = offs_i < num_inner
            mask = (own != 0)[:, None] & in_i[None, :]
            square = tl.load(square_ptr + offs_i, mask=in_i, other=0)[None, :]
            term = _terms(
                given_ptr, num_inner, offs_i, mask, given_stride, factor, own, root_of_own,
                centered_ptr.dtype.element_ty, OF_TOKENS,
            ).to(tl.float32)
            noise += term * term * square
            if HAS_LINES:
                line = _lines(lines_ptr + lines_row, offs_i, mask, root_of_lines, centered_ptr.dtype.element_ty)
                line = line.to(tl.float32)
                both_noise += term * line * square
                line_noise += line * line * square
        tl.store(sums_ptr, 0.0)
        tl.store(sums_ptr + num_parts, _sum_of_all(noise))
        if HAS_LINES:
            tl.store(sums_ptr + 2 * num_parts, 0.0)
            tl.store(sums_ptr + 3 * num_parts, _sum_of_all(both_noise))
            tl.store(sums_ptr + 4 * num_parts, 0.0)
            tl.store(sums_ptr + 5 * num_parts, _sum_of_all(line_noise))


@triton.jit
def _terms(
    given_ptr, num_inner, offs_i, mask, given_stride, factor, own, root_of_own, dtype: tl.constexpr,
    OF_TOKENS: tl.constexpr,
):
    """Return a block of the terms of the correction, 0 outside the mask."""
    if OF_TOKENS:
        given = tl.load(given_ptr + offs_i.to(tl.int64)[None, :] * given_stride, mask=mask, other=0)
        rest = own[:, None] / num_inner
    else:
        given = tl.load(given_ptr + offs_i[None, :], mask=mask, other=0)
        rest = own[:, None]
    return tl.where(mask, (given.to(tl.float32) * factor[:, None] - rest) * root_of_own[:, None], 0.0).to(dtype)


@triton.jit
def _lines(lines_ptr, offs_i, mask, root, dtype: tl.constexpr):
    """Return a block of the terms of the linear correction, 0 outside the mask."""
    return (tl.load(lines_ptr + offs_i[None, :], mask=mask, other=0) * root[:, None]).to(dtype)


@triton.jit
def _sum_of_all(tile):
    """Return the sum of a tile. Summing one dimension at a time does not compile for capability 10 (Triton 3.6)."""
    return tl.sum(tl.reshape(tile, (tile.shape[0] * tile.shape[1],)), 0)


class OfColumns(NamedTuple):
    """Signal and noise of the columns' correction at the sampled tokens.

    Attributes:
        squares_6P: [2 or 6, P] fp32: partial sums; see ``squares_of_columns``.
        mass: ``Sample.numbers_3S``; the first row, the dropped mass, is read.
        coef_4N: The coefficients of the correction.
    """

    squares_6P: torch.Tensor
    mass: torch.Tensor
    coef_4N: torch.Tensor


def factors_of(
    columns: OfColumns | None, tokens_2P: torch.Tensor | None, sampled: SampledColumns, dropped: Dropped, sample: Sample,
    shared_weight_D: torch.Tensor | None, num_covariance: int, at_once: int,
) -> Factors:
    """Return the factors, and subtract the means of the corrections from the shared rows of the control variate.

    Args:
        columns: As ``squares_of_columns`` returns them, or None.
        tokens_2P: As ``squares_of_tokens`` returns them, or None.
        sampled: The sampled columns.
        dropped: The shares. With ``columns`` the first row of ``shared_2D`` is changed.
        sample: The sampled tokens.
        shared_weight_D: in, out: the shared row of d_weight (``Compensation``), or None. It is changed with ``tokens_2P``.
        num_covariance: Number of columns that the covariance is computed from; 0: no covariance.
        at_once: Number of these columns that are sampled at a time.
    """
    num_columns, hidden_size = sampled.centered_KD.shape
    centered, device = sample.centered, sampled.centered_KD.device
    factors = Factors(torch.empty(4, dtype=torch.float32, device=device), None)
    if num_covariance:
        gain, lines = (torch.empty((), dtype=torch.float32, device=device) for _ in range(2))
        num_apart, num_sampled = (torch.empty(1, dtype=torch.int32, device=device) for _ in range(2))
        factors = factors._replace(of_covariance=OfCovariance(gain, lines, num_apart, num_sampled))
    squares_6P, mass, coef_4N = (None,) * 3 if columns is None else columns
    _factors_kernel[(cdiv(hidden_size, 64),)](
        # in
        squares_6P, sampled.centered_KD, tokens_2P, *((None, None) if centered is None else (centered.mean_D,
        centered.mass)), dropped.total, sampled.numbers_2K, sample.token_S, mass, coef_4N,
        # in, out
        dropped.shared_2D, shared_weight_D,
        # out
        factors.values_4, *(factors.of_covariance or (None,) * 4),
        # sizes
        *(0 if squares is None else squares.shape[1] for squares in (squares_6P, tokens_2P)), num_columns, hidden_size,
        at_once,
        # options
        1 / max(1, num_covariance), num_columns / max(1, num_covariance), sampled.x.head.multiplier,
        compensation.LEAST_SIGNAL, compensation.LEAST_CORRECTED,
        HAS_COLUMNS=columns is not None, HAS_TOKENS=tokens_2P is not None, HAS_LINEAR=num_covariance > 0,
        LINEAR_FACTORS=compensation.LINEAR_FACTORS,
        SAMPLE=sample.token_S.shape[0], BLOCK_P=1024, BLOCK_K=64, BLOCK_D=64,
    )
    return factors


@kernel("columns_ptr", "centered_ptr", "tokens_ptr", "shared_hidden_ptr", "shared_weight_ptr", "hidden_size")
def _factors_kernel(
    columns_ptr,  # in: [2 or 6, P] fp32, with HAS_COLUMNS
    centered_ptr,  # in: [K, D]: ``SampledColumns.centered_KD``
    tokens_ptr,  # in: [2, P] fp32, with HAS_TOKENS
    centered_mean_ptr,  # in: [D] fp32: ``Centered.mean_D``
    mass_ptr,  # in: [] fp32: ``Centered.mass``
    total_ptr,  # in: [] fp32: ``Dropped.total``
    number_ptr,  # in: [2, K] fp32, as in ``SampledColumns``
    token_ptr,  # in: [S] int32
    own_ptr,  # in: [S] fp32: dropped mass of each sampled token, with HAS_LINEAR
    coef_ptr,  # in: [4, N] fp32, with HAS_LINEAR
    shared_hidden_ptr,  # in, out: [2, D] fp32, as in ``Dropped``
    shared_weight_ptr,  # in, out: [D] fp32
    factors_ptr,  # out: [4] fp32, as in ``Factors``
    gain_ptr,  # out: [] fp32, as in ``OfCovariance``
    lines_ptr,  # out: [] fp32, as in ``OfCovariance``
    num_apart_ptr,  # out: [1] int32, as in ``OfCovariance``
    num_sampled_ptr,  # out: [1] int32, as in ``OfCovariance``
    columns_parts,
    tokens_parts,
    num_columns,
    hidden_size,
    at_once,
    covariance_gain,
    noise_part,
    logit_scale,
    least_signal,
    least_corrected,
    HAS_COLUMNS: tl.constexpr,
    HAS_TOKENS: tl.constexpr,
    HAS_LINEAR: tl.constexpr,
    LINEAR_FACTORS: tl.constexpr,
    SAMPLE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    square_ptr = number_ptr + num_columns
    offs_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_d = offs_d < hidden_size
    of_columns = 0.0
    of_tokens = 0.0
    gain = 0.0
    linear = 0.0
    if HAS_COLUMNS:
        if HAS_LINEAR:
            # Estimate the square of d_hidden: a token's row is about as long as a row of the weight times the coefficient.
            offs_s = tl.arange(0, SAMPLE)
            own = tl.abs(tl.load(own_ptr + offs_s))
            coef_p = tl.load(coef_ptr + tl.load(token_ptr + offs_s)) * logit_scale
            usual = tl.sum(tl.where(own > 0, coef_p * coef_p / own, 0.0), 0) * num_columns
            usual *= _total(square_ptr, num_columns, BLOCK_P)
            linear, of_columns = _linear_factors(
                columns_ptr, columns_parts, noise_part, least_corrected * usual, least_signal, LINEAR_FACTORS, BLOCK_P
            )
        else:
            of_columns = _signal_share(columns_ptr, columns_parts, least_signal, BLOCK_P)
        # Sum the centered rows [K, BLOCK_D], BLOCK_K at a time.
        centered = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
        for first in range(0, num_columns, BLOCK_K):
            offs_k = first + tl.arange(0, BLOCK_K)
            where = centered_ptr + offs_k[:, None] * hidden_size + offs_d[None, :]
            centered += tl.load(where, mask=(offs_k < num_columns)[:, None] & in_d[None, :], other=0).to(tl.float32)
        shared = tl.load(shared_hidden_ptr + offs_d, mask=in_d, other=0)
        tl.store(shared_hidden_ptr + offs_d, shared - of_columns * (tl.sum(centered, 0) / num_columns), mask=in_d)
    if HAS_TOKENS:
        of_tokens = _signal_share(tokens_ptr, tokens_parts, least_signal, BLOCK_P)
        total = tl.load(total_ptr)
        gain = tl.where(total > 0, of_tokens * tl.load(mass_ptr) / (PART * total), 0.0)
        # A gain that underflows to 0 also turns the tokens' correction off.
        of_tokens = tl.where(gain != 0, of_tokens, 0.0)
        less = of_tokens * tl.load(mass_ptr) * tl.load(centered_mean_ptr + offs_d, mask=in_d, other=0)
        shared = tl.load(shared_weight_ptr + offs_d, mask=in_d, other=0)
        tl.store(shared_weight_ptr + offs_d, shared - less, mask=in_d)
    if tl.program_id(0) == 0:
        tl.store(factors_ptr + COLUMNS, of_columns)
        tl.store(factors_ptr + TOKENS, of_tokens)
        tl.store(factors_ptr + GAIN, gain)
        tl.store(factors_ptr + LINEAR, linear)
        if HAS_LINEAR:
            tl.store(gain_ptr, covariance_gain)
            tl.store(lines_ptr, -of_columns / num_columns)
            tl.store(num_apart_ptr, tl.where(linear > 0, at_once, 0))
            tl.store(num_sampled_ptr, tl.where(linear > 0, num_columns, 0))


@triton.jit
def _total(parts_ptr, num_parts, BLOCK_P: tl.constexpr):
    """Return the sum of ``num_parts`` numbers."""
    total = tl.zeros((BLOCK_P,), tl.float32)
    for first in range(0, num_parts, BLOCK_P):
        offs_p = first + tl.arange(0, BLOCK_P)
        total += tl.load(parts_ptr + offs_p, mask=offs_p < num_parts, other=0)
    return tl.sum(total, 0)


@triton.jit
def _linear_factors(
    squares_ptr, num_parts, noise_part, least, least_signal, LINEAR_FACTORS: tl.constexpr, BLOCK_P: tl.constexpr
):
    """Return the factors on linear correction and samples (``compensation.py``) from partial sums; NaN becomes 0."""
    number = tl.arange(0, LINEAR_FACTORS)
    linear = number.to(tl.float32) / (LINEAR_FACTORS - 1)
    signal = _total(squares_ptr, num_parts, BLOCK_P)
    noise = _total(squares_ptr + num_parts, num_parts, BLOCK_P)
    line_noise = _total(squares_ptr + 5 * num_parts, num_parts, BLOCK_P)
    square = linear * linear
    signal += square * _total(squares_ptr + 4 * num_parts, num_parts, BLOCK_P)
    signal -= 2 * linear * _total(squares_ptr + 2 * num_parts, num_parts, BLOCK_P)
    noise += square * line_noise - 2 * linear * _total(squares_ptr + 3 * num_parts, num_parts, BLOCK_P)
    factor = 1 - noise / tl.where(signal > 0, signal, float("inf"))
    factor = tl.where((factor > least_signal) & (signal > 0), factor, 0.0)
    left = tl.where(factor > 0, factor * noise, tl.maximum(signal - noise, 0.0)) + square * line_noise * noise_part
    left = tl.where(left >= 0, left, float("inf"))
    straight = tl.sum(tl.where(number == 0, left, 0.0), 0)
    best = tl.where(straight - tl.min(left, 0) > least, tl.argmin(left, 0), 0)
    rank_1 = tl.sum(tl.where(number == 0, tl.maximum(signal - noise, 0.0), 0.0), 0)
    factor = tl.where(rank_1 - tl.sum(tl.where(number == best, left, 0.0), 0) > least, factor, 0.0)
    return tl.sum(tl.where(number == best, linear, 0.0), 0), tl.sum(tl.where(number == best, factor, 0.0), 0)


@triton.jit
def _signal_share(squares_ptr, num_parts, least_signal, BLOCK_P: tl.constexpr):
    """Return ``signal_share`` of ``compensation.py`` from partial sums."""
    signal = _total(squares_ptr, num_parts, BLOCK_P)
    factor = 1 - _total(squares_ptr + num_parts, num_parts, BLOCK_P) / tl.where(signal > 0, signal, float("inf"))
    return tl.where((factor > least_signal) & (signal > 0), factor, 0.0)  # NaN becomes 0


def sampled_gradients(
    sampled: SampledColumns, rows: Rows, softmax: Softmax, coef_4N: torch.Tensor, numbers_3N: torch.Tensor,
    grads_RK: torch.Tensor, tiles: Tiles, factors: Factors | None = None,
) -> None:
    """Write g of the group's tokens to grads_RK. With ``factors`` g is multiplied by COLUMNS; if that is 0 nothing is written.

    Rows at or past ``num_labelled`` are 0 up to the end of their tile, and unwritten after it.
    """
    tile, x = tiles.dlogits, sampled.x
    num_rows, hidden_size = rows.hidden.shape
    num_columns = x.num_valid
    tma = has_tma(rows.hidden, x.weight, grads_RK)
    _sampled_gradients_kernel[(cdiv(num_rows, tile.rows) * cdiv(num_columns, tile.cols),)](
        # in
        operand(rows.hidden, tile.rows, tile.inner, tma), operand(x.weight, tile.cols, tile.inner, tma), x.head,
        sampled.column_K, sampled.numbers_2K, x.ids, rows.index, rows.num_labelled, numbers_3N, softmax.max,
        softmax.log_sum, coef_4N, None if factors is None else factors.values_4,
        # out
        operand(grads_RK, tile.rows, tile.cols // 2, tma),
        # sizes
        num_rows, hidden_size, num_columns, x.start,
        # options
        MASK_V=num_columns % tile.cols != 0,
        # tiles
        TILE=tile, TMA=tma, PRECISION=precision(rows.hidden.dtype), num_warps=tile.warps, num_stages=tile.stages,
    )


@kernel("hidden", "weight", "grads", "hidden_size")
def _sampled_gradients_kernel(
    hidden,  # in: [R, D] descriptor or pointer
    weight,  # in: [K, D] descriptor or pointer
    head,  # in: Head
    column_ptr,  # in: [K] int64
    inverse_share_ptr,  # in: [K] fp32
    labels_ptr,  # in: [N] int64
    index_ptr,  # in: [R] int32
    num_labelled_ptr,  # in: [1] int32
    threshold_ptr,  # in: [N] fp32
    max_ptr,  # in: [N] fp32
    log_sum_ptr,  # in: [N] fp32
    coef_ptr,  # in: [4, N] fp32
    factors_ptr,  # in: [4] fp32, as in ``Factors``; COLUMNS is read; or None
    grads,  # out: [R, K] descriptor or pointer
    num_rows,
    hidden_size,
    num_columns,
    start,
    MASK_V: tl.constexpr,
    TILE: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    BLOCK_N: tl.constexpr = TILE.rows
    BLOCK_V: tl.constexpr = TILE.cols
    # Compute a tile [BLOCK_N, BLOCK_V] of g. Neighbouring programs read the same tokens, so these come from memory once.
    num_col_blocks = tl.cdiv(num_columns, BLOCK_V)
    row = tl.program_id(0) // num_col_blocks * BLOCK_N
    col = tl.program_id(0) % num_col_blocks * BLOCK_V
    num_labelled = tl.load(num_labelled_ptr)
    if row >= num_labelled:
        return
    unused = (tl.load(factors_ptr + COLUMNS) == 0) if factors_ptr is not None else False
    if unused:
        return
    acc = tile_of_products(hidden, weight, row, col, num_rows, num_columns, hidden_size, TILE, TMA, PRECISION)
    offs_n = row + tl.arange(0, BLOCK_N)
    live = offs_n < num_labelled
    token = tl.load(index_ptr + offs_n, mask=live, other=0)
    offs_k = col + tl.arange(0, BLOCK_V)
    in_k = offs_k < num_columns
    factors = token_factors(head, token, live)
    before, after = factors
    z = logits_of(acc, offs_k, in_k, head, factors, MASK_V)
    threshold = tl.load(threshold_ptr + token, mask=live, other=float("-inf"))
    row_max = tl.load(max_ptr + token, mask=live, other=0)
    log_sum = tl.load(log_sum_ptr + token, mask=live, other=0)
    coef_p = tl.load(coef_ptr + token, mask=live, other=0) * before
    label = tl.load(labels_ptr + token, mask=live, other=-1) - start
    column = tl.load(column_ptr + offs_k, mask=in_k, other=-1)
    inverse_share = tl.load(inverse_share_ptr + offs_k, mask=in_k, other=0)
    if factors_ptr is not None:
        inverse_share *= tl.load(factors_ptr + COLUMNS)
    dropped = (z < threshold[:, None]) & (column.to(tl.int32)[None, :] != label.to(tl.int32)[:, None])
    p = tl.where(dropped, tl.exp((z - row_max[:, None]) - log_sum[:, None]), 0.0)
    if head.softcap is not None:
        p = sloped(p, z, head, after[:, None])
    store_tile(
        grads,
        row,
        col,
        p * coef_p[:, None] * inverse_share[None, :],
        num_rows,
        num_columns,
        num_columns,
        BLOCK_N,
        BLOCK_V,
        TMA,
    )
