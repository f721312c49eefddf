"""``linear_kl_divergence`` in the matrix: named traps, held to the rule of ``check``. Upstream gradients have both signs."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist import reference
from cce_dist.divergence import linear_kl_divergence
from cce_dist.shard import VocabShard
from cce_dist.tools.verify.cases import BF16, FP16, Bounds, Problem, even, padded, random_problem, uneven, with_empty
from cce_dist.tools.verify.check import (
    Error,
    compare,
    further_runs,
    gradients_twice,
    local_rows,
    of_rank,
    rounded,
    same_bits,
)

TEACHER_SIZE = 40  # the teacher's D; the student's is that of its problem


@dataclass(frozen=True)
class DivergenceCase:
    """One line of the matrix, as ``cases.Case``.

    Attributes:
        problem: Draws the student's head, and the number of tokens.
        spread: Standard deviation of the teacher's logits.
        masked: Share of the tokens that do not count.
        teacher_padding: Rows of padding that the last rank has more of in the teacher's head.
        draft: The student has a part of the teacher's ids; the teacher's head is "whole" on each rank or "split". "": all ids.
    """

    name: str
    catches: str
    options: dict = field(default_factory=dict)
    problem: Callable[[torch.Generator], Problem] = field(default_factory=random_problem)
    spread: float = 3.0
    masked: float = 0.0
    shards: Callable[[int, int], Bounds] = even
    teacher_padding: int = 0
    dtype: torch.dtype = torch.float32
    draft: str = ""


REVERSE, JSD = {"kind": "reverse"}, {"kind": "jsd", "beta": 0.3}
OF_BOTH = dict(logit_scale=0.7, softcap=5.0, teacher_logit_scale=1.2, teacher_softcap=7.0)

# fmt: off
DIVERGENCE_CASES = [
    DivergenceCase("kl-forward", "the teacher's log-sum-exp of a shard alone"),
    DivergenceCase("kl-reverse", "KL(t || p) in place of KL(p || t)", REVERSE),
    DivergenceCase("kl-jsd", "a mixture of softmaxes of a shard alone", JSD),
    DivergenceCase("kl-options-of-both", "the student's options on the teacher's logits", OF_BOTH, random_problem(bias=True)),
    DivergenceCase("kl-reverse-options", "the softcap's slope left out", OF_BOTH | REVERSE, random_problem(bias=True)),
    DivergenceCase("kl-jsd-options", "beta and 1 - beta exchanged", OF_BOTH | JSD, random_problem(bias=True)),
    DivergenceCase("kl-masked", "tokens that do not count in dC", problem=random_problem(bias=True), masked=0.4),
    DivergenceCase("kl-uneven-shards", "a moment relative to another shard's maximum", problem=random_problem(bias=True),
                   shards=uneven),
    DivergenceCase("kl-empty-shards", "a maximum over nothing", REVERSE, shards=with_empty),
    DivergenceCase("kl-padded", "phantom columns of logit 0 in either head", JSD, random_problem(shift=-20.0, grid=True),
                   shards=padded, teacher_padding=7),
    DivergenceCase("kl-sharp-teacher", "0 times infinity where the teacher underflows", problem=random_problem(scale=0.05),
                   spread=30.0),
    DivergenceCase("kl-sharp-student", "0 times infinity where the student underflows", REVERSE, random_problem(scale=6.0),
                   spread=0.1),
    DivergenceCase("kl-sequence-parallel", "the teacher's slice taken for the whole", {"sequence_parallel": True},
                   random_problem(24)),
    DivergenceCase("kl-partial", "a sum that somebody else makes, too", {"input_grad": "partial"}),
    DivergenceCase("kl-many-blocks", "state carried between blocks of logits", {"workspace_bytes": 1},
                   random_problem(300, 16, 1200, bias=True)),
    DivergenceCase("kl-draft", "the teacher's rows by the student's ids", problem=random_problem(bias=True), shards=uneven,
                   draft="whole"),
    DivergenceCase("kl-draft-split", "ids of another rank", problem=random_problem(bias=True), shards=padded, draft="split"),
    DivergenceCase("kl-bf16", "logits rounded before their difference is taken", problem=random_problem(scale=0.2), dtype=BF16),
    DivergenceCase("kl-fp16", "gradients of a token that underflow", JSD, random_problem(scale=0.2), dtype=FP16),
]
# fmt: on


class _Drawn(NamedTuple):
    """Both heads, whole, on the device, and the weights of the tokens' divergences."""

    student: Problem
    teacher: Problem
    mask: Tensor
    upstream: Tensor
    device: str


