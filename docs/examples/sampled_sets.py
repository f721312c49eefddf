"""A policy that samples with top-p is trained on the softmax over the ids that its sampler kept (``KeptIds``).

python docs/examples/sampled_sets.py
"""

import torch
from torch import nn

from cce_dist import KeptIds, linear_log_probs

VOCAB, SIZE, LENGTH, GROUP, PROMPTS, TOP_P, CLIP = 64, 32, 8, 8, 4, 0.9, 0.2
torch.manual_seed(0)
embedding, cell = nn.Embedding(VOCAB, SIZE), nn.GRU(SIZE, SIZE, batch_first=True)
head = nn.Linear(SIZE, VOCAB, bias=False)
optimizer = torch.optim.Adam([*embedding.parameters(), *cell.parameters(), *head.parameters()], lr=1e-2)


def sample(prompts):
    """Draw with top-p as an engine does. Returns inputs, drawn ids and their log-probabilities, [B, LENGTH], and the sets."""
    token, state, steps = prompts, None, []
    for _ in range(LENGTH):
        hidden, state = cell(embedding(token[:, None]), state)
        p, ids = head(hidden[:, 0]).softmax(-1).sort(-1, descending=True)
        p = p.masked_fill(p.cumsum(-1) - p >= TOP_P, 0.0)
        choice = torch.multinomial(p, 1)
        log_prob = (p.gather(1, choice) / p.sum(1, keepdim=True)).log()
        steps.append((token, ids.gather(1, choice)[:, 0], log_prob[:, 0], ids.masked_fill(p == 0, -1)))
        token = steps[-1][1]
    inputs, drawn, log_probs, sets = (torch.stack(rows, 1) for rows in zip(*steps, strict=True))
    return inputs, drawn, log_probs, KeptIds.from_padded(sets)  # from_lists takes what engines return


def policy(inputs, drawn, kept=None):
    hidden, _ = cell(embedding(inputs))
    return linear_log_probs(hidden, head.weight, drawn, kept=kept, entropy=True)


for step in range(30):
    with torch.no_grad():
        inputs, drawn, old, kept = sample(torch.arange(PROMPTS).repeat_interleave(GROUP))
        # The policy has not moved yet. Over the whole vocabulary a ratio is what the set has of the probability.
        replayed, whole = ((policy(inputs, drawn, sets).log_probs - old).exp() for sets in (kept, None))
    reward = (drawn % 2 == 0).float().mean(1)
    groups = reward.view(PROMPTS, GROUP)
    advantage = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    for _ in range(2):
        new = policy(inputs, drawn, kept)
        ratio = (new.log_probs - old).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        loss = -torch.minimum(ratio * advantage, clipped * advantage).mean() - 1e-3 * new.entropy.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if step % 29 == 0:
        off, mean = (replayed - 1).abs().max(), whole.mean()
        print(
            f"step {step}: share of even ids {reward.mean():.2f}, ratios off 1 by {off:.1e}, of whole softmaxes {mean:.2f}"
        )
