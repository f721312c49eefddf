"""deepspeed itself, tiny and on the CPU, trained with its own loss and with ours: the same losses, the same updates."""

import copy
import dataclasses
import importlib
import importlib.util
import io
import itertools
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext, redirect_stderr
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.ranks import run_ranks, shared_folder
from test_options import DS_CONFIG
from tiny_trainer import assert_filtered, begin_deepspeed, counted, said_by_all, tiny_model, watched
from torch import Tensor, nn

import cce_dist
from cce_dist import GradFilter, VocabShard
from cce_dist.integrations import deepspeed as cce
from cce_dist.integrations import patching
from cce_dist.integrations import transformers as hugging_face
from cce_dist.integrations.deepspeed import engine as cce_engine
from cce_dist.integrations.deepspeed.__main__ import main
from cce_dist.integrations.deferred import task as deferred_task
from cce_dist.integrations.on_import import on_import

HIDDEN, VOCAB, SEQ, BATCH, STEPS, MICROBATCHES = 16, 37, 6, 2, 2, 2
IGNORED = -100
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")

FILTER: dict[str, Any] = {"filter": "compensated", "filter_eps": 1.25 / VOCAB, "filter_always": True}
REPORT = {"report": True, "z_loss_weight": 0.1, "filter": "compensated", "filter_eps": 1e-30}


@dataclasses.dataclass(frozen=True)
class Case:
    zero: int = 0
    tied: bool = False
    clip: float = 0.1
    bf16: bool = False
    fp16: bool = False
    offload: bool = False
    autotp: int = 0
    split: bool = False  # the vocabulary, over an mpu's model axis
    num_items: int | None = None
    section: dict[str, Any] = dataclasses.field(default_factory=dict)
    reduce_scatter: bool = True


@dataclasses.dataclass(frozen=True)
class Pipe(Case):
    """A pipeline."""

    pipe: int = 1
    model: int = 1
    checkpoint: bool = False
    clip: float = 0.0
    weighted: bool = False


def ds_config(ours: bool, case: Case, **more: Any) -> dict:
    config = json.loads(DS_CONFIG) | {"steps_per_print": 10**9} | more
    config["cce_dist"]["enabled"] = ours
    # For fp16 a loss scale that changes while we look.
    scaler = {"enabled": case.fp16, "initial_scale_power": 8, "loss_scale_window": 1, "hysteresis": 1}
    config |= {"bf16": {"enabled": case.bf16}, "fp16": scaler if case.fp16 else {"enabled": False}}
    config |= {"gradient_clipping": case.clip, "zero_optimization": {"stage": case.zero}}
    config["cce_dist"] |= case.section
    return config


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(F.gelu(self.up(hidden)))


def weighted_loss(logits: Any, labels: tuple[Tensor, Tensor]) -> Tensor:
    ids, weights = labels
    logits = 3.0 * torch.tanh(logits / 3.0)
    loss = F.cross_entropy(logits.float().flatten(0, 1), ids.flatten(), reduction="none")
    return (loss * weights.flatten()).sum() / weights.sum()


