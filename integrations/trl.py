"""TRL: the log-probabilities of SFT, DPO, KTO, GRPO and RLOO from hidden states (docs/trl.md).

All of these trainers give their models a second forward by ``add_fused_lm_head``, and call it with ``fused_lm_head=True``.
TRL's reads the head's weight and a table of config keys that scale logits. The replacement runs the model's own forward with a
head that defers: the model's code scales the deferred logits, and hooks of FSDP2 and ZeRO-3 on the head gather the weight.

TRL divides by its temperature after the softcap: ``softcap * tanh(u / softcap) / T``. That is a smaller cap of the same tanh,
so deferred logits may be divided after their tanh.

Letters: B sequences, S tokens of a sequence, C of a completion, N tokens that have a label, V the vocabulary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from cce_dist import KeptIds, VocabShard, linear_cross_entropy, linear_log_probs
from cce_dist.integrations import peft, trl_distillation
from cce_dist.integrations.deferred.subclass import Head, checked, give_back, take
from cce_dist.integrations.deferred.task import Task
from cce_dist.integrations.deferred.tensor import TensorLogits
from cce_dist.integrations.options import ScoreOptions
from cce_dist.integrations.patching import Patch, install_all, uninstall_all

FIELDS = ("loss", "log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask", "aux_loss")
OUTPUTS = FIELDS[1:6]


def _make(options: ScoreOptions) -> Callable:
    # There is no filter, because upstream gradients of a policy have both signs.
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


PATCH = Patch("trl.trainer.utils", "add_fused_lm_head", "TRL 1.16", _make, {"FusedCausalLMOutput": FIELDS})
ON_LOGITS = ("GKDTrainer", "GOLDTrainer")  # experimental SFTTrainers, which take nothing from hidden states


def _refuse_others(theirs: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    for name in {base.__name__ for base in type(self).__mro__}.intersection(ON_LOGITS):
        raise ValueError(
            f"cce_dist: TRL's {name} computes its divergence on logits: DistillationTrainer has the same from hidden "
            "states (linear_kl_divergence), or call cce_dist.integrations.trl.uninstall() first"
        )
    theirs(self, *args, **kwargs)


_sampling_mask: Tensor | None = None  # of the loss under way
# TRL computes these over the whole vocabulary, before it has a sampling mask.
WHOLE = ("importance_sampling_ratio", "ref_per_token_logps", "old_per_token_logps", "old_logps")


# ``sampling_mask`` [B, C, K]: ids, padded with -1. A row without ids is a token whose sampler cut nothing.
def _replay(theirs: Callable, self: Any, model: Any, inputs: Any) -> Any:
    global _sampling_mask
    mask, sampled = inputs.get("sampling_mask"), inputs.get("sampling_per_token_logps")
    for name in WHOLE if mask is not None else ():
        given = inputs.get(name)
        if given is not None and (sampled is None or not torch.equal(given, sampled)):
            raise ValueError(
                f"cce_dist: {name} is over the whole vocabulary, and the inputs have sampling_mask: set beta=0 and "
                "vllm_importance_sampling_correction=False, and replace old_per_token_logps by sampling_per_token_logps "
                "(RLOOTrainer has no place for lists)"
            )
    _sampling_mask = mask
    try:
        return theirs(self, model, inputs)
    finally:
        _sampling_mask = None


PATCHES = (
    Patch("trl.trainer.grpo_trainer", "GRPOTrainer._compute_loss", "TRL 1.16", ours=_replay),
    Patch("trl.trainer.rloo_trainer", "RLOOTrainer._compute_loss", "TRL 1.16", ours=_replay),
    trl_distillation.PATCH,
    PATCH,
    Patch("trl.trainer.sft_trainer", "SFTTrainer.__init__", "TRL 1.16", ours=_refuse_others),
)


def install(**options: Any) -> None:
    """Have TRL's trainers that are made from now on take their losses from hidden states.

    DistillationTrainer's divergence is among them. Making a GKDTrainer or a GOLDTrainer, whose divergences take logits, is an
    error from now on.

    Args:
        **options: As in ``patching.install_all``; ``batch_invariant`` is for log-probabilities only.
    """
    install_all(PATCHES, options)


def uninstall() -> None:
    """Undo ``install``; a trainer that was made before keeps what it has."""
    uninstall_all(PATCHES)


def _add_forward(model: Any, score: _Score) -> None:
    """Replace a model's forward in calls with ``fused_lm_head=True``, as TRL's trainers make them."""
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
            kept = None
            if _sampling_mask is not None:
                kept = KeptIds.from_padded(_sampling_mask[mask[:, -_sampling_mask.shape[1] :]])
            found = score(logits[mask], target[mask], kept)
        # masked_scatter keeps an output without any label a part of the graph, whose backward all ranks then run.
        found = {name: x.new_zeros(mask.shape).masked_scatter(mask, x) for name, x in found.items()}
        loss = -found["log_probs"].sum() / (
            mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        )
        aux_loss = getattr(out, "aux_loss", None)
        if aux_loss is not None:
            loss = loss + getattr(config, "router_aux_loss_coef", 0.0) * aux_loss
        return FusedCausalLMOutput(loss=loss, label_mask=mask, aux_loss=aux_loss, **found)

    forward.cce_scores = True  # type: ignore[attr-defined]  # for ``cce_dist.require``
    model.forward = types.MethodType(forward, model)


@contextlib.contextmanager
def _deferring(output: Any, options: ScoreOptions) -> Iterator[None]:
    """Have the head of a model defer in a block."""
    inside = peft.in_use(output)
    if isinstance(inside, Head):
        raise ValueError(
            "cce_dist: this model is converted, and TRL's trainers compute the loss outside of it: revert the model. "
            "cce_dist.integrations.trl.install() alone is enough, and cce_dist.require(model) passes"
        )
    # GRPOTrainer(cast_lm_head_to_fp32=True) has put a product in fp32 there; a score has its own.
    cast = vars(inside).get("forward")
    is_cast = getattr(cast, "__module__", "") == "trl.trainer.grpo_trainer"
    if is_cast:
        del inside.forward
    try:
        head = checked(output, path="the output embedding")
        take(head, Task(options, VocabShard.even(head.out_features, None), calls=[True]))
        try:
            yield
        finally:
            give_back(head)
    finally:
        if is_cast:
            inside.forward = cast


@dataclasses.dataclass(frozen=True)
class _Score:
    """The outputs that a trainer needs for each label; ``outputs`` are names of ``OUTPUTS``."""

    temperature: float  # divides the logits, behind the softcap
    in_fp32: bool  # multiply in fp32, outside of autocast
    outputs: tuple[str, ...]
    options: ScoreOptions

    def __call__(self, logits: Any, labels: Tensor, kept: KeptIds | None) -> dict[str, Tensor]:
        """Return the outputs [N] by name for logits [N, V], labels [N] and the lists of N tokens."""
        scaling = (logits / self.temperature)._scaling()
        names = [name for name in OUTPUTS if name in self.outputs]
        # A tuple of tensors is what the hooks of FSDP2 and ZeRO-3 look into.
        compute = functools.partial(self._compute, labels=labels, kept=kept, **scaling)
        return dict(zip(names, logits._ask(compute), strict=True))

    def _compute(
        self, head: nn.Module, hidden: Tensor, labels: Tensor, kept: KeptIds | None, logit_scale: float,
        softcap: float | None, added: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        kind = hidden.device.type
        with torch.autocast(kind, enabled=torch.is_autocast_enabled(kind) and not self.in_fp32):
            hidden, weight, bias = peft.operands(head, hidden.float() if self.in_fp32 else hidden)
            bias, weight = peft.sum_of_biases(bias, added), weight.to(hidden.dtype)
            how: dict[str, Any] = dict(
                linear_bias=None if bias is None else bias.to(hidden.dtype),
                logit_scale=logit_scale,
                softcap=softcap,
                **self.options.call(),
            )
            found: Any = linear_log_probs(
                hidden,
                weight,
                labels,
                entropy="entropy" in self.outputs,
                sum_p_squared="log_sum_sq_probs" in self.outputs,
                argmax="is_top1" in self.outputs,
                kept=kept,
                batch_invariant=self.options.batch_invariant,
                **how,
            )
            results = {"log_probs": found.log_probs, "entropy": found.entropy}
            if "log_sum_sq_probs" in self.outputs:
                results["log_sum_sq_probs"] = found.sum_p_squared.log()
            if "is_top1" in self.outputs:
                results["is_top1"] = found.argmax == labels
            if "mean_logits" in self.outputs:
                results["mean_logits"] = _mean_logits(hidden, weight, labels, found.lse, how)
        return tuple(results[name] for name in OUTPUTS if name in self.outputs)


@torch.no_grad()
def _mean_logits(hidden: Tensor, weight: Tensor, labels: Tensor, lse: Tensor, how: dict[str, Any]) -> Tensor:
    """Return the mean of each token's logits over the vocabulary, [N]. Only a softcap takes a pass over the vocabulary."""
    if how["softcap"] is not None:  # a loss that is all smoothing is lse - mean_j z_j
        return lse - linear_cross_entropy(hidden, weight, labels, reduction="none", label_smoothing=1.0, **how)
    bias = how["linear_bias"]
    means = (hidden * weight.mean(0, dtype=torch.float32)).sum(-1)  # a product of matrices would be autocast
    return how["logit_scale"] * (means if bias is None else means + bias.float().mean())
