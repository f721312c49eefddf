"""convert(shard_over=mesh): under FSDP2 the head's rows stay where they are, and a training goes on as FSDP2's own."""

import dataclasses
import datetime
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

pytest.importorskip("transformers")

from support.refused import refused
from tiny_trainer import LENGTH, VOCAB, compared, tiny_model

import cce_dist
from cce_dist import VocabParallelHead, VocabShard, groups, reference
from cce_dist.integrations.fsdp import Rows

REACH = 1e-6  # of the losses, relative, in fp32
FP32 = MixedPrecisionPolicy()
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclasses.dataclass(frozen=True)
class Case:
    """A training of a tiny model, with norms clipped and AdamW fused."""

    model: str = ""  # of transformers (Gemma2 has a tied head), or ``Headed``; empty: ``Small``
    replicas: int = 1
    microbatches: int = 1
    sync: bool = True  # of every microbatch
    count: bool = False  # num_items_in_batch: a sum, divided by the labels of all ranks
    factor: float | None = None  # set_gradient_divide_factor
    precision: MixedPrecisionPolicy = FP32
    equal: bool = False  # tokens of the ranks, and promised
    in_groups: int | None = None  # tokens of a group whose gradients are made in forward
    scaled: bool = False  # each rank's loss by a factor of its own, which forward cannot expect
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)


CASES = [
    Case("Llama", options={"z_loss_weight": 0.1, "label_smoothing": 0.1}),
    Case("Gemma2", microbatches=2, sync=False, count=True, in_groups=7),
    Case("Phi", microbatches=2, factor=3.0, equal=True, in_groups=20),  # a bias
    Case(in_groups=5, scaled=True),
    Case("Headed", microbatches=2, sync=False, in_groups=7, factor=3.0),
]
REPLICATED = [
    Case("Headed", replicas=2, count=True),
    Case(replicas=2, microbatches=2, sync=False),
    Case(replicas=2, factor=3.0, count=True),
    Case("Headed", replicas=2, factor=3.0),
]


class Small(nn.Module):
    """A tied head with a bias, a sentence's padding, and no import of transformers; its batches may be empty."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = nn.Module()
        self.model.layers = nn.ModuleList([nn.Linear(16, 16)])
        self.embed = nn.Embedding(VOCAB, 16, padding_idx=3)
        self.lm_head: Any = nn.Linear(16, VOCAB)
        self.lm_head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Tensor | None = None) -> dict[str, Tensor]:
        logits: Any = self.lm_head(self.model.layers[0](self.embed(input_ids)).tanh())[:, :-1]
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = F.cross_entropy(logits.reshape(-1, VOCAB), labels[:, 1:].reshape(-1), reduction=reduction)
        return {"loss": loss if num_items_in_batch is None else loss / num_items_in_batch}


class Headed(Small):
    """A model of the user's own, with our head, which is not tied."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.lm_head: Any = VocabParallelHead(16, VOCAB, bias=True, softcap=3.0, **given)

    def forward(self, input_ids: Tensor, labels: Any = None, num_items_in_batch: Any = None) -> dict[str, Any]:
        hidden = self.model.layers[0](self.embed(input_ids)).tanh()
        if labels is None:
            return {"logits": self.lm_head(hidden)}
        return {"loss": self.lm_head(hidden[:, :-1], labels[:, 1:], num_tokens=num_items_in_batch)}


def mesh_of(replicas: int = 1) -> DeviceMesh:
    ranks = dist.get_world_size() // replicas
    if replicas == 1:
        return init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    return init_device_mesh("cpu", (replicas, ranks), mesh_dim_names=("replicate", "dp"))


def build(case: Case, ours: bool, mesh: Any = None, over: Any = None) -> Any:
    """Return a model under FSDP2. ``over`` is the head's mesh, if it has another one than FSDP2."""
    mesh = mesh or mesh_of(case.replicas)
    torch.manual_seed(0)
    split: dict[str, Any] = {"shard_over": over or mesh, "equal_tokens": case.equal} if ours else {}
    if case.model == "Headed":
        model: Any = Headed(**split)
    else:
        model = tiny_model(case.model, **case.sizes) if case.model else Small()
        cce_dist.convert(model, **split, **case.options)
    ignored = set(model.lm_head.parameters()) if ours else None
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=case.precision, ignored_params=ignored)
        if case.factor is not None:
            module.set_gradient_divide_factor(case.factor)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    return model


