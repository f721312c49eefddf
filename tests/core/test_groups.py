"""A loss whose gradients are made in forward, a group of tokens at a time: the dense loss's numbers, in every layout."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from shards import DEVICE, GPU, backends_of_ranks, launch_nothing, needs_gpu
from support.dense import DTYPE, ROWS, D, N, V, assert_holds, assert_near, dense, large_operands, loss_of, operands
from tiny_trainer import compared, counted
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from cce_dist import GradFilter, VocabParallelHead, VocabShard, decide, given, groups, linear_cross_entropy, merge
from cce_dist.kernels import ShardLogits, Spec, dry_run, memory, tiles
from cce_dist.kernels.d_weight import joined, low_byte, scale
from cce_dist.kernels.dry_run import Live
from cce_dist.kernels.lse import longest_first
from cce_dist.kernels.tiles import Tile
from cce_dist.tools.verify.cases import CASES, with_empty
from cce_dist.tools.verify.check import assert_no_worse
from cce_dist.tools.verify.loss import LOSS


@contextmanager
def in_groups(rows: int = ROWS, times: int = 1) -> Iterator[None]:
    """Have calls made in groups, and see that so many were."""
    with groups.of_rows(rows), counted(groups, "one_pass") as loss:
        yield
    assert loss.call_count == times


def test_a_second_backward_makes_the_gradients_anew() -> None:
    """Catches: gradients scaled twice, or taken from storage that is a parameter's by then; a graph that is gone unnoticed."""
    tensors, labels = operands(biased=False)
    with in_groups():
        loss = loss_of(tensors, labels, backend="triton")
    first, second = (torch.autograd.grad(factor * loss, tensors, retain_graph=True) for factor in (0.0, 1.0))
    truth, base = (dense(tensors, labels, dtype)[1:] for dtype in (torch.float64, DTYPE))
    assert not any(grad.any() for grad in first)
    for each in zip(second, base, truth, strict=True):
        assert_no_worse(*each)
    torch.autograd.grad(loss, tensors)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, tensors)
    with in_groups():
        loss = loss_of(tensors, labels)
    (grad,) = torch.autograd.grad(loss, tensors[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(grad.sum(), tensors[0])


MASK, WEIGHTS = (torch.arange(N) % 3 > 0).float(), torch.linspace(-1.0, 2.0, N)


def per_token(
    tensors: list[Tensor], labels: Tensor, upstream: Tensor, fails: bool, twice: bool, **options: Any
) -> None:
    """Compare losses and gradients with the dense ones, and whether upstream gradients were found to be as expected."""
    shown = {name: options[name] for name in options.keys() - {"expected_weights", "grad_weight_out", "backend"}}
    truth, base = (dense(tensors, labels, x, upstream, reduction="none", **shown) for x in (torch.float64, DTYPE))
    out = options.get("grad_weight_out")
    with in_groups(), compared() as differed:
        loss = loss_of(tensors, labels, reduction="none", **options)
        if twice:  # of which nothing may be left
            torch.autograd.grad(loss, tensors, 7.0 - upstream, retain_graph=True, allow_unused=True)
            differed.clear()
            out = None if out is None else out.zero_()
        d_hidden, d_weight, d_bias = torch.autograd.grad(loss, tensors, upstream, allow_unused=True)
    assert differed == [fails]
    assert (d_weight is None) == (out is not None)
    ours = (loss, d_hidden, d_weight if out is None else out, d_bias)
    for name, *values in zip(("loss", "dE", "dC", "dbias"), ours, base, truth, strict=True):
        rows = values[2].isfinite() if name == "dE" else slice(None)
        of_ours, of_base, of_truth = (value[rows] for value in values)
        assert_no_worse(of_ours, of_base, of_truth, torch.float32 if name == "loss" else DTYPE, name)
    assert torch.equal(d_hidden.isfinite(), truth[1].isfinite())


@pytest.mark.parametrize(
    ("expected", "upstream", "fails", "options"),
    [
        pytest.param(True, torch.full((N,), 0.3), False, {}, id="equal"),
        pytest.param(True, torch.ones(()).expand(N), False, {"z_loss_weight": 0.1}, id="one number, expanded"),
        pytest.param(True, torch.zeros(N), False, {}, id="zeros"),
        pytest.param(MASK, 0.3 * MASK, False, {"softcap": 3.0}, id="a mask"),
        pytest.param(MASK > 0, 5.0 * MASK, False, {"weight": torch.rand(V)}, id="a mask of bools"),
        pytest.param(1e-30 * WEIGHTS, -7.0 * WEIGHTS, False, {}, id="weights"),
        pytest.param(torch.zeros(N), torch.zeros(N), False, {}, id="nothing counts"),
        pytest.param(True, 0.3 * MASK, True, {"logit_scale": 0.7}, id="a mask that nobody told"),
        pytest.param(True, torch.full((N,), 0.3) + 1e-3 * MASK, True, {}, id="nearly equal"),
        pytest.param(MASK, torch.full((N,), 0.3), True, {"z_loss_weight": 0.1}, id="a mask that is not used"),
        pytest.param(torch.zeros(N), WEIGHTS, True, {"weight": torch.rand(V)}, id="nothing should count"),
        pytest.param(MASK.where(MASK > 0, torch.nan), MASK, False, {}, id="a mask with NaN"),
        pytest.param(MASK / 0, WEIGHTS, True, {}, id="infinite weights"),
        pytest.param(torch.zeros(N), 1 + MASK, True, {}, id="zeros, and gradients within a factor of two"),
        pytest.param(torch.full((N,), torch.nan), 1 + MASK, True, {}, id="NaN alone"),
        pytest.param(torch.full((N,), torch.inf), torch.ones(N), False, {}, id="infinities alone"),
        pytest.param((torch.arange(N) < 1).float(), 1 + MASK, True, {}, id="weights of ignored tokens alone"),
        pytest.param(1e300 * (1 + MASK.double()), 1 + MASK, False, {}, id="beyond fp32"),
        pytest.param(1e-44 * (1 + MASK.double()), 1 + MASK, False, {}, id="below fp32"),
        pytest.param((4 * WEIGHTS).long(), (4 * WEIGHTS).trunc(), False, {}, id="integers"),
        pytest.param(MASK + 2.0**-41, MASK + 2.0**-41, True, {}, id="below the least weight"),
    ],
)  # fmt: skip
def test_a_loss_for_each_token(
    request, expected: Tensor | bool, upstream: Tensor, fails: bool, options: dict[str, Any]
) -> None:
    """Catches: an upstream gradient taken for that of all, dE without its token's own, a weight of 0 that leaves no gradient,
    dC of both what was expected and what came, gradients of a backward before this one."""
    if isinstance(expected, Tensor):
        options = options | {"expected_weights": expected.to(DEVICE)}
    options = {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in options.items()}
    given = *operands(), upstream.to(DEVICE), fails
    in_buffer = options | {"grad_weight_out": torch.zeros(V, D, device=DEVICE)}
    per_token(*given, twice=True, backend="torch", **options)
    per_token(*given, twice=False, backend="torch", **in_buffer)
    name = request.node.callspec.id
    if name == "nothing should count":
        per_token(*given, twice=False, backend="triton", **options)
    elif GPU or name in ("a mask", "a mask that nobody told"):
        in_buffer["grad_weight_out"].zero_()
        per_token(*given, twice=True, backend="triton", **in_buffer)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_upstream_gradients_that_are_no_numbers(backend: Any) -> None:
    """Catches: a NaN that stands for all tokens, one of an ignored token that counts."""
    tensors, labels = operands()
    for place, fails in ((0, False), (1, True)):
        upstream = torch.ones(N, device=DEVICE)
        upstream[place] = torch.nan
        with in_groups():
            loss = loss_of(tensors, labels, backend=backend, reduction="none")
        found = torch.autograd.grad(loss, tensors, upstream)
        right = dense(tensors, labels, torch.float64, upstream, reduction="none")[1:]
        counted = labels != -100
        assert torch.equal(found[0].isnan()[counted], right[0].isnan()[counted])
        assert all(bool(grad.isnan().all()) == fails for grad in found[1:])


@pytest.mark.parametrize(
    ("options", "backend", "grouped"),
    [
        ({}, "torch", True),
        ({"z_loss_weight": 0.1, "softcap": 3.0}, "triton", True),
        ({"z_loss_weight": 0.1, "softcap": 3.0}, "torch", False),
        ({"reduction": "sum", "num_tokens": None}, "triton", True),
    ],
)
def test_under_torch_compile(options: dict[str, Any], backend: Any, grouped: bool) -> None:
    """One number's gradients are made in forward, in one graph. Catches: a factor of upstream's that is left out, a graph that
    ends, and gradients of what needs none."""
    tensors, labels = operands()
    tensors[2].requires_grad_(len(options) != 1)
    wanted = [tensor for tensor in tensors if tensor.requires_grad]

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return -3.0 * linear_cross_entropy(hidden, weight, labels, linear_bias=bias, backend=backend, **options)

    two_passes = mock.patch.object(decide, "way_now", decide.decide)
    with groups.of_rows(ROWS), counted(groups, "run") as run:
        with nullcontext() if grouped else two_passes:
            found = torch.compile(loss, fullgraph=True, backend="aot_eager")(*tensors)
        gradients = torch.autograd.grad(found, wanted)
    assert run.call_count == grouped
    truth = dense(tensors, labels, torch.float64, -3.0, **options)
    assert_near((found / -3.0, *gradients), truth[: 1 + len(wanted)])


def test_under_torch_compile_no_upstream_gradients_are_expected() -> None:
    """Catches: a compiled graph that ends where gradients are made in forward."""
    tensors, labels = operands(biased=False)
    call: dict[str, Any] = {"reduction": "none", "backend": "torch", "expected_weights": MASK.to(DEVICE)}
    with in_groups(times=1):  # the one that is not compiled
        functions = loss_of, torch.compile(loss_of, fullgraph=True, backend="aot_eager")
        found = [torch.autograd.grad(f(tensors, labels, **call), tensors, MASK.to(DEVICE)) for f in functions]
    for ours, compiled in zip(*found, strict=True):
        assert (ours - compiled).norm() <= (1e-2 if GPU else 1e-5) * compiled.norm()  # bf16 is rounded elsewhere


def test_nobody_waits_for_the_device(monkeypatch) -> None:
    """Catches: a comparison that the host reads."""
    monkeypatch.setattr(given, "_is_observed", lambda *_: False)  # a dispatch mode does
    monkeypatch.setattr(groups, "check_labels", lambda *_: None)  # which reads labels on a CPU
    with FakeTensorMode(), in_groups():  # whose tensors have no values to read
        hidden, weight = (torch.randn(rows, D, requires_grad=True) for rows in (N, V))
        labels, mask = torch.zeros(N, dtype=torch.int64), torch.ones(N)
        loss = linear_cross_entropy(hidden, weight, labels, reduction="none", backend="torch", expected_weights=mask)
        assert torch.autograd.grad(loss, (hidden, weight), mask)[1].shape == (V, D)


def test_a_divisor_that_requires_a_gradient_gets_it() -> None:
    """Catches: a divisor that is a constant in groups, and in a graph."""
    (hidden, weight), labels = operands(biased=False)
    num_tokens, grads = torch.tensor(7.0, device=DEVICE, requires_grad=True), []

    def loss(hidden: Tensor, weight: Tensor, num_tokens: Tensor) -> Tensor:
        return -3.0 * linear_cross_entropy(hidden, weight, labels, num_tokens=num_tokens)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for rows, function in ((None, loss), (ROWS, loss), (ROWS, compiled)):
        with groups.of_rows(rows):
            grads.append(torch.autograd.grad(function(hidden, weight, num_tokens), (num_tokens, hidden, weight)))
    right = dense([hidden, weight], labels, torch.float64, -3.0, num_tokens=7.0)
    for d_num_tokens, *of_tensors in grads:
        torch.testing.assert_close(d_num_tokens.double(), 3.0 * right[0] / 7, rtol=1e-3 if GPU else 1e-5, atol=0)
        assert_near(of_tensors, right[1:])


def test_a_checkpoint_hands_out_each_tensor_once() -> None:
    """Catches: saved tensors that backward reads a second time, for gradients that are not as expected."""
    (hidden, weight), labels = operands(biased=False)
    upstream = 1 + MASK.to(DEVICE)
    with in_groups(times=2):  # forward, and its recomputation
        loss = checkpoint(loss_of, (hidden, weight), labels, reduction="none", use_reentrant=False)
        found = torch.autograd.grad(loss, (hidden, weight), upstream)
    assert_near(found, dense([hidden, weight], labels, torch.float64, upstream, reduction="none")[1:])


def test_an_error_of_the_labels_and_no_tokens_at_all() -> None:
    tensors, labels = operands(biased=False)
    hidden, weight = (tensor.detach().float().cpu().requires_grad_() for tensor in tensors)
    backends = ("torch",) if GPU else ("torch", "triton")  # where the interpreter is
    with in_groups(times=3 + len(backends)):
        with pytest.raises(IndexError, match=r"target\[3\].* is 75"):
            linear_cross_entropy(hidden, weight, torch.full((N,), V).index_fill_(0, torch.arange(3), 0))
        loss = linear_cross_entropy(hidden, weight, torch.full((N,), -100))
        assert loss == 0 and not any(grad.any() for grad in torch.autograd.grad(loss, (hidden, weight)))
        loss = linear_cross_entropy(hidden[:0], weight, labels[:0].cpu())
        assert loss == 0 and not torch.autograd.grad(loss, weight)[0].any()
        for backend in backends:
            loss = linear_cross_entropy(hidden[:0], weight, labels[:0].cpu(), reduction="none", backend=backend)
            assert not torch.autograd.grad(loss, weight, loss)[0].any()


def test_the_size_of_groups() -> None:
    """Catches: groups that leave the budget, a small one at the end that nothing is gained by, groups where all fits, and more
    of them than dC bears."""
    uneven = []
    llama, *others = (8192, 4096, 128256), (32768, 1024, 151936), (8192, 2304, 256000), (4096, 640, 262144)
    for num_tokens, hidden_size, num_columns in (llama, *others, (65536, 5120, 131072)):
        for mib in (64, 256, 512, 1024, 2048, 4096, 1 << 20):
            sizes = memory.Sizes(num_tokens, hidden_size, num_columns, 2)
            groups = memory.groups_of(sizes, mib << 20)
            if groups is not None:
                rows, count = groups.rows, -(-num_tokens // groups.rows)
                of_group = sizes._replace(num_tokens=rows, alone=True)
                beside = memory.low_bytes(sizes) if groups.low else 0
                assert memory.bytes_of_all(of_group) + beside <= mib << 20 < memory.bytes_of_all(sizes)
                assert rows % 128 == 0 and rows >= memory.LEAST_GROUP
                assert groups.low or count <= memory.MOST_GROUPS
                assert groups.low == (count > memory.MOST_ROUNDED) or mib <= 512
                if -num_tokens % rows >= 128 * -(-num_tokens // rows):
                    uneven.append((num_tokens, mib, rows))
    # 73 and 104 tiles of d_hidden would take two waves, or most of one, where 66 and 88 take a half or two thirds.
    assert uneven == []
    sizes = memory.Sizes(*llama, 2)
    found = [memory.groups_of(sizes, mib << 20) for mib in (128, 512, 1024, 4096)]
    assert found == [None, (1664, False), (4096, False), None]
    # dC that waits for backward takes 1,002 MiB of them.
    held = [memory.groups_of(sizes, mib << 20, holds_weight=True) for mib in (1024, 1514, 2048, 4096)]
    assert held == [None, (1664, False), (4096, False), None]


def test_the_last_wave_of_d_hidden_is_cut() -> None:
    """Catches: 87 tiles of d_hidden that keep 132 programs waiting for 87, parts without end, tiles that cover 640 columns
    with 768."""
    counts = {44: (0, 3), 66: (0, 2), 75: (0, 3), 87: (0, 3), 100: (100, 1), 208: (132, 3), 264: (264, 1)}
    for num_tiles, wanted in counts.items():
        assert tiles.cut_last_wave(num_tiles, 1000, 132) == wanted
    for num_tiles in range(1, 400):
        whole, splits = tiles.cut_last_wave(num_tiles, 5, 132)
        assert whole % 132 == 0 or (splits == 1 and whole == num_tiles)
        assert splits <= 5 and (num_tiles - whole) * splits <= 2 * 132
    tile = Tile(128, 256, 64, 8, 3)
    for width, standing in {640: True, 1152: True, 768: False, 1024: False, 64: True, 2304: False}.items():
        assert tiles.fitted(tile, width)[:2] == ((256, 128) if standing else (128, 256))


def test_waves_of_the_log_sum_exp_are_full() -> None:
    """Catches: groups of 13 row blocks cut into 33 parts, whose last wave leaves three quarters of 132 programs idle."""
    for blocks in range(5, 128):
        parts = tiles.num_parts(128 * blocks, 1000, 128, 132)
        assert blocks * parts / (-(-blocks * parts // 132) * 132) >= 0.92, (blocks, parts)
    # Others stay as they were measured.
    assert [tiles.num_parts(128 * blocks, 1000, 128, 132) for blocks in (1, 8, 16, 32, 64)] == [132, 33, 33, 33, 33]
    assert tiles.num_parts(128 * 13, 20, 128, 132) == 20


def order(num_tiles: int, num_parts: int) -> list[int]:
    alike, step = longest_first(num_tiles, num_parts)
    period = num_parts // alike
    return [turn % alike * period + (period - 1 - turn // alike) * step % period for turn in range(num_parts)]


def test_every_part_has_its_turn_and_longer_ones_come_first() -> None:
    """The parts of the log-sum-exp, in the order in which its kernel takes them."""
    for num_parts in range(1, 50):
        for num_tiles in range(num_parts, 4 * num_parts + 1):
            parts = order(num_tiles, num_parts)
            sizes = [(s + 1) * num_tiles // num_parts - s * num_tiles // num_parts for s in parts]
            assert sorted(parts) == list(range(num_parts))
            assert sizes == sorted(sizes, reverse=True)


@needs_gpu
def test_many_groups_are_rounded_once() -> None:
    """Catches: a dC that is rounded to 16 bits after each of many groups, with 8 bits beside it that are lost or wrong."""
    (hidden, weight), labels = large_operands()
    right = dense([hidden, weight], labels, torch.float64)[2]

    def error(rows: int, low: bool) -> float:
        with groups.of_rows(rows, low):
            loss = linear_cross_entropy(hidden, weight, labels, workspace_bytes=1 << 30)
        (found,) = torch.autograd.grad(loss, [weight])
        return float((found - right).norm() / right.norm())

    assert error(256, low=True) < 1.05 * error(5000, low=False) < 0.7 * error(256, low=False)


def test_the_byte_below_bf16() -> None:
    """Catches: a byte with a sign or a carry lost, at the edges of powers of two and of the range."""
    edges = [0.0, -0.0, 1.0, torch.inf, -torch.inf, torch.nan, 3.4e38, -3.4e38, 1e-45]
    edges += [1 - 2.0**-9, -2 + 2.0**-9, 255.5 / 128]
    numbers = torch.cat((torch.tensor(edges), torch.randn(1000) * torch.logspace(-37, 37, 1000))).to(DEVICE)
    rounded, found = numbers.bfloat16(), torch.empty_like(numbers)
    low = torch.empty(len(numbers), dtype=torch.int8, device=DEVICE)
    launch: Any = _there_and_back[(1,)]
    launch(numbers, rounded, low, found, len(numbers), BLOCK=1024)
    finite = numbers.isfinite()
    assert ((found - numbers).abs() <= numbers.abs() * 2.0**-15 + 1e-40)[finite].all()
    torch.testing.assert_close(found[~finite], numbers[~finite], equal_nan=True)


@triton.jit
def _there_and_back(number_ptr, rounded_ptr, low_ptr, found_ptr, count, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    mask = offs < count
    rounded = tl.load(rounded_ptr + offs, mask=mask, other=0)
    tl.store(low_ptr + offs, low_byte(tl.load(number_ptr + offs, mask=mask, other=0), rounded), mask=mask)
    tl.debug_barrier()
    tl.store(found_ptr + offs, joined(rounded, tl.load(low_ptr + offs, mask=mask, other=0)), mask=mask)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_plain_torch_has_one_block_of_a_group(smoothing: float, monkeypatch) -> None:
    """Catches: a copy of the exponentials or of d_weight."""
    monkeypatch.setattr(given, "_is_observed", lambda *_: False)  # Live does
    hidden, weight = torch.randn(1536, 512, requires_grad=True), torch.randn(4000, 512, requires_grad=True)
    outputs, labels = hidden.nbytes + weight.nbytes, torch.zeros(1536, dtype=torch.int64)
    budget = (48 if smoothing else 24) << 20
    how: dict[str, Any] = {"backend": "torch", "workspace_bytes": budget, "label_smoothing": smoothing}
    with Live() as live:
        linear_cross_entropy(hidden, weight, labels, **how).backward()
    assert budget // 2 < live.peak - outputs <= budget + (1 << 20)  # a few numbers for each token


@pytest.mark.skipif(GPU, reason="a GPU's parts of the vocabulary outweigh so small a budget")
@pytest.mark.parametrize("mib", [8, 16])
def test_one_group_is_alive_at_a_time(mib: int, monkeypatch) -> None:
    """Catches: the exponentials of a group that live on while those of the next are made, d_hidden in two places."""
    spec = Spec(ShardLogits(0, 3000), 3000, workspace_bytes=mib << 20, alone=True)
    said = dry_run.anew_peak(memory.Sizes(8192, 64, 3000, 2, alone=True), spec, None)
    launch_nothing(monkeypatch)
    # The interpreter misreads bf16, but nothing is launched.
    monkeypatch.setattr("cce_dist.operands.choose_backend", lambda *_: "triton")
    monkeypatch.setattr(given, "_is_observed", lambda *_: False)  # Live does
    monkeypatch.setattr(memory, "SAVED_ROWS", 128)
    monkeypatch.setattr(memory, "usual_waves", lambda *_: (1.0, 0))
    hidden, weight = (torch.zeros(rows, 64, device=DEVICE).bfloat16().requires_grad_() for rows in (8192, 3000))
    labels = torch.zeros(8192, dtype=torch.int64, device=DEVICE)
    how: dict[str, Any] = {"backend": "triton", "workspace_bytes": mib << 20}
    of_outputs = hidden.nbytes + weight.nbytes
    numbers = 72 * labels.numel()  # fp32 numbers and ids of a token, parts of the log-sum-exp
    for reduction in ("mean", "none"):
        with Live() as live:
            loss = linear_cross_entropy(hidden, weight, labels, reduction=reduction, **how)
            assert 0.4 * (mib << 20) < live.peak - of_outputs - numbers <= mib << 20
            torch.autograd.grad(loss.sum(), (hidden, weight))
            if reduction == "none":  # a chunk of the logits' gradient, for upstream gradients that nobody expected
                assert 0.97 * said <= live.peak - of_outputs <= said + numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients_times_a_number(dtype: torch.dtype) -> None:
    """Catches: a tail that is left out; a gradient of an ignored token that an infinite loss scale makes NaN."""
    values = torch.randn(20_000, device=DEVICE).to(dtype)
    values[7] = 0.0
    for factor in (1.0, 0.25, float("inf")):
        ours = values.clone()
        scale(ours, torch.tensor(factor, device=DEVICE))
        wanted = torch.where(values == 0, values, (values.float() * factor).to(dtype))
        assert torch.equal(ours, wanted)
    rows, out = values.clone().view(200, 100), torch.ones(200, 100, device=DEVICE)
    factors = torch.randn(200, device=DEVICE).index_fill_(0, torch.arange(0, 200, 3, device=DEVICE), 0.0)
    factors[64:96] = 1.0  # a whole block
    scale(rows, factors)
    assert torch.equal(rows, (values.float().view(200, 100) * factors[:, None]).to(dtype))
    scale(rows, torch.tensor(0.5, device=DEVICE), out)
    assert torch.equal(out, 1.0 + 0.5 * rows.float())
    rows[0, 0] = torch.nan
    scale(rows, torch.tensor(0.0, device=DEVICE))
    assert not rows.any()


IN_GROUPS = [case for case in CASES if case.in_groups]
LAYOUTS: list[dict[str, Any]] = [
    {"input_grad": "partial"},
    {"sequence_parallel": True, "reduce_dtype": torch.float32},
    {"reduction": "none", "sequence_parallel": True},
    {"reduction": "none", "expected_weights": MASK},
]


def _on_ranks(backend: str) -> None:
    """The matrix's cases in groups, and the collectives of four more layouts, over shards that are uneven, empty at last."""
    group: Any = dist.group.WORLD
    for case in IN_GROUPS:
        for shards in (case.shards, with_empty):
            problem: Any = case.problem
            problem = replace(problem, num_tokens=24, hidden_size=D, vocab_size=V)
            smaller = replace(case, dtype=torch.float32, in_groups=ROWS, problem=problem, shards=shards, twice=False)
            assert_holds(LOSS, smaller, group, "cpu", backend)
    tensors, labels = operands()
    shard = VocabShard.even(V, group)
    for options in LAYOUTS:
        hidden, weight, bias = (tensor.detach().cpu().float() for tensor in tensors)
        if "sequence_parallel" in options:
            hidden = hidden.chunk(group.size())[group.rank()]
        own = slice(shard.start, shard.stop)
        local = [x.clone().requires_grad_() for x in (hidden, weight[own], bias[own])]
        with in_groups(), counted(merge, "_all_gather_into") as gathers:
            call = {"linear_bias": local[2], "shard": shard, "backend": backend, **options}
            loss = linear_cross_entropy(local[0], local[1], labels.cpu(), **call)
        assert gathers.call_count == 4 + ("sequence_parallel" in options), (options, gathers.call_count)
        with mock.patch.object(merge, "HiddenGradSum") as summed:
            loss.sum().backward()
        assert not summed.called, f"{options}: forward has summed dE"


@backends_of_ranks
def test_on_two_ranks(ranks2, backend: str) -> None:
    """Catches: statistics of a group that are merged with another's, a sum of dE that leaves a group out."""
    ranks2(_on_ranks, backend)


CALLS: dict[str, dict[str, Any]] = {
    "exact": {},
    "made-again": {"workspace_bytes": 1},
    "filtered": {"grad_filter": GradFilter(always=True)},
    "each-token-in-groups": {"reduction": "none", "workspace_bytes": 160 << 20},
}


@needs_gpu
@pytest.mark.parametrize("buffered", [False, True], ids=["own", "buffer"])
@pytest.mark.parametrize("name", CALLS)
def test_a_graphed_head(name: str, buffered: bool) -> None:
    """In ``torch.cuda.make_graphed_callables``, replayed with other labels, more of them ignored, and with upstream gradients
    that are as expected and that are not.

    Catches: any wait for the device, a count read back, a size that depends on the data, a number or an address of the captured
    call in a replay, and a buffer that warm-up leaves filled.
    """
    (hidden, weight), labels = large_operands()
    out = torch.zeros_like(weight, dtype=torch.float32).detach() if buffered else None

    def head_of(out: Tensor | None) -> Any:
        own = nn.Parameter(weight.detach().clone())
        options = {"grad_weight_out": out, "backend": "triton"} | CALLS[name]
        return VocabParallelHead(weight.shape[1], len(weight), weight=own, **options)

    plain = head_of(None if out is None else out.clone())
    sample = torch.randn_like(hidden).requires_grad_(), labels.roll(5)
    with counted(groups, "one_pass") as made_in_groups:
        head = head_of(out)
        graphed: Any = torch.cuda.make_graphed_callables(head, sample, allow_unused_input=buffered)
    assert made_in_groups.called or not name.endswith("in-groups")
    if out is not None:
        assert out.any() or name.endswith("in-groups")  # warm-up's upstream gradients are what memory held, maybe zeros
        out.zero_()  # warm-up has added its gradients
    upstream = torch.full((len(labels),), 0.3, device="cuda")
    for step, factors in enumerate((upstream, torch.randn_like(upstream), torch.zeros_like(upstream))):
        others = labels.roll(step).masked_fill(torch.rand(len(labels), device="cuda") < step / 4, -100)
        found = []
        for head in (plain, graphed):
            x = (hidden.detach() * (1 + step)).requires_grad_()
            head.weight.grad = None
            loss = head(x, others)
            (loss * factors).sum().backward()
            d_weight = head.weight.grad if out is None else head.loss_options["grad_weight_out"].clone()
            found.append([loss.detach().clone(), x.grad, d_weight])
        assert all(torch.equal(ours, right) for ours, right in zip(*found, strict=True))
