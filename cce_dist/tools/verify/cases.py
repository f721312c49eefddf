"""The tables of named traps: each case has a small problem and options, and says what it catches."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from cce_dist.filter import GradFilter
from cce_dist.shard import even_rows

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
Bounds = list[tuple[int, int]]  # the rows [start, stop) of each rank
Split = Callable[[int, int], Bounds]  # vocabulary size, number of ranks -> bounds
ChangeLabels = Callable[[Tensor, int], Tensor]  # labels drawn evenly, vocabulary size -> labels


@dataclass(frozen=True)
class Problem:
    """Hidden states, the whole weight and labels, in float64 on the CPU."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    labels: Tensor  # [N]
    bias: Tensor | None = None  # [V]

    def rounded(self, dtype: torch.dtype, bias_dtype: torch.dtype | None = None) -> Problem:
        """Round to a dtype, so that the truth is computed from the tested numbers."""
        bias = None if self.bias is None else self.bias.to(bias_dtype or dtype).double()
        return replace(self, hidden=self.hidden.to(dtype).double(), weight=self.weight.to(dtype).double(), bias=bias)


Recipe = Callable[[torch.Generator], Problem]


def even(vocab_size: int, ranks: int) -> Bounds:
    return [even_rows(vocab_size, rank, ranks) for rank in range(ranks)]


def uneven(vocab_size: int, ranks: int) -> Bounds:
    """Give one row to each rank but the last, which gets the rest."""
    cuts = [0, *range(1, ranks), vocab_size]
    return list(itertools.pairwise(cuts))


def with_empty(vocab_size: int, ranks: int) -> Bounds:
    """Give two thirds of the vocabulary to rank 0, and the rest to the last rank."""
    if ranks == 1:
        return [(0, vocab_size)]
    cut = vocab_size * 2 // 3
    return [(0, cut), *[(cut, cut)] * (ranks - 2), (cut, vocab_size)]


