"""What is compared over a group: this library in its modes, dense torch, and the other vocabulary-parallel libraries.

A method is built once per case and then called as ``loss = method(hidden, weight, labels)`` on every rank: hidden [N, D] (with
sequence parallelism the rank's slice of it), weight the rank's rows, labels whole; a mean over the labels that are not -100.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from cce_dist import GradFilter, VocabShard, linear_cross_entropy
from cce_dist.bench.methods import LossFn
from cce_dist.bench.workload import IGNORE_INDEX


class GroupMethod(NamedTuple):
    """One row of the table.

    Attributes:
        build: Takes this rank's shard and the device and returns the loss function; ImportError where the library is missing.
        sequence_parallel: hidden is this rank's slice, and so is its gradient.
        ours: Whether it is this library.
        needs_cuda: Whether it runs on NVIDIA or AMD GPUs only.
        needs_group: Whether it is left out on one rank: it cannot, or the benchmark of one device has it.
    """

    build: Callable[[VocabShard, torch.device], LossFn]
    sequence_parallel: bool = False
    ours: bool = False
    needs_cuda: bool = False
    needs_group: bool = True


def group_methods() -> dict[str, GroupMethod]:
    """Every method by name, in the order of the table."""
    table = {}
    for sequence_parallel, suffix in ((False, ""), (True, "-sp")):
        ours: dict[str, dict[str, Any]] = {
            "cce-dist": {},
            "cce-dist-cached": {"workspace_bytes": 8 << 30},
            "cce-dist-filtered": {"grad_filter": GradFilter()},
        }
        for name, options in ours.items():
            build = partial(_ours, sequence_parallel=sequence_parallel, **options)
            # On one rank for the speed-up.
            table[name + suffix] = GroupMethod(build, sequence_parallel, ours=True, needs_group=sequence_parallel)
    table["cce-dist-fp32-sum"] = GroupMethod(partial(_ours, reduce_dtype=torch.float32), ours=True, needs_group=False)
    table["torch-compile"] = GroupMethod(_torch_compile)
    table["torch-loss-parallel"] = GroupMethod(_torch_loss_parallel)
    for sequence_parallel, suffix in ((False, ""), (True, "-sp")):
        for name, fused in (("megatron", False), ("megatron-fused", True)):
            build = partial(_megatron, fused=fused, sequence_parallel=sequence_parallel)
            # Megatron's linear layer puts its slice of dE on the current GPU, whatever the device.
            table[name + suffix] = GroupMethod(build, sequence_parallel, needs_cuda=sequence_parallel)
    table["deepspeed"] = GroupMethod(_deepspeed)
    for name, impl in (("cce", "cce"), ("cce-exact", "cce_exact"), ("cce-torch-compile", "torch_compile")):
        table[name] = GroupMethod(partial(_cut_cross_entropy, impl=impl), needs_cuda=True)
    return table


def _ours(shard: VocabShard, device: torch.device, **options: Any) -> LossFn:
    """Exact: on a GPU the kernels or an error, since a row says what it timed. Filtered: what a user gets for it."""
    backend = "auto" if "grad_filter" in options else "triton" if device.type == "cuda" else "torch"
    return cast(LossFn, partial(linear_cross_entropy, shard=shard, backend=backend, **options))


def _torch_compile(shard: VocabShard, device: torch.device) -> LossFn:
    """Dense and compiled, merged over the group; what one writes by hand, and cut-cross-entropy's mode of this name."""
    group = _group(shard)

    def local(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(hidden, weight).float()
        column = labels - shard.start
        here = (column >= 0) & (column < weight.shape[0])
        target = logits.gather(1, column.clamp(0, weight.shape[0] - 1)[:, None]).squeeze(1)
        return logits.logsumexp(1), torch.where(here, target, 0.0)

    torch.compiler.reset()  # forget the case before: a second shape would be compiled with symbolic sizes, and slower
    compiled = torch.compile(local, fullgraph=True, dynamic=False)

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        losses = _Merged.apply(*compiled(_Summed.apply(hidden, group), weight, labels), group)
        kept = labels != IGNORE_INDEX
        return torch.where(kept, cast(Tensor, losses), 0.0).sum() / kept.sum()

    return loss


class _Summed(torch.autograd.Function):
    """hidden as it is; its gradient summed over the group."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *d_hidden: Tensor) -> Any:
        summed = d_hidden[0].contiguous()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


class _Merged(torch.autograd.Function):
    """Losses from each shard's log-sum-exp and target logit, both [N] fp32."""

    @staticmethod
    def forward(ctx: Any, local_lse: Tensor, target: Tensor, group: Any) -> Tensor:
        top = local_lse.clone()
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        sums = torch.stack(((local_lse - top).exp(), target))
        dist.all_reduce(sums, group=group)
        lse = top + sums[0].log()
        ctx.save_for_backward(local_lse, lse)
        return lse - sums[1]

    @staticmethod
    def backward(ctx: Any, *d_losses: Tensor) -> Any:
        local_lse, lse = ctx.saved_tensors
        return (local_lse - lse).exp() * d_losses[0], -d_losses[0], None


def _torch_loss_parallel(shard: VocabShard, device: torch.device) -> LossFn:
    """Dense: logits as a DTensor split over the vocabulary, and torch's ``loss_parallel``."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import loss_parallel

    mesh = DeviceMesh.from_group(_group(shard), device.type)
    # Backward must run inside the context too; it changes nothing but the cross-entropy of a DTensor.
    ExitStack().enter_context(loss_parallel())

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        shape = torch.Size((shard.vocab_size, weight.shape[1]))
        rows = DTensor.from_local(weight, mesh, [Shard(0)], run_check=False, shape=shape, stride=weight.stride())
        whole, target = (DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in (hidden, labels))
        mean = F.cross_entropy(F.linear(whole, rows).float(), target, ignore_index=IGNORE_INDEX)
        return cast(DTensor, mean).to_local()

    return loss


def _megatron(shard: VocabShard, device: torch.device, fused: bool, sequence_parallel: bool) -> LossFn:
    """Megatron-core's column-parallel product, which hides the sum of dE behind dC, and its cross-entropy."""
    warnings.filterwarnings(
        "ignore", module="megatron"
    )  # that Transformer Engine and Apex are not installed, and the like
    from megatron.core import parallel_state  # pyright: ignore[reportMissingImports]
    from megatron.core.fusions.fused_cross_entropy import (  # pyright: ignore[reportMissingImports]
        fused_vocab_parallel_cross_entropy,
    )
    from megatron.core.tensor_parallel.cross_entropy import (  # pyright: ignore[reportMissingImports]
        vocab_parallel_cross_entropy,
    )
    from megatron.core.tensor_parallel.layers import (  # pyright: ignore[reportMissingImports]
        linear_with_grad_accumulation_and_async_allreduce,
    )

    group = _group(shard)
    if shard.vocab_size % shard.group_size:
        raise ValueError(f"needs equal shards, which {shard.vocab_size} rows over {shard.group_size} ranks are not")
    # What initialize_model_parallel() does, for this group alone: it would want every rank of the world.
    parallel_state._TENSOR_MODEL_PARALLEL_GROUP = group
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        logits = linear_with_grad_accumulation_and_async_allreduce(
            hidden, weight, None, gradient_accumulation_fusion=False, allreduce_dgrad=not sequence_parallel,
            sequence_parallel=sequence_parallel, tp_group=group,
        ).unsqueeze(1)  # fmt: skip
        if fused:
            losses = fused_vocab_parallel_cross_entropy(logits, labels[:, None], group)
        else:
            losses = vocab_parallel_cross_entropy(logits, labels[:, None])
        kept = labels != IGNORE_INDEX
        return torch.where(kept, losses.squeeze(1), 0.0).sum() / kept.sum()

    return loss


def _deepspeed(shard: VocabShard, device: torch.device) -> LossFn:
    from deepspeed import comm  # pyright: ignore[reportMissingImports]
    from deepspeed.sequence.linear_cross_entropy import (  # pyright: ignore[reportMissingImports]
        vocab_parallel_linear_cross_entropy,
    )

    if not comm.is_initialized():
        comm.init_distributed(dist.get_backend(shard.group), auto_mpi_discovery=False, verbose=False)
    return partial(
        vocab_parallel_linear_cross_entropy, tp_group=shard.group, vocab_start_index=shard.start, vocab_end_index=shard.stop,
        ignore_index=IGNORE_INDEX,
    )  # fmt: skip


def _cut_cross_entropy(shard: VocabShard, device: torch.device, impl: str) -> LossFn:
    import cut_cross_entropy  # pyright: ignore[reportMissingImports]

    if not hasattr(cut_cross_entropy, "VocabParallelOptions"):
        raise ImportError("this release of cut-cross-entropy has no vocabulary-parallel mode")
    options = cut_cross_entropy.VocabParallelOptions(shard.start, shard.stop, _group(shard))
    return partial(cut_cross_entropy.linear_cross_entropy, impl=impl, vocab_parallel_options=options)


def _group(shard: VocabShard) -> Any:
    if shard.group is None:
        raise ImportError("needs a group")
    return shard.group
