"""A folder of text files becomes a file of token ids, once: byte-level BPE, kept in a cache that many may share.

Documents stand one after another, each closed by the id EOS, in an order drawn from their names. The cache keys a corpus by
names and content. What is in the cache is verified before it is used.

Text is read and encoded in pieces, so that memory does not grow with a file. A piece ends where the tokenizer's own pattern
ends a word, so the ids are those of the whole text. (Text without such a place for ``PIECE`` characters is cut anyway.)
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import stat
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from cce_dist.pretrain import durable
from cce_dist.pretrain.exits import say

EOS = 0
LAYOUT = 2  # version of a cache folder; raise it when its content changes
PIECE, BATCH = 1 << 15, 1 << 18  # characters
WORD = 256  # letters, or spaces, in a row; longer runs are cut, because the time for one grows faster than its length


class CorpusError(Exception):
    """The corpus cannot be prepared; the message names the file and the reason. The rank that prepares it raises it."""


class Source(NamedTuple):
    """A corpus file, and its state when it was found."""

    path: Path
    size: int
    time_ns: int


def prepare(
    corpus: Path | None, pattern: str | None, vocab_size: int, cache: Path | None, max_mib: int | None = None
) -> Path:  # fmt: skip
    """Tokenize a corpus, or its files up to ``max_mib``, or find that in the cache, and return its folder.

    Safe in several processes at once: whoever takes the lock first does the work in a temporary folder and renames it.

    Raises:
        CorpusError: No file matches, one cannot be read as UTF-8 text, or the cache cannot be written.
    """
    files = _find(corpus, pattern, max_mib)
    cache = _cache() if cache is None else cache
    try:
        return _prepare(files, vocab_size, cache)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CorpusError(f"cannot write the tokenized corpus {cache}: {error.filename or ''} {reason}") from error


def also_called(folder: Path) -> set[str]:
    """Return the keys that a corpus had when its files had other times of change."""
    called = set()
    for path in (folder.parent / "known").glob("*"):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            called |= {path.name} if path.read_text() == folder.name else set()
    return called


def _prepare(files: dict[str, Source], vocab_size: int, cache: Path) -> Path:
    cache.mkdir(parents=True, exist_ok=True)
    seen = cache / "known" / _key(files, vocab_size, 1, lambda source: str(source.time_ns))
    folder = _known(seen)
    if folder is None:
        with _Bar("reading", files) as bar:
            sums = {name: _sum(source, bar) for name, source in files.items()}
        by_path = {source.path: sums[name] for name, source in files.items()}
        folder = cache / _key(files, vocab_size, LAYOUT, lambda source: by_path[source.path])
    if _is_sound(folder):
        _remember(seen, folder)
        return folder
    with _locked(folder.with_name(folder.name + ".lock")):
        if folder.exists() and not _is_sound(folder):
            say(f"the tokenized corpus {folder} is damaged, and made anew")
            shutil.rmtree(folder)
        if not folder.exists():
            for left in cache.glob(folder.name + ".*"):
                if left.is_dir():  # of a process that was killed: only the holder of the lock makes one
                    shutil.rmtree(left, ignore_errors=True)
            scratch = Path(tempfile.mkdtemp(prefix=folder.name + ".", dir=cache))
            try:
                _interruptible(lambda: _tokenize(list(files.values()), vocab_size, scratch))
                scratch.chmod(0o777 & ~_umask())  # mkdtemp keeps a folder from all other users
                durable.publish(scratch, folder)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    _remember(seen, folder)
    return folder


def _find(corpus: Path | None, pattern: str | None, max_mib: int | None) -> dict[str, Source]:
    """Return the corpus's files by relative name, in the order in which they are packed."""
    if corpus is None:
        root, pattern = Path(sysconfig.get_path("stdlib")), pattern or "*.py"
        left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    else:
        root, pattern, left_out = corpus, pattern or "*", set()
        if not root.is_dir():
            raise CorpusError(f"no such corpus folder: {root}")

    def refuse(error: OSError) -> None:
        raise CorpusError(f"cannot read corpus folder {error.filename}: {error.strerror}") from error

    for _, names, _ in os.walk(root, onerror=refuse):  # rglob would leave out what it may not read, and tell nobody
        names[:] = set(names) - left_out
    paths = {path.relative_to(root).as_posix(): path for path in root.rglob(pattern) if not path.is_dir()}
    kept = {name: path for name, path in paths.items() if left_out.isdisjoint(name.split("/"))}
    if not kept:
        raise CorpusError(f"no file matches {pattern!r} in {root}")
    mixed = [(name, _source(path)) for name, path in sorted(kept.items(), key=lambda item: _digest(item[0]))]
    if max_mib is not None:
        sizes = itertools.accumulate(source.size for _, source in mixed)
        mixed = mixed[: max(1, sum(size <= max_mib << 20 for size in sizes))]
    return dict(mixed)


