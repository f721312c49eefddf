"""initialize, install, convert and require, for models that compute their loss in forward and for pipelines."""

from __future__ import annotations

import contextvars
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cce_dist.autograd import leaves_of
from cce_dist.integrations.deepspeed.layers import CCEHead, shard_of, split_layers
from cce_dist.integrations.deepspeed.loss import REPORTED, Options, PipelineTask, Task
from cce_dist.integrations.deferred.logits import DeferredLogits
from cce_dist.integrations.deferred.subclass import (
    Head,
    Watched,
    check_class,
    find_head,
    give_back,
    innermost,
    take,
    watch,
)
from cce_dist.integrations.options import SECTION
from cce_dist.integrations.patching import Place, say_once

INITIALIZE = Place("deepspeed", "initialize")
# Whether a call of deepspeed.initialize comes from ours, which has read the section.
_section_is_read = contextvars.ContextVar("_section_is_read", default=False)
num_converted = 0  # engines of this process that were made with the section enabled


def initialize(*args: Any, **kwargs: Any) -> tuple:
    """Call ``deepspeed.initialize``; where ds_config enables it, compute the model's loss from hidden states.

    Arguments and result are the same as for ``deepspeed.initialize``. Without ``"cce_dist": {"enabled": true}`` nothing else
    happens. With it the model's loss code finds ``DeferredLogits`` where it found logits, and the loss is fp32. One rank says
    so in a line, as in ``convert``. The section's z-loss and label smoothing apply to training losses alone.

    The conversion belongs to the engine. A later engine of the same model, also one of plain ``deepspeed.initialize``, first
    gives the model its own head and loss back; then its own section decides.

    Sharding: The weight stays as DeepSpeed or the model keeps it; hidden states are replicated over the model axis.
    Communication: As ``linear_cross_entropy`` over the model axis; ``sequence_mean`` adds two all-reduces of a number.

    Raises:
        ValueError: The section is wrong, or the model has no head that can be taken over; before anything is built. There is
            no sequence parallelism for ``sequence_mean``; once DeepSpeed has built the engine.
        ImportError: deepspeed is missing.
    """
    return _initialize(_original(), *args, **kwargs)


def install() -> None:
    """Have ``deepspeed.initialize`` itself read the section ``"cce_dist"`` of ds_config, as ``initialize`` does.

    Call it before Trainer, Accelerate, TRL or your own framework calls that; a second call changes nothing. Code that did
    ``from deepspeed import initialize`` before keeps the old one. ImportError: deepspeed is missing.
    """
    _original()
    INITIALIZE.wrap(_initialize)


def uninstall() -> None:
    """Undo ``install``; models that are converted stay so."""
    INITIALIZE.uninstall()


def _original() -> Callable:
    """Return DeepSpeed's own ``initialize``."""
    try:
        import deepspeed
    except ImportError as error:
        raise ImportError(f"cce_dist needs deepspeed (pip install deepspeed): {error}") from error
    found = getattr(deepspeed.initialize, "cce_original", deepspeed.initialize)
    if found is initialize:
        raise RuntimeError(
            "deepspeed.initialize was set to cce_dist's, which calls it: in place of the assignment call "
            "cce_dist.integrations.deepspeed.install()"
        )
    return found


def _initialize(original: Callable, *args: Any, **kwargs: Any) -> tuple:
    from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config

    given = inspect.signature(original).bind_partial(*args, **kwargs).arguments
    in_args = (getattr(given.get("args"), name, None) for name in ("deepspeed_config", "deepscale_config"))
    sources = (given.get("config"), given.get("config_params"), *in_args)
    config = load_ds_config(next((source for source in sources if source is not None), {}))
    options = Options.from_config(config)
    if options is None:
        return original(*args, **kwargs)
    _check(given.get("model"), config, given.get("mpu"), options)
    token = _section_is_read.set(True)
    try:
        result = original(*args, **kwargs)
    finally:
        _section_is_read.reset(token)
    convert(result[0], options)
    global num_converted
    num_converted += 1
    return result


def watch_engines() -> None:
    """Have every new engine of DeepSpeed first undo the conversion of its model by an earlier engine.

    An engine of plain ``deepspeed.initialize`` whose ds_config has the section enabled says in a warning that it is ignored.
    ``import cce_dist`` calls this as soon as deepspeed is imported.
    """
    Place("deepspeed.runtime.engine", "DeepSpeedEngine.__init__").wrap(_begin_engine)


