"""Calls by a ``Pass``: bits, memory and order of the code that it stands for, and launchers that get Triton's own arguments."""

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shards import DEVICE, GPU, nan_memory
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from cce_dist import GradFilter, linear_cross_entropy, linear_log_probs
from cce_dist.kernels import Filter, Operands, ShardLogits, Spec, direct, exact, filter, passes
from cce_dist.kernels.dry_run import Live
from cce_dist.merge import Gather

DTYPE = torch.bfloat16 if GPU else torch.float32
FILTER = GradFilter(always=True)
OWN = type("Own", (Tensor,), {})


@pytest.fixture(autouse=True)
def _from_the_first_call(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(passes, "CALLS", 0)
    monkeypatch.setattr(passes, "is_wanted", lambda: True)
    passes._known.cache_clear()
    with nan_memory():
        yield
    passes._known.cache_clear()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[passes.Pass]:
    """The passes that a test makes."""
    found = list[passes.Pass]()
    plan = passes.planned

    def planned(*args: Any) -> passes.Pass:
        found.append(plan(*args))
        return found[-1]

    monkeypatch.setattr(passes, "planned", planned)
    return found


def inputs(seed: int, num_columns: int, dtype: torch.dtype = DTYPE) -> list[Tensor]:
    torch.manual_seed(seed)
    hidden, weight = (torch.randn(rows, 32, device=DEVICE).to(dtype) for rows in (24, num_columns))
    labels = torch.randint(num_columns, (24,), device=DEVICE)
    labels[:: seed + 2] = -100
    return [hidden.requires_grad_(), weight.requires_grad_(), labels]


def found(given: list[Tensor], function: Callable[..., Any] = linear_cross_entropy, **options: Any) -> list[Tensor]:
    out = function(*given, backend="triton", **options)
    outputs = [x for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, Tensor)]
    loss: Any = sum((x * x.detach().cos()).sum() for x in outputs if x.requires_grad)
    return [*outputs, *torch.autograd.grad(loss, given[:2])]


