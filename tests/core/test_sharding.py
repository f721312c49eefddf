"""Every way in which a weight is split, every way in which a batch is cut, and what is communicated; on four ranks."""

import functools
import itertools
import logging
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.dense import assert_holds, draw
from support.ranks import shared_folder
from tiny_trainer import counted
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import cce_dist
from cce_dist import GradFilter, VocabParallelHead, VocabShard, decide, given, linear_cross_entropy, merge
from cce_dist.kernels import dense, memory
from cce_dist.kernels.tiles import interpreted
from cce_dist.tools.verify.cases import Gaussian, LossCase
from cce_dist.tools.verify.loss import LOSS
from collectives import Collectives, _is_kernel_of

N, D = 12, 8
data = functools.partial(draw, N, D)
VOCABULARIES = (33, 5, 1)  # over four ranks: uneven; 2, 2, 1 and 0 rows; all but one empty


@functools.cache
def meshes() -> tuple[DeviceMesh, DeviceMesh]:
    """Two by two ranks, and all four in a line."""
    # full_tensor() of a weight that is split twice gathers in two steps, and warns of it.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return square, init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


def test_kernels_of_a_collective():
    """Catches a reduce that takes the kernels of a reduce-scatter for its own, or the annotations of either."""
    suffix = "_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    kernels = {"all_reduce": "AllReduce", "reduce_scatter": "ReduceScatter", "reduce": "Reduce"}
    for name, (other, kernel) in itertools.product(kernels, kernels.items()):
        assert _is_kernel_of(f"ncclDevKernel_{kernel}{suffix}", name) == (name == other)
        assert not _is_kernel_of(f"nccl:{other}", name)


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _check_dtensors(vocab_size: int) -> None:
    mesh, line = meshes()
    hidden, weight, labels = data(vocab_size)
    bias = weight.detach().sum(1).requires_grad_()
    expected = linear_cross_entropy(hidden, weight, labels, linear_bias=bias)
    d_hidden, *d_rows = torch.autograd.grad(expected, (hidden, weight, bias))
    split, alike = Shard(0), Replicate()
    for where, placements in ((line, [split]), (line, [alike]), (mesh, [alike, split]), (mesh, [split, alike])):
        rows, row_bias = (distribute_tensor(x.detach(), where, placements).requires_grad_() for x in (weight, bias))
        loss = linear_cross_entropy(hidden, rows, labels, linear_bias=row_bias)
        torch.testing.assert_close(loss, expected)
        gradients = torch.autograd.grad(loss, (hidden, rows, row_bias))
        torch.testing.assert_close(gradients[0], d_hidden)
        for gradient, whole_gradient in zip(gradients[1:], d_rows, strict=True):
            assert isinstance(gradient, DTensor) and gradient.placements == tuple(placements)
            torch.testing.assert_close(whole(gradient), whole_gradient)


def _check_fsdp(vocab_size: int, with_tp: bool) -> None:
    """FSDP2 gathers the weight once for forward and once for backward, and frees it between; ranks hold different data."""
    mesh, line = meshes()
    dp, tp = (mesh["dp"], mesh["tp"]) if with_tp else (line, None)
    torch.manual_seed(5)
    head = VocabParallelHead(D, vocab_size, mesh=tp, bias=True, workspace_bytes=1)
    weight, bias = (whole(p).detach().requires_grad_() for p in (head.weight, head.bias))
    fully_shard(head, mesh=dp, reshard_after_forward=True)
    batches = [data(vocab_size, seed) for seed in range(dp.size())]
    mine, _, my_labels = batches[dp.get_local_rank()]
    losses = [linear_cross_entropy(hidden, weight, labels, linear_bias=bias) for hidden, _, labels in batches]
    expected = torch.autograd.grad(torch.stack(losses).mean(), (weight, bias, mine))  # FSDP2 averages

    gathers = functools.partial(counted, _fsdp_param_group, "foreach_all_gather")  # of weights
    with counted(dense, "statistics") as seen, gathers() as forward:
        loss = head(mine, my_labels)
    [call] = seen.call_args_list
    assert call.args[0].weight.untyped_storage().size() == 0, "the weight outlives forward"
    with counted(dense, "gradients") as seen, gathers() as backward:
        loss.backward()
    assert seen.call_count == forward.call_count == backward.call_count == 1
    torch.testing.assert_close(loss, losses[dp.get_local_rank()])
    for parameter, gradient in zip(head.parameters(), expected, strict=False):
        assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor)
        assert parameter.grad.placements == parameter.placements
        torch.testing.assert_close(whole(parameter.grad), gradient)
    torch.testing.assert_close(mine.grad, expected[2] * dp.size())


