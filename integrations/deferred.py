"""The deferral under every adapter: logits that nobody computes until somebody asks for their loss.

``take`` puts a head into a subclass of its own class, ``Head`` before it. While the head's ``Task`` defers, a call of the head
returns ``DeferredLogits``: no numbers, but the hidden states and the weight that the head was called with. The model's own
code may scale them and, in the end, asks for their loss. That request calls the head again with ``ask=``, a function that runs
inside of the head's ``forward``. If FSDP or ZeRO-3 has hooks on the head, the request runs them, and they gather the weight
around its real use. In training all other uses of the logits raise an error that names the use. In evaluation any other use
computes them from the saved hidden states and weight. It raises an error instead if the logits are stale, because they would
not fit the loss beside them:

* ``Tensor._version`` of the hidden states, the head's weight or bias, or an adapter's weights has changed
  (``on_demand.Versions``), or an adapter's weights were replaced.
* PEFT uses other adapters than at the forward, for example inside ``disable_adapter()``.
* A forward of the model in training has begun. An optimizer that writes through ``.data``, as DeepSpeed's do, changes no
  version, and neither DTensors nor parameters of ZeRO-3 have a version to compare.

Other changes through ``.data`` are not detected, for example an average of the weights that is copied in for an evaluation.

``Task.watch`` puts the model into a subclass, too, ``Watched`` before its class, to know when a call begins and ends. When
logits are deferred is decided once, by ``Task.enter``, in the call of the model that runs:

    labels given                       deferred: there will be a loss
    none, but training and gradients   deferred: there will be a loss, or the model has no use for logits that are trained
    none otherwise                     computed: ``generate``, and passes of a reference model under ``no_grad``

Letters: D hidden size, V the vocabulary, V_r the rows of it that a rank holds.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import logging
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn import _reduction
from torch.nn.modules import module as torch_module
from torch.utils import _pytree as pytree

from cce_dist.call import DTYPES
from cce_dist.integrations import peft
from cce_dist.integrations.on_demand import ChangedError, OnDemand, Versions, is_sharded
from cce_dist.loss import LinearCrossEntropyOutput, linear_cross_entropy
from cce_dist.shard import VocabShard

# A level below WARNING is dropped unless somebody configures logging, and the line is there to be seen.
_log = logging.getLogger("cce_dist").warning


class NotComputedError(AttributeError, TypeError):
    """A use of logits that nobody has computed; for ``hasattr`` an AttributeError, as operators raise it a TypeError."""


class DeferredLogits:
    """Logits that nobody has computed: ``scale * head(hidden)``, or after a tanh ``softcap * tanh(scale * head(hidden))``.

    A subclass adds methods, and in ``ANSWERED`` the functions of torch that lead to them. All else raises ``NotComputedError``.
    """

    ANSWERED: dict[Callable, str] = {torch.tanh: "tanh", torch.Tensor.tanh: "tanh"}  # noqa: RUF012, constant
    HINT = "a model without labels computes them"

    def __init__(self, head: Any, task: Any, hidden: Tensor, **given: Any) -> None:
        self._head, self._task, self._hidden, self._given = head, task, hidden, given
        self._factor, self._softcap = 1.0, None  # _factor: before the tanh; _softcap: behind it
        self._made_with_grad = torch.is_grad_enabled()
        self._training = task.training(head)

    def __mul__(self, factor: Any) -> Any:
        if not isinstance(factor, (int, float)):
            return self._other_use(f"multiplication by a {type(factor).__name__}", "__mul__", factor)
        if self._softcap is None:
            return self._with(factor=self._factor * factor)
        return self._with(softcap=self._softcap * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Any:
        return self * (1 / divisor) if isinstance(divisor, (int, float)) else self * divisor

    def tanh(self) -> Any:
        if self._softcap is not None:
            return self._other_use("a second tanh", "tanh")
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

    def _other_use(self, use: str, name: str, *args: Any, **kwargs: Any) -> Any:
        """Answer a use that leads to no loss, of the tensor's method ``name``."""
        raise self._refused(use)

    def _with(self, **changes: Any) -> Any:
        new = copy.copy(self)
        vars(new).update({f"_{name}": value for name, value in changes.items()})
        return new

    def _scaling(self) -> dict[str, Any]:
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

    Code may also read shape, dtype and device, change the leading dimensions, cast, cut off the last ids (``[..., :k]``), and
    add one tensor [V], a bias that the model keeps outside of its head. Logits of evaluation, or made without gradients, are
    for looking at, too: any other use of them computes them, once, and is answered by that tensor.
    """

    HINT = (
        "in training the loss comes from hidden states, by F.cross_entropy of class ids; call the model in eval() or under "
        "no_grad to get logits"
    )
    ADVICE = {  # noqa: RUF012, constant; by function, what a user who needs it can do
        "log_softmax": 'label smoothing is an option of the conversion (label_smoothing=0.1, "cce_dist.label_smoothing") in '
        "place of label_smoothing_factor",
    }

    def __init__(self, head: Any, task: Any, hidden: Tensor, **given: Any) -> None:
        super().__init__(head, task, hidden, **given)
        self._cast: torch.dtype | None = None  # what the caller has cast the logits to
        self._shard = task.shard
        # Fewer where the caller has cut off the columns that pad the vocabulary.
        self._vocab_size = task.shard.vocab_size
        self._added: Tensor | None = None  # a bias [V]
        # All logits that are derived from these share the state of the head, and the tensors that were computed.
        self._head_trains, self._adapters = head.training, peft.adapters(head)
        self._weights = peft.weights(head)
        self._head_versions, self._hidden_versions = Versions(*self._weights), Versions(hidden)
        self._last_training = task.last_training
        self._looks: list[Versions] = []
        kind = hidden.device.type
        self._autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        _tell_einops()

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self._hidden.shape[:-1], self._vocab_size))

    @property
    def dtype(self) -> torch.dtype:
        casts = self._autocast[2] and self._hidden.dtype != torch.float64  # autocast leaves float64 alone
        return self._cast or (self._autocast[1] if casts else self._hidden.dtype)

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

    def __add__(self, other: Any) -> Any:
        rows = self._shard.num_rows
        bare = self._added is None and (self._factor, self._softcap, self._vocab_size) == (1, None, rows)
        if not bare or not isinstance(other, Tensor) or other.dim() > self.ndim or other.shape[-1:].numel() != rows:
            return self._other_use("__add__", "__add__", other)
        if other.numel() != rows:
            return self._other_use("a sum with other numbers for each token", "__add__", other)
        # A copy: the model may change its bias before somebody looks.
        return self._with(added=other.reshape(rows).clone(), cast=torch.promote_types(self.dtype, other.dtype))

    # The loss is computed in fp32 from what the products accumulate, whatever dtype the caller casts to.
    def to(self, *args: Any, **kwargs: Any) -> TensorLogits:
        dtypes = [x.dtype if isinstance(x, Tensor) else x for x in (*args, *kwargs.values())]
        return self._with(cast=next((x for x in dtypes if isinstance(x, torch.dtype)), self._cast))

    def float(self) -> TensorLogits:
        return self._with(cast=torch.float32)

    def contiguous(self, **_: Any) -> TensorLogits:
        return self

    def view(self, *shape: Any) -> Any:
        """Change the leading dimensions; the last stays the vocabulary."""
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        *leading, last = sizes
        if last == -1 and -1 not in leading and torch.Size(leading).numel() == self.shape[:-1].numel():
            last = self._vocab_size
        if last != self._vocab_size:
            return self._other_use(f"view{sizes} over the vocabulary of {self._vocab_size}", "reshape", sizes)
        return self._with(hidden=self._hidden.reshape(*leading, self._hidden.shape[-1]))

    reshape = view

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        if end_dim % self.ndim == self.ndim - 1:
            return self._other_use("flatten over the vocabulary", "flatten", start_dim, end_dim)
        return self._with(hidden=self._hidden.flatten(start_dim, end_dim))

    def __getitem__(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) == 2 and parts[0] is Ellipsis and isinstance(parts[1], slice):
            start, stop, step = parts[1].indices(self._vocab_size)
            if (start, step) == (0, 1) and stop > 0:
                return self._with(vocab_size=stop)
        sizes = [p.dim() if isinstance(p, Tensor) and p.dtype == torch.bool else 1 for p in parts if p is not Ellipsis]
        reaches_last = sum(sizes) >= self.ndim or any(p is Ellipsis for p in parts[:-1])
        if any(p is None for p in parts) or (
            reaches_last and not (isinstance(parts[-1], slice) and parts[-1] == slice(None))
        ):
            return self._other_use("an index into the vocabulary, or None,", "__getitem__", index)
        return self._with(hidden=self._hidden[index])

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.cross_entropy:
            return _cross_entropy(*args, **kwargs)
        first = args[0] if args else kwargs.get("input")
        if function in cls.ANSWERED and isinstance(first, cls):
            return super().__torch_function__(function, types, args, kwargs)
        name = getattr(function, "__name__", str(function))
        in_place = is_in_place(name) or kwargs.get("inplace")
        if (in_place and isinstance(first, cls)) or isinstance(kwargs.get("out"), cls):
            raise cls._refused_in_place(name)
        args, kwargs = pytree.tree_map_only(cls, lambda logits: logits._computed(name), (args, kwargs))
        return function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"logits have no attribute {name}")
        if is_in_place(name):
            raise self._refused_in_place(name)
        return getattr(self._computed(name), name)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise self._refused_in_place("an assignment to a part")

    @classmethod
    def _refused_in_place(cls, name: str) -> NotComputedError:
        # It would change a tensor that is computed for it, and neither the loss nor the next look would know.
        return NotComputedError(
            f"cce_dist: {name} changes in place logits that are not computed; use its form that returns a new tensor"
        )

    def _other_use(self, use: str, name: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._computed(use, name), name)(*args, **kwargs)

    def _computed(self, use: str, name: str = "") -> Tensor:
        """Return the logits [..., V] themselves, which evaluation alone may look at."""
        if not self._is_for_use():
            advice = self.ADVICE.get(name or use)
            raise self._refused(use) if advice is None else NotComputedError(f"{self._refused(use)}; {advice}")
        if self._shard.group is not None:
            raise NotComputedError(
                f"cce_dist: {use} of logits whose vocabulary is split over ranks, which has no answer here"
            )
        if "_value" not in vars(self):
            with torch.set_grad_enabled(self._made_with_grad), _mode(self._head, self._head_trains):
                logits = self._ask(lambda head, hidden: _dense(head, hidden, self._added))
                logits = logits[..., : self._vocab_size] * self._factor
                logits = logits if self._softcap is None else logits.tanh() * self._softcap
                self._value = logits.to(self._cast or logits.dtype)
            self._looks.append(Versions(self._value))
        return self._value

    def _scaling(self) -> dict[str, Any]:
        return {**super()._scaling(), "added": self._added}

    def _ask(self, compute: Callable) -> Any:
        self._check()
        # The head's product has the dtype of the place where the model called the head, wherever its loss is asked for.
        kind, dtype, enabled = self._autocast
        with torch.autocast(kind, dtype, enabled):
            return super()._ask(lambda head, *hidden: compute(self._as_called(head), *hidden))

    def _as_called(self, head: Any) -> Any:
        """Return a head with the weight and bias that it was called with; others may have been put there since."""
        if any(is_sharded(x) for x in self._weights):
            return head
        if isinstance(self._weights[0], nn.Parameter) or peft.is_lora(type(head)):
            now = peft.weights(head)
            if any(is_sharded(x) for x in now) or all(x is y for x, y in zip(now, self._weights, strict=True)):
                return head
            if peft.is_lora(type(head)):
                raise ChangedError("the head's weight or an adapter was replaced")
        return _AsCalled(*self._weights, head.cce_task)

    def _check(self) -> None:
        """Raise ChangedError if something that the logits are computed from has changed since the head was called."""
        for versions in self._looks:
            versions.check("logits computed before")
        self._hidden_versions.check("the hidden states")
        if peft.adapters(self._head) != self._adapters:
            raise ChangedError("the adapters on the head changed")
        self._head_versions.check("the head's weight or bias")
        if self._is_for_use() and self._task.last_training is not self._last_training:
            raise ChangedError("a forward in training began, and a step may have changed the weights,")

    def _with(self, **changes: Any) -> Any:
        if "hidden" in changes:
            self._hidden_versions.check("the hidden states")
            changes["hidden_versions"] = Versions(changes["hidden"])
        new = super()._with(**changes)
        vars(new).pop("_value", None)
        return new

    def _is_for_use(self) -> bool:
        """Whether the logits may be used for anything besides a loss."""
        return not (self._training and self._made_with_grad)

    def _for_later(self) -> Any:
        """Return what the caller of the model gets for logits of evaluation: a tensor, if there may be one.

        Compiled code cannot make a tensor that is computed later. It computes the logits, as a model that is not converted.
        """
        if torch.compiler.is_compiling() and self._shard.group is None and self._task.rows is None:
            return self._computed("a look")
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self
        return OnDemand(self.shape, self.dtype, self.device, functools.partial(self._computed, "a look"))


@dataclasses.dataclass
class _AsCalled:
    """The weight and the bias that a head was called with, where the head has others now."""

    weight: Tensor
    bias: Tensor | None
    cce_task: Any


def _tell_einops() -> None:
    """Have einops, which looks classes up in a table of its own, take deferred logits for torch's tensors."""
    einops = sys.modules.get("einops._backends")
    if einops is not None and not torch.compiler.is_compiling():
        einops._type2backend.setdefault(TensorLogits, einops.get_backend(torch.empty(0)))


