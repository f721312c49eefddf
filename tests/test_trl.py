"""TRL's own trainers and function, stock beside ours: losses, logged metrics, parameters and gradients of tiny models."""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("trl")

import transformers
from test_deepspeed import prepare
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from cce_dist.integrations import trl as cce_trl
from cce_dist.integrations.deferred import Task, take
from cce_dist.integrations.options import ModelOptions
from cce_dist.ranks import run_ranks
from cce_dist.shard import VocabShard
from cce_dist.verify.check import assert_no_worse

WORDS = [
    "<pad>",
    "<eos>",
    "<unk>",
    "the",
    "a",
    "cat",
    "dog",
    "bird",
    "sat",
    "ran",
    "flew",
    "on",
    "over",
    "under",
    "mat",
    "log",
    "house",
    "and",
    "then",
    "it",
    "was",
    "red",
    "blue",
    "fast",
]
VOCAB, SEQ = 67, 12
SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=1,
)
EAGER: dict[str, Any] = {"experts_implementation": "eager"}  # its grouped product has no float64
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=2.0, tie_word_embeddings=True)
    ),
    "cohere": lambda: transformers.CohereForCausalLM(transformers.CohereConfig(**SIZES, logit_scale=0.25)),
    "phi": lambda: transformers.PhiForCausalLM(transformers.PhiConfig(**SIZES)),  # a head with a bias
    "qwen2-moe": lambda: transformers.Qwen2MoeForCausalLM(
        transformers.Qwen2MoeConfig(
            **SIZES,
            **EAGER,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
            output_router_logits=True,
        )
    ),
}


@pytest.fixture(autouse=True)
def _stock_again() -> Iterator[None]:
    yield
    cce_trl.uninstall()


def model_of(name: str, seed: int = 0) -> Any:
    """Return a model whose softmax is not flat: else all tokens look alike, and a softcap does nothing."""
    torch.manual_seed(seed)
    model = MODELS[name]().train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)
    return model


def add(model: Any, **how: Any) -> None:
    """Call TRL's function, or ours in its place."""
    from trl.trainer import utils

    utils.add_fused_lm_head(model, **how)


def batch(seed: int = 1) -> dict[str, Tensor]:
    ids = torch.randint(2, VOCAB, (3, SEQ), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:, :4] = labels[1, 9:] = -100
    return {"input_ids": ids, "labels": labels}