def padded(vocab_size: int, ranks: int) -> Bounds:
    """Return equal shards of a multiple of 64 rows, of which the last are padding."""
    rows = -(-vocab_size // (ranks * 64)) * 64 + 64
    return [(r * rows, (r + 1) * rows) for r in range(ranks)]


@dataclass(frozen=True)
class Gaussian:
    """Draws Gaussian data."""

    num_tokens: int = 37
    hidden_size: int = 24
    vocab_size: int = 203
    bias: bool = False
    scale: float = 0.5  # standard deviation of the weight
    labels: ChangeLabels | None = None
    shift: float = 0.0  # added to every logit
    spike: float = 0.0  # added to one logit of every other token
    # Round to eighths: all logits are exact in fp32 in any order of summation, even with a shift of 1e4.
    grid: bool = False
    masked: float = 0.0  # share of biases that are -inf, except those of labels

    def __call__(self, generator: torch.Generator) -> Problem:
        hidden = torch.randn(self.num_tokens, self.hidden_size, generator=generator, dtype=torch.float64)
        weight = torch.randn(self.vocab_size, self.hidden_size, generator=generator, dtype=torch.float64) * self.scale
        y = torch.randint(self.vocab_size, (self.num_tokens,), generator=generator)
        b = torch.randn(self.vocab_size, generator=generator, dtype=torch.float64) if self.bias else None
        if self.grid:
            hidden, weight = ((x * 8).round() / 8 for x in (hidden, weight))
            b = None if b is None else (b * 8).round() / 8
        if self.shift or self.spike:  # through two dimensions of the hidden states that carry nothing else
            hidden[:, 0], weight[:, 0] = 1.0, self.shift
            hidden[:, 1], weight[:, 1] = 0.0, 0.0
            hidden[::2, 1], weight[self.vocab_size // 2, 1] = 1.0, self.spike
        if self.masked and b is not None:
            b[torch.rand(self.vocab_size, generator=generator) < self.masked] = -torch.inf
            b[y] = 0.5
        return Problem(hidden, weight, y if self.labels is None else self.labels(y, self.vocab_size), b)


@dataclass(frozen=True)
class Zipf:
    """Draws a Zipf unigram and a likely label for each token: a filter drops about half of the tiles."""

    num_tokens: int = 300
    hidden_size: int = 96
    vocab_size: int = 4000
    bias: bool = False
    labels: ChangeLabels | None = None

    def __call__(self, generator: torch.Generator) -> Problem:
        weight = torch.randn(self.vocab_size, self.hidden_size, generator=generator, dtype=torch.float64) * 0.1
        weight[:, 0] = -torch.arange(1, self.vocab_size + 1, dtype=torch.float64).log() * 1.2
        y = (torch.rand(self.num_tokens, generator=generator, dtype=torch.float64) ** 20 * self.vocab_size).long()
        hidden = torch.randn(self.num_tokens, self.hidden_size, generator=generator, dtype=torch.float64) * 0.3
        hidden += 4 * weight[y]
        hidden[:, 0] = 1.0
        b = 0.1 * torch.randn(self.vocab_size, generator=generator, dtype=torch.float64) if self.bias else None
        return Problem(hidden, weight, y if self.labels is None else self.labels(y, self.vocab_size), b)


def ignore(which: slice, index: int = -100) -> ChangeLabels:
    """Return a function that gives some labels the ignored id."""

    def apply(labels: Tensor, vocab_size: int) -> Tensor:
        labels = labels.clone()
        labels[which] = index
        return labels

    return apply


@dataclass(frozen=True)
class Case:
    """One call to check. Each function's own cases add fields."""

    name: str = ""  # a random case has the function's name and a number
    catches: str = ""  # the mistake that would fail the case
    options: dict[str, Any] = field(default_factory=dict)  # arguments of the function
    problem: Recipe = field(default_factory=Gaussian)
    shards: Split = even
    dtype: torch.dtype = FP32  # of hidden states and weight; under autocast they are fp32, and cast to it
    autocast: bool = False
    bias: torch.dtype | None = None  # dtype of the bias; None: ``dtype``
    ids: torch.dtype = torch.int64  # dtype of the labels
    shape: tuple[int, ...] | None = None  # leading dimensions of input and labels; None: [N]
    layouts: dict[str, str] = field(default_factory=dict)  # of arguments and upstream gradients, see ``check.view_of``
    padding: float = 3.0  # what padding rows hold
    wanted: tuple[bool, ...] = (True, True, True)  # whether hidden states, weight and bias need a gradient
    upstream: tuple[str, ...] = ()  # the outputs that are differentiated
    scale: float | None = None  # standard deviation of upstream gradients; None: 1, and a reduced loss has exactly 1
    twice: bool = True  # run call and backward more than once: the bits must be the same

    @property
    def held(self) -> torch.dtype:
        """Dtype of hidden states and weight as arguments."""
        return FP32 if self.autocast else self.dtype

    @property
    def is_reduced(self) -> bool:
        return self.options.get("reduction", "mean") != "none"

    def layout(self, argument: str) -> str:
        return self.layouts.get(argument, "contiguous")

    def __str__(self) -> str:
        """The fields that do not have their default."""
        values = [(each, getattr(self, each.name)) for each in fields(self) if each.name not in ("name", "catches")]
        changed = (f"{each.name}={value}" for each, value in values if value != each.default)
        return re.sub(r"torch\.|<function (\S+) at \w+>", r"\1", " ".join(changed))


@dataclass(frozen=True)
class LossCase(Case):
    """A call of ``linear_cross_entropy``."""

    upstream: tuple[str, ...] = ("loss",)
    num_tokens: torch.dtype | None = None  # dtype of ``num_tokens`` as a tensor; None: a number
    buffer: torch.dtype | None = None  # dtype of ``grad_weight_out``; None: no buffer
    hidden_of_ignored: float | None = None  # what hidden states of ignored tokens hold; None: data
    classes: bool = False  # classes have weights
    learn_scale: bool = False  # ``logit_scale`` has a gradient
    in_groups: int | None = None  # force one pass in groups of this many tokens; None: as the sizes say
    low: bool = False  # dC has 8 more bits while groups are added to it
    expected: str = ""  # ``expected_weights``: "upstream" gradients, "other" values, or "" for none
    token_loss: str = ""  # a name of ``TOKEN_LOSSES``; "" for none
    broken: int = -1  # a token with a NaN in its hidden state; -1: none
    # Share of the plain filter's error that a filter may leave in dE, dC, and the sum of dE over tokens (1: not compared).
    left: tuple[float, ...] = (1.0, 1.0, 1.0)


@dataclass(frozen=True)
class LogProbCase(Case):
    """A call of ``linear_log_probs``."""

    upstream: tuple[str, ...] = ("log_probs", "lse", "entropy")
    num_ids: int = 0  # K; 0: ids have no such dimension
    change: Callable[[Tensor], Tensor] | None = None  # changes ids [N, K] that were drawn evenly
    own: tuple[str, ...] = ()  # arguments that are a number for each token, drawn from 0.5 to 1.5
    kept: int = 0  # take the softmax over lists of at most so many ids; 0: over the vocabulary
    whole: int = 0  # with lists: the first of every so many tokens takes the whole vocabulary; 0: none


@dataclass(frozen=True)
class DivergenceCase(Case):
    """A call of ``linear_kl_divergence``. ``problem`` draws the student's head, and the number of tokens."""

    upstream: tuple[str, ...] = ("divergence",)
    spread: float = 3.0  # standard deviation of the teacher's logits
    masked: float = 0.0  # share of the tokens that do not count
    teacher_padding: int = 0  # padding rows that the last rank's shard of the teacher has beyond the student's
    # The student has a part of the teacher's ids, whose head is "whole" on each rank or "split"; "": both have the same.
    draft: str = ""


class Drawn(NamedTuple):
    """The tensors of a case, on the CPU."""

    case: Any
    problem: Problem  # the whole vocabulary; ``labels`` are the ids of ``linear_log_probs``, [N] or [N, K]
    options: dict[str, Any]  # arguments of the function, some of them tensors
    upstream: dict[str, Tensor]  # gradients of the outputs that are differentiated
    teacher: Problem | None = None  # the other head of a divergence
    # What ``grad_weight_out`` holds before the call: no more than the gradient, so the sum rounds no further.
    before: float = 2.0**-12

    def on(self, device: str) -> tuple[Tensor, dict[str, Any], dict[str, Tensor]]:
        """Return labels, options and upstream gradients with their tensors on a device."""
        return tree_map_only(Tensor, lambda x: x.to(device), (self.problem.labels, self.options, self.upstream))


@dataclass(frozen=True)
class Truth:
    """What is expected of a case, over the whole vocabulary.

    Attributes:
        values: Outputs and gradients by name, float64: "dE" [N, D], "dC" [V, D], "dbias" [V], "dscale" (of logit_scale).
        plain: Gradients under the plain filter of single elements, where the case has a filter.
        defined: Gradients as the filter is defined, in the tested dtype and in float64.
        noise: How large the terms of each value's sum are, which fp32 rounds in any order: for gradients the root of the sum
            of squares. "dE unbent" and so on leave out the softcap's slope, a difference of two near numbers; "dC alike" and
            so on add sizes, because equal terms round in the same direction. Empty: not known.
        logit_noise: The same for a logit, the largest of all.
    """

    values: dict[str, Tensor]
    plain: dict[str, Tensor] = field(default_factory=dict)
    defined: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)
    logit_noise: float = 0.0


EVERYTHING = dict(label_smoothing=0.1, logit_scale=0.7, softcap=5.0, z_loss_weight=1e-2)
NONE = {"reduction": "none"}
PER_TOKEN = ("nll", "lse", "target_logit", "entropy", "z_loss")
ALL = ("loss", *PER_TOKEN)
ZIPF = Zipf()
FILTERED = GradFilter(always=True)  # on Triton too, where heads as small as these have exact gradients
Options = dict[str, Any] | None


# fp32 comes first, because its kernels compile fastest. It is for logits that bf16 cannot hold, and for terms of a gradient
# that are smaller than a rounding of bf16.
# fmt: off
def small(num_tokens: int = 37, hidden_size: int = 32, vocab_size: int = 203, **others: Any) -> Gaussian:
    """Draw data of few sizes, so that cases share compiled kernels."""
    return Gaussian(num_tokens, hidden_size, vocab_size, **others)


def trap(name: str, catches: str, options: Options = None, problem: Recipe | None = None, **others: Any) -> LossCase:
    """Return a case: in bf16 by default, with auxiliary outputs unless it goes in groups."""
    in_groups = others.setdefault("low", "in_groups" in others)
    options = ({} if in_groups else {"return_aux": True}) | (options or {})
    others.setdefault("dtype", BF16)
    return LossCase(name, catches, options, problem or small(), **others)


def filter_trap(name: str, catches: str, options: Options = None, problem: Recipe | None = None, **others: Any) -> LossCase:
    """Return a case with a filter, whose compensation must remove parts of its error."""
    options = {"grad_filter": FILTERED} | (options or {})
    return trap(name, catches, options, problem or ZIPF, **{"left": (0.5, 0.75, 0.02)} | others)


CASES = [
    trap("plain", "the target of another rank's shard", problem=Gaussian(), dtype=FP32),
    trap("logits-at-minus-1e4", "a maximum floored at 0", problem=Gaussian(shift=-1e4, grid=True), dtype=FP32),
    trap("gap-of-1e4", "the log of an underflowed sum, 0 times infinity in the entropy",
         problem=Gaussian(spike=1e4, grid=True), dtype=FP32, upstream=ALL),
    trap("logits-at-plus-1e4", "the sum lost next to a large maximum", {"label_smoothing": 0.1},
         Gaussian(shift=1e4, grid=True), dtype=FP32),
    trap("padded-negative-logits", "phantom columns of logit 0", {"label_smoothing": 0.1},
         Gaussian(shift=-1e4, grid=True), shards=padded, dtype=FP32),
    trap("label-smoothing", "smoothing over the local shard", {"label_smoothing": 0.2}, dtype=FP32),
    trap("aux", "an aux output without gradient", NONE, upstream=ALL, dtype=FP32),
    trap("everything", "options that only work alone", EVERYTHING, small(bias=True, labels=ignore(slice(0, None, 4))),
         dtype=FP32),
    trap("bf16", "logits rounded before the log-sum-exp", problem=small(scale=0.2)),
    trap("sum", "a division by the number of tokens", {"reduction": "sum"}),
    trap("none-signed-upstream", "a scalar upstream gradient assumed", NONE),
    trap("batch-sequence-dims", "flattened leading dimensions", NONE, small(36), shape=(4, 9)),
    trap("noncontiguous-input", "strides taken for granted", layouts={"input": "transposed"}),
    trap("num-tokens", "the mean over local tokens", {"num_tokens": 101}),
    trap("ignored-some", "ignored tokens counted in the mean", problem=small(labels=ignore(slice(0, None, 3)))),
    trap("ignored-all", "0 / 0", problem=small(labels=ignore(slice(None)))),
    trap("ignore-index-valid-id", "an ignore_index that is an id", {"ignore_index": 7},
         small(labels=ignore(slice(0, None, 3), 7))),
    trap("labels-first-shard", "a shard that owns no label", problem=small(labels=lambda y, v: y % 2)),
    trap("labels-last-shard", "labels counted from the wrong start", problem=small(labels=lambda y, v: v - 1 - y % 2)),
    trap("sequence-parallel", "dE of the wrong slice", {"sequence_parallel": True, **EVERYTHING},
         small(24 * 3, labels=ignore(slice(0, None, 4))), shape=(24, 3)),
    trap("input-grad-partial", "dE summed when it should not be", {"input_grad": "partial"}),
    trap("one-token", "a block of rows that is not full", problem=small(1)),
    trap("no-tokens", "a launch over nothing", problem=small(0)),
    trap("vocabulary-of-one", "shards that are empty but one", problem=small(vocab_size=1, grid=True)),
    trap("autocast", "fp32 products under autocast", autocast=True),
    trap("main-grad", "dC overwritten instead of added", buffer=FP32),
    trap("z-loss", "z-loss on a local log-sum-exp", {"z_loss_weight": 0.1}),
    trap("bias", "the bias of another shard", problem=small(bias=True)),
    trap("uneven-shards", "equal shards assumed", problem=small(bias=True), shards=uneven),
    trap("label-smoothing-one", "the label counted where it has no weight", {"label_smoothing": 1.0}),
    trap("class-weights-uneven-shards", "smoothing without the weights of another rank's classes", {"label_smoothing": 0.2},
         small(labels=ignore(slice(0, None, 4))), shards=uneven, classes=True, dtype=FP32),
    trap("softcap-and-scale", "the softcap's slope left out", {"softcap": 2.0, "logit_scale": 1.3}),
    trap("empty-shards", "a maximum over nothing", EVERYTHING, shards=with_empty),
    trap("padded-shards", "padding rows in the sum or with gradient", EVERYTHING, small(bias=True), shards=padded),
    trap("odd-sizes", "columns past the end of a tile", EVERYTHING, small(131, 17, 519)),
    trap("many-blocks", "state carried between blocks of logits", {"workspace_bytes": 1, **EVERYTHING},
         small(300, 16, 1200, bias=True), upstream=ALL),
    trap("fp16-small-upstream", "an underflow of 1/N times a probability", {"num_tokens": 1 << 20}, dtype=FP16),
    trap("in-groups", "a group that sets dC and does not add to it", {"softcap": 20.0, "num_tokens": 50, "z_loss_weight": 1e-3},
         small(labels=ignore(slice(0, 12))), in_groups=11),
    trap("in-groups-uneven-shards", "a group's statistics merged with another's", problem=small(scale=0.2),
         shards=uneven, in_groups=16),
    trap("in-groups-expected", "a token's own upstream gradient left out of dE", {**NONE, "z_loss_weight": 1e-3},
         small(labels=ignore(slice(0, 12))), in_groups=11, expected="upstream"),
    trap("in-groups-unexpected", "one token's upstream gradient taken for all tokens", NONE, small(scale=0.2),
         shards=uneven, in_groups=16),
    trap("in-groups-sequence-parallel", "dE of the wrong slice, dC overwritten instead of added",
         {"sequence_parallel": True}, small(24 * 3), in_groups=20, buffer=FP32),
    trap("filter-nothing-dropped", "eps = 0 that is not exact", {"grad_filter": GradFilter(eps=0.0)}, ZIPF),
    filter_trap("filter", "a listed column lost, a control variate of the wrong mass"),
    filter_trap("filter-plain", "an element that matters dropped", {"grad_filter": replace(FILTERED, compensate=False)},
                left=(1.0, 1.0, 1.0)),
    filter_trap("filter-full-c", "dC filtered all the same, or added by the exact and by the filtered path",
                {"grad_filter": replace(FILTERED, weight=False)}, buffer=FP32),
    filter_trap("filter-full-e", "dE filtered all the same", {"grad_filter": replace(FILTERED, hidden=False)}),
    filter_trap("filter-all-kept", "room for lists that run out", {"grad_filter": replace(FILTERED, eps=1e-30)}),
    filter_trap("filter-z-loss", "the filter's test before the z-loss", {"z_loss_weight": 0.05}),
    filter_trap("filter-smoothing", "the uniform term dropped, or twice in frequent columns", {"label_smoothing": 0.1}),
    filter_trap("filter-smoothing-softcap", "a uniform term under a slope", {"label_smoothing": 0.1, "softcap": 20.0}),
    filter_trap("filter-softcap", "a dropped mass without the softcap's slope", {"softcap": 20.0},
                Zipf(bias=True, labels=ignore(slice(0, None, 4)))),
    filter_trap("filter-signed-upstream", "weights of both signs", NONE, left=(0.75, 0.75, 1.0)),
    filter_trap("filter-entropy", "an entropy's gradient dropped", upstream=ALL),
    filter_trap("filter-uneven-shards", "a bound of the shard's own", shards=uneven),
    filter_trap("filter-empty-shards", "a bound that one rank does not take part in", shards=with_empty),
    filter_trap("filter-padded-shards", "padding listed", shards=padded),
    filter_trap("filter-sequence-parallel", "a bound of the slice alone", {"sequence_parallel": True}, left=(0.5, 0.75, 1.0)),
]
# fmt: on


def ignored(ids: Tensor) -> Tensor:
    """Ignore all ids of some tokens, and some ids of others."""
    ids = ids.clone()
    ids[::4] = -100
    ids[1::3, ::2] = -100
    return ids


def repeated(ids: Tensor) -> Tensor:
    """Repeat ids: side by side, apart, and in a whole row."""
    ids = ids.clone()
    ids[:, -1] = ids[:, 0]
    ids[::3] = ids[::3, :1]
    return ids


SOFTCAP = {"softcap": 5.0}
OWN = ("logit_scale", "temperature")

# fmt: off
LOG_PROB_CASES = [
    LogProbCase("log-probs", "a gradient of one sign assumed"),
    LogProbCase("log-probs-alone", "an entropy that was not asked for", upstream=("log_probs",)),
    LogProbCase("log-probs-3", "the target of another rank's shard", num_ids=3, upstream=("log_probs",)),
    LogProbCase("log-probs-64", "a sum of ids in another order", problem=Gaussian(5, bias=True), num_ids=64),
    LogProbCase("log-probs-64-entropy", "p of an id's own logit, which is rounded otherwise, beside the others' p",
                problem=Gaussian(7, 32, 32, scale=2.0), num_ids=64, upstream=("entropy",)),
    LogProbCase("log-probs-repeated", "a cell that is overwritten twice", num_ids=7, change=repeated),
    LogProbCase("log-probs-ignored", "an ignored id with a gradient", num_ids=5, change=ignored),
    LogProbCase("log-probs-own-factors", "one token's temperature for another", problem=Gaussian(bias=True), own=OWN),
    LogProbCase("log-probs-softcap", "a temperature before the softcap", {**SOFTCAP, "temperature": 0.7},
                Gaussian(bias=True), num_ids=3),
    LogProbCase("log-probs-everything", "options that only work alone", SOFTCAP, Gaussian(bias=True), num_ids=4,
                change=ignored, own=OWN),
    LogProbCase("log-probs-uneven-shards", "the column of another shard", SOFTCAP, shards=uneven, num_ids=3, own=OWN),
    LogProbCase("log-probs-empty-shards", "a maximum over nothing", shards=with_empty, num_ids=3),
    LogProbCase("log-probs-padded-shards", "padding in the largest logits", problem=Gaussian(shift=-30.0, grid=True),
                shards=padded, num_ids=3),
    LogProbCase("log-probs-sequence-parallel", "ids or temperatures of the slice", {"sequence_parallel": True},
                Gaussian(24), num_ids=3, own=OWN),
    LogProbCase("log-probs-gap-of-1e4", "0 times infinity", problem=Gaussian(spike=1e4, grid=True), num_ids=3),
    LogProbCase("log-probs-many-blocks", "state carried between blocks of logits", {"workspace_bytes": 1},
                Gaussian(300, 16, 1200, bias=True), num_ids=3, own=OWN),
    LogProbCase("log-probs-bf16", "logits rounded before the log-sum-exp", problem=Gaussian(scale=0.2), dtype=BF16,
                num_ids=3),
    LogProbCase("log-probs-fp16", "gradients of ids that underflow", problem=Gaussian(scale=0.2), dtype=FP16, num_ids=3),
]
KEPT_CASES = [
    LogProbCase("kept", "an own id outside of its list, an empty list, a long one beside short ones", kept=40),
    LogProbCase("kept-everything", "options that only work alone", {**SOFTCAP, "workspace_bytes": 1},
                Gaussian(300, 70, 300, bias=True), num_ids=1, change=ignored, own=OWN, kept=300),
    LogProbCase("kept-whole", "a label that lists and sweep both subtract; lists of tokens that have none",
                problem=Gaussian(bias=True), own=OWN, kept=40, whole=3, shards=uneven),
    LogProbCase("kept-all-whole", "a list for nobody", {"sequence_parallel": True, **SOFTCAP}, Gaussian(24), kept=9, whole=1),
    LogProbCase("kept-whole-bf16", "exponentials of other rows", problem=Gaussian(scale=0.2), dtype=BF16, kept=60, whole=2),
    LogProbCase("kept-empty-shards", "a list of which a shard has nothing", shards=with_empty, kept=3),
    LogProbCase("kept-gap-of-1e4", "a log-sum-exp in one number", problem=Gaussian(spike=1e4, grid=True), kept=200),
    LogProbCase("kept-sequence-parallel", "lists of the slice", {"sequence_parallel": True}, Gaussian(24), kept=9),
    LogProbCase("kept-bf16", "logits rounded before the log-sum-exp", problem=Gaussian(scale=0.2), dtype=BF16, kept=60),
]
# fmt: on
REVERSE, JSD = {"kind": "reverse"}, {"kind": "jsd", "beta": 0.3}
TV, LK = {"kind": "tv"}, {"kind": "lk"}
OF_BOTH = dict(logit_scale=0.7, softcap=5.0, teacher_logit_scale=1.2, teacher_softcap=7.0)

# fmt: off
DIVERGENCE_CASES = [
    DivergenceCase("kl-forward", "the teacher's log-sum-exp of a shard alone"),
    DivergenceCase("kl-reverse", "KL(t || p) in place of KL(p || t)", REVERSE),
    DivergenceCase("kl-jsd", "a mixture of softmaxes of a shard alone", JSD),
    DivergenceCase("kl-options-of-both", "the student's options on the teacher's logits", OF_BOTH, Gaussian(bias=True)),
    DivergenceCase("kl-reverse-options", "the softcap's slope left out", OF_BOTH | REVERSE, Gaussian(bias=True)),
    DivergenceCase("kl-jsd-options", "beta and 1 - beta exchanged", OF_BOTH | JSD, Gaussian(bias=True)),
    DivergenceCase("kl-jsd-near-one", "1 - beta rounded to fp32", JSD | {"beta": 1 - 2.0**-20}, Gaussian(bias=True)),
    DivergenceCase("tv", "sums over the ids of a shard alone", TV, Gaussian(bias=True), shards=uneven),
    DivergenceCase("tv-options", "a NaN in the gradient at padding", TV | OF_BOTH, Gaussian(bias=True), shards=padded),
    DivergenceCase("lk", "log-sum-exps that are added over shards", LK, Gaussian(bias=True), shards=uneven, masked=0.4),
    DivergenceCase("lk-empty-shards", "a log-sum-exp over nothing; ranks that merge different numbers of groups", LK | OF_BOTH,
                   Gaussian(bias=True), shards=with_empty),
    DivergenceCase("lk-sharp", "an overlap that underflows", LK, Gaussian(scale=6.0), spread=30.0),
    DivergenceCase("kl-masked", "tokens that do not count in dC", problem=Gaussian(bias=True), masked=0.4),
    DivergenceCase("kl-uneven-shards", "a moment relative to another shard's maximum", problem=Gaussian(bias=True),
                   shards=uneven),
    DivergenceCase("kl-empty-shards", "a maximum over nothing", REVERSE, shards=with_empty),
    DivergenceCase("kl-padded", "phantom columns of logit 0 in either head", JSD, Gaussian(shift=-20.0, grid=True),
                   shards=padded, teacher_padding=7),
    DivergenceCase("kl-sharp-teacher", "0 times infinity where the teacher underflows", problem=Gaussian(scale=0.05),
                   spread=30.0),
    DivergenceCase("kl-sharp-student", "0 times infinity where the student underflows", REVERSE, Gaussian(scale=6.0),
                   spread=0.1),
    DivergenceCase("kl-sequence-parallel", "the teacher's slice taken for the whole", {"sequence_parallel": True},
                   Gaussian(24)),
    DivergenceCase("kl-partial", "a sum that somebody else makes, too", {"input_grad": "partial"}),
    DivergenceCase("kl-many-blocks", "state carried between blocks of logits", {"workspace_bytes": 1},
                   Gaussian(300, 16, 1200, bias=True)),
    DivergenceCase("kl-draft", "the teacher's rows by the student's ids", problem=Gaussian(bias=True), shards=uneven,
                   draft="whole"),
    DivergenceCase("kl-draft-split", "ids of another rank", problem=Gaussian(bias=True), shards=padded, draft="split"),
    DivergenceCase("kl-bf16", "logits rounded before their difference is taken", problem=Gaussian(scale=0.2), dtype=BF16),
    DivergenceCase("kl-fp16", "gradients of a token that underflow", JSD, Gaussian(scale=0.2), dtype=FP16),
]
# fmt: on
