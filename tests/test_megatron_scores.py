"""Megatron's ``output_processor`` with ours: scores and gradients of a real GPTModel, beside those of its own logits.

megatron-core before 0.18 has no such argument: there a stand-in calls the processor as 0.18 does. ``launch/rl_packages.sh``
runs this file with newer ones. test_rl.py runs what needs ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core")

from dense_scores import dense_scores, policy_loss
from test_megatron import BATCH, SEQ, VOCAB, Case, batch, build, on_layout, takes_a_processor, with_processor

from cce_dist.integrations import megatron as cce
from cce_dist.integrations.megatron import scores
from cce_dist.verify.check import assert_no_worse

TEMPERATURE = torch.linspace(0.5, 2, BATCH * SEQ).view(BATCH, SEQ)


def processor(**wanted: Any) -> Any:
    return cce.log_probs_processor(**wanted) if takes_a_processor() else scores._Processor(1.0, None, wanted)


def by_logits(model: Any, inputs: dict[str, Tensor], labels: Tensor) -> tuple[Tensor, Tensor]:
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

    return dense_scores(gather_from_tensor_model_parallel_region(model(**inputs)), labels, TEMPERATURE)


def step(model: Any, ours: bool) -> dict[str, Tensor]:
    """Return scores and all gradients. Labels outside the vocabulary give neither."""
    inputs, labels = batch(model)
    outside = (labels < 0) | (labels >= VOCAB)
    if ours:
        found = with_processor(model)(
            **inputs,
            labels=labels,
            output_processor=processor(entropy=True, argmax=True),
            output_processor_context={"temperature": TEMPERATURE},
        )
        log_probs, entropy = found.log_probs, found.entropy
        assert found.argmax.shape == found.lse.shape == (BATCH, SEQ) and found.log_probs.is_contiguous()
    else:
        log_probs, entropy = (x.masked_fill(outside, 0) for x in by_logits(model, inputs, labels.clamp(0, VOCAB - 1)))
    policy_loss(log_probs, entropy).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"log_probs": log_probs, "entropy": entropy, **gradients}


def on_one_layout(case: Case) -> None:
    for convert in (False, True):
        models = [build(case)[0] for _ in range(3)]
        results = [
            step(cce.convert(models[0]) if convert else models[0], ours=True),
            step(models[1], ours=False),
            step(models[2].double(), ours=False),
        ]
        assert results[0].keys() == results[1].keys() == results[2].keys() and len(results[0]) > 10
        for name in results[0]:
            ours, baseline, truth = (result[name] for result in results)
            assert_no_worse(ours, baseline, truth, quantity=f"{name}, converted: {convert}")


def over_two_ranks(sequence_parallel: bool) -> None:
    """Catches hidden states taken for whole, labels of another order, a gradient that is summed twice, never or elsewhere."""
    on_layout(Case(tp=2, sequence_parallel=sequence_parallel, tied=sequence_parallel), on_one_layout)
    if not sequence_parallel:
        on_layout(Case(tp=2), what_is_not_served)


def what_is_not_served(case: Case) -> None:
    model = with_processor(build(case)[0])
    inputs, labels = batch(model)
    for given, message in (
        ({}, "the call has no labels"),
        (
            {"labels": labels, "output_processor_context": {"top_p": 0.9}},
            "has temperature, top_p, and only temperature",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            model(**inputs, **given, output_processor=processor())
    model.output_layer.bias = torch.nn.Parameter(torch.zeros(VOCAB // 2))
    with pytest.raises(ValueError, match="of this model: its output_layer has a bias"):
        model(**inputs, labels=labels, output_processor=processor())


def test_a_megatron_without_the_hook_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import megatron.core
    from megatron.core.models.gpt import GPTModel

    if takes_a_processor():
        assert callable(cce.log_probs_processor(entropy=True))
        with pytest.raises(TypeError, match="unexpected argument 'entropies'"):
            cce.log_probs_processor(entropies=True)
        monkeypatch.setattr(GPTModel, "forward", lambda self, input_ids: None)
    with pytest.raises(
        RuntimeError, match=r"needs megatron-core >= 0.18, .* output_processor; \d+\.\d+\.\d+ has none"
    ) as error:
        cce.log_probs_processor()
    assert megatron.core.__version__ in str(error.value) and "\n" not in str(error.value)
