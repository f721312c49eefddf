"""A folder of text files becomes token ids, once, in a cache that many may share; ids become batches.

A byte-level BPE makes the ids. The last twentieth of them is held out for validation. Documents stand one after
another, each closed by the id EOS, whose own label is ignored, in an order drawn from their names. The cache keys a corpus by
names and content, and is verified before it is used.

Text is read and encoded in pieces, so that memory does not grow with a file. A piece ends where the tokenizer's own pattern
ends a word, so the ids do not depend on where pieces end.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
import stat
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock
from tqdm import tqdm

from cce_dist.tools.pretrain.exits import UsageError, say
from cce_dist.tools.pretrain.folder import sha256, write_whole

EOS, IGNORED = 0, -100
HELD_OUT = 1 / 20
LAYOUT = 3  # version of a cache folder; raise it when its content changes
PIECE, BATCH = 1 << 15, 1 << 18  # characters
WORD = 256  # letters, or spaces, in a row; longer runs are cut, because the time for one grows faster than its length
LINE_END = re.compile(r"(?<=\S)\n")  # the tokenizer's pattern has no word of a visible character and a newline


class CorpusError(Exception):
    """The corpus cannot be prepared, says the rank that prepares it, by file and reason."""


class Source(NamedTuple):
    """A corpus file, and its state when it was found."""

    path: Path
    size: int
    time_ns: int


def prepare(
    corpus: Path | None, pattern: str | None, vocab_size: int, cache: Path | None, max_mib: int | None = None
) -> Path:
    """Tokenize a corpus, or its files up to ``max_mib``, or find that in the cache, and return its folder.

    Safe in several processes at once: whoever takes the lock first does the work in a temporary folder and renames it.

    Raises:
        CorpusError: No file matches, one cannot be read as UTF-8 text, or the cache cannot be written.
    """
    files = _find(corpus, pattern, max_mib)
    if cache is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cce-dist"
    folder = cache / _key(files, vocab_size)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if not _is_sound(folder):
            with FileLock(f"{folder}.lock", mode=0o666):
                if not _is_sound(folder):
                    _make(folder, list(files.values()), vocab_size)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CorpusError(f"cannot write the tokenized corpus {cache}: {error.filename or ''} {reason}") from error
    return folder


def _make(folder: Path, files: list[Source], vocab_size: int) -> None:
    """Tokenize the files into a folder, whose lock the caller holds, whole or not at all."""
    if folder.exists():
        say(f"the tokenized corpus {folder} is damaged, and made anew")
    for left in folder.parent.glob(folder.name + "*"):
        if left.is_dir():  # damaged, or of a process that was killed
            shutil.rmtree(left)
    scratch = folder.with_name(f"{folder.name}.{os.getpid()}")
    scratch.mkdir()
    try:
        _tokenize(files, vocab_size, scratch)
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


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

    found: dict[str, Path] = {}
    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = set(folders) - left_out
        paths = [Path(folder, name) for name in names]
        found |= {
            path.relative_to(root).as_posix(): path for path in paths if path.match(pattern) and not path.is_dir()
        }
    if not found:
        raise CorpusError(f"no file matches {pattern!r} in {root}")
    # An order that tells nothing of the names. They need not be UTF-8.
    mixed = sorted(found, key=lambda name: hashlib.sha256(os.fsencode(name)).digest())
    sources = {name: _source(found[name]) for name in mixed}
    if max_mib is None:
        return sources
    sizes = itertools.accumulate(source.size for source in sources.values())
    return dict(itertools.islice(sources.items(), max(1, sum(size <= max_mib << 20 for size in sizes))))


def _source(path: Path) -> Source:
    try:
        status = path.stat()
    except OSError as error:
        raise CorpusError(f"cannot read corpus file {path}: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise CorpusError(f"corpus file {path} is no regular file; choose files by --pattern")
    return Source(path, status.st_size, status.st_mtime_ns)


def _key(files: dict[str, Source], vocab_size: int) -> str:
    """Return the name of a tokenized corpus: a hash of the names and contents of its files."""
    digest = hashlib.sha256(f"{LAYOUT} {vocab_size}".encode())
    with _bar("reading", list(files.values())) as bar:
        for name, source in files.items():
            digest.update(b"\0" + os.fsencode(name) + b"\0")
            try:
                digest.update(sha256(source.path).encode())
            except OSError as error:
                raise CorpusError(f"cannot read corpus file {source.path}: {error.strerror}") from error
            bar.update(source.size)
    return f"bpe-{vocab_size}-{digest.hexdigest()[:16]}"


def _is_sound(folder: Path) -> bool:
    """Whether a tokenized corpus is what was written."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        return (folder / "tokenizer.json").exists() and sha256(folder / "ids.bin") == meta["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _tokenize(files: list[Source], vocab_size: int, folder: Path) -> None:
    """Train a byte-level BPE on the files and write tokenizer.json, ids.bin and meta.json to ``folder``."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer: Any = Tokenizer(models.BPE())
    runs = pre_tokenizers.Split(Regex(rf"\S{{{WORD}}}|\s{{{WORD}}}"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([runs, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    with _bar("training the tokenizer on", files) as bar:
        tokenizer.train_from_iterator((text for source in files for text in _pieces(source, bar)), trainer)
    tokenizer.encode_special_tokens = True  # "<eos>" in a document is text
    write_whole(folder / "tokenizer.json", tokenizer.to_str())

    dtype = np.dtype("uint16" if vocab_size <= 2**16 else "uint32")
    with open(folder / "ids.bin", "wb") as file, _bar("tokenizing", files) as bar:
        for texts in _batches(files, bar):
            # Faster than encode_batch, and without the offsets, which take most of the memory.
            encoded = tokenizer.encode_batch_fast([text or "" for text in texts])
            for text, piece in zip(texts, encoded, strict=True):
                file.write(np.array([EOS] if text is None else piece.ids, dtype).tobytes())
    meta = {"dtype": dtype.name, "vocab_size": vocab_size, "sha256": sha256(folder / "ids.bin")}
    write_whole(folder / "meta.json", json.dumps(meta) + "\n")


def _batches(files: list[Source], bar: tqdm) -> Iterator[list[str | None]]:
    """Yield lists of pieces of documents; None ends a document."""
    batch, size = [], 0
    for text in (text for source in files for text in itertools.chain(_pieces(source, bar), [None])):
        batch.append(text)
        size += len(text or "")
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _pieces(source: Source, bar: tqdm) -> Iterator[str]:
    """Yield a file's text in pieces that end before a newline, or after ``PIECE`` characters."""
    rest = ""
    try:
        with open(source.path, encoding="utf-8") as file:
            while text := file.read(PIECE):
                bar.update(len(text))
                rest += text
                ends = [match.start() for match in LINE_END.finditer(rest)]
                stop = ends[-1] if ends else len(rest) if len(rest) > PIECE else 0
                if stop:
                    yield rest[:stop]
                    rest = rest[stop:]
    except UnicodeDecodeError as error:
        why = f"is not UTF-8 text: {error.reason}; choose files by --pattern"
        raise CorpusError(f"corpus file {source.path} {why}") from error
    except OSError as error:
        raise CorpusError(f"cannot read corpus file {source.path}: {error.strerror}") from error
    if _source(source.path) != source:
        raise CorpusError(f"corpus file {source.path} changed while it was read")
    if rest:
        yield rest


