"""Tables of whole steps of data-parallel ranks under FSDP2: ``bench --models NAME --fsdp``.

Each method has a model of its own, because ``fully_shard`` splits a model in place. All models have the same drawn weights, in
fp32. They compute in ``--dtype`` and sum gradients over ranks in fp32. Each layer is a unit of FSDP2, and the rest is one unit.
Every rank draws random ids, because nothing that is measured depends on the softmax.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from cce_dist.tools.bench import models, steps
from cce_dist.tools.bench.methods import Method
from cce_dist.tools.bench.records import Case, Cases
from cce_dist.tools.ranks import in_torchrun

BY_NAME = ("cce-dist-cached", "stock", "liger", "cce")


def complete(args: argparse.Namespace) -> int:
    """Check the options, fill in their defaults, and return the number of ranks."""
    args.tokens = args.tokens or [8192]
    steps.complete(args)
    if args.compile not in ("no", "layers"):
        # FSDP2 wraps layers, so it cannot go into a model that is compiled as a whole.
        raise SystemExit("cce-dist bench: --fsdp takes --compile no or layers")
    there = int(os.environ["WORLD_SIZE"]) if in_torchrun() else args.fsdp or torch.cuda.device_count()
    if there < 2 or args.fsdp not in (0, there):
        raise SystemExit(f"cce-dist bench: --fsdp {args.fsdp or ''} takes all ranks, two or more; here are {there}")
    return there


def methods(args: argparse.Namespace) -> dict[str, Method]:
    """Return the rows: the default first, which the others are compared with, then ``shard_over``."""
    part = "" if args.compile == "no" else args.compile
    others, suffix = models.ways([part]), models.SUFFIXES[part]
    first, peer, *named = (f"{name}{suffix}" for name in ("cce-dist-default", "torch-compile", *BY_NAME))
    over = {f"cce-dist-shard-over{suffix}": Method(_over_ranks, ours=True, compiled=part)}
    rest = {name: others[name]._replace(by_name=True) for name in named}
    return {first: others[first], **over, peer: others[peer], **rest}


def cases(args: argparse.Namespace, chosen: dict[str, Method], device: torch.device) -> Cases:
    """Yield each model's name and its cases."""
    for name in args.models:
        yield name, _cases_of(name, args, chosen, device)


def _cases_of(name: str, args: argparse.Namespace, chosen: dict[str, Method], device: torch.device) -> Iterator[Case]:
    """Measure a model at each number of tokens of a rank."""
    vocab_size, group = models.config_of(name)[1].vocab_size, _mesh(device.type).get_group()
    open_run = partial(_open_run, name, args.layers, getattr(torch, args.dtype), device)
    for num_tokens in args.tokens:
        length = min(args.length, num_tokens)
        draw = torch.Generator(device).manual_seed(dist.get_rank())
        ids = torch.randint(vocab_size, (num_tokens // length, length), generator=draw, device=device)
        yield steps.measure_steps(name, args, chosen, open_run, ids, group)


def _open_run(
    name: str, num_layers: int | None, dtype: torch.dtype, device: torch.device, method: Method
) -> tuple[steps.Run, nn.Module]:
    """Return a model that is split over all ranks, with its optimizer, and the module of a method over the model."""
    model = models.build(name, num_layers, torch.float32, device)
    module, mesh = models.around(method, model), _mesh(device.type)
    computed = None if dtype == torch.float32 else dtype
    policy = MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=torch.float32)
    head: Any = model.lm_head
    split = set(head.parameters()) if isinstance(head.weight, DTensor) else None
    for each in (*model.model.layers, module):
        fully_shard(each, mesh=mesh, mp_policy=policy, ignored_params=split)
    return steps.at_rest(model), module


def _over_ranks(model: Any) -> nn.Module:
    return models.convert({"shard_over": _mesh(model.device.type)}, model)


@cache
def _mesh(device_type: str) -> DeviceMesh:
    return init_device_mesh(device_type, (dist.get_world_size(),))
