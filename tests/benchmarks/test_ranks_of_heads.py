"""Tables of heads on the ranks of torchrun: every rank is checked, and the worst of them reported."""

import json

import pytest
from commands import outputs_of

import heads
from collectives import _times, _union
from loop import least_waiting, worst
from records import Collective, Errors, Row


@pytest.mark.slow
def test_ranks_split_the_vocabulary_and_say_what_they_send(tmp_path, capsys):
    methods = ["cce-dist", "cce-dist-sp", "megatron-sp"]
    argv = ["--shapes", "toy", "--tokens", "32", "--repeats", "2", "--device", "cpu", "--methods", *methods]
    output, other = outputs_of(heads.main, [*argv, "--out", str(tmp_path)], tmp_path, 2)
    assert "###" not in other
    output = output[output.index("###") :]  # behind the progress
    assert "### toy, N 32, D 256, V 4,096 / 2" in output
    assert "Not here: megatron-sp (needs a GPU)" in output
    [case] = json.loads((tmp_path / "bench.json").read_text())["cases"]
    assert [row["name"] for row in case["rows"]] == methods
    for row in case["rows"][:2]:
        assert not row["problem"] and len(row["total"]["seconds"]) == 2 and 0 < row["errors"]["d_weight"] < 2e-2
    statistics = ["all_gather", 32 * 2 * 3 * 4, 1, None, None]  # T x K x N in fp32; a CPU has no times
    d_hidden = ["all_reduce", 32 * 256 * 2, 1, None, None]  # in bf16; gloo makes its reduce-scatter of one
    gathers = ["all_gather", 32 * 256 * 2, 1, None, None]  # one pass
    sent = {name: [list(kind.values()) for kind in kinds] for name, kinds in case["collectives"].items()}
    assert sent["cce-dist"] == [statistics, d_hidden]
    assert sent["cce-dist-sp"] == [gathers, statistics, d_hidden]

    assert heads.main(["--show", str(tmp_path / "bench.json")]) == 0
    assert output.startswith(capsys.readouterr().out.rstrip())


def test_a_row_is_what_its_worst_rank_says():
    """Catches an error that only rank 0 looks for."""
    right = Row("x", False, errors=Errors(1e-3, 2e-3, 3e-3, 4e-3), peak_bytes=10)
    wrong = Row("x", False, problem="wrong gradient", errors=Errors(1e-3, 0.5, 1e-4, 4e-3), peak_bytes=20)
    row = worst([right, wrong])
    assert row.problem == "wrong gradient" and row.peak_bytes == 20
    assert row.errors == Errors(1e-3, 0.5, 3e-3, 4e-3)


def test_exposed_is_what_no_computation_covers():
    computing = _union([(10, 20), (15, 30), (50, 60)])
    assert computing == [(10, 30), (50, 60)]
    seconds, exposed = _times([(5, 25), (28, 55)], computing)
    assert seconds is not None and exposed is not None
    assert seconds == pytest.approx(47e-9) and exposed == pytest.approx((5 + 20) * 1e-9)
    assert _times([(5, 25), None], computing) == (None, None)


def test_a_collective_takes_what_it_takes_the_rank_that_waits_least():
    ranks = [[Collective("all_reduce", 8, 1, seconds, seconds / 2)] for seconds in (3e-3, 1e-3, 2e-3)]
    other = Collective("all_reduce", 4, 1)
    ranks = [[*ranks[0], other], [other, *ranks[1]], [*ranks[2], other]]
    assert least_waiting(ranks) == [Collective("all_reduce", 8, 1, 1e-3, 5e-4), other]
