"""DeepSpeed: a model's loss straight from hidden states, asked for in ds_config, with the model's own code left as it is.

``initialize`` is ``deepspeed.initialize`` that also reads the section ``"cce_dist"``. It puts the model's head into a subclass
of its own class, which returns ``DeferredLogits``: not numbers, but what they were asked from. They go through the model's
own loss code: scaling, ``torch.tanh`` (a softcap), shifting, flattening, in the end ``F.cross_entropy``. That call is where
the loss is computed, by asking the head again, through ``__call__``, so that ZeRO-3's hooks gather its weight around the real
use. Whatever else the code would do with logits raises, rather than compute them unseen. So scale, softcap, ignored label,
reduction and weights of tokens come from where the user wrote them, and the section holds the rest.

In a pipeline the last layer returns the hidden states themselves, so that activation checkpoints find a tensor, and
``loss_fn`` is given ``DeferredLogits`` of them. A head whose vocabulary is split over the model axis is a ``CCEHead``
(``CCEHeadSpec`` in a list of layers), tied to a ``CCEEmbedding`` if need be; AutoTP splits a head by itself
(``"vocab_parallel_lm_head": true``).

Logits are deferred wherever the model is in training or has been given labels, and in a pipeline wherever a loss is computed;
in inference they are what they always were. Parameters, their names and checkpoints do not change.

Letters: D hidden size, V the vocabulary, V_r this rank's rows of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from cce_dist import GradFilter, VocabShard, linear_cross_entropy
from cce_dist.loss import BACKENDS, LinearCrossEntropyOutput
from cce_dist.shard import even_rows

SECTION = "cce_dist"
FILTERS = ("off", "compensated", "plain")
REDUCE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NUMBER, WHOLE, TEXT, SWITCH = "a number", "a whole number", "a string", "true or false"
KEYS = {
    "enabled": SWITCH, "filter": TEXT, "filter_eps": NUMBER, "filter_hidden": SWITCH, "filter_weight": SWITCH,
    "label_smoothing": NUMBER, "z_loss_weight": NUMBER, "backend": TEXT, "workspace_bytes": WHOLE, "reduce_dtype": TEXT,
    "head": TEXT, "sequence_mean": SWITCH, "report": SWITCH,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Options:
    """The section ``"cce_dist"`` of ds_config, checked. Its key ``enabled`` is required.

    Args:
        grad_filter: Keys ``filter`` ("off", "compensated", "plain"), ``filter_eps``, ``filter_hidden`` and ``filter_weight``.
            None for exact gradients.
        label_smoothing: Where the model's own call of ``F.cross_entropy`` says none.
        z_loss_weight, backend, workspace_bytes, reduce_dtype: As in ``linear_cross_entropy``.
        head: Name of the module that makes the logits; "" where it is an output embedding or called lm_head or embed_out.
        sequence_mean: A "mean" is over the tokens of the sequence-parallel group (Ulysses, ALST), and the loss is the same
            on its ranks. False: over this rank's tokens, DeepSpeed's convention, for code that weighs the ranks' losses.
        report: ``engine.get_additional_losses()`` says what the loss was made of: "nll", "z_loss" and "entropy", means over
            the tokens that are not ignored, and with a filter what it did, as ``FilterStats``, over the whole vocabulary. A
            pipeline prints and returns them as DeepSpeed has it: on every stage, means over microbatches and data-parallel
            ranks. Another model returns those of this rank's last loss. The entropy takes time.
    """

    grad_filter: GradFilter | None = None
    label_smoothing: float = 0.0
    z_loss_weight: float = 0.0
    backend: str = "auto"
    workspace_bytes: int = 256 << 20
    reduce_dtype: torch.dtype | None = None
    head: str = ""
    sequence_mean: bool = False
    report: bool = False

    def reported(self) -> tuple[str, ...]:
        """Return the names of what is reported."""
        stats = () if self.grad_filter is None else ("kept_tiles", "dropped_mass_mean", "dropped_mass_max_of_shards")
        return ("nll", "z_loss", "entropy", *stats) if self.report else ()

    @classmethod
    def from_config(cls, config: dict) -> Options | None:
        """Read the section; None where it is absent or not enabled.

        Raises:
            ValueError: An unknown key, a value of another type or out of range; the message names the key.
        """
        if SECTION not in config:
            return None
        section = config[SECTION]
        if not isinstance(section, dict):
            raise ValueError(f'ds_config: "{SECTION}" must be a section {{...}}, got {section!r}')
        for key, value in section.items():
            if key not in KEYS:
                raise ValueError(f'ds_config: "{SECTION}" has no key "{key}"; it has {", ".join(KEYS)}')
            if not _is(KEYS[key], value):
                raise ValueError(f'ds_config: "{SECTION}.{key}" must be {KEYS[key]}, got {value!r}')
        for key, allowed in (("filter", FILTERS), ("backend", BACKENDS), ("reduce_dtype", REDUCE_DTYPES)):
            if section.get(key, next(iter(allowed))) not in allowed:
                raise ValueError(
                    f'ds_config: "{SECTION}.{key}" must be one of {", ".join(allowed)}, got {section[key]!r}'
                )
        for key, fits, what in (
            ("filter_eps", lambda x: 0 <= x < 1, "in [0, 1)"),
            ("label_smoothing", lambda x: 0 <= x <= 1, "in [0, 1]"),
            ("z_loss_weight", lambda x: 0 <= x < float("inf"), "finite and not negative"),
            ("workspace_bytes", lambda x: x > 0, "positive"),
        ):
            if key in section and not fits(section[key]):
                raise ValueError(f'ds_config: "{SECTION}.{key}" must be {what}, got {section[key]!r}')
        if "enabled" not in section:
            raise ValueError(f'ds_config: "{SECTION}" needs the key "enabled", true or false')
        if not section["enabled"]:
            return None
        rest = {key: value for key, value in section.items() if key != "enabled" and not key.startswith("filter")}
        if "reduce_dtype" in rest:
            rest["reduce_dtype"] = REDUCE_DTYPES[rest["reduce_dtype"]]
        if section.get("filter", "off") != "off":
            given = {key.removeprefix("filter_"): section[key] for key in section if key.startswith("filter_")}
            rest["grad_filter"] = GradFilter(**given, compensate=section["filter"] == "compensated")
        return cls(**rest)


def initialize(*args: Any, **kwargs: Any) -> tuple:
    """Call ``deepspeed.initialize``; where ds_config enables it, compute the model's loss from hidden states.

    Arguments and result are those of ``deepspeed.initialize``, and without ``"cce_dist": {"enabled": true}`` so is all else.
    Loss code then finds ``DeferredLogits`` where it found logits, and its loss is fp32.

    Sharding: The weight stays as DeepSpeed or the model keeps it; hidden states are replicated over the model axis.
    Communication: That of ``linear_cross_entropy`` over the model axis; ``sequence_mean`` adds two all-reduces of a number.

    Raises:
        ValueError: The section is wrong, or the model has no head that can be taken over; before anything is built.
        ImportError: deepspeed is missing.
    """
    deepspeed = _deepspeed()
    given = inspect.signature(deepspeed.initialize).bind_partial(*args, **kwargs).arguments
    sources = (given.get("config"), given.get("config_params"), getattr(given.get("args"), "deepspeed_config", None))
    config: Any = next((source for source in sources if source is not None), {})
    if not isinstance(config, dict):
        from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config

        config = load_ds_config(config)
    options = Options.from_config(config)
    if options is None:
        return deepspeed.initialize(*args, **kwargs)
    _check(given.get("model"), config, given.get("mpu"), options)
    result = deepspeed.initialize(*args, **kwargs)
    convert(result[0], options)
    return result


def convert(engine: Any, options: Options | None = None) -> Any:
    """Have the model of an engine compute its loss from hidden states, and return the engine; what ``initialize`` does.

    Raises:
        ValueError: The model has no head that can be taken over.
    """
    from deepspeed.utils import log_dist

    options = options or Options()
    tasks = _convert_pipeline(engine, options) if _is_pipeline(engine.module) else _convert_model(engine, options)
    engine.cce_heads = [name for name, _ in tasks]
    first = dist.get_process_group_ranks(engine.seq_data_parallel_group)[0]  # one line a shard
    for name, task in tasks:
        rows = f"rows [{task.shard.start}, {task.shard.stop}) of {task.shard.vocab_size}"
        log_dist(f"cce_dist: the loss comes from hidden states; head {name}, {rows}, {options}", ranks=[first])
    return engine


def require(engine: Any) -> None:
    """Raise unless this engine's loss comes from hidden states: plain ``deepspeed.initialize`` ignores the section silently.

    Raises:
        RuntimeError: ``initialize`` of this module did not make the engine, or its ds_config does not enable us.
    """
    if not hasattr(engine, "cce_heads"):
        raise RuntimeError(
            f'no head of this engine was converted: call cce_dist.integrations.deepspeed.initialize, with "{SECTION}": '
            '{"enabled": true} in ds_config'
        )


class DeferredLogits:
    """Logits that nobody has computed: [..., V], as ``post * tanh(pre * head(hidden))`` or ``pre * head(hidden)``.

    Code may read shape, dtype and device, change the leading dimensions, cast, scale by a number, take ``torch.tanh`` once and
    ``F.cross_entropy`` with class ids. Anything else raises.
    """

    def __init__(self, head: Any, task: _Task, hidden: Tensor, pre: float = 1.0, post: float | None = None) -> None:
        self._head, self._task, self._hidden, self._pre, self._post = head, task, hidden, pre, post
        self._made_with_grad = torch.is_grad_enabled()

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self._hidden.shape[:-1], self._task.shard.vocab_size))

    @property
    def dtype(self) -> torch.dtype:
        return self._hidden.dtype

    @property
    def device(self) -> torch.device:
        return self._hidden.device

    @property
    def ndim(self) -> int:
        return self._hidden.dim()

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    # The loss is computed in fp32 from what the products accumulate, whatever the dtype that its caller casts to.
    def float(self) -> DeferredLogits:
        return self

    def to(self, *_: Any, **__: Any) -> DeferredLogits:
        return self

    def contiguous(self) -> DeferredLogits:
        return self

    def view(self, *shape: Any) -> DeferredLogits:
        """Change the leading dimensions; the last stays the vocabulary."""
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        vocab_size = self.shape[-1]
        if sizes[-1] == -1 and -1 not in sizes[:-1]:
            leading = torch.Size(sizes[:-1]).numel()
            sizes = (*sizes[:-1], vocab_size if leading * vocab_size == self.shape.numel() else -1)
        if sizes[-1] != vocab_size:
            raise ValueError(f"these logits have {vocab_size} columns, of which view{sizes} would make {sizes[-1]}")
        return self._with(hidden=self._hidden.reshape(*sizes[:-1], self._hidden.shape[-1]))

    reshape = view

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> DeferredLogits:
        if end_dim % self.ndim == self.ndim - 1:
            raise self._wanted("flatten over the vocabulary")
        return self._with(hidden=self._hidden.flatten(start_dim, end_dim))

    def __getitem__(self, index: Any) -> DeferredLogits:
        parts = index if isinstance(index, tuple) else (index,)
        sizes = [p.dim() if isinstance(p, Tensor) and p.dtype == torch.bool else 1 for p in parts if p is not Ellipsis]
        reaches_last = sum(sizes) >= self.ndim or any(p is Ellipsis for p in parts[:-1])
        if any(p is None for p in parts) or (
            reaches_last and not (isinstance(parts[-1], slice) and parts[-1] == slice(None))
        ):
            raise self._wanted("an index into the vocabulary, or None,")
        return self._with(hidden=self._hidden[index])

    def __mul__(self, factor: Any) -> DeferredLogits:
        if not isinstance(factor, (int, float)):
            raise self._wanted(f"multiplication by a {type(factor).__name__}")
        if self._post is None:
            return self._with(pre=self._pre * factor)
        return self._with(post=self._post * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> DeferredLogits:
        return self * (1 / divisor) if isinstance(divisor, (int, float)) else self * divisor

    def tanh(self) -> DeferredLogits:
        if self._post is not None:
            raise self._wanted("a second tanh")
        return self._with(post=1.0)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        deferred = next((value for value in (*args, *(kwargs or {}).values()) if isinstance(value, cls)), None)
        if func is F.cross_entropy and deferred is not None:
            return _cross_entropy(*args, **(kwargs or {}))
        if func in (torch.tanh, torch.Tensor.tanh) and deferred is not None:
            return deferred.tanh()
        raise cls._wanted(getattr(func, "__name__", str(func)))

    def __getattr__(self, name: str) -> Any:
        raise self._wanted(name)

    @staticmethod
    def _wanted(what: str) -> AttributeError:
        return AttributeError(
            f"cce_dist: {what} of logits that are not computed: in training, or where there are labels, the loss comes from "
            "hidden states, by F.cross_entropy of class ids; for logits call the model in eval(), without labels"
        )

    def _with(self, **changes: Any) -> DeferredLogits:
        new = DeferredLogits.__new__(DeferredLogits)
        new.__dict__.update(self.__dict__)
        new.__dict__.update({f"_{name}": value for name, value in changes.items()})
        return new

    def _loss(self, target: Tensor, **call: Any) -> Tensor:
        task = self._task
        if torch.is_grad_enabled() and not self._made_with_grad:
            raise RuntimeError(
                "cce_dist: the head ran without gradients, inside a reentrant activation checkpoint or no_grad: its loss "
                "would have none; leave the head out of it"
            )
        if not task.pipeline and not task.inside:
            raise RuntimeError(
                "cce_dist: the loss must be computed in the model's forward, where ZeRO gathers its weight and DeepSpeed sees "
                "its backward begin; return the loss from there"
            )
        if self._post is not None and self._post <= 0:
            raise ValueError(f"cce_dist: a softcap must be positive, got {self._post}")
        softcap, scale = self._post, self._pre if self._post is None else self._pre * self._post

        def ask(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return task.loss(hidden, weight, bias, target, logit_scale=scale, softcap=softcap, **call)

        return self._head(self._hidden, ask)


class CCEHead(nn.Linear):
    """The rows of a language model's head that this rank of the model axis holds: hidden [..., D] -> logits.

    In a model that ``initialize`` has not converted: local logits if the vocabulary is not split, else an error.
    The initial rows differ between ranks that are seeded alike, and depend on the number of ranks.

    Args:
        hidden_size: D.
        vocab_size: V. Shards are of equal size, but the last ones, which are smaller where the ranks do not divide it.
        tp_rank, tp_size: Which of how many shards this is.
        bias, device, dtype: As of ``nn.Linear``.
    """

    def __init__(
        self, hidden_size: int, vocab_size: int, *, tp_rank: int = 0, tp_size: int = 1, bias: bool = False,
        device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.rows = _Rows(vocab_size, tp_rank, tp_size)
        super().__init__(hidden_size, self.rows.count, bias=bias, device=device, dtype=dtype)
        self.rows.mark(self)

    def reset_parameters(self) -> None:
        with self.rows.seeded():
            super().reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        self.rows.require_group()
        return super().forward(input)


class CCEEmbedding(nn.Embedding):
    """The input embedding with the same rows as a ``CCEHead``, to tie the two: ids [...] of the whole vocabulary -> [..., D].

    Communication: Forward all-reduces its result over the model axis; backward makes no collective.
    """

    def __init__(
        self, hidden_size: int, vocab_size: int, *, tp_rank: int = 0, tp_size: int = 1, device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.rows = _Rows(vocab_size, tp_rank, tp_size)
        super().__init__(self.rows.count, hidden_size, device=device, dtype=dtype)
        self.rows.mark(self)

    def reset_parameters(self) -> None:
        with self.rows.seeded():
            super().reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        group = self.rows.require_group()
        if group is None:
            return super().forward(input)
        local = input - self.rows.start
        elsewhere = (local < 0) | (local >= self.rows.count)
        if self.rows.count == 0:
            embedded = self.weight.new_zeros(*input.shape, self.embedding_dim) + 0 * self.weight.sum()
        else:
            embedded = super().forward(local.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0)
        return sum_over_shards(embedded, group)

    def logits(self, hidden: Tensor) -> Tensor:
        """This rank's logits [..., V_r] of a head tied to it."""
        return F.linear(hidden, self.weight)


