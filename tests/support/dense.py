"""A head of four groups of tokens, the reference's loss and gradients, and comparisons of several tensors at once."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from shards import DEVICE, GPU
from torch import Tensor

from cce_dist import linear_cross_entropy, reference
from cce_dist.tools.verify.check import assert_no_worse, run_case

N, D, V, ROWS = 22, 16, 75, 6  # four groups, the last of four tokens
DTYPE = torch.bfloat16 if GPU else torch.float32


def operands(biased: bool = True) -> tuple[list[Tensor], Tensor]:
    """Hidden states, a weight and a bias that require gradients, and labels: the second group has none, others a few less."""
    shapes = [(N, D), (V, D), (V,)][: 2 + biased]
    labels = torch.randint(V, (N,))
    labels[[0, *range(ROWS, 2 * ROWS), N - 1]] = -100
    return [torch.randn(shape, device=DEVICE).to(DTYPE).requires_grad_() for shape in shapes], labels.to(DEVICE)


def draw(num_tokens: int, hidden_size: int, vocab_size: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and a weight that require gradients, and labels; the same in every process, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(rows, hidden_size, generator=generator) for rows in (num_tokens, vocab_size))
    return (
        hidden.requires_grad_(),
        weight.requires_grad_(),
        torch.randint(vocab_size, (num_tokens,), generator=generator),
    )


def large_operands() -> tuple[list[Tensor], Tensor]:
    """Hidden states and a weight of which a GPU keeps the exponentials of some tokens in 160 MiB, and labels."""
    hidden = torch.randn(5000, 512, device="cuda").bfloat16()
    weight = (0.1 * torch.randn(32000, 512, device="cuda")).bfloat16()
    return [hidden.requires_grad_(), weight.requires_grad_()], torch.randint(32000, (5000,), device="cuda")


def loss_of(tensors: Iterable[Tensor], labels: Tensor, **options: Any) -> Any:
    """Return our loss of hidden states and weight, and the bias if there is one."""
    hidden, weight, *bias = tensors
    return linear_cross_entropy(hidden, weight, labels, linear_bias=bias[0] if bias else None, **options)


def dense(
    tensors: Iterable[Tensor], labels: Tensor, dtype: torch.dtype, factor: float | Tensor = 1.0, **options: Any
) -> tuple[Tensor, ...]:
    """Return the reference's loss in a dtype, and gradients of the sum of ``factor`` times the loss.

    ``tensors`` are hidden states and weight, and the bias if there is one.
    """
    hidden, weight, *bias = leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
    options["linear_bias"] = bias[0] if bias else None
    options["token_inputs"] = [values.to(hidden) for values in options.get("token_inputs", ())]
    loss = reference.linear_cross_entropy(hidden, weight, labels, **options).loss
    return loss, *torch.autograd.grad((factor * loss).sum(), leaves)


def assert_all_no_worse(
    names: Sequence[str],
    ours: Iterable[Tensor],
    baseline: Iterable[Tensor],
    truth: Iterable[Tensor],
    dtype: torch.dtype | None = None,
) -> None:
    """Compare tensors by ``assert_no_worse``; ``dtype`` chooses eps for those that are named "d" and something."""
    for name, each, base, true in zip(names, ours, baseline, truth, strict=True):
        assert_no_worse(each, base, true, dtype if name.startswith("d") else None, name)


def assert_holds(function: Any, case: Any, group: Any = None, device: str = DEVICE, backend: str = "triton") -> None:
    """Raise unless all errors of a case of ``cce-dist verify`` are within their bounds."""
    wrong = [error for error in run_case(function, case, group, device, backend) if not error.ok]
    assert not wrong, f"{case}: {wrong}"


def assert_near(ours: Iterable[Tensor], truth: Iterable[Tensor]) -> None:
    """Raise unless the norm of each error is within 2e-2 of the truth's on a GPU, where it is of bf16, else within 1e-5."""
    for each, true in zip(ours, truth, strict=True):
        assert (each - true).norm() <= (2e-2 if GPU else 1e-5) * true.norm()
