"""Sampling replay: 30 steps on what a sampler kept, beside the arithmetic that trainers do on masked logits."""

import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("megatron.core")

import test_rl
from torch import Tensor, nn

from cce_dist import KeptIds, linear_log_probs
from cce_dist.integrations import verl as cce_verl

VOCAB, SIZE, PROMPT, LENGTH, BATCH, STEPS, TOP_P = 50, 16, 3, 9, 4, 30, 0.8
RESPONSE = LENGTH - PROMPT
_their_own_again = test_rl._their_own_again  # a fixture
EXAMPLE: Any = runpy.run_path(str(Path(__file__).resolve().parents[2] / "docs" / "examples" / "replay.py"))


class Rollout(NamedTuple):
    """What an engine returns of prompts of equal length."""

    ids: Tensor  # [B, S]
    log_probs: Tensor  # [B, RESPONSE] over what the sampler kept
    lists: list[list[list[int]]]  # of each response's tokens; the last response's hold the whole vocabulary
    mask: Tensor  # [B, RESPONSE, K], padded with -1; the last response's rows are empty
    advantages: Tensor  # [B, 1]


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.cell = nn.Embedding(VOCAB, SIZE), nn.GRU(SIZE, SIZE, batch_first=True)
        self.head = nn.Linear(SIZE, VOCAB, bias=False)
        nn.init.normal_(self.head.weight, std=0.8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.cell(self.embedding(ids))[0]


@torch.no_grad()
def roll_out(policy: Policy) -> Rollout:
    """Draw with top-p, as engines do; the last sequence from the whole vocabulary."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB, (BATCH, LENGTH), generator=generator)
    mask = torch.full((BATCH, RESPONSE, VOCAB), -1)
    log_probs, lists = torch.zeros(BATCH, RESPONSE), [[] for _ in range(BATCH)]
    for place in range(RESPONSE):
        logits = policy.head(policy(ids[:, : PROMPT + place])[:, -1])
        p, order = logits.softmax(-1).sort(-1, descending=True)
        counts = (p.cumsum(-1) - p < TOP_P).sum(-1)
        for row, count in enumerate([*counts.tolist()[:-1], VOCAB]):
            kept = order[row, :count]
            log_p = logits[row, kept].log_softmax(-1)
            drawn = torch.multinomial(log_p.exp(), 1, generator=generator)[0]
            ids[row, PROMPT + place], log_probs[row, place] = kept[drawn], log_p[drawn]
            mask[row, place, : count if row < BATCH - 1 else 0] = kept[: count if row < BATCH - 1 else 0]
            lists[row].append(kept.tolist())
    return Rollout(ids, log_probs, lists, mask, torch.randn(BATCH, 1, generator=generator))


def masked(policy: Policy, drawn: Rollout) -> Tensor:
    """Log-probabilities [B, RESPONSE] of whole logits, -inf outside of the lists: NeMo-RL, miles, SkyRL's proposal."""
    logits = policy.head(policy(drawn.ids))[:, PROMPT - 1 : -1]
    listed = torch.zeros_like(logits).scatter_add_(2, drawn.mask.clamp(min=0), (drawn.mask >= 0).float()) > 0
    logits = logits.masked_fill(~(listed | ~listed.any(-1, keepdim=True)), -torch.inf)
    return logits.log_softmax(-1).gather(2, drawn.ids[:, PROMPT:, None])[..., 0]


def own_loop(policy: Policy, drawn: Rollout) -> Tensor:
    labels = drawn.ids.roll(-1, 1).index_fill_(1, torch.tensor([*range(PROMPT - 1), LENGTH - 1]), -100)
    lists = [{"output_token_sampling_mask": rows} for rows in (*drawn.lists[:-1], [None] * RESPONSE)]
    kept = KeptIds.from_lists(lists, labels)
    return linear_log_probs(policy(drawn.ids), policy.head.weight, labels, kept=kept).log_probs[:, PROMPT - 1 : -1]


def prime_rl(policy: Policy, drawn: Rollout) -> Tensor:
    labels, ones = drawn.ids.roll(-1, 1), torch.ones(BATCH, LENGTH)
    mask = torch.full((BATCH, LENGTH, VOCAB), -1)
    mask[:, PROMPT - 1 : -1] = drawn.mask
    return EXAMPLE["prime_rl_head"](policy.head, policy(drawn.ids), labels, ones, mask)["logprobs"][:, PROMPT - 1 : -1]


def miles(policy: Policy, drawn: Rollout) -> Tensor:
    batch = {"unconcat_tokens": [*drawn.ids], "total_lengths": [LENGTH] * BATCH, "response_lengths": [RESPONSE] * BATCH}
    offsets = [torch.tensor([0, *map(len, rows)]).cumsum(0) for rows in drawn.lists]
    ids = [torch.cat([torch.tensor(row) for row in rows]).int() for rows in drawn.lists]
    batch |= {"rollout_sampling_mask_ids": ids, "rollout_sampling_mask_offsets": offsets}
    return torch.stack(EXAMPLE["miles_log_probs"](policy(drawn.ids).flatten(0, 1), policy.head.weight, batch))


def skyrl(policy: Policy, drawn: Rollout) -> Tensor:
    return EXAMPLE["skyrl_log_probs"](policy(drawn.ids), policy.head.weight, drawn.ids, RESPONSE, drawn.mask)


class Batch(dict):
    """As much of verl's TensorDict as its engines read."""

    def clone(self, recurse: bool) -> Any:
        return Batch(self)


class FSDPEngineWithLMHead:
    """Packs, shifts and pads a microbatch as verl's does."""

    def prepare_model_inputs(self: Any, micro_batch):
        labels = nn.functional.pad(micro_batch["input_ids"].values().roll(-1), (0, self._get_packed_pad_size(0)))[None]
        return {"return_dict": True} | ({"shift_labels": labels} if micro_batch["use_remove_padding"] else {}), {}


class MegatronEngineWithLMHead:
    def prepare_model_inputs(self, batch):
        return {"input_ids": batch["input_ids"]}


def get_mcore_forward_fused_model_engine_fn(hf_config):
    def forward(model, labels):
        return model(torch.cat([nn.functional.pad(row.roll(-1), (0, 2)) for row in labels.unbind()])[None])

    return forward


def verls_batch(drawn: Rollout) -> Batch:
    offsets = LENGTH * torch.arange(BATCH + 1)
    mask = torch.cat((torch.full((BATCH, PROMPT, VOCAB), -1), drawn.mask), 1)
    sampled = (torch.arange(LENGTH) >= PROMPT).int().expand(BATCH, -1)
    values = {"input_ids": drawn.ids, "sampling_mask": mask, "loss_mask": sampled, "position_ids": drawn.ids}
    values = {name: torch.nested.nested_tensor_from_jagged(x.flatten(0, 1), offsets) for name, x in values.items()}
    return Batch(values, use_remove_padding=True, temperature=1.0, use_fused_kernels=True)


def verl_fsdp(policy: Policy, drawn: Rollout) -> Tensor:
    """Three tokens of padding come behind the batch."""
    kernel = test_rl.verl()
    module = cce_verl.REPLAY["fsdp"][0].module
    kind = test_rl.stand_in(module, FSDPEngineWithLMHead=FSDPEngineWithLMHead).FSDPEngineWithLMHead
    cce_verl.install(sampling_mask="fsdp")
    engine = SimpleNamespace(pad_to_length=False, use_ulysses_sp=False, _get_packed_pad_size=lambda n: 3)
    inputs, _ = kind.prepare_model_inputs(engine, verls_batch(drawn))
    hidden = nn.functional.pad(policy(drawn.ids).reshape(1, -1, SIZE), (0, 0, 0, 3))
    found = kernel.linear_cross_entropy(hidden, policy.head.weight, inputs["shift_labels"], 1.0, "none")[0]
    assert cce_verl._Replay.lists is None  # labels are labels again
    if kind is FSDPEngineWithLMHead:
        with pytest.raises(ValueError, match="needs use_remove_padding=True"):
            kind.prepare_model_inputs(engine, Batch(verls_batch(drawn), use_remove_padding=False))
        cce_verl._Replay.lists = None
    return found[:-3].view(BATCH, LENGTH)[:, PROMPT - 1 : -1]


def verl_megatron(policy: Policy, drawn: Rollout) -> Tensor:
    """Two tokens of padding come behind each sequence. test_rl.py has verl's own packing."""
    kernel, names = test_rl.verl(), (MegatronEngineWithLMHead, test_rl.MegatronEngine)
    if test_rl.is_here(test_rl.verl()):
        pytest.skip("packed_by_verl has verl's own")
    inputs, forward = cce_verl.REPLAY["megatron"]
    kind = test_rl.stand_in(inputs.module, **{each.__name__: each for each in names}).MegatronEngineWithLMHead
    home = test_rl.stand_in(forward.module, **{forward.name: get_mcore_forward_fused_model_engine_fn})
    cce_verl.install(sampling_mask="megatron")
    kind().prepare_model_inputs(verls_batch(drawn))
    hidden = nn.functional.pad(policy(drawn.ids), (0, 0, 0, 2)).reshape(1, -1, SIZE)
    labels = torch.nested.nested_tensor_from_jagged(drawn.ids.flatten(), LENGTH * torch.arange(BATCH + 1))
    found = home.get_mcore_forward_fused_model_engine_fn(None)(
        model=lambda labels: kernel.linear_cross_entropy(hidden, policy.head.weight, labels)[0], labels=labels
    )
    return found.view(BATCH, -1)[:, PROMPT - 1 : LENGTH - 1]


Scores = Callable[[Policy, Rollout], Tensor]


def curve(scores: Scores) -> Tensor:
    """Train a policy on one rollout, and return the losses. The first ratios are 1."""
    policy, losses = Policy(), []
    drawn = roll_out(policy)
    torch.testing.assert_close(scores(policy, drawn), drawn.log_probs, atol=2e-6, rtol=0)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    for _ in range(STEPS):
        ratio = (scores(policy, drawn) - drawn.log_probs).exp()
        loss = -torch.minimum(ratio * drawn.advantages, ratio.clamp(0.8, 1.2) * drawn.advantages).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize("ours", [own_loop, prime_rl, miles, skyrl, verl_fsdp, verl_megatron])
def test_curves(ours: Scores) -> None:
    """Catches a list of another token, a softmax over the whole vocabulary, and a gradient that misses one of its terms."""
    expected, found = curve(masked), curve(ours)
    size = expected.abs().max()
    assert (found - expected).abs().max() <= 1e-6 * size and (expected[-1] - expected[0]).abs() > 0.1 * size
