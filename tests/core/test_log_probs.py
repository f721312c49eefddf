"""linear_log_probs against the dense reference: outputs, gradients, the largest logits, bad input."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from shards import DEVICE, GPU, nan_memory
from support.dense import assert_holds, draw
from support.refused import assert_changes_refused
from torch import Tensor

from cce_dist import LogProbs, VocabShard, linear_log_probs, merge, reference
from cce_dist.kernels import (
    IGNORED,
    OUTSIDE,
    Operands,
    ShardLogits,
    Softmax,
    Spec,
    Want,
    dry_run,
    exact,
    memory,
    outputs,
)
from cce_dist.kernels.tiles import Planned, choose_tiles, interpreted
from cce_dist.tools.verify.cases import KEPT_CASES, LOG_PROB_CASES, Gaussian, LogProbCase
from cce_dist.tools.verify.log_probs import LOG_PROBS

N, D, V = 11, 8, 37
WIDE, K = 20_000 if GPU else 330, 5  # columns and places in tests of the largest logits
BACKENDS = ["torch", "triton"]
CASES = {case.name.removeprefix("log-probs-"): case for case in (*LOG_PROB_CASES, *KEPT_CASES)}


def check(case: LogProbCase, twice: bool = GPU) -> None:
    """Check a case in memory full of NaN; ``twice``: a second backward and call, too."""
    if not GPU and case.name == "kept-everything":  # its 300 tokens take a minute
        case = replace(case, problem=Gaussian(7, 70, 40, bias=True), kept=30)
    with nan_memory():
        assert_holds(LOG_PROBS, replace(case, twice=twice))


INTERPRETED = ["64-entropy", "everything", "fp16", "kept-everything", "kept-whole"]
SLOW = ("padded-shards", "gap-of-1e4", "kept", "kept-gap-of-1e4", "kept-bf16")
INTERPRETED += [pytest.param(name, marks=pytest.mark.slow) for name in SLOW]


@pytest.mark.parametrize("name", CASES if GPU else INTERPRETED)
def test_kernels_match_dense(name: str) -> None:
    """Catches: a cell at another chunk's column, factors left out of a slope or a gradient, a best id of another part;
    of lists an entry that is not written, a tail, a row of zeros that is not."""
    check(CASES[name])


@pytest.mark.parametrize(
    ("name", "columns", "differentiated"),
    [
        ("everything", 96, ("log_probs", "lse")),
        ("everything", 96, ("entropy",)),
        ("repeated", 224, ("log_probs", "lse", "entropy")),
        ("own-factors", 224, ("log_probs", "lse", "entropy")),
    ],
)
@pytest.mark.slow
def test_kept_exponentials_match_dense(name: str, columns: int, differentiated: tuple[str, ...]) -> None:
    """A part of the columns, and all. Catches: a cell left as an exponential, factors left out of the scale of a row, saved
    numbers that a backward overwrites."""
    case = replace(CASES[name], upstream=differentiated)
    if "entropy" in differentiated:  # none are kept beside it under a softcap
        case = replace(case, options={})
    tile_cols = choose_tiles(torch.float32, torch.device(DEVICE)).lse.cols
    whole_tiles = -(-columns // tile_cols) * tile_cols
    with mock.patch.object(exact, "saved_columns", lambda *_: whole_tiles):
        check(case, twice=True)


def test_kept_cells_beside_no_probability() -> None:
    """Two ids pushed apart: the softmax itself gets no gradient. Catches: a scale of 0 that no cell can be made with, and a
    scale that is chosen for another id than those of the row."""
    hidden, weight, ids = (x.to(DEVICE) for x in draw(N, D, V))
    ids = torch.stack((ids, (ids + 1) % V), 1)
    upstream = torch.randn(N, 1, device=DEVICE) * torch.tensor([1.0, -1.0], device=DEVICE)
    right = reference.linear_log_probs(hidden, weight, ids).log_probs
    expected = torch.autograd.grad(right, (hidden, weight), upstream)
    with mock.patch.object(exact, "saved_columns", lambda *_: 64):
        out = linear_log_probs(hidden, weight, ids, backend="triton")
        found = [torch.autograd.grad(out.log_probs, (hidden, weight), upstream, retain_graph=True) for _ in range(2)]
    torch.testing.assert_close(found[0], expected)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_outputs_do_not_depend_on_other_tokens() -> None:
    """With ``batch_invariant``, bit for bit. Catches: parts of the vocabulary chosen from the number of tokens."""
    num_tokens, vocab_size = (700, 6400) if GPU else (36, 400)  # several blocks of rows, and more tiles than parts
    hidden, weight = torch.randn(num_tokens, D, device=DEVICE), torch.randn(vocab_size, D, device=DEVICE)
    ids = torch.randint(vocab_size, (num_tokens, 2), device=DEVICE)
    own = torch.rand(num_tokens, device=DEVICE) + 0.5

    def run(rows: Tensor, batch_invariant: bool, grad: bool) -> list[Tensor]:
        with torch.set_grad_enabled(grad):
            out = linear_log_probs(
                hidden[rows].requires_grad_(grad), weight, ids[rows], temperature=own[rows], entropy=True, sum_p_squared=True,
                argmax=True, top_k=4, backend="triton", batch_invariant=batch_invariant,
            )  # fmt: skip
        return [x.detach()[-1] for x in listed(out)]

    last = torch.tensor([num_tokens - 1], device=DEVICE)
    counts = (0, num_tokens // 2, num_tokens - 1)
    batches = [torch.cat((torch.randperm(num_tokens - 1, device=DEVICE)[:count], last)) for count in counts]
    alone, *others = [run(rows, True, grad) for rows, grad in zip(batches, (True, False, True), strict=True)]
    for found in others:
        assert all(torch.equal(a, b) for a, b in zip(alone, found, strict=True))
    freely = [run(rows, False, False) for rows in (batches[0], batches[-1])]
    assert not all(torch.equal(a, b) for a, b in zip(*freely, strict=True)), "the test would see no difference"


def test_an_id_outside_is_nan_alone() -> None:
    """As on a GPU, where ids are not read. Catches: a gradient that goes to another id, a row that is lost with its entry."""
    ids = torch.tensor([[3, OUTSIDE, 3], [IGNORED, OUTSIDE, IGNORED], [IGNORED, IGNORED, IGNORED]])
    of_tokens = outputs.any_id(ids)
    assert of_tokens.tolist() == [3, OUTSIDE, IGNORED]
    spec = Spec(ShardLogits(0, V), V, num_ids=3)
    nll, _ = outputs.merge_cells(torch.ones(1, 6, 3), Softmax(*torch.zeros(2, 3)), ids, spec)
    assert nll.tolist()[0][::2] == [-1, -1]
    assert nll.isnan().tolist() == [[False, True, False], [False, True, False], [False, False, False]]
    cells, total = outputs.cell_gradients(torch.ones(3, 3), torch.zeros(3, 3), ids)
    assert total.tolist() == [2, 0, 0]
    assert cells.grad_NI is not None and cells.grad_NI[cells.ids_NI >= 0].tolist() == [-2]


def listed(out: LogProbs) -> list[Tensor]:
    return [x for x in out if x is not None]


@pytest.mark.parametrize(("shape", "num_ids"), [((), None), ((), 2), ((3,), 1), ((2, 3), None), ((2, 3), 2)])
def test_outputs_have_the_shape_of_the_tokens(shape: tuple[int, ...], num_ids: int | None) -> None:
    hidden, weight = torch.randn(*shape, D), torch.randn(V, D)
    ids = torch.randint(V, shape if num_ids is None else (*shape, num_ids))
    own = torch.rand(shape) + 0.5
    out = linear_log_probs(hidden, weight, ids, temperature=own, entropy=True, sum_p_squared=True, argmax=True, top_k=4)
    assert out.log_probs.shape == ids.shape
    assert out.top_log_probs is not None and out.top_ids is not None
    assert out.top_log_probs.shape == out.top_ids.shape == (*shape, 4)
    of_tokens = (out.lse, out.entropy, out.sum_p_squared, out.max_logit, out.argmax)
    assert all(x is not None and x.shape == shape for x in of_tokens)
    expected = reference.linear_log_probs(hidden, weight, ids, temperature=own, top_k=4)
    torch.testing.assert_close([*out], [*expected])


def test_one_id_is_the_loss_of_it() -> None:
    """The same bits as one of several, too: catches a logit in another order of summation."""
    hidden, weight, ids = draw(N, D, V)
    alone = linear_log_probs(hidden, weight, ids)
    assert torch.equal(alone.log_probs, linear_log_probs(hidden, weight, ids[:, None]).log_probs[:, 0])
    several = linear_log_probs(hidden, weight, torch.stack((ids, ids.flip(0)), 1))
    assert torch.equal(alone.log_probs, several.log_probs[:, 0])
    assert torch.equal(alone.lse, several.lse)


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_logits_are_ordered_by_id(backend: Any) -> None:
    """Catches an order that is that of blocks, or of a sort that is not stable.

    The numbers are whole, so that logits are equal in any order of summation: some processors' libraries add the last
    columns of a product otherwise than its first.
    """
    hidden = torch.randint(-9, 10, (3, D), device=DEVICE).float()
    weight = torch.randint(-9, 10, (40, D), device=DEVICE).float().repeat(8, 1)
    ids = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    out = linear_log_probs(hidden, weight, ids, argmax=True, top_k=20, backend=backend)
    expected = (hidden @ weight.t()).sort(dim=1, descending=True, stable=True).indices[:, :20]
    assert out.argmax is not None and out.top_ids is not None
    assert torch.equal(out.argmax, expected[:, 0])
    assert torch.equal(out.top_ids, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_without_an_id_may_hold_anything(backend: Any) -> None:
    hidden, weight, ids = (x.to(DEVICE) for x in draw(N, D, V))
    ids = torch.stack((ids, ids.flip(0)), 1)
    ids[3] = -100
    ids[5, 0] = -100
    temperature = torch.rand(N, device=DEVICE) + 0.5
    broken, cold = hidden.detach().clone().requires_grad_(), temperature.clone()
    with torch.no_grad():
        broken[3] = torch.nan
    cold[3] = 0.0
    results = []
    for h, own in ((hidden, temperature), (broken, cold)):
        out = linear_log_probs(
            h, weight, ids, temperature=own, entropy=True, sum_p_squared=True, argmax=True, top_k=2, backend=backend
        )
        assert out.entropy is not None
        objective = out.log_probs.sum() + out.lse.sum() + out.entropy.sum()
        results.append((*listed(out), *torch.autograd.grad(objective, (h, weight))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    *values, best, _, top_ids, d_hidden, _ = results[1]
    assert all((x[3] == 0).all() for x in (*values, d_hidden))
    assert best[3] == -1 and (top_ids[3] == -1).all()
    assert values[0][5, 0] == 0 != values[0][5, 1]


def misleading(size: int, top_k: int) -> dict[str, Tensor]:
    """Rows of ``size`` logits."""
    columns, drawn = torch.arange(size), torch.randn(size)
    first_of_piece = columns % memory.piece_columns(size, top_k) == 0
    return {
        "usual": drawn,
        "constant": torch.full((size,), 1.5),
        "zeros of both signs": torch.where(columns % 2 == 0, 0.0, -0.0),
        "one of 1e4": torch.where(columns == size - 7, 1e4, drawn),
        "rising": columns / 100,
        "falling": -columns / 100,
        "one large logit in each piece": torch.where(first_of_piece, drawn + 30, drawn),
        "equal maxima of all pieces": torch.where(first_of_piece, 30.0, drawn),
        "few values": (5 * drawn).round() / 5,
        "logits equal to the last": torch.where(columns % 40 == 3, 9.0, torch.where(columns == size - 1, 10.0, drawn)),
        "nearly all at -1e30": torch.where(columns % 100 == 17, drawn, -1e30),
        "nearly all at -inf": torch.where(columns % 100 == 17, drawn, -torch.inf),
        "neighbours": torch.where(columns < 40, drawn + 20, drawn),
        "negative": drawn - 1e4,
    }


def largest(z: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the largest logits by definition: the first of equal logits comes first."""
    values, ids = z.sort(dim=1, descending=True, stable=True)
    return values[:, :top_k], ids[:, :top_k]


