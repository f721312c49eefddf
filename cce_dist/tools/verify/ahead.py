"""Compile the kernels of the next cases, in threads, while the present case runs.

A cold run of the table compiles more than a hundred kernels, and launches would compile them one after another. So each call is
made once without its launches: the host code runs on tensors of zeros where kernels would have written, and a launch only asks
Triton for its kernel. This finds all kernels, because what a call launches follows from sizes and options, never from values.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from cce_dist.kernels.direct import launching, load
from cce_dist.kernels.dry_run import num_threads

_LOG = logging.getLogger("cce_dist")
Kernels = dict[Future, str]  # name of each kernel that compiles


class Ahead(contextlib.ExitStack):
    """Compiles what calls launch, in a thread for each core of this rank."""

    def __init__(self) -> None:
        import triton

        super().__init__()
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.threads = ThreadPoolExecutor(num_threads())
        self.callback(self.threads.shutdown, cancel_futures=True)
        self.mode = triton.AsyncCompileMode(self.threads, ignore_errors=True)

    def begin(self, call: Callable[[], Any]) -> Kernels:
        """Make a call without its launches, and begin to compile its kernels. An error here will come again at a launch."""
        kernels: Kernels = {}
        try:
            contextvars.copy_context().run(self._without_launches, call, kernels)
        except Exception as error:
            _LOG.debug("verify does not compile ahead: %r", error)
        return kernels

    def _without_launches(self, call: Callable[[], Any], kernels: Kernels) -> None:
        self.mode.__enter__()  # Leaving the mode would wait for its kernels. It ends with the copied context.
        with launching(partial(self._compile, kernels)), torch.autograd.set_multithreading_enabled(False), _Zeros():
            call()

    def _compile(self, kernels: Kernels, kernel: Any, args: Any, grid: Any, kwargs: dict[str, Any]) -> None:
        compiled = kernel.warmup(*args, grid=(1,), **kwargs)
        if hasattr(compiled, "future"):  # not compiled by an earlier call
            kernels[self.threads.submit(self._load, compiled)] = kernel.__name__

    def _load(self, compiled: Any) -> None:
        """Wait for a kernel and load it onto the device, as its first launch would."""
        with torch.cuda.device(self.device):
            load(compiled.result())


ZEROED = {
    torch.empty: torch.zeros,
    torch.empty_like: torch.zeros_like,
    torch.Tensor.new_empty: torch.Tensor.new_zeros,
}


class _Zeros(TorchFunctionMode):
    """Fills new tensors with zeros, because the host code may use what kernels write as indices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return ZEROED.get(func, func)(*args, **(kwargs or {}))
