"""Log-probabilities and their statistics from a model's own forward, in two ways.

    score = log_probs_processor(entropy=True)  # GPTModel of megatron-core 0.18 and newer, converted or not
    found = model(ids, positions, mask, labels=labels, output_processor=score)  # LogProbs, [b, s] each

    with log_probs_of(model, entropy=True) as found:  # any converted model of any version, as HybridModel
        model(ids, positions, mask, labels=labels)  # found[-1] has LogProbs

    labels = next_ids(ids, cp_group, packed_seq_params)  # where nobody has shifted them

``GPTModel.forward`` calls its ``output_processor`` in place of the head and the loss, with hidden states as the head would get
them: [s, b, h], or this rank's slice [s/tp, b, h] under sequence parallelism. The head says which, and whether the gradient of
hidden states is summed here. In ``log_probs_of`` the model asks deferred logits for its loss as ever.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist import LogProbs
from cce_dist.integrations.deferred import Head
from cce_dist.integrations.megatron.loss import Options, vocab_parallel_log_probs
from cce_dist.integrations.megatron.swap import call_of, language_models, reason_against
from cce_dist.integrations.patching import say_once

ARGUMENTS = ("output_processor", "output_processor_context")


def log_probs_processor(*, temperature: float = 1.0, options: Options | None = None, **wanted: Any) -> Callable:
    """Return an ``output_processor`` of ``GPTModel.forward`` that gives ``LogProbs`` of the labels, [b, s] each.

    The model may be converted or not. Losses of multi-token prediction come before the processor, and stay what they were.

    Args:
        temperature: Divides the logits. A call of the model may name another, a number or a [b, s] tensor:
            ``output_processor_context={"temperature": ...}``.
        options: Backend, memory and true size of the vocabulary; None: the converted model's options, or the defaults.
        **wanted: ``entropy``, ``sum_p_squared``, ``argmax``, ``top_k`` of ``linear_log_probs``.

    Returns:
        A function of the keywords that Megatron gives it. ``Float16Module`` makes a plain tuple of its ``LogProbs``.

    Raises:
        RuntimeError: This megatron-core's ``GPTModel.forward`` takes no ``output_processor``.
        TypeError: ``wanted`` names something else.
    """
    import megatron.core
    from megatron.core.models.gpt import GPTModel

    _check("log_probs_processor", wanted)
    if not set(ARGUMENTS) <= inspect.signature(GPTModel.forward).parameters.keys():
        raise RuntimeError(
            f"cce_dist: log_probs_processor needs megatron-core >= 0.18, whose GPTModel.forward takes {ARGUMENTS[0]}; "
            f"{megatron.core.__version__} has none. log_probs_of serves any version"
        )
    return _Processor(temperature, options, wanted)


@contextlib.contextmanager
def log_probs_of(model: Any, *, temperature: float | Tensor = 1.0, **wanted: Any) -> Iterator[list[LogProbs]]:
    """Give a list to which each call of a converted model with labels appends their ``LogProbs``, [b, s] each.

    The call returns what it always does, minus the log-probabilities; a filter is not used. A stage without a head appends
    nothing, so every rank makes the same calls. Losses of multi-token prediction stay what they were.

    Args:
        model: As of ``convert``, which has converted it.
        temperature: Divides the logits: a number, or a [b, s] tensor.
        **wanted: ``entropy``, ``sum_p_squared``, ``argmax``, ``top_k`` of ``linear_log_probs``.

    Raises:
        ValueError: The model is not converted.
        TypeError: ``wanted`` names something else, or ``model`` is none of megatron-core.
    """
    _check("log_probs_of", wanted)
    found: list[LogProbs] = []
    tasks = []
    for part in language_models(model):
        head = getattr(part, "output_layer", None)
        if head is not None and not isinstance(head, Head):
            raise ValueError("cce_dist: log_probs_of needs a model that is converted")
        tasks += [] if head is None else [head.cce_task]
    compute = functools.partial(vocab_parallel_log_probs, temperature=temperature, **wanted)
    for task in tasks:
        task.score, task.scores = compute, found
    try:
        yield found
    finally:
        for task in tasks:
            task.score, task.scores = None, []


def next_ids(ids: Tensor, cp_group: dist.ProcessGroup | None = None, packed_seq_params: Any = None) -> Tensor:
    """Return the label of each token where that is the next id of its sequence, by Megatron's own ``roll_tensor``.

    Args:
        ids: [b, s], of this rank's slices of the sequences under context parallelism.
        cp_group: The context-parallel group; None: sequences are whole.
        packed_seq_params: Megatron's, with the lengths in ``cu_seqlens_q``; ids are then [1, s].

    Returns:
        [b, s]; -1 behind the last token of a sequence. That label is outside the vocabulary: log-probability 0, no gradient.

    Communication: Under context parallelism one id per slice to each neighbour, for each packed sequence.

    Raises:
        ValueError: The packed sequences have another length than the ids.
    """
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    if packed_seq_params is not None:
        size = 1 if cp_group is None else cp_group.size()
        length = int(packed_seq_params.cu_seqlens_q[-1])
        if length != size * ids.shape[1]:
            raise ValueError(
                f"cce_dist: packed sequences of {length} tokens (cu_seqlens_q), ids of {ids.shape[1]} on each of {size} "
                "context-parallel ranks"
            )
    # roll_tensor puts zeros behind the last token, which would be an id.
    return roll_tensor(ids + 1, -1, -1, cp_group, packed_seq_params)[0] - 1


def _check(function: str, wanted: dict[str, Any]) -> None:
    unknown = wanted.keys() - {"entropy", "sum_p_squared", "argmax", "top_k"}
    if unknown:
        raise TypeError(f"{function} got an unexpected argument {min(unknown)!r}")


@dataclasses.dataclass(frozen=True)
class _Processor:
    """The processor; ``log_probs_processor`` describes its arguments."""

    temperature: float
    options: Options | None
    wanted: dict[str, Any]

    def __call__(
        self,
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
        context = {"temperature": self.temperature} | (context or {})
        reason = "the call has no labels" if labels is None else reason_against(output_layer, config)
        if context.keys() != {"temperature"}:
            reason = f"output_processor_context has {', '.join(context)}, and only temperature is known"
        if reason is not None:
            raise ValueError(f"cce_dist cannot compute log-probabilities of this model: {reason}")
        converted = isinstance(output_layer, Head)
        options = self.options or (output_layer.cce_task.options if converted else Options())
        say_once("log-probabilities of Megatron's models come from hidden states (linear_log_probs)")

        def compute(head: Any, hidden: Tensor, weight: Tensor | None) -> LogProbs:
            whole, call = call_of(head, weight)
            return vocab_parallel_log_probs(
                hidden,
                whole,
                labels,  # type: ignore[arg-type]
                **call,
                **context,
                **self.wanted,
                options=options,
                logit_scale=float(scale_logits(torch.ones(()))),
            )

        # Through the call of a converted head, whose hooks gather parameters just in time.
        if converted:
            return output_layer(hidden_states, ask=compute, weight=output_weight)
        return compute(output_layer, hidden_states, output_weight)
