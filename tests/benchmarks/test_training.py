"""Trainings of a model with each gradient: what each method is known to do, and whole commands on toy sizes."""

import json
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import models
import training
import training_report
from records import read_json, write_json
from training_report import GRADIENTS, Comparison
from workload import read_workload

pytest.importorskip("transformers")

RUN = [
    "--model", "gemma-3-270m", "--layers", "2", "--length", "32", "--device", "cpu", "--steps", "6", "--measure-every", "3",
]  # fmt: skip
RUN += ["--eval-batches", "2", "--batch-size", "4", "--lr", "1e-2", "--warmup", "2"]
WAYS = ["stock", "default", "filtered"]
pytestmark = pytest.mark.usefixtures("tiny")


def test_models_train_with_each_gradient(corpus, tmp_path, capsys, monkeypatch) -> None:
    """Catches a run from other weights or batches, a way that is another's, a wrong dE, seeds that do not merge."""
    # The threshold is above a uniform softmax.
    monkeypatch.setitem(models.OURS["cce-dist-filtered"], "filter_eps", 4e-3)
    files = [tmp_path / str(seed) / "training.json" for seed in (3, 4)]
    for seed, file in zip("34", files, strict=True):
        options = ["--first-seed", seed, "--seeds", "1", "--out", str(file.parent)]
        assert training.main([*RUN, "--dtype", "float32", *corpus, *options]) == 0
    whole = training_report.joined(files)
    assert [(run.seed, run.method) for run in whole.runs] == [(seed, way) for seed in (3, 4) for way in WAYS]
    losses = {way: whole.series(way, "val_loss") for way in WAYS}
    assert all(list(series) == [0, 3, 6] and series[0] == losses["stock"][0] for series in losses.values())
    assert losses["stock"][0][0] != losses["stock"][0][1] and max(losses["stock"][6]) < np.log(400) - 0.1
    for statistic in ("val_loss", "batch_loss", "train_loss"):
        ours, stock = (whole.series(way, statistic) for way in ("default", "stock"))
        for step in stock:
            assert ours[step] == pytest.approx(stock[step], abs=1e-5), statistic
    for name in GRADIENTS:
        away = {way: 1 - min(map(min, whole.series(way, "cosine", name).values())) for way in WAYS}
        assert away["stock"] < 1e-9 and away["default"] < 1e-9, name
        if name == "dE":
            assert 1e-6 < away["filtered"] < 0.1
    assert max(abs(value) for value in whole.excess("filtered")[6]) > 1e-6

    capsys.readouterr()
    assert training.main(["--show", *map(str, files)]) == 0
    shown = capsys.readouterr().out
    assert "### gemma-3-270m, 6 steps of 128 tokens, 2 seeds; 2 layers, D 16, V 400, float32" in shown
    assert (tmp_path / "3" / "training.png").read_bytes().startswith(b"\x89PNG")
    excess = whole.excess("filtered")[6]
    assert training.main(["--show", *map(str, files), "--columns", "excess-se", "rare-dC"]) == 0
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert header.replace(" ", "") == "|method|-stock(s.e.)|raredC|"
    assert f"{sum(excess) / 2:+.4f} ({abs(excess[0] - excess[1]) / 2:.4f})" in rows[WAYS.index("filtered")]


def test_captures_give_the_losses_of_their_steps(corpus, tmp_path) -> None:
    """Catches a capture of another step or after its update, and labels that belong to other tokens."""
    options = ["--dtype", "float32", "--seeds", "1", "--methods", "default", "--measure-every", "1", *corpus]
    assert training.main([*RUN, *options, "--capture", "1", "4", "--out", str(tmp_path)]) == 0
    (run,) = read_json(tmp_path / "training.json", Comparison).runs
    assert sorted(path.name for path in (tmp_path / "captured").iterdir()) == ["default-0-1.pt", "default-0-4.pt"]
    for step in (1, 4):
        path = tmp_path / "captured" / f"default-0-{step}.pt"
        held = torch.load(path, weights_only=True)
        loss = F.cross_entropy(held["hidden"] @ held["weight"].T, held["labels"]).item()
        assert loss == pytest.approx(run.measurements[step + 1].train_loss, rel=1e-5)
        assert read_workload(path, dtype=torch.float32).loss == pytest.approx(loss)


def test_a_converted_model_trains_under_autocast(corpus, tmp_path, monkeypatch) -> None:
    """fp32 parameters and bf16 matmuls, as Trainer's ``bf16=True``: ours is stock to the rounding of bf16."""
    dtypes = set()

    def watched(layer: nn.Linear, x: torch.Tensor, forward: Callable = nn.Linear.forward) -> torch.Tensor:
        dtypes.add((layer.weight.dtype, forward(layer, x).dtype))
        return forward(layer, x)

    monkeypatch.setattr(nn.Linear, "forward", watched)
    options = ["--seeds", "1", "--methods", "default", "stock", *corpus, "--out", str(tmp_path)]
    assert training.main([*RUN, *options, "--gradients-every", "6"]) == 0
    found = training_report.joined([tmp_path / "training.json"])
    assert dtypes == {(torch.float32, torch.bfloat16)}
    assert max(abs(value[0]) for value in found.excess("default").values()) < 5e-3
    for way in ("default", "stock"):
        distances = [1 - values[0] for values in found.series(way, "cosine", "dE").values()]
        assert len(distances) == 2 and 0 < max(distances) < 1e-3  # before the first step, and after the last


