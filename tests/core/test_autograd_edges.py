"""Derivatives that the loss does not have are refused in one line; those that it has are right, whoever asks.

And what a module must survive beside autograd: torch.compile with changing numbers, a default dtype, copies, pickles.
"""

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from shards import DEVICE
from support.dense import assert_holds, dense, draw
from support.refused import refused
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from cce_dist import (
    KeptIds,
    VocabParallelHead,
    VocabShard,
    groups,
    linear_cross_entropy,
    linear_kl_divergence,
    linear_log_probs,
    topk_kl_divergence,
)
from cce_dist.kernels.divergence.heads import KINDS
from cce_dist.tools.verify.cases import Gaussian, LossCase, ignore
from cce_dist.tools.verify.loss import RANDOM_LOSS

N, D, V = 7, 8, 20
any_call: Any = linear_cross_entropy  # options by name, and some that a type checker would refuse
SMOOTHED = dict(label_smoothing=0.1, softcap=5.0, z_loss_weight=0.01)


data = pytest.fixture(lambda: draw(N, D, V), name="data")


def second_grad(loss, hidden: Tensor, allow_unused: bool) -> Any:
    """Ask for a gradient penalty, whose first gradients are right."""
    (grad,) = torch.autograd.grad(loss(hidden), hidden, create_graph=True)
    assert torch.equal(grad, *torch.autograd.grad(loss(hidden), hidden))
    return torch.autograd.grad(grad.square().sum(), hidden, allow_unused=allow_unused)


def dual(loss, hidden: Tensor) -> None:
    with torch.autograd.forward_ad.dual_level():
        loss(torch.autograd.forward_ad.make_dual(hidden.detach(), torch.ones_like(hidden)))


DERIVATIVES: dict[str, Callable[[Any, Tensor], Any]] = {
    "dual-numbers": dual,
    "dual-scale": lambda loss, x: dual(lambda scale: loss(x, logit_scale=scale), torch.tensor(0.5)),
    "jvp": lambda loss, x: torch.func.jvp(loss, (x.detach(),), (torch.ones_like(x),)),
    "func-hessian": lambda loss, x: torch.func.hessian(loss)(x.detach()),
    "func-grad": lambda loss, x: torch.func.grad(loss)(x.detach()),
    "func-vjp": lambda loss, x: torch.func.vjp(loss, x.detach())[1](torch.tensor(1.0)),
    "vmap": lambda loss, x: torch.func.vmap(loss)(torch.stack((x, x))),
    "vmap-of-an-option": lambda loss, x: torch.func.vmap(lambda n: loss(x, num_tokens=n))(torch.tensor([3.0, 4.0])),
    "hessian": lambda loss, x: torch.autograd.functional.hessian(loss, x),
    "vhp": lambda loss, x: torch.autograd.functional.vhp(loss, x, torch.ones_like(x)),
    "autograd-jvp": lambda loss, x: torch.autograd.functional.jvp(loss, x, torch.ones_like(x)),
    "batched-gradients": lambda loss, x: torch.autograd.grad(loss(x), x, torch.ones(2), is_grads_batched=True),
    "vectorized-jacobian": lambda loss, x: torch.autograd.functional.jacobian(loss, x, vectorize=True),
    "second-grad-allow-unused": lambda loss, x: second_grad(loss, x, True),
    "second-grad": lambda loss, x: second_grad(loss, x, False),
}
OF_DIVERGENCE = ("func-grad", "vmap", "hessian", "autograd-jvp", "jvp")


@pytest.mark.parametrize("name", DERIVATIVES)
def test_a_derivative_that_is_not_there_is_refused(data, name):
    """Catches zeros or None where the documentation promises an error, and a text of torch's that does not name us."""
    hidden, weight, target = data
    ask = DERIVATIVES[name]

    def loss(x: Tensor, **options: Any) -> Tensor:
        return linear_cross_entropy(x, weight, target, **options)

    with refused("linear_cross_entropy", RuntimeError):
        ask(loss, hidden)
    if name in OF_DIVERGENCE:
        with refused("linear_kl_divergence", RuntimeError):
            ask(lambda x: _divergence(x, weight, target).sum(), hidden)
    if name == "second-grad":
        with refused("linear_log_probs", RuntimeError):
            ask(lambda x: _of_lists(x, weight, target).sum(), hidden)


