"""Candidates for each token's largest logits, listed while the log-sum-exp is computed.

All logits that reach a threshold are written to their token's list while their tile is in registers: the k largest and some
hundred others. The threshold is the n-th largest logit of a sample, every ``step``-th column, so about ``n step`` columns
reach it. n is so large that one token in a million has fewer than k candidates (``memory.top_plan``). ``largest.py`` chooses
from the lists, and reads all logits of a token whose list is too short or overflows. So the sample affects time, not results.

A slot of a list holds four logits: two pairs of neighbours, eight columns apart, which one thread has in its registers after
Hopper's matrix product (wgmma). The thread writes all four if the largest reaches the threshold. The stores are inline PTX,
because Triton's own store would move the whole tile through shared memory.

Slots are counted in registers, and one integer atomic per row and tile reserves them. So the order of a list may differ from
run to run, but the choice from it does not.
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

TOGETHER = 4  # logits of a slot
# Pivots that logits are compared with in one pass, a power of 2. Logits in registers are compared with one. Where a pass reads
# them from memory more pivots save passes, and in the interpreter, where one takes as long as eight.
PIVOTS = 8
LEAST = tl.constexpr(-(1 << 31))  # an ordinal below every logit's


class Candidates(NamedTuple):
    """The lists of a group of tokens."""

    threshold_R: torch.Tensor  # in: fp32; a slot is listed unless all of its logits are below
    # out: the listed slots of a row. First come the logits, fp32, ``TOGETHER`` per slot; then for each slot the column of its
    # first logit, int32. The columns of its other logits are 1, 8 and 9 more.
    list_RM: torch.Tensor
    count_R: torch.Tensor  # in, out: int32, the number of slots, including those that did not fit

    @property
    def capacity(self) -> int:
        """The number of slots that fit in a list."""
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
    capacity = max(plan.capacity, cdiv(cols, 4 * (TOGETHER + 1)) * 4)
    list_RM = torch.empty(num_rows, (TOGETHER + 1) * capacity, dtype=torch.float32, device=device)
    # The sample's logits use the storage of the lists, which are written later.
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
    """Return the number of pivots for logits in registers."""
    return PIVOTS if interpreted() else 1


@triton.jit
def ordinals_at(z_ptr, offs, size):
    """Load logits as ordinals, int32 numbers in the order of the logits; LEAST at or past ``size``."""
    bits = (tl.load(z_ptr + offs, mask=offs < size, other=0) + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    return tl.where(offs < size, bits ^ ((bits >> 31) & 0x7FFFFFFF), LEAST)


@triton.jit
def num_at_least(z_ptr, held, size, least, BLOCK: tl.constexpr):
    """Count, for each of ``least`` [PIVOTS], the logits whose ordinal reaches it. ``held`` has the first BLOCK ordinals."""
    counts = tl.sum((held[:, None] >= least[None, :]).to(tl.int32), 0)
    for first in range(BLOCK, size, BLOCK):
        ordinals = ordinals_at(z_ptr, first + tl.arange(0, BLOCK), size)
        counts += tl.sum((ordinals[:, None] >= least[None, :]).to(tl.int32), 0)
    return counts


@triton.jit
def reached_by(z_ptr, held, size, low, num_low, wanted, BLOCK: tl.constexpr, PIVOTS: tl.constexpr):
    """Find an ordinal that ``wanted`` logits reach, by a search that cuts an interval into PIVOTS + 1 parts at a time.

    ``num_low`` logits reach ``low``, where the search starts; ``held`` are the ordinals of the first BLOCK logits. Returns the
    ordinal, int64, and the number of logits that reach it. This is more than ``wanted`` only if several logits equal the
    ordinal; the third result is then the number of logits above it.
    """
    tops = held
    for first in range(BLOCK, size, BLOCK):
        tops = tl.maximum(tops, ordinals_at(z_ptr, first + tl.arange(0, BLOCK), size))
    high = tl.max(tops, 0).to(tl.int64) + 1  # reached by no logit
    num_high = tl.zeros((), tl.int32)
    low = low.to(tl.int64)
    # ``wanted`` logits or more reach low, and fewer reach high.
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


def has_inline_ptx() -> bool:
    """Whether candidates are stored by inline PTX."""
    return not interpreted() and torch.version.hip is None


@triton.jit
def list_candidates(
    z, threshold, list_ptr, count_ptr, capacity, col, offs_n, live, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr,
    INLINE_PTX: tl.constexpr,
):
    """Append to each row's list the slots of a tile of logits that reach the row's threshold."""
    # In an accumulator four lanes of a warp share a row, and the column pairs of one lane are eight columns apart. Reshape to
    # [row, lane, cell, slot, pair, neighbour]: one thread has all of the last four dimensions, so nothing moves.
    CELLS: tl.constexpr = (BLOCK_V + 127) // 128
    SLOTS: tl.constexpr = BLOCK_V // 16 // CELLS
    by_lane = tl.permute(tl.reshape(z, (BLOCK_N, CELLS, SLOTS, 2, 4, 2)), (0, 4, 1, 2, 3, 5))
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

    # Prefix sums over the slots of a cell, four bits each: the product with 0x11111111 adds to each four bits all lower ones.
    shift = (4 * tl.arange(0, SLOTS)).to(tl.uint32)[None, None, None, :]
    word = tl.sum(listed << shift, 3)
    up_to = word * 0x11111111
    num_listed = (up_to >> (4 * SLOTS - 4)) & 15
    # Prefix sums over the four lanes of a row, eight bits each.
    byte = (8 * tl.arange(0, 4)).to(tl.uint32)[None, :]
    of_lane = tl.sum(num_listed, 2)
    packed = tl.sum(of_lane << byte, 1) * 0x01010101
    total = (packed >> 24).to(tl.int32)
    begin = tl.atomic_add(count_ptr + offs_n, total, mask=live & (total > 0), sem="relaxed")
    # Rows that are not live may hold NaN or infinity from the bias. They begin past the list's end, so nothing is stored.
    begin = tl.where(live, begin, capacity)
    before = begin[:, None] + (((packed[:, None] >> byte) & 255) - of_lane).to(tl.int32)
    # A lane has one cell or two; the slots of the second come after those of the first.
    later = (tl.arange(0, CELLS) > 0)[None, None, :]
    before = before[:, :, None] + tl.where(later, of_lane[:, :, None] - num_listed, 0).to(tl.int32)
    slot = before[:, :, :, None] + (((up_to - word)[:, :, :, None] >> shift) & 15).to(tl.int32)

    lane = tl.arange(0, 4)[None, :, None, None]
    first = tl.arange(0, CELLS)[None, None, :, None] * SLOTS + tl.arange(0, SLOTS)[None, None, None, :]
    column = col + 2 * lane + 16 * first
    # Row offsets are in units of 16 bytes, so that they fit in 32 bits, one register.
    row = offs_n[:, None, None, None] * (5 * capacity // 4)
    if INLINE_PTX:
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
            [z_0, z_1, z_8, z_9, top, limit, slot, capacity, list_ptr.to(tl.int64), row, column],
            dtype=tl.int32, is_pure=False, pack=1,
        )
    else:
        mask = (listed > 0) & (slot < capacity)
        row = list_ptr + 4 * row.to(tl.int64)
        at = row + 4 * slot
        tl.store(at, z_0, mask=mask)
        tl.store(at + 1, z_1, mask=mask)
        tl.store(at + 2, z_8, mask=mask)
        tl.store(at + 3, z_9, mask=mask)
        tl.store(row + 4 * capacity + slot, column.to(tl.float32, bitcast=True), mask=mask)
