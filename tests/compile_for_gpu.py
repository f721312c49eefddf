"""Compile every Triton kernel that a step of training launches, for a GPU that need not be here: a line each.

    python tests/compile_for_gpu.py 90      # compute capability 9.0: tensor descriptors, wgmma; 80 takes the pointer path
    python tests/compile_for_gpu.py gfx942  # ROCm: what is spilled is not told
    python tests/compile_for_gpu.py 80 120  # several, in a process each: only the steps that take most of a kernel's memory

The host code runs as it is, on CPU tensors of a model's width; every launch is compiled instead of made. What the kernels
would have written is then zeros, so this says nothing of their arithmetic, which the interpreter tests, but does say whether
they compile for the device, at the sizes that it gets, and what they spill.
"""

import contextlib
import functools
import os
import re
import subprocess
import sys
import tempfile
from typing import Any
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)
os.environ["CCE_DIST_COMPILE_AHEAD"] = "0"  # a launch prints its line as soon as it comes
os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # which nobody reads, and which needs LLVM

import pretend_gpu
import torch
from triton import knobs
from triton.backends import backends
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime.jit import JITFunction

ONE_OF_SEVERAL = len(sys.argv) > 2
if ONE_OF_SEVERAL:
    sys.argv[1] = pretend_gpu.fork(sys.argv[1:])
HIP, CAPABILITY = pretend_gpu.kind(sys.argv[1])
# The steps in which each kernel takes the most shared memory, on every device. The others launch the same kernels.
LARGEST = (
    "exact", "kept", "smoothed, in groups", "each token, in groups", "filtered", "exact with options",
    "filtered with options", "filtered with options of a narrow head", "forward divergence", "lk divergence with options",
    "log-probs", "log-probs with measures, kept", "kept ids",
)  # fmt: skip
SUFFIX = "a" if CAPABILITY >= 90 else ""


class SharedIsKnown(Exception):
    """A kernel has been laid out in shared memory, and is not compiled further."""


def laid_out(module: Any, metadata: dict[str, Any], lower: Any) -> str:
    """Run the stage that lays a kernel out in shared memory as far as that, without its way to LLVM."""
    backend: Any = sys.modules[backends["amd" if HIP else "nvidia"].compiler.__module__]
    own = (backend.amd if HIP else backend.nvidia).passes.ttgpuir
    passes = (own, "add_to_llvmir"), *((backend.passes.convert, f"add_{name}_to_llvmir") for name in ("cf", "arith"))
    with contextlib.ExitStack() as stack:
        for owner, name in passes:
            stack.enter_context(mock.patch.object(owner, name, lambda *args: None))
        stack.enter_context(mock.patch.object(backend.llvm, "to_module", side_effect=SharedIsKnown))
        stack.enter_context(contextlib.suppress(SharedIsKnown))
        lower(module, metadata)
    metadata |= {"shared": module.get_int_attr("ttg.shared"), "name": ""}
    return ""


def assemble(ptx: str, metadata: dict[str, Any]) -> bytes:
    """Return what ptxas says of a kernel in place of its code; raise with its message where it refuses the kernel."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(CAPABILITY).path, "-v", f"--gpu-name=sm_{CAPABILITY}{SUFFIX}", file.name, "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True)
    if said.returncode:
        raise RuntimeError(said.stderr)
    return said.stderr.encode()


class Step:
    """The step that is being compiled, and whether the kernel under way is compiled to the end."""

    name = ""
    whole = True


def is_whole() -> bool:
    """Whether the step's kernels are compiled to the end, and not only laid out in shared memory, in a fifth of the time.

    The end tells whether the device's assembler takes a kernel, and what it spills. Kernels with options and the filter's may
    spill, so they are only laid out. So are most kernels for devices whose tiles were not tuned.
    """
    if CAPABILITY != 90:
        return Step.name in ("exact", "kept")
    return "options" not in Step.name and Step.name != "filtered"


def stages_of(backend: Any = None, stages: Any = None, *others: Any) -> Any:
    """Tell Triton what to compile to; the cache's key too, where it asks for that."""
    if stages is None:
        return (f"compile_for_gpu, whole {Step.whole}",) * 2
    if not Step.whole:
        lower, *later = list(stages)[2:]
        stages[lower] = functools.partial(laid_out, lower=stages[lower])
        for stage in later:
            stages[stage] = lambda module, metadata: ""
    elif not HIP:
        stages["cubin"] = assemble
    return None


knobs.runtime.add_stages_inspection_hook = stages_of  # pyright: ignore
seen: dict[int, Any] = {}


