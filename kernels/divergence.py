"""Divergence of two heads on Triton: the logits of both at the same tokens and columns, a chunk at a time, then what follows.

A chunk of each head's logits is computed in fp32 by ``logits.py``, at the speed of a plain product (the hidden sizes may
differ). Forward's kernel has no product: it goes over both chunks and carries each token's five numbers from one chunk to the
next. Backward's writes the gradient of the student's logits, and the two products of ``d_hidden.py`` and ``d_weight.py`` take
it from there, as in ``exact.py``. What the budget holds of both heads' exponentials is kept for it (``kept_pair.py``), and
those logits are not computed again. ``heads.py`` has the formulas.

A kernel with both products, whose two sums of a tile leave room for tiles of 128 x 128 alone, was as fast: 69.0 ms a step with
all kept and 99.0 ms in 512 MiB, against 66.9 and 100.9 ms (KL of the teacher from the student, Llama-3-8B's head as both, N
8,192, one H200, 2026-11; ``python -m cce_dist.bench.divergence``). This form has no kernel of its own with a product.

Source: the online softmax (Milakov and Gimelshein, 2018) for one head. The moment that two running maxima share is this
project's.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl

from cce_dist.kernels import Gradients, Grads, Rows, budget
from cce_dist.kernels.blocks import kernel, on_device, softcap_slope
from cce_dist.kernels.budget import Sizes, cdiv
from cce_dist.kernels.d_hidden import Sum
from cce_dist.kernels.exact import (
    Output,
    add_chunks,
    finished_groups,
    new_gradients,
    normalised,
    remainder,
    token_groups,
)
from cce_dist.kernels.heads import Divergence, Heads, Pair
from cce_dist.kernels.kept_pair import (
    BLOCK_N,
    FORWARD,
    MIXTURE,
    REVERSE,
    TASKS,
    KeptPair,
    above_mixture,
    kept_gradients,
    new_kept_pair,
)
from cce_dist.kernels.logits import logits_chunk
from cce_dist.kernels.tiles import MAX_SIDE, Tiles, choose_tiles, num_programs
from cce_dist.kernels.tokens import compact, gathered

SUMS_ROWS = 4  # of a program that adds up: a row for each warp, so that its sums need no other


def sizes_of(x: Heads) -> Sizes:
    student = x.student
    return Sizes(
        student.num_tokens, student.hidden.shape[1], student.logits.num_valid, student.hidden.itemsize,
        teacher_size=x.teacher.hidden.shape[1],
    )  # fmt: skip


def columns_kept(x: Heads, spec: Divergence) -> int:
    """Return how many of the shard's first columns are kept for backward within the budget."""
    return budget.pair_columns_kept(sizes_of(x), spec.workspace_bytes) if _keeps(x, spec) else 0


def default_workspace(x: Heads, spec: Divergence) -> int:
    return budget.default_workspace(sizes_of(x), _keeps(x, spec))


def _keeps(x: Heads, spec: Divergence) -> bool:
    """Whether anything can be kept: fp16's exponent is too short for it, and fp32's precision would be lost."""
    return spec.grad and x.student.hidden.dtype == torch.bfloat16


def rows_at_once(x: Heads, spec: Divergence) -> int | None:
    if columns_kept(x, spec) > 0:
        return None
    return budget.most_rows(sizes_of(x), budget.beside_pair_logits(spec.workspace_bytes))


def saved_like(x: Heads, spec: Divergence) -> list[torch.Tensor]:
    return list(_new_kept(x, spec))


def _new_kept(x: Heads, spec: Divergence) -> KeptPair:
    hidden, columns = x.student.hidden, columns_kept(x, spec)
    return new_kept_pair(x, columns, choose_tiles(hidden.dtype, hidden.device).lse.cols if columns else 1)


