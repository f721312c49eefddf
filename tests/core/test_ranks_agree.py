"""Two ranks that were called differently: under CCE_DIST_DEBUG=1 both raise and name what differs; neither waits.

One table has values of every argument of every public function. All disagreements that fail are reported together. Groups that
a process has lost, or does not have yet, come last: no call uses another group instead.
"""

import inspect
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.refused import result_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._pytree import tree_leaves

from cce_dist import (
    GradFilter,
    KeptIds,
    VocabParallelHead,
    VocabShard,
    convert,
    groups,
    linear_cross_entropy,
    linear_kl_divergence,
    linear_log_probs,
    merge,
    objectives,
    topk_kl_divergence,
)
from cce_dist.debug_ranks import SHARED
from cce_dist.integrations.deepspeed.layers import CCEEmbedding
from cce_dist.tools.ranks import join_alone

N, D, V, K = 6, 8, 20, 3
WAIT_SECONDS = 5  # of a collective that the other rank does not join; gloo's error then names no argument
SWEEP = 300  # random calls
SAYS = {  # what the errors of an argument name, if it is not the argument
    "sequence_parallel": "sequence_parallel|input|slices",
    "shard": "shard|vocab_size",
    "teacher_shard": "shard",
    "kept_mass": "kept",
    "teacher_ids": r"teacher|ids\[0\]",
    "token_loss": "token_loss|no losses|no derivatives",
}
Values = dict[str, list[Any]]


def _weighted(log_probs: Tensor, _: Any, *weights: Tensor) -> Tensor:
    return -log_probs * weights[0].float()


def _raising(log_probs: Tensor, _: Any) -> Tensor:
    raise ValueError("no losses")


def _with_entropy(log_probs: Tensor, _: Any) -> Tensor:
    return -log_probs


_with_entropy.needs_entropy = True


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return -values

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise ValueError("no derivatives")


