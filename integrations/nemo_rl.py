"""NeMo-RL: the log-probabilities of ``use_fused_linear_logprobs`` from hidden states.

    from cce_dist.integrations import nemo_rl as cce_nemo_rl

    cce_nemo_rl.install()  # in every worker, before training

With that switch NeMo-RL's ``GPTModel.forward`` ends in one function, ``from_parallel_hidden_states_to_logprobs``. NeMo-RL's
computes chunks of fp32 logits twice, with two collectives each, and gathers hidden states under any tensor parallelism. Ours
has the collectives of ``linear_log_probs``, and tells by the shapes whether hidden states are whole.

Letters: B sequences, S tokens of a sequence, D hidden size, V_r the rows of the vocabulary on this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist import linear_log_probs
from cce_dist.integrations.megatron.loss import shard_of
from cce_dist.integrations.options import ScoreOptions
from cce_dist.integrations.patching import Patch, say_once


def _make(options: ScoreOptions) -> Callable:
    # NeMo-RL's fused_linear_logprobs_chunk_size means nothing here: workspace_bytes bounds the memory.
    def from_parallel_hidden_states_to_logprobs(
        tensor_parallel_hidden_states: Tensor,
        output_weight_layer: Tensor,
        runtime_gather_output: bool | None,
        target: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        tp_group: dist.ProcessGroup,
        inference_only: bool = False,
        cp_group: dist.ProcessGroup | None = None,
        chunk_size: int | None = None,
    ) -> Tensor:
        hidden, weight = tensor_parallel_hidden_states, output_weight_layer
        shard = shard_of(weight.shape[0], tp_group, None)
        slices = _refuse(hidden, target, (vocab_start_index, vocab_end_index), shard, cp_group)
        say_once("NeMo-RL's log-probabilities come from hidden states (linear_log_probs)")
        with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
            found = linear_log_probs(
                hidden.to(weight.dtype),
                weight,
                target.roll(-1, dims=-1).t(),
                shard=shard,
                sequence_parallel=slices,
                backend=options.backend,
                workspace_bytes=options.workspace_bytes,
                batch_invariant=options.batch_invariant,
            )
        return found.log_probs.t()[:, :-1]

    return from_parallel_hidden_states_to_logprobs


PATCH = Patch(
    "nemo_rl.distributed.model_utils",
    "from_parallel_hidden_states_to_logprobs",
    "NeMo-RL 0.7 and main of 2026-08",
    _make,
)
install, uninstall = PATCH.install, PATCH.uninstall


def _refuse(hidden: Tensor, target: Tensor, rows: tuple[int, int], shard: Any, cp_group: Any) -> bool:
    """Raise on what is not served; return whether hidden [S/tp or S, B, D] is this rank's slice of the sequence."""
    if cp_group is not None and cp_group.size() > 1:
        raise ValueError(
            "cce_dist: NeMo-RL's fused log-probabilities do not know context parallelism: the label of a slice's last token is "
            "on another rank, and the lengths of packed sequences are not given to the function"
        )
    if rows != (shard.start, shard.stop):
        raise ValueError(f"cce_dist: the weight has the rows {[shard.start, shard.stop]}, NeMo-RL says {list(rows)}")
    length = hidden.shape[0]
    if target.shape[1] not in (length, length * shard.group_size):
        raise ValueError(
            f"cce_dist: hidden states of {length} tokens, labels of {target.shape[1]}, on {shard.group_size} tensor-parallel "
            "ranks: neither whole nor slices"
        )
    return target.shape[1] != length
