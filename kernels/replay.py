"""The same call again, without the code that made it: the host gets out of the way of the device.

A step at a small shape takes the host longer than the device: two thirds of that is Python (slices, checks, records, tensor
descriptors), Triton's own path to a launch, and an allocation for each intermediate. All of it has the same outcome whenever
shapes, strides, dtypes, alignments and options are the same. So a call is done three ways, by its key:

first     ordinarily
second    ordinarily, while a tape notes it (``tape.py``)
later     the tape's steps alone: one allocation for all intermediates, outputs, then each kernel's compiled launcher with
          addresses in place of tensors, and each torch operator again

Unlike a CUDA graph, a replay takes the tensors where they are, and holds no memory between calls. An intermediate's place in the
workspace was decided once from the first and the last step that touches it. Torch operators write into the workspace where they
have a form for that, else their results are tensors of their own.

Nothing here decides on arithmetic: a replay launches what was compiled for the recorded call, with the same numbers, so the bits
are the same. ``CCE_DIST_REPLAY=0`` turns replays off. They need a GPU of NVIDIA and a Triton whose launcher is known; else every
call is ordinary.
"""

from __future__ import annotations

import copy
import inspect
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cce_dist.kernels.tape import Again, Launch, Matrix, Op, Place, Tape, Thing, aten, mapped

_NO_CHANGE = nullcontext()
_LOG = logging.getLogger("cce_dist")
MOST_PLANS, MOST_SEEN = 64, 256  # of a function: calls that can be replayed; calls that came once
ALIGNMENT = 512  # bytes, as the allocator's: an intermediate is as aligned as it was when the kernels were compiled
WORKSPACE = 0  # the place of the workspace among the storages of a replay; number n of a tape is n + 1
_FACTORY = {"dtype", "layout", "device", "pin_memory", "memory_format"}  # arguments that a result's memory answers


@lru_cache(maxsize=1)
def available() -> bool:
    """Whether calls are replayed in this process; a line of the log says so where Triton's launcher is not the one known here."""
    if os.environ.get("CCE_DIST_REPLAY", "1") in ("", "0") or torch.version.hip is not None:
        return False
    import triton

    if triton.knobs.runtime.interpret or not torch.cuda.is_available():
        return False
    call = "kernel.run(grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, launch_metadata,"
    is_known = call in inspect.getsource(triton.runtime.jit.JITFunction.run)
    if not is_known or not hasattr(getattr(triton.knobs.runtime, "launch_enter_hook", None), "calls"):
        _LOG.warning("cce_dist launches kernels ordinarily: it does not know the launcher of Triton %s", triton.__version__)
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
        self.plans: OrderedDict[tuple, Plan | None] = OrderedDict()
        self.seen: OrderedDict[tuple, None] = OrderedDict()
        self.lock = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        more = self.replayable(args[-1])
        if more is None:
            return self.function(*args)
        tensors, key = _tensors_and_key(args, more)
        with self.lock:
            known = key in self.plans
            plan = self.plans.get(key)
            if known:
                self.plans.move_to_end(key)
            record = not known and key in self.seen
            if not known and not record:
                _bounded(self.seen, key, None, MOST_SEEN)
        if plan is not None and not _watched():
            return plan(tensors)
        if not record:
            return self.function(*args)
        return self._record(args, tensors, key)

    def _record(self, args: Any, tensors: list[Tensor], key: tuple) -> Any:
        with _launches() as launches, Tape(tensors) as tape:
            result = self.function(*args)
            tape.returned(result)
        plan = None
        if launches and len(launches) != sum(isinstance(step, Launch) for step in tape.steps):
            tape.refused = "a kernel was launched that does not show its launches to tapes"
        if tape.refused:
            _LOG.debug("cce_dist does not replay a call: %s", tape.refused)
        else:
            plan = Plan(tape, len(tensors), tensors[0].device)
        with self.lock:
            self.seen.pop(key, None)
            _bounded(self.plans, key, plan, MOST_PLANS)
        return result


def _bounded(entries: OrderedDict, key: tuple, value: Any, most: int) -> None:
    entries[key] = value
    if len(entries) > most:
        entries.popitem(last=False)


def _tensors_and_key(args: Sequence[Any], more: tuple) -> tuple[list[Tensor], tuple]:
    tensors: list[Tensor] = []
    key: list[Any] = [more, torch.is_inference_mode_enabled(), torch.get_float32_matmul_precision(), os.environ.get("CCE_DIST_TILES")]
    for arg in args:
        if type(arg) is list:
            key.append(len(arg))
        for value in arg if type(arg) is list else (arg,):
            if isinstance(value, Tensor):
                tensors.append(value)
                aligned = value.data_ptr() & 15 == 0
                value = (value.shape, value.stride(), value.dtype, value.device, aligned)
            key.append(value)
    return tensors, tuple(key)


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


