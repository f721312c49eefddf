"""What a pipeline's last stage does after its last layer, by a framework's own means and by ours: rows of ``bench --stage``.

For Megatron that is a GPTModel without layers, asked for its loss as its ``forward`` asks once they have run; for DeepSpeed a
PipelineModule whose only layer is the head, and its ``loss_fn``. Both are used as they are but for one thing: the weight is
the benchmark's, put in its place before each call, so that checks, times and memory are those of every other row. All
ranks are one tensor-parallel group. ``cce-dist-main-grad`` also adds dC into an fp32 buffer, which the others leave to DDP.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cce_dist import GradFilter, VocabShard
from cce_dist.bench.peers import GroupMethod
from cce_dist.bench.peers import _deepspeed as deepspeed_linear_cross_entropy
from cce_dist.bench.workload import IGNORE_INDEX
from cce_dist.pretrain.ranks import start_deepspeed

OURS: dict[str, dict[str, Any]] = {  # by row what their Options are given, of either framework
    "cce-dist": {},
    "cce-dist-cached": {"workspace_bytes": 8 << 30},  # all of exp(logits) may stay between forward and backward
    "cce-dist-filtered": {"grad_filter": GradFilter()},
}

Loss = Callable[[Tensor, Tensor], Tensor]  # hidden [N, D], labels [N] -> mean loss, 0-d


def stage_methods(framework: str) -> dict[str, GroupMethod]:
    """Every row of one framework's table, by name and in order; "-sp" is with sequence parallelism."""
    return _megatron_methods() if framework == "megatron" else _deepspeed_methods()


class Stage:
    """A last stage as a loss function of the benchmark. Built at its first call, when the hidden size is known.

    Args:
        build: Takes the hidden size, and returns the module that owns the head's weight and the loss.
        fused: Backward adds the weight's gradient into ``main_grad``, as Megatron's fused accumulation does.

    Attributes:
        main_grad: [V_r, D] fp32 sum of the weight's gradients, instead of those that are returned; only if ``fused``.
    """

    main_grad: Tensor

    def __init__(self, build: Callable[[int], tuple[nn.Module, Loss]], fused: bool = False) -> None:
        self.build, self.fused = build, fused
        self.head: Any = None

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        if self.head is None:
            self.head, self.loss = self.build(hidden.shape[1])
            self.head.weight.data = self.head.weight.new_empty(0)  # an engine may remember the parameter
            del self.head.weight  # from here on an attribute like any other
        if self.fused and weight.requires_grad:
            if not hasattr(self, "main_grad"):
                self.main_grad = torch.zeros_like(weight, dtype=torch.float32, requires_grad=False)
            owner: Any = weight
            owner.main_grad, owner.grad_added_to_main_grad = self.main_grad, False
        self.head.weight = weight
        return self.loss(hidden, labels)


def _megatron_methods() -> dict[str, GroupMethod]:
    table = {}
    for sequence_parallel, suffix in ((False, ""), (True, "-sp")):
        for name, fused in (("megatron", False), ("megatron-fused", True)):
            build = partial(_megatron, sequence_parallel=sequence_parallel, fused_loss=fused)
            # Megatron's linear layer puts its slice of dE on the current GPU, whatever the device.
            table[name + suffix] = GroupMethod(
                build, sequence_parallel, needs_cuda=sequence_parallel, needs_group=sequence_parallel
            )
        for name, options in (OURS | {"cce-dist-main-grad": {}}).items():
            build = partial(
                _megatron, sequence_parallel=sequence_parallel, options=options, fused_grad=name.endswith("main-grad")
            )
            table[name + suffix] = GroupMethod(build, sequence_parallel, ours=True, needs_group=sequence_parallel)
    return table


def _deepspeed_methods() -> dict[str, GroupMethod]:
    table = {
        "deepspeed": GroupMethod(_deepspeed, needs_group=False),
        "deepspeed-liger": GroupMethod(partial(_deepspeed, backend="liger"), needs_cuda=True),
        "deepspeed-linear": GroupMethod(_deepspeed_linear, needs_group=False),
    }
    for name, options in OURS.items():
        table[name] = GroupMethod(partial(_deepspeed, options=options), ours=True, needs_group=False)
    return table


