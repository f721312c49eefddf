"""transformers' own Trainer beside a stock run: on one rank, and on two by DDP, FSDP2, ZeRO-2 and ZeRO-3, saved and resumed."""

import dataclasses
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from support.ranks import run_ranks
from support.refused import refused
from tiny_trainer import (
    STEPS,
    VOCAB,
    arguments,
    assert_same,
    counted,
    forget,
    logged,
    prepare_rank,
    sentences,
    tiny_model,
    zero,
)

import cce_dist
from cce_dist.integrations import deepspeed as cce
from cce_dist.integrations.deferred import tensor as deferred_tensor

TOLERANCE = 2e-5


def loss_of_logits(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs.logits[:, :-1].reshape(-1, VOCAB)
    return F.cross_entropy(logits, labels[:, 1:].reshape(-1), reduction="sum") / (num_items_in_batch or 1)


@dataclasses.dataclass(frozen=True)
class Case:
    model: str = "Llama"  # or "Gemma2", whose head is tied
    way: str = "convert"  # or "section": of ds_config, read after install()
    zero: int | None = None
    fsdp: bool = False
    rows: bool = False  # the head stays split under FSDP2
    recompute: bool = False
    metrics: bool = False
    resume: bool = False
    loss: Any = None
    more: dict[str, Any] = dataclasses.field(default_factory=dict)  # of TrainingArguments


ON_ONE_RANK = {
    "softcap, tied": Case("Gemma2", more={"gradient_checkpointing": True}),
    "compute_metrics": Case(metrics=True),
    "compute_loss_func": Case(loss=loss_of_logits),
    "compiled": Case(more={"torch_compile": True, "torch_compile_backend": "eager"}),
}
ON_TWO_RANKS = {
    "ddp": Case(metrics=True, resume=True),
    "fsdp2": Case("Gemma2", fsdp=True, recompute=True, metrics=True, resume=True),
    "fsdp2-rows": Case("Gemma2", fsdp=True, rows=True, metrics=True, resume=True),
    "zero2": Case(zero=2, way="section", metrics=True),
    "zero3": Case(zero=3, way="section", recompute=True, metrics=True, resume=True),
    "zero3-converted": Case("Gemma2", zero=3, metrics=True),
}


def metrics(prediction: Any) -> dict[str, float]:
    right = prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]
    return {"accuracy": float(right.mean()), "size": float(abs(prediction.predictions).mean())}


def trainer(case: Case, ours: bool, folder: Path, **more: Any) -> Any:
    from transformers import Trainer

    forget()
    more |= case.more
    if case.recompute:
        more |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    if case.zero is not None:
        section = {"cce_dist": {"enabled": True}} if ours and case.way == "section" else {}
        more["deepspeed"] = zero(case.zero, **section)
    if case.fsdp:
        # An optimizer without state has none that FSDP2 could load.
        more |= {"optim": "adamw_torch", "learning_rate": 1e-2, "fsdp": True}
        wrap = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
        more["fsdp_config"] = {"version": 2, "state_dict_type": "FULL_STATE_DICT", **wrap}
    mesh = None
    if ours and case.rows:  # Accelerate's FSDP2 leaves the head alone
        os.environ["FSDP_IGNORED_MODULES"] = "lm_head"
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    args = arguments(folder, **more)
    model = tiny_model(case.model)
    if ours and case.way == "convert":
        cce_dist.convert(model, shard_over=mesh)
    if ours and case.way == "section":
        cce.install()
    data: dict[str, Any] = {"train_dataset": sentences(), "eval_dataset": sentences(6)}
    return Trainer(model, args, compute_metrics=metrics if case.metrics else None, compute_loss_func=case.loss, **data)


