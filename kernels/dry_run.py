"""Run the host code of a call without memory and without launches, to learn what it allocates and which kernels it launches.

Tensors are on torch's device "meta", so they have sizes but no memory, and each launch is replaced by a Python function.

``peak`` returns the most bytes alive, for ``cce-dist plan``, in some 10 to 100 ms. The GPU need not be present.

``compile_ahead`` compiles the kernels of a call in threads before forward begins: some 14, with a filter 45. A kernel that is
missed, or does not compile, is compiled by its launch. ``CCE_DIST_COMPILE_AHEAD=0`` turns compiling ahead off.
"""

from __future__ import annotations

import contextvars
import logging
import os
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cce_dist.kernels import FAR_SOFTCAP, Grads, Losses, Operands, Softmax, Spec, Upstream
from cce_dist.kernels.backends import Backend, named
from cce_dist.kernels.direct import launches_are_replaced, launching, load
from cce_dist.kernels.memory import Groups, Sizes, low_bytes
from cce_dist.kernels.tiles import Planned, planned

_LOG = logging.getLogger("cce_dist")
MOST_THREADS = 16  # a call has no more kernels than this that take long to compile
MOST_KINDS = 64  # most kinds of calls whose kernels are remembered as compiled
_COMPILED = set[tuple]()
_Kept = tuple[Operands, list[Tensor], Softmax, Losses]  # what forward passes to backward, with its saved tensors


class Live(TorchDispatchMode):
    """Counts the bytes of live tensors that were allocated in this mode; views add none.

    Attributes:
        peak: The largest number of bytes since the last ``restart``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}  # by identity, which a weak reference reserves
        self.peak = self.most = 0  # ``most``: bytes that are alive now, if nothing was freed since it was set

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [storage for storage in _storages(out) if storage._cdata not in self.storages]
        if made:
            given = {storage._cdata for storage in _storages((args, kwargs))}  # an output may be a view of an input
            for storage in made:
                size = 0 if storage._cdata in given else storage.nbytes()
                self.storages[storage._cdata] = StorageWeakRef(storage), size
                self.most += size
            if self.most > self.peak:
                self.most = self.current()
                self.peak = max(self.peak, self.most)
        return out

    def current(self) -> int:
        """Return the bytes that are alive now."""
        self.storages = {key: there for key, there in self.storages.items() if not torch.UntypedStorage._expired(key)}
        return sum(size for _, size in self.storages.values())

    def restart(self) -> int:
        """Return the peak, and reset it to the bytes alive now."""
        peak, self.peak = self.peak, self.current()
        return peak


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _storages(value: Any) -> list[torch.UntypedStorage]:
    return [tensor.untyped_storage() for tensor in _tensors(value)]


class Peak(NamedTuple):
    """Most bytes alive beside inputs, outputs and gradients. Each number includes ``saved``."""

    forward: int
    saved: int  # Between the passes: exponentials or lists, and a few numbers for each token
    backward: int
    summing: int  # In backward after d_hidden is complete, while it is summed over ranks


@lru_cache(maxsize=4096)
def peak(backend: str, sizes: Sizes, spec: Spec, device: Planned | None, ready_rows: int = 0) -> Peak:
    """Return the peak of forward and backward in bf16 by "exact" or "filter", on a GPU (None: the device of this process).

    ``ready_rows`` as in ``cce_dist.decide.Way``.
    """
    x, module = _bare_operands(sizes, spec), named(backend)
    with planned(device), launching(lambda *_: None), torch.no_grad(), Live() as live:
        kept = _forward(module, spec, x)
        forward, saved, before = live.restart(), live.current(), [0]
        ready = None if spec.alone else (lambda _: before.append(live.restart()))
        grads = _backward(module, spec, kept, Grads(hidden_ready=ready, ready_rows=ready_rows or None, want_bias=False))
        made = sum(tensor.nbytes for tensor in _tensors(grads))
        return Peak(forward, saved, max(*before, live.peak) - made, live.peak - made)


@lru_cache(maxsize=4096)
def groups_peak(sizes: Sizes, groups: Groups, spec: Spec, device: Planned | None) -> int:
    """Return the peak of a loss that finishes groups in forward: one group's peak plus the tensors of all tokens."""
    group = sizes._replace(num_tokens=min(groups.rows, sizes.num_tokens))
    spec = spec._replace(alone=True)
    x, module = _bare_operands(group, spec), named("exact")
    d_weight, d_hidden = torch.empty_like(x.weight), torch.empty_like(x.hidden)
    low = torch.empty_like(x.weight, dtype=torch.int8) if groups.low else None
    grads = Grads(want_bias=False, weight_out=d_weight, hidden_out=d_hidden, weight_low=low)
    with planned(device), launching(lambda *_: None), torch.no_grad(), Live() as live:
        _backward(module, spec, _forward(module, spec, x), grads)
    of_all = sizes.num_tokens * (8 + 4 + 8)  # ids, losses and the two numbers of the softmax
    return live.peak + of_all + (low_bytes(sizes) if groups.low else 0)


@lru_cache(maxsize=4096)
def anew_peak(sizes: Sizes, spec: Spec, device: Planned | None) -> int:
    """Return the peak of computing d_weight again, for upstream gradients that forward did not expect."""
    spec = spec._replace(want=spec.want._replace(grad=False))
    x, module = _bare_operands(sizes, spec), named("exact")
    d_weight = torch.empty_like(x.weight)
    softmax = Softmax(*(torch.empty(sizes.num_tokens, device="meta") for _ in range(2)))
    with planned(device), launching(lambda *_: None), torch.no_grad(), Live() as live:
        kept = x, module.nothing_saved(x), softmax, Losses(*(softmax.max,) * 3)
        _backward(module, spec, kept, Grads(False, True, False, d_weight, often_empty=True))
    return live.peak


