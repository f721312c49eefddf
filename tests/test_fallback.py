"""Where the lists of a filter would cost more than exact gradients: what then runs, and what the device decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from shards import DEVICE, GPU, nan_memory
from torch import Tensor
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

from cce_dist.kernels import Filter, Grads, Operands, ShardLogits, Softmax, Spec, Want, budget, exact, filter
from cce_dist.kernels.budget import cdiv

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, on infinities inside the interpreter
DTYPE = torch.bfloat16 if GPU else torch.float32  # the interpreter misreads bf16
EPS = 2.0**-9
NUM_TOKENS, NUM_COLUMNS, HIDDEN = (37, 420, 16) if not GPU else (600, 9000, 96)
KEPT = 256 if not GPU else 2048  # columns: whole tiles


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
    x = Operands(hidden, weight, None, labels, logits)
    return Shard(x, spec, Softmax(maximum, (z - maximum[:, None]).exp().sum(1).log()), coef)


def statistics(shard: Shard) -> tuple[Tensor, list[Tensor]]:
    return filter.statistics(shard.x, shard.spec, lambda stats: stats[0] + stats[1].log())


def step(shard: Shard) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Statistics, what is saved, and all gradients."""
    stats, saved = statistics(shard)
    return stats, saved, gradients(shard, saved)


def without_filter(shard: Shard, columns: int) -> tuple[Tensor, list[Tensor]]:
    """Statistics of exact kernels that keep the exponentials of so many columns, and what is saved."""
    order, kept = exact.compact(shard.x.ids), exact.new_kept(shard.x, columns)
    return exact.statistics_of(shard.x, shard.spec, order, kept), [*order, *kept]


