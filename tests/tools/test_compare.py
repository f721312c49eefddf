"""``cce-dist compare`` on toy sizes: the probe against what is known of each method, and one whole command."""

import dataclasses
import json
import math
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("tokenizers")
pytest.importorskip("matplotlib")

from cce_dist import linear_cross_entropy
from cce_dist.tools import cli
from cce_dist.tools.compare import heads, report
from cce_dist.tools.compare.probe import Agreement
from cce_dist.tools.compare.runs import Run, train
from cce_dist.tools.pretrain.ranks import Ranks
from cce_dist.tools.pretrain.recipe import PRESETS, Recipe
from cce_dist.tools.report import write_json

pytestmark = pytest.mark.xdist_group("compare")

CORPUS = Path(sysconfig.get_path("stdlib")) / "email"
# 4,096 ids to 128 tokens, and eps above a uniform softmax: much of the gradient holds no label, and goes.
TOY = ["--preset", "toy", "--vocab-size", "4096", "--corpus", str(CORPUS), "--pattern", "*.py", "--device", "cpu"]
SHORT = ["--steps", "4", "--measure-every", "2", "--seeds", "2", "--batch-size", "4", "--eval-batches", "1"]
METHODS = ["dense", "exact", "filtered", "filtered-plain", "full-c", "full-c-plain", "cce"]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> report.Comparison:
    out = tmp_path_factory.mktemp("compare")
    argv = ["compare", *TOY, *SHORT, "--filter-eps", "3e-4", "--warmup", "2", "--methods", *METHODS]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors are tiny
    try:
        assert cli.main([*argv, "--out", str(out), "--cache", str(cache)]) == 0
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")
    return report.joined([out / "compare.json"])


def error(comparison: report.Comparison, method: str, gradient: str) -> float:
    """Largest relative error, from cosine and ratio of norms."""
    pairs = zip(*(flat(comparison, method, kind, gradient) for kind in ("cosine", "norm")), strict=True)
    return max(math.sqrt(max(0.0, 1 + norm * norm - 2 * norm * cosine)) for cosine, norm in pairs)


def flat(comparison: report.Comparison, method: str, statistic: str, gradient: str = "") -> list[float]:
    return [value for values in comparison.series(method, statistic, gradient).values() for value in values]


def test_every_run_is_there_and_learns(comparison: report.Comparison) -> None:
    runs = [(run.seed, run.method) for run in comparison.runs]
    assert runs == [(seed, method) for seed in (0, 1) for method in METHODS if method != "cce"]
    for run in comparison.runs:
        losses = [measured.val_loss for measured in run.measurements]
        assert [measured.step for measured in run.measurements] == [0, 2, 4]
        assert losses[0] == pytest.approx(math.log(4096), abs=0.1)
        assert losses[-1] < losses[0]


def test_gradients_are_compared_less_often_than_losses(tmp_path: Path, cache: Path) -> None:
    """Catches: gradients compared with every loss, or not after the last step; steps that fall between two losses."""
    argv = ["compare", *TOY, *SHORT, "--seeds", "1", "--methods", "exact"]
    argv += ["--out", str(tmp_path), "--cache", str(cache)]
    assert cli.main([*argv, "--measure-every", "1", "--gradients-every", "3"]) == 0
    (run,) = report.joined([tmp_path / "compare.json"]).runs
    assert [measured.step for measured in run.measurements] == [0, 1, 2, 3, 4]
    assert [measured.step for measured in run.measurements if measured.cosine] == [0, 3, 4]
    assert cli.main([*argv, "--measure-every", "2", "--gradients-every", "3"]) == 1


def test_methods_of_a_seed_start_alike_and_seeds_do_not(comparison: report.Comparison) -> None:
    starts = comparison.series("dense", "val_loss")[0]
    assert starts[0] != starts[1]
    assert all(comparison.series(method, "val_loss")[0] == starts for method in comparison.methods)


def test_dense_and_exact_have_the_dense_gradient(comparison: report.Comparison) -> None:
    for method in ("dense", "exact"):
        for name in report.GRADIENTS:
            assert min(flat(comparison, method, "cosine", name)) > 1 - 1e-6
            assert flat(comparison, method, "norm", name) == pytest.approx([1] * 6, abs=1e-5)
    assert max(abs(value) for values in comparison.excess("exact").values() for value in values) < 1e-5


