"""The kernels as a GPU gets them: compiled on this machine for one that is not here. See compile_for_gpu.py."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")
PRODUCTS = {"_lse_kernel", "_dlogits_kernel", "_grad_hidden_kernel", "_grad_weight_kernel", "_logits_kernel"}
EXACT = PRODUCTS | {"_scale_kernel", "_gather_targets_kernel"}
FILTERED = {"_list_columns_kernel", "_dropped_columns_kernel", "_hidden_products_kernel", "_filtered_weight_kernel"}
LOG_PROBS = {"_cells_kernel", "_logits_kernel"}
OF_LISTS = {"_list_logits_kernel", "_list_hidden_kernel", "_column_rows_kernel"}
OF_TWO_HEADS = {"_pair_sums_kernel", "_pair_gradients_kernel"}
# Bytes that kernels may spill on capability 9.0, by Triton's version.
SPILLS = {"3.6": {("_lse_kernel", "28"), ("_lse_kernel", "4")}, "3.7": {("_lse_kernel", "28")}}
SHARED = {"80": 163, "90": 227, "100": 227, "120": 99, "gfx942": 64}  # KiB that a program of a device can have
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "targets",
    [
        pytest.param(["90"], marks=pytest.mark.slow),
        # Tensor memory, and the least shared memory that NVIDIA's devices have.
        pytest.param(["100", "120"], marks=pytest.mark.slow),
        pytest.param(["80", "gfx942"], marks=pytest.mark.sweep),
    ],
    ids="-".join,
)
def test_every_kernel_compiles(targets: list[str]) -> None:
    """Catches: branches of different types, shapes without a layout, spilled registers, tiles that a device has no room for."""
    found = compiled(*targets)
    assert [*found] == targets
    for target, steps in found.items():
        check_steps(steps, target)


def compiled(*targets: str) -> dict[str, dict[str, list[list[str]]]]:
    """Return the words of each line that the script prints, by target and step."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", ROOT / "tests" / "compile_for_gpu.py", *targets]
    said = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert said.returncode == 0, said.stdout + said.stderr
    found, steps = {}, {}
    for line in said.stdout.splitlines():
        mark, _, name = line.partition(" ")
        if mark == "===":
            steps = found[name] = {}
        elif mark == "==":
            lines = steps[name] = []
        else:
            lines.append(line.split())
    return found or {targets[0]: steps}


def has_options(step: str) -> bool:
    """Options spill: a softcap with a bias, with smoothing, or with factors of tokens. So does the filter."""
    return "options" in step or step == "filtered"


def check_steps(steps: dict[str, list[list[str]]], target: str) -> None:
    lines = [line for each in steps.values() for line in each]
    assert {kernel for kernel, *_ in lines} >= EXACT | FILTERED | LOG_PROBS | OF_LISTS | OF_TWO_HEADS, target
    too_large = [line for line in lines if int(line[-1]) > SHARED[target] << 10]
    assert not too_large, f"{target}: {too_large}"
    if target == "90":
        known = SPILLS[version("triton")[:3]]  # a new Triton's are to be looked at and listed
        spills = {(line[0], line[2]) for name, each in steps.items() if not has_options(name) for line in each}
        assert {spill for spill in spills if spill[1] != "0"} <= known, spills
        for name, each in steps.items():
            assert has_options(name) or all((int(line[4]) > 0) == (line[0] in PRODUCTS) for line in each), each


def test_rocm_never_takes_hoppers_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a table that is read by the major number alone: ROCm says 9.4 for a device with 64 KiB of shared memory."""
    from cce_dist.kernels import tiles

    monkeypatch.setattr(tiles, "_in_interpreter", lambda: False)
    monkeypatch.setattr(tiles, "_read", tiles._read.__wrapped__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    monkeypatch.setattr(torch.cuda, "get_device_properties", mock.Mock())
    hopper = tiles.choose_tiles(torch.bfloat16, torch.device("cuda", 0))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert tiles.choose_tiles(torch.bfloat16, torch.device("cuda", 0)) == tiles._FALLBACK != hopper