def test_fake_tensors_have_shapes_alone(data):
    """Catches: a check that reads values of a FakeTensor."""
    fakes, ids, ones = FakeTensorMode(), torch.arange(3).expand(len(data[2]), 3), torch.ones(len(data[2]))
    hidden, weight, labels, ids, ones, vocabulary = map(
        fakes.from_tensor, (*data, ids, ones, torch.arange(len(data[1])))
    )
    with fakes:
        loss = linear_cross_entropy(hidden, weight, labels, weight=vocabulary.float(), num_tokens=ones[0])
        scores = linear_log_probs(hidden, weight, labels, temperature=ones).log_probs
        values = linear_kl_divergence(hidden, weight, hidden, weight, teacher_ids=vocabulary)
        assert topk_kl_divergence(hidden, weight, ids, -ids.float()).shape == scores.shape == values.shape
        assert torch.autograd.grad(loss, weight)[0].shape == weight.shape
        with refused("softcap is a FakeTensor"):
            any_call(hidden, weight, labels, softcap=ones[0])


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("options", [SMOOTHED, dict(reduction="none")], ids=["everything", "none"])
def test_a_learnable_logit_scale_gets_its_gradient(data, options, backend):
    """muP-like heads, a contrastive temperature. Catches a scale that is read as a number, without a word."""
    problem = Gaussian(N, D, V, labels=ignore(slice(2, 3)))
    options = options | {"logit_scale": 0.7}
    assert_holds(RANDOM_LOSS, LossCase("scale", options=options, problem=problem, learn_scale=True), backend=backend)
    found = []
    for dtype in (torch.float32, torch.float64):
        data = tuple(x.to(DEVICE) for x in data)
        scale = torch.tensor(0.7, device=DEVICE, dtype=dtype, requires_grad=True)
        of_scales = (options | {"logit_scale": s, "backend": backend} for s in (scale, scale.item(), scale.detach()))
        loss, number, fixed = (any_call(*data, **how).sum() for how in of_scales)
        torch.testing.assert_close(loss, number)
        assert torch.equal(fixed, number), "a scale without a gradient is a number"
        found.append(torch.autograd.grad(loss, scale)[0].double())
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("options", [{}, dict(return_aux=True, **SMOOTHED)], ids=["plain", "everything"])
def test_the_default_dtype_changes_nothing(data, default, options):
    """Catches temporaries in torch's default dtype: a bf16 loss, or a crash; another initial weight."""
    hidden, weight, target = data

    def run() -> list[Tensor]:
        torch.manual_seed(0)
        drawn = VocabParallelHead(D, V, dtype=torch.float32).weight
        out = linear_cross_entropy(hidden, weight, target, linear_bias=bias, backend="torch", **options)
        outputs = [out] if isinstance(out, Tensor) else [*out[:6]]
        return [drawn, *outputs, *torch.autograd.grad(outputs[0], (hidden, weight))]

    bias = torch.zeros(V)
    expected = run()
    torch.set_default_dtype(default)
    got = run()
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def _divergence(x: Tensor, w: Tensor, t: Tensor, kind: str = "jsd", **options: Any) -> Tensor:
    return linear_kl_divergence(x, w, x.detach() + 1, w.detach().flip(0), kind=cast(Any, kind), **options)


def _measures(x: Tensor, w: Tensor, t: Tensor, **options: Any) -> Tensor:
    ids = torch.stack((t, t.flip(0), t), 1)
    out = linear_log_probs(x, w, ids, entropy=True, sum_p_squared=True, argmax=True, top_k=3, **options)
    return torch.cat([values.float().flatten() for values in out if values is not None])


def _of_lists(x: Tensor, w: Tensor, t: Tensor, **options: Any) -> Tensor:
    return linear_log_probs(x, w, t, kept=KEPT, entropy=True, **options).log_probs


