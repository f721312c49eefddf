"""Two ranks that are asked to stop, killed, hung, started twice or unlike: nothing is lost, nobody is left."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic import rendezvous

pytest.importorskip("tokenizers")

import lose_a_rank
from commands import Command, Program, descendants, environments_of, free_port, has_taken, is_running, kill
from toy_runs import TEXT, history, newest

from cce_dist.tools import cli
from cce_dist.tools.pretrain import exits, launch, log, torchrun

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds processes in /proc"),
    pytest.mark.slow,
    pytest.mark.xdist_group("preemption"),
]
AGAIN, HOPELESS = exits.AGAIN, exits.HOPELESS
RUN = ["pretrain", "--preset", "toy", "--device", "cpu", *TEXT, "--tp", "2", "--batch-size", "32", "--steps", "12"]
RUN += ["--warmup", "4", "--eval-every", "6", "--eval-batches", "2", "--checkpoint-every", "5", "--timeout", "60"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TORCHRUN += ["--max-restarts", "3", "-m", "cce_dist"]


@pytest.fixture(scope="module")
def run(cache: Path) -> list[str]:
    """The arguments of a run of two ranks, but for ``--out``."""
    return [*RUN, "--cache", str(cache)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, run: list[str]) -> list[tuple]:
    out = tmp_path_factory.mktemp("whole")
    go_on(run, out)
    return history(out)


def go_on(run: list[str], out: Path) -> None:
    with Command([*run, "--out", str(out)], out / "log") as command:
        assert command.wait() == 0, command.text


@pytest.mark.parametrize(("number", "whom"), [(signal.SIGUSR1, "all"), (signal.SIGHUP, "last-rank")])
def test_a_signal_stores_the_step_and_costs_no_bit(
    tmp_path, run: list[str], whole: list[tuple], number: signal.Signals, whom: str
) -> None:
    """Catches ranks that stop after different steps, a checkpoint that is not written, and two signals where one was meant."""
    with Command([*run, "--out", str(tmp_path)], tmp_path / "log") as command:
        command.wait_until(has_taken(tmp_path, 6))
        everyone = [command.pid, *command.ranks()]
        for pid in everyone if whom == "all" else everyone[-1:]:
            kill(pid, number)
        assert command.wait() == AGAIN, command.text
    said = [line for line in command.lines if "cce-dist pretrain" in line]
    assert len(said) == 1 and "after step" in said[0] and "Traceback" not in command.text
    taken = history(tmp_path)
    assert newest(tmp_path) == taken[-1][0] >= 6 and newest(tmp_path) < 12 and taken == whole[: len(taken)]
    if whom == "all":
        go_on(run, tmp_path)
        assert history(tmp_path) == whole


@pytest.mark.sweep
def test_a_run_that_lost_a_rank_ends_in_the_bits_of_an_undisturbed_one(capsys) -> None:
    """What ``launch/measure_group.sh kill`` does on GPUs."""
    assert lose_a_rank.main(["--ranks", "2", "--then", "1"]) == 0
    assert "started again in the same bits" in capsys.readouterr().out


def test_a_second_signal_ends_at_once(tmp_path, run: list[str]) -> None:
    """A rank that hangs keeps the others from agreeing: the second signal does not wait for it."""
    with Command([*run, "--out", str(tmp_path)], tmp_path / "log") as command:
        command.wait_until(has_taken(tmp_path, 2))
        kill(command.ranks()[1], signal.SIGSTOP)
        kill(command.pid, signal.SIGTERM)
        time.sleep(2.5)
        assert is_running(command.pid)
        start = time.monotonic()
        kill(command.pid, signal.SIGTERM)
        assert command.wait(20) == 128 + signal.SIGTERM and time.monotonic() - start < 10


def test_a_signal_that_was_heard_inside_is_ignored_outside() -> None:
    """Catches Python's own handler, which ends a run that has stored its step with the code of a crash."""

    def rank() -> None:
        with (
            exits.signal_handlers(exits.SIGNALS, exits.exit_before_training),
            exits.signal_handlers(exits.SIGNALS, lambda number: None),
        ):
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        os._exit(AGAIN)

    assert in_child(rank) == AGAIN


