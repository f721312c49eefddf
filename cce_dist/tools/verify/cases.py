"""The matrix: named traps, each a small problem with the options that spring it, and what it catches."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from cce_dist.filter import GradFilter
from cce_dist.shard import even_rows

Bounds = list[tuple[int, int]]


@dataclass(frozen=True)
class Problem:
    """Hidden states, whole weight and labels, float64 on CPU: hidden [N, D], weight [V, D], bias [V] or None, labels [N]."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    bias: Tensor | None = None

    def tensors(self, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor | None]:
        """Hidden states, weight and bias in a dtype on a device, for autograd to start at."""
        bias = None if self.bias is None else self.bias.to(device, dtype).detach()
        return self.hidden.to(device, dtype).detach(), self.weight.to(device, dtype).detach(), bias


def even(vocab_size: int, ranks: int) -> Bounds:
    return [even_rows(vocab_size, rank, ranks) for rank in range(ranks)]


def uneven(vocab_size: int, ranks: int) -> Bounds:
    """A first shard of one row, a last one of nearly all."""
    cuts = [0, *range(1, ranks), vocab_size]
    return list(itertools.pairwise(cuts))


def with_empty(vocab_size: int, ranks: int) -> Bounds:
    """Rank 0 holds everything but the last third, the last rank the rest, those between nothing."""
    if ranks == 1:
        return [(0, vocab_size)]
    cut = vocab_size * 2 // 3
    return [(0, cut), *[(cut, cut)] * (ranks - 2), (cut, vocab_size)]


