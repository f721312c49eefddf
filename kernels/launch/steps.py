"""A tape made into steps that another call's tensors go through: where each storage lies, and what is done in which order.

A storage of the recorded call is one of four kinds:

input      a tensor that the call is given
made       the result of a collective, or of an operator that writes to no memory that is there: each call has it made again
own        memory that the call returns; it is allocated
planned    an intermediate: at a fixed place in a workspace that all of them share, one allocation a call

The places in the workspace were decided once, from the first and the last step that touches each intermediate. Their tensors
are the same in each call, and operators write into them and into the memory that is returned.

A call allocates before its first step. Where that takes more memory than the recorded call did, intermediates of more than
``LARGE`` bytes are ``own``, too, and the steps are cut into phases. A phase allocates what it is the first to touch, and gives
back what it is the last to touch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence, Set
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cce_dist.kernels.launch.direct import launcher_of
from cce_dist.kernels.launch.tape import Launch, Matrix, Op, Place, Recorded, Refused, Tape, Thing, aten, mapped

LARGE = 1 << 20  # bytes; an allocation of more costs as much time, and is worth giving back early
MOST_BEYOND = 4 << 20  # bytes that a call's peak may be above that of an ordinary one
# Bytes of these that a plan uses, by its own count. The rest is for what the plan cannot count: torch's allocator adds up to
# 1 MiB to a large allocation where it does not split a block, and the memory of a sort is an estimate. A plan that used all
# 4 MiB had peaks of 0.5 and 0.9 MiB more (H200, torch 2.11, 2026-11).
SLACK = MOST_BEYOND // 2
ALIGNMENT = 512  # bytes, as the allocator's: a small tensor is as aligned as it was when the kernels were compiled
MOST_ADDRESSES = 16  # of a matrix, whose tensor maps are kept
WORKSPACE = 0  # the workspace's place among the tensors of a call; storage n of a tape is n + 1
_FACTORY = {"dtype", "layout", "device", "pin_memory", "memory_format"}  # arguments that a result's memory answers


class ReplayPlan:
    """All that is known of a call before its tensors are.

    Attributes:
        steps, result: Of the tape, without its tensors.
        device: Of all tensors.
        offsets: Of the planned storages, in the workspace.
        workspace_bytes: Of all of them together.
        made: Storages that a step makes.
        own: Storages to allocate.
        whole: Place of the tensor that a call has of each storage: what it is given, makes or allocates.
        phases: The steps of each phase, and the storages that it allocates and gives back.
    """

    def __init__(self, tape: Tape, device: torch.device) -> None:
        self.steps, self.result, self.device = tape.steps, tape.result, device
        self.num_storages = len(tape.sizes)
        uses = [_places(step) for step in tape.steps]
        first, last = _first_and_last(uses)
        returned = {place.storage for place in _places(tape.result)}
        for step in tape.steps:  # A collective may be under way until the call ends.
            if isinstance(step, Recorded):
                last.update((place.storage, len(tape.steps)) for place in _places(step.args))
        end = max(len(tape.steps), 1)
        for number in returned:
            first.setdefault(number, 0)
            last[number] = end
        new = {n for n in range(tape.num_inputs, self.num_storages) if n in first}
        self.made = {
            place.storage
            for step in tape.steps
            for place in _places(getattr(step, "result", None))
            if isinstance(step, Recorded) or _into_memory(step, device) is None
        } & new
        lives = {n: (first[n], last[n], tape.sizes[n]) for n in sorted(new)}
        passing = [(number, number, _temporary_bytes(step, device)) for number, step in enumerate(tape.steps)]
        most = SLACK + _most_alive([*lives.values(), *passing], end)
        planned = new - returned - self.made
        self.offsets, self.workspace_bytes = lay_out(planned, tape.sizes, first, last)
        stops = [end]
        aside = sum(tape.sizes[n] for n in new - planned) + max((size for *_, size in passing), default=0)
        if aside + self.workspace_bytes > most:
            # The workspace lives as long as the call. Tensors above ``largest`` bytes leave it, and are allocated in phases.
            alone = passing
            for largest in (LARGE >> halved for halved in range(11)):
                planned = {n for n in planned if tape.sizes[n] <= largest}
                self.offsets, self.workspace_bytes = lay_out(planned, tape.sizes, first, last)
                alone = [*(live for n, live in lives.items() if n not in planned), *passing]
                if _most_alive(alone, end) + self.workspace_bytes <= most:
                    break
            stops = _cut(alone, most - self.workspace_bytes, end)
        self.own = new - planned - self.made
        places = [place for use in (_places(tape.result), *uses) for place in use]
        self.whole = {
            n: _whole(n, tape.sizes[n], places) if n in self.own else place for n, place in enumerate(tape.firsts)
        }
        assert all(_is_dense(self.whole[n]) and _num_bytes(self.whole[n]) == tape.sizes[n] for n in self.own)
        self.phases = [
            Phase(
                slice(start, stop),
                [n for n in sorted(self.own) if start <= first[n] < stop],
                [n for n in sorted(self.own | self.made) if start <= last[n] < stop < end],
            )
            for start, stop in pairwise([0, *stops])
        ]


class Phase(NamedTuple):
    """Steps that nothing is allocated between.

    Attributes:
        steps: Where they are among the plan's.
        allocated: Storages that are allocated before the first of them.
        dropped: Storages that are given back after the last of them; the call's end does that for the last phase.
    """

    steps: slice
    allocated: list[int]
    dropped: list[int]


def _temporary_bytes(step: Any, device: torch.device) -> int:
    """What an operator may allocate while it works, if it is one that does: a sort takes about what it reads and writes."""
    if not isinstance(step, Op) or _launches_alone(step if step.result is None else _into_memory(step, device) or step):
        return 0
    return sum(map(_num_bytes, _places(step)))


def _num_bytes(place: Place) -> int:
    return torch.Size(place.size).numel() * place.dtype.itemsize


def _alive(lives: Iterable[tuple[int, int, int]], start: int, last: int) -> int:
    """Return the bytes of what is alive at some of these steps."""
    return sum(size for begin, end, size in lives if begin <= last and start <= end)


def _most_alive(lives: Sequence[tuple[int, int, int]], num_steps: int) -> int:
    """Return the most bytes that are alive at one step."""
    return max(_alive(lives, step, step) for step in range(num_steps))


def _cut(lives: Sequence[tuple[int, int, int]], most: int, num_steps: int) -> list[int]:
    """Return where phases stop, each as long as ``most`` bytes hold all that is alive at any of its steps."""
    stops, start = [], 0
    for step in range(num_steps):
        if start < step and _alive(lives, start, step) > most:
            stops.append(step)
            start = step
    return [*stops, num_steps]


def _places(value: Any) -> list[Place]:
    found: list[Place] = []

    def look(item: Any) -> None:
        if isinstance(item, Matrix):
            item = item.place
        if isinstance(item, Place):
            found.append(item)

    mapped(value, look)
    return found


def _first_and_last(uses: Sequence[Sequence[Place]]) -> tuple[dict[int, int], dict[int, int]]:
    """Return the first and the last step that touches each storage."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for step, places in enumerate(uses):
        for place in places:
            first.setdefault(place.storage, step)
            last[place.storage] = step
    return first, last


