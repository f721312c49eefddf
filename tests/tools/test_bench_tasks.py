"""The tasks of the benchmark: every method is right on each, on one rank and on two, and a file keeps what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cce_dist import VocabShard
from cce_dist.kernels.divergence.heads import KINDS
from cce_dist.tools import cli
from cce_dist.tools.bench import problem as problems
from cce_dist.tools.bench import tasks
from cce_dist.tools.bench.records import read_json
from cce_dist.tools.bench.shapes import KEPT_IDS, LOG_PROBS, HeadShape
from cce_dist.tools.bench.workload import make_workload

N, D, V = 24, 16, 70


@pytest.mark.parametrize("name", [*LOG_PROBS, *KEPT_IDS, *KINDS])
def test_every_method_is_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an upstream gradient that one method forgets, values in another order, chunks of the truth in a wrong place."""
    monkeypatch.setattr(problems, "REFERENCE_CHUNK_BYTES", 8 * V * 10)  # 10 tokens
    monkeypatch.setitem(LOG_PROBS, "scores", (1, True, 5, False))
    monkeypatch.setitem(KEPT_IDS, "kept-512", 33)
    if name in KINDS:
        task = tasks.divergence_task(name, 2 * D)
    else:
        task = tasks.scores_task(name) if name in LOG_PROBS else tasks.kept_task(name)
    problem = task.problem(make_workload(HeadShape(D, V), N, dtype=torch.float32))
    truth = problems.reference_of(problem)
    if name in LOG_PROBS:
        assert truth.value.shape == (N, sum(LOG_PROBS[name][:3]))  # ids, the entropy, the largest logits
    rows = task.methods([256])
    assert {"cce-dist", "cce-dist-default", "cce-dist-cached", "cce-dist-torch", "torch"} <= set(rows)
    assert name in KEPT_IDS or "torch-compile" in rows
    for row, method in rows.items():
        if row in ("torch-compile", "liger"):
            continue
        function = method.build(VocabShard(0, V, V), problem.tokens[0])
        expected = truth if problem.grad else truth[:1]
        for ours, true in zip(problems.step(function, problem), expected, strict=True):
            torch.testing.assert_close(ours.double(), true, atol=1e-5, rtol=1e-4)


def test_a_command_writes_what_it_measured(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Catches a file that --show cannot read."""
    options = ["--repeats", "1", "--methods", "cce-dist", "--dtype", "float32", "--device", "cpu"]
    command = ["bench", "--log-probs", "scores", "--shapes", "toy", "--tokens", "32", *options, "--out", str(tmp_path)]
    assert cli.main(command) == 0
    printed = capfd.readouterr().out
    assert "| cce-dist " in printed and "/1 GEMM" in printed and "wrong" not in printed
    (case,) = read_json(tmp_path / "bench.json").cases
    (row,) = case.rows
    assert case.shape == "toy" and len(row.forward.seconds) == 1
    assert cli.main(["bench", "--show", str(tmp_path / "bench.json"), "--columns", "fwd/1", "total/3", "dE"]) == 0
    assert "/1 GEMM" in capfd.readouterr().out
