"""The main job on toy sizes: data, model and loop, alone and on two ranks. Faults have a file of their own."""

import dataclasses
import datetime
import functools
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("tokenizers")

from toy_runs import ALONE, CORPUS, go_back, largest_difference, newest, one_line, options, prepared, pretrain, records

from cce_dist.tools.pretrain import data
from cce_dist.tools.pretrain.engine import clip_gradients
from cce_dist.tools.pretrain.ranks import Ranks, make_mesh
from cce_dist.tools.pretrain.recipe import PRESETS
from cce_dist.tools.pretrain.train import train

pytestmark = pytest.mark.xdist_group("pretrain")


def test_a_run_leaves_falling_losses_a_figure_and_a_checkpoint(trained) -> None:
    train_losses = [record["loss"] for record in records(trained)]
    assert [record["step"] for record in records(trained)] == list(range(1, 9))
    assert [record["step"] for record in records(trained, "val")] == [4, 8]
    assert train_losses[0] == pytest.approx(math.log(PRESETS["toy"].vocab_size), abs=0.1)
    assert train_losses[-1] < train_losses[0] - 0.1
    assert (trained / "curves.png").stat().st_size > 1000
    assert newest(trained) == 8


@pytest.mark.parametrize(
    ("loss", "exact"),
    [("dense", True), ("filtered --filter-eps 1e-30", True), ("filtered --filter-eps 0.01", False)],
    ids=["dense", "no-op-filter", "filter"],
)
def test_losses_that_are_exact_differ_in_rounding_alone(cache, tmp_path, trained, loss: str, exact: bool) -> None:
    """All logits, and a filter that drops nothing. Catches a filter that is lost on its way to the head."""
    train(options(cache, tmp_path, "--checkpoint-every", "0", "--loss", *loss.split()), ALONE, prepared(cache))
    assert (largest_difference(trained, tmp_path) < 1e-5) == exact


def test_a_longer_run_says_what_its_learning_rate_does(cache, run, capsys) -> None:
    """Catches a schedule that changes unsaid, and a line about one that does not change."""
    assert pretrain(cache, run, "--steps", "12", "--checkpoint-every", "2") == 0
    rates = [f"{record['lr']:.2e}" for record in records(run)]
    line = "--steps was 8 and is 12: the learning rate's cosine now ends at step 12, so that step 9 has"
    assert f"{line} {rates[8]} after {rates[7]}\n" in capsys.readouterr().out and float(rates[8]) > 2 * float(rates[7])
    go_back(run, 10)
    assert pretrain(cache, run, "--steps", "12") == 0
    said = capsys.readouterr().out
    assert "resumed after step 10" in said and "--steps was" not in said


def test_a_checkpoint_of_another_model_is_refused(cache, run, capsys) -> None:
    assert pretrain(cache, run, "--num-layers", "1") == 1
    assert "num_layers 2 there, 1 here" in capsys.readouterr().err


@functools.cache
def _place(tp: int, dp: int) -> Ranks:
    return make_mesh(torch.device("cpu"), tp, dp, datetime.timedelta(seconds=120))