def _whole(number: int, size: int, places: Sequence[Place]) -> Place:
    """Return the tensor to allocate for a storage: one that is all of it, else bytes."""
    for place in places:
        if place.storage == number and place.offset == 0 and _num_bytes(place) == size and _is_dense(place):
            return place
    return Place(number, 0, torch.uint8, (size,), (1,))


def _is_dense(place: Place) -> bool:
    """Whether no two of a tensor's elements are one, and no memory lies between them."""
    width = 1
    if 0 in place.size:
        return True
    for stride, size in sorted(zip(place.stride, place.size, strict=True)):
        if size != 1 and stride != width:
            return False
        width *= size
    return True


def lay_out(
    numbers: Set[int], sizes: Sequence[int], first: dict[int, int], last: dict[int, int]
) -> tuple[dict[int, int], int]:
    """Give each storage a place that no other has while it is used, the largest first. -> offsets, bytes in all."""
    offsets: dict[int, int] = {}
    for number in sorted(numbers & first.keys(), key=lambda number: (-sizes[number], number)):
        beside = sorted(
            (offset, offset + _padded(sizes[other]))
            for other, offset in offsets.items()
            if first[other] <= last[number] and first[number] <= last[other]
        )
        offset = 0
        for begin, end in beside:
            if offset + _padded(sizes[number]) <= begin:
                break
            offset = max(offset, end)
        offsets[number] = offset
    return offsets, max((offset + _padded(sizes[number]) for number, offset in offsets.items()), default=0)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class Written(NamedTuple):
    """An operator's call that writes its result into memory which is there."""

    function: Any
    args: Any
    kwargs: dict[str, Any]


