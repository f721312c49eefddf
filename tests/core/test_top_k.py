"""The largest logits from the lists of one sweep: rows that mislead the sample, equal logits, other samples, the lists."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from shards import DEVICE, GPU
from torch import Tensor

from cce_dist import linear_log_probs
from cce_dist.kernels import Operands, ShardLogits, Spec, Want, candidates, exact, extras, memory
from cce_dist.kernels.lse import Span, lse_partials, new_partials
from cce_dist.kernels.memory import TopPlan
from cce_dist.kernels.tiles import choose_tiles
from cce_dist.kernels.tokens import compact, gathered

V = 20_000 if GPU else 330
K = 5
PLAN = memory.top_plan(V, K) or TopPlan(3, 7, 64)  # a small vocabulary has none of its own


@pytest.fixture(autouse=True)
def _with_a_plan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not GPU and "num_columns" not in request.fixturenames:
        monkeypatch.setattr(memory, "top_plan", lambda *_: PLAN)


def misleading() -> dict[str, Tensor]:
    """Rows of V logits."""
    columns, drawn = torch.arange(V), torch.randn(V)
    sampled = columns % PLAN.step == 0
    return {
        "usual": drawn,
        "constant": torch.full((V,), 1.5),
        "one of 1e4": torch.where(columns == V - 7, 1e4, drawn),
        "rising": columns / 100,
        "falling": -columns / 100,
        "the sample misses all large ones": torch.where(sampled, drawn, drawn + 30),
        "the sample is all that is large": torch.where(sampled, drawn + 30, drawn),
        "one large one beyond the sample": torch.where(columns == 1, 50.0, drawn),
        "few values": (5 * drawn).round() / 5,
        "some equal to the last": torch.where(columns % 40 == 3, 9.0, torch.where(columns == V - 1, 10.0, drawn)),
        "nearly all at -1e30": torch.where(columns % 100 == 17, drawn, -1e30),
        "neighbours": torch.where(columns < 40, drawn + 20, drawn),
        "negative": drawn - 1e4,
    }


def largest(z: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The definition: the first of equal logits first."""
    values, ids = z.sort(dim=1, descending=True, stable=True)
    return values[:, :top_k], ids[:, :top_k]


def top(hidden: Tensor, weight: Tensor, ids: Tensor | None = None, top_k: int = K, **options) -> tuple[Tensor, Tensor]:
    """The same from the kernels, and the log-probabilities."""
    ids = torch.zeros(len(hidden), dtype=torch.int64, device=DEVICE) if ids is None else ids
    with torch.no_grad():
        out = linear_log_probs(hidden, weight, ids, top_k=top_k, backend="triton", **options)
    assert out.top_log_probs is not None and out.top_ids is not None
    return out.top_log_probs, out.top_ids


def found(z: Tensor, top_k: int) -> list[Tensor]:
    """The same from logits: each row's hidden state takes its own column of the weight."""
    return [x.cpu() for x in top(torch.eye(len(z), device=DEVICE), z.t().contiguous().to(DEVICE), top_k=top_k)]


def check(z: Tensor, top_k: int) -> None:
    log_p, ids = found(z, top_k)
    values, expected = largest(z, top_k)
    assert torch.equal(ids, expected)
    torch.testing.assert_close(log_p, (values.double() - z.double().logsumexp(1)[:, None]).float())


@pytest.mark.parametrize("top_k", [1, K, *([300] if GPU else [])])
def test_rows_that_mislead_the_sample(top_k: int) -> None:
    """Catches: a list that is trusted though too short or cut off, equal logits in the order of a list."""
    check(torch.stack(list(misleading().values())), top_k)


@pytest.mark.parametrize(
    "plan", [TopPlan(1, 40, 64), TopPlan(63, 1, 320), TopPlan(7, 9, 4), TopPlan(3, 90, 1280), None], ids=str
)
def test_no_sample_changes_the_result(plan: TopPlan | None) -> None:
    """Thresholds that are nearly right, too high, and too low; lists without room, and none. Bit for bit."""
    z = torch.randn(3, V).mul(3)
    z[0] = z[0].round()
    usual = found(z, K)
    with mock.patch.object(memory, "top_plan", lambda *_: plan):
        assert all(torch.equal(a, b) for a, b in zip(found(z, K), usual, strict=True))
    assert torch.equal(usual[1], largest(z, K)[1])


