"""Tables for the terminal and for pages, and a figure, of what ``records`` holds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cce_dist.tools import report
from cce_dist.tools.bench.collectives import Collective
from cce_dist.tools.bench.records import Case, Floor, Row, Timing
from cce_dist.tools.bench.shapes import COLUMNS

# Headings of a table whose cases need different numbers of products.
NEEDED = {"fwd/1": "/ products", "total/3": "/ products", "total/4": "/ products, logits twice"}
OF_HEADS = ("fwd", "fwd/1", "total", "total/3", "total/4", "host", "first", "MiB", "dE", "dC", "mean-dE", "loss")
OF_STEPS = (
    *("total", "tokens/s", "stock", "host", "first", "MiB"),
    *("gathered", "scattered", "value", "loss", "dE", "dC"),
)
ERRORS = {"loss": "loss", "dE": "d_hidden", "dC": "d_weight", "mean-dE": "d_hidden_mean"}
ON_GPU = {"fwd", "total", "tokens/s", "host", "first", "MiB"}  # columns that a table of a CPU does not have
LEAST_TOLD = 1 << 16  # bytes of the smallest collective that is listed for whole steps


def title(case: Case) -> str:
    """Return the heading of a case's table."""
    ignored = f", {case.ignored:.0%} ignored" if case.ignored else ""
    split = f" / {case.num_ranks}" if case.num_ranks > 1 else ""
    stage = f"end of {case.stage}'s last stage, " if case.stage else ""
    rung = f", {case.rung}" if case.rung != "trained" else ""
    task = f"{case.task}, " if case.task else ""
    teacher = f", teacher D {case.teacher_size:,}" if case.teacher_size else ""
    layers = f", {case.num_layers} layers, sequences of {case.length:,}" if case.num_layers else ""
    return (
        f"{stage}{task}{case.shape}{rung}, N {case.num_tokens:,}, D {case.hidden_size:,}, V {case.vocab_size:,}{split}"
        f"{teacher}{layers}, {case.dtype}{ignored}"
    )


def headings(case: Case) -> dict[str, str]:
    """Return the heading of each column by what ``--columns`` calls it."""
    if not case.num_layers:
        ratios = zip(("fwd/1", "total/3", "total/4"), case.counts, strict=True)
        return COLUMNS | {name: f"/{count} GEMM{'s' * (count > 1)}" for name, count in ratios}
    step = {"total": "step ms (IQR)", "MiB": "peak MiB", "dE": "err body", "dC": "err head"}
    step |= {} if case.base is None else {"stock": f"x {case.base.name}"}
    return COLUMNS | step


def cells(row: Row, case: Case) -> dict[str, str]:
    """Return a row's text by column, "-" where there is no number, and for a refused method the reason."""
    refused = row.problem.partition(":")[0]
    forward, total = (Timing(), Timing()) if refused else (row.forward, row.total)
    floor = Floor() if case.floor.problem else case.floor
    speed = case.num_tokens / total.median if total.seconds else None
    sent = case.collectives.get(row.name)
    received = {} if sent is None else received_bytes(sent, case.num_ranks)
    text = {
        "fwd": _ms_of(forward),
        "fwd/1": _ratio(forward, floor.one),
        "total": _ms_of(total),
        "total/3": refused or _ratio(total, floor.three),
        "total/4": _ratio(total, floor.four),
        "tokens/s": _number(speed, ",.0f"),
        "stock": refused or _speedup(total, case.base),
        "host": _ms(statistics.median(total.host)) if total.host else "-",
        "first": _number(row.first, ".1f"),
        "MiB": _number(row.peak_bytes, ",.0f", 2**20),
        "gathered": _number(received.get("gathered"), ",.2f", 2**20),
        "scattered": _number(received.get("scattered"), ",.2f", 2**20),
        "value": _number(row.value, ".4f"),
        "sends": _sent(sent or []),
    }
    for column, name in ERRORS.items():
        text[column] = _number(row.errors and getattr(row.errors, name), ".1e")
    # Times of a CPU say little, so only ratios are shown.
    known = {"sends", *columns_of(case)} - (set() if case.on_gpu else ON_GPU)
    return {name: text[name] if name in known else "-" for name in COLUMNS}


def columns_of(case: Case) -> Sequence[str]:
    return OF_STEPS if case.num_layers else OF_HEADS


