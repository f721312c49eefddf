"""Tables of heads: workloads, tasks, no time for a wrong gradient, and the row of the worst rank."""

import json
import math
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from commands import outputs_of
from torch._inductor import metrics

import command
import heads
import methods
import problem as problems
import report
import tasks
from cce_dist import VocabShard
from cce_dist.kernels.divergence.heads import KINDS
from collectives import _times, _union
from loop import Clock, Job, Method, least_waiting, time_in_turns, worst
from peers import dense
from problem import loss_of, measure_problem
from records import Case, Collective, Errors, Results, Row, read_json, write_json
from tasks import KEPT_IDS, LOG_PROBS, OBJECTIVES
from workload import IGNORE_INDEX, RUNGS, SHAPES, HeadShape, make_workload

TINY = HeadShape(hidden_size=32, vocab_size=300)


def tiny_workload(**options):
    return make_workload(TINY, 64, **{"dtype": torch.float32, "ignored": 0.25} | options)


def test_workload_has_the_statistics_of_a_trained_model():
    workload = make_workload(SHAPES["phi-3.5"], 256, dtype=torch.bfloat16)
    assert 3.1 < workload.loss < 4.3
    assert 0.4 < workload.top_probability < 0.6
    assert 4e-4 < workload.probability_50 < 1e-3
    # what a filter lives on: many tiles of 128 tokens x 256 ids hold nothing that matters
    probability = F.linear(workload.hidden, workload.weight).float().softmax(1)
    matters = F.pad(probability >= 2**-12, (0, -32_064 % 256)).view(2, 128, -1, 256).any(3).any(1)
    assert 0.4 < matters.float().mean() < 0.75
    # Zipf: the first eighth of the ids holds most of the labels, yet ids are not in exact order of frequency
    assert (workload.labels < 32_064 // 8).float().mean() > 0.7


def test_the_ladder_goes_from_unigram_to_sharp():
    """Catches a rung that is another's, candidates that keep no mass, and hot ids counted as outside."""
    shape = HeadShape(256, 8192)
    rungs = [make_workload(shape, 512, rung=rung, dtype=torch.float32) for rung in RUNGS]
    losses = [rung.loss for rung in rungs]
    assert losses[0] > 5.5 and losses[-1] < 2.0 and len(losses) >= 6
    assert sorted(losses[:4], reverse=True) == losses[:4]
    probability = F.linear(rungs[2].hidden, rungs[2].weight).softmax(1)
    assert rungs[2].num_above == pytest.approx((probability >= 2**-12).sum(1).double().mean().item())
    outside = [rung.num_outside for rung in rungs]
    assert min(outside[1:4]) > 30 > outside[-1]
    assert all(rung.num_outside < rung.num_above for rung in rungs)


def test_heads_read_captured_states(tmp_path, capsys):
    """Catches labels that are drawn anew, and a file's own sizes replaced by those of a shape."""
    hidden, weight = torch.randn(40, 16), torch.randn(90, 16)
    labels = torch.randint(90, (40,))
    labels[::4] = -100
    path = tmp_path / "step-7.pt"
    torch.save({"hidden": hidden, "weight": weight, "labels": labels}, path)
    options = ["--repeats", "2", "--device", "cpu", "--dtype", "float32", "--methods", "torch", "--no-forward"]
    assert heads.main(["--workload", str(path), *options, "--out", str(tmp_path)]) == 0
    assert "### captured, step-7, N 40, D 16, V 90, float32" in capsys.readouterr().out
    (case,) = read_json(tmp_path / "bench.json", Results).cases
    assert case.loss == pytest.approx(F.cross_entropy(hidden @ weight.T, labels).item(), rel=1e-5)
    assert not case.rows[0].forward.seconds and len(case.rows[0].total.seconds) == 2
    other = tmp_path / "other.pt"
    for write in (lambda: other.write_text("{}"), lambda: torch.save([1], other)):
        write()
        with pytest.raises(SystemExit, match=r"other\.pt was not written by 'training.py --capture'$"):
            heads.main(["--workload", str(other), *options, "--out", str(tmp_path)])


def test_workload_is_reproducible_and_ignores_the_share_asked_for():
    workload, again = (make_workload(TINY, 2000, ignored=0.667, seed=3) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(workload[:3], again[:3], strict=True))
    kept = workload.labels[workload.labels != IGNORE_INDEX]
    assert 1 - len(kept) / 2000 == pytest.approx(0.667, abs=0.04)
    assert kept.min() >= 0 and kept.max() < TINY.vocab_size


def planted(operand, scale):
    """Return a method with the right loss, whose gradient of one operand is off by a factor."""

    def scaled(tensor):
        scaled = tensor.view_as(tensor)
        if scaled.requires_grad:
            scaled.register_hook(lambda grad: grad * scale)
        return scaled

    def loss(hidden, weight, labels):
        return dense(scaled(hidden), weight, labels) if operand == "dE" else dense(hidden, scaled(weight), labels)

    return Method(lambda *case: loss)


def failing(error):
    return Method(mock.Mock(side_effect=error))


def measure(workload, chosen, repeats, **options):
    shard = VocabShard.even(len(workload.weight), None)
    return measure_problem(loss_of(*workload[:3]), shard, chosen, repeats, **options)


@pytest.mark.parametrize(
    ("method", "says"),
    [
        pytest.param(planted("dE", 1.2), "wrong gradient of hidden states: relative error", id="dE-off-by-20-percent"),
        pytest.param(planted("dC", float("nan")), "wrong gradient of the weight: relative error", id="dC-nan"),
        pytest.param(Method(lambda *case: lambda *x: dense(*x) + 1.0), "wrong loss", id="loss"),
        (failing(ModuleNotFoundError("No module named 'quack'", name="quack")), "quack is not installed"),
        (failing(RuntimeError("\nno kernel image\nis available")), "RuntimeError: no kernel image"),
        (failing(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB")), "out of memory"),
    ],
)
def test_what_is_wrong_is_refused_a_time_and_the_rest_goes_on(method, says):
    table = {"wrong": method, "right": Method(lambda *case: dense)}
    (wrong, right), _, floor = measure(tiny_workload(), table, repeats=2)
    assert wrong.problem.startswith(says) and wrong.missing == ("installed" in says)
    assert not wrong.total.seconds and not wrong.forward.seconds
    assert len(right.total.seconds) == 2 and floor.four.median > 0


class CountingClock(Clock):
    """Remembers what it was given; the third time that it is given "c" fails."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.order = []

    def times(self, job):
        self.order.append(job())
        if self.order[-1] == "c" and self.order.count("c") == 3:
            raise RuntimeError("no more")
        return float(len(self.order)), len(self.order) / 2


def test_jobs_are_timed_in_turns_and_a_failure_ends_its_own_method_alone():
    """Catches a fixed order, a first round that is counted, and a method that is timed again after it failed."""
    rows, clock = [Row(name, ours=False) for name in "abcdefgh"], CountingClock()
    time_in_turns([Job(row, row.total, partial(str, row.name)) for row in rows], 3, clock, lambda line: None)
    rounds = ["".join(clock.order[start : start + 8]) for start in (0, 8, 16)] + ["".join(clock.order[24:])]
    assert [sorted(turn) for turn in rounds] == [list("abcdefgh")] * 3 + [list("abdefgh")]
    assert len(set(rounds)) == 4 and "abcdefgh" not in rounds
    assert {row.name: len(row.total.seconds) for row in rows} == dict.fromkeys("abcdefgh", 3) | {"c": 1}
    assert min(seconds for row in rows for seconds in row.total.seconds) == 9
    assert all(row.total.host == [seconds / 2 for seconds in row.total.seconds] for row in rows)
    assert [row.problem for row in rows if row.problem] == ["RuntimeError: no more"]


def test_a_command_prints_and_writes_what_it_measured(tmp_path, capsys, monkeypatch):
    """Catches two sizes exchanged, rounds or wrong gradients that are lost, and a part that --show does not find again."""
    table = {"torch": Method(lambda *case: dense), "wrong": planted("dC", 2.0)}
    monkeypatch.setattr(methods, "methods_of", lambda *choice: table)
    run = ["--shapes", "toy", "24x2048", "--tokens", "32", "--repeats", "2", "--device", "cpu"]
    assert heads.main([*run, "--out", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "| torch" in output and "wrong gradient" in output
    assert " ms" not in output.replace("fwd ms", "")  # a CPU's times are not printed
    cases = json.loads((tmp_path / "bench.json").read_text())["cases"]
    sizes = [(case["shape"], case["hidden_size"], case["vocab_size"]) for case in cases]
    assert sizes == [("toy", 256, 4096), ("24x2048", 24, 2048)]
    right, wrong = cases[0]["rows"]
    assert len(right["total"]["seconds"]) == 2 and wrong["total"]["seconds"] == []
    assert wrong["errors"]["d_weight"] == pytest.approx(1.0, rel=1e-2)

    show = ["--show", str(tmp_path / "bench.json")]
    assert heads.main([*show, "--columns", "dC", "total/3", "--methods", "wrong"]) == 0
    header, _, row = capsys.readouterr().out.splitlines()
    assert header.replace(" ", "") == "|errdC;/3GEMMs|toy,V4,096|24x2048,V2,048|"
    assert row.split("|")[1].strip() == "wrong" and row.count("wrong gradient") == 2
    assert heads.main([*show, "--shapes", "24x2048"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "### 24x2048, N 32, D 24, V 2,048, bfloat16"
    assert heads.main(show) == 0
    assert output.startswith(capsys.readouterr().out.rstrip())  # the same tables again
    with pytest.raises(SystemExit, match="nothing of what is asked for is in"):
        heads.main([*show, "--shapes", "8x8"])
    (tmp_path / "bench.json").write_text('{"runs": []}')
    with pytest.raises(SystemExit, match=r"holds no Results \(KeyError: 'runs'\)"):
        heads.main(show)


def test_a_file_keeps_what_was_measured(tmp_path):
    """Catches a field that comes back as a dict or a list, a NaN that is no JSON, a column that has no such number."""
    workload = tiny_workload()
    found = measure(workload, {"right": Method(lambda *case: dense), "nan": planted("dE", float("nan"))}, repeats=2)
    found = found._replace(collectives={"right": [Collective("all_reduce", 8, 1, None, 1e-3)]})
    case = Case("tiny", 64, *TINY[:2], "float32", on_gpu=False, **workload.drawn, **found._asdict())
    results = Results({"device": "CPU"}, [case])
    write_json(tmp_path / "bench.json", results)
    json.loads((tmp_path / "bench.json").read_text(), parse_constant=pytest.fail)
    again = read_json(tmp_path / "bench.json", Results)
    assert repr(again) == repr(results) and "err dE" in report.table(again.cases[0])
    right, wrong = again.cases[0].rows
    assert wrong.errors is not None and math.isnan(wrong.errors.d_hidden)
    assert right.total.host == []  # a CPU's host computes

    # As on a GPU.
    again.cases[0].on_gpu = True
    right.total.seconds, right.total.host, right.peak_bytes = [0.0435, 0.0455], [1e-3, 3e-3, 2e-3], 256 << 20
    shown, refused = (line for line in report.table(again.cases[0]).splitlines() if line.startswith(("| r", "| n")))
    assert " 44.50 (1.00) |" in shown and "| 256 |" in shown and "wrong gradient" in refused
    lines = report.summary(again.cases, ["host", "MiB"])
    assert [line.replace(" ", "") for line in lines[-2:]] == ["|right|2.00;256|", "|nan|-;-|"]


def test_a_method_is_a_row_of_the_groups_that_it_can_run_in():
    """Catches a library without a vocabulary-parallel loss that is given a shard, and a budget that a row does not say."""
    table = methods.methods_of(workspace_mib=[64, 128])
    alone, split = ({name for name, method in table.items() if method.is_for(size)} for size in (1, 2))
    ours = "cce-dist@64MiB cce-dist@128MiB cce-dist-cached cce-dist-filtered@64MiB"
    assert {*ours.split(), "torch-compile", "cce", "fla"} <= alone & split
    assert {"torch", "torch-compile-chunked", "liger", "quack", "trl", "torchtune", "mgmalek"} <= alone - split
    assert {"cce-dist-sp@64MiB", "megatron", "deepspeed"} <= split - alone
    chosen = command.choose(["cce-dist-sp", "cce-dist"], table)
    assert list(chosen) == ["cce-dist@64MiB", "cce-dist@128MiB", "cce-dist-sp@64MiB", "cce-dist-sp@128MiB"]
    with pytest.raises(SystemExit, match="unknown method tochr; choose from cce-dist"):
        command.choose(["tochr"], table)
    stages = methods.methods_of("megatron")
    assert stages["cce-dist-main-grad"].build.args[1] == {"workspace_bytes": 256 << 20}  # type: ignore[attr-defined]
    assert stages["cce-dist-default"].build.args[1] == {}  # type: ignore[attr-defined]


def test_the_hosts_time_is_that_of_the_call(monkeypatch):
    """Catches a time that has the matmuls before the job in it, or the wait for the device."""
    done = []
    event = SimpleNamespace(record=lambda: done.append("event"), elapsed_time=lambda end: 7.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: time.sleep(0.2))
    monkeypatch.setattr(torch, "mm", lambda *operands, out: time.sleep(0.01))
    clock = Clock(torch.device("cpu"))
    clock.meeting, clock.heat, clock.heated = SimpleNamespace(is_cuda=True), None, None  # type: ignore[assignment]

    def job():
        done.append("job")
        time.sleep(0.02)

    seconds, host = clock.times(job)
    assert seconds == 7e-3 and done == ["event", "job", "event"]
    assert host is not None and 0.02 <= host < 0.15


@pytest.mark.parametrize(
    ("settings", "split", "says"),
    [
        ({"auto_chunker": None}, 0, f"the auto-chunker of torch {torch.__version__} does not split this loss"),
        ({"auto_chunker": None}, 1, ""),
        ({}, 1, f"torch {torch.__version__} has no torch._inductor.config.auto_chunker"),
    ],
)
def test_the_auto_chunker_says_if_it_split_nothing(settings, split, says, monkeypatch):
    """Catches the plain compiled loss timed as the auto-chunker's."""

    def run(*operands):
        metrics.num_auto_chunking += split
        return dense(*operands)

    monkeypatch.setattr(metrics, "num_auto_chunking", 5, raising=False)
    real: Any = torch._inductor.config  # pyright: ignore[reportAttributeAccessIssue]

    class Config(SimpleNamespace):
        def __getattr__(self, name):
            if name == "auto_chunker":
                raise AttributeError(name)
            return getattr(real, name)

    monkeypatch.setattr(torch._inductor, "config", Config(**settings))
    monkeypatch.setattr(torch, "compile", lambda function, **options: run)
    (row,), _, _ = measure(tiny_workload(), {"chunked": methods.methods_of()["torch-compile-chunked"]}, repeats=1)
    assert row.problem == says and row.missing == bool(says)


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


def test_a_row_is_what_its_worst_rank_says_and_a_collective_what_the_rank_that_waits_least():
    """Catches an error that only rank 0 looks for."""
    right = Row("x", False, errors=Errors(1e-3, 2e-3, 3e-3, 4e-3), peak_bytes=10)
    wrong = Row("x", False, problem="wrong gradient", errors=Errors(1e-3, 0.5, 1e-4, 4e-3), peak_bytes=20)
    row = worst([right, wrong])
    assert row.problem == "wrong gradient" and row.peak_bytes == 20
    assert row.errors == Errors(1e-3, 0.5, 3e-3, 4e-3)
    ranks = [[Collective("all_reduce", 8, 1, seconds, seconds / 2)] for seconds in (3e-3, 1e-3, 2e-3)]
    other = Collective("all_reduce", 4, 1)
    ranks = [[*ranks[0], other], [other, *ranks[1]], [*ranks[2], other]]
    assert least_waiting(ranks) == [Collective("all_reduce", 8, 1, 1e-3, 5e-4), other]


def test_exposed_is_what_no_computation_covers():
    computing = _union([(10, 20), (15, 30), (50, 60)])
    assert computing == [(10, 30), (50, 60)]
    seconds, exposed = _times([(5, 25), (28, 55)], computing)
    assert seconds is not None and exposed is not None
    assert seconds == pytest.approx(47e-9) and exposed == pytest.approx((5 + 20) * 1e-9)
    assert _times([(5, 25), None], computing) == (None, None)


N, D, V = 24, 16, 70


@pytest.mark.parametrize("name", [*LOG_PROBS, *KEPT_IDS, *KINDS, *OBJECTIVES])
def test_every_method_is_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an upstream gradient that one method forgets, values in another order, chunks of the truth in a wrong place."""
    monkeypatch.setattr(problems, "REFERENCE_CHUNK_BYTES", 8 * V * 10)  # 10 tokens
    monkeypatch.setitem(LOG_PROBS, "scores", (1, True, 5, False))
    monkeypatch.setitem(KEPT_IDS, "kept-512", (33, 0))
    makers = {tuple(LOG_PROBS): tasks.scores_task, tuple(KEPT_IDS): tasks.kept_task, KINDS: tasks.divergence_task}
    task = next((make for names, make in makers.items() if name in names), tasks.objective_task)(name)
    problem = task.problem(make_workload(HeadShape(D, V), N, dtype=torch.float32))
    truth = problems.reference_of(problem)
    if name in LOG_PROBS:
        assert truth.value.shape == (N, sum(LOG_PROBS[name][:3]))  # ids, the entropy, the largest logits
    rows = task.methods([256])
    assert list(rows) == ["cce-dist", "cce-dist-default", "cce-dist-cached", "torch", "torch-compile"]
    del rows["torch-compile"]
    for method in rows.values():
        function = method.build(VocabShard(0, V, V), problem.tokens[0])
        expected = truth if problem.grad else truth[:1]
        found = [x.double() for x in problems.step(function, problem)]
        torch.testing.assert_close(found, [*expected], atol=1e-5, rtol=1e-4)


def test_a_task_without_gradients_is_shown_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches steps that are timed without gradients, and a file that --show cannot read."""
    options = ["--repeats", "1", "--methods", "cce-dist", "--dtype", "float32", "--device", "cpu"]
    shape = ["--shapes", "toy", "--tokens", "32", "--out", str(tmp_path)]
    assert heads.main(["--log-probs", "scores", *shape, *options]) == 0
    printed = capsys.readouterr().out
    assert "| cce-dist " in printed and "/1 GEMM" in printed and "wrong" not in printed
    (row,) = read_json(tmp_path / "bench.json", Results).cases[0].rows
    assert len(row.forward.seconds) == 1 and not row.total.seconds
    assert heads.main(["--show", str(tmp_path / "bench.json"), "--columns", "fwd/1", "total/3", "dE"]) == 0
    assert "/1 GEMM" in capsys.readouterr().out