def run_case(
    case: DivergenceCase, group: dist.ProcessGroup | None, device: str, backend: str = "auto", salt: int = 0
) -> list[Error]:
    """Run a case on the ranks of ``group``, as ``check.run_case``."""
    backend = ("torch" if device == "cpu" else "triton") if backend == "auto" else backend
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    drawn = _draw(case, torch.Generator().manual_seed(zlib.crc32(case.name.encode()) + salt), device)
    truth, baseline = (_expected(case, drawn, dtype) for dtype in (torch.float64, case.dtype))
    vocab_size = drawn.student.weight.shape[0]
    shard = VocabShard(*case.shards(vocab_size, ranks)[rank], vocab_size, group)
    run = partial(_ours, case, drawn, shard, rank, backend)
    first = run()

    unavoidable = _unavoidable(case, drawn)
    errors, rows_here = [], torch.arange(shard.num_valid, device=device) + shard.start
    for name, ours in first.items():
        rough, exact = baseline[name], truth[name]
        padding, ours, wholes = of_rank(name, ours, [rough, exact], case.options, shard)
        errors += padding
        if padding:  # the whole, ours in these rows: a shard of a few rows is held to the size of the whole gradient
            ours = exact.to(ours.dtype).index_copy(0, rows_here, ours)
        else:
            rough, exact = wholes
        error = compare(name, ours, rough, exact, torch.float32 if name == "divergence" else case.dtype)
        errors.append(error._replace(bound=error.bound + unavoidable.get(name, 0.0)))
    return errors + same_bits(first, run, further_runs(device), ("divergence",), group)


def _draw(case: DivergenceCase, generator: torch.Generator, device: str) -> _Drawn:
    student = rounded(case.problem(generator), case.dtype)
    num_tokens, vocab_size = student.hidden.shape[0], student.weight.shape[0]
    teacher = random_problem(num_tokens, TEACHER_SIZE, vocab_size, scale=case.spread / TEACHER_SIZE**0.5)(generator)
    bias = None if student.bias is None else torch.randn(vocab_size, generator=generator, dtype=torch.float64)
    teacher = rounded(Problem(teacher.hidden, teacher.weight, teacher.labels, bias), case.dtype)
    mask = torch.rand(num_tokens, generator=generator) >= case.masked
    return _Drawn(student, teacher, mask.to(device), torch.randn(num_tokens, generator=generator).to(device), device)


def _unavoidable(case: DivergenceCase, drawn: _Drawn) -> dict[str, float]:
    """How far the divergence is off for a rounding of the largest logit in fp32, and the gradients for such a divergence.

    The divergence is a term of all gradients but of KL(t || p)'s. It cancels for a sharp student, and its rounding stays.
    """
    options, sizes, p = case.options, [], drawn.upstream
    for of, problem in (("teacher_", drawn.teacher), ("", drawn.student)):
        scale, softcap = options.get(f"{of}logit_scale", 1.0), options.get(f"{of}softcap")
        z = reference.logits(*_tensors(problem, torch.float64, drawn.device), logit_scale=scale, softcap=softcap)
        sizes.append(z.abs().amax(1))
        p = z.softmax(1)
    off_N = torch.finfo(torch.float32).eps * torch.maximum(*sizes) * drawn.mask
    found = {"divergence": off_N.amax().item()}
    if options.get("kind", "forward") == "forward":
        return found
    d_logits = p * (off_N * drawn.upstream.abs() * abs(options.get("logit_scale", 1.0)))[:, None]
    hidden, weight = (x.abs() for x in _tensors(drawn.student, torch.float64, drawn.device)[:2])
    grads = {"dE": d_logits @ weight, "dC": d_logits.t() @ hidden, "dbias": d_logits.sum(0)}
    return found | {name: grad.amax().item() for name, grad in grads.items()}


