"""The recipe of a run: everything that the command line asks for, as one frozen record with types and defaults."""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Any

import torch

from cce_dist import GradFilter

FILTERS: dict[str, dict[str, bool]] = {  # arguments of GradFilter, beside eps, by name of the loss
    "filtered": {},
    "filtered-plain": {"compensate": False},
    "full-c": {"weight": False},
    "full-c-plain": {"weight": False, "compensate": False},
}
LOSSES = ("dense", "exact", *FILTERS)
MEGATRON_FUSED = "megatron-fused"


class UsageError(Exception):
    """The run that was asked for cannot be done. Every rank raises it, with the same message."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a model. ``num_ffn`` is the inner width of the SwiGLU, ``seq_len`` the tokens of one sequence."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_ffn: int
    seq_len: int
    vocab_size: int


PRESETS = {
    "toy": Shape(hidden_size=32, num_layers=2, num_heads=4, num_ffn=96, seq_len=32, vocab_size=384),
    "small": Shape(hidden_size=128, num_layers=4, num_heads=4, num_ffn=384, seq_len=128, vocab_size=4096),
    "wide": Shape(hidden_size=1024, num_layers=4, num_heads=16, num_ffn=2816, seq_len=512, vocab_size=32768),
    "base": Shape(hidden_size=768, num_layers=12, num_heads=12, num_ffn=2048, seq_len=1024, vocab_size=32768),
    "llama-3-8b-head": Shape(
        hidden_size=4096, num_layers=2, num_heads=32, num_ffn=14336, seq_len=2048, vocab_size=128256
    ),
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What one run trains, on what, how and where.

    A field has the name and the default of its flag, and the flag's help says what it means. Differences: ``shape`` is the
    preset with the sizes that other flags change, ``device`` is "cpu" or "cuda", and ``tp`` is a number.
    """

    shape: Shape = PRESETS["small"]

    out: Path = Path("runs/pretrain")
    resume: bool = True
    steps: int = 300
    seed: int = 0
    log_every: int = 1
    eval_every: int = 50
    eval_batches: int = 8
    checkpoint_every: int = 100
    keep: int = 2

    loss: str = "exact"
    filter_eps: float = 2**-12

    corpus: Path | None = None
    pattern: str | None = None
    corpus_mib: int | None = None
    cache: Path | None = None

    batch_size: int = 16
    accumulate: int = 1
    lr: float = 3e-3
    warmup: int = 20
    weight_decay: float = 0.1
    clip: float = 1.0

    engine: str = "torch"
    tp: int = 1
    dp: int = 1
    pp: int = 1
    zero_stage: int = 1
    sequence_parallel: bool = False
    device: str = "cpu"
    dtype: str = "float32"
    compile: bool = False
    timeout: float = 600.0
    max_restarts: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.filter_eps < 1:
            raise UsageError(f"--filter-eps must be in [0, 1), got {self.filter_eps}")

    @classmethod
    def of(cls, args: argparse.Namespace, **fields: Any) -> Recipe:
        """Read a parsed command line. ``fields`` win over it; a field in neither keeps its default."""
        sizes = {name: getattr(args, name) for name in ("vocab_size", "num_layers", "seq_len")}
        shape = dataclasses.replace(PRESETS[args.preset], **{k: v for k, v in sizes.items() if v is not None})
        names = {field.name for field in dataclasses.fields(cls)}
        said: dict[str, Any] = {name: value for name, value in vars(args).items() if name in names}
        return cls(**said | {"shape": shape} | fields)

    @property
    def num_ranks(self) -> int:
        return self.tp * self.dp * self.pp

    @property
    def text(self) -> tuple[Path | None, str | None, int, Path | None, int | None]:
        """What ``data.prepare`` takes."""
        return self.corpus, self.pattern, self.shape.vocab_size, self.cache, self.corpus_mib

    @property
    def grad_filter(self) -> GradFilter | None:
        """The filter that the loss names; None if the loss names none."""
        return GradFilter(self.filter_eps, **FILTERS[self.loss]) if self.loss in FILTERS else None

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1: linear warm-up, then a cosine down to a tenth of the peak."""
        if step <= self.warmup:
            return self.lr * step / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (0.55 + 0.45 * math.cos(math.pi * done))

    def autocast(self) -> torch.autocast:
        """Return the context in which the model and its loss run forward."""
        return torch.autocast(self.device, torch.bfloat16, enabled=self.dtype != "float32")
