"""cce_dist.convert, revert and require on plain PyTorch models: deferred logits, loops, copies, evaluation, FSDP2, refusals."""

import copy
import inspect
import io
import operator
import threading
import types
from collections import namedtuple
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.ranks import run_ranks
from support.refused import refused
from tiny_trainer import counted
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn.modules import module as modules
from torch.nn.utils import parametrizations

import cce_dist
from cce_dist import reference
from cce_dist.integrations.deferred import tensor as deferred_tensor
from cce_dist.integrations.deferred.logits import NotComputedError, OnDemand
from cce_dist.integrations.deferred.tensor import TensorLogits

HIDDEN, VOCAB, LENGTH, BATCH = 16, 37, 6, 2
IGNORED = -100


class Model(nn.Module):
    """A model that computes its loss in forward if it is given labels, as those of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        logits = self.logits(self.embed(ids))
        return {"loss": None if labels is None else loss_of(logits, labels), "logits": logits}

    def logits(self, hidden: Tensor) -> Any:
        return self.lm_head(hidden)


class BiasOutside(Model):
    """Adds a bias to its logits that the head does not know, as BART does, and hands its hidden states out."""

    hidden: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.final_logits_bias = nn.Buffer(torch.randn(1, VOCAB))

    def logits(self, hidden: Tensor) -> Any:
        self.hidden = hidden
        return self.lm_head(hidden) + self.final_logits_bias


def loss_of(logits: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(2.0 * logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1))


def pair(kind: type = Model, **options: Any) -> tuple[Any, Any]:
    """Return a model and a converted copy."""
    torch.manual_seed(0)
    stock = kind()
    return stock, cce_dist.convert(copy.deepcopy(stock), **options)


def batch() -> Tensor:
    return torch.randint(VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))


def forward(model: Any) -> Tensor:
    return model(batch(), labels=batch())["loss"]


def assert_same_step(stock: Any, ours: Any, loss: Callable[[Any], Tensor] = forward, **tolerance: float) -> None:
    losses = []
    for model in (stock, ours):
        model.zero_grad()
        losses.append(loss(model))
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(*([p.grad for p in model.parameters()] for model in (ours, stock)), **tolerance)


def test_a_converted_model_trains_as_it_did() -> None:
    stock, ours = pair()
    with pytest.raises(RuntimeError, match=r"was converted: call cce_dist.convert\(model\)"):
        cce_dist.require(stock)
    with pytest.raises(RuntimeError, match="call require after the first step"):
        cce_dist.require(ours)
    assert_same_step(stock, ours)
    cce_dist.require(ours)
    assert list(ours.state_dict()) == list(stock.state_dict())
    assert cce_dist.convert(ours, z_loss_weight=0.5) is ours and ours.lm_head.cce_task.options.z_loss_weight == 0.5
    assert cce_dist.convert(ours).lm_head.cce_task.options.z_loss_weight == 0.5
    chosen = cce_dist.GradFilter(0.1)
    assert cce_dist.convert(ours, grad_filter=chosen).lm_head.cce_task.options.grad_filter is chosen


def capped(logits: Any, labels: Tensor) -> Tensor:
    logits = torch.tanh(0.5 * logits / 3.0) * 3.0
    return nn.CrossEntropyLoss(label_smoothing=0.1)(logits.float().reshape((-1, VOCAB)), labels.view(-1))


def picked(logits: Any, labels: Tensor) -> Tensor:
    kept = labels != IGNORED
    one = F.cross_entropy(logits[kept] * 2, labels[kept], reduction="sum")
    return one + F.cross_entropy(logits[0, 1:], labels[0, 1:])


def cut_short(logits: Any, labels: Tensor) -> Tensor:
    """Without the columns that pad the vocabulary."""
    assert logits[..., :-5].shape[-1] == VOCAB - 5
    return loss_of(logits[..., :-5], labels.clamp(max=VOCAB - 6))


def weighed(logits: Any, labels: Tensor) -> Tensor:
    """By class, and with the arguments that torch had before ``reduction``."""
    weights = torch.arange(1.0, 1 + VOCAB)
    logits, labels = logits.view(-1, VOCAB), labels.view(-1)
    one = F.cross_entropy(logits, labels, weights, label_smoothing=0.1)
    return one + F.cross_entropy(logits, labels, weights, size_average=False)


BIAS = torch.arange(VOCAB).sin()[None]  # as a buffer of BART's family is
LOSSES: dict[str, Callable] = {
    "plain": loss_of, "capped": capped, "picked": picked, "cut-short": cut_short, "weighed": weighed,
    "causal": lambda x, y: F.cross_entropy(x[..., :-1, :].contiguous().view(-1, x.size(-1)), y[:, 1:].flatten()),
    "biased": lambda x, y: loss_of(torch.tanh((x + BIAS) * 0.5) * 3, y),
}  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_deferred_logits_meet_the_users_own_loss(loss: Callable) -> None:
    """In a loop of training, behind the model's forward, where the weight is whole on one GPU and under DDP."""
    stock, ours = pair()
    labels = batch()
    labels[0, 2] = labels[1, 4] = IGNORED
    assert_same_step(stock, ours, lambda model: loss(model(batch())["logits"], labels), rtol=2e-5, atol=1e-6)