def pipeline_module(case: Pipe, ours: bool = False, kind: Any = nn.Embedding, head: Callable | None = None) -> Any:
    """Return the module; ours has the head split over the model axis, DeepSpeed's whole on each of its ranks."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    data = dist.get_world_size() // (case.pipe * case.model)
    topology = PipeModelDataParallelTopology(num_pp=case.pipe, num_mp=case.model, num_dp=data)
    name: Any = "embedding" if case.tied else None
    if ours and case.model > 1:
        last = cce.CCEHeadSpec(HIDDEN, VOCAB, topology=topology, tied=name)
    elif case.tied:
        tied_logits = head or (lambda embedding, hidden: F.linear(hidden, embedding.weight))
        last = TiedLayerSpec(name, kind, VOCAB, HIDDEN, forward_fn=tied_logits)
    else:
        last = LayerSpec(nn.Linear, HIDDEN, VOCAB, bias=case.model == 1)
    if not case.tied:
        first = LayerSpec(nn.Embedding, VOCAB, HIDDEN)
    elif ours and case.model > 1:
        first = cce.CCEEmbeddingSpec(HIDDEN, VOCAB, topology=topology, tied=name)
    else:
        first = TiedLayerSpec(name, kind, VOCAB, HIDDEN)
    module = PipelineModule(
        [first, LayerSpec(Block), LayerSpec(Block), last],
        topology=topology,
        partition_method="uniform",
        loss_fn=weighted_loss if case.weighted else cce.loss_fn,
        activation_checkpoint_interval=1 if case.checkpoint else 0,
    )
    for name, parameter in module.named_parameters():
        # By name: a layer has the same weights whatever the stage or the split.
        generator = torch.Generator().manual_seed(sum(name.encode()))
        rows = rows_of(module, name)
        shape = parameter.shape if rows == slice(None) else (VOCAB, *parameter.shape[1:])
        with torch.no_grad():
            parameter.copy_(0.3 * torch.randn(shape, generator=generator)[rows])
    return module


def pipeline(case: Pipe, ours: bool, module: Any = None) -> Any:
    """Return the engine of such a module."""
    module = pipeline_module(case, ours) if module is None else module
    config = ds_config(ours, case, pipeline={"use_reentrant": False})
    if case.bf16:  # BF16_Optimizer, which clears what gradients there are where it sees backward begin
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.5)
    return cce.initialize(model=module, optimizer=optimizer, config=config)[0]


def rows_of(module: nn.Module, name: str) -> slice:
    """Return which rows of a whole parameter a shard of the vocabulary holds; all of a parameter that is not split."""
    rows = getattr(module.get_submodule(name.rpartition(".")[0]), "rows", None)
    return slice(None) if rows is None else slice(rows.start, rows.stop)


def assert_same(ours: dict[str, Tensor], stock: dict[str, Tensor], module: nn.Module, tolerance: float) -> None:
    expected = {name: parameter[rows_of(module, name)] for name, parameter in stock.items()}
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


def batches(step: int, weighted: bool, rank: int) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    while True:
        ids = torch.randint(VOCAB, (BATCH, SEQ), generator=generator)
        labels = torch.randint(VOCAB, (BATCH, SEQ), generator=generator)
        labels = labels.masked_fill(torch.rand(labels.shape, generator=generator) < 0.3, IGNORED)
        yield ids, (labels, torch.rand(labels.shape, generator=generator)) if weighted else labels


class Model(nn.Module):
    """A language model as people write them; ``head`` makes its last layer."""

    def __init__(self, head: Callable[[], nn.Module] = lambda: nn.Linear(HIDDEN, VOCAB), tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.block = nn.Embedding(VOCAB, HIDDEN), Block()
        self.lm_head = head()
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(
        self, ids: Tensor, labels: Tensor | None = None, shift_labels: Tensor | None = None, **_: Any
    ) -> tuple[Tensor | None, Any]:
        logits: Any = self.lm_head(self.block(self.embed(ids)))
        if shift_labels is not None:
            return cce.loss_fn(logits, shift_labels), logits
        if labels is None:
            return None, logits
        return F.cross_entropy(logits[..., :-1, :].reshape(-1, VOCAB), labels[:, 1:].flatten()), logits


def engine_of(model: nn.Module, ours: bool, case: Case, mpu: Any = None) -> Any:
    config = ds_config(ours, case)
    config["zero_optimization"] |= {"stage3_param_persistence_threshold": 0, "reduce_scatter": case.reduce_scatter}
    if case.offload:
        config["zero_optimization"] |= {f"offload_{what}": {"device": "cpu"} for what in ("optimizer", "param")}
        config["zero_force_ds_cpu_optimizer"] = False  # which a compiler would have to make
    if case.autotp:
        config["tensor_parallel"] = {"autotp_size": case.autotp, "vocab_parallel_lm_head": True}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return cce.initialize(model=model, optimizer=optimizer, config=config, mpu=mpu)[0]


def engines(case: Case, name: str = "") -> tuple[Any, Any]:
    """Return DeepSpeed's own engine and ours, of the same model: a pipeline, ``Model``, or one of transformers."""
    if isinstance(case, Pipe):
        return pipeline(case, ours=False), pipeline(case, ours=True)
    if name:
        stock = tiny_model(name, vocab_size=VOCAB, num_hidden_layers=1, tie_word_embeddings=case.tied)
        if case.zero == 3:
            stock.gradient_checkpointing_enable()
    else:
        stock = Model(tied=case.tied)
    ours = copy.deepcopy(stock)
    mpu = make_mpu(2) if case.split else None
    if mpu is not None:
        rank, size = mpu.get_model_parallel_rank(), mpu.get_model_parallel_world_size()
        ours.lm_head = cce.CCEHead(HIDDEN, VOCAB, bias=True, tp_rank=rank, tp_size=size)
        for where, parameter in ours.lm_head.named_parameters():
            parameter.data.copy_(getattr(stock.lm_head, where)[rows_of(ours, f"lm_head.{where}")])
    return engine_of(stock, False, case, mpu), engine_of(ours, True, case, mpu)


