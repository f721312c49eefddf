"""NeMo-RL: the log-probabilities of ``use_fused_linear_logprobs`` from hidden states.

    from cce_dist.integrations import nemo_rl as cce_nemo_rl

    cce_nemo_rl.install()  # in every worker, before training

With that switch NeMo-RL's ``GPTModel.forward`` ends in ``from_parallel_hidden_states_to_logprobs``, which computes chunks of
fp32 logits twice and gathers hidden states under any tensor parallelism. The replacement calls ``linear_log_probs``. It tells
by the shapes whether hidden states are whole.

NeMo-RL does not pass the lengths of packed sequences to that function. A second patch passes them on, with the labels. The
replacement then returns a row for each sequence, gathered over context-parallel ranks. A third patch has NeMo-RL's losses take
such rows, as its log-probabilities already do.

Letters: B sequences, S tokens of a sequence, T tokens of all packed sequences, D hidden size, V_r rows of this rank.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from cce_dist import linear_log_probs
from cce_dist.integrations.megatron.loss import shard_of
from cce_dist.integrations.megatron.scores import next_ids, sequence_boundaries
from cce_dist.integrations.options import ScoreOptions
from cce_dist.integrations.patching import Patch, install_all, say_once, uninstall_all


def _scores(options: ScoreOptions) -> Callable:
    # workspace_bytes bounds the memory in place of chunk_size, NeMo-RL's fused_linear_logprobs_chunk_size.
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
        packed = getattr(target, "packed_seq_params", None)
        cp_group = None if cp_group is None or cp_group.size() == 1 else cp_group
        shard = shard_of(weight.shape[0], tp_group, None)
        slices = _refuse(hidden, target, (vocab_start_index, vocab_end_index), shard, cp_group is not None, packed)
        say_once("NeMo-RL's log-probabilities come from hidden states (linear_log_probs)")
        with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
            found = linear_log_probs(
                hidden.to(weight.dtype),
                weight,
                next_ids(target, cp_group, packed).t(),
                ignore_index=-1,
                shard=shard,
                sequence_parallel=slices,
                **options.call("batch_invariant"),
            )
            log_probs = found.log_probs.t()
            return log_probs[:, :-1] if packed is None else _unpacked(log_probs, packed, cp_group)

    return from_parallel_hidden_states_to_logprobs


def _forward(_: ScoreOptions) -> Callable:
    # NeMo-RL passes the labels on unchanged, so the lengths travel as their attribute.
    def _gpt_forward_with_linear_ce_fusion(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        labels, packed = kwargs.get("labels"), kwargs.get("packed_seq_params")
        if labels is not None and packed is not None:
            kwargs["labels"] = labels.view_as(labels)
            kwargs["labels"].packed_seq_params = packed
        return _gpt_forward_with_linear_ce_fusion.cce_original(self, *args, **kwargs)  # type: ignore[attr-defined]

    return _gpt_forward_with_linear_ce_fusion


def _loss(_: ScoreOptions) -> Callable:
    def __call__(
        self: Any,
        data_dict: Any,
        packed_seq_params: Any = None,
        global_valid_seqs: Tensor | None = None,
        global_valid_toks: Tensor | None = None,
    ) -> Callable:
        theirs = __call__.cce_original  # type: ignore[attr-defined]
        fused = any(getattr(self.loss_fn, name, False) for name in SWITCHES)
        unpacked = fused and packed_seq_params is not None
        compute = theirs(self, data_dict, None if unpacked else packed_seq_params, global_valid_seqs, global_valid_toks)
        if not unpacked:
            return compute
        length = data_dict["input_ids"].shape[1] - 1
        return lambda log_probs: compute(F.pad(log_probs, (0, length - log_probs.shape[1])))

    return __call__


SWITCHES = "use_fused_linear_logprobs", "use_linear_ce_fusion"  # attributes of a loss; the second is NeMo-RL 0.7's
KNOWN = "NeMo-RL 0.7 and main of 2026-08"
PATCH = Patch("nemo_rl.distributed.model_utils", "from_parallel_hidden_states_to_logprobs", KNOWN, _scores)
_FORWARD = "_gpt_forward_with_linear_ce_fusion"
PATCHES = (
    PATCH,
    Patch("nemo_rl.distributed.model_utils", _FORWARD, KNOWN, _forward, {_FORWARD: ()}),
    Patch("nemo_rl.models.megatron.train", "LossPostProcessor.__call__", KNOWN, _loss),
)


def install(**options: Any) -> None:
    """Have NeMo-RL's Megatron workers take log-probabilities from hidden states; ``options`` as in ``patching.install_all``."""
    install_all(PATCHES, options)


def uninstall() -> None:
    """Undo ``install``."""
    uninstall_all(PATCHES)


def _unpacked(log_probs: Tensor, packed: Any, cp_group: dist.ProcessGroup | None) -> Tensor:
    """Return one row per packed sequence, [B, S - 1] padded with zeros, from this rank's tokens [1, T/cp]."""
    gather = importlib.import_module(PATCH.module).allgather_cp_sharded_tensor
    size = 1 if cp_group is None else cp_group.size()
    rows = []
    for start, stop in itertools.pairwise(sequence_boundaries(packed, log_probs.shape[1], size)):
        row = log_probs[0, start // size : stop // size]
        rows.append(row if cp_group is None or start == stop else gather(row, cp_group, seq_dim=0))
    return pad_sequence(rows, batch_first=True)[:, :-1] if rows else log_probs


def _refuse(hidden: Tensor, target: Tensor, rows: tuple[int, int], shard: Any, in_slices: bool, packed: Any) -> bool:
    """Raise unless the call is supported. Return whether hidden [S/tp or S, B, D] is this rank's slice of the sequence."""
    if in_slices and packed is None:
        raise ValueError(
            "cce_dist: under context parallelism NeMo-RL's log-probabilities need packed_seq_params, the lengths of packed "
            "sequences, and this call of GPTModel.forward has none"
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