def top(hidden: Tensor, weight: Tensor, ids: Tensor | None = None, top_k: int = K, **options) -> tuple[Tensor, Tensor]:
    """Return the largest log-probabilities and their ids, from the kernels."""
    ids = torch.zeros(len(hidden), dtype=torch.int64, device=DEVICE) if ids is None else ids
    with torch.no_grad():
        out = linear_log_probs(hidden, weight, ids, top_k=top_k, backend="triton", **options)
    assert out.top_log_probs is not None and out.top_ids is not None
    return out.top_log_probs, out.top_ids


@pytest.mark.parametrize("top_k", [1, K, 70, 300])
@pytest.mark.parametrize("size", [330, 20_000, 20_032])
def test_rows_that_mislead_pieces(size: int, top_k: int) -> None:
    """Bit for bit. Catches: torch.topk in place of a stable sort, pieces out of order, padding of 0."""
    z = torch.stack(list(misleading(size, top_k).values())).to(DEVICE)
    assert all(map(torch.equal, outputs.largest(z, top_k), largest(z, top_k)))


@pytest.mark.parametrize("top_k", [1, K])
def test_from_hidden_states(top_k: int) -> None:
    """Catches: columns past the vocabulary's end, columns of a piece in place of columns of the shard."""
    rows = misleading(WIDE, top_k)
    z = torch.stack([rows[name] for name in rows if name != "nearly all at -inf"])  # 0 * -inf would be NaN
    # Each row's hidden state selects its own column of the weight.
    found = top(torch.eye(len(z), device=DEVICE), z.t().contiguous().to(DEVICE), top_k=top_k)
    log_p, ids = (x.cpu() for x in found)
    values, expected = largest(z, top_k)
    assert torch.equal(ids, expected)
    torch.testing.assert_close(log_p, (values.double() - z.double().logsumexp(1)[:, None]).float())