def compare(case: Case, folder: Path) -> None:
    from safetensors.torch import load_file

    logs = []
    for ours in (False, True):
        of_steps = {"save_strategy": "steps", "save_steps": STEPS // 2, "save_only_model": False}
        run = trainer(case, ours, folder / str(ours), **of_steps)
        run.train()
        wrapper = "DistributedDataParallel" if case.zero is None else "DeepSpeedEngine"
        wrapper = f"FSDP{case.model}ForCausalLM" if case.fsdp else wrapper
        assert not dist.is_initialized() or type(run.model_wrapped).__name__ == wrapper
        run.evaluate()
        run.save_model(str(folder / str(ours) / "saved"))
        logs.append(logged(run))
        if ours:
            cce_dist.require(run.model)
    assert_same(logs[1], logs[0], TOLERANCE)
    if not dist.is_initialized() or dist.get_rank() == 0:
        saved = [load_file(folder / name / "saved" / "model.safetensors") for name in ("False", "True")]
        assert_same(saved[1], saved[0], TOLERANCE)
    if case.resume:
        again = trainer(case, True, folder / "again")
        again.train(resume_from_checkpoint=str(folder / "True" / f"checkpoint-{STEPS // 2}"))
        losses = [[entry["loss"] for entry in log if "loss" in entry] for log in (logs[1], logged(again))]
        assert losses[1][-STEPS // 2 :] == losses[0][-STEPS // 2 :]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "compiled")) for n in ON_ONE_RANK])
def test_trainer(tmp_path: Path, name: str) -> None:
    with counted(deferred_tensor, "dense") as computed:
        compare(ON_ONE_RANK[name], tmp_path)
    assert computed.call_count == (3 if name == "compute_metrics" else 0)  # batches of the evaluation


def two_ranks(folder: Path) -> None:
    prepare_rank()
    for name, case in ON_TWO_RANKS.items():
        if case.zero is not None and find_spec("deepspeed") is None:
            continue
        try:
            compare(case, folder / name)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.slow
def test_trainer_on_two_ranks(tmp_path: Path) -> None:
    run_ranks(two_ranks, 2, tmp_path, timeout_seconds=240)


def test_generate_in_training_mode_and_resized_embeddings() -> None:
    stock, ours = tiny_model(), cce_dist.convert(tiny_model())
    ids = sentences()[0]["input_ids"][None]
    answers = [model.train().generate(ids, max_new_tokens=4, do_sample=False) for model in (stock, ours)]
    assert torch.equal(answers[0], answers[1])
    for model in (stock, ours):
        torch.manual_seed(0)
        model.resize_token_embeddings(VOCAB + 8, mean_resizing=False)
    with pytest.raises(RuntimeError, match="or convert after the replacement"):
        ours(input_ids=ids, labels=ids)  # the head is another one
    cce_dist.convert(ours)
    losses = [model(input_ids=ids, labels=ids).loss for model in (stock, ours)]
    torch.testing.assert_close(losses[1], losses[0])


@pytest.mark.parametrize("converted", ["before", "after"])
def test_a_dispatched_model(tmp_path: Path, converted: str) -> None:
    """With accelerate's hooks, as ``device_map`` adds them, around every forward; the head's weight is on disk."""
    from accelerate import dispatch_model

    ids = sentences()[0]["input_ids"][None]
    expected = tiny_model().eval()(input_ids=ids, labels=ids)
    model = tiny_model().eval()
    if converted == "before":
        cce_dist.convert(model)
    where: dict[str, Any] = {"model": "cpu", "lm_head": "disk"}
    dispatch_model(model, where, main_device=torch.device("cpu"), offload_dir=tmp_path, force_hooks=True)
    cce_dist.convert(model)
    with torch.no_grad(), counted(deferred_tensor, "dense") as computed:
        found = model(input_ids=ids, labels=ids)
        torch.testing.assert_close(found.loss, expected.loss)
        assert not computed.called
        torch.testing.assert_close(found.logits + 0, expected.logits)
        torch.testing.assert_close(model.forward(input_ids=ids, labels=ids).loss, expected.loss)
    if converted == "after":
        cce_dist.revert(model)
        torch.testing.assert_close(model(input_ids=ids).logits, expected.logits)


def test_a_refused_model_is_one_line() -> None:
    from transformers import LlamaForSequenceClassification

    split, wrapped = tiny_model(), tiny_model()
    split._tp_size = 2
    wrapped.lm_head = torch.nn.Sequential(wrapped.lm_head)
    for model, message in (
        (split, "transformers has split it over 2 ranks"),
        (wrapped, "that is a Sequential"),
        (LlamaForSequenceClassification(split.config), "no language-model head: load it with AutoModelForCausalLM"),
    ):
        with refused(message):
            cce_dist.convert(model)
