"""Decide how a call is computed: its backend, one pass or two, groups of tokens, and memory budget.

Ranks must decide alike, so decisions use the sizes of an even shard and, whatever the device, an H200's throughput and waves of
132 programs. An operator inside a graph of ``torch.compile`` decides when it runs: sizes may be symbols while it is traced.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from cce_dist import checks
from cce_dist.kernels import Spec, memory
from cce_dist.kernels.divergence.heads import Divergence
from cce_dist.kernels.filter import costs
from cce_dist.kernels.memory import Groups, Sizes
from cce_dist.kernels.tiles import cdiv, fp32_precision

BACKENDS = ("auto", "triton", "torch")
MISREAD = (torch.bfloat16,)  # dtypes that Triton's interpreter misreads; the tests mend it


class Where(NamedTuple):
    """What ``decide`` needs to know about a call besides its sizes and its ``Spec``.

    Attributes:
        backend: "torch" or "triton".
        dtype: Dtype of hidden states and weight, such as "torch.bfloat16".
        summed: Whether d_hidden is summed over ranks.
        upstream: What forward knows about the upstream gradient. "number": the loss is a scalar, so its upstream gradient
            multiplies all gradients. "tokens": losses are per token, with upstream gradients that are expected to be
            proportional to known weights. "unknown": neither, for example because other outputs may have gradients too.
        has_buffer: Whether d_weight is added to a buffer (``grad_weight_out``).
    """

    backend: str
    dtype: str
    summed: bool = False
    upstream: str = "unknown"
    has_buffer: bool = False


class Way(NamedTuple):
    """How a call is computed.

    Attributes:
        backend: The module of ``cce_dist.kernels`` that computes: "dense", "exact" or "filter". Empty: not decided yet.
        passes: "two": forward, then backward. "one": forward computes the gradients too, group by group (``groups.py``).
            "operator": an operator inside a graph of ``torch.compile`` computes loss and gradients, and decides when it runs.
        groups: The groups of tokens if ``passes`` is "one".
        workspace_bytes: The memory budget.
        ready_rows: Tokens per chunk of the overlapped all-reduce of d_hidden; 0: one all-reduce of all tokens.
        reason: Why a requested filter is off, and why there are two passes although not all exponentials are kept.
    """

    backend: str = ""
    passes: str = "two"
    groups: Groups = Groups(0)
    workspace_bytes: int = 0
    ready_rows: int = 0
    reason: str = ""


forced_groups: Groups | None = None  # by a test


@contextmanager
def of_rows(rows: int | None, low: bool = False) -> Iterator[None]:
    """Test hook: force groups of ``rows`` tokens, on any backend and at any size. None restores the default."""
    global forced_groups
    before, forced_groups = forced_groups, None if rows is None else Groups(checks.integer("rows", rows, 1), low)
    try:
        yield
    finally:
        forced_groups = before


def way_now(sizes: Sizes, spec: Spec, where: Where) -> Way:
    """Return the way of a loss, as ``decide`` does. A test may have forced groups."""
    way = decide(sizes, spec, where)
    if forced_groups is None or not may_take_one_pass(way.backend, spec, where):
        return way
    return way._replace(passes="one", groups=forced_groups)


def sizes_of_even_shard(hidden: Tensor, num_tokens: int, vocab_size: int, num_ranks: int) -> Sizes:
    """Return the sizes of the largest shard of an even split. ``hidden`` may be a slice of the ``num_tokens`` tokens."""
    return Sizes(num_tokens, hidden.shape[1], -(-vocab_size // num_ranks), hidden.itemsize)


def choose_backend(backend: str, forced: str, device_type: str, dtype: torch.dtype, needs_kernels: bool = False) -> str:
    """Return "triton" or "torch". In fp32 without TF32, cuBLAS multiplies three times as fast as our kernels.

    ``forced`` is the environment variable CCE_DIST_BACKEND. The device "meta" stands for a GPU. A filter, lists of ids and
    ``batch_invariant`` need kernels.
    """
    checks.choice("CCE_DIST_BACKEND", forced, BACKENDS)
    if backend == "auto":
        backend = forced
    if backend == "auto":
        has_kernels = device_type == "meta" or (device_type == "cuda" and torch.version.cuda is not None)
        if not has_kernels or dtype == torch.float64:
            return "torch"
        by_cublas = dtype == torch.float32 and not needs_kernels and fp32_precision() == "ieee"
        return "torch" if by_cublas else "triton"
    on_gpu = device_type in ("cuda", "meta")
    if backend == "triton" and dtype == torch.float64:
        raise TypeError("input is float64, which the torch backend alone takes: use backend='torch' or 'auto'")
    if backend == "triton" and not on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"backend='triton' needs a GPU (or Triton's interpreter, TRITON_INTERPRET=1), input is on {device_type}"
        )
    if backend == "triton" and not on_gpu and dtype in MISREAD:
        raise TypeError("input is bfloat16, which Triton's interpreter misreads: use float32, float16, or a GPU")
    return backend


def decide(sizes: Sizes, spec: Spec, where: Where) -> Way:
    """Return the way of a loss or of log-probabilities for the sizes of an even shard. Results are cached."""
    # Symbols of torch.compile have no hash.
    return _decide_once(sizes, spec, where) if all(isinstance(n, int) for n in sizes) else _decide(sizes, spec, where)


def _decide(sizes: Sizes, spec: Spec, where: Where) -> Way:
    sizes = sizes._replace(alone=not where.summed)
    backend, why_off = _backend_of(sizes, spec, where)
    can_keep = backend == "exact" and spec.can_keep(where.dtype)
    one_pass_on_torch = backend == "dense" and spec.can_keep_logits(where.dtype) and where.upstream == "number"
    uniform = spec.want.uniform
    default = memory.default_dense(sizes, uniform) if one_pass_on_torch else memory.default_workspace(sizes, can_keep)
    workspace_bytes = spec.workspace_bytes or default
    ready_rows = _ready_rows(backend, sizes, where, workspace_bytes, can_keep)
    way = Way(backend, workspace_bytes=workspace_bytes, ready_rows=ready_rows)
    why_two = ""
    if can_keep:
        groups, why_two = _groups_of(sizes, spec, where, workspace_bytes)
        way = way if groups is None else way._replace(passes="one", groups=groups)
    elif one_pass_on_torch:
        groups = memory.dense_groups(sizes, workspace_bytes, spec.want.uniform, holds_weight=where.has_buffer)
        way = way if groups is None else way._replace(passes="one", groups=groups)
    elif backend == "exact" and spec.want.grad:
        in_bf16 = where.dtype == "torch.bfloat16"
        why_two = (
            "exponentials are not kept with these options" if in_bf16 else "exponentials are kept in bfloat16 alone"
        )
    return way._replace(reason=_joined(why_off, why_two))


_decide_once = lru_cache(maxsize=1024)(_decide)


def decide_heads(sizes: Sizes, spec: Divergence, where: Where) -> Way:
    """Return the way of a divergence between two heads. It takes two passes; ``groups`` are for forward."""
    backend = "dense" if where.backend == "torch" else "exact"
    can_keep = backend == "exact" and spec.can_keep(where.dtype)
    workspace_bytes = spec.workspace_bytes or memory.default_workspace(sizes, can_keep)
    ready_rows = _ready_rows(backend, sizes, where, workspace_bytes, can_keep)
    saved = memory.saved_columns(sizes, workspace_bytes) if can_keep else 0
    groups = Groups(memory.pair_rows(sizes, workspace_bytes, saved) if spec.empty_sum is not None else 0)
    return Way(backend, groups=groups, workspace_bytes=workspace_bytes, ready_rows=ready_rows)


def may_take_one_pass(backend: str, spec: Spec, where: Where) -> bool:
    if not spec.want.grad or where.upstream == "unknown" or backend == "filter":
        return False
    if backend == "dense" and spec.filter.eps > 0:
        return False
    # Gradients in fp16 may underflow before the unknown upstream gradient multiplies them.
    return not (where.upstream == "tokens" and where.dtype == "torch.float16")


def takes_operator(spec: Spec, where: Where) -> bool:
    """Whether ``torch.compile`` takes the call, of any size, as an operator that computes loss and gradients in its forward."""
    if where.upstream != "number" or where.has_buffer or spec.filter.eps > 0 or not spec.want.grad:
        return False
    # Gradients in fp16 may underflow before a loss scale multiplies them. In fp32 no exponentials are kept.
    return forced_groups is not None or (where.backend == "triton" and where.dtype == "torch.bfloat16")


def _backend_of(sizes: Sizes, spec: Spec, where: Where) -> tuple[str, str]:
    """Return the backend, and why a requested filter is off."""
    if where.backend == "torch":
        return "dense", ""
    kept = spec.filter
    if kept.eps == 0 or not (kept.hidden or kept.weight):
        return "exact", ""
    unserved = {
        "label smoothing": spec.want.uniform, "fp16": where.dtype == "torch.float16", "a bias": "bias" in spec.logits.tensors,
        "factors per token": spec.factors,
    }  # fmt: skip
    for name, is_there in unserved.items():
        if is_there:
            return "exact", f"the filter is off because it does not support {name} on Triton"
    # As if all gradients were wanted, because all ranks must agree.
    can_keep = spec._replace(want=spec.want._replace(grad=True)).can_keep(where.dtype)
    exact_sides = (not kept.hidden) + (not kept.weight)
    if kept.always or costs.filter_pays(sizes, spec.vocab_size, can_keep, spec.workspace_bytes, exact_sides):
        return "filter", ""
    return "exact", "the filter is off because exact is faster at these sizes"


def _groups_of(sizes: Sizes, spec: Spec, where: Where, workspace_bytes: int) -> tuple[Groups | None, str]:
    if memory.bytes_of_all(sizes) <= workspace_bytes:
        return None, ""
    if not may_take_one_pass("exact", spec, where):
        return None, "one pass would have to know the upstream gradient in forward"
    groups = memory.groups_of(sizes, workspace_bytes, holds_weight=where.has_buffer)
    return groups, "" if groups else "one pass needs a larger budget for its groups of tokens"


def _ready_rows(backend: str, sizes: Sizes, where: Where, workspace_bytes: int, can_keep: bool) -> int:
    # With saved exponentials, and in the outer loop of "dense" over the vocabulary, all rows of d_hidden become final together.
    at_once = backend == "dense" or (can_keep and memory.saved_columns(sizes, workspace_bytes) > 0)
    return memory.most_rows(sizes, workspace_bytes) if where.summed and not at_once else 0


def in_words(way: Way, sizes: Sizes, spec: Spec, where: Where) -> str:
    name = {"dense": "plain torch", "exact": "exact", "filter": "filtered"}[way.backend]
    if way.backend == "dense" and spec.filter.eps > 0:
        name = "plain torch, filtered"
    least = 0 if way.backend == "dense" else memory.LEAST_BYTES
    mib = f"{cdiv(max(way.workspace_bytes, least), 1 << 20):,} MiB"
    if way.passes == "one":
        count = cdiv(sizes.num_tokens, way.groups.rows)
        groups = f" in {count} groups of {way.groups.rows:,} tokens" if count > 1 else ""
        return _joined(f"{name}, one pass{groups}, {mib}", way.reason)
    if not spec.want.grad:
        return _joined(f"{name}, forward alone, {mib}", way.reason)
    kept = ""
    if way.backend == "exact":
        can_keep, num_columns = spec.can_keep(where.dtype), sizes.num_columns
        sizes = sizes._replace(alone=not where.summed)
        columns = min(num_columns, memory.saved_columns(sizes, way.workspace_bytes)) if can_keep else 0
        part = "all" if columns == num_columns else f"{columns:,} of {num_columns:,} columns'" if columns else "no"
        kept = f" with {part} exponentials kept"
    return _joined(f"{name}, two passes{kept}, {mib}", way.reason)


def _joined(*clauses: str) -> str:
    return "; ".join(clause for clause in clauses if clause)
