"""Helpers that the kernels' tests share: the device, a shard's operands, and memory full of NaN."""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import KernelInterface

from cce_dist.kernels import ShardLogits

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU: it is about memory, compilation or streams of the device")


class Problem(NamedTuple):
    """One shard's operands, and what its gradients are made with: ``coef`` [4, N]."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    logits: ShardLogits
    coef: Tensor


@contextlib.contextmanager
def nan_memory() -> Iterator[None]:
    """Fill what torch.empty returns with NaN: a cell shows that a kernel forgot to write, or read without having written."""
    # torch.utils.deterministic.fill_uninitialized_memory takes effect under deterministic algorithms alone.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave all launches of kernels out; what they would have written is zeros."""
    monkeypatch.undo()  # of NaN in what is not initialised
    monkeypatch.setattr(KernelInterface, "__getitem__", lambda *_: lambda *_, **__: None)
    monkeypatch.setattr(torch, "empty", torch.zeros)  # labels and indices are looked at
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)


class Live(TorchDispatchMode):
    """Counts the bytes of all tensors made under it that are alive, and keeps the largest sum; a view makes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[StorageWeakRef, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                self.storages.setdefault(StorageWeakRef(tensor.untyped_storage()), 0)
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.storages.setdefault(StorageWeakRef(tensor.untyped_storage()), tensor.untyped_storage().nbytes())
        self.storages = {storage: size for storage, size in self.storages.items() if not storage.expired()}
        self.peak = max(self.peak, sum(self.storages.values()))
        return out
