"""Corrections of the rank-1 control variate: sampled columns for d_hidden, the sampled tokens of ``shares.py`` for d_weight.

    d_hidden_i  =  sum_k term_ik weight_k  +  (r_i - sum_k term_ik) c        term_ik = factor / K * (R_ik / q_k - r_i)
    d_weight_j  =  q_j sum_i r_i e_i  +  factor * sum_s part_sj e_s          part_sj: ``shares.Dropped.parts_SV``, of all r

``compensation.py`` derives both. The K columns are sampled by their shares, so none is frequent. Their rows of the weight
stand behind the frequent columns' in one matrix [C, D], C = F + K, so one kernel computes the gradients of both.

Both factors come from the terms of the sampled tokens at the sampled columns: d_hidden's from tokens, which were sampled by
|r|, d_weight's from columns, which were sampled by q. Inverse-probability weights make each the estimate for all of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from cce_dist.kernels import Operands, Rows, Softmax
from cce_dist.kernels.blocks import halves, has_tma, kernel, operand, store_tile, tile_of_products
from cce_dist.kernels.filter import compensation
from cce_dist.kernels.filter.frequent import Frequent
from cce_dist.kernels.filter.shares import UNIT, Dropped, Sample, place, sum_of_parts
from cce_dist.kernels.head import logits_of, slope_of, token_factors
from cce_dist.kernels.tiles import Tile, num_programs, precision
from cce_dist.kernels.waves import cdiv


class Columns(NamedTuple):
    """The frequent columns, then K sampled ones.

    Attributes:
        frequent_F: [F] int64: the frequent columns.
        sampled_K: [K] int32, ascending; a column may be sampled more than once.
        numbers_3K: [3, K] fp32: 1 / (K q); q; dot product of the row with the mean hidden state.
        rows_CD: Rows of the weight.
        shared_2D: [2, D] fp32: c, the mean row of the weight by share; sum_i r_i e_i divided by ``total``.
        total: [1] fp32: sum of ``Dropped.sums_V``.
    """

    frequent_F: torch.Tensor
    sampled_K: torch.Tensor
    numbers_3K: torch.Tensor
    rows_CD: torch.Tensor
    shared_2D: torch.Tensor
    total: torch.Tensor

    @property
    def sampled_KD(self) -> torch.Tensor:
        """The sampled columns' rows of the weight."""
        return self.rows_CD[self.frequent_F.shape[0] :]


def sample_columns(
    dropped: Dropped, partial_P1D: torch.Tensor, sample: Sample, x: Operands, frequent: Frequent, size: int
) -> Columns:
    """Sample columns by share, by systematic sampling (Madow, 1949), and copy their rows of the weight.

    ``partial_P1D``: partial sums of the weight's rows by ``Dropped.sums_V``.
    """
    device, (num_parts, _, hidden_size) = x.weight.device, partial_P1D.shape
    columns = Columns(
        frequent.ids_F,
        torch.empty(size, dtype=torch.int32, device=device),
        torch.empty(3, size, dtype=torch.float32, device=device),
        frequent.rows_CD,
        torch.empty_like(sample.means_2D),
        torch.empty(1, dtype=torch.float32, device=device),
    )
    _sample_columns_kernel[(size + cdiv(hidden_size, 64),)](
        dropped.sums_V, dropped.count_T, x.weight, partial_P1D, sample.means_2D, None,
        columns.sampled_KD, columns.sampled_K, columns.numbers_3K, columns.shared_2D, columns.total,
        dropped.count_T.shape[0], x.num_valid, hidden_size, size, num_parts,
        RUN=dropped.run, BLOCK=1024, BLOCK_D=64,
    )
    return columns


def centered_rows(dropped: Dropped, columns: Columns, x: Operands, size: int) -> torch.Tensor:
    """Return the rows of the weight of ``size`` sampled columns, less c, divided by the root of ``size``. -> [Q, D]"""
    hidden_size = x.weight.shape[1]
    rows_QD = torch.empty(size, hidden_size, dtype=x.weight.dtype, device=x.weight.device)
    _sample_columns_kernel[(size,)](
        dropped.sums_V, dropped.count_T, x.weight, None, None, columns.shared_2D,
        rows_QD, None, None, None, None,
        dropped.count_T.shape[0], x.num_valid, hidden_size, size, 0,
        RUN=dropped.run, BLOCK=1024, BLOCK_D=64,
    )
    return rows_QD


