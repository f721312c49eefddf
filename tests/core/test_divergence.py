"""Divergence of two heads against dense logits in float64: both backends, every split, and what is refused.

Each test names the mistake that it catches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from shards import DEVICE, GPU, launch_nothing, nan_memory
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from cce_dist import VocabShard, linear_kl_divergence
from cce_dist.call import flat
from cce_dist.decide import Where, decide_heads
from cce_dist.divergence import op as divergence_op
from cce_dist.divergence.op import DivergenceCall
from cce_dist.kernels import Operands, ShardLogits, d_hidden, memory
from cce_dist.kernels.divergence import kernels as divergence
from cce_dist.kernels.divergence.heads import KINDS, Divergence, Heads
from cce_dist.kernels.divergence.pair_logits import fill_logits, new_pair_logits
from cce_dist.kernels.dry_run import Live
from cce_dist.kernels.tiles import choose_tiles, table_tiles
from cce_dist.kernels.tokens import compact, gathered
from cce_dist.tools.verify.cases import DIVERGENCE_CASES, DivergenceCase, Gaussian, even, uneven, with_empty
from cce_dist.tools.verify.check import assert_no_worse, run_case
from cce_dist.tools.verify.divergence import DIVERGENCE

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, on infinities inside the interpreter
any_call: Any = linear_kl_divergence  # options by name, and some that a type checker would refuse
NAMES = ("divergence", "dE", "dC", "dbias")
Found = list[Tensor | None]  # these, None without a bias


class Problem(NamedTuple):
    """Both heads, whole; ``upstream`` is the gradient of each token's divergence."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    teacher: Tensor
    teacher_weight: Tensor
    teacher_bias: Tensor | None
    mask: Tensor | None
    upstream: Tensor

    def wide(self) -> Problem:
        tensors: Any = (x if x is None or x.dtype == torch.bool else x.double() for x in self)
        return Problem(*tensors)


@dataclass(frozen=True)
class Case:
    num_tokens: int = 18
    hidden_size: int = 24
    teacher_size: int = 40
    vocab_size: int = 75
    spread: float = 1.0
    teacher_spread: float = 1.0
    offset: float = 0.0
    bias: bool = False
    masked: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)
    rows_of: tuple[int, int] | None = None  # the student's and the teacher's, padding counted
    budget: int = 1 << 30
    kept: int = 0  # columns, in any dtype
    again: bool = False  # a second pass computes the logits again, instead of reading a group's logits


BOTH = dict(logit_scale=0.7, softcap=3.0, teacher_logit_scale=1.3, teacher_softcap=5.0)
CASES = [
    pytest.param(Case(), id="plain"),
    pytest.param(
        Case(num_tokens=32, hidden_size=32, teacher_size=16, vocab_size=128), id="whole-tiles", marks=pytest.mark.slow
    ),
    pytest.param(Case(hidden_size=19, teacher_size=7), id="rows-no-descriptor-can-describe", marks=pytest.mark.slow),
    pytest.param(Case(bias=True, options=BOTH), id="bias-scale-softcap-of-both"),
    pytest.param(
        Case(bias=True, options=dict(softcap=4.0, beta=0.2)), id="softcap-of-the-student-alone", marks=pytest.mark.slow
    ),
    pytest.param(Case(masked=0.4, bias=True), id="masked"),
    pytest.param(Case(masked=1.0), id="nothing-counts"),
    pytest.param(Case(num_tokens=0), id="no-tokens"),
    pytest.param(Case(vocab_size=1), id="one-row"),
    pytest.param(Case(rows_of=(80, 128), options=dict(beta=0.9)), id="padded-differently"),
    pytest.param(Case(spread=0.1, teacher_spread=30.0), id="teacher-far-sharper", marks=pytest.mark.slow),
    pytest.param(Case(spread=30.0, teacher_spread=0.1), id="student-far-sharper", marks=pytest.mark.slow),
    pytest.param(Case(spread=30.0, teacher_spread=30.0), id="both-sharp"),
    pytest.param(Case(offset=1e4, bias=True), id="both-at-1e4", marks=pytest.mark.slow),
    pytest.param(Case(budget=1, bias=True, num_tokens=40, masked=0.3), id="chunks-and-groups"),
    pytest.param(Case(budget=1, bias=True, num_tokens=40, masked=0.3, again=True), id="chunks-made-again"),
    pytest.param(Case(hidden_size=4, spread=1e4, teacher_spread=1e4), id="nothing-in-common"),
]
KEPT = [
    pytest.param(Case(kept=96), id="all"),
    pytest.param(Case(kept=64, bias=True, masked=0.4), id="a-part"),
    pytest.param(Case(kept=64, bias=True, masked=0.4, num_tokens=40, budget=1), id="a-part-in-groups"),
    pytest.param(Case(kept=64, bias=True, masked=0.4, num_tokens=40, budget=1, again=True), id="a-part-made-again"),
    pytest.param(Case(kept=96, bias=True, options=BOTH | dict(beta=0.2)), id="bias-scale-softcap-of-both"),
    pytest.param(Case(kept=96, rows_of=(80, 128)), id="padded-differently"),
    pytest.param(Case(kept=96, spread=0.1, teacher_spread=30.0), id="teacher-far-sharper"),
    pytest.param(Case(kept=96, spread=30.0, teacher_spread=0.1), id="student-far-sharper"),
    pytest.param(Case(kept=32, spread=8.0, teacher_spread=8.0), id="a-part-without-the-largest"),
    pytest.param(Case(kept=96, offset=1e4, bias=True), id="both-at-1e4"),
]
HALF = ("bias-scale-softcap-of-both", "both-sharp")  # tried in 16 bits, too


