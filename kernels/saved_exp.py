"""Turn exponentials saved by forward (``lse.py``) into an operand of backward's matrix products.

With e = exp(z - reference) * slope saved for a row, the row's gradient is ``scale * e`` with one ``scale`` per row, apart from
the label's cell. So the exponentials are the operand. d_hidden is multiplied by the scale in the epilogue; d_weight takes
scaled hidden states. The label's cell is written from the label's own logit, so a second backward gets the same bits.

If the entropy is differentiated, the row's gradient is ``scale * e * (a + b log e)``, since log p is log e plus a number per
row. Backward then overwrites the exponentials with ``e * (a + b log e)`` and sets ``SavedExp.overwritten``. A second backward
computes the exponentials again, with the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from cce_dist.kernels import Operands, Rows, Softmax, Upstream
from cce_dist.kernels.blocks import LOG_2, fast_log2, has_fast_math, kernel, rows_with_zeros
from cce_dist.kernels.head import slope_of, token_factors
from cce_dist.kernels.lse import HEADROOM
from cce_dist.kernels.tiles import MAX_SIDE, cdiv
from cce_dist.kernels.tokens import coefficients_of, strides_of

SMALLEST = tl.constexpr(2.0**-126)  # normal number of fp32 and bf16


class SavedExp(NamedTuple):
    """What forward saves: the compact order, and exponentials of the first columns in this order."""

    index_N: torch.Tensor  # int32, from ``tokens.compact``: labelled tokens first
    num_labelled: torch.Tensor  # [2] int32, from ``tokens.compact``
    exp_NV: torch.Tensor  # [N, columns]; no columns if nothing is saved
    reference_N: torch.Tensor  # fp32: what a row's exponentials are relative to; or empty
    target_N: torch.Tensor  # fp32: the logit of each token's label, by token, not compact; or empty
    # [1] int32: 1 once backward has overwritten the exponentials with gradients; None without entropy
    overwritten: torch.Tensor | None = None

    def listed(self) -> list[torch.Tensor]:
        return [tensor for tensor in self if tensor is not None]

    @property
    def order(self) -> list[torch.Tensor]:
        return [self.index_N, self.num_labelled]

    def of_group(self, number: int, rows: int) -> SavedExp:
        """Return the exponentials of group ``number``, where groups have ``rows`` tokens."""
        here = slice(number * rows, (number + 1) * rows)
        return self._replace(exp_NV=self.exp_NV[here], reference_N=self.reference_N[here])


class Leveling(NamedTuple):
    """A group's exponentials, whose tiles may have different references, and where the final one is written."""

    exp_RV: torch.Tensor  # in, out
    tile_reference_BR: torch.Tensor  # in: the reference of each tile's exponentials, fp32
    reference_R: torch.Tensor  # out: each row's largest reference, fp32
    tile_cols: int


@triton.jit
def leveled(
    exp_ptr, tile_reference_ptr, reference_ptr, offs_n, live, num_rows, num_tiles, exp_cols,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr,
):
    """Rescale the exponentials of rows, [BLOCK_N], to each row's largest reference, and store the reference."""
    row_stride = num_rows.to(tl.int64)
    largest = tl.full((BLOCK_T, BLOCK_N), float("-inf"), tl.float32)
    smallest = tl.full((BLOCK_T, BLOCK_N), float("inf"), tl.float32)
    # Largest and smallest reference of each row, [BLOCK_N], over all tiles. They are equal in most rows.
    for first in range(0, num_tiles, BLOCK_T):
        offs_t = first + tl.arange(0, BLOCK_T)
        where = tile_reference_ptr + offs_t.to(tl.int64)[:, None] * row_stride + offs_n[None, :]
        mask = (offs_t < num_tiles)[:, None] & live[None, :]
        largest = tl.maximum(largest, tl.load(where, mask=mask, other=float("-inf")))
        smallest = tl.minimum(smallest, tl.load(where, mask=mask, other=float("inf")))
    reference = tl.max(largest, 0)
    tl.store(reference_ptr + offs_n, reference, mask=live)
    if tl.max((live & (tl.min(smallest, 0) != reference)).to(tl.int32), 0) > 0:
        for tile in range(0, num_tiles):
            tile_reference = tl.load(tile_reference_ptr + tile * row_stride + offs_n, mask=live, other=0)
            if tl.max((live & (tile_reference != reference)).to(tl.int32), 0) > 0:
                factor = tl.exp(tile_reference - reference)
                offs_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
                cells = exp_ptr + offs_n.to(tl.int64)[:, None] * exp_cols + offs_v[None, :]
                # The factor is at most 1, so no finite cell overflows.
                e = tl.load(cells, mask=live[:, None], other=0).to(tl.float32) * factor[:, None]
                tl.store(cells, e.to(exp_ptr.dtype.element_ty), mask=live[:, None])