def learner(corpus: list[str], *options: str) -> training.Learner:
    return training.Learner(training.parser().parse_args([*RUN, *corpus, "--steps", "1", "--length", "16", *options]))


def test_compiled_layers_are_not_deterministic(corpus, monkeypatch) -> None:
    """Catches --compile without compilation, and both together, for which torch 2.11 computes wrong gradients."""
    compiled = []
    monkeypatch.setattr(nn.Module, "compile", lambda layer, **options: compiled.append(layer))
    torch.use_deterministic_algorithms(True)
    found = learner(corpus, "--compile")
    found.start(0)
    assert compiled == [*found.model.model.layers] and not torch.are_deterministic_algorithms_enabled()


def test_a_softcap_is_in_every_loss_and_gradient(corpus, monkeypatch) -> None:
    """Catches a held-out loss or a dense gradient of other logits than the model's own."""
    monkeypatch.setitem(models._GEMMA_2, "final_logit_softcapping", 0.1)
    stock = learner(corpus, "--model", "gemma-2-2b", "--layers", "1", "--dtype", "float32")
    stock.start(0)
    stock.take("stock")
    stock.held_out = ids = stock.batches
    found, loss = stock.compare(), stock.model(input_ids=ids[0], labels=ids[0])["loss"].item()
    assert [stock.validate(), found["batch_loss"]] == pytest.approx([loss, loss], rel=1e-6)
    assert min(found["cosine"].values()) > 1 - 1e-9
    assert [*found["norm"].values()] == pytest.approx([1] * 4, abs=1e-5)


def test_rare_rows_and_the_mean_show_what_a_plain_filter_drops() -> None:
    """Catches rows of labels among the rare ones, and a mean over ids instead of tokens."""
    hidden, weight, labels = torch.randn(40, 16), torch.randn(90, 16), torch.arange(40) // 2
    problem = training.loss_of(hidden, weight, labels)
    truth = training.reference_of(problem)
    d_hidden, d_weight = truth.d_hidden, truth.d_weight.clone()
    d_weight[20:] *= 0.5  # ids that are no label
    found = training.agreement(d_hidden + 0.002, d_weight, problem)
    assert found["norm"]["rare dC"] == pytest.approx(0.5, abs=1e-5)
    assert 0.5 < found["norm"]["dC"] < 1 and found["cosine"]["rare dC"] == pytest.approx(1, abs=1e-9)
    assert 1 - found["cosine"]["mean dE"] > 4 * (1 - found["cosine"]["dE"]) > 0


def test_files_that_do_not_belong_together_are_one_line(tmp_path) -> None:
    """Catches a run that counts twice, and runs of another training. A file of another program says so."""
    environment = {"device": "CPU", "torch": "2", "date": "2026-12-01T00:00:00"}
    runs = [training_report.Run("stock", 0, [training_report.Measurement(0, math.nan)])]
    one = Comparison(environment, {"steps": 1, "lr": 0.1}, {"vocab_size": 9}, {}, runs)
    paths = [tmp_path / f"{number}.json" for number in range(3)]
    write_json(paths[0], one)
    json.loads(paths[0].read_text(), parse_constant=pytest.fail)  # no NaN
    write_json(paths[1], Comparison(environment, {"steps": 1, "lr": 0.2}, {"vocab_size": 9}, {}, []))
    paths[2].write_text('{"environment": {}, "cases": []}')
    for files, says in (
        ([0, 0], "has a run of stock with seed 0 again"),
        ([0, 1], "was trained with other --lr"),
        ([2], r"holds no Comparison \(KeyError: 'cases'\)"),
    ):
        with pytest.raises(SystemExit, match=says):
            training.main(["--show", *(str(paths[number]) for number in files)])


@pytest.mark.parametrize(("last", "learned"), [(3.95, False), (3.5, True)])
def test_a_run_that_learns_nothing_says_so(last: float, learned: bool) -> None:
    """Catches losses of a training that went nowhere, compared as if they said something of gradients."""
    losses = iter([4.0, last])
    toy: Any = SimpleNamespace(validate=lambda: next(losses), compare=dict, step=lambda _: torch.tensor(4.0))
    run = training_report.Run("default", 0)
    training.train(toy, training.parser().parse_args(["--steps", "100"]), run, lambda: None)
    assert ("nothing was learned" in run.problem) == (not learned)
