"""A function of the host as a list of launches, worked out once for each kind of arguments.

What a pass over the vocabulary allocates and launches depends on sizes, dtypes and options alone. On a kind's fourth call, the
code runs once on "meta" tensors, without launches, as in ``dry_run``. The result is a ``Pass``: launches with
compiled kernels, grids and constants, and for each tensor its place: an argument, a result, or an offset into one workspace.
Later calls of the kind allocate results and workspace, and launch, which takes the host a third to half of the time.

A kind is shapes, strides and dtypes of tensors, plain values, options, the device, fp32's precision, and whether other ranks
exist. The code may depend on nothing else. Functions of torch between launches, such as ``zero_``, are steps, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import count
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.tools.tensor_descriptor import TensorDescriptor

from cce_dist.kernels.direct import Kernel, Known, is_wanted, is_watched, launches_are_replaced, launching
from cce_dist.kernels.tiles import beside_collectives, fp32_precision

_LOG = logging.getLogger("cce_dist")
CALLS = 3  # that run as written before a kind gets a ``Pass``
ALIGNED = 256  # bytes; offsets into the workspace are multiples
MORE_MEMORY = 8 << 20  # most bytes that a ``Pass`` may take beyond the code that it stands for
_EMPTY = {
    torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default, torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
}  # fmt: skip
# Takes a quarter of torch.empty's time
_EMPTY_CUDA = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


class Place(NamedTuple):
    """A tensor: its slot (``Pass``), byte offset in the slot, shape, strides and dtype."""

    slot: int
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_whole: bool = False  # It is exactly the slot's tensor

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def tensor(self, slots: Sequence[Tensor]) -> Tensor:
        of = slots[self.slot]
        if self.is_whole:
            return of
        first = (of.storage_offset() * of.itemsize + self.offset) // self.dtype.itemsize
        empty = torch.empty(0, dtype=self.dtype, device=of.device)
        return empty.set_(of.untyped_storage(), first, self.shape, self.stride)


class Matrix(NamedTuple):
    """A matrix that a kernel takes as a tensor descriptor of blocks."""

    place: Place
    block: list[int]

    def described(self, base: Any) -> TensorDescriptor:
        return TensorDescriptor(base, list(self.place.shape), list(self.place.stride), self.block)


def _filled(value: Any, slots: Sequence[Tensor]) -> Any:
    """Return a value with tensors in their places."""
    of = type(value)
    if of is Place:
        return value.tensor(slots)
    if of is Matrix:
        return value.described(value.place.tensor(slots))
    return _each(lambda item: _filled(item, slots), value)


def _each(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to the items of a tuple, record or list. Return any other value as it is."""
    if not isinstance(value, (tuple, list)):
        return value
    items = [function(item) for item in value]
    return value._make(items) if hasattr(value, "_make") else type(value)(items)


class _Launch:
    """A kernel's launch. ``args`` has a ``Place`` or a ``Matrix`` for each tensor."""

    def __init__(self, kernel: Kernel, args: tuple[Any, ...], grid: Sequence[int], options: dict[str, Any]) -> None:
        self.kernel, self.args, self.options = kernel, args, options
        self.grid = (*grid, 1, 1)[:3]
        self.known: Known | None = None

    def __call__(self, slots: list[Tensor], addresses: list[int], stream: int, _: Any) -> None:
        if self.known is None or self.kernel.jitted.pre_run_hooks:
            self._as_written(slots)
            return
        values = [*self.args]
        for at, slot, offset in self.pointers:
            values[at] = addresses[slot] + offset
        for at, items in self.records:
            values[at] = tuple([
                addresses[item[0]] + item[1] if type(item) is Place else item
                for item in items
            ])
        self.known.launch(self.grid, stream, values)

    def _as_written(self, slots: list[Tensor]) -> None:
        """Launch tensors, and keep how to launch addresses."""
        args = _filled(self.args, slots)
        known = self.kernel[self.grid](*args, **self.options)
        if known is None or any(isinstance(item, tuple) for arg in args if isinstance(arg, tuple) for item in arg):
            return
        places = [(at, arg.place if type(arg) is Matrix else arg) for at, arg in enumerate(self.args)]
        self.pointers = [(at, place.slot, place.offset) for at, place in places if type(place) is Place]
        self.records = [
            (at, record)
            for at, record in places
            if isinstance(record, tuple) and type(record) is not Place
        ]
        encoders = [(at, _encoder(self.args[at], encode)) for at, encode in known.encoders]
        self.known = known._replace(encoders=encoders)


def _encoder(matrix: Matrix, encode: Callable[[TensorDescriptor], list[Any]]) -> Callable[[int], list[Any]]:
    """Return a function that turns an address into a descriptor's code."""

    def code(address: int) -> list[Any]:
        return encode(matrix.described(SimpleNamespace(data_ptr=lambda: address, dtype=matrix.place.dtype)))

    return lru_cache(maxsize=64)(code)