def table(case: Case) -> str:
    """Return the case as Markdown. A column without a number is left out."""
    texts = {row.name: cells(row, case) for row in case.present}
    names = [name for name in columns_of(case) if any(text[name] != "-" for text in texts.values())]
    of_column = headings(case)
    rows = [{"method": row} | {of_column[name]: text[name] for name in names} for row, text in texts.items()]
    least = LEAST_TOLD * bool(case.num_layers)
    sends = []
    for name, kinds in case.collectives.items():
        sends.append(f"* {name} sends {_sent([kind for kind in kinds if kind.num_bytes >= least])}.")
    notes = [f"* {row.name}: {row.problem}" for row in case.present if row.problem]
    missing = [f"{row.name} ({row.problem})" for row in case.rows if row.missing]
    if missing:
        notes.append(f"Not here: {', '.join(missing)}.")
    body = [*report.table(rows), "", *sends, *([""] if sends else []), *notes]
    return "\n".join([f"### {title(case)}", "", _about(case), "", *body])


def _about(case: Case) -> str:
    """Return a line on the input, and on what times are compared with."""
    drawn = ""
    if case.loss == case.loss:  # not NaN
        drawn = f"Workload: loss {case.loss:.2f} nats, top probability {case.top_probability:.2f}, "
        drawn += f"50th {case.probability_50:.1e}"
        if case.num_above is not None and case.num_outside is not None:
            drawn += f", {case.num_above:.0f} a token above 2^-12, {case.num_outside:.1f} outside the frequent ids"
        drawn += ". "
    if case.num_layers:
        told = f"{case.train_steps} steps on text, which has {case.num_ids:,} ids" if case.num_ids else "Ids are drawn"
        return f"{drawn}{told}. Errors: from the stock model."
    if case.floor.problem or not case.on_gpu:
        return f"{drawn}Floor: {case.floor.problem or 'plain matrix products on this CPU, so ratios only'}."
    return f"{drawn}Floor, of {' / '.join(map(str, case.counts))} products: {_floor(case)} ms."


def summary(cases: Sequence[Case], columns: Sequence[str]) -> list[str]:
    """Return the lines of a Markdown table: a row per method, a column per case, and in each cell some columns.

    If times are asked for, the first row has the plain products.
    """
    # Cases of one task have one heading; others have the products that each of them needs.
    of_cases = [{name: headings(case)[name] for name in columns} for case in cases]
    alike = all(each == of_cases[0] for each in of_cases)
    first = "; ".join((of_cases[0] if alike else COLUMNS | NEEDED)[name] for name in columns)
    same_counts = alike and all(case.counts == cases[0].counts for case in cases)
    floor = f"plain GEMMs, ms: {' / '.join(map(str, cases[0].counts)) if same_counts else 'needed'}"
    rows = {floor: {first: floor}}
    for case in cases:
        rows |= {row.name: {first: row.name} for row in case.present}
    for case in cases:
        column = _column(case, cases)
        if column in rows[floor]:
            raise ValueError(f"two cases are called {column}; choose one")
        for line in rows.values():
            line[column] = "-"
        if not case.floor.problem:
            rows[floor][column] = _floor(case)
        for row in case.present:
            text = cells(row, case)
            rows[row.name][column] = "; ".join(text[name] for name in columns)
    timed = {"fwd", "total", "host"} & set(columns)
    if not timed or not all(case.on_gpu and not case.num_layers for case in cases):
        del rows[floor]
    return report.table(list(rows.values()))


def _column(case: Case, cases: Sequence[Case]) -> str:
    """Return the name of a case among others: its shape and vocabulary, and what else they differ in."""
    split = f" / {case.num_ranks}" if case.num_ranks > 1 else ""
    task = f"{case.task}, " if len({other.task for other in cases}) > 1 else ""
    name = f"{task}{case.shape}, V {case.vocab_size:,}{split}"
    if len({other.rung for other in cases}) > 1:
        name += f", {case.rung}"
    if len({other.num_tokens for other in cases}) > 1:
        name += f", N {case.num_tokens:,}"
    return name + (f", {case.ignored:.0%} ignored" if case.ignored else "")