def padded(vocab_size: int, ranks: int) -> Bounds:
    """Equal shards of a multiple of 64 rows: the last are padded, or padding alone."""
    rows = -(-vocab_size // (ranks * 64)) * 64 + 64
    return [(r * rows, (r + 1) * rows) for r in range(ranks)]


def random_problem(
    num_tokens: int = 37, hidden_size: int = 24, vocab_size: int = 203, *, bias: bool = False, scale: float = 0.5,
    labels: Callable[[Tensor, int], Tensor] | None = None, shift: float = 0.0, spike: float = 0.0, grid: bool = False,
) -> Callable[[torch.Generator], Problem]:  # fmt: skip
    """Gaussian data. ``shift`` is added to every logit, ``spike`` to one logit of every other token.

    ``grid`` rounds to eighths, so that all logits are exact in fp32 in any order of summation, also next to a shift of 1e4.
    """

    def draw(generator: torch.Generator) -> Problem:
        hidden = torch.randn(num_tokens, hidden_size, generator=generator, dtype=torch.float64)
        weight = torch.randn(vocab_size, hidden_size, generator=generator, dtype=torch.float64) * scale
        y = torch.randint(vocab_size, (num_tokens,), generator=generator)
        if grid:
            hidden, weight = (hidden * 8).round() / 8, (weight * 8).round() / 8
        if shift or spike:  # through two directions of their own
            hidden[:, 0], weight[:, 0] = 1.0, shift
            hidden[:, 1], weight[:, 1] = 0.0, 0.0
            hidden[::2, 1], weight[vocab_size // 2, 1] = 1.0, spike
        b = torch.randn(vocab_size, generator=generator, dtype=torch.float64) if bias else None
        return Problem(hidden, weight, y if labels is None else labels(y, vocab_size), b)

    return draw


@dataclass(frozen=True)
class Case:
    """One line of the matrix.

    Attributes:
        catches: The mistake that would fail it.
        options: Arguments of ``linear_cross_entropy``.
        problem: Draws the data.
        shards: Rows (start, stop) of each rank, from the vocabulary size and the number of ranks.
        upstream: Gradient of each token's loss for reduction "none", from a generator and the number of tokens.
        objective: What is differentiated: "loss", or "aux", a sum of all the differentiable aux outputs.
        shape: Leading dimensions of input, whose product is the number of tokens; None for [N].
        in_groups: Tokens of a group whose gradients are made in forward; 0: as the sizes say.
    """

    name: str
    catches: str
    options: dict = field(default_factory=dict)
    problem: Callable[[torch.Generator], Problem] = field(default_factory=random_problem)
    shards: Callable[[int, int], Bounds] = even
    dtype: torch.dtype = torch.float32
    upstream: Callable[[torch.Generator, int], Tensor] | None = None
    objective: str = "loss"
    shape: tuple[int, ...] | None = None
    autocast: bool = False
    noncontiguous: bool = False
    accumulate: bool = False
    in_groups: int = 0


def zipf_problem(
    num_tokens: int = 300,
    hidden_size: int = 96,
    vocab_size: int = 4000,
    *,
    bias: bool = False,
    labels: Callable[[Tensor, int], Tensor] | None = None,
) -> Callable[[torch.Generator], Problem]:
    """Logits with a Zipf unigram and a likely label a token: about half of the tiles are worth dropping."""

    def draw(generator: torch.Generator) -> Problem:
        weight = torch.randn(vocab_size, hidden_size, generator=generator, dtype=torch.float64) * 0.1
        weight[:, 0] = -torch.arange(1, vocab_size + 1, dtype=torch.float64).log() * 1.2
        y = (torch.rand(num_tokens, generator=generator, dtype=torch.float64) ** 20 * vocab_size).long()
        hidden = torch.randn(num_tokens, hidden_size, generator=generator, dtype=torch.float64) * 0.3 + 4 * weight[y]
        hidden[:, 0] = 1.0
        b = 0.1 * torch.randn(vocab_size, generator=generator, dtype=torch.float64) if bias else None
        return Problem(hidden, weight, y if labels is None else labels(y, vocab_size), b)

    return draw


def ignore(which: slice | None, index: int = -100) -> Callable[[Tensor, int], Tensor]:
    def apply(labels: Tensor, vocab_size: int) -> Tensor:
        labels = labels.clone()
        labels[slice(None) if which is None else which] = index
        return labels

    return apply


def signed(generator: torch.Generator, num_tokens: int) -> Tensor:
    weights = torch.randn(num_tokens, generator=generator, dtype=torch.float64)
    weights[::5] = 0.0
    return weights


EVERYTHING = dict(label_smoothing=0.1, logit_scale=0.7, softcap=5.0, z_loss_weight=1e-2)
NONE = {"reduction": "none"}
ZIPF = zipf_problem()
FILTERED = GradFilter(always=True)  # on Triton too, where heads as small as these have exact gradients
BF16, FP16 = torch.bfloat16, torch.float16

# fmt: off
CASES = [
    Case("plain", "the target of another rank's shard"),
    Case("sum", "a division by the number of tokens", {"reduction": "sum"}),
    Case("none-signed-upstream", "a scalar upstream gradient assumed", NONE, upstream=signed),
    Case("batch-sequence-dims", "flattened leading dimensions", NONE, upstream=signed, shape=(4, 9),
         problem=random_problem(36)),
    Case("noncontiguous-input", "strides taken for granted", noncontiguous=True),
    Case("bias", "the bias of another shard", problem=random_problem(bias=True)),
    Case("label-smoothing", "smoothing over the local shard", {"label_smoothing": 0.2}),
    Case("label-smoothing-one", "the label counted where it has no weight", {"label_smoothing": 1.0}),
    Case("z-loss", "z-loss on a local log-sum-exp", {"z_loss_weight": 0.1}),
    Case("softcap-and-scale", "the softcap's slope left out", {"softcap": 2.0, "logit_scale": 1.3}),
    Case("everything", "options that only work alone", EVERYTHING, random_problem(bias=True, labels=ignore(slice(0, None, 4)))),
    Case("num-tokens", "the mean over local tokens", {"num_tokens": 101}),
    Case("ignored-some", "ignored tokens counted in the mean", problem=random_problem(labels=ignore(slice(0, None, 3)))),
    Case("ignored-all", "0 / 0", problem=random_problem(labels=ignore(None))),
    Case("ignore-index-valid-id", "an ignore_index that is an id", {"ignore_index": 7},
         random_problem(labels=ignore(slice(0, None, 3), 7))),
    Case("labels-first-shard", "a shard that owns no label", problem=random_problem(labels=lambda y, v: y % 2)),
    Case("labels-last-shard", "labels counted from the wrong start", problem=random_problem(labels=lambda y, v: v - 1 - y % 2)),
    Case("uneven-shards", "equal shards assumed", problem=random_problem(bias=True), shards=uneven),
    Case("empty-shards", "a maximum over nothing", EVERYTHING, shards=with_empty),
    Case("padded-shards", "padding rows in the sum or with gradient", EVERYTHING, random_problem(bias=True), shards=padded),
    Case("padded-negative-logits", "phantom columns of logit 0", {"label_smoothing": 0.1},
         random_problem(shift=-1e4, grid=True), shards=padded),
    Case("logits-at-minus-1e4", "a maximum floored at 0", problem=random_problem(shift=-1e4, grid=True)),
    Case("logits-at-plus-1e4", "the sum lost next to a large maximum", {"label_smoothing": 0.1},
         random_problem(shift=1e4, grid=True)),
    Case("gap-of-1e4", "the log of an underflowed sum", problem=random_problem(spike=1e4, grid=True)),
    Case("gap-of-1e4-aux", "0 times infinity in the entropy", problem=random_problem(spike=1e4, grid=True), objective="aux"),
    Case("aux", "an aux output without gradient", NONE, objective="aux"),
    Case("aux-everything", "aux gradients with all options", EVERYTHING, random_problem(bias=True), objective="aux"),
    Case("sequence-parallel", "dE of the wrong slice", {"sequence_parallel": True}, random_problem(24 * 3), shape=(24, 3)),
    Case("sequence-parallel-all", "the same with all options", {"sequence_parallel": True, **EVERYTHING},
         random_problem(24, labels=ignore(slice(0, None, 4)))),
    Case("input-grad-partial", "dE summed when it should not be", {"input_grad": "partial"}),
    Case("main-grad", "dC overwritten instead of added", accumulate=True),
    Case("in-groups", "a group that sets dC and does not add to it", {"softcap": 20.0, "num_tokens": 50, "z_loss_weight": 1e-3},
         random_problem(bias=True, labels=ignore(slice(0, 12))), in_groups=11),
    Case("in-groups-uneven-shards", "a group's statistics merged with another's", problem=random_problem(scale=0.2),
         shards=uneven, dtype=BF16, in_groups=16),
    Case("in-groups-expected", "a token's own upstream gradient left out of dE", {**NONE, "z_loss_weight": 1e-3},
         random_problem(bias=True, labels=ignore(slice(0, 12))), upstream=lambda _, n: torch.full((n,), 0.3), in_groups=11),
    Case("in-groups-unexpected", "an upstream gradient taken for that of all", NONE, random_problem(scale=0.2), shards=uneven,
         upstream=signed, in_groups=16),
    Case("in-groups-main-grad", "dC overwritten instead of added", {"sequence_parallel": True}, random_problem(24 * 3),
         in_groups=20, accumulate=True),
    Case("in-groups-sequence-parallel", "dE of the wrong slice", {"sequence_parallel": True}, random_problem(24 * 3),
         in_groups=20),
    Case("one-token", "a block of rows that is not full", problem=random_problem(1)),
    Case("no-tokens", "a launch over nothing", problem=random_problem(0)),
    Case("vocabulary-of-one", "shards that are empty but one", problem=random_problem(vocab_size=1, grid=True)),
    Case("odd-sizes", "columns past the end of a tile", EVERYTHING, random_problem(131, 17, 519)),
    Case("many-blocks", "state carried between blocks of logits", {"workspace_bytes": 1, **EVERYTHING},
         random_problem(300, 16, 1200, bias=True), objective="aux"),
    Case("bf16", "logits rounded before the log-sum-exp", problem=random_problem(scale=0.2), dtype=BF16),
    Case("bf16-everything", "16-bit statistics", EVERYTHING, random_problem(bias=True), dtype=BF16),
    Case("fp16-small-upstream", "an underflow of 1/N times a probability", {"num_tokens": 1 << 20}, dtype=FP16),
    Case("autocast", "fp32 products under autocast", autocast=True),
    Case("filter-nothing-dropped", "eps = 0 that is not exact", {"grad_filter": GradFilter(eps=0.0)}, ZIPF),
    Case("filter", "a listed column lost, a control variate of the wrong mass", {"grad_filter": FILTERED}, ZIPF),
    Case("filter-plain", "an element that matters dropped", {"grad_filter": replace(FILTERED, compensate=False)}, ZIPF),
    Case("filter-full-c", "dC filtered all the same", {"grad_filter": replace(FILTERED, weight=False)}, ZIPF),
    Case("filter-full-c-main-grad", "dC added by the exact and by the filtered path",
         {"grad_filter": replace(FILTERED, weight=False)}, ZIPF, accumulate=True),
    Case("filter-full-e", "dE filtered all the same", {"grad_filter": replace(FILTERED, hidden=False)}, ZIPF),
    Case("filter-all-kept", "room for lists that run out", {"grad_filter": replace(FILTERED, eps=1e-30)}, ZIPF),
    Case("filter-z-loss", "the filter's test before the z-loss", {"grad_filter": FILTERED, "z_loss_weight": 0.05}, ZIPF),
    Case("filter-smoothing", "the uniform term dropped, or twice in frequent columns",
         {"grad_filter": FILTERED, "label_smoothing": 0.1}, zipf_problem(bias=True)),
    Case("filter-smoothing-softcap", "a uniform term under a slope", {"grad_filter": FILTERED, "label_smoothing": 0.1,
         "softcap": 20.0}, ZIPF),
    Case("filter-softcap", "a dropped mass without the softcap's slope", {"grad_filter": FILTERED, "softcap": 20.0},
         zipf_problem(bias=True, labels=ignore(slice(0, None, 4)))),
    Case("filter-signed-upstream", "weights of both signs", {"grad_filter": FILTERED, **NONE}, ZIPF, upstream=signed),
    Case("filter-entropy", "an entropy's gradient dropped", {"grad_filter": FILTERED}, ZIPF, objective="aux"),
    Case("filter-uneven-shards", "a bound of the shard's own", {"grad_filter": FILTERED}, ZIPF, shards=uneven),
    Case("filter-empty-shards", "a bound that one rank does not take part in", {"grad_filter": FILTERED}, ZIPF,
         shards=with_empty),
    Case("filter-padded-shards", "padding listed", {"grad_filter": FILTERED}, zipf_problem(bias=True), shards=padded),
    Case("filter-sequence-parallel", "a bound of the slice alone", {"grad_filter": FILTERED, "sequence_parallel": True},
         ZIPF),
    Case("filter-bf16", "d_hidden rounded between frequent columns and lists", {"grad_filter": FILTERED}, ZIPF, dtype=BF16),
]
# fmt: on
