"""NeMo-RL: the log-probabilities of ``use_fused_linear_logprobs`` from hidden states (docs/nemo_rl.md).

With that switch NeMo-RL's ``GPTModel.forward`` ends in ``from_parallel_hidden_states_to_logprobs``, which computes chunks of
fp32 logits twice and gathers hidden states under any tensor parallelism. The replacement calls ``linear_log_probs``. It tells
by the shapes whether hidden states are whole.

NeMo-RL does not pass the lengths of packed sequences to that function. A second patch passes them on, with the labels. The
replacement then returns a row for each sequence, gathered over context-parallel ranks. A third patch has NeMo-RL's losses take
such rows, as its log-probabilities already do.

With top-k or top-p NeMo-RL masks whole logits. The replacement takes the softmax over the ids that the engine kept
(``KeptIds``), which a fourth patch passes on. The reference policy uses the whole vocabulary. So do the policy's
log-probabilities that are compared with it, which a fifth patch returns.

Letters: B sequences, S tokens of a sequence, T tokens of all packed sequences, D hidden size, V_r rows of this rank.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from cce_dist import KeptIds, linear_log_probs
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
        replay = getattr(target, "replay", None)

        def score(kept: KeptIds | None) -> Tensor:
            found = linear_log_probs(
                hidden.to(weight.dtype),
                weight,
                next_ids(target, cp_group, packed).t(),
                ignore_index=-1,
                kept=kept,
                shard=shard,
                sequence_parallel=slices,
                **options.call("batch_invariant"),
            )
            log_probs = found.log_probs.t()
            return log_probs[:, :-1] if packed is None else _unpacked(log_probs, packed, cp_group)

        with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
            log_probs = score(None if replay is None else _kept(replay, target, packed, cp_group))
            if replay is not None and replay.has_reference:
                replay.unfiltered = score(None)
            return log_probs

    return from_parallel_hidden_states_to_logprobs


# NeMo-RL passes the labels on unchanged, so the lengths travel as their attribute.
def _forward(theirs: Callable, self: Any, *args: Any, **kwargs: Any) -> Tensor:
    labels, packed = kwargs.get("labels"), kwargs.get("packed_seq_params")
    if labels is not None and packed is not None:
        kwargs["labels"] = labels.view_as(labels)
        kwargs["labels"].packed_seq_params = packed
        kwargs["labels"].replay = getattr(labels, "replay", None)
    return theirs(self, *args, **kwargs)


def _loss(
    theirs: Callable,
    self: Any,
    data_dict: Any,
    packed_seq_params: Any = None,
    global_valid_seqs: Tensor | None = None,
    global_valid_toks: Tensor | None = None,
) -> Callable:
    fused = any(getattr(self.loss_fn, name, False) for name in SWITCHES)
    unpacked = fused and packed_seq_params is not None
    compute = theirs(self, data_dict, None if unpacked else packed_seq_params, global_valid_seqs, global_valid_toks)
    if not unpacked:
        return compute
    length = data_dict["input_ids"].shape[1] - 1
    return lambda log_probs: compute(F.pad(log_probs, (0, length - log_probs.shape[1])))


@dataclasses.dataclass
class Replay:
    """What a sampler kept of a microbatch, an attribute of its ids."""

    ids: Tensor  # [B, S, K], padded with -1: the ids that the token at this place was sampled from
    has_reference: bool = False  # whether the loss compares ``unfiltered`` with a reference policy's
    unfiltered: Tensor | None = None  # [B, S - 1] log-probabilities over the whole vocabulary


def _step(theirs: Callable, data_iterator: Any, model: Any, post_processing_fn: Any, **given: Any) -> Any:
    params = given.get("sampling_params")
    fused = given.get("use_fused_linear_logprobs") or given.get("use_linear_ce_fusion_loss")
    if not fused or params is None or (params.top_p in (None, 1.0) and (params.top_k or -1) < 1):
        return theirs(data_iterator, model, post_processing_fn, **given)
    batch = next(data_iterator)
    loss = getattr(post_processing_fn, "loss_fn", None)
    replay = Replay(_sampled_from(batch.data_dict), getattr(loss, "reference_policy_kl_penalty", 0) != 0)
    batch.input_ids_cp_sharded.replay = batch.data_dict["input_ids"].replay = replay
    return theirs(iter([batch]), model, post_processing_fn, **given)


def _unfiltered(theirs: Callable, input_ids: Tensor, *args: Any, **given: Any) -> Tensor:
    replay = getattr(input_ids, "replay", None)
    if replay is not None:
        return F.pad(replay.unfiltered, (0, input_ids.shape[1] - 1 - replay.unfiltered.shape[1]))
    return theirs(input_ids, *args, **given)


SWITCHES = "use_fused_linear_logprobs", "use_linear_ce_fusion"  # attributes of a loss; the second is NeMo-RL 0.7's
KNOWN = "NeMo-RL 0.7 and main of 2026-08"
PATCH = Patch("nemo_rl.distributed.model_utils", "from_parallel_hidden_states_to_logprobs", KNOWN, _scores)
MASK = "sampling_mask_token_ids", "sampling_mask_sizes"  # ids [B, S, K], and how many of them count [B, S]
PATCHES = (
    PATCH,
    Patch("nemo_rl.distributed.model_utils", "_gpt_forward_with_linear_ce_fusion", KNOWN, ours=_forward),
    Patch("nemo_rl.models.megatron.train", "LossPostProcessor.__call__", KNOWN, ours=_loss),
    Patch("nemo_rl.models.megatron.train", "forward_with_post_processing_fn", KNOWN, ours=_step),
    Patch("nemo_rl.distributed.model_utils", "get_next_token_logprobs_from_logits", KNOWN, ours=_unfiltered),
)


def install(**options: Any) -> None:
    """Have NeMo-RL's Megatron workers take log-probabilities from hidden states; ``options`` as in ``patching.install_all``."""
    install_all(PATCHES, options)


