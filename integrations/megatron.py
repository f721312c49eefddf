"""Megatron-core: a model's loss straight from hidden states, its parameters, checkpoints and schedules left as they are.

Since 0.12 every language model of Megatron ends in two calls, once for its loss and once for each depth of multi-token
prediction (MTP):

    logits, _ = self.output_layer(hidden, weight=..., runtime_gather_output=...)
    loss = self.compute_language_model_loss(labels, logits)

``convert`` puts ``output_layer`` and the model into subclasses of their own classes. While a model has labels, the first
call returns ``DeferredLogits``, which remember what they were asked from; the second asks ``output_layer`` again, now for the
loss, and through ``__call__``: the hooks that gather parameters just in time thus run around the real use of the weight. A
model without labels, in inference say, computes the logits that it always did.

Ways in: ``convert(model)``; ``install()`` and the configuration ``cross_entropy_fusion_impl="cce"``; or, for a training script
as it is, ``python -m cce_dist.integrations.megatron SCRIPT ...``.

Letters: s sequence (of this context-parallel rank), b sequences of a microbatch, h hidden size, tp the tensor-parallel size,
V the vocabulary with its padding.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from cce_dist import GradFilter, VocabShard, linear_cross_entropy, merge

FLAG = "cce"  # the value of cross_entropy_fusion_impl that means us
FILTERS = ("off", "compensated", "plain")
IGNORED = -100


@dataclasses.dataclass(frozen=True)
class Options:
    """How a converted model computes its loss.

    Args:
        grad_filter: None for exact gradients, or how to filter them.
        vocab_size: True size of the vocabulary. Rows behind it, with which Megatron pads, then count as -inf and get no
            gradient. None is Megatron's own loss: padding rows take part in the softmax as any other.
        backend, workspace_bytes: As in ``linear_cross_entropy``.
    """

    grad_filter: GradFilter | None = None
    vocab_size: int | None = None
    backend: str = "auto"
    workspace_bytes: int = 256 << 20

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Options:
        """Read the flags of ``add_arguments``."""
        grad_filter = None
        if args.cce_filter != "off":
            grad_filter = GradFilter(eps=args.cce_filter_eps, compensate=args.cce_filter == "compensated")
        return cls(grad_filter, args.cce_vocab_size)


def vocab_parallel_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    tp_group: dist.ProcessGroup | None,
    *,
    sequence_parallel: bool = False,
    input_grad: str = "summed",
    main_grad: Tensor | None = None,
    logit_scale: float = 1.0,
    options: Options | None = None,
) -> Tensor:
    """Cross-entropy of every token, in Megatron's layout; what ``compute_language_model_loss`` returns.

    Args:
        hidden: [s, b, h], or with ``sequence_parallel`` [s/tp, b, h]; cast to the weight's dtype.
        weight: [V/tp, h] this rank's rows of the head.
        labels: [b, s] ids. Where one is outside the vocabulary, as SFT's -100, the loss is 0 and gives no gradient.
        tp_group: The tensor-parallel group; None or a group of one: the whole vocabulary is here.
        sequence_parallel: hidden is this rank's slice of the sequence.
        input_grad: "summed" over tp_group, or "partial": this rank's part, for a caller that sums it.
        main_grad: [V/tp, h] buffer, ``weight.main_grad``, that backward adds the weight's gradient into. ``weight`` then
            gets what Megatron's fused accumulation gives it: a dummy, and ``grad_added_to_main_grad`` set.
        logit_scale: Multiplies the logits (MuP).
        options: See ``Options``.

    Returns:
        [b, s] fp32, neither masked nor reduced; the same bits on every rank of the group.

    Sharding, Communication: As ``linear_cross_entropy``: one all-gather in forward, one reduction of d_hidden in backward.

    Raises:
        ValueError: ``options.vocab_size`` is more than the rows there are; and what ``linear_cross_entropy`` raises.
    """
    options = options or Options()
    shard = _shard(weight.shape[0], tp_group, options.vocab_size)
    labels = labels.t()
    labels = labels.masked_fill((labels < 0) | (labels >= shard.vocab_size), IGNORED)
    hidden = hidden.to(weight.dtype)
    if main_grad is not None:
        weight = _GradientInMainGrad.apply(weight)
    loss = linear_cross_entropy(
        hidden, weight, labels, ignore_index=IGNORED, reduction="none", logit_scale=logit_scale, shard=shard,
        sequence_parallel=sequence_parallel and shard.group is not None, input_grad=input_grad,
        grad_filter=options.grad_filter, backend=options.backend, workspace_bytes=options.workspace_bytes,
        grad_weight_out=main_grad,
    )  # fmt: skip
    return loss.t().contiguous()


def vocab_parallel_max(
    hidden: Tensor,
    weight: Tensor,
    tp_group: dist.ProcessGroup | None,
    *,
    sequence_parallel: bool = False,
    gathered: bool = False,
    options: Options | None = None,
) -> tuple[Tensor, Tensor]:
    """Largest logit of every token and where it is, from as many logits at a time as the workspace holds.

    Args:
        hidden, weight, tp_group, sequence_parallel, options: As in ``vocab_parallel_loss``.
        gathered: Over the whole vocabulary; False: over this rank's rows, counted from its first.

    Returns:
        Values [s, b] in the weight's dtype and indices [s, b] int64; not differentiable.

    Communication: With ``sequence_parallel`` an all-gather of hidden, with ``gathered`` two of one number per token.
    """
    options = options or Options()
    shard = _shard(weight.shape[0], tp_group, options.vocab_size)
    with torch.no_grad():
        hidden = hidden.to(weight.dtype)
        if sequence_parallel and shard.group is not None:
            hidden = merge.gather_sequence(hidden, shard.group)
        tokens = max(1, options.workspace_bytes // (weight.shape[0] * weight.element_size()))
        parts = []
        for part in hidden.flatten(0, 1).split(tokens):
            logits = F.linear(part, weight)
            logits[:, shard.num_valid :] = -torch.inf
            parts.append(logits.max(dim=-1))
        values, indices = (torch.cat(each).view(hidden.shape[:2]) for each in zip(*parts, strict=True))
        if gathered and shard.group is not None:
            values, indices = (
                merge.gather_sequence(each[None], shard.group) for each in (values, indices + shard.start)
            )
            winner = values.argmax(0, keepdim=True)
            values, indices = values.gather(0, winner)[0], indices.gather(0, winner)[0]
    return values, indices


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
        _shard(head.output_size_per_partition, _tp_group(head), options_here.vocab_size)
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


def install(options: Options | None = None, every_model: bool = False) -> None:
    """Make ``cross_entropy_fusion_impl="cce"`` mean this module, in ``TransformerConfig`` and on the command line.

    One function of Megatron is wrapped, ``LanguageModule.setup_embeddings_and_output_layer``, with which every language model
    ends its construction; and "cce" is added to the values of ``cross_entropy_fusion_impl``, from which the argument parser
    takes its choices (Megatron-LM >= 0.16; before that it is ``add_arguments`` that adds it). The value counts with or
    without ``cross_entropy_loss_fusion``, which ``--deterministic-mode`` refuses to see; this loss is deterministic. A
    second call replaces the options.

    Args:
        options: Of every model that is built from now on. None: the flags of ``add_arguments`` where Megatron's parser has
            read them, else the defaults.
        every_model: Convert every language model, whatever its configuration says.

    Raises:
        ImportError: megatron-core is missing, or has not the names that this module builds on.
    """
    from megatron.core.model_parallel_config import ModelParallelConfig

    language_module = _language_module()
    uninstall()
    original = language_module.setup_embeddings_and_output_layer

    @functools.wraps(original)
    def setup_embeddings_and_output_layer(self: Any) -> None:
        original(self)
        if every_model or self.config.cross_entropy_fusion_impl == FLAG:
            convert(self, options or _options_of_the_command_line())

    wrapped: Any = setup_embeddings_and_output_layer
    wrapped.cce_original = original
    language_module.setup_embeddings_and_output_layer = wrapped
    field = ModelParallelConfig.__dataclass_fields__["cross_entropy_fusion_impl"]
    values = get_args(field.type)
    if values and FLAG not in values:
        field.type = Literal[(*values, FLAG)]  # pyright: ignore[reportAttributeAccessIssue]
        ModelParallelConfig.__annotations__["cross_entropy_fusion_impl"] = field.type


def uninstall() -> None:
    """Undo ``install``; models that are converted stay so."""
    language_module = _language_module()
    wrapped = language_module.setup_embeddings_and_output_layer
    language_module.setup_embeddings_and_output_layer = getattr(wrapped, "cce_original", wrapped)


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--cce-...`` to a parser, and return it: an ``extra_args_provider`` for Megatron's ``pretrain``."""
    group = parser.add_argument_group("cce_dist")
    group.add_argument("--cce-filter", choices=FILTERS, default="off", help="which gradient tiles to drop, and how")
    group.add_argument("--cce-filter-eps", type=float, default=2**-12, help="softmax below which a tile is dropped")
    group.add_argument(
        "--cce-vocab-size", type=int, metavar="V", help="true size of the vocabulary: mask the rows that pad it"
    )
    for action in parser._actions:
        if action.dest == "cross_entropy_fusion_impl" and action.choices and FLAG not in action.choices:
            action.choices = [*action.choices, FLAG]
    return parser


