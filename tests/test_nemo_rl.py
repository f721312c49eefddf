"""NeMo-RL's function with ours inside, beside dense arithmetic: NeMo-RL itself where there is one, else a stand-in.

NeMo-RL is on GitHub alone and needs Python 3.13. ``launch/rl_packages.sh`` runs this file with its source.
``test_rl_ranks.py`` runs what needs ranks.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dense_scores import TOKENS, VOCAB, compare, dense_scores, operands, policy_loss
from torch import Tensor

from cce_dist.integrations import nemo_rl as cce_nemo_rl
from cce_dist.integrations import patching
from cce_dist.verify.check import assert_no_worse


def from_parallel_hidden_states_to_logprobs(
    tensor_parallel_hidden_states,
    output_weight_layer,
    runtime_gather_output,
    target,
    vocab_start_index,
    vocab_end_index,
    tp_group,
    inference_only=False,
    cp_group=None,
    chunk_size=None,
):
    """Has the parameters of NeMo-RL's, as of 0.7."""
    raise AssertionError("this is NeMo-RL's own")


def of_0_6(tensor_parallel_hidden_states, output_weight_layer, output_weight, runtime_gather_output, target): ...


class Alone:
    """A tensor-parallel group of one."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def nemo() -> Any:
    """Return NeMo-RL's module, its own or the stand-in's."""
    try:
        theirs: Any = importlib.import_module("nemo_rl.distributed.model_utils")
    except ImportError:
        sys.modules.update({name: types.ModuleType(name) for name in ("nemo_rl", "nemo_rl.distributed")})
        theirs = types.ModuleType("nemo_rl.distributed.model_utils")
        theirs.from_parallel_hidden_states_to_logprobs = from_parallel_hidden_states_to_logprobs
        sys.modules[theirs.__name__] = theirs
    return theirs


@pytest.fixture(autouse=True)
def _nemos_own_again() -> Iterator[None]:
    nemo()
    patching.say_once.cache_clear()
    yield
    cce_nemo_rl.uninstall()


def scores(
    hidden: Tensor, weight: Tensor, labels: Tensor, group: Any, rank: int = 0, **more: Any
) -> tuple[Tensor, Tensor]:
    """Return what NeMo-RL's function returns, called as its ``GPTModel.forward`` does, and no entropy."""
    rows = len(weight)
    log_probs = nemo().from_parallel_hidden_states_to_logprobs(
        hidden,
        weight,
        None,
        labels,
        vocab_start_index=rank * rows,
        vocab_end_index=(rank + 1) * rows,
        tp_group=group,
        chunk_size=4,
        **more,
    )
    return log_probs, log_probs.new_zeros(())


