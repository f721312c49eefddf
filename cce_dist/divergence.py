"""linear_kl_divergence: KL and Jensen-Shannon divergence of two heads from hidden states, without the logits of either."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cce_dist import agree, checks, divergence_op, merge
from cce_dist.call import Layout, Options, checked
from cce_dist.divergence_op import PUBLIC_NAME, DivergenceCall
from cce_dist.kernels import ShardLogits
from cce_dist.kernels.divergence.heads import KINDS, Divergence
from cce_dist.operands import NAMES, Names, check_buffer, check_head, choose_backend, environment, shape_of_tokens
from cce_dist.shard import VocabShard, local_rows


def linear_kl_divergence(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    *,
    kind: str = "forward",
    beta: float = 0.5,
    logit_scale: float | Tensor = 1.0,
    teacher_logit_scale: float | Tensor = 1.0,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    mask: Tensor | None = None,
    reduction: str = "none",
    shard: VocabShard | None = None,
    teacher_shard: VocabShard | None = None,
    sequence_parallel: bool = False,
    input_grad: str = "summed",
    reduce_dtype: torch.dtype | None = None,
    backend: str = "auto",
    workspace_bytes: int | None = None,
    grad_weight_out: Tensor | None = None,
) -> Tensor:
    """Divergence of a student's head from a teacher's over the whole vocabulary, from hidden states, without any logits.

    Each head's logits are those of ``linear_cross_entropy``: ``softcap * tanh(u / softcap)`` with
    ``u = logit_scale * (input @ linear_weight.T + linear_bias)``. With t the teacher's softmax, p the student's, and
    ``m = beta * t + (1 - beta) * p``, the divergence of a token is, in nats,

        "forward"   KL(t || p): the student covers what the teacher says
        "reverse"   KL(p || t): the student says nothing that the teacher would not
        "jsd"       beta * KL(t || m) + (1 - beta) * KL(p || m), as generalized knowledge distillation (GKD) and TRL define it

    The teacher gets no gradient: teacher tensors that require one are taken as detached. A temperature tau is
    ``logit_scale=1 / tau, teacher_logit_scale=1 / tau``; the factor tau**2 that some put before the loss is the caller's.

    Args:
        input: [..., D] the student's hidden states, fp32, bf16 or fp16 (under autocast: cast as ``F.linear`` would).
        linear_weight: [V_r, D] this rank's rows of the student's head, input's dtype; or a DTensor sharded on dim 0.
        teacher_input: [..., D_t] the teacher's hidden states of the same tokens, input's dtype; D_t need not be D.
        teacher_weight: [V_rt, D_t] this rank's rows of the teacher's head, input's dtype; or a DTensor sharded on dim 0.
        kind: "forward", "reverse" or "jsd".
        beta: The teacher's part of the mixture, in (0, 1); for "jsd" alone. TRL's beta of 0 is "forward", of 1 is "reverse".
        logit_scale: Multiplies the student's logits. It has no gradient here.
        teacher_logit_scale: Multiplies the teacher's.
        softcap: Positive bound of the student's logits, or None.
        teacher_softcap: Likewise of the teacher's.
        linear_bias: [V_r] bias of the student's rows, or a DTensor split as linear_weight is.
        teacher_bias: [V_rt] bias of the teacher's rows, likewise.
        mask: [...] bool: the tokens that count (a response mask). None: all. Others have divergence 0 and gradient 0, and their
            hidden states may hold anything. Weights of tokens are no mask: multiply what reduction="none" returns.
        reduction: "none" ([...]), "sum", or "mean" over the tokens that count. If none does, the mean is 0.
        shard: Which rows of the vocabulary ``linear_weight`` is; None means all of them.
        teacher_shard: Which rows ``teacher_weight`` is; None means the ids of shard. The rows that are part of the vocabulary
            cover the same ids in both heads, on each rank; padding behind them may differ. It counts as logit -inf, never 0.
            So heads of 151,936 and 152,064 rows that share 151,936 ids are told apart by
            ``teacher_shard=VocabShard(0, 152064, 151936)``.
        sequence_parallel: input and teacher_input are this rank's slices of dim 0 (slices in group-rank order), mask is whole.
        input_grad: "summed" over the group, or "partial": this shard's part, for a framework that sums it itself.
        reduce_dtype: What dE is summed over the group in; None for input's dtype.
        backend: "triton", "torch", or "auto": Triton on a GPU, else torch. The environment variable CCE_DIST_BACKEND
            overrides "auto".
        workspace_bytes: Bound of the temporary memory for hidden states and logits, and of what forward may keep for backward;
            the same on every rank of a group. None: as much as it takes to keep both heads' exponentials, but at most 2 GiB and
            at least 256 MiB; 256 MiB where none can be kept (fp32, fp16, no gradient, the torch backend).
        grad_weight_out: [V_r, D] contiguous buffer, fp32 or linear_weight's dtype, that backward adds dC into; linear_weight
            itself then gets no gradient.

    Returns:
        The divergence, fp32: [...] for "none", else 0-d. The same bits on every rank of the group, and in every run. It is
        0 for equal heads, and its rounding may be below 0 for nearly equal ones. +inf where one head rules out (logit -inf)
        what the other allows, as the definition has it.

    Sharding:
        Hidden states and mask are replicated over the group (or, with sequence_parallel, the hidden states split on dim 0);
        both weights and biases are split on dim 0, over the same group. The result is replicated; dC and dbias stay with their
        rows; dE is replicated (or its slice), or partial with ``input_grad="partial"``. Padding rows get gradient exactly 0.

    Communication:
        Forward: one all-gather of 5 fp32 numbers per token; for "jsd" one more, of 2. (One would do for the value, and backward
        needs KL(p || m) by itself.) Backward: one all-reduce of dE in reduce_dtype, or a reduce-scatter with
        sequence_parallel, behind the last of dC, as in ``linear_cross_entropy``. Sequence parallelism all-gathers both heads'
        hidden states in forward and in backward. The teacher's weight never travels.

    Cost:
        Forward computes each head's logits once ("jsd": twice), backward once more, and two products give dE and dC: 6 products
        for heads of one size ("jsd": 8). Columns whose exponentials are kept are not computed again in backward: with all of
        them there are 4 products ("jsd": 6).

    Raises:
        ValueError, TypeError: Shapes, dtypes, devices, options or shards do not fit; before any kernel or collective.
        RuntimeError: Double backward, forward mode, torch.func, vmap; ranks that disagree (CCE_DIST_DEBUG=1).

    Source:
        On-Policy Distillation of Language Models (Agarwal et al., 2023) for the divergences; Online normalizer calculation for
        softmax (Milakov & Gimelshein) for the sums; Cut Your Losses (Wijmans et al.) for the backward.
    """
    options = checked(
        Options,
        logit_scale=_without_gradient("logit_scale", logit_scale),
        softcap=softcap,
        reduction=reduction,
        sequence_parallel=sequence_parallel,
        input_grad=input_grad,
        reduce_dtype=reduce_dtype,
        backend=backend,
        workspace_bytes=workspace_bytes,
    )
    kind, beta = checks.choice("kind", kind, KINDS), _beta(beta)
    student, teacher = _heads(
        Head(NAMES, input, linear_weight, linear_bias, NOT_YET),
        Head(TEACHER_NAMES, teacher_input, teacher_weight, teacher_bias, NOT_YET),
        shard,
        teacher_shard,
    )
    mask = _mask(mask, student, options)
    if grad_weight_out is not None:
        checks.tensors(grad_weight_out=grad_weight_out)
        check_buffer(grad_weight_out, student.weight)
    forced_backend, debug = environment()
    spec = Divergence(
        student.logits(options.logit_scale, options.softcap),
        teacher.logits(*_teacher_options(teacher_logit_scale, teacher_softcap)),
        kind,
        beta,
        options.workspace_bytes,
        torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in student[1:4]),
    )
    call = DivergenceCall(
        spec,
        student.shard.vocab_size,
        Layout.of(student.shard, options),
        choose_backend(options.backend, forced_backend, student.input),
    )
    if debug and student.shard.group is not None and not torch.compiler.is_compiling():
        _check_ranks(student, teacher, mask, options, call)
    value = divergence_op.forward(
        *student.operands(), mask.reshape(-1), *teacher.operands(), grad_weight_out, call=call
    )
    if reduction == "none":
        return value.view(mask.shape)
    return value.sum() if reduction == "sum" else value.sum() / mask.sum().clamp(min=1)


# A default of Head would do, but torch 2.11 compiles no default that is an object.
NOT_YET = VocabShard(0, 1, 1)
TEACHER_NAMES = Names("teacher_input", "teacher_weight", "teacher_bias", "teacher_shard")


class Head(NamedTuple):
    """The arguments of one head, under their public names in ``names``."""

    names: Names
    input: Tensor
    weight: Tensor
    bias: Tensor | None
    shard: VocabShard

    def logits(self, logit_scale: float, softcap: float | None) -> ShardLogits:
        return ShardLogits(self.shard.start, self.shard.num_valid, logit_scale, softcap or 0.0)

    def operands(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Hidden states [N, D], weight and bias: kernels take addresses, not strides, so all are made contiguous here."""
        hidden = self.input.reshape(-1, self.input.shape[-1]).contiguous()
        return hidden, self.weight.contiguous(), None if self.bias is None else self.bias.contiguous()


