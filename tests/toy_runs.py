"""Short runs of ``cce-dist pretrain`` on toy sizes, and what they leave."""

import argparse
import json
import sysconfig
from pathlib import Path

import pytest
import torch

from cce_dist.tools import cli
from cce_dist.tools.pretrain import add_arguments, data
from cce_dist.tools.pretrain.ranks import Ranks
from cce_dist.tools.pretrain.recipe import PRESETS, Recipe

ALONE = Ranks(torch.device("cpu"))
CORPUS = Path(sysconfig.get_path("stdlib")) / "email"
TEXT = ["--corpus", str(CORPUS), "--pattern", "*.py"]
TOY = ["--preset", "toy", *TEXT, "--device", "cpu", "--batch-size", "8"]
SHORT = ["--steps", "8", "--warmup", "4", "--eval-every", "4", "--eval-batches", "2", "--checkpoint-every", "4"]


def options(cache: Path, out: Path, *more: str) -> Recipe:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return Recipe.of(parser.parse_args([*TOY, *SHORT, "--tp", "1", "--cache", str(cache), "--out", str(out), *more]))


def pretrain(cache: Path, out: Path, *more: str) -> int:
    """Run the command on one rank, and return its exit code."""
    return cli.main(["pretrain", *TOY, *SHORT, "--tp", "1", "--cache", str(cache), "--out", str(out), *more])


def prepared(cache: Path) -> Path:
    """Return the folder of the tokenized corpus, for a vocabulary of the toy preset's size."""
    return data.prepare(CORPUS, "*.py", PRESETS["toy"].vocab_size, cache)


def records(out: Path, split: str = "train") -> list[dict]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [record for record in lines if record["split"] == split]


def losses(out: Path) -> list[float]:
    return [record["loss"] for split in ("train", "val") for record in records(out, split)]


def largest_difference(one: Path, other: Path) -> float:
    return max(abs(a - b) for a, b in zip(losses(one), losses(other), strict=True))


def history(out: Path) -> list[tuple[int, str, float, float | None]]:
    """Return what a run's records say of its arithmetic."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(record["step"], record["split"], record["loss"], record.get("grad_norm")) for record in lines]


def newest(out: Path) -> int:
    """Return the step of the newest checkpoint by the file ``latest``; 0 where there is none."""
    try:
        return int((out / "checkpoints" / "latest").read_text().strip().removeprefix("step-"))
    except (OSError, ValueError):
        return 0


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    [line] = capsys.readouterr().err.splitlines()
    return line


def go_back(out: Path, step: int = 4) -> None:
    """Have an older checkpoint be the newest one, as if the run had been killed after it."""
    (out / "checkpoints" / "latest").write_text(f"step-{step:08d}\n")
