"""A filter gives the same gradient through every framework: that of the plain loss, microbatch by microbatch.

A filter looks at the tokens that it gets: the frequent columns, the samples and what is kept are a microbatch's own. So the
gradient of a batch is the sum over its microbatches of what the plain loss gives for the hidden states and labels of each.
A framework may scale that sum, and add it where it likes, and may add nothing to it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from shards import DEVICE, GPU, needs_gpu
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

pytest.importorskip("tokenizers")

from cce_dist import GradFilter, VocabShard, linear_cross_entropy
from cce_dist.tools.pretrain.data import IGNORED, num_valid
from cce_dist.tools.pretrain.engine import Engine
from cce_dist.tools.pretrain.ranks import Ranks, make_mesh
from cce_dist.tools.pretrain.recipe import Recipe, Shape
from cce_dist.tools.ranks import run_ranks

V, D, SEQ, BATCH = (32768, 256, 256, 16) if GPU else (4096, 32, 32, 16)
DTYPE = torch.bfloat16 if GPU else torch.float32
# It drops most of a new model's softmax, which is flatter where D is small, and keeps some.
FILTER = GradFilter((2.5 if GPU else 1.25) / V, always=True)


class Case(NamedTuple):
    """A framework, on two ranks if these are CPUs, and what it does besides."""

    framework: str
    tp: int
    accumulate: int = 1
    zero_stage: int = 1
    sequence_parallel: bool = False
    main_grad: bool = False
    loss_scale: float = 1.0


CASES = [
    Case("torch", tp=1, accumulate=2),
    Case("torch", tp=2, accumulate=4),
    Case("torch", tp=2, sequence_parallel=True),
    Case("deepspeed", tp=1, accumulate=4),
    Case("deepspeed", tp=2, accumulate=2),
    Case("deepspeed", tp=1, accumulate=2, zero_stage=2),
    Case("deepspeed", tp=1, zero_stage=3),
    Case("megatron", tp=1, accumulate=4, main_grad=True, loss_scale=2.0**12),
    Case("megatron", tp=2, accumulate=2),
    Case("megatron", tp=2, accumulate=2, sequence_parallel=True, main_grad=True, loss_scale=2.0**12),
]


def batch() -> tuple[np.ndarray, np.ndarray]:
    """Return ids and labels, of which half are ignored. All counts are powers of two, so that no scale rounds anything."""
    generator = np.random.default_rng(0)
    ids = np.minimum(generator.zipf(1.2, (BATCH, SEQ + 1)), V) - 1
    ignored = generator.permutation(BATCH * SEQ).reshape(BATCH, SEQ) < BATCH * SEQ // 2
    return ids[:, :-1], np.where(ignored, IGNORED, ids[:, 1:])


class Found(NamedTuple):
    """What a head was given, and what came of it."""

    hidden: list[Tensor]  # of each microbatch of this rank
    d_hidden: list[Tensor]
    weight: Tensor  # this rank's rows before the step
    d_weight: Tensor  # over the whole batch


@contextmanager
def watched(norm: Any) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Give what each call of the last norm returns, which the head is given, and the gradient that comes back."""
    hidden, d_hidden = [], []

    def look(_: Any, inputs: Any, output: Tensor) -> None:
        hidden.append(output.detach().clone())
        output.register_hook(lambda gradient: d_hidden.append(gradient.clone()))

    hook = norm.register_forward_hook(look)
    try:
        yield hidden, d_hidden
    finally:
        hook.remove()


def by_torch(case: Case, ranks: Ranks) -> Found:
    def whole(tensor: Any) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        return tensor.to_local() if case.tp > 1 else tensor.full_tensor()

    recipe = Recipe(
        shape=Shape(hidden_size=D, num_layers=1, num_heads=4, num_ffn=3 * D, seq_len=SEQ, vocab_size=V),
        loss="filtered",
        filter_eps=FILTER.eps,
        filter_always=True,
        batch_size=BATCH,
        accumulate=case.accumulate,
        tp=ranks.tp,
        dp=ranks.dp,
        sequence_parallel=case.sequence_parallel,
        device=DEVICE,
        dtype=str(DTYPE)[6:],
    )
    if ranks.world_size > 1:
        ranks = make_mesh(ranks.device, ranks.tp, ranks.dp, timedelta(seconds=60))
    engine = Engine(recipe, ranks)
    head: Any = engine.model.head
    weight = whole(head.weight).detach().clone()
    with watched(engine.model.norm) as seen:
        engine._accumulate_gradients(*batch())
    for each in seen[1]:
        each /= ranks.dp  # FSDP averages
    return Found(*seen, weight, whole(head.weight.grad))


