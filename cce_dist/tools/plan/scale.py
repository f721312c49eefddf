"""The same model and batch on more GPUs: the head's time, exposed communication, and the pipeline's bubble.

A step has m microbatches on each pipeline. A microbatch takes as long as the slowest stage. Filling and draining the pipeline
takes (pp - 1) / vpp microbatches more. Gradients are summed over data-parallel ranks behind the last microbatch's backward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from cce_dist.tools.plan.devices import GPUS_PER_NODE, Device
from cce_dist.tools.plan.head import collective_seconds
from cce_dist.tools.plan.layers import Layout
from cce_dist.tools.plan.planning import LossPlan, Plan, plan
from cce_dist.tools.plan.sizes import Model

GLOBAL_TOKENS = 4 << 20  # of a step, over all GPUs


@dataclasses.dataclass(frozen=True)
class Step:
    """A step with one loss. "Exposed" communication is what no computation overlaps."""

    gpus: int
    tp: int
    pp: int
    dp: int
    microbatches: int  # of each pipeline
    loss: str
    head_ms: float  # of one microbatch, exposed collectives included
    head_exposed_ms: float  # of one microbatch
    layers_exposed_ms: float  # of one microbatch, in the slowest stage
    gradients_exposed_ms: float  # of the sum of gradients over data-parallel ranks
    bubble: float  # share of the step in which a stage waits for the pipeline to fill and drain
    step_ms: float
    tokens_per_second: float  # over all GPUs


def grow(
    model: Model,
    layout: Layout,
    device: Device,
    counts: Sequence[int],
    workspace_bytes: int | None = None,
    global_tokens: int = GLOBAL_TOKENS,
) -> list[Step]:
    """Predict a step on each number of GPUs. Where there are too few GPUs, tensor- and pipeline-parallel sizes shrink.

    Raises:
        ValueError: The layout does not divide a number of GPUs, or the batch has less than a microbatch for each.
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


def _step(found: Plan, each: LossPlan, microbatches: int) -> Step:
    layout, device = found.layout, found.device
    slowest = max(each.cut.seconds)
    rank = each.cut.seconds.index(slowest)
    layers = sum(each.cut.layers[rank :: layout.pp])
    # Stages are on different nodes if a pipeline does not fit into one. Forward sends hidden states, backward their gradient;
    # while the pipeline fills and drains nothing overlaps them.
    num_bytes = 2 * layout.num_tokens * found.model.width // layout.num_slices
    ranks = GPUS_PER_NODE + 1 if layout.tp * layout.pp > GPUS_PER_NODE else 2
    send = collective_seconds("send", num_bytes, ranks, device)
    fill = (layout.pp - 1) / layout.vpp * (slowest + 2 * send)
    gradients = _gradients_exposed(found, slowest)
    total = microbatches * slowest + fill + gradients
    tokens = microbatches * layout.num_tokens * layout.dp * layout.cp
    exposed = sum(one.exposed for one in each.cost.collectives)
    return Step(
        layout.num_gpus,
        layout.tp,
        layout.pp,
        layout.dp,
        microbatches,
        each.loss,
        each.cost.seconds * 1e3,
        exposed * 1e3,
        layers * found.layer.collectives * 1e3,
        gradients * 1e3,
        fill / total,
        total * 1e3,
        tokens / total,
    )


def _gradients_exposed(found: Plan, microbatch: float) -> float:
    """Return the seconds by which gradients' reduce-scatter and weights' all-gather exceed the microbatch that overlaps them.

    The reduce-scatter runs behind backward, two thirds of a microbatch, and the all-gather behind forward, one third.
    """
    layout, model = found.layout, found.model
    ways = layout.dp * layout.cp
    params = (model.params // layout.pp) // layout.tp
    ranks = ways if layout.tp * layout.pp * ways <= GPUS_PER_NODE else max(ways, GPUS_PER_NODE + 1) if ways > 1 else 1
    reduce = collective_seconds("reduce_scatter", 4 * params, ranks, found.device)
    gather = collective_seconds("all_gather", 2 * params, ranks, found.device)
    return max(0.0, reduce - 2 / 3 * microbatch) + max(0.0, gather - microbatch / 3)