def test_a_signal_ends_a_rank_that_waits_in_cpp(monkeypatch) -> None:
    """Before the first step a rank may wait for one that has left already, where no Python code runs."""

    def wait(recipe: object) -> int:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        store.wait(["never"], timedelta(seconds=30))
        return 0

    monkeypatch.setattr(launch, "run_rank", wait)
    start = time.monotonic()
    code = in_child(lambda: launch._rank_process(None, os.getpid()))  # pyright: ignore[reportArgumentType]
    assert code == -signal.SIGTERM and time.monotonic() - start < 20


def test_a_signal_ends_a_run_of_one_rank_before_its_first_step(monkeypatch, capfd) -> None:
    """Catches a code that a scheduler takes for a failure."""
    monkeypatch.setattr(launch, "join", lambda recipe: os.kill(os.getpid(), signal.SIGUSR1))
    assert in_child(lambda: os._exit(launch.run_rank(None))) == AGAIN  # pyright: ignore[reportArgumentType]
    assert "stopped by SIGUSR1 before the first step" in capfd.readouterr().err


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_second_signal_within_a_second_is_the_first_one(tmp_path, run: list[str], ranks: str) -> None:
    """Catches a process that says what happened and meanwhile dies of the same wish, which schedulers pass on twice."""
    with Command([*run, "--tp", ranks, "--out", str(tmp_path)], tmp_path / "log") as command:
        command.wait_until(has_taken(tmp_path, 3))
        kill(command.pid, signal.SIGINT)
        begun = time.monotonic()
        while is_running(command.pid) and time.monotonic() < begun + 1:
            time.sleep(0.001)
            if len(command.lines) > 1 or "stopped by" in command.text or random.random() < 0.01:
                kill(command.pid, signal.SIGINT)
        assert command.wait() == AGAIN, command.text
    assert newest(tmp_path) == history(tmp_path)[-1][0] >= 3


def test_a_rank_whose_agent_has_ended_meanwhile_does_not_begin(monkeypatch) -> None:
    """Catches an agent that dies before its rank has asked the system to die with it."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    monkeypatch.setenv(exits.AGENT, str(os.getpid()))
    assert in_child(launch._end_with_agent) == 0
    monkeypatch.setenv(exits.AGENT, "1")
    assert in_child(launch._end_with_agent) == exits.LOST


def test_ranks_start_with_signals_blocked(monkeypatch) -> None:
    """Catches multiprocessing's tracker, which unblocks SIGINT as it starts: Ctrl-C would interrupt the imports of ranks."""
    tracker = resource_tracker.ResourceTracker()
    monkeypatch.setattr(resource_tracker, "ensure_running", tracker.ensure_running)

    def start_workers(agent: object, worker_group: object) -> set[int]:
        tracker.ensure_running()  # as multiprocessing does before it spawns
        return set(signal.pthread_sigmask(signal.SIG_BLOCK, ()))

    monkeypatch.setattr(torchrun.LocalElasticAgent, "_start_workers", start_workers)
    agent = object.__new__(torchrun._Agent)
    assert set(exits.SIGNALS) <= agent._start_workers(None)  # pyright: ignore[reportArgumentType, reportOperatorIssue]
    tracker._stop()  # pyright: ignore[reportAttributeAccessIssue]


def test_progress_bars_leak_no_semaphore() -> None:
    """Catches the warning of multiprocessing's tracker after Ctrl-C: ranks leave by os._exit, which releases no semaphore."""
    assert isinstance(log.tqdm.get_lock(), type(threading.RLock()))


