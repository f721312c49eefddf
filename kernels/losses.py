"""From the partials of a pass over the vocabulary to each token's losses: merge the parts, then the shards.

On one rank ``finish`` does all of it in one launch: it levels the saved exponentials, merges a token's partials, and writes its
losses, the numbers of its softmax, and the program's part of the mean. With ranks ``finish`` writes the shard's statistics, and
after the all-gather ``token_losses`` merges the shards and writes the same outputs.

The last program to arrive adds up the parts of the mean, in order, so a mean has the same bits in every run. An integer atomic
counts arrivals, in the second element of ``num_labelled``, which the last program sets to 0 again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from cce_dist.kernels import IGNORED, Losses, Operands, Rows, Softmax, Spec, Want
from cce_dist.kernels.blocks import kernel, on_device
from cce_dist.kernels.lse import BELOW, BEST, COUNT, MAX, MOMENT, SHIFT, SLOPED, SMALLER, SQUARE, SUM, Sums
from cce_dist.kernels.saved_exp import Leveling, leveled
from cce_dist.kernels.tiles import cdiv
from cce_dist.kernels.tokens import compact

_IGNORED = tl.constexpr(IGNORED)
_BLOCK = 128  # tokens per program
FAR = tl.constexpr(87.0)  # nats; exp(-87) is above 2^-126, and exp(87) is finite
_LEVELED = 16  # tokens per program that also levels exponentials
Results = tuple[Losses, Softmax, "torch.Tensor | None", list[torch.Tensor]]  # of ``losses_alone``


class Finished(NamedTuple):
    """Tensors of all tokens that one or several launches write."""

    losses: Losses
    softmax: Softmax
    part_2B: torch.Tensor | None  # fp32: sum of nll and number of labels, by program; with the mean
    arrived: torch.Tensor | None  # ``num_labelled``, which has the counter of arrivals; with the mean

    @classmethod
    def new(cls, x: Operands, num_labelled: torch.Tensor | None, want: Want, num_programs: int) -> Finished:
        def new(is_wanted: bool, *shape: int, dtype: torch.dtype = torch.float32) -> Any:
            return torch.empty(shape, dtype=dtype, device=x.ids.device) if is_wanted else None

        num_tokens, mean = x.ids.shape[0], want.mean
        nll, lse, target, maximum, log_sum = (new(True, num_tokens) for _ in range(5))
        uniform, entropy = new(want.uniform, num_tokens), new(want.entropy, num_tokens)
        losses = Losses(nll, lse, target, uniform, entropy, new(mean), new(mean, dtype=torch.int64))
        softmax = Softmax(maximum, log_sum, new(want.entropy, num_tokens))
        return cls(losses, softmax, new(mean, 2, num_programs), num_labelled)


def rows_per_program(levels: bool) -> int:
    return _LEVELED if levels else _BLOCK


def finish(
    x: Operands,
    rows: Rows,
    partials_KPR: torch.Tensor | None,
    *,
    want: Want,
    leveling: Leveling | None = None,
    target_N: torch.Tensor | None = None,
    vocab_size: int = 0,
    stats_KN: torch.Tensor | None = None,
    sloped_N: torch.Tensor | None = None,
    out: Finished | None = None,
    first_program: int = 0,
) -> int:
    """Merge the partials of all parts, in order, at the tokens of a group, and level their saved exponentials.

    Args:
        partials_KPR: From ``lse_partials``; None: level only.
        target_N: Logit of each token's label, fp32; None: 0.
        vocab_size: Size of the whole vocabulary, for ``out``.
        stats_KN: Out: statistics, except TARGET. Tokens without a label get a maximum of 0, a sum of 1, and zeros.
        sloped_N: Out: sum of exp times the softcap's slope.
        out: Out: losses and softmax, if this shard is the whole vocabulary.
        first_program: Number of programs that earlier groups took, for the mean.

    Returns the number of programs that this group took.
    """
    num_rows, block = rows.index.shape[0], rows_per_program(leveling is not None)
    programs = cdiv(num_rows, block)
    losses, softmax, part_2B, arrived = out or (None, None, None, None)
    exp_RV, tile_reference_BR, reference_R, tile_cols = leveling or (None, None, None, 0)
    _finish_kernel[(programs,)](
        # in
        partials_KPR, rows.index, rows.num_labelled, x.ids, target_N, tile_reference_BR,
        # in, out
        exp_RV, part_2B, arrived,
        # out
        reference_R, stats_KN, sloped_N, losses, softmax,
        # sizes
        num_rows, x.num_tokens, 0 if partials_KPR is None else partials_KPR.shape[1], x.num_valid, vocab_size,
        0 if tile_reference_BR is None else tile_reference_BR.shape[0], 0 if exp_RV is None else exp_RV.shape[1],
        first_program, 0 if part_2B is None else part_2B.shape[1],
        # options
        WANT=Sums.of(want, sloped_N is not None), WANT_LOSSES=out is not None, BLOCK_N=block, BLOCK_V=tile_cols, BLOCK_T=32,
    )
    return programs


@kernel("partial_ptr", "exp_ptr", "tile_reference_ptr", "exp_cols")
def _finish_kernel(
    partial_ptr,  # in: [K, P, R] fp32, or None
    index_ptr,  # in: [R] int32
    num_labelled_ptr,  # in: [1] int32
    ids_ptr,  # in: [N] int64
    target_ptr,  # in: [N] fp32, or None
    tile_reference_ptr,  # in: [B, R] fp32, or None
    exp_ptr,  # in, out: [R, B * BLOCK_V], or None
    part_ptr,  # in, out: [2, programs] fp32, or None
    arrived_ptr,  # in, out: [2] int32, the second one counts; or None
    reference_ptr,  # out: [R] fp32, or None
    stats_ptr,  # out: [K, N] fp32, or None
    sloped_ptr,  # out: [N] fp32, or None
    losses,  # out: Losses, or None
    softmax,  # out: Softmax, or None
    num_rows,
    num_tokens,
    num_splits,
    num_valid,
    vocab_size,
    num_tiles,
    exp_cols,
    first_program,
    num_programs,
    WANT: tl.constexpr,  # Sums
    WANT_LOSSES: tl.constexpr,  # Triton 3.6 cannot compare a tuple that holds None with None
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = offs_n < num_rows
    live = offs_n < tl.load(num_labelled_ptr)
    if tile_reference_ptr is not None:
        leveled(
            exp_ptr, tile_reference_ptr, reference_ptr, offs_n, live, num_rows, num_tiles, exp_cols, BLOCK_N, BLOCK_V, BLOCK_T
        )
    if partial_ptr is not None:
        merged = _merged_parts(partial_ptr, offs_n, live, num_rows.to(tl.int64), num_splits, WANT)
        token = tl.load(index_ptr + offs_n, mask=in_n, other=0)
        if stats_ptr is not None:
            _store_stats(stats_ptr + token, merged, live, in_n, num_tokens.to(tl.int64), num_valid, WANT)
        if WANT.sloped:
            tl.store(sloped_ptr + token, tl.where(live, merged[4], 0.0), mask=in_n)
        if WANT_LOSSES:
            target = tl.zeros((BLOCK_N,), tl.float32)
            if target_ptr is not None:
                target += tl.load(target_ptr + token, mask=in_n, other=0)
            row_max, sum_exp, below, moment, _, _, _ = merged
            row_max = tl.where(live, row_max, 0.0)
            sum_exp = tl.where(live, sum_exp, 1.0)
            ids = tl.load(ids_ptr + token, mask=in_n, other=_IGNORED)
            nll = _store_losses(losses, softmax, token, in_n, ids, row_max, sum_exp, target, below, moment, vocab_size)
            if losses.mean is not None:
                _add_to_mean(
                    nll, ids, losses.mean, losses.count, part_ptr, arrived_ptr, first_program + tl.program_id(0), num_programs
                )


@triton.jit
def _merged_parts(partial_ptr, offs_n, live, row_stride, num_splits, WANT: tl.constexpr):
    """Merge the partials of all parts. Return the maximum, and six numbers, relative to it, 0 if not wanted.

    These are sums of exp, of two statistics, of exp times the slope, of exp squared, and the bits of the best column.
    """
    plane = num_splits * row_stride
    merged_max = tl.full(offs_n.shape, float("-inf"), tl.float32)
    best = tl.zeros(offs_n.shape, tl.float32)
    # Merge the maxima of all parts into merged_max [BLOCK_N].
    for split in range(0, num_splits):
        where = partial_ptr + split * row_stride + offs_n
        part_max = tl.load(where + MAX * plane, mask=live, other=0)
        if WANT.best:
            # Parts are in column order, so the first of equal maxima has the smallest column.
            best = tl.where(part_max > merged_max, tl.load(where + BEST * plane, mask=live, other=0), best)
        merged_max = tl.maximum(merged_max, part_max)
    base = tl.where(merged_max > float("-inf"), merged_max, 0.0)

    sum_exp = tl.zeros(offs_n.shape, tl.float32)
    below = tl.zeros(offs_n.shape, tl.float32)
    moment = tl.zeros(offs_n.shape, tl.float32)
    sloped = tl.zeros(offs_n.shape, tl.float32)
    square = tl.zeros(offs_n.shape, tl.float32)
    # Rescale the sums of each part, [BLOCK_N], to the merged maximum and add them up.
    for split in range(0, num_splits):
        where = partial_ptr + split * row_stride + offs_n
        drop = base - tl.load(where + SHIFT * plane, mask=live, other=0)
        part = tl.load(where + SUM * plane, mask=live, other=0)
        # Leave a sum of 0 as it is: its reference may be far off. Rescale any other sum, NaN too. A filter's reference is the
        # bound over all shards: where a shard's logits are FAR below it, its sums are below fp32's normal range and count as 0.
        rescale = tl.where(part == 0, 1.0, tl.where(drop < -FAR, 0.0, tl.exp(-drop)))
        sum_exp += part * rescale
        if WANT.below:
            columns = tl.load(where + COUNT * plane, mask=live, other=0)
            below += tl.load(where + BELOW * plane, mask=live, other=0) + columns * drop
        if WANT.moment:
            part_moment = tl.load(where + MOMENT * plane, mask=live, other=0)
            rise = base - tl.load(where + MAX * plane, mask=live, other=0)
            moment += tl.where(part == 0, 0.0, rescale * (part_moment - rise * part))
        if WANT.sloped:
            sloped += tl.load(where + SLOPED * plane, mask=live, other=0) * rescale
        if WANT.square:
            square += tl.load(where + SQUARE * plane, mask=live, other=0) * rescale * rescale
    return merged_max, sum_exp, below, moment, sloped, square, best


@triton.jit
def _store_stats(stats, merged, live, in_n, stride, num_valid, WANT: tl.constexpr):
    """Store a shard's statistics of these tokens, except TARGET."""
    merged_max, sum_exp, below, moment, _, square, best = merged
    tl.store(stats, tl.where(live, merged_max, 0.0), mask=in_n)
    tl.store(stats + stride, tl.where(live, sum_exp, 1.0), mask=in_n)
    if WANT.below:
        tl.store(stats + 3 * stride, tl.where(live, below, 0.0), mask=in_n)
        tl.store(stats + 4 * stride, tl.zeros(live.shape, tl.float32) + num_valid, mask=in_n)
    if WANT.moment:
        tl.store(stats + (3 + 2 * WANT.below) * stride, tl.where(live, moment, 0.0), mask=in_n)
    next_row = stats + (3 + 2 * WANT.below + WANT.moment) * stride
    if WANT.square:
        tl.store(next_row, tl.where(live, square / (SMALLER * SMALLER), 0.0), mask=in_n)
    if WANT.best:
        tl.store(next_row + WANT.square * stride, tl.where(live, best, 0.0), mask=in_n)


