"""A head's input with the statistics of a trained model, without the model.

    logits = log-unigram + a boost for a few candidates of each context + noise

* the unigram distribution is Zipf's, carried by one direction of the hidden space; ids are roughly in order of frequency;
* each token has its own candidates, drawn from the unigram distribution and boosted until together they hold their share
  of the softmax, so that a few ids are likely, some hundreds plausible, and the rest a long tail;
* noise, because a candidate's direction overlaps a little with every other row of the weight;
* labels are drawn from the softmax itself, so the loss is the entropy that a calibrated model would have.

The cost of a filter depends on how many probabilities exceed its threshold, so ``RUNGS`` is a ladder of softmaxes, from the
unigram distribution alone to a softmax that is sure of its label.
"""

import argparse
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from cce_dist.kernels.filter.bound import num_frequent
from cce_dist.tools.plan.sizes import MODELS

IGNORE_INDEX = -100
MATTERS = 2.0**-12  # probabilities from here on are counted
ID_DISORDER = 0.5  # nats of noise on the log-frequency that ids are sorted by
UNIGRAM_SCALE = 8.0  # length of the hidden states along the unigram direction
LABEL_CHUNK_BYTES = 512 << 20
CANDIDATE_CHUNK = 1024  # tokens whose candidates are compared with one another at a time


class HeadShape(NamedTuple):
    """Hidden size D and vocabulary size V of a head; V is the number of rows of the published weight."""

    hidden_size: int
    vocab_size: int
    name: str = ""


SHAPES = {name: HeadShape(model.hidden_size, model.vocab_size, name) for name, model in MODELS.items()}
SHAPES["toy"] = HeadShape(256, 4_096, "toy")  # for a CPU, and for tests


