"""Say in hashes what the kernels and the calls compute, so that a change that should move no bit can be seen to move none.

    python benchmarks/fingerprint.py write OLD.json             # before a change; --part torch: a part of it
    python benchmarks/fingerprint.py compare OLD.json NEW.json  # every difference by name; exit code 1 if there is one

ptx: the PTX of every kernel variant that tests/compile_for_gpu.py compiles for sm_80, sm_90 and sm_100, without comments, debug
lines and the kernel's own name. Names of modules, functions and arguments may change; arithmetic may not.

bits: SHA-256 of the outputs and gradients of every case of ``cce-dist verify`` and of random calls (FUZZ), on each rank of
T = 1, 2 and 4 over gloo, by the torch backend and by interpreted kernels. A key says "exact" or "filtered", so a change of the
filter can be seen to be one of the filter alone. The tensors that go into a call are hashed, too: where they differ, the case
was drawn otherwise, and its outputs say nothing.

All of it takes about 20 minutes on one core: the interpreter 15, PTX four (less where Triton's cache has most of it), the torch
backend one. Files are compared in the parts that both have. Hashes hold for one machine and one version of torch and Triton.
"""

import argparse
import contextlib
import hashlib
import inspect
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))  # compile_for_gpu.py

ARCHITECTURES = ("80", "90", "100")
WORLDS = (1, 2, 4)
SEED = 30
# Random calls of each function. The interpreter takes a hundred times as long as the torch backend.
FUZZ = {
    "torch": {"loss": 200, "log-probs": 50, "divergence": 50},
    "triton": {"loss": 24, "log-probs": 8, "divergence": 8},
}
BACKENDS = tuple(FUZZ)
PARTS = {"all": ("ptx", *BACKENDS), "ptx": ("ptx",), "bits": BACKENDS, "torch": ("torch",), "triton": ("triton",)}
LARGEST = (48, 32, 600)  # tokens, hidden size and columns of verify's large cases in the interpreter


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]


def normalised(ptx: str, name: str) -> str:
    """PTX without the kernel's name, comments and debug lines."""
    ptx = re.split(r"^\s*\.section\s+\.debug", ptx, flags=re.MULTILINE)[0]
    ptx = re.sub(rf"\b{re.escape(name)}(?=_param_\d|\W)", "kernel", re.sub(r"//.*", "", ptx))
    lines = (" ".join(line.split()) for line in ptx.splitlines())
    return "\n".join(line for line in lines if line and not re.match(r"\.(file|loc)\b", line))


def compiled(architecture: str) -> dict[str, list[str]]:
    """Return the hash of each variant's PTX, and the names of the kernels that have it. Needs a process of its own."""
    sys.argv = ["", architecture]  # compile_for_gpu reads it when it is imported
    import compile_for_gpu
    import torch
    from triton import knobs
    from triton.compiler import CompiledKernel

    def without_assembler(backend: Any = None, stages: Any = None, *others: Any) -> Any:
        if stages is None:
            return ("fingerprint",) * 2  # part of the key of Triton's cache
        stages["cubin"] = lambda ptx, metadata: b""

    kernels: list[Any] = []

    def remember(kernel: Any, *args: Any, made: Any = CompiledKernel.__init__, **options: Any) -> None:
        made(kernel, *args, **options)
        kernels.append(kernel)

    knobs.runtime.add_stages_inspection_hook = without_assembler  # pyright: ignore
    torch.manual_seed(0)
    with mock.patch.object(CompiledKernel, "__init__", remember), contextlib.redirect_stdout(None):
        compile_for_gpu.main()
    found: dict[str, list[str]] = {}
    for kernel in kernels:
        name = kernel.metadata.name
        text = f"{normalised(kernel.asm['ptx'], name)}\nshared {kernel.metadata.shared}"
        found.setdefault(digest(text.encode()), []).append(name)
    return {key: sorted(names) for key, names in sorted(found.items())}


def write_ptx() -> dict[str, dict[str, list[str]]]:
    """Compile for one architecture after the other, each in a process of its own."""
    found = {}
    for architecture in ARCHITECTURES:
        with multiprocessing.get_context("spawn").Pool(1) as process:
            found[f"sm_{architecture}"] = process.apply(compiled, (architecture,))
        print(f"sm_{architecture}: {len(found[f'sm_{architecture}'])} variants", flush=True)
    return found


class Recorded(BaseException):
    """Everything of a call has been recorded; what verify would do with it is left out."""


