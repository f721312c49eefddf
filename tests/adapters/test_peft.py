"""PEFT's heads: LoRA, modules_to_save and frozen ones, stock beside ours; and the product that a frozen head saves."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("peft")

from peft import LoraConfig, get_peft_model
from support.refused import refused
from tiny_trainer import VOCAB, assert_gradients_no_worse, batch, tiny_model
from torch import Tensor, nn
from torch.profiler import profile

import cce_dist
from cce_dist import linear_cross_entropy
from cce_dist.tools.verify.check import assert_no_worse

HIDDEN, MODELS = 16, ("Llama", "Gemma2", "Phi")
CONFIGS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": ["q_proj", "lm_head"]},
    "lora-rs-bias": {"target_modules": ["lm_head"], "use_rslora": True, "lora_bias": True, "r": 5},
    "modules-to-save": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "frozen": {"target_modules": ["q_proj"]},
}


def model_of(name: str, tied: bool = False, **config: Any) -> Any:
    model = tiny_model(name, tie_word_embeddings=tied)
    wrapped = get_peft_model(model, LoraConfig(**{"r": 8, "lora_alpha": 16, "task_type": "CAUSAL_LM", **config}))
    with torch.no_grad():  # LoRA starts at B = 0, where dA is 0
        for where, parameter in wrapped.named_parameters():
            if "lora_B" in where:
                parameter.normal_(std=0.1)
    return wrapped


def trained(model: Any) -> Tensor:
    """Return a loss, and leave its gradients. A dropout is drawn as in every other call."""
    torch.manual_seed(3)
    loss = model(**batch()).loss
    loss.backward()
    return loss.detach()


# Of docs/peft.md: a model, options, whether the embedding is tied to the head, and how many parameters of both train.
WRAPPED: dict[str, tuple[str, dict[str, Any], bool, int]] = {
    **{f"{name}-lora": (name, CONFIGS["lora"], False, 2) for name in MODELS},
    **{f"{name}-lora-rs-bias": (name, CONFIGS["lora-rs-bias"], False, 3) for name in MODELS},
    **{f"{name}-modules-to-save": (name, CONFIGS["modules-to-save"], False, 1 + (name == "Phi")) for name in MODELS},
    **{f"{name}-frozen": (name, CONFIGS["frozen"], False, 0) for name in MODELS},
    "lora-dropout": ("Llama", {"target_modules": ["lm_head"], "lora_dropout": 0.5}, False, 2),
    "tokens-tied": ("Llama", {"trainable_token_indices": [3, 5]}, True, 1),
    "tokens-untied": ("Llama", {"trainable_token_indices": {"lm_head": [3, 5]}}, False, 1),
    "parameters-tied": ("Llama", {"target_parameters": ["lm_head.weight"]}, True, 2),
    "parameters-untied": ("Llama", {"target_parameters": ["lm_head.weight"]}, False, 2),
    "lora-tied": ("Llama", {"target_modules": ["q_proj", "lm_head"]}, True, 2),
    "copies-tied": ("Llama", {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, True, 1),
    "copies-untied": ("Llama", {"modules_to_save": ["embed_tokens", "lm_head"]}, False, 2),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "config", "tied", "count"), WRAPPED.values(), ids=WRAPPED)
def test_heads_and_embeddings_that_peft_trains(name: str, config: dict[str, Any], tied: bool, count: int) -> None:
    """Catches an adapter that the loss leaves out, a scale on one side of the gradients, a gradient that nobody wants, a loss
    of the frozen weight, and of ``out_features``, which the copies of a tied head have wrong."""
    stock = model_of(name, tied, **{"target_modules": ["q_proj"], **config})
    ours, truth = cce_dist.convert(copy.deepcopy(stock)), copy.deepcopy(stock).double()
    losses = [trained(model) for model in (ours, stock, truth)]
    cce_dist.require(ours)
    assert list(ours.state_dict()) == list(stock.state_dict())  # which is what PEFT saves
    assert_no_worse(losses[0], losses[1], losses[2])
    found = assert_gradients_no_worse(ours, stock, truth)
    assert len([where for where in found if "lm_head" in where or "embed_tokens" in where]) == count
    with torch.no_grad():
        for model in (ours, stock):
            model.eval()
        torch.testing.assert_close(ours(**batch()).logits + 0, stock(**batch()).logits)
        with ours.disable_adapter(), stock.disable_adapter():
            torch.testing.assert_close(ours(**batch()).logits + 0, stock(**batch()).logits)


def test_bfloat16_keeps_what_a_young_adapter_adds() -> None:
    """Catches a sum W + s B A in the weight's dtype, whose rounding is larger than a B A of the first steps."""
    stock = model_of("Llama", **CONFIGS["lora"])
    with torch.no_grad():
        for where, parameter in stock.named_parameters():
            if "lora_B" in where:
                parameter.mul_(1e-2)
            elif "lora" not in where:
                parameter.copy_(parameter.bfloat16())
    truth = copy.deepcopy(stock).double()
    for where, parameter in stock.named_parameters():
        if "lora" not in where:  # PEFT keeps adapters in fp32
            parameter.data = parameter.data.bfloat16()
    ours = cce_dist.convert(copy.deepcopy(stock))
    losses = [trained(model) for model in (stock, ours, truth)]
    assert losses[1].dtype == torch.float32
    assert assert_gradients_no_worse(ours, stock, truth, torch.bfloat16)


