"""Megatron's ``output_processor`` with ours: scores and gradients of a real GPTModel, beside those of its own logits.

megatron-core before 0.18 has no such argument: there a stand-in calls the processor as 0.18 does. ``launch/rl_packages.sh``
runs this file with newer ones. test_rl.py runs what needs ranks.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("megatron.core")

from dense_scores import compare_models, dense_scores
from support.refused import refused
from test_megatron import (
    BATCH,
    IGNORED,
    SEQ,
    VOCAB,
    Case,
    batch,
    build,
    hybrid,
    of_this_rank,
    on_layout,
    takes_a_processor,
    with_processor,
)

from cce_dist.integrations import megatron as cce
from cce_dist.integrations.megatron import scores

TEMPERATURE = torch.linspace(0.5, 2, BATCH * SEQ).view(BATCH, SEQ)


def processor(**wanted: Any) -> Any:
    return cce.log_probs_processor(**wanted) if takes_a_processor() else scores._processor(1.0, None, wanted)


def by_logits(model: Any, inputs: dict[str, Tensor], labels: Tensor) -> Any:
    """Labels outside the vocabulary have no scores."""
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

    logits = gather_from_tensor_model_parallel_region(model(**inputs))
    return dense_scores(logits, labels.masked_fill(labels >= VOCAB, IGNORED), TEMPERATURE)


def by_processor(model: Any, inputs: dict[str, Tensor], labels: Tensor) -> Any:
    return with_processor(model)(
        **inputs,
        labels=labels,
        output_processor=processor(entropy=True, argmax=True),
        output_processor_context={"temperature": TEMPERATURE},
    )


def by_processor_of_a_converted_model(model: Any, inputs: dict[str, Tensor], labels: Tensor) -> Any:
    return by_processor(cce.convert(model), inputs, labels)


def by_the_loss(model: Any, inputs: dict[str, Tensor], labels: Tensor) -> Any:
    with cce.log_probs_of(cce.convert([model]), temperature=TEMPERATURE, entropy=True, argmax=True) as found:
        losses = model(**inputs, labels=labels)
    assert torch.equal(losses, -found[0].log_probs) and len(found) == 1
    return found[0]


def scored(ours: bool, dtype: torch.dtype, make: Callable, how: Callable) -> Any:
    model = make().to(dtype)
    if not ours:
        return model, *by_logits(model, *batch())
    found = how(model, *batch())
    assert found.argmax.shape == found.lse.shape == (BATCH, SEQ) and found.log_probs.is_contiguous()
    return model, found.log_probs, found.entropy


def on_one_layout(case: Case) -> None:
    for make, ways in (
        (lambda: build(case)[0], (by_processor, by_processor_of_a_converted_model, by_the_loss)),
        (lambda: hybrid(case), (by_the_loss,)),
    ):
        for how in ways:
            compare_models(f"{how.__name__}, {case}", scored, make, how)


def with_two_predictions(case: Case) -> None:
    """Multi-token prediction beside log-probabilities. Catches its loss with a temperature, and its labels among ours."""
    inputs, labels = batch(inside=True)

    def run(ours: bool, dtype: torch.dtype) -> Any:
        model = build(case)[0].to(dtype)
        with cce.log_probs_of(cce.convert(model)) if ours else contextlib.nullcontext() as found:
            losses = model(**inputs, labels=labels)
        assert not found or len(found) == 1
        log_probs = found[-1].log_probs if found else -losses
        return model, log_probs, log_probs.new_zeros(())

    compare_models(f"{case}", run)
    alone = []
    for temperature in (1.0, 0.5):
        model = cce.convert(build(case)[0])
        with cce.log_probs_of(model, temperature=temperature) as found:
            model(**inputs, labels=labels)
            with cce.log_probs_of(model) as inner:
                model(**inputs, labels=labels)
            model(**inputs, labels=labels)
        assert (len(found), len(inner)) == (2, 1), "the inner block ends the outer one"
        (0 * found[0].log_probs.sum()).backward()
        alone.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert any(name.startswith("mtp") and grad.any() for name, grad in alone[0].items())
    for name, grad in alone[0].items():
        assert torch.equal(grad, alone[1][name]), f"{name}: the second prediction has a temperature"


def over_two_ranks(sequence_parallel: bool) -> None:
    """Catches hidden states taken for whole, labels of another order, a gradient that is summed twice, never or elsewhere."""
    on_layout(Case(tp=2, sequence_parallel=sequence_parallel, tied=sequence_parallel), on_one_layout)
    if not sequence_parallel:
        on_layout(Case(), on_one_layout)
        on_layout(Case(tp=2, mtp=1), with_two_predictions)
        on_layout(Case(cp=2, own_tokens=True), next_ids_in_slices)
        on_layout(Case(tp=2), what_is_not_served)


def packed_lengths(*lengths: int) -> Any:
    """Return Megatron's parameters of sequences that lie one behind the other."""
    from megatron.core.packed_seq_params import PackedSeqParams

    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)


def in_slices(ours: bool, dtype: torch.dtype, make: Callable, tokens: tuple, labels: Tensor, packed: Any) -> Any:
    model = make().to(dtype)
    if not ours:
        return model, *dense_scores(model(*tokens), labels.masked_fill(labels < 0, IGNORED))
    with cce.log_probs_of(cce.convert(model), entropy=True) as found:
        model(*tokens, labels=labels, packed_seq_params=packed)
    return model, found[0].log_probs, found[0].entropy


