"""The cut of a pipeline into stages, so that the slowest is fastest, and each framework's option for it."""

from __future__ import annotations

import dataclasses
import math
from itertools import groupby
from typing import Any

from cce_dist.tools.plan.layers import Layout


@dataclasses.dataclass(frozen=True)
class Cut:
    """A cut of a pipeline."""

    layers: list[int]  # of each stage, in the order of the model
    seconds: list[float]  # of each pipeline rank, for a microbatch

    @property
    def imbalance(self) -> float:
        """How much longer a step takes than with balanced stages: the slowest over the mean, less 1."""
        return max(self.seconds) / (sum(self.seconds) / len(self.seconds)) - 1

    def advice(self, layout: Layout) -> dict[str, Any]:
        """Return each framework's options for the cut, by their names."""
        told: dict[str, Any] = {"pipeline_model_parallel_layout": megatron_layout(self.layers)}
        told["decoder_last_pipeline_num_layers"] = last_stage_layers(self.layers) if layout.vpp == 1 else None
        if layout.vpp == 1:
            told["deepspeed_weights"] = deepspeed_weights(self.layers)
        less = {"first": 0, "last": torchtitan_less_layers(self.layers)}
        return told | {f"pipeline_parallel_{place}_stage_less_layers": count for place, count in less.items()}


def best_cut(num_layers: int, layer: float, head: float, layout: Layout) -> Cut:
    """Return the cut whose slowest rank takes least time. ``layer`` and ``head`` are seconds for one microbatch.

    The embedding takes no time: its backward is a sum of rows. Of equally fast cuts this returns the one with most layers in
    the last stage, because the first stage holds most activations. For the rest of a division, later stages get one more.
    """
    pp, vpp = layout.pp, layout.vpp
    if pp == 1:
        return even_cut(num_layers, layer, head, layout)

    def slowest(last: int) -> float:
        most = -(-(num_layers - last) // (pp - 1))
        return max(most * layer, last * layer + head)

    # No chunk is empty but the one with the head.
    choices = range(vpp - 1, num_layers - vpp * (pp - 1) + 1)
    last = min(choices, key=lambda n: (slowest(n), -n))
    by_rank = [_spread(count, vpp) for count in _spread(num_layers - last, pp - 1)]
    # The chunk with the head gets the fewest layers.
    tail = [-(-last // vpp)] * (vpp - 1)
    while sum(tail) > last:
        tail[tail.index(max(tail))] -= 1
    by_rank.append([*tail, last - sum(tail)])
    return timed([by_rank[rank][chunk] for chunk in range(vpp) for rank in range(pp)], layer, head, layout)


def even_cut(num_layers: int, layer: float, head: float, layout: Layout) -> Cut:
    """Return the cut that frameworks make by default, into equal numbers of layers."""
    return timed(_spread(num_layers, layout.pp * layout.vpp), layer, head, layout)


def timed(layers: list[int], layer: float, head: float, layout: Layout) -> Cut:
    seconds = [sum(layers[rank :: layout.pp]) * layer for rank in range(layout.pp)]
    seconds[-1] += head
    return Cut(layers, seconds)


def _spread(count: int, ways: int) -> list[int]:
    """Split into nearly equal parts, the larger ones last."""
    return [count // ways + (part >= ways - count % ways) for part in range(ways)]


def megatron_layout(layers: list[int]) -> str:
    """Return ``--pipeline-model-parallel-layout``: E embedding, t layer, L loss, | between stages."""
    stages = [f"t*{count}" if count > 1 else "t" * count for count in layers]
    if len(stages) == 1:
        return f"E{stages[0]}L"
    first, *middle, last = stages
    text = f"E{first}|"
    for stage, same in groupby(middle):
        count = len(list(same))
        text += f"({stage}|)*{count}" if count > 1 else f"{stage}|"
    return f"{text}{last}L"


def last_stage_layers(layers: list[int]) -> int | None:
    """Return ``--decoder-last-pipeline-num-layers`` if it describes the whole cut, else None."""
    *others, last = layers
    return last if others and last > 0 and len(set(others)) == 1 else None


def torchtitan_less_layers(layers: list[int]) -> int:
    """Return ``pipeline_parallel_last_stage_less_layers``, for a last stage as long as the cut's.

    torchtitan adds the number to the last stage's layers, and gives what an even split leaves to the first stages.
    """
    total, stages = sum(layers), len(layers)
    return min(range(total + 1), key=lambda less: abs((total + less) // stages - less - layers[-1]))


def deepspeed_weights(layers: list[int], before: int = 1, after: int = 1) -> list[int]:
    """Return weights of a PipelineModule's layers with which DeepSpeed's partition, of equal sums, is this cut.

    Args:
        layers: Of each stage.
        before: Layers of the module before the model's first one, such as the embedding.
        after: Layers of the module after the model's last one, such as a norm and the head.
    """
    counts = list(layers)
    counts[0] += before
    counts[-1] += after
    whole = math.lcm(*counts)
    return [whole // count for count in counts for _ in range(count)]
