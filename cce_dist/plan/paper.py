"""The table behind figure 1 of *Cut Your Losses in Large-Vocabulary Language Models* (Wijmans et al., ICLR 2025), computed.

The paper asks for the largest batch on 16 GPUs of 80 GB whose weights are fully sharded, with activation checkpoints and a
16-bit AdamW, before and after the logits are gone. It lists memory at a batch of 65,536 tokens. The rule here, in MiB of all
GPUs together, 75 GiB of each: logits take 4 bytes for each token and id, activations 2 bytes for each token, layer and hidden
element, weights with optimizer and gradients 8 bytes a parameter. Such a rule undercounts a dense loss, and what training keeps
besides; ``plan`` counts those.

The paper's own numbers do not stand here: no copy of its table could be read to check them.
"""

from __future__ import annotations

from typing import NamedTuple

from cce_dist.plan.sizes import MODELS, Model

NUM_GPUS, GPU_MIB, TOKENS = 16, 75 * 1024, 65536

TITLES = {
    "GPT 2": "gpt-2", "GPT Neo (1.3 B)": "gpt-neo-1.3b", "GPT Neo (2.7 B)": "gpt-neo-2.7b", "Gemma (2 B)": "gemma-2b",
    "Gemma 2 (27 B)": "gemma-2-27b", "Gemma 2 (2 B)": "gemma-2-2b", "Llama 2 (13 B)": "llama-2-13b",
    "Llama 2 (7 B)": "llama-2-7b", "Llama 3 (70 B)": "llama-3-70b", "Llama 3 (8 B)": "llama-3-8b", "Mistral 7 B": "mistral-7b",
    "Mixtral 8x7B": "mixtral-8x7b", "Phi 1.5": "phi-1.5", "Phi 3 Medium": "phi-3-medium", "Qwen 1.5 (7 B)": "qwen-1.5-7b",
}  # fmt: skip


class Computed(NamedTuple):
    """MiB of 65,536 tokens, and of weights, optimizer and gradients; tokens of the largest batch with logits and without."""

    logits: float
    activations: float
    weights: float
    before: int
    after: int


def compute(model: Model) -> Computed:
    """Return a model's row by the rule."""
    logits = 4 * TOKENS * model.vocab_size / 2**20
    activations = 2 * TOKENS * model.num_layers * model.hidden_size / 2**20
    weights = 8 * model.params / 2**20
    room = NUM_GPUS * GPU_MIB - weights
    return Computed(
        logits, activations, weights, int(room / (logits + activations) * TOKENS), int(room / activations * TOKENS)
    )


def table() -> list[dict[str, str]]:
    """Return the lines of the table."""
    rows = []
    for title, name in TITLES.items():
        ours = compute(MODELS[name])
        rows.append({
            "model": title, "logits MiB": f"{ours.logits:,.0f}", "activations MiB": f"{ours.activations:,.0f}",
            "weights MiB": f"{ours.weights:,.0f}", "largest before": f"{ours.before:,}", "after": f"{ours.after:,}",
            "gain": f"{ours.after / ours.before:.1f}x",
        })  # fmt: skip
    return rows
