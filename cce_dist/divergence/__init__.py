"""linear_kl_divergence: KL and other divergences of two heads from hidden states, without the logits of either.

``_run_forward`` and ``_run_backward`` are the algorithm, structured like ``op.py`` for the loss.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cce_dist import checks, debug_ranks, merge
from cce_dist.autograd import Operator, build, without_autocast
from cce_dist.call import Backend, InputGrad, Options, Reduction, checked, concrete, layout_of, numbers_of
from cce_dist.decide import Way, Where, choose_backend, decide_heads
from cce_dist.kernels import IGNORED, Gradients, Grads, Operands
from cce_dist.kernels.divergence import dense as dense_heads
from cce_dist.kernels.divergence import heads
from cce_dist.kernels.divergence.heads import KINDS, Divergence, Heads, Pair, sizes_of
from cce_dist.merge import Distributed, Layout
from cce_dist.op import summed
from cce_dist.operands import (
    LocalHead,
    check_buffer,
    check_shape,
    environment,
    head_of,
    logits_of,
    shape_of_tokens,
)
from cce_dist.shard import VocabShard, even_rows


@debug_ranks.errors_reach_all_ranks
def linear_kl_divergence(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    *,
    kind: Literal["forward", "reverse", "jsd", "tv", "lk"] = "forward",
    beta: float = 0.5,
    logit_scale: float | Tensor = 1.0,
    teacher_logit_scale: float | Tensor = 1.0,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    mask: Tensor | None = None,
    reduction: Reduction = "none",
    shard: VocabShard | None = None,
    teacher_shard: VocabShard | None = None,
    teacher_ids: Tensor | None = None,
    sequence_parallel: bool = False,
    input_grad: InputGrad = "summed",
    reduce_dtype: torch.dtype | None = None,
    backend: Backend = "auto",
    workspace_bytes: int | None = None,
    grad_weight_out: Tensor | None = None,
) -> Tensor:
    """Compute the divergence between a student's and a teacher's head from hidden states, without the logits of either.

    Each head's logits are computed as in ``linear_cross_entropy``: ``softcap * tanh(u / softcap)`` with
    ``u = logit_scale * (input @ linear_weight.T + linear_bias)``. With t the teacher's softmax, p the student's, and
    ``m = beta * t + (1 - beta) * p``, the divergence of a token, in nats and over the whole vocabulary, is

        "forward"   KL(t || p): the student covers what the teacher says
        "reverse"   KL(p || t): the student says nothing that the teacher would not
        "jsd"       beta * KL(t || m) + (1 - beta) * KL(p || m), as generalized knowledge distillation (GKD) and TRL define it
        "tv"        1 - o, total variation: 0.5 * sum_j |p_j - t_j|
        "lk"        -log(o): for draft models of speculative decoding, which accepts a draft model's token with probability o

    with ``o = sum_j min(p_j, t_j)``. At p_j = t_j, where o has no derivative, the gradient is the limit from p_j > t_j.

    The teacher's tensors are detached. For a temperature tau pass ``logit_scale=1 / tau, teacher_logit_scale=1 / tau``; if your
    loss has a factor tau**2, multiply by it yourself.

    Args:
        input: [..., D] hidden states of the student in fp32, bf16 or fp16. Autocast casts hidden states and weights as it does
            for ``F.linear``.
        linear_weight: [V_r, D] this rank's rows of the student's head, in input's dtype; or a DTensor sharded on dim 0.
        teacher_input: [..., D_t] hidden states of the teacher for the same tokens, in input's dtype. D_t may differ from D.
        teacher_weight: [V_rt, D_t] this rank's rows of the teacher's head, in input's dtype; or a DTensor sharded on dim 0.
        kind: "forward", "reverse", "jsd", "tv" or "lk".
        beta: Weight of the teacher in the mixture m, in (0, 1). Only "jsd" uses it. TRL's beta of 0 is "forward", 1 is
            "reverse".
        logit_scale: Factor of the student's logits before the softcap. It must not require a gradient.
        teacher_logit_scale: Factor of the teacher's logits before the softcap. It must not require a gradient.
        softcap: Positive bound of the student's logits, or None.
        teacher_softcap: Positive bound of the teacher's logits, or None.
        linear_bias: [V_r] bias of the student's rows, or a DTensor split like linear_weight.
        teacher_bias: [V_rt] bias of the teacher's rows, or a DTensor split like teacher_weight.
        mask: [...] bool, True for tokens that count, such as a response mask. None counts all tokens. Other tokens have
            divergence 0 and gradient 0, and their hidden states may hold anything. For token weights multiply the result of
            ``reduction="none"``.
        reduction: "none" ([...]), "sum", or "mean" over the tokens that count. If no token counts, the mean is 0.
        shard: Which rows of the vocabulary linear_weight holds, and the process group. None means all rows.
        teacher_shard: Which rows teacher_weight holds. None means shard. On each rank the rows of both heads must cover the
            same ids, apart from padding, which counts as logit -inf. For example, a student of 151,936 rows and a teacher of
            152,064 that share 151,936 ids need ``teacher_shard=VocabShard(0, 152064, 151936)``.
        teacher_ids: [V] int64 or int32, for a student whose vocabulary is a part of the teacher's, such as a draft model:
            the teacher's id of each of the student's V ids. Identical on every rank, no id twice. The teacher's softmax is then
            over these ids alone ("lk" is then -log of the acceptance rate for the renormalized teacher), and teacher_shard
            describes the teacher's own vocabulary (None: all rows on each rank). If the teacher is split, each rank must hold
            the teacher's rows of its own student ids: sort teacher_ids, and cut shard where teacher_shard is cut. Each call
            copies these rows, [V_r, D_t]; for a fixed teacher copy them once yourself and leave teacher_ids out. None means
            that both heads have the same ids.
        sequence_parallel: Whether input and teacher_input are this rank's slices of dim 0, in the order of group ranks. mask
            stays whole.
        workspace_bytes: As in ``linear_cross_entropy``, for hidden states, logits and exponentials of both heads.
        input_grad, reduce_dtype, backend, grad_weight_out: As in ``linear_cross_entropy``.

    Returns:
        The divergence in fp32: [...] for "none", else 0-d. Results are bitwise identical on every rank of the group and in
        every run. Equal heads give 0 ("lk": up to rounding) and a gradient of 0; nearly equal heads may give a value slightly
        below 0 by rounding. A KL divergence is +inf if one head has logit -inf where its definition needs a positive
        probability. "lk" is +inf, with a gradient of 0, if no id has a positive probability in both heads.

    Sharding:
        Hidden states and mask are replicated over the group (with sequence_parallel, hidden states are split on dim 0). Both
        weights and biases are split on dim 0 over one group. The result is replicated. dC and the bias gradient are split
        like the weight. dE is replicated, or split with sequence_parallel, or partial with ``input_grad="partial"``. Padding
        rows get gradient 0.

    Communication:
        Forward: one all-gather of 5 fp32 numbers per token. "jsd", "tv" and "lk" need one more, of 2, and on Triton the first
        one is made for each group of tokens. Backward: one all-reduce of dE in reduce_dtype, or a reduce-scatter with
        sequence_parallel, overlapped with dC as in ``linear_cross_entropy``.
        sequence_parallel all-gathers both heads' hidden states in forward and in backward. Weights are never sent.

    Cost:
        For heads of one size, 6 matrix products: forward computes the logits of both heads, backward computes them again, and
        dE and dC take one product each. If all logits are kept for backward, 4 products. "jsd", "tv" and "lk" read the logits
        twice in forward, in groups of tokens whose logits fit in workspace_bytes. On the torch backend, and where such groups
        would be too small, they compute the logits again: 2 products more.

    Raises:
        ValueError, TypeError: Shapes, dtypes, devices, options or shards do not fit. Raised before any kernel or collective.
        ValueError: teacher_ids has an id twice, or one whose row is on another rank (on a CPU, or with CCE_DIST_DEBUG=1; on a
            GPU the result is NaN instead). With a split teacher on CPUs, all ranks raise what one rank finds.
        IndexError: One of teacher_ids is outside the teacher's vocabulary. Checked in the same cases.
        RuntimeError: For double backward, forward-mode derivatives, torch.func and vmap; or if ranks disagree
            (with CCE_DIST_DEBUG=1).

    Source:
        On-Policy Distillation of Language Models (Agarwal et al., 2023) for the KL divergences; LK Losses: Direct Acceptance
        Rate Optimization for Speculative Decoding (Samarin et al., 2026) for "lk"; Online normalizer calculation for softmax
        (Milakov & Gimelshein) for the sums; Cut Your Losses (Wijmans et al.) for the backward.
    """
    options = _options(
        logit_scale=logit_scale,
        softcap=softcap,
        reduction=reduction,
        sequence_parallel=sequence_parallel,
        input_grad=input_grad,
        reduce_dtype=reduce_dtype,
        backend=backend,
        workspace_bytes=workspace_bytes,
    )
    checks.choice("kind", kind, KINDS)
    beta = _beta(beta)
    forced_backend, debug = environment()
    student, teacher = _heads(
        (input, linear_weight, linear_bias, shard),
        (teacher_input, teacher_weight, teacher_bias, teacher_shard),
        teacher_ids,
        debug,
    )
    mask = _mask(mask, student, sequence_parallel)
    if grad_weight_out is not None:
        checks.tensors({"grad_weight_out": grad_weight_out})
        check_buffer(grad_weight_out, student.weight)
        checks.apart(
            grad_weight_out, input=input, linear_weight=linear_weight, linear_bias=linear_bias,
            teacher_input=teacher_input, teacher_weight=teacher_weight, teacher_bias=teacher_bias,
        )  # fmt: skip
    teacher_options = _of_teacher(_options, logit_scale=teacher_logit_scale, softcap=teacher_softcap)
    (hidden, weight, head), (teacher_hidden, teacher_weight, teacher_head) = student.operands(), teacher.operands()
    spec = Divergence(
        logits_of(student.shard, options.logit_scale, options.softcap, head),
        logits_of(teacher.shard, teacher_options.logit_scale, teacher_options.softcap, teacher_head),
        kind,
        concrete(beta),
        options.workspace_bytes,
        torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in student[:3]),
    )
    call = DivergenceCall(
        spec,
        student.shard.vocab_size,
        layout_of(student.shard, options),
        choose_backend(options.backend, forced_backend, student.input.device.type, student.input.dtype),
    )
    debug_ranks.check_ranks(student.shard, debug)
    tensors = (
        hidden, weight, [*head.values()], mask.reshape(-1), teacher_hidden, teacher_weight, [*teacher_head.values()]
    )  # fmt: skip
    if not torch.compiler.is_compiling():
        call = decided(call, *tensors)
    both = options.logit_scale, options.softcap, teacher_options.logit_scale, teacher_options.softcap
    value = _OPERATOR.apply(*tensors, grad_weight_out, call=call, numbers=numbers_of(*both, beta))[0]
    if reduction == "none":
        return value.view(mask.shape)
    return value.sum() if reduction == "sum" else value.sum() / mask.sum().clamp(min=1)


def _options(logit_scale: float | Tensor, **others: Any) -> Options:
    if isinstance(logit_scale, Tensor) and logit_scale.requires_grad:
        raise TypeError("logit_scale gets no gradient: pass a number, or a tensor that does not require one")
    return checked(logit_scale=logit_scale, **others)


def _of_teacher(check: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call ``check`` with the teacher's arguments, and name these in its error messages."""
    try:
        return check(*arguments, **options)
    except (TypeError, ValueError) as error:
        message = re.sub(r"\b(linear_)?(input|weight|bias|shard|logit_scale|softcap)\b", r"teacher_\2", str(error))
        raise type(error)(message) from None


