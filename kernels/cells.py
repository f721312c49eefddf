"""The gradients of several ids of each token, written over the logits' gradients of their cells.

    dL/du = scale * slope * (P p + g - ENTROPY p (log p + H)),  p = exp(z - max - log_sum)

with z the id's own logit, saved in fp32 by forward, and g the gradient of its log-probability. An id stands once in a row
(``extras.distinct``), so that each cell is written once, and nothing depends on an order. The products that follow take
d_hidden and d_weight of the ids from these cells.

16 bits would round ``P p`` before g is added, and the two nearly cancel at a likely id: such a cell is computed anew. In fp32 g
is added to what stands there, since p, log p and H have to come from the same logits, and the id's own logit is another sum.
"""

from __future__ import annotations

import torch
import triton.language as tl

from cce_dist.kernels import Operands, Rows, Softmax
from cce_dist.kernels.blocks import kernel, softcap_slope
from cce_dist.kernels.budget import cdiv


def write_cells(
    x: Operands, rows: Rows, softmax: Softmax, coef_4N: torch.Tensor, first_col: int, dlogits_RV: torch.Tensor,
    scale_R: torch.Tensor | None = None,
) -> None:
    """Set the cells of each token's ids among the columns from ``first_col`` on; a ``scale_R`` turns them into gradients."""
    assert x.cells is not None
    logits, num_cols = x.logits, dlogits_RV.shape[1]
    ids_NI, target_NI, grad_NI = x.cells
    num_ids = ids_NI.shape[1]
    _cells_kernel[(cdiv(rows.index.shape[0] * num_ids, 256),)](
        ids_NI, target_NI, grad_NI, rows.index, rows.num_kept, softmax.max, softmax.log_sum, softmax.entropy, coef_4N,
        x.factors_N2, scale_R,
        dlogits_RV,
        num_ids, x.num_tokens, dlogits_RV.stride(0), logits.start + first_col, min(num_cols, logits.num_valid - first_col),
        logits.logit_scale, logits.softcap,
        HAS_SOFTCAP=logits.softcap > 0.0, HAS_ENTROPY=softmax.entropy is not None, HAS_FACTORS=x.factors_N2 is not None,
        HAS_SCALE=scale_R is not None, ADD=scale_R is None and dlogits_RV.dtype == torch.float32, BLOCK=256,
    )


@kernel()
def _cells_kernel(
    ids_ptr,  # in: [N, I] int64
    target_ptr,  # in: [N, I] fp32
    grad_ptr,  # in: [N, I] fp32
    index_ptr,  # in: [R] int32
    num_kept_ptr,  # in: [1] int32
    max_ptr,  # in: [N] fp32
    log_sum_ptr,  # in: [N] fp32
    entropy_ptr,  # in: [N] fp32
    coef_ptr,  # in: [4, N] fp32
    factor_ptr,  # in: [N, 2] fp32
    scale_ptr,  # in: [R] fp32
    dlogits_ptr,  # out, some cells: [R, columns]
    num_ids,
    num_tokens,
    dlogits_stride,
    start,
    num_cols,
    logit_scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = offs // num_ids
    live = row < tl.load(num_kept_ptr)
    token = tl.load(index_ptr + row, mask=live, other=0)
    where = token.to(tl.int64) * num_ids + offs % num_ids
    id = tl.load(ids_ptr + where, mask=live, other=-1)
    column = id - start
    here = live & (id >= 0) & (column >= 0) & (column < num_cols)

    z = tl.load(target_ptr + where, mask=here, other=0)
    if ADD:
        grad = tl.load(grad_ptr + where, mask=here, other=0)
    else:
        log_p = (z - tl.load(max_ptr + token, mask=here, other=0)) - tl.load(log_sum_ptr + token, mask=here, other=0)
        p = tl.exp(log_p)
        coef = coef_ptr + token
        grad = tl.load(coef, mask=here, other=0) * p + tl.load(grad_ptr + where, mask=here, other=0)
        if HAS_ENTROPY:
            entropy = tl.load(entropy_ptr + token, mask=here, other=0)
            coef_entropy = tl.load(coef + 3 * num_tokens.to(tl.int64), mask=here, other=0)
            # A probability that underflows would make 0 * -inf.
            grad -= coef_entropy * tl.where(p > 0, p * (log_p + entropy), 0.0)
    if HAS_FACTORS:
        factor = factor_ptr + 2 * token.to(tl.int64)
        logit_scale = tl.load(factor, mask=here, other=1)
        if HAS_SOFTCAP:
            after = tl.load(factor + 1, mask=here, other=1)
            logit_scale *= after
            softcap *= after
    grad *= logit_scale
    if HAS_SOFTCAP:
        grad *= softcap_slope(z, softcap)
    if HAS_SCALE:
        scale = tl.load(scale_ptr + row, mask=here, other=0)
        grad = tl.where(scale == 0, 0.0, grad / scale)
    cell = dlogits_ptr + row.to(tl.int64) * dlogits_stride + tl.where(here, column, 0)
    if ADD:
        grad += tl.load(cell, mask=here, other=0)
    tl.store(cell, grad.to(dlogits_ptr.dtype.element_ty), mask=here)