class _Call(NamedTuple):
    """A call of a function of torch, or of a function among the arguments. What it returns gets a slot of its own."""

    function: Callable[..., Any] | int  # or its number among the arguments that are functions
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    returns: bool

    def __call__(self, slots: list[Tensor], addresses: list[int], _: int, given: list[Callable[..., Any]]) -> None:
        args = _filled(self.args, slots)
        if isinstance(self.function, int):
            given[self.function](*args)
            return
        # As kernels do, write past autograd, which would refuse a saved tensor whose version has changed.
        args = [value.data if isinstance(value, Tensor) else value for value in args]
        found = self.function(*args, **self.kwargs)
        if self.returns:
            slots.append(found)
            addresses.append(found.data_ptr())


class Pass(NamedTuple):
    """A function's steps.

    Slots hold its tensor arguments, then its new results, the workspace, and what calls of functions return.
    """

    device: torch.device
    made: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]  # New results, and the workspace in bytes
    steps: list[Callable[..., None]]
    results: Any  # With a place for each tensor

    def run(self, tensors: list[Tensor], addresses: list[int], given: list[Callable[..., Any]]) -> Any:
        device, slots = self.device, tensors
        if device.type == "cuda" and _EMPTY_CUDA is not None:
            made = [_EMPTY_CUDA(*how) for how in self.made]
        else:
            made = [torch.empty_strided(size, stride, dtype=dtype, device=device) for size, stride, dtype in self.made]
        slots += made
        addresses += [tensor.data_ptr() for tensor in made]
        stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
        for step in self.steps:
            step(slots, addresses, stream, given)
        return _filled(self.results, slots)


class _Buffer(NamedTuple):
    tensor: Place  # The allocated tensor
    beside: list[int]  # Earlier buffers alive at its allocation
    storage: StorageWeakRef


class _Planner(TorchDispatchMode):
    """Lists the steps of a function that runs on "meta" tensors, and what it allocates."""

    def __init__(self, device: torch.device, arguments: Sequence[Tensor]) -> None:
        super().__init__()
        self.device, self.steps, self.num_arguments = device, list[Any](), len(arguments)
        self.buffers = list[_Buffer]()
        self.numbers = dict[int, int]()  # Number of a buffer, by storage
        self.returned = list[int]()  # Buffers that calls of functions return
        for tensor in arguments:
            self._add(tensor)

    def _is_new(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata not in self.numbers

    def _add(self, tensor: Tensor) -> None:
        storage, number = tensor.untyped_storage(), len(self.buffers)
        beside = [other for other, buffer in enumerate(self.buffers) if not buffer.storage.expired()]
        place = Place(number, 0, tensor.shape, tensor.stride(), tensor.dtype)
        self.buffers.append(_Buffer(place, beside, StorageWeakRef(storage)))
        self.numbers[storage._cdata] = number  # which the weak reference reserves

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in _EMPTY:
            self._add(out)
        elif func._schema.is_mutable or any(map(self._is_new, _tensors(out))):
            if "device" in kwargs:
                kwargs = kwargs | {"device": self.device}
            self._call(func, args, kwargs, out)
        return out

    def _call(self, function: Callable[..., Any] | int, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        returns = any(map(self._is_new, _tensors(out)))
        is_simple = isinstance(out, Tensor) or not returns
        if _tensors(kwargs) or not is_simple:
            raise NotImplementedError(f"{function} as a step")
        self.steps.append(_Call(function, self.placed(args), kwargs, returns))
        if returns:
            self.returned.append(len(self.buffers))
            self._add(out)

    def launch(self, kernel: Kernel, args: tuple[Any, ...], grid: Sequence[int], options: dict[str, Any]) -> None:
        self.steps.append(_Launch(kernel, self.placed(args), grid, options))

    def call(self, number: int, *args: Any) -> None:
        self._call(number, args, {}, None)

    def placed(self, value: Any) -> Any:
        """Return a value with a place for each tensor, whose slot is the number of its buffer."""
        if isinstance(value, Tensor):
            if self._is_new(value):
                if value.numel():
                    raise NotImplementedError("a tensor that is no argument")
                self._add(value)
            number = self.numbers[value.untyped_storage()._cdata]
            offset = value.storage_offset() * value.itemsize
            return Place(number, offset, value.shape, value.stride(), value.dtype)
        if isinstance(value, TensorDescriptor):
            return Matrix(self.placed(value.base), value.block_shape)
        return _each(self.placed, value)

    def finished(self, results: Any) -> Pass:
        results = self.placed(results)
        tensors = [buffer.tensor for buffer in self.buffers]
        own = [n for n in range(self.num_arguments, len(tensors)) if n not in self.returned]
        leaves = tree_leaves(results, is_leaf=lambda value: type(value) is Place)
        returned = {leaf.slot for leaf in leaves if leaf is not None}
        made = [number for number in own if number in returned]
        offsets, size = self._fitted([number for number in own if number not in made])
        alive = [
            sum(tensors[n].num_bytes for n in (number, *self.buffers[number].beside) if n >= self.num_arguments)
            for number in range(self.num_arguments, len(tensors))
        ]
        of_results = sum(tensors[number].num_bytes for number in (*made, *self.returned))
        if size + of_results > max(alive, default=0) + MORE_MEMORY:
            raise NotImplementedError(f"a workspace of {size:,} bytes in one piece")
        order = [*range(self.num_arguments), *made]
        slots = {number: (slot, 0) for slot, number in enumerate(order)}
        slots |= {number: (len(order), offset) for number, offset in offsets.items()}
        slots |= {number: (len(order) + 1 + i, 0) for i, number in enumerate(self.returned)}

        def moved(value: Any) -> Any:
            if type(value) is not Place:
                return _each(moved, value)
            slot, offset = slots[value.slot]
            is_whole = value.slot not in offsets and value == tensors[value.slot]
            return value._replace(slot=slot, offset=offset + value.offset, is_whole=is_whole)

        for at, step in enumerate(self.steps):
            if isinstance(step, _Launch):
                step.args = moved(step.args)
            else:
                self.steps[at] = step._replace(args=moved(step.args))
        new = [(tuple(tensors[n].shape), tensors[n].stride, tensors[n].dtype) for n in made]
        new.append(((size,), (1,), torch.uint8))
        return Pass(self.device, new, self.steps, moved(results))

    def _fitted(self, inner: list[int]) -> tuple[dict[int, int], int]:
        """Return offsets of buffers in one workspace, and its size. Only buffers that are not alive together overlap."""
        offsets, size = dict[int, int](), 0
        num_bytes = {number: _rounded(self.buffers[number].tensor.num_bytes) for number in inner}
        # The largest first: small ones fit between them.
        for number in sorted(inner, key=lambda number: -num_bytes[number]):
            first, beside = 0, self.buffers[number].beside
            for other in sorted(offsets, key=lambda other: offsets[other]):
                if other not in beside and number not in self.buffers[other].beside:
                    continue
                if first + num_bytes[number] <= offsets[other]:
                    break
                first = max(first, offsets[other] + num_bytes[other])
            offsets[number], size = first, max(size, first + num_bytes[number])
        return offsets, size


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNED) * ALIGNED


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def planned(function: Callable[..., Any], args: tuple[Any, ...], options: Any, tensors: list[Tensor]) -> Pass:
    """Return the pass of a function for arguments of this kind."""
    meta = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in tensors]
    planner, left, numbers = _Planner(tensors[0].device, meta), iter(meta), count()

    def stand_in(value: Any) -> Any:
        if isinstance(value, Tensor):
            return next(left)
        is_function = callable(value) and not isinstance(value, tuple)
        return partial(planner.call, next(numbers)) if is_function else _each(stand_in, value)

    args = _each(stand_in, args)
    with torch.no_grad(), launching(planner.launch), planner:
        return planner.finished(function(*args, options))