def uninstall() -> None:
    """Undo ``install``."""
    uninstall_all(PATCHES)


def _sampled_from(data: Any) -> Tensor:
    """Return the ids that each token of input_ids was sampled from, [B, S, K], padded with -1."""
    missing = [name for name in MASK if name not in data]
    if missing:
        raise ValueError(
            "cce_dist: with top_k or top_p, use_fused_linear_logprobs needs the ids that the engine kept: the microbatch has "
            f"no {' and no '.join(missing)} (vLLM returns them with return_sampling_mask)"
        )
    ids, sizes = (data[name] for name in MASK)
    return ids.masked_fill(torch.arange(ids.shape[-1], device=ids.device) >= sizes[..., None], -1)


def _kept(replay: Replay, target: Tensor, packed: Any, cp_group: dist.ProcessGroup | None) -> KeptIds:
    """Return the lists of the tokens that ``target`` [B, S] or [1, T/cp] predicts, sequence first as the hidden states.

    A token that was not sampled has no list, and log-probability 0.
    """
    num_sequences, length = replay.ids.shape[:2]
    numbers = torch.arange(num_sequences * length, device=target.device).view(num_sequences, length)
    if packed is not None:
        rank, size = (0, 1) if cp_group is None else (cp_group.rank(), cp_group.size())
        bounds = sequence_boundaries(packed, target.shape[1], size)
        lengths = [stop - start for start, stop in itertools.pairwise(bounds)]
        rows = [F.pad(row, (0, max(0, n - length)))[:n] for row, n in zip(numbers, lengths, strict=True)]
        if size > 1:
            pieces = [row.chunk(2 * size) for row in rows]
            rows = [torch.cat((each[rank], each[-1 - rank])) for each in pieces]
        numbers = torch.cat(rows)[None]
    following = next_ids(numbers, cp_group, packed).t().clamp(min=0)
    return KeptIds.from_padded(replay.ids)._replace(whole=None).take(following)


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
