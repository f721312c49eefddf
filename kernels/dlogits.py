"""Logits and their gradient, written to memory for a bounded chunk of the vocabulary at a time.

``logits_chunk`` serves the largest logits and the divergence of two heads. A token's logits do not depend on other tokens.

``dlogits_chunk`` writes the gradient (``kernels/__init__.py`` has the formula) in the hidden states' dtype. This is the
backward recomputation of *Cut Your Losses* (Wijmans et al., 2025, algorithm 3), except that the tile goes to memory. The two
products that follow are then plain matrix multiplications, which write each output once and need neither locks nor atomics.

``write_cells`` overwrites the gradient at the ids of each token, where a token has several. LABEL is 0 then, and the formula
has the gradient g of the id's log-probability in its place, with the id's own logit, saved in fp32 by forward. No id is
repeated within a row (``outputs.distinct``). In 16 bits the whole formula is computed again: the cell's ``P p`` has been
rounded, and nearly cancels with g at a likely id. In fp32 g is added to the cell: p, log p and H must come from the same
logits, and the saved logit was summed in another order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cce_dist.kernels import Operands, Rows, Softmax
from cce_dist.kernels.blocks import (
    LOG2_E,
    fast_exp2,
    has_fast_math,
    has_tma,
    kernel,
    operand,
    row_and_split,
    store_tile,
    tile_of_products,
)
from cce_dist.kernels.head import logits_of, slope_of, token_factors
from cce_dist.kernels.tiles import Tiles, beside_collectives, cdiv, num_parts, num_programs, precision

LOWEST = tl.constexpr(-1e4)  # nats: bound of log-probabilities; p is 0 at and below it


def logits_chunk(
    x: Operands, rows: Rows, first_col: int, z_RV: torch.Tensor, tiles: Tiles, top_BR: torch.Tensor | None = None
) -> None:
    """Fill z_RV with the logits from ``first_col`` (a multiple of the tile) on; columns past ``num_valid`` are -inf.

    With ``top_BR`` [tiles, R] the largest logit of each row and tile is written to it, and z_RV holds logits relative to that.
    Rows at or past ``num_labelled`` are only written up to the end of their tile.
    """
    tile = tiles.lse
    (num_rows, num_cols), hidden_size = z_RV.shape, rows.hidden.shape[1]
    num_tiles = cdiv(num_cols, tile.cols)
    tma = has_tma(rows.hidden, x.weight, z_RV)
    programs = cdiv(num_rows, tile.rows) * num_tiles
    if not beside_collectives():
        programs = min(programs, num_programs(z_RV.device))
    _logits_kernel[(programs,)](
        # in
        operand(rows.hidden, tile.rows, tile.inner, tma), operand(x.weight, tile.cols, tile.inner, tma), x.head,
        rows.index, rows.num_labelled,
        # out
        operand(z_RV, tile.rows, tile.cols // 2, tma), top_BR,
        # sizes
        num_rows, hidden_size, x.num_valid, num_cols, z_RV.stride(0), 0 if top_BR is None else top_BR.stride(0),
        first_col, num_tiles,
        # options
        MASK_V=x.num_valid % tile.cols != 0,
        # tiles
        TILE=tile, GROUP=tiles.group, TMA=tma, PRECISION=precision(rows.hidden.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )


@kernel("hidden", "weight", "z", "hidden_size", "z_stride")
def _logits_kernel(
    hidden,  # in: [R, D] descriptor or pointer
    weight,  # in: [V, D] descriptor or pointer
    head,  # in: Head
    index_ptr,  # in: [R] int32
    num_labelled_ptr,  # in: [1] int32
    z,  # out: [R, columns of the chunk] descriptor or pointer
    top_ptr,  # out: [B, R] fp32 that logits are relative to, or None
    num_rows,
    hidden_size,
    num_valid,
    num_cols,
    z_stride,
    top_stride,
    first_col,
    num_tiles,
    MASK_V: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    BLOCK_N: tl.constexpr = TILE.rows
    BLOCK_V: tl.constexpr = TILE.cols
    # Unless collectives run beside it, each program computes several tiles z [BLOCK_N, BLOCK_V], so that operands of the next
    # tile load while one is stored.
    num_labelled = tl.load(num_labelled_ptr)
    num_row_blocks = tl.cdiv(num_labelled, BLOCK_N)
    for number in tl.range(tl.program_id(0), num_row_blocks * num_tiles, tl.num_programs(0), flatten=True):
        row_block, tile = row_and_split(number, num_row_blocks, num_tiles, GROUP)
        row = row_block * BLOCK_N
        offs_n = row + tl.arange(0, BLOCK_N)
        live = offs_n < num_labelled
        token = offs_n
        if head.factors is not None:
            token = tl.load(index_ptr + offs_n, mask=live, other=0)
        factors = token_factors(head, token, live)
        col = tile * BLOCK_V
        acc = tile_of_products(
            hidden, weight, row, first_col + col, num_rows, num_valid, hidden_size, TILE, TMA, PRECISION
        )
        offs_v = first_col + col + tl.arange(0, BLOCK_V)
        some = logits_of(acc, offs_v, offs_v < num_valid, head, factors, MASK_V)
        if top_ptr is not None:
            top = tl.max(some, 1)
            some -= tl.where(top > float("-inf"), top, 0.0)[:, None]
            tl.store(top_ptr + tile * top_stride.to(tl.int64) + offs_n, top, mask=offs_n < num_rows)
        store_tile(z, row, col, some, num_rows, num_cols, z_stride, BLOCK_N, BLOCK_V, TMA)


def dlogits_chunk(
    x: Operands,
    rows: Rows,
    softmax: Softmax,
    coef_4N: torch.Tensor,
    first_col: int,
    dlogits_RV: torch.Tensor,
    tiles: Tiles,
    *,
    one_wave: bool = False,
) -> None:
    """Fill dlogits_RV with the gradient of the columns from ``first_col`` (a multiple of the tile) on.

    Rows at or past ``num_labelled`` are 0 up to the end of their tile, and unwritten after it. Columns at or past ``num_valid``
    are 0.
    ``one_wave`` launches only as many programs as run at a time, which loop over all tiles. It is for calls that often have no
    labelled token: thousands of programs that return early would take longer.
    """
    tile = tiles.dlogits
    num_rows, hidden_size = rows.hidden.shape
    num_tiles = cdiv(min(dlogits_RV.shape[1], x.num_valid - first_col), tile.cols)
    at_once, tma = num_programs(dlogits_RV.device), has_tma(rows.hidden, x.weight, dlogits_RV)
    # With ``one_wave`` programs take fixed shares of the parts, so make all parts equal: one tile each.
    splits = num_tiles if one_wave else num_parts(num_rows, num_tiles, tile.rows, at_once)
    programs = cdiv(num_rows, tile.rows) * splits
    _dlogits_kernel[(min(programs, at_once) if one_wave else programs,)](
        # in
        operand(rows.hidden, tile.rows, tile.inner, tma), operand(x.weight, tile.cols, tile.inner, tma), x.head,
        x.ids, rows.index, rows.num_labelled, softmax, coef_4N,
        # out
        operand(dlogits_RV, tile.rows, tile.cols // 2, tma),
        # sizes
        num_rows, hidden_size, x.num_valid, x.start, x.num_tokens, dlogits_RV.shape[1], first_col, num_tiles, splits,
        # options
        FAST=has_fast_math(), MASK_V=x.num_valid % tile.cols != 0, ONE_WAVE=one_wave,
        # tiles
        TILE=tile, GROUP=tiles.group, TMA=tma, PRECISION=precision(rows.hidden.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )


@kernel("hidden", "weight", "dlogits", "hidden_size")
def _dlogits_kernel(
    hidden,  # in: [R, D] descriptor or pointer
    weight,  # in: [V, D] descriptor or pointer
    head,  # in: Head
    labels_ptr,  # in: [N] int64
    index_ptr,  # in: [R] int32
    num_labelled_ptr,  # in: [1] int32
    softmax,  # in: Softmax
    coef_ptr,  # in: [4, N] fp32
    dlogits,  # out: [R, columns of the chunk] descriptor or pointer
    num_rows,
    hidden_size,
    num_valid,
    start,
    num_tokens,
    dlogits_cols,
    first_col,
    num_tiles,
    num_splits,
    FAST: tl.constexpr,
    MASK_V: tl.constexpr,
    ONE_WAVE: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    num_labelled = tl.load(num_labelled_ptr)
    num_row_blocks = tl.cdiv(num_labelled, TILE.rows)
    pid = tl.program_id(0)
    num_pieces = num_row_blocks * num_splits
    given = (
        hidden, weight, head, labels_ptr, index_ptr, softmax, coef_ptr, dlogits,
        num_labelled, num_rows, hidden_size, num_valid, start, num_tokens, dlogits_cols, first_col, num_tiles, num_splits,
    )
    if ONE_WAVE:
        for part in range(pid, num_pieces, tl.num_programs(0)):
            _write_part(part, num_row_blocks, *given, FAST, MASK_V, TILE, GROUP, TMA, PRECISION)
        return
    if pid >= num_pieces:
        return
    _write_part(pid, num_row_blocks, *given, FAST, MASK_V, TILE, GROUP, TMA, PRECISION)


@triton.jit
def _write_part(
    part, num_row_blocks,
    hidden, weight, head, labels_ptr, index_ptr, softmax, coef_ptr, dlogits,
    num_labelled, num_rows, hidden_size, num_valid, start, num_tokens, dlogits_cols, first_col, num_tiles, num_splits,
    FAST: tl.constexpr, MASK_V: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the gradient of one block of rows in one part of the columns."""
    BLOCK_N: tl.constexpr = TILE.rows
    BLOCK_V: tl.constexpr = TILE.cols
    row_block, split = row_and_split(part, num_row_blocks, num_splits, GROUP)
    row = row_block * BLOCK_N
    offs_n = row + tl.arange(0, BLOCK_N)
    live = offs_n < num_labelled
    token = tl.load(index_ptr + offs_n, mask=live, other=0)
    # Rows without a label get a maximum of +inf, which makes all of their p 0.
    row_max = tl.load(softmax.max + token, mask=live, other=float("inf"))
    log_sum = tl.load(softmax.log_sum + token, mask=live, other=0)
    label = (tl.load(labels_ptr + token, mask=live, other=-1) - start - first_col).to(tl.int32)
    coef = coef_ptr + token
    stride = num_tokens.to(tl.int64)
    factors = token_factors(head, token, live)
    before, after = factors
    scale = before * after
    coef_p = tl.load(coef, mask=live, other=0) * scale
    coef_label = tl.load(coef + stride, mask=live, other=0) * scale
    coef_uniform = tl.load(coef + 2 * stride, mask=live, other=0) * scale
    if softmax.entropy is not None:
        coef_entropy = tl.load(coef + 3 * stride, mask=live, other=0) * scale
        coef_p -= coef_entropy * tl.load(softmax.entropy + token, mask=live, other=0)

    # For each tile: logits z and their gradient grad, [BLOCK_N, BLOCK_V], from hidden[rows] @ weight[columns].T.
    for tile in tl.range(split * num_tiles // num_splits, (split + 1) * num_tiles // num_splits, flatten=True):
        col = tile * BLOCK_V
        acc = tile_of_products(
            hidden, weight, row, first_col + col, num_rows, num_valid, hidden_size, TILE, TMA, PRECISION
        )
        offs_v = first_col + col + tl.arange(0, BLOCK_V)
        z = logits_of(acc, offs_v, offs_v < num_valid, head, factors, MASK_V)
        offs_c = col + tl.arange(0, BLOCK_V)
        log_p = (z - row_max[:, None]) - log_sum[:, None]
        if softmax.entropy is not None:
            p = fast_exp2(log_p * LOG2_E, FAST)
            # LOWEST avoids 0 * -inf = NaN where p underflows.
            grad = p * (coef_p[:, None] - coef_entropy[:, None] * tl.maximum(log_p, LOWEST)) + coef_uniform[:, None]
        else:
            p = tl.exp(log_p)
            grad = coef_p[:, None] * p + coef_uniform[:, None]
        grad = tl.where(offs_c[None, :] == label[:, None], grad + coef_label[:, None], grad)
        if head.softcap is not None:
            grad *= slope_of(z, head, after[:, None])
        if MASK_V:
            # Compute the mask again: keeping it through the epilogue takes more instructions.
            grad = tl.where((first_col + offs_c < num_valid)[None, :], grad, 0.0)
        store_tile(dlogits, row, col, grad, num_rows, dlogits_cols, dlogits_cols, BLOCK_N, BLOCK_V, TMA)


def write_cells(
    x: Operands, rows: Rows, softmax: Softmax, coef_4N: torch.Tensor, first_col: int, dlogits_RV: torch.Tensor,
    scale_R: torch.Tensor | None = None,
) -> None:
    """Write the gradient at each token's ids from column ``first_col`` on, divided by ``scale_R`` if given."""
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