def _ddp_alone() -> None:
    labels = batch()
    ways: list[dict[str, Any]] = [{}, {"find_unused_parameters": True}, {"static_graph": True}]
    for options in ways:
        stock, ours = pair()
        models = [nn.parallel.DistributedDataParallel(model, **options) for model in (stock, ours)]
        assert_same_step(*models)
        logits = models[1](labels)["logits"]
        if not options:
            loss_of(logits, labels).backward()
            continue
        with pytest.raises(RuntimeError, match="give the model labels, or leave these options off"):
            loss_of(logits, labels)


def test_a_loss_outside_of_forward_that_ddp_would_not_find_is_refused() -> None:
    """Catches gradients that nobody reduces. DDP finds the graph in the output's tensors, and deferred logits are none."""
    run_ranks(_ddp_alone, 1)


USES: dict[str, Callable] = {
    "column": lambda x: x[..., 0],
    "tensor-factor": lambda x: x * torch.ones(()),
    "tensor-divisor": lambda x: x / torch.ones(()),
    "sum": lambda x: x + 1,
    "sum-of-tokens": lambda x: x + torch.ones(LENGTH, 1),
    "bias-behind-a-factor": lambda x: 2 * x + torch.ones(VOCAB),
    "bias-of-more-ids": lambda x: x[..., :5] + torch.ones(VOCAB),
    "two-tanh": lambda x: x.tanh().tanh(),
    "equal": lambda x: x == 0,
    "assignment": lambda x: x.__setitem__(0, 0.0),
    "view": lambda x: x.view(-1, VOCAB + 1),
    "other-length": lambda x: F.cross_entropy(x[0], batch()[0, 1:]),
    "not-flat": lambda x: F.cross_entropy(x, batch()),
    "probabilities": lambda x: F.cross_entropy(x[0], torch.ones(LENGTH, VOCAB)),
    "as-target": lambda x: F.cross_entropy(torch.ones(LENGTH, VOCAB), x),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_other_uses_of_deferred_logits_raise(use: Callable) -> None:
    with pytest.raises((NotComputedError, ValueError)):
        use(pair()[1](batch())["logits"])


def test_another_loss_is_told_what_computes_it() -> None:
    """Catches: uses whose error names no function that serves them, a conversion by numpy that raises another error."""
    logits = pair()[1](batch())["logits"]
    assert repr(logits) == f"TensorLogits([{BATCH}, {LENGTH}, {VOCAB}], torch.float32, not computed)"
    uses: list[Callable] = [
        lambda x: x.log_softmax(-1), lambda x: torch.logsumexp(x, -1), lambda x: x.gather(-1, batch()[..., None]),
        lambda x: x.topk(3), np.array,
    ]  # fmt: skip
    for use in uses:
        with refused(r"linear_log_probs, .*token_loss=.*z_loss_weight", NotComputedError):
            use(logits)


def test_a_loss_that_would_have_no_gradient_or_other_smoothing_raises() -> None:
    head = pair()[1].lm_head
    head.cce_task.calls = [True]
    with pytest.raises(AttributeError, match="label smoothing is an option of the conversion"):
        F.log_softmax(head(torch.ones(1, HIDDEN)), dim=-1)
    with torch.no_grad():
        logits = head(torch.ones(1, HIDDEN))  # inside of a reentrant checkpoint
    with pytest.raises(RuntimeError, match="ran without gradients"):
        F.cross_entropy(logits, batch()[0, :1])


def test_options_are_for_training_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Catches options, and a count, that follow the mode of the head alone."""
    stock, ours = pair(label_smoothing=0.2, z_loss_weight=0.5, filter="compensated", backend="torch")
    lines = [record.getMessage() for record in caplog.records if record.name == "cce_dist"]
    assert len(lines) == 1 and "head lm_head" in lines[0] and "GradFilter" in lines[0]
    ours.lm_head.eval()
    logits = 2 * stock(batch())["logits"]
    expected = reference.cross_entropy(logits, batch(), label_smoothing=0.2, z_loss_weight=0.5).loss
    torch.testing.assert_close(ours(batch(), labels=batch())["loss"], expected)
    cce_dist.require(ours)
    plain = stock(batch(), labels=batch())["loss"]
    torch.testing.assert_close(ours.eval()(batch(), labels=batch())["loss"], plain)


@pytest.mark.parametrize("through", ["deepcopy", "file"])
def test_a_copy_is_a_converted_model_of_its_own(through: str) -> None:
    stock, ours = pair()
    ours(batch(), labels=batch())
    if through == "deepcopy":
        other = copy.deepcopy(ours)
        assert other.lm_head.cce_task.num_losses == 0
    else:
        file = io.BytesIO()
        torch.save(ours, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert isinstance(other.eval()(batch())["logits"], Tensor) and isinstance(ours(batch())["logits"], TensorLogits)
    inside: list[Any] = []
    hook = ours.embed.register_forward_hook(lambda *_: inside.append(other.lm_head(torch.zeros(1, HIDDEN))))
    ours(batch())
    hook.remove()
    assert isinstance(inside[0], Tensor)  # the original's forward does not have the copy's head defer
    assert type(ours.lm_head).__name__ == type(ours.lm_head).__qualname__ == "Linear"
    cce_dist.revert(ours)
    assert type(ours.lm_head) is nn.Linear and isinstance(ours(batch())["logits"], Tensor)
    assert type(ours) is Model and not hasattr(ours, "cce_task") and not hasattr(ours.lm_head, "cce_task")
    assert_same_step(stock, ours)
    assert_same_step(stock, other.train())
    cce_dist.require(other)
    cce_dist.revert(other)
    assert type(other.lm_head) is nn.Linear and type(other) is Model


LOOKS: dict[str, Callable] = {
    "detach": lambda x: x.detach() + 0,
    "numpy": lambda x: torch.from_numpy(x.detach().cpu().numpy()),
    "list": lambda x: torch.cat([x, x]),
    "arithmetic": lambda x: (1 - x) * torch.ones(VOCAB) >= 0,
    "loss": lambda x: F.cross_entropy(x.view(-1, VOCAB), batch().view(-1)),
    "in-place": lambda x: torch.zeros(x.shape).copy_(x),
}


# A function of autograd, which takes its argument in C++.
Same: Any = type("Same", (torch.autograd.Function,), {"forward": staticmethod(lambda ctx, tensor: tensor.detach())})


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_evaluation_may_look_at_logits(look: Callable) -> None:
    stock, ours = (model.eval() for model in pair(BiasOutside))
    with torch.no_grad(), counted(deferred_tensor, "dense") as dense:
        expected, got = (model(batch(), labels=batch()) for model in (stock, ours))
        torch.testing.assert_close(got["loss"], expected["loss"])
        logits = got["logits"]
        assert isinstance(logits, Tensor) and logits.shape == (BATCH, LENGTH, VOCAB) and logits.dtype == torch.float32
        assert logits.detach().dim() == 3 and "OnDemand" in repr(logits)
        assert isinstance(Same.apply(logits), OnDemand)  # DeepSpeed applies a function to all outputs
        assert not dense.called
        torch.testing.assert_close(look(logits), look(expected["logits"]))
        look(logits)
    assert dense.call_count == 1


def train_through_data(model: Any) -> None:
    """A step whose optimizer changes no version, as DeepSpeed's optimizers do."""
    with torch.enable_grad():
        model.train()(batch(), labels=batch())["loss"].backward()
    for parameter in model.parameters():
        parameter.data.sub_(parameter.grad)
    model.eval()


def step(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), 0.1).step()