def shape(name: str) -> HeadShape:
    """Return a shape of ``SHAPES``, or D 2,048 and V 32,768 for "2048x32768"."""
    if name in SHAPES:
        return SHAPES[name]
    if not (sizes := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", name)):
        raise argparse.ArgumentTypeError(
            f"{name!r} is neither D x V, such as 2048x32768, nor one of {', '.join(SHAPES)}"
        )
    return HeadShape(int(sizes[1]), int(sizes[2]), name)


class Rung(NamedTuple):
    """The candidates of a token."""

    count: int
    decay: float  # the share of the k-th candidate falls as k^-decay
    mass: tuple[float, float]  # range of the candidates' total probability, uniform over tokens


RUNGS = {
    "unigram": Rung(16, 0.5, (1e-3, 1e-2)),
    "early": Rung(256, 0.5, (0.02, 0.3)),
    "spread": Rung(256, 0.5, (0.1, 0.8)),
    "middle": Rung(128, 1.0, (0.4, 0.99)),
    "trained": Rung(4, 2.5, (0.3, 0.99)),
    "sharp": Rung(8, 2.0, (0.85, 0.999)),
}


class Workload(NamedTuple):
    """The input of one head, and statistics of its softmax: means over tokens."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D], of the same dtype
    labels: Tensor  # [N] int64, -100 where ignored
    loss: float  # negative log-likelihood of the labels, nats
    top_probability: float
    probability_50: float  # the 50th largest of a token
    num_above: float  # a token's probabilities that reach ``MATTERS``
    num_outside: float  # the same without the most frequent labels, which the filter keeps for every token

    @property
    def drawn(self) -> dict[str, float]:
        """Return the statistics of the softmax by name."""
        return dict(zip(self._fields[3:], self[3:], strict=True))


def make_workload(
    shape: HeadShape,
    num_tokens: int,
    *,
    rung: str = "trained",
    ignored: float = 0.0,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Workload:
    """Draw hidden states, a weight and labels for a head of the given shape.

    The softmax has the distribution ``RUNGS[rung]``; ``ignored`` is the expected share of labels that are -100, in [0, 1). The
    same seed, shape and device give the same workload, on a GPU except for a few tokens.
    """
    generator = torch.Generator(device).manual_seed(seed)
    log_unigram = _log_unigram(shape.vocab_size, generator)
    direction = torch.randn(shape.hidden_size, generator=generator, device=device)
    direction /= direction.norm()

    weight = torch.randn(shape.vocab_size, shape.hidden_size, generator=generator, device=device, dtype=dtype)
    weight *= shape.hidden_size**-0.5
    hidden = (UNIGRAM_SCALE * direction).repeat(num_tokens, 1)
    candidates, boosts = _candidates(num_tokens, RUNGS[rung], log_unigram, shape.hidden_size, generator)
    for candidate, boost in zip(candidates.T, boosts.T, strict=True):
        hidden.addcmul_(weight[candidate].float(), boost[:, None])
    # Last, so that the candidates' boosts have no part along the unigram direction. A softmax does not depend on the mean.
    unigram_part = (log_unigram - log_unigram.mean()) / UNIGRAM_SCALE
    weight.addr_(unigram_part.to(dtype), direction.to(dtype))
    hidden = hidden.to(dtype)

    drawn = [torch.multinomial(p, 1, generator=generator).squeeze(1) for p in _probabilities(hidden, weight)]
    return _described(hidden, weight, torch.cat(drawn), ignored, generator)


def read_workload(
    path: Path, *, ignored: float = 0.0, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu"
) -> Workload:
    """Read hidden states, weight and labels that ``training.py --capture`` wrote; arguments as in ``make_workload``.

    Raises ValueError if the file holds something else.
    """
    try:
        captured = torch.load(path, map_location=device, weights_only=True)
    # torch does not document what it raises for a file of another kind.
    except (pickle.UnpicklingError, LookupError, EOFError, RuntimeError, ValueError):
        captured = None
    if not isinstance(captured, dict) or not captured.keys() >= {"hidden", "weight", "labels"}:
        raise ValueError(f"{path} was not written by 'training.py --capture'")
    hidden, weight = captured["hidden"].to(dtype), captured["weight"].to(dtype)
    return _described(hidden, weight, captured["labels"], ignored, torch.Generator(device).manual_seed(0))


def _log_unigram(vocab_size: int, generator: torch.Generator) -> Tensor:
    """Return the logarithms of Zipf's probabilities, [V] fp32, ids roughly in order of frequency."""
    rank = torch.arange(1, vocab_size + 1, device=generator.device, dtype=torch.float32)
    noise = torch.randn(vocab_size, generator=generator, device=generator.device)
    order = (rank.log() + ID_DISORDER * noise).argsort()
    log_unigram = torch.empty_like(rank)
    log_unigram[order] = -rank.log()
    return log_unigram.log_softmax(0)


def _candidates(
    num_tokens: int, rung: Rung, log_unigram: Tensor, hidden_size: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return the ids of each token's candidates, and what is added to their logits, both [N, K]."""
    device = log_unigram.device
    ids = torch.multinomial(log_unigram.exp(), num_tokens * rung.count, replacement=True, generator=generator)
    ids = ids.view(num_tokens, rung.count)
    share = torch.arange(1, rung.count + 1, device=device, dtype=torch.float32) ** -rung.decay
    low, high = rung.mass
    mass = low + (high - low) * torch.rand(num_tokens, 1, generator=generator, device=device)
    # The unigram background weighs 1 before normalisation, so candidates that hold the mass m weigh m / (1 - m).
    boosts = (share / share.sum()).log() + mass.logit() - log_unigram[ids]
    repeated = [(some[:, :, None] == some[:, None, :]).tril(-1).any(-1) for some in ids.split(CANDIDATE_CHUNK)]
    boosts = boosts.clamp_min(0.0).masked_fill(torch.cat(repeated), 0.0)
    # The overlap noise of variance |boosts|^2 / D raises the background's weight by exp(variance / 2).
    noise_variance = boosts.square().sum(1, keepdim=True) / hidden_size
    return ids, torch.where(boosts > 0, boosts + noise_variance / 2, boosts)


def _probabilities(hidden: Tensor, weight: Tensor) -> Iterator[Tensor]:
    """Yield the softmax of a few tokens at a time, [n, V] fp32."""
    rows = max(1, LABEL_CHUNK_BYTES // (4 * weight.shape[0]))
    for chunk in hidden.split(rows):
        yield torch.mm(chunk, weight.T).float().softmax(1)


def _described(hidden: Tensor, weight: Tensor, labels: Tensor, ignored: float, generator: torch.Generator) -> Workload:
    """Return a workload with the statistics of the tokens that have a label. Then drop a share of the labels."""
    vocab_size = weight.shape[0]
    totals = torch.zeros(3, device=hidden.device, dtype=torch.float64)
    above = torch.zeros(vocab_size, device=hidden.device, dtype=torch.int64)
    live = labels >= 0
    start = 0
    for probability in _probabilities(hidden, weight):
        rows = slice(start, start := start + len(probability))
        probability = probability[live[rows]]
        top = probability.topk(min(50, vocab_size), dim=1).values
        loss = -probability.gather(1, labels[rows][live[rows], None]).log().sum()
        totals += torch.stack([loss, top[:, 0].sum(), top[:, -1].sum()])
        above += (probability >= MATTERS).sum(0)
    num_tokens = max(1, int(live.sum()))
    frequent = torch.bincount(labels[live], minlength=vocab_size).topk(num_frequent(vocab_size, MATTERS)).indices
    outside = above.index_fill(0, frequent, 0)
    sums = [*totals.tolist(), above.sum().item(), outside.sum().item()]
    dropped = torch.rand(len(labels), generator=generator, device=labels.device) < ignored
    labels.masked_fill_(dropped, IGNORE_INDEX)
    return Workload(hidden, weight, labels, *(total / num_tokens for total in sums))
