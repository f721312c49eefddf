"""Removal of ignored tokens, without the host knowing how many there are.

``index_N`` lists the tokens that count first, in order, then the others; ``num_kept`` is their number, on the device.
Every kernel after this works on the compact rows and stops at ``num_kept``, so that a batch with two thirds of its tokens
ignored costs a third, wherever they stand (skipping whole tiles needs runs of 128 ignored tokens).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cce_dist.kernels.tiles import MAX_SIDE, cdiv


def kept_first(labels_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return index_N int32, tokens with a label >= 0 first, and their number as a [1] int32 tensor."""
    num_tokens = labels_N.shape[0]
    index_N = torch.empty(num_tokens, dtype=torch.int32, device=labels_N.device)
    num_kept = torch.empty(1, dtype=torch.int32, device=labels_N.device)
    _kept_first_kernel[(1,)](labels_N, index_N, num_kept, num_tokens, BLOCK=8192, num_warps=16)
    return index_N, num_kept


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["labels_ptr"])
def _kept_first_kernel(
    labels_ptr,  # in: [N] int64
    index_ptr,  # out: [N] int32
    num_kept_ptr,  # out: [1] int32
    num_tokens,
    BLOCK: tl.constexpr,
):
    # One program: a prefix sum over 65,536 tokens is eight steps, and needs no second launch.
    num_kept = tl.zeros((), tl.int32)
    for begin in range(0, num_tokens, BLOCK):
        offs_n = begin + tl.arange(0, BLOCK)
        in_n = offs_n < num_tokens
        keep = tl.load(labels_ptr + offs_n, mask=in_n, other=-1) >= 0
        kept = keep.to(tl.int32)
        kept_before = num_kept + tl.cumsum(kept, 0) - kept
        place = tl.where(keep, kept_before, num_tokens - 1 - (offs_n - kept_before))
        tl.store(index_ptr + place, offs_n, mask=in_n)
        num_kept += tl.sum(kept, 0)
    tl.store(num_kept_ptr, num_kept)


def gathered(
    hidden_ND: torch.Tensor, index_R: torch.Tensor, num_kept: torch.Tensor, buffer_RD: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the tokens of index_R as ``gather_rows`` fills them in, in the first rows of the buffer if given. -> [R, D]."""
    num_rows = index_R.shape[0]
    rows_RD = hidden_ND.new_empty(num_rows, hidden_ND.shape[1]) if buffer_RD is None else buffer_RD[:num_rows]
    gather_rows(hidden_ND, index_R, num_kept, None, rows_RD)
    return rows_RD


def gather_rows(
    hidden_ND: torch.Tensor,
    index_R: torch.Tensor,
    num_kept: torch.Tensor,
    scale_R: torch.Tensor | None,
    rows_RD: torch.Tensor,
) -> None:
    """Fill rows_RD with the tokens of index_R, times ``scale_R``; rows past ``num_kept`` in the last live tile are 0."""
    num_rows, hidden_size = rows_RD.shape
    grid = (cdiv(num_rows, 16), cdiv(hidden_size, 256))
    _gather_rows_kernel[grid](
        hidden_ND, index_R, num_kept, scale_R, rows_RD,
        num_rows, hidden_size,
        HAS_SCALE=scale_R is not None, MAX_SIDE=MAX_SIDE, BLOCK_R=16, BLOCK_D=256,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["index_ptr", "num_kept_ptr"])
def _gather_rows_kernel(
    hidden_ptr,  # in: [N, D]
    index_ptr,  # in: [R] int32
    num_kept_ptr,  # in: [1] int32
    scale_ptr,  # in: [R] fp32
    rows_ptr,  # out: [R, D]
    num_rows,
    hidden_size,
    HAS_SCALE: tl.constexpr,
    MAX_SIDE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    num_kept = tl.load(num_kept_ptr)
    # Zeros up to the end of the largest tile: nothing non-finite meets the zeros of dlogits there.
    if tl.program_id(0) * BLOCK_R < tl.maximum(tl.cdiv(num_kept, MAX_SIDE), 1) * MAX_SIDE:
        offs_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
        offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        in_r = offs_r < num_rows
        in_d = (offs_d < hidden_size)[None, :]
        live = offs_r < num_kept
        token = tl.load(index_ptr + offs_r, mask=live, other=0).to(tl.int64)
        row = tl.load(hidden_ptr + token[:, None] * hidden_size + offs_d[None, :], mask=live[:, None] & in_d, other=0)
        if HAS_SCALE:
            row = row.to(tl.float32) * tl.load(scale_ptr + offs_r, mask=live, other=0)[:, None]
        where = rows_ptr + offs_r.to(tl.int64)[:, None] * hidden_size + offs_d[None, :]
        tl.store(where, row.to(rows_ptr.dtype.element_ty), mask=in_r[:, None] & in_d)