def _beta(value: Any) -> float:
    value = checks.number("beta", value)
    if not checks.SMALLEST <= value < 1.0:
        raise ValueError(
            f'beta must be in (0, 1), also in fp32, got {value}: its ends are kind="forward" and "reverse"'
        )
    return value


def _heads(student: Any, teacher: Any, teacher_ids: Any, debug: bool) -> tuple[LocalHead, LocalHead]:
    student = head_of(*student)
    input, weight, bias, shard = teacher
    if teacher_ids is None and shard is None and isinstance(weight, Tensor) and not isinstance(weight, DTensor):
        if weight.dim() == 2 and weight.shape[0] != student.shard.num_rows:
            raise ValueError(
                f"teacher_weight has {weight.shape[0]} rows, linear_weight {student.shard.num_rows}: pass teacher_shard "
                "to say which of the teacher's rows are part of the vocabulary"
            )
        shard = student.shard
    input, weight, bias, shard = _of_teacher(head_of, input, weight, bias, shard)
    teacher = LocalHead(input.detach(), weight.detach(), None if bias is None else bias.detach(), shard)
    if teacher.input.dtype != student.input.dtype:
        raise TypeError(
            f"input is {student.input.dtype}, teacher_input {teacher.input.dtype}: cast one, or use autocast"
        )
    if teacher.input.device != student.input.device:
        raise ValueError(f"input is on {student.input.device}, teacher_input on {teacher.input.device}")
    if teacher.input.shape[:-1] != student.input.shape[:-1]:
        raise ValueError(
            f"teacher_input must be [{', '.join(map(str, student.input.shape[:-1]))}, D_t] like input's tokens, "
            f"got {tuple(teacher.input.shape)}"
        )
    if teacher_ids is not None:
        teacher = _rows_of_ids(teacher, teacher_ids, student.shard, debug)
    _check_same_ids(student.shard, teacher.shard)
    return student, teacher


