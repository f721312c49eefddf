"""verl's, NeMo-RL's and TRL's functions with ours inside: dense arithmetic beside them, on one rank and on two.

verl 0.9 needs an older transformers than the other tests; NeMo-RL is on GitHub alone and needs Python 3.13. Stand-ins have
their parameters. ``launch/rl_packages.sh`` runs this file with the packages themselves.
"""

import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_gather
from torch.nn.utils.rnn import pad_sequence

pytest.importorskip("megatron.core")

import test_megatron_scores
from dense_scores import TOKENS, VOCAB, compare, compare_models, dense_scores, operands
from megatron_on_cpu import use_cpu
from nemo_rl_on_cpu import use_stand_ins
from shards import DEVICE
from support.ranks import run_ranks
from support.refused import refused
from test_megatron import of_this_rank
from test_megatron_scores import packed_lengths

from cce_dist import linear_log_probs
from cce_dist.integrations import megatron as cce_megatron
from cce_dist.integrations import nemo_rl as cce_nemo_rl
from cce_dist.integrations import patching
from cce_dist.integrations import trl as cce_trl
from cce_dist.integrations import verl as cce_verl
from cce_dist.integrations.megatron import loss as megatron_loss


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
    weight = output_layer.weight if output_weight is None else output_weight
    group = parallel_state.get_tensor_model_parallel_group()
    scores = verl().linear_cross_entropy(hidden_states, weight, labels, context.temperature, "none", group)
    return SimpleNamespace(log_probs=scores[0], entropy=scores[1])


class MegatronEngine:
    """Turns fused kernels off as verl's does."""

    engine_config: Any
    model_config: Any

    def _maybe_enable_fused_kernels(self):
        if self.model_config.mtp.enable:
            self.engine_config.use_fused_kernels = False


def _megatron_gptmodel_postprocess(self, hidden_states, output_processor=None, output_processor_context=None):
    """Gives logits to everybody, as verl's does."""
    return "logits"


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


def _gpt_forward_with_linear_ce_fusion(self, hidden, labels=None, packed_seq_params=None):
    """Ends as NeMo-RL's of this name does; ``self`` has the weight and the groups."""
    groups = {"tp_group": self.tp_group, "cp_group": self.cp_group}
    rows = {"vocab_start_index": 0, "vocab_end_index": len(self.weight)}
    return nemo().from_parallel_hidden_states_to_logprobs(hidden, self.weight, None, labels, **rows, **groups)


def allgather_cp_sharded_tensor(tensor, cp_group, seq_dim):
    """Gathers as NeMo-RL's does: a rank has two of 2 size pieces, and backward sums over ranks."""
    pieces = [piece for each in all_gather(tensor, group=cp_group) for piece in each.chunk(2, seq_dim)]
    return torch.cat([*pieces[::2], *pieces[1::2][::-1]], seq_dim)


def get_next_token_logprobs_from_logits(input_ids, next_token_logits, sampling_params=None):
    raise AssertionError("these are log-probabilities already")


def forward_with_post_processing_fn(
    data_iterator, model, post_processing_fn, sampling_params, use_fused_linear_logprobs
):
    """Passes a microbatch on as NeMo-RL's does."""
    batch = next(data_iterator)
    return model(labels=batch.input_ids_cp_sharded, packed_seq_params=batch.packed_seq_params)


class LossPostProcessor:
    """The parameters of NeMo-RL's; its loss says whether it takes packed log-probabilities."""

    def __init__(self, loss_fn: Any) -> None:
        self.loss_fn = loss_fn

    def __call__(self, data_dict, packed_seq_params=None, global_valid_seqs=None, global_valid_toks=None):
        return lambda log_probs: (log_probs, packed_seq_params)