def _bar(doing: str, files: list[Source]) -> tqdm:
    """Return a bar over the bytes of a corpus, where somebody watches a terminal."""
    total = sum(source.size for source in files)
    return tqdm(total=total, desc=f"{doing} the corpus", unit="B", unit_scale=True, disable=None, leave=False)


class Corpus:
    """Token ids of a prepared corpus, memory-mapped, in uint16 or uint32. Equal keys mean equal ids."""

    def __init__(self, folder: Path) -> None:
        dtype = json.loads((folder / "meta.json").read_text())["dtype"]
        ids = np.memmap(folder / "ids.bin", dtype=dtype, mode="r")
        num_train = len(ids) - int(len(ids) * HELD_OUT)
        self.train, self.held_out = ids[:num_train], ids[num_train:]
        self.key = folder.name


class Batches:
    """Packed sequences in an order that is a function of seed and position alone, another for each pass."""

    def __init__(self, ids: np.ndarray, seq_len: int, seed: int) -> None:
        self.ids, self.seq_len, self.seed = ids, seq_len, seed
        self.num_sequences = (len(ids) - 1) // seq_len
        if self.num_sequences < 1:
            raise UsageError(f"corpus too small: {len(ids)} tokens in a split, one sequence needs {seq_len + 1}")
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def at(self, position: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and labels, both [count, seq_len] int64, of the sequences from ``position`` on."""
        rows = np.stack([self._sequence(index) for index in range(position, position + count)]).astype(np.int64)
        ids, labels = rows[:, :-1], rows[:, 1:].copy()
        labels[ids == EOS] = IGNORED
        return ids, labels

    def _sequence(self, index: int) -> np.ndarray:
        epoch, place = divmod(index, self.num_sequences)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(self.num_sequences)
        start = int(self._order[place]) * self.seq_len
        return self.ids[start : start + self.seq_len + 1]


def num_valid(*labels: np.ndarray) -> int:
    """Return how many labels are not ignored, but 1 at least, to divide by."""
    return max(1, sum(int((each != IGNORED).sum()) for each in labels))
