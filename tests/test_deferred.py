"""The deferral without any framework: a head, its deferred logits, and a model's own loss code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cce_dist import GradFilter, VocabShard
from cce_dist.integrations.deferred import NotComputedError, Task, TensorLogits, find_head, give_back, take
from cce_dist.integrations.options import FILTERS, ModelOptions, Options, named_filter

HIDDEN, VOCAB, SEQ, BATCH = 16, 37, 6, 2
IGNORED = -100


class Model(nn.Module):
    """A model that computes its loss in forward, as those of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> tuple[Any, Any]:
        logits = self.lm_head(self.embed(ids))
        return None if labels is None else flat(logits, labels), logits


def converted(options: ModelOptions | None = None) -> Any:
    """Return a model that defers, by the public functions that an adapter for plain PyTorch would call."""
    torch.manual_seed(0)
    model = Model()
    _, head = find_head(model)
    task = Task(options or ModelOptions(), VocabShard(0, VOCAB, VOCAB))
    task.watch(model)
    take(head, task)
    return model


def deferring_head(options: ModelOptions) -> tuple[Any, Task]:
    head = nn.Linear(HIDDEN, VOCAB, bias=False)
    task = Task(options, VocabShard(0, VOCAB, VOCAB), calls=[True])
    take(head, task)
    return head, task


def flat(logits: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1))


def causal(logits: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, logits.size(-1)), labels[:, 1:].flatten())


def capped(logits: Any, labels: Tensor) -> Tensor:
    logits = torch.tanh(0.5 * logits / 3.0) * 3.0
    return nn.CrossEntropyLoss(label_smoothing=0.1)(logits.float().reshape((-1, VOCAB)), labels.view(-1))


def picked(logits: Any, labels: Tensor) -> Tensor:
    kept = labels != IGNORED
    return F.cross_entropy(logits[kept] * 2, labels[kept], reduction="sum") + F.cross_entropy(
        logits[0, 1:], labels[0, 1:]
    )


def biased(logits: Any, labels: Tensor) -> Tensor:
    """As BART's family does: the bias is a buffer of the model, [1, V]."""
    return flat(torch.tanh((logits + torch.arange(VOCAB).sin()[None]) * 0.5) * 3, labels)


def some_labels() -> Tensor:
    labels = torch.randint(VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))
    labels[0, 2] = labels[1, 4] = IGNORED
    return labels


@pytest.mark.parametrize("loss", [flat, causal, capped, picked, biased])
def test_deferred_logits_meet_the_users_own_loss(loss: Callable) -> None:
    hidden, labels = torch.randn(BATCH, SEQ, HIDDEN, requires_grad=True), some_labels()
    head, task = deferring_head(ModelOptions())
    results = []
    for logits in (F.linear(hidden, head.weight), TensorLogits(head, task, hidden)):
        value = loss(logits, labels)
        results.append((value, *torch.autograd.grad(value, [hidden, head.weight])))
    for expected, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=2e-5, atol=1e-6)


def test_options_reach_the_loss() -> None:
    hidden, labels = torch.randn(5, HIDDEN), torch.arange(5)
    head, task = deferring_head(
        ModelOptions(label_smoothing=0.2, z_loss_weight=0.5, grad_filter=GradFilter(), backend="torch")
    )
    logits = F.linear(hidden, head.weight)
    expected = F.cross_entropy(logits, labels, label_smoothing=0.2) + 0.5 * logits.logsumexp(-1).square().mean()
    torch.testing.assert_close(flat(TensorLogits(head, task, hidden), labels), expected)


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda x: x[..., 0], id="column"),
        pytest.param(lambda x: x[..., 1:], id="columns"),
        pytest.param(lambda x: x[0, 0, 0], id="element"),
        pytest.param(lambda x: x[None], id="none"),
        pytest.param(lambda x: x.argmax(-1), id="argmax"),
        pytest.param(lambda x: torch.softmax(x, -1), id="softmax"),
        pytest.param(lambda x: x * torch.ones(()), id="tensor-factor"),
        pytest.param(lambda x: torch.ones(()) * x, id="factor-tensor"),
        pytest.param(lambda x: x + 1, id="sum"),
        pytest.param(lambda x: x + torch.ones(SEQ, 1), id="sum-of-tokens"),
        pytest.param(lambda x: 2 * x + torch.ones(VOCAB), id="bias-behind-a-factor"),
        pytest.param(lambda x: x[..., :5] + torch.ones(VOCAB), id="bias-of-more-ids"),
        pytest.param(lambda x: x + torch.ones(VOCAB) + torch.ones(VOCAB), id="two-biases"),
        pytest.param(lambda x: x.tanh().tanh(), id="two-tanh"),
        pytest.param(lambda x: abs(x), id="abs"),
        pytest.param(lambda x: x % 2, id="remainder"),
        pytest.param(lambda x: x == 0, id="equal"),
        pytest.param(lambda x: x.__setitem__(0, 0.0), id="assignment"),
        pytest.param(lambda x: x.flatten(), id="flatten"),
        pytest.param(lambda x: x.view(-1, VOCAB + 1), id="view"),
        pytest.param(lambda x: F.cross_entropy(x, torch.zeros(BATCH, SEQ).long()), id="not-flat"),
        pytest.param(lambda x: F.cross_entropy(x[0], torch.ones(SEQ, VOCAB)), id="probabilities"),
        pytest.param(lambda x: F.cross_entropy(x[0], torch.zeros(SEQ).long(), torch.ones(VOCAB)), id="class-weights"),
        pytest.param(lambda x: F.cross_entropy(torch.ones(SEQ, VOCAB), x), id="as-target"),
    ],
)
def test_other_uses_of_deferred_logits_raise(use: Callable) -> None:
    head, task = deferring_head(ModelOptions())
    with pytest.raises((NotComputedError, ValueError)):
        use(TensorLogits(head, task, torch.randn(BATCH, SEQ, HIDDEN)))


