"""Divergence of two heads in plain torch, a bounded block of both heads' logits at a time; ``heads`` has the formulas."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from cce_dist.kernels import Gradients, Grads, Spec
from cce_dist.kernels.dense import FLOOR, Block, blocks_of, sums_of_products, wanted_of
from cce_dist.kernels.divergence.heads import Divergence, Heads, Merge, Pair, Sums, above_mixture, merge, pair_of


def saved_like(x: Heads, spec: Divergence) -> list[Tensor]:
    return []


def _pairs(x: Heads, spec: Divergence) -> Iterator[tuple[slice, Iterator[tuple[Block, Block]]]]:
    of_student, of_teacher = (
        blocks_of(operands, Spec(spec.student, 1, workspace_bytes=spec.workspace_bytes)) for operands in x
    )
    for (cols, student), (_, teacher) in zip(of_student, of_teacher, strict=True):
        yield cols, zip(student, teacher, strict=True)


def statistics(x: Heads, spec: Divergence, merged: Merge, rows: int) -> Sums:
    """Return the sums, and nothing to save for backward. Blocks are merged as shards are. ``rows`` is not used."""
    stats_5N = torch.zeros(5, x.student.num_tokens, dtype=torch.float32, device=x.student.hidden.device)
    stats_5N[[0, 2]] = -torch.inf
    for _, pairs in _pairs(x, spec):
        for student, teacher in pairs:
            of_block_5R = _of_block(student.logits(), teacher.logits(), spec)
            before_5R = stats_5N[:, student.rows]
            before_5R.copy_(merge(torch.stack((before_5R, of_block_5R)), spec))
    stats_5N = merged(stats_5N)
    return stats_5N, _second_sums(x, pair_of(stats_5N, spec), spec), []


def _of_block(z_s: Tensor, z_t: Tensor, spec: Divergence) -> Tensor:
    """Return a block's statistics. Overwrites both heads' logits."""
    max_s, max_t = z_s.amax(1), z_t.amax(1)
    z_s -= max_s.clamp(min=FLOOR)[:, None]
    z_t -= max_t.clamp(min=FLOOR)[:, None]
    sum_s, sum_t = z_s.exp().sum(1), z_t.exp().sum(1)
    moment = torch.zeros_like(sum_s)
    if spec.empty_sum is None:
        lead, other = (z_s, z_t) if spec.kind == "reverse" else (z_t, z_s)
        weight = lead.exp()
        # Avoid 0 * -inf = NaN for a logit of -inf.
        moment = torch.where(weight == 0, 0.0, weight * (lead - other)).sum(1)
    return torch.stack((max_s, sum_s, max_t, sum_t, moment))


def _log_softmaxes(student: Block, teacher: Block, pair: Pair) -> tuple[Tensor, Tensor, Tensor]:
    """Return log p and log t of a block, and the student's logits."""
    rows = (student.rows, None)
    z_s = student.logits()
    log_p = (z_s - pair.max_s[rows]).sub_(pair.log_sum_s[rows])
    log_t = teacher.logits().sub_(pair.max_t[rows]).sub_(pair.log_sum_t[rows])
    return log_p, log_t, z_s


def _second_sums(x: Heads, pair: Pair, spec: Divergence) -> Tensor | None:
    """Return this shard's sums of a second pass, [2, N], or None if there is none."""
    if spec.empty_sum is None:
        return None
    sums_2N = pair.offset.new_full((2, x.student.num_tokens), spec.empty_sum)
    for _, pairs in _pairs(x, spec):
        for student, teacher in pairs:
            log_p, log_t, _ = _log_softmaxes(student, teacher, pair)
            p, t, below = log_p.exp(), log_t.exp(), log_p < log_t
            if spec.kind == "jsd":
                of_teacher = torch.where(t == 0, 0.0, t * above_mixture(log_t, log_p, spec.beta, spec.rest)).sum(1)
                of_student = torch.where(p == 0, 0.0, p * above_mixture(log_p, log_t, spec.rest, spec.beta)).sum(1)
                parts = of_teacher, of_student
            elif spec.kind == "tv":
                # A NaN is not >=, so it is passed on.
                parts = torch.where(log_p >= log_t, 0.0, t - p).sum(1), torch.where(below, p, 0.0).sum(1)
            else:
                parts = torch.minimum(log_p, log_t).logsumexp(1), torch.where(below, log_p, -torch.inf).logsumexp(1)
            before_2R, of_block_2R = sums_2N[:, student.rows], torch.stack(parts)
            before_2R.copy_(torch.logaddexp(before_2R, of_block_2R) if spec.kind == "lk" else before_2R + of_block_2R)
    return sums_2N


def gradients(
    x: Heads, pair: Pair, coef_N: Tensor, saved: list[Tensor], grads: Grads, spec: Divergence
) -> Gradients:
    def gradients_of(pairs: Iterator[tuple[Block, Block]]) -> Iterator[tuple[Block, Tensor, Tensor, Tensor]]:
        for block, teacher in pairs:
            d_logits = _block_gradients(block, teacher, pair, spec).mul_(coef_N[block.rows, None])
            yield block, d_logits, d_logits, d_logits

    parts = ((cols, gradients_of(pairs)) for cols, pairs in _pairs(x, spec))
    sums = sums_of_products(x.student, parts, grads, matmul=lambda d_logits, other: d_logits @ other.float())
    return wanted_of(x.student, *sums, grads)


def _block_gradients(student: Block, teacher: Block, pair: Pair, spec: Divergence) -> Tensor:
    log_p, log_t, z = _log_softmaxes(student, teacher, pair)
    head, p = student.head, log_p.exp()
    if spec.kind == "forward":
        grad = p - log_t.exp_()
    elif spec.kind in ("tv", "lk"):
        assert pair.log_overlap is not None
        below = torch.where(log_p < log_t, log_p - pair.log_overlap[student.rows, None], -torch.inf)
        grad = p * pair.offset[student.rows, None] - below.exp_()
    else:
        reverse = spec.kind == "reverse"
        above = log_p - log_t if reverse else above_mixture(log_p, log_t, spec.rest, spec.beta)
        factor = 1.0 if reverse else spec.rest
        # Avoid 0 * -inf = NaN where p underflows.
        grad = torch.where(p == 0, 0.0, factor * p * (above - pair.offset[student.rows, None]))
    if head.softcap is not None:
        grad *= 1 - (z / head.softcap).square()
    return grad.mul_(head.multiplier)
