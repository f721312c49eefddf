"""TRL's own trainers and function, stock beside ours: losses, logged metrics, parameters and gradients of tiny models.

Ours is TRL's function with another inside (``integrations.trl``), or, under SFTTrainer alone, a model that was converted.
"""

import contextlib
import copy
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("trl")

from dense_scores import assert_same_loss, dense_scores, operands
from support.ranks import run_ranks
from tiny_trainer import (
    LENGTH,
    VOCAB,
    arguments,
    assert_gradients_no_worse,
    assert_same,
    batch,
    counted,
    forget,
    logged,
    prepare_rank,
    sentences,
    tiny_model,
    zero,
)
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import cce_dist
from cce_dist import linear_cross_entropy, objectives, reference
from cce_dist.integrations import deepspeed as cce_deepspeed
from cce_dist.integrations import trl as cce_trl
from cce_dist.tools.verify.check import assert_no_worse

TOLERANCE = 2e-5


@pytest.fixture(autouse=True)
def _stock_again() -> Iterator[None]:
    yield
    cce_trl.uninstall()


def add(model: Any, **how: Any) -> Any:
    """Return the model, for which TRL's function was called, or ours in its place."""
    from trl.trainer import utils

    utils.add_fused_lm_head(model, **how)
    return model


def dense(model: Any, temperature: float, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return what TRL's function should return, from the model's own logits."""
    out = model(input_ids=input_ids)
    target, logits = labels[:, 1:], out.logits[:, :-1] / temperature
    kept, scores = target != -100, reference.log_probs(logits, target)
    assert scores.sum_p_squared is not None
    found = {
        "log_probs": scores.log_probs,
        "entropy": scores.entropy,
        "log_sum_sq_probs": scores.sum_p_squared.log().masked_fill(~kept, 0),
        "mean_logits": logits.mean(-1).detach().masked_fill(~kept, 0),
        "is_top1": scores.argmax == target,
        "loss": -scores.log_probs.sum() / kept.sum(),
        "label_mask": kept,
    }
    if "aux_loss" in out:
        found["aux_loss"] = out.aux_loss
        found["loss"] = found["loss"] + model.config.router_aux_loss_coef * out.aux_loss
    return found


@pytest.mark.parametrize(
    ("name", "temperature"), [("Llama", 1.0), ("Gemma2", 0.7), ("Cohere", 0.7), ("Phi", 1.0), ("Qwen2Moe", 0.7)]
)
def test_all_outputs_and_gradients_are_trls(name: str, temperature: float) -> None:
    """Catches a temperature before the softcap, an output of the wrong logits, and one whose gradient is lost."""
    how = {"temperature": temperature, "outputs": cce_trl.OUTPUTS}
    stock, inputs = tiny_model(name), batch()
    ours, truth = copy.deepcopy(stock), copy.deepcopy(stock).double()
    add(stock, **how)
    cce_trl.install()
    add(ours, **how)
    with torch.no_grad():  # half of the labels are the likeliest tokens, so that is_top1 is both
        likeliest = stock(input_ids=inputs["input_ids"]).logits[:, :-1].argmax(-1)
    inputs["labels"][:, 5::2] = torch.where(inputs["labels"][:, 5::2] == -100, -100, likeliest[:, 4::2])
    found = [model(**inputs, fused_lm_head=True) for model in (stock, ours)] + [dense(truth, temperature, **inputs)]
    for out in found:
        upstream = torch.linspace(-1, 1, LENGTH - 1, dtype=out["loss"].dtype)
        (out["loss"] + 0.3 * out["entropy"].sum() + (out["log_probs"] * upstream).sum()).backward()
    with torch.no_grad():
        truth_lse = (truth(input_ids=inputs["input_ids"]).logits[:, :-1] / temperature).logsumexp(-1)
    assert type(ours.lm_head) is nn.Linear and found[0].keys() == found[1].keys() == found[2].keys()
    for key in found[0]:
        theirs, mine, true = (out[key] for out in found)
        assert mine.dtype == theirs.dtype and mine.requires_grad == theirs.requires_grad == true.requires_grad
        if mine.dtype == torch.bool:
            assert torch.equal(mine, true) and true.any() and not true.all()
        else:
            # The mean logit is a difference from the log-sum-exp, and has the rounding of its size.
            size = truth_lse if key == "mean_logits" else 0
            assert_no_worse(mine + size, theirs + size, true + size, mine.dtype, key)
    assert len(assert_gradients_no_worse(ours, stock, truth)) == len([*ours.parameters()])


def test_batch_invariance_reaches_the_head() -> None:
    """Catches an option that is dropped. test_log_probs.py compares the bits of a token in several batches."""
    cce_trl.install(backend="triton", batch_invariant=True)
    model = add(tiny_model(), outputs=OUTPUTS)
    with counted(cce_trl, "linear_log_probs") as calls:
        model(**batch(), fused_lm_head=True)
    assert calls.call_args.kwargs["batch_invariant"] and calls.call_count == 1
    with pytest.raises(ValueError, match="mean_logits is not served with batch_invariant"):
        add(model, outputs=("log_probs", "mean_logits"))


DIVERGENCES: dict[str, dict[str, Any]] = {
    "forward": {"beta": 0.0},
    "reverse": {"beta": 1.0, "temperature": 0.7},
    "jsd": {"beta": 0.3, "temperature": 2.0, "num_items_in_batch": torch.tensor(5)},
    "capped": {
        "beta": 0.5, "temperature": 1.3, "student_final_logit_softcapping": 3.0, "teacher_final_logit_softcapping": 5.0,
        "student_logit_scale": 0.7, "teacher_logit_scale": 1.2, "num_items_in_batch": 3,
    },
    "nothing": {"beta": 0.9, "empty": True},
}  # fmt: skip


@pytest.mark.parametrize("how", DIVERGENCES.values(), ids=DIVERGENCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_distillation_is_trls(how: dict[str, Any], dtype: torch.dtype) -> None:
    """Catches beta that is the other head's, a temperature before the softcap, an entropy of other logits, a mean of all."""
    from trl.trainer import distillation_trainer

    how = dict(how)
    mask = torch.arange(10).view(2, 5) % 3 if not how.pop("empty", False) else torch.zeros(2, 5).long()
    drawn = [torch.randn(2, 5, 16), torch.randn(2, 5, 24), torch.randn(40, 16), torch.randn(40, 24)]
    drawn += [torch.randn(40), torch.randn(40)]

    def run(dtype: torch.dtype) -> list[Tensor]:
        h, t, w, tw, b, tb = (x.to(dtype) for x in drawn)
        leaves = [x.clone().requires_grad_() for x in (h, w, b)]
        loss, entropy, count = distillation_trainer._chunked_divergence_loss(
            leaves[0], t, leaves[1], tw, mask, student_lm_head_bias=leaves[2], teacher_lm_head_bias=tb, **how
        )
        grads = torch.autograd.grad(loss, leaves)
        assert not entropy.requires_grad and count == (mask != 0).sum()
        return [loss.detach(), entropy, *grads]

    drawn = [x.to(dtype) for x in drawn]
    baseline, truth = run(dtype), run(torch.float64)
    cce_trl.install()
    assert distillation_trainer._chunked_divergence_loss.__module__ == "cce_dist.integrations.trl"
    names = ("loss", "entropy", "dE", "dC", "dbias")
    for name, ours, theirs, true in zip(names, run(dtype), baseline, truth, strict=True):
        # An entropy of capped logits is a difference of numbers of 20 nats in fp32.
        assert_no_worse(ours, theirs, true, dtype if name[0] == "d" else torch.float32, name)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, VOCAB)}
    fast = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="<pad>", eos_token="<eos>")


