"""The benches of log-probabilities and of divergences: every method is right on every task, and a wrong one gets no time."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cce_dist import VocabShard, cli
from cce_dist.bench import divergence, log_probs, tasks
from cce_dist.bench.shapes import HeadShape

N, D, V = 24, 16, 70


def setting(shard: VocabShard | None = None) -> tasks.Setting:
    shard = VocabShard(0, V, V) if shard is None else shard
    return tasks.Setting(HeadShape(D, V), 2 * D, N, torch.float32, torch.device("cpu"), shard)


def of_log_probs(name: str) -> tasks.Prepared:
    """Every method, and what is true."""
    task = log_probs.TASKS[name]._replace(top_k=5 if name == "scores" else 0)
    x = log_probs.draw(task, torch.randn(N, D), torch.randn(V, D), torch.randint(V, (N,)))
    return tasks.Prepared(log_probs.methods_of(task, setting(), x), log_probs.truth(task, x), {})


def of_divergence(kind: str) -> tasks.Prepared:
    heads = divergence.Heads(torch.randn(N, D), torch.randn(V, D), torch.randn(N, 2 * D), torch.randn(V, 2 * D))
    return tasks.Prepared(divergence.methods_of(kind, setting(), heads), divergence.truth(kind, heads), {})


STEPS = [pytest.param(of_log_probs, name, id=name) for name in log_probs.TASKS]
STEPS += [pytest.param(of_divergence, kind, id=kind) for kind in divergence.KINDS]


@pytest.mark.parametrize(("steps_of", "name"), STEPS)
def test_every_method_is_right(steps_of: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an upstream gradient that one method forgets, values in another order, chunks of the truth in a wrong place."""
    for module in (log_probs, divergence):
        monkeypatch.setattr(module, "CHUNK_BYTES", 8 * V * 10)  # 10 tokens
    methods, expected, _ = steps_of(name)
    assert len(expected) == (1 if name == "scores" else 3)
    for method in (methods[name] for name in methods if name not in ("torch-compile", "liger", "verl")):
        for ours, true in zip(method.build()(), expected, strict=True):
            torch.testing.assert_close(ours.double(), true, atol=1e-5, rtol=1e-4)


def test_a_wrong_method_gets_no_time() -> None:
    """Catches a gradient that nobody looks at."""
    methods, expected, _ = of_log_probs("entropy")
    right = methods["torch"].build()

    def wrong() -> tuple[Tensor, ...]:
        value, d_hidden, d_weight = right()
        return value, d_hidden, 1.1 * d_weight

    builds = {"right": lambda: right, "wrong": lambda: wrong}
    product = partial(torch.mm, torch.ones(4, 4), torch.ones(4, 4))
    (good, bad), products = tasks.measure(builds, expected, {3: product}, repeats=2)
    assert len(good.total.seconds) == 2 and bad.problem.startswith("wrong gradient") and not bad.total.seconds
    case = tasks.Case("entropy", "toy", N, D, V, 0, 1, "float32", True, [good, bad], products)
    lines = tasks.lines(case)
    assert [line["method"] for line in lines] == ["3 GEMMs", "right", "wrong"]
    assert lines[1]["/3 GEMMs"] and not lines[2]["/3 GEMMs"]


COMMANDS = [
    pytest.param(cli.main, ["bench", "--log-probs", "scores", "--shapes"], id="log-probs"),
    pytest.param(
        cli.main, ["bench", "--kl", "forward", "--teacher-size", "32", "--tp", "2", "--shapes"], id="two-ranks"
    ),
    pytest.param(divergence.main, ["--kinds", "forward", "--shape"], id="divergence"),
    pytest.param(log_probs.main, ["--tasks", "scores", "--shape"], id="log-probs-alone"),
]


@pytest.mark.parametrize(("command", "some"), COMMANDS)
def test_a_command_writes_what_it_measured(
    command: Any, some: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also on two ranks, each with its rows. Catches a file that --show cannot read, and another rank's rows."""
    options = ["--repeats", "1", "--methods", "cce-dist", "--dtype", "float32", "--device", "cpu", "--tokens", "32"]
    monkeypatch.setattr("sys.argv", ["bench", *some, "toy", *options, "--out", str(tmp_path)])
    try:
        code = command(["bench", *sys.argv[2:]]) if command is cli.main else command()
    except SystemExit as exit:
        code = exit.code
    printed = capfd.readouterr().out
    assert code == 0 and "| cce-dist " in printed and "GEMM" in printed and "wrong" not in printed
    file = tmp_path / "tasks.json"
    (case,) = tasks.read(file).cases
    assert case.shape == "toy" and len(case.rows[0].total.seconds) == 1
    assert cli.main(["bench", "--show", str(file), "--columns", "total/3", "dE"]) == 0
    assert "over products" in capfd.readouterr().out
