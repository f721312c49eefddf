"""Functions of a few numbers per token, before and after the passes over the vocabulary: one launch each instead of thirty.

``compact`` skips tokens without a label, although the host does not know how many there are. ``index_N`` lists labelled tokens
first, in order, and ``num_labelled`` is their number, on the device. Every later kernel stops after so many compact rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from cce_dist.kernels import IGNORED, OUTSIDE, Rows, Upstream
from cce_dist.kernels.blocks import kernel, on_device, rows_with_zeros
from cce_dist.kernels.tiles import MAX_SIDE, cdiv, num_programs, stages_of_rows, thinned

_IGNORED, _OUTSIDE = tl.constexpr(IGNORED), tl.constexpr(OUTSIDE)
_BLOCK = 128  # tokens per program


def ordered_ids(labels_N: torch.Tensor, ignore_index: int, vocab_size: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    ids_N = torch.empty_like(labels_N)
    return ids_N, _write_ids(labels_N, ids_N, ignore_index, vocab_size)


def compact(ids_N: torch.Tensor) -> list[torch.Tensor]:
    """Return the compact order: index_N int32, the tokens with labelled ones first, and num_labelled and a 0, [2] int32."""
    return _write_ids(ids_N, None, IGNORED, None)


def _write_ids(
    labels_N: torch.Tensor, ids_N: torch.Tensor | None, ignore_index: int, vocab_size: int | None
) -> list[torch.Tensor]:
    num_tokens = labels_N.shape[0]
    order = [torch.empty(n, dtype=torch.int32, device=labels_N.device) for n in (num_tokens, 2)]
    # The order is computed by one program: 65,536 tokens take it eight steps, and no second launch is needed.
    with on_device(labels_N):
        _labels_kernel[(1,)](labels_N, ids_N, *order, ignore_index, vocab_size, num_tokens, BLOCK=8192, num_warps=16)
    return order


@kernel("ids_ptr", "index_ptr", "num_labelled_ptr")
def _labels_kernel(
    labels_ptr,  # in: [N] int64
    ids_ptr,  # out: [N] int64, or None if the labels are ids already
    index_ptr,  # out: [N] int32
    num_labelled_ptr,  # out: [2] int32
    ignore_index,
    vocab_size,
    num_tokens,
    BLOCK: tl.constexpr,
):
    num_labelled = tl.zeros((), tl.int32)
    # For each BLOCK of tokens: their ids, and their positions in the compact order by a prefix sum.
    for begin in range(0, num_tokens, BLOCK):
        offs_n = begin + tl.arange(0, BLOCK)
        in_n = offs_n < num_tokens
        ids = tl.load(labels_ptr + offs_n, mask=in_n, other=-1)
        if ids_ptr is not None:
            inside = (ids >= 0) & (ids < vocab_size)
            ids = tl.where(ids == ignore_index, _IGNORED, tl.where(inside, ids, _OUTSIDE))
            tl.store(ids_ptr + offs_n, ids, mask=in_n)
        keep = ids >= 0
        kept = keep.to(tl.int32)
        kept_before = num_labelled + tl.cumsum(kept, 0) - kept
        position = tl.where(keep, kept_before, num_tokens - 1 - (offs_n - kept_before))
        tl.store(index_ptr + position, offs_n, mask=in_n)
        num_labelled += tl.sum(kept, 0)
    tl.store(num_labelled_ptr, num_labelled)
    tl.store(num_labelled_ptr + 1, 0)


def token_groups(order: list[torch.Tensor], rows: int) -> list[list[torch.Tensor]]:
    """Cut the compact order into groups of ``rows`` tokens. Return each group's index and number of labelled tokens."""
    index_N, num_labelled = order
    num_tokens = index_N.shape[0]
    if rows >= num_tokens:
        return [order]
    starts = torch.arange(0, num_tokens, rows, dtype=torch.int32, device=index_N.device)
    kept_G = (num_labelled[:1] - starts).clamp_(0, rows)
    return thinned([[index_N[i : i + rows], kept_G[g : g + 1]] for g, i in enumerate(range(0, num_tokens, rows))])


