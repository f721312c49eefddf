"""The deferral under every adapter: logits that nobody computes until somebody asks for their loss.

``take`` puts a head into a subclass of its own class, ``Head`` before it. While the head's ``Task`` defers, a call of the head
returns ``DeferredLogits``: no numbers, but the hidden states that the head was called with. They go through the model's own
code, which may scale them and, in the end, ask for their loss. That request calls the head again, through ``__call__`` and with
``ask=``, a function that runs inside of the head's ``forward``: the hooks of FSDP or ZeRO-3 gather the weight around its
real use. All other uses of the logits raise an error that names the use, and nothing computes logits unseen.

A model that calls ``F.cross_entropy`` itself needs ``TensorLogits`` and ``Task``, whose hooks watch the model's forward; they
need no framework but PyTorch. Other frameworks have a subclass of ``DeferredLogits`` and of ``Task``.

Letters: D hidden size, V the vocabulary, V_r the rows of it that a rank holds.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cce_dist import VocabShard, linear_cross_entropy
from cce_dist.integrations import peft

# A level below WARNING is dropped unless somebody configures logging, and the line is there to be seen.
_log = logging.getLogger("cce_dist").warning


class NotComputedError(AttributeError, TypeError):
    """A use of logits that nobody has computed; an AttributeError for ``hasattr``, a TypeError as operators raise it."""


class DeferredLogits:
    """Logits that nobody has computed: ``scale * head(hidden)``, or after a tanh ``softcap * tanh(scale * head(hidden))``.

    Code may multiply them by numbers and take ``torch.tanh`` once. A subclass adds methods, and in ``ANSWERED`` the functions
    of torch that lead to them. All else raises ``NotComputedError``.
    """

    ANSWERED: dict[Callable, str] = {torch.tanh: "tanh", torch.Tensor.tanh: "tanh"}  # noqa: RUF012, constant
    HINT = "a model without labels computes them"

    def __init__(self, head: Any, task: Any, hidden: Tensor, **given: Any) -> None:
        self._head, self._task, self._hidden, self._given = head, task, hidden, given
        self._factor, self._softcap = 1.0, None  # _factor: before the tanh; _softcap: behind it
        self._made_with_grad = torch.is_grad_enabled()

    def __mul__(self, factor: Any) -> Any:
        if not isinstance(factor, (int, float)):
            raise self._refused(f"multiplication by a {type(factor).__name__}")
        if self._softcap is None:
            return self._with(factor=self._factor * factor)
        return self._with(softcap=self._softcap * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Any:
        return self * (1 / divisor) if isinstance(divisor, (int, float)) else self * divisor

    def tanh(self) -> Any:
        if self._softcap is not None:
            raise self._refused("a second tanh")
        return self._with(softcap=1.0)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        first, *rest = args or (kwargs.pop("input", None),)
        if function in cls.ANSWERED and isinstance(first, cls):
            return getattr(first, cls.ANSWERED[function])(*rest, **kwargs)
        raise cls._refused(getattr(function, "__name__", str(function)))

    def __getattr__(self, name: str) -> Any:
        raise self._refused(name)

    @classmethod
    def _refused(cls, use: str) -> NotComputedError:
        return NotComputedError(f"cce_dist: {use} of logits that are not computed; {cls.HINT}")

    def _with(self, **changes: Any) -> Any:
        new = copy.copy(self)
        vars(new).update({f"_{name}": value for name, value in changes.items()})
        return new

    def _scaling(self) -> dict[str, Any]:
        """Return ``logit_scale`` and ``softcap`` as ``linear_cross_entropy`` takes them."""
        if self._softcap is None:
            return {"logit_scale": self._factor, "softcap": None}
        if self._softcap <= 0:
            raise ValueError(f"cce_dist: a softcap must be positive, got {self._softcap}")
        return {"logit_scale": self._factor * self._softcap, "softcap": self._softcap}

    def _ask(self, compute: Callable) -> Any:
        """Call the head again and return ``compute(head, hidden, ...)``, which runs where the head's weight is whole."""
        if torch.is_grad_enabled() and not self._made_with_grad:
            raise RuntimeError(
                "cce_dist: the head ran without gradients, inside a reentrant activation checkpoint or no_grad: its loss "
                "would have none; leave the head out of it"
            )
        return self._head(self._hidden, ask=compute, **self._given)


