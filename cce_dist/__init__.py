"""Cross-entropy of a language-model head from hidden states and a vocabulary-sharded weight, without the logits.

Reading order: ``loss`` (the call, and the way of the data), ``op`` (forward and backward), ``shard`` (who holds which
rows), ``merge`` (the collectives), ``kernels`` (the arithmetic of one shard), ``filter``, ``head`` (the module), and
``reference`` (the same loss, dense: the specification).
"""

from cce_dist.filter import FilterStats, GradFilter
from cce_dist.head import VocabParallelHead
from cce_dist.loss import LinearCrossEntropyOutput, linear_cross_entropy
from cce_dist.shard import VocabShard

__all__ = [
    "FilterStats",
    "GradFilter",
    "LinearCrossEntropyOutput",
    "VocabParallelHead",
    "VocabShard",
    "linear_cross_entropy",
]