def statistics(x: Heads, spec: Divergence) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return stats_5N, zeros where a token is not counted; and ``KeptPair``."""
    stats_5N = x.student.hidden.new_zeros(5, x.student.num_tokens, dtype=torch.float32)
    kept = _new_kept(x, spec)
    if x.student.num_tokens == 0 or x.student.logits.num_valid == 0:
        stats_5N[::2][:2].fill_(float("-inf"))
    else:
        _sweep(x, None, TASKS[spec.kind], stats_5N, spec, kept)
    return stats_5N, list(kept)


def mixture_sums(x: Heads, pair: Pair, spec: Divergence) -> torch.Tensor:
    """Return this shard's parts of KL(t || m) and KL(p || m), [2, N]; 0 where a token is not counted."""
    sums_2N = x.student.hidden.new_zeros(2, x.student.num_tokens, dtype=torch.float32)
    if x.student.num_tokens and x.student.logits.num_valid:
        _sweep(x, pair, MIXTURE, sums_2N, spec, new_kept_pair(x, 0, 1))
    return sums_2N


def _sweep(
    x: Heads, pair: Pair | None, task: tl.constexpr, sums_KN: torch.Tensor, spec: Divergence, kept: KeptPair
) -> None:  # fmt: skip
    """Go over both heads' logits once, a group of tokens at a time, and write each token's K sums; keep what is asked for."""
    student, num_kept = x.student, kept.exp_NV.shape[1]
    with on_device(student.hidden):
        tiles = choose_tiles(student.hidden.dtype, student.hidden.device)
        rest = budget.beside_pair_logits(spec.workspace_bytes)
        at_once = min(student.num_tokens, budget.forward_rows(sizes_of(x), rest, num_kept > 0))
        at_once = min(at_once, budget.pair_rows(spec.workspace_bytes))
        buffers, room = _buffers(x, at_once), _room(x, at_once, tiles, spec)
        for group in token_groups(compact(student.ids), at_once):
            both = _gather(x, group, buffers)
            # A chunk is kept or not.
            for start, stop in ((0, min(num_kept, student.logits.num_valid)), (num_kept, student.logits.num_valid)):
                for first, z_2RC in _logits(x, both, room, start, stop, tiles):
                    _add_up(
                        z_2RC, both[0], pair, sums_KN, task, spec.beta, first, kept if first < num_kept else None, tiles
                    )


