"""The section of ds_config, and what a converted head computes: the loss, means over sequence shards, the report."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cce_dist.given import LinearCrossEntropyOutput
from cce_dist.integrations import transformers
from cce_dist.integrations.deferred.tensor import TensorLogits
from cce_dist.integrations.options import SECTION, ModelOptions

REPORTED = ("nll", "z_loss", "entropy")


@dataclasses.dataclass(frozen=True)
class Options(ModelOptions):
    """The section ``"cce_dist"`` of ds_config, checked. Its key ``enabled`` is required.

    Args:
        grad_filter, label_smoothing, z_loss_weight, reduce_dtype, head, backend, workspace_bytes: As in ``ModelOptions``.
        sequence_mean: A "mean" is over the tokens of the sequence-parallel group (Ulysses, ALST), and the loss is the same
            on its ranks. False: over this rank's tokens, DeepSpeed's convention, for code that weighs the ranks' losses.
        report: ``engine.get_additional_losses()`` says what the loss was made of: "nll", "z_loss" and "entropy", means over
            the tokens that are not ignored. A pipeline prints and returns them as DeepSpeed has it: on every stage, means over
            microbatches and data-parallel ranks. For other models they describe this rank's last loss. The entropy takes time.
    """

    sequence_mean: bool = False
    report: bool = False
    enabled: bool = dataclasses.field(default=True, kw_only=True, repr=False)

    @classmethod
    def from_config(cls, config: dict) -> Options | None:
        """Read the section; None where it is absent or not enabled.

        Raises:
            ValueError: An unknown key, a value of another type or out of range; the message names the key.
        """
        if SECTION not in config:
            return None
        section = config[SECTION]
        if not isinstance(section, dict):
            raise ValueError(f'ds_config: "{SECTION}" must be a section {{...}}, got {section!r}')
        options = cls.read(section, lambda key: f'ds_config: "{SECTION}.{key}"', f'ds_config: "{SECTION}"')
        if "enabled" not in section:
            raise ValueError(f'ds_config: "{SECTION}" needs the key "enabled", true or false')
        return options if options.enabled else None


@dataclasses.dataclass(eq=False)
class Task(transformers.Task):
    """What the head of an engine knows besides."""

    sequence_group: dist.ProcessGroup | None = None  # with ``sequence_mean``, the ranks over whose tokens a "mean" is
    sequence_scale: int = 1  # factor on this rank's part of such a mean, for its gradient only
    reported: dict[str, Tensor] = dataclasses.field(default_factory=dict)  # what the last loss was made of
    is_given_back: bool = False  # by a later engine of the same model

    def require(self, name: str) -> None:
        if self.is_given_back:
            raise RuntimeError(f"cce_dist: a later engine has taken over the model of this one, with its head {name}")
        super().require(name)

    def needs_forward(self, head: Any) -> bool:
        return True  # DeepSpeed sees backward begin from what forward returns

    def loss(self, head: Any, hidden: Tensor, target: Tensor, **call: Any) -> Any:
        if self.sequence_group is None or call["reduction"] != "mean":
            return super().loss(head, hidden, target, **call)
        num_tokens = (target != call["ignore_index"]).sum()
        dist.all_reduce(num_tokens, group=self.sequence_group)
        output = super().loss(head, hidden, target, num_tokens=num_tokens.clamp_(min=1), **call)
        loss = output.loss if isinstance(output, tuple) else output
        whole = loss.detach().clone()
        dist.all_reduce(whole, group=self.sequence_group)
        part = self.sequence_scale * loss  # each rank differentiates its part of the mean
        loss = part + (whole - part.detach())
        return output._replace(loss=loss) if isinstance(output, tuple) else loss

    def aux(self) -> tuple[str, ...]:
        return (*super().aux(), *(REPORTED if self.options.report else ()))

    def keep(self, output: LinearCrossEntropyOutput, valid: Tensor) -> Tensor:
        if self.options.report:
            sums = torch.stack([getattr(output, name).detach().sum() for name in REPORTED])
            self.reported = dict(zip(REPORTED, sums / valid.sum().clamp(min=1), strict=True))
        return super().keep(output, valid)


@dataclasses.dataclass(eq=False)
class PipelineTask(Task):
    """Logits are deferred wherever the engine computes a loss: the last layer returns hidden states instead of logits."""

    engine: Callable[[], Any] = lambda: None  # a weak reference: the engine holds this
    owner: Any = None  # the module that has the head's weight
    tied_head: Callable | None = None  # the user's, where the owner is an embedding, whose weight alone is the head
    loss_fn: Any = None  # the user's

    def deferring(self) -> bool:
        engine = self.engine()
        return engine is not None and engine._compute_loss and not engine.eval_return_logits

    def defer(self, head: Any, hidden: Tensor) -> Tensor:
        return hidden

    def needs_forward(self, head: Any) -> bool:
        return False  # the loss is computed in loss_fn

    def pass_weight_through(self, module: nn.Module, inputs: tuple, hidden: Any) -> Any:
        """Return the pipeline's hidden states with the head that ``call_loss_fn`` needs; a forward hook."""
        if not self.deferring():
            return None
        weight = self.owner.weight
        bias = None if self.tied_head else getattr(self.owner, "bias", None)
        if torch.is_grad_enabled():
            own = set(self.owner.parameters())
            if not hidden.requires_grad and any(x.requires_grad and x not in own for x in module.parameters()):
                raise RuntimeError(
                    "cce_dist: the hidden states of the last layer need no gradient, so that the layers before would not "
                    'train; with activation checkpoints set "pipeline": {"use_reentrant": false} in ds_config'
                )
            self.num_forwards += module.training
            hidden, weight, bias = _Together.apply(hidden, weight, bias)
        hidden.cce_head = _PassedHead(weight, bias, module.training)
        return hidden

    def call_tied_head(self, hidden: Tensor) -> Tensor:
        assert self.tied_head is not None
        return hidden if self.deferring() else self.tied_head(hidden)

    def call_loss_fn(self, outputs: Any, labels: Any) -> Any:
        """Call the user's ``loss_fn``, with what the last layer returns as logits."""
        if self.deferring():
            return self.loss_fn(TensorLogits(outputs.cce_head, self, outputs), labels)
        if self.shard.group is not None:
            raise ValueError(
                "cce_dist: eval_batch(return_logits=True) of a split vocabulary returns this rank's logits, of which there is "
                "no loss: add compute_loss=False"
            )
        return self.loss_fn(outputs, labels)


@dataclasses.dataclass
class _PassedHead:
    """A head whose parameters have gone through ``_Together``; it travels with the hidden states."""

    weight: Tensor
    bias: Tensor | None
    training: bool

    def __call__(self, hidden: Tensor, ask: Callable) -> Tensor:
        return ask(self, hidden)


class _Together(torch.autograd.Function):
    """Hidden states and the head's parameters, unchanged; backward gives gradients to all of them at the same time.

    DeepSpeed takes the first gradient of a pipeline's outputs for the beginning of backward, and then clears the gradients of
    all parameters. A gradient of the weight that came before would be lost.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor | None) -> tuple:
        return tuple(None if tensor is None else tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple:
        return gradients