@pytest.mark.parametrize("value", [-torch.inf, torch.nan])
def test_a_bias_that_is_not_finite(value: float) -> None:
    """-inf of all columns but a few, and NaN of one, which comes first. Catches: the columns past the last one, which are -inf
    too, and NaN that a maximum hides."""
    hidden, weight = torch.randn(3, 16, device=DEVICE), torch.randn(V, 16, device=DEVICE)
    bias, some = torch.zeros(V, device=DEVICE), [5, V // 2, V - 1]
    if value == -torch.inf:
        bias.fill_(value)[some] = 0.0
    else:
        bias[V // 2] = value
    log_p, ids = top(hidden, weight, torch.full((3,), 5, device=DEVICE), linear_bias=bias)
    z = hidden @ weight.t() + bias
    assert torch.equal(ids, largest(z.nan_to_num(torch.inf, neginf=-torch.inf), K)[1])
    torch.testing.assert_close(log_p, z.log_softmax(1).gather(1, ids), equal_nan=True)


def test_two_shards() -> None:
    """The second has fewer columns than k. Catches: ids of the shard, the keys of no column in the place of others."""
    hidden, weight = torch.randn(6, 16, device=DEVICE), torch.randn(V, 16, device=DEVICE)
    labels, cut = torch.tensor([1, 2, -1, 3, 4, V - 1], device=DEVICE), V - 3
    weight[cut:] *= 20
    bias, stats = torch.full((V,), -1e3, device=DEVICE), []
    for start, rows in ((0, slice(cut)), (cut, slice(cut, V))):
        logits = ShardLogits(start, len(weight[rows]))
        x = Operands.of(hidden, weight[rows], labels, logits, bias=bias[rows])
        spec = Spec(logits, V, want=Want(grad=False, top_k=K), workspace_bytes=256 << 20)
        stats.append(exact.statistics(x, spec)[0])
    z, ids = extras.of_keys(extras.merge_top(torch.stack(stats), spec))
    values, expected = largest(hidden @ weight.t() + bias, K)
    assert torch.equal(ids[labels >= 0], expected[labels >= 0])
    torch.testing.assert_close(z[labels >= 0], values[labels >= 0])


def test_a_token_that_is_not_finite_leaves_others_alone() -> None:
    """Catches: NaN that a comparison hides, atomics of a row that is not there."""
    hidden, weight = torch.randn(5, 16, device=DEVICE), torch.randn(V, 16, device=DEVICE)
    ids = torch.tensor([3, -100, 4, V + 9, 5], device=DEVICE)
    z = hidden @ weight.t()
    hidden[0], hidden[1] = torch.nan, torch.nan
    if not GPU:
        ids[3] = -100  # an error there
    log_p, top_ids = top(hidden, weight, ids)
    assert torch.equal(top_ids[[2, 4]], largest(z, K)[1][[2, 4]])
    assert torch.equal(top_ids[0], torch.arange(K, device=DEVICE)) and log_p[0].isnan().all()
    assert (top_ids[[1, 3]] == -1).all()


@pytest.mark.parametrize(
    ("dtype", "hidden_size"),
    [(torch.float16, 16), (torch.float32, 15), *([(torch.bfloat16, 64)] if GPU else [])],
    ids=str,
)
def test_lists_hold_what_reaches_the_threshold(dtype: torch.dtype, hidden_size: int) -> None:
    """Without tensor descriptors where rows are not aligned. Catches: a logit that is stored under another column, two places
    that are one, a row's list in another's."""
    hidden = torch.randn(20, hidden_size, device=DEVICE).to(dtype)
    weight = torch.randn(V, hidden_size, device=DEVICE).to(dtype)
    labels = torch.arange(20, device=DEVICE)
    labels[::5] = -1
    x = Operands.of(hidden, weight, labels, ShardLogits(0, V - 3))
    tiles = choose_tiles(dtype, hidden.device)
    if not GPU:  # a lane has two cells, or one
        tiles = tiles._replace(lse=tiles.lse._replace(cols=hidden_size // 16 * 224 + 32))
    rows = gathered(hidden, compact(labels), torch.empty_like(hidden))
    lists = candidates.new_candidates(candidates.sampled(x, PLAN), PLAN, tiles, rows)
    num_kept = int(rows.num_kept)
    lists.threshold_R[num_kept:], lists.list_RM[num_kept:] = -1.0, 7.0
    span = Span(0, -(-(V - 3) // tiles.lse.cols), 2)
    lse_partials(x, rows, tiles, span, new_partials(2, 20, Want(), hidden), lists=lists)

    z = rows.hidden.double() @ weight[: V - 3].double().t()
    assert (lists.count_R[num_kept:] == 0).all() and (lists.list_RM[num_kept:] == 7).all()
    for row in range(num_kept):
        count, limit = int(lists.count_R[row]), lists.threshold_R[row]
        assert int((z[row, :: PLAN.step] >= limit).sum()) == PLAN.nth and count <= lists.capacity
        first = lists.list_RM[row, 4 * lists.capacity :].view(torch.int32)[:count].long()
        columns = first[:, None] + torch.tensor([0, 1, 8, 9], device=DEVICE)
        values, inside = lists.list_RM[row, : 4 * count].view(-1, 4), columns < V - 3
        torch.testing.assert_close(values[inside].double(), z[row][columns[inside]], rtol=1e-5, atol=1e-4)
        assert (values[~inside] == -torch.inf).all()
        assert columns.unique().numel() == columns.numel()
        assert (values.amax(1) >= limit).all()
        assert torch.isin((z[row] > limit.double() + 1e-3).nonzero()[:, 0], columns).all()


def test_beside_kept_exponentials() -> None:
    """The sweep that keeps them lists, too. Catches: lists of the columns that are not kept alone, other gradients, lists of
    another group of tokens."""
    hidden, weight = torch.randn(6, 16), torch.randn(V, 16)
    ids = torch.randint(V, (6,), device=DEVICE)
    outputs = []
    tile_cols = choose_tiles(torch.float32, torch.device(DEVICE)).lse.cols
    for top_k, rows in ((0, 2048), (K, 2048), (K, 4)):
        h, w = (x.to(DEVICE).requires_grad_() for x in (hidden, weight))
        columns = mock.patch.object(exact, "columns_kept", lambda *_: 4 * tile_cols)
        groups = mock.patch.object(memory, "forward_rows", lambda *_, rows=rows: rows)
        with columns, groups:
            out = linear_log_probs(h, w, ids, top_k=top_k, backend="triton")
            outputs.append((out, *torch.autograd.grad(out.log_probs.sum(), (h, w))))
    without, *grads = outputs[0]
    for out, *others in outputs[1:]:
        assert torch.equal(out.log_probs, without.log_probs)
        assert all(torch.equal(a, b) for a, b in zip(grads, others, strict=True))
        assert torch.equal(out.top_ids.cpu(), largest(hidden @ weight.t(), K)[1])


def test_the_same_bits_in_every_run() -> None:
    """Whatever order the lists have. Five calls: later ones launch past Triton on a GPU."""
    num_tokens = 700 if GPU else 4
    hidden, weight = torch.randn(num_tokens, 16, device=DEVICE), torch.randn(V, 16, device=DEVICE)
    ids = torch.zeros(num_tokens, dtype=torch.int64, device=DEVICE)
    runs = []
    for _ in range(5 if GPU else 2):
        out = linear_log_probs(hidden, weight, ids, entropy=True, top_k=K, backend="triton")
        assert out.top_log_probs is not None and out.top_ids is not None and out.entropy is not None
        runs.append((out.top_log_probs, out.top_ids, out.lse, out.entropy))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("top_k", [1, 5, 64, 1024])
@pytest.mark.parametrize("num_columns", [1, 300, 5_000, 32_768, 128_256, 1 << 20])
def test_a_plan_fits(num_columns: int, top_k: int) -> None:
    """In the rows that a budget has room for, and a sample that holds what it is asked for."""
    plan = memory.top_plan(num_columns, top_k)
    if plan is None:
        assert num_columns < 64 * 8 or top_k * 20 > num_columns or num_columns < 9_000 * max(1, top_k // 16)
        return
    assert plan.nth <= num_columns // plan.step and 8 * plan.capacity <= num_columns
    sizes = memory.Sizes(8192, 4096, num_columns, 2)
    for workspace in (32 << 20, 256 << 20):
        rows = memory.top_rows(sizes, plan, top_k, workspace, 2048)
        taken = rows * (sizes.hidden_bytes + memory.top_bytes(plan, top_k))
        assert taken <= workspace or rows == memory.ROWS


@pytest.mark.parametrize("num_columns", [128_256])  # takes the vocabulary's own plan
def test_the_sample_is_rarely_too_high_or_too_low(num_columns: int) -> None:
    """By drawing: no row of 200,000 has fewer than k columns at its threshold, or more than its list has room for."""
    plan = memory.top_plan(num_columns, 64)
    assert plan is not None
    # The ranks of a sample's columns among all: the nth smallest is the number of columns at the threshold, less one.
    ranks = torch.distributions.Gamma(float(plan.nth), 1.0).sample((200_000,)) * plan.step
    assert ranks.min() > 64 and ranks.max() < plan.capacity
    assert Spec(ShardLogits(0, num_columns), num_columns, want=Want(top_k=64)).num_rows == 3 + 128