def _rows_of_ids(teacher: LocalHead, ids: Any, shard: VocabShard, debug: bool) -> LocalHead:
    """Copy the teacher's rows of the student's ids on this rank. ``shard`` is the student's."""
    checks.tensors({"teacher_ids": ids})
    if ids.dtype not in (torch.int64, torch.int32) or ids.shape != (shard.vocab_size,):
        raise ValueError(
            f"teacher_ids must be a plain tensor [{shard.vocab_size}], int64 or int32, one for each id of the student, got "
            f"{ids.dtype} {tuple(ids.shape)}"
        )
    if ids.device != teacher.weight.device:
        raise ValueError(f"teacher_weight is on {teacher.weight.device}, teacher_ids on {ids.device}")
    own, stop = teacher.shard, shard.start + shard.num_valid
    group = shard.group if own.group is None else own.group
    ids = ids.long()
    known = (ids >= 0) & (ids < own.vocab_size)
    # If an id is listed twice, only its last place is valid.
    slots = torch.where(known, ids, own.vocab_size)
    places = torch.arange(len(ids), device=ids.device)
    last = places.new_zeros(own.vocab_size + 1).scatter_reduce_(0, slots, places, "amax")
    rows = ids - own.start
    mine = (places >= shard.start) & (places < stop)
    good = known & (last[slots] == places) & (~mine | ((rows >= 0) & (rows < own.num_valid)))
    if checks.has_values(ids) and (debug or not ids.is_cuda):  # reading waits for a GPU
        error = None if good.all() else _wrong_id(ids, int((~good).nonzero()[0]), own)
        # A row may be missing on this rank alone. With CCE_DIST_DEBUG=1 the other ranks learn of it elsewhere.
        if own.group is not None and not debug:
            merge.assert_ranks_agree("linear_kl_divergence", {}, (0, 0), own.group, 0, error)
        if error is not None:
            raise error
    good, rows = good[shard.start : stop], rows[shard.start : stop]
    rows = torch.where(good, rows, 0)
    weight, bias = teacher.weight, teacher.bias
    if not len(weight):  # so that row 0 can be read
        weight = weight.new_zeros(1, weight.shape[1])
        bias = None if bias is None else bias.new_zeros(1)
    weight = weight[rows].masked_fill_(~good[:, None], torch.nan)
    bias = None if bias is None else bias[rows]
    return LocalHead(teacher.input, weight, bias, VocabShard(shard.start, stop, shard.vocab_size, group))


