"""This project's GPT, trained with one head after another.

All heads have the same weight and compute the same loss, but not the same gradient. This library's heads have the names of
``cce-dist pretrain --loss``, other libraries' heads the names of their rows in ``cce-dist bench``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from cce_dist import VocabParallelHead, VocabShard
from cce_dist.tools.bench.methods import all_methods
from cce_dist.tools.bench.peers import LossFn
from cce_dist.tools.compare.probe import Agreement, probe
from cce_dist.tools.pretrain.build import build_head, build_model
from cce_dist.tools.pretrain.data import IGNORED, Batches, Corpus
from cce_dist.tools.pretrain.engine import Engine
from cce_dist.tools.pretrain.ranks import Ranks
from cce_dist.tools.pretrain.recipe import LOSSES, Recipe, UsageError
from cce_dist.tools.report import describe

MakeHead = Callable[[nn.Parameter], nn.Module]  # weight [V, D] -> a head over it


def choose(names: list[str], recipe: Recipe, ranks: Ranks) -> tuple[dict[str, MakeHead], dict[str, str]]:
    """Return how to make the head of each named method, and for methods that cannot run here the reason.

    Raises:
        UsageError: There is no such method.
    """
    peers = {name: method for name, method in all_methods().items() if method.is_for(1) and not method.ours}
    size = recipe.shape.hidden_size
    whole, nothing = VocabShard.even(recipe.shape.vocab_size, None), torch.empty(0, size, device=ranks.device)
    chosen: dict[str, MakeHead] = {}
    missing: dict[str, str] = {}
    for name in names:
        if name in LOSSES:
            ours = dataclasses.replace(recipe, loss=name, filter_always=True)
            chosen[name] = lambda weight, ours=ours: build_head(ours, ranks, weight=weight)
        elif name not in peers:
            raise UsageError(f"unknown method {name!r}: choose from {', '.join([*LOSSES, *peers])}")
        elif peers[name].needs_cuda and ranks.device.type != "cuda":
            missing[name] = "needs a GPU"
        else:
            try:
                chosen[name] = partial(PeerHead, peers[name].build(whole, nothing))
            except ImportError as error:
                missing[name] = describe(error)
    return chosen, missing


class GPTLearner:
    """The GPT of ``cce-dist pretrain`` on the engine of torch. Between steps it has its own, exact head."""

    def __init__(self, recipe: Recipe, ranks: Ranks, corpus: Corpus, methods: dict[str, MakeHead]) -> None:
        self.recipe, self.ranks, self.corpus, self.methods = recipe, ranks, corpus, methods
        self.held_out = Batches(corpus.held_out, recipe.shape.seq_len, seed=0)  # the same text for all seeds

    def start(self, seed: int) -> None:
        self.model = build_model(self.recipe, self.ranks)
        self.exact = self.model.head
        self.initial = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.batches = Batches(self.corpus.train, self.recipe.shape.seq_len, seed)

    def take(self, method: str) -> None:
        # The previous run may have failed inside a step.
        self.model.head = self.exact
        self.model.zero_grad()
        self.model.load_state_dict(self.initial)
        self.engine = Engine(self.recipe, self.ranks, self.model, fused=self.ranks.device.type == "cuda")
        assert isinstance(self.exact, VocabParallelHead)
        self.head = self.methods[method](self.exact.weight)

    def is_ours(self, method: str) -> bool:
        return method in LOSSES

    def validate(self) -> float:
        return self.engine.validate(self.held_out)

    def probe(self, step: int) -> Agreement:
        return probe(self.engine, self.head, *self._batch(step))

    def step(self, step: int) -> Tensor:
        self.model.head = self.head
        loss = self.engine.step(step + 1, *self._batch(step)).loss
        self.model.head = self.exact
        return loss

    def _batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        size = self.recipe.batch_size
        return self.batches.at(step * size, size)


class PeerHead(nn.Module):
    """Another library's loss as the head of a model: it returns the mean over labels that are not ignored."""

    def __init__(self, function: LossFn, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.function = weight, function

    def forward(self, hidden: Tensor, labels: Tensor, num_tokens: int) -> Tensor:
        weight: Tensor = self.weight
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
        mean = self.function(hidden.flatten(0, -2), weight, labels.flatten())
        return mean.float() * ((labels != IGNORED).sum() / num_tokens)
