"""Divergence of two heads on Triton: each tile of the student's logits beside the teacher's, of the same tokens and columns.

The frame is that of the exact kernels. Forward is ``lse.py``'s: a program goes over a block of rows and a part of the
vocabulary, computes the two tiles after one another (the hidden sizes may differ), and writes fp32 partials that a second
kernel merges in order. Backward is ``exact.py``'s: a chunk of the logits' gradient is filled from both tiles, and the two
products of ``d_hidden.py`` and ``d_weight.py`` take it from there. What the budget holds of both heads' exponentials is kept
for it (``kept_pair.py``). ``heads.py`` has the formulas.

Source: *Cut Your Losses* (Wijmans et al., 2024) and the online softmax (Milakov and Gimelshein, 2018) for one head. The moment
that two running maxima share is this project's.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from cce_dist.kernels import Gradients, Grads, Operands, Rows, budget
from cce_dist.kernels.blocks import (
    has_tma,
    kernel,
    on_device,
    operand,
    row_and_split,
    softcap_slope,
    store_tile,
    tile_of_logits,
)
from cce_dist.kernels.budget import Sizes, cdiv
from cce_dist.kernels.d_hidden import Sum
from cce_dist.kernels.exact import (
    Output,
    Part,
    add_chunks,
    add_part,
    finished_groups,
    new_gradients,
    normalised,
    remainder,
    token_groups,
)
from cce_dist.kernels.heads import Divergence, Heads, Pair
from cce_dist.kernels.kept_pair import (
    FORWARD,
    JSD,
    MIXTURE,
    REVERSE,
    TASKS,
    KeptPair,
    above_mixture,
    into_gradients,
    new_kept_pair,
)
from cce_dist.kernels.lse import Span, choose_splits
from cce_dist.kernels.tiles import Tile, choose_tiles, num_programs, pair_tile, precision
from cce_dist.kernels.tokens import compact, gathered


def sizes_of(x: Heads) -> Sizes:
    student = x.student
    return Sizes(
        student.num_tokens, student.hidden.shape[1], student.logits.num_valid, student.hidden.itemsize,
        teacher_size=x.teacher.hidden.shape[1],
    )  # fmt: skip


def columns_kept(x: Heads, spec: Divergence) -> int:
    """Return how many of the shard's first columns are kept for backward within the budget."""
    return budget.columns_kept(sizes_of(x), spec.workspace_bytes) if _keeps(x, spec) else 0


def default_workspace(x: Heads, spec: Divergence) -> int:
    return budget.default_workspace(sizes_of(x), _keeps(x, spec))


def _keeps(x: Heads, spec: Divergence) -> bool:
    """Whether anything can be kept: fp16's exponent is too short for it, and fp32's precision would be lost."""
    return spec.grad and x.student.hidden.dtype == torch.bfloat16


def rows_at_once(x: Heads, spec: Divergence) -> int | None:
    return None if columns_kept(x, spec) > 0 else budget.most_rows(sizes_of(x), spec.workspace_bytes)


def saved_like(x: Heads, spec: Divergence) -> list[torch.Tensor]:
    return list(_new_kept(x, spec))


def _new_kept(x: Heads, spec: Divergence) -> KeptPair:
    hidden = x.student.hidden
    columns = columns_kept(x, spec)
    return new_kept_pair(x, columns, pair_tile(hidden.dtype, hidden.device).cols if columns else 1)


