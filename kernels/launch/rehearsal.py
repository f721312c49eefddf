"""A call rehearsed: its kernels compile side by side, and a first call takes as long as the slowest, not as all of them.

A first loss and gradient compiles some 14 kernels, with a filter 45, each at its first launch. So a call of a new kind is
rehearsed before forward begins: the host code runs once through forward and backward on tensors without memory (torch's
device "meta"), and each launch only asks Triton for its kernel. ``triton.AsyncCompileMode`` compiles in threads: its passes
and its assembler run without Python's lock. The call waits for all of them.

A rehearsal decides on nothing: a kernel that it missed is compiled by its launch, which also tells what does not compile.
``CCE_DIST_COMPILE_AHEAD=0`` turns rehearsals off.
"""

from __future__ import annotations

import contextvars
import logging
import os
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cce_dist.kernels import FAR_SOFTCAP, Grads, Operands, Softmax, Spec
from cce_dist.kernels.backends import Backend
from cce_dist.kernels.launch.tape import add_bounded, launching

_LOG = logging.getLogger("cce_dist")
MOST_THREADS = 16  # no more kernels than that take long
MOST_KINDS = 64  # of calls that are remembered
_REHEARSED: OrderedDict[tuple, None] = OrderedDict()


def rehearse(backend: Backend, spec: Spec, x: Operands, weight_out: Tensor | None) -> None:
    """Compile the kernels of a call side by side, those of its backward too, unless one of its kind has come before.

    Args:
        backend: The one that the call has.
        spec: Its options.
        x: Its operands; the labels in place of their ids. Under sequence parallelism hidden states are a slice.
        weight_out: As in ``Grads``.
    """
    # Whoever looks at operators must not see a rehearsal, and a graph's capture allows no compiling.
    if not spec.want.grad or not x.weight.is_cuda or not available() or torch._C._len_torch_dispatch_stack():
        return
    if torch.cuda.is_current_stream_capturing() or spec.several or spec.factors or spec.want.top_k:
        return
    tensors = tuple((t.shape, t.dtype) for t in (x.weight, *x.head.tensors.values(), weight_out) if t is not None)
    options = _kind(spec._replace(workspace_bytes=spec.workspace_bytes.bit_length()))
    call = id(backend), x.weight.device, options, x.num_tokens.bit_length(), tensors
    if call in _REHEARSED:
        return
    add_bounded(_REHEARSED, call, None, MOST_KINDS)
    try:
        # In a context of its own: Triton forgets to leave its mode where a wait is interrupted.
        contextvars.copy_context().run(_compile, backend, spec, x, weight_out)
    except Exception as error:  # the call itself tells what is wrong with it
        _LOG.debug("cce_dist does not compile ahead: %r", error)


def _kind(value: Any) -> Any:
    """What kernels compile for, of options: of a number whether it is 0 or 1, which turn a factor off, or a far softcap."""
    if isinstance(value, tuple):
        return tuple(map(_kind, value))
    return (value > 0, value == 1, value > FAR_SOFTCAP) if isinstance(value, float) else value


def _compile(backend: Backend, spec: Spec, x: Operands, weight_out: Tensor | None) -> None:
    """Compile what a call launches."""
    import triton

    device, compiling = torch.device("cuda", torch.cuda.current_device()), []

    def warm_up(kernel: Any, args: Any, grid: Any, kwargs: dict[str, Any]) -> None:
        compiling.append(kernel.warmup(*args, grid=(1,), **kwargs))

    def load(kernel: Any) -> None:
        """Have Triton 3.6 build the kernel's launcher in C, which takes a quarter of a second, here and not at its launch."""
        with torch.cuda.device(device):
            _ = (kernel.result() if hasattr(kernel, "result") else kernel).run

    with ThreadPoolExecutor(num_threads(), thread_name_prefix="cce_dist-compile") as threads:
        with triton.AsyncCompileMode(threads, ignore_errors=True), torch.no_grad(), launching(warm_up):
            _through(backend, spec, x, weight_out)
        wait([threads.submit(load, kernel) for kernel in compiling])


@lru_cache(maxsize=1)
def num_threads() -> int:
    """Threads that may compile: the cores of this process, shared with the ranks of its host."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1)
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // ranks))


@lru_cache(maxsize=1)
def available() -> bool:
    """Whether calls are rehearsed in this process: Triton compiles in threads from 3.6 on."""
    import triton

    off = os.environ.get("CCE_DIST_COMPILE_AHEAD", "1") in ("", "0")
    return not off and num_threads() > 1 and hasattr(triton, "AsyncCompileMode")


def _through(backend: Backend, spec: Spec, x: Operands, weight_out: Tensor | None) -> None:
    """Go through a call as ``op.py`` does, on one rank, with tensors that have no memory."""

    def bare(tensor: Tensor | None) -> Any:
        return None if tensor is None else torch.empty_like(tensor, device="meta")

    def merge_bound(stats_3N: Tensor) -> Tensor:
        return backend.merged_lse(stats_3N[None])

    labels = bare(x.ids)
    hidden = x.hidden.new_empty(x.num_tokens, x.hidden.shape[1], device="meta")
    head = x.head._replace(**{name: bare(tensor) for name, tensor in x.head.tensors.items()})
    x = x._replace(hidden=hidden, weight=bare(x.weight), head=head, ids=labels)
    ids, order = backend.ordered_ids(labels, spec.ignore_index, spec.vocab_size)
    x = x._replace(ids=ids, order=order)
    stats_KN, saved = backend.statistics(x, spec, merge_bound)
    nll_N, *_, merged = backend.token_losses(stats_KN[None], x.ids, spec)
    softmax = Softmax(merged[0], merged[1], merged[2] if spec.want.entropy else None)
    of_mean = backend.mean(nll_N, labels, spec.ignore_index) if spec.want.mean else None
    wanted = (of_mean is None, False, False, spec.want.uniform, spec.want.entropy)
    coef_4N = backend.coefficients([nll_N if want else None for want in wanted], x.ids, spec.vocab_size, of_mean)
    backend.gradients(x, softmax, coef_4N, saved, Grads(True, True, x.head.bias is not None, bare(weight_out)), spec)
