"""The head: what a loss adds to a step, in bytes and in seconds, from sizes alone.

``cce_dist.decide`` chooses how the loss is computed, and a dry run (``kernels/dry_run.py``) counts its bytes. Seconds are a
sum: products at the GPU's rate, bytes over its bandwidth, launches and collectives.
"""

from __future__ import annotations

import dataclasses

from cce_dist.decide import Way, Where, decide
from cce_dist.filter import GradFilter
from cce_dist.kernels import Filter, ShardLogits, Spec, dry_run, memory
from cce_dist.kernels.filter import costs
from cce_dist.kernels.memory import Sizes
from cce_dist.kernels.tiles import Planned, Rates, Tiles, cdiv, fitted, table_tiles
from cce_dist.tools.plan.devices import COSTS, DENSE, GPUS_PER_NODE, Dense, Device

OURS = ("kept", "budget", "filtered")
VECTOR_BYTES = 16  # products are fastest where a row of logits is a multiple of this
# Columns that a filter lists per token, in the "trained" and "spread" workloads of Llama-3-8B's head.
FEW_LISTED, MANY_LISTED = 2, 59
DEFAULT_EPS = GradFilter.eps
ITEMSIZE = 2  # bytes of an element of hidden states and weight: bf16


@dataclasses.dataclass(frozen=True)
class Head:
    """A head on one rank."""

    num_tokens: int  # N, of one microbatch, over all ranks of the tensor-parallel group
    hidden_size: int  # D
    vocab_size: int  # V, over all ranks
    tp: int = 1  # T, ranks that the vocabulary is split over
    sequence_parallel: bool = False  # hidden states and their gradient are this rank's slices
    one_number: bool = True  # the loss is a mean or a sum; False: a loss for each token
    main_grad: bool = False  # dC is added to a buffer in fp32

    @property
    def sizes(self) -> Sizes:
        """Sizes of the largest shard."""
        columns = cdiv(self.vocab_size, self.tp)
        return Sizes(self.num_tokens, self.hidden_size, columns, ITEMSIZE, alone=not self.is_split)

    @property
    def is_aligned(self) -> bool:
        return self.sizes.num_columns * ITEMSIZE % VECTOR_BYTES == 0

    @property
    def is_split(self) -> bool:
        return self.tp > 1

    def way(self, loss: str, workspace_bytes: int | None) -> Way:
        """Return how one of ``OURS`` is computed within a budget; None: its own choice."""
        upstream = "unknown" if loss != "budget" else "number" if self.one_number else "tokens"
        where = Where("triton", "torch.bfloat16", self.is_split, upstream, self.main_grad)
        return decide(self.sizes, self.spec(loss, workspace_bytes or 0), where)

    def spec(self, loss: str, workspace_bytes: int) -> Spec:
        filtered = Filter(DEFAULT_EPS, always=True) if loss == "filtered" else Filter()
        columns = self.sizes.num_columns
        logits = ShardLogits(0, columns)
        return Spec(logits, columns, filter=filtered, workspace_bytes=workspace_bytes, alone=not self.is_split)

    @property
    def hidden_bytes(self) -> int:
        """Bytes of all tokens' hidden states."""
        return self.num_tokens * self.sizes.hidden_bytes

    @property
    def slice_bytes(self) -> int:
        """Bytes of this rank's hidden states."""
        return self.hidden_bytes // self.tp if self.sequence_parallel else self.hidden_bytes

    @property
    def weight_bytes(self) -> int:
        return self.sizes.num_columns * self.sizes.hidden_bytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that a step returns."""
        return self.slice_bytes + self.weight_bytes

    @property
    def product(self) -> float:
        """Operations of one matrix product of the logits' size."""
        return 2.0 * self.num_tokens * self.hidden_size * self.sizes.num_columns


