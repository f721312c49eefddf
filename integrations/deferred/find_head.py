"""The head of a model, and whether it can be taken over: it must be a plain product with its weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor

from cce_dist.call import DTYPES
from cce_dist.integrations import peft
from cce_dist.integrations.deferred.subclass import is_dispatched, own_class


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
