"""Divergence of two heads against dense logits in float64: both backends, every split, and what is refused."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from shards import DEVICE, GPU, launch_nothing, nan_memory
from support.dense import assert_holds
from support.refused import assert_changes_refused
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from cce_dist import VocabShard, linear_kl_divergence
from cce_dist import divergence as two_heads
from cce_dist.autograd import flat
from cce_dist.decide import Where, decide_heads
from cce_dist.divergence import DivergenceCall
from cce_dist.kernels import Operands, ShardLogits, d_hidden, memory
from cce_dist.kernels.divergence import kernels as divergence
from cce_dist.kernels.divergence.heads import KINDS, Divergence, Heads
from cce_dist.kernels.dlogits import logits_chunk
from cce_dist.kernels.dry_run import Live
from cce_dist.kernels.tiles import choose_tiles, table_tiles
from cce_dist.kernels.tokens import compact, gathered
from cce_dist.tools.verify import check
from cce_dist.tools.verify.cases import BF16, DIVERGENCE_CASES, FP32, OF_BOTH, DivergenceCase, Drawn, Gaussian, uneven
from cce_dist.tools.verify.divergence import DIVERGENCE

any_call: Any = linear_kl_divergence  # options by name, and some that a type checker would refuse
N, D, V = 18, 24, 75
BACKENDS = ("torch", "triton")
UNCUT = 1 << 60  # as LEAST_PAIR_ROWS: no group of tokens is large enough, so a second pass computes the logits again
IN_CHUNKS = {"workspace_bytes": 1}


def case_of(
    name: str, *sizes: int, options: dict[str, Any] | None = None, bias: bool = True, shift: float = 0.0,
    scale: float = D**-0.5, **fields: Any,
) -> DivergenceCase:  # fmt: skip
    """Return a case of both heads, in fp32 unless the fields say otherwise, that calls backward once."""
    sizes = (*sizes, *(N, D, V)[len(sizes) :])
    problem = Gaussian(*sizes, bias=bias, scale=scale, shift=shift, grid=bool(shift))
    fields = dict(twice=False, spread=1.0, problem=problem) | fields
    return DivergenceCase(name, options=options or {}, **fields)


def draw_both(case: DivergenceCase, generator: torch.Generator) -> Drawn:
    """Draw a case; the teacher's logits are shifted as the student's are."""
    drawn = DIVERGENCE.draw(case, generator)
    shift = getattr(case.problem, "shift", 0.0)
    if shift and drawn.teacher is not None and drawn.teacher.bias is not None:
        teacher = replace(drawn.teacher, bias=(drawn.teacher.bias + shift).float().double())
        drawn = drawn._replace(teacher=teacher)
    return drawn


BOTH_HEADS = DIVERGENCE._replace(draw=draw_both)
PADDED: dict[str, Any] = dict(shards=lambda *_: [(0, 80)], teacher_padding=48, padding=torch.nan)
SHARP_TEACHER: dict[str, Any] = dict(scale=0.1 * D**-0.5, spread=30.0)
SHARP_STUDENT: dict[str, Any] = dict(scale=30.0 * D**-0.5, spread=0.1)
BOTH_SHARP: dict[str, Any] = dict(scale=30.0 * D**-0.5, spread=30.0)
CASES: list[tuple[DivergenceCase, tuple[str, ...]]] = [
    (case_of("whole-tiles", 32, 32, 128, bias=False), ("forward",)),
    (case_of("rows-no-descriptor-can-describe", N, 19, masked=0.4), ("forward", "lk")),
    (case_of("bias-scale-softcap-of-both", options=OF_BOTH | {"beta": 0.2}), KINDS),
    (case_of("softcap-of-the-student-alone", options=dict(softcap=4.0)), ("forward", "jsd")),
    (case_of("nothing-counts", masked=1.0), ("forward", "tv")),
    (case_of("no-tokens", 0), ("reverse", "lk")),
    (case_of("one-row", N, D, 1), ("reverse", "jsd", "lk")),
    (case_of("padded-differently", options={"beta": 0.9}, **PADDED), ("forward", "jsd", "tv")),
    (case_of("teacher-far-sharper", **SHARP_TEACHER), KINDS),
    (case_of("student-far-sharper", **SHARP_STUDENT), KINDS),
    (case_of("both-sharp", **BOTH_SHARP), ("reverse", "tv", "lk")),
    (case_of("both-sharp-in-16-bits", dtype=BF16, **BOTH_SHARP), ("forward", "jsd", "lk")),
    (case_of("options-in-16-bits", dtype=BF16, options=OF_BOTH), ("reverse", "tv")),
    (case_of("both-at-1e4", shift=1e4), ("reverse", "jsd", "lk")),
    (case_of("chunks-and-groups", 24, options=IN_CHUNKS, masked=0.3), KINDS),
    (case_of("chunks-made-again", 24, options=IN_CHUNKS, masked=0.3), ("jsd", "lk")),
    (case_of("nothing-in-common", N, 4, bias=False, scale=5e3, spread=1e4), KINDS),
]
KEPT: list[tuple[int, DivergenceCase, tuple[str, ...]]] = [  # and how many columns are kept
    (96, case_of("all", bias=False, twice=True), ("forward", "jsd")),
    (96, case_of("all-in-16-bits", bias=False, dtype=BF16), ("forward", "jsd")),
    (64, case_of("a-part-in-groups-in-16-bits", 24, dtype=BF16, options=IN_CHUNKS, masked=0.2), ("reverse", "jsd")),
    (64, case_of("a-part", masked=0.4, twice=True), ("reverse", "lk")),
    (64, case_of("a-part-in-groups", 24, options=IN_CHUNKS, masked=0.2), ("reverse", "jsd", "lk")),
    (64, case_of("a-part-made-again", 24, options=IN_CHUNKS, masked=0.2), ("jsd", "tv")),
    (96, case_of("bias-scale-softcap-of-both", options=OF_BOTH | {"beta": 0.2}), ("reverse", "jsd", "tv")),
    (96, case_of("padded-differently", **PADDED), ("forward", "tv")),
    (96, case_of("teacher-far-sharper", **SHARP_TEACHER), ("forward", "jsd", "lk")),
    (96, case_of("student-far-sharper", **SHARP_STUDENT), ("reverse", "tv")),
    (32, case_of("a-part-without-the-largest", scale=8.0 * D**-0.5, spread=8.0), ("forward", "jsd", "lk")),
    (96, case_of("both-at-1e4", shift=1e4), ("forward", "tv")),
]


def assert_kinds_hold(case: DivergenceCase, kinds: tuple[str, ...]) -> None:
    """Check a case of each kind, in memory full of NaN."""
    for kind in kinds:
        with nan_memory():
            assert_holds(BOTH_HEADS, replace(case, options=case.options | {"kind": kind}))


def drawn_of(**fields: Any) -> Drawn:
    """Draw both heads, which a test then changes."""
    return check.draw(BOTH_HEADS, case_of("drawn", **fields))


def biases(drawn: Drawn) -> tuple[Tensor, Tensor]:
    """The student's and the teacher's, to be changed in place."""
    assert drawn.teacher is not None and drawn.problem.bias is not None and drawn.teacher.bias is not None
    return drawn.problem.bias, drawn.teacher.bias


def call(drawn: Drawn, kind: str, backend: str, **options: Any) -> dict[str, Tensor]:
    """Return the divergence, dE, dC and dbias, made in memory full of NaN."""
    drawn = drawn._replace(options=drawn.options | {"kind": kind} | options)
    with nan_memory():
        return DIVERGENCE.call(drawn, VocabShard(0, V, V), backend, DEVICE)


def no_gradient(found: dict[str, Tensor]) -> bool:
    return not any(x.any() for name, x in found.items() if name != "divergence")


def on_device(drawn: Drawn, dtype: torch.dtype = FP32) -> list[Tensor]:
    """Both heads' hidden states and weights."""
    assert drawn.teacher is not None
    pairs = ((head.hidden, head.weight) for head in (drawn.problem, drawn.teacher))
    return [x.to(DEVICE, dtype) for pair in pairs for x in pair]


