"""The head's weight under FSDP2 as a vocabulary shard: every rank computes with its own rows, and nobody gathers the weight.

docs/fsdp.md says what a user sees.

    convert(model, shard_over=mesh)   the weight becomes a DTensor, rows split over the mesh's last dimension
    fully_shard(..., ignored_params=) FSDP2 leaves it alone; ``_watch`` notes the mesh, the dtypes and the factor
    a loss                            gathers labels and hidden states; each rank reduces the losses of its own tokens

Each rank's loss covers its own tokens only. Gradients are averaged over ranks, as FSDP2 averages them. An embedding that is
tied to the head uses the same rows: each rank looks up those ids of all ranks that are in its rows.

Letters: V the vocabulary, V_r rows of this rank, D hidden size.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from cce_dist import merge
from cce_dist.autograd import leaves_of
from cce_dist.call import Options, checked
from cce_dist.checks import kind, tensors
from cce_dist.given import check_divisor
from cce_dist.integrations import peft
from cce_dist.integrations.deferred.logits import is_sharded
from cce_dist.integrations.patching import Place
from cce_dist.loss import linear_cross_entropy
from cce_dist.operands import environment
from cce_dist.shard import VocabShard, group_of

BESIDE_DDP = (
    "shard_over does not go with DDP (DistributedDataParallel), which would average the rows of different ranks: use "
    "fully_shard, or leave shard_over out"
)
EFFICIENT_LOADING = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")  # Accelerate's variables


class _Averaged(torch.autograd.Function):
    """Cast rows to the dtype of the computation. Backward averages their gradient over all data-parallel ranks."""

    @staticmethod
    def forward(ctx, local: Tensor, rows: Rows, dtype: torch.dtype) -> Tensor:
        ctx.rows, ctx.dtype = rows, local.dtype
        return local.to(dtype) if dtype != local.dtype else local.view_as(local)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,), rows = grads, ctx.rows
        if rows.replicas is not None:
            grad = grad.to(rows.precision.reduce_dtype or grad.dtype, copy=True)
            grad = merge.sum_over_ranks(grad.contiguous(), rows.replicas)
        divide_factor = getattr(rows.state, "cce_divide_factor", None)
        return grad.to(ctx.dtype) / (divide_factor or rows.mesh.size()), None, None


@dataclasses.dataclass(eq=False)
class Rows:
    """This rank's rows of a head, and the loss, embeddings and logits that they give.

    torch.compile leaves out the methods that read sizes of other ranks.
    """

    mesh: DeviceMesh  # the data-parallel ranks: one dimension, or replicas before it
    shard: VocabShard
    equal_tokens: bool  # the caller promises that all ranks have the same number of tokens in every call
    state: Any = None  # FSDP2's, of the ``fully_shard`` call that covers the head; None: there was none

    def __post_init__(self) -> None:
        _watch()
        self.fsdp_mesh = self.mesh
        self.group = group_of("shard_over", self.mesh)
        self.line = DeviceMesh.from_group(self.group, self.mesh.device_type)
        self.replicas = self.mesh.get_group(0) if self.mesh.ndim == 2 else None
        self.cpu_group: Any = self.group
        if torch.device("cpu") not in self.group._device_types:
            ranks = dist.get_process_group_ranks(self.group)
            self.cpu_group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)

    def __deepcopy__(self, memo: dict) -> Rows:
        # A copied model has the same groups, but is given to fully_shard by itself.
        return copy.copy(self)

    @property
    def precision(self) -> MixedPrecisionPolicy:
        """FSDP2's dtypes; None among them stands for the parameter's or the gradient's own."""
        return MixedPrecisionPolicy() if self.state is None else self.state._mp_policy

    @torch.compiler.disable
    def enter(self, module: nn.Module, hidden: Tensor | None = None) -> None:
        """Find the ``fully_shard`` call of a converted model, or of a head with its ``hidden``, if ``_watch`` has not seen it.

        Before torch 2.13, or if only other parts of the model are wrapped, no call covers the rows. A model then
        takes the settings of a call inside of it. A head cannot find its model, so it refuses calls with other settings.

        Raises:
            ValueError: A module that hidden states come from has another mesh or a divide factor.
        """
        calls = [] if self.state is not None else _fully_shard_calls()
        near = [call for call in calls if any(part is module for part in call[0].modules())]
        near = near or [call for call in calls if call[2] and call[0] in set(module.modules())]
        for _, state, group in near:
            return self.belong_to(state, group.mesh_info.mesh if group else self.mesh, nn.Module())
        apart = [call for call in calls if call[2] and self._differs(*call[1:])] if hidden is not None else []
        leaves = {id(leaf) for leaf in leaves_of(hidden)} if apart and hidden is not None else ()
        for wrapped, _, group in apart:
            gathered = [getattr(parameter, "_unsharded_param", None) for parameter in group.fsdp_params]
            if any(id(parameter) in leaves for parameter in gathered):
                raise ValueError(
                    f"shard_over is {self.mesh}, and no fully_shard call covers the head, but the one for a "
                    f"{type(wrapped).__name__} has {group.mesh_info.mesh}, or a divide factor: call fully_shard for the module "
                    "that holds the head, too, with ignored_params=set(head.parameters())"
                )

    def _differs(self, state: Any, group: Any) -> bool:
        """Whether a ``fully_shard`` call with parameters has a divide factor, or other ranks or replicas."""
        same_ranks = torch.equal(group.mesh_info.mesh.mesh, self.mesh.mesh)
        return not same_ranks or getattr(state, "cce_divide_factor", None) is not None

    def belong_to(self, state: Any, mesh: DeviceMesh, module: nn.Module) -> None:
        """Follow the first ``fully_shard`` call that covers the head, as FSDP2 does, and put a module's rows on its mesh.

        Raises:
            ValueError: The mesh has other ranks, or other replicas. Copies of the rows would not stay equal.
        """
        if self.state is None:
            if not torch.equal(mesh.mesh, self.mesh.mesh):
                raise ValueError(f"shard_over is {self.mesh}, but fully_shard is given {mesh}: give both the same mesh")
            self.state, self.fsdp_mesh = state, mesh
        # The ranks are equal, but clip_grad_norm_ also needs equal names of the mesh dimensions.
        for parameter in self.of(module):
            parameter._spec = dataclasses.replace(parameter._spec, mesh=self.fsdp_mesh)

    def of(self, module: nn.Module) -> list[DTensor]:
        """Return a module's own parameters that are rows."""
        return [one for one in module.parameters(recurse=False) if isinstance(one, DTensor)]

    def split(self, whole: Tensor) -> nn.Parameter:
        """Return a parameter [V, ...] as a DTensor with this rank's rows."""
        local = whole.detach()[self.shard.start : self.shard.stop].clone()
        return nn.Parameter(distribute(local, len(whole), self.mesh), requires_grad=whole.requires_grad)

    @torch.compiler.disable
    def local(self, parameter: Any, dtype: torch.dtype | None = None) -> Tensor:
        """Return this rank's rows [V_r, ...] of a parameter from ``split``; dtype None: FSDP2's dtype of the computation."""
        if DistributedDataParallel._active_ddp_module is not None:
            raise ValueError(BESIDE_DDP)
        self.shard.check_group()
        dtype = dtype or self.precision.param_dtype or parameter.dtype
        return _Averaged.apply(parameter.to_local(), self, dtype)  # type: ignore[return-value]

    def whole(self, hidden: Tensor, parameter: Any) -> Tensor:
        """Return a parameter [V, ...] in hidden's dtype, gathered; for logits."""
        rows = distribute(self.local(parameter, computed_dtype(hidden)), len(parameter), self.line)
        return rows.full_tensor(grad_placements=[Partial()])

    def operands(self, hidden: Tensor, weight: Any, bias: Any, added: Tensor | None) -> tuple[Any, Any, Any]:
        """Return the rows of a head's weight, its bias, and a bias [V] that the model keeps outside."""
        dtype, here = computed_dtype(hidden), slice(self.shard.start, self.shard.stop)
        bias = None if bias is None else self.local(bias, dtype)
        return self.local(weight, dtype), bias, None if added is None else added[here]

    def most(self, num_tokens: int) -> int:
        """Return the maximum token count over the ranks. The host waits for all ranks, but not for a device."""
        debug = environment()[1]
        if self.equal_tokens and not debug:
            return num_tokens
        most = merge.largest(num_tokens, self.cpu_group, debug)
        if self.equal_tokens:
            least = -merge.largest(-num_tokens, self.cpu_group, debug)
            if least != most:
                raise ValueError(f"equal_tokens was promised, but ranks have from {least} to {most} tokens")
        return most

    @torch.compiler.disable
    def loss(
        self,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        *,
        shard: VocabShard,
        reduction: str = "mean",
        ignore_index: int | None = -100,
        num_tokens: Any = None,
        return_aux: Any = False,
        **call: Any,
    ) -> Any:
        """Return what ``linear_cross_entropy`` would return for this rank's tokens and the whole vocabulary.

        ``weight`` [V_r, D] is as ``operands`` returns it. Only ``vocab_size`` of ``shard`` counts, the logits' last dimension.
        """
        chosen = self._checked(hidden, target, reduction=reduction, ignore_index=ignore_index, num_tokens=num_tokens)
        count, most = target.numel(), self.most(target.numel())
        hidden = F.pad(hidden.reshape(count, hidden.shape[-1]), (0, 0, 0, most - count))
        target = target.long() if target.dtype == torch.int32 else target
        padded = F.pad(target.reshape(count), (0, most - count), value=chosen.ignore_index)
        labels = merge.gather_sequence(padded, self.group)
        expected = True
        if reduction == "mean" and num_tokens is None:  # of each rank's own tokens
            counts = (labels.view(self.group.size(), most) != chosen.ignore_index).sum(1, keepdim=True).clamp(min=1)
            expected = counts.float().reciprocal().expand(-1, most).reshape(-1)
        found = linear_cross_entropy(
            hidden,
            weight,
            labels,
            shard=dataclasses.replace(self.shard, vocab_size=shard.vocab_size),
            sequence_parallel=True,
            reduction="none",
            ignore_index=ignore_index,
            return_aux=return_aux,
            expected_weights=expected,
            **call,
        )

        def own(values: Any) -> Any:
            if not isinstance(values, Tensor):
                return values
            return merge.OwnSlice.apply(values, self.group)[:count].view(target.shape)  # type: ignore[index]

        loss = own(found.loss if return_aux else found)
        if reduction != "none":
            loss = loss.sum()
        if reduction == "mean":
            divisor = (target != chosen.ignore_index).sum() if num_tokens is None else chosen.num_tokens
            loss = loss / (divisor + (divisor == 0))  # the mean of nothing is 0
        if not return_aux:
            return loss
        return type(found)(loss, *map(own, found[1:]))

    def _checked(self, hidden: Tensor, target: Tensor, **given: Any) -> Options:
        """Check the arguments that ``loss`` handles itself. With CCE_DIST_DEBUG=1 an error of one rank is raised on all."""
        debug = environment()[1]
        if debug:
            self.cpu_group.monitored_barrier(wait_all_ranks=True)
        with merge.agreement("shard_over", self.group) if debug else nullcontext({}) as facts:
            chosen = checked(**given)
            tensors({"input": hidden, "target": target})
            if hidden.shape[:-1] != target.shape:
                raise ValueError(
                    f"target must be {tuple(hidden.shape[:-1])} as input's tokens, got {tuple(target.shape)}"
                )
            check_divisor(chosen, target)
            count = chosen.num_tokens
            if debug:
                facts["reduction"] = chosen.reduction
                facts["num_tokens"] = count.item() if isinstance(count, Tensor) else count
        return chosen

    @torch.compiler.disable
    def lookup(self, ids: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
        """Return the embeddings [..., D] of this rank's ids [...]; every rank looks up the ids that are in its rows.

        Raises:
            IndexError: A rank's id is outside the vocabulary (CPU; on a GPU its embedding is NaN).
        """
        count, most = ids.numel(), self.most(ids.numel())
        everyone = merge.gather_sequence(F.pad(ids.reshape(count), (0, most - count)), self.group)
        outside = (everyone < 0) | (everyone >= self.shard.vocab_size)
        if not ids.is_cuda and outside.any():
            raise IndexError(f"id {int(everyone[outside][0])} is outside the vocabulary of {self.shard.vocab_size}")
        # Only one rank's summand is not zero, so the sum is exact in any dtype.
        found = looked_up(everyone, weight, self.shard.start, padding_idx).masked_fill(outside[:, None], torch.nan)
        return merge.ScatterSum.apply(found, self.group)[:count].view(*ids.shape, weight.shape[1])  # type: ignore[index]


def looked_up(ids: Tensor, rows: Tensor, start: int, padding_idx: int | None = None) -> Tensor:
    """Return the embeddings [..., D] of ids in the whole vocabulary from rows [V_r, D], 0 for ids of other ranks' rows."""
    here = ids - start
    elsewhere = (here < 0) | (here >= len(rows))
    padding = None if padding_idx is None or not 0 <= padding_idx - start < len(rows) else padding_idx - start
    if not len(rows):  # an empty shard takes part in backward, too
        rows = F.pad(rows, (0, 0, 0, 1))
    return F.embedding(here.masked_fill(elsewhere, 0), rows, padding).masked_fill(elsewhere[..., None], 0.0)


def distribute(rows: Tensor, vocab_size: int, mesh: DeviceMesh) -> DTensor:
    """Wrap rows [V_r, ...] as a DTensor [V, ...] that is split over the last dimension of a mesh."""
    shape = torch.Size((vocab_size, *rows.shape[1:]))
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=shape, stride=rows.stride())


