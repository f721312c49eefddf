"""Whole steps of models: real sizes, ways over the same parameters, nothing wrong is timed; and the plan of these models."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from cce_dist.tools import cli
from cce_dist.tools.bench import cases, models, peers, records, report, steps
from cce_dist.tools.bench.methods import Method
from cce_dist.tools.bench.models import CONFIGS, STOCK, FromHidden, build, config_of, over, twin
from cce_dist.tools.compare import models as training
from cce_dist.tools.compare import report as curves
from cce_dist.tools.plan import Layout, Model, plan, sizes
from cce_dist.tools.plan.planning import LOSSES
from cce_dist.tools.pretrain import Recipe
from cce_dist.tools.pretrain.ranks import Ranks
from cce_dist.tools.pretrain.recipe import Shape

transformers = pytest.importorskip("transformers")

QUICK = ["--repeats", "1", "--device", "cpu", "--dtype", "float32"]
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
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the models toy sizes, and the training a small batch."""
    for name in CONFIGS:
        is_tied = sizes.MODELS[name].is_tied
        monkeypatch.setitem(sizes.MODELS, name, Model(16, 400, 2, 4, 32, 2, 4, is_tied=is_tied))
    monkeypatch.setattr(steps, "TRAIN_TOKENS", 256)
    monkeypatch.setattr(steps, "TRAIN_RATE", 1e-2)


@pytest.fixture
def corpus(tmp_path: Path) -> list[str]:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text(Path(steps.__file__).read_text())
    return ["--corpus", str(folder), "--pattern", "*.txt", "--cache", str(tmp_path / "cache")]


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


def test_the_plan_adds_body_and_head(capsys: pytest.CaptureFixture) -> None:
    """The column of one rank is all layers and the head, for every loss; a pipeline has no such sum."""
    found = plan("qwen-3-0.6b", Layout(framework="torch"))
    assert found.body == pytest.approx(28 * found.layer.seconds)
    assert cli.main(["plan", "--model", "qwen-3-0.6b", "--framework", "torch"]) == 0
    lines = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("|")][
        : 2 + len(LOSSES)
    ]
    column = [name.strip() for name in lines[0]].index("body + head ms")
    for line, each in zip(lines[2:], found.losses, strict=True):
        assert float(line[column]) == pytest.approx(1e3 * (found.body + each.cost.seconds), abs=0.051)
    assert cli.main(["plan", "--model", "qwen-3-0.6b", "--pp", "2"]) == 0
    assert "body + head" not in capsys.readouterr().out