def _train_on_two_ranks(tp: int, cache: Path, out: Path, *more: str) -> None:
    train(options(cache, out, *more), _place(tp, 2 // tp), prepared(cache))
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("tp", "more"),
    [
        pytest.param(2, [], id="tp"),
        pytest.param(2, None, id="from-a-checkpoint-of-one"),
        pytest.param(2, ["--sequence-parallel"], id="sp"),
        pytest.param(2, ["--sequence-parallel", "--loss", "dense"], id="dense-sp"),
        pytest.param(1, ["--accumulate", "2"], id="dp"),
    ],
)
def test_two_ranks_repeat_one(ranks2, cache, tmp_path, run, trained, tp: int, more: list[str] | None) -> None:
    out = tmp_path / "new"
    if more is None:
        go_back(out := run)
    ranks2(_train_on_two_ranks, tp, cache, out, *(more or ()))
    assert [record["step"] for record in records(out)] == list(range(1, 9))
    assert largest_difference(trained, out) < 1e-5


def test_a_recipe_is_read_from_the_command_line(cache, tmp_path) -> None:
    """Catches a flag that is dropped on its way, or a default that is not the recipe's."""
    recipe = options(cache, tmp_path, "--vocab-size", "500", "--lr", "0.5", "--loss", "full-c", "--filter-eps", "0.25")
    assert recipe.shape == dataclasses.replace(PRESETS["toy"], vocab_size=500)
    assert (recipe.lr, recipe.steps, recipe.clip, recipe.out) == (0.5, 8, 1.0, tmp_path)
    assert recipe.grad_filter is not None and (recipe.grad_filter.eps, recipe.grad_filter.weight) == (0.25, False)


def test_labels_stop_at_the_joints_of_documents() -> None:
    ids = np.array([5, 6, data.EOS, 7, 8, 9, data.EOS, 4, 3], dtype=np.uint16)
    rows, labels = data.Batches(ids, seq_len=8, seed=0).at(0, 1)
    assert rows.tolist() == [[5, 6, 0, 7, 8, 9, 0, 4]]
    assert labels.tolist() == [[6, 0, data.IGNORED, 8, 9, 0, data.IGNORED, 3]]


def test_an_epoch_holds_every_sequence_once_in_an_order_of_its_own() -> None:
    batches = data.Batches(np.arange(1, 42, dtype=np.uint32), seq_len=4, seed=3)
    first, second = (batches.at(position, 10)[0][:, 0].tolist() for position in (0, 10))
    assert sorted(first) == sorted(second) == list(range(1, 41, 4))
    assert first != second
    assert batches.at(7, 6)[0][:, 0].tolist() == first[7:] + second[:3]


def test_a_corpus_is_tokenized_once_however_many_ask(tmp_path, monkeypatch) -> None:
    calls = []
    tokenize = data._tokenize
    monkeypatch.setattr(data, "_tokenize", lambda *args: (calls.append(args), tokenize(*args)))
    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(lambda _: data.prepare(CORPUS, "*.py", 300, tmp_path), range(4)))
    assert len(calls) == 1 and len(set(folders)) == 1
    assert data.prepare(CORPUS, "*.py", 301, tmp_path) != folders[0]
    ids = data.Corpus(folders[0])
    assert len(ids.held_out) == (len(ids.train) + len(ids.held_out)) // 20
    assert int(ids.train.max()) < 300


def test_a_corpus_is_cut_to_whole_files_of_a_size(tmp_path) -> None:
    for name in "abcdef":
        (tmp_path / f"{name}.txt").write_text("x" * (400 << 10))
    names = list(data._find(tmp_path, "*.txt", None))
    assert list(data._find(tmp_path, "*.txt", 1)) == names[:2]  # two of 400 KiB are less than a MiB, three are more
    (tmp_path / names[0]).write_text("x" * (2 << 20))
    assert list(data._find(tmp_path, "*.txt", 1)) == names[:1]  # one file there is in any case


def test_clipping_is_torchs() -> None:
    ours, theirs = (nn.Linear(5, 3) for _ in range(2))
    for model in (ours, theirs):
        for parameter in model.parameters():
            parameter.grad = torch.arange(parameter.numel(), dtype=torch.float32).view_as(parameter)
    norm = clip_gradients(ours, 1.0, ALONE)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(theirs.parameters(), 1.0))
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)


def test_the_learning_rate_warms_up_and_decays_to_a_tenth(tmp_path) -> None:
    recipe = options(tmp_path, tmp_path, "--lr", "1", "--warmup", "10", "--steps", "100")
    assert [recipe.learning_rate(step) for step in (1, 10, 55, 100)] == pytest.approx([0.1, 1, 0.55, 0.1])


without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        pytest.param(["--batch-size", "9", "--accumulate", "2"], "batch size 9 cannot be split 2 ways", id="batch"),
        pytest.param(["--seq-len", "1000000"], "tokens in a split, one sequence needs 1000001", id="corpus-too-small"),
        pytest.param(["--vocab-size", "100"], "100 is too few", id="fewer-ids-than-bytes"),
        pytest.param(["--tp", "3"], "heads 4 cannot be split 3 ways", id="heads"),
        pytest.param(["--device", "cuda"], "torch sees no GPU", id="no-gpu", marks=without_gpu),
        pytest.param(["--filter-eps", "0.1"], "--filter-always need a --loss that filters", id="no-filter"),
    ],
)
def test_a_wrong_option_is_one_line(tmp_path, capsys, more: list[str], message: str) -> None:
    """Catches sizes that are looked at after the corpus was tokenized."""
    assert pretrain(tmp_path / "cache", tmp_path / "out", *more) == 1
    line = one_line(capsys)
    assert message in line and ("token" in message or not list(tmp_path.iterdir()))


def test_an_out_that_cannot_be_made_is_one_line(cache, capsys) -> None:
    """Names that are too long each are a mistake of the command line, a path that is too long is found when it is made."""
    assert pretrain(cache, Path(*["o" * 200] * 30)) == 1
    assert "File name too long" in one_line(capsys)
    with pytest.raises(SystemExit, match="2"):
        pretrain(cache, Path("o" * 300))
    line = one_line(capsys)
    assert "--out" in line and "more than 255 bytes" in line