def rows(columns: str) -> Any:
    from datasets import Dataset

    draw = torch.Generator().manual_seed(0)

    def text(count: int) -> str:
        return " ".join(f"w{i}" for i in torch.randint(2, VOCAB, (count,), generator=draw).tolist())

    drawn: dict[str, Callable] = {
        "prompt": lambda: text(4),
        "chosen": lambda: " " + text(5),
        "rejected": lambda: " " + text(7),
        "completion": lambda: " " + text(6),
        "label": lambda: text(1) < "w4",
    }
    return Dataset.from_list([{name: drawn[name]() for name in columns.split()} for _ in range(8)])


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(sum("3" in word for word in text.split()) - len(text) % 3) for text in completions]


def sft(model: Any, out: Path, **more: Any) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_list([{name: x.tolist() for name, x in row.items()} for row in sentences()])
    args = arguments(out, SFTConfig, packing=False, bf16=False, gradient_checkpointing=False, **more)
    return SFTTrainer(model, args, train_dataset=data, eval_dataset=data.select(range(6)), processing_class=tokenizer())


def trainer_of(kind: str, data: str, **given: Any) -> Callable:
    def make(model: Any, out: Path, **more: Any) -> Any:
        import trl

        how: dict[str, Any] = dict(bf16=False, gradient_checkpointing=False, learning_rate=1e-2, max_steps=3)
        args = arguments(out, getattr(trl, f"{kind}Config"), **how | more)
        trainer = getattr(trl, f"{kind}Trainer")
        return trainer(model, args=args, train_dataset=rows(data), processing_class=tokenizer(), **given)

    return make


