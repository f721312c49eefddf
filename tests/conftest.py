"""One thread per process, one seed per test, and Triton interpreted where there is no GPU."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Read once, when a kernel is decorated: it must be set before the first import of triton.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def _deterministic() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
