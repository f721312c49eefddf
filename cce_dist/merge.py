"""The communication of the loss: every collective it makes.

Letters: T ranks of the group, K statistics, N tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from cce_dist.kernels.launch.tape import recorded

# torch 2.13 renamed the two; the old names warn there
_all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def resolve(group_name: Any) -> dist.ProcessGroup | None:
    """The group of that name; the empty name is "not split"."""
    return recorded(_resolve_process_group, group_name) if group_name else None


def size_of(group: dist.ProcessGroup | None) -> int:
    """Ranks of a group; 1 where the vocabulary is not split."""
    return 1 if group is None else group.size()


def gather_stats(stats_KN: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """All-gather every rank's statistics: the one collective of forward, 4 K N bytes from each rank. -> [T, K, N].

    A group of one rank has nothing to gather.
    """
    if group is None or group.size() == 1:
        return stats_KN.view(1, *stats_KN.shape)
    return recorded(_all_gather, stats_KN, group).view(group.size(), *stats_KN.shape)


def gather_sequence(local_hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather the ranks' slices of dim 0 (sequence parallelism). [N/T, D] -> [N, D]."""
    return SequenceGather(local_hidden, group).wait()


class SequenceGather:
    """All-gather the ranks' slices of dim 0, [N/T, D] -> [N, D], while this rank works on the slice that it has.

    Starts at once, on the communication stream, after what the current stream has been given; ``wait`` makes the current
    stream, not the host, wait for the whole. Slice and whole are held until then, so that no memory changes hands between.

    Attributes:
        local: This rank's slice.
        here: Its rows in the whole.
    """

    def __init__(self, local_hidden: Tensor, group: dist.ProcessGroup) -> None:
        self.local = local_hidden.contiguous()
        num_rows = self.local.shape[0]
        self.here = slice(group.rank() * num_rows, (group.rank() + 1) * num_rows)
        self.whole = local_hidden.new_empty((num_rows * group.size(), *local_hidden.shape[1:]))
        self.work = _all_gather_into(self.whole, self.local, group=group, async_op=True)

    def wait(self) -> Tensor:
        assert self.work is not None
        self.work.wait()
        return self.whole


