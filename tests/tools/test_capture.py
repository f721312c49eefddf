"""Captures hold what the head got, and a run that captures is the run that does not."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from toy_runs import SHORT, TOY, losses

from cce_dist.tools import cli
from cce_dist.tools.bench.workload import read_workload


def test_captures_give_the_losses_of_their_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a capture of another step or after its update, labels that belong to other tokens, and a hook that stays."""
    command = ["pretrain", *TOY, *SHORT, "--tp", "1", "--cache", str(tmp_path / "cache")]
    out = tmp_path / "run"
    assert cli.main([*command, "--out", str(out), "--capture", "1", "6"]) == 0
    assert sorted(path.name for path in (out / "captured").iterdir()) == ["step-1.pt", "step-6.pt"]
    for step in (1, 6):
        held = torch.load(out / "captured" / f"step-{step}.pt", weights_only=True)
        loss = F.cross_entropy(held["hidden"] @ held["weight"].T, held["labels"])
        assert loss.item() == pytest.approx(losses(out)[step - 1], rel=1e-5)
        assert read_workload(out / "captured" / f"step-{step}.pt", dtype=torch.float32).loss == pytest.approx(
            loss.item()
        )
    capsys.readouterr()
    assert cli.main([*command, "--out", str(tmp_path / "split"), "--capture", "1", "--dp", "2"]) == 1
    assert "--capture is for one rank" in capsys.readouterr().err
