"""A policy that samples with top-k is trained on the softmax over the ids that its sampler kept (``KeptIds``).

python docs/examples/sampled_sets.py
"""

import torch
from torch import nn

from cce_dist import KeptIds, linear_log_probs

VOCAB, SIZE, LENGTH, GROUP, PROMPTS, TOP_K, CLIP = 64, 32, 8, 8, 4, 16, 0.2
torch.manual_seed(0)
embedding, cell = nn.Embedding(VOCAB, SIZE), nn.GRU(SIZE, SIZE, batch_first=True)
head = nn.Linear(SIZE, VOCAB, bias=False)
optimizer = torch.optim.Adam([*embedding.parameters(), *cell.parameters(), *head.parameters()], lr=1e-2)


def sample(prompts):
    """Draw with top-k. Returns inputs [B, LENGTH], what was drawn [B, LENGTH], and the set of each token."""
    token, state, inputs, drawn, sets = prompts, None, [], [], []
    for _ in range(LENGTH):
        hidden, state = cell(embedding(token[:, None]), state)
        top = head(hidden[:, 0]).topk(TOP_K)
        choice = torch.multinomial(top.values.softmax(-1), 1)
        inputs.append(token)
        token = top.indices.gather(1, choice)[:, 0]
        drawn.append(token)
        sets.append(top.indices)
    ids = torch.stack(sets, 1).flatten()
    kept = KeptIds(torch.arange(0, len(ids) + 1, TOP_K), ids)
    return torch.stack(inputs, 1), torch.stack(drawn, 1), kept


def policy(inputs, drawn, kept):
    hidden, _ = cell(embedding(inputs))
    return linear_log_probs(hidden, head.weight, drawn, kept=kept, entropy=True)


for step in range(30):
    with torch.no_grad():
        inputs, drawn, kept = sample(torch.arange(PROMPTS).repeat_interleave(GROUP))
        old = policy(inputs, drawn, kept).log_probs
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
        print(f"step {step}: share of even ids {reward.mean():.2f}")