def draw(case: Case, dtype: torch.dtype) -> Problem:
    def head(hidden_size: int, spread: float) -> tuple[Tensor, Tensor, Tensor | None]:
        hidden = torch.randn(case.num_tokens, hidden_size)
        weight = torch.randn(case.vocab_size, hidden_size) * spread / hidden_size**0.5
        bias = torch.randn(case.vocab_size) + case.offset if case.bias else None
        # A bias beyond fp16's integers cannot be rounded to it without changing the case.
        rounded = bias if bias is None or case.offset else bias.to(dtype)
        return hidden.to(DEVICE, dtype), weight.to(DEVICE, dtype), None if rounded is None else rounded.to(DEVICE)

    student, teacher = head(case.hidden_size, case.spread), head(case.teacher_size, case.teacher_spread)
    mask = torch.rand(case.num_tokens, device=DEVICE) >= case.masked if case.masked else None
    p = Problem(*student, *teacher, mask, torch.randn(case.num_tokens, device=DEVICE))
    if dtype == torch.float32 or case.num_tokens == 0:
        return p
    # The gradients of "tv" and "lk" jump where p_j = t_j, and logits of 16 bits may be on either side.
    gaps = abs(torch.sub(*log_softmaxes(p.wide(), **case.options)))
    clear = (gaps > 2**-8).all(-1)
    return p._replace(mask=clear if mask is None else mask & clear)


def log_softmax(
    product: Callable, hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float, softcap: float | None
) -> Tensor:  # fmt: skip
    u = product(hidden, weight)
    u = u if u.dtype == torch.float64 else u.float()
    u = scale * (u if bias is None else u + bias.to(u.dtype))
    return (u if softcap is None else softcap * torch.tanh(u / softcap)).log_softmax(-1)