def _without_gradient(name: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.requires_grad:
        raise TypeError(f"{name} has no gradient here: pass a number, or a tensor that requires none")
    return value


def _beta(value: Any) -> float:
    value = checks.number("beta", value)
    if not 0.0 < value < 1.0:
        raise ValueError(f'beta must be in (0, 1), got {value}: its ends are kind="forward" and kind="reverse"')
    return value


def _teacher_options(logit_scale: Any, softcap: Any) -> tuple[float, float | None]:
    """Check the teacher's options as the student's are, under their own names."""
    try:
        options = checked(Options, logit_scale=_without_gradient("logit_scale", logit_scale), softcap=softcap)
    except (TypeError, ValueError) as error:
        raise type(error)(f"teacher_{error}") from None
    return options.logit_scale, options.softcap


def _heads(
    student: Head, teacher: Head, shard: VocabShard | None, teacher_shard: VocabShard | None
) -> tuple[Head, Head]:
    """Check both heads, and return them with their local rows and shards; the teacher's tensors are detached."""
    for head in (student, teacher):
        given = {head.names.input: head.input, head.names.weight: head.weight}
        checks.tensors(**given, **({} if head.bias is None else {head.names.bias: head.bias}))
    student = _local(student, shard)
    if teacher_shard is None and not isinstance(teacher.weight, DTensor):
        if teacher.weight.dim() == 2 and teacher.weight.shape[0] != student.shard.num_rows:
            raise ValueError(
                f"teacher_weight has {teacher.weight.shape[0]} rows, linear_weight {student.shard.num_rows}: teacher_shard "
                "says which of the teacher's are part of the vocabulary"
            )
        teacher_shard = student.shard
    bias = None if teacher.bias is None else teacher.bias.detach()
    teacher = teacher._replace(input=teacher.input.detach(), weight=teacher.weight.detach(), bias=bias)
    teacher = _local(teacher, teacher_shard)
    if torch.is_autocast_enabled(student.input.device.type):
        dtype = torch.get_autocast_dtype(student.input.device.type)
        student, teacher = (h._replace(input=h.input.to(dtype), weight=h.weight.to(dtype)) for h in (student, teacher))
    for head in (student, teacher):
        check_head(head.input, head.weight, head.bias, head.names)
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
    _check_same_ids(student.shard, teacher.shard)
    return student, teacher


def _local(head: Head, shard: VocabShard | None) -> Head:
    """The head with its local rows; says what is wrong under the head's names."""
    try:
        weight, bias, shard = local_rows(head.weight, head.bias, shard)
        shard.check(weight, bias)
    except (TypeError, ValueError) as error:
        if head.names is NAMES:
            raise
        raise type(error)(_of_teacher(str(error))) from None
    return head._replace(weight=weight, bias=bias, shard=shard)


def _of_teacher(message: str) -> str:
    """A message about a student's head, with the names of the teacher's arguments."""
    for name, teachers in zip(NAMES[1:], TEACHER_NAMES[1:], strict=True):
        message = message.replace(f"{name} ", f"{teachers} ")
    return message


def _check_same_ids(shard: VocabShard, teacher: VocabShard) -> None:
    """Raise ValueError unless the rows that are part of the vocabulary cover the same ids, in the same group."""
    if shard.vocab_size != teacher.vocab_size:
        raise ValueError(
            f"shard is of a vocabulary of {shard.vocab_size} ids, teacher_shard of one of {teacher.vocab_size}"
        )
    if shard.group_name != teacher.group_name:
        raise ValueError("teacher_shard is not of shard's process group: both heads are split over the same ranks")
    ids, teachers = ((x.start, x.start + x.num_valid) if x.num_valid else (0, 0) for x in (shard, teacher))
    if ids != teachers:
        raise ValueError(
            f"teacher_shard covers ids [{teachers[0]}, {teachers[1]}) on this rank, shard [{ids[0]}, {ids[1]}): "
            "both heads' rows must cover the same ids"
        )


def _mask(mask: Tensor | None, student: Head, options: Options) -> Tensor:
    """Check the mask, or make the one that counts every token. -> the whole's shape, bool."""
    expected = shape_of_tokens(student.input, student.shard, options.sequence_parallel)
    if mask is None:
        return torch.ones(expected, dtype=torch.bool, device=student.input.device)
    checks.tensors(mask=mask)
    if mask.dtype != torch.bool:
        raise TypeError(
            f'mask must be bool, the tokens that count, got {mask.dtype}; weights multiply what reduction="none" returns'
        )
    if tuple(mask.shape) != expected:
        whole = f" ({student.shard.group_size} slices of dim 0)" if options.sequence_parallel else ""
        raise ValueError(
            f"mask must be {expected} for input {tuple(student.input.shape)}{whole}, got {tuple(mask.shape)}"
        )
    if mask.device != student.input.device:
        raise ValueError(f"input is on {student.input.device}, mask on {mask.device}")
    return mask


def _check_ranks(student: Head, teacher: Head, mask: Tensor, options: Options, call: DivergenceCall) -> None:
    """Raise RuntimeError on every rank if the ranks were called differently, or if shards leave a gap."""
    shard = student.shard
    assert shard.group is not None
    facts: dict[str, Any] = {}
    for head in (student, teacher):
        facts |= {head.names.input: (tuple(head.input.shape), str(head.input.dtype))}
        facts |= {
            head.names.weight: (head.weight.shape[1], str(head.weight.dtype)),
            head.names.bias: head.bias is not None,
        }
    facts |= {"input (needs a gradient)": torch.is_grad_enabled() and student.input.requires_grad}
    facts |= {"vocab_size": shard.vocab_size} | options._asdict()
    facts |= {"kind": call.spec.kind, "beta": call.spec.beta, "backend": call.backend}
    facts |= {"teacher_logit_scale": call.spec.teacher.logit_scale, "teacher_softcap": call.spec.teacher.softcap}
    facts |= {"mask": agree.digest(mask)}
    merge.assert_ranks_agree(PUBLIC_NAME, facts, (shard.start, shard.stop), shard.group, shard.vocab_size)
