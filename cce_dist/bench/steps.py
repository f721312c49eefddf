"""Whole steps of models that people train: ``bench --models``.

A model's weights are drawn, then trained in place on text, so that the softmax is that of text. From then on the learning rate
is 0 and the weights rest: every way computes the same step, whose work is that of any other. A step is Trainer's: forward with
labels, backward, clipping, fused AdamW. The loss and the gradients of each way are compared with those of the stock model,
which takes the batch a sequence at a time; then the ways that are right take steps in turns.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import cce_dist
from cce_dist import VocabShard
from cce_dist.bench import report
from cce_dist.bench.cases import current_device, finish, report_last, show_progress
from cce_dist.bench.collectives import Collectives
from cce_dist.bench.loop import (
    Clock,
    Errors,
    Floor,
    Job,
    Measured,
    Row,
    everyone,
    free_memory,
    least_waiting,
    loss_of,
    noted,
    take_slowest,
    time_in_turns,
    worst,
)
from cce_dist.bench.models import Way, build, twin, ways
from cce_dist.bench.workload import IGNORE_INDEX, Workload, describe_softmax
from cce_dist.plan.planning import largest
from cce_dist.pretrain.data import Batches, Corpus, CorpusError, prepare
from cce_dist.pretrain.exits import UsageError
from cce_dist.report import describe, describe_environment

TRAIN_TOKENS, TRAIN_RATE = 8192, 1e-3  # tokens of a step that trains, and the rate's peak up to a hidden size of 1,024
CLIP = 1.0
# Relative. A bf16 body turns the rounding of a loss's dE into 1e-2 to 1e-1 of its own gradients; a mistake is a multiple.
MAX_LOSS_ERROR, MAX_GRADIENT_ERROR = 1e-2, 0.2
LONGEST_UNIT = 1024  # tokens

Progress = Callable[[str], None]


def run(
    args: argparse.Namespace,
    chosen: dict[str, Way],
    cases: Callable[[argparse.Namespace, str, dict[str, Way], torch.device], Iterator[report.Case]],
) -> int:
    """Measure every model at every number of tokens by ``cases``; the exit code is that of other tables."""
    device = current_device(args.device)
    # Each way compiles the same code of the model's class anew.
    torch._dynamo.config.recompile_limit = 64
    results = report.Results(describe_environment(device), [])
    args.out.mkdir(parents=True, exist_ok=True)
    has_figure = find_spec("matplotlib") is not None
    for name in args.models:
        try:
            for case in cases(args, name, chosen, device):
                results.cases.append(case)
                report_last(results, args.out, has_figure)
        except torch.OutOfMemoryError as error:  # of the weights, or of training them
            if dist.is_initialized():  # other ranks would wait for this one
                raise
            show_progress("")
            print(f"{name}: {describe(error)}", file=sys.stderr)
        except (CorpusError, UsageError) as error:
            raise SystemExit(f"cce-dist bench: {error}") from error
    return finish(results, args.out, has_figure)


class Text:
    """A corpus whose ids are spread evenly, in their order, over all rows of a vocabulary.

    A byte-pair tokenizer has as many ids as it finds pairs in the text. Where these are fewer than the rows of the weight, the
    unused rows lie between the used ones, as they do in a real tokenizer that reads text of one language.
    """

    def __init__(self, corpus: Corpus, vocab_size: int) -> None:
        self.corpus, self.vocab_size = corpus, vocab_size
        self.known = 1 + max(int(ids.max()) for ids in (corpus.train, corpus.held_out))
        self.num_ids = len(np.unique(corpus.train))

    def spread(self, ids: np.ndarray, device: torch.device) -> Tensor:
        """Return ids of the tokenizer as rows of the weight, int64 on the device."""
        return torch.from_numpy(ids.astype(np.int64) * self.vocab_size // self.known).to(device)

    def train(self, position: int, count: int, length: int, device: torch.device, seed: int = 0) -> Tensor:
        """Return [count, length] ids of the part that is trained on, in the order of a seed."""
        return self.spread(Batches(self.corpus.train, length, seed).at(position, count)[0], device)

    def held_out(self, count: int, length: int, device: torch.device) -> Tensor:
        """Return [count, length] ids that nobody trains on."""
        return self.spread(Batches(self.corpus.held_out, length, 0).at(0, count)[0], device)


class Run(NamedTuple):
    """A model and what a step changes."""

    model: Any
    optimizer: torch.optim.Optimizer
    clip: float = CLIP

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def step(self, way: Callable[..., Any], ids: Tensor) -> Tensor:
        """Take a step on ids [B, L], and return the loss before it. No gradient is left, whatever happens."""
        try:
            loss = way(input_ids=ids, labels=ids)["loss"]
            loss.backward()
            nn.utils.clip_grad_norm_(self.parameters, self.clip)
            self.optimizer.step()
            return loss.detach()
        finally:
            self.optimizer.zero_grad()


class Truth(NamedTuple):
    """The loss and the gradients of the stock model, on the host; None where a parameter has no gradient.

    Gradients are those of the rows that this rank has.
    """

    loss: float
    gradients: list[Tensor | None]


def cases(args: argparse.Namespace, name: str, chosen: dict[str, Way], device: torch.device) -> Iterator[report.Case]:
    """Train a model and measure it at each number of tokens."""
    show_progress(f"{name}: reading the text")
    model = build(name, args.layers, getattr(torch, args.dtype), device)
    text = Text(
        Corpus(prepare(args.corpus, args.pattern, model.config.vocab_size, args.cache)), model.config.vocab_size
    )
    run = at_rest(model)
    _train(run, text, args.length, args.train_steps, device, lambda line: show_progress(f"{name}: {line}"))
    for num_tokens in args.tokens:
        length = min(args.length, num_tokens)
        ids = text.held_out(num_tokens // length, length, device)
        told: Progress = lambda line, head=f"{name}, N {num_tokens:,}: ": show_progress(head + line)  # noqa: E731
        torch.compiler.reset()  # a second shape would get symbolic sizes, and be slower
        told("the stock model, a sequence at a time")
        truth = truth_of(run, twin(model), ids)
        opened = lambda way: (run, way.of(model))  # noqa: E731
        rows = measure(
            opened, truth, ids, chosen, args.repeats, told, VocabShard.even(model.config.vocab_size, None)
        ).rows
        limit = args.longest if num_tokens == args.tokens[-1] else 0
        if limit:
            for row in rows:
                row.longest = None if row.problem else _longest(run, chosen[row.name], text, limit, told)
        workload = _workload(model, ids)
        yield report.Case.of(
            name,
            0.0,
            workload,
            loss_of(*workload[:3]),
            Measured(rows, Floor(), {}),
            task="whole steps",
            num_layers=model.config.num_hidden_layers,
            train_steps=args.train_steps,
            num_ids=text.num_ids,
            length=length,
            limit_gib=limit,
        )


def _train(run: Run, text: Text, length: int, steps: int, device: torch.device, progress: Progress) -> None:
    """Train in place; the rate rises over a tenth of the steps, falls to 0, and stays there."""
    way, (group,) = ways([""])["cce-dist-default"].of(run.model), run.optimizer.param_groups
    peak = TRAIN_RATE * min(1.0, 1024 / run.model.config.hidden_size)
    count = max(1, TRAIN_TOKENS // length)
    for index in range(steps):
        group["lr"] = peak * min((index + 1) / max(1, steps // 10), 1 - index / steps)
        if index % 10 == 0:
            progress(f"training, step {index} of {steps}")
        run.step(way, text.train(index * count, count, length, device))
    group["lr"] = 0.0


def at_rest(model: Any) -> Run:
    """Return a run whose steps do all work and leave the weights as they are, until somebody sets a rate."""
    return Run(model, torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True))


def measure(
    opened: Callable[[Way], tuple[Run, nn.Module]],
    truth: Truth,
    ids: Tensor,
    chosen: dict[str, Way],
    repeats: int,
    progress: Progress,
    shard: VocabShard,
) -> Measured:
    """Check every way, then time those that are right in turns; every rank of the shard's group calls it with its ids.

    ``opened`` returns what a way steps, and its module.
    """
    # All are built before one is checked: a way that is built may forget what torch has compiled.
    before, there, own, rows = _allocated(ids), {}, {}, []
    for name, way in chosen.items():
        row, start = Row(name, way.ours), _allocated(ids)
        with noted(row):
            if way.needs_cuda and not ids.is_cuda:
                raise ImportError("needs a GPU")
            there[name] = opened(way)
        free_memory(ids)
        own[name] = before + _allocated(ids) - start
        rows.append(worst(everyone(row, shard)))
    jobs, sent = [], {}
    for index, row in enumerate(rows):
        if row.problem:
            continue
        progress(f"checking {row.name}")
        (run, module), of_others = there[row.name], _allocated(ids) - own[row.name]
        with noted(row):
            _check(row, run, module, ids, truth)
            if row.ours:
                cce_dist.require(module)
        free_memory(ids)
        row, step = worst(everyone(row, shard)), partial(run.step, module, ids)
        if not row.problem:
            with noted(row):
                if shard.group_size > 1:
                    with Collectives(shard.group_size) as seen:
                        step()  # the first of this way, which makes the optimizer's state
                    sent[row.name] = least_waiting(everyone(seen.kinds, shard))
                if ids.is_cuda:
                    row.peak_bytes = _peak(step) - of_others
            free_memory(ids)
            row = worst(everyone(row, shard))
        if row.problem:
            del there[row.name]
        else:
            jobs.append(Job(row, row.total, step))
        rows[index] = row
    time_in_turns(jobs, repeats, Clock(ids.device, shard), progress)
    take_slowest(jobs, shard)
    return Measured(rows, Floor(), sent)


def truth_of(run: Run, way: nn.Module, ids: Tensor) -> Truth:
    """Return the mean loss over all labels and its gradients; sequences have equally many labels."""
    loss = 0.0
    try:
        for sequence in ids.split(1):
            part = way(input_ids=sequence, labels=sequence)["loss"] / len(ids)
            part.backward()
            loss += part.item()
        return Truth(loss, [None if p.grad is None else _here(p.grad).cpu() for p in run.parameters])
    finally:
        run.optimizer.zero_grad()


def _check(row: Row, run: Run, way: nn.Module, ids: Tensor, truth: Truth) -> None:
    """Fill in the loss, its errors, the time of the first call, and what is wrong."""
    start = time.perf_counter()
    try:
        loss = way(input_ids=ids, labels=ids)["loss"]
        loss.backward()
        row.value = value = loss.item()
        row.first = time.perf_counter() - start
        head = run.model.lm_head.weight
        body, of_head = (_error(run.parameters, truth, lambda p, of=of: (p is head) == of) for of in (False, True))
    finally:
        run.optimizer.zero_grad()
    row.errors = Errors(abs(value / truth.loss - 1), body, of_head, float("nan"))
    row.problem = _verdict(row.errors)


def _error(parameters: list[nn.Parameter], truth: Truth, belongs: Callable[[nn.Parameter], bool]) -> float:
    """Return the relative error of the gradients of all parameters that belong, as of one vector."""
    sums = torch.zeros(2, device=parameters[0].device, dtype=torch.float64)
    for parameter, true in zip(parameters, truth.gradients, strict=True):
        if true is not None and belongs(parameter):
            true = true.to(parameter.device).float()
            mine = 0.0 if parameter.grad is None else _here(parameter.grad).float()
            sums += torch.stack([(mine - true).square().sum(), true.square().sum()])
    return (sums[0] / sums[1]).sqrt().item()


def _here(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _verdict(errors: Errors) -> str:
    """Say in a few words if something is wrong, else nothing. NaN is wrong."""
    of_gradient = (("gradient of the body", errors.d_hidden), ("gradient of the head", errors.d_weight))
    limits = [("loss", errors.loss, MAX_LOSS_ERROR), *((*each, MAX_GRADIENT_ERROR) for each in of_gradient)]
    for name, error, limit in limits:
        if not error <= limit:
            return f"wrong {name}: {error:.1e} from stock, limit {limit:.0e}"
    return ""


def _allocated(tensor: Tensor) -> int:
    return torch.cuda.memory_allocated() if tensor.is_cuda else 0


def _peak(step: Callable[[], None]) -> int:
    """Return the most bytes that are allocated during a step; it is not the first, which compiles."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def _longest(run: Run, way: Way, text: Text, limit_gib: int, progress: Progress) -> int | None:
    """Return the tokens of the longest sequence whose step fits; None for a compiled way, which each length compiles anew."""
    device, train = run.parameters[0].device, text.corpus.train

    def fits(units: int) -> bool:
        ids, fit = text.spread(train[np.arange(units * LONGEST_UNIT) % len(train)], device)[None], True
        progress(f"a sequence of {ids.shape[1]:,}")
        try:
            run.step(way.of(run.model), ids)
        except torch.OutOfMemoryError:
            fit = False
        free_memory(ids)
        return fit

    if way.compiled:
        return None
    whole = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (limit_gib << 30) / whole))
    try:
        return LONGEST_UNIT * largest(fits)
    except Exception as error:
        progress(f"no longest sequence: {describe(error)}")
        return None
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _workload(model: Any, ids: Tensor) -> Workload:
    """Return the head's input on a batch, and what its softmax looks like."""
    with torch.no_grad():
        hidden = torch.cat([model.model(input_ids=sequence).last_hidden_state[0] for sequence in ids.split(1)])
        labels = F.pad(ids[:, 1:], (0, 1), value=IGNORE_INDEX).flatten()
        weight = model.lm_head.weight.detach()
        softcap = getattr(model.config, "final_logit_softcapping", None)
        return Workload(hidden, weight, labels, *describe_softmax(hidden, weight, labels, softcap))
