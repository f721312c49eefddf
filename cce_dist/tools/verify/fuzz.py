"""``cce-dist verify --fuzz 10000``: random calls of the loss against the oracle, on any backend and any number of ranks.

A case is a pure function of the seed, its number, and the setting: each failure is printed with the command that repeats it.
``draw`` makes the case, ``oracle.truth`` says what is right, ``_baseline`` what dense PyTorch gives in the tested dtype, and
``_ours`` makes the call.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist import groups, reference
from cce_dist.filter import GradFilter
from cce_dist.kernels.memory import MOST_GROUPS
from cce_dist.loss import linear_cross_entropy
from cce_dist.shard import VocabShard
from cce_dist.tools.verify.cases import Bounds, Problem, even, padded
from cce_dist.tools.verify.check import EPS, Error, compare, further_runs, of_rank, same_bits
from cce_dist.tools.verify.oracle import PER_TOKEN, Truth, truth
from cce_dist.tools.verify.views import LAYOUTS, WRITABLE, constant, view_of

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
GRADIENTS = ("dE", "dC", "dbias", "dscale")
UNSAFE = 1000.0  # a dense fp32 baseline whose error is that many times the rule's own eps is itself wrong


class Setting(NamedTuple):
    """Where cases run.

    Attributes:
        group: The ranks that share the vocabulary; None: this process alone.
        alike: So many cases in a row have in common what kernels are compiled for, which takes nearly all of the time.
        function: Whose cases they are, a name of ``fuzz_cases.FUNCTIONS``.
    """

    seed: int = 0
    device: str = "cpu"
    backend: str = "auto"
    group: dist.ProcessGroup | None = None
    alike: int = 1
    function: str = "loss"

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
        """The command line that repeats one case."""
        launcher = "cce-dist" if self.group is None else f"torchrun --nproc-per-node {self.ranks} -m cce_dist"
        interpreter = "TRITON_INTERPRET=1 " if self.interpreted else ""
        where = f"--backend {self.backend} --device {self.device}"
        where += f" --alike {self.alike}" if self.alike > 1 else ""
        where += f" --function {self.function}" if self.function != "loss" else ""
        return f"{interpreter}{launcher} verify --fuzz 1 --seed {self.seed} --case {number} {where}"


@dataclass
class Draw:
    """One random call; ``bias``, ``ids``, ``buffer`` and ``num_tokens`` are dtypes of these tensors, None where there is none.

    Attributes:
        shape: Leading dimensions of the labels, and of the whole input.
        dtype: Of input and weight; under autocast the dtype that they are cast to.
        logits: Which distribution of logits: see ``_problem``.
        bounds: Rows of each rank.
        layouts: Of each tensor argument, and of the gradients that come from above.
        upstream: Which outputs are differentiated; "loss" is always among them.
        wanted: Whether hidden, weight and bias need a gradient.
        hidden_of_ignored, padding: What hidden states of ignored tokens hold, and padding rows of weight and bias.
        in_groups: Tokens of a group whose gradients are made in forward, where they can be; None: as the sizes say.
        low: dC has 8 bits more then, while groups are added to it.
        expected: Of upstream gradients of each token then: empty: all equal; "upstream": themselves; "other": other ones.
        broken: A token with a NaN in its hidden state, none: -1.
    """

    shape: tuple[int, ...]
    hidden_size: int
    vocab_size: int
    dtype: torch.dtype
    options: dict[str, Any] = field(default_factory=dict)
    bias: torch.dtype | None = None
    ids: torch.dtype = torch.int64
    autocast: bool = False
    logits: str = "normal"
    ignored: float = 0.0
    bounds: Bounds = field(default_factory=list)
    layouts: dict[str, str] = field(default_factory=dict)
    upstream: tuple[str, ...] = ("loss",)
    upstream_scale: float = 1.0
    wanted: tuple[bool, ...] = (True, True, True)
    buffer: torch.dtype | None = None
    num_tokens: torch.dtype | None = None
    hidden_of_ignored: float | None = None
    padding: float = 3.0
    classes: bool = False
    learn_scale: bool = False
    in_groups: int | None = None
    low: bool = False
    expected: str = ""
    broken: int = -1
    twice: bool = False

    def __str__(self) -> str:
        """The fields that are not their default."""
        default = Draw((), 0, 0, FP32)
        changed = {name: value for name, value in vars(self).items() if value != getattr(default, name)}
        changed["layouts"] = {name: layout for name, layout in self.layouts.items() if layout != "contiguous"}
        return " ".join(f"{name}={value}" for name, value in changed.items()).replace("torch.", "")


def draw(setting: Setting, number: int) -> Draw:
    """Draw a call: the same on every rank, and on every machine."""
    where = f"{setting.interpreted}/{setting.device}/{setting.ranks}"
    rng = random.Random(f"{setting.seed}/{number}/{where}")
    kind = random.Random(f"{setting.seed}/{number // setting.alike} of {setting.alike}/{where}")
    filtered = kind.random() < 0.15
    most_n, most_d, most_v = (40, 33, 90) if setting.interpreted else (150, 70, 600)
    if filtered or (setting.device == "cuda" and rng.random() < 0.3):
        most_n, most_v = 2 * most_n, 3 * most_v
    call = Draw(
        shape=(_size(rng, most_n, 0.02),),
        hidden_size=max(2, _size(rng, most_d, 0.0)),
        vocab_size=_size(rng, most_v, 0.0),
        dtype=kind.choice([FP32, FP16] if setting.interpreted else [FP32, FP32, BF16, BF16, FP16]),
    )
    if kind.random() < 0.5:
        call.hidden_size = -(-call.hidden_size // 16) * 16
    call.autocast = call.dtype != FP32 and kind.random() < 0.15
    _draw_options(rng, kind, call, setting)
    _draw_data(rng, kind, call, setting)
    if filtered:
        _draw_filter(rng, kind, call)
    _draw_terms(rng, kind, call, learnable=not filtered)
    apart = random.Random(f"groups/{setting.seed}/{number}/{where}")
    if not filtered and apart.random() < 0.2:
        _alone(call)
        call.expected = apart.choice(["", "upstream", "other"])
        count = torch.Size(call.shape).numel()
        call.in_groups = apart.randint(max(1, count // MOST_GROUPS), max(1, count))
        call.low = setting.backend == "triton" and call.dtype == torch.bfloat16 and apart.random() < 0.5
    return call


def _alone(call: Draw) -> None:
    """Leave out what is not the loss alone with one upstream gradient of a token."""
    call.options.pop("return_aux", None)
    call.upstream = ("loss",)


def _size(rng: random.Random, most: int, zero: float) -> int:
    """Small sizes often, primes and sizes at the edges of tiles sometimes; 0 with a probability."""
    if rng.random() < zero:
        return 0
    edges = [size for size in (1, 2, 3, 7, 16, 17, 31, 64, 97, 127, 128, 129, 255, 256, 257, 512, 521) if size <= most]
    return rng.choice(edges) if rng.random() < 0.4 else rng.randint(1, rng.choice([max(1, most // 8), most]))


def _draw_options(rng: random.Random, kind: random.Random, call: Draw, setting: Setting) -> None:
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
    bounds = rng.choice([even, even, padded, _random_cuts(rng)])
    call.bounds = bounds(call.vocab_size, setting.ranks)


def _random_cuts(rng: random.Random) -> Callable[[int, int], Bounds]:
    """Shards of any size, empty ones included; the last may be padded, and be padding alone."""

    def cut(vocab_size: int, ranks: int) -> Bounds:
        inner = sorted(rng.randint(0, vocab_size) for _ in range(ranks - 1))
        ends = [0, *inner, vocab_size + rng.choice([0, 0, 1, 40])]
        return list(itertools.pairwise(ends))

    return cut


def _draw_data(rng: random.Random, kind: random.Random, call: Draw, setting: Setting) -> None:
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
        call.upstream_scale = rng.choice([1e-6, 1e-3, 100.0])
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


def _draw_filter(rng: random.Random, kind: random.Random, call: Draw) -> None:
    """A filter, on logits that it can drop something of, with a gradient of the loss alone."""
    call.options["grad_filter"] = GradFilter(
        eps=rng.choice([2.0**-12, 2.0**-12, 1e-3, 1e-30, 0.0]),
        compensate=kind.random() < 0.6,
        hidden=kind.random() < 0.8,
        weight=kind.random() < 0.8,
        always=True,
    )
    call.logits, call.upstream = "zipf", ("loss",)
    call.layouts |= {name: "contiguous" for name, layout in call.layouts.items() if layout == "expanded"}


def _draw_terms(rng: random.Random, kind: random.Random, call: Draw, learnable: bool) -> None:
    """Weights of the classes, and a scale that is learned."""
    refused = bool({"softcap", "sequence_parallel", "input_grad"} & call.options.keys()) or call.buffer is not None
    two_roundings = call.dtype != FP32  # dE and dC are two terms where classes have weights and labels are smoothed
    alone = not call.options.get("label_smoothing") or not (refused or two_roundings)
    call.classes = rng.random() < 0.15 and alone and call.logits != "masked"
    learnable = learnable and call.dtype != FP16 and call.options.get("logit_scale", 1.0) != 0.0
    call.learn_scale = kind.random() < 0.15 and learnable


def _problem(call: Draw, generator: torch.Generator) -> Problem:
    """The data, float64, as the tested dtype holds it: 0.1 to 10 nats of spread, or one trap.

    "up", "down", "gap": all logits near 1e4, near -1e4, or one of them 1e4 above the others, on a grid on which all products
    are exact in fp32. "masked": some biases are -inf. "zipf": a unigram, and a likely label. "equal": no logit differs.
    """
    num_tokens, vocab_size = torch.Size(call.shape).numel(), call.vocab_size

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    spread = {"small": 0.01, "wide": 10.0, "zipf": 0.3, "equal": 0.0}.get(call.logits, 1.0)
    hidden = normal(num_tokens, call.hidden_size)
    weight = normal(vocab_size, call.hidden_size) * spread / call.hidden_size**0.5
    bias = None if call.bias is None else normal(vocab_size)
    labels = torch.randint(vocab_size, (num_tokens,), generator=generator)
    if call.logits == "zipf":
        labels = (torch.rand(num_tokens, generator=generator, dtype=torch.float64) ** 8 * vocab_size).long()
        weight[:, 0] = -torch.arange(1, vocab_size + 1, dtype=torch.float64).log() * 1.2
        hidden += 4 * weight[labels]
        hidden[:, 0] = 1.0
    if call.logits == "masked":
        assert bias is not None
        bias[torch.rand(vocab_size, generator=generator) < 0.3] = -torch.inf
        bias[labels] = 0.5
    if call.logits in ("up", "down", "gap"):
        hidden, weight = (hidden * 8).round() / 8, (weight * 8).round() / 8
        bias = None if bias is None else (bias * 8).round() / 8
        size = 512.0 if call.dtype == FP16 else 1e4
        hidden[:, 0], weight[:, 0] = 1.0, {"up": size, "down": -size, "gap": 0.0}[call.logits]
        if call.logits == "gap":
            weight[vocab_size // 2, 0] = size
    ignore = torch.rand(num_tokens, generator=generator) < call.ignored
    labels = torch.where(ignore, call.options.get("ignore_index", -100), labels)
    problem = Problem(
        hidden, weight, labels, None if bias is None or call.bias is None else bias.to(call.bias).double()
    )
    arguments = {"hidden": "input", "weight": "linear_weight", "labels": "target", "bias": "linear_bias"}
    shown = (name for name, argument in arguments.items() if call.layouts[argument] == "expanded")
    repeated = {name: constant(getattr(problem, name)) for name in shown if getattr(problem, name) is not None}
    return _rounded(replace(problem, **repeated), FP32 if call.autocast else call.dtype)


def _rounded(problem: Problem, dtype: torch.dtype) -> Problem:
    """Hidden states and weight as a dtype holds them."""
    return replace(problem, hidden=problem.hidden.to(dtype).double(), weight=problem.weight.to(dtype).double())


def _upstream(call: Draw, generator: torch.Generator) -> dict[str, Tensor]:
    """Gradients of the differentiated outputs, float64 of what fp32 holds: [N], or 0-d for a reduced loss."""
    count = torch.Size(call.shape).numel()
    grads = {}
    for name in call.upstream:
        reduced = name == "loss" and call.options.get("reduction", "mean") != "none"
        grad = torch.randn(() if reduced else (count,), generator=generator) * call.upstream_scale
        if not reduced:
            grad[::5] = 0.0
            grad = constant(grad.view(call.shape)).reshape(-1) if call.layouts[name] == "expanded" else grad
        grads[name] = grad.double()
    return grads


def _baseline(call: Draw, problem: Problem, upstream: dict[str, Tensor]) -> dict[str, Tensor]:
    """Dense PyTorch in the tested dtype."""
    scale = torch.tensor(float(call.options.get("logit_scale", 1.0)), requires_grad=True)
    hidden, weight = problem.hidden.to(call.dtype), problem.weight.to(call.dtype)
    bias = None if problem.bias is None else problem.bias.to(call.dtype).requires_grad_()
    inputs = [x for x in (hidden.requires_grad_(), weight.requires_grad_(), bias) if x is not None]
    own = ("grad_filter", "sequence_parallel", "input_grad", "workspace_bytes", "return_aux", "reduce_dtype")
    options: dict[str, Any] = {name: value for name, value in call.options.items() if name not in own}
    # Any id may be the one that is ignored; dense PyTorch gathers with it.
    ignore_index = options.pop("ignore_index", -100)
    labels = problem.labels.masked_fill(problem.labels == ignore_index, -100)
    options["logit_scale"] = scale
    out = reference.linear_cross_entropy(hidden, weight, labels, linear_bias=bias, **options)
    outputs = {name: getattr(out, name) for name in ("loss", *PER_TOKEN)}
    *grads, d_scale = torch.autograd.grad(
        [outputs[name] for name in upstream],
        [*inputs, scale],
        [g.to(outputs[name].dtype) for name, g in upstream.items()],
    )
    gradients = dict(zip(GRADIENTS, grads, strict=False)) | {"dscale": d_scale}
    return {name: x.detach() for name, x in outputs.items()} | gradients


def _ours(
    call: Draw, problem: Problem, upstream: dict[str, Tensor], before: float, shard: VocabShard, setting: Setting
) -> dict[str, Tensor]:
    """Outputs and gradients of the call itself; dE of this rank's slice, dC and dbias of its rows.

    Args:
        before: What ``grad_weight_out`` holds before.
    """
    hidden, weight, labels, bias = _operands(call, problem, shard, setting)
    options, buffer, scale = dict(call.options), None, None
    if call.buffer is not None:
        full = torch.full(weight.shape, before, device=setting.device, dtype=call.buffer)
        buffer = view_of(full, call.layouts["grad_weight_out"])
        held_before = buffer.double()
    if call.num_tokens is not None:
        number = torch.tensor(options["num_tokens"], device=setting.device, dtype=call.num_tokens)
        options["num_tokens"] = view_of(number, call.layouts["num_tokens"])
    if call.learn_scale:
        scale = torch.tensor(float(options.get("logit_scale", 1.0)), device=setting.device, requires_grad=True)
        options["logit_scale"] = scale
    if call.classes:
        options["weight"] = options["weight"].to(setting.device)
    options |= {"linear_bias": bias, "shard": shard, "backend": setting.backend, "grad_weight_out": buffer}
    if call.expected and options.get("reduction") == "none":
        expected = upstream["loss"].to(setting.device, FP32).view(labels.shape)
        options["expected_weights"] = 3.0 * expected if call.expected == "upstream" else expected.abs() + 0.1
    with groups.of_rows(call.in_groups, call.low), torch.autocast(setting.device, call.dtype, enabled=call.autocast):
        out = linear_cross_entropy(hidden, weight, labels, **options)
    outputs = {"loss": out} if isinstance(out, Tensor) else {name: getattr(out, name) for name in ("loss", *PER_TOKEN)}
    values = {name: x.detach() for name, x in outputs.items()}
    if not isinstance(out, Tensor) and out.filter_stats is not None:
        values["filter_stats"] = torch.stack(tuple(out.filter_stats))
    leaves = zip(GRADIENTS, (hidden, weight, bias, scale), strict=True)
    inputs = {name: x for name, x in leaves if x is not None and x.requires_grad}
    if not inputs:
        return values
    from_above = [
        view_of(g.to(setting.device, FP32).view(outputs[name].shape), call.layouts[name])
        for name, g in upstream.items()
    ]
    grads = torch.autograd.grad(
        [outputs[name] for name in upstream], list(inputs.values()), from_above, allow_unused=True
    )
    for name, grad in zip(inputs, grads, strict=True):
        if (grad is None) != (name == "dC" and buffer is not None):
            raise AssertionError(f"{name}: a gradient beside grad_weight_out, or none at all")
        if grad is not None:
            values[name] = grad
            if (grad.dtype, grad.shape) != (inputs[name].dtype, inputs[name].shape):
                raise AssertionError(f"{name} is {grad.dtype} {tuple(grad.shape)}, not as its tensor")
    if buffer is not None:
        values["dC"] = buffer.double() - held_before
    return values


def _operands(
    call: Draw, problem: Problem, shard: VocabShard, setting: Setting
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Hidden states, weight, labels and bias of one rank's call, as views."""
    held = FP32 if call.autocast else call.dtype

    def local(whole: Tensor, name: str, dtype: torch.dtype) -> Tensor:
        rows = whole.new_full((shard.num_rows, *whole.shape[1:]), call.padding)
        rows[: shard.num_valid] = whole[shard.start : shard.start + shard.num_valid]
        rows = constant(rows) if call.layouts[name] == "expanded" and shard.num_valid else rows
        return view_of(rows.to(setting.device, dtype), call.layouts[name])

    hidden = problem.hidden.clone()
    if call.hidden_of_ignored is not None and call.layouts["input"] != "expanded":
        hidden[problem.labels == call.options.get("ignore_index", -100)] = call.hidden_of_ignored
    if call.broken >= 0:
        hidden[call.broken, -1] = torch.nan
    hidden = hidden.view(*call.shape, call.hidden_size)
    if call.options.get("sequence_parallel"):
        hidden = hidden.chunk(setting.ranks)[setting.rank]
    hidden = view_of(hidden.to(setting.device, held), call.layouts["input"])
    weight = local(problem.weight, "linear_weight", held)
    labels = view_of(problem.labels.view(call.shape).to(setting.device, call.ids), call.layouts["target"])
    bias = None
    if problem.bias is not None and call.bias is not None:
        bias = local(problem.bias, "linear_bias", call.bias).requires_grad_(call.wanted[2])
    return hidden.requires_grad_(call.wanted[0]), weight.requires_grad_(call.wanted[1]), labels, bias