def batch(case: Case, number: int = 0) -> dict[str, Tensor]:
    """Return ids and labels of this rank alone."""
    rank = dist.get_rank()
    draw = torch.Generator().manual_seed(1000 * number + rank)
    length = LENGTH if case.equal else LENGTH - (number + rank) % 3
    ids = torch.randint(2, VOCAB, (2, length), generator=draw)
    return {"input_ids": ids, "labels": ids.masked_fill(torch.rand(ids.shape, generator=draw) < 0.3, -100)}


def adam(model: Any) -> Any:
    # A gradient that is 0 but for roundings, as of a bias of keys, must not step.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, fused=True)


def train(model: Any, case: Case, optimizer: Any, steps: range) -> tuple[list[float], list[float]]:
    """Return the losses and the norms of the gradients."""
    losses, norms = [], []
    for step in steps:
        batches = [batch(case, step * case.microbatches + number) for number in range(case.microbatches)]
        count = torch.tensor(float(sum((one["labels"][:, 1:] != -100).sum() for one in batches)))
        dist.all_reduce(count)
        for number, one in enumerate(batches):
            model.set_requires_gradient_sync(case.sync or number == case.microbatches - 1)
            loss = model(**one, **({"num_items_in_batch": count} if case.count else {}))["loss"]
            (loss * (1 + dist.get_rank() * case.scaled)).backward()
            losses.append(loss.item())
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def whole(model: Any) -> dict[str, Tensor]:
    return {name: x.full_tensor().detach() for name, x in model.named_parameters()}


def compare(case: Case, steps: int = 3) -> None:
    """Compare losses, norms and parameters with FSDP2's own, and the bits of replicas.

    Catches: a gradient that is summed over the ranks of a shard alone.
    """
    models = [build(case, ours) for ours in (False, True)]
    with groups.of_rows(case.in_groups), compared() as differed:
        (losses, norms), (our_losses, our_norms) = (train(model, case, adam(model), range(steps)) for model in models)
    # Each rank's tokens weigh as its own mean says; if they do not, the weight's gradient is made anew.
    assert differed == [case.scaled] * (steps * case.microbatches if case.in_groups else 0)
    torch.testing.assert_close(our_losses, losses, rtol=REACH, atol=0, msg=lambda m: f"{case}: {m}")
    torch.testing.assert_close(our_norms, norms, rtol=4 * REACH, atol=0, msg=lambda m: f"{case}: {m}")
    stock, ours = (whole(model) for model in models)
    torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-5, msg=lambda m: f"{case}: {m}")
    for rows in models[1].lm_head.parameters() if case.replicas > 1 else ():
        mine = rows.to_local().detach()
        theirs = [torch.empty_like(mine) for _ in range(case.replicas)]
        dist.all_gather(theirs, mine, group=mesh_of(case.replicas).get_group(0))
        assert all(torch.equal(other, mine) for other in theirs), f"{case}: replicas drift"


def check_a_rank_without_tokens() -> None:
    """Its rows serve the others; an embedding's padding has no gradient; a rank may have no rows, either."""
    gradients = []
    ids = torch.arange(12 * (1 - dist.get_rank())).view(-1, 6)
    for ours in (False, True):
        model = build(Case(), ours)
        model(ids, ids, torch.tensor(10.0))["loss"].backward()
        gradients.append({name: x.grad.full_tensor() for name, x in model.named_parameters()})
    torch.testing.assert_close(gradients[1], gradients[0])
    mesh = mesh_of()
    few = nn.Embedding(1, 4)
    rows: Any = Rows(mesh, VocabShard.even(1, mesh.get_group()), False)
    found = rows.lookup(torch.zeros(3, dtype=torch.long), rows.local(rows.split(few.weight), torch.float32), None)
    assert torch.equal(found, few.weight.expand(3, 4))


def check_precision() -> None:
    """fp32 rows and bf16 products: embeddings to the bit, gradients no further from fp32's than FSDP2's.

    tests/benchmarks/test_steps.py has the bytes that ranks send.
    """
    case = Case("Gemma2", equal=True, precision=BF16, sizes={"hidden_size": 24})
    truth = build(dataclasses.replace(case, precision=FP32), False)
    stock, ours = build(case, False), build(case, True)
    found, embedded = [], []
    for model in (truth, stock, ours):
        model.model.embed_tokens.register_forward_hook(lambda *args: embedded.append(args[-1].detach()))
        model(**batch(case)).loss.backward()
        found.append(model.lm_head.weight.grad.full_tensor())
    assert torch.equal(embedded[1], embedded[2]) and embedded[2].dtype == torch.bfloat16
    assert found[2].dtype == ours.lm_head.weight.dtype == torch.float32
    errors = [(gradient - found[0]).norm() for gradient in found[1:]]
    assert 0 < errors[1] <= 1.1 * errors[0], errors


