"""NeMo-RL's own losses and log-probabilities of packed sequences with ours inside, beside its path over logits.

Its forward, packing and losses are its own, on a GPTModel of megatron-core on CPUs: ``NEMO_RL=~/RL launch/rl_packages.sh``.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core")
pytest.importorskip("nemo_rl.distributed.model_utils", reason="NeMo-RL itself: launch/rl_packages.sh")

from megatron_on_cpu import use_cpu
from nemo_rl_on_cpu import use_stand_ins
from support.ranks import run_ranks
from test_megatron import SEQ, VOCAB, Case, build, on_layout

from cce_dist.integrations import nemo_rl as cce_nemo_rl
from cce_dist.tools.verify.check import assert_no_worse

LENGTHS = [8, 3, 6]


def nemo(path: str) -> Any:
    return importlib.import_module(f"nemo_rl.{path}")


def microbatch(seed: int = 0) -> Any:
    """Return what NeMo-RL makes of three sequences for this rank: packed, padded, and cut over context-parallel ranks."""
    from megatron.core import parallel_state

    data = nemo("models.megatron.data")
    rank, size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    generator = torch.Generator().manual_seed(seed)
    shape = len(LENGTHS), max(LENGTHS)
    ids = torch.randint(VOCAB, shape, generator=generator)
    in_sequence = torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]
    mask = (torch.rand(shape, generator=generator) > 0.2) & in_sequence
    values = {
        name: torch.randn(shape, generator=generator) for name in ("advantages", "prev", "generation", "reference")
    }
    batch = nemo("distributed.batched_data_dict").BatchedDataDict(
        input_ids=ids.masked_fill(~in_sequence, 0),
        input_lengths=torch.tensor(LENGTHS),
        token_mask=mask.float(),
        sample_mask=torch.ones(shape[0]),
        advantages=values["advantages"],
        prev_logprobs=0.1 * values["prev"] - 4,
        generation_logprobs=0.1 * values["generation"] - 4,
        reference_policy_logprobs=0.1 * values["reference"] - 4,
    )
    # A multiple of what NeMo-RL's _get_pack_sequence_parameters_for_megatron takes for these groups.
    multiple = 2 * size * parallel_state.get_tensor_model_parallel_world_size()
    whole, local, packed, _, padded = data._pack_sequences_for_megatron(
        batch["input_ids"], batch["input_lengths"], multiple, cp_rank=rank, cp_size=size
    )
    return data.ProcessedMicrobatch(batch, whole, local, None, local % SEQ, packed, padded)


def processed(model: Any, batch: Any, kind: type, *args: Any, fused: bool, **kwargs: Any) -> tuple[Tensor, dict]:
    """Return what one of NeMo-RL's post-processors makes of a forward of the model."""
    output, finish = nemo("models.megatron.train").forward_with_post_processing_fn(
        iter([batch]),
        model,
        kind(*args, **kwargs),
        sampling_params=kwargs.get("sampling_params"),
        global_valid_seqs=torch.tensor(float(len(LENGTHS))),
        global_valid_toks=batch.data_dict["token_mask"][:, 1:].sum(),
        use_fused_linear_logprobs=fused,
    )
    return finish(output)


def scores_of(model: Any, batch: Any, config: dict, fused: bool, params: Any = None) -> Tensor:
    kind = nemo("models.megatron.train").LogprobsPostProcessor
    how = {"sampling_params": params, "use_fused_linear_logprobs": fused}
    with torch.no_grad():
        return processed(model, batch, kind, config, fused=fused, **how)[1]["logprobs"]


def loss_of(model: Any, batch: Any, config: dict, fused: bool, params: Any = None) -> Tensor:
    losses, kind = nemo("algorithms.loss.loss_functions"), nemo("models.megatron.train").LossPostProcessor
    policy = losses.ClippedPGLossFn(losses.ClippedPGLossConfig(), use_fused_linear_logprobs=fused)
    return processed(model, batch, kind, policy, config, fused=fused, sampling_params=params)[0]