def _megatron(
    shard: VocabShard,
    device: torch.device,
    *,
    sequence_parallel: bool,
    fused_loss: bool = False,
    options: dict[str, Any] | None = None,
    fused_grad: bool = False,
) -> Stage:
    """Megatron's own loss, fused or not, or with options ours by ``convert``."""
    warnings.filterwarnings("ignore", module="megatron")  # that Transformer Engine and Apex are not installed, and such
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from cce_dist.integrations import megatron as cce

    if not hasattr(GPTModel, "_postprocess"):
        raise ImportError("needs megatron-core >= 0.13")
    size = shard.group_size
    if shard.vocab_size % size:
        raise ValueError(f"needs equal shards, which {shard.vocab_size} rows over {size} ranks are not")
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(size, create_gloo_process_groups=False)

    def build(hidden_size: int) -> tuple[nn.Module, Loss]:
        config = TransformerConfig(
            num_layers=1, hidden_size=hidden_size, num_attention_heads=size, tensor_model_parallel_size=size,
            sequence_parallel=sequence_parallel, cross_entropy_loss_fusion=fused_loss,
            # The weight comes with each call; memory of the host that nothing writes to costs nothing.
            use_cpu_initialization=True, perform_initialization=False,
            # A kernel of Apex, which need not be there.
            gradient_accumulation_fusion=False,
        )  # fmt: skip
        no_layers: Any = TransformerBlockSubmodules([])
        model: Any = GPTModel(config, no_layers, shard.vocab_size, 1, pre_process=False, post_process=True)
        if options is not None:
            cce.convert(model, cce.Options(**_with_backend(options, device)))
        model.output_layer.gradient_accumulation_fusion = fused_grad
        parameters = inspect.signature(model._postprocess).parameters.values()
        unused = {parameter.name: None for parameter in parameters if parameter.default is parameter.empty}

        def loss(hidden: Tensor, labels: Tensor) -> Tensor:
            arguments = unused | {"hidden_states": hidden.unsqueeze(1), "labels": labels.unsqueeze(0)}
            losses = model._postprocess(**arguments).squeeze(0)
            kept = labels != IGNORE_INDEX
            return torch.where(kept, losses, 0.0).sum() / kept.sum()

        return model.output_layer, loss

    return Stage(build, fused_grad)


def _deepspeed(
    shard: VocabShard, device: torch.device, *, options: dict[str, Any] | None = None, backend: str = "torch"
) -> Stage:
    """All logits and their cross-entropy, DeepSpeed's own if the vocabulary is split; or with options ours by ``convert``."""
    _start_deepspeed(device)
    import deepspeed
    from deepspeed.module_inject.layers import ColumnParallel
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
    from deepspeed.sequence.cross_entropy import vocab_parallel_cross_entropy

    from cce_dist.integrations import deepspeed as cce

    topology = PipeModelDataParallelTopology(num_pp=1, num_mp=shard.group_size, num_dp=1)

    def vocab_parallel_loss(logits: Tensor, labels: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(
            logits, labels, tp_group=shard.group, vocab_start_index=shard.start, vocab_end_index=shard.stop,
            global_vocab_size=shard.vocab_size, ignore_index=IGNORE_INDEX, backend=backend,
        )  # fmt: skip

    class VocabParallelLinear(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(ColumnParallel.apply(shard.group, input))

    def build(hidden_size: int) -> tuple[nn.Module, Loss]:
        loss_fn: Any = cce.loss_fn
        if options is not None:
            head = cce.CCEHeadSpec(hidden_size, shard.vocab_size, topology=topology, device=device)
        elif shard.group is None:
            head = nn.Linear(hidden_size, shard.vocab_size, bias=False, device=device)
        else:
            head = VocabParallelLinear(hidden_size, shard.num_rows, bias=False, device=device)
            loss_fn = vocab_parallel_loss
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its seeds and stages
            module: Any = PipelineModule([head], topology=topology, loss_fn=loss_fn, partition_method="uniform")
            if options is not None:
                config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
                engine: Any = deepspeed.initialize(model=module, config=config)[0]
                engine._compute_loss = True  # as train_batch says it
                cce.convert(engine, cce.Options(**_with_backend(options, device)))

        def loss(hidden: Tensor, labels: Tensor) -> Tensor:
            return module.loss_fn(module(hidden), labels)

        return module.forward_funcs[-1], loss

    return Stage(build)


def _deepspeed_linear(shard: VocabShard, device: torch.device) -> Any:
    """DeepSpeed's loss without logits, which nothing in DeepSpeed calls: what a user can write into the last layer."""
    _start_deepspeed(device)
    return deepspeed_linear_cross_entropy(shard, device)


def _start_deepspeed(device: torch.device) -> None:
    """Start it, and have it say only what went wrong."""
    start_deepspeed(device)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


def _with_backend(options: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Exact: on a GPU the kernels or an error, since a row says what it timed. Filtered: what a user gets for it."""
    backend = "auto" if "grad_filter" in options else "triton" if device.type == "cuda" else "torch"
    return {"backend": backend, **options}
