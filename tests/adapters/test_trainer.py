"""transformers' own Trainer on one rank, beside a stock run; what it cannot have is one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tiny_trainer import (
    VOCAB,
    Sentences,
    arguments,
    assert_same_log,
    assert_same_parameters,
    counted,
    forget,
    logged,
    metrics,
    tiny_model,
)

import cce_dist
from cce_dist.integrations.deferred import tensor as deferred_tensor

TOLERANCE = 2e-5


def loss_of_logits(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs.logits[:, :-1].reshape(-1, VOCAB)
    return F.cross_entropy(logits, labels[:, 1:].reshape(-1), reduction="sum") / (num_items_in_batch or 1)


def trained(folder: Path, ours: bool, model: Any, more: dict, of_trainer: dict) -> Any:
    from transformers import Trainer

    forget()
    if ours:
        cce_dist.convert(model)
    args = arguments(folder, **more)
    trainer = Trainer(model, args, train_dataset=Sentences(), eval_dataset=Sentences(6), **of_trainer)
    trainer.train()
    trainer.evaluate()
    return trainer


CASES: dict[str, tuple[str, dict, dict]] = {
    "softcap, tied": ("Gemma2", {"gradient_checkpointing": True}, {}),
    "compute_metrics": ("Llama", {}, {"compute_metrics": metrics}),
    "compute_loss_func": ("Llama", {}, {"compute_loss_func": loss_of_logits}),
    "compiled": ("Llama", {"torch_compile": True, "torch_compile_backend": "eager"}, {}),
}


@pytest.mark.parametrize(
    ("name", "more", "of_trainer"),
    [pytest.param(*case, id=key, marks=[pytest.mark.slow] * (key == "compiled")) for key, case in CASES.items()],
)
def test_trainer(tmp_path: Path, name: str, more: dict, of_trainer: dict) -> None:
    with counted(deferred_tensor, "dense") as computed:
        stock, ours = (trained(tmp_path, ours, tiny_model(name), more, of_trainer) for ours in (False, True))
    cce_dist.require(ours.model)
    assert_same_log(logged(ours), logged(stock), TOLERANCE)
    assert_same_parameters(dict(ours.model.named_parameters()), dict(stock.model.named_parameters()), TOLERANCE)
    wanted = 3 if "compute_metrics" in of_trainer else 0  # batches of the evaluation
    assert computed == [wanted]


def test_generate_in_training_mode_and_resized_embeddings() -> None:
    stock, ours = tiny_model(), cce_dist.convert(tiny_model())
    ids = Sentences()[0]["input_ids"][None]
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

    ids = Sentences()[0]["input_ids"][None]
    expected = tiny_model().eval()(input_ids=ids, labels=ids)
    model = tiny_model().eval()
    if converted == "before":
        cce_dist.convert(model)
    dispatch_model(
        model,
        {"model": "cpu", "lm_head": "disk"},
        main_device=torch.device("cpu"),
        offload_dir=tmp_path,
        force_hooks=True,
    )
    cce_dist.convert(model)
    with torch.no_grad(), counted(deferred_tensor, "dense") as computed:
        found = model(input_ids=ids, labels=ids)
        torch.testing.assert_close(found.loss, expected.loss)
        assert computed == [0]
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
        with pytest.raises(ValueError, match=message) as error:
            cce_dist.convert(model)
        assert "\n" not in str(error.value)
