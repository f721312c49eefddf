"""VocabShard: which rows of the vocabulary this rank holds, and with whom it shares the rest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from cce_dist.checks import integer, kind


def even_rows(vocab_size: int, rank: int, size: int, multiple_of: int = 1) -> tuple[int, int]:
    """First row and end of shard ``rank`` of ``size``, as ``VocabShard.even`` splits: before there is a group, too."""
    rows = -(-vocab_size // (size * multiple_of)) * multiple_of
    start, stop = rank * rows, (rank + 1) * rows
    if multiple_of == 1:
        start, stop = min(start, vocab_size), min(stop, vocab_size)
    return start, stop


@dataclass(frozen=True)
class VocabShard:
    """Rows [start, stop) of a vocabulary of ``vocab_size`` ids, split over the ranks of ``group``.

    The shards of a group's ranks tile the vocabulary; they may differ in size, and be empty. Rows at or past
    ``vocab_size`` are padding: their logits count as -inf and their gradient is exactly 0.

    A copy keeps the group. A file keeps the numbers: a shard of several ranks that was loaded from one has to be given a group
    (``with_group``) before its first use.

    Args:
        start: First id of this rank's rows.
        stop: One past the last id; the local weight has ``stop - start`` rows.
        vocab_size: Logical size of the whole vocabulary.
        group: The vocabulary-parallel group. None means that the vocabulary is not split (never "the world").

    Raises:
        ValueError: The range is no range, rows of an unsplit vocabulary are missing, or this rank is not in the group.
        TypeError: No integer, or no process group.
    """

    start: int
    stop: int
    vocab_size: int
    group: dist.ProcessGroup | None = None
    # read off the group once, so that a compiled graph sees plain values
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
                    f"rows [{self.start}, {self.stop}) of a vocabulary of {self.vocab_size} without a group: "
                    "the other rows are nowhere; pass the process group that holds them"
                )
            return
        _check_member(self.group)
        object.__setattr__(self, "group_name", self.group.group_name)
        object.__setattr__(self, "group_size", self.group.size())

    def __copy__(self) -> VocabShard:
        return self

    def __deepcopy__(self, memo: dict) -> VocabShard:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "group": None, "group_name": ""}  # as a file holds it

    def with_group(self, group: dist.ProcessGroup | None) -> VocabShard:
        """Return the same rows in another group."""
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
        """Raise RuntimeError if the group was left behind in another process."""
        if self.group is None and self.group_size > 1:
            raise RuntimeError(
                f"this VocabShard, one of {self.group_size}, was loaded without its process group: "
                "give it one, shard = shard.with_group(group)"
            )

    def check(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Raise ValueError unless weight [V_r, D] and bias [V_r] have this shard's rows; see ``check_group``."""
        self.check_group()
        rows = weight.shape[0]
        if self.num_rows != rows:
            raise ValueError(f"shard holds {self.num_rows} rows [{self.start}, {self.stop}), linear_weight has {rows}")
        if bias is not None and bias.shape != (rows,):
            raise ValueError(f"linear_bias must be [{rows}] like linear_weight's rows, got {tuple(bias.shape)}")

    @classmethod
    def even(cls, vocab_size: int, group: dist.ProcessGroup | None, multiple_of: int = 1) -> VocabShard:
        """Split a vocabulary evenly over a group.

        With ``multiple_of=1`` nothing is padded and the split is DTensor's (ceil-sized shards, the last ones smaller or
        empty). With a larger ``multiple_of`` every rank holds the same number of rows, that multiple, as in Megatron;
        the last shards end in padding.

        Args:
            vocab_size: Logical size of the vocabulary.
            group: The vocabulary-parallel group, or None for a vocabulary that is not split.
            multiple_of: Every shard's rows are a multiple of this.
        """
        integer("vocab_size", vocab_size, 1)
        integer("multiple_of", multiple_of, 1)
        if group is not None:
            _check_member(group)
        rank, size = (0, 1) if group is None else (group.rank(), group.size())
        return cls(*even_rows(vocab_size, rank, size, multiple_of), vocab_size, group)

    @classmethod
    def from_dtensor(cls, weight: DTensor) -> VocabShard:
        """Read the shard off a weight that is sharded on dim 0 over one mesh dimension (and replicated over others).

        That mesh dimension is taken to be the vocabulary-parallel one. A DTensor does not say whether FSDP2 made it: read
        inside the forward of the module that FSDP2 wraps, the weight is gathered and this holds; outside it is not.

        Args:
            weight: [V, D] DTensor; its local tensor is the ``linear_weight`` of this rank.

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
        return cls.even(weight.shape[0], weight.device_mesh.get_group(sharded[0]))


def _check_member(group: Any) -> None:
    """Raise unless this is a process group that this rank is in."""
    member = group is not dist.GroupMember.NON_GROUP_MEMBER
    if member:
        kind("group", group, dist.ProcessGroup)
    if not member or dist.get_group_rank(group, dist.get_rank()) < 0:  # type: ignore[arg-type]
        raise ValueError("this rank is not a member of the shard's process group")


def group_of(name: str, mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the process group of a mesh's last dimension; ValueError on a rank that is not in the mesh."""
    if mesh.get_coordinate() is None:
        raise ValueError(f"this rank ({dist.get_rank()}) is not a member of {name}, {mesh}")
    return mesh.get_group(mesh.ndim - 1)


def local_rows(
    weight: torch.Tensor, bias: torch.Tensor | None, shard: VocabShard | None
) -> tuple[torch.Tensor, torch.Tensor | None, VocabShard]:
    """The rows of weight and bias that are here and the shard that they are, for plain tensors or DTensors."""
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
            raise ValueError("linear_weight is a DTensor, which says itself how it is sharded: leave shard out")
        return weight.to_local(), bias, VocabShard.from_dtensor(weight)
    if shard is None:
        if weight.shape[0] == 0:
            raise ValueError(f"linear_weight has no rows, got {tuple(weight.shape)}")
        shard = VocabShard(0, weight.shape[0], weight.shape[0])
    return weight, bias, shard
