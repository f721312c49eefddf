"""Whether what deferred logits are computed from is still what it was when the model made them.

Deferred logits of evaluation are computed when somebody looks at them. By then an average of the weights may have been put
back, an optimizer may have stepped, another adapter may be active, or hidden states may have been changed in place. The numbers
would not fit the loss beside them, so the look raises an error. ``Version`` compares the counter that torch keeps of changes in
place: it costs nothing, and does not see changes through ``.data``. ``Seal`` compares sums of the bits, for which a weight is
read once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by element size
ADVICE = "look at the logits (logits.clone(), say) before that"


class ChangedError(RuntimeError):
    """Logits were asked for after what they are computed from had changed."""

    def __init__(self, what: str) -> None:
        super().__init__(f"cce_dist: {what} changed between the model's forward and this use of its logits: {ADVICE}")


class Version:
    """How often a tensor had been changed in place. Sharded weights do not count: gathering one is such a change."""

    def __init__(self, tensor: Any) -> None:
        self._count = _count_of(tensor)

    def check(self, what: str, tensor: Any) -> None:
        """Raise ChangedError, which calls the tensor ``what``, if it was changed since."""
        count = _count_of(tensor)
        if None not in (self._count, count) and count != self._count:
            raise ChangedError(what)


class Seal:
    """Sums of the bits of tensors, taken by the first ``read``, and compared by every later one.

    Integer sums do not depend on their order. ``read`` runs inside of the head's forward, and raises nothing: FSDP2 would not
    release the weight behind an error.
    """

    def __init__(self) -> None:
        self.sums: list[tuple[torch.dtype, Tensor] | None] = []
        self._same = True

    @torch.no_grad()
    def read(self, *tensors: Tensor | None) -> None:
        """Take the sums of tensors, or compare them; they may then have another dtype, from which FSDP2 would cast."""
        if not self.sums:
            self.sums = [None if x is None else (x.dtype, _sum_of_bits(x)) for x in tensors]
            return
        pairs = zip(self.sums, tensors, strict=True)
        self._same = all(
            old is tensor if old is None or tensor is None else torch.equal(old[1], _sum_of_bits(tensor.to(old[0])))
            for old, tensor in pairs
        )

    def check(self, what: str) -> None:
        """Raise ChangedError, which calls the tensors ``what``, if the last ``read`` found other bits than the first."""
        if not self._same:
            raise ChangedError(what)


def _count_of(tensor: Any) -> int | None:
    """Return the counter of a plain tensor, None where there is none."""
    if not isinstance(tensor, Tensor) or isinstance(tensor, DTensor) or hasattr(tensor, "ds_id"):
        return None
    if torch.compiler.is_compiling() or tensor.is_inference():
        return None
    return tensor._version


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """Return the sums [...] of the bits of a tensor [..., D] as integers; of a vector the bits themselves."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    bits = local.detach().view(INTEGERS[local.element_size()])
    return bits.clone() if bits.dim() < 2 else bits.sum(-1)
