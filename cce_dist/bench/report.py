"""The findings of a run: tables for the terminal and for pages, JSON, and a figure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cce_dist import report
from cce_dist.bench.collectives import Collective
from cce_dist.bench.loop import Floor, Measured, Problem, Row, Timing
from cce_dist.bench.shapes import COLUMNS
from cce_dist.bench.workload import Workload

# Headings of a table whose cases need different numbers of products.
NEEDED = {"fwd/1": "/ products", "total/3": "/ products", "total/4": "/ products, logits twice"}
LEAST_TOLD = 1 << 16  # bytes of a collective that a line about whole steps names


@dataclass
class Case:
    """One table: a shape, a number of tokens, a share of ignored labels, and what was measured there.

    On a CPU only ratios to the plain products of the same run are shown.
    """

    shape: str
    num_tokens: int
    hidden_size: int
    vocab_size: int
    ignored: float
    dtype: str
    on_gpu: bool
    loss: float
    top_probability: float
    probability_50: float
    rows: list[Row]
    floor: Floor
    num_ranks: int = 1
    collectives: dict[str, list[Collective]] = field(default_factory=dict)
    stage: str = ""
    rung: str = "trained"
    num_above: float | None = None
    num_outside: float | None = None
    task: str = ""
    teacher_size: int = 0
    counts: list[int] = field(default_factory=lambda: [1, 3, 4])
    # Whole steps alone have these.
    num_layers: int = 0
    train_steps: int = 0  # on text, before
    num_ids: int = 0  # that are in the text
    length: int = 0  # tokens of a sequence
    limit_gib: int = 0  # the memory of ``Row.longest``; 0: nobody looked for it

    @classmethod
    def of(cls, shape: str, ignored: float, workload: Workload, problem: Problem, found: Measured, **more: Any) -> Case:
        """Return what was measured as a table; ``more`` are fields that have a default."""
        (num_tokens, hidden_size), vocab_size = workload.hidden.shape, workload.weight.shape[0]
        return cls(
            shape,
            num_tokens,
            hidden_size,
            vocab_size,
            ignored,
            dtype=str(workload.hidden.dtype).removeprefix("torch."),
            on_gpu=workload.hidden.is_cuda,
            rows=found.rows,
            floor=found.floor,
            collectives=found.collectives,
            teacher_size=problem.weights[-1].shape[1] if len(problem.weights) > 1 else 0,
            counts=problem.counts,
            **workload.drawn,
            **more,
        )

    @property
    def present(self) -> list[Row]:
        """Rows of methods that could at least be tried here."""
        return [row for row in self.rows if not row.missing]

    @property
    def base(self) -> Row | None:
        """The row that whole steps are compared with: the first that is right."""
        return next((row for row in self.rows if not row.problem), None)

    @property
    def title(self) -> str:
        ignored = f", {self.ignored:.0%} ignored" if self.ignored else ""
        split = f" / {self.num_ranks}" if self.num_ranks > 1 else ""
        stage = f"end of {self.stage}'s last stage, " if self.stage else ""
        rung = f", {self.rung}" if self.rung != "trained" else ""
        task, teacher = self.task and f"{self.task}, ", self.teacher_size and f", teacher D {self.teacher_size:,}"
        layers = f", {self.num_layers} layers, sequences of {self.length:,}" if self.num_layers else ""
        return (
            f"{stage}{task}{self.shape}{rung}, N {self.num_tokens:,}, D {self.hidden_size:,}, V {self.vocab_size:,}{split}"
            f"{teacher or ''}{layers}, {self.dtype}{ignored}"
        )

    @property
    def columns(self) -> dict[str, str]:
        """The heading of each column by what ``--columns`` calls it."""
        if self.num_layers:
            step = {"total": "step ms (IQR)", "MiB": "peak MiB", "dE": "err body", "dC": "err head"}
            step |= {} if self.base is None else {"stock": f"x {self.base.name}"}
            return COLUMNS | step | ({"longest": f"longest in {self.limit_gib} GiB"} if self.limit_gib else {})
        over = dict(
            zip(("fwd/1", "total/3", "total/4"), (f"/{n} GEMM{'s' * (n > 1)}" for n in self.counts), strict=True)
        )
        return COLUMNS | over


@dataclass
class Results:
    """A bench.json: device, versions, date and command, and every round's seconds, so that any statistic can be taken later."""

    environment: dict[str, Any]
    cases: list[Case]