def _digest(name: str) -> bytes:
    return hashlib.sha256(os.fsencode(name)).digest()  # a name need not be UTF-8


def _source(path: Path) -> Source:
    try:
        status = path.stat()
    except OSError as error:
        raise CorpusError(f"cannot read corpus file {_shown(path)}: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise CorpusError(f"corpus file {_shown(path)} is no regular file; choose files by --pattern")
    return Source(path, status.st_size, status.st_mtime_ns)


def _shown(path: Path) -> str:
    return os.fsencode(path).decode(errors="backslashreplace")


def _cache() -> Path:
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "cce-dist"
    try:
        return Path.home() / ".cache" / "cce-dist"
    except RuntimeError as error:
        raise CorpusError("this user has no home folder: name a folder for tokenized corpora by --cache") from error


def _key(files: dict[str, Source], vocab_size: int, layout: int, mark: Callable[[Source], str]) -> str:
    """Return the name of a tokenized corpus; ``mark`` tells one content of a file from another."""
    digest = hashlib.sha256(f"{layout} {vocab_size}".encode())
    for name, source in files.items():
        digest.update(b"\0" + os.fsencode(name) + f"\0{source.size}\0{mark(source)}".encode())
    return f"bpe-{vocab_size}-{digest.hexdigest()[:16]}"


def _known(seen: Path) -> Path | None:
    """Return the folder of the corpus whose files had these very names, sizes and times of change."""
    try:
        name = seen.read_text()
    except (OSError, UnicodeDecodeError):
        return None
    return seen.parent.parent / name if re.fullmatch(r"bpe-\d+-[0-9a-f]{16}", name) else None


def _remember(seen: Path, folder: Path) -> None:
    with contextlib.suppress(OSError):  # another user's cache: the next start reads the files again
        if _known(seen) != folder:
            seen.parent.mkdir(exist_ok=True)
            durable.write(seen, folder.name)


def _sum(source: Source, bar: _Bar) -> str:
    digest = hashlib.sha256()
    for block in _blocks(source):
        digest.update(block)
        bar.advance(len(block))
    return digest.hexdigest()


def _is_sound(folder: Path) -> bool:
    """Whether a tokenized corpus is what was written."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        ids = folder / "ids.bin"
        if ids.stat().st_size != meta["num_ids"] * np.dtype(meta["dtype"]).itemsize:
            return False
        digest = hashlib.sha256()
        with open(ids, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        return digest.hexdigest() == meta["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that any user of the cache may take."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        with contextlib.suppress(PermissionError):  # another user's, open to us already
            os.fchmod(handle, 0o666)
    except PermissionError:
        handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _interruptible(work: Callable[[], None]) -> None:
    """Do the work on another thread: the tokenizer's own code would keep a signal waiting until it is done."""
    failure: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.2)
    if failure:
        raise failure[0]


