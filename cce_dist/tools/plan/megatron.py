"""The arguments of Megatron in a shell script, read by the rules of argparse: the last value wins."""

from __future__ import annotations

import argparse
import re
from typing import Any, NoReturn

from cce_dist.kernels.waves import cdiv

# Options with a number: the plan's name for it, and Megatron's default.
_NUMBERS = {
    "num-layers": ("num_layers", None),
    "hidden-size": ("hidden_size", None),
    "num-attention-heads": ("num_heads", None),
    "vocab-size": ("unpadded_vocab_size", None),
    "padded-vocab-size": ("vocab_size", None),
    "make-vocab-size-divisible-by": ("divisible_by", 128),
    "ffn-hidden-size": ("dense_ffn_size", None),
    "moe-ffn-hidden-size": ("ffn_size", None),
    "kv-channels": ("head_size", 0),
    "num-query-groups": ("num_kv_heads", 1),
    "num-experts": ("num_experts", 0),
    "moe-router-topk": ("experts_per_token", 2),
    "tensor-model-parallel-size": ("tp", 1),
    "pipeline-model-parallel-size": ("pp", 1),
    "context-parallel-size": ("cp", 1),
    "expert-model-parallel-size": ("ep", 1),
    "expert-tensor-parallel-size": ("expert_tp", None),
    "num-virtual-stages-per-pipeline-rank": ("vpp", 1),
    "num-layers-per-virtual-pipeline-stage": ("layers_per_chunk", None),
    "micro-batch-size": ("micro_batch", 1),
    "seq-length": ("tokens", None),
}
# Options whose effect on the model or its memory the plan does not know, and the value with which they have none.
_UNKNOWN = {"moe-layer-freq": "1", "mtp-num-layers": "0", "recompute-method": "uniform", "recompute-num-layers": "1"}
_UNKNOWN |= dict.fromkeys(("multi-latent-attention", "moe-shared-expert-intermediate-size"))
_UNKNOWN |= dict.fromkeys(("hybrid-override-pattern", "hybrid-layer-pattern", "is-hybrid-model", "moe-latent-size"))
_UNKNOWN |= dict.fromkeys(
    ("heterogeneous-layers-config-path", "experimental-attention-variant", "attention-output-gate")
)
_UNKNOWN |= dict.fromkeys(("pipeline-model-parallel-layout", "yaml-cfg", "use-checkpoint-args"))
_UNKNOWN |= {"recompute-modules": "core_attn", "optimizer": "adam", "cpu-offloading-num-layers": "0"}
_UNKNOWN |= dict.fromkeys(("fp8-format", "fp4-format", "use-precision-aware-optimizer", "optimizer-cpu-offload"))
_UNKNOWN |= dict.fromkeys(("cpu-offloading", "fine-grained-activation-offloading", "data-parallel-sharding-strategy"))
_UNKNOWN |= dict.fromkeys(("use-megatron-fsdp", "use-custom-fsdp", "use-torch-fsdp2"))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def read(text: str, given: dict[str, int]) -> dict[str, Any]:
    """Return the sizes of a script's model and the options of its plan, by name.

    ``given`` has sizes, and tp, that take precedence over the script's. The vocabulary's padding depends on tp.

    Raises:
        ValueError: A size is missing or not a number, or an option has an effect that the plan does not know.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    for option, (name, default) in _NUMBERS.items():
        parser.add_argument(f"--{option}", dest=name, type=int, default=default)
    for option in _UNKNOWN:
        parser.add_argument(f"--{option}", nargs="?", const="")
    for option in ("--swiglu", "--quick-geglu"):
        parser.add_argument(option, dest="is_gated", action="store_true")
    parser.add_argument("--untie-embeddings-and-output-weights", dest="is_tied", action="store_false")
    parser.add_argument("--group-query-attention", action="store_true")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--use-distributed-optimizer", dest="zero_stage", action="store_const", const=1, default=0)
    parser.add_argument("--recompute-granularity", dest="recompute", choices=("full", "selective"))
    words = _words(text)
    for option, (name, _) in _NUMBERS.items():
        words += [f"--{option}", str(given[name])] if name in given else []
    args, _ = parser.parse_known_args(words)

    for option, harmless in _UNKNOWN.items():
        value = getattr(args, option.replace("-", "_"))
        if value not in (None, harmless):
            raise ValueError(f"the plan does not know the effect of --{option} {value}")
    if args.num_experts and args.expert_tp not in (None, args.tp):
        raise ValueError(
            f"the plan does not know the effect of --expert-tensor-parallel-size {args.expert_tp} beside "
            f"--tensor-model-parallel-size {args.tp}"
        )
    if args.vocab_size is None and args.unpadded_vocab_size is not None:
        multiple = args.divisible_by * args.tp
        args.vocab_size = cdiv(args.unpadded_vocab_size, multiple) * multiple
    for name in ("num_layers", "hidden_size", "num_heads", "vocab_size"):
        if getattr(args, name) is None:
            raise ValueError(f"has no {name}")
    if not args.num_experts:
        args.experts_per_token = 0
        args.ffn_size = given.get("ffn_size")
    if args.ffn_size is None:
        wide = 4 * args.hidden_size
        args.ffn_size = args.dense_ffn_size or (int(wide * 2 / 3) // 64 * 64 if args.is_gated else wide)
    if not args.group_query_attention:
        args.num_kv_heads = given.get("num_kv_heads", 0)
    if args.layers_per_chunk is not None:
        args.vpp = args.num_layers // args.pp // args.layers_per_chunk
    args.recompute = "full" if args.recompute == "full" else "none"
    return vars(args)


# NAME=value or NAME+=value, as an array, in quotes or as one word; and $NAME, ${NAME}, ${NAME[@]}, ${NAME:-default}.
_ARRAY, _QUOTED, _WORD = r"\(((?:[^()]|\([^()]*\))*)\)", r"""(["'])(.*?)\4""", r"([^\s;]*)"
_DEFINITION = re.compile(
    rf"^[ \t]*(?:export[ \t]+)?(\w+)(\+?)=(?:{_ARRAY}|{_QUOTED}|{_WORD})[ \t]*;?[ \t]*$", re.MULTILINE | re.DOTALL
)
_USE = re.compile(r"\$(?:\{(\w+)(?:\[[@*]\]|:?-([^}]*))?\}|(\w+))")
_BEGINS = re.compile(r"^[ \t]*(?:if|case|for|while|until)\b", re.MULTILINE)
_ENDS = re.compile(r"^[ \t]*(?:fi|esac|done)\b", re.MULTILINE)


def _words(text: str) -> list[str]:
    """Return the words of a script's commands in the order in which its shell passes them.

    Variables and arrays are replaced where they are used. The value of one that is used nowhere stays where it is set.

    Raises:
        ValueError: A branch or a loop sets options: which of them the shell would pass is not known.
    """
    text = re.sub(r"\\\n", " ", re.sub(r"(^|\s)#.*", "", text))
    # A command a line: behind "then", ";", or the pattern of a case. What follows "&&" or "||" is a branch, too.
    text = re.sub(r"(?:^|;)[ \t]*(then|else|do)[ \t]+", r"\n\1\n", text, flags=re.MULTILINE)
    text = re.sub(r"(?:&&|\|\|)[ \t]*(\w+\+?=.*)", r"\nif\n\1\nfi\n", text)
    text = re.sub(r"^([ \t]*[\w.*|\"'-]+\))[ \t]*(?=\w+\+?=)", r"\1\n", text, flags=re.MULTILINE)
    text = re.sub(r";+[ \t]*(?=fi\b|esac\b|done\b|\w+\+?=)|;;", r"\n", text)
    variables: dict[str, str] = {}

    def expanded(part: str) -> str:
        return _USE.sub(lambda use: variables.get(use[1] or use[3], use[0] if use[2] is None else use[2]), part)

    commands, end = [], 0
    for found in _DEFINITION.finditer(text):
        commands.append(expanded(text[end : found.start()]))
        end = found.end()
        name, adds = found.group(1, 2)
        value = expanded(next(value for value in found.group(3, 5, 6) if value is not None))
        if len(_BEGINS.findall(text, 0, found.start())) > len(_ENDS.findall(text, 0, found.start())):
            if "--" in value:
                raise ValueError(
                    f"sets {name} in a branch or a loop, which the plan does not run: write its options out"
                )
            value, adds = f"{name}-as-a-branch-sets-it", ""
        if re.search(rf"\$\{{?{name}\b", text):
            variables[name] = f"{variables.get(name, '')} {value}" if adds else value
        else:
            commands.append(value)
    commands.append(expanded(text[end:]))
    return [word for word in re.sub(r"[\"'()\\]", " ", " ".join(commands)).split() if word != "--"]