CHANGES: dict[str, Callable] = {
    "training": train_through_data,
    "optimizer": step,
    "load": lambda model: model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}),
    "bias": lambda model: model.lm_head.bias.zero_(),
}


class Bare(Model):
    """Computes no loss, and answers in a form of its own."""

    output: Callable = staticmethod(lambda logits: logits)

    def forward(self, ids: Tensor, labels: Tensor | None = None, shift_labels: Tensor | None = None) -> Any:
        return self.output(self.logits(self.embed(ids)))


class Named(Bare):
    output = namedtuple("Output", "logits")


class Hidden(Bare):
    output = staticmethod(lambda logits: types.SimpleNamespace(logits=logits))


STALE: dict[str, tuple[type, Callable]] = {name: (BiasOutside, change) for name, change in CHANGES.items()}
STALE |= {"named tuple": (Named, step), "object": (Hidden, step)}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize(("kind", "change"), STALE.values(), ids=STALE)
def test_stale_logits_of_evaluation_raise(kind: type, change: Callable, mode: Callable) -> None:
    """Catches logits of other weights than the loss beside them, also where an output hides them."""
    stock, ours = (model.eval() for model in pair(kind))
    with mode():
        outputs = [model(batch(), labels=batch()) for model in (stock, ours, ours)]
        expected, looked, unseen = (x["logits"] if isinstance(x, dict) else x.logits for x in outputs)
        torch.testing.assert_close(looked + 0, expected)
    with torch.no_grad():
        change(ours)
    torch.testing.assert_close(looked + 0, expected)
    with pytest.raises(RuntimeError, match=r"these logits are stale: .* after the forward"):
        unseen.argmax(-1)


