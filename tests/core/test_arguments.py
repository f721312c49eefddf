"""D13. Arguments that make no sense are one line and exit code 2, whatever the command, before anything starts."""

from __future__ import annotations

import pytest

from cce_dist.tools import cli

PRETRAIN = [
    "--clip -1", "--clip nan", "--clip 0", "--lr nan", "--lr inf", "--lr -1", "--lr 0", "--lr x", "--warmup -5", "--seed -1",
    "--seed 99999999999999999999", "--steps 0", "--steps 1.5", "--checkpoint-every -1", "--eval-every 0", "--eval-batches 0",
    "--log-every 0", "--keep 0", "--weight-decay nan", "--weight-decay -1", "--filter-eps nan", "--filter-eps 1",
    "--filter-eps -1", "--batch-size 0", "--accumulate 0", "--tp 0", "--dp -1", "--pp 0", "--timeout nan", "--timeout 0",
    "--timeout inf", "--max-restarts -1", "--corpus-mib 0", "--corpus-mib 1e3", "--vocab-size 0", "--vocab-size 999999999999",
    "--seq-len 0", "--num-layers -2", "--loss nosuch", "--preset nosuch", "--zero-stage 4", "--pattern /abs", "--out=",
    "--pattern=", "--cache=", "--out /dev/null", "--cache /dev/null/x", "--corpus /dev/null", "--peak-tflops 0", "--nodes 0",
]  # fmt: skip
LONG = 300 * "a"
CASES = {
    "pretrain": [*PRETRAIN, f"--out {LONG}", f"--cache {LONG}", f"--corpus {LONG}"],
    "verify": [
        "--only nosuch", "--fuzz -1", "--fuzz x", "--seed -1", "--case -1", "--backend nosuch",
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


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from cce_dist.tools import verify

    def stop(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "run", stop)
    assert cli.main(["verify"]) == 130
    assert capsys.readouterr().err == "cce-dist verify: stopped\n"
