"""The functions that each backend has. ``cce_dist/decide.py`` chooses the backend of a call.

``dense`` (plain torch), ``exact`` and ``filter`` (Triton) are modules that have all of these functions, so the operator in
``cce_dist/op.py`` reads like the algorithm and names no backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from cce_dist.kernels import Gradients, Grads, Operands, Softmax, Spec, dense


class Backend(Protocol):
    """One shard's arithmetic. ``cce_dist.kernels`` defines the letters and records."""

    # Functions of one number per token.

    def label_ids(self, labels_N: Tensor, ignore_index: int, vocab_size: int) -> Tensor:
        """Replace ``ignore_index`` by IGNORED and labels outside the vocabulary by OUTSIDE. [N] int64 -> [N] int64."""
        ...

    def ordered_ids(self, labels_N: Tensor, ignore_index: int, vocab_size: int) -> tuple[Tensor, list[Tensor] | None]:
        """Return ``label_ids`` of all tokens, and ``Operands.order``."""
        ...

    def token_losses(self, stats_TKN: Tensor, ids_N: Tensor, spec: Spec) -> tuple[Any, ...]:
        """Merge the shards' statistics by log-add-exp, in rank order, so that every rank computes the same bits.

        Returns:
            nll, log-sum-exp, target logit, nll of the uniform distribution and entropy, [N] fp32, then the ``Softmax``. Outputs
            are 0 where a label is IGNORED, NaN where it is OUTSIDE. Uniform nll and both entropies are None unless wanted.
        """
        ...

    def merged_lse(self, stats_T3N: Tensor) -> Tensor:
        """Merge maxima and sums of exponentials of all shards into a log-sum-exp. [T, 3, N] -> [N] fp32."""
        ...

    def mean(self, nll_N: Tensor, labels_N: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
        """Return the mean over labels that are not ``ignore_index``, [] fp32, and their number, at least 1, [] int64."""
        ...

    def coefficients(
        self, grads: Sequence[Tensor | None], ids_N: Tensor, vocab_size: int, of_mean: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Return coef_4N, the four coefficients of each token's logit gradients; 0 for tokens without a label.

        Args:
            grads: Gradients of the outputs of ``token_losses``; None: 0.
            of_mean: Gradient of ``mean``, and the number of labels that ``mean`` returned; None: 0.
        """
        ...

    # Passes over the vocabulary.

    def saved_like(self, x: Operands, spec: Spec) -> list[Tensor]:
        """Return tensors with the shapes and dtypes that ``statistics`` saves."""
        ...

    def saved_of_slices(self, x: Operands, spec: Spec) -> list[Tensor] | None:
        """Return the tensors saved for backward if forward may process the tokens in slices, else None.

        None: forward saves data of every token, so it needs all tokens at once. Only dtype and D of ``x.hidden`` count.
        """
        ...

    def statistics(
        self, x: Operands, spec: Spec, merge_bound: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return this shard's statistics, stats_KN, and the tensors saved for backward.

        Args:
            merge_bound: Merges log-sum-exps over ranks. It takes [3, N], the maximum, the sum of exponentials and 0 over some
                of this shard's columns, and returns the log-sum-exp [N] over these columns of all shards. A backend calls
                it once on every rank, or on none.
        """
        ...

    def gradients(
        self, x: Operands, softmax: Softmax, coef_4N: Tensor, saved: list[Tensor], grads: Grads, spec: Spec
    ) -> Gradients:
        """Return d_hidden [N, D] in hidden's dtype, d_weight [V, D] in weight's dtype, d_bias [V] fp32, or None each."""
        ...


def named(name: str) -> Backend:
    """Return the backend "dense", "exact" or "filter". The last two need Triton and are imported on first use."""
    if name == "dense":
        return dense
    from cce_dist.kernels import exact, filter

    return filter if name == "filter" else exact
