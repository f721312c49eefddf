"""The recipe of a run: all that the command line asks for, as one record with types, defaults and flags."""

# ruff: noqa: RUF009 - flag() returns a field

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Any

import torch

from cce_dist import GradFilter
from cce_dist.tools.arguments import folder, number, text, whole
from cce_dist.tools.arguments import pattern as file_pattern
from cce_dist.tools.pretrain.exits import UsageError

FILTERS: dict[str, dict[str, Any]] = {  # arguments of GradFilter, beside eps, by name of the loss
    "filtered": {},
    "filtered-plain": {"compensate": False},
    "full-c": {"weight": False},
    "full-c-plain": {"weight": False, "compensate": False},
}
LOSSES = ("dense", "exact", *FILTERS)
# Flags of a preset's sizes, and their largest values.
SIZES = {"vocab_size": 2**24, "num_layers": 2**12, "seq_len": 2**24}
BYTES = 257  # the least vocabulary of a byte-level BPE: all bytes and an end of document


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a model. ``num_ffn`` is the inner width of the SwiGLU."""

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


def flag(group: str, value: Any, help: str | None = None, **how: Any) -> Any:
    """Return a field that is also a flag of a group; ``how`` goes to ``add_argument``."""
    if isinstance(value, bool):
        how = {"action": "store_true", **how}
    else:
        kinds = {int: whole(1), float: number(positive=True), str: text}
        how = {"type": kinds.get(type(value), text), **how}
    return dataclasses.field(default=value, metadata={"group": group, "add": {"default": value, "help": help, **how}})


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A field for every flag of ``cce-dist pretrain``, in which the machine has decided ``device`` and ``tp``.

    ``shape`` is the preset with the sizes that other flags change.
    """

    out: Path = flag("run", Path("runs/pretrain"), "folder of metrics, figure, checkpoints", type=folder)
    resume: bool = flag(
        "run",
        True,
        "go on from the last checkpoint in --out; --no-resume deletes the checkpoints there and starts anew",
        action=argparse.BooleanOptionalAction,
    )
    steps: int = flag("run", 300, "optimizer steps of the whole run")
    seed: int = flag("run", 0, "of weights and of data order", type=whole(0))
    log_every: int = flag("run", 1, "steps from one record to the next", metavar="STEPS")
    eval_every: int = flag("run", 50, "steps from one validation to the next", metavar="STEPS")
    eval_batches: int = flag("run", 8, "batches of a validation", metavar="BATCHES")
    checkpoint_every: int = flag(
        "run", 100, "steps from one checkpoint to the next; 0: none", type=whole(0), metavar="STEPS"
    )
    keep: int = flag("run", 2, "how many of the newest stay on disk", metavar="CHECKPOINTS")
    tensorboard: bool = flag("run", False, "write the records to --out/tensorboard too (needs tensorboard)")
    wandb: str | None = flag(
        "run", None, "write the records to this project of Weights & Biases too (needs wandb)", metavar="PROJECT"
    )

    loss: str = flag("loss", "exact", "dense holds all logits; the others never do", choices=LOSSES)
    filter_eps: float = flag(
        "loss", GradFilter.eps, "softmax below which the gradient is dropped", type=number(0, below=1)
    )
    filter_always: bool = flag("loss", False, "filter whatever it costs, also where exact gradients take less time")

    shape: Shape = PRESETS["small"]

    corpus: Path | None = flag(
        "data", None, "folder of UTF-8 text files (default: Python's standard library)", type=folder
    )
    pattern: str | None = flag(
        "data",
        None,
        "file names to read, such as '*.txt' (default: '*', or '*.py' with no --corpus)",
        type=file_pattern,
    )
    corpus_mib: int | None = flag(
        "data", None, "read files, in mixed order, up to this size", type=whole(1), metavar="MIB"
    )
    cache: Path | None = flag("data", None, "folder of tokenized corpora (default: ~/.cache/cce-dist)", type=folder)

    batch_size: int = flag("optimization", 16, "sequences per step, over all ranks")
    accumulate: int = flag("optimization", 1, "forward and backward passes per step")
    lr: float = flag("optimization", 3e-3, "peak of warm-up and cosine decay to a tenth")
    warmup: int = flag("optimization", 20, "steps of linear warm-up", type=whole(0), metavar="STEPS")
    weight_decay: float = flag("optimization", 0.1, "of AdamW, on matrices", type=number(0))
    clip: float = flag("optimization", 1.0, "largest norm of the gradient")

    tp: int = flag("ranks", 1, "tensor-parallel size (default: all ranks; alone, up to 2)", default=None)
    dp: int = flag("ranks", 1, "data-parallel size (FSDP2)")
    sequence_parallel: bool = flag("ranks", False, "slice activations between tensor-parallel layers")
    timeout: float = flag(
        "ranks", 600.0, "of every collective", type=number(below=1e6, positive=True), metavar="SECONDS"
    )
    max_restarts: int = flag("ranks", 0, "restarts after a lost rank, when started alone", type=whole(0))
    nodes: int = flag("ranks", 1, "nodes of the run; this command is then started on each, as launch/pretrain.sh does")
    ranks_per_node: int | None = flag(
        "ranks", None, "ranks on this node (default: the same on all nodes)", type=whole(1), metavar="RANKS"
    )
    meet: str | None = flag("ranks", None, "where nodes meet: a name of the first one, and a port", metavar="HOST:PORT")
    meet_conf: str | None = flag("ranks", None, "further settings of torchrun's rendezvous", metavar="KEY=VALUE,...")
    run_id: str = flag("ranks", "cce-dist", "tells runs apart that meet at the same place")

    device: str = flag(
        "device", "cpu", "auto takes a GPU if there is one", choices=("auto", "cpu", "cuda"), default="auto"
    )
    dtype: str = flag("device", "float32", "of arithmetic, by autocast", choices=("float32", "bfloat16"))
    compile: bool = flag("device", False, "torch.compile every block")
    peak_tflops: float | None = flag(
        "device",
        None,
        "of one GPU, for the records' mfu (default: known for A100, H100, H200, B200)",
        type=number(positive=True),
        metavar="TFLOPS",
    )

    @classmethod
    def of(cls, args: argparse.Namespace, **fields: Any) -> Recipe:
        """Read a parsed command line. ``fields`` win over it."""
        sizes = {name: getattr(args, name) for name in SIZES if getattr(args, name) is not None}
        names = {field.name for field in dataclasses.fields(cls)}
        said: dict[str, Any] = {name: value for name, value in vars(args).items() if name in names}
        said["shape"] = dataclasses.replace(PRESETS[args.preset], **sizes)
        return cls(**said | fields)

    def check_sizes(self) -> None:
        """Raise ``UsageError`` where a size is too small, or cannot be split over the ranks."""
        shape = self.shape
        if shape.vocab_size < BYTES:
            least = "a byte-level vocabulary has 256 bytes and an end-of-document id"
            raise UsageError(f"{least}; --vocab-size {shape.vocab_size} is too few")
        parts = {"heads": (shape.num_heads, self.tp), "ffn width": (shape.num_ffn, self.tp)}
        if self.sequence_parallel:
            parts["sequence length"] = (shape.seq_len, self.tp)
        parts["batch size"] = (self.batch_size, self.dp * self.accumulate)
        for name, (size, ways) in parts.items():
            if size % ways:
                raise UsageError(f"{name} {size} cannot be split {ways} ways")

    def arguments(self) -> dict[str, Any]:
        """Return what the run was asked for, as plain values by name."""
        fields = dataclasses.asdict(self)
        fields |= fields.pop("shape")
        return {name: str(value) if isinstance(value, Path) else value for name, value in fields.items()}

    @property
    def num_ranks(self) -> int:
        return self.tp * self.dp

    @property
    def text(self) -> tuple[Path | None, str | None, int, Path | None, int | None]:
        """The arguments of ``data.prepare``."""
        return self.corpus, self.pattern, self.shape.vocab_size, self.cache, self.corpus_mib

    @property
    def grad_filter(self) -> GradFilter | None:
        """The filter that the loss names; None if the loss names none."""
        if self.loss not in FILTERS:
            return None
        return GradFilter(self.filter_eps, **FILTERS[self.loss], always=self.filter_always)

    def learning_rate(self, step: int) -> float:
        """Return the rate of a step, counted from 1: linear warm-up, then a cosine down to a tenth."""
        if step <= self.warmup:
            return self.lr * step / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (0.55 + 0.45 * math.cos(math.pi * done))

    def autocast(self) -> torch.autocast:
        """Return the context in which the model and its loss run forward."""
        return torch.autocast(self.device, torch.bfloat16, enabled=self.dtype != "float32")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add all flags: a group for each kind of field, and one for the model's sizes."""
    titles = {"run": "run", "loss": "loss: changes nothing else, so that curves compare"}
    titles |= {name: name for name in ("model", "data", "optimization", "ranks", "device")}
    groups = {name: parser.add_argument_group(title) for name, title in titles.items()}
    groups["model"].add_argument("--preset", choices=PRESETS, default="small", help="sizes of the model")
    for name, most in SIZES.items():
        groups["model"].add_argument(_dashed(name), type=whole(1, most), help="(default: the preset's)")
    for field in dataclasses.fields(Recipe):
        if field.metadata:
            groups[field.metadata["group"]].add_argument(_dashed(field.name), **field.metadata["add"])


def _dashed(name: str) -> str:
    return "--" + name.replace("_", "-")
