"""The constants of a plan, each with its provenance: GPUs, the links between them, and the costs of the head's kernels.

A rate is one that is reached in practice, under the power limit, not the data sheet's. ``measure`` takes a GPU's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU; rates are a second's."""

    name: str  # as on the command line
    flops: float  # operations of large bf16 matrix products
    bandwidth: float  # bytes of passes over memory that is larger than the cache
    memory: int  # bytes
    major: int  # compute capability's major number, which chooses the tiles
    multiprocessors: int
    bus: float  # bytes of a collective within a node: of its bus, as nccl-tests counts
    network: float  # the same between nodes, for each GPU
    provenance: str  # source of the rates


_GIB = 2**30
_SHARE = "data sheet x the share of it that the H200 reaches"

# The H200's rates, read on November 21, 2026: 3 plain products of 8,192 tokens of Llama-3-8B's and Gemma-2-2B's heads on one
# GPU; bytes a second of F.cross_entropy's elementwise passes over their logits; one all-reduce of 64 MiB over four GPUs in
# 0.33 ms. The others' are the data sheet's times the same shares: 0.71 of 989 Tflop/s, 0.83 of 4.8 TB/s, 0.68 of 450 GB/s of
# NVLink in one direction. InfiniBand counts 0.8 of 400 Gb/s (200 for the A100), which nobody measured here.
DEVICES = {
    device.name: device
    for device in (
        Device("h200", 700e12, 4.0e12, 140 * _GIB, 9, 132, 305e9, 40e9, "measured, November 2026"),
        Device("h100", 700e12, 2.8e12, 79 * _GIB, 9, 132, 305e9, 40e9, _SHARE),
        Device("a100", 240e12, 1.7e12, 79 * _GIB, 8, 108, 200e9, 20e9, _SHARE),
        Device("b200", 1600e12, 6.6e12, 178 * _GIB, 10, 148, 610e9, 40e9, _SHARE),
    )
}


GPUS_PER_NODE = 8


class Costs(NamedTuple):
    """The costs of kernels that the rates of a GPU do not say."""

    slowest: float = 0.022  # time that each doubling of the ranks adds, as a share: the slowest of more GPUs
    backward: float = 1.045  # time of a product of backward over a plain product's
    exponentials: float = 27e9  # of a multiprocessor in a second, 16 a clock at 1.7 GHz; no product hides them
    launch: float = 7e-6  # seconds that a small kernel takes on the GPU with the gap before it
    loss: int = 22  # small kernels of our forward and backward each, the algebra of the loss included
    dense: int = 28  # the same of a loss that holds logits
    chunk: int = 3  # launches of a chunk
    group: float = 0.3e-3  # seconds of a group of tokens beside its products and three passes over dC
    unaligned: float = 0.14  # share of a plain product's rate where a row of logits is no whole number of 16 bytes
    latency: float = 10e-6  # seconds before a collective's first byte


# Read on H200s in November 2026: ``slowest`` from the plain products at T = 1, 2 and 4; ``backward`` from the rows of
# cce-dist-cached less those products; ``group`` from ten heads in 512 MiB, 1 GiB and the default. Our launches are those of
# docs/results.md#small-shards. A filter's costs are in ``kernels/filter/costs.py``.
COSTS = Costs()


class Host(NamedTuple):
    """The time that a host takes to launch a microbatch in an engine of ``pretrain``; the GPU waits where it is longer."""

    layer: float  # seconds of a layer, forward and backward
    exact: float  # seconds of this library's exact loss and its gradient
    elementwise: float  # share of the elementwise bytes of plain torch that the engine's layers move

    def head(self, loss: str) -> float:
        """Return the seconds of a loss of a plan and its gradient."""
        if loss in ("dense", "fused"):
            return DENSE_LAUNCHES
        return self.exact + (FILTER_LAUNCHES if loss == "filtered" else 0.0)


