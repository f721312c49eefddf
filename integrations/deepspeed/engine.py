"""initialize, install, convert and require; and models that compute their loss in forward."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

from cce_dist.integrations.deepspeed import pipeline
from cce_dist.integrations.deepspeed.layers import CCEHead, shard_of, split_layers
from cce_dist.integrations.deepspeed.loss import Options, Task
from cce_dist.integrations.deferred import DeferredLogits, Head, find_head, innermost, take
from cce_dist.integrations.options import SECTION


def initialize(*args: Any, **kwargs: Any) -> tuple:
    """Call ``deepspeed.initialize``; where ds_config enables it, compute the model's loss from hidden states.

    Arguments and result are the same as for ``deepspeed.initialize``. Without ``"cce_dist": {"enabled": true}`` nothing else
    happens. With it the model's loss code finds ``DeferredLogits`` where it found logits, and the loss is fp32. One rank says
    so in a line, as in ``convert``. The section's z-loss and label smoothing apply to training losses alone.

    Sharding: The weight stays as DeepSpeed or the model keeps it; hidden states are replicated over the model axis.
    Communication: That of ``linear_cross_entropy`` over the model axis; ``sequence_mean`` adds two all-reduces of a number.

    Raises:
        ValueError: The section is wrong, or the model has no head that can be taken over; before anything is built.
        ImportError: deepspeed is missing.
    """
    return _initialize(_original(), args, kwargs)


def install() -> None:
    """Have ``deepspeed.initialize`` itself read the section ``"cce_dist"`` of ds_config, as ``initialize`` does.

    Call it before Trainer, Accelerate, TRL or your own framework calls that; a second call changes nothing. Code that did
    ``from deepspeed import initialize`` before keeps the old one. ImportError: deepspeed is missing.
    """
    deepspeed: Any = _deepspeed()
    original = deepspeed.initialize
    if hasattr(original, "cce_original"):
        return

    @functools.wraps(original)
    def reads_the_section(*args: Any, **kwargs: Any) -> tuple:
        result = _initialize(original, args, kwargs)
        installed.cce_converted += hasattr(result[0], "cce_heads")
        return result

    installed: Any = reads_the_section
    installed.cce_original, installed.cce_converted = original, 0
    deepspeed.initialize = installed


def uninstall() -> None:
    """Undo ``install``; models that are converted stay so."""
    _deepspeed().initialize = _original()


def num_converted() -> int:
    return getattr(_deepspeed().initialize, "cce_converted", 0)


def _original() -> Callable:
    """Return DeepSpeed's own ``initialize``."""
    found = _deepspeed().initialize
    found = getattr(found, "cce_original", found)
    if found is initialize:
        raise RuntimeError(
            "deepspeed.initialize was set to cce_dist's, which calls it: in place of the assignment call "
            "cce_dist.integrations.deepspeed.install()"
        )
    return found


def _initialize(original: Callable, args: tuple, kwargs: dict) -> tuple:
    given = inspect.signature(original).bind_partial(*args, **kwargs).arguments
    sources = (given.get("config"), given.get("config_params"), getattr(given.get("args"), "deepspeed_config", None))
    config: Any = next((source for source in sources if source is not None), {})
    if not isinstance(config, dict):
        from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config

        config = load_ds_config(config)
    options = Options.from_config(config)
    if options is None:
        return original(*args, **kwargs)
    _check(given.get("model"), config, given.get("mpu"), options)
    result = original(*args, **kwargs)
    convert(result[0], options)
    return result


def convert(engine: Any, options: Options | None = None) -> Any:
    """Have the model of an engine compute its loss from hidden states, and return the engine. ``initialize`` calls this.

    The first rank of those with a head says so in a line of the logger ``cce_dist``. ValueError: the model has no head that can
    be taken over.
    """
    options = options or Options()
    if hasattr(engine, "cce_heads"):
        return engine
    if pipeline.is_pipeline(engine.module):
        _join(engine, engine.mpu.get_slice_parallel_group())
        engine.cce_heads = pipeline.convert(engine, options)
    else:
        engine.cce_heads = _convert_model(engine, options)
    first = dist.get_process_group_ranks(engine.seq_data_parallel_group)[0]  # one of the replicas
    for name, task in engine.cce_heads.items():
        if dist.get_rank() == first and (task.shard.group is None or task.shard.group.rank() == 0):
            task.announce(name)
    return engine


def require(engine: Any) -> None:
    """Raise unless this engine's loss comes from hidden states: plain ``deepspeed.initialize`` ignores the section silently.

    Before the first forward in training this can tell only whether a head was converted, after one whether the head was asked
    for its loss, too. A stage of a pipeline without a head has nothing to tell of.

    Raises:
        RuntimeError: ``initialize`` of this module did not make the engine, or its ds_config does not enable us; or forwards
            in training have ended, and other code computed the loss of all of them.
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
    task.watch(module)
    take(head, task)
    whole = getattr(module, "_deepspeed_original_loss_function", None)
    if whole is not None:
        # AutoTP has put a loss of local logits there. Deferred logits are of the whole vocabulary, and so the model's own
        # loss fits them.
        module.loss_function = functools.partial(_loss_of_either, whole, module.loss_function)
    return {name: task}


def _loss_of_either(whole: Callable, local: Callable, logits: Any, *args: Any, **kwargs: Any) -> Any:
    return (whole if isinstance(logits, DeferredLogits) else local)(logits, *args, **kwargs)


def _join(engine: Any, group: dist.ProcessGroup | None) -> None:
    for layer in split_layers(engine.module):
        layer.rows.join(group)


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
    # ZeRO-3's reduce-scatter averages over these ranks; everything else sums (0.19.8).
    stage3 = engine.zero_optimization_stage() == 3
    averages = stage3 and (engine.optimizer.reduce_scatter or not engine.optimizer.contiguous_gradients)
    return group, size if averages else 1


def _check(model: Any, config: dict, mpu: Any, options: Options) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be an nn.Module, got {type(model).__name__}")
    if any(isinstance(module, Head) for module in model.modules()):
        raise ValueError(f'the model is converted already: leave out cce_dist.convert, or "{SECTION}" of ds_config')
    if pipeline.is_pipeline(model):
        return pipeline.check(model, options)
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
    tensor_parallel = config.get("tensor_parallel", {})
    if tensor_parallel.get("autotp_size", 0) > 1 and not tensor_parallel.get("vocab_parallel_lm_head"):
        raise ValueError('cce_dist with AutoTP needs "tensor_parallel": {"vocab_parallel_lm_head": true}')


def _deepspeed() -> Any:
    try:
        import deepspeed
    except ImportError as error:
        raise ImportError(f"cce_dist needs deepspeed (pip install 'cce-dist[deepspeed]'): {error}") from error
    return deepspeed
