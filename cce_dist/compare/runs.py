"""Training: for each seed one model, trained once with each method from the same weights, in the same order of batches."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from cce_dist import VocabParallelHead
from cce_dist.compare.heads import MakeHead
from cce_dist.compare.probe import probe
from cce_dist.pretrain import LOSSES
from cce_dist.pretrain.data import Batches, Corpus
from cce_dist.pretrain.model import GPT, Shape
from cce_dist.pretrain.ranks import Ranks
from cce_dist.pretrain.train import build_model, make_deterministic, make_optimizer, train_step, validate
from cce_dist.report import describe


@dataclass
class Measurement:
    """All that is known after ``step`` optimizer steps.

    Attributes:
        val_loss: By the exact head, nats per token, the same batches every time.
        train_loss: As the method gives it, mean over the steps since the last measurement.
        tokens_per_s: Of these steps alone, measuring left out.
        cosine, norm, kept_tiles: As ``Agreement`` has them.
    """

    step: int
    val_loss: float
    train_loss: float = math.nan
    tokens_per_s: float = math.nan
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
    args: argparse.Namespace, ranks: Ranks, shape: Shape, corpus: Corpus, methods: dict[str, MakeHead],
    advance: Callable[[], Any],
) -> Iterator[Run]:  # fmt: skip
    """Yield each run as it ends, all methods of a seed before the next seed; ``advance`` is called after every step."""
    held_out = Batches(corpus.held_out, shape.seq_len, seed=0)  # seeds are judged by the same text
    for seed in range(args.seeds):
        make_deterministic(seed)
        model = build_model(args, ranks, shape)
        exact = model.head
        assert isinstance(exact, VocabParallelHead)
        initial = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        batches = Batches(corpus.train, shape.seq_len, seed)
        for name, make_head in methods.items():
            model.load_state_dict(initial)
            run = Run(name, seed)
            try:
                _train(args, ranks, model, make_head(exact.weight), batches, held_out, run, advance)
            except Exception as error:  # whatever another library raises, the rest goes on
                if name in LOSSES:
                    raise
                run.problem = describe(error)
            model.head = exact
            model.zero_grad()
            yield run


def _train(
    args: argparse.Namespace, ranks: Ranks, model: GPT, head: nn.Module, batches: Batches, held_out: Batches, run: Run,
    advance: Callable[[], Any],
) -> None:  # fmt: skip
    """Train ``model`` with ``head`` as its last layer; between steps it has its own, exact one."""
    exact, optimizer = model.head, make_optimizer(model, args, fused=ranks.device.type == "cuda")
    losses: list[Tensor] = []
    clock = time.perf_counter()
    for step in range(args.steps + 1):
        ids, labels = batches.at(step * args.batch_size, args.batch_size)
        if step % args.measure_every == 0 or step == args.steps:
            measured = Measurement(step, math.nan)
            if losses:
                measured.train_loss = torch.stack(losses).mean().item()  # waits for the device, so the clock is right
                measured.tokens_per_s = len(losses) * labels.size / (time.perf_counter() - clock)
            measured.val_loss = validate(args, ranks, model, held_out)
            run.measurements.append(measured)
            if not math.isfinite(measured.val_loss):
                run.problem = f"the validation loss is {measured.val_loss} after step {step}"
                return
            agreement = probe(args, ranks, model, head, ids, labels)
            measured.cosine, measured.norm, measured.kept_tiles = agreement
            losses, clock = [], time.perf_counter()
        if step < args.steps:
            model.head = head
            losses.append(train_step(args, ranks, model, optimizer, step + 1, ids, labels)[0])
            model.head = exact
            advance()
