"""Tiny models and data of Hugging Face, and a run of the real Trainer that returns all that it logged and saved."""

import contextlib
import gc
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist import GradFilter, groups, linear_cross_entropy
from cce_dist.tools.verify.check import assert_no_worse

VOCAB, LENGTH, STEPS = 67, 12, 4


OF: dict[str, dict[str, Any]] = {  # what a model has besides
    "Gemma2": {"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 4},  # and a tied head
    "Cohere": {"logit_scale": 0.25},
    "Phi": {},  # a head with a bias
    "Qwen2Moe": {
        "experts_implementation": "eager",  # its grouped product has no float64
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "output_router_logits": True,
    },
}


def tiny_model(name: str = "Llama", **more: Any) -> Any:
    """Return a model whose softmax is not flat: else all tokens look alike, and a softcap does nothing."""
    import transformers

    sizes: dict[str, Any] = dict(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
        initializer_range=0.3,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes | OF.get(name, {}) | more)
    return getattr(transformers, f"{name}ForCausalLM")(config).train()


def batch(seed: int = 1) -> dict[str, Tensor]:
    """Return ids and labels of three sentences, of which some are ignored."""
    ids = torch.randint(2, VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:, :4] = labels[1, 9:] = -100
    return {"input_ids": ids, "labels": labels}


def zero(stage: int, **sections: Any) -> dict[str, Any]:
    """Return a ds_config of Trainer, without a compiler."""
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **sections,
    }


@contextlib.contextmanager
def compared() -> Iterator[list[bool]]:
    """Collect whether upstream gradients differed from those that were expected, comparison by comparison."""
    differed, common_factor = [], groups._common_factor

    def compare(*given: Any) -> tuple[Tensor, Tensor]:
        factor, differs = common_factor(*given)
        differed.append(bool(differs))
        return factor, differs

    with mock.patch.object(groups, "_common_factor", compare):
        yield differed


def counted(module: Any, name: str = "linear_cross_entropy") -> Any:
    """Count the calls of a function that a module has by this name, so that no test passes on another's loss."""
    return mock.patch.object(module, name, wraps=getattr(module, name))


def sentences(count: int = 32) -> list[dict[str, Tensor]]:
    """Return random ids; of each sentence other labels are ignored."""
    rows = []
    for index in range(count):
        ids = torch.randint(1, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(index))
        rows.append({"input_ids": ids, "labels": ids.masked_fill(torch.arange(LENGTH) < index % 5, -100)})
    return rows


def name_rank() -> None:
    """Set the environment variables by which a launcher tells a process its rank."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def said_by_all(function: Callable, *args: Any) -> list[str]:
    """Call a function on every rank, and return the lines of all ranks in which it names the library on stderr."""
    said, everywhere = io.StringIO(), [""] * dist.get_world_size()
    with contextlib.redirect_stderr(said):
        function(*args)
    dist.all_gather_object(everywhere, said.getvalue())
    return [line for text in everywhere for line in text.splitlines() if "cce_dist" in line]


def prepare_rank() -> None:
    """Make this process one that accelerate and DeepSpeed take for a launcher's."""
    name_rank()
    from accelerate.state import DistributedType, PartialState

    # accelerate runs FSDP2 and DeepSpeed on GPUs alone. These ranks say that they have some; their device is a CPU.
    gpus: Any = DistributedType.MULTI_GPU
    prepare_backend = PartialState._prepare_backend
    state: Any = PartialState
    state._prepare_backend = lambda self, cpu=False, *args: prepare_backend(self, cpu, *args) if cpu else ("gloo", gpus)
    with contextlib.suppress(ImportError):
        begin_deepspeed()