def _begin_engine(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    given = inspect.signature(original).bind_partial(self, *args, **kwargs).arguments
    if isinstance(given.get("model"), nn.Module):
        _give_back(given["model"])
    config = given.get("config")
    section = config.get(SECTION) if isinstance(config, dict) else None
    is_off = section is None or (isinstance(section, dict) and section.get("enabled") is False)
    if not is_off and not _section_is_read.get():
        say_once(
            f'plain deepspeed.initialize ignores the section "{SECTION}" of ds_config: call '
            "cce_dist.integrations.deepspeed.initialize in its place, or cce_dist.integrations.deepspeed.install() before it"
        )
    original(self, *args, **kwargs)


def _give_back(model: nn.Module) -> None:
    """Undo the conversion of this model by an earlier engine, but not by ``cce_dist.convert``.

    Raises:
        ValueError: The class of a head was changed again since.
    """
    for module in list(model.modules()):
        task = vars(module).get("cce_task")
        if isinstance(module, Watched) and isinstance(task, Task):
            task.is_given_back = True
            give_back(module)
            loss = getattr(module, "loss_function", None)
            if isinstance(loss, functools.partial) and loss.func is _loss_of_either:
                module.loss_function = loss.args[1]
    for head in _taken_heads(model):
        give_back(head)
    if _is_pipeline(model):
        _give_back_pipeline(model)
    for layer in split_layers(model):
        if layer.rows.joined_by_engine:
            layer.rows.group = None


def _taken_heads(model: nn.Module) -> list[Any]:
    """Return the heads that an engine has taken over; heads that ``cce_dist.convert`` has taken over are left out."""
    return [module for module in model.modules() if isinstance(module, Head) and isinstance(module.cce_task, Task)]


def convert(engine: Any, options: Options | None = None) -> Any:
    """Have the model of an engine compute its loss from hidden states, and return the engine. ``initialize`` calls this.

    The first rank that has a head logs one line to the logger ``cce_dist``.

    Raises:
        ValueError: The model has no head that can be taken over.
    """
    options = options or Options()
    if hasattr(engine, "cce_heads"):
        return engine
    if _is_pipeline(engine.module):
        _join(engine, engine.mpu.get_slice_parallel_group())
        engine.cce_heads = _convert_pipeline(engine, options)
    else:
        engine.cce_heads = _convert_model(engine, options)
    first = dist.get_process_group_ranks(engine.seq_data_parallel_group)[0]  # one of the replicas
    for name, task in engine.cce_heads.items():
        if dist.get_rank() == first and (task.shard.group is None or task.shard.group.rank() == 0):
            task.announce(name)
    return engine


def require(engine: Any) -> None:
    """Raise unless this engine's loss comes from hidden states, as ``cce_dist.require`` does for a model: call it after a step.

    A pipeline stage without a head always passes.

    Raises:
        RuntimeError: ``initialize`` of this module did not make the engine, or its ds_config does not enable the section; a
            later engine has the model; no forward in training has ended; or other code computed the loss of all of them.
    """
    if not hasattr(engine, "cce_heads"):
        raise RuntimeError(
            f'no head of this engine was converted: call cce_dist.integrations.deepspeed.initialize, with "{SECTION}": '
            '{"enabled": true} in ds_config'
        )
    for name, task in engine.cce_heads.items():
        task.require(name)


def _convert_model(engine: Any, options: Options) -> dict[str, Task]:
    from deepspeed.utils.bwc import bwc_tensor_model_parallel_group

    module = innermost(engine.module)
    name, head = find_head(module, options.head, (CCEHead,))
    _join(engine, bwc_tensor_model_parallel_group(engine.mpu))
    task = Task(options, shard_of(head))
    if options.sequence_mean:
        task.sequence_group, task.sequence_scale = _sequence_group(engine)
    if options.report:
        engine.get_additional_losses = lambda: task.reported
    watch(module, task)
    take(head, task)
    whole = getattr(module, "_deepspeed_original_loss_function", None)
    if whole is not None:
        # AutoTP has put a loss of local logits there. Deferred logits cover the whole vocabulary, as the model's own loss
        # expects.
        module.loss_function = functools.partial(_loss_of_either, whole, module.loss_function)
    return {name: task}


def _is_pipeline(module: Any) -> bool:
    from deepspeed.pipe import PipelineModule

    return isinstance(module, PipelineModule)


def _check_pipeline(module: Any, options: Options) -> None:
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
    elif not issubclass(kind, nn.Embedding) or spec.forward_fn is None:
        raise ValueError(f"cce_dist: a tied head needs an nn.Embedding and a forward_fn, not {kind.__name__}")


def _convert_pipeline(engine: Any, options: Options) -> dict[str, Task]:
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
    task = PipelineTask(options, shard_of(owner), engine=weakref.ref(engine), owner=owner, loss_fn=module.loss_fn)
    if tied:
        _check_tied(head)
        task.tied_head, module.forward_funcs[-1] = head, task.call_tied_head
    else:
        take(head, task)
    # A loss_fn that is a module stays registered, with its parameters: the task's is found first.
    vars(module)["loss_fn"] = task.call_loss_fn
    module.register_forward_hook(task.pass_weight_through)
    if options.report:
        module.get_additional_losses = lambda: task.reported
    return {name: task}


def _give_back_pipeline(module: Any) -> None:
    """Undo ``_convert_pipeline``, but for the head's class."""
    for name, hook in list(module._forward_hooks.items()):
        task = getattr(hook, "__self__", None)
        if not isinstance(task, PipelineTask):
            continue
        task.is_given_back = True
        del module._forward_hooks[name]
        if getattr(module.loss_fn, "__self__", None) is task:
            del vars(module)["loss_fn"]
            if "loss_fn" not in module._modules:
                module.loss_fn = task.loss_fn
        if task.tied_head is not None:
            module.forward_funcs[-1] = task.tied_head
    report = vars(module).get("get_additional_losses")
    if getattr(report, "__module__", None) == __name__:
        del module.get_additional_losses


def _check_tied(function: functools.partial) -> None:
    """Raise if a tied head is not the product with the weight that it is tied to, and uses no other parameter.

    The hidden states are random, and so large the second time that a norm before the product, or a cap behind it, shows.
    """
    weight = function.args[0].weight
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 4, weight.shape[1], generator=generator, device="cpu").to(weight)
    largest = F.linear(hidden, weight).abs().max().item()
    for factor in (1.0, min(1e4, 1e3 / largest) if largest else 1.0):
        with torch.enable_grad():
            logits, expected = function(factor * hidden), F.linear(factor * hidden, weight)
        is_product = logits.shape == expected.shape and all(leaf is weight for leaf in leaves_of(logits))
        if not is_product or (logits - expected).abs().max().item() > 1e-2 * expected.abs().max().item():
            raise ValueError(
                "cce_dist: the forward_fn of the tied head is not hidden @ weight.T; scale or cap in loss_fn"
            )


