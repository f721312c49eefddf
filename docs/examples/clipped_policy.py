"""A policy learns to say even ids: PPO's clipped loss from hidden states, with group-relative advantages.

python docs/examples/clipped_policy.py
"""

import torch
from torch import nn

from cce_dist import linear_cross_entropy, linear_log_probs, objectives

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


policy_loss = objectives.clipped_policy(CLIP, CLIP, entropy_coef=1e-3)
for step in range(40):
    inputs, drawn = sample(torch.arange(PROMPTS, device=device).repeat_interleave(GROUP))
    with torch.no_grad():
        hidden, _ = cell(embedding(inputs))  # [B, LENGTH, SIZE]
        old = linear_log_probs(hidden, head.weight, drawn).log_probs
    reward = (drawn % 2 == 0).float().mean(1)
    groups = reward.view(PROMPTS, GROUP)
    advantage = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    for _ in range(2):
        hidden, _ = cell(embedding(inputs))
        loss = linear_cross_entropy(
            hidden, head.weight, drawn, token_loss=policy_loss, token_inputs=(advantage.expand_as(old), old)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if step % 39 == 0:
        print(f"step {step}: share of even ids {reward.mean():.2f}")
