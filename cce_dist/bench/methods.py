"""What is compared: this library in its modes, plain torch, and the other libraries, each imported only when asked for.

A method is built once per case and then called as ``loss = method(hidden, weight, labels)``: a mean over the labels that
are not -100. Building raises ``ImportError`` where the library, or the part of it that is asked for, is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

LossFn = Callable[[Tensor, Tensor, Tensor], Tensor]  # hidden [N, D], weight [V, D], labels [N] -> mean loss, 0-d


class Method(NamedTuple):
    """One row of the table.

    Attributes:
        build: Takes hidden, weight and labels of the case and returns the loss function.
        ours: Whether it is this library.
        needs_cuda: Whether it runs on NVIDIA or AMD GPUs only.
    """

    build: Callable[[Tensor, Tensor, Tensor], LossFn]
    ours: bool = False
    needs_cuda: bool = False


def all_methods(workspace_mib: list[int]) -> dict[str, Method]:
    """Every method by name, in the order of the table; ``cce-dist`` appears once for each workspace, in MiB."""
    methods = {}
    for mib in workspace_mib:
        name = "cce-dist" if len(workspace_mib) == 1 else f"cce-dist@{mib}MiB"
        methods[name] = Method(partial(_ours, workspace_bytes=mib << 20), ours=True)
    return methods | {
        "cce-dist-cached": Method(_ours_cached, ours=True),
        "cce-dist-filtered": Method(partial(_ours_filtered, workspace_bytes=workspace_mib[0] << 20), ours=True),
        "cce-dist-torch": Method(partial(_ours, workspace_bytes=workspace_mib[0] << 20, backend="torch"), ours=True),
        "torch": Method(lambda *case: _torch_eager),
        "torch-compile": Method(_torch_compile),
        "torch-lce": Method(_torch_linear_cross_entropy),
        "torch-lce-chunked": Method(partial(_torch_linear_cross_entropy, chunked=True)),
        "cce": Method(partial(_cut_cross_entropy, impl="cce"), needs_cuda=True),
        "cce-exact": Method(partial(_cut_cross_entropy, impl="cce_exact"), needs_cuda=True),
        "cce-kahan-full-c": Method(partial(_cut_cross_entropy, impl="cce_kahan_full_c"), needs_cuda=True),
        "cce-torch-compile": Method(partial(_cut_cross_entropy, impl="torch_compile")),
        "liger": Method(_liger_triton, needs_cuda=True),
        "liger-cute": Method(_liger_cute, needs_cuda=True),
        "quack": Method(_quack, needs_cuda=True),
    }


def _ours(hidden: Tensor, weight: Tensor, labels: Tensor, workspace_bytes: int, backend: str = "") -> LossFn:
    """Exact. On a GPU the kernels or an error, never "auto": a row says what it timed."""
    from cce_dist import linear_cross_entropy

    backend = backend or ("triton" if hidden.is_cuda else "torch")
    return cast(LossFn, partial(linear_cross_entropy, backend=backend, workspace_bytes=workspace_bytes))


def _ours_filtered(hidden: Tensor, weight: Tensor, labels: Tensor, workspace_bytes: int) -> LossFn:
    """Filtered and compensated, with whatever backend a user gets for it."""
    from cce_dist import GradFilter, linear_cross_entropy

    return cast(LossFn, partial(linear_cross_entropy, grad_filter=GradFilter(), workspace_bytes=workspace_bytes))


def _ours_cached(hidden: Tensor, weight: Tensor, labels: Tensor) -> LossFn:
    """Exact, with a budget in which all of exp(logits) may stay between forward and backward."""
    logits_bytes = hidden.shape[0] * weight.shape[0] * hidden.element_size()
    return _ours(hidden, weight, labels, workspace_bytes=2 * logits_bytes + (1 << 30))


def _torch_eager(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels)


def _torch_compile(hidden: Tensor, weight: Tensor, labels: Tensor) -> LossFn:
    # Forget the case before: a second shape would be compiled with symbolic sizes, and slower.
    torch.compiler.reset()
    return torch.compile(_torch_eager, fullgraph=True, dynamic=False)


def _torch_linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, chunked: bool = False) -> LossFn:
    if not hasattr(F, "linear_cross_entropy"):
        raise ImportError(f"torch {torch.__version__} has no torch.nn.functional.linear_cross_entropy")
    return partial(F.linear_cross_entropy, options=torch.nn.LinearCrossEntropyOptions() if chunked else None)


def _cut_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, impl: str) -> LossFn:
    import cut_cross_entropy  # pyright: ignore[reportMissingImports]

    if impl in {member.name.lower() for member in cut_cross_entropy.LinearCrossEntropyImpl}:
        return partial(cut_cross_entropy.linear_cross_entropy, impl=impl)
    if impl == "cce_exact":  # releases before the presets: unfiltered, without Kahan summation
        return partial(cut_cross_entropy.linear_cross_entropy, impl="cce", filter_eps=None)
    raise ImportError(f"cut-cross-entropy {cut_cross_entropy.__version__} has no preset {impl}")


def _liger_triton(hidden: Tensor, weight: Tensor, labels: Tensor) -> LossFn:
    from liger_kernel.transformers.fused_linear_cross_entropy import (  # pyright: ignore[reportMissingImports]
        LigerFusedLinearCrossEntropyLoss,
    )

    try:  # releases with several kernel languages would take CuTe for the softmax where it is installed
        from liger_kernel.backends import set_impl  # pyright: ignore[reportMissingImports]
    except ImportError:
        pass
    else:
        set_impl("nvidia-triton")
    loss = LigerFusedLinearCrossEntropyLoss()
    return lambda hidden, weight, labels: loss(weight, hidden, labels)


def _liger_cute(hidden: Tensor, weight: Tensor, labels: Tensor) -> LossFn:
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import (  # pyright: ignore[reportMissingImports]
        liger_fused_linear_cross_entropy_sm90,
    )

    return liger_fused_linear_cross_entropy_sm90


def _quack(hidden: Tensor, weight: Tensor, labels: Tensor) -> LossFn:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy  # pyright: ignore[reportMissingImports]

    return chunked_linear_cross_entropy