class TensorLogits(DeferredLogits):
    """Logits [..., V] of the whole vocabulary, for code that takes them for a tensor and ends in ``F.cross_entropy``.

    Code may also read shape, dtype and device, change the leading dimensions, and cast.
    """

    HINT = (
        "in training, or where there are labels, the loss comes from hidden states, by F.cross_entropy of class ids; for "
        "logits call the model in eval(), without labels"
    )

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

    # The loss is computed in fp32 from what the products accumulate, whatever dtype the caller casts to.
    def to(self, *_: Any, **__: Any) -> TensorLogits:
        return self

    float = contiguous = to

    def view(self, *shape: Any) -> TensorLogits:
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

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> TensorLogits:
        if end_dim % self.ndim == self.ndim - 1:
            raise self._refused("flatten over the vocabulary")
        return self._with(hidden=self._hidden.flatten(start_dim, end_dim))

    def __getitem__(self, index: Any) -> TensorLogits:
        parts = index if isinstance(index, tuple) else (index,)
        sizes = [p.dim() if isinstance(p, Tensor) and p.dtype == torch.bool else 1 for p in parts if p is not Ellipsis]
        reaches_last = sum(sizes) >= self.ndim or any(p is Ellipsis for p in parts[:-1])
        if any(p is None for p in parts) or (
            reaches_last and not (isinstance(parts[-1], slice) and parts[-1] == slice(None))
        ):
            raise self._refused("an index into the vocabulary, or None,")
        return self._with(hidden=self._hidden[index])

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.cross_entropy:
            return _cross_entropy(*args, **(kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs)


def _cross_entropy(
    input: Any, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None, ignore_index: int = -100,
    reduce: bool | None = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """``F.cross_entropy`` of deferred logits [N, V] and class ids [N]."""
    if not isinstance(input, TensorLogits):
        raise TensorLogits._refused("cross_entropy with labels")
    if weight is not None or size_average is not None or reduce is not None:
        raise ValueError(
            "cce_dist: F.cross_entropy with weight, size_average or reduce is not supported; weigh its 'none'"
        )
    if target.is_floating_point() or input.ndim != target.dim() + 1 or input.ndim > 2:
        raise ValueError(
            f"cce_dist: F.cross_entropy needs logits [N, V] and class ids [N], got {tuple(input.shape)} and "
            f"{tuple(target.shape)} {target.dtype}; flatten them"
        )
    task = input._task
    task.check_place()
    call = dict(ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing, **input._scaling())
    return input._ask(lambda head, hidden: task.loss(head, hidden, target, **call))


@dataclasses.dataclass(eq=False)
class Task:
    """What a converted head has to know: its options and shard, whether logits are deferred now, and what was asked so far.

    A model whose hooks are ``enter`` and ``leave`` defers logits in its forward, in training or where it is given labels.

    Args:
        options: ``ModelOptions`` for ``loss``; a subclass with a loss of its own takes any other.
        shard: The rows of the vocabulary that the head holds.
        calls: For each call of the model's forward that is under way, the outermost first, whether it defers.
        num_forwards: Training forwards that have ended.
        num_losses: Losses in training that the head was asked for.
    """

    options: Any
    shard: VocabShard
    calls: list[bool] = dataclasses.field(default_factory=list)
    num_forwards: int = 0
    num_losses: int = 0

    def watch(self, model: nn.Module) -> tuple:
        """Have a model whose forward computes the loss say when it runs; return the hooks' handles."""
        return (
            model.register_forward_pre_hook(self.enter, with_kwargs=True),
            model.register_forward_hook(self.leave, always_call=True),
        )

    def enter(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        labels = argument(type(model).forward, "labels", args, kwargs)
        self.calls.append(model.training or labels is not None)

    def leave(self, model: nn.Module, *_: Any) -> None:
        self.calls.pop()
        self.num_forwards += not self.calls and model.training and torch.is_grad_enabled()

    def deferring(self) -> bool:
        return bool(self.calls) and self.calls[-1]

    def defer(self, head: Any, hidden: Tensor) -> Any:
        """Return what the head returns instead of logits."""
        return TensorLogits(head, self, hidden)

    def check_place(self) -> None:
        """Raise where the loss may not be computed."""
        if not self.calls:
            raise RuntimeError(
                "cce_dist: the loss must be computed in the model's forward, where FSDP and ZeRO-3 gather the head's weight, "
                "and from whose output DeepSpeed sees backward begin; return the loss from there"
            )

    def loss(self, head: Any, hidden: Tensor, target: Tensor, *, label_smoothing: float, **call: Any) -> Any:
        """Return what ``linear_cross_entropy`` returns for this head and its options.

        The label smoothing and the z-loss of the options are for training: where ``head.training`` is false, the loss has the
        caller's own ``label_smoothing`` alone, and is comparable with any other evaluation loss.
        """
        options = self.options
        if head.training:
            self.num_losses += 1
            label_smoothing = label_smoothing or options.label_smoothing
            call["z_loss_weight"] = options.z_loss_weight
        hidden, weight, bias = peft.operands(head, hidden)
        return linear_cross_entropy(
            hidden, weight, target, linear_bias=bias, shard=self.shard,
            label_smoothing=label_smoothing, reduce_dtype=options.reduce_dtype, grad_filter=options.grad_filter,
            backend=options.backend, workspace_bytes=options.workspace_bytes, **call,
        )  # fmt: skip

    def require(self, name: str) -> None:
        """Raise if forwards in training have ended, and none asked the head for its loss."""
        if self.num_forwards and not self.num_losses:
            raise RuntimeError(
                f"cce_dist: {self.num_forwards} forward(s) in training ended, and none asked the head {name} for its loss: "
                "other code computed the loss, maybe from the head's weight"
            )

    def announce(self, name: str) -> None:
        """Say in one line where the loss comes from. One rank calls this."""
        shard = self.shard
        rank, size = (0, 1) if shard.group is None else (shard.group.rank(), shard.group.size())
        _log(
            f"cce_dist: the loss comes from hidden states; head {name}, shard {rank} of {size}: rows [{shard.start}, "
            f"{shard.stop}) of {shard.vocab_size}; {self.options}"
        )

    def __deepcopy__(self, memo: dict) -> Any:
        """A copied model shares options and groups, which nothing can copy. Calls and counts are its own."""
        new = copy.copy(self)
        new.calls, new.num_forwards, new.num_losses = [], 0, 0
        return new


def find_head(model: Any, name: str = "", own: tuple[type, ...] = ()) -> tuple[str, Any]:
    """Return the name of the module that makes a model's logits, and the module.

    Args:
        model: Any ``nn.Module``.
        name: Name of the module, where it is not the output embedding and not called lm_head or embed_out.
        own: Classes of an adapter whose modules are heads, whatever their name.

    Raises:
        ValueError: There is no such module, more than one, or it is not the plain product with its weight.
    """
    modules = dict(model.named_modules())
    if name and name not in modules:
        raise ValueError(f'"cce_dist.head" is "{name}", which {type(model).__name__} does not have')
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None

    def is_head(path: str, module: nn.Module) -> bool:
        return isinstance(module, own) or module is output or path.split(".")[-1] in ("lm_head", "embed_out")

    found = [name] if name else [path for path, module in modules.items() if is_head(path, module)]
    if len(found) != 1:
        names = ", ".join(found) or "none"
        raise ValueError(
            f'cce_dist looked for the head of {type(model).__name__} and found {names}: name it in "cce_dist.head"'
        )
    head = peft.in_use(modules[found[0]])
    check_class(type(head), own)
    if "forward" in vars(head):
        raise ValueError(f"cce_dist cannot take over {found[0]}: somebody has replaced its forward")
    return found[0], head


def check_class(kind: type, own: tuple[type, ...] = ()) -> None:
    """Raise if modules of this class are not the plain product with their weight."""
    plain = getattr(kind, "forward", None) is nn.Linear.forward or peft.is_lora(kind)
    if not (plain or issubclass(kind, own) or kind.__name__ == "VocabParallelLinear"):  # the last is AutoTP's
        raise ValueError(f"cce_dist cannot take over a head that is a {kind.__name__}: it must be nn.Linear or CCEHead")


class Head(nn.Module):
    """Stands before the class of a head. Given ``ask``, forward runs it where the parameters are whole."""

    cce_task: Any

    def __call__(self, *args: Any, ask: Callable | None = None, **kwargs: Any) -> Any:
        # A deferred call is answered before the module's hooks: none of them gathers a weight that is not used yet.
        if ask is None and self.cce_task.deferring():
            return self.cce_task.defer(self, *args, **kwargs)
        return super().__call__(*args, **kwargs) if ask is None else super().__call__(*args, ask=ask, **kwargs)

    def forward(self, *args: Any, ask: Callable | None = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs) if ask is None else ask(self, *args, **kwargs)


def take(head: Any, task: Any) -> None:
    """Put a head into the subclass of its class that defers; parameters, their names and hooks stay."""
    head.cce_task = task
    head.__class__ = subclass(Head, type(head))


def give_back(head: Any) -> None:
    """Undo ``take``."""
    del head.cce_task
    head.__class__ = type(head).__mro__[2]


@functools.cache
def subclass(mixin: type, base: type) -> type:
    """Return the subclass of ``base`` with a class before it.

    It has the name of ``base``: Megatron-FSDP, AutoTP and partition methods tell layers by the names of their classes.
    """
    return type(base.__name__, (mixin, base), {"__module__": base.__module__, "__qualname__": base.__qualname__})


def argument(method: Callable, name: str, args: tuple, kwargs: dict) -> Any:
    """Return the argument ``name`` of a call of a method, without its self; None where the call or the method has none."""
    names = list(_signature(method).parameters)[1:]
    position = names.index(name) if name in names else len(args)
    return args[position] if position < len(args) else kwargs.get(name)


_signature = functools.cache(inspect.signature)