def CCEHeadSpec(hidden_size: int, vocab_size: int, *, topology: Any = None, tied: str = "", **options: Any) -> Any:
    """``LayerSpec`` of a ``CCEHead``, the last layer of a ``PipelineModule``; a function that reads in the list as they do.

    Args:
        hidden_size, vocab_size: D, V.
        topology: The pipeline's; its axis "model" splits the vocabulary. None: not split.
        tied: Key of a ``CCEEmbeddingSpec`` earlier in the list, whose weight this uses.
        **options: Of ``CCEHead``: bias, device, dtype; of a tied one those of ``CCEEmbedding``.
    """
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    options |= _shard_of_topology(topology)
    if tied:
        return TiedLayerSpec(tied, CCEEmbedding, hidden_size, vocab_size, forward_fn=CCEEmbedding.logits, **options)
    return LayerSpec(CCEHead, hidden_size, vocab_size, **options)


def CCEEmbeddingSpec(hidden_size: int, vocab_size: int, *, topology: Any = None, tied: str, **options: Any) -> Any:
    """``TiedLayerSpec`` of a ``CCEEmbedding`` whose weight the ``CCEHeadSpec`` with the same key uses; arguments as there."""
    from deepspeed.pipe import TiedLayerSpec

    return TiedLayerSpec(tied, CCEEmbedding, hidden_size, vocab_size, **options, **_shard_of_topology(topology))


