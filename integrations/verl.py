"""verl: the log-probabilities and entropies of ``use_fused_kernels`` from hidden states, over any tensor-parallel group.

    from cce_dist.integrations import verl as cce_verl

    cce_verl.install()  # in every worker: a module of two lines, named in VERL_USE_EXTERNAL_MODULES

verl's models end in one function, ``linear_cross_entropy``, a Triton kernel of its own: those under Megatron-core always, those
of transformers with ``impl_backend: triton``. ``install`` puts another in its place. Ours differs in this:

* dE is right with and without sequence parallelism. verl's is this shard's part of the sum in both cases, which is what
  Megatron's gather of slices wants in backward, and is not the gradient of hidden states that all ranks hold.
* The temperature may be a tensor, of any shape that broadcasts over the labels.

Letters: N tokens, D hidden size, V_r the rows of the vocabulary on this rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from cce_dist import linear_log_probs
from cce_dist.integrations.megatron.loss import shard_of
from cce_dist.integrations.options import ScoreOptions
from cce_dist.integrations.patching import Patch, say_once

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
        found = linear_log_probs(
            hidden.reshape(-1, hidden.shape[-1]),
            weight,
            labels.reshape(-1),
            temperature=temperature,
            entropy=True,
            shard=shard_of(weight.shape[0], dist_process_group, None),
            input_grad="partial" if was_gathered(hidden) else "summed",
            backend=options.backend,
            workspace_bytes=options.workspace_bytes,
            batch_invariant=options.batch_invariant,
        )
        assert found.entropy is not None
        return found.log_probs, found.entropy

    return linear_cross_entropy


PATCH = Patch(
    "verl.utils.kernel.linear_cross_entropy",
    "linear_cross_entropy",
    "verl 0.5 to 0.9",
    _make,
    {"linear_cross_entropy": (), "LinearCrossEntropy.forward": PARAMETERS},  # the first is the other's apply
)
install, uninstall = PATCH.install, PATCH.uninstall


def was_gathered(hidden: Tensor) -> bool:
    """Return whether Megatron has just gathered these hidden states from slices of the sequence.

    The backward of that gather adds up what each rank's shard of the vocabulary gives, so nobody else may.
    """
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