def test_two_adapters_add_up_and_switched_off_ones_do_not() -> None:
    stock = model_of("Llama", **CONFIGS["lora"])
    stock.add_adapter("more", LoraConfig(r=4, lora_alpha=4, target_modules=["lm_head"], init_lora_weights=False))
    stock.base_model.set_adapter(["default", "more"])
    ours = cce_dist.convert(copy.deepcopy(stock))
    plain = stock(**batch()).loss
    torch.testing.assert_close(ours(**batch()).loss, plain)
    with stock.disable_adapter(), ours.disable_adapter():
        without = stock(**batch()).loss
        torch.testing.assert_close(ours(**batch()).loss, without)
    assert abs(without - plain) > 1e-3
    stock.merge_adapter()
    ours.merge_adapter()
    torch.testing.assert_close(ours(**batch()).loss, stock(**batch()).loss)
    torch.testing.assert_close(stock(**batch()).loss, plain)


def test_logits_of_other_adapters_are_stale() -> None:
    """Catches logits of evaluation that are computed from other adapters, or another dropout, than the loss beside them."""
    model = model_of("Llama", **CONFIGS["lora"]).eval()
    other = LoraConfig(r=8, target_modules=["lm_head"], task_type="CAUSAL_LM", lora_dropout=0.5)
    model.add_adapter("other", other)
    cce_dist.convert(model)
    with torch.no_grad():
        looked, unseen = (model(**batch()).logits for _ in range(2))
        expected = looked + 0
        with model.disable_adapter(), pytest.raises(RuntimeError, match="stale: the adapters on the head changed"):
            unseen.argmax(-1)
        assert torch.equal(unseen + 0, expected)  # the adapter is back
        head = model.base_model.model.lm_head
        changes: list[tuple[Callable, str]] = [
            (lambda: model.set_adapter("other"), "the adapters on the head"),
            (model.train, "the mode of the head, whose adapter has a dropout,"),
            (lambda: head.set_scale("other", 3.0), "the adapters on the head"),
            (lambda: head.lora_B["other"].weight.add_(1.0), "the head's weight or bias"),
            (model.merge_adapter, "the adapters on the head"),
            # The adapter is still in the weight, and the next call of the head takes it out.
            (model.base_model.disable_adapter_layers, "the adapters on the head"),
        ]
        for change, what in changes:
            unseen = model.eval()(**batch()).logits
            change()
            with pytest.raises(RuntimeError, match=f"stale: {what} changed"):
                unseen.argmax(-1)
        assert torch.equal(looked + 0, expected)


