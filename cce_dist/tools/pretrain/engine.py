"""The engine: a model and its optimizer, tensor-parallel by DTensor and data-parallel by FSDP2."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from cce_dist import VocabParallelHead
from cce_dist.tools.pretrain.data import Batches, num_valid
from cce_dist.tools.pretrain.model import GPT, DenseHead, shard_model
from cce_dist.tools.pretrain.ranks import Ranks
from cce_dist.tools.pretrain.recipe import Recipe


class Step(NamedTuple):
    """The results of an optimizer step, 0-d, on the device: nothing has waited for them."""

    loss: Tensor  # mean over those tokens of the whole batch that are not ignored
    grad_norm: Tensor  # of the whole gradient, before clipping


class Engine:
    """A model, its optimizer and how they are driven. Every rank calls every method."""

    def __init__(self, recipe: Recipe, ranks: Ranks) -> None:
        self.recipe, self.ranks = recipe, ranks
        self.model = build_model(recipe, ranks)
        matrices = [parameter for parameter in self.model.parameters() if parameter.ndim > 1]
        vectors = [parameter for parameter in self.model.parameters() if parameter.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, 0.95))

    def step(self, step: int, ids: np.ndarray, labels: np.ndarray) -> Step:
        """Take step number ``step``, counted from 1, on a whole batch: ids and labels, [batch size, s]."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.learning_rate(step)
        loss = self._accumulate_gradients(ids, labels)
        grad_norm = clip_gradients(self.model, self.recipe.clip, self.ranks)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return Step(loss, grad_norm)

    @torch.no_grad()
    def validate(self, held_out: Batches, num_batches: int | None = None) -> float:
        """Return the mean loss of the first batches, ``eval_batches`` unless said, on every rank."""
        size = self.recipe.batch_size
        batches = [held_out.at(index * size, size) for index in range(num_batches or self.recipe.eval_batches)]
        num_tokens = num_valid(*(labels for _, labels in batches))
        total = torch.zeros((), device=self.ranks.device)
        for ids, labels in batches:
            for part_ids, part_labels in self.ranks.microbatches(ids, labels, self.recipe.accumulate):
                with self.recipe.autocast():
                    total += self.model(part_ids, part_labels, num_tokens)
        return self._sum_over_dp(total).item()

    def save_tensors(self, folder: Path) -> None:
        """Write this rank's part of model and optimizer to a folder that is not there yet."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the warning only says that one process saves alone
            dcp.save(self._tensors(), storage_writer=dcp.FileSystemWriter(folder, overwrite=False))

    def load_tensors(self, folder: Path) -> None:
        """Read it again, on any number of ranks."""
        tensors = self._tensors()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder))
        model, optimizer = tensors.values()
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def _tensors(self) -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(self.model, self.optimizer), strict=True))

    def _accumulate_gradients(self, ids: np.ndarray, labels: np.ndarray) -> Tensor:
        """Add up the gradient of the batch's mean loss, and return that loss.

        Every rank divides by the valid tokens of the whole batch, which it holds, so the parts add up to the mean.
        """
        num_tokens = num_valid(labels)
        total = torch.zeros((), device=self.ranks.device)
        for part_ids, part_labels in self.ranks.microbatches(ids, labels, self.recipe.accumulate):
            with self.recipe.autocast():
                loss = self.model(part_ids, part_labels, num_tokens)
            # FSDP averages gradients over its ranks; ours are to be summed.
            (loss * self.ranks.dp).backward()
            total += loss.detach()
        return self._sum_over_dp(total)

    def _sum_over_dp(self, value: Tensor) -> Tensor:
        if self.ranks.dp_mesh is not None:
            dist.all_reduce(value, group=self.ranks.dp_mesh.get_group())
        return value


def build_model(recipe: Recipe, ranks: Ranks) -> GPT:
    """Return the model on its device, sharded; its weights depend on torch's CPU seed alone."""
    head: nn.Module = VocabParallelHead(
        recipe.shape.hidden_size,
        recipe.shape.vocab_size,
        mesh=ranks.tp_mesh,
        init_std=0.02,
        device=ranks.device,
        sequence_parallel=recipe.sequence_parallel and ranks.tp > 1,
        grad_filter=recipe.grad_filter,
    )
    if recipe.loss == "dense":
        head = DenseHead(head, ranks.tp_mesh, recipe.sequence_parallel)
    model = GPT(recipe.shape, head)
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


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float, ranks: Ranks) -> Tensor:
    """Scale all gradients so that their norm is ``max_norm`` at most, and return the norm that they had.

    Communication: one all-reduce of a number, so that every rank scales by the same bits; and one per norm under sequence
        parallelism, whose gradients are not summed yet.
    """
    square = torch.zeros((), device=ranks.device)
    gradients = []
    for parameter in model.parameters():
        gradient, num_shards = parameter.grad, 1
        if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
            if gradient.placements != parameter.placements:
                parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
            sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
            num_shards = math.prod(size for size, placement in sizes if not placement.is_replicate())
            gradient = gradient.to_local()
        if gradient is not None:
            square += gradient.float().square().sum() * (num_shards / ranks.world_size)  # every copy adds its share
            gradients.append(gradient)
    if ranks.world_size > 1:
        dist.all_reduce(square)
    norm = square.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale)
    return norm
