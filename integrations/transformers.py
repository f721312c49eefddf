"""Hugging Face: converted models under TRL's SFTTrainer, for ``cce_dist.convert`` and the DeepSpeed adapter.

transformers' own models need nothing of this: their loss ends in ``F.cross_entropy``. TRL's ``SFTTrainer`` (1.16) gives
the model a second forward, ``model(..., labels=labels, fused_lm_head=True)``, that reads the head's weight and returns for each
token the log-probability of the label, the entropy, and whether the label is the most likely token. ``Task`` answers that call
with the model's own forward and one call of the loss. It leaves calls of TRL's other trainers, which need more, to TRL.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn

from cce_dist.given import LinearCrossEntropyOutput
from cce_dist.integrations.deferred import task
from cce_dist.integrations.options import SECTION

FUSED = "fused_lm_head"  # the argument by which TRL asks for log-probabilities
SERVED = {"log_probs", "entropy", "is_top1"}  # the outputs that SFTTrainer needs


@dataclasses.dataclass(eq=False)
class Task(task.Task):
    """The task of a model that TRL may train."""

    parts: list[LinearCrossEntropyOutput] | None = None  # of the losses in a call with ``fused_lm_head``

    def enter(self, model: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        args, kwargs = super().enter(model, args, kwargs)
        if kwargs.get(FUSED) and not _serves(model):
            if model.training and torch.is_grad_enabled():
                raise ValueError(
                    "cce_dist: this trainer of TRL asks for more than a converted model computes: call "
                    "cce_dist.integrations.trl.install() before the trainer is made, and revert the model: "
                    "model = cce_dist.revert(model)"
                )
        elif kwargs.get(FUSED):
            options = self.options
            if model.training and (options.z_loss_weight or options.label_smoothing):
                raise ValueError(
                    "cce_dist: SFTTrainer computes its loss from log-probabilities, which have no z-loss and no label "
                    "smoothing: leave z_loss_weight and label_smoothing out"
                )
            kwargs = {name: value for name, value in kwargs.items() if name != FUSED}
            if kwargs.get("labels") is None:  # sequence parallelism; the model's forward looks at labels alone
                kwargs["labels"] = kwargs["shift_labels"]
            self.parts = []
        return args, kwargs

    def leave(self, model: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        parts, self.parts = self.parts, None
        output = super().leave(model, args, kwargs, output)
        return output if parts is None or output is None else _fused_output(parts, kwargs, output)

    def aux(self) -> tuple[str, ...]:
        return super().aux() if self.parts is None else (*super().aux(), "nll", "entropy", "label_is_max")

    def keep(self, output: LinearCrossEntropyOutput, valid: Tensor) -> Tensor:
        if self.parts is not None:
            self.parts.append(output)
        return super().keep(output, valid)


@torch.compiler.disable  # torch.compile cannot trace a look into a closure
def _serves(model: nn.Module) -> bool:
    """Return whether TRL's function in place of the model's forward asks for no more than ``SERVED``; its closure says so."""
    function: Any = model.forward
    while function is not None:
        function = getattr(function, "__func__", function)
        if inspect.isfunction(function):
            asked = inspect.getclosurevars(function).nonlocals
            if {"temperature", "outputs", "cast_lm_head_to_fp32"} <= asked.keys():
                return (
                    asked["temperature"] == 1 and not asked["cast_lm_head_to_fp32"] and set(asked["outputs"]) <= SERVED
                )
        function = getattr(function, "__wrapped__", None)  # accelerate's autocast
    return False


def _fused_output(parts: list, kwargs: dict, output: Any) -> Any:
    """Return TRL's output of a call with ``fused_lm_head``: [b, s - 1] each, or [b, s] for labels that are shifted already."""
    from trl.trainer.utils import FusedCausalLMOutput

    labels, shifted = kwargs["labels"], kwargs.get("shift_labels")
    batch, length = labels.shape
    labels = labels[:, 1:] if shifted is None else shifted
    # A model pads the labels behind their shift, or cuts the logits.
    lengths = {batch * length: length, batch * labels.shape[1]: labels.shape[1]}
    if len(parts) != 1 or parts[0].nll.numel() not in lengths:
        raise RuntimeError(
            f"cce_dist: SFTTrainer needs a number for each of {batch} x {length} tokens, and the model asked for "
            f"{len(parts)} losses of {[part.nll.numel() for part in parts]}"
        )
    length = lengths[parts[0].nll.numel()]
    nll, entropy, is_max = (
        x.view(batch, length)[:, : labels.shape[1]] for x in (parts[0].nll, parts[0].entropy, parts[0].label_is_max)
    )
    return FusedCausalLMOutput(
        loss=output[0] if isinstance(output, tuple) else output.loss,
        log_probs=-nll,
        entropy=entropy,
        is_top1=is_max.bool(),
        label_mask=labels != -100,
        aux_loss=getattr(output, "aux_loss", None),
    )


def refuse(model: nn.Module) -> None:
    """Raise ValueError if transformers' own tensor parallelism splits the head, or Trainer's ds_config has the section, too."""
    if (getattr(model, "_tp_size", None) or 1) > 1:
        raise ValueError(
            f"cce_dist cannot convert this {type(model).__name__}: transformers has split it over {model._tp_size} ranks; "
            "AutoTP of DeepSpeed is supported"
        )
    section = section_of_trainer()
    if isinstance(section, dict) and section.get("enabled"):
        raise ValueError(
            f'"{SECTION}" is enabled in ds_config, and cce_dist.convert is called, too: leave one of them out (the section is '
            "read after cce_dist.integrations.deepspeed.install(), or by the launcher)"
        )


def section_of_trainer() -> Any:
    """Return the section of the ds_config that Trainer holds, None without one."""
    module: Any = sys.modules.get("transformers.integrations.deepspeed")
    config = None if module is None else module.deepspeed_config()
    return None if config is None else config.get(SECTION)
