"""All collectives of the public functions.

Dimensions: T ranks of the group, K statistics, N tokens, D hidden size.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

# torch 2.13 renamed these functions, and warns if the old names are used.
_all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# Groups by the names that operators know them by.
_named: dict[str, weakref.ref[dist.ProcessGroup]] = {}


def name_of(group: dist.ProcessGroup) -> str:
    """Return the name by which ``resolve`` finds a group: torch's name, unless a destroyed group had this name before."""
    name = group.group_name
    if torch.compiler.is_compiling():  # which cannot trace what follows
        return name
    while _named.setdefault(name, weakref.ref(group))() is not group:
        name += "'"
    return name


def resolve(group_name: Any) -> dist.ProcessGroup | None:
    """Return the process group of a name, or None for the empty name, which means that nothing is split."""
    if group_name not in _named:
        return _resolve_process_group(group_name) if group_name else None
    group = _named[group_name]()
    check_alive(group)
    return group


def check_alive(group: dist.ProcessGroup | None) -> None:
    """Raise RuntimeError if a group was destroyed. The next ``init_process_group`` gives its name to another group."""
    if not is_alive(group):
        raise RuntimeError(
            "the process group that the vocabulary is split over was destroyed (destroy_process_group): make the group anew, "
            "and with it the VocabShard (shard.with_group(group)), or the module that holds it"
        )


def is_alive(group: dist.ProcessGroup | None) -> bool:
    """Whether torch still knows a group. Under torch.compile only the operator asks, when it runs."""
    if group is None:
        return False
    with contextlib.suppress(RuntimeError):
        return torch.compiler.is_compiling() or _resolve_process_group(group.group_name) is group
    return False


class Layout(NamedTuple):
    """How the tensors of a call are distributed over ranks, as plain values."""

    group_name: str = ""  # the vocabulary-parallel group; empty: the vocabulary is not split
    sequence_parallel: bool = False  # hidden states are this rank's slice of dim 0
    partial: bool = False  # d_hidden is not summed over the group
    reduce_dtype: str = ""  # dtype of the sum of d_hidden over the group; empty: the dtype of d_hidden

    def sums(self, num_ranks: int) -> bool:
        """Whether d_hidden is summed over the group. With sequence parallelism even one rank counts as a sum."""
        return bool(self.group_name) and not self.partial and (num_ranks > 1 or self.sequence_parallel)


class Gather(NamedTuple):
    """All-gathers statistics: K N numbers from each rank. One rank sends nothing."""

    num_ranks: int
    into: Callable[[Tensor, Tensor], Any]  # writes what it gathers, [T K, N], from a rank's part, [K, N]

    def __call__(self, stats_KN: Tensor) -> Tensor:
        if self.num_ranks == 1:
            return stats_KN[None]
        stats_TKN = stats_KN.new_empty(self.num_ranks, *stats_KN.shape)
        self.into(stats_TKN.flatten(0, 1), stats_KN.contiguous())
        return stats_TKN


class Distributed:
    def __init__(self, layout: Layout) -> None:
        self.layout, self.group = layout, resolve(layout.group_name)
        self.size = 1 if self.group is None else self.group.size()
        self.gather = Gather(self.size, partial(_all_gather_into, group=self.group))

    def whole(self, hidden: Tensor) -> Tensor:
        """With sequence parallelism, all-gather the ranks' slices of dim 0."""
        return gather_sequence(hidden, self.group) if self.group and self.layout.sequence_parallel else hidden

    def own(self, numbers_N: Tensor) -> Tensor:
        """Return the numbers of this rank's tokens: with sequence parallelism its slice, else all."""
        if self.group is None or not self.layout.sequence_parallel:
            return numbers_N
        return numbers_N.chunk(self.group.size())[self.group.rank()]

    def hidden_sum(self, num_tokens: int, rows: int | None) -> HiddenGradSum | None:
        layout = self.layout
        if self.group is None or not layout.sums(self.size):
            return None
        dtype = getattr(torch, layout.reduce_dtype) if layout.reduce_dtype else None
        return HiddenGradSum(self.group, layout.sequence_parallel, dtype, num_tokens, rows)