def compile_only(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    Step.whole = is_whole()
    kernel: Any = run(function, *args, grid=grid, warmup=True, **options)
    if id(kernel) not in seen:
        seen[id(kernel)] = kernel  # held: an id is one of what lives
        spilled = "-"
        if Step.whole and not HIP:
            spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", kernel.asm["cubin"].decode()))
        wgmma = kernel.asm["ttgir"].count("ttng.warp_group_dot ")
        print(f"{function.fn.__name__} spills {spilled} wgmma {wgmma} shared {kernel.metadata.shared}", flush=True)
    return kernel


run = JITFunction.run
JITFunction.run = compile_only  # pyright: ignore
pretend_gpu.begin(sys.argv[1])


def begin(name: str) -> bool:
    """Return whether a step is wanted, and print its name if it is."""
    wanted = not ONE_OF_SEVERAL or name in LARGEST
    if wanted:
        Step.name = name
        print(f"== {name}", flush=True)
    return wanted


def head(size: int = 640, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    """Return hidden states and a weight that require gradients."""
    hidden, weight = (torch.randn(rows, size).to(dtype).requires_grad_() for rows in (600, 5000))
    return hidden, weight


def step(
    name: str, function: Any, *others: Any, size: int = 640, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> None:
    """Call a function, and backward; ``others`` are its arguments after the hidden states and the weight."""
    if not begin(name):
        return
    hidden, weight = head(size, dtype)
    out = function(hidden, weight, *others, **{"backend": "triton", "workspace_bytes": 64 << 20} | options)
    objective = getattr(out, "log_probs", out).sum()
    entropy = getattr(out, "entropy", None)
    (objective if entropy is None else objective + entropy.sum()).backward()


def loss(name: str, bias: bool = False, **options: Any) -> None:
    from cce_dist import linear_cross_entropy

    if bias:
        options["linear_bias"] = torch.zeros(5000).bfloat16().requires_grad_()
    step(name, linear_cross_entropy, torch.arange(600), **options)


def divergence(kind: Any, kept: bool = False, bias: bool = False, **options: Any) -> None:
    from cce_dist import linear_kl_divergence

    if bias:
        options |= {name: torch.zeros(5000).bfloat16() for name in ("linear_bias", "teacher_bias")}
    name = f"{kind} divergence{' with options' if bias else ''}{', kept' if kept else ''}"
    options |= {"kind": kind, "reduction": "mean", "workspace_bytes": 1 << 30 if kept else 1}
    step(name, linear_kl_divergence, *(x.detach() for x in head(896)), **options)


def log_probs(name: str, num_ids: int = 1, own: bool = False, **options: Any) -> None:
    from cce_dist import linear_log_probs

    if own:
        options["temperature"] = torch.ones(600)
    step(name, linear_log_probs, torch.arange(600 * num_ids).view(600, num_ids), **options)


def kept(name: str, bias: bool = False, **options: Any) -> None:
    from cce_dist import KeptIds, linear_log_probs

    lists = KeptIds(torch.arange(601) * 3, torch.arange(1800))
    if bias:  # the last tokens take the whole vocabulary
        lists = KeptIds(lists.offsets.clamp(max=900), lists.ids[:900], torch.arange(300, 600))
        options |= {"linear_bias": torch.zeros(5000).bfloat16(), "entropy": True}
    step(name, linear_log_probs, torch.arange(600), kept=lists, workspace_bytes=None, **options)


def main() -> None:
    from cce_dist import GradFilter, groups

    loss("exact", workspace_bytes=1)
    loss("kept", workspace_bytes=1 << 30)
    loss("kept, tiles that lie", workspace_bytes=1 << 30, size=512)
    with groups.of_rows(256):
        loss("kept, in groups", workspace_bytes=1 << 30)
        loss("smoothed, in groups", workspace_bytes=1 << 30, label_smoothing=0.1)
    with groups.of_rows(256, low=True):
        loss("each token, in groups", workspace_bytes=1 << 30, reduction="none", grad_weight_out=torch.zeros(5000, 640))
    loss("filtered", grad_filter=GradFilter(always=True))
    loss("exact with options", bias=True, softcap=30.0, label_smoothing=0.1)
    loss("filtered with options", softcap=30.0, grad_filter=GradFilter(always=True))
    # The sizes of tests: blocks of rows are then many rows.
    loss("filtered with options of a narrow head", size=16, dtype=torch.float32, grad_filter=GradFilter(always=True))
    divergence("forward")
    for kind in ("forward", "reverse", "jsd", "tv", "lk"):
        divergence(kind, kept=True)
    divergence("lk", bias=True, softcap=30.0, teacher_softcap=20.0, logit_scale=0.5, teacher_logit_scale=0.7)
    divergence("jsd", bias=True, softcap=30.0, teacher_softcap=20.0, logit_scale=0.5, teacher_logit_scale=0.7)
    log_probs("log-probs", workspace_bytes=1, entropy=True, top_k=4)
    log_probs("log-probs, kept", workspace_bytes=1 << 30, entropy=True)
    log_probs("log-probs of several ids, kept", num_ids=3, workspace_bytes=1 << 30)
    log_probs("log-probs of several ids", num_ids=3, workspace_bytes=1, own=True, entropy=True)
    log_probs("log-probs with measures", workspace_bytes=1, sum_p_squared=True, argmax=True, entropy=True)
    measures: dict[str, Any] = dict(num_ids=3, own=True, entropy=True, sum_p_squared=True, argmax=True)
    log_probs("log-probs with measures, kept", workspace_bytes=1 << 30, **measures)
    log_probs("log-probs with options", softcap=30.0, **measures)
    kept("kept ids")
    kept("kept ids with options", softcap=30.0, bias=True)


if __name__ == "__main__":
    main()