def test_stale_hidden_states_raise_before_they_are_copied() -> None:
    """Catches a part of changed hidden states that is taken for what the head was called with."""
    _, ours = pair(BiasOutside)
    for trains, with_grad in ((True, True), (False, True), (False, False)):
        with torch.set_grad_enabled(with_grad):
            logits = ours.train(trains)(batch(), labels=batch())["logits"]
        with torch.no_grad():
            ours.hidden.mul_(2)
        with pytest.raises(RuntimeError, match="stale: the hidden states changed"):
            logits[batch() > 3]


def test_a_loss_behind_the_forward_is_of_its_weights() -> None:
    _, ours = pair()
    for model in (ours.train(), ours.eval()):
        logits = model(batch(), labels=batch())["logits"]
        loss_of(logits, batch())
        step(model)
        with pytest.raises(RuntimeError, match="stale: the head's weight or bias changed"):
            loss_of(logits, batch())


def test_a_loss_may_follow_another_forward_in_training() -> None:
    """Two batches, then the loss of the first. Catches: logits of training that are stale as soon as another forward begins."""
    stock, ours = pair()
    logits = [model(batch())["logits"] for model in (stock, ours)]
    ours(batch(), labels=batch())
    losses = [loss_of(x, batch()) for x in logits]
    torch.testing.assert_close(losses[1], losses[0])


IN_PLACE: dict[str, Callable] = {
    "method": lambda x: x.div_(2),
    "function": lambda x: torch.relu_(x),
    "argument": lambda x: F.relu(x, inplace=True),
    "out": lambda x: torch.mul(torch.ones(()), 2, out=x),
    "assignment": lambda x: x.__setitem__((..., 0), 0.0),
    "view": lambda x: x[..., 0].fill_(9.0),
    "operator": lambda x: operator.itruediv(x, 2),
}


@pytest.mark.parametrize("change", IN_PLACE.values(), ids=IN_PLACE)
def test_changes_in_place_before_a_loss_raise(change: Callable) -> None:
    """Catches a change of a copy that the loss does not know."""

    def changed(hidden: Tensor) -> Any:
        logits = ours.lm_head(hidden)
        change(logits)
        return logits

    _, ours = pair()
    ours.logits = changed
    with torch.no_grad(), pytest.raises((TypeError, RuntimeError), match=r"in place|logits computed before changed"):
        ours.eval()(batch(), labels=batch())


