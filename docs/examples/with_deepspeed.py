"""DeepSpeed: a section of the configuration turns the loss on.

pip install '.[deepspeed,hf]'
torchrun --nproc-per-node 2 docs/examples/with_deepspeed.py

On CPUs the first run compiles DeepSpeed's collectives: half a minute, with a C++ compiler.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cce_dist.integrations import deepspeed as cce

VOCAB, LENGTH = 512, 32
config = LlamaConfig(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
)
torch.manual_seed(0)
model = LlamaForCausalLM(config)
ds_config = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "Adam", "params": {"lr": 3e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "cce_dist": {"enabled": True, "z_loss_weight": 1e-4},
}
engine, *_ = cce.initialize(model=model, config=ds_config, model_parameters=model.parameters())

rank = torch.distributed.get_rank()
torch.manual_seed(1 + rank)  # each rank has its own batch
for step in range(40):
    starts = torch.randint(VOCAB, (8, 1), device=engine.device)
    ids = (starts + torch.arange(LENGTH, device=engine.device)) % VOCAB  # sequences that count upwards
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    if step % 39 == 0:
        print(f"rank {rank}: step {step}: loss {loss.item():.2f}", flush=True)

cce.require(engine)  # raises unless the section turned the loss on and the model used it
torch.distributed.destroy_process_group()
