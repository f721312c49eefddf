"""The largest logits: rows that mislead a search by pieces, equal logits, shards, and the memory budget."""

from unittest import mock

import pytest
import torch
from shards import DEVICE, GPU
from torch import Tensor

from cce_dist import linear_log_probs
from cce_dist.kernels import Operands, ShardLogits, Spec, Want, dry_run, exact, memory, outputs
from cce_dist.kernels.tiles import Planned, choose_tiles

V = 20_000 if GPU else 330
K = 5


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
    rows = misleading(V, top_k)
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
    """The second has fewer columns than k, and logits that equal the first one's; ranks may hold them in any order.

    Catches: ids within a shard, placeholders before logits of -inf, equal logits in the order of ranks."""
    hidden, weight = torch.randint(-9, 10, (6, 16), device=DEVICE).float(), torch.zeros(V, 16, device=DEVICE)
    labels, cut = torch.tensor([1, 2, -1, 3, 4, V - 1], device=DEVICE), V - 3
    weight[cut - 2 :], hidden[:, 0] = torch.randint(-9, 10, (16,), device=DEVICE).float(), 0.0
    bias, stats = torch.full((V,), -1e3, device=DEVICE), []
    bias[: cut - 1] = -torch.inf  # the last of the K largest
    for start, rows in ((cut, slice(cut, V)), (0, slice(cut))):
        logits = ShardLogits(start, len(weight[rows]))
        x = Operands.of(hidden, weight[rows], labels, logits, bias=bias[rows])
        spec = Spec(logits, V, want=Want(grad=False, top_k=K), workspace_bytes=256 << 20)
        stats.append(exact.statistics(x, spec)[0])
    z, ids = outputs.merge_top(torch.stack(stats), spec)
    values, expected = largest(hidden @ weight.t() + bias, K)
    assert torch.equal(ids[labels >= 0], expected[labels >= 0])
    torch.testing.assert_close(z[labels >= 0], values[labels >= 0])


def test_a_token_that_is_not_finite_leaves_others_alone() -> None:
    """Catches: NaN that a comparison hides."""
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


def test_beside_kept_exponentials() -> None:
    """Catches: other gradients, largest logits of the kept columns alone, logits of another group of tokens."""
    hidden, weight = torch.randn(6, 16), torch.randn(V, 16)
    ids = torch.randint(V, (6,), device=DEVICE)
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
        assert torch.equal(out.top_ids.cpu(), largest(hidden @ weight.t(), K)[1])


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
