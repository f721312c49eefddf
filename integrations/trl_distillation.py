"""TRL's DistillationTrainer: its divergence of two heads from hidden states, by ``linear_kl_divergence``.

``install`` of ``integrations.trl`` puts it in the place of TRL's ``_chunked_divergence_loss``. A temperature divides behind the
softcap, as in TRL: ``softcap / T`` and ``scale / T`` are the same logits. The student's entropy, which TRL logs, has no gradient
and takes one product more. GKDTrainer and GOLDTrainer compute on logits, and are not served.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cce_dist import linear_kl_divergence, linear_log_probs
from cce_dist.integrations.options import ScoreOptions
from cce_dist.integrations.patching import Patch, say_once


def _make(options: ScoreOptions) -> Callable:
    how = {"backend": options.backend, "workspace_bytes": options.workspace_bytes}

    def _chunked_divergence_loss(
        student_hidden_states: Tensor,
        teacher_hidden_states: Tensor,
        student_lm_head_weight: Tensor,
        teacher_lm_head_weight: Tensor,
        completion_mask: Tensor,
        beta: float,
        num_items_in_batch: Tensor | int | None = None,
        student_lm_head_bias: Tensor | None = None,
        teacher_lm_head_bias: Tensor | None = None,
        student_logit_scale: float = 1.0,
        teacher_logit_scale: float = 1.0,
        student_final_logit_softcapping: float | None = None,
        teacher_final_logit_softcapping: float | None = None,
        temperature: float = 1.0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        say_once("TRL's distillation comes from hidden states (linear_kl_divergence)")
        student = _operands(student_hidden_states, student_lm_head_weight, student_lm_head_bias)
        teacher = _operands(teacher_hidden_states.to(student[0].dtype), teacher_lm_head_weight, teacher_lm_head_bias)
        mask = completion_mask != 0
        count = mask.sum()
        cap, teacher_cap = (
            None if softcap is None else softcap / temperature
            for softcap in (student_final_logit_softcapping, teacher_final_logit_softcapping)
        )
        scale = student_logit_scale / temperature
        kind = {0.0: "forward", 1.0: "reverse"}.get(float(beta), "jsd")
        loss = linear_kl_divergence(
            *student[:2],
            *teacher[:2],
            kind=kind,
            beta=float(beta) if kind == "jsd" else 0.5,
            logit_scale=scale,
            teacher_logit_scale=teacher_logit_scale / temperature,
            softcap=cap,
            teacher_softcap=teacher_cap,
            linear_bias=student[2],
            teacher_bias=teacher[2],
            mask=mask,
            reduction="sum",
            **how,
        )
        with torch.no_grad():
            ids = torch.where(mask, 0, -100)
            entropy = linear_log_probs(
                *student[:2], ids, linear_bias=student[2], logit_scale=scale, softcap=cap, entropy=True, **how
            ).entropy
        assert entropy is not None
        divisor = count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        if isinstance(divisor, Tensor):
            divisor = divisor.to(loss.device)
        return loss / divisor, entropy.sum(), count

    return _chunked_divergence_loss


def _operands(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Hidden states, and the whole head in their dtype: FSDP2 has it in parts, which are gathered here once."""
    if weight.numel() == 0 and not isinstance(weight, DTensor):
        raise ValueError(
            "cce_dist: ZeRO-3 has the head's weight in parts: distill with FSDP2 or ZeRO-2, or uninstall()"
        )
    weight, bias = (x.full_tensor() if isinstance(x, DTensor) else x for x in (weight, bias))
    dtype = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


PATCH = Patch("trl.trainer.distillation_trainer", "_chunked_divergence_loss", "TRL 1.16", _make)
