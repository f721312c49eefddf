"""How far a head's gradient is from the dense one, on hidden states of the model in training.

Four gradients tell what a filter does: dE; its mean over tokens, where errors that all push the same way add up; dC; and
the rows of dC whose token is no label of the batch, which have nothing but the softmax's small probabilities.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from cce_dist import LinearCrossEntropyOutput, VocabParallelHead, linear_cross_entropy
from cce_dist.bench.loop import loss_of, truth_of
from cce_dist.pretrain.data import IGNORED
from cce_dist.pretrain.engines.torch import TorchEngine
from cce_dist.pretrain.recipe import Recipe

GRADIENTS: tuple[str, ...] = ("dE", "mean dE", "dC", "rare dC")


def probe(
    engine: TorchEngine, head: nn.Module, ids: np.ndarray, labels: np.ndarray
) -> tuple[dict[str, float], dict[str, float], float]:
    """Compare the gradients of ``head`` over the first microbatch with the dense ones, from the same rounded operands.

    Returns:
        Cosine and norm over the dense one's, by the names in ``GRADIENTS``, NaN where a gradient is 0; and
        ``FilterStats.kept``, NaN for what is no filter of this library.
    """
    recipe, model = engine.recipe, engine.model
    part_ids, part_labels = next(engine.ranks.microbatches(ids, labels, recipe.accumulate))
    with torch.no_grad(), recipe.autocast():
        hidden = model.hidden_states(part_ids).to(getattr(torch, recipe.dtype))
    weight = model.head.weight
    assert isinstance(weight, nn.Parameter)
    ours = _gradients(recipe, head, hidden, weight, part_labels)
    truth = truth_of(loss_of(hidden.flatten(0, -2), weight.detach().to(hidden.dtype), part_labels.flatten()))
    rare = torch.ones(len(truth.d_weight), dtype=torch.bool, device=hidden.device)
    rare[part_labels[part_labels != IGNORED]] = False
    d_hidden, d_weight = ours[0].flatten(0, -2), ours[1]
    pairs = (
        (d_hidden, truth.d_hidden),
        (d_hidden.double().mean(0), truth.d_hidden.double().mean(0)),
        (d_weight, truth.d_weight),
        (d_weight[rare], truth.d_weight[rare]),
    )
    columns = torch.stack([_cosine_and_norm(one, other) for one, other in pairs], 1).tolist()
    cosine, norm = (dict(zip(GRADIENTS, column, strict=True)) for column in columns)
    kept_tiles = math.nan
    if isinstance(head, VocabParallelHead) and head.loss_options["grad_filter"] is not None:
        with torch.no_grad(), recipe.autocast():
            options = {**head.loss_options, "return_aux": ("filter_stats",)}
            output = linear_cross_entropy(hidden, head.weight, part_labels, **options)
        assert isinstance(output, LinearCrossEntropyOutput) and output.filter_stats is not None
        kept_tiles = output.filter_stats.kept.item()
    return cosine, norm, kept_tiles


def _gradients(
    recipe: Recipe, head: nn.Module, hidden: Tensor, weight: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    hidden = hidden.detach().requires_grad_()
    with recipe.autocast():
        loss = head(hidden, labels, num_tokens=int((labels != IGNORED).sum()))
    d_hidden, d_weight = torch.autograd.grad(loss, (hidden, weight))
    return d_hidden, d_weight


def _cosine_and_norm(gradient: Tensor, truth: Tensor) -> Tensor:
    """Cosine of two gradients, and the norm of the first over that of the second. -> [2] fp64"""
    gradient, truth = gradient.double().flatten(), truth.double().flatten()
    norm, true_norm = gradient.norm(), truth.norm()
    return torch.stack((gradient @ truth / (norm * true_norm), norm / true_norm))
