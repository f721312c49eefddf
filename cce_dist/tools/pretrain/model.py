"""A GPT in plain torch: RMSNorm, rotary positions, SwiGLU; sharded by ``parallelize_module``, topped by our head.

Activations are [s, b, D], sequence first: under sequence parallelism each rank holds a slice of dimension 0. Letters: s
sequence, b sequences of this rank, D hidden size, H heads of this rank, d size of a head.

Sources: Llama (Touvron et al.); for the sharding Megatron-LM (Shoeybi et al.; Korthikanti et al.).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as tp

from cce_dist.tools.pretrain.recipe import Shape


class GPT(nn.Module):
    """Decoder-only transformer whose last layer is the loss, a ``VocabParallelHead`` or a ``DenseHead``."""

    def __init__(self, shape: Shape, head: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=1e-5)
        self.head = head
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, ids: Tensor, labels: Tensor, num_tokens: int) -> Tensor:
        """Return the summed loss of ``labels`` over ``num_tokens``; ids and labels [s, b] int64."""
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden), labels, num_tokens=num_tokens)


class Block(nn.Module):
    """Attention and SwiGLU, each behind an RMSNorm and added to the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden_size, eps=1e-5)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.hidden_size, eps=1e-5)
        self.mlp = SwiGLU(shape)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.mlp(self.mlp_norm(hidden))


class Attention(nn.Module):
    """Causal self-attention over the heads of this rank."""

    cos: Tensor  # [s, d/2] fp32
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_size = shape.hidden_size // shape.num_heads
        # Rows are grouped head by head (q, k, v of head 0, then of head 1, ...), so an even split of rows is one of heads.
        self.qkv = nn.Linear(shape.hidden_size, 3 * shape.hidden_size, bias=False)
        self.out = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        nn.init.normal_(self.qkv.weight, std=0.02)
        nn.init.normal_(self.out.weight, std=0.02 / (2 * shape.num_layers) ** 0.5)
        inverse_period = 10000.0 ** (-torch.arange(0, self.head_size, 2) / self.head_size)
        angle = torch.outer(torch.arange(shape.seq_len), inverse_period)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        qkv = self.qkv(hidden)
        seq_len, batch = qkv.shape[:2]
        qkv = qkv.view(seq_len, batch, -1, 3, self.head_size).permute(3, 1, 2, 0, 4)  # [3, b, H, s, d]
        query, key, value = qkv.unbind(0)
        attended = F.scaled_dot_product_attention(self.rotate(query), self.rotate(key), value, is_causal=True)
        return self.out(attended.permute(2, 0, 1, 3).reshape(seq_len, batch, -1))

    def rotate(self, heads: Tensor) -> Tensor:
        """Turn each pair (i, i + d/2) by its position's angle, in fp32. Source: RoFormer (Su et al.)."""
        first, second = heads.float().chunk(2, dim=-1)
        turned = torch.cat([first * self.cos - second * self.sin, second * self.cos + first * self.sin], dim=-1)
        return turned.type_as(heads)


class SwiGLU(nn.Module):
    """down(silu(gate) * up). Source: Shazeer, GLU Variants Improve Transformer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        # Rows alternate gate, up, gate, up: any even split keeps the pairs together.
        self.gate_up = nn.Linear(shape.hidden_size, 2 * shape.num_ffn, bias=False)
        self.down = nn.Linear(shape.num_ffn, shape.hidden_size, bias=False)
        nn.init.normal_(self.gate_up.weight, std=0.02)
        nn.init.normal_(self.down.weight, std=0.02 / (2 * shape.num_layers) ** 0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_up(hidden).unflatten(-1, (-1, 2)).unbind(-1)
        return self.down(F.silu(gate) * up)


class DenseHead(nn.Module):
    """The loss with all logits in memory, in fp32: what every fused loss is compared with.

    Sharding: uses the weight of a ``VocabParallelHead``, gathered; every rank computes the same whole loss, so that gradients
        are slices of it, and no sum over ranks is needed.
    Communication: one all-gather of the weight, and one of the hidden states under sequence parallelism.
    """

    def __init__(self, head: nn.Module, mesh: DeviceMesh | None, sequence_parallel: bool) -> None:
        super().__init__()
        self.weight: Any = head.weight
        self.mesh = mesh
        self.sequence_parallel = sequence_parallel

    def forward(self, hidden: Tensor, labels: Tensor, num_tokens: int) -> Tensor:
        weight = self.weight
        if isinstance(weight, DTensor):
            weight = weight.full_tensor()
        if self.sequence_parallel and self.mesh is not None:
            hidden = DTensor.from_local(hidden, self.mesh, [Shard(0)], run_check=False).full_tensor()
        logits = F.linear(hidden, weight).float()
        loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")
        return loss / num_tokens


def shard_model(model: GPT, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Shard everything but the head, which is born sharded, over the tensor-parallel ``mesh``.

    Sharding: embedding by hidden dimension (by rows its gradient would be whole on every rank), attention by heads, SwiGLU
        by inner width; norms replicated. Between them activations are whole on every rank, or with ``sequence_parallel``
        sliced by dimension 0.
    Communication: per block and direction two all-reduces of [s, b, D], or two all-gathers and two reduce-scatters.
    """
    between = Shard(0) if sequence_parallel else Replicate()
    column = tp.ColwiseParallel(input_layouts=between)
    row = tp.RowwiseParallel(output_layouts=between)
    plan: dict[str, tp.ParallelStyle] = {
        "embedding": tp.ColwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "blocks.*.attention.qkv": column,
        "blocks.*.attention.out": row,
        "blocks.*.mlp.gate_up": column,
        "blocks.*.mlp.down": row,
    }
    if sequence_parallel:
        norm = tp.SequenceParallel(sequence_dim=0, use_local_output=True)
        plan |= dict.fromkeys(("blocks.*.attention_norm", "blocks.*.mlp_norm", "norm"), norm)
    # Every rank drew the same whole weights, so each keeps its part.
    tp.parallelize_module(model, mesh, plan, src_data_rank=None)