def _of_teachers_ids(x: Tensor, w: Tensor, t: Tensor, **options: Any) -> Tensor:
    return topk_kl_divergence(x, w, t[:, None], torch.full((N, 1), -2.0), outside="tail", **options)


OWN, BIAS, SOME = torch.linspace(0.5, 1.5, N), torch.linspace(-1, 1, V), torch.arange(N) > 1
KEPT = KeptIds(3 * torch.tensor([0, 1, 1, 2, 3, 4, 5, 6]), torch.arange(18) % V, torch.tensor([1]))
CHANGING: dict[str, Any] = {  # tokens of a group, a call, its options
    "z-loss, scale and softcap": (None, any_call, lambda v: dict(z_loss_weight=v, logit_scale=v, softcap=80.0 * v)),
    "class weights": (None, any_call, lambda v: dict(weight=torch.arange(1.0, V + 1), label_smoothing=v / 2, logit_scale=v)),
    "for each token": (None, any_call, lambda v: dict(reduction="none", label_smoothing=v / 2, softcap=v)),
    "z-loss from 0, in groups": (3, any_call, lambda v: dict(z_loss_weight=v)),
    "all in groups": (3, any_call, lambda v: dict(label_smoothing=v / 2, logit_scale=v, softcap=80.0 * v, z_loss_weight=v)),
    "entropy": (None, lambda *x, **y: linear_log_probs(*x, entropy=True, **y)[2], lambda v: dict(temperature=v, softcap=3.0)),
    "measures": (None, _measures, lambda v: dict(temperature=OWN, softcap=v)),
    "kept": (None, _of_lists, lambda v: dict(temperature=v, softcap=v)),
    "teacher's ids": (None, _of_teachers_ids, lambda v: dict(temperature=v)),
    "divergence": (None, _divergence, lambda v: dict(beta=v / 2, logit_scale=v, softcap=80.0 * v, teacher_logit_scale=1 / v)),
} | {
    kind: (None, partial(_divergence, kind=kind), lambda v: dict(linear_bias=BIAS, mask=SOME, logit_scale=v, softcap=3.0))
    for kind in KINDS
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGING)
def test_numbers_that_change_compile_twice_at_most(data, name):
    """Schedules. Catches a check that asks the symbolic number for its value, a graph for each value, and a value that stays in
    the graph; 1 is the default of a scale, and some of the softcaps are large."""
    torch._dynamo.reset()
    hidden, weight, target = data
    rows, call, options = CHANGING[name]
    counter = CompileCounterWithBackend("aot_eager")

    def loss(x: Tensor, value: float) -> Tensor:
        return call(x * 2, weight, target, **options(value))

    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    with groups.of_rows(rows):
        for value in (0.0 if "from 0" in name else 0.25, 0.5, 1.0, 1.5):
            outputs = compiled(hidden, value), loss(hidden, value)
            found, right = ((out, *torch.autograd.grad(out.sum(), (hidden, weight))) for out in outputs)
            torch.testing.assert_close(found, right)
    assert counter.frame_count <= 2


@pytest.mark.parametrize(("name", "backend"), [("z_loss_weight", "torch"), ("logit_scale", "triton")])
def test_compiles_with_a_tensor_that_changes(data, name, backend):
    """A schedule in a 0-d tensor, a scale that is learnt. Catches a value that is read, or baked into the graph."""
    torch._dynamo.reset()
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    hidden, weight, target = (x.detach().to(device).requires_grad_(x.is_floating_point()) for x in data)
    bias, classes = torch.randn(V, device=device, requires_grad=True), torch.rand(V, device=device)
    compiled = torch.compile(any_call, fullgraph=True, backend="aot_eager")
    cases: list[dict[str, Any]] = [SMOOTHED, dict(label_smoothing=0.1, weight=classes)]
    for options in cases:
        for number in (0.5, 0.25):
            value = torch.tensor(number, device=device, requires_grad=name == "logit_scale")
            inputs = (hidden, weight, bias, *[value][: value.requires_grad])
            how = options | {"linear_bias": bias, "backend": backend, name: value}
            losses = (call(hidden, weight, target, **how) for call in (compiled, any_call))
            ours, expected = ((loss, *torch.autograd.grad(loss, inputs)) for loss in losses)
            torch.testing.assert_close(ours, expected)
    # Some releases of torch say that an exception was seen in place of what it says.
    with pytest.raises(Exception, match=r"logit_scale must be a number or a 0-d tensor|Observed exception"):
        compiled(hidden, weight, target, logit_scale=torch.ones(N))


