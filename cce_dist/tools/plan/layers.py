"""A layer between embedding and head: its parameters' bytes, its activations, its time. And what a stage of them holds.

Source of what a layer keeps for backward: *Reducing Activation Recomputation in Large Transformer Models* (Korthikanti et al.),
with attention that does not hold its scores.
"""

from __future__ import annotations

import dataclasses

from cce_dist.tools.plan.devices import COSTS, Device
from cce_dist.tools.plan.head import collective_seconds
from cce_dist.tools.plan.sizes import Model

RECOMPUTE = ("none", "full")

# Bytes that a layer of ``pretrain`` reads and writes in 16 bits for each token, forward and backward, products left out. They
# are counted from its operations. Each hidden element has 20 of norms, 246 of the rotation of queries and keys in fp32, 36 of
# attention and its transposes, 24 of residual sums; each element of the inner layer has 58 of gate and product.
EAGER_HIDDEN_BYTES, EAGER_INNER_BYTES = 326, 58
# Plain torch takes so much longer than those bytes: strided reads, deterministic backwards. The factor is from the rates of
# ``--engine torch`` and ``deepspeed`` on one H200.
STRIDED = 1.85


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a model is split over ranks, and what a microbatch is.

    Attributes:
        tp, pp, dp, cp: Tensor-, pipeline-, data- and context-parallel size.
        vpp: Chunks of layers of a pipeline rank.
        ep: Ranks that share the experts, among the data- and context-parallel ones. Their all-to-alls take no time.
        zero_stage: What is split over data-parallel ranks: 1 the optimizer's state, 2 gradients too, 3 weights too; 0 nothing.
        num_tokens: Tokens of a microbatch on one rank.
        seq_len: Tokens that attention looks over; 0: its products of queries and keys are left out.
        recompute: "none", or "full": a layer keeps its input alone.
        sequence_parallel: Activations between tensor-parallel products are slices.
        elementwise: Bytes that elementwise kernels of a layer move, over those of plain torch; 0: they are fused, and hidden.
        host: An engine of ``devices.HOSTS`` whose launches count; "": a host that is never waited for.
        framework: "megatron", "deepspeed", "torchtitan" or "torch": who keeps gradients in which dtype, and which losses.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    vpp: int = 1
    ep: int = 1
    zero_stage: int = 1
    num_tokens: int = 8192
    seq_len: int = 0
    recompute: str = "none"
    sequence_parallel: bool = True
    framework: str = "megatron"
    elementwise: float = 0.0
    host: str = ""

    @property
    def num_gpus(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def in_slices(self) -> int:
        """Ranks that activations between tensor-parallel products are split over."""
        return self.tp if self.sequence_parallel else 1


@dataclasses.dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer and microbatch, forward and backward: products, and collectives that nothing covers."""

    products: float
    collectives: float

    @property
    def seconds(self) -> float:
        return self.products + self.collectives


def layer_time(model: Model, layout: Layout, device: Device) -> LayerTime:
    """Predict a layer. Its elementwise kernels are taken to be fused, and hidden, unless the layout says that they are not."""
    num_passes = 4 if layout.recompute == "full" else 3
    operations = 2.0 * model.active_params * layout.num_tokens
    # Causal: half of all pairs, two products; flash attention's backward takes 2.5 times its forward.
    attention = 2.0 * layout.num_tokens * layout.seq_len * model.query_size
    slowest = 1.0 + COSTS.slowest * (layout.tp.bit_length() - 1)
    products = (num_passes * operations + (num_passes + 0.5) * attention) / layout.tp / device.flops * slowest
    moved = EAGER_HIDDEN_BYTES * model.width / layout.in_slices + EAGER_INNER_BYTES * model.ffn_size / layout.tp
    products += layout.elementwise * STRIDED * moved * layout.num_tokens / device.bandwidth
    whole = 2 * layout.num_tokens * model.width
    name, count = ("all_gather", 8) if layout.sequence_parallel else ("all_reduce", 4)
    return LayerTime(products, count * collective_seconds(name, whole, layout.tp, device))


def activation_bytes(model: Model, layout: Layout) -> int:
    """Return the bytes that a layer keeps of one microbatch for backward, in 16 bits."""
    between = 2 * model.width // layout.in_slices
    if layout.recompute == "full":
        return layout.num_tokens * between
    # Inputs and outputs of two norms; queries, keys, values, attention's output, inner widths; the log-sum-exp in fp32.
    split = 2 * model.kept_size + 4 * model.num_heads
    return layout.num_tokens * (4 * between + split // layout.tp)


def stage_activations(model: Model, layout: Layout, layers: int, rank: int) -> int:
    """Return the bytes of activations that so many layers of a pipeline rank hold."""
    kept = activation_bytes(model, layout) * layers * chunks_in_flight(layout, rank) // layout.vpp
    if layers and layout.recompute == "full":  # the one layer that is recomputed for its backward
        kept += activation_bytes(model, dataclasses.replace(layout, recompute="none"))
    return kept


def chunks_in_flight(layout: Layout, rank: int) -> int:
    """Return the microbatches' chunks whose activations a pipeline rank holds: one-forward-one-backward, or interleaved."""
    if layout.vpp == 1:
        return layout.pp - rank
    return 2 * (layout.pp - rank - 1) + (layout.vpp - 1) * layout.pp + 1


def state_bytes(params: int, experts: int, layout: Layout) -> dict[str, int]:
    """Return the bytes of the parameters of a rank and of what training keeps for each, by item.

    ``experts`` of the parameters are shared over ``ep`` ranks, unless data parallelism splits them already. Weights are bf16.
    Megatron and DeepSpeed add gradients up in fp32, and their optimizer has an fp32 copy and two moments; torch's fully sharded
    parameters are fp32 themselves.
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
