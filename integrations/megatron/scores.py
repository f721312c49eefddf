"""Log-probabilities and their statistics from a model's own forward: ``log_probs_processor`` and ``log_probs_of``.

``GPTModel.forward`` calls its ``output_processor`` in place of the head and the loss, with hidden states as the head would get
them: [s, b, h], or this rank's slice [s/tp, b, h] under sequence parallelism. The head knows which, and whether the gradient of
hidden states is summed here. In ``log_probs_of`` the model asks deferred logits for its loss as usual.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist import LogProbs
from cce_dist.integrations.deferred.subclass import Head
from cce_dist.integrations.megatron.loss import Options, vocab_parallel_log_probs
from cce_dist.integrations.megatron.swap import call_of, heads_of, reason_against
from cce_dist.integrations.patching import attributes, say_once

ARGUMENTS = ("output_processor", "output_processor_context")


def log_probs_processor(*, temperature: float = 1.0, options: Options | None = None, **wanted: Any) -> Callable:
    """Return an ``output_processor`` for ``GPTModel.forward`` that returns ``LogProbs`` of the labels, [b, s] each.

    The model need not be converted. Losses of multi-token prediction, which come before the processor, do not change.
    ``Float16Module`` turns the ``LogProbs`` into a plain tuple.

    Args:
        temperature: Divides the logits. A call of the model may override it with a number or a [b, s] tensor:
            ``output_processor_context={"temperature": ...}``.
        options: Backend, memory and true size of the vocabulary; None: the converted model's options, or the defaults.
        **wanted: ``entropy``, ``sum_p_squared``, ``argmax``, ``top_k`` of ``linear_log_probs``.

    Raises:
        RuntimeError: This megatron-core's ``GPTModel.forward`` takes no ``output_processor``.
        TypeError: Another keyword is given.
    """
    import megatron.core
    from megatron.core.models.gpt import GPTModel

    _check("log_probs_processor", wanted)
    if not set(ARGUMENTS) <= inspect.signature(GPTModel.forward).parameters.keys():
        raise RuntimeError(
            f"cce_dist: log_probs_processor needs megatron-core >= 0.18, whose GPTModel.forward takes {ARGUMENTS[0]}; "
            f"{megatron.core.__version__} has none. log_probs_of serves any version"
        )
    return _processor(temperature, options, wanted)


@contextlib.contextmanager
def log_probs_of(model: Any, *, temperature: float | Tensor = 1.0, **wanted: Any) -> Iterator[list[LogProbs]]:
    """Yield a list to which each call of a converted model with labels appends their ``LogProbs``, [b, s] each.

    The call itself returns the negative log-probabilities; a filter is not used. A pipeline stage without a head appends
    nothing, so every rank makes the same calls. Losses of multi-token prediction do not change.

    Args:
        model: A converted model, as in ``convert``.
        temperature: Divides the logits: a number, or a [b, s] tensor.
        **wanted: As in ``log_probs_processor``.

    Raises:
        ValueError: The model is not converted.
        TypeError: Another keyword is given, or ``model`` contains no model of megatron-core.
    """
    _check("log_probs_of", wanted)
    found: list[LogProbs] = []
    heads = [head for _, head in heads_of(model) if head is not None]
    if not all(isinstance(head, Head) for head in heads):
        raise ValueError("cce_dist: log_probs_of needs a model that is converted")
    compute = functools.partial(vocab_parallel_log_probs, temperature=temperature, **wanted)
    with contextlib.ExitStack() as stack:
        for head in heads:
            stack.enter_context(attributes(head.cce_task, score=compute, scores=found))
        yield found


def next_ids(ids: Tensor, cp_group: dist.ProcessGroup | None = None, packed_seq_params: Any = None) -> Tensor:
    """Return the next id of each token's sequence as its label, by Megatron's own ``roll_tensor``.

    Args:
        ids: [b, s]; under context parallelism this rank's slices of the sequences.
        cp_group: The context-parallel group; None if sequences are whole.
        packed_seq_params: Megatron's, with the boundaries of the sequences in ``cu_seqlens_q``; ids are then [1, s].

    Returns:
        [b, s]. The last token of a sequence has the label -1, outside the vocabulary: log-probability 0, no gradient.

    Communication: Under context parallelism one id per slice to each neighbour, for each packed sequence.

    Raises:
        ValueError: ``cu_seqlens_q`` does not describe sequences that cover the ids; the message names it.
    """
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    if packed_seq_params is not None:
        boundaries = sequence_boundaries(packed_seq_params, ids.shape[1], 1 if cp_group is None else cp_group.size())
        packed_seq_params = copy.copy(packed_seq_params)
        # Under context parallelism roll_tensor fails for a sequence without tokens, so each boundary is listed once.
        packed_seq_params.cu_seqlens_q = torch.tensor(sorted(set(boundaries)), device="cpu")
    # roll_tensor fills the last position with 0, which would be an id.
    return roll_tensor(ids + 1, -1, -1, cp_group, packed_seq_params)[0] - 1


def sequence_boundaries(packed_seq_params: Any, num_tokens: int, num_ranks: int) -> list[int]:
    """Return Megatron's ``cu_seqlens_q`` as integers: where each packed sequence begins, and where the last one ends.

    Sequences may be empty. ``num_tokens`` is the number of tokens on each of ``num_ranks`` context-parallel ranks. The host
    waits for the device that holds ``cu_seqlens_q``.

    Raises:
        ValueError: ``cu_seqlens_q`` is no vector of integers, does not rise from 0 to the number of tokens, or has a sequence
            that cannot be cut into two slices a rank.
    """
    given = packed_seq_params.cu_seqlens_q
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        given = torch.as_tensor(given)
    is_vector = isinstance(given, Tensor) and given.dim() == 1 and given.numel() > 0 and not given.is_meta
    if not is_vector or given.dtype == torch.bool or given.is_floating_point() or given.is_complex():
        found = f"{given.dtype} {list(given.shape)} on {given.device}" if isinstance(given, Tensor) else repr(given)
        raise ValueError(f"cce_dist: cu_seqlens_q must be a vector of integers, got {found}")
    boundaries = given.tolist()
    lengths = [stop - start for start, stop in itertools.pairwise(boundaries)]
    if boundaries[0] != 0 or min(lengths, default=0) < 0:
        raise ValueError(f"cce_dist: cu_seqlens_q must rise from 0, got {_shortened(boundaries)}")
    if boundaries[-1] != num_ranks * num_tokens:
        raise ValueError(
            f"cce_dist: packed sequences of {boundaries[-1]} tokens (cu_seqlens_q), ids of {num_tokens} on each of {num_ranks} "
            "context-parallel ranks"
        )
    if num_ranks > 1 and any(length % (2 * num_ranks) for length in lengths):
        raise ValueError(
            f"cce_dist: the lengths of packed sequences must be multiples of {2 * num_ranks} on {num_ranks} context-parallel "
            f"ranks, cu_seqlens_q is {_shortened(boundaries)}"
        )
    return boundaries


def _shortened(numbers: list[int]) -> str:
    return f"{numbers}" if len(numbers) <= 16 else f"[{', '.join(map(str, numbers[:16]))}, ...]"


def _check(function: str, wanted: dict[str, Any]) -> None:
    unknown = wanted.keys() - {"entropy", "sum_p_squared", "argmax", "top_k"}
    if unknown:
        raise TypeError(f"{function} got an unexpected argument {min(unknown)!r}")


def _processor(temperature: float, options: Options | None, wanted: dict[str, Any]) -> Callable:
    def process(
        *,
        hidden_states: Tensor,
        output_layer: Any,
        output_weight: Tensor | None,
        labels: Tensor | None,
        context: dict[str, Any] | None,
        scale_logits: Callable,
        config: Any,
        **_: Any,
    ) -> LogProbs:
        context = {"temperature": temperature} | (context or {})
        reason = "the call has no labels" if labels is None else reason_against(output_layer, config)
        if context.keys() != {"temperature"}:
            reason = f"output_processor_context has {', '.join(context)}, and only temperature is known"
        if reason is not None:
            raise ValueError(f"cce_dist cannot compute log-probabilities of this model: {reason}")
        converted = isinstance(output_layer, Head)
        chosen = options or (output_layer.cce_task.options if converted else Options())
        say_once("log-probabilities of Megatron's models come from hidden states (linear_log_probs)")
        scale = float(scale_logits(torch.ones((), device="cpu")))

        def compute(head: Any, hidden: Tensor, weight: Tensor | None) -> LogProbs:
            whole, call = call_of(head, weight)
            call |= context | wanted | {"logit_scale": scale, "options": chosen}
            return vocab_parallel_log_probs(hidden, whole, labels, **call)  # type: ignore[arg-type]

        # The call of a converted head runs its hooks, which gather parameters just in time.
        if converted:
            return output_layer(hidden_states, ask=compute, weight=output_weight)
        return compute(output_layer, hidden_states, output_weight)

    return process
