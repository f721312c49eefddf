"""What is stored is whole, finite and safe to read: NaN, full disks, damage, other people's files."""

import contextlib
import json
import math
import os
import pickle
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("tokenizers")

from toy_runs import ALONE, go_back, losses, newest, one_line, options, prepared, pretrain, records

from cce_dist.tools.pretrain import checkpoint, exits, launch, log
from cce_dist.tools.pretrain.engine import Engine, Step
from cce_dist.tools.pretrain.exits import CheckpointError, UsageError
from cce_dist.tools.pretrain.ranks import make_mesh
from cce_dist.tools.pretrain.train import train

pytestmark = pytest.mark.xdist_group("damage")

EIGHT = "step-00000008"


def go_on(cache: Path, out: Path, *more: str) -> None:
    train(options(cache, out, *more), ALONE, prepared(cache))


def step_that(
    number: int,
    before: Callable[[], Any] = lambda: None,
    after: Callable[[Engine, Step], Step] = lambda engine, done: done,
) -> Any:
    """Have something happen before a step, or to its outcome."""
    original = Engine.step

    def step(self: Engine, given: int, *batch: Any) -> Step:
        if given == number:
            before()
        done = original(self, given, *batch)
        return after(self, done) if given == number else done

    return mock.patch.object(Engine, "step", step)


def not_finite(engine: Engine, done: Step) -> Step:
    return done._replace(grad_norm=done.grad_norm * math.nan)


