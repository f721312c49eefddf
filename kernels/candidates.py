"""Candidates for the largest logits of each token, listed by the sweep that takes the log-sum-exp.

All logits that reach a threshold are written to their token's list while their tile is in registers: its k largest and some
hundred others. The threshold is the n-th largest logit of a sample, every ``step``-th column, so about ``n step`` columns
reach it; n is so large that a token in a million has fewer than k of them (``memory.top_plan``). ``largest.py`` chooses from
the lists, and sees to tokens whose list is too short or too long: the sample decides about time alone.

A place of a list holds four logits, two pairs of neighbours that are eight columns apart, which one thread has in its
registers after a product of Hopper's (wgmma). It writes all four if the largest reaches the threshold. The stores are in PTX,
since Triton would bring the whole tile through shared memory for its own.

Places are counted in registers, and one integer atomic for a row and a tile reserves them: the order of a list may differ from
run to run, and what is chosen from it does not.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from cce_dist.kernels import Operands, Rows
from cce_dist.kernels.blocks import has_tma, kernel
from cce_dist.kernels.logits import logits_chunk
from cce_dist.kernels.memory import TopPlan
from cce_dist.kernels.tiles import Tiles, interpreted
from cce_dist.kernels.waves import cdiv

TOGETHER = 4  # logits of a place
# Ordinals that logits are compared with at a time, a power of 2: one where the logits are in registers, more where they are
# read anew each time, and in the interpreter, which takes as long for one.
PIVOTS = 8
LEAST = tl.constexpr(-(1 << 31))  # the ordinal of no logit


class Candidates(NamedTuple):
    """The lists of a group of tokens."""

    threshold_R: torch.Tensor  # in: fp32; a place is listed unless all of its logits are below
    # out: the listed places of a row. First their logits, fp32, ``TOGETHER`` of a place side by side; then for each place
    # the column of its first logit, int32. The other logits' columns are 1, 8 and 9 more.
    list_RM: torch.Tensor
    count_R: torch.Tensor  # in, out: int32, how many places there are, also of those that found no room

    @property
    def room(self) -> int:
        """Places of a list."""
        return self.list_RM.shape[1] // (TOGETHER + 1)


def sampled(x: Operands, plan: TopPlan) -> Operands:
    """Return every ``step``-th column as a shard of its own."""
    columns = slice(0, x.num_valid, plan.step)
    weight = x.weight[columns]
    if not has_tma(x.hidden, weight):
        weight = weight.contiguous()
    return x._replace(weight=weight, head=x.head.of_columns(columns), start=0, num_valid=weight.shape[0])


def new_candidates(sample: Operands, plan: TopPlan, tiles: Tiles, rows: Rows) -> Candidates:
    """Return empty lists for a group of tokens, with thresholds from the sample."""
    num_rows, device = rows.hidden.shape[0], rows.hidden.device
    size, cols = sample.weight.shape[0], cdiv(sample.weight.shape[0], tiles.lse.cols) * tiles.lse.cols
    threshold_R = torch.empty(num_rows, dtype=torch.float32, device=device)
    room = max(plan.room, cdiv(cols, 4 * (TOGETHER + 1)) * 4)
    list_RM = torch.empty(num_rows, (TOGETHER + 1) * room, dtype=torch.float32, device=device)
    # The sample's logits stand where the lists will.
    z_RS = list_RM.view(-1)[: num_rows * cols].view(num_rows, cols)
    logits_chunk(sample, rows, 0, z_RS, tiles)
    block = triton.next_power_of_2(size)
    _threshold_kernel[(num_rows,)](
        z_RS, rows.num_kept,
        threshold_R,
        size, cols, min(plan.nth, size), BLOCK=block, PIVOTS=num_pivots(), num_warps=max(1, block // 2048),
    )
    return Candidates(threshold_R, list_RM, torch.zeros(num_rows, dtype=torch.int32, device=device))


def num_pivots() -> int:
    """Pivots where logits are in registers."""
    return PIVOTS if interpreted() else 1


@triton.jit
def ordinals_at(z_ptr, offs, size):
    """Read logits as integers that have their order; LEAST at or past ``size``."""
    bits = (tl.load(z_ptr + offs, mask=offs < size, other=0) + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    return tl.where(offs < size, bits ^ ((bits >> 31) & 0x7FFFFFFF), LEAST)


@triton.jit
def num_at_least(z_ptr, held, size, least, BLOCK: tl.constexpr):
    """Count the logits whose ordinal is at least each of ``least``, [PIVOTS] int32. ``held`` has the first BLOCK ordinals."""
    counts = tl.sum((held[:, None] >= least[None, :]).to(tl.int32), 0)
    for first in range(BLOCK, size, BLOCK):
        ordinals = ordinals_at(z_ptr, first + tl.arange(0, BLOCK), size)
        counts += tl.sum((ordinals[:, None] >= least[None, :]).to(tl.int32), 0)
    return counts


@triton.jit
def reached_by(z_ptr, held, size, low, num_low, wanted, BLOCK: tl.constexpr, PIVOTS: tl.constexpr):
    """Raise ``low``, an ordinal that ``num_low`` logits reach, until only ``wanted`` of them do, or as far as these do.

    ``held`` are the ordinals of the first BLOCK logits. The interval that the answer is in is cut into PIVOTS + 1 parts at a
    time. Returns the ordinal, int64, and the number of logits that reach it, which is more than ``wanted`` if some are equal;
    then the number of those that are larger.
    """
    tops = held
    for first in range(BLOCK, size, BLOCK):
        tops = tl.maximum(tops, ordinals_at(z_ptr, first + tl.arange(0, BLOCK), size))
    high = tl.max(tops, 0).to(tl.int64) + 1  # reached by none
    num_high = tl.zeros((), tl.int32)
    low = low.to(tl.int64)
    while (high - low > 1) & (num_low > wanted):
        step = (high - low + PIVOTS) // (PIVOTS + 1)
        pivots = tl.minimum(low + step * (1 + tl.arange(0, PIVOTS)), high - 1)
        counts = num_at_least(z_ptr, held, size, pivots.to(tl.int32), BLOCK)
        enough = counts >= wanted
        num_low = tl.min(tl.where(enough, counts, num_low), 0)
        num_high = tl.max(tl.where(enough, num_high, counts), 0)
        high = tl.min(tl.where(enough, high, pivots), 0)
        low = tl.max(tl.where(enough, pivots, low), 0)
    return low, num_low, num_high


@kernel("z_ptr", "num_cols")
def _threshold_kernel(
    z_ptr,  # in: [R, columns] fp32
    num_kept_ptr,  # in: [1] int32
    threshold_ptr,  # out: [R] fp32
    size,
    num_cols,
    wanted,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    row = tl.program_id(0)
    if row >= tl.load(num_kept_ptr):
        return
    z_ptr += row.to(tl.int64) * num_cols
    held = ordinals_at(z_ptr, tl.arange(0, BLOCK), size)
    low, _, _ = reached_by(z_ptr, held, size, tl.zeros((), tl.int32) + LEAST, size, wanted, BLOCK, PIVOTS)
    ordinal = low.to(tl.int32)
    tl.store(threshold_ptr + row, (ordinal ^ ((ordinal >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True))


def by_hand() -> bool:
    """Whether candidates are stored in PTX."""
    return not interpreted() and torch.version.hip is None


@triton.jit
def list_candidates(
    z, threshold, list_ptr, count_ptr, room, col, offs_n, live, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr,
    BY_HAND: tl.constexpr,
):
    """Append the places of a tile of logits that reach their row's threshold to the row's list."""
    # Four lanes of a warp share a row of an accumulator, and a lane's next columns are eight further: [row, lane, cell, place,
    # pair, neighbour]. A thread has all but the first two, so nothing moves.
    CELLS: tl.constexpr = (BLOCK_V + 127) // 128
    PLACES: tl.constexpr = BLOCK_V // 16 // CELLS
    by_lane = tl.permute(tl.reshape(z, (BLOCK_N, CELLS, PLACES, 2, 4, 2)), (0, 4, 1, 2, 3, 5))
    even, odd = tl.split(by_lane)
    z_0, z_8 = tl.split(even)
    z_1, z_9 = tl.split(odd)
    # NaN counts as the largest.
    ALL: tl.constexpr = tl.PropagateNan.ALL
    top = tl.maximum(
        tl.maximum(z_0, z_1, propagate_nan=ALL), tl.maximum(z_8, z_9, propagate_nan=ALL), propagate_nan=ALL
    )
    limit = threshold[:, None, None, None]
    listed = tl.where(top < limit, 0, 1).to(tl.uint32)

    # The places of a cell are counted in four bits each: the product with 0x11111111 has in each of them the sum up to there.
    shift = (4 * tl.arange(0, PLACES)).to(tl.uint32)[None, None, None, :]
    word = tl.sum(listed << shift, 3)
    up_to = word * 0x11111111
    num_listed = (up_to >> (4 * PLACES - 4)) & 15
    # The same for the four lanes of a row, in eight bits each.
    byte = (8 * tl.arange(0, 4)).to(tl.uint32)[None, :]
    of_lane = tl.sum(num_listed, 2)
    packed = tl.sum(of_lane << byte, 1) * 0x01010101
    total = (packed >> 24).to(tl.int32)
    begin = tl.atomic_add(count_ptr + offs_n, total, mask=live & (total > 0), sem="relaxed")
    # Rows that are none list NaN and infinity of a bias; there is no room for them.
    begin = tl.where(live, begin, room)
    before = begin[:, None] + (((packed[:, None] >> byte) & 255) - of_lane).to(tl.int32)
    # A lane has one cell or two.
    later = (tl.arange(0, CELLS) > 0)[None, None, :]
    before = before[:, :, None] + tl.where(later, of_lane[:, :, None] - num_listed, 0).to(tl.int32)
    place = before[:, :, :, None] + (((up_to - word)[:, :, :, None] >> shift) & 15).to(tl.int32)

    lane = tl.arange(0, 4)[None, :, None, None]
    first = tl.arange(0, CELLS)[None, None, :, None] * PLACES + tl.arange(0, PLACES)[None, None, None, :]
    column = col + 2 * lane + 16 * first
    # In units of 16 bytes: 32 bits are one register.
    row = offs_n[:, None, None, None] * (5 * room // 4)
    if BY_HAND:
        tl.inline_asm_elementwise(
            """{
            .reg .pred listed;
            .reg .b32 unit;
            .reg .b64 at;
            setp.geu.f32 listed, $5, $6;
            setp.lt.and.s32 listed, $7, $8, listed;
            add.s32 unit, $10, $7;
            mad.wide.s32 at, unit, 16, $9;
            @listed st.global.v4.f32 [at], {$1, $2, $3, $4};
            add.s32 unit, $10, $8;
            mad.wide.s32 at, unit, 16, $9;
            mad.wide.s32 at, $7, 4, at;
            @listed st.global.u32 [at], $11;
            mov.u32 $0, 0;
            }""",
            "=r,f,f,f,f,f,f,r,r,l,r,r",
            [z_0, z_1, z_8, z_9, top, limit, place, room, list_ptr.to(tl.int64), row, column],
            dtype=tl.int32, is_pure=False, pack=1,
        )
    else:
        mask = (listed > 0) & (place < room)
        row = list_ptr + 4 * row.to(tl.int64)
        at = row + 4 * place
        tl.store(at, z_0, mask=mask)
        tl.store(at + 1, z_1, mask=mask)
        tl.store(at + 2, z_8, mask=mask)
        tl.store(at + 3, z_9, mask=mask)
        tl.store(row + 4 * room + place, column.to(tl.float32, bitcast=True), mask=mask)
