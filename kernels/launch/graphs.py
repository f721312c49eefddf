"""Steps that the device gets as one: a CUDA graph, where their addresses come again.

A launch costs the host 4 to 8 us, and a graph of 60 launches 2.5 (one H200's host, 2026-11). A graph has its addresses for
good; a replay's tensors are where torch's allocator puts them. In a training loop the allocator serves the same requests from
the same few blocks, step after step. So a stretch of steps is launched step by step at addresses that are new, captured as a
graph when the same addresses come for the second time, and launched as that graph from then on.

A graph holds no tensor. It is launched only where this call's inputs, outputs and workspace have its addresses, whoever had
them before. There it does what the steps would do: the same kernels with the same arguments in the same order. A stretch has
``MOST_GRAPHS`` graphs. A further one takes the place of one that was not launched in the last ``PATIENCE`` calls. So a loop
whose addresses never repeat pays for looking alone, and no loop captures at every step. Where a stretch is at new addresses,
its parts that touch no loss are looked up by themselves: a loop that keeps its losses has each of them somewhere else.

The capture is CUDA's own, on a stream that nothing else runs on, and waits for nothing. ``torch.cuda.CUDAGraph`` would take the
device's random generator into the capture, and another thread that draws a number meanwhile would fail. So a stretch has only
launches and operators that draw nothing and allocate nothing, and a capture in which memory was allocated is thrown away. Steps
whose capture fails are launched one by one, as all are while somebody captures the stream of the call.

``CCE_DIST_REPLAY=launches`` turns graphs off.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any

import torch

_LOG = logging.getLogger("cce_dist")
FEWEST_STEPS = 3  # that a graph is worth: it is launched in the time of two
MOST_GRAPHS, MOST_SEEN = 32, 128  # of a stretch: graphs; addresses that came once
MOST_ALIVE = 256  # graphs of the process: one of 60 launches holds 0.1 MiB of the device (H200, CUDA 13.0, 2026-11)
PATIENCE = 256  # calls that a graph is kept for without being launched, if another wants its place
MOST_FAILURES = 16  # of captures of a stretch: another thread that allocates meanwhile spoils one, too


@lru_cache(maxsize=1)
def available() -> bool:
    """Whether this process launches graphs: not if ``CCE_DIST_REPLAY`` says so, nor where allocations cannot be counted."""
    if os.environ.get("CCE_DIST_REPLAY", "1") == "launches" or not torch.cuda.is_available():
        return False
    try:
        return torch.cuda.get_allocator_backend() == "native" and _driver() is not None
    except (OSError, AttributeError):  # no such library, or one that is too old
        return False


class Together:
    """Steps with neither an allocation nor a call of somebody else's function between them.

    Args:
        steps: Each takes the handle of a stream.
        parts: The same steps, some of them together, for addresses that have no graph.
        address: Where a call's storages are, by their number; the steps read it.
        numbers: The storages that the steps touch.
    """

    def __init__(
        self,
        steps: Sequence[Callable[[int], None]],
        parts: Sequence[Callable[[int], None]],
        address: list[int],
        numbers: Sequence[int],
        device: torch.device,
    ) -> None:
        self.steps, self.parts, self.address, self.device = steps, parts, address, device
        self.addresses = itemgetter(*numbers)
        self.graphs: OrderedDict[Any, Graph] = OrderedDict()
        self.seen: OrderedDict[Any, None] = OrderedDict()
        self.calls = self.failures = 0

    def __call__(self, stream: int) -> None:
        key = stream, self.addresses(self.address)
        self.calls += 1
        graph = None
        if self.failures < MOST_FAILURES and not is_captured():
            graph = self.graphs.get(key) or self._captured_at_second_sight(key)
        if graph is not None:
            graph.last_call = self.calls
            if graph.launch(stream):
                return
            self.failures = MOST_FAILURES
        for part in self.parts:
            part(stream)

    def _captured_at_second_sight(self, key: Any) -> Graph | None:
        if key not in self.seen:
            self.seen[key] = None
            if len(self.seen) > MOST_SEEN:
                self.seen.popitem(last=False)
            return None
        if len(_ALIVE) >= MOST_ALIVE:
            return None
        if len(self.graphs) == MOST_GRAPHS:
            oldest = min(self.graphs, key=lambda key: self.graphs[key].last_call)
            if self.calls - self.graphs[oldest].last_call <= PATIENCE:
                return None
            del self.graphs[oldest]
        graph = capture(self.steps, self.device)
        if graph is None:
            self.failures += 1
        else:
            self.graphs[key] = graph
            del self.seen[key]
        return graph


class Graph:
    """Captured work, ready to be launched: a ``CUgraphExec``. CUDA frees it when the launches that are under way have ended."""

    def __init__(self, handle: ctypes.c_void_p) -> None:
        driver, self.last_call = _driver(), 0
        self.handle, self.launch_on = handle, driver.cuGraphLaunch
        weakref.finalize(self, driver.cuGraphExecDestroy, handle).atexit = False
        _ALIVE.add(self)

    def launch(self, stream: int) -> bool:
        """Launch the work on a stream; return whether CUDA took it."""
        return self.launch_on(self.handle, stream) == 0


_ALIVE: weakref.WeakSet[Graph] = weakref.WeakSet()


def is_captured() -> bool:
    """Whether somebody captures the current stream."""
    return torch._C._cuda_isCurrentStreamCapturing()


def capture(steps: Sequence[Callable[[int], None]], device: torch.device) -> Graph | None:
    """Return a graph of what the steps launch at their present addresses; nothing runs. None: it did not come about."""
    try:
        with _CAPTURING:
            before = _num_allocations(device)
            graph = _captured(steps, _side_stream(device))
            if _num_allocations(device) == before:
                return graph
            _LOG.debug("cce_dist threw a capture away: memory was allocated meanwhile")
    except Exception as error:
        _LOG.debug("cce_dist launches one by one what it could not capture: %r", error)
    return None


_CAPTURING = threading.Lock()  # one stream serves all threads


def _captured(steps: Sequence[Callable[[int], None]], side: torch.cuda.Stream) -> Graph:
    driver, stream = _driver(), side.cuda_stream
    graph, handle = ctypes.c_void_p(), ctypes.c_void_p()
    try:
        with torch.cuda.stream(side):
            try:
                # Within, so that an interruption (Ctrl-C) at any moment ends the capture. To end none is an error code alone.
                _check(driver.cuStreamBeginCapture_v2(stream, _THIS_THREAD_ALONE))
                for step in steps:
                    step(stream)
            finally:
                code = driver.cuStreamEndCapture(stream, ctypes.byref(graph))
        _check(code)
        _check(driver.cuGraphInstantiateWithFlags(ctypes.byref(handle), graph, 0))
    finally:
        if graph.value:
            driver.cuGraphDestroy(graph)
    return Graph(handle)


@lru_cache(maxsize=64)
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of our own: those of torch's pool may be at work for somebody else, who would be captured, too."""
    stream = ctypes.c_void_p()
    _check(_driver().cuStreamCreate(ctypes.byref(stream), _APART_FROM_THE_DEFAULT_STREAM))
    return torch.cuda.ExternalStream(stream.value, device=device)