def _check_what_is_refused() -> None:
    mesh, line = meshes()
    hidden, weight, labels = data(33)
    head = VocabParallelHead(D, 33, mesh=mesh["tp"])
    fully_shard(head, mesh=mesh["dp"])
    plain = VocabParallelHead(D, 33, group=mesh["tp"].get_group())
    fully_shard(plain, mesh=mesh["dp"])
    for split, says in (
        (distribute_tensor(weight.detach(), line, [Shard(1)]), "sharded on dim 0"),
        (distribute_tensor(weight.detach(), mesh, [Shard(0), Shard(0)]), "over 2 mesh dimensions"),
        (DTensor.from_local(weight.detach(), line, [Partial()]), "sharded on dim 0"),
        (head.weight, "over 2 mesh dimensions.*FSDP2"),
        (weight.detach().flatten()[:100], "FSDP1"),
        (torch.empty(0), "ZeRO-3.*VocabParallelHead"),
    ):
        with pytest.raises(ValueError, match=says):
            linear_cross_entropy(hidden, split, labels)
    split = distribute_tensor(weight.detach(), line, [Shard(0)])
    with pytest.raises(ValueError, match="leave shard out"):
        linear_cross_entropy(hidden, split, labels, shard=VocabShard.even(33, line.get_group()))
    with pytest.raises(ValueError, match="make the head with mesh="):
        plain.state_dict()
    bias = distribute_tensor(weight[:, 0].detach(), line, [Replicate()])
    with pytest.raises(ValueError, match=r"linear_bias is a DTensor .*Replicate.*split them alike"):
        linear_cross_entropy(hidden, split, labels, linear_bias=bias)
    with pytest.raises(TypeError, match="input is a DTensor"):
        linear_cross_entropy(distribute_tensor(hidden.detach(), line, [Replicate()]), split, labels)
    counts, ids = torch.ones(labels.shape, dtype=torch.bool), labels.clamp(min=0)[..., None]
    of_function: list[tuple[Any, tuple[Any, ...], str, Tensor]] = [
        (linear_cross_entropy, (labels,), "weight", torch.ones(33)),
        (linear_cross_entropy, (labels,), "num_tokens", torch.tensor(8)),
        (cce_dist.linear_kl_divergence, (hidden.detach(), split), "mask", counts),
        (cce_dist.topk_kl_divergence, (ids, 0.0 - ids), "mask", counts),
    ]
    for function, args, name, value in of_function:
        with pytest.raises(TypeError, match=f"{name} is a DTensor: pass its local tensor"):
            function(hidden, split, *args, **{name: distribute_tensor(value, line, [Replicate()])})


def _check_born_on_meta() -> None:
    """A head made without memory, then split, then drawn holds the same weight as one drawn whole."""
    mesh, _ = meshes()
    torch.manual_seed(9)
    expected = VocabParallelHead(D, 2050).weight
    for tp in (mesh["tp"], None):
        head = VocabParallelHead(D, 2050, mesh=tp, device="meta", bias=True)
        fully_shard(head, mesh=mesh["dp"])
        head.to_empty(device="cpu")
        torch.manual_seed(9)
        head.reset_parameters()
        assert torch.equal(whole(head.weight), expected)
        assert not whole(head.bias).any()


def _check_checkpoints() -> None:
    """Every split loads the checkpoint that another one saved."""
    mesh, line = meshes()
    layouts = {"fsdp x tp": (mesh["dp"], mesh["tp"]), "tp": (None, line), "fsdp": (line, None)}
    heads = {}
    for seed, (name, (dp, tp)) in enumerate(layouts.items()):
        torch.manual_seed(seed)
        heads[name] = head = VocabParallelHead(D, 33, mesh=tp, bias=True)
        if dp is not None:
            fully_shard(head, mesh=dp)
    with shared_folder() as folder:
        for saved, loaded in itertools.permutations(heads, 2):
            for parameter in heads[saved].parameters():
                nn.init.normal_(parameter)
            path = f"{folder}/{saved}-{loaded}"
            dcp.save(get_model_state_dict(heads[saved]), checkpoint_id=path)
            state = get_model_state_dict(heads[loaded])
            dcp.load(state, checkpoint_id=path)
            set_model_state_dict(heads[loaded], state)
            for ours, right in zip(heads[loaded].parameters(), heads[saved].parameters(), strict=True):
                assert torch.equal(whole(ours), whole(right)), (saved, loaded)


