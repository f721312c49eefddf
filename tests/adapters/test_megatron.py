"""megatron-core itself, tiny and on the CPU, trained with its own loss and with ours: the same losses, the same gradients."""

import argparse
import contextlib
import dataclasses
import functools
import gc
import inspect
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("megatron.core")

from megatron_on_cpu import Norm, OwnTokenAttention, use_cpu
from support.ranks import Pool, run_ranks
from tiny_trainer import assert_filtered, compared, counted, said_by_all, watched

from cce_dist import GradFilter, VocabShard, groups
from cce_dist.integrations import megatron as cce
from cce_dist.integrations.deferred.subclass import Head
from cce_dist.integrations.megatron import flags, loss

SEQ, BATCH, VOCAB, STEPS = 8, 2, 64, 2
IGNORED = -100
OLDEST = version("megatron-core") < "0.13"  # of which parts need other packages, or an older torch


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to lay a model out, and to train it."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    sequence_parallel: bool = False
    tied: bool = False
    mtp: int | None = None
    per_token: bool = False
    ddp: str = ""  # "", "ddp", "distopt": with the distributed optimizer
    overlap: bool = False
    main_grad: bool = False
    dtype: torch.dtype = torch.float32
    loss_scale: float = 2.0**12  # the first, of fp16
    cp: int = 1
    own_tokens: bool = False  # attention that needs no token of another slice; Megatron's own refuses slices
    ep: int = 1
    frozen_head: bool = False
    in_groups: int | None = None  # tokens of a group whose gradients are made in forward
    positions: str = "learned_absolute"
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)  # more of TransformerConfig


SIZES: dict[str, Any] = dict(
    hidden_size=16,
    num_attention_heads=4,
    ffn_hidden_size=32,
    use_cpu_initialization=True,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    gradient_accumulation_fusion=False,
    masked_softmax_fusion=False,
    bias_dropout_fusion=False,
)
BLOCK = dict(
    recompute_granularity="full", recompute_method="block", recompute_num_layers=1, distribute_saved_activations=True
)
SELECTIVE = dict(
    recompute_granularity="selective",
    recompute_modules=["core_attn", "mlp", "layernorm"],
    add_bias_linear=False,  # with a bias, which it returns besides, recomputing the MLP never ends without a fused kernel
)
EXPERTS = dict(
    num_moe_experts=4,
    moe_router_topk=2,
    moe_ffn_hidden_size=32,
    moe_token_dispatcher_type="allgather",
    moe_aux_loss_coeff=0.1,
    moe_z_loss_coeff=0.01,
    add_bias_linear=False,
)

FP16 = Case(tp=2, sequence_parallel=True, ddp="distopt", main_grad=True, dtype=torch.float16)
CASES = [
    Case(tp=4, sequence_parallel=True, tied=True, settings=SELECTIVE),
    Case(tp=2, pp=2, tied=True, mtp=2, ddp="ddp", per_token=True),
    Case(pp=2, vpp=2, ddp="ddp"),
    Case(tp=2, tied=True, ddp="ddp", overlap=True, main_grad=True, settings=BLOCK),
    Case(tp=2, pp=2, sequence_parallel=True, mtp=1, ddp="distopt", overlap=True, main_grad=True, in_groups=5),
    Case(tp=2, sequence_parallel=True, ddp="ddp", main_grad=True, dtype=torch.bfloat16, in_groups=5),
    FP16,
    Case(tp=2, pp=2, ddp="distopt", overlap=True, main_grad=True, frozen_head=True),
    Case(tp=2, cp=2, own_tokens=True, sequence_parallel=True, mtp=1, ddp="distopt", overlap=True),
    Case(tp=2, ep=2, sequence_parallel=True, per_token=True, ddp="distopt", settings=EXPERTS),
]