def next_ids_in_slices(case: Case) -> None:
    """Labels of slices and of packed sequences. Catches a label of another sequence, and one that the next rank has."""
    from megatron.core import parallel_state

    group: Any = parallel_state.get_context_parallel_group()
    size = group.size()
    for lengths in ([SEQ], [4, 8, 4, 4]):
        packed = packed_lengths(*lengths) if len(lengths) > 1 else None
        tokens = torch.arange(sum(lengths))
        mine = torch.cat([of_this_rank(each, group.rank(), size) for each in tokens.split(lengths)])
        ids = torch.randint(VOCAB, (1, len(tokens)), generator=torch.Generator().manual_seed(2))
        labels = torch.cat([F.pad(each[1:], (0, 1), value=-1) for each in ids[0].split(lengths)])[None]
        ids, labels, positions = (each[:, mine] for each in (ids, labels, tokens[None] % SEQ))
        assert torch.equal(cce.next_ids(ids, group, packed), labels)
        for make in (lambda: build(case)[0], lambda: hybrid(case)):
            compare_models(f"{lengths}, {case}", in_slices, make, (ids, positions, None), labels, packed)
    with pytest.raises(ValueError, match=r"packed sequences of 4 tokens \(cu_seqlens_q\), ids of 10 on each of 2 "):
        cce.next_ids(ids, group, packed_lengths(4))


def what_is_not_served(case: Case) -> None:
    model = with_processor(build(case)[0])
    inputs, labels = batch()
    of_top_p = {"labels": labels, "output_processor_context": {"top_p": 0.9}}
    for given, message in (
        ({}, "the call has no labels"),
        (of_top_p, "has temperature, top_p, and only temperature"),
    ):
        with pytest.raises(ValueError, match=message):
            model(**inputs, **given, output_processor=processor())
    with pytest.raises(ValueError, match="needs a model that is converted"), cce.log_probs_of(build(case)[0]):
        pass
    says = "log_probs_of got an unexpected argument 'top_p'"
    with pytest.raises(TypeError, match=says), cce.log_probs_of(model, top_p=1):
        pass
    model.output_layer.bias = torch.nn.Parameter(torch.zeros(VOCAB // 2))
    with pytest.raises(ValueError, match="of this model: its output_layer has a bias"):
        model(**inputs, labels=labels, output_processor=processor())


def test_a_megatron_without_the_hook_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import megatron.core
    from megatron.core.models.gpt import GPTModel

    if takes_a_processor():
        assert callable(cce.log_probs_processor(entropy=True))
        with pytest.raises(TypeError, match="unexpected argument 'entropies'"):
            cce.log_probs_processor(entropies=True)
        monkeypatch.setattr(GPTModel, "forward", lambda self, input_ids: None)
    version = megatron.core.__version__
    with refused(f"needs megatron-core >= 0.18, .* output_processor; {version} has none", RuntimeError):
        cce.log_probs_processor()


def test_boundaries_of_packed_sequences() -> None:
    """Catches a label of another sequence where two boundaries are equal, and boundaries that describe no sequences."""
    from megatron.core.packed_seq_params import PackedSeqParams

    def labels(boundaries: Any, count: int = 10) -> list[int]:
        return cce.next_ids(torch.arange(count)[None], None, PackedSeqParams(cu_seqlens_q=boundaries))[0].tolist()

    wanted = [1, 2, 3, -1, 5, 6, 7, 8, 9, -1]
    for boundaries in ([0, 4, 10], [0, 0, 4, 4, 4, 10], [0, 4, 10, 10, 10]):
        for dtype in (torch.int32, torch.int64, torch.uint8):
            assert labels(torch.tensor(boundaries, dtype=dtype)) == wanted
        assert labels(boundaries) == labels(torch.tensor([boundaries] * 2).t()[:, 0]) == wanted
    assert labels(torch.arange(11)) == [-1] * 10
    assert labels(torch.tensor([0]), 0) == labels(torch.tensor([0, 0]), 0) == []

    integers = "must be a vector of integers, got "
    for wrong, message in (
        ([0, 6, 4, 10], r"must rise from 0, got \[0, 6, 4, 10\]"),
        *((wrong, "must rise from 0") for wrong in ([0, -3, 10], [2, 10], [-1, 10], [10], [0, 12, 10])),
        ([0, 12], r"packed sequences of 12 tokens \(cu_seqlens_q\), ids of 10 on each of 1 "),
        ([0, 9], "packed sequences of 9 tokens"),
        ([0], "packed sequences of 0 tokens"),
        ([0.0, 4.0, 10.0], integers + r"torch.float32 \[3\]"),
        ([False, True], integers),
        ([[0, 4, 10]], integers + r"torch.int64 \[1, 3\]"),
        (10, integers),
        ([], integers),
    ):
        with refused(f"(?=.*cu_seqlens_q).*{message}"):
            labels(torch.tensor(wrong))
    for wrong in (None, "0, 10", torch.tensor([0, 10], device="meta")):
        with pytest.raises(ValueError, match="cu_seqlens_q must be a vector of integers"):
            labels(wrong)
    packed = packed_lengths(4, 2, 6)
    with pytest.raises(ValueError, match="must be multiples of 4 on 2 context-parallel ranks, cu_seqlens_q is"):
        scores.sequence_boundaries(packed, 6, 2)
