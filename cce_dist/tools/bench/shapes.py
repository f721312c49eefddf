"""Choices of options, by name: heads of well-known models, tasks of log-probabilities, columns of tables."""

from __future__ import annotations

import argparse
import re
from typing import NamedTuple

from cce_dist.tools.plan.sizes import MODELS


class HeadShape(NamedTuple):
    """Hidden size D and vocabulary size V of a head; V is the number of rows of the published weight."""

    hidden_size: int
    vocab_size: int


_KNOWN = "gemma-3-270m gemma-3-1b qwen-3-0.6b llama-3.2-1b gemma-2-2b gemma-2-9b gemma-2-27b llama-3-8b qwen-2.5-7b"
_KNOWN += " qwen-2.5-32b mistral-nemo phi-3.5 gpt-2"
SHAPES = {name: HeadShape(MODELS[name].hidden_size, MODELS[name].vocab_size) for name in _KNOWN.split()}
SHAPES |= {"qwen-3-8b": HeadShape(4096, 151_936), "toy": HeadShape(256, 4_096)}  # the last for a CPU, and for tests


def shape_of(name: str) -> HeadShape:
    """Return a shape of ``SHAPES``, or D 2,048 and V 32,768 for "2048x32768"."""
    if name in SHAPES:
        return SHAPES[name]
    if not (sizes := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", name)):
        raise argparse.ArgumentTypeError(
            f"{name!r} is neither D x V, such as 2048x32768, nor one of {', '.join(SHAPES)}"
        )
    return HeadShape(int(sizes[1]), int(sizes[2]))


def shape(text: str) -> str:
    """Read the name of a shape."""
    shape_of(text)
    return text


LOG_PROBS = {  # tasks: ids of a token, whether entropies too, how many of the largest logits, whether gradients
    "entropy": (1, True, 0, True),
    "ids-1": (1, False, 0, True),
    "ids-64": (64, False, 0, True),
    "ids-128": (128, False, 0, True),
    "scores": (1, True, 64, False),
}
KEPT_IDS = {"kept-64": 64, "kept-512": 512}  # tasks: ids of a token's list
COMPILE = {
    "no": ("",),
    "layers": ("layers",),
    "yes": ("all",),
    "both": ("", "all"),
}  # --compile: what torch.compile wraps
COLUMNS = {  # names of --columns: headings of a case's table
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
    "gathered": "gathered MiB",
    "scattered": "scattered MiB",
}
