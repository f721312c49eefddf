"""Kernels compiled ahead of their launches, side by side, while a call is rehearsed (``rehearsal.py``).

Each launch of the rehearsal is handed to a thread that compiles the kernel for its arguments. Triton's passes and its assembler
run without Python's lock, so the threads do not wait for one another. The launches that follow are ordinary ones. One whose
kernel is still under way waits for it and then finds it in Triton's cache. A kernel that a thread could not compile is compiled
by its launch, which tells the error.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

MOST_THREADS = 16  # no more kernels than that take long


class _Thread(threading.local):
    crew: _Crew | None = None


_THREAD = _Thread()
_TAKEN: set[tuple] = set()  # variants of kernels


def compiled_ahead(kernel: Any, specialized: frozenset[str]) -> Any:
    """Return a kernel of ``triton.jit`` whose launches rehearsals collect; it compiles anew for the arguments named."""
    launch = kernel.run
    under_way: dict[Future, dict[str, Any]] = {}

    def run(*args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        crew = _THREAD.crew
        if crew is not None:
            kinds = tuple(_kind(arg, name in specialized) for arg, name in zip(args, kernel.arg_names, strict=False))
            crew.compile(kernel, kinds, args, kwargs, under_way)
            return None
        if under_way:
            wait([future for future, options in list(under_way.items()) if options == kwargs])
        return launch(*args, grid=grid, warmup=warmup, **kwargs)

    kernel.run = run
    return kernel


def _kind(value: Any, specialized: bool) -> Any:
    """What Triton compiles for, of an argument."""
    if isinstance(value, Tensor):
        return value.dtype, specialized and value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return value.bit_length() < 32, specialized and (value == 1, value % 16 == 0)
    base = getattr(value, "base", None)  # of a tensor descriptor
    return type(value) if base is None else (base.dtype, *value.block_shape)


class _Crew:
    """Threads that compile what one rehearsal comes by. They end when that is done."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.threads = ThreadPoolExecutor(num_threads(), thread_name_prefix="cce_dist-compile")

    def compile(self, kernel: Any, kinds: tuple, args: Any, options: dict[str, Any], under_way: dict) -> None:
        variant = id(kernel), self.device, kinds, tuple(options.items())
        if variant in _TAKEN:
            return
        _TAKEN.add(variant)
        future = self.threads.submit(self._compile, kernel, args, options)
        under_way[future] = options
        future.add_done_callback(under_way.pop)

    def _compile(self, kernel: Any, args: Any, options: dict[str, Any]) -> None:
        from triton.runtime import driver

        with torch.cuda.device(self.device):
            compiled = type(kernel).run(kernel, *args, grid=(1,), warmup=True, **options)
            # Triton 3.6 builds a launcher in C for each kernel, which takes a quarter of a second, and keeps it on disk. The
            # code is not loaded here: that would disturb a graph's capture.
            driver.active.launcher_cls(compiled.src, compiled.metadata)


@contextmanager
def launches_compiled(device: torch.device) -> Iterator[None]:
    """Have this thread's launches compiled instead of made."""
    with torch.cuda.device(device), torch.no_grad():
        _THREAD.crew = crew = _Crew(torch.cuda.current_device())
        try:
            yield
        finally:
            _THREAD.crew = None
            crew.threads.shutdown(wait=False)


@lru_cache(maxsize=1)
def num_threads() -> int:
    """Threads that may compile: the cores of this process, shared with the ranks of its host."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1)
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // ranks))


@lru_cache(maxsize=1)
def available() -> bool:
    """Whether calls are rehearsed in this process."""
    if os.environ.get("CCE_DIST_COMPILE_AHEAD", "1") in ("", "0") or num_threads() < 2:
        return False
    return importlib.util.find_spec("triton.runtime._async_compile") is not None
