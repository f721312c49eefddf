"""Time the divergence of two heads and its gradients: ``cce-dist bench --kl``, or ``python -m cce_dist.bench.divergence``.

Both heads have a trained model's statistics. The plain products beside them are both heads' logits and the student's two
gradients, four products where the heads are of one size, and the same with the logits computed again for backward, six. The
mixture of "jsd" needs the logits once more where nothing is kept: eight.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from cce_dist import linear_kl_divergence, reference
from cce_dist.arguments import whole
from cce_dist.bench.shapes import HeadShape
from cce_dist.bench.tasks import Method, Prepared, Setting, Step, Task, add_arguments, as_command, run
from cce_dist.bench.workload import make_workload
from cce_dist.kernels.divergence.heads import KINDS

CHUNK_BYTES = 1 << 30  # of the truth's logits
Mean = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # both heads -> mean divergence over all tokens


class Heads(NamedTuple):
    """Hidden states [N, D] and weight [V, D] of the student, then the teacher's, [N, D_t] and [V, D_t]."""

    hidden: Tensor
    weight: Tensor
    teacher: Tensor
    teacher_weight: Tensor


@lru_cache(maxsize=1)
def draw(shape: HeadShape, teacher_size: int, num_tokens: int, dtype: torch.dtype, device: torch.device | str) -> Heads:
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


def methods_of(kind: str, setting: Setting, heads: Heads) -> dict[str, Method]:
    """The rows: ours, the dense form, and Liger's."""

    def ours(backend: str = "auto", **options: Any) -> Callable[[], Step]:
        shard = options["shard"]
        function = partial(
            linear_kl_divergence, kind=kind, reduction="mean", backend=backend, teacher_shard=shard, **options
        )
        return lambda: partial(step, cast(Mean, function), heads)

    others: dict[str, Callable[[str], Mean]] = {
        "torch": lambda kind: cast(Mean, partial(dense, kind)),
        "torch-compile": compiled,
        "liger": liger,
    }
    table = {name: Method(partial(_built, build, kind, heads), needs_whole=True) for name, build in others.items()}
    return setting.ours(512, ours) | table


def _built(build: Callable[[str], Mean], kind: str, heads: Heads) -> Step:
    return partial(step, build(kind), heads)


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


def prepare(kind: str, setting: Setting) -> Prepared:
    """A kind's methods, and what is true of this rank's part."""
    whole = draw(setting.shape, setting.teacher_size, setting.num_tokens, setting.dtype, setting.device)
    value, d_hidden, d_weight = truth(kind, whole)
    heads = whole._replace(weight=setting.rows(whole.weight), teacher_weight=setting.rows(whole.teacher_weight))
    once = 1 + (kind == "jsd")  # the mixture needs the logits again, unless they are kept
    counts = (1, once + 1)
    products: dict[int, Callable[[], object]] = {2 * n + 2: partial(_products, heads, n) for n in counts}
    return Prepared(methods_of(kind, setting, heads), (value, d_hidden, setting.rows(d_weight)), products)


def _products(heads: Heads, logits: int) -> None:
    """Both heads' logits so many times, and the student's gradients from logits' gradients of their size."""
    for _ in range(logits):
        d_logits = torch.mm(heads.hidden, heads.weight.t())
        torch.mm(heads.teacher, heads.teacher_weight.t())
    torch.mm(d_logits, heads.weight)
    torch.mm(d_logits.t(), heads.hidden)


def tasks_of(kinds: Sequence[str]) -> list[Task]:
    return [Task(f"kl-{kind}", partial(prepare, kind), with_teacher=True) for kind in kinds]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--teacher-size", type=whole(1), help="hidden size of the teacher (default: the student's)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    args = parser.parse_args()
    raise SystemExit(run(as_command(args, args.teacher_size), tasks_of(args.kinds)))


if __name__ == "__main__":
    main()