def gather_sequence(local_hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather the ranks' slices of dim 0. [N/T, D] -> [N, D]."""
    whole = local_hidden.new_empty((local_hidden.shape[0] * group.size(), *local_hidden.shape[1:]))
    _all_gather_into(whole, local_hidden.contiguous(), group=group)
    return whole


class OwnSlice(torch.autograd.Function):
    """Return this rank's slice of dim 0 of a replicated tensor. Backward all-gathers the gradients of the slices."""

    @staticmethod
    def forward(ctx, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return whole.chunk(group.size())[group.rank()].clone() if len(whole) else whole.clone()

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        return gather_sequence(grads[0], ctx.group), None


class ScatterSum(torch.autograd.Function):
    """Reduce-scatter a tensor over ranks, [N, D] -> [N/T, D]. Backward all-gathers the gradients of the slices."""

    @staticmethod
    def forward(ctx, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        summed = part.new_empty((part.shape[0] // group.size(), *part.shape[1:]))
        _reduce_scatter_into(summed, part.contiguous(), group=group)
        return summed

    backward = OwnSlice.backward


class HiddenGradSum:
    """Sum d_hidden over the group, overlapped with the computation of further rows.

    If all rows become final together, one collective sums N D elements: an all-reduce, or with ``scatter`` a reduce-scatter
    that leaves this rank's slice. If ``rows`` tokens become final at a time, there is one collective per chunk: an all-reduce,
    or with ``scatter`` a reduce of each slice to its owner, because tokens are finished in order and a reduce-scatter would
    need a part of every slice. The chunks follow from the arguments alone, so all ranks agree on them.

    Call ``start`` with all rows of d_hidden that are final so far, at last with all rows. The sum runs on the communication
    stream, after the work queued on the current stream. ``wait`` makes the current stream, not the host, wait for the result,
    in d_hidden's dtype. Tensors are held until then, so that their memory is not reused.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        scatter: bool,
        dtype: torch.dtype | None,
        num_tokens: int,
        rows: int | None,
    ) -> None:
        self.group, self.dtype = group, dtype
        self.scatter = scatter and num_tokens > 0
        self.at_once = rows is None or rows >= num_tokens
        if rows is None or self.at_once:
            rows = num_tokens
        elif self.scatter:
            rows = num_tokens // group.size()
        starts = range(0, num_tokens, max(1, rows))
        self.ranges = [slice(start, min(start + rows, num_tokens)) for start in starts]
        self.under_way: list[tuple[Any, Tensor, Tensor, Tensor]] = []
        self.result: Tensor | None = None

    def start(self, d_hidden: Tensor) -> None:
        self._finish()  # frees the memory of the previous chunk
        if not self.scatter:
            self.result = d_hidden
        while self.ranges and self.ranges[0].stop <= d_hidden.shape[0]:
            rows = self.ranges.pop(0)
            self._start(d_hidden[rows], rows.start)

    def _start(self, rows: Tensor, first: int) -> None:
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
        assert self.result is not None and not self.ranges, "wait() was called before start() had all rows of d_hidden"
        return self.result


class SumOverRanks(torch.autograd.Function):
    """All-reduce a tensor whose sum all ranks use alike, so that the gradient is the same on every rank."""

    @staticmethod
    def forward(ctx, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        return sum_over_ranks(part.clone(), group)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def sum_over_ranks(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduce a tensor in place, and return it."""
    dist.all_reduce(part, group=group)
    return part


def largest(number: int, group: Any, named: bool) -> int:
    """Return the maximum of the ranks' numbers. ``group`` must support CPU tensors.

    With ``named``, wait at gloo's monitored barrier first: its error names the ranks that did not arrive in time.
    """
    if named:
        group.monitored_barrier(wait_all_ranks=True)
    found = torch.tensor(number, device="cpu")
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return int(found)


def assert_ranks_agree(
    function: str,
    facts: dict[str, Any],
    rows: tuple[int, int],
    group: dist.ProcessGroup,
    vocab_size: int,
    error: Exception | None = None,
) -> None:
    """Raise on every rank if a rank passes an error, if facts differ, or if rows do not tile the vocabulary.

    This is a collective. An error of another type than ValueError, TypeError and IndexError becomes a RuntimeError.
    """
    calls: list = [None] * group.size()
    failure = None if error is None else (type(error).__name__, str(error))
    dist.all_gather_object(calls, ({"function": function, **facts}, rows, failure), group=group)
    for rank, (_, _, failure) in enumerate(calls):
        if failure is not None:
            kinds = {kind.__name__: kind for kind in (ValueError, TypeError, IndexError, RuntimeError)}
            kind, said = kinds.get(failure[0]), failure[1]
            said = said if kind else f"{failure[0]}: {said}"
            raise (kind or RuntimeError)(f"{function}: rank {rank} of the group: {said}")
    # A rank may have facts that other ranks lack.
    for name in dict.fromkeys(name for facts, _, _ in calls for name in facts):
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


@contextlib.contextmanager
def agreement(function: str, group: dist.ProcessGroup) -> Iterator[dict[str, Any]]:
    """Raise on every rank if the body raises an error on one, or if the facts that it adds differ. This is a collective."""
    facts: dict[str, Any] = {}
    try:
        yield facts
    except Exception as error:
        tell(function, group, error)
        raise
    assert_ranks_agree(function, facts, (0, 0), group, 0)


def tell(function: str, group: Any, error: Exception) -> None:
    """Have all other ranks, which are in ``assert_ranks_agree``, raise this rank's error."""
    with contextlib.suppress(Exception):  # it raises the error here, too
        assert_ranks_agree(function, {}, (0, 0), group, 0, error)


def digest(values: Tensor) -> str:
    values = values.detach().resolve_neg().cpu().contiguous()
    return hashlib.blake2b(ctypes.string_at(values.data_ptr(), values.nbytes), digest_size=8).hexdigest()
