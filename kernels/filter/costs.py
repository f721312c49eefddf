"""Estimate from sizes alone whether a filter is faster than exact gradients. Ranks have to agree, so rates are an H200's."""

from __future__ import annotations

import math
from typing import NamedTuple

from cce_dist.kernels import memory
from cce_dist.kernels.memory import COLUMNS_PER_SLOT, LEAST_DEFAULT, SAMPLE, Sizes
from cce_dist.kernels.tiles import H200, Rates

# Time of exact gradients for ``filter_pays``, in matrix products of the logits' size.
EXACT_PRODUCTS = 3.2  # loss and gradient with all exponentials kept
RECOMPUTED = 1.1  # additional products if no exponentials are kept
USUAL_LIST = 34  # listed columns per token of a whole vocabulary while a model trains; 16 to 59 with flat softmaxes
# Seconds that the host takes for a filtered call
FILTER_HOST = 3.3e-3
MARGIN = 0.85  # largest share of the exact time that a filter may take


class FilterCosts(NamedTuple):
    """Measured costs of a filter beyond operations and bytes."""

    marks: float = 0.038  # Time that marking adds to the log-sum-exp, in products of the logits' size
    forward: float = 0.35e-3  # Seconds of small kernels in forward
    backward: float = 0.48e-3  # Seconds of small kernels in backward, and fixed costs of larger ones
    passes: float = 3.1  # Passes over the weight or its gradient in backward
    listed: float = 4.2e-9  # Seconds per listed column of a token
    rarer: float = 4.8e-9  # More for each doubling of the vocabulary above ``RARE``: rows miss the cache, lists are long


# A fit to thirty filtered times at eps 2^-10: three synthetic softmaxes on the ten heads of docs/filter.md (one H200, bf16,
# N 8,192). Estimates are within 10 % of three such rounds.
FILTER_COSTS = FilterCosts()
RARE = 65_536


def filter_pays(sizes: Sizes, vocab_size: int, keeps: bool, workspace_bytes: int, exact_sides: int = 0) -> bool:
    """Return whether a filter takes at most ``MARGIN`` of the time of exact gradients on an even shard of a vocabulary.

    It does not where exact gradients are done before the host has launched a filter. Exact gradients take 3 products, and a
    fourth for columns whose exponentials are not kept (``keeps``: they can be kept). A filter takes the forward product,
    ``filter_seconds``, lists of the usual length, and recomputation for ``exact_sides``, the number of gradients that are not
    filtered.
    """
    rates, num_columns = H200[sizes.itemsize], sizes.num_columns
    product = product_seconds(sizes, rates)
    kept = memory.saved_columns(sizes, workspace_bytes or memory.default_workspace(sizes, keeps)) if keeps else 0
    recomputed = RECOMPUTED * (1 - min(1.0, kept / max(1, num_columns)))
    exact = (EXACT_PRODUCTS + recomputed) * product
    more = filter_seconds(sizes, workspace_bytes or LEAST_DEFAULT, rates, memory.frequent_columns(num_columns, 0.0))
    usual = USUAL_LIST * num_columns / max(1, vocab_size)
    lists = listed_seconds(sizes, min(usual, num_columns // COLUMNS_PER_SLOT))
    filtered = (1 + exact_sides * (1 + RECOMPUTED)) * product + sum(more) + lists
    return exact > FILTER_HOST and filtered <= MARGIN * exact


def product_seconds(sizes: Sizes, rates: Rates) -> float:
    """Return the time of a matrix product of the logits' size."""
    return 2 * sizes.num_tokens * sizes.hidden_size * sizes.num_columns / rates.operations


def filter_seconds(sizes: Sizes, workspace_bytes: int, rates: Rates, frequent: int) -> tuple[float, float]:
    """Return a filter's time in forward beyond the product, and its time in backward without lists."""
    costs, num_tokens, num_columns = FILTER_COSTS, sizes.num_tokens, max(1, sizes.num_columns)
    product = product_seconds(sizes, rates)
    marks_bytes = num_tokens * num_columns // 4  # one bit per logit, written and read
    few = (frequent + memory.bound_columns(num_columns - frequent)) / num_columns
    forward = (costs.marks + few) * product + marks_bytes / rates.bytes_moved + costs.forward
    wide = 3 * frequent + 2 * memory.sampled_columns(num_columns)
    covariance = memory.covariance_columns(sizes, workspace_bytes)
    if covariance:
        wide += sizes.hidden_size * (1 + covariance / num_tokens)
    products = wide / num_columns + 2 * SAMPLE / max(SAMPLE, num_tokens)
    num_bytes = costs.passes * num_columns * sizes.hidden_bytes + 6 * num_tokens * sizes.hidden_bytes
    return forward, products * product + num_bytes / rates.bytes_moved + costs.backward


def listed_seconds(sizes: Sizes, num_columns: float) -> float:
    """Return the time of ``num_columns`` listed columns per token."""
    doublings = max(0.0, math.log2(max(1, sizes.num_columns) / RARE))
    return sizes.num_tokens * num_columns * (FILTER_COSTS.listed + FILTER_COSTS.rarer * doublings)
