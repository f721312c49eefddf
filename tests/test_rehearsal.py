"""Kernels compiled ahead of their launches, for a GPU that is not here. See rehearse_for_gpu.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def rehearse(*arguments: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("rehearse_for_gpu.py")
    return subprocess.run(
        [sys.executable, "-W", "ignore", script, *arguments], env=environment, capture_output=True, text=True
    )


def test_launches_find_their_kernels_compiled() -> None:
    """Catches a rehearsal that misses a variant, and one that breaks off."""
    said = rehearse("1")
    assert said.returncode == 0, said.stderr
    steps = dict(part.strip().split("\n", 1) for part in said.stdout.split("== ")[1:])
    assert len(steps) == 14
    assert all(line.endswith("twice 0 late") for line in steps.values()), said.stdout
    # A call of a kind that has come before has nothing to compile.
    assert steps["default"] == steps["default again"]
    assert steps["scale"] == steps["another scale"], "a number is a kind of its own"


def test_a_kernel_that_does_not_compile_is_told_by_its_launch() -> None:
    said = rehearse("1", "_grad_hidden_kernel")
    assert said.returncode == 1
    assert "add_d_hidden" in said.stderr and "RuntimeError: _grad_hidden_kernel does not compile" in said.stderr


@pytest.mark.slow
def test_without_rehearsals_launches_compile() -> None:
    said = rehearse("0")
    assert said.returncode == 0, said.stderr
    assert "late _labels_kernel _gather_targets_kernel" in said.stdout
