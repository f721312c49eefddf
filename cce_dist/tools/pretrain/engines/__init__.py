"""Engines: whoever makes a model and its optimizer and drives them. ``Engine`` is all that the training loop knows of one.

``torch`` is plain torch; ``megatron`` and ``deepspeed`` train the same model from the same weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor  # "import torch" would bind a name that the submodule torch takes over

from cce_dist.tools.pretrain.data import Batches
from cce_dist.tools.pretrain.ranks import Ranks
from cce_dist.tools.pretrain.recipe import Recipe


class Step(NamedTuple):
    """The results of an optimizer step, on the device: nothing has waited for them.

    Attributes:
        loss: 0-d, mean over those tokens of the whole batch that are not ignored.
        grad_norm: 0-d, of the whole gradient, before clipping.
    """

    loss: Tensor
    grad_norm: Tensor


class Engine(Protocol):
    """A model, its optimizer and how they are driven. Every rank calls every method, and all communicate.

    Attributes:
        recipe, ranks: What the engine was made with.
        has_loss: Whether this rank is of the last stage, which computes the loss.
        layout: What a checkpoint's ranks must have in common with this run's, by name.
    """

    recipe: Recipe
    ranks: Ranks
    has_loss: bool
    layout: dict[str, Any]

    def __init__(self, recipe: Recipe, ranks: Ranks) -> None:
        """Make model and optimizer, on ranks that have joined.

        Raises:
            UsageError: The engine cannot split the model so.
        """
        ...

    def step(self, step: int, ids: np.ndarray, labels: np.ndarray) -> Step:
        """Take optimizer step number ``step``, counted from 1, on a whole batch: ids and labels, [batch size, s] int64."""
        ...

    def validate(self, held_out: Batches, num_batches: int | None = None) -> float:
        """Return the mean loss of the first batches, ``eval_batches`` unless said, the same ones every time; on every rank."""
        ...

    def save_tensors(self, folder: Path) -> None:
        """Write this rank's part of model and optimizer to a folder that all ranks share and that is not there yet.

        A rank that cannot write takes part in all collectives nevertheless, and raises at the end.

        Raises:
            torch.distributed.checkpoint.CheckpointException, OSError: Some rank could not write.
        """
        ...

    def load_tensors(self, folder: Path) -> None:
        """Read it again."""
        ...


def set_learning_rate(optimizer: Any, rate: float) -> None:
    """Have an optimizer take its next step with this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
