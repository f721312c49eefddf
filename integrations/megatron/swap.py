"""convert, revert and require: put a built model and its head into subclasses of their own classes, and undo it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cce_dist.integrations.deferred import task as deferred
from cce_dist.integrations.deferred.logits import DeferredLogits
from cce_dist.integrations.deferred.subclass import Head, give_back, subclass, take
from cce_dist.integrations.deferred.task import argument
from cce_dist.integrations.megatron.loss import Options, shard_of, vocab_parallel_loss, vocab_parallel_max
from cce_dist.integrations.patching import attributes

FLAG = "cce"  # the value of cross_entropy_fusion_impl that converts a model


def convert(model: Any, options: Options | None = None) -> Any:
    """Have a built model compute its loss from hidden states, and return the model.

    Parameters, their names, ``state_dict`` and ``sharded_state_dict`` stay. A pipeline stage without a head is left alone, so
    every rank makes the same call. Call it before DDP or FSDP wraps the model if you can: FSDP2 shards modules by class. One
    rank logs a line to the logger ``cce_dist``, at level WARNING.

    Args:
        model: A language model of megatron-core (GPT, Mamba, Hybrid), a module that contains one (DDP, Float16Module), or a
            list of models, one for each virtual pipeline stage.
        options: See ``Options``. On a converted model they replace its options; None keeps them.

    Raises:
        ValueError: The head cannot be taken over; the message says why.
        TypeError: ``model`` contains no model of megatron-core.
        ImportError: megatron-core is missing, or lacks a function that this module replaces.
    """
    for part, head in heads_of(model):
        if isinstance(head, Head):
            head.cce_task.options = options or head.cce_task.options
            continue
        _refuse(part, head)
        if head is None:
            continue
        chosen = options or Options()
        task = Task(chosen, shard_of(head.output_size_per_partition, _tp_group(head), chosen.vocab_size))
        take(head, task)
        part.__class__ = _model_class(type(part))
        if task.shard.start == 0 and _is_first_replica():
            task.announce("output_layer")
    return model


def revert(model: Any) -> Any:
    """Undo ``convert``, and return ``model``."""
    for part, head in heads_of(model):
        if isinstance(head, Head):
            if type(part).__mro__[1] is not _Model:
                raise ValueError("the model's class was changed again since convert(), by FSDP2 say: undo that first")
            give_back(head)
            part.__class__ = type(part).__mro__[2]
    return model


def require(model: Any) -> None:
    """Raise unless this model's loss comes from hidden states, as ``cce_dist.require`` does: call it after a step.

    A pipeline stage without a head always passes, so every rank makes the same call.

    Raises:
        RuntimeError: A head is not converted; no forward in training has ended; or other code computed the loss of all.
        TypeError, ImportError: As in ``convert``.
    """
    for part, head in heads_of(model):
        if isinstance(head, Head):
            head.cce_task.require("output_layer")
        elif head is not None:
            raise RuntimeError(
                f"the output_layer of this {type(part).__name__} was not converted: call "
                "cce_dist.integrations.megatron.convert, or install before the model is built"
            )


class MegatronLogits(DeferredLogits):
    """Deferred logits [s, b, V] or [s, b, V/tp]. They answer for their loss and, for MTP's acceptance rate, their maximum."""

    ANSWERED = DeferredLogits.ANSWERED | {torch.argmax: "argmax", torch.max: "max"}

    def loss(self, labels: Tensor) -> Tensor:
        """Return the loss [b, s] of labels [b, s]. In ``log_probs_of`` also keep the ``LogProbs`` of the model's own labels."""
        task = self._task
        expected = task.expected_weights(labels)
        score = task.score if labels is task.told[0] else None

        def compute(head: Any, hidden: Tensor, weight: Any, **_: Any) -> Any:
            weight, call = call_of(head, weight)
            call |= {"options": task.options, **self._scaling()}
            if score is not None:
                return score(hidden, weight, labels, **call)
            return vocab_parallel_loss(hidden, weight, labels, expected_weights=expected, **call)

        task.num_losses += self._training
        answer = self._ask(compute)
        if score is None:
            return answer
        task.scores.append(answer)
        return -answer.log_probs

    def max(self, dim: int) -> tuple[Tensor, Tensor]:
        """Return the largest logits and their indices, [s, b] each."""
        if dim != -1 or min(self._factor, self._softcap or 1.0) <= 0:
            raise self._refused(f"the largest element along dim {dim}, or behind a factor that is not positive,")

        def largest(head: Any, hidden: Tensor, weight: Tensor | None, **_: Any) -> tuple[Tensor, Tensor]:
            return vocab_parallel_max(
                hidden,
                head.weight if weight is None else weight,
                _tp_group(head),
                sequence_parallel=head.sequence_parallel,
                gathered=self._gathered(),
                options=self._task.options,
            )

        values, indices = self._ask(largest)
        values = values * self._factor
        return values if self._softcap is None else values.tanh() * self._softcap, indices

    def argmax(self, dim: int) -> Tensor:
        """Return the indices of the largest logits, [s, b]."""
        return self.max(dim)[1]

    def size(self, dim: int) -> int:
        """Return the number of logits per token on this rank."""
        if dim != -1:
            raise self._refused(f"the size along dim {dim}")
        return self._head.output_size if self._gathered() else self._head.output_size_per_partition

    def _gathered(self) -> bool:
        wanted = self._given["runtime_gather_output"]
        return self._head.gather_output if wanted is None else wanted


