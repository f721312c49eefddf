"""Training: each seed's model is trained once with each method, from the same weights and on the same batches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from cce_dist.tools.compare.probe import Agreement
from cce_dist.tools.pretrain.recipe import Recipe
from cce_dist.tools.pretrain.train import make_deterministic
from cce_dist.tools.report import describe


@dataclass
class Measurement:
    """The state of a run after ``step`` optimizer steps.

    ``Agreement`` describes ``cosine``, ``norm`` and the last three fields: empty or NaN if gradients were not compared.
    """

    step: int
    val_loss: float  # nats per token, by the exact head, always on the same batches
    train_loss: float = math.nan  # by the method, mean over the steps since the last measurement
    tokens_per_s: float = math.nan  # in these steps, without the time of measuring
    cosine: dict[str, float] = field(default_factory=dict)
    norm: dict[str, float] = field(default_factory=dict)
    kept_tiles: float = math.nan  # in older files: the share of logits that a filter kept
    dense_norm: dict[str, float] = field(default_factory=dict)
    batch_loss: float = math.nan
    by_rank: list[float] = field(default_factory=list)

    @property
    def error_of_mean(self) -> float:
        """Relative error of the mean of dE over tokens, from its cosine and norm."""
        cosine, norm = (values.get("mean dE", math.nan) for values in (self.cosine, self.norm))
        return math.sqrt(max(1 + norm * norm - 2 * norm * cosine, 0.0))


@dataclass
class Run:
    """One training."""

    method: str
    seed: int
    measurements: list[Measurement] = field(default_factory=list)
    problem: str = ""  # why it ended early, or compares nothing; empty: no problem


class Learner(Protocol):
    """A model that is trained by one method after another."""

    methods: Iterable[str]

    def start(self, seed: int) -> None:
        """Draw the first weights and the order of the batches."""
        ...

    def take(self, method: str) -> None:
        """Reset the weights to the first ones, and train with this method from here on."""
        ...

    def is_ours(self, method: str) -> bool:
        """Return whether an error of this method ends the whole comparison."""
        ...

    def validate(self) -> float:
        """Return the exact loss of held-out text."""
        ...

    def probe(self, step: int) -> Agreement:
        """Compare the method's gradients with the dense ones, before a step; steps count from 0."""
        ...

    def step(self, step: int) -> Tensor:
        """Take a step and return its loss, without waiting for the device."""
        ...


def train_all(
    recipe: Recipe, learner: Learner, seeds: Iterable[int], loss_every: int, gradients_every: int,
    advance: Callable[[], Any],
) -> Iterator[Run]:  # fmt: skip
    """Yield each run as it ends, all methods of a seed before the next seed. ``train`` describes the last arguments."""
    for seed in seeds:
        make_deterministic(seed)
        learner.start(seed)
        for method in learner.methods:
            run = Run(method, seed)
            try:
                learner.take(method)
                train(recipe, learner, run, loss_every, gradients_every, advance)
            except Exception as error:  # other libraries raise anything, and the other methods go on
                if learner.is_ours(method):
                    raise
                run.problem = describe(error)
            yield run


def train(
    recipe: Recipe, learner: Learner, run: Run, loss_every: int, gradients_every: int, advance: Callable[[], Any]
) -> None:
    """Take the recipe's steps, and call ``advance`` after each.

    Measure before the first step, after the last, and every so many steps. ``gradients_every`` is a multiple of ``loss_every``.
    """
    losses: list[Tensor] = []
    clock = time.perf_counter()
    for step in range(recipe.steps + 1):
        is_last = step == recipe.steps
        if step % loss_every == 0 or is_last:
            measured = Measurement(step, math.nan)
            if losses:
                measured.train_loss = torch.stack(losses).mean().item()  # waits for the device, so the clock is right
                num_tokens = len(losses) * recipe.batch_size * recipe.shape.seq_len
                measured.tokens_per_s = num_tokens / (time.perf_counter() - clock)
            measured.val_loss = learner.validate()
            run.measurements.append(measured)
            if not math.isfinite(measured.val_loss):
                run.problem = f"the validation loss is {measured.val_loss} after step {step}"
                return
            if step % gradients_every == 0 or is_last:
                vars(measured).update(learner.probe(step)._asdict())
            losses, clock = [], time.perf_counter()
        if not is_last:
            losses.append(learner.step(step))
            advance()
    first, last = run.measurements[0].val_loss, run.measurements[-1].val_loss
    if recipe.steps >= 100 and last > first - 0.1:  # losses of runs that learn nothing compare nothing
        run.problem = (
            f"nothing was learned: the validation loss went from {first:.2f} to {last:.2f} in {recipe.steps} steps"
        )
