"""Time the divergence of two heads and its gradients: ``python -m cce_dist.bench.divergence``.

The rules are those of ``cce-dist bench``: a method whose value or gradients are wrong gets no time, and the others are timed in
turns. Both heads have a trained model's statistics. The first row has the plain products that no method can do without: both
heads' logits twice and the student's two gradients, six products where the heads are of one size.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from cce_dist import linear_kl_divergence, reference
from cce_dist.arguments import device, folder, whole
from cce_dist.bench.loop import Clock, Errors, Floor, Job, Row, free_memory, relative_error, time_in_turns
from cce_dist.bench.shapes import SHAPES, HeadShape
from cce_dist.bench.workload import make_workload
from cce_dist.kernels.heads import KINDS
from cce_dist.report import describe, describe_environment, table, where, write_json

COLUMNS = ("ms", "/products", "MiB", "err value", "err dE", "err dC")
CHUNK_BYTES = 1 << 30  # of the truth's logits
Mean = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # both heads -> mean divergence over all tokens


class Heads(NamedTuple):
    """Hidden states [N, D] and weight [V, D] of the student, then the teacher's, [N, D_t] and [V, D_t]."""

    hidden: Tensor
    weight: Tensor
    teacher: Tensor
    teacher_weight: Tensor


@dataclass
class Results:
    """What a command measured: for each kind the seconds of the products, and the rows."""

    environment: dict[str, Any]
    shape: str
    teacher_size: int
    num_tokens: int
    kinds: dict[str, Any] = field(default_factory=dict)


def draw(shape: HeadShape, teacher_size: int, num_tokens: int, dtype: torch.dtype, device: str) -> Heads:
    """Both heads; they disagree, as those of two models that were trained apart."""
    shapes = (shape, HeadShape(teacher_size, shape.vocab_size))
    student, teacher = (
        make_workload(each, num_tokens, dtype=dtype, device=device, seed=seed) for seed, each in enumerate(shapes)
    )
    return Heads(student.hidden, student.weight, teacher.hidden, teacher.weight)


def dense(kind: str, hidden: Tensor, weight: Tensor, teacher: Tensor, teacher_weight: Tensor) -> Tensor:
    """The mean divergence as everybody writes it, with the logits of both heads in memory."""
    log_p = (hidden @ weight.t()).float().log_softmax(-1)
    log_t = (teacher @ teacher_weight.t()).float().log_softmax(-1)
    mean = partial(F.kl_div, reduction="batchmean", log_target=True)
    if kind != "jsd":
        return mean(log_p, log_t) if kind == "forward" else mean(log_t, log_p)
    log_m = torch.logaddexp(log_p, log_t) - torch.tensor(2.0).log().item()
    return 0.5 * (mean(log_m, log_t) + mean(log_m, log_p))


def compiled(kind: str) -> Mean:
    """The dense form under torch.compile."""
    torch.compiler.reset()
    return torch.compile(partial(dense, kind), fullgraph=True, dynamic=False)


def liger(kind: str) -> Mean:
    """Liger's fused linear JSD, whose beta of 0 and 1 are the two KLs."""
    from liger_kernel.transformers.fused_linear_jsd import (  # pyright: ignore[reportMissingImports]
        LigerFusedLinearJSD,
    )

    if not torch.cuda.is_available():
        raise ImportError("needs a GPU")
    return LigerFusedLinearJSD(jsd_beta={"forward": 0.0, "reverse": 1.0, "jsd": 0.5}[kind])


def ours(kind: str, workspace_bytes: int | None = None, backend: str = "auto") -> Mean:
    return cast(
        Mean,
        partial(linear_kl_divergence, kind=kind, reduction="mean", workspace_bytes=workspace_bytes, backend=backend),
    )


METHODS: dict[str, Callable[[str], Mean]] = {
    "cce-dist": ours,
    "cce-dist@256MiB": partial(ours, workspace_bytes=256 << 20),
    "cce-dist-torch": partial(ours, backend="torch"),
    "torch": lambda kind: cast(Mean, partial(dense, kind)),
    "torch-compile": compiled,
    "liger": liger,
}


