"""TRL: log-probabilities, and the divergence of DistillationTrainer, from hidden states (docs/trl.md).

SFT, DPO, KTO, GRPO and RLOO give their models a second forward by ``add_fused_lm_head``. TRL's reads the head's weight and a
table of config keys that scale logits. The replacement runs the model's own forward with a head that defers: the model's code
scales the deferred logits, and hooks of FSDP2 and ZeRO-3 on the head gather the weight.

TRL divides by its temperature after the softcap: ``softcap * tanh(u / softcap) / T``. That is a smaller cap of the same tanh,
so deferred logits may be divided after their tanh.

Letters: B sequences, S tokens of a sequence, C of a completion, N tokens that have a label, V the vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cce_dist import KeptIds, VocabShard, linear_cross_entropy, linear_kl_divergence, linear_log_probs
from cce_dist.integrations import peft
from cce_dist.integrations.deferred.subclass import Head, checked, give_back, take
from cce_dist.integrations.deferred.task import Task
from cce_dist.integrations.deferred.tensor import TensorLogits
from cce_dist.integrations.fsdp import computed_dtype
from cce_dist.integrations.options import ScoreOptions
from cce_dist.integrations.patching import Patch, install_all, say_once, uninstall_all

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
        wanted = [name for name in OUTPUTS if name in ("log_probs", *outputs)]
        how = {"temperature": temperature, "in_fp32": cast_lm_head_to_fp32, "outputs": wanted, "options": options}
        _add_forward(model, how)

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


class _Distilled(NamedTuple):
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


def _make_divergence(options: ScoreOptions) -> Callable:
    def _chunked_divergence_loss(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        say_once("TRL's distillation comes from hidden states (linear_kl_divergence)")
        return _divergence(_Distilled(*args, **kwargs), options.call())

    replacement: Any = _chunked_divergence_loss
    replacement.__signature__ = inspect.signature(_Distilled)
    return replacement


def _divergence(given: _Distilled, how: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
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
    with torch.no_grad():  # TRL logs the student's entropy
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


DISTILLATION = Patch("trl.trainer.distillation_trainer", "_chunked_divergence_loss", "TRL 1.16", _make_divergence)
PATCHES = (
    Patch("trl.trainer.grpo_trainer", "GRPOTrainer._compute_loss", "TRL 1.16", ours=_replay),
    Patch("trl.trainer.rloo_trainer", "RLOOTrainer._compute_loss", "TRL 1.16", ours=_replay),
    DISTILLATION,
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


def _add_forward(model: Any, how: dict[str, Any]) -> None:
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
        with _deferring(self.get_output_embeddings(), how["options"]):
            out = original(*args, **{**kwargs, "use_cache": False})
            if not isinstance(out.logits, TensorLogits):
                raise RuntimeError(f"cce_dist: {type(self).__name__} makes logits without its output embedding")
            logits = out.logits if shift_labels is not None else out.logits[:, :-1]
            target = shift_labels if shift_labels is not None else labels[:, 1:]  # type: ignore[index]
            mask = target != -100
            kept = None
            if _sampling_mask is not None:
                kept = KeptIds.from_padded(_sampling_mask[mask[:, -_sampling_mask.shape[1] :]])
            found = _scores(logits[mask], target[mask], kept, **how)
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


def _scores(
    logits: Any,
    labels: Tensor,
    kept: KeptIds | None,
    *,
    temperature: float,
    in_fp32: bool,
    outputs: list[str],
    options: ScoreOptions,
) -> dict[str, Tensor]:
    """Return the outputs [N] by name for logits [N, V], labels [N] and the lists of N tokens.

    ``temperature`` divides the logits, behind the softcap. ``in_fp32``: multiply in fp32, outside of autocast.
    """
    scaling = (logits / temperature)._scaling()
    added = scaling.pop("added")

    def compute(head: nn.Module, hidden: Tensor) -> tuple[Tensor, ...]:
        kind = hidden.device.type
        with torch.autocast(kind, enabled=torch.is_autocast_enabled(kind) and not in_fp32):
            hidden, weight, bias = peft.operands(head, hidden.float() if in_fp32 else hidden)
            bias, weight = peft.sum_of_biases(bias, added), weight.to(hidden.dtype)
            bias = None if bias is None else bias.to(hidden.dtype)
            how: dict[str, Any] = {"linear_bias": bias, **scaling, **options.call()}
            found: Any = linear_log_probs(
                hidden,
                weight,
                labels,
                entropy="entropy" in outputs,
                sum_p_squared="log_sum_sq_probs" in outputs,
                argmax="is_top1" in outputs,
                kept=kept,
                batch_invariant=options.batch_invariant,
                **how,
            )
            results = {"log_probs": found.log_probs, "entropy": found.entropy}
            if "log_sum_sq_probs" in outputs:
                results["log_sum_sq_probs"] = found.sum_p_squared.log()
            if "is_top1" in outputs:
                results["is_top1"] = found.argmax == labels
            if "mean_logits" in outputs:
                results["mean_logits"] = _mean_logits(hidden, weight, labels, found.lse, how)
        # A tuple of tensors is what the hooks of FSDP2 and ZeRO-3 look into.
        return tuple(results[name] for name in outputs)

    return dict(zip(outputs, logits._ask(compute), strict=True))


@torch.no_grad()
def _mean_logits(hidden: Tensor, weight: Tensor, labels: Tensor, lse: Tensor, how: dict[str, Any]) -> Tensor:
    """Return the mean of each token's logits over the vocabulary, [N]. Only a softcap takes a pass over the vocabulary."""
    if how["softcap"] is not None:  # a loss that is all smoothing is lse - mean_j z_j
        return lse - linear_cross_entropy(hidden, weight, labels, reduction="none", label_smoothing=1.0, **how)
    bias = how["linear_bias"]
    means = (hidden * weight.mean(0, dtype=torch.float32)).sum(-1)  # a product of matrices would be autocast
    return how["logit_scale"] * (means if bias is None else means + bias.float().mean())