CALLS: dict[str, tuple[Any, ...]] = {
    "mean": ({},),
    "kept": ({}, torch.bfloat16),
    "filter": ({"grad_filter": FILTER, "softcap": 30.0},),
    "smoothing": ({"label_smoothing": 0.1, "z_loss_weight": 1e-3},),
    "outputs": ({"return_aux": True},),
    "chunks": ({"workspace_bytes": 1, "expected_weights": False, "reduction": "none"},),
    "log-probs": ({"function": linear_log_probs, "entropy": True, "softcap": 20.0},),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_pass_has_the_bits_of_its_code(
    call: tuple[Any, ...], made: list[passes.Pass], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other values and other memory each time, on a GPU beside Triton's launches. Catches: a step left out, or one that
    reads or writes another tensor's place, and an address, a value or a result that is kept from an earlier call."""
    options = call[0]
    num_columns = 1056 if "grad_filter" in options else 100  # enough for samples
    given = [inputs(seed, num_columns, *call[1:]) for seed in range(2)]
    with monkeypatch.context() as written:
        written.setattr(passes, "is_wanted", lambda: False)
        as_written = found(given[0], **options)
        written.setattr(direct, "is_wanted", lambda: False)
        wanted = [found(each, **options) for each in given]
    assert not made and all(map(torch.equal, as_written, wanted[0]))
    for number in (0, 1, 0):
        assert all(map(torch.equal, found(given[number], **options), wanted[number]))
    launches = [step for each in made for step in each.steps if isinstance(step, passes._Launch)]
    assert len(made) == 2 and all((step.known is not None) == GPU for step in launches)


@pytest.mark.parametrize(
    ("how", "most"), [({}, (5, 10, 4)), ({"grad_filter": FILTER}, (12, 11, 24))], ids=["exact", "filter"]
)
def test_few_steps_and_allocations(
    how: dict[str, Any], most: tuple[int, int, int], made: list[passes.Pass], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16, whose exponentials are kept. Catches: arithmetic or fills in torch, and results that only kernels read."""
    monkeypatch.setattr(passes._Launch, "__call__", lambda *_: None)
    found(inputs(0, 4096, torch.bfloat16), **how)
    forward, backward = made
    assert len(forward.steps) <= most[0] and len(forward.made) - 1 <= most[1]
    assert len(backward.steps) <= most[2] and len(backward.made) - 1 == 2


def test_buffers_share_memory_unless_alive_together() -> None:
    """Catches: two that overlap, a workspace as large as all together, and one that takes more than the code."""
    kernel: Any = direct.Kernel(SimpleNamespace())[1,]

    def function(x: Tensor, _: Any) -> Tensor:
        first, second, out = (x.new_empty(n) for n in (1000, 300, 10))
        kernel(x, first, second)
        del first
        third, fourth = x.new_empty(900), x.new_empty(200)
        kernel(second, third[10:], fourth, out)
        return out

    x = torch.zeros(8, device=DEVICE)
    found = passes.planned(function, (x,), None, [x])
    (_, first, second), (again, third, fourth, out) = (step.args for step in found.steps)
    assert second == again and third.offset == first.offset + 40 and out.slot == 1 and first.slot == 2
    spans = sorted((place.offset, place.offset + place.num_bytes) for place in (second, third, fourth))
    assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
    assert found.made[-1][0][0] <= 4 * (1000 + 300 + 200) + 3 * passes.ALIGNED

    def in_turn(x: Tensor, _: Any) -> list[Tensor]:
        kernel(x.new_empty(16 << 20))
        return [x.new_empty(16 << 20)]

    with pytest.raises(NotImplementedError, match="in one piece"):
        passes.planned(in_turn, (x,), None, [x])


def test_what_no_pass_can_stand_for_runs_as_written(made: list[passes.Pass], caplog: pytest.LogCaptureFixture) -> None:
    """Catches: a value that a pass keeps although it depends on a tensor; a mode, or a kind, that is not looked at."""

    def reads(x: Tensor, options: Any) -> Tensor:
        return x * 2 if x[0] > 0 else x + options

    def shape_of(x: Tensor, options: Any) -> Tensor:
        return x.new_empty(x.shape) if options else x.new_empty(3)

    x = torch.ones(8, device=DEVICE)
    with caplog.at_level("DEBUG", "cce_dist"):
        assert passes.run(reads, x, 5)[0] == 2 and passes.run(reads, -x, 5)[0] == 4
    assert caplog.text.count("as written") == 1
    with Live():
        passes.run(shape_of, x, 1)
    passes.run(shape_of, torch.ones(9, device=DEVICE)[1:], 1)  # of another alignment
    assert not made
    shapes = [
        passes.run(shape_of, *args).shape for args in ((x, 1), (x, 0), (x[:4], 1), (x.view(2, 4), 1), (x.int(), 1))
    ]
    assert shapes == [(8,), (3,), (4,), (2, 4), (8,)] and len(made) == 5


def test_functions_among_the_arguments_are_called_in_turn(made: list[passes.Pass]) -> None:
    """``Grads.hidden_ready`` starts a collective. Catches: one that sees a gradient too early, or not the gradient itself."""

    def function(x: Tensor, ready: list[Any], _: Any) -> Tensor:
        out = x.new_empty(x.shape)
        out.copy_(x)
        ready[0](out[:4])
        out.zero_()
        return out

    for value in (1.0, 2.0):
        seen = list[Tensor]()
        x = torch.full((8,), value, device=DEVICE)
        out = passes.run(function, x, [lambda part, seen=seen: seen.extend((part, part.clone()))], None)
        assert seen[1].tolist() == [value] * 4 and seen[0].data_ptr() == out.data_ptr() and not out.any()
    assert len(made) == 1


def test_a_filter_gathers_its_bound_in_a_pass(made: list[passes.Pass]) -> None:
    """Two ranks with the same shard. Catches: a forward over ranks that runs as written, a gather that is left out."""
    hidden, weight, labels = (x.detach() for x in inputs(0, 1056))
    spec = Spec(ShardLogits(0, 1056), 2112, filter=Filter(2.0**-5), workspace_bytes=1 << 20)
    ids, order = exact.ordered_ids(labels, -100, 2112)
    x = Operands.of(hidden, weight, ids, spec.logits)._replace(order=order)
    gather = Gather(2, lambda shards, shard_3N: shards.copy_(shard_3N.repeat(2, 1)))
    stats_KN, (bounds_3N, *_) = filter.statistics(x, gather, spec)
    for _ in range(2):
        in_pass = passes.run(filter.statistics, x, gather, spec)
        assert torch.equal(in_pass[0], stats_KN) and torch.equal(in_pass[1][0], bounds_3N)
    assert len(made) == 1


def _value(draw: random.Random) -> Any:
    """Draw an argument of a kernel as the host code may give one."""
    dtype = draw.choice([torch.float32, torch.bfloat16, torch.int64])
    tensor = torch.zeros(64, dtype=dtype)[draw.choice([0, 1, 2, 8]) :]
    matrix = torch.zeros(16, 32, dtype=draw.choice([torch.float32, torch.bfloat16]))
    return draw.choice(
        [
            tensor, tensor.as_subclass(OWN), TensorDescriptor(matrix, [16, 32], [32, 1], [8, draw.choice([8, 16])]),
            draw.randrange(20), draw.randrange(1 << 10) << 4, 1 << draw.randrange(63), draw.random(), None,
            draw.choice([True, False]), (tensor, None, draw.random()), (draw.randrange(20), tensor),
        ]
    )  # fmt: skip


def test_a_key_is_at_least_as_fine_as_tritons() -> None:
    """Catches: an alignment, a width of integers, a dtype or a block that Triton compiles apart and the key does not tell."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend

    backend, draw = CUDABackend(GPUTarget("cuda", 90, 32)), random.Random(0)
    seen: dict[Any, set] = {}
    for _ in range(3000):
        value = _value(draw)
        seen.setdefault(direct.kind(value), set()).add(native_specialize_impl(backend, value, False, True, True))
    assert len(seen) > 15 and all(len(kinds) == 1 for kinds in seen.values())


class Kernel:
    """A kernel of Triton's, as far as a launch past Triton knows it."""

    def __init__(self, launcher: Any, **is_constexpr: bool) -> None:
        self.params = [SimpleNamespace(name=name, is_constexpr=constant) for name, constant in is_constexpr.items()]
        self.launcher, self.launches, self.pre_run_hooks = launcher, 0, list[Any]()

    def run(self, *args: Any, grid: Any, warmup: bool, num_warps: int = 4, **kwargs: Any) -> Any:
        self.launches += 1
        values = [*args, *(kwargs[parameter.name] for parameter in self.params[len(args) :])]
        self.launcher(*(*grid, 1)[:3], 9, 7, (num_warps, 1, 0), None, None, None, *values)
        return SimpleNamespace(run=self.launcher, function=7, packed_metadata=(num_warps, 1, 0))


def _bare(launch: Any) -> Any:
    """Return what a launcher in C got, addresses in place of tensors."""
    if isinstance(launch, (list, tuple)):
        return [_bare(item) for item in launch]
    return launch.data_ptr() if isinstance(launch, Tensor) else launch


def test_a_launch_gets_tritons_arguments(launcher_and_seen: tuple[Any, list], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: another order of the launcher's arguments, a constexpr at another place, a tensor map of another address or
    shape, an offset that is left out, a hook that is passed by."""
    launcher, seen = launcher_and_seen
    kernel: Any = Kernel(launcher, a=False, b=False, c=False, d=False, e=False, f=True)
    options = {"f": "how", "num_warps": 8}
    stands_for: Any = direct.Kernel(kernel)

    def function(*args: Any) -> None:
        matrix, other, x, _ = args
        first, second = (TensorDescriptor(m, list(m.shape), list(m.stride()), [8, 8]) for m in (matrix, other[8:]))
        stands_for[1, 2](first, x[4:], 5, second, (x, 0.5, None), **options)

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 9, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    found = None
    for _ in range(4):
        tensors = [torch.zeros(16, 16, device=DEVICE) for _ in range(3)]
        monkeypatch.setattr(direct, "is_wanted", lambda: True)
        found = found or passes.planned(function, tuple(tensors), None, tensors)
        found.run([*tensors], [x.data_ptr() for x in tensors], [])
        function(*tensors, None)
        assert kernel.launches == 1
        monkeypatch.setattr(direct, "is_wanted", lambda: False)
        function(*tensors, None)
        kernel.launches -= 1
        in_pass, written, theirs = map(_bare, seen[-3:])
        assert in_pass[4:] == written[4:] == theirs[4:]  # what precedes is grid and stream
    monkeypatch.setattr(direct, "is_wanted", lambda: True)
    kernel.pre_run_hooks = [print]
    assert found is not None
    found.run([*tensors], [x.data_ptr() for x in tensors], [])
    function(*tensors, None)
    assert kernel.launches == 3


class Launcher:
    """Triton 3.6's launcher of a kernel with tensor descriptors, as far as a launch past Triton knows it."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = False, True

    def __init__(self, launcher: Callable[..., None], tensordesc_meta: list[Any]) -> None:
        def inner(*args: Any) -> None:
            metas, final = iter(tensordesc_meta), list(args[:13])
            for arg in args[13:]:
                final += encoded(arg, next(metas)) if isinstance(arg, TensorDescriptor) else [arg]
            launcher(*final)

        self.launch = inner

    def __call__(self, gridX: int, gridY: int, gridZ: int, stream: int, function: int, *args: Any) -> None:
        global_scratch = profile_scratch = None
        self.launch(gridX, gridY, gridZ, stream, function, self.launch_cooperative_grid, self.launch_pdl,
                    global_scratch, profile_scratch, *args)  # fmt: skip


def encoded(arg: Any, metadata: Any) -> list[Any]:
    return [("map", metadata, arg.base.data_ptr()), *arg.shape, *arg.strides]


@pytest.fixture(params=["3.6", "installed"])
def launcher_and_seen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, list]]:
    """Triton's launcher of a kernel with two descriptors, over a stand-in of its part in C, and what that was given."""
    import triton
    from triton.backends.nvidia import driver

    seen: list[Any] = []
    if request.param == "3.6":
        monkeypatch.setattr(driver, "make_tensordesc_arg", encoded)
        yield Launcher(lambda *args: seen.append(args), ["first", "second"]), seen
        return
    if triton.__version__.startswith("3.6"):
        pytest.skip("the installed Triton is 3.6")
    parts = SimpleNamespace(
        launch=lambda *args: seen.append([list(x) if isinstance(x, list | tuple) else x for x in args]),
        build_signature_metadata=lambda types: str(list(types)).encode(),
        fill_tma_descriptor_tiled=lambda *given: ("map", *map(str, given)),
    )  # fmt: skip
    for name, value in {"PyKernelArg": SimpleNamespace, "ARG_KERNEL": 0, "ARG_CONSTEXPR": 1, "ARG_TUPLE": 2}.items():
        monkeypatch.setattr(driver, name, value, raising=False)  # which come from the part in C
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(utils=parts))
    meta = {"swizzle": 3, "elem_size": 4, "elem_type": 7, "block_size": [8, 8], "fp4_padded": False}
    matrix = "tensordesc<fp32[8, 8]>"
    source = SimpleNamespace(
        signature={"a": matrix, "b": "*fp32", "c": "i32", "d": matrix, "e": ("*fp32", "fp32"), "f": "constexpr"},
        constants={},
    )
    metadata = SimpleNamespace(
        tensordesc_meta=[meta, {**meta, "swizzle": 2}], num_ctas=1, global_scratch_size=0, global_scratch_align=1,
        profile_scratch_size=0, profile_scratch_align=1, launch_cooperative_grid=False, launch_pdl=True,
        instrumentation_mode="",
    )  # fmt: skip
    yield driver.CudaLauncher(source, metadata), seen


def test_launchers_in_c_are_loaded_one_at_a_time() -> None:
    """Catches: a kernel that gets another kernel's launcher, which a thread loads between Triton's import of a launcher and its
    look at the imported module."""
    inside, most = [0], [0]

    def loading(*_: Any, **__: Any) -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.002)
        inside[0] -= 1

    class Compiled:
        run = property(loading)

    kernel = direct.Kernel(SimpleNamespace(run=loading))
    with ThreadPoolExecutor(8) as threads:
        for _ in range(16):
            threads.submit(direct.load, Compiled())
            threads.submit(kernel[1,])
    assert most == [1]


def test_a_launcher_of_another_form_costs_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches: a Triton whose launcher is taken for one that is known, and a short way that is off without a word."""

    class Other(Launcher):
        def __call__(self, *args: Any) -> None:
            self.launch(*args)

    compiled = SimpleNamespace(run=Other(print, ["first"]), function=7, packed_metadata=(4, 1, 0))
    direct._say_once.cache_clear()
    for _ in range(3):
        kernel: Any = SimpleNamespace(names=["a"], constants=set())
        assert direct.Known.of(kernel, compiled, [1], {}) is None
    assert caplog.text.count("another form") == 1
    monkeypatch.setattr(direct.knobs().runtime, "interpret", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for switch, wanted in (("", True), ("triton", False)):
        monkeypatch.setenv("CCE_DIST_LAUNCH", switch)
        assert direct.is_wanted.__wrapped__() == wanted
