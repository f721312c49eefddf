"""Heads that PEFT has wrapped: LoRA, copies of the head, and rows or parameters that PEFT trains (docs/peft.md).

LoRA adds ``s B A`` [V, D] to a frozen weight W [V, D], from A [r, D] and B [V, r]. The logits are one product of longer rows,

    E W^T + (s E A^T) B^T  =  [E | s E A^T] [W | B]^T

so ``linear_cross_entropy`` takes hidden states [N, D + r] and a weight [V, D + r], with all its options. The last r columns of
dC are dB. The last r columns of dE are the gradient of ``s E A^T``, from which autograd computes dA and the rest of dE.

Computing W + s B A instead would round it to the weight's dtype. In bf16 that rounding is larger than B A early in training.

Letters: D hidden size, V the vocabulary, r the rank of an adapter.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

INSTEAD = 'modules_to_save=["lm_head"] of the PEFT configuration in place of target_modules'


def in_use(head: Any) -> Any:
    """Return the module inside PEFT's wrappers that multiplies with the head's weight.

    The wrappers are those of ``modules_to_save``, ``trainable_token_indices`` and ``target_parameters``. For the last, PEFT
    replaces the module's weight while it calls the module.
    """
    peft = sys.modules.get("peft")
    if peft is None:
        return head
    if isinstance(head, getattr(peft.tuners.lora.layer, "ParamWrapper", ())):
        return head.get_base_layer()
    if isinstance(head, getattr(peft.utils.other, "TrainableTokensWrapper", ())):
        return head.token_adapter
    if not isinstance(head, peft.utils.other.ModulesToSaveWrapper):
        return head
    if head.disable_adapters or not head.active_adapters:
        return head.original_module
    return head.modules_to_save[head.active_adapters[0]]


def check_order(model: nn.Module) -> None:
    """Raise RuntimeError if PEFT has wrapped a head since it was converted."""
    for name, module in model.named_modules() if "peft" in sys.modules else ():
        inside = getattr(module, "base_layer", getattr(module, "original_module", None))
        if inside is not in_use(module) and "cce_task" in getattr(inside, "__dict__", ()):
            raise RuntimeError(
                f"cce_dist: PEFT has wrapped {name} since convert: call convert after get_peft_model, or now call "
                "cce_dist.revert(model), then convert"
            )


def is_lora(kind: type) -> bool:
    """Return whether modules of this class are ``nn.Linear`` with LoRA's adapters."""
    peft = sys.modules.get("peft")
    return peft is not None and issubclass(kind, peft.tuners.lora.Linear)


def trains_tokens(kind: type) -> bool:
    """Return whether modules of this class replace rows of a weight (``trainable_token_indices``)."""
    tokens = sys.modules.get("peft.tuners.trainable_tokens")
    return tokens is not None and issubclass(kind, tokens.TrainableTokensLayer)


def operands(head: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the factors of a head's logits for hidden [..., D], and its bias.

    Returns:
        hidden [..., D + r], weight [V, D + r], bias [V] or None. r is the sum of all active adapters' ranks.
    """
    if not is_lora(type(head)):
        weight, bias = weights(head)
        return hidden, weight, bias  # type: ignore[return-value]
    if head.disable_adapters and head.merged:
        head.unmerge()
    base = head.base_layer
    check_kind(head)
    if base.weight.dim() != 2 or base.weight.numel() == 0:
        raise ValueError(
            f"cce_dist: the weight under LoRA on the head is a piece {tuple(base.weight.shape)} here: ZeRO-3 gathers it in "
            "base_layer alone; leave lm_head out of target_modules, use modules_to_save, or ZeRO-2"
        )
    rows, columns, bias = [hidden], [base.weight], base.bias
    for name in _added(head):
        down, up, scale = head.lora_A[name], head.lora_B[name], head.scaling[name]
        low = scale * down(head.lora_dropout[name](hidden.to(down.weight.dtype)))
        rows.append(low.to(hidden.dtype))
        columns.append(up.weight.to(base.weight.dtype))
        if up.bias is not None:
            bias = sum_of_biases(bias, scale * up.bias)
    if len(rows) == 1:
        return hidden, base.weight, bias
    return torch.cat(rows, -1), torch.cat(columns, 1), None if bias is None else bias.to(base.weight.dtype)


def _added(head: Any) -> list[str]:
    """Return the names of the adapters that a LoRA layer adds to its weight."""
    if head.disable_adapters or head.merged:
        return []
    return [name for name in head.active_adapters if name in head.lora_A]


def has_dropout(head: Any) -> bool:
    """Return whether a head in training draws random numbers for each product with an adapter."""
    return is_lora(type(head)) and any(getattr(head.lora_dropout[name], "p", 0) > 0 for name in _added(head))


def adapters(head: Any) -> Any:
    """Return the adapters that are added to a head's weight, with their scales, and the adapters that are merged into it."""
    if not is_lora(type(head)):
        return None
    merged = [] if head.disable_adapters else list(head.merged_adapters)
    return [(name, head.scaling[name]) for name in _added(head)], merged


def weights(head: Any) -> list[Tensor | None]:
    """Return the tensors that a head uses now: weight, bias, then LoRA's adapters; None for a missing bias."""
    if trains_tokens(type(head)):
        if head.disable_adapters and head.merged:
            head.unmerge()
        if head.disable_adapters or head.merged or not head.active_adapters:
            return weights(head.base_layer)
        head._check_overlapping_tokens(head.active_adapters)
        return [head.get_merged_weights(head.active_adapters), None]  # PEFT leaves the bias out
    if not is_lora(type(head)):
        return [head.weight, getattr(head, "bias", None)]
    found = [head.base_layer.weight, head.base_layer.bias]
    for name in _added(head):
        down, up = head.lora_A[name], head.lora_B[name]
        found += [down.weight, up.weight, up.bias]
    return found


def num_rows(head: Any) -> int | None:
    """Return the number of rows of a head's weight, or None if it is sharded. ``out_features`` may be wrong."""
    shape = getattr(head.weight, "ds_shape", head.weight.shape)  # ZeRO-3's
    return shape[0] if len(shape) == 2 else None


def sum_of_biases(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return the sum of two biases [V], either of which may be None."""
    return one if other is None else other if one is None else one + other


def check_kind(head: Any) -> None:
    """Raise ValueError if a head has LoRA that adds anything but ``s B A``, or has it on a layer that is no ``nn.Linear``."""
    if not is_lora(type(head)):
        return
    base = head.base_layer
    if type(base).forward is not nn.Linear.forward:
        raise ValueError(
            f"cce_dist cannot take over LoRA on a head that is a {type(base).__name__}: it must be nn.Linear"
        )
    variants = [type(v).__name__ for name, v in head.lora_variant.items() if name in head.active_adapters]
    if variants:
        raise ValueError(
            f"cce_dist cannot take over a head with {variants[0]}: only plain LoRA is a sum of matmuls; train the head itself "
            f"({INSTEAD}). A pull request that returns the variant's factors from operands() in integrations/peft.py would "
            "serve it"
        )
