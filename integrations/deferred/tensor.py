"""Deferred logits that model code takes for a tensor [..., V], and that lead to ``F.cross_entropy``.

In training every other use raises an error that names the use. In evaluation any other use computes the logits from the saved
hidden states and weight. It raises ``ChangedError`` instead if the logits are stale, because they would not fit the loss beside
them; docs/huggingface.md lists when. A forward in training makes logits stale, too: optimizers that write through
``.data``, as DeepSpeed's do, change no version, and DTensors and parameters of ZeRO-3 have no version to compare.

Letters: D hidden size, N tokens, V the vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import _reduction
from torch.utils import _pytree as pytree

from cce_dist.integrations import peft
from cce_dist.integrations.deferred.logits import (
    ChangedError,
    DeferredLogits,
    NotComputedError,
    OnDemand,
    Versions,
    is_sharded,
)


class TensorLogits(DeferredLogits):
    """Logits [..., V] of the whole vocabulary, for code that takes them for a tensor and ends in ``F.cross_entropy``.

    Code may also read shape, dtype and device, change the leading dimensions, cast, cut off the last ids (``[..., :k]``), and
    add one tensor [V], a bias that the model keeps outside of its head. If the model is in evaluation, or made the logits
    without gradients, any other use computes the logits once and then works on that tensor.
    """

    HINT = (
        "call the model in eval() or under no_grad to get logits; in training the loss comes from hidden states, by "
        "F.cross_entropy of logits [N, V] and class ids; log-probabilities, entropies and top-k come from "
        "cce_dist.linear_log_probs, divergences from linear_kl_divergence, other losses from "
        "linear_cross_entropy(token_loss=...), a z-loss from convert(model, z_loss_weight=...)"
    )
    SMOOTHING = (  # Trainer's label_smoothing_factor calls log_softmax
        "cce_dist.linear_log_probs returns log-probabilities; in place of Trainer's label_smoothing_factor label smoothing "
        'is an option of the conversion (label_smoothing=0.1, "cce_dist.label_smoothing"); with TRL\'s trainers call '
        "cce_dist.integrations.trl.install() in place of the conversion; "
    )

    def __init__(self, head: Any, task: Any, hidden: Tensor, **given: Any) -> None:
        super().__init__(head, task, hidden, **given)
        self._cast: torch.dtype | None = None  # what the caller has cast the logits to
        self._shard = task.shard  # of a smaller vocabulary once the caller has cut off padding columns
        self._added: Tensor | None = None  # a bias [V]
        # Logits that are derived from these share what follows.
        self._head_trains, self._adapters = head.training, peft.adapters(head)
        self._weights: list[Any] = peft.weights(head)
        self._head_versions, self._hidden_versions = Versions(*self._weights), Versions(hidden)
        self._last_training = task.last_training
        self._looks: list[Versions] = []
        self._draws: list[bool] = []  # one element once an adapter's dropout was drawn
        self._ddp_follows = self._made_with_grad and _ddp_follows_outputs()
        kind = hidden.device.type
        self._autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        einops = sys.modules.get("einops._backends")
        if einops is not None and not torch.compiler.is_compiling():  # einops treats these logits as torch's tensors
            einops._type2backend.setdefault(TensorLogits, einops.get_backend(torch.empty(0)))

    def __repr__(self) -> str:
        return f"TensorLogits({list(self.shape)}, {self.dtype}, not computed)"

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self._hidden.shape[:-1], self._shard.vocab_size))

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
        bare = self._added is None and (self._factor, self._softcap, self._shard.vocab_size) == (1, None, rows)
        is_bias = (
            isinstance(other, Tensor) and other.dim() <= self.ndim and other.shape[-1:].numel() == other.numel() == rows
        )
        if not bare or not is_bias:
            return self._other_use("__add__", "__add__", other)
        # A copy, because the model may change its bias before the logits are computed.
        return self._with(added=other.reshape(rows).clone(), cast=torch.promote_types(self.dtype, other.dtype))

    # A cast changes only the dtype of the result: the loss is computed in fp32 from fp32 accumulators.
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
            last = self._shard.vocab_size
        if last != self._shard.vocab_size:
            return self._other_use(f"view{sizes} over the vocabulary of {self._shard.vocab_size}", "reshape", sizes)
        return self._with(hidden=self._hidden.reshape(*leading, self._hidden.shape[-1]))

    reshape = view

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        if end_dim % self.ndim == self.ndim - 1:
            return self._other_use("flatten over the vocabulary", "flatten", start_dim, end_dim)
        return self._with(hidden=self._hidden.flatten(start_dim, end_dim))

    def __getitem__(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) == 2 and parts[0] is Ellipsis and isinstance(parts[1], slice):
            start, stop, step = parts[1].indices(self._shard.vocab_size)
            if (start, step) == (0, 1) and stop > 0:
                return self._with(shard=dataclasses.replace(self._shard, vocab_size=stop))
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
        in_place = _is_in_place(name) or kwargs.get("inplace")
        if (in_place and isinstance(first, cls)) or isinstance(kwargs.get("out"), cls):
            cls._change_in_place(name)
        args, kwargs = pytree.tree_map_only(cls, lambda logits: logits._computed(name), (args, kwargs))
        return function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"logits have no attribute {name}")
        if _is_in_place(name):
            self._change_in_place(name)
        return getattr(self._computed(name), name)

    @classmethod
    def _change_in_place(cls, name: str, *_: Any) -> NoReturn:
        # The change would be made to a computed tensor, and be lost for the loss and for the next use.
        raise NotComputedError(
            f"cce_dist: {name} changes in place logits that are not computed; use its form that returns a new tensor"
        )

    def __setitem__(self, index: Any, value: Any) -> None:
        self._change_in_place("an assignment to a part")

    def _other_use(self, use: str, name: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._computed(use), name)(*args, **kwargs)

    def _computed(self, use: str) -> Tensor:
        """Compute the logits [..., V], at the first use; an error in training."""
        if not self._is_for_use():
            cure = self.SMOOTHING if use == "log_softmax" else ""
            raise NotComputedError(f"cce_dist: {cure}{str(self._refused(use)).removeprefix('cce_dist: ')}")
        if self._shard.group is not None:
            raise NotComputedError(
                f"cce_dist: {use} of logits whose vocabulary is split over ranks, which has no answer here"
            )
        if "_value" not in vars(self):
            with torch.set_grad_enabled(self._made_with_grad):
                logits = self._ask(lambda head, hidden: dense(head, hidden, self._added))
                logits = logits[..., : self._shard.vocab_size] * self._factor
                logits = logits if self._softcap is None else logits.tanh() * self._softcap
                self._value = logits.to(self._cast or logits.dtype)
            self._looks.append(Versions(self._value))
        return self._value

    def _scaling(self) -> dict[str, Any]:
        return {**super()._scaling(), "added": self._added}

    def _ask(self, compute: Callable) -> Any:
        self._check()
        if self._head_trains and peft.has_dropout(self._head):
            if self._draws:
                raise RuntimeError(
                    "cce_dist: logits of a head with lora_dropout are used twice, and each use would draw another dropout: "
                    "take one loss of them, or set lora_dropout=0; in evaluation call model.eval()"
                )
            self._draws.append(True)
        # Autocast as at the call of the head, which may differ from autocast where the loss is asked for.
        kind, dtype, enabled = self._autocast
        with torch.autocast(kind, dtype, enabled):
            return super()._ask(lambda head, *hidden: compute(self._as_called(head), *hidden))

    def _as_called(self, head: Any) -> Any:
        """Return the head, or a stand-in with the weight and bias that it was called with if they were replaced since."""
        if any(is_sharded(x) for x in self._weights):
            return head
        if isinstance(self._weights[0], nn.Parameter) or peft.is_lora(type(head)):
            now = peft.weights(head)
            if any(is_sharded(x) for x in now) or all(x is y for x, y in zip(now, self._weights, strict=True)):
                return head
            if peft.is_lora(type(head)):
                raise ChangedError("the head's weight or an adapter was replaced")
        weight, bias = self._weights
        return types.SimpleNamespace(weight=weight, bias=bias, cce_task=self._task)

    def _check(self) -> None:
        """Raise ChangedError if something that the logits are computed from has changed since the head was called."""
        for versions in self._looks:
            versions.check("logits computed before")
        self._hidden_versions.check("the hidden states")
        if peft.adapters(self._head) != self._adapters:
            raise ChangedError("the adapters on the head changed")
        self._head_versions.check("the head's weight or bias")
        if self._head.training != self._head_trains and peft.has_dropout(self._head):
            raise ChangedError("the mode of the head, whose adapter has a dropout, changed")
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
        """Return whether the logits may be used for anything besides a loss."""
        return not (self._training and self._made_with_grad)

    def _for_later(self) -> Any:
        """Return what the caller of a model in evaluation gets: where possible a tensor that is computed at its first use.

        Compiled code cannot make such a tensor. It computes the logits at once, as if the model were not converted.
        """
        if torch.compiler.is_compiling() and self._shard.group is None and self._task.rows is None:
            return self._computed("a look")
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self
        return OnDemand(self.shape, self.dtype, self.device, functools.partial(self._computed, "a look"))


def _ddp_follows_outputs() -> bool:
    """Return whether DDP, around the present forward, looks for the graph of the loss in tensors of the forward's output."""
    if torch.compiler.is_compiling():
        return False
    ddp = nn.parallel.DistributedDataParallel._active_ddp_module
    return ddp is not None and (ddp.find_unused_parameters or ddp.static_graph)


