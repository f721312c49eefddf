"""The control variate that replaces the dropped part R [N, V] of a filtered gradient, and the samples that correct it.

    R_ij  ~  r_i q_j            r_i = sum_j R_ij,    q_j = sum_i |R_ij| / sum_ij |R_ij|

This rank-1 matrix has the right row sums and (upstream gradients of one sign) column sums, but gives every token the same mix
of columns. The tokens of a trained model differ: before a name the tail holds other words than before a number. So K columns
k are sampled with probabilities q_k, and S tokens s with probabilities p_s = |r_s| / sum_i |r_i|, and R is computed there:

    d_hidden_i  =  r_i c                + factor * sum_k (R_ik / q_k - r_i) / K * (weight_k - c)        c = sum_j q_j weight_j
    d_weight_j  =  q_j sum_i r_i e_i    + factor * sum_s (R_sj - r_s q_j) / (S p_s) * (e_s - e)         e = sum_i p_i e_i

where e_i is a hidden state, and each gradient has its own factor. The sums over k and s are Monte Carlo estimates of a matrix
product (Drineas, Kannan and Mahoney, 2006) with inverse-probability weights: with factors of 1 both gradients are unbiased.
The rank-1 matrix is their control variate: a sample adds the difference between R and that matrix. Row sums stay as they are
for d_hidden, and column sums for d_weight. R_ik is 0 where token i keeps column k. No operand is centered in memory: the
rank-1 part is subtracted from each term, and c times the sum of a token's terms from the result.

Samples add noise, and for some softmaxes nothing but noise. The estimate is a sum of independent terms, so the expected square
of its noise is the sum of their squares. The factor that minimises the expected error is the signal's share of the square:

    signal_share  =  1 - sum_ik |term_ik|^2 / sum_i |sum_k term_ik|^2        (at least 0; for d_weight likewise)

Most of the correction of d_hidden is linear. A tail that is reweighted by exp of a linear function of its token's hidden
state has

    R_ij  ~  r_i q_j (1 + linear * (e_i - e) . (weight_j - c))

to first order. With this better control variate each term loses its linear part, too, and what all columns have of that is
r_i * linear * (e_i - e) covariance, with covariance = sum_j q_j (weight_j - c)(weight_j - c)^T, estimated from more columns
than the K. ``linear`` minimises the expected error. tests/kernels/test_filtered.py has sampling and factors in plain torch.

The tokens are the sample of ``shares.py``. The sampled columns' rows of the weight stand behind the frequent columns' in one
matrix [C, D]. The factors are estimated from the terms of the sampled tokens at the sampled columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from cce_dist.kernels import Operands, Rows
from cce_dist.kernels.blocks import halves, has_tma, kernel, operand, store_tile, tile_of_products
from cce_dist.kernels.d_weight import add_d_weight
from cce_dist.kernels.filter.lists import Decisions
from cce_dist.kernels.filter.shares import UNIT, Dropped, Sample, place, sum_of_parts
from cce_dist.kernels.head import logits_of, slope_of, token_factors
from cce_dist.kernels.tiles import Tile, cdiv, precision
from cce_dist.kernels.tokens import weighted_sums

# Smaller factors become 0: these samples would leave more than three quarters of the error.
LEAST_SIGNAL = 0.25
# The linear correction is computed if tokens drop more than this share of their softmax: bf16 hides what it adds to less.
LEAST_DROPPED = 2.0**-7
LINEAR_FACTORS = 32  # factors of the linear correction that are tried, from 0 to 1


class Columns(NamedTuple):
    """The F frequent columns, then K sampled ones, C in all.

    Attributes:
        ids_C: int32: their indices. The sampled ones ascend, and a column may be sampled more than once.
        rows_CD: Rows of the weight.
        numbers_3K: [3, K] fp32: 1 / (K q); q; dot product of the row with the mean hidden state.
        shared_2D: [2, D] fp32: c, the mean row of the weight by share; sum_i r_i e_i divided by ``total``.
        total: [1] fp32: sum of ``Dropped.sums_V``.
    """

    ids_C: torch.Tensor
    rows_CD: torch.Tensor
    numbers_3K: torch.Tensor
    shared_2D: torch.Tensor
    total: torch.Tensor

    @property
    def num_frequent(self) -> int:
        return self.ids_C.shape[0] - self.numbers_3K.shape[1]

    def frequent(self) -> Columns:
        """Return the frequent columns alone."""
        first = self.num_frequent
        return self._replace(ids_C=self.ids_C[:first], rows_CD=self.rows_CD[:first], numbers_3K=self.numbers_3K[:, :0])

    def sampled(self) -> Columns:
        """Return the sampled columns alone."""
        first = self.num_frequent
        return self._replace(ids_C=self.ids_C[first:], rows_CD=self.rows_CD[first:])


def sample_columns(dropped: Dropped, sample: Sample, x: Operands, ids_F: torch.Tensor, size: int) -> Columns:
    """Sample ``size`` columns by share, by systematic sampling (Madow, 1949). Copy their and the frequent columns' rows."""
    partial_P1D = weighted_sums(dropped.sums_V, x.weight[: x.num_valid])
    device, num_frequent, (num_parts, _, hidden_size) = x.weight.device, ids_F.shape[0], partial_P1D.shape
    columns = Columns(
        torch.empty(num_frequent + size, dtype=torch.int32, device=device),
        torch.empty(num_frequent + size, hidden_size, dtype=x.weight.dtype, device=device),
        torch.empty(3, size, dtype=torch.float32, device=device),
        torch.empty_like(sample.means_2D),
        torch.empty(1, dtype=torch.float32, device=device),
    )
    _sample_columns_kernel[(num_frequent + size + cdiv(hidden_size, 64),)](
        dropped.sums_V, dropped.count_T, x.weight, ids_F, partial_P1D, sample.means_2D, None,
        columns,
        dropped.count_T.shape[0], x.num_valid, hidden_size, num_frequent, size, num_parts,
        RUN=dropped.run, BLOCK=1024, BLOCK_D=64,
    )
    return columns


