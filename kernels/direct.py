"""Kernels as this project launches them: through Triton, instead of it by ``passes``, or in a dry run by a function.

Triton's own checks take the host 40 to 60 us a launch. ``launcher_of`` finds its launcher in C, which takes 14 us.
"""

from __future__ import annotations

import inspect
import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any

_LOG = logging.getLogger("cce_dist")
Launcher = tuple[Callable[..., None], list[Any], list[Callable[[Any], list[Any]]], bool]  # of ``launcher_of``


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

    Options are the kernel's constexprs and Triton's options. Other attributes are those of Triton's object.
    """

    def __init__(self, jitted: Any) -> None:
        self.jitted = jitted
        parameters = getattr(jitted, "params", ())  # none if interpreted
        self.names = [parameter.name for parameter in parameters]
        self.constants = {parameter.name for parameter in parameters if parameter.is_constexpr}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.jitted, name)

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., Any]:
        return partial(self.launch, (*grid, 1, 1)[:3])

    def launch(self, grid: Sequence[int], *args: Any, **options: Any) -> Any:
        """Launch through Triton, which compiles the kernel if it is new. Return the compiled kernel."""
        instead = _LAUNCH.get()
        if instead is not None:
            return instead(self, args, grid, options)
        with _LOADING:
            return self.jitted.run(*args, grid=grid, warmup=False, **options)

    def constants_of(self, args: Sequence[Any], options: dict[str, Any]) -> list[Any] | None:
        """Return the values of the constexprs in the kernel's order, or None unless exactly these are passed by name."""
        given = [name for name in options if name in self.names]
        if {*given} != self.constants or len(args) + len(given) != len(self.names):
            return None
        return [options[name] for name in self.names[len(args) :]]


@lru_cache(maxsize=1)
def _say_once(error: str) -> None:
    _LOG.warning("cce_dist launches kernels through Triton, which is slower: it does not know its launcher: %s", error)


def launcher_of(compiled: Any) -> Launcher | None:
    """Return Triton's launcher in C for a compiled kernel, or None if it is unknown, or if its Python allocates memory.

    A launcher is called with the grid's three sizes, the stream, the kernel's handle, ``behind``, and the kernel's arguments.

    Returns:
        The launcher; ``behind``; for each tensor descriptor a function that returns the arguments which replace it; and whether
        the kernel's arguments are passed as one list.
    """
    try:
        return _known_launcher(compiled)
    except Exception as error:
        _say_once(repr(error))
        return None


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

    # From 3.8 on it takes one more, which it ignores.
    others = [None] * (len(inspect.signature(make_tensordesc_arg).parameters) - 2)

    def encoder(meta: Any) -> Callable[[Any], list[Any]]:
        return lambda descriptor: make_tensordesc_arg(descriptor, meta, *others)

    return within["launcher"], behind, [encoder(meta) for meta in metas], in_one


@lru_cache(maxsize=8)
def _source_of_call(launcher: type) -> str:
    return inspect.getsource(launcher.__call__)