def test_a_second_use_that_would_draw_another_dropout_is_refused() -> None:
    model = cce_dist.convert(model_of("Llama", target_modules=["lm_head"], lora_dropout=0.5))
    given = batch()
    with torch.no_grad(), pytest.raises(RuntimeError, match="each use would draw another dropout"):
        model(**given).logits.argmax(-1)
    labels = given.pop("labels").flatten()
    logits = model(**given).logits.flatten(0, 1)
    F.cross_entropy(logits, labels).backward()
    with pytest.raises(RuntimeError, match="each use would draw another dropout"):
        F.cross_entropy(logits[3:], labels[3:])


def test_adapters_of_each_sequence_have_no_loss() -> None:
    model = cce_dist.convert(model_of("Llama", target_modules=["lm_head"])).eval()
    given = batch() | {"adapter_names": ["__base__"] * len(batch()["input_ids"])}
    with pytest.raises(ValueError, match="called with adapter_names, for which there is no loss"):
        model(**given)
    del given["labels"]
    with torch.no_grad():
        assert (model(**given).logits + 0).isfinite().all()


@pytest.mark.parametrize(("trains", "products"), [(True, 3), (False, 2)])
def test_a_frozen_head_saves_the_product_of_dc(trains: bool, products: int) -> None:
    """Catches a dC that is made and thrown away. There is one block: of logits, dE, and dC."""
    hidden, weight = torch.randn(40, HIDDEN, requires_grad=True), torch.randn(VOCAB, HIDDEN, requires_grad=trains)
    with profile() as run:
        linear_cross_entropy(hidden, weight, torch.randint(VOCAB, (40,)), backend="torch").backward()
    assert sum(event.name in ("aten::mm", "aten::addmm_") for event in run.events() or ()) == products
    assert (weight.grad is not None) == trains


def test_trl_asks_a_lora_head() -> None:
    trl = pytest.importorskip("trl")
    from cce_dist.integrations import trl as cce_trl

    stock = model_of("Llama", **CONFIGS["lora"])
    ours = copy.deepcopy(stock)
    with torch.no_grad():  # TRL's own reads lm_head.weight, which has no adapters: merged, it has
        stock.merge_adapter()
    trl.trainer.utils.add_fused_lm_head(stock.get_base_model())
    cce_trl.install()
    trl.trainer.utils.add_fused_lm_head(ours.get_base_model())
    cce_trl.uninstall()
    found, expected = (model(**batch(), fused_lm_head=True) for model in (ours, stock))
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=1e-5, atol=1e-5)
    found.loss.backward()
    assert ours.base_model.model.lm_head.lora_A["default"].weight.grad.any()


class Twice(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


REFUSED: dict[str, tuple[Callable, str]] = {
    "base": (lambda head: setattr(head, "base_layer", Twice(HIDDEN, VOCAB)), "LoRA on a head .* Twice"),
    "variant": (lambda head: head.lora_variant.update(default=Twice(1, 1)), "a head with Twice: only plain"),
    "zero3": (lambda head: setattr(head.base_layer, "weight", nn.Parameter(torch.zeros(0))), "is a piece"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_sum_of_products_is_one_line(change: Callable, message: str) -> None:
    model = cce_dist.convert(model_of("Llama", **CONFIGS["lora"]))
    change(model.base_model.model.lm_head)
    with refused(message):
        model(**batch())


@pytest.mark.parametrize("config", ["lora", "modules-to-save", "frozen"])
def test_peft_after_convert_is_one_line(config: str) -> None:
    """The advice works, and a head that PEFT leaves alone trains."""
    settings = LoraConfig(task_type="CAUSAL_LM", **CONFIGS[config])
    model: Any = get_peft_model(cce_dist.convert(tiny_model("Llama")), settings)
    if config != "frozen":
        with pytest.raises(RuntimeError, match="PEFT has wrapped lm_head since convert: call convert after get_peft_"):
            model(**batch())
        cce_dist.convert(cce_dist.revert(model))
    trained(model)
    cce_dist.require(model)


def test_dora_is_refused() -> None:
    """Catches a variant that only the first loss finds."""
    for variant in ({"use_dora": True}, {"use_rslora": True, "use_dora": True}):
        model = model_of("Llama", target_modules=["lm_head"], **variant)
        with pytest.raises(ValueError, match=r"a head with DoraLinearVariant.*modules_to_save.*A pull request"):
            cce_dist.convert(model)
