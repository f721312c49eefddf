"""The k largest logits of each token, from lists of candidates or from all logits.

Logits become ordinals, integers in the same order (``candidates.ordinals_at``). A search finds an ordinal that exactly k of a
row's logits reach. If equal logits make that impossible, a bisection over columns chooses the smallest ids among them. Neither
depends on the order of a list.

``choose_listed`` serves tokens whose list is complete: it did not overflow and holds at least k logits. Only the device knows
how many tokens are left for ``choose_among_all``, which computes all of their logits again. These are constant rows, rows of
nearly nothing but -inf, and all tokens if the vocabulary is small (``memory.top_plan``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cce_dist.kernels import IGNORED, Operands, Rows, Spec, memory
from cce_dist.kernels.blocks import kernel
from cce_dist.kernels.candidates import (
    LEAST,
    PIVOTS,
    TOGETHER,
    Candidates,
    num_at_least,
    num_pivots,
    ordinals_at,
    reached_by,
)
from cce_dist.kernels.extras import LEAST_KEY
from cce_dist.kernels.logits import logits_chunk
from cce_dist.kernels.tiles import Tiles
from cce_dist.kernels.tokens import compact, gathered, token_groups
from cce_dist.kernels.waves import cdiv

_IGNORED = tl.constexpr(IGNORED)
_LEAST_KEY = tl.constexpr(LEAST_KEY)


def choose_listed(
    x: Operands, rows: Rows, lists: Candidates, spec: Spec, keys_KN: torch.Tensor, left_N: torch.Tensor
) -> None:
    """Write the largest keys (``extras.rows_of_keys``) of tokens whose list is complete. left_N is IGNORED for them, else 0."""
    _launch(x, rows, lists.list_RM, lists, spec, keys_KN, left_N)


def choose_among_all(x: Operands, left_N: torch.Tensor, spec: Spec, tiles: Tiles, keys_KN: torch.Tensor) -> None:
    """Write the largest keys of the tokens whose ``left_N`` is not negative, from all of their logits."""
    num_tokens, num_valid, hidden_size = x.num_tokens, x.num_valid, x.hidden.shape[1]
    cols = cdiv(num_valid, tiles.lse.cols) * tiles.lse.cols
    sizes = memory.Sizes(num_tokens, hidden_size, cols, x.hidden.itemsize)
    at_once = memory.top_rows_of_all(sizes, spec.workspace_bytes)
    buffer_RD = x.hidden.new_empty(at_once, hidden_size)
    z_RV = torch.empty(at_once, cols, dtype=torch.float32, device=x.hidden.device)
    for group in token_groups(compact(left_N), at_once):
        rows = gathered(x.hidden, group, buffer_RD)
        z_rows_RV = z_RV[: rows.index.shape[0]]
        logits_chunk(x, rows, 0, z_rows_RV, tiles)
        _launch(x, rows, z_rows_RV, None, spec, keys_KN, None)


def _launch(
    x: Operands, rows: Rows, z_RM: torch.Tensor, lists: Candidates | None, spec: Spec, keys_KN: torch.Tensor,
    left_N: torch.Tensor | None,
) -> None:
    num_rows, top_k = rows.index.shape[0], spec.want.top_k
    threshold_R, _, count_R = lists or (None, None, None)
    chosen_RK = torch.empty(num_rows, top_k, dtype=torch.int64, device=z_RM.device)
    power, whole = triton.next_power_of_2(top_k), triton.next_power_of_2(z_RM.shape[1])
    # One warp handles a list, as long as its k keys fit in the warp's registers.
    block = min(whole, 4096 if lists is None else max(1024, 8 * power))
    warps = max(1, block // (512 if lists is None else 1024))
    _choose_kernel[(num_rows,)](
        z_RM, count_R, threshold_R, rows.index, rows.num_kept,
        chosen_RK, keys_KN, left_N,
        x.num_tokens, z_RM.shape[1], None if lists is None else lists.capacity, x.num_valid, x.start, top_k,
        LISTED=lists is not None, TOGETHER=TOGETHER, PIVOTS=PIVOTS if lists is None else num_pivots(), BLOCK_K=power,
        PART=min(64, max(1, 1024 * warps // power)), BLOCK=block, CHUNK=max(1, block // 4), num_warps=warps,
    )


@kernel("z_ptr", "chosen_ptr", "num_cols")
def _choose_kernel(
    z_ptr,  # in: [R, columns] fp32; lists with LISTED
    count_ptr,  # in: [R] int32; only with LISTED
    threshold_ptr,  # in: [R] fp32; only with LISTED
    index_ptr,  # in: [R] int32
    num_kept_ptr,  # in: [1] int32
    chosen_ptr,  # scratch: [R, top_k] int64
    keys_ptr,  # out: [2 top_k, N] int32
    left_ptr,  # out: [N] int64; only with LISTED
    num_tokens,
    num_cols,
    capacity,
    num_valid,
    start,
    top_k,
    LISTED: tl.constexpr,
    TOGETHER: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    row = tl.program_id(0)
    token = tl.load(index_ptr + row)
    if row >= tl.load(num_kept_ptr):
        if LISTED:
            tl.store(left_ptr + token, _IGNORED)
        return
    z_ptr += row.to(tl.int64) * num_cols
    wanted = tl.minimum(top_k, num_valid)
    size = num_valid
    column_ptr = z_ptr
    low = tl.zeros((), tl.int32) + LEAST
    num_low = size
    if not LISTED:
        held = ordinals_at(z_ptr, tl.arange(0, BLOCK), size)
    else:
        count = tl.load(count_ptr + row)
        size = tl.minimum(count, capacity) * TOGETHER
        column_ptr += capacity * TOGETHER
        held = ordinals_at(z_ptr, tl.arange(0, BLOCK), size)
        bits = (tl.load(threshold_ptr + row) + 0.0).to(tl.int32, bitcast=True)
        low = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        num_low = tl.max(num_at_least(z_ptr, held, size, low + tl.zeros((1,), tl.int32), BLOCK), 0)
        whole = (count <= capacity) & (num_low >= wanted)
        tl.store(left_ptr + token, tl.where(whole, _IGNORED, 0))
        if not whole:
            return
    low, num_low, num_above = reached_by(z_ptr, held, size, low, num_low, wanted, BLOCK, PIVOTS)

    # If only some of several equal logits are wanted, find the last column to take by bisection: the smallest ids win.
    last = num_valid
    if num_low > wanted:
        begin = tl.zeros((), tl.int32) - 1
        while last - begin > 1:
            middle = begin + ((last - begin) >> 1)
            counts = tl.zeros((BLOCK,), tl.int32)
            for first in range(0, size, BLOCK):
                offs = first + tl.arange(0, BLOCK)
                column = _columns(column_ptr, offs, size, LISTED, TOGETHER)
                counts += ((ordinals_at(z_ptr, offs, size) == low) & (offs < size) & (column <= middle)).to(tl.int32)
            enough = tl.sum(counts, 0) >= wanted - num_above
            last = tl.where(enough, middle, last)
            begin = tl.where(enough, begin, middle)

    # Write the keys of the chosen logits [wanted] in the order in which they are found, CHUNK logits at a time.
    chosen_ptr += row.to(tl.int64) * top_k
    taken = tl.zeros((), tl.int32)
    for first in range(0, size, CHUNK):
        offs = first + tl.arange(0, CHUNK)
        ordinals = ordinals_at(z_ptr, offs, size)
        column = _columns(column_ptr, offs, size, LISTED, TOGETHER)
        chosen = (offs < size) & ((ordinals > low) | ((ordinals == low) & (column <= last)))
        place = taken + tl.cumsum(chosen.to(tl.int32), 0) - 1
        taken += tl.sum(chosen.to(tl.int32), 0)
        key = (ordinals.to(tl.int64) << 32) | (0xFFFFFFFF - (start + column).to(tl.int64))
        tl.store(chosen_ptr + place, key, mask=chosen)
    tl.debug_barrier()

    # Sort by counting: a key's rank is the number of larger keys.
    offs_k = tl.arange(0, BLOCK_K)
    key = tl.load(chosen_ptr + offs_k, mask=offs_k < wanted, other=_LEAST_KEY)
    place = tl.zeros((BLOCK_K,), tl.int32)
    for first in range(0, wanted, PART):
        offs = first + tl.arange(0, PART)
        other = tl.load(chosen_ptr + offs, mask=offs < wanted, other=_LEAST_KEY)
        place += tl.sum((other[None, :] > key[:, None]).to(tl.int32), 1)
    out = keys_ptr + place.to(tl.int64) * num_tokens + token
    tl.store(out, (key >> 32).to(tl.int32), mask=offs_k < wanted)
    tl.store(out + top_k * num_tokens.to(tl.int64), key.to(tl.int32), mask=offs_k < wanted)


@triton.jit
def _columns(column_ptr, offs, size, LISTED: tl.constexpr, TOGETHER: tl.constexpr):
    """Return the columns of the logits at ``offs`` of a row or of its list."""
    column = offs
    if LISTED:
        # A slot has two pairs of neighbours, eight columns apart.
        column = tl.load(column_ptr + offs // TOGETHER, mask=offs < size, other=0).to(tl.int32, bitcast=True)
        column += offs % 2 + 8 * (offs // 2 % 2)
    return column