def computed_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype of products with hidden states: autocast's, where it is on."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


class _Embedding(nn.Module):
    """Base class of a tied embedding. In forward its weight is this rank's rows, cast as FSDP2 casts parameters."""

    cce_rows: Rows

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        parameter = self.weight
        self._parameters["weight"] = self.cce_rows.local(parameter)  # type: ignore[assignment]
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._parameters["weight"] = parameter  # type: ignore[assignment]


class _Lookup(nn.Embedding):
    """Stands behind the class of a tied embedding, and replaces ``nn.Embedding``'s lookup."""

    cce_rows: Rows

    def forward(self, input: Tensor) -> Tensor:
        return self.cce_rows.lookup(input, self.weight, self.padding_idx)


def check_mesh(mesh: Any) -> None:
    """Raise TypeError or ValueError unless a head can be split over this mesh, in this process."""
    kind("shard_over", mesh, DeviceMesh)
    if mesh is None or mesh.ndim > 2:
        raise ValueError("shard_over must be the data-parallel mesh: one dimension, or replicas and shards")
    if all(os.environ.get(name, "").lower() in ("1", "true", "yes", "y", "t", "on") for name in EFFICIENT_LOADING):
        raise ValueError(
            "shard_over does not go with Accelerate's cpu_ram_efficient_loading, which makes new parameters that fully_shard "
            "does not ignore: turn FSDP_CPU_RAM_EFFICIENT_LOADING off"
        )