def main(argv: list[str] | None = None) -> None:
    """Run a training script with every language model that it builds converted."""
    parser = argparse.ArgumentParser(
        prog="python -m cce_dist.integrations.megatron",
        description="Run a training script of Megatron with this loss. Flags before the script are read here, the rest is its.",
        allow_abbrev=False,
    )
    add_arguments(parser)
    parser.add_argument("script", type=Path, help="pretrain_gpt.py, say")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its usual arguments")
    args = parser.parse_args(argv)
    if not args.script.is_file():
        parser.error(f"no such script: {args.script}")
    try:
        install(Options.from_args(args), every_model=True)
    except (ImportError, ValueError) as error:
        parser.error(str(error))
    sys.argv = [str(args.script), *args.args]
    sys.path[0] = str(args.script.resolve().parent)  # as python itself does for a script
    runpy.run_path(str(args.script), run_name="__main__")


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


class _GradientInMainGrad(torch.autograd.Function):
    """The weight; its gradient, which backward has put into main_grad by then, becomes the dummy that Megatron expects.

    Its hooks must see a gradient when they overlap the reduction with backward, and a true one, zero, where the weight is
    the embedding's, too.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, _: None) -> Tensor | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        weight = ctx.weight
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)


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

    language_module = _language_module()
    for chunk in model if isinstance(model, (list, tuple)) else [model]:
        parts = list(chunk.modules()) if isinstance(chunk, nn.Module) else []
        if not any(isinstance(part, MegatronModule) for part in parts):
            raise TypeError(f"expected a model of megatron-core, got {type(chunk).__name__}")
        yield from (part for part in parts if isinstance(part, language_module))


def _language_module() -> Any:
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


def _shard(num_rows: int, tp_group: dist.ProcessGroup | None, vocab_size: int | None) -> VocabShard:
    rank, size = (0, 1) if tp_group is None else (tp_group.rank(), tp_group.size())
    padded = num_rows * size
    if vocab_size is not None and vocab_size > padded:
        raise ValueError(f"vocab_size {vocab_size}, but the head has {padded} rows")
    return VocabShard(rank * num_rows, (rank + 1) * num_rows, vocab_size or padded, tp_group if size > 1 else None)


def _options_of_the_command_line() -> Options | None:
    """Return the options that Megatron's parser has read, if ``add_arguments`` was its ``extra_args_provider``."""
    args: Any = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    return Options.from_args(args) if hasattr(args, "cce_filter") else None


if __name__ == "__main__":
    # As "python -m" runs it, this file is a module of its own, beside the one that others import.
    from cce_dist.integrations.megatron import main as run

    run()