def step(function: Mean, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Mean divergence and both gradients."""
    hidden, weight = heads.hidden.detach().requires_grad_(), heads.weight.detach().requires_grad_()
    value = function(hidden, weight, heads.teacher, heads.teacher_weight)
    d_hidden, d_weight = torch.autograd.grad(value, (hidden, weight))
    return value.detach(), d_hidden, d_weight


def truth(kind: str, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """The same with fp32 products and sums (fp64 for fp32 inputs), a chunk of tokens at a time."""
    dtype = torch.float64 if heads.hidden.dtype == torch.float32 else torch.float32
    wide, num_tokens = Heads(*(x.to(dtype) for x in heads)), len(heads.hidden)
    rows = max(1, CHUNK_BYTES // (len(heads.weight) * wide.weight.element_size()))
    value, d_weight, d_hidden = wide.weight.new_zeros(()), torch.zeros_like(wide.weight), []
    for start in range(0, num_tokens, rows):
        some = slice(start, start + rows)
        chunk = wide._replace(hidden=wide.hidden[some], teacher=wide.teacher[some])
        part, d_some, d_part = step(lambda *heads: reference.linear_kl_divergence(*heads, kind=kind).mean(), chunk)
        share = len(d_some) / num_tokens
        value, d_weight = value + share * part, d_weight.add_(d_part, alpha=share)
        d_hidden.append(share * d_some)
    return value, torch.cat(d_hidden), d_weight


def checked(name: str, kind: str, heads: Heads, expected: tuple[Tensor, Tensor, Tensor]) -> tuple[Row, Mean | None]:
    """Build and check a method: its row, and the function if it is right."""
    row, function = Row(name, name.startswith("cce-dist")), None
    try:
        function = METHODS[name](kind)
        found = step(function, heads)
        of_mean = (found[1].mean(0, keepdim=True, dtype=torch.float32), expected[1].mean(0, keepdim=True))
        value, d_hidden, d_weight = (
            relative_error(x.view(-1, 1), y.view(-1, 1)) for x, y in zip(found, expected, strict=True)
        )
        row.errors = Errors(value, d_hidden, d_weight, relative_error(*of_mean))
        row.problem = row.errors.verdict()
        if heads.hidden.is_cuda and not row.problem:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            outputs = sum(x.nbytes for x in step(function, heads))
            torch.cuda.synchronize()
            row.peak_bytes = max(0, torch.cuda.max_memory_allocated() - before - outputs)
    except ImportError as error:
        row.problem, row.missing = describe(error), True
    # Whatever another library raises, the other methods go on.
    except Exception as error:
        row.problem = describe(error)
    free_memory(heads.hidden)
    return row, None if row.problem else function


def measure(kind: str, heads: Heads, names: list[str], repeats: int) -> tuple[list[Row], Floor]:
    """Check, then time in turns."""
    expected = truth(kind, heads)
    found = [checked(name, kind, heads, expected) for name in names]
    del expected
    floor = Floor()
    jobs = [Job(floor, floor.one, partial(_products, heads))]
    for row, function in found:
        if function is not None:
            jobs.append(Job(row, row.total, partial(step, function, heads)))
    time_in_turns(jobs, repeats, Clock(heads.hidden.device), lambda line: None)
    return [row for row, _ in found], floor


def _products(heads: Heads) -> None:
    """Both heads' logits twice, and the student's gradients from logits' gradients of their size."""
    for _ in range(2):
        d_logits = torch.mm(heads.hidden, heads.weight.t())
        torch.mm(heads.teacher, heads.teacher_weight.t())
    torch.mm(d_logits, heads.weight)
    torch.mm(d_logits.t(), heads.hidden)


def cells(row: Row, floor: Floor) -> dict[str, str]:
    """A line of the table."""
    if row.problem or row.errors is None:
        return {"method": row.name, **dict.fromkeys(COLUMNS, ""), "ms": row.problem}
    return {
        "method": row.name, "ms": f"{1e3 * row.total.median:.2f}",
        "/products": f"{row.total.median / floor.one.median:.3f}" if floor.one.seconds else "",
        "MiB": "" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:.0f}",
        "err value": f"{row.errors.loss:.1e}", "err dE": f"{row.errors.d_hidden:.1e}", "err dC": f"{row.errors.d_weight:.1e}",
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--shape", choices=SHAPES, help="the student's head (default: llama-3-8b; on a CPU toy)")
    add("--teacher-size", type=whole(1), help="hidden size of the teacher (default: the student's)")
    add("--tokens", type=whole(1), help="number of tokens (default: 8192; on a CPU 256)")
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    add("--repeats", type=whole(1), default=20)
    add("--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--out", type=folder, help="folder for divergence.json")
    args = parser.parse_args()
    on_gpu = torch.device(args.device).type == "cuda"
    name, num_tokens = args.shape or ("llama-3-8b" if on_gpu else "toy"), args.tokens or (8192 if on_gpu else 256)
    shape = SHAPES[name]
    teacher_size = args.teacher_size or shape.hidden_size
    heads = draw(shape, teacher_size, num_tokens, getattr(torch, args.dtype), args.device)
    environment = describe_environment(torch.device(args.device))
    results = Results(environment, name, teacher_size, num_tokens)
    for kind in args.kinds:
        rows, floor = measure(kind, heads, args.methods, args.repeats)
        print(f"{kind}, {name}, teacher D {teacher_size:,}, N {num_tokens:,}; {where(environment)}")
        products = {"method": "products", **dict.fromkeys(COLUMNS, ""), "ms": f"{1e3 * floor.one.median:.2f}"}
        print("\n".join(table([products, *(cells(row, floor) for row in rows)])) + "\n", flush=True)
        results.kinds[kind] = {"products": floor.one.seconds, "rows": rows}
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        write_json(args.out / "divergence.json", results)


if __name__ == "__main__":
    main()