def data_rank(engine: Any, case: Case) -> int:
    if isinstance(case, Pipe):
        return engine.grid.get_data_parallel_rank()
    return 0 if case.autotp else dist.get_rank() // (2 if case.split else 1)


def train(engine: Any, step: int, case: Case) -> list[float]:
    rank = data_rank(engine, case)
    if isinstance(case, Pipe):
        return [engine.train_batch(batches(step, case.weighted, rank)).item()]
    engine.train()
    data, losses = batches(step, False, rank), []
    more = {} if case.num_items is None else {"num_items_in_batch": case.num_items}
    for _ in range(MICROBATCHES):
        ids, labels = next(data)
        loss = engine(ids, labels=labels, **more)[0]
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def evaluated(engine: Any, case: Case) -> Tensor:
    data = batches(9, False, data_rank(engine, case))
    if isinstance(case, Pipe):
        return engine.eval_batch(data)
    engine.eval()
    ids, labels = next(data)
    return engine(ids, labels=labels)[0]


def parameters(engine: Any) -> dict[str, Tensor]:
    """Whole parameters, whatever the ZeRO stage."""
    import deepspeed

    found = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(found.values()), enabled=engine.zero_optimization_stage() == 3):
        return {name: parameter.detach().float().clone() for name, parameter in found.items()}


def compare(case: Case, name: str = "") -> None:
    stock, ours = engines(case, name)
    tolerance = 2e-2 if case.bf16 or case.fp16 else 2e-5
    with counted(deferred_task) as calls:
        for step in range(STEPS):
            expected, losses = (train(engine, step, case) for engine in (stock, ours))
            torch.testing.assert_close(losses, expected, rtol=tolerance, atol=0)
            if case.clip and case.zero:
                norms = [engine.get_global_grad_norm() for engine in (stock, ours)]
                assert abs(norms[1] - norms[0]) <= tolerance * norms[0], norms
    assert calls.call_count == (STEPS * MICROBATCHES if ours.cce_heads else 0)
    cce.require(ours)
    with pytest.raises(RuntimeError, match="no head of this engine"):
        cce.require(stock)
    assert_same(parameters(ours), parameters(stock), ours.module, tolerance)


def check_report(case: Case) -> None:
    """The z-loss of the section is reported, and in losses of training alone: in evaluation ours is the loss that stock has."""
    stock, engine = engines(case)
    plain, evaluation = (evaluated(each, case) for each in (stock, engine))
    torch.testing.assert_close(evaluation, plain, rtol=2e-5, atol=0)
    losses = train(engine, 9, case)
    loss = torch.tensor(losses[-1])
    assert losses[0] > plain + 0.5
    if isinstance(case, Pipe):
        evaluated(engine, case)  # what is reported is of the training step, as with DeepSpeed's own
    parts = engine.get_additional_losses()
    assert tuple(parts) == ("nll", "z_loss", "entropy")
    torch.testing.assert_close(parts["nll"] + parts["z_loss"], loss, rtol=2e-5, atol=0)
    assert parts["z_loss"] > 0.1 and 0 < parts["entropy"] < math.log(VOCAB)


