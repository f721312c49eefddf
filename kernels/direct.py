"""Launch kernels without Triton's own checks, which take the host 40 to 60 us each time.

The first launch with arguments of a kind goes through Triton, which compiles. Later ones of that kind call Triton's launcher
in C with that compiled kernel. The kind is a key (``kinds``) that differs wherever Triton would compile differently.

Launches go through Triton if this version's launcher is unknown here, while hooks are set on launches, and with
``CCE_DIST_LAUNCH=triton``. In a dry run they go to a function instead (``launching``).
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import re
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import accumulate, count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

_LOG = logging.getLogger("cce_dist")
Launch = Callable[..., Any]  # takes a kernel's tensors
Launcher = tuple[Callable[..., None], list[Any], list[Callable[[Any], list[Any]]], bool]  # of ``launcher_of``
MOST_KINDS = 1024  # of launches of one kernel; then the dictionary begins anew
_COUNT = count()
MOST_CODES = 64  # of tensor descriptors of one argument of a kind


@lru_cache(maxsize=1)
def available() -> bool:
    """Return whether kernels run on an NVIDIA GPU with a known launcher. Warn once if it is unknown."""
    if torch.version.hip is not None:
        return False
    import triton

    if knobs().runtime.interpret or not torch.cuda.is_available():
        return False
    call = "kernel.run(grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, launch_metadata,"
    try:
        is_known = call in inspect.getsource(triton.runtime.jit.JITFunction.run) and hasattr(knobs(), "HookChain")
    except OSError:  # no source
        is_known = False
    if not is_known:
        _LOG.warning(
            "cce_dist launches kernels through Triton, which is slower: it does not know the launcher of Triton %s",
            triton.__version__,
        )
    return is_known


def watched() -> bool:
    """Return whether hooks are set on Triton's launches."""
    runtime = knobs().runtime
    return bool(getattr(runtime.launch_enter_hook, "calls", True) or getattr(runtime.launch_exit_hook, "calls", True))


@lru_cache(maxsize=1)
def knobs() -> Any:
    from triton import knobs

    return knobs


class _Thread(threading.local):
    launch: Callable[..., Any] | None = None  # called in place of each launch


_THREAD = _Thread()


@contextmanager
def launching(instead: Callable[..., Any]) -> Iterator[None]:
    """Call ``instead(kernel, args, grid, options)`` in place of each launch of this thread."""
    before, _THREAD.launch = _THREAD.launch, instead
    try:
        yield
    finally:
        _THREAD.launch = before


def launches_are_replaced() -> bool:
    """Return whether this thread is inside ``launching``."""
    return _THREAD.launch is not None


# Triton loads each launcher in C as a module of the same name. If the file was loaded before, CPython puts its functions into
# the module that was loaded last, so a thread that loads another launcher meanwhile would give it to this kernel (Triton 3.6).
_LOADING = threading.Lock()


def load(kernel: Any) -> None:
    """Have Triton build and load a compiled kernel's launcher in C, in one thread at a time."""
    with _LOADING:
        _ = kernel.run


def passes_triton_by() -> bool:
    return _THREAD.launch is None and _is_wanted()


class Part:
    """A part of an allocation, in fp32, that kernels take for a tensor. A view takes the host longer."""

    __slots__ = ("address", "first", "shape", "whole")
    dtype = torch.float32

    def __init__(self, whole: Tensor, address: int, first: int, shape: tuple[int, ...]) -> None:
        self.whole, self.address, self.first, self.shape = whole, address, first, shape

    def of_rows(self, num_rows: int) -> Part:
        """Return the part with another size of its last dimension."""
        if num_rows == self.shape[-1]:
            return self
        return Part(self.whole, self.address, self.first, (*self.shape[:-1], num_rows))

    def tensor(self) -> Tensor:
        return self.whole[self.first : self.first + math.prod(self.shape)].view(self.shape)


def allocate(device: torch.device, *shapes: tuple[int, ...]) -> list[Part]:
    """Allocate parts at once, at multiples of 256 bytes."""
    firsts = _firsts(shapes)
    whole = torch.empty(firsts[-1], dtype=torch.float32, device=device)
    address = whole.data_ptr()
    return [Part(whole, address + 4 * first, first, shape) for first, shape in zip(firsts, shapes, strict=False)]


