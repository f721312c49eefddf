"""Growth: the same model and batch on more GPUs. The head's time, what communication nothing covers, and the bubble.

A step has m microbatches on each pipeline. A microbatch takes the slowest stage's time; the pipeline fills and drains in
(pp - 1) / vpp more of them. Gradients are summed over data-parallel ranks behind the last microbatch's backward.
"""

from __future__ import annotations

import dataclasses

from cce_dist.tools.plan.devices import GPUS_PER_NODE, Device
from cce_dist.tools.plan.head import collective_seconds
from cce_dist.tools.plan.layers import Layout
from cce_dist.tools.plan.planning import LossPlan, Plan, plan
from cce_dist.tools.plan.sizes import Model

GLOBAL_TOKENS = 4 << 20  # of a step, over all GPUs


@dataclasses.dataclass(frozen=True)
class Step:
    """A step on so many GPUs with one loss; exposed are collectives that nothing covers."""

    gpus: int
    tp: int
    pp: int
    dp: int
    microbatches: int  # of each pipeline
    loss: str
    head_ms: float  # of one microbatch, its exposed collectives counted
    head_exposed_ms: float  # of one microbatch
    layers_exposed_ms: float  # of one microbatch, in the slowest stage
    gradients_exposed_ms: float  # of the sum over data-parallel ranks
    bubble: float  # share of the step in which a stage waits for the pipeline to fill and drain
    step_ms: float
    tokens_per_second: float  # over all GPUs


def grow(
    model: Model,
    layout: Layout,
    device: Device,
    counts: list[int],
    workspace_bytes: int | None = None,
    global_tokens: int = GLOBAL_TOKENS,
) -> list[Step]:
    """Predict a step on each number of GPUs; tensor- and pipeline-parallel sizes shrink where there are too few.

    Raises:
        ValueError: GPUs that the layout does not divide, or a batch that is less than a microbatch on each.
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
            raise ValueError(
                f"--scale {count}: {global_tokens} tokens are less than a microbatch on each of {dp} replicas"
            )
        found = plan(model, there, device, workspace_bytes)
        steps += [_step(found, each, microbatches) for each in found.losses]
    return steps


def _step(found: Plan, each: LossPlan, microbatches: int) -> Step:
    layout, device = found.layout, found.device
    slowest = max(each.cut.seconds)
    rank = each.cut.seconds.index(slowest)
    layers = sum(each.cut.layers[rank :: layout.pp])
    # A pipeline's neighbours are on other nodes once tensor parallelism fills one. Forward sends hidden states, backward their
    # gradient; nothing covers the first and last of them.
    num_bytes = 2 * layout.num_tokens * found.model.width // layout.in_slices
    send = collective_seconds(
        "send", num_bytes, GPUS_PER_NODE + 1 if layout.tp * layout.pp > GPUS_PER_NODE else 2, device
    )
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
    """Return what one microbatch does not cover of the gradients' reduce-scatter and the weights' all-gather.

    Two thirds of it, backward, cover the first; a third, forward, covers the second.
    """
    layout, model = found.layout, found.model
    ways = layout.dp * layout.cp
    params = (model.params // layout.pp) // layout.tp
    ranks = ways if layout.tp * layout.pp * ways <= GPUS_PER_NODE else max(ways, GPUS_PER_NODE + 1) if ways > 1 else 1
    reduce = collective_seconds("reduce_scatter", 4 * params, ranks, found.device)
    gather = collective_seconds("all_gather", 2 * params, ranks, found.device)
    return max(0.0, reduce - 2 / 3 * microbatch) + max(0.0, gather - microbatch / 3)
