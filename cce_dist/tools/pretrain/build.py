"""From a recipe to a model and its optimizer."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from cce_dist import VocabParallelHead
from cce_dist.tools.pretrain.model import GPT, DenseHead, shard_model
from cce_dist.tools.pretrain.ranks import Ranks
from cce_dist.tools.pretrain.recipe import Recipe


def build_model(recipe: Recipe, ranks: Ranks) -> GPT:
    """Return the model on its device, sharded; its weights depend on torch's CPU seed alone."""
    model = GPT(recipe.shape, build_head(recipe, ranks))
    if ranks.tp_mesh is not None:
        shard_model(model, ranks.tp_mesh, recipe.sequence_parallel)
    model.to(ranks.device)
    if recipe.compile:
        for block in model.blocks:
            block.compile()
    if ranks.dp_mesh is not None:
        for block in model.blocks:
            fully_shard(block, mesh=ranks.dp_mesh)
        fully_shard(model, mesh=ranks.dp_mesh)
    return model


def build_head(recipe: Recipe, ranks: Ranks, *, weight: nn.Parameter | None = None) -> nn.Module:
    """Return the head that the recipe's loss names, over ``weight`` if there is one."""
    shape = recipe.shape
    head = VocabParallelHead(
        shape.hidden_size,
        shape.vocab_size,
        mesh=ranks.tp_mesh,
        weight=weight,
        init_std=0.02,
        device=ranks.device,
        sequence_parallel=recipe.sequence_parallel and ranks.tp > 1,
        grad_filter=recipe.grad_filter,
    )
    return DenseHead(head, ranks.tp_mesh, recipe.sequence_parallel) if recipe.loss == "dense" else head


def make_optimizer(model: nn.Module, recipe: Recipe, *, fused: bool = False) -> torch.optim.Optimizer:
    """Return AdamW over the model's parameters; only matrices decay. ``fused`` steps in one kernel, for plain tensors."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, 0.95), fused=fused)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Have an optimizer take its next step with this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