def _into_memory(op: Any, device: torch.device) -> Written | None:
    """Return the call that writes an operator's results to their places, by a kernel of its own; None if there is none."""
    packet = op.function.overloadpacket
    if packet in (aten.zeros, aten.zeros_like, aten.new_zeros):
        return Written(aten.zero_.default, (op.result,), {})
    if packet in (aten.full, aten.full_like, aten.new_full, aten.scalar_tensor):
        return Written(aten.fill_.Scalar, (op.result, op.args[-1]), {})
    if packet in (aten._to_copy, aten.clone):
        return Written(aten.copy_.default, (op.result, op.args[0]), {})
    if op.function == aten.sum.default:  # what it calls
        return Written(aten.sum.IntList_out, (*op.args, []), {**op.kwargs, "out": op.result})
    form = _out_form(op.function, device.type.upper())
    if form is None:
        return None
    results = (op.result,) if isinstance(op.result, Place) else op.result
    kwargs = {name: value for name, value in op.kwargs.items() if name in form.names}
    return Written(form.function, op.args, {**kwargs, **dict(zip(form.outs, results, strict=True))})


class OutForm(NamedTuple):
    """An overload that writes into memory, its arguments for that, and the names of all its arguments."""

    function: Any
    outs: list[str]
    names: frozenset[str]


@lru_cache(maxsize=512)
def _out_form(function: Any, dispatch_key: str) -> OutForm | None:
    """Return the overload that does the same and writes into memory; None if there is none.

    Some overloads of the kind only copy what the function returns; they have no kernel for a device.
    """

    def given(arguments: Any) -> list[tuple[str, str]]:
        return [(a.name, str(a.type)) for a in arguments if not a.is_out and a.name not in _FACTORY]

    packet = function.overloadpacket
    for overload in (getattr(packet, name) for name in packet.overloads()):
        arguments = overload._schema.arguments
        outs = [a.name for a in arguments if a.is_out]
        alike = outs and given(arguments) == given(function._schema.arguments)
        if alike and torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), dispatch_key):
            return OutForm(overload, outs, frozenset(a.name for a in arguments))
    return None


class Replay:
    """A plan's steps with room for one call's tensors: one call at a time goes through it.

    The tensors in the workspace that operators work on live here for good. The workspace is empty between calls.
    """

    def __init__(self, plan: ReplayPlan) -> None:
        self.plan = plan
        # Tensors, addresses and other objects of a call.
        self.held: list[Any] = [None] * (plan.num_storages + 1)
        self.address = [0] * (plan.num_storages + 1)
        self.things: list[Any] = [None] * sum(isinstance(step, Recorded) for step in plan.steps)
        self.planned: dict[Place, Tensor] = {}
        self.workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=plan.device).untyped_storage()
        self.steps: list[Callable[[int], None]] = []
        self.first = partial(_Allocate(self, plan.phases[0].allocated), 0)
        for number, phase in enumerate(plan.phases):
            self.steps += [_Allocate(self, phase.allocated)] if number and phase.allocated else []
            self.steps += [_KINDS[type(step)](self, step) for step in plan.steps[phase.steps]]
            self.steps += [_Drop(self, phase.dropped)] if phase.dropped else []
        self.result = self.bring(mapped(plan.result, self.fixed))
        self.workspace.resize_(0)
        # Where launches alone touch the workspace, any memory will do.
        self.allocate = _allocator(Place(-1, 0, torch.uint8, (plan.workspace_bytes,), (1,)), plan.device)

    def begin(self, tensors: Sequence[Tensor], addresses: Sequence[int]) -> None:
        """Take a call's tensors, and the memory that is needed before anything is launched."""
        held, address = self.held, self.address
        inputs = slice(1, len(tensors) + 1)
        held[inputs], address[inputs] = tensors, addresses
        if self.planned:
            self.workspace.resize_(self.plan.workspace_bytes)
            address[WORKSPACE] = self.workspace.data_ptr()
        elif self.plan.workspace_bytes:
            tensor = held[WORKSPACE] = self.allocate()
            address[WORKSPACE] = tensor.data_ptr()
        self.first()

    def run(self, stream: int) -> Any:
        """Make the call's steps; return its result."""
        for step in self.steps:
            step(stream)
        return self.result()

    def end(self) -> None:
        """Give back what the call had."""
        self.held[:], self.things[:] = [None] * len(self.held), [None] * len(self.things)
        if self.planned:
            self.workspace.resize_(0)

    def source(self, place: Place) -> tuple[int, int]:
        """Return the number and the offset that a place's address is made of."""
        offset = self.plan.offsets.get(place.storage)
        return (place.storage + 1, place.offset) if offset is None else (WORKSPACE, offset + place.offset)

    def fixed(self, value: Any) -> Any:
        """Return the tensor at a planned storage's place, which is the same in each call; other values as they are."""
        if not isinstance(value, Place) or value.storage not in self.plan.offsets:
            return value
        if value not in self.planned:
            tensor = torch.empty(0, dtype=value.dtype, device=self.plan.device)
            offset = self.source(value)[1] // value.dtype.itemsize
            self.planned[value] = tensor.set_(self.workspace, offset, value.size, value.stride)  # pyright: ignore
        return self.planned[value]

    def bring(self, template: Any) -> Callable[[], Any]:
        """Return a function that makes a nest of tuples and lists, with this call's tensors and things in their places."""
        held, things = self.held, self.things
        if isinstance(template, Thing):
            return lambda: things[template.number]
        if not isinstance(template, Place):
            if isinstance(template, tuple | list):
                kind, items = type(template), [self.bring(item) for item in template]
                return lambda: kind([item() for item in items])
            return lambda: template
        number, whole = template.storage + 1, self.plan.whole[template.storage]
        if template == whole:
            return lambda: held[number]
        if template.dtype != whole.dtype:
            if not _is_dense(whole):
                raise Refused("a tensor with gaps is read as another dtype")
            return lambda: _view(held[number].view(template.dtype), template)
        return lambda: _view(held[number], template)


