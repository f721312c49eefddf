"""A head's input with the statistics of a trained model, without the model.

Filtering and caching depend on how probability is spread over the vocabulary, so uniform noise measures nothing. Here

    logits = log-unigram + a boost for a few candidates of each context + noise

* the unigram distribution is Zipf's, exponent 1, carried by one direction of the hidden space; ids are only roughly in
  order of frequency, as a BPE's are;
* each token has its own candidates, drawn from the unigram distribution and boosted until together they hold their share
  of the softmax, so that a few ids are likely, some hundreds plausible, and the rest a long tail;
* the noise comes by itself: a candidate's direction overlaps a little with every other row of the weight;
* labels are drawn from the softmax itself, so the loss is the entropy that a calibrated model would have.

Over the shapes of ``shapes.py`` this gives a loss of 3.1 to 4.3 nats, a top probability of about 0.5 and a 50th of about
6e-4, means over tokens; every run prints what it drew. Share of tiles of 128 tokens x 256 ids that hold a label or a
probability of at least 2**-12 (N = 256, bf16, 2026-11): gemma-2-2b 0.16, llama-3-8b 0.28, phi-3.5 0.64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cce_dist.bench.shapes import HeadShape

IGNORE_INDEX = -100
NUM_CANDIDATES = 4  # few: they decide how many gradient tiles hold anything
CANDIDATE_DECAY = 2.5  # the k-th candidate's share falls as k^-2.5
CANDIDATE_MASS = (0.3, 0.99)  # softmax mass of a token's candidates together, uniform over tokens
ID_DISORDER = 0.5  # nats of noise on the log-frequency that ids are sorted by
UNIGRAM_SCALE = 8.0  # length of the hidden states along the unigram direction
LABEL_CHUNK_BYTES = 512 << 20


class Workload(NamedTuple):
    """Input of one head, and what it looks like.

    Attributes:
        hidden: [N, D] hidden states.
        weight: [V, D] head weight, of the same dtype.
        labels: [N] int64, -100 where ignored.
        loss: Mean negative log-likelihood of the labels, nats.
        top_probability: Largest probability of a token, mean over tokens.
        probability_50: 50th largest probability of a token, mean over tokens.
    """

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    loss: float
    top_probability: float
    probability_50: float


def make_workload(
    shape: HeadShape,
    num_tokens: int,
    *,
    ignored: float = 0.0,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Workload:
    """Draw hidden states, a weight and labels for a head of the given shape.

    Args:
        shape: D and V of the head.
        num_tokens: N.
        ignored: Expected share of labels that are -100, in [0, 1).
        dtype: Of hidden states and weight.
        device: Where everything is drawn and stays.
        seed: The same seed, shape and device give the same workload.

    Raises:
        ValueError: ``ignored`` is not in [0, 1), or ``num_tokens`` is not positive.
    """
    if not 0.0 <= ignored < 1.0:
        raise ValueError(f"the share of ignored labels must be in [0, 1), got {ignored}")
    if num_tokens < 1:
        raise ValueError(f"num_tokens must be positive, got {num_tokens}")
    generator = torch.Generator(device).manual_seed(seed)
    log_unigram = _log_unigram(shape.vocab_size, generator)
    direction = torch.randn(shape.hidden_size, generator=generator, device=device)
    direction /= direction.norm()

    weight = torch.randn(shape.vocab_size, shape.hidden_size, generator=generator, device=device, dtype=dtype)
    weight *= shape.hidden_size**-0.5
    hidden = (UNIGRAM_SCALE * direction).repeat(num_tokens, 1)
    candidates, boosts = _candidates(num_tokens, log_unigram, shape.hidden_size, generator)
    for candidate, boost in zip(candidates.T, boosts.T, strict=True):
        hidden.addcmul_(weight[candidate].float(), boost[:, None])
    # Last, so that the candidates' boosts do not lean along the unigram direction. The mean is immaterial to a softmax.
    unigram_part = (log_unigram - log_unigram.mean()) / UNIGRAM_SCALE
    weight.addr_(unigram_part.to(dtype), direction.to(dtype))
    hidden = hidden.to(dtype)

    labels, loss, top_probability, probability_50 = _draw_labels(hidden, weight, generator)
    dropped = torch.rand(num_tokens, generator=generator, device=device) < ignored
    labels.masked_fill_(dropped, IGNORE_INDEX)
    return Workload(hidden, weight, labels, loss, top_probability, probability_50)


def _log_unigram(vocab_size: int, generator: torch.Generator) -> Tensor:
    """[V] fp32 logarithms of Zipf's probabilities, ids roughly in order of frequency."""
    rank = torch.arange(1, vocab_size + 1, device=generator.device, dtype=torch.float32)
    noise = torch.randn(vocab_size, generator=generator, device=generator.device)
    order = (rank.log() + ID_DISORDER * noise).argsort()
    log_unigram = torch.empty_like(rank)
    log_unigram[order] = -rank.log()
    return log_unigram.log_softmax(0)


def _candidates(
    num_tokens: int, log_unigram: Tensor, hidden_size: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """[N, K] ids of each token's candidates, and what their logits gain."""
    device = log_unigram.device
    ids = torch.multinomial(log_unigram.exp(), num_tokens * NUM_CANDIDATES, replacement=True, generator=generator)
    ids = ids.view(num_tokens, NUM_CANDIDATES)
    share = torch.arange(1, NUM_CANDIDATES + 1, device=device, dtype=torch.float32) ** -CANDIDATE_DECAY
    low, high = CANDIDATE_MASS
    mass = low + (high - low) * torch.rand(num_tokens, 1, generator=generator, device=device)
    # The unigram background weighs 1 before normalisation, so candidates that hold the mass m weigh m / (1 - m).
    boosts = (share / share.sum()).log() + mass.logit() - log_unigram[ids]
    repeated = (ids[:, :, None] == ids[:, None, :]).tril(-1).any(-1)
    boosts = boosts.clamp_min(0.0).masked_fill(repeated, 0.0)
    # The overlap noise of variance |boosts|^2 / D raises the background's weight by exp(variance / 2).
    noise_variance = boosts.square().sum(1, keepdim=True) / hidden_size
    return ids, torch.where(boosts > 0, boosts + noise_variance / 2, boosts)


def _draw_labels(hidden: Tensor, weight: Tensor, generator: torch.Generator) -> tuple[Tensor, float, float, float]:
    """Draw a label for each token from its own softmax; also the loss and two points of the sorted probabilities."""
    rows = max(1, LABEL_CHUNK_BYTES // (4 * weight.shape[0]))
    labels, totals = [], torch.zeros(3, device=hidden.device, dtype=torch.float64)
    for chunk in hidden.split(rows):
        probability = torch.mm(chunk, weight.T).float().softmax(1)
        label = torch.multinomial(probability, 1, generator=generator)
        top = probability.topk(min(50, weight.shape[0]), dim=1).values
        loss = -probability.gather(1, label).log().sum()
        totals += torch.stack([loss, top[:, 0].sum(), top[:, -1].sum()])
        labels.append(label.squeeze(1))
    loss, top_probability, probability_50 = (totals / hidden.shape[0]).tolist()
    return torch.cat(labels), loss, top_probability, probability_50
