"""The main job, ``cce-dist pretrain``: a GPT of our own, tensor-parallel, with a ``VocabParallelHead`` as its last layer.

Reading order: ``recipe`` (what a run is), ``launch`` (from a command line to ranks; what a failure says), ``train`` (the
loop), ``engines`` (what the loop drives: plain torch, Megatron, DeepSpeed), ``build`` and ``model``, ``data`` (a folder of
text files to packed batches), ``ranks`` (device, mesh, microbatches), ``checkpoint``, ``log`` (metrics and progress bar),
``plot`` (the figure).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from cce_dist.pretrain.recipe import LOSSES, MEGATRON_FUSED, PRESETS, Recipe, UsageError

__all__ = ["LOSSES", "Recipe", "UsageError", "add_arguments", "run"]

ENGINES = ("torch", "megatron", "deepspeed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``cce-dist pretrain``."""
    parser.description = (
        "Pre-train a GPT on a folder of text files. Under torchrun every process is a rank; "
        "started alone it starts tp x dp ranks on this machine."
    )
    run = parser.add_argument_group("run")
    run.add_argument("--out", type=Path, default=Recipe.out, help="folder of metrics, figure, checkpoints")
    run.add_argument(
        "--resume",
        action=argparse.BooleanOptionalAction,
        default=Recipe.resume,
        help="go on from the last checkpoint in --out; --no-resume deletes the checkpoints there and starts anew",
    )
    run.add_argument("--steps", type=positive, default=Recipe.steps, help="optimizer steps of the whole run")
    run.add_argument("--seed", type=int, default=Recipe.seed, help="of weights and of data order")
    run.add_argument("--log-every", type=positive, default=Recipe.log_every, metavar="STEPS")
    run.add_argument("--eval-every", type=positive, default=Recipe.eval_every, metavar="STEPS")
    run.add_argument("--eval-batches", type=positive, default=Recipe.eval_batches, metavar="BATCHES")
    run.add_argument("--checkpoint-every", type=int, default=Recipe.checkpoint_every, metavar="STEPS", help="0: never")
    run.add_argument(
        "--keep", type=positive, default=Recipe.keep, metavar="CHECKPOINTS", help="how many of the newest stay on disk"
    )

    loss = parser.add_argument_group("loss: changes nothing else, so that curves compare")
    loss.add_argument(
        "--loss",
        choices=(*LOSSES, MEGATRON_FUSED),
        default=Recipe.loss,
        help=f"dense and {MEGATRON_FUSED}, which is Megatron's own, hold all logits; the others never do",
    )
    loss.add_argument(
        "--filter-eps", type=float, default=Recipe.filter_eps, help="softmax below which the gradient is dropped"
    )

    add_model_arguments(parser)
    add_data_arguments(parser)
    add_optimization_arguments(parser)

    ranks = parser.add_argument_group("ranks and devices")
    ranks.add_argument(
        "--engine",
        choices=ENGINES,
        default=Recipe.engine,
        help="what trains: plain torch, megatron-core (GPUs), deepspeed",
    )
    ranks.add_argument("--tp", type=positive, help="tensor-parallel size (default: all ranks; alone, up to 2)")
    ranks.add_argument("--dp", type=positive, default=Recipe.dp, help="data-parallel size (FSDP2, or the engine's)")
    ranks.add_argument(
        "--pp", type=positive, default=Recipe.pp, help="pipeline stages, with --engine megatron or deepspeed"
    )
    ranks.add_argument(
        "--zero-stage",
        type=int,
        choices=(1, 2, 3),
        default=Recipe.zero_stage,
        help="with --engine deepspeed: 1 trains a pipeline of --pp stages, also of one; 2 and 3 a plain model",
    )
    ranks.add_argument(
        "--sequence-parallel", action="store_true", help="slice activations between tensor-parallel layers"
    )
    add_device_arguments(ranks)
    ranks.add_argument("--timeout", type=float, default=Recipe.timeout, metavar="SECONDS", help="of every collective")
    ranks.add_argument(
        "--max-restarts", type=int, default=Recipe.max_restarts, help="restarts after a lost rank, when started alone"
    )


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that size the model."""
    model = parser.add_argument_group("model")
    model.add_argument("--preset", choices=PRESETS, default="small", help="sizes of the model")
    model.add_argument("--vocab-size", type=positive, help="(default: the preset's)")
    model.add_argument("--num-layers", type=positive, help="(default: the preset's)")
    model.add_argument("--seq-len", type=positive, help="(default: the preset's)")


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the text."""
    data = parser.add_argument_group("data")
    data.add_argument("--corpus", type=Path, help="folder of UTF-8 text files (default: Python's standard library)")
    data.add_argument(
        "--pattern", help="file names to read, such as '*.txt' (default: '*', or '*.py' with no --corpus)"
    )
    data.add_argument("--corpus-mib", type=positive, metavar="MIB", help="read files, in mixed order, up to this size")
    data.add_argument("--cache", type=Path, help="folder of tokenized corpora (default: ~/.cache/cce-dist)")


def add_optimization_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of batch and optimizer."""
    optim = parser.add_argument_group("optimization")
    optim.add_argument(
        "--batch-size", type=positive, default=Recipe.batch_size, help="sequences per step, over all ranks"
    )
    optim.add_argument(
        "--accumulate", type=positive, default=Recipe.accumulate, help="forward and backward passes per step"
    )
    optim.add_argument("--lr", type=float, default=Recipe.lr, help="peak of warm-up and cosine decay to a tenth")
    optim.add_argument("--warmup", type=int, default=Recipe.warmup, metavar="STEPS")
    optim.add_argument("--weight-decay", type=float, default=Recipe.weight_decay)
    optim.add_argument("--clip", type=float, default=Recipe.clip, help="largest norm of the gradient")


def add_device_arguments(parser: argparse._ActionsContainer) -> None:
    """Add the options that say where and how a rank computes."""
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default=Recipe.dtype, help="of arithmetic, by autocast"
    )
    parser.add_argument("--compile", action="store_true", help="torch.compile every block")


def positive(text: str) -> int:
    """Read a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def run(args: argparse.Namespace) -> int:
    """Run ``cce-dist pretrain`` and return its exit code."""
    from cce_dist.pretrain.launch import launch

    return launch(args)
