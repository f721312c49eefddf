"""Models of transformers at their real sizes, and the methods of ``steps.py`` and ``training.py``.

A method changes a copy of a model and returns a module, which takes ids and labels [B, L] and returns {"loss": mean loss, 0-d}.
All copies share their parameters, but not their modules, so methods do not affect each other.
"""

import copy
import logging
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cce_dist
import peers
from cce_dist import VocabShard
from cce_dist.tools.plan import sizes
from loop import Method
from peers import LossFn
from workload import IGNORE_INDEX

# The family in transformers, and what its config needs besides the sizes of ``cce_dist.tools.plan.sizes``.
_GEMMA_3 = {"sliding_window": 512, "query_pre_attn_scalar": 256}
_GEMMA_2 = {"sliding_window": 4096, "query_pre_attn_scalar": 256}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma-3-270m": ("Gemma3", _GEMMA_3),
    "gemma-3-1b": ("Gemma3", _GEMMA_3),
    "qwen-3-0.6b": ("Qwen3", {}),
    "qwen-3-1.7b": ("Qwen3", {}),
    "qwen-3-4b": ("Qwen3", {}),
    "llama-3.2-1b": ("Llama", {}),
    "llama-3-8b": ("Llama", {}),
    "smollm2-360m": ("Llama", {}),
    "gemma-2-2b": ("Gemma2", _GEMMA_2),
}


def config_of(name: str, num_layers: int | None = None) -> tuple[Any, Any]:
    """Return the class and the config of a model of ``CONFIGS``, with ``num_layers`` layers if given."""
    import transformers

    (family, more), model = CONFIGS[name], sizes.MODELS[name]
    kind = getattr(transformers, f"{family}ForCausalLM")
    return kind, kind.config_class(
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        num_hidden_layers=num_layers or model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads or model.num_heads,
        head_dim=model.size_of_head,
        intermediate_size=model.ffn_size,
        tie_word_embeddings=model.is_tied,
        use_cache=False,
        pad_token_id=None,  # its row would get no gradient
        **more,
    )


def build(name: str, num_layers: int | None, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Any:
    """Return a model of ``CONFIGS`` with weights as transformers draws them.

    Attention is SDPA, or eager for Gemma 2, which caps its attention scores.
    """
    kind, config = config_of(name, num_layers)
    torch.manual_seed(seed)
    with torch.device(device):
        attention = "sdpa" if kind._supports_sdpa else "eager"
        return kind._from_config(config, dtype=dtype, attn_implementation=attention).train()


def twin(model: Any, *shared: nn.Module) -> Any:
    """Copy a model, but not its parameters and its ``shared`` modules."""
    return copy.deepcopy(model, {id(each): each for each in (*shared, *model.parameters())})


class FromHidden(nn.Module):
    """A model whose loss another library computes from hidden states, with labels shifted as in transformers."""

    def __init__(self, model: Any, loss: LossFn) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.model.model(input_ids=input_ids, use_cache=False).last_hidden_state
        return {"loss": self.loss(hidden.flatten(0, 1), self.model.lm_head.weight, shifted(labels).flatten())}


def shifted(ids: Tensor) -> Tensor:
    """Return the labels of ids [B, L] as transformers shifts them: the last token of a sequence has none."""
    return F.pad(ids[:, 1:], (0, 1), value=IGNORE_INDEX)


def softcap_of(model: Any) -> float | None:
    return getattr(model.config, "final_logit_softcapping", None)


STOCK = Method(lambda model: model)


def over(method: Method, model: Any) -> nn.Module:
    """Return a method's module over the parameters of ``model``, which stays as it is."""
    return around(method, twin(model))


def around(method: Method, model: Any) -> nn.Module:
    """Return the module whose steps a method times. The method may change ``model``."""
    if method.compiles_layers:
        compile_layers(model)
    return method.build(model)


def compile_layers(model: Any) -> None:
    """Compile each layer of a model in place."""
    for layer in model.model.layers:
        layer.compile(dynamic=False)


# Options of ``cce_dist.convert``; the tables of heads use the same names.
OURS: dict[str, dict[str, Any]] = {
    "cce-dist-default": {},
    "cce-dist-cached": {"workspace_bytes": 1 << 40},
    "cce-dist-filtered": {"filter": "compensated", "filter_always": True},
}


def ways(compiles_layers: bool = False, ours: dict[str, dict[str, Any]] = OURS) -> dict[str, Method]:
    """Return every method by name, with "+layers" behind it where torch.compile is around each layer."""
    table = {
        "stock": STOCK,
        "torch-compile": Method(partial(_from_hidden, peers.torch_compile)),
        "liger": Method(_liger, needs_cuda=True),
        **{name: Method(partial(convert, options), ours=True) for name, options in ours.items()},
    }
    suffix = "+layers" * compiles_layers
    return {name + suffix: method._replace(compiles_layers=compiles_layers) for name, method in table.items()}


def _from_hidden(make: Callable[..., LossFn], model: Any) -> nn.Module:
    shard = VocabShard.even(model.config.vocab_size, None)
    return FromHidden(model, make(shard, model.lm_head.weight, softcap=softcap_of(model)))


def _liger(model: Any) -> nn.Module:
    """Apply Liger's own patch to one model, as Trainer does, but only its fused loss."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance  # pyright: ignore[reportMissingImports]

    off = dict.fromkeys(("rope", "rms_norm", "cross_entropy", "swiglu", "geglu"), False)
    kind = type(model)
    before = kind.forward
    _apply_liger_kernel_to_instance(model, fused_linear_cross_entropy=True, **off)
    if kind.forward is not before:
        # A release that changes the class would change the other ways.
        model.forward, kind.forward = MethodType(kind.forward, model), before
    return model


def convert(options: dict[str, Any], model: Any) -> nn.Module:
    """Convert a model without the log line."""
    log = logging.getLogger("cce_dist")
    level = log.level
    log.setLevel(logging.ERROR)  # the line of each conversion
    try:
        return cce_dist.convert(model, **options)
    finally:
        log.setLevel(level)
