"""Tables for the terminal and for pages, and the README's picture, of what ``records`` holds."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cce_dist.tools.report import OURS_COLOR, picture
from cce_dist.tools.report import table as markdown
from records import Case, Collective, Floor, Row, Timing

COLUMNS = {  # names of --columns: headings
    "fwd": "fwd ms (IQR)",
    "fwd/1": "/ GEMMs of forward",
    "total": "fwd+bwd ms (IQR)",
    "total/3": "/ GEMMs",
    "total/4": "/ GEMMs, logits twice",
    "base": "x first",
    "host": "host ms",
    "MiB": "MiB",
    "gathered": "gathered MiB",
    "scattered": "scattered MiB",
    "value": "loss",
    "loss": "err loss",
    "dE": "err dE",
    "dC": "err dC",
    "mean-dE": "err mean dE",
    "sends": "sends",
}
OF_HEADS = ("fwd", "fwd/1", "total", "total/3", "total/4", "host", "MiB", "dE", "dC", "mean-dE", "loss")
OF_STEPS = ("total", "base", "host", "MiB", "gathered", "scattered", "value", "loss", "dE", "dC")
ERRORS = {"loss": "loss", "dE": "d_hidden", "dC": "d_weight", "mean-dE": "d_hidden_mean"}
ON_GPU = {"fwd", "total", "host", "MiB"}  # columns that a table of a CPU does not have
LEAST_TOLD = 1 << 16  # bytes of the smallest collective that is listed for whole steps

SCATTER_BASE = "torch-compile"
SLICES = {"4096x16032": "llama-3-8b / 8"}
MOST_MEMORY = 12  # the right edge
MOST_TIME = 2.4  # slower methods are drawn at the edge, with their number
# What a reader calls each method, where its name goes, and the corner of the text that is put there.
SCATTER_LABELS: dict[str, tuple[str, tuple[float, float], str]] = {
    "cce-dist-default": ("cce_dist", (-9, -11), "right"),
    "cce-dist-filtered": ("cce_dist, filtered", (9, -3), "left"),
    "torch": ("PyTorch", (4, 11), "right"),
    "torch-lce": ("F.linear_cross_entropy", (0, 11), "center"),
    SCATTER_BASE: ("torch.compile", (8, 12), "center"),
    "liger": ("Liger", (11, -4), "left"),
    "cce-exact": ("Apple's CCE", (0, -20), "center"),
}


def title(case: Case) -> str:
    """Return the heading of a case's table."""
    ignored = f", {case.ignored:.0%} ignored" if case.ignored else ""
    split = f" / {case.num_ranks}" if case.num_ranks > 1 else ""
    stage = f"end of {case.stage}'s last stage, " if case.stage else ""
    rung = f", {case.rung}" if case.rung != "trained" else ""
    task = f"{case.task}, " if case.task else ""
    layers = f", {case.num_layers} layers, sequences of {case.length:,}" if case.num_layers else ""
    return (
        f"{stage}{task}{case.shape}{rung}, N {case.num_tokens:,}, D {case.hidden_size:,}, V {case.vocab_size:,}{split}"
        f"{layers}, {case.dtype}{ignored}{', synchronised calls' if case.wall else ''}"
    )


def headings(case: Case) -> dict[str, str]:
    """Return the heading of each column by what ``--columns`` calls it."""
    named = COLUMNS | ({} if case.base is None else {"base": f"x {case.base.name}"})
    if case.num_layers:
        return named | {"total": "step ms (IQR)", "MiB": "peak MiB", "dE": "err body", "dC": "err head"}
    ratios = zip(("fwd/1", "total/3", "total/4"), case.counts, strict=True)
    return named | {name: f"/{count} GEMM{'s' * (count > 1)}" for name, count in ratios}


def cells(row: Row, case: Case) -> dict[str, str]:
    """Return a row's text by column, "-" where there is no number, and for a refused method the reason."""
    refused = row.problem.partition(":")[0]
    forward, total = (Timing(), Timing()) if refused else (row.forward, row.total)
    floor = Floor() if case.floor.problem else case.floor
    sent = case.collectives.get(row.name)
    received = {} if sent is None else received_bytes(sent, case.num_ranks)
    text = {
        "fwd": _ms_of(forward),
        "fwd/1": _ratio(forward, floor.one),
        "total": _ms_of(total),
        "total/3": refused or _ratio(total, floor.three),
        "total/4": _ratio(total, floor.four),
        "base": refused or _ratio(Timing() if case.base is None else case.base.total, total),
        "host": _ms(statistics.median(total.host)) if total.host else "-",
        "MiB": _number(row.peak_bytes, ",.0f", 2**20),
        "gathered": _number(received.get("gathered"), ",.2f", 2**20),
        "scattered": _number(received.get("scattered"), ",.2f", 2**20),
        "value": _number(row.value, ".4f"),
        "sends": _sent(sent or []),
    }
    for column, name in ERRORS.items():
        text[column] = _number(row.errors and getattr(row.errors, name), ".1e")
    # Times of a CPU say little, so only ratios are shown.
    return {name: "-" if name in ON_GPU and not case.on_gpu else text[name] for name in COLUMNS}


