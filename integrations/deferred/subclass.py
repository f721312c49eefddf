"""The head of a model is found, must be a plain product with its weight, and is put into a subclass of its class.

A ``Head`` defers, and a ``Watched`` model reports its calls. While the head's task defers, a call of the head returns deferred
logits. The request for their loss calls the head again with ``ask=``, a function that runs inside of the head's ``forward``. If
FSDP or ZeRO-3 has hooks on the head, the request runs them, and they gather the weight around its real use.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as torch_module

from cce_dist.call import DTYPES
from cce_dist.integrations import peft
from cce_dist.integrations.deferred.tensor import dense


def find_head(model: Any, name: str = "", own: tuple[type, ...] = ()) -> tuple[str, Any]:
    """Return the name of the module that makes a model's logits, and the module.

    With a ``name``, that is the module of this name. Without one, it is the model's output embedding if that is a plain
    product, else the one module that is an instance of ``own``, the output embedding, or called lm_head or embed_out.

    Raises:
        ValueError: There is no such module, or more than one, or it cannot be taken over.
    """
    modules = dict(model.named_modules())
    kind = type(model).__name__
    if name and name not in modules:
        raise ValueError(f'"cce_dist.head" is "{name}", which {kind} does not have: {_advice(modules, own)}')
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
            f"{', '.join(found) or 'none'}: {_advice(modules, own)}"
        )
    return found[0], checked(modules[found[0]], own, found[0])


def _advice(modules: dict[str, Any], own: tuple[type, ...]) -> str:
    """Return how to name a head, with the model's linear modules, those over the largest embedding's vocabulary first."""
    vocabulary = max((x.num_embeddings for x in modules.values() if isinstance(x, nn.Embedding)), default=0)
    rows = {name: peft.num_rows(module) or 0 for name, module in modules.items() if is_plain(type(module), own)}
    if hasattr(modules[""], "get_output_embeddings") and vocabulary not in rows.values():  # a model of transformers
        return "it has no language-model head: load it with AutoModelForCausalLM"
    names = sorted(rows, key=lambda name: (rows[name] != vocabulary, -rows[name]))
    if not names:
        return "it has no nn.Linear"
    example = names[0] if rows[names[0]] == vocabulary else "its.name"
    seen = ", ".join(f"{name or 'that it is itself'} ({rows[name]} rows)" for name in names[:4])
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return (
        f'name it by convert(model, head="{example}"), or "cce_dist.head" in ds_config; it has the Linear {seen}{more}'
    )


def checked(module: Any, own: tuple[type, ...] = (), path: str = "its head") -> Any:
    """Return the module itself, from inside of PEFT's wrappers. ValueError: it cannot be taken over."""
    head = peft.in_use(module)
    check_class(type(head), own, path)
    peft.check_kind(head)
    if "forward" in vars(head) and not is_dispatched(head):
        raise ValueError(f"cce_dist cannot take over {path}: somebody has replaced its forward")
    if any(type(part).__name__ == "_SpectralNorm" for part in head.modules()):
        raise ValueError(f"cce_dist cannot take over {path}: spectral_norm takes a step whenever the weight is read")
    check_weight(head, path)
    return head


def check_weight(head: Any, path: str = "the head") -> None:
    """Raise unless a head's weight is a plain tensor of a dtype that the loss supports."""
    weight = head.weight
    plain = type(weight) in (nn.Parameter, Tensor) or isinstance(weight, (DTensor, FakeTensor))
    if not plain or weight.dtype not in (*DTYPES, torch.float64):
        raise ValueError(
            f"cce_dist: the weight of {path} is a {type(weight).__name__} of {weight.dtype}, a quantized one or another tensor "
            "subclass: leave the head out of the quantization, or do not convert the model"
        )


def innermost(model: Any) -> Any:
    """Return the model inside of DDP, torch.compile and PEFT, whose forward takes the labels."""
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
    kind = own_class(kind)
    plain = getattr(kind, "forward", None) is nn.Linear.forward or peft.is_lora(kind) or peft.trains_tokens(kind)
    return plain or issubclass(kind, own) or kind.__name__ == "VocabParallelLinear"  # the last is AutoTP's


def check_class(kind: type, own: tuple[type, ...] = (), path: str = "") -> None:
    """Raise unless modules of this class compute the plain product with their weight."""
    if not is_plain(kind, own):
        which = f" ({path})" if path else ""
        advice = f": use LoRA, or {peft.INSTEAD}" if "peft" in kind.__module__ else ""
        raise ValueError(
            f"cce_dist cannot take over a head that is a {kind.__name__} of {kind.__module__}{which}: it must be nn.Linear or "
            f"CCEHead{advice}"
        )


def take(head: Any, task: Any) -> None:
    """Put a head into a subclass of its class that defers. Parameters, their names and hooks stay."""
    head.cce_task = task
    _change_class(head, subclass(Head, type(head)))


def watch(model: Any, task: Any) -> None:
    """Put a model into a subclass of its class that tells a task of every call."""
    if not isinstance(model, Watched):
        _change_class(model, watched(type(model)))
    model.cce_task = task


