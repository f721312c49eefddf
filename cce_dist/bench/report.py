"""What a run found: a Markdown table for the terminal, JSON, and a figure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cce_dist.bench.collectives import Collective
from cce_dist.bench.measure import Errors, Floor, Row, Timing
from cce_dist.bench.workload import Workload

OURS_COLOR, OTHER_COLOR = "#1f6fb4", "#9aa5b1"


@dataclass
class Case:
    """One table: a shape, a number of tokens, a share of ignored labels, and what was measured there.

    ``on_gpu`` decides whether times are shown: on a CPU only ratios to the plain products of the same run are. ``stage`` is the
    framework whose last stage was measured, or nothing.
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

    @classmethod
    def of(
        cls, shape: str, ignored: float, workload: Workload, rows: list[Row], floor: Floor, num_ranks: int = 1,
        collectives: dict[str, list[Collective]] | None = None, stage: str = "",
    ) -> Case:  # fmt: skip
        hidden, weight = workload.hidden, workload.weight
        return cls(
            shape=shape,
            num_tokens=hidden.shape[0],
            hidden_size=hidden.shape[1],
            vocab_size=weight.shape[0],
            ignored=ignored,
            dtype=str(hidden.dtype).removeprefix("torch."),
            on_gpu=hidden.is_cuda,
            loss=workload.loss,
            top_probability=workload.top_probability,
            probability_50=workload.probability_50,
            rows=rows,
            floor=floor,
            num_ranks=num_ranks,
            collectives=collectives or {},
            stage=stage,
        )

    @property
    def present(self) -> list[Row]:
        """Rows of methods that could at least be tried here."""
        return [row for row in self.rows if not row.missing]

    @property
    def title(self) -> str:
        ignored = f", {self.ignored:.0%} ignored" if self.ignored else ""
        split = f" / {self.num_ranks}" if self.num_ranks > 1 else ""
        stage = f"end of {self.stage}'s last stage, " if self.stage else ""
        return (
            f"{stage}{self.shape}, N {self.num_tokens:,}, D {self.hidden_size:,}, V {self.vocab_size:,}{split}, "
            f"{self.dtype}{ignored}"
        )


def table(case: Case) -> str:
    """The case as Markdown, aligned to be read on a terminal too."""
    floor = case.floor
    drawn = (
        f"Workload: loss {case.loss:.2f} nats, top probability {case.top_probability:.2f}, "
        f"50th {case.probability_50:.1e}. Floor: "
    )
    if floor.problem:
        drawn += floor.problem + "."
    elif case.on_gpu:
        drawn += f"1 GEMM {_ms(floor.gemms(1))} ms, 3 GEMMs {_ms(floor.gemms(3))} ms, 4 GEMMs {_ms(floor.gemms(4))} ms."
    else:
        drawn += "plain matrix products on this CPU, so ratios only."

    lines = [_cells(row, case) for row in case.present]
    header = list(lines[0]) if lines else []
    widths = [max(len(name), *(len(line[name]) for line in lines)) for name in header]

    def joined(cells: list[str]) -> str:
        method, *numbers = [f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)]
        return f"| {' | '.join([f'{method.strip():<{widths[0]}}', *numbers])} |"

    rule = f"|{'-' * (widths[0] + 2)}|{'|'.join('-' * (width + 1) + ':' for width in widths[1:])}|" if lines else ""
    notes = [f"* {row.name}: {row.problem}" for row in case.present if row.problem]
    missing = [f"{row.name} ({row.problem})" for row in case.rows if row.missing]
    if missing:
        notes.append(f"Not here: {', '.join(missing)}.")
    body = [joined(header), rule, *(joined(list(line.values())) for line in lines)] if lines else []
    return "\n".join([f"### {case.title}", "", drawn, "", *body, "", *_sent(case), *notes])


def _sent(case: Case) -> list[str]:
    """The collectives of a step of each method, a line each; times where there are GPUs."""
    lines = []
    for name, kinds in case.collectives.items():
        parts = []
        for kind in kinds:
            parts.append(f"{kind.count} {kind.name} of {kind.num_bytes / 2**20:,.2f} MiB")
            if kind.seconds is not None and kind.exposed is not None:
                parts[-1] += f" in {_ms(kind.seconds)} ms, {_ms(kind.exposed)} exposed"
        lines.append(f"* {name} sends {', '.join(parts) or 'nothing'}.")
    return [*lines, ""] if lines else []


def _cells(row: Row, case: Case) -> dict[str, str]:
    """A row's text by column; a method that was refused has its errors, and the reason where the ratios would be."""
    refused = row.problem.partition(":")[0]

    def ms(timing: Timing) -> str:
        return _ms(timing.median, timing.spread) if not refused else "-"

    def ratio(timing: Timing, gemms: int) -> str:
        return "-" if refused or case.floor.problem else f"{timing.median / case.floor.gemms(gemms):.2f}"

    cells = {"method": row.name}
    if case.on_gpu:
        cells["fwd ms (IQR)"] = ms(row.forward)
    cells["/1 GEMM"] = ratio(row.forward, 1)
    if case.on_gpu:
        cells["fwd+bwd ms (IQR)"] = ms(row.total)
    cells["/3 GEMMs"] = refused or ratio(row.total, 3)
    cells["/4 GEMMs"] = ratio(row.total, 4)
    if case.on_gpu:
        cells["MiB"] = "-" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:,.0f}"
    for name, column in (("d_hidden", "dE"), ("d_weight", "dC"), ("d_hidden_mean", "mean dE"), ("loss", "loss")):
        cells[f"err {column}"] = f"{getattr(row.errors, name):.1e}" if row.errors else "-"
    return cells


