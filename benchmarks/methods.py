"""The methods of the tables of heads: this library, plain torch, and other libraries, which are imported when they are built.

A method is built once per case and then called as ``loss = method(hidden, weight, labels)`` on every rank. Hidden is [N, D], or
the rank's slice of it with sequence parallelism; weight has the rank's rows; labels are whole. The result is the mean over the
labels that are not -100. Building raises ``ImportError`` if the library, or the needed part of it, is missing.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from torch import Tensor

import peers
import stage
from cce_dist import GradFilter, VocabShard, linear_cross_entropy
from loop import Method
from peers import LossFn

Build = Callable[..., LossFn]
CACHED = 1 << 60  # a budget that keeps all exponentials between forward and backward
UNNAMED_MIB = 256  # the budget of our rows whose name has none, except ``-default`` and ``-cached``


def methods_of(table: str = "", workspace_mib: Sequence[int] = (UNNAMED_MIB,)) -> dict[str, Method]:
    """Return every method by name. ``table`` is "" for losses, "megatron" or "deepspeed" for the ends of last stages."""
    tables = {"": _losses, "megatron": _megatron_stages, "deepspeed": _deepspeed_stages}
    return tables[table](workspace_mib)


def our_rows(
    build: Build, workspace_mib: Sequence[int], suffix: str = "", filtered: bool = True, **flags: Any
) -> dict[str, Method]:
    """Return this library's rows: one for each budget, the default budget, all exponentials kept, and filtered."""
    options: dict[str, dict[str, Any]] = {}
    for mib in workspace_mib:
        options[f"cce-dist{suffix}{_at(mib)}"] = {"workspace_bytes": mib << 20}
    options[f"cce-dist-default{suffix}"] = {}
    options[f"cce-dist-cached{suffix}"] = {"workspace_bytes": CACHED}
    if filtered:
        budget = {"workspace_bytes": workspace_mib[0] << 20}
        options[f"cce-dist-filtered{suffix}{_at(workspace_mib[0])}"] = budget | {"grad_filter": GradFilter(always=True)}
    return {name: Method(partial(_build_ours, build, each), ours=True, **flags) for name, each in options.items()}


def _at(mib: int) -> str:
    return "" if mib == UNNAMED_MIB else f"@{mib}MiB"


def _build_ours(build: Build, options: dict[str, Any], shard: VocabShard, hidden: Tensor) -> Any:
    """Build a row of this library. On a GPU an exact row in 16 bits is never plain torch, so it times the kernels."""
    options = dict(options)
    if "grad_filter" not in options:
        options["backend"] = "triton" if hidden.is_cuda and hidden.element_size() == 2 else "auto"
    if options.get("workspace_bytes") == CACHED:
        options["workspace_bytes"] = 2 * len(hidden) * shard.vocab_size * hidden.element_size() + (1 << 30)
    return build(shard, hidden, options=options)


def _our_loss(shard: VocabShard, hidden: Tensor, options: dict[str, Any], **more: Any) -> LossFn:
    return cast(LossFn, partial(linear_cross_entropy, shard=shard, **{**options, **more}))


def _losses(workspace_mib: Sequence[int]) -> dict[str, Method]:
    table = our_rows(_our_loss, workspace_mib)
    in_slices = partial(_our_loss, sequence_parallel=True)
    table |= our_rows(in_slices, workspace_mib, "-sp", sequence_parallel=True, needs_group=True)
    table["torch"] = Method(lambda *case: peers.dense, needs_whole=True)
    table["torch-compile"] = Method(peers.torch_compile)
    table["torch-compile-chunked"] = Method(peers.torch_auto_chunker, needs_whole=True)
    table["torch-lce"] = Method(peers.torch_linear_cross_entropy, needs_whole=True)
    for sequence_parallel in (False, True):
        table |= _megatrons(peers.megatron, sequence_parallel, needs_group=True)
    table["deepspeed"] = Method(peers.deepspeed, needs_group=True)
    for preset in ("cce", "cce-exact"):
        build = partial(peers.cut_cross_entropy, impl=preset.replace("-", "_"))
        table[preset] = Method(build, needs_cuda=True)
    table["liger"] = Method(peers.liger_triton, needs_cuda=True, needs_whole=True)
    table["liger-tp"] = Method(peers.liger_tensor_parallel, needs_cuda=True, needs_group=True)
    cute = "fused_linear_cross_entropy_sm90"
    liger_cute = peers.imported(f"liger_kernel.ops.cutedsl.ops.{cute}", f"liger_{cute}")
    table["liger-cute"] = Method(liger_cute, needs_cuda=True, needs_whole=True)
    quack = peers.imported("quack.linear_cross_entropy", "chunked_linear_cross_entropy")
    table["quack"] = Method(quack, needs_cuda=True, needs_whole=True)
    table["fla"] = Method(peers.fla, needs_cuda=True)
    table["trl"] = Method(peers.trl, needs_whole=True)
    table["torchtune"] = Method(peers.torchtune, needs_whole=True)
    table["mgmalek"] = Method(peers.mgmalek, needs_cuda=True, needs_whole=True)
    return table


def _megatrons(build: Build, sequence_parallel: bool, needs_group: bool) -> dict[str, Method]:
    """Return the rows of Megatron's own losses."""
    table = {}
    for name, fused in (("megatron", False), ("megatron-fused", True)):
        table[f"{name}{'-sp' * sequence_parallel}"] = Method(
            partial(build, fused=fused, sequence_parallel=sequence_parallel),
            sequence_parallel=sequence_parallel,
            # Megatron's linear layer puts its slice of dE on the current GPU, whatever the device.
            needs_cuda=sequence_parallel,
            needs_group=needs_group,
        )
    return table


def _megatron_stages(workspace_mib: Sequence[int]) -> dict[str, Method]:
    table, budget = {}, {"workspace_bytes": workspace_mib[0] << 20}
    for is_split in (False, True):
        flags, suffix = {"sequence_parallel": is_split, "needs_group": is_split}, "-sp" * is_split
        build = partial(stage.megatron, sequence_parallel=is_split)
        table |= _megatrons(stage.megatron, **flags)
        table |= our_rows(build, workspace_mib, suffix, **flags)
        adds = partial(_build_ours, partial(build, main_grad=True), budget)
        table[f"cce-dist-main-grad{suffix}{_at(workspace_mib[0])}"] = Method(adds, ours=True, **flags)
    return table


def _deepspeed_stages(workspace_mib: Sequence[int]) -> dict[str, Method]:
    table = {
        "deepspeed": Method(stage.deepspeed),
        # DeepSpeed's loss without logits. Nothing in DeepSpeed calls it, but a user can in the last layer.
        "deepspeed-linear": Method(peers.deepspeed),
    }
    return table | our_rows(stage.deepspeed, workspace_mib)