def check_filter(case: Case) -> None:
    """Catches: a filter that is lost on its way, or given other tokens than a microbatch's; a part of d_hidden left out."""
    engine = pipeline(case, ours=True) if isinstance(case, Pipe) else engine_of(Model(), True, case)
    module, data = engine.module, batches(0, False, data_rank(engine, case))
    body, head = module.forward_funcs[-2:] if isinstance(case, Pipe) else (module.block, module.lm_head)
    (name,) = (name for name, parameter in module.named_parameters() if parameter is head.weight)
    before = parameters(engine)
    with watched(body) as (hidden, d_hidden):
        train(engine, 0, case)
    tokens = [labels for _, (_, labels) in zip(range(MICROBATCHES), data, strict=False)]
    if not isinstance(case, Pipe):  # whose model shifts its labels
        tokens = [labels[:, 1:] for labels in tokens]
        hidden, d_hidden = ([each[:, :-1] for each in of] for of in (hidden, d_hidden))
    counted = [labels != IGNORED for labels in tokens]
    weights = [mask / (MICROBATCHES * mask.sum()) for mask in counted]
    how = {"shard": VocabShard.even(VOCAB, dist.group.WORLD)} if isinstance(case, Pipe) else {}
    assert_filtered(
        (hidden, d_hidden),
        (before[name], (before[name] - parameters(engine)[name]) / 0.5),
        [*zip(tokens, weights, strict=True)],
        GradFilter(FILTER["filter_eps"], always=True),
        None if isinstance(case, Pipe) else dist.group.WORLD,
        linear_bias=before.get("lm_head.bias"),
        **how,
    )


def logits_of(engine: Any, case: Case) -> Any:
    data = batches(9, False, data_rank(engine, case))
    if isinstance(case, Pipe):
        return engine.eval_batch(data, return_logits=True)[1]
    answer = engine(next(data)[0])
    return answer[-1] if isinstance(answer, tuple) else answer.logits


@torch.no_grad()
def check_evaluation(case: Case, name: str = "") -> None:
    """Evaluate, return logits, save, and load into another engine of the same sharding."""
    stock, ours = engines(case, name)
    for engine in (stock, ours):
        with torch.enable_grad():
            train(engine, 0, case)
    losses = [evaluated(engine, case) for engine in (stock, ours)]
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-5, atol=0)
    if not isinstance(case, Pipe) or case.model == 1:
        torch.testing.assert_close(logits_of(ours, case), logits_of(stock, case), rtol=2e-5, atol=2e-5)
    other = pipeline(case, ours=case.model > 1) if isinstance(case, Pipe) else stock
    with shared_folder() as folder:
        ours.save_checkpoint(folder, tag="x")
        dist.barrier()
        other.load_checkpoint(folder, tag="x", load_module_only=isinstance(case, Pipe))
    torch.testing.assert_close(evaluated(other, case), losses[1], rtol=0, atol=1e-6)


def check_pipeline_require(case: Pipe) -> None:
    engine = pipeline(case, ours=True)
    if engine.is_last_stage():
        head = engine.module.forward_funcs[-1]
        engine.module.loss_fn = lambda hidden, labels: cce.loss_fn(F.linear(hidden, head.weight), labels)
    engine.train_batch(batches(0, False, 0))
    asked = pytest.raises(RuntimeError, match="none asked the head") if engine.is_last_stage() else nullcontext()
    with asked:
        cce.require(engine)


def check_said_once(rows: int, build: Callable, *args: Any) -> None:
    """One line of one rank, though DeepSpeed's logger drops all below a warning, says what computes the loss."""
    (line,) = said_by_all(build, *args)
    assert f"rows [0, {rows}) of {VOCAB}; Options(grad_filter=None" in line and "workspace_bytes=None" in line


def make_mpu(model: int) -> Any:
    """Return the model axis over neighbouring ranks, data over the rest."""
    world, mpu = dist.get_world_size(), SimpleNamespace()
    for kind, many in (
        ("model", [list(range(first, first + model)) for first in range(0, world, model)]),
        ("data", [list(range(first, world, model)) for first in range(model)]),
    ):
        group: Any = dist.new_subgroups_by_enumeration(many)[0]
        for what, value in (("group", group), ("rank", group.rank()), ("world_size", group.size())):
            setattr(mpu, f"get_{kind}_parallel_{what}", lambda value=value: value)
    return mpu


