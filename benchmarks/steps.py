"""Time whole training steps of transformers' models, at their real sizes, with each way of computing the loss.

    python benchmarks/steps.py --models gemma-3-270m qwen-3-0.6b --compile layers --corpus ~/text --pattern '*.txt'
    torchrun --nproc-per-node 2 benchmarks/steps.py --models qwen-3-0.6b --fsdp
    python benchmarks/steps.py --show benchmarks/results/h200-steps.json --columns total MiB

Random weights are first trained on text, so that their softmax is like a language model's; nothing is downloaded. Then the
learning rate is 0, and the weights do not change: every method computes the same step. A method whose loss or gradients differ
from the stock model's has no time.

With --fsdp the ranks are data-parallel under FSDP2. ``fully_shard`` splits a model in place, so each method has its own model,
all with the same drawn weights in fp32. They compute in --dtype and sum gradients over ranks in fp32. Each layer is a unit of
FSDP2, and the rest is one unit. Every rank draws random ids, because nothing that is measured there depends on the softmax.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import command
import models
from cce_dist.tools.arguments import whole
from loop import Method, show_progress
from models import CONFIGS
from records import Case, Cases
from whole_steps import Run, Text, add_text, at_rest, measure_steps

TRAIN_TOKENS, TRAIN_RATE = 8192, 1e-3  # tokens of a training step, and the peak rate up to a hidden size of 1,024


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    parser = command.parser(__doc__)
    add = parser.add_argument
    add("--models", nargs="+", choices=CONFIGS, metavar="MODEL", help=f"models of transformers: {', '.join(CONFIGS)}")
    add("--layers", type=whole(1), metavar="L", help="layers of each model (default: all)")
    add("--compile", choices=("no", "layers"), default="no", help="torch.compile around each layer")
    add("--fsdp", action="store_true", help="steps under FSDP2, with untrained weights; --tokens count on each rank")
    add("--train-steps", type=whole(1), default=300, metavar="STEPS", help="training before (default: 300)")
    add_text(parser)
    return parser


def complete(args: argparse.Namespace) -> bool:
    """Check the options, fill in their defaults, and return whether a process group is needed."""
    if not args.models:
        raise command.Refused(f"--models names one or more of {', '.join(CONFIGS)}")
    args.tokens = args.tokens or ([8192] if args.fsdp else [2048, 8192, 32768])
    wrong = [tokens for tokens in args.tokens if tokens % args.length]
    if wrong:
        raise command.Refused(f"{wrong[0]} tokens are no whole sequences of {args.length}")
    if args.fsdp != (command.num_ranks() > 1):
        raise command.Refused("--fsdp needs torchrun with two or more ranks, and no other table takes several")
    return args.fsdp


def methods(args: argparse.Namespace) -> dict[str, Method]:
    """Return the rows, under FSDP2 with ``shard_over``."""
    layers = args.compile == "layers"
    over = {f"cce-dist-shard-over{'+layers' * layers}": Method(_over_ranks, ours=True, compiles_layers=layers)}
    return models.ways(layers) | (over if args.fsdp else {})


def cases(args: argparse.Namespace, chosen: dict[str, Method], device: torch.device) -> Cases:
    """Yield each model's name and its cases."""
    cases_of = _fsdp_cases if args.fsdp else _trained_cases
    for name in args.models:
        yield name, cases_of(name, args, chosen, device)


def _trained_cases(
    name: str, args: argparse.Namespace, chosen: dict[str, Method], device: torch.device
) -> Iterator[Case]:
    """Train a model and measure it at each number of tokens."""
    model = models.build(name, args.layers, getattr(torch, args.dtype), device)
    text = Text(args, model.config.vocab_size)
    run = at_rest(model)
    _train(run, text, args.train_steps, device)
    for num_tokens in args.tokens:
        ids = text.held_out(num_tokens // args.length, device)
        case = measure_steps(name, args, chosen, lambda method: (run, models.over(method, model)), ids)
        case.train_steps, case.num_ids = args.train_steps, text.num_ids
        yield case


def _train(run: Run, text: Text, steps: int, device: torch.device) -> None:
    """Train in place. The learning rate rises over a tenth of the steps, then falls to 0."""
    way = models.over(models.ways()["cce-dist-default"], run.model)
    peak = TRAIN_RATE * min(1.0, 1024 / run.model.config.hidden_size)
    count = max(1, TRAIN_TOKENS // text.length)
    for index in range(steps):
        run.set_rate(peak * min((index + 1) / max(1, steps // 10), 1 - index / steps))
        if index % 10 == 0:
            show_progress(f"training, step {index} of {steps}")
        run.step(way, text.train(index * count, count, device))
    run.set_rate(0.0)


def _fsdp_cases(name: str, args: argparse.Namespace, chosen: dict[str, Method], device: torch.device) -> Iterator[Case]:
    """Measure a model at each number of tokens of a rank."""
    vocab_size, group = models.config_of(name)[1].vocab_size, _mesh(device.type).get_group()
    open_run = partial(_open_run, name, args.layers, getattr(torch, args.dtype), device)
    for num_tokens in args.tokens:
        draw = torch.Generator(device).manual_seed(dist.get_rank())
        ids = torch.randint(vocab_size, (num_tokens // args.length, args.length), generator=draw, device=device)
        yield measure_steps(name, args, chosen, open_run, ids, group)


def _open_run(
    name: str, num_layers: int | None, dtype: torch.dtype, device: torch.device, method: Method
) -> tuple[Run, nn.Module]:
    """Return a model that is split over all ranks, with its optimizer, and the module of a method over the model."""
    model = models.build(name, num_layers, torch.float32, device)
    module, mesh = models.around(method, model), _mesh(device.type)
    computed = None if dtype == torch.float32 else dtype
    policy = MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=torch.float32)
    head: Any = model.lm_head
    split = set(head.parameters()) if isinstance(head.weight, DTensor) else None
    for each in (*model.model.layers, module):
        fully_shard(each, mesh=mesh, mp_policy=policy, ignored_params=split)
    return at_rest(model), module


def _over_ranks(model: Any) -> nn.Module:
    return models.convert({"shard_over": _mesh(model.device.type)}, model)


@cache
def _mesh(device_type: str) -> DeviceMesh:
    return init_device_mesh(device_type, (dist.get_world_size(),))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script with these arguments (default: the process's own), and return its exit code."""
    return command.run(command.Table(complete, methods, cases), parser().parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
