"""linear_log_probs against the dense reference: outputs, gradients with weights of both signs, bad input; one process."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from cce_dist import LogProbs, linear_log_probs, reference
from cce_dist.verify.check import assert_no_worse
from cce_dist.verify.log_probs import LOG_PROB_CASES, LogProbCase, run_case

N, D, V = 11, 8, 37
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = ["torch", "triton"]


@pytest.mark.parametrize("case", LOG_PROB_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("backend", BACKENDS)
def test_matches_dense(case: LogProbCase, backend: str) -> None:
    if backend == "triton" and case.dtype == torch.bfloat16 and not torch.cuda.is_available():
        pytest.skip("the interpreter misreads bf16")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for error in run_case(case, None, device, backend):
        assert error.ok, f"{error}: {case.catches}?"


def data(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = torch.randn(N, D, dtype=dtype), torch.randn(V, D, dtype=dtype)
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(V, (N,))


def outputs(out: LogProbs) -> list[Tensor]:
    return [x for x in out if x is not None]


def test_outputs_that_nobody_asked_for_are_none() -> None:
    assert [name for name, x in linear_log_probs(*data())._asdict().items() if x is not None] == ["log_probs", "lse"]


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("num_ids", [None, 1, 2])
def test_outputs_have_the_shape_of_the_tokens(shape: tuple[int, ...], num_ids: int | None) -> None:
    hidden, weight = torch.randn(*shape, D), torch.randn(V, D)
    ids = torch.randint(V, shape if num_ids is None else (*shape, num_ids))
    own = torch.rand(shape) + 0.5
    out = linear_log_probs(hidden, weight, ids, temperature=own, entropy=True, sum_p_squared=True, argmax=True, top_k=4)
    assert out.log_probs.shape == ids.shape
    assert out.top_log_probs is not None and out.top_ids is not None
    assert out.top_log_probs.shape == out.top_ids.shape == (*shape, 4)
    of_tokens = (out.lse, out.entropy, out.sum_p_squared, out.max_logit, out.argmax)
    assert all(x is not None and x.shape == shape for x in of_tokens)
    expected = reference.linear_log_probs(hidden, weight, ids, temperature=own, top_k=4)
    for ours, theirs in zip(out, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_one_id_is_the_loss_of_it() -> None:
    """The same bits as one of several, too: catches a logit in another order of summation."""
    hidden, weight, ids = data()
    alone = linear_log_probs(hidden, weight, ids)
    assert torch.equal(alone.log_probs, linear_log_probs(hidden, weight, ids[:, None]).log_probs[:, 0])
    several = linear_log_probs(hidden, weight, torch.stack((ids, ids.flip(0)), 1))
    assert torch.equal(alone.log_probs, several.log_probs[:, 0])
    assert torch.equal(alone.lse, several.lse)


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_logits_are_ordered_by_id(backend: str) -> None:
    """Catches an order that is that of blocks, or of a sort that is not stable."""
    hidden, rows = torch.randn(3, D), torch.randn(40, D)
    weight = rows.repeat(8, 1)
    out = linear_log_probs(hidden, weight, torch.zeros(3, dtype=torch.int64), argmax=True, top_k=20, backend=backend)
    best = (hidden @ rows.t()).sort(1, descending=True).indices[:, :3]
    expected = (best[:, :, None] + 40 * torch.arange(8)).view(3, -1)[:, :20]
    assert out.argmax is not None and out.top_ids is not None
    assert torch.equal(out.argmax, expected[:, 0])
    assert torch.equal(out.top_ids, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_without_an_id_may_hold_anything(backend: str) -> None:
    hidden, weight, ids = data()
    ids = torch.stack((ids, ids.flip(0)), 1)
    ids[3] = -100
    ids[5, 0] = -100
    temperature = torch.rand(N) + 0.5
    broken, cold = hidden.detach().clone().requires_grad_(), temperature.clone()
    with torch.no_grad():
        broken[3] = torch.nan
    cold[3] = 0.0
    results = []
    for h, own in ((hidden, temperature), (broken, cold)):
        out = linear_log_probs(
            h, weight, ids, temperature=own, entropy=True, sum_p_squared=True, argmax=True, top_k=2, backend=backend
        )
        assert out.entropy is not None
        objective = out.log_probs.sum() + out.lse.sum() + out.entropy.sum()
        results.append((*outputs(out), *torch.autograd.grad(objective, (h, weight))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    *values, best, _, top_ids, d_hidden, _ = results[1]
    assert all((x[3] == 0).all() for x in (*values, d_hidden))
    assert best[3] == -1 and (top_ids[3] == -1).all()
    assert values[0][5, 0] == 0 != values[0][5, 1]


BAD: list[Any] = [
    pytest.param(dict(ids=torch.zeros(N, 2, 2).long()), ValueError, "ids must be", id="shape"),
    pytest.param(dict(ids=torch.zeros(N, 0).long()), ValueError, "ids must be", id="no-ids"),
    pytest.param(dict(ids=torch.zeros(N)), TypeError, "ids must be int64", id="dtype"),
    pytest.param(dict(ids=torch.full((N, 2), V)), IndexError, r"ids\[0\] .* is 37", id="outside"),
    pytest.param(dict(temperature=0.0), ValueError, "temperature must be positive", id="temperature-0"),
    pytest.param(dict(temperature="1"), TypeError, "temperature must be a number", id="temperature-text"),
    pytest.param(dict(temperature=torch.zeros(N)), ValueError, r"temperature\[0\] .* positive", id="temperatures-0"),
    pytest.param(
        dict(logit_scale=torch.full((N,), torch.inf)), ValueError, r"logit_scale\[0\] .* finite", id="scales-inf"
    ),
    pytest.param(dict(temperature=torch.ones(N + 1)), ValueError, "temperature must be", id="temperatures-shape"),
    pytest.param(dict(temperature=torch.ones(N).long()), TypeError, "temperature must be", id="temperatures-dtype"),
    pytest.param(
        dict(temperature=torch.ones(N, requires_grad=True)), TypeError, "temperature has no gradient", id="learnt"
    ),
    pytest.param(
        dict(logit_scale=torch.ones((), requires_grad=True)), TypeError, "logit_scale has no grad", id="learnt-0d"
    ),
    pytest.param(dict(top_k=-1), ValueError, "top_k must be", id="top-k-negative"),
    pytest.param(dict(top_k=1025), ValueError, "top_k must be at most 1024", id="top-k-large"),
    pytest.param(dict(top_k=V + 1), ValueError, "the vocabulary has 37", id="top-k-more-than-ids"),
    pytest.param(dict(entropy=1), TypeError, "entropy must be a bool", id="flag"),
    pytest.param(dict(sequence_parallel=True, input_grad="partial"), ValueError, "input_grad", id="partial-sp"),
    pytest.param(dict(grad_filter=None), TypeError, "grad_filter", id="filter"),
]


@pytest.mark.parametrize(("bad", "error", "message"), BAD)
def test_bad_input_is_one_line(bad: dict[str, Any], error: type[Exception], message: str) -> None:
    hidden, weight, ids = data()
    ids = bad.pop("ids", ids)
    with pytest.raises(error, match=message) as raised:
        linear_log_probs(hidden, weight, ids, **bad)
    assert "\n" not in str(raised.value)


def test_double_backward_is_refused() -> None:
    hidden, weight, ids = data()
    out = linear_log_probs(hidden, weight, ids.repeat(2, 1).t(), entropy=True)
    (first,) = torch.autograd.grad(out.log_probs.square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        first.sum().backward()


def test_compiles_as_one_graph() -> None:
    hidden, weight, ids = data()
    ids = torch.stack((ids, ids.flip(0), ids), 1)
    own = torch.rand(N) + 0.5

    def step(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        out = linear_log_probs(
            hidden, weight, ids, temperature=own, entropy=True, sum_p_squared=True, argmax=True, top_k=3, softcap=5.0
        )
        assert out.entropy is not None
        return (out.log_probs.sum() + out.entropy.sum(), *outputs(out))

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        objective, *values = function(hidden, weight)
        results.append((*values, *torch.autograd.grad(objective, (hidden, weight))))
    for ours, compiled in zip(*results, strict=True):
        torch.testing.assert_close(ours, compiled)


def test_adds_into_given_buffer() -> None:
    hidden, weight, ids = data()
    ids = ids.repeat(2, 1).t()
    (expected,) = torch.autograd.grad(linear_log_probs(hidden, weight, ids).log_probs.sum(), weight)
    buffer = torch.ones(V, D)
    linear_log_probs(hidden, weight, ids, grad_weight_out=buffer).log_probs.sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(buffer, 1 + expected)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_autocast_casts_as_linear_does(softcap: float | None) -> None:
    hidden, weight, ids = data()
    with torch.autocast("cpu", torch.bfloat16):
        out = linear_log_probs(hidden, weight, ids, softcap=softcap)
    hidden, weight = hidden.detach().bfloat16(), weight.detach().bfloat16()
    truth = reference.linear_log_probs(hidden.double(), weight.double(), ids, softcap=softcap)
    baseline = reference.linear_log_probs(hidden, weight, ids, softcap=softcap)
    assert_no_worse(out.log_probs, baseline.log_probs, truth.log_probs)