# A least-squares fit of the logarithms of step times of small models on one machine with H200s, November 2026.
# "torch" is also DeepSpeed's, which has the same layers. Hosts differ: another was 0.6 of it.
_PLAIN = Host(3.4e-3, 5.9e-3, 1.0)
HOSTS = {"torch": _PLAIN, "deepspeed": _PLAIN, "megatron": Host(5.2e-3, 2.0e-3, 0.65)}
# docs/results.md#small-shards: a dense loss on the host, and what a filter takes there beyond the exact loss.
DENSE_LAUNCHES, FILTER_LAUNCHES = 0.3e-3, 2.0e-3


class Dense(NamedTuple):
    """A loss that holds logits. Its peak is before gradients of weight and hidden states are there."""

    bytes_alive: int  # of each logit of the shard at the peak
    bytes_moved: float  # read and written for each logit, forward and backward
    sums_exposed: bool = True  # whether the sum of dE over the ranks is waited for
    small_sums: int = 2  # all-reduces of a number or two for each token, in forward
    # Bytes of each logit that a copy has alive and moves, where a row of logits is no whole number of 16 bytes. None: there is
    # no copy, and products read the rows slowly (``Costs.unaligned``)
    padded: tuple[int, int] | None = None


# ``bytes_alive`` is read off the code: bf16 logits count 2, an fp32 copy, exponentials, their gradient 4 each. torch: logits,
# log-softmax and gradient in fp32. Megatron: bf16 logits and one fp32 buffer; fused: that and another fp32 one. DeepSpeed: bf16
# logits and three fp32 buffers. ``bytes_moved`` is from the time of the rows of the files
# above less three products, at the bandwidth above; ``padded`` of GPT-2's head (V 50,257).
DENSE = {
    "torch": Dense(12, 50),
    "torch-compile": Dense(2, 14, padded=(2, 8)),
    "torch-compile-tp": Dense(6, 18),
    "megatron": Dense(6, 76, sums_exposed=False, small_sums=3),
    "megatron-fused": Dense(10, 49, sums_exposed=False),
    "deepspeed": Dense(14, 85, small_sums=3),
    "deepspeed-liger": Dense(6, 34, small_sums=3),
}


def measure() -> Device:
    """Measure this machine's GPU: bf16 products of a side of 8,192 at the power limit, and a copy of 1 GiB.

    Raises:
        ValueError: There is no GPU, or too little of its memory is free.
    """
    import torch

    if not torch.cuda.is_available():
        raise ValueError("--measure needs a GPU, and torch sees none; --gpu names one of the table")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    side, count = 8192, 32
    try:
        left = torch.randn(side, side, dtype=torch.bfloat16, device="cuda")
        right, product = torch.randn_like(left), torch.empty_like(left)
        source = torch.empty(_GIB, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
    except torch.OutOfMemoryError:
        raise ValueError("--measure needs 2.4 GiB of free memory on the GPU") from None

    def seconds(call: Callable[[], object]) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # As many calls before the timed ones bring the card to its power limit.
        for number in range(2 * count):
            if number == count:
                begin.record()
            call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3 / count

    product_seconds = seconds(lambda: torch.mm(left, right, out=product))
    copy_seconds = seconds(lambda: target.copy_(source))
    # ROCm's versions are not CUDA's compute capabilities, and its devices have small tiles (kernels/tiles.py).
    major = 0 if torch.version.hip else properties.major
    return like_the_table(
        properties.name,
        major,
        properties.multi_processor_count,
        properties.total_memory,
        2 * side**3 / product_seconds,
        2 * _GIB / copy_seconds,
    )


def like_the_table(name: str, major: int, multiprocessors: int, memory: int, flops: float, bandwidth: float) -> Device:
    """Return a measured GPU; its links are those of the table's GPU of its compute capability, or of the slowest one."""
    alike = [device for device in DEVICES.values() if device.major == major] or DEVICES.values()
    links = min(alike, key=lambda device: device.bus)
    provenance = f"measured here, but the links, which are those of {links.name}"
    return Device(name, flops, bandwidth, memory, major, multiprocessors, links.bus, links.network, provenance)
