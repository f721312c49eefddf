"""The tasks of tables of heads: every method is right on each, and a file keeps what was measured."""

from pathlib import Path

import pytest
import torch

import heads
import problem as problems
import tasks
from cce_dist import VocabShard
from cce_dist.kernels.divergence.heads import KINDS
from records import Results, read_json
from tasks import KEPT_IDS, LOG_PROBS, OBJECTIVES
from workload import HeadShape, make_workload

N, D, V = 24, 16, 70


@pytest.mark.parametrize("name", [*LOG_PROBS, *KEPT_IDS, *KINDS, *OBJECTIVES])
def test_every_method_is_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an upstream gradient that one method forgets, values in another order, chunks of the truth in a wrong place."""
    monkeypatch.setattr(problems, "REFERENCE_CHUNK_BYTES", 8 * V * 10)  # 10 tokens
    monkeypatch.setitem(LOG_PROBS, "scores", (1, True, 5, False))
    monkeypatch.setitem(KEPT_IDS, "kept-512", (33, 0))
    makers = {tuple(LOG_PROBS): tasks.scores_task, tuple(KEPT_IDS): tasks.kept_task, KINDS: tasks.divergence_task}
    task = next((make for names, make in makers.items() if name in names), tasks.objective_task)(name)
    problem = task.problem(make_workload(HeadShape(D, V), N, dtype=torch.float32))
    truth = problems.reference_of(problem)
    if name in LOG_PROBS:
        assert truth.value.shape == (N, sum(LOG_PROBS[name][:3]))  # ids, the entropy, the largest logits
    rows = task.methods([256])
    assert list(rows) == ["cce-dist", "cce-dist-default", "cce-dist-cached", "torch", "torch-compile"]
    del rows["torch-compile"]
    for method in rows.values():
        function = method.build(VocabShard(0, V, V), problem.tokens[0])
        expected = truth if problem.grad else truth[:1]
        found = [x.double() for x in problems.step(function, problem)]
        torch.testing.assert_close(found, [*expected], atol=1e-5, rtol=1e-4)


def test_a_task_without_gradients_is_shown_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches steps that are timed without gradients, and a file that --show cannot read."""
    options = ["--repeats", "1", "--methods", "cce-dist", "--dtype", "float32", "--device", "cpu"]
    shape = ["--shapes", "toy", "--tokens", "32", "--out", str(tmp_path)]
    assert heads.main(["--log-probs", "scores", *shape, *options]) == 0
    printed = capsys.readouterr().out
    assert "| cce-dist " in printed and "/1 GEMM" in printed and "wrong" not in printed
    (row,) = read_json(tmp_path / "bench.json", Results).cases[0].rows
    assert len(row.forward.seconds) == 1 and not row.total.seconds
    assert heads.main(["--show", str(tmp_path / "bench.json"), "--columns", "fwd/1", "total/3", "dE"]) == 0
    assert "/1 GEMM" in capsys.readouterr().out
