"""The two torch.library operators behind ``linear_kl_divergence``: one shard's arithmetic for two heads, merged over the group.

``_run_forward`` and ``_run_backward`` are the algorithm, step by step, as ``op.py`` has it for the loss.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cce_dist import merge
from cce_dist.autograd import Operator, replayed
from cce_dist.call import Layout, build
from cce_dist.kernels import IGNORED, Grads, Operands
from cce_dist.kernels.divergence import dense as dense_heads
from cce_dist.kernels.divergence import heads
from cce_dist.kernels.divergence.heads import Divergence, Heads, Pair
from cce_dist.kernels.launch.tape import recorded
from cce_dist.shard import even_rows

PUBLIC_NAME = "linear_kl_divergence"


class DivergenceCall(NamedTuple):
    """As ``Call``; sequence parallelism is that of both heads' hidden states."""

    spec: Divergence
    vocab_size: int
    layout: Layout = Layout()
    backend: str = "torch"


def _backend(call: DivergenceCall) -> ModuleType:
    """The backend's arithmetic for two heads; that of Triton is imported by its first use."""
    if call.backend == "torch":
        return dense_heads
    from cce_dist.kernels.divergence import kernels as divergence

    return divergence


def _run_forward(*given: Any) -> tuple[Tensor, list[Tensor]]:
    """The divergence of each token, [N] fp32, 0 where it is not counted; the rows of ``Pair``, [5, N], and what is kept.

    Args:
        given: hidden, weight and bias of the student; mask, [N] bool; hidden, weight and bias of the teacher; then
            ``grad_weight_out``, which backward alone needs, and the call.
    """
    *operands, _, call = given
    spec, group = call.spec, merge.resolve(call.layout.group_name)
    backend = _backend(call)
    with torch.autocast(operands[0].device.type, enabled=False):
        x = _gathered(*operands, call=call)
        spec = _with_workspace(backend, x, call, group)
        stats_5N, kept = backend.statistics(x, spec)
        merged_5N = heads.merge(merge.gather_stats(stats_5N, group), spec)
        pair = heads.pair_of(merged_5N, spec)
        value = pair.offset
        if spec.kind == "jsd":
            # The mixture needs both log-sum-exps of the whole vocabulary, so it is summed in a second pass.
            of_teacher, of_student = merge.gather_stats(backend.mixture_sums(x, pair, kept, spec), group).sum(0)
            value = spec.beta * of_teacher + (1 - spec.beta) * of_student
            pair = pair._replace(offset=of_student)
        value = value.masked_fill(x.student.ids < 0, 0.0)
    return value, [torch.stack(pair), *kept]


def _gathered(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor,
    teacher_bias: Tensor | None, *, call: DivergenceCall,
) -> Heads:  # fmt: skip
    """The operands of both heads with all tokens; both gathers are under way together."""
    group, spec = merge.resolve(call.layout.group_name), call.spec
    if call.layout.sequence_parallel and group is not None:
        arriving = [recorded(merge.SequenceGather, slice_, group) for slice_ in (hidden, teacher_hidden)]
        hidden, teacher_hidden = (recorded(merge.SequenceGather.wait, gather) for gather in arriving)
    ids = torch.where(mask, 0, IGNORED)
    return Heads(
        Operands.of(hidden, weight, ids, spec.student, bias),
        Operands.of(teacher_hidden, teacher_weight, ids, spec.teacher, teacher_bias),
    )


