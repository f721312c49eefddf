"""What a table of heads computes: the loss, a framework's last stage, log-probabilities, the divergence of two heads.

A task makes a ``Problem`` of a workload, and has rows for it. Upstream gradients of log-probabilities have both signs, like
advantages. The two heads of a divergence are drawn independently.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from cce_dist import KeptIds, VocabShard, linear_kl_divergence, linear_log_probs, reference
from cce_dist.kernels.divergence.heads import KINDS
from cce_dist.tools.bench import methods
from cce_dist.tools.bench.methods import Method, build_ours, our_rows
from cce_dist.tools.bench.peers import compiled
from cce_dist.tools.bench.problem import Function, Problem, loss_of
from cce_dist.tools.bench.shapes import KEPT_IDS, LOG_PROBS, HeadShape
from cce_dist.tools.bench.workload import Workload, make_workload


class Task(NamedTuple):
    """One kind of table."""

    methods: Callable[[Sequence[int]], dict[str, Method]]  # workspaces in MiB -> the rows by name
    problem: Callable[[Workload], Problem]  # what the rows compute
    name: str = ""  # empty for the loss and for last stages


def tasks_of(args: argparse.Namespace) -> list[Task]:
    """Return the tasks that the options of ``cce-dist bench`` ask for."""
    names = [] if args.log_probs is None else args.log_probs or [*LOG_PROBS, *KEPT_IDS]
    tasks = [kept_task(name) if name in KEPT_IDS else scores_task(name) for name in names]
    if args.kl is not None:
        tasks += [divergence_task(kind, args.teacher_size) for kind in args.kl or KINDS]
    return tasks or [Task(partial(methods.all_methods, args.stage or ""), lambda workload: loss_of(*workload[:3]))]


def _rows(
    build: Callable[..., Function], others: dict[str, Callable[[], Function]], workspace_mib: Sequence[int]
) -> dict[str, Method]:
    """Return this library's rows, and the rows of ``others``, which need the whole vocabulary."""
    table = our_rows(build, workspace_mib, filtered=False)
    table["cce-dist-torch"] = Method(partial(build_ours, build, {"backend": "torch"}), ours=True, needs_whole=True)
    for name, make in others.items():
        table[name] = Method(lambda shard, hidden, make=make: make(), needs_whole=True)
    return table


