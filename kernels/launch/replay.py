"""The same call again, without the code that made it: the host gets out of the way of the device.

A step at a small shape takes the host longer than the device: two thirds of that is Python (slices, checks, records, tensor
descriptors), Triton's own path to a launch, and an allocation for each intermediate. All of it has the same outcome whenever
shapes, strides, dtypes, alignments and options are the same. So a call is made in one of three ways, by its key:

first     ordinarily
second    ordinarily, while a tape notes it (``tape.py``)
later     the tape's steps alone (``steps.py``): each kernel's compiled launcher, with addresses in place of tensors, and each
          torch operator and collective again; many launches as one where all addresses come again (``graphs.py``)

A replay takes the tensors where they are, and holds no memory between calls. It decides on no arithmetic: it launches what was
compiled for the recorded call, with the same numbers, so the bits are the same. It can be captured into a CUDA graph by the
user, and several threads and streams may replay the same call side by side.

``CCE_DIST_REPLAY=0`` turns replays off, and ``CCE_DIST_REPLAY=launches`` the graphs alone. Replays need a GPU of NVIDIA and a
Triton whose launcher is known; else, and while somebody has hooks on Triton's launches, every call is ordinary.
"""

from __future__ import annotations

import inspect
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cce_dist.kernels.launch.steps import Plan, Replay
from cce_dist.kernels.launch.tape import Launch, Tape, add_bounded
from cce_dist.kernels.precision import fp32_precision

_LOG = logging.getLogger("cce_dist")
MOST_PLANS, MOST_SEEN = 64, 256  # of a function: calls that can be replayed; calls that came once
_NO_CHANGE = nullcontext()


@lru_cache(maxsize=1)
def available() -> bool:
    """Whether calls are replayed in this process; the log says so where Triton's launcher is not the one known here."""
    if os.environ.get("CCE_DIST_REPLAY", "1") in ("", "0") or torch.version.hip is not None:
        return False
    import triton
    from triton import knobs

    if knobs.runtime.interpret or not torch.cuda.is_available():
        return False
    call = "kernel.run(grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, launch_metadata,"
    is_known = call in inspect.getsource(triton.runtime.jit.JITFunction.run)
    if not is_known or not hasattr(getattr(knobs.runtime, "launch_enter_hook", None), "calls"):
        _LOG.warning(
            "cce_dist launches kernels ordinarily: it does not know the launcher of Triton %s", triton.__version__
        )
        return False
    return True


class Replayed:
    """A function of tensors that is replayed where it can be.

    Args:
        function: Takes tensors, lists of tensors or plain values, or None, and last a record of plain values that can be a key.
            It returns a nest of tuples and lists of tensors. What it does follows from the record, from the other plain
            values and from the tensors' shapes, strides, dtypes, devices and alignments to 16 bytes, never from their values.
        replayable: Says of the last argument what else the call follows from, as a part of the key; None: it is not replayed.
    """

    def __init__(self, function: Callable[..., Any], replayable: Callable[[Any], tuple | None]) -> None:
        self.function, self.replayable = function, replayable
        self.plans: OrderedDict[tuple, Shared | None] = OrderedDict()
        self.seen: OrderedDict[tuple, None] = OrderedDict()
        self.lock = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        more = self.replayable(args[-1])
        if more is None:
            return self.function(*args)
        tensors, addresses, key = _tensors_and_key(args, more)
        with self.lock:
            known = key in self.plans
            if known:
                self.plans.move_to_end(key)
            plan = self.plans.get(key)
            record = not known and key in self.seen
            if not known and not record:
                add_bounded(self.seen, key, None, MOST_SEEN)
        if plan is not None and not _watched():
            return plan(tensors, addresses)
        return self._record(args, tensors, key) if record else self.function(*args)

    def forget(self) -> None:
        """Forget all calls, as whoever changes what a call does must: a test that replaces a part of it."""
        with self.lock:
            self.plans.clear()
            self.seen.clear()

    def _record(self, args: Any, tensors: list[Tensor], key: tuple) -> Any:
        with _launches() as launches, Tape(tensors) as tape:
            result = self.function(*args)
            tape.returned(result)
        if launches and len(launches) != sum(isinstance(step, Launch) for step in tape.steps):
            tape.refused = "a kernel was launched that does not show its launches to tapes"
        if tape.refused:
            _LOG.debug("cce_dist does not replay a call: %s", tape.refused)
        plan = None if tape.refused else Shared(Plan(tape, tensors[0].device))
        with self.lock:
            self.seen.pop(key, None)
            add_bounded(self.plans, key, plan, MOST_PLANS)
        return result


def _tensors_and_key(args: Sequence[Any], more: tuple) -> tuple[list[Tensor], list[int], tuple]:
    tensors: list[Tensor] = []
    settings = torch.is_inference_mode_enabled(), fp32_precision(), os.environ.get("CCE_DIST_TILES")
    key: list[Any] = [more, settings]
    addresses: list[int] = []
    for arg in args:
        if type(arg) is list:
            key.append(len(arg))
        for value in arg if type(arg) is list else (arg,):
            if isinstance(value, Tensor):
                tensors.append(value)
                addresses.append(value.data_ptr())
                value = (value.shape, value.stride(), value.dtype, value.device, addresses[-1] & 15 == 0)
            key.append(value)
    if len(set(addresses)) < len(addresses):  # Some are the same tensor.
        key.append(tuple(map(addresses.index, addresses)))
    return tensors, addresses, tuple(key)


@contextmanager
def _launches() -> Iterator[list[Any]]:
    """List the launches of this thread that Triton knows of."""
    from triton import knobs

    launches: list[Any] = []
    thread = threading.get_ident()

    def launched(metadata: Any) -> None:
        if threading.get_ident() == thread:
            launches.append(metadata)

    knobs.runtime.launch_enter_hook.add(launched)
    try:
        yield launches
    finally:
        knobs.runtime.launch_enter_hook.remove(launched)


@lru_cache(maxsize=1)
def _knobs() -> Any:
    from triton import knobs

    return knobs


def _watched() -> bool:
    """Whether somebody has hooks on Triton's launches, which a replay would pass by."""
    return bool(_knobs().runtime.launch_enter_hook.calls or _knobs().runtime.launch_exit_hook.calls)


class Shared:
    """A plan that several threads may replay at a time: each call takes a replay that is idle, or a new one."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.idle = plan, [Replay(plan)]

    def __call__(self, tensors: list[Tensor], addresses: list[int]) -> Any:
        try:
            replay = self.idle.pop()
        except IndexError:
            replay = Replay(self.plan)
        device = self.plan.device
        try:
            with _current(device), _without_autocast(device.type):
                return replay(tensors, addresses, _stream(device))
        finally:
            self.idle.append(replay)


def _current(device: torch.device) -> AbstractContextManager:
    """Make the device the current one; asking first is quicker, and it nearly always is."""
    is_current = device.type != "cuda" or device.index == torch.cuda.current_device()
    return _NO_CHANGE if is_current else torch.cuda.device(device)


def _without_autocast(device_type: str) -> AbstractContextManager:
    """The tape's operators are those below autocast: it is not to cast anything again."""
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else _NO_CHANGE


def _stream(device: torch.device) -> int:
    """Return the handle of the device's current stream."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