def _change_class(module: Any, kind: type) -> None:
    """Change the class of a module, and the forward that accelerate has noted, if it has."""
    before = type(module).forward
    module.__class__ = kind
    if is_dispatched(module, before):
        module._old_forward = types.MethodType(type(module).forward, module)


def give_back(module: Any) -> None:
    """Undo ``take`` or ``watch``. If FSDP2 has changed a model's class since then, the class stays, but has no effect.

    Raises:
        ValueError: The class of a head was changed since.
    """
    own = own_class(type(module))
    if own is type(module) and isinstance(module, Head):
        raise ValueError(
            "cce_dist: the class of the head was changed again since it was taken over, by FSDP2 say: undo that first"
        )
    del module.cce_task
    _change_class(module, own)


def own_class(kind: type) -> type:
    """Return the class that a module had before ``take`` or ``watch``, or ``kind`` if there is none to see."""
    bases = kind.__bases__
    return bases[1] if issubclass(bases[0], _Taken) else kind


def is_dispatched(module: Any, forward: Callable | None = None) -> bool:
    """Return whether accelerate has wrapped the forward of a module's class, for example for a ``device_map``."""
    around = getattr(vars(module).get("_old_forward"), "__func__", None)
    return around is (forward or type(module).forward)


@functools.cache
def subclass(mixin: type, base: type) -> type:
    """Return a subclass of ``base`` with a mixin before it. Its name is base's: other code recognizes layers by name."""
    return type(base.__name__, (mixin, base), {"__module__": base.__module__, "__qualname__": base.__qualname__})


class _Taken(nn.Module):
    """Base of ``Watched`` and ``Head``."""

    cce_task: Any

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the class as its two bases, which can be imported by name."""
        bases = type(self).__bases__
        made: Any = super().__reduce_ex__(protocol)
        if not issubclass(bases[0], _Taken):  # FSDP2 has put its own class first, and refuses copies
            return made
        return _made_anew, bases, *made[2:]


class Head(_Taken):
    """Base class put before a head's own class: it returns deferred logits while the task defers."""

    def __call__(self, *args: Any, ask: Callable | None = None, **kwargs: Any) -> Any:
        task = self.cce_task
        if ask is None and not task.deferring():
            return super().__call__(*args, **kwargs)
        gathered = check_hooks(self)
        if gathered and ask is None:
            # Without the hooks, which would gather a weight that is not used yet.
            return task.defer(self, *args, **kwargs)
        if gathered:
            return super().__call__(*args, ask=ask, **kwargs)
        # Other hooks run once, when the head is called, and see hidden states and deferred logits. The request skips them.
        return super().__call__(*args, **kwargs) if ask is None else self.forward(*args, ask=ask, **kwargs)

    def forward(self, *args: Any, ask: Callable | None = None, **kwargs: Any) -> Any:
        task = self.cce_task
        if ask is not None:
            task.count_request()
        elif task.deferring():
            return task.defer(self, *args, **kwargs)
        else:
            if not task.calls and self.training and torch.is_grad_enabled():
                task.count_unwatched()
            if task.rows is not None:
                ask = dense
        return super().forward(*args, **kwargs) if ask is None else ask(self, *args, **kwargs)


class Watched(_Taken):
    """Base class put before the class of a model whose forward computes the loss: it tells the task of every call."""

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
    """Return the subclass of a model's class with ``Watched`` before it; a call of its ``forward`` alone is watched, too."""
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


def _made_anew(mixin: type, base: type) -> Any:
    kind: Any = watched(base) if mixin is Watched else subclass(mixin, base)
    return kind.__new__(kind)


# Hooks of these packages gather and release the weight, and do not change the output.
HOOKS_OF = ("torch.distributed.fsdp.", "deepspeed.", "megatron.")


def _of_others(hooks: Any, ours: tuple[str, ...] = HOOKS_OF) -> list[str]:
    """Return the names of the hooks that come from other packages."""
    found = []
    for hook in hooks:
        function: Any = hook
        while isinstance(function, functools.partial):
            function = function.func
        module = getattr(function, "__module__", None) or type(function).__module__
        if not module.startswith(ours):
            found.append(f"{getattr(function, '__qualname__', type(function).__name__)} of {module}")
    return found


def check_hooks(head: nn.Module) -> bool:
    """Return whether FSDP, ZeRO or Megatron has hooks on a head.

    Raises:
        ValueError: A hook of another package would be given the loss, or its gradient, in place of logits.
    """
    forward = (*head._forward_pre_hooks.values(), *head._forward_hooks.values())
    gathered = len(forward) > len(_of_others(forward))
    every = torch_module
    backward = (
        head._backward_hooks,
        head._backward_pre_hooks,
        every._global_backward_hooks,
        every._global_backward_pre_hooks,
    )
    hooks = _of_others([hook for registered in backward for hook in registered.values()])
    if gathered:
        hooks += _of_others(head._forward_hooks.values())
        hooks += _of_others(every._global_forward_hooks.values(), (*HOOKS_OF, "torch.utils."))
    for name in hooks:
        raise ValueError(
            f"cce_dist: the head has the hook {name}, which would be given the loss in place of logits: remove the hook, or do "
            "its work in the model's forward"
        )
    return gathered