def _ms(seconds: float, spread: float | None = None) -> str:
    """Milliseconds, and in brackets their spread to the same digits."""
    digits = 3 if seconds < 1e-3 else 2 if seconds < 0.1 else 1
    text = f"{seconds * 1e3:.{digits}f}"
    return text if spread is None else f"{text} ({spread * 1e3:.{digits}f})"


def write_json(path: Path, environment: dict[str, Any], cases: list[Case]) -> None:
    """Everything, each round's seconds included, so that any other statistic can be taken later."""
    content = {"environment": environment, "cases": [asdict(case) for case in cases]}
    path.write_text(json.dumps(content, indent=1) + "\n")


def read_json(path: Path) -> tuple[dict[str, Any], list[Case]]:
    """Read environment and cases back from what ``write_json`` wrote."""
    content = json.loads(path.read_text())
    for case in content["cases"]:
        case["floor"] = Floor(**_restored(case["floor"]))
        case["rows"] = [Row(**_restored(row)) for row in case["rows"]]
        sent = case.get("collectives", {}).items()
        case["collectives"] = {name: [Collective(**kind) for kind in kinds] for name, kinds in sent}
    return content["environment"], [Case(**case) for case in content["cases"]]


def _restored(record: dict[str, Any]) -> dict[str, Any]:
    """The fields of a row or a floor, with its timings and errors as objects again."""

    def restore(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return Timing(**value) if "seconds" in value else Errors(**value)

    return {name: restore(value) for name, value in record.items()}


def write_figure(path: Path, environment: dict[str, Any], cases: list[Case]) -> None:
    """Bars of time over three matrix products, and of memory below them; up to three cases side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = 2 if cases[0].on_gpu else 1
    columns = min(3, len(cases))
    bands = -(-len(cases) // columns)
    height = 1.2 + 0.3 * max(len(case.present) for case in cases)
    figure, axes = pyplot.subplots(
        bands * panels,
        columns,
        figsize=(1.5 + 4.6 * columns, height * bands * panels),
        squeeze=False,
        layout="constrained",
    )
    for axis in axes.flat:
        axis.set_visible(False)
    for index, case in enumerate(cases):
        band, column = divmod(index, columns)
        time_axis = axes[band * panels][column]
        time_axis.set_title(case.title.replace(", D", "\nD", 1), fontsize=9)
        _time_panel(time_axis, case)
        if case.on_gpu:
            _memory_panel(axes[band * panels + 1][column], case)
    figure.suptitle(f"{environment['device']}, torch {environment['torch']}, {environment['date'][:10]}", fontsize=10)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _time_panel(axis: Any, case: Case) -> None:
    floor = case.floor
    values, spreads, labels = [], [], []
    for row in case.present:
        timed = not (row.problem or floor.problem)
        values.append(row.total.median / floor.gemms(3) if timed else 0.0)
        spreads.append(row.total.spread / floor.gemms(3) if timed else 0.0)
        label = f"{values[-1]:.2f}" if timed else (row.problem or floor.problem).partition(":")[0]
        labels.append(f"{label}   {_ms(row.total.median)} ms" if timed and case.on_gpu else label)
    _bars(axis, case.present, values, labels, spreads)
    axis.axvline(1.0, color="black", linewidth=0.8, linestyle="--", zorder=0)
    axis.set_xlabel("loss + gradient / 3 plain matrix products" + ("" if case.on_gpu else " (CPU)"), fontsize=8)


def _memory_panel(axis: Any, case: Case) -> None:
    mib = [(row.peak_bytes or 0) / 2**20 for row in case.present]
    labels = ["-" if row.peak_bytes is None else f"{m:,.0f}" for row, m in zip(case.present, mib, strict=True)]
    _bars(axis, case.present, mib, labels)
    axis.set_xlabel("peak MiB above inputs and gradients", fontsize=8)


def _bars(
    axis: Any, rows: list[Row], values: list[float], labels: list[str], spreads: list[float] | None = None
) -> None:
    colors = [OURS_COLOR if row.ours else OTHER_COLOR for row in rows]
    whiskers = None if spreads is None else [spread / 2 for spread in spreads]
    axis.barh([row.name for row in rows], values, xerr=whiskers, color=colors, height=0.7, error_kw={"linewidth": 0.8})
    room = max([*values, 1e-9]) * 1.4
    blank = {"facecolor": "white", "edgecolor": "none", "pad": 0.3}  # a label stays readable over the floor's line
    for position, (value, label) in enumerate(zip(values, labels, strict=True)):
        end = value + (whiskers[position] if whiskers else 0.0)
        axis.text(end + 0.01 * room, position, label, va="center", fontsize=7, bbox=blank)
    axis.set_visible(True)
    axis.set_xlim(0, room)
    axis.invert_yaxis()
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