@lru_cache(maxsize=MOST_KINDS)
def _firsts(shapes: tuple[tuple[int, ...], ...]) -> list[int]:
    return [0, *accumulate(-(-math.prod(shape) // 64) * 64 for shape in shapes)]


def _tensors(args: Any) -> Any:
    """Return arguments with tensors in place of parts."""
    of = type(args)
    if of is Part:
        return args.tensor()
    if isinstance(args, tuple):
        items = map(_tensors, args)
        return of._make(items) if hasattr(of, "_make") else tuple(items)
    return args


class Kernel:
    """A kernel of ``triton.jit``, launched by ``kernel[grid](*args, **options)`` as Triton's own object is.

    Options are the kernel's constexprs and Triton's options. Other attributes are those of Triton's object.
    """

    def __init__(self, jitted: Any) -> None:
        self.jitted, self.known, self.kinds = jitted, dict[tuple, _Known](), dict[tuple, int]()
        parameters = getattr(jitted, "params", ())  # none if interpreted
        self.names = [parameter.name for parameter in parameters]
        self.constants = {parameter.name for parameter in parameters if parameter.is_constexpr}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.jitted, name)

    def __getitem__(self, grid: Sequence[int]) -> Launch:
        return partial(self._launch, grid)

    def _launch(self, grid: Sequence[int], *args: Any, **options: Any) -> Any:
        return self.launch((*grid, 1, 1)[:3], (), options, (tuple(options), *options.values()), *args)

    def prepared(self, grid: Sequence[int], *numbers: Any, **options: Any) -> Launch:
        """Return a launch that takes the arguments before ``numbers``, to be kept for equal sizes and options."""
        kind = (tuple(options), *options.values(), *kinds(numbers)[0])
        number = self.kinds.get(kind)
        if number is None:
            number = _keep(self.kinds, kind, next(_COUNT))
        return partial(self.launch, (*grid, 1, 1)[:3], numbers, options, number)

    def launch(
        self, grid: Sequence[int], numbers: tuple[Any, ...], options: dict[str, Any], kind: Hashable, *args: Any
    ) -> Any:
        """Launch with arguments and ``numbers``. ``kind`` stands for the kind of numbers and options."""
        if _THREAD.launch is not None:
            return _THREAD.launch(self, (*_tensors(args), *numbers), grid, options)
        if not _is_wanted() or watched() or self.jitted.pre_run_hooks:
            return self.by_triton((*_tensors(args), *numbers), grid, options)
        device = torch._C._cuda_getDevice()
        of_args, values = kinds(args)
        key = (device, kind, *of_args)
        known = self.known.get(key)
        if known is None:
            args = (*_tensors(args), *numbers)
            compiled = self.by_triton(args, grid, options)
            if hasattr(compiled, "packed_metadata") and self._are_constants(len(args), options):
                _keep(self.known, key, _Known.of(compiled, self.names, args, options))
            return compiled
        known.launch(grid, torch._C._cuda_getCurrentRawStream(device), values, numbers)
        return known.compiled

    def by_triton(self, args: Sequence[Any], grid: Sequence[int], options: dict[str, Any]) -> Any:
        """Launch through Triton, which loads the launcher in C of a kernel that is new."""
        with _LOADING:
            return self.jitted.run(*args, grid=grid, warmup=False, **options)

    def _are_constants(self, num_args: int, options: dict[str, Any]) -> bool:
        """Return whether exactly the kernel's constexprs are passed by name."""
        given = [name for name in options if name in self.names]
        return {*given} == self.constants and num_args + len(given) == len(self.names)


def _keep(records: dict[tuple, Any], key: tuple, record: Any) -> Any:
    if len(records) >= MOST_KINDS:
        records.clear()
    records[key] = record
    return record


def kinds(args: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the kind of arguments, and the arguments with addresses in place of tensors.

    The kind has all that Triton may compile differently for: dtypes, alignment, integers that are 1 or multiples of 16, which
    arguments are None. A tuple such as ``Head`` stays a tuple.
    """
    key, values = [], []
    for value in args:
        of = type(value)
        if of is Part:
            values.append(value.address)
            key.append(Part.dtype)
            continue
        if of is Tensor or of is Parameter:  # isinstance() of a tensor is slow
            address = value.data_ptr()
            values.append(address)
            key.append(value.dtype)
            if address & 15:
                key.append("unaligned")
            continue
        values.append(value)
        if value is None:
            key.append(None)
        elif of is int:
            if value == 1:
                key.append(1)
            elif 0 <= value < 1 << 31:  # nearly all
                key.append(3 if value & 15 else 16)
            else:
                key.append((value & 15 == 0, value.bit_length() >> 5, value < 0))
        elif of is bool:
            key.append((of, value))  # apart from the integer 1
        elif of is float:
            key.append(of)
        elif isinstance(value, tuple):
            inner, items = kinds(value)
            key.append(tuple(inner))
            values[-1] = tuple(items)
        elif hasattr(value, "kind"):  # ``blocks.Described``
            key.append(value.kind)
        elif isinstance(value, Tensor):  # a subclass
            address = values[-1] = value.data_ptr()
            key.append((of, value.dtype, address & 15))
        else:
            key.append(of)
    return key, values


class _Known(NamedTuple):
    """A compiled kernel, and how it is launched.

    Attributes:
        compiled: Triton's compiled kernel.
        run, behind, in_one: From ``launcher_of``.
        constants: Values of the constexprs, in the kernel's order.
        matrices: For each tensor descriptor, the last first, its position among the arguments and the function that encodes it.
            The function caches codes, because a training step passes the same descriptors again and again.
    """

    compiled: Any
    run: Callable[..., None]
    behind: list[Any]
    in_one: bool
    constants: list[Any]
    matrices: list[tuple[int, Callable[[Any], list[Any]]]]

    @classmethod
    def of(cls, compiled: Any, names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> _Known:
        (run, behind, encoders, in_one), constants = launcher_of(compiled), [kwargs[name] for name in names[len(args) :]]
        places = [place for place, value in enumerate(args) if hasattr(value, "block_shape")]
        encoders = [lru_cache(maxsize=MOST_CODES)(encode) for encode in encoders]
        return cls(compiled, run, behind, in_one, constants, [*zip(places, encoders, strict=False)][::-1])

    def launch(self, grid: Sequence[int], stream: int, values: list[Any], numbers: Sequence[Any]) -> None:
        for place, encode in self.matrices:
            values[place : place + 1] = encode(values[place])
        if self.in_one:
            self.run(*grid, stream, self.compiled.function, *self.behind, [*values, *numbers, *self.constants])
        else:
            self.run(*grid, stream, self.compiled.function, *self.behind, *values, *numbers, *self.constants)


def launcher_of(compiled: Any) -> Launcher:
    """Return Triton's launcher in C for a compiled kernel, or the Python around it if this Triton's is unknown.

    The Python allocates scratch memory, and encodes descriptors at each launch. A launcher is called with the grid's three
    sizes, the stream, the kernel's handle, ``behind``, and the kernel's arguments.

    Returns:
        The launcher; ``behind``; for each tensor descriptor that the launcher does not encode, a function that returns the
        arguments which replace it; and whether the kernel's arguments are passed as one list.
    """
    try:
        known = _known_launcher(compiled)
    except Exception as error:
        _say_once(f"cce_dist launches through Triton's Python: {error!r}")
        known = None
    # The three Nones are metadata for hooks and two hooks. If there were hooks, the launch would go through Triton.
    return known or (compiled.run, [compiled.packed_metadata, None, None, None], [], False)


def _known_launcher(compiled: Any) -> Launcher | None:
    run = compiled.run
    if run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False):
        return None
    said, how = _source_of_call(type(run)), [run.launch_cooperative_grid, run.launch_pdl]
    if "global_scratch, profile_scratch, *args)" in said:  # Triton 3.6
        behind, in_one = [*how, None, None, compiled.packed_metadata, None, None, None], False
    elif re.search(
        r"profile_scratch, self.arg_annotations, self.kernel_signature, (kernel_)?args\)", said
    ):  # 3.7 to 3.9
        nothing = [None] * 5  # metadata for hooks, two hooks, two kinds of scratch
        behind, in_one = [*how, compiled.packed_metadata, *nothing, run.arg_annotations, run.kernel_signature], True
    else:
        raise ValueError(f"the launcher of {type(run)} has another form")
    if not inspect.isfunction(run.launch):  # a kernel without descriptors
        return run.launch, behind, [], in_one
    within = inspect.getclosurevars(run.launch).nonlocals
    metas = within["tensordesc_meta"]
    if not metas or None in metas:
        return None
    from triton.backends.nvidia.driver import make_tensordesc_arg

    others = [None] * (
        len(inspect.signature(make_tensordesc_arg).parameters) - 2
    )  # from 3.8 on one more, which it ignores

    def encoder(meta: Any) -> Callable[[Any], list[Any]]:
        return lambda descriptor: make_tensordesc_arg(descriptor, meta, *others)

    return within["launcher"], behind, [encoder(meta) for meta in metas], in_one


@lru_cache(maxsize=8)
def _say_once(message: str) -> None:
    _LOG.warning(message)


@lru_cache(maxsize=8)
def _source_of_call(launcher: type) -> str:
    return inspect.getsource(launcher.__call__)


@lru_cache(maxsize=1)
def _is_wanted() -> bool:
    return os.environ.get("CCE_DIST_LAUNCH", "") != "triton" and available()