@functools.cache
def _watch() -> None:
    """Patch FSDP2 and DDP, for the rest of the process, to look for rows in every module that they are given."""
    if hasattr(_fsdp_init, "_init_param_group"):  # torch 2.13
        Place(_fsdp_init.__name__, "_init_param_group").wrap(_leave_rows_out)
    Place(FSDPModule.__module__, "FSDPModule.set_gradient_divide_factor").wrap(_note_factor)
    Place(DistributedDataParallel.__module__, "DistributedDataParallel.__init__").wrap(_refuse_rows)


def _leave_rows_out(
    add_group: Callable, state: Any, params: Any, modules: Any, mesh_info: Any, *args: Any, **given: Any
) -> Any:
    for module, rows in _with_rows(*modules):
        if any(one is parameter for one in params for parameter in rows.of(module)):
            raise ValueError(
                f"fully_shard is given the rows of a {type(module).__name__} that shard_over has split: leave them out by "
                "ignored_params=set(model.lm_head.parameters())"
            )
        rows.belong_to(state, mesh_info.mesh, module)
    return add_group(state, params, modules, mesh_info, *args, **given)


def _note_factor(set_factor: Callable, self: Any, factor: float) -> None:
    # FSDP2 drops the factor if all parameters of the module are ignored.
    self._get_fsdp_state().cce_divide_factor = factor
    set_factor(self, factor)


