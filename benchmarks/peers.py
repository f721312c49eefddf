"""The losses that this library is compared with: torch's, and other libraries'.

Most functions take this rank's shard and a case's hidden states, and return a loss function as ``methods`` describes it. A
library without a vocabulary-parallel mode ignores the shard, and its row needs the whole vocabulary.
"""

import contextlib
import importlib
import logging
import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from cce_dist import VocabShard
from workload import IGNORE_INDEX

LossFn = Callable[[Tensor, Tensor, Tensor], Tensor]  # hidden [N, D], weight [V_r, D], labels [N] -> mean loss, 0-d


def dense(hidden: Tensor, weight: Tensor, labels: Tensor, softcap: float | None = None) -> Tensor:
    """Compute the loss from all logits, as usual."""
    logits = F.linear(hidden, weight)
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    return F.cross_entropy(logits.float(), labels)


def mean_of_kept(losses: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of losses [N] over the labels that are not ignored."""
    kept = labels != IGNORE_INDEX
    return torch.where(kept, losses, 0.0).sum() / kept.sum()


def torch_linear_cross_entropy(shard: VocabShard, hidden: Tensor) -> LossFn:
    """Return ``F.linear_cross_entropy``."""
    if not hasattr(F, "linear_cross_entropy"):
        raise ImportError(f"torch {torch.__version__} has no torch.nn.functional.linear_cross_entropy")
    return F.linear_cross_entropy


def compiled(function: Callable[..., Any], options: dict[str, Any] | None = None) -> Callable[..., Any]:
    """Reset the compiler, because a second shape would get symbolic sizes and be slower, and compile."""
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, dynamic=False, options=options)


def torch_compile(shard: VocabShard, hidden: Tensor, softcap: float | None = None) -> LossFn:
    """Return the compiled dense loss. Over a group two all-reduces merge the compiled parts."""
    group = shard.group
    if group is None:
        return compiled(dense if softcap is None else partial(dense, softcap=softcap))

    def local(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(hidden, weight).float()
        column = labels - shard.start
        here = (column >= 0) & (column < weight.shape[0])
        target = logits.gather(1, column.clamp(0, weight.shape[0] - 1)[:, None]).squeeze(1)
        return logits.logsumexp(1), torch.where(here, target, 0.0)

    parts = compiled(local)

    def summed(d_hidden: Tensor) -> Tensor:
        d_hidden = d_hidden.contiguous()
        dist.all_reduce(d_hidden, group=group)
        return d_hidden

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        hidden = hidden.view_as(hidden)
        if hidden.requires_grad:
            hidden.register_hook(summed)
        losses = _Merged.apply(*parts(hidden, weight, labels), group)
        return mean_of_kept(cast(Tensor, losses), labels)

    return loss


def torch_auto_chunker(shard: VocabShard, hidden: Tensor) -> LossFn:
    """Return the dense loss compiled with Inductor's auto-chunker. It raises ``ImportError`` if nothing was chunked."""
    from torch._inductor import config, metrics

    if not hasattr(config, "auto_chunker"):
        raise ImportError(f"torch {torch.__version__} has no torch._inductor.config.auto_chunker")
    # The default threshold, 8, leaves the heads of most models whole. Code from the cache would not count as split.
    options = {"auto_chunker.enable": True, "auto_chunker.amplify_ratio_threshold": 0, "fx_graph_cache": False}
    function, before = compiled(dense, options), metrics.num_auto_chunking

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        value = function(hidden, weight, labels)
        if value.requires_grad and metrics.num_auto_chunking == before:
            raise ImportError(f"the auto-chunker of torch {torch.__version__} does not split this loss")
        return value

    return loss


class _Merged(torch.autograd.Function):
    """Compute losses from each shard's log-sum-exp and target logit, both [N] fp32."""

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


def megatron(shard: VocabShard, hidden: Tensor, fused: bool, sequence_parallel: bool) -> LossFn:
    """Return Megatron-core's column-parallel matmul followed by its cross-entropy."""
    parallel_state = megatron_state(shard)
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce

    group = shard.group
    # initialize_model_parallel() does the same, but wants every rank of the world.
    parallel_state._TENSOR_MODEL_PARALLEL_GROUP = group
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        logits = linear_with_grad_accumulation_and_async_allreduce(
            hidden,
            weight,
            None,
            gradient_accumulation_fusion=False,
            allreduce_dgrad=not sequence_parallel,
            sequence_parallel=sequence_parallel,
            tp_group=group,
        ).unsqueeze(1)
        if fused:
            losses = fused_vocab_parallel_cross_entropy(logits, labels[:, None], group)
        else:
            losses = vocab_parallel_cross_entropy(logits, labels[:, None])
        return mean_of_kept(losses.squeeze(1), labels)

    return loss


def megatron_state(shard: VocabShard) -> Any:
    """Return Megatron's ``parallel_state``. Silences its warnings, and refuses shards of unequal size."""
    # Megatron warns that Transformer Engine and Apex are not installed, and the like.
    warnings.filterwarnings("ignore", module="megatron")
    from megatron.core import parallel_state

    need_equal_shards(shard)
    return parallel_state


def need_equal_shards(shard: VocabShard) -> None:
    if shard.vocab_size % shard.group_size:
        raise ValueError(f"needs equal shards, which {shard.vocab_size} rows over {shard.group_size} ranks are not")


def deepspeed(shard: VocabShard, hidden: Tensor) -> LossFn:
    """Return DeepSpeed's loss of hidden states, which does not hold the logits."""
    quiet_deepspeed(hidden.device)
    from deepspeed.sequence.linear_cross_entropy import vocab_parallel_linear_cross_entropy

    return partial(
        vocab_parallel_linear_cross_entropy,
        tp_group=shard.group,
        vocab_start_index=shard.start,
        vocab_end_index=shard.stop,
        ignore_index=IGNORE_INDEX,
    )


def deepspeed_loss(shard: VocabShard, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """Return DeepSpeed's loss of a rank's logits [N, V_r] and labels [N]."""
    quiet_deepspeed(device)
    from deepspeed.sequence.cross_entropy import vocab_parallel_cross_entropy

    return partial(
        vocab_parallel_cross_entropy,
        tp_group=shard.group,
        vocab_start_index=shard.start,
        vocab_end_index=shard.stop,
        global_vocab_size=shard.vocab_size,
        ignore_index=IGNORE_INDEX,
    )


def quiet_deepspeed(device: torch.device) -> None:
    """Start DeepSpeed on the present process group, and silence all but its errors."""
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    # DeepSpeed would compile a collective of its own at start, on CPUs.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # pyright: ignore[reportAttributeAccessIssue]
    deepspeed.init_distributed(dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


def cut_cross_entropy(shard: VocabShard, hidden: Tensor, impl: str) -> LossFn:
    import cut_cross_entropy as library  # pyright: ignore[reportMissingImports]

    options: dict[str, Any] = {}
    if shard.group is not None:
        if not hasattr(library, "VocabParallelOptions"):
            raise ImportError("this release of cut-cross-entropy has no vocabulary-parallel mode")
        options["vocab_parallel_options"] = library.VocabParallelOptions(shard.start, shard.stop, shard.group)
    if impl in {member.name.lower() for member in library.LinearCrossEntropyImpl}:
        return partial(library.linear_cross_entropy, impl=impl, **options)
    raise ImportError(f"cut-cross-entropy {library.__version__} has no preset {impl}")


def liger_triton(shard: VocabShard, hidden: Tensor) -> LossFn:
    from liger_kernel.transformers import fused_linear_cross_entropy as library  # pyright: ignore[reportMissingImports]

    # Releases with several kernel languages use CuTe for the softmax if it is installed.
    with contextlib.suppress(ImportError):
        importlib.import_module("liger_kernel.backends").set_impl("nvidia-triton")
    loss = library.LigerFusedLinearCrossEntropyLoss()
    return lambda hidden, weight, labels: loss(weight, hidden, labels)


def liger_tensor_parallel(shard: VocabShard, hidden: Tensor) -> LossFn:
    """Return Liger's tensor-parallel loss, in chunks of 512 tokens: its native kernels would need NVLink multicast."""
    from liger_kernel.ops import fused_linear_scaled_cross_entropy as library  # pyright: ignore[reportMissingImports]

    apply = library.LigerFusedLinearScaledCrossEntropyTPFunction.apply
    return lambda hidden, weight, labels: mean_of_kept(apply(hidden, weight, labels, shard.group), labels)


def imported(module: str, function: str) -> Callable[[VocabShard, Tensor], LossFn]:
    """Return a library's function, which takes what a loss function takes."""
    return lambda shard, hidden: getattr(importlib.import_module(module), function)


def fla(shard: VocabShard, hidden: Tensor) -> LossFn:
    """Return flash-linear-attention's loss, in chunks of tokens. Over a group it merges the statistics of each chunk."""
    from fla.modules import FusedLinearCrossEntropyLoss  # pyright: ignore[reportMissingImports]

    options: dict[str, Any] = {}
    if shard.group is not None:
        need_equal_shards(shard)
        options["process_group"] = shard.group
    loss = FusedLinearCrossEntropyLoss(ignore_index=IGNORE_INDEX, **options)
    return lambda hidden, weight, labels: loss(hidden, labels, weight)


def trl(shard: VocabShard, hidden: Tensor) -> LossFn:
    """Return the loss of TRL's fused head, which SFTTrainer uses. Ignored tokens are left out first, as there."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as chunk_size

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        kept = labels != IGNORE_INDEX
        tokens = hidden[kept], weight, None, labels[kept]
        log_probs, *_ = ChunkedLogProbFunction.apply(*tokens, 1.0, chunk_size, None, 1.0, ("log_probs",))
        return -log_probs.mean()

    return loss


def torchtune(shard: VocabShard, hidden: Tensor) -> LossFn:
    """Return torchtune's loss of 8 chunks of logits, compiled as by ``torchtune.training.compile_loss``."""
    from torchtune.modules.loss import CEWithChunkedOutputLoss  # pyright: ignore[reportMissingImports]

    chunked = CEWithChunkedOutputLoss(ignore_index=IGNORE_INDEX)
    chunked.compute_cross_entropy = compiled(chunked.compute_cross_entropy)

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        chunks = hidden[None].chunk(chunked.num_output_chunks, dim=1)
        return chunked([F.linear(chunk, weight) for chunk in chunks], labels[None])

    return loss


def mgmalek(shard: VocabShard, hidden: Tensor, num_chunks: int = 8) -> LossFn:
    """Return the loss of mgmalek's efficient_cross_entropy. It is no package: put a clone on PYTHONPATH."""
    from efficient_cross_entropy.modules import FusedCrossEntropyLossFunction  # pyright: ignore[reportMissingImports]

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return FusedCrossEntropyLossFunction.apply(hidden, weight, labels, num_chunks, IGNORE_INDEX, "mean")

    return loss
