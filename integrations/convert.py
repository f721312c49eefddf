"""convert, revert and require: any PyTorch model that computes its loss in forward, or hands its logits to ``F.cross_entropy``.

These functions are exported as ``cce_dist.convert`` and so on, and need no framework but PyTorch. A converted model trains in a
plain loop, under DDP, FSDP2 and ZeRO, with Accelerate and Hugging Face's Trainer, and with TRL's SFTTrainer. The adapters of
DeepSpeed and of Megatron have their own ``convert``, which also knows layers that are split over ranks.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Unpack

from cce_dist.checks import kind
from cce_dist.filter import GradFilter
from cce_dist.integrations import fsdp, peft, transformers
from cce_dist.integrations.deferred.subclass import Head, Watched, find_head, give_back, innermost, take, watch
from cce_dist.integrations.deferred.task import Task
from cce_dist.integrations.options import SECTION, ConvertOptions, ModelOptions
from cce_dist.shard import VocabShard

_Model = TypeVar("_Model", bound=Callable[..., Any])  # to a type checker torch.compile(model) is no nn.Module


def convert(
    model: _Model,
    *,
    shard_over: DeviceMesh | None = None,
    equal_tokens: bool = False,
    grad_filter: GradFilter | None = None,
    **options: Unpack[ConvertOptions],
) -> _Model:
    """Have a model compute its loss from hidden states, without logits, and return the model.

    The model's own loss code finds deferred logits where it found logits. Its call of ``F.cross_entropy`` computes the loss.
    Scale, softcap, ignored label, reduction and weights of tokens come from where the model has them. Parameters, their names
    and checkpoints stay. Logits are deferred in training, and where the model is given labels; docs/huggingface.md says when
    they are computed, and when their use raises. One rank says in a line that the loss is in use.

    Call it on every rank, before or after ``fully_shard``, and before DDP, ``Trainer(...)`` and ``accelerator.prepare``; after
    PEFT; before or after a ``device_map``. On a converted model it replaces the options, where there are any. Call it again
    after ``resize_token_embeddings``.

    Args:
        model: Any ``nn.Module`` with one head that is an ``nn.Linear``: its output embedding, or a module called lm_head or
            embed_out. DDP, ``torch.compile`` and PEFT's wrapper may be around it.
        shard_over: The data-parallel mesh that ``fully_shard`` will be given, [ranks] or [replicas, ranks]. Weight and
            bias of the head become DTensors, split on dim 0 over the mesh's last dimension. A tied embedding uses the same
            weight. No loss gathers them. FSDP2 must leave them alone:
            ``fully_shard(model, mesh=mesh, ignored_params=set(model.lm_head.parameters()))``.
        equal_tokens: With ``shard_over``, a promise that the ranks of the mesh's last dimension have the same number of tokens
            in every call. Without it they tell each other, and the host waits for that.
        grad_filter: As in ``linear_cross_entropy``, in place of ``filter`` and its numbers.
        **options: ``filter`` ("off", "compensated" or "plain"), ``filter_eps``, ``filter_hidden``, ``filter_weight``,
            ``filter_always``, ``label_smoothing``, ``z_loss_weight``, ``backend``, ``workspace_bytes`` (None: the shapes choose
            the budget; 1 takes the least memory, 1 << 40 keeps everything), ``reduce_dtype``, and ``head``, the name of the
            module that makes the logits: the keys of DeepSpeed's section, with the same checks.

    Sharding: The weight is whole where the head runs. FSDP2 and ZeRO-3 gather the weight around the loss, as around any layer.
        With ``shard_over`` a rank computes its rows of the vocabulary for the tokens of all ranks of the mesh's last dimension.
    Communication: None beyond FSDP2's and ZeRO-3's. With ``shard_over`` as in ``linear_cross_entropy`` with sequence
        parallelism; an all-gather of labels in forward, of a number for each token in backward; with replicas an all-reduce
        of the rows' gradient. A tied embedding all-gathers ids and reduce-scatters embeddings in forward, and gathers their
        gradient in backward. Using the logits gathers the weight.

    Raises:
        ValueError: An option is unknown or out of range, or the model has no head that can be taken over; one line says which.
        TypeError: ``model`` is no ``nn.Module``.
    """
    if isinstance(options.get("filter"), GradFilter):
        raise ValueError(
            f'cce_dist.convert: filter is "off", "compensated" or "plain"; pass grad_filter={options["filter"]}'
        )
    chosen = ModelOptions.read(options, lambda key: f"cce_dist.convert: {key}", "cce_dist.convert")
    if grad_filter is not None:
        if any(key.startswith("filter") for key in options):
            raise ValueError("cce_dist.convert: grad_filter and filter say the same: leave one of them out")
        chosen = dataclasses.replace(chosen, grad_filter=kind("cce_dist.convert: grad_filter", grad_filter, GradFilter))
    heads = _heads(model, "convert")
    inner = innermost(model)
    if heads:
        named = dict(inner.named_modules()).get(chosen.head)
        if chosen.head and (named is None or peft.in_use(named) not in heads.values()):
            raise ValueError(
                f'"cce_dist.head" is "{chosen.head}", but {", ".join(heads)} is converted: call cce_dist.revert(model) first'
            )
        for head in heads.values():
            task = head.cce_task
            if (options or grad_filter) and type(task.options) is not ModelOptions:
                raise ValueError(
                    "the head's options come from its framework's adapter, as a section or flags: change them there"
                )
            task.options = chosen if options or grad_filter else task.options
            _shard_over(task, inner, head, shard_over, equal_tokens)
        if len(heads) == 1 and not any(isinstance(module, Watched) for module in inner.modules()):
            [head] = heads.values()
            watch(inner, head.cce_task)  # the head was converted with another model, which shares it
        return model
    _unwatch(inner)
    transformers.refuse(inner)
    if type(inner).__module__.startswith("megatron."):
        raise ValueError(f"a {type(inner).__name__} is Megatron's: call cce_dist.integrations.megatron.convert")
    name, head = find_head(inner, chosen.head)
    rows = peft.num_rows(head) or head.out_features
    task = transformers.Task(chosen, VocabShard(0, rows, rows))
    _shard_over(task, inner, head, shard_over, equal_tokens)
    watch(inner, task)
    take(head, task)
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    if rank == 0:
        task.announce(name)
    return model


def _shard_over(task: Task, model: nn.Module, head: Any, mesh: DeviceMesh | None, equal_tokens: bool) -> None:
    if mesh is not None and (task.rows is None or task.rows.mesh != mesh):
        task.rows = fsdp.shard_over(model, head, mesh, equal_tokens)
    elif mesh is not None:
        task.rows.equal_tokens = equal_tokens
    elif equal_tokens and task.rows is None:
        raise ValueError("equal_tokens is a promise for shard_over: give the mesh, too")


def revert(model: _Model) -> _Model:
    """Undo ``convert``, and return the model.

    Args:
        model: A converted model.

    Raises:
        ValueError: The head's class was changed again since, by FSDP2 say, or its weight is split by ``shard_over``.
        TypeError: ``model`` is no ``nn.Module``.
    """
    for name, head in _heads(model, "revert").items():
        if head.cce_task.rows is not None:
            raise ValueError(
                f"{name} is split over data-parallel ranks by shard_over: save it, and load it into a model anew"
            )
        give_back(head)
    for module in model.modules():
        _unwatch(module)
    return model


def require(model: Callable[..., Any]) -> None:
    """Raise unless this model's loss comes from hidden states.

    Call it after a step: before one nobody knows who will compute the loss.

    Args:
        model: The model. It may be wrapped by DDP, FSDP, DeepSpeed or PEFT. A model that a trainer of TRL has taken after
            ``cce_dist.integrations.trl.install()`` needs no conversion.

    Raises:
        RuntimeError: No head is converted, no forward in training has ended, or other code computed the loss of all of them.
        TypeError: ``model`` is no ``nn.Module``.
    """
    heads = _heads(model, "require")
    if any(hasattr(getattr(module, "forward", None), "cce_scores") for module in model.modules()):
        return  # a trainer of TRL asks the model for log-probabilities (``trl.install``)
    if not heads:
        advice = "call cce_dist.convert(model), before Trainer, accelerator.prepare or DDP"
        if "trl" in sys.modules:
            advice += ", or cce_dist.integrations.trl.install() before the trainer of TRL is made"
        if transformers.section_of_trainer() is not None:
            advice = (
                f'nobody has read "{SECTION}" of ds_config: call cce_dist.integrations.deepspeed.install() before training, or '
                "start the script by python -m cce_dist.integrations.deepspeed"
            )
        raise RuntimeError(f"no head of this {type(model).__name__} was converted: {advice}")
    for name, head in heads.items():
        head.cce_task.require(name)


def _unwatch(module: Any) -> None:
    """Stop watching a model, also one whose head was replaced since."""
    if isinstance(module, Watched) and "cce_task" in vars(module):
        give_back(module)


def _heads(model: Any, called: str) -> dict[str, Any]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"cce_dist.{called} needs an nn.Module, got {type(model).__name__}")
    return {name: module for name, module in model.named_modules() if isinstance(module, Head)}