def check_sequence_shards(zero: int) -> None:
    """Give each rank half of the sequences, rank 1 in one microbatch no label; plain torch has them whole."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    parallel_state_sp.initialize_sequence_parallel(sequence_parallel_size=2)
    model = Model()
    reference = copy.deepcopy(model)
    case = Case(zero=zero, clip=0.0, section={"sequence_mean": True})
    engine = engine_of(model, True, case, parallel_state_sp)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    here = slice(0, SEQ // 2) if dist.get_rank() == 0 else slice(SEQ // 2, SEQ)
    for step in range(STEPS):
        data = batches(step, False, 0)
        for micro in range(MICROBATCHES):
            ids, labels = next(data)
            if micro == 1:
                labels[:, SEQ // 2 :] = IGNORED
            whole = reference(ids, shift_labels=labels)[0]
            (whole / MICROBATCHES).backward()
            loss = engine(ids[:, here], shift_labels=labels[:, here])[0]
            torch.testing.assert_close(loss, whole, rtol=2e-5, atol=0)
            engine.backward(loss)
            engine.step()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(parameters(engine), dict(reference.named_parameters()), engine.module, 2e-5)
    if zero == 3:
        with pytest.raises(ValueError, match="averages the gradients of some parameters over these ranks"):
            engine_of(Model(), True, dataclasses.replace(case, reduce_scatter=False), parallel_state_sp)


def check_refusals() -> None:
    """Raise on models that cannot be taken over, and on a loss outside of forward. test_convert.py has more models."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    def refused(model: nn.Module, message: str, **config: Any) -> None:
        with pytest.raises(ValueError, match=message):
            cce.initialize(model=model, config=ds_config(True, Case()) | config)

    refused(Model(), "vocab_parallel_lm_head", tensor_parallel={"autotp_size": 2})
    refused(Model(lambda: cce.CCEHead(HIDDEN, VOCAB, tp_rank=0, tp_size=2)), "needs mpu=")
    embedding, tied = TiedLayerSpec("e", nn.Embedding, VOCAB, HIDDEN), TiedLayerSpec("e", nn.Embedding, VOCAB, HIDDEN)
    for layers, loss, message in (
        ([embedding, LayerSpec(Block)], cce.loss_fn, "cannot take over a head that is a Block"),
        ([embedding, tied], cce.loss_fn, "a tied head needs"),
        ([embedding, LayerSpec(nn.Linear, HIDDEN, VOCAB)], None, "with a loss_fn"),
    ):
        refused(PipelineModule(layers, num_stages=2, loss_fn=loss), message)
    pipe = PipelineModule([embedding, LayerSpec(nn.Linear, HIDDEN, VOCAB)], num_stages=2, loss_fn=cce.loss_fn)
    refused(pipe, "not for pipelines", cce_dist={"enabled": True, "head": "1"})
    with pytest.raises(RuntimeError, match="nothing has turned cce_dist on"):
        cce.CCEHead(HIDDEN, VOCAB, tp_rank=0, tp_size=2)(torch.zeros(1, HIDDEN))

    engine = engine_of(Model(), True, Case(zero=1))
    ids = torch.zeros(1, 2, dtype=torch.long)
    with pytest.raises(RuntimeError, match="in the model's forward"):
        F.cross_entropy(engine(ids)[-1].flatten(0, 1), ids.flatten())


ON_TWO_RANKS: list[tuple[Callable, Any]] = [
    (compare, Pipe(pipe=2, clip=0.1, zero=1)),
    (compare, Pipe(pipe=2, tied=True, checkpoint=True)),
    (compare, Pipe(model=2, tied=True, zero=1, weighted=True)),
    (compare, Pipe(pipe=2, weighted=True, bf16=True, zero=1)),
    (compare, Pipe(pipe=2, fp16=True, zero=1)),
    (compare, Case(zero=3)),
    (compare, Case(zero=3, fp16=True, tied=True)),
    (compare, Case(zero=3, offload=True, tied=True)),
    (check_evaluation, Pipe(pipe=2)),
    (check_evaluation, Pipe(model=2, tied=True)),
    (check_evaluation, Case(zero=3)),
    (check_report, Pipe(pipe=2, section=REPORT)),
    (check_report, Pipe(model=2, tied=True, section=REPORT)),
    (check_report, Case(zero=3, section=REPORT)),
    (check_filter, Pipe(model=2, section=FILTER)),
    (check_filter, Case(zero=2, clip=0.0, section=FILTER)),
    (check_filter, Case(zero=3, clip=0.0, section=FILTER)),
    (check_pipeline_require, Pipe(pipe=2)),
]
ON_FOUR_RANKS: list[tuple[Callable, Any]] = [
    (compare, Pipe(pipe=2, model=2, zero=1, clip=0.1)),
    (compare, Pipe(pipe=2, model=2, tied=True, checkpoint=True)),
    (compare, Case(zero=2, split=True)),
    (compare, Case(zero=3, split=True)),
    (check_report, Pipe(pipe=2, model=2, section=REPORT)),
]


