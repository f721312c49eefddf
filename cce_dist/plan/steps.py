"""A whole step of ``cce-dist pretrain``: the peak of each pipeline rank, and the time, on each engine.

Memory counts what each engine keeps: bytes of a parameter, of a layer's activations, of the head. Time adds the slowest stage
of each microbatch, the pipeline's filling, and passes of the optimizer over its state. A stage takes as long as its GPU or as
its host, which launches the kernels, whichever is slower.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from cce_dist.plan.cut import Times, even_cut, timed
from cce_dist.plan.devices import COSTS, HOSTS, Device
from cce_dist.plan.head import Cost, Head, cost
from cce_dist.plan.layers import Layout, layer_time
from cce_dist.plan.sizes import Model


class Engine(NamedTuple):
    """The habits of an engine of ``pretrain``, in bytes.

    Attributes:
        states: Of a parameter in a step: weight, fp32 copy, the optimizer's moments, fp32 gradients that are always there.
        more: Of a parameter with several microbatches: gradients of the one before, in the weight's dtype.
        casts: Of a parameter of a layer or of the head: its bf16 copy under autocast.
        hidden: Of each hidden element of a token, kept by a layer for backward.
        inner: Of each element of the inner layer, likewise.
        residual: Of each hidden element between layers.
        logits: More for each logit of a dense loss, which somebody holds on to.
        elementwise: Share of the elementwise bytes that plain torch moves.
        dense: The dense loss, by ``head``'s name.
    """

    states: int
    more: int
    casts: int
    hidden: int
    inner: int
    residual: int
    logits: int
    elementwise: float
    dense: str


# torch: fp32 weights and residuals under autocast. DeepSpeed and Megatron: bf16 weights, fp32 gradients, copies and moments. A
# layer keeps the inputs of its norms and products, queries and keys turned, attention's output and its transpose. DeepSpeed's
# pipeline holds the last stage's bf16 logits twice: four runs of docs/results/h200-steps-two.json.
ENGINES = {
    "torch": Engine(12, 4, 2, 26, 8, 4, 0, 1.0, "torch"),
    "deepspeed": Engine(18, 2, 0, 22, 8, 2, 4, 1.0, "torch"),
    "megatron": Engine(18, 2, 0, 22, 8, 2, 0, 0.65, "megatron"),
}
OPTIMIZER_TEMPORARY = 4  # bytes of a parameter that AdamW's step takes for a square root of all
LAYER_LAUNCHES = 20  # gaps between a layer's kernels, beyond their bytes
OPTIMIZER_PASSES = 100  # bytes of a parameter that norm, clipping, AdamW and copies move


class Step(NamedTuple):
    """A step: seconds, and the peak bytes of each pipeline rank."""

    seconds: float
    peak_bytes: list[int]


def step(
    model: Model,
    engine: str,
    loss: str,
    layout: Layout,
    microbatches: int,
    device: Device,
    layers: list[int] | None = None,
    workspace_bytes: int | None = None,
) -> Step:
    """Predict a step.

    Args:
        model: Sizes.
        engine: One of ``ENGINES``.
        loss: "dense", or one of this library's: "budget", "kept", "filtered".
        layout: ``pp``, and the tokens and length of a microbatch's sequences; tensor-parallel size 1.
        microbatches: Of a step.
        device: The GPU.
        layers: Of each stage; None: an even cut.
        workspace_bytes: The budget of "budget" and "filtered"; None: the one that the loss chooses.
    """
    how = ENGINES[engine]
    sizes = Head(layout.num_tokens, model.hidden_size, model.vocab_size)
    head = cost(sizes, how.dense if loss == "dense" else loss, device, workspace_bytes)
    layer = layer_time(model, dataclasses.replace(layout, elementwise=how.elementwise), device).seconds
    # Autocast reads and writes a copy of each weight; kernels have gaps between them.
    layer += 6 * how.casts * model.layer_params / device.bandwidth + LAYER_LAUNCHES * COSTS.launch
    times = Times(layer, head.seconds, HOSTS[engine].layer, HOSTS[engine].head(loss))
    cut = timed(layers, times, layout) if layers else even_cut(model.num_layers, times, layout)
    counts, stages = cut.layers, cut.seconds
    params = [_stage_params(model, count, rank, layout.pp - 1) for rank, count in enumerate(counts)]
    once = max(OPTIMIZER_PASSES * max(params) / device.bandwidth, HOSTS[engine].step)
    seconds = (microbatches - 1) * max(stages) + sum(stages) + once
    if microbatches > 1:
        how = how._replace(states=how.states + how.more)
    peaks = [_peak(model, how, head, layout, count, rank, loss) for rank, count in enumerate(counts)]
    return Step(seconds, peaks)


def _stage_params(model: Model, layers: int, rank: int, last: int) -> int:
    return layers * model.layer_params + model.head_params * ((rank == 0) + (rank == last)) + model.hidden_size


def _peak(model: Model, how: Engine, head: Cost, layout: Layout, layers: int, rank: int, loss: str) -> int:
    last = layout.pp - 1
    params = _stage_params(model, layers, rank, last)
    states = how.states * params + how.casts * (layers * model.layer_params + model.head_params * (rank == last))
    token = layers * (how.hidden * model.hidden_size + how.inner * model.ffn_size + 4 * model.num_heads)
    token += how.residual * model.hidden_size
    kept = layout.num_tokens * token * (layout.pp - rank)
    if rank == last:
        gradients = 2 * (layout.num_tokens * model.hidden_size + model.head_params)
        kept += head.workspace + gradients + 2 * layout.num_tokens * model.hidden_size
        kept += how.logits * layout.num_tokens * model.vocab_size * (loss == "dense")
    return max(states + kept, states + OPTIMIZER_TEMPORARY * params)
