"""The functions that each backend has. ``cce_dist/decide.py`` chooses the backend of a call.

``dense`` (plain torch), ``exact`` and ``filter`` (Triton) are modules that all have these functions with the same meaning, so
that the operator in ``cce_dist/op.py`` reads as the algorithm does and names none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from cce_dist.kernels import Gradients, Grads, Operands, Softmax, Spec, dense


class Backend(Protocol):
    """One shard's arithmetic. ``cce_dist.kernels`` defines the letters and records."""

    # Each token's numbers, before, between and after the passes over the vocabulary.

    def label_ids(self, labels_N: Tensor, ignore_index: int, vocab_size: int) -> Tensor:
        """Return each label, or IGNORED, or OUTSIDE. [N] int64 -> [N] int64."""
        ...

    def ordered_ids(self, labels_N: Tensor, ignore_index: int, vocab_size: int) -> tuple[Tensor, list[Tensor] | None]:
        """Return ``label_ids`` of all tokens, and ``Operands.order``."""
        ...

    def token_losses(self, stats_TKN: Tensor, ids_N: Tensor, spec: Spec) -> tuple[Any, ...]:
        """Merge the shards' statistics by log-add-exp, in rank order, so that every rank computes the same bits.

        Returns:
            nll, log-sum-exp, target logit, nll of the uniform distribution and entropy, [N] fp32, the last two None unless
            wanted; 0 where a label is IGNORED, NaN where it is OUTSIDE. Then the ``Softmax``, its entropy None unless wanted.
        """
        ...

    def merged_lse(self, stats_T3N: Tensor) -> Tensor:
        """Return the log-sum-exp over what the shards' statistics cover. [T, 3, N] -> [N] fp32."""
        ...

    def mean(self, nll_N: Tensor, labels_N: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
        """Return the mean over labels that are not ``ignore_index``, [] fp32, and how many those are, at least 1, [] int64."""
        ...

    def coefficients(
        self, grads: Sequence[Tensor | None], ids_N: Tensor, vocab_size: int, of_mean: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Return coef_4N; 0 where there is no label.

        Args:
            grads: Gradients of what ``token_losses`` returned; None: 0.
            of_mean: Gradient of ``mean``, and the number of labels that it returned; None: 0.
        """
        ...

    # The passes over the vocabulary.

    def saved_like(self, x: Operands, spec: Spec) -> list[Tensor]:
        """Return tensors of the shapes and dtypes of what ``statistics`` saves."""
        ...

    def saved_of_slices(self, x: Operands, spec: Spec) -> list[Tensor] | None:
        """Return what is saved for backward where statistics are taken of slices of the tokens, one after another.

        None: forward keeps something of every token for backward, so that it needs all tokens at once. ``x.hidden`` is read
        for its dtype and D alone.
        """
        ...

    def statistics(
        self, x: Operands, spec: Spec, merge_bound: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return this shard's statistics, stats_KN, and what is saved for backward.

        Args:
            merge_bound: Turns this shard's maximum, sum of exp and 0 over some of its columns, [3, N], into the log-sum-exp
                [N] over all shards' columns of that kind. A backend calls it once on every rank, or on none.
        """
        ...

    def filter_stats(self, x: Operands, softmax: Softmax, saved: list[Tensor], spec: Spec) -> Tensor:
        """Return the share of logits kept, and the softmax mass dropped (mean and maximum over labelled tokens). -> [3]."""
        ...

    def gradients(
        self, x: Operands, softmax: Softmax, coef_4N: Tensor, saved: list[Tensor], grads: Grads, spec: Spec
    ) -> Gradients:
        """Return d_hidden [N, D] in hidden's dtype, d_weight [V, D] in weight's dtype, d_bias [V] fp32; None if not wanted."""
        ...


def named(name: str) -> Backend:
    """Return the backend "dense", "exact" or "filter"; the two on Triton are imported by their first use."""
    if name == "dense":
        return dense
    from cce_dist.kernels import exact, filter

    return filter if name == "filter" else exact