def _run_backward(d_values: list[Tensor | None], *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """dE, dC and dbias of the student; an empty tensor for what is not wanted (or went into ``grad_weight_out``).

    Args:
        d_values: The gradient of each token's divergence.
        given: The operands of forward; what it saved; ``grad_weight_out``; which of the three are wanted; the call.
    """
    *operands, saved, grad_weight_out, want, call = given
    hidden, _, bias, *_ = operands
    want_hidden, want_weight, want_bias = want
    layout, spec, group = call.layout, call.spec, merge.resolve(call.layout.group_name)
    backend, sum_group = _backend(call), None if call.layout.partial else group
    assert d_values[0] is not None
    with torch.autocast(hidden.device.type, enabled=False):
        x = _gathered(*operands, call=call)
        spec = _with_workspace(backend, x, call, group)
        rows = None if sum_group is None else backend.rows_at_once(_of_even_shard(x, call, sum_group.size()), spec)
        reduce_dtype = getattr(torch, layout.reduce_dtype) if layout.reduce_dtype else None
        num_tokens = x.student.num_tokens
        hidden_sum = recorded(merge.HiddenGradSum, sum_group, layout.sequence_parallel, reduce_dtype, num_tokens, rows)
        coef_N = d_values[0].masked_fill(x.student.ids < 0, 0.0)
        start_sum = partial(recorded, merge.HiddenGradSum.start, hidden_sum)
        grads = Grads(want_hidden, want_weight, want_bias, grad_weight_out, start_sum, rows)
        _, d_weight, d_bias = backend.gradients(x, Pair(*saved[0]), coef_N, saved[1:], grads, spec)
        nothing = hidden.new_empty(0)
        return (
            recorded(merge.HiddenGradSum.wait, hidden_sum) if want_hidden else nothing,
            nothing if d_weight is None else d_weight,
            nothing if d_bias is None or bias is None else d_bias.to(bias.dtype),
        )


def _with_workspace(backend: ModuleType, x: Heads, call: DivergenceCall, group: Any) -> Divergence:
    """Choose the budget if none was given: the same on every rank."""
    if call.spec.workspace_bytes > 0:
        return call.spec
    even = _of_even_shard(x, call, 1 if group is None else group.size())
    return call.spec._replace(workspace_bytes=backend.default_workspace(even, call.spec))


def _of_even_shard(x: Heads, call: DivergenceCall, num_ranks: int) -> Heads:
    """As if the vocabulary were split evenly, so that every rank gets the same answer."""
    num_valid = even_rows(call.vocab_size, 0, num_ranks)[1]
    return x._replace(student=x.student._replace(num_valid=num_valid))


def _forward_fake(hidden, weight, bias, mask, teacher_hidden, teacher_weight, teacher_bias, _, *flat):
    call, num_tokens = build(DivergenceCall, iter(flat)), mask.shape[0]
    ids = mask.new_empty(num_tokens, dtype=torch.int64)
    # With sequence parallelism the hidden states of all tokens have these sizes.
    every, every_teachers = (x.new_empty(num_tokens, x.shape[1]) for x in (hidden, teacher_hidden))
    x = Heads(
        Operands.of(every, weight, ids, call.spec.student, bias),
        Operands.of(every_teachers, teacher_weight, ids, call.spec.teacher, teacher_bias),
    )
    backend = _backend(call)
    spec = _with_workspace(backend, x, call, merge.resolve(call.layout.group_name))
    pair_5N = hidden.new_empty((5, num_tokens), dtype=torch.float32)
    return torch.empty_like(pair_5N[0]), [pair_5N, *backend.saved_like(x, spec)]


_forward_again, _backward_again = replayed(_run_forward), replayed(_run_backward)
_OPERATOR = Operator(
    PUBLIC_NAME,
    _forward_again,
    _backward_again,
    "divergence",
    "divergence_backward",
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor mask, "
    "Tensor teacher_hidden, Tensor teacher_weight, Tensor? teacher_bias, Tensor? grad_weight_out",
    "(Tensor, Tensor[])",
    DivergenceCall,
    num_outputs=1,
    num_kept=7,
)
_OPERATOR.register(_forward_fake)


def forward(*tensors: Tensor | None, call: DivergenceCall) -> Tensor:
    """The operator as the public function calls it; see ``_run_forward``. Returns the divergence of each token, [N]."""
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors[:3])
    return _OPERATOR.apply(*tensors, call=call, needs_grad=needs_grad)[0]