def check_evaluation() -> None:
    """Logits, losses and generated ids, and gradients through logits."""
    case, found = Case("Gemma2", equal=True), []
    for ours in (False, True):
        model = build(case, ours).eval()
        one = batch(case)
        with torch.no_grad():
            answer = model(**one)
            logits = [answer.loss, answer.logits + 0, model(input_ids=one["input_ids"]).logits]
            ids = model.generate(one["input_ids"][:, :4], max_new_tokens=3, do_sample=False)
        model(input_ids=one["input_ids"]).logits.square().mean().backward()
        found.append([*logits, ids, model.lm_head.weight.grad.full_tensor()])
        model = build(Case("Headed"), ours)
        logits = model(one["input_ids"])["logits"]
        logits.square().mean().backward()
        found[-1] += [logits.detach(), model.lm_head.bias.grad.full_tensor()]
    torch.testing.assert_close(found[1], found[0])


def check_compiled_body() -> None:
    """A body that is compiled, the lookup with it."""
    case = Case("Gemma2")
    plain, compiled = build(case, True), build(case, True)
    compiled.model.compile(backend="eager")
    torch.testing.assert_close(compiled(**batch(case)).loss, plain(**batch(case)).loss, rtol=REACH, atol=0)


def check_what_is_refused() -> None:
    import peft

    mesh = mesh_of()

    def tied(kind: Callable, **options: Any) -> Any:
        model = tiny_model(tie_word_embeddings=False)
        model.extra = kind(VOCAB, 16, **options)
        model.extra.weight = model.lm_head.weight
        return model

    class Own(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return F.embedding(input, self.weight)

    two_owners = tiny_model("Phi")
    two_owners.bias = two_owners.lm_head.bias
    sharded = tiny_model()
    fully_shard(sharded, mesh=mesh)
    cube: Any = init_device_mesh("cpu", (1, 1, dist.get_world_size()))
    lora = peft.LoraConfig(target_modules=["lm_head"])
    models: list[tuple[str, Any, dict[str, Any]]] = [
        ("no nn.Embedding", tied(lambda rows, columns: nn.Linear(columns, rows)), {"shard_over": mesh}),
        ("max_norm", tied(nn.Embedding, max_norm=1.0), {"shard_over": mesh}),
        ("does not leave the lookup", tied(Own), {"shard_over": mesh}),
        ("bias is also another module's", two_owners, {"shard_over": mesh}),
        ("before fully_shard", sharded, {"shard_over": mesh}),
        ("LoRA on the head", peft.get_peft_model(tiny_model(), lora), {"shard_over": mesh}),
        ("one dimension, or replicas and shards", tiny_model(), {"shard_over": cube}),
        ("a promise for shard_over", tiny_model(), {"equal_tokens": True}),
    ]
    for says, model, given in models:
        before = model.lm_head.weight
        with refused(says):
            cce_dist.convert(model, **given)
        assert model.lm_head.weight is before and not hasattr(model.lm_head, "cce_task"), "a refusal leaves no trace"
    scale = nn.Parameter(torch.ones(()))
    beside: list[dict[str, Any]] = [{"mesh": mesh}, {"sequence_parallel": True}, {"logit_scale": scale}]
    for given in beside:
        with pytest.raises(ValueError, match=f"shard_over goes without .*{next(iter(given))}"):
            VocabParallelHead(16, VOCAB, shard_over=mesh, **given)
    VocabParallelHead(16, VOCAB, shard_over=mesh, sequence_parallel=False)
    with pytest.raises(ValueError, match="one dimension, or replicas and shards"):
        VocabParallelHead(16, VOCAB, shard_over=cube)
    model = cce_dist.convert(tiny_model(tie_word_embeddings=True), shard_over=mesh)
    assert cce_dist.convert(model, shard_over=mesh) is model
    with pytest.raises(ValueError, match="split over data-parallel ranks"):
        cce_dist.revert(model)
    with pytest.raises(IndexError, match=f"id {VOCAB} is outside"):  # on every rank
        model(torch.tensor([[5, VOCAB if dist.get_rank() else 6]]))
    with mock.patch.dict(os.environ, CCE_DIST_DEBUG="1"):
        promised = cce_dist.convert(tiny_model(), shard_over=mesh)
        cce_dist.convert(promised, shard_over=mesh, equal_tokens=True)
        with pytest.raises(ValueError, match=rf"from {2 * LENGTH - 2} to {2 * LENGTH} tokens"):
            promised(**batch(Case()))


class Around(nn.Sequential):
    """A wrapper of the user's own."""

    def forward(self, **given: Any) -> Any:
        return self[0](**given)


def check_a_wrapper_alone() -> None:
    """fully_shard is called for a wrapper, which has a factor, a dtype and no parameter but the tied head and its bias."""
    for precision in (FP32, BF16):
        found = []
        for ours in (False, True):
            torch.manual_seed(0)
            model: Any = Small()
            model.model.layers[0] = nn.Identity()
            cce_dist.convert(model, shard_over=mesh_of() if ours else None)
            ignored = set(model.lm_head.parameters()) if ours else None
            wrapped: Any = fully_shard(Around(model), mesh=mesh_of(), mp_policy=precision, ignored_params=ignored)
            wrapped.set_gradient_divide_factor(3.0)
            wrapped.set_force_sum_reduction_for_comms(True)
            wrapped(**batch(Case()))["loss"].backward()
            found.append([one.grad.full_tensor() for one in model.lm_head.parameters()])
        rtol, atol = (2e-2, 2e-3) if precision is BF16 else (1e-5, 1e-7)
        torch.testing.assert_close(found[1], found[0], rtol=rtol, atol=atol)


def check_a_call_that_is_not_seen() -> None:
    """A head finds a ``fully_shard`` call that covers it, and refuses one that does not, where the gradient would differ."""
    found = []
    for forgotten in (False, True):
        model = build(Case("Headed", factor=3.0), True)
        if forgotten:  # as before torch 2.13
            model.lm_head.rows.state = None
        model(**batch(Case()))["loss"].backward()
        found.append(model.lm_head.weight.grad.full_tensor())
    assert torch.equal(*found)
    model = Headed(shard_over=mesh_of())
    body: Any = fully_shard(model.model.layers[0], mesh=mesh_of())
    model(**batch(Case()))["loss"].backward()
    body.set_gradient_divide_factor(3.0)
    with pytest.raises(ValueError, match="no fully_shard call covers the head"):
        model(**batch(Case()))


def check_a_mesh_of_other_names() -> None:
    """Norms are clipped over parameters of FSDP2 and rows together, a state is loaded, and convert knows the mesh again."""
    named = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("other",))
    for name in ("Headed", ""):
        case = Case(name)
        expected, model = build(case, True), build(case, True, over=named)
        model.load_state_dict(model.state_dict())
        assert train(model, case, adam(model), range(2)) == train(expected, case, adam(expected), range(2))
        if not name:
            assert cce_dist.convert(model, shard_over=named) is model


