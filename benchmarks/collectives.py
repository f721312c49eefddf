"""The collectives of a step, with their sizes, and how much of their time no computation covers."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from records import Collective

ITEM_BYTES = {"c10::BFloat16": 2, "c10::Half": 2, "float": 4, "double": 8, "long int": 8, "int": 4, "bool": 1}


class Collectives:
    """A context that records all collectives inside it, on any stream, also in backward and in operators.

    ``num_ranks`` is the size of the group: an all-gather returns this many times its input.
    """

    sizes: list[tuple[str, int]]  # name and bytes of each, in order
    kinds: list[Collective]  # the same, with times, by name and size

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        self._profile = profile(activities=activities, record_shapes=True)

    def __enter__(self) -> "Collectives":
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profile.__exit__(*error)
        assert self._profile.profiler is not None and self._profile.profiler.kineto_results is not None
        events = self._profile.profiler.kineto_results.events()
        events = sorted(events, key=lambda event: event.start_ns())
        on_gpu = [event for event in events if event.device_type() == torch.autograd.DeviceType.CUDA]
        on_cpu = [event for event in events if event.device_type() == torch.autograd.DeviceType.CPU]
        self.sizes = [self._size(event) for event in on_cpu if event.name().startswith(("nccl:", "gloo:"))]
        spans = [(event.name(), event.start_ns(), event.end_ns()) for event in on_gpu]
        computing = _union((start, stop) for name, start, stop in spans if not name.startswith("nccl"))
        calls: dict[tuple[str, int], list[tuple[int, int] | None]] = {kind: [] for kind in self.sizes}
        for name in dict.fromkeys(name for name, _ in self.sizes):
            kernels = [(start, stop) for kernel, start, stop in spans if _is_kernel_of(kernel, name)]
            sizes = [size for each, size in self.sizes if each == name]
            # With one kernel per call, kernels come in the order of the calls.
            told_apart = kernels if len(kernels) == len(sizes) else [None] * len(sizes)
            for size, kernel in zip(sizes, told_apart, strict=True):
                calls[name, size].append(kernel)
        self.kinds = [Collective(*kind, len(spans), *_times(spans, computing)) for kind, spans in calls.items()]

    def _size(self, event: Any) -> tuple[str, int]:
        name = event.name().partition(":")[2].strip("_").removesuffix("_base")
        num_bytes = sum(
            torch.Size(shape).numel() * ITEM_BYTES.get(dtype, 1)
            for shape, dtype in zip(event.shapes(), event.dtypes(), strict=False)
            if dtype
        )
        return name, num_bytes * (self.num_ranks if name == "all_gather" else 1)


def _is_kernel_of(kernel: str, name: str) -> bool:
    """Return whether a kernel, such as ncclDevKernel_AllReduce_..., is of a collective, such as all_reduce."""
    return kernel.lower().startswith(f"nccldevkernel_{name.replace('_', '')}_")


def _times(spans: list[tuple[int, int] | None], computing: list[tuple[int, int]]) -> tuple[float | None, float | None]:
    """Return the seconds of the spans, and of the part that no computation covers; None if a span is unknown."""
    known = [span for span in spans if span is not None]
    if len(known) < len(spans):
        return None, None
    seconds = sum(stop - start for start, stop in known)
    covered = sum(max(0, min(stop, b) - max(start, a)) for start, stop in known for a, b in computing)
    return seconds / 1e9, (seconds - covered) / 1e9


def _union(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the same time as ordered spans that do not overlap."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged
