"""VocabShard: the rows of the vocabulary on this rank, and the process group that holds all of them."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from cce_dist import merge
from cce_dist.checks import integer, kind


def even_rows(vocab_size: int, rank: int, size: int, multiple_of: int = 1) -> tuple[int, int]:
    """Return start and stop of shard ``rank`` of ``size``, as ``VocabShard.even`` splits, without a process group."""
    rows = -(-vocab_size // (size * multiple_of)) * multiple_of
    start, stop = rank * rows, (rank + 1) * rows
    if multiple_of == 1:
        start, stop = min(start, vocab_size), min(stop, vocab_size)
    return start, stop


@dataclass(frozen=True)
class VocabShard:
    """Rows [start, stop) of a vocabulary of ``vocab_size`` ids, split over the ranks of ``group``.

    The shards of a group tile the vocabulary. They may differ in size, and a shard may be empty. Rows at or past
    ``vocab_size`` are padding: their logits count as -inf and their gradient is 0.

    Copying keeps the group. Pickling drops it: call ``with_group`` on a loaded shard of several ranks before you use it.

    Args:
        start: First id of this rank's rows.
        stop: One past the last id. The local weight has ``stop - start`` rows.
        vocab_size: Size of the whole vocabulary, without padding.
        group: The vocabulary-parallel process group. None means that the vocabulary is not split; it never means the default
            group.

    Raises:
        ValueError: ``0 <= start <= stop`` does not hold, rows are missing although group is None, or this rank is not a member
            of group.
        TypeError: A number is not an integer, or group is not a process group.
    """

    start: int
    stop: int
    vocab_size: int
    group: dist.ProcessGroup | None = None
    # Read from the group once, so that a compiled graph sees plain values.
    group_name: str = field(default="", init=False, repr=False)
    group_size: int = field(default=1, init=False, repr=False)

    def __post_init__(self) -> None:
        for name, least in (("start", -(2**63)), ("stop", -(2**63)), ("vocab_size", 1)):
            object.__setattr__(self, name, integer(name, getattr(self, name), least))
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"a shard needs 0 <= start <= stop, got start {self.start}, stop {self.stop}")
        if self.group is None:
            if self.start != 0 or self.stop < self.vocab_size:
                raise ValueError(
                    f"rows [{self.start}, {self.stop}) of a vocabulary of {self.vocab_size} without a group: pass the process "
                    "group that holds the other rows (dist.group.WORLD is None before init_process_group)"
                )
            return
        _check_member(self.group)
        object.__setattr__(self, "group_name", merge.name_of(self.group))
        object.__setattr__(self, "group_size", self.group.size())

    def __copy__(self) -> VocabShard:
        return self

    def __deepcopy__(self, memo: dict) -> VocabShard:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "group": None, "group_name": ""}  # a process group cannot be pickled

    def with_group(self, group: dist.ProcessGroup | None) -> VocabShard:
        """Return a shard with these rows and another process group."""
        return VocabShard(self.start, self.stop, self.vocab_size, group)

    @property
    def num_rows(self) -> int:
        """Rows of the local weight, padding included."""
        return self.stop - self.start

    @property
    def num_valid(self) -> int:
        """Rows of the local weight that are part of the vocabulary."""
        return max(0, min(self.stop, self.vocab_size) - self.start)

    def check_group(self) -> None:
        """Raise RuntimeError if the shard was unpickled without its process group, or the group was destroyed."""
        if self.group is None and self.group_size > 1:
            raise RuntimeError(
                f"this VocabShard, one of {self.group_size}, was loaded without its process group: "
                "give it one, shard = shard.with_group(group)"
            )
        if self.group is not None:
            merge.check_alive(self.group)

    def check(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.check_group()
        rows = weight.shape[0]
        if self.num_rows != rows:
            raise ValueError(f"shard holds {self.num_rows} rows [{self.start}, {self.stop}), linear_weight has {rows}")
        if bias is not None and bias.shape != (rows,):
            raise ValueError(f"linear_bias must be [{rows}] like linear_weight's rows, got {tuple(bias.shape)}")

    @classmethod
    def even(cls, vocab_size: int, group: dist.ProcessGroup | None, multiple_of: int = 1) -> VocabShard:
        """Return this rank's shard of a vocabulary that is split evenly over a group.

        With ``multiple_of=1`` the split is DTensor's: shards of ``ceil(vocab_size / ranks)`` rows, no padding, and the last
        shards smaller or empty. With a larger ``multiple_of`` every rank holds the same number of rows, as in Megatron, and
        the last shards end in padding.

        Args:
            vocab_size: Size of the whole vocabulary, without padding.
            group: The vocabulary-parallel process group, or None for a vocabulary that is not split.
            multiple_of: Number that divides every shard's number of rows.

        Raises:
            RuntimeError: group is None in a run of several ranks (WORLD_SIZE) before ``init_process_group``, where
                ``dist.group.WORLD`` is None, too.
        """
        integer("vocab_size", vocab_size, 1)
        integer("multiple_of", multiple_of, 1)
        if group is None:
            check_alone()
        else:
            _check_member(group)
        rank, size = (0, 1) if group is None else (group.rank(), group.size())
        return cls(*even_rows(vocab_size, rank, size, multiple_of), vocab_size, group)

    @classmethod
    def from_dtensor(cls, weight: DTensor) -> VocabShard:
        """Return the shard of a DTensor that is sharded on dim 0 over one mesh dimension and replicated over all others.

        The sharded mesh dimension is taken to be the vocabulary-parallel one. With FSDP2, read the weight inside the forward of
        the wrapped module, where it is gathered: a DTensor does not say which of its mesh dimensions belong to FSDP2.

        Args:
            weight: [V, D] head weight. Its local tensor has this rank's rows.

        Raises:
            ValueError: The weight is sharded over several mesh dimensions, or not on dim 0.
        """
        placements = weight.placements
        sharded = [dim for dim, placement in enumerate(placements) if not isinstance(placement, Replicate)]
        if not sharded:
            return cls(0, weight.shape[0], weight.shape[0])
        if len(sharded) > 1:
            raise ValueError(
                f"linear_weight is a DTensor sharded over {len(sharded)} mesh dimensions, {placements}, of which only one "
                "can be the vocabulary's: an FSDP2 weight is whole only in the forward of the module that owns it "
                "(VocabParallelHead, say)"
            )
        if placements[sharded[0]] != Shard(0):
            raise ValueError(f"linear_weight's DTensor must be sharded on dim 0, the vocabulary, got {placements}")
        return cls.even(weight.shape[0], _group_of_dim(weight.device_mesh, sharded[0]))


def check_alone() -> None:
    """Raise RuntimeError if a group of None may be ``dist.group.WORLD`` before ``init_process_group``."""
    num_ranks = os.environ.get("WORLD_SIZE", "1")
    if not dist.is_initialized() and num_ranks not in ("", "0", "1"):
        raise RuntimeError(
            f"group is None, as dist.group.WORLD is before init_process_group, and WORLD_SIZE is {num_ranks}: call "
            "init_process_group first; if each rank shall have the whole vocabulary, leave the group out"
        )


def _check_member(group: Any) -> None:
    member = group is not dist.GroupMember.NON_GROUP_MEMBER
    if member:
        kind("group", group, dist.ProcessGroup)
        merge.check_alive(group)
    if not member or dist.get_group_rank(group, dist.get_rank()) < 0:  # type: ignore[arg-type]
        raise ValueError("this rank is not a member of the shard's process group")


def group_of(name: str, mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the process group of a mesh's last dimension. Raise ValueError on a rank outside the mesh."""
    if mesh.get_coordinate() is None:
        raise ValueError(f"this rank ({dist.get_rank()}) is not a member of {name}, {mesh}")
    return _group_of_dim(mesh, mesh.ndim - 1)


def _group_of_dim(mesh: DeviceMesh, dim: int) -> dist.ProcessGroup:
    """Return the process group of a mesh dimension. Raise RuntimeError if the mesh is of an earlier ``init_process_group``."""
    if torch.compiler.is_compiling():
        return mesh.get_group(dim)
    with contextlib.suppress(RuntimeError):
        group = mesh.get_group(dim)  # torch finds it by its name
        if group.size() == mesh.size(dim):
            return group
    raise RuntimeError(f"the process groups of {mesh} were destroyed, or not made: make the mesh anew")


_made_once = lru_cache(maxsize=64)(VocabShard)


def local_rows(
    weight: torch.Tensor, bias: torch.Tensor | None, shard: VocabShard | None
) -> tuple[torch.Tensor, torch.Tensor | None, VocabShard]:
    if weight.dim() != 2:
        flat = (
            ": a weight that ZeRO-3 or FSDP1 has freed? It is whole only in the forward of the module that owns it "
            "(VocabParallelHead, say)"
        )
        raise ValueError(f"linear_weight must be [V, D], got {tuple(weight.shape)}{flat if weight.dim() == 1 else ''}")
    kind("shard", shard, VocabShard)
    if isinstance(bias, DTensor):
        theirs = (weight.device_mesh, weight.placements) if isinstance(weight, DTensor) else "a plain tensor"
        if (bias.device_mesh, bias.placements) != theirs:
            raise ValueError(f"linear_bias is a DTensor {bias.placements}, linear_weight {theirs}: split them alike")
        bias = bias.to_local()
    if isinstance(weight, DTensor):
        if shard is not None:
            raise ValueError("linear_weight is a DTensor, whose placements give the shard: leave shard out")
        return weight.to_local(), bias, VocabShard.from_dtensor(weight)
    if shard is None:
        rows = weight.shape[0]
        if rows == 0:
            raise ValueError(f"linear_weight has no rows, got {tuple(weight.shape)}")
        shard = VocabShard(0, rows, rows) if torch.compiler.is_compiling() else _made_once(0, rows, rows)
    return weight, bias, shard
