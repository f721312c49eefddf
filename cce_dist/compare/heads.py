"""The heads that are compared: they hold the same weight and give the same loss, but not the same gradient.

This library's are those of ``cce-dist pretrain --loss``. Other libraries' are the rows of ``cce-dist bench``, made into a
head: to a head they are a function of hidden states, weight and labels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from cce_dist import VocabShard
from cce_dist.bench.methods import all_methods
from cce_dist.bench.peers import LossFn
from cce_dist.pretrain.build import build_head
from cce_dist.pretrain.data import IGNORED
from cce_dist.pretrain.ranks import Ranks
from cce_dist.pretrain.recipe import LOSSES, Recipe, UsageError
from cce_dist.report import describe

MakeHead = Callable[[nn.Parameter], nn.Module]  # weight [V, D] -> a head over it


def choose(names: list[str], recipe: Recipe, ranks: Ranks) -> tuple[dict[str, MakeHead], dict[str, str]]:
    """Return how to make each of the named methods, and why those that cannot run here cannot.

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
