"""Forward over all columns in 8 bits: it finds the few logits that matter, and sums the others.

The product of ``fp8.py`` costs half of the one in 16 bits, and its logits are some hundredths of a nat off. Its epilogue marks
each logit that may reach the threshold, its error counted, and adds the exponentials of the others. Marks become lists as
always (``lists.py``). The marked logits are then computed from the operands themselves:

    sum of exp  =  frequent columns (16 bits)  +  marked columns (16 bits)  +  all others (8 bits)

Everything is relative to the token's bound. What is not marked is below it, so no maximum runs along, and the bound is the same
on all shards.

A token is computed again in 16 bits, all columns, where the sum cannot be trusted: something is not finite, its hidden state
cannot be rounded (``fp8.py``), its list is too long or overflowed, or its bound was too high. Where there is none the launches
return at once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from cce_dist.kernels import Operands, Rows, Spec, budget, exact
from cce_dist.kernels.blocks import (
    has_tma,
    kernel,
    load_tile,
    operand,
    row_and_split,
    softcap_slope,
    softcapped,
)
from cce_dist.kernels.budget import cdiv
from cce_dist.kernels.filter import lists as lists_
from cce_dist.kernels.filter.frequent import Frequent
from cce_dist.kernels.filter.lists import FARTHEST, SLACK, Lists, list_columns
from cce_dist.kernels.filter.screen.centering import Centering, find_centering
from cce_dist.kernels.filter.screen.fp8 import (
    ERROR,
    LOG2_E,
    Rounded,
    new_rounded,
    round_hidden,
    round_weight,
    some_of,
    sum_of_parts,
)
from cce_dist.kernels.tiles import Tile, Tiles, interpreted, num_programs, screen_tile

NOWHERE = tl.constexpr(-1e4)  # powers of 2 that an exponential of 0 is below the bound
ERRORS = 4.0  # standard errors that a logit may be higher than it is screened


class First(NamedTuple):
    """What is known of the tokens before the pass over all columns, [N] fp32 or as said.

    Attributes:
        order: The compact order, as ``tokens.compact`` returns it.
        frequent_3N: Maximum and sum of exp over the frequent columns.
        frequent_sloped_N: That sum times the softcap's slopes, or None.
        frequent_moment_N: That sum times what the logits are above the maximum, for a screen with the entropy, or None.
        shard_3N: The shard's part of the bound, maximum and sum.
        bound_N: Lower bound of the log-sum-exp.
        sampled: The columns that are sampled for it, as a shard of their own.
    """

    order: list[torch.Tensor]
    frequent_3N: torch.Tensor
    frequent_sloped_N: torch.Tensor | None
    frequent_moment_N: torch.Tensor | None
    shard_3N: torch.Tensor
    bound_N: torch.Tensor
    sampled: Operands


def screened_statistics(
    x: Operands, frequent: Frequent, first: First, lists: Lists, stats_KN: torch.Tensor, spec: Spec, tiles: Tiles
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write maximum, sum of exp and, for the entropy, the moment of each token to stats_KN, and the lists with their logits.

    The "maximum" is the bound, which is near the log-sum-exp.

    Returns:
        ``Lists.bound_3N``, with a bound of NaN where the token's sum cannot be trusted, so that lists do not serve it; and the
        labels of those tokens, -1 for all others, [N] int64.
    """
    chunks = _Chunks.of(x, frequent, lists.columns_M.shape[0], spec, tiles)
    centering = find_centering(x, first.sampled, first.order, first.bound_N, spec.filter.eps)
    bound_3N = stats_KN.new_empty(3, x.num_tokens)
    fallback_N = torch.empty_like(x.ids)
    for index_R, num_kept in exact.token_groups(first.order, chunks.at_once):
        rows = Rows(index_R, num_kept, x.hidden)
        hidden = some_of(chunks.hidden, index_R.shape[0])
        round_hidden(x, index_R, num_kept, first.bound_N, centering, hidden)
        sums_KPR = _screen_columns(x, frequent, rows, hidden, centering, lists, chunks, spec, tiles.group)
        _join_lists(x, frequent, rows, chunks, lists)
        _add_listed(x, rows, lists, chunks, first.bound_N, sums_KPR)
        _merge(x, rows, first, lists, chunks, hidden, centering, sums_KPR, (stats_KN, bound_3N, fallback_N))
    return bound_3N, fallback_N


