"""One training step of a small model of any class of transformers, and the same step of a converted copy.

The model is built from its class's own default configuration, made small. The loss and the gradient of every parameter are
compared. A child process may run it, so that a model that hangs or dies is a result, too.
"""

import contextlib
import inspect
import logging
import multiprocessing
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

VOCAB, BATCH, LENGTH = 128, 2, 16
TOLERANCE = 1e-4  # of a gradient's norm; the order of sums alone gives 1e-6, and deep small models multiply it

# What a configuration calls its sizes, and what they become.
SIZES: dict[int, str] = {
    VOCAB: "vocab_size",
    64: "max_position_embeddings n_positions max_sequence_length seq_length n_ctx context_length max_seq_len",
    32: "hidden_size n_embd d_model dim embedding_size word_embed_proj_dim d_embed embedding_dim emb_dim",
    48: "intermediate_size ffn_dim d_ff n_inner ffn_hidden_size dim_feedforward encoder_ffn_dim decoder_ffn_dim",
    16: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size q_lora_rank kv_lora_rank "
    "shared_intermediate_size moe_shared_expert_intermediate_size index_head_dim lru_width",
    8: "head_dim d_kv v_head_dim qk_nope_head_dim qk_rope_head_dim mamba_d_head mamba_head_dim sliding_window "
    "linear_key_head_dim linear_value_head_dim attention_chunk_size chunk_size",
    4: "num_attention_heads n_head num_heads encoder_attention_heads decoder_attention_heads num_experts num_local_experts "
    "n_routed_experts moe_num_experts linear_num_value_heads n_group mamba_n_heads mamba_num_heads index_topk",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers num_key_value_heads "
    "num_experts_per_tok linear_num_key_heads topk_group mamba_n_groups index_n_heads",
    1: "pad_token_id bos_token_id eos_token_id decoder_start_token_id n_shared_experts first_k_dense_replace moe_top_k",
}
SMALL = {name: size for size, names in SIZES.items() for name in names.split()}
# What is tried in turn where those do not fit each other: as many heads of keys as of queries (latent attention), one group
# of experts, all of an expert's choices, Mamba's heads, more layers, no sizes for what has one size a layer.
ATTEMPTS: list[dict[str, Any]] = [
    {},
    {"num_key_value_heads": 4},
    {"n_group": 1, "topk_group": 1},
    {"num_key_value_heads": 4, "n_group": 1, "topk_group": 1},
    {"mamba_n_heads": 8, "mamba_num_heads": 8, "num_heads": 8, "mamba_d_head": 8, "head_dim": 8},
    {"num_hidden_layers": 4},
    {"num_hidden_layers": 3},
    {"head_dim": None},
    {"head_dim": None, "v_head_dim": None},
    {"num_experts_per_tok": 1},
    {"rotary_dim": 8},
    {"num_hidden_layers": None, "num_layers": None},
]


class Result(NamedTuple):
    """What became of one architecture: "equal", "differs", "refused", "raises", "not built" or "no answer", and why."""

    name: str
    outcome: str
    line: str = ""
    seconds: float = 0.0


def small_config(kind: type, **fitted: Any) -> Any:
    """Return the small configuration of a class; its nested ones are small, too."""
    default: Any = kind()
    given = {name: size for name, size in SMALL.items() if isinstance(getattr(default, name, None), int)}
    for name, nested in getattr(kind, "sub_configs", {}).items():
        value = getattr(default, name, None)
        if value is not None:
            given[name] = small_config(type(value) if inspect.isclass(nested) else nested, **fitted).to_dict()
    given |= {name: size for name, size in fitted.items() if hasattr(default, name)}
    return kind(**{name: size for name, size in given.items() if size is not None})


