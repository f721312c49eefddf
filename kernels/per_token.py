"""What is done with each token's numbers around the two passes over the vocabulary, one launch each instead of thirty.

``torch_ops`` has the same three functions in plain torch, which say what they mean: ``label_ids``, ``token_losses`` (merges the
shards' statistics by log-add-exp, in rank order, so that every rank computes the same bits) and ``coefficients``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from cce_dist.kernels import IGNORED, OUTSIDE
from cce_dist.kernels.tiles import cdiv
from cce_dist.kernels.triton_ops import on_device

_IGNORED, _OUTSIDE = tl.constexpr(IGNORED), tl.constexpr(OUTSIDE)
_BLOCK = 128  # tokens of a program


def _launch(kernel, num_tokens: int, first: torch.Tensor, *others, **options) -> None:
    if num_tokens:
        with on_device(first):
            kernel[(cdiv(num_tokens, _BLOCK),)](first, *others, num_tokens, **options, BLOCK_N=_BLOCK)


def label_ids(labels_N: torch.Tensor, ignore_index: int, vocab_size: int) -> torch.Tensor:
    """Return each label, or IGNORED, or OUTSIDE. [N] int64 -> [N] int64."""
    ids_N = torch.empty_like(labels_N)
    _launch(_label_ids_kernel, ids_N.shape[0], labels_N, ids_N, ignore_index, vocab_size)
    return ids_N


@triton.jit(
    do_not_specialize=["ignore_index", "vocab_size", "num_tokens"], do_not_specialize_on_alignment=["labels_ptr"]
)
def _label_ids_kernel(
    labels_ptr,  # in: [N] int64
    ids_ptr,  # out: [N] int64
    ignore_index,
    vocab_size,
    num_tokens,
    BLOCK_N: tl.constexpr,
):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = offs_n < num_tokens
    label = tl.load(labels_ptr + offs_n, mask=in_n, other=0)
    ids = tl.where((label >= 0) & (label < vocab_size), label, _OUTSIDE)
    tl.store(ids_ptr + offs_n, tl.where(label == ignore_index, _IGNORED, ids), mask=in_n)


def token_losses(
    stats_TKN: torch.Tensor, ids_N: torch.Tensor, vocab_size: int, want_uniform: bool, want_entropy: bool
) -> tuple[torch.Tensor, ...]:
    """Merge the shards' statistics; see ``torch_ops.token_losses``."""
    num_shards, num_stats, num_tokens = stats_TKN.shape
    nll_N, lse_N, target_N = (stats_TKN.new_empty(num_tokens) for _ in range(3))
    uniform_nll_N = stats_TKN.new_empty(num_tokens if want_uniform else 0)
    entropy_N = stats_TKN.new_empty(num_tokens if want_entropy else 0)
    merged_KN = stats_TKN.new_empty(2 + want_entropy, num_tokens)
    _launch(
        _token_losses_kernel, num_tokens, stats_TKN, ids_N,
        nll_N, lse_N, target_N, uniform_nll_N, entropy_N, merged_KN, num_shards, num_stats, vocab_size,
        WANT_UNIFORM=want_uniform, WANT_ENTROPY=want_entropy,
    )  # fmt: skip
    return nll_N, lse_N, target_N, uniform_nll_N, entropy_N, merged_KN


def merged_lse(stats_TKN: torch.Tensor) -> torch.Tensor:
    """Return the log-sum-exp over what the shards' statistics cover. [T, K, N] -> [N] fp32."""
    num_shards, num_stats, num_tokens = stats_TKN.shape
    lse_N = stats_TKN.new_empty(num_tokens)
    _launch(_merged_lse_kernel, num_tokens, stats_TKN, lse_N, num_shards, num_stats)
    return lse_N


@triton.jit
def _merged_max(stats_ptr, offs_n, in_n, num_shards, shard_stride):
    merged_max = tl.full(offs_n.shape, float("-inf"), tl.float32)
    for shard in range(0, num_shards):
        shard_max = tl.load(stats_ptr + shard * shard_stride + offs_n, mask=in_n, other=0)
        merged_max = tl.maximum(merged_max, shard_max, propagate_nan=tl.PropagateNan.ALL)
    return merged_max


@triton.jit
def _below(shard_max, merged_max):
    # An empty shard and a row of -inf logits have maximum -inf: no difference of infinities may become NaN there.
    return tl.where(shard_max == merged_max, 0.0, shard_max - merged_max)


@triton.jit(do_not_specialize=["num_shards", "num_stats", "num_tokens"], do_not_specialize_on_alignment=["stats_ptr"])
def _merged_lse_kernel(
    stats_ptr,  # in: [T, K, N] fp32
    lse_ptr,  # out: [N] fp32
    num_shards,
    num_stats,
    num_tokens,
    BLOCK_N: tl.constexpr,
):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = offs_n < num_tokens
    plane = num_tokens.to(tl.int64)
    merged_max = _merged_max(stats_ptr, offs_n, in_n, num_shards, num_stats * plane)
    sum_exp = tl.zeros((BLOCK_N,), tl.float32)
    for shard in range(0, num_shards):
        where = stats_ptr + shard * num_stats * plane + offs_n
        below = _below(tl.load(where, mask=in_n, other=0), merged_max)
        sum_exp += tl.exp(below) * tl.load(where + plane, mask=in_n, other=1)
    tl.store(lse_ptr + offs_n, merged_max + tl.log(sum_exp), mask=in_n)