def log_softmaxes(
    p: Problem, logit_scale: float = 1.0, softcap: float | None = None, teacher_logit_scale: float = 1.0,
    teacher_softcap: float | None = None, product: Callable = F.linear, beta: float = 0.5,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Log-softmax of the student and of the teacher."""
    log_p = log_softmax(product, *p[:3], logit_scale, softcap)
    return log_p, log_softmax(
        product, p.teacher, p.teacher_weight, p.teacher_bias, teacher_logit_scale, teacher_softcap
    )


def dense(p: Problem, kind: str, beta: float = 0.5, **options: Any) -> Found:
    """Divergence, dE, dC and dbias from all logits, by autograd."""
    leaves = [x if x is None else x.detach().requires_grad_() for x in p[:3]]
    hidden, weight, bias = leaves
    assert hidden is not None and weight is not None
    log_p, log_t = log_softmaxes(p._replace(hidden=hidden, weight=weight, bias=bias), **options)

    def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
        return (log_a.exp() * (log_a - log_b)).sum(-1)

    if kind == "jsd":
        shares = torch.tensor([beta, 1 - beta], dtype=torch.float64, device=DEVICE).log().to(log_p.dtype)
        log_m = torch.logsumexp(torch.stack((log_t + shares[0], log_p + shares[1])), 0)
        value = beta * kl(log_t, log_m) + (1 - beta) * kl(log_p, log_m)
    elif kind in ("tv", "lk"):
        below = log_p < log_t
        log_overlap = torch.where(below, log_p, log_t).logsumexp(-1)
        value = torch.where(below, log_t.exp() - log_p.exp(), 0.0).sum(-1) if kind == "tv" else -log_overlap
    else:
        value = kl(log_t, log_p) if kind == "forward" else kl(log_p, log_t)
    value = value if p.mask is None else value * p.mask
    given = [x for x in leaves if x is not None]
    return [value.detach(), *torch.autograd.grad((value * p.upstream).sum(), given), *([None] * (bias is None))]


def with_rows(x: Tensor | None, rows: int, fill: float) -> Tensor | None:
    """Padding of any value behind the rows."""
    return x if x is None else torch.cat((x, x.new_full((rows - len(x), *x.shape[1:]), fill)))


def worst_dense(p: Problem, kind: str, truth: Found, **options: Any) -> Found:
    """Dense results in fp32 from logits that are summed one product after another, as the kernels sum them, in several orders:
    for each quantity the one farthest from the truth. In 16 bits the order is nothing beside rounding.

    Where heads are sharp, a gradient is a difference of logits of hundreds, times p: a unit in the last place of a logit moves
    dE by up to 1e-5 of its largest number. The error of one order is luck, and cuBLAS sums small products as trees.
    """
    if p.hidden.dtype != torch.float32:
        return dense(p, kind, **options)
    generator, results = torch.Generator().manual_seed(0), []
    for _ in range(4):
        order, teachers = (torch.randperm(x.shape[1], generator=generator).to(DEVICE) for x in (p.hidden, p.teacher))
        q = p._replace(hidden=p.hidden[:, order], weight=p.weight[:, order])
        q = q._replace(teacher=p.teacher[:, teachers], teacher_weight=p.teacher_weight[:, teachers])
        value, d_hidden, d_weight, d_bias = dense(q, kind, product=one_by_one, **options)
        assert d_hidden is not None and d_weight is not None
        back = order.argsort()
        results.append((value, d_hidden[:, back], d_weight[:, back], d_bias))
    return [max(orders, key=lambda x, t=t: _distance(x, t)) for *orders, t in zip(*results, truth, strict=True)]


def one_by_one(hidden: Tensor, weight: Tensor) -> Tensor:
    """``F.linear``, whose sum over D is made from the first product to the last."""
    total = hidden.new_zeros(len(hidden), len(weight))
    for number in range(hidden.shape[1]):
        total = total + hidden[:, number, None] * weight[:, number]
    return total


def _distance(x: Tensor | None, true: Tensor | None) -> float:
    if x is None or true is None or x.numel() == 0:
        return 0.0
    return (x.double() - true).abs().nan_to_num(0.0, 0.0, 0.0).amax().item()


def ours(p: Problem, case: Case, kind: str, backend: str, **more: Any) -> Found:
    options: dict[str, Any] = case.options | dict(kind=kind, backend=backend, workspace_bytes=case.budget) | more
    weight, bias, teacher_weight, teacher_bias = p.weight, p.bias, p.teacher_weight, p.teacher_bias
    if case.rows_of:
        student_rows, teacher_rows = case.rows_of
        weight, teacher_weight = (
            with_rows(weight, student_rows, 3.0),
            with_rows(teacher_weight, teacher_rows, torch.nan),
        )
        options |= dict(shard=VocabShard(0, student_rows, case.vocab_size))
        options |= dict(teacher_shard=VocabShard(0, teacher_rows, case.vocab_size))
    leaves = [x if x is None else x.detach().requires_grad_() for x in (p.hidden, weight, bias)]
    with nan_memory():
        out = any_call(
            leaves[0], leaves[1], p.teacher, teacher_weight, linear_bias=leaves[2], teacher_bias=teacher_bias, mask=p.mask,
            **options,
        )  # fmt: skip
        given = [x for x in leaves if x is not None]
        grads = torch.autograd.grad((out * p.upstream).sum(), given)
    assert out.dtype == torch.float32
    return [out.detach(), *grads, *([None] * (bias is None))]


def check(found: Found, baseline: Found, truth: Found, dtype: torch.dtype, kind: str) -> None:
    for name, got, rough, true in zip(NAMES, found, baseline, truth, strict=True):
        if got is None or rough is None or true is None:
            continue
        assert not got[len(true) :].any(), f"{kind} {name}: padding has a gradient"
        held_in = torch.float32 if name == "divergence" else dtype
        assert_no_worse(got[: len(true)], rough, true, held_in, f"{kind} {name}")


ALL = 1 << 60  # as LEAST_PAIR_ROWS: no group of tokens is large enough
KEPT_IN = torch.bfloat16 if GPU else torch.float32


def kept_columns(columns: int) -> int:
    """So many columns in the interpreter, whose tiles are 32 wide; whole tiles of a GPU."""
    return 256 if GPU else columns


HALVES = {"torch": torch.bfloat16, "triton": torch.bfloat16 if GPU else torch.float16}  # the interpreter misreads bf16


@pytest.mark.parametrize("backend", HALVES)
@pytest.mark.parametrize("case", CASES)
def test_matches_dense(case: Case, backend: str, request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches phantom columns, a moment that forgets that a maximum grew, 0 times infinity, the other head's options."""
    if case.budget == 1:
        monkeypatch.setattr(memory, "LEAST_BYTES", 8000)
        monkeypatch.setattr(memory, "ROWS", 16)
        monkeypatch.setattr(memory, "LEAST_PAIR_ROWS", ALL if case.again else 1)
    half = [HALVES[backend]] * any(name in request.node.callspec.id for name in HALF)
    for dtype, kind in itertools.product((torch.float32, *half), KINDS):
        p = draw(case, dtype)
        truth = dense(p.wide(), kind, **case.options)
        check(ours(p, case, kind, backend), worst_dense(p, kind, truth, **case.options), truth, dtype, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", KEPT)
def test_kept_exponentials_match_dense(case: Case, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a tile's exponentials relative to another's, the smaller of p and t taken for the larger, padding that is no
    number, the recomputed part's first column, a slope left out, a chunk that starts where another did, a group's kept logits
    in another group's rows, sums that stay relative to a smaller logit."""
    monkeypatch.setattr(divergence, "columns_kept", lambda *_: kept_columns(case.kept))
    if case.budget == 1:
        monkeypatch.setattr(memory, "LEAST_BYTES", 43000)  # 15 tokens
        monkeypatch.setattr(memory, "LEAST_PAIR_ROWS", ALL if case.again else 1)
    monkeypatch.setattr(memory, "exact_chunks", lambda sizes, *_: memory.Chunks(sizes.num_tokens, kept_columns(32)))
    p = draw(case, KEPT_IN)
    truth, baseline = dense(p.wide(), kind, **case.options), dense(p, kind, **case.options)
    check(ours(p, case, kind, "triton"), baseline, truth, KEPT_IN, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kept", [64, 96])
def test_a_second_backward_has_the_same_bits(kept: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after one with other coefficients. Catches: what is kept overwritten by its gradients."""
    monkeypatch.setattr(divergence, "columns_kept", lambda *_: kept_columns(kept))
    p = draw(Case(bias=True, masked=0.3), KEPT_IN)
    hidden, weight = p.hidden.requires_grad_(), p.weight.requires_grad_()
    value = linear_kl_divergence(hidden, weight, *p[3:5], linear_bias=p.bias, kind=kind, mask=p.mask, backend="triton")
    upstream = (factor * p.upstream for factor in (1, -3, 1))
    grads = [torch.autograd.grad(value, (hidden, weight), each, retain_graph=True) for each in upstream]
    assert not torch.equal(grads[0][0], grads[1][0])
    assert all(torch.equal(a, b) for a, b in zip(grads[0], grads[2], strict=True))


def test_logits_of_16_bits_are_precise_near_the_largest_of_their_tile() -> None:
    """Catches logits relative to another tile's largest, or to nothing: at 1e3, fp16 would be off by 0.25."""
    tiles = choose_tiles(torch.float16, torch.device(DEVICE))
    num_tokens, num_tiles = 20, 3
    cols = num_tiles * tiles.lse.cols
    hidden, weight = torch.randn(num_tokens, 64, device=DEVICE).half(), torch.randn(cols - 5, 64, device=DEVICE).half()
    bias = torch.full((cols - 5,), 1e3, device=DEVICE) + 100 * (torch.arange(cols - 5, device=DEVICE) // tiles.lse.cols)
    ids = torch.zeros(num_tokens, dtype=torch.int64, device=DEVICE)
    x = Operands.of(hidden, weight, ids, ShardLogits(0, cols - 5), bias=bias)
    pair = new_pair_logits(num_tokens, cols, tiles.lse.cols, hidden)
    pair = pair._replace(z_2RC=pair.z_2RC.half())  # as beside bf16, which the interpreter misreads
    rows = gathered(hidden, compact(ids), torch.empty_like(hidden))
    fill_logits(x, rows, pair, 1, 0, num_tiles, tiles)
    z = pair.z_2RC[1].double().view(num_tokens, num_tiles, -1)
    true = torch.full((num_tokens, cols), -torch.inf, dtype=torch.float64, device=DEVICE)
    true[:, : cols - 5] = hidden.double() @ weight.double().t() + bias.double()
    true = true.view(z.shape)
    below = true.amax(2, keepdim=True) - true
    error = (z + pair.top_2BR[1].t().double()[:, :, None] - true).nan_to_num(0.0).abs()
    assert z.max() == 0 and torch.equal(z.isinf(), true.isinf())
    assert (error <= 2.0**-11 * below.clamp(max=1e3) + 2e-3 * 2**-3).all()  # and a rounding of 1e3 in fp32


def test_what_is_kept_within_the_budget() -> None:
    """Catches: a budget that forgets the teacher's half, exponentials of a dtype that cannot hold them, or for no backward."""
    operands = torch.empty(8192, 512, dtype=torch.bfloat16)
    logits = ShardLogits(0, 32768)
    head = Operands.of(operands, torch.empty(0, 512), torch.zeros(8192), logits)
    x, spec = Heads(head, head), Divergence(logits, logits, workspace_bytes=1 << 40)
    assert divergence.columns_kept(x, spec) == 32768
    assert divergence.columns_kept(x, spec._replace(grad=False)) == 0
    half = head._replace(hidden=operands.half())
    assert divergence.columns_kept(Heads(half, half), spec) == 0
    heads_of = {"torch.bfloat16": x, "torch.float16": Heads(half, half)}
    chosen, of_half = (
        decide_heads(heads.sizes, spec._replace(workspace_bytes=0), Where("triton", dtype)).workspace_bytes
        for dtype, heads in heads_of.items()
    )
    assert of_half == 256 << 20
    assert 4 * 8192 * 32768 < chosen < 5.5 * 8192 * 32768
    assert divergence.columns_kept(x, spec._replace(workspace_bytes=chosen)) == 32768
    for mib in (256, 512, 1024, chosen >> 20):
        columns = divergence.columns_kept(x, spec._replace(workspace_bytes=mib << 20))
        assert 4 * 8192 * columns < mib << 20 and (columns > 0) == (mib > 256), mib


@pytest.mark.parametrize("kind", ["forward", "tv"])
@pytest.mark.parametrize("num_tokens", [4096, 20000])
@pytest.mark.parametrize("mib", [64, 256, 512, 1024, 0])
def test_what_is_alive_keeps_the_budget(mib: int, num_tokens: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: room for both heads' logits, or the teacher's hidden states, that the budget forgets, also in the groups of a
    kind with a second pass. Launches are left out.

    The budget does not count the last wave of d_hidden, whose size follows from the device and not from the head: an fp32 tile
    for each program that the device runs at a time, at most. It counts no numbers of a token either.
    """
    launch_nothing(monkeypatch)
    at_once, tiles = 132, table_tiles(9, 16)
    for module in (divergence, d_hidden):
        monkeypatch.setattr(module, "num_programs", lambda _: at_once)  # the interpreter's are far fewer
    monkeypatch.setattr(divergence, "choose_tiles", lambda *_: tiles)  # the interpreter's are far smaller
    hidden, teacher = (torch.zeros(num_tokens, size, dtype=torch.bfloat16, device=DEVICE) for size in (768, 512))
    weight, teacher_weight = (torch.zeros(9000, size, dtype=torch.bfloat16, device=DEVICE) for size in (768, 512))
    logits = ShardLogits(0, 9000)
    call = DivergenceCall(Divergence(logits, logits, kind, workspace_bytes=mib << 20), 9000, backend="triton")
    counted = torch.ones(num_tokens, dtype=torch.bool, device=DEVICE)
    given = (hidden, weight, [], counted, teacher, teacher_weight, [])
    with Live() as live:
        value, saved = divergence_op._run_forward(*given, None, call)
        forward, live.peak = live.peak, 0
        kept = sum(x.nbytes for x in saved[1:])
        grads = divergence_op._run_backward([value], *given, saved, None, [True, True], call)
    backward = live.peak - sum(x.nbytes for x in grads if x is not None)
    chosen = divergence_op.decided(call, *given).spec.workspace_bytes
    assert chosen == mib << 20 or (not mib and (4 * num_tokens * 9000 < kept or chosen == memory.MOST_DEFAULT))
    last_wave = 2 * at_once * tiles.grad_hidden.rows * tiles.grad_hidden.cols * 4  # parts of up to two
    assert max(forward, backward) <= chosen + last_wave + (2 << 20), (forward >> 20, backward >> 20, chosen >> 20)
    assert kind == "forward" or forward <= backward + (2 << 20), "a second pass takes more memory than one pass"


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_heads_have_none(kind: str, backend: str) -> None:
    """Catches two heads that take different steps: exactly 0, and a gradient of exactly 0. "tv" as 1 - o would not be 0."""
    p = draw(Case(bias=True, spread=20.0), torch.float32)
    p = p._replace(teacher=p.hidden, teacher_weight=p.weight, teacher_bias=p.bias)
    value, *grads = ours(p, Case(), kind, backend)
    assert value is not None and not any(x.any() for x in grads if x is not None)
    assert value.abs().max() <= (1e-5 if kind == "lk" else 0.0)  # a logit of 60 is rounded to 4e-6


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("kind", ["tv", "lk"])
def test_ties(kind: str, backend: str) -> None:
    """Both heads have 40 ids of one probability, 20 of them in common. Catches: p_j = t_j taken for p_j < t_j in one pass."""
    p = draw(Case(bias=True), torch.float32)
    assert p.bias is not None and p.teacher_bias is not None
    p.hidden[:], p.teacher[:], p.bias[:], p.teacher_bias[:] = 0.0, 0.0, -torch.inf, -torch.inf
    p.bias[:40], p.teacher_bias[20:60] = 1.0, 1.0
    value, *grads = ours(p, Case(), kind, backend)
    expected = 0.5 if kind == "tv" else torch.tensor(2.0).log().item()
    assert value is not None
    torch.testing.assert_close(value, torch.full_like(value, expected), rtol=1e-6, atol=0)
    # o is 0.5, and no student's logit can raise it while p_j = t_j counts as p_j > t_j.
    assert not any(x.any() for x in grads if x is not None)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("kind", ["tv", "lk"])
def test_disjoint_supports(kind: str, backend: str) -> None:
    """The loss "lk" is infinite, its gradient 0. Catches: the logarithm of 0 in the gradient; a "tv" above 1 by rounding, of
    which the acceptance rate has no logarithm."""
    p = draw(Case(bias=True), torch.float32)
    assert p.bias is not None and p.teacher_bias is not None
    p.bias[:40], p.teacher_bias[40:] = -torch.inf, -torch.inf
    value, *grads = ours(p, Case(), kind, backend)
    assert value is not None and not any(x.any() for x in grads if x is not None)
    if kind == "lk":
        assert (value == torch.inf).all()
    else:
        torch.testing.assert_close(value, torch.ones_like(value))
        assert (value <= 1).all()


@pytest.mark.parametrize("kind", ["jsd", "tv", "lk"])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("kept", [0, 64])
def test_a_second_pass_reads_the_logits(kept: int, again: bool, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One merge for each group of tokens, and both heads' logits once in forward; or one merge, and the logits that are not
    kept twice. Catches: logits computed for each pass."""
    monkeypatch.setattr(memory, "LEAST_PAIR_ROWS", ALL if again else 1)
    monkeypatch.setattr(divergence, "columns_kept", lambda *_: kept_columns(kept))
    monkeypatch.setattr(memory, "LEAST_BYTES", 43000)  # 15 tokens
    filled, merged = [], []
    monkeypatch.setattr(divergence, "fill_logits", lambda *given: filled.append(given[5]) or fill_logits(*given))
    merge_of = divergence_op.heads.merge
    monkeypatch.setattr(divergence_op.heads, "merge", lambda *given: merged.append(given[0].shape) or merge_of(*given))
    p = draw(Case(num_tokens=40), KEPT_IN)
    rows = 15 if p.hidden.dtype == torch.float32 else 30
    linear_kl_divergence(*p[:2], *p[3:5], kind=kind, backend="triton", workspace_bytes=1)
    if again:
        kept_tiles, tiles = (-(-columns // kept_columns(32)) for columns in (min(kept_columns(kept), 75), 75))
        assert merged == [(1, 5, 40)]
        assert sum(filled) % (2 * kept_tiles + 4 * (tiles - kept_tiles)) == 0
        return
    groups = [min(rows, 40 - first) for first in range(0, 40, rows)]
    assert merged == [(1, 5, group) for group in groups]
    assert sum(filled) == 2 * len(groups) * -(-75 // kept_columns(32))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_one_head_rules_out(kind: str, backend: str) -> None:
    """A logit of -inf that both have is padding; one that the leading head allows makes the KL infinite, and no NaN."""
    p = draw(Case(bias=True), torch.float32)
    assert p.bias is not None and p.teacher_bias is not None
    p.bias[3:40], p.teacher_bias[3:40] = -torch.inf, -torch.inf
    for name, got, true in zip(NAMES, ours(p, Case(), kind, backend), _without(p, slice(3, 40), kind), strict=True):
        assert got is not None and true is not None
        if name in ("dC", "dbias"):
            assert not got[3:40].any()
            got = torch.cat((got[:3], got[40:]))
        torch.testing.assert_close(got, true.float(), rtol=1e-4, atol=1e-5)
    leading = "teacher_bias" if kind == "forward" else "bias"
    lead: Any = getattr(p, leading).clone()
    lead[5] = 0.0
    value, *_ = ours(p._replace(**{leading: lead}), Case(), kind, backend)
    assert value is not None
    assert (value == torch.inf).all() if kind in ("forward", "reverse") else value.isfinite().all()


def _without(p: Problem, columns: slice, kind: str) -> Found:
    keep = torch.ones(len(p.weight), dtype=torch.bool, device=DEVICE)
    keep[columns] = False
    cut = {name: getattr(p, name)[keep] for name in ("weight", "bias", "teacher_weight", "teacher_bias")}
    return dense(p._replace(**cut).wide(), kind)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("kind", KINDS)
def test_ids_that_the_teacher_rules_out_are_nothing_to_masked_tokens(kind: str, backend: str) -> None:
    """Where no token counts the gradients are 0. Catches 0 times the infinite gradient of a token that is masked."""
    p = draw(Case(bias=True), torch.float32)
    assert p.teacher_bias is not None
    p.teacher_bias[::3] = -torch.inf
    masked = p._replace(mask=torch.zeros(len(p.hidden), dtype=torch.bool, device=DEVICE))
    assert not any(x.any() for x in ours(masked, Case(), kind, backend) if x is not None)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_what_does_not_count_may_hold_anything(backend: str) -> None:
    """Catches 0 times NaN in dC, and a mean over all tokens."""
    p = draw(Case(masked=0.5), torch.float32)
    assert p.mask is not None
    poisoned = p._replace(
        hidden=p.hidden.masked_fill(~p.mask[:, None], torch.nan),
        teacher=p.teacher.masked_fill(~p.mask[:, None], torch.inf),
    )
    for kind in KINDS:
        clean, found = ours(p, Case(), kind, backend), ours(poisoned, Case(), kind, backend)
        for a, b in zip(clean[:3], found[:3], strict=True):
            assert a is not None and b is not None and torch.equal(a, b)
        value = clean[0]
        assert value is not None and not value[~p.mask].any()
        heads = p.hidden, p.weight, p.teacher, p.teacher_weight
        options = dict(kind=kind, mask=p.mask, backend=backend)
        torch.testing.assert_close(any_call(*heads, reduction="mean", **options), value.sum() / p.mask.sum())
        torch.testing.assert_close(any_call(*heads, reduction="sum", **options), value.sum())
        nothing = any_call(*heads, reduction="mean", **options | dict(mask=torch.zeros_like(p.mask)))
        assert nothing.item() == 0.0


def test_leading_dims_strides_and_detached_teacher() -> None:
    """Catches flattened dims, strides taken for granted, and a gradient that reaches the teacher."""
    p = draw(Case(num_tokens=12), torch.float32)
    expected = linear_kl_divergence(p.hidden, p.weight, p.teacher, p.teacher_weight)
    hidden, teacher = (x.view(3, 4, -1).transpose(0, 1).contiguous().transpose(0, 1) for x in (p.hidden, p.teacher))
    weight = p.weight.t().contiguous().t().requires_grad_()
    teacher_weight = p.teacher_weight.clone().requires_grad_()
    got = linear_kl_divergence(hidden, weight, teacher.requires_grad_(), teacher_weight)
    assert got.shape == (3, 4) and torch.equal(got.flatten(), expected)
    got.sum().backward()
    assert weight.grad is not None and teacher.grad is None and teacher_weight.grad is None


def test_a_buffer_takes_the_weights_gradient() -> None:
    p = draw(Case(), torch.bfloat16 if GPU else torch.float32)
    for backend in ("torch", "triton"):
        weight = p.weight.clone().requires_grad_()
        linear_kl_divergence(p.hidden, weight, p.teacher, p.teacher_weight, backend=backend).sum().backward()
        taken = weight.grad
        weight.grad, buffer = None, torch.ones(p.weight.shape, device=DEVICE)
        any_call(
            p.hidden, weight, p.teacher, p.teacher_weight, backend=backend, grad_weight_out=buffer
        ).sum().backward()
        assert taken is not None and weight.grad is None
        torch.testing.assert_close(buffer - 1, taken.float(), rtol=1e-2, atol=1e-5)


def test_compiles_whole() -> None:
    """torch.compile(fullgraph=True), forward and backward, one graph for another number."""
    torch._dynamo.reset()
    p = draw(Case(masked=0.3, bias=True), torch.float32)

    def loss(hidden: Tensor, kind: str) -> Tensor:
        options: Any = dict(linear_bias=p.bias, mask=p.mask, kind=kind, reduction="mean")
        return linear_kl_divergence(hidden * 2, p.weight, p.teacher, p.teacher_weight, **options)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for kind in KINDS:
        hidden, other = (p.hidden.clone().requires_grad_() for _ in range(2))
        value, expected = compiled(hidden, kind), loss(other, kind)
        torch.testing.assert_close(value, expected)
        value.backward()
        expected.backward()
        torch.testing.assert_close(hidden.grad, other.grad)


def test_operators_are_well_formed() -> None:
    """torch's own checks of schema, fakes and registration."""
    p = draw(Case(num_tokens=4, bias=True), torch.float32)
    logits = ShardLogits(0, 75, tensors="bias")
    call = DivergenceCall(Divergence(logits, logits, "jsd"), 75)
    mask = torch.ones(4, dtype=torch.bool, device=DEVICE)
    hidden, weight, bias = (x.requires_grad_() for x in p[:3] if x is not None)
    tensors = (hidden, weight, [bias], mask, *p[3:5], [p[5]], None)
    torch.library.opcheck(torch.ops.cce_dist.divergence.default, (*tensors, *flat(call), None))


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(lambda loss, x: torch.func.grad(loss)(x.detach()), id="func-grad"),
        pytest.param(lambda loss, x: torch.func.vmap(loss)(torch.stack((x, x))), id="vmap"),
        pytest.param(lambda loss, x: torch.autograd.functional.hessian(loss, x), id="hessian"),
        pytest.param(lambda loss, x: torch.autograd.functional.jvp(loss, x, torch.ones_like(x)), id="jvp"),
        pytest.param(lambda loss, x: torch.func.jvp(loss, (x.detach(),), (torch.ones_like(x),)), id="func-jvp"),
    ],
)
def test_a_derivative_that_is_not_there_is_refused(ask: Callable) -> None:
    p = draw(Case(num_tokens=4), torch.float32)
    with pytest.raises(RuntimeError, match="linear_kl_divergence") as caught:
        ask(lambda x: linear_kl_divergence(x, p.weight, p.teacher, p.teacher_weight).sum(), p.hidden.requires_grad_())
    assert "\n" not in str(caught.value)


X, W, XT, WT = torch.zeros(3, 4), torch.zeros(8, 4), torch.zeros(3, 6), torch.zeros(8, 6)
BAD = [
    pytest.param(dict(kind="backward"), ValueError, "kind must be one of", id="kind"),
    pytest.param(dict(beta=1.0), ValueError, r"beta must be in \(0, 1\)", id="beta"),
    pytest.param(dict(teacher_input=torch.zeros(2, 6)), ValueError, "teacher_input must be .3, D_t", id="tokens"),
    pytest.param(dict(teacher_input=torch.zeros(3, 5)), ValueError, "size 5, teacher_weight 6", id="size"),
    pytest.param(dict(teacher_weight=torch.zeros(9, 6)), ValueError, "teacher_weight has 9 rows, linear_weight 8", id="rows"),
    pytest.param(dict(teacher_weight=torch.zeros(8)), ValueError, "teacher_weight must be .V, D.", id="flat"),
    pytest.param(dict(teacher_weight=WT.half()), TypeError, "input is torch.float32, teacher_weight torch.float16", id="dtype"),
    pytest.param(dict(teacher_bias=torch.zeros(7)), ValueError, r"teacher_bias must be \[8\]", id="bias"),
    pytest.param(dict(linear_bias=torch.zeros(7)), ValueError, r"linear_bias must be \[8\]", id="student-bias"),
    pytest.param(dict(teacher_shard=VocabShard(0, 8, 7)), ValueError, "teacher_shard a vocabulary of 7", id="vocabulary"),
    pytest.param(dict(teacher_shard="all"), TypeError, "teacher_shard must be a VocabShard", id="shard"),
    pytest.param(dict(teacher_shard=VocabShard(0, 9, 8)), ValueError, "teacher_shard holds 9 rows", id="shard-rows"),
    pytest.param(dict(mask=torch.ones(3)), TypeError, "mask must be bool", id="mask-of-weights"),
    pytest.param(dict(mask=torch.ones(2, dtype=torch.bool)), ValueError, r"mask must be \(3,\)", id="mask-shape"),
    pytest.param(dict(teacher_ids=torch.arange(7)), ValueError, r"teacher_ids must be a plain tensor \[8\]", id="ids-shape"),
    pytest.param(dict(teacher_ids=torch.arange(1, 9)), IndexError, r"teacher_ids\[7\] is 8: not in \[0, 8\)", id="ids-range"),
    pytest.param(dict(teacher_ids=torch.arange(8) // 2), ValueError, "is 0, which is there twice", id="ids-twice"),
    pytest.param(dict(teacher_ids=torch.arange(8, device="meta")), ValueError, "teacher_ids is on meta", id="ids-device"),
    pytest.param(dict(teacher_softcap=-1.0), ValueError, "teacher_softcap must be positive", id="softcap"),
    pytest.param(dict(teacher_logit_scale="1"), TypeError, "teacher_logit_scale must be a number", id="scale"),
    pytest.param(dict(logit_scale=torch.ones((), requires_grad=True)), TypeError, "logit_scale gets no", id="learnable"),
    pytest.param(dict(teacher_weight=None), TypeError, "teacher_weight must be a tensor", id="none"),
    pytest.param(dict(grad_weight_out=torch.zeros(8, 5)), ValueError, "grad_weight_out must be", id="buffer"),
    pytest.param(dict(reduction="batchmean"), ValueError, "reduction must be one of", id="reduction"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "says"), BAD)
def test_bad_input_is_one_line(change: dict, error: type, says: str) -> None:
    arguments = dict(input=X, linear_weight=W, teacher_input=XT, teacher_weight=WT) | change
    with pytest.raises(error, match=says) as caught:
        any_call(**arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", DIVERGENCE_CASES, ids=lambda case: case.name)
def test_one_process_of_the_matrix(case: DivergenceCase) -> None:
    """What ``cce-dist verify`` runs; ``test_verify.py`` runs it on ranks."""
    for result in run_case(DIVERGENCE, case, None, "cpu"):
        assert result.ok, f"{result} <- {case.catches}?"


OF_KERNELS = ("kl-draft-split", "kl-reverse-options", "kl-jsd-options", "tv-options", "lk")


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_id_that_nobody_checks_makes_no_number(kind: str, backend: str) -> None:
    """On a GPU and in a compiled graph ids are not read. Catches a row of another id in its place."""
    p = draw(Case(masked=0.5), torch.float32)
    for wrong in (75, 8):  # in no vocabulary, and there twice
        ids = torch.arange(75, device=DEVICE).index_fill(0, torch.tensor([7], device=DEVICE), wrong)
        with mock.patch("torch.compiler.is_compiling", lambda: True):
            value, *_ = ours(p, Case(), kind, backend, teacher_ids=ids)
        assert value is not None and p.mask is not None
        assert value[p.mask].isnan().all() and not value[~p.mask].any()


def _kernels_on_two_ranks() -> None:
    """Cases in uneven shards, dE a few tokens at a time. The ranks are on CPUs, where kernels are interpreted."""
    with mock.patch.multiple(memory, most_rows=lambda *_: 4, LEAST_BYTES=8000, ROWS=4):
        for case in DIVERGENCE_CASES:
            if case.name in OF_KERNELS:
                smaller = replace(case, shards=uneven, problem=Gaussian(12, 24, 75))
                smaller = smaller if case.name != "lk" else replace(smaller, shards=with_empty)
                errors = run_case(DIVERGENCE, smaller, dist.group.WORLD, "cpu", "triton")
                assert all(error.ok for error in errors), f"{case.name} <- {case.catches}? {errors}"


@pytest.mark.skipif(GPU, reason="of the interpreter")
@pytest.mark.slow
def test_two_ranks(ranks2: Callable) -> None:
    """Catches a merge that forgets one head's maximum, the teacher's slice taken for the whole. test_verify.py has the rest."""
    ranks2(_kernels_on_two_ranks)


def _rows_that_one_rank_lacks() -> None:
    """All ranks are called alike: a row of another rank, on one rank; all rows, on one rank, which has padding or none."""
    group = dist.group.WORLD
    assert group is not None
    rank, shard = group.rank(), VocabShard.even(10, group)
    torch.manual_seed(0)
    hidden, weight, teacher, teacher_weight = (torch.randn(rows, 8) for rows in (6, 10, 6, 24))
    student = (hidden, weight[shard.start : shard.stop], teacher)
    foreign = torch.arange(10) * 2
    foreign[7] = 1
    for first, last, ids in ((10, 20, foreign), (20, 24, torch.arange(10)), (20, 20, torch.arange(10))):
        rows = (0, first) if rank == 0 else (first, last)
        call = dict(shard=shard, teacher_shard=VocabShard(*rows, 20, group), teacher_ids=ids, kind="jsd")
        with pytest.raises(ValueError, match=r"rank 1 of the group: teacher_ids\[[57]\] .*a row of another rank"):
            any_call(*student, teacher_weight[slice(*rows)], **call)
        with mock.patch("torch.compiler.is_compiling", lambda: True):  # nothing is read, as on a GPU
            assert any_call(*student, teacher_weight[slice(*rows)], **call).isnan().all()


def test_no_rank_waits_for_another_that_lacks_a_row(ranks2: Callable) -> None:
    """Catches: an error that one rank alone raises, and a weight without rows that is indexed."""
    ranks2(_rows_that_one_rank_lacks)


def _four_ranks() -> None:
    _check_dtensors()
    _check_refusals()


@pytest.mark.slow
def test_four_ranks(ranks4: Callable) -> None:
    """Weights that are DTensors, shards that do not fit, and ranks that disagree."""
    ranks4(_four_ranks)


def _check_dtensors() -> None:
    torch.manual_seed(1)
    mesh, p = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)), draw(Case(), torch.float32)
    hidden, weight, teacher, teacher_weight = (x.cpu() for x in (p.hidden, p.weight, p.teacher, p.teacher_weight))
    expected = linear_kl_divergence(hidden, weight, teacher, teacher_weight)
    weight, teacher_weight = (distribute_tensor(x, mesh, [Shard(0)]) for x in (weight, teacher_weight))
    torch.testing.assert_close(linear_kl_divergence(hidden, weight.requires_grad_(), teacher, teacher_weight), expected)


def _check_refusals() -> None:
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(2)
    p = draw(Case(vocab_size=40), torch.float32)
    shard, other = (VocabShard(*split(40, 4)[group.rank()], 40, group) for split in (even, uneven))
    hidden, weight, teacher, teacher_weight = (x.cpu() for x in (p.hidden, p.weight, p.teacher, p.teacher_weight))
    rows = slice(shard.start, shard.stop)
    heads = (hidden, weight[rows], teacher, teacher_weight[other.start : other.stop])
    with pytest.raises(ValueError, match="both heads' rows must cover the same ids"):
        any_call(*heads, shard=shard, teacher_shard=other)
    with pytest.raises(ValueError, match="a row of another rank, this one has"):
        any_call(*heads, shard=shard, teacher_shard=other, teacher_ids=torch.arange(40).flip(0))
    with pytest.raises(ValueError, match="process group"):
        any_call(*heads[:3], teacher_weight, shard=shard, teacher_shard=VocabShard(0, 40, 40))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CCE_DIST_DEBUG", "1")
        any_call(*heads[:3], teacher_weight[rows], shard=shard)
        with pytest.raises(RuntimeError, match="linear_kl_divergence: the ranks of the group disagree on kind"):
            any_call(*heads[:3], teacher_weight[rows], shard=shard, kind="reverse" if group.rank() else "forward")
