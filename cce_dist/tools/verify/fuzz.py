"""``cce-dist verify --fuzz 10000``: random calls of every function, on any backend and any number of ranks.

A case follows from seed, number and setting: each failure is printed with the command that repeats it. The loss is compared
with ``oracle``, the other functions with ``reference.py``.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist.filter import GradFilter
from cce_dist.kernels.divergence.heads import KINDS
from cce_dist.kernels.memory import MOST_GROUPS
from cce_dist.tools.verify import cases
from cce_dist.tools.verify.cases import BF16, FP16, FP32, PER_TOKEN, Bounds, Case, Recipe, Split
from cce_dist.tools.verify.check import LAYOUTS, WRITABLE, Error, Function, run_case
from cce_dist.tools.verify.divergence import DIVERGENCE
from cce_dist.tools.verify.log_probs import LOG_PROBS
from cce_dist.tools.verify.loss import RANDOM_LOSS, TOKEN_LOSSES

ROUNDED = 1e-15  # float64's error in a gradient that is 1 minus a probability
# Widens bounds, but for the loss: they follow the baseline's error, which with one or two tokens is nearly 0 by chance.
LUCK = 4


class Setting(NamedTuple):
    """Where cases run."""

    seed: int = 0
    device: str = "cpu"
    backend: str = "auto"
    group: dist.ProcessGroup | None = None  # ranks that share the vocabulary; None: this process alone
    alike: int = 1  # cases in a row that need the same kernels, whose compilation takes nearly all of the time
    function: str = "loss"  # a name of ``SOURCES``

    @property
    def interpreted(self) -> bool:
        return self.device == "cpu" and self.backend == "triton"

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    def command(self, number: int) -> str:
        """Return the command line that repeats one case."""
        launcher = "cce-dist" if self.group is None else f"torchrun --nproc-per-node {self.ranks} -m cce_dist"
        interpreter = "TRITON_INTERPRET=1 " if self.interpreted else ""
        where = f"--backend {self.backend} --device {self.device}"
        where += f" --alike {self.alike}" if self.alike > 1 else ""
        where += f" --function {self.function}" if self.function != "loss" else ""
        return f"{interpreter}{launcher} verify --fuzz 1 --seed {self.seed} --case {number} {where}"


def draw_loss(setting: Setting, number: int) -> cases.LossCase:
    """Draw a call of the loss. ``kind`` draws what kernels are compiled for."""
    where = f"{setting.interpreted}/{setting.device}/{setting.ranks}"
    rng = random.Random(f"{setting.seed}/{number}/{where}")
    kind = random.Random(f"{setting.seed}/{number // setting.alike} of {setting.alike}/{where}")
    filtered = kind.random() < 0.15
    most_n, most_d, most_v = (40, 33, 90) if setting.interpreted else (150, 70, 600)
    if filtered or (setting.device == "cuda" and rng.random() < 0.3):
        most_n, most_v = 2 * most_n, 3 * most_v
    # The fields of a LossCase, and what its problem is made of.
    call = SimpleNamespace(
        shape=(_size(rng, most_n, 0.02),),
        hidden_size=max(2, _size(rng, most_d, 0.0)),
        vocab_size=_size(rng, most_v, 0.0),
        dtype=kind.choice([FP32, FP16] if setting.interpreted else [FP32, FP32, BF16, BF16, FP16]),
        options={}, bias=None, num_tokens=None, upstream=("loss",), scale=1.0, buffer=None, broken=-1,
    )  # fmt: skip
    if kind.random() < 0.5:
        call.hidden_size = -(-call.hidden_size // 16) * 16
    call.autocast = call.dtype != FP32 and kind.random() < 0.15
    _draw_options(rng, kind, call, setting)
    _draw_data(rng, kind, call)
    if filtered:
        _draw_filter(rng, kind, call)
    _draw_terms(rng, kind, call, learnable=not filtered)
    apart = random.Random(f"groups/{setting.seed}/{number}/{where}")
    if not filtered and apart.random() < 0.2:
        _draw_groups(apart, call, setting)
    apart = random.Random(f"token loss/{setting.seed}/{number}/{where}")
    if not filtered and call.logits != "masked" and apart.random() < 0.15:  # autograd of a reference gives NaN there
        _draw_token_loss(apart, call, setting)
    drawn = {name: value for name, value in vars(call).items() if name in cases.LossCase.__dataclass_fields__}
    return cases.LossCase(f"loss {number}", problem=_problem(call, number), **drawn)


def _problem(call: SimpleNamespace, seed: int) -> Recipe:
    """Return a recipe of the logits that ``call.logits`` names.

    "small", "normal", "wide": a standard deviation of 0.01, 1 or 10. "equal": all logits are equal. "up", "down", "gap": all
    logits near 1e4, near -1e4, or one 1e4 above the others; all products are exact in fp32. "masked": some biases are -inf.
    "zipf": a unigram and a likely label.
    """

    def labels(y: Tensor, vocab_size: int) -> Tensor:
        ignore = torch.rand(len(y), generator=torch.Generator().manual_seed(seed)) < call.ignored
        return torch.where(ignore, call.options.get("ignore_index", -100), y)

    sizes = torch.Size(call.shape).numel(), call.hidden_size, call.vocab_size
    biased, large = call.bias is not None, 512.0 if call.dtype == FP16 else 1e4
    if call.logits == "zipf":
        return cases.Zipf(*sizes, bias=biased, labels=labels)
    scale = {"small": 0.01, "wide": 10.0, "equal": 0.0}.get(call.logits, 1.0) / call.hidden_size**0.5
    trap: dict[str, Any] = {
        "up": {"shift": large, "grid": True},
        "down": {"shift": -large, "grid": True},
        "gap": {"spike": large, "grid": True},
        "masked": {"masked": 0.3},
    }
    return cases.Gaussian(*sizes, bias=biased, scale=scale, labels=labels, **trap.get(call.logits, {}))


def _size(rng: random.Random, most: int, zero: float) -> int:
    """Draw a size: often small, sometimes a prime or the edge of a tile, and 0 with probability ``zero``."""
    if rng.random() < zero:
        return 0
    edges = [size for size in (1, 2, 3, 7, 16, 17, 31, 64, 97, 127, 128, 129, 255, 256, 257, 512, 521) if size <= most]
    return rng.choice(edges) if rng.random() < 0.4 else rng.randint(1, rng.choice([max(1, most // 8), most]))


def _draw_options(rng: random.Random, kind: random.Random, call: SimpleNamespace, setting: Setting) -> None:
    def sometimes(which: random.Random, name: str, probability: float, *values) -> None:
        if which.random() < probability:
            call.options[name] = rng.choice(values)

    sometimes(rng, "reduction", 0.6, "none", "sum", "mean")
    sometimes(rng, "ignore_index", 0.3, -1, rng.randrange(call.vocab_size), 2**31 - 1)
    sometimes(kind, "label_smoothing", 0.35, 0.1, 1.0, 1e-3)
    sometimes(kind, "logit_scale", 0.35, 0.7, 3.0, -0.5, 0.0, 1)
    sometimes(kind, "softcap", 0.35, 0.5, 5.0, 30, 200.0)
    sometimes(rng, "z_loss_weight", 0.35, 1e-4, 0.1, -0.01)
    sometimes(rng, "workspace_bytes", 0.4, 1, 5000, 100_000, 1 << 20, 1 << 40)
    sometimes(kind, "return_aux", 0.4, True)
    if call.options.get("reduction", "mean") == "mean":
        sometimes(rng, "num_tokens", 0.3, 1, 101, 1 << 20)
        if "num_tokens" in call.options and rng.random() < 0.5:
            call.num_tokens = rng.choice([torch.int64, torch.int32, FP32])
    if kind.random() < 0.4:
        call.bias = kind.choice([FP32, call.dtype])
    call.ids = rng.choice([torch.int64, torch.int64, torch.int32])
    mode = rng.random()
    if mode < 0.2:
        call.options["sequence_parallel"] = True
        call.shape = (call.shape[0] * setting.ranks,)
    elif mode < 0.35:
        call.options["input_grad"] = "partial"
    if mode > 0.8 and setting.group is not None:
        call.options["reduce_dtype"] = FP32
    shapes = rng.random()
    if shapes < 0.15:
        call.shape = (*call.shape, rng.randint(1, 3))
    elif shapes < 0.2 and "sequence_parallel" not in call.options:
        call.shape = ()  # one vector, one label
    split = rng.choice([cases.even, cases.even, cases.padded, _random_cuts(rng)])
    bounds = split(call.vocab_size, setting.ranks)
    call.shards = lambda vocab_size, ranks: bounds


def _random_cuts(rng: random.Random) -> Split:
    """Return shards of any size, also empty ones. The last one may have padding rows, or nothing else."""

    def cut(vocab_size: int, ranks: int) -> Bounds:
        inner = sorted(rng.randint(0, vocab_size) for _ in range(ranks - 1))
        ends = [0, *inner, vocab_size + rng.choice([0, 0, 1, 40])]
        return list(itertools.pairwise(ends))

    return cut


def _draw_data(rng: random.Random, kind: random.Random, call: SimpleNamespace) -> None:
    call.logits = rng.choice(["normal", "normal", "small", "wide", "up", "down", "gap", "equal"])
    call.ignored = rng.choice([0.0, 0.0, 0.3, 0.9, 1.0])
    call.hidden_of_ignored = rng.choice([None, None, float("nan"), float("inf")])
    call.padding = rng.choice([3.0, 0.0, 1e4, float("nan")])
    arguments = ("input", "linear_weight", "target", "linear_bias", "num_tokens", "loss", *PER_TOKEN)
    plain = rng.random() < 0.3
    call.layouts = {name: "contiguous" if plain else rng.choice(LAYOUTS) for name in arguments}
    call.layouts["grad_weight_out"] = rng.choice(WRITABLE)
    if not call.shape:  # no dim 0 to expand
        call.layouts |= {"input": "strided", "target": "strided"}
    if call.options.get("return_aux"):
        call.upstream = ("loss", *(name for name in PER_TOKEN if kind.random() < 0.4))
    if rng.random() < 0.2:
        call.scale = rng.choice([1e-6, 1e-3, 100.0])
    some = kind.random() < 0.3
    call.wanted = tuple(not some or kind.random() < 0.5 for _ in range(3))
    if call.wanted[1] and kind.random() < 0.25 and not call.autocast:
        call.buffer = kind.choice([FP32, call.dtype])
    call.twice = rng.random() < 0.15
    masked = rng.random() < 0.1 and call.options.get("label_smoothing", 0.0) == 0.0
    if masked and call.bias is not None and call.options.get("logit_scale", 1.0) > 0:
        call.logits = "masked"
        call.layouts |= {"linear_bias": "strided", "linear_weight": "sliced"}
    count = torch.Size(call.shape).numel()
    if call.options.get("reduction") == "none" and count > 1 and rng.random() < 0.1:
        call.broken, call.ignored = rng.randrange(count), 0.0
        call.layouts["input"] = "strided"
        call.options.pop("ignore_index", None)


def _draw_filter(rng: random.Random, kind: random.Random, call: SimpleNamespace) -> None:
    """Add a filter, on logits of which it can drop some; only the loss has an upstream gradient."""
    call.options["grad_filter"] = GradFilter(
        eps=rng.choice([2.0**-12, 2.0**-12, 1e-3, 1e-30, 0.0]),
        compensate=kind.random() < 0.6,
        hidden=kind.random() < 0.8,
        weight=kind.random() < 0.8,
        always=True,
    )
    call.logits, call.upstream = "zipf", ("loss",)
    call.layouts |= {name: "contiguous" for name, layout in call.layouts.items() if layout == "expanded"}


def _draw_terms(rng: random.Random, kind: random.Random, call: SimpleNamespace, learnable: bool) -> None:
    """Add class weights and a learned scale where the loss takes them."""
    refused = bool({"softcap", "sequence_parallel", "input_grad"} & call.options.keys()) or call.buffer is not None
    # With class weights and label smoothing dE and dC are sums of two terms, which bf16 and fp16 round one by one.
    alone = not call.options.get("label_smoothing") or (not refused and call.dtype == FP32)
    call.classes = rng.random() < 0.15 and alone and call.logits != "masked"
    learnable = learnable and call.dtype != FP16 and call.options.get("logit_scale", 1.0) != 0.0
    call.learn_scale = kind.random() < 0.15 and learnable


def _draw_groups(apart: random.Random, call: SimpleNamespace, setting: Setting) -> None:
    """Force groups of tokens, which take the loss alone and one upstream gradient per token."""
    call.options.pop("return_aux", None)
    call.upstream = ("loss",)
    if call.dtype == FP16:  # a gradient made in forward leaves its range; calls that nobody forces never make it there
        call.scale = 1.0
        call.options.pop("z_loss_weight", None)
    expected = apart.choice(["", "upstream", "other"])
    call.expected = expected if call.options.get("reduction") == "none" else ""
    count = torch.Size(call.shape).numel()
    call.in_groups = apart.randint(max(1, count // MOST_GROUPS), max(1, count))
    call.low = setting.backend == "triton" and call.dtype == torch.bfloat16 and apart.random() < 0.5


def _draw_token_loss(apart: random.Random, call: SimpleNamespace, setting: Setting) -> None:
    """Replace the loss by a function of log-probabilities, and remove the options that exclude it."""
    if apart.random() < 0.7:
        _draw_groups(apart, call, setting)
    call.token_loss, call.upstream, call.expected, call.classes = apart.choice([*TOKEN_LOSSES]), ("loss",), "", False
    for name in ("label_smoothing", "z_loss_weight", "return_aux"):
        call.options.pop(name, None)


def draw_log_probs(setting: Setting, number: int) -> cases.LogProbCase:
    kind, r = _randoms(setting, number)
    options, problem, dtype, shards = _common(kind, r, setting)
    num_ids = kind.choice((0, 1, 2, 5, 64))
    outputs = kind.sample(("log_probs", "lse", "entropy"), kind.randint(1, 3))
    own = tuple(name for name in ("logit_scale", "temperature") if kind.random() < 0.3)
    if kind.random() < 0.3:
        options["softcap"] = r.choice((1.0, 5.0, 30.0))
    for name, least in (("logit_scale", -2.0), ("temperature", 0.2)):
        if name not in own and kind.random() < 0.3:
            options[name] = r.uniform(least, 2.0)
    on_triton = setting.backend == "triton" or (setting.backend == "auto" and setting.device == "cuda")
    if kind.random() < 0.2 and on_triton:
        options["batch_invariant"] = True
    change = r.choice((None, cases.ignored, cases.repeated)) if num_ids > 1 else None
    fields: dict[str, Any] = {"num_ids": num_ids, "change": change, "own": own, "upstream": tuple(outputs)}
    return cases.LogProbCase(f"log-probs {number}", "", options, problem, shards, dtype, **fields)


def draw_kept(setting: Setting, number: int) -> cases.LogProbCase:
    """Draw a call of ``linear_log_probs`` over lists of ids."""
    case = draw_log_probs(setting, number)
    r = _randoms(setting, number)[1]
    longest, whole = r.choice((1, 4, 20, 100, 1000)), r.choice((0, 0, 1, 3))
    return replace(case, name=f"kept {number}", num_ids=0, change=None, kept=longest, whole=whole)


def draw_divergence(setting: Setting, number: int) -> cases.DivergenceCase:
    kind, r = _randoms(setting, number)
    options, problem, dtype, shards = _common(kind, r, setting)
    options["kind"] = kind.choice(KINDS)
    if options["kind"] == "jsd":
        options["beta"] = r.uniform(0.02, 0.98)
    for name in ("softcap", "teacher_softcap"):
        if kind.random() < 0.3:
            options[name] = r.choice((1.0, 5.0, 30.0))
    for name in ("logit_scale", "teacher_logit_scale"):
        if kind.random() < 0.3:
            options[name] = r.uniform(-2.0, 2.0)
    if "sequence_parallel" not in options and kind.random() < 0.2:
        options["input_grad"] = "partial"
    spread, masked = r.choice((0.1, 1.0, 3.0, 10.0)), r.choice((0.0, 0.0, 0.5, 1.0))
    padding = r.choice((0, 7)) if shards is cases.padded else 0
    draft = r.choice(("", "", "whole", "split"))
    fields: dict[str, Any] = {"spread": spread, "masked": masked, "teacher_padding": padding, "draft": draft}
    return cases.DivergenceCase(f"divergence {number}", "", options, problem, shards, dtype, **fields)


def _randoms(setting: Setting, number: int) -> tuple[random.Random, random.Random]:
    """Return two generators: the first draws what kernels are compiled for, the second the rest of the case."""
    name = f"{setting.function} {setting.seed}"
    return random.Random(f"{name} {number // setting.alike}"), random.Random(f"{name} {number} {setting.ranks}")


def _common(
    kind: random.Random, r: random.Random, setting: Setting
) -> tuple[dict[str, Any], Recipe, torch.dtype, Split]:
    """Draw what all functions but the loss have in common: options, problem, dtype and shards."""
    options: dict[str, Any] = {}
    if kind.random() < 0.3:
        options["workspace_bytes"] = r.choice((1, 1 << 14, 1 << 18))
    dtype = kind.choice((FP32, FP32, FP16, FP16 if setting.interpreted else BF16))  # the interpreter misreads bf16
    num_tokens = r.choice((1, 2, 7, 24, 37, 60))
    shards = r.choice((cases.even, cases.uneven, cases.with_empty, cases.padded))
    if kind.random() < 0.2:
        options["sequence_parallel"], num_tokens = True, 12 * setting.ranks
    odd = 0 if kind.random() < 0.5 else r.randint(1, 15)  # 0: sizes are multiples of 16
    hidden_size, vocab_size = 16 * r.randint(1, 3) + odd, 16 * r.randint(4, 14) + odd
    scale = r.choice((0.05, 0.5, 2.0) if dtype == FP32 else (0.05, 0.2, 0.5))
    problem = cases.Gaussian(num_tokens, hidden_size, vocab_size, bias=kind.random() < 0.4, scale=scale)
    return options, problem, dtype, shards


SOURCES: dict[str, tuple[Function, Callable[[Setting, int], Case]]] = {
    "loss": (RANDOM_LOSS, draw_loss),
    "log-probs": (LOG_PROBS, draw_log_probs),
    "kept": (LOG_PROBS, draw_kept),
    "divergence": (DIVERGENCE, draw_divergence),
}


def run_one(setting: Setting, number: int) -> list[Error]:
    """Run one case; every rank of the group calls this."""
    function, draw = SOURCES[setting.function]
    case = draw(setting, number)
    errors = run_case(function, case, setting.group, setting.device, setting.backend, setting.seed)
    if function is RANDOM_LOSS:
        return errors
    return [error._replace(bound=LUCK * error.bound + ROUNDED) for error in errors]


def run_many(setting: Setting, first: int, count: int, report: Callable[[str], None]) -> list[str]:
    """Run ``count`` cases; every rank of the group calls this. Returns a text for each failure."""
    failures: list[str] = []
    started = said = time.monotonic()
    for done, number in enumerate(range(first, first + count), 1):
        line = _on_all_ranks(_verdict(setting, number), setting)
        if line:
            failures.append(f"FAIL {setting.command(number)}\n     {line}")
            report(failures[-1])
        if time.monotonic() - said > 5:
            said = time.monotonic()
            report(f"{done} of {count} cases, {done / (said - started):.0f} a second, {len(failures)} failures")
    seconds = time.monotonic() - started
    report(f"{count - len(failures)} of {count} random cases hold, seed {setting.seed}, {seconds:.0f} s")
    return failures


def _verdict(setting: Setting, number: int) -> str:
    """Return a line with the failures of a case on this rank, or an empty string."""
    try:
        wrong = [error for error in run_one(setting, number) if not error.ok]
    except Exception as error:  # a call that raises is a failure of this case, not the end of the run
        said = f"{type(error).__name__}: {error}".splitlines()[0]
    else:
        said = "; ".join(f"{e.quantity}: error {e.error:.1e} bound {e.bound:.1e}" for e in wrong)
    return f"{said} | {SOURCES[setting.function][1](setting, number)}" if said else ""


def _on_all_ranks(line: str, setting: Setting) -> str:
    """Return the first line that is not empty, by rank, on every rank."""
    if setting.group is None:
        return line
    lines: list[str] = [""] * setting.ranks
    dist.all_gather_object(lines, line, group=setting.group)
    return next((f"rank {rank}: {text}" for rank, text in enumerate(lines) if text), "")
