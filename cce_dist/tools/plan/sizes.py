"""Sizes of models: a table by name, and the model that transformers builds from a config.json."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from cce_dist.kernels.tiles import cdiv

T = TypeVar("T")

# The largest size, and the largest number of layers or experts. More would take hours to plan.
MOST_SIZE, MOST_PARTS = 1 << 28, 1 << 12


def check_size(name: str, value: object, most: int = MOST_SIZE) -> None:
    """Raise ValueError unless the value is a size that a model can have."""
    is_expert = "expert" in name
    least, most = int(not is_expert), MOST_PARTS if is_expert or "layer" in name else most
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name} must be a whole number from {least} to {most:,}, got {value!r}")


def _check_shared(num_heads: int, num_kv_heads: int | None) -> None:
    if num_heads % (num_kv_heads or num_heads):
        raise ValueError(f"{num_heads} heads cannot share {num_kv_heads} heads of keys and values")


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes of a decoder-only transformer, from which formulas compute its parameters."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    num_heads: int
    ffn_size: int  # inner width of the feed-forward network, or of one expert
    num_kv_heads: int | None = None  # heads of keys and values; None: ``num_heads``
    head_size: int | None = None  # width of an attention head; None: ``hidden_size / num_heads``
    is_gated: bool = True  # the feed-forward network has a gate, as SwiGLU does
    is_tied: bool = False  # embedding and head share one weight
    num_experts: int = 0  # 0: no mixture of experts
    experts_per_token: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" or (field.type == "int | None" and value is not None):
                check_size(field.name, value)
        if not self.head_size and self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size {self.hidden_size} is not num_heads {self.num_heads} equal heads")
        _check_shared(self.num_heads, self.num_kv_heads)

    @property
    def size_of_head(self) -> int:
        return self.head_size or self.hidden_size // self.num_heads

    @property
    def query_size(self) -> int:
        return self.num_heads * self.size_of_head

    @property
    def key_value_size(self) -> int:
        """Width of all keys and values together."""
        return 2 * (self.num_kv_heads or self.num_heads) * self.size_of_head

    @property
    def attention_params(self) -> int:
        return self.hidden_size * (2 * self.query_size + self.key_value_size)

    @property
    def expert_params(self) -> int:
        return (3 if self.is_gated else 2) * self.hidden_size * self.ffn_size

    @property
    def layer_params(self) -> int:
        """Parameters of a layer, all experts counted."""
        router = self.num_experts * self.hidden_size
        return self.attention_params + max(1, self.num_experts) * self.expert_params + router + 2 * self.hidden_size

    @property
    def active_params(self) -> int:
        """Elements of a layer's matrices that a token is multiplied with."""
        router = self.num_experts * self.hidden_size
        return self.attention_params + max(1, self.experts_per_token) * self.expert_params + router

    @property
    def width(self) -> int:
        """Width of the hidden states between layers."""
        return self.hidden_size

    @property
    def kept_size(self) -> int:
        """Elements per token that a layer's products keep for backward, besides hidden states.

        A weight [A, hidden] or [hidden, A] keeps A elements: the other side of each product is hidden states.
        """
        return self.active_params // self.width

    @property
    def head_params(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def params(self) -> int:
        heads = 1 if self.is_tied else 2
        return self.num_layers * self.layer_params + heads * self.head_params + self.hidden_size

    @property
    def embedding_params(self) -> int:
        """Parameters before the first layer."""
        after = self.hidden_size + (0 if self.is_tied else self.head_params)
        return self.params - self.num_layers * self.layer_params - after


@dataclasses.dataclass(frozen=True)
class Counted(Model):
    """A model built by transformers, whose parameters are counted instead of computed.

    ``hidden_size`` and ``vocab_size`` are the shape of the head's weight. Numbers of a layer are means over all layers.
    ``num_heads`` is 0 for a model without attention, and ``ffn_size`` is always 0.
    """

    params: int = 0
    layer_params: int = 0
    active_params: int = 0
    width: int = 0
    query_size: int = 0

    def __post_init__(self) -> None:
        """Check nothing: transformers has built the model."""

    @property
    def model(self) -> Counted:
        """The model itself, for code that expects ``read_config`` to return a record with a model."""
        return self


def padded(model: Model, multiple: int) -> Model:
    """Return a model whose vocabulary is rounded up to a multiple, as Megatron pads it."""
    rows = cdiv(model.vocab_size, multiple) * multiple - model.vocab_size
    more: dict[str, Any] = {"vocab_size": model.vocab_size + rows}
    if isinstance(model, Counted):
        more["params"] = model.params + (1 if model.is_tied else 2) * rows * model.hidden_size
    return dataclasses.replace(model, **more)


# Sizes as published in each model's config.json; the vocabulary is the number of rows of the weight.
MODELS = {
    "llama-2-7b": Model(4096, 32_000, 32, 32, 11008),
    "llama-2-13b": Model(5120, 32_000, 40, 40, 13824),
    "llama-3.2-1b": Model(2048, 128_256, 16, 32, 8192, 8, is_tied=True),
    "llama-3-8b": Model(4096, 128_256, 32, 32, 14336, 8),
    "llama-3-70b": Model(8192, 128_256, 80, 64, 28672, 8),
    "gemma-2b": Model(2048, 256_000, 18, 8, 16384, 1, 256, is_tied=True),
    "gemma-2-2b": Model(2304, 256_000, 26, 8, 9216, 4, 256, is_tied=True),
    "gemma-2-9b": Model(3584, 256_000, 42, 16, 14336, 8, 256, is_tied=True),
    "gemma-2-27b": Model(4608, 256_000, 46, 32, 36864, 16, 128, is_tied=True),
    "gemma-3-270m": Model(640, 262_144, 18, 4, 2048, 1, 256, is_tied=True),
    "gemma-3-1b": Model(1152, 262_144, 26, 4, 6912, 1, 256, is_tied=True),
    "qwen-1.5-7b": Model(4096, 151_936, 32, 32, 11008),
    "qwen-3-0.6b": Model(1024, 151_936, 28, 16, 3072, 8, 128, is_tied=True),
    "qwen-3-1.7b": Model(2048, 151_936, 28, 16, 6144, 8, 128, is_tied=True),
    "qwen-3-4b": Model(2560, 151_936, 36, 32, 9728, 8, 128, is_tied=True),
    "qwen-2.5-7b": Model(3584, 152_064, 28, 28, 18944, 4),
    "qwen-2.5-32b": Model(5120, 152_064, 64, 40, 27648, 8),
    "mistral-7b": Model(4096, 32_000, 32, 32, 14336, 8),
    "mistral-nemo": Model(5120, 131_072, 40, 32, 14336, 8, 128),
    "mixtral-8x7b": Model(4096, 32_000, 32, 32, 14336, 8, num_experts=8, experts_per_token=2),
    "smollm2-360m": Model(960, 49_152, 32, 15, 2560, 5, is_tied=True),
    "phi-1.5": Model(2048, 51_200, 24, 32, 8192, is_gated=False),
    "phi-3-medium": Model(5120, 32_064, 40, 40, 17920, 10),
    "phi-3.5": Model(3072, 32_064, 32, 32, 8192),
    "gpt-2": Model(768, 50_257, 12, 12, 3072, is_gated=False, is_tied=True),
    "gpt-neo-1.3b": Model(2048, 50_257, 24, 16, 8192, is_gated=False, is_tied=True),
    "gpt-neo-2.7b": Model(2560, 50_257, 32, 20, 10240, is_gated=False, is_tied=True),
}


def named(table: dict[str, T], value: T | str, kind: str) -> T:
    """Look up a name; return any other value as it is. Raises ValueError for an unknown name."""
    if not isinstance(value, str):
        return value
    if value not in table:
        more = ", or pass a config.json by --config" if kind == "model" else ""
        raise ValueError(f"unknown {kind} {value}; choose from {', '.join(table)}{more}")
    return table[value]


# Sizes in a config.json, by the names that most model types have for them.
CONFIG_SIZES = """hidden_size vocab_size num_hidden_layers decoder_layers num_attention_heads num_key_value_heads head_dim
intermediate_size num_experts num_local_experts n_routed_experts num_experts_per_tok"""


def read_config(path: Path) -> Counted:
    """Read a model from a Hugging Face config.json, or from its folder.

    transformers builds it on the meta device, without memory or network.

    Raises:
        OSError: The file cannot be read.
        ValueError: A size is wrong, or transformers cannot build the model.
        ModuleNotFoundError: transformers is not installed.
    """
    try:
        import transformers
    except ModuleNotFoundError:
        hint = "plan --config needs transformers: pip install transformers"
        raise ModuleNotFoundError(hint, name="transformers") from None
    _check_file(path / "config.json" if path.is_dir() else path, transformers.CONFIG_MAPPING)
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        is_text = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        if not is_text and type(config) not in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
            raise ValueError(f"{config.model_type} is not a causal language model")
        auto = transformers.AutoModelForCausalLM if is_text else transformers.AutoModelForImageTextToText
        with torch.device("meta"):
            model = auto.from_config(config, trust_remote_code=False)
        model.tie_weights()
        head = model.get_output_embeddings().weight
        embedding = model.get_input_embeddings().weight
        empty = [name for name, parameter in model.named_parameters() if not parameter.numel()]
        if empty:
            raise ValueError(f"{empty[0]} has no elements")
        return _count(model, config.get_text_config(decoder=True), head, head is embedding)
    except Exception as error:  # whatever transformers raises
        raise ValueError(f"transformers cannot build the model: {type(error).__name__}: {error}") from error


def _check_file(path: Path, kinds: Mapping[str, Any]) -> None:
    """Raise ValueError unless sizes are possible: transformers builds some models of impossible ones.

    A class of configurations (``kinds``) may have other names for sizes, and its own defaults are right.
    """
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not a JSON file: {error}: pass the config.json of a model, or its folder") from error
    if not isinstance(given, dict):
        raise ValueError("is not a JSON object")
    text = given.get("text_config")
    for part in (given, text) if isinstance(text, dict) else (given,):
        kind = str(part.get("model_type", given.get("model_type")))
        config = kinds[kind] if kind in kinds else None  # noqa: SIM401 - its get() finds no class
        names = {size: getattr(config, "attribute_map", {}).get(size, size) for size in CONFIG_SIZES.split()}
        for name in names.values():
            value = part.get(name)
            for size in value if isinstance(value, list) else [value]:
                if size is not None and size != getattr(config, name, None):
                    check_size(name, size)
        heads, kv_heads = (part.get(names[size]) for size in ("num_attention_heads", "num_key_value_heads"))
        if isinstance(heads, int) and isinstance(kv_heads, int):
            _check_shared(heads, kv_heads)


def _count(model: Any, config: Any, head: Tensor, is_tied: bool) -> Counted:
    """Count a model's parameters. ``config`` describes its text decoder, ``head`` is its head's weight."""
    config.allow_global_per_layer_attribute_access = True
    width = _setting(config, "hidden_size") or head.shape[1]
    num_layers, layers = _layers(model, _setting(config, "num_hidden_layers"))
    matrices = [parameter.shape for parameter in layers if parameter.dim() > 1]
    chosen = _setting(config, "num_experts_per_tok", "moe_topk", "top_k_experts")
    active = 0
    for shape in matrices:
        # A tensor of experts has them in its first dimension.
        share = min(1.0, chosen / shape[0]) if chosen and len(shape) == 3 else 1.0
        active += int(share * shape.numel())
    num_heads = _setting(config, "num_attention_heads")
    head_size = _setting(config, "qk_head_dim", "head_dim") or width // max(1, num_heads)
    return Counted(
        hidden_size=head.shape[1],
        vocab_size=head.shape[0],
        num_layers=num_layers,
        num_heads=num_heads,
        ffn_size=0,
        is_tied=is_tied,
        params=sum(parameter.numel() for parameter in model.parameters()),
        layer_params=sum(parameter.numel() for parameter in layers) // num_layers,
        active_params=active // num_layers,
        width=width,
        query_size=num_heads * head_size,
    )


def _setting(config: Any, *names: str) -> int:
    return next((found for name in names if (found := getattr(config, name, None))), 0)


def _layers(model: nn.Module, expected: int) -> tuple[int, list[Tensor]]:
    """Return the number of layers, and all their parameters.

    The layers are the ``nn.ModuleList`` with ``expected`` members, or else with most parameters. Equally long lists of one
    parent (attentions in one, feed-forward networks in another) count as one.
    """
    stacks = []
    for module in model.modules():
        lists = [child for child in module.children() if isinstance(child, nn.ModuleList)]
        for length in {len(each) for each in lists} - {0}:
            stacks.append((length, [x for each in lists if len(each) == length for x in each.parameters()]))
    if not stacks:
        raise ValueError(f"{type(model).__name__} has no list of layers")
    return max(stacks, key=lambda stack: (stack[0] == expected, sum(x.numel() for x in stack[1])))