def test_head_inside_a_reentrant_checkpoint_raises() -> None:
    head, task = deferring_head(ModelOptions())
    with torch.no_grad():
        logits: Any = TensorLogits(head, task, torch.randn(SEQ, HIDDEN))
    with pytest.raises(RuntimeError, match="ran without gradients"):
        F.cross_entropy(logits, torch.zeros(SEQ, dtype=torch.long))


def test_options_are_for_training_alone() -> None:
    model, plain = converted(ModelOptions(label_smoothing=0.2, z_loss_weight=0.5)), converted()
    ids, labels = torch.zeros(BATCH, SEQ, dtype=torch.long), some_labels()
    assert model(ids, labels)[0] > plain(ids, labels)[0] + 1
    model.eval()
    torch.testing.assert_close(model(ids, labels)[0], plain(ids, labels)[0])


def test_logits_are_deferred_in_training_or_with_labels() -> None:
    model, ids = converted(), torch.zeros(BATCH, SEQ, dtype=torch.long)
    assert isinstance(model(ids)[1], TensorLogits)
    assert isinstance(model.eval()(ids, labels=ids)[1], TensorLogits)
    assert isinstance(model(ids)[1], Tensor) and isinstance(model.lm_head(torch.zeros(1, HIDDEN)), Tensor)
    with torch.no_grad():
        assert isinstance(model.train()(ids)[1], Tensor)  # ``generate``, and the passes of a reference model


def test_a_copy_defers_by_its_own_mode() -> None:
    model, ids = converted(), torch.zeros(BATCH, SEQ, dtype=torch.long)
    average = copy.deepcopy(model).eval()
    assert isinstance(average(ids)[1], Tensor) and isinstance(model.train()(ids)[1], TensorLogits)
    average.train()(ids, labels=ids)[0].backward()
    assert average.lm_head.weight.grad is not None and model.lm_head.weight.grad is None
    assert (average.lm_head.cce_task.num_losses, model.lm_head.cce_task.num_losses) == (1, 0)
    inside = []
    model.embed.register_forward_hook(lambda *_: inside.append(average.lm_head(torch.zeros(1, HIDDEN))))
    model(ids)
    assert isinstance(inside[0], Tensor)  # the original's forward does not have the copy's head defer


def test_require_counts_training_alone() -> None:
    model, ids = converted(), torch.zeros(BATCH, SEQ, dtype=torch.long)
    task = model.lm_head.cce_task
    model.eval()(ids, labels=ids)
    with torch.no_grad():
        model.train()(ids)
    task.require("lm_head")
    model(ids)
    with pytest.raises(RuntimeError, match="none asked the head lm_head for its loss"):
        task.require("lm_head")
    model(ids, labels=ids)
    task.require("lm_head")


def test_take_can_be_undone() -> None:
    model = converted()
    names, head = list(model.state_dict()), model.lm_head
    assert (type(head).__name__, type(head).__qualname__) == ("Linear", "Linear") and names == list(
        Model().state_dict()
    )
    give_back(head)
    assert type(head) is nn.Linear and not any(name.startswith("cce") for name in vars(head))


def replaced_forward() -> nn.Module:
    model = Model()
    model.lm_head.forward = model.lm_head.forward  # as accelerate's hooks do
    return model


@pytest.mark.parametrize(
    ("model", "name", "message"),
    [
        pytest.param(nn.Sequential(nn.Linear(4, 4)), "", 'found none: name it in "cce_dist.head"', id="none"),
        pytest.param(
            nn.ModuleDict({"lm_head": nn.Linear(4, 4), "embed_out": nn.Linear(4, 4)}),
            "",
            "found lm_head, emb",
            id="two",
        ),
        pytest.param(Model(), "output", "which Model does not have", id="name"),
        pytest.param(Model(), "embed", "a head that is a Embedding", id="class"),
        pytest.param(replaced_forward(), "", "somebody has replaced its forward", id="forward"),
    ],
)
def test_heads_that_cannot_be_taken_over(model: nn.Module, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_head(model, name)


def test_options_are_read_from_names() -> None:
    def spell(key: str) -> str:
        return f"--{key}"

    values = {"filter": "plain", "filter_eps": 0.01, "filter_weight": False, "reduce_dtype": "float32"}
    expected = ModelOptions(GradFilter(0.01, compensate=False, weight=False), reduce_dtype=torch.float32)
    assert ModelOptions.read(values, spell) == expected and ModelOptions.read({}, spell) == ModelOptions()
    assert [named_filter(name) for name in FILTERS] == [None, GradFilter(), GradFilter(compensate=False)]
    for wrong, message in (
        ({"reduce_dtype": "float32"}, 'the options has no key "reduce_dtype"'),
        ({"filter_eps": True}, "--filter_eps must be a number, got True"),
        ({"backend": "cuda"}, "--backend must be one of auto, triton, torch, got 'cuda'"),
    ):
        with pytest.raises(ValueError, match=message):
            Options.read(wrong, spell)
    with pytest.raises(ValueError, match="a filter must be one of off, compensated, plain, got 'exact'"):
        named_filter("exact")
