"""Launch kernels without Triton's own checks, which take the host 40 to 60 us each time.

The first launch with arguments of a kind goes through Triton, which compiles. Later ones call Triton's launcher in C. All
launches go through Triton if its launcher is unknown here, while hooks are set on them, and with ``CCE_DIST_LAUNCH=triton``. In
a dry run they go to a function instead (``launching``).
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

_LOG = logging.getLogger("cce_dist")


@lru_cache(maxsize=1)
def is_wanted() -> bool:
    """Return whether launches may bypass Triton: on an NVIDIA GPU, unless CCE_DIST_LAUNCH is "triton"."""
    is_nvidia = torch.version.hip is None and not knobs().runtime.interpret and torch.cuda.is_available()
    return is_nvidia and os.environ.get("CCE_DIST_LAUNCH", "") != "triton"


def is_watched() -> bool:
    """Return whether hooks are set on Triton's launches."""
    runtime = knobs().runtime
    return any(getattr(hook, "calls", True) for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook))


@lru_cache(maxsize=1)
def knobs() -> Any:
    from triton import knobs

    return knobs


_LAUNCH: ContextVar[Callable[..., Any] | None] = ContextVar("cce_dist_launch", default=None)


@contextmanager
def launching(instead: Callable[..., Any]) -> Iterator[None]:
    """Call ``instead(kernel, args, grid, options)`` in place of each launch of this thread."""
    token = _LAUNCH.set(instead)
    try:
        yield
    finally:
        _LAUNCH.reset(token)


def launches_are_replaced() -> bool:
    """Return whether this thread is inside ``launching``."""
    return _LAUNCH.get() is not None


# Triton loads each launcher in C as a module of the same name. If the file was loaded before, CPython puts its functions into
# the module that was loaded last, so a thread that loads another launcher meanwhile would give it to this kernel (Triton 3.6).
_LOADING = threading.Lock()


def load(kernel: Any) -> None:
    """Have Triton build and load a compiled kernel's launcher in C, in one thread at a time."""
    with _LOADING:
        _ = kernel.run


class Kernel:
    """A kernel of ``triton.jit``, launched by ``kernel[grid](*args, **options)`` as Triton's own object is.

    Options are the kernel's constexprs and Triton's options. Other attributes come from Triton's object.
    """

    def __init__(self, jitted: Any) -> None:
        self.jitted, self.known = jitted, dict[tuple[Any, ...], Known]()
        parameters = getattr(jitted, "params", ())  # none if interpreted
        self.names = [parameter.name for parameter in parameters]
        self.constants = {parameter.name for parameter in parameters if parameter.is_constexpr}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.jitted, name)

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., Any]:
        return partial(self.launch, (*grid, 1, 1)[:3])

    def launch(self, grid: Sequence[int], *args: Any, **options: Any) -> Known | None:
        """Launch, and return how later launches with arguments of this kind bypass Triton, or None if they do not."""
        instead = _LAUNCH.get()
        if instead is not None:
            return instead(self, args, grid, options)
        bypasses = is_wanted() and not is_watched() and not self.jitted.pre_run_hooks
        key = ()
        if bypasses:
            key = (torch._C._cuda_getDevice(), tuple(options), *options.values(), *map(kind, args))
        known = self.known.get(key)
        if known is not None:
            known.launch(grid, torch._C._cuda_getCurrentRawStream(key[0]), [_value(arg) for arg in args])
            return known
        with _LOADING:
            compiled = self.jitted.run(*args, grid=grid, warmup=False, **options)
        known = Known.of(self, compiled, args, options) if bypasses else None
        if known is not None:
            self.known[key] = known
        return known


def kind(value: Any) -> Any:
    """Return what Triton may compile differently for: dtype, alignment, integers that are 1 or multiples of 16, None."""
    of = type(value)
    if of is int:
        return 1 if value == 1 else (value & 15 == 0, value.bit_length() >> 5, value < 0)
    if hasattr(value, "data_ptr"):
        return value.dtype, value.data_ptr() & 15 == 0
    if isinstance(value, tuple):
        return tuple([kind(item) for item in value])
    if hasattr(value, "block_shape"):
        return value.base.dtype, *value.block_shape
    return (of, value) if of is bool else value if value is None else of


def _value(arg: Any) -> Any:
    """Return a kernel's argument with addresses in place of tensors."""
    if hasattr(arg, "data_ptr"):
        return arg.data_ptr()
    return tuple([_value(item) for item in arg]) if isinstance(arg, tuple) else arg


class Known(NamedTuple):
    """How a compiled kernel is launched without Triton."""

    run: Callable[..., None]  # Triton's launcher in C
    before: list[Any]  # Its arguments after grid and stream, before the kernel's own
    in_one: bool  # The kernel's arguments are passed as one list
    constants: list[Any]  # Constexprs, the kernel's last arguments
    # For each tensor descriptor, the last first: its position, and a function that returns the arguments that replace it
    encoders: list[tuple[int, Callable[[Any], list[Any]]]]

    @classmethod
    def of(cls, kernel: Kernel, compiled: Any, args: Sequence[Any], options: dict[str, Any]) -> Known | None:
        """Return None unless exactly the kernel's constexprs are passed by name, and Triton's launcher is known."""
        given = [name for name in options if name in kernel.names]
        if {*given} != kernel.constants or len(args) + len(given) != len(kernel.names):
            return None
        try:
            found = _launcher_of(compiled)
        except Exception as error:
            _say_once(repr(error))
            found = None
        if found is None:
            return None
        run, behind, encoders, in_one = found
        constants = [options[name] for name in kernel.names[len(args) :]]
        places = [place for place, value in enumerate(args) if hasattr(value, "block_shape")]
        return cls(run, [compiled.function, *behind], in_one, constants, [*zip(places, encoders, strict=True)][::-1])

    def launch(self, grid: Sequence[int], stream: int, values: list[Any]) -> None:
        """Launch with the kernel's arguments, except for constexprs: addresses in place of tensors."""
        for place, encode in self.encoders:
            values[place : place + 1] = encode(values[place])
        values += self.constants
        if self.in_one:
            self.run(*grid, stream, *self.before, values)
        else:
            self.run(*grid, stream, *self.before, *values)


@lru_cache(maxsize=1)
def _say_once(error: str) -> None:
    _LOG.warning("cce_dist launches kernels through Triton, which is slower, because Triton's launcher is unknown: %s", error)


def _launcher_of(compiled: Any) -> Any:
    """Return Triton's launcher, what follows the kernel's handle, encoders, and ``in_one``; None if it allocates memory."""
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

    # From Triton 3.8 on, it ignores one more argument.
    others = [None] * (len(inspect.signature(make_tensordesc_arg).parameters) - 2)

    def encoder(meta: Any) -> Callable[[Any], list[Any]]:
        return lambda descriptor: make_tensordesc_arg(descriptor, meta, *others)

    return within["launcher"], behind, [encoder(meta) for meta in metas], in_one


@lru_cache(maxsize=8)
def _source_of_call(launcher: type) -> str:
    return inspect.getsource(launcher.__call__)
