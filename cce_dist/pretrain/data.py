"""A folder of text files becomes batches: byte-level BPE, one memory-mapped file of ids, packed sequences.

Documents stand one after another, each closed by the id EOS, in an order drawn from their names; the last twentieth of the
ids is held out for validation. A sequence is any run of ``seq_len`` ids; the label of an EOS would be the first id of a
document that has nothing to do with it, so it is ignored.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cce_dist.pretrain.recipe import UsageError

EOS = 0
IGNORED = -100
HELD_OUT = 1 / 20
LAYOUT = 1  # version of a cache folder; raise it when its content changes


class CorpusError(Exception):
    """The corpus cannot be prepared; the message names the file and the reason. The rank that prepares it raises it."""


class Corpus:
    """Token ids of a prepared corpus, memory-mapped.

    Attributes:
        train, held_out: 1-D uint16 or uint32 arrays.
        key: Names files and vocabulary; equal keys mean equal ids.
    """

    def __init__(self, folder: Path) -> None:
        dtype = json.loads((folder / "meta.json").read_text())["dtype"]
        ids = np.memmap(folder / "ids.bin", dtype=dtype, mode="r")
        num_train = len(ids) - int(len(ids) * HELD_OUT)
        self.train, self.held_out = ids[:num_train], ids[num_train:]
        self.key = folder.name


class Batches:
    """Packed sequences in an order that is a function of seed and position alone, whatever the ranks.

    Args:
        ids: 1-D array of token ids.
        seq_len: Tokens of a sequence.
        seed: Of the order, which is drawn anew for each pass over the data.
    """

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

    def first(self, num_batches: int, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the first batches of ``count`` sequences each, as ``at`` has them."""
        return [self.at(index * count, count) for index in range(num_batches)]

    def _sequence(self, index: int) -> np.ndarray:
        epoch, place = divmod(index, self.num_sequences)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(self.num_sequences)
        start = int(self._order[place]) * self.seq_len
        return self.ids[start : start + self.seq_len + 1]


def num_valid(*labels: np.ndarray) -> int:
    """Return how many labels are not ignored, but 1 at least: it is what a sum of losses is divided by."""
    return max(1, sum(int((each != IGNORED).sum()) for each in labels))


def prepare(
    corpus: Path | None, pattern: str | None, vocab_size: int, cache: Path | None, max_mib: int | None = None,
    *, here: bool = True,
) -> Path:  # fmt: skip
    """Tokenize a corpus, or its files up to ``max_mib``, or find that in the cache, and return its folder.

    Safe in several processes at once: whoever takes the lock first does the work in a temporary folder and renames it. Not
    ``here`` means that another process of this machine does the work; this one waits without end, because a preparing rank
    that fails takes the group down with it.

    Raises:
        CorpusError: No file matches, one cannot be read as UTF-8 text, or the cache cannot be written.
    """
    files = _find(corpus, pattern, max_mib)
    folder = _folder(files, vocab_size, cache)
    while not here and not folder.exists():
        time.sleep(0.1)
    if folder.exists():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.with_name(folder.name + ".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                scratch = Path(tempfile.mkdtemp(prefix=folder.name + ".", dir=folder.parent))
                try:
                    _tokenize(list(files.values()), vocab_size, scratch)
                    os.rename(scratch, folder)
                finally:
                    shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise CorpusError(f"cannot write the tokenized corpus {folder}: {error.strerror}") from error
    return folder


def _find(corpus: Path | None, pattern: str | None, max_mib: int | None) -> dict[str, Path]:
    """Return the corpus's files by relative name, in the order in which they are packed."""
    if corpus is None:
        root, pattern = Path(sysconfig.get_path("stdlib")), pattern or "*.py"
        left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    else:
        root, pattern, left_out = corpus, pattern or "*", set()
        if not root.is_dir():
            raise CorpusError(f"no such corpus folder: {root}")
    paths = {path.relative_to(root).as_posix(): path for path in root.rglob(pattern) if not path.is_dir()}
    kept = {name: path for name, path in paths.items() if left_out.isdisjoint(name.split("/"))}
    if not kept:
        raise CorpusError(f"no file matches {pattern!r} in {root}")
    mixed = sorted(kept.items(), key=lambda item: hashlib.sha256(item[0].encode()).digest())
    if max_mib is not None:
        sizes = itertools.accumulate(_status(path).st_size for _, path in mixed)
        mixed = mixed[: max(1, sum(size <= max_mib << 20 for size in sizes))]
    return dict(mixed)


def _folder(files: dict[str, Path], vocab_size: int, cache: Path | None) -> Path:
    if cache is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cce-dist"
    digest = hashlib.sha256(f"{LAYOUT} {vocab_size}".encode())
    for name, path in files.items():
        status = _status(path)
        digest.update(f"\0{name}\0{status.st_size}\0{status.st_mtime_ns}".encode())
    return cache / f"bpe-{vocab_size}-{digest.hexdigest()[:16]}"


def _status(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise CorpusError(f"cannot read corpus file {path}: {error.strerror}") from error


def _tokenize(files: list[Path], vocab_size: int, folder: Path) -> None:
    """Train a byte-level BPE on the files and write tokenizer.json, ids.bin and meta.json to ``folder``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < 257:
        raise CorpusError(f"a byte-level vocabulary has 256 bytes and an end-of-document id; {vocab_size} is too few")
    tokenizer = Tokenizer(models.BPE())
    # The attributes of a Tokenizer are typed as read-only by its stubs.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_texts(files), trainer)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")

    dtype = np.dtype("uint16" if vocab_size <= 2**16 else "uint32")
    num_ids = 0
    with open(folder / "ids.bin", "wb") as file:
        for start in range(0, len(files), 64):
            for document in tokenizer.encode_batch(list(_texts(files[start : start + 64]))):
                ids = np.array([*document.ids, EOS], dtype=dtype)
                file.write(ids.tobytes())
                num_ids += len(ids)
    meta = {"dtype": dtype.name, "num_ids": num_ids, "num_documents": len(files), "vocab_size": vocab_size}
    (folder / "meta.json").write_text(json.dumps(meta) + "\n")


def _texts(files: list[Path]) -> Iterator[str]:
    for path in files:
        try:
            yield path.read_text(encoding="utf-8")
        except OSError as error:
            raise CorpusError(f"cannot read corpus file {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            reason = f"{error.reason} at byte {error.start}"
            raise CorpusError(f"corpus file {path} is not UTF-8 text: {reason}; choose files by --pattern") from error