def _watched() -> bool:
    """Whether somebody has hooks on Triton's launches, which a replay would pass by."""
    from triton import knobs

    return bool(knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)


class Output(NamedTuple):
    """A storage that a call returns tensors of.

    Attributes:
        number: Of the storage.
        size: Bytes.
        whole: The one tensor that it is; None where there are several, or parts.
    """

    number: int
    size: int
    whole: Place | None


class Plan:
    """What a call did, and all that can be known before its tensors are. Calls of several threads replay it side by side."""

    def __init__(self, tape: Tape, num_inputs: int, device: torch.device) -> None:
        self.steps, self.result, self.device = tape.steps, tape.result, device
        returned = _places(tape.result)
        # An operator makes its result itself where it cannot write into memory that is there.
        steps = [step for step in tape.steps if isinstance(step, Again) or _makes(step, device)]
        self.made = {place.storage for step in steps for place in _places(step.result)}
        numbers = {place.storage for place in returned if place.storage >= num_inputs} - self.made
        self.outputs = [_output(number, tape.sizes[number], returned) for number in sorted(numbers)]
        inner = [n for n in range(num_inputs, len(tape.sizes)) if n not in numbers and n not in self.made]
        self.uses = [_places(step) for step in tape.steps]
        held = {place.storage for step in tape.steps if isinstance(step, Again) for place in _places(step.args)}
        self.offsets, self.workspace_bytes = _lay_out(inner, tape.sizes, self.uses, held)
        self.num_storages = len(tape.sizes)
        self.idle = [Replay(self)]

    def __call__(self, tensors: list[Tensor]) -> Any:
        try:
            replay = self.idle.pop()
        except IndexError:
            replay = Replay(self)
        try:
            with _current(self.device):
                return replay(tensors, _stream(self.device))
        finally:
            self.idle.append(replay)


def _current(device: torch.device) -> AbstractContextManager:
    """Make the device the current one; asking first is quicker, and it nearly always is."""
    is_current = device.type != "cuda" or device.index == torch.cuda.current_device()
    return _NO_CHANGE if is_current else torch.cuda.device(device)


def _stream(device: torch.device) -> int:
    """Return the handle of the device's current stream."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


def _places(value: Any) -> list[Place]:
    found: list[Place] = []

    def look(item: Any) -> None:
        if isinstance(item, Place):
            found.append(item)
        elif isinstance(item, Matrix):
            found.append(item.place)

    mapped(value, look)
    return found


def _output(number: int, size: int, returned: Sequence[Place]) -> Output:
    of_it = {place for place in returned if place.storage == number}
    place = of_it.pop()
    whole = not of_it and place.offset == 0 and _numel(place.size) * place.dtype.itemsize == size
    return Output(number, size, place if whole else None)


def _numel(size: Sequence[int]) -> int:
    return int(torch.Size(size).numel())


def _lay_out(
    numbers: Sequence[int], sizes: Sequence[int], uses: Sequence[Sequence[Place]], held: Set[int]
) -> tuple[dict[int, int], int]:
    """Give each intermediate a place that no other has while it is used, the largest first. -> offsets, bytes in all.

    Args:
        numbers: The intermediates.
        sizes: Bytes of all storages.
        uses: The places that each step touches.
        held: Storages that stay in use from their first step on.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for step, places in enumerate(uses):
        for place in places:
            first.setdefault(place.storage, step)
            last[place.storage] = step
    for number in held:  # A collective may be under way until the call ends.
        last[number] = len(uses)
    offsets: dict[int, int] = {}
    for number in sorted(numbers, key=lambda number: (-sizes[number], number)):
        if number not in first:
            offsets[number] = 0
            continue
        beside = sorted(
            (offsets[other], offsets[other] + _padded(sizes[other]))
            for other in offsets
            if other in first and first[other] <= last[number] and first[number] <= last[other]
        )
        offset = 0
        for begin, end in beside:
            if offset + _padded(sizes[number]) <= begin:
                break
            offset = max(offset, end)
        offsets[number] = offset
    return offsets, max((offset + _padded(sizes[n]) for n, offset in offsets.items() if n in first), default=0)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _into_memory(op: Op, device: torch.device) -> tuple[Any, Any, dict[str, Any]] | None:
    """Return function and arguments that write an operator's result where it is to be; None if there are none."""
    if not isinstance(op.result, Place):
        return None
    packet = op.function.overloadpacket
    if packet in (aten.zeros, aten.zeros_like, aten.new_zeros):
        return aten.zero_.default, (op.result,), {}
    if packet in (aten.full, aten.full_like, aten.new_full, aten.scalar_tensor):
        return aten.fill_.Scalar, (op.result, op.args[-1]), {}
    if packet in (aten._to_copy, aten.clone):
        return aten.copy_.default, (op.result, op.args[0]), {}
    form = _out_form(op.function, device.type)
    if form is None:
        return None
    function, name, taken = form
    return function, op.args, {**{k: v for k, v in op.kwargs.items() if k in taken}, name: op.result}


