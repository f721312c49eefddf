"""The cut of a pipeline: layers of each stage, so that the slowest stage is fastest; and how each framework is told."""

from __future__ import annotations

import dataclasses
import math
from itertools import groupby
from typing import Any, NamedTuple

from cce_dist.tools.plan.layers import Layout


class Times(NamedTuple):
    """Seconds of a layer and of the head for one microbatch, on the GPU and on the host that launches their kernels."""

    layer: float
    head: float
    layer_launches: float = 0.0
    head_launches: float = 0.0

    def stage(self, layers: int, has_head: bool) -> float:
        """Return the seconds of a stage: of its GPU, or of its host if that takes longer."""
        on_gpu, on_host = layers * self.layer, layers * self.layer_launches
        return max(on_gpu + has_head * self.head, on_host + has_head * self.head_launches)


@dataclasses.dataclass(frozen=True)
class Cut:
    """A cut in the order of the model, and each pipeline rank's seconds for a microbatch."""

    layers: list[int]
    seconds: list[float]

    @property
    def imbalance(self) -> float:
        """The slowest rank's time over the mean, less 1: what a step takes longer than balanced stages would."""
        return max(self.seconds) / (sum(self.seconds) / len(self.seconds)) - 1


def best_cut(num_layers: int, times: Times, layout: Layout) -> Cut:
    """Return the cut whose slowest rank takes least.

    The embedding counts nothing: its backward is a sum of rows. Among equally fast cuts the one is taken that leaves most
    layers to the last stage, since the first one holds most activations; layers that are left over go to later stages.
    ``planning.check`` has seen to it that there are enough of them.
    """
    pp, vpp = layout.pp, layout.vpp
    if pp == 1:
        return even_cut(num_layers, times, layout)

    def slowest(last: int) -> float:
        most = -(-(num_layers - last) // (pp - 1))
        return max(times.stage(most, has_head=False), times.stage(last, has_head=True))

    # The chunks of the last rank but the last one are not empty, and neither are those of the others.
    choices = range(vpp - 1, num_layers - vpp * (pp - 1) + 1)
    last = min(choices, key=lambda n: (slowest(n), -n))
    by_rank = [_spread(count, vpp) for count in _spread(num_layers - last, pp - 1)]
    # The chunk with the head is the one that is short.
    tail = [-(-last // vpp)] * (vpp - 1)
    while sum(tail) > last:
        tail[tail.index(max(tail))] -= 1
    by_rank.append([*tail, last - sum(tail)])
    return timed([by_rank[rank][chunk] for chunk in range(vpp) for rank in range(pp)], times, layout)


def even_cut(num_layers: int, times: Times, layout: Layout) -> Cut:
    """Return the cut that frameworks take by default: the same number of layers in each stage, the rest in the later ones."""
    return timed(_spread(num_layers, layout.pp * layout.vpp), times, layout)


def timed(layers: list[int], times: Times, layout: Layout) -> Cut:
    """Return a cut with the seconds of each rank."""
    pp = layout.pp
    return Cut(layers, [times.stage(sum(layers[rank::pp]), has_head=rank == pp - 1) for rank in range(pp)])


def _spread(count: int, ways: int) -> list[int]:
    """Split into nearly equal parts, the larger ones last."""
    return [count // ways + (part >= ways - count % ways) for part in range(ways)]


def advice(layers: list[int], head_layers: float, vpp: int) -> dict[str, Any]:
    """Return what to tell each framework of a cut, by its own name of the option; ``head_layers``: the head over a layer."""
    told: dict[str, Any] = {"pipeline_model_parallel_layout": megatron_layout(layers)}
    told["decoder_last_pipeline_num_layers"] = last_stage_layers(layers) if vpp == 1 else None
    if vpp == 1:
        told["deepspeed_weights"] = deepspeed_weights(layers)
    # torchtitan says in whole numbers how many layers less the first and last stage have.
    less = {"first": 0, "last": max(0, round(head_layers))}
    return told | {f"pipeline_parallel_{place}_stage_less_layers": count for place, count in less.items()}


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
    """Return ``--decoder-last-pipeline-num-layers`` where that says the whole cut; else None."""
    *others, last = layers
    return last if others and last > 0 and len(set(others)) == 1 else None


def deepspeed_weights(layers: list[int], before: int = 1, after: int = 1) -> list[int]:
    """Return weights of a PipelineModule's layers under which DeepSpeed's balanced partition is this cut.

    DeepSpeed makes the stages' sums as equal as it can, so each stage's layers share one sum.

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
