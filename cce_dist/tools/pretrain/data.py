"""A tokenized corpus becomes batches: one memory-mapped file of ids, packed sequences.

The last twentieth of the ids is held out for validation. A sequence is any run of ``seq_len`` ids; the label of an EOS would
be the first id of a document that has nothing to do with it, so it is ignored.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from cce_dist.tools.pretrain.corpus import EOS, CorpusError, prepare
from cce_dist.tools.pretrain.exits import UsageError

__all__ = ["EOS", "IGNORED", "Batches", "Corpus", "CorpusError", "num_valid", "prepare"]

IGNORED = -100
HELD_OUT = 1 / 20


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
