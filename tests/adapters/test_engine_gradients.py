"""A filter gives the same gradient through every engine: that of the plain loss, microbatch by microbatch.

A filter looks at the tokens that it gets: the frequent columns, the samples and what is kept are a microbatch's own. So the
gradient of a batch is the sum over its microbatches of what the plain loss gives for the hidden states and labels of each.
An engine may scale that sum, and add it where it likes, and may add nothing to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from shards import DEVICE, GPU, needs_gpu
from torch import Tensor
from torch.distributed.tensor import DTensor

pytest.importorskip("tokenizers")

from cce_dist import GradFilter, VocabShard, linear_cross_entropy
from cce_dist.integrations.deepspeed.loss import Options
from cce_dist.tools.pretrain.data import num_valid
from cce_dist.tools.pretrain.engines.deepspeed import ds_config
from cce_dist.tools.pretrain.ranks import Ranks, make_mesh
from cce_dist.tools.pretrain.recipe import FILTERS, Recipe, Shape
from cce_dist.tools.ranks import run_ranks

V, D, SEQ, BATCH = (32768, 256, 256, 16) if GPU else (4096, 32, 32, 16)
DTYPE = torch.bfloat16 if GPU else torch.float32
SHAPE = Shape(hidden_size=D, num_layers=1, num_heads=4, num_ffn=3 * D, seq_len=SEQ, vocab_size=V)
# It drops most of a new model's softmax, which is flatter where D is small, and keeps some.
FILTER = GradFilter((2.5 if GPU else 1.25) / V, always=True)


class Case(NamedTuple):
    """An engine, on two ranks if these are CPUs, and what it does besides."""

    engine: str
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
    return ids[:, :-1], np.where(ignored, -100, ids[:, 1:])


class Found(NamedTuple):
    """What a head was given, and what came of it."""

    hidden: list[Tensor]  # of each microbatch of this rank
    d_hidden: list[Tensor]
    weight: Tensor  # this rank's rows before the step
    d_weight: Tensor  # over the whole batch
    mine: slice = slice(None)  # which of its elements this rank is to have


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


def by_torch(recipe: Recipe, ranks: Ranks, case: Case) -> Found:
    from cce_dist.tools.pretrain.engines.torch import TorchEngine

    def whole(tensor: Any) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        return tensor.to_local() if case.tp > 1 else tensor.full_tensor()

    if ranks.world_size > 1:
        ranks = make_mesh(ranks.device, ranks.tp, ranks.dp, timedelta(seconds=60))
    engine = TorchEngine(recipe, ranks)
    head: Any = engine.model.head
    weight = whole(head.weight).detach().clone()
    with watched(engine.model.norm) as seen:
        engine._accumulate_gradients(*batch())
    for each in seen[1]:
        each /= ranks.dp  # FSDP averages
    return Found(*seen, weight, whole(head.weight.grad))


def by_deepspeed(recipe: Recipe, ranks: Ranks, case: Case) -> Found:
    from deepspeed.utils import groups, safe_get_full_fp32_param, safe_get_full_grad

    from cce_dist.tools.pretrain.engines.deepspeed import DeepSpeedEngine

    def full(read: Any, module: Any) -> Tensor:
        return read(module.weight).clone()

    engine = DeepSpeedEngine(recipe, ranks)
    module = engine.engine.module
    norm, head = module.forward_funcs[-2:] if engine.in_stages else (module.trunk.norm, module.lm_head)
    step, gradients = engine.engine._take_model_step, []

    def read_first(*args: Any, **kwargs: Any) -> Any:
        gradients.append(full(safe_get_full_grad, head))
        return step(*args, **kwargs)

    engine.engine._take_model_step = read_first
    weight = full(safe_get_full_fp32_param, head)
    with watched(norm) as seen:
        engine.step(1, *batch())
    groups._release_process_group_references()
    for each in seen[1]:
        each /= ranks.dp  # DeepSpeed averages
    [gradient] = gradients
    return Found(*seen, weight, gradient)


def by_megatron(recipe: Recipe, ranks: Ranks, case: Case) -> Found:
    from megatron.core import parallel_state

    from cce_dist.tools.pretrain.engines.megatron import MegatronEngine

    engine = MegatronEngine(recipe, ranks)
    head: Any = engine.model.output_layer
    head.gradient_accumulation_fusion = case.main_grad
    engine.model.config.grad_scale_func = lambda loss: loss * case.loss_scale
    weight = head.weight.detach().clone()
    engine.chunk.zero_grad_buffer()
    with watched(engine.model.decoder.final_layernorm) as seen:
        engine._run(*batch(), forward_only=False)
    for each in seen[1]:
        each /= case.loss_scale * num_valid(batch()[1])  # by which the buffer is divided after the last microbatch
    # The distributed optimizer reduces each rank's part of the buffer, and leaves the rest as it is.
    [optimizer] = engine.optimizer.chained_optimizers
    mine = slice(0)
    if head.weight in optimizer.model_param_gbuf_map:
        part = optimizer._get_model_param_range_map(head.weight)["param"]
        mine = slice(part.start, part.end)
    parallel_state.destroy_model_parallel()
    return Found(*seen, weight, head.weight.main_grad / case.loss_scale, mine)


ENGINES = {"torch": by_torch, "deepspeed": by_deepspeed, "megatron": by_megatron}


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
    return torch.stack(d_hidden).float(), d_weight.flatten()[found.mine]


def distance(one: Tensor, other: Tensor) -> float:
    return ((one - other).norm() / other.norm().clamp(min=1e-30)).item()


def check(case: Case, world: int = 2) -> None:
    recipe = Recipe(
        engine=case.engine,
        shape=SHAPE,
        loss="filtered",
        filter_eps=FILTER.eps,
        filter_always=True,
        batch_size=BATCH,
        accumulate=case.accumulate,
        tp=case.tp,
        dp=world // case.tp,
        zero_stage=case.zero_stage,
        sequence_parallel=case.sequence_parallel,
        device=DEVICE,
        dtype=str(DTYPE)[6:],
    )
    ranks = Ranks(torch.device(DEVICE), dist.get_rank(), world, recipe.tp, recipe.dp)
    found = ENGINES[case.engine](recipe, ranks, case)
    ours = torch.stack(found.d_hidden).float(), found.d_weight.float().flatten()[found.mine]
    filtered, exact = (by_the_loss(found, ranks, case, each) for each in (FILTER, None))
    for name, mine, theirs, without in zip(("d_hidden", "d_weight"), ours, filtered, exact, strict=True):
        # Sums over ranks and microbatches may take another order, and the filter is a thousand times as far away. In bf16 an
        # engine may add microbatches up in fp32, or round their sum. Megatron divides by the number of tokens at the end, so
        # that its exponents round otherwise, and some elements of d_hidden with them: a fifth of what bf16's rounding is.
        scaled = case.engine == "megatron"
        most = {"d_weight": 2.0**-8, "d_hidden": 2.0**-11 if scaled else 1e-7}[name] if GPU else 1e-7
        assert distance(mine, theirs) <= most, f"{name}: relative error {distance(mine, theirs):.1e}"
        least = 1e-4 if name == "d_weight" or not GPU else 2.0**-10
        assert distance(theirs, without) >= least or not theirs.numel(), f"{name}: nothing was filtered"
    held = torch.tensor(ours[1].numel(), device=DEVICE)
    dist.all_reduce(held)
    assert held >= found.weight.numel(), "nobody has the gradient of some rows"


def _on_two_ranks() -> None:
    for case in CASES:
        if case.engine == "megatron":
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
def test_the_gradient_of_a_filter_is_the_same_through_every_engine() -> None:
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


@pytest.mark.parametrize("loss", FILTERS)
@pytest.mark.parametrize("always", [False, True])
def test_deepspeeds_section_says_the_whole_filter(loss: str, always: bool) -> None:
    """Catches a field of the filter that the section leaves out: the run would filter otherwise, or nothing."""
    recipe = Recipe(engine="deepspeed", loss=loss, filter_eps=2.0**-8, filter_always=always)
    options = Options.from_config(ds_config(recipe, Ranks(torch.device("cpu"))))
    assert options is not None and options.grad_filter == recipe.grad_filter
