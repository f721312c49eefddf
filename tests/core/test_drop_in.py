"""``linear_cross_entropy`` beside torch's function of that name, on torch's own samples; and gradcheck in float64."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cce_dist import GradFilter, linear_cross_entropy, linear_log_probs

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


def test_float64_in_a_graph() -> None:
    """Catches a fake that promises fp32."""
    hidden, weight, labels = torch.randn(6, 4).double(), torch.randn(9, 4).double().requires_grad_(), torch.arange(6)
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(
        values(compiled, hidden, weight, labels), values(linear_cross_entropy, hidden, weight, labels)
    )
