"""Captures: what the head gets at some steps of a run, for ``cce-dist bench --workload``.

The cost and the errors of a filter follow from how sure a model is of its next token, and no drawn softmax is one of a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cce_dist.tools.pretrain.engine import Engine

TOKENS = 8192  # at most, of a batch: whole sequences where they are no longer than that


@contextmanager
def captured(engine: Engine, step: int) -> Iterator[None]:
    """Write ``out/captured/step-N.pt`` with what the head gets inside, where the recipe names this step.

    The file is a dict: "hidden" [N, D] and "weight" [V, D] in the run's dtype, "labels" [N] int64, -100 where ignored. They are
    those of the first microbatch, before the optimizer's step.

    Raises:
        OSError: The file cannot be written.
    """
    recipe = engine.recipe
    if step not in recipe.capture:
        yield
        return
    seen: list[dict[str, Tensor]] = []

    def look(head: nn.Module, args: tuple[Any, ...]) -> None:
        if not seen:
            dtype = getattr(torch, recipe.dtype)
            hidden, labels = (tensor.detach().transpose(0, 1).flatten(0, 1)[:TOKENS] for tensor in args[:2])
            weight: Any = head.weight
            tensors = {"hidden": hidden.to(dtype), "weight": weight.detach().to(dtype), "labels": labels}
            seen.append({name: tensor.cpu().clone() for name, tensor in tensors.items()})

    hook = engine.model.head.register_forward_pre_hook(look)
    try:
        yield
    finally:
        hook.remove()
    folder = recipe.out / "captured"
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(seen[0], folder / f"step-{step}.pt")
