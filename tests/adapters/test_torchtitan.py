"""torchtitan's own trainer, its chunked loss beside ours: logged losses, gradients' norms and parameters of a tiny model."""

import dataclasses
import functools
import importlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny_trainer import counted, name_rank
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

pytest.importorskip("torchtitan")

from support.ranks import Pool, run_ranks
from support.refused import refused

from cce_dist import reference

VOCAB, BATCH, STEPS, OURS = 204, 4, 2, "cce_dist.integrations.torchtitan.cce_loss"
IN_HALVES = {"spmd_backend": "partial_dtensor"}
CASES: dict[str, dict[str, Any]] = {  # fields of torchtitan's ParallelismConfig
    "fsdp": {**IN_HALVES, "fsdp_reshard_after_forward": "always"},  # else the head is whole from the norm on
    "rows": {**IN_HALVES, "shard_over": True},
    "tensor": {**IN_HALVES, "tensor_parallel_degree": 2},
    "context": {**IN_HALVES, "context_parallel_degree": 2},
    "pipeline": {**IN_HALVES, "pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"},
    "fsdp x tensor": {**IN_HALVES, "tensor_parallel_degree": 2},
}
# torchtitan's default backend, and its schedules as they are, need torch 2.14.
IS_NEW = torch.__version__ >= "2.14"
of_new_torch = pytest.mark.skipif(not IS_NEW, reason="torchtitan's default layouts need torch 2.14")
CASES |= {f"default {name}": {key: case[key] for key in case if key not in IN_HALVES} for name, case in CASES.items()}
for schedule in ("GPipe", "Interleaved1F1B"):
    CASES[schedule] = CASES["default pipeline"] | {"pipeline_parallel_schedule": schedule}


# torchtitan on a CPU. It wants one device of a kind that is no CPU, and the torch of the day.


def on_cpu() -> None:
    """Make torchtitan run on this rank's CPU, with the release of torch that is here, as it would on a GPU."""
    name_rank()
    import torch._utils as device

    device._get_available_device_type = lambda: "cpu"
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, Schedule1F1B
    from torch.distributed.tensor.experimental._context_parallel import _attention as context
    from torch.nn.attention.flex_attention import create_block_mask
    from torchtitan import trainer
    from torchtitan.components import metrics
    from torchtitan.distributed import fsdp, utils
    from torchtitan.models.common import attention

    # A CPU has no monitor of its memory, no barrier by device, no compiler here, and no backward of flex attention.
    stats = metrics.DeviceMemStats(*[0] * len(metrics.DeviceMemStats._fields))
    monitor = SimpleNamespace(device_name="cpu", reset_peak_stats=lambda: None, get_peak_stats=lambda: stats)
    stand_ins: list[tuple[Any, str, Any]] = [
        (metrics, "build_device_memory_monitor", lambda: monitor),
        (utils, "set_pg_timeouts", lambda **_: None),
        (attention.FlexAttention, "_compiled_flex_attn", staticmethod(dense_attention)),
        (attention, "_compiled_create_block_mask", create_block_mask),
        (context, "_compiled_create_block_mask", create_block_mask),
        # It sleeps for two seconds after each run.
        (trainer, "time", SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _: None)),
    ]
    # gloo cannot multiply while it sums.
    divide = fsdp.disable_fsdp_gradient_division

    def divide_not(model: nn.Module) -> None:
        divide(model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    stand_ins.append((fsdp, "disable_fsdp_gradient_division", divide_not))

    # Newer schedules take lists of microbatches.
    def step(self: PipelineScheduleSingle, **microbatches: Any) -> None:
        self._stage.has_backward = self._has_backward
        self._stage.clear_runtime_states()
        self._step_microbatches(**microbatches)

    if not IS_NEW:
        stand_ins.append((Schedule1F1B, "step", step))
    for owner, name, stand_in in stand_ins:
        setattr(owner, name, stand_in)


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, scale: float | None, enable_gqa: bool, **_: Any
) -> tuple[Tensor, None]:
    from torch.nn.attention.flex_attention import create_mask

    mask = create_mask(block_mask.mask_mod, q.shape[0], 1, q.shape[2], k.shape[2], device="cpu")
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa), None


