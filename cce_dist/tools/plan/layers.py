"""The layers between embedding and head: time, activations, and the memory of the parameters on a rank.

What a layer keeps for backward follows *Reducing Activation Recomputation in Large Transformer Models* (Korthikanti et al.),
for attention that does not store its scores.
"""

from __future__ import annotations

import dataclasses

from cce_dist.tools.plan.devices import Device
from cce_dist.tools.plan.head import collective_seconds, slowest
from cce_dist.tools.plan.sizes import Model

RECOMPUTE = ("none", "full")
RANKS = {  # numbers of ranks by their names in ``Layout``, and what they are
    "tp": "tensor-parallel ranks",
    "pp": "pipeline ranks",
    "dp": "data-parallel ranks",
    "cp": "context-parallel ranks",
    "vpp": "chunks of layers per pipeline rank",
    "ep": "expert-parallel ranks",
}

# Bytes that elementwise kernels of a layer of ``pretrain`` read and write per token in bf16, forward and backward, counted from
# its operations. Per hidden element: 20 for norms, 246 for the rotation of queries and keys in fp32, 36 for attention and its
# transposes, 24 for residual sums. Per element of the feed-forward network's inner layer: 58 for gate and product.
EAGER_HIDDEN_BYTES, EAGER_INNER_BYTES = 326, 58
# Plain torch takes 1.85 times as long as these bytes at full bandwidth, because of strided reads and deterministic backwards.
# From the rates of ``pretrain`` and of the same model under DeepSpeed on one H200.
STRIDED = 1.85


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a model is split over ranks, and what a microbatch is."""

    tp: int = 1  # tensor-parallel size
    pp: int = 1  # pipeline-parallel size
    dp: int = 1  # data-parallel size
    cp: int = 1  # context-parallel size
    vpp: int = 1  # chunks of layers per pipeline rank
    ep: int = 1  # expert-parallel size, among data- and context-parallel ranks; their all-to-alls take no time
    zero_stage: int = 1  # data-parallel ranks split 1 the optimizer's state, 2 also gradients, 3 also weights
    num_tokens: int = 8192  # of a microbatch on one rank
    seq_len: int = 0  # tokens that attention looks over; 0 leaves out its products of queries and keys
    recompute: str = "none"  # "full": a layer keeps nothing but its input
    sequence_parallel: bool = True  # activations between tensor-parallel products are slices
    framework: str = "megatron"  # or "deepspeed", "torchtitan", "torch", whose losses and dtypes are planned
    elementwise: float = 0.0  # share of plain torch's elementwise bytes that a layer moves; 0: all are hidden

    @property
    def num_gpus(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def num_slices(self) -> int:
        """Number of slices of activations between tensor-parallel products."""
        return self.tp if self.sequence_parallel else 1


@dataclasses.dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer and microbatch, forward and backward. Nothing overlaps the collectives."""

    products: float
    collectives: float

    @property
    def seconds(self) -> float:
        return self.products + self.collectives


def layer_time(model: Model, layout: Layout, device: Device) -> LayerTime:
    """Predict the time of a layer. Elementwise kernels take none, unless ``layout.elementwise``."""
    num_passes = 4 if layout.recompute == "full" else 3
    operations = 2.0 * model.active_params * layout.num_tokens
    # Causal: half of all pairs, two products; flash attention's backward takes 2.5 times its forward.
    attention = 2.0 * layout.num_tokens * layout.seq_len * model.query_size
    products = (num_passes * operations + (num_passes + 0.5) * attention) / layout.tp / device.flops
    products *= slowest(layout.tp)
    moved = EAGER_HIDDEN_BYTES * model.width / layout.num_slices + EAGER_INNER_BYTES * model.ffn_size / layout.tp
    products += layout.elementwise * STRIDED * moved * layout.num_tokens / device.bandwidth
    whole = 2 * layout.num_tokens * model.width
    name, count = ("all_gather", 8) if layout.sequence_parallel else ("all_reduce", 4)
    return LayerTime(products, count * collective_seconds(name, whole, layout.tp, device))


def activation_bytes(model: Model, layout: Layout) -> int:
    """Return the bytes that a layer keeps for the backward pass of one microbatch, in bf16."""
    between = 2 * model.width // layout.num_slices
    if layout.recompute == "full":
        return layout.num_tokens * between
    # Inputs and outputs of two norms; queries, keys, values, attention's output, inner activations; the log-sum-exp in fp32.
    split = 2 * model.kept_size + 4 * model.num_heads
    return layout.num_tokens * (4 * between + split // layout.tp)


def stage_activations(model: Model, layout: Layout, layers: int, rank: int) -> int:
    """Return the bytes of activations that this number of layers holds on a pipeline rank."""
    chunks = layout.pp - rank  # in flight at most, in the 1F1B schedule or the interleaved one
    if layout.vpp > 1:
        chunks = 2 * (chunks - 1) + (layout.vpp - 1) * layout.pp + 1
    kept = activation_bytes(model, layout) * layers * chunks // layout.vpp
    if layers and layout.recompute == "full":  # one layer at a time is recomputed
        kept += activation_bytes(model, dataclasses.replace(layout, recompute="none"))
    return kept


def state_bytes(params: int, experts: int, layout: Layout) -> dict[str, int]:
    """Return the bytes of a rank's weights, gradients and optimizer state, by item.

    ``params`` includes the experts, which ``ep`` ranks share unless data parallelism splits them already. Under FSDP2
    weights are fp32; else bf16, with gradients, a copy and two moments in fp32.
    """
    ways = layout.dp * layout.cp
    stage = layout.zero_stage if layout.framework in ("megatron", "deepspeed") else 3
    by_stage = [ways if stage >= least else 1 for least in (3, 2, 1)]
    if layout.framework in ("megatron", "deepspeed"):
        names = ("weights", "main_grad", "optimizer")
        sizes = (2, 4, 12)
    else:
        names, sizes = ("weights", "gradients", "optimizer"), (4, 4, 8)
    unsplit = params - experts + experts // layout.ep
    counts = [params // split if split > 1 else unsplit for split in by_stage]
    return {name: size * count for name, size, count in zip(names, sizes, counts, strict=True)}
