"""Kernels compiled ahead of their launches, side by side: a first call takes as long as the slowest, not as all of them.

A first loss and gradient compiles some 17 kernels, with a filter 36, each at its first launch. Here the call is rehearsed as
soon as forward begins: the host code runs once through forward and backward on tensors without memory (torch's device "meta"),
and each launch is handed to a thread that compiles the kernel for its arguments. Triton's passes and its assembler run without
Python's lock, so the threads do not wait for one another. The launches that follow are ordinary ones. One whose kernel is still
under way waits for it and then finds it in Triton's cache.

A rehearsal decides on nothing: a kernel that it missed, or that a thread could not compile, is compiled by its launch, which
tells the error. ``CCE_DIST_COMPILE_AHEAD=0`` turns rehearsals off. They need a Triton that may compile in threads.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cce_dist.kernels import Grads, Operands, Softmax, Spec

if TYPE_CHECKING:
    from cce_dist.kernels.backends import Backend

_LOG = logging.getLogger("cce_dist")
MOST_THREADS = 16  # no more kernels than that take long


class _Thread(threading.local):
    crew: _Crew | None = None


_THREAD = _Thread()
_REHEARSED: set[tuple] = set()  # calls
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
def _crew(device: torch.device) -> Iterator[None]:
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


def rehearse(backend: Backend, spec: Spec, x: Operands, weight_out: Tensor | None) -> None:
    """Compile the kernels of a call in the background, those of its backward too, unless one of its kind has come before.

    Args:
        backend: The one that the call has.
        spec: Its options.
        x: Its operands; the labels in place of their ids. Under sequence parallelism hidden states are a slice.
        weight_out: As in ``Grads``.
    """
    # Whoever looks at operators must not see a rehearsal, and a graph's capture allows no thread of ours.
    if not spec.want.grad or not x.weight.is_cuda or not available() or torch._C._len_torch_dispatch_stack():
        return
    if torch.cuda.is_current_stream_capturing() or spec.several or spec.factors or spec.want.top_k:
        return
    tensors = tuple((t.shape, t.dtype) for t in (x.weight, x.bias, weight_out) if t is not None)
    options = spec._replace(workspace_bytes=spec.workspace_bytes.bit_length())
    call = backend.__name__, x.weight.device, options, x.num_tokens.bit_length(), tensors
    if call in _REHEARSED:
        return
    _REHEARSED.add(call)
    try:
        with _crew(x.weight.device):
            _through(backend, spec, x, weight_out)
    except Exception as error:  # the call itself tells what is wrong with it
        _LOG.debug("cce_dist does not compile ahead: %r", error)


def _through(backend: Backend, spec: Spec, x: Operands, weight_out: Tensor | None) -> None:
    """Go through a call as ``op.py`` does, on one rank, with tensors that have no memory."""
    from cce_dist.kernels.tokens import num_counted

    def bare(tensor: Tensor | None) -> Any:
        return None if tensor is None else torch.empty_like(tensor, device="meta")

    def merge_bound(stats_3N: Tensor) -> Tensor:
        return backend.merged_lse(stats_3N[None])

    labels = bare(x.ids)
    hidden = x.hidden.new_empty(x.num_tokens, x.hidden.shape[1], device="meta")
    x = Operands(hidden, bare(x.weight), bare(x.bias), labels, x.logits)
    x = x._replace(ids=backend.label_ids(labels, spec.ignore_index, spec.vocab_size))
    stats_KN, saved = backend.statistics(x, spec, merge_bound)
    *_, merged = backend.token_losses(stats_KN[None], x.ids, spec)
    softmax = Softmax(merged[0], merged[1], merged[2] if spec.want.entropy else None)
    grad = merged[0]
    if spec.want.mean:
        count = num_counted(labels, spec.ignore_index)
        grad = (grad[0] / count).expand(x.num_tokens)
    wanted = (True, False, False, spec.want.uniform, spec.want.entropy)
    coef_4N = backend.coefficients([grad if want else None for want in wanted], x.ids, spec.vocab_size)
    backend.gradients(x, softmax, coef_4N, saved, Grads(True, True, x.bias is not None, bare(weight_out)), spec)