def scores_task(name: str) -> Task:
    """Return the task of log-probabilities of K ids per token, some with entropies or with the largest logits."""
    num_ids, entropy, top_k, grad = LOG_PROBS[name]

    def joined(log_probs: Tensor, of_entropy: Tensor | None, top: Tensor | None) -> Tensor:
        parts = [log_probs, *([of_entropy[:, None]] if entropy and of_entropy is not None else [])]
        return torch.cat([*parts, *([top] if top_k and top is not None else [])], 1)

    def truth(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        out = reference.linear_log_probs(hidden, weight, ids, top_k=max(1, top_k))
        return joined(out.log_probs, out.entropy, out.top_log_probs)

    def dense(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        log_p = (hidden @ weight.t()).float().log_softmax(-1)
        of_entropy = -(log_p.exp() * log_p).sum(-1) if entropy else None
        return joined(log_p.gather(1, ids), of_entropy, log_p.topk(top_k).values if top_k else None)

    def build(shard: VocabShard, hidden: Tensor, options: dict[str, Any]) -> Function:
        def function(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
            out = linear_log_probs(hidden, weight, ids, shard=shard, entropy=entropy, top_k=top_k, **options)
            return joined(out.log_probs, out.entropy, out.top_log_probs)

        return function

    def problem(workload: Workload) -> Problem:
        hidden, weight, labels = workload[:3]
        like: dict[str, Any] = {"generator": torch.Generator(hidden.device).manual_seed(1), "device": hidden.device}
        others = torch.randint(len(weight), (len(hidden), num_ids - 1), **like)
        upstream = torch.randn(len(hidden), num_ids, **like) / (len(hidden) * num_ids)
        of_entropy = torch.randn(len(hidden), entropy, **like) / len(hidden)
        ids = torch.cat((labels[:, None], others), 1)
        return Problem((hidden, ids), (weight,), torch.cat((upstream, of_entropy), 1), truth, reduced=False, grad=grad)

    rivals = {"torch": lambda: dense, "torch-compile": lambda: compiled(dense)}
    return Task(partial(_rows, build, rivals), problem, name)


def kept_task(name: str) -> Task:
    """Return the task of log-probabilities within each token's K likeliest ids, its label among them."""
    num_ids = KEPT_IDS[name]

    def dense(hidden: Tensor, weight: Tensor, labels: Tensor, ids: Tensor) -> Tensor:
        kept = (hidden @ weight.t()).gather(1, ids)
        kept = kept.to(torch.promote_types(kept.dtype, torch.float32))
        return torch.where(ids == labels[:, None], kept, 0.0).sum(1) - kept.logsumexp(1)

    def build(shard: VocabShard, hidden: Tensor, options: dict[str, Any]) -> Function:
        offsets = torch.arange(0, len(hidden) * num_ids + 1, num_ids, device=hidden.device)

        def function(hidden: Tensor, weight: Tensor, labels: Tensor, ids: Tensor) -> Tensor:
            kept = KeptIds(offsets, ids.flatten())
            return linear_log_probs(hidden, weight, labels, kept=kept, shard=shard, **options).log_probs

        return function

    def problem(workload: Workload) -> Problem:
        hidden, weight, labels = workload[:3]
        ids = (hidden @ weight.t()).topk(num_ids).indices
        is_there = (ids == labels[:, None]).any(1)
        ids[:, -1] = torch.where(is_there, ids[:, -1], labels)
        like: dict[str, Any] = {"generator": torch.Generator(hidden.device).manual_seed(1), "device": hidden.device}
        upstream = torch.randn(len(hidden), **like) / len(hidden)
        return Problem((hidden, labels, ids), (weight,), upstream, dense, reduced=False)

    return Task(partial(_rows, build, {"torch": lambda: dense}), problem, name)


def divergence_task(kind: str, teacher_size: int | None) -> Task:
    """Return the task of the mean divergence of two heads."""

    def dense(hidden: Tensor, weight: Tensor, teacher: Tensor, teacher_weight: Tensor) -> Tensor:
        log_p = (hidden @ weight.t()).float().log_softmax(-1)
        log_t = (teacher @ teacher_weight.t()).float().log_softmax(-1)
        if kind == "tv":
            return (log_t.exp() - log_p.exp()).clamp(min=0).sum(-1).mean()
        if kind == "lk":
            return -torch.minimum(log_p, log_t).logsumexp(-1).mean()
        mean = partial(F.kl_div, reduction="batchmean", log_target=True)
        if kind != "jsd":
            return mean(log_p, log_t) if kind == "forward" else mean(log_t, log_p)
        log_m = torch.logaddexp(log_p, log_t) - torch.tensor(2.0).log().item()
        return 0.5 * (mean(log_m, log_t) + mean(log_m, log_p))

    def build(shard: VocabShard, hidden: Tensor, options: dict[str, Any]) -> Function:
        function = partial(
            linear_kl_divergence, kind=kind, reduction="mean", shard=shard, teacher_shard=shard, **options
        )
        return cast(Function, function)

    def liger() -> Function:
        from liger_kernel.transformers.fused_linear_jsd import (  # pyright: ignore[reportMissingImports]
            LigerFusedLinearJSD,
        )

        if not torch.cuda.is_available():
            raise ImportError("needs a GPU")
        of_both = LigerFusedLinearJSD(jsd_beta={"forward": 0.0, "reverse": 1.0, "jsd": 0.5}[kind])
        return lambda *heads: of_both(*heads, None)

    def problem(workload: Workload) -> Problem:
        hidden, weight = workload[:2]
        shape = HeadShape(teacher_size or hidden.shape[1], len(weight))
        teacher = make_workload(shape, len(hidden), dtype=hidden.dtype, device=hidden.device, seed=1)
        upstream = torch.full((len(hidden),), 1 / len(hidden), device=hidden.device)
        truth = partial(reference.linear_kl_divergence, kind=kind)
        return Problem((hidden, teacher.hidden), (weight, teacher.weight), upstream, cast(Function, truth))

    rivals = {"torch": lambda: dense, "torch-compile": lambda: compiled(dense)}
    if kind not in ("tv", "lk"):
        rivals["liger"] = liger
    return Task(partial(_rows, build, rivals), problem, f"kl-{kind}")
