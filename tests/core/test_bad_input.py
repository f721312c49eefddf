"""What a stranger passes by mistake: one line that names the argument, before any kernel or collective. One table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.refused import Bad, NoOperator, assert_refused
from torch import nn

from cce_dist import GradFilter, VocabParallelHead, VocabShard, linear_cross_entropy

N, D, V = 6, 8, 20
NAN, INF = float("nan"), float("inf")


def operands() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "input": torch.randn(N, D, generator=generator, requires_grad=True),
        "linear_weight": torch.randn(V, D, generator=generator, requires_grad=True),
        "target": torch.randint(V, (N,), generator=generator),
    }


@pytest.fixture
def data() -> dict[str, Any]:
    return operands()


def jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.randn(2, D), torch.randn(4, D)], layout=torch.jagged)


def meta() -> dict[str, torch.Tensor]:
    return {
        "input": torch.empty(N, D, device="meta"),
        "linear_weight": torch.empty(V, D, device="meta"),
        "target": torch.empty(N, device="meta", dtype=torch.int64),
    }


def empty(num_rows: int, hidden_size: int) -> dict[str, torch.Tensor]:
    return {"input": torch.zeros(N, hidden_size), "linear_weight": torch.zeros(num_rows, hidden_size)}


def bad(name: str, error: type[Exception], says: str, **change: Any) -> Bad:
    """Return the row of a loss of which these arguments are wrong; those that are functions are called first."""

    def call() -> None:
        wrong = {name: value() if isinstance(value, Callable) else value for name, value in change.items()}
        wrong |= wrong.pop("_all", {})
        linear_cross_entropy(**(operands() | wrong))

    return Bad(name, call, error, says)


REQUIRED, OPTIONAL = ("input", "linear_weight", "target"), ("linear_bias", "grad_weight_out")
NO_TENSORS = {"NoneType": None, "list": [0.0], "ndarray": np.zeros(2)}
TENSORS = [
    *(
        bad(f"{name}-{kind}", TypeError, f"{name} must be a tensor.*{kind}", **{name: value})
        for name in REQUIRED + OPTIONAL
        for kind, value in NO_TENSORS.items()
        if value is not None or name in REQUIRED
    ),
    *(
        bad(f"{name}-sparse", TypeError, f"{name}.*sparse", **{name: torch.zeros(V, D).to_sparse()})
        for name in REQUIRED + OPTIONAL
    ),
    bad("weight-csr", TypeError, "linear_weight.*sparse", linear_weight=lambda: torch.zeros(V, D).to_sparse_csr()),
    bad("input-nested", TypeError, "input.*nested", input=lambda: torch.nested.nested_tensor([torch.zeros(N, D)])),
    bad("input-jagged", TypeError, "input.*(nested|jagged)", input=jagged),
    bad("all-meta", ValueError, "input is on meta", _all=meta),
    bad("no-columns", ValueError, "input.*hidden size 0", _all=lambda: empty(V, 0)),
    bad("no-rows", ValueError, "linear_weight has no rows", _all=lambda: empty(0, D)),
    bad("bias-int", TypeError, "linear_bias must be .*int64", linear_bias=torch.zeros(V).long()),
    bad("hidden-size", ValueError, "hidden size 9, linear_weight 8", input=torch.zeros(N, D + 1)),
    bad("dtypes-differ", TypeError, "float16.*float32", input=torch.zeros(N, D).half()),
    bad("weight-not-2d", ValueError, r"\[V, D\]", linear_weight=torch.zeros(V)),
    bad("weight-emptied-by-zero-3", ValueError, r"\[V, D\]", linear_weight=torch.zeros(0)),
    bad("target-shape", ValueError, r"\(6,\).*\(7,\)", target=torch.zeros(N + 1).long()),
    bad("target-dtype", TypeError, "int64", target=torch.zeros(N)),
    bad("devices", ValueError, "cpu.*meta", target=torch.zeros(N, device="meta").long()),
    bad("bias-shape", ValueError, r"\[20\]", linear_bias=torch.zeros(V + 1)),
    bad("buffer-shape", ValueError, "grad_weight_out", grad_weight_out=torch.zeros(V, D + 1)),
    bad(
        "buffer-strides",
        ValueError,
        "grad_weight_out must be contiguous",
        grad_weight_out=torch.zeros(V, 2 * D)[:, ::2],
    ),
    bad("target-probabilities", TypeError, "target.*probabilities", target=torch.full((N, V), 1 / V)),
]
SMOOTHED_CLASSES: dict[str, Any] = dict(weight=torch.ones(V), label_smoothing=0.1)
OPTIONS = [
    bad("shard-of-another-weight", ValueError, "23 rows.*20", shard=VocabShard(0, V + 3, V)),
    bad("reduction", ValueError, "reduction.*avg", reduction="avg"),
    bad("reduce-dtype", TypeError, "reduce_dtype.*int8", reduce_dtype=torch.int8),
    bad("backend", ValueError, "backend", backend="cuda"),
    bad("smoothing", ValueError, "label_smoothing", label_smoothing=1.5),
    bad("softcap-zero", ValueError, "softcap", softcap=0.0),
    bad("scale-nan", ValueError, "logit_scale", logit_scale=NAN),
    bad("num-tokens-zero", ValueError, "num_tokens", num_tokens=0),
    bad("num-tokens-of-a-sum", ValueError, "num_tokens", num_tokens=5, reduction="sum"),
    bad("filter-a-number", TypeError, "GradFilter", grad_filter=1e-4),
    bad("workspace-zero", ValueError, "workspace_bytes", workspace_bytes=0),
    bad("partial-slices", ValueError, "partial", sequence_parallel=True, input_grad="partial"),
    bad("sequence-parallel-number", TypeError, "sequence_parallel must be a bool.*int", sequence_parallel=1),
    bad("scale-zero-learnable", ValueError, "logit_scale is 0", logit_scale=torch.zeros((), requires_grad=True)),
    bad("num-tokens-of-each-token", ValueError, "num_tokens.*0-d", num_tokens=torch.ones(2)),
    bad("shard-tuple", TypeError, "shard must be a VocabShard.*tuple", shard=(0, V, V)),
    bad("ignore-index-bool", TypeError, "ignore_index must be an integer.*bool", ignore_index=True),
    bad("ignore-index-float", TypeError, "ignore_index must be an integer.*float", ignore_index=-100.0),
    bad("ignore-index-past-int64", ValueError, "ignore_index", ignore_index=2**63),
    bad("workspace-float", TypeError, "workspace_bytes must be an integer.*float", workspace_bytes=1e8),
    bad("workspace-past-int64", ValueError, "workspace_bytes", workspace_bytes=2**63),
    bad("num-tokens-nan", ValueError, "num_tokens.*nan", num_tokens=NAN),
    bad("num-tokens-inf", ValueError, "num_tokens.*inf", num_tokens=INF),
    bad("num-tokens-negative", ValueError, "num_tokens.*-5", num_tokens=-5.0),
    bad("num-tokens-bool", TypeError, "num_tokens.*bool", num_tokens=True),
    bad("num-tokens-tensor-nan", ValueError, "num_tokens.*nan", num_tokens=torch.tensor(NAN)),
    bad("num-tokens-tensor-negative", ValueError, "num_tokens.*-3", num_tokens=torch.tensor(-3)),
    bad("num-tokens-rounded", TypeError, "num_tokens is torch.bfloat16", num_tokens=torch.tensor(5.0).bfloat16()),
    bad("num-tokens-tensor-bool", TypeError, "num_tokens.*bool", num_tokens=torch.tensor(True)),
    bad("num-tokens-tensor-complex", TypeError, "num_tokens.*complex", num_tokens=torch.tensor(1j)),
    bad("num-tokens-tensor-meta", ValueError, "num_tokens is on meta", num_tokens=torch.tensor(3, device="meta")),
    bad("softcap-inf", ValueError, "softcap.*inf", softcap=INF),
    bad("softcap-past-fp32", ValueError, "softcap.*1e\\+300", softcap=1e300),
    bad("softcap-below-fp32", ValueError, "softcap.*1e-300", softcap=1e-300),
    bad("softcap-huge-int", ValueError, "softcap", softcap=10**400),
    bad("softcap-bool", TypeError, "softcap must be a number.*bool", softcap=True),
    bad("softcap-string", TypeError, "softcap must be a number.*str", softcap="a"),
    bad("softcap-learnable", TypeError, "softcap.*gradient", softcap=torch.tensor(3.0, requires_grad=True)),
    bad("scale-none", TypeError, "logit_scale must be a number.*NoneType", logit_scale=None),
    bad("scale-complex", TypeError, "logit_scale must be a number.*complex", logit_scale=1j),
    bad("scale-of-each-token", ValueError, "logit_scale.*0-d", logit_scale=torch.ones(N)),
    bad("z-loss-string", TypeError, "z_loss_weight must be a number.*str", z_loss_weight="a"),
    bad("smoothing-string", TypeError, "label_smoothing must be a number.*str", label_smoothing="a"),
    bad("return-aux-string", TypeError, "return_aux must be a bool or a sequence of names.*'yes'", return_aux="yes"),
    bad("return-aux-empty", TypeError, "return_aux must be a bool or a sequence of names", return_aux=()),
    bad("return-aux-name", ValueError, "return_aux must be one of .*'accuracy'", return_aux=("nll", "accuracy")),
    bad(
        "expected-shape",
        ValueError,
        r"must be \(6,\).*got \(5,\)",
        reduction="none",
        expected_weights=torch.ones(N - 1),
    ),
    bad("expected-device", ValueError, "on meta", reduction="none", expected_weights=torch.ones(N, device="meta")),
    bad("expected-of-a-mean", ValueError, 'reduction is "mean"', expected_weights=torch.ones(N)),
    bad("expected-number", TypeError, "expected_weights must be a bool", reduction="none", expected_weights=0.5),
    bad("expected-complex", TypeError, "must be real numbers", reduction="none", expected_weights=torch.ones(N) * 1j),
    bad("class-weights-shape", ValueError, r"weight must be \[20\].*\(21,\)", weight=torch.ones(V + 1)),
    bad("class-weights-int", TypeError, "weight must be .*int64", weight=torch.ones(V).long()),
    bad("class-weights-list", TypeError, "weight must be a tensor.*list", weight=[1.0] * V),
    bad("class-weights-learnable", TypeError, "weight.*gradient", weight=torch.ones(V, requires_grad=True)),
    bad("class-weights-softcap", ValueError, "weight with label_smoothing.*softcap", softcap=3.0, **SMOOTHED_CLASSES),
]


@pytest.mark.parametrize("rows", [TENSORS, OPTIONS], ids=["tensors", "options"])
def test_a_bad_argument_is_named(rows: list[Bad]) -> None:
    assert_refused(rows)


any_filter: Any = GradFilter
any_head: Any = VocabParallelHead
any_shard: Any = VocabShard
OBJECTS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: any_filter(eps="a"), TypeError, "eps"),
    (lambda: any_filter(eps=torch.tensor(0.1)), TypeError, "eps"),
    (lambda: any_filter(eps=1.0), ValueError, "eps"),
    (lambda: any_filter(hidden="no"), TypeError, "hidden"),
    (lambda: any_shard(0, 5, 10), ValueError, "without a group"),
    (lambda: any_shard(5, 3, 10), ValueError, "start <= stop"),
    (lambda: any_shard(0, 5, 0), ValueError, "vocab_size"),
    (lambda: any_shard(0, 5.0, 5), TypeError, "stop"),
    (lambda: any_shard(0, 5, None), TypeError, "vocab_size"),
    (lambda: any_shard(0, 5, 5, "tp"), TypeError, "group must be a ProcessGroup or None.*str"),
    (lambda: any_shard.even(10, None, multiple_of=0), ValueError, "multiple_of"),
    (lambda: any_shard.even(20, 2), TypeError, "group.*int"),
    (lambda: any_head(D, V, group="tp"), TypeError, "group.*str"),
    (lambda: any_head(D, V, mesh="tp"), TypeError, "mesh.*str"),
    (lambda: any_head(D, V, weight=nn.Embedding(V, D)), TypeError, "weight.*Embedding"),
    (lambda: any_head(D, V, init_std=-1), ValueError, "init_std"),
    (lambda: any_head(D, V, class_weights=[1.0] * V), TypeError, "class_weights.*list"),
    (lambda: any_head(D, V, class_weights=torch.ones(V + 1)), ValueError, r"class_weights must be \["),
    (lambda: any_head(D, V, weight=nn.Parameter(torch.ones(V))), ValueError, r"^weight must be \["),
    (lambda: any_head(D, V, grad_weight_out=torch.zeros(D, V)), ValueError, "grad_weight_out"),
    (lambda: any_head(0, V), ValueError, "hidden_size"),
    (lambda: any_head(8.0, V), TypeError, "hidden_size"),
    (lambda: any_head(D, 0), ValueError, "vocab_size"),
    (lambda: any_head(D, V, soft_cap=3.0), TypeError, "soft_cap"),
    (lambda: any_head(D, V, softcap=-1.0), ValueError, "softcap"),
    (lambda: any_head(D, V, shard=VocabShard(0, V, V)), TypeError, "shard"),
    (lambda: any_head(D, V, num_tokens=3), TypeError, "num_tokens"),
]


def test_an_impossible_object_is_named() -> None:
    assert_refused(Bad(f"row {number}, {row[2]}", *row) for number, row in enumerate(OBJECTS))


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles on this machine, it does not interpret")
def test_bf16_is_refused_by_the_interpreter(data, monkeypatch: pytest.MonkeyPatch):
    """Left alone, the interpreter misreads bf16: a loss of 4e10, without a word."""
    monkeypatch.setattr("cce_dist.decide.MISREAD", (torch.bfloat16,))
    low = {name: x.bfloat16() if x.is_floating_point() else x for name, x in data.items()}
    with NoOperator(), pytest.raises(TypeError, match=r"bfloat16.*interpreter"):
        linear_cross_entropy(**low, backend="triton")


def test_labels_outside_the_vocabulary_up_to_the_ends_of_int64(data):
    for label in (-1, V, -2, 2**40, 2**63 - 1, -(2**63)):
        with pytest.raises(IndexError, match=rf"target\[0\].* is {label}"):
            linear_cross_entropy(**(data | {"target": torch.full((N,), label)}))
    for ignored in (2**63 - 1, -(2**63)):
        labels = data["target"].clone()
        labels[::2] = ignored
        ours = linear_cross_entropy(**(data | {"target": labels}), ignore_index=ignored)
        torch.testing.assert_close(
            ours, linear_cross_entropy(**(data | {"target": labels.masked_fill(labels == ignored, -100)}))
        )


def test_ignore_index_none_is_torchs(data):
    """``F.linear_cross_entropy`` maps None, its default, to -100."""
    data["target"][1] = -100
    ours = linear_cross_entropy(**data, ignore_index=None)  # type: ignore[call-overload]
    if hasattr(F, "linear_cross_entropy"):  # since torch 2.13
        torch.testing.assert_close(ours, F.linear_cross_entropy(**data, ignore_index=None))
    torch.testing.assert_close(ours, linear_cross_entropy(**data, ignore_index=-100))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_weight_that_is_not_finite_is_nothing_to_ignored_tokens(data, number, backend):
    """Where all labels are ignored the gradients are 0. Catches 0 times infinity in dE, dC and dbias."""
    data["target"].fill_(-100)
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    hidden, weight, bias = (
        x.detach().to(device) for x in (data["input"], data["linear_weight"].clone(), torch.zeros(V))
    )
    weight[3, 2] = bias[1] = number
    operands = tuple(x.requires_grad_() for x in (hidden, weight, bias))
    labels = data["target"].to(device)
    loss = linear_cross_entropy(hidden, weight, labels, linear_bias=bias, backend=backend, options=None)
    assert loss == 0 and not any(gradient.any() for gradient in torch.autograd.grad(loss, operands))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_no_tokens_at_all_is_no_nan(data, dtype):
    """A batch of which this rank has nothing to learn, and a global count of 0: loss 0, gradients 0."""
    data["target"].fill_(-100)
    loss = linear_cross_entropy(**data, num_tokens=torch.tensor(0, dtype=dtype))
    gradients = torch.autograd.grad(loss, (data["input"], data["linear_weight"]))
    assert loss == 0 and not any(gradient.any() for gradient in gradients)


def test_integers_of_numpy_are_integers(data):
    options: dict[str, Any] = dict(
        ignore_index=np.int64(-100), num_tokens=np.int64(5), workspace_bytes=np.int64(1 << 20)
    )
    ours = linear_cross_entropy(**data, **options)
    torch.testing.assert_close(ours, linear_cross_entropy(**data, num_tokens=5))
