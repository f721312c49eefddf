"""A GPU that need not be here, as far as host code and Triton's compiler look at it: for scripts, not inside pytest.

Its tensors are those of the CPU, and hold zeros where a GPU's would be uninitialised.
"""

import contextlib
import gc
import importlib
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget


def kind(name: str) -> tuple[bool, int]:
    """Return whether a device, "90" or "gfx942", is one of ROCm, and its compute capability."""
    hip = name.startswith("gfx")
    return hip, 94 if hip else int(name)  # gfx942 calls itself 9.4


class Driver:
    """As much of a GPU's driver as compiling asks for."""

    def __init__(self, name: str) -> None:
        hip, capability = kind(name)
        self.target = GPUTarget("hip", name, 64) if hip else GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def begin(name: str) -> None:
    """Pretend from here on."""
    gc.disable()  # which would look through the compiler again and again
    hip, capability = kind(name)
    torch.version.hip = "7" if hip else None
    for owner, attribute, stand_in in (
        (torch.cuda, "get_device_capability", lambda device=None: divmod(capability, 10)),
        (torch.cuda, "get_device_properties", lambda device=None: SimpleNamespace(multi_processor_count=132)),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "device", lambda device: contextlib.nullcontext()),
        (torch.Tensor, "is_cuda", property(lambda tensor: True)),
        (torch, "empty", _zeroed(torch.empty, torch.zeros)),
        (torch, "empty_like", _zeroed(torch.empty_like, torch.zeros_like)),
        (torch.Tensor, "new_empty", _zeroed(torch.Tensor.new_empty, torch.Tensor.new_zeros)),
    ):
        setattr(owner, attribute, stand_in)
    driver: Any = Driver(name)
    triton.runtime.driver.set_active(driver)
    for caller in ("cce_dist.operands", "cce_dist.divergence"):  # which see that the tensors' device is a CPU
        module: Any = importlib.import_module(caller)
        module.choose_backend = lambda *args: "triton"


def fork(arguments: list[str]) -> str:
    """Return one of the arguments in a child process each, after the imports. This process ends with their worst code."""
    importlib.import_module("torch._dynamo")  # takes longest. cce_dist looks at the device when it is imported
    codes = []
    for argument in arguments:
        child = os.fork()
        if not child:
            print(f"=== {argument}", flush=True)
            return argument
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    sys.exit(max(codes, key=abs))


def _zeroed(empty: Any, zeros: Any) -> Any:
    """Return ``empty`` with zeros in it, but for tensors that have no memory."""

    def made(*args: Any, **options: Any) -> Any:
        device = options.get("device") or (args[0].device if isinstance(args[0], torch.Tensor) else "cpu")
        return (empty if torch.device(device).type == "meta" else zeros)(*args, **options)

    return made
