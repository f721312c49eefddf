"""Every file of docs/examples is short, runs as it is, and learns."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "examples"
RUNNER = FOLDER.parents[1] / "tests" / "run_example.py"
ALONE = {
    "clipped_policy": None,
    "sampled_sets": None,
    "distillation": None,
    "plain_loop": "transformers",
    "trainer": "transformers",
}
POLICIES = ("clipped_policy", "sampled_sets")
ON_RANKS = {
    "tensor_parallel": None,
    "fsdp2": "transformers",
    "with_deepspeed": "deepspeed",
    "with_megatron": "megatron",
}
MOST_LINES = 60


def numbers_of(name: str, needs: str | None, command: list[str]) -> list[tuple[float, float]]:
    """Run an example. Returns the first and the last number that each rank prints."""
    if needs and find_spec(needs) is None:
        pytest.skip(f"needs {needs}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, *command, name], capture_output=True, text=True, timeout=280, env=environment)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, list[float]] = {}
    for rank, number in re.findall(r"(?:rank (\d): )?(?:step \d+: .*?|loss )(\d+\.\d+)", ran.stdout):
        found.setdefault(rank, []).append(float(number))
    return [(numbers[0], numbers[-1]) for _, numbers in sorted(found.items())]


def test_examples_are_short_and_tried() -> None:
    files = {path.stem: len(path.read_text().splitlines()) for path in FOLDER.glob("*.py")}
    assert files.keys() == ALONE.keys() | ON_RANKS.keys()
    assert {name: lines for name, lines in files.items() if lines > MOST_LINES} == {}


@pytest.mark.parametrize("name", ALONE)
def test_it_learns(name: str) -> None:
    [(first, last)] = numbers_of(name, ALONE[name], [str(RUNNER)])
    assert last > 1.5 * first if name in POLICIES else last < 0.7 * first


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_RANKS)
def test_it_learns_on_two_ranks(name: str) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(RUNNER)]
    ranks = numbers_of(name, ON_RANKS[name], torchrun)
    assert len(ranks) == 2
    assert all(last < 0.7 * first for first, last in ranks)
    if name in ("tensor_parallel", "with_megatron"):  # one loss, on both ranks
        assert ranks[0] == ranks[1]