def for_later(output: Any, dtype: torch.dtype | None) -> Any:
    """Replace the logits in the output of a model in evaluation by what its caller gets, cast to ``dtype`` if there is one."""
    if isinstance(output, TensorLogits):
        return (output if dtype is None else output.to(dtype))._for_later()
    if type(output) is tuple:
        return tuple(for_later(part, dtype) for part in output)
    if isinstance(output, dict):
        for name, part in output.items():
            if isinstance(part, TensorLogits):
                output[name] = for_later(part, dtype)
    return output


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def _operator(name: str) -> Callable:
    return lambda self, *args, **kwargs: self._other_use(name, name, *args, **kwargs)


def _in_place(name: str) -> Callable:
    return lambda self, *_: self._change_in_place(name)


# Python looks operators up on the class, never by ``__getattr__``.
_OPERATORS = """
radd sub rsub rtruediv floordiv rfloordiv mod rmod neg abs pow rpow matmul rmatmul lt le gt ge eq ne and or xor invert
bool float int len iter contains array
"""
for _name in _OPERATORS.split():
    setattr(TensorLogits, f"__{_name}__", _operator(f"__{_name}__"))
# Without these, ``x *= 2`` in a function would bind a new ``x`` there and leave its caller's logits unchanged.
for _name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor"):
    setattr(TensorLogits, f"__{_name}__", _in_place(f"__{_name}__"))


