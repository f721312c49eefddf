"""TRL's own SFTTrainer on a converted model, beside a stock run: losses, entropy, token accuracy and parameters."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from tiny_trainer import (
    Sentences,
    arguments,
    assert_same_log,
    assert_same_parameters,
    forget,
    logged,
    prepare_rank,
    tiny_model,
)

import cce_dist
from cce_dist.integrations import deepspeed as cce
from cce_dist.ranks import run_ranks

TOLERANCE = 2e-5


def tokenizer() -> Any:
    from tokenizers import Tokenizer as Fast
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(2, 64)} | {"<pad>": 0, "<eos>": 1}
    return PreTrainedTokenizerFast(
        tokenizer_object=Fast(WordLevel(words, unk_token="<eos>")), pad_token="<pad>", eos_token="<eos>"
    )


def sft(model: Any, folder: Path, **more: Any) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = [{"input_ids": x["input_ids"].tolist(), "labels": x["labels"].tolist()} for x in Sentences()]
    args = arguments(folder, SFTConfig, packing=False, bf16=False, gradient_checkpointing=False, **more)
    data = Dataset.from_list(rows)
    return SFTTrainer(model, args, train_dataset=data, eval_dataset=data.select(range(6)), processing_class=tokenizer())


def compare(folder: Path, name: str = "Llama", ours_too: dict | None = None, **more: Any) -> None:
    logs, parameters = [], []
    for ours in (False, True):
        forget()
        model = tiny_model(name)
        if ours and ours_too is None:
            cce_dist.convert(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = sft(model, folder, **(more | (ours_too or {}) if ours else more))
            trainer.train()
            trainer.evaluate()
        logs.append(logged(trainer))
        parameters.append(trainer.accelerator.get_state_dict(trainer.model_wrapped))
        if ours:
            cce_dist.require(trainer.model)
    assert {"entropy", "mean_token_accuracy"} <= logs[0][0].keys()
    assert_same_log(logs[1], logs[0], TOLERANCE)
    if parameters[0] is not None:
        assert_same_parameters(parameters[1], parameters[0], TOLERANCE)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        pytest.param("Llama", {}, id="nll"),
        pytest.param("Gemma2", {}, id="softcap"),
        pytest.param("Llama", {"loss_type": "dft"}, id="dft"),
    ],
)
def test_sft(tmp_path: Path, name: str, more: dict) -> None:
    compare(tmp_path, name, **more)


def test_what_sft_cannot_have_is_one_line(tmp_path: Path) -> None:
    forget()
    with pytest.raises(ValueError, match="log-probabilities, which have no z-loss"):
        sft(cce_dist.convert(tiny_model(), z_loss_weight=0.1), tmp_path).train()


def test_a_call_that_asks_for_more_is_left_to_trl() -> None:
    """Temperature and mean logits are not what SFTTrainer asks for. A training forward then says that we were not asked."""
    from trl.trainer.utils import add_fused_lm_head

    ids = torch.arange(1, 13).view(1, 12)
    others: list[dict[str, Any]] = [{"temperature": 0.5}, {"outputs": ("log_probs", "mean_logits")}]
    for more in others:
        model = cce_dist.convert(tiny_model())
        add_fused_lm_head(model, **more)
        with torch.no_grad():
            assert model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs.shape == (1, 11)
        with pytest.raises(RuntimeError, match="ended without asking the head"):
            model(input_ids=ids, labels=ids, fused_lm_head=True)


def test_labels_that_are_shifted_already() -> None:
    from trl.trainer.utils import add_fused_lm_head

    ids = torch.arange(1, 13).view(1, 12)
    shifted = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:]
    results = []
    for ours in (False, True):
        model = cce_dist.convert(tiny_model()) if ours else tiny_model()
        add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
        results.append(model(input_ids=ids, shift_labels=shifted, fused_lm_head=True))
    for field in ("loss", "log_probs", "entropy", "is_top1", "label_mask"):
        torch.testing.assert_close(
            results[1][field], results[0][field], rtol=TOLERANCE, atol=TOLERANCE, check_dtype=False
        )


def two_ranks(folder: Path) -> None:
    prepare_rank()
    zero = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    compare(folder)
    cce.install()
    compare(folder, deepspeed=zero, ours_too={"deepspeed": zero | {"cce_dist": {"enabled": True}}})


@pytest.mark.slow
def test_sft_on_two_ranks(tmp_path: Path) -> None:
    run_ranks(two_ranks, 2, tmp_path)
