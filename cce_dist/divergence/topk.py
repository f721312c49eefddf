"""topk_kl_divergence: KL from a teacher of whom some log-probabilities a token are known; algebra on ``linear_log_probs``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cce_dist import agree, checks
from cce_dist.call import DTYPES
from cce_dist.log_probs import linear_log_probs
from cce_dist.operands import environment
from cce_dist.shard import VocabShard

KINDS = ("forward", "reverse")
OUTSIDE = ("renormalise", "tail", "drop")
LEAST_TAIL = 2.0**-24  # smallest probability outside the set that 1 - sum can show in fp32


@agree.errors_reach_all_ranks
def topk_kl_divergence(
    input: Tensor,
    linear_weight: Tensor,
    teacher_ids: Tensor,
    teacher_log_probs: Tensor,
    *,
    kind: str = "forward",
    outside: str = "renormalise",
    linear_bias: Tensor | None = None,
    ignore_index: int | None = -100,
    logit_scale: float | Tensor = 1.0,
    softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    reduction: str = "none",
    shard: VocabShard | None = None,
    sequence_parallel: bool = False,
    input_grad: str = "summed",
    reduce_dtype: torch.dtype | None = None,
    backend: str = "auto",
    workspace_bytes: int | None = None,
    grad_weight_out: Tensor | None = None,
) -> Tensor:
    """KL between a teacher and a student's head on K ids of each token, from hidden states, without the logits.

    The ids are a set S that somebody chose: the teacher's K most likely ids, for the forward KL of an offline teacher; or the
    student's, for the reverse KL of on-policy distillation, from ``linear_log_probs(..., top_k=K)`` without gradient, at which
    the teacher is then asked. With t_k and p_k the probabilities of the ids, both over the whole vocabulary, ``outside`` says
    what becomes of the rest, in nats:

        "renormalise"   t'_k = t_k / sum_S t and p'_k = p_k / sum_S p; the KL of t' and p'
        "tail"          the rest is one more outcome, t_0 = 1 - sum_S t and p_0 = 1 - sum_S p; the KL of K + 1 outcomes
        "drop"          the sum over S alone, of t_k and p_k as they are: no divergence, it may be below 0

    and the gradient of the student's log p_k, from which the head's gradients follow, is

        ================  ==========================  ================================================
        outside           forward, KL(t || p)         reverse, KL(p || t)
        ================  ==========================  ================================================
        "renormalise"     p'_k - t'_k                 p'_k (log p'_k - log t'_k - KL)
        "tail"            t_0 p_k / p_0 - t_k         p_k (log p_k - log t_k - log p_0 + log t_0)
        "drop"            - t_k                       p_k (log p_k - log t_k + 1)
        ================  ==========================  ================================================

    NeMo-RL's ``zero_outside_topk=False`` and ModelOpt's top-k loss are "renormalise". verl's ``forward_kl_topk`` is "drop" with
    "forward", before its clamps.

    Args:
        input: [..., D] hidden states, as in ``linear_log_probs``.
        linear_weight: [V_r, D] this rank's rows of the head weight.
        teacher_ids: [..., K] int64 or int32 ids in the whole vocabulary; the same on every rank of the group. An id stands in a
            token's row once.
        teacher_log_probs: [..., K] the teacher's log-probabilities of them, of its softmax over the whole vocabulary at the
            teacher's own temperature; a floating-point dtype. They may have been rounded to 16 bits. They have no gradient:
            taken as detached. -inf is a t_k of 0.
        kind: "forward", KL(t || p), or "reverse", KL(p || t).
        outside: "renormalise", "tail" or "drop".
        linear_bias, logit_scale, softcap, temperature: Of the student's logits, as in ``linear_log_probs``.
        ignore_index: Entries of teacher_ids with this value are not in S: rows of fewer than K ids. A token without any does
            not count. None means -100.
        mask: [...] bool: the tokens that count. None: all that have an id. Others have divergence 0 and gradient 0.
        reduction: "none" ([...]), "sum", or "mean" over the tokens that count. If none does, the mean is 0.
        shard, sequence_parallel, input_grad, reduce_dtype, backend, workspace_bytes, grad_weight_out: As in
            ``linear_log_probs``. With sequence_parallel teacher_ids, teacher_log_probs and mask are whole.

    Returns:
        The divergence, fp32: [...] for "none", else 0-d. The same bits on every rank of the group, and in every run. Where S
        holds nearly all of a softmax, a tail is a difference to 1 in fp32: at least 2**-24, and as coarse; a tail at that floor
        has no gradient.

    Sharding, Communication:
        As in ``linear_log_probs``, with K ids.

    Raises:
        ValueError, TypeError: Shapes, dtypes, devices, options or shard do not fit; before any kernel or collective. A token
            has a log-probability above 0, probabilities whose sum is above 1, or an id twice (CPU, or CCE_DIST_DEBUG=1; on
            a GPU that token's divergence is NaN instead).
        IndexError: An id outside the vocabulary, as in ``linear_log_probs``, which calls it ``ids``.
        RuntimeError: Double backward, forward mode, torch.func, vmap; ranks that disagree (CCE_DIST_DEBUG=1).
    """
    checks.choice("kind", kind, KINDS)
    checks.choice("outside", outside, OUTSIDE)
    checks.choice("reduction", reduction, ("none", "mean", "sum"))
    _check(input, teacher_ids, teacher_log_probs, mask)
    ignored = -100 if ignore_index is None else checks.integer("ignore_index", ignore_index)
    if mask is not None:
        teacher_ids = teacher_ids.masked_fill(~mask.unsqueeze(-1), ignored)
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
    """Return which tokens have ids and log-probabilities that no softmax can have, [...] bool.

    Raises:
        ValueError: There is such a token, and reading it does not wait for a GPU (or CCE_DIST_DEBUG=1).
    """
    slack = max(1e-3, 4 * torch.finfo(log_t.dtype).eps)  # a softmax is not exact in the dtype that it is computed in
    log_t = torch.where(in_set, log_t.double(), -torch.inf)
    # The least sum before log-probabilities were rounded to bf16, from which they may have come to another dtype.
    least_sum = torch.pow(math.exp(1 + torch.finfo(torch.bfloat16).eps / 2), log_t).sum(-1)
    apart = -1 - torch.arange(ids.shape[-1], device=ids.device)
    in_order = torch.where(in_set, ids.long(), apart).sort(-1).values
    found = {
        "has a log-probability above 0": (log_t > slack).any(-1),
        "has probabilities whose sum is above 1": least_sum > 1 + slack,
        "has an id twice": (in_order[..., 1:] == in_order[..., :-1]).any(-1),
    }
    if not torch.compiler.is_compiling() and (environment()[1] or not ids.is_cuda):
        for what, tokens in found.items():
            if tokens.any():
                raise ValueError(f"the teacher's token {int(tokens.flatten().nonzero()[0])} (flattened) {what}")
    return torch.stack(list(found.values())).any(0)


def _outcomes(log_q: Tensor, in_set: Tensor, outside: str) -> Tensor:
    """Log-probabilities of the outcomes that are compared, [..., K] or with a tail [..., K + 1]; -inf out of the set."""
    log_q = torch.where(in_set, log_q, -torch.inf)
    if outside == "drop":
        return log_q
    # A token without ids has a sum of -inf, whose difference to itself would be NaN.
    log_sum = log_q.logsumexp(-1, keepdim=True).masked_fill(~in_set.any(-1, keepdim=True), 0.0)
    if outside == "renormalise":
        return log_q - log_sum
    tail = -torch.expm1(log_sum.clamp(max=-LEAST_TAIL))
    return torch.cat((log_q, tail.log()), -1)


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Sum of a (log a - log b); nothing where a is 0, in the gradient too."""
    here = log_a.exp() != 0  # NaN stays
    log_a, log_b = torch.where(here, log_a, 0.0), torch.where(here, log_b, 0.0)
    return (torch.where(here, log_a.exp(), 0.0) * (log_a - log_b)).sum(-1)
