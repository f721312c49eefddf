"""Sizes of models: a table by name, and readers of a Hugging Face config.json and of Megatron's arguments."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes of a decoder-only transformer, from which formulas compute its parameters.

    Attributes:
        hidden_size, vocab_size, num_layers, num_heads: As named.
        ffn_size: Inner width of the feed-forward network, or of one expert.
        num_kv_heads: Number of key and value heads; 0 means ``num_heads``.
        head_size: Width of an attention head; 0 means ``hidden_size / num_heads``.
        is_gated: The feed-forward network has a gate, as SwiGLU does.
        is_tied: Embedding and head share one weight.
        num_experts, experts_per_token: Of a mixture of experts; 0 means none.
    """

    hidden_size: int
    vocab_size: int
    num_layers: int
    num_heads: int
    ffn_size: int
    num_kv_heads: int = 0
    head_size: int = 0
    is_gated: bool = True
    is_tied: bool = False
    num_experts: int = 0
    experts_per_token: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self)[:5]:
            value = getattr(self, field.name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"--{field.name.replace('_', '-')} must be a whole number of at least 1, got {value!r}"
                )
        for name in ("num_kv_heads", "head_size", "num_experts", "experts_per_token"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name.replace('_', '-')} must not be negative, got {getattr(self, name)}")
        if not self.head_size and self.hidden_size % self.num_heads:
            raise ValueError(f"--hidden-size {self.hidden_size} is not --num-heads {self.num_heads} equal heads")
        if self.num_heads % (self.num_kv_heads or self.num_heads):
            raise ValueError(f"{self.num_heads} heads cannot share {self.num_kv_heads} heads of keys and values")

    @property
    def size_of_head(self) -> int:
        return self.head_size or self.hidden_size // self.num_heads

    @property
    def query_size(self) -> int:
        """Width of all queries together."""
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
        """Elements that a layer's products keep of a token for backward, hidden states not counted.

        Every product reads or writes hidden states; what it keeps is its other side.
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
        """Parameters before the first layer: all that are neither in a layer, nor in the last norm, nor in an untied head."""
        after = self.hidden_size + (0 if self.is_tied else self.head_params)
        return self.params - self.num_layers * self.layer_params - after


@dataclasses.dataclass(frozen=True)
class Counted(Model):
    """A model that transformers has built: its parameters are counted, not computed.

    ``hidden_size`` and ``vocab_size`` are those of the head's weight. Numbers of a layer are means over all layers.
    ``num_heads`` is 0 for a model without attention, and ``ffn_size`` is always 0.
    """

    params: int = 0
    layer_params: int = 0
    active_params: int = 0
    width: int = 0
    query_size: int = 0

    def __post_init__(self) -> None:
        """Check nothing: transformers has built the model."""


# Sizes as published in each model's config.json; the vocabulary is the number of rows of the weight.
MODELS = {
    "llama-3.2-1b": Model(2048, 128_256, 16, 32, 8192, 8, is_tied=True),
    "llama-3-8b": Model(4096, 128_256, 32, 32, 14336, 8),
    "llama-3-70b": Model(8192, 128_256, 80, 64, 28672, 8),
    "llama-2-7b": Model(4096, 32_000, 32, 32, 11008),
    "llama-2-13b": Model(5120, 32_000, 40, 40, 13824),
    "gemma-2b": Model(2048, 256_000, 18, 8, 16384, 1, 256, is_tied=True),
    "gemma-2-2b": Model(2304, 256_000, 26, 8, 9216, 4, 256, is_tied=True),
    "gemma-2-9b": Model(3584, 256_000, 42, 16, 14336, 8, 256, is_tied=True),
    "gemma-2-27b": Model(4608, 256_000, 46, 32, 36864, 16, 128, is_tied=True),
    "gemma-3-270m": Model(640, 262_144, 18, 4, 2048, 1, 256, is_tied=True),
    "gemma-3-1b": Model(1152, 262_144, 26, 4, 6912, 1, 256, is_tied=True),
    "qwen-3-0.6b": Model(1024, 151_936, 28, 16, 3072, 8, 128, is_tied=True),
    "qwen-3-4b": Model(2560, 151_936, 36, 32, 9728, 8, 128, is_tied=True),
    "qwen-2.5-7b": Model(3584, 152_064, 28, 28, 18944, 4),
    "qwen-2.5-32b": Model(5120, 152_064, 64, 40, 27648, 8),
    "qwen-1.5-7b": Model(4096, 151_936, 32, 32, 11008),
    "mistral-7b": Model(4096, 32_000, 32, 32, 14336, 8),
    "mistral-nemo": Model(5120, 131_072, 40, 32, 14336, 8, 128),
    "mixtral-8x7b": Model(4096, 32_000, 32, 32, 14336, 8, num_experts=8, experts_per_token=2),
    "smollm2-360m": Model(960, 49_152, 32, 15, 2560, 5, is_tied=True),
    "phi-1.5": Model(2048, 51_200, 24, 32, 8192, is_gated=False),
    "phi-3.5": Model(3072, 32_064, 32, 32, 8192),
    "phi-3-medium": Model(5120, 32_064, 40, 40, 17920, 10),
    "gpt-2": Model(768, 50_257, 12, 12, 3072, is_gated=False, is_tied=True),
    "gpt-neo-1.3b": Model(2048, 50_257, 24, 16, 8192, is_gated=False, is_tied=True),
    "gpt-neo-2.7b": Model(2560, 50_257, 32, 20, 10240, is_gated=False, is_tied=True),
}

# Megatron's names of sizes and options, with underscores.
_SIZES = {
    "hidden_size": ("hidden_size",),
    "vocab_size": ("padded_vocab_size", "vocab_size"),
    "num_layers": ("num_layers",),
    "num_heads": ("num_attention_heads",),
    "ffn_size": ("ffn_hidden_size",),
    "num_kv_heads": ("num_query_groups",),
    "head_size": ("kv_channels",),
    "num_experts": ("num_experts",),
    "experts_per_token": ("moe_router_topk",),
}
_OPTIONS = {
    "tp": ("tensor_model_parallel_size",),
    "pp": ("pipeline_model_parallel_size",),
    "cp": ("context_parallel_size",),
    "micro_batch": ("micro_batch_size",),
    "tokens": ("seq_length",),
}


class NeedsTransformers(ModuleNotFoundError):
    """A config.json is to be read, and transformers is not installed."""


class Config(NamedTuple):
    """What a file says: the model, and such options of the plan as it has, by name."""

    model: Model
    options: dict[str, int]


def read_config(path: Path) -> Config:
    """Read a model's sizes from a Hugging Face config.json (or its folder), or from Megatron's arguments (a script or YAML).

    Raises:
        ValueError: The file cannot be read, transformers cannot build its model, or a size is not in it.
        NeedsTransformers: The file is a config.json, and transformers is not installed.
    """
    try:
        if path.is_dir() or path.suffix == ".json":
            return Config(_build(path), {})
        return _read_megatron(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path}: {getattr(error, 'strerror', None) or error}") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"--config {path}: {error}") from error


def _build(path: Path) -> Counted:
    """Have transformers build the model of a config.json on the meta device, without memory or network, and count it."""
    try:
        import transformers
    except ModuleNotFoundError:
        raise NeedsTransformers("plan --config needs transformers: pip install transformers") from None
    path.stat()
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        is_text = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        if not is_text and type(config) not in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
            raise ValueError(f"{config.model_type} is not a causal language model")
        auto = transformers.AutoModelForCausalLM if is_text else transformers.AutoModelForImageTextToText
        with torch.device("meta"):
            model = auto.from_config(config, trust_remote_code=False)
        model.tie_weights()
        head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    except Exception as error:  # whatever transformers raises
        raise ValueError(f"transformers cannot build the model: {type(error).__name__}: {error}") from error
    return _count(model, config.get_text_config(decoder=True), head, head is embedding)


def _count(model: Any, config: Any, head: Tensor, is_tied: bool) -> Counted:
    """Count the parameters of a model of transformers. ``config`` describes its text decoder, ``head`` is the head's weight."""
    config.allow_global_per_layer_attribute_access = True
    width = _said(config, "hidden_size") or head.shape[1]
    num_layers, layers = _layers(model, _said(config, "num_hidden_layers"))
    matrices = [parameter.shape for parameter in layers if parameter.dim() > 1]
    chosen = _said(config, "num_experts_per_tok", "moe_topk", "top_k_experts")
    active = 0
    for shape in matrices:
        # A tensor of experts has them in its first dimension.
        share = min(1.0, chosen / shape[0]) if chosen and len(shape) == 3 else 1.0
        active += int(share * shape.numel())
    num_heads = _said(config, "num_attention_heads")
    head_size = _said(config, "qk_head_dim", "head_dim") or width // max(1, num_heads)
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


