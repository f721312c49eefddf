"""Training: for each seed one model, trained once with each method from the same weights, in the same order of batches.

``train`` is the loop, whatever the model; ``train_all`` is all runs of this project's GPT.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from cce_dist import VocabParallelHead
from cce_dist.compare.heads import MakeHead
from cce_dist.compare.probe import Agreement, probe
from cce_dist.pretrain.build import build_model
from cce_dist.pretrain.data import Batches, Corpus
from cce_dist.pretrain.engines.torch import TorchEngine
from cce_dist.pretrain.ranks import Ranks
from cce_dist.pretrain.recipe import LOSSES, Recipe
from cce_dist.pretrain.train import make_deterministic
from cce_dist.report import describe


@dataclass
class Measurement:
    """The state of a run after ``step`` optimizer steps; the last five fields are as ``Agreement`` has them."""

    step: int
    val_loss: float  # by the exact head, nats per token, the same batches every time
    train_loss: float = math.nan  # as the method gives it, mean over the steps since the last measurement
    tokens_per_s: float = math.nan  # of these steps alone, measuring left out
    cosine: dict[str, float] = field(default_factory=dict)
    norm: dict[str, float] = field(default_factory=dict)
    kept_tiles: float = math.nan
    dense_norm: dict[str, float] = field(default_factory=dict)
    batch_loss: float = math.nan

    @property
    def error_of_mean(self) -> float:
        """Relative error of dE's mean over tokens, from its cosine and norm."""
        cosine, norm = (values.get("mean dE", math.nan) for values in (self.cosine, self.norm))
        return math.sqrt(max(1 + norm * norm - 2 * norm * cosine, 0.0))


@dataclass
class Run:
    """One training; ``problem`` says in a line why it ended early, or says nothing."""

    method: str
    seed: int
    measurements: list[Measurement] = field(default_factory=list)
    problem: str = ""


class Training(Protocol):
    """A model and the method that it learns by; steps count from 0."""

    def validate(self) -> float:
        """Return the exact loss of text held out."""
        ...

    def probe(self, step: int) -> Agreement:
        """Compare the method's gradients with the dense ones, before a step."""
        ...

    def step(self, step: int) -> Tensor:
        """Take a step, and return its loss, which nobody reads yet."""
        ...


def train_all(
    recipe: Recipe,
    ranks: Ranks,
    corpus: Corpus,
    methods: dict[str, MakeHead],
    *,
    seeds: Iterable[int],
    measure_every: int,
    advance: Callable[[], Any],
) -> Iterator[Run]:
    """Yield each run as it ends, all methods of a seed before the next seed; ``advance`` is called after every step."""
    seq_len = recipe.shape.seq_len
    held_out = Batches(corpus.held_out, seq_len, seed=0)  # seeds are judged by the same text
    for seed in seeds:
        make_deterministic(seed)
        model = build_model(recipe, ranks)
        exact = model.head
        assert isinstance(exact, VocabParallelHead)
        initial = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        batches = Batches(corpus.train, seq_len, seed)
        for name, make_head in methods.items():
            model.load_state_dict(initial)
            run = Run(name, seed)
            try:
                engine = TorchEngine(recipe, ranks, model, fused=ranks.device.type == "cuda")
                train(recipe, _OfGPT(engine, make_head(exact.weight), batches, held_out), run, measure_every, advance)
            except Exception as error:  # whatever another library raises, the rest goes on
                if name in LOSSES:
                    raise
                run.problem = describe(error)
            model.head = exact
            model.zero_grad()
            yield run


@dataclass
class _OfGPT:
    """Training of the engine's model with ``head`` as its last layer; between steps it has its own, exact one."""

    engine: TorchEngine
    head: nn.Module
    batches: Batches
    held_out: Batches

    def validate(self) -> float:
        return self.engine.validate(self.held_out)

    def probe(self, step: int) -> Agreement:
        return probe(self.engine, self.head, *self._batch(step))

    def step(self, step: int) -> Tensor:
        model, exact = self.engine.model, self.engine.model.head
        model.head = self.head
        loss = self.engine.step(step + 1, *self._batch(step)).loss
        model.head = exact
        return loss

    def _batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        size = self.engine.recipe.batch_size
        return self.batches.at(step * size, size)


def train(recipe: Recipe, training: Training, run: Run, measure_every: int, advance: Callable[[], Any]) -> None:
    """Take the recipe's steps, and measure every so many of them, before the first and after the last."""
    losses: list[Tensor] = []
    clock = time.perf_counter()
    for step in range(recipe.steps + 1):
        if step % measure_every == 0 or step == recipe.steps:
            measured = Measurement(step, math.nan)
            if losses:
                measured.train_loss = torch.stack(losses).mean().item()  # waits for the device, so the clock is right
                num_tokens = len(losses) * recipe.batch_size * recipe.shape.seq_len
                measured.tokens_per_s = num_tokens / (time.perf_counter() - clock)
            measured.val_loss = training.validate()
            run.measurements.append(measured)
            if not math.isfinite(measured.val_loss):
                run.problem = f"the validation loss is {measured.val_loss} after step {step}"
                return
            vars(measured).update(training.probe(step)._asdict())
            losses, clock = [], time.perf_counter()
        if step < recipe.steps:
            losses.append(training.step(step))
            advance()
    first, last = run.measurements[0].val_loss, run.measurements[-1].val_loss
    if recipe.steps >= 100 and last > first - 0.1:  # gradients of noise, whose losses compare nothing
        run.problem = (
            f"nothing was learned: the validation loss went from {first:.2f} to {last:.2f} in {recipe.steps} steps"
        )