def gathered(hidden_ND: torch.Tensor, order: Sequence[torch.Tensor], buffer_RD: torch.Tensor) -> Rows:
    """Gather the hidden states of a group into the buffer's first rows; zeros fill the last tile's rest."""
    rows = Rows(order[0], order[1], buffer_RD[: order[0].shape[0]])
    num_rows, hidden_size = rows.hidden.shape
    _gather_rows_kernel[(cdiv(num_rows, 16), cdiv(hidden_size, 256))](
        hidden_ND, rows.index, rows.num_labelled, rows.hidden,
        num_rows, hidden_size,
        MAX_SIDE=MAX_SIDE, BLOCK_R=16, BLOCK_D=256,
    )
    return rows


@kernel("hidden_ptr", "rows_ptr", "hidden_size")
def _gather_rows_kernel(
    hidden_ptr,  # in: [N, D]
    index_ptr,  # in: [R] int32
    num_labelled_ptr,  # in: [1] int32
    rows_ptr,  # out: [R, D]
    num_rows,
    hidden_size,
    MAX_SIDE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    num_labelled = tl.load(num_labelled_ptr)
    if tl.program_id(0) * BLOCK_R < rows_with_zeros(num_labelled, MAX_SIDE):
        offs_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
        offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        in_r = offs_r < num_rows
        in_d = (offs_d < hidden_size)[None, :]
        live = offs_r < num_labelled
        token = tl.load(index_ptr + offs_r, mask=live, other=0).to(tl.int64)
        row = tl.load(hidden_ptr + token[:, None] * hidden_size + offs_d[None, :], mask=live[:, None] & in_d, other=0)
        where = rows_ptr + offs_r.to(tl.int64)[:, None] * hidden_size + offs_d[None, :]
        tl.store(where, row, mask=in_r[:, None] & in_d)


def coefficients(upstream: Upstream, ids_N: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return coef_4N, the four coefficients of each token's logit gradients; 0 for tokens without a label."""
    num_tokens = ids_N.shape[0]
    coef_4N = torch.empty(4, num_tokens, dtype=torch.float32, device=ids_N.device)
    if num_tokens:
        with on_device(ids_N):
            _coefficients_kernel[(cdiv(num_tokens, _BLOCK),)](
                ids_N, *upstream, coef_4N, *strides_of(upstream), vocab_size, num_tokens, BLOCK_N=_BLOCK
            )
    return coef_4N


def strides_of(upstream: Upstream) -> list[int]:
    """Return the strides of the five upstream gradients per token, 0 where there is none."""
    return [0 if grad is None else grad.stride(0) for grad in upstream[:5]]


@kernel("ids_ptr", "coef_ptr")
def _coefficients_kernel(
    ids_ptr,  # in: [N] int64
    d_nll_ptr,  # in: [N] fp32 of any stride, or None; likewise the next four
    d_lse_ptr,
    d_target_ptr,
    d_uniform_ptr,
    d_entropy_ptr,
    d_mean_ptr,  # in: [] fp32, or None
    count_ptr,  # in: [] int64, or None
    coef_ptr,  # out: [4, N] fp32
    nll_stride,
    lse_stride,
    target_stride,
    uniform_stride,
    entropy_stride,
    vocab_size,
    num_tokens,
    BLOCK_N: tl.constexpr,
):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = offs_n < num_tokens
    live = tl.load(ids_ptr + offs_n, mask=in_n, other=_IGNORED) >= 0
    upstream = (d_nll_ptr, d_lse_ptr, d_target_ptr, d_uniform_ptr, d_entropy_ptr, d_mean_ptr, count_ptr)
    strides = (nll_stride, lse_stride, target_stride, uniform_stride, entropy_stride)
    coef_p, coef_label, coef_uniform, coef_entropy = coefficients_of(upstream, strides, vocab_size, offs_n, live)
    plane = num_tokens.to(tl.int64)
    tl.store(coef_ptr + offs_n, coef_p, mask=in_n)
    tl.store(coef_ptr + plane + offs_n, coef_label, mask=in_n)
    tl.store(coef_ptr + 2 * plane + offs_n, coef_uniform, mask=in_n)
    tl.store(coef_ptr + 3 * plane + offs_n, coef_entropy, mask=in_n)


@triton.jit
def coefficients_of(upstream, strides, vocab_size, token, live):
    """Return the coefficients P, LABEL, UNIFORM and ENTROPY of these tokens, 0 where not ``live``.

    ``upstream`` has the pointers of ``Upstream``, ``strides`` the strides of the first five.
    """
    d_nll_ptr, d_lse_ptr, d_target_ptr, d_uniform_ptr, d_entropy_ptr, d_mean_ptr, count_ptr = upstream
    d_nll = _grad(d_nll_ptr, strides[0], token, live)
    if d_mean_ptr is not None:
        d_nll += tl.where(live, tl.div_rn(tl.load(d_mean_ptr), tl.load(count_ptr).to(tl.float32)), 0.0)
    d_lse = _grad(d_lse_ptr, strides[1], token, live)
    d_target = _grad(d_target_ptr, strides[2], token, live)
    d_uniform = _grad(d_uniform_ptr, strides[3], token, live)
    d_entropy = _grad(d_entropy_ptr, strides[4], token, live)
    return d_nll + d_lse + d_uniform, d_target - d_nll, -d_uniform / vocab_size, d_entropy


@triton.jit
def _grad(grad_ptr, stride, token, live):
    grad = tl.zeros(token.shape, tl.float32)
    if grad_ptr is not None:
        grad = tl.load(grad_ptr + token.to(tl.int64) * stride, mask=live, other=0)
    return grad


def weighted_sums(coef_R: torch.Tensor, rows_RD: torch.Tensor, *, absolute: bool = False) -> torch.Tensor:
    """Return partial sums of ``coef_R @ rows_RD``, fp32: [P, 1, D], or with ``absolute`` [P, 2, D], the second by |coef_R|.

    Rows whose coefficient is 0 may hold NaN.
    """
    num_rows, hidden_size = rows_RD.shape
    block_r, block_d = 64, 128
    blocks_d = cdiv(hidden_size, block_d)
    parts = max(1, min(cdiv(num_rows, block_r), 4 * num_programs(rows_RD.device) // blocks_d))
    partial = torch.empty(parts, 1 + absolute, hidden_size, dtype=torch.float32, device=rows_RD.device)
    _weighted_sums_kernel[(parts, blocks_d)](
        coef_R, rows_RD,
        partial,
        num_rows, hidden_size,
        ABSOLUTE=absolute, BLOCK_R=block_r, BLOCK_D=block_d, STAGES=stages_of_rows(block_r * block_d * rows_RD.itemsize),
        num_warps=8,
    )
    return partial


@kernel("rows_ptr", "partial_ptr", "hidden_size")
def _weighted_sums_kernel(
    coef_ptr,  # in: [R] fp32
    rows_ptr,  # in: [R, D]
    partial_ptr,  # out: [P, 1 or 2, D] fp32
    num_rows,
    hidden_size,
    ABSOLUTE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    begin = tl.program_id(0) * BLOCK_R
    step = tl.num_programs(0) * BLOCK_R
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_d = offs_d < hidden_size
    some = tl.zeros((BLOCK_R,), tl.int32)
    # First find out whether any coefficient of this part is not 0.
    for first in range(begin, num_rows, step):
        offs_r = first + tl.arange(0, BLOCK_R)
        some |= (tl.load(coef_ptr + offs_r, mask=offs_r < num_rows, other=0) != 0).to(tl.int32)
    total = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    absolute = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    # Sum coef [BLOCK_R] times rows [BLOCK_R, BLOCK_D]. The loop is pipelined: the next rows are loaded meanwhile.
    for first in tl.range(begin, tl.where(tl.max(some, 0) > 0, num_rows, 0), step, num_stages=STAGES):
        offs_r = first + tl.arange(0, BLOCK_R)
        in_r = offs_r < num_rows
        where = rows_ptr + offs_r.to(tl.int64)[:, None] * hidden_size + offs_d[None, :]
        row = tl.load(where, mask=in_r[:, None] & in_d[None, :], other=0).to(tl.float32)
        coef = tl.load(coef_ptr + offs_r, mask=in_r, other=0)[:, None]
        row = tl.where(coef != 0, row, 0.0)
        total += coef * row
        if ABSOLUTE:
            absolute += tl.abs(coef) * row
    partial_ptr += tl.program_id(0).to(tl.int64) * (2 if ABSOLUTE else 1) * hidden_size + offs_d
    tl.store(partial_ptr, tl.sum(total, 0), mask=in_d)
    if ABSOLUTE:
        tl.store(partial_ptr + hidden_size, tl.sum(absolute, 0), mask=in_d)
