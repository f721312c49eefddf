"""Where the lists of a filter would cost more than exact gradients: what then runs, and what the device decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from shards import DEVICE, GPU, nan_memory, upstream_of
from torch import Tensor
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

from cce_dist.kernels import Filter, Grads, Operands, ShardLogits, Softmax, Spec, Want, exact, filter, memory

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, on infinities inside the interpreter
DTYPE = torch.bfloat16 if GPU else torch.float32  # the interpreter misreads bf16
EPS = 2.0**-9
NUM_TOKENS, NUM_COLUMNS, HIDDEN = (37, 420, 16) if not GPU else (600, 9000, 96)


class Shard(NamedTuple):
    """A head all of whose logits are random, its labels, and the softmax of its logits."""

    x: Operands
    spec: Spec
    softmax: Softmax
    coef: Tensor


@pytest.fixture(autouse=True)
def _nan_memory() -> Iterator[None]:
    with nan_memory():
        yield


def random_logits(deviation: float, eps: float = EPS) -> Shard:
    hidden = (deviation * torch.randn(NUM_TOKENS, HIDDEN)).to(DEVICE, DTYPE)
    weight = (torch.randn(NUM_COLUMNS, HIDDEN) * HIDDEN**-0.5).to(DEVICE, DTYPE)
    labels = torch.randint(NUM_COLUMNS, (NUM_TOKENS,), device=DEVICE)
    labels[::5] = -1
    z = hidden.float() @ weight.float().T
    maximum = z.amax(1)
    coef = torch.zeros(4, NUM_TOKENS, device=DEVICE)
    coef[0], coef[1] = 1 / NUM_TOKENS, -1 / NUM_TOKENS
    coef[:, labels < 0] = 0.0
    logits = ShardLogits(0, NUM_COLUMNS)
    spec = Spec(logits, NUM_COLUMNS, filter=Filter(eps), want=Want(grad=True), workspace_bytes=64 << 20)
    x = Operands.of(hidden, weight, labels, logits)
    return Shard(x, spec, Softmax(maximum, (z - maximum[:, None]).exp().sum(1).log()), coef)


def statistics(shard: Shard) -> tuple[Tensor, list[Tensor]]:
    return filter.statistics(shard.x, shard.spec, lambda stats: stats[0] + stats[1].log())


def step(shard: Shard) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Statistics, what is saved, and all gradients."""
    stats, saved = statistics(shard)
    return stats, saved, gradients(shard, saved)


def without_filter(shard: Shard) -> list[Tensor]:
    """What is saved where nothing is kept for backward."""
    return list(exact.new_saved(shard.x, exact.compact(shard.x.ids)))


def gradients(shard: Shard, saved: list[Tensor]) -> list[Tensor]:
    found = filter.gradients(shard.x, shard.softmax, upstream_of(shard.coef, 1), saved, Grads(), shard.spec)
    return [grad for grad in found if grad is not None]


@pytest.fixture
def no_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists overflow: all of them share 100 places."""
    monkeypatch.setattr(memory, "list_capacity", lambda *_: 100)


@pytest.mark.usefixtures("no_capacity")
@pytest.mark.slow
def test_nothing_can_be_filtered() -> None:
    """Gradients are those without a filter, to the bit. Catches: lists that are trusted though they overflow, rows of other
    tokens, and a second backward that differs from the first."""
    shard = random_logits(2.0)
    _, saved, ours = step(shard)
    assert int(saved[3].sum()) > 100
    expected: Any = exact.gradients(
        shard.x, shard.softmax, upstream_of(shard.coef, 1), without_filter(shard), Grads(), shard.spec
    )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(ours, expected[:2], strict=False))
    assert all(torch.equal(a, b) for a, b in zip(ours, gradients(shard, saved), strict=True))
    for tensor, like in zip(saved, filter.saved_like(shard.x, shard.spec), strict=True):
        assert (tensor.shape, tensor.dtype) == (like.shape, like.dtype)


@pytest.mark.skipif(GPU, reason="the interpreter counts")
@pytest.mark.usefixtures("no_capacity")
def test_nothing_is_computed_for_what_nobody_will_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of backward are those of the exact path, and the filter's own kernels read no matrix. Catches: a
    control variate, its squares or its sample where nothing is dropped."""
    for module in (memory, filter):
        monkeypatch.setattr(module, "SAMPLE", 16)
    monkeypatch.setattr(memory, "sampled_columns", lambda _: 32)
    shard = random_logits(2.0)
    _, saved = statistics(shard)
    read, products = count_work(monkeypatch)
    exact.gradients(shard.x, shard.softmax, upstream_of(shard.coef, 1), without_filter(shard), Grads(), shard.spec)
    expected, in_exact = Counter(products), set(read)
    read.clear()
    products.clear()
    gradients(shard, saved)
    assert +products == expected
    of_filter = {name: n for name, n in read.items() if name not in in_exact}
    assert {
        "_squares_kernel",
        "_reweight_kernel",
        "_dropped_sums_kernel",
        "_compensated_weight_kernel",
    } <= of_filter.keys()
    # Entries are sorted, columns sampled and the frequent columns' rows gathered, whatever there is.
    always = {"_by_column_kernel", "_sample_columns_kernel", "_filtered_bias_kernel", "_gather_frequent_kernel"}
    assert all(n < 3 * NUM_COLUMNS for name, n in of_filter.items() if name not in always), of_filter


def count_work(monkeypatch: pytest.MonkeyPatch) -> tuple[Counter[str], Counter[str]]:
    """Elements that each kernel reads, and its products of tiles, from here on."""
    read: Counter[str] = Counter()
    products: Counter[str] = Counter()
    name = ""
    run, load, dot = (
        GridExecutor.__call__, InterpreterBuilder.create_masked_load, InterpreterBuilder.create_dot
    )  # fmt: skip

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
