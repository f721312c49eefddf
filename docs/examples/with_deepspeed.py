"""DeepSpeed: a pipeline trained with all logits and with our loss, over tensor- and pipeline-parallel ranks.

    pip install '.[deepspeed]'
    torchrun --nproc-per-node 4 docs/examples/with_deepspeed.py --tp 2 --pp 2

Prints both loss curves and their largest difference. A section of ds_config turns our loss on; the last layer is a
``CCEHeadSpec``, whose vocabulary the model axis splits. A model that computes its loss in forward needs the section alone.

On CPUs the first run compiles DeepSpeed's collectives: half a minute, with a C++ compiler.
"""

import argparse
import os

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from cce_dist.integrations import deepspeed as cce

VOCAB, HIDDEN, LENGTH, STEPS = 512, 64, 32, 30
parser = argparse.ArgumentParser()
parser.add_argument("--tp", type=int, default=1, help="size of the model axis")
parser.add_argument("--pp", type=int, default=1, help="pipeline stages; the other ranks are data-parallel")
sizes = parser.parse_args()

deepspeed.init_distributed()
deepspeed.get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
num_dp = dist.get_world_size() // (sizes.tp * sizes.pp)
topology = PipeModelDataParallelTopology(num_pp=sizes.pp, num_mp=sizes.tp, num_dp=num_dp)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(F.gelu(self.up(self.norm(hidden))))


def build(ours: bool):
    """Return the engine of this rank's stage, with the same weights every time."""
    dense = LayerSpec(nn.Linear, HIDDEN, VOCAB, bias=False)  # each rank of the model axis has all logits
    head = cce.CCEHeadSpec(HIDDEN, VOCAB, topology=topology) if ours else dense
    layers = [LayerSpec(nn.Embedding, VOCAB, HIDDEN), LayerSpec(Block), LayerSpec(Block), head]
    module = PipelineModule(
        layers, topology=topology, loss_fn=cce.loss_fn, partition_method="uniform", seed_layers=True
    )
    head = module.forward_funcs[-1]
    if isinstance(head, nn.Linear):
        weight = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0)) / HIDDEN**0.5
        head.weight.data.copy_(weight[head.rows.start : head.rows.stop] if ours else weight)
    ds_config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "Adam", "params": {"lr": 3e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "cce_dist": {"enabled": ours},
    }
    return cce.initialize(model=module, config=ds_config, model_parameters=module.parameters())[0]


def batches(rank: int):
    """Yield ids and labels of sequences that count upwards."""
    generator = torch.Generator().manual_seed(1 + rank)
    while True:
        starts = torch.randint(VOCAB, (8, 1), generator=generator)
        ids = (starts + torch.arange(LENGTH + 1)) % VOCAB
        yield ids[:, :-1], ids[:, 1:]


def train(engine) -> list[float]:
    """Return the loss of each step, on every rank."""
    data = batches(engine.grid.get_data_parallel_rank())
    return [engine.train_batch(data).item() for _ in range(STEPS)]


dense, engine = train(build(ours=False)), build(ours=True)
ours = train(engine)
cce.require(engine)  # raises unless the loss came from hidden states
if dist.get_rank() == 0:
    for step, losses in enumerate(zip(dense, ours, strict=True)):
        print("step {}: loss of all logits {:.4f}, ours {:.4f}".format(step, *losses))
    print(f"largest difference {max(abs(a - b) for a, b in zip(dense, ours, strict=True)):.1e}", flush=True)
dist.destroy_process_group()