def table(case: Case) -> str:
    """Return the case as Markdown. A column without a number is left out."""
    texts = {row.name: cells(row, case) for row in case.present}
    columns = OF_STEPS if case.num_layers else OF_HEADS
    names = [name for name in columns if any(text[name] != "-" for text in texts.values())]
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
    body = [*markdown(rows), "", *sends, *([""] if sends else []), *notes]
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
        return f"{drawn}Floor: {case.floor.problem or 'plain matmuls on this CPU, so ratios only'}."
    return f"{drawn}Floor, of {' / '.join(map(str, case.counts))} matmuls: {_floor(case)} ms."


def summary(cases: Sequence[Case], columns: Sequence[str]) -> list[str]:
    """Return the lines of a Markdown table: a row per method, a column per case, and in each cell some columns.

    If times are asked for, the first row has the plain matmuls.

    Raises:
        ValueError: Two cases have the same name.
    """
    # Cases of one task have one heading, which says how many matmuls they need.
    of_cases = [{name: headings(case)[name] for name in columns} for case in cases]
    alike = all(each == of_cases[0] for each in of_cases)
    first = "; ".join((of_cases[0] if alike else COLUMNS)[name] for name in columns)
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
    return markdown(list(rows.values()))


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


def _ratio(timing: Timing, floor: Timing) -> str:
    return f"{timing.median / floor.median:.2f}" if timing.seconds and floor.seconds else "-"


def _floor(case: Case) -> str:
    """Return the milliseconds of each count of matmuls."""
    timings = (case.floor.one, case.floor.three, case.floor.four)
    return " / ".join(_ms(timing.median) if timing.seconds else "-" for timing in timings)


def _ms_of(timing: Timing) -> str:
    return _ms(timing.median, timing.spread) if timing.seconds else "-"


def _ms(seconds: float, spread: float | None = None) -> str:
    """Return milliseconds, and in brackets their spread to the same digits."""
    digits = 3 if seconds < 1e-3 else 2 if seconds < 0.1 else 1
    text = f"{seconds * 1e3:.{digits}f}"
    return text if spread is None else f"{text} ({spread * 1e3:.{digits}f})"


def write_scatter(path: Path, files: Sequence[tuple[dict[str, Any], Case]]) -> None:
    """Draw the README's picture: time over memory, both over torch.compile's, a panel for each case, a point for each method.

    Each case is given with its file's environment.

    Raises:
        ValueError: A case has no row of ``torch-compile``.
    """
    with picture(path, "", (4 * len(files), 4.5), dpi=120) as figure:
        axes = figure.subplots(1, len(files), sharey=True, squeeze=False)
        for axis, (environment, case) in zip(axes[0], files, strict=True):
            _scatter_panel(axis, environment, case)
        axes[0][0].set_ylabel("time / torch.compile's", fontsize=14)
        figure.supxlabel("memory / torch.compile's (logarithmic)", fontsize=14)


def _scatter_panel(axis: Any, environment: dict[str, Any], case: Case) -> None:
    rows = {row.name: row for row in case.present if not row.problem and row.peak_bytes}
    if SCATTER_BASE not in rows:
        raise ValueError(f"{case.shape} has no row of {SCATTER_BASE}")
    base = rows[SCATTER_BASE]
    axis.axhline(1, color="#d0d5db", zorder=0)
    axis.axvline(1, color="#d0d5db", zorder=0)
    for name, (label, offset, side) in SCATTER_LABELS.items():
        if name not in rows:
            continue
        row, color = rows[name], OURS_COLOR if rows[name].ours else "#5b6773"
        memory, time = (row.peak_bytes or 0) / (base.peak_bytes or 1), row.total.median / base.total.median
        place, mark = (memory, min(time, MOST_TIME)), "^" if time > MOST_TIME else "o"
        axis.plot(*place, mark, color=color, markersize=9)
        style = {"fontsize": 13, "color": color, "weight": "bold" if row.ours else "normal"}
        text = f"{label} {time:.1f}" if time > MOST_TIME else label
        if side == "left" and memory > 0.2:  # away from the right edge
            offset, side = ((-11, -4), "right") if memory < 1 else ((0, -20), "center")
        axis.annotate(text, place, offset, textcoords="offset points", ha=side, **style)
    axis.set_xscale("log")
    axis.set_xlim(0.0025, MOST_MEMORY)
    axis.set_ylim(0, MOST_TIME + 0.2)
    axis.set_xticks([0.01, 0.1, 1, 10], ["1/100", "1/10", "1", "10"])
    axis.tick_params(labelsize=12)
    gpu = environment["device"].removeprefix("NVIDIA ").split()[0]
    axis.set_title(f"{SLICES.get(case.shape, case.shape)}, {case.num_tokens:,} tokens, {gpu}", fontsize=14)
    calls = "wall time, synchronised" if case.wall else "GPU time"
    axis.set_xlabel(f"D {case.hidden_size:,}, V {case.vocab_size:,}; {calls}", fontsize=11)
    axis.spines[["top", "right"]].set_visible(False)