def check_arguments_of_the_loss() -> None:
    """num_tokens as ``linear_cross_entropy`` takes it; None for ignore_index; outputs beside the loss; one rank."""
    rank = dist.get_rank()
    hidden, labels = torch.randn(6, 16), torch.randint(VOCAB, (6,))
    labels[2] = -100
    outputs = ("nll", "entropy", "label_is_max")
    head: Any = VocabParallelHead(16, VOCAB, shard_over=mesh_of(), ignore_index=None, return_aux=outputs)
    dense: Any = reference.linear_cross_entropy(hidden, head.weight.full_tensor().detach(), labels)
    found: Any = head(hidden, labels)
    torch.testing.assert_close(found[:5], dense[:5])
    assert torch.equal(found.label_is_max, dense.label_is_max)
    count = torch.tensor(7.0, requires_grad=True)
    (of_count,) = torch.autograd.grad(head(hidden, labels, num_tokens=count).loss, count)
    torch.testing.assert_close(of_count, -dense.nll.sum() / 49)
    assert head(hidden, torch.full((6,), -100), num_tokens=torch.tensor(0)).loss == 0
    with pytest.raises(ValueError, match="num_tokens must"):  # test_bad_input.py has what else it is not
        head(hidden, labels, num_tokens=0)
    with pytest.raises(ValueError, match="target must be"):
        head(hidden, labels[:5])
    with mock.patch.dict(os.environ, CCE_DIST_DEBUG="1"):
        head(hidden, labels, num_tokens=20)
        with pytest.raises(RuntimeError, match=r"disagree on num_tokens: by rank \[20, 21\]"):
            head(hidden, labels, num_tokens=20 + rank)
        with pytest.raises((ValueError, RuntimeError), match="num_tokens must be positive in fp32, got 0"):
            head(hidden, labels, num_tokens=rank)
    alone = DeviceMesh("cpu", [0])
    if rank:
        for make in (
            lambda: VocabParallelHead(16, VOCAB, mesh=alone),
            lambda: cce_dist.convert(Small(), shard_over=alone),
        ):
            with pytest.raises(ValueError, match=r"this rank \(1\) is not a member of .*DeviceMesh"):
                make()
    else:
        build(Case(), True, mesh=alone)(**batch(Case()))["loss"].backward()


