"""Exact gradients of the tokens that the lists cannot serve, in one launch. Usually there are none, and it returns at once.

    for each chunk of columns:  1. the logits' gradients of these tokens, [R, columns of the chunk], go to memory
                                2. their products: rows of d_hidden, which all chunks add to, and of d_weight

Only the device knows how many tokens there are, so a host that launched each step of each chunk would launch up to a hundred
kernels for nothing. Here programs take tiles from a counter, in the order of chunks and steps. A tile waits until all tiles of
earlier steps are done. These have lower numbers, so each belongs to a program that runs already, and no program waits for one
that has not begun. Each output is summed by one program in a fixed order, so results have the same bits in every run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cce_dist.kernels import Operands, Softmax
from cce_dist.kernels.blocks import halves, kernel
from cce_dist.kernels.d_hidden import Sum
from cce_dist.kernels.head import logits_of, slope_of, token_factors
from cce_dist.kernels.memory import unserved_area
from cce_dist.kernels.tiles import Tile, num_programs, precision


def set_unserved(
    x: Operands, softmax: Softmax, coef_4N: torch.Tensor, order: list[torch.Tensor], counters_2: torch.Tensor,
    total: Sum | None, d_weight_VD: torch.Tensor | None, tile: Tile, workspace_bytes: int, *, add: bool,
) -> None:
    """Set d_hidden of the unserved tokens and all of d_weight to their exact gradients; without tokens write nothing.

    Args:
        order: The tokens in order, [N] int32, and their number, [1] int32.
        counters_2: [2] int32 zeros: tiles that programs have taken, tiles that are done.
        total: out: d_hidden, with a remainder for each token or none; or None.
        d_weight_VD: out, or with ``add`` in and out; or None.
    """
    num_tokens, hidden_size = x.hidden.shape
    area = unserved_area(num_tokens, x.num_valid, x.hidden.itemsize, workspace_bytes, tile)
    grads = torch.empty(area, dtype=x.hidden.dtype, device=x.hidden.device)
    high_ND, low_ND = (None, None) if total is None else (total.high_ND, total.low_RD)
    _unserved_kernel[(num_programs(x.hidden.device),)](
        # in
        x.hidden, x.weight, x.head, x.ids, *order, softmax.max, softmax.log_sum, coef_4N,
        # in, out
        counters_2, grads, high_ND, low_ND, d_weight_VD,
        # sizes
        num_tokens, hidden_size, x.num_valid, x.start, area, int(add),
        # tiles
        TILE=tile, PRECISION=precision(x.hidden.dtype), num_warps=tile.warps, num_stages=tile.stages,
    )


@kernel("hidden_ptr", "weight_ptr", "grads_ptr", "high_ptr", "low_ptr", "d_weight_ptr", "hidden_size")
def _unserved_kernel(
    hidden_ptr,  # in: [N, D]
    weight_ptr,  # in: [V, D]
    head,  # in: Head
    labels_ptr,  # in: [N] int64
    index_ptr,  # in: [N] int32: the unserved tokens
    num_rows_ptr,  # in: [1] int32: R
    max_ptr,  # in: [N] fp32
    log_sum_ptr,  # in: [N] fp32
    coef_ptr,  # in: [4, N] fp32
    counter_ptr,  # in, out: [2] int32
    grads_ptr,  # scratch: [R, width] for the columns of a chunk
    high_ptr,  # out: [N, D], or None
    low_ptr,  # out: [N, D] bf16, or None
    d_weight_ptr,  # out, or in and out: [V, D], or None
    num_tokens,
    hidden_size,
    num_valid,
    start,
    area,
    add,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    ROWS: tl.constexpr = TILE.rows
    COLS: tl.constexpr = TILE.cols
    num_rows = tl.load(num_rows_ptr)
    if num_rows == 0:
        return
    row_blocks = tl.cdiv(num_rows, ROWS)
    d_blocks = tl.cdiv(hidden_size, COLS)
    col_tiles = tl.minimum(area // (row_blocks * ROWS) // COLS, tl.cdiv(num_valid, COLS))
    width = col_tiles * COLS
    # Tiles of a chunk: gradients, then d_hidden, then d_weight. The last chunk may be narrower: tiles past the end are empty.
    num_grads = row_blocks * col_tiles
    num_hidden = row_blocks * d_blocks if high_ptr is not None else 0
    num_weight = tl.cdiv(width, ROWS) * d_blocks if d_weight_ptr is not None else 0
    of_chunk = num_grads + num_hidden + num_weight
    num_tiles = tl.cdiv(num_valid, width) * of_chunk
    number = tl.atomic_add(counter_ptr, 1, sem="relaxed")
    while number < num_tiles:
        within = number % of_chunk
        first = number // of_chunk * width
        stop = tl.minimum(first + width, num_valid)
        needed = number - within + tl.where(within < num_grads, 0, num_grads)
        while tl.atomic_add(counter_ptr + 1, 0, sem="acquire") < needed:
            pass
        tl.debug_barrier()
        if within < num_grads:
            row, col = within % row_blocks * ROWS, within // row_blocks * COLS
            if first + col < stop:
                _write_gradients(
                    row, col, first, stop, width, num_rows, hidden_ptr, weight_ptr, head, labels_ptr, index_ptr, max_ptr,
                    log_sum_ptr, coef_ptr, grads_ptr, num_tokens, hidden_size, start, TILE, PRECISION,
                )
        elif within < num_grads + num_hidden:
            tile = within - num_grads
            _add_hidden(
                tile // d_blocks * ROWS, tile % d_blocks * COLS, first, stop, width, num_rows,
                weight_ptr, index_ptr, grads_ptr, high_ptr, low_ptr, hidden_size, TILE, PRECISION,
            )
        else:
            tile = within - num_grads - num_hidden
            row = tile // d_blocks * ROWS
            if first + row < stop:
                _write_weight(
                    row, tile % d_blocks * COLS, first, stop, width, num_rows, hidden_ptr, index_ptr, grads_ptr,
                    d_weight_ptr, add, hidden_size, TILE, PRECISION,
                )
        tl.debug_barrier()
        tl.atomic_add(counter_ptr + 1, 1, sem="release")
        number = tl.atomic_add(counter_ptr, 1, sem="relaxed")


@triton.jit
def _write_gradients(
    row, col, first, stop, width, num_rows,
    hidden_ptr, weight_ptr, head, labels_ptr, index_ptr, max_ptr, log_sum_ptr, coef_ptr, grads_ptr,
    num_tokens, hidden_size, start, TILE: tl.constexpr, PRECISION: tl.constexpr,
):
    """Write the gradient of a tile of logits; rows past the last token and columns past the chunk are 0."""
    ROWS: tl.constexpr = TILE.rows
    COLS: tl.constexpr = TILE.cols
    INNER: tl.constexpr = TILE.inner
    offs_r = row + tl.arange(0, ROWS)
    live = offs_r < num_rows
    token = tl.load(index_ptr + offs_r, mask=live, other=0).to(tl.int64)
    offs_c = col + tl.arange(0, COLS)
    offs_v = (first + offs_c).to(tl.int64)
    in_v = offs_v < stop
    acc = tl.zeros((ROWS, COLS), tl.float32)
    for inner in range(0, hidden_size, INNER):
        offs_d = inner + tl.arange(0, INNER)
        in_d = (offs_d < hidden_size)[None, :]
        h = tl.load(hidden_ptr + token[:, None] * hidden_size + offs_d[None, :], mask=live[:, None] & in_d, other=0)
        w = tl.load(weight_ptr + offs_v[:, None] * hidden_size + offs_d[None, :], mask=in_v[:, None] & in_d, other=0)
        acc = tl.dot(h, w.T, acc, input_precision=PRECISION)
    factors = token_factors(head, token, live)
    before, after = factors
    z = logits_of(acc, offs_v, in_v, head, factors, False)
    row_max = tl.load(max_ptr + token, mask=live, other=float("inf"))
    log_sum = tl.load(log_sum_ptr + token, mask=live, other=0)
    coef_p = tl.load(coef_ptr + token, mask=live, other=0) * before
    coef_label = tl.load(coef_ptr + num_tokens + token, mask=live, other=0) * before
    label = (tl.load(labels_ptr + token, mask=live, other=-1) - start - first).to(tl.int32)
    grad = coef_p[:, None] * tl.exp((z - row_max[:, None]) - log_sum[:, None])
    grad = tl.where(offs_c[None, :] == label[:, None], grad + coef_label[:, None], grad)
    if head.softcap is not None:
        grad *= slope_of(z, head, after[:, None])
    grad = tl.where(live[:, None] & in_v[None, :], grad, 0.0)
    # A half at a time: the whole tile beside its addresses spills registers.
    for half in tl.static_range(2):
        part = halves(grad)[half]
        offs_h = col + half * (COLS // 2) + tl.arange(0, COLS // 2)
        where = grads_ptr + offs_r.to(tl.int64)[:, None] * width + offs_h[None, :]
        tl.store(where, part.to(grads_ptr.dtype.element_ty))


@triton.jit
def _add_hidden(
    row, col, first, stop, width, num_rows, weight_ptr, index_ptr, grads_ptr, high_ptr, low_ptr, hidden_size,
    TILE: tl.constexpr, PRECISION: tl.constexpr,
):
    """Set a tile of d_hidden to the first chunk's part, or add a later chunk's part to it."""
    ROWS: tl.constexpr = TILE.rows
    COLS: tl.constexpr = TILE.cols
    INNER: tl.constexpr = TILE.inner
    offs_r = row + tl.arange(0, ROWS)
    live = offs_r < num_rows
    offs_d = col + tl.arange(0, COLS)
    in_d = (offs_d < hidden_size)[None, :]
    acc = tl.zeros((ROWS, COLS), tl.float32)
    for inner in range(0, stop - first, INNER):
        offs_c = inner + tl.arange(0, INNER)
        offs_v = (first + offs_c).to(tl.int64)
        g = tl.load(grads_ptr + offs_r.to(tl.int64)[:, None] * width + offs_c[None, :])
        mask = (offs_v < stop)[:, None] & in_d
        w = tl.load(weight_ptr + offs_v[:, None] * hidden_size + offs_d[None, :], mask=mask, other=0)
        acc = tl.dot(g, w, acc, input_precision=PRECISION)
    token = tl.load(index_ptr + offs_r, mask=live, other=0).to(tl.int64)
    for half in tl.static_range(2):
        for quarter in tl.static_range(2):
            part = halves(halves(acc)[half])[quarter]
            offs_q = col + (2 * half + quarter) * (COLS // 4) + tl.arange(0, COLS // 4)
            where = token[:, None] * hidden_size + offs_q[None, :]
            mask = live[:, None] & (offs_q < hidden_size)[None, :]
            before = tl.where(first > 0, mask, False)
            # Another program may have written the earlier chunks' part, so it is read from L2.
            part += tl.load(high_ptr + where, mask=before, other=0, cache_modifier=".cg").to(tl.float32)
            if low_ptr is not None:
                part += tl.load(low_ptr + where, mask=before, other=0, cache_modifier=".cg").to(tl.float32)
            rounded = part.to(high_ptr.dtype.element_ty)
            tl.store(high_ptr + where, rounded, mask=mask)
            if low_ptr is not None:
                tl.store(low_ptr + where, (part - rounded.to(tl.float32)).to(low_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _write_weight(
    row, col, first, stop, width, num_rows, hidden_ptr, index_ptr, grads_ptr, d_weight_ptr, add, hidden_size,
    TILE: tl.constexpr, PRECISION: tl.constexpr,
):
    """Write a tile of the chunk's rows of d_weight, or add to it."""
    ROWS: tl.constexpr = TILE.rows
    COLS: tl.constexpr = TILE.cols
    INNER: tl.constexpr = TILE.inner
    offs_c = row + tl.arange(0, ROWS)
    offs_d = col + tl.arange(0, COLS)
    in_d = (offs_d < hidden_size)[None, :]
    acc = tl.zeros((ROWS, COLS), tl.float32)
    for inner in range(0, num_rows, INNER):
        offs_r = inner + tl.arange(0, INNER)
        live = (offs_r < num_rows)[:, None]
        token = tl.load(index_ptr + offs_r, mask=offs_r < num_rows, other=0).to(tl.int64)
        where = grads_ptr + offs_r.to(tl.int64)[:, None] * width + offs_c[None, :]
        g = tl.load(where, mask=live & (offs_c < width)[None, :], other=0)
        h = tl.load(hidden_ptr + token[:, None] * hidden_size + offs_d[None, :], mask=live & in_d, other=0)
        acc = tl.dot(g.T, h, acc, input_precision=PRECISION)
    offs_v = (first + offs_c).to(tl.int64)
    for half in tl.static_range(2):
        for quarter in tl.static_range(2):
            part = halves(halves(acc)[half])[quarter]
            offs_q = col + (2 * half + quarter) * (COLS // 4) + tl.arange(0, COLS // 4)
            where = d_weight_ptr + offs_v[:, None] * hidden_size + offs_q[None, :]
            mask = (offs_v < stop)[:, None] & (offs_q < hidden_size)[None, :]
            part += tl.load(where, mask=tl.where(add != 0, mask, False), other=0).to(tl.float32)
            tl.store(where, part.to(d_weight_ptr.dtype.element_ty), mask=mask)