@triton.jit
def _store_losses(losses, softmax, token, in_n, ids, row_max, sum_exp, target, below, moment, vocab_size):
    """Store the losses and the softmax of these tokens. Return nll."""
    log_sum = tl.log(sum_exp)
    tl.store(softmax.max + token, row_max, mask=in_n)
    tl.store(softmax.log_sum + token, log_sum, mask=in_n)
    instead = tl.where(ids == _IGNORED, 0.0, float("nan"))
    nll = tl.where(ids >= 0, row_max - target + log_sum, instead)
    tl.store(losses.nll + token, nll, mask=in_n)
    tl.store(losses.lse + token, tl.where(ids >= 0, row_max + log_sum, instead), mask=in_n)
    tl.store(losses.target + token, tl.where(ids >= 0, target, instead), mask=in_n)
    if losses.uniform is not None:
        tl.store(losses.uniform + token, tl.where(ids >= 0, below / vocab_size + log_sum, instead), mask=in_n)
    if losses.entropy is not None:
        entropy = log_sum - moment / sum_exp
        tl.store(softmax.entropy + token, entropy, mask=in_n)
        tl.store(losses.entropy + token, tl.where(ids >= 0, entropy, instead), mask=in_n)
    return nll


@triton.jit
def _add_to_mean(nll, ids, mean_ptr, count_ptr, part_ptr, arrived_ptr, program, num_programs):
    tl.store(part_ptr + program, tl.sum(nll, 0))
    tl.store(part_ptr + num_programs + program, tl.sum((ids != _IGNORED).to(tl.float32), 0))
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + 1, 1, sem="acq_rel") == num_programs - 1:
        PARTS: tl.constexpr = 1024
        total = tl.zeros((PARTS,), tl.float32)
        count = tl.zeros((PARTS,), tl.int32)
        # Add up the parts, PARTS of them at a time. They come from other multiprocessors, so not from this one's cache.
        for first in range(0, num_programs, PARTS):
            offs = first + tl.arange(0, PARTS)
            part = part_ptr + offs
            total += tl.load(part, mask=offs < num_programs, other=0, cache_modifier=".cg")
            count += tl.load(part + num_programs, mask=offs < num_programs, other=0, cache_modifier=".cg").to(tl.int32)
        divisor = tl.maximum(tl.sum(count, 0), 1)
        tl.store(mean_ptr, tl.div_rn(tl.sum(total, 0), divisor.to(tl.float32)))
        tl.store(count_ptr, divisor.to(tl.int64))
        tl.store(arrived_ptr + 1, 0)