@pytest.mark.parametrize("value", [-torch.inf, torch.nan])
def test_a_bias_that_is_not_finite(value: float) -> None:
    """-inf of all columns but a few, and NaN of one, which comes first. Catches: the columns past the last one, which are -inf
    too, and NaN that a maximum hides."""
    hidden, weight = torch.randn(3, 16, device=DEVICE), torch.randn(WIDE, 16, device=DEVICE)
    bias, some = torch.zeros(WIDE, device=DEVICE), [5, WIDE // 2, WIDE - 1]
    if value == -torch.inf:
        bias.fill_(value)[some] = 0.0
    else:
        bias[WIDE // 2] = value
    log_p, ids = top(hidden, weight, torch.full((3,), 5, device=DEVICE), linear_bias=bias)
    z = hidden @ weight.t() + bias
    assert torch.equal(ids, largest(z.nan_to_num(torch.inf, neginf=-torch.inf), K)[1])
    torch.testing.assert_close(log_p, z.log_softmax(1).gather(1, ids), equal_nan=True)


def test_two_shards() -> None:
    """The second has fewer columns than k, and logits that equal the first one's; ranks may hold them in any order.

    Catches: ids within a shard, placeholders before logits of -inf, equal logits in the order of ranks."""
    hidden, weight = torch.randint(-9, 10, (6, 16), device=DEVICE).float(), torch.zeros(WIDE, 16, device=DEVICE)
    labels, cut = torch.tensor([1, 2, -1, 3, 4, WIDE - 1], device=DEVICE), WIDE - 3
    weight[cut - 2 :], hidden[:, 0] = torch.randint(-9, 10, (16,), device=DEVICE).float(), 0.0
    bias, stats = torch.full((WIDE,), -1e3, device=DEVICE), []
    bias[: cut - 1] = -torch.inf  # the last of the K largest
    for start, rows in ((cut, slice(cut, WIDE)), (0, slice(cut))):
        logits = ShardLogits(start, len(weight[rows]))
        x = Operands.of(hidden, weight[rows], labels, logits, bias=bias[rows])
        spec = Spec(logits, WIDE, want=Want(grad=False, top_k=K), workspace_bytes=256 << 20)
        stats.append(exact.statistics(x, None, spec)[0])
    z, ids = outputs.merge_top(torch.stack(stats), spec)
    values, expected = largest(hidden @ weight.t() + bias, K)
    assert torch.equal(ids[labels >= 0], expected[labels >= 0])
    torch.testing.assert_close(z[labels >= 0], values[labels >= 0])


def test_a_token_that_is_not_finite_leaves_others_alone() -> None:
    """Catches: NaN that a comparison hides."""
    hidden, weight = torch.randn(5, 16, device=DEVICE), torch.randn(WIDE, 16, device=DEVICE)
    ids = torch.tensor([3, -100, 4, WIDE + 9, 5], device=DEVICE)
    z = hidden @ weight.t()
    hidden[0], hidden[1] = torch.nan, torch.nan
    if not GPU:
        ids[3] = -100  # an error there
    log_p, top_ids = top(hidden, weight, ids)
    assert torch.equal(top_ids[[2, 4]], largest(z, K)[1][[2, 4]])
    assert torch.equal(top_ids[0], torch.arange(K, device=DEVICE)) and log_p[0].isnan().all()
    assert (top_ids[[1, 3]] == -1).all()


def test_beside_kept_exponentials() -> None:
    """Catches: other gradients, largest logits of the kept columns alone, logits of another group of tokens."""
    hidden, weight = torch.randn(6, 16), torch.randn(WIDE, 16)
    ids = torch.randint(WIDE, (6,), device=DEVICE)
    ids[1] = -100
    found = []
    tile_cols = choose_tiles(torch.float32, torch.device(DEVICE)).lse.cols
    for top_k, rows in ((0, 2048), (K, 2048), (K, 4)):
        h, w = (x.to(DEVICE).requires_grad_() for x in (hidden, weight))
        columns = mock.patch.object(exact, "saved_columns", lambda *_: 4 * tile_cols)
        groups = mock.patch.object(memory, "forward_rows", lambda *_, rows=rows: rows)
        with columns, groups:
            out = linear_log_probs(h, w, ids, top_k=top_k, backend="triton")
            found.append((out, *torch.autograd.grad(out.log_probs.sum(), (h, w))))
    without, *grads = found[0]
    for out, *others in found[1:]:
        assert torch.equal(out.log_probs, without.log_probs)
        assert all(torch.equal(a, b) for a, b in zip(grads, others, strict=True))
        assert torch.equal(out.top_ids.cpu(), largest(hidden @ weight.t(), K)[1].index_fill(0, torch.tensor([1]), -1))


@pytest.mark.parametrize("top_k", [1, 64, 1024])
@pytest.mark.parametrize("size", [(300, 5_000), (8192, 32_768), (8192, 128_256), (20_000, 262_144)])
@pytest.mark.parametrize("mib", [32, 256, 4096])
def test_the_budget_holds(size: tuple[int, int], top_k: int, mib: int) -> None:
    """Without and with memory for exponentials. Catches: logits beside kept exponentials, sorts that nobody counts."""
    num_tokens, num_columns = size
    sizes = memory.Sizes(num_tokens, 2048, num_columns, 2, alone=True)
    spec = Spec(ShardLogits(0, num_columns), num_columns, workspace_bytes=mib << 20)
    statistics = (3 + 2 * top_k) * num_tokens * 4
    for grad in (False, True):
        wants = (spec._replace(want=Want(grad=grad, top_k=k)) for k in (0, top_k))
        without, peak = (dry_run.peak("exact", sizes, each, Planned(9, 132)) for each in wants)
        assert peak.saved == without.saved
        assert peak.forward - statistics <= max(without.forward, mib << 20)


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        dict(input=torch.zeros(N, D).double(), linear_weight=torch.zeros(V, D).double()),
        TypeError,
        "input must be one of float32, bfloat16, float16, got",
    ),
    (dict(ids=torch.zeros(N, 2, 2).long()), ValueError, "ids must be"),
    (dict(ids=torch.zeros(N, 0).long()), ValueError, "ids must be"),
    (dict(ids=torch.zeros(N)), TypeError, "ids must be int64"),
    (dict(ids=torch.full((N, 2), V)), IndexError, r"ids\[0\] .* is 37"),
    (dict(batch_invariant=True, backend="torch"), ValueError, "batch_invariant needs"),
    (dict(temperature=0.0), ValueError, "temperature must be positive"),
    (dict(temperature="1"), TypeError, "temperature must be a number"),
    (dict(temperature=torch.zeros(N)), ValueError, r"temperature\[0\] .* positive"),
    (dict(temperature=torch.ones(N + 1)), ValueError, "temperature must be"),
    (dict(temperature=torch.ones(N).long()), TypeError, "temperature must be"),
    (dict(temperature=torch.ones(N, requires_grad=True)), TypeError, "temperature gets no gradient"),
    (dict(logit_scale=torch.full((N,), torch.inf)), ValueError, r"logit_scale\[0\] .* finite"),
    (dict(top_k=-1), ValueError, "top_k must be"),
    (dict(top_k=1025), ValueError, "top_k must be at most 1024"),
    (dict(top_k=V + 1), ValueError, "the vocabulary has 37"),
    (dict(entropy=1), TypeError, "entropy must be a bool"),
    (dict(sequence_parallel=True, input_grad="partial"), ValueError, "input_grad"),
    (dict(grad_filter=None), TypeError, "grad_filter"),
]