def kept_columns(columns: int) -> int:
    """So many columns in the interpreter, whose tiles are 32 wide; whole tiles of a GPU."""
    return 256 if GPU else columns


@pytest.mark.parametrize(("case", "kinds"), CASES, ids=[case.name for case, _ in CASES])
def test_matches_dense(case: DivergenceCase, kinds: tuple[str, ...], monkeypatch) -> None:
    """The kernels; the matrix has the torch backend. Catches phantom columns, a moment that forgets that a maximum grew, 0
    times infinity, the other head's options, a launch over nothing, and a gradient that is left as it was."""
    if case.options.get("workspace_bytes"):
        monkeypatch.setattr(memory, "LEAST_BYTES", 8000)
        monkeypatch.setattr(memory, "ROWS", 16)
        monkeypatch.setattr(memory, "LEAST_PAIR_ROWS", UNCUT if "again" in case.name else 1)
    assert_kinds_hold(case, kinds)


@pytest.mark.parametrize(("kept", "case", "kinds"), KEPT, ids=[case.name for _, case, _ in KEPT])
def test_kept_exponentials_match_dense(kept: int, case: DivergenceCase, kinds: tuple[str, ...], monkeypatch) -> None:
    """Catches: a tile's exponentials relative to another's, the smaller of p and t taken for the larger, padding that is no
    number, the recomputed part's first column, a slope left out, a chunk that starts where another did, a group's kept logits
    in another group's rows, sums that stay relative to a smaller logit, what is kept overwritten by its gradients."""
    monkeypatch.setattr(divergence, "saved_columns", lambda *_: kept_columns(kept))
    if case.options.get("workspace_bytes"):
        monkeypatch.setattr(memory, "LEAST_BYTES", 43000)  # 15 tokens
        monkeypatch.setattr(memory, "LEAST_PAIR_ROWS", UNCUT if "again" in case.name else 1)
    monkeypatch.setattr(memory, "exact_chunks", lambda sizes, *_: memory.Chunks(sizes.num_tokens, kept_columns(32)))
    if GPU and case.name != "both-at-1e4":  # a dense head's logits are all equal there in bf16
        case = replace(case, dtype=BF16)
    assert_kinds_hold(case, kinds)