def build(name: str, fitted: dict[str, Any]) -> nn.Module:
    """Return the small model of a class of transformers, with weights large enough for a loss that depends on the input."""
    import transformers

    model_class = getattr(transformers, name)
    config = small_config(model_class.config_class, **fitted)
    config.use_cache = False
    if hasattr(config, "is_decoder") and name.endswith("CausalLM"):
        config.is_decoder = True
    torch.manual_seed(0)
    model = model_class._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("final_logits_bias"):
                buffer.normal_()
    return model.train()


def step(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of a batch and the gradients of all parameters that get one."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.2, -100)
    torch.manual_seed(2)  # of dropout
    loss = model(input_ids=ids, labels=labels)["loss"]
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compare(name: str, built: Callable[[], None] = lambda: None) -> Result:
    """Return what became of a class of transformers; ``built`` is called once its own step is done."""
    import cce_dist

    reasons = []
    for fitted in ATTEMPTS:
        try:
            stock = build(name, fitted)
            expected, gradients = step(stock)
            break
        except Exception as error:
            reasons.append(first_line(error))
    else:
        return Result(name, "not built", reasons[0])
    built()
    ours = build(name, fitted)
    try:
        cce_dist.convert(ours)
    except ValueError as error:
        return Result(name, "refused", first_line(error))
    try:
        loss, ours_gradients = step(ours)
        cce_dist.require(ours)
    except Exception as error:
        return Result(name, "raises", first_line(error))
    return Result(name, *difference(expected, gradients, loss, ours_gradients))


def difference(expected: torch.Tensor, gradients: dict, loss: torch.Tensor, ours: dict) -> tuple[str, str]:
    """Return "equal" or "differs", and the largest error that makes it so."""
    if not expected.isfinite():
        return "not built", f"its own loss is {expected.item()}"
    if gradients.keys() != ours.keys():
        return "differs", f"gradients of {sorted(gradients.keys() ^ ours.keys())}"
    whole = torch.stack([g.norm() for g in gradients.values()]).norm()
    errors = {"loss": (loss - expected).abs() / expected.abs().clamp(min=1)}
    for name, gradient in gradients.items():
        errors[name] = (ours[name] - gradient).norm() / torch.maximum(gradient.norm(), TOLERANCE * whole)
    worst = max(errors, key=lambda name: errors[name].nan_to_num(torch.inf))
    return ("equal" if errors[worst] <= TOLERANCE else "differs"), f"{worst}: {errors[worst]:.1e}"


def first_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:60]}"


def run(name: str, limit_seconds: float) -> Result:
    """Compare in a child process."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    messages = (
        Result(name, "no answer", "its own step was done"),
        Result(name, "not built", "no answer to its own step"),
    )
    child = multiprocessing.get_context("fork").Process(
        target=lambda: sender.send(compare(name, lambda: sender.send(messages[0])))
    )
    start = time.monotonic()
    child.start()
    sender.close()
    result = messages[1]
    with contextlib.suppress(EOFError):
        for _ in messages:
            if result.outcome in ("not built", "no answer") and receiver.poll(start + limit_seconds - time.monotonic()):
                result = receiver.recv()
    child.kill()
    child.join()
    return result._replace(seconds=time.monotonic() - start)


def names_of(mapping: str) -> list[str]:
    """Return the classes of a mapping, such as "causal_lm" or "image_text_to_text", each once."""
    from transformers.models.auto import modeling_auto

    values = getattr(modeling_auto, f"MODEL_FOR_{mapping.upper()}_MAPPING_NAMES").values()
    return list(dict.fromkeys(name for value in values for name in ([value] if isinstance(value, str) else value)))


def quiet() -> None:
    """Import once, before the children are forked, and silence what models say of themselves."""
    import transformers
    from transformers.models.llama import modeling_llama  # noqa: F401, brings what all models import

    import cce_dist

    assert cce_dist.convert
    torch.set_num_threads(1)
    transformers.logging.set_verbosity(logging.CRITICAL)
    warnings.simplefilter("ignore")
    logging.getLogger("cce_dist").setLevel(logging.ERROR)
