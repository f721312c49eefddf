"""Logit of each token's label: one row of the weight per token, an indexed dot product in fp32.

The indexed matrix-vector product of *Cut Your Losses* (Wijmans et al., 2024, algorithm 1), as a kernel of its own: inside the
log-sum-exp it would cost registers in the loop that decides the speed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cce_dist.kernels import ShardLogits
from cce_dist.kernels.tiles import cdiv, softcapped


def target_logits(
    rows_RD: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    labels_N: torch.Tensor,
    index_R: torch.Tensor,
    num_kept: torch.Tensor,
    logits: ShardLogits,
    target_N: torch.Tensor,
) -> None:
    """Write z at the label to target_N at the tokens of index_R; 0 where the label is no valid row of this shard."""
    num_rows, hidden_size = rows_RD.shape
    _target_logit_kernel[(cdiv(num_rows, 4),)](
        rows_RD, weight_VD, bias_V, labels_N, index_R, num_kept,
        target_N,
        num_rows, hidden_size, logits.start, logits.num_valid,
        logits.logit_scale, logits.softcap,
        HAS_BIAS=bias_V is not None, HAS_SOFTCAP=logits.softcap > 0.0, BLOCK_N=4, BLOCK_D=512,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_rows", "start", "num_valid"],
    do_not_specialize_on_alignment=["labels_ptr", "index_ptr", "num_kept_ptr", "target_ptr"],
)
def _target_logit_kernel(
    rows_ptr,  # in: [R, D]
    weight_ptr,  # in: [V, D]
    bias_ptr,  # in: [V]
    labels_ptr,  # in: [N] int64
    index_ptr,  # in: [R] int32
    num_kept_ptr,  # in: [1] int32
    target_ptr,  # out: [N] fp32
    num_rows,
    hidden_size,
    start,
    num_valid,
    logit_scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = offs_n < num_rows
    token = tl.load(index_ptr + offs_n, mask=in_n, other=0)
    live = in_n & (offs_n < tl.load(num_kept_ptr))
    label = tl.load(labels_ptr + token, mask=live, other=-1) - start
    live &= (label >= 0) & (label < num_valid)
    label = tl.where(live, label, 0)

    products = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for inner in range(0, hidden_size, BLOCK_D):
        offs_d = inner + tl.arange(0, BLOCK_D)
        mask = live[:, None] & (offs_d < hidden_size)[None, :]
        h = tl.load(rows_ptr + offs_n.to(tl.int64)[:, None] * hidden_size + offs_d[None, :], mask=mask, other=0)
        w = tl.load(weight_ptr + label[:, None] * hidden_size + offs_d[None, :], mask=mask, other=0)
        products += h.to(tl.float32) * w.to(tl.float32)
    u = tl.sum(products, 1)
    if HAS_BIAS:
        u += tl.load(bias_ptr + label, mask=live, other=0).to(tl.float32)
    u *= logit_scale
    if HAS_SOFTCAP:
        u = softcapped(u, softcap)
    tl.store(target_ptr + token, tl.where(live, u, 0.0), mask=in_n)
