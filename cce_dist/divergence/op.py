"""The two torch.library operators behind ``linear_kl_divergence``: one shard's arithmetic for two heads, merged over the group.

``_run_forward`` and ``_run_backward`` are the algorithm, structured like ``op.py`` for the loss.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cce_dist.autograd import Operator, build, without_autocast
from cce_dist.decide import Way, Where, decide_heads
from cce_dist.kernels import IGNORED, Gradients, Grads, Operands
from cce_dist.kernels.divergence import dense as dense_heads
from cce_dist.kernels.divergence import heads
from cce_dist.kernels.divergence.heads import Divergence, Heads, Pair, sizes_of
from cce_dist.merge import Distributed, Layout
from cce_dist.op import summed
from cce_dist.shard import even_rows


class DivergenceCall(NamedTuple):
    """The options of a divergence, as in ``Call``. Sequence parallelism applies to the hidden states of both heads."""

    spec: Divergence
    vocab_size: int
    layout: Layout = Layout()
    backend: str = "torch"
    way: Way = Way()

    def with_numbers(self, numbers: Tensor) -> DivergenceCall:
        """Replace placeholders by ``numbers``: the student's scale and softcap, the teacher's scale and softcap, beta."""
        *pairs, beta = numbers.tolist()
        student, teacher = self.spec.student, self.spec.teacher
        student = student._replace(logit_scale=pairs[0], softcap=pairs[1])
        teacher = teacher._replace(logit_scale=pairs[2], softcap=pairs[3])
        return self._replace(spec=self.spec._replace(student=student, teacher=teacher, beta=beta))


def _backend(call: DivergenceCall) -> ModuleType:
    """Return the backend's module for two heads. Triton's module is imported at its first use."""
    if call.backend == "torch":
        return dense_heads
    from cce_dist.kernels.divergence import kernels as divergence

    return divergence


def _run_forward(*given: Any) -> tuple[Tensor, list[Tensor]]:
    """Return per-token divergences, [N] fp32, 0 for tokens that do not count; and a list of what backward needs.

    Args:
        given: hidden, weight and head of the student; mask, [N] bool; hidden, weight and head of the teacher; then
            ``grad_weight_out``, which only backward uses, and the call. A head is a list of tensors.
    """
    *operands, _, call = given
    backend, ranks = _backend(call), Distributed(call.layout)
    with without_autocast(operands[0].device.type):
        call = decided(call, *operands)
        x, spec = _gathered(*operands, call=call, ranks=ranks), call.spec

        def merged(stats_5N: Tensor) -> Tensor:
            return heads.merge(ranks.gather(stats_5N), spec)

        merged_5N, sums_2N, kept = backend.statistics(x, spec, merged, call.way.groups.rows)
        pair = heads.pair_of(merged_5N, spec)
        value = pair.offset
        if sums_2N is not None:
            value, pair = heads.complete(pair, ranks.gather(sums_2N), spec)
        value = value.masked_fill(x.student.ids < 0, 0.0)
    return value, [torch.stack([numbers for numbers in pair if numbers is not None]), *kept]


def _gathered(
    hidden: Tensor, weight: Tensor, head: list[Tensor], mask: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor,
    teacher_head: list[Tensor], *, call: DivergenceCall, ranks: Distributed,
) -> Heads:  # fmt: skip
    """Return the operands of both heads, after gathering the hidden states of both at the same time."""
    arriving = ranks.arriving(hidden, teacher_hidden)
    if arriving:
        hidden, teacher_hidden = (gather.wait() for gather in arriving)
    ids = torch.where(mask, 0, IGNORED)
    return _heads((hidden, weight, head), (teacher_hidden, teacher_weight, teacher_head), ids, call.spec)


def _heads(student: tuple[Any, ...], teacher: tuple[Any, ...], ids: Tensor, spec: Divergence) -> Heads:
    """Return the operands of both heads. Each head comes as hidden states, weight and a list of further tensors."""
    of_heads = zip((student, teacher), (spec.student, spec.teacher), strict=True)
    return Heads(
        *(Operands.of(hidden, weight, ids, logits, **logits.named(head)) for (hidden, weight, head), logits in of_heads)
    )


def _run_backward(d_values: list[Tensor | None], *given: Any) -> Gradients:
    """Return the student's d_hidden, d_weight and d_bias; None if not wanted, or added to ``grad_weight_out``.

    Args:
        d_values: The upstream gradient of each token's divergence.
        given: The operands of forward; what forward saved; ``grad_weight_out``; which gradients are wanted; the call.
    """
    *operands, saved, grad_weight_out, want, call = given
    backend, ranks = _backend(call), Distributed(call.layout)
    assert d_values[0] is not None
    with without_autocast(d_values[0].device.type):
        call = decided(call, *operands)
        x = _gathered(*operands, call=call, ranks=ranks)
        coef_N = d_values[0].masked_fill(x.student.ids < 0, 0.0)

        def gradients(grads: Grads) -> Gradients:
            return backend.gradients(x, Pair(*saved[0]), coef_N, saved[1:], grads, call.spec)

        return summed(gradients, want, grad_weight_out, ranks, x.student.num_tokens, call.way.ready_rows or None)


def decided(call: DivergenceCall, *operands: Any) -> DivergenceCall:
    """Decide the way of a call, unless it has one, and return the call with way and memory budget.

    Args:
        operands: The arguments of ``_gathered``.
    """
    if call.way.backend:
        return call
    hidden, _, _, mask, teacher_hidden, *_ = operands
    num_ranks = Distributed(call.layout).size
    columns = even_rows(call.vocab_size, 0, num_ranks)[1]
    sizes = sizes_of(mask.shape[0], hidden, columns, teacher_hidden)
    summed = call.layout.sums(num_ranks)
    way = decide_heads(sizes, call.spec, Where(call.backend, str(hidden.dtype), summed))
    return call._replace(spec=call.spec._replace(workspace_bytes=way.workspace_bytes), way=way)


def _forward_fake(hidden, weight, head, mask, teacher_hidden, teacher_weight, teacher_head, _, *flat):
    call, num_tokens = build(DivergenceCall, iter(flat)), mask.shape[0]
    ids = mask.new_empty(num_tokens, dtype=torch.int64)
    # Under sequence parallelism the arguments are slices; the operands have all tokens.
    whole, whole_teacher = (x.new_empty(num_tokens, x.shape[1]) for x in (hidden, teacher_hidden))
    x = _heads((whole, weight, head), (whole_teacher, teacher_weight, teacher_head), ids, call.spec)
    spec = decided(call, hidden, weight, head, mask, teacher_hidden).spec
    pair_KN = hidden.new_empty((5 + (spec.kind in ("tv", "lk")), num_tokens), dtype=torch.float32)
    return torch.empty_like(pair_KN[0]), [pair_KN, *_backend(call).saved_like(x, spec)]


_OPERATOR = Operator(
    "linear_kl_divergence",
    _run_forward,
    _run_backward,
    "divergence",
    "divergence_backward",
    "Tensor hidden, Tensor weight, Tensor[] head, Tensor mask, "
    "Tensor teacher_hidden, Tensor teacher_weight, Tensor[] teacher_head, Tensor? grad_weight_out",
    "(Tensor, Tensor[])",
    DivergenceCall,
    num_outputs=1,
    num_saved=7,
)
_OPERATOR.register(_forward_fake)


def forward(*tensors: Any, call: DivergenceCall, numbers: Tensor | None) -> Tensor:
    """Call the operator for the arguments of ``_run_forward``, and return the divergence of each token, [N]."""
    if not torch.compiler.is_compiling():
        call = decided(call, *tensors)
    return _OPERATOR.apply(*tensors, call=call, numbers=numbers)[0]