def of_statistics(x: Operands, spec: Spec, stats_KN: torch.Tensor, saved: list[torch.Tensor]) -> Results:
    stats_TKN = stats_KN[None]
    return *token_losses(stats_TKN, x, spec), stats_TKN, saved


def token_losses(stats_TKN: torch.Tensor, x: Operands, spec: Spec) -> tuple[Losses, Softmax]:
    if stats_TKN.shape[1] > spec.num_stats:
        stats_TKN = stats_TKN[:, : spec.num_stats]
    stats_TKN = stats_TKN.contiguous()
    num_shards, num_stats, num_tokens = stats_TKN.shape
    programs = max(1, cdiv(num_tokens, _BLOCK))  # without tokens the mean is still to be written
    num_labelled = (x.order or compact(x.ids))[1] if spec.want.mean else None
    out = Finished.new(x, num_labelled, spec.want, programs)
    with on_device(stats_TKN):
        _token_losses_kernel[(programs,)](
            stats_TKN, x.ids, out.part_2B, out.arrived, out.losses, out.softmax,
            num_shards, num_stats, spec.vocab_size, num_tokens, programs,
            BLOCK_N=_BLOCK,
        )
    return out.losses, out.softmax


@kernel("stats_ptr")
def _token_losses_kernel(
    stats_ptr,  # in: [T, K, N] fp32
    ids_ptr,  # in: [N] int64
    part_ptr,  # in, out: [2, programs] fp32, or None
    arrived_ptr,  # in, out: [2] int32, the second one counts; or None
    losses,  # out: Losses
    softmax,  # out: Softmax
    num_shards,
    num_stats,
    vocab_size,
    num_tokens,
    num_programs,
    BLOCK_N: tl.constexpr,
):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = offs_n < num_tokens
    plane = num_tokens.to(tl.int64)
    merged_max = tl.full(offs_n.shape, float("-inf"), tl.float32)
    for shard in range(0, num_shards):
        shard_max = tl.load(stats_ptr + shard * (num_stats * plane) + offs_n, mask=in_n, other=0)
        merged_max = tl.maximum(merged_max, shard_max, propagate_nan=tl.PropagateNan.ALL)

    sum_exp = tl.zeros((BLOCK_N,), tl.float32)
    target = tl.zeros((BLOCK_N,), tl.float32)
    sum_below = tl.zeros((BLOCK_N,), tl.float32)
    moment = tl.zeros((BLOCK_N,), tl.float32)
    # Rescale each shard's sums, [BLOCK_N], to the merged maximum and add them up, in rank order.
    for shard in range(0, num_shards):
        where = stats_ptr + shard * num_stats * plane + offs_n
        shard_max = tl.load(where, mask=in_n, other=0)
        # An empty shard or a row of -inf logits has a maximum of -inf, and -inf - -inf would be NaN.
        below = tl.where(shard_max == merged_max, 0.0, shard_max - merged_max)
        weight = tl.exp(below)
        shard_sum = tl.load(where + plane, mask=in_n, other=1)
        sum_exp += weight * shard_sum
        target += tl.load(where + 2 * plane, mask=in_n, other=0)
        if losses.uniform is not None:
            count = tl.load(where + 4 * plane, mask=in_n, other=0)
            sum_below += tl.load(where + 3 * plane, mask=in_n, other=0) + tl.where(count > 0, -below * count, 0.0)
        if losses.entropy is not None:
            shard_moment = tl.load(where + (num_stats - 1) * plane, mask=in_n, other=0)
            moment += tl.where(weight == 0, 0.0, weight * (shard_moment + below * shard_sum))
    ids = tl.load(ids_ptr + offs_n, mask=in_n, other=_IGNORED)
    nll = _store_losses(losses, softmax, offs_n, in_n, ids, merged_max, sum_exp, target, sum_below, moment, vocab_size)
    if losses.mean is not None:
        _add_to_mean(nll, ids, losses.mean, losses.count, part_ptr, arrived_ptr, tl.program_id(0), num_programs)