def _said(config: Any, *names: str) -> int:
    """Return the first of these settings that the config has, else 0."""
    return next((found for name in names if (found := getattr(config, name, None))), 0)


def _layers(model: nn.Module, expected: int) -> tuple[int, list[Tensor]]:
    """Return the number of layers, and all their parameters.

    The layers are the list of modules that has ``expected`` members. Of several, or if none has, the one with most parameters.
    Equally long lists of one parent (one of attentions, one of feed-forward networks) count as one.
    """
    stacks = [(0, [])]
    for module in model.modules():
        lists = [child for child in module.children() if isinstance(child, nn.ModuleList)]
        for length in {len(each) for each in lists}:
            stacks.append((length, [x for each in lists if len(each) == length for x in each.parameters()]))
    num_layers, parameters = max(stacks, key=lambda stack: (stack[0] == expected, sum(x.numel() for x in stack[1])))
    if not parameters:
        raise ValueError(f"{type(model).__name__} has no list of layers")
    return num_layers, parameters


def _model(values: dict[str, Any], is_gated: bool, is_tied: bool, ffn_size: int | None) -> Model:
    """Return the model of a file; ``ffn_size`` stands for an inner width that the file does not have."""
    sizes = {size: _first(values, names) for size, names in _SIZES.items()}
    sizes["ffn_size"] = sizes["ffn_size"] or ffn_size
    needed = [field.name for field in dataclasses.fields(Model) if field.default is dataclasses.MISSING]
    for size in needed:
        if sizes[size] is None:
            raise ValueError(f"has no {' or '.join(_SIZES[size])}")
    return Model(**{size: value or 0 for size, value in sizes.items()}, is_gated=is_gated, is_tied=is_tied)