def read_json(path: Path) -> Results:
    """Read a bench.json. Raises ValueError if it is something else."""
    return report.read_json(path, Results, "bench.json")


def select(cases: Sequence[Case], asked: dict[str, Any], methods: Sequence[str] | None) -> list[Case]:
    """The cases whose fields have one of the values ``asked`` for, and in them the methods named; None means all."""
    kept = []
    for case in cases:
        if all(values is None or getattr(case, name) in values for name, values in asked.items()):
            rows = [row for row in case.rows if methods is None or row.name in methods]
            sent = {row.name: case.collectives[row.name] for row in rows if row.name in case.collectives}
            kept.append(replace(case, rows=rows, collectives=sent))
    return kept


def table(case: Case) -> str:
    """The case as Markdown."""
    drawn = ""
    if case.loss == case.loss:  # a stored case may have none
        drawn = f"Workload: loss {case.loss:.2f} nats, top probability {case.top_probability:.2f}, "
        drawn += f"50th {case.probability_50:.1e}"
        if case.num_above is not None and case.num_outside is not None:
            drawn += f", {case.num_above:.0f} a token above 2^-12, {case.num_outside:.1f} outside the frequent ids"
        drawn += ". "
    if case.num_layers:
        told = f"{case.train_steps} steps on text, which has {case.num_ids:,} ids" if case.num_ids else "Ids are drawn"
        drawn += f"{told}. Errors: from the stock model."
    elif case.floor.problem or not case.on_gpu:
        drawn += f"Floor: {case.floor.problem or 'plain matrix products on this CPU, so ratios only'}."
    else:
        drawn += f"Floor, of {' / '.join(map(str, case.counts))} products: {_floor(case)} ms."
    least = LEAST_TOLD * bool(case.num_layers)
    sends = {name: [kind for kind in kinds if kind.num_bytes >= least] for name, kinds in case.collectives.items()}
    sends = [f"* {name} sends {_sent(kinds)}." for name, kinds in sends.items()]
    notes = [f"* {row.name}: {row.problem}" for row in case.present if row.problem]
    missing = [f"{row.name} ({row.problem})" for row in case.rows if row.missing]
    if missing:
        notes.append(f"Not here: {', '.join(missing)}.")
    cells = [(row, _cells(row, case)) for row in case.present]
    body = report.table(
        [{"method": row.name} | {case.columns[name]: text for name, text in each.items()} for row, each in cells]
    )
    return "\n".join([f"### {case.title}", "", drawn, "", *body, "", *sends, *([""] if sends else []), *notes])


def summary(cases: Sequence[Case], columns: Sequence[str]) -> list[str]:
    """The lines of one Markdown table: a row per method, a column per case, in each cell the numbers of ``columns``.

    Where times are asked for, the first row has the plain products.
    """
    # Cases of one task have one heading; others have the products that each of them needs.
    headings = [{name: case.columns[name] for name in columns} for case in cases]
    alike = all(each == headings[0] for each in headings)
    first = "; ".join((headings[0] if alike else COLUMNS | NEEDED)[name] for name in columns)
    counts = (
        " / ".join(map(str, cases[0].counts))
        if alike and len({*map(str, (c.counts for c in cases))}) == 1
        else "needed"
    )
    floor = f"plain GEMMs, ms: {counts}"
    names = dict.fromkeys(row.name for case in cases for row in case.present)
    rows = {name: {first: name} for name in (floor, *names)}
    for case in cases:
        title = _column(case, cases)
        if title in rows[floor]:
            raise ValueError(f"two cases are called {title}; choose one")
        for line in rows.values():
            line[title] = "-"
        if not case.floor.problem:
            rows[floor][title] = _floor(case)
        for row in case.present:
            cells = {**_cells(row, case), "sends": _sent(case.collectives.get(row.name, []))}
            rows[row.name][title] = "; ".join(cells.get(column, "-") for column in columns)
    timed = {"fwd", "total", "host"} & set(columns)
    if not timed or not all(case.on_gpu and not case.num_layers for case in cases):
        del rows[floor]
    return report.table(list(rows.values()))


