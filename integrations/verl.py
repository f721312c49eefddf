"""verl: the log-probabilities and entropies of ``use_fused_kernels`` from hidden states (docs/verl.md).

verl's models end in ``linear_cross_entropy``, a Triton kernel of verl: models of Megatron-core always, models of transformers
with ``impl_backend: triton``. The replacement differs in two ways:

* dE is right with and without sequence parallelism. verl's is this shard's part of the sum in both cases, which is right only
  behind Megatron's gather of slices.
* The temperature may be a tensor of any shape that broadcasts over the labels.

With lists of what a sampler kept, numbers of tokens go through verl's packing, padding and slicing in place of the labels, and
the head finds labels and lists by them. A row without ids: the sampler cut nothing.

Letters: N tokens, D hidden size, V_r the rows of the vocabulary on this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from cce_dist import KeptIds, checks, linear_log_probs
from cce_dist.integrations.megatron.loss import shard_of
from cce_dist.integrations.options import ScoreOptions
from cce_dist.integrations.patching import Patch, install_all, say_once, uninstall_all

PARAMETERS = ("ctx", "hidden", "weight", "labels", "temperature", "reduction", "dist_process_group")


def _make(options: ScoreOptions) -> Callable:
    def linear_cross_entropy(
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float | Tensor = 1.0,
        reduction: str = "none",
        dist_process_group: dist.ProcessGroup | None = None,
    ) -> tuple[Tensor, Tensor]:
        _refuse(hidden, weight, labels, reduction)
        say_once("verl's log-probabilities come from hidden states (linear_log_probs)")
        if isinstance(temperature, Tensor):
            temperature = temperature.expand_as(labels).reshape(-1)
        kept = None
        if _Replay.lists is not None:  # labels are numbers of tokens
            kept, labels = _Replay.lists.take(labels), _Replay.labels[labels]
            _Replay.lists = None  # a microbatch has one call
        found = linear_log_probs(
            hidden.reshape(-1, hidden.shape[-1]),
            weight,
            labels.reshape(-1),
            temperature=temperature,
            entropy=True,
            kept=kept,
            shard=shard_of(weight.shape[0], dist_process_group, None),
            input_grad="partial" if was_gathered(hidden) else "summed",
            **options.call("batch_invariant"),
        )
        assert found.entropy is not None
        return found.log_probs, found.entropy

    return linear_cross_entropy


# Tell verl's method that the model predicts several tokens only if it is trained to: that loss needs a mask, which verl's
# fused forward does not get.
def _fused_kernels(theirs: Callable, self: Any) -> None:
    mtp = self.model_config.mtp
    told = SimpleNamespace(mtp=SimpleNamespace(enable=mtp.enable and mtp.enable_train))
    engine = {"engine_config": self.engine_config, "is_value_model": self.is_value_model, "module": self.module}
    theirs(SimpleNamespace(model_config=told, **engine))


# verl gives this method to models that predict several tokens, and ignores output_processor in it.
def _postprocess(theirs: Callable, self: Any, *args: Any, output_processor: Any = None, **given: Any) -> Any:
    if output_processor is None:
        return theirs(self, *args, **given)
    if not self.post_process:
        return given["hidden_states"]
    tied = self.share_embeddings_and_output_weights
    given["output_weight"] = self.shared_embedding_or_output_weight() if tied else None
    given["context"] = given.pop("output_processor_context")
    return output_processor(output_layer=self.output_layer, config=self.config, **given)


class _Replay:
    """The lists of the microbatch under way, and the ids of its tokens, -100 for tokens that were not sampled."""

    lists: KeptIds | None = None
    labels: Any = None
    numbers: Any = None  # for Megatron: the jagged numbers of the tokens


def _begin(batch: Any) -> Any:
    """Take the lists of a microbatch, ``sampling_mask``: jagged ids [B, j, K] like ``input_ids``, padded with -1.

    Return the jagged numbers of its tokens, or None if it has no lists.
    """
    mask, ids, sampled = (batch.get(name, None) for name in ("sampling_mask", "input_ids", "loss_mask"))
    _Replay.lists = None
    if mask is None:
        return None
    rows, labels = mask.values(), ids.values()
    if len(rows) != len(labels):
        raise ValueError(f"cce_dist: sampling_mask has {len(rows)} rows, input_ids {len(labels)} tokens")
    if sampled is not None:
        labels = labels.masked_fill((rows < 0).all(-1) & (sampled.values() == 0), -100)
    _Replay.lists, _Replay.labels = KeptIds.from_padded(rows), labels
    return torch.nested.nested_tensor_from_jagged(torch.arange(len(labels), device=labels.device), ids.offsets())


def _fsdp_inputs(theirs: Callable, self: Any, micro_batch: Any) -> tuple[dict, dict]:
    inputs, outputs = theirs(self, micro_batch)
    numbers = _begin(micro_batch) if "return_dict" in inputs else None  # else fused kernels are off
    if numbers is not None:
        if "shift_labels" not in inputs:
            raise ValueError("cce_dist: a batch with sampling_mask needs use_remove_padding=True")
        numbered = micro_batch.clone(recurse=False)
        numbered["input_ids"] = numbers
        inputs["shift_labels"] = theirs(self, numbered)[0]["shift_labels"]
    return inputs, outputs


def _megatron_inputs(theirs: Callable, self: Any, batch: Any) -> dict:
    _Replay.numbers = _begin(batch)
    return theirs(self, batch)


def _megatron_forward(theirs: Callable, hf_config: Any) -> Callable:
    forward = theirs(hf_config)
    if _Replay.lists is None:
        return forward
    return lambda labels, **given: forward(labels=_Replay.numbers, **given)


PATCH = Patch(
    "verl.utils.kernel.linear_cross_entropy",
    "linear_cross_entropy",
    "verl 0.5 to 0.9",
    _make,
    {"linear_cross_entropy": (), "LinearCrossEntropy.forward": PARAMETERS},  # linear_cross_entropy is its apply
)
NEWEST = "verl 0.9"
ENGINE = "verl.workers.engine.megatron.transformer_impl"
FSDP_ENGINE = "verl.workers.engine.fsdp.transformer_impl"
MTP = (
    Patch(ENGINE, "MegatronEngine._maybe_enable_fused_kernels", NEWEST, ours=_fused_kernels),
    Patch("verl.models.mcore.mtp_patch", "_megatron_gptmodel_postprocess", NEWEST, ours=_postprocess),
)
REPLAY = {
    "": (),
    "fsdp": (Patch(FSDP_ENGINE, "FSDPEngineWithLMHead.prepare_model_inputs", NEWEST, ours=_fsdp_inputs),),
    "megatron": (
        Patch(ENGINE, "MegatronEngineWithLMHead.prepare_model_inputs", NEWEST, ours=_megatron_inputs),
        Patch("verl.models.mcore.registry", "get_mcore_forward_fused_model_engine_fn", NEWEST, ours=_megatron_forward),
    ),
}


def install(*, mtp: bool = False, sampling_mask: str = "", **options: Any) -> None:
    """Have verl's models take log-probabilities from hidden states.

    Args:
        mtp: Leave ``use_fused_kernels`` on in models of Megatron that predict several tokens, and are not trained to.
        sampling_mask: The engine whose batches may have ``sampling_mask``, "fsdp" or "megatron"; empty: none.
        **options: As in ``patching.install_all``.
    """
    uninstall()
    replay = REPLAY[checks.choice("sampling_mask", sampling_mask, tuple(REPLAY))]
    install_all((PATCH, *(MTP if mtp else ()), *replay), options)


def uninstall() -> None:
    """Undo ``install``."""
    _Replay.lists = None
    uninstall_all((PATCH, *MTP, *REPLAY["fsdp"], *REPLAY["megatron"]))


def was_gathered(hidden: Tensor) -> bool:
    """Return whether Megatron has gathered these hidden states from slices, and so sums their gradient over ranks."""
    return type(hidden.grad_fn).__name__ == "_GatherFromSequenceParallelRegionBackward"


def _refuse(hidden: Tensor, weight: Tensor, labels: Tensor, reduction: str) -> None:
    if reduction.lower() != "none":
        raise ValueError(f"cce_dist serves verl's reduction 'none', got {reduction!r}")
    if isinstance(weight, DTensor):
        raise ValueError(
            "cce_dist: the head's weight is a DTensor: FSDP2 has not gathered it; wrap the head with the model"
        )
    if hidden.shape[:-1] != labels.shape and 1 not in (*hidden.shape[:-1], *labels.shape) and hidden.dim() > 2:
        raise ValueError(
            f"cce_dist: hidden states {tuple(hidden.shape)} and labels {tuple(labels.shape)} do not have one order of tokens"
        )
