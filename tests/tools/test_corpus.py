"""From a folder of files to ids: linear time, bounded memory, a cache that is checked and shared, and odd files in one line."""

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tokenizers")

from commands import Command, kill
from toy_runs import one_line, pretrain

from cce_dist.tools.pretrain import data
from cce_dist.tools.pretrain.data import Corpus, CorpusError, prepare

ODD_NAME = os.fsdecode(b"odd\xff.txt")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in "abcd":
        (folder / f"{name}.txt").write_text(f"{name} stands here, and here.\r\n\n  It is a text.\n" * 50)
    return folder


def ids(folder: Path) -> list[int]:
    whole = Corpus(folder)
    return [*whole.train.tolist(), *whole.held_out.tolist()]


def tokenizer_of(folder: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def decode(folder: Path, tokens: list[int]) -> str:
    return tokenizer_of(folder).decode(tokens, skip_special_tokens=False)


def test_a_line_without_spaces_takes_linear_time(tmp_path, texts: Path) -> None:
    """Took a minute for 400 KB."""
    rng = np.random.default_rng(0)
    line = rng.choice(np.frombuffer(b"abcdefgh", dtype=np.uint8), 400_000).tobytes()
    (texts / "line.txt").write_bytes(line)
    start = time.monotonic()
    folder = prepare(texts, "*.txt", 384, tmp_path / "cache")
    assert time.monotonic() - start < 20
    assert line.decode() in decode(folder, ids(folder))
    # The time for one word grows faster than its length.
    words = tokenizer_of(folder).pre_tokenizer.pre_tokenize_str(line.decode())
    assert max(len(word) for word, _ in words) <= data.WORD


@pytest.mark.slow
def test_memory_does_not_grow_with_a_file(tmp_path, texts: Path) -> None:
    """A file of 4 MiB took 1.1 GB, one of 2 MiB half as much."""
    (texts / "large.txt").write_text("words of a line, one after another\n" * (2 << 20 >> 5))
    code = """import resource, sys; from pathlib import Path; from cce_dist.tools.pretrain import data; import tokenizers
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
data.prepare(Path(sys.argv[1]), '*.txt', 384, Path(sys.argv[2]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"""
    argv = [sys.executable, "-c", code, texts, tmp_path / "cache"]
    taken = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert int(taken) < 200 << 10  # KiB


def test_pieces_are_encoded_as_the_whole_is(tmp_path, texts: Path, monkeypatch) -> None:
    """Catches a cut inside a word or a run of spaces, and a newline that Python reads otherwise."""
    (texts / "code.txt").write_text("def f(x):\n\n    return x  \n\n\n# done\r\nnext = 'é'\n" * 200)
    whole = prepare(texts, "*.txt", 300, tmp_path / "whole")
    monkeypatch.setattr(data, "PIECE", 64)
    monkeypatch.setattr(data, "BATCH", 256)
    pieces = prepare(texts, "*.txt", 300, tmp_path / "pieces")
    assert ids(whole) == ids(pieces)
    assert "\r" not in decode(whole, ids(whole))


def test_tokenizing_can_be_stopped(tmp_path, texts: Path) -> None:
    rng = np.random.default_rng(0)
    words = [bytes(rng.integers(97, 123, 8, dtype=np.uint8)).decode() for _ in range(60_000)]
    (texts / "words.txt").write_text("\n".join(words * 4))
    argv = ["pretrain", "--preset", "toy", "--vocab-size", "30000", "--device", "cpu", "--tp", "2"]
    for option, folder in (("--corpus", "texts"), ("--cache", "cache"), ("--out", "out")):
        argv += [option, str(tmp_path / folder)]
    with Command(argv, tmp_path / "log") as command:
        command.wait_until(lambda: any((tmp_path / "cache").glob("bpe-*.[0-9]*")))
        time.sleep(0.5)
        start = time.monotonic()
        kill(command.pid, signal.SIGINT)
        assert command.wait() == 75 and time.monotonic() - start < 15, command.text
    assert len(command.lines) == 1 and "stopped by SIGINT before the first step" in command.text
    assert not list((tmp_path / "cache").glob("*/meta.json"))  # the next start deletes what is half written


def test_a_touch_changes_no_key_and_a_change_does(tmp_path, texts: Path) -> None:
    cache = tmp_path / "cache"
    first = prepare(texts, "*.txt", 300, cache)
    os.utime(texts / "a.txt", (1, 1))
    assert prepare(texts, "*.txt", 300, cache) == first
    (texts / "a.txt").write_text((texts / "a.txt").read_text().replace("text", "next"))
    assert prepare(texts, "*.txt", 300, cache) != first


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda ids: os.truncate(ids, ids.stat().st_size - 2), id="cut"),
        pytest.param(lambda ids: ids.write_bytes(bytes(ids.stat().st_size)), id="zeros"),
        pytest.param(lambda ids: ids.with_name("meta.json").write_text("{}"), id="meta"),
    ],
)
def test_a_damaged_cache_is_made_anew(tmp_path, texts: Path, capsys, spoil: Callable[[Path], None]) -> None:
    folder = prepare(texts, "*.txt", 300, tmp_path / "cache")
    before, left = ids(folder), folder.with_name(f"{folder.name}.123")
    left.mkdir()  # by a process that was killed
    spoil(folder / "ids.bin")
    assert prepare(texts, "*.txt", 300, tmp_path / "cache") == folder and ids(folder) == before and not left.exists()
    assert "is damaged, and made anew" in capsys.readouterr().err


