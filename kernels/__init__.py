"""Arithmetic of one shard: what a rank computes from its own rows of the head weight. No ranks, no collectives.

Letters in tensor names: N tokens, D hidden size, V rows of the weight on this shard, K statistics per token.

Two backends offer the same functions with the same meaning, ``torch_ops`` (plain torch, any device) and ``triton_ops``
(the kernels of this folder, GPUs; ``filtered`` is its form with a filter):

=================  ==================================================  ==============================================
function           in                                                  out
=================  ==================================================  ==============================================
``local_stats``    hidden [N, D], weight [V, D], bias [V], labels [N]  stats [K, N] fp32, the saved tensors
``gradients``      the same, the merged LSE, coefficients [4, N] fp32  d_hidden [N, D], d_weight [V, D], d_bias [V]
=================  ==================================================  ==============================================

and so do ``torch_ops`` and ``per_token`` (Triton) for what is done with N numbers before, between and after:

=================  ==================================================  ==============================================
``label_ids``      labels [N]                                          the id, IGNORED or OUTSIDE [N]
``token_losses``   the shards' stats [T, K, N], ids [N]                nll, lse, target logit, ... [N]; the merged LSE
``coefficients``   gradients of those [N], ids [N]                     coefficients [4, N] fp32
=================  ==================================================  ==============================================

The logits of the shard are ``z = softcap * tanh(u / softcap)`` with ``u = logit_scale * (hidden @ weight.T + bias)``
(``z = u`` without a softcap); rows of the weight at or past ``num_valid`` are padding: logit -inf, gradient exactly 0.

**Statistics of a shard**, rows of ``stats_KN`` (a maximum of -inf and zeros where the shard has no valid row):

====  ===========  ====================================================================================
row   name         value
====  ===========  ====================================================================================
0     MAX          m = max_j z_j
1     SUM_EXP      sum_j exp(z_j - m)
2     TARGET       z at the label if it is a valid row of this shard, else 0
3     SUM_BELOW    sum_j (m - z_j); only where label smoothing is on
last  SUM_MOMENT   sum_j exp(z_j - m) (z_j - m); only where the entropy is wanted
====  ===========  ====================================================================================

**Gradient of a logit**, from four coefficients per token (rows of ``coef_4N``: ``P``, ``LABEL``, ``UNIFORM``, ``ENTROPY``)
and from the merged maximum M and logarithm of the sum L, so that p_j = exp(z_j - M - L) is exact next to any offset:

    dL/dz_j = P * p_j + LABEL * [j = label] + UNIFORM - ENTROPY * p_j * (log p_j + H)

and dL/du_j is that times 1 - (z_j / softcap)^2.
"""

from __future__ import annotations

from typing import NamedTuple

IGNORED, OUTSIDE = -1, -2  # in place of a label's id: it is the ignore_index; it is not in the vocabulary
TILE_N, TILE_V = 128, 256  # the unit of filtering in torch_ops: tokens x vocabulary rows; in filtered it is one element


class ShardLogits(NamedTuple):
    """How logits come from hidden states on this shard.

    Attributes:
        start: First vocabulary id of the shard; row j of the weight is id ``start + j``.
        num_valid: Rows of the weight that are part of the vocabulary; rows from here on are padding.
        logit_scale: Multiplies the logits.
        softcap: Bound of the logits, ``softcap * tanh(u / softcap)``; 0 means none.
    """

    start: int
    num_valid: int
    logit_scale: float = 1.0
    softcap: float = 0.0


class Filter(NamedTuple):
    """What of the gradient is dropped; eps = 0 keeps all. The public, documented form is ``cce_dist.GradFilter``."""

    eps: float = 0.0
    compensate: bool = True
    hidden: bool = True
    weight: bool = True
