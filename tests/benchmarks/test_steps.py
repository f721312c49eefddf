"""Whole steps of models: real sizes, ways over the same parameters, and no time for what is wrong."""

import argparse
import sys
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from commands import outputs_of
from torch import nn

import models
import report
import steps
import whole_steps
from cce_dist.tools.plan import Model, sizes
from loop import Method
from models import CONFIGS, STOCK, build, config_of, over, twin
from records import Results, read_json

pytest.importorskip("transformers")

QUICK = ["--device", "cpu", "--dtype", "float32"]
PUBLISHED = {  # parameters as each model's page counts them, norms included
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "qwen-3-0.6b": 596_049_920,
    "qwen-3-1.7b": 1_720_574_976,
    "qwen-3-4b": 4_022_468_096,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3-8b": 8_030_261_248,
    "smollm2-360m": 361_821_120,
    "gemma-2-2b": 2_614_341_888,
}


@pytest.fixture
def quick(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train toy models in a few steps."""
    monkeypatch.setattr(steps, "TRAIN_TOKENS", 256)
    monkeypatch.setattr(steps, "TRAIN_RATE", 1e-2)


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_are_those_of_the_published_models(name: str) -> None:
    """Catches a size that is another model's, and a plan that counts parameters which the model has not."""
    kind, config = config_of(name)
    with torch.device("meta"):
        model: Any = kind(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name]
    assert model.lm_head.weight.shape == (sizes.MODELS[name].vocab_size, sizes.MODELS[name].hidden_size)
    # The plan leaves out some norms.
    assert sizes.MODELS[name].params == pytest.approx(PUBLISHED[name], rel=1e-3)


def test_whole_steps_from_the_command_line(quick, corpus, tmp_path, capsys, monkeypatch) -> None:
    """Text is learned, all ways have stock's loss and gradients, rounds are stored, and ``--show`` prints them again."""
    compiled = []

    def compile_eagerly(function: Any, *, compile: Any = torch.compile, **options: Any) -> Any:
        compiled.append(type(function))
        return compile(function, **options | {"backend": "eager"})  # the default takes long on a CPU

    monkeypatch.setattr(torch, "compile", compile_eagerly)
    out = tmp_path / "out"
    run = ["--models", "gemma-2-2b", "--layers", "1", "--compile", "layers", "--tokens", "32", "64", "--length", "32"]
    options = ["--train-steps", "40", "--repeats", "2", *QUICK, *corpus, "--out", str(out)]
    assert steps.main([*run, *options]) == 0
    printed = capsys.readouterr().out
    found = read_json(out / "bench.json", Results).cases
    assert [(case.num_tokens, case.num_layers) for case in found] == [(32, 1), (64, 1)]
    names = ["stock", "torch-compile", *models.OURS]
    for case in found:
        rows = {row.name: row for row in case.rows if not row.problem}
        assert set(rows) == {f"{name}+layers" for name in names}, [row.problem for row in case.rows]
        assert [row.name for row in case.rows if row.missing] == ["liger+layers"]
        for row in rows.values():
            assert len(row.total.seconds) == 2 and row.peak_bytes is None and row.errors and row.value
            assert row.errors.loss < 1e-5 and row.errors.d_hidden < 0.05 and row.errors.d_weight < 0.05, row.name
            # The text was learned, and weights rest while ways are timed.
            assert row.value == pytest.approx(rows["stock+layers"].value, rel=1e-4) and row.value < np.log(400) - 0.5
        assert 100 < case.num_ids <= 400
    assert len(compiled) >= len(names)  # each way compiles the model's only layer
    assert "### whole steps, gemma-2-2b, N 64, D 16, V 400, 1 layers, sequences of 32, float32" in printed

    assert steps.main(["--show", str(out / "bench.json"), "--tokens", "32", "--methods", "stock+layers"]) == 0
    shown = capsys.readouterr().out
    assert "N 32" in shown and "N 64" not in shown and "cce-dist" not in shown

    # As on a GPU.
    stock, case = found[-1].rows[0], found[-1]
    stock.total.seconds, stock.peak_bytes, case.on_gpu = [0.5, 0.25, 0.25], 3 << 30, True
    heading, _, line, *_ = (row.split("|")[2:-1] for row in report.table(case).splitlines() if row.startswith("|"))
    cells = {name.strip(): cell.strip() for name, cell in zip(heading, line, strict=True)}
    assert cells["step ms (IQR)"] == "250.0 (125.0)" and cells["x stock+layers"] == "1.00"
    assert cells["peak MiB"] == "3,072"


class Wrong(nn.Module):
    """A model whose loss, or a gradient alone, is another's."""

    def __init__(self, model: Any, kind: str) -> None:
        super().__init__()
        self.model, self.kind = model, kind

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.kind == "fails":
            raise RuntimeError("no kernel")
        if self.kind == "loss":  # labels that are not shifted
            labels = torch.cat((input_ids[:, :1], input_ids), 1)[:, :-1]
        loss = self.model(input_ids=input_ids, labels=labels)["loss"]
        if self.kind == "gradient":
            loss = 2 * loss - loss.detach()
        return {"loss": loss}


def test_nothing_wrong_is_timed(quick, corpus, tmp_path, monkeypatch) -> None:
    """A wrong row has no time and says why, the others go on, and the exit code tells."""
    wrong = {kind: Method(partial(Wrong, kind=kind), ours=kind == "fails") for kind in ("loss", "gradient", "fails")}
    monkeypatch.setattr(models, "ways", lambda *compiles: wrong | {"cce-dist-default": STOCK, "stock": STOCK})
    run = ["--models", "qwen-3-0.6b", "--layers", "1", "--tokens", "64", "--length", "32", "--repeats", "1", *QUICK]
    options = ["--train-steps", "5", "--out", str(tmp_path), *corpus]
    assert steps.main([*run, *options, "--methods", *wrong, "stock"]) == 1
    *rows, stock = read_json(tmp_path / "bench.json", Results).cases[0].rows
    assert stock.total.seconds and not stock.problem
    says = ("wrong loss: relative error", "wrong gradient of the body: relative error", "RuntimeError: no kernel")
    for row, reason in zip(rows, says, strict=True):
        assert row.problem.startswith(reason) and not row.total.seconds


def test_ways_share_parameters_and_nothing_else(tiny) -> None:
    """A copy steps the model's own weights; what is done to a copy reaches neither the model nor its class."""
    model = build("gemma-3-270m", 1, torch.float32, torch.device("cpu"))
    first, second = twin(model), twin(model)
    assert [*map(id, first.parameters())] == [*map(id, model.parameters())] == [*map(id, second.parameters())]
    models.ways()["cce-dist-default"].build(first)
    assert type(first.lm_head) is not type(second.lm_head) is type(model.lm_head)
    assert first.lm_head.weight is model.lm_head.weight is model.model.embed_tokens.weight


def test_memory_of_a_step_has_weights_and_optimizer(tiny) -> None:
    """Catches a peak without AdamW's two moments, and a tied weight that counts twice."""
    model = build("gemma-3-270m", 1, torch.float32, torch.device("cpu"))
    run, ids = whole_steps.at_rest(model), torch.ones(1, 4, dtype=torch.int64)
    before = run.resident_bytes()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert before == weights + sum(buffer.nbytes for buffer in model.buffers())
    run.step(model, ids)
    assert run.resident_bytes() - before == 2 * weights + 4 * len(run.parameters)  # AdamW counts steps, too


def test_liger_changes_one_model(tiny, monkeypatch) -> None:
    """A release that patches the class, and not the model that it was given, does not reach the other ways."""
    model = build("llama-3.2-1b", 1, torch.float32, torch.device("cpu"))
    asked = []

    def patch(model: Any, **options: bool) -> None:
        asked.append({name for name, on in options.items() if on})
        type(model).forward = lambda self, input_ids, labels: {"loss": self}

    liger: Any = ModuleType("liger_kernel.transformers")
    liger._apply_liger_kernel_to_instance = patch
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", liger)
    before = type(model).forward
    patched = over(models.ways()["liger"], model)
    ids = torch.ones(1, 4, dtype=torch.int64)
    assert patched(input_ids=ids, labels=ids)["loss"] is patched and asked == [{"fused_linear_cross_entropy"}]
    assert type(model).forward is before and model(input_ids=ids, labels=ids)["loss"].ndim == 0


def test_ids_are_spread_over_all_rows(corpus) -> None:
    """A tokenizer with fewer ids than rows: order is kept, no two ids meet, and the last row is near."""
    parser = argparse.ArgumentParser()
    whole_steps.add_text(parser)
    text = whole_steps.Text(parser.parse_args([*corpus, "--length", "32"]), 9000)
    assert text.known < 4500
    rows = text.spread(np.arange(text.known), torch.device("cpu"))
    assert rows[0] == 0 and (rows.diff() > 0).all() and 9000 - 9000 / text.known - 1 <= rows[-1] < 9000


def steps_of_a_toy(argv: list[str]) -> int:
    toy = Model(16, 402, 2, 4, 32, 2, 4, is_tied=True)
    eager = partial(torch.compile, backend="eager")
    with mock.patch.dict(sizes.MODELS, {"gemma-3-270m": toy}), mock.patch.object(torch, "compile", eager):
        return steps.main(argv)


@pytest.mark.slow
def test_whole_steps_under_fsdp(tmp_path) -> None:
    """Two ranks: bytes are those of the arithmetic in bf16, gradients the stock model's in fp32, with layers compiled, too."""
    run = [
        "--models", "gemma-3-270m", "--fsdp", "--tokens", "64", "--length", "32", "--device", "cpu", "--repeats", "2",
    ]  # fmt: skip
    layers = ["cce-dist-default+layers", "cce-dist-shard-over+layers"]
    plain = ["cce-dist-default", "cce-dist-shard-over", "torch-compile"]
    cases = []
    for names, more in ((plain, []), (layers, ["--dtype", "float32", "--compile", "layers"])):
        outputs_of(steps_of_a_toy, [*run, *more, "--methods", *names, "--out", str(tmp_path)], tmp_path, 2)
        (case,) = read_json(tmp_path / "bench.json", Results).cases
        assert case.num_ranks == 2 and {row.name for row in case.rows} == set(names)
        assert all(len(row.total.seconds) == 2 for row in case.rows), [row.problem for row in case.rows]
        cases.append(case)
    assert all(row.errors and max(row.errors.d_hidden, row.errors.d_weight) < 1e-5 for row in cases[1].rows)
    given = {name: report.received_bytes(kinds, 2)["gathered"] for name, kinds in cases[0].collectives.items()}
    assert "| gathered MiB | scattered MiB |" in report.table(cases[0])
    # gloo makes a reduce-scatter of an all-reduce, whose half is gathered.
    weight = (2 + 4) * 201 * 16  # gathered in bf16, scattered in fp32
    # Hidden states and embeddings five times in bf16; numbers of each token; how many tokens the other rank has.
    hidden = 64 * (5 * 2 * 16 + 3 * 4 * 2 + 8 + 4 + 8) + 8
    saved = weight - hidden
    assert given["cce-dist-default"] - given["cce-dist-shard-over"] == saved
    assert given["torch-compile"] == given["cce-dist-default"]
