"""The linear correction of d_hidden: the covariance of the weight's rows, times how far a hidden state is from the mean.

    d_hidden_i  +=  r_i * linear * (e_i - e) @ covariance     covariance [D, D]  =  1 / Q  sum_q (weight_q - c) (weight_q - c)^T

``compensation.py`` derives it. The Q columns are sampled by their shares. The terms of the K columns of ``sampling.py`` lose
their linear part (``along``). Each token then needs only ``e_i @ covariance``: the product with the mean hidden state is the
same for all tokens, and subtracted from the row that they share.
"""

from __future__ import annotations

import torch
import triton.language as tl

from cce_dist.kernels import Operands, Rows
from cce_dist.kernels.blocks import kernel
from cce_dist.kernels.d_weight import add_d_weight
from cce_dist.kernels.filter.d_hidden import Linear
from cce_dist.kernels.filter.sampling import Columns, centered_rows
from cce_dist.kernels.filter.shares import Dropped, Sample
from cce_dist.kernels.tiles import Tile
from cce_dist.kernels.tokens import weighted_sums


def linear_of(
    dropped: Dropped, size: int, columns: Columns, num_used: torch.Tensor, sample: Sample, x: Operands, tile: Tile
) -> Linear:
    """Compute the covariance of ``size`` sampled columns. If ``num_used`` is 0 it is 0, and its product costs nothing."""
    rows_QD = centered_rows(dropped, columns, x, size)
    covariance_DD = torch.empty(2 * rows_QD.shape[1:], dtype=rows_QD.dtype, device=rows_QD.device)
    rows = Rows(columns.sampled_K, num_used, rows_QD)  # the product takes all rows, in order, so it reads no index
    add_d_weight(covariance_DD, rows_QD, rows, None, tile, add=False)
    return Linear(covariance_DD, weighted_sums(sample.means_2D[1], covariance_DD).sum((0, 1)))


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