def test_a_scale_that_a_head_learns_is_its_parameter(data):
    """Catches a scale that no optimizer sees, and one that a copy or a loaded state leaves behind."""
    hidden, _, target = data
    head = VocabParallelHead(D, V, logit_scale=nn.Parameter(torch.tensor(2.0)))
    assert "logit_scale" in dict(head.named_parameters()) and "logit_scale" in head.state_dict()
    twin = VocabParallelHead(D, V, logit_scale=nn.Parameter(torch.tensor(1.0)))
    twin.load_state_dict(head.state_dict())
    loss = twin(hidden, target)
    loss.backward()
    torch.testing.assert_close(loss, head(hidden, target))
    assert isinstance(twin.logit_scale, nn.Parameter) and twin.logit_scale.grad != 0
    torch.testing.assert_close(twin(hidden), 2 * hidden @ head.weight.t())


def through_a_file(thing: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.slow
def test_copies_with_and_without_a_group(ranks2):
    ranks2(_copies)


def _copies() -> None:
    """A copy in memory keeps the group; a file keeps the numbers, and says so when it is used without a group."""
    group: Any = dist.group.WORLD
    torch.manual_seed(0)
    hidden, labels = torch.randn(N, D), torch.randint(V, (N,))
    alone = VocabParallelHead(D, V, bias=True, softcap=4.0)
    for twin in (copy.deepcopy(alone), through_a_file(alone)):
        assert torch.equal(twin(hidden, labels), alone(hidden, labels)) and twin.weight is not alone.weight
    head = VocabParallelHead(D, V, group=group)
    expected = head(hidden, labels)
    for make_copy in (copy.copy, copy.deepcopy, lambda thing: AveragedModel(thing).module):
        twin = make_copy(head)
        assert isinstance(twin.shard, VocabShard) and twin.shard.group is group, "a copy keeps the group"
        assert torch.equal(twin(hidden, labels), expected)
    assert copy.deepcopy(head.shard) == head.shard
    loaded = through_a_file(head)
    assert torch.equal(loaded.weight, head.weight)
    shard = through_a_file(head.shard)
    assert (shard.start, shard.stop, shard.vocab_size) == (head.shard.start, head.shard.stop, V)
    with pytest.raises(RuntimeError, match="group"):
        loaded(hidden, labels)
    loaded.shard = VocabShard(shard.start, shard.stop, shard.vocab_size, group)
    assert torch.equal(loaded(hidden, labels), expected)


@pytest.mark.parametrize("rows", [None, 3])
@pytest.mark.parametrize("saved", ["as they are", "checkpointed"])
def test_a_buffer_gets_what_backward_was_asked_for(
    rows: int | None, saved: str, data: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Catches dC that is added by a backward for the hidden states alone."""
    hidden, weight, labels = data
    buffer = torch.zeros(V, D)

    def loss_of(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, labels, grad_weight_out=buffer)

    with groups.of_rows(rows):
        how = partial(checkpoint, loss_of, use_reentrant=False) if saved == "checkpointed" else loss_of
        loss = how(hidden, weight)
        (d_hidden,) = torch.autograd.grad(loss, hidden, retain_graph=True)
        loss.backward(inputs=[hidden], retain_graph=True)
        assert not buffer.any()
        loss.backward()
    right = dense((hidden, weight), labels, torch.float32)[1:]
    torch.testing.assert_close((d_hidden, buffer, hidden.grad), (*right, 2 * right[0]))
