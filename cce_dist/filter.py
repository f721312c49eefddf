"""GradFilter: which elements of the logits' gradient are computed, and how the dropped ones are compensated."""

from __future__ import annotations

from dataclasses import dataclass

from cce_dist.checks import boolean, number


@dataclass(frozen=True)
class GradFilter:
    """Skip negligible elements of the logits' gradient, and compensate for them.

    The gradient of a logit has a softmax term, the probability times a coefficient that includes the z-loss. This term is kept
    if its absolute value is at least ``eps`` times the gradient of the token's negative log-likelihood. The label's own element
    and the uniform term of label smoothing are always kept. If the entropy is differentiated, everything is kept. The Triton
    backend may keep more elements, never fewer.

    Dropped elements are tiny, but most have the same sign: without compensation the mean of dE over tokens is off by tens of
    percent. Compensation replaces the dropped part by a rank-1 matrix: the outer product of its row sums and each column's
    share of the absolute values. It preserves the mean of dE if the upstream gradients have one sign, and gives every row of
    the weight a gradient. For large enough sizes, sampled columns and tokens correct this matrix; docs/filter.md has the
    formulas.

    The filter has a cost of its own, so the Triton backend computes exact gradients for a small head. The decision depends on
    the number of tokens, D, the sizes of the vocabulary and of an even shard, the dtype and ``workspace_bytes`` alone, so it is
    the same on every rank and in every step. The torch backend always filters, as a reference that saves no time.

    Args:
        eps: Threshold in [0, 1), in units of a probability. 0 keeps everything.
        compensate: Whether to compensate for dropped elements. False is the plain filter of the paper.
        hidden: Whether to filter dE. False is the paper's "FullE".
        weight: Whether to filter dC. False is the paper's "FullC".
        always: Whether to filter even if exact gradients are faster. For studies of the filter.

    Raises:
        ValueError: eps is not in [0, 1).
        TypeError: eps is not a number, or a flag is not a bool.

    Source:
        Cut Your Losses in Large-Vocabulary Language Models (Wijmans et al.), section 4.3, for the filter. The compensation is
        this project's.
    """

    eps: float = 2.0**-10
    compensate: bool = True
    hidden: bool = True
    weight: bool = True
    always: bool = False

    def __post_init__(self) -> None:
        for flag in ("compensate", "hidden", "weight", "always"):
            boolean(f"GradFilter.{flag}", getattr(self, flag))
        object.__setattr__(self, "eps", number("GradFilter.eps", self.eps))
        if not 0.0 <= self.eps < 1.0:
            raise ValueError(f"GradFilter.eps must be in [0, 1), got {self.eps}")
