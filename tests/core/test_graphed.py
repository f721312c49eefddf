"""A head in ``torch.cuda.make_graphed_callables``, as docs/api.md describes it."""

from typing import Any
from unittest import mock

import pytest
import torch
from shards import needs_gpu
from support.dense import large_operands
from torch import Tensor, nn

from cce_dist import GradFilter, groups, linear_cross_entropy

CALLS: dict[str, dict[str, Any]] = {
    "exact": {},
    "made-again": {"workspace_bytes": 1},
    "filtered": {"grad_filter": GradFilter(always=True)},
    "each-token-in-groups": {"reduction": "none", "workspace_bytes": 160 << 20},
}


class Head(nn.Module):
    """A head that adds the weight's gradient to ``out``, or returns it."""

    def __init__(self, weight: Tensor, out: Tensor | None, **options: Any) -> None:
        super().__init__()
        self.weight, self.out, self.options = nn.Parameter(weight.detach().clone()), out, options

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return linear_cross_entropy(
            hidden, self.weight, labels, grad_weight_out=self.out, backend="triton", **self.options
        )


@needs_gpu
@pytest.mark.parametrize("buffered", [False, True], ids=["own", "buffer"])
@pytest.mark.parametrize("name", CALLS)
def test_a_graphed_head(name: str, buffered: bool) -> None:
    """Replayed with other labels, more of them ignored, and with upstream gradients that are as expected and that are not.

    Catches: any wait for the device, a count read back, a size that depends on the data, a number or an address of the captured
    call in a replay, and a buffer that warm-up leaves filled.
    """
    (hidden, weight), labels = large_operands()
    out = torch.zeros_like(weight, dtype=torch.float32).detach() if buffered else None
    plain: Any = Head(weight, None if out is None else out.clone(), **CALLS[name])
    sample = torch.randn_like(hidden).requires_grad_(), labels.roll(5)
    with mock.patch.object(groups, "one_pass", wraps=groups.one_pass) as made_in_groups:
        head = Head(weight, out, **CALLS[name])
        graphed: Any = torch.cuda.make_graphed_callables(head, sample, allow_unused_input=buffered)
    assert made_in_groups.called or not name.endswith("in-groups")
    if out is not None:
        assert out.any() or name.endswith("in-groups")  # warm-up's upstream gradients are what memory held, maybe zeros
        out.zero_()  # warm-up has added its gradients
    upstream = torch.full((len(labels),), 0.3, device="cuda")
    for step, factors in enumerate((upstream, torch.randn_like(upstream), torch.zeros_like(upstream))):
        others = labels.roll(step).masked_fill(torch.rand(len(labels), device="cuda") < step / 4, -100)
        found = []
        for head in (plain, graphed):
            x = (hidden.detach() * (1 + step)).requires_grad_()
            head.weight.grad = None
            loss = head(x, others)
            (loss * factors).sum().backward()
            found.append([loss.detach().clone(), x.grad, head.weight.grad if head.out is None else head.out.clone()])
        assert all(torch.equal(ours, right) for ours, right in zip(*found, strict=True))
