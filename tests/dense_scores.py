"""What the adapters for reinforcement learning are compared with: log-probabilities and entropies from logits."""

from collections.abc import Callable
from typing import Any

import torch
from support.dense import assert_all_no_worse
from torch import Tensor

from cce_dist import reference
from cce_dist.tools.verify.check import assert_no_worse

HIDDEN, VOCAB, TOKENS = 16, 64, 12


def operands(batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states [batch, TOKENS, HIDDEN], the whole weight [VOCAB, HIDDEN] and labels [batch, TOKENS]."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, HIDDEN, generator=generator) for shape in ((batch, TOKENS), (VOCAB,)))
    return hidden, weight, torch.randint(VOCAB, (batch, TOKENS), generator=generator)


def dense_scores(logits: Tensor, labels: Tensor, temperature: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    """Return the reference's log-probabilities of labels and entropies, of labels' shape [...], from logits [..., V]."""
    out = reference.log_probs(logits, labels, temperature)
    assert out.entropy is not None
    return out.log_probs, out.entropy


def policy_loss(log_probs: Tensor, entropy: Tensor) -> Tensor:
    """Return a loss with an entropy bonus, whose upstream gradients have both signs and very different sizes."""
    count = log_probs.numel()
    advantages = torch.arange(count).sin() * 10.0 ** torch.linspace(-3, 1, count)
    return -(advantages.to(log_probs.dtype) * log_probs.reshape(-1)).sum() - 0.1 * entropy.sum()


def assert_same_loss(ours: Tensor, theirs: Tensor, leaves: list[Tensor], rtol: float) -> None:
    """Raise unless two losses and their gradients are equal in float64."""
    mine, stock = ((loss, *torch.autograd.grad(loss, leaves)) for loss in (ours, theirs))
    torch.testing.assert_close(mine, stock, rtol=rtol, atol=1e-3 * rtol)


WAYS = (True, torch.float32), (False, torch.float32), (False, torch.float64)  # ours, the baseline, the truth


def compare(
    ours: Callable, dense: Callable, hidden: Tensor, weight: Tensor, mine: Any = slice(None), rows: Any = slice(None)
) -> None:
    """Raise unless scores and gradients are as right as those of dense arithmetic in fp32; float64 is the truth.

    Args:
        ours, dense: Functions of hidden states and weight that return log-probabilities and entropies.
        hidden, weight: What ``dense`` is given.
        mine, rows: The part of hidden states and the rows of the weight that ``ours`` is given on this rank.
    """
    results = []
    for is_ours, dtype in WAYS:
        parts = (mine, rows) if is_ours else (slice(None),) * 2
        leaves = [x.detach()[part].to(dtype).requires_grad_() for x, part in zip((hidden, weight), parts, strict=True)]
        scores = (ours if is_ours else dense)(*leaves)
        d_hidden, d_weight = torch.autograd.grad(policy_loss(*scores), leaves)
        results.append((*scores, d_hidden, d_weight) if is_ours else (*scores, d_hidden[mine], d_weight[rows]))
    assert [x.shape for x in results[0]] == [x.shape for x in results[1]]
    assert_all_no_worse(("log_probs", "entropy", "d_hidden", "d_weight"), *results)


def compare_models(where: str, run: Callable[..., tuple[Any, Tensor, Tensor]], *given: Any) -> None:
    """Raise unless scores and all gradients of a model are as right as those of dense arithmetic in fp32.

    ``run`` is told whether to use our function, a dtype and what is ``given``. It makes a model, and returns it with
    log-probabilities and entropies.
    """
    results = []
    for is_ours, dtype in WAYS:
        model, *scores = run(is_ours, dtype, *given)
        policy_loss(*scores).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        results.append(dict(zip(("log_probs", "entropy"), scores, strict=True)) | gradients)
    ours, baseline, truth = results
    assert ours.keys() == baseline.keys() == truth.keys() and len(ours) > 10
    for name in ours:
        assert_no_worse(ours[name], baseline[name], truth[name], quantity=f"{name}, {where}")
