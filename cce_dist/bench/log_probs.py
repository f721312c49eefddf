"""Time log-probabilities as policies and distillation take them: ``cce-dist bench --log-probs TASK``.

``cce-dist bench --log-probs`` without a task times one id a token among the rows of the loss. The tasks here are the others
(``python -m cce_dist.bench.log_probs`` has them all):

    entropy    log-probabilities of one id and entropies, both with gradients
    ids-K      log-probabilities of K ids a token, with gradients
    scores     log-probabilities of one id, entropies and the 64 largest logits, without gradients

Upstream gradients have both signs, as advantages do. A method that has no such task is left out of its table.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cce_dist import linear_log_probs
from cce_dist.bench import peers, tasks
from cce_dist.bench.shapes import HeadShape
from cce_dist.bench.tasks import Method, Prepared, Setting, Step, add_arguments, as_command, run
from cce_dist.bench.workload import Workload, make_workload

CHUNK_BYTES = 1 << 30  # of the truth's logits
TOP = 64


class Task(NamedTuple):
    """What is asked for: K ids a token, entropies, so many of the largest logits, gradients."""

    num_ids: int = 1
    entropy: bool = False
    top_k: int = 0
    grad: bool = True


TASKS = {
    "entropy": Task(entropy=True),
    "ids-1": Task(1),
    "ids-64": Task(64),
    "ids-128": Task(128),
    "scores": Task(entropy=True, top_k=TOP, grad=False),
}


class Inputs(NamedTuple):
    """Hidden states [N, D] and weight [V, D], ids [N, K], and upstream gradients of log-probabilities and entropies."""

    hidden: Tensor
    weight: Tensor
    ids: Tensor
    of_log_probs: Tensor
    of_entropy: Tensor


# hidden, weight, ids -> log-probabilities [N, K]; entropies [N] and log-probabilities of the largest logits [N, top_k] or None
Function = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None, Tensor | None]]


def draw(task: Task, hidden: Tensor, weight: Tensor, labels: Tensor) -> Inputs:
    """The label of each token and other ids; upstream gradients are those of a mean."""
    generator = torch.Generator(hidden.device).manual_seed(1)
    num_tokens, like = len(hidden), {"generator": generator, "device": hidden.device}
    others = torch.randint(len(weight), (num_tokens, task.num_ids - 1), **like)
    ids = torch.cat((labels[:, None], others), 1)
    of_log_probs = torch.randn(ids.shape, **like) / ids.numel()
    return Inputs(hidden, weight, ids, of_log_probs, torch.randn(num_tokens, **like) / num_tokens)


def dense(task: Task, hidden: Tensor, weight: Tensor, ids: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """As everybody writes it, with the logits in memory."""
    log_p = (hidden @ weight.t()).float().log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1) if task.entropy else None
    top = log_p.topk(task.top_k).values if task.top_k else None
    return log_p.gather(1, ids), entropy, top


def compiled(task: Task) -> Function:
    """The dense form under torch.compile."""
    torch.compiler.reset()
    return torch.compile(partial(dense, task), fullgraph=True, dynamic=False)


def trl(task: Task) -> Function:
    """TRL's chunks of tokens and of the vocabulary."""
    chunks = peers.trl_chunks()

    def function(hidden: Tensor, weight: Tensor, ids: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        log_probs, entropy, *_ = chunks(hidden, weight, ids[:, 0], ("entropy",) if task.entropy else ())
        return log_probs[:, None], entropy, None

    return function


def verl(task: Task) -> Function:
    """verl's kernel, which has entropies in any case."""
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy  # pyright: ignore[reportMissingImports]

    def function(hidden: Tensor, weight: Tensor, ids: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        log_probs, entropy = linear_cross_entropy(hidden, weight, ids[:, 0])
        return log_probs[:, None], entropy if task.entropy else None, None

    return function


def methods_of(task: Task, setting: Setting, x: Inputs) -> dict[str, Method]:
    """The rows: ours, the dense form, and for one id a token those of trainers."""

    def ours(**options: Any) -> Callable[[], Step]:
        def function(hidden: Tensor, weight: Tensor, ids: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
            out = linear_log_probs(hidden, weight, ids, entropy=task.entropy, top_k=task.top_k, **options)
            return out.log_probs, out.entropy, out.top_log_probs

        return lambda: partial(step, task, function, x)

    others: dict[str, Callable[[Task], Function]] = {
        "torch": lambda task: partial(dense, task),
        "torch-compile": compiled,
    }
    if task.num_ids == 1 and not task.top_k:
        others |= {"trl": trl, "verl": verl}
    table = {name: Method(partial(_built, build, task, x), needs_whole=True) for name, build in others.items()}
    return setting.ours(256, ours) | table


def _built(build: Callable[[Task], Function], task: Task, x: Inputs) -> Step:
    return partial(step, task, build(task), x)


def step(task: Task, function: Function, x: Inputs) -> tuple[Tensor, ...]:
    """The outputs as one tensor, and where gradients are asked for those of their weighted sum."""
    hidden, weight = (t.detach().requires_grad_(task.grad) for t in x[:2])
    log_probs, entropy, top = function(hidden, weight, x.ids)
    outputs = torch.cat([out.detach().reshape(-1) for out in (log_probs, entropy, top) if out is not None])
    if not task.grad:
        return (outputs,)
    objective = (log_probs * x.of_log_probs).sum()
    if entropy is not None:
        objective = objective + (entropy * x.of_entropy).sum()
    return outputs, *torch.autograd.grad(objective, (hidden, weight))


def truth(task: Task, x: Inputs) -> tuple[Tensor, ...]:
    """The same with fp32 products and sums (fp64 for fp32 inputs), a chunk of tokens at a time."""
    dtype = torch.float64 if x.hidden.dtype == torch.float32 else torch.float32
    weight = x.weight.to(dtype)
    rows = max(1, CHUNK_BYTES // weight.shape[0] // weight.element_size())
    kinds: list[list[Tensor]] = [[], [], []]
    d_hidden, d_weight = [], torch.zeros_like(weight)
    for start in range(0, len(x.hidden), rows):
        some = slice(start, start + rows)
        chunk = Inputs(x.hidden[some].to(dtype), weight, x.ids[some], x.of_log_probs[some], x.of_entropy[some])
        outputs, *grads = step(task, partial(_exact, task), chunk)
        sizes = [chunk.ids.numel(), len(chunk.ids) * task.entropy, len(chunk.ids) * task.top_k]
        for kind, values in zip(kinds, outputs.split(sizes), strict=True):
            kind.append(values)
        if task.grad:
            d_hidden.append(grads[0])
            d_weight += grads[1]
    outputs = torch.cat([values for kind in kinds for values in kind])
    return (outputs, torch.cat(d_hidden), d_weight) if task.grad else (outputs,)


def _exact(task: Task, hidden: Tensor, weight: Tensor, ids: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    log_p = (hidden @ weight.t()).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1) if task.entropy else None
    return log_p.gather(1, ids), entropy, log_p.topk(task.top_k).values if task.top_k else None


def products(x: Inputs, grad: bool) -> dict[int, Callable[[], object]]:
    """The plain products of a step: of the logits alone, or with both gradients, and the same with the logits twice."""

    def of(logits: int) -> None:
        for _ in range(logits):
            d_logits = torch.mm(x.hidden, x.weight.t())
        if grad:
            torch.mm(d_logits, x.weight)
            torch.mm(d_logits.t(), x.hidden)

    return {3: partial(of, 1), 4: partial(of, 2)} if grad else {1: partial(of, 1)}


@lru_cache(maxsize=1)
def _workload(shape: HeadShape, num_tokens: int, dtype: torch.dtype, device: torch.device) -> Workload:
    return make_workload(shape, num_tokens, dtype=dtype, device=device)


def prepare(name: str, setting: Setting) -> Prepared:
    """A task's methods, and what is true of this rank's part."""
    task, head = TASKS[name], _workload(setting.shape, setting.num_tokens, setting.dtype, setting.device)
    whole = draw(task, head.hidden, head.weight, head.labels)
    x = whole._replace(weight=setting.rows(whole.weight))
    expected = truth(task, whole)
    if task.grad:
        expected = (*expected[:2], setting.rows(expected[2]))
    return Prepared(methods_of(task, setting, x), expected, products(x, task.grad))


def tasks_of(names: Sequence[str]) -> list[tasks.Task]:
    return [tasks.Task(name, partial(prepare, name)) for name in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    args = parser.parse_args()
    raise SystemExit(run(as_command(args), tasks_of(args.tasks)))


if __name__ == "__main__":
    main()
