"""What options of the benchmark name: heads of well-known models, tasks of log-probabilities, columns."""

from __future__ import annotations

from typing import NamedTuple


class HeadShape(NamedTuple):
    """Hidden size D and vocabulary size V of a head: the rows of the published weight."""

    hidden_size: int
    vocab_size: int


SHAPES = {
    "gemma-3-270m": HeadShape(640, 262_144),
    "gemma-3-1b": HeadShape(1152, 262_144),
    "qwen-3-0.6b": HeadShape(1024, 151_936),
    "llama-3.2-1b": HeadShape(2048, 128_256),
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
LOG_PROBS = {  # tasks: ids of a token, whether entropies too, how many of the largest logits, whether gradients
    "entropy": (1, True, 0, True),
    "ids-1": (1, False, 0, True),
    "ids-64": (64, False, 0, True),
    "ids-128": (128, False, 0, True),
    "scores": (1, True, 64, False),
}
KEPT_IDS = {"kept-64": 64, "kept-512": 512}  # tasks: ids of a token's list
COLUMNS = {  # what --columns calls the columns of a case's table
    "fwd": "fwd ms (IQR)",
    "fwd/1": "/1 GEMM",
    "total": "fwd+bwd ms (IQR)",
    "total/3": "/3 GEMMs",
    "total/4": "/4 GEMMs",
    "host": "host ms",
    "first": "first s",
    "MiB": "MiB",
    "dE": "err dE",
    "dC": "err dC",
    "mean-dE": "err mean dE",
    "loss": "err loss",
    "sends": "sends",
    # Of whole steps alone.
    "tokens/s": "tokens/s",
    "stock": "x stock",
    "value": "loss",
    "longest": "longest",
    "gathered": "gathered MiB",
    "scattered": "scattered MiB",
}
