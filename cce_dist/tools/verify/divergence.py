"""``linear_kl_divergence`` in verify: how a case is drawn, called and compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cce_dist import reference
from cce_dist.divergence import linear_kl_divergence
from cce_dist.shard import VocabShard
from cce_dist.tools.verify import check, oracle
from cce_dist.tools.verify.cases import BF16, FP32, OF_BOTH, DivergenceCase, Drawn, Gaussian, Problem, Truth
from cce_dist.tools.verify.check import GRADIENTS, Error, Function, Part, bound_of, compare, found, largest

TEACHER_SIZE = 40  # the teacher's D; the student's comes from its problem


def draw(case: DivergenceCase, generator: torch.Generator) -> Drawn:
    student = check.draw_problem(case, generator)
    num_tokens, vocab_size = student.hidden.shape[0], student.weight.shape[0]
    teacher = Gaussian(num_tokens, TEACHER_SIZE, vocab_size, scale=case.spread / TEACHER_SIZE**0.5)(generator)
    bias = None if student.bias is None else torch.randn(vocab_size, generator=generator, dtype=torch.float64)
    teacher = replace(teacher, bias=bias).rounded(case.dtype)
    mask = torch.rand(num_tokens, generator=generator) >= case.masked
    upstream = check.draw_upstream(case, {"divergence": (num_tokens,)}, generator)
    return Drawn(case, student, case.options | {"mask": mask}, upstream, teacher)


def reference_of(drawn: Drawn, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    _, options, upstream = drawn.on(device)
    leaves = check.leaves_of(drawn.case, drawn.problem, dtype, device)
    hidden, weight, bias = leaves.values()
    assert drawn.teacher is not None
    teacher, teacher_weight, teacher_bias = check.leaves_of(drawn.case, drawn.teacher, dtype, device).values()
    known = {name: options[name] for name in ("kind", "beta", "mask", *OF_BOTH) if name in options}
    value = reference.linear_kl_divergence(
        hidden, weight, teacher, teacher_weight, linear_bias=bias, teacher_bias=teacher_bias, **known
    )
    return found({"divergence": value}, upstream, leaves)


def call(drawn: Drawn, shard: VocabShard, backend: Any, device: str) -> dict[str, Tensor]:
    case, teacher = drawn.case, drawn.teacher
    assert teacher is not None
    _, options, upstream = drawn.on(device)
    leaves = check.local_leaves(case, drawn.problem, device, shard)
    last = shard.group is None or shard.group.rank() == shard.group_size - 1
    rows = VocabShard(shard.start, shard.stop + last * case.teacher_padding, shard.vocab_size, shard.group)
    if case.draft:
        teacher, ids, rows = _draft(teacher, shard, case.draft)
        options["teacher_ids"] = ids.to(device)
    of_teacher = check.local_leaves(case, teacher, device, shard, rows)
    (hidden, weight, bias), (teacher_hidden, teacher_weight, teacher_bias) = leaves.values(), of_teacher.values()
    value = linear_kl_divergence(
        hidden, weight, teacher_hidden, teacher_weight, linear_bias=bias, teacher_bias=teacher_bias, shard=shard,
        teacher_shard=None if case.draft == "whole" else rows, backend=backend, **options,
    )  # fmt: skip
    return found({"divergence": value}, upstream, leaves, case)


def _draft(teacher: Problem, shard: VocabShard, draft: str) -> tuple[Problem, Tensor, VocabShard]:
    """Spread the teacher's rows over a larger vocabulary whose other rows are NaN."""
    more = 2 * shard.vocab_size + 3
    ids = torch.randperm(more, generator=torch.Generator().manual_seed(0))[: shard.vocab_size]
    ids = ids if draft == "whole" else ids.sort().values

    def among(rows: Tensor) -> Tensor:
        return rows.new_full((more, *rows.shape[1:]), torch.nan).index_copy_(0, ids, rows)

    bias = None if teacher.bias is None else among(teacher.bias)
    teacher = replace(teacher, weight=among(teacher.weight), bias=bias)
    if draft == "whole":
        return teacher, ids, VocabShard(0, more, more)
    cuts = [0, *ids[1:].tolist()] + [more] * max(1, shard.stop + 1 - shard.vocab_size)
    return teacher, ids, VocabShard(cuts[shard.start], cuts[shard.stop], more, shard.group)


def judge(drawn: Drawn, name: str, ours: Tensor, part: Part, baseline: dict[str, Tensor], truth: Truth) -> list[Error]:
    """Compare by the rule of ``check``, with a bound from the whole gradient."""
    rough, right = baseline[name], truth.values[name]
    dtype = drawn.case.dtype if name in GRADIENTS else FP32
    bound = bound_of(rough, right, dtype) + _unavoidable(drawn).get(name, 0.0)
    return [compare(name, ours, part(rough), part(right), dtype)._replace(bound=bound)]


def _unavoidable(drawn: Drawn) -> dict[str, float]:
    """Return the error that follows from rounding the largest logit to fp32, and logits to fp16.

    All kinds but KL(t || p) have the divergence as a term of their gradients. For a sharp student the term cancels with others,
    and only its rounding is left. The gradients of "tv" and "lk" jump where p_j = t_j.
    """
    options, of_tokens, log_softmaxes = drawn.options, [], []
    for prefix, problem in (("teacher_", drawn.teacher), ("", drawn.problem)):
        assert problem is not None
        scale, softcap = options.get(f"{prefix}logit_scale", 1.0), options.get(f"{prefix}softcap")
        z = reference.logits(problem.hidden, problem.weight, problem.bias, scale, softcap)
        of_tokens.append(z.abs().amax(1))
        log_softmaxes.append(z.log_softmax(1))
    log_t, log_p = log_softmaxes
    off_N = torch.finfo(FP32).eps * torch.maximum(*of_tokens) * options["mask"]
    sizes = {"divergence": largest(off_N)}
    if options.get("kind", "forward") == "forward":
        return sizes
    share, p = off_N[:, None], log_p.exp()
    if options["kind"] == "jsd":
        share = share * (1 - options.get("beta", 0.5))
    if options["kind"] in ("tv", "lk"):
        tie = 4 * share
        if drawn.case.dtype == BF16:  # logits are then held in fp16, relative to the largest of their tile
            tie = tie + 2.0**-11 * sum(x.amax(1, keepdim=True) - x for x in log_softmaxes)
        share = torch.where((log_p - log_t).abs() <= tie, 1.0, share)
        log_smaller = torch.minimum(log_p, log_t)
        p = torch.maximum(p, log_smaller.softmax(1)) if options["kind"] == "lk" else p
    d_logits = p * share * (drawn.upstream["divergence"].abs() * abs(options.get("logit_scale", 1.0)))[:, None]
    grads = oracle.sums(d_logits, drawn.problem.hidden.abs(), drawn.problem.weight.abs())
    return sizes | {name: largest(grad) for name, grad in grads.items()}


DIVERGENCE = Function(draw, reference_of, call, judge, ("divergence",))