def distillation(model: Any, out: Path, **more: Any) -> Any:
    teacher = tiny_model("Gemma2", hidden_size=48).eval()
    return trainer_of("Distillation", "prompt", teacher_model=teacher)(model, out, **more)


GRPO = trainer_of("GRPO", "prompt", reward_funcs=reward)
ROLLOUT: dict[str, Any] = dict(num_generations=2, max_completion_length=6, temperature=0.7, beta=0.1)
TRAINERS: dict[str, tuple[Callable, str, dict[str, Any]]] = {
    "sft": (sft, "Llama", {}),
    # With WPO's weights, which need the sum of squared probabilities.
    "dpo": (trainer_of("DPO", "prompt chosen rejected"), "Gemma2", {"use_weighting": True, "beta": 0.5}),
    "kto": (trainer_of("KTO", "prompt completion label"), "Cohere", {}),
    # With a reference model, and an entropy bonus, whose gradient goes through the entropy.
    "grpo": (GRPO, "Gemma2", {"entropy_coef": 0.1, **ROLLOUT}),
    # The trainer replaces the head's forward.
    "grpo-fp32-head": (GRPO, "Llama", {"cast_lm_head_to_fp32": True, **ROLLOUT}),
    "distillation": (distillation, "Gemma2", {"temperature": 0.7, "max_completion_length": 6, "beta": 0.5}),
}


def trained(make: Callable, model: Any, out: Path, **more: Any) -> tuple[list[dict[str, float]], Any, int]:
    """Return what a trainer logs, its parameters, and how often TRL's functions with ours inside were asked."""
    from transformers import AutoModelForCausalLM

    forget()
    with counted(cce_trl, "linear_log_probs") as calls:
        if make is not sft:  # reference models are read from where the model was
            model.save_pretrained(out)
            model = AutoModelForCausalLM.from_pretrained(out)
        trainer = make(model, out, **more)
        torch.manual_seed(0)
        trainer.train()
        if make is sft:
            trainer.evaluate()
    if any(hasattr(module, "cce_task") for module in trainer.model.modules()):
        cce_dist.require(trainer.model)
    return logged(trainer), trainer.accelerator.get_state_dict(trainer.model_wrapped), calls.call_count


@pytest.mark.parametrize(("make", "name", "more"), TRAINERS.values(), ids=TRAINERS)
def test_trainers_log_and_learn_as_they_do(make: Callable, name: str, more: dict, tmp_path: Path) -> None:
    """Catches a metric or a gradient that is not the stock's, and a trainer that goes round us."""
    stock, expected, unasked = trained(make, tiny_model(name), tmp_path / "stock", **more)
    cce_trl.install()
    ours, found, asked = trained(make, tiny_model(name), tmp_path / "ours", **more)
    assert not unasked and asked >= 3
    assert_same(ours, stock, TOLERANCE)
    assert_same(found, expected, TOLERANCE)
    start = tiny_model(name).state_dict()
    assert any(not torch.equal(start[where], parameter) for where, parameter in found.items())