def add_hooks(model: Any, everywhere: bool) -> list[Any]:
    """Add hooks that draw a dropout before the head, and double its logits."""
    before, after = model.lm_head.register_forward_pre_hook, model.lm_head.register_forward_hook
    if everywhere:
        before, after = modules.register_module_forward_pre_hook, modules.register_module_forward_hook

    def drop(module: nn.Module, args: Any) -> Any:
        return (F.dropout(args[0], 0.5),) if isinstance(module, nn.Linear) else None

    def double(module: nn.Module, args: Any, output: Any) -> Any:
        return output * 2 if isinstance(module, nn.Linear) else None

    return [before(drop), after(double)]


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("train", [False, True])
def test_hooks_on_the_head_get_hidden_states_and_logits(train: bool, everywhere: bool) -> None:
    """Catches a hook that scales the loss in place of logits, or runs again for the loss, and draws another dropout."""
    found = []
    for model in pair():
        hooks = add_hooks(model.train(train), everywhere)
        torch.manual_seed(3)
        found.append(model(batch(), labels=batch()))
        for hook in hooks:
            hook.remove()
        found[-1]["loss"].backward()
        found[-1]["gradient"] = model.lm_head.weight.grad
    stock, ours = found
    for name in ("loss", "gradient"):
        torch.testing.assert_close(ours[name], stock[name])
    if not train:
        torch.testing.assert_close(ours["logits"] + 0, stock["logits"])


@pytest.mark.parametrize("name", ["full_backward_hook", "full_backward_pre_hook"])
@pytest.mark.parametrize("everywhere", [False, True])
def test_a_hook_for_the_gradient_of_logits_is_refused(everywhere: bool, name: str) -> None:
    """Catches a kind of hook that nobody looks for: it would get the gradient of the loss, or never run."""
    _, ours = pair()
    owner, register = (torch.nn.modules.module, "register_module_") if everywhere else (ours.lm_head, "register_")
    hook = getattr(owner, register + name)(lambda *_: None)
    try:
        with pytest.raises(ValueError, match=r"the head has the hook .* of test_convert, which"):
            ours(batch(), labels=batch())
    finally:
        hook.remove()


@pytest.mark.parametrize("calls_forward", [False, True])
def test_forward_may_be_called_past_hooks(calls_forward: bool) -> None:
    """Catches logits that are made where nobody sees the call."""
    stock, ours = pair()
    if calls_forward:
        ours.logits = lambda hidden: ours.lm_head.forward(hidden)
    assert list(inspect.signature(ours.forward).parameters) == ["ids", "labels"]
    found = ours.forward(batch(), labels=batch())
    assert isinstance(found["logits"], TensorLogits)
    torch.testing.assert_close(found["loss"], stock(batch(), labels=batch())["loss"])
    torch.testing.assert_close(loss_of(ours.forward(batch())["logits"], batch()), found["loss"])
    cce_dist.require(ours)
    with torch.no_grad():
        logits = ours.eval().forward(batch(), labels=batch())["logits"]
        torch.testing.assert_close(logits + 0, stock(batch())["logits"])


def test_the_loss_is_of_the_weight_that_the_head_was_called_with() -> None:
    """A weight that is computed at each use. test_peft.py has weights that are replaced for a call."""
    stock, ours = pair()
    for model in (stock, ours):
        parametrizations.weight_norm(model.lm_head)
        with torch.no_grad():
            model.lm_head.parametrizations.weight.original0.mul_(2)
    assert_same_step(stock, ours)
    torch.testing.assert_close(loss_of(ours(batch())["logits"], batch()), loss_of(stock(batch())["logits"], batch()))
    with torch.no_grad():
        expected, got = (model.eval()(batch(), labels=batch()) for model in (stock, ours))
    torch.testing.assert_close(got["logits"] + 0, expected["logits"])


def test_weights_of_a_functional_call_outlive_it() -> None:
    stock, ours = pair()
    weights: dict[str, Any] = {name: nn.Parameter(2 * x.detach()) for name, x in stock.named_parameters()}
    logits = [torch.func.functional_call(model, weights, (batch(),))["logits"] for model in (stock, ours)]
    torch.testing.assert_close(loss_of(logits[1], batch()), loss_of(logits[0], batch()))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")])
def test_dtypes_are_the_stocks(dtypes: tuple[str, str], autocast: bool) -> None:
    """Catches a head in another dtype than its model, whose logits claim the dtype of the hidden states."""
    model, head = (getattr(torch, name) for name in dtypes)
    stock, ours = pair()
    for each in (stock, ours):
        each.to(model).lm_head.to(head)
        each.lm_head.register_forward_pre_hook(lambda module, args: (args[0].to(module.weight.dtype),))
    ids = batch()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        losses = [F.cross_entropy(each(ids)["logits"].view(-1, VOCAB), ids.view(-1)) for each in (ours, stock)]
        with torch.no_grad():
            logits = [each.eval()(ids, labels=ids)["logits"] for each in (ours, stock)]
    assert losses[0].dtype == losses[1].dtype
    assert logits[0].dtype == (logits[0] + 0).dtype == logits[1].dtype
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(logits[0] + 0, logits[1], rtol=2e-2, atol=2e-2)


