"""The recipe of a run: everything that the command line asks for, as one frozen record with types, defaults and flags."""

# ruff: noqa: RUF009 - flag() returns a field

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
SIZES = ("vocab_size", "num_layers", "seq_len")  # those of a preset that have flags
ENGINES = {"torch": "TorchEngine", "megatron": "MegatronEngine", "deepspeed": "DeepSpeedEngine"}


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


def positive(text: str) -> int:
    """Read a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def flag(group: str, value: Any, help: str | None = None, **how: Any) -> Any:
    """Return a field that is also a flag of a group; ``how`` goes to ``add_argument``, and may name another default."""
    if isinstance(value, bool):
        how = {"action": "store_true", **how}
    else:
        how = {"type": positive if isinstance(value, int) else type(value), **how}
    return dataclasses.field(default=value, metadata={"group": group, "add": {"default": value, "help": help, **how}})


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything that defines one run: a field for every flag of ``cce-dist pretrain``.

    Three fields differ from their flags: ``shape`` is the preset with the sizes that other flags change, ``device`` is "cpu"
    or "cuda" and never "auto", and ``tp`` is always a number.
    """

    out: Path = flag("run", Path("runs/pretrain"), "folder of metrics, figure, checkpoints", type=Path)
    resume: bool = flag(
        "run", True, "go on from the last checkpoint in --out; --no-resume deletes the checkpoints there and starts anew",
        action=argparse.BooleanOptionalAction,
    )  # fmt: skip
    steps: int = flag("run", 300, "optimizer steps of the whole run")
    seed: int = flag("run", 0, "of weights and of data order", type=int)
    log_every: int = flag("run", 1, metavar="STEPS")
    eval_every: int = flag("run", 50, metavar="STEPS")
    eval_batches: int = flag("run", 8, metavar="BATCHES")
    checkpoint_every: int = flag("run", 100, "0: never", type=int, metavar="STEPS")
    keep: int = flag("run", 2, "how many of the newest stay on disk", metavar="CHECKPOINTS")

    capture: tuple[int, ...] = flag(
        "run", (), "steps at which to write what the head gets, for 'cce-dist bench --workload' (--engine torch, one rank)",
        type=positive, nargs="+", metavar="STEP",
    )  # fmt: skip

    loss: str = flag(
        "loss", "exact", f"dense and {MEGATRON_FUSED}, which is Megatron's own, hold all logits; the others never do",
        choices=(*LOSSES, MEGATRON_FUSED),
    )  # fmt: skip
    filter_eps: float = flag("loss", 2**-12, "softmax below which the gradient is dropped")

    shape: Shape = PRESETS["small"]

    corpus: Path | None = flag(
        "data", None, "folder of UTF-8 text files (default: Python's standard library)", type=Path
    )
    pattern: str | None = flag(
        "data", None, "file names to read, such as '*.txt' (default: '*', or '*.py' with no --corpus)", type=str
    )  # fmt: skip
    corpus_mib: int | None = flag(
        "data", None, "read files, in mixed order, up to this size", type=positive, metavar="MIB"
    )
    cache: Path | None = flag("data", None, "folder of tokenized corpora (default: ~/.cache/cce-dist)", type=Path)

    batch_size: int = flag("optimization", 16, "sequences per step, over all ranks")
    accumulate: int = flag("optimization", 1, "forward and backward passes per step")
    lr: float = flag("optimization", 3e-3, "peak of warm-up and cosine decay to a tenth")
    warmup: int = flag("optimization", 20, type=int, metavar="STEPS")
    weight_decay: float = flag("optimization", 0.1)
    clip: float = flag("optimization", 1.0, "largest norm of the gradient")

    engine: str = flag("ranks", "torch", "what trains: plain torch, megatron-core (GPUs), deepspeed", choices=ENGINES)
    tp: int = flag("ranks", 1, "tensor-parallel size (default: all ranks; alone, up to 2)", default=None)
    dp: int = flag("ranks", 1, "data-parallel size (FSDP2, or the engine's)")
    pp: int = flag("ranks", 1, "pipeline stages, with --engine megatron or deepspeed")
    layers_per_stage: str = flag(
        "ranks", "even", "layers of each pipeline stage: even, auto (as cce-dist plan cuts them), or numbers such as 7,5",
        metavar="LAYERS",
    )  # fmt: skip
    zero_stage: int = flag(
        "ranks", 1, "with --engine deepspeed: 1 trains a pipeline of --pp stages, also of one; 2 and 3 a plain model",
        type=int, choices=(1, 2, 3),
    )  # fmt: skip
    sequence_parallel: bool = flag("ranks", False, "slice activations between tensor-parallel layers")
    timeout: float = flag("ranks", 600.0, "of every collective", metavar="SECONDS")
    max_restarts: int = flag("ranks", 0, "restarts after a lost rank, when started alone", type=int)

    device: str = flag("device", "cpu", choices=("auto", "cpu", "cuda"), default="auto")
    dtype: str = flag("device", "float32", "of arithmetic, by autocast", choices=("float32", "bfloat16"))
    compile: bool = flag("device", False, "torch.compile every block")

    def __post_init__(self) -> None:
        if not 0 <= self.filter_eps < 1:
            raise UsageError(f"--filter-eps must be in [0, 1), got {self.filter_eps}")

    @classmethod
    def of(cls, args: argparse.Namespace, **fields: Any) -> Recipe:
        """Read a parsed command line. ``fields`` win over it; a field in neither keeps its default."""
        sizes = {name: getattr(args, name) for name in SIZES}
        shape = dataclasses.replace(PRESETS[args.preset], **{k: v for k, v in sizes.items() if v is not None})
        names = {field.name for field in dataclasses.fields(cls)}
        said: dict[str, Any] = {name: value for name, value in vars(args).items() if name in names}
        said |= {"shape": shape, **fields}
        return cls(**said)

    @property
    def num_ranks(self) -> int:
        return self.tp * self.dp * self.pp

    @property
    def text(self) -> tuple[Path | None, str | None, int, Path | None, int | None]:
        """The arguments of ``data.prepare``."""
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


def add_flags(parser: argparse.ArgumentParser, titles: dict[str, str]) -> None:
    """Add the flags of some groups of ``Recipe``, and of the model's sizes, each group under its title."""
    groups = {name: parser.add_argument_group(title) for name, title in titles.items()}
    if "model" in groups:
        groups["model"].add_argument("--preset", choices=PRESETS, default="small", help="sizes of the model")
        for name in SIZES:
            groups["model"].add_argument(_dashed(name), type=positive, help="(default: the preset's)")
    for field in dataclasses.fields(Recipe):
        if field.metadata.get("group") in groups:
            groups[field.metadata["group"]].add_argument(_dashed(field.name), **field.metadata["add"])


def _dashed(name: str) -> str:
    return "--" + name.replace("_", "-")