def _column(case: Case, cases: Sequence[Case]) -> str:
    """The name of a case among others: its shape and vocabulary, and what else they differ in."""
    split = f" / {case.num_ranks}" if case.num_ranks > 1 else ""
    task = f"{case.task}, " if len({other.task for other in cases}) > 1 else ""
    name = f"{task}{case.shape}, V {case.vocab_size:,}{split}"
    if len({other.rung for other in cases}) > 1:
        name += f", {case.rung}"
    if len({other.num_tokens for other in cases}) > 1:
        name += f", N {case.num_tokens:,}"
    return name + (f", {case.ignored:.0%} ignored" if case.ignored else "")


def received(kinds: Sequence[Collective], num_ranks: int) -> dict[str, float]:
    """The bytes that a rank receives in a step's all-gathers, and in its sums: an all-reduce scatters and gathers."""
    found = {"gathered": 0.0, "scattered": 0.0}
    for kind in kinds:
        num_bytes = kind.count * kind.num_bytes * (num_ranks - 1) / num_ranks
        if kind.name.startswith("all_"):
            found["gathered"] += num_bytes
        if kind.name != "all_gather":
            found["scattered"] += num_bytes
    return found


def _sent(kinds: Sequence[Collective]) -> str:
    """The collectives of a step; times where there are GPUs."""
    parts = []
    for kind in kinds:
        parts.append(f"{kind.count} {kind.name} of {kind.num_bytes / 2**20:,.2f} MiB")
        if kind.seconds is not None and kind.exposed is not None:
            parts[-1] += f" in {_ms(kind.seconds)} ms, {_ms(kind.exposed)} exposed"
    return ", ".join(parts) or "nothing"


def _cells(row: Row, case: Case) -> dict[str, str]:
    """A row's text by column; a method that was refused has its errors, and the reason where the ratios would be."""
    refused = row.problem.partition(":")[0]
    if case.num_layers:
        return _step_cells(row, case, refused)

    def ms(timing: Timing) -> str:
        return _ms(timing.median, timing.spread) if timing.seconds and not refused else "-"

    def ratio(timing: Timing, products: Timing) -> str:
        missing = refused or case.floor.problem or not timing.seconds or not products.seconds
        return "-" if missing else f"{timing.median / products.median:.2f}"

    cells = {}
    if case.on_gpu:
        cells["fwd"] = ms(row.forward)
    cells["fwd/1"] = ratio(row.forward, case.floor.one)
    if case.on_gpu:
        cells["total"] = ms(row.total)
    cells["total/3"] = refused or ratio(row.total, case.floor.three)
    cells["total/4"] = ratio(row.total, case.floor.four)
    if case.on_gpu:
        if any(other.total.host for other in case.rows):
            host = row.total.host_median
            cells["host"] = "-" if refused or host is None else _ms(host)
        if any(other.first is not None for other in case.rows):
            cells["first"] = "-" if row.first is None else f"{row.first:.1f}"
        cells["MiB"] = "-" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:,.0f}"
    for name, column in (("d_hidden", "dE"), ("d_weight", "dC"), ("d_hidden_mean", "mean-dE"), ("loss", "loss")):
        cells[column] = f"{getattr(row.errors, name):.1e}" if row.errors else "-"
    return cells


def _step_cells(row: Row, case: Case, refused: str) -> dict[str, str]:
    """A row's text of whole steps; times are over those of the first row in the same round."""
    names = ["total", "tokens/s"] * case.on_gpu + ["stock"] + ["host", "first", "MiB"] * case.on_gpu
    names += ["longest"] * bool(case.limit_gib) + ["gathered", "scattered"] * (case.num_ranks > 1)
    cells = dict.fromkeys([*names, "value", "loss", "dE", "dC"], "-")
    if refused:
        cells["stock"] = refused
    elif case.base is not None:
        rounds = zip(case.base.total.seconds, row.total.seconds, strict=True)
        cells["stock"] = f"{statistics.median(theirs / mine for theirs, mine in rounds):.3f}"
    if row.name in case.collectives:
        for name, num_bytes in received(case.collectives[row.name], case.num_ranks).items():
            cells[name] = f"{num_bytes / 2**20:,.2f}"
    if case.on_gpu and not refused:
        host = row.total.host_median
        cells["total"] = _ms(row.total.median, row.total.spread)
        cells["tokens/s"] = f"{case.num_tokens / row.total.median:,.0f}"
        cells["host"] = "-" if host is None else _ms(host)
    if case.on_gpu and row.first is not None:
        cells["first"] = f"{row.first:.1f}"
    if row.peak_bytes is not None:
        cells["MiB"] = f"{row.peak_bytes / 2**20:,.0f}"
    if row.longest is not None:
        cells["longest"] = f"{row.longest:,}"
    if row.value is not None:
        cells["value"] = f"{row.value:.4f}"
    for name, column in (("loss", "loss"), ("d_hidden", "dE"), ("d_weight", "dC")) if row.errors else ():
        cells[column] = f"{getattr(row.errors, name):.1e}"
    return cells


