"""A call rehearsed: its kernels compile side by side, and a first call takes as long as the slowest, not as all of them.

A first loss and gradient compiles some 17 kernels, with a filter 48, each at its first launch. So a call of a new kind is
rehearsed as soon as forward begins: the host code runs once through forward and backward on tensors without memory (torch's
device "meta"), and each launch is compiled in the background (``ahead.py``) instead of made.

A rehearsal decides on nothing: a kernel that it missed is compiled by its launch. ``CCE_DIST_COMPILE_AHEAD=0`` turns rehearsals
off. They need a Triton that may compile in threads.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from cce_dist.kernels import Grads, Operands, Softmax, Spec
from cce_dist.kernels.backends import Backend, num_counted
from cce_dist.kernels.launch.ahead import available, launches_compiled

_LOG = logging.getLogger("cce_dist")
_REHEARSED: set[tuple] = set()


def rehearse(backend: Backend, spec: Spec, x: Operands, weight_out: Tensor | None) -> None:
    """Compile the kernels of a call in the background, those of its backward too, unless one of its kind has come before.

    Args:
        backend: The one that the call has.
        spec: Its options.
        x: Its operands; the labels in place of their ids. Under sequence parallelism hidden states are a slice.
        weight_out: As in ``Grads``.
    """
    # Whoever looks at operators must not see a rehearsal, and a graph's capture allows no thread of ours.
    if not spec.want.grad or not x.weight.is_cuda or not available() or torch._C._len_torch_dispatch_stack():
        return
    if torch.cuda.is_current_stream_capturing() or spec.several or spec.factors or spec.want.top_k:
        return
    tensors = tuple((t.shape, t.dtype) for t in (x.weight, x.bias, weight_out) if t is not None)
    options = spec._replace(workspace_bytes=spec.workspace_bytes.bit_length())
    call = backend.__name__, x.weight.device, options, x.num_tokens.bit_length(), tensors
    if call in _REHEARSED:
        return
    _REHEARSED.add(call)
    try:
        with launches_compiled(x.weight.device):
            _through(backend, spec, x, weight_out)
    except Exception as error:  # the call itself tells what is wrong with it
        _LOG.debug("cce_dist does not compile ahead: %r", error)


def _through(backend: Backend, spec: Spec, x: Operands, weight_out: Tensor | None) -> None:
    """Go through a call as ``op.py`` does, on one rank, with tensors that have no memory."""

    def bare(tensor: Tensor | None) -> Any:
        return None if tensor is None else torch.empty_like(tensor, device="meta")

    def merge_bound(stats_3N: Tensor) -> Tensor:
        return backend.merged_lse(stats_3N[None])

    labels = bare(x.ids)
    hidden = x.hidden.new_empty(x.num_tokens, x.hidden.shape[1], device="meta")
    x = Operands(hidden, bare(x.weight), bare(x.bias), labels, x.logits)
    x = x._replace(ids=backend.label_ids(labels, spec.ignore_index, spec.vocab_size))
    stats_KN, saved = backend.statistics(x, spec, merge_bound)
    *_, merged = backend.token_losses(stats_KN[None], x.ids, spec)
    softmax = Softmax(merged[0], merged[1], merged[2] if spec.want.entropy else None)
    grad = merged[0]
    if spec.want.mean:
        count = num_counted("triton", labels, spec.ignore_index)
        grad = (grad[0] / count).expand(x.num_tokens)
    wanted = (True, False, False, spec.want.uniform, spec.want.entropy)
    coef_4N = backend.coefficients([grad if want else None for want in wanted], x.ids, spec.vocab_size)
    backend.gradients(x, softmax, coef_4N, saved, Grads(True, True, x.bias is not None, bare(weight_out)), spec)