def dense(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probabilities [B, S - 1] of the next ids, of hidden states [S, B, D]."""
    log_probs, _ = dense_scores((hidden @ weight.t()).transpose(0, 1)[:, :-1], labels[:, 1:])
    return log_probs, log_probs.new_zeros(())


def test_one_rank() -> None:
    """Catches log-probabilities of a token itself in place of the next, and of another order of tokens."""
    cce_nemo_rl.install()
    hidden, weight, labels = operands(2)
    hidden = hidden.transpose(0, 1)
    compare(lambda h, w: scores(h, w, labels, Alone()), lambda h, w: dense(h, w, labels), hidden, weight)
    log_probs, _ = scores(hidden, weight.requires_grad_(), labels, Alone(), inference_only=True)
    assert not log_probs.requires_grad and log_probs.shape == (2, TOKENS - 1)


def over_two_ranks(sequence_parallel: bool) -> None:
    """Catches hidden states that are gathered though they are whole, and a gradient that is summed twice or never."""
    nemo()
    cce_nemo_rl.install()
    rank, group = dist.get_rank(), dist.group.WORLD
    hidden, weight, labels = operands(2)
    mine, rows = (slice(rank * size // 2, (rank + 1) * size // 2) for size in (TOKENS, VOCAB))
    try:
        compare(
            lambda h, w: scores(h, w, labels, group, rank),
            lambda h, w: dense(h, w, labels),
            hidden.transpose(0, 1),
            weight,
            mine if sequence_parallel else slice(None),
            rows,
        )
        if hasattr(nemo(), "patch_gpt_model_forward_for_linear_ce_fusion"):  # NeMo-RL itself
            from test_megatron import Case, on_layout

            on_layout(Case(tp=2, sequence_parallel=sequence_parallel), through_nemos_forward)
    finally:
        cce_nemo_rl.uninstall()


def through_nemos_forward(case: Any) -> None:
    """NeMo-RL's own ``GPTModel.forward`` on a real model, beside the model's logits."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
    from test_megatron import batch, build

    kind: Any = GPTModel
    results, forward = [], kind.forward
    for dtype, ours in ((torch.float32, True), (torch.float32, False), (torch.float64, False)):
        model = build(case)[0].to(dtype)
        inputs, _ = batch(model)
        ids = inputs["input_ids"]
        if ours:
            nemo().patch_gpt_model_forward_for_linear_ce_fusion(chunk_size=4)
            model.cp_group = None  # the group of one rank
            log_probs = model(**inputs, labels=ids, return_logprobs_for_linear_ce_fusion=True)
            kind.forward, kind._linear_ce_fusion_forward_patched = forward, False
        else:
            logits = gather_from_tensor_model_parallel_region(model(**inputs))
            log_probs, _ = dense_scores(logits[:, :-1], ids[:, 1:])
        policy_loss(log_probs, log_probs.new_zeros(())).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        results.append({"log_probs": log_probs, **gradients})
    for name in results[0]:
        ours, baseline, truth = (result[name] for result in results)
        assert_no_worse(ours, baseline, truth, quantity=f"through NeMo-RL's forward: {name}")


def test_install_is_undone_and_done_again(caplog: pytest.LogCaptureFixture) -> None:
    module = nemo()
    theirs = module.from_parallel_hidden_states_to_logprobs
    cce_nemo_rl.install()
    ours = module.from_parallel_hidden_states_to_logprobs
    cce_nemo_rl.install(workspace_bytes=1 << 20)
    assert theirs is not module.from_parallel_hidden_states_to_logprobs is not ours
    for _ in range(2):
        hidden, weight, labels = operands(2)
        scores(hidden.transpose(0, 1), weight, labels, Alone())
    lines = [record.getMessage() for record in caplog.records if record.name == "cce_dist"]
    assert lines == ["cce_dist: NeMo-RL's log-probabilities come from hidden states (linear_log_probs)"]
    cce_nemo_rl.uninstall()
    cce_nemo_rl.uninstall()
    assert module.from_parallel_hidden_states_to_logprobs is theirs


class Pair(Alone):
    def size(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        pytest.param(
            lambda h, w, y: scores(h, w, y, Alone(), cp_group=Pair()), "do not know context parallelism", id="context"
        ),
        pytest.param(
            lambda h, w, y: scores(h, w, y, Alone(), rank=1), r"has the rows \[0, 64\], NeMo-RL says", id="rows"
        ),
        pytest.param(lambda h, w, y: scores(h[1:], w, y, Alone()), "neither whole nor slices", id="length"),
    ],
)
def test_a_call_that_is_not_served_is_one_line(call: Callable, message: str) -> None:
    cce_nemo_rl.install()
    hidden, weight, labels = operands(2)
    with pytest.raises(ValueError, match=message) as error:
        call(hidden.transpose(0, 1), weight, labels)
    assert "\n" not in str(error.value)


def test_another_nemo_rl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nemo(), cce_nemo_rl.PATCH.name, of_0_6)
    with pytest.raises(
        RuntimeError, match=r"knows NeMo-RL 0.7 .*: there from_parallel_.* takes .*; in .* output_weight, "
    ):
        cce_nemo_rl.install()
    monkeypatch.setitem(sys.modules, cce_nemo_rl.PATCH.module, None)
    with pytest.raises(ImportError, match="needs NeMo-RL"):
        cce_nemo_rl.install()
    with pytest.raises(ValueError, match="backend must be one of"):
        cce_nemo_rl.install(backend="cuda")
