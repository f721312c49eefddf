"""Two ranks that were called differently: under CCE_DIST_DEBUG=1 both raise and name what differs; nobody waits.

Each disagreement is a row of the table, and all rows of a spawn that fail are said together.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from cce_dist import (
    GradFilter,
    KeptIds,
    VocabShard,
    linear_cross_entropy,
    linear_kl_divergence,
    linear_log_probs,
    objectives,
    topk_kl_divergence,
)
from cce_dist.tools.ranks import run_ranks

N, D, V = 6, 8, 20
WAIT_SECONDS = 5  # of a collective that nobody else joins

# Name, what rank r passes differently (a function of r), and what the error says on both ranks.
DISAGREEMENTS: list[tuple[str, Callable[[int], dict[str, Any]], str]] = [
    ("reduction", lambda r: dict(reduction=("mean", "sum")[r]), "disagree on reduction"),
    ("label_smoothing", lambda r: dict(label_smoothing=0.1 + 0.1 * r), "disagree on label_smoothing"),
    ("label_smoothing-off", lambda r: dict(label_smoothing=0.1 * r), "disagree on label_smoothing"),
    ("z_loss_weight", lambda r: dict(z_loss_weight=1e-4 * (1 + r)), "disagree on z_loss_weight"),
    ("num_tokens", lambda r: dict(num_tokens=10 + r), "disagree on num_tokens"),
    ("num_tokens-none", lambda r: dict(num_tokens=10 if r else None), "disagree on num_tokens"),
    ("num_tokens-tensor", lambda r: dict(num_tokens=torch.tensor(10 + r)), "disagree on num_tokens"),
    ("softcap", lambda r: dict(softcap=1.0 + r), "disagree on softcap"),
    ("logit_scale", lambda r: dict(logit_scale=1.0 + r), "disagree on logit_scale"),
    ("ignore_index", lambda r: dict(ignore_index=-100 - r), "disagree on ignore_index"),
    ("return_aux", lambda r: dict(return_aux=bool(r)), "disagree on return_aux"),
    ("input_grad", lambda r: dict(input_grad=("summed", "partial")[r]), "disagree on input_grad"),
    ("reduce_dtype", lambda r: dict(reduce_dtype=(None, torch.bfloat16)[r]), "disagree on reduce_dtype"),
    ("grad_filter", lambda r: dict(grad_filter=(None, GradFilter())[r]), "disagree on grad_filter"),
    ("workspace_bytes", lambda r: dict(workspace_bytes=1 << (20 + r)), "disagree on workspace_bytes"),
    ("linear_bias", lambda r: dict(linear_bias=(None, torch.zeros(V // 2))[r]), "disagree on linear_bias"),
    ("target-swapped", lambda r: dict(target=torch.tensor(([1, 4, 3, 0, 0, 0], [5, 2, 3, 0, 0, 0])[r])), "disagree on target"),
    ("target-permuted", lambda r: dict(target=torch.arange(N) if r == 0 else torch.arange(N).flip(0)), "disagree on target"),
    ("target-ignored", lambda r: dict(target=torch.arange(N).index_fill(0, torch.tensor([r]), -100)), "disagree on target"),
    ("input-needs-gradient", lambda r: dict(input=_hidden().requires_grad_(r == 0)), "disagree on input.*gradient"),
    ("class-weights", lambda r: dict(weight=torch.ones(V) + r), "disagree on weight"),
    ("token-loss", lambda r: dict(token_loss=(None, objectives.dft())[r]), "disagree on token_loss"),
    ("token-inputs", lambda r: dict(token_loss=_weighted, token_inputs=(torch.ones(N) + r,)), r"disagree on token_inputs\[0\]"),
    ("num-of-labels", lambda r: dict(input=_hidden()[r:], target=torch.arange(r, N)), r"disagree on .*by rank .*6.*5"),
    ("shards", lambda r: dict(shard=VocabShard(11 * r, 10 + 11 * r, V, dist.group.WORLD)), "do not tile"),
]  # fmt: skip


def _weighted(log_probs: Tensor, _: None, weights: Tensor) -> Tensor:
    return -log_probs * weights


def _hidden() -> Tensor:
    return torch.randn(N, D, generator=torch.Generator().manual_seed(0))


def _call(**change) -> Any:
    """The call that all rows change: every rank alike, labels that sum to 15 with weights 1 to N in two ways."""
    shard = VocabShard.even(V, dist.group.WORLD)
    weight = torch.randn(shard.num_rows, D, generator=torch.Generator().manual_seed(1 + dist.get_rank()))
    arguments: dict[str, Any] = dict(
        input=_hidden(), linear_weight=weight.requires_grad_(), target=torch.arange(N), shard=shard
    )
    return linear_cross_entropy(**(arguments | change))


def test_two_ranks() -> None:
    run_ranks(_two_ranks, 2, timeout_seconds=WAIT_SECONDS)


def _two_ranks() -> None:
    os.environ["CCE_DIST_DEBUG"] = "1"
    wrong = [*_disagreements(), *_bad_labels(), *_bad_arguments(), *_agreement()]
    assert not wrong, f"rank {dist.get_rank()}:\n" + "\n".join(wrong)


def _disagreements() -> list[str]:
    """Every row, on both ranks: both must be told, and at once."""
    rank, wrong = dist.get_rank(), []
    for name, change, says in DISAGREEMENTS:
        started = time.monotonic()
        got = _error(lambda change=change: _call(**change(rank)))
        if not _matches(got, RuntimeError, says) or time.monotonic() - started > WAIT_SECONDS / 2:
            wrong.append(f"{name}: expected {says!r}, got {got!r}")
        dist.barrier()
    return wrong


def _bad_labels() -> list[str]:
    """A label outside the vocabulary, on one rank or on all, is said by all."""
    rank, wrong = dist.get_rank(), []
    for bad_ranks, kind, says in (
        ((0,), RuntimeError, "target"),
        ((1,), RuntimeError, "target"),
        ((0, 1), IndexError, r"target\[3\]"),
    ):
        labels = torch.arange(N)
        labels[3] = V + 5 if rank in bad_ranks else 3
        got = _error(lambda labels=labels: _call(target=labels))
        if not _matches(got, (IndexError, kind), says):
            wrong.append(f"bad label on ranks {bad_ranks}: got {got!r}")
        dist.barrier()
    return wrong


def _bad_arguments() -> list[str]:
    """An argument that one rank alone has wrong, or otherwise: each function's error is raised by all; no error without it."""
    group = dist.group.WORLD
    rank, wrong, shard = dist.get_rank(), [], VocabShard.even(V, group)
    mesh = init_device_mesh("cpu", (2,))
    weight = torch.randn(shard.num_rows, D)
    of_teacher = dict(teacher_input=_hidden(), teacher_weight=weight)
    of_some = dict(teacher_ids=torch.arange(3).expand(N, -1), teacher_log_probs=torch.full((N, 3), -2.0))
    of_ids = dict(ids=torch.arange(N), temperature=torch.ones(N))
    some_lists = KeptIds(torch.arange(N + 1), torch.arange(N))
    of_lists = of_ids | dict(kept=some_lists)
    other_lists = KeptIds(torch.arange(N + 1), torch.arange(N).flip(0))
    others_whole = some_lists._replace(whole=torch.tensor([0]))
    rows: list[tuple[Callable[..., Any], dict[str, Any], dict[str, Any], type, str]] = [
        (linear_cross_entropy, dict(target=torch.arange(N)), dict(softcap=-1.0), ValueError, "softcap"),
        (linear_cross_entropy, dict(target=torch.arange(N)), dict(target=torch.arange(N - 1)), ValueError, "target"),
        (linear_cross_entropy, dict(target=torch.arange(N)), dict(no_option=1), TypeError, "no_option"),
        (linear_cross_entropy, dict(target=torch.arange(N)), dict(linear_weight=weight[1:]), ValueError, "linear_weight"),
        (linear_log_probs, of_ids, dict(temperature=0.0), ValueError, "temperature"),
        (linear_log_probs, of_ids, dict(temperature=torch.zeros(N)), ValueError, "temperature"),
        (linear_log_probs, of_ids, dict(temperature=torch.full((N,), 2.0)), RuntimeError, "disagree on temperature"),
        (linear_log_probs, of_ids, dict(logit_scale=2.0), RuntimeError, "disagree on logit_scale"),
        (linear_log_probs, of_ids, dict(top_k=1), RuntimeError, "disagree on top_k"),
        (linear_log_probs, of_ids, dict(ids=torch.arange(N).flip(0)), RuntimeError, "log_probs: .* disagree on ids"),
        (linear_log_probs, of_ids, dict(ids=torch.full((N,), V)), IndexError, r"rank [01] of the group: ids\[0\]"),
        (linear_log_probs, of_lists, dict(top_k=2), ValueError, "top_k"),
        (linear_log_probs, of_lists, dict(kept=other_lists), RuntimeError, r"disagree on kept\.ids"),
        (linear_log_probs, of_lists, dict(kept=others_whole), RuntimeError, r"disagree on kept\.whole"),
        (linear_kl_divergence, of_teacher, dict(kind="backward"), ValueError, "kind"),
        (linear_kl_divergence, of_teacher, dict(kind="reverse"), RuntimeError, "kl_divergence: .* disagree on kind"),
        (linear_kl_divergence, of_teacher, dict(teacher_input=_hidden()[1:]), ValueError, "teacher_input"),
        (linear_kl_divergence, of_teacher, dict(teacher_shard="all"), TypeError, "teacher_shard"),
        (topk_kl_divergence, of_some, dict(outside="rest"), ValueError, "outside"),
        (topk_kl_divergence, of_some, dict(teacher_log_probs=torch.zeros(N, 3)), ValueError, "sum is above 1"),
        (topk_kl_divergence, of_some, dict(softcap="1"), TypeError, "softcap"),
    ]  # fmt: skip
    for function, given, change, kind, says in rows:
        for bad_rank in (0, 1, None):
            call = (
                dict(input=_hidden(), linear_weight=weight, shard=shard) | given | (change if rank == bad_rank else {})
            )
            got = _error(lambda function=function, call=call: function(**call))
            if not (got is None if bad_rank is None else _matches(got, kind, says)):
                wrong.append(f"{function.__name__}, {says} on rank {bad_rank}: got {got!r}")
            dist.barrier()
    split = distribute_tensor(torch.randn(V, D), mesh, [Shard(0)])
    got = _error(lambda: linear_cross_entropy(_hidden(), split, torch.arange(N), reduction=("mean", "most")[rank]))
    if not _matches(got, ValueError, "reduction"):
        wrong.append(f"a DTensor: got {got!r}")
    dist.barrier()
    got = _error(
        lambda: (linear_log_probs, linear_cross_entropy)[rank](_hidden(), weight, torch.arange(N), shard=shard)
    )
    if not _matches(got, RuntimeError, "disagree on function"):
        wrong.append(f"two functions: got {got!r}")
    return wrong


def _agreement() -> list[str]:
    """Catches a check that sees differences where there are none: shards, bias, inputs of ignored tokens."""
    rank = float(dist.get_rank())
    ignored, inputs = torch.arange(N).index_fill(0, torch.tensor([1]), -100), torch.ones(N)
    inputs[1] = rank
    bias = torch.full((V // 2,), rank)
    got = _error(lambda: _call(linear_bias=bias, num_tokens=torch.tensor(5)))
    got = got or _error(lambda: _call(target=ignored, token_loss=_weighted, token_inputs=(inputs,)))
    return [f"a call that agrees: got {got!r}"] if got is not None else []


def _error(function: Callable[[], Any]) -> Exception | None:
    try:
        function()
    except Exception as error:
        return error
    return None


def _matches(error: Exception | None, kind: Any, says: str) -> bool:
    return isinstance(error, kind) and re.search(says, str(error)) is not None
