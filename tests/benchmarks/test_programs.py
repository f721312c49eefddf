"""The other scripts, on a CPU and at small sizes; and each script as a program."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import count_architectures
import fingerprint
import heads
import kernel_times
import steps
import training

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [path for path in ROOT.glob("benchmarks/*.py") if "if __name__" in path.read_text()]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_a_program(script: Path, monkeypatch, capsys) -> None:
    """Catches a script that cannot be started, and one whose --help does not show how."""
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(script), run_name="__main__")
    assert f"python benchmarks/{script.name}" in capsys.readouterr().out or script.stem == "fingerprint"


REFUSED: list[tuple[Any, str, str]] = [
    (heads, "--workload sharpest", "is neither a rung"),
    (heads, "--workload " + 300 * "a", "is neither a rung"),
    *((heads, f"--tp {sizes}", "argument --tp: must be ") for sizes in ("0", "2,-1", "two")),
    (heads, "--tp 4", "--tp 4, but torchrun has 2 ranks"),
    *((heads, f"--stage megatron --tp {sizes}", "--stage takes all 2 ranks") for sizes in ("1", "2,1")),
    (steps, "", "--models names one or more of gemma-3-270m"),
    (steps, "--models gemma-2-2b --tokens 100 --length 64", "no whole sequences of 64"),
    (steps, "--models gemma-2-2b --fsdp", "--fsdp needs torchrun with two or more ranks"),
    (training, "", "--model names one of gemma-3-270m"),
    (training, "--model gemma-2-2b --gradients-every 4", "--gradients-every must be a multiple of --measure-every"),
    (training, "--model gemma-3-270m --corpus nosuch", "no such corpus folder"),
]


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(("script", "options", "says"), REFUSED)
def test_a_wrong_option_is_one_line(script: Any, options: str, says: str, monkeypatch, capsys, tmp_path) -> None:
    pytest.importorskip("transformers")
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items() if "tp" in options else ():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as refused:
        script.main([*options.split(), "--device", "cpu", "--out", str(tmp_path)])
    assert says in f"{refused.value} {capsys.readouterr().err}"


def test_the_kernels_of_a_loss_are_told_apart(tmp_path, capsys, monkeypatch) -> None:
    """Catches the matmuls of backward counted in forward, a warm-up round that is counted, and times of a wrong gradient."""
    out = tmp_path / "times.json"
    argv = ["24x2048", "--tokens", "16", "--methods", "torch", "quack", "trl", "--repeats", "2", "--out", str(out)]
    monkeypatch.setitem(sys.modules, "quack", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # a CPU's profile names torch's operations
    table = kernel_times.methods_of()
    wrong = table["torch"]._replace(build=lambda *case: lambda *operands: 2 * table["torch"].build(*case)(*operands))
    monkeypatch.setattr(kernel_times, "methods_of", lambda: table | {"trl": wrong})
    assert kernel_times.main(argv) == 0
    times = json.loads(out.read_text())["times"]
    assert list(times) == ["torch"] and set(map(len, times["torch"].values())) == {2}
    slope = "aten::_log_softmax_backward_data"
    assert {"forward: aten::_log_softmax", f"backward: {slope}", "backward: aten::mm"} <= set(times["torch"])
    assert f"forward: {slope}" not in times["torch"]
    table_text, _, refusals = capsys.readouterr().out.partition("### quack")
    lines = [line for line in table_text.splitlines() if line.startswith("|")]
    *parts, total = [float(line.split("|")[2]) for line in lines[2:]]
    assert total == pytest.approx(sum(parts), abs=0.01)
    assert "quack" in refusals and "wrong loss: relative error 1.0e+00" in refusals


def test_architectures_are_counted(monkeypatch, capsys, tmp_path) -> None:
    """Catches a class that is not counted, and a page that keeps its old table."""
    pytest.importorskip("transformers")
    page = tmp_path / "page.md"
    page.write_text("<!-- causal_lm -->\nold\n<!-- end of causal_lm -->\n")
    monkeypatch.setattr(count_architectures, "PAGE", page)
    results = {"LlamaForCausalLM": "equal", "BertLMHeadModel": "differs", "XForCausalLM": "not built"}
    result = count_architectures.Result
    monkeypatch.setattr(count_architectures, "run", lambda name, _: result(name, results[name], "why"))
    monkeypatch.setattr(count_architectures, "quiet", lambda: None)
    assert count_architectures.main([*results, "--write"]) == 1
    assert "2 of 3 classes were built, **1 of these are equal**" in page.read_text()
    assert "| BertLMHeadModel | differs | why |" in page.read_text() and "old" not in page.read_text()


def test_a_fingerprint_sees_what_moved(tmp_path, capsys) -> None:
    """Catches a bit of a gradient that moves unseen, and a case that is gone."""
    hashes = {"loss": "1", "gradient of input": "2"}
    files = [str(tmp_path / "old.json"), str(tmp_path / "new.json")]
    results = {"a": hashes, "b": hashes}, {"a": hashes | {"gradient of input": "3"}}
    for file, found in zip(files, results, strict=True):
        Path(file).write_text(json.dumps({"made with": {}, "torch T=1": found}))
    assert fingerprint.compare(files[0], files[0]) == 0
    assert fingerprint.compare(*files) == 1
    said = capsys.readouterr().out
    assert "a: gradient of input" in said and "b: vanished" in said
