"""GradFilter: which elements of the logits' gradient are worth computing, and what stands in for the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from cce_dist.checks import boolean, number


@dataclass(frozen=True)
class GradFilter:
    """Drop the part of the gradient in which nothing matters, and repair what dropping does to the mean.

    Every element of the softmax's gradient that reaches ``eps`` times the gradient of its token's label is kept, and so is the
    label's own. The whole gradient is looked at: z-loss and upstream gradients included. Where the entropy is differentiated
    everything is kept. The uniform term of label smoothing is never dropped. The Triton backend may keep more, never less.

    What is dropped is tiny, element by element, but it all pushes the same way: without compensation the mean of dE over
    tokens is wrong by tens of percent. With compensation a rank-1 matrix replaces the dropped part: its row sums, times
    each column's share of the column sums (taken of absolute values). So the mean of dE is right, where upstream gradients have
    one sign, and every row of the weight gets its gradient. Where the sizes allow it, sampled columns and tokens correct that
    matrix for dE and for dC, as far as they are more than noise: docs/filter.md has the formulas.

    Args:
        eps: Threshold, in the units of a probability. 0 keeps everything.
        compensate: False is the plain filter of the paper.
        hidden: False leaves dE exact ("FullE").
        weight: False leaves dC exact ("FullC").
        always: True filters whatever it costs; see below.

    **Where it does nothing.** A filter has a cost of its own, so on a small head exact gradients take less time. The Triton
    backend then computes those, and ``filter_stats`` says that all is kept. The sizes alone decide (tokens, D, ids of a shard,
    dtype, ``workspace_bytes``), so every rank and every step does the same. ``always=True`` is for studies of the filter. The
    torch backend always filters: it says what the filter means, and saves no time.

    Raises:
        ValueError, TypeError: eps is not in [0, 1), or a flag is no bool.

    Source: Cut Your Losses in Large-Vocabulary Language Models (Wijmans et al.), section 4.3, for the filter. The
    compensation is this project's.
    """

    eps: float = 2.0**-10
    compensate: bool = True
    hidden: bool = True
    weight: bool = True
    always: bool = False

    def __post_init__(self) -> None:
        for flag in ("compensate", "hidden", "weight", "always"):
            boolean(f"GradFilter.{flag}", getattr(self, flag))
        if not 0.0 <= number("GradFilter.eps", self.eps) < 1.0:
            raise ValueError(f"GradFilter.eps must be in [0, 1), got {self.eps}")


class FilterStats(NamedTuple):
    """What the filter does on this rank's shard, from the forward pass; 0-d fp32 tensors, read them when you like.

    Attributes:
        kept: Share of the logits that are kept, over the tokens that are not ignored.
        dropped_mass_mean: Softmax mass dropped, mean over the tokens that are not ignored.
        dropped_mass_max: The same, maximum over tokens.
    """

    kept: Tensor
    dropped_mass_mean: Tensor
    dropped_mass_max: Tensor