def loss_fn(logits: Any, labels: Tensor) -> Tensor:
    """Mean cross-entropy of logits [..., V] and labels [...]: a ``loss_fn`` for a ``PipelineModule``, dense or deferred."""
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1))


@dataclasses.dataclass(eq=False)
class _Task:
    """What a converted head has to know. Of its own identity: a copied model shares it."""

    options: Options
    shard: VocabShard
    sequence_group: dist.ProcessGroup | None = None
    sequence_scale: int = 1  # of gradients, see _sequence_group
    pipeline: bool = False
    inside: int = 0  # nested calls of the model's forward
    labels_given: bool = False  # to the last of them
    deferring: Callable[[], bool] = lambda: False
    reported: dict[str, Tensor] = dataclasses.field(default_factory=dict)  # of the last loss

    def loss(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *, reduction: str,
        label_smoothing: float, **call: Any,
    ) -> Tensor:  # fmt: skip
        options = self.options
        num_tokens = None
        if self.sequence_group is not None and reduction == "mean":
            num_tokens = (target != call["ignore_index"]).sum()
            dist.all_reduce(num_tokens, group=self.sequence_group)
            num_tokens.clamp_(min=1)
        output: Any = linear_cross_entropy(
            hidden, weight, target, linear_bias=bias, shard=self.shard, reduction=reduction, num_tokens=num_tokens,
            label_smoothing=label_smoothing or options.label_smoothing, z_loss_weight=options.z_loss_weight,
            reduce_dtype=options.reduce_dtype, grad_filter=options.grad_filter, backend=options.backend,
            workspace_bytes=options.workspace_bytes, return_aux=options.report, **call,
        )  # fmt: skip
        if options.report:
            self.report(output, target != call["ignore_index"])
        loss = output.loss if options.report else output
        if num_tokens is None:
            return loss
        whole = loss.detach().clone()
        dist.all_reduce(whole, group=self.sequence_group)
        part = self.sequence_scale * loss  # each rank differentiates its part of the mean
        return part + (whole - part.detach())

    @torch.no_grad()
    def report(self, output: LinearCrossEntropyOutput, valid: Tensor) -> None:
        """Keep what a loss was made of. Communication: with a filter, an all-gather of three numbers."""
        means = torch.stack([output.nll.sum(), output.z_loss.sum(), output.entropy.sum()]) / valid.sum().clamp(min=1)
        numbers = [*means]
        if output.filter_stats is not None:
            shards = [torch.stack(output.filter_stats)]
            if self.shard.group is not None:
                mine, shards = shards[0], [torch.empty_like(shards[0]) for _ in range(self.shard.group.size())]
                dist.all_gather(shards, mine, group=self.shard.group)
            kept, mass, largest = torch.stack(shards).unbind(1)
            numbers += [kept.mean(), mass.sum(), largest.max()]  # a shard drops its own part of a token's mass
        self.reported = dict(zip(self.options.reported(), numbers, strict=True))

    def __deepcopy__(self, memo: Any) -> _Task:
        return self


