"""Cross-entropy of a language-model head from hidden states and a vocabulary-sharded weight, without the logits.

Public names are imported at their first use, so that ``import cce_dist`` and ``cce-dist --help`` do not wait for torch.
docs/design.md has the files in reading order.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cce_dist.integrations.on_import import on_import

__version__ = "0.2.0.dev0"

if TYPE_CHECKING:
    from cce_dist import objectives as objectives
    from cce_dist.divergence import linear_kl_divergence
    from cce_dist.divergence.topk import topk_kl_divergence
    from cce_dist.filter import GradFilter
    from cce_dist.integrations.convert import convert, require, revert
    from cce_dist.integrations.head import VocabParallelHead
    from cce_dist.kept_ids import KeptIds
    from cce_dist.log_probs import LogProbs, linear_log_probs
    from cce_dist.loss import LinearCrossEntropyOutput, explain, linear_cross_entropy
    from cce_dist.shard import VocabShard
    from cce_dist.token_loss import TokenLossOutput

__all__ = [
    "GradFilter",
    "KeptIds",
    "LinearCrossEntropyOutput",
    "LogProbs",
    "TokenLossOutput",
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

_MODULE_OF = {
    "GradFilter": "filter",
    "KeptIds": "kept_ids",
    "LinearCrossEntropyOutput": "loss",
    "LogProbs": "log_probs",
    "TokenLossOutput": "token_loss",
    "VocabParallelHead": "integrations.head",
    "VocabShard": "shard",
    "convert": "integrations.convert",
    "explain": "loss",
    "linear_cross_entropy": "loss",
    "linear_kl_divergence": "divergence",
    "linear_log_probs": "log_probs",
    "require": "integrations.convert",
    "revert": "integrations.convert",
    "topk_kl_divergence": "divergence.topk",
}


def __getattr__(name: str) -> Any:
    if name == "objectives":
        return import_module("cce_dist.objectives")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'cce_dist' has no attribute '{name}'")
    value = globals()[name] = getattr(import_module(f"cce_dist.{_MODULE_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__")), "objectives"])


def _watch(_: Any) -> None:
    from cce_dist.integrations.deepspeed.engine import watch_engines

    watch_engines()


# Log a warning if plain deepspeed.initialize reads a ds_config with our section, which it ignores.
on_import("deepspeed", _watch)
