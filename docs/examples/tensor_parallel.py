"""A head whose vocabulary is split over the ranks of a group: each holds its rows of the weight, and nobody the logits.

torchrun --nproc-per-node 2 docs/examples/tensor_parallel.py
"""

import torch
import torch.distributed as dist
from torch import nn

from cce_dist import VocabShard, linear_cross_entropy

VOCAB, HIDDEN, TOKENS = 32_000, 128, 256
device = torch.device("cuda", dist.get_node_local_rank(0)) if torch.cuda.is_available() else torch.device("cpu")
dist.init_process_group(device_id=device if device.type == "cuda" else None)
shard = VocabShard.even(VOCAB, dist.group.WORLD)  # ids [shard.start, shard.stop) are this rank's

# Hidden states and labels are the same on all ranks of the group: in a model, the layers before the head see to that.
torch.manual_seed(0)
trunk = nn.Linear(HIDDEN, HIDDEN, device=device)
features = torch.randn(TOKENS, HIDDEN, device=device)
labels = torch.randint(VOCAB, (TOKENS,), device=device)

torch.manual_seed(1 + dist.get_rank())  # each rank draws its own rows
weight = nn.Parameter(0.02 * torch.randn(shard.num_rows, HIDDEN, device=device))
optimizer = torch.optim.Adam([weight, *trunk.parameters()], lr=1e-2)

for step in range(20):
    hidden = trunk(features)
    loss = linear_cross_entropy(hidden, weight, labels, shard=shard)
    loss.backward()  # the gradient of hidden is summed over the group, the weight's stays with its rows
    optimizer.step()
    optimizer.zero_grad()
    if step % 19 == 0:
        print(f"rank {dist.get_rank()}: step {step}: loss {loss.item():.6f}", flush=True)

del shard  # gloo's threads end with the last reference to the group
dist.destroy_process_group()
