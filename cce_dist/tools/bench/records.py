"""What a bench.json holds: every number that was measured, so that any statistic can be taken later."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cce_dist.tools import report
from cce_dist.tools.bench.collectives import Collective


@dataclass(frozen=True)
class Errors:
    """Relative errors in the Frobenius norm.

    In a table of whole steps ``d_hidden`` is the error of the gradients of all layers below the head, ``d_weight`` the error of
    the head's gradient, and ``d_hidden_mean`` is NaN.
    """

    loss: float
    d_hidden: float
    d_weight: float
    d_hidden_mean: float  # of dE averaged over tokens


@dataclass
class Timing:
    """The seconds of each round, and how long the host took to launch the work; no host times on a CPU."""

    seconds: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Interquartile range."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return high - low


@dataclass
class Row:
    """All that is known of one method."""

    name: str
    ours: bool
    problem: str = ""  # why there are no times, in one line
    missing: bool = False  # the library is not installed, or does not support this device
    errors: Errors | None = None
    forward: Timing = field(default_factory=Timing)
    total: Timing = field(default_factory=Timing)
    peak_bytes: int | None = None  # of a head, above inputs and gradients; of whole steps all
    first: float | None = None  # seconds of the first loss and gradient, compilation included
    value: float | None = None  # the loss, if it is one number


@dataclass
class Floor:
    """Times of plain ``torch.mm`` products; ``Case.counts`` says how many.

    Forward needs ``one``, a step ``three``, and a step that computes the logits twice ``four``. Each timing is one job, because
    a GPU at its power limit runs three products in a row slower than three alone.
    """

    one: Timing = field(default_factory=Timing)
    three: Timing = field(default_factory=Timing)
    four: Timing = field(default_factory=Timing)
    problem: str = ""


@dataclass
class Case:
    """One table: what was measured, and on which input."""

    shape: str  # the name of a head or of a model
    num_tokens: int  # of a rank under FSDP2
    hidden_size: int
    vocab_size: int
    dtype: str
    on_gpu: bool
    rows: list[Row]
    floor: Floor = field(default_factory=Floor)
    collectives: dict[str, list[Collective]] = field(default_factory=dict)  # of a step, by method
    num_ranks: int = 1
    task: str = ""  # empty for the loss
    stage: str = ""  # the framework whose last stage is measured
    rung: str = "trained"
    ignored: float = 0.0  # share of labels that are -100
    teacher_size: int = 0
    counts: list[int] = field(default_factory=lambda: [1, 3, 4])  # products of each timing of the floor
    # Statistics of the softmax, means over tokens; NaN or None if unknown.
    loss: float = math.nan
    top_probability: float = math.nan
    probability_50: float = math.nan
    num_above: float | None = None
    num_outside: float | None = None
    # Only for whole steps.
    num_layers: int = 0
    train_steps: int = 0  # before measuring
    num_ids: int = 0  # different ids in the text that the model was trained on
    length: int = 0  # tokens of a sequence

    @property
    def present(self) -> list[Row]:
        """Rows of methods that could at least be tried here."""
        return [row for row in self.rows if not row.missing]

    @property
    def base(self) -> Row | None:
        """The row that whole steps are compared with: the first that has no problem."""
        return next((row for row in self.rows if not row.problem), None)


Cases = Iterator[tuple[str, Iterator[Case]]]  # a label, such as the name of a model, and the cases that belong to it


@dataclass
class Results:
    """A bench.json: device, versions, date and command, and what was measured."""

    environment: dict[str, Any]
    cases: list[Case]


def read_json(path: Path) -> Results:
    """Read a bench.json. Raises ValueError if it is something else."""
    return report.read_json(path, Results, "bench.json")


def select(cases: Sequence[Case], asked: dict[str, Any], methods: Sequence[str] | None) -> list[Case]:
    """Return the cases whose fields have one of the ``asked`` values, with only the named methods; None means all."""
    kept = []
    for case in cases:
        if all(values is None or getattr(case, name) in values for name, values in asked.items()):
            rows = [row for row in case.rows if methods is None or row.name in methods]
            sent = {row.name: case.collectives[row.name] for row in rows if row.name in case.collectives}
            kept.append(replace(case, rows=rows, collectives=sent))
    return kept
