"""A training step of a model of transformers, the text that it trains on, and the measurement of its methods.

A step is Trainer's: forward with labels, backward, clipping, fused AdamW. The reference for losses and gradients is the stock
model, which takes the batch a sequence at a time.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import cce_dist
import command
from cce_dist.tools.arguments import folder, pattern, whole
from cce_dist.tools.pretrain.data import Batches, Corpus, CorpusError, prepare
from cce_dist.tools.pretrain.exits import UsageError
from loop import Clock, Limits, Method, Trial, free_memory, measure, relative_error, show_progress
from models import STOCK
from records import Case, Errors

CLIP = 1.0
# A bf16 body turns the rounding of a loss's dE into 1e-2 to 1e-1 of its own gradients. A mistake is several times as large.
LIMITS = Limits(1e-2, 0.2, "the body", "the head")


def add_text(parser: argparse.ArgumentParser) -> None:
    """Add the options of the text."""
    add = parser.add_argument
    add("--length", type=whole(2), default=2048, metavar="N", help="tokens of a sequence (default: 2048)")
    add("--corpus", type=folder, metavar="DIR", help="UTF-8 text files (default: Python's standard library)")
    add("--pattern", type=pattern, help="file names to read, such as '*.txt'")
    add("--cache", type=folder, metavar="DIR", help="tokenized text (default: ~/.cache/cce-dist)")


class Text:
    """A corpus whose ids are spread evenly, in their order, over all rows of a vocabulary.

    A byte-pair tokenizer has as many ids as it finds pairs in the text. If these are fewer than the rows of the weight, unused
    rows lie between used ones, as with a real tokenizer on text of one language.
    """

    def __init__(self, args: argparse.Namespace, vocab_size: int) -> None:
        self.length, self.vocab_size = args.length, vocab_size
        show_progress("reading the text")
        try:
            self.corpus = Corpus(prepare(args.corpus, args.pattern, vocab_size, args.cache))
            self._held_out = Batches(self.corpus.held_out, self.length, 0)
        except (CorpusError, UsageError) as error:
            raise command.Refused(error) from error
        self.known = 1 + max(int(ids.max()) for ids in (self.corpus.train, self.corpus.held_out))
        self.num_ids = len(np.unique(self.corpus.train))

    def spread(self, ids: np.ndarray, device: torch.device) -> Tensor:
        """Return ids of the tokenizer as rows of the weight, int64 on the device."""
        return torch.from_numpy(ids.astype(np.int64) * self.vocab_size // self.known).to(device)

    def train(self, position: int, count: int, device: torch.device, seed: int = 0) -> Tensor:
        """Return ``count`` sequences of the training part, in the order of a seed."""
        return self.spread(Batches(self.corpus.train, self.length, seed).at(position, count)[0], device)

    def held_out(self, count: int, device: torch.device) -> Tensor:
        """Return ``count`` sequences that are not in the training part."""
        return self.spread(self._held_out.at(0, count)[0], device)


class Run(NamedTuple):
    """A model and its optimizer."""

    model: Any
    optimizer: torch.optim.Optimizer

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def set_rate(self, rate: float) -> None:
        """Have the next step use this learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def step(self, way: Callable[..., Any], ids: Tensor) -> Tensor:
        """Take a step on ids [B, L], and return the loss before it. Gradients are freed, even after an error."""
        try:
            loss = way(input_ids=ids, labels=ids)["loss"]
            loss.backward()
            nn.utils.clip_grad_norm_(self.parameters, CLIP)
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
        **measure(methods, make, args.repeats, Clock(ids.device, group), progress)._asdict(),
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
