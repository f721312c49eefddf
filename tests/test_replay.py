"""A replayed call against the ordinary one: the same bits, whatever the tensors' addresses are.

On a CPU the interpreter takes the place of a compiled kernel: it is given addresses alone, so what a replay hands to a launcher
is all that there is. On a GPU the same tests run with Triton's launcher.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import itertools
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from shards import DEVICE, GPU, needs_gpu
from torch import Tensor
from torch.utils._pytree import tree_leaves
from triton.tools.tensor_descriptor import TensorDescriptor

from cce_dist import (
    GradFilter,
    VocabShard,
    divergence_op,
    groups,
    linear_cross_entropy,
    linear_kl_divergence,
    linear_log_probs,
    op,
)
from cce_dist.kernels import budget, exact
from cce_dist.kernels.launch import graphs, replay, steps
from cce_dist.kernels.launch import tape as tape_module
from cce_dist.kernels.launch.tape import Place, Recorded, Tape, mapped, recorded

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, on infinities inside the interpreter
DTYPE = torch.bfloat16 if GPU else torch.float32


class Interpreted:
    """A compiled kernel's launcher, which interprets the kernel on what lies at the addresses that it gets."""

    function = packed_metadata = None

    def __init__(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.kernel = kernel
        self.options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
        values = [*args, *(kwargs[name] for name in kernel.arg_names[len(args) :])]
        self.like = [_like(value.base if isinstance(value, TensorDescriptor) else value) for value in values]

    def run(self, *given: Any) -> None:
        grid, values = given[:3], given[9:]
        args = []
        for value, like in zip(values, self.like, strict=True):
            if isinstance(value, TensorDescriptor):
                value = copy.copy(value)
                value.base = _at(value.base.data_ptr(), like)
            elif like is not None:
                assert type(value) is int
                value = _at(value, like)
            args.append(value)
        type(self.kernel).run(self.kernel, *args, grid=grid, warmup=False, **self.options)


def _like(value: Any) -> tuple[Any, ...] | None:
    if not isinstance(value, Tensor):
        return None
    room = value.untyped_storage().nbytes() - value.storage_offset() * value.itemsize
    return value.dtype, tuple(value.shape), value.stride(), room


def _at(address: int, like: Any) -> Tensor:
    dtype, size, stride, room = like
    if room == 0:
        return torch.empty(size, dtype=dtype)
    return torch.frombuffer((ctypes.c_char * room).from_address(address), dtype=dtype).as_strided(size, stride)


@contextmanager
def replaying() -> Iterator[list[replay.Shared]]:
    """Replay calls, none of which was seen before. -> The plans that were used, in order."""
    used: list[replay.Shared] = []
    call, launched = replay.Shared.__call__, Tape.launched

    def counted(plan: replay.Shared, *given: Any) -> Any:
        used.append(plan)
        return call(plan, *given)

    def interpreted(tape: Tape, kernel: Any, compiled: Any, grid: Any, args: Any, kwargs: Any) -> None:
        launched(tape, kernel, compiled if GPU else Interpreted(kernel, args, kwargs), grid, args, kwargs)

    functions = [f for module in (op, divergence_op) for f in (module._forward_again, module._backward_again)]
    functions.append(groups._finish)
    with (
        mock.patch.object(replay.Shared, "__call__", counted),
        mock.patch.object(Tape, "launched", interpreted),
        mock.patch.object(replay, "available", lambda: True),
        mock.patch.object(op, "label_error", lambda *_: ""),  # which a CPU asks for, and no GPU
        mock.patch.object(steps, "LARGE", 4096),  # so that some intermediates are large
        mock.patch.object(steps, "SLACK", 0),  # and some calls have phases
    ):
        for function in functions:
            function.forget()
        yield used
        for function in functions:
            function.forget()


class Captured:
    """A graph's stand-in on a CPU: what steps would launch, with their addresses as numbers, whoever has the memory later."""

    def __init__(self, steps_: Any, device: torch.device) -> None:
        self.last_call, self.calls = 0, []
        for step in steps_:
            name = "run" if isinstance(step, steps._Launch) else "function"
            with mock.patch.object(step, name, partial(self._note, getattr(step, name))):
                step(0)

    def _note(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self.calls.append((function, mapped((args, kwargs), self._frozen)))

    @staticmethod
    def _frozen(value: Any) -> Any:
        if isinstance(value, TensorDescriptor):
            address, value = value.base.data_ptr(), copy.copy(value)
            value.base = SimpleNamespace(data_ptr=lambda: address)
        return Address(value.data_ptr(), _like(value)) if isinstance(value, Tensor) else value

    def launch(self, stream: int) -> bool:
        for function, values in self.calls:
            args, kwargs = mapped(values, lambda x: _at(x.address, x.like) if isinstance(x, Address) else x)
            function(*args, **kwargs)
        return True


class Address:
    def __init__(self, address: int, like: Any) -> None:
        self.address, self.like = address, like


class InPlace(steps.Replay):
    """A replay whose workspace is where it was, as that of a GPU's allocator often is."""

    def __init__(self, plan: steps.ReplayPlan) -> None:
        super().__init__(plan)
        self.storage: Any = self.workspace
        self.storage.resize_(plan.workspace_bytes)
        self.workspace: Any = SimpleNamespace(resize_=lambda size: None, data_ptr=self.storage.data_ptr)

    def move(self) -> None:
        """Have the workspace somewhere else."""
        size, address, self.others = self.storage.nbytes(), self.storage.data_ptr(), []
        while self.storage.data_ptr() == address:
            self.storage.resize_(0)
            self.others.append(torch.empty(size, dtype=torch.uint8))  # in the old place, which stays readable
            self.storage.resize_(size)


class Allocator:
    """Memory of a tensor at two places, by turns, so that addresses come again."""

    def __init__(self, place: Place, device: torch.device) -> None:
        self.places = [torch.empty_strided(place.size, place.stride, dtype=place.dtype) for _ in range(2)]
        self.turns = itertools.cycle([0, 1])

    def __call__(self) -> Tensor:
        tensor = self.places[next(self.turns)]
        return _at(tensor.data_ptr(), _like(tensor))


@contextmanager
def capturing() -> Iterator[list[Any]]:
    """Have stretches of steps captured, on a CPU by a stand-in. -> The graphs that are launched, in order."""
    launched: list[Any] = []
    capture = graphs.capture if GPU else Captured

    def noted(*given: Any) -> Any:
        graph: Any = capture(*given)
        if graph is None:
            return None
        launch = graph.launch

        def counted(stream: int) -> bool:
            launched.append(graph)
            return launch(stream)

        graph.launch = counted
        return graph

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(graphs, "capture", noted))
        if not GPU:
            stack.enter_context(mock.patch.object(graphs, "available", lambda: True))
            stack.enter_context(mock.patch.object(graphs, "is_captured", lambda: False))
            stack.enter_context(mock.patch.object(steps, "_allocator", Allocator))
            stack.enter_context(mock.patch.object(replay, "Replay", InPlace))
        yield launched


def tensors(num_tokens: int = 20, hidden_size: int = 16, num_rows: int = 70) -> tuple[Tensor, Tensor, Tensor]:
    if GPU:
        num_tokens, hidden_size, num_rows = (8 * n for n in (num_tokens, hidden_size, num_rows))
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(num_tokens, hidden_size, generator=generator)
    weight = torch.randn(num_rows, hidden_size, generator=generator)
    labels = torch.randint(num_rows, (num_tokens,), generator=generator)
    labels[::5] = -100
    return hidden.to(DEVICE, DTYPE), weight.to(DEVICE, DTYPE), labels.to(DEVICE)


def leaves(*values: Tensor) -> list[Tensor]:
    """New leaves, each at an address of its own."""
    return [value.clone().requires_grad_() for value in values]


def loss_of(given: list[Tensor], labels: Tensor, **options: Any) -> Tensor:
    hidden, weight = given[:2]
    return linear_cross_entropy(hidden, weight, labels, backend="triton", **options)


def backward(loss: Tensor, given: list[Tensor]) -> list[Tensor]:
    """Return the loss and the gradients that are made for it alone."""
    for leaf in given:
        leaf.grad = None
    loss.backward()
    return [loss.detach(), *gradients(given)]


def gradients(given: list[Tensor]) -> list[Tensor]:
    return [leaf.grad for leaf in given if leaf.grad is not None]


def same(a: Any, b: Any) -> bool:
    """Whether two nests of tensors hold the same bits, laid out alike."""
    pairs = list(zip(tree_leaves(a), tree_leaves(b), strict=True))
    return all(torch.equal(x, y) and x.stride() == y.stride() for x, y in pairs)


def ordinary() -> Any:
    return mock.patch.object(replay, "available", lambda: False)


def small_chunks(rows: int = 16) -> Any:
    return mock.patch.multiple(budget, LEAST_BYTES=1 << 10, ROWS=rows)


def follow(function: Callable[..., Any], calls: Iterable[tuple[Any, ...]]) -> replay.Replayed:
    """Make calls replayed and ordinarily, and compare. -> What replayed them, which has a plan for each kind."""
    replayed = replay.Replayed(function, lambda call: ())
    for args in calls:
        assert same(replayed(*args), function(*args))
    assert replayed.plans and None not in replayed.plans.values()
    return replayed


def plan_of(replayed: replay.Replayed) -> Any:
    """Return the one plan that there is."""
    (plan,) = replayed.plans.values()
    assert plan is not None
    return plan


def planned(function: Callable[..., Any], *given: Tensor) -> tuple[Tape, steps.ReplayPlan]:
    with Tape(given) as tape:
        tape.returned(function(*given))
    return tape, steps.ReplayPlan(tape, given[0].device)


def check(step: Callable[[], list[Tensor]], calls: int = 2) -> list[replay.Shared]:
    """Compare a step with itself replayed, where it makes ``calls`` calls. -> The plans of the last step."""
    with ordinary():
        wanted = step()
    with replaying() as used:
        for _ in range(3):
            used.clear()
            assert same(wanted, step())
        assert len(used) == calls, "a call was not replayed"
        held = [idle.workspace.nbytes() for plan in used for idle in plan.idle]
        assert not any(held), "memory is held between calls"
    return used


CASES = {
    "exact": {},
    "groups of tokens": {"workspace_bytes": 1},
    "options": {"softcap": 2.0, "label_smoothing": 0.1, "z_loss_weight": 1e-3, "logit_scale": 0.5},
    "sum": {"reduction": "sum"},
    "filter": {"grad_filter": GradFilter(always=True)},
    "plain filter": {"grad_filter": GradFilter(compensate=False, always=True), "softcap": 3.0},
    "filter of d_hidden": {"grad_filter": GradFilter(weight=False, always=True)},
}


@pytest.mark.parametrize("options", CASES.values(), ids=list(CASES))
def test_same_bits(options: dict[str, Any]) -> None:
    """Catches: an argument or an address of another launch, two intermediates in one place, a step left out."""
    hidden, weight, labels = tensors()
    bias = torch.linspace(-1, 1, len(weight), device=DEVICE).to(DTYPE)

    def step() -> list[Tensor]:
        given = leaves(hidden, weight, bias)
        with small_chunks():
            loss = loss_of(given, labels, linear_bias=given[2], **{"workspace_bytes": 1 << 20, **options})
            return backward(loss, given)

    check(step)


def test_same_bits_with_kept_exponentials_of_groups() -> None:
    """Catches: zeros that a replay writes into d_hidden too early, over the hidden states that d_weight is made of."""
    hidden, weight, labels = tensors()
    kept = mock.patch.object(exact, "columns_kept", lambda *_: 768 if GPU else 96)
    rows = mock.patch.object(budget, "forward_rows", lambda *_: 128 if GPU else 16)

    def step() -> list[Tensor]:
        given = leaves(hidden, weight)
        with kept, rows:
            return backward(loss_of(given, labels), given)

    check(step)


@pytest.mark.parametrize("options", [{"z_loss_weight": 1e-3}, {"reduction": "none"}], ids=["one number", "each"])
def test_same_bits_where_gradients_are_made_in_groups(options: dict[str, Any]) -> None:
    """Catches: groups that are made ordinarily, and d_weight of another group or step."""
    hidden, weight, labels = tensors()
    classes = torch.rand(len(weight), device=DEVICE)

    def step() -> list[Tensor]:
        given = leaves(hidden, weight)
        with groups.of_rows(len(hidden) // 4):
            return backward(loss_of(given, labels, weight=classes, **options).sum(), given)

    check(step, calls=4)


@pytest.mark.parametrize("case", ["exact", *(pytest.param(case, marks=needs_gpu) for case in CASES if case != "exact")])
def test_same_bits_as_graphs(case: str) -> None:
    """The same two sets of tensors again and again. Catches: a graph at addresses that are not this call's."""
    hidden, weight, labels = tensors(8, 16, 40)
    both = [leaves(hidden, weight), leaves(hidden.flip(0), weight.flip(0))]
    ones = [torch.ones((), device=DEVICE) for _ in both]

    def step(given: list[Tensor], one: Tensor) -> list[Tensor]:
        for leaf in given:
            leaf.grad = None
        with small_chunks():
            loss = loss_of(given, labels, **{"workspace_bytes": 1 << 20, **CASES[case]})
            loss.backward(one)
        return [x.clone() for x in (loss.detach(), *gradients(given))]

    with ordinary():
        wanted = [step(*given) for given in zip(both, ones, strict=True)]
    with replaying(), capturing() as launched:
        for _ in range(8 if GPU else 4):
            for given, one, right in zip(both, ones, wanted, strict=True):
                assert same(step(given, one), right)
        assert len(launched) >= 4
        assert len(set(map(id, launched))) >= 2


def run(replay_: steps.Replay, given: list[Tensor]) -> Any:
    try:
        replay_.begin(given, [x.data_ptr() for x in given])
        return replay_.run(replay._stream(given[0].device))
    finally:
        replay_.end()


BY_HAND = pytest.mark.skipif(GPU, reason="moves memory by hand, which a GPU's allocator does by itself")


@BY_HAND
def test_whatever_moves_is_seen() -> None:
    """One address at a time: each input, each output, the workspace. Catches: one that a graph's key does not hold."""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        product = x * y
        total = product.sum(0)
        return product - total, (product + y).exp()

    def inputs() -> list[Tensor]:
        return [torch.randn(4, 300) for _ in range(2)]

    given = inputs()
    _, plan = planned(function, *given)
    with capturing() as launched, mock.patch.object(graphs, "MOST_GRAPHS", 99):
        replay_ = InPlace(plan)
        allocate: Any = replay_.first.func
        outputs: list[Any] = [allocator for _, allocator in allocate.allocators]
        assert len(outputs) == 2 and replay_.plan.workspace_bytes

        def is_right() -> bool:
            """Whether a call gives what it should at these addresses, and a graph was launched."""
            num_launched, found = len(launched), run(replay_, given)
            assert same(found, function(*given))
            return len(launched) > num_launched

        def is_seen() -> bool:
            return [is_right() for _ in range(4)] == [False, False, True, True]

        assert is_seen()
        for number, other in enumerate(inputs()):
            given[number] = other
            assert is_seen()
        for output in outputs:
            output.turns = itertools.cycle([2, 3])
            output.places += [torch.empty_like(place) for place in output.places]
            assert is_seen()
        replay_.move()
        assert is_seen()


def test_a_loss_that_is_kept_moves_no_graph() -> None:
    """All losses of a loop are kept, so each is somewhere else. Catches: a graph that is for one of them alone.

    The workspace is larger than 1 MiB: a GPU's allocator has other blocks for it than for what is kept, so it stays in place.
    """

    def function(x: Tensor, d_loss: Tensor, call: Any) -> tuple[Tensor, ...]:
        scaled = x * (d_loss * 2)
        # A sum of more numbers would allocate on a GPU, and no graph has it.
        loss = (scaled + 1).exp()[:300].sum() / 3
        return loss, scaled - 1

    replayed, kept, x = replay.Replayed(function, lambda call: ()), [], torch.linspace(-1, 1, 100_000, device=DEVICE)
    gc.collect()  # what other tests left would make room elsewhere
    with capturing() as launched:
        for number in range(9):
            d_loss = torch.tensor(float(number), device=DEVICE)
            loss, y = replayed(x, d_loss, None)
            assert torch.equal(loss, function(x, d_loss, None)[0]) and torch.equal(y, 2 * number * x - 1)
            kept += [loss, d_loss]
    assert plan_of(replayed).plan.workspace_bytes > 1 << 20
    # Two calls are no replays, and the first replay sees its addresses for the first time.
    assert len(launched) == 6 and len(set(map(id, launched))) == 1


@BY_HAND
def test_collectives_stand_between_graphs() -> None:
    """What a collective gives is somewhere else in each call. Catches: one that is captured, a graph of its old result."""
    given_away: list[Tensor] = []

    def collective(x: Tensor) -> Tensor:
        given_away.append(x + 1)
        return given_away[-1]

    def function(x: Tensor, call: Any) -> tuple[Tensor, ...]:
        there = recorded(collective, (x * 2 + 1).exp() - x)
        return (there - 1).exp() * 2, there * there

    x = torch.empty(300, device=DEVICE)
    with capturing() as launched:
        replayed = follow(function, ((x.copy_(torch.linspace(-1, n / 9, 300)), None) for n in range(9)))
    assert len(given_away) == 18
    assert len(set(map(id, launched))) == 1
    kinds = [type(step).__name__ for step in plan_of(replayed).idle[0].steps]
    assert kinds == ["Together", "_Recorded", "Together"]


class Stretch:
    """A stretch of one step over two storages, whose captures are counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.address, self.done, self.works, self.captured_by_others = [0, 0, 0], [], True, False
        monkeypatch.setattr(graphs, "capture", self._capture)
        monkeypatch.setattr(graphs, "is_captured", lambda: self.captured_by_others)
        step = lambda stream: self.done.append("step")  # noqa: E731
        self.stretch = graphs.Together([step], [step], self.address, [0, 2], torch.device("cpu"))

    def _capture(self, steps_: Any, device: torch.device) -> Any:
        self.done.append("capture")
        where = tuple(self.address)

        def launch(stream: int) -> bool:
            self.done.append(("graph", stream, where))
            return self.works

        return SimpleNamespace(last_call=0, launch=launch) if self.works else None

    def __call__(self, *address: int, stream: int = 5) -> list[Any]:
        self.address[:] = address
        self.done.clear()
        self.stretch(stream)
        return self.done.copy()


def test_a_graph_is_launched_where_its_addresses_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a graph of other addresses or of another stream, one inside somebody's capture."""
    stretch = Stretch(monkeypatch)
    graph = ("graph", 5, (1, 2, 3))
    assert [stretch(1, 2, 3) for _ in range(3)] == [["step"], ["capture", graph], [graph]]
    assert stretch(1, 7, 3) == [graph]  # no step touches the storage that moved
    assert stretch(1, 2, 4) == stretch(9, 2, 3) == stretch(1, 2, 3, stream=6) == ["step"]
    stretch.captured_by_others = True
    assert stretch(1, 2, 3) == stretch(1, 2, 4) == ["step"]
    stretch.captured_by_others = False
    assert stretch(1, 2, 3) == [graph]
    assert stretch(1, 2, 4) == ["capture", ("graph", 5, (1, 2, 4))]


def test_graphs_are_bounded_and_captures_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a cache that grows; captures at every step of a loop with more addresses than graphs; endless failures."""
    stretch, most = Stretch(monkeypatch), graphs.MOST_GRAPHS
    done = [stretch(n, 0, 0) for _ in range(4) for n in range(most + 4)]
    assert sum("capture" in each for each in done) == most == len(stretch.stretch.graphs)
    for n in range(1000):
        assert stretch(n + most + 4, 0, 0) == ["step"]
    assert len(stretch.stretch.seen) == graphs.MOST_SEEN
    stretch(most + 1, 0, 0)
    assert "capture" in stretch(most + 1, 0, 0)  # nobody launched the others any more
    assert len(stretch.stretch.graphs) == most
    stretch.works = False
    failures = [stretch(-1, 0, 0) for _ in range(2 * graphs.MOST_FAILURES)]
    assert sum("capture" in each for each in failures) == graphs.MOST_FAILURES
    assert all(each[-1] == "step" for each in failures)


def test_a_graph_that_cuda_refuses_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a call that fails although its steps can be launched; another attempt at each call."""
    stretch = Stretch(monkeypatch)
    for _ in range(3):
        stretch(1, 2, 3)
    stretch.works = False
    assert [stretch(1, 2, 3) for _ in range(2)] == [[("graph", 5, (1, 2, 3)), "step"], ["step"]]


def test_other_uses() -> None:
    """Two backwards of one forward, a buffer that d_weight is added to, several ids with the largest logits, no gradients.

    Catches: something that a replay leaves changed for the next, an input that is written to taken for another."""
    hidden, weight, labels = tensors()

    def twice() -> list[Tensor]:
        given = leaves(hidden, weight)
        loss = loss_of(given, labels)
        loss.backward(retain_graph=True)
        (3 * loss).backward()
        return [loss.detach(), *gradients(given)]

    def into_buffer() -> list[Tensor]:
        given, buffer = leaves(hidden, weight), torch.ones(weight.shape, device=DEVICE)
        return [*backward(loss_of(given, labels, grad_weight_out=buffer), given), buffer]

    def log_probs() -> list[Tensor]:
        given, ids = leaves(hidden, weight), torch.stack((labels, labels.clamp(min=1) - 1), 1)
        out = linear_log_probs(given[0], given[1], ids, entropy=True, top_k=3, backend="triton")
        assert out.entropy is not None and out.top_log_probs is not None
        return [out.log_probs.detach(), out.top_log_probs, *backward(out.log_probs.sum() + out.entropy.sum(), given)]

    def divergence() -> list[Tensor]:
        given = leaves(hidden, weight)
        value = linear_kl_divergence(
            given[0], given[1], hidden.flip(0), weight.flip(0), kind="jsd", reduction="sum", backend="triton"
        )
        return backward(value, given)

    def without_gradients() -> list[Tensor]:
        with torch.no_grad():
            return [linear_cross_entropy(hidden, weight, labels, backend="triton")]

    check(twice, 3)
    check(into_buffer)
    check(log_probs)
    check(divergence)
    check(without_gradients, 1)


def test_alignment_is_part_of_the_key() -> None:
    """Triton compiles for a pointer's 16 bytes. Catches: what was compiled for an aligned pointer launched with another."""
    hidden, weight, labels = tensors()

    def step() -> list[Tensor]:
        results: list[Tensor] = []
        for shift in (0, 1):
            room = torch.empty(hidden.numel() + 1, dtype=DTYPE, device=DEVICE)
            shifted = room[shift:][: hidden.numel()].view_as(hidden).copy_(hidden).requires_grad_()
            results += backward(loss_of([shifted, weight], labels), [shifted])
        return results

    plans = check(step, 4)
    assert len(set(plans)) == 4


def plain(first: Tensor, others: list[Tensor], factor: float) -> tuple[Tensor, list[Tensor]]:
    """A function of tensors without kernels: views, writes into memory, operators with and without a form for that."""
    buffer = torch.empty(2, *first.shape, dtype=first.dtype, device=first.device)
    buffer[0] = first * factor
    torch.add(buffer[0], others[0], out=buffer[1])
    ordered, order = buffer[1].sort(stable=True)
    total = torch.zeros_like(first)
    for other in others:
        total += torch.where(other > 0, other, 0.0).cumsum(0)
    return total, [ordered * buffer.sum(0), order, buffer.sum().view(1)[:1]]


def given(seed: float) -> tuple[Tensor, list[Tensor]]:
    return torch.arange(9.0, device=DEVICE) + seed, [torch.linspace(-seed, 5, 9, device=DEVICE).sin() for _ in range(3)]


def row(number: float) -> Tensor:
    return torch.full((9,), float(number), device=DEVICE)


GROUP = SimpleNamespace(factor=3.0)


def through_a_group(x: Tensor, call: Any) -> tuple[Tensor]:
    recorded(lambda: GROUP)
    found = recorded(lambda: GROUP)
    work = recorded(SimpleNamespace)
    recorded(lambda work, x: work.__dict__.update(x=x.clone()), work, x)
    return (recorded(lambda found, work: found.factor * work.x, found, work),)


def below_autocast(x: Tensor, call: Any) -> tuple[Tensor]:
    with torch.autocast(DEVICE, enabled=False):
        return (x @ x.T,)


def expanded(x: Tensor, call: Any) -> tuple[Tensor, ...]:
    out = torch.empty(4, device=DEVICE).copy_(x)
    return out[:2].expand(2, 2), out


def two_parts(number: int) -> tuple[Any, ...]:
    flat, begin = torch.linspace(-1, number, 96, device=DEVICE), 16 * max(1, number - 2)
    x, y = flat[:9], flat[begin : begin + 9]
    return (x, y, 0) if number % 2 else (y, x, 0)


def twice(x: Tensor, y: Tensor, call: Any) -> tuple[Tensor]:
    return (x - 2 * y,)


def parts(x: Tensor, y: Tensor, call: Any) -> tuple[Tensor, ...]:
    return x[1:] - 2 * y[:-1], y.view(3, 3).sum(0)


def number(x: Tensor, call: Any) -> tuple[Tensor]:
    return (torch.maximum(x, torch.tensor(0.5)),)


FOLLOWED = {  # function, arguments of the n-th call, number of plans
    # Catches: an operator's result in the place of one that is still needed, a constant that belongs to the first call.
    "operators": (plain, lambda n: (*given(n), 2.0), 1),
    # Catches: the same tensor in two arguments taken for two that are apart, or the other way around.
    "one tensor twice": (twice, lambda n: (x := row(n), x if n % 2 else row(1), 0), 2),
    # Two halves of a batch, tensors in a flat buffer. Catches: one that is found by its distance from another.
    "parts of one storage": (parts, two_parts, 1),
    # Catches: an operator that was noted below autocast, and is cast at a replay.
    "autocast": (below_autocast, lambda n: (torch.randn(8, 8, device=DEVICE), 0), 1),
    # Catches: a number that torch made a tensor of taken for one from elsewhere.
    "number": (number, lambda n: (torch.linspace(-n, 1, 9), 0), 1),
    # As many elements as its storage has, and fewer places. Catches: memory that is too small.
    "expanded tensor": (expanded, lambda n: (torch.arange(n, n + 4.0, device=DEVICE), 0), 1),
    # A group that a call asks for in two places. Catches: an object that is taken for a later one.
    "one object twice": (through_a_group, lambda n: (row(n), None), 1),
}


@pytest.mark.parametrize("case", FOLLOWED)
def test_the_same_again(case: str) -> None:
    function, arguments, num_kinds = FOLLOWED[case]
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=case == "autocast"):
        replayed = follow(function, map(arguments, range(8)))
    assert len(replayed.plans) == num_kinds


def test_what_is_written_behind_autograd_is_not_counted() -> None:
    """A flag that a backward sets in what forward saved. Catches a second backward that autograd refuses after a replay."""

    def function(flag: Tensor, x: Tensor, call: Any) -> tuple[Tensor]:
        flag.data.fill_(7)
        return (x * flag,)

    replayed = replay.Replayed(function, lambda call: ())
    for number in range(4):
        flag = torch.zeros(1, device=DEVICE)
        (y,) = replayed(flag, row(number), None)
        assert flag.item() == 7 and torch.equal(y, row(7 * number)) and flag._version == 0
    plan_of(replayed)


def test_what_a_collective_reads_stays() -> None:
    """Catches: memory that is given to another tensor while a collective, which was only started, may still read it."""
    under_way: list[Tensor] = []

    def function(x: Tensor, call: float) -> tuple[Tensor]:
        recorded(under_way.append, x * 2)
        for _ in range(4):
            x = x * 3
        recorded(wait)
        return (x,)

    def wait() -> None:
        assert torch.equal(under_way[-1], first * 2)

    replayed = replay.Replayed(function, lambda call: ())
    for seed in range(4):
        first, _ = given(seed)
        replayed(first, 1.0)
    assert len(plan_of(replayed).plan.offsets) > 1


def test_threads_replay_side_by_side() -> None:
    """Catches: a workspace that two calls share."""
    replayed, wrong = replay.Replayed(plain, lambda factor: ()), []
    turns = threading.Barrier(2)
    run = steps._Op.__call__

    def with_turns(step: Any, *args: Any) -> None:  # The two threads take turns at every operator.
        turns.wait(60)
        run(step, *args)

    def work(seed: int) -> None:
        first, others = given(seed)
        if not same(replayed(first, others, 2.0), plain(first, others, 2.0)):
            wrong.append(seed)

    for seed in range(2):
        work(seed)
    with mock.patch.object(steps._Op, "__call__", with_turns):
        threads = [threading.Thread(target=work, args=(seed,)) for seed in (5, 6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert len(plan_of(replayed).idle) == 2


OUTSIDE, NUMBER = torch.ones(12, device=DEVICE), torch.tensor(2.0)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        pytest.param(lambda x, y, call: (x + y if x.sum() > 0 else x,), "no tensor", id="reads a value"),
        pytest.param(lambda x, y, call: (x + OUTSIDE,), "elsewhere", id="a tensor from elsewhere"),
        pytest.param(lambda x, y, call: (x * NUMBER,), "elsewhere", id="a number from elsewhere"),
        pytest.param(lambda x, y, call: (x[3:] + y,), "overlap", id="overlapping inputs"),
        pytest.param(lambda x, y, call: (x + 1,), "several devices", id="two devices"),
    ],
)
def test_what_cannot_be_followed_stays_ordinary(
    function: Callable[..., Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches: a replay of the branch or of the tensor that the recorded call had."""
    replayed = replay.Replayed(function, lambda call: ())
    with caplog.at_level("DEBUG", "cce_dist"):
        for value in (1.0, 2.0, -3.0, 4.0):
            x = torch.full((12,), value, device=DEVICE)
            y = torch.ones(12, device="meta" if "devices" in reason else DEVICE)
            y = x[3:] if "overlap" in reason else y
            assert torch.equal(replayed(x, y, 0)[0], function(x, y, 0)[0])
    assert reason in caplog.text
    assert list(replayed.plans.values()) == [None]


FAILURES = [
    "replay._tensors_and_key", "replay._launches", "tape.Tape.__init__", "tape.Tape._operator", "tape.Tape._returned",
    "replay.ReplayPlan", "replay.Replay", "steps.lay_out", "steps._Op.__init__", "steps.Replay.begin", "steps.Replay._joined",
    "steps._Allocate.__call__", "replay._stream", "replay.current", "replay._without_autocast",
]  # fmt: skip


@pytest.mark.parametrize("where", FAILURES)
def test_an_error_in_a_shortcut_costs_a_line(where: str, caplog: pytest.LogCaptureFixture) -> None:
    """Catches: a call that fails because it could not be recorded, planned or replayed; memory or a tape that stays."""
    replayed = replay.Replayed(plain, lambda factor: ())
    module, _, name = where.partition(".")
    owner: Any = {"replay": replay, "steps": steps, "tape": tape_module}[module]
    if "." in name:
        owner, name = getattr(owner, name.split(".")[0]), name.split(".")[1]
    with (
        mock.patch.object(owner, name, mock.Mock(side_effect=RuntimeError("injected"))) as failing,
        mock.patch.object(replay, "_WARNED", False),
        caplog.at_level("DEBUG", "cce_dist"),
    ):
        for seed in range(5):
            assert same(replayed(*given(seed), 2.0), plain(*given(seed), 2.0))
        assert failing.called
    assert "injected" in caplog.text
    assert sum(record.levelname == "WARNING" for record in caplog.records) <= 1
    assert tape_module._THREAD.tape is tape_module._THREAD.launch is None
    follow(plain, ((*given(seed), 2.0) for seed in range(4)))


def test_an_error_after_a_launch_is_told() -> None:
    """Inputs may have been written to, and collectives made. Catches a second attempt."""
    made: list[Tensor] = []

    def function(x: Tensor, call: Any) -> tuple[Tensor]:
        x.add_(1)
        recorded(made.append, x)
        return (x * 2,)

    replayed, x = replay.Replayed(function, lambda call: ()), torch.zeros(9, device=DEVICE)
    for _ in range(3):
        replayed(x, None)
    with (
        mock.patch.object(steps._Recorded, "__call__", side_effect=RuntimeError("injected")),
        pytest.raises(RuntimeError, match="injected"),
    ):
        replayed(x, None)
    assert x[0] == 4 and len(made) == 3
    assert torch.equal(replayed(x, None)[0], torch.full((9,), 10.0, device=DEVICE)) and len(made) == 4


@pytest.mark.parametrize("hook", [None, print], ids=["none", "a function"])
def test_a_hook_in_place_of_tritons_chain(hook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a call that fails where somebody set a hook as in older versions of Triton."""
    from triton import knobs

    replayed = replay.Replayed(plain, lambda factor: ())
    for seed in range(6):
        if seed in (1, 4):  # while it would be recorded, and while it would be replayed
            monkeypatch.setattr(knobs.runtime, "launch_enter_hook", hook)
        assert same(replayed(*given(seed), 2.0), plain(*given(seed), 2.0))
        monkeypatch.undo()
    assert None not in replayed.plans.values()


def test_check_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    """CCE_DIST_REPLAY=check. Catches: a result or an input that only the ordinary call would get right."""

    def function(x: Tensor, out: Tensor, call: Any) -> tuple[Any, ...]:
        out.add_(x)
        return x * 2, [torch.empty(3, device=DEVICE)]

    monkeypatch.setattr(replay, "_checks", lambda: True)
    monkeypatch.setattr(graphs, "is_captured", lambda: False)
    replayed = replay.Replayed(function, lambda call: ())
    buffer = torch.zeros(10, device=DEVICE)[1:]
    for number in range(5):
        assert replayed(torch.full((9,), 2.0, device=DEVICE), buffer, None)[0].tolist() == [4.0] * 9
        assert buffer[0] == 2.0 * (number + 1)
    for step in plan_of(replayed).idle[0].steps:
        if isinstance(step, steps._Op):
            function_ = step.function
            step.function = lambda *given, f=function_, **kwargs: f(*given, **kwargs).mul_(3)
            with pytest.raises(RuntimeError, match="CCE_DIST_REPLAY=check"):
                replayed(torch.ones(9, device=DEVICE), buffer, None)
            step.function = function_


def test_check_holds_for_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a comparison of memory that nobody writes, and a copy of an input that makes another kind of call."""
    monkeypatch.setattr(replay, "_checks", lambda: True)
    monkeypatch.setattr(graphs, "is_captured", lambda: False)
    hidden, weight, labels = tensors()
    with replaying() as used:
        for _ in range(3):
            loss_of(leaves(hidden, weight), labels).backward()
    assert len(used) == 2


def test_kinds_by_turns_keep_their_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: shapes by turns, one more than plans, each of which is recorded again and again; a plan that nobody needs."""
    monkeypatch.setattr(replay, "MOST_PLANS", 3)
    monkeypatch.setattr(replay, "PATIENCE", 12)
    replayed, recorded = replay.Replayed(lambda x, call: (x + 1,), lambda call: ()), []
    keep = replayed._keep
    monkeypatch.setattr(replayed, "_keep", lambda key, plan: recorded.append(key) or keep(key, plan))
    for _ in range(9):
        for size in range(1, 5):
            replayed(torch.ones(size, device=DEVICE), None)
    assert len(recorded) == 3
    for _ in range(20):
        replayed(torch.ones(9, device=DEVICE), None)
    assert len(recorded) == 4 and len(replayed.plans) == len(replayed.used) == 3


def test_plans_die_without_the_collector() -> None:
    """Catches: a cycle, which keeps a plan that was evicted until the collector comes by."""
    replayed = replay.Replayed(plain, lambda factor: ())
    gc.collect()
    gc.disable()
    try:
        for seed in range(4):
            replayed(*given(seed), 2.0)
        shared = plan_of(replayed)
        alive = [weakref.ref(x) for x in (shared, shared.plan, shared.idle[0], *shared.idle[0].steps)]
        del shared
        replayed.forget()
        assert [reference() for reference in alive] == [None] * len(alive)
    finally:
        gc.enable()


class FakeDriver:
    """CUDA's driver as far as captures go: whether one is on, and handles that are not given back."""

    def __init__(self, interrupts: str) -> None:
        self.interrupts, self.capturing, self.graphs = interrupts, False, 0

    def cuStreamBeginCapture_v2(self, stream: int, mode: int) -> int:
        self.capturing = True
        if self.interrupts == "begin":
            raise KeyboardInterrupt
        return 0

    def cuStreamEndCapture(self, stream: int, graph: Any) -> int:
        self.capturing, was = False, self.capturing
        graph._obj.value, self.graphs = (7, self.graphs + 1) if was else (None, self.graphs)
        return 0 if was else 900

    def cuGraphDestroy(self, graph: Any) -> int:
        self.graphs -= 1
        return 0


@pytest.mark.parametrize("where", ["begin", "step"])
def test_an_interrupted_capture_ends(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a thread that goes on capturing after Ctrl-C."""
    driver = FakeDriver(where)
    monkeypatch.setattr(graphs, "_driver", lambda: driver)
    monkeypatch.setattr(graphs, "_side_stream", lambda device: SimpleNamespace(cuda_stream=3))
    monkeypatch.setattr(graphs, "_num_allocations", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())

    def step(stream: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        graphs.capture([step], torch.device("cpu"))
    assert not driver.capturing and not driver.graphs and not graphs._CAPTURING.locked()


def test_a_launch_that_no_tape_sees_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """Catches: a kernel that is launched but not declared by ``blocks.kernel``, whose launch a replay would leave out."""
    replayed = replay.Replayed(plain, lambda factor: ())
    with mock.patch.object(replay, "_launches", lambda: nullcontext([None])), caplog.at_level("DEBUG", "cce_dist"):
        for seed in range(3):
            replayed(*given(seed), 2.0)
    assert "a kernel was launched" in caplog.text
    assert list(replayed.plans.values()) == [None]


def test_every_launched_kernel_is_declared() -> None:
    """Catches it before a GPU does."""
    folder = Path(budget.__file__).parent
    for path in folder.rglob("*.py"):
        text = path.read_text()
        hidden = set(re.findall(r"@triton\.jit\s+def (\w+)", text)) & set(re.findall(r"(\w+)\[", text))
        assert not hidden, f"{path}: {hidden} is launched: declare it by blocks.kernel"


def test_plans_hold_no_tensors_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: an input or an output that a plan keeps alive; caches that grow with each new shape."""
    monkeypatch.setattr(replay, "MOST_PLANS", 2)
    monkeypatch.setattr(replay, "MOST_SEEN", 3)
    replayed = replay.Replayed(plain, lambda factor: ())
    for size in range(3, 9):
        for _ in range(3):
            first, others = given(size)
            first, others = first[:size], [other[:size] for other in others]
            out = replayed(first, others, 2.0)
        assert len(replayed.plans) <= 2
    for size in range(20):
        replayed(torch.ones(size + 1, device=DEVICE), [torch.ones(size + 1, device=DEVICE)], 2.0)
        assert len(replayed.seen) <= 3
    alive = [weakref.ref(x) for x in (first, *others, out[0], *out[1])]
    del first, others, out
    gc.collect()
    assert not any(reference() is not None for reference in alive)


def test_places_do_not_meet() -> None:
    """Catches: two intermediates that are in use at the same step and overlap."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        sizes = torch.randint(0, 5000, (12,), generator=generator).tolist()
        used = torch.randint(0, 30, (12, 2), generator=generator).sort(1).values.tolist()
        first, last = (dict(enumerate(each)) for each in zip(*used, strict=True))
        offsets, total = steps.lay_out(set(range(12)), sizes, first, last)
        for a in range(12):
            assert offsets[a] % steps.ALIGNMENT == 0
            assert offsets[a] + sizes[a] <= total
            for b in range(a):
                apart = offsets[a] + sizes[a] <= offsets[b] or offsets[b] + sizes[b] <= offsets[a]
                assert apart or used[a][0] > used[b][1] or used[b][0] > used[a][1]


def most_held(tape: Tape, plan: steps.ReplayPlan) -> int:
    """Return the most bytes that a replay holds at a time."""
    there: set[int] = set()
    most = 0
    for phase in plan.phases:
        there |= set(phase.allocated)
        most = max(most, plan.workspace_bytes + sum(tape.sizes[n] for n in there))
        there -= set(phase.dropped)
    return most


def test_phases_hold_no_more_than_the_recorded_call() -> None:
    """Large tensors one after another, beside more and more results. Catches: memory that is taken too early, too late, or
    given back too early; a call that is cut although it need not be."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        results = []
        for _ in range(3):
            large = torch.empty(4 * len(x), device=DEVICE).fill_(2.0)
            results.append(x * large.sum())
        return tuple(results)

    x = torch.ones(1 << 18, device=DEVICE)
    for slack, num_phases in ((0, 6), (2 * x.nbytes, 1)):
        with mock.patch.object(steps, "SLACK", slack):
            tape, plan = planned(function, x)
        assert same(run(steps.Replay(plan), [x]), function(x))
        assert len(plan.phases) == num_phases
        # Two results and a large tensor of four times their size are what the recorded call had at most.
        assert most_held(tape, plan) <= 6 * x.nbytes + slack + 4096


def test_small_tensors_do_not_stay_beside_large_ones() -> None:
    """Catches: a workspace of many tensors below ``LARGE`` that is there while one above it is."""

    def function(x: Tensor) -> Tensor:
        small = [torch.empty_like(x).fill_(float(n)) for n in range(12)]
        total = sum(each.sum() for each in small)
        del small
        return torch.empty(16 * len(x), device=DEVICE).fill_(1.0).mul_(total)

    x = torch.ones(3 * steps.LARGE // 16, device=DEVICE)
    tape, plan = planned(function, x)
    assert torch.equal(run(steps.Replay(plan), [x]), function(x))
    assert most_held(tape, plan) <= 16 * x.nbytes + steps.SLACK


def _on_ranks() -> None:
    hidden, weight, labels = tensors(16, 8, 40)
    shard = VocabShard.even(len(weight), dist.group.WORLD)
    rank, world = dist.get_rank(), dist.get_world_size()
    for options in (
        {}, {"sequence_parallel": True}, {"sequence_parallel": True, "workspace_bytes": 1},
        {"grad_filter": GradFilter(always=True), "reduce_dtype": torch.float32},
    ):  # fmt: skip

        def step(options: dict[str, Any] = options) -> list[Tensor]:
            local = hidden.chunk(world)[rank] if "sequence_parallel" in options else hidden
            given = leaves(local, weight[shard.start : shard.stop])
            with small_chunks(rows=8):
                return backward(loss_of(given, labels, shard=shard, **options), given)

        plans = check(step)
        assert all(any(isinstance(step, Recorded) for step in plan.plan.steps) for plan in plans)

    mine = slice(shard.start, shard.stop)

    def divergence() -> list[Tensor]:
        given = leaves(hidden.chunk(world)[rank], weight[mine])
        teacher = (hidden.flip(0).chunk(world)[rank].contiguous(), weight[mine].flip(0).contiguous())
        options: dict[str, Any] = {"shard": shard, "sequence_parallel": True, "reduction": "mean", "backend": "triton"}
        value = linear_kl_divergence(given[0], given[1], *teacher, kind="jsd", **options)
        return backward(value, given)

    check(divergence)


def test_two_ranks(ranks2: Callable[..., None]) -> None:
    """Catches: a collective that is left out, or given another call's tensors or group; memory that one still reads."""
    ranks2(_on_ranks)


def training(
    options: dict[str, Any], seed: int = 1, sizes: tuple[int, int, int] = (20, 16, 70)
) -> tuple[Callable[[], list[Tensor]], list[Tensor]]:
    """Return a step that leaves nothing behind, and what it has to return."""
    hidden, weight, labels = tensors(*sizes)
    given = leaves(hidden.roll(seed, 1), weight)

    def step() -> list[Tensor]:
        return backward(loss_of(given, labels, **options), given)

    with ordinary():
        return step, [x.clone() for x in step()]


OF_A_GPU = pytest.mark.parametrize("options", [{}, {"grad_filter": GradFilter(always=True)}], ids=["exact", "filter"])


def stretches(used: list[replay.Shared]) -> list[graphs.Together]:
    """Return the stretches of steps that the plans can launch as graphs."""
    plans = {id(shared): shared for shared in used}.values()
    return [s for shared in plans for idle in shared.idle for s in idle.steps if isinstance(s, graphs.Together)]


@needs_gpu
@OF_A_GPU
def test_graphs_wait_for_nothing(options: dict[str, Any]) -> None:
    """Catches: a capture or a launch that waits for the device, a stretch that no graph takes."""
    step, wanted = training(options)
    gc.collect()
    torch.cuda.synchronize()
    with replaying() as used, capturing() as launched:
        asleep = torch.cuda.Event()
        torch.cuda._sleep(4_000_000_000)
        asleep.record()
        for _ in range(8):
            found = None  # or else its memory is taken, and addresses come again in some later step
            found = step()
        assert not asleep.query(), "the device was waited for, or the host is very slow"
        # Six steps are replays. Memory is the same before each, so all addresses come again.
        assert len(launched) >= 2 * len(stretches(used)) > 0
        assert same(wanted, found)


@needs_gpu
@OF_A_GPU
def test_peak_is_that_of_ordinary_calls(options: dict[str, Any]) -> None:
    """Catches: memory that a replay takes before it needs it, and that a sort's own memory is added to."""
    step, _ = training(options, sizes=(512, 64, 4096))

    def peak() -> int:
        """Bytes that are asked for: those allocated depend on what a block that is taken had left over."""
        torch.cuda.synchronize()
        gc.collect()  # what other tests left is not this step's
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        torch.cuda.reset_peak_memory_stats()
        step()
        after = torch.cuda.memory_stats()
        assert after["requested_bytes.all.current"] == before
        return after["requested_bytes.all.peak"] - before

    with ordinary():
        usual = peak()
    assert max(peak() for _ in range(6)) <= usual + steps.MOST_BEYOND


@needs_gpu
@OF_A_GPU
def test_graphs_of_threads_and_streams(options: dict[str, Any]) -> None:
    """Catches: one graph on two streams at a time, a capture that takes in what another thread launches or draws.

    A thread that allocates spoils the captures of others, so each has some steps to itself first.
    """
    steps_, errors = [training(options, seed) for seed in range(3)], []
    alone, together, quiet = threading.Lock(), threading.Barrier(len(steps_)), []

    def work(step: Callable[[], list[Tensor]], wanted: list[Tensor]) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                with alone:
                    before = len(launched)
                    assert all(same(wanted, step()) for _ in range(8))
                    quiet.append(len(launched) - before)
                together.wait()
                for _ in range(20):
                    assert same(wanted, step())
                    torch.rand(64, device=DEVICE)
        except Exception as error:
            errors.append(error)
            together.abort()

    gc.collect()
    torch.cuda.synchronize()
    with replaying(), capturing() as launched:
        threads = [threading.Thread(target=work, args=each) for each in steps_]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert all(quiet), quiet


@needs_gpu
@OF_A_GPU
def test_captured_compiled_and_on_another_stream(options: dict[str, Any]) -> None:
    """Catches: a replay that waits for the device, or that launches on the stream of the recorded call."""
    hidden, weight, labels = tensors()
    given = leaves(hidden, weight)

    def step(function: Callable[..., Any] = linear_cross_entropy) -> list[Tensor]:
        return backward(function(*given, labels, **options), given)

    def equal(found: list[Tensor]) -> bool:
        torch.cuda.synchronize()
        return same(wanted, found)

    with ordinary():
        wanted = [x.clone() for x in step()]
    with replaying() as used:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(4):
                found = step()
        assert equal(found)
        graph = torch.cuda.CUDAGraph()
        before = len(used)
        with torch.cuda.graph(graph):
            found = step()
        assert len(used) == before + 2, "the capture was not of replays"
        for x in found:
            x.zero_()
        graph.replay()
        assert equal(found)
        assert equal(step())
        compiled = torch.compile(linear_cross_entropy)
        assert equal([step(compiled) for _ in range(3)][-1])
