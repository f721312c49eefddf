"""The same numbers in another memory layout: strided, transposed, sliced, expanded, unaligned.

The memory between and around the numbers holds NaN, or an id that no vocabulary has. This shows a kernel that takes strides for
granted.
"""

from __future__ import annotations

import torch
from torch import Tensor

LAYOUTS = ("contiguous", "strided", "transposed", "sliced", "unaligned", "expanded")
WRITABLE = ("contiguous", "unaligned")  # layouts of a buffer that the loss may write to
POISON_ID = -77_777


def constant(values: Tensor) -> Tensor:
    """Replace every entry of dim 0 by the first one: an expanded view can hold the result."""
    return values[:1].expand_as(values).clone() if values.dim() and values.shape[0] else values


def view_of(values: Tensor, layout: str) -> Tensor:
    """Return a view that holds ``values``, without autograd history.

    "strided" takes every second element of the last dim, "transposed" has the first dim innermost, "sliced" is a window of a
    larger buffer, "unaligned" begins one element behind an aligned address, "expanded" has stride 0 on dim 0: see ``constant``.
    A vector or a number that would be transposed is strided.
    """
    values, shape = values.detach(), tuple(values.shape)
    if layout == "contiguous":
        return values.clone()
    if layout == "unaligned":
        return _poison((values.numel() + 1,), values)[1:].view(shape).copy_(values)
    if not shape:
        return _poison((3,), values)[1].copy_(values)
    if layout == "expanded" and shape[0]:
        return values[:1].clone().expand(shape)
    if layout == "sliced":
        window = _poison(tuple(size + 5 for size in shape), values)
        for dim, size in enumerate(shape):
            window = window.narrow(dim, 2, size)
        return window.copy_(values)
    if layout == "transposed" and len(shape) > 1:
        return values.transpose(0, -1).clone(memory_format=torch.contiguous_format).transpose(0, -1)
    return _poison((*shape[:-1], 2 * values.shape[-1]), values)[..., ::2].copy_(values)


def _poison(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return like.new_full(shape, torch.nan if like.is_floating_point() else POISON_ID)
