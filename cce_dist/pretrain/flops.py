"""Model FLOPs, for the share of a GPU's peak that a run reaches."""

from __future__ import annotations

import torch

from cce_dist.pretrain.recipe import Recipe, Shape

# Dense bf16 TFLOP/s by part of the device's name, from NVIDIA's data sheets; the SXM modules.
PEAKS = {"B200": 2250.0, "H200": 989.0, "H100": 989.0, "A100": 312.0}


def per_token(shape: Shape) -> float:
    """Return the FLOPs of a token's forward and backward pass, recomputation not counted.

    A matrix takes two FLOPs a weight forward and four backward; the embedding is no product. Causal attention multiplies with
    half of the sequence on average, twice. The count is PaLM's (Chowdhery et al., 2022, appendix B), but for the half.
    """
    hidden = shape.hidden_size
    layer = 4 * hidden * hidden + 3 * hidden * shape.num_ffn
    weights = shape.num_layers * layer + hidden * shape.vocab_size
    return 6.0 * weights + 6.0 * shape.num_layers * hidden * shape.seq_len


def peak(recipe: Recipe, device: torch.device) -> float | None:
    """Return a device's FLOP/s at its best; None where nobody knows, such as for a CPU or in fp32."""
    if recipe.peak_tflops is not None:
        return recipe.peak_tflops * 1e12
    if device.type != "cuda" or recipe.dtype != "bfloat16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((value * 1e12 for part, value in PEAKS.items() if part in name), None)
