"""A head in ``torch.cuda.make_graphed_callables``, as docs/api.md describes it."""

from typing import Any
from unittest import mock

import pytest
import torch
from shards import needs_gpu
from support.dense import large_operands
from torch import Tensor, nn

from cce_dist import GradFilter, VocabParallelHead, groups

CALLS: dict[str, dict[str, Any]] = {
    "exact": {},
    "made-again": {"workspace_bytes": 1},
    "filtered": {"grad_filter": GradFilter(always=True)},
    "each-token-in-groups": {"reduction": "none", "workspace_bytes": 160 << 20},
}


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

    def head_of(out: Tensor | None) -> Any:
        own = nn.Parameter(weight.detach().clone())
        options = {"grad_weight_out": out, "backend": "triton"} | CALLS[name]
        return VocabParallelHead(weight.shape[1], len(weight), weight=own, **options)

    plain = head_of(None if out is None else out.clone())
    sample = torch.randn_like(hidden).requires_grad_(), labels.roll(5)
    with mock.patch.object(groups, "one_pass", wraps=groups.one_pass) as made_in_groups:
        head = head_of(out)
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
            d_weight = head.weight.grad if out is None else head.loss_options["grad_weight_out"].clone()
            found.append([loss.detach().clone(), x.grad, d_weight])
        assert all(torch.equal(ours, right) for ours, right in zip(*found, strict=True))
