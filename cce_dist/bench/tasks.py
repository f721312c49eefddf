"""Tasks of log-probabilities and of divergences, checked and timed: ``cce-dist bench --log-probs TASK`` and ``--kl``.

The rules are those of the loss: a method whose values or gradients are wrong gets no time, and the others are timed in turns,
beside the plain products that no method can do without. ``log_probs`` and ``divergence`` have the tasks. A vocabulary that is
split over a group is timed as in ``loop``: every rank checks its own part, and the slowest one's time counts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist import VocabShard
from cce_dist.arguments import device, folder, whole
from cce_dist.bench.cases import TIMEOUT_SECONDS, choose, show_progress
from cce_dist.bench.loop import (
    Clock,
    Errors,
    Floor,
    Job,
    Row,
    Timing,
    _everyone,
    _slowest,
    _worst,
    free_memory,
    relative_error,
    time_in_turns,
)
from cce_dist.bench.shapes import SHAPES, HeadShape
from cce_dist.ranks import in_torchrun, join, own_device, run_ranks
from cce_dist.report import describe, describe_environment, read_json, table, where, write_json

Step = Callable[[], tuple[Tensor, ...]]  # -> value, and where gradients are asked for d_hidden and this rank's d_weight
FILE = "tasks.json"


class Method(NamedTuple):
    """How a row's step is built; ``needs_whole``: for a vocabulary that is not split."""

    build: Callable[[], Step]
    needs_whole: bool = False


class Setting(NamedTuple):
    """What a task is measured on.

    Attributes:
        shape: The head, or the student's.
        teacher_size: Hidden size of a teacher.
        num_tokens: N.
        dtype: Of hidden states and weights.
        device: Where.
        shard: This rank's rows.
        workspace_mib: Budgets, a row each; None: the task's own.
    """

    shape: HeadShape
    teacher_size: int
    num_tokens: int
    dtype: torch.dtype
    device: torch.device
    shard: VocabShard
    workspace_mib: tuple[int, ...] | None = None

    def rows(self, weight: Tensor) -> Tensor:
        """This rank's rows of a weight or of its gradient."""
        return weight if self.shard.group is None else weight[self.shard.start : self.shard.stop].clone()

    def ours(self, mib: int, build: Callable[..., Callable[[], Step]]) -> dict[str, Method]:
        """This library's rows; ``build`` takes the options of the call.

        Args:
            mib: The budget where none is asked for.
            build: Gives what builds the step.
        """
        budgets: dict[str, int | None] = {f"cce-dist@{m}MiB": m << 20 for m in self.workspace_mib or (mib,)}
        budgets = {"cce-dist": None, **budgets, "cce-dist-cached": 1 << 40}
        shard = None if self.shard.group is None else self.shard
        rows = {name: Method(build(workspace_bytes=size, shard=shard)) for name, size in budgets.items()}
        return rows | {"cce-dist-torch": Method(build(backend="torch", shard=shard), needs_whole=True)}


class Prepared(NamedTuple):
    """A task in a setting: its methods, what is true of a step of this rank, and plain products by their number."""

    methods: dict[str, Method]
    expected: tuple[Tensor, ...]
    products: dict[int, Callable[[], object]]


class Task(NamedTuple):
    """A row of tables: its name, and what prepares it in a setting; ``with_teacher``: there are two heads."""

    name: str
    prepare: Callable[[Setting], Prepared]
    with_teacher: bool = False


@dataclass
class Case:
    """One table: a task, where it was measured, the rows, and the seconds of so many plain products of one rank's shard."""

    task: str
    shape: str
    num_tokens: int
    hidden_size: int
    vocab_size: int
    teacher_size: int
    num_ranks: int
    dtype: str
    on_gpu: bool
    rows: list[Row]
    products: dict[str, Timing]

    @property
    def title(self) -> str:
        teacher = f", teacher D {self.teacher_size:,}" if self.teacher_size else ""
        sizes = f"D {self.hidden_size:,}, V {self.vocab_size:,}" + (
            f" / {self.num_ranks}" if self.num_ranks > 1 else ""
        )
        return f"{self.task}, {self.shape}, N {self.num_tokens:,}, {sizes}{teacher}"

    @property
    def counts(self) -> list[int]:
        return sorted(map(int, self.products))


@dataclass
class Results:
    """What a command measured: every round's seconds, so that any statistic can be taken later."""

    environment: dict[str, Any]
    cases: list[Case]


