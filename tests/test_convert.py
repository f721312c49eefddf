"""cce_dist.convert, revert and require on plain PyTorch models: loops, copies, files, evaluation, FSDP2, refusals."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import cce_dist
from cce_dist.integrations import deferred
from cce_dist.integrations.on_demand import OnDemand

HIDDEN, VOCAB, LENGTH, BATCH = 16, 37, 6, 2


class Model(nn.Module):
    """A model that computes its loss in forward if it is given labels, as those of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        logits = self.lm_head(self.embed(ids))
        return {"loss": None if labels is None else loss_of(logits, labels), "logits": logits}


class BiasOutside(Model):
    """Adds a bias to its logits that the head does not know, as BART does."""

    def __init__(self) -> None:
        super().__init__()
        self.final_logits_bias = nn.Buffer(torch.randn(1, VOCAB))

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        logits = self.lm_head(self.embed(ids)) + self.final_logits_bias
        return {"loss": None if labels is None else loss_of(logits, labels), "logits": logits}


class ReadsTheWeight(Model):
    """Computes its loss from the head's weight, as Liger's forward does."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        logits = F.linear(self.embed(ids), self.lm_head.weight)
        return {"loss": None if labels is None else loss_of(logits, labels), "logits": logits}


def loss_of(logits: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(2.0 * logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1))


def pair(kind: type = Model, **options: Any) -> tuple[Any, Any]:
    """Return a model and a converted copy."""
    torch.manual_seed(0)
    stock = kind()
    return stock, cce_dist.convert(copy.deepcopy(stock), **options)


def batch() -> Tensor:
    return torch.randint(VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))


def assert_same_step(stock: Any, ours: Any) -> None:
    ids = batch()
    losses = []
    for model in (stock, ours):
        model.zero_grad()
        losses.append(model(ids, labels=ids)["loss"])
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0])
    for expected, parameter in zip(stock.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)


@pytest.fixture
def dense(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count how often logits are computed."""
    calls, compute = [0], deferred._dense

    def counting(*args: Any) -> Tensor:
        calls[0] += 1
        return compute(*args)

    monkeypatch.setattr(deferred, "_dense", counting)
    return calls


def test_a_converted_model_trains_as_it_did() -> None:
    stock, ours = pair()
    with pytest.raises(RuntimeError, match=r"was converted: call cce_dist.convert\(model\)"):
        cce_dist.require(stock)
    assert_same_step(stock, ours)
    cce_dist.require(ours)
    assert list(ours.state_dict()) == list(stock.state_dict())
    assert cce_dist.convert(ours, z_loss_weight=0.5) is ours and ours.lm_head.cce_task.options.z_loss_weight == 0.5
    assert cce_dist.convert(ours).lm_head.cce_task.options.z_loss_weight == 0.5


def test_a_loss_of_the_training_loop() -> None:
    """On one GPU and under DDP the weight is whole behind the model's forward, too."""
    stock, ours = pair()
    for model in (stock, ours):
        loss_of(model(batch())["logits"], batch()).backward()
    torch.testing.assert_close(ours.lm_head.weight.grad, stock.lm_head.weight.grad)


def test_a_bias_that_is_added_to_the_logits(dense: list[int]) -> None:
    stock, ours = pair(BiasOutside)
    assert_same_step(stock, ours)
    with torch.no_grad():
        expected, got = (model.eval()(batch(), labels=batch()) for model in (stock, ours))
    torch.testing.assert_close(got["loss"], expected["loss"])
    assert dense == [0]
    torch.testing.assert_close(got["logits"] + 0, expected["logits"])


