"""Tables of whole training steps of transformers' models: ``bench --models``.

A model is trained in place on text, so that its softmax is like a language model's. Then the learning rate is 0, and the
weights do not change: every method computes the same step. A step is Trainer's: forward with labels, backward, clipping, fused
AdamW. The reference for losses and gradients is the stock model, which takes the batch a sequence at a time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import cce_dist
from cce_dist.tools.bench.loop import Limits, Progress, Trial, free_memory, measure, relative_error, show_progress
from cce_dist.tools.bench.methods import Method
from cce_dist.tools.bench.models import CONFIGS, STOCK, build, over, ways
from cce_dist.tools.bench.records import Case, Cases, Errors
from cce_dist.tools.bench.shapes import COMPILE
from cce_dist.tools.bench.workload import IGNORE_INDEX, Workload, describe_softmax
from cce_dist.tools.pretrain.data import Batches, Corpus, CorpusError, prepare
from cce_dist.tools.pretrain.exits import UsageError

TRAIN_TOKENS, TRAIN_RATE = 8192, 1e-3  # tokens of a training step, and the peak rate up to a hidden size of 1,024
CLIP = 1.0
# A bf16 body turns the rounding of a loss's dE into 1e-2 to 1e-1 of its own gradients. A mistake is several times as large.
LIMITS = Limits(1e-2, 0.2, "the body", "the head")


def complete(args: argparse.Namespace) -> int:
    """Check the options, fill in their defaults, and return the number of ranks: 0, this process alone."""
    unknown = [name for name in args.models if name not in CONFIGS]
    if unknown:
        raise SystemExit(f"cce-dist bench: unknown model {unknown[0]}; choose from {', '.join(CONFIGS)}")
    for name in ("shapes", "tp", "log_probs", "kl", "stage"):
        if getattr(args, name) is not None:
            raise SystemExit(f"cce-dist bench: --models and --{name.replace('_', '-')} are two tables; give one")
    args.tokens = args.tokens or [2048, 8192, 32768]
    wrong = [tokens for tokens in args.tokens if tokens % min(tokens, args.length)]
    if wrong:
        raise SystemExit(f"cce-dist bench: {wrong[0]} tokens are no whole sequences of {args.length}")
    return 0


def methods(args: argparse.Namespace) -> dict[str, Method]:
    """Return the rows of the table."""
    return ways(COMPILE[args.compile])


def cases(args: argparse.Namespace, chosen: dict[str, Method], device: torch.device) -> Cases:
    """Yield each model's name and its cases."""
    for name in args.models:
        yield name, _cases_of(name, args, chosen, device)


