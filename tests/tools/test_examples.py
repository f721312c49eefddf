"""Every file of docs/examples is short, runs as it is, and learns."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import run_example
from commands import outputs_of

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "examples"
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


def numbers_of(name: str, needs: str | None, folder: Path, num_ranks: int | None = None) -> list[tuple[float, float]]:
    """Run an example. Returns the first and the last number that each rank prints."""
    if needs and find_spec(needs) is None:
        pytest.skip(f"needs {needs}")
    said = outputs_of(run_example.main, [str(FOLDER / f"{name}.py")], folder, num_ranks)
    found = [re.findall(r"(?:step \d+: .*?|loss )(\d+\.\d+)", text) for text in said]
    return [(float(numbers[0]), float(numbers[-1])) for numbers in found]


def test_examples_are_short_and_tried() -> None:
    files = {path.stem: len(path.read_text().splitlines()) for path in FOLDER.glob("*.py")}
    assert files.keys() == ALONE.keys() | ON_RANKS.keys()
    assert {name: lines for name, lines in files.items() if lines > MOST_LINES} == {}


@pytest.mark.parametrize("name", ALONE)
def test_it_learns(name: str, tmp_path: Path) -> None:
    [(first, last)] = numbers_of(name, ALONE[name], tmp_path)
    assert last > 1.5 * first if name in POLICIES else last < 0.7 * first


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_RANKS)
def test_it_learns_on_two_ranks(name: str, tmp_path: Path) -> None:
    found = numbers_of(name, ON_RANKS[name], tmp_path, 2)
    assert all(last < 0.7 * first for first, last in found)
    if name in ("tensor_parallel", "with_megatron"):  # one loss, on both ranks
        assert found[0] == found[1]
