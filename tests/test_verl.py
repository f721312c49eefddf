"""verl's functions with ours inside, beside dense arithmetic: verl's own package where there is one, else a stand-in.

verl 0.9 needs an older transformers than the other tests. ``launch/rl_packages.sh`` runs this file with verl itself.
``test_rl_ranks.py`` runs what needs ranks.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("megatron.core")

from dense_scores import TOKENS, VOCAB, compare, dense_scores, operands, policy_loss

from cce_dist.integrations import patching
from cce_dist.integrations import verl as cce_verl
from cce_dist.verify.check import assert_no_worse


class LinearCrossEntropy:
    """The parameters of verl's, as of 0.5 to 0.9."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, temperature=1.0, reduction="none", dist_process_group=None): ...

    @classmethod
    def apply(cls, *_: Any) -> None:
        raise AssertionError("this is verl's own kernel")


def fused_output_processor(
    *, hidden_states: Any, output_layer: Any, output_weight: Any, labels: Any, context: Any, config: Any
) -> Any:
    """Calls the function as verl's of this name does: with hidden states that Megatron has gathered."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    if config.sequence_parallel:
        hidden_states = gather_from_sequence_parallel_region(hidden_states)
    function = sys.modules["verl.models.mcore.model_forward_fused"].linear_cross_entropy
    group = parallel_state.get_tensor_model_parallel_group()
    log_probs, entropy = function(
        hidden_states,
        output_layer.weight if output_weight is None else output_weight,
        labels,
        context.temperature,
        "none",
        group,
    )
    return SimpleNamespace(log_probs=log_probs, entropy=entropy)


def verl() -> Any:
    """Return verl's module of models, its own or the stand-in's."""
    try:
        fused: Any = importlib.import_module("verl.models.mcore.model_forward_fused")
    except ImportError:
        names = "verl", "verl.utils", "verl.utils.kernel", "verl.models", "verl.models.mcore"
        sys.modules.update({name: types.ModuleType(name) for name in names})
        kernel: Any = types.ModuleType("verl.utils.kernel.linear_cross_entropy")
        fused = types.ModuleType("verl.models.mcore.model_forward_fused")
        kernel.LinearCrossEntropy, kernel.linear_cross_entropy = LinearCrossEntropy, LinearCrossEntropy.apply
        fused.linear_cross_entropy, fused.fused_output_processor = kernel.linear_cross_entropy, fused_output_processor
        sys.modules |= {kernel.__name__: kernel, fused.__name__: fused}
    return fused


@pytest.fixture(autouse=True)
def _verls_own_again() -> Iterator[None]:
    verl()
    patching.say_once.cache_clear()
    yield
    cce_verl.uninstall()


@pytest.mark.parametrize(
    "temperature",
    [0.7, torch.tensor(0.7), torch.rand(2, TOKENS).add(0.5), torch.tensor([[0.5], [2.0]])],
    ids=["number", "0-d", "per-token", "per-sample"],
)
def test_one_rank_with_the_whole_vocabulary(temperature: Any) -> None:
    """As verl's forwards of transformers call it. Catches a temperature of another token, outputs that are not flat."""
    cce_verl.install()
    hidden, weight, labels = operands(2)
    per_token = temperature.expand_as(labels) if isinstance(temperature, Tensor) else temperature

    def dense(hidden: Tensor, weight: Tensor) -> list[Tensor]:
        return [x.view(-1) for x in dense_scores(hidden @ weight.t(), labels, per_token)]

    compare(lambda *x: verl().linear_cross_entropy(*x, labels, temperature, "none"), dense, hidden, weight)