@contextlib.contextmanager
def no_file_beyond(num_bytes: int) -> Iterator[None]:
    """Make writes past ``num_bytes`` of any file fail, as those to a full disk do."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def _lose_nothing(cache: Path, out: Path) -> None:
    ranks = make_mesh(torch.device("cpu"), tp=2, dp=1, timeout=timedelta(seconds=120))

    def trained(folder: str, *more: str) -> Path:
        recipe = options(cache, out / folder, "--log-every", "100", *more)
        try:
            train(recipe, ranks, prepared(cache))
        finally:
            torch.use_deterministic_algorithms(False)
        return out / folder

    whole = trained("whole", "--log-every", "1")

    # Not a number in the sixth step, between two records and two checkpoints.
    message = r"not finite at step 6.*newest checkpoint is of step 4"
    with step_that(6, after=not_finite), pytest.raises(UsageError, match=message):
        trained("nan", "--eval-every", "100")
    assert newest(out / "nan") == 4 and not (out / "nan" / "checkpoints" / EIGHT).exists()

    # The newest checkpoint is damaged.
    dist.barrier()
    if ranks.rank == 0:
        _flip(max((whole / "checkpoints" / EIGHT).rglob("*"), key=lambda path: path.stat().st_size))
    dist.barrier()
    before = losses(whole)
    assert losses(trained("whole", "--log-every", "1")) == before

    # One rank's disk is full.
    full = no_file_beyond(16 << 10) if ranks.rank == 1 else contextlib.nullcontext()
    with full, pytest.raises(CheckpointError, match=r"File too large|is the disk full\?"):
        trained("full")
    dist.barrier()
    assert not list((out / "full" / "checkpoints").glob("step-*"))


@pytest.mark.slow
def test_two_ranks_lose_nothing(ranks2, tmp_path, cache) -> None:
    ranks2(_lose_nothing, cache, tmp_path)


def spoiled(engine: Engine, done: Step) -> Step:
    with torch.no_grad():
        engine.model.embedding.weight.mul_(math.nan)
    return done


@pytest.mark.parametrize(
    ("step", "says"),
    [
        # Loss and gradient of the fourth step are finite; its update is not.
        (step_that(4, after=spoiled), r"weights after step 4 give a loss of nan.*there is no checkpoint"),
        # The third step is not finite, and a signal asks to stop before anybody has looked.
        (
            step_that(3, lambda: os.kill(os.getpid(), signal.SIGTERM), not_finite),
            r"not finite at step 3: .*no checkpoint",
        ),
    ],
    ids=["weights", "before-a-stop"],
)
def test_nothing_that_is_not_finite_is_stored(cache, tmp_path, step: Any, says: str) -> None:
    with step, pytest.raises(UsageError, match=says):
        go_on(cache, tmp_path, "--log-every", "100", "--eval-every", "100", "--keep", "9")
    assert not list((tmp_path / "checkpoints").glob("step-*"))


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _add_bad_lines(metrics: Path) -> None:
    lines = metrics.read_bytes().splitlines(keepends=True)
    lines[3:3] = [b'{"step": 3, "spl\n', b"\xff\xfe\n", b"[1]\n", b"\n"]
    lines[3:3] = [b'{"step": "four", "split": "train", "loss": 1}\n']
    metrics.write_bytes(b"".join([*lines, b'{"step": 9, "spl']))
    assert len(log.read(metrics)) == 10


def _leave_scratch(folder: Path) -> None:
    """As a run that was killed does."""
    shutil.copytree(folder, folder.with_name("step-00000012.tmp"))
    folder.with_name("latest.tmp").touch()


@pytest.mark.parametrize(
    ("name", "spoil", "resumed"),
    [
        *((f"{EIGHT}/{name}", _flip, 4) for name in ("__0_0.distcp", "state.pt", ".metadata", "manifest.json")),
        *((f"{EIGHT}/{name}", Path.unlink, 4) for name in ("__0_0.distcp", "manifest.json")),
        (f"{EIGHT}/manifest.json", lambda path: os.truncate(path, 100), 4),
        ("latest", Path.unlink, 8),
        ("../metrics.jsonl", _add_bad_lines, 8),
        (EIGHT, _leave_scratch, 8),
    ],
)
def test_damage_is_one_line_and_a_whole_checkpoint_is_taken(
    cache, run: Path, trained, capsys, name: str, spoil: Callable[[Path], Any], resumed: int
) -> None:
    """Catches also a resumed run that is not the bits of one that never stopped: of another state of the generators."""
    spoil(run / "checkpoints" / name)
    torch.manual_seed(1)
    go_on(cache, run)
    output = capsys.readouterr()
    assert f"resumed after step {resumed}" in output.out and losses(run) == losses(trained)
    if resumed == 4:
        [line] = output.err.splitlines()
        assert EIGHT in line and "is damaged and passed over" in line


def test_no_resume_deletes_its_own_and_nothing_else(cache, run: Path) -> None:
    folder = run / "checkpoints"
    others = ["step-by-step.txt", "step-00000099/notes.txt", "step-1/weights.bin", "step-00000004.kept/state.pt"]
    for name in others:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("mine")
    go_on(cache, run, "--no-resume", "--steps", "4")
    assert [(folder / name).read_text() for name in others] == ["mine"] * 4
    assert not (folder / EIGHT).exists() and (folder / "step-00000004").exists()


def test_a_checkpoint_that_finds_the_disk_full_loses_nothing(cache, run: Path, trained, capsys) -> None:
    go_back(run)
    with no_file_beyond(16 << 10):  # metrics fit, a checkpoint does not
        assert pretrain(cache, run) == exits.HOPELESS
    line = one_line(capsys)
    assert "cannot write checkpoint" in line and ("File too large" in line or "is the disk full?" in line)
    assert newest(run) == 4 and not list((run / "checkpoints").glob("*.tmp"))
    go_on(cache, run)
    assert losses(run) == losses(trained)


def test_metrics_that_find_the_disk_full_are_one_line(cache, tmp_path, capsys) -> None:
    prepared(cache)
    with no_file_beyond(420):
        assert pretrain(cache, tmp_path) == exits.HOPELESS
    assert "metrics.jsonl" in one_line(capsys)
    assert [record["step"] for record in log.read(tmp_path / "metrics.jsonl")] == [1, 2]  # 160 to 185 bytes each


def test_a_reader_that_has_ended_stops_no_training(cache, tmp_path, monkeypatch) -> None:
    """As in ``cce-dist pretrain | head -1``. Catches: a closed pipe that is taken for metrics that cannot be written."""
    prepared(cache)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr("sys.stdout", closed)
        assert pretrain(cache, tmp_path) == 0
    assert len(log.read(tmp_path / "metrics.jsonl")) > 8


def test_a_corpus_that_finds_the_disk_full_is_one_line(tmp_path, capsys) -> None:
    with no_file_beyond(16 << 10):
        assert pretrain(tmp_path / "cache", tmp_path / "out") == exits.HOPELESS
    line = one_line(capsys)
    assert "cannot write the tokenized corpus" in line and "File too large" in line
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.suffix != ".lock"]


class _Spy:
    """A pickle that touches a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def test_a_state_runs_no_code(cache, run: Path, tmp_path) -> None:
    """A folder whose manifest is that of the evil file: only torch's loader can refuse it."""
    folder = run / "checkpoints" / EIGHT
    (folder / "state.pt").write_bytes(pickle.dumps(_Spy(tmp_path / "ran")))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = {each: checkpoint.checksum(folder / each) for each in manifest["files"]}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UsageError, match="cannot read checkpoint"):
        go_on(cache, run)
    assert not (tmp_path / "ran").exists()