def test_bad_input_is_one_line() -> None:
    hidden, weight, ids = draw(N, D, V)
    assert_changes_refused(linear_log_probs, {"input": hidden, "linear_weight": weight, "ids": ids}, BAD)


def _on_ranks() -> None:
    for name in ("uneven-shards", "sequence-parallel") if interpreted() else ():  # the ranks are on CPUs
        assert_holds(LOG_PROBS, CASES[name], dist.group.WORLD, "cpu")
    shard = VocabShard.even(40, dist.group.WORLD)
    hidden, weight, ids = torch.randn(5, 8), torch.randn(shard.num_rows, 8), torch.arange(15).view(5, 3)
    everything: dict[str, Any] = {"argmax": True, "entropy": True, "top_k": 7}
    for options, counts in (({}, [4 * 6 * 5]), (everything, [4 * (8 + 14) * 5])):
        with mock.patch.object(merge, "_all_gather_into", wraps=merge._all_gather_into) as gather:
            linear_log_probs(hidden, weight, ids, shard=shard, **options)
        assert [call.args[1].nbytes for call in gather.call_args_list] == counts


@pytest.mark.slow
def test_two_ranks(ranks2: Callable[..., None]) -> None:
    """Catches: the largest logits of one shard alone, ids of a shard's start, another number of collectives."""
    ranks2(_on_ranks)
