"""TRL: the log-probabilities of SFT, DPO, KTO, GRPO and RLOO from hidden states; distillation: ``trl_distillation``.

    from cce_dist.integrations import trl as cce_trl

    cce_trl.install()  # before the trainer is made

All of these trainers give their models a second forward by ``add_fused_lm_head``, and call it with ``fused_lm_head=True``.
TRL's reads the head's weight and a table of config keys that scale logits. Ours runs the model's own forward with a deferred
head: its own code scales the logits that nobody computes, and FSDP2 and ZeRO-3 gather the weight by their hooks on the head.

TRL divides by its temperature behind the softcap: ``softcap * tanh(u / softcap) / T``. That is a smaller cap behind the same
tanh, so it is exact: deferred logits may be divided after their tanh.

Letters: B sequences, S tokens of a sequence, N tokens that have a label, V the vocabulary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from cce_dist import VocabShard, linear_cross_entropy, linear_log_probs
from cce_dist.integrations import peft, trl_distillation
from cce_dist.integrations.deferred import Head, Task, TensorLogits, checked, give_back, take
from cce_dist.integrations.options import ScoreOptions
from cce_dist.integrations.patching import Patch, Place, install_all, uninstall_all

FIELDS = ("loss", "log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask", "aux_loss")
OUTPUTS = FIELDS[1:6]
AUX = {"entropy": "entropy", "is_top1": "label_is_max"}  # outputs that the loss computes if they are named


def _make(options: ScoreOptions) -> Callable:
    # A filter is not served: policies have upstream gradients of both signs.
    def add_fused_lm_head(
        model: Any,
        temperature: float = 1.0,
        cast_lm_head_to_fp32: bool = False,
        outputs: tuple[str, ...] = ("log_probs",),
    ) -> None:
        unknown = [name for name in outputs if name not in OUTPUTS]
        if unknown:
            raise ValueError(f"cce_dist serves TRL's {', '.join(OUTPUTS)}; {', '.join(unknown)} is none of them")
        if options.batch_invariant and "mean_logits" in outputs:
            raise ValueError(
                "cce_dist: mean_logits is not served with batch_invariant (DPO's and KTO's trainers ask for it)"
            )
        _add_forward(model, _Score(temperature, cast_lm_head_to_fp32, ("log_probs", *outputs), options))

    return add_fused_lm_head


PATCH = Patch(
    "trl.trainer.utils",
    "add_fused_lm_head",
    "TRL 1.16",
    _make,
    {"FusedCausalLMOutput": FIELDS},
)
ON_LOGITS = ("GKDTrainer", "GOLDTrainer")  # experimental SFTTrainers, which take nothing from hidden states
PATCHES = (trl_distillation.PATCH, PATCH)
TRAINER = Place("trl.trainer.sft_trainer", "SFTTrainer.__init__")


def install(*, backend: str = "auto", workspace_bytes: int | None = None, batch_invariant: bool = False) -> None:
    """Have TRL's trainers that are made from now on take their losses from hidden states: ``Patch.install``.

    DistillationTrainer's divergence is among them; the option batch_invariant is of log-probabilities alone. To make a
    GKDTrainer or a GOLDTrainer is an error from now on: their divergences are of logits.
    """
    uninstall()
    install_all(PATCHES, backend=backend, workspace_bytes=workspace_bytes, batch_invariant=batch_invariant)
    try:
        TRAINER.put(_refusing(importlib.import_module(TRAINER.module).SFTTrainer.__init__))
    except Exception:
        uninstall()
        raise


def uninstall() -> None:
    """Undo ``install``; a trainer that was made before keeps what it has."""
    uninstall_all((*PATCHES, TRAINER))


def _refusing(original: Callable) -> Callable:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in {base.__name__ for base in type(self).__mro__}.intersection(ON_LOGITS):
            raise ValueError(
                f"cce_dist: TRL's {name} computes its divergence on logits: DistillationTrainer has the same from hidden "
                "states (linear_kl_divergence), or call cce_dist.integrations.trl.uninstall() first"
            )
        original(self, *args, **kwargs)

    return init


def _add_forward(model: Any, score: _Score) -> None:
    """Wrap a model's forward: with ``fused_lm_head=True``, as TRL's trainers call it, return log-probabilities."""
    from trl.trainer.utils import FusedCausalLMOutput

    original = model.forward
    config = model.config.get_text_config()

    # generate() reads the signature of forward
    @functools.wraps(type(model).forward)
    def forward(
        self: Any,
        *args: Any,
        fused_lm_head: bool = False,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> Any:
        given = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
        if not fused_lm_head:
            return original(*args, **{name: value for name, value in given.items() if value is not None}, **kwargs)
        # PEFT and FSDP may have replaced the head since.
        with _deferring(self.get_output_embeddings(), score.options):
            out = original(*args, **{**kwargs, "use_cache": False})
            if not isinstance(out.logits, TensorLogits):
                raise RuntimeError(f"cce_dist: {type(self).__name__} makes logits without its output embedding")
            logits = out.logits if shift_labels is not None else out.logits[:, :-1]
            target = shift_labels if shift_labels is not None else labels[:, 1:]  # type: ignore[index]
            mask = target != -100
            found = score(logits[mask], target[mask])
        # masked_scatter keeps an output without any label a part of the graph, whose backward all ranks then run.
        found = {name: x.new_zeros(mask.shape).masked_scatter(mask, x) for name, x in found.items()}
        loss = -found["log_probs"].sum() / (
            mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        )
        aux_loss = getattr(out, "aux_loss", None)
        if aux_loss is not None:
            loss = loss + getattr(config, "router_aux_loss_coef", 0.0) * aux_loss
        return FusedCausalLMOutput(loss=loss, label_mask=mask, aux_loss=aux_loss, **found)

    model.forward = types.MethodType(forward, model)


class _Deferring(Task):
    """The task of a head that defers every call."""

    def deferring(self) -> bool:
        return True


@contextlib.contextmanager
def _deferring(output: Any, options: ScoreOptions) -> Iterator[None]:
    """Let the head of a model defer, and be as before afterwards."""
    if isinstance(peft.in_use(output), Head):
        raise ValueError(
            "cce_dist: this model is converted, and TRL's trainers compute the loss outside of it: revert the model, and "
            "call cce_dist.integrations.trl.install() alone"
        )
    head = checked(output, path="the output embedding")
    take(head, _Deferring(options, VocabShard(0, head.out_features, head.out_features)))
    try:
        yield
    finally:
        give_back(head)


@dataclasses.dataclass(frozen=True)
class _Score:
    """What a trainer wants to know of each label: ``outputs`` are names of ``OUTPUTS``."""

    temperature: float  # divides the logits, behind the softcap
    in_fp32: bool  # multiply in fp32, outside of autocast
    outputs: tuple[str, ...]
    options: ScoreOptions

    def __call__(self, logits: Any, labels: Tensor) -> dict[str, Tensor]:
        """Return each output by its name, [N], of logits [N, V] and labels [N]."""
        scaling = (logits / self.temperature)._scaling()
        names = [name for name in OUTPUTS if name in self.outputs]
        # A tuple of tensors is what the hooks of FSDP2 and ZeRO-3 look into.
        return dict(zip(names, logits._ask(functools.partial(self._compute, labels=labels, **scaling)), strict=True))

    def _compute(
        self, head: nn.Module, hidden: Tensor, labels: Tensor, logit_scale: float, softcap: float | None, added: Any
    ) -> tuple[Tensor, ...]:
        kind = hidden.device.type
        with torch.autocast(kind, enabled=torch.is_autocast_enabled(kind) and not self.in_fp32):
            hidden, weight, bias = peft.operands(head, hidden.float() if self.in_fp32 else hidden)
            bias = peft.sum_of_biases(bias, added)
            if self.options.batch_invariant:
                results = self._invariant(hidden, weight, labels, bias, logit_scale, softcap)
                return tuple(results[name] for name in OUTPUTS if name in self.outputs)
            aux = {"nll", *(AUX[name] for name in self.outputs if name in AUX)}
            call = functools.partial(
                linear_cross_entropy,
                hidden,
                weight.to(hidden.dtype),
                labels,
                reduction="none",
                return_aux=tuple(aux),
                linear_bias=None if bias is None else bias.to(hidden.dtype),
                backend=self.options.backend,
                workspace_bytes=self.options.workspace_bytes,
            )
            # A loss that is all smoothing is lse - mean_j z_j.
            smoothing = float("mean_logits" in self.outputs)
            found: Any = call(logit_scale=logit_scale, softcap=softcap, label_smoothing=smoothing)
            results = {
                "log_probs": -found.nll,
                "entropy": found.entropy,
                "mean_logits": (found.lse - found.loss).detach(),
            }
            if "is_top1" in self.outputs:
                results["is_top1"] = found.label_is_max.bool()
            if "log_sum_sq_probs" in self.outputs:
                # sum_j p_j^2 = exp(lse(2 z) - 2 lse(z)), and the double of capped logits is one of twice the cap.
                with torch.no_grad():
                    double = call(logit_scale=2 * logit_scale, softcap=None if softcap is None else 2 * softcap)
                results["log_sum_sq_probs"] = double.lse - 2 * found.lse.detach()
        return tuple(results[name] for name in OUTPUTS if name in self.outputs)

    def _invariant(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        bias: Tensor | None,
        logit_scale: float,
        softcap: float | None,
    ) -> dict[str, Any]:
        found = linear_log_probs(
            hidden,
            weight.to(hidden.dtype),
            labels,
            linear_bias=None if bias is None else bias.to(hidden.dtype),
            logit_scale=logit_scale,
            softcap=softcap,
            entropy="entropy" in self.outputs,
            sum_p_squared="log_sum_sq_probs" in self.outputs,
            argmax="is_top1" in self.outputs,
            backend=self.options.backend,
            workspace_bytes=self.options.workspace_bytes,
            batch_invariant=True,
        )
        squares, best = found.sum_p_squared, found.argmax
        return {
            "log_probs": found.log_probs,
            "entropy": found.entropy,
            "log_sum_sq_probs": None if squares is None else squares.log(),
            "is_top1": None if best is None else best == labels,
        }