def _loss_of_either(whole: Callable, local: Callable, logits: Any, *args: Any, **kwargs: Any) -> Any:
    return (whole if isinstance(logits, DeferredLogits) else local)(logits, *args, **kwargs)


def _join(engine: Any, group: dist.ProcessGroup | None) -> None:
    for layer in split_layers(engine.module):
        layer.rows.join(group)
        layer.rows.joined_by_engine = True


def _sequence_group(engine: Any) -> tuple[dist.ProcessGroup, int]:
    """Return the sequence-parallel group, and the number by which DeepSpeed divides the sum of its ranks' gradients."""
    size = engine.sequence_parallel_size
    if size == 1:
        raise ValueError(f'ds_config: "{SECTION}.sequence_mean" is set, but there is no sequence parallelism')
    group = engine.get_sequence_parallel_group()
    ranks, reduced = (set(dist.get_process_group_ranks(each)) for each in (group, engine.seq_data_parallel_group))
    if not ranks <= reduced:
        raise ValueError(
            "DeepSpeed does not reduce gradients over this sequence-parallel group; make it by "
            "deepspeed.runtime.sequence_parallel.parallel_state_sp and pass that as mpu="
        )
    stage3 = engine.zero_optimization_stage() == 3
    if stage3 and not engine.optimizer.reduce_scatter:
        raise ValueError(
            'sequence_mean under ZeRO-3 needs "reduce_scatter": true: without it DeepSpeed averages the gradients of some '
            "parameters over these ranks, and sums the others"
        )
    return group, size if stage3 else 1  # ZeRO-3 averages over these ranks; the other stages sum (0.19.8)


def _check(model: Any, config: dict, mpu: Any, options: Options) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be an nn.Module, got {type(model).__name__}")
    taken = _taken_heads(model)
    if any(isinstance(module, Head) and module not in taken for module in model.modules()):
        raise ValueError(f'the model is converted already: leave out cce_dist.convert, or "{SECTION}" of ds_config')
    if _is_pipeline(model):
        return _check_pipeline(model, options)
    split = split_layers(model)
    if split and mpu is None:
        raise ValueError("a model with a split vocabulary needs mpu=: without one DeepSpeed makes all shards rank 0's")
    for layer in split:
        group = getattr(layer.weight, "ds_process_group", None)
        if group is not None and group.size() != mpu.get_data_parallel_world_size():
            raise ValueError(
                "zero.Init has split a shard of the vocabulary over ranks of other shards: give it "
                "data_parallel_group=mpu.get_data_parallel_group()"
            )
    find_head(innermost(model), options.head, (CCEHead,))
    _check_tensor_parallel(config)


def _check_tensor_parallel(config: dict) -> None:
    section = config.get("tensor_parallel", {})
    if not isinstance(section, dict):
        raise ValueError(f'ds_config: "tensor_parallel" must be a section {{...}}, got {section!r}')
    size, splits_head = section.get("autotp_size", 0), section.get("vocab_parallel_lm_head")
    if isinstance(size, bool) or not isinstance(size, (int, float)) or not float(size).is_integer():
        raise ValueError(f'ds_config: "tensor_parallel.autotp_size" must be a whole number, got {size!r}')
    if splits_head is not None and not isinstance(splits_head, bool):
        raise ValueError(
            f'ds_config: "tensor_parallel.vocab_parallel_lm_head" must be true or false, got {splits_head!r}'
        )
    if size > 1 and not splits_head:
        raise ValueError('cce_dist with AutoTP needs "tensor_parallel": {"vocab_parallel_lm_head": true}')
