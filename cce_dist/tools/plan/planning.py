"""A plan: each loss's cost, cut, memory and largest microbatch; and a step on more GPUs."""

from __future__ import annotations

import dataclasses
from bisect import bisect
from collections.abc import Sequence
from typing import Any, cast

from cce_dist.tools.plan.cut import Cut, best_cut, even_cut
from cce_dist.tools.plan.devices import DEVICES, GPUS_PER_NODE, Device
from cce_dist.tools.plan.head import Cost, Head, collective_seconds, cost
from cce_dist.tools.plan.layers import RANKS, RECOMPUTE, LayerTime, Layout, layer_time, stage_activations, state_bytes
from cce_dist.tools.plan.sizes import MODELS, Model, check_size, named, padded

MIB = 2**20
GLOBAL_TOKENS = 4 << 20  # of a step, over all GPUs
MOST_TOKENS = 1 << 23  # of a microbatch on one rank; larger ones are not tried
VOCAB_MULTIPLE = 128  # times tp: Megatron's default of --make-vocab-size-divisible-by
USABLE = 0.94  # share of a GPU's memory; CUDA's context, NCCL and fragmentation take the rest

# Each framework's own losses, by the names that a plan has for them.
METHODS = {
    "megatron": {"dense": "megatron", "fused": "megatron-fused"},
    "deepspeed": {"dense": "deepspeed", "fused": "deepspeed-liger"},
    "torchtitan": {"dense": "torch", "fused": "torch-compile"},
    "torch": {"dense": "torch", "fused": "torch-compile"},
}
LOSSES = ("dense", "fused", "kept", "budget", "filtered")


@dataclasses.dataclass(frozen=True)
class LossPlan:
    """A plan with one loss."""

    loss: str  # "dense" and "fused", the framework's own, "kept", "budget" or "filtered"
    cost: Cost  # what the head adds
    layers: float  # the head's seconds over a layer's
    cut: Cut  # the best cut
    default_cut: Cut  # the even cut, which frameworks make by default
    last_stage: dict[str, int]  # bytes by item, with the best cut
    first_stage: dict[str, int]
    largest_tokens: int  # of the largest microbatch with which both stages fit, at most ``MOST_TOKENS``; 0: none fits


@dataclasses.dataclass(frozen=True)
class Plan:
    """A plan of a model on a layout: a ``LossPlan`` for each loss of ``LOSSES``, in their order."""

    model: Model  # with the vocabulary that Megatron pads
    given_vocab_size: int
    layout: Layout
    device: Device
    layer: LayerTime
    losses: list[LossPlan]

    @property
    def body(self) -> float:
        """Seconds of all layers for one microbatch, without the head."""
        return self.model.num_layers * self.layer.seconds

    @property
    def head(self) -> list[dict[str, Any]]:
        """A row for each loss: memory besides inputs and gradients, time, and time over a layer's."""
        return [
            {
                "loss": each.loss,
                "workspace_mib": round(each.cost.workspace / MIB, 1),
                "ms": round(each.cost.seconds * 1e3, 3),
                "layers": round(each.layers, 3),
            }
            for each in self.losses
        ]

    def record(self) -> dict[str, Any]:
        """Return the plan as JSON values: the fields in bytes and seconds, ``head``, and each loss's advice."""
        losses = [dataclasses.asdict(each) | {"advice": each.cut.advice(self.layout)} for each in self.losses]
        return dataclasses.asdict(self) | {"head": self.head, "losses": losses}


def plan(
    model: Model | str,
    layout: Layout | None = None,
    gpu: Device | str = "h200",
    workspace_bytes: int | None = None,
) -> Plan:
    """Predict what a model's head costs, what fits, and how to cut the pipeline, without a GPU.

    Args:
        model: Sizes, or a name of ``cce_dist.tools.plan.sizes.MODELS``.
        layout: How the model is split over ranks; None: one GPU, a microbatch of 8,192 tokens.
        gpu: A GPU, or a name of ``cce_dist.tools.plan.devices.DEVICES``.
        workspace_bytes: The budget of the losses "budget" and "filtered"; None: what each of them chooses.

    Raises:
        ValueError: A name is unknown, a number is wrong, or the model cannot be split as asked for.
    """
    model = cast(Model, named(MODELS, model, "model"))
    device = cast(Device, named(DEVICES, gpu, "GPU"))
    layout = layout or Layout()
    check(model, layout)
    if workspace_bytes is not None and workspace_bytes < 1:
        raise ValueError(f"the workspace must be positive, got {workspace_bytes} bytes")
    given_vocab_size = model.vocab_size
    if layout.framework == "megatron":
        model = padded(model, VOCAB_MULTIPLE * layout.tp)
    losses = [_loss_plan(model, layout, device, loss, workspace_bytes) for loss in LOSSES]
    return Plan(model, given_vocab_size, layout, device, layer_time(model, layout, device), losses)