def stand_in(path: str, **names: Any) -> Any:
    """Return the module of a package, its own or one with these names, to which other tests may have added more."""
    try:
        module = importlib.import_module(path)
    except ImportError:
        parts = path.split(".")
        for count in range(1, len(parts)):
            sys.modules.setdefault(".".join(parts[:count]), types.ModuleType(".".join(parts[:count])))
        sys.modules[path] = module = types.ModuleType(path)
    if getattr(module, "__file__", None) is None:
        vars(module).update({name: names[name] for name in names if not hasattr(module, name)})
    return module


def verl() -> Any:
    """Return verl's module of models, which has imported the function from that of the kernel."""
    apply: Any = LinearCrossEntropy.apply
    kernel = stand_in(cce_verl.PATCH.module, LinearCrossEntropy=LinearCrossEntropy, linear_cross_entropy=apply)
    return stand_in(
        "verl.models.mcore.model_forward_fused",
        linear_cross_entropy=kernel.linear_cross_entropy,
        fused_output_processor=fused_output_processor,
    )


def verls_mtp() -> tuple[Any, Any]:
    """Return verl's engine of Megatron, and its module of a model that predicts several tokens."""
    verl()
    engine, postprocess = (patch.module for patch in cce_verl.MTP)
    functions = {"_megatron_gptmodel_postprocess": _megatron_gptmodel_postprocess}
    return stand_in(engine, MegatronEngine=MegatronEngine).MegatronEngine, stand_in(postprocess, **functions)


def nemo() -> Any:
    names = from_parallel_hidden_states_to_logprobs, _gpt_forward_with_linear_ce_fusion, allgather_cp_sharded_tensor
    names += (get_next_token_logprobs_from_logits,)
    home = stand_in(cce_nemo_rl.PATCH.module, **{each.__name__: each for each in names})
    if is_here(home):
        use_stand_ins()
    else:
        step = {"forward_with_post_processing_fn": forward_with_post_processing_fn}
        stand_in("nemo_rl.models.megatron.train", LossPostProcessor=LossPostProcessor, **step)
    return home


def is_here(module: Any) -> bool:
    """Return whether a module is the package's own, and no stand-in."""
    return hasattr(module, "__file__")


# An adapter, and the module of the package that calls the function by a name of its own.
ADAPTERS: dict[str, tuple[Any, Callable]] = {
    "verl": (cce_verl, verl),
    "NeMo-RL": (cce_nemo_rl, nemo),
    "TRL": (cce_trl, lambda: pytest.importorskip("trl.trainer.grpo_trainer")),
}


@pytest.fixture(autouse=True)
def _their_own_again() -> Iterator[None]:
    verl()
    nemo()
    patching.say_once.cache_clear()
    yield
    for adapter, _ in ADAPTERS.values():
        adapter.uninstall()


@pytest.mark.parametrize(
    "temperature",
    [0.7, torch.tensor(0.7), torch.rand(2, TOKENS).add(0.5), torch.tensor([[0.5], [2.0]])],
    ids=["number", "0-d", "per-token", "per-sample"],
)
def test_verl_with_the_whole_vocabulary(temperature: Any, caplog: pytest.LogCaptureFixture) -> None:
    """As verl's forwards of transformers call it. Catches a temperature of another token, outputs that are not flat."""
    cce_verl.install()
    hidden, weight, labels = operands(2)
    per_token = temperature.expand_as(labels) if isinstance(temperature, Tensor) else temperature

    def dense(hidden: Tensor, weight: Tensor) -> list[Tensor]:
        return [x.view(-1) for x in dense_scores(hidden @ weight.t(), labels, per_token)]

    for _ in range(2):
        compare(lambda *x: verl().linear_cross_entropy(*x, labels, temperature, "none"), dense, hidden, weight)
    assert caplog.messages == ["cce_dist: verl's log-probabilities come from hidden states (linear_log_probs)"]


