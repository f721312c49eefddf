"""The cut of a run's pipeline: ``--layers-per-stage``."""

from __future__ import annotations

import torch

from cce_dist.tools.plan import Layout, Model, plan
from cce_dist.tools.plan.devices import DEVICES, Device
from cce_dist.tools.pretrain.exits import UsageError
from cce_dist.tools.pretrain.recipe import MEGATRON_FUSED, Recipe

EVEN, AUTO = "even", "auto"
ELEMENTWISE = {
    "torch": 1.0,
    "deepspeed": 1.0,
    "megatron": 0.65,
}  # bytes moved in an engine's layers, over plain torch's
PLANNED = {"dense": "dense", "exact": "budget", MEGATRON_FUSED: "fused"}  # by loss of a recipe; the others filter


def layers_of_stages(recipe: Recipe) -> list[int] | None:
    """Return the layers of each pipeline stage; None for the engine's own cut, an even one.

    The numbers of "auto" are those of ``cce-dist plan`` for this model, loss and microbatch. They are arithmetic on sizes and
    on the GPU's name, so ranks agree.

    Raises:
        UsageError: Not such numbers, or they do not add up to the model's layers. The last stage alone may have none.
    """
    said, num_layers, pp = recipe.layers_per_stage, recipe.shape.num_layers, recipe.pp
    if said == EVEN or pp == 1:
        return None
    if said == AUTO:
        return _planned(recipe)
    try:
        layers = [int(count) for count in said.split(",")]
    except ValueError:
        raise UsageError(f"--layers-per-stage is even, auto or numbers such as 7,5; got {said}") from None
    if len(layers) != pp or sum(layers) != num_layers or min(*layers[:-1], layers[-1] + 1) < 1:
        raise UsageError(f"--layers-per-stage {said} does not cut {num_layers} layers into --pp {pp} stages")
    return layers


def _planned(recipe: Recipe) -> list[int]:
    """Return the cut that the plan of a recipe has for its loss."""
    shape = recipe.shape
    model = Model(shape.hidden_size, shape.vocab_size, shape.num_layers, shape.num_heads, shape.num_ffn)
    layout = Layout(
        tp=recipe.tp,
        pp=recipe.pp,
        dp=recipe.dp,
        seq_len=shape.seq_len,
        sequence_parallel=recipe.sequence_parallel,
        num_tokens=recipe.batch_size // (recipe.dp * recipe.accumulate) * shape.seq_len,
        framework=recipe.engine,
        elementwise=ELEMENTWISE[recipe.engine],
    )
    loss = PLANNED.get(recipe.loss, "filtered")
    try:
        found = plan(model, layout, _device())
    except ValueError as error:
        raise UsageError(f"--layers-per-stage auto: {error}") from error
    return next(each.cut.layers for each in found.losses if each.loss == loss)


def _device() -> Device:
    """Return the table's GPU of this machine's name; the first one where the table lacks it."""
    name = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else ""
    devices = list(DEVICES.values())
    return next((device for device in devices if device.name in name), devices[0])