def linear_of(
    dropped: Dropped, size: int, columns: Columns, num_used: torch.Tensor, sample: Sample, x: Operands, tile: Tile
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the covariance of ``size`` sampled columns, and its product with the mean hidden state.

    If ``num_used`` is 0 both are 0, and cost nothing.
    """
    rows_QD = torch.empty(size, x.weight.shape[1], dtype=x.weight.dtype, device=x.weight.device)
    _sample_columns_kernel[(size,)](
        dropped.sums_V, dropped.count_T, x.weight, columns.ids_C, None, None, columns.shared_2D,
        columns._replace(rows_CD=rows_QD),
        dropped.count_T.shape[0], x.num_valid, x.weight.shape[1], 0, size, 0,
        RUN=dropped.run, BLOCK=1024, BLOCK_D=64,
    )
    covariance_DD = torch.empty(2 * rows_QD.shape[1:], dtype=rows_QD.dtype, device=rows_QD.device)
    rows = Rows(columns.ids_C, num_used, rows_QD)  # the product takes all rows, in order, so it reads no index
    add_d_weight(covariance_DD, rows_QD, rows, None, tile, add=False)
    return covariance_DD, weighted_sums(sample.means_2D[1], covariance_DD).sum((0, 1))


@kernel("sums_ptr", "weight_ptr", "partial_ptr", "means_ptr", "center_ptr", "hidden_size")
def _sample_columns_kernel(
    sums_ptr,  # in: [V] fp32
    count_ptr,  # in: [runs] int64
    weight_ptr,  # in: [V, D]
    frequent_ptr,  # in: [F] int64 or int32
    partial_ptr,  # in: [P, D] fp32, or None
    means_ptr,  # in: [2, D] fp32, as in ``Sample``
    center_ptr,  # in: [D] fp32; with it only rows are written, less this one, / sqrt(size); or None
    columns,  # out: Columns
    num_runs,
    num_valid,
    hidden_size,
    num_frequent,
    size,
    num_parts,
    RUN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # The first programs copy a frequent column each, the next ones sample and copy a column each, and the others average
    # BLOCK_D elements of the weight's rows.
    number = tl.program_id(0) - num_frequent
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
            tl.store(columns.shared_2D + offs_d, center, mask=in_d)
            by_share = tl.load(means_ptr + offs_d, mask=in_d, other=0) * inverse
            tl.store(columns.shared_2D + hidden_size + offs_d, by_share, mask=in_d)
            if number == size:
                tl.store(columns.total, total)
        return
    share = tl.full((), 1.0, tl.float32)
    column = tl.zeros((), tl.int32)
    if number < 0:
        column = tl.load(frequent_ptr + tl.program_id(0)).to(tl.int32)
    else:
        # Find the run that the sample falls in, then its column.
        wanted = (2 * number.to(tl.int64) + 1) * (count // (2 * size))
        run, before = place(count_ptr, num_runs, 1.0, wanted, BLOCK)
        begin = run * RUN
        column, _ = place(sums_ptr + begin, tl.minimum(RUN, num_valid - begin), 1.0, wanted - before, RUN)
        column += begin
        share = tl.load(sums_ptr + column) * inverse
    along = tl.zeros((BLOCK,), tl.float32)
    rows_ptr = columns.rows_CD + tl.program_id(0).to(tl.int64) * hidden_size
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
        tl.store(rows_ptr + offs_d, row.to(weight_ptr.dtype.element_ty), mask=in_d)
    if center_ptr is None:
        tl.store(columns.ids_C + tl.program_id(0), column)
        if number >= 0:
            tl.store(columns.numbers_3K + number, tl.where(share > 0, 1 / (size * share), 0.0))
            tl.store(columns.numbers_3K + size + number, share)
            tl.store(columns.numbers_3K + 2 * size + number, tl.sum(along, 0))


def along(x: Operands, columns: Columns, sample: Sample) -> torch.Tensor:
    """Return the dot products of c with each hidden state less the mean hidden state. -> [N] fp32"""
    along_N = torch.empty(x.num_tokens, dtype=torch.float32, device=x.hidden.device)
    _along_kernel[(x.num_tokens,)](
        x.hidden, columns.shared_2D, sample.means_2D, along_N, x.hidden.shape[1], BLOCK_D=1024, num_warps=4
    )
    return along_N


@kernel("hidden_ptr", "center_ptr", "means_ptr", "hidden_size")
def _along_kernel(
    hidden_ptr,  # in: [N, D]
    center_ptr,  # in: [D] fp32
    means_ptr,  # in: [2, D] fp32, as in ``Sample``; the second row is read
    along_ptr,  # out: [N] fp32
    hidden_size,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK_D,), tl.float32)
    for first in range(0, hidden_size, BLOCK_D):
        offs_d = first + tl.arange(0, BLOCK_D)
        in_d = offs_d < hidden_size
        h = tl.load(hidden_ptr + row * hidden_size + offs_d, mask=in_d, other=0).to(tl.float32)
        h -= tl.load(means_ptr + hidden_size + offs_d, mask=in_d, other=0)
        total += h * tl.load(center_ptr + offs_d, mask=in_d, other=0)
    tl.store(along_ptr + row, tl.sum(total, 0))


class Compensation(NamedTuple):
    """The control variate for the dropped gradients, and its corrections.

    Attributes:
        sums_V: As in ``shares.Dropped``.
        columns: Columns whose gradients are computed for all tokens.
        sample: The sampled tokens, or None without a control variate.
        parts_SV: The sampled tokens' parts, as ``shares.dropped_columns`` writes them; None: no correction of d_weight.
        factors_4: Factors of the corrections, as ``factors_of`` returns them, or None without any.
        covariance_DD, line_D: The linear correction of d_hidden, as ``linear_of`` returns it, or None.
        along_N: As ``along`` returns it, or None.
    """

    sums_V: torch.Tensor
    columns: Columns
    sample: Sample | None = None
    parts_SV: torch.Tensor | None = None
    factors_4: torch.Tensor | None = None
    covariance_DD: torch.Tensor | None = None
    line_D: torch.Tensor | None = None
    along_N: torch.Tensor | None = None


# Indices of a tensor of factors: on the terms of the sampled columns; on the parts of the sampled tokens (the factor itself,
# then what ``parts_SV`` is multiplied by); on the linear correction.
COLUMNS, TOKENS, GAIN, LINEAR = (tl.constexpr(i) for i in range(4))


def column_gradients(
    columns: Columns, rows: Rows, x: Operands, how: Decisions, factors_4: torch.Tensor | None, along_N: torch.Tensor | None,
    tile: Tile, grads_RC: torch.Tensor, sums_BR: torch.Tensor,
) -> None:
    """Write the gradients of frequent columns, and the terms of sampled columns, at the tokens of the group.

    Args:
        factors_4: COLUMNS and LINEAR are read; where COLUMNS is 0, terms are 0 or not written. None: both are 1.
        along_N: With the linear correction: dot products of c with hidden states, less their mean. Else None.
        grads_RC: out. Rows at or past ``num_labelled`` are 0 up to the end of their tile, and unwritten after it.
        sums_BR: out: sums of each token's terms in each block of columns of the tile, fp32.
    """
    num_rows, hidden_size = rows.hidden.shape
    rows_CD, num_columns = columns.rows_CD, columns.rows_CD.shape[0]
    tma = has_tma(rows.hidden, rows_CD, grads_RC)
    _column_gradients_kernel[(cdiv(num_rows, tile.rows) * cdiv(num_columns, tile.cols),)](
        # in
        operand(rows.hidden, tile.rows, tile.inner, tma), operand(rows_CD, tile.cols, tile.inner, tma), x.head,
        columns, x.ids, rows.index, rows.num_labelled, how, factors_4, along_N,
        # out
        operand(grads_RC, tile.rows, tile.cols // 4, tma), sums_BR,
        # sizes
        num_rows, x.num_tokens, hidden_size, num_columns, columns.num_frequent, x.start,
        # tiles
        TILE=tile, TMA=tma, PRECISION=precision(rows.hidden.dtype), num_warps=tile.warps, num_stages=tile.stages,
    )


@kernel("hidden", "rows", "along_ptr", "grads", "sums_ptr", "hidden_size")
def _column_gradients_kernel(
    hidden,  # in: [R, D] descriptor or pointer
    rows,  # in: [C, D] descriptor or pointer
    head,  # in: Head
    columns,  # in: Columns
    labels_ptr,  # in: [N] int64
    index_ptr,  # in: [R] int32
    num_labelled_ptr,  # in: [1] int32
    how,  # in: Decisions
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
    coef_p = tl.load(how.coef_4N + token, mask=live, other=0) * before
    coef_label = tl.load(how.coef_4N + num_tokens.to(tl.int64) + token, mask=live, other=0) * before
    threshold = tl.load(how.numbers_3N + token, mask=live, other=float("-inf"))
    dropped = tl.load(how.dropped_N + token, mask=live, other=0)
    # Rows without a label get a maximum of +inf, which makes all of their p 0.
    row_max = tl.load(how.max_N + token, mask=live, other=float("inf"))
    log_sum = tl.load(how.log_sum_N + token, mask=live, other=0)
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
        column = tl.load(columns.ids_C + offs_c, mask=offs_c < num_columns, other=-2)
        inverse = tl.load(columns.numbers_3K + offs_k, mask=is_sampled, other=0) * factor

        # The rank-1 part of each term; with the linear correction it is of rank 2.
        rank_1 = tl.where(is_sampled, factor / num_sampled.to(tl.float32), 0.0)[None, :]
        if along_ptr is not None:
            of_column = tl.load(columns.numbers_3K + 2 * num_sampled + offs_k, mask=is_sampled, other=0)
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


def factors_of(
    terms: list[torch.Tensor], sample: Sample, columns: Columns, num_covariance: int, *, of_columns: bool, of_tokens: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors, [4] fp32, and ``num_covariance``, or 0 if LINEAR is 0, as [1] int32.

    Args:
        terms: [S, K] as ``column_gradients`` writes them for the sampled tokens and columns. With ``num_covariance`` a second
            matrix, whose terms have lost their linear part.
        num_covariance: Q. The squared noise of their covariance is K / Q of the noise of a covariance of the K columns.
        of_columns: Whether the sampled columns correct d_hidden.
        of_tokens: Whether the sampled tokens correct d_weight.
    """
    (num_rows, hidden_size), num_columns, device = sample.rows_SD.shape, terms[0].shape[1], sample.rows_SD.device
    factors_4 = torch.empty(4, dtype=torch.float32, device=device)
    num_used = torch.empty(1, dtype=torch.int32, device=device)
    block, block_d = 64, 256 // sample.rows_SD.itemsize
    blocks_d = cdiv(hidden_size, block_d)
    column_programs = cdiv(num_rows, block) * blocks_d * of_columns
    programs = column_programs + cdiv(num_columns, block) * blocks_d * of_tokens
    squares_6P = torch.empty(6, programs, dtype=torch.float32, device=device)
    _factors_kernel[(programs,)](
        # in
        terms[0], terms[1] if num_covariance else None, columns,
        # in, out
        sample, squares_6P,
        # out
        factors_4, num_used,
        # sizes
        num_rows, num_columns, hidden_size, column_programs, num_covariance, LEAST_SIGNAL, LEAST_DROPPED,
        # options
        LINEAR_FACTORS=LINEAR_FACTORS,
        # tiles
        BLOCK=block, BLOCK_D=block_d, BLOCK_P=1024, PRECISION=precision(sample.rows_SD.dtype),
        num_warps=8 if num_covariance else 4, num_stages=2,
    )
    return factors_4, num_used


@kernel("terms_ptr", "last_ptr", "num_columns", "hidden_size")
def _factors_kernel(
    terms_ptr,  # in: [S, K]
    last_ptr,  # in: [S, K]: terms without their linear part, or None
    columns,  # in: Columns, the sampled ones
    sample,  # in: Sample; the programs that are done are counted
    squares_ptr,  # in, out: [6, programs] fp32
    factors_ptr,  # out: [4] fp32
    num_used_ptr,  # out: [1] int32
    num_rows,
    num_columns,
    hidden_size,
    column_programs,
    num_covariance,
    least_signal,
    least_dropped,
    LINEAR_FACTORS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PRECISION: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    is_used = tl.load(sample.size) > 0
    # The first programs take the estimate of d_hidden, a sum over columns for each token, the others that of d_weight.
    if program < column_programs:
        _write_squares(
            terms_ptr, last_ptr, num_columns, 1, sample.numbers_3S, None, columns.rows_CD, columns.shared_2D, program,
            squares_ptr + program, num_rows, tl.where(is_used, num_columns, 0), hidden_size, BLOCK, BLOCK_D, PRECISION,
        )
    else:
        _write_squares(
            terms_ptr, None, 1, num_columns, columns.numbers_3K + num_columns, sample.numbers_3S, sample.rows_SD,
            sample.means_2D + hidden_size, program - column_programs, squares_ptr + program, num_columns,
            tl.where(is_used, num_rows, 0), hidden_size, BLOCK, BLOCK_D, PRECISION,
        )
    tl.debug_barrier()
    if tl.atomic_add(sample.size + 1, 1, sem="acq_rel") == programs - 1:
        # The last program adds the squares up, in order.
        linear = 0.0
        signal = _sum_of(squares_ptr, 0, column_programs, BLOCK_P)
        noise = _sum_of(squares_ptr + 3 * programs, 0, column_programs, BLOCK_P)
        of_columns = _signal_share(signal, noise, least_signal)
        if last_ptr is not None:
            # Signal and noise of (1 - x) terms + x last terms, for each factor x on the linear correction.
            number = tl.arange(0, LINEAR_FACTORS)
            x = number.to(tl.float32) / (LINEAR_FACTORS - 1)
            both = _sum_of(squares_ptr + programs, 0, column_programs, BLOCK_P)
            last = _sum_of(squares_ptr + 2 * programs, 0, column_programs, BLOCK_P)
            both_noise = _sum_of(squares_ptr + 4 * programs, 0, column_programs, BLOCK_P)
            last_noise = _sum_of(squares_ptr + 5 * programs, 0, column_programs, BLOCK_P)
            signals = signal * (1 - x) * (1 - x) + 2 * both * x * (1 - x) + last * x * x
            noises = noise * (1 - x) * (1 - x) + 2 * both_noise * x * (1 - x) + last_noise * x * x
            part = _signal_share(signals, noises, least_signal)
            # The error that is left: the samples' noise if they are used, otherwise the uncorrected rest; plus the
            # covariance's noise.
            left = tl.where(part > 0, part * noises, tl.maximum(signals - noises, 0.0))
            left += x * x * (noise - 2 * both_noise + last_noise) * (num_columns / num_covariance)
            best = tl.argmin(tl.where(left >= 0, left, float("inf")), 0)
            best = tl.where(tl.load(sample.mass_2 + 1) > least_dropped, best, 0)
            linear = tl.sum(tl.where(number == best, x, 0.0), 0)
            of_columns = tl.sum(tl.where(number == best, part, 0.0), 0)
        signal = _sum_of(squares_ptr, column_programs, programs, BLOCK_P)
        noise = _sum_of(squares_ptr + 3 * programs, column_programs, programs, BLOCK_P)
        of_tokens = _signal_share(signal, noise, least_signal)
        total = tl.load(columns.total)
        gain = tl.where((total > 0) & (of_tokens > 0), of_tokens * tl.load(sample.mass_2) / total, 0.0)
        tl.store(factors_ptr + COLUMNS, of_columns)
        tl.store(factors_ptr + TOKENS, of_tokens)
        tl.store(factors_ptr + GAIN, gain)
        tl.store(factors_ptr + LINEAR, linear)
        tl.store(num_used_ptr, tl.where(linear > 0, num_covariance, 0))


@triton.jit
def _write_squares(
    terms_ptr,  # [O, I] with the two strides
    last_ptr,  # likewise, or None
    outer_stride,
    inner_stride,
    weight_ptr,  # [O] fp32; where it is 0 terms are not read
    scale_ptr,  # [I] fp32, or None for 1; where it is 0 neither terms nor rows are read
    rows_ptr,  # [I, D]
    center_ptr,  # [D] fp32
    block,
    squares_ptr,
    num_outer,
    num_inner,
    hidden_size,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the square of an estimate, and of its noise, for a block of BLOCK o and BLOCK_D elements of the rows.

    For each o, the estimate is sum_i term_oi (rows_i - center) with term_oi = terms_oi |scale_i|, and its square counts
    |weight_o|. The noise is the sum of the squares of all its terms. With ``last_ptr`` also the products of both estimates, and
    the squares of the last one. Three numbers of estimates and then three of their noise, ``tl.num_programs(0)`` apart.
    """
    num_blocks = tl.cdiv(hidden_size, BLOCK_D)
    offs_o = block // num_blocks * BLOCK + tl.arange(0, BLOCK)
    offs_d = block % num_blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    in_d = offs_d < hidden_size
    weight = tl.abs(tl.load(weight_ptr + offs_o, mask=offs_o < num_outer, other=0))[:, None]
    center = tl.load(center_ptr + offs_d, mask=in_d, other=0)
    estimate = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    noise = tl.zeros((BLOCK,), tl.float32)
    last_estimate = estimate
    both_noise = noise
    last_noise = noise
    # estimate [BLOCK, BLOCK_D] = terms [BLOCK, I] @ centered rows [I, BLOCK_D], BLOCK of I at a time
    for first in range(0, num_inner, BLOCK):
        offs_i = first + tl.arange(0, BLOCK)
        scale = (offs_i < num_inner).to(tl.float32)
        if scale_ptr is not None:
            scale = tl.abs(tl.load(scale_ptr + offs_i, mask=offs_i < num_inner, other=0))
        in_i = scale != 0
        in_row = in_i[:, None] & in_d[None, :]
        row = tl.load(rows_ptr + offs_i.to(tl.int64)[:, None] * hidden_size + offs_d[None, :], mask=in_row, other=0)
        row = tl.where(in_row, row.to(tl.float32) - center[None, :], 0.0).to(row.dtype)
        length = tl.sum(row.to(tl.float32) * row.to(tl.float32), 1)
        where = offs_o[:, None] * outer_stride + offs_i[None, :] * inner_stride
        mask = (weight != 0) & in_i[None, :]
        term = (tl.load(terms_ptr + where, mask=mask, other=0).to(tl.float32) * scale[None, :]).to(row.dtype)
        estimate = tl.dot(term, row, estimate, input_precision=PRECISION)
        weighted = term.to(tl.float32) * weight
        noise += tl.sum(weighted * term.to(tl.float32), 0) * length
        if last_ptr is not None:
            last = (tl.load(last_ptr + where, mask=mask, other=0).to(tl.float32) * scale[None, :]).to(row.dtype)
            last_estimate = tl.dot(last, row, last_estimate, input_precision=PRECISION)
            both_noise += tl.sum(weighted * last.to(tl.float32), 0) * length
            last_noise += tl.sum(last.to(tl.float32) * last.to(tl.float32) * weight, 0) * length
    stride = tl.num_programs(0)
    tl.store(squares_ptr, tl.sum(weight * estimate * estimate))
    tl.store(squares_ptr + 3 * stride, tl.sum(noise, 0))
    if last_ptr is not None:
        tl.store(squares_ptr + stride, tl.sum(weight * estimate * last_estimate))
        tl.store(squares_ptr + 2 * stride, tl.sum(weight * last_estimate * last_estimate))
        tl.store(squares_ptr + 4 * stride, tl.sum(both_noise, 0))
        tl.store(squares_ptr + 5 * stride, tl.sum(last_noise, 0))


@triton.jit
def _sum_of(numbers_ptr, first, stop, BLOCK_P: tl.constexpr):
    """Add up numbers that other programs wrote: they are not in this multiprocessor's cache."""
    total = tl.zeros((BLOCK_P,), tl.float32)
    for begin in range(first, stop, BLOCK_P):
        offs_p = begin + tl.arange(0, BLOCK_P)
        total += tl.load(numbers_ptr + offs_p, mask=offs_p < stop, other=0, cache_modifier=".cg")
    return tl.sum(total, 0)


@triton.jit
def _signal_share(signal, noise, least_signal):
    """Return ``signal_share``; NaN becomes 0."""
    factor = 1 - noise / tl.where(signal > 0, signal, float("inf"))
    return tl.where((factor > least_signal) & (signal > 0), factor, 0.0)