def check_engines_that_are_refused() -> None:
    """One line says what to do, where the head's rows would be gathered, averaged or replaced by somebody else."""
    mesh = mesh_of()
    for model in (Headed(shard_over=mesh), cce_dist.convert(Small(), shard_over=mesh)):
        with pytest.raises(ValueError, match="shard_over does not go with DDP"):
            nn.parallel.DistributedDataParallel(Around(model))
        with pytest.raises(ValueError, match="ignored_params=set"):
            fully_shard(Around(model), mesh=mesh)
    inner = Small()
    ddp = nn.parallel.DistributedDataParallel(inner)
    cce_dist.convert(inner, shard_over=mesh)
    with pytest.raises(ValueError, match="shard_over does not go with DDP"):
        ddp(**batch(Case()))
    with pytest.raises(ValueError, match="weight must be split over shard_over"):
        VocabParallelHead(16, VOCAB, shard_over=mesh, weight=nn.Parameter(torch.ones(VOCAB, 16)))
    loading = {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "True"}
    with mock.patch.dict(os.environ, loading), pytest.raises(ValueError, match="cpu_ram_efficient_loading"):
        cce_dist.convert(Small(), shard_over=mesh)


def check_meshes_with_replicas_that_are_refused() -> None:
    mesh, flat = mesh_of(replicas=2), DeviceMesh("cpu", range(4))
    for over, given in ((mesh["dp"], mesh), (mesh["replicate"], mesh["dp"]), (flat, mesh), (mesh, flat)):
        for model in (cce_dist.convert(Small(), shard_over=over), Headed(shard_over=over)):
            with pytest.raises(ValueError, match="give both the same mesh"):
                fully_shard(model, mesh=given, ignored_params=set(model.lm_head.parameters()))
    model = Headed(shard_over=mesh["dp"])
    fully_shard(model.model.layers[0], mesh=mesh)
    with pytest.raises(ValueError, match="no fully_shard call covers the head"):
        model(**batch(Case()))


def check_a_rank_that_skips_a_step() -> None:
    group: Any = dist.new_group(timeout=datetime.timedelta(seconds=1))
    model = cce_dist.convert(tiny_model(), shard_over=DeviceMesh.from_group(group, "cpu"))
    if dist.get_rank() == 0:
        with mock.patch.dict(os.environ, CCE_DIST_DEBUG="1"), pytest.raises(RuntimeError, match="Ranks 1 failed"):
            model(**batch(Case()))
    dist.barrier()


def two() -> None:
    for case in CASES:
        compare(case)
    check_a_rank_without_tokens()
    check_precision()
    check_evaluation()
    check_what_is_refused()
    check_a_wrapper_alone()
    check_a_call_that_is_not_seen()
    check_a_mesh_of_other_names()
    check_arguments_of_the_loss()
    check_engines_that_are_refused()
    check_a_rank_that_skips_a_step()
    check_compiled_body()


def test_two_ranks(ranks2: Callable) -> None:
    ranks2(two)


def replicated() -> None:
    for case in REPLICATED:
        compare(case)
    check_meshes_with_replicas_that_are_refused()


def test_replicas(ranks4: Callable) -> None:
    ranks4(replicated)


RESUMED = Case(count=True)


def resumed(folder: Path, saves: bool) -> None:
    """Save after two steps; others go on from there, with the rows split and without."""
    results = []
    for ours in (True, True, False):
        model = build(RESUMED, ours)
        optimizer = adam(model)
        first = saves and not results
        if first:
            train(model, RESUMED, optimizer, range(2))
        of_model, of_optimizer = get_state_dict(model, optimizer)
        state = {"model": of_model, "optimizer": of_optimizer}
        (dcp.save if first else dcp.load)(state, checkpoint_id=folder)
        if not first:
            set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
        results.append((train(model, RESUMED, optimizer, range(2, 4)), whole(model)))
    assert results[1][0] == results[0][0], "the same bits after a checkpoint"
    torch.testing.assert_close(results[2], results[0], rtol=4 * REACH, atol=1e-6)


def test_a_checkpoint_goes_on_at_any_number_of_ranks(ranks2: Callable, ranks4: Callable, tmp_path: Path) -> None:
    ranks2(resumed, tmp_path, True)
    ranks4(resumed, tmp_path, False)