class Recorder:
    """Hashes the first call of a public function that a case of verify makes, and the gradients that are asked for next."""

    def __init__(self) -> None:
        self.bound: dict[str, Any] | None = None
        self.hashes: dict[str, str] = {}

    def call(self, function: Callable, *args: Any, **options: Any) -> Any:
        bound = dict(inspect.signature(function).bind(*args, **options).arguments)
        self.hashes = {"called with": of_tensors(bound)}
        try:
            out = function(*args, **options)
        except (TypeError, ValueError, NotImplementedError) as error:
            self.hashes["refused"] = type(error).__name__
            raise Recorded from error
        finally:  # not before: the call may ask for gradients itself
            self.bound = bound
        values = out._asdict() if hasattr(out, "_asdict") else {"value": out}
        self.hashes |= {name: of_tensors({name: value}) for name, value in values.items() if value is not None}
        if not any(getattr(value, "requires_grad", False) for value in bound.values()):
            raise Recorded
        return out

    def grad(self, outputs: Any, inputs: Any, *args: Any, differentiate: Callable, **options: Any) -> Any:
        grads = differentiate(outputs, inputs, *args, **options)
        if self.bound is None:
            return grads  # of a reference, before the call
        for leaf, grad in zip(inputs, grads, strict=True):
            name = next(name for name, value in self.bound.items() if value is leaf)
            self.hashes[f"gradient of {name}"] = of_tensors({name: grad})
        if self.bound.get("grad_weight_out") is not None:
            self.hashes["grad_weight_out"] = of_tensors({"": self.bound["grad_weight_out"]})
        raise Recorded

    def of(self, run: Callable, *args: Any) -> dict[str, str]:
        """Run a case as far as the gradients of its first call; return the hashes."""
        self.bound, self.hashes = None, {}
        with contextlib.suppress(Recorded):
            run(*args)
            raise AssertionError(f"no public function was called, or no gradient was asked for: {args}")
        return self.hashes


def of_tensors(values: dict[str, Any]) -> str:
    """Hash dtype, shape and bytes of the tensors of a record, also of those in tuples."""
    import torch
    from torch.utils._pytree import tree_leaves

    parts = []
    for tensor in tree_leaves(values):
        if isinstance(tensor, torch.Tensor):
            raw = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
            parts += [f"{tensor.dtype} {tuple(tensor.shape)}".encode(), raw.numpy().tobytes()]
    return digest(*parts)


def for_interpreter(case: Any) -> Any:
    """Return a case of verify that the interpreter can run, and in seconds: no bf16, and a large problem cut to LARGEST."""
    import torch

    if case.dtype == torch.bfloat16:  # the interpreter misreads it
        case = replace(case, dtype=torch.float16)
    if case.problem is None:
        return case

    def smaller(generator: torch.Generator) -> Any:
        whole = case.problem(generator)
        if whole.hidden.shape[0] * whole.weight.shape[0] < 100_000:
            return whole
        tokens, size, columns = LARGEST
        hidden, weight = whole.hidden[:tokens, :size], whole.weight[:columns, :size]
        bias = None if whole.bias is None else whole.bias[:columns]
        labels = whole.labels[:tokens].clamp(max=columns - 1)
        return replace(whole, hidden=hidden, weight=weight, labels=labels, bias=bias)

    return replace(case, problem=smaller)


def cases(backends: list[str], world: int, group: Any) -> Iterator[tuple[str, Callable, tuple]]:
    """Name, function and arguments of every case. Here and in ``for_interpreter`` stands all that is known of verify."""
    from cce_dist.tools.verify.check import run_case
    from cce_dist.tools.verify.fuzz import Setting, run_one
    from cce_dist.tools.verify.matrix import TABLES

    for backend in backends:
        for function, named in TABLES.values():
            for case in named:
                case = for_interpreter(case) if backend == "triton" else case
                yield f"{backend} T={world} {case.name}", run_case, (function, case, group, "cpu", backend)
        for function, count in FUZZ[backend].items():
            setting = Setting(SEED, "cpu", backend, group, function=function)
            for number in range(count):
                yield f"{backend} T={world} {function} {number}", run_one, (setting, number)


def watch(recorder: Recorder) -> None:
    """Have the recorder see what verify calls and differentiates, from here on."""
    import torch

    import cce_dist

    public = {getattr(cce_dist, name) for name in cce_dist.__all__ if name.startswith("linear_")}
    for name, module in list(sys.modules.items()):
        for attribute, value in list(vars(module).items()) if name.startswith("cce_dist.tools.verify") else ():
            if inspect.isfunction(value) and value in public:
                setattr(module, attribute, partial(recorder.call, value))
    torch.autograd.grad = partial(recorder.grad, differentiate=torch.autograd.grad)


