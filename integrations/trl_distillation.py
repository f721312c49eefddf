"""TRL's DistillationTrainer: its divergence of two heads from hidden states, by ``linear_kl_divergence``.

A temperature divides behind the softcap, as in TRL: ``softcap / T`` and ``scale / T`` are the same logits. The student's
entropy, which TRL logs, takes one product more.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cce_dist import linear_kl_divergence, linear_log_probs
from cce_dist.integrations.fsdp import computed_dtype
from cce_dist.integrations.options import ScoreOptions
from cce_dist.integrations.patching import Patch, say_once


class Arguments(NamedTuple):
    """The arguments of TRL's function: hidden states [B, S, D] and heads of both models, a mask [B, S], and options."""

    student_hidden_states: Tensor
    teacher_hidden_states: Tensor
    student_lm_head_weight: Tensor
    teacher_lm_head_weight: Tensor
    completion_mask: Tensor
    beta: float
    num_items_in_batch: Tensor | int | None = None
    student_lm_head_bias: Tensor | None = None
    teacher_lm_head_bias: Tensor | None = None
    student_logit_scale: float = 1.0
    teacher_logit_scale: float = 1.0
    student_final_logit_softcapping: float | None = None
    teacher_final_logit_softcapping: float | None = None
    temperature: float = 1.0


def _make(options: ScoreOptions) -> Callable:
    def _chunked_divergence_loss(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        say_once("TRL's distillation comes from hidden states (linear_kl_divergence)")
        return _divergence(Arguments(*args, **kwargs), options.call())

    replacement: Any = _chunked_divergence_loss
    replacement.__signature__ = inspect.signature(Arguments)
    return replacement


def _divergence(given: Arguments, how: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss, the sum of the student's entropies, and the number of tokens that count."""
    temperature, mask = given.temperature, given.completion_mask != 0
    hidden, weight, bias = _operands(
        given.student_hidden_states, given.student_lm_head_weight, given.student_lm_head_bias
    )
    teacher, teacher_weight, teacher_bias = _operands(
        given.teacher_hidden_states.to(hidden.dtype), given.teacher_lm_head_weight, given.teacher_lm_head_bias
    )
    cap, teacher_cap = (
        None if softcap is None else softcap / temperature
        for softcap in (given.student_final_logit_softcapping, given.teacher_final_logit_softcapping)
    )
    scale, beta = given.student_logit_scale / temperature, float(given.beta)
    kind: Any = {0.0: "forward", 1.0: "reverse"}.get(beta, "jsd")
    loss = linear_kl_divergence(
        hidden,
        weight,
        teacher,
        teacher_weight,
        kind=kind,
        beta=beta if kind == "jsd" else 0.5,
        logit_scale=scale,
        teacher_logit_scale=given.teacher_logit_scale / temperature,
        softcap=cap,
        teacher_softcap=teacher_cap,
        linear_bias=bias,
        teacher_bias=teacher_bias,
        mask=mask,
        reduction="sum",
        **how,
    )
    with torch.no_grad():
        ids = torch.where(mask, 0, -100)
        scores = linear_log_probs(
            hidden, weight, ids, linear_bias=bias, logit_scale=scale, softcap=cap, entropy=True, **how
        )
    assert scores.entropy is not None
    count, divisor = mask.sum(), given.num_items_in_batch
    if divisor is None:
        divisor = count.clamp(min=1)
    return loss / (divisor.to(loss.device) if isinstance(divisor, Tensor) else divisor), scores.entropy.sum(), count


def _operands(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return hidden states, weight and bias in one dtype. FSDP2's DTensors are gathered, once for a loss."""
    if weight.numel() == 0 and not isinstance(weight, DTensor):
        raise ValueError(
            "cce_dist: ZeRO-3 has the head's weight in parts: distill with FSDP2 or ZeRO-2, or uninstall()"
        )
    dtype = computed_dtype(hidden)
    whole: list[Any] = [x.full_tensor() if isinstance(x, DTensor) else x for x in (weight, bias)]
    return hidden.to(dtype), *(None if x is None else x.to(dtype) for x in whole)  # type: ignore[return-value]


PATCH = Patch("trl.trainer.distillation_trainer", "_chunked_divergence_loss", "TRL 1.16", _make)
