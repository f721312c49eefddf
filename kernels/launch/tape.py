"""What a call did, noted while it did it: the kernels it launched and the torch operators between them, with their tensors.

A tape knows tensors by their place: a number of the storage, and an offset in it. The storages are those of the call's inputs
and those that its operators made. Nothing is noted of views and of uninitialised memory but where they are. ``steps.py`` turns
a tape into steps that need neither the tensors nor the code that made them.

A call that the tape cannot follow is refused, with a reason, and goes on undisturbed: one that reads a tensor nobody gave it,
asks a tensor for its value, or gets inputs that are on several devices or overlap. So is a call whose noting fails.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from cce_dist.kernels.launch.direct import launching

aten = torch.ops.aten
_UNINITIALISED = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}


class Place(NamedTuple):
    """A tensor in a storage.

    Attributes:
        storage: Number of the storage.
        offset: Bytes from the begin of the first tensor that the tape saw in the storage: an input, or an operator's result.
        dtype: Of the tensor.
        size: Likewise.
        stride: In elements.
    """

    storage: int
    offset: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]


class Matrix(NamedTuple):
    """A tensor descriptor without its tensor, and the place of that."""

    descriptor: Any
    place: Place


class Launch(NamedTuple):
    """A kernel's launch.

    Attributes:
        compiled: What Triton compiled for the arguments.
        grid: Three numbers.
        values: All arguments in order; a ``Place`` stands for a tensor, a ``Matrix`` for a descriptor. A record is a tuple.
    """

    compiled: Any
    grid: tuple[int, ...]
    values: list[Any]


class Op(NamedTuple):
    """A torch operator's call.

    Attributes:
        function: The overload.
        args: Places stand for tensors; a tensor is a constant.
        kwargs: Likewise.
        result: Places of its tensors; None where it made none.
    """

    function: torch._ops.OpOverload
    args: Any
    kwargs: dict[str, Any]
    result: Any


class Thing(NamedTuple):
    """An object that is no tensor: what the ``Recorded`` of this number gave."""

    number: int


class Recorded(NamedTuple):
    """A call of a function that is called again as it is, such as a collective.

    Attributes:
        function: It.
        args: Places stand for tensors, things for the objects that earlier such calls gave.
        result: A place if it gave a new tensor, a thing if it gave an object, else None.
    """

    function: Callable[..., Any]
    args: Any
    result: Any


class Refused(Exception):
    """The tape cannot follow the call."""


def mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return the same nest of tuples, lists and dictionaries with ``leaf`` of each value in it."""
    if isinstance(value, Place | Matrix | Thing):
        return leaf(value)
    if isinstance(value, tuple | list):
        inner = [mapped(item, leaf) for item in value]
        if hasattr(value, "_fields"):  # a record that a kernel takes as one argument
            return type(value)(*inner)
        return inner if isinstance(value, list) else tuple(inner)
    if isinstance(value, dict):
        return {name: mapped(item, leaf) for name, item in value.items()}
    return leaf(value)


