"""topk_kl_divergence: KL divergence on K ids per token, computed from the results of ``linear_log_probs``."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from cce_dist import checks, debug_ranks
from cce_dist.call import DTYPES, Backend, InputGrad, Reduction
from cce_dist.log_probs import linear_log_probs
from cce_dist.operands import environment
from cce_dist.shard import VocabShard

KINDS = ("forward", "reverse")
OUTSIDE = ("renormalise", "tail", "drop")
MIN_TAIL = 2.0**-24  # smallest nonzero 1 - sum of probabilities in fp32


@debug_ranks.errors_reach_all_ranks
def topk_kl_divergence(
    input: Tensor,
    linear_weight: Tensor,
    teacher_ids: Tensor,
    teacher_log_probs: Tensor,
    *,
    kind: Literal["forward", "reverse"] = "forward",
    outside: Literal["renormalise", "tail", "drop"] = "renormalise",
    linear_bias: Tensor | None = None,
    ignore_index: int | None = -100,
    logit_scale: float | Tensor = 1.0,
    softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    reduction: Reduction = "none",
    shard: VocabShard | None = None,
    sequence_parallel: bool = False,
    input_grad: InputGrad = "summed",
    reduce_dtype: torch.dtype | None = None,
    backend: Backend = "auto",
    workspace_bytes: int | None = None,
    grad_weight_out: Tensor | None = None,
) -> Tensor:
    """Compute the KL divergence between a teacher and a student's head on K ids per token, without holding the logits.

    The K ids of a token are a set S that you choose. For the forward KL to an offline teacher, take the teacher's K most likely
    ids. For the reverse KL of on-policy distillation, take the student's K most likely ids from
    ``linear_log_probs(..., top_k=K)`` under ``torch.no_grad()``, and ask the teacher for their log-probabilities. With t_k and
    p_k the teacher's and the student's probabilities over the whole vocabulary, ``outside`` says how ids outside S count:

        "renormalise"   the KL of t'_k = t_k / sum_S t and p'_k = p_k / sum_S p
        "tail"          the KL of K + 1 outcomes; the additional one is t_0 = 1 - sum_S t and p_0 = 1 - sum_S p
        "drop"          the sum over S of the KL's terms; not a divergence, it may be below 0

    The gradient with respect to the student's log p_k is

        ================  ==========================  ================================================
        outside           forward, KL(t || p)         reverse, KL(p || t)
        ================  ==========================  ================================================
        "renormalise"     p'_k - t'_k                 p'_k (log p'_k - log t'_k - KL)
        "tail"            t_0 p_k / p_0 - t_k         p_k (log p_k - log t_k - log p_0 + log t_0)
        "drop"            - t_k                       p_k (log p_k - log t_k + 1)
        ================  ==========================  ================================================

    NeMo-RL's ``zero_outside_topk=False`` and ModelOpt's top-k loss are "renormalise". verl's ``forward_kl_topk``, without its
    clamps, is "drop" with "forward".

    Args:
        input: [..., D] hidden states of the student in fp32, bf16 or fp16.
        linear_weight: [V_r, D] this rank's rows of the student's head, in input's dtype; or a DTensor sharded on dim 0.
        teacher_ids: [..., K] int64 or int32 ids in the whole vocabulary, K > 0. Identical on every rank of the group. No id
            twice for a token.
        teacher_log_probs: [..., K] log-probabilities of teacher_ids, in nats, over the teacher's whole vocabulary and at the
            teacher's own temperature, in a floating-point dtype. They may have been rounded to 16 bits, and are detached. -inf
            stands for a probability of 0.
        kind: "forward", KL(t || p), or "reverse", KL(p || t).
        outside: "renormalise", "tail" or "drop".
        linear_bias, logit_scale, softcap, temperature: The student's, as in ``linear_log_probs``.
        ignore_index: Entries of teacher_ids with this value are not in S; use it to pad tokens with fewer than K ids. A token
            with an empty S does not count. None means -100.
        mask: [...] bool, True for tokens that count. None counts all tokens with an id. Other tokens have divergence 0 and
            gradient 0.
        reduction: "none" ([...]), "sum", or "mean" over the tokens that count. If no token counts, the mean is 0.
        shard, sequence_parallel, input_grad, reduce_dtype, backend, workspace_bytes, grad_weight_out: As in
            ``linear_log_probs``. With sequence_parallel, teacher_ids, teacher_log_probs and mask stay whole.

    Returns:
        The divergence in nats and fp32: [...] for "none", else 0-d. Results are bitwise identical on every rank of the group
        and in every run. A tail is a difference to 1 in fp32: its error is about 2**-24. It is at least 2**-24, and at this
        minimum it has no gradient.

    Sharding, Communication:
        As in ``linear_log_probs`` with K ids.

    Raises:
        ValueError, TypeError: Shapes, dtypes, devices, options or shard do not fit. Raised before any kernel or collective.
        ValueError: A token has a log-probability above 0, probabilities that sum to more than 1, or an id twice (on a CPU, or
            with CCE_DIST_DEBUG=1; on a GPU the token's divergence is NaN instead).
        IndexError: An id is outside the vocabulary, as in ``linear_log_probs``. The message calls teacher_ids ``ids``.
        RuntimeError: For double backward, forward-mode derivatives, torch.func and vmap; or if ranks disagree
            (with CCE_DIST_DEBUG=1).
    """
    checks.choice("kind", kind, KINDS)
    checks.choice("outside", outside, OUTSIDE)
    checks.choice("reduction", reduction, ("none", "mean", "sum"))
    _check(input, teacher_ids, teacher_log_probs, mask)
    ignored = -100 if ignore_index is None else checks.integer("ignore_index", ignore_index)
    if mask is not None:
        teacher_ids = teacher_ids.long().masked_fill(~mask.unsqueeze(-1), ignored)
    in_set, log_t = teacher_ids != ignored, teacher_log_probs.detach()
    counts = in_set.any(-1)
    impossible = _impossible_tokens(teacher_ids, log_t, in_set)
    log_p = linear_log_probs(
        input, linear_weight, teacher_ids, linear_bias=linear_bias, ignore_index=ignored, logit_scale=logit_scale,
        softcap=softcap, temperature=temperature, shard=shard, sequence_parallel=sequence_parallel, input_grad=input_grad,
        reduce_dtype=reduce_dtype, backend=backend, workspace_bytes=workspace_bytes, grad_weight_out=grad_weight_out,
    ).log_probs  # fmt: skip
    student, teacher = (_outcomes(log_q, in_set, outside) for log_q in (log_p, log_t.float()))
    value = torch.where(counts, _kl(teacher, student) if kind == "forward" else _kl(student, teacher), 0.0)
    value = value.masked_fill(impossible, torch.nan)
    if reduction == "none":
        return value
    return value.sum() if reduction == "sum" else value.sum() / counts.sum().clamp(min=1)


def _check(input: Tensor, ids: Tensor, log_probs: Tensor, mask: Tensor | None) -> None:
    given = {"input": input, "teacher_ids": ids, "teacher_log_probs": log_probs}
    checks.tensors(given, mask=mask)
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"teacher_ids must be int64 or int32 ids, got {ids.dtype}")
    if ids.dim() != max(1, input.dim()) or ids.shape[-1] == 0:
        raise ValueError(
            f"teacher_ids must be [..., K] with K > 0 for input {tuple(input.shape)}, got {tuple(ids.shape)}"
        )
    if log_probs.dtype not in (*DTYPES, torch.float64):
        raise TypeError(f"teacher_log_probs must be of a floating-point dtype, got {log_probs.dtype}")
    if log_probs.shape != ids.shape:
        raise ValueError(f"teacher_log_probs must be {tuple(ids.shape)} like teacher_ids, got {tuple(log_probs.shape)}")
    if log_probs.device != ids.device:
        raise ValueError(f"teacher_ids is on {ids.device}, teacher_log_probs on {log_probs.device}")
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool, the tokens that count, got {mask.dtype}")
    if mask is not None and mask.shape != ids.shape[:-1]:
        raise ValueError(f"mask must be {tuple(ids.shape[:-1])} like teacher_ids's tokens, got {tuple(mask.shape)}")


def _impossible_tokens(ids: Tensor, log_t: Tensor, in_set: Tensor) -> Tensor:
    """Return a mask of the tokens whose log-probabilities or ids cannot come from a softmax, [...] bool.

    On a CPU, or with CCE_DIST_DEBUG=1, raise ValueError for such a token.
    """
    slack = max(1e-3, 4 * torch.finfo(log_t.dtype).eps)  # rounding of the teacher's softmax in its own dtype
    log_t = torch.where(in_set, log_t.double(), -torch.inf)
    # Log-probabilities of any dtype may have been rounded to bf16 before. This is the smallest sum that they can stand for.
    least_sum = torch.pow(math.exp(1 + torch.finfo(torch.bfloat16).eps / 2), log_t).sum(-1)
    apart = -1 - torch.arange(ids.shape[-1], device=ids.device)
    in_order = torch.where(in_set, ids.long(), apart).sort(-1).values
    found = {
        "teacher_log_probs has a log-probability above 0": (log_t > slack).any(-1),
        "teacher_log_probs has probabilities whose sum is above 1": least_sum > 1 + slack,
        "teacher_ids has an id twice": (in_order[..., 1:] == in_order[..., :-1]).any(-1),
    }
    if checks.has_values(ids) and (environment()[1] or not ids.is_cuda):
        for what, tokens in found.items():
            if tokens.any():
                raise ValueError(f"{what} at token {int(tokens.flatten().nonzero()[0])} (flattened)")
    return torch.stack(list(found.values())).any(0)


def _outcomes(log_q: Tensor, in_set: Tensor, outside: str) -> Tensor:
    """Return log-probabilities of the compared outcomes, [..., K], or [..., K + 1] with a tail; -inf outside the set."""
    log_q = torch.where(in_set, log_q, -torch.inf)
    if outside == "drop":
        return log_q
    # A token with an empty set has log_sum -inf, and -inf - (-inf) would be NaN.
    log_sum = log_q.logsumexp(-1, keepdim=True).masked_fill(~in_set.any(-1, keepdim=True), 0.0)
    if outside == "renormalise":
        return log_q - log_sum
    tail = -torch.expm1(log_sum.clamp(max=-MIN_TAIL))
    return torch.cat((log_q, tail.log()), -1)


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Sum a * (log a - log b) over the last dimension. Terms with a = 0 add nothing to the sum and to its gradient."""
    nonzero = log_a.exp() != 0  # True for NaN, which stays in the sum
    log_a, log_b = torch.where(nonzero, log_a, 0.0), torch.where(nonzero, log_b, 0.0)
    return (torch.where(nonzero, log_a.exp(), 0.0) * (log_a - log_b)).sum(-1)