def _makes(step: Any, device: torch.device) -> bool:
    """Whether a step is an operator that makes its result itself."""
    return isinstance(step, Op) and step.result is not None and _into_memory(step, device) is None


@lru_cache(maxsize=512)
def _out_form(function: Any, device_type: str) -> tuple[Any, str, frozenset[str]] | None:
    """Return the overload that writes one result into memory by a kernel of its own, the argument for that, and the others."""

    def taken(arguments: Any) -> list[tuple[str, str]]:
        return [(a.name, str(a.type)) for a in arguments if not a.is_out and a.name not in _FACTORY]

    packet = function.overloadpacket
    for overload in map(packet.__getattr__, packet.overloads()):
        arguments = overload._schema.arguments
        outs = [a.name for a in arguments if a.is_out]
        key = device_type.upper()
        if len(outs) == 1 and taken(arguments) == taken(function._schema.arguments):
            if torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), key):
                return overload, outs[0], frozenset(a.name for a in arguments)
    return None


class Replay:
    """A plan's steps with room for one call's tensors: one call at a time goes through it.

    The tensors of intermediates live here for good. Their storage is empty between calls.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.storage = torch.empty(0, dtype=torch.uint8, device=plan.device).untyped_storage()
        # Tensors and addresses of what a call brings, by number; the workspace comes first.
        self.held: list[Tensor | None] = [None] * (plan.num_storages + 1)
        self.address = [0] * (plan.num_storages + 1)
        self.fixed: dict[Place, Tensor] = {}
        self.storage.resize_(plan.workspace_bytes)  # for long enough to make tensors of it
        self.things: list[Any] = [None] * sum(isinstance(step, Again) for step in plan.steps)
        self.steps = [_KINDS[type(step)](self, step) for step in plan.steps]
        self.result = _builder(plan.result, self.brought, {number for number, _, whole in plan.outputs if whole is not None})
        self._release_after_last_use()
        self.storage.resize_(0)

    def __call__(self, tensors: list[Tensor], stream: int) -> Any:
        plan, held, address = self.plan, self.held, self.address
        try:
            for number, tensor in enumerate(tensors, 1):
                held[number] = tensor
                address[number] = tensor.data_ptr()
            for number, size, whole in plan.outputs:
                if whole is None:
                    tensor = torch.empty(size, dtype=torch.uint8, device=plan.device)
                else:
                    tensor = torch.empty_strided(whole.size, whole.stride, dtype=whole.dtype, device=plan.device)
                held[number + 1] = tensor
                address[number + 1] = tensor.data_ptr()
            if plan.workspace_bytes:
                self.storage.resize_(plan.workspace_bytes)
                address[WORKSPACE] = self.storage.data_ptr()
            for step in self.steps:
                step(held, address, stream)
            return self.result(held)
        finally:
            held[:], self.things[:] = [None] * len(held), [None] * len(self.things)
            self.storage.resize_(0)

    def source(self, place: Place) -> tuple[int, int]:
        """Return the number and the offset that a place's address is made of."""
        offset = self.plan.offsets.get(place.storage)
        return (place.storage + 1, place.offset) if offset is None else (WORKSPACE, offset + place.offset)

    def fixed_tensor(self, place: Any) -> Any:
        """Return the tensor at an intermediate's place, which is the same in each call; other values as they are."""
        if not isinstance(place, Place) or place.storage not in self.plan.offsets:
            return place
        if place not in self.fixed:
            offset = self.source(place)[1] // place.dtype.itemsize
            tensor = torch.empty(0, dtype=place.dtype, device=self.plan.device)
            self.fixed[place] = tensor.set_(self.storage, offset, place.size, place.stride)
        return self.fixed[place]

    def brought(self, value: Any) -> Any:
        """Return the tensor at a place, or the thing, that this call brought; other values as they are."""
        if not isinstance(value, Place):
            return self.things[value.number] if isinstance(value, Thing) else value
        held = self.held[value.storage + 1]
        assert held is not None
        if held.dtype != value.dtype:
            held = held.view(value.dtype)
        if held.shape == value.size and held.stride() == value.stride and value.offset == 0:
            return held
        itemsize = value.dtype.itemsize
        return held.as_strided(value.size, value.stride, held.storage_offset() + value.offset // itemsize)

    def _release_after_last_use(self) -> None:
        """Have steps drop the results of operators that nobody needs afterwards."""
        kept = {place.storage for place in _places(self.plan.result)}
        for step, places in zip(reversed(self.steps), reversed(self.plan.uses), strict=True):
            numbers = {place.storage for place in places} & self.plan.made - kept
            kept |= numbers
            step.released = [number + 1 for number in numbers]


def _builder(template: Any, brought: Callable[[Any], Any], whole: Set[int]) -> Callable[[list[Any]], Any]:
    """Return a function that makes a call's result from the tensors held; ``mapped`` with all that is known beforehand."""
    if isinstance(template, Place):
        number = template.storage + 1
        return (lambda held: held[number]) if template.storage in whole else (lambda held: brought(template))
    if isinstance(template, tuple | list):
        kind, items = type(template), [_builder(item, brought, whole) for item in template]
        return lambda held: kind([item(held) for item in items])
    return lambda held: template


class _Address:
    """The base of a tensor descriptor, which Triton asks for its address alone."""

    def __init__(self) -> None:
        self.address = 0

    def data_ptr(self) -> int:
        return self.address


class _Launch:
    """A kernel's launch: addresses go where tensors were."""

    def __init__(self, replay: Replay, launch: Launch) -> None:
        compiled = launch.compiled
        self.run = compiled.run
        # Nobody watches launches, or the call would be ordinary: no metadata for hooks, and no hooks.
        self.first = (compiled.function, compiled.packed_metadata, None, None, None)
        self.grid, self.values = launch.grid, list(launch.values)
        self.pointers: list[tuple[int, int, int]] = []
        self.bases: list[tuple[_Address, int, int]] = []
        self.released: list[int] = []
        for position, value in enumerate(launch.values):
            if isinstance(value, Place):
                self.pointers.append((position, *replay.source(value)))
            elif isinstance(value, Matrix):
                descriptor = self.values[position] = copy.copy(value.descriptor)
                descriptor.base = _Address()
                self.bases.append((descriptor.base, *replay.source(value.place)))

    def __call__(self, held: list[Tensor | None], address: list[int], stream: int) -> None:
        values = self.values
        for position, source, offset in self.pointers:
            values[position] = address[source] + offset
        for base, source, offset in self.bases:
            base.address = address[source] + offset
        self.run(*self.grid, stream, *self.first, *values)
        for number in self.released:
            held[number] = None


class _Op:
    """A torch operator's call, into memory that is there or into tensors of its own."""

    def __init__(self, replay: Replay, op: Op) -> None:
        plan, self.brought = replay.plan, replay.brought
        self.function, args, kwargs = op.function, op.args, op.kwargs
        self.made: Sequence[Place] = ()
        self.released: list[int] = []
        if op.result is not None:
            into = _into_memory(op, plan.device)
            if into is not None:
                self.function, args, kwargs = into
            else:
                self.made = _places(op.result)
        self.args, self.kwargs = mapped((args, kwargs), replay.fixed_tensor)
        self.is_fixed = not _places((self.args, self.kwargs))

    def __call__(self, held: list[Tensor | None], address: list[int], stream: int) -> None:
        args, kwargs = self.args, self.kwargs
        if not self.is_fixed:
            args, kwargs = mapped(args, self.brought), mapped(kwargs, self.brought)
        result = self.function(*args, **kwargs)
        if self.made:
            for place, tensor in zip(self.made, (result,) if isinstance(result, Tensor) else result, strict=True):
                held[place.storage + 1] = tensor
                address[place.storage + 1] = tensor.data_ptr()
        for number in self.released:
            held[number] = None


class _Again:
    """A call of a function as it is."""

    def __init__(self, replay: Replay, again: Again) -> None:
        self.function, self.result = again.function, again.result
        self.args = mapped(again.args, replay.fixed_tensor)
        self.brought, self.things = replay.brought, replay.things
        self.released: list[int] = []

    def __call__(self, held: list[Tensor | None], address: list[int], stream: int) -> None:
        result = self.function(*mapped(self.args, self.brought))
        if isinstance(self.result, Thing):
            self.things[self.result.number] = result
        elif self.result is not None:
            held[self.result.storage + 1] = result
            address[self.result.storage + 1] = result.data_ptr()
        for number in self.released:
            held[number] = None


_KINDS: dict[type, Callable[[Replay, Any], Any]] = {Launch: _Launch, Op: _Op, Again: _Again}
