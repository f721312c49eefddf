"""The matrix of verify on one process and on four, and what only several ranks can show."""

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.dense import assert_holds
from support.ranks import run_ranks, shared_folder
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from cce_dist import VocabParallelHead, VocabShard
from cce_dist.tools import cli
from cce_dist.tools.verify import FUNCTIONS, matrix
from cce_dist.tools.verify.cases import Case
from cce_dist.tools.verify.check import Error, assert_no_worse, compare
from cce_dist.tools.verify.matrix import TABLES, layouts, lines_of, run_matrix

OVER_RANKS = ("-shards", "-sequence-parallel")  # their names, which say nothing to one process
LOSS = TABLES["loss"][0]
LINES = [line for line in lines_of(FUNCTIONS) if line[0] is not LOSS or not line[1].name.endswith(OVER_RANKS)]


@pytest.mark.parametrize(("function", "case"), LINES, ids=[case.name for _, case in LINES])
def test_one_process(function, case):
    assert_holds(function, case, device="cpu", backend="auto")


def test_triton_without_a_gpu_is_one_line(monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert cli.main(["verify", "--backend", "triton", "--device", "cpu"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_bound_can_fail():
    truth = torch.ones(4)
    assert compare("x", truth, truth, truth, torch.float32).ok
    assert not compare("x", truth + 1e-3, truth, truth, torch.float32).ok
    assert not compare("x", torch.full((4,), torch.nan), truth, truth, torch.float32).ok
    with pytest.raises(AssertionError):
        assert_no_worse(truth + 1e-3, truth, truth)


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_four_ranks():
    """T = 2 (two groups side by side), 3 (one rank left out) and 4: one spawn for everything that needs ranks."""
    run_ranks(_four_ranks, 4)


def _check_lines() -> None:
    """On all ranks, halves, each alone and a rest. Catches: one rank's failure that is lost, a group that leaves a case out, a
    rank without a group that runs one."""
    rank, ran = dist.get_rank(), []

    def run(function: object, case: Case, group: dist.ProcessGroup | None, *_: object) -> list[Error]:
        ran.append(f"{1 if group is None else group.size()}{case.name}")
        wrong = rank == 3 and group is None and case.name == "b"
        return [Error("loss", 2.0 if wrong else 1.0, 1.5), Error("dE", 0.0, 0.0)]

    lines: Any = [(None, Case(name, f"a mistake in {name}")) for name in "ab"]
    with mock.patch.object(matrix, "run_case", run):
        [failure] = run_matrix(lines, "cpu", report=False)
    assert failure.startswith("FAIL T=1 b ") and failure.endswith("error 2.00e+00 bound 1.50e+00  <- a mistake in b?")
    assert ran == ["1a", "1b", "2a", "2b", *(["3a", "3b"] if rank < 3 else []), "4a", "4b"]


# Filters of four ranks. The options of the others meet no collective by themselves, and hold on one rank.
FILTERS = (*OVER_RANKS, "-entropy")


def _four_ranks():
    every = dict(layouts(4))  # one process has had all cases, and random ones run on two ranks in test_fuzz
    exact = [line for line in lines_of(FUNCTIONS) if not line[1].name.startswith("filter")]
    filters = [line for line in lines_of(FUNCTIONS, "filter") if line[1].name.endswith(FILTERS)]
    over_shards = [line for line in exact if "shards" in line[1].name]
    for size, lines in ((4, exact + filters), (3, over_shards), (2, lines_of(FUNCTIONS, "sequence-parallel"))):
        with mock.patch.object(matrix, "layouts", lambda _, size=size: [(size, every[size])]):
            assert run_matrix(lines, "cpu", report=False) == []
    _check_lines()
    _check_shards()
    _check_head()
    _check_compiled()


def _check_shards():
    world, rank = dist.group.WORLD, dist.get_rank()
    shard = VocabShard.even(10, world)  # DTensor's split: 3, 3, 3, 1
    assert (shard.start, shard.stop) == [(0, 3), (3, 6), (6, 9), (9, 10)][rank]
    shard = VocabShard.even(5, world)  # 2, 2, 1, 0
    assert shard.num_rows == shard.num_valid == [2, 2, 1, 0][rank]
    shard = VocabShard.even(300, world, multiple_of=64)  # Megatron's: 128 rows each, the last ones padded
    assert (shard.num_rows, shard.num_valid) == (128, [128, 128, 44, 0][rank])
    others: Any = dist.new_group([0, 1])
    if rank > 1:
        with pytest.raises(ValueError, match="not a member"):
            VocabShard(0, 5, 10, others)


def _check_head():
    """The same initial weight at every T, and a state_dict that loads at another T, whole or distributed."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.manual_seed(3)
    whole = VocabParallelHead(8, 2050, bias=True)
    assert len(whole.weight.unique(dim=0)) == 2050
    heads = {}
    settings: list[tuple[str, dict[str, Any]]] = [
        ("group of 4", {"group": dist.group.WORLD}),
        ("mesh of 4", {"mesh": init_device_mesh("cpu", (4,))}),
        ("group of 2", {"group": pairs[rank // 2]}),
    ]
    for name, where in settings:
        torch.manual_seed(3)
        head = heads[name] = VocabParallelHead(8, 2050, bias=True, **where)
        local = head.weight.to_local() if isinstance(head.weight, DTensor) else head.weight
        assert torch.equal(local, whole.weight[head.shard.start : head.shard.stop]), name
    hidden, labels = torch.randn(5, 8), torch.randint(2050, (5,))
    expected = whole(hidden, labels)
    for name, head in heads.items():
        torch.testing.assert_close(head(hidden, labels), expected, msg=name)
        torch.manual_seed(4 + rank)
        head.reset_parameters()
        head.load_state_dict({key: value.clone() for key, value in whole.state_dict().items()})
        torch.testing.assert_close(head(hidden, labels), expected, msg=name)
    # test_sharding.py has heads under FSDP2.
    with shared_folder() as folder:
        dcp.save(heads["mesh of 4"].state_dict(), checkpoint_id=folder)
        alone = [whole] if rank == 0 else []  # at T = 1, by one rank
        for head in (heads["group of 4"], heads["mesh of 4"], *alone):
            torch.nn.init.zeros_(head.weight)
            state = head.state_dict()
            dcp.load(state, checkpoint_id=folder, no_dist=head is whole)
            head.load_state_dict(state)
            torch.testing.assert_close(head(hidden, labels), expected)
    logits = heads["group of 4"](hidden)
    assert logits.shape == (5, heads["group of 4"].shard.num_rows)


def _check_compiled():
    """One graph with its collectives inside. It takes two passes, the eager call one, so the bits differ."""
    torch.manual_seed(0)
    head = VocabParallelHead(8, 50, group=dist.group.WORLD)
    hidden, labels = torch.randn(6, 8, requires_grad=True), torch.randint(50, (6,))
    grads = []
    for function in (head, torch.compile(copy.copy(head), fullgraph=True, backend="aot_eager")):
        loss = function(hidden, labels)
        grads.append(torch.autograd.grad(loss, (hidden, head.weight)))
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-7)
