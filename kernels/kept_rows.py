"""Log-softmax over a list of ids per token, as Triton kernels. ``kept_ids`` has the formulas, the records, and a torch version.

In forward and for d_hidden each program has one token and goes through its list, a few rows of the weight at a time. For
d_weight a program has a part of one column's row, and goes through the column's tokens. Programs share no sums, so a token's
outputs do not depend on other tokens, and sums are in the order of the lists.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cce_dist.kernels import Gradients, Grads, Operands, Spec
from cce_dist.kernels.blocks import kernel, on_device
from cce_dist.kernels.exact import new_gradients
from cce_dist.kernels.head import logits_of, token_factors
from cce_dist.kernels.kept_ids import KeptLists
from cce_dist.kernels.tiles import cdiv, stages_of_rows

WARP_ELEMENTS = 1024  # elements of rows that a warp holds in registers at a time
BLOCK_D = 1024  # elements of a row that a program of backward handles


def statistics(x: Operands, lists: KeptLists, spec: Spec) -> tuple[Tensor, Tensor]:
    num_tokens, hidden_size = x.hidden.shape
    z_M = torch.empty(lists.column_M.shape, dtype=torch.float32, device=x.hidden.device)
    stats_KN = torch.empty(spec.num_stats, num_tokens, dtype=torch.float32, device=x.hidden.device)
    block_d = int(triton.next_power_of_2(hidden_size))
    warps = 8 if block_d > 4096 else min(4, max(1, block_d // 256))
    block_k = min(8, max(1, warps * WARP_ELEMENTS // block_d))
    if num_tokens:
        with on_device(x.hidden):
            _list_logits_kernel[(num_tokens,)](
                # in
                x.hidden, x.weight, x.head, x.ids, lists.begin_N1, lists.column_M,
                # out
                z_M, stats_KN,
                # sizes
                num_tokens, lists.num_listed, hidden_size, x.start,
                # options
                HAS_ENTROPY=spec.want.entropy,
                # tiles
                BLOCK_K=block_k, BLOCK_D=block_d, STAGES=stages_of_rows(block_k * block_d * x.weight.itemsize),
                num_warps=warps,
            )
    return stats_KN, z_M


@triton.jit
def _entry_logits(h, weight_ptr, head, factors, column, offs_d, in_d, hidden_size):
    here = column >= 0
    where = weight_ptr + column.to(tl.int64)[:, None] * hidden_size + offs_d[None, :]
    w = tl.load(where, mask=here[:, None] & in_d[None, :], other=0)
    z = logits_of(tl.sum(w.to(tl.float32) * h[None, :], 1), column, here, head, factors, False)
    return tl.where(here, z, float("-inf"))


@kernel("hidden_ptr", "weight_ptr", "hidden_size")
def _list_logits_kernel(
    hidden_ptr,  # in: [N, D]
    weight_ptr,  # in: [V, D]
    head,  # in: Head; every token has factors
    ids_ptr,  # in: [N] int64
    begin_ptr,  # in: [N + 1] int32
    column_ptr,  # in: [M] int32
    z_ptr,  # out: [M] fp32
    stats_ptr,  # out: [K, N] fp32: maximum, sum of exponentials, logit of the own id; moment
    num_tokens,
    num_listed,
    hidden_size,
    start,
    HAS_ENTROPY: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    in_d = offs_d < hidden_size
    h = tl.load(hidden_ptr + token * hidden_size + offs_d, mask=in_d, other=0).to(tl.float32)
    factors = token_factors(head, token, True)
    own_column = tl.load(ids_ptr + token) - start
    begin = tl.load(begin_ptr + token)
    end = tl.load(begin_ptr + token + 1)

    # Online softmax over the list, z [BLOCK_K] at a time. Sums are [BLOCK_K], relative to the largest logit so far.
    row_max = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_K,), tl.float32)
    moment = tl.zeros((BLOCK_K,), tl.float32)
    target = tl.zeros((BLOCK_K,), tl.float32)
    for first in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        offs_k = first + tl.arange(0, BLOCK_K)
        column = tl.load(column_ptr + offs_k, mask=offs_k < end, other=-1)
        z = _entry_logits(h, weight_ptr, head, factors, column, offs_d, in_d, hidden_size)
        tl.store(z_ptr + offs_k, z, mask=offs_k < end)
        target += tl.where((column == own_column) & (column >= 0), z, 0.0)
        new_max = tl.maximum(row_max, tl.max(z, 0))
        drop = tl.where(row_max == new_max, 0.0, row_max - new_max)
        scale = tl.exp(drop)
        below = tl.where(z == float("-inf"), 0.0, z - new_max)
        e = tl.where(z == float("-inf"), 0.0, tl.exp(below))
        if HAS_ENTROPY:
            # Before the first finite logit drop is -inf, and 0 * -inf would be NaN.
            moved = tl.where(scale == 0, 0.0, scale * (moment + drop * total))
            moment = moved + e * below
        total = total * scale + e
        row_max = new_max

    # The logit of an own id that is not in the list is the target, but belongs to no sum.
    last = num_listed + token
    is_first = tl.arange(0, BLOCK_K) == 0
    column = tl.where(is_first, tl.load(column_ptr + last), -1)
    z = _entry_logits(h, weight_ptr, head, factors, column, offs_d, in_d, hidden_size)
    tl.store(z_ptr + last + tl.arange(0, BLOCK_K), z, mask=is_first)
    target += tl.where(column >= 0, z, 0.0)

    stride = num_tokens.to(tl.int64)
    tl.store(stats_ptr + token, row_max)
    tl.store(stats_ptr + stride + token, tl.sum(total, 0))
    tl.store(stats_ptr + 2 * stride + token, tl.sum(target, 0))
    if HAS_ENTROPY:
        tl.store(stats_ptr + 3 * stride + token, tl.sum(moment, 0))


def gradients(x: Operands, lists: KeptLists, grad_M: Tensor, grads: Grads, spec: Spec) -> Gradients:
    d_hidden, d_weight, d_bias = new_gradients(x, grads._replace(want_bias=grads.want_weight or grads.want_bias))
    num_parts = cdiv(x.hidden.shape[1], BLOCK_D)
    sizes, tiles = (x.hidden.shape[1],), dict(BLOCK_K=8, BLOCK_D=BLOCK_D, num_warps=4)
    if x.num_tokens and x.num_valid:
        with on_device(x.hidden):
            if d_hidden is not None:
                _list_hidden_kernel[(x.num_tokens, num_parts)](
                    x.weight, lists.begin_N1, lists.column_M, grad_M,
                    d_hidden,
                    lists.num_listed, *sizes, **tiles,
                )
                if grads.hidden_ready is not None:
                    grads.hidden_ready(d_hidden)
            if d_bias is not None:
                _column_rows_kernel[(x.num_valid, num_parts)](
                    x.hidden, lists.first_V1, lists.order_M, lists.token_M, grad_M,
                    d_weight, d_bias,
                    *sizes,
                    ADD=grads.weight_out is not None, **tiles,
                )
    return d_hidden, d_weight if grads.weight_out is None else None, d_bias


@kernel("weight_ptr", "d_hidden_ptr", "hidden_size")
def _list_hidden_kernel(
    weight_ptr,  # in: [V, D]
    begin_ptr,  # in: [N + 1] int32
    column_ptr,  # in: [M] int32
    grad_ptr,  # in: [M] fp32
    d_hidden_ptr,  # out: [N, D]
    num_listed,
    hidden_size,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_d = offs_d < hidden_size
    begin = tl.load(begin_ptr + token)
    end = tl.load(begin_ptr + token + 1)
    own = tl.load(column_ptr + num_listed + token)
    place = weight_ptr + own.to(tl.int64) * hidden_size + offs_d
    # Both operands of the mask are blocks: Triton 3.9's interpreter takes no block & scalar.
    acc = tl.load(place, mask=in_d & (own >= offs_d * 0), other=0).to(tl.float32)
    acc *= tl.load(grad_ptr + num_listed + token)
    # acc [BLOCK_D] += grad [BLOCK_K] @ weight rows [BLOCK_K, BLOCK_D], over the token's list.
    for first in range(begin, end, BLOCK_K):
        offs_k = first + tl.arange(0, BLOCK_K)
        column = tl.load(column_ptr + offs_k, mask=offs_k < end, other=-1)
        grad = tl.load(grad_ptr + offs_k, mask=offs_k < end, other=0)
        where = weight_ptr + column.to(tl.int64)[:, None] * hidden_size + offs_d[None, :]
        w = tl.load(where, mask=(column >= 0)[:, None] & in_d[None, :], other=0).to(tl.float32)
        acc += tl.sum(grad[:, None] * w, 0)
    tl.store(d_hidden_ptr + token * hidden_size + offs_d, acc.to(d_hidden_ptr.dtype.element_ty), mask=in_d)


@kernel("hidden_ptr", "d_weight_ptr", "hidden_size")
def _column_rows_kernel(
    hidden_ptr,  # in: [N, D]
    first_ptr,  # in: [V + 1] int32
    order_ptr,  # in: [M] int64
    token_ptr,  # in: [M] int32
    grad_ptr,  # in: [M] fp32
    d_weight_ptr,  # out: [V, D], added to with ADD; or None
    d_bias_ptr,  # out: [V] fp32
    hidden_size,
    ADD: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    column = tl.program_id(0).to(tl.int64)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_d = offs_d < hidden_size
    end = tl.load(first_ptr + column + 1)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    total = tl.zeros((BLOCK_K,), tl.float32)
    # acc [BLOCK_D] += grad [BLOCK_K] @ hidden rows [BLOCK_K, BLOCK_D], over the column's entries.
    for first in range(tl.load(first_ptr + column), end, BLOCK_K):
        offs_k = first + tl.arange(0, BLOCK_K)
        entry = tl.load(order_ptr + offs_k, mask=offs_k < end, other=0)
        grad = tl.load(grad_ptr + entry, mask=offs_k < end, other=0)
        total += grad
        if d_weight_ptr is not None:
            token = tl.load(token_ptr + entry, mask=offs_k < end, other=0).to(tl.int64)
            where = hidden_ptr + token[:, None] * hidden_size + offs_d[None, :]
            rows = tl.load(where, mask=(offs_k < end)[:, None] & in_d[None, :], other=0).to(tl.float32)
            acc += tl.sum(grad[:, None] * rows, 0)
    if d_weight_ptr is not None:
        target = d_weight_ptr + column * hidden_size + offs_d
        if ADD:
            acc += tl.load(target, mask=in_d, other=0).to(tl.float32)
        tl.store(target, acc.to(d_weight_ptr.dtype.element_ty), mask=in_d)
    if tl.program_id(1) == 0:
        tl.store(d_bias_ptr + column, tl.sum(total, 0))
