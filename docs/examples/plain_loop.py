"""Train a Hugging Face model in a loop of your own, and generate from it.

    pip install '.[hf]'
    python docs/examples/plain_loop.py

``convert`` changes how the loss is computed, and nothing else: parameters, checkpoints and ``generate`` stay as they are.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import cce_dist

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB, LENGTH = 512, 32
config = LlamaConfig(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
)
model = cce_dist.convert(LlamaForCausalLM(config).to(device), z_loss_weight=1e-4)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for step in range(60):
    starts = torch.randint(VOCAB, (16, 1), device=device)
    ids = (starts + torch.arange(LENGTH, device=device)) % VOCAB  # sequences that count upwards
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 0 or step == 59:
        print(f"step {step}: loss {loss.item():.2f}")

cce_dist.require(model)  # raises unless the loss came from hidden states
model.eval()
prompt = torch.arange(100, 116, device=device)[None]
print("after 115:", model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)[0, 16:].tolist())
