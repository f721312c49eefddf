"""Whether the lists of a batch can have room, before they are made: from the columns that are drawn for the bound.

    columns that all lists take  ~  tokens * columns that are not hot * (part of the drawn cells that would be marked)

A softmax that is spread over hundreds of columns a token lets nothing be filtered: the lists overflow, and exact gradients of
all tokens are computed (``lists.plan``). Where that is beyond doubt, the marks, the lists and the pass that makes them would
be for nothing, and exact statistics take their place. They may keep exponentials for backward, as those without a filter do.

The estimate is of the first group of tokens alone, so it is a lower bound for all. It counts ``CERTAIN`` times over: only the
time of a step depends on it where it is wrong, since a token that is not filtered is exact.
"""

from __future__ import annotations

import torch
import triton.language as tl

from cce_dist.kernels import Operands, Rows
from cce_dist.kernels.blocks import has_tma, kernel, operand, tile_of_logits
from cce_dist.kernels.budget import cdiv
from cce_dist.kernels.lse import Marks
from cce_dist.kernels.tiles import Tiles, precision

LOOKED_AT = 1024  # tokens, at most: a thousandth of a product of all columns and 8,192 tokens
CERTAIN = 2.0  # as many columns as there is room for


def has_room(
    drawn: Operands, num_outside: int, rows: Rows, marks: Marks, capacity: int, tiles: Tiles
) -> torch.Tensor:  # fmt: skip
    """Return 0 and 1 where lists of the group alone would surely take more than ``capacity``, else 1 and 0; [2] int32.

    Args:
        drawn: The drawn columns as a shard.
        num_outside: How many columns they stand for.
        rows: Tokens.
        marks: Their bounds.
        capacity: What there is room for.
        tiles: Tiles of the device.
    """
    tile, logits, device = tiles.lse, drawn.logits, rows.hidden.device
    num_rows, hidden_size = rows.hidden.shape
    if logits.num_valid == 0:
        return torch.arange(1, -1, -1, dtype=torch.int32, device=device)
    blocks, parts = min(cdiv(num_rows, tile.rows), cdiv(LOOKED_AT, tile.rows)), cdiv(logits.num_valid, tile.cols)
    count_2C = torch.empty(2, blocks * parts * tile.rows, dtype=torch.int32, device=device)
    room = torch.empty(2, dtype=torch.int32, device=device)
    tma = has_tma(rows.hidden, drawn.weight)
    _marked_cells_kernel[(blocks * parts,)](
        # in
        operand(rows.hidden, tile.rows, tile.inner, tma), operand(drawn.weight, tile.cols, tile.inner, tma), drawn.bias,
        marks.bound_R, rows.num_kept,
        # out
        count_2C,
        # sizes
        num_rows, hidden_size, logits.num_valid, blocks, parts,
        # options
        logits.logit_scale, logits.softcap, marks.log_eps,
        HAS_BIAS=drawn.bias is not None, HAS_SCALE=logits.logit_scale != 1.0, HAS_SOFTCAP=logits.softcap > 0.0,
        # tiles
        BLOCK_N=tile.rows, BLOCK_V=tile.cols, BLOCK_D=tile.inner, TMA=tma, PRECISION=precision(rows.hidden.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    _room_kernel[(1,)](
        count_2C, rows.num_kept, room, count_2C.shape[1], num_outside, CERTAIN * capacity, BLOCK=1024
    )  # fmt: skip
    return room


@kernel("hidden", "weight", "bias_ptr", "hidden_size")
def _marked_cells_kernel(
    hidden,  # in: [R, D] descriptor or pointer
    weight,  # in: [S, D] descriptor or pointer
    bias_ptr,  # in: [S]
    bound_ptr,  # in: [R] fp32
    num_kept_ptr,  # in: [1] int32
    count_ptr,  # out: [2, P, BLOCK_N] int32: cells of a row in a part that would be marked; all of these
    num_rows,
    hidden_size,
    size,
    num_blocks,
    num_parts,
    logit_scale,
    softcap,
    log_eps,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pid = tl.program_id(0)
    num_kept = tl.load(num_kept_ptr)
    # The blocks of tokens that are looked at lie evenly among all.
    row = pid // num_parts * tl.cdiv(num_kept, BLOCK_N) // num_blocks * BLOCK_N
    col = pid % num_parts * BLOCK_V
    z = tile_of_logits(
        hidden, weight, bias_ptr, row, col, num_rows, size, hidden_size, logit_scale, softcap,
        HAS_BIAS, HAS_SCALE, HAS_SOFTCAP, True, BLOCK_N, BLOCK_V, BLOCK_D, TMA, PRECISION,
    )  # fmt: skip
    offs_n = row + tl.arange(0, BLOCK_N)
    live = offs_n < num_kept
    threshold = tl.load(bound_ptr + offs_n, mask=live, other=float("inf")) + log_eps
    marked = (live[:, None] & (z >= threshold[:, None])).to(tl.int32)
    offs_c = pid * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(count_ptr + offs_c, tl.sum(marked, 1))
    num_cells = live.to(tl.int32) * tl.minimum(size - col, BLOCK_V)
    tl.store(count_ptr + num_blocks * num_parts * BLOCK_N + offs_c, num_cells)


@kernel("count_ptr", "room_ptr")
def _room_kernel(
    count_ptr,  # in: [2, C] int32
    num_kept_ptr,  # in: [1] int32
    room_ptr,  # out: [2] int32
    num_counts,
    num_outside,
    most,
    BLOCK: tl.constexpr,
):
    marked = tl.zeros((BLOCK,), tl.int32)
    cells = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, num_counts, BLOCK):
        offs_c = first + tl.arange(0, BLOCK)
        marked += tl.load(count_ptr + offs_c, mask=offs_c < num_counts, other=0)
        cells += tl.load(count_ptr + num_counts + offs_c, mask=offs_c < num_counts, other=0)
    part = tl.sum(marked, 0).to(tl.float32) / tl.maximum(tl.sum(cells, 0), 1).to(tl.float32)
    needed = part * num_outside * tl.load(num_kept_ptr).to(tl.float32)
    tl.store(room_ptr, (needed <= most).to(tl.int32))
    tl.store(room_ptr + 1, (needed > most).to(tl.int32))
