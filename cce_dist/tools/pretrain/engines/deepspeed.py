"""``--engine deepspeed``: the same model from the same weights, wrapped, scheduled and optimized by DeepSpeed.

``--zero-stage 1`` trains a PipelineModule over ``--pp`` stages: our blocks, split over ``--tp`` ranks of its model axis, and a
``CCEHead`` as its last layer. 2 and 3 train a plain model that computes its loss in forward. ``--loss dense`` is the loss of
DeepSpeed's users, with all logits; the others are this library's, by the section "cce_dist" of ds_config. From deepspeed
0.19.8 on.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from cce_dist.integrations import deepspeed as cce
from cce_dist.merge import sum_over_ranks
from cce_dist.tools.plan.cut import deepspeed_weights
from cce_dist.tools.pretrain import durable
from cce_dist.tools.pretrain.build import build_whole, make_optimizer
from cce_dist.tools.pretrain.data import IGNORED, Batches, num_valid
from cce_dist.tools.pretrain.engines import Engine, Step, set_learning_rate
from cce_dist.tools.pretrain.model import GPT, Block
from cce_dist.tools.pretrain.ranks import Ranks, start_deepspeed
from cce_dist.tools.pretrain.recipe import Recipe, Shape
from cce_dist.tools.pretrain.stages import layers_of_stages
from cce_dist.tools.ranks import join_alone

TAG = "deepspeed"  # the name of its checkpoint in a folder


class DeepSpeedEngine(Engine):
    """See ``Engine``."""

    def __init__(self, recipe: Recipe, ranks: Ranks) -> None:
        join_alone(ranks.device)
        start_deepspeed(ranks.device)
        self.recipe, self.ranks = recipe, ranks
        self.layout = {"tp": ranks.tp, "dp": ranks.dp, "pp": ranks.pp, "zero_stage": recipe.zero_stage}
        self.layout |= {"layers of the stages": layers_of_stages(recipe)}
        self.in_stages = recipe.zero_stage == 1
        whole = build_whole(recipe)
        model: Any = _pipeline(whole, recipe, ranks) if self.in_stages else _Model(whole, recipe.shape)
        angles = {name: buffer.clone() for name, buffer in model.named_buffers()}
        self.optimizer = make_optimizer(model, recipe)
        self.engine: Any = cce.initialize(model=model, optimizer=self.optimizer, config=ds_config(recipe, ranks))[0]
        self.has_loss = not self.in_stages or self.engine.is_last_stage()
        for name, buffer in self.engine.module.named_buffers():
            buffer.data = angles[name].to(ranks.device)  # angles stay fp32 in a model of bf16
        if recipe.loss != "dense":
            cce.require(self.engine)

    def step(self, step: int, ids: np.ndarray, labels: np.ndarray) -> Step:
        set_learning_rate(self.optimizer, self.recipe.learning_rate(step))
        data = self._microbatches(ids, labels, num_valid(labels))
        if self.in_stages:
            loss = self.engine.train_batch(data)
        else:
            self.engine.train()
            loss = torch.zeros((), device=self.ranks.device)
            for part_ids, (part_labels, scale) in data:
                part = self.engine(part_ids, labels=part_labels, scale=scale)
                self.engine.backward(part)
                self.engine.step()
                loss += part.detach()
            loss = self._mean(loss)
        return Step(loss, torch.as_tensor(self.engine.get_global_grad_norm()))

    def validate(self, held_out: Batches, num_batches: int | None = None) -> float:
        batches = held_out.first(num_batches or self.recipe.eval_batches, self.recipe.batch_size)
        num_tokens = num_valid(*(labels for _, labels in batches))
        total = torch.zeros((), device=self.ranks.device)
        self.engine.eval()
        for ids, labels in batches:
            data = self._microbatches(ids, labels, num_tokens)
            if self.in_stages:
                total += self.engine.eval_batch(data).squeeze()
                continue
            with torch.no_grad():
                losses = [self.engine(part, labels=those, scale=scale) for part, (those, scale) in data]
            total += self._mean(sum(losses, torch.zeros_like(total)))
        return total.item()

    def save_tensors(self, folder: Path) -> None:
        with _failing_late(self.engine.checkpoint_engine) as failures:
            self.engine.save_checkpoint(str(folder), tag=TAG, client_state=self._client_state(), save_latest=False)
        if self.ranks.rank == 0 and not failures:
            durable.write(folder / "latest", TAG)
        if failures:
            raise OSError(str(failures[0])) from failures[0]

    def load_tensors(self, folder: Path) -> None:
        self.engine.load_checkpoint(str(folder), tag=TAG)

    def _microbatches(self, ids: np.ndarray, labels: np.ndarray, num_tokens: int) -> Iterator[tuple[Tensor, Any]]:
        """Yield what a step of DeepSpeed reads: ids, and labels with what their summed loss is multiplied by.

        DeepSpeed takes the mean over microbatches and ranks; the scale makes it the mean over all tokens.
        """
        scale = torch.tensor(self.ranks.dp * self.recipe.accumulate / num_tokens, device=self.ranks.device)
        for part_ids, part_labels in self.ranks.microbatches(ids, labels, self.recipe.accumulate):
            yield part_ids, (part_labels, scale)

    def _client_state(self) -> dict[str, Any]:
        """Return what ``ds_to_universal``, DeepSpeed's converter of checkpoints to other layouts, asks of a model's author."""
        from deepspeed.checkpoint import constants as say

        info: dict[str, Any] = {say.UNIVERSAL_CHECKPOINT_VERSION_KEY: say.UNIVERSAL_CHECKPOINT_VERSION_VALUE}
        if self.in_stages:
            norm = self.recipe.shape.num_layers + 1  # layers are named by their places
            info[say.TP_REPLICATED_PARAMETER_PATTERNS] = [r".*_norm\.weight", rf"{norm}\.weight"]
            info[say.VOCABULARY_PARAMETER_PATTERNS] = [r"0\.weight", rf"{norm + 1}\.weight"]
            info[say.PARAMETER_WITH_ROW_PARALLELISM_PATTERNS] = [r".*attention\.out\.weight", r".*mlp\.down\.weight"]
            info[say.ORIGINAL_VOCAB_SIZE] = self.recipe.shape.vocab_size
        return {say.UNIVERSAL_CHECKPOINT_INFO: info}

    def _mean(self, loss: Tensor) -> Tensor:
        dist.all_reduce(loss)
        return loss / (self.ranks.dp * self.recipe.accumulate)


@contextlib.contextmanager
def _failing_late(writer: Any) -> Iterator[list[Exception]]:
    """Have DeepSpeed's writer note its failures in place of raising them: the other ranks wait in a barrier behind it."""
    failures: list[Exception] = []

    def noting(act: Callable[..., Any]) -> Callable[..., Any]:
        def try_to(*args: Any, **kwargs: Any) -> Any:
            try:
                return act(*args, **kwargs)
            except (OSError, RuntimeError) as error:  # torch's writer has no error of its own
                failures.append(error)

        return try_to

    names = ("save", "makedirs")
    for name in names:
        setattr(writer, name, noting(getattr(writer, name)))
    try:
        yield failures
    finally:
        for name in names:
            delattr(writer, name)


