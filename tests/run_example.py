"""Runs an example on CPUs: Megatron is led to the CPU, and DeepSpeed compiles no collectives of its own."""

import runpy
import sys
from pathlib import Path


def main(argv: list[str]) -> int:
    """Run a Python file as a script in this process, with its arguments."""
    script = argv[0]
    if Path(script).stem == "with_megatron":
        from megatron.core import tensor_parallel
        from megatron_on_cpu import use_cpu

        use_cpu()
        tensor_parallel.model_parallel_cuda_manual_seed = lambda seed: None  # of GPUs' generators
    if Path(script).stem == "with_deepspeed":
        import deepspeed  # noqa: F401

        # deepspeed.comm.torch, as an attribute, is torch itself.
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # pyright: ignore[reportAttributeAccessIssue]
    sys.argv = argv
    runpy.run_path(script, run_name="__main__")
    return 0