def test_records_tell_the_share_of_the_peak_and_the_end_says_where_all_is(cache, tmp_path, capsys) -> None:
    go_on(cache, tmp_path, "--peak-tflops", "0.001", "--steps", "4")
    [record] = records(tmp_path)[-1:]
    # Weights of the toy's matrices: two layers of 4 x 32 x 32 and 3 x 32 x 96, and a head of 32 x 384.
    flops = 6 * (2 * (4096 + 9216) + 12288) + 6 * 2 * 32 * 32
    assert record["mfu"] == pytest.approx(record["tokens_per_s"] * flops / 1e9)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"finished: {tmp_path} holds metrics.jsonl, curves.png, checkpoints/step-00000004"


@pytest.mark.parametrize("writer", [["--tensorboard"], ["--wandb", "project"]], ids=lambda writer: writer[0])
def test_writers_that_are_missing_are_said(cache, tmp_path, capsys, monkeypatch, writer: list[str]) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    assert pretrain(cache, tmp_path / "run", *writer) == 1
    assert "which is not installed: pip install" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_weights_and_biases_get_every_record(cache, tmp_path, monkeypatch) -> None:
    board = mock.Mock()
    monkeypatch.setitem(sys.modules, "wandb", mock.Mock(init=lambda **said: board, Error=OSError))
    go_on(cache, tmp_path, "--wandb", "project", "--steps", "2")
    given = [(call.kwargs["step"], *call.args[0]) for call in board.log.call_args_list]
    assert [(step, first) for step, first, *_ in given] == [(1, "train/loss"), (2, "train/loss"), (2, "val/loss")]
    board.finish.assert_called_once()


def test_tensorboard_reads_one_clean_history(cache, run: Path) -> None:
    """The real package. Catches records past the checkpoint, of a run that was killed, that stand beside those that follow."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    go_back(run)
    board = log._tensorboard(run, 0)
    for step in range(1, 7):
        board.add_scalar("train/loss", 100.0 + step, step)
    board.close()
    go_on(cache, run, "--tensorboard")
    events = reader.EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    history = [(event.step, event.value) for event in events.Scalars("train/loss")]
    ours = [(record["step"], pytest.approx(record["loss"])) for record in records(run)]
    assert history == [(step, 100.0 + step) for step in range(1, 5)] + ours[4:]


def test_a_refusal_of_weights_and_biases_is_one_line(cache, tmp_path, monkeypatch, capsys) -> None:
    """The real package, without a key."""
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert pretrain(cache, tmp_path / "run", "--wandb", "project") == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("cce-dist")]
    assert len(lines) == 1 and "cannot write to Weights & Biases: No API key" in lines[0]


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


GONE = r"checkpoints in .* are gone, of which step-00000008 was the newest: .*--no-resume"


@pytest.mark.parametrize(
    ("pattern", "spoil", "says"),
    [
        ("checkpoints/step-*/__0_0.distcp", _flip, "no checkpoint in .* is whole: --no-resume starts anew"),
        ("checkpoints/step-*", _remove, "names 'step-00000008', which is gone"),
        ("checkpoints", _remove, GONE),
        ("checkpoints/*", _remove, GONE),
    ],
)
def test_a_run_without_a_whole_checkpoint_keeps_its_records(
    cache, run: Path, pattern: str, spoil: Callable[[Path], Any], says: str
) -> None:
    """Catches a run that begins at step 0 and overwrites its metrics. A run that had stored nothing begins anew."""
    before = (run / "metrics.jsonl").read_bytes()
    for path in [*run.glob(pattern)]:
        spoil(path)
    with pytest.raises(UsageError, match=says):
        go_on(cache, run, "--checkpoint-every", "100")
    assert (run / "metrics.jsonl").read_bytes() == before
    if says != GONE:
        return
    (run / checkpoint.STORED).unlink()
    go_on(cache, run, "--steps", "3", "--checkpoint-every", "100")
    (run / checkpoint.STORED).write_text(EIGHT)
    go_on(cache, run, "--steps", "4", "--no-resume")
    assert newest(run) == 4 and (run / checkpoint.STORED).read_text() == "step-00000004\n"
