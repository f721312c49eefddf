"""The cut of a pipeline: layers of each stage, so that the slowest stage is fastest; and how each framework is told.

Megatron takes a layout string, DeepSpeed balances weights of layers, torchtitan takes whole numbers.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from itertools import groupby

from cce_dist.plan.layers import Layout


@dataclasses.dataclass(frozen=True)
class Cut:
    """A cut and what it costs.

    Attributes:
        layers: Layers of each stage in the order of the model; with ``vpp`` chunks a rank, ``pp * vpp`` stages.
        seconds: Seconds of each pipeline rank for one microbatch.
    """

    layers: list[int]
    seconds: list[float]

    @property
    def imbalance(self) -> float:
        """The slowest rank's time over the mean, less 1: what a step takes longer than balanced stages would."""
        return max(self.seconds) / (sum(self.seconds) / len(self.seconds)) - 1


LaunchTimes = tuple[float, float]  # seconds of the host for a layer, and for the head
UNSEEN: LaunchTimes = (0.0, 0.0)


def best_cut(num_layers: int, layer: float, head: float, layout: Layout, launches: LaunchTimes = UNSEEN) -> Cut:
    """Return the cut whose slowest rank takes least.

    The embedding counts nothing: its backward is a sum of rows. Among equally fast cuts the one is taken that leaves most
    layers to the last stage, since the first one holds most activations; layers that are left over go to later stages.

    Args:
        num_layers: Of the model.
        layer: Seconds of a layer.
        head: Seconds of the head.
        layout: For ``pp`` and ``vpp``.
        launches: Of the host; a stage takes what the slower one of GPU and host takes.

    Raises:
        ValueError: There are fewer layers than stages can share.
    """
    pp, vpp = layout.pp, layout.vpp
    if num_layers < pp * vpp - 1:
        raise ValueError(f"{num_layers} layers cannot be cut into {pp} x {vpp} stages")
    if pp == 1:
        return Cut(_spread(num_layers, vpp), [_slower(num_layers, layer, head, launches)])

    def slowest(last: int) -> float:
        most = -(-(num_layers - last) // (pp - 1))
        return max(_slower(most, layer, 0.0, (launches[0], 0.0)), _slower(last, layer, head, launches))

    # The chunks of the last rank but the last one are not empty, and neither are those of the others.
    choices = range(vpp - 1, num_layers - vpp * (pp - 1) + 1)
    last = min(choices, key=lambda n: (slowest(n), -n))
    others = _spread(num_layers - last, pp - 1)
    by_rank = [_spread(count, vpp) for count in others]
    # The chunk with the head is the one that is short.
    tail = [-(-last // vpp)] * (vpp - 1)
    while sum(tail) > last:
        tail[tail.index(max(tail))] -= 1
    by_rank.append([*tail, last - sum(tail)])
    layers = [by_rank[rank][chunk] for chunk in range(vpp) for rank in range(pp)]
    return timed(layers, layer, head, layout, launches)


def even_cut(num_layers: int, layer: float, head: float, layout: Layout, launches: LaunchTimes = UNSEEN) -> Cut:
    """Return the cut that frameworks take by default: the same number of layers in each stage, the rest in the later ones."""
    return timed(_spread(num_layers, layout.pp * layout.vpp), layer, head, layout, launches)


def timed(layers: list[int], layer: float, head: float, layout: Layout, launches: LaunchTimes = UNSEEN) -> Cut:
    """Return a cut with the seconds of each rank."""
    *others, last = (sum(layers[rank :: layout.pp]) for rank in range(layout.pp))
    seconds = [_slower(count, layer, 0.0, (launches[0], 0.0)) for count in others]
    return Cut(layers, [*seconds, _slower(last, layer, head, launches)])


def _slower(count: int, layer: float, head: float, launches: LaunchTimes) -> float:
    """Return the seconds of a stage: of its GPU, or of its host if that takes longer."""
    return max(count * layer + head, count * launches[0] + launches[1])


def _spread(count: int, ways: int) -> list[int]:
    """Split into nearly equal parts, the larger ones last."""
    return [count // ways + (part >= ways - count % ways) for part in range(ways)]


def megatron_layout(layers: list[int]) -> str:
    """Return ``--pipeline-model-parallel-layout``: E embedding, t layer, L loss, | between stages."""
    stages = [f"t*{count}" if count > 1 else "t" * count for count in layers]
    first, *middle, last = stages if len(stages) > 1 else [*stages, ""]
    if len(stages) == 1:
        return f"E{first}L"
    text = f"E{first}|"
    for stage, same in groupby(middle):
        count = len(list(same))
        text += f"({stage}|)*{count}" if count > 1 else f"{stage}|"
    return f"{text}{last}L"


def check_megatron_layout(text: str, num_layers: int, pp: int) -> str:
    """Have Megatron's own parser read a layout. Returns "checked", or why it was not: megatron-core is not installed.

    Raises:
        AssertionError: Megatron refuses the layout.
    """
    try:
        with warnings.catch_warnings():
            # Megatron warns that Transformer Engine and Apex are not installed.
            warnings.simplefilter("ignore")
            from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
    except ImportError:
        return "not checked: megatron-core >= 0.14 is not installed"
    PipelineParallelLayerLayout.from_str(text, pp).validate_layer_layout(num_layers, 0)
    return "checked by megatron-core's parser"


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


def torchtitan_layers(head_layers: float) -> dict[str, int]:
    """Return torchtitan's whole numbers: how many layers less the first and last stage have."""
    less = {"first": 0, "last": max(0, round(head_layers))}
    return {f"pipeline_parallel_{place}_stage_less_layers": count for place, count in less.items()}
