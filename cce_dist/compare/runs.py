"""Training: for each seed one model, trained once with each method from the same weights, in the same order of batches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from cce_dist import VocabParallelHead
from cce_dist.compare.heads import MakeHead
from cce_dist.compare.probe import probe
from cce_dist.pretrain.build import build_model
from cce_dist.pretrain.data import Batches, Corpus
from cce_dist.pretrain.engines.torch import TorchEngine
from cce_dist.pretrain.ranks import Ranks
from cce_dist.pretrain.recipe import LOSSES, Recipe
from cce_dist.pretrain.train import make_deterministic
from cce_dist.report import describe


@dataclass
class Measurement:
    """The state of a run after ``step`` optimizer steps; the last three fields are as ``probe`` returns them."""

    step: int
    val_loss: float  # by the exact head, nats per token, the same batches every time
    train_loss: float = math.nan  # as the method gives it, mean over the steps since the last measurement
    tokens_per_s: float = math.nan  # of these steps alone, measuring left out
    cosine: dict[str, float] = field(default_factory=dict)
    norm: dict[str, float] = field(default_factory=dict)
    kept_tiles: float = math.nan


@dataclass
class Run:
    """One training; ``problem`` says in a line why it ended early, if it did."""

    method: str
    seed: int
    measurements: list[Measurement] = field(default_factory=list)
    problem: str = ""


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
                _train(engine, make_head(exact.weight), batches, held_out, run, measure_every, advance)
            except Exception as error:  # whatever another library raises, the rest goes on
                if name in LOSSES:
                    raise
                run.problem = describe(error)
            model.head = exact
            model.zero_grad()
            yield run


def _train(
    engine: TorchEngine,
    head: nn.Module,
    batches: Batches,
    held_out: Batches,
    run: Run,
    measure_every: int,
    advance: Callable[[], Any],
) -> None:
    """Train the engine's model with ``head`` as its last layer; between steps it has its own, exact one."""
    recipe, exact = engine.recipe, engine.model.head
    losses: list[Tensor] = []
    clock = time.perf_counter()
    for step in range(recipe.steps + 1):
        ids, labels = batches.at(step * recipe.batch_size, recipe.batch_size)
        if step % measure_every == 0 or step == recipe.steps:
            measured = Measurement(step, math.nan)
            if losses:
                measured.train_loss = torch.stack(losses).mean().item()  # waits for the device, so the clock is right
                measured.tokens_per_s = len(losses) * labels.size / (time.perf_counter() - clock)
            measured.val_loss = engine.validate(held_out)
            run.measurements.append(measured)
            if not math.isfinite(measured.val_loss):
                run.problem = f"the validation loss is {measured.val_loss} after step {step}"
                return
            measured.cosine, measured.norm, measured.kept_tiles = probe(engine, head, ids, labels)
            losses, clock = [], time.perf_counter()
        if step < recipe.steps:
            engine.model.head = head
            losses.append(engine.step(step + 1, ids, labels).loss)
            engine.model.head = exact
            advance()