def _first(values: dict[str, Any], names: tuple[str, ...]) -> int | None:
    return next((_whole(name, values[name]) for name in names if values.get(name) is not None), None)


def _whole(name: str, value: Any) -> int:
    """Return a number that a file has, or that its text says; a switch and a fraction are none."""
    text = str(value).strip()
    if isinstance(value, bool) or not re.fullmatch(r"[+-]?\d+", text):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    return int(text)


def _read_megatron(text: str) -> Config:
    """Read ``--name value``, ``--name=value`` or ``name: value``; a flag without a value is true."""
    text = re.sub(r"(^|\s)#.*", "", text)
    # A key is marked by its dashes, so that a flag's value is not taken for one.
    text = re.sub(r"^\s*(?:--)?([a-z][\w-]*):(?=\s|$)", r" --\1 ", text, flags=re.MULTILINE)
    words = re.sub(r"(--[\w-]+)=", r"\1 ", text).replace("\\\n", " ").split()
    values: dict[str, Any] = {}
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        word = word.strip("\"'()")
        if word.startswith("--"):
            values.setdefault(word[2:].replace("-", "_"), "true" if after.startswith("--") else after.strip("\"'()"))

    def is_on(name: str) -> bool:
        return str(values.get(name, "false")).lower() not in ("false", "0", "no")

    is_gated = is_on("swiglu") or is_on("gated_linear_unit")
    ffn_size = 4 * (_first(values, _SIZES["hidden_size"]) or 0)
    if is_gated:
        ffn_size = int(ffn_size * 2 / 3) // 64 * 64
    is_tied = not is_on("untie_embeddings_and_output_weights")
    options = {option: _first(values, names) for option, names in _OPTIONS.items()}
    found = {option: value for option, value in options.items() if value is not None}
    return Config(_model(values, is_gated, is_tied, ffn_size), found)