def _loss_plan(model: Model, layout: Layout, device: Device, loss: str, workspace_bytes: int | None) -> LossPlan:
    """Return the plan of one loss. Microbatches to try are multiples of 128 tokens per rank."""

    def at(num_tokens: int) -> LossPlan:
        there = dataclasses.replace(layout, num_tokens=num_tokens)
        found = head_cost(model, there, device, loss, workspace_bytes)
        layer = layer_time(model, there, device).seconds
        best, even = (cut(model.num_layers, layer, found.seconds, there) for cut in (best_cut, even_cut))
        first, last = (stage_bytes(model, there, best, found, rank) for rank in (0, layout.pp - 1))
        return LossPlan(loss, found, found.seconds / layer, best, even, last, first, 0)

    def fits(steps: int) -> bool:
        there = at(steps * step)
        return max(sum(there.first_stage.values()), sum(there.last_stage.values())) <= USABLE * device.memory

    step = 128 * layout.tp
    most = bisect(range(1, MOST_TOKENS // step + 1), False, key=lambda steps: not fits(steps))
    return dataclasses.replace(at(layout.num_tokens), largest_tokens=most * step)


def check(model: Model, layout: Layout) -> None:
    """Raise ValueError if sizes are wrong or cannot be split."""
    for name in RANKS:
        check_size(name, getattr(layout, name))
    check_size("num_tokens", layout.num_tokens, MOST_TOKENS)
    choices = {"framework": METHODS, "recompute": RECOMPUTE, "zero_stage": range(4)}
    for name, possible in choices.items():
        if getattr(layout, name) not in possible:
            raise ValueError(f"{name} must be one of {', '.join(map(str, possible))}, got {getattr(layout, name)!r}")
    if layout.dp * layout.cp % layout.ep or model.num_experts % layout.ep:
        shared = f"{model.num_experts} experts cannot be shared by ep {layout.ep} ranks"
        raise ValueError(f"{shared} of dp {layout.dp} x cp {layout.cp}")
    if layout.vpp > 1 and layout.pp == 1:
        raise ValueError("vpp needs pp of at least 2")
    for name, size in (("heads", model.num_heads), ("ffn_size", model.ffn_size), ("tokens", layout.num_tokens)):
        if size % layout.tp:
            raise ValueError(f"{name} {size} cannot be split over tp {layout.tp} ranks")
    if layout.elementwise and not model.ffn_size:
        raise ValueError("--eager needs --ffn-size, which a config.json does not have: give sizes by hand")
    if model.num_layers < layout.pp * layout.vpp - 1:
        raise ValueError(f"{model.num_layers} layers cannot be cut into {layout.pp} x {layout.vpp} stages")


def head_cost(model: Model, layout: Layout, device: Device, loss: str, workspace_bytes: int | None) -> Cost:
    head = Head(
        layout.num_tokens,
        model.hidden_size,
        model.vocab_size,
        layout.tp,
        sequence_parallel=layout.sequence_parallel and layout.tp > 1,
        one_number=layout.framework != "megatron",
        main_grad=layout.framework == "megatron",
    )
    method = METHODS[layout.framework].get(loss, loss)
    if method == "torch-compile" and layout.tp > 1:
        method = "torch-compile-tp"
    if layout.framework == "deepspeed" and loss == "dense" and layout.tp == 1:
        method = "torch"  # F.cross_entropy
    return cost(head, method, device, workspace_bytes)


def stage_bytes(model: Model, layout: Layout, cut: Cut, head: Cost, rank: int) -> dict[str, int]:
    """Return the bytes that a pipeline rank holds at its peak, by item."""
    layers = sum(cut.layers[rank :: layout.pp])
    is_last = rank == layout.pp - 1
    params = layers * model.layer_params
    if rank == 0:
        params += model.embedding_params
    if is_last:
        params += model.hidden_size
        params += 0 if rank == 0 and model.is_tied else model.head_params
    experts = layers * model.num_experts * model.expert_params
    items = state_bytes(params // layout.tp, experts // layout.tp, layout)
    items["activations"] = stage_activations(model, layout, layers, rank)
    if not is_last:
        return items
    hidden = 2 * layout.num_tokens * model.hidden_size // layout.num_slices
    items["hidden states"] = 2 * hidden
    items["head's gradient"] = 2 * model.head_params // layout.tp
    parts = {"lists": head.items.get("lists", 0), "statistics": 0}
    if "saved" in head.items:
        # Kept exponentials count as workspace, but the few numbers per token that are saved with them do not.
        parts["statistics"] = min(head.items["saved"], 40 * layout.num_tokens)
    return items | parts | {"workspace": max(0, head.workspace - sum(parts.values()))}


def grow(
    model: Model,
    layout: Layout,
    device: Device,
    counts: Sequence[int],
    workspace_bytes: int | None = None,
    global_tokens: int = GLOBAL_TOKENS,
) -> list[dict[str, Any]]:
    """Predict a step with each loss on each number of GPUs. Where there are too few, tp and pp shrink.

    A microbatch takes as long as the slowest stage, and filling and draining the pipeline (pp - 1) / vpp more.
    """
    steps = []
    for count in counts:
        tp = min(layout.tp, count)
        pp = max(1, min(layout.pp, count // tp))
        dp, rest = divmod(count, tp * pp * layout.cp)
        if dp < 1 or rest:
            raise ValueError(f"--scale {count}: tp {tp} x pp {pp} x cp {layout.cp} does not divide so many GPUs")
        vpp = layout.vpp if pp > 1 else 1
        there = dataclasses.replace(layout, tp=tp, pp=pp, dp=dp, vpp=vpp)
        microbatches = global_tokens // (dp * layout.cp * layout.num_tokens)
        if microbatches < 1:
            raise ValueError(f"--scale {count}: {global_tokens} tokens are less than {dp} replicas' microbatches")
        found = plan(model, there, device, workspace_bytes)
        steps += [_step(found, each, microbatches) for each in found.losses]
    return steps


def _step(found: Plan, each: LossPlan, microbatches: int) -> dict[str, Any]:
    """Return numbers of a step by name. "Exposed" communication is what no computation overlaps."""
    layout, device = found.layout, found.device
    slowest = max(each.cut.seconds)
    rank = each.cut.seconds.index(slowest)
    layers = sum(each.cut.layers[rank :: layout.pp])
    # Stages are on different nodes if a pipeline does not fit into one. While it fills and drains nothing overlaps a send.
    num_bytes = 2 * layout.num_tokens * found.model.width // layout.num_slices
    ranks = GPUS_PER_NODE + 1 if layout.tp * layout.pp > GPUS_PER_NODE else 2
    send = collective_seconds("send", num_bytes, ranks, device)
    fill = (layout.pp - 1) / layout.vpp * (slowest + 2 * send)
    gradients = _gradients_exposed(found, slowest)
    total = microbatches * slowest + fill + gradients
    tokens = microbatches * layout.num_tokens * layout.dp * layout.cp
    exposed = sum(one.exposed for one in each.cost.collectives)
    return {
        "gpus": layout.num_gpus,
        "tp": layout.tp,
        "pp": layout.pp,
        "dp": layout.dp,
        "microbatches": microbatches,  # of each pipeline
        "loss": each.loss,
        "head_ms": each.cost.seconds * 1e3,  # of one microbatch, exposed collectives included
        "head_exposed_ms": exposed * 1e3,  # of one microbatch
        "layers_exposed_ms": layers * found.layer.collectives * 1e3,  # of one microbatch, in the slowest stage
        "gradients_exposed_ms": gradients * 1e3,  # of the sum of gradients over data-parallel ranks
        "bubble": fill / total,  # share of the step in which a stage waits for the pipeline to fill and drain
        "step_ms": total * 1e3,
        "tokens_per_second": tokens / total,  # over all GPUs
    }


def _gradients_exposed(found: Plan, microbatch: float) -> float:
    """Return the seconds of data parallelism's collectives that the last microbatch does not overlap.

    Gradients' reduce-scatter runs behind backward, two thirds of it, and weights' all-gather behind forward.
    """
    layout, model = found.layout, found.model
    ways = layout.dp * layout.cp
    params = (model.params // layout.pp) // layout.tp
    ranks = ways if layout.tp * layout.pp * ways <= GPUS_PER_NODE else max(ways, GPUS_PER_NODE + 1) if ways > 1 else 1
    reduce = collective_seconds("reduce_scatter", 4 * params, ranks, found.device)
    gather = collective_seconds("all_gather", 2 * params, ranks, found.device)
    return max(0.0, reduce - 2 / 3 * microbatch) + max(0.0, gather - microbatch / 3)
