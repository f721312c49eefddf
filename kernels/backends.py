"""The functions that each backend has. ``cce_dist/decide.py`` chooses the backend of a call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

from torch import Tensor

from cce_dist.kernels import Gradients, Grads, Losses, Operands, Softmax, Spec, Upstream, dense


class Backend(Protocol):
    """One shard's arithmetic, first the functions of one number per token, then the passes over the vocabulary."""

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function(*args)``, which is or calls one of these functions. See ``passes.run``."""

    def ordered_ids(self, labels_N: Tensor, ignore_index: int, vocab_size: int) -> tuple[Tensor, list[Tensor] | None]:
        """Replace ``ignore_index`` by IGNORED and labels outside the vocabulary by OUTSIDE. [N] int64 -> [N] int64.

        Return these ids, and ``Operands.order``.
        """

    def token_losses(self, stats_TKN: Tensor, x: Operands, spec: Spec) -> tuple[Losses, Softmax]:
        """Merge the shards' statistics by log-add-exp, in rank order, so that every rank computes the same bits.

        Only ids and order of ``x`` count. The entropy of the softmax is None unless it is wanted.
        """

    def saved_like(self, x: Operands, spec: Spec) -> list[Tensor]:
        """Return tensors with the shapes and dtypes that ``statistics`` saves."""

    def nothing_saved(self, x: Operands) -> list[Tensor]:
        """Return the tensors that ``gradients`` takes where forward has kept nothing. A filter always keeps something."""

    def statistics(
        self, x: Operands, gather: Callable[[Tensor], Tensor], spec: Spec
    ) -> tuple[Tensor, list[Tensor]]:
        """Return this shard's statistics, stats_KN, and the tensors saved for backward.

        Args:
            gather: Gathers [3, N] of each rank to [T, 3, N]. A backend calls it once on every rank, or on none.
        """

    def losses_alone(self, x: Operands, spec: Spec) -> tuple[Losses, Softmax, Tensor | None, list[Tensor]]:
        """Return ``token_losses``, stats_TKN and the tensors saved for backward if this shard is the whole vocabulary.

        The statistics are for ``outputs.merge_listed`` and ``outputs.merge_cells``. They are None if neither function needs
        them. The row TARGET may be unset.
        """

    def gradients(
        self, x: Operands, softmax: Softmax, upstream: Upstream, saved: list[Tensor], grads: Grads, spec: Spec
    ) -> Gradients:
        """Return d_hidden [N, D] in hidden's dtype, d_weight [V, D] in weight's dtype, d_bias [V] fp32, or None each."""


@lru_cache(maxsize=4)
def named(name: str) -> Backend:
    """Return the backend "dense", "exact" or "filter". The last two need Triton and are imported on first use."""
    if name == "dense":
        return dense
    from cce_dist.kernels import exact, filter

    return filter if name == "filter" else exact
