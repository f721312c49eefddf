"""A tiny policy whose sampler cut its softmax, and the losses of trainers that normalise over what it kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cce_dist import KeptIds

VOCAB, SIZE, PROMPT, LENGTH, BATCH, STEPS, TOP_P = 50, 16, 3, 9, 4, 30, 0.8


class Rollout(NamedTuple):
    """What an engine returns of a padded batch, in the trainers' forms. Row t of a mask belongs to token t."""

    ids: Tensor  # [B, S]
    completion: Tensor  # [B, S] bool: which tokens were sampled
    log_probs: Tensor  # [B, S] of the sampler, over what it kept; 0 elsewhere
    lists: list[list[list[int]]]  # per sequence and sampled token; the last sequence's sampler cut nothing
    padded: Tensor  # [B, S, K] int32, -1 in places without an id
    advantages: Tensor  # [B, S]

    @property
    def labels(self) -> Tensor:
        """[B, S]: the next token where it was sampled, else -100."""
        labels = self.ids.masked_fill(~self.completion, -100).roll(-1, 1)
        labels[:, -1] = -100
        return labels

    def kept(self) -> KeptIds:
        return KeptIds.from_lists([row for rows in self.lists for row in rows], self.labels)


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.cell = nn.Embedding(VOCAB, SIZE), nn.GRU(SIZE, SIZE, batch_first=True)
        self.head = nn.Linear(SIZE, VOCAB, bias=False)
        nn.init.normal_(self.head.weight, std=0.8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.cell(self.embedding(ids))[0]


def top_p_lists(logits: Tensor, top_p: float = TOP_P) -> list[list[int]]:
    """Return the ids that vLLM keeps of rows of logits: the largest, until their sum reaches top_p."""
    p, ids = logits.softmax(-1).sort(-1, descending=True)
    counts = (p.cumsum(-1) - p < top_p).sum(-1)
    return [row[:count].tolist() for row, count in zip(ids, counts.tolist(), strict=True)]


@torch.no_grad()
def rollout(policy: Policy) -> Rollout:
    """Draw from the policy as an engine does. The last sequence samples from the whole vocabulary."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB, (BATCH, LENGTH), generator=generator)
    lists: list[list[list[int]]] = [[] for _ in range(BATCH)]
    log_probs = torch.zeros(BATCH, LENGTH)
    for place in range(PROMPT, LENGTH):
        logits = policy.head(policy(ids[:, :place])[:, -1])
        for row, kept in enumerate(top_p_lists(logits)):
            kept = kept if row < BATCH - 1 else list(range(VOCAB))
            log_p = logits[row, kept].log_softmax(-1)
            choice = int(torch.multinomial(log_p.exp(), 1, generator=generator))
            ids[row, place], log_probs[row, place] = kept[choice], log_p[choice]
            lists[row].append(kept)
    padded = torch.full((BATCH, LENGTH, VOCAB), -1, dtype=torch.int32)
    for row, rows in enumerate(lists[:-1]):
        for place, kept in enumerate(rows):
            padded[row, PROMPT + place, : len(kept)] = torch.tensor(kept, dtype=torch.int32)
    completion = torch.arange(LENGTH).expand(BATCH, -1) >= PROMPT
    advantages = torch.randn(BATCH, 1, generator=generator).expand(-1, LENGTH)
    return Rollout(ids, completion, log_probs, [*lists[:-1], [None] * (LENGTH - PROMPT)], padded, advantages)  # type: ignore[list-item]


Scores = Callable[[Policy, Rollout], Tensor]  # log-probabilities [B, S - 1] of the next tokens


def whole_logits(policy: Policy, drawn: Rollout, where_empty: str = "whole") -> Tensor:
    """Mask all logits outside of the lists, as NeMo-RL and prime-rl do. ``where_empty``: what a row without ids means."""
    logits, mask, target = policy.head(policy(drawn.ids))[:, :-1], drawn.padded[:, 1:], drawn.ids[:, 1:, None]
    listed = (
        torch.zeros_like(logits, dtype=torch.int32).scatter_add_(2, mask.long().clamp(min=0), (mask >= 0).int()) > 0
    )
    listed |= ~listed.any(-1, keepdim=True)
    return logits.masked_fill(~listed, -torch.inf).log_softmax(-1).gather(2, target)[..., 0]


def curve(scores: Scores, loss_of: Callable[[Tensor, Tensor, Rollout], Tensor], drawn: Rollout) -> list[float]:
    """Train the policy for ``STEPS`` steps on one rollout. Returns the losses, of log-probabilities [B, S - 1]."""
    policy = Policy()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.05)
    losses = []
    for _ in range(STEPS):
        loss = loss_of(scores(policy, drawn), drawn.completion[:, 1:], drawn)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
