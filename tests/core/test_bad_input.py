"""What a stranger passes by mistake: one line that names the argument, before any kernel or collective. One table."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.dense import draw
from support.refused import NoOperator, assert_changes_refused, refused
from torch import nn

from cce_dist import GradFilter, VocabParallelHead, VocabShard, linear_cross_entropy

N, D, V = 6, 8, 20
NAN = float("nan")


def operands() -> dict[str, Any]:
    return dict(zip(REQUIRED, draw(N, D, V), strict=True))


data = pytest.fixture(operands, name="data")


def bad(error: type[Exception], says: str, **change: Any) -> tuple[dict[str, Any], type[Exception], str]:
    """Return a row: arguments of a loss that are wrong, and how they are refused."""
    return change, error, says


REQUIRED, OPTIONAL = ("input", "linear_weight", "target"), ("linear_bias", "grad_weight_out")
NUMBERS = ("label_smoothing", "logit_scale", "softcap", "z_loss_weight", "num_tokens")
NO_TENSORS = {"NoneType": None, "list": [0.0], "ndarray": np.zeros(2)}


def tensors() -> list[Any]:
    """Return rows of tensors, some of which torch warns of as they are made."""
    bad_kinds = [
        bad(TypeError, f"{name} must be a tensor.*{kind}", **{name: value})
        for name in REQUIRED + OPTIONAL
        for kind, value in NO_TENSORS.items()
        if value is not None or name in REQUIRED
    ]
    empty = torch.zeros(V, D).to_sparse()
    sparse = [bad(TypeError, f"{name}.*sparse", **{name: empty}) for name in REQUIRED + OPTIONAL]
    jagged = torch.nested.nested_tensor([torch.randn(2, D), torch.randn(4, D)], layout=torch.jagged)
    of_meta = {name: x.detach().to("meta") for name, x in operands().items()}
    return [
        *bad_kinds,
        *sparse,
        *(bad(TypeError, f"{x}.*sparse", **{x: torch.ones(V, D).to_sparse_csr()}) for x in OPTIONAL),
        *(bad(TypeError, f"{x} is sparse", **{x: torch.tensor(0.3).to_sparse()}) for x in NUMBERS),
        *(bad(ValueError, f"{x} is on meta", **{x: torch.tensor(0.3, device="meta")}) for x in NUMBERS),
        bad(TypeError, "softcap is nested", softcap=torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
        bad(TypeError, "input.*nested", input=torch.nested.nested_tensor([torch.zeros(N, D)])),
        bad(TypeError, "input.*(nested|jagged)", input=jagged),
        bad(ValueError, "input is on meta", **of_meta),
        bad(ValueError, "input.*hidden size 0", input=torch.zeros(N, 0), linear_weight=torch.zeros(V, 0)),
        bad(ValueError, "linear_weight has no rows", linear_weight=torch.zeros(0, D)),
        bad(TypeError, "linear_bias must be .*int64", linear_bias=torch.zeros(V).long()),
        bad(ValueError, "hidden size 9, linear_weight 8", input=torch.zeros(N, D + 1)),
        bad(TypeError, "float16.*float32", input=torch.zeros(N, D).half()),
        bad(ValueError, r"\[V, D\]", linear_weight=torch.zeros(V)),
        bad(ValueError, r"\(6,\).*\(7,\)", target=torch.zeros(N + 1).long()),
        bad(TypeError, "int64", target=torch.zeros(N)),
        bad(ValueError, "cpu.*meta", target=torch.zeros(N, device="meta").long()),
        bad(ValueError, r"\[20\]", linear_bias=torch.zeros(V + 1)),
        bad(ValueError, "grad_weight_out", grad_weight_out=torch.zeros(V, D + 1)),
        bad(ValueError, "grad_weight_out must be contiguous", grad_weight_out=torch.zeros(V, 2 * D)[:, ::2]),
        bad(TypeError, "target.*probabilities", target=torch.full((N, V), 1 / V)),
    ]


SMOOTHED_CLASSES: dict[str, Any] = dict(weight=torch.ones(V), label_smoothing=0.1)
OPTIONS = [
    bad(ValueError, "23 rows.*20", shard=VocabShard(0, V + 3, V)),
    bad(ValueError, "reduction.*avg", reduction="avg"),
    bad(TypeError, "reduce_dtype.*int8", reduce_dtype=torch.int8),
    bad(ValueError, "backend", backend="cuda"),
    bad(ValueError, "label_smoothing", label_smoothing=1.5),
    bad(ValueError, "softcap", softcap=0.0),
    bad(ValueError, "logit_scale", logit_scale=NAN),
    bad(ValueError, "num_tokens", num_tokens=0),
    bad(ValueError, "num_tokens", num_tokens=5, reduction="sum"),
    bad(TypeError, "GradFilter", grad_filter=1e-4),
    bad(ValueError, "workspace_bytes", workspace_bytes=0),
    bad(ValueError, "partial", sequence_parallel=True, input_grad="partial"),
    bad(TypeError, "sequence_parallel must be a bool.*int", sequence_parallel=1),
    bad(ValueError, "logit_scale is 0", logit_scale=torch.zeros((), requires_grad=True)),
    bad(ValueError, "num_tokens.*0-d", num_tokens=torch.ones(2)),
    bad(TypeError, "shard must be a VocabShard.*tuple", shard=(0, V, V)),
    bad(TypeError, "ignore_index must be an integer.*bool", ignore_index=True),
    bad(ValueError, "ignore_index", ignore_index=2**63),
    bad(TypeError, "workspace_bytes must be an integer.*float", workspace_bytes=1e8),
    bad(ValueError, "num_tokens.*nan", num_tokens=NAN),
    bad(TypeError, "num_tokens.*bool", num_tokens=True),
    bad(ValueError, "num_tokens.*-3", num_tokens=torch.tensor(-3)),
    bad(TypeError, "num_tokens is torch.bfloat16", num_tokens=torch.tensor(5.0).bfloat16()),
    bad(TypeError, "num_tokens.*bool", num_tokens=torch.tensor(True)),
    bad(TypeError, "num_tokens.*complex", num_tokens=torch.tensor(1j)),
    bad(TypeError, "num_tokens.*uint64", num_tokens=torch.tensor(3, dtype=torch.uint64)),
    bad(ValueError, "backend must be one of", backend=np.ones(2)),
    bad(TypeError, "reduce_dtype must be", reduce_dtype=np.ones(2)),
    *(bad(ValueError, "weight must be finite", weight=torch.ones(V).double() * s) for s in (1e-50, 1e40)),
    bad(ValueError, "weight must be finite", weight=torch.full((V,), 1e-40)),
    bad(ValueError, "softcap.*1e\\+300", softcap=1e300),
    bad(ValueError, "softcap.*1e-300", softcap=1e-300),
    bad(ValueError, "softcap", softcap=10**400),
    bad(TypeError, "softcap must be a number.*str", softcap="a"),
    bad(TypeError, "softcap.*gradient", softcap=torch.tensor(3.0, requires_grad=True)),
    bad(TypeError, "logit_scale must be a number.*NoneType", logit_scale=None),
    bad(ValueError, "logit_scale.*0-d", logit_scale=torch.ones(N)),
    bad(TypeError, "z_loss_weight must be a number.*str", z_loss_weight="a"),
    bad(TypeError, "label_smoothing must be a number.*str", label_smoothing="a"),
    bad(TypeError, "return_aux must be a bool or a sequence of names.*'yes'", return_aux="yes"),
    bad(TypeError, "return_aux must be a bool or a sequence of names", return_aux=()),
    bad(ValueError, "return_aux must be one of .*'accuracy'", return_aux=("nll", "accuracy")),
    bad(ValueError, r"must be \(6,\).*got \(5,\)", reduction="none", expected_weights=torch.ones(N - 1)),
    bad(ValueError, "on meta", reduction="none", expected_weights=torch.ones(N, device="meta")),
    bad(ValueError, 'reduction is "mean"', expected_weights=torch.ones(N)),
    bad(TypeError, "expected_weights must be a bool", reduction="none", expected_weights=0.5),
    bad(TypeError, "must be real numbers", reduction="none", expected_weights=torch.ones(N) * 1j),
    bad(ValueError, r"weight must be \[20\].*\(21,\)", weight=torch.ones(V + 1)),
    bad(TypeError, "weight must be .*int64", weight=torch.ones(V).long()),
    bad(TypeError, "weight must be a tensor.*list", weight=[1.0] * V),
    bad(TypeError, "weight.*gradient", weight=torch.ones(V, requires_grad=True)),
    bad(ValueError, "weight with label_smoothing.*softcap", softcap=3.0, **SMOOTHED_CLASSES),
]


@pytest.mark.parametrize("rows", [tensors, lambda: OPTIONS], ids=["tensors", "options"])
def test_a_bad_argument_is_named(rows: Callable[[], list[Any]]) -> None:
    assert_changes_refused(linear_cross_entropy, operands(), rows(), NoOperator)


any_filter: Any = GradFilter
any_head: Any = VocabParallelHead
any_shard: Any = VocabShard
OBJECTS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: any_filter(eps="a"), TypeError, "eps"),
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
    (lambda: any_head(D, V, bias=torch.ones(V)), TypeError, "bias must be a bool, got Tensor"),
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


@pytest.mark.parametrize(("make", "error", "says"), OBJECTS, ids=[says for *_, says in OBJECTS])
def test_an_impossible_object_is_named(make: Callable[[], Any], error: type[Exception], says: str) -> None:
    with NoOperator(), refused(says, error):
        make()


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
        usual = labels.masked_fill(labels == ignored, -100)
        torch.testing.assert_close(ours, linear_cross_entropy(**(data | {"target": usual})))


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
    """Where all labels are ignored the gradients are 0, also if the global count is. Catches 0 times infinity, and 0 / 0."""
    data["target"].fill_(-100)
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    tensors = data["input"], data["linear_weight"].clone(), torch.zeros(V)
    hidden, weight, bias = (x.detach().to(device) for x in tensors)
    weight[3, 2] = bias[1] = number
    operands = tuple(x.requires_grad_() for x in (hidden, weight, bias))
    labels = data["target"].to(device)
    for count in (None, torch.tensor(0, device=device), torch.tensor(0.0, device=device)):
        given: dict[str, Any] = dict(linear_bias=bias, backend=backend, options=None, num_tokens=count)
        loss = linear_cross_entropy(hidden, weight, labels, **given)
        assert not any(gradient.any() for gradient in torch.autograd.grad(loss, operands)) and loss == 0


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_divisor_beyond_int64_is_a_number(data, backend):
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    data = {name: x.to(device) for name, x in data.items()}
    loss = linear_cross_entropy(**data, num_tokens=2**70, backend=backend)
    torch.testing.assert_close(loss * 2.0**70, linear_cross_entropy(**data, reduction="sum"))


def test_integers_of_numpy_are_integers(data):
    numbers = dict(ignore_index=-100, num_tokens=5, workspace_bytes=1 << 20)
    options: dict[str, Any] = {name: np.int64(number) for name, number in numbers.items()}
    ours = linear_cross_entropy(**data, **options)
    torch.testing.assert_close(ours, linear_cross_entropy(**data, num_tokens=5))