def test_a_cache_serves_all_users(tmp_path, texts: Path) -> None:
    """Made by one user, read by another: folders that mkdtemp closes, and locks that only their maker may take."""
    cache = tmp_path / "cache"
    folder = prepare(texts, "*.txt", 300, cache)
    assert stat.S_IMODE(folder.stat().st_mode) & 0o055 == 0o055
    lock = folder.with_name(folder.name + ".lock")
    assert stat.S_IMODE(lock.stat().st_mode) == 0o666
    if os.geteuid() != 0:
        return
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_mode & 0o005 != 0o005:
            path.chmod(path.stat().st_mode | 0o055)
    lock.chmod(0o644)
    os.utime(texts / "a.txt", (1, 1))  # nobody has seen this state: it cannot be noted by the other user
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        os._exit(0 if prepare(texts, "*.txt", 300, cache) == folder else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        pytest.param(lambda path: os.mkfifo(path), "odd.txt is no regular file", id="fifo"),
        pytest.param(lambda path: path.symlink_to("/dev/zero"), "odd.txt is no regular file", id="endless"),
        pytest.param(lambda path: path.symlink_to("nowhere"), "odd.txt: No such file", id="dangling-link"),
        pytest.param(lambda path: path.write_bytes(b"x" * 300_000 + b"\xe2\x82"), "unexpected end", id="cut-character"),
        pytest.param(lambda path: path.with_name(ODD_NAME).write_bytes(b"\xff"), "not UTF-8", id="name-and-text"),
    ],
)
def test_an_odd_file_is_one_line(tmp_path, texts: Path, capfd, spoil: Callable[[Path], None], reason: str) -> None:
    spoil(texts / "odd.txt")
    assert pretrain(tmp_path / "cache", tmp_path / "out", "--corpus", str(texts), "--pattern", "*.txt") == 1
    assert reason in one_line(capfd)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.suffix != ".lock"]


def test_an_unreadable_folder_is_told(texts: Path, tmp_path, monkeypatch) -> None:
    """Root reads everything, so the system's refusal is played."""
    (texts / "closed").mkdir()
    scandir = os.scandir

    def refuse(path):
        if os.fspath(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(CorpusError, match=r"closed: Permission denied"):
        prepare(texts, "*.txt", 300, tmp_path / "cache")


@pytest.mark.parametrize(
    ("name", "text"), [("a.txt", "before<eos>after"), (ODD_NAME, "good text")], ids=["eos", "name"]
)
def test_odd_texts_and_names_are_kept(tmp_path, texts: Path, name: str, text: str) -> None:
    """Catches documents that end where somebody wrote <eos>."""
    (texts / name).write_text(text)
    folder = prepare(texts, "*.txt", 300, tmp_path / "cache")
    assert ids(folder).count(data.EOS) == len(os.listdir(texts)) and text in decode(folder, ids(folder))


@pytest.mark.parametrize("change", [4, -4], ids=["grows", "shrinks"])
def test_a_file_that_changes_is_told(tmp_path, texts: Path, monkeypatch, change: int) -> None:
    found = data._find(texts, "*.txt", None)
    os.truncate(texts / "a.txt", (texts / "a.txt").stat().st_size + change)
    monkeypatch.setattr(data, "_find", lambda *_: found)
    with pytest.raises(CorpusError, match=r"a\.txt changed while it was read"):
        prepare(texts, "*.txt", 300, tmp_path / "cache")