def _refuse_rows(wrap: Callable, self: Any, module: nn.Module, *args: Any, **given: Any) -> None:
    if _with_rows(module):
        raise ValueError(BESIDE_DDP)
    wrap(self, module, *args, **given)


def _fully_shard_calls() -> list[tuple[nn.Module, Any, Any]]:
    """Return module, state and parameter group of each ``fully_shard`` call, in order. A module without parameters has None."""
    found = []
    for module in list(_module_state_mapping):
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups: Any = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
            found.append((module, state, groups[0]))
    return found


def _with_rows(*modules: nn.Module) -> list[tuple[nn.Module, Rows]]:
    """Return the submodules that hold rows, with their rows: heads and tied embeddings."""
    parts = dict.fromkeys(part for module in modules for part in module.modules())
    found = ((part, vars(part).get(name)) for part in parts for name in ("rows", "cce_rows"))
    return [(part, rows) for part, rows in found if isinstance(rows, Rows)]


def shard_over(model: nn.Module, head: Any, mesh: Any, equal_tokens: bool) -> Rows:
    """Split the weight and the bias of a head over data-parallel ranks, also where an embedding is tied to it.

    Raises:
        ValueError: The head, a tied embedding, or the mesh does not allow it; one line says why.
        TypeError: ``mesh`` is no mesh.
    """
    check_mesh(mesh)
    if peft.is_lora(type(head)):
        raise ValueError("shard_over does not go with LoRA on the head: leave the head out of target_modules")
    weight, bias = head.weight, head.bias
    if is_sharded(weight):
        raise ValueError(
            "shard_over needs a weight that is whole: call convert() before fully_shard, and not under ZeRO-3 or with a head "
            "that is split already"
        )
    tied = _others_with(weight, model, head)
    for module in tied:
        _check_embedding(module)
    if bias is not None and _others_with(bias, model, head):
        raise ValueError("shard_over: the head's bias is also another module's, which would keep the whole of it")
    rows = Rows(mesh, VocabShard.even(len(weight), group_of("shard_over", mesh)), equal_tokens)
    head.weight, head.cce_rows = rows.split(weight), rows
    if bias is not None:
        head.bias = rows.split(bias)
    for module in tied:
        module.weight, module.cce_rows = head.weight, rows
        base = type(module)
        bases = (_Embedding, _Lookup) if base is nn.Embedding else (_Embedding, base, _Lookup)
        module.__class__ = type(
            base.__name__, bases, {"__module__": base.__module__, "__qualname__": base.__qualname__}
        )
    return rows