def _tokenize(files: list[Source], vocab_size: int, folder: Path) -> None:
    """Train a byte-level BPE on the files and write tokenizer.json, ids.bin and meta.json to ``folder``."""
    by_name = {str(source.path): source for source in files}
    with _Bar("training the tokenizer on", by_name) as bar:
        tokenizer = _train(files, vocab_size, bar)
    durable.write(folder / "tokenizer.json", tokenizer.to_str())
    dtype = np.dtype("uint16" if vocab_size <= 2**16 else "uint32")
    num_ids, digest = 0, hashlib.sha256()
    with open(folder / "ids.bin", "wb") as file, _Bar("tokenizing", by_name) as bar:
        for pieces in _batches(files, bar):
            # Faster than encode_batch, and without the offsets, which take most of the memory.
            encoded = tokenizer.encode_batch_fast([text for text, _ in pieces])
            for document, (_, is_last) in zip(encoded, pieces, strict=True):
                ids = np.array([*document.ids, EOS] if is_last else document.ids, dtype=dtype).tobytes()
                file.write(ids)
                digest.update(ids)
                num_ids += len(ids) // dtype.itemsize
        file.flush()
        os.fsync(file.fileno())
    meta = {"dtype": dtype.name, "num_ids": num_ids, "num_documents": len(files), "vocab_size": vocab_size}
    durable.write(folder / "meta.json", json.dumps(meta | {"sha256": digest.hexdigest()}) + "\n")


def _train(files: list[Source], vocab_size: int, bar: _Bar) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer: Any = Tokenizer(models.BPE())
    runs = pre_tokenizers.Split(Regex(rf"\S{{{WORD}}}|\s{{{WORD}}}"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([runs, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((text for source in files for text in _pieces(source, bar)), trainer)
    tokenizer.encode_special_tokens = True  # "<eos>" in a document is text
    return tokenizer


def _batches(files: list[Source], bar: _Bar) -> Iterator[list[tuple[str, bool]]]:
    """Yield lists of pieces of documents, each with whether it is its document's last."""
    batch, size = [], 0
    for source in files:
        text = ""
        for number, following in enumerate(_pieces(source, bar)):
            if number:
                batch.append((text, False))
            text = following
            size += len(following)
            if size >= BATCH:
                yield batch
                batch, size = [], 0
        batch.append((text, True))
    if batch:
        yield batch


def _pieces(source: Source, bar: _Bar) -> Iterator[str]:
    """Yield a file's text in pieces of at most ``PIECE`` characters that end with a line, where lines are not longer."""
    ends = re.compile(r"\S\n(?=\S)")
    rest = ""
    for text in _texts(source, bar):
        rest += text
        start = 0
        while len(rest) - start > PIECE:
            line_ends = [match.end() for match in ends.finditer(rest, start, start + PIECE)]
            stop = line_ends[-1] if line_ends else start + PIECE
            yield rest[start:stop]
            start = stop
        rest = rest[start:]
    if rest:
        yield rest


def _texts(source: Source, bar: _Bar) -> Iterator[str]:
    """Yield a file's text bit by bit, with newlines as Python reads them."""
    utf8 = codecs.getincrementaldecoder("utf-8")()
    newlines = io.IncrementalNewlineDecoder(None, translate=True)
    position = 0
    try:
        for block in _blocks(source):
            before = len(utf8.getstate()[0])
            try:
                yield newlines.decode(utf8.decode(block))
            except UnicodeDecodeError as error:
                error.start += position - before
                raise
            position += len(block)
            bar.advance(len(block))
        yield newlines.decode(utf8.decode(b"", final=True), final=True)
    except UnicodeDecodeError as error:
        start = error.start if position < source.size else source.size - len(utf8.getstate()[0])
        reason = f"{error.reason} at byte {start}"
        raise CorpusError(
            f"corpus file {_shown(source.path)} is not UTF-8 text: {reason}; choose files by --pattern"
        ) from error


def _blocks(source: Source) -> Iterator[bytes]:
    """Yield a file's bytes; raise where they are not as many as when it was found."""
    left = source.size
    try:
        with open(source.path, "rb", buffering=0) as file:
            while block := file.read(min(1 << 18, left + 1)):
                left -= len(block)
                if left < 0:
                    break
                yield block
    except OSError as error:
        raise CorpusError(f"cannot read corpus file {_shown(source.path)}: {error.strerror}") from error
    if left:
        raise CorpusError(f"corpus file {_shown(source.path)} changed while it was read")


class _Bar:
    """Progress over the bytes of a corpus, where somebody watches a terminal."""

    def __init__(self, doing: str, files: dict[str, Source]) -> None:
        total = sum(source.size for source in files.values())
        self._bar = tqdm(total=total, desc=f"{doing} the corpus", unit="B", unit_scale=True, disable=None, leave=False)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def advance(self, num_bytes: int) -> None:
        self._bar.update(num_bytes)