def in_child(act: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            act()
        except BaseException:
            os._exit(99)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.timeout(200)
def test_torchrun_too_lets_the_ranks_store_their_step(tmp_path, run: list[str], whole: list[tuple]) -> None:
    with Program([*TORCHRUN, *run, "--out", str(tmp_path)], tmp_path / "log") as program:
        program.wait_until(has_taken(tmp_path, 3))
        kill(program.pid, signal.SIGTERM)
        assert program.wait(60) != 0
    taken = history(tmp_path)
    assert newest(tmp_path) == taken[-1][0] >= 3 and taken == whole[: len(taken)]


@pytest.mark.timeout(120)
def test_torchrun_too_does_not_restart_what_cannot_be_mended(tmp_path, run: list[str]) -> None:
    argv = [*TORCHRUN, *run, "--out", str(tmp_path), "--batch-size", "9", "--accumulate", "2"]
    with Program(argv, tmp_path / "log") as program:
        assert program.wait(100) != 0
    assert program.text.count("batch size 9 cannot be split 2 ways") == 1


@pytest.mark.timeout(280)
def test_a_killed_node_that_comes_back_costs_no_bit(tmp_path, run: list[str], whole: list[tuple]) -> None:
    """Two nodes of one rank each, started as launch/pretrain.sh does; they meet on the loopback interface."""
    port = free_port()
    settings = "keep_alive_interval=1,keep_alive_max_attempt=8"  # seconds until a silent node is given up
    meeting = {"NNODES": "2", "NPROC_PER_NODE": "1", "RDZV": f"127.0.0.1:{port}", "RDZV_CONF": settings}
    script = Path(__file__).parents[2] / "launch" / "pretrain.sh"
    python = tmp_path / "python"
    python.write_text('#!/usr/bin/env bash\nenv -0\nprintf "%s\\0" "$@"\n')
    python.chmod(0o755)
    line = [str(script), *run[1:], "--out", str(tmp_path)]
    said = subprocess.run(
        line, env=os.environ | meeting | {"PYTHON": str(python)}, capture_output=True, text=True, check=True
    )
    words = said.stdout.split("\0")[:-1]
    start = words.index("-m")
    environment = dict(word.split("=", 1) for word in words[:start])
    argv = words[start + 2 :]
    assert words[start + 1] == "cce_dist" and argv[0] == "pretrain"

    def node(name: str) -> Program:
        return stack.enter_context(Command(argv, tmp_path / name, environment=environment))

    def is_met_at() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    with ExitStack() as stack:
        first = node("node0.log")
        first.wait_until(is_met_at)  # or the second would be the one where they meet
        second = node("node1.log")
        first.wait_until(has_taken(tmp_path, 7))
        second.end()
        for each in (first, node("node1.log")):
            assert each.wait(120) == 0, each.text
    assert "resumed after step 5" in first.text
    assert history(tmp_path) == whole


def test_a_node_leaves_with_its_last_sign_of_life() -> None:
    """Catches a thread that waits for the store of another node when the interpreter ends, which aborts the agent."""
    where = rendezvous.RendezvousParameters("c10d", f"127.0.0.1:{free_port()}", "id", 1, 1, keep_alive_interval="1")
    sending, handler = threading.Event(), rendezvous.rendezvous_handler_registry.create_handler(where)
    handler.next_rendezvous()
    handler._op_executor.run = lambda *_: (sending.set(), time.sleep(1))  # pyright: ignore[reportAttributeAccessIssue]
    assert sending.wait(10)
    (sender,) = [thread for thread in threading.enumerate() if thread.name.startswith("RendezvousKeepAlive")]
    torchrun._leave(handler)
    assert not sender.is_alive()


def test_a_hung_rank_ends_in_a_time_out(tmp_path, run: list[str]) -> None:
    with Command([*run, "--timeout", "8", "--out", str(tmp_path)], tmp_path / "log") as command:
        command.wait_until(has_taken(tmp_path, 2))
        kill(hung := command.ranks()[1], signal.SIGSTOP)
        command.wait_until(lambda: "time-out" in command.text)
        kill(hung, signal.SIGKILL)  # the agent would do it, half a minute later
        assert command.wait() == HOPELESS
    [line] = [line for line in command.lines if "time-out" in line]
    assert line.startswith("cce-dist pretrain: rank 0: time-out in a collective: ")


def test_a_folder_has_one_run_and_a_lost_rank_is_restarted(tmp_path, run: list[str], whole: list[tuple]) -> None:
    """Catches also the rendezvous of torch, which listens on every address, and gloo on the address of the host's name."""
    argv = [*run, "--out", str(tmp_path), "--max-restarts", "1"]
    with ExitStack() as stack:
        first = stack.enter_context(Command(argv, tmp_path / "log"))
        first.wait_until(has_taken(tmp_path, 6))
        for rank in (ranks := first.ranks()):
            kill(rank, signal.SIGSTOP)  # so that it does not end before its time
        addresses = listening({first.pid, *descendants(first.pid)})
        assert addresses and addresses <= {"0100007F", "0" * 24 + "01000000"}, f"not loopback alone: {addresses}"
        holder = json.loads((tmp_path / "lock").read_text())["pid"]
        assert holder in ranks
        second = stack.enter_context(Command(argv, tmp_path / "second"))
        assert second.wait() == HOPELESS, f"a second run in the folder: {second.text}"
        assert len(second.lines) == 1 and f"process {holder} on {socket.gethostname()}" in second.text
        kill(ranks[1], signal.SIGKILL)
        kill(ranks[0], signal.SIGCONT)
        assert first.wait() == 0, f"the rank that was lost: {first.text}"
    assert "resumed after step 5" in first.text and history(tmp_path) == whole


def test_ranks_die_with_their_agent(tmp_path, run: list[str]) -> None:
    with Command([*run, "--out", str(tmp_path)], tmp_path / "log") as command:
        command.wait_until(has_taken(tmp_path, 6))
        for rank in command.ranks():
            kill(rank, signal.SIGSTOP)  # so that it cannot end by itself, because its store has gone
        kill(command.pid, signal.SIGKILL)
        command.wait()  # which looks for anybody left behind


def test_ranks_that_were_started_unlike_say_how(tmp_path, run: list[str]) -> None:
    """Two ranks of a launcher of another make; no step is taken."""
    others = ["--lr", "0.5"], ["--lr", "0.25", "--seed", "3"]
    with ExitStack() as stack:
        commands = []
        for more, environment in zip(others, environments_of(2), strict=True):
            argv = [*run, "--out", f"{tmp_path}/out", *more]
            command = Command(argv, tmp_path / f"log{environment['RANK']}", environment=environment)
            commands.append(stack.enter_context(command))
        for command in commands:
            assert command.wait() == HOPELESS, command.text
    [line] = commands[0].lines
    assert "rank 1 has seed 3 in place of 0, lr 0.25 in place of 0.5" in line
    assert not list(tmp_path.rglob("metrics.jsonl")) and not list(tmp_path.rglob("step-*"))


def test_what_a_restart_cannot_mend_is_not_restarted(tmp_path, run: list[str]) -> None:
    argv = [*run, "--out", str(tmp_path / "out"), "--max-restarts", "5", "--lr", "1e38"]
    with Command(argv, tmp_path / "log") as command:
        assert command.wait() == HOPELESS, command.text
    assert len([line for line in command.lines if "cce-dist pretrain" in line]) == 1 and "not finite" in command.text


REQUEUED = {  # environment of the first run and of the second, and whether the second goes on
    "same run": ({"RUN_ID": "a"}, {"RUN_ID": "a"}, True),
    "another run": ({"RUN_ID": "a"}, {"RUN_ID": "b"}, False),
    "requeued": ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, True),
    "same allocation": ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7"}, False),
    "by hand": ({}, {}, False),
}