def _buffers(x: Heads, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for the hidden states of so many tokens, the student's and the teacher's."""
    return (
        x.student.hidden.new_empty(num_rows, x.student.hidden.shape[1]),
        x.teacher.hidden.new_empty(num_rows, x.teacher.hidden.shape[1]),
    )


def _gather(x: Heads, order: list[torch.Tensor], buffers: tuple[torch.Tensor, torch.Tensor]) -> tuple[Rows, Rows]:
    """Gather both heads' hidden states of a group of tokens."""
    return gathered(x.student.hidden, order, buffers[0]), gathered(x.teacher.hidden, order, buffers[1])


def _room(x: Heads, num_rows: int, tiles: Tiles, spec: Divergence) -> torch.Tensor:
    """Room for a chunk of both heads' logits of so many tokens. -> [2, R, C] fp32."""
    cols = budget.pair_cols(num_rows, x.student.logits.num_valid, spec.workspace_bytes, tiles.lse.cols)
    return x.student.hidden.new_empty(2, num_rows, cols, dtype=torch.float32)


def _logits(
    x: Heads, both: tuple[Rows, Rows], room: torch.Tensor, start: int, stop: int, tiles: Tiles
) -> Iterator[tuple[int, torch.Tensor]]:
    """Both heads' logits of a group and of columns [start, stop), a chunk at a time: its first column and [2, R, C].

    A chunk ends with a whole tile; columns at or past ``num_valid`` are -inf.
    """
    num_rows, most = both[0].index.shape[0], room.shape[2]
    for first in range(start, stop, most):
        cols = min(most, cdiv(stop - first, tiles.lse.cols) * tiles.lse.cols)
        z_2RC = room.view(-1)[: 2 * num_rows * cols].view(2, num_rows, cols)
        for head, rows, z_RC in zip(x, both, z_2RC, strict=True):
            logits_chunk(head, rows, first, z_RC, tiles)
        yield first, z_2RC


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


def _add_up(
    z_2RC: torch.Tensor, rows: Rows, pair: Pair | None, sums_KN: torch.Tensor, task: tl.constexpr, beta: float, first_col: int,
    kept: KeptPair | None, tiles: Tiles,
) -> None:  # fmt: skip
    """Add a chunk of logits to the sums of the group's tokens, which the first chunk sets; ``kept``: and keep it there."""
    _, num_rows, num_cols = z_2RC.shape
    _pair_sums_kernel[(cdiv(num_rows, SUMS_ROWS),)](
        # in
        z_2RC[0], z_2RC[1], rows.index, rows.num_kept, *((None,) * 4 if pair is None else pair[:4]),
        # in and out
        sums_KN,
        # out
        *((None,) * 3 if kept is None else kept),
        # sizes
        num_rows, sums_KN.shape[1], num_cols, 0 if kept is None else kept.exp_NV.shape[1], first_col,
        # options
        beta,
        TASK=task.value, KEEP=kept is not None, BLOCK_N=SUMS_ROWS, BLOCK_V=tiles.lse.cols,
    )  # fmt: skip


@kernel("z_s_ptr", "z_t_ptr", "exp_ptr", "difference_ptr", "num_cols", "kept_cols", "first_col")
def _pair_sums_kernel(
    z_s_ptr,  # in: [R, C] fp32
    z_t_ptr,  # in: [R, C] fp32
    index_ptr,  # in: [R] int32
    num_kept_ptr,  # in: [1] int32
    max_s_ptr,  # in: [N] fp32, for the mixture alone; also the next three
    log_sum_s_ptr,
    max_t_ptr,
    log_sum_t_ptr,
    sums_ptr,  # in, out: [5, N] fp32; [2, N] for the mixture
    exp_ptr,  # out: [R, B * BLOCK_V]; with KEEP, also the next two
    difference_ptr,  # out: [R, B * BLOCK_V]
    top_ptr,  # out: [2, B, R] fp32
    num_rows,
    num_tokens,
    num_cols,
    kept_cols,
    first_col,
    beta,
    TASK: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    num_kept = tl.load(num_kept_ptr)
    row = tl.program_id(0) * BLOCK_N
    if row >= num_kept:
        return
    offs_n = row + tl.arange(0, BLOCK_N)
    live = offs_n < num_kept
    token = tl.load(index_ptr + offs_n, mask=live, other=0)
    sums = sums_ptr + token
    stride = num_tokens.to(tl.int64)
    goes_on = live & (first_col > 0)
    sum_s = tl.load(sums + stride, mask=goes_on, other=0)
    if TASK == MIXTURE:
        # The sums are those of KL(t || m) and KL(p || m).
        sum_t = tl.load(sums, mask=goes_on, other=0)
        max_s = tl.load(max_s_ptr + token, mask=live, other=0)
        max_t = tl.load(max_t_ptr + token, mask=live, other=0)
        log_sum_s = tl.load(log_sum_s_ptr + token, mask=live, other=0)
        log_sum_t = tl.load(log_sum_t_ptr + token, mask=live, other=0)
    else:
        max_s = tl.load(sums, mask=goes_on, other=float("-inf"))
        max_t = tl.load(sums + 2 * stride, mask=goes_on, other=float("-inf"))
        sum_t = tl.load(sums + 3 * stride, mask=goes_on, other=0)
        moment = tl.load(sums + 4 * stride, mask=goes_on, other=0)

    offs_v = tl.arange(0, BLOCK_V)[None, :]
    cells = offs_n.to(tl.int64)[:, None] * num_cols + offs_v
    for col in range(0, num_cols, BLOCK_V):
        z_s = tl.load(z_s_ptr + cells + col, mask=live[:, None], other=float("-inf"))
        z_t = tl.load(z_t_ptr + cells + col, mask=live[:, None], other=float("-inf"))
        if TASK == MIXTURE:
            log_p = (z_s - max_s[:, None]) - log_sum_s[:, None]
            log_t = (z_t - max_t[:, None]) - log_sum_t[:, None]
            t = tl.exp(log_t)
            sum_t += tl.sum(tl.where(t == 0, 0.0, t * above_mixture(log_p - log_t, 1.0 - beta)), 1)
            p = tl.exp(log_p)
            sum_s += tl.sum(tl.where(p == 0, 0.0, p * above_mixture(log_t - log_p, beta)), 1)
        else:
            new_max_s = tl.maximum(max_s, tl.max(z_s, 1))
            new_max_t = tl.maximum(max_t, tl.max(z_t, 1))
            shift_s = _shift_of(new_max_s)
            shift_t = _shift_of(new_max_t)
            drop_s = shift_s - _shift_of(max_s)
            drop_t = shift_t - _shift_of(max_t)
            z_s -= shift_s[:, None]
            z_t -= shift_t[:, None]
            e_s = tl.exp(z_s)
            e_t = tl.exp(z_t)
            # A logit of -inf would make 0 * -inf.
            if TASK == FORWARD:
                moment = _moved_moment(moment, sum_t, drop_t, drop_s)
                moment += tl.sum(tl.where(e_t == 0, 0.0, e_t * (z_t - z_s)), 1)
            if TASK == REVERSE:
                moment = _moved_moment(moment, sum_s, drop_s, drop_t)
                moment += tl.sum(tl.where(e_s == 0, 0.0, e_s * (z_s - z_t)), 1)
            sum_s = _moved(sum_s, drop_s) + tl.sum(e_s, 1)
            sum_t = _moved(sum_t, drop_t) + tl.sum(e_t, 1)
            max_s = new_max_s
            max_t = new_max_t
            if KEEP:
                kept = offs_n.to(tl.int64)[:, None] * kept_cols + first_col + col + offs_v
                tl.store(exp_ptr + kept, tl.maximum(e_s, e_t).to(exp_ptr.dtype.element_ty), mask=live[:, None])
                tl.store(difference_ptr + kept, (z_s - z_t).to(difference_ptr.dtype.element_ty), mask=live[:, None])
                top = top_ptr + (first_col + col) // BLOCK_V * num_rows.to(tl.int64) + offs_n
                tl.store(top, shift_s, mask=live)
                tl.store(top + kept_cols // BLOCK_V * num_rows.to(tl.int64), shift_t, mask=live)

    tl.store(sums + stride, sum_s, mask=live)
    if TASK == MIXTURE:
        tl.store(sums, sum_t, mask=live)
    else:
        tl.store(sums, max_s, mask=live)
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
        tiles = choose_tiles(dtype, device)
        coef_N, gain = normalised(coef_N, dtype)
        sizes, num_kept = sizes_of(x), kept.exp_NV.shape[1]
        rest = budget.beside_pair_logits(spec.workspace_bytes)
        at_once, cols = budget.exact_chunks(sizes, rest, kept.nbytes if num_kept else 0, tiles, num_programs(device))
        at_once = at_once if num_kept else min(at_once, budget.pair_rows(spec.workspace_bytes))
        chunks = [(col, min(col + cols, sizes.num_columns)) for col in range(0, sizes.num_columns, cols)]
        buffers, dlogits_RV = _buffers(x, at_once), student.hidden.new_empty(at_once, cols)
        room = _room(x, at_once, tiles, spec) if num_kept < sizes.num_columns else None
        low_RD = remainder(student.hidden, at_once) if len(chunks) > 1 and d_hidden is not None else None
        total = None if d_hidden is None else Sum(d_hidden, low_RD)
        out = Output(total, d_weight, d_bias, gain, grads.hidden_ready, False)
        groups = finished_groups(student.ids, compact(student.ids), at_once, None if num_kept else grads.ready_rows)
        for group, (*order, num_final) in enumerate(groups):
            both = _gather(x, order, buffers)
            fill = partial(_fill_chunk, x, both, pair, coef_N, spec, kept, room, tiles)
            add = grads.weight_out is not None or group > 0
            add_chunks(out, student, both[0], chunks, dlogits_RV, fill, tiles, add=add, num_final=num_final)
    return returned


def _fill_chunk(
    x: Heads, both: tuple[Rows, Rows], pair: Pair, coef_N: torch.Tensor, spec: Divergence, kept: KeptPair,
    room: torch.Tensor | None, tiles: Tiles, first_col: int, dlogits_RV: torch.Tensor,
) -> None:  # fmt: skip
    """Fill dlogits_RV with the columns from ``first_col`` (a multiple of the tile) on, as ``dlogits_chunk`` does."""
    rows, logits, num_kept = both[0], x.student.logits, kept.exp_NV.shape[1]
    if first_col < num_kept:
        kept_gradients(kept, x, rows, pair, coef_N, spec, first_col, dlogits_RV)
    if room is None:
        return
    last = min(first_col + dlogits_RV.shape[1], logits.num_valid)
    for first, z_2RC in _logits(x, both, room, max(first_col, num_kept), last, tiles):
        _, num_rows, num_cols = z_2RC.shape
        _pair_dlogits_kernel[(cdiv(num_rows, BLOCK_N), num_cols // tiles.lse.cols)](
            # in
            z_2RC[0], z_2RC[1], rows.index, rows.num_kept, *pair, coef_N,
            # out
            dlogits_RV,
            # sizes
            num_rows, num_cols, dlogits_RV.shape[1], first - first_col, logits.num_valid - first_col,
            # options
            logits.logit_scale, logits.softcap, spec.beta,
            TASK=TASKS[spec.kind].value, HAS_SOFTCAP=logits.softcap > 0.0, BLOCK_N=BLOCK_N, BLOCK_V=tiles.lse.cols,
            MAX_SIDE=MAX_SIDE,
        )  # fmt: skip


@kernel("z_s_ptr", "z_t_ptr", "dlogits_ptr", "num_cols", "dlogits_cols", "first_col")
def _pair_dlogits_kernel(
    z_s_ptr,  # in: [R, C] fp32
    z_t_ptr,  # in: [R, C] fp32
    index_ptr,  # in: [R] int32
    num_kept_ptr,  # in: [1] int32
    max_s_ptr,  # in: [N] fp32; also the next five
    log_sum_s_ptr,
    max_t_ptr,
    log_sum_t_ptr,
    offset_ptr,
    coef_ptr,
    dlogits_ptr,  # out: [R, columns of the chunk]
    num_rows,
    num_cols,
    dlogits_cols,
    first_col,
    num_valid,
    logit_scale,
    softcap,
    beta,
    TASK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    MAX_SIDE: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_N
    num_kept = tl.load(num_kept_ptr)
    # The products read whole tiles of rows.
    if row >= tl.cdiv(num_kept, MAX_SIDE) * MAX_SIDE:
        return
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

    offs_v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    cells = offs_n.to(tl.int64)[:, None] * num_cols + offs_v[None, :]
    z_s = tl.load(z_s_ptr + cells, mask=live[:, None], other=0)
    log_p = (z_s - max_s[:, None]) - log_sum_s[:, None]
    log_t = (tl.load(z_t_ptr + cells, mask=live[:, None], other=0) - max_t[:, None]) - log_sum_t[:, None]
    p = tl.exp(log_p)
    # A probability that underflows would make 0 * -inf.
    if TASK == FORWARD:
        grad = p - tl.exp(log_t)
    elif TASK == REVERSE:
        grad = tl.where(p == 0, 0.0, p * ((log_p - log_t) - offset[:, None]))
    else:
        coef *= 1.0 - beta
        grad = tl.where(p == 0, 0.0, p * (above_mixture(log_t - log_p, beta) - offset[:, None]))
    grad *= coef[:, None]
    if HAS_SOFTCAP:
        grad *= softcap_slope(z_s, softcap)
    offs_v += first_col
    grad = tl.where((offs_v < num_valid)[None, :], grad, 0.0)
    here = dlogits_ptr + offs_n.to(tl.int64)[:, None] * dlogits_cols + offs_v[None, :]
    mask = (offs_n < num_rows)[:, None] & (offs_v < dlogits_cols)[None, :]
    tl.store(here, grad.to(dlogits_ptr.dtype.element_ty), mask=mask)
