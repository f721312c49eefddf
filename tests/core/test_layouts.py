"""Memory that is not read, and labels cut out of others, on both backends: the result has the bits of the contiguous call.

Random calls (test_fuzz.py) have every argument in every layout. Triton runs interpreted on the CPU, compiled on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cce_dist import GradFilter, VocabShard, linear_cross_entropy
from cce_dist.tools.verify.views import LAYOUTS, WRITABLE, constant, view_of

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
N, D, V = (256, 64, 640) if GPU else (12, 8, 40)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, on infinities inside the interpreter

AUX = ("nll", "lse", "target_logit", "entropy", "z_loss")
EVERYTHING = dict(label_smoothing=0.1, logit_scale=0.7, softcap=5.0, z_loss_weight=1e-2)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "none": dict(reduction="none"),
    "everything": dict(reduction="none", return_aux=True, **EVERYTHING),
    "filter": dict(reduction="none", grad_filter=GradFilter(eps=0.02, always=True)),
}


@pytest.fixture(params=["torch", "triton"])
def backend(request) -> str:
    return request.param


def arguments(*alike: str) -> dict[str, Tensor]:
    """The values; those of the named arguments equal along dim 0, so that an expanded view can show them."""
    torch.manual_seed(0)
    values = {
        "input": torch.randn(2, N // 2, D),
        "linear_weight": torch.randn(V, D),
        "target": torch.randint(V - 7, (2, N // 2)),
        "linear_bias": torch.randn(V),
        "grad_output": torch.randn(2, N // 2),
        "num_tokens": torch.tensor(37),
        "weight": torch.rand(V),
        "grad_weight_out": torch.ones(V, D),
    }
    values["target"][0, ::3] = -100
    return {name: (constant(x) if name in alike else x).to(DEVICE) for name, x in values.items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    differ = [name for name in one if not torch.equal(one[name], other[name])]
    assert not differ, f"differ from the contiguous call: {differ}"


def run(values: dict[str, Tensor], options: dict[str, Any], backend: str, with_buffer: bool) -> dict[str, Tensor]:
    """Loss, aux outputs and gradients; ``grad_output`` comes from above to every output that has the labels' shape."""
    inputs = [values[name].requires_grad_() for name in ("input", "linear_weight", "linear_bias")]
    if options.get("reduction", "mean") == "mean":
        vocab_size = options["shard"].vocab_size if "shard" in options else V
        options = options | {"num_tokens": values["num_tokens"], "weight": values["weight"][:vocab_size]}
    buffer = values["grad_weight_out"] if with_buffer else None
    out = linear_cross_entropy(
        inputs[0],
        inputs[1],
        values["target"],
        linear_bias=inputs[2],
        grad_weight_out=buffer,
        backend=backend,
        **options,
    )
    outputs = {"loss": out} if isinstance(out, Tensor) else {name: getattr(out, name) for name in ("loss", *AUX)}
    from_above = [values["grad_output"] if x.dim() else torch.ones_like(x) for x in outputs.values()]
    grads = torch.autograd.grad(list(outputs.values()), inputs, from_above, allow_unused=with_buffer)
    d_weight = grads[1] if buffer is None else buffer
    return outputs | dict(zip(("dE", "dC", "dbias"), (grads[0], d_weight, grads[2]), strict=True))


@pytest.mark.parametrize(
    "take",
    [
        pytest.param(lambda ids: torch.stack((ids + 1, ids), -1)[..., 1], id="second-of-pairs"),
        pytest.param(lambda ids: torch.cat((ids + 1, ids), 1)[:, ids.shape[1] :], id="last-columns"),
        pytest.param(lambda ids: torch.repeat_interleave(ids, 2, 1)[:, ::2], id="every-second"),
        pytest.param(lambda ids: torch.nn.functional.pad(ids, (1, 0))[:, 1:], id="shifted-by-one"),
    ],
)
def test_labels_sliced_from_a_batch(take, backend):
    """The ways in which people cut labels out of token ids; Triton reads int64, into which int32 is copied anyway."""
    for dtype in (torch.int64, torch.int32) if backend == "torch" else (torch.int64,):
        values = arguments()
        values["target"] = take(values["target"].to(dtype))
        assert torch.equal(values["target"], arguments()["target"].to(dtype))
        assert_same(*(run(x, OPTIONS["none"], backend, False) for x in (values, arguments())))


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout not in WRITABLE])
def test_a_buffer_with_strides_is_refused(layout, backend):
    """Catches a write as if the buffer were contiguous: past its end, or into what lies between its rows."""
    values = arguments("grad_weight_out")
    values["grad_weight_out"] = view_of(values["grad_weight_out"], layout)
    with pytest.raises(ValueError, match="grad_weight_out must be contiguous"):
        run(values, OPTIONS["plain"], backend, True)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("option", ["everything", "filter"])
def test_hidden_states_of_ignored_tokens_are_not_read(option, value, backend):
    """Padding is often memory that nobody has written to. Catches 0 times NaN in dC, dE and dbias."""
    values, clean = arguments(), arguments()
    for hidden, filling in ((clean["input"], 0.0), (values["input"], value)):
        hidden[values["target"] == -100] = filling
    got, expected = (run(x, OPTIONS[option], backend, False) for x in (values, clean))
    assert_same(got, expected)


@pytest.mark.parametrize("option", ["plain", "everything", "filter"])
def test_padding_rows_of_the_weight_are_not_read(option, backend):
    """Catches 0 times NaN where a control variate for dropped elements is multiplied by all rows of the weight."""
    options = OPTIONS[option] | {"shard": VocabShard(0, V, V - 7)}
    values, clean = arguments(), arguments()
    for name, filling in (("linear_weight", float("nan")), ("linear_bias", float("nan"))):
        values[name][V - 7 :] = filling
        clean[name][V - 7 :] = 0.0
    got, expected = (run(x, options, backend, False) for x in (values, clean))
    assert_same(got, expected)
