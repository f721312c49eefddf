"""GradFilter: which elements of the logits' gradient are worth computing, and what stands in for the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from cce_dist.checks import boolean, choice, number

SCREENS = ("fp8", "auto")


@dataclass(frozen=True)
class GradFilter:
    """Drop the part of the gradient in which nothing matters, and repair what dropping does to the mean.

    Every element of the softmax's gradient that reaches ``eps`` times the gradient of its token's label is kept, and so is the
    label's own. The whole gradient is looked at: z-loss and upstream gradients included. Where the entropy is differentiated
    everything is kept. The uniform term of label smoothing is never dropped. The Triton backend keeps more than that: all
    elements of the columns that are labels most often in the batch, what it had to read to judge it, all of a token whose list
    would be very long, and all of all tokens where the lists would cost more than the exact gradient.

    What is dropped is tiny, element by element, but it all pushes the same way: without compensation the mean of dE over
    tokens is wrong by tens of percent. With compensation a rank-1 matrix replaces the dropped part: its row sums, times
    each column's share of the column sums (taken of absolute values). So the mean of dE is right, where upstream gradients have
    one sign, and every row of the weight gets its gradient. The torch backend takes the shares from all tokens; the Triton
    backend takes them from a sample of 256, sampled in proportion to what a token drops, and reweights them to the mean
    hidden state of all.

    The rank-1 matrix gives all tokens the same mix of columns, and the tokens of a trained model differ in it. To first order
    that is a matrix of D x D times their hidden states, taken from 64 columns of every 1,024 on the shard. What is dropped of
    some columns (32 of every 1,024, at most 1,024, sampled by their shares) corrects both for dE, and what 256 tokens drop
    corrects the rank-1 matrix for dC, as far as that is more than noise. Smaller shards, and for dC and the D x D matrix
    smaller batches, have the rank-1 matrix alone. On Triton so has dC where half of ``workspace_bytes`` does not hold 256
    numbers for each column, and dE has no such matrix where a quarter does not hold it.

    Args:
        eps: Threshold, in the units of a probability. 0 keeps everything.
        compensate: False is the plain filter of the paper.
        hidden: False leaves dE exact ("FullE").
        weight: False leaves dC exact ("FullC").
        always: True filters whatever it costs; see below.
        screen: "fp8" takes most logits of the forward pass from products in 8 bits (e4m3), which cost about half. What they
            find near the threshold or above is computed again from the operands, so the label's logit and all that is kept are
            as right as without. The log-sum-exp is off by some 1e-4 to 1e-3 nats, less than that of logits in bf16. It needs
            bf16, the Triton backend and a GPU of compute capability 9.0 (Hopper) or later; elsewhere "fp8" is an error. "auto"
            screens there if the sizes say that it takes less time (``kernels.budget.screen_pays``; with ``always`` whatever
            they say), and nowhere else. Tokens whose sums cannot be trusted are computed again from all logits in bf16. The
            entropy comes from the same sums, with two to five times the error of the log-sum-exp. A call is not screened at all
            if it has label smoothing or an aux output that needs the largest logit ("max_logit", "label_is_max"). None: no
            screen.

    **Where it does nothing.** A filter has a cost of its own, so on a small head exact gradients take less time. The Triton
    backend then computes those, as if no filter had been given: ``filter_stats`` says that all is kept, and the budget is that
    of exact gradients unless one is given. The sizes alone decide (tokens, D, ids of a shard, dtype, ``workspace_bytes``; see
    ``kernels.budget.filter_pays``), so every rank and every step does the same. ``always=True`` is for studies of the filter.
    The torch backend always filters: it says what the filter means, and saves no time.

    Raises:
        ValueError, TypeError: eps is not in [0, 1), a flag no bool, or screen something else. A call of the loss raises them,
            too, where "fp8" cannot be had.

    Source: Cut Your Losses in Large-Vocabulary Language Models (Wijmans et al.), section 4.3, for the filter. The
    compensation is this project's.
    """

    eps: float = 2.0**-10
    compensate: bool = True
    hidden: bool = True
    weight: bool = True
    always: bool = False
    screen: str | None = None

    def __post_init__(self) -> None:
        if self.screen is not None:
            choice("GradFilter.screen", self.screen, SCREENS)
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
