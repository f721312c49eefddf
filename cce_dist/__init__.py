"""Cross-entropy of a language-model head from hidden states and a vocabulary-sharded weight, without the logits.

Reading order: ``loss`` (the call, and the way of the data), ``log_probs`` (log-probabilities of given ids, on the same
operator), ``operands`` (the tensors of a call, checked), ``op`` (forward and backward), ``shard`` (who holds which rows),
``merge`` (the collectives), ``kernels`` (the arithmetic of one shard), ``filter``, and ``reference`` (the same, dense: the
specification). ``convert``, ``require`` and ``revert`` take over the head of a model, and ``VocabParallelHead`` is a head; they
are adapters, imported at their first use.
"""

from typing import TYPE_CHECKING, Any

from cce_dist.divergence import linear_kl_divergence
from cce_dist.divergence.topk import topk_kl_divergence
from cce_dist.filter import FilterStats, GradFilter
from cce_dist.integrations.on_import import on_import
from cce_dist.kept_ids import KeptIds
from cce_dist.log_probs import LogProbs, linear_log_probs
from cce_dist.loss import LinearCrossEntropyOutput, explain, linear_cross_entropy
from cce_dist.shard import VocabShard

if TYPE_CHECKING:
    from cce_dist.integrations.convert import convert, require, revert
    from cce_dist.integrations.head import VocabParallelHead

__all__ = [
    "FilterStats",
    "GradFilter",
    "KeptIds",
    "LinearCrossEntropyOutput",
    "LogProbs",
    "VocabParallelHead",
    "VocabShard",
    "convert",
    "explain",
    "linear_cross_entropy",
    "linear_kl_divergence",
    "linear_log_probs",
    "require",
    "revert",
    "topk_kl_divergence",
]


def __getattr__(name: str) -> Any:
    if name in ("convert", "require", "revert"):
        from cce_dist.integrations import convert as module

        return getattr(module, name)
    if name == "VocabParallelHead":
        from cce_dist.integrations.head import VocabParallelHead

        return VocabParallelHead
    raise AttributeError(f"module 'cce_dist' has no attribute '{name}'")


def _watch(deepspeed: Any) -> None:
    from cce_dist.integrations.deepspeed.engine import watch

    watch(deepspeed)


# An engine of plain deepspeed.initialize ignores our section of ds_config, and says so.
on_import("deepspeed", _watch)