class Model(nn.Module):
    """A model that computes its loss in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(V, D), nn.RMSNorm(D)
        self.lm_head = nn.Linear(D, V, bias=False)

    def forward(self, ids: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
        return scaled_sum(self.lm_head(self.norm(self.embedding(ids))), labels)


def scaled_sum(logits: Any, labels: tuple[Tensor, Tensor]) -> Tensor:
    ids, scale = labels
    return F.cross_entropy(logits.flatten(0, -2).float(), ids.flatten(), ignore_index=IGNORED, reduction="sum") * scale


def by_deepspeed(case: Case, ranks: Ranks) -> Found:
    from deepspeed.pipe import LayerSpec, PipelineModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
    from deepspeed.utils import groups, safe_get_full_fp32_param, safe_get_full_grad
    from test_deepspeed import prepare

    from cce_dist.integrations import deepspeed as cce

    prepare()
    torch.manual_seed(0)
    in_stages = case.zero_stage == 1
    if in_stages:
        topology = PipeModelDataParallelTopology(num_pp=1, num_mp=ranks.tp, num_dp=ranks.dp)
        layers = [LayerSpec(nn.Embedding, V, D), LayerSpec(nn.RMSNorm, D), cce.CCEHeadSpec(D, V, topology=topology)]
        model: Any = PipelineModule(layers, topology=topology, loss_fn=scaled_sum)
        norm, head = model.forward_funcs[-2:]
    else:
        model = Model()
        norm, head = model.norm, model.lm_head
    head.weight.data.mul_(0.02 / head.weight.std())
    config = {
        "train_micro_batch_size_per_gpu": BATCH // (ranks.dp * case.accumulate),
        "gradient_accumulation_steps": case.accumulate,
        "zero_optimization": {"stage": case.zero_stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": GPU},
        "data_types": {"grad_accum_dtype": "fp32"},
        "cce_dist": {"enabled": True, "filter": "compensated", "filter_eps": FILTER.eps, "filter_always": True},
    }

    def full(read: Any) -> Tensor:
        return read(head.weight).clone()

    engine = cce.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)[0]
    take_step, gradients = engine._take_model_step, []

    def read_first(*args: Any, **kwargs: Any) -> Any:
        gradients.append(full(safe_get_full_grad))
        return take_step(*args, **kwargs)

    engine._take_model_step = read_first
    weight = full(safe_get_full_fp32_param)
    # DeepSpeed takes the mean over microbatches and ranks; the scale makes it the mean over all tokens.
    ids, labels = batch()
    scale = torch.tensor(ranks.dp * case.accumulate / num_valid(labels), device=DEVICE)
    data = ((ids, (labels, scale)) for ids, labels in ranks.microbatches(ids, labels, case.accumulate))
    with watched(norm) as seen:
        if in_stages:
            engine.train_batch(data)
        else:
            for part in data:
                engine.backward(engine(*part))
                engine.step()
    groups._release_process_group_references()
    for each in seen[1]:
        each /= ranks.dp  # DeepSpeed averages
    [gradient] = gradients
    return Found(*seen, weight, gradient)


def by_megatron(case: Case, ranks: Ranks) -> Found:
    from megatron.core import distributed, parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron_on_cpu import Norm, OwnTokenAttention

    from cce_dist.integrations import megatron as cce

    parallel_state.initialize_model_parallel(case.tp)
    if GPU:
        tensor_parallel.model_parallel_cuda_manual_seed(0)
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=D,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=GPU,
        params_dtype=DTYPE,
        tensor_model_parallel_size=case.tp,
        sequence_parallel=case.sequence_parallel,
        calculate_per_token_loss=True,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
    )
    layer: Any = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    layer.submodules.self_attention.submodules.core_attention = OwnTokenAttention
    block: Any = TransformerBlockSubmodules([layer], layer_norm=Norm)  # pyright: ignore[reportArgumentType]
    model = cce.convert(GPTModel(config, block, V, SEQ).to(DEVICE), cce.Options(FILTER))
    module: Any = Float16Module(config, model) if GPU else model
    chunk: Any = distributed.DistributedDataParallel(
        config, distributed.DistributedDataParallelConfig(grad_reduce_in_fp32=True), module
    )
    config.no_sync_func, config.finalize_model_grads_func = chunk.no_sync, distributed.finalize_model_grads
    config.grad_scale_func = lambda loss: loss * case.loss_scale  # pyright: ignore[reportAttributeAccessIssue]
    head: Any = model.output_layer
    head.gradient_accumulation_fusion = case.main_grad
    weight = head.weight.detach().clone()
    chunk.zero_grad_buffer()
    ids, labels = batch()
    with watched(model.decoder.final_layernorm) as seen:
        get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=ranks.microbatches(ids, labels, case.accumulate),
            model=[chunk],
            num_microbatches=case.accumulate,
            seq_length=SEQ,
            micro_batch_size=BATCH // (ranks.dp * case.accumulate),
            forward_only=False,
        )
    for each in seen[1]:
        each /= case.loss_scale * num_valid(labels)  # by which the buffer is divided after the last microbatch
    parallel_state.destroy_model_parallel()
    return Found(*seen, weight, head.weight.main_grad / case.loss_scale)


def _forward_step(data: Iterator[tuple[Tensor, Tensor]], model: Any) -> tuple[Tensor, Any]:
    ids, labels = (each.t().contiguous() for each in next(data))  # to [b, s]
    positions = torch.arange(SEQ, device=ids.device).expand_as(ids)
    return model(ids, positions, None, labels=labels), functools.partial(_sum_losses, labels != IGNORED)


def _sum_losses(mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return sum and count: Megatron divides their totals over the whole batch."""
    return (losses * mask).sum(), mask.sum().int(), {}