class _Chunks(NamedTuple):
    """Chunks of tokens and of columns, and memory for a chunk and for the lists of its marks. C chunks of columns.

    Attributes:
        at_once: Tokens of a group.
        columns: First and last column of each chunk.
        splits: How many parts of the sums each chunk fills.
        tile: Of the product.
        hidden: A group's hidden states.
        weight: A chunk of the weight.
        words: The marks of a group in a chunk, as in ``lse.py``; int32, flat.
        columns_M: The lists of all chunks; columns count from the chunk's first. int32.
        begin_CN: Where the list of a token in a chunk begins; int32.
        count_CN: How many columns it has; int32.
        unmarked_N: The label's column where it is listed and not marked, else -1; int32.
        taken: [2] int64: places that the lists of chunks took, and those of tokens.
    """

    at_once: int
    columns: list[tuple[int, int]]
    splits: list[int]
    tile: Tile
    hidden: Rounded
    weight: Rounded
    words: torch.Tensor
    columns_M: torch.Tensor
    begin_CN: torch.Tensor
    count_CN: torch.Tensor
    unmarked_N: torch.Tensor
    taken: torch.Tensor

    @staticmethod
    def of(x: Operands, frequent: Frequent, capacity: int, spec: Spec, tiles: Tiles) -> _Chunks:
        (num_tokens, hidden_size), device = x.hidden.shape, x.hidden.device
        tile = screen_tile(device, x.logits.softcap > 0.0)
        num_columns = 32 * frequent.words_W.shape[0]
        at_once, cols = budget.screen_chunks(
            exact.sizes_of(x), num_columns, capacity, spec.workspace_bytes, tile.rows, tiles.group, tile.cols
        )
        at_once = min(at_once, num_tokens)
        columns = [(first, min(first + cols, num_columns)) for first in range(0, num_columns, cols)]
        splits = [
            budget.num_parts(at_once, (last - first) // tile.cols, tile.rows, num_programs(device))
            for first, last in columns
        ]
        begin_CN, count_CN = torch.empty(
            2, len(columns), num_tokens, dtype=torch.int32, device=device
        ).unbind()
        words, columns_M, unmarked_N = (
            torch.empty(n, dtype=torch.int32, device=device) for n in (at_once * cols // 32, capacity, num_tokens)
        )
        return _Chunks(
            at_once, columns, splits, tile,
            new_rounded(at_once, hidden_size, tile.inner, 4, device), new_rounded(cols, hidden_size, tile.inner, 2, device),
            words, columns_M, begin_CN, count_CN, unmarked_N, torch.zeros(2, dtype=torch.int64, device=device),
        )

    @property
    def num_screened(self) -> int:
        """Parts of the sums that are of what is not marked; the others are of lists."""
        return sum(self.splits)


def _screen_columns(
    x: Operands, frequent: Frequent, rows: Rows, hidden: Rounded, centering: Centering, lists: Lists, chunks: _Chunks,
    spec: Spec, group: int,
) -> torch.Tensor:
    """Screen all columns for a group of tokens, and list the marks of each chunk.

    Returns:
        Sums of exp relative to the bound, with a softcap those times its slopes, with the entropy those times what the logits
        are above the bound, in P parts, fp32. Those of what is not marked are written.
    """
    planes = 1 + (x.logits.softcap > 0.0) + spec.want.entropy
    num_rows, nothing = rows.index.shape[0], x._replace(logits=x.logits._replace(num_valid=0))
    listed = 2 if interpreted() else budget.LISTED_PARTS
    sums_KPR = centering.weight_D.new_empty(planes, chunks.num_screened + listed, num_rows)
    part = 0
    for number, ((first, last), split) in enumerate(zip(chunks.columns, chunks.splits, strict=True)):
        chunk = some_of(chunks.weight, last - first)
        words_RW = chunks.words[: num_rows * (last - first) // 32].view(num_rows, -1)
        round_weight(x, frequent.slot_V, centering, chunk, first)
        screen_chunk(
            hidden, chunk, rows.num_kept, x, math.log(spec.filter.eps / SLACK), range(part, part + split), sums_KPR,
            words_RW, chunks.tile, group,
        )
        # Labels are none of a shard without columns: they join the lists later.
        of_chunk = lists._replace(
            columns_M=chunks.columns_M, begin_N=chunks.begin_CN[number], count_N=chunks.count_CN[number]
        )
        frequent_here = frequent._replace(words_W=frequent.words_W[first // 32 :])
        list_columns(words_RW, frequent_here, nothing, rows, of_chunk, chunks.taken)
        part += split
    return sums_KPR


def screen_chunk(
    hidden: Rounded, weight: Rounded, num_kept: torch.Tensor, x: Operands, log_eps: float, parts: range,
    sums_KPR: torch.Tensor, words_RW: torch.Tensor, tile: Tile, group: int,
) -> None:
    """Screen a chunk of columns, whole tiles, for a group of tokens.

    Args:
        num_kept: [1] int32: tokens of the group that count.
        x: For the options of its logits.
        log_eps: Logits from ``bound + log_eps`` on are marked.
        parts: The parts of the sums that the chunk fills.
        sums_KPR: out: the sums over what is not marked.
        words_RW: out: the marks of the chunk.
    """
    num_rows, num_inner = hidden.codes.shape
    logits = x.logits
    tma = has_tma(hidden.codes, weight.codes)
    _screen_kernel[(cdiv(num_rows, tile.rows) * len(parts),)](
        # in
        operand(hidden.codes, tile.rows, tile.inner, tma), operand(weight.codes, tile.cols, tile.inner, tma),
        hidden.numbers_KR, weight.numbers_KR, num_kept,
        # out
        sums_KPR, words_RW,
        # sizes
        num_rows, num_inner, weight.codes.shape[0], words_RW.shape[1], sums_KPR.shape[1], len(parts), parts.start,
        # options
        logits.softcap, log_eps,
        abs(logits.logit_scale) * ERRORS * ERROR / x.hidden.shape[1] ** 0.5, HAS_SOFTCAP=logits.capped,
        WANT_MOMENT=_has_moment(sums_KPR, x),
        # tiles
        BLOCK_N=tile.rows, BLOCK_V=tile.cols, BLOCK_D=tile.inner, GROUP=group, TMA=tma,
        num_warps=tile.warps, num_stages=tile.stages,
    )


def _has_moment(sums_KPR: torch.Tensor, x: Operands) -> bool:
    return sums_KPR.shape[0] > 1 + (x.logits.softcap > 0.0)


@kernel("hidden", "weight", "sums_ptr", "words_ptr", "num_inner", "num_cols")
def _screen_kernel(
    hidden,  # in: [R, D or more] e4m3, descriptor or pointer
    weight,  # in: [C, D or more] e4m3, descriptor or pointer
    row_ptr,  # in: [4, R] fp32: scale, number, length, bound
    col_ptr,  # in: [2, C] fp32: number, length
    num_kept_ptr,  # in: [1] int32
    sums_ptr,  # out: [K, P, R] fp32
    words_ptr,  # out: [R, W] int32
    num_rows,
    num_inner,
    num_cols,
    num_words,
    num_parts,
    num_splits,
    first_split,
    softcap,
    log_eps,
    error,
    HAS_SOFTCAP: tl.constexpr,
    WANT_MOMENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
):
    num_kept = tl.load(num_kept_ptr)
    num_row_blocks = tl.cdiv(num_kept, BLOCK_N)
    pid = tl.program_id(0)
    if pid >= num_row_blocks * num_splits:
        return
    row_block, split = row_and_split(pid, num_row_blocks, num_splits, GROUP)
    row = row_block * BLOCK_N
    offs_n = row + tl.arange(0, BLOCK_N)
    in_n = offs_n < num_rows
    num_tiles = num_cols // BLOCK_V
    start = split * num_tiles // num_splits
    stop = (split + 1) * num_tiles // num_splits

    row_plane = num_rows.to(tl.int64)
    row_ptr += offs_n
    row_scale = tl.load(row_ptr, mask=in_n, other=0)[:, None]
    row_number = tl.load(row_ptr + row_plane, mask=in_n, other=float("-inf"))
    length = tl.load(row_ptr + 2 * row_plane, mask=in_n, other=0)
    # Nothing is marked of a row that could not be rounded: its token is computed again.
    limit = tl.where(length < float("inf"), log_eps * LOG2_E, float("inf"))
    row_error = tl.where(length < float("inf"), length * (error * LOG2_E), 0.0)[:, None]
    if HAS_SOFTCAP:
        bound = tl.load(row_ptr + 3 * row_plane, mask=in_n, other=0)[:, None]
    else:
        # A token's number is the same in all of its logits: exponentials are without it until they are added up.
        limit = limit - row_number
    sum_exp = tl.zeros((BLOCK_N,), tl.float32)
    sum_sloped = tl.zeros((BLOCK_N,), tl.float32)
    moment = tl.zeros((BLOCK_N,), tl.float32)

    for tile in tl.range(start, stop, flatten=True):
        acc = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
        for inner in range(0, num_inner, BLOCK_D):
            h = load_tile(hidden, row, inner, num_rows, num_inner, num_inner, BLOCK_N, BLOCK_D, TMA)
            w = load_tile(weight, tile * BLOCK_V, inner, num_cols, num_inner, num_inner, BLOCK_V, BLOCK_D, TMA)
            acc = tl.dot(h, w.T, acc)
        offs_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        col_number = tl.load(col_ptr + offs_v)
        col_error = tl.load(col_ptr + num_cols + offs_v)
        # Logarithms are to base 2 from here on, relative to the bound.
        y = acc * row_scale + col_number[None, :]
        if HAS_SOFTCAP:
            z = softcapped(y + row_number[:, None], softcap, HAS_SOFTCAP)
            y = tl.where((col_number > float("-inf"))[None, :], (z - bound) * LOG2_E, float("-inf"))
        # NaN counts as marked.
        others = y + row_error * col_error[None, :] < limit[:, None]
        if WANT_MOMENT:
            # Some finite number whose exponential is 0, so that the product is too.
            y = tl.where(others, tl.maximum(y, NOWHERE), NOWHERE)
            e = tl.exp2(y)
            moment += tl.sum(e * y, 1)
        else:
            e = tl.where(others, tl.exp2(y), 0.0)
        sum_exp += tl.sum(e, 1)
        if HAS_SOFTCAP:
            sum_sloped += tl.sum(e * tl.where(others, softcap_slope(z, softcap), 0.0), 1)
        bits = tl.where(others, 0, 1 << (tl.arange(0, BLOCK_V) % 32)[None, :])
        words = tl.sum(tl.reshape(bits, (BLOCK_N, BLOCK_V // 32, 32)), 2).to(tl.int32)
        offs_w = tile * (BLOCK_V // 32) + tl.arange(0, BLOCK_V // 32)
        where = words_ptr + offs_n.to(tl.int64)[:, None] * num_words + offs_w[None, :]
        tl.store(where, words, mask=in_n[:, None])

    if WANT_MOMENT:
        if not HAS_SOFTCAP:
            moment = (moment + row_number * sum_exp) * tl.exp2(row_number)
        tl.store(
            sums_ptr + ((1 + (HAS_SOFTCAP > 0)) * num_parts + first_split + split).to(tl.int64) * num_rows + offs_n,
            moment / LOG2_E, mask=in_n,
        )
    if not HAS_SOFTCAP:
        sum_exp *= tl.exp2(row_number)
    where = sums_ptr + (first_split + split).to(tl.int64) * num_rows + offs_n
    tl.store(where, sum_exp, mask=in_n)
    if HAS_SOFTCAP:
        tl.store(where + num_parts.to(tl.int64) * num_rows, sum_sloped, mask=in_n)


def _join_lists(x: Operands, frequent: Frequent, rows: Rows, chunks: _Chunks, lists: Lists) -> None:
    """Join the lists of the chunks, ascending, with the label's column among them unless it is frequent."""
    _join_lists_kernel[(rows.index.shape[0],)](
        chunks.columns_M, chunks.begin_CN, chunks.count_CN, frequent.slot_V, x.ids, rows.index, rows.num_kept, chunks.taken[1:],
        lists.columns_M, lists.begin_N, lists.count_N, chunks.unmarked_N,
        x.num_tokens, len(chunks.columns), chunks.columns[0][1], lists.columns_M.shape[0], x.logits.start, x.logits.num_valid,
        BLOCK=128, num_warps=1,
    )


@kernel("segment_ptr", "taken_ptr", "columns_ptr")
def _join_lists_kernel(
    segment_ptr,  # in: [M] int32: columns of the chunks' lists
    segment_begin_ptr,  # in: [C, N] int32
    segment_count_ptr,  # in: [C, N] int32
    slot_ptr,  # in: [V] int32
    labels_ptr,  # in: [N] int64
    index_ptr,  # in: [R] int32
    num_kept_ptr,  # in: [1] int32
    taken_ptr,  # in, out: [1] int64
    columns_ptr,  # out: [M] int32
    begin_ptr,  # out: [N] int32
    count_ptr,  # out: [N] int32
    unmarked_ptr,  # out: [N] int32
    num_tokens,
    num_chunks,
    chunk_cols,
    capacity,
    start,
    num_valid,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    token = tl.load(index_ptr + row).to(tl.int64)
    if row >= tl.load(num_kept_ptr):
        tl.store(begin_ptr + token, 0)
        tl.store(count_ptr + token, 0)
        return
    label = tl.load(labels_ptr + token) - start
    here = (label >= 0) & (label < num_valid)
    here &= tl.load(slot_ptr + tl.where(here, label, 0)) == 0
    segment_begin_ptr += token
    segment_count_ptr += token

    # The first time through the lists finds the label's place in them, the second one copies them around it.
    stride = num_tokens.to(tl.int64)
    count = tl.zeros((), tl.int32)
    before = tl.zeros((BLOCK,), tl.int32)
    present = tl.zeros((BLOCK,), tl.int32)
    for chunk in range(0, num_chunks):
        length = tl.load(segment_count_ptr + chunk * stride)
        begin = tl.load(segment_begin_ptr + chunk * stride)
        count += length
        for first in range(0, tl.minimum(length, capacity - begin), BLOCK):
            offs = first + tl.arange(0, BLOCK)
            inside = (offs < length) & (begin + offs < capacity)
            column = tl.load(segment_ptr + begin + offs, mask=inside, other=0) + chunk * chunk_cols
            before += (inside & (column < label)).to(tl.int32)
            present += (inside & (column == label)).to(tl.int32)
    added = here & (tl.sum(present, 0) == 0)
    count += added.to(tl.int32)
    # The place of a list depends on which program comes first. Nothing else does: backward takes lists in the tokens' order.
    place = tl.atomic_add(taken_ptr, count.to(tl.int64), sem="relaxed")
    tl.store(begin_ptr + token, tl.minimum(place, capacity).to(tl.int32))
    tl.store(count_ptr + token, count)
    tl.store(unmarked_ptr + token, tl.where(added, label, -1).to(tl.int32))
    if place + count <= capacity:
        columns_ptr += place
        tl.store(columns_ptr + tl.sum(before, 0), label.to(tl.int32), mask=added)
        for chunk in range(0, num_chunks):
            length = tl.load(segment_count_ptr + chunk * stride)
            begin = tl.load(segment_begin_ptr + chunk * stride)
            for first in range(0, length, BLOCK):
                offs = first + tl.arange(0, BLOCK)
                column = tl.load(segment_ptr + begin + offs, mask=offs < length, other=0) + chunk * chunk_cols
                after = (added & (column > label)).to(tl.int32)
                tl.store(columns_ptr + offs + after, column, mask=offs < length)
            columns_ptr += length


def _add_listed(
    x: Operands, rows: Rows, lists: Lists, chunks: _Chunks, bound_N: torch.Tensor, sums_KPR: torch.Tensor
) -> None:
    """Compute the logits of the lists, and write the sums of those that are marked: their parts of the sums.

    A label that is listed but not marked has been counted where it was screened.
    """
    parts, hidden_size = sums_KPR.shape[1] - chunks.num_screened, x.hidden.shape[1]
    _listed_sums_kernel[(rows.index.shape[0] * parts,)](
        # in
        x.hidden, x.weight, x.bias, rows.index, rows.num_kept, chunks.unmarked_N, lists.columns_M, lists.begin_N, lists.count_N,
        chunks.taken[1:], bound_N,
        # out
        sums_KPR,
        # sizes
        rows.index.shape[0], hidden_size, x.logits.num_valid, lists.columns_M.shape[0], lists_.LONGEST, sums_KPR.shape[1],
        chunks.num_screened, parts,
        # options
        x.logits.logit_scale, x.logits.softcap, HAS_BIAS=x.bias is not None, HAS_SOFTCAP=x.logits.capped,
        WANT_MOMENT=_has_moment(sums_KPR, x),
        # tiles
        BLOCK_K=16, BLOCK_D=min(256, triton.next_power_of_2(hidden_size)), STAGES=1 if interpreted() else 4, num_warps=4,
    )


@kernel("hidden_ptr", "weight_ptr", "bias_ptr", "columns_ptr", "sums_ptr", "hidden_size")
def _listed_sums_kernel(
    hidden_ptr,  # in: [N, D]
    weight_ptr,  # in: [V, D]
    bias_ptr,  # in: [V]
    index_ptr,  # in: [R] int32
    num_kept_ptr,  # in: [1] int32
    unmarked_ptr,  # in: [N] int32
    columns_ptr,  # in: [M] int32
    begin_ptr,  # in: [N] int32
    count_ptr,  # in: [N] int32
    taken_ptr,  # in: [1] int64
    bound_ptr,  # in: [N] fp32
    sums_ptr,  # out: [K, P, R] fp32
    num_rows,
    hidden_size,
    num_valid,
    capacity,
    longest,
    num_parts,
    first_part,
    parts,
    logit_scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    WANT_MOMENT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    # A warp has some columns to itself, so that the only sums between lanes are those of the whole products.
    row = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    if row >= tl.load(num_kept_ptr):
        return
    token = tl.load(index_ptr + row).to(tl.int64)
    bound = tl.load(bound_ptr + token)
    begin = tl.load(begin_ptr + token)
    count = tl.load(count_ptr + token)
    count = tl.where((count <= longest) & (tl.load(taken_ptr) <= capacity), count, 0)
    unmarked = tl.load(unmarked_ptr + token)

    sum_exp = tl.zeros((BLOCK_K,), tl.float32)
    sum_sloped = tl.zeros((BLOCK_K,), tl.float32)
    moment = tl.zeros((BLOCK_K,), tl.float32)
    for first in range(part * BLOCK_K, count, parts * BLOCK_K):
        offs_k = first + tl.arange(0, BLOCK_K)
        in_k = offs_k < count
        column = tl.load(columns_ptr + begin + offs_k, mask=in_k, other=0)
        in_k &= column < num_valid  # NaN may have marked padding
        products = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
        for inner in tl.range(0, hidden_size, BLOCK_D, num_stages=STAGES):
            offs_d = inner + tl.arange(0, BLOCK_D)
            in_d = offs_d < hidden_size
            where = weight_ptr + column.to(tl.int64)[:, None] * hidden_size + offs_d[None, :]
            w = tl.load(where, mask=in_k[:, None] & in_d[None, :], other=0)
            h = tl.load(hidden_ptr + token * hidden_size + offs_d, mask=in_d, other=0)
            products += w.to(tl.float32) * h.to(tl.float32)[None, :]
        z = tl.sum(products, 1)
        if HAS_BIAS:
            z += tl.load(bias_ptr + column, mask=in_k, other=0).to(tl.float32)
        z *= logit_scale
        if HAS_SOFTCAP:
            z = softcapped(z, softcap, HAS_SOFTCAP)
        e = tl.where(in_k & (column != unmarked), tl.exp(z - bound), 0.0)
        sum_exp += e
        if WANT_MOMENT:
            moment += tl.where(e > 0, e * (z - bound), 0.0)
        if HAS_SOFTCAP:
            sum_sloped += e * softcap_slope(z, softcap)
    where = sums_ptr + (first_part + part).to(tl.int64) * num_rows + row
    tl.store(where, tl.sum(sum_exp, 0))
    if HAS_SOFTCAP:
        tl.store(where + num_parts.to(tl.int64) * num_rows, tl.sum(sum_sloped, 0))
    if WANT_MOMENT:
        tl.store(where + (1 + (HAS_SOFTCAP > 0)) * num_parts.to(tl.int64) * num_rows, tl.sum(moment, 0))


def _merge(
    x: Operands, rows: Rows, first: First, lists: Lists, chunks: _Chunks, hidden: Rounded, centering: Centering,
    sums_KPR: torch.Tensor, out: tuple[torch.Tensor, ...],
) -> None:
    """Write what ``screened_statistics`` returns, at the tokens of the group."""
    num_rows = rows.index.shape[0]
    error = ERROR * x.logits.logit_scale
    _merge_screened_kernel[(cdiv(num_rows, 128),)](
        sums_KPR, hidden.numbers_KR, centering.variance_P, first.frequent_3N, first.frequent_moment_N, first.shard_3N,
        first.bound_N,
        lists.count_N, chunks.taken[1:], x.ids, rows.index, rows.num_kept,
        *out,
        num_rows, x.num_tokens, sums_KPR.shape[1], chunks.num_screened, centering.variance_P.shape[0], lists.columns_M.shape[0],
        lists_.LONGEST, error * error / (2 * x.hidden.shape[1]), SLACK,
        HAS_SOFTCAP=x.logits.softcap > 0.0, WANT_MOMENT=_has_moment(sums_KPR, x), BLOCK_N=128,
    )


@kernel("sums_ptr", "stats_ptr", "state_ptr", "fallback_ptr")
def _merge_screened_kernel(
    sums_ptr,  # in: [K, P, R] fp32: screened parts first
    row_ptr,  # in: [4, R] fp32: anything, anything, length, anything
    variance_ptr,  # in: [P] fp32
    frequent_ptr,  # in: [3, N] fp32: maximum, sum
    frequent_moment_ptr,  # in: [N] fp32; with WANT_MOMENT
    shard_ptr,  # in: [3, N] fp32: maximum, sum
    bound_ptr,  # in: [N] fp32
    count_ptr,  # in: [N] int32
    taken_ptr,  # in: [1] int64
    labels_ptr,  # in: [N] int64
    index_ptr,  # in: [R] int32
    num_kept_ptr,  # in: [1] int32
    stats_ptr,  # out: [K, N] fp32: maximum, sum, ...
    state_ptr,  # out: [3, N] fp32
    fallback_ptr,  # out: [N] int64
    num_rows,
    num_tokens,
    num_parts,
    num_screened,
    num_variance,
    capacity,
    longest,
    half_variance,
    slack,
    HAS_SOFTCAP: tl.constexpr,
    WANT_MOMENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = offs_n < num_rows
    live = offs_n < tl.load(num_kept_ptr)
    token = tl.load(index_ptr + offs_n, mask=in_n, other=0)
    stride = num_tokens.to(tl.int64)
    row_stride = num_rows.to(tl.int64)
    bound = tl.load(bound_ptr + token, mask=live, other=0)

    # A number that is rounded to nearest lies around its code, so a logit lies around the one that is screened, and its
    # exponential is exp(variance / 2) larger on average, and that times the logit by as much again of the variance.
    length = tl.load(row_ptr + 2 * row_stride + offs_n, mask=live, other=0)
    half = tl.minimum(length * length * sum_of_parts(variance_ptr, num_variance) * half_variance, 1.0)
    gain = tl.exp(half)
    others = tl.zeros((BLOCK_N,), tl.float32)
    sloped = tl.zeros((BLOCK_N,), tl.float32)
    moment = tl.zeros((BLOCK_N,), tl.float32)
    for part in range(0, num_parts):
        factor = tl.where(part < num_screened, gain, 1.0)
        where = sums_ptr + part * row_stride + offs_n
        of_part = factor * tl.load(where, mask=live, other=0)
        others += of_part
        if WANT_MOMENT:
            moment += factor * tl.load(where + (1 + (HAS_SOFTCAP > 0)) * num_parts * row_stride, mask=live, other=0)
            moment += tl.where(part < num_screened, 2 * half, 0.0) * of_part
        if HAS_SOFTCAP:
            sloped += factor * tl.load(where + num_parts * row_stride, mask=live, other=0)
    if not HAS_SOFTCAP:
        sloped = others
    frequent_max = tl.load(frequent_ptr + token, mask=live, other=0)
    frequent_sum = tl.load(frequent_ptr + stride + token, mask=live, other=0)
    total = others + frequent_sum * tl.exp(frequent_max - bound)
    # The estimate in the bound was not too high if this shard's part of it is none that this shard does not have.
    shard_max = tl.load(shard_ptr + token, mask=live, other=0)
    claimed = tl.load(shard_ptr + stride + token, mask=live, other=0) * tl.exp(shard_max - bound)
    count = tl.load(count_ptr + token, mask=live, other=0)
    # Lists are stored in any order: either all of a group fit, or nobody knows which do. NaN makes this false too.
    trusted = (
        (count <= longest) & (tl.load(taken_ptr) <= capacity) & (total < tl.exp(FARTHEST)) & (claimed <= slack * total)
    )
    trusted &= (tl.abs(bound) < float("inf")) & (length < float("inf"))

    tl.store(stats_ptr + token, bound, mask=in_n)
    tl.store(stats_ptr + stride + token, tl.where(live, total, 1.0), mask=in_n)
    tl.store(state_ptr + token, tl.where(live & (trusted == 0), float("nan"), bound), mask=in_n)
    tl.store(state_ptr + stride + token, tl.where(live, sloped, 0.0), mask=in_n)
    tl.store(state_ptr + 2 * stride + token, bound, mask=in_n)
    if WANT_MOMENT:
        frequent_moment = (
            tl.load(frequent_moment_ptr + token, mask=live, other=0) + (frequent_max - bound) * frequent_sum
        )
        moment += tl.where(frequent_sum > 0, frequent_moment, 0.0) * tl.exp(frequent_max - bound)
        tl.store(stats_ptr + 3 * stride + token, moment, mask=in_n)
    label = tl.load(labels_ptr + token, mask=in_n, other=-1)
    tl.store(fallback_ptr + token, tl.where(live & (trusted == 0), label, -1), mask=in_n)
