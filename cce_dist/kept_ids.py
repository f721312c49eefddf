"""KeptIds: the list of ids that a sampler kept for each token, from offsets and ids or from a bit mask."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cce_dist import checks
from cce_dist.kernels import Operands


class KeptIds(NamedTuple):
    """The ids that a sampler kept for each token (top-k, top-p, a grammar), as the rows of a CSR matrix.

    With ``linear_log_probs(..., kept=...)`` the softmax of a token is over its list. A list may be empty, has each id once, and
    may have any order.

    Attributes:
        offsets: [N + 1] int64 or int32. Token i of the N flattened tokens has the ids ``ids[offsets[i] : offsets[i + 1]]``.
            The first offset is 0, the last one the number of ids.
        ids: [number of ids] int64 or int32 ids in the whole vocabulary. Identical on every rank of the group.
    """

    offsets: Tensor
    ids: Tensor

    @classmethod
    def from_bits(cls, bits: Tensor, vocab_size: int | None = None) -> KeptIds:
        """Convert a bit mask of the vocabulary, as inference engines and grammars produce it. Waits for the mask's device.

        Args:
            bits: [..., ceil(V / 8)] uint8. Bit b of byte c, counted from the least significant bit, stands for id
                ``8 * c + b``. On a little-endian machine a mask of 32-bit words is ``words.view(torch.uint8)``.
            vocab_size: V. Bits of ids at or past V are padding and are ignored. None: every set bit is an id.

        Raises:
            TypeError: bits is not a uint8 tensor.
            ValueError: bits has fewer than vocab_size bits per token.
        """
        checks.tensors({"bits": bits})
        if bits.dtype != torch.uint8 or bits.dim() < 1:
            raise TypeError(f"bits must be [..., ceil(V / 8)] uint8, got {bits.dtype} {tuple(bits.shape)}")
        if vocab_size is not None and 8 * bits.shape[-1] < checks.integer("vocab_size", vocab_size, 1):
            raise ValueError(f"bits has {8 * bits.shape[-1]} bits a token, fewer than vocab_size {vocab_size}")
        rows = bits.reshape(-1, bits.shape[-1])
        row, byte = rows.nonzero(as_tuple=True)
        is_set = (rows[row, byte][:, None] >> torch.arange(8, device=bits.device)) & 1
        if vocab_size is not None:
            is_set &= 8 * byte[:, None] + torch.arange(8, device=bits.device) < vocab_size
        entry, bit = is_set.nonzero(as_tuple=True)
        counts = torch.bincount(row[entry], minlength=rows.shape[0])
        return cls(torch.cat((counts.new_zeros(1), counts.cumsum(0))), 8 * byte[entry] + bit)


def check(kept: KeptIds, x: Operands) -> None:
    """Raise unless dtypes, devices and shapes fit the call's tokens. Reads no values."""
    checks.kind("kept", kept, KeptIds)
    checks.tensors({"kept.offsets": kept.offsets, "kept.ids": kept.ids})
    for name, tensor in (("kept.offsets", kept.offsets), ("kept.ids", kept.ids)):
        if isinstance(tensor, DTensor) or tensor.dtype not in (torch.int64, torch.int32) or tensor.dim() != 1:
            raise TypeError(
                f"{name} must be a plain tensor of one dimension, int64 or int32, got {tensor.dtype} {tuple(tensor.shape)}"
            )
        if tensor.device != x.ids.device:
            raise ValueError(f"input is on {x.ids.device}, {name} on {tensor.device}")
    if kept.offsets.shape[0] != x.num_tokens + 1:
        raise ValueError(
            f"kept.offsets must be [{x.num_tokens + 1}], one more than tokens, got {[*kept.offsets.shape]}"
        )
    if kept.ids.shape[0] and not x.num_tokens:
        raise ValueError(f"kept has {kept.ids.shape[0]} ids, but the call has no tokens")
    if kept.ids.shape[0] + x.num_tokens >= 2**31:
        raise ValueError(f"kept has {kept.ids.shape[0]} ids: ids and tokens together must be fewer than 2**31")


def error(kept: KeptIds, token_L: Tensor, ids_N: Tensor, vocab_size: int) -> Exception | None:
    """Return the error for wrong offsets, an id outside the vocabulary, or a repeated id; None if there is none.

    Waits for the device. Lists of ignored tokens are not checked.
    """
    offsets, ids = kept
    if offsets[0] != 0 or offsets[-1] != ids.shape[0] or bool((offsets.diff() < 0).any()):
        return ValueError(f"kept.offsets must rise from 0 to {ids.shape[0]}, the number of kept.ids")
    if not ids.shape[0]:
        return None
    live = ids_N[token_L] >= 0
    outside = live & ((ids < 0) | (ids >= vocab_size))
    if outside.any():
        place = int(outside.nonzero()[0])
        return IndexError(
            f"kept.ids[{place}], of token {int(token_L[place])}, is {int(ids[place])}: not in [0, {vocab_size}); "
            "KeptIds.from_bits(bits, vocab_size) leaves out a mask's padding"
        )
    key, order = torch.where(live, token_L * vocab_size + ids, -1).sort()
    twice = (key[1:] == key[:-1]) & (key[1:] >= 0)
    if twice.any():
        place = int(order[1:][twice][0])
        return ValueError(f"kept.ids has id {int(ids[place])} twice in the list of token {int(token_L[place])}")
    return None