class _Head(nn.Module):
    """Stands before the class of a head. Given ``ask``, forward runs it where the parameters are whole."""

    cce_task: _Task
    weight: Tensor
    bias: Tensor | None

    def __call__(self, hidden: Tensor, ask: Callable | None = None) -> Any:
        # Before the module's hooks: none of them gathers a weight that is not used yet.
        if ask is None and self.cce_task.deferring():
            return hidden if self.cce_task.pipeline else DeferredLogits(self, self.cce_task, hidden)
        return super().__call__(hidden, ask)

    def forward(self, hidden: Tensor, ask: Callable | None = None) -> Tensor:
        return super().forward(hidden) if ask is None else ask(hidden, self.weight, self.bias)


class _TiedHead:
    """The last layer of a pipeline where it is a function of a module that it is tied to."""

    def __init__(self, function: functools.partial, task: _Task) -> None:
        self.function, self.module, self.task = function, function.args[0], task

    def __call__(self, hidden: Tensor, ask: Callable | None = None) -> Tensor:
        if ask is not None:
            return ask(hidden, self.module.weight, None)
        return hidden if self.task.deferring() else self.function(hidden)


class _Together(torch.autograd.Function):
    """Hidden states and the head's parameters as they are; in backward none has a gradient before all have.

    DeepSpeed takes the gradient of a pipeline's outputs for the beginning of backward, and clears what there is then.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor | None) -> tuple:
        return tuple(None if tensor is None else tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple:
        return gradients


class _PipelineLoss:
    """The user's ``loss_fn``, given what the last layer returns as logits."""

    def __init__(self, loss_fn: Callable, head: Any, task: _Task) -> None:
        self.loss_fn, self.head, self.task = loss_fn, head, task

    def __call__(self, outputs: Tensor, labels: Any) -> Any:
        if self.task.deferring():
            head = getattr(outputs, "cce_head", self.head)
            return self.loss_fn(DeferredLogits(head, self.task, outputs), labels)
        if self.task.shard.group is not None:
            raise ValueError(
                "cce_dist: eval_batch(return_logits=True) of a split vocabulary returns this rank's logits, of which there is "
                "no loss: add compute_loss=False"
            )
        return self.loss_fn(outputs, labels)


