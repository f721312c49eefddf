"""Where the lists of a filter would cost more than exact gradients: what then runs, and what the device decides."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import test_filtered as of_filter
import torch
from shards import DEVICE, GPU
from test_filtered import Case
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

from cce_dist.kernels import Filter, Grads, Operands, ShardLogits, Softmax, Spec, budget, exact, filter

pytestmark = of_filter.pytestmark
_nan_memory, limits = of_filter._nan_memory, of_filter.limits
NO_CAPACITY = Case(capacity=50 if not GPU else 400, bias=True)  # lists overflow


def without_filter(p: of_filter.Problem, d: of_filter.Dense) -> list[Any]:
    """Exact gradients."""
    x, softmax = of_filter.operands(p), Softmax(d.maximum.float(), d.log_sum.float())
    saved = list(exact.new_kept(x, exact.compact(x.ids)))
    return list(exact.gradients(x, softmax, p.coef, saved, Grads(), of_filter.spec_of(p, NO_CAPACITY)))


def test_nothing_can_be_filtered(limits) -> None:
    """Gradients are those without a filter, to the bit. Catches: lists that are trusted though they overflow, rows of other
    tokens, and a second backward that differs from the first."""
    limits(NO_CAPACITY)
    p = of_filter.problem(NO_CAPACITY)
    d = of_filter.dense(p)
    _, *saved = of_filter.local_stats(p, NO_CAPACITY)
    assert int(saved[3].sum()) > NO_CAPACITY.capacity
    ours = [of_filter.gradients(p, NO_CAPACITY, d, saved) for _ in range(2)]
    for again, first, expected in zip(*ours, without_filter(p, d), strict=True):
        assert first is expected is None or (torch.equal(first, expected) and torch.equal(again, first))
    softmax = Softmax(d.maximum.float(), d.log_sum.float())
    stats = filter.filter_stats(of_filter.operands(p), softmax, saved, of_filter.spec_of(p, NO_CAPACITY))
    assert stats.tolist() == [1.0, 0.0, 0.0]


@pytest.mark.skipif(GPU, reason="the interpreter counts")
def test_nothing_is_computed_for_what_nobody_will_read(limits, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of backward are those of the exact path, and the filter's own kernels read no matrix. Catches: a
    control variate or its sample where nothing is dropped."""
    case = NO_CAPACITY._replace(sampled=32)
    limits(case)
    monkeypatch.setattr(budget, "SAMPLE", 16)
    p = of_filter.problem(case)
    d = of_filter.dense(p)
    _, *saved = of_filter.local_stats(p, case)
    read, products = count_work(monkeypatch)
    without_filter(p, d)
    expected, in_exact = Counter(products), set(read)
    read.clear()
    products.clear()
    of_filter.gradients(p, case, d, saved)
    assert +products == expected
    kernels = {name: n for name, n in read.items() if name not in in_exact}
    assert {"_reweight_kernel", "_dropped_sums_kernel", "_compensated_weight_kernel"} <= kernels.keys()
    del kernels["_filtered_bias_kernel"]  # entries are added up, whatever there is
    assert all(n < 8 * case.num_rows for n in kernels.values()), kernels


def count_work(monkeypatch: pytest.MonkeyPatch) -> tuple[Counter[str], Counter[str]]:
    """Elements that each kernel reads, and its products of tiles, from here on."""
    read: Counter[str] = Counter()
    products: Counter[str] = Counter()
    name, run = "", GridExecutor.__call__
    load, dot = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_dot

    def running(executor: Any, *args: Any, **options: Any) -> None:
        nonlocal name
        name = executor.fn.__name__
        run(executor, *args, **options)

    def loading(builder: Any, pointers: Any, mask: Any, *args: Any, **options: Any) -> Any:
        read[name] += int(np.sum(mask if isinstance(mask, np.ndarray) else mask.data))
        return load(builder, pointers, mask, *args, **options)

    def multiplying(builder: Any, *args: Any) -> Any:
        products[name] += 1
        return dot(builder, *args)

    monkeypatch.setattr(GridExecutor, "__call__", running)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", loading)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", multiplying)
    return read, products


def test_statistics_count_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens times columns pass 2^32 where all tokens are exact. Catches: a product of 32 bits, whose sign or size is any."""
    size = 70_000
    ids = torch.zeros(size, dtype=torch.int64, device=DEVICE)
    nothing = torch.zeros(size, device=DEVICE)
    how = SimpleNamespace(
        listed_labels=ids - 1, num_exact=torch.tensor([size], dtype=torch.int32, device=DEVICE),
        num_fallback=torch.zeros(1, dtype=torch.int32, device=DEVICE),
    )  # fmt: skip
    monkeypatch.setattr(filter, "decide", lambda *_: how)
    monkeypatch.setattr(filter, "listed_gradients", lambda *_: (nothing, nothing.int()))
    logits = ShardLogits(0, size)
    x = Operands(nothing[:, None], nothing[:, None], None, ids, logits)
    saved: list[Any] = filter.saved_like(
        x, spec := Spec(logits, size, filter=Filter(2.0**-12), workspace_bytes=1 << 20)
    )
    assert filter.filter_stats(x, Softmax(nothing, nothing), saved, spec).tolist() == [1.0, 0.0, 0.0]