QUANTIZED: dict[str, Callable] = {
    "subclass": lambda weight: weight.as_subclass(type("Quantized", (Tensor,), {})),
    "float8": lambda weight: weight.to(torch.float8_e4m3fn),
    "int8": lambda weight: weight.to(torch.int8),
}


@pytest.mark.parametrize("quantize", QUANTIZED.values(), ids=QUANTIZED)
def test_a_quantized_head_is_refused(quantize: Callable) -> None:
    stock, ours = pair()
    for model in (stock, ours):
        model.lm_head.weight = nn.Parameter(quantize(model.lm_head.weight.detach()), requires_grad=False)
    with pytest.raises(ValueError, match=r"the weight of lm_head is .* a quantized one"):
        cce_dist.convert(stock)
    with pytest.raises(ValueError, match=r"the weight of the head is .* a quantized one"):
        ours(batch(), labels=batch())


def test_a_part_that_is_called_alone_is_told() -> None:
    """Catches a wrapper that was converted, whose model the loop calls: it computes its logits, and says nothing."""
    whole = nn.Module()
    whole.part = Model()
    cce_dist.convert(whole)
    with torch.no_grad():
        whole.part(batch())
    with pytest.raises(RuntimeError, match="call require after the first step"):
        cce_dist.require(whole)
    loss_of(whole.part(batch())["logits"], batch()).backward()
    with pytest.raises(RuntimeError, match="or called a part of the model that was converted"):
        cce_dist.require(whole)


def test_two_models_may_share_a_head() -> None:
    """Catches a second model that computes its logits, and says nothing."""
    stock, first = pair()
    second = copy.deepcopy(stock)
    second.lm_head = first.lm_head
    assert_same_step(stock, cce_dist.convert(second))
    assert first.lm_head.cce_task.num_losses == 1


@pytest.mark.parametrize("train", [False, True])
def test_replicas_and_threads_are_refused(train: bool) -> None:
    """Catches calls that share the state of one head. ``generate`` in several threads needs none of it."""
    stock, ours = pair()
    with pytest.raises(RuntimeError, match=r"as nn\.DataParallel does"):
        ours.train(train)._replicate_for_data_parallel()(batch(), labels=batch())
    inside, found = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        inside.set()
        found.wait(20)

    ours.embed.register_forward_hook(wait)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(forward, ours)
        inside.wait(20)
        try:
            with pytest.raises(RuntimeError, match="is called in several threads"):
                forward(ours)
        finally:
            found.set()
    torch.testing.assert_close(first.result(), forward(stock))


def test_labels_that_are_shifted_for_a_loss_outside() -> None:
    """Catches a training forward that is expected to compute the loss because it is given shifted labels."""
    stock, ours = pair(Bare)
    torch.testing.assert_close(*(loss_of(model(batch(), shift_labels=batch()), batch()) for model in (ours, stock)))


def test_a_training_forward_that_never_asked_raises() -> None:
    _, ours = pair()
    ours.logits = lambda hidden: F.linear(hidden, ours.lm_head.weight)  # as Liger's forward does
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
    with pytest.raises(IndexError, match=r"labels, which F\.cross_entropy gets as target: "):
        ours(batch(), labels=batch() + VOCAB)
    assert ours.lm_head.cce_task.calls == []


def test_compiled_code_is_compiled_once() -> None:
    """Catches: a graph break, an evaluation that is compiled anew after each step, logits that are no tensor."""
    stock, ours = pair()
    torch._dynamo.reset()
    is_one_graph = torch.__version__ >= "2.12"  # torch 2.11 does not compile copy.copy: an evaluation breaks the graph
    counter, counts = CompileCounter(), []
    compiled = torch.compile(ours, backend=counter, fullgraph=is_one_graph)
    expected = stock.eval()(batch(), labels=batch())
    for _ in range(5):
        if is_one_graph:
            with torch.no_grad():
                got = compiled.eval()(batch(), labels=batch())
            assert type(got["logits"]) is Tensor
            for name in ("loss", "logits"):
                torch.testing.assert_close(got[name], expected[name].detach())
        loss = compiled.train()(batch(), labels=batch())["loss"]
        torch.testing.assert_close(loss, expected["loss"])
        loss.backward()
        counts.append(counter.frame_count)
    assert counts[3] == counts[4]
    if is_one_graph:
        assert counts[0] == counts[4] == 2
    cce_dist.require(compiled)