def _floor(case: Case) -> str:
    """Milliseconds of each count of products."""
    timings = (case.floor.one, case.floor.three, case.floor.four)
    return " / ".join(_ms(timing.median) if timing.seconds else "-" for timing in timings)


def _ms(seconds: float, spread: float | None = None) -> str:
    """Milliseconds, and in brackets their spread to the same digits."""
    digits = 3 if seconds < 1e-3 else 2 if seconds < 0.1 else 1
    text = f"{seconds * 1e3:.{digits}f}"
    return text if spread is None else f"{text} ({spread * 1e3:.{digits}f})"


def write_figure(path: Path, environment: dict[str, Any], cases: Sequence[Case]) -> None:
    """Bars of time over the products that a step needs, and of memory below them; up to three cases side by side."""
    panels = [_time_panel, _memory_panel] if cases[0].on_gpu else [_time_panel]
    columns = min(3, len(cases))
    bands = -(-len(cases) // columns) * len(panels)
    height = 1.2 + 0.3 * max(len(case.present) for case in cases)
    with report.picture(path, report.where(environment), (1.5 + 4.6 * columns, height * bands)) as figure:
        axes = figure.subplots(bands, columns, squeeze=False)
        for axis in axes.flat:
            axis.set_visible(False)
        for index, case in enumerate(cases):
            band, column = divmod(index, columns)
            for offset, panel in enumerate(panels):
                axes[band * len(panels) + offset][column].set_visible(True)
                panel(axes[band * len(panels) + offset][column], case)
            axes[band * len(panels)][column].set_title(case.title.replace(", D", "\nD", 1), fontsize=9)


def _time_panel(axis: Any, case: Case) -> None:
    if case.num_layers:
        _speed_panel(axis, case)
        return
    floor = case.floor.three if case.floor.three.seconds else case.floor.one
    values, spreads, labels = [], [], []
    for row in case.present:
        timing = row.total if case.floor.three.seconds else row.forward
        problem = row.problem or case.floor.problem
        values.append(0.0 if problem else timing.median / floor.median)
        spreads.append(0.0 if problem else timing.spread / floor.median)
        label = problem.partition(":")[0] or f"{values[-1]:.2f}"
        labels.append(label if problem or not case.on_gpu else f"{label}   {_ms(timing.median)} ms")
    report.bars(axis, [(row.name, row.ours) for row in case.present], values, labels, spreads)
    axis.axvline(1.0, color="black", linewidth=0.8, linestyle="--", zorder=0)
    count = case.counts[1 if case.floor.three.seconds else 0]
    axis.set_xlabel(f"time / {count} plain matrix products" + ("" if case.on_gpu else " (CPU)"), fontsize=8)


def _speed_panel(axis: Any, case: Case) -> None:
    """Tokens a second of whole steps; on a CPU over the fastest way's."""
    speeds = [0.0 if row.problem else case.num_tokens / row.total.median for row in case.present]
    unit, digits = (1.0, 0) if case.on_gpu else (max(speeds) or 1.0, 2)
    values = [speed / unit for speed in speeds]
    pairs = zip(case.present, values, strict=True)
    labels = [row.problem.partition(":")[0] or f"{value:,.{digits}f}" for row, value in pairs]
    report.bars(axis, [(row.name, row.ours) for row in case.present], values, labels, [0.0] * len(values))
    axis.set_xlabel("tokens a second" if case.on_gpu else "tokens a second over the fastest's (CPU)", fontsize=8)


def _memory_panel(axis: Any, case: Case) -> None:
    mib = [(row.peak_bytes or 0) / 2**20 for row in case.present]
    labels = ["-" if row.peak_bytes is None else f"{m:,.0f}" for row, m in zip(case.present, mib, strict=True)]
    report.bars(axis, [(row.name, row.ours) for row in case.present], mib, labels, [0.0] * len(mib))
    axis.set_xlabel("peak MiB" if case.num_layers else "peak MiB above inputs and gradients", fontsize=8)