@dataclasses.dataclass(eq=False)
class Task(deferred.Task):
    """State of a converted ``output_layer``. It defers in calls of the model, or of ``_postprocess``, that have labels."""

    score: Callable | None = None  # inside log_probs_of: replaces the loss of the model's own labels
    scores: list = dataclasses.field(default_factory=list)  # results of ``score``
    # Labels and loss mask of the current call. Multi-token prediction rolls labels of its own.
    told: tuple = (None, None)

    def expected_weights(self, labels: Tensor) -> Tensor | bool:
        """Return the weights by which the losses of these labels will be multiplied."""
        of_model, mask = self.told
        if labels is not of_model:  # multi-token prediction rolls the mask, too
            return False
        return mask.reshape(labels.shape) if isinstance(mask, Tensor) and mask.numel() == labels.numel() else True

    def defer(self, head: Any, input_: Tensor, weight: Any = None, runtime_gather_output: bool | None = None) -> tuple:
        return MegatronLogits(head, self, input_, weight=weight, runtime_gather_output=runtime_gather_output), None

    @contextlib.contextmanager
    def call(self, deferring: bool) -> Iterator[None]:
        """Set whether the head defers its logits, in a block or, as a decorator, in each call of a function."""
        self.calls.append(deferring)
        try:
            yield
        finally:
            self.calls.pop()


class _Model:
    """Stands before the class of a converted model."""

    def compute_language_model_loss(self: Any, labels: Tensor, logits: Tensor | MegatronLogits) -> Tensor:
        if isinstance(logits, MegatronLogits):
            return logits.loss(labels)
        compute = super().compute_language_model_loss  # pyright: ignore[reportAttributeAccessIssue]
        if self.config.cross_entropy_fusion_impl != FLAG:
            return compute(labels, logits)
        # These logits are computed, for example for reinforcement learning. Megatron has no fusion "cce".
        with attributes(self.config, cross_entropy_loss_fusion=False):
            return compute(labels, logits)


@functools.cache
def _model_class(base: type) -> type:
    model_class = subclass(_Model, base)
    # The schedule that overlaps expert-parallel communication calls _postprocess alone (GPT, 0.13 on).
    for name in ("forward", "_postprocess"):
        function = getattr(base, name, None)
        if function is not None and "labels" in inspect.signature(function).parameters:
            setattr(model_class, name, _deferring(model_class, name, function))
    return model_class


def _deferring(model_class: type, name: str, function: Callable) -> Callable:
    """Return the method ``name`` of a converted model: the head defers its logits during a call with labels."""

    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        labels = argument(function, "labels", args, kwargs)
        inherited = getattr(super(model_class, self), name)
        if not isinstance(self.output_layer, Head):
            warnings.warn(
                f"cce_dist: the head was wrapped in a {type(self.output_layer).__name__}; its logits are computed",
                stacklevel=3,
            )
            return inherited(*args, **kwargs)
        task = self.output_layer.cce_task
        task.trains = self.training
        # Other code reads the logits: a loss of the instance's own, or a log on disk. The head then computes them.
        wanted = "compute_language_model_loss" in vars(self) or getattr(self.config, "config_logger_dir", "")
        # An output_processor (0.18 on) replaces the loss, and is given a head that returns logits. The losses of multi-token
        # prediction, which come before it, are still computed from hidden states.
        if kwargs.get("output_processor") is not None:
            kwargs["output_processor"] = task.call(deferring=False)(kwargs["output_processor"])
        told = (labels, argument(function, "loss_mask", args, kwargs))
        with attributes(task, told=told), task.call(deferring=labels is not None and not wanted):
            result = inherited(*args, **kwargs)
        task.num_forwards += not task.calls and labels is not None and self.training and torch.is_grad_enabled()
        return result

    return method