@kernel("sums_ptr", "weight_ptr", "partial_ptr", "means_ptr", "center_ptr", "rows_ptr", "shared_ptr", "hidden_size")
def _sample_columns_kernel(
    sums_ptr,  # in: [V] fp32
    count_ptr,  # in: [runs] int64
    weight_ptr,  # in: [V, D]
    partial_ptr,  # in: [P, D] fp32
    means_ptr,  # in: [2, D] fp32, as in ``Sample``
    center_ptr,  # in: [D] fp32; with it rows alone are written, as ``centered_rows`` returns them; or None
    rows_ptr,  # out: [size, D]
    column_ptr,  # out: [K] int32; this and the next ones as in ``Columns``
    number_ptr,  # out: [3, K] fp32
    shared_ptr,  # out: [2, D] fp32
    total_ptr,  # out: [1] fp32
    num_runs,
    num_valid,
    hidden_size,
    size,
    num_parts,
    RUN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # The first programs sample and copy a column each, the others average BLOCK_D elements of the weight's rows.
    number = tl.program_id(0)
    counts = tl.zeros((BLOCK,), tl.int64)
    for first in range(0, num_runs, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        counts += tl.load(count_ptr + offs, mask=offs < num_runs, other=0)
    count = tl.sum(counts, 0)
    total = count.to(tl.float32) / UNIT
    inverse = tl.where(total > 0, 1 / total, 0.0)
    if number >= size:
        if partial_ptr is not None:
            offs_d = (number - size) * BLOCK_D + tl.arange(0, BLOCK_D)
            in_d = offs_d < hidden_size
            center = sum_of_parts(partial_ptr, num_parts, hidden_size, offs_d, in_d, 64) * inverse
            tl.store(shared_ptr + offs_d, center, mask=in_d)
            by_share = tl.load(means_ptr + offs_d, mask=in_d, other=0) * inverse
            tl.store(shared_ptr + hidden_size + offs_d, by_share, mask=in_d)
            if number == size:
                tl.store(total_ptr, total)
        return
    # Find the run that the sample falls in, then its column.
    wanted = (2 * number.to(tl.int64) + 1) * (count // (2 * size))
    run, before = place(count_ptr, num_runs, 1.0, wanted, BLOCK)
    begin = run * RUN
    column, _ = place(sums_ptr + begin, tl.minimum(RUN, num_valid - begin), 1.0, wanted - before, RUN)
    column += begin
    share = tl.load(sums_ptr + column) * inverse
    along = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, hidden_size, BLOCK):
        offs_d = first + tl.arange(0, BLOCK)
        in_d = offs_d < hidden_size
        # If nothing is dropped, the column is any column, whose row may hold NaN.
        read = tl.where(share > 0, in_d, False)
        row = tl.load(weight_ptr + column.to(tl.int64) * hidden_size + offs_d, mask=read, other=0).to(tl.float32)
        if center_ptr is not None:
            row = (row - tl.load(center_ptr + offs_d, mask=in_d, other=0)) / tl.sqrt(size.to(tl.float32))
        else:
            along += row * tl.load(means_ptr + hidden_size + offs_d, mask=in_d, other=0)
        tl.store(rows_ptr + number.to(tl.int64) * hidden_size + offs_d, row.to(rows_ptr.dtype.element_ty), mask=in_d)
    if number_ptr is not None:
        tl.store(column_ptr + number, column)
        tl.store(number_ptr + number, tl.where(share > 0, 1 / (size * share), 0.0))
        tl.store(number_ptr + size + number, share)
        tl.store(number_ptr + 2 * size + number, tl.sum(along, 0))


class SampledTokens(NamedTuple):
    """The sampled tokens' correction of d_weight, without its factor.

    Attributes:
        parts_SV: As in ``shares.Dropped``.
        rows: The sampled tokens.
    """

    parts_SV: torch.Tensor
    rows: Rows


# Indices of a tensor of factors: on the terms of the sampled columns; on the parts of the sampled tokens (the factor itself,
# then what ``parts_SV`` is multiplied by); on the linear correction.
COLUMNS, TOKENS, GAIN, LINEAR = (tl.constexpr(i) for i in range(4))


class Given(NamedTuple):
    """What the gradients of a batch's columns depend on.

    Attributes:
        x: Operands.
        softmax: Statistics of the whole vocabulary.
        coef_4N: Coefficients; P and LABEL are read.
        numbers_3N: As in ``lists.Decisions``; the first row, the threshold, is read.
        dropped_N: r.
    """

    x: Operands
    softmax: Softmax
    coef_4N: torch.Tensor
    numbers_3N: torch.Tensor
    dropped_N: torch.Tensor


def tile_of_sample(tile: Tile) -> Tile:
    """Return the tile of ``column_gradients`` for the few tokens of a sample: a small one, so that they are many programs."""
    return tile._replace(rows=min(64, tile.rows), cols=min(64, tile.cols), warps=min(4, tile.warps))


def column_gradients(
    columns: Columns, rows: Rows, given: Given, factors_4: torch.Tensor | None, along_N: torch.Tensor | None, tile: Tile,
    grads_RC: torch.Tensor, sums_BR: torch.Tensor, *, num_frequent: int,
) -> None:
    """Write the gradients of frequent columns, and the terms of sampled columns, at the tokens of the group.

    Args:
        columns: The columns. With ``num_frequent`` of 0 only the sampled ones.
        factors_4: COLUMNS and LINEAR are read; where COLUMNS is 0, terms are 0 or not written. None: both are 1.
        along_N: With the linear correction: dot products of c with hidden states, less their mean. Else None.
        grads_RC: out. Rows at or past ``num_labelled`` are 0 up to the end of their tile, and unwritten after it.
        sums_BR: out: sums of each token's terms in each block of columns of the tile, fp32.
    """
    x, rows_CD = given.x, columns.rows_CD if num_frequent else columns.sampled_KD
    num_rows, hidden_size = rows.hidden.shape
    num_columns = rows_CD.shape[0]
    tma = has_tma(rows.hidden, rows_CD, grads_RC)
    _column_gradients_kernel[(cdiv(num_rows, tile.rows) * cdiv(num_columns, tile.cols),)](
        # in
        operand(rows.hidden, tile.rows, tile.inner, tma), operand(rows_CD, tile.cols, tile.inner, tma), x.head,
        columns.frequent_F, columns.sampled_K, columns.numbers_3K, x.ids, rows.index, rows.num_labelled, given.softmax,
        given.coef_4N, given.numbers_3N, given.dropped_N, factors_4, along_N,
        # out
        operand(grads_RC, tile.rows, tile.cols // 4, tma), sums_BR,
        # sizes
        num_rows, x.num_tokens, hidden_size, num_columns, num_frequent, x.start,
        # tiles
        TILE=tile, TMA=tma, PRECISION=precision(rows.hidden.dtype), num_warps=tile.warps, num_stages=tile.stages,
    )


@kernel("hidden", "rows", "along_ptr", "grads", "sums_ptr", "hidden_size")
def _column_gradients_kernel(
    hidden,  # in: [R, D] descriptor or pointer
    rows,  # in: [C, D] descriptor or pointer
    head,  # in: Head
    frequent_ptr,  # in: [F] int64
    sampled_ptr,  # in: [K] int32
    number_ptr,  # in: [3, K] fp32, as in ``Columns``
    labels_ptr,  # in: [N] int64
    index_ptr,  # in: [R] int32
    num_labelled_ptr,  # in: [1] int32
    softmax,  # in: Softmax
    coef_ptr,  # in: [4, N] fp32
    threshold_ptr,  # in: [N] fp32: the first row of a matrix
    dropped_ptr,  # in: [N] fp32
    factors_ptr,  # in: [4] fp32, or None
    along_ptr,  # in: [N] fp32, or None
    grads,  # out: [R, C] descriptor or pointer
    sums_ptr,  # out: [blocks of columns, R] fp32
    num_rows,
    num_tokens,
    hidden_size,
    num_columns,
    num_frequent,
    start,
    TILE: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    BLOCK_N: tl.constexpr = TILE.rows
    BLOCK_V: tl.constexpr = TILE.cols
    # Neighbouring programs read the same tokens, so these come from memory once.
    num_col_blocks = tl.cdiv(num_columns, BLOCK_V)
    row = tl.program_id(0) // num_col_blocks * BLOCK_N
    col = tl.program_id(0) % num_col_blocks * BLOCK_V
    num_labelled = tl.load(num_labelled_ptr)
    factor = tl.full((), 1.0, tl.float32)
    linear = factor
    if factors_ptr is not None:
        factor = tl.load(factors_ptr + COLUMNS)
        linear = tl.load(factors_ptr + LINEAR)
    if (row >= num_labelled) | ((col >= num_frequent) & (factor == 0)):
        return
    acc = tile_of_products(hidden, rows, row, col, num_rows, num_columns, hidden_size, TILE, TMA, PRECISION)
    offs_n = row + tl.arange(0, BLOCK_N)
    live = offs_n < num_labelled
    token = tl.load(index_ptr + offs_n, mask=live, other=0)
    factors = token_factors(head, token, live)
    before, after = factors
    coef_p = tl.load(coef_ptr + token, mask=live, other=0) * before
    coef_label = tl.load(coef_ptr + num_tokens.to(tl.int64) + token, mask=live, other=0) * before
    threshold = tl.load(threshold_ptr + token, mask=live, other=float("-inf"))
    dropped = tl.load(dropped_ptr + token, mask=live, other=0)
    # Rows without a label get a maximum of +inf, which makes all of their p 0.
    row_max = tl.load(softmax.max + token, mask=live, other=float("inf"))
    log_sum = tl.load(softmax.log_sum + token, mask=live, other=0)
    label = (tl.load(labels_ptr + token, mask=live, other=-1) - start).to(tl.int32)
    along = dropped
    if along_ptr is not None:
        along = tl.load(along_ptr + token, mask=live, other=0)

    num_sampled = num_columns - num_frequent
    sums = tl.zeros((BLOCK_N,), tl.float32)
    # The epilogue takes half a tile at a time: numbers of all its columns beside the tile spill registers.
    for half in tl.static_range(2):
        part = halves(acc)[half]
        offs_c = col + half * (BLOCK_V // 2) + tl.arange(0, BLOCK_V // 2)
        offs_k = offs_c - num_frequent
        is_frequent = offs_c < num_frequent
        is_sampled = (offs_k >= 0) & (offs_c < num_columns)
        frequent = tl.load(frequent_ptr + offs_c, mask=is_frequent, other=0).to(tl.int32)
        column = tl.where(is_frequent, frequent, tl.load(sampled_ptr + offs_k, mask=is_sampled, other=-2))
        inverse = tl.load(number_ptr + offs_k, mask=is_sampled, other=0) * factor

        # The rank-1 part of each term; with the linear correction it is of rank 2.
        rank_1 = tl.where(is_sampled, factor / num_sampled.to(tl.float32), 0.0)[None, :]
        if along_ptr is not None:
            of_column = tl.load(number_ptr + 2 * num_sampled + offs_k, mask=is_sampled, other=0)
            rank_1 = rank_1 * (1 + linear * (part - of_column[None, :] - along[:, None]))
        z = logits_of(part, offs_c, offs_c < num_columns, head, factors, False)
        is_label = column[None, :] == label[:, None]
        p = tl.exp((z - row_max[:, None]) - log_sum[:, None]) * tl.where(is_frequent, 1.0, inverse)[None, :]
        p = tl.where(is_frequent[None, :] | ((z < threshold[:, None]) & (is_label == 0)), p, 0.0)
        grad = coef_p[:, None] * p + tl.where(is_label & is_frequent[None, :], coef_label[:, None], 0.0)
        if head.softcap is not None:
            grad *= slope_of(z, head, after[:, None])
        grad -= dropped[:, None] * rank_1
        stored = grad.to(hidden.dtype if TMA else hidden.dtype.element_ty).to(tl.float32)
        sums += tl.sum(tl.where(is_sampled[None, :], stored, 0.0), 1)
        store_tile(
            grads, row, col + half * (BLOCK_V // 2), grad, num_rows, num_columns, num_columns, BLOCK_N, BLOCK_V // 2, TMA
        )
    sums_ptr += (tl.program_id(0) % num_col_blocks).to(tl.int64) * num_rows
    tl.store(sums_ptr + offs_n, sums, mask=live)


def squares(
    terms: list[torch.Tensor], weight: torch.Tensor, scale: torch.Tensor | None, rows_ID: torch.Tensor,
    center_D: torch.Tensor, size: torch.Tensor,
) -> torch.Tensor:
    """Return partial sums of the square of an estimate, and of its terms' squares, for ``factors_of``.

    For each o, the estimate is sum_i terms_oi |scale_i| (rows_i - center), and its square counts |weight_o|. So the square of
    all is a sum over i and j, and the terms' squares are the part where i = j:

        sum_ij  (sum_o |weight_o| terms_oi terms_oj)  |scale_i scale_j|  (rows_i - center) . (rows_j - center)

    Args:
        terms: [O, I]. With a second matrix [O, I] there are three estimates, whose terms go in two even steps from the first
            matrix's to the second's.
        weight: [O] fp32; where it is 0 terms are not read.
        scale: [I] fp32, or None for 1. Where it is 0, neither terms nor rows are read.
        rows_ID: The rows.
        center_D: fp32.
        size: ``Sample.size``; if it is 0, the result is 0.

    Returns:
        [estimates, 2, P] fp32.
    """
    num_rows, hidden_size = rows_ID.shape
    block = 64
    blocks = cdiv(num_rows, block)
    # Few rows make few tiles, so the products of rows are cut along the hidden size, which they are summed over.
    parts = max(1, min(cdiv(hidden_size, 4 * block), 3 * num_programs(rows_ID.device) // (blocks * blocks)))
    steps = 3 if len(terms) > 1 else 1
    squares_S2P = torch.empty(steps, 2, blocks * blocks * parts, dtype=torch.float32, device=rows_ID.device)
    _squares_kernel[(blocks * blocks, parts)](
        terms[0], terms[-1], weight, scale, rows_ID, center_D, size,
        squares_S2P,
        weight.shape[0], num_rows, hidden_size, *terms[0].stride(), squares_S2P.shape[2],
        STEPS=steps, BLOCK=block, PRECISION=precision(rows_ID.dtype), num_warps=8, num_stages=3,
    )
    return squares_S2P


@kernel("rows_ptr", "center_ptr", "hidden_size")
def _squares_kernel(
    terms_ptr,  # in: [O, I]
    last_ptr,  # in: [O, I], the same strides
    weight_ptr,  # in: [O] fp32
    scale_ptr,  # in: [I] fp32, or None
    rows_ptr,  # in: [I, D]
    center_ptr,  # in: [D] fp32
    size_ptr,  # in: [1] int32
    squares_ptr,  # out: [STEPS, 2, P] fp32
    num_outer,
    num_rows,
    hidden_size,
    outer_stride,
    row_stride,
    num_parts,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    num_blocks = tl.cdiv(num_rows, BLOCK)
    left = tl.program_id(0) // num_blocks * BLOCK + tl.arange(0, BLOCK)
    right = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    left_scale = (left < num_rows).to(tl.float32)
    right_scale = (right < num_rows).to(tl.float32)
    if scale_ptr is not None:
        left_scale = tl.abs(tl.load(scale_ptr + left, mask=left < num_rows, other=0))
        right_scale = tl.abs(tl.load(scale_ptr + right, mask=right < num_rows, other=0))
    # of_rows [BLOCK, BLOCK] = centered rows [BLOCK, D] @ centered rows [BLOCK, D].T, over this program's part of D
    of_rows = tl.zeros((BLOCK, BLOCK), tl.float32)
    live = tl.load(size_ptr) > 0
    for first in range(tl.program_id(1) * BLOCK, tl.where(live, hidden_size, 0), tl.num_programs(1) * BLOCK):
        offs_d = first + tl.arange(0, BLOCK)
        a = _centered(rows_ptr, left, left_scale != 0, center_ptr, offs_d, hidden_size)
        b = _centered(rows_ptr, right, right_scale != 0, center_ptr, offs_d, hidden_size)
        of_rows = tl.dot(a, b.T, of_rows, input_precision=PRECISION)
    of_rows *= left_scale[:, None] * right_scale[None, :]
    squares_ptr += tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    for step in tl.static_range(STEPS):
        # of_terms [BLOCK, BLOCK] = terms [O, BLOCK].T @ weighted terms [O, BLOCK]
        of_terms = tl.zeros((BLOCK, BLOCK), tl.float32)
        for first in range(0, tl.where(live, num_outer, 0), BLOCK):
            offs_o = first + tl.arange(0, BLOCK)
            weight = tl.abs(tl.load(weight_ptr + offs_o, mask=offs_o < num_outer, other=0))
            where = offs_o.to(tl.int64)[:, None] * outer_stride
            a_at = where + left[None, :] * row_stride
            b_at = where + right[None, :] * row_stride
            in_a = (weight != 0)[:, None] & (left_scale != 0)[None, :]
            in_b = (weight != 0)[:, None] & (right_scale != 0)[None, :]
            a = tl.load(terms_ptr + a_at, mask=in_a, other=0).to(tl.float32)
            b = tl.load(terms_ptr + b_at, mask=in_b, other=0).to(tl.float32)
            if step > 0:
                a += (tl.load(last_ptr + a_at, mask=in_a, other=0).to(tl.float32) - a) * (step / (STEPS - 1))
                b += (tl.load(last_ptr + b_at, mask=in_b, other=0).to(tl.float32) - b) * (step / (STEPS - 1))
            a = (a * weight[:, None]).to(rows_ptr.dtype.element_ty)
            of_terms = tl.dot(a.T, b.to(rows_ptr.dtype.element_ty), of_terms, input_precision=PRECISION)
        products = of_terms * of_rows
        tl.store(squares_ptr, _sum_of_all(products))
        tl.store(squares_ptr + num_parts, _sum_of_all(tl.where(left[:, None] == right[None, :], products, 0.0)))
        squares_ptr += 2 * num_parts


@triton.jit
def _centered(rows_ptr, number, used, center_ptr, offs_d, hidden_size):
    """Load the elements ``offs_d`` of the rows ``number`` of a matrix, and subtract the center; rows not used are 0."""
    mask = used[:, None] & (offs_d < hidden_size)[None, :]
    row = tl.load(rows_ptr + number.to(tl.int64)[:, None] * hidden_size + offs_d[None, :], mask=mask, other=0)
    center = tl.load(center_ptr + offs_d, mask=offs_d < hidden_size, other=0)
    return tl.where(mask, row.to(tl.float32) - center[None, :], 0.0).to(row.dtype)


@triton.jit
def _sum_of_all(tile):
    """Return the sum of a tile. Summing one dimension at a time does not compile for capability 10 (Triton 3.6)."""
    return tl.sum(tl.reshape(tile, (tile.shape[0] * tile.shape[1],)), 0)


def factors_of(
    of_columns: torch.Tensor | None, of_tokens: torch.Tensor | None, sample: Sample, columns: Columns, num_covariance: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors, [4] fp32, and ``num_covariance``, or 0 if LINEAR is 0, as [1] int32.

    ``of_columns`` and ``of_tokens``: what ``squares`` returns for the columns' and the tokens' correction, or None.
    ``num_covariance``: Q. The squared noise of their covariance is K / Q of the noise of a covariance of the K columns.
    """
    factors_4 = torch.empty(4, dtype=torch.float32, device=sample.mass_2.device)
    num_used = torch.empty(1, dtype=torch.int32, device=sample.mass_2.device)
    _factors_kernel[(1,)](
        of_columns, of_tokens, sample.mass_2, columns.total,
        factors_4, num_used,
        *(0 if squares is None else squares.shape[2] for squares in (of_columns, of_tokens)),
        columns.sampled_K.shape[0], num_covariance, compensation.LEAST_SIGNAL, compensation.LEAST_DROPPED,
        HAS_LINEAR=of_columns is not None and of_columns.shape[0] > 1, LINEAR_FACTORS=compensation.LINEAR_FACTORS, BLOCK_P=1024,
    )
    return factors_4, num_used


@kernel("columns_ptr", "tokens_ptr")
def _factors_kernel(
    columns_ptr,  # in: [1 or 3, 2, P] fp32, or None
    tokens_ptr,  # in: [1, 2, P] fp32, or None
    mass_ptr,  # in: [2] fp32, as in ``Sample``
    total_ptr,  # in: [1] fp32
    factors_ptr,  # out: [4] fp32
    num_used_ptr,  # out: [1] int32
    columns_parts,
    tokens_parts,
    num_columns,
    num_covariance,
    least_signal,
    least_dropped,
    HAS_LINEAR: tl.constexpr,
    LINEAR_FACTORS: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    of_columns = 0.0
    of_tokens = 0.0
    gain = 0.0
    linear = 0.0
    if columns_ptr is not None:
        signal, noise = _signal_and_noise(columns_ptr, columns_parts, 0, BLOCK_P)
        if HAS_LINEAR:
            # Signal and noise are quadratic in the factor x on the linear correction, so three of each give them for all x.
            half_signal, half_noise = _signal_and_noise(columns_ptr, columns_parts, 1, BLOCK_P)
            last_signal, last_noise = _signal_and_noise(columns_ptr, columns_parts, 2, BLOCK_P)
            number = tl.arange(0, LINEAR_FACTORS)
            x = number.to(tl.float32) / (LINEAR_FACTORS - 1)
            signals = _quadratic(x, signal, half_signal, last_signal)
            noises = _quadratic(x, noise, half_noise, last_noise)
            part = _signal_share(signals, noises, least_signal)
            # The error that is left: the samples' noise, or what they say of the rest if they are not used; and the
            # covariance's noise.
            left = tl.where(part > 0, part * noises, tl.maximum(signals - noises, 0.0))
            left += 2 * x * x * (noise + last_noise - 2 * half_noise) * (num_columns / num_covariance)
            best = tl.argmin(tl.where(left >= 0, left, float("inf")), 0)
            best = tl.where(tl.load(mass_ptr + 1) > least_dropped, best, 0)
            linear = tl.sum(tl.where(number == best, x, 0.0), 0)
            of_columns = tl.sum(tl.where(number == best, part, 0.0), 0)
        else:
            of_columns = _signal_share(signal, noise, least_signal)
    if tokens_ptr is not None:
        signal, noise = _signal_and_noise(tokens_ptr, tokens_parts, 0, BLOCK_P)
        of_tokens = _signal_share(signal, noise, least_signal)
        total = tl.load(total_ptr)
        gain = tl.where(total > 0, of_tokens * tl.load(mass_ptr) / total, 0.0)
    tl.store(factors_ptr + COLUMNS, of_columns)
    tl.store(factors_ptr + TOKENS, of_tokens)
    tl.store(factors_ptr + GAIN, gain)
    tl.store(factors_ptr + LINEAR, linear)
    tl.store(num_used_ptr, tl.where(linear > 0, num_covariance, 0))


@triton.jit
def _signal_and_noise(squares_ptr, num_parts, step, BLOCK_P: tl.constexpr):
    """Add up the partial sums of a step."""
    signal = tl.zeros((BLOCK_P,), tl.float32)
    noise = tl.zeros((BLOCK_P,), tl.float32)
    squares_ptr += 2 * step * num_parts
    for first in range(0, num_parts, BLOCK_P):
        offs_p = first + tl.arange(0, BLOCK_P)
        signal += tl.load(squares_ptr + offs_p, mask=offs_p < num_parts, other=0)
        noise += tl.load(squares_ptr + num_parts + offs_p, mask=offs_p < num_parts, other=0)
    return tl.sum(signal, 0), tl.sum(noise, 0)


@triton.jit
def _quadratic(x, first, half, last):
    """Return the value at x of the quadratic function with three given values at 0, 1/2 and 1."""
    return first * (1 - x) * (1 - 2 * x) + 4 * half * x * (1 - x) + last * x * (2 * x - 1)


@triton.jit
def _signal_share(signal, noise, least_signal):
    """Return ``signal_share`` of ``compensation.py``; NaN becomes 0."""
    factor = 1 - noise / tl.where(signal > 0, signal, float("inf"))
    return tl.where((factor > least_signal) & (signal > 0), factor, 0.0)
