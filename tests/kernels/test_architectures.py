"""A few architectures of transformers, whose loss and gradients ``convert`` leaves equal."""

import logging
from collections.abc import Iterator

import pytest

pytest.importorskip("transformers")

import transformers
from support.architectures import compare, difference, names_of, quiet, run

NAMES = [
    "LlamaForCausalLM",
    "RobertaForCausalLM",
    "CohereForCausalLM",
    "MixtralForCausalLM",
    "Inkling2ForCausalLM",
    "MambaForCausalLM",
    "BartForConditionalGeneration",
    "UMT5ForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    ours = logging.getLogger("cce_dist")
    level, verbosity = ours.level, transformers.logging.get_verbosity()
    quiet()
    yield
    ours.setLevel(level)
    transformers.logging.set_verbosity(verbosity)


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
    import torch

    one = torch.ones(())
    assert difference(one, {"a": torch.ones(2)}, one, {"a": torch.ones(2) * 1.001})[0] == "differs"
    assert difference(one, {"a": torch.ones(2)}, one, {})[0] == "differs"
    assert difference(one, {"a": torch.ones(2)}, one, {"a": torch.ones(2)})[0] == "equal"