def with_head(change: Callable) -> nn.Module:
    model = Model()
    change(model.lm_head)
    return model


REFUSED: dict[str, tuple] = {
    "unknown": (Model(), {"fliter": "plain"}, 'cce_dist.convert has no key "fliter"'),
    "range": (Model(), {"filter_eps": 2}, "cce_dist.convert: filter_eps must be in"),
    "name": (Model(), {"head": "output"}, r'which Model does not have: name it by convert\(model, head="lm_head"\)'),
    "module": (Model(), {"head": Model()}, "head must be a string, got Model"),
    "filter": (
        Model(),
        {"filter": cce_dist.GradFilter()},
        r'filter is "off", "compensated" or "plain"; pass grad_filter=GradFilter',
    ),
    "class": (Model(), {"head": "embed"}, "a head that is a Embedding"),
    "none": (nn.Sequential(nn.Linear(2, 2)), {}, r'found none: .*"cce_dist.head" .* has the Linear 0 \(2 rows\)'),
    "other name": (
        nn.ModuleDict({"embed": nn.Embedding(9, 4), "up": nn.Linear(4, 99), "output": nn.Linear(4, 9)}),
        {},
        r'convert\(model, head="output"\).* it has the Linear output \(9 rows\), up \(99 rows\)',
    ),
    "no linear": (nn.Embedding(9, 4), {}, "found none: it has no nn.Linear"),
    "two filters": (Model(), {"filter": "plain", "grad_filter": cce_dist.GradFilter()}, "leave one of them out"),
    "no filter": (Model(), {"grad_filter": "plain"}, "grad_filter must be a GradFilter or None, got str"),
    "two": (nn.ModuleDict({"lm_head": nn.Linear(4, 4), "embed_out": nn.Linear(4, 4)}), {}, "found lm_head, emb"),
    "forward": (with_head(lambda head: vars(head).update(forward=0)), {}, "somebody has replaced its forward"),
    "changes as it is read": (with_head(parametrizations.spectral_norm), {}, "spectral_norm takes a step whenever"),
    "another head": (cce_dist.convert(Model(), head="lm_head"), {"head": "embed"}, "but lm_head is converted"),
    "no model": (None, {}, "cce_dist.convert needs an nn.Module, got NoneType"),
}


@pytest.mark.parametrize(("model", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_a_refusal_is_one_line(model: Any, options: dict, message: str) -> None:
    with refused(message, (ValueError, TypeError)):
        cce_dist.convert(model, **options)


def sharded(order: str, head_too: bool) -> tuple[Any, Any]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    stock, ours = pair()
    if order == "converted after":
        cce_dist.revert(ours)
    for model in (stock, ours):
        if head_too:
            fully_shard(model.lm_head)
        fully_shard(model, reshard_after_forward=True, mp_policy=MixedPrecisionPolicy(output_dtype=torch.float64))
    return stock, cce_dist.convert(ours)


def under_fsdp2() -> None:
    for order in ("converted before", "converted after"):
        for head_too in (False, True):
            stock, ours = sharded(order, head_too)
            assert_same_step(stock, ours)
            with torch.no_grad():
                expected, got = (model.eval()(batch(), labels=batch())["logits"] for model in (stock, ours))
                torch.testing.assert_close(got + 0, expected)  # gathers the weight anew
                unseen = ours(batch(), labels=batch())["logits"]
            ours.train()(batch(), labels=batch())["loss"].backward()
            step(ours)
            with pytest.raises(RuntimeError, match="stale: a forward in training began"):
                unseen.argmax(-1)
            with pytest.raises(RuntimeError, match="must be computed in the model's forward"):
                loss_of(ours(batch())["logits"], batch())
    with pytest.raises(ValueError, match="changed again"):
        cce_dist.revert(sharded("converted before", True)[1])
    assert dist.get_world_size() == 2


@pytest.mark.slow
def test_fsdp2(ranks2: Callable) -> None:
    ranks2(under_fsdp2)
