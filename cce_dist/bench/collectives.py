"""What a step sends: its collectives with their sizes, and how much of their time no computation covers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

ITEM_BYTES = {"c10::BFloat16": 2, "c10::Half": 2, "float": 4, "double": 8, "long int": 8, "int": 4, "bool": 1}


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind in a step.

    Attributes:
        name: all_reduce, all_gather, reduce_scatter, ...
        count: How many there are.
        num_bytes: Size of what they sum or gather, whole, together.
        seconds: Time of their kernels, waiting for other ranks included; None on a CPU.
        exposed: The part of it in which this rank computes nothing; None on a CPU.
    """

    name: str
    count: int
    num_bytes: int
    seconds: float | None = None
    exposed: float | None = None


class Collectives:
    """A context that records the collectives made inside: on any stream, also in backward and inside of operators.

    Args:
        num_ranks: Ranks of the group, by which what is gathered grows.

    Attributes:
        sizes: Name and bytes of each, in order.
        kinds: The same, with times, by kind.
    """

    sizes: list[tuple[str, int]]
    kinds: list[Collective]

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        self._profile = profile(activities=activities, record_shapes=True)

    def __enter__(self) -> Collectives:
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profile.__exit__(*error)
        assert self._profile.profiler is not None and self._profile.profiler.kineto_results is not None
        events = self._profile.profiler.kineto_results.events()
        on_gpu = [event for event in events if event.device_type() == torch.autograd.DeviceType.CUDA]
        on_cpu = [event for event in events if event.device_type() == torch.autograd.DeviceType.CPU]
        self.sizes = [self._size(event) for event in on_cpu if event.name().startswith(("nccl:", "gloo:"))]
        spans = [(event.name(), event.start_ns(), event.end_ns()) for event in on_gpu]
        computing = _union((start, stop) for name, start, stop in spans if not name.startswith("nccl"))
        self.kinds = []
        for kind in dict.fromkeys(name for name, _ in self.sizes):
            sizes = [size for name, size in self.sizes if name == kind]
            # Kernels are called ncclDevKernel_AllReduce_...; what is called nccl:all_reduce is an annotation of them.
            kernel = "nccldevkernel_" + kind.replace("_", "")
            mine = [(start, stop) for name, start, stop in spans if name.lower().startswith(kernel)]
            seconds = sum(stop - start for start, stop in mine) / 1e9
            exposed = seconds - sum(_shared(start, stop, computing) for start, stop in mine) / 1e9
            known = (seconds, exposed) if mine else ()
            self.kinds.append(Collective(kind, len(sizes), sum(sizes), *known))

    def _size(self, event: Any) -> tuple[str, int]:
        name = event.name().partition(":")[2].strip("_").removesuffix("_base")
        num_bytes = sum(
            torch.Size(shape).numel() * ITEM_BYTES.get(dtype, 1)
            for shape, dtype in zip(event.shapes(), event.dtypes(), strict=False)
            if dtype
        )
        return name, num_bytes * (self.num_ranks if name == "all_gather" else 1)


def _union(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same time as spans in order that do not overlap."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _shared(start: int, stop: int, spans: list[tuple[int, int]]) -> int:
    return sum(max(0, min(stop, last) - max(start, first)) for first, last in spans)
