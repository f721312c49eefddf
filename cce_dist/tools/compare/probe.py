"""Compare a head's gradient with the dense one, on hidden states of the model in training.

Four gradients show what a filter does: dE; its mean over tokens, in which errors of the same sign add up; dC; and the rows of
dC whose id is no label of the batch, which come from small probabilities alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from cce_dist.tools.bench.problem import Problem, loss_of, reference_of
from cce_dist.tools.bench.workload import probability_by_rank
from cce_dist.tools.pretrain.data import IGNORED
from cce_dist.tools.pretrain.engine import Engine
from cce_dist.tools.pretrain.recipe import Recipe

GRADIENTS: tuple[str, ...] = ("dE", "mean dE", "dC", "rare dC")


class Agreement(NamedTuple):
    """A method's gradients beside the dense ones, by the names in ``GRADIENTS``."""

    cosine: dict[str, float]  # NaN where a gradient is 0
    norm: dict[str, float]  # of the method's gradient, over the norm of the dense one
    dense_norm: dict[str, float]  # of the dense gradient
    batch_loss: float  # dense loss of the batch
    by_rank: list[float]  # ``probability_by_rank`` of the batch


def probe(engine: Engine, head: nn.Module, ids: np.ndarray, labels: np.ndarray) -> Agreement:
    """Compare the gradients of ``head`` over the first microbatch with the dense ones, from the same rounded operands."""
    recipe, model = engine.recipe, engine.model
    part_ids, part_labels = next(engine.ranks.microbatches(ids, labels, recipe.accumulate))
    with torch.no_grad(), recipe.autocast():
        hidden = model.hidden_states(part_ids).to(getattr(torch, recipe.dtype))
    weight = model.head.weight
    assert isinstance(weight, nn.Parameter)
    d_hidden, d_weight = _gradients(recipe, head, hidden, weight, part_labels)
    operands = hidden.flatten(0, -2), weight.detach().to(hidden.dtype), part_labels.flatten()
    return agreement(d_hidden.flatten(0, -2), d_weight, loss_of(*operands))


def agreement(d_hidden: Tensor, d_weight: Tensor, problem: Problem, softcap: float | None = None) -> Agreement:
    """Compare gradients [N, D] and [V, D] of a loss with the dense ones, from the rounded operands of the problem."""
    truth, labels = reference_of(problem), problem.tokens[1]
    rare = torch.ones(len(truth.d_weight), dtype=torch.bool, device=labels.device)
    rare[labels[labels != IGNORED]] = False
    pairs = (
        (d_hidden, truth.d_hidden),
        (d_hidden.double().mean(0), truth.d_hidden.double().mean(0)),
        (d_weight, truth.d_weight),
        (d_weight[rare], truth.d_weight[rare]),
    )
    columns = torch.stack([_cosine_and_norms(one, other) for one, other in pairs], 1).tolist()
    cosine, norm, dense_norm = (dict(zip(GRADIENTS, column, strict=True)) for column in columns)
    by_rank = probability_by_rank(problem.tokens[0], problem.weights[0], softcap)
    return Agreement(cosine, norm, dense_norm, truth.value.item(), by_rank)


def _gradients(
    recipe: Recipe, head: nn.Module, hidden: Tensor, weight: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    hidden = hidden.detach().requires_grad_()
    with recipe.autocast():
        loss = head(hidden, labels, num_tokens=int((labels != IGNORED).sum()))
    d_hidden, d_weight = torch.autograd.grad(loss, (hidden, weight))
    return d_hidden, d_weight


def _cosine_and_norms(gradient: Tensor, truth: Tensor) -> Tensor:
    """Return the cosine of two gradients, the ratio of their norms, and the norm of the truth, as [3] fp64."""
    gradient, truth = gradient.double().flatten(), truth.double().flatten()
    norm, true_norm = gradient.norm(), truth.norm()
    return torch.stack((gradient @ truth / (norm * true_norm), norm / true_norm, true_norm))