def run_one(setting: Setting, number: int) -> list[Error]:
    """Run a case; every rank of the group calls this. Returns the error of each quantity, and its bound."""
    call = draw(setting, number)
    generator = torch.Generator().manual_seed(setting.seed * 1_000_003 + number)
    problem = _problem(call, generator)
    upstream = _upstream(call, generator)
    grad_filter = call.options.get("grad_filter")
    if call.classes:
        weights = torch.rand(call.vocab_size, generator=generator)
        call.options["weight"] = weights.masked_fill(weights < 0.05, 0.0)
    eps = 0.0 if grad_filter is None else grad_filter.eps
    bounds = call.bounds if setting.ranks > 1 else ()
    expected = truth(_rounded(problem, call.dtype), call.options, upstream, eps, bounds)
    baseline = _baseline(call, problem, upstream)
    shard = VocabShard(*call.bounds[setting.rank], call.vocab_size, setting.group)
    run = partial(_ours, call, problem, upstream, expected.noise["dC"], shard, setting)
    ours, errors = run(), []
    for name, value in ours.items():
        if name == "filter_stats":
            errors.append(_sane(value))
        else:
            errors += _compare(call, name, value, baseline[name], expected, shard)
    runs = further_runs(setting.device) if call.twice or setting.device == "cuda" else 0
    return errors + same_bits(ours, run, runs, ("loss",), setting.group)


