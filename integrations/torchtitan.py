"""torchtitan's loss from hidden states, by its own mechanism for other implementations, ``--override.imports``.

    --override.imports 'cce_dist.integrations.torchtitan.cce_loss={"z_loss_weight": 1e-4}'

torchtitan's trainers give the head to a ``ChunkedLossWrapper`` and have the model stop before it. ``CCELoss`` is one. It asks
the head once, through the head's own call, so that FSDP2's hooks gather the weight. ``pred`` [B, S, D] is replicated over
tensor-parallel ranks, and its gradient is left as this rank's part: the norm before the head sums it. Rows of the head are
split over them as ``VocabShard.even`` splits. Labels [B, S] are this rank's of data and context parallelism, and
``global_valid_tokens`` counts the tokens of all ranks.

With ``shard_over`` nobody gathers the weight of an untied head (``cce_dist/integrations/fsdp.py``). torchtitan shards a model
between making the loss and giving it the head, so the loss replaces torchtitan's ``fully_shard`` for that time.

Letters: B sequences, S tokens of a sequence on this rank, D hidden size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate

try:
    import spmd_types as spmd
    import torchtitan  # noqa: F401
except ModuleNotFoundError as error:
    message = "cce_dist.integrations.torchtitan needs torchtitan, which is not installed: pip install torchtitan"
    raise ModuleNotFoundError(message, name="torchtitan") from error
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.config.override import derive, override
from torchtitan.distributed.spmd_types import current_spmd_mesh, spmd_mesh_size
from torchtitan.distributed.utils import get_spmd_backend

from cce_dist import VocabShard, linear_cross_entropy
from cce_dist.integrations import fsdp
from cce_dist.integrations.options import TrainOptions
from cce_dist.integrations.patching import Place, attributes

BACKENDS = ("spmd_types", "partial_dtensor")
FULLY_SHARD = Place("torchtitan.distributed.fsdp", "fully_shard")


@dataclasses.dataclass(frozen=True)
class Options(TrainOptions):
    """The keys of the loss."""

    shard_over: bool = False  # leave the head's rows where FSDP2 would put them, and gather hidden states instead


def _read(keys: dict[str, Any]) -> Options:
    return Options.read(keys, spell=lambda key: f'"{key}" of cce_loss', what="cce_loss")


class CCELoss(ChunkedLossWrapper):
    """A ``ChunkedLossWrapper`` that computes the loss from hidden states; ``num_chunks`` of the config is not used."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):
        keys: dict[str, Any] = dataclasses.field(default_factory=dict)
        """Keys of ``Options``."""

    def __init__(self, config: Config, *, compile_config: Any = None) -> None:
        super().__init__(config)  # compile_config is for a loss of logits
        if get_spmd_backend() not in BACKENDS:
            raise ValueError(f"cce_loss needs parallelism.spmd_backend to be one of {', '.join(BACKENDS)}")
        self.options, self.rows = _read(config.keys), None
        if self.options.shard_over:
            if get_spmd_backend() != "partial_dtensor":
                raise ValueError('cce_loss: shard_over needs parallelism.spmd_backend to be "partial_dtensor"')
            FULLY_SHARD.wrap(self._fully_shard)

    def _fully_shard(self, fully_shard: Callable, module: Any, *, mesh: Any, **given: Any) -> Any:
        """Split the head that torchtitan shards together with the norm before it, and have FSDP2 leave it alone."""
        if isinstance(module, list) and isinstance(module[-1], nn.Linear):
            # Ranks of torchtitan have batches of one size.
            self.rows = fsdp.shard_over(nn.ModuleList(module), module[-1], mesh, equal_tokens=True)
            given["ignored_params"] = set(module[-1].parameters())
        return fully_shard(module, mesh=mesh, **given)

    def set_lm_head(self, lm_head: nn.Module) -> None:
        if type(lm_head).forward is not nn.Linear.forward:
            raise ValueError(
                f"cce_loss cannot take over a head that is a {type(lm_head).__name__}: it must be nn.Linear"
            )
        FULLY_SHARD.uninstall()
        if self.rows is not None:
            self.rows.enter(lm_head)
        elif self.options.shard_over:
            raise ValueError("cce_loss: shard_over found no head beside its norm in torchtitan's calls of fully_shard")
        super().set_lm_head(lm_head)

    def __call__(
        self, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this rank's part of the loss, and no metrics.

        Args:
            pred: [B, S, D] what the head would have been called with.
            labels: [B, S] ids in the whole vocabulary, -100 where there is none.
            global_valid_tokens: What the sum of the tokens' losses is divided by; None: nothing.

        Communication: as in ``linear_cross_entropy`` on the tensor-parallel group, without the sum of dE; and FSDP2's.
        """
        head: Any = self.lm_head
        checking = spmd.is_type_checking()
        with spmd.no_typecheck():
            # Between the head's hooks, in place of the forward that torchtitan has set.
            with attributes(head, forward=lambda pred: self._loss(head, pred, labels, global_valid_tokens)):
                loss = head(pred)
            if isinstance(head, FSDPModule) and not pred.requires_grad:
                # A validation has no backward that reshards. reshard() follows the policy, as in the stock loss.
                head.set_reshard_after_forward(True)
                head.reshard()
            if checking:
                spmd.assert_type(loss, {"dp": spmd.P, "cp": spmd.P, "tp": spmd.I})
        return loss, {}

    def _loss(self, head: Any, pred: Tensor, labels: Tensor, count: Tensor | None) -> Tensor:
        options, trains, weight, bias = self.options, head.training, head.weight, head.bias
        compute: Callable = linear_cross_entropy
        call: dict[str, Any] = {"shard": _shard(head), "input_grad": "partial"}
        if self.rows is not None:
            weight, bias, _ = self.rows.operands(pred, weight, bias, None)
            compute, call = self.rows.loss, {"shard": self.rows.shard}
        return compute(
            _local(pred),
            weight,
            labels,
            linear_bias=bias,
            **call,
            reduction="sum" if count is None else "mean",
            num_tokens=count,
            z_loss_weight=options.z_loss_weight if trains else 0.0,
            label_smoothing=options.label_smoothing if trains else 0.0,
            **options.call("grad_filter"),
        )


def _local(pred: Tensor) -> Tensor:
    if not isinstance(pred, DTensor):
        return pred
    if any(not isinstance(placement, Replicate) for placement in pred.placements):
        raise ValueError(
            f"cce_loss needs hidden states that are replicated over tensor-parallel ranks, got {pred.placements}"
        )
    return pred.to_local(grad_placements=[Partial()] * pred.device_mesh.ndim)


def _shard(head: Any) -> VocabShard | None:
    """Return the shard of the head's weight; None if the weight is whole, or a DTensor, whose placements give the shard."""
    if isinstance(head.weight, DTensor) or spmd_mesh_size("tp") == 1:
        return None
    mesh = current_spmd_mesh()
    assert mesh is not None
    return VocabShard.even(head.out_features, mesh.get_group("tp"))


@override(target=BaseLoss.Config, fqns=["loss", "*.loss"], description="the loss from hidden states, without logits")
def cce_loss(config: BaseLoss.Config, **keys: Any) -> CCELoss.Config:
    """Replace the config of a chunked cross-entropy. ValueError: another loss, or a key or value that is not allowed."""
    if type(config) is not ChunkedLossWrapper.Config:
        raise ValueError(
            f"cce_loss replaces ChunkedLossWrapper.Config alone, got {type(config).__qualname__}: the trainer gives the head "
            "to no other loss, and graph_trainer has its own"
        )
    if type(config.loss_fn) is not CrossEntropyLoss.Config:
        raise ValueError(f"cce_loss is a cross-entropy; the chunked loss is a {type(config.loss_fn).__qualname__}")
    _read(keys)
    return derive(config, CCELoss.Config, keys=keys)
