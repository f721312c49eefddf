"""Layers of a vocabulary that is split over the model axis, how a list of layers names them, and which rows a head holds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from cce_dist import merge
from cce_dist.integrations.fsdp import looked_up
from cce_dist.integrations.options import SECTION
from cce_dist.integrations.patching import attributes
from cce_dist.shard import VocabShard, even_rows


class _Split:
    """How layers that hold rows of a vocabulary initialize and mark them. zero.Init would wrap a module's __init__."""

    def reset_parameters(self: Any) -> None:
        # Draw from a stream of this shard's own; the default generators of all ranks stay alike.
        is_split = self.rows.tp_size > 1
        seed = int(torch.randint(2**62, (), device="cpu").item()) if is_split else 0
        with torch.random.fork_rng(devices=[], enabled=is_split):
            if is_split:
                torch.manual_seed(seed + self.rows.tp_rank)
            super().reset_parameters()  # type: ignore[misc]
        # Without the mark DeepSpeed clips by a norm that lacks the shards of ranks past 0.
        for parameter in self.parameters():
            setattr(parameter, "tensor_model_parallel", is_split)  # noqa: B010, no attribute of Parameter


class CCEHead(_Split, nn.Linear):
    """The rows of a language model's head that this rank of the model axis holds: hidden [..., D] -> logits.

    Without conversion by ``initialize``, forward returns local logits, or raises if the vocabulary is split.
    The initial rows differ between ranks that are seeded alike, and depend on the number of ranks.

    Args:
        hidden_size, vocab_size: D, V. Shards have equal sizes, but the last ones are smaller where the ranks do not divide V.
        tp_rank, tp_size: This is shard tp_rank of tp_size.
        bias, device, dtype: As for ``nn.Linear``.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.rows = Rows(vocab_size, tp_rank, tp_size)
        super().__init__(hidden_size, self.rows.count, bias=bias, device=device, dtype=dtype)

    def forward(self, input: Tensor) -> Tensor:
        self.rows.require_group()
        return super().forward(input)


class CCEEmbedding(_Split, nn.Embedding):
    """The input embedding with the same rows as a ``CCEHead``, to tie the two: ids [...] of the whole vocabulary -> [..., D].

    Communication: Forward all-reduces its result over the model axis; backward makes no collective.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.rows = Rows(vocab_size, tp_rank, tp_size)
        super().__init__(self.rows.count, hidden_size, device=device, dtype=dtype)

    def forward(self, input: Tensor) -> Tensor:
        group = self.rows.require_group()
        if group is None:
            return super().forward(input)
        return sum_over_shards(looked_up(input, self.weight, self.rows.start), group)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return this rank's logits [..., V_r] of a head tied to this embedding."""
        return F.linear(hidden, self.weight)


def CCEHeadSpec(hidden_size: int, vocab_size: int, *, topology: Any = None, tied: str = "", **options: Any) -> Any:
    """``LayerSpec`` of a ``CCEHead``, the last layer of a ``PipelineModule``. Named like a class: it stands among LayerSpecs.

    Args:
        hidden_size, vocab_size: D, V.
        topology: The pipeline's; its axis "model" splits the vocabulary. None: not split.
        tied: Key of a ``CCEEmbeddingSpec`` earlier in the list, whose weight this uses.
        **options: bias, device, dtype of ``CCEHead``; of a tied head, device and dtype of ``CCEEmbedding``.
    """
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    options |= _place_in_topology(topology)
    if tied:
        return TiedLayerSpec(tied, CCEEmbedding, hidden_size, vocab_size, forward_fn=CCEEmbedding.logits, **options)
    return LayerSpec(CCEHead, hidden_size, vocab_size, **options)


def CCEEmbeddingSpec(hidden_size: int, vocab_size: int, *, topology: Any = None, tied: str, **options: Any) -> Any:
    """``TiedLayerSpec`` of a ``CCEEmbedding`` whose weight the ``CCEHeadSpec`` with the same key uses; the same arguments."""
    from deepspeed.pipe import TiedLayerSpec

    return TiedLayerSpec(tied, CCEEmbedding, hidden_size, vocab_size, **options, **_place_in_topology(topology))


