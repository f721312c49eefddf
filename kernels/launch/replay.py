"""The same call again, without the code that made it: the host gets out of the way of the device.

A step at a small shape takes the host longer than the device: two thirds of that is Python (slices, checks, records, tensor
descriptors), Triton's own path to a launch, and an allocation for each intermediate. All of it has the same outcome whenever
shapes, strides, dtypes, alignments and options are the same. So a call is made in one of three ways, by its key:

first     ordinarily
second    ordinarily, while a tape notes it (``tape.py``)
later     the tape's steps alone (``steps.py``): each kernel's compiled launcher, with addresses in place of tensors, and each
          torch operator and collective again

A replay takes the tensors where they are, and holds no memory between calls. It decides on no arithmetic: it launches what was
compiled for the recorded call, with the same numbers, so the bits are the same. It can be captured into a CUDA graph by the
user, and several threads and streams may replay the same call side by side.

An error in recording, planning or in what a replay does before its first launch costs a line in the log: the call is made
ordinarily, and so are all of its kind from then on.

``CCE_DIST_REPLAY=0`` turns replays off, ``CCE_DIST_REPLAY=triton`` the short way to a launch as well (``direct.py``). Replays
need an NVIDIA GPU and a Triton whose launcher is known. Without these, and while somebody has hooks on Triton's launches, every
call is ordinary.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cce_dist.kernels.launch import direct
from cce_dist.kernels.launch.direct import NO_CHANGE, current, launches_are_replaced
from cce_dist.kernels.launch.steps import Replay, ReplayPlan
from cce_dist.kernels.launch.tape import Launch, Refused, Tape, add_bounded
from cce_dist.kernels.precision import fp32_precision

_LOG = logging.getLogger("cce_dist")
MOST_PLANS, MOST_SEEN = 64, 256  # of a function: calls that can be replayed; calls that came once
PATIENCE = 4 * MOST_PLANS  # calls that a plan is kept for without being used, if another wants its place
_WARNED = False


@lru_cache(maxsize=1)
def available() -> bool:
    """Whether calls are replayed in this process."""
    return os.environ.get("CCE_DIST_REPLAY", "1") not in ("", "0", "triton") and direct.available()


class NotBegun(Exception):
    """A replay failed before it launched anything."""


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
        self.used: dict[tuple, int] = {}  # number of the last call of each plan
        self.calls = 0
        self.lock = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        more = self.replayable(args[-1])
        if more is None or direct.watched() or launches_are_replaced():
            return self.function(*args)
        key, plan, record, tensors, addresses = None, None, False, [], []
        try:
            tensors, addresses, key = _tensors_and_key(args, more)
            plan, record = self._look_up(key)
        except Exception as error:
            self._give_up(None, error)
        if plan is not None:
            try:
                return plan(tensors, addresses)
            except NotBegun as error:
                self._give_up(key, error.__cause__)
            except Exception as error:
                # What was launched may have written to inputs, or met other ranks: no second attempt.
                self._give_up(key, error)
                raise
        return self._record(args, tensors, key) if record else self.function(*args)

    def _look_up(self, key: tuple) -> tuple[Shared | None, bool]:
        """Return the plan of a kind of call, if there is one, and whether to record the call.

        A kind that comes for the second time is recorded if there is room, or if the plan that was used least recently was of
        no use for ``PATIENCE`` calls. So many kinds by turns do not drive each other's plans out.
        """
        with self.lock:
            self.calls += 1
            if key in self.plans:
                self.plans.move_to_end(key)
                self.used[key] = self.calls
                return self.plans[key], False
            if key not in self.seen:
                add_bounded(self.seen, key, None, MOST_SEEN)
                return None, False
            if len(self.plans) >= MOST_PLANS:
                oldest = next(iter(self.plans))
                if self.calls - self.used[oldest] <= PATIENCE:
                    return None, False
                del self.plans[oldest], self.used[oldest]
            return None, True

    def forget(self) -> None:
        """Forget all calls, as whoever changes what a call does must: a test that replaces a part of it."""
        with self.lock:
            self.plans.clear()
            self.seen.clear()
            self.used.clear()

    def _keep(self, key: tuple, plan: Shared | None) -> None:
        with self.lock:
            self.seen.pop(key, None)
            self.plans[key], self.used[key] = plan, self.calls
            while len(self.plans) > MOST_PLANS:  # several threads recorded
                del self.used[self.plans.popitem(last=False)[0]]

    def _give_up(self, key: tuple | None, error: BaseException | None) -> None:
        """Have calls of a kind made ordinarily, and say so once."""
        global _WARNED
        if key is not None:
            self._keep(key, None)
        _LOG.log(logging.DEBUG if _WARNED else logging.WARNING, "cce_dist does not replay a call: %r", error)
        _WARNED = True

    def _record(self, args: Any, tensors: list[Tensor], key: Any) -> Any:
        with ExitStack() as stack:
            try:
                launches, tape = stack.enter_context(_launches()), Tape(tensors)
                stack.enter_context(tape)
            except Exception as error:
                self._give_up(key, error)
                stack.close()
                return self.function(*args)
            result = self.function(*args)
            tape.returned(result)
        try:
            if launches and len(launches) != sum(isinstance(step, Launch) for step in tape.steps):
                tape.refused = "a kernel was launched that does not show its launches to tapes"
            if tape.refused:
                raise Refused(tape.refused)
            self._keep(key, Shared(ReplayPlan(tape, tensors[0].device)))
        except Refused as reason:
            _LOG.debug("cce_dist does not replay a call: %s", reason)
            self._keep(key, None)
        except Exception as error:
            self._give_up(key, error)
        return result


def _tensors_and_key(args: Sequence[Any], more: tuple) -> tuple[list[Tensor], list[int], tuple]:
    tensors: list[Tensor] = []
    settings = torch.is_inference_mode_enabled(), fp32_precision()
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
    launches: list[Any] = []
    thread, hooks = threading.get_ident(), direct.knobs().runtime.launch_enter_hook

    def launched(metadata: Any) -> None:
        if threading.get_ident() == thread:
            launches.append(metadata)

    hooks.add(launched)
    try:
        yield launches
    finally:
        hooks.remove(launched)


class Shared:
    """A plan that several threads may replay at a time: each call takes a replay that is idle, or a new one."""

    def __init__(self, plan: ReplayPlan) -> None:
        self.plan, self.idle = plan, [Replay(plan)]

    def __call__(self, tensors: list[Tensor], addresses: list[int]) -> Any:
        device = self.plan.device
        try:
            on_device, without_autocast = current(device), _without_autocast(device.type)
            replay = self._idle_one()
        except Exception as error:
            raise NotBegun from error
        try:
            with on_device, without_autocast:
                try:
                    replay.begin(tensors, addresses)
                    stream = _stream(device)
                except Exception as error:
                    raise NotBegun from error
                return replay.run(stream)
        finally:
            replay.end()
            self.idle.append(replay)

    def _idle_one(self) -> Replay:
        try:
            return self.idle.pop()
        except IndexError:
            return Replay(self.plan)


def _without_autocast(device_type: str) -> AbstractContextManager:
    """The tape's operators are those below autocast: it is not to cast anything again."""
    on = torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if on else NO_CHANGE


def _stream(device: torch.device) -> int:
    """Return the handle of the device's current stream."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
