"""The end of a pipeline's last stage, with a framework's own loss or with ours: rows of ``heads.py --stage``.

Megatron's stage is a GPTModel without layers, DeepSpeed's is a PipelineModule whose only layer is the head. Each call gets the
benchmark's weight. All ranks are one tensor-parallel group. ``cce-dist-main-grad`` also adds dC to an fp32 buffer, which is
DDP's work in the other rows.
"""

import contextlib
import inspect
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cce_dist import VocabShard
from peers import deepspeed_loss, mean_of_kept, megatron_state

Loss = Callable[[Tensor, Tensor], Tensor]  # hidden [N, D], labels [N] -> mean loss, 0-d


class Stage:
    """A last stage, called like any loss function of the benchmark.

    With ``has_main_grad`` backward adds dC into ``main_grad``, [V_r, D] fp32, as Megatron's fused accumulation does.
    """

    def __init__(self, head: Any, loss: Loss, has_main_grad: bool = False) -> None:
        self.head, self.loss, self.has_main_grad = head, loss, has_main_grad
        # An engine may keep the parameter alive, so free its memory by hand.
        head.weight.data = head.weight.new_empty(0)
        # From here on the weight is a plain attribute, which each call sets.
        del head.weight

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        if self.has_main_grad and weight.requires_grad:
            if not hasattr(self, "main_grad"):
                self.main_grad = torch.zeros_like(weight, dtype=torch.float32, requires_grad=False)
            owner: Any = weight
            owner.main_grad, owner.grad_added_to_main_grad = self.main_grad, False
        self.head.weight = weight
        return self.loss(hidden, labels)


def megatron(
    shard: VocabShard,
    hidden: Tensor,
    *,
    sequence_parallel: bool,
    fused: bool = False,
    options: dict[str, Any] | None = None,
    main_grad: bool = False,
) -> Stage:
    """Return a stage with Megatron's own loss, fused or not; given ``options``, with ours by ``convert``."""
    parallel_state = megatron_state(shard)
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from cce_dist.integrations import megatron as cce

    if not hasattr(GPTModel, "_postprocess"):
        raise ImportError("needs megatron-core >= 0.13")
    size = shard.group_size
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(size, create_gloo_process_groups=False)

    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden.shape[1],
        num_attention_heads=size,
        tensor_model_parallel_size=size,
        sequence_parallel=sequence_parallel,
        cross_entropy_loss_fusion=fused,
        # The weight comes with each call; memory of the host that nothing writes to costs nothing.
        use_cpu_initialization=True,
        perform_initialization=False,
        # The fusion takes a kernel of Apex, which need not be there.
        gradient_accumulation_fusion=False,
    )
    no_layers: Any = TransformerBlockSubmodules([])
    model: Any = GPTModel(config, no_layers, shard.vocab_size, 1, pre_process=False, post_process=True)
    if options is not None:
        cce.convert(model, cce.Options(**options))
    model.output_layer.gradient_accumulation_fusion = main_grad
    parameters = inspect.signature(model._postprocess).parameters.values()
    unused = {parameter.name: None for parameter in parameters if parameter.default is parameter.empty}

    def loss(hidden: Tensor, labels: Tensor) -> Tensor:
        arguments = unused | {"hidden_states": hidden.unsqueeze(1), "labels": labels.unsqueeze(0)}
        return mean_of_kept(model._postprocess(**arguments).squeeze(0), labels)

    return Stage(model.output_layer, loss, main_grad)


def deepspeed(shard: VocabShard, hidden: Tensor, *, options: dict[str, Any] | None = None) -> Stage:
    """Return a stage with DeepSpeed's loss of all logits; given ``options``, with ours by ``convert``."""
    of_logits = deepspeed_loss(shard, hidden.device)
    import deepspeed as library
    from deepspeed.module_inject.layers import ColumnParallel
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    from cce_dist.integrations import deepspeed as cce

    topology = PipeModelDataParallelTopology(num_pp=1, num_mp=shard.group_size, num_dp=1)
    hidden_size, device = hidden.shape[1], hidden.device

    class VocabParallelLinear(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(ColumnParallel.apply(shard.group, input))

    loss_fn: Any = cce.loss_fn
    if options is not None:
        head = cce.CCEHeadSpec(hidden_size, shard.vocab_size, topology=topology, device=device)
    elif shard.group is None:
        head = nn.Linear(hidden_size, shard.vocab_size, bias=False, device=device)
    else:
        head = VocabParallelLinear(hidden_size, shard.num_rows, bias=False, device=device)
        loss_fn = of_logits
    # DeepSpeed prints its seeds and stages.
    with contextlib.redirect_stdout(io.StringIO()):
        module: Any = PipelineModule([head], topology=topology, loss_fn=loss_fn, partition_method="uniform")
        if options is not None:
            config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
            engine: Any = library.initialize(model=module, config=config)[0]
            engine._compute_loss = True  # as train_batch sets it
            cce.convert(engine, cce.Options(**options))
    return Stage(module.forward_funcs[-1], lambda hidden, labels: module.loss_fn(module(hidden), labels))
