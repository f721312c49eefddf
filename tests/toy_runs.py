"""Short runs of ``cce-dist pretrain`` on toy sizes, and what they leave: for the tests of all its engines."""

import argparse
import json
import sysconfig
from pathlib import Path

from cce_dist.pretrain import Recipe, add_arguments, data
from cce_dist.pretrain.recipe import PRESETS

CORPUS = Path(sysconfig.get_path("stdlib")) / "email"
TOY = ["--preset", "toy", "--corpus", str(CORPUS), "--pattern", "*.py", "--device", "cpu", "--batch-size", "8"]
SHORT = ["--steps", "8", "--warmup", "4", "--eval-every", "4", "--eval-batches", "2", "--checkpoint-every", "4"]


def options(cache: Path, out: Path, *more: str) -> Recipe:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return Recipe.of(parser.parse_args([*TOY, *SHORT, "--tp", "1", "--cache", str(cache), "--out", str(out), *more]))


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