FRAMEWORKS = {"torch": by_torch, "deepspeed": by_deepspeed, "megatron": by_megatron}


def by_the_loss(found: Found, ranks: Ranks, case: Case, grad_filter: GradFilter | None) -> tuple[Tensor, Tensor]:
    """Return d_hidden of this rank's microbatches, and d_weight of all."""
    ids, labels = batch()
    shard = VocabShard.even(V, dist.group.WORLD) if case.tp > 1 else None
    d_hidden, d_weight = [], torch.zeros_like(found.weight, dtype=torch.float32)
    for hidden, (_, here) in zip(found.hidden, ranks.microbatches(ids, labels, case.accumulate), strict=True):
        leaves = [x.to(DTYPE, copy=True).requires_grad_() for x in (hidden, found.weight)]
        loss = linear_cross_entropy(
            leaves[0],
            leaves[1],
            here,
            shard=shard,
            sequence_parallel=case.sequence_parallel,
            num_tokens=num_valid(labels),
            grad_filter=grad_filter,
        )
        gradients = torch.autograd.grad(loss, leaves)
        d_hidden.append(gradients[0])
        d_weight += gradients[1]
    if case.tp == 1:
        dist.all_reduce(d_weight)
    return torch.stack(d_hidden).float(), d_weight


def distance(one: Tensor, other: Tensor) -> float:
    return ((one - other).norm() / other.norm().clamp(min=1e-30)).item()


def check(case: Case, world: int = 2) -> None:
    ranks = Ranks(torch.device(DEVICE), dist.get_rank(), world, case.tp, world // case.tp)
    found = FRAMEWORKS[case.framework](case, ranks)
    ours = torch.stack(found.d_hidden).float(), found.d_weight.float()
    filtered, exact = (by_the_loss(found, ranks, case, each) for each in (FILTER, None))
    for name, mine, theirs, without in zip(("d_hidden", "d_weight"), ours, filtered, exact, strict=True):
        # Sums over ranks and microbatches may take another order, and the filter is a thousand times as far away. In bf16 a
        # framework may add microbatches up in fp32, or round their sum. Megatron divides by the number of tokens at the end, so
        # that its exponents round otherwise, and some elements of d_hidden with them: a fifth of what bf16's rounding is.
        scaled = case.framework == "megatron"
        most = {"d_weight": 2.0**-8, "d_hidden": 2.0**-11 if scaled else 1e-7}[name] if GPU else 1e-7
        assert distance(mine, theirs) <= most, f"{name}: relative error {distance(mine, theirs):.1e}"
        least = 1e-4 if name == "d_weight" or not GPU else 2.0**-10
        assert distance(theirs, without) >= least, f"{name}: nothing was filtered"


def _on_two_ranks() -> None:
    for case in CASES:
        if case.framework == "megatron":
            from megatron_on_cpu import use_cpu

            use_cpu()  # for good, so its cases are the last
        try:
            check(case)
        except Exception as error:
            raise AssertionError(str(case)) from error


@pytest.mark.slow
@pytest.mark.skipif(GPU, reason="on CPUs")
@pytest.mark.skipif(find_spec("deepspeed") is None or find_spec("megatron") is None, reason="needs both frameworks")
@pytest.mark.timeout(240)
def test_the_gradient_of_a_filter_is_the_same_through_every_framework() -> None:
    """Catches: a filter that is lost on its way, or given other tokens than a microbatch's; a gradient that reaches main_grad
    twice, or in part; a loss scale in a threshold; a shard's part of d_hidden that is left out or counted twice.
    """
    run_ranks(_on_two_ranks, 2)


def _on_one_gpu() -> None:
    wrong = []
    for case in CASES:
        if case.tp == 1:
            try:
                check(case, world=1)
            except AssertionError as error:
                wrong.append(f"{case}: {error}")
    assert not wrong, "\n".join(wrong)


@needs_gpu
@pytest.mark.timeout(240)
def test_it_is_the_same_in_bf16() -> None:
    """Catches the same of the kernels, and a gradient that is rounded to bf16 once more."""
    run_ranks(_on_one_gpu, 1, device="cuda")
