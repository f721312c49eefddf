"""A pipeline whose last layer returns hidden states, and whose ``loss_fn`` is given deferred logits of them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cce_dist.integrations.deepspeed.layers import CCEEmbedding, CCEHead, shard_of
from cce_dist.integrations.deepspeed.loss import REPORTED, Options, Task
from cce_dist.integrations.deferred.subclass import check_class, take
from cce_dist.integrations.deferred.tensor import TensorLogits
from cce_dist.integrations.options import SECTION
from cce_dist.integrations.patching import attributes


@contextlib.contextmanager
def layer_weights(weights: Sequence[float]) -> Iterator[None]:
    """Have a PipelineModule that is made inside, with ``partition_method="parameters"``, balance these weights of its layers.

    DeepSpeed counts parameters, and so weighs an embedding like the head. ``cce-dist plan`` prints weights.

    Args:
        weights: One for each layer of the module, in order; not negative. ValueError if the number of layers is another.
    """
    from deepspeed.pipe import PipelineModule

    def weighed(module: Any) -> list[float]:
        if len(weights) != len(module._layer_specs):
            raise ValueError(f"{len(weights)} weights for the {len(module._layer_specs)} layers of a PipelineModule")
        return list(weights)

    with attributes(PipelineModule, _count_layer_params=weighed):
        yield


def is_pipeline(module: Any) -> bool:
    from deepspeed.pipe import PipelineModule

    return isinstance(module, PipelineModule)


def check(module: Any, options: Options) -> None:
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    if hasattr(module, "phase_funcs"):
        raise ValueError("cce_dist does not support DualPipeV; use a PipelineModule")
    for key in ("head", "sequence_mean"):
        if getattr(options, key):
            raise ValueError(f'ds_config: "{SECTION}.{key}" is not for pipelines, whose head is the last layer')
    if module.loss_fn is None:
        raise ValueError("cce_dist needs a PipelineModule with a loss_fn that calls F.cross_entropy")
    spec = module._layer_specs[-1]
    kind = spec.typename if isinstance(spec, LayerSpec) else type(spec)
    if not isinstance(spec, TiedLayerSpec):
        check_class(kind, (CCEHead,))
    elif spec.forward_fn is not CCEEmbedding.logits:
        raise ValueError(
            f"cce_dist: a tied head needs a CCEHeadSpec(..., tied=...), its embedding a CCEEmbeddingSpec, not {kind.__name__}"
        )


def convert(engine: Any, options: Options) -> dict[str, Task]:
    """Take over the last stage's head and loss_fn, and return the head's name and task; no head on the other stages."""
    module = engine.module
    if not engine.is_last_stage():
        if options.report:  # DeepSpeed takes notice here of how many numbers there are, and of nothing else
            module.get_additional_losses = lambda: dict.fromkeys(REPORTED)
        return {}
    head = module.forward_funcs[-1]
    tied = isinstance(head, functools.partial)
    owner = head.args[0] if tied else head
    name = f"tied to {type(owner).__name__}" if tied else type(owner).__name__
    task = _PipelineTask(options, shard_of(owner), engine=weakref.ref(engine), owner=owner, loss_fn=module.loss_fn)
    if tied:
        owner.cce_task = task
    else:
        take(head, task)
    # A loss_fn that is a module stays registered, with its parameters: the task's is found first.
    vars(module)["loss_fn"] = task.call_loss_fn
    module.register_forward_hook(task.pass_weight_through)
    if options.report:
        module.get_additional_losses = lambda: task.reported
    return {name: task}


def give_back(module: Any) -> None:
    """Undo ``convert``, but for the head's class."""
    for name, hook in list(module._forward_hooks.items()):
        task = getattr(hook, "__self__", None)
        if not isinstance(task, _PipelineTask):
            continue
        task.is_given_back = True
        del module._forward_hooks[name]
        if getattr(module.loss_fn, "__self__", None) is task:
            del vars(module)["loss_fn"]
            if "loss_fn" not in module._modules:
                module.loss_fn = task.loss_fn
        if isinstance(task.owner, CCEEmbedding):
            del task.owner.cce_task
    report = vars(module).get("get_additional_losses")
    if getattr(report, "__module__", None) == __name__:
        del module.get_additional_losses


@dataclasses.dataclass(eq=False)
class _PipelineTask(Task):
    """Logits are deferred wherever the engine computes a loss; the last layer returns hidden states instead of logits."""

    engine: Callable[[], Any] = lambda: None  # a weak reference: the engine holds this
    owner: Any = None  # the module that has the head's weight
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
        weight, bias = self.owner.weight, getattr(self.owner, "bias", None)
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