@dataclasses.dataclass(frozen=True)
class Collective:
    """Collectives of one kind in a step."""

    name: str
    count: int
    num_bytes: int  # of the whole tensor that one of them sums or gathers
    seconds: float  # of all of them
    exposed: float  # seconds that no computation overlaps


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a loss adds to a step besides inputs and gradients."""

    loss: str
    workspace: int  # bytes at the peak, above inputs and gradients
    items: dict[str, int]  # parts of ``workspace`` by name; gradients that do not exist yet at the peak are negative
    forward: float  # seconds
    seconds: float  # forward and backward
    at_most: float  # ``seconds`` with a filter whose lists are long, or too long for the budget
    collectives: list[Collective]


def cost(head: Head, loss: str, device: Device, workspace_bytes: int | None = None) -> Cost:
    """Predict the cost of one of ``OURS`` or ``DENSE``, within a budget; None: what the loss chooses.

    "kept" keeps all exponentials whatever the budget, "budget" is exact, "filtered" filters; the other losses hold logits.
    """
    if loss == "kept":
        workspace_bytes = 2 * head.num_tokens * head.vocab_size * ITEMSIZE + (1 << 30)
    if loss in OURS:
        way = head.way(loss, workspace_bytes)
        moments = _our_moments(head, loss, device, way)
        forward, backward, collectives = _our_seconds(head, loss, device, way)
    else:
        moments = _dense_moments(head, loss)
        forward, backward, collectives = _dense_seconds(head, loss, device)
    items = dict(max(moments, key=lambda items: sum(items.values())))
    items["gradients"] = items.get("gradients", 0) - head.gradient_bytes
    items = {name: size for name, size in items.items() if size}
    forward, backward = forward * slowest(head.tp), backward * slowest(head.tp)
    total = forward + backward + sum(each.exposed for each in collectives)
    most = total
    if loss == "filtered":
        # Where the lists do not fit, with a third to spare, or labels do not suffice to find frequent ids, all tokens go
        # through the exact backward as well.
        more = listed_seconds(head, MANY_LISTED - FEW_LISTED)
        num_slots = memory.list_slots(head.sizes, DEFAULT_EPS, way.workspace_bytes)
        num_frequent = memory.frequent_columns(head.sizes.num_columns, DEFAULT_EPS)
        if num_slots < 4 / 3 * MANY_LISTED / head.tp or head.num_tokens < 4 * num_frequent:
            more = _exact_backward(head, device, way.workspace_bytes)[0]
        most += more * slowest(head.tp)
    return Cost(loss, max(0, sum(items.values())), items, forward, total, most, collectives)


def _our_moments(head: Head, loss: str, device: Device, way: Way) -> list[dict[str, int]]:
    """Return what is alive in forward, at backward's products, the sum of d_hidden, and the end."""
    sizes, spec = head.sizes, head.spec(loss, way.workspace_bytes)
    gpu = Planned(device.major, device.multiprocessors)
    in_slices = head.sequence_parallel and head.is_split
    gathered = {"gathered hidden": head.hidden_bytes if in_slices else 0}
    gradients = {"gradients": head.hidden_bytes + head.weight_bytes}
    summed = {"sum": head.slice_bytes if in_slices else 0}
    if way.passes == "one":
        workspace = dry_run.groups_peak(sizes, way.groups, spec, gpu)
        moments = [gathered | gradients | summed | {"workspace": workspace}]
        if not head.one_number:
            anew = dry_run.anew_peak(sizes, spec, gpu)
            moments.append(gathered | {"gradients": head.gradient_bytes, "workspace": anew})
        return moments
    peak = dry_run.peak(way.backend, sizes, spec, gpu, way.ready_rows)
    saved = {"lists" if loss == "filtered" else "saved": peak.saved}
    return [
        saved | gathered | {"workspace": peak.forward - peak.saved},
        saved | gathered | gradients | {"workspace": peak.backward - peak.saved},
        saved | gathered | gradients | summed | {"workspace": peak.summing - peak.saved},
        saved | {"gradients": head.gradient_bytes},
    ]