def _tensors(problem: Problem, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Hidden states, weight, and bias if there is one."""
    return [x for x in problem.tensors(dtype, device) if x is not None]


def _expected(case: DivergenceCase, drawn: _Drawn, dtype: torch.dtype) -> dict[str, Tensor]:
    """The divergence and the student's gradients by the dense reference in a dtype."""
    student, teacher = (_tensors(problem, dtype, drawn.device) for problem in (drawn.student, drawn.teacher))
    inputs = [x.requires_grad_() for x in student]
    known = ("kind", "beta", *OF_BOTH)
    value = reference.linear_kl_divergence(
        *student[:2],
        *teacher[:2],
        linear_bias=student[2] if len(student) > 2 else None,
        teacher_bias=teacher[2] if len(teacher) > 2 else None,
        mask=drawn.mask,
        **{name: option for name, option in case.options.items() if name in known},
    )
    grads = torch.autograd.grad((value * drawn.upstream).sum(), inputs)
    return {"divergence": value.detach(), **dict(zip(("dE", "dC", "dbias"), grads, strict=False))}


def _ours(case: DivergenceCase, drawn: _Drawn, shard: VocabShard, rank: int, backend: str) -> dict[str, Tensor]:
    """The same from ``linear_kl_divergence`` on this rank's shard, after checking a second backward."""
    hidden, *rows = _tensors(drawn.student, case.dtype, drawn.device)
    teacher, *teacher_rows = _tensors(drawn.teacher, case.dtype, drawn.device)
    padding = case.teacher_padding if rank == shard.group_size - 1 else 0
    teacher_shard: VocabShard | None = VocabShard(shard.start, shard.stop + padding, shard.vocab_size, shard.group)
    rows, options = [local_rows(x, shard) for x in rows], dict(case.options)
    if case.draft:
        teacher_rows, options["teacher_ids"], teacher_shard = _draft(teacher_rows, shard, case.draft)
    if teacher_shard is not None:
        teacher_rows = [local_rows(x, teacher_shard) for x in teacher_rows]
    if case.options.get("sequence_parallel"):
        hidden, teacher = (x.chunk(shard.group_size)[rank].contiguous() for x in (hidden, teacher))
    biases: dict[str, Any] = dict(zip(("linear_bias", "teacher_bias"), (*rows[1:], *teacher_rows[1:]), strict=False))
    value = linear_kl_divergence(
        hidden.requires_grad_(), rows[0], teacher, teacher_rows[0], mask=drawn.mask, shard=shard,
        teacher_shard=teacher_shard, backend=backend, **biases, **options,
    )  # fmt: skip
    grads = gradients_twice((value * drawn.upstream).sum(), (hidden, *rows))
    return {"divergence": value.detach(), **dict(zip(("dE", "dC", "dbias"), grads, strict=False))}


def _draft(rows: list[Tensor], shard: VocabShard, draft: str) -> tuple[list[Tensor], Tensor, VocabShard | None]:
    """Put the teacher's rows among others that are NaN. -> its tensors, the ids of these rows, the shard of its vocabulary."""
    more = 2 * shard.vocab_size + 3
    ids = torch.randperm(more, generator=torch.Generator().manual_seed(0))[: shard.vocab_size].to(rows[0].device)
    ids = ids if draft == "whole" else ids.sort().values
    among = [x.new_full((more, *x.shape[1:]), torch.nan).index_copy_(0, ids, x) for x in rows]
    if draft == "whole":
        return among, ids, None
    cuts = [0, *ids[1:].tolist()] + [more] * max(1, shard.stop + 1 - shard.vocab_size)
    return among, ids, VocabShard(cuts[shard.start], cuts[shard.stop], more, shard.group)
