"""Megatron-core: a GPT trained with Megatron's own loss and with ours, over tensor- and pipeline-parallel ranks.

    pip install '.[megatron]'
    torchrun --nproc-per-node 4 docs/examples/with_megatron.py --tp 2 --pp 2

Prints both loss curves and their largest difference. It needs a GPU for each rank, as Megatron does. A training script such as
``pretrain_gpt.py`` of https://github.com/NVIDIA/Megatron-LM stays as it is: start it by ``python -m
cce_dist.integrations.megatron`` in place of torchrun.
"""

import argparse
import os

import torch

try:
    device = torch.device(torch.cuda.current_device())
except (AssertionError, RuntimeError):
    message = "with_megatron.py: torch finds no GPU, and Megatron needs one for each rank"
    raise SystemExit(message if os.environ.get("RANK", "0") == "0" else 1) from None

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

from cce_dist.integrations import megatron as cce

VOCAB, LENGTH, BATCH, MICROBATCHES, STEPS = 512, 32, 4, 2, 30
parser = argparse.ArgumentParser()
parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size")
parser.add_argument("--pp", type=int, default=1, help="pipeline-parallel size; tp x pp is the number of ranks")
sizes = parser.parse_args()

if device.type == "cuda":
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group()
parallel_state.initialize_model_parallel(sizes.tp, sizes.pp)
tensor_parallel.model_parallel_cuda_manual_seed(0)


def build() -> GPTModel:
    """Return this rank's part of the model, with the same weights every time."""
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0,
        tensor_model_parallel_size=sizes.tp, pipeline_model_parallel_size=sizes.pp, pipeline_dtype=torch.float32,
        use_cpu_initialization=True, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
    )  # fmt: skip
    stage = {"pre_process": parallel_state.is_pipeline_first_stage()}
    stage |= {"post_process": parallel_state.is_pipeline_last_stage()}
    spec = get_gpt_layer_local_spec(normalization="LayerNorm")
    return GPTModel(config, spec, vocab_size=VOCAB, max_sequence_length=LENGTH, **stage).to(device)


def forward_step(batches, model):
    ids, positions = next(batches), torch.arange(LENGTH, device=device).expand(BATCH, -1)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=device).triu(1)  # True: hidden from the token
    losses = model(ids, positions, mask, labels=ids.roll(-1, 1))  # [BATCH, LENGTH] in the last stage
    return losses, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})


def train(model: GPTModel) -> list[float]:
    """Return the loss of each step, on ranks of the last stage."""
    optimizer, curve = torch.optim.Adam(model.parameters(), lr=3e-3), []
    batches = torch.randint(VOCAB, (MICROBATCHES, BATCH, LENGTH), generator=torch.Generator().manual_seed(1)).to(device)
    for _ in range(STEPS):
        reports = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iter(batches), model=[model], forward_only=False,
            num_microbatches=MICROBATCHES, seq_length=LENGTH, micro_batch_size=BATCH,
        )  # fmt: skip
        optimizer.step()
        optimizer.zero_grad()
        curve.append(sum(report["loss"].item() / MICROBATCHES for report in reports))
    return curve


dense = train(build())
model = cce.convert(build())
ours = train(model)
cce.require(model)  # raises unless the loss came from hidden states
if dist.get_rank() == dist.get_world_size() - 1:  # of the last stage
    for step, losses in enumerate(zip(dense, ours, strict=True)):
        print("step {}: Megatron's loss {:.4f}, ours {:.4f}".format(step, *losses))
    print(f"largest difference {max(abs(a - b) for a, b in zip(dense, ours, strict=True)):.1e}", flush=True)
dist.destroy_process_group()
