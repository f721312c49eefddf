"""What backward decides of each token before it filters: whether the lists can serve it, and from which logit on they keep.

    kept: |P| p_j >= eps |LABEL|, that is z_j >= threshold = LSE + log(eps |LABEL| / |P|)     (eps alone where LABEL or P is 0)

The lists hold what is ``SLACK`` below ``bound + log eps``, so they serve unless the threshold is lower than that; a token of
too long a list, or for which there is no room, or with anything that is not finite, is not served either.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from cce_dist.kernels import ShardLogits

SLACK = 1.125  # the lists reach this much lower than the bound alone, so that a usual z-loss or smoothing is served
FARTHEST = tl.constexpr(30.0)  # nats between bound and LSE; the marks of lse.py mean nothing beyond its HEADROOM


class Plan(NamedTuple):
    """Per token, [N]; rows of tokens that are not listed hold nothing but the labels.

    Attributes:
        listed_labels: The label if head and list serve the token, else -1; int64.
        dense_labels: The label if the exact path must, else -1; int64.
        head_labels: The label's place in the head if it has one and the token is listed, else -1; int64.
        end: Where the token's entries end; int32.
        index: The listed tokens, in order, then the others, as ``kept_first`` of compact.py; int32.
        threshold: Logits below it are dropped, fp32.
        mass: Softmax mass of the shard's columns outside the head, times the softcap's slopes, fp32.
        reference: LSE less log |P|, fp32: exp(z - reference) = |P| p.
        num_dense: [1] int32.
        num_listed: [1] int32.
    """

    listed_labels: torch.Tensor
    dense_labels: torch.Tensor
    head_labels: torch.Tensor
    end: torch.Tensor
    index: torch.Tensor
    threshold: torch.Tensor
    mass: torch.Tensor
    reference: torch.Tensor
    num_dense: torch.Tensor
    num_listed: torch.Tensor


def plan(
    labels_N: torch.Tensor,
    max_N: torch.Tensor,
    log_sum_N: torch.Tensor,
    coef_4N: torch.Tensor,
    state_3N: torch.Tensor,
    count_N: torch.Tensor,
    slot_V: torch.Tensor | None,
    logits: ShardLogits,
    eps: float,
    longest: int,
    capacity: int,
) -> Plan:
    """Decide for every token; ``longest`` and ``capacity`` are the columns that one list and all lists have room for.

    Without ``slot_V`` there are no head_labels.
    """
    num_tokens, device = labels_N.shape[0], labels_N.device
    fp32_3N = torch.empty(3, num_tokens, dtype=torch.float32, device=device)
    int64_3N = torch.empty(3, num_tokens, dtype=torch.int64, device=device)
    int32_2N, num_2 = (torch.empty(2, n, dtype=torch.int32, device=device) for n in (num_tokens, 1))
    _plan_kernel[(1,)](
        labels_N, max_N, log_sum_N, coef_4N, state_3N, count_N, slot_V,
        int64_3N, int32_2N, fp32_3N, num_2,
        num_tokens, longest, capacity, logits.start, logits.num_valid,
        math.log(eps), SLACK,
        HAS_SLOT=slot_V is not None, BLOCK=4096, num_warps=16,
    )  # fmt: skip
    return Plan(*int64_3N.unbind(), *int32_2N.unbind(), *fp32_3N.unbind(), *num_2.unbind())


@triton.jit(
    do_not_specialize=["num_tokens", "longest", "capacity", "start", "num_valid"],
    do_not_specialize_on_alignment=["labels_ptr", "max_ptr", "log_sum_ptr", "coef_ptr", "state_ptr", "count_ptr"],
)
def _plan_kernel(
    labels_ptr,  # in: [N] int64
    max_ptr,  # in: [N] fp32
    log_sum_ptr,  # in: [N] fp32
    coef_ptr,  # in: [4, N] fp32
    state_ptr,  # in: [3, N] fp32: bound, sum outside the head, what that is relative to
    count_ptr,  # in: [N] int32
    slot_ptr,  # in: [V] int32
    out_labels_ptr,  # out: [3, N] int64
    end_ptr,  # out: [2, N] int32: where the entries end; the compact order
    out_ptr,  # out: [3, N] fp32
    num_ptr,  # out: [2] int32: tokens that are dense; that are listed
    num_tokens,
    longest,
    capacity,
    start,
    num_valid,
    log_eps,
    slack,
    HAS_SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program, as in compact.py: the places of the entries are a running sum.
    stride = num_tokens.to(tl.int64)
    room_taken = tl.zeros((), tl.int32)
    num_dense = tl.zeros((), tl.int32)
    num_listed = tl.zeros((), tl.int32)
    for first in range(0, num_tokens, BLOCK):
        offs_n = first + tl.arange(0, BLOCK)
        in_n = offs_n < num_tokens
        label = tl.load(labels_ptr + offs_n, mask=in_n, other=-1)
        coef_p = tl.abs(tl.load(coef_ptr + offs_n, mask=in_n, other=0))
        coef_label = tl.abs(tl.load(coef_ptr + stride + offs_n, mask=in_n, other=0))
        coef_uniform = tl.load(coef_ptr + 2 * stride + offs_n, mask=in_n, other=0)
        bound = tl.load(state_ptr + offs_n, mask=in_n, other=0)
        outside = tl.load(state_ptr + stride + offs_n, mask=in_n, other=0)
        relative_to = tl.load(state_ptr + 2 * stride + offs_n, mask=in_n, other=0)
        lse = tl.load(max_ptr + offs_n, mask=in_n, other=0) + tl.load(log_sum_ptr + offs_n, mask=in_n, other=0)
        count = tl.load(count_ptr + offs_n, mask=in_n, other=0)

        whole = (coef_p == 0) | (coef_label == 0)
        log_ratio = tl.where(whole, 0.0, tl.log(coef_label) - tl.log(coef_p))
        # Also false where anything is NaN; a sum is finite where all its terms are.
        served = (count <= longest) & (lse - bound < FARTHEST) & (whole | (bound - lse - log_ratio <= tl.log(slack)))
        served &= tl.abs(lse + bound + outside + relative_to + coef_p + coef_label + coef_uniform) < float("inf")
        tl.store(out_ptr + offs_n, lse + log_eps + log_ratio, mask=in_n)
        tl.store(out_ptr + stride + offs_n, outside * tl.exp(relative_to - lse), mask=in_n)
        tl.store(out_ptr + 2 * stride + offs_n, lse - tl.log(coef_p), mask=in_n)

        live = label >= 0
        length = tl.where(live & served, count, 0)
        end = room_taken + tl.cumsum(length, 0)
        room_taken += tl.sum(length, 0)
        served &= (length == 0) | (end <= capacity)
        tl.store(end_ptr + offs_n, end, mask=in_n)
        dense = live & (served == 0)
        num_dense += tl.sum(dense.to(tl.int32), 0)

        tl.store(out_labels_ptr + offs_n, tl.where(served, label, -1), mask=in_n)
        tl.store(out_labels_ptr + stride + offs_n, tl.where(dense, label, -1), mask=in_n)
        if HAS_SLOT:
            here = live & served & (label >= start) & (label - start < num_valid)
            slot = tl.load(slot_ptr + tl.where(here, label - start, 0), mask=here, other=0)
            tl.store(out_labels_ptr + 2 * stride + offs_n, slot.to(tl.int64) - 1, mask=in_n)

        listed = (live & served).to(tl.int32)
        listed_before = num_listed + tl.cumsum(listed, 0) - listed
        place = tl.where(listed > 0, listed_before, num_tokens - 1 - (offs_n - listed_before))
        num_listed += tl.sum(listed, 0)
        tl.store(end_ptr + stride + place, offs_n, mask=in_n)
    tl.store(num_ptr, num_dense)
    tl.store(num_ptr + 1, num_listed)