def _bare_operands(sizes: Sizes, spec: Spec) -> Operands:
    """Return bf16 operands on "meta". ``ids`` holds labels, as ``_forward`` expects."""
    shapes = (sizes.num_tokens, sizes.hidden_size), (sizes.num_columns, sizes.hidden_size)
    hidden, weight = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    labels = torch.empty(sizes.num_tokens, dtype=torch.int64, device="meta")
    return Operands.of(hidden, weight, labels, spec.logits)


def _forward(backend: Backend, spec: Spec, x: Operands, num_ranks: int = 1) -> _Kept:
    """Run the forward pass of ``op.py`` without collectives. ``x.ids`` holds labels, which become ids here."""
    ids, order = backend.ordered_ids(x.ids, spec.ignore_index, spec.vocab_size)
    x = x._replace(ids=ids, order=order)
    if num_ranks == 1:
        losses, softmax, _, saved = backend.losses_alone(x, spec)
    else:
        stats_KN, saved = backend.statistics(x, lambda stats_3N: stats_3N[None], spec)
        losses, softmax = backend.token_losses(stats_KN[None], x, spec)
    return x, saved, softmax, losses


def _backward(backend: Backend, spec: Spec, kept: _Kept, grads: Grads) -> Any:
    """Run the backward pass of ``op.py`` on one rank."""
    x, saved, softmax, losses = kept
    # Gradients have the sizes and dtypes of the losses.
    upstream = Upstream(*losses)._replace(nll=losses.nll if losses.mean is None else None, lse=None, target=None)
    return backend.gradients(x, softmax, upstream, saved, grads, spec)


def compile_ahead(backend: Backend, spec: Spec, x: Operands, weight_out: Tensor | None, num_ranks: int = 1) -> None:
    """Compile the kernels of a call's forward and backward in parallel, unless a similar call came before.

    ``x.ids`` holds labels. Under sequence parallelism ``x.hidden`` is a slice.
    """
    if backend is named("dense"):
        return
    # Dispatch modes must not see the dry run's operators, and nothing can be compiled while a graph is captured.
    if not spec.want.grad or not x.weight.is_cuda or not compiles_ahead() or torch._C._len_torch_dispatch_stack():
        return
    tensors = tuple((t.shape, t.dtype) for t in (x.weight, *x.head.tensors.values(), weight_out) if t is not None)
    options = _kind_of_task(spec)
    call = id(backend), x.weight.device, options, x.num_tokens.bit_length(), tensors, num_ranks == 1
    if call in _COMPILED or spec.several or spec.factors or spec.want.top_k or torch.cuda.is_current_stream_capturing():
        return
    if len(_COMPILED) == MOST_KINDS:
        _COMPILED.clear()
    _COMPILED.add(call)
    if launches_are_replaced():  # whoever replaces them compiles the kernels
        return
    try:
        # In a copied context, because Triton does not leave AsyncCompileMode if a wait is interrupted.
        contextvars.copy_context().run(_compile, backend, spec, x, weight_out, num_ranks)
    except Exception as error:  # the call itself will raise it
        _LOG.debug("cce_dist does not compile ahead: %r", error)


@lru_cache(maxsize=MOST_KINDS)
def _kind_of_task(spec: Spec) -> Any:
    return _kind(spec._replace(workspace_bytes=spec.workspace_bytes.bit_length()))


def _kind(value: Any) -> Any:
    """Return the options with floats replaced by what kernels are compiled for: above 0, 1, a far softcap."""
    if isinstance(value, tuple):
        return tuple(map(_kind, value))
    return (value > 0, value == 1, value > FAR_SOFTCAP) if isinstance(value, float) else value


def _compile(backend: Backend, spec: Spec, x: Operands, weight_out: Tensor | None, num_ranks: int) -> None:
    import triton

    device, compiling = torch.device("cuda", torch.cuda.current_device()), []

    def warm_up(kernel: Any, args: Any, grid: Any, kwargs: dict[str, Any]) -> None:
        compiling.append(kernel.warmup(*args, grid=(1,), **kwargs))

    def load_now(kernel: Any) -> None:
        """Have Triton build the kernel's launcher in C now."""
        with torch.cuda.device(device):
            load(kernel.result() if hasattr(kernel, "result") else kernel)

    with ThreadPoolExecutor(num_threads(), thread_name_prefix="cce_dist-compile") as threads:
        with triton.AsyncCompileMode(threads, ignore_errors=True), torch.no_grad(), launching(warm_up):
            hidden = x.hidden.new_empty(x.num_tokens, x.hidden.shape[1], device="meta")
            head = x.head._replace(**{name: _bare(tensor) for name, tensor in x.head.tensors.items()})
            x = x._replace(hidden=hidden, weight=_bare(x.weight), head=head, ids=_bare(x.ids))
            out = None if weight_out is None else _bare(weight_out)
            kept = _forward(backend, spec, x, num_ranks)
            _backward(backend, spec, kept, Grads(True, True, x.head.bias is not None, out))
        wait([threads.submit(load_now, kernel) for kernel in compiling])


def _bare(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta")


@lru_cache(maxsize=1)
def num_threads() -> int:
    """Return the number of compiling threads: this process's cores, divided among the ranks of its host."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1)
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // ranks))


@lru_cache(maxsize=1)
def compiles_ahead() -> bool:
    """Return whether this process compiles ahead. Triton compiles in threads from 3.6 on."""
    import triton

    off = os.environ.get("CCE_DIST_COMPILE_AHEAD", "1") in ("", "0")
    return not off and num_threads() > 1 and hasattr(triton, "AsyncCompileMode")