def scaled_rows(
    saved: SavedExp, x: Operands, rows: Rows, softmax: Softmax, upstream: Upstream, vocab_size: int, *, gather: bool
) -> torch.Tensor:
    """Return scale_R, and with ``gather`` copy hidden states times scale_R to ``rows.hidden``; zeros fill the last tile's rest.

    Each label's cell of the exponentials is overwritten so that scale * cell is the label's gradient. If the entropy is
    differentiated, all cells are overwritten in this way, and ``write_cells`` writes the labels' cells.
    """
    num_rows, hidden_size = rows.index.shape[0], x.hidden.shape[1]
    factor_2R = None
    if softmax.entropy is not None:
        factor_2R = torch.empty(2, num_rows, dtype=torch.float32, device=x.hidden.device)
    labels, grad_NI, num_ids = x.ids, None, None
    if x.cells is not None:
        labels, grad_NI, num_ids = x.cells.ids_NI, x.cells.grad_NI, x.cells.ids_NI.shape[1]
    scale_R = torch.empty(num_rows, dtype=torch.float32, device=x.hidden.device)
    # A program of many columns computes the scales once, which takes long for several ids a token.
    col_blocks = cdiv(hidden_size, 256) if gather and num_ids is None else 1
    _scaled_rows_kernel[(cdiv(num_rows, 16), col_blocks)](
        # in
        x.hidden, saved.reference_N, saved.target_N, labels, x.head, rows.index, rows.num_labelled, softmax, *upstream, grad_NI,
        # out
        rows.hidden if gather else None, saved.exp_NV, scale_R, factor_2R,
        # sizes
        num_rows, hidden_size, saved.exp_NV.shape[1], x.start, x.num_valid, num_ids, *strides_of(upstream), vocab_size,
        MAX_SIDE=MAX_SIDE, BLOCK_R=16, BLOCK_D=256,
    )
    if factor_2R is not None:
        num_cols = saved.exp_NV.shape[1]
        _with_entropy_kernel[(num_rows * cdiv(num_cols, 2048),)](
            saved.exp_NV, factor_2R, rows.num_labelled, num_rows, num_cols, FAST=has_fast_math(), BLOCK_V=2048
        )
    return scale_R


