"""``--engine megatron``: the same model from the same weights, made, wrapped, scheduled and optimized by megatron-core.

A GPTModel of Megatron's own layers, in DistributedDataParallel with the distributed optimizer, both overlapping their
communication; pipeline schedules over ``--pp`` stages. ``--loss dense`` is Megatron's unfused cross-entropy,
``megatron-fused`` its fused one, and the others this library's, by ``convert``. From megatron-core 0.13 on.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from cce_dist.integrations import megatron as cce
from cce_dist.tools.plan.cut import megatron_layout
from cce_dist.tools.pretrain import checkpoint
from cce_dist.tools.pretrain.build import build_whole
from cce_dist.tools.pretrain.data import IGNORED, Batches, num_valid
from cce_dist.tools.pretrain.engines import Engine, Step, set_learning_rate
from cce_dist.tools.pretrain.ranks import Ranks
from cce_dist.tools.pretrain.recipe import MEGATRON_FUSED, Recipe
from cce_dist.tools.pretrain.stages import layers_of_stages
from cce_dist.tools.ranks import join_alone


class MegatronEngine(Engine):
    """See ``Engine``."""

    def __init__(self, recipe: Recipe, ranks: Ranks) -> None:
        from megatron.core import distributed, optimizer, parallel_state
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
        from megatron.core.transformer.module import Float16Module

        layers = layers_of_stages(recipe)
        self.recipe, self.ranks = recipe, ranks
        self.layout = {"tp": ranks.tp, "dp": ranks.dp, "pp": ranks.pp, "layers of the stages": layers}
        join_alone(ranks.device)
        parallel_state.initialize_model_parallel(ranks.tp, ranks.pp, distributed_timeout_minutes=recipe.timeout / 60)  # pyright: ignore[reportArgumentType]
        if ranks.device.type == "cuda":
            model_parallel_cuda_manual_seed(recipe.seed)
        self.has_loss = parallel_state.is_pipeline_last_stage()

        self.model = _build(recipe, ranks, parallel_state.is_pipeline_first_stage(), self.has_loss)
        config = self.model.config
        module: Any = Float16Module(config, self.model) if config.bf16 else self.model
        ddp_config = distributed.DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
        )
        self.chunk: Any = distributed.DistributedDataParallel(config, ddp_config, module)
        optimizer_config = optimizer.OptimizerConfig(
            optimizer="adam",
            lr=recipe.lr,
            weight_decay=recipe.weight_decay,
            adam_beta1=0.9,
            adam_beta2=0.95,
            clip_grad=recipe.clip,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=True,
        )
        # Vectors do not decay: an argument says so from 0.16 on, and it is the default before.
        overrides = getattr(optimizer, "get_standard_config_overrides", None)
        said = {} if overrides is None else {"config_overrides": overrides(optimizer_config)}
        self.optimizer: Any = optimizer.get_megatron_optimizer(optimizer_config, [self.chunk], **said)
        for group in self.optimizer.param_groups:
            group["weight_decay"] = recipe.weight_decay * group["wd_mult"]
        config.no_sync_func = self.chunk.no_sync
        config.finalize_model_grads_func = distributed.finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss

    def step(self, step: int, ids: np.ndarray, labels: np.ndarray) -> Step:
        set_learning_rate(self.optimizer, self.recipe.learning_rate(step))
        self.chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self._run(ids, labels, forward_only=False) / num_valid(labels)
        _, grad_norm, _ = self.optimizer.step()
        return Step(loss, torch.as_tensor(grad_norm), None)  # convert() keeps no statistics

    def validate(self, held_out: Batches, num_batches: int | None = None) -> float:
        self.chunk.eval()
        batches = held_out.first(num_batches or self.recipe.eval_batches, self.recipe.batch_size)
        total = torch.zeros((), device=self.ranks.device)
        for ids, labels in batches:
            total += self._run(ids, labels, forward_only=True)
        self.chunk.train()
        return total.item() / num_valid(*(labels for _, labels in batches))

    def save_tensors(self, folder: Path) -> None:
        # The next forward would gather the weights that the last step has changed; they are needed now.
        self.chunk.disable_forward_pre_hook()
        checkpoint.write_tensors(folder, self._tensors())
        self.chunk.enable_forward_pre_hook()

    def load_tensors(self, folder: Path) -> None:
        # Torch's Adam has no state before its first step; one of length 0 makes it.
        set_learning_rate(self.optimizer, 0.0)
        self.chunk.zero_grad_buffer()
        self.optimizer.step()
        self.chunk.disable_forward_pre_hook()
        checkpoint.read_tensors(folder, self._tensors())
        self.chunk.enable_forward_pre_hook()

    def _tensors(self) -> dict[str, Any]:
        """Return this rank's tensors. Megatron's own checkpoint of its optimizer leaves torch's Adam without its steps."""
        tensors = {"model": {name: value for name, value in self.model.state_dict().items() if value is not None}}
        for part, optimizer in enumerate(self.optimizer.chained_optimizers):
            main = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for index, parameter in enumerate(main):
                state = {"main": parameter.data, **optimizer.optimizer.state[parameter]}
                tensors[f"optimizer.{part}.{index}"] = state
        return {f"rank-{self.ranks.rank}": tensors}

    def _run(self, ids: np.ndarray, labels: np.ndarray, forward_only: bool) -> Tensor:
        """Run Megatron's schedule over this rank's microbatches; return the summed loss of the whole batch, on every rank."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        accumulate = self.recipe.accumulate
        with torch.set_grad_enabled(not forward_only):
            losses = get_forward_backward_func()(
                forward_step_func=_forward_step,
                data_iterator=self.ranks.microbatches(ids, labels, accumulate),
                model=[self.chunk],
                num_microbatches=accumulate,
                seq_length=self.recipe.shape.seq_len,
                micro_batch_size=len(ids) // (self.ranks.dp * accumulate),
                forward_only=forward_only,
            )
        total = torch.zeros((), device=self.ranks.device)
        for report in losses:  # empty but on the last stage
            total += report["loss"]
        dist.all_reduce(total)
        return total / self.ranks.tp  # the ranks of a tensor-parallel group have the same


def _forward_step(data: Iterator[tuple[Tensor, Tensor]], model: Any) -> tuple[Tensor, Any]:
    ids, labels = (each.t().contiguous() for each in next(data))  # to [b, s]
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    losses = model(ids, positions, None, labels=labels)
    return losses, functools.partial(_sum_losses, labels != IGNORED)


def _sum_losses(mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return sum and count: Megatron divides their totals over the whole batch."""
    total = (losses * mask).sum()
    return total, mask.sum().int(), {"loss": total.detach()}


