"""Frequent columns: the few that the filter keeps for every token.

A trained softmax is above a useful threshold at some hundred logits a token. Nearly all of them are of the few hundred ids
that are frequent anywhere: those columns are kept whole, as a matrix. The batch's own labels tell which they are, so the
vocabulary's order does not matter.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cce_dist.kernels import Operands
from cce_dist.kernels.budget import frequent_columns
from cce_dist.kernels.tiles import interpreted


class Frequent(NamedTuple):
    """The frequent columns of a shard; F of them."""

    ids_F: Tensor  # int64: their columns, ascending
    slot_V: Tensor  # int32: each column's place among them, from 1 on, or 0; filled up to whole words of bits
    x: Operands  # they as a shard of their own that begins at 0; its labels are those of the call, not slots

    def words(self) -> Tensor:
        """Return the frequent columns as bits, [W] int32, like a row of the marks of ``lse.py``."""
        bits = (self.slot_V > 0).view(-1, 32).long() << torch.arange(32, device=self.slot_V.device)
        return bits.sum(1).int()


def num_frequent(num_valid: int, eps: float) -> int:
    """Return F, whole tiles: 1,024, or 1/eps or 1/16 of the shard if that is less.

    At most 1/eps ids are likely enough on average to be kept everywhere. With 512 frequent columns dE is off by 1.2 to 1.3
    times as much (H200, eps 2**-10, V 32,000 to 256,000, two rungs of the bench's ladder, 2026-11), and no head took less
    time.
    """
    return frequent_columns(num_valid, eps, 32 if interpreted() else 256)


def most_labelled(x: Operands, size: int) -> Tensor:
    """Return the ``size`` columns of the shard that are the label most often, ascending; of equals, the first."""
    num_valid = x.logits.num_valid
    column_N = x.ids - x.logits.start
    here_N = (x.ids >= 0) & (column_N >= 0) & (column_N < num_valid)
    count_V = torch.zeros(num_valid + 1, dtype=torch.int64, device=x.ids.device)
    count_V.scatter_add_(0, torch.where(here_N, column_N, num_valid), torch.ones_like(column_N))
    key_V = (count_V + 1) * num_valid - torch.arange(num_valid + 1, device=x.ids.device)
    return key_V[:num_valid].topk(size, sorted=False).indices.int().sort().values.long()


def gather_frequent(ids_F: Tensor, x: Operands, num_words: int) -> Frequent:
    """Copy the frequent columns' rows out of the weight, and note where they are."""
    slot_V = torch.zeros(32 * num_words, dtype=torch.int32, device=ids_F.device)
    slot_V.index_copy_(0, ids_F, torch.arange(1, ids_F.shape[0] + 1, dtype=torch.int32, device=ids_F.device))
    frequent = columns_of(x, ids_F)
    return Frequent(ids_F, slot_V, frequent._replace(logits=frequent.logits._replace(start=0)))


def columns_of(x: Operands, column_K: Tensor) -> Operands:
    """Copy some columns: a shard of their own, but for its first id, which stays that of ``x``."""
    weight_KD = x.weight.index_select(0, column_K)
    bias_K = None if x.bias is None else x.bias.index_select(0, column_K)
    return x._replace(weight=weight_KD, bias=bias_K, logits=x.logits._replace(num_valid=column_K.shape[0]))


def outside_frequent(
    bound_N: Tensor, frequent_max_N: Tensor, frequent_sum_N: Tensor, max_N: Tensor, sum_N: Tensor
) -> Tensor:
    """Return bound_3N: the bound; ``sum_N`` less the frequent columns, relative to ``max_N``; and that maximum."""
    outside_N = sum_N - frequent_sum_N * (frequent_max_N - max_N).exp()
    return torch.stack((bound_N, outside_N.clamp(min=0.0), max_N))