def _compare(call: Draw, name: str, ours: Tensor, baseline: Tensor, expected: Truth, shard: VocabShard) -> list[Error]:
    """The three-way rule of ``check.compare``, and beside it the rounding that no order of operations avoids."""
    right, plain = expected.values[name], expected.plain.get(name)
    tokens = torch.arange(len(right)) if right.dim() else right
    wholes = [baseline, right, tokens, right if plain is None else plain]
    padding, ours, (baseline, right, tokens, filtered) = of_rank(name, ours, wholes, call.options, shard)
    if name == "dE":
        ours = ours.reshape(-1, call.hidden_size)
    elif right.dim() and name not in GRADIENTS:
        ours = ours.reshape(-1)
    values = [ours, baseline, right, filtered]
    if call.broken >= 0:
        if name in ("dC", "dbias", "dscale"):
            return padding
        if name != "dE" and ours[call.broken].isfinite():
            return [Error(f"{name} of a token with NaN", float("inf"), 0.0)]
        values = [x[tokens != call.broken] for x in values]
    return padding + _errors(call, name, values[:3], None if plain is None else values[3], expected)


def _errors(call: Draw, name: str, values: list[Tensor], plain: Tensor | None, expected: Truth) -> list[Error]:
    ours, baseline, right = (x.detach().double().cpu() for x in values)
    dtype = call.dtype if name in GRADIENTS else FP32
    returned = {"dC": call.buffer, "dbias": call.bias}.get(name) or dtype
    right = torch.where(right.to(returned).isinf(), right.to(returned).double(), right)  # past the range of the dtype
    exact_scale = call.options.get("logit_scale", 1.0) in (1, -0.5) and "softcap" not in call.options
    exact_products = exact_scale and not call.classes and call.logits in ("up", "down", "gap", "equal")
    logit_noise = 0.0 if exact_products else expected.logit_noise
    floor = EPS[dtype] * torch.finfo(dtype).smallest_normal
    if name in GRADIENTS:
        floor += EPS[dtype] * expected.noise[name]
        if name == "dscale" and (call.logits == "equal" or "expanded" in call.layouts.values()):
            floor += EPS[dtype] * expected.noise["dscale alike"]
        if name in ("dE", "dscale"):
            floor += EPS[dtype] * expected.noise["parts of dE"]
        floor += EPS[FP32] * (logit_noise * expected.noise[name] + expected.noise[name + " unbent"])
        if name == "dC" and call.buffer is not None:
            floor += 2 * EPS[call.buffer] * (expected.noise[name] + right.abs().max().item() if right.numel() else 0.0)
        if name == "dC" and call.in_groups and not call.low and right.numel():  # rounded after each group but the first
            count = -(-torch.Size(call.shape).numel() // call.in_groups)
            floor += EPS[dtype] * max(0, count - 1) * right.abs().max().item()
    elif not exact_products:
        floor += EPS[FP32] * expected.noise[name]
    errors = []
    if call.dtype == FP32 and right.numel() and not call.options.get("grad_filter"):
        wrong = (baseline - right)[baseline.isfinite() & right.isfinite()].abs()
        size = EPS[FP32] * right[right.isfinite()].abs().sum().item() + floor
        errors += [Error(f"the reference's own {name}", wrong.max().item(), UNSAFE * size)] if len(wrong) else []
    grad_filter = call.options.get("grad_filter")
    if plain is not None and grad_filter is not None:
        filtered = grad_filter.hidden if name == "dE" else grad_filter.weight
        noise = 2 * (baseline - right).norm() + EPS[dtype] * right.norm() + floor * right.numel() ** 0.5
        bound = filtered * (plain - right).norm() + noise
        return [*errors, Error(f"filtered {name}", (ours - right).norm().item(), bound.item())]
    error = compare(name, ours, baseline, right, dtype)
    return [*errors, error._replace(bound=error.bound + floor)]


def _sane(stats: Tensor) -> Error:
    kept, mean, most = stats.tolist()
    sane = 0.0 <= kept <= 1.0 and 0.0 <= mean <= most + 1e-6 and most <= 1.0 + 1e-5
    return Error(f"filter_stats {stats.tolist()}", 0.0 if sane else 1.0, 0.0)


class Cases(NamedTuple):
    """The cases of one function: ``draw`` returns the case of a number, ``run`` runs it on every rank of the group."""

    draw: Callable[[Setting, int], Any]
    run: Callable[[Setting, int], list[Error]]


OF_THE_LOSS = Cases(draw, run_one)


def run_many(
    setting: Setting, first: int, count: int, report: Callable[[str], None] = print, cases: Cases = OF_THE_LOSS
) -> list[str]:
    """Run cases ``first`` to ``first + count - 1``; every rank of the group calls this. Returns a text for each failure."""
    failures: list[str] = []
    started = said = time.monotonic()
    for done, number in enumerate(range(first, first + count), 1):
        line = _on_all_ranks(_verdict(cases, setting, number), setting)
        if line:
            failures.append(f"FAIL {setting.command(number)}\n     {line}")
            report(failures[-1])
        if time.monotonic() - said > 20:
            said = time.monotonic()
            report(f"{done} of {count} cases, {done / (said - started):.0f} a second, {len(failures)} failures")
    seconds = time.monotonic() - started
    report(f"{count - len(failures)} of {count} random cases hold, seed {setting.seed}, {seconds:.0f} s")
    return failures


def _verdict(cases: Cases, setting: Setting, number: int) -> str:
    """Return a line with the failures of a case on this rank; empty: none."""
    try:
        wrong = [error for error in cases.run(setting, number) if not error.ok]
    except Exception as error:  # a call that raises is a failure of this case, not the end of the run
        said = f"{type(error).__name__}: {error}".splitlines()[0]
    else:
        said = "; ".join(f"{e.quantity}: error {e.error:.1e} bound {e.bound:.1e}" for e in wrong)
    return f"{said} | {cases.draw(setting, number)}" if said else ""


def _on_all_ranks(line: str, setting: Setting) -> str:
    """The first rank's line that is not empty, on every rank."""
    if setting.group is None:
        return line
    failed = torch.tensor(float(bool(line)), device=setting.device)
    dist.all_reduce(failed, group=setting.group)
    if not failed:
        return ""
    lines: list[str] = [""] * setting.ranks
    dist.all_gather_object(lines, line, group=setting.group)
    return next(f"rank {rank}: {text}" for rank, text in enumerate(lines) if text)