def record_rank(folder: str, backends: list[str]) -> None:
    """Record all cases on one rank of a world, into a file."""
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    todo = list(cases(backends, world, dist.group.WORLD if world > 1 else None))
    recorder, found = Recorder(), {}
    watch(recorder)
    for number, (name, run, args) in enumerate(todo, 1):
        hashes = recorder.of(run, *args)
        kind = "exact" if (recorder.bound or {}).get("grad_filter") is None else "filtered"
        found[f"{name} ({kind}) rank {rank}"] = hashes
        if rank == 0 and (number % 20 == 0 or number == len(todo)):
            print(f"T={world}: {number} of {len(todo)} cases, {time.process_time():.0f} s; {name}", flush=True)
    Path(folder, f"{world}.{rank}.json").write_text(json.dumps(found))


def write_bits(folder: str, backends: list[str]) -> dict[str, dict[str, str]]:
    os.environ |= {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    from support.ranks import run_ranks

    found: dict[str, dict[str, str]] = {}
    for world in WORLDS if backends else ():
        run_ranks(record_rank, world, folder, backends, timeout_seconds=900)
        for rank in range(world):
            found |= json.loads(Path(folder, f"{world}.{rank}.json").read_text())
    refused = sorted(name for name, hashes in found.items() if "refused" in hashes)
    print(f"{len(found)} calls, {len(refused)} refused: {', '.join(refused)}")
    return found


def write(file: str, parts: tuple[str, ...]) -> None:
    for name in [name for name in os.environ if name.startswith("CCE_DIST_")]:
        del os.environ[name]
    found: dict[str, Any] = {"made with": {name: version(name) for name in ("torch", "triton")}}
    with tempfile.TemporaryDirectory() as folder:
        if "ptx" in parts:
            found["ptx"] = write_ptx()
        bits = write_bits(folder, [part for part in FUZZ if part in parts])
    for name, hashes in bits.items():
        backend, ranks, *_ = name.split()
        found.setdefault(f"{backend} {ranks}", {})[name] = hashes
    Path(file).write_text(json.dumps(found, indent=0, sort_keys=True))


def changed_ptx(old: dict[str, Any], new: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Kind and name of what differs; a kernel that is now compiled once more, or once less, does not."""
    for architecture in sorted(old.keys() | new.keys()):
        was, now = old.get(architecture, {}), new.get(architecture, {})
        for word, one, other in (("vanished", was, now), ("appeared", now, was)):
            for key in sorted(one.keys() - other.keys(), key=one.__getitem__):
                yield f"ptx {architecture}", f"{word}: {', '.join(sorted(set(one[key])))} {key}"


def changed_bits(old: dict[str, Any], new: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Kind and name of what differs."""
    for name in sorted(old.keys() | new.keys()):
        was, now = old.get(name, {}), new.get(name, {})
        outputs = [output for output in sorted(was.keys() | now.keys()) if was.get(output) != now.get(output)]
        if not was or not now:
            outputs = ["vanished" if was else "appeared"]
        elif "called with" in outputs:
            outputs = ["called with other tensors"]
        if outputs:
            yield "bits filtered" if "(filtered)" in name else "bits exact", f"{name}: {', '.join(outputs)}"


def compare(old: str, new: str) -> int:
    was, now = (json.loads(Path(file).read_text()) for file in (old, new))
    if was.pop("made with") != now.pop("made with"):
        sys.exit("the files were made with different versions of torch or Triton")
    count: Counter[str] = Counter()
    for part in sorted(was.keys() & now.keys()):
        for kind, name in (changed_ptx if part == "ptx" else changed_bits)(was[part], now[part]):
            count[kind] += 1
            print(f"{kind}: {name}")
    print(f"compared: {', '.join(sorted(was.keys() & now.keys())) or 'nothing'}", end="; ")
    print(", ".join(f"{number} {kind}" for kind, number in sorted(count.items())) or "no difference")
    return 1 if count or not was.keys() & now.keys() else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("write", help="hash everything, into a file")
    command.add_argument("file")
    command.add_argument("--part", choices=PARTS, default="all")
    command = commands.add_parser("compare", help="say what differs in two files")
    command.add_argument("files", nargs=2, metavar=("OLD", "NEW"))
    args = parser.parse_args()
    if args.command == "compare":
        return compare(*args.files)
    write(args.file, PARTS[args.part])
    return 0


if __name__ == "__main__":
    sys.exit(main())