def two_ranks() -> None:
    on_ranks(ON_TWO_RANKS)
    run(check_said_once, VOCAB, engine_of, Model(), True, Case())
    run(check_said_once, VOCAB, pipeline, Pipe(pipe=2), True)
    run(check_said_once, 19, pipeline, Pipe(model=2), True)
    for zero in (0, 2, 3):
        run(check_sequence_shards, zero)
    run(check_refusals)
    if importlib.util.find_spec("transformers") is None:
        return
    run(compare, Case(zero=2, bf16=True), "Llama")
    run(compare, Case(zero=3, tied=True, num_items=7), "Llama")
    run(compare, Case(zero=1, tied=True), "Gemma2")
    run(check_evaluation, Case(zero=1, tied=True), "Gemma2")
    # The last one: AutoTP changes DeepSpeed's state for good.
    run(compare, Case(zero=3, tied=True, autotp=2), "Llama")


def on_ranks(checks: list[tuple[Callable, Any]]) -> None:
    begin_deepspeed()
    for check, case in checks:
        run(check, case)


def run(check: Callable, *args: Any) -> None:
    """Run a check on a DeepSpeed that remembers no groups of the one before; say which failed."""
    from deepspeed.utils import groups

    groups._release_process_group_references()
    try:
        check(*args)
    except Exception as error:
        raise AssertionError(f"{check.__name__}{args}: {error}") from error


@needs_deepspeed
@pytest.mark.slow
def test_two_ranks() -> None:
    run_ranks(two_ranks, 2)


@pytest.mark.slow
@needs_deepspeed
def test_four_ranks() -> None:
    run_ranks(on_ranks, 4, ON_FOUR_RANKS)


ON = {"cce_dist": {"enabled": True, "filter": "plain"}}


def test_install_twice_reads_the_section_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's ``initialize`` makes no engine here, so that no group of ranks is needed."""
    deepspeed = pytest.importorskip("deepspeed")

    def initialize(args: Any = None, model: Any = None, config: Any = None, mpu: Any = None, config_params: Any = None):
        return SimpleNamespace(module=model), None, None, None

    monkeypatch.setattr(deepspeed, "initialize", initialize)
    monkeypatch.setattr(cce.engine, "convert", lambda engine, options: setattr(engine, "cce_heads", options))  # pyright: ignore
    own, model, before = deepspeed.initialize, Model(), cce_engine.num_converted
    cce.install()
    cce.install()
    assert deepspeed.initialize.cce_original is own
    for call in (deepspeed.initialize, cce.initialize):
        assert call(model=model, config_params=ON)[0].cce_heads.grad_filter is not None
        assert not hasattr(call(model=model, config=None)[0], "cce_heads")
    assert cce_engine.num_converted - before == 2
    with pytest.raises(ValueError, match='has no key "fliter"'):
        deepspeed.initialize(model=model, config={"cce_dist": {"enabled": True, "fliter": "plain"}})
    with pytest.raises(ValueError, match="converted already: leave out"):
        cce.initialize(model=cce_dist.convert(model), config=ON)
    cce.uninstall()
    assert deepspeed.initialize is own
    deepspeed.initialize = cce.initialize
    with pytest.raises(RuntimeError, match=r"in place of the assignment call .*install\(\)"):
        deepspeed.initialize(model=model, config=ON)


def test_a_section_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hugging_face, "section_of_trainer", lambda: ON["cce_dist"])
    with pytest.raises(RuntimeError, match='nobody has read "cce_dist" of ds_config'):
        cce_dist.require(Model())
    with pytest.raises(ValueError, match="is enabled in ds_config, and"):
        cce_dist.convert(Model())