def _wrong_id(ids: Tensor, place: int, own: VocabShard) -> Exception:
    found = f"teacher_ids[{place}] is {int(ids[place])}"
    if not 0 <= ids[place] < own.vocab_size:
        return IndexError(f"{found}: not in [0, {own.vocab_size}), the teacher's vocabulary")
    if (ids == ids[place]).sum() > 1:
        return ValueError(
            f"{found}, which is there twice: pass a different id of the teacher for each id of the student"
        )
    return ValueError(
        f"{found}, a row of another rank, this one has the teacher's rows [{own.start}, {own.stop}): sort teacher_ids and "
        "cut shard where teacher_shard is cut, or have the whole teacher_weight on each rank"
    )


def _check_same_ids(shard: VocabShard, teacher: VocabShard) -> None:
    if shard.vocab_size != teacher.vocab_size:
        raise ValueError(
            f"shard has a vocabulary of {shard.vocab_size} ids, teacher_shard a vocabulary of {teacher.vocab_size}"
        )
    if shard.group_name != teacher.group_name:
        raise ValueError("teacher_shard and shard have different process groups: split both heads over the same ranks")
    ids, teachers = ((x.start, x.start + x.num_valid) if x.num_valid else (0, 0) for x in (shard, teacher))
    if ids != teachers:
        raise ValueError(
            f"teacher_shard covers ids [{teachers[0]}, {teachers[1]}) on this rank, shard [{ids[0]}, {ids[1]}): "
            "both heads' rows must cover the same ids"
        )


