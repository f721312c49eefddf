"""How products become logits in a kernel: the one place that knows a bias, a scale, a softcap and each token's factors.

    u = before * (hidden @ weight.T + bias),  z = after * softcap * tanh(u / softcap)  (z = u without a softcap)

``before`` and ``after`` are a token's factors; without factors ``before`` is the head's scale and ``after`` is 1. Triton
knows at compile time which fields of ``Head`` are None, and a factor of 1 leaves no instruction. ``logits_of`` also masks
columns past the end of the vocabulary, so forward and backward cannot disagree. A record has no integers: Triton would compile
a kernel again if one became 1 or a multiple of 16, which ``blocks.kernel`` can turn off for arguments alone.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def token_factors(head, token, live):
    """Return the factors on the logits of these tokens before and after the softcap: two fp32 blocks.

    ``head.factors`` is read for live tokens alone; other tokens get 1.
    """
    before = tl.full(token.shape, 1.0, tl.float32)
    after = before
    if head.scale is not None:
        before = tl.full(token.shape, head.scale, tl.float32)
    if head.factors is not None:
        where = head.factors + 2 * token.to(tl.int64)
        before = tl.load(where, mask=live, other=1)
        if head.softcap is not None:
            after = tl.load(where + 1, mask=live, other=1)
    return before, after


@triton.jit
def logits_of(
    acc,  # products: [BLOCK_N, BLOCK_V] for a tile, or [BLOCK] for a list of (token, column) pairs
    offs_v,  # columns of the products: [BLOCK_V] or [BLOCK]
    in_v,  # whether each column is part of the vocabulary
    head,  # in: Head
    factors,  # two results of ``token_factors``: [BLOCK_N] or [BLOCK] each, or scalars
    MASK_V: tl.constexpr,  # whether some columns may be outside the vocabulary
):
    """Turn fp32 products into logits; with MASK_V, columns outside the vocabulary become -inf."""
    z = acc
    before, after = factors
    inside = in_v
    TILE: tl.constexpr = len(acc.shape) == 2
    if TILE:
        before = before[:, None]
        after = after[:, None]
        inside = in_v[None, :]
    if head.bias is not None:
        bias = tl.load(head.bias + offs_v, mask=in_v, other=0).to(tl.float32)
        if TILE:
            bias = bias[None, :]
        z += bias
    z *= before
    if head.softcap is not None:
        z = softcapped(z, head.softcap, head.far)
    if MASK_V:
        z = tl.where(inside, z, float("-inf"))
    return z * after


@triton.jit
def softcapped(u, softcap, far):
    """Return softcap * tanh(u / softcap), computed from one exponential that cannot overflow. ``far`` as in ``Head``."""
    exponent = tl.abs(u) * (-2.0 / softcap)
    t = tl.exp(exponent)
    bounded = softcap * (1.0 - t) / (1.0 + t)
    if far is not None:
        # 1 - t cancels if u is far below the softcap. Then use tanh x = x - x^3 / 3, exact to rounding, with 2 x = -exponent.
        bounded = tl.where(exponent > -0.03125, tl.abs(u) * (1.0 - exponent * exponent * (1.0 / 12.0)), bounded)
    return tl.where(u < 0, -bounded, bounded)


@triton.jit
def slope_of(z, head, after):
    """Return the softcap's slope at the logits z: dz/du divided by ``after``. The head must have a softcap."""
    capped = z * (1.0 / (head.softcap * after))
    return 1.0 - capped * capped


@triton.jit
def sloped(e, z, head, after):
    """Multiply exponentials by the softcap's slope. An exponential of 0 stays 0, even if its logit is infinite."""
    return tl.where(e > 0, e * slope_of(z, head, after), 0.0)
