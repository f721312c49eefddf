"""Every file of docs/examples is short, runs as it is, and learns."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import run_example
import torch
from commands import outputs_of

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "examples"
POLICIES = ("clipped_policy", "sampled_sets")
ALONE: dict[str, str | None] = {"clipped_policy": None, "sampled_sets": None, "distillation": None}
ALONE |= {"plain_loop": "transformers", "trainer": "transformers"}
ON_RANKS = {"tensor_parallel": None, "fsdp2": "transformers"}
BESIDE_DENSE = {"with_deepspeed": "deepspeed", "with_megatron": "megatron"}
MOST_LINES = dict.fromkeys((*ALONE, *ON_RANKS), 60) | dict.fromkeys(BESIDE_DENSE, 95)
MOST_LINES["replay"] = 40  # functions, which tests/adapters/test_replay.py calls


def run(name: str, needs: str | None, folder: Path, num_ranks: int | None = None, *args: str) -> list[str]:
    """Run an example, and return what each rank prints."""
    if needs and find_spec(needs) is None:
        pytest.skip(f"needs {needs}")
    return outputs_of(run_example.main, [str(FOLDER / f"{name}.py"), *args], folder, num_ranks)


def first_and_last(said: list[str]) -> list[tuple[float, float]]:
    found = [re.findall(r"(?:step \d+: .*?|loss )(\d+\.\d+)", text) for text in said]
    return [(float(numbers[0]), float(numbers[-1])) for numbers in found]


def test_examples_are_short_and_tried() -> None:
    files = {path.stem: len(path.read_text().splitlines()) for path in FOLDER.glob("*.py")}
    assert files.keys() == MOST_LINES.keys()
    assert {name: lines for name, lines in files.items() if lines > MOST_LINES[name]} == {}


@pytest.mark.parametrize("name", ALONE)
def test_it_learns(name: str, tmp_path: Path) -> None:
    said = run(name, ALONE[name], tmp_path)
    [(first, last)] = first_and_last(said)
    if name == "sampled_sets":  # a policy that has not moved: 1 to fp32
        off = [float(number) for number in re.findall(r"ratios off 1 by (\S+),", said[0])]
        assert len(off) == 2 and max(off) < 1e-5 and "of whole softmaxes 0.9" in said[0]
    assert last > 1.5 * first if name in POLICIES else last < 0.7 * first


def test_the_notebook_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a cell that raises, losses or gradients that differ, and a plan that saves nothing."""
    pytest.importorskip("transformers")
    cells = json.loads((FOLDER / "first_steps.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        assert not cell.get("outputs")
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert names["losses"][1] == pytest.approx(names["losses"][0], rel=1e-6) and 0 < names["difference"] < 1e-6
    said = capsys.readouterr().out
    dense, budget, filtered = (int(mib.replace(",", "")) for mib in re.findall(r"\w+: ([\d,]+) MiB", said))
    assert dense > 2 * budget > 2 * filtered and "linear_log_probs" in said


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_RANKS)
def test_it_learns_on_two_ranks(name: str, tmp_path: Path) -> None:
    found = first_and_last(run(name, ON_RANKS[name], tmp_path, 2))
    assert all(last < 0.7 * first for first, last in found)
    if name == "tensor_parallel":  # one loss, on both ranks
        assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", BESIDE_DENSE)
def test_our_loss_trains_as_the_frameworks_own(name: str, tmp_path: Path) -> None:
    """On two tensor-parallel ranks of two pipeline stages. Catches a shard's part of d_hidden that is left out or counted
    twice, rows of another shard, and a gradient that microbatches or ranks weigh differently.
    """
    said = "".join(run(name, BESIDE_DENSE[name], tmp_path, 4, "--tp", "2", "--pp", "2"))
    losses = re.findall(r"step \d+: .*? (\d+\.\d+), ours (\d+\.\d+)", said)
    dense, ours = ([float(loss) for loss in curve] for curve in zip(*losses, strict=True))
    assert len(ours) == 30 and ours[-1] < 0.3 * ours[0]
    assert ours == pytest.approx(dense, abs=2e-4)  # four digits are printed
    [difference] = re.findall(r"largest difference (\S+)", said)
    assert 0 < float(difference) < 1e-5  # 0 would be one loss twice


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_megatron_without_a_gpu_is_one_line() -> None:
    done = subprocess.run([sys.executable, FOLDER / "with_megatron.py"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == "with_megatron.py: torch finds no GPU, and Megatron needs one for each rank\n"
