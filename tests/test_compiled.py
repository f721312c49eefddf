"""The kernels as a GPU gets them: compiled on this machine for one that is not here. See compile_for_gpu.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
EXACT = {"_lse_kernel", "_target_logit_kernel", "_dlogits_kernel", "_grad_hidden_kernel", "_grad_weight_kernel"}
FILTERED = {"_list_columns_kernel", "_filtered_hidden_kernel", "_filtered_weight_kernel"}


@pytest.mark.parametrize("capability", [80, 90])
def test_every_kernel_compiles(capability: int) -> None:
    """Catches what the interpreter lets pass: branches of different types, shapes without a layout, spilled registers."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_for_gpu.py")
    said = subprocess.run(
        [sys.executable, "-W", "ignore", script, str(capability)], env=environment, capture_output=True, text=True
    )
    assert said.returncode == 0, said.stdout + said.stderr
    steps = {part.partition("\n")[0]: part.splitlines()[1:] for part in said.stdout.split("== ")[1:]}
    names = {line.split()[0] for lines in steps.values() for line in lines}
    assert names >= EXACT | FILTERED
    if capability == 90:
        for line in steps["exact"] + steps["kept"]:
            name, _, spilled, _, wgmma = line.split()
            assert int(spilled) == 0, line
            assert (int(wgmma) > 0) == (name in EXACT - {"_target_logit_kernel"}), line