def test_whole_steps_from_the_command_line(
    tiny: None, corpus: list[str], tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text is learned, all ways have stock's loss and gradients, rounds are stored, and ``--show`` prints them again."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # the default takes long on a CPU
    out = tmp_path / "out"
    command = ["bench", "--models", "gemma-2-2b", "--layers", "1", "--tokens", "32", "64", "--length", "32"]
    options = ["--train-steps", "40", "--repeats", "2", "--device", "cpu", "--dtype", "float32"]
    assert cli.main([*command, *options, *corpus, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    found = records.read_json(out / "bench.json").cases
    assert [(case.shape, case.num_tokens, case.num_layers) for case in found] == [
        ("gemma-2-2b", n, 1) for n in (32, 64)
    ]
    for case in found:
        rows = {row.name: row for row in case.rows}
        there = {"stock", "torch-compile", *models.OURS}
        assert {name for name, row in rows.items() if not row.problem} == there, [row.problem for row in case.rows]
        assert {name for name, row in rows.items() if row.missing} == rows.keys() - there
        for row in case.present:
            assert len(row.total.seconds) == 2 and row.peak_bytes is None
            assert row.errors is not None and row.value is not None
            assert row.errors.loss < 1e-5 and row.errors.d_hidden < 0.05 and row.errors.d_weight < 0.05, row.name
            # Weights rest while ways are timed: the table's softmax is that of the rows.
            assert row.value == pytest.approx(case.loss, rel=1e-4)
        assert case.loss < np.log(400) - 0.5 and 100 < case.num_ids <= 400
    assert "### whole steps, gemma-2-2b, N 64, D 16, V 400, 1 layers, sequences of 32, float32" in printed
    assert (out / "bench.png").exists()

    assert cli.main(["bench", "--show", str(out / "bench.json"), "--tokens", "32", "--methods", "stock"]) == 0
    shown = capsys.readouterr().out
    assert "N 32" in shown and "N 64" not in shown and "cce-dist" not in shown
    with pytest.raises(SystemExit, match="nothing of what is asked for"):
        cli.main(["bench", "--show", str(out / "bench.json"), "--models", "llama-3-8b"])
    assert cli.main(["bench", "--show", str(out / "bench.json"), "--columns", "value", "stock"]) == 0
    assert "| stock             |" in capsys.readouterr().out

    # As on a GPU.
    stock = next(row for row in found[-1].rows if row.name == "stock")
    stock.total.seconds, stock.peak_bytes = [0.5, 0.25, 0.25], 3 << 30
    others = [row for row in found[-1].rows if row is not stock]
    text = report.table(dataclasses.replace(found[-1], on_gpu=True, rows=[stock]))
    heading, _, line = (row.split("|")[2:-1] for row in text.splitlines() if row.startswith("|"))
    cells = {name.strip(): cell.strip() for name, cell in zip(heading, line, strict=True)}
    assert cells["step ms (IQR)"] == "250.0 (125.0)" and cells["tokens/s"] == "256" and cells["x stock"] == "1.000"
    assert cells["peak MiB"] == "3,072"
    picture = dataclasses.replace(found[-1], on_gpu=True, rows=[stock, *others])
    report.write_figure(out / "gpu.png", records.read_json(out / "bench.json").environment, [picture])
    assert (out / "gpu.png").exists()


def test_ways_under_torch_compile(
    tiny: None, corpus: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each way has its layers under torch.compile, ours included, and its loss still comes from hidden states."""
    compiled = []
    monkeypatch.setattr(
        torch,
        "compile",
        lambda module, compile=torch.compile, **options: (
            compiled.append(type(module)),
            compile(module, backend="eager", **options),
        )[1],
    )
    command = ["bench", "--models", "llama-3.2-1b", "--layers", "1", "--tokens", "32", "--train-steps", "5", *QUICK]
    options = ["--compile", "layers", "--out", str(tmp_path), *corpus]
    names = ["stock+layers", "cce-dist-default+layers"]
    assert cli.main([*command, *options, "--methods", *names]) == 0
    rows = records.read_json(tmp_path / "bench.json").cases[0].rows
    assert [row.name for row in rows] == names and len(compiled) == 2
    assert all(row.total.seconds and row.errors and row.errors.d_hidden < 1e-5 for row in rows)


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


def test_nothing_wrong_is_timed(tiny: None, corpus: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong row has no time and says why, the others go on, and the exit code tells."""
    wrong = {kind: Method(partial(Wrong, kind=kind), ours=kind == "fails") for kind in ("loss", "gradient", "fails")}
    monkeypatch.setattr(steps, "ways", lambda compiles: wrong | {"cce-dist-default": STOCK, "stock": STOCK})
    command = ["bench", "--models", "qwen-3-0.6b", "--layers", "1", "--tokens", "64", "--length", "32", *QUICK]
    options = ["--train-steps", "5", "--out", str(tmp_path), *corpus]
    assert cli.main([*command, *options, "--methods", *wrong, "stock"]) == 1
    *rows, stock = records.read_json(tmp_path / "bench.json").cases[0].rows
    assert stock.total.seconds and not stock.problem
    says = ("wrong loss: relative error", "wrong gradient of the body: relative error", "RuntimeError: no kernel")
    for row, reason in zip(rows, says, strict=True):
        assert row.problem.startswith(reason) and not row.total.seconds


def test_ways_share_parameters_and_nothing_else(tiny: None) -> None:
    """A copy steps the model's own weights; what is done to a copy reaches neither the model nor its class."""
    model = build("gemma-3-270m", 1, torch.float32, torch.device("cpu"))
    first, second = twin(model), twin(model)
    assert [*map(id, first.parameters())] == [*map(id, model.parameters())] == [*map(id, second.parameters())]
    models.ways([""])["cce-dist-default"].build(first)
    assert type(first.lm_head) is not type(second.lm_head) is type(model.lm_head)
    assert first.lm_head.weight is model.lm_head.weight is model.model.embed_tokens.weight


def test_memory_of_a_step_has_weights_and_optimizer(tiny: None) -> None:
    """Catches a peak without AdamW's two moments, and a tied weight that counts twice."""
    model = build("gemma-3-270m", 1, torch.float32, torch.device("cpu"))
    run, ids = steps.at_rest(model), torch.ones(1, 4, dtype=torch.int64)
    before = run.resident_bytes()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert before == weights + sum(buffer.nbytes for buffer in model.buffers())
    run.step(model, ids)
    assert run.resident_bytes() - before == 2 * weights + 4 * len(run.parameters)  # AdamW counts steps, too


def test_other_losses_see_the_softcap(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a loss from hidden states, or a described softmax, without the softcap, and labels that are shifted otherwise."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = build("gemma-2-2b", 1, torch.float64, torch.device("cpu"))
    with torch.no_grad():
        model.lm_head.weight *= 50
    ids = torch.randint(400, (2, 16), generator=torch.Generator().manual_seed(0))
    stock = model(input_ids=ids, labels=ids)["loss"]
    other = over(models.ways([""])["torch-compile"], model)
    torch.testing.assert_close(other(ids, ids)["loss"], stock, rtol=1e-6, atol=0)
    assert steps._workload(model, ids).loss == pytest.approx(stock.item(), rel=1e-5)
    assert abs(FromHidden(twin(model), peers.dense)(ids, ids)["loss"] / stock - 1) > 1e-2


def test_liger_changes_one_model(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
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
    patched = over(models.ways([""])["liger"], model)
    ids = torch.ones(1, 4, dtype=torch.int64)
    assert patched(input_ids=ids, labels=ids)["loss"] is patched and asked == [{"fused_linear_cross_entropy"}]
    assert type(model).forward is before and model(input_ids=ids, labels=ids)["loss"].ndim == 0


def test_ids_are_spread_over_all_rows(corpus: list[str], tmp_path: Path) -> None:
    """A tokenizer with fewer ids than rows: order is kept, no two ids meet, and the last row is near."""
    folder = steps.prepare(Path(corpus[1]), "*.txt", 5000, tmp_path / "cache")
    text = steps.Text(steps.Corpus(folder), 5000)
    assert text.known < 2500
    rows = text.spread(np.arange(text.known), torch.device("cpu"))
    assert rows[0] == 0 and (rows.diff() > 0).all() and 5000 - 5000 / text.known - 1 <= rows[-1] < 5000


def test_what_is_no_table_is_refused(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["bench", "--models", "list"]) == 0
    assert capsys.readouterr().out.split() == list(CONFIGS)
    for argv, says in (
        (["nobody"], "unknown model nobody"),
        (["gemma-2-2b", "--tp", "2"], "two tables"),
        (["gemma-2-2b", "--tokens", "100", "--length", "64"], "no whole sequences of 64"),
        (["gemma-2-2b", "--fsdp", "2", "--compile", "yes"], "no or layers"),
        (["gemma-2-2b", "--fsdp", "2"], "all ranks, two or more; here are 4"),
    ):
        with pytest.raises(SystemExit, match=says):
            cli.main(["bench", "--models", *argv])


def under_fsdp(out: Path) -> None:
    """Two ranks: bytes are those of the arithmetic in bf16, gradients the stock model's in fp32, with layers compiled, too."""
    tiny = Model(16, 402, 2, 4, 32, 2, 4, is_tied=True)
    command = ["bench", "--models", "gemma-3-270m", "--fsdp", "2", "--tokens", "64", "--length", "32"]
    command += ["--device", "cpu", "--repeats", "2", "--out", str(out)]
    in_fp32 = ["--dtype", "float32", "--compile", "layers", "--methods"]
    layers = ["cce-dist-default+layers", "cce-dist-shard-over+layers"]
    found = []
    with (
        mock.patch.dict(sizes.MODELS, {"gemma-3-270m": tiny}),
        mock.patch.object(torch, "compile", partial(torch.compile, backend="eager")),
        mock.patch.object(cases, "_on_ranks", lambda body, args, _: body(args)),
    ):
        for more in ([], [*in_fp32, *layers]):
            assert cli.main([*command, *more]) == 0
            dist.barrier()
            (case,) = records.read_json(out / "bench.json").cases
            assert case.num_ranks == 2 and all(len(row.total.seconds) == 2 for row in case.rows)
            found.append({row.name: row for row in case.rows})
            if not more:
                given = {name: report.received_bytes(kinds, 2)["gathered"] for name, kinds in case.collectives.items()}
                assert "| gathered MiB | scattered MiB |" in report.table(case)
    assert list(found[0]) == ["cce-dist-default", "cce-dist-shard-over", "torch-compile"] and list(found[1]) == layers
    assert all(row.errors and max(row.errors.d_hidden, row.errors.d_weight) < 1e-5 for row in found[1].values())
    # gloo makes a reduce-scatter of an all-reduce, whose half is gathered.
    weight = (2 + 4) * 201 * 16  # gathered in bf16, scattered in fp32
    # Hidden states and embeddings five times in bf16; numbers of each token; how many tokens the other rank has.
    hidden = 64 * (5 * 2 * 16 + 3 * 4 * 2 + 8 + 4 + 8) + 8
    saved = weight - hidden
    assert given["cce-dist-default"] - given["cce-dist-shard-over"] == saved
    assert given["torch-compile"] == given["cce-dist-default"]


def test_whole_steps_under_fsdp(ranks2: Callable, tmp_path: Path) -> None:
    ranks2(under_fsdp, tmp_path)


@pytest.fixture
def own_mode() -> Iterator[None]:
    """Take back what a training sets for the whole process."""
    yield
    torch.use_deterministic_algorithms(False)


COMPARED = ["compare", "--model", "gemma-3-270m", "--num-layers", "2", "--seq-len", "32", "--device", "cpu"]
COMPARED += ["--steps", "6", "--measure-every", "3", "--eval-batches", "2", "--batch-size", "4", "--lr", "1e-2"]
COMPARED += ["--warmup", "2"]
WAYS = ["stock", "default", "filtered"]


def test_models_train_with_each_gradient(
    tiny: None,
    own_mode: None,
    corpus: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    """Catches a run from other weights or batches, a way that is another's, a wrong dE, seeds that do not merge."""
    # The threshold is above a uniform softmax.
    options = ["--dtype", "float32", "--filter-eps", "4e-3", *corpus]
    files = [tmp_path / str(seed) / "compare.json" for seed in (3, 4)]
    with mock.patch.object(steps.Text, "train", autospec=True, side_effect=steps.Text.train) as drawn:
        for seed, file in zip("34", files, strict=True):
            assert cli.main([*COMPARED, *options, "--first-seed", seed, "--seeds", "1", "--out", str(file.parent)]) == 0
    assert [call.args[-1] for call in drawn.call_args_list] == [3, 4]
    whole = curves.joined(files)
    assert [(run.seed, run.method) for run in whole.runs] == [(seed, way) for seed in (3, 4) for way in WAYS]
    losses = {way: whole.series(way, "val_loss") for way in WAYS}
    assert all(list(series) == [0, 3, 6] and series[0] == losses["stock"][0] for series in losses.values())
    assert losses["stock"][0][0] != losses["stock"][0][1] and max(losses["stock"][6]) < np.log(400) - 0.1
    for statistic in ("val_loss", "batch_loss", "train_loss"):
        ours, stock = (whole.series(way, statistic) for way in ("default", "stock"))
        for step in stock:
            assert ours[step] == pytest.approx(stock[step], abs=1e-5), statistic
    for name in curves.GRADIENTS:
        away = {way: 1 - min(map(min, whole.series(way, "cosine", name).values())) for way in WAYS}
        assert away["stock"] < 1e-9 and away["default"] < 1e-9, name
        if name == "dE":
            assert 1e-6 < away["filtered"] < 0.1
    assert max(abs(value) for value in whole.excess("filtered")[6]) > 1e-6

    capsys.readouterr()
    assert cli.main(["compare", "--show", *map(str, files)]) == 0
    shown = capsys.readouterr().out
    assert "### gemma-3-270m, 6 steps of 128 tokens, 2 seeds; 2 layers, D 16, V 400, float32" in shown
    assert "- stock (s.e.) |" in shown and (tmp_path / "3" / "compare.png").exists()


def test_a_converted_model_trains_under_autocast(
    tiny: None, own_mode: None, corpus: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp32 parameters and bf16 products, as Trainer's ``bf16=True``: ours is stock to the rounding of bf16."""
    dtypes = set()

    def watched(layer: nn.Linear, x: torch.Tensor, forward: Callable = nn.Linear.forward) -> torch.Tensor:
        dtypes.add((layer.weight.dtype, forward(layer, x).dtype))
        return forward(layer, x)

    monkeypatch.setattr(nn.Linear, "forward", watched)
    options = ["--seeds", "1", "--methods", "default", "stock", *corpus, "--out", str(tmp_path)]
    assert cli.main([*COMPARED, *options]) == 0
    found = curves.joined([tmp_path / "compare.json"])
    assert dtypes == {(torch.float32, torch.bfloat16)}
    assert max(abs(value[0]) for value in found.excess("default").values()) < 5e-3
    for way in ("default", "stock"):
        distances = [1 - values[0] for values in found.series(way, "cosine", "dE").values()]
        assert 0 < max(distances) < 1e-3


def test_compiled_layers_are_not_deterministic(
    tiny: None, own_mode: None, corpus: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches --compile without compilation, and both together, for which torch 2.11 computes wrong gradients."""
    compiled = []
    monkeypatch.setattr(nn.Module, "compile", lambda layer, **options: compiled.append(layer))
    text = steps.Corpus(steps.prepare(Path(corpus[1]), "*.txt", 400, tmp_path / "cache"))
    recipe = Recipe(shape=Shape(16, 2, 2, 32, 16, 400), steps=1, batch_size=2, compile=True)
    torch.use_deterministic_algorithms(True)
    learner = training.ModelLearner("gemma-3-270m", recipe, Ranks(torch.device("cpu")), text, {"stock": STOCK})
    learner.start(0)
    assert compiled == [*learner.model.model.layers] and not torch.are_deterministic_algorithms_enabled()


def test_a_softcap_is_in_every_loss_and_gradient(
    tiny: None, corpus: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a held-out loss or a dense gradient of other logits than the model's own."""
    monkeypatch.setitem(models._GEMMA_2, "final_logit_softcapping", 0.1)
    text = steps.Corpus(steps.prepare(Path(corpus[1]), "*.txt", 400, tmp_path / "cache"))
    recipe = Recipe(shape=Shape(16, 1, 2, 32, 16, 400), steps=1, batch_size=2)
    stock = training.ModelLearner("gemma-2-2b", recipe, Ranks(torch.device("cpu")), text, {"stock": STOCK})
    stock.start(0)
    stock.take("stock")
    stock.held_out = ids = stock.batches
    model = stock.model
    found, loss = stock.probe(0), model(input_ids=ids[0], labels=ids[0])["loss"].item()
    assert [stock.validate(), found.batch_loss] == pytest.approx([loss, loss], rel=1e-6)
    assert min(found.cosine.values()) > 1 - 1e-9
    assert [*found.norm.values()] == pytest.approx([1] * 4, abs=1e-5)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--model", "gpt-9"], "unknown model gpt-9: choose from gemma-3-270m"),
        (["--vocab-size", "300"], "--vocab-size and --model exclude each other"),
        (["--methods", "exact"], "unknown method 'exact' of a model: choose from stock"),
    ],
)
def test_what_is_no_training_of_a_model_is_one_line(
    more: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert cli.main([*COMPARED, *more, "--out", str(tmp_path)]) == 1
    assert says in capsys.readouterr().err