@needs_deepspeed
@pytest.mark.slow
def test_launcher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "beside.py").touch()
    (tmp_path / "train.py").write_text(
        "import sys, beside, deepspeed\nprint(hasattr(deepspeed.initialize, 'cce_original'), __name__, sys.argv[1:])\n"
    )
    command = [sys.executable, "-m", "cce_dist.integrations.deepspeed", "--local_rank=0", str(tmp_path / "train.py")]
    done = subprocess.run([*command, "--lr", "1"], capture_output=True, text=True, cwd=tmp_path.parent)
    assert done.returncode == 0, done.stderr
    assert "True __main__ ['--local_rank=0', '--lr', '1']" in done.stdout
    assert "no model was converted: no ds_config that reached" in done.stderr
    with pytest.raises(SystemExit):
        main([str(tmp_path / "absent.py")])
    assert "no such script" in capsys.readouterr().err


Z_LOSS = {"enabled": True, "z_loss_weight": 1.0}
SECTIONS: dict[str, dict | None] = {
    "on": {"enabled": True},
    "z-loss": Z_LOSS,
    "off": {"enabled": False},
    "absent": None,
}


def losses_of(engine: Any, case: Case) -> list[float]:
    """Return the losses of a step whose learning rate is 0, and of an evaluation."""
    return [*train(engine, 0, case), evaluated(engine, case).item()]


def one_after_another(make: Callable[[], Any], case: Case) -> None:
    """Engines of one model, each beside the first engine of a copy of it. Catches what an earlier engine left behind."""
    import deepspeed

    def engine(model: Any, section: dict | None, initialize: Callable) -> Any:
        config = ds_config(True, case)
        config["cce_dist"] = section
        if section is None:
            del config["cce_dist"]
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
        return initialize(model=model, optimizer=optimizer, config=config)[0]

    expected = {name: losses_of(engine(make(), section, cce.initialize), case) for name, section in SECTIONS.items()}
    assert expected["z-loss"][0] > expected["off"][0] + 0.5, expected
    model, before = make(), None
    for number, name in enumerate(("z-loss", "on", "z-loss", "off", "z-loss", "absent", "on", "absent")):
        own = engine(model, SECTIONS[name], deepspeed.initialize if number == 5 else cce.initialize)
        found = losses_of(own, case)
        torch.testing.assert_close(found, expected[name], rtol=2e-5, atol=0, msg=lambda m, n=name: f"{n}: {m}")
        if before is not None:
            with pytest.raises(RuntimeError, match=r"no head of this engine|a later engine has taken over the model"):
                cce.require(before)
        before = own
        if SECTIONS[name] in (SECTIONS["on"], Z_LOSS):
            cce.require(own)
            with pytest.raises(ValueError, match='has no key "fliter"'):
                engine(model, {"enabled": True, "fliter": "plain"}, cce.initialize)
            with pytest.raises(ValueError, match=r"which .* does not have|not for pipelines"):
                engine(model, {"enabled": True, "head": "absent"}, cce.initialize)
            cce.require(own)  # a refused engine takes nothing
    if not isinstance(case, Pipe):
        other = engine(copy.deepcopy(engine(model, Z_LOSS, cce.initialize).module), None, deepspeed.initialize)
        torch.testing.assert_close(losses_of(other, case), expected["off"], rtol=2e-5, atol=0)


def engines_of_one_model() -> None:
    begin_deepspeed()
    run(one_after_another, Model, Case())
    run(one_after_another, lambda: Model(tied=True), Case(zero=2, tied=True))
    for tied in (False, True):
        run(one_after_another, lambda tied=tied: pipeline_module(Pipe(tied=tied)), Pipe(tied=tied))
    run(tied_heads_are_one_product)
    run(losses_may_be_modules)
    run(layers_without_a_gradient)
    run(what_initialize_reads)
    run(plain_initialize_says_that_it_ignores_the_section)


class WithBias(nn.Embedding):
    """An embedding with a parameter that its lookup does not use."""

    def __init__(self, rows: int, hidden_size: int) -> None:
        super().__init__(rows, hidden_size)
        self.bias = nn.Parameter(torch.zeros(VOCAB))


