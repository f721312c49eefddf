"""What the files of results hold: every number that was measured, so that any statistic can be taken later.

A file is a dataclass of dataclasses, lists and dicts, whose fields are the keys of the JSON. Stored files must stay readable,
so a field that is no longer measured keeps its place here.
"""

import json
import math
import platform
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

PACKAGES = ["triton", "cut-cross-entropy", "liger-kernel", "quack-kernels", "nvidia-cutlass-dsl", "fla-core", "trl"]
PACKAGES += ["torchtune", "transformers", "megatron-core", "deepspeed"]
Record = TypeVar("Record")


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


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind and size in a step; no times on a CPU."""

    name: str  # all_reduce, all_gather, reduce_scatter, ...
    num_bytes: int  # of the whole tensor that each of them sums or gathers
    count: int
    seconds: float | None = None  # of their kernels together, waiting for other ranks included
    exposed: float | None = None  # the part in which this rank computes nothing


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
    first: float | None = None  # only in older files: seconds of the first call, compilation included
    value: float | None = None  # the loss, if it is one number


@dataclass
class Floor:
    """Times of plain matmuls; ``Case.counts`` says how many.

    Forward needs ``one``, a step ``three``, and a step that computes the logits twice ``four``. Each timing is one job, because
    a GPU at its power limit runs three matmuls in a row slower than three alone.
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
    wall: bool = False  # times are the wall clock's, of calls that the host does not launch ahead of
    teacher_size: int = 0
    counts: list[int] = field(default_factory=lambda: [1, 3, 4])  # matmuls of each timing of the floor
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
    """The file of ``heads.py`` and ``steps.py``: device, versions, date and command, and what was measured."""

    environment: dict[str, Any]
    cases: list[Case]


def select(cases: Sequence[Case], asked: dict[str, Any], methods: Sequence[str] | None) -> list[Case]:
    """Return the cases whose fields have one of the ``asked`` values, with only the named methods; None means all."""
    kept = []
    for case in cases:
        if all(values is None or getattr(case, name) in values for name, values in asked.items()):
            rows = [row for row in case.rows if methods is None or row.name in methods]
            sent = {row.name: case.collectives[row.name] for row in rows if row.name in case.collectives}
            kept.append(replace(case, rows=rows, collectives=sent))
    return kept


def describe_environment(device: Any) -> dict[str, Any]:
    """Return the device, the versions of the compared libraries, the date and the command."""
    import torch

    versions = {"torch": str(torch.__version__)}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})",
        "torch": versions["torch"],
        "versions": versions,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
    }


def where(environment: dict[str, Any]) -> str:
    """Return device, version of torch and day of a run, in a line."""
    return f"{environment['device']}, torch {environment['torch']}, {environment['date'][:10]}"


def describe(error: Exception) -> str:
    """Return one line on an exception, of at most 120 characters."""
    if type(error).__name__ == "OutOfMemoryError":
        return "out of memory"
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed"
    first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    text = first_line if isinstance(error, ImportError) else f"{type(error).__name__}: {first_line}"
    return text if len(text) <= 120 else text[:117] + "..."


def write_json(path: Path, record: Any) -> None:
    """Write a dataclass with all that it holds; NaN and infinities become null."""
    path.write_text(json.dumps(_finite(asdict(record)), indent=1, allow_nan=False) + "\n")


def read_json(path: Path, kind: type[Record]) -> Record:
    """Read back what ``write_json`` wrote; null becomes NaN where the field is a float.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file does not hold a ``kind``.
    """
    try:
        return _restored(kind, json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} holds no {kind.__name__} ({type(error).__name__}: {error})") from error


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _restored(kind: Any, value: Any) -> Any:
    """Turn what JSON holds into the type that the dataclass's annotation names."""
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{name: _restored(hints[name], inner) for name, inner in value.items()})  # pyright: ignore[reportCallIssue]
    if get_origin(kind) is list:
        return [_restored(get_args(kind)[0], inner) for inner in value]
    if get_origin(kind) is dict:
        return {name: _restored(get_args(kind)[1], inner) for name, inner in value.items()}
    if NoneType in get_args(kind):  # X | None
        return None if value is None else _restored(get_args(kind)[0], value)
    return math.nan if value is None and kind is float else value