def _for_later(output: Any) -> Any:
    if isinstance(output, TensorLogits):
        return output._for_later()
    if type(output) is tuple:
        return tuple(_for_later(part) for part in output)
    if isinstance(output, dict):
        for name, part in output.items():
            if isinstance(part, TensorLogits):
                output[name] = part._for_later()
    return output


def _operator(name: str) -> Callable:
    return lambda self, *args: self._other_use(name, name, *args)


def _in_place(name: str) -> Callable:
    def refuse(self: TensorLogits, other: Any) -> Any:
        raise self._refused_in_place(name)

    return refuse


# Python looks operators up on the class, never by ``__getattr__``.
_OPERATORS = """
radd sub rsub rtruediv floordiv rfloordiv mod rmod neg abs pow rpow matmul rmatmul lt le gt ge eq ne and or xor invert
bool float int len iter contains array
"""
for _name in _OPERATORS.split():
    setattr(TensorLogits, f"__{_name}__", _operator(f"__{_name}__"))
# Else ``x *= 2`` in a function would make a new ``x`` there, and its caller's logits would stay as they were.
for _name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor"):
    setattr(TensorLogits, f"__{_name}__", _in_place(f"__{_name}__"))


def _dense(head: Any, hidden: Tensor, added: Tensor | None = None) -> Tensor:
    """Return the head's logits. Outside of FSDP2's forward this gathers the weight and the bias."""
    hidden, *factors = peft.operands(head, hidden)
    rows = head.cce_task.rows
    gathered = (lambda x: x.full_tensor().to(hidden.dtype)) if rows is None else functools.partial(rows.whole, hidden)
    whole: list[Any] = [gathered(x) if isinstance(x, DTensor) else x for x in factors]
    return F.linear(hidden, whole[0], peft.sum_of_biases(whole[1], added))


