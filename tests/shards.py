"""Helpers that the kernels' tests share: the device, a shard's operands, and memory full of NaN."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from interpreted import add_bf16, make_quick
from torch import Tensor

from cce_dist.kernels import Operands, ShardLogits, Upstream, direct

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
if not GPU:
    make_quick()  # in ranks, too
    add_bf16()
# The backends of tests over ranks, which are on CPUs.
backends_of_ranks = pytest.mark.parametrize(
    "backend",
    [
        "torch",
        pytest.param(
            "triton", marks=[pytest.mark.slow, pytest.mark.skipif(GPU, reason="ranks are on CPUs, interpreted")]
        ),
    ],
)
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU: it is about memory, compilation or streams of the device")


class Problem(NamedTuple):
    """One shard's operands, and what its gradients are made with: ``coef`` [4, N]."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    logits: ShardLogits
    coef: Tensor

    @property
    def operands(self) -> Operands:
        return Operands.of(self.hidden, self.weight, self.labels, self.logits, bias=self.bias)


def upstream_of(coef: Tensor, vocab_size: int) -> Upstream:
    """Return upstream gradients that have these coefficients, up to fp32's rounding where there is a UNIFORM."""
    d_uniform = -coef[2] * vocab_size
    return Upstream(nll=-coef[1], lse=coef[0] + coef[1] - d_uniform, uniform=d_uniform, entropy=coef[3])


@contextlib.contextmanager
def nan_memory() -> Iterator[None]:
    """Fill what torch.empty returns with NaN: it shows cells that a kernel forgot to write, or read before."""
    # torch.utils.deterministic.fill_uninitialized_memory takes effect under deterministic algorithms alone.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave all launches of kernels out; what they would have written is zeros."""
    monkeypatch.undo()  # of NaN in what is not initialised

    def launch(kernel: direct.Kernel, grid: Any, *args: Any, **options: Any) -> None:
        instead = direct._LAUNCH.get()
        if instead is not None:
            instead(kernel, args, grid, options)

    monkeypatch.setattr(direct.Kernel, "launch", launch)
    monkeypatch.setattr(torch, "empty", torch.zeros)  # labels and indices are looked at
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