class Tape(TorchDispatchMode):
    """Notes what is done while it is entered, by this thread.

    Attributes:
        num_inputs: Storages of inputs, which come first.
        sizes: Bytes of each storage, by its number; 0 for inputs.
        firsts: Place of the first tensor that was seen in each storage.
        steps: What was done, in order.
        result: What the call returned, with places for tensors.
        refused: Why the call cannot be followed; empty: it can.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.num_inputs = len(inputs)
        self.sizes: list[int] = []
        self.firsts: list[Place] = []
        self.steps: list[Launch | Op | Recorded] = []
        self.result: Any = None
        self.refused = ""
        self._paused = False
        self._launches = ExitStack()
        self._numbers: dict[int, list[int]] = {}  # by storage; an input's storage may have several inputs in it
        self._spans: list[tuple[int, int]] = []  # of each first tensor: bytes of its storage that it begins and ends at
        self._constants: dict[int, Tensor] = {}  # by storage: numbers that the code made tensors of
        # By identity. One object may come twice, and then has two numbers.
        self._things: dict[int, tuple[Thing, Any]] = {}
        self._num_things = 0
        # A weak reference keeps a storage's identity for it, and not its memory.
        self._storages: list[StorageWeakRef] = []
        if len({tensor.device for tensor in inputs}) > 1:
            self.refused = "the inputs are on several devices"
        for tensor in inputs:
            self._add(tensor, 0)

    def __enter__(self) -> Tape:
        _THREAD.tape = self
        self._launches.enter_context(launching(self._launch_noted))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _THREAD.tape = None
        self._launches.close()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._paused:
            self._note(self._operator, func, args, kwargs or {}, result)
        return result

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Note no operators: what is done belongs to something that is noted as a whole."""
        was, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = was

    def _launch_noted(self, kernel: Any, args: Any, grid: Any, kwargs: dict[str, Any]) -> Any:
        with self.paused():
            compiled = kernel.by_triton(args, grid, kwargs)
        self.launched(kernel, compiled, grid, args, kwargs)
        return compiled

    def launched(self, kernel: Any, compiled: Any, grid: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self._note(self._launch, kernel.arg_names, compiled, grid, args, kwargs)

    def called(self, function: Callable[..., Any], args: Any, result: Any) -> None:
        self._note(self._recorded, function, args, result)

    def returned(self, result: Any) -> None:
        """Note what the call returns: ``result``."""
        self._note(self._returned, result)

    def _returned(self, result: Any) -> None:
        self.result = self._places(result)

    def _places(self, value: Any) -> Any:
        """Return the value with places for its tensors, and with things."""

        def noted(item: Any) -> Any:
            if isinstance(item, Tensor):
                return self._place(item)
            return self._things[id(item)][0] if id(item) in self._things else item

        return mapped(value, noted)

    def _note(self, note: Callable[..., None], *what: Any) -> None:
        if not self.refused:
            try:
                note(*what)
            except Refused as reason:
                self.refused = str(reason)
            except Exception as error:
                self.refused = repr(error)

    def _launch(self, names: Sequence[str], compiled: Any, grid: Any, args: Any, kwargs: dict[str, Any]) -> None:
        from triton.tools.tensor_descriptor import TensorDescriptor

        def noted(value: Any) -> Any:
            if isinstance(value, TensorDescriptor):
                descriptor = copy.copy(value)
                descriptor.base = None
                (place,) = self._places([value.base])
                return Matrix(descriptor, place)
            if isinstance(value, tuple):
                return tuple(map(noted, value))
            return self._place(value) if isinstance(value, Tensor) else value

        values = [*args, *(kwargs[name] for name in names[len(args) :])]
        self.steps.append(Launch(compiled, (*grid, 1, 1)[:3], [noted(value) for value in values]))

    def _operator(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        if func is aten.lift_fresh.default:
            self._constants[args[0].untyped_storage()._cdata] = args[0]
            return
        tensors: list[Tensor] = []
        mapped(result, lambda item: tensors.append(item) if isinstance(item, Tensor) else None)
        if not tensors:
            raise Refused(f"{func} has a result that is no tensor")
        args, kwargs = self._places((args, kwargs))
        new = self._add_new(tensors)
        if func._schema.is_mutable:
            if isinstance(args[0], Tensor):
                raise Refused(f"{func} writes to a constant")
            self.steps.append(Op(func, args, kwargs, None))
        elif new and func.overloadpacket not in _UNINITIALISED:
            self.steps.append(Op(func, args, kwargs, self._places(result)))

    def _recorded(self, function: Callable[..., Any], args: Any, result: Any) -> None:
        places = self._places(args)
        place: Place | Thing | Tensor | None = None
        if isinstance(result, Tensor):
            place = self._place(result) if self._add_new([result]) else None
        elif result is not None:
            place = Thing(self._num_things)
            self._num_things += 1
            self._things[id(result)] = place, result
        self.steps.append(Recorded(function, places, place))

    def _add_new(self, tensors: Sequence[Tensor]) -> bool:
        """Number the storages that have none; return whether there were any."""
        new = [tensor for tensor in tensors if tensor.untyped_storage()._cdata not in self._numbers]
        for tensor in new:
            self._add(tensor, tensor.untyped_storage().nbytes())
        return bool(new)

    def _add(self, tensor: Tensor, size: Any) -> None:
        storage = tensor.untyped_storage()
        self._numbers.setdefault(storage._cdata, []).append(len(self.sizes))
        self._storages.append(StorageWeakRef(storage))
        self._spans.append(_span(tensor))
        self.sizes.append(int(size))
        self.firsts.append(Place(len(self.firsts), 0, tensor.dtype, tuple(tensor.shape), tensor.stride()))

    def _place(self, tensor: Tensor) -> Place | Tensor:
        storage = tensor.untyped_storage()._cdata
        if storage in self._constants and tensor.dim() == 0 and tensor.is_cpu:
            return tensor
        numbers = self._numbers.get(storage)
        if numbers is None:
            raise Refused(f"a tensor of {tuple(tensor.shape)} came from elsewhere")
        begin, end = _span(tensor)
        if len(numbers) > 1:
            # Other calls' inputs lie apart in another way. So the tensor has to be a part of one input alone.
            inside = [n for n in numbers if self._spans[n][0] <= begin and end <= self._spans[n][1]]
            if len({self._spans[n][0] for n in inside}) != 1:
                raise Refused("inputs overlap, or a tensor is no part of one of them")
            numbers = inside
        offset = begin - self._spans[numbers[-1]][0]
        return Place(numbers[-1], offset, tensor.dtype, tuple(tensor.shape), tensor.stride())


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the bytes of its storage that a tensor begins and ends at."""
    begin = int(tensor.storage_offset()) * tensor.itemsize
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.itemsize * (tensor.numel() > 0)


def recorded(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function which a replay is to call, too, with its own tensors and objects in place of those given.

    It returns a tensor, an object that is only given to later such calls, or None.
    """
    tape = _THREAD.tape
    if tape is None:
        return function(*args)
    with tape.paused():
        result = function(*args)
    tape.called(function, args, result)
    return result


class _Thread(threading.local):
    tape: Tape | None = None


_THREAD = _Thread()


def add_bounded(entries: OrderedDict, key: Any, value: Any, most: int) -> None:
    """Add an entry to a dictionary of at most ``most``; the oldest goes."""
    entries[key] = value
    if len(entries) > most:
        entries.popitem(last=False)
