"""Whole steps of data-parallel ranks under FSDP2: ``bench --models NAME --fsdp``.

Each way has a model of its own, because ``fully_shard`` splits a model in place. All are drawn alike, in fp32, compute in the
dtype that is asked for and sum gradients over ranks in fp32; each layer is a group of FSDP2's, and so is the rest. Every rank
has ids of its own. They are drawn, as nothing that is compared depends on what the softmax looks like.
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

from cce_dist import VocabShard
from cce_dist.bench import models, report, steps
from cce_dist.bench.cases import choose, on_ranks, show_progress
from cce_dist.bench.models import SUFFIXES, Way, build
from cce_dist.ranks import in_torchrun

BY_NAME = ("cce-dist-cached", "stock", "liger", "cce")


def ways(compiled: str) -> dict[str, Way]:
    """Every way by name: the default first, which others are compared with, then ``shard_over``.

    Raises:
        SystemExit: FSDP2 goes around layers that are compiled by themselves, not into a model that is compiled whole.
    """
    if compiled not in ("no", "layers"):
        raise SystemExit("cce-dist bench: --fsdp takes --compile no or layers")
    part = "" if compiled == "no" else compiled
    others, suffix = models.ways([part]), SUFFIXES[part]
    first, peer, *named = (f"{name}{suffix}" for name in ("cce-dist-default", "torch-compile", *BY_NAME))
    over = {f"cce-dist-shard-over{suffix}": Way(_over_ranks, ours=True, compiled=part)}
    rest = {name: others[name]._replace(by_name=True) for name in named}
    return {first: others[first], **over, peer: others[peer], **rest}


def run(args: argparse.Namespace) -> int:
    """Measure on the ranks of torchrun, or on ranks that are started here; the exit code."""
    there = int(os.environ["WORLD_SIZE"]) if in_torchrun() else args.fsdp or torch.cuda.device_count()
    if there < 2 or args.fsdp not in (0, there):
        raise SystemExit(f"cce-dist bench: --fsdp {args.fsdp or ''} takes all ranks, two or more; here are {there}")
    return on_ranks(_on_rank, args, there, "--fsdp")


def _on_rank(args: argparse.Namespace) -> int:
    return steps.run(args, choose(args.methods, ways(args.compile)), cases)


def cases(args: argparse.Namespace, name: str, chosen: dict[str, Way], device: torch.device) -> Iterator[report.Case]:
    """Measure a model at each number of tokens of a rank."""
    opened = partial(_opened, name, args.layers, getattr(torch, args.dtype), device)
    for num_tokens in args.tokens:
        told: steps.Progress = lambda line, head=f"{name}, N {num_tokens:,}: ": show_progress(head + line)  # noqa: E731
        length = min(args.length, num_tokens)
        torch.compiler.reset()  # a second shape would get symbolic sizes, and be slower
        told("the stock model, a sequence at a time")
        of_stock = opened(Way(lambda model: model))
        config = of_stock[0].model.config
        shard = VocabShard.even(config.vocab_size, _mesh(device.type).get_group())
        draw = torch.Generator(device).manual_seed(dist.get_rank())
        ids = torch.randint(config.vocab_size, (num_tokens // length, length), generator=draw, device=device)
        truth = steps.truth_of(*of_stock, ids)
        del of_stock
        steps.free_memory(ids)
        found = steps.measure(opened, truth, ids, chosen, args.repeats, told, shard)
        nan = float("nan")
        yield report.Case(
            name,
            num_tokens,
            config.hidden_size,
            config.vocab_size,
            0.0,
            args.dtype,
            ids.is_cuda,
            *(nan, nan, nan),  # nobody looks at the softmax
            found.rows,
            found.floor,
            num_ranks=shard.group_size,
            collectives=found.collectives,
            task="whole steps under FSDP2",
            num_layers=config.num_hidden_layers,
            length=length,
        )


def _opened(
    name: str, num_layers: int | None, dtype: torch.dtype, device: torch.device, way: Way
) -> tuple[steps.Run, nn.Module]:
    """Return a model that is split over all ranks, with its optimizer, and the module of a way over it."""
    model = build(name, num_layers, torch.float32, device)
    module, mesh = way.around(model), _mesh(device.type)
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
