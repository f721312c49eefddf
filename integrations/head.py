"""VocabParallelHead: a module that owns this rank's rows of the head weight and computes the loss."""

from __future__ import annotations

import math
from functools import partial
from types import EllipsisType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from cce_dist import merge
from cce_dist.call import ExplainOptions, Options, checked
from cce_dist.checks import boolean, integer, kind, number, tensors
from cce_dist.given import LinearCrossEntropyOutput, check_class_weights
from cce_dist.integrations import fsdp
from cce_dist.loss import linear_cross_entropy
from cce_dist.operands import check_buffer
from cce_dist.shard import VocabShard, check_alone, group_of

INIT_ROWS = 1024  # rows of the weight that one generator draws, whatever the sharding


class VocabParallelHead(nn.Module):
    """The head of a language model, split over a group along the vocabulary: hidden states and labels in, loss out.

    The initial weight depends on torch's CPU seed, not on the number of ranks: seed all ranks of the group alike. The
    ``state_dict`` loads into a group of another size: as ``DTensor`` entries through torch.distributed.checkpoint, or as a
    dictionary with the whole weight, from which each rank takes its rows.

    FSDP2 and ZeRO-3 may split the rows further, over data-parallel ranks (``fully_shard(head, mesh=data_parallel_mesh)``;
    together with a split vocabulary pass ``mesh`` here). They gather the rows and reduce their gradient as for any module.

    Args:
        hidden_size: D.
        vocab_size: V, the logical size of the vocabulary.
        mesh: 1-D device mesh of the vocabulary-parallel ranks. The parameters are DTensors sharded on dim 0, as FSDP2 and
            torch.distributed.checkpoint need them.
        group: The vocabulary-parallel group, instead of mesh. The parameters are local tensors, and DTensors only in the
            state_dict. If mesh and group are left out, the whole vocabulary is on this rank. None has the same meaning, but is
            refused where ``VocabShard.even`` refuses it.
        shard_over: FSDP2's data-parallel mesh instead, [ranks] or [replicas, ranks]. Hidden states and labels are this rank's
            own, and ranks gather hidden states in place of the weight. FSDP2 must ignore the head:
            ``fully_shard(model, mesh=mesh, ignored_params=set(head.parameters()))``. Gradients are averaged over all ranks.
        equal_tokens: With ``shard_over``, a promise that all ranks have the same number of tokens in every call.
        bias: Whether there is a bias, initially 0.
        weight: A parameter to tie to, for example an embedding's, sharded as this head's own would be.
        init_std: Standard deviation of the initial weight; None draws it as ``nn.Linear`` does.
        class_weights: [V] weights of all classes on every rank: ``weight`` of the loss.
        device, dtype: Of the parameters.
        **loss_options: Passed to every ``linear_cross_entropy``: reduction, softcap, sequence_parallel, grad_filter, ... An
            ``nn.Parameter`` as logit_scale becomes a parameter of the module.

    Raises:
        ValueError, TypeError: Sizes or options do not fit; the message names the argument.

    Shape:
        hidden [..., D] and labels [...] give the loss. Without labels the result is this rank's logits [..., V_r], -inf in
        padding; with ``shard_over`` all logits [..., V], for which the weight is gathered.
    """

    class_weights: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        mesh: DeviceMesh | None = None,
        group: dist.ProcessGroup | EllipsisType | None = ...,
        shard_over: DeviceMesh | None = None,
        equal_tokens: bool = False,
        bias: bool = False,
        weight: nn.Parameter | None = None,
        init_std: float | None = None,
        class_weights: Tensor | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **loss_options,
    ) -> None:
        super().__init__()
        _check_kinds(mesh, weight, init_std)
        boolean("bias", bias)
        if group is None:
            check_alone()
        elif group is ...:
            group = None
        if mesh is not None and (group is not None or mesh.ndim != 1):
            raise ValueError("mesh must be 1-D, and comes instead of group")
        if shard_over is not None:
            given = {"mesh": mesh, "group": group, "class_weights": class_weights, **loss_options}
            _check_over(shard_over, weight, given)
            mesh, group = shard_over, group_of("shard_over", shard_over)
        integer("hidden_size", hidden_size, 1)
        integer("vocab_size", vocab_size, 1)
        _check_options(loss_options)
        if class_weights is not None:
            check_class_weights("class_weights", class_weights, vocab_size)
        self.hidden_size, self.vocab_size, self.init_std = hidden_size, vocab_size, init_std
        if mesh is not None and group is None:
            group = group_of("mesh", mesh)
        self.shard = VocabShard.even(vocab_size, group) if group else VocabShard(0, vocab_size, vocab_size)
        self.rows = None if shard_over is None else fsdp.Rows(shard_over, self.shard, equal_tokens)
        self.mesh, self.loss_options = mesh, loss_options
        learned = isinstance(loss_options.get("logit_scale"), nn.Parameter)
        self.logit_scale = loss_options.pop("logit_scale") if learned else None
        self.register_buffer("class_weights", class_weights, persistent=False)
        own = weight is None
        if weight is None:
            weight = nn.Parameter(
                self._new_parameter(torch.empty(self.shard.num_rows, hidden_size, device=device, dtype=dtype))
            )
        rows, columns = _local(weight).shape
        if (rows, columns) != (self.shard.num_rows, hidden_size):
            raise ValueError(
                f"the tied weight has {rows} local rows of {columns}, this head's shard {self.shard.num_rows} of {hidden_size}"
            )
        self.weight = weight
        if loss_options.get("grad_weight_out") is not None:
            tensors({"grad_weight_out": loss_options["grad_weight_out"]})
            check_buffer(loss_options["grad_weight_out"], _local(weight))
        self.bias = None
        if bias:
            self.bias = nn.Parameter(self._new_parameter(torch.zeros(rows, device=weight.device, dtype=weight.dtype)))
        if own and _local(weight).device.type != "meta":
            self.reset_parameters()
        self.register_state_dict_post_hook(_distribute_entries)
        self.register_load_state_dict_pre_hook(_localize_entries)

    def reset_parameters(self) -> None:
        """Initialize the weight in blocks of rows, each from its own generator, so that no rank draws the whole weight."""
        seed = int(torch.randint(2**62, (), device="cpu").item())
        bound = 1 / math.sqrt(self.hidden_size)
        weight = _local(self.weight)
        first_row = self.shard.start
        if isinstance(self.weight, DTensor):  # FSDP2 may have split the shard further
            whole = self.weight
            _, offset = compute_local_shape_and_global_offset(whole.shape, whole.device_mesh, whole.placements)
            first_row = offset[0] + (first_row if self.mesh is None else 0)
        stop_row = first_row + weight.shape[0]
        with torch.no_grad():
            for first in range(first_row // INIT_ROWS * INIT_ROWS, stop_row, INIT_ROWS):
                block = torch.empty(INIT_ROWS, self.hidden_size, device="cpu", dtype=torch.float32)
                generator = torch.Generator().manual_seed((seed + first) % 2**63)
                if self.init_std is None:
                    block.uniform_(-bound, bound, generator=generator)
                else:
                    block.normal_(std=self.init_std, generator=generator)
                start, stop = max(first, first_row), min(first + INIT_ROWS, stop_row)
                weight[start - first_row : stop - first_row] = block[start - first : stop - first]
            if self.bias is not None:
                _local(self.bias).zero_()

    def forward(
        self, hidden: Tensor, labels: Tensor | None = None, *, num_tokens: float | Tensor | None = None
    ) -> Tensor | LinearCrossEntropyOutput:
        """Return the loss (see ``linear_cross_entropy``), or without labels this rank's logits.

        The gradient of logits with respect to hidden is this shard's part, not summed over the group.
        """
        if self.rows is not None:
            self.rows.enter(self, hidden)
        if labels is None:
            return self._local_logits(hidden)
        if self.rows is not None:
            weight, bias, _ = self.rows.operands(hidden, self.weight, self.bias, None)
            return self.rows.loss(
                hidden, weight, labels, linear_bias=bias, shard=self.shard, num_tokens=num_tokens, **self.loss_options
            )
        return linear_cross_entropy(
            hidden, _local(self.weight), labels, linear_bias=None if self.bias is None else _local(self.bias),
            weight=self.class_weights, shard=self.shard, num_tokens=num_tokens, **self.options_of_loss(),
        )  # fmt: skip

    def options_of_loss(self) -> dict[str, Any]:
        """Return ``loss_options`` with the current learnable scale, if there is one."""
        return self.loss_options if self.logit_scale is None else {**self.loss_options, "logit_scale": self.logit_scale}

    def extra_repr(self) -> str:
        rows = f"rows [{self.shard.start}, {self.shard.stop}) of {self.vocab_size}"
        return f"hidden_size={self.hidden_size}, {rows}, bias={self.bias is not None}"

    def _local_logits(self, hidden: Tensor) -> Tensor:
        self.shard.check_group()
        if self.loss_options.get("sequence_parallel") and self.shard.group is not None:
            if torch.is_grad_enabled() and hidden.requires_grad:
                raise ValueError("logits of a sequence-parallel head are for inference: call it under torch.no_grad()")
            hidden = merge.gather_sequence(hidden, self.shard.group)
        own: Any = _local if self.rows is None else partial(self.rows.whole, hidden)
        logits = nn.functional.linear(hidden, own(self.weight), None if self.bias is None else own(self.bias))
        logits = logits * self.options_of_loss().get("logit_scale", 1.0)
        softcap = self.loss_options.get("softcap")
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if self.rows is not None:
            return logits
        padding = torch.arange(self.shard.num_rows, device=logits.device) >= self.shard.num_valid
        return logits.masked_fill(padding, -torch.inf)

    def _new_parameter(self, local: Tensor) -> Tensor:
        return local if self.mesh is None else fsdp.distribute(local, self.vocab_size, self.mesh)


def _check_kinds(mesh: Any, weight: Any, init_std: Any) -> None:
    kind("mesh", mesh, DeviceMesh)
    if weight is not None and not isinstance(weight, Tensor):
        raise TypeError(f"weight must be a parameter to tie to (embedding.weight, say), got {type(weight).__name__}")
    if isinstance(weight, Tensor) and weight.dim() != 2:
        raise ValueError(f"weight must be [V_r, D], got {tuple(weight.shape)}")
    if init_std is not None and number("init_std", init_std) < 0:
        raise ValueError(f"init_std must not be negative, got {init_std}")


def _check_over(mesh: Any, weight: Any, given: dict[str, Any]) -> None:
    """Raise unless a head can be split over this mesh, a tied weight is, and no other argument is about ranks."""
    fsdp.check_mesh(mesh)
    names = ("mesh", "group", "class_weights", "input_grad", "grad_weight_out", "expected_weights")
    wrong = [name for name in names if given.get(name) is not None]
    wrong += ["sequence_parallel"] if given.get("sequence_parallel") else []
    if isinstance(given.get("logit_scale"), Tensor):
        wrong.append("a logit_scale that is learned")
    if wrong:
        raise ValueError(f"shard_over goes without {', '.join(wrong)}")
    split = isinstance(weight, DTensor) and weight.device_mesh == mesh and weight.placements[-1] == Shard(0)
    if weight is not None and not split:
        raise ValueError(
            "weight must be split over shard_over as another such head's is: to tie an embedding, use cce_dist.convert instead"
        )


def _check_options(loss_options: dict) -> None:
    """Raise unless these options are valid for every call of the loss."""
    of_every_loss = ExplainOptions.__optional_keys__.intersection(Options._fields) - {"num_tokens"}
    unknown = set(loss_options) - of_every_loss - {"grad_weight_out"}
    if unknown:
        raise TypeError(f"VocabParallelHead takes no option {', '.join(sorted(unknown))}")
    checked(**{name: value for name, value in loss_options.items() if name in of_every_loss})


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _distribute_entries(head: VocabParallelHead, state_dict: dict, prefix: str, local_metadata: dict) -> None:
    """Make DTensors of the state_dict's rows, so that a distributed checkpoint can split them in another way."""
    if head.mesh is not None:
        return
    head.shard.check_group()
    if head.shard.group is None:
        return
    mesh = DeviceMesh.from_group(head.shard.group, head.weight.device.type)
    for key in (prefix + "weight", prefix + "bias"):
        if isinstance(state_dict.get(key), DTensor):
            raise ValueError(f"{key} is split by FSDP2 too: make the head with mesh=, so that both splits can be saved")
        if key in state_dict:
            state_dict[key] = fsdp.distribute(state_dict[key], head.vocab_size, mesh)


def _localize_entries(head: VocabParallelHead, state_dict: dict, prefix: str, *_) -> None:
    """Take this rank's rows from whole entries of a state_dict, and the local tensors of DTensors."""
    rows = head.shard.num_rows
    for name in ("weight", "bias"):
        key = prefix + name
        entry = state_dict.get(key)
        if entry is None or (isinstance(getattr(head, name), DTensor) and isinstance(entry, DTensor)):
            continue
        entry = _local(entry)
        if entry.shape[0] == head.vocab_size != rows:
            entry = entry[head.shard.start : head.shard.stop]
        mesh = head.mesh if head.rows is None else head.rows.fsdp_mesh
        state_dict[key] = entry if mesh is None else fsdp.distribute(entry, head.vocab_size, mesh)
