"""A policy learns to say even ids: log-probabilities from hidden states, and PPO's clipped loss with group-relative advantages.

python docs/examples/clipped_policy.py
"""

import torch
from torch import nn

from cce_dist import linear_log_probs

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB, SIZE, LENGTH, GROUP, PROMPTS, CLIP = 64, 32, 8, 8, 4, 0.2
embedding, cell = nn.Embedding(VOCAB, SIZE, device=device), nn.GRU(SIZE, SIZE, batch_first=True, device=device)
head = nn.Linear(SIZE, VOCAB, bias=False, device=device)
parameters = [*embedding.parameters(), *cell.parameters(), *head.parameters()]
optimizer = torch.optim.Adam(parameters, lr=1e-2)


@torch.no_grad()
def sample(prompts):
    """Draw LENGTH ids for each prompt. Returns the inputs and what was drawn, both [B, LENGTH]."""
    token, state, inputs, drawn = prompts, None, [], []
    for _ in range(LENGTH):
        hidden, state = cell(embedding(token[:, None]), state)
        inputs.append(token)
        token = torch.multinomial(head(hidden[:, 0]).softmax(-1), 1)[:, 0]
        drawn.append(token)
    return torch.stack(inputs, 1), torch.stack(drawn, 1)


def log_probs(inputs, drawn):
    hidden, _ = cell(embedding(inputs))  # [B, LENGTH, SIZE]
    return linear_log_probs(hidden, head.weight, drawn, entropy=True)


for step in range(40):
    inputs, drawn = sample(torch.arange(PROMPTS, device=device).repeat_interleave(GROUP))
    with torch.no_grad():
        old = log_probs(inputs, drawn).log_probs
    reward = (drawn % 2 == 0).float().mean(1)
    groups = reward.view(PROMPTS, GROUP)
    advantage = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    for _ in range(2):
        new = log_probs(inputs, drawn)
        ratio = (new.log_probs - old).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        loss = -torch.minimum(ratio * advantage, clipped * advantage).mean() - 1e-3 * new.entropy.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if step % 39 == 0:
        print(f"step {step}: share of even ids {reward.mean():.2f}")
