"""The logits' gradients at the ids of each token, where a token has several ids.

    dL/du = scale * slope * (P p + g - ENTROPY p (log p + H)),  p = exp(z - max - log_sum)

with z the id's own logit, saved in fp32 by forward, and g the gradient of its log-probability. No id is repeated within a row
(``outputs.distinct``), so each cell is written once and the result depends on no order. The products that follow take the ids'
parts of d_hidden and d_weight from these cells.

In 16 bits the whole formula is computed again: the cell's ``P p`` has been rounded, and nearly cancels with g at a likely id.
In fp32 g is added to the cell: p, log p and H must come from the same logits, and the saved logit was summed in another order.
"""

from __future__ import annotations

import torch
import triton.language as tl

from cce_dist.kernels import Operands, Rows, Softmax
from cce_dist.kernels.blocks import kernel
from cce_dist.kernels.head import slope_of, token_factors
from cce_dist.kernels.tiles import cdiv


def write_cells(
    x: Operands, rows: Rows, softmax: Softmax, coef_4N: torch.Tensor, first_col: int, dlogits_RV: torch.Tensor,
    scale_R: torch.Tensor | None = None,
) -> None:
    """Write the gradient at each token's ids among the columns from ``first_col`` on, divided by ``scale_R`` if given."""
    assert x.cells is not None
    num_cols = dlogits_RV.shape[1]
    num_ids = x.cells.ids_NI.shape[1]
    _cells_kernel[(cdiv(rows.index.shape[0] * num_ids, 256),)](
        x.cells, x.head, rows.index, rows.num_labelled, softmax, coef_4N, scale_R,
        dlogits_RV,
        num_ids, x.num_tokens, dlogits_RV.stride(0), x.start + first_col, min(num_cols, x.num_valid - first_col),
        ADD=scale_R is None and dlogits_RV.dtype == torch.float32, BLOCK=256,
    )


@kernel()
def _cells_kernel(
    cells,  # in: Cells
    head,  # in: Head
    index_ptr,  # in: [R] int32
    num_labelled_ptr,  # in: [1] int32
    softmax,  # in: Softmax
    coef_ptr,  # in: [4, N] fp32
    scale_ptr,  # in: [R] fp32, or None
    dlogits_ptr,  # out, some cells: [R, columns]
    num_ids,
    num_tokens,
    dlogits_stride,
    start,
    num_cols,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = offs // num_ids
    live = row < tl.load(num_labelled_ptr)
    token = tl.load(index_ptr + row, mask=live, other=0)
    where = token.to(tl.int64) * num_ids + offs % num_ids
    id = tl.load(cells.ids_NI + where, mask=live, other=-1)
    column = id - start
    here = live & (id >= 0) & (column >= 0) & (column < num_cols)

    z = tl.load(cells.target_NI + where, mask=here, other=0)
    if ADD:
        grad = tl.load(cells.grad_NI + where, mask=here, other=0)
    else:
        log_p = (z - tl.load(softmax.max + token, mask=here, other=0)) - tl.load(softmax.log_sum + token, mask=here, other=0)
        p = tl.exp(log_p)
        coef = coef_ptr + token
        grad = tl.load(coef, mask=here, other=0) * p + tl.load(cells.grad_NI + where, mask=here, other=0)
        if softmax.entropy is not None:
            entropy = tl.load(softmax.entropy + token, mask=here, other=0)
            coef_entropy = tl.load(coef + 3 * num_tokens.to(tl.int64), mask=here, other=0)
            # Avoid 0 * -inf = NaN where p underflows.
            grad -= coef_entropy * tl.where(p > 0, p * (log_p + entropy), 0.0)
    before, after = token_factors(head, token, here)
    grad *= before * after
    if head.softcap is not None:
        grad *= slope_of(z, head, after)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + row, mask=here, other=0)
        grad = tl.where(scale == 0, 0.0, grad / scale)
    cell = dlogits_ptr + row.to(tl.int64) * dlogits_stride + tl.where(here, column, 0)
    if ADD:
        grad += tl.load(cell, mask=here, other=0)
    tl.store(cell, grad.to(dlogits_ptr.dtype.element_ty), mask=here)