def _dense_moments(head: Head, loss: str) -> list[dict[str, int]]:
    """Return what is alive after the loss's own backward, and during the products of the gradients."""
    logits = head.num_tokens * head.sizes.num_columns
    copied, _ = _padded(head, DENSE[loss])
    return [
        {"logits": (DENSE[loss].bytes_alive + copied) * logits},
        {"logits": (ITEMSIZE + copied) * logits, "gradients": head.gradient_bytes},
    ]


def _tiles(device: Device) -> Tiles:
    return table_tiles(device.major, 8 * ITEMSIZE)


def slowest(num_ranks: int) -> float:
    """Return the time of the slowest of this number of ranks over the time of one."""
    return 1.0 + COSTS.slowest * (num_ranks.bit_length() - 1)


def _our_seconds(head: Head, loss: str, device: Device, way: Way) -> tuple[float, float, list[Collective]]:
    product, workspace_bytes, groups = head.product / device.flops, way.workspace_bytes, way.groups
    if loss == "filtered":
        # With ``FEW_LISTED`` columns.
        frequent = memory.frequent_columns(head.sizes.num_columns, DEFAULT_EPS)
        rates = Rates(device.flops, device.bandwidth)
        forward, backward = costs.filter_seconds(head.sizes, workspace_bytes, rates, frequent)
        backward += listed_seconds(head, FEW_LISTED)
        return product + forward, backward, _our_collectives(head, device, 0.0, 2)
    forward = product + _exponentials(head, device) + _small_kernels(head, device)
    if way.passes == "one":
        # Forward computes gradients, too, and sums d_hidden of a group behind the next group.
        more = cdiv(head.num_tokens, groups.rows) - 1
        forward += _gradient_products(head, device) + _small_kernels(head, device)
        passes = 4.5 if groups.low else 3.0  # over d_weight
        forward += more * (passes * head.weight_bytes / device.bandwidth + COSTS.group)
        backward = COSTS.launch
        if not head.one_number:
            # Backward compares upstream gradients and multiplies. The launches for gradients made anew return early.
            chunks, _ = _chunks(head, device, workspace_bytes, 0)
            moved = 2 * head.slice_bytes + (5 if head.main_grad else 2) * head.weight_bytes
            backward += moved / device.bandwidth + (COSTS.loss + chunks * COSTS.chunk) * COSTS.launch
        return forward, backward, _our_collectives(head, device, forward * more / (more + 1), more + 1)
    backward, covering = _exact_backward(head, device, workspace_bytes)
    return forward, backward, _our_collectives(head, device, covering, 1)


def _exponentials(head: Head, device: Device) -> float:
    return head.num_tokens * head.sizes.num_columns / (COSTS.exponentials * device.multiprocessors)


def _small_kernels(head: Head, device: Device) -> float:
    return COSTS.loss * COSTS.launch + 5 * head.hidden_bytes / device.bandwidth


def _exact_backward(head: Head, device: Device, workspace_bytes: int) -> tuple[float, float]:
    """Return the seconds of the exact backward, and of the product that covers the sum of d_hidden."""
    product = head.product / device.flops
    products = _gradient_products(head, device)
    kept = memory.saved_columns(head.sizes, workspace_bytes)
    recomputed = max(0, head.sizes.num_columns - kept) / max(1, head.sizes.num_columns)
    chunks, rows = _chunks(head, device, workspace_bytes, kept)
    seconds = products + recomputed * (COSTS.backward * product + _exponentials(head, device))
    seconds += _small_kernels(head, device) + chunks * _chunk_seconds(head, device, rows)
    return seconds, products / 2 / max(1, chunks)


def _gradient_products(head: Head, device: Device) -> float:
    """Return the seconds of the gradients' two products, in whole tiles of D."""
    cols = fitted(_tiles(device).grad_weight, head.hidden_size).cols
    return COSTS.backward * 2 * head.product / device.flops * (cdiv(head.hidden_size, cols) * cols / head.hidden_size)


