"""Heads of well-known models by name, shared by the benchmark and the tests."""

from __future__ import annotations

from typing import NamedTuple


class HeadShape(NamedTuple):
    """Sizes of a language-model head: hidden size D and vocabulary size V.

    The vocabulary is the number of rows of the published weight. Final softcaps (Gemma 2) are left out, since several of
    the libraries compared with have none.
    """

    hidden_size: int
    vocab_size: int


SHAPES = {
    "gemma-2-2b": HeadShape(2304, 256_000),
    "gemma-2-9b": HeadShape(3584, 256_000),
    "gemma-2-27b": HeadShape(4608, 256_000),
    "llama-3-8b": HeadShape(4096, 128_256),
    "qwen-2.5-7b": HeadShape(3584, 152_064),
    "qwen-2.5-32b": HeadShape(5120, 152_064),
    "qwen-3-8b": HeadShape(4096, 151_936),
    "mistral-nemo": HeadShape(5120, 131_072),
    "phi-3.5": HeadShape(3072, 32_064),
    "gpt-2": HeadShape(768, 50_257),
    "toy": HeadShape(256, 4_096),  # for a CPU, and for tests
}