def test_the_filter_is_on_and_compensation_repairs_the_mean(comparison: report.Comparison) -> None:
    assert error(comparison, "filtered-plain", "mean dE") > 1e-2
    assert error(comparison, "filtered", "mean dE") < 1e-4
    of_means = flat(comparison, "filtered-plain", "error_of_mean")
    assert max(of_means) == pytest.approx(error(comparison, "filtered-plain", "mean dE"))
    (row,) = (line for line in report.summary(comparison, ["mean-dE-error"]) if "filtered-plain" in line)
    assert f"{sum(of_means) / len(of_means):.1e}" in row
    for name in ("dE", "dC", "rare dC"):
        assert error(comparison, "filtered", name) < 0.7 * error(comparison, "filtered-plain", name)
    # What is dropped is missing from rows that no label touches.
    assert max(flat(comparison, "filtered-plain", "norm", "rare dC")) < 0.98


def test_full_c_filters_dE_alone(comparison: report.Comparison) -> None:
    for method, filtered in (("full-c", "filtered"), ("full-c-plain", "filtered-plain")):
        assert error(comparison, method, "dC") < 1e-5 < error(comparison, filtered, "dC")
        # At the first measurement the weights are the same, and so is dE.
        first, other = (comparison.series(name, "norm", "dE")[0] for name in (method, filtered))
        assert first == pytest.approx(other, abs=1e-12)


def test_the_softmax_by_rank_is_that_of_the_last_step(comparison: report.Comparison) -> None:
    """Catches a rank that is off by one power of two, ranks of the first weights, and one seed for all."""
    for method in ("dense", "exact"):
        found = comparison.by_rank(method)
        assert list(found) == [1 << power for power in range(13)]  # 4,096 ids
        assert all(len(set(values)) == 2 and max(values) <= 1 / rank for rank, values in found.items())
        assert list(found.values()) == sorted(found.values(), reverse=True)
    (first, *_, last), other = comparison.runs[0].measurements, comparison.by_rank("dense")
    assert [values[0] for values in other.values()] == last.by_rank != first.by_rank


def test_a_missing_library_is_reported(comparison: report.Comparison) -> None:
    assert comparison.missing == {"cce": "needs a GPU"}
    assert report.table(comparison).splitlines()[-1] == "Not measured: cce (needs a GPU)."


def test_the_table_pairs_seeds(comparison: report.Comparison) -> None:
    dense, plain = (
        [run.measurements[-1].val_loss for run in comparison.runs if run.method == method]
        for method in ("dense", "filtered-plain")
    )
    differences = [ours - theirs for ours, theirs in zip(plain, dense, strict=True)]
    row = next(line for line in report.table(comparison).splitlines() if "filtered-plain" in line)
    assert f"{sum(plain) / 2:.4f} ({abs(plain[0] - plain[1]) / 2**0.5:.4f})" in row
    assert f"{sum(differences) / 2:+.4f}" in row