def _chunks(head: Head, device: Device, workspace_bytes: int, kept: int) -> tuple[int, int]:
    """Return the number of recomputed chunks of columns, and the tokens of each."""
    sizes = head.sizes
    left = max(0, sizes.num_columns - kept)
    if left == 0:
        return 0, sizes.num_tokens
    some = sizes._replace(num_columns=left)
    saved_bytes = kept * sizes.num_tokens * sizes.itemsize
    tiles = _tiles(device)
    rows, cols = memory.exact_chunks(some, workspace_bytes, saved_bytes, tiles, device.multiprocessors)
    return cdiv(sizes.num_tokens, rows) * cdiv(left, cols), rows


def _chunk_seconds(head: Head, device: Device, rows: int) -> float:
    """Return a chunk's seconds besides products: half a wave, passes over d_hidden, launches."""
    tile = _tiles(device).dlogits
    wave = device.multiprocessors * 2.0 * tile.rows * tile.cols * (head.hidden_size + rows) / device.flops
    return wave / 2 + 2 * rows * head.sizes.sum_bytes / device.bandwidth + COSTS.chunk * COSTS.launch


def listed_seconds(head: Head, num_columns: float) -> float:
    """Return the seconds of this number of listed columns per token, of which each rank lists its share."""
    return costs.listed_seconds(head.sizes, num_columns / head.tp)


def _dense_seconds(head: Head, loss: str, device: Device) -> tuple[float, float, list[Collective]]:
    how = DENSE[loss]
    # Products read rows of logits slowly where they are not a whole number of vectors.
    slow = not head.is_aligned and how.padded is None
    product = head.product / device.flops / (COSTS.unaligned if slow else 1.0)
    fixed = COSTS.dense * COSTS.launch / 2
    moved = (how.bytes_moved + _padded(head, how)[1]) * head.num_tokens * head.sizes.num_columns / device.bandwidth
    backward = 2 * product + moved / 2 + fixed
    collectives = []
    if head.is_split:
        collectives.append(_collective("all_reduce", how.small_sums, 4 * head.num_tokens, head.tp, device))
        collectives += _hidden_collectives(head, device, 0.0 if how.sums_exposed else product / 4)
    return product + moved / 2 + fixed, backward, collectives


def _padded(head: Head, how: Dense) -> tuple[int, int]:
    return (0, 0) if head.is_aligned or how.padded is None else how.padded


def _our_collectives(head: Head, device: Device, covering: float, gathers: int) -> list[Collective]:
    """Return the collectives of a step. ``gathers`` is the number of all-gathers of statistics in forward."""
    if not head.is_split:
        return []
    statistics = _collective("all_gather", gathers, 12 * head.num_tokens * head.tp, head.tp, device)
    return [statistics, *_hidden_collectives(head, device, covering)]


def _hidden_collectives(head: Head, device: Device, covering: float) -> list[Collective]:
    """Return the sum of d_hidden, behind ``covering`` seconds, and the gathers of slices."""
    name = "reduce_scatter" if head.sequence_parallel else "all_reduce"
    whole = _collective(name, 1, head.hidden_bytes, head.tp, device)
    summed = dataclasses.replace(whole, exposed=max(0.0, whole.seconds - covering))
    gathers = [_collective("all_gather", 2, head.hidden_bytes, head.tp, device)] if head.sequence_parallel else []
    return [summed, *gathers]


def _collective(name: str, count: int, num_bytes: int, num_ranks: int, device: Device) -> Collective:
    seconds = count * collective_seconds(name, num_bytes, num_ranks, device)
    return Collective(name, count, num_bytes, seconds, seconds)


def collective_seconds(name: str, num_bytes: int, num_ranks: int, device: Device) -> float:
    """Return a latency for each doubling of the ranks, and the time of the bytes on the slowest link.

    ``name`` is all_reduce, all_gather, reduce_scatter or send; ``num_bytes`` is the size of the whole tensor.
    """
    if num_ranks < 2:
        return 0.0
    rate = device.bus if num_ranks <= GPUS_PER_NODE else device.network
    share = 1.0 if name == "send" else (2.0 if name == "all_reduce" else 1.0) * (num_ranks - 1) / num_ranks
    return COSTS.latency * (num_ranks - 1).bit_length() + share * num_bytes / rate