@contextlib.contextmanager
def layer_weights(weights: Sequence[float]) -> Iterator[None]:
    """Have a PipelineModule that is made inside, with ``partition_method="parameters"``, balance these weights of its layers.

    DeepSpeed counts parameters, and so weighs an embedding like the head. ``cce-dist plan`` prints weights.

    Args:
        weights: One for each layer of the module, in order; not negative. ValueError if the number of layers is another.
    """
    from deepspeed.pipe import PipelineModule

    def weighed(module: Any) -> list[float]:
        if len(weights) != len(module._layer_specs):
            raise ValueError(f"{len(weights)} weights for the {len(module._layer_specs)} layers of a PipelineModule")
        return list(weights)

    with attributes(PipelineModule, _count_layer_params=weighed):
        yield


def loss_fn(logits: Any, labels: Tensor) -> Tensor:
    """Mean cross-entropy of logits [..., V] and labels [...]: a ``loss_fn`` for a ``PipelineModule``, dense or deferred."""
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1))


class Rows:
    """The rows of the vocabulary that a ``CCEHead`` or ``CCEEmbedding`` holds; ``convert`` adds the group."""

    def __init__(self, vocab_size: int, tp_rank: int, tp_size: int) -> None:
        if not 0 <= tp_rank < tp_size:
            raise ValueError(f"tp_rank must be in [0, tp_size), got {tp_rank} of {tp_size}")
        self.start, self.stop = even_rows(vocab_size, tp_rank, tp_size)
        self.vocab_size, self.tp_rank, self.tp_size = vocab_size, tp_rank, tp_size
        self.count, self.group = self.stop - self.start, None
        self.joined_by_engine = False  # else by the user's own code, which knows when to leave the group

    def require_group(self) -> dist.ProcessGroup | None:
        if self.tp_size > 1 and self.group is None:
            raise RuntimeError(
                "a vocabulary-split layer without its group: nothing has turned cce_dist on; call "
                f'cce_dist.integrations.deepspeed.initialize with "{SECTION}": {{"enabled": true}}'
            )
        if self.group is not None:
            merge.check_alive(self.group)
        return self.group

    def join(self, group: dist.ProcessGroup | None) -> VocabShard:
        size, rank = (1, 0) if group is None else (group.size(), group.rank())
        if (rank, size) != (self.tp_rank, self.tp_size):
            raise ValueError(
                f"this layer is shard {self.tp_rank} of {self.tp_size}, but this rank is {rank} of {size} on the model axis"
            )
        self.group = group if size > 1 else None
        return VocabShard(self.start, self.stop, self.vocab_size, self.group)


def sum_over_shards(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of the ranks' parts. Every rank then computes the whole gradient of the sum.

    Communication: one all-reduce in forward, none in backward.
    """
    return merge.SumOverRanks.apply(part, group)


def split_layers(model: nn.Module) -> list[Any]:
    return [x for x in model.modules() if isinstance(x, (CCEHead, CCEEmbedding)) and x.rows.tp_size > 1]


def shard_of(head: Any) -> VocabShard:
    """Return which rows of the vocabulary a head, or the embedding that it is tied to, holds."""
    if isinstance(head, (CCEHead, CCEEmbedding)):
        return head.rows.join(head.rows.group)
    if hasattr(head, "vocab_start_index"):  # AutoTP's VocabParallelLinear
        group = head.mp_group if head.tp_world_size > 1 else None
        return VocabShard(head.vocab_start_index, head.vocab_end_index, head.vocab_size, group)
    rows = head.num_embeddings if isinstance(head, nn.Embedding) else head.out_features
    return VocabShard(0, rows, rows)


def _place_in_topology(topology: Any) -> dict[str, int]:
    if topology is None or "model" not in topology.get_axis_names():
        return {}
    return {"tp_rank": topology.get_coord(dist.get_rank()).model, "tp_size": topology.get_dim("model")}
