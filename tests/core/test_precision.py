"""torch's two settings of how fp32 matrices are multiplied. Its older one raises once the newer one was used."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from shards import DEVICE

from cce_dist import linear_cross_entropy
from cce_dist.kernels.precision import fp32_precision, product_on_cpu
from cce_dist.tools.verify.check import assert_no_worse

MATMUL = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def _settings_stay() -> Iterator[None]:
    newer = getattr(MATMUL, "fp32_precision", None)
    yield
    if newer is not None:
        MATMUL.fp32_precision = newer
    torch.set_float32_matmul_precision("highest")


@pytest.mark.skipif(not hasattr(MATMUL, "fp32_precision"), reason="this torch has the older setting alone")
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_the_newer_setting_is_asked(backend: Any) -> None:
    """Catches: a call that asks the older setting, which raises."""
    if backend == "triton":
        pytest.importorskip("triton")
    hidden, weight = torch.ones(4, 16, device=DEVICE, requires_grad=True), torch.ones(20, 16, device=DEVICE)
    for newer, wanted in (("tf32", "tf32"), ("ieee", "ieee")):
        MATMUL.fp32_precision = newer
        assert fp32_precision() == wanted
        linear_cross_entropy(hidden, weight, torch.arange(4, device=DEVICE), backend=backend).backward()


def test_bf16_on_a_cpu_has_fp32_sums_and_leaves_the_setting() -> None:
    """Catches: sums or results in bf16, and fp32 matmuls of the caller that are rounded from then on."""
    a, b = torch.randn(40, 64).bfloat16(), torch.randn(64, 50).bfloat16()
    one, other = (torch.randn(64, 64) for _ in range(2))
    before, state = one @ other, torch.get_float32_matmul_precision()
    assert_no_worse(product_on_cpu(a, b), a.float() @ b.float(), a.double() @ b.double())
    assert torch.equal(one @ other, before) and torch.get_float32_matmul_precision() == state


def test_the_older_setting_is_followed() -> None:
    for older, wanted in (("high", "tf32"), ("medium", "tf32"), ("highest", "ieee")):
        torch.set_float32_matmul_precision(older)
        assert fp32_precision() == wanted