def received_bytes(kinds: Sequence[Collective], num_ranks: int) -> dict[str, float]:
    """Return the bytes that a rank receives by all-gathers, and by sums; an all-reduce counts as both."""
    found = {"gathered": 0.0, "scattered": 0.0}
    for kind in kinds:
        num_bytes = kind.count * kind.num_bytes * (num_ranks - 1) / num_ranks
        if kind.name.startswith("all_"):
            found["gathered"] += num_bytes
        if kind.name != "all_gather":
            found["scattered"] += num_bytes
    return found


def _sent(kinds: Sequence[Collective]) -> str:
    """Return the collectives of a step in words; times where there are GPUs."""
    parts = []
    for kind in kinds:
        parts.append(f"{kind.count} {kind.name} of {kind.num_bytes / 2**20:,.2f} MiB")
        if kind.seconds is not None and kind.exposed is not None:
            parts[-1] += f" in {_ms(kind.seconds)} ms, {_ms(kind.exposed)} exposed"
    return ", ".join(parts) or "nothing"


def _number(value: float | None, form: str, unit: float = 1.0) -> str:
    return "-" if value is None else f"{value / unit:{form}}"


def _ratio(timing: Timing, products: Timing) -> str:
    return f"{timing.median / products.median:.2f}" if timing.seconds and products.seconds else "-"


def _speedup(total: Timing, base: Row | None) -> str:
    """Return the speed over the base's: the median over rounds."""
    if base is None or not total.seconds:
        return "-"
    rounds = zip(base.total.seconds, total.seconds, strict=True)
    return f"{statistics.median(theirs / mine for theirs, mine in rounds):.3f}"


def _floor(case: Case) -> str:
    """Return the milliseconds of each count of products."""
    timings = (case.floor.one, case.floor.three, case.floor.four)
    return " / ".join(_ms(timing.median) if timing.seconds else "-" for timing in timings)


def _ms_of(timing: Timing) -> str:
    return _ms(timing.median, timing.spread) if timing.seconds else "-"


def _ms(seconds: float, spread: float | None = None) -> str:
    """Return milliseconds, and in brackets their spread to the same digits."""
    digits = 3 if seconds < 1e-3 else 2 if seconds < 0.1 else 1
    text = f"{seconds * 1e3:.{digits}f}"
    return text if spread is None else f"{text} ({spread * 1e3:.{digits}f})"


def write_figure(path: Path, environment: dict[str, Any], cases: Sequence[Case]) -> None:
    """Draw bars of time, and of memory below them; up to three cases side by side."""
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
            axes[band * len(panels)][column].set_title(title(case).replace(", D", "\nD", 1), fontsize=9)


def _time_panel(axis: Any, case: Case) -> None:
    """Draw times over the times of plain products, or over the times of the base of whole steps."""
    steps = any(row.total.seconds for row in case.present)
    floor, count = (case.floor.three, case.counts[1]) if steps else (case.floor.one, case.counts[0])
    unit = f"{count} plain matrix products"
    if case.num_layers and case.base is not None:
        floor, unit = case.base.total, f"step of {case.base.name}"
    values, spreads, labels = [], [], []
    for row in case.present:
        timing, problem = row.total if steps else row.forward, row.problem or case.floor.problem
        values.append(0.0 if problem else timing.median / floor.median)
        spreads.append(0.0 if problem else timing.spread / floor.median)
        label = problem.partition(":")[0] or f"{values[-1]:.2f}"
        labels.append(label if problem or not case.on_gpu else f"{label}   {_ms(timing.median)} ms")
    _bars(axis, case, values, labels, f"time / {unit}" + ("" if case.on_gpu else " (CPU)"), spreads)
    axis.axvline(1.0, color="black", linewidth=0.8, linestyle="--", zorder=0)


def _memory_panel(axis: Any, case: Case) -> None:
    mib = [(row.peak_bytes or 0) / 2**20 for row in case.present]
    labels = [_number(row.peak_bytes, ",.0f", 2**20) for row in case.present]
    unit = "peak MiB" if case.num_layers else "peak MiB above inputs and gradients"
    _bars(axis, case, mib, labels, unit)


def _bars(
    axis: Any, case: Case, values: list[float], labels: list[str], unit: str, spreads: list[float] | None = None
) -> None:
    rows = [(row.name, row.ours) for row in case.present]
    report.bars(axis, rows, values, labels, spreads or [0.0] * len(values))
    axis.set_xlabel(unit, fontsize=8)
