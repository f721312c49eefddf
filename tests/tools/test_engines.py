"""``cce-dist pretrain --engine deepspeed`` and ``megatron`` against plain torch, tiny and on the CPU."""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("tokenizers")

from toy_runs import SHORT, TOY, forget_groups, largest_difference, losses, options, prepared, records

from cce_dist.tools import cli
from cce_dist.tools.pretrain.data import Batches, Corpus
from cce_dist.tools.pretrain.launch import train_on as train
from cce_dist.tools.pretrain.ranks import Ranks
from cce_dist.tools.pretrain.recipe import PRESETS
from cce_dist.tools.ranks import run_ranks

CUT = ["--pp", "2", "--layers-per-stage", "2,0"]  # the last stage has the head alone
NOTHING_DROPPED = ["--loss", "filtered", "--filter-eps", "1e-30"]
RUNS: dict[str, dict[str, tuple]] = {  # tensor-parallel, data-parallel and pipeline size; further options
    "deepspeed": {
        "pipe-model-dense": (2, 1, 2, ["--loss", "dense", "--accumulate", "2"]),
        "pipe-model-filtered": (2, 1, 2, ["--accumulate", "2", *NOTHING_DROPPED, *CUT]),
        "zero3-exact": (1, 4, 1, ["--zero-stage", "3", "--accumulate", "2"]),
        "pipe-data-bf16": (1, 2, 2, ["--dtype", "bfloat16"]),
        "zero2-dense-bf16": (1, 4, 1, ["--zero-stage", "2", "--dtype", "bfloat16", "--loss", "dense"]),
    },
    "megatron": {
        "pipe-tensor-exact": (2, 1, 2, ["--sequence-parallel", "--accumulate", "2", *CUT]),
        "pipe-tensor-dense": (2, 1, 2, ["--loss", "dense"]),
    },
}
RESUMED = ("pipe-model-filtered", "zero3-exact", "pipe-tensor-exact")  # after their first checkpoint


def _on_four_ranks(cache: Path, out: Path) -> None:
    for engine in RUNS:  # Megatron's is the last: its process is led to the CPU for good
        _train_all(engine, cache, out)


def _train_all(engine: str, cache: Path, out: Path) -> None:
    runs = RUNS[engine]
    for name in (*runs, *(f"{name}-resumed" for name in RESUMED if name in runs)):
        run = name.removesuffix("-resumed")
        if run != name and dist.get_rank() == 0:
            shutil.copytree(out / run, out / name)
            (out / name / "checkpoints" / "latest").write_text("step-00000004\n")
        dist.barrier()
        tp, dp, pp, more = runs[run]
        ranks = Ranks(torch.device("cpu"), dist.get_rank(), dist.get_world_size(), tp, dp, pp)
        if run not in RESUMED:
            more = [*more, "--checkpoint-every", "0"]
        forget_groups(engine)
        train(options(cache, out / name, "--engine", engine, *more), ranks, prepared(cache))
    if engine == "deepspeed":
        forget_groups(engine)
        _go_on_in_another_layout(cache, out)


def _go_on_in_another_layout(cache: Path, out: Path) -> None:
    """Load a pipe x model checkpoint, converted by DeepSpeed's own tool, into pipe x data, and validate."""
    from deepspeed.checkpoint import ds_to_universal

    from cce_dist.tools.pretrain.engines import deepspeed

    folder = out / "pipe-model-filtered" / "checkpoints" / "step-00000008"
    if dist.get_rank() == 0:
        workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
        folders = ["--input_folder", str(folder / deepspeed.TAG), "--output_folder", str(folder / "universal")]
        with mock.patch.object(sys, "argv", ["ds_to_universal", *workers, *folders]):
            ds_to_universal.main(ds_to_universal.parse_arguments())
    dist.barrier()
    ds_config = deepspeed.ds_config
    deepspeed.ds_config = lambda *given: ds_config(*given) | {"checkpoint": {"load_universal": True}}
    ranks = Ranks(torch.device("cpu"), dist.get_rank(), 4, tp=1, dp=2, pp=2)
    args = options(cache, out, "--engine", "deepspeed")
    engine = deepspeed.DeepSpeedEngine(args, ranks)
    engine.engine.load_checkpoint(str(folder), tag="universal")
    held_out = Batches(Corpus(prepared(cache)).held_out, PRESETS["toy"].seq_len, args.seed)
    loss = engine.validate(held_out)
    assert loss == pytest.approx(losses(out / "pipe-model-filtered")[-1], abs=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None or find_spec("megatron") is None, reason="needs both frameworks")
@pytest.mark.timeout(280)
def test_every_engine_trains_as_torch_does(cache: Path, trained: Path, tmp_path: Path) -> None:
    run_ranks(_on_four_ranks, 4, cache, tmp_path)
    expected = records(trained)
    for name in (name for runs in RUNS.values() for name in runs):
        tolerance = 0.02 if name.endswith("bf16") else 1e-5
        assert largest_difference(trained, tmp_path / name) < tolerance, name
        for record, torchs in zip(records(tmp_path / name), expected, strict=True):
            assert record["lr"] == torchs["lr"]
            assert record["grad_norm"] == pytest.approx(torchs["grad_norm"], rel=50 * tolerance), name
        if name in RESUMED:
            state = torch.load(tmp_path / name / "checkpoints" / "step-00000008" / "state.pt")
            assert state["same"]["layers of the stages"] == ([2, 0] if name.startswith("pipe") else None), name
            assert losses(tmp_path / f"{name}-resumed") == losses(tmp_path / name), name


@pytest.mark.parametrize(
    ("more", "message"),
    [
        pytest.param(["--zero-stage", "3"], "--zero-stage needs --engine deepspeed", id="zero-of-torch"),
        pytest.param(["--engine", "deepspeed", "--sequence-parallel"], "is not for --engine deepspeed", id="sequence"),
        pytest.param(["--engine", "deepspeed", "--compile"], "--compile is for --engine torch", id="compile"),
        pytest.param(["--engine", "deepspeed", "--zero-stage", "3", "--pp", "2"], "need --pp 1 and --tp 1", id="pipe"),
    ],
)
def test_a_wrong_option_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert cli.main(["pretrain", *TOY, *SHORT, "--cache", str(tmp_path), "--out", str(tmp_path), *more]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0]