@kernel("hidden_ptr", "rows_ptr", "exp_ptr", "scale_ptr", "hidden_size", "exp_cols")
def _scaled_rows_kernel(
    hidden_ptr,  # in: [N, D]
    reference_ptr,  # in: [R] fp32
    target_ptr,  # in: [N] fp32
    labels_ptr,  # in: [N] int64; [N, I] with num_ids
    head,  # in: Head
    index_ptr,  # in: [R] int32
    num_labelled_ptr,  # in: [1] int32
    softmax,  # in: Softmax
    d_nll_ptr,  # in: this and the next six: ``Upstream``, see _coefficients_kernel
    d_lse_ptr,
    d_target_ptr,
    d_uniform_ptr,
    d_entropy_ptr,
    d_mean_ptr,
    count_ptr,
    grad_ptr,  # in: [N, I] fp32, or None
    rows_ptr,  # out: [R, D], or None
    exp_ptr,  # out, one cell a row: [R, B * BLOCK_V]
    scale_ptr,  # out: [R] fp32
    row_factor_ptr,  # out: [2, R] fp32; with an entropy
    num_rows,
    hidden_size,
    exp_cols,
    start,
    num_valid,
    num_ids,  # I, or None for one label per token
    nll_stride,
    lse_stride,
    target_stride,
    uniform_stride,
    entropy_stride,
    vocab_size,
    MAX_SIDE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    num_labelled = tl.load(num_labelled_ptr)
    if tl.program_id(0) * BLOCK_R >= rows_with_zeros(num_labelled, MAX_SIDE):
        return
    offs_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    in_r = offs_r < num_rows
    live = offs_r < num_labelled
    token = tl.load(index_ptr + offs_r, mask=live, other=0)
    reference = tl.load(reference_ptr + offs_r, mask=live, other=0)
    target = tl.load(target_ptr + token, mask=live, other=0)
    row_max = tl.load(softmax.max + token, mask=live, other=0)
    log_sum = tl.load(softmax.log_sum + token, mask=live, other=0)
    before, after = token_factors(head, token, live)
    factor = before * after
    upstream = (d_nll_ptr, d_lse_ptr, d_target_ptr, d_uniform_ptr, d_entropy_ptr, d_mean_ptr, count_ptr)
    strides = (nll_stride, lse_stride, target_stride, uniform_stride, entropy_stride)
    coef_p, coef_label, _, coef_entropy = coefficients_of(upstream, strides, vocab_size, token, live)
    coef_p *= factor
    coef_entropy *= factor
    if num_ids is not None:
        coef_label = tl.zeros((BLOCK_R,), tl.float32)
        for which in range(0, num_ids):
            of_id = token.to(tl.int64) * num_ids + which
            label = tl.load(labels_ptr + of_id, mask=live, other=-1) - start
            here = live & (label >= 0) & (label < tl.minimum(num_valid, exp_cols))
            coef_label = tl.maximum(coef_label, tl.abs(tl.load(grad_ptr + of_id, mask=here, other=0)))
        here = live
    else:
        label = tl.load(labels_ptr + token, mask=live, other=-1) - start
        here = live & (label >= 0) & (label < tl.minimum(num_valid, exp_cols))
    coef_label *= factor

    if softmax.entropy is not None:
        log_p = (reference - row_max) - log_sum  # at a saved exponential of 1
        entropy = tl.load(softmax.entropy + token, mask=live, other=0)
        # Exponentials reach exp(HEADROOM), so no factor a + b log e exceeds this size. Divided by it, they are at most 1.
        size = tl.abs(coef_p) + tl.abs(coef_entropy) * (tl.abs(entropy) + tl.abs(log_p) + HEADROOM)
        scale = size * tl.exp(log_p)
    else:
        scale = coef_p * tl.exp((reference - row_max) - log_sum)
    # If the scale is nearly 0 (P = 0, or all logits of this shard far below another shard's maximum), the label's gradient
    # divided by it overflows. A scale of 2^-90 of the gradient fits in bf16, and adds less than 2^-32 of it to other cells.
    least = 8.077935669463161e-28 * tl.abs(coef_label)
    small = here & (tl.abs(scale) < least)
    if softmax.entropy is not None:
        share = tl.where(size == 0, 0.0, tl.where(small, scale / least, 1.0) / size)
    scale = tl.where(live, tl.where(small, least, scale), 0.0)
    # Programs of other columns compute the same scales. One of them stores what there is once a row.
    if tl.program_id(1) == 0:
        tl.store(scale_ptr + offs_r, scale, mask=live)
        if softmax.entropy is not None:
            a = (coef_p - coef_entropy * (log_p + entropy)) * share
            tl.store(row_factor_ptr + offs_r, a, mask=live)
            # _with_entropy_kernel takes logarithms to base 2.
            b = -coef_entropy * share * LOG_2
            tl.store(row_factor_ptr + num_rows.to(tl.int64) + offs_r, b, mask=live)
        elif num_ids is None:
            grad = coef_p * tl.exp((target - row_max) - log_sum) + coef_label
            if head.softcap is not None:
                grad *= slope_of(target, head, after)
            cell = tl.where(scale == 0, 0.0, grad / scale)
            of_label = exp_ptr + offs_r.to(tl.int64) * exp_cols + tl.where(here, label, 0)
            tl.store(of_label, cell.to(exp_ptr.dtype.element_ty), mask=here)

    if rows_ptr is not None:
        source = hidden_ptr + token.to(tl.int64)[:, None] * hidden_size
        scaled = rows_ptr + offs_r.to(tl.int64)[:, None] * hidden_size
        # Scale hidden [BLOCK_R, BLOCK_D] at a time.
        for inner in range(tl.program_id(1) * BLOCK_D, hidden_size, tl.num_programs(1) * BLOCK_D):
            offs_d = inner + tl.arange(0, BLOCK_D)
            in_d = (offs_d < hidden_size)[None, :]
            row = tl.load(source + offs_d[None, :], mask=live[:, None] & in_d, other=0).to(tl.float32) * scale[:, None]
            tl.store(scaled + offs_d[None, :], row.to(rows_ptr.dtype.element_ty), mask=in_r[:, None] & in_d)


@kernel("exp_ptr", "exp_cols")
def _with_entropy_kernel(
    exp_ptr,  # in, out: [R, B * BLOCK_V]
    row_factor_ptr,  # in: [2, R] fp32
    num_labelled_ptr,  # in: [1] int32
    num_rows,
    exp_cols,
    FAST: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    # Multiply BLOCK_V exponentials of one row by a + b log2(e). Programs that run together read contiguous memory.
    num_blocks = tl.cdiv(exp_cols, BLOCK_V)
    row = tl.program_id(0) // num_blocks
    if row >= tl.load(num_labelled_ptr):
        return
    offs_v = tl.program_id(0) % num_blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    a = tl.load(row_factor_ptr + row)
    b = tl.load(row_factor_ptr + num_rows.to(tl.int64) + row)
    cells = exp_ptr + row.to(tl.int64) * exp_cols + offs_v
    e = tl.load(cells, mask=offs_v < exp_cols, other=0).to(tl.float32)
    # Exponentials of 0 stay 0. Subnormal ones, whose logarithm a GPU computes as log 0, are negligible and become 0. Negative
    # ones are label cells that an earlier backward wrote; ``write_cells`` overwrites them.
    log_e = fast_log2(tl.maximum(e, SMALLEST), FAST)
    grad = tl.where(e < SMALLEST, 0.0, e * (a + b * log_e))
    tl.store(cells, grad.to(exp_ptr.dtype.element_ty), mask=offs_v < exp_cols)
