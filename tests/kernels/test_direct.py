"""Launches past Triton's own path: a key that is at least as fine as Triton's, and arguments that are Triton's own."""

import random
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shards import DEVICE, needs_gpu
from triton.tools.tensor_descriptor import TensorDescriptor

from cce_dist import GradFilter, linear_cross_entropy
from cce_dist.kernels import direct
from cce_dist.kernels.blocks import Described, Memory, operand


def _value(draw: random.Random) -> Any:
    """Draw an argument of a kernel as the host code may give one."""
    dtype = draw.choice([torch.float32, torch.bfloat16, torch.int64])
    tensor = torch.zeros(64, dtype=dtype)[draw.choice([0, 1, 2, 8]) :]
    matrix = torch.zeros(16, 32, dtype=draw.choice([torch.float32, torch.bfloat16]))
    return draw.choice(
        [
            tensor, tensor, described(matrix, draw.choice([8, 16])),
            draw.randrange(20), draw.randrange(1 << 10) << 4, 1 << draw.randrange(63), draw.random(), None,
            draw.choice([True, False]), (tensor, None, draw.random()), (draw.randrange(20), tensor),
        ]
    )  # fmt: skip


def described(matrix: torch.Tensor, cols: int) -> Described:
    return Described(Memory(matrix.data_ptr(), matrix.dtype), matrix.shape, matrix.stride(), [8, cols])


def test_a_key_is_at_least_as_fine_as_tritons() -> None:
    """Catches: an alignment, a width of integers, a dtype or a block that Triton compiles apart and the key does not tell."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend

    backend, draw = CUDABackend(GPUTarget("cuda", 90, 32)), random.Random(0)
    seen: dict[Any, set] = {}
    for _ in range(3000):
        value = _value(draw)
        key = tuple(direct.kinds([value])[0])
        seen.setdefault(key, set()).add(native_specialize_impl(backend, value, False, True, True))
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
    return launch.data_ptr() if isinstance(launch, torch.Tensor) else launch


def test_a_kind_that_came_before_passes_triton_by(launcher_and_seen: tuple[Any, list], monkeypatch) -> None:
    """Catches: keywords in another order, a kind taken for another, also inside a tuple, a hook that is passed by, another
    order of the launcher's arguments, a tensor map of another address."""
    launcher, seen = launcher_and_seen
    kernel: Any = Kernel(launcher, a=False, b=False, c=False, d=False, e=False, f=True)
    launch = direct.Kernel(kernel)
    monkeypatch.setattr(direct, "_is_wanted", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 9, raising=False)

    def call(size: int, number: int, how: str, scale: float | None = 0.5, **more: Any) -> None:
        matrix, other, x = (torch.zeros(16, 16, device=DEVICE) for _ in range(3))
        given = described(matrix, size), x, number, described(other, size), (x, scale)
        launch[1, 2](*given, **more, f=how)
        kernel.run(*given, how, grid=(1, 2), warmup=False, **more)
        kernel.launches -= 1
        assert _bare(seen[-1]) == _bare(seen[-2])

    kinds: list[tuple[tuple, dict[str, Any]]] = [
        ((8, 5, "a"), {}), ((4, 5, "a"), {}), ((8, 1, "a"), {}), ((8, 5, "b"), {}), ((8, 5, "a", None), {}),
        ((8, 5, "a"), {"num_warps": 8}),
    ]  # fmt: skip
    for number, (args, more) in enumerate(kinds):
        for _ in range(3):
            call(*args, **more)
            assert kernel.launches == number + 1
    call(8, 7, "a")
    assert kernel.launches == 6 and all(known.run is not launcher for known in launch.known.values())
    kernel.pre_run_hooks = [print]
    call(8, 7, "a")
    kernel.pre_run_hooks = []
    monkeypatch.setattr(direct, "watched", lambda: True)
    call(8, 7, "a")
    assert kernel.launches == 8


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
            threads.submit(kernel.by_triton, (), (1,), {})
    assert most == [1]


def test_launches_share_descriptors_of_memory(monkeypatch) -> None:
    """Catches: a descriptor that holds a tensor's memory, one of another block, address or shape."""
    monkeypatch.setattr(direct, "_is_wanted", lambda: True)
    matrices = [torch.zeros(48, 16, device=DEVICE) for _ in range(2)]
    cases = [(matrices[0], 8), (matrices[0], 16), (matrices[1], 8), (matrices[0][:16], 8), (matrices[0][16:], 8)]
    made = [operand(matrix, 8, cols, True) for matrix, cols in cases]
    assert len(set(made)) == len(cases)
    assert made == [operand(matrix.view_as(matrix), 8, cols, True) for matrix, cols in cases]
    alive = weakref.ref(matrices.pop())
    del cases
    assert alive() is None
    with direct.launching(print):  # in whose hands memory is not enough
        found: Any = operand(matrices[0], 8, 8, True)
        assert found.base is matrices[0]


@needs_gpu
@pytest.mark.parametrize("how", [None, GradFilter(always=True)], ids=["exact", "filtered"])
def test_same_bits_as_by_triton(how: GradFilter | None, monkeypatch) -> None:
    """Sizes vary from call to call, as packed batches do. Catches: a kernel compiled for an alignment that is not there."""
    weight = (0.1 * torch.randn(4099, 256, device="cuda")).bfloat16().requires_grad_()
    for num_tokens in (64, 65, 96, 1, 128, 65, 64):
        hidden = torch.randn(num_tokens, 256, device="cuda").bfloat16().requires_grad_()
        labels = torch.randint(4099, (num_tokens,), device="cuda")
        found = []
        for wanted in (True, False, True):
            monkeypatch.setattr(direct, "_is_wanted", lambda wanted=wanted: wanted)
            loss = linear_cross_entropy(hidden, weight, labels, grad_filter=how)
            found.append((loss, *torch.autograd.grad(loss, (hidden, weight))))
        assert all(torch.equal(ours, triton) for one in found[::2] for ours, triton in zip(one, found[1], strict=True))


def test_an_unknown_launcher_is_left_alone(monkeypatch, caplog) -> None:
    """Catches: a Triton whose launcher takes other arguments; a switch that does nothing."""
    import triton
    from triton import knobs

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    available = direct.available.__wrapped__
    monkeypatch.setattr(direct, "available", available)
    for switch, wanted in (("", True), ("triton", False)):
        monkeypatch.setenv("CCE_DIST_LAUNCH", switch)
        assert direct._is_wanted.__wrapped__() == wanted
    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", lambda self, *args, **kwargs: None)
    with caplog.at_level("WARNING", "cce_dist"):
        assert not available()
    assert "does not know the launcher" in caplog.text


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


def test_a_launcher_of_another_form_costs_a_line(caplog) -> None:
    """Catches: a Triton whose launcher is taken for one that is known, and a short way that is off without a word."""

    class Other(Launcher):
        def __call__(self, *args: Any) -> None:
            self.launch(*args)

    compiled = SimpleNamespace(run=Other(print, ["first"]), function=7, packed_metadata=(4, 1, 0))
    direct._say_once.cache_clear()
    for _ in range(3):
        assert direct.launcher_of(compiled) == (compiled.run, [(4, 1, 0), None, None, None], [], False)
    assert caplog.text.count("another form") == 1
