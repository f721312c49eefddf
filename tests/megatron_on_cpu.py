"""megatron-core on CPU and gloo: places that name a GPU are led to the CPU, and nothing else is changed."""

import contextlib
import functools
import gc
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class CudaMeansCpu(TorchFunctionMode):
    """Have ``device="cuda"``, which Megatron's schedules and buffers spell out, mean the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return func(*args, **kwargs)


@functools.cache
def use_cpu() -> None:
    """Lead this process's Megatron to the CPU, for good."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    gc.freeze()  # test_megatron.py collects garbage after each layout
    CudaMeansCpu().__enter__()
    cpu = torch.device("cpu")
    type_of = torch.Tensor.type

    def type_on_gpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = type_of(self, *args, **kwargs)
        return "torch.cuda." + answer.split(".")[-1] if isinstance(answer, str) else answer

    tensor: Any = torch.tensor
    stream = SimpleNamespace(wait_event=lambda _: None, wait_stream=lambda _: None)

    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return tensor(*args, **kwargs)

    replacements: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_device", lambda: cpu),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.cuda, "current_stream", lambda *_: stream),
        (torch.cuda.random, "get_rng_state", lambda **_: torch.get_rng_state()),
        (torch, "tensor", unpinned),  # NeMo-RL pins an index
        (torch.Tensor, "cuda", lambda self, *_, **__: self),
        (torch.Tensor, "type", type_on_gpu),
        # Names of Transformer Engine that some versions use without having it.
        (random, "FP8GlobalStateManager", SimpleNamespace(is_fp8_enabled=lambda: False)),
        (random, "fp8_autocast", lambda **_: contextlib.nullcontext()),
        (random, "activation_recompute_forward", lambda **_: contextlib.nullcontext()),
        (moe_utils, "te_general_gemm", None),
        # Dropout is off, so no random number is drawn in the fork.
        (random.CudaRNGStatesTracker, "fork", lambda *_, **__: contextlib.nullcontext()),
    ]
    for owner, name, replacement in replacements:
        setattr(owner, name, replacement)


class Norm(nn.LayerNorm):
    """LayerNorm with the tag by which Megatron sums its gradient over slices of the sequence; torch's wrapper refuses them."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]


class OwnTokenAttention(nn.Module):
    """In place of the attention core: a token sees itself alone, so slices of the sequence need nothing of one another."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return (torch.sigmoid((query * key).sum(dim=-1, keepdim=True)) * value).flatten(2)  # from [s, b, heads, size]
