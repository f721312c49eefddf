"""Fine-tune a causal language model with Trainer. One line, ``convert``, has the loss computed without logits.

    pip install '.[hf]'
    python docs/examples/trainer.py
    torchrun --nproc-per-node 2 docs/examples/trainer.py

With several GPUs use torchrun: without it Trainer takes ``nn.DataParallel``, which ``convert`` refuses.

The model is small and random, so that this runs on a CPU in seconds. For a real one, load it with
``AutoModelForCausalLM.from_pretrained`` and tokenize your own text.
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import cce_dist

torch.manual_seed(0)
VOCAB, LENGTH = 512, 32
config = LlamaConfig(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
)
model = cce_dist.convert(LlamaForCausalLM(config))  # before Trainer

# Each sequence counts upwards from a random id.
starts = torch.randint(VOCAB, (256, 1))
sequences = (starts + torch.arange(LENGTH)) % VOCAB
data = [{"input_ids": ids, "labels": ids} for ids in sequences]

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, max_steps=40, per_device_train_batch_size=16, learning_rate=3e-3, logging_steps=10, report_to=[],
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()

cce_dist.require(model)  # raises unless the loss came from hidden states
for entry in trainer.state.log_history:
    if "loss" in entry:
        print(f"step {entry['step']}: loss {float(entry['loss']):.2f}")