def _check_one_collective_a_pass() -> None:
    """One collective forward and one backward, none where a group is one rank. Catches a second one, and a sum in another dtype
    than asked for."""
    _, line = meshes()
    hidden, weight, labels = data(33)
    shard = VocabShard.even(33, line.get_group())
    local = weight[shard.start : shard.stop].detach()
    statistics = ("all_gather", 4 * 3 * N * 4)  # T x K x N x fp32
    for sequence_parallel in (False, True):
        for reduce_dtype, size in ((None, 2), (torch.bfloat16, 2), (torch.float32, 4)):
            part = hidden.chunk(4)[dist.get_rank()] if sequence_parallel else hidden
            my_hidden, my_weight = operands = [x.detach().bfloat16().requires_grad_() for x in (part, local)]
            options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "reduce_dtype": reduce_dtype}
            options["workspace_bytes"] = 1  # two passes
            with Collectives(4) as forward:
                loss = linear_cross_entropy(my_hidden, my_weight, labels, shard=shard, **options)
            with Collectives(4) as backward:
                d_hidden, d_weight = torch.autograd.grad(loss, operands)
            assert (d_hidden.dtype, d_weight.dtype) == (torch.bfloat16, torch.bfloat16)
            gathered = [("all_gather", N * D * 2)] if sequence_parallel else []
            assert forward.sizes == [*gathered, statistics]
            summed = ("all_reduce", N * D * size)  # gloo makes its reduce-scatter of one
            assert backward.sizes == [*gathered, summed]
    alone: Any = [dist.new_group([rank]) for rank in range(4)][dist.get_rank()]
    hidden, weight = (x.detach().requires_grad_() for x in (hidden, weight))
    with Collectives(1) as both:
        linear_cross_entropy(hidden, weight, labels, shard=VocabShard.even(33, alone)).backward()
    assert both.sizes == []


@contextmanager
def sums():
    """Collect name and bytes of what is summed over ranks; done as soon as started, so that what comes too late is missing."""
    started: list[tuple[str, int]] = []

    def spied(function: Callable, name: str, which: int) -> Callable:
        def spy(*tensors: Tensor, **options: Any) -> Any:
            started.append((name, tensors[which].nbytes))
            work = function(*tensors, **options)
            work.wait()
            return work

        return spy

    of_dist: Any = {name: spied(getattr(dist, name), name, 0) for name in ("all_reduce", "reduce")}
    scatter = spied(merge._reduce_scatter_into, "reduce_scatter", 1)
    with mock.patch.multiple(dist, **of_dist), mock.patch.object(merge, "_reduce_scatter_into", scatter):
        yield started


