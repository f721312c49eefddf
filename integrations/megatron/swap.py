"""convert and revert: a built model's head and the model itself, put into subclasses of their own classes."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cce_dist.integrations.megatron.loss import Options, shard_of, vocab_parallel_loss, vocab_parallel_max

FLAG = "cce"  # the value of cross_entropy_fusion_impl that means us


def convert(model: Any, options: Options | None = None) -> Any:
    """Have a built model compute its loss from hidden states.

    Nothing else of it changes: its parameters, their names, ``state_dict`` and ``sharded_state_dict`` stay. A stage without
    a head is left alone, so every rank makes the same call. Best before DDP or FSDP wraps the model; after works, too, but
    FSDP2 shards modules by class.

    Args:
        model: A language model of megatron-core (GPT, Mamba, Hybrid), one that contains one, wrapped in DDP and
            Float16Module or not; or a list of them, as of virtual pipeline stages.
        options: See ``Options``. On a converted model None changes nothing, others replace those it has.

    Returns:
        ``model``, so that a builder or a ``pre_wrap_hook`` can return the call's result.

    Raises:
        ValueError: The head is one that cannot be taken over; the message says why.
        TypeError: There is no model of megatron-core in it.
        ImportError: megatron-core is missing, or has not the names that this module builds on.
    """
    for part in _language_models(model):
        head = getattr(part, "output_layer", None)
        if isinstance(head, _Head):
            if options is not None:
                head.cce_options = options
            continue
        _refuse(part, head)
        if head is None:
            continue
        options_here = options or Options()
        shard_of(head.output_size_per_partition, _tp_group(head), options_here.vocab_size)
        head.__class__ = _head_class(type(head))
        head.cce_options, head.cce_deferring = options_here, False
        part.__class__ = _model_class(type(part))
    return model


def revert(model: Any) -> Any:
    """Undo ``convert``, and return ``model``."""
    for part in _language_models(model):
        head = getattr(part, "output_layer", None)
        if isinstance(head, _Head):
            if type(head).__mro__[1] is not _Head or type(part).__mro__[1] is not _Model:
                raise ValueError(
                    "this model's classes were changed again since convert(), by FSDP2 say: revert it before"
                )
            del head.cce_options, head.cce_deferring
            head.__class__, part.__class__ = type(head).__mro__[2], type(part).__mro__[2]
    return model


class DeferredLogits:
    """Logits that nobody has computed: what a head was asked from, until it is known what for.

    They can be scaled (MuP), give their largest element (the acceptance rate of MTP) and their loss; anything else raises,
    rather than compute all logits unseen.
    """

    def __init__(
        self,
        head: Any,
        hidden: Tensor,
        weight: Tensor | None,
        sequence_parallel: bool,
        gathered: bool,
        scale: float = 1.0,
    ) -> None:
        self._asked = (head, hidden, weight, sequence_parallel, gathered)
        self._scale = scale

    def loss(self, labels: Tensor) -> Tensor:
        """Return the loss [b, s] of labels [b, s]."""
        head, _, _, sequence_parallel, _ = self._asked

        def loss(hidden: Tensor, weight: Tensor) -> Tensor:
            main_grad = None
            if torch.is_grad_enabled() and weight.requires_grad and head.gradient_accumulation_fusion:
                # Megatron-FSDP lays its buffer out during backward, and copies an ordinary gradient there.
                main_grad = None if hasattr(weight, "__fsdp_param__") else getattr(weight, "main_grad", None)
            return vocab_parallel_loss(
                hidden, weight, labels, _tp_group(head), sequence_parallel=sequence_parallel,
                input_grad="summed" if sequence_parallel or head.allreduce_dgrad else "partial",
                main_grad=main_grad, logit_scale=self._scale, options=head.cce_options,
            )  # fmt: skip

        return self._ask(loss)

    def max(self, dim: int) -> tuple[Tensor, Tensor]:
        """Return the largest logits and their places, [s, b] each."""
        head, _, _, sequence_parallel, gathered = self._asked
        if dim != -1:
            raise TypeError(f"logits that are not computed have a largest element along dim -1 alone, not {dim}")

        def largest(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            values, indices = vocab_parallel_max(
                hidden, weight, _tp_group(head), sequence_parallel=sequence_parallel, gathered=gathered,
                options=head.cce_options,
            )  # fmt: skip
            return values * self._scale, indices

        return self._ask(largest)

    def argmax(self, dim: int) -> Tensor:
        """Return the place of the largest logits, [s, b]."""
        return self.max(dim)[1]

    def size(self, dim: int) -> int:
        """Return the number of logits of a token on this rank."""
        head, _, _, _, gathered = self._asked
        if dim != -1:
            raise TypeError(f"logits that are not computed have a size along dim -1 alone, not {dim}")
        return head.output_size if gathered else head.output_size_per_partition

    def __mul__(self, scale: float) -> DeferredLogits:
        if not isinstance(scale, (int, float)) or scale <= 0:
            raise TypeError(
                f"cce_dist: logits that are not computed are multiplied by positive numbers alone, not {scale!r}"
            )
        return DeferredLogits(*self._asked, scale=self._scale * scale)

    __rmul__ = __mul__

    def _ask(self, what: Callable[[Tensor, Tensor], Any]) -> Any:
        head, hidden, weight, *_ = self._asked
        return head(hidden, weight=weight, cce_compute=what)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"cce_dist: {name!r} of logits that are not computed; a model without labels computes them"
        )

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function in (torch.argmax, torch.max):
            return getattr(args[0], function.__name__)(*args[1:], **(kwargs or {}))
        raise TypeError(
            f"cce_dist: {getattr(function, '__name__', function)} of logits that are not computed; "
            "a model without labels computes them"
        )


class _Head:
    """What ``convert`` puts before the class of an ``output_layer``."""

    cce_options: Options
    cce_deferring: bool

    def forward(
        self: Any,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        cce_compute: Callable[[Tensor, Tensor], Any] | None = None,
    ) -> Any:
        if cce_compute is not None:
            return cce_compute(input_, self.weight if weight is None else weight)
        if not self.cce_deferring:
            return super().forward(input_, weight, runtime_gather_output)  # pyright: ignore[reportAttributeAccessIssue]
        gathered = self.gather_output if runtime_gather_output is None else runtime_gather_output
        return DeferredLogits(self, input_, weight, self.sequence_parallel, gathered), None


class _Model:
    """What ``convert`` puts before the class of a model."""

    def compute_language_model_loss(self: Any, labels: Tensor, logits: Tensor | DeferredLogits) -> Tensor:
        if isinstance(logits, DeferredLogits):
            return logits.loss(labels)
        compute = super().compute_language_model_loss  # pyright: ignore[reportAttributeAccessIssue]
        if self.config.cross_entropy_fusion_impl != FLAG:
            return compute(labels, logits)
        # Real logits, in reinforcement learning say: Megatron knows no fusion of our name.
        fusion = self.config.cross_entropy_loss_fusion
        self.config.cross_entropy_loss_fusion = False
        try:
            return compute(labels, logits)
        finally:
            self.config.cross_entropy_loss_fusion = fusion


@functools.cache
def _head_class(base: type) -> type:
    # Megatron-FSDP tells how a parameter is sharded from the name of its module's class.
    return type(base.__name__, (_Head, base), {"__module__": base.__module__, "__qualname__": base.__qualname__})


@functools.cache
def _model_class(base: type) -> type:
    model_class = type(
        base.__name__, (_Model, base), {"__module__": base.__module__, "__qualname__": base.__qualname__}
    )
    # The schedule that overlaps expert-parallel communication calls _postprocess alone (GPT, 0.13 on).
    for name in ("forward", "_postprocess"):
        parameters = inspect.signature(getattr(base, name, lambda: None)).parameters
        if "labels" in parameters:
            position = list(parameters).index("labels") - 1
            setattr(model_class, name, _deferring(model_class, name, getattr(base, name), position))
    return model_class


def _deferring(model_class: type, name: str, function: Callable, position: int) -> Callable:
    """Return the method ``name`` such that the head defers its logits during a call with labels, argument ``position``."""

    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        labels = args[position] if len(args) > position else kwargs.get("labels")
        inherited = getattr(super(model_class, self), name)
        head = self.output_layer
        if not isinstance(head, _Head):
            warnings.warn(
                f"cce_dist: the head was wrapped in a {type(head).__name__}; its logits are computed", stacklevel=3
            )
            return inherited(*args, **kwargs)
        # Logits that someone else wants to see are computed: by a loss of the instance's own, or written to disk.
        wanted = "compute_language_model_loss" in vars(self) or getattr(self.config, "config_logger_dir", "")
        before = head.cce_deferring
        head.cce_deferring = labels is not None and not wanted
        try:
            return inherited(*args, **kwargs)
        finally:
            head.cce_deferring = before

    return method


def _refuse(model: Any, head: Any) -> None:
    """Raise if this model's head cannot be taken over."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    reason = None
    if getattr(model, "lm_head", None) is not None:
        reason = "its head is an lm_head with a bias or layers of its own; GPT, Mamba and Hybrid models are supported"
    elif head is None:
        return
    elif not isinstance(head, ColumnParallelLinear):
        reason = f"its output_layer is a {type(head).__name__}, not tensor_parallel.ColumnParallelLinear"
    elif head.bias is not None:
        reason = "its output_layer has a bias"
    elif "labels" not in inspect.signature(type(model).forward).parameters:
        reason = "its forward has no argument 'labels'"
    elif model.config.defer_embedding_wgrad_compute:
        reason = "defer_embedding_wgrad_compute keeps the logits' gradients of all microbatches, which are never there"
    elif getattr(head, "gtp_remat_size", 1) > 1:
        reason = "its output_layer's weight is split over a gtp_remat group besides the tensor-parallel one"
    if reason is not None:
        raise ValueError(f"cce_dist cannot compute the loss of {type(model).__name__}: {reason}")


