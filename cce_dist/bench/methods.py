"""The methods that are compared: this library, plain torch, and others, each imported when asked for.

A method is built once per case and then called as ``loss = method(hidden, weight, labels)`` on every rank: hidden [N, D] (with
sequence parallelism the rank's slice of it), weight the rank's rows, labels whole. It returns the mean over the labels that are
not -100. Building raises ``ImportError`` where the library, or the part of it that is asked for, is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from cce_dist import GradFilter, VocabShard, linear_cross_entropy
from cce_dist.bench import peers, stage
from cce_dist.bench.peers import LossFn
from cce_dist.bench.workload import IGNORE_INDEX

Build = Callable[..., LossFn]


class Method(NamedTuple):
    """One row of a table."""

    build: Callable[..., Any]  # heads: this rank's shard, hidden states -> loss function; models: a model -> module
    ours: bool = False
    sequence_parallel: bool = False  # hidden is this rank's slice, and so is its gradient
    needs_cuda: bool = False
    needs_group: bool = False  # no row where the vocabulary is whole
    needs_whole: bool = False  # no row where the vocabulary is split
    by_name: bool = False  # a row only if --methods names it
    compiled: str = ""  # models: torch.compile around "layers", each by itself, or around "all"

    def is_for(self, num_ranks: int) -> bool:
        return not (self.needs_group if num_ranks == 1 else self.needs_whole)


UNNAMED_MIB = 256  # the budget of a row of ours whose name says none


def all_methods(table: str = "", workspace_mib: Sequence[int] = (UNNAMED_MIB,)) -> dict[str, Method]:
    """Every method by name; ``table`` is "megatron" or "deepspeed" for the rows of their last stages."""
    tables = {"": _losses, "megatron": _megatron_stages, "deepspeed": _deepspeed_stages}
    return tables[table](our_options(workspace_mib))


def our_options(workspace_mib: Sequence[int]) -> dict[str, dict[str, Any]]:
    """This library's rows in every table, with the options of each; a budget of None is one for all exponentials.

    A name without a budget has ``UNNAMED_MIB``; ``cce-dist-default`` has none.
    """
    first, *others = workspace_mib
    exact = {
        f"cce-dist@{mib}MiB" if others or mib != UNNAMED_MIB else "cce-dist": {"workspace_bytes": mib << 20}
        for mib in workspace_mib
    }
    at = "" if first == UNNAMED_MIB else f"@{first}MiB"
    return {
        **exact,
        "cce-dist-default": {},
        "cce-dist-cached": {"workspace_bytes": None},
        f"cce-dist-filtered{at}": {"grad_filter": GradFilter(always=True), "workspace_bytes": first << 20},
    }


def _beside(ours: dict[str, dict[str, Any]], suffix: str, **more: Any) -> dict[str, dict[str, Any]]:
    """A row of the first budget with other options; its name says the budget where that is not the unnamed one."""
    options = next(iter(ours.values()))
    mib = options["workspace_bytes"] >> 20
    name = "cce-dist" if mib == UNNAMED_MIB else f"cce-dist@{mib}MiB"
    return {_named(name, suffix): options | more}


def build_ours(build: Build, options: dict[str, Any], shard: VocabShard, hidden: Tensor, **more: Any) -> LossFn:
    """Build a row of this library. An exact row takes the kernels on a GPU, or is an error: a row says what it timed."""
    options = dict(options)
    if "grad_filter" not in options:
        options.setdefault("backend", "triton" if hidden.is_cuda else "torch")
    if options.get("workspace_bytes", 0) is None:
        # All of exp(logits) may stay between forward and backward.
        options["workspace_bytes"] = 2 * len(hidden) * shard.vocab_size * hidden.element_size() + (1 << 30)
    return build(shard, hidden, options=options, **more)


def _our_loss_of_each(shard: VocabShard, hidden: Tensor, options: dict[str, Any], failed: bool) -> LossFn:
    """The mean of losses of "none"; with ``failed`` forward expects other upstream gradients than come."""
    expected = torch.rand(len(hidden), device=hidden.device) if failed else True
    loss = partial(linear_cross_entropy, shard=shard, reduction="none", expected_weights=expected, **options)

    def mean(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return loss(hidden, weight, labels).sum() / (labels != IGNORE_INDEX).sum()

    return mean


def _our_loss(shard: VocabShard, hidden: Tensor, options: dict[str, Any]) -> LossFn:
    return cast(LossFn, partial(linear_cross_entropy, shard=shard, **options))


def _named(name: str, suffix: str) -> str:
    """The name with a suffix before its budget: ``cce-dist-sp@64MiB``."""
    base, at, budget = name.partition("@")
    return f"{base}{suffix}{at}{budget}"


def _losses(ours: dict[str, dict[str, Any]]) -> dict[str, Method]:
    table = {name: Method(partial(build_ours, _our_loss, options), ours=True) for name, options in ours.items()}
    for name, options in ours.items():
        build = partial(build_ours, _our_loss, options | {"sequence_parallel": True})
        table[_named(name, "-sp")] = Method(build, ours=True, sequence_parallel=True, needs_group=True)
    for name, options in _beside(ours, "-fp32-sum", reduce_dtype=torch.float32).items():
        table[name] = Method(partial(build_ours, _our_loss, options), ours=True, needs_group=True)
    for name, options in _beside(ours, "-torch", backend="torch").items():
        table[name] = Method(partial(build_ours, _our_loss, options), ours=True, needs_whole=True)

    for suffix in ("-each", "-each-failed"):
        for name, options in _beside(ours, suffix).items():
            build = partial(build_ours, _our_loss_of_each, options, failed=suffix == "-each-failed")
            table[name] = Method(build, ours=True, by_name=True)

    table["torch"] = Method(lambda *case: peers.dense, needs_whole=True)
    table["torch-compile"] = Method(peers.torch_compile)
    table["torch-lce"] = Method(peers.torch_linear_cross_entropy, needs_whole=True)
    for policy in ("auto", "compact", "balanced", "accurate"):
        build = partial(peers.torch_linear_cross_entropy, policy=policy)
        table[f"torch-lce-{'chunked' if policy == 'auto' else policy}"] = Method(build, needs_whole=True)
    table["torch-loss-parallel"] = Method(peers.torch_loss_parallel, needs_group=True)
    for sequence_parallel in (False, True):
        table |= _megatrons(peers.megatron, sequence_parallel, needs_group=True)
    table["deepspeed"] = Method(peers.deepspeed, needs_group=True)
    for preset in ("cce", "cce-exact", "cce-kahan-full-c"):
        build = partial(peers.cut_cross_entropy, impl=preset.replace("-", "_"))
        table[preset] = Method(build, needs_cuda=True)
    table["liger"] = Method(peers.liger_triton, needs_cuda=True, needs_whole=True)
    table["liger-cute"] = Method(peers.liger_cute, needs_cuda=True, needs_whole=True)
    table["quack"] = Method(peers.quack, needs_cuda=True, needs_whole=True)
    return table


def _megatrons(build: Build, sequence_parallel: bool, needs_group: bool) -> dict[str, Method]:
    """Megatron's own losses."""
    table = {}
    for name, fused in (("megatron", False), ("megatron-fused", True)):
        table[_named(name, "-sp" * sequence_parallel)] = Method(
            partial(build, fused=fused, sequence_parallel=sequence_parallel),
            sequence_parallel=sequence_parallel,
            # Megatron's linear layer puts its slice of dE on the current GPU, whatever the device.
            needs_cuda=sequence_parallel,
            needs_group=needs_group,
        )
    return table


def _megatron_stages(ours: dict[str, dict[str, Any]]) -> dict[str, Method]:
    table = {}
    for sequence_parallel in (False, True):
        table |= _megatrons(stage.megatron, sequence_parallel, needs_group=sequence_parallel)
        for name, options in (ours | _beside(ours, "-main-grad")).items():
            main_grad = "-main-grad" in name
            build = partial(stage.megatron, sequence_parallel=sequence_parallel, main_grad=main_grad)
            table[_named(name, "-sp" * sequence_parallel)] = Method(
                partial(build_ours, build, options), True, sequence_parallel, needs_group=sequence_parallel
            )
    return table


def _deepspeed_stages(ours: dict[str, dict[str, Any]]) -> dict[str, Method]:
    table = {
        "deepspeed": Method(stage.deepspeed),
        "deepspeed-liger": Method(partial(stage.deepspeed, backend="liger"), needs_cuda=True, needs_group=True),
        # DeepSpeed's loss without logits, which nothing in DeepSpeed calls: what a user can write into the last layer.
        "deepspeed-linear": Method(peers.deepspeed),
    }
    for name, options in ours.items():
        table[name] = Method(partial(build_ours, stage.deepspeed, options), ours=True)
    return table