def _view(tensor: Tensor, place: Place) -> Tensor:
    offset = tensor.storage_offset() + place.offset // place.dtype.itemsize
    return tensor.as_strided(place.size, place.stride, offset)


def _allocator(place: Place, device: torch.device) -> Callable[[], Tensor]:
    """Return torch.empty_strided for a place; on a GPU without its way through the dispatcher, as torch.compile's code does."""
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    short = getattr(guards, "_empty_strided_cuda", None) if device.type == "cuda" else None
    if short is not None:
        return partial(short, place.size, place.stride, place.dtype)
    return partial(torch.empty_strided, place.size, place.stride, dtype=place.dtype, device=device)


class _Allocate:
    """Memory for some storages from here on."""

    def __init__(self, replay: Replay, numbers: Sequence[int]) -> None:
        self.held, self.address, plan = replay.held, replay.address, replay.plan
        self.allocators = [(number + 1, _allocator(plan.whole[number], plan.device)) for number in numbers]

    def __call__(self, stream: int) -> None:
        held, address = self.held, self.address
        for number, allocate in self.allocators:
            tensor = held[number] = allocate()
            address[number] = tensor.data_ptr()


class _Drop:
    """The end of some tensors."""

    def __init__(self, replay: Replay, storages: Sequence[int]) -> None:
        self.held, self.numbers = replay.held, [storage + 1 for storage in storages]

    def __call__(self, stream: int) -> None:
        for number in self.numbers:
            self.held[number] = None


class _Base:
    """The base of a tensor descriptor, which Triton asks for its address alone."""

    def __init__(self) -> None:
        self.address = 0

    def data_ptr(self) -> int:
        return self.address


class _Described:
    """A tensor descriptor, of a matrix that is somewhere else in each call, as the arguments that a launcher takes for it.

    Args:
        descriptor: Of the recorded call.
        encode: Makes the launcher's arguments of a descriptor; None: the launcher does.
        width: How many these are.
    """

    def __init__(self, descriptor: Any, encode: Callable[[Any], list[Any]] | None, width: int) -> None:
        self.descriptor, self.base = copy.copy(descriptor), _Base()
        self.descriptor.base = self.base
        self.encode, self.width = encode, width
        self.known: dict[int, list[Any]] = {}

    def at(self, address: int) -> list[Any]:
        self.base.address = address
        if self.encode is None:
            return [self.descriptor]
        if address not in self.known:
            if len(self.known) == MOST_ADDRESSES:
                self.known.clear()
            self.known[address] = self.encode(self.descriptor)
        return self.known[address]


