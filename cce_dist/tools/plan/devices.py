"""The constants of a plan, each with its provenance. Rates are those reached in practice, at the power limit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from cce_dist.kernels.tiles import H200


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU; all rates are per second."""

    name: str  # as on the command line
    flops: float  # operations of large bf16 matrix products
    bandwidth: float  # bytes of passes over memory that is larger than the cache
    memory: int  # bytes
    major: int  # compute capability's major number, which chooses the tiles
    multiprocessors: int
    bus: float  # bus bandwidth of collectives within a node, in bytes, as nccl-tests counts it
    network: float  # the same between nodes, per GPU
    provenance: str  # source of the rates


_GIB = 2**30
_SHARE = "data sheet x the share that the H200 reaches of its own"

# The H200's links: one all-reduce of 64 MiB over four GPUs took 0.33 ms on November 21, 2026. Rates of the other GPUs are their
# data sheet's times the H200's shares: 0.71 of 989 Tflop/s, 0.83 of 4.8 TB/s, 0.68 of 450 GB/s of NVLink in one direction.
# InfiniBand is taken to reach 0.8 of 400 Gb/s (200 for the A100); nobody measured it.
DEVICES = {
    device.name: device
    for device in (
        Device("h200", *H200[2], 140 * _GIB, 9, 132, 305e9, 40e9, "measured, November 2026"),
        Device("h100", 700e12, 2.8e12, 79 * _GIB, 9, 132, 305e9, 40e9, _SHARE),
        Device("a100", 240e12, 1.7e12, 79 * _GIB, 8, 108, 200e9, 20e9, _SHARE),
        Device("b200", 1600e12, 6.6e12, 178 * _GIB, 10, 148, 610e9, 40e9, _SHARE),
    )
}


GPUS_PER_NODE = 8


class Costs(NamedTuple):
    """Costs that do not follow from a GPU's rates."""

    slowest: float = 0.022  # relative time added by each doubling of the ranks, which wait for the slowest GPU
    backward: float = 1.045  # time of a product in backward over the time of a plain product
    exponentials: float = 27e9  # per multiprocessor and second, 16 per clock at 1.7 GHz; no product hides them
    launch: float = 7e-6  # seconds of a small kernel on the GPU, with the gap before it
    loss: int = 22  # small kernels in our forward, and in our backward; the algebra of the loss included
    dense: int = 28  # small kernels in forward and backward of a loss that holds logits
    chunk: int = 3  # launches per chunk
    group: float = 0.3e-3  # seconds of a group of tokens besides its products and three passes over dC
    unaligned: float = 0.14  # rate over a plain product's where a row of logits is not a multiple of 16 bytes
    latency: float = 10e-6  # seconds before a collective's first byte


# Read on H200s in November 2026: ``slowest`` from the plain products at T = 1, 2 and 4; ``backward`` from the rows of
# cce-dist-cached less those products; ``group`` from ten heads in 512 MiB, 1 GiB and the default. Our launches were
# counted for docs/results.md#small-shards. A filter's costs are in ``kernels/filter/costs.py``.
COSTS = Costs()


class Dense(NamedTuple):
    """A loss that holds logits. Its peak comes before the gradients of weight and hidden states exist."""

    bytes_alive: int  # per logit of the shard, at the peak
    bytes_moved: float  # per logit, read and written in forward and backward
    sums_exposed: bool = True  # whether the all-reduce of dE is waited for
    small_sums: int = 2  # all-reduces of a number or two per token, in forward
    # Where a row of logits is not a multiple of 16 bytes: bytes per logit, alive and moved, of a copy with padded rows. None:
    # there is no copy, and products read the rows slowly (``Costs.unaligned``).
    padded: tuple[int, int] | None = None


# ``bytes_alive`` is read off the code: 2 for bf16 logits, 4 for each fp32 buffer. torch: logits, log-softmax and gradient in
# fp32. Megatron: bf16 logits and one fp32 buffer; fused: two of these. DeepSpeed: bf16 logits and three fp32 buffers.
# ``bytes_moved`` is the measured time less three products, times the bandwidth; ``padded`` is from GPT-2's head (V 50,257).
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
    """Measure this machine's GPU: bf16 products at the power limit, and a copy of 1 GiB."""
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
    # Take the links of a GPU in the table: of the same compute capability, or the slowest.
    alike = [device for device in DEVICES.values() if device.major == major] or DEVICES.values()
    links = min(alike, key=lambda device: device.bus)
    return dataclasses.replace(
        links,
        name=properties.name,
        flops=2 * side**3 / product_seconds,
        bandwidth=2 * _GIB / copy_seconds,
        memory=properties.total_memory,
        major=major,
        multiprocessors=properties.multi_processor_count,
        provenance=f"measured here; links as of the {links.name}",
    )
