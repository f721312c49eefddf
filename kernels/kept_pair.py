"""What is kept of both heads' logits from the forward (``divergence.py``), made into the gradient of the student's.

Two 16-bit numbers of each cell are kept: the larger of the two exponentials, relative to the largest logits of their heads up
to that tile, and the difference of the two exponents. p, t and log p - log t follow from them, whatever the log-sum-exps turn
out to be. The difference itself is kept, and no second exponential: where the heads nearly agree, it is nearly 0, and p - t is
as precise as p. Its rounding, in fp16, is at most 2^-11 of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from cce_dist.kernels import Rows
from cce_dist.kernels.blocks import kernel, softcap_slope
from cce_dist.kernels.budget import cdiv
from cce_dist.kernels.heads import FARTHEST, Divergence, Heads, Pair
from cce_dist.kernels.kept import SMALLEST

FORWARD, REVERSE, JSD, MIXTURE = (tl.constexpr(i) for i in range(4))  # tasks: the kinds, and jsd's second pass
TASKS = {"forward": FORWARD, "reverse": REVERSE, "jsd": JSD}
BLOCK_N = 16  # rows of a program that writes gradients
_FARTHEST = tl.constexpr(FARTHEST)


class KeptPair(NamedTuple):
    """What is kept of the first columns. Rows are the tokens that count, in order.

    Attributes:
        exp_NV: [N, columns], hidden states' dtype: the larger exponential; no columns where nothing is kept.
        difference_NV: [N, columns], fp16 beside bf16: the student's exponent less the teacher's.
        tops_2BN: [2, B, N] fp32: the logits that the exponents of a tile are relative to, the student's and the teacher's.
    """

    exp_NV: torch.Tensor
    difference_NV: torch.Tensor
    tops_2BN: torch.Tensor

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self)


def new_kept_pair(x: Heads, columns: int, tile_cols: int) -> KeptPair:
    """Return room for so many columns, or what stands for none kept."""
    hidden, num_tokens = x.student.hidden, x.student.num_tokens
    dtype = torch.float16 if hidden.dtype == torch.bfloat16 else hidden.dtype
    return KeptPair(
        hidden.new_empty(num_tokens, columns),
        hidden.new_empty(num_tokens, columns, dtype=dtype),
        hidden.new_empty(2, cdiv(columns, tile_cols), num_tokens, dtype=torch.float32),
    )


@triton.jit
def above_mixture(below, share):
    """log q - log m, where the other is ``below`` = log other - log q; see ``heads.above_mixture``.

    Its error is absolute, a rounding of 1, as that of any log-probability.
    """
    return -tl.log(1.0 + share * (tl.exp(tl.minimum(below, _FARTHEST)) - 1.0))


def kept_gradients(
    kept: KeptPair, x: Heads, rows: Rows, pair: Pair, coef_N: torch.Tensor, spec: Divergence, first_col: int,
    dlogits_RV: torch.Tensor,
) -> None:  # fmt: skip
    """Fill dlogits_RV with the gradients of the columns from ``first_col``, a multiple of the tile, to the last one kept."""
    logits, (num_rows, num_kept) = x.student.logits, kept.exp_NV.shape
    num_tiles = kept.tops_2BN.shape[1]
    tile_cols = num_kept // num_tiles
    grid = (cdiv(num_rows, BLOCK_N), cdiv(min(dlogits_RV.shape[1], num_kept - first_col), tile_cols))
    _kept_pair_kernel[grid](
        kept.exp_NV, kept.difference_NV, kept.tops_2BN, rows.index, rows.num_kept, *pair, coef_N,
        dlogits_RV,
        num_rows, num_kept, num_tiles, dlogits_RV.shape[1], first_col,
        logits.logit_scale, logits.softcap, spec.beta,
        TASK=TASKS[spec.kind].value, HAS_SOFTCAP=logits.softcap > 0.0, BLOCK_N=BLOCK_N, BLOCK_V=tile_cols,
    )  # fmt: skip


@kernel("exp_ptr", "difference_ptr", "dlogits_ptr", "num_cols", "dlogits_cols", "first_col")
def _kept_pair_kernel(
    exp_ptr,  # in: [R, B * BLOCK_V]
    difference_ptr,  # in: [R, B * BLOCK_V]
    top_ptr,  # in: [2, B, R] fp32
    index_ptr,  # in: [R] int32
    num_kept_ptr,  # in: [1] int32
    max_s_ptr,  # in: [N] fp32; also the next five
    log_sum_s_ptr,
    max_t_ptr,
    log_sum_t_ptr,
    offset_ptr,
    coef_ptr,
    dlogits_ptr,  # out: [R, columns of the chunk]
    num_rows,
    num_cols,
    num_tiles,
    dlogits_cols,
    first_col,
    logit_scale,
    softcap,
    beta,
    TASK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    col = tl.program_id(1) * BLOCK_V
    tile = first_col // BLOCK_V + tl.program_id(1)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = offs_n < tl.load(num_kept_ptr)
    token = tl.load(index_ptr + offs_n, mask=live, other=0)
    stride = num_rows.to(tl.int64)
    top_s = tl.load(top_ptr + tile * stride + offs_n, mask=live, other=0)
    top_t = tl.load(top_ptr + (num_tiles + tile) * stride + offs_n, mask=live, other=0)
    # log p and log t of an exponential of 1
    one_s = (top_s - tl.load(max_s_ptr + token, mask=live, other=0)) - tl.load(
        log_sum_s_ptr + token, mask=live, other=0
    )
    one_t = (top_t - tl.load(max_t_ptr + token, mask=live, other=0)) - tl.load(
        log_sum_t_ptr + token, mask=live, other=0
    )
    offset = tl.load(offset_ptr + token, mask=live, other=0)
    coef = tl.load(coef_ptr + token, mask=live, other=0) * logit_scale

    offs_v = tl.arange(0, BLOCK_V)[None, :]
    cells = offs_n.to(tl.int64)[:, None] * num_cols + first_col + col + offs_v
    e = tl.load(exp_ptr + cells, mask=live[:, None], other=0).to(tl.float32)
    difference = tl.load(difference_ptr + cells, mask=live[:, None], other=0).to(tl.float32)
    p = e * tl.exp(one_s[:, None] + tl.minimum(difference, 0.0))
    ratio = difference + (one_s - one_t)[:, None]  # log p - log t
    if TASK == FORWARD:
        # p - t, from the larger of the two.
        t = e * tl.exp(one_t[:, None] - tl.maximum(difference, 0.0))
        grad = tl.where(ratio > 0, p, -t) * (1.0 - tl.exp(-tl.abs(ratio)))
    elif TASK == REVERSE:
        grad = tl.where(p == 0, 0.0, p * (ratio - offset[:, None]))
    else:
        coef *= 1.0 - beta
        grad = tl.where(p == 0, 0.0, p * (above_mixture(-ratio, beta) - offset[:, None]))
    grad *= coef[:, None]
    if HAS_SOFTCAP:
        z = tl.log(tl.maximum(e, SMALLEST)) + tl.minimum(difference, 0.0) + top_s[:, None]
        grad *= softcap_slope(z, softcap)
    # Where both logits are -inf, their difference is no number; padding is such a column.
    grad = tl.where(e < SMALLEST, 0.0, grad)
    here = dlogits_ptr + offs_n.to(tl.int64)[:, None] * dlogits_cols + col + offs_v
    tl.store(
        here, grad.to(dlogits_ptr.dtype.element_ty), mask=(offs_n < num_rows)[:, None] & (col + offs_v < dlogits_cols)
    )