class _Launch:
    """A kernel's launch: addresses go where tensors were."""

    def __init__(self, replay: Replay, launch: Launch) -> None:
        compiled, self.address = launch.compiled, replay.address
        self.run, behind, encoders, in_one = launcher_of(compiled)
        self.args = [*launch.grid, 0, compiled.function, *behind]
        self.values: list[Any] = [] if in_one else self.args
        self.pointers: list[tuple[list[Any], int, int, int]] = []
        self.matrices: list[tuple[slice, _Described, int, int]] = []
        for value in launch.values:
            begin = len(self.values)
            if isinstance(value, Matrix):
                rank = len(value.descriptor.shape)
                encode, width = (None, 1) if encoders is None else (encoders[len(self.matrices)], 1 + 2 * rank)
                described = _Described(value.descriptor, encode, width)
                self.matrices.append((slice(begin, begin + width), described, *replay.source(value.place)))
                self.values += [None] * width
                continue
            self._add(self.values, value, replay)
        if in_one:
            self.args.append(self.values)

    def _add(self, values: list[Any], value: Any, replay: Replay) -> None:
        """Append an argument; a tuple becomes a list, whose addresses can be changed."""
        if isinstance(value, Place):
            self.pointers.append((values, len(values), *replay.source(value)))
        elif isinstance(value, tuple):
            items, value = value, []
            for item in items:
                self._add(value, item, replay)
        values.append(value)

    def __call__(self, stream: int) -> None:
        values, address = self.values, self.address
        self.args[3] = stream
        for within, position, source, offset in self.pointers:
            within[position] = address[source] + offset
        for where, described, source, offset in self.matrices:
            values[where] = described.at(address[source] + offset)
        self.run(*self.args)


def _unwatched(bring: Callable[[], Any]) -> Callable[[], Any]:
    """Return ``bring``, whose tensor has a count of its own of what is written to it."""

    def unwatched() -> Any:
        value = bring()
        return value.data if isinstance(value, Tensor) else value

    return unwatched


def _launches_alone(call: Any) -> bool:
    """Whether an operator's call is known to launch kernels alone: it allocates and draws nothing, and copies from no CPU."""
    constants: list[Tensor] = []
    mapped((call.args, call.kwargs), lambda value: constants.append(value) if isinstance(value, Tensor) else None)
    function = call.function
    if torch.Tag.pointwise in function.tags:  # a constant among its arguments becomes one of its kernel's
        return torch.Tag.nondeterministic_seeded not in function.tags
    return function.overloadpacket in _LAUNCHING and not constants


_LAUNCHING = {
    aten.zero_, aten.fill_, aten.copy_, aten.masked_fill_, aten.where, aten.sum, aten.amax, aten.amin, aten.cat,
    aten.gather, aten.index_select,
}


class _Op:
    """A torch operator's call, into memory that is there or into tensors of its own."""

    def __init__(self, replay: Replay, op: Op) -> None:
        # No reference to the replay, which has this step: a cycle would keep it until the collector comes by.
        self.held, self.address, self.made = replay.held, replay.address, ()
        call: Any = op
        if op.result is not None and all(place.storage in replay.plan.made for place in _places(op.result)):
            self.made = _places(op.result)
        elif op.result is not None:
            call = _into_memory(op, replay.plan.device)
        self.function = call.function._op  # the overload itself, which its Python object calls
        args, self.kwargs = mapped((call.args, call.kwargs), replay.fixed)
        self.args = list(args)
        # Arguments that each call brings; the others stay.
        self.new_args = [(number, replay.bring(arg)) for number, arg in enumerate(args) if _places(arg)]
        if op.function._schema.is_mutable:
            # The call wrote to an input behind autograd's back, or autograd would have counted its writing then.
            self.new_args = [(number, _unwatched(bring)) for number, bring in self.new_args]
        self.new_kwargs = [(name, replay.bring(arg)) for name, arg in self.kwargs.items() if _places(arg)]

    def __call__(self, stream: int) -> None:
        args, kwargs = self.args, self.kwargs
        if self.new_args:
            args = args.copy()
            for number, bring in self.new_args:
                args[number] = bring()
        if self.new_kwargs:
            kwargs = {**kwargs, **{name: bring() for name, bring in self.new_kwargs}}
        result = self.function(*args, **kwargs)
        if self.made:
            for place, tensor in zip(self.made, (result,) if isinstance(result, Tensor) else result, strict=True):
                _keep(self, place, tensor)


def _keep(step: _Op | _Recorded, place: Place, tensor: Tensor) -> None:
    """Take a tensor that a step made."""
    step.held[place.storage + 1] = tensor
    step.address[place.storage + 1] = tensor.data_ptr()


class _Recorded:
    """A call of a function as it is."""

    def __init__(self, replay: Replay, call: Recorded) -> None:
        self.held, self.address, self.things = replay.held, replay.address, replay.things
        self.function, self.result = call.function, call.result
        self.args = replay.bring(mapped(call.args, replay.fixed))

    def __call__(self, stream: int) -> None:
        result = self.function(*self.args())
        if isinstance(self.result, Thing):
            self.things[self.result.number] = result
        elif self.result is not None:
            _keep(self, self.result, result)


_KINDS: dict[type, Callable[[Replay, Any], Callable[[int], None]]] = {Launch: _Launch, Op: _Op, Recorded: _Recorded}