def tied_heads_are_one_product() -> None:
    """Catches a norm, a cap or a bias around the product that is dropped, and a parameter called bias that is added."""
    wrong: list[Callable] = [
        lambda owner, hidden: F.linear(F.rms_norm(hidden, (HIDDEN,)), owner.weight),
        lambda owner, hidden: 30 * torch.tanh(F.linear(hidden, owner.weight) / 30),
        lambda owner, hidden: F.linear(hidden * hidden.abs(), owner.weight),
        lambda owner, hidden: F.linear(hidden, owner.weight, owner.bias),
    ]
    for function in wrong:
        module = pipeline_module(Pipe(tied=True), kind=WithBias, head=function)
        with pytest.raises(ValueError, match="is not hidden @ weight"):
            cce.initialize(model=module, config=ds_config(True, Pipe()))
    found = []
    for ours in (False, True):
        module = pipeline_module(Pipe(tied=True), kind=WithBias)
        module.tied_modules["embedding"].bias.data.fill_(3.0)
        engine = pipeline(Pipe(), ours, module)
        found.append([engine.train_batch(batches(step, False, 0)).item() for step in range(STEPS)])
    assert found[1] == pytest.approx(found[0], rel=2e-5)


class Loss(nn.Module):
    """A loss_fn with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, logits: Any, labels: Tensor) -> Tensor:
        return self.scale[0] * cce.loss_fn(logits, labels)


def losses_may_be_modules() -> None:
    """Catches a module that is not taken over, loses its parameters, or is not given back."""
    import deepspeed

    module, loss = pipeline_module(Pipe()), Loss()
    module.loss_fn = loss
    names = [name for name, _ in module.named_parameters()]
    engine = pipeline(Pipe(), True, module)
    engine.train_batch(batches(0, False, 0))
    cce.require(engine)
    assert [name for name, _ in module.named_parameters()] == names and "loss_fn.scale" in names
    deepspeed.initialize(model=module, config=ds_config(False, Pipe()))
    assert module.loss_fn is loss


def layers_without_a_gradient() -> None:
    """Catches a reentrant checkpoint of ids behind which only the head trains."""
    module = pipeline_module(Pipe())
    module.activation_checkpoint_interval = 1
    engine = cce.initialize(model=module, config=ds_config(True, Pipe(), pipeline={"use_reentrant": True}))[0]
    with pytest.raises(RuntimeError, match="the layers before would not train"):
        engine.train_batch(batches(0, False, 0))


def what_initialize_reads() -> None:
    """Catches a section that is read from one place alone, and values of other sections that end in an error of Python."""
    config = ds_config(True, Case())
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(config, file)
        file.flush()
        for given in (
            {"config_params": config},
            {"config": file.name},
            {"args": SimpleNamespace(deepspeed_config=file.name)},
            {"args": SimpleNamespace(deepscale_config=file.name)},
        ):
            assert cce.initialize(model=Model(), **given)[0].cce_heads
    for wrong in (None, True, 2, "2", [2], {"autotp_size": None}, {"autotp_size": "2"}, {"autotp_size": 1.5}):
        with pytest.raises(ValueError, match="tensor_parallel"):
            cce.initialize(model=Model(), config=config | {"tensor_parallel": wrong})
    model = Model()
    with pytest.raises(ValueError, match="there is no sequence parallelism"):
        cce.initialize(model=model, config=config | {"cce_dist": {"enabled": True, "sequence_mean": True}})
    assert type(model.lm_head) is nn.Linear


def plain_initialize_says_that_it_ignores_the_section() -> None:
    """Catches a warning for engines of ours, and for sections that are off."""
    import deepspeed

    patching.say_once.cache_clear()
    for call, enabled in itertools.product((cce.initialize, deepspeed.initialize), (False, True)):
        with redirect_stderr(io.StringIO()) as said:
            call(model=Model(), config=ds_config(enabled, Case()))
        assert ("ignores the section" in said.getvalue()) == (enabled and call is deepspeed.initialize)
    assert "cce_dist.integrations.deepspeed.install()" in said.getvalue()


@needs_deepspeed
@pytest.mark.slow
def test_engines_of_one_model() -> None:
    run_ranks(engines_of_one_model, 1)


def test_a_package_is_seen_at_once_or_when_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a warning that needs cce_dist imported before deepspeed, or behind it."""
    (tmp_path / "young.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[Any] = []
    for name in ("json", "young"):
        on_import(name, seen.append)
    assert seen == [json]
    young = importlib.import_module("young")
    assert seen == [json, young]