def statistics(x: Heads, spec: Divergence) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return stats_5N, zeros where a token is not counted; and ``KeptPair``."""
    stats_5N = x.student.hidden.new_zeros(5, x.student.num_tokens, dtype=torch.float32)
    kept = _new_kept(x, spec)
    if x.student.num_tokens == 0 or x.student.logits.num_valid == 0:
        stats_5N[::2][:2].fill_(float("-inf"))
        return stats_5N, list(kept)
    _sweep(x, None, TASKS[spec.kind], stats_5N, spec, kept)
    return stats_5N, list(kept)


def mixture_sums(x: Heads, pair: Pair, spec: Divergence) -> torch.Tensor:
    """Return this shard's parts of KL(t || m) and KL(p || m), [2, N]; 0 where a token is not counted."""
    sums_2N = x.student.hidden.new_zeros(2, x.student.num_tokens, dtype=torch.float32)
    if x.student.num_tokens and x.student.logits.num_valid:
        _sweep(x, pair, MIXTURE, sums_2N, spec)
    return sums_2N


def _sweep(
    x: Heads, pair: Pair | None, task: tl.constexpr, sums_KN: torch.Tensor, spec: Divergence, kept: KeptPair | None = None
) -> None:  # fmt: skip
    """Go over both heads' logits once, a group of tokens at a time, and write each token's K sums; keep what is asked for."""
    student, num_tokens = x.student, x.student.num_tokens
    with on_device(student.hidden):
        tile = pair_tile(student.hidden.dtype, student.hidden.device)
        keeping = Span(0, 0, 0) if kept is None else _kept_span(x, kept, tile)
        at_once = min(num_tokens, budget.forward_rows(sizes_of(x), spec.workspace_bytes, keeping.last > 0))
        buffers = _buffers(x, at_once)
        num_tiles, parts = cdiv(student.logits.num_valid, tile.cols), 0
        if keeping.last < num_tiles:
            parts = choose_splits(at_once, num_tiles - keeping.last, tile, student.hidden.device)
        for group in token_groups(compact(student.ids), at_once):
            both = _gather(x, group, buffers)
            partials_KPR = sums_KN.new_empty(len(sums_KN), keeping.num_parts + parts, both[0].index.shape[0])
            if keeping.num_parts:
                _add_up(x, both, pair, partials_KPR, tile, keeping, task, spec.beta, kept)
            if parts:
                rest = Span(keeping.last, num_tiles, parts, keeping.num_parts)
                _add_up(x, both, pair, partials_KPR, tile, rest, task, spec.beta)
            _merge_pair_splits(partials_KPR, both[0], sums_KN, task)


def _kept_span(x: Heads, kept: KeptPair, tile: Tile) -> Span:
    """The tiles that are kept, those of all tokens together; no parts where there are none."""
    num_tiles = min(kept.tops_2BN.shape[1], cdiv(x.student.logits.num_valid, tile.cols))
    parts = choose_splits(x.student.num_tokens, num_tiles, tile, x.student.hidden.device) if num_tiles else 0
    return Span(0, num_tiles, parts)


def _make_anew(x: Heads, order: list[torch.Tensor], kept: KeptPair, spec: Divergence, tile: Tile) -> None:
    """Compute what is kept again if a backward before this one made gradients of it; else every launch ends at once."""
    index_N, num_kept = order
    both = _gather(x, [index_N, num_kept * kept.spent], _buffers(x, x.student.num_tokens))
    span = _kept_span(x, kept, tile)
    partials_KPR = torch.empty(5, span.num_parts, x.student.num_tokens, dtype=torch.float32, device=index_N.device)
    # The same kernel, cut into the same parts, as in forward.
    _add_up(x, both, None, partials_KPR, tile, span, TASKS[spec.kind], spec.beta, kept)