def over_two_ranks(sequence_parallel: bool) -> None:
    """Catches a gradient of hidden states that is a shard's part alone, and one that is summed twice."""
    from megatron.core import parallel_state

    fused = verl()
    cce_verl.install()
    parallel_state.initialize_model_parallel(2)
    hidden, weight, labels = operands(1)

    def ours(hidden: Tensor, shard: Tensor) -> tuple[Tensor, Tensor]:
        found = fused.fused_output_processor(
            hidden_states=hidden,
            output_layer=SimpleNamespace(weight=shard),
            output_weight=None,
            labels=labels,
            context=SimpleNamespace(temperature=0.7),
            config=SimpleNamespace(sequence_parallel=sequence_parallel, config_logger_dir=""),
        )
        return found.log_probs, found.entropy

    def dense(hidden: Tensor, weight: Tensor) -> list[Tensor]:
        return [x.view(-1) for x in dense_scores((hidden @ weight.t()).transpose(0, 1), labels, 0.7)]

    rank = dist.get_rank()
    mine, rows = (slice(rank * size // 2, (rank + 1) * size // 2) for size in (TOKENS, VOCAB))
    try:
        compare(ours, dense, hidden.transpose(0, 1), weight, mine if sequence_parallel else slice(None), rows)
    finally:
        cce_verl.uninstall()
        parallel_state.destroy_model_parallel()


def test_transformers_forward_of_verl() -> None:
    """verl's own forward of a transformers model, beside verl's own in plain torch."""
    theirs = pytest.importorskip("verl.models.transformers.dense_common", reason="verl itself: launch/rl_packages.sh")
    from tiny_trainer import VOCAB as size
    from tiny_trainer import tiny_model

    cce_verl.install()
    ids, results = torch.randint(1, size, (2, TOKENS), generator=torch.Generator().manual_seed(0)), []
    for forward in (theirs.forward_with_triton_backend, theirs.forward_with_torch_backend, None):
        model = tiny_model()
        if forward is None:
            log_probs, entropy = dense_scores(model.double()(ids).logits, ids.roll(-1, -1), 0.7)
        else:
            out = forward(model, input_ids=ids, temperature=0.7, return_dict=True)
            log_probs, entropy = out.log_probs.view(ids.shape), out.entropy.view(ids.shape)
        policy_loss(log_probs, entropy).backward()
        results.append({"log_probs": log_probs, "entropy": entropy} | {n: p.grad for n, p in model.named_parameters()})
    for name in results[0]:
        ours, baseline, truth = (result[name] for result in results)
        assert_no_worse(ours, baseline, truth, quantity=name)


def test_install_is_undone_and_done_again(caplog: pytest.LogCaptureFixture) -> None:
    kernel, fused = sys.modules[cce_verl.PATCH.module], verl()
    theirs = fused.linear_cross_entropy
    cce_verl.install()
    ours = fused.linear_cross_entropy
    assert ours is kernel.linear_cross_entropy and ours is not theirs
    cce_verl.install(workspace_bytes=1 << 20)
    assert fused.linear_cross_entropy is kernel.linear_cross_entropy is not ours
    assert fused.linear_cross_entropy.cce_original == theirs
    for _ in range(2):
        hidden, weight, labels = operands(2)
        fused.linear_cross_entropy(hidden, weight, labels)
    lines = [record.getMessage() for record in caplog.records if record.name == "cce_dist"]
    assert lines == ["cce_dist: verl's log-probabilities come from hidden states (linear_log_probs)"]
    cce_verl.uninstall()
    cce_verl.uninstall()
    assert fused.linear_cross_entropy == kernel.linear_cross_entropy == theirs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda x: x | {"reduction": "mean"}, "serves verl's reduction 'none', got 'mean'", id="reduction"),
        pytest.param(lambda x: x | {"hidden": x["hidden"].transpose(0, 1)}, "one order of tokens", id="order"),
    ],
)
def test_a_call_that_is_not_served_is_one_line(change: Callable, message: str) -> None:
    cce_verl.install()
    hidden, weight, labels = operands(2)
    with pytest.raises(ValueError, match=message) as error:
        verl().linear_cross_entropy(**change({"hidden": hidden, "weight": weight, "labels": labels}))
    assert "\n" not in str(error.value)


def test_another_verl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = sys.modules[cce_verl.PATCH.module]

    class Other:
        @staticmethod
        def forward(ctx, hidden, weight, labels): ...

    monkeypatch.setattr(kernel, "LinearCrossEntropy", Other)
    with pytest.raises(
        RuntimeError, match=r"knows verl 0.5 to 0.9: there .* temperature, .*; in .* ctx, hidden, weight, labels$"
    ):
        cce_verl.install()
    monkeypatch.setitem(sys.modules, kernel.__name__, None)
    with pytest.raises(ImportError, match="needs verl"):
        cce_verl.install()
    with pytest.raises(ValueError, match="backend must be one of"):
        cce_verl.install(backend="cuda")
