"""FSDP2 without gathering the head's weight: ranks gather hidden states, and each computes its own rows of the vocabulary.

pip install '.[hf]'
torchrun --nproc-per-node 2 docs/examples/fsdp2.py
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import cce_dist

logging.set_verbosity_error()
kind = "cuda" if torch.cuda.is_available() else "cpu"
if kind == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank(0))
dist.init_process_group()
mesh = init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("dp",))

torch.manual_seed(0)  # the same weights on all ranks
VOCAB, LENGTH = 512, 32
config = LlamaConfig(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
)
model = cce_dist.convert(LlamaForCausalLM(config).to(kind), shard_over=mesh)  # before fully_shard
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh, ignored_params=set(model.lm_head.parameters()))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

torch.manual_seed(1 + dist.get_rank())  # each rank has its own batch
for step in range(40):
    starts = torch.randint(VOCAB, (8, 1), device=kind)
    ids = (starts + torch.arange(LENGTH, device=kind)) % VOCAB  # sequences that count upwards
    loss = model(input_ids=ids, labels=ids).loss  # of this rank's tokens; gradients are averaged over ranks
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 39 == 0:
        print(f"rank {dist.get_rank()}: step {step}: loss {loss.item():.2f}", flush=True)

cce_dist.require(model)
dist.destroy_process_group()
