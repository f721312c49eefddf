"""transformers' own Trainer on two ranks, beside a stock run: DDP, FSDP2, ZeRO-2 and ZeRO-3, saved and resumed."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from support.ranks import run_ranks
from tiny_trainer import (
    STEPS,
    Sentences,
    arguments,
    assert_same_log,
    assert_same_parameters,
    forget,
    logged,
    metrics,
    over_ranks,
    prepare_rank,
    saved,
    tiny_model,
    zero,
)

import cce_dist
from cce_dist.integrations import deepspeed as cce

TOLERANCE = 2e-5
WRAP = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    model: str = "Llama"
    tied: bool = False
    way: str = "convert"  # or "section": of ds_config, read after install()
    zero: int | None = None
    fsdp: bool = False
    rows: bool = False  # the head stays split under FSDP2
    recompute: bool = False
    metrics: bool = False
    resume: bool = False

    def wrapper(self) -> str:
        """Return the class that Trainer trains."""
        if self.fsdp:
            return f"FSDP{self.model}ForCausalLM"
        return "DistributedDataParallel" if self.zero is None else "DeepSpeedEngine"


CASES = [
    Case("ddp", metrics=True, resume=True),
    Case("fsdp2", fsdp=True, tied=True, recompute=True, metrics=True, resume=True, model="Gemma2"),
    Case("fsdp2-rows", fsdp=True, rows=True, tied=True, metrics=True, resume=True, model="Gemma2"),
    Case("zero2", zero=2, way="section", metrics=True),
    Case("zero3", zero=3, way="section", recompute=True, metrics=True, resume=True),
    Case("zero3-converted", zero=3, tied=True, model="Gemma2", metrics=True),
]


def trainer(case: Case, ours: bool, folder: Path, **more: Any) -> Any:
    from transformers import Trainer

    forget()
    if case.recompute:
        more |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    if case.zero is not None:
        section = {"cce_dist": {"enabled": True}} if ours and case.way == "section" else {}
        more["deepspeed"] = zero(case.zero, **section)
    if case.fsdp:
        # An optimizer without state has none that FSDP2 could load.
        more |= {
            **({"optim": "adamw_torch", "learning_rate": 1e-2} if case.resume else {}),
            "fsdp": True,
            "fsdp_config": {"version": 2, "state_dict_type": "FULL_STATE_DICT", **WRAP},
        }
    mesh = over_ranks() if ours and case.rows else None
    args = arguments(folder, **more)
    model = tiny_model(case.model, tie_word_embeddings=case.tied)
    if ours and case.way == "convert":
        cce_dist.convert(model, shard_over=mesh)
    if ours and case.way == "section":
        cce.install()
    return Trainer(
        model,
        args,
        train_dataset=Sentences(),
        eval_dataset=Sentences(6),
        compute_metrics=metrics if case.metrics else None,
    )


def compare(case: Case, folder: Path) -> None:
    logs = []
    for ours in (False, True):
        run = trainer(
            case, ours, folder / str(ours), save_strategy="steps", save_steps=STEPS // 2, save_only_model=False
        )
        run.train()
        assert type(run.model_wrapped).__name__ == case.wrapper()
        run.evaluate()
        run.save_model(str(folder / str(ours) / "saved"))
        logs.append(logged(run))
        if ours:
            cce_dist.require(run.model)
    assert_same_log(logs[1], logs[0], TOLERANCE)
    if dist.get_rank() == 0:
        assert_same_parameters(saved(folder / "True" / "saved"), saved(folder / "False" / "saved"), TOLERANCE)
    if case.resume:
        again = trainer(case, True, folder / "again")
        again.train(resume_from_checkpoint=str(folder / "True" / f"checkpoint-{STEPS // 2}"))
        losses = [[entry["loss"] for entry in log if "loss" in entry] for log in (logs[1], logged(again))]
        assert losses[1][-STEPS // 2 :] == losses[0][-STEPS // 2 :]


def two_ranks(folder: Path) -> None:
    prepare_rank()
    for case in CASES:
        if case.zero is not None and find_spec("deepspeed") is None:
            continue
        try:
            compare(case, folder / case.name)
        except Exception as error:
            raise AssertionError(f"{case}: {error}") from error
    torch.use_deterministic_algorithms(False)


@pytest.mark.slow
def test_trainer(tmp_path: Path) -> None:
    run_ranks(two_ranks, 2, tmp_path, timeout_seconds=240)
