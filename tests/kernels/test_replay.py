"""A replayed call against the ordinary one: the same bits, whatever the tensors' addresses are.

On a CPU the interpreter takes the place of a compiled kernel: it is given addresses alone, so what a replay hands to a launcher
is all that there is. On a GPU the same tests run with Triton's launcher.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
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

from cce_dist import GradFilter, VocabShard, groups, linear_cross_entropy, linear_kl_divergence, linear_log_probs, op
from cce_dist.divergence import op as divergence_op
from cce_dist.kernels import exact, memory
from cce_dist.kernels.launch import direct, replay, steps
from cce_dist.kernels.launch import tape as tape_module
from cce_dist.kernels.launch.tape import Recorded, Tape, recorded

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, on infinities inside the interpreter
DTYPE = torch.bfloat16 if GPU else torch.float32


class Interpreted:
    """A compiled kernel's launcher, which interprets the kernel on what lies at the addresses that it gets."""

    function = packed_metadata = None

    def __init__(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.kernel = kernel
        self.options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
        values = [*args, *(kwargs[name] for name in kernel.arg_names[len(args) :])]
        self.arguments = [_argument(value) for value in values]

    def run(self, *given: Any) -> None:
        grid, values = given[:3], given[9:]
        args = [argument(value) for argument, value in zip(self.arguments, values, strict=True)]
        self.kernel.by_triton(args, grid, self.options)


def _argument(recorded: Any) -> Callable[[Any], Any]:
    """Return what makes a kernel's argument of the value that a launcher gets, like the argument that was recorded."""
    if isinstance(recorded, TensorDescriptor):
        like = _like(recorded.base)

        def described(value: Any) -> TensorDescriptor:
            value = copy.copy(value)
            value.base = _at(value.base.data_ptr(), like)
            return value

        return described
    if isinstance(recorded, Tensor):
        like_ = _like(recorded)

        def at(address: Any) -> Tensor:
            assert type(address) is int
            return _at(address, like_)

        return at
    if hasattr(recorded, "_fields"):  # a record that a kernel takes as one argument
        fields = [_argument(field) for field in recorded]
        return lambda values: type(recorded)(*(field(v) for field, v in zip(fields, values, strict=True)))
    return lambda value: value


def _like(value: Tensor) -> tuple[Any, ...]:
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

    functions = [f for module in (op, divergence_op) for f in (module._replayed_forward, module._replayed_backward)]
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
    return mock.patch.multiple(memory, LEAST_BYTES=1 << 10, ROWS=rows)


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
    rows = mock.patch.object(memory, "forward_rows", lambda *_: 128 if GPU else 16)

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


def run(replay_: steps.Replay, given: list[Tensor]) -> Any:
    try:
        replay_.begin(given, [x.data_ptr() for x in given])
        return replay_.run(replay._stream(given[0].device))
    finally:
        replay_.end()


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
    "replay.ReplayPlan", "replay.Replay", "steps.lay_out", "steps._Op.__init__", "steps.Replay.begin",
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
    assert tape_module._THREAD.tape is direct._THREAD.launch is None
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
    folder = Path(memory.__file__).parent
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


@pytest.mark.slow
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
def test_threads_and_streams(options: dict[str, Any]) -> None:
    """Three threads replay steps, each on a stream of its own. Catches: a workspace that two streams write to at a time."""
    steps_, errors = [training(options, seed) for seed in range(3)], []

    def work(step: Callable[[], list[Tensor]], wanted: list[Tensor]) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    assert same(wanted, step())
        except Exception as error:
            errors.append(error)

    torch.cuda.synchronize()
    with replaying() as used:
        threads = [threading.Thread(target=work, args=each) for each in steps_]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert used and not errors


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