def _buffers(x: Heads, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for the hidden states of so many tokens, the student's and the teacher's."""
    return (
        x.student.hidden.new_empty(num_rows, x.student.hidden.shape[1]),
        x.teacher.hidden.new_empty(num_rows, x.teacher.hidden.shape[1]),
    )


def _gather(x: Heads, order: list[torch.Tensor], buffers: tuple[torch.Tensor, torch.Tensor]) -> tuple[Rows, Rows]:
    """Gather both heads' hidden states of a group of tokens."""
    return gathered(x.student.hidden, order, buffers[0]), gathered(x.teacher.hidden, order, buffers[1])


def _tile_operands(head: Operands, rows: Rows, tile: Tile, tma: bool) -> tuple:
    """What ``tile_of_logits`` reads of a head."""
    return (
        operand(rows.hidden, tile.rows, tile.inner, tma), operand(head.weight, tile.cols, tile.inner, tma), head.bias,
    )  # fmt: skip


def _flags(x: Heads, rows: Rows, tile: Tile, tma: bool) -> dict:
    """Constexprs that the kernels of both heads share."""
    flags: dict = {}
    for suffix, head in (("S", x.student), ("T", x.teacher)):
        flags[f"HAS_BIAS_{suffix}"] = head.bias is not None
        flags[f"HAS_SCALE_{suffix}"] = head.logits.logit_scale != 1.0
        flags[f"HAS_SOFTCAP_{suffix}"] = head.logits.softcap > 0.0
    return flags | {
        "MASK_V": x.student.logits.num_valid % tile.cols != 0, "BLOCK_N": tile.rows, "BLOCK_V": tile.cols,
        "BLOCK_D": tile.inner, "TMA": tma, "PRECISION": precision(rows.hidden.dtype), "num_warps": tile.warps,
        "num_stages": tile.stages,
    }  # fmt: skip


def _add_up(
    x: Heads, both: tuple[Rows, Rows], pair: Pair | None, partials_KPR: torch.Tensor, tile: Tile, span: Span,
    task: tl.constexpr, beta: float, kept: KeptPair | None = None,
) -> None:  # fmt: skip
    """Write the partials of a span of tiles; keep them where there is room given."""
    student, teacher = x
    rows, teacher_rows = both
    room = (None,) * 3
    tma = has_tma(rows.hidden, student.weight, teacher_rows.hidden, teacher.weight)
    num_rows, num_cols = rows.hidden.shape[0], 0
    if kept is not None:
        num_cols, tma = kept.exp_NV.shape[1], tma and has_tma(kept.exp_NV, kept.difference_NV)
        room = (*(operand(x, tile.rows, tile.cols // 2, tma) for x in kept[:2]), kept.tops_2BN)
    numbers = (None,) * 4 if pair is None else pair[:4]
    _pair_sums_kernel[(cdiv(num_rows, tile.rows) * span.num_parts,)](
        # in
        *_tile_operands(student, rows, tile, tma), *_tile_operands(teacher, teacher_rows, tile, tma),
        rows.index, rows.num_kept, *numbers,
        # out
        partials_KPR, *room,
        # sizes
        num_rows, rows.hidden.shape[1], teacher_rows.hidden.shape[1], student.logits.num_valid, num_cols, span.first,
        span.last, span.num_parts, span.first_part, partials_KPR.shape[1],
        # options
        student.logits.logit_scale, student.logits.softcap, teacher.logits.logit_scale, teacher.logits.softcap, beta,
        TASK=task.value, KEEP=kept is not None,
        # tiles
        GROUP=choose_tiles(rows.hidden.dtype, rows.hidden.device).group, **_flags(x, rows, tile, tma),
    )  # fmt: skip


@triton.jit
def _shift_of(maximum):
    """What sums of exponentials are relative to: the maximum, or 0 where no logit is finite yet."""
    return tl.where(maximum > float("-inf"), maximum, 0.0)


@triton.jit
def _moved(total, drop):
    """A sum of exponentials relative to a reference that is ``drop`` higher; an empty one stays empty whatever that is."""
    return tl.where(total > 0, total * tl.exp(-drop), total)


@triton.jit
def _moved_moment(moment, total, drop, other_drop):
    """The moment relative to references that are higher by so much; ``total`` is the leading head's sum before."""
    factor = tl.exp(-drop)
    # What underflows, or is empty, is 0, whatever the other head has there.
    return tl.where((total > 0) & (factor > 0), factor * (moment - (drop - other_drop) * total), 0.0)


@kernel(
    "hidden", "weight", "bias_ptr", "teacher_hidden", "teacher_weight", "teacher_bias_ptr", "partial_ptr", "hidden_size",
    "teacher_size", "exp", "difference", "num_cols",
)  # fmt: skip
def _pair_sums_kernel(
    hidden,  # in: [R, D] descriptor or pointer
    weight,  # in: [V, D] descriptor or pointer
    bias_ptr,  # in: [V]
    teacher_hidden,  # in: [R, D_t] descriptor or pointer
    teacher_weight,  # in: [V_t, D_t] descriptor or pointer
    teacher_bias_ptr,  # in: [V_t]
    index_ptr,  # in: [R] int32
    num_kept_ptr,  # in: [1] int32
    max_s_ptr,  # in: [N] fp32, for the mixture alone; also the next three
    log_sum_s_ptr,
    max_t_ptr,
    log_sum_t_ptr,
    partial_ptr,  # out: [5, P, R] fp32; [2, P, R] for the mixture
    exp,  # out: [R, B * BLOCK_V] descriptor or pointer; with KEEP, also the next two
    difference,  # out: [R, B * BLOCK_V] descriptor or pointer
    top_ptr,  # out: [2, B, R] fp32
    num_rows,
    hidden_size,
    teacher_size,
    num_valid,
    num_cols,
    first_tile,
    last_tile,
    num_splits,
    first_split,
    partial_splits,
    logit_scale,
    softcap,
    teacher_scale,
    teacher_softcap,
    beta,
    TASK: tl.constexpr,
    KEEP: tl.constexpr,
    HAS_BIAS_S: tl.constexpr,
    HAS_SCALE_S: tl.constexpr,
    HAS_SOFTCAP_S: tl.constexpr,
    HAS_BIAS_T: tl.constexpr,
    HAS_SCALE_T: tl.constexpr,
    HAS_SOFTCAP_T: tl.constexpr,
    MASK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
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

    max_s = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    max_t = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    sum_s = tl.zeros((BLOCK_N,), tl.float32)
    sum_t = tl.zeros((BLOCK_N,), tl.float32)
    moment = tl.zeros((BLOCK_N,), tl.float32)
    log_sum_s = tl.zeros((BLOCK_N,), tl.float32)
    log_sum_t = tl.zeros((BLOCK_N,), tl.float32)
    if TASK == MIXTURE:
        live = offs_n < num_kept
        token = tl.load(index_ptr + offs_n, mask=live, other=0)
        max_s = tl.load(max_s_ptr + token, mask=live, other=0)
        max_t = tl.load(max_t_ptr + token, mask=live, other=0)
        log_sum_s = tl.load(log_sum_s_ptr + token, mask=live, other=0)
        log_sum_t = tl.load(log_sum_t_ptr + token, mask=live, other=0)

    num_tiles = last_tile - first_tile
    start = first_tile + split * num_tiles // num_splits
    stop = first_tile + (split + 1) * num_tiles // num_splits
    for tile in range(start, stop):
        z_s = tile_of_logits(
            hidden, weight, bias_ptr, row, tile * BLOCK_V, num_rows, num_valid, hidden_size, logit_scale, softcap,
            HAS_BIAS_S, HAS_SCALE_S, HAS_SOFTCAP_S, MASK_V, BLOCK_N, BLOCK_V, BLOCK_D, TMA, PRECISION,
        )  # fmt: skip
        z_t = tile_of_logits(
            teacher_hidden, teacher_weight, teacher_bias_ptr, row, tile * BLOCK_V, num_rows, num_valid, teacher_size,
            teacher_scale, teacher_softcap,
            HAS_BIAS_T, HAS_SCALE_T, HAS_SOFTCAP_T, MASK_V, BLOCK_N, BLOCK_V, BLOCK_D, TMA, PRECISION,
        )  # fmt: skip
        if TASK == MIXTURE:
            # The sums are those of KL(t || m) and KL(p || m).
            log_p = (z_s - max_s[:, None]) - log_sum_s[:, None]
            log_t = (z_t - max_t[:, None]) - log_sum_t[:, None]
            t = tl.exp(log_t)
            sum_s += tl.sum(tl.where(t == 0, 0.0, t * above_mixture(log_p - log_t, 1.0 - beta)), 1)
            p = tl.exp(log_p)
            sum_t += tl.sum(tl.where(p == 0, 0.0, p * above_mixture(log_t - log_p, beta)), 1)
        else:
            new_max_s = tl.maximum(max_s, tl.max(z_s, 1))
            new_max_t = tl.maximum(max_t, tl.max(z_t, 1))
            shift_s = _shift_of(new_max_s)
            shift_t = _shift_of(new_max_t)
            drop_s = shift_s - _shift_of(max_s)
            drop_t = shift_t - _shift_of(max_t)
            z_s -= shift_s[:, None]
            z_t -= shift_t[:, None]
            between = z_s - z_t
            if KEEP:
                store_tile(
                    difference, row, tile * BLOCK_V, between, num_rows, num_cols, num_cols, BLOCK_N, BLOCK_V, TMA
                )
                top = top_ptr + tile * num_rows.to(tl.int64) + offs_n
                tl.store(top, shift_s, mask=in_n)
                tl.store(top + num_cols // BLOCK_V * num_rows.to(tl.int64), shift_t, mask=in_n)
            e_s = tl.exp(z_s)
            e_t = tl.exp(z_t)
            # A logit of -inf would make 0 * -inf.
            if TASK == FORWARD:
                moment = _moved_moment(moment, sum_t, drop_t, drop_s)
                moment -= tl.sum(tl.where(e_t == 0, 0.0, e_t * between), 1)
            if TASK == REVERSE:
                moment = _moved_moment(moment, sum_s, drop_s, drop_t)
                moment += tl.sum(tl.where(e_s == 0, 0.0, e_s * between), 1)
            sum_s = _moved(sum_s, drop_s) + tl.sum(e_s, 1)
            sum_t = _moved(sum_t, drop_t) + tl.sum(e_t, 1)
            max_s = new_max_s
            max_t = new_max_t
            if KEEP:
                larger = tl.maximum(e_s, e_t)
                store_tile(exp, row, tile * BLOCK_V, larger, num_rows, num_cols, num_cols, BLOCK_N, BLOCK_V, TMA)

    plane = partial_splits.to(tl.int64) * num_rows
    where = partial_ptr + (first_split + split).to(tl.int64) * num_rows + offs_n
    if TASK == MIXTURE:
        tl.store(where, sum_s, mask=in_n)
        tl.store(where + plane, sum_t, mask=in_n)
    else:
        tl.store(where, max_s, mask=in_n)
        tl.store(where + plane, sum_s, mask=in_n)
        tl.store(where + 2 * plane, max_t, mask=in_n)
        tl.store(where + 3 * plane, sum_t, mask=in_n)
        tl.store(where + 4 * plane, moment, mask=in_n)


def _merge_pair_splits(partials_KPR: torch.Tensor, rows: Rows, sums_KN: torch.Tensor, task: tl.constexpr) -> None:
    """Merge the partials of all parts, in order, into sums_KN at the tokens of the group that count."""
    num_rows = rows.index.shape[0]
    _merge_pair_splits_kernel[(cdiv(num_rows, 128),)](
        partials_KPR, rows.index, rows.num_kept,
        sums_KN,
        num_rows, sums_KN.shape[1], partials_KPR.shape[1],
        TASK=task.value, BLOCK_N=128,
    )  # fmt: skip


@kernel("partial_ptr")
def _merge_pair_splits_kernel(
    partial_ptr,  # in: [5, P, R] fp32; [2, P, R] for the mixture
    index_ptr,  # in: [R] int32
    num_kept_ptr,  # in: [1] int32
    sums_ptr,  # out: [5, N] fp32; [2, N] for the mixture
    num_rows,
    num_tokens,
    num_splits,
    TASK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = offs_n < tl.load(num_kept_ptr)
    row_stride = num_rows.to(tl.int64)
    plane = num_splits * row_stride
    max_s = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    max_t = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    if TASK != MIXTURE:
        for split in range(0, num_splits):
            where = partial_ptr + split * row_stride + offs_n
            max_s = tl.maximum(max_s, tl.load(where, mask=live, other=0))
            max_t = tl.maximum(max_t, tl.load(where + 2 * plane, mask=live, other=0))

    sum_s = tl.zeros((BLOCK_N,), tl.float32)
    sum_t = tl.zeros((BLOCK_N,), tl.float32)
    moment = tl.zeros((BLOCK_N,), tl.float32)
    for split in range(0, num_splits):
        where = partial_ptr + split * row_stride + offs_n
        if TASK == MIXTURE:
            sum_s += tl.load(where, mask=live, other=0)
            sum_t += tl.load(where + plane, mask=live, other=0)
        else:
            part_s = tl.load(where + plane, mask=live, other=0)
            part_t = tl.load(where + 3 * plane, mask=live, other=0)
            drop_s = _shift_of(max_s) - _shift_of(tl.load(where, mask=live, other=0))
            drop_t = _shift_of(max_t) - _shift_of(tl.load(where + 2 * plane, mask=live, other=0))
            part_moment = tl.load(where + 4 * plane, mask=live, other=0)
            if TASK == FORWARD:
                moment += _moved_moment(part_moment, part_t, drop_t, drop_s)
            if TASK == REVERSE:
                moment += _moved_moment(part_moment, part_s, drop_s, drop_t)
            sum_s += _moved(part_s, drop_s)
            sum_t += _moved(part_t, drop_t)

    sums = sums_ptr + tl.load(index_ptr + offs_n, mask=live, other=0)
    stride = num_tokens.to(tl.int64)
    if TASK == MIXTURE:
        tl.store(sums, sum_s, mask=live)
        tl.store(sums + stride, sum_t, mask=live)
    else:
        tl.store(sums, max_s, mask=live)
        tl.store(sums + stride, sum_s, mask=live)
        tl.store(sums + 2 * stride, max_t, mask=live)
        tl.store(sums + 3 * stride, sum_t, mask=live)
        tl.store(sums + 4 * stride, moment, mask=live)


def gradients(
    x: Heads, pair: Pair, coef_N: torch.Tensor, saved: list[torch.Tensor], grads: Grads, spec: Divergence
) -> Gradients:
    """Return d_hidden, d_weight and d_bias of the student; ``coef_N`` is the gradient of each token's divergence."""
    student, kept = x.student, KeptPair(*saved)
    d_hidden, d_weight, d_bias = new_gradients(student, grads)
    returned = (d_hidden, None if grads.weight_out is not None else d_weight, d_bias)
    if student.num_tokens == 0 or student.logits.num_valid == 0:
        if d_hidden is not None and grads.hidden_ready is not None:
            grads.hidden_ready(d_hidden)
        return returned
    with on_device(student.hidden):
        dtype, device = student.hidden.dtype, student.hidden.device
        tiles = choose_tiles(dtype, device)._replace(dlogits=pair_tile(dtype, device))
        coef_N, gain = normalised(coef_N, dtype)
        sizes, order = sizes_of(x), compact(student.ids)
        num_kept = min(kept.exp_NV.shape[1], sizes.num_columns)
        if num_kept:
            _make_anew(x, order, kept, spec, tiles.dlogits)
            # Autograd, which counts what is written to saved tensors, sees no more of this than of the kernels' writing.
            kept.spent.data.fill_(1)
        left = sizes._replace(num_columns=sizes.num_columns - num_kept)
        at_once, cols = budget.exact_chunks(
            left, spec.workspace_bytes, kept.nbytes if num_kept else 0, tiles, num_programs(device)
        )
        chunks = [(col, min(col + cols, sizes.num_columns)) for col in range(num_kept, sizes.num_columns, cols)]
        buffers = _buffers(x, at_once)
        dlogits_RV = student.hidden.new_empty(at_once, cols) if chunks else kept.exp_NV
        several = len(chunks) + (num_kept > 0) > 1
        low_RD = remainder(student.hidden, at_once) if several and d_hidden is not None else None
        total = None if d_hidden is None else Sum(d_hidden, low_RD)
        out = Output(total, d_weight, d_bias, gain, grads.hidden_ready, False)
        # Rows that are kept are those of all tokens, in order: no group is finished before another.
        groups = finished_groups(student.ids, order, at_once, None if num_kept else grads.ready_rows)
        for group, (*compact_order, num_final) in enumerate(groups):
            both = _gather(x, compact_order, buffers)
            fill = partial(_fill_chunk, x, both, pair, coef_N, spec, tiles.dlogits, tiles.group)
            add = grads.weight_out is not None or group > 0
            add_chunks(
                out, student, both[0], chunks, dlogits_RV, fill, tiles, add=add, num_final=0 if num_kept else num_final
            )
            if num_kept:
                into_gradients(kept, x, both[0], pair, coef_N, spec, tiles.dlogits.cols)
                part = Part(0, num_kept, kept.exp_NV, None, not chunks, add, num_final)
                add_part(out, part, student, both[0], tiles)
    return returned


def _fill_chunk(
    x: Heads, both: tuple[Rows, Rows], pair: Pair, coef_N: torch.Tensor, spec: Divergence, tile: Tile, group_size: int,
    first_col: int, dlogits_RV: torch.Tensor,
) -> None:  # fmt: skip
    """Fill dlogits_RV with the columns from ``first_col`` (a multiple of the tile) on, as ``dlogits_chunk`` does."""
    student, teacher = x
    rows, teacher_rows = both
    tma = has_tma(rows.hidden, student.weight, teacher_rows.hidden, teacher.weight, dlogits_RV)
    num_rows, logits = rows.hidden.shape[0], student.logits
    num_tiles = cdiv(min(dlogits_RV.shape[1], logits.num_valid - first_col), tile.cols)
    splits = choose_splits(num_rows, num_tiles, tile, dlogits_RV.device)
    _pair_dlogits_kernel[(cdiv(num_rows, tile.rows) * splits,)](
        # in
        *_tile_operands(student, rows, tile, tma), *_tile_operands(teacher, teacher_rows, tile, tma),
        rows.index, rows.num_kept, *pair, coef_N,
        # out
        operand(dlogits_RV, tile.rows, tile.cols // 2, tma),
        # sizes
        num_rows, rows.hidden.shape[1], teacher_rows.hidden.shape[1], logits.num_valid, dlogits_RV.shape[1], first_col,
        num_tiles, splits,
        # options
        logits.logit_scale, logits.softcap, teacher.logits.logit_scale, teacher.logits.softcap, spec.beta,
        TASK=TASKS[spec.kind].value,
        # tiles
        GROUP=group_size, **_flags(x, rows, tile, tma),
    )  # fmt: skip


@kernel(
    "hidden", "weight", "bias_ptr", "teacher_hidden", "teacher_weight", "teacher_bias_ptr", "dlogits", "hidden_size",
    "teacher_size",
)  # fmt: skip
def _pair_dlogits_kernel(
    hidden,  # This and the next pointers are those of _pair_sums_kernel.
    weight,
    bias_ptr,
    teacher_hidden,
    teacher_weight,
    teacher_bias_ptr,
    index_ptr,
    num_kept_ptr,
    max_s_ptr,
    log_sum_s_ptr,
    max_t_ptr,
    log_sum_t_ptr,
    offset_ptr,  # in: [N] fp32
    coef_ptr,  # in: [N] fp32
    dlogits,  # out: [R, columns of the chunk] descriptor or pointer
    num_rows,
    hidden_size,
    teacher_size,
    num_valid,
    dlogits_cols,
    first_col,
    num_tiles,
    num_splits,
    logit_scale,
    softcap,
    teacher_scale,
    teacher_softcap,
    beta,
    TASK: tl.constexpr,
    HAS_BIAS_S: tl.constexpr,
    HAS_SCALE_S: tl.constexpr,
    HAS_SOFTCAP_S: tl.constexpr,
    HAS_BIAS_T: tl.constexpr,
    HAS_SCALE_T: tl.constexpr,
    HAS_SOFTCAP_T: tl.constexpr,
    MASK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    num_kept = tl.load(num_kept_ptr)
    num_row_blocks = tl.cdiv(num_kept, BLOCK_N)
    pid = tl.program_id(0)
    if pid >= num_row_blocks * num_splits:
        return
    row_block, split = row_and_split(pid, num_row_blocks, num_splits, GROUP)
    row = row_block * BLOCK_N
    offs_n = row + tl.arange(0, BLOCK_N)
    live = offs_n < num_kept
    token = tl.load(index_ptr + offs_n, mask=live, other=0)
    # Maxima of +inf make every p and t of a dead row 0.
    max_s = tl.load(max_s_ptr + token, mask=live, other=float("inf"))
    max_t = tl.load(max_t_ptr + token, mask=live, other=float("inf"))
    log_sum_s = tl.load(log_sum_s_ptr + token, mask=live, other=0)
    log_sum_t = tl.load(log_sum_t_ptr + token, mask=live, other=0)
    offset = tl.load(offset_ptr + token, mask=live, other=0)
    coef = tl.load(coef_ptr + token, mask=live, other=0) * logit_scale
    if TASK == JSD:
        coef *= 1.0 - beta

    for tile in range(split * num_tiles // num_splits, (split + 1) * num_tiles // num_splits):
        col = tile * BLOCK_V
        z_t = tile_of_logits(
            teacher_hidden, teacher_weight, teacher_bias_ptr, row, first_col + col, num_rows, num_valid, teacher_size,
            teacher_scale, teacher_softcap,
            HAS_BIAS_T, HAS_SCALE_T, HAS_SOFTCAP_T, MASK_V, BLOCK_N, BLOCK_V, BLOCK_D, TMA, PRECISION,
        )  # fmt: skip
        log_t = (z_t - max_t[:, None]) - log_sum_t[:, None]
        z_s = tile_of_logits(
            hidden, weight, bias_ptr, row, first_col + col, num_rows, num_valid, hidden_size, logit_scale, softcap,
            HAS_BIAS_S, HAS_SCALE_S, HAS_SOFTCAP_S, MASK_V, BLOCK_N, BLOCK_V, BLOCK_D, TMA, PRECISION,
        )  # fmt: skip
        log_p = (z_s - max_s[:, None]) - log_sum_s[:, None]
        p = tl.exp(log_p)
        # A probability that underflows would make 0 * -inf.
        if TASK == FORWARD:
            grad = p - tl.exp(log_t)
        elif TASK == REVERSE:
            grad = tl.where(p == 0, 0.0, p * ((log_p - log_t) - offset[:, None]))
        else:
            grad = tl.where(p == 0, 0.0, p * (above_mixture(log_t - log_p, beta) - offset[:, None]))
        grad *= coef[:, None]
        if HAS_SOFTCAP_S:
            grad *= softcap_slope(z_s, softcap)
        if MASK_V:
            grad = tl.where((first_col + col + tl.arange(0, BLOCK_V) < num_valid)[None, :], grad, 0.0)
        store_tile(dlogits, row, col, grad, num_rows, dlogits_cols, dlogits_cols, BLOCK_N, BLOCK_V, TMA)