@contextmanager
def fused_forward() -> Iterator[None]:
    """Have GPTModel's forward be NeMo-RL's, which ends in ours."""
    from megatron.core.models.gpt import GPTModel

    kind: Any = GPTModel
    forward = kind.forward
    cce_nemo_rl.install()
    nemo("distributed.model_utils").patch_gpt_model_forward_for_linear_ce_fusion(chunk_size=4)
    try:
        yield
    finally:
        kind.forward, kind._linear_ce_fusion_forward_patched = forward, False
        cce_nemo_rl.uninstall()


def model_of(case: Case) -> Any:
    from megatron.core import parallel_state

    model = build(case)[0]
    model.cp_group = parallel_state.get_context_parallel_group()
    return model


def packed_sequences(case: Case) -> None:
    """Catches a label of the next sequence, a row in another's place, and a gradient of one slice alone."""
    results = []
    for fuse_loss in (False, True):
        config = {"sequence_packing": {"enabled": True, "fuse_loss": fuse_loss}, "megatron_cfg": {}}
        for fused, dtype in ((True, torch.float32), (False, torch.float32), (False, torch.float64)):
            model, batch = model_of(case).to(dtype), microbatch()
            with fused_forward():
                scores = scores_of(model, batch, config, fused)
                loss = loss_of(model, batch, config, fused)
                loss.backward()
            gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            results.append(({"scores": scores, **gradients}, loss))
    # NeMo-RL's two ways to a loss of packed sequences agree, so either may be held against ours.
    for (ours, loss), (baseline, their_loss), (truth, _) in (results[:3], results[3:]):
        torch.testing.assert_close(loss, their_loss)  # fp32, whatever the dtype of the model
        assert ours["scores"].shape == (len(LENGTHS), max(LENGTHS)) and len(ours) > 10
        for name in ours:
            assert_no_worse(ours[name], baseline[name], truth[name], quantity=f"NeMo-RL's {name}, {case}")


def truncated(case: Case) -> None:
    """With top-k, and a reference policy over the whole vocabulary. Catches a list of the token before, and its gradient.

    The lists are what NeMo-RL's own filter keeps. The tokens with a loss are those that it keeps, as an engine draws no other.
    """
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

    params, results = nemo("algorithms.logits_sampling_utils").TrainingSamplingParams(top_k=20), []
    config = {"sequence_packing": {"enabled": False}, "megatron_cfg": {}}
    for fused, dtype in ((True, torch.float32), (False, torch.float32), (False, torch.float64)):
        model, data = model_of(case).to(dtype), microbatch().data_dict
        ids = data["input_ids"]
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        batch = nemo("models.megatron.data").ProcessedMicrobatch(data, ids, ids, None, positions, None, None)
        with fused_forward(), torch.no_grad():
            logits = gather_from_tensor_model_parallel_region(model(ids, positions, None))
        top = torch.cat((ids[:, :1, None].expand(-1, -1, 20), logits.topk(20).indices[:, :-1]), 1)
        listed = (top == ids[..., None]).any(-1)
        data["token_mask"] = data["token_mask"] * listed
        data["sampling_mask_token_ids"], data["sampling_mask_sizes"] = top.int(), torch.full_like(ids, 20)
        with fused_forward():
            scores = scores_of(model, batch, config, fused, params) * listed
            loss = loss_of(model, batch, config, fused, params)
            loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        results.append({"scores": scores, "loss": loss.detach(), **gradients})
    for name, value in results[0].items():
        assert_no_worse(value, *(each[name] for each in results[1:]), quantity=f"NeMo-RL's {name} with top-k, {case}")


def two_ranks() -> None:
    use_cpu()
    use_stand_ins()
    on_layout(Case(cp=2, own_tokens=True), packed_sequences)
    for sequence_parallel in (True, False):
        on_layout(Case(tp=2, sequence_parallel=sequence_parallel, own_tokens=True), packed_sequences)
        on_layout(Case(tp=2, sequence_parallel=sequence_parallel, own_tokens=True), truncated)


@pytest.mark.slow
def test_packed_sequences_on_two_ranks() -> None:
    run_ranks(two_ranks, 2)