@pytest.mark.parametrize("case", REQUEUED)
def test_a_requeued_run_goes_on_in_spite_of_no_resume(tmp_path, run: list[str], monkeypatch, capsys, case: str) -> None:
    argv = [*run, "--tp", "1", "--batch-size", "2", "--out", str(tmp_path), "--no-resume", "--steps"]
    first, second, goes_on = REQUEUED[case]
    for steps, environment in (("5", first), ("6", second)):
        for name in ("RUN_ID", "SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert cli.main([*argv, steps]) == 0
    assert ("resumed after step 5" in capsys.readouterr().out) is goes_on


def test_ranks_of_one_machine_talk_over_loopback(tmp_path, run: list[str], monkeypatch) -> None:
    """Catches gloo and NCCL at the address of the host's name, on a machine whose name is none of loopback too."""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(torchrun, "run", lambda *_: 0)
    assert cli.main([*run, "--out", str(tmp_path)]) == 0
    assert environment["GLOO_SOCKET_IFNAME"] == environment["NCCL_SOCKET_IFNAME"] == "lo"


def listening(pids: set[int]) -> set[str]:
    """The addresses, in hexadecimal, at which processes listen."""
    sockets = {os.readlink(f"/proc/{pid}/fd/{each}") for pid in pids for each in os.listdir(f"/proc/{pid}/fd")}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.add(fields[1].split(":")[0])
    return found