POLICIES = {
    "dapo": (objectives.clipped_policy(0.2, 0.3, kl_coef=0.1), 0.3),
    "cispo": (objectives.truncated_importance(2.0), 2.0),
}


def stub(loss_type: str, high: float = 0.0, score: Any = None, beta: float = 0.0) -> Any:
    """Return as much of a GRPOTrainer, or an SFTTrainer, as its loss reads."""
    same: Any = lambda values, **_: values  # noqa: E731
    return types.SimpleNamespace(
        _get_per_token_logps_and_entropies=score, _entropy_bonus_enabled=False, aux_loss_enabled=False, use_vllm=False,
        accelerator=types.SimpleNamespace(
            gather=same, reduce=same, num_processes=1, autocast=contextlib.nullcontext, is_main_process=False,
            gather_for_metrics=same, parallelism_config=None,
        ),
        model=types.SimpleNamespace(training=True), _metrics={"train": defaultdict(list)}, importance_sampling_level="token",
        args=types.SimpleNamespace(
            delta=None, use_bias_correction_kl=False, steps_per_generation=1, loss_type=loss_type,
            average_tokens_across_devices=False,
        ),
        compute_loss_func=None, label_smoother=None, _total_train_tokens=0, _tp_size=1,
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, beta=beta,
        loss_type=loss_type, epsilon_low=0.2, epsilon_high=high, current_gradient_accumulation_steps=1,
    )  # fmt: skip


@pytest.mark.parametrize("loss_type", POLICIES)
def test_the_objectives_are_trls(loss_type: str) -> None:
    """GRPOTrainer's own loss beside ours. Catches: a sign, a bound of the ratio, a divergence in the other direction."""
    from trl import GRPOTrainer

    function, high = POLICIES[loss_type]
    hidden, weight, labels = operands(2)
    leaves = [x.double().requires_grad_() for x in (hidden, weight)]
    mask = torch.ones(labels.shape).index_fill_(1, torch.arange(9, 12), 0.0)
    old, ref = (-4 * torch.rand(labels.shape, dtype=torch.float64) for _ in range(2))
    inputs: dict[str, Any] = {"prompt_ids": labels[:, :0], "completion_ids": labels, "num_items_in_batch": mask.sum()}
    inputs |= {"prompt_mask": mask[:, :0], "completion_mask": mask, "advantages": torch.tensor([1.5, -0.7])}
    inputs |= {"old_per_token_logps": old, "ref_per_token_logps": ref}
    score = lambda *_, **__: (*dense_scores(leaves[0] @ leaves[1].t(), labels), None)  # noqa: E731
    trainer = stub(loss_type, high, score, 0.1 if loss_type == "dapo" else 0.0)
    theirs = GRPOTrainer._compute_loss(trainer, None, inputs)
    given = [inputs["advantages"][:, None].expand_as(labels), old, ref][: 2 + (loss_type == "dapo")]
    ours = linear_cross_entropy(
        leaves[0], leaves[1], labels.masked_fill(mask == 0, -100), token_loss=function, token_inputs=given
    )
    assert_same_loss(ours, theirs, leaves, 1e-6)


