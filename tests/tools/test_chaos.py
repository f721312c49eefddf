"""Some rounds of what ``launch/chaos.sh`` does for hours."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("tokenizers")

import chaos


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds processes in /proc")
@pytest.mark.timeout(250)
@pytest.mark.parametrize("rounds", ["1", pytest.param("20", marks=pytest.mark.sweep)])
@pytest.mark.slow
def test_a_disturbed_run_ends_in_the_bits_of_an_undisturbed_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, rounds: str
) -> None:
    monkeypatch.setattr(chaos, "STEPS", 30 if rounds == "20" else 12)
    assert chaos.main(["--rounds", rounds, "--seconds", "100", "--seed", "12"]) == 0
    assert "all bit for bit those of an undisturbed one" in capsys.readouterr().out
