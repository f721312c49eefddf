"""Megatron-core: a model's loss straight from hidden states, its parameters, checkpoints and schedules left as they are.

Since 0.12 every language model of Megatron ends in two calls, once for its loss and once for each depth of multi-token
prediction (MTP):

    logits, _ = self.output_layer(hidden, weight=..., runtime_gather_output=...)
    loss = self.compute_language_model_loss(labels, logits)

``convert`` puts ``output_layer`` and the model into subclasses of their own classes. While a model has labels, the first
call returns ``DeferredLogits``, which remember what they were asked from; the second asks ``output_layer`` again, now for the
loss, and through ``__call__``: the hooks that gather parameters just in time thus run around the real use of the weight. A
model without labels, in inference say, computes the logits that it always did.

Ways in: ``convert(model)``; ``install()`` and the configuration ``cross_entropy_fusion_impl="cce"``; or, for a training script
as it is, ``python -m cce_dist.integrations.megatron SCRIPT ...``. One rank then says in a line that the loss is in use, and
``require(model)`` raises where it is not.

Tested on CPUs against Megatron's own unfused loss, every parameter's gradient included: tensor, sequence, pipeline (virtual,
too), expert and context parallelism (with a stand-in for its attention, which needs Transformer Engine), MTP, tied and frozen
heads, per-token loss, DDP and the distributed optimizer with overlap and main_grad, bf16, fp16 with its loss scaling, full and
selective recomputation, auxiliary losses of experts, evaluation. Layers in fp8 or replayed from CUDA graphs: with stand-ins
for both; the head is outside of either. Not tried: Transformer Engine itself, the graph of a whole iteration, the overlap of
expert communication but for its way to call the head, Megatron-FSDP, layers of Mamba. Refused, in one line: a head of another
class than ``ColumnParallelLinear``, as that in fp8 is (``fp8_output_proj``), a head with a bias or a forward of its own, a
model with a ``compute_language_model_loss`` of its own, and ``defer_embedding_wgrad_compute``.

Logits are computed as ever where somebody else wants them: in a call without labels, in an ``output_processor`` (0.18 on),
by a ``compute_language_model_loss`` that was set on the instance, and for the log of ``config_logger_dir``.

``log_probs_processor`` is an ``output_processor`` that returns log-probabilities and entropies, for reinforcement learning.

Reading order: ``loss`` (plain functions), ``swap`` (convert and revert), ``flags`` (configuration, command lines, launcher),
``scores`` (log-probabilities).

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
from cce_dist.integrations.megatron.scores import log_probs_processor
from cce_dist.integrations.megatron.swap import convert, require, revert

__all__ = [
    "Options",
    "add_arguments",
    "convert",
    "install",
    "log_probs_processor",
    "options_from_args",
    "require",
    "revert",
    "uninstall",
    "vocab_parallel_log_probs",
    "vocab_parallel_loss",
    "vocab_parallel_max",
]
