"""Runs an example on CPU ranks: ``torchrun ... tests/run_example.py with_megatron``. Megatron is led to the CPU, and DeepSpeed
compiles no collectives of its own."""

import runpy
import sys
from pathlib import Path

script = Path(__file__).resolve().parents[1] / "docs" / "examples" / f"{sys.argv[1]}.py"
if script.stem == "with_megatron":
    from megatron.core import tensor_parallel
    from megatron_on_cpu import use_cpu

    from cce_dist.integrations.megatron.flags import main

    use_cpu()
    tensor_parallel.model_parallel_cuda_manual_seed = lambda seed: None  # of GPUs' generators
    main([str(script)])
else:
    if script.stem == "with_deepspeed":
        import deepspeed  # noqa: F401

        # deepspeed.comm.torch, as an attribute, is torch itself.
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # pyright: ignore[reportAttributeAccessIssue]
    sys.argv = [str(script)]
    runpy.run_path(str(script), run_name="__main__")
