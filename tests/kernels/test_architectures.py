"""A few architectures of transformers, whose loss and gradients ``convert`` leaves equal."""

import logging

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from support.architectures import compare, difference, names_of, quiet, run

NAMES = [f"{name}ForCausalLM" for name in ("Llama", "Roberta", "Cohere", "Mixtral", "Inkling2", "Mamba")]
NAMES += [f"{name}ForConditionalGeneration" for name in ("Bart", "UMT5", "Gemma3")]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("cce_dist", "transformers"):
        caplog.set_level(logging.ERROR, name)  # which gives the levels back
    quiet()


@pytest.mark.parametrize("name", NAMES)
def test_equal(name: str) -> None:
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    result = compare(name)
    assert result.outcome == "equal", result


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mapping", ["causal_lm", "image_text_to_text", "masked_lm", "seq_to_seq_causal_lm"])
def test_every_class_is_equal_or_says_why_not(mapping: str) -> None:
    results = [run(name, limit_seconds=120) for name in names_of(mapping)]
    wrong = [result for result in results if result.outcome in ("differs", "no answer")]
    assert not wrong and sum(result.outcome == "equal" for result in results) > len(results) / 2, wrong


def test_a_difference_is_seen() -> None:
    one, gradients = torch.ones(()), {"a": torch.ones(2)}
    for ours, outcome in (({"a": torch.ones(2) * 1.001}, "differs"), ({}, "differs"), (gradients, "equal")):
        assert difference(one, gradients, one, ours)[0] == outcome