def test_grpo_replays_what_a_sampler_kept() -> None:
    """30 steps of GRPOTrainer's own loss, beside whole logits that are masked. Catches a list of the token before."""
    from trl import GRPOTrainer, RLOOTrainer

    draw, size, length = torch.Generator().manual_seed(0), 3, 5
    prompts, completions = (torch.randint(2, VOCAB, (size, n), generator=draw) for n in (4, length))
    likely = torch.rand(size, length, VOCAB, generator=draw).scatter(2, completions[..., None], 2.0)
    counts = torch.randint(1, 9, (size, length, 1), generator=draw)
    counts[1, 2:4] = 0  # a sampler that cuts nothing
    sampling_mask = likely.topk(8).indices.masked_fill(torch.arange(8) >= counts, -1)
    listed = torch.zeros_like(likely).scatter_add_(2, sampling_mask.clamp(min=0), (sampling_mask >= 0).float()) > 0
    listed |= ~listed.any(-1, keepdim=True)
    mask = torch.ones(size, length).index_fill_(1, torch.tensor([length - 1]), 0.0)
    inputs: dict[str, Any] = {"prompt_ids": prompts, "completion_ids": completions, "num_items_in_batch": mask.sum()}
    inputs |= {"prompt_mask": torch.ones_like(prompts), "completion_mask": mask}
    inputs["advantages"] = torch.tensor([1.5, -0.7, 0.2])
    old = -2 * torch.rand(size, length, generator=draw)
    inputs |= {"old_per_token_logps": old, "sampling_per_token_logps": old.clone(), "sampling_mask": sampling_mask}

    def dense(model: Any, ids: Tensor, *_: Any, **__: Any) -> Any:
        logits = model(input_ids=ids).logits[:, -length - 1 : -1]
        log_probs, entropy = dense_scores(logits.masked_fill(~listed, -1e30) / 0.7, completions)
        return log_probs, entropy, None

    def losses(is_ours: bool) -> Tensor:
        model, found = tiny_model(), []
        trainer = stub("dapo", 0.2)
        trainer._get_per_token_logps_and_entropies = dense
        if is_ours:
            add(model, temperature=0.7, outputs=("log_probs", "entropy"))
            score: Any = GRPOTrainer._get_per_token_logps_and_entropies
            trainer._get_per_token_logps_and_entropies = types.MethodType(score, trainer)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        for _ in range(30):
            loss = GRPOTrainer._compute_loss(trainer, model, inputs)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        return torch.stack(found)

    expected = losses(False)
    cce_trl.install()
    found = losses(True)
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max() < (expected[0] - expected[-1]).abs()
    for trainer, name in zip((GRPOTrainer,) * 3 + (RLOOTrainer,), cce_trl.WHOLE, strict=True):
        with pytest.raises(ValueError, match=f"{name} is over the whole vocabulary, and the inputs have sampling_mask"):
            trainer._compute_loss(cast(Any, None), None, inputs | {name: old + 1})


def test_dft_is_trls() -> None:
    from trl import SFTTrainer

    hidden, weight, labels = operands(2)
    labels[:, :3] = -100
    leaves = [x.double().requires_grad_() for x in (hidden, weight)]

    def outputs_of(**_: Any) -> Any:
        mask, (log_probs, entropy) = labels != -100, dense_scores(leaves[0] @ leaves[1].t(), labels)
        return types.SimpleNamespace(log_probs=log_probs, entropy=entropy, is_top1=mask, label_mask=mask)

    model: Any = outputs_of
    theirs = SFTTrainer.compute_loss(stub("dft"), model, {"labels": labels, "attention_mask": labels != 0})
    ours = linear_cross_entropy(leaves[0], leaves[1], labels, token_loss=objectives.dft())
    assert_same_loss(ours, theirs, leaves, 1e-9)


def compare_sft(folder: Path, name: str = "Llama", section: dict | None = None, **more: Any) -> None:
    """Compare SFTTrainer on a stock model with one that is converted, or has a section in its ds_config."""
    stock, expected, _ = trained(sft, tiny_model(name), folder, **more)
    model = tiny_model(name) if section else cce_dist.convert(tiny_model(name))
    ours, found, _ = trained(sft, model, folder, **more | (section or {}))
    assert {"entropy", "mean_token_accuracy"} <= stock[0].keys()
    assert_same(ours, stock, TOLERANCE)
    if expected is not None:
        assert_same(found, expected, TOLERANCE)


def test_what_sft_cannot_have_is_one_line(tmp_path: Path) -> None:
    """Catches a head that still defers behind the error."""
    forget()
    model = cce_dist.convert(tiny_model(), z_loss_weight=0.1)
    with pytest.raises(ValueError, match="log-probabilities, which have no z-loss"):
        sft(model, tmp_path).train()
    assert not model.lm_head.cce_task.calls
    assert type(model.lm_head(torch.randn(2, model.config.hidden_size))) is torch.Tensor