def ds_config(recipe: Recipe, ranks: Ranks) -> dict[str, Any]:
    """Return what a user of DeepSpeed writes into ds_config.json."""
    grad_filter = recipe.grad_filter
    section: dict[str, Any] = {"enabled": recipe.loss != "dense"}
    if grad_filter is not None:
        section["filter"] = "compensated" if grad_filter.compensate else "plain"
        section |= {f"filter_{name}": getattr(grad_filter, name) for name in ("eps", "hidden", "weight", "always")}
        section["report"] = True
    return {
        "train_micro_batch_size_per_gpu": recipe.batch_size // (ranks.dp * recipe.accumulate),
        "gradient_accumulation_steps": recipe.accumulate,
        "gradient_clipping": recipe.clip,
        "zero_optimization": {"stage": recipe.zero_stage},
        "bf16": {"enabled": recipe.dtype == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": 10**9,
        cce.SECTION: section,
    }


class _Model(nn.Module):
    """A language model as DeepSpeed's users write them."""

    trunk: GPT

    def __init__(self, whole: GPT, shape: Shape) -> None:
        super().__init__()
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False, device="meta")
        head: Any = whole.head
        self.lm_head.weight = nn.Parameter(head.weight.detach())
        whole.head = nn.Identity()
        self.trunk = whole

    def forward(self, ids: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
        return _loss(self.lm_head(self.trunk.hidden_states(ids)), (labels, scale))


def _loss(logits: Any, labels: tuple[Tensor, Tensor]) -> Tensor:
    """Return the sum over tokens, times a scale: of logits, or of deferred ones."""
    ids, scale = labels
    return F.cross_entropy(logits.flatten(0, -2).float(), ids.flatten(), ignore_index=IGNORED, reduction="sum") * scale


def _pipeline(whole: GPT, recipe: Recipe, ranks: Ranks) -> Any:
    """Return this rank's part of a PipelineModule, with weights."""
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    sizes = recipe.shape.hidden_size, recipe.shape.vocab_size
    topology = PipeModelDataParallelTopology(num_pp=ranks.pp, num_mp=ranks.tp, num_dp=ranks.dp)
    layers = [
        cce.CCEEmbedding(*sizes, tp_rank=ranks.rank % ranks.tp, tp_size=ranks.tp),
        *whole.blocks,
        whole.norm,
        cce.CCEHeadSpec(*sizes, topology=topology),
    ]
    cut = layers_of_stages(recipe)
    with contextlib.nullcontext() if cut is None else cce.layer_weights(deepspeed_weights(cut, before=1, after=2)):
        method = "type:Block" if cut is None else "parameters"
        module: Any = PipelineModule(layers, topology=topology, partition_method=method, loss_fn=_loss)
    group = module.mpu().get_slice_parallel_group()
    for layer in module.forward_funcs:
        if isinstance(layer, Block) and ranks.tp > 1:
            _split(layer, group)
        elif isinstance(layer, (cce.CCEEmbedding, cce.CCEHead)):
            weight: Any = (whole.embedding if isinstance(layer, cce.CCEEmbedding) else whole.head).weight
            with torch.no_grad():
                layer.weight.copy_(weight[layer.rows.start : layer.rows.stop])
            if recipe.loss == "dense" and ranks.tp > 1:
                layer.rows.join(group)
                if isinstance(layer, cce.CCEHead):
                    layer.register_forward_pre_hook(_summing_gradients(group))
                    module.loss_fn = _vocab_parallel_loss(layer)
    return module


def _vocab_parallel_loss(head: cce.CCEHead) -> Callable[[Tensor, tuple[Tensor, Tensor]], Tensor]:
    """Return DeepSpeed's own loss of this rank's logits."""
    from deepspeed.sequence.cross_entropy import vocab_parallel_cross_entropy

    rows = head.rows
    loss = functools.partial(
        vocab_parallel_cross_entropy,
        tp_group=rows.group,
        vocab_start_index=rows.start,
        vocab_end_index=rows.stop,
        global_vocab_size=rows.vocab_size,
        ignore_index=IGNORED,
        reduction="sum",
    )
    return lambda logits, labels: labels[1] * loss(logits, labels[0])


def _split(block: Block, group: dist.ProcessGroup) -> None:
    """Keep this rank's heads and inner width in a block: rows of the first matrices, columns of the second."""
    attention, mlp = block.attention, block.mlp
    for matrix, dim in ((attention.qkv, 0), (attention.out, 1), (mlp.gate_up, 0), (mlp.down, 1)):
        matrix.weight.data = matrix.weight.data.chunk(group.size(), dim)[group.rank()].clone()
        matrix.weight.tensor_model_parallel = True  # pyright: ignore[reportAttributeAccessIssue]

    for part in (attention, mlp):
        part.register_forward_pre_hook(_summing_gradients(group))
        part.register_forward_hook(lambda module, inputs, output: cce.sum_over_shards(output, group))  # pyright: ignore[reportArgumentType]


def _summing_gradients(group: dist.ProcessGroup) -> Callable[[nn.Module, tuple[Tensor]], Tensor]:
    """Return a hook that sums the gradient of a module's input, of which each rank computes a part, over the group."""

    def enter(module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        hidden = inputs[0].view_as(inputs[0])
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: sum_over_ranks(grad.clone(memory_format=torch.contiguous_format), group))
        return hidden

    return enter