def verls_batch() -> tuple[dict[str, Any], Tensor]:
    """Return a microbatch with ``sampling_mask``, and [T, VOCAB] bool, the lists. A sequence's sampler cut nothing."""
    generator = torch.Generator().manual_seed(6)
    lengths = [5, 3, 4]
    ids = torch.randint(VOCAB, (sum(lengths),), generator=generator)
    likely = torch.rand(len(ids), VOCAB, generator=generator).scatter(1, ids[:, None], 2.0)
    sizes = torch.randint(1, 7, ids.shape, generator=generator)
    prompt = torch.cat([torch.arange(n) < 2 for n in lengths])
    sizes[prompt], sizes[5:8] = 0, 0
    mask = likely.topk(6).indices.int().masked_fill(torch.arange(6) >= sizes[:, None], -1)
    kept = torch.zeros(likely.shape).scatter_(1, mask.long().clamp(min=0), (mask >= 0).float()) > 0
    offsets = torch.tensor([0, *lengths]).cumsum(0)

    def jagged(values: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(values, offsets)

    batch = {"input_ids": jagged(ids), "sampling_mask": jagged(mask), "loss_mask": jagged((~prompt).int())}
    return batch, kept | ~kept.any(1, keepdim=True)


@pytest.mark.parametrize("trained", [False, True])
def test_verl_keeps_fused_kernels_with_predictions_that_it_does_not_train(trained: bool) -> None:
    kind, patched = verls_mtp()
    engine = SimpleNamespace(module=[], is_value_model=False, model_config=SimpleNamespace())
    engine.model_config.mtp = SimpleNamespace(enable=True, enable_train=trained)
    for mtp in (False, True):
        engine.engine_config = SimpleNamespace(use_fused_kernels=True, use_remove_padding=True)
        cce_verl.install(mtp=mtp)
        kind._maybe_enable_fused_kernels(engine)
        assert engine.engine_config.use_fused_kernels is (mtp and not trained)
    model = SimpleNamespace(post_process=False)
    hidden = torch.randn(3, 1, 4)
    given = {"hidden_states": hidden, "output_processor": lambda: None, "output_processor_context": None}
    assert patched._megatron_gptmodel_postprocess(model, **given) is hidden  # a stage without a head


def packed_by_verl(case: Any, replay: bool = False) -> None:
    """verl's own packing, cut and gathered over context-parallel ranks, in a model that predicts one token or two.

    Beside its path over logits, with ``replay`` masked. Catches labels of another sequence, and an output_processor that nobody
    calls.
    """
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
    from test_megatron import build

    batch, kept = verls_batch()
    ids, sampled = batch["input_ids"], batch["loss_mask"].values().roll(-1)
    sampled[ids.offsets()[1:] - 1] = 0

    def score(logits: Tensor, label: Tensor) -> dict[str, Tensor]:  # labels are numbers of tokens
        logits = gather_from_tensor_model_parallel_region(logits)
        if replay:
            logits = logits.masked_fill(~kept[label], -1e30)
        log_probs, entropy = dense_scores(logits, ids.values()[label], 0.7)
        return {"log_probs": log_probs, "entropy": entropy}

    _, patched = verls_mtp()
    cce_verl.install(mtp=True, sampling_mask="megatron")
    registry, engine = (importlib.import_module(patch.module) for patch in cce_verl.REPLAY["megatron"][::-1])
    on_logits = importlib.import_module("verl.models.mcore.model_forward").gptmodel_forward_model_engine

    def run(ours: bool, dtype: torch.dtype) -> Any:
        model = build(case)[0].to(dtype)
        if case.mtp:
            patched.patch_postprocess(model)
        if ours:
            verl().patch_fused_forward(model)
            given = batch if replay else {**batch, "sampling_mask": None}
            engine.MegatronEngineWithLMHead.prepare_model_inputs(SimpleNamespace(), given)
            config = SimpleNamespace(architectures=["LlamaForCausalLM"])
            fused = registry.get_mcore_forward_fused_model_engine_fn(config)
            how = {"temperature": 0.7, "calculate_entropy": True, "pad_token_id": 0, "multi_modal_inputs": {}}
            out = fused(model=model, input_ids=ids, labels=ids.clone(), **how)
        else:
            numbers = torch.nested.nested_tensor_from_jagged(torch.arange(len(ids.values())), ids.offsets())
            out = on_logits(model, ids, {}, logits_processor=score, logits_processor_args={"label": numbers})
        return model, out["log_probs"].values() * sampled, out["entropy"].values() * sampled

    compare_models(f"verl's packing, {case}, {replay=}", run)  # which finds no gradient of the second prediction


def alone(size: int = 1) -> Any:
    """Return a group of one rank, or of another size."""
    return SimpleNamespace(size=lambda: size, rank=lambda: 0)


def nemos(hidden: Tensor, weight: Tensor, labels: Tensor, group: Any, rank: int = 0, **more: Any) -> tuple:
    """Return what NeMo-RL's function returns, called as its ``GPTModel.forward`` does, and no entropy."""
    rows = len(weight)
    rest = {"vocab_start_index": rank * rows, "vocab_end_index": (rank + 1) * rows, "tp_group": group, "chunk_size": 4}
    log_probs = nemo().from_parallel_hidden_states_to_logprobs(hidden, weight, None, labels, **rest, **more)
    return log_probs, log_probs.new_zeros(())


def next_ids(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probabilities [B, S - 1] of the next ids, of hidden states [S, B, D]."""
    log_probs, _ = dense_scores((hidden @ weight.t()).transpose(0, 1)[:, :-1], labels[:, 1:])
    return log_probs, log_probs.new_zeros(())


def test_nemo_rl_on_one_rank(caplog: pytest.LogCaptureFixture) -> None:
    """Catches log-probabilities of a token itself in place of the next, and of another order of tokens."""
    cce_nemo_rl.install()
    hidden, weight, labels = operands(2)
    hidden = hidden.transpose(0, 1)
    compare(lambda h, w: nemos(h, w, labels, alone()), lambda h, w: next_ids(h, w, labels), hidden, weight)
    log_probs, _ = nemos(hidden, weight.requires_grad_(), labels, alone(), inference_only=True)
    assert not log_probs.requires_grad and log_probs.shape == (2, TOKENS - 1)
    assert caplog.messages == ["cce_dist: NeMo-RL's log-probabilities come from hidden states (linear_log_probs)"]


def nemos_step() -> Any:
    return importlib.import_module("nemo_rl.models.megatron.train").forward_with_post_processing_fn


def nemos_mask(tokens: Sequence[Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """Return NeMo-RL's fields of a sampling mask, aligned with tokens, and [B, S, VOCAB] bool. Prompts have two tokens."""
    own, generator = pad_sequence([*tokens], batch_first=True)[..., None], torch.Generator().manual_seed(4)
    likely = torch.rand(*own.shape[:2], VOCAB, generator=generator).scatter(2, own, 2.0)
    ids, sizes = likely.topk(6).indices.int(), torch.randint(1, 7, own.shape[:2], generator=generator)
    sizes[:, :2] = 0
    sizes.masked_fill_(torch.arange(own.shape[1]) >= torch.tensor([*map(len, tokens)])[:, None], 0)
    listed = torch.arange(6) < sizes[..., None]
    kept = torch.zeros_like(likely).scatter_(2, ids.long(), listed.float()) > 0
    return {"sampling_mask_token_ids": ids, "sampling_mask_sizes": sizes}, kept | (sizes[..., None] == 0)


def packed_by_nemo(group: Any, replay: bool = False) -> None:
    """Catches a label of another sequence, rows in another's place, and what a slice of a sequence knows alone.

    With ``replay`` the microbatch has what the sampler kept, and the loss a reference policy. Catches a list of the token
    before, or of another sequence, and lists in what is compared with the reference.
    """
    lengths, size = [8, 0, 4, 8], group.size()
    packed, (hidden, weight, _) = packed_lengths(*lengths), operands(2)
    hidden = hidden.view(-1, 1, hidden.shape[-1])[: sum(lengths)]
    ids = torch.randint(VOCAB, (sum(lengths),), generator=torch.Generator().manual_seed(3))
    pieces = torch.arange(sum(lengths)).split(lengths)
    mine = torch.cat([of_this_rank(each, group.rank(), size) for each in pieces])
    mask, kept = nemos_mask(ids.split(lengths))
    given: dict[str, Any] = {"sampling_params": SimpleNamespace(top_k=5 if replay else -1, top_p=1.0)}
    given["use_fused_linear_logprobs"] = True
    loss = SimpleNamespace(loss_fn=SimpleNamespace(reference_policy_kl_penalty=0.1))

    def summed(grad: Tensor) -> Tensor:
        return sum(all_gather(grad, group=group)) if size > 1 else grad  # type: ignore[return-value]

    def ours(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        whole = weight.view_as(weight)
        whole.register_hook(summed)
        model = SimpleNamespace(weight=whole, tp_group=alone(), cp_group=group)
        forward = functools.partial(nemo()._gpt_forward_with_linear_ce_fusion, model, hidden)
        data = mask | {"input_ids": pad_sequence([*ids.split(lengths)], batch_first=True)}
        batch = SimpleNamespace(data_dict=data, input_ids_cp_sharded=ids[None, mine], packed_seq_params=packed)
        log_probs = nemos_step()(iter([batch]), forward, loss, **given)
        log_probs.register_hook(lambda grad: grad / size)  # every rank has the whole loss
        if not replay:
            return log_probs, log_probs.new_zeros(())
        whole = nemo().get_next_token_logprobs_from_logits(data["input_ids"], log_probs)
        whole.register_hook(lambda grad: grad / size)
        return log_probs, whole

    def dense(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        rows = [next_ids(hidden[each], weight, ids[None, each])[0][0] for each in pieces]
        log_probs = pad_sequence(rows, batch_first=True)
        if not replay:
            return log_probs, log_probs.new_zeros(())
        logits = [(hidden[each, 0] @ weight.t())[:-1] for each in pieces]
        masked = [z.masked_fill(~row[1 : len(z) + 1], -torch.inf) for z, row in zip(logits, kept, strict=True)]
        rows = [dense_scores(z, ids[each[1:]])[0] for z, each in zip(masked, pieces, strict=True)]
        sampled = mask["sampling_mask_sizes"][:, 1:] > 0
        return torch.where(sampled, pad_sequence(rows, batch_first=True), 0.0), log_probs

    compare(ours, dense, hidden, weight, mine)


@pytest.mark.skipif(is_here(nemo()), reason="test_nemo_rl.py has NeMo-RL's own forward")
def test_packed_sequences_of_nemo_rl() -> None:
    """Log-probabilities that are unpacked already go around NeMo-RL's own unpacking, with its width."""
    cce_nemo_rl.install()
    packed_by_nemo(alone())
    packed_by_nemo(alone(), replay=True)
    given: dict[str, Any] = dict(sampling_params=SimpleNamespace(top_k=-1, top_p=0.9), use_fused_linear_logprobs=True)
    batch = SimpleNamespace(data_dict={"sampling_mask_sizes": 1}, input_ids_cp_sharded=torch.zeros(1, 8).long())
    with pytest.raises(ValueError, match="the microbatch has no sampling_mask_token_ids"):
        nemos_step()(iter([batch]), None, None, **given)
    packed, scores = packed_lengths(4, 4), torch.ones(2, 3)
    for fused, wanted in ((True, None), (False, packed)):
        process = LossPostProcessor(SimpleNamespace(use_fused_linear_logprobs=fused))
        found, lengths = process({"input_ids": torch.zeros(2, 6)}, packed)(scores)
        assert lengths is wanted and found.shape == ((2, 5) if fused else (2, 3))


def verl_over_two_ranks(sequence_parallel: bool, mine: slice, rows: slice) -> None:
    """Catches a gradient of hidden states that is a shard's part alone, and one that is summed twice."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(2)
    hidden, weight, labels = operands(1)

    def ours(hidden: Tensor, shard: Tensor) -> tuple[Tensor, Tensor]:
        found = verl().fused_output_processor(
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

    try:
        compare(ours, dense, hidden.transpose(0, 1), weight, mine, rows)
    finally:
        parallel_state.destroy_model_parallel()


def nemo_rl_over_two_ranks(mine: slice, rows: slice) -> None:
    """Catches hidden states that are gathered though they are whole, and a gradient that is summed twice or never."""
    hidden, weight, labels = operands(2)
    how = labels, dist.group.WORLD, dist.get_rank()
    given = hidden.transpose(0, 1), weight, mine, rows
    compare(lambda h, w: nemos(h, w, *how), lambda h, w: next_ids(h, w, labels), *given)
    if not is_here(nemo()):  # test_nemo_rl.py has NeMo-RL's own forward
        packed_by_nemo(dist.group.WORLD)
        packed_by_nemo(dist.group.WORLD, replay=True)


def two_ranks() -> None:
    use_cpu()
    verl()
    nemo()
    cce_verl.install()
    cce_nemo_rl.install()
    rank = dist.get_rank()
    half, rows = (slice(rank * size // 2, (rank + 1) * size // 2) for size in (TOKENS, VOCAB))
    for sequence_parallel in (True, False):
        mine = half if sequence_parallel else slice(None)
        verl_over_two_ranks(sequence_parallel, mine, rows)
        nemo_rl_over_two_ranks(mine, rows)
        test_megatron_scores.over_two_ranks(sequence_parallel)
        if is_here(verl()):
            from test_megatron import Case, on_layout

            how: dict[str, Any] = {"own_tokens": True, "positions": "rope"}
            on_layout(Case(tp=2, sequence_parallel=sequence_parallel, mtp=1, **how), packed_by_verl)
            on_layout(Case(tp=2, sequence_parallel=sequence_parallel, **how), packed_by_verl, True)
            if not sequence_parallel:
                on_layout(Case(cp=2, **how), packed_by_verl)
                on_layout(Case(cp=2, **how), packed_by_verl, True)


@pytest.mark.slow
def test_two_tensor_parallel_ranks() -> None:
    run_ranks(two_ranks, 2)


@pytest.mark.parametrize(("adapter", "called_by"), ADAPTERS.values(), ids=ADAPTERS)
def test_install_is_undone_and_done_again(adapter: Any, called_by: Callable) -> None:
    caller = called_by()
    home, name = sys.modules[adapter.PATCH.module], adapter.PATCH.name
    theirs = getattr(home, name)
    adapter.install()
    ours = getattr(caller, name)
    assert ours is getattr(home, name) and ours != theirs
    adapter.install(workspace_bytes=1 << 20)
    assert getattr(caller, name) is getattr(home, name) is not ours
    assert getattr(caller, name).cce_original == theirs
    adapter.uninstall()
    adapter.uninstall()
    assert getattr(caller, name) == getattr(home, name) == theirs


def test_nemo_rl_is_patched_in_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    nemo()
    cce_nemo_rl.install()
    process = importlib.import_module("nemo_rl.models.megatron.train").LossPostProcessor
    assert hasattr(process.__call__, "cce_original")
    cce_nemo_rl.uninstall()
    assert not hasattr(process.__call__, "cce_original")
    monkeypatch.setattr(process, "__call__", other)
    with pytest.raises(RuntimeError, match=r"there LossPostProcessor.__call__ takes self, data_dict, .*; in .* model"):
        cce_nemo_rl.install()
    assert not hasattr(nemo().from_parallel_hidden_states_to_logprobs, "cce_original")


def test_batch_invariance_reaches_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an option that is dropped on its way. test_log_probs.py compares the bits of a token in several batches."""
    calls = mock.Mock(wraps=linear_log_probs)
    for module in (cce_verl, cce_nemo_rl, megatron_loss):
        monkeypatch.setattr(module, "linear_log_probs", calls)
    how: dict[str, Any] = {"backend": "triton", "batch_invariant": True}
    cce_verl.install(**how)
    cce_nemo_rl.install(**how)
    hidden, weight, labels = (x.to(DEVICE) for x in operands(2))
    verl().linear_cross_entropy(hidden, weight, labels)
    hidden = hidden.transpose(0, 1)
    nemos(hidden, weight, labels, alone())
    cce_megatron.vocab_parallel_log_probs(hidden, weight, labels, None, options=cce_megatron.Options(**how))
    assert [call.kwargs["batch_invariant"] for call in calls.call_args_list] == [True] * 3


def test_batch_invariance_is_refused_on_torch() -> None:
    """As options are made. test_log_probs.py has calls where "auto" comes to it."""
    for make in (cce_verl.install, cce_nemo_rl.install, cce_trl.install, cce_megatron.Options):
        with refused("batch_invariant needs the Triton backend"):
            make(backend="torch", batch_invariant=True)


NOT_SERVED: dict[str, tuple[Callable, str]] = {
    "context": (lambda h, w, y: nemos(h, w, y, alone(), cp_group=alone(2)), "need packed_seq_params"),
    "rows": (lambda h, w, y: nemos(h, w, y, alone(), rank=1), r"has the rows \[0, 64\], NeMo-RL says"),
    "length": (lambda h, w, y: nemos(h[1:], w, y, alone()), "neither whole nor slices"),
    "order": (lambda h, w, y: verl().linear_cross_entropy(h, w, y), "one order of tokens"),
    "mean": (lambda h, w, y: verl().linear_cross_entropy(h, w, y, reduction="mean"), "reduction 'none', got 'mean'"),
}


@pytest.mark.parametrize(("call", "message"), NOT_SERVED.values(), ids=NOT_SERVED)
def test_a_call_that_is_not_served_is_one_line(call: Callable, message: str) -> None:
    cce_verl.install()
    cce_nemo_rl.install()
    hidden, weight, labels = operands(2)
    with refused(message):
        call(hidden.transpose(0, 1), weight, labels)


def other(model, temperature=1.0, outputs=()): ...


@pytest.mark.parametrize(
    ("package", "place", "message"),
    [
        ("verl", "LinearCrossEntropy", r"knows verl 0.5 to 0.9: there .* temperature, .*; in .* nothing"),
        ("NeMo-RL", cce_nemo_rl.PATCH.name, "knows NeMo-RL 0.7 .*: there from_parallel_.* takes .*; in .* outputs"),
        ("TRL", "add_fused_lm_head", r"knows TRL 1\.16: there add_fused_lm_head takes .*; in .* model, temperature, o"),
        ("TRL", "FusedCausalLMOutput", "FusedCausalLMOutput takes loss, "),
    ],
)
def test_another_version_is_refused(package: str, place: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, called_by = ADAPTERS[package]
    called_by()
    monkeypatch.setattr(sys.modules[adapter.PATCH.module], place, other)
    with pytest.raises(RuntimeError, match=message):
        adapter.install()
    monkeypatch.delattr(sys.modules[adapter.PATCH.module], place)
    with pytest.raises(RuntimeError, match=r"in .* nothing$"):
        adapter.install()
    monkeypatch.setitem(sys.modules, adapter.PATCH.module, None)
    with pytest.raises(ImportError, match=f"needs {package}"):
        adapter.install()
    with pytest.raises(ValueError, match="backend must be one of"):
        adapter.install(backend="cuda")