def test_a_converted_model_is_compiled(tmp_path: Path) -> None:
    compare_sft(tmp_path, "Gemma2", torch_compile=True, torch_compile_backend="aot_eager")


def test_a_call_that_asks_for_more_is_left_to_trl() -> None:
    """Temperature and mean logits are not what SFTTrainer asks for. A training forward says what to do in place of convert."""
    others: list[dict[str, Any]] = [{"temperature": 0.5}, {"outputs": ("log_probs", "mean_logits")}]
    for more in others:
        model = add(cce_dist.convert(tiny_model()), **more)
        with torch.no_grad():
            assert model(**batch(), fused_lm_head=True).log_probs.shape == (3, LENGTH - 1)
        with pytest.raises(ValueError, match=r"trl\.install\(\) before the trainer is made, and revert the model"):
            model(**batch(), fused_lm_head=True)


def test_labels_that_are_shifted_already() -> None:
    ids, labels = batch().values()
    shifted = labels.roll(-1, 1)  # a sentence's first label is ignored, and so is what stands last
    results = []
    for model in (tiny_model(), cce_dist.convert(tiny_model())):
        out = add(model, outputs=OUTPUTS)(input_ids=ids, shift_labels=shifted, fused_lm_head=True)
        results.append({field: out[field] for field in ("loss", *OUTPUTS, "label_mask")})
    torch.testing.assert_close(results[1], results[0], rtol=TOLERANCE, atol=TOLERANCE, check_dtype=False)


STEPS, RATE = 2, 0.5
OUTPUTS = ("log_probs", "entropy", "is_top1")


def loss_of(out: Any) -> Tensor:
    return out.loss + 0.1 * out.entropy.mean()


