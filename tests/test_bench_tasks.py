"""The benches of log-probabilities and of divergences: every method is right on every task, and a wrong one gets no time."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cce_dist.bench import divergence, log_probs, tasks

N, D, V = 24, 16, 70


def of_log_probs(name: str) -> tuple[dict[str, tasks.Step], tuple[Tensor, ...]]:
    """The step of every method but the compiled one, and what is true."""
    task = log_probs.TASKS[name]._replace(top_k=5 if name == "scores" else 0)
    x = log_probs.draw(task, torch.randn(N, D), torch.randn(V, D), torch.randint(V, (N,)))
    methods = {name: build for name, build in log_probs.METHODS.items() if name != "torch-compile"}
    return {name: log_probs._step(task, build, x) for name, build in methods.items()}, log_probs.truth(task, x)


def of_divergence(kind: str) -> tuple[dict[str, tasks.Step], tuple[Tensor, ...]]:
    heads = divergence.Heads(torch.randn(N, D), torch.randn(V, D), torch.randn(N, 2 * D), torch.randn(V, 2 * D))
    names = set(divergence.METHODS) - {"torch-compile", "liger"}
    return {name: divergence._step(name, kind, heads) for name in names}, divergence.truth(kind, heads)


STEPS = [pytest.param(of_log_probs, name, id=name) for name in log_probs.TASKS]
STEPS += [pytest.param(of_divergence, kind, id=kind) for kind in divergence.KINDS]


@pytest.mark.parametrize(("steps_of", "name"), STEPS)
def test_every_method_is_right(steps_of: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an upstream gradient that one method forgets, values in another order, chunks of the truth in a wrong place."""
    for module in (log_probs, divergence):
        monkeypatch.setattr(module, "CHUNK_BYTES", 8 * V * 10)  # 10 tokens
    steps, expected = steps_of(name)
    assert len(expected) == (1 if name == "scores" else 3)
    for found in (step() for step in steps.values()):
        for ours, true in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.double(), true, atol=1e-5, rtol=1e-4)


def test_a_wrong_method_gets_no_time() -> None:
    """Catches a gradient that nobody looks at."""
    steps, expected = of_log_probs("entropy")
    right = steps["torch"]

    def wrong() -> tuple[Tensor, ...]:
        value, d_hidden, d_weight = right()
        return value, d_hidden, 1.1 * d_weight

    builds = {"right": lambda: right, "wrong": lambda: wrong}
    found = tasks.measure(builds, expected, {3: partial(torch.mm, torch.ones(4, 4), torch.ones(4, 4))}, repeats=2)
    good, bad = found.rows
    assert len(good.total.seconds) == 2 and bad.problem.startswith("wrong gradient") and not bad.total.seconds
    lines = tasks.lines(found)
    assert [line["method"] for line in lines] == ["3 GEMMs", "right", "wrong"]
    assert lines[1]["/3 GEMMs"] and not lines[2]["/3 GEMMs"]


@pytest.mark.parametrize("module", [log_probs, divergence])
def test_a_command_writes_what_it_measured(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    some = ["--tasks", "scores"] if module is log_probs else ["--kinds", "forward"]
    options = ["--repeats", "1", "--methods", "cce-dist", "--dtype", "float32", "--device", "cpu", "--shape", "toy"]
    monkeypatch.setattr("sys.argv", ["bench", *some, *options, "--tokens", "32", "--out", str(tmp_path)])
    module.main()
    printed = capsys.readouterr().out
    assert "| cce-dist " in printed and "GEMM" in printed
    (file,) = tmp_path.glob("*.json")
    assert json.loads(file.read_text())["shape"] == "toy"