def test_show_draws_and_prints_again(
    comparison: report.Comparison, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    comparison.runs[0].measurements[0].train_loss = math.nan
    write_json(tmp_path / "again.json", comparison)
    content = json.loads((tmp_path / "again.json").read_text(), parse_constant=pytest.fail)  # no NaN
    assert content["options"]["seeds"] == 2 and content["sizes"]["vocab_size"] == 4096
    assert cli.main(["compare", "--show", str(tmp_path / "again.json")]) == 0
    assert report.table(comparison) in capsys.readouterr().out
    assert (tmp_path / "again.png").exists()


def test_several_files_are_shown_as_one(
    comparison: report.Comparison, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches seeds of a second file that are lost, counted twice, or from another training."""
    paths = [tmp_path / f"seed-{seed}.json" for seed in (0, 1)]
    for seed, path in enumerate(paths):
        write_json(path, dataclasses.replace(comparison, runs=[run for run in comparison.runs if run.seed == seed]))
    whole = report.joined(paths)
    assert whole.runs == comparison.runs and whole.excess("filtered") == comparison.excess("filtered")
    assert cli.main(["compare", "--show", *map(str, paths), "--columns", "excess-se"]) == 0
    shown = capsys.readouterr().out
    low, high = comparison.excess("filtered")[4]
    assert f"{(low + high) / 2:+.4f} ({abs(high - low) / 2:.4f})" in shown
    others = [run for run in comparison.runs if run.method != "dense"]
    write_json(tmp_path / "no-dense.json", dataclasses.replace(comparison, runs=others))
    assert cli.main(["compare", "--show", str(tmp_path / "no-dense.json"), "--columns", "excess-se"]) == 0

    assert cli.main(["compare", "--show", str(paths[0]), str(paths[0])]) == 1
    assert "has a run of dense with seed 0 again" in capsys.readouterr().err
    write_json(paths[1], dataclasses.replace(comparison, options=comparison.options | {"lr": 1.0}, runs=[]))
    assert cli.main(["compare", "--show", *map(str, paths)]) == 1
    assert "was trained with other --lr" in capsys.readouterr().err


def test_columns_print_a_part_of_the_table_and_draw_nothing(
    comparison: report.Comparison, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_json(tmp_path / "again.json", comparison)
    assert cli.main(["compare", "--show", str(tmp_path / "again.json"), "--columns", "val-loss", "rare-dC"]) == 0
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert header.replace(" ", "") == "|method|valloss(sd)|raredC|"
    assert [row.split()[1] for row in rows] == comparison.methods
    assert not (tmp_path / "again.png").exists()
    assert cli.main(["compare", "--show", str(tmp_path / "again.json"), "--columns", "rear-dC"]) == 1
    assert "unknown column 'rear-dC': choose from val-loss" in capsys.readouterr().err


def test_a_file_without_the_softmax_is_drawn(comparison: report.Comparison, tmp_path: Path) -> None:
    """Files of earlier releases have none. Catches: an axis in logarithms of nothing."""
    path = tmp_path / "earlier.json"
    write_json(path, comparison)
    saved = json.loads(path.read_text())
    for measured in (each for run in saved["runs"] for each in run["measurements"]):
        del measured["by_rank"]
    path.write_text(json.dumps(saved))
    assert cli.main(["compare", "--show", str(path)]) == 0
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_another_librarys_function_becomes_a_head() -> None:
    chosen, missing = heads.choose(["torch"], Recipe(shape=PRESETS["toy"]), Ranks(torch.device("cpu")))
    assert not missing
    torch.manual_seed(0)
    weight, hidden = nn.Parameter(torch.randn(50, 8)), torch.randn(6, 2, 8, requires_grad=True)
    labels = torch.randint(50, (6, 2))
    labels[1, 1] = labels[4, 0] = -100
    loss = chosen["torch"](weight)(hidden, labels, num_tokens=40)  # a part of a larger batch
    ours = linear_cross_entropy(hidden, weight, labels, num_tokens=40)
    torch.testing.assert_close(loss, ours)
    for one, other in zip(*(torch.autograd.grad(x, (hidden, weight)) for x in (loss, ours)), strict=True):
        torch.testing.assert_close(one, other)


def test_showing_something_else_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bench.json").write_text('{"environment": {}, "cases": []}')
    assert cli.main(["compare", "--show", str(tmp_path / "bench.json")]) == 1
    assert capsys.readouterr().err.splitlines()[0].endswith("is not a compare.json of this version (KeyError: 'cases')")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        pytest.param(["--methods", "exakt"], "unknown method 'exakt': choose from dense, exact", id="method"),
        pytest.param(["--corpus", "/no/such/folder"], "no such corpus folder: /no/such/folder", id="corpus"),
        pytest.param(
            ["--methods", "exact", "--filter-eps", "0.1"], "--filter-eps needs a method that filters", id="eps"
        ),
    ],
)
def test_a_wrong_option_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert cli.main(["compare", *TOY, *SHORT, "--out", str(tmp_path), "--cache", str(tmp_path), *more]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0]


@pytest.mark.parametrize(("last", "learned"), [(3.95, False), (3.5, True)])
def test_a_run_that_learns_nothing_says_so(last: float, learned: bool) -> None:
    """Catches losses of a training that went nowhere, compared as if they said something of gradients."""
    losses = iter([4.0, last])
    training: Any = SimpleNamespace(
        validate=lambda: next(losses),
        probe=lambda _: Agreement({}, {}, {}, 0.0, []),
        step=lambda _: torch.tensor(4.0),
    )
    recipe: Any = SimpleNamespace(steps=100, batch_size=1, shape=SimpleNamespace(seq_len=1))
    run = Run("exact", 0)
    train(recipe, training, run, 100, 100, lambda: None)
    assert ("nothing was learned" in run.problem) == (not learned)