def one_rank(name: str) -> Any:
    """Train with TRL's own function on the batches of both ranks, and return the model."""
    model = add(tiny_model(name), outputs=OUTPUTS)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        for rank in range(2):
            (loss_of(model(**batch(2 * step + rank), fused_lm_head=True)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def parameters_of(model: Any) -> dict[str, Tensor]:
    return {name: x.detach() for name, x in model.named_parameters()}


def check_fsdp(name: str, head_alone: bool, expected: Any) -> None:
    model = add(tiny_model(name), outputs=OUTPUTS)
    gathered: list[bool] = []
    if head_alone:
        fully_shard(model.lm_head)
    fully_shard(model)
    model.lm_head.register_forward_pre_hook(lambda *_: gathered.append(not isinstance(model.lm_head.weight, DTensor)))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        loss_of(model(**batch(2 * step + dist.get_rank()), fused_lm_head=True)).backward()
        assert sum(gathered) == step + 1  # by the hooks of FSDP2 alone
        assert not head_alone or isinstance(model.lm_head.weight, DTensor)
        optimizer.step()
        optimizer.zero_grad()
    assert_same({name: x.full_tensor() for name, x in model.named_parameters()}, parameters_of(expected), TOLERANCE)


def check_zero3(name: str, expected: Any) -> None:
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    model = add(tiny_model(name), outputs=OUTPUTS)
    config = zero(3, train_micro_batch_size_per_gpu=3, gradient_accumulation_steps=1, gradient_clipping=0.0)
    kept = ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance")
    config["zero_optimization"] |= {f"stage3_{what}": 0 for what in kept}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    for step in range(STEPS):
        loss = loss_of(engine(**batch(2 * step + dist.get_rank()), fused_lm_head=True))
        # A head that is not tied is a piece again until backward.
        assert name == "Gemma2" or model.lm_head.weight.ds_status == ZeroParamStatus.NOT_AVAILABLE
        engine.backward(loss)
        engine.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        assert_same(parameters_of(model), parameters_of(expected), TOLERANCE)


def two_ranks(folder: Path) -> None:
    prepare_rank()
    for name in ("Llama", "Gemma2"):  # the second is tied, and has a softcap
        cce_trl.uninstall()
        expected = one_rank(name)
        cce_trl.install()
        for head_alone in (False, True)[: 1 + (name == "Llama")]:
            check_fsdp(name, head_alone, expected)
        check_zero3(name, expected)
    cce_trl.uninstall()
    compare_sft(folder)
    cce_deepspeed.install()
    section = {"deepspeed": zero(3, cce_dist={"enabled": True})}
    compare_sft(folder, deepspeed=zero(3), section=section)


@pytest.mark.slow
def test_fsdp2_and_zero3_gather_the_head_themselves(tmp_path: Path) -> None:
    """Catches a weight that is read outside of the head's hooks, and one that is kept whole from forward to backward."""
    run_ranks(two_ranks, 2, tmp_path)


def test_without_a_label_there_is_a_gradient_of_zero() -> None:
    cce_trl.install()
    model = add(tiny_model())
    out = model(input_ids=torch.ones(1, 4, dtype=torch.long), labels=torch.full((1, 4), -100), fused_lm_head=True)
    out.loss.backward()
    assert out.loss == 0 and not model.lm_head.weight.grad.any() and not model.model.embed_tokens.weight.grad.any()


def test_the_other_forward_stays() -> None:
    """Catches a head that still defers: generate, and passes that look at logits."""
    cce_trl.install()
    model = tiny_model()
    expected = model(**batch())
    add(model)
    found = model(**batch())
    assert torch.equal(found.logits, expected.logits) and torch.equal(found.loss, expected.loss)
    model(**batch(), fused_lm_head=True)
    assert torch.equal(model(**batch()).logits, expected.logits)
    assert model.generate(batch()["input_ids"], max_new_tokens=2, do_sample=False).shape == (3, LENGTH + 2)


@pytest.mark.parametrize("in_fp32", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_is_no_worse(in_fp32: bool, autocast: bool) -> None:
    stock = tiny_model()
    truth = {**dense(copy.deepcopy(stock).double(), 1.0, **batch())}
    stock = stock if autocast else stock.bfloat16()
    found = []
    for model in (copy.deepcopy(stock), stock):
        add(model, cast_lm_head_to_fp32=in_fp32, outputs=OUTPUTS)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found.append(model(**batch(), fused_lm_head=True))
        cce_trl.install()
    for key in ("log_probs", "entropy"):
        theirs, mine = (out[key] for out in found)
        assert mine.dtype == torch.float32
        assert_no_worse(mine, theirs, truth[key], quantity=key)


def test_what_is_not_served_is_one_line() -> None:
    from trl.experimental.gkd import GKDTrainer
    from trl.experimental.gold import GOLDTrainer
    from trl.trainer import distillation_trainer
    from trl.trainer.sft_trainer import SFTTrainer

    stock = SFTTrainer.__init__
    for trainer in (GKDTrainer, GOLDTrainer):
        cce_trl.install()
        says = f"TRL's {trainer.__name__} computes its .* DistillationTrainer has the same"
        with pytest.raises(ValueError, match=says):
            SFTTrainer.__init__(trainer.__new__(trainer), tiny_model())
    cce_trl.uninstall()
    assert SFTTrainer.__init__ is stock
    cce_trl.install()
    hidden, weight, mask = torch.randn(1, 2, 8), torch.randn(9, 8), torch.ones(1, 2)
    with pytest.raises(ValueError, match="ZeRO-3 has the head's weight in parts"):
        distillation_trainer._chunked_divergence_loss(hidden, hidden, torch.empty(0), weight, mask, 0.5)
    model = tiny_model()
    with pytest.raises(ValueError, match="top2_gap is none of them"):
        add(model, outputs=("log_probs", "top2_gap"))
    with pytest.raises(ValueError, match="filter: log-probabilities have no filter"):
        cce_trl.install(filter="compensated")
    with pytest.raises(RuntimeError, match=r"no head of this .*trl\.install\(\) before the trainer of TRL"):
        cce_dist.require(model)
    add(model)
    cce_dist.require(model)
    model.lm_head.forward = types.MethodType(nn.Linear.forward, model.lm_head)
    with pytest.raises(ValueError, match="somebody has replaced its forward"):
        model(**batch(), fused_lm_head=True)
    del model.lm_head.forward
    cce_dist.convert(model)
    with pytest.raises(ValueError, match="revert the model"):
        model(**batch(), fused_lm_head=True)