def read(path: Path) -> Results:
    """Read a file of tasks. Raises ValueError if it is something else."""
    return read_json(path, Results, FILE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that the modules of the tasks have as programs."""
    add = parser.add_argument
    add("--shape", choices=SHAPES, help="the head (default: llama-3-8b; on a CPU toy)")
    add("--tokens", type=whole(1), help="number of tokens (default: 8192; on a CPU 256)")
    add("--methods", nargs="+", metavar="METHOD", help="rows of the table (default: all)")
    add("--repeats", type=whole(1), default=20)
    add("--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--out", type=folder, help=f"folder for {FILE}")


def as_command(args: argparse.Namespace, teacher_size: int | None = None) -> argparse.Namespace:
    """The options of such a program as those of ``cce-dist bench``."""
    on_gpu = torch.device(args.device).type == "cuda"
    shape, tokens = args.shape or ("llama-3-8b" if on_gpu else "toy"), args.tokens or (8192 if on_gpu else 256)
    more = {"shapes": [shape], "tokens": [tokens], "teacher_size": teacher_size, "tp": None, "workspace": None}
    return argparse.Namespace(**vars(args) | more)


def run(args: argparse.Namespace, tasks: Sequence[Task]) -> int:
    """Measure tasks with the options of ``cce-dist bench``, as a rank of torchrun or alone.

    Returns:
        0, or 1 if a row of this library has no time (wrong, or failed).
    """
    num_ranks = max(args.tp or [1])
    if in_torchrun() and args.tp:
        join(own_device(args.device), TIMEOUT_SECONDS)
        try:
            return _measure_all(args, tasks)
        finally:
            dist.destroy_process_group()
    if num_ranks == 1:
        return _measure_all(args, tasks)
    if torch.device(args.device).type == "cuda" and num_ranks > torch.cuda.device_count():
        raise SystemExit(f"cce-dist bench: --tp {num_ranks}, but this machine has {torch.cuda.device_count()} GPUs")
    run_ranks(_measure_all, num_ranks, args, tasks, device=args.device, timeout_seconds=TIMEOUT_SECONDS)
    return _exit_code(read(args.out / FILE).cases)


def _measure_all(args: argparse.Namespace, tasks: Sequence[Task]) -> int:
    """Measure every case; the first rank prints each, and writes all, as soon as it is known."""
    first_rank = not dist.is_initialized() or dist.get_rank() == 0
    group = dist.group.WORLD if dist.is_initialized() else None
    where_to = torch.device(args.device)
    if where_to.type == "cuda":
        if group is None and where_to.index is not None:
            torch.cuda.set_device(where_to)
        where_to = torch.device("cuda", torch.cuda.current_device())
    results = Results(describe_environment(where_to), [])
    for name, num_tokens, task in product(args.shapes, args.tokens, tasks):
        shape = SHAPES[name]
        setting = Setting(
            shape, args.teacher_size or shape.hidden_size, num_tokens, getattr(torch, args.dtype), where_to,
            VocabShard.even(shape.vocab_size, group), tuple(args.workspace) if args.workspace else None,
        )  # fmt: skip
        case = _measure(task, name, setting, args)
        results.cases.append(case)
        free_memory(torch.empty(0, device=where_to))
        if first_rank:
            show_progress("")
            print(
                "\n".join([f"### {case.title}; {where(results.environment)}", "", *table(lines(case)), ""]), flush=True
            )
            if args.out:
                args.out.mkdir(parents=True, exist_ok=True)
                write_json(args.out / FILE, results)
    return _exit_code(results.cases)


def _exit_code(cases: Sequence[Case]) -> int:
    return int(not cases or any(row.ours and row.problem for case in cases for row in case.rows))


def _measure(task: Task, name: str, setting: Setting, args: argparse.Namespace) -> Case:
    show_progress(f"{task.name}, {name}: drawing and the truth")
    prepared = task.prepare(setting)
    methods = choose(args.methods, prepared.methods)
    if setting.shard.group_size > 1:
        methods = {name: method for name, method in methods.items() if not method.needs_whole}
    steps = {name: method.build for name, method in methods.items()}
    rows, products = measure(steps, prepared.expected, prepared.products, args.repeats, setting.shard, show_progress)
    teacher_size = setting.teacher_size if task.with_teacher else 0
    return Case(
        task.name, name, setting.num_tokens, *setting.shape, teacher_size, setting.shard.group_size, args.dtype,
        setting.device.type == "cuda", rows, products,
    )  # fmt: skip


def measure(
    methods: dict[str, Callable[[], Step]], expected: tuple[Tensor, ...], products: Mapping[int, Callable[[], object]],
    repeats: int, shard: VocabShard | None = None, progress: Callable[[str], None] = lambda line: None,
) -> tuple[list[Row], dict[str, Timing]]:  # fmt: skip
    """Check every method, then time those that are right, in turns.

    Args:
        methods: By name, what builds the step of each.
        expected: The true values of a step.
        products: Plain products, by their number.
        repeats: Rounds.
        shard: This rank's rows; every rank of its group calls it, and gets the same.
        progress: Gets a line as each step begins.

    Returns:
        A row for each method, and the seconds of so many plain products.
    """
    shard = VocabShard(0, 1, 1) if shard is None else shard
    found = []
    for name, build in methods.items():
        progress(f"checking {name}")
        row, step = _checked(name, build, expected)
        found.append((_worst(_everyone(row, shard)), step))
    owner, floor = Floor(), {count: Timing() for count in products}
    jobs = [Job(owner, floor[count], call) for count, call in products.items()]
    jobs += [Job(row, row.total, step) for row, step in found if step is not None and not row.problem]
    time_in_turns(jobs, repeats, Clock(expected[0].device, shard), progress)
    ranks = _everyone([job.timing for job in jobs], shard)
    for job, of_ranks in zip(jobs, zip(*ranks, strict=True), strict=True):
        job.timing.seconds = _slowest([timing.seconds for timing in of_ranks])
        job.timing.host = _slowest([timing.host for timing in of_ranks])
    return [row for row, _ in found], {str(count): timing for count, timing in floor.items()}


def _checked(name: str, build: Callable[[], Step], expected: tuple[Tensor, ...]) -> tuple[Row, Step | None]:
    """Build and check a method: its row, and its step if that is right."""
    row, step = Row(name, name.startswith("cce-dist")), None
    try:
        step = build()
        row.errors = _errors(step(), expected)
        row.problem = row.errors.verdict()
        if expected[0].is_cuda and not row.problem:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            outputs = sum(x.nbytes for x in step())
            torch.cuda.synchronize()
            row.peak_bytes = max(0, torch.cuda.max_memory_allocated() - before - outputs)
    except ImportError as error:
        row.problem, row.missing = describe(error), True
    # Whatever another library raises, the other methods go on.
    except Exception as error:
        row.problem = describe(error)
    free_memory(expected[0])
    return row, None if row.problem else step


def _errors(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> Errors:
    """Relative errors; those of gradients are 0 where there are none."""
    of_value, *of_grads = (
        relative_error(x.reshape(-1, 1), y.reshape(-1, 1)) for x, y in zip(found, expected, strict=True)
    )
    if not of_grads:
        return Errors(of_value, 0.0, 0.0, 0.0)
    of_mean = (found[1].mean(0, keepdim=True, dtype=torch.float32), expected[1].mean(0, keepdim=True))
    d_hidden, d_weight = of_grads
    return Errors(of_value, d_hidden, d_weight, relative_error(*of_mean))


def text(case: Case) -> str:
    """The case as Markdown."""
    return "\n".join([f"### {case.title}", "", *table(lines(case)), ""])


def lines(case: Case) -> list[dict[str, str]]:
    """The table: the products, then a line for each method."""
    columns = ["ms", *map(_over, case.counts), "MiB", "err value", "err dE", "err dC"]
    found = []
    for count in case.counts:
        ms = f"{1e3 * case.products[str(count)].median:.2f}" if case.on_gpu else ""
        found.append({"method": _over(count)[1:], **dict.fromkeys(columns, ""), "ms": ms})
    return [*found, *({"method": row.name, **_cells(row, case, columns)} for row in case.rows)]


def summary(cases: Sequence[Case], columns: Sequence[str]) -> list[str]:
    """The lines of one table of several cases: a row per task and method, by the names of ``COLUMNS`` of ``bench``.

    Args:
        cases: Tasks, one after another.
        columns: "total", "total/3" (over the fewest products that do the task), "total/4" (over those that compute logits once
            more for backward), "MiB", "dE", "dC", "loss" (the values).

    Raises:
        ValueError: A column is another one.
    """
    found = []
    for case in cases:
        keys = {
            "total": "ms", "total/3": _over(case.counts[0]), "total/4": _over(case.counts[-1]), "MiB": "MiB", "dE": "err dE",
            "dC": "err dC", "loss": "err value",
        }  # fmt: skip
        unknown = [column for column in columns if column not in keys]
        if unknown:
            raise ValueError(f"a table of tasks has no column {unknown[0]}; choose from {', '.join(keys)}")
        for row in case.rows:
            if row.missing:
                continue
            cells = _cells(row, case, list(keys.values()))
            names = {"total/3": "over products", "total/4": "over them and logits again"}
            found.append(
                {"task": case.title, "method": row.name} | {names.get(c, keys[c]): cells[keys[c]] for c in columns}
            )
    return table(found)


def _over(count: int) -> str:
    return f"/{count} GEMM{'s' * (count > 1)}"


def _cells(row: Row, case: Case, columns: Sequence[str]) -> dict[str, str]:
    """A row's text by column."""
    cells = dict.fromkeys(columns, "")
    if row.problem or row.errors is None:
        return cells | {columns[0]: row.problem}
    cells |= {_over(count): f"{row.total.median / case.products[str(count)].median:.3f}" for count in case.counts}
    numbers = {"err value": row.errors.loss, "err dE": row.errors.d_hidden, "err dC": row.errors.d_weight}
    memory = "" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:,.0f}"
    ms = f"{1e3 * row.total.median:.2f}" if case.on_gpu else ""
    return cells | {"ms": ms, "MiB": memory} | {name: f"{error:.1e}" for name, error in numbers.items()}