def _language_models(model: Any) -> Iterator[Any]:
    """Yield the language models in a model, however wrapped, or in each of a list."""
    from megatron.core.transformer.module import MegatronModule

    base = language_module()
    for chunk in model if isinstance(model, (list, tuple)) else [model]:
        parts = list(chunk.modules()) if isinstance(chunk, nn.Module) else []
        if not any(isinstance(part, MegatronModule) for part in parts):
            raise TypeError(f"expected a model of megatron-core, got {type(chunk).__name__}")
        yield from (part for part in parts if isinstance(part, base))


def language_module() -> Any:
    """Return Megatron's ``LanguageModule``, with the names that this module builds on."""
    try:
        import megatron.core
        from megatron.core.models.common.language_module.language_module import LanguageModule
    except ImportError as error:
        raise ImportError(
            f"cce_dist needs megatron-core >= 0.12 (pip install 'cce-dist[megatron]'): {error}"
        ) from error
    for name in ("setup_embeddings_and_output_layer", "compute_language_model_loss"):
        if not callable(getattr(LanguageModule, name, None)):
            version = getattr(megatron.core, "__version__", "of unknown version")
            raise ImportError(f"cce_dist looked for LanguageModule.{name}, which megatron-core {version} does not have")
    return LanguageModule


def _tp_group(head: Any) -> dist.ProcessGroup:
    group: Any = getattr(head, "tp_group", None)
    if group is None:  # megatron-core 0.12 hands the head none
        from megatron.core import parallel_state

        group = parallel_state.get_tensor_model_parallel_group()
    return group
