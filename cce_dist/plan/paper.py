"""Table A4 of *Cut Your Losses in Large-Vocabulary Language Models* (Wijmans et al., ICLR 2025), computed beside its numbers.

The table asks for the largest batch on 16 GPUs of 80 GB whose weights are fully sharded, before and after the logits are gone.
Its rule, in MiB of all GPUs together, 75 GiB of each: logits take 4 bytes for each token and id, activations 2 bytes for each
token, layer and hidden element, weights with optimizer and gradients 8 bytes a parameter. The rule undercounts a dense loss, as
the paper says itself, and what training keeps besides; ``plan`` counts those.
"""

from __future__ import annotations

from typing import NamedTuple

from cce_dist.plan.sizes import MODELS

NUM_GPUS, GPU_MIB, TOKENS = 16, 75 * 1024, 65536


class Row(NamedTuple):
    """A model of the table, with the paper's numbers in MB and tokens.

    Attributes:
        title: As the paper names it.
        name: As this project does.
        vocab_size: Ids as the paper counts them: the tokenizer's, without padding.
        logits, activations, weights: MB of 65,536 tokens, and of weights, optimizer and gradients.
        before, after: Tokens of the largest batch with logits and without.
    """

    title: str
    name: str
    vocab_size: int
    logits: int
    activations: int
    weights: int
    before: int
    after: int


TABLE = [
    Row("GPT 2", "gpt-2", 50_257, 12_564, 1_152, 1_045, 5_866_190, 69_845_595),
    Row("GPT Neo (1.3 B)", "gpt-neo-1.3b", 50_257, 12_564, 6_144, 10_421, 4_268_047, 12_996_042),
    Row("GPT Neo (2.7 B)", "gpt-neo-2.7b", 50_257, 12_564, 10_240, 20_740, 3_471_784, 7_731_585),
    Row("Gemma (2 B)", "gemma-2b", 256_000, 64_000, 4_608, 19_121, 1_155_515, 17_204_330),
    Row("Gemma 2 (27 B)", "gemma-2-27b", 256_000, 64_000, 26_496, 207_727, 739_448, 2_525_554),
    Row("Gemma 2 (2 B)", "gemma-2-2b", 256_000, 64_000, 7_488, 19_946, 1_108_206, 10_580_057),
    Row("Llama 2 (13 B)", "llama-2-13b", 32_000, 8_000, 25_600, 99_303, 2_203_057, 2_891_512),
    Row("Llama 2 (7 B)", "llama-2-7b", 32_000, 8_000, 16_384, 51_410, 3_164_429, 4_709_560),
    Row("Llama 3 (70 B)", "llama-3-70b", 128_256, 32_064, 81_920, 538_282, 397_019, 552_414),
    Row("Llama 3 (8 B)", "llama-3-8b", 128_256, 32_064, 16_384, 61_266, 1_579_333, 4_670_136),
    Row("Mistral 7 B", "mistral-7b", 32_000, 8_000, 16_384, 55_250, 3_154_108, 4_694_200),
    Row("Mixtral 8x7B", "mixtral-8x7b", 32_000, 8_000, 16_384, 356_314, 2_344_949, 3_489_944),
    Row("Phi 1.5", "phi-1.5", 50_295, 12_574, 6_144, 10_821, 4_264_482, 12_991_781),
    Row("Phi 3 Medium", "phi-3-medium", 32_011, 8_003, 25_600, 106_508, 2_188_824, 2_873_067),
    Row("Qwen 1.5 (7 B)", "qwen-1.5-7b", 151_646, 37_912, 16_384, 58_909, 1_412_087, 4_679_564),
]


class Computed(NamedTuple):
    """The same numbers from sizes."""

    logits: float
    activations: float
    weights: float
    before: int
    after: int


def compute(row: Row) -> Computed:
    """Return a row by the paper's rule from the model's sizes."""
    model = MODELS[row.name]
    logits = 4 * TOKENS * row.vocab_size / 2**20
    activations = 2 * TOKENS * model.num_layers * model.hidden_size / 2**20
    weights = 8 * model.params / 2**20
    room = NUM_GPUS * GPU_MIB - weights
    return Computed(
        logits, activations, weights, int(room / (logits + activations) * TOKENS), int(room / activations * TOKENS)
    )


def table() -> list[dict[str, str]]:
    """Return the lines of the table, each number beside the paper's."""
    rows = []
    for row in TABLE:
        ours = compute(row)
        columns = {
            "logits MB": (ours.logits, row.logits), "activations MB": (ours.activations, row.activations),
            "weights MB": (ours.weights, row.weights), "largest before": (ours.before, row.before),
            "after": (ours.after, row.after),
        }  # fmt: skip
        cells = {name: f"{said:,.0f} ({paper:,})" for name, (said, paper) in columns.items()}
        gain = f"{ours.after / ours.before:.1f}x ({row.after / row.before:.1f}x)"
        rows.append({"computed (paper)": row.title, **cells, "gain": gain})
    return rows
