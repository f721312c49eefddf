"""D13. Arguments that make no sense are one line and exit code 2, whatever the command, before anything starts."""

import importlib
import json
from pathlib import Path
from unittest import mock

import pytest

from cce_dist.tools import cli

PRETRAIN = [
    "--clip -1", "--clip nan", "--clip 0", "--lr nan", "--lr inf", "--lr -1", "--lr 0", "--lr x", "--warmup -5", "--seed -1",
    "--seed 99999999999999999999", "--steps 0", "--steps 1.5", "--checkpoint-every -1", "--eval-every 0", "--eval-batches 0",
    "--log-every 0", "--keep 0", "--weight-decay nan", "--weight-decay -1", "--filter-eps nan", "--filter-eps 1",
    "--filter-eps -1", "--batch-size 0", "--accumulate 0", "--tp 0", "--dp -1", "--timeout nan", "--timeout 0",
    "--timeout inf", "--max-restarts -1", "--corpus-mib 0", "--corpus-mib 1e3", "--vocab-size 0", "--vocab-size 999999999999",
    "--seq-len 0", "--num-layers -2", "--loss nosuch", "--preset nosuch", "--pattern /abs", "--out=",
    "--pattern=", "--cache=", "--out /dev/null", "--cache /dev/null/x", "--corpus /dev/null", "--peak-tflops 0", "--nodes 0",
]  # fmt: skip
LONG, HUGE = 300 * "a", "1" + 20 * "0"
SIZES = """hidden-size vocab-size num-layers num-heads ffn-size num-kv-heads head-size tokens micro-batch tp pp dp cp vpp ep
workspace global-tokens"""
CASES = {
    "pretrain": [*PRETRAIN, f"--out {LONG}", f"--cache {LONG}", f"--corpus {LONG}"],
    "verify": [
        "--only nosuch", "--fuzz -1", "--fuzz x", "--seed -1", "--case -1", "--backend nosuch",
    ],
    "plan": [
        *(f"--{size} {value}" for size in SIZES.split() for value in ("0", "-1", "1.5", "x", "nan", "1e3", HUGE)),
        "--gpu", "--scale 8,0", "--scale 8,,9", "--zero-stage 4", "--recompute some", "--framework jax", "--loss nosuch",
        "--model gpt-2 --config x", "--picture nosuch/plan.png", "--picture plan.nosuch", "--picture /dev/null/plan.png",
    ],
    "plot": ["x.jsonl -o curves.nosuch", "x.jsonl -o nosuch/curves.png"],
}  # fmt: skip


@pytest.mark.parametrize("command", CASES)
def test_an_argument_without_sense_is_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = []
    for argument in CASES[command]:
        try:
            code: object = cli.main([command, *argument.split()])
        except SystemExit as end:
            code = end.code
        except Exception as error:
            code = repr(error)
        said = capsys.readouterr().err
        option = argument.split("=")[0].split()[-2 if " " in argument else 0]
        if (code, said.count("\n")) != (2, 1) or not said.startswith(f"cce-dist {command}: argument {option[:2]}"):
            wrong.append(f"{argument}: {code}, {said}")
    assert not wrong, "\n".join(wrong)


TRAIN = {"step": 1, "split": "train", "loss": 2.0}
NO_RECORDS = ["[1]", "\x80", 9999 * "[", *(json.dumps(TRAIN | each) for each in (
    {"step": 10**400}, {"step": "1"}, {"split": 5}, {"loss": "x"}, {"loss": None}, {"loss": [1]}, {"uniform": [1]},
))]  # fmt: skip


def test_wrong_files_to_plot_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: a file or folder that is not there, lines that are no records, a name with signs of a formula."""
    pytest.importorskip("matplotlib")
    (tmp_path / "none").write_text("\n".join(NO_RECORDS), encoding="latin-1")
    figure = tmp_path / "out.png"
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "$x_{$.jsonl").write_text(json.dumps(TRAIN) + "\n")
    for metrics, out, told in (
        ("nosuch", figure, "No such file"),
        ("folder.png", figure, "No such file"),
        ("none", figure, "no records in"),
        ("$x_{$.jsonl", tmp_path / "folder.png", "Is a directory"),
    ):
        assert cli.main(["plot", str(tmp_path / metrics), "-o", str(out)]) == 1
        said = capsys.readouterr().err
        assert told in said and said.startswith("cce-dist plot: ") and said.count("\n") == 1
    assert cli.main(["plot", str(tmp_path / "$x_{$.jsonl"), "-o", str(figure)]) == 0 and figure.exists()


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_what_the_system_refuses_and_ctrl_c_are_one_line(command: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """An error of the system that a command lets through, and a full disk under its output. Catches a traceback."""
    module = importlib.import_module(cli.COMMANDS[command].module)
    argv = [command, *(["x"] if command == "plot" else [])]
    monkeypatch.setattr(module, "run", mock.Mock(side_effect=PermissionError(13, "Permission denied", "secret")))
    assert cli.main(argv) == 1
    assert capsys.readouterr().err == f"cce-dist {command}: [Errno 13] Permission denied: 'secret'\n"
    monkeypatch.setenv("CCE_DIST_DEBUG", "1")
    with pytest.raises(PermissionError):
        cli.main(argv)
    monkeypatch.delenv("CCE_DIST_DEBUG")
    monkeypatch.setattr(module, "run", mock.Mock(side_effect=KeyboardInterrupt))
    assert cli.main(argv) == 130
    assert capsys.readouterr().err == f"cce-dist {command}: stopped\n"

    def talk(args: object) -> int:
        print("much")
        return 0

    monkeypatch.setattr(module, "run", talk)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert cli.main(argv) == 1
    assert capsys.readouterr().err == f"cce-dist {command}: [Errno 28] No space left on device\n"
