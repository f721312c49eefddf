"""DeepSpeed: a model's loss straight from hidden states, asked for in ds_config, with the model's own code left as it is.

``initialize`` is ``deepspeed.initialize`` that also reads the section ``"cce_dist"``. Where a framework calls DeepSpeed,
``install()`` or ``python -m cce_dist.integrations.deepspeed SCRIPT ...`` puts it in place of DeepSpeed's own.

Models that compute their loss in forward find deferred logits, as under ``cce_dist.convert``. A pipeline's last layer returns
the hidden states themselves, so that activation checkpoints find a tensor, and ``loss_fn`` is given deferred logits of them. A
head whose vocabulary is split over the model axis is a ``CCEHead``, tied to a ``CCEEmbedding`` if need be.
"""

from cce_dist.integrations.deepspeed.engine import convert, initialize, install, require, uninstall
from cce_dist.integrations.deepspeed.layers import (
    CCEEmbedding,
    CCEEmbeddingSpec,
    CCEHead,
    CCEHeadSpec,
    layer_weights,
    loss_fn,
    sum_over_shards,
)
from cce_dist.integrations.deepspeed.loss import Options
from cce_dist.integrations.deferred.tensor import TensorLogits as DeferredLogits

__all__ = [
    "CCEEmbedding",
    "CCEEmbeddingSpec",
    "CCEHead",
    "CCEHeadSpec",
    "DeferredLogits",
    "Options",
    "convert",
    "initialize",
    "install",
    "layer_weights",
    "loss_fn",
    "require",
    "sum_over_shards",
    "uninstall",
]