@triton.jit(
    do_not_specialize=["num_shards", "num_stats", "vocab_size", "num_tokens"],
    do_not_specialize_on_alignment=["stats_ptr", "ids_ptr"],
)
def _token_losses_kernel(
    stats_ptr,  # in: [T, K, N] fp32
    ids_ptr,  # in: [N] int64
    nll_ptr,  # out: [N] fp32
    lse_ptr,  # out: [N] fp32
    target_ptr,  # out: [N] fp32
    uniform_nll_ptr,  # out: [N] fp32
    entropy_ptr,  # out: [N] fp32
    merged_ptr,  # out: [2 or 3, N] fp32
    num_shards,
    num_stats,
    vocab_size,
    num_tokens,
    WANT_UNIFORM: tl.constexpr,
    WANT_ENTROPY: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = offs_n < num_tokens
    plane = num_tokens.to(tl.int64)
    merged_max = _merged_max(stats_ptr, offs_n, in_n, num_shards, num_stats * plane)

    sum_exp = tl.zeros((BLOCK_N,), tl.float32)
    target = tl.zeros((BLOCK_N,), tl.float32)
    sum_below = tl.zeros((BLOCK_N,), tl.float32)
    moment = tl.zeros((BLOCK_N,), tl.float32)
    for shard in range(0, num_shards):
        where = stats_ptr + shard * num_stats * plane + offs_n
        below = _below(tl.load(where, mask=in_n, other=0), merged_max)
        weight = tl.exp(below)
        shard_sum = tl.load(where + plane, mask=in_n, other=1)
        sum_exp += weight * shard_sum
        target += tl.load(where + 2 * plane, mask=in_n, other=0)
        if WANT_UNIFORM:
            count = tl.load(where + 4 * plane, mask=in_n, other=0)
            sum_below += tl.load(where + 3 * plane, mask=in_n, other=0) + tl.where(count > 0, -below * count, 0.0)
        if WANT_ENTROPY:
            shard_moment = tl.load(where + (num_stats - 1) * plane, mask=in_n, other=0)
            moment += tl.where(weight == 0, 0.0, weight * (shard_moment + below * shard_sum))
    log_sum = tl.log(sum_exp)
    tl.store(merged_ptr + offs_n, merged_max, mask=in_n)
    tl.store(merged_ptr + plane + offs_n, log_sum, mask=in_n)

    ids = tl.load(ids_ptr + offs_n, mask=in_n, other=_IGNORED)
    instead = tl.where(ids == _IGNORED, 0.0, float("nan"))
    tl.store(nll_ptr + offs_n, tl.where(ids >= 0, merged_max - target + log_sum, instead), mask=in_n)
    tl.store(lse_ptr + offs_n, tl.where(ids >= 0, merged_max + log_sum, instead), mask=in_n)
    tl.store(target_ptr + offs_n, tl.where(ids >= 0, target, instead), mask=in_n)
    if WANT_UNIFORM:
        uniform_nll = sum_below / vocab_size + log_sum
        tl.store(uniform_nll_ptr + offs_n, tl.where(ids >= 0, uniform_nll, instead), mask=in_n)
    if WANT_ENTROPY:
        entropy = log_sum - moment / sum_exp
        tl.store(merged_ptr + 2 * plane + offs_n, entropy, mask=in_n)
        tl.store(entropy_ptr + offs_n, tl.where(ids >= 0, entropy, instead), mask=in_n)


def coefficients(grads: Sequence[torch.Tensor | None], ids_N: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return coef_4N from the gradients of what ``token_losses`` returned; see ``torch_ops.coefficients``."""
    coef_4N = torch.empty(4, ids_N.shape[0], dtype=torch.float32, device=ids_N.device)
    strides = [0 if grad is None else grad.stride(0) for grad in grads]
    _launch(_coefficients_kernel, ids_N.shape[0], ids_N, *grads, coef_4N, *strides, vocab_size)
    return coef_4N


@triton.jit
def _grad(grad_ptr, stride, offs_n, live):
    grad = tl.zeros(offs_n.shape, tl.float32)
    if grad_ptr is not None:
        grad = tl.load(grad_ptr + offs_n.to(tl.int64) * stride, mask=live, other=0)
    return grad


@triton.jit(
    do_not_specialize=[
        "nll_stride",
        "lse_stride",
        "target_stride",
        "uniform_stride",
        "entropy_stride",
        "vocab_size",
        "num_tokens",
    ],
    do_not_specialize_on_alignment=["d_nll_ptr", "d_lse_ptr", "d_target_ptr", "d_uniform_ptr", "d_entropy_ptr"],
)
def _coefficients_kernel(
    ids_ptr,  # in: [N] int64
    d_nll_ptr,  # in: [N] fp32 of any stride, or None; also the next four
    d_lse_ptr,
    d_target_ptr,
    d_uniform_ptr,
    d_entropy_ptr,
    coef_ptr,  # out: [4, N] fp32
    nll_stride,
    lse_stride,
    target_stride,
    uniform_stride,
    entropy_stride,
    vocab_size,
    num_tokens,
    BLOCK_N: tl.constexpr,
):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = offs_n < num_tokens
    live = tl.load(ids_ptr + offs_n, mask=in_n, other=_IGNORED) >= 0
    d_nll = _grad(d_nll_ptr, nll_stride, offs_n, live)
    d_lse = _grad(d_lse_ptr, lse_stride, offs_n, live)
    d_target = _grad(d_target_ptr, target_stride, offs_n, live)
    d_uniform = _grad(d_uniform_ptr, uniform_stride, offs_n, live)
    plane = num_tokens.to(tl.int64)
    tl.store(coef_ptr + offs_n, d_nll + d_lse + d_uniform, mask=in_n)
    tl.store(coef_ptr + plane + offs_n, d_target - d_nll, mask=in_n)
    tl.store(coef_ptr + 2 * plane + offs_n, -d_uniform / vocab_size, mask=in_n)
    tl.store(coef_ptr + 3 * plane + offs_n, _grad(d_entropy_ptr, entropy_stride, offs_n, live), mask=in_n)