def dense(head: Any, hidden: Tensor, added: Tensor | None = None) -> Tensor:
    """Return the head's logits. Outside of FSDP2's forward this gathers the weight and the bias."""
    hidden, *factors = peft.operands(head, hidden)
    rows = head.cce_task.rows
    gathered = (lambda x: x.full_tensor().to(hidden.dtype)) if rows is None else functools.partial(rows.whole, hidden)
    whole: list[Any] = [gathered(x) if isinstance(x, DTensor) else x for x in factors]
    return F.linear(hidden, whole[0], peft.sum_of_biases(whole[1], added))


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
    if target.is_floating_point() or input.shape[:-1] != target.shape or input.ndim > 2:
        raise ValueError(
            f"cce_dist: F.cross_entropy needs logits [N, V] and class ids [N], got {tuple(input.shape)} and "
            f"{tuple(target.shape)} {target.dtype}; flatten them"
        )
    task = input._task
    task.check_place(input._head, input._ddp_follows)
    call: dict[str, Any] = dict(
        shard=input._shard,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        training=input._training,
        **input._scaling(),
    )
    if weight is not None:
        if task.rows is not None or getattr(task, "sequence_group", None) is not None:
            raise ValueError(
                "cce_dist: F.cross_entropy with class weights does not go with shard_over or sequence_mean: multiply the "
                "losses of reduction='none' by them"
            )
        call["weight"] = weight
    try:
        answer = input._ask(lambda head, hidden: task.loss(head, hidden, target, **call))
    except IndexError as error:
        raise IndexError(f"labels, which F.cross_entropy gets as target: {error}") from None
    loss = task.keep(answer, target != ignore_index) if isinstance(answer, tuple) else answer
    # Autocast computes a cross-entropy in fp32. Without it the loss has the dtype of the logits.
    in_fp32 = torch.is_autocast_enabled(loss.device.type) and input.dtype != torch.float64
    return loss.to(torch.float32 if in_fp32 else input.dtype)