@contextmanager
def _mode(head: nn.Module, trains: bool) -> Iterator[None]:
    """Have a head, and an adapter's dropout in it, in the mode of the forward that the logits are from."""
    now = head.training
    if now == trains:
        yield
        return
    head.train(trains)
    try:
        yield
    finally:
        head.train(now)


def _cross_entropy(
    input: Any,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """``F.cross_entropy`` of deferred logits [N, V] and class ids [N]."""
    if not isinstance(input, TensorLogits):
        raise TensorLogits._refused("cross_entropy with labels")
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    if target.is_floating_point() or input.ndim != target.dim() + 1 or input.ndim > 2:
        raise ValueError(
            f"cce_dist: F.cross_entropy needs logits [N, V] and class ids [N], got {tuple(input.shape)} and "
            f"{tuple(target.shape)} {target.dtype}; flatten them"
        )
    task = input._task
    task.check_place(input._head)
    call: dict[str, Any] = dict(
        shard=input._shard,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        training=input._training,
        **input._scaling(),
    )
    if input._vocab_size != input._shard.vocab_size:
        call["shard"] = dataclasses.replace(input._shard, vocab_size=input._vocab_size)
    if weight is not None:
        if task.rows is not None or getattr(task, "sequence_group", None) is not None:
            raise ValueError(
                "cce_dist: F.cross_entropy with class weights does not go with shard_over or sequence_mean: multiply the "
                "losses of reduction='none' by them"
            )
        call["weight"] = weight
    answer = input._ask(lambda head, hidden: task.loss(head, hidden, target, **call))
    loss = task.keep(answer, target != ignore_index) if isinstance(answer, tuple) else answer
    # Autocast computes a cross-entropy in fp32. Without it the loss has the dtype of the logits.
    in_fp32 = torch.is_autocast_enabled(loss.device.type) and input.dtype != torch.float64
    return loss.to(torch.float32 if in_fp32 else input.dtype)


@dataclasses.dataclass(eq=False)
class Task:
    """What a converted head has to know: its options and shard, whether logits are deferred now, and what was asked so far."""

    options: Any  # ModelOptions for ``loss``; a subclass with a loss of its own takes any other
    shard: VocabShard
    rows: Any = None  # fsdp.Rows where the weight stays split over data-parallel ranks
    calls: list[bool] = dataclasses.field(
        default_factory=list
    )  # does it defer? of the model under way, outermost first
    num_forwards: int = 0  # in training, ended
    num_losses: int = 0  # in training, that the head was asked for
    num_asked: int = 0  # requests to the head in the outermost forward that is under way, or was last
    trains: bool | None = None  # the model's mode in that forward; None: no forward was watched
    # Stands for the last forward in training that began: each puts a new list here. Compiled code can do that, too; a count
    # would have it compiled anew for each number.
    last_training: list = dataclasses.field(default_factory=list)
    begun: bool = False  # Watched.__call__ is under way, and Watched.forward was not reached yet
    thread: int = 0  # in which the model was called last

    def watch(self, model: Any) -> None:
        """Have a model whose forward computes the loss say when it runs."""
        if not isinstance(model, Watched):
            put_before(model, watched(type(model)))
        model.cce_task = self

    def run(self, model: nn.Module, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Return what a function of the model returns, its ``__call__`` or its ``forward``, between ``enter`` and ``leave``."""
        args, kwargs = self.enter(model, args, kwargs)
        output = None
        try:
            output = function(*args, **kwargs)
        finally:
            output = self.leave(model, args, kwargs, output)
        return output

    def enter(self, model: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Decide whether the head defers in this call of the model, from the very module that runs: a copy has its own mode."""
        trains = model.training and torch.is_grad_enabled()
        defers = trains or has_labels(model, args, kwargs)
        self.check_thread(model, defers)
        if not self.calls:
            self.num_asked = 0
        self.trains = model.training
        if self.rows is not None:
            self.rows.enter(model)
        if trains:
            self.last_training = []
        self.calls.append(defers)
        return args, kwargs

    def leave(self, model: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        """End a call of the model; raise if it was in training, had labels, and nobody asked the head."""
        self.calls.pop()
        if self.calls or output is None:  # None: an error is under way
            return output
        if not (model.training and torch.is_grad_enabled()):
            return _for_later(output)
        self.num_forwards = one_more(self.num_forwards)
        if has_labels(model, args, kwargs, ("labels",)) and not self.num_asked:
            raise RuntimeError(
                f"cce_dist: a forward of {type(model).__name__} in training ended without asking the head for its loss: other "
                "code computed the loss, from the head's weight (Liger's forward, TRL's fused head), or the head was replaced "
                "since (by PEFT, by resize_token_embeddings): leave that code out, or convert after the replacement"
            )
        return output

    def check_thread(self, model: nn.Module, defers: bool) -> None:
        """Raise if calls in several threads would share one head, whose state is that of one call."""
        if torch.compiler.is_compiling():
            return
        here = threading.get_ident()
        if getattr(model, "_is_replica", False) or (self.calls and self.thread != here and (defers or any(self.calls))):
            raise RuntimeError(
                f"cce_dist: this {type(model).__name__} is called in several threads, as nn.DataParallel does, and its head "
                "serves one at a time: use DistributedDataParallel, or cce_dist.revert(model)"
            )
        self.thread = here

    def deferring(self) -> bool:
        return bool(self.calls) and self.calls[-1]

    def training(self, head: Any) -> bool:
        """Return whether a loss is one of training: by the mode of the model, whatever mode its head alone was put in."""
        return head.training if self.trains is None else self.trains

    def defer(self, head: Any, hidden: Tensor) -> Any:
        """Return what the head returns instead of logits."""
        check_weight(head)
        if self.shard.group is None and self.rows is None and self.shard.num_rows == self.shard.vocab_size:
            rows = peft.num_rows(head)
            if rows is not None and rows != self.shard.num_rows:  # resized since
                self.shard = VocabShard(0, rows, rows)
        return TensorLogits(head, self, hidden)

    def check_place(self, head: Any) -> None:
        """Raise where the loss may not be computed: behind the model's forward a sharded weight is not whole."""
        if not self.calls and (is_sharded(head.weight) or peft.num_rows(head) is None):
            raise RuntimeError(
                "cce_dist: the loss must be computed in the model's forward, where FSDP and ZeRO-3 gather the head's weight: "
                "give the model labels, in place of a compute_loss_func or a loss of the training loop"
            )

    def aux(self) -> tuple[str, ...]:
        """Return which outputs of ``linear_cross_entropy`` besides the loss ``keep`` has a use for."""
        return ()

    def keep(self, output: LinearCrossEntropyOutput, valid: Tensor) -> Tensor:
        """Return the loss, having looked at what it was made of; ``valid`` says which labels are not ignored."""
        return output.loss

    def loss(
        self,
        head: Any,
        hidden: Tensor,
        target: Tensor,
        *,
        label_smoothing: float,
        training: bool,
        added: Tensor | None = None,
        **call: Any,
    ) -> Any:
        """Return what ``linear_cross_entropy`` returns for this head and its options.

        The options' label smoothing and z-loss are for training: evaluation's loss is comparable with any other.
        """
        options = self.options
        if training:
            self.num_losses = one_more(self.num_losses)
            label_smoothing = label_smoothing or options.label_smoothing
            call["z_loss_weight"] = options.z_loss_weight
        hidden, weight, bias = peft.operands(head, hidden)
        compute = linear_cross_entropy
        if self.rows is not None:
            compute = self.rows.loss
            weight, bias, added = self.rows.operands(hidden, weight, bias, added)
        return compute(
            hidden,
            weight,
            target,
            linear_bias=peft.sum_of_biases(bias, added),
            label_smoothing=label_smoothing,
            reduce_dtype=options.reduce_dtype,
            grad_filter=options.grad_filter,
            backend=options.backend,
            workspace_bytes=options.workspace_bytes,
            return_aux=self.aux() or False,
            **call,
        )

    def require(self, name: str) -> None:
        """Raise if forwards in training have ended, and none asked the head for its loss."""
        if self.num_forwards and not self.num_losses:
            raise RuntimeError(
                f"cce_dist: {self.num_forwards} forward(s) in training ended, and none asked the head {name} for its loss: "
                "other code computed the loss, maybe from the head's weight"
            )

    def announce(self, name: str) -> None:
        """Say in one line where the loss comes from. One rank calls this."""
        shard = self.shard if self.rows is None else self.rows.shard
        rank, size = (0, 1) if shard.group is None else (shard.group.rank(), shard.group.size())
        _log(
            f"cce_dist: the loss comes from hidden states; head {name}, shard {rank} of {size}: rows [{shard.start}, "
            f"{shard.stop}) of {shard.vocab_size}; {self.options}"
        )

    def __deepcopy__(self, memo: dict) -> Any:
        """A copied model shares options and groups, which nothing can copy. Calls and counts are its own."""
        new = memo[id(self)] = copy.copy(self)  # noted first: the rows may lead back to the task
        new.calls, new.last_training, new.num_forwards, new.num_losses, new.num_asked = [], [], 0, 0, 0
        new.rows = copy.deepcopy(self.rows, memo)
        return new


def is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def one_more(count: int) -> int:
    """Return the next count; compiled code, which would be compiled anew for each number that it reads, counts to 1."""
    return 1 if torch.compiler.is_compiling() else count + 1


def has_labels(
    model: nn.Module, args: tuple, kwargs: dict, names: tuple[str, ...] = ("labels", "shift_labels")
) -> bool:
    """Return whether a call of a model is given labels, or labels that are shifted already."""
    return any(argument(type(model).forward, name, args, kwargs) is not None for name in names)


def find_head(model: Any, name: str = "", own: tuple[type, ...] = ()) -> tuple[str, Any]:
    """Return the name of the module that makes a model's logits, and the module.

    That is the module with the name ``name``; else the model's output embedding, where it is a plain product; else the one
    module of a class in ``own``, or called lm_head or embed_out. ValueError: there is none, or several, or it is no product.
    """
    modules = dict(model.named_modules())
    kind = type(model).__name__
    if name and name not in modules:
        raise ValueError(f'"cce_dist.head" is "{name}", which {kind} does not have')
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if name:
        found = [name]
    elif is_plain(type(output), own):
        found = [path for path, module in modules.items() if module is output]
    else:
        names = ("lm_head", "embed_out")
        found = [
            path
            for path, module in modules.items()
            if isinstance(module, own) or module is output or path.split(".")[-1] in names
        ]
    if len(found) != 1:
        raise ValueError(
            f"cce_dist looked for the head of {kind}, whose logits are over the vocabulary, and found "
            f'{", ".join(found) or "none"}: name it in "cce_dist.head", if there is one'
        )
    return found[0], checked(modules[found[0]], own, found[0])


def checked(module: Any, own: tuple[type, ...] = (), path: str = "its head") -> Any:
    """Return the module that makes the logits where PEFT has wrapped one; ValueError: it cannot be taken over."""
    head = peft.in_use(module)
    check_class(type(head), own, path)
    if "forward" in vars(head) and not _is_dispatched(head):
        raise ValueError(f"cce_dist cannot take over {path}: somebody has replaced its forward")
    check_weight(head, path)
    return head


def check_weight(head: Any, path: str = "the head") -> None:
    """Raise if a head's weight is no plain tensor of a dtype that the loss is computed in."""
    weight = head.base_layer.weight if hasattr(head, "base_layer") else head.weight
    plain = type(weight) in (nn.Parameter, Tensor) or isinstance(weight, (DTensor, FakeTensor))
    if not plain or weight.dtype not in (*DTYPES, torch.float64):
        raise ValueError(
            f"cce_dist: the weight of {path} is a {type(weight).__name__} of {weight.dtype}, a quantized one or another tensor "
            "subclass: leave the head out of the quantization, or do not convert the model"
        )


def innermost(model: Any) -> Any:
    """Return the model whose forward has the labels among its arguments, from inside of DDP, torch.compile and PEFT."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif type(model).__module__.startswith("peft.") and hasattr(model, "get_base_model"):
            model = model.get_base_model()
        else:
            return model


def is_plain(kind: type, own: tuple[type, ...] = ()) -> bool:
    plain = getattr(kind, "forward", None) is nn.Linear.forward or peft.is_lora(kind) or peft.trains_tokens(kind)
    return plain or issubclass(kind, own) or kind.__name__ == "VocabParallelLinear"  # the last is AutoTP's


def check_class(kind: type, own: tuple[type, ...] = (), path: str = "") -> None:
    """Raise if modules of this class are not the plain product with their weight."""
    if not is_plain(kind, own):
        which = f" ({path})" if path else ""
        advice = ": leave the head out of PEFT's target_modules, or use LoRA" if "peft" in kind.__module__ else ""
        raise ValueError(
            f"cce_dist cannot take over a head that is a {kind.__name__} of {kind.__module__}{which}: it must be nn.Linear or "
            f"CCEHead{advice}"
        )


# Their hooks gather and release the weight, and return a head's output as it is.
HOOKS_OF = ("torch.distributed.fsdp.", "deepspeed.", "megatron.")


def _of_others(hooks: Any, ours: tuple[str, ...] = HOOKS_OF) -> list[str]:
    """Return the names of the hooks that come from other packages than those."""
    found = []
    for hook in hooks:
        function: Any = hook
        while isinstance(function, functools.partial):
            function = function.func
        module = getattr(function, "__module__", None) or type(function).__module__
        if not module.startswith(ours):
            found.append(f"{getattr(function, '__qualname__', type(function).__name__)} of {module}")
    return found


def _is_gathered(head: nn.Module) -> bool:
    """Return whether FSDP, ZeRO or Megatron has hooks on a head."""
    hooks = (*head._forward_pre_hooks.values(), *head._forward_hooks.values())
    return len(hooks) > len(_of_others(hooks))


def check_hooks(head: nn.Module, gathered: bool) -> None:
    """Raise if a head has a hook of somebody else that would be given the loss, or its gradient, in place of logits."""
    every = torch_module
    hooks = _of_others((*head._backward_hooks.values(), *every._global_backward_hooks.values()))
    if gathered:
        hooks += _of_others(head._forward_hooks.values())
        hooks += _of_others(every._global_forward_hooks.values(), (*HOOKS_OF, "torch.utils."))
    for name in hooks:
        raise ValueError(
            f"cce_dist: the head has the hook {name}, which would be given the loss in place of logits: remove the hook, or do "
            "its work in the model's forward"
        )


class _Taken(nn.Module):
    """A module of a converted model, in a subclass of its own class."""

    cce_task: Any

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Name the class by its two bases, which have names that a file can hold."""
        bases = type(self).__bases__
        made: Any = super().__reduce_ex__(protocol)
        if not issubclass(bases[0], _Taken):  # FSDP2 has put its own class before it, and refuses copies
            return made
        return _made_anew, bases, *made[2:]


def _made_anew(mixin: type, base: type) -> Any:
    kind: Any = watched(base) if mixin is Watched else subclass(mixin, base)
    return kind.__new__(kind)


class Watched(_Taken):
    """Stands before the class of a model whose forward computes the loss, and tells its task of every call.

    ``forward`` has the model's own signature: ``watched`` makes it.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        task = vars(self).get("cce_task")
        if task is None:  # given back
            return super().__call__(*args, **kwargs)
        task.begun = True
        try:
            return task.run(self, super().__call__, args, kwargs)
        finally:
            task.begun = False


@functools.cache
def watched(base: type) -> type:
    """Return the subclass of a model's class with ``Watched`` before it, whose ``forward`` may be called without hooks."""
    kind = subclass(Watched, base)
    forward: Any = base.forward  # type: ignore[attr-defined]

    @functools.wraps(forward)
    def watching(self: Any, *args: Any, **kwargs: Any) -> Any:
        task = vars(self).get("cce_task")
        if task is None or task.begun:
            if task is not None:
                task.begun = False
            return forward(self, *args, **kwargs)
        return task.run(self, functools.partial(forward, self), args, kwargs)

    kind.forward = watching  # type: ignore[attr-defined]
    return kind


class Head(_Taken):
    """Stands before the class of a head. Given ``ask``, forward runs it where the parameters are whole."""

    def __call__(self, *args: Any, ask: Callable | None = None, **kwargs: Any) -> Any:
        task = self.cce_task
        if ask is None and not task.deferring():
            return super().__call__(*args, **kwargs)
        gathered = _is_gathered(self)
        check_hooks(self, gathered)
        if gathered and ask is None:
            # A deferred call is answered before the module's hooks: none of them gathers a weight that is not used yet.
            return task.defer(self, *args, **kwargs)
        if gathered:
            return super().__call__(*args, ask=ask, **kwargs)
        # Hooks are given the hidden states and the deferred logits. The request of a loss is none of their business.
        return super().__call__(*args, **kwargs) if ask is None else self.forward(*args, ask=ask, **kwargs)

    def forward(self, *args: Any, ask: Callable | None = None, **kwargs: Any) -> Any:
        task = self.cce_task
        if ask is not None:
            task.num_asked = one_more(task.num_asked)
        elif task.deferring():
            return task.defer(self, *args, **kwargs)
        elif task.rows is not None:
            ask = _dense
        return super().forward(*args, **kwargs) if ask is None else ask(self, *args, **kwargs)


def take(head: Any, task: Any) -> None:
    """Put a head into the subclass of its class that defers; parameters, their names and hooks stay."""
    head.cce_task = task
    put_before(head, subclass(Head, type(head)))


def put_before(module: Any, kind: type) -> None:
    """Put a module into a subclass of its class, or back into its class."""
    before = type(module).forward
    module.__class__ = kind
    if _is_dispatched(module, before):
        module._old_forward = types.MethodType(type(module).forward, module)


def give_back(module: Any) -> None:
    """Undo ``take``, or ``Task.watch``. A class that FSDP2 has changed since stays, and does nothing more."""
    del module.cce_task
    bases = type(module).__bases__
    if issubclass(bases[0], _Taken):
        put_before(module, bases[1])


def _is_dispatched(module: Any, forward: Callable | None = None) -> bool:
    """Return whether accelerate's hooks, of a ``device_map`` say, are around the forward of a module's class."""
    around = getattr(vars(module).get("_old_forward"), "__func__", None)
    return around is (forward or type(module).forward)


@functools.cache
def subclass(mixin: type, base: type) -> type:
    """Return the subclass of ``base`` with a class before it, by base's name, by which others tell layers."""
    return type(base.__name__, (mixin, base), {"__module__": base.__module__, "__qualname__": base.__qualname__})


def argument(method: Callable, name: str, args: tuple, kwargs: dict) -> Any:
    """Return the argument ``name`` of a call of a method, without its self; None where the call or the method has none."""
    if name in kwargs or not args:
        return kwargs.get(name)
    names = list(_signature(method).parameters)[1:]
    position = names.index(name) if name in names else len(args)
    return args[position] if position < len(args) else kwargs.get(name)


_signature = functools.cache(inspect.signature)