def gradients(shard: Shard, saved: list[Tensor]) -> list[Tensor]:
    found = filter.gradients(shard.x, shard.softmax, shard.coef, saved, Grads(), shard.spec)
    return [grad for grad in found if grad is not None]


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Set what lists have room for, how many columns are kept where they have none, and what is decided in forward, if that."""

    def set_room(capacity: int, kept: int = KEPT, decided: int | None = None) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        decide = filter.has_room

        def spy(*args: Any) -> Tensor:
            room = seen["room"] = decide(*args)
            return room if decided is None else torch.tensor([decided, 1 - decided], dtype=torch.int32, device=DEVICE)

        monkeypatch.setattr(exact, "keeps", lambda *_: True)
        monkeypatch.setattr(budget, "list_capacity", lambda *_: capacity)
        monkeypatch.setattr(budget, "filter_columns_kept", lambda *_: kept)
        monkeypatch.setattr(filter, "has_room", spy)
        return seen

    return set_room


@pytest.mark.parametrize("kept", [0, KEPT])
def test_nothing_can_be_filtered(kept: int, room: Callable[..., dict[str, Any]]) -> None:
    """All is as without a filter, to the bit where as many columns are kept. Catches: statistics of marks that nobody made,
    exponentials of other rows, lists that are trusted, and a decision that a second backward does not find."""
    shard = random_logits(2.0)
    seen = room(capacity=100, kept=kept)
    stats, saved, ours = step(shard)
    assert int(seen["room"][0]) == 0
    expected_stats, expected_saved = without_filter(shard, kept)
    expected: Any = exact.gradients(shard.x, shard.softmax, shard.coef, expected_saved, Grads(), shard.spec)
    assert torch.equal(stats, expected_stats)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected[:2], strict=False))
    assert all(torch.equal(a, b) for a, b in zip(ours, gradients(shard, saved), strict=True))
    for tensor, like in zip(saved, filter.saved_like(shard.x, shard.spec), strict=True):
        assert (tensor.shape, tensor.dtype) == (like.shape, like.dtype)
    assert filter.filter_stats(shard.x, shard.softmax, saved, shard.spec).tolist() == [1.0, 0.0, 0.0]


@pytest.mark.skipif(GPU, reason="the interpreter counts")
def test_nothing_is_computed_for_what_nobody_will_read(
    room: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of backward are those of the exact path, and the filter's own kernels read no matrix. Catches: a stand-in, its
    squares or its sample where nothing is dropped, marks and lists that have no room."""
    for module in (budget, filter):
        monkeypatch.setattr(module, "SAMPLE", 16)
    monkeypatch.setattr(budget, "stand_in_columns", lambda _: 32)
    shard = random_logits(2.0)
    room(capacity=100)
    read, products = count_work(monkeypatch)
    exact_saved = without_filter(shard, KEPT)[1]
    whole_vocabulary = products["_lse_kernel"]
    exact.gradients(shard.x, shard.softmax, shard.coef, exact_saved, Grads(), shard.spec)
    expected, in_exact = Counter(products), set(read)
    read.clear()
    products.clear()
    _, saved = statistics(shard)
    hot = cdiv(NUM_TOKENS * 4 // 5, 16) * cdiv(len(saved[4]), 32)  # tiles
    assert products["_lse_kernel"] <= whole_vocabulary + hot
    assert read["_list_columns_kernel"] <= 4 * NUM_TOKENS
    read.clear()
    products.clear()
    gradients(shard, saved)
    del expected["_lse_kernel"]
    assert +products == expected
    of_filter = {name: n for name, n in read.items() if name not in in_exact}
    assert {"_squares_kernel", "_tilt_kernel", "_dropped_sums_kernel", "_stand_in_weight_kernel"} <= of_filter.keys()
    # Entries are sorted, and columns drawn, whatever there is.
    sorts_or_draws = {"_by_column_kernel", "_draw_columns_kernel", "_filtered_bias_kernel"}
    assert all(n < 3 * NUM_COLUMNS for name, n in of_filter.items() if name not in sorts_or_draws), of_filter


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


def test_exponentials_that_forward_did_not_keep_are_made_anew(room: Callable[..., dict[str, Any]]) -> None:
    """Forward expects room for the lists, backward finds none. Catches: exponentials that nobody made, and a second backward
    that takes the first one's word for them."""
    shard = random_logits(2.0)
    room(capacity=100)
    _, _, expected = step(shard)
    room(capacity=100, decided=1)
    _, saved, ours = step(shard)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    saved[5].fill_(torch.nan)
    assert all(torch.equal(a, b) for a, b in zip(gradients(shard, saved), expected, strict=True))


def test_room_for_exponentials_changes_nothing_where_lists_serve(
    room: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes what the sampled tokens drop. Catches: exponentials of tokens that lists serve, and parts that overlap."""
    for module in (budget, filter):
        monkeypatch.setattr(module, "SAMPLE", 16)
    monkeypatch.setattr(budget, "stand_in_columns", lambda _: 32)
    shard = random_logits(0.5, eps=2.0**-7)
    seen = room(capacity=1 << 16, kept=0)
    stats, _, expected = step(shard)
    assert int(seen["room"][0]) == 1
    room(capacity=1 << 16)
    again, saved, ours = step(shard)
    assert torch.equal(stats, again)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    assert saved[5].view(-1)[: 16 * NUM_COLUMNS].isfinite().any()


def test_only_what_is_certain_is_decided_in_forward(room: Callable[..., dict[str, Any]]) -> None:
    """Where the estimate is within twice the room, lists are made. Catches: an estimate of hot columns, of tokens without a
    label or of a part of the tokens."""
    shard = random_logits(2.0)
    room(capacity=1 << 16)
    total = int(statistics(shard)[1][3].sum())
    for factor, expected in ((0.35, 0), (0.7, 1)):
        seen = room(capacity=int(factor * total))
        statistics(shard)
        assert int(seen["room"][0]) == expected


def test_statistics_count_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens times columns pass 2^32 where all tokens are exact. Catches: a product of 32 bits, whose sign or size is any."""
    size = 70_000
    ids = torch.zeros(size, dtype=torch.int64, device=DEVICE)
    nothing = torch.zeros(size, device=DEVICE)
    how = SimpleNamespace(
        listed_labels=ids - 1, num_dense=torch.tensor([size], dtype=torch.int32, device=DEVICE),
        num_few=torch.zeros(1, dtype=torch.int32, device=DEVICE),
    )  # fmt: skip
    monkeypatch.setattr(filter, "plan", lambda *_: how)
    monkeypatch.setattr(filter, "listed_gradients", lambda *_: (nothing, nothing.int()))
    logits = ShardLogits(0, size)
    x = Operands(nothing[:, None], nothing[:, None], None, ids, logits)
    saved: list[Any] = filter.saved_like(
        x, spec := Spec(logits, size, filter=Filter(2.0**-12), workspace_bytes=1 << 20)
    )
    assert filter.filter_stats(x, Softmax(nothing, nothing), saved, spec).tolist() == [1.0, 0.0, 0.0]
