"""Megatron-core: a model's loss straight from hidden states, its parameters, checkpoints and schedules left as they are.

Since 0.12 every language model of Megatron ends in two calls, once for its loss and once for each depth of multi-token
prediction (MTP):

    logits, _ = self.output_layer(hidden, weight=..., runtime_gather_output=...)
    loss = self.compute_language_model_loss(labels, logits)

``convert`` puts ``output_layer`` and the model into subclasses of their own classes. While a model has labels, the first call
returns ``DeferredLogits``, which keep its arguments. The second calls ``output_layer`` again, for the loss, and through
``__call__``, so that hooks which gather parameters just in time run around the real use of the weight. Other calls compute
logits as usual. docs/megatron.md says when, and what is refused.

Letters: s sequence (of this context-parallel rank), b sequences of a microbatch, h hidden size, tp the tensor-parallel size,
V the vocabulary with its padding.
"""

from cce_dist.integrations.megatron.flags import add_arguments, install, options_from_args, uninstall
from cce_dist.integrations.megatron.loss import (
    Options,
    vocab_parallel_log_probs,
    vocab_parallel_loss,
    vocab_parallel_max,
)
from cce_dist.integrations.megatron.scores import log_probs_of, log_probs_processor, next_ids
from cce_dist.integrations.megatron.swap import convert, require, revert

__all__ = [
    "Options",
    "add_arguments",
    "convert",
    "install",
    "log_probs_of",
    "log_probs_processor",
    "next_ids",
    "options_from_args",
    "require",
    "revert",
    "uninstall",
    "vocab_parallel_log_probs",
    "vocab_parallel_loss",
    "vocab_parallel_max",
]