def _mask(mask: Tensor | None, student: LocalHead, sequence_parallel: bool) -> Tensor:
    tokens = shape_of_tokens(student, sequence_parallel)
    if mask is None:
        return torch.ones(tokens, dtype=torch.bool, device=student.input.device)
    checks.tensors({"mask": mask})
    if mask.dtype != torch.bool:
        raise TypeError(
            f'mask must be bool, the tokens that count, got {mask.dtype}; weights multiply what reduction="none" returns'
        )
    check_shape("mask", mask, tokens, f"{tokens}", student, sequence_parallel)
    if mask.device != student.input.device:
        raise ValueError(f"input is on {student.input.device}, mask on {mask.device}")
    return mask


class DivergenceCall(NamedTuple):
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
    if call.backend == "torch":
        return dense_heads
    from cce_dist.kernels.divergence import kernels as divergence

    return divergence


def _run_forward(*given: Any) -> tuple[Tensor, list[Tensor]]:
    """Return per-token divergences, [N] fp32, 0 for tokens that do not count; and a list of what backward needs."""
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
    student = ranks.whole(hidden), weight, head
    ids = torch.where(mask, 0, IGNORED)
    return _operands(student, (ranks.whole(teacher_hidden), teacher_weight, teacher_head), ids, call.spec)


def _operands(student: tuple[Any, ...], teacher: tuple[Any, ...], ids: Tensor, spec: Divergence) -> Heads:
    of_heads = zip((student, teacher), (spec.student, spec.teacher), strict=True)
    return Heads(
        *(Operands.of(hidden, weight, ids, logits, **logits.named(head)) for (hidden, weight, head), logits in of_heads)
    )


def _run_backward(d_values: list[Tensor | None], *given: Any) -> Gradients:
    """Return the student's d_hidden, d_weight and d_bias; None if not wanted, or added to ``grad_weight_out``."""
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
    """Return the call with a way and its memory budget, unless it has a way."""
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
    x = _operands((whole, weight, head), (whole_teacher, teacher_weight, teacher_head), ids, call.spec)
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