class _Rows:
    """Which rows of the vocabulary a ``CCEHead`` or ``CCEEmbedding`` holds; its group comes with ``convert``."""

    def __init__(self, vocab_size: int, tp_rank: int, tp_size: int) -> None:
        if not 0 <= tp_rank < tp_size:
            raise ValueError(f"tp_rank must be in [0, tp_size), got {tp_rank} of {tp_size}")
        self.start, self.stop = even_rows(vocab_size, tp_rank, tp_size)
        self.vocab_size, self.tp_rank, self.tp_size = vocab_size, tp_rank, tp_size
        self.count, self.group = self.stop - self.start, None

    def mark(self, module: nn.Module) -> None:
        """Say that the parameters are shards: else those of ranks past 0 are missing from the norm that clips gradients."""
        for parameter in module.parameters():
            setattr(parameter, "tensor_model_parallel", self.tp_size > 1)  # noqa: B010, no attribute of Parameter

    @contextlib.contextmanager
    def seeded(self) -> Any:
        """Draw from a stream of this shard's own, and leave all ranks' default generator alike."""
        if self.tp_size == 1:
            yield
            return
        seed = int(torch.randint(2**62, ()).item())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + self.tp_rank)
            yield

    def require_group(self) -> dist.ProcessGroup | None:
        if self.tp_size > 1 and self.group is None:
            raise RuntimeError(
                "a vocabulary-split layer without its group: nothing has turned cce_dist on; call "
                f'cce_dist.integrations.deepspeed.initialize with "{SECTION}": {{"enabled": true}}'
            )
        return self.group

    def join(self, group: dist.ProcessGroup | None) -> VocabShard:
        size, rank = (1, 0) if group is None else (group.size(), group.rank())
        if (rank, size) != (self.tp_rank, self.tp_size):
            raise ValueError(
                f"this layer is shard {self.tp_rank} of {self.tp_size}, but this rank is {rank} of {size} on the model axis"
            )
        self.group = group if size > 1 else None
        return VocabShard(self.start, self.stop, self.vocab_size, self.group)


