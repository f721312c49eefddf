"""What ``launch/measure_group.sh kill`` does on GPUs. test_preemption.py and test_damage.py have each disturbance alone."""

import sys

import pytest

pytest.importorskip("tokenizers")

import lose_a_rank


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds processes in /proc")
@pytest.mark.sweep
def test_a_run_that_lost_a_rank_ends_in_the_bits_of_an_undisturbed_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert lose_a_rank.main(["--ranks", "2", "--then", "1"]) == 0
    assert "started again in the same bits" in capsys.readouterr().out
