"""GradFilter: which elements of the logits' gradient are worth computing, and what stands in for the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class GradFilter:
    """Drop the part of the gradient in which nothing matters, and repair what dropping does to the mean.

    Every element of the softmax's gradient that reaches ``eps`` times the gradient of its token's label is kept, and so is the
    label's own. The whole gradient is looked at: z-loss and upstream gradients included (the torch backend: the entropy's too;
    on Triton a differentiated entropy makes all exact). The uniform term of label smoothing is never dropped. What is kept
    beyond that is the backend's choice of unit: the torch backend keeps whole tiles of 128 tokens x 256 rows of the weight, the
    Triton backend single elements, and all elements of the columns that are labels most often in the batch.

    What is dropped is tiny, element by element, but it all pushes the same way: without compensation the mean of dE over
    tokens is wrong by tens of percent. With compensation a rank-1 matrix with the row sums and the column sums of the
    dropped part stands in for it, so the mean of dE is right and every row of the weight gets its gradient. The torch backend
    takes both from all tokens, those with positive and with negative upstream gradients apart; the Triton backend takes row
    sums from all tokens, and how they divide over the columns from a sample of 512, drawn in proportion to what a token drops
    and weighted to have the mean hidden state's component along itself.

    Args:
        eps: Threshold, in the units of a probability. 0 keeps everything.
        compensate: False is the plain filter of the paper.
        hidden: False leaves dE exact ("FullE").
        weight: False leaves dC exact ("FullC").

    Raises:
        ValueError: eps is not in [0, 1).

    Source: Cut Your Losses in Large-Vocabulary Language Models (Wijmans et al.), section 4.3, for the filter. The
    compensation is this project's.
    """

    eps: float = 2.0**-12
    compensate: bool = True
    hidden: bool = True
    weight: bool = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.eps < 1.0:
            raise ValueError(f"GradFilter.eps must be in [0, 1), got {self.eps}")


class FilterStats(NamedTuple):
    """What the filter does on this rank's shard, from the forward pass; 0-d fp32 tensors, read them when you like.

    Attributes:
        kept_tiles: Share of the units that survive: tiles on the torch backend, elements on Triton.
        dropped_mass_mean: Softmax mass dropped, mean over the tokens that are not ignored.
        dropped_mass_max: The same, maximum over tokens.
    """

    kept_tiles: Tensor
    dropped_mass_mean: Tensor
    dropped_mass_max: Tensor