def _cases_of(name: str, args: argparse.Namespace, chosen: dict[str, Method], device: torch.device) -> Iterator[Case]:
    """Train a model and measure it at each number of tokens."""
    show_progress(f"{name}: reading the text")
    model = build(name, args.layers, getattr(torch, args.dtype), device)
    vocab_size = model.config.vocab_size
    run = at_rest(model)
    try:
        text = Text(Corpus(prepare(args.corpus, args.pattern, vocab_size, args.cache)), vocab_size)
        _train(run, text, args.length, args.train_steps, device, partial(show_progress, f"{name}: "))
    except (CorpusError, UsageError) as error:
        raise SystemExit(f"cce-dist bench: {error}") from error
    for num_tokens in args.tokens:
        length = min(args.length, num_tokens)
        ids = text.held_out(num_tokens // length, length, device)
        case = measure_steps(name, args, chosen, lambda method: (run, over(method, model)), ids)
        case.train_steps, case.num_ids = args.train_steps, text.num_ids
        yield replace(case, **_workload(model, ids).drawn)


class Text:
    """A corpus whose ids are spread evenly, in their order, over all rows of a vocabulary.

    A byte-pair tokenizer has as many ids as it finds pairs in the text. If these are fewer than the rows of the weight, unused
    rows lie between used ones, as with a real tokenizer on text of one language.
    """

    def __init__(self, corpus: Corpus, vocab_size: int) -> None:
        self.corpus, self.vocab_size = corpus, vocab_size
        self.known = 1 + max(int(ids.max()) for ids in (corpus.train, corpus.held_out))
        self.num_ids = len(np.unique(corpus.train))

    def spread(self, ids: np.ndarray, device: torch.device) -> Tensor:
        """Return ids of the tokenizer as rows of the weight, int64 on the device."""
        return torch.from_numpy(ids.astype(np.int64) * self.vocab_size // self.known).to(device)

    def train(self, position: int, count: int, length: int, device: torch.device, seed: int = 0) -> Tensor:
        """Return [count, length] ids of the training part, in the order of a seed."""
        return self.spread(Batches(self.corpus.train, length, seed).at(position, count)[0], device)

    def held_out(self, count: int, length: int, device: torch.device) -> Tensor:
        """Return [count, length] ids that are not in the training part."""
        return self.spread(Batches(self.corpus.held_out, length, 0).at(0, count)[0], device)


class Run(NamedTuple):
    """A model and its optimizer."""

    model: Any
    optimizer: torch.optim.Optimizer
    clip: float = CLIP

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def step(self, way: Callable[..., Any], ids: Tensor) -> Tensor:
        """Take a step on ids [B, L], and return the loss before it. Gradients are freed, even after an error."""
        try:
            loss = way(input_ids=ids, labels=ids)["loss"]
            loss.backward()
            nn.utils.clip_grad_norm_(self.parameters, self.clip)
            self.optimizer.step()
            return loss.detach()
        finally:
            self.optimizer.zero_grad()

    def gradients(self, way: Callable[..., Any], *batches: Tensor) -> tuple[Tensor | None, ...]:
        """Return the mean loss over equally large batches, and this rank's rows of each parameter's gradient."""
        loss = 0.0
        try:
            for ids in batches:
                part = way(input_ids=ids, labels=ids)["loss"] / len(batches)
                part.backward()
                loss += part.item()
            gradients = [parameter.grad for parameter in self.parameters]
            local = (None if gradient is None else _here(gradient) for gradient in gradients)
            return torch.tensor(loss, dtype=torch.float64), *local
        finally:
            self.optimizer.zero_grad()

    def resident_bytes(self) -> int:
        """Return the bytes of weights, buffers and the optimizer's state."""
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        return sum(_here(tensor).nbytes for tensor in (*self.parameters, *self.model.buffers(), *state))


def at_rest(model: Any) -> Run:
    """Return a run with learning rate 0: steps do all the work, but change no weight."""
    options: dict[str, Any] = {"lr": 0.0, "betas": (0.9, 0.95), "weight_decay": 0.0, "fused": True}
    return Run(model, torch.optim.AdamW(model.parameters(), **options))


def _here(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _train(run: Run, text: Text, length: int, steps: int, device: torch.device, progress: Progress) -> None:
    """Train in place. The learning rate rises over a tenth of the steps, then falls to 0."""
    way, (group,) = over(ways([""])["cce-dist-default"], run.model), run.optimizer.param_groups
    peak = TRAIN_RATE * min(1.0, 1024 / run.model.config.hidden_size)
    count = max(1, TRAIN_TOKENS // length)
    for index in range(steps):
        group["lr"] = peak * min((index + 1) / max(1, steps // 10), 1 - index / steps)
        if index % 10 == 0:
            progress(f"training, step {index} of {steps}")
        run.step(way, text.train(index * count, count, length, device))
    group["lr"] = 0.0


def measure_steps(
    name: str,
    args: argparse.Namespace,
    methods: dict[str, Method],
    open_run: Callable[[Method], tuple[Run, nn.Module]],
    ids: Tensor,
    group: dist.ProcessGroup | None = None,
) -> Case:
    """Measure the steps of each method on this rank's ids. ``open_run`` returns the run and the module of a method."""
    progress = partial(show_progress, f"{name}, N {ids.numel():,}: ")
    progress("the stock model, a sequence at a time")
    # Each method compiles the same code of the model's class anew. A second shape would get symbolic sizes, and be slower.
    torch._dynamo.config.recompile_limit = 64
    torch.compiler.reset()
    run, stock = open_run(STOCK)
    config = run.model.config
    reference = [None if true is None else true.cpu() for true in run.gradients(stock, *ids.split(1))]
    del run, stock
    free_memory(ids.device)

    def make(method: Method) -> Trial:
        run, module = open_run(method)

        def errors(*computed: Tensor | None) -> Errors:
            if method.ours:
                cce_dist.require(module)
            return _errors(run, computed, reference)

        def step() -> list[Tensor]:
            return [run.step(module, ids)]

        once = partial(run.gradients, module, ids)
        return Trial(once, errors, LIMITS, step, {"total": step}, run.resident_bytes)

    return Case(
        shape=name,
        num_tokens=ids.numel(),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        dtype=args.dtype,
        on_gpu=ids.is_cuda,
        num_ranks=1 if group is None else group.size(),
        task="whole steps" if group is None else "whole steps under FSDP2",
        num_layers=config.num_hidden_layers,
        length=ids.shape[1],
        **measure(methods, make, args.repeats, ids.device, group, progress)._asdict(),
    )


def _errors(run: Run, computed: Sequence[Tensor | None], reference: Sequence[Tensor | None]) -> Errors:
    """Compare two results of ``Run.gradients``. The gradients of all parameters of the body are one vector."""
    pairs: dict[str, list[tuple[Tensor, Tensor]]] = {"loss": [], "body": [], "head": []}
    head = run.model.lm_head.weight
    parts = ["loss", *("head" if parameter is head else "body" for parameter in run.parameters)]
    for part, value, true in zip(parts, computed, reference, strict=True):
        if true is not None:
            pairs[part].append((torch.zeros_like(true) if value is None else value, true))
    loss, body, of_head = (relative_error(pairs[part]) for part in ("loss", "body", "head"))
    return Errors(loss, body, of_head, float("nan"))


def _workload(model: Any, ids: Tensor) -> Workload:
    """Return the head's input on a batch, and what its softmax looks like."""
    with torch.no_grad():
        hidden = torch.cat([model.model(input_ids=sequence).last_hidden_state[0] for sequence in ids.split(1)])
        labels = F.pad(ids[:, 1:], (0, 1), value=IGNORE_INDEX).flatten()
        weight = model.lm_head.weight.detach()
        softcap = getattr(model.config, "final_logit_softcapping", None)
        return Workload(hidden, weight, labels, *describe_softmax(hidden, weight, labels, softcap))