@pytest.mark.parametrize("through", ["deepcopy", "file"])
def test_a_copy_is_a_converted_model_of_its_own(through: str) -> None:
    stock, ours = pair()
    ours(batch(), labels=batch())
    if through == "deepcopy":
        other = copy.deepcopy(ours)
    else:
        file = io.BytesIO()
        torch.save(ours, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    cce_dist.revert(ours)
    assert type(ours.lm_head) is nn.Linear and isinstance(ours(batch())["logits"], Tensor)
    assert not ours._forward_hooks and not ours._forward_pre_hooks and not hasattr(ours.lm_head, "cce_task")
    assert_same_step(stock, ours)
    assert_same_step(stock, other)
    cce_dist.require(other)
    cce_dist.revert(other)
    assert type(other.lm_head) is nn.Linear and not other._forward_hooks


def test_no_gradients_and_no_labels_give_logits() -> None:
    stock, ours = pair()
    with torch.no_grad():
        for train in (True, False):
            logits = ours.train(train)(batch())["logits"]
            assert type(logits) is Tensor
            torch.testing.assert_close(logits, stock(batch())["logits"])


LOOKS: dict[str, Callable] = {
    "detach": lambda x: x.detach() + 0,
    "numpy": lambda x: torch.from_numpy(x.detach().cpu().numpy()),
    "argmax": lambda x: x.argmax(-1),
    "list": lambda x: torch.cat([x, x]),
    "arithmetic": lambda x: (1 - x) * torch.ones(VOCAB) >= 0,
    "index": lambda x: x[..., 3],
    "softmax": lambda x: torch.softmax(x, -1),
    "loss": lambda x: F.cross_entropy(x.view(-1, VOCAB), batch().view(-1)),
    "in-place": lambda x: torch.zeros(x.shape).copy_(x),
    "float": lambda x: x.float().double(),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_evaluation_may_look_at_logits(look: Callable, dense: list[int]) -> None:
    stock, ours = (model.eval() for model in pair())
    with torch.no_grad():
        expected, got = (model(batch(), labels=batch()) for model in (stock, ours))
        torch.testing.assert_close(got["loss"], expected["loss"])
        logits = got["logits"]
        assert isinstance(logits, Tensor) and logits.shape == (BATCH, LENGTH, VOCAB) and logits.dtype == torch.float32
        assert logits.detach().dim() == 3 and dense == [0]
        torch.testing.assert_close(look(logits), look(expected["logits"]))
        look(logits)
    assert dense == [1]


def test_evaluation_with_gradients_may_look_too(dense: list[int]) -> None:
    stock, ours = (model.eval() for model in pair())
    for model in (stock, ours):
        logits = model(batch(), labels=batch())["logits"]
        (logits.softmax(-1) ** 2).sum().backward()
    assert dense == [1]
    torch.testing.assert_close(ours.lm_head.weight.grad, stock.lm_head.weight.grad)


def test_logits_on_demand_pass_for_a_tensor_from_outside_python(dense: list[int]) -> None:
    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Tensor) -> Tensor:
            return tensor.detach()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            return gradients[0]

    _, ours = pair()
    with torch.no_grad():
        logits = ours.eval()(batch(), labels=batch())["logits"]
        assert isinstance(Same.apply(logits), OnDemand) and dense == [0]  # DeepSpeed does so to all outputs
        assert "OnDemand" in repr(logits) and dense == [0]


def test_columns_that_pad_the_vocabulary_can_be_cut() -> None:
    stock, ours = pair()
    ids = batch().clamp(max=VOCAB - 6)
    for model in (stock, ours):
        logits = model(ids)["logits"][..., :-5]
        assert logits.shape[-1] == VOCAB - 5
        loss_of(logits, ids).backward()
    torch.testing.assert_close(ours.lm_head.weight.grad, stock.lm_head.weight.grad)


def test_a_training_forward_that_never_asked_raises() -> None:
    _, ours = pair(ReadsTheWeight)
    for _ in range(2):  # and again: the forward that raised has ended
        with pytest.raises(RuntimeError, match="ended without asking the head for its loss"):
            ours(batch(), labels=batch())
    with torch.no_grad():
        ours(batch(), labels=batch())
    ours.eval()(batch(), labels=batch())


def test_an_error_of_the_model_stays_its_own() -> None:
    _, ours = pair()
    with pytest.raises(IndexError):
        ours(batch() + VOCAB, labels=batch())
    assert ours.lm_head.cce_task.calls == []


def test_compiled_code_is_compiled_once() -> None:
    stock, ours = pair()
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(ours, backend=counter)
    for _ in range(4):
        loss = compiled(batch(), labels=batch())["loss"]
    torch.testing.assert_close(loss, stock(batch(), labels=batch())["loss"])
    first = counter.frame_count
    compiled(batch(), labels=batch())["loss"].backward()
    assert counter.frame_count == first
    cce_dist.require(compiled)


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        pytest.param(Model, {"fliter": "plain"}, 'cce_dist.convert has no key "fliter"', id="unknown"),
        pytest.param(Model, {"filter_eps": 2}, "cce_dist.convert: filter_eps must be in", id="range"),
        pytest.param(Model, {"head": "output"}, "which Model does not have", id="name"),
        pytest.param(lambda: nn.Sequential(nn.Linear(2, 2)), {}, "found none", id="none"),
        pytest.param(lambda: nn.ModuleDict({"lm_head": nn.Embedding(2, 2)}), {}, "that is a Embedding", id="class"),
    ],
)
def test_a_refusal_is_one_line(build: Callable, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        cce_dist.convert(build(), **options)
    assert "\n" not in str(error.value)


def test_label_smoothing_of_the_caller_says_what_to_do() -> None:
    _, ours = pair()
    with pytest.raises(AttributeError, match="label smoothing is an option of the conversion"):
        F.log_softmax(ours(batch())["logits"], dim=-1)


def test_import_stays_light() -> None:
    code = (
        "import sys, cce_dist; sys.exit(any('integrations' in name or name == 'transformers' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_one_line_says_that_it_is_in_use(caplog: pytest.LogCaptureFixture) -> None:
    pair(filter="compensated")
    lines = [record.getMessage() for record in caplog.records if record.name == "cce_dist"]
    assert len(lines) == 1 and "head lm_head" in lines[0] and "GradFilter" in lines[0]


def sharded(order: str, head_too: bool) -> tuple[Any, Any]:
    from torch.distributed.fsdp import fully_shard

    stock, ours = pair()
    if order == "converted after":
        cce_dist.revert(ours)
    for model in (stock, ours):
        if head_too:
            fully_shard(model.lm_head)
        fully_shard(model, reshard_after_forward=True)
    return stock, cce_dist.convert(ours)


def under_fsdp2() -> None:
    for order in ("converted before", "converted after"):
        for head_too in (False, True):
            stock, ours = sharded(order, head_too)
            assert_same_step(stock, ours)
            with torch.no_grad():
                expected, got = (model.eval()(batch(), labels=batch())["logits"] for model in (stock, ours))
                torch.testing.assert_close(got.float() + 0, expected)  # gathers the weight anew
            ours.train()
            with pytest.raises(RuntimeError, match="must be computed in the model's forward"):
                loss_of(ours(batch())["logits"], batch())
    with pytest.raises(ValueError, match="changed again"):
        cce_dist.revert(sharded("converted before", True)[1])
    assert dist.get_world_size() == 2


def test_fsdp2(ranks2: Callable) -> None:
    ranks2(under_fsdp2)
