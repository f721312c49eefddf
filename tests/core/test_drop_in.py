"""``linear_cross_entropy`` beside torch's function of that name, on torch's own samples; and gradcheck in float64."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cce_dist import GradFilter, groups, linear_cross_entropy, linear_log_probs

if hasattr(F, "linear_cross_entropy"):
    from torch.testing._internal.common_methods_invocations import op_db
else:
    op_db = []
OPS = [op for op in op_db if op.name.endswith("linear_cross_entropy")]


def values(call: Any, input: Tensor, *args: Any, **options: Any) -> list[Tensor | None]:
    """Return a call's loss and its gradients, of weights other than 1 for losses of a token each."""
    leaves = [x for x in (input, *args, *options.values()) if isinstance(x, Tensor) and x.requires_grad]
    loss = call(input, *args, **options)
    upstream = torch.linspace(1, 2, loss.numel(), dtype=loss.dtype).view(loss.shape)
    return [loss, *torch.autograd.grad(loss, leaves, upstream, allow_unused=True)]


@pytest.mark.skipif(not OPS, reason="this torch has no linear_cross_entropy")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_torchs_own_samples(dtype: torch.dtype) -> None:
    """All samples with a [V, D] weight and class ids; the others are refused."""
    num_equal = 0
    for op in OPS:
        for sample in op.sample_inputs("cpu", dtype, requires_grad=True):
            weight, target = sample.args[:2]
            if weight.dim() != 2 or target.is_floating_point():
                with pytest.raises((ValueError, TypeError)):
                    linear_cross_entropy(sample.input, *sample.args, **sample.kwargs)
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch says where it ignores ``options``
                wanted = values(op.op, sample.input, *sample.args, **sample.kwargs)
            ours = values(linear_cross_entropy, sample.input, *sample.args, **sample.kwargs)
            torch.testing.assert_close(ours, wanted)
            num_equal += 1
    assert num_equal > 50


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum-smoothing": {"reduction": "sum", "label_smoothing": 0.1},
    "none-softcap-z": {"reduction": "none", "softcap": 3.0, "z_loss_weight": 0.1},
    "scale-divisor": {"logit_scale": 0.7, "num_tokens": 5},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradcheck(options: dict[str, Any]) -> None:
    """Catches a sum or a statistic of the torch backend that is not in float64."""
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(shape, dtype=torch.float64) for shape in ((6, 4), (9, 4), (9,)))
    labels = torch.tensor([0, 8, -100, 3, 3, 5])
    given = [x.requires_grad_() for x in (hidden, weight, bias)]
    assert torch.autograd.gradcheck(lambda h, w, b: linear_cross_entropy(h, w, labels, linear_bias=b, **options), given)


def test_float64_is_served_by_the_loss_on_the_torch_backend_alone() -> None:
    hidden, weight, labels = torch.randn(6, 4).double(), torch.randn(9, 4).double(), torch.arange(6)
    weights = torch.rand(9).double()
    loss = linear_cross_entropy(hidden, weight, labels, weight=weights, label_smoothing=0.1)
    torch.testing.assert_close(loss, F.cross_entropy(hidden @ weight.T, labels, weights, label_smoothing=0.1))
    filtered = linear_cross_entropy(hidden.requires_grad_(), weight, labels, grad_filter=GradFilter(always=True))
    assert torch.autograd.grad(filtered, hidden)[0].dtype == filtered.dtype == torch.float64
    with pytest.raises(TypeError, match="float64, which the torch backend alone takes"):
        linear_cross_entropy(hidden, weight, labels, backend="triton")
    with pytest.raises(TypeError, match="input must be one of float32, bfloat16, float16, got"):
        linear_log_probs(hidden, weight, labels)


@pytest.mark.parametrize(
    ("rows", "divisor", "is_compiled"), [(4, 7, False), (4, None, True), (None, 7, True), (None, None, False)]
)
def test_float64_in_groups_and_in_a_graph(rows: int | None, divisor: int | None, is_compiled: bool) -> None:
    """Catches a fake that promises fp32, and the reciprocal of a divisor in fp32, which is off by 3e-8."""
    hidden, weight, labels = torch.randn(6, 4).double(), torch.randn(9, 4).double(), torch.arange(6)
    x, w = hidden.requires_grad_(), weight.requires_grad_()
    ours: Any = linear_cross_entropy
    if is_compiled:
        ours = torch.compile(ours, backend="aot_eager", fullgraph=True)
    with groups.of_rows(rows):
        loss = ours(x, w, labels, num_tokens=divisor)
    wanted = F.cross_entropy(x @ w.T, labels, reduction="sum") / (divisor or 6)
    found, right = ((value, *torch.autograd.grad(value, (x, w))) for value in (loss, wanted))
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-13)


def test_float64_upstream_gradients_that_differ_in_the_ninth_digit() -> None:
    """Catches fp32's rounding as the measure of a common factor, and expected weights in fp32."""
    x, w = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((6, 4), (9, 4)))
    labels, upstream = torch.arange(6), torch.linspace(1, 2, 6, dtype=torch.float64)
    apart = 1 + 1e-9 * torch.arange(6).double()
    wanted = torch.autograd.grad(F.cross_entropy(x @ w.T, labels, reduction="none"), (x, w), upstream * apart)
    for expected in (upstream, upstream * apart):
        with groups.of_rows(4):
            loss = linear_cross_entropy(x, w, labels, reduction="none", expected_weights=expected)
        found = torch.autograd.grad(loss, (x, w), upstream * apart)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)