def test_logits_of_16_bits_are_precise_near_the_largest_of_their_tile() -> None:
    """Beside bf16 they are fp16. Catches logits relative to another tile's largest, or to nothing: off by 0.25 at 1e3."""
    tiles = choose_tiles(BF16, torch.device(DEVICE))
    num_tokens, num_tiles = 20, 3
    cols = num_tiles * tiles.lse.cols
    hidden, weight = (torch.randn(rows, 64, device=DEVICE).bfloat16() for rows in (num_tokens, cols - 5))
    bias = torch.full((cols - 5,), 1e3, device=DEVICE) + 100 * (torch.arange(cols - 5, device=DEVICE) // tiles.lse.cols)
    ids = torch.zeros(num_tokens, dtype=torch.int64, device=DEVICE)
    x = Operands.of(hidden, weight, ids, ShardLogits(0, cols - 5), bias=bias)
    pair = divergence.new_pair_logits(num_tokens, cols, tiles.lse.cols, hidden)
    rows = gathered(hidden, compact(ids), torch.empty_like(hidden))
    divergence._fill(Heads(x, x), [(1, rows)], pair, 0, cols, tiles)
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
    assert divergence.saved_columns(x, spec) == 32768
    assert divergence.saved_columns(x, spec._replace(grad=False)) == 0
    half = Heads(*[head._replace(hidden=operands.half())] * 2)
    assert divergence.saved_columns(half, spec) == 0
    chosen = decide_heads(x.sizes, spec._replace(workspace_bytes=0), Where("triton", "torch.bfloat16")).workspace_bytes
    of_half = decide_heads(half.sizes, spec._replace(workspace_bytes=0), Where("triton", "torch.float16"))
    assert of_half.workspace_bytes == 256 << 20
    assert 4 * 8192 * 32768 < chosen < 5.5 * 8192 * 32768
    assert divergence.saved_columns(x, spec._replace(workspace_bytes=chosen)) == 32768
    for mib in (256, 512, 1024, chosen >> 20):
        columns = divergence.saved_columns(x, spec._replace(workspace_bytes=mib << 20))
        assert 4 * 8192 * columns < mib << 20 and (columns > 0) == (mib > 256), mib


@pytest.mark.parametrize(
    ("mib", "num_tokens", "kind"),
    [
        (64, 4096, "tv"),
        (256, 20000, "forward"),
        (256, 4096, "tv"),
        (512, 20000, "tv"),
        (1024, 20000, "forward"),
        (0, 4096, "forward"),
        (0, 20000, "tv"),
    ],
)
def test_what_is_alive_keeps_the_budget(mib: int, num_tokens: int, kind: str, monkeypatch) -> None:
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
        value, saved = two_heads._run_forward(*given, None, call)
        forward, live.peak = live.peak, 0
        kept = sum(x.nbytes for x in saved[1:])
        grads = two_heads._run_backward([value], *given, saved, None, [True, True], call)
    backward = live.peak - sum(x.nbytes for x in grads if x is not None)
    chosen = two_heads.decided(call, *given).spec.workspace_bytes
    assert chosen == mib << 20 or (not mib and (4 * num_tokens * 9000 < kept or chosen == memory.MOST_DEFAULT))
    last_wave = 2 * at_once * tiles.grad_hidden.rows * tiles.grad_hidden.cols * 4  # parts of up to two
    assert max(forward, backward) <= chosen + last_wave + (2 << 20), (forward >> 20, backward >> 20, chosen >> 20)
    assert kind == "forward" or forward <= backward + (2 << 20), "a second pass takes more memory than one pass"


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_heads_have_none(backend: str) -> None:
    """Catches two heads that take different steps: exactly 0, and a gradient of exactly 0. "tv" as 1 - o would not be 0."""
    drawn = drawn_of(scale=20.0 * D**-0.5)
    drawn = drawn._replace(teacher=drawn.problem)
    for kind in KINDS:
        found = call(drawn, kind, backend)
        assert no_gradient(found), kind
        # A logit of 60 is rounded to 4e-6.
        assert found["divergence"].abs().max() <= (1e-5 if kind == "lk" else 0.0), kind


@pytest.mark.parametrize("backend", BACKENDS)
def test_beta_near_its_ends(backend: str) -> None:
    """There "jsd" is beta KL(t || p), or (1 - beta) KL(p || t). Catches: 1 - beta in fp32, log m - log p as a difference."""
    drawn = drawn_of(spread=4.0)
    for beta, share, kind in (
        (1e-12, 1e-12, "forward"),
        (1e-30, 1e-30, "forward"),
        (1 - 2.0**-14, 2.0**-14, None),
        (1 - 2.0**-50, 2.0**-50, "reverse"),
    ):
        limit = {"kind": "jsd", "beta": beta} if kind is None else {"kind": kind}
        of_limit = drawn._replace(options=drawn.options | limit)
        baseline, truth = (DIVERGENCE.reference(of_limit, dtype, DEVICE) for dtype in (FP32, torch.float64))
        for name, ours in call(drawn, "jsd", backend, beta=beta).items():
            check.assert_no_worse(ours if kind is None else ours / share, baseline[name], truth[name], quantity=name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties(backend: str) -> None:
    """Both heads have 40 ids of one probability, 20 of them in common. Catches: p_j = t_j taken for p_j < t_j in one pass."""
    drawn = drawn_of()
    assert drawn.teacher is not None
    for x in (drawn.problem.hidden, drawn.teacher.hidden):
        x.zero_()
    bias, teacher_bias = (x.fill_(-torch.inf) for x in biases(drawn))
    bias[:40], teacher_bias[20:60] = 1.0, 1.0
    for kind, expected in (("tv", torch.tensor(0.5)), ("lk", torch.tensor(2.0).log())):
        found = call(drawn, kind, backend)
        torch.testing.assert_close(found["divergence"].cpu(), expected.expand(N), rtol=1e-6, atol=0)
        # o is 0.5, and no student's logit can raise it while p_j = t_j counts as p_j > t_j.
        assert no_gradient(found), kind


@pytest.mark.parametrize("backend", BACKENDS)
def test_disjoint_supports(backend: str) -> None:
    """The loss "lk" is infinite, its gradient 0. Catches: the logarithm of 0 in the gradient; a "tv" above 1 by rounding, of
    which the acceptance rate has no logarithm."""
    drawn = drawn_of()
    bias, teacher_bias = biases(drawn)
    bias[:40], teacher_bias[40:] = -torch.inf, -torch.inf
    for kind, expected in (("tv", 1.0), ("lk", torch.inf)):
        found = call(drawn, kind, backend)
        value = found["divergence"]
        torch.testing.assert_close(value, torch.full_like(value, expected))
        assert (value <= expected).all() and no_gradient(found), kind


@pytest.mark.parametrize(
    ("kept", "again", "kind"),
    [(0, False, "tv"), (0, True, "jsd"), (64, False, "lk"), (64, True, "tv")],
)
def test_a_second_pass_reads_the_logits(kept: int, again: bool, kind: str, monkeypatch) -> None:
    """One merge for each group of tokens, and both heads' logits once in forward; or one merge, and the logits that are not
    kept twice. Catches: logits computed for each pass."""
    monkeypatch.setattr(memory, "LEAST_PAIR_ROWS", UNCUT if again else 1)
    monkeypatch.setattr(divergence, "saved_columns", lambda *_: kept_columns(kept))
    monkeypatch.setattr(memory, "LEAST_BYTES", 43000)
    filled, merged = [], []

    def fill(*given: Any) -> None:
        filled.append(given[3].shape[1] // given[4].lse.cols)
        logits_chunk(*given)

    monkeypatch.setattr(divergence, "logits_chunk", fill)
    merge_of = two_heads.heads.merge
    monkeypatch.setattr(two_heads.heads, "merge", lambda *given: merged.append(given[0].shape) or merge_of(*given))
    heads = on_device(check.draw(BOTH_HEADS, case_of("40 tokens", 40)), BF16)
    any_call(*heads, kind=kind, backend="triton", workspace_bytes=1)
    if again:
        kept_tiles, tiles = (-(-columns // kept_columns(32)) for columns in (min(kept_columns(kept), 75), 75))
        assert merged == [(1, 5, 40)]
        assert sum(filled) % (2 * kept_tiles + 4 * (tiles - kept_tiles)) == 0
        return
    assert merged == [(1, 5, 30), (1, 5, 10)]
    assert sum(filled) == 2 * len(merged) * -(-75 // kept_columns(32))


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_one_head_rules_out(backend: str) -> None:
    """A logit of -inf that both have is padding; one that the leading head allows makes the KL infinite, and no NaN."""
    drawn = drawn_of()
    out, drawn_without = slice(3, 40), drawn._replace(problem=without(drawn.problem), teacher=without(drawn.teacher))
    for bias in biases(drawn):
        bias[out] = -torch.inf
    for kind in KINDS:
        of_kind = drawn_without._replace(options=drawn_without.options | {"kind": kind})
        found, truth = call(drawn, kind, backend), DIVERGENCE.reference(of_kind, torch.float64, DEVICE)
        for name, got in found.items():
            if name in ("dC", "dbias"):
                assert not got[out].any()
                got = torch.cat((got[:3], got[40:]))
            how: dict[str, Any] = dict(rtol=1e-4, atol=1e-5, msg=lambda said, name=name: f"{name}: {said}")
            torch.testing.assert_close(got, truth[name].float(), **how)
        lead = biases(drawn)[kind == "forward"]
        lead[5] = 0.0
        value = call(drawn, kind, backend)["divergence"]
        lead[5] = -torch.inf
        assert (value == torch.inf).all() if kind in ("forward", "reverse") else value.isfinite().all()


def without(head: Any) -> Any:
    """The head without the rows that are ruled out."""
    weight, bias = (torch.cat((x[:3], x[40:])) for x in (head.weight, head.bias))
    return replace(head, weight=weight, bias=bias)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ids_that_the_teacher_rules_out_are_nothing_to_masked_tokens(backend: str) -> None:
    """Where no token counts the gradients are 0. Catches 0 times the infinite gradient of a token that is masked."""
    drawn = drawn_of(masked=1.0)
    biases(drawn)[1][::3] = -torch.inf
    for kind in KINDS:
        assert not any(x.any() for x in call(drawn, kind, backend).values()), kind


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_does_not_count_may_hold_anything(backend: str) -> None:
    """Catches 0 times NaN in dC, and a mean over all tokens."""
    drawn = drawn_of(masked=0.5)
    assert drawn.teacher is not None
    mask = drawn.options["mask"]
    problem = replace(drawn.problem, hidden=drawn.problem.hidden.masked_fill(~mask[:, None], torch.nan))
    teacher = replace(drawn.teacher, hidden=drawn.teacher.hidden.masked_fill(~mask[:, None], torch.inf))
    heads, mask = on_device(drawn), mask.to(DEVICE)
    for kind in ("reverse", "tv"):
        clean, found = (call(each, kind, backend) for each in (drawn, drawn._replace(problem=problem, teacher=teacher)))
        assert all(torch.equal(clean[name], found[name]) for name in clean)
        value, options = any_call(*heads, kind=kind, mask=mask, backend=backend), dict(kind=kind, backend=backend)
        assert not value[~mask].any()
        mean, total = (any_call(*heads, reduction=how, mask=mask, **options) for how in ("mean", "sum"))
        torch.testing.assert_close((mean, total), (value.sum() / mask.sum(), value.sum()))
        assert any_call(*heads, reduction="mean", mask=mask & ~mask, **options) == 0


def test_leading_dims_strides_and_detached_teacher() -> None:
    """Catches flattened dims, strides taken for granted, and a gradient that reaches the teacher."""
    heads = on_device(check.draw(BOTH_HEADS, case_of("12 tokens", 12)))
    expected = any_call(*heads)
    hidden, teacher = (x.view(3, 4, -1).transpose(0, 1).contiguous().transpose(0, 1) for x in heads[::2])
    weight = heads[1].t().contiguous().t().requires_grad_()
    teacher_weight = heads[3].clone().requires_grad_()
    got = linear_kl_divergence(hidden, weight, teacher.requires_grad_(), teacher_weight)
    assert got.shape == (3, 4) and torch.equal(got.flatten(), expected)
    got.sum().backward()
    assert weight.grad is not None and teacher.grad is None and teacher_weight.grad is None


def test_a_buffer_takes_the_weights_gradient() -> None:
    hidden, given, *teacher = on_device(drawn_of(), BF16)
    for backend in BACKENDS:
        weight = given.clone().requires_grad_()
        any_call(hidden, weight, *teacher, backend=backend).sum().backward()
        taken = weight.grad
        weight.grad, buffer = None, torch.ones(weight.shape, device=DEVICE)
        any_call(hidden, weight, *teacher, backend=backend, grad_weight_out=buffer).sum().backward()
        assert taken is not None and weight.grad is None
        torch.testing.assert_close(buffer - 1, taken.float(), rtol=1e-2, atol=1e-5)


def test_operators_are_well_formed() -> None:
    """torch's own checks of schema, fakes and registration."""
    hidden, weight, *teacher = on_device(check.draw(BOTH_HEADS, case_of("4 tokens", 4)))
    logits = ShardLogits(0, V, tensors="bias")
    call = DivergenceCall(Divergence(logits, logits, "jsd"), V)
    mask = torch.ones(4, dtype=torch.bool, device=DEVICE)
    bias, teacher_bias = torch.randn(2, V, device=DEVICE)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    tensors = (*leaves[:2], leaves[2:], mask, *teacher, [teacher_bias], None)
    torch.library.opcheck(torch.ops.cce_dist.divergence.default, (*tensors, *flat(call), None))


X, W, XT, WT = torch.zeros(3, 4), torch.zeros(8, 4), torch.zeros(3, 6), torch.zeros(8, 6)
BAD = [
    (dict(kind="backward"), ValueError, "kind must be one of"),
    (dict(beta=1.0), ValueError, r"beta must be in \(0, 1\)"),
    (dict(beta=1e-39), ValueError, r"beta must be in \(0, 1\), also in fp32"),
    (dict(teacher_input=torch.zeros(2, 6)), ValueError, "teacher_input must be .3, D_t"),
    (dict(teacher_input=torch.zeros(3, 5)), ValueError, "size 5, teacher_weight 6"),
    (dict(teacher_weight=torch.zeros(9, 6)), ValueError, "teacher_weight has 9 rows, linear_weight 8"),
    (dict(teacher_weight=torch.zeros(8)), ValueError, "teacher_weight must be .V, D."),
    (dict(teacher_weight=WT.half()), TypeError, "input is torch.float32, teacher_weight torch.float16"),
    (dict(teacher_bias=torch.zeros(7)), ValueError, r"teacher_bias must be \[8\]"),
    (dict(linear_bias=torch.zeros(7)), ValueError, r"linear_bias must be \[8\]"),
    (dict(teacher_shard=VocabShard(0, 8, 7)), ValueError, "teacher_shard a vocabulary of 7"),
    (dict(teacher_shard="all"), TypeError, "teacher_shard must be a VocabShard"),
    (dict(teacher_shard=VocabShard(0, 9, 8)), ValueError, "teacher_shard holds 9 rows"),
    (dict(mask=torch.ones(3)), TypeError, "mask must be bool"),
    (dict(mask=torch.ones(2, dtype=torch.bool)), ValueError, r"mask must be \(3,\)"),
    (dict(teacher_ids=torch.arange(7)), ValueError, r"teacher_ids must be a plain tensor \[8\]"),
    (dict(teacher_ids=torch.arange(1, 9)), IndexError, r"teacher_ids\[7\] is 8: not in \[0, 8\)"),
    (dict(teacher_ids=torch.arange(8) // 2), ValueError, "is 0, which is there twice"),
    (dict(teacher_ids=torch.arange(8, device="meta")), ValueError, "teacher_ids is on meta"),
    (dict(teacher_softcap=-1.0), ValueError, "teacher_softcap must be positive"),
    (dict(teacher_logit_scale="1"), TypeError, "teacher_logit_scale must be a number"),
    (dict(logit_scale=torch.ones((), requires_grad=True)), TypeError, "logit_scale gets no"),
    (dict(teacher_weight=None), TypeError, "teacher_weight must be a tensor"),
    (dict(grad_weight_out=torch.zeros(8, 5)), ValueError, "grad_weight_out must be"),
    (dict(reduction="batchmean"), ValueError, "reduction must be one of"),
]  # fmt: skip


def test_bad_input_is_one_line() -> None:
    heads = dict(input=X, linear_weight=W, teacher_input=XT, teacher_weight=WT)
    assert_changes_refused(linear_kl_divergence, heads, BAD)


OF_KERNELS = ("kl-draft-split", "kl-reverse-options", "kl-jsd-options", "tv-options", "lk-empty-shards")


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_id_that_nobody_checks_makes_no_number(backend: str) -> None:
    """On a GPU and in a compiled graph ids are not read. Catches a row of another id in its place."""
    drawn = drawn_of(masked=0.5)
    mask = drawn.options["mask"]
    for wrong, kind in ((V, "jsd"), (8, "jsd"), (V, "forward"), (8, "tv")):  # in no vocabulary, and there twice
        ids = torch.arange(V, device=DEVICE).index_fill(0, torch.tensor([7], device=DEVICE), wrong)
        with mock.patch("torch.compiler.is_compiling", lambda: True):
            value = call(drawn, kind, backend, teacher_ids=ids)["divergence"]
        assert value[mask].isnan().all() and not value[~mask].any()


def _kernels_on_two_ranks() -> None:
    """Cases in uneven shards, dE a few tokens at a time. The ranks are on CPUs, where kernels are interpreted."""
    with mock.patch.multiple(memory, most_rows=lambda *_: 4, LEAST_BYTES=8000, ROWS=4):
        for case in DIVERGENCE_CASES:
            if case.name in OF_KERNELS:
                shards = case.shards if "empty" in case.name else uneven
                smaller = replace(case, shards=shards, problem=Gaussian(12, 24, 75))
                assert_holds(DIVERGENCE, smaller, dist.group.WORLD, "cpu")


@pytest.mark.skipif(GPU, reason="of the interpreter")
@pytest.mark.slow
def test_two_ranks(ranks2) -> None:
    """Catches a merge that forgets one head's maximum, the teacher's slice taken for the whole. test_verify.py has the rest."""
    ranks2(_kernels_on_two_ranks)


def _rows_that_one_rank_lacks() -> None:
    """All ranks are called alike: a row of another rank, on one rank; all rows, on one rank, which has padding or none."""
    group: Any = dist.group.WORLD
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


def test_no_rank_waits_for_another_that_lacks_a_row(ranks2) -> None:
    """Catches: an error that one rank alone raises, and a weight without rows that is indexed."""
    ranks2(_rows_that_one_rank_lacks)


def _four_ranks() -> None:
    hidden, weight, teacher, teacher_weight = (x.cpu() for x in on_device(drawn_of()))
    expected = linear_kl_divergence(hidden, weight, teacher, teacher_weight)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    split, of_teacher = (distribute_tensor(x, mesh, [Shard(0)]) for x in (weight, teacher_weight))
    torch.testing.assert_close(any_call(hidden, split.requires_grad_(), teacher, of_teacher), expected)
    group = dist.group.WORLD
    assert group is not None
    shard, other = VocabShard.even(V, group), VocabShard(*uneven(V, 4)[group.rank()], V, group)
    rows = slice(shard.start, shard.stop)
    heads = (hidden, weight[rows], teacher, teacher_weight[other.start : other.stop])
    with pytest.raises(ValueError, match="both heads' rows must cover the same ids"):
        any_call(*heads, shard=shard, teacher_shard=other)
    with pytest.raises(ValueError, match="a row of another rank, this one has"):
        any_call(*heads, shard=shard, teacher_shard=other, teacher_ids=torch.arange(V).flip(0))
    with pytest.raises(ValueError, match="process group"):
        any_call(*heads[:3], teacher_weight, shard=shard, teacher_shard=VocabShard(0, V, V))


@pytest.mark.slow
def test_four_ranks(ranks4) -> None:
    """Weights that are DTensors, shards that do not fit, and ranks that disagree."""
    ranks4(_four_ranks)
