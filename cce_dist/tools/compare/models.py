"""Models of transformers, at the sizes of ``bench --models``, trained by one method after another from drawn weights.

All runs share one model: its weights are reset in place, and each method has its own head over the same trunk. Parameters are
fp32 and forward runs under autocast, as with Trainer's ``bf16=True``. All batches of a seed are on the device before its first
step, so that the host never waits between measurements.
"""

from __future__ import annotations

import argparse
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cce_dist
from cce_dist.tools.bench import steps
from cce_dist.tools.bench.methods import Method
from cce_dist.tools.bench.models import CONFIGS, OURS, build, compile_layers, twin, ways
from cce_dist.tools.bench.problem import loss_of
from cce_dist.tools.compare.probe import Agreement, agreement
from cce_dist.tools.plan import sizes
from cce_dist.tools.pretrain.build import make_optimizer, set_learning_rate
from cce_dist.tools.pretrain.data import IGNORED, Corpus
from cce_dist.tools.pretrain.ranks import Ranks
from cce_dist.tools.pretrain.recipe import Recipe, Shape, UsageError

GPT_OPTIONS = {"preset": None, "vocab_size": None, "accumulate": 1}  # only for this project's GPT, with their defaults


def recipe_of(args: argparse.Namespace) -> Recipe:
    """Return how the model of ``args.model`` is trained.

    Raises:
        UsageError: The model is unknown, transformers is missing, or an option is not for such a model.
    """
    if args.model not in CONFIGS:
        raise UsageError(f"unknown model {args.model}: choose from {', '.join(CONFIGS)}")
    if find_spec("transformers") is None:
        raise UsageError("--model needs transformers")
    for name, default in GPT_OPTIONS.items():
        if getattr(args, name) != default:
            raise UsageError(f"--{name.replace('_', '-')} and --model exclude each other")
    size = sizes.MODELS[args.model]
    num_layers = args.num_layers or size.num_layers
    shape = Shape(size.hidden_size, num_layers, size.num_heads, size.ffn_size, args.seq_len, size.vocab_size)
    return Recipe.of(args, shape=shape)


def choose(names: list[str], recipe: Recipe, ranks: Ranks) -> tuple[dict[str, Method], dict[str, str]]:
    """Return the named methods of ``bench --models``, and for methods that cannot run here the reason.

    Raises:
        UsageError: There is no such method.
    """
    eps = {"filter_eps": recipe.filter_eps}
    ours = {name.removeprefix("cce-dist-"): way | (eps if "filter" in way else {}) for name, way in OURS.items()}
    table = ways([""], ours)
    if unknown := [name for name in names if name not in table]:
        raise UsageError(f"unknown method {unknown[0]!r} of a model: choose from {', '.join(table)}")
    missing = [name for name in names if table[name].needs_cuda and ranks.device.type != "cuda"]
    chosen = {name: table[name] for name in names if name not in missing}
    return chosen, dict.fromkeys(missing, "needs a GPU")


class ModelLearner:
    """One model of transformers. Its gradients are always compared on the seed's first batch."""

    way: nn.Module
    run: steps.Run
    ours: bool
    batches: Tensor  # [steps, B, L] ids
    held_out: Tensor  # [batches, B, L] ids

    def __init__(self, name: str, recipe: Recipe, ranks: Ranks, corpus: Corpus, methods: dict[str, Method]) -> None:
        self.recipe, self.methods, self.device = recipe, methods, ranks.device
        self.draw = partial(build, name, recipe.shape.num_layers, torch.float32, ranks.device)
        self.model, self.text = self.draw(), steps.Text(corpus, recipe.shape.vocab_size)
        if recipe.compile:
            compile_layers(self.model)
        self.batch = recipe.batch_size, recipe.shape.seq_len
        ids = self.text.held_out(recipe.eval_batches * self.batch[0], self.batch[1], self.device)
        self.held_out = ids.view(-1, *self.batch)

    def start(self, seed: int) -> None:
        # With deterministic algorithms and compiled layers, torch 2.11 computes wrong gradients of transformers' q_proj.
        torch.use_deterministic_algorithms(not self.recipe.compile, warn_only=True)
        self.initial = self.draw(seed).state_dict()
        ids = self.text.train(0, self.recipe.steps * self.batch[0], self.batch[1], self.device, seed)
        self.batches = ids.view(-1, *self.batch)

    def take(self, method: str) -> None:
        self.model.load_state_dict(self.initial)
        self.way, self.ours = self.methods[method].build(twin(self.model, self.model.model)), self.methods[method].ours
        self.run = steps.Run(self.model, make_optimizer(self.model, self.recipe, fused=True), self.recipe.clip)

    def is_ours(self, method: str) -> bool:
        return self.methods[method].ours or method == "stock"

    def step(self, step: int) -> Tensor:
        set_learning_rate(self.run.optimizer, self.recipe.learning_rate(step + 1))
        return self.run.step(self._forward, self.batches[step])

    @torch.no_grad()
    def validate(self) -> float:
        losses = []
        for ids in self.held_out:
            with self.recipe.autocast():
                hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
                weight = self.model.lm_head.weight
                losses.append(cce_dist.linear_cross_entropy(hidden, weight, _labels(ids), softcap=self._softcap))
        return torch.stack(losses).mean().item()

    def probe(self, step: int) -> Agreement:
        ids, found = self.batches[0], []

        def cut(trunk: nn.Module, args: tuple, output: Any) -> Any:
            """Detach the trunk: hidden states become a leaf, and a tied weight gets only the head's gradient."""
            found.append(output.last_hidden_state.detach().requires_grad_())
            output.last_hidden_state = found[0]
            return output

        with self.model.model.register_forward_hook(cut):
            loss = self._forward(input_ids=ids, labels=ids)["loss"]
        (hidden,), weight, labels = found, self.model.lm_head.weight, _labels(ids)
        d_hidden, d_weight = torch.autograd.grad(loss, (hidden, weight))
        dtype = getattr(torch, self.recipe.dtype)
        hidden, weight = hidden.detach().to(dtype), weight.detach().to(dtype)
        if self.ours:
            cce_dist.require(self.way)
        problem = loss_of(hidden.flatten(0, 1), weight, labels.flatten(), self._softcap)
        return agreement(d_hidden.flatten(0, 1), d_weight, problem, self._softcap)

    def _forward(self, **batch: Tensor) -> Any:
        with self.recipe.autocast():
            return self.way(**batch)

    @property
    def _softcap(self) -> float | None:
        return getattr(self.model.config, "final_logit_softcapping", None)


def _labels(ids: Tensor) -> Tensor:
    """Labels [B, L] as transformers shifts them: the last token of a sequence has none."""
    return F.pad(ids[:, 1:], (0, 1), value=IGNORED)