def sum_over_shards(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of the ranks' parts, of which every rank then computes the whole gradient.

    Communication: one all-reduce in forward, none in backward.
    """
    return _SumOverShards.apply(part, group)


class _SumOverShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        whole = part.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *d_whole: Tensor) -> tuple:
        return d_whole[0], None


def _cross_entropy(
    input: Any, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None, ignore_index: int = -100,
    reduce: bool | None = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """``F.cross_entropy`` of deferred logits [N, V] and class ids [N]."""
    if not isinstance(input, DeferredLogits):
        raise DeferredLogits._wanted("cross_entropy with labels")
    if weight is not None or size_average is not None or reduce is not None:
        raise ValueError(
            "cce_dist: F.cross_entropy with weight, size_average or reduce is not supported; weigh its 'none'"
        )
    if target.is_floating_point() or input.ndim != target.dim() + 1 or input.ndim > 2:
        raise ValueError(
            f"cce_dist: F.cross_entropy needs logits [N, V] and class ids [N], got {tuple(input.shape)} and "
            f"{tuple(target.shape)} {target.dtype}; flatten them"
        )
    return input._loss(target, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)


def _convert_pipeline(engine: Any, options: Options) -> list[tuple[str, _Task]]:
    """Take over the last stage's head and loss_fn; give every stage's split layers their group."""
    module, group = engine.module, engine.mpu.get_slice_parallel_group()
    for layer in _split_layers(module):
        layer.rows.join(group)
    if not engine.is_last_stage():
        if options.report:  # of their number alone DeepSpeed takes notice here
            module.get_additional_losses = lambda: dict.fromkeys(options.reported())
        return []
    reference = weakref.ref(engine)

    def deferring() -> bool:
        alive = reference()
        return alive is not None and alive._compute_loss and not alive.eval_return_logits

    head = module.forward_funcs[-1]
    owner = head.args[0] if isinstance(head, functools.partial) else head
    task = _Task(options, _shard(owner), pipeline=True, deferring=deferring)
    if isinstance(head, functools.partial):
        _check_tied(head)
        head = module.forward_funcs[-1] = _TiedHead(head, task)
        name = f"tied to {type(owner).__name__}"
    else:
        _take(head, task)
        name = type(head).__name__
    module.loss_fn = _PipelineLoss(module.loss_fn, head, task)

    def pass_weight_through(module: nn.Module, inputs: tuple, hidden: Any) -> Any:
        if torch.is_grad_enabled() and deferring():
            hidden, weight, bias = _Together.apply(hidden, owner.weight, getattr(owner, "bias", None))
            hidden.cce_head = lambda hidden, ask: ask(hidden, weight, bias)
            return hidden

    module.register_forward_hook(pass_weight_through)
    if options.report:
        module.get_additional_losses = lambda: task.reported
    return [(name, task)]


def _convert_model(engine: Any, options: Options) -> list[tuple[str, _Task]]:
    """Take over the head of a model that computes its loss in forward."""
    from deepspeed.utils.bwc import bwc_tensor_model_parallel_group

    module = engine.module
    name, head = _find_head(module, options)
    for layer in _split_layers(module):
        layer.rows.join(bwc_tensor_model_parallel_group(engine.mpu))
    task = _Task(options, _shard(head))
    if options.sequence_mean:
        task.sequence_group, task.sequence_scale = _sequence_group(engine)
    signature = inspect.signature(type(module).forward)

    def enter(module: nn.Module, args: tuple, kwargs: dict) -> None:
        given = kwargs.get("labels")
        with contextlib.suppress(TypeError):  # forward itself will raise it
            given = signature.bind_partial(module, *args, **kwargs).arguments.get("labels", given)
        task.inside += 1
        task.labels_given = given is not None

    def leave(*_: Any) -> None:
        task.inside -= 1

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave, always_call=True)
    task.deferring = lambda: task.inside > 0 and (module.training or task.labels_given)
    if options.report:
        engine.get_additional_losses = lambda: task.reported
    _take(head, task)
    whole = getattr(module, "_deepspeed_original_loss_function", None)
    if whole is not None:
        # AutoTP has put a loss of local logits there; deferred ones are of the whole vocabulary, as the model's own expects.
        local = module.loss_function
        module.loss_function = lambda logits, *args, **kwargs: (whole if isinstance(logits, DeferredLogits) else local)(
            logits, *args, **kwargs
        )
    return [(name, task)]


def _sequence_group(engine: Any) -> tuple[dist.ProcessGroup, int]:
    """Return the sequence-parallel group and what DeepSpeed divides its ranks' summed gradients by."""
    size = engine.sequence_parallel_size
    if size == 1:
        raise ValueError(f'ds_config: "{SECTION}.sequence_mean" is set, but there is no sequence parallelism')
    group = engine.get_sequence_parallel_group()
    ranks, reduced = (set(dist.get_process_group_ranks(each)) for each in (group, engine.seq_data_parallel_group))
    if not ranks <= reduced:
        raise ValueError(
            "DeepSpeed does not reduce gradients over this sequence-parallel group; make it by "
            "deepspeed.runtime.sequence_parallel.parallel_state_sp and pass that as mpu="
        )
    # ZeRO-3's reduce-scatter averages over these ranks, too, where everything else sums (0.19.8).
    stage3 = engine.zero_optimization_stage() == 3
    averages = stage3 and (engine.optimizer.reduce_scatter or not engine.optimizer.contiguous_gradients)
    return group, size if averages else 1


def _check(model: Any, config: dict, mpu: Any, options: Options) -> None:
    """Raise on what cannot be taken over, before DeepSpeed builds anything."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be an nn.Module, got {type(model).__name__}")
    split = _split_layers(model)
    if _is_pipeline(model):
        if hasattr(model, "phase_funcs"):
            raise ValueError("cce_dist does not support DualPipeV; use a PipelineModule")
        for key in ("head", "sequence_mean"):
            if getattr(options, key):
                raise ValueError(f'ds_config: "{SECTION}.{key}" is not for pipelines, whose head is the last layer')
        if model.loss_fn is None:
            raise ValueError("cce_dist needs a PipelineModule with a loss_fn that calls F.cross_entropy")
        specs: Any = model._layer_specs
        _check_last_layer(specs[-1])
        return
    if split and mpu is None:
        raise ValueError("a model with a split vocabulary needs mpu=: without one DeepSpeed makes all shards rank 0's")
    for layer in split:
        group = getattr(layer.weight, "ds_process_group", None)
        if group is not None and group.size() != mpu.get_data_parallel_world_size():
            raise ValueError(
                "zero.Init has split a shard of the vocabulary over ranks of other shards: give it "
                "data_parallel_group=mpu.get_data_parallel_group()"
            )
    _find_head(model, options)
    tensor_parallel = config.get("tensor_parallel", {})
    if tensor_parallel.get("autotp_size", 0) > 1 and not tensor_parallel.get("vocab_parallel_lm_head"):
        raise ValueError('cce_dist with AutoTP needs "tensor_parallel": {"vocab_parallel_lm_head": true}')


def _find_head(model: Any, options: Options) -> tuple[str, Any]:
    """Return the name of the module that makes the logits, and the module."""
    modules = dict(model.named_modules())
    if options.head:
        if options.head not in modules:
            raise ValueError(
                f'ds_config: "{SECTION}.head" is "{options.head}", which {type(model).__name__} does not have'
            )
        found = [(options.head, modules[options.head])]
    else:
        output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        found = [
            (name, module)
            for name, module in modules.items()
            if isinstance(module, CCEHead) or module is output or name.split(".")[-1] in ("lm_head", "embed_out")
        ]
    if len(found) != 1:
        names = ", ".join(name for name, _ in found) or "none"
        raise ValueError(
            f'cce_dist looked for the head of {type(model).__name__} and found {names}: name it in "{SECTION}.head"'
        )
    _check_class(type(found[0][1]))
    return found[0]


def _check_last_layer(spec: Any) -> None:
    """Raise if the last layer of a pipeline, which every stage knows as a specification, is no head."""
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    kind = spec.typename if isinstance(spec, LayerSpec) else type(spec)
    if isinstance(spec, TiedLayerSpec):
        if not issubclass(kind, nn.Embedding) or spec.forward_fn is None:
            raise ValueError(f"cce_dist: a tied head needs an nn.Embedding and a forward_fn, not {kind.__name__}")
    else:
        _check_class(kind)


def _check_class(kind: type) -> None:
    """Raise if modules of this class are not a plain product with their weight."""
    plain = getattr(kind, "forward", None) is nn.Linear.forward
    if not (plain or issubclass(kind, CCEHead) or kind.__name__ == "VocabParallelLinear"):
        raise ValueError(f"cce_dist cannot take over a head that is a {kind.__name__}: it must be nn.Linear or CCEHead")


def _check_tied(function: functools.partial) -> None:
    """Raise if a tied head is not the product with the weight that it is tied to: try it with one vector."""
    weight = function.args[0].weight
    with torch.no_grad():
        hidden = torch.ones(1, 1, weight.shape[1], dtype=weight.dtype, device=weight.device)
        logits, expected = function(hidden), F.linear(hidden, weight)
    if logits.shape != expected.shape or not torch.allclose(logits.float(), expected.float(), rtol=1e-2, atol=1e-2):
        raise ValueError("cce_dist: the forward_fn of the tied head is not hidden @ weight.T; scale or cap in loss_fn")


def _split_layers(model: nn.Module) -> list[Any]:
    return [x for x in model.modules() if isinstance(x, (CCEHead, CCEEmbedding)) and x.rows.tp_size > 1]


def _take(head: Any, task: _Task) -> None:
    head.cce_task = task
    head.__class__ = _head_class(type(head))


@functools.cache
def _head_class(base: type) -> type:
    # AutoTP and partition methods tell layers by the names of their classes.
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (_Head, base), names)


def _shard(head: Any) -> VocabShard:
    if isinstance(head, (CCEHead, CCEEmbedding)):
        return head.rows.join(head.rows.group)
    if hasattr(head, "vocab_start_index"):  # AutoTP's VocabParallelLinear
        group = head.mp_group if head.tp_world_size > 1 else None
        return VocabShard(head.vocab_start_index, head.vocab_end_index, head.vocab_size, group)
    rows = head.num_embeddings if isinstance(head, nn.Embedding) else head.out_features
    return VocabShard(0, rows, rows)


def _is_pipeline(module: Any) -> bool:
    from deepspeed.pipe import PipelineModule

    return isinstance(module, PipelineModule)


def _shard_of_topology(topology: Any) -> dict[str, int]:
    if topology is None or "model" not in topology.get_axis_names():
        return {}
    return {"tp_rank": topology.get_coord(dist.get_rank()).model, "tp_size": topology.get_dim("model")}


def _is(kind: str, value: Any) -> bool:
    types = {NUMBER: (int, float), WHOLE: int, TEXT: str, SWITCH: bool}[kind]
    return isinstance(value, types) and (kind == SWITCH or not isinstance(value, bool))


def _deepspeed() -> Any:
    try:
        import deepspeed
    except ImportError as error:
        raise ImportError(f"cce_dist needs deepspeed (pip install 'cce-dist[deepspeed]'): {error}") from error
    return deepspeed
