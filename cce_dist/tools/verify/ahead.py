"""Kernels of the next cases compile, in threads, while the present case runs.

A cold run of the table compiles more than a hundred kernels, and launches compile them one after another. So each call is first
gone through without its launches: the host code runs as it is, on tensors of zeros where kernels would have written, and each
launch only asks Triton for its kernel. What a call launches follows from its sizes and options, never from values.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from cce_dist.kernels import dry_run
from cce_dist.kernels.launch import direct
from cce_dist.kernels.launch.direct import launching

_LOG = logging.getLogger("cce_dist")


class Ahead(contextlib.ExitStack):
    """Compiles what calls launch, in a thread for each core of this rank. Meanwhile no call compiles ahead by itself."""

    def __init__(self) -> None:
        import triton

        super().__init__()
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.threads = ThreadPoolExecutor(dry_run.num_threads())
        self.callback(self.threads.shutdown, cancel_futures=True)
        self.mode = triton.AsyncCompileMode(self.threads, ignore_errors=True)
        self.enter_context(mock.patch.object(dry_run, "compiles_ahead", lambda: False))

    def begin(self, call: Callable[[], Any]) -> dict[Future, str]:
        """Go through a call and begin to compile its kernels. Returns their names; what fails here fails again at a launch."""
        kernels: dict[Future, str] = {}
        try:
            contextvars.copy_context().run(self._go_through, call, kernels)
        except Exception as error:
            _LOG.debug("verify does not compile ahead: %r", error)
        return kernels

    def _go_through(self, call: Callable[[], Any], kernels: dict[Future, str]) -> None:
        self.mode.__enter__()  # Leaving it would wait for its kernels; this context is left instead.
        with (
            launching(partial(self._warm_up, kernels)),
            mock.patch.object(direct, "watched", lambda: True),  # nothing is recorded
            torch.autograd.set_multithreading_enabled(False),
            _Zeros(),
        ):
            call()

    def _warm_up(self, kernels: dict[Future, str], kernel: Any, args: Any, grid: Any, kwargs: dict[str, Any]) -> None:
        compiled = kernel.warmup(*args, grid=(1,), **kwargs)
        if hasattr(compiled, "future"):  # not compiled by an earlier call
            kernels[self.threads.submit(self._load, compiled)] = kernel.__name__

    def _load(self, compiled: Any) -> None:
        """Wait for a kernel and load it onto the device, as its first launch would."""
        with torch.cuda.device(self.device):
            _ = compiled.result().run


ZEROED = {
    torch.empty: torch.zeros,
    torch.empty_like: torch.zeros_like,
    torch.Tensor.new_empty: torch.Tensor.new_zeros,
}


class _Zeros(TorchFunctionMode):
    """Fills new tensors with zeros, which may be used as indices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return ZEROED.get(func, func)(*args, **(kwargs or {}))
