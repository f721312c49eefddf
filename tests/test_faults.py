"""A run survives faults, or says in one line why not: killed and hung ranks, full disks, unreadable files."""

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers")

from commands import Command, descendants, has_taken, kill

from cce_dist import cli
from cce_dist.pretrain import data, log, torchrun

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("faults")]

PRETRAIN = Path(__file__).parent.parent / "launch" / "pretrain.sh"
CORPUS = Path(sysconfig.get_path("stdlib")) / "email"
TOY = ["pretrain", "--preset", "toy", "--device", "cpu", "--warmup", "4", "--eval-batches", "2"]
# Steps of a tenth of a second or more, so that a signal meets one half done.
LONG = ["--batch-size", "64", "--steps", "24", "--eval-every", "8", "--checkpoint-every", "8"]
SHORT = ["--batch-size", "8", "--steps", "8", "--eval-every", "4", "--checkpoint-every", "4", "--tp", "1"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return ["--corpus", str(CORPUS), "--pattern", "*.py", "--cache", str(tmp_path_factory.mktemp("cache"))]


def records(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses(out: Path) -> list[tuple[int, str, float]]:
    return [(record["step"], record["split"], record["loss"]) for record in records(out)]


class Torchrun:
    """Two ranks under torchrun, in a process group of their own that ``stop`` ends whatever happened to them."""

    def __init__(self, output: Path, max_restarts: int, argv: list[str]) -> None:
        self.output = output
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["--max-restarts", str(max_restarts), "-m", "cce_dist", *argv]
        with open(output, "w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)

    def wait_until(self, happened: Callable[[], bool]) -> None:
        while not happened():
            assert self.process.poll() is None, self.output.read_text()
            time.sleep(0.01)

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGCONT)
            os.killpg(self.process.pid, signal.SIGTERM)
        self.process.wait(60)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, corpus: list[str]) -> Path:
    """A run of two ranks that nothing happens to."""
    out = tmp_path_factory.mktemp("whole")
    with Command([*TOY, *LONG, *corpus, "--tp", "2", "--out", str(out)], out / "log") as command:
        assert command.wait() == 0, command.text
    return out


class Node:
    """One of two nodes of one rank each, started by launch/pretrain.sh; they meet on the loopback interface."""

    def __init__(self, output: Path, port: int, argv: list[str]) -> None:
        self.output, self.port = output, port
        meeting = {"NNODES": "2", "NPROC_PER_NODE": "1", "RDZV": f"127.0.0.1:{port}"}
        meeting["RDZV_CONF"] = (
            "keep_alive_interval=1,keep_alive_max_attempt=8"  # seconds until a silent node is given up
        )
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        with open(output, "a") as file:
            self.process = subprocess.Popen(
                [PRETRAIN, *argv], env={**os.environ, **meeting, "PATH": path}, stdout=file, stderr=file
            )

    def is_met_at(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True

    def wait_until(self, happened: Callable[[], bool]) -> None:
        while not happened():
            assert self.process.poll() is None, self.output.read_text()
            time.sleep(0.01)

    def kill(self) -> None:
        """End torchrun and its ranks at once, as a power failure does."""
        for pid in [*reversed(list(descendants(self.process.pid))), self.process.pid]:
            kill(pid, signal.SIGKILL)
        self.process.wait(60)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds a node's processes in /proc")
@pytest.mark.timeout(280)
def test_a_killed_node_that_comes_back_costs_no_bit(tmp_path: Path, corpus: list[str], whole: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = [port, [*TOY[1:], *LONG, *corpus, "--tp", "2", "--out", str(tmp_path)]]
    nodes = [Node(tmp_path / "node0.log", *argv)]
    try:
        nodes[0].wait_until(nodes[0].is_met_at)  # or the second would be the one where they meet
        nodes.append(Node(tmp_path / "node1.log", *argv))
        nodes[0].wait_until(has_taken(tmp_path, 11))
        nodes[1].kill()
        nodes.append(Node(tmp_path / "node1.log", *argv))
        for node in (nodes[0], nodes[2]):
            assert node.process.wait(120) == 0, node.output.read_text()
    finally:
        for node in nodes:
            if node.process.poll() is None:
                node.kill()
    assert "resumed after step 8" in nodes[0].output.read_text()
    assert losses(tmp_path) == losses(whole)


def test_a_node_leaves_with_its_last_sign_of_life() -> None:
    """Catches a thread that waits for the store of another node when the interpreter ends, which aborts the agent."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{free.getsockname()[1]}"
    meeting, sending = torchrun.Meeting(1, place, "id", {"keep_alive_interval": "1"}), threading.Event()
    handler: Any = torchrun._rendezvous(meeting)
    handler.next_rendezvous()
    handler._op_executor.run = lambda *_: (sending.set(), time.sleep(1))
    assert sending.wait(10)
    (sender,) = [thread for thread in threading.enumerate() if thread.name.startswith("RendezvousKeepAlive")]
    torchrun._leave(handler)
    assert not sender.is_alive()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds a rank's process in /proc")
def test_a_hung_rank_ends_in_a_time_out(tmp_path: Path, corpus: list[str]) -> None:
    argv = [*TOY, *LONG, *corpus, "--tp", "2", "--timeout", "12", "--out", str(tmp_path)]
    with Command(argv, tmp_path / "log") as command:
        command.wait_until(has_taken(tmp_path, 2))
        kill(hung := command.ranks()[1], signal.SIGSTOP)
        command.wait_until(lambda: "time-out" in command.text)
        kill(hung, signal.SIGKILL)  # the agent would do it, half a minute later
        assert command.wait() == 1
    [line] = [line for line in command.lines if "time-out" in line]
    assert line.startswith("cce-dist pretrain: rank 0: time-out in a collective: ")


@contextlib.contextmanager
def no_file_beyond(num_bytes: int) -> Iterator[None]:
    """Make writes past ``num_bytes`` of any file fail, as those to a full disk do."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_checkpoint_that_finds_the_disk_full_loses_nothing(
    tmp_path: Path, corpus: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*TOY, *SHORT, *corpus]
    whole, filled = tmp_path / "whole", tmp_path / "filled"
    assert cli.main([*argv, "--out", str(whole)]) == 0
    assert cli.main([*argv, "--out", str(filled)]) == 0
    (filled / "checkpoints" / "latest").write_text("step-00000004\n")
    capsys.readouterr()

    with no_file_beyond(16 << 10):  # metrics fit, a checkpoint does not
        code = cli.main([*argv, "--out", str(filled)])
    [line] = capsys.readouterr().err.splitlines()
    assert code == 1
    assert "cannot write checkpoint" in line and "File too large" in line
    assert (filled / "checkpoints" / "latest").read_text() == "step-00000004\n"
    assert not list((filled / "checkpoints").glob("*.tmp"))

    assert cli.main([*argv, "--out", str(filled)]) == 0
    assert losses(filled) == losses(whole)


def test_metrics_that_find_the_disk_full_are_one_line(
    tmp_path: Path, corpus: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    data.prepare(CORPUS, "*.py", 384, Path(corpus[-1]))
    with no_file_beyond(420):
        code = cli.main([*TOY, *SHORT, *corpus, "--out", str(tmp_path)])
    [line] = capsys.readouterr().err.splitlines()
    assert code == 1
    assert "metrics.jsonl" in line
    assert [record["step"] for record in log.read(tmp_path / "metrics.jsonl")] == [1, 2]  # 160 to 185 bytes each


def test_a_corpus_that_finds_the_disk_full_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*TOY, *SHORT, "--corpus", str(CORPUS), "--pattern", "*.py", "--cache", str(tmp_path / "cache")]
    with no_file_beyond(16 << 10):
        code = cli.main([*argv, "--out", str(tmp_path / "out")])
    [line] = capsys.readouterr().err.splitlines()
    assert code == 1
    assert "cannot write the tokenized corpus" in line and "File too large" in line
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.suffix != ".lock"]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        pytest.param(lambda path: path.symlink_to("nowhere"), "No such file", id="dangling-link"),
        pytest.param(lambda path: path.write_bytes(b"text \xff"), "not UTF-8 text", id="not-text"),
    ],
)
def test_an_unreadable_file_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], None], reason: str
) -> None:
    texts, cache = tmp_path / "texts", tmp_path / "cache"
    texts.mkdir()
    (texts / "good.txt").write_text("good " * 100)
    spoil(texts / "bad.txt")
    argv = [*TOY, *SHORT, "--corpus", str(texts), "--cache", str(cache), "--out", str(tmp_path / "out")]
    assert cli.main(argv) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "bad.txt" in line and reason in line
    assert not [path for path in cache.rglob("*") if path.suffix != ".lock"]
