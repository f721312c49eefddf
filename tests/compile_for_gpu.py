"""Compile every Triton kernel that a step of training launches, for a GPU that need not be here: a line each.

    python tests/compile_for_gpu.py 90      # compute capability 9.0: tensor descriptors, wgmma; 80 takes the pointer path
    python tests/compile_for_gpu.py gfx942  # ROCm: what is spilled is not told

The host code runs as it is, on CPU tensors of a model's width; every launch is compiled instead of made. What the kernels
would have written is then zeros, so this says nothing of their arithmetic, which the interpreter tests, but does say whether
they compile for the device, at the sizes that it gets, and what they spill.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

HIP = sys.argv[1].startswith("gfx")
CAPABILITY = 94 if HIP else int(sys.argv[1])  # gfx942 calls itself 9.4
PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin" / ("ptxas" if CAPABILITY < 100 else "ptxas-blackwell")
SUFFIX = "a" if CAPABILITY >= 90 else ""


class Driver:
    """As much of a GPU's driver as compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("hip", sys.argv[1], 64) if HIP else GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def spilled_bytes(ptx: str) -> int:
    """What ptxas says of a kernel; raises with its message where it refuses one."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [PTXAS, "-v", f"--gpu-name=sm_{CAPABILITY}{SUFFIX}", file.name, "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True)
    if said.returncode:
        raise RuntimeError(said.stderr)
    return sum(int(count) for count in re.findall(r"(\d+) bytes spill stores", said.stderr))


seen: dict[int, Any] = {}


def compile_only(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    kernel: Any = run(function, *args, grid=grid, warmup=True, **options)
    if id(kernel) not in seen:
        seen[id(kernel)] = kernel  # held: an id is one of what lives
        ptx = "" if HIP else kernel.asm["ptx"]
        spilled = 0 if HIP else spilled_bytes(ptx)
        said = f"spills {spilled} wgmma {ptx.count('wgmma.mma_async')} shared {kernel.metadata.shared}"
        print(f"{function.fn.__name__} {said}", flush=True)
    return kernel


run = JITFunction.run
torch.version.hip = "7" if HIP else None
for owner, name, stand_in in (
    (JITFunction, "run", compile_only),
    (torch.cuda, "get_device_capability", lambda device=None: divmod(CAPABILITY, 10)),
    (torch.cuda, "get_device_properties", lambda device=None: SimpleNamespace(multi_processor_count=132)),
    (torch.cuda, "device", lambda device: contextlib.nullcontext()),
    (torch.Tensor, "is_cuda", property(lambda tensor: True)),
    (torch, "empty", torch.zeros),
    (torch, "empty_like", torch.zeros_like),
    (torch.Tensor, "new_empty", torch.Tensor.new_zeros),
):
    setattr(owner, name, stand_in)
driver: Any = Driver()
triton.runtime.driver.set_active(driver)


def step(name: str, workspace_bytes: int = 64 << 20, bias: bool = False, **options: Any) -> None:
    from cce_dist import linear_cross_entropy

    print(f"== {name}", flush=True)
    hidden = torch.randn(600, 640).bfloat16().requires_grad_()
    weight = torch.randn(5000, 640).bfloat16().requires_grad_()
    linear_bias = torch.zeros(5000).bfloat16().requires_grad_() if bias else None
    linear_cross_entropy(
        hidden, weight, torch.arange(600), linear_bias=linear_bias, backend="triton", workspace_bytes=workspace_bytes,
        **options,
    ).backward()  # fmt: skip


def divergence(kind: str, kept: bool = False, bias: bool = False, **options: Any) -> None:
    from cce_dist import linear_kl_divergence

    print(f"== {kind} divergence{' with options' if bias else ''}{', kept' if kept else ''}", flush=True)
    hidden, teacher = torch.randn(600, 640).bfloat16().requires_grad_(), torch.randn(600, 896).bfloat16()
    weight, teacher_weight = torch.randn(5000, 640).bfloat16().requires_grad_(), torch.randn(5000, 896).bfloat16()
    if bias:
        options |= {name: torch.zeros(5000).bfloat16() for name in ("linear_bias", "teacher_bias")}
    linear_kl_divergence(
        hidden, weight, teacher, teacher_weight, kind=kind, reduction="mean", backend="triton",
        workspace_bytes=1 << 30 if kept else 1, **options,
    ).backward()  # fmt: skip


def log_probs(name: str, num_ids: int = 1, workspace_bytes: int = 64 << 20, own: bool = False, **options: Any) -> None:
    from cce_dist import linear_log_probs

    print(f"== {name}", flush=True)
    hidden = torch.randn(600, 640).bfloat16().requires_grad_()
    weight = torch.randn(5000, 640).bfloat16().requires_grad_()
    if own:
        options["temperature"] = torch.ones(600)
    out = linear_log_probs(
        hidden, weight, torch.arange(600 * num_ids).view(600, num_ids), backend="triton", workspace_bytes=workspace_bytes,
        **options,
    )  # fmt: skip
    objective = out.log_probs.sum()
    (objective if out.entropy is None else objective + out.entropy.sum()).backward()


def main() -> None:
    from cce_dist import GradFilter

    step("exact")
    step("kept", workspace_bytes=1 << 30)
    step("filtered", grad_filter=GradFilter(always=True))
    if CAPABILITY >= 90 and not HIP:
        step("screened", grad_filter=GradFilter(always=True, screen="fp8"))
        step("screened with options", bias=True, softcap=30.0, grad_filter=GradFilter(always=True, screen="fp8"))
    step("exact with options", bias=True, softcap=30.0, label_smoothing=0.1)
    step("filtered with options", bias=True, softcap=30.0, grad_filter=GradFilter(always=True))
    divergence("forward")
    for kind in ("forward", "reverse", "jsd"):
        divergence(kind, kept=True)
    divergence("jsd", bias=True, softcap=30.0, teacher_softcap=20.0, logit_scale=0.5, teacher_logit_scale=0.7)
    log_probs("log-probs", workspace_bytes=1, entropy=True, top_k=4)
    log_probs("log-probs, kept", workspace_bytes=1 << 30, entropy=True)
    log_probs("log-probs of several ids, kept", num_ids=3, workspace_bytes=1 << 30)
    log_probs("log-probs of several ids", num_ids=3, workspace_bytes=1, own=True, entropy=True)
    log_probs("log-probs with measures", workspace_bytes=1, sum_p_squared=True, argmax=True, entropy=True)
    log_probs(
        "log-probs with measures, kept",
        num_ids=3,
        workspace_bytes=1 << 30,
        sum_p_squared=True,
        argmax=True,
        own=True,
        entropy=True,
    )
    log_probs(
        "log-probs with options", num_ids=3, own=True, entropy=True, sum_p_squared=True, argmax=True, softcap=30.0
    )


if __name__ == "__main__":
    main()