def _all_gather(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The ranks' tensors, concatenated on dim 0 in rank order."""
    whole = local.new_empty((local.shape[0] * group.size(), *local.shape[1:]))
    _all_gather_into(whole, local.contiguous(), group=group)
    return whole


class OwnSlice(torch.autograd.Function):
    """This rank's slice of dim 0 of what all ranks computed alike. Backward gathers what each rank has for its own slice."""

    @staticmethod
    def forward(ctx, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return whole.chunk(group.size())[group.rank()].clone() if len(whole) else whole.clone()

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        return gather_sequence(grads[0], ctx.group), None


class ScatterSum(torch.autograd.Function):
    """The sum over ranks of [N, D], of which each keeps its slice of dim 0, [N/T, D]. Backward gathers the slices."""

    @staticmethod
    def forward(ctx, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        summed = part.new_empty((part.shape[0] // group.size(), *part.shape[1:]))
        _reduce_scatter_into(summed, part.contiguous(), group=group)
        return summed

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        return gather_sequence(grads[0], ctx.group), None


class HiddenGradSum:
    """Sum d_hidden over the group, started as soon as rows of it are final, behind what is still to be computed.

    One collective, of N D elements: an all-reduce, or with sequence parallelism a reduce-scatter that leaves this rank's slice.
    Where only ``rows`` tokens at a time become final, one for each of those: all-reduces, or with sequence parallelism a reduce
    of each slice to its owner (a reduce-scatter would need a part of every slice, and tokens are finished in their order).
    The arguments decide which rows those are, so ranks agree on them however much each has to compute.

    ``start`` takes the first rows of d_hidden, all that are final, and at last the whole. It returns at once: the sums run on
    the communication stream, after what the current stream has been given. ``wait`` makes the current stream, not the host,
    wait, and gives the result in d_hidden's dtype. Tensors that the communication stream reads are held until then.

    Args:
        group: The ranks; None: nothing is summed.
        scatter: Leave this rank's slice.
        dtype: Of the sum; None: d_hidden's.
        num_tokens: N.
        rows: Tokens that become final at a time, the same on every rank; None: all.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        scatter: bool,
        dtype: torch.dtype | None,
        num_tokens: int,
        rows: int | None,
    ) -> None:
        self.group, self.dtype = group, dtype
        self.scatter = scatter and group is not None and num_tokens > 0
        self.at_once = rows is None or rows >= num_tokens
        if rows is None or self.at_once:
            rows = num_tokens
        elif self.scatter and group is not None:
            rows = num_tokens // group.size()
        starts = range(0, num_tokens, max(1, rows)) if group is not None else ()
        self.ranges = [slice(start, min(start + rows, num_tokens)) for start in starts]
        self.under_way: list[tuple[Any, Tensor, Tensor, Tensor]] = []
        self.result: Tensor | None = None

    def start(self, d_hidden: Tensor) -> None:
        self._finish()  # the sum of the previous group of tokens; its memory is free then
        if not self.scatter:
            self.result = d_hidden
        while self.ranges and self.ranges[0].stop <= d_hidden.shape[0]:
            rows = self.ranges.pop(0)
            self._start(d_hidden[rows], rows.start)

    def _start(self, rows: Tensor, first: int) -> None:
        assert self.group is not None
        target = rows
        part = summed = rows.to(self.dtype or rows.dtype)
        if not self.scatter:
            work = dist.all_reduce(part, group=self.group, async_op=True)
        elif self.at_once:
            target = self.result = rows.new_empty((rows.shape[0] // self.group.size(), *rows.shape[1:]))
            summed = target if target.dtype == part.dtype else torch.empty_like(target, dtype=part.dtype)
            work = _reduce_scatter_into(summed, part, group=self.group, async_op=True)
        else:
            owner, target = first // rows.shape[0], part
            if owner == self.group.rank():
                target = self.result = torch.empty_like(rows)
            work = dist.reduce(part, group=self.group, group_dst=owner, async_op=True)
        self.under_way.append((work, part, summed, target))

    def _finish(self) -> None:
        for work, _, summed, target in self.under_way:
            work.wait()
            if summed is not target:
                target.copy_(summed)
        self.under_way.clear()

    def wait(self) -> Tensor:
        self._finish()
        assert self.result is not None and not self.ranges, "wait() before the whole of d_hidden was there"
        return self.result


class SumOverRanks(torch.autograd.Function):
    """All-reduce of what each rank adds to a result that all ranks then use alike: its gradient is the same on each."""

    @staticmethod
    def forward(ctx, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        return sum_over_ranks(part.clone(), group)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def sum_over_ranks(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduce a few numbers, in place."""
    dist.all_reduce(part, group=group)
    return part


def largest(number: int, group: Any, named: bool) -> int:
    """The largest of the ranks' numbers, by a group that serves the CPU.

    Args:
        number: This rank's.
        group: The ranks.
        named: Wait at a barrier of gloo's before, which names the ranks that do not come within the group's time-out.
    """
    if named:
        group.monitored_barrier(wait_all_ranks=True)
    found = torch.tensor(number)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return int(found)


num_exchanges = 0  # how many calls of ``assert_ranks_agree`` began


def assert_ranks_agree(
    function: str,
    facts: dict[str, Any],
    rows: tuple[int, int],
    group: dist.ProcessGroup,
    vocab_size: int,
    error: Exception | None = None,
) -> None:
    """Raise on every rank if a rank has an error, if their facts differ, or if their rows do not tile the vocabulary.

    A collective of its own, made under CCE_DIST_DEBUG=1, and on a CPU for the ids of a teacher that is split.

    Raises:
        ValueError, TypeError, IndexError: A rank's error.
        RuntimeError: Names the first fact that differs and each rank's value of it, or the gap; or a rank's other error.
    """
    global num_exchanges
    num_exchanges += 1
    calls: list = [None] * group.size()
    told = None if error is None else (type(error).__name__, str(error))
    dist.all_gather_object(calls, ({"function": function, **facts}, rows, told), group=group)
    for rank, (_, _, told) in enumerate(calls):
        if told is not None:
            kinds = {kind.__name__: kind for kind in (ValueError, TypeError, IndexError)}
            raise kinds.get(told[0], RuntimeError)(f"{function}: rank {rank} of the group: {told[1]}")
    for name in ("function", *facts):
        values = [call[0].get(name) for call in calls]
        if any(value != values[0] for value in values):
            raise RuntimeError(f"{function}: the ranks of the group disagree on {name}: by rank {values}")
    covered = 0
    for start, stop in sorted(rows for _, rows, _ in calls if rows[1] > rows[0]):
        if start != covered:
            raise RuntimeError(f"{function}: shards do not tile the vocabulary: {covered} is followed by {start}")
        covered = stop
    if covered < vocab_size:
        raise RuntimeError(f"{function}: the shards end at {covered}, the vocabulary at {vocab_size}")