@lru_cache(maxsize=1024)
def _known(kind: tuple[Any, ...]) -> Any:
    return SimpleNamespace(calls=0, found=None)  # its ``Pass``, or None: its calls run as written


def run(function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function(*args)``, by its ``Pass`` if these arguments' kind has one.

    The last argument has options, which are hashable. The other arguments are tensors, plain values, functions, and records or
    lists of them. If the code uses what a function among the arguments returns, the call runs as written.
    """
    *args, options = args
    key: list[Any] = [function, options]
    tensors, addresses, given = [], [], []
    is_plain = is_wanted() and not is_watched() and not launches_are_replaced()
    if not is_plain or torch._C._len_torch_dispatch_stack():
        return function(*args, options)
    device = _facts(args, key, tensors, addresses, given) and tensors[0].device
    if not device or (device.type == "cuda" and device.index != torch._C._cuda_getDevice()):
        return function(*args, options)
    precision = fp32_precision() if tensors[0].dtype == torch.float32 else None
    known = _known((*key, device, beside_collectives(), precision))
    known.calls += 1
    if known.calls == CALLS + 1:
        try:
            known.found = planned(function, tuple(args), options, tensors)
        except Exception as reason:  # the code itself needs no ``Pass``
            _LOG.debug("cce_dist runs %s as written: %r", function.__qualname__, reason)
    return function(*args, options) if known.found is None else known.found.run(tensors, addresses, given)


def _facts(
    values: Any, key: list[Any], tensors: list[Tensor], addresses: list[int], given: list[Callable[..., Any]]
) -> bool:
    """Append the kind of values to ``key``, and their tensors and functions. Return whether tensors are plain and aligned."""
    for value in values:
        of = type(value)
        if of is Tensor or of is Parameter:
            address = value.data_ptr()
            if address & 15:
                return False
            tensors.append(value)
            addresses.append(address)
            key.append((value.shape, value.stride(), value.dtype))
        elif value is None or of is bool or of is int or of is float:
            key.append(value)
        elif isinstance(value, (tuple, list)):
            key.append((of, len(value)))
            if not _facts(value, key, tensors, addresses, given):
                return False
        elif isinstance(value, Tensor):
            return False
        elif callable(value):
            given.append(value)
            key.append("a function")
        else:
            key.append(value)
    return True
