"""Time the divergence of two heads and its gradients: ``python -m cce_dist.bench.divergence``.

The rules are those of ``cce-dist bench``: a method whose value or gradients are wrong gets no time, and the others are timed in
turns. Both heads have a trained model's statistics. The plain products beside them are both heads' logits and the student's two
gradients, four products where the heads are of one size, and the same with the logits computed again for backward, six. The
mixture of "jsd" needs the logits once more: six, and eight.
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
from cce_dist.arguments import whole
from cce_dist.bench.shapes import SHAPES, HeadShape
from cce_dist.bench.tasks import Step, add_arguments, lines, measure, parse
from cce_dist.bench.workload import make_workload
from cce_dist.kernels.heads import KINDS
from cce_dist.report import describe_environment, table, where, write_json

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
    """What a command measured: for each kind the rows, and the seconds of the products."""

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
    of_both = LigerFusedLinearJSD(jsd_beta={"forward": 0.0, "reverse": 1.0, "jsd": 0.5}[kind])
    return lambda *heads: of_both(*heads, None)


def ours(kind: str, workspace_bytes: int | None = None, backend: str = "auto") -> Mean:
    return cast(
        Mean,
        partial(linear_kl_divergence, kind=kind, reduction="mean", workspace_bytes=workspace_bytes, backend=backend),
    )


METHODS: dict[str, Callable[[str], Mean]] = {
    "cce-dist": ours,
    "cce-dist@512MiB": partial(ours, workspace_bytes=512 << 20),
    "cce-dist-cached": partial(ours, workspace_bytes=1 << 40),
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


def _step(name: str, kind: str, heads: Heads) -> Step:
    return partial(step, METHODS[name](kind), heads)


def _products(heads: Heads, logits: int) -> None:
    """Both heads' logits so many times, and the student's gradients from logits' gradients of their size."""
    for _ in range(logits):
        d_logits = torch.mm(heads.hidden, heads.weight.t())
        torch.mm(heads.teacher, heads.teacher_weight.t())
    torch.mm(d_logits, heads.weight)
    torch.mm(d_logits.t(), heads.hidden)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser, METHODS, "divergence.json")
    parser.add_argument("--teacher-size", type=whole(1), help="hidden size of the teacher (default: the student's)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    args = parse(parser)
    name, num_tokens = args.shape, args.tokens
    shape = SHAPES[name]
    teacher_size = args.teacher_size or shape.hidden_size
    heads = draw(shape, teacher_size, num_tokens, getattr(torch, args.dtype), args.device)
    environment = describe_environment(torch.device(args.device))
    results = Results(environment, name, teacher_size, num_tokens)
    for kind in args.kinds:
        methods = {method: partial(_step, method, kind, heads) for method in args.methods}
        once = 1 + (kind == "jsd")  # the mixture needs the logits again
        products = {2 * count + 2: partial(_products, heads, count) for count in (once, once + 1)}
        found = measure(methods, truth(kind, heads), products, args.repeats)
        print(f"{kind}, {name}, teacher D {teacher_size:,}, N {num_tokens:,}; {where(environment)}")
        print("\n".join(table(lines(found))) + "\n", flush=True)
        results.kinds[kind] = found._asdict()
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        write_json(args.out / "divergence.json", results)


if __name__ == "__main__":
    main()