def _num_allocations(device: torch.device) -> int:
    """Return how many tensors have been allocated on a device since the program began, by any thread."""
    return torch.cuda.memory_stats_as_nested_dict(device)["allocation"]["all"]["allocated"]


_THIS_THREAD_ALONE = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: other threads may do what a capture forbids
_APART_FROM_THE_DEFAULT_STREAM = 1  # CU_STREAM_NON_BLOCKING


@lru_cache(maxsize=1)
def _driver() -> Any:
    """CUDA's driver, which torch and Triton have loaded, by the names of the functions that are needed here."""
    driver = ctypes.CDLL("libcuda.so.1")
    pointer, to_pointer = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
    for name, types in {
        "cuStreamCreate": [to_pointer, ctypes.c_uint],
        "cuStreamBeginCapture_v2": [pointer, ctypes.c_int],
        "cuStreamEndCapture": [pointer, to_pointer],
        "cuGraphInstantiateWithFlags": [to_pointer, pointer, ctypes.c_ulonglong],
        "cuGraphDestroy": [pointer],
        "cuGraphLaunch": [pointer, pointer],
        "cuGraphExecDestroy": [pointer],
    }.items():
        getattr(driver, name).argtypes = types
    return driver


def _check(code: int) -> None:
    if code != 0:
        raise RuntimeError(f"CUDA's driver returned error {code}")
