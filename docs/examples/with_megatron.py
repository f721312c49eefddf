"""Megatron-core: this script knows nothing of cce_dist. The command that starts it turns the loss on.

    pip install '.[megatron]'
    python -m cce_dist.integrations.megatron --nproc-per-node 2 docs/examples/with_megatron.py

For real training start ``pretrain_gpt.py`` of https://github.com/NVIDIA/Megatron-LM in the same way, with its usual arguments.
This script builds the same ``GPTModel`` from megatron-core alone, with random labels. It needs two GPUs, as Megatron does.
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

VOCAB, LENGTH, BATCH = 512, 32, 4
on_gpu = torch.cuda.is_available()
if on_gpu:
    torch.cuda.set_device(dist.get_node_local_rank(0))
device = torch.device("cuda") if on_gpu else torch.device("cpu")
dist.init_process_group()
parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
tensor_parallel.model_parallel_cuda_manual_seed(0)
torch.manual_seed(0)

config = TransformerConfig(
    num_layers=2, hidden_size=64, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0,
    tensor_model_parallel_size=dist.get_world_size(), use_cpu_initialization=True, masked_softmax_fusion=False,
    gradient_accumulation_fusion=False,
)  # fmt: skip
spec = get_gpt_layer_local_spec(normalization="LayerNorm")
model = GPTModel(config, spec, vocab_size=VOCAB, max_sequence_length=LENGTH).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

ids = torch.randint(VOCAB, (BATCH, LENGTH), device=device)
labels, positions = ids.roll(-1, 1), torch.arange(LENGTH, device=device).expand(BATCH, -1)
mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=device).triu(1)  # True: hidden from the token
for step in range(30):
    loss = model(ids, positions, mask, labels=labels).mean()  # [BATCH, LENGTH] losses
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 29 == 0:
        print(f"rank {dist.get_rank()}: step {step}: loss {loss.item():.4f}", flush=True)
dist.destroy_process_group()
