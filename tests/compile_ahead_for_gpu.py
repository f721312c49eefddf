"""Compile calls ahead for a GPU that need not be here, and see that their launches find all kernels compiled: a line each.

    python tests/compile_ahead_for_gpu.py 1 0 1,_grad_hidden_kernel

Each argument gets a process of its own: 0 does not compile ahead, and kernels named behind a comma do not compile.
Compiling is left out: a kernel of Triton is a name here, under the key that Triton gives it.
"""

import os
import sys
import threading
import time
from collections import Counter
from concurrent.futures import wait
from functools import partial
from types import SimpleNamespace
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import pretend_gpu
import torch
import triton

from cce_dist import GradFilter, linear_cross_entropy, linear_log_probs
from cce_dist.kernels import dry_run
from cce_dist.tools.verify import check
from cce_dist.tools.verify.cases import CASES
from cce_dist.tools.verify.loss import LOSS
from cce_dist.tools.verify.matrix import Ahead

AHEAD, *BROKEN = pretend_gpu.fork(sys.argv[1:]).split(",")
os.environ["CCE_DIST_COMPILE_AHEAD"] = AHEAD
compiled: Counter[tuple[Any, str]] = Counter()
by_launch: list[str] = []


def compile_nothing(source: Any, target: Any = None, options: Any = None, _env_vars: Any = None) -> Any:
    """Stand in for Triton's compiler, which takes its time."""
    if threading.current_thread() is threading.main_thread():
        by_launch.append(source.fn.__name__)
    else:
        time.sleep(0.05)
    if source.fn.__name__ in BROKEN:
        raise RuntimeError(f"{source.fn.__name__} does not compile")
    compiled[source.hash(), str(options)] += 1
    return SimpleNamespace(
        src=None, metadata=None, function=0, packed_metadata=(), run=lambda *args: None,
        launch_metadata=lambda *args: None,
    )  # fmt: skip


def begin(name: str) -> None:
    by_launch.clear()
    print(f"== {name}", flush=True)


def told() -> None:
    twice = sum(n > 1 for n in compiled.values())
    print("kinds", len(dry_run._COMPILED), "compiled", len(compiled), "twice", twice, "late", *by_launch)


def step(name: str, bias: bool = False, dtype: torch.dtype = torch.bfloat16, out: bool = False, **options: Any) -> None:
    begin(name)
    hidden = torch.randn(600, 640, dtype=dtype).requires_grad_()
    weight = torch.randn(5000, 640, dtype=dtype).requires_grad_()
    linear_bias = torch.zeros(5000, dtype=dtype).requires_grad_() if bias else None
    buffer = torch.zeros(5000, 640) if out else None
    linear_cross_entropy(
        hidden, weight, torch.arange(600), linear_bias=linear_bias, grad_weight_out=buffer, backend="triton", **options
    ).backward()
    told()


def main() -> None:
    triton.compiler.compile = compile_nothing
    pretend_gpu.begin("90")
    dry_run.num_threads = lambda: 4  # pyright: ignore
    step("default")
    step("default again")
    step("scale", logit_scale=2.0)
    step("another scale", logit_scale=3.0)
    step("chunks", workspace_bytes=1)
    step("partly kept", workspace_bytes=12 << 20)
    step("options", bias=True, softcap=30.0, label_smoothing=0.1)
    step("far softcap", bias=True, softcap=100.0, label_smoothing=0.1)
    step("kept options", bias=True, softcap=30.0, workspace_bytes=1 << 30)
    step("sum into a buffer", out=True, reduction="sum")
    step("fp16", dtype=torch.float16)
    step("fp32", dtype=torch.float32)
    step("filtered", grad_filter=GradFilter(always=True))
    begin("log-probs with entropy")
    hidden, weight = (torch.randn(n, 640).bfloat16().requires_grad_() for n in (600, 5000))
    out = linear_log_probs(hidden, weight, torch.arange(600), backend="triton", entropy=True)
    assert out.entropy is not None
    (out.log_probs.sum() + out.entropy.sum()).backward()
    told()
    begin("a case of verify")
    drawn = check.draw(LOSS, next(case for case in CASES if case.name == "bias"))
    call = partial(LOSS.call, drawn, check.shard_of(drawn, None)[1], "triton", "cpu")
    with Ahead() as ahead:
        assert wait(ahead.begin(call)).done
        call()
    told()


if __name__ == "__main__":
    main()