def values_of(function: Callable[..., Any]) -> Values:
    """Return values of each argument; the first is the default here. A dict has values of several arguments.

    Each value differs from the next one in what ranks must share.
    """
    draw, group = torch.Generator().manual_seed(0), dist.group.WORLD
    hidden, weight, ones = torch.randn(N, D, generator=draw), torch.randn(V // 2, D, generator=draw), torch.ones(N)
    ids, some, bias = torch.arange(N), torch.arange(N)[:, None] + torch.arange(K), torch.zeros(V // 2)
    even = VocabShard.even(V, group)
    shifted = VocabShard(even.start + 1, even.stop + 1, V, group)

    def learned(tensor: Tensor) -> Tensor:
        return tensor.clone().requires_grad_()

    tensors = [weight, learned(weight), weight.half(), weight[:, 1:], weight[1:]]
    values: Values = {
        "input": [hidden, learned(hidden), hidden[1:], hidden.half()],
        "linear_weight": [*tensors[1:], weight],
        "linear_bias": [None, bias, bias.half(), learned(bias)],
        "logit_scale": [1.0, 2.0, torch.tensor(2.0), torch.tensor(3.0), learned(torch.tensor(3.0))],
        "softcap": [None, 1.0, 2.0, -1.0, "1"],
        "reduction": ["none", "mean", "sum", "most"],
        "shard": [even, shifted, VocabShard(even.start, even.stop, V - 1, group)],
        "sequence_parallel": [False, True, *(dict(sequence_parallel=True, input=hidden[:n]) for n in (3, 2))],
        "input_grad": ["summed", "partial"],
        "reduce_dtype": [None, torch.bfloat16],
        "backend": ["auto", "triton"],
        "workspace_bytes": [None, 1 << 20, 1 << 21],
        "grad_weight_out": [None, torch.zeros(V // 2, D), torch.zeros(V // 2, D).half()],
        "ignore_index": [-100, -101],
    }
    masks: list[Any] = [None, ids > 0, ids > 1]
    if function is linear_cross_entropy:
        a_loss, unit = dict(token_loss=_weighted, reduction="sum"), (ones,)
        return values | {
            "target": [ids, ids.flip(0), ids.masked_fill(ids == 0, -100), ids.masked_fill(ids == 1, -100), ids + V, ids[1:]],
            "weight": [None, torch.ones(V), torch.ones(V) + 1, torch.ones(V).double()],
            "reduction": ["mean", "sum", "none", "most"],
            "label_smoothing": [0.0, 0.1, 0.2],
            "z_loss_weight": [0.0, 1e-4, 2e-4],
            "num_tokens": [None, 10, 11, torch.tensor(11), torch.tensor(12)],
            "grad_filter": [None, GradFilter(), GradFilter(always=True)],
            "return_aux": [False, True, ("nll",)],
            "expected_weights": [*(dict(reduction="none", expected_weights=w) for w in (True, False, ones, ones + 1))],
            "token_loss": [
                None, _with_entropy, lambda p, _: -p, lambda p, _: -2 * p, _raising, objectives.dft(),
                lambda p, _: -p * p.exp(), lambda p, _: -p.detach(), lambda p, _: _NoBackward.apply(p), lambda p, _: -p.sum(),
            ],
            "token_inputs": [
                *(a_loss | dict(token_inputs=i) for i in ((), unit, (ones + 1,), (ones, ones), (ones.double(),))),
                *(a_loss | dict(token_inputs=(ones.to(dtype),)) for dtype in (torch.float8_e4m3fn, torch.uint32)),
            ],
        }  # fmt: skip
    if function is linear_log_probs:
        del values["reduction"]
        lists, other = (dict(kept=KeptIds(torch.arange(N + 1), entries)) for entries in (ids, ids.flip(0)))
        mixed = dict(kept=KeptIds(torch.arange(N + 1), ids, torch.tensor([0])))
        return values | {
            "ids": [ids, ids.flip(0), some, ids + V, ids.int()],
            "temperature": [1.0, 2.0, 2 * ones, torch.tensor(2.0), 0.0, 0 * ones],
            "entropy": [False, True],
            "sum_p_squared": [False, True],
            "argmax": [False, True],
            "top_k": [0, 1, 2, V + 1],
            "kept": [None, lists, other, mixed, lists | dict(top_k=1)],
            "kept_mass": [False, lists | dict(kept_mass=True), lists, dict(kept_mass=True)],
            "batch_invariant": [False, True],
        }
    if function is linear_kl_divergence:
        del values["ignore_index"]
        jsd = [dict(kind="jsd", beta=beta) for beta in (0.5, 0.25, 1.0)]
        maps = [dict(teacher_ids=torch.arange(V).roll(n), teacher_shard=VocabShard(0, V, V, None)) for n in (0, 1)]
        return values | {
            "teacher_input": [hidden, hidden.half(), hidden[1:]],
            "teacher_weight": [weight, weight.half(), weight[1:], learned(weight)],
            "teacher_bias": [None, bias, bias.half()],
            "teacher_logit_scale": [1.0, 2.0, torch.tensor(2.0), torch.tensor(3.0)],
            "teacher_softcap": [None, 1.0, 2.0],
            "kind": ["forward", "reverse", "tv", "backward"],
            "beta": jsd,
            "mask": masks,
            "teacher_shard": [None, even, shifted, "all"],
            "teacher_ids": [None, *(m | dict(teacher_weight=torch.ones(V, D)) for m in maps)],
        }
    low = torch.full((N, K), -2.0)
    return values | {
        "teacher_ids": [some, some + 1, some[:, :2], some.int(), some + V],
        "teacher_log_probs": [low, low - 1, low.double(), 0 * low],
        "kind": ["forward", "reverse", "backward"],
        "outside": ["renormalise", "tail", "drop", "rest"],
        "temperature": [1.0, 2.0, 2 * ones, torch.tensor(2.0)],
        "mask": masks,
    }


FUNCTIONS = (linear_cross_entropy, linear_log_probs, linear_kl_divergence, topk_kl_divergence)


def _call(function: Callable[..., Any], values: Values, *changes: tuple[str, int]) -> Any:
    """Make the call with one value of each named argument, and its backward. Return the result, or the exception."""
    given = _defaults(values)
    for name, number in changes:
        value = values[name][number]
        given |= value if isinstance(value, dict) else {name: value}

    def call() -> Any:
        found = function(**given)
        with_gradient = [x.sum() for x in tree_leaves(found) if isinstance(x, Tensor) and x.requires_grad]
        if with_gradient:
            sum(with_gradient, torch.zeros(())).backward()
        return found

    return result_of(call)


def _defaults(values: Values) -> dict[str, Any]:
    return {name: of_name[0] for name, of_name in values.items() if not isinstance(of_name[0], dict)}


def test_every_argument_is_in_the_tables() -> None:
    """Catches a new argument that nobody compared, and a page that lists other arguments than the check."""
    page = (Path(__file__).resolve().parents[2] / "docs/api.md").read_text()
    documented = {}
    table = page.split("### Ranks that disagree")[1]
    for names, parts in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| ([^|]+) \|$", table, re.M):
        documented |= dict.fromkeys(re.findall(r"\w+", names), tuple(parts.split(", ")))
    assert documented == {name: parts for name, parts in SHARED.items() if parts}
    names = {name for function in FUNCTIONS for name in inspect.signature(function).parameters}
    assert SHARED.keys() <= names


def test_two_ranks() -> None:
    run_ranks(_two_ranks, 2, timeout_seconds=WAIT_SECONDS)


def _two_ranks() -> None:
    os.environ["CCE_DIST_DEBUG"] = "1"
    wrong = [line for function in FUNCTIONS for line in _disagreements(function)]
    with groups.of_rows(4):
        wrong += _disagreements(linear_cross_entropy, ("token_loss",))
    wrong += [*_bad_calls(), *_agreement()]
    assert not wrong, f"rank {dist.get_rank()}:\n" + "\n".join(wrong)


def _disagreements(function: Callable[..., Any], names: Any = None) -> list[str]:
    """Each value of an argument on rank 0, and the next one on rank 1: both ranks must be told.

    With one value on both ranks, neither may see a difference.
    """
    rank, values, wrong = dist.get_rank(), values_of(function), []
    parameters = inspect.signature(function).parameters.keys() - {"options"}
    assert values.keys() == parameters, f"{function.__name__}: {values.keys() ^ parameters}"
    for name in names or values:
        says = SAYS.get(name, name)
        for number in range(len(values[name])):
            found = _call(function, values, (name, number))
            if "disagree" in str(found):
                wrong.append(f"{function.__name__}, {name} {number} on both ranks: {found!r}")
            dist.barrier()
            if number == 0:
                continue
            found = _call(function, values, (name, number - 1 + rank))
            if not _is_error(found, says):
                wrong.append(f"{function.__name__}, {name} {number - 1} and {number}: expected {says!r}, got {found!r}")
            dist.barrier()
    return wrong


def _is_error(found: Any, says: str, kind: Any = (ValueError, TypeError, IndexError, RuntimeError)) -> bool:
    return isinstance(found, kind) and re.search(says, str(found)) is not None


def _bad_calls() -> list[str]:
    """What the tables lack: one label on all ranks, unknown arguments, DTensors, two functions, metrics, modes, new facts."""
    rank, wrong, loss = dist.get_rank(), [], cast(Any, linear_cross_entropy)
    given = _defaults(values_of(loss))
    tensors, shard = (given["input"], given["linear_weight"], given["target"]), given["shard"]
    split = distribute_tensor(torch.randn(V, D), init_device_mesh("cpu", (2,)), [Shard(0)])
    change = ({}, dict(no_option=1))[rank]
    metric = dict(token_loss=lambda p, _: (-p, {"m": p[: N - rank]}), return_aux=True)

    def of_input(x: Tensor) -> Any:
        return loss(x, *tensors[1:], shard=shard)

    calls: list[tuple[Callable[[], Any], type, str]] = [
        (lambda: loss(**given | dict(target=torch.arange(N) + V)), IndexError, r"target\[0\]"),
        (lambda: loss(**given | change), TypeError, "no_option"),
        (lambda: loss(tensors[0], split, tensors[2], reduction=("mean", "most")[rank]), ValueError, "reduction"),
        # Data-parallel ranks, whose FSDP2 weight looks like a vocabulary-parallel one.
        (lambda: loss(tensors[0], split, (tensors[2], tensors[2].flip(0))[rank]), RuntimeError, "disagree on target"),
        (lambda: (loss, linear_log_probs)[rank](*tensors, shard=shard), RuntimeError, "disagree on function"),
        (lambda: merge.assert_ranks_agree("", ({}, {"new": 1})[rank], (0, 0), shard.group, 0), RuntimeError, "disagree on new"),
        (lambda: loss(**given | metric), ValueError, r"metrics\['m'\]"),
        (lambda: (of_input, torch.func.grad(of_input))[rank](tensors[0]), RuntimeError, "not with torch.func"),
        (lambda: (loss, torch.no_grad()(loss))[rank](*tensors, shard=shard), RuntimeError, "grad_mode"),
    ]  # fmt: skip
    for call, kind, says in calls:
        found = result_of(call)
        if not _is_error(found, says, kind):
            wrong.append(f"expected {says!r}, got {found!r}")
        dist.barrier()
    return wrong


def _agreement() -> list[str]:
    """Catches a check that sees differences where there are none: in shards, biases, and inputs of ignored tokens."""
    rank, loss = float(dist.get_rank()), cast(Any, linear_cross_entropy)
    given = _defaults(values_of(loss))
    target, own = torch.arange(N).masked_fill(torch.arange(N) == 1, -100), torch.ones(N)
    own[1] = rank
    given |= dict(linear_bias=torch.full((V // 2,), rank), target=target)
    for more in (dict(token_loss=_weighted, token_inputs=(own,)), dict(reduction="none", expected_weights=own)):
        found = result_of(lambda more=more: loss(**(given | more)))
        if isinstance(found, Exception):
            return [f"a call that agrees: got {found!r}"]
    return []


@pytest.mark.sweep
@pytest.mark.parametrize("seed", [62, 63])
def test_random_disagreements(seed: int) -> None:
    run_ranks(_random_disagreements, 2, seed, timeout_seconds=WAIT_SECONDS)


def _random_disagreements(seed: int) -> None:
    """Each rank draws its own values of arguments. Catches a rank that waits, or that answers while the other one raises."""
    os.environ["CCE_DIST_DEBUG"] = "1"
    wrong = []
    for number in range(SWEEP):
        shared = random.Random(f"{seed} {number}")
        function, rows, alike = shared.choice(FUNCTIONS), shared.choice((None, 4)), shared.random() < 0.2
        own, values = random.Random(f"{seed} {number} {alike or dist.get_rank()}"), values_of(function)
        changes = {name: own.randrange(len(values[name])) for name in own.sample([*values], own.choice((0, 1, 2, 4)))}
        with groups.of_rows(rows):
            found = _call(function, values, *changes.items())
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, (isinstance(found, Exception), str(found)))
        raised, agree = isinstance(found, Exception), everyone[0] == everyone[1]
        if raised:
            agree = everyone[1 - dist.get_rank()][0] and not re.search("gloo|Connection", str(found))
        if not agree:
            wrong.append(f"{number}: {function.__name__} {changes}: {everyone}")
        dist.barrier()
    assert not wrong, f"rank {dist.get_rank()}:\n" + "\n".join(wrong)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(V, D), nn.Linear(D, V, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = self.lm_head(self.embed(input_ids))
        return logits if labels is None else nn.functional.cross_entropy(logits, labels)


@pytest.mark.slow
def test_a_destroyed_group() -> None:
    """Catches a group that is looked up by its name, which the next ``init_process_group`` gives to another group."""
    run_ranks(_destroyed, 2)


def _destroyed() -> None:
    weight = torch.randn(V, D, generator=torch.Generator().manual_seed(0))
    hidden, labels = torch.randn(N, D, generator=torch.Generator().manual_seed(1)), torch.arange(N)
    shard, mesh = VocabShard.even(V, dist.group.WORLD), init_device_mesh("cpu", (2,))
    own = weight[shard.start : shard.stop].clone().requires_grad_()
    split = distribute_tensor(weight, mesh, [Shard(0)])
    of_teacher = labels[:, None], torch.zeros(N, 1)
    kept = KeptIds(torch.arange(N + 1), torch.arange(N))
    plain, over = VocabParallelHead(D, V, group=dist.group.WORLD), VocabParallelHead(D, V, shard_over=mesh)
    tied = convert(Small(), shard_over=mesh)
    embedding = CCEEmbedding(D, V, tp_rank=dist.get_rank(), tp_size=2)
    embedding.rows.join(dist.group.WORLD)
    before = linear_cross_entropy(hidden, own, labels, shard=shard, workspace_bytes=1)  # two passes
    calls: dict[str, Callable[[], Any]] = {
        "loss": lambda: linear_cross_entropy(hidden, own, labels, shard=shard),
        "log_probs": lambda: linear_log_probs(hidden, own, labels, shard=shard),
        "kept": lambda: linear_log_probs(hidden, own, labels, shard=shard, kept=kept),
        "divergence": lambda: linear_kl_divergence(hidden, own, hidden, own, shard=shard),
        "top-k": lambda: topk_kl_divergence(hidden, own, *of_teacher, shard=shard, outside="drop"),
        "DTensor": lambda: linear_cross_entropy(hidden, split, labels),
        "head": lambda: plain(hidden, labels),
        "head's logits": lambda: plain(hidden),
        "head's state": lambda: plain.state_dict(),
        "shard_over": lambda: over(hidden, labels),
        "converted": lambda: tied(labels, labels=labels),
        "embedding": lambda: embedding(labels),
        "replace": lambda: shard.with_group(shard.group),
    }
    for call in calls.values():
        call()
    dist.barrier()
    dist.destroy_process_group()
    for again in (False, True):
        if again:
            join_alone(torch.device("cpu"))
        for debug in "01":
            for name, call in calls.items():
                with mock.patch.dict(os.environ, CCE_DIST_DEBUG=debug):
                    found = result_of(call)
                assert "destroyed" in str(found), f"{name}, again {again}, debug {debug}: {found!r}"
    assert "destroyed" in str(result_of(before.backward))
    new = VocabShard.even(V, dist.group.WORLD)
    whole = linear_cross_entropy(hidden, weight, labels)
    torch.testing.assert_close(linear_cross_entropy(hidden, weight, labels, shard=new), whole)
    assert len(over.state_dict()) == 1


def test_no_group_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches each of several ranks that takes the whole vocabulary, because dist.group.WORLD was None."""
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    for num_ranks, refused in (("2", True), ("1", False), ("", False)):
        monkeypatch.setenv("WORLD_SIZE", num_ranks)
        for make in (lambda: VocabShard.even(V, None), lambda: VocabParallelHead(D, V, group=None).shard):
            if not refused:
                assert make().num_rows == V
                continue
            with pytest.raises(RuntimeError, match="WORLD_SIZE is 2: call init_process_group first"):
                make()
        assert VocabShard(0, V, V).num_rows == VocabParallelHead(D, V).shard.num_rows == V
    with pytest.raises(ValueError, match="WORLD is None before init_process_group"):
        VocabShard(0, V // 2, V, None)