@contextlib.contextmanager
def watched(layer: Any) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Collect what each call of the layer before a head returns, and the gradient that comes back."""
    hidden, d_hidden = [], []

    def look(_: Any, inputs: Any, output: Tensor) -> None:
        hidden.append(output.detach().clone())
        output.register_hook(lambda gradient: d_hidden.append(gradient.clone()))

    hook = layer.register_forward_hook(look)
    try:
        yield hidden, d_hidden
    finally:
        hook.remove()


def assert_filtered(
    hidden: tuple[list[Tensor], list[Tensor]],
    weight: tuple[Tensor, Tensor],
    tokens: list[tuple[Tensor, Tensor]],
    grad_filter: GradFilter,
    replicas: dist.ProcessGroup | None,
    **how: Any,
) -> None:
    """Raise unless a filter's gradients are those of the plain loss, microbatch by microbatch.

    Args:
        hidden: This rank's hidden states of each microbatch, and their gradients.
        weight: This rank's rows of the head, and their gradient: the mean over ``replicas``.
        tokens: Labels and upstream gradients of each microbatch.
        **how: Passed to ``linear_cross_entropy``.
    """
    found = []
    for each in (grad_filter, None):
        d_hidden, d_weight = [], torch.zeros_like(weight[0])
        for x, (labels, upstream) in zip(hidden[0], tokens, strict=True):
            leaves = [tensor.clone().requires_grad_() for tensor in (x, weight[0])]
            losses = linear_cross_entropy(leaves[0], leaves[1], labels, reduction="none", grad_filter=each, **how)
            gradients = torch.autograd.grad(losses, leaves, upstream)
            d_hidden.append(gradients[0])
            d_weight += gradients[1]
        if replicas is not None:
            dist.all_reduce(d_weight, group=replicas)
            d_weight /= replicas.size()
        found.append((torch.stack(d_hidden), d_weight))
    for ours, filtered, exact in zip((torch.stack(hidden[1]), weight[1]), *found, strict=True):
        dropped = (filtered - exact).norm()
        assert (ours - filtered).norm() < 1e-3 * dropped and dropped > 1e-3 * exact.norm()


def begin_deepspeed() -> None:
    """Have DeepSpeed take the default group, without the collective of its own that it compiles on a CPU."""
    name_rank()
    import deepspeed

    gc.freeze()  # it collects garbage around each engine: what is imported is then not looked through
    comm: Any = sys.modules["deepspeed.comm.torch"]
    comm.build_shm_op = lambda: None
    deepspeed.init_distributed(dist.get_backend())
    # Its CPUs have fp16 if they are fast at it; tests are not about speed.
    accelerator: Any = deepspeed.accelerator.get_accelerator()
    accelerator.is_fp16_supported = lambda: True


def forget() -> None:
    """Have accelerate, transformers and DeepSpeed forget the run before: they hold its state in globals."""
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()
    unset_hf_deepspeed_config()
    for name in [*os.environ]:
        if name.startswith(("FSDP_", "ACCELERATE_")) and name != "ACCELERATE_USE_CPU":
            del os.environ[name]
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"  # read where the ranks say that they have GPUs
    if "deepspeed" in sys.modules:
        from deepspeed.utils import groups

        groups._release_process_group_references()


def arguments(folder: Path, kind: Any = None, **more: Any) -> Any:
    """Return ``TrainingArguments``, or those of another trainer, of a run of a few steps."""
    import transformers

    given: dict[str, Any] = dict(
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        logging_steps=1,
        optim="sgd",
        learning_rate=0.3,
        max_grad_norm=0.5,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    if dist.is_initialized():
        given |= {"ddp_backend": "gloo", "use_cpu": not more.keys() & {"fsdp", "deepspeed"}}
    return (kind or transformers.TrainingArguments)(str(folder), **given | more)


def logged(trainer: Any) -> list[dict[str, float]]:
    """Return what a trainer logged, but for times."""
    times = ("second", "runtime", "flos", "step_time")
    return [
        {key: value for key, value in entry.items() if not any(word in key for word in times)}
        for entry in trainer.state.log_history
    ]


def assert_same(ours: Any, stock: Any, tolerance: float) -> None:
    """Compare what two runs logged, or their parameters by name."""
    assert len(ours) > 0
    torch.testing.assert_close(ours, stock, rtol=tolerance, atol=tolerance)


def assert_gradients_no_worse(ours: Any, stock: Any, truth: Any, dtype: torch.dtype | None = None) -> list[str]:
    """Return which parameters of a model have gradients: those that train."""
    names = []
    for (name, mine), theirs, true in zip(ours.named_parameters(), stock.parameters(), truth.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None) == (not mine.requires_grad), name
        if mine.grad is not None:
            names.append(name)
            assert_no_worse(mine.grad, theirs.grad, true.grad, dtype, name)
    return names
