"""The program that trains the first steps with an engine: its files, and what it prints of them."""

from __future__ import annotations

import statistics
from pathlib import Path

import early_steps
import pytest
from toy_runs import TOY, records

from cce_dist.compare import report
from cce_dist.pretrain import UsageError

pytest.importorskip("tokenizers")
pytest.importorskip("matplotlib")


def test_differences_are_paired_by_seed_and_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches seeds or steps that are mixed up, a run that is counted twice, and a filter that is not forced."""
    how = [*TOY, "--filter-eps", "3e-3", "--steps", "10", "--eval-every", "5", "--eval-batches", "1", "--warmup", "2"]
    for seed in (0, 1):
        of_seed = [str(tmp_path / f"part-{seed}.json"), "--seeds", str(seed), "--out", str(tmp_path)]
        early_steps.run([*of_seed, "--cache", str(tmp_path / "cache"), *how])
    parts = [str(tmp_path / f"part-{seed}.json") for seed in (0, 1)]
    whole = tmp_path / "early-torch.json"
    early_steps.join([str(whole), *parts])
    assert report.read_json(whole).options["filter_always"]

    def losses(seed: int, loss: str) -> list[float]:
        return [record["loss"] for record in records(tmp_path / f"torch-{seed}-{loss}", "val")]

    pairs = [zip(losses(seed, "filtered"), losses(seed, "dense"), strict=True) for seed in (0, 1)]
    differences = [[ours - theirs for ours, theirs in pair] for pair in pairs]
    capsys.readouterr()
    early_steps.show([str(whole)])
    header, _, row = capsys.readouterr().out.splitlines()
    assert header.replace(" ", "") == "|engine|seeds|step5|step10|"
    expected = ["torch", "2"]
    for two in zip(*differences, strict=True):
        assert any(two), "both losses have the same gradient"
        expected.append(f"{statistics.fmean(two):+.4f} ({abs(two[0] - two[1]) / 2:.4f})")
    assert [cell.strip() for cell in row.strip("|").split("|")] == expected

    early_steps.draw([str(tmp_path / "early.png"), *parts])
    assert (tmp_path / "early.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match="has a run of dense with seed 0 again"):
        early_steps.show([parts[0], parts[0]])
