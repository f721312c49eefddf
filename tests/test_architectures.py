"""A few architectures of transformers through the script that counts all of them."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from count_architectures import compare, difference, quiet

NAMES = ["LlamaForCausalLM", "RobertaForCausalLM", "CohereForCausalLM", "MixtralForCausalLM", "Inkling2ForCausalLM",
         "MambaForCausalLM", "BartForConditionalGeneration", "UMT5ForConditionalGeneration",
         "Gemma3ForConditionalGeneration"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_equal(name: str) -> None:
    quiet()
    result = compare(name)
    assert result.outcome == "equal", result


def test_the_script_sees_a_difference() -> None:
    import torch

    one = torch.ones(())
    assert difference(one, {"a": torch.ones(2)}, one, {"a": torch.ones(2) * 1.001})[0] == "differs"
    assert difference(one, {"a": torch.ones(2)}, one, {})[0] == "differs"
    assert difference(one, {"a": torch.ones(2)}, one, {"a": torch.ones(2)})[0] == "equal"