def _others_with(parameter: Any, model: nn.Module, head: Any) -> list[Any]:
    """Return the modules besides the head that own a parameter."""
    owners = (module for module in model.modules() if any(one is parameter for one in module._parameters.values()))
    return [module for module in owners if module is not head]


def _check_embedding(module: Any) -> None:
    if not isinstance(module, nn.Embedding):
        raise ValueError(f"shard_over: the head is tied to a {type(module).__name__}, which is no nn.Embedding")
    for name in ("max_norm", "sparse", "scale_grad_by_freq"):
        if getattr(module, name):
            raise ValueError(f"shard_over: the head is tied to an embedding with {name}, which needs the whole weight")
    if type(module) is not nn.Embedding and not _asks_its_base(module):
        kind = type(module).__name__
        raise ValueError(
            f"shard_over: the head is tied to a {kind}, whose forward does not leave the lookup to nn.Embedding"
        )


def _asks_its_base(module: nn.Embedding) -> bool:
    """Return whether a forward calls ``nn.Embedding``'s, by trying it on no ids; otherwise it may index the rows by itself."""
    base, asked = type(module), []

    class Asked(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            asked.append(input)
            return super().forward(input)

    module.__class__ = type(base.__name__, (base, Asked), {})  # pyright: ignore[reportGeneralTypeIssues]
    try:
        with torch.no_grad():
            type(module).forward(module, torch.empty(1, 0, dtype=torch.long, device=module.weight.device))
    except Exception:  # the embedding does not work like nn.Embedding
        return False
    finally:
        module.__class__ = base
    return bool(asked)