@functools.cache
def toy_data() -> Any:
    """Return the config of a loader that gives each data-parallel rank its rows of the same random batches."""
    from torchtitan.components.dataloader import BaseDataLoader

    class Toy(BaseDataLoader):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            infinite: bool = True  # validation sets it

        def __init__(
            self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
        ) -> None:
            self.part = dp_world_size, dp_rank, seq_len, local_batch_size

        def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
            ranks, rank, length, rows = self.part
            draw = torch.Generator().manual_seed(1)
            while True:
                ids = torch.randint(VOCAB, (ranks * rows, length + 1), generator=draw)[rank::ranks]
                labels = ids[:, 1:].clone()
                labels[:, :2] = labels[0, length // 3 :] = -100  # ranks differ in how many tokens count
                yield {"input": ids[:, :-1].contiguous(), "positions": torch.arange(length).repeat(rows, 1)}, labels

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    return Toy.Config()


def config_of(out: Path, parallelism: dict[str, Any]) -> Any:
    """Return torchtitan's debug config of Llama 3, smaller, in fp32."""
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config: Any = llama3_debugmodel()
    model = config.model_spec.model
    model.layers, model.vocab_size = model.layers[: parallelism.get("pipeline_parallel_degree", 1)], VOCAB
    model.tok_embeddings.num_embeddings = model.lm_head.out_features = config.loss.loss_fn.global_vocab_size = VOCAB
    context = "context_parallel_degree" in parallelism
    for layer in () if context else model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.dump_folder = config.hf_assets_path = str(out)
    config.dataloader = config.validator.dataloader = toy_data()
    training = config.training
    training.local_batch_size = BATCH
    training.seq_len = 256 if context else 16
    training.steps = STEPS
    training.disable_cuda_graphs = True
    training.mixed_precision_param = "float32"
    config.optimizer = default_adamw(lr=1e-2, eps=1e-3)  # 1e-8 would make of a rounding a whole step
    config.debug.seed, config.checkpoint.enable = 0, False
    # Torch's schedules of this release evaluate whole batches.
    config.validator.enable = "pipeline_parallel_degree" not in parallelism
    config.validator.steps, config.validator.freq = 1, 2
    for name, value in parallelism.items():
        setattr(config.parallelism, name, value)
    return config


def trained(config: Any) -> tuple[list[tuple], dict[str, Tensor]]:
    """Return what torchtitan's trainer logs, and its parameters, whole."""
    from torch.distributed.tensor import debug

    debug._clear_sharding_prop_cache()  # it has the mesh of an earlier trainer, and FSDP asks for that of this one
    trainer = config.build()
    logs: list[tuple] = []
    trainer.metrics_processor.log = lambda *values, **_: logs.append(values)
    head: Any = trainer.model_parts[-1].lm_head

    def log_validation(loss: float, step: int) -> None:
        held = head.weight.to_local() if isinstance(head.weight, DTensor) else head.weight
        logs.append(("validation", step, loss, held.numel()))  # the head is a piece again

    trainer.metrics_processor.log_validation = log_validation
    trainer.train()
    parameters = {}
    for part in trainer.model_parts:
        for name, parameter in part.named_parameters():
            parameters[name] = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    trainer.close()
    return logs, parameters


def compare_trainers(out: Path, parallelism: dict[str, Any]) -> None:
    over = parallelism.get("shard_over", False)
    parallelism = {name: value for name, value in parallelism.items() if name != "shard_over"}
    stock, expected = trained(config_of(out, parallelism))
    config = config_of(out, parallelism)
    config.override.imports = [(OURS, {"backend": "torch", "workspace_bytes": 1 << 16, "shard_over": over})]
    from cce_dist.integrations import fsdp, torchtitan

    with counted(fsdp if over else torchtitan) as losses, counted(fsdp, "shard_over") as split:
        ours, found = trained(config)
    pipeline = "pipeline_parallel_degree" in parallelism
    validations = sum(log[0] == "validation" for log in ours)
    if pipeline:  # each microbatch, and torch's first look at the shapes of the stages
        assert losses.call_count == (0 if dist.get_rank() == 0 else STEPS * BATCH + 1)
    else:
        assert losses.call_count == STEPS + validations
    assert split.call_count == over and len(ours) == len(stock) == STEPS + validations
    numbers = ([entry[1:] for entry in log] for log in (ours, stock))
    torch.testing.assert_close(*numbers, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def compare_all(out: Path, names: list[str]) -> None:
    on_cpu()
    for name in names:
        try:
            compare_trainers(out, CASES[name])
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error
    if names[0].startswith("fsdp"):
        compare_spmd_types()


def compare_spmd_types() -> None:
    """The losses on plain shards of 102 rows: torch 2.13 runs no trainer of this backend."""
    import spmd_types as spmd
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.distributed import ParallelDims, utils
    from torchtitan.distributed.spmd_types import set_current_spmd_mesh
    from torchtitan.models.common.decoder_sharding import dense_activation_placement, dense_param_placement
    from torchtitan.models.common.linear import Linear
    from torchtitan.protocols.sharding import ShardingConfig

    from cce_dist.integrations import torchtitan

    utils.set_spmd_backend("spmd_types")
    torch.autograd.set_multithreading_enabled(False)
    world, stock = dist.get_world_size(), ChunkedLossWrapper.Config(num_chunks=2)
    stock.loss_fn = CrossEntropyLoss.Config(global_vocab_size=VOCAB)
    dims = ParallelDims(1, world // 2, 1, 2, 1, 1, world)
    replicated, split = (dense_activation_placement(tp=kind) for kind in (spmd.R, spmd.S(-1)))
    sharding = ShardingConfig(
        state_shardings={"weight": dense_param_placement(tp=spmd.S(0))},
        in_src_shardings={"input": replicated},
        in_dst_shardings={"input": replicated},
        out_src_shardings=split,
        out_dst_shardings=split,
    )
    torch.manual_seed(0)
    count, found = torch.tensor(13), []
    hidden, weight = torch.randn(2, 6, 8), torch.randn(VOCAB, 8)
    labels = torch.randint(VOCAB, (2, 6))
    labels[0, 3:] = -100
    for config in (stock, torchtitan.cce_loss(stock)):
        head = Linear.Config(in_features=8, out_features=VOCAB, sharding_config=sharding).build()
        with torch.no_grad():
            head.weight.copy_(weight)
        dims.build_mesh()
        head.parallelize(dims)
        theirs = vars(head)["forward"]
        loss_fn = config.build()
        loss_fn.set_lm_head(head)
        pred = hidden.clone().requires_grad_()
        with set_current_spmd_mesh(dims.spmd_dense_mesh()):
            loss, metrics = loss_fn(pred, labels, count)
            loss.backward()
            with torch.no_grad():
                validation, _ = loss_fn(hidden, labels)
        assert metrics == {} and vars(head)["forward"] is theirs
        found.append((loss.detach(), validation, pred.grad, head.weight.grad))
    assert head.weight.shape[0] < VOCAB  # rows of a shard
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2) as ranks:
        yield ranks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a tokenizer, without which no trainer is made."""
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "a", "eos_token": "a"}))
    return tmp_path


@pytest.mark.parametrize(
    "names",
    [
        ["fsdp", "rows", "tensor"],
        pytest.param(["context", "pipeline"], marks=pytest.mark.slow),
        pytest.param(["default fsdp", "default tensor", "default context"], marks=of_new_torch),
        pytest.param(["default pipeline", "GPipe", "Interleaved1F1B"], marks=of_new_torch),
    ],
    ids="-".join,
)
def test_the_trainer_trains_as_with_its_own_loss(names: list[str], pool: Pool, folder: Path) -> None:
    """Catches a dE that is summed twice, a count of one rank's tokens, and a weight that is read outside of FSDP2's hooks."""
    pool.run(compare_all, folder, names)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp x tensor", pytest.param("default fsdp x tensor", marks=of_new_torch)])
def test_the_same_on_a_mesh_of_two_dimensions(name: str, folder: Path) -> None:
    run_ranks(compare_all, 4, folder, [name])


def load_config(name: str, home: str = "models") -> Any:
    """Return a config of Llama 3 by its name."""
    return getattr(importlib.import_module(f"torchtitan.{home}.llama3.config_registry"), name)()


def test_the_override_is_torchtitans_own() -> None:
    """Catches a key that the config cannot hold, and a chunk number or another field that is lost."""
    from torchtitan.config.override import OverrideConfig, apply_overrides, parse_cli_imports

    config = load_config("llama3_debugmodel")
    config.loss.num_chunks = 3
    imports = parse_cli_imports([OURS + '={"z_loss_weight": 1e-4, "filter": "compensated"}'])
    (line,) = apply_overrides(OverrideConfig(imports=imports), config)
    assert "loss ChunkedLossWrapper.Config -> CCELoss.Config with z_loss_weight=0.0001" in line
    assert config.loss.num_chunks == 3 and config.loss.loss_fn.global_vocab_size == 2048
    assert json.dumps(config.loss.to_dict())
    options = config.loss.build().options
    assert options.z_loss_weight == 1e-4 and options.grad_filter is not None


GRAPH = "graph_trainer_llama3_debugmodel", "experiments.graph_trainer"
REFUSED: dict[str, tuple[tuple[str, ...], dict[str, Any], str]] = {
    "plain": (("llama3_debugmodel_ce_loss",), {}, "got CrossEntropyLoss"),
    "graph": (GRAPH, {}, "got ChunkedLossWrapperWithParamGrads.Config: .*graph_trainer has its own"),
    "key": (("llama3_debugmodel",), {"fliter": "plain"}, 'no key "fliter"'),
    "value": (("llama3_debugmodel",), {"z_loss_weight": -1}, '"z_loss_weight" of cce_'),
}


@pytest.mark.parametrize(("config", "keys", "message"), REFUSED.values(), ids=REFUSED)
def test_other_losses_and_keys_are_one_line(config: tuple[str, ...], keys: dict[str, Any], message: str) -> None:
    from torchtitan.config.override import OverrideConfig, apply_overrides

    with refused(message):
        apply_overrides(OverrideConfig(imports=[(OURS, keys)]), load_config(*config))


def test_what_is_not_served_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan.components import loss as losses
    from torchtitan.distributed import utils

    from cce_dist.integrations import torchtitan

    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    chunked = losses.ChunkedLossWrapper.Config()
    loss = torchtitan.cce_loss(chunked).build()
    with pytest.raises(ValueError, match="a head that is a Scaled: it must be"):
        loss.set_lm_head(Scaled(2, 3))
    chunked.loss_fn = losses.MSELoss.Config()
    with pytest.raises(ValueError, match="the chunked loss is a MSELoss"):
        torchtitan.cce_loss(chunked)
    monkeypatch.setattr(utils, "_spmd_backend", "spmd_types")
    over = torchtitan.cce_loss(losses.ChunkedLossWrapper.Config(), shard_over=True)
    with pytest.raises(ValueError, match=r"shard_over needs parallelism.spmd_backend"):
        over.build()
    monkeypatch.setattr(utils, "_spmd_backend", "partial_dtensor")
    with pytest.raises(ValueError, match="shard_over found no head"):
        over.build().set_lm_head(nn.Linear(2, 3))
    monkeypatch.setattr(utils, "_spmd_backend", "full_dtensor")
    with pytest.raises(ValueError, match="spmd_backend to be one of spmd_types, partial_dtensor"):
        torchtitan.cce_loss(losses.ChunkedLossWrapper.Config()).build()


def test_the_keys_are_for_training_alone() -> None:
    """Catches a z-loss or smoothing in validation, whose losses are compared with others."""
    from torchtitan.components.loss import ChunkedLossWrapper

    from cce_dist.integrations import torchtitan

    head, hidden, labels = nn.Linear(8, 11), torch.randn(1, 4, 8), torch.tensor([[1, 2, -100, 4]])
    loss = torchtitan.cce_loss(ChunkedLossWrapper.Config(), z_loss_weight=0.5, label_smoothing=0.1).build()
    loss.set_lm_head(head)
    options: dict[str, Any] = {"z_loss_weight": 0.5, "label_smoothing": 0.1}
    trained, plain = (reference.cross_entropy(head(hidden), labels, reduction="sum", **o).loss for o in (options, {}))
    torch.testing.assert_close(loss(hidden, labels)[0], trained)
    head.eval()
    torch.testing.assert_close(loss(hidden, labels)[0], plain)
    torch.testing.assert_close(loss(hidden, labels, torch.tensor(6), positions=None)[0], plain / 6)
