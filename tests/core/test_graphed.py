"""A head in ``torch.cuda.make_graphed_callables``, as docs/api.md describes it."""

from typing import Any

import pytest
import torch
from shards import needs_gpu
from support.dense import large_operands
from torch import Tensor, nn

from cce_dist import GradFilter, linear_cross_entropy


class Head(nn.Module):
    """A head that adds the weight's gradient to ``out``, or returns it."""

    def __init__(self, weight: Tensor, grad_filter: GradFilter | None, out: Tensor | None) -> None:
        super().__init__()
        self.weight, self.grad_filter, self.out = nn.Parameter(weight.detach().clone()), grad_filter, out

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return linear_cross_entropy(
            hidden, self.weight, labels, grad_filter=self.grad_filter, grad_weight_out=self.out, backend="triton"
        )


@needs_gpu
@pytest.mark.parametrize("buffered", [False, True], ids=["own", "buffer"])
@pytest.mark.parametrize("grad_filter", [None, GradFilter(always=True)], ids=["exact", "filtered"])
def test_a_graphed_head(grad_filter: GradFilter | None, buffered: bool) -> None:
    """Catches: a number or an address of the captured call in a replay, and a buffer that warm-up leaves filled."""
    (hidden, weight), labels = large_operands()
    out = torch.zeros_like(weight, dtype=torch.float32).detach() if buffered else None
    plain: Any = Head(weight, grad_filter, None if out is None else out.clone())
    sample = torch.randn_like(hidden).requires_grad_(), labels.roll(5)
    graphed: Any = torch.cuda.make_graphed_callables(
        Head(weight, grad_filter, out), sample, allow_unused_input=buffered
    )
    if out is not None:
        assert out.any()
        out.zero_()  # warm-up has added its gradients
    for step in range(3):
        found = []
        for head in (plain, graphed):
            batch = (hidden.detach() * (1 + step)).requires_grad_(), labels.roll(step)
            head.weight.grad = None
            loss = head(*batch)
            (loss * (step + 1)).backward()
            found.append(
                [loss.detach().clone(), batch[0].grad, head.weight.grad if head.out is None else head.out.clone()]
            )
        assert all(torch.equal(ours, right) for ours, right in zip(*found, strict=True))