def _build(recipe: Recipe, ranks: Ranks, is_first: bool, is_last: bool) -> Any:
    """Return this stage on its device: Megatron's layers, our weights, and the loss that the recipe names."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    def leave_empty(weight: Tensor) -> None: ...

    shape, dtype = recipe.shape, getattr(torch, recipe.dtype)
    layers = layers_of_stages(recipe)
    num_layers = layers[parallel_state.get_pipeline_model_parallel_rank()] if layers else shape.num_layers // ranks.pp
    # An even cut needs no word, and older versions know none.
    cut: dict[str, Any] = {"pipeline_model_parallel_layout": megatron_layout(layers)} if layers else {}
    config = TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        ffn_hidden_size=shape.num_ffn,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=1e-5,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=ranks.tp,
        pipeline_model_parallel_size=ranks.pp,
        sequence_parallel=recipe.sequence_parallel and ranks.tp > 1,
        calculate_per_token_loss=True,
        use_cpu_initialization=True,
        init_method=leave_empty,
        output_layer_init_method=leave_empty,
        cross_entropy_loss_fusion=recipe.loss == MEGATRON_FUSED,
        # These kernels are those of Apex and Transformer Engine, which need not be installed.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        **cut,
    )
    layer: Any = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = _Norm
    layer.submodules.self_attention.submodules.core_attention = _Attention
    norm: Any = _Norm
    block: Any = TransformerBlockSubmodules([layer] * num_layers, layer_norm=norm)
    model = GPTModel(
        config,
        block,
        shape.vocab_size,
        shape.seq_len,
        pre_process=is_first,
        post_process=is_last,
        position_embedding_type="rope",
    )
    _load_weights(model, recipe, ranks)
    model.to(ranks.device)
    if recipe.loss not in ("dense", MEGATRON_FUSED):
        cce.convert(model, cce.Options(recipe.grad_filter))
    return model


class _Norm(nn.RMSNorm):
    """RMSNorm that says whether it sees slices of the sequence, over which Megatron then sums its gradient."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]


class _Attention(nn.Module):
    """Causal attention that does not hold its scores, as torch has it; Megatron's own needs another package for that."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        query, key, value = (each.permute(1, 2, 0, 3) for each in (query, key, value))  # from [s, b, heads, size]
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return attended.permute(2, 0, 1, 3).flatten(2)


@torch.no_grad()
def _load_weights(model: Any, recipe: Recipe, ranks: Ranks) -> None:
    """Give the stage its part of the weights with which ``--engine torch`` starts, whatever the number of ranks."""
    from megatron.core import parallel_state

    whole = build_whole(recipe)
    rank = parallel_state.get_tensor_model_parallel_rank()

    def part(weight: Tensor, dim: int = 0) -> Tensor:
        return weight.chunk(ranks.tp, dim)[rank]

    if model.pre_process:
        model.embedding.word_embeddings.weight.copy_(part(whole.embedding.weight))
    for layer in model.decoder.layers:
        ours: Any = whole.blocks[layer.layer_number - 1]
        layer.input_layernorm.weight.copy_(ours.attention_norm.weight)
        layer.self_attention.linear_qkv.weight.copy_(part(ours.attention.qkv.weight))
        layer.self_attention.linear_proj.weight.copy_(part(ours.attention.out.weight, 1))
        layer.pre_mlp_layernorm.weight.copy_(ours.mlp_norm.weight)
        gate_up = ours.mlp.gate_up.weight  # rows alternate; Megatron has a rank's gates first
        layer.mlp.linear_fc1.weight.copy_(torch.cat([part(gate_up[0::2]), part(gate_up[1::2])]))
        layer.mlp.linear_fc2.weight.copy_(part(ours.mlp.down.weight, 1))
    if model.post_process:
        head: Any = whole.head
        model.decoder.final_layernorm.weight.copy_(whole.norm.weight)
        model.output_layer.weight.copy_(part(head.weight))
