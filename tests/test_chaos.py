"""Half a minute of what ``launch/chaos.sh`` does for hours."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("tokenizers")

import chaos


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds processes in /proc")
@pytest.mark.timeout(250)
def test_a_disturbed_run_ends_in_the_bits_of_an_undisturbed_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos.main(["--rounds", "8", "--seconds", "30", "--seed", "12"]) == 0
    assert "all bit for bit those of an undisturbed one" in capsys.readouterr().out