def _check_sums_of_final_rows() -> None:
    """The sums are the same ones on ranks that finish rows group by group, in other groups, or all at once."""
    _, line = meshes()
    num_tokens, rows, rank = 20, 8, dist.get_rank()
    parts = torch.randn(4, num_tokens, D, generator=torch.Generator().manual_seed(0)).bfloat16()
    finished = ((8, 16, 20), (20,), (3, 9, 20), (19, 20))[rank]
    mine = slice(rank * num_tokens // 4, (rank + 1) * num_tokens // 4)
    for scatter, dtype in itertools.product((False, True), (None, torch.float32)):
        d_hidden = torch.zeros_like(parts[0])
        hidden_sum = merge.HiddenGradSum(line.get_group(), scatter, dtype, num_tokens, rows)
        with sums() as started:
            for start, stop in zip((0, *finished), finished, strict=False):
                d_hidden[start:stop] = parts[rank, start:stop]
                hidden_sum.start(d_hidden[:stop])
        result = hidden_sum.wait()
        name, lengths = ("reduce", [5] * 4) if scatter else ("all_reduce", [8, 8, 4])
        assert started == [(name, length * D * (4 if dtype else 2)) for length in lengths]
        truth = parts.double().sum(0)[mine if scatter else slice(None)]
        assert result.shape == truth.shape and result.dtype == torch.bfloat16
        assert result.untyped_storage().nbytes() == result.nbytes, "a slice that keeps the whole"
        # every addition rounds, of up to three parts; the sum in fp32 does once, at the end
        most = truth.abs() * 2**-8 if dtype else parts.double().abs().sum(0).amax() * 2**-7
        assert ((result - truth).abs() <= most).all()


def _check_groups_of_tokens() -> None:
    """Where tokens are split into groups, dE is summed group by group: another way to the same gradients.

    Labels are ignored here and there, and in all of the last group; shards are uneven or empty. Catches: rows summed before
    they are final, a token left out of its group, a number of sums that depends on the shard (which hangs).
    """
    num_tokens, rows = 48, 32

    def ignore(labels: Tensor, _: int) -> Tensor:
        some = torch.rand(num_tokens, generator=torch.Generator().manual_seed(0)) < 0.2
        some[rows:] = True
        return labels.masked_fill(some, -100)

    settings: list[tuple[int, int, torch.dtype, dict[str, Any]]] = [
        (2, 25, torch.float32, {}),
        (3, 25, torch.float32, {"grad_filter": GradFilter(eps=0.05, always=True)}),
        (2, 25, torch.float16, {"reduce_dtype": torch.float32}),
        (3, 2, torch.float32, {}),
    ]
    for size, vocab_size, dtype, options in settings:
        group: Any = dist.new_group(list(range(size)))
        if dist.get_rank() >= size:
            continue
        row_bytes, each = D * options.get("reduce_dtype", dtype).itemsize, num_tokens // size
        for sequence_parallel in (False, True):
            how = options | {"sequence_parallel": sequence_parallel, "reduction": "sum", "workspace_bytes": 1}
            problem = Gaussian(num_tokens, D, vocab_size, scale=1.0, labels=ignore)
            case = LossCase("groups of tokens", "", how, problem, dtype=dtype, twice=False)
            in_groups = [("all_reduce", length * row_bytes) for length in (rows, num_tokens - rows)]
            if sequence_parallel:
                in_groups = [("reduce", each * row_bytes)] * size
            at_once = [("reduce_scatter" if sequence_parallel else "all_reduce", num_tokens * row_bytes)]
            assert _sums_of(case, rows, group) == in_groups
            assert _sums_of(case, num_tokens, group) == at_once
            if "reduce_dtype" in options:  # more backwards and calls of one case, and the backend that never cuts
                assert _sums_of(replace(case, twice=True), rows, group) == 4 * in_groups
                assert _sums_of(case, rows, group, "torch") == at_once


def _sums_of(case: LossCase, rows: int, group: Any, backend: str = "triton") -> list[tuple[str, int]]:
    """Check a case, 16 tokens at a time and ``rows`` of them final together; return the sums that it starts."""
    smaller = mock.patch.multiple(memory, most_rows=lambda *_: rows, LEAST_BYTES=8 << 10, ROWS=16)
    anew = mock.patch.object(decide, "_decide_once", decide._decide), mock.patch.dict(given._KNOWN, clear=True)
    with smaller, anew[0], anew[1], sums() as started:
        assert_holds(LOSS, case, group, "cpu", backend)
    return started


CHECKS: list[tuple[Any, ...]] = [
    *((_check_dtensors, size) for size in VOCABULARIES),
    *((_check_fsdp, size, False) for size in VOCABULARIES),
    (_check_fsdp, 5, True),  # FSDP2 splits no empty shard
    (_check_what_is_refused,),
    (_check_born_on_meta,),
    (_check_checkpoints,),
    (_check_one_collective_a_pass,),
    (_check_sums_of_final_rows,),
    *([(_check_groups_of_tokens,)] if interpreted() else []),  # the ranks are on CPUs
]


@pytest.mark.parametrize("call", CHECKS, ids=lambda call: "-".join([call[0].__name__[7:], *map(str, call[1:])]))
@pytest.mark.slow
def test_four_ranks(ranks4: Callable[..., None], call: tuple[Any, ...]) -> None:
    ranks4(*call)
