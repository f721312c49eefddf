"""What a table of heads computes: the loss, a framework's last stage, log-probabilities, the divergence of two heads.

A task makes a ``Problem`` of a workload, and has rows for it. Upstream gradients of log-probabilities have both signs, like
advantages. The two heads of a divergence are drawn independently.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

import methods
from cce_dist import (
    KeptIds,
    VocabShard,
    linear_cross_entropy,
    linear_kl_divergence,
    linear_log_probs,
    objectives,
    reference,
)
from cce_dist.kernels.divergence.heads import KINDS
from loop import Method
from methods import our_rows
from peers import compiled
from problem import Function, Problem, loss_of
from workload import HeadShape, Workload, make_workload

LOG_PROBS = {  # tasks: ids of a token, whether entropies too, how many of the largest logits, whether gradients
    "entropy": (1, True, 0, True),
    "ids-1": (1, False, 0, True),
    "ids-64": (64, False, 0, True),
    "scores": (1, True, 64, False),
}
# Tasks: ids of a token's list, and one in how many tokens takes the whole vocabulary; 0: none.
KEPT_IDS = {"kept-20": (20, 0), "kept-64": (64, 0), "kept-512": (512, 0), "kept-64-tenth": (64, 10)}
# Tasks: token_loss, and whether it takes a policy's inputs.
OBJECTIVES: dict[str, tuple[Callable[..., Any] | None, bool]] = {
    "mean": (None, False),  # the plain mean, which the other losses are compared with
    "dft": (objectives.dft(), False),
    "clipped": (objectives.clipped_policy(0.2, 0.28), True),
    "clipped-entropy": (objectives.clipped_policy(0.2, 0.28, entropy_coef=0.01), True),
    "truncated": (objectives.truncated_importance(2.0), True),
}


class Task(NamedTuple):
    """One kind of table."""

    methods: Callable[[Sequence[int]], dict[str, Method]]  # workspaces in MiB -> the rows by name
    problem: Callable[[Workload], Problem]  # what the rows compute
    name: str = ""  # empty for the loss and for last stages


def tasks_of(args: argparse.Namespace) -> list[Task]:
    """Return the tasks that the options of ``heads.py`` ask for."""
    names = [] if args.log_probs is None else args.log_probs or [*LOG_PROBS, *KEPT_IDS]
    tasks = [kept_task(name) if name in KEPT_IDS else scores_task(name) for name in names]
    tasks += [] if args.kl is None else [divergence_task(kind) for kind in args.kl or KINDS]
    tasks += [] if args.objectives is None else [objective_task(name) for name in args.objectives or OBJECTIVES]
    return tasks or [Task(partial(methods.methods_of, args.stage or ""), lambda workload: loss_of(*workload[:3]))]


def _rows(build: Callable[..., Function], dense: Function, workspace_mib: Sequence[int]) -> dict[str, Method]:
    """Return this library's rows, and plain torch's, ``dense`` eager and compiled, which need the whole vocabulary."""
    table = our_rows(build, workspace_mib, filtered=False)
    table["torch"] = Method(lambda *case: dense, needs_whole=True)
    table["torch-compile"] = Method(lambda *case: compiled(dense), needs_whole=True)
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
        log_p = reference.logits(hidden, weight).log_softmax(-1)
        of_entropy = -(log_p.exp() * log_p).sum(-1) if entropy else None
        return joined(log_p.gather(1, ids), of_entropy, log_p.topk(top_k).values if top_k else None)

    def build(shard: VocabShard, hidden: Tensor, options: dict[str, Any]) -> Function:
        def function(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
            out = linear_log_probs(hidden, weight, ids, shard=shard, entropy=entropy, top_k=top_k, **options)
            return joined(out.log_probs, out.entropy, out.top_log_probs)

        return function

    def problem(workload: Workload) -> Problem:
        hidden, weight, labels = workload[:3]
        like = _like(hidden)
        others = torch.randint(len(weight), (len(hidden), num_ids - 1), **like)
        upstream = torch.randn(len(hidden), num_ids, **like) / (len(hidden) * num_ids)
        of_entropy = torch.randn(len(hidden), entropy, **like) / len(hidden)
        ids = torch.cat((labels[:, None], others), 1)
        return Problem((hidden, ids), (weight,), torch.cat((upstream, of_entropy), 1), truth, reduced=False, grad=grad)

    return Task(partial(_rows, build, dense), problem, name)


def kept_task(name: str) -> Task:
    """Return the task of log-probabilities within each token's K likeliest ids, its label among them."""
    num_ids, one_in = KEPT_IDS[name]

    def dense(hidden: Tensor, weight: Tensor, labels: Tensor, ids: Tensor) -> Tensor:
        logits = reference.logits(hidden, weight)
        lse = logits.gather(1, ids.clamp(min=0)).logsumexp(1)
        if one_in:
            lse = torch.where(ids[:, 0] < 0, logits.logsumexp(1), lse)
        return logits.gather(1, labels[:, None])[:, 0] - lse

    def split(num_tokens: int) -> tuple[range, list[int]]:
        whole = range(0, num_tokens if one_in else 0, one_in or 1)
        return whole, [token for token in range(num_tokens) if token not in whole]

    def build(shard: VocabShard, hidden: Tensor, options: dict[str, Any]) -> Function:
        whole, listed = (torch.tensor(part, device=hidden.device).long() for part in split(len(hidden)))
        counts = torch.full((len(hidden) + 1,), num_ids, device=hidden.device).index_fill_(0, whole + 1, 0)
        counts[0] = 0
        offsets = counts.cumsum(0)

        def function(hidden: Tensor, weight: Tensor, labels: Tensor, ids: Tensor) -> Tensor:
            kept = KeptIds(offsets, ids[listed].flatten(), whole) if one_in else KeptIds(offsets, ids.flatten())
            return linear_log_probs(hidden, weight, labels, kept=kept, shard=shard, **options).log_probs

        return function

    def problem(workload: Workload) -> Problem:
        hidden, weight, labels = workload[:3]
        ids = (hidden @ weight.t()).topk(num_ids).indices
        is_there = (ids == labels[:, None]).any(1)
        ids[:, -1] = torch.where(is_there, ids[:, -1], labels)
        ids[[*split(len(ids))[0]]] = -1
        upstream = torch.randn(len(hidden), **_like(hidden)) / len(hidden)
        return Problem((hidden, labels, ids), (weight,), upstream, dense, reduced=False)

    return Task(partial(_rows, build, dense), problem, name)