def dense(model: Any, temperature: float, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return what TRL's function should return, from the model's own logits."""
    out = model(input_ids=input_ids)
    target = labels[:, 1:]
    kept = target != -100
    logits = out.logits[:, :-1] / temperature
    log_p = logits.log_softmax(-1)
    found = {
        "log_probs": log_p.gather(-1, target.clamp(min=0)[..., None])[..., 0],
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "log_sum_sq_probs": (2 * log_p).logsumexp(-1).detach(),
        "mean_logits": logits.mean(-1).detach(),
        "is_top1": logits.argmax(-1) == target,
    }
    found = {name: x.masked_fill(~kept, 0) for name, x in found.items()}
    found["loss"], found["label_mask"] = -found["log_probs"].sum() / kept.sum(), kept
    if "aux_loss" in out:
        found["aux_loss"] = out.aux_loss
        found["loss"] = found["loss"] + model.config.router_aux_loss_coef * out.aux_loss
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", MODELS)
def test_all_outputs_and_gradients_are_trls(name: str, temperature: float) -> None:
    """Catches a temperature before the softcap, an output of the wrong logits, and one whose gradient is lost."""
    how = {"temperature": temperature, "outputs": cce_trl.OUTPUTS}
    stock, inputs = model_of(name), batch()
    ours, truth = copy.deepcopy(stock), copy.deepcopy(stock).double()
    add(stock, **how)
    cce_trl.install()
    add(ours, **how)
    with torch.no_grad():  # half of the labels are the likeliest tokens, so that is_top1 is both
        likeliest = stock(input_ids=inputs["input_ids"]).logits[:, :-1].argmax(-1)
    inputs["labels"][:, 5::2] = torch.where(inputs["labels"][:, 5::2] == -100, -100, likeliest[:, 4::2])
    found = [model(**inputs, fused_lm_head=True) for model in (stock, ours)] + [dense(truth, temperature, **inputs)]
    for out in found:
        upstream = torch.linspace(-1, 1, SEQ - 1, dtype=out["loss"].dtype)
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
    for (where, mine), theirs, true in zip(
        ours.named_parameters(), stock.parameters(), truth.parameters(), strict=True
    ):
        assert mine.grad is not None and theirs.grad is not None and true.grad is not None
        assert_no_worse(mine.grad, theirs.grad, true.grad, quantity=where)


TRAINING: dict[str, Any] = dict(
    max_steps=3,
    per_device_train_batch_size=2,
    learning_rate=1e-2,
    logging_steps=1,
    report_to=[],
    save_strategy="no",
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    disable_tqdm=True,
    lr_scheduler_type="constant",
    optim="sgd",
    max_grad_norm=1.0,
)
TIMES = ("runtime", "per_second", "step_time", "epoch", "flos")


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def rows(kind: str) -> Any:
    from datasets import Dataset

    draw = torch.Generator().manual_seed(0)

    def text(count: int) -> str:
        return " ".join(WORDS[i] for i in torch.randint(3, len(WORDS), (count,), generator=draw).tolist())

    whats = {
        "sft": lambda: {"text": text(9)},
        "prompt": lambda: {"prompt": text(4)},
        "pairs": lambda: {"prompt": text(4), "chosen": " " + text(5), "rejected": " " + text(7)},
        "rated": lambda: {"prompt": text(4), "completion": " " + text(6), "label": text(1) < "it"},
    }
    return Dataset.from_list([whats[kind]() for _ in range(8)])


def short_is_better(completions: list[str], **_: Any) -> Any:
    return [float(sum(word in ("cat", "dog", "the") for word in text.split()) - len(text) % 3) for text in completions]


def sft(model: Any, out: Path) -> Any:
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(str(out), max_length=10, eval_strategy="steps", eval_steps=2, **TRAINING)
    return SFTTrainer(model, args, train_dataset=rows("sft"), eval_dataset=rows("sft"), processing_class=tokenizer())


def dpo(model: Any, out: Path) -> Any:
    """With WPO's weights, which need the sum of squared probabilities."""
    from trl import DPOConfig, DPOTrainer

    args = DPOConfig(str(out), use_weighting=True, beta=0.5, **TRAINING)
    return DPOTrainer(model, args=args, train_dataset=rows("pairs"), processing_class=tokenizer())


def kto(model: Any, out: Path) -> Any:
    from trl import KTOConfig, KTOTrainer

    return KTOTrainer(
        model, args=KTOConfig(str(out), **TRAINING), train_dataset=rows("rated"), processing_class=tokenizer()
    )


ROLLOUT: dict[str, Any] = dict(num_generations=2, max_completion_length=6, temperature=0.7, beta=0.1)


def grpo(model: Any, out: Path) -> Any:
    """With a reference model, and an entropy bonus, whose gradient goes through the entropy."""
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(str(out), entropy_coef=0.1, **ROLLOUT, **TRAINING)
    return GRPOTrainer(model, short_is_better, args, train_dataset=rows("prompt"), processing_class=tokenizer())


def rloo(model: Any, out: Path) -> Any:
    from trl import RLOOConfig, RLOOTrainer

    return RLOOTrainer(
        model,
        short_is_better,
        RLOOConfig(str(out), **ROLLOUT, **TRAINING),
        train_dataset=rows("prompt"),
        processing_class=tokenizer(),
    )


def trained(make: Callable, name: str, out: Path) -> tuple[list[dict[str, float]], dict[str, Tensor], list[str]]:
    """Return what a trainer logs, its parameters, and what the loss was asked for."""
    asked: list[str] = []
    compute = cce_trl._Score._compute

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(",".join(self.outputs))
        return compute(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cce_trl._Score, "_compute", counted)
        model_of(name).save_pretrained(out)  # reference models are read from where the model was
        trainer = make(transformers.AutoModelForCausalLM.from_pretrained(out), out)
        torch.manual_seed(0)
        trainer.train()
    logs = [{k: v for k, v in log.items() if not any(t in k for t in TIMES)} for log in trainer.state.log_history]
    return logs, {k: v.detach() for k, v in trainer.model.named_parameters()}, asked


@pytest.mark.parametrize(
    ("make", "name"), [(sft, "llama"), (dpo, "gemma2"), (kto, "cohere"), (grpo, "gemma2"), (rloo, "llama")]
)
def test_trainers_log_and_learn_as_they_do(make: Callable, name: str, tmp_path: Path) -> None:
    """Catches a metric or a gradient that is not the stock's, and a trainer that goes round us."""
    stock, expected, unasked = trained(make, name, tmp_path / "stock")
    cce_trl.install()
    ours, found, asked = trained(make, name, tmp_path / "ours")
    assert not unasked and len(asked) >= 3
    assert len(ours) == len(stock) >= 3
    start = dict(model_of(name).named_parameters())
    for mine, theirs in zip(ours, stock, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    for where, parameter in found.items():
        torch.testing.assert_close(parameter, expected[where], rtol=1e-5, atol=1e-6, msg=where)
    assert any(not torch.equal(start[where], parameter) for where, parameter in found.items())


STEPS, RATE = 2, 0.5
OUTPUTS = ("log_probs", "entropy", "is_top1")


def loss_of(out: Any) -> Tensor:
    return out.loss + 0.1 * out.entropy.mean()


def one_rank(name: str) -> Any:
    """Train with TRL's own function on the batches of both ranks, and return the model."""
    model = model_of(name)
    add(model, outputs=OUTPUTS)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        for rank in range(2):
            (loss_of(model(**batch(2 * step + rank), fused_lm_head=True)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def check_fsdp(name: str, head_alone: bool, expected: Any) -> None:
    model = model_of(name)
    add(model, outputs=OUTPUTS)
    gathers = 0

    def gathered(*_: Any) -> None:
        nonlocal gathers
        gathers += not isinstance(model.lm_head.weight, DTensor)

    if head_alone:
        fully_shard(model.lm_head)
    fully_shard(model)
    model.lm_head.register_forward_pre_hook(gathered)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        loss_of(model(**batch(2 * step + dist.get_rank()), fused_lm_head=True)).backward()
        assert gathers == step + 1  # by the hooks of FSDP2 alone
        assert not head_alone or isinstance(model.lm_head.weight, DTensor)
        optimizer.step()
        optimizer.zero_grad()
    for (where, mine), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs, rtol=2e-5, atol=2e-5, msg=where)


def check_zero3(name: str, expected: Any) -> None:
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    model = model_of(name)
    add(model, outputs=OUTPUTS)
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
        },
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    for step in range(STEPS):
        loss = loss_of(engine(**batch(2 * step + dist.get_rank()), fused_lm_head=True))
        # A head that is not tied is a piece again until backward.
        assert name == "gemma2" or model.lm_head.weight.ds_status == ZeroParamStatus.NOT_AVAILABLE
        engine.backward(loss)
        engine.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        for (where, mine), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(mine.detach(), theirs, rtol=2e-5, atol=2e-5, msg=where)


def two_ranks() -> None:
    prepare()
    for name in ("llama", "gemma2"):  # the second is tied, and has a softcap
        cce_trl.uninstall()
        expected = one_rank(name)
        cce_trl.install()
        for head_alone in (False, True)[: 1 + (name == "llama")]:
            check_fsdp(name, head_alone, expected)
        check_zero3(name, expected)


@pytest.mark.slow
def test_fsdp2_and_zero3_gather_the_head_themselves() -> None:
    """Catches a weight that is read outside of the head's hooks, and one that is kept whole from forward to backward."""
    run_ranks(two_ranks, 2)


def test_install_is_undone_and_done_again() -> None:
    from trl.trainer import grpo_trainer, utils

    theirs = utils.add_fused_lm_head
    cce_trl.install()
    ours = grpo_trainer.add_fused_lm_head
    assert ours is utils.add_fused_lm_head is not theirs
    cce_trl.install(backend="torch", workspace_bytes=1 << 20)
    assert ours is not utils.add_fused_lm_head is grpo_trainer.add_fused_lm_head
    assert utils.add_fused_lm_head.cce_original is theirs
    cce_trl.uninstall()
    cce_trl.uninstall()
    assert theirs is utils.add_fused_lm_head is grpo_trainer.add_fused_lm_head


def test_without_a_label_there_is_a_gradient_of_zero() -> None:
    cce_trl.install()
    model = model_of("llama")
    add(model)
    out = model(input_ids=torch.ones(1, 4, dtype=torch.long), labels=torch.full((1, 4), -100), fused_lm_head=True)
    out.loss.backward()
    assert out.loss == 0 and not model.lm_head.weight.grad.any() and not model.model.embed_tokens.weight.grad.any()


def test_the_other_forward_stays() -> None:
    """Catches a head that still defers: generate, and passes that look at logits."""
    cce_trl.install()
    model = model_of("llama")
    expected = model(**batch())
    add(model)
    found = model(**batch())
    assert torch.equal(found.logits, expected.logits) and torch.equal(found.loss, expected.loss)
    model(**batch(), fused_lm_head=True)
    assert torch.equal(model(**batch()).logits, expected.logits)
    assert model.generate(batch()["input_ids"], max_new_tokens=2, do_sample=False).shape == (3, SEQ + 2)


@pytest.mark.parametrize("in_fp32", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_is_no_worse(in_fp32: bool, autocast: bool) -> None:
    stock = model_of("llama")
    truth = {**dense(copy.deepcopy(stock).double(), 1.0, **batch())}
    stock = stock if autocast else stock.bfloat16()
    ours = copy.deepcopy(stock)
    add(stock, cast_lm_head_to_fp32=in_fp32, outputs=OUTPUTS)
    cce_trl.install()
    add(ours, cast_lm_head_to_fp32=in_fp32, outputs=OUTPUTS)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        theirs, mine = (model(**batch(), fused_lm_head=True) for model in (stock, ours))
    for key in ("log_probs", "entropy"):
        assert mine[key].dtype == torch.float32
        assert_no_worse(mine[key], theirs[key], truth[key], quantity=key)


def other_function(model: Any, temperature: float = 1.0, outputs: tuple[str, ...] = ()) -> None: ...


def test_another_trl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from trl.trainer import utils

    monkeypatch.setattr(utils, "add_fused_lm_head", other_function)
    with pytest.raises(
        RuntimeError, match=r"knows TRL 1\.16: there add_fused_lm_head takes .*; in .* model, temperature, o"
    ):
        cce_trl.install()
    monkeypatch.delattr(utils, "add_fused_lm_head")
    with pytest.raises(RuntimeError, match="add_fused_lm_head takes"):
        cce_trl.install()
    monkeypatch.undo()
    monkeypatch.setattr(utils, "FusedCausalLMOutput", other_function)
    with pytest.raises(RuntimeError, match="FusedCausalLMOutput takes loss, "):
        cce_trl.install()
    monkeypatch.setitem(sys.modules, "trl.trainer.utils", None)
    with pytest.raises(ImportError, match="needs TRL"):
        cce_trl.install()


def test_what_is_not_served_is_one_line() -> None:
    with pytest.raises(ValueError, match="backend must be one of"):
        cce_trl.install(backend="cuda")
    cce_trl.install()
    model = model_of("llama")
    with pytest.raises(ValueError, match="top2_gap is none of them"):
        add(model, outputs=("log_probs", "top2_gap"))
    add(model)
    model.lm_head.forward = types.MethodType(nn.Linear.forward, model.lm_head)
    with pytest.raises(ValueError, match="somebody has replaced its forward"):
        model(**batch(), fused_lm_head=True)
    del model.lm_head.forward
    take(model.lm_head, Task(ModelOptions(), VocabShard(0, VOCAB, VOCAB)))
    with pytest.raises(ValueError, match="revert the model"):
        model(**batch(), fused_lm_head=True)