def _refuse(model: Any, head: Any) -> None:
    reason = None
    if getattr(model, "lm_head", None) is not None:
        reason = "its head is an lm_head with a bias or layers of its own; GPT, Mamba and Hybrid models are supported"
    elif head is None:
        return
    elif type(model).compute_language_model_loss is not language_module().compute_language_model_loss:
        reason = "its class has a compute_language_model_loss of its own, which would not be called"
    elif "labels" not in inspect.signature(type(model).forward).parameters:
        reason = "its forward has no argument 'labels'"
    reason = reason or reason_against(head, model.config)
    if reason is not None:
        raise ValueError(f"cce_dist cannot compute the loss of {type(model).__name__}: {reason}")


def reason_against(head: Any, config: Any) -> str | None:
    """Return why a model's ``output_layer`` cannot be taken over, or None."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    if not isinstance(head, ColumnParallelLinear):
        return f"its output_layer is a {type(head).__name__}, not tensor_parallel.ColumnParallelLinear"
    plain = ColumnParallelLinear.forward, Head.forward
    if "forward" in vars(head) or type(head).forward not in plain:
        return "its output_layer has a forward of its own, whose effect on the logits would be lost"
    if head.bias is not None:
        return "its output_layer has a bias"
    if config.defer_embedding_wgrad_compute:
        return "defer_embedding_wgrad_compute keeps the logits' gradients of all microbatches, which are never there"
    if getattr(head, "gtp_remat_size", 1) > 1:
        return "its output_layer's weight is split over a gtp_remat group besides the tensor-parallel one"
    return None


def heads_of(model: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each language model in a model or in a list of models, and its head; None on a pipeline stage without a head."""
    from megatron.core.transformer.module import MegatronModule

    base = language_module()
    for chunk in model if isinstance(model, (list, tuple)) else [model]:
        parts = list(chunk.modules()) if isinstance(chunk, nn.Module) else []
        if not any(isinstance(part, MegatronModule) for part in parts):
            raise TypeError(f"expected a model of megatron-core, got {type(chunk).__name__}")
        yield from ((part, getattr(part, "output_layer", None)) for part in parts if isinstance(part, base))


def language_module() -> Any:
    """Return Megatron's ``LanguageModule``. Raise ImportError unless it has the methods that are replaced."""
    try:
        import megatron.core
        from megatron.core.models.common.language_module.language_module import LanguageModule
    except ImportError as error:
        raise ImportError(f"cce_dist needs megatron-core >= 0.12 (pip install megatron-core): {error}") from error
    for name in ("setup_embeddings_and_output_layer", "compute_language_model_loss"):
        if not callable(getattr(LanguageModule, name, None)):
            version = getattr(megatron.core, "__version__", "of unknown version")
            raise ImportError(f"cce_dist looked for LanguageModule.{name}, which megatron-core {version} does not have")
    return LanguageModule


def call_of(head: Any, weight: Tensor | None) -> tuple[Tensor, dict[str, Any]]:
    """Return the weight of a ``ColumnParallelLinear``, and the keyword arguments that its layout needs."""
    whole: Tensor = head.weight if weight is None else weight
    main_grad = None
    if torch.is_grad_enabled() and whole.requires_grad and head.gradient_accumulation_fusion:
        # Megatron-FSDP allocates its buffer during backward, and copies an ordinary gradient there.
        main_grad = None if hasattr(whole, "__fsdp_param__") else getattr(whole, "main_grad", None)
    return whole, {
        "tp_group": _tp_group(head),
        "sequence_parallel": head.sequence_parallel,
        "main_grad": main_grad,
        "input_grad": "summed" if head.sequence_parallel or head.allreduce_dgrad else "partial",
    }


def _tp_group(head: Any) -> dist.ProcessGroup:
    group: Any = getattr(head, "tp_group", None)
    if group is None:  # megatron-core 0.12
        from megatron.core import parallel_state

        group = parallel_state.get_tensor_model_parallel_group()
    return group


def _is_first_replica() -> bool:
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():  # the model got its groups in a pg_collection
        return True
    return parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