def build(case: Case, **overrides: Any) -> list[Any]:
    """Return this stage's chunks, with weights that depend on the case alone."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    settings: dict[str, Any] = dict(
        SIZES,
        num_layers=(case.vpp or 1) * 2,
        bf16=case.dtype == torch.bfloat16,
        fp16=case.dtype == torch.float16,
        params_dtype=case.dtype,
        pipeline_dtype=case.dtype,
        init_method_std=0.1,
        sequence_parallel=case.sequence_parallel,
        mtp_num_layers=case.mtp,
        mtp_loss_scaling_factor=0.1,
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vpp,
        context_parallel_size=case.cp,
        expert_model_parallel_size=case.ep,
        calculate_per_token_loss=case.per_token,
        deallocate_pipeline_outputs=case.pp > 1,
    )
    config = TransformerConfig(**(settings | case.settings | overrides))
    spec: Any = get_gpt_layer_local_spec(num_experts=config.num_moe_experts)
    norm: Any = Norm
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = norm
    if case.own_tokens:
        attention: Any = OwnTokenAttention
        spec.submodules.self_attention.submodules.core_attention = attention
    layers = [spec] * (settings["num_layers"] // (case.pp * (case.vpp or 1)))
    torch.manual_seed(0)
    chunks = []
    for chunk in range(case.vpp or 1):
        virtual: dict[str, Any] = {"vp_stage": chunk} if case.vpp else {}
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=True) and chunk == 0
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=True) and chunk == (case.vpp or 1) - 1
        mtp: Any = None
        if case.mtp and last:
            mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
            for layer in getattr(mtp, "submodules", mtp).layer_specs:
                layer.submodules.enorm = layer.submodules.hnorm = layer.submodules.layer_norm = norm
        block: Any = TransformerBlockSubmodules(layers, layer_norm=norm)
        model = GPTModel(
            config,
            block,
            VOCAB,
            SEQ,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=case.tied,
            position_embedding_type=case.positions,  # pyright: ignore[reportArgumentType]
            mtp_block_spec=mtp,
            **virtual,
        )
        chunks.append(model)
    return chunks


class Trainer:
    """A model, wrapped and optimized as the case says, that trains by Megatron's schedules."""

    def __init__(self, case: Case, ours: bool, options: cce.Options | None = None, weights: Any = None) -> None:
        from megatron.core import distributed as ddp
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module

        self.case = case
        self.models = build(case)
        self.config = self.models[0].config
        for model, source in zip(self.models, weights.models if weights else [], strict=False):
            model.load_state_dict(source.state_dict())
        if ours:
            assert cce.convert(self.models, options) is self.models
        for model in self.models:
            if hasattr(model, "output_layer"):
                model.output_layer.gradient_accumulation_fusion = ours and case.main_grad
                if case.frozen_head:
                    model.output_layer.weight.requires_grad_(False)
        self.chunks: list[Any] = self.models
        if case.dtype != torch.float32:
            self.chunks = [Float16Module(self.config, chunk) for chunk in self.chunks]
        self.optimizer: Any
        if case.ddp:
            distributed = case.ddp == "distopt"
            ddp_config = ddp.DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=distributed,
                bucket_size=1,
                overlap_grad_reduce=case.overlap,
                overlap_param_gather=case.overlap and distributed,
            )
            self.chunks = [ddp.DistributedDataParallel(self.config, ddp_config, chunk) for chunk in self.chunks]
            self.optimizer = get_megatron_optimizer(
                OptimizerConfig(
                    optimizer="adam",
                    lr=1e-2,
                    clip_grad=1.0,
                    use_distributed_optimizer=distributed,
                    bf16=self.config.bf16,
                    fp16=self.config.fp16,
                    initial_loss_scale=case.loss_scale,
                    hysteresis=1,
                ),
                self.chunks,
            )
            if case.overlap and len(self.chunks) == 1:
                self.config.no_sync_func = self.chunks[0].no_sync
            self.config.finalize_model_grads_func = ddp.finalize_model_grads
            self.config.grad_scale_func = self.optimizer.scale_loss
        else:
            parameters = [p for model in self.models for p in model.parameters()]
            self.optimizer = torch.optim.SGD(parameters, lr=0.5)

    def step(self, step: int) -> tuple[list[float], dict[str, Tensor]]:
        """Train on one batch; return the microbatches' losses (on the last stage) and all gradients of this rank."""
        for chunk in self.chunks:
            if self.case.ddp:
                chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self.run(step)
        scale = self.optimizer.get_loss_scale() if self.case.ddp else 1.0
        grads = {}
        for index, model in enumerate(self.models):
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    grad = parameter.main_grad if self.case.ddp else parameter.grad
                    grads[f"{index}.{name}"] = grad.detach().float() / scale
        self.stepped = self.optimizer.step()
        return losses, grads

    def run(self, step: int, forward_only: bool = False) -> list[float]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        num_microbatches = 4 if self.case.vpp else 2
        for chunk in self.chunks:
            chunk.train(not forward_only)
        reports = get_forward_backward_func()(
            forward_step_func=functools.partial(forward_step, case=self.case),
            data_iterator=[microbatches(step, num_microbatches) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=num_microbatches,
            seq_length=SEQ,
            micro_batch_size=BATCH,
            forward_only=forward_only,
        )
        return [report["loss"].item() for report in reports]


def microbatches(step: int, count: int) -> Any:
    """Yield ids, labels (-100 for a half of those masked) and loss mask; every data-parallel rank has its own."""
    from megatron.core import parallel_state

    rank = parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(1000 * rank + step)
    for _ in range(count):
        ids, labels = torch.randint(VOCAB, (2, BATCH, SEQ), generator=generator).unbind()
        mask = torch.rand(BATCH, SEQ, generator=generator) > 0.2
        yield ids, labels.masked_fill(~mask & (ids < VOCAB // 2), IGNORED), mask.float()


def of_this_rank(tokens: Tensor, rank: int, size: int) -> Tensor:
    """Return the two of 2 size pieces that Megatron gives a context-parallel rank: for causal attention all work as much."""
    pieces = tokens.chunk(2 * size)
    return torch.cat([pieces[rank], pieces[-1 - rank]]) if size > 1 else tokens


def forward_step(data: Any, model: Any, case: Case) -> tuple[Tensor, Any]:
    from megatron.core import parallel_state

    ids, labels, mask = next(data)
    whole, rank = (ids, torch.arange(SEQ).expand(BATCH, SEQ), labels, mask), parallel_state.get_context_parallel_rank()
    ids, positions, labels, mask = (of_this_rank(tokens.t(), rank, case.cp).t() for tokens in whole)
    causal = torch.ones(SEQ, SEQ).tril()[None, None] < 0.5
    losses = model(ids, positions, causal, labels=labels, loss_mask=mask)

    def loss_func(losses: Tensor) -> tuple:
        total = (losses * mask).sum()
        report = {"loss": (total / mask.sum()).detach()}
        return (total, mask.sum().int(), report) if case.per_token else (total / mask.sum(), report)

    return losses, loss_func


def distance(grad: Tensor, truth: Tensor) -> float:
    return ((grad - truth).norm() / truth.norm().clamp(min=1e-30)).item()


def compare(case: Case, options: cce.Options | None = None) -> None:
    """Train both ways and hold losses and gradients of every parameter against one another."""
    reference, ours = Trainer(case, ours=False), Trainer(case, ours=True, options=options)
    truth = None
    if case.dtype != torch.float32:
        truth = Trainer(dataclasses.replace(case, dtype=torch.float32), ours=False, weights=reference)
    with groups.of_rows(case.in_groups), compared() as differed, counted(loss) as calls:
        for step in range(STEPS):
            (losses, grads), (our_losses, our_grads) = reference.step(step), ours.step(step)
            true_losses, true_grads = (losses, grads) if truth is None else truth.step(step)
            assert grads.keys() == our_grads.keys()
            # Fp32 gradients differ in rounding; of half precision none may be twice as far from fp32's as Megatron's farthest.
            allowed = max(distance(grads[name], grad) for name, grad in true_grads.items())
            for name, grad in true_grads.items():
                error = distance(our_grads[name], grad)
                assert error <= 2 * allowed + 2e-5, f"gradient of {name} in step {step}: relative error {error:.1e}"
            torch.testing.assert_close(our_losses, true_losses, rtol=2e-5 if truth is None else 1e-2, atol=0)
            if truth is not None:
                break  # from the first update on three models are trained
    has_head = any(hasattr(model, "output_layer") for model in ours.models)
    cce.require(ours.chunks)
    with torch.no_grad():
        expected, found = (trainer.run(STEPS, forward_only=True) for trainer in (reference, ours))
    torch.testing.assert_close(found, expected, rtol=2e-5 if truth is None else 1e-2, atol=0)
    # Losses are multiplied by the mask that the model was told. Multi-token prediction has its own masks, and expects nothing.
    num_expected = (4 if case.vpp else 2) * (step + 1) if has_head and case.in_groups and not case.frozen_head else 0
    assert differed == [False] * num_expected
    assert calls.call_count == ((1 + (case.mtp or 0)) * (4 if case.vpp else 2) * (step + 1) if has_head else 0)


def on_layout(case: Case, body: Any, *args: Any) -> None:
    use_cpu()
    from megatron.core import parallel_state
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.tracker.clear()  # sized by the first model's depths
    parallel_state.initialize_model_parallel(
        case.tp, case.pp, case.vpp, context_parallel_size=case.cp, expert_model_parallel_size=case.ep
    )
    try:
        body(case, *args)
        # A thread of gloo that still lets go of its last collective aborts the process when its group is destroyed.
        gc.collect()
        dist.barrier()
        time.sleep(0.1)
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state._POSITION_EMBEDDING_GLOBAL_RANKS = None  # which 0.12 forgets
        for group in list(dist.distributed_c10d._world.pg_map):  # left, their threads slow all that follows
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)


def logits_without_labels(case: Case) -> None:
    """Without labels a converted model returns Megatron's logits, gathered or not. The streaming maximum is their largest.

    It takes a budget of its own, and one token at a time where there is less.
    """
    reference, ours = build(case)[0].eval(), cce.convert(build(case))[0].eval()
    inputs, head = batch()[0], ours.output_layer
    with torch.no_grad():
        for gather in (None,) if case.sequence_parallel else (None, True):
            logits = ours(**inputs, runtime_gather_output=gather)
            assert torch.equal(logits, reference(**inputs, runtime_gather_output=gather))
            assert logits.shape[-1] == (VOCAB if gather else VOCAB // case.tp)
            hidden = torch.randn(SEQ // case.tp if case.sequence_parallel else SEQ, BATCH, 16)
            real, _ = head(hidden, runtime_gather_output=gather)
            with head.cce_task.call(deferring=True):
                deferred, _ = head(hidden, runtime_gather_output=gather)
            assert deferred.size(-1) == real.size(-1)
            for budget in (None, 3 * 4 * VOCAB, 1):
                head.cce_task.options = cce.Options(workspace_bytes=budget)
                torch.testing.assert_close([*(2.0 * deferred).max(dim=-1)], [*(2.0 * real).max(dim=-1)])
                assert torch.equal(torch.argmax(deferred, dim=-1), real.argmax(dim=-1))


def one_rank_says_that_the_loss_is_in_use(case: Case) -> None:
    """In one line that names filter, budget and shard, whatever of tensor, pipeline and data parallelism there is."""
    (line,) = said_by_all(cce.convert, build(case), cce.Options(GradFilter(), workspace_bytes=1 << 20))
    for what in ("shard 0 of 2: rows [0, 32) of 64", "GradFilter(eps=0.0009765625", "workspace_bytes=1048576"):
        assert what in line


def a_filter_looks_at_each_microbatch(case: Case) -> None:
    """Catches: a filter that is lost on its way, or given other tokens than a microbatch's; a gradient that reaches main_grad
    twice, or in part; a loss scale in a threshold; a shard's part of d_hidden that is left out or counted twice."""
    from megatron.core import parallel_state

    grad_filter, scale = GradFilter(1.25 / VOCAB, always=True), 2.0**12
    trainer = Trainer(case, ours=True, options=cce.Options(grad_filter))
    model = trainer.models[0]
    trainer.config.grad_scale_func = lambda loss: scale * loss
    weight = model.output_layer.weight.detach().clone()
    with watched(model.decoder.final_layernorm) as (hidden, d_hidden):
        _, grads = trainer.step(0)
    tokens = [(labels.t(), mask.t() / (2 * mask.sum())) for _, labels, mask in microbatches(0, 2)]
    replicas: Any = parallel_state.get_data_parallel_group()
    tensor_parallel: Any = parallel_state.get_tensor_model_parallel_group()
    assert_filtered(
        (hidden, [each / scale for each in d_hidden]),
        (weight, grads["0.output_layer.weight"] / scale),
        tokens,
        grad_filter,
        replicas,
        shard=VocabShard.even(VOCAB, tensor_parallel),
        sequence_parallel=case.sequence_parallel,
    )


def overflows_skip_the_step(case: Case) -> None:
    """What does not fit fp16 must reach the optimizer, which then halves the loss scale."""
    for ours in (False, True):
        trainer = Trainer(dataclasses.replace(case, loss_scale=2.0**30), ours)
        before = [parameter.clone() for model in trainer.models for parameter in model.parameters()]
        trainer.step(0)
        after = [parameter for model in trainer.models for parameter in model.parameters()]
        assert not trainer.stepped[0] and trainer.optimizer.get_loss_scale() == 2.0**29
        assert all(map(torch.equal, before, after))


@pytest.fixture(scope="module")
def megatron_ranks() -> Iterator[Callable]:
    """Four ranks that Megatron may change for good."""
    with Pool(4, limit_seconds=200) as pool:
        yield pool.run


ON_RANKS: list[Any] = [
    *((compare, case) for case in CASES),
    (logits_without_labels, Case(tp=2)),
    (logits_without_labels, Case(tp=2, sequence_parallel=True)),
    (one_rank_says_that_the_loss_is_in_use, Case(tp=2, pp=2, sequence_parallel=True)),
    (a_filter_looks_at_each_microbatch, Case(tp=2, ddp="ddp")),
    (a_filter_looks_at_each_microbatch, Case(tp=2, sequence_parallel=True, ddp="ddp", main_grad=True)),
    (overflows_skip_the_step, FP16),
]


@pytest.mark.slow
@pytest.mark.xdist_group("megatron")
@pytest.mark.parametrize(("check", "case"), ON_RANKS, ids=lambda value: getattr(value, "__name__", None))
def test_on_four_ranks(megatron_ranks: Callable, check: Callable, case: Case) -> None:
    if OLDEST and (case.vpp or case.ddp == "distopt"):
        pytest.skip("it knows its virtual stage from a global, and its distributed optimizer needs Transformer Engine")
    megatron_ranks(on_layout, case, check)


def batch(inside: bool = False) -> tuple[dict[str, Tensor], Tensor]:
    """Return the arguments of a forward, and labels of which two are outside the vocabulary, unless all are to be inside."""
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(VOCAB, (2, BATCH, SEQ), generator=generator).unbind()
    if not inside:
        labels[0, 3], labels[1, 0] = IGNORED, VOCAB + 7
    mask = torch.ones(SEQ, SEQ).tril()[None, None] < 0.5
    return {"input_ids": ids, "position_ids": torch.arange(SEQ).expand(BATCH, SEQ), "attention_mask": mask}, labels


def takes_a_processor() -> bool:
    from megatron.core.models.gpt import GPTModel

    return "output_processor" in inspect.signature(GPTModel.forward).parameters


def with_processor(model: Any) -> Any:
    """Return a model that takes an ``output_processor``; where it takes none, it now calls one as 0.18 does."""
    from megatron.core.models.gpt import GPTModel

    class WithProcessor(GPTModel):
        def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
            self.processor = kwargs.pop("output_processor", None), kwargs.pop("output_processor_context", None)
            return super().forward(*args, labels=labels, **kwargs)

        def _postprocess(self, hidden_states: Tensor, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
            processor, context = self.processor
            if processor is None:
                return super()._postprocess(hidden_states, *args, labels=labels, **kwargs)
            tied = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
            return processor(
                hidden_states=hidden_states,
                output_layer=self.output_layer,
                output_weight=tied,
                labels=labels,
                context=context,
                scale_logits=lambda logits: logits,
                config=self.config,
            )

    if not takes_a_processor():
        model.__class__ = WithProcessor
    return model


def one_model(options: cce.Options | None = None, **overrides: Any) -> Any:
    return cce.convert(build(Case(), **overrides)[0], options)


def convert_can_be_undone_and_repeated() -> None:
    model = build(Case())[0]
    classes, names, head = (type(model), type(model.output_layer)), list(model.state_dict()), model.output_layer
    sharded = str(model.sharded_state_dict())
    assert cce.convert(model) is model and type(model) is not classes[0]
    assert (type(model).__name__, type(head).__name__) == ("GPTModel", "ColumnParallelLinear")
    assert model.output_layer is head and list(model.state_dict()) == names
    assert str(model.sharded_state_dict()) == sharded  # key, shape, offset and replica of every entry
    converted = type(model)
    cce.convert([model], cce.Options(vocab_size=60))
    assert type(model) is converted and head.cce_task.options.vocab_size == 60
    assert cce.revert(model) is model and (type(model), type(head)) == classes
    assert not any(name.startswith("cce") for name in vars(head))
    from megatron.core.transformer.module import Float16Module

    bare = build(Case(dtype=torch.bfloat16))[0]
    wrapped = Float16Module(bare.config, bare)
    assert cce.convert(wrapped) is wrapped and isinstance(bare.output_layer, Head)


def padding_rows_can_be_masked() -> None:
    model = one_model(cce.Options(vocab_size=60))
    inputs, labels = batch()
    labels = labels.where(labels < 60, IGNORED)
    losses = model(**inputs, labels=labels)
    logits = model(**inputs)[..., :60]
    truth = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    torch.testing.assert_close(losses, truth)
    losses.sum().backward()
    assert not model.output_layer.weight.grad[60:].any() and model.output_layer.weight.grad[:60].any(dim=1).all()
    with pytest.raises(ValueError, match="vocab_size 65, but the head has 64 rows"):
        one_model(cce.Options(vocab_size=65))


def the_weight_is_there_only_between_the_heads_hooks() -> None:
    """As under FSDP, which gathers a module's parameters before its call and frees them after it."""
    model = one_model().eval()
    inputs, labels = batch()
    weight = model.output_layer.weight
    whole = weight.detach().clone()

    def gather(*_: Any) -> None:
        weight.copy_(whole)

    def free(*_: Any) -> None:
        weight.fill_(torch.nan)

    free.__module__ = "torch.distributed.fsdp.stand_in"  # a hook of anybody else is refused
    with torch.no_grad():
        losses = model(**inputs, labels=labels)
        model.output_layer.register_forward_pre_hook(gather)
        model.output_layer.register_forward_hook(free)
        free()
        assert torch.equal(model(**inputs, labels=labels), losses)


def others_get_the_logits_that_they_want() -> None:
    """A loss of the instance's own, as distillation has; one from logits, as in RL; ``output_processor`` of 0.18 on."""
    model = one_model(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="cce")
    inputs, labels = batch(inside=True)
    losses = model(**inputs, labels=labels)
    logits = model(**inputs).transpose(0, 1).contiguous()
    torch.testing.assert_close(model.compute_language_model_loss(labels, logits.clone()), losses)
    assert model.config.cross_entropy_loss_fusion
    model.compute_language_model_loss = lambda labels, logits: logits
    assert torch.equal(model(**inputs, labels=labels), logits)

    def log_probs(hidden_states: Tensor, output_layer: Any, output_weight: Any, labels: Tensor, **_: Any) -> Tensor:
        logits, _ = output_layer(hidden_states, weight=output_weight)
        return torch.log_softmax(logits.float(), dim=-1).gather(-1, labels.t().unsqueeze(-1)).squeeze(-1).t()

    if OLDEST:
        return  # its model has no end of its own, where 0.18 calls a processor
    model = cce.convert(with_processor(build(Case())[0]))
    with counted(loss) as calls:
        found = model(**inputs, labels=labels, output_processor=log_probs)
        assert not calls.called
        losses = model(**inputs, labels=labels)
        assert calls.called
    torch.testing.assert_close(found, -losses)


def a_loss_that_is_not_ours_is_told() -> None:
    """``require`` is told by the head's class, and after a step by who computed the loss."""
    inputs, labels = batch(inside=True)
    with pytest.raises(RuntimeError, match="output_layer of this GPTModel was not converted"):
        cce.require(build(Case())[0])
    model = one_model()
    compute = type(model).__mro__[2].compute_language_model_loss  # Megatron's
    model.compute_language_model_loss = lambda labels, logits: compute(model, labels, logits)
    model.eval()(**inputs, labels=labels)
    with torch.no_grad():
        model.train()(**inputs, labels=labels)
    model(**inputs)  # logits, by which no loss of ours is missed
    with pytest.raises(RuntimeError, match="call require after the first step"):
        cce.require(model)
    model(**inputs, labels=labels)
    with pytest.raises(RuntimeError, match=r"1 forward.* none asked the head output_layer for its loss"):
        cce.require([model])
    del model.compute_language_model_loss
    model.output_layer.eval()  # the mode of the model counts, not that of its head
    model(**inputs, labels=labels)
    cce.require([model])
    model.output_layer.register_forward_hook(lambda *_: None)
    model(**inputs, labels=labels)
    cce.require([model])
    model.output_layer.register_full_backward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="the head has the hook"):
        model(**inputs, labels=labels)


def deferred_logits_refuse_what_they_cannot_do() -> None:
    head = one_model().output_layer
    with head.cce_task.call(deferring=True):
        logits, _ = head(torch.randn(SEQ, BATCH, 16))
    for use in (lambda: torch.softmax(logits, dim=-1), lambda: logits.max(dim=0), lambda: logits * torch.ones(2)):
        with pytest.raises(TypeError):
            use()
    with pytest.raises(AttributeError, match="float of logits that are not computed"):
        logits.float()


def the_end_of_a_model_can_be_called_alone() -> None:
    """As the schedule does that overlaps the communication of experts; and logits may be scaled, as MuP does, and capped."""
    model = one_model()
    labels = batch(inside=True)[1]
    hidden = torch.randn(SEQ, BATCH, 16, requires_grad=True)
    others = dict.fromkeys(("input_ids", "position_ids", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin"))
    results: list[Any] = []
    for calls_of_ours in (1, 0):
        if hasattr(model, "_postprocess"):  # 0.13 on
            with counted(loss) as calls:
                losses = model._postprocess(hidden, labels=labels, **others)
            assert calls.call_count == calls_of_ours
            results.append((losses, *torch.autograd.grad(losses.sum(), hidden)))
        head: Any = model.output_layer
        with head.cce_task.call(deferring=True) if isinstance(head, Head) else contextlib.nullcontext():
            logits, _ = head(hidden)
        for changed in (3.0 * torch.tanh(logits / 3.0), logits * 0.25):
            largest = changed.max(dim=-1)[0].detach().clone()  # Megatron's loss writes over its logits
            losses = model.compute_language_model_loss(labels, changed)
            weights: Any = [hidden, head.weight]
            grads = torch.autograd.grad(losses.sum(), weights, retain_graph=True)
            results.append((losses, largest, *grads))
        cce.revert(model)
    half = len(results) // 2
    torch.testing.assert_close(results[:half], results[half:])


def hybrid(case: Case) -> Any:
    """Return a MambaModel, HybridModel from 0.19 on; of its layers those that need no other package."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.mamba import MambaModel
    from megatron.core.ssm import mamba_block
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec

    attention, mlp = (cast(Any, get_gpt_layer_local_spec().submodules) for _ in range(2))
    attention.input_layernorm, attention.pre_mlp_layernorm = Norm, IdentityOp
    attention.mlp, attention.mlp_bda = IdentityOp, IdentityFuncOp
    mlp.input_layernorm, mlp.pre_mlp_layernorm = IdentityOp, Norm
    mlp.self_attention, mlp.self_attn_bda = IdentityOp, IdentityFuncOp
    if case.own_tokens:
        attention.self_attention.submodules.core_attention = OwnTokenAttention
    layer = get_gpt_layer_local_spec().module
    stack: Any = mamba_block
    layers = stack.MambaStackSubmodules(
        attention_layer=ModuleSpec(module=layer, submodules=attention),
        mlp_layer=ModuleSpec(module=layer, submodules=mlp),
    )
    home: Any = sys.modules[stack.MambaStack.__module__]
    home.TENorm = Norm  # its last norm is Transformer Engine's
    torch.manual_seed(0)
    parallel: dict[str, Any] = dict(
        tensor_model_parallel_size=case.tp, sequence_parallel=case.sequence_parallel, context_parallel_size=case.cp
    )
    return MambaModel(
        TransformerConfig(num_layers=2, **SIZES, **parallel),
        ModuleSpec(module=stack.MambaStack, submodules=layers),
        VOCAB,
        SEQ,
        hybrid_override_pattern="*-",
        position_embedding_type="none",
        share_embeddings_and_output_weights=case.tied,
    )


def heads_that_cannot_be_taken_over() -> None:
    own = {"compute_language_model_loss": lambda *_: None}
    for change, message in (
        (lambda m: setattr(m.config, "defer_embedding_wgrad_compute", True), "GPTModel: defer_embedding_wgrad_compute"),
        (lambda m: setattr(m, "output_layer", torch.nn.Linear(16, VOCAB)), "output_layer is a Linear, not"),
        (lambda m: setattr(m.output_layer, "bias", torch.nn.Parameter(torch.zeros(VOCAB))), "output_layer has a bias"),
        (lambda m: vars(m.output_layer).update(forward=None), "output_layer has a forward of its own"),
        (lambda m: setattr(m, "__class__", type("Scaled", (type(m),), own)), "compute_language_model_loss of its own"),
    ):
        model = build(Case())[0]
        change(model)
        with pytest.raises(ValueError, match=message):
            cce.convert(model)
    with pytest.raises(TypeError, match="expected a model of megatron-core, got Linear"):
        cce.convert(torch.nn.Linear(2, 2))
    stage = build(Case())[0]
    del stage.output_layer
    assert cce.convert(stage) is stage and type(stage).__mro__[1].__name__ != "_Model"
    wrapped = one_model()
    wrapped.output_layer = torch.nn.Sequential()
    with pytest.warns(UserWarning, match="wrapped in a Sequential; its logits are computed"), pytest.raises(TypeError):
        wrapped(**batch()[0], labels=batch()[1])


def the_flag_converts_what_is_built() -> None:
    from megatron.core.models.common.language_module.language_module import LanguageModule

    def converted(**overrides: Any) -> bool:
        return isinstance(build(Case(), **overrides)[0].output_layer, Head)

    original = LanguageModule.setup_embeddings_and_output_layer
    cce.install()
    cce.install()
    assert converted(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="cce")
    assert converted(cross_entropy_loss_fusion=False, cross_entropy_fusion_impl="cce", deterministic_mode=True)
    assert not converted(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="native")
    cce.install(cce.Options(vocab_size=60), every_model=True)
    assert build(Case())[0].output_layer.cce_task.options.vocab_size == 60
    cce.uninstall()
    assert LanguageModule.setup_embeddings_and_output_layer is original
    assert not converted(cross_entropy_fusion_impl="cce")
    says = r"LanguageModule.compute_language_model_loss, which megatron-core \d"
    with mock.patch.object(LanguageModule, "compute_language_model_loss", None), pytest.raises(ImportError, match=says):
        cce.install()


def megatron_reads_our_flags() -> None:
    """test_options.py has what they become."""
    from megatron.core.transformer import TransformerConfig

    cce.install()
    cce.uninstall()
    choices = get_args(TransformerConfig.__dataclass_fields__["cross_entropy_fusion_impl"].type)
    assert choices in ((), ("native", "te", "cce"))  # before Megatron-LM 0.16 the parser has its own list
    args = cce.add_arguments(argparse.ArgumentParser()).parse_args(["--cce-vocab-size", "60"])
    assert flags._options_of_the_command_line() is None
    with mock.patch.dict(sys.modules, {"megatron.training.global_vars": SimpleNamespace(_GLOBAL_ARGS=args)}):
        assert flags._options_of_the_command_line() == cce.Options(vocab_size=60)


CHECKS = (
    convert_can_be_undone_and_repeated,
    padding_rows_can_be_masked,
    the_weight_is_there_only_between_the_heads_hooks,
    others_get_the_logits_that_they_want,
    a_loss_that_is_not_ours_is_told,
    deferred_logits_refuse_what_they_cannot_do,
    the_end_of_a_model_can_be_called_alone,
    heads_that_cannot_be_taken_over,
    the_flag_converts_what_is_built,
    megatron_reads_our_flags,
)


def _on_one_rank() -> None:
    for check in CHECKS:
        try:
            on_layout(Case(), lambda _, check=check: check())
        except Exception as error:
            raise AssertionError(check.__name__) from error


@pytest.mark.slow
def test_one_model() -> None:
    run_ranks(_on_one_rank, 1)


SCRIPT = """
import argparse
import sys
import torch
import torch.distributed as dist
import helper                                      # beside the script
import megatron.core                               # beside the script, too, as in Megatron-LM
from test_megatron import Case, IGNORED, batch, build
from megatron_on_cpu import use_cpu
from megatron.core import parallel_state
from cce_dist.integrations.megatron import add_arguments, options_from_args

use_cpu()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
model = build(Case())[0]
inputs, labels = batch()
options = model.output_layer.cce_task.options
print(sys.argv[1:], __name__, options, model(**inputs, labels=labels).sum().item())
print(megatron.core.__file__, options_from_args(add_arguments(argparse.ArgumentParser()).parse_args([])) == options)
"""


def test_the_launcher_converts_what_a_script_builds(tmp_path) -> None:
    """From another folder than the script's, with our flags on both sides of its name."""
    import megatron.core

    folder, elsewhere = tmp_path / "Megatron-LM", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (folder / "megatron").symlink_to(Path(megatron.core.__file__).parent.parent)
    (folder / "pretrain_gpt.py").write_text(SCRIPT)
    (folder / "helper.py").touch()
    line = [sys.executable, "-m", "cce_dist.integrations.megatron"]
    behind = ["--num-layers", "2", "--cce-vocab-size", "60", "--lr", "-1e-3"]
    behind += ["--cross-entropy-fusion-impl", "cce"]
    rest = ["--cce-filter", "compensated", "../Megatron-LM/pretrain_gpt.py", *behind]
    paths = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, Path(__file__).parents[:2]), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run([*line, *rest], cwd=elsewhere, env=paths, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    arguments, megatron_s = done.stdout.splitlines()[-2:]
    left = "['--num-layers', '2', '--lr', '-1e-3', '--cross-entropy-fusion-impl', 'cce'] __main__ Options("
    assert arguments.startswith(left + "grad_filter=GradFilter(eps=0.0009765625") and "vocab_size=60" in arguments
    assert megatron_s == f"{folder / 'megatron' / 'core' / '__init__.py'} True"
    lines = [line for line in done.stderr.splitlines() if "the loss comes from hidden states" in line]
    assert len(lines) == 1 and "compensate=True" in lines[0]


WRONG: list[tuple[list[str], str]] = [
    ([__file__, "--cross-entropy-fusion-impl", "native"], "--cross-entropy-fusion-impl native asks for"),
    ([__file__, "--x", "1", "--cross-entropy-fusion-impl=te"], "fusion-impl te asks for"),
    ([__file__, "--cce-filter", "exact"], "argument --cce-filter: invalid choice"),
    (["--cce-filter-eps", "2", __file__], "--cce-filter-eps must be in [0, 1), got 2.0"),
]


def test_the_launcher_starts_torchrun_once_its_line_is_right(capsys, monkeypatch) -> None:
    """Catches a missing script that only the ranks notice: torchrun's traceback would follow their error."""
    started: list[list[str]] = []
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(flags, "_defaults", {})
    monkeypatch.setattr(flags, "install", lambda options, every_model: None)
    monkeypatch.setattr("torch.distributed.run.main", started.append)
    before = ["--nnodes", "1", "--cce-filter", "plain", "--nproc-per-node=2"]
    flags.main([*before, __file__, "--lr", "1", "--cce-vocab-size", "60"])
    module = ["-m", "cce_dist.integrations.megatron", "--cce-filter=plain"]
    behind = [__file__, "--lr", "1", "--cce-vocab-size", "60"]
    assert started == [["--nnodes", "1", "--nproc-per-node=2", *module, *behind]]
    for line, message in (*WRONG, ([*before, "nowhere.py", "--lr", "1"], "no such script: nowhere.py")):
        with pytest.raises(SystemExit):
            flags.main(line)
        said = capsys.readouterr().err.splitlines()
        assert message in said[-1] and len(started) == 1
    assert len(said) == 1