def divergence_task(kind: str) -> Task:
    """Return the task of the mean divergence of two heads of the same shape."""

    def truth(*heads: Tensor) -> Tensor:
        hidden, weight, teacher, teacher_weight = heads
        return reference.linear_kl_divergence(hidden, weight, teacher, teacher_weight, kind=kind)

    def dense(*heads: Tensor) -> Tensor:
        return truth(*heads).mean()

    def build(shard: VocabShard, hidden: Tensor, options: dict[str, Any]) -> Function:
        shards = {"shard": shard, "teacher_shard": shard}
        return cast(Function, partial(linear_kl_divergence, kind=kind, reduction="mean", **shards, **options))

    def problem(workload: Workload) -> Problem:
        hidden, weight = workload[:2]
        shape = HeadShape(hidden.shape[1], len(weight))
        teacher = make_workload(shape, len(hidden), dtype=hidden.dtype, device=hidden.device, seed=1)
        upstream = torch.full((len(hidden),), 1 / len(hidden), device=hidden.device)
        return Problem((hidden, teacher.hidden), (weight, teacher.weight), upstream, truth)

    return Task(partial(_rows, build, dense), problem, f"kl-{kind}")


def objective_task(name: str) -> Task:
    """Return the task of the mean of a function of each token's log-probability and entropy."""
    token_loss, has_policy = OBJECTIVES[name]

    def loss(function: Callable[..., Any], hidden: Tensor, weight: Tensor, labels: Tensor, *inputs: Tensor) -> Any:
        options = {"token_loss": token_loss, "token_inputs": inputs} if token_loss else {}
        return function(hidden, weight, labels, **options)

    def build(shard: VocabShard, hidden: Tensor, options: dict[str, Any]) -> Function:
        return cast(Function, partial(loss, partial(linear_cross_entropy, shard=shard, **options)))

    def truth(*operands: Tensor, reduction: str = "none") -> Tensor:
        return loss(partial(reference.linear_cross_entropy, reduction=reduction), *operands).loss

    def problem(workload: Workload) -> Problem:
        hidden, weight, labels = workload[:3]
        inputs: list[Tensor] = []
        if has_policy:  # advantages, and log-probabilities of an older policy
            log_probs = -cast(Tensor, linear_cross_entropy(hidden, weight, labels, reduction="none"))
            advantages, noise = torch.randn(2, len(labels), **_like(hidden))
            inputs = [advantages, log_probs + 0.3 * noise]
        return replace(loss_of(hidden, weight, labels), tokens=(hidden, labels, *inputs), values=truth)

    return Task(partial(_rows, build, partial(truth, reduction="mean")), problem, name)


def _like(hidden: Tensor) -> dict[str, Any]:
    """Return the options that draw the same numbers in every run, where hidden states are."""
    return {"generator": torch.Generator(hidden.device).manual_seed(1), "device": hidden.device}
