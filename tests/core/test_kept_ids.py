"""Log-softmax over lists of kept ids: the cases in which lists are delicate. Others are in test_log_probs.py."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from shards import DEVICE, GPU
from support.dense import assert_holds
from support.refused import assert_changes_refused, refused
from torch import Tensor

from cce_dist import KeptIds, VocabShard, kept_ids, linear_log_probs, merge
from cce_dist.kernels import dense
from cce_dist.kernels.dry_run import Live
from cce_dist.tools.verify.cases import KEPT_CASES, Gaussian
from cce_dist.tools.verify.log_probs import LOG_PROBS

N, D, V = 5, 8, 30
any_call: Any = linear_log_probs


def lists(*rows: list[int]) -> KeptIds:
    lengths = torch.tensor([0, *map(len, rows)])
    return KeptIds(lengths.cumsum(0), torch.tensor([id for row in rows for id in row], dtype=torch.int64))


KEPT = lists([3, 1, 20], [], [7], [29, 0, 4, 5, 6, 8, 9, 10, 11, 12], [2])


def draw() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(rows, D, generator=generator, device="cpu") for rows in (N, V))
    hidden, weight = (x.to(torch.get_default_device()).requires_grad_() for x in drawn)
    return hidden, weight, torch.tensor([1, 1, 7, 3, 28])


@pytest.fixture
def kept() -> Iterator[KeptIds]:
    """``KEPT`` where kernels run. Tensors that the test makes are there, too."""
    with torch.device(DEVICE):
        yield KEPT.to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_edges(backend: str, dtype: torch.dtype, kept: KeptIds) -> None:
    """An empty list is 0 without a gradient; a list of the id alone is exactly 0; all lists empty; no token at all."""
    hidden, weight, ids = draw()
    hidden, weight = (x.detach().to(dtype).requires_grad_() for x in (hidden, weight))
    out = any_call(hidden, weight, ids, kept=kept, entropy=True, kept_mass=True, backend=backend)
    assert out.kept_mass[1] == out.full_log_probs[1] == 0 < out.kept_mass[2] and not out.kept_mass.requires_grad
    assert out.log_probs[1] == out.lse[1] == out.entropy[1] == 0 and out.log_probs[2] == 0
    assert out.sum_p_squared is None and out.log_probs[4] != 0
    d_hidden, d_weight = torch.autograd.grad(out.log_probs.sum() + out.entropy.sum(), (hidden, weight))
    assert not d_hidden[1:3].any() and d_hidden[[0, 3, 4]].any(1).all()
    # Token 4's own id is outside of its list, and its row has a gradient; rows in no list have none.
    read = torch.cat((kept.ids, ids[4:])).unique()
    untouched = torch.ones(V, dtype=torch.bool).index_fill(0, read, False)
    assert not d_weight[untouched].any() and d_weight[28].any() and d_weight[3].any()
    nothing = any_call(hidden, weight, ids, kept=lists(*[[]] * N), backend=backend)
    assert not nothing.log_probs.any() and not torch.autograd.grad(nothing.log_probs.sum(), weight)[0].any()
    none = any_call(hidden[:0], weight, ids[:0], kept=lists(), backend=backend)
    d_hidden, d_weight = torch.autograd.grad(none.log_probs.sum() + none.lse.sum(), (hidden, weight))
    assert none.log_probs.shape == (0,) and not d_hidden.any() and not d_weight.any()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_what_is_not_read_may_be_nan(backend: str, kept: KeptIds) -> None:
    """Rows of no list, hidden states and lists of ignored tokens. Catches a sweep over the vocabulary, and 0 times NaN."""
    hidden, weight, ids = draw()
    ids[3] = -100
    with torch.no_grad():
        expected = any_call(hidden, weight, ids, kept=kept, backend=backend).log_probs
        weight[[13, 29]], hidden[[1, 3]] = torch.nan, torch.inf
    bias, temperature = torch.zeros(V), torch.ones(N)
    bias[15], temperature[3] = torch.inf, torch.nan
    kept = kept._replace(ids=kept.ids.index_fill(0, torch.tensor([4, 5]), V))  # of token 3
    out = any_call(hidden, weight, ids, kept=kept, backend=backend, linear_bias=bias, temperature=temperature)
    assert torch.equal(out.log_probs, expected)
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.log_probs.sum(), (hidden, weight)))


@pytest.mark.parametrize("of_lists", [True, False])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_the_weights_gradient_is_added_to_a_buffer(backend: str, of_lists: bool, kept: KeptIds | None) -> None:
    """Of lists, and of a token that takes the whole vocabulary; without lists."""
    hidden, weight, ids = draw()
    kept = kept._replace(whole=torch.tensor([1])) if kept and of_lists else None
    buffer, unused = torch.full((V, D), 2.0), torch.zeros(V, requires_grad=True)
    expected = torch.autograd.grad(any_call(hidden, weight, ids, kept=kept, backend=backend).log_probs.sum(), weight)[0]
    out = any_call(hidden, weight, ids, kept=kept, backend=backend, grad_weight_out=buffer, linear_bias=unused)
    out.log_probs.sum().backward()
    torch.testing.assert_close(buffer, 2 + expected)
    assert weight.grad is None and unused.grad is not None and unused.grad.any()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_the_biass_gradient_alone(backend: str, kept: KeptIds, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches memory for the gradient of a weight that needs none."""
    monkeypatch.setattr("cce_dist.autograd.is_unobserved", lambda *_: True)  # Live observes
    hidden, weight, bias = torch.randn(N, 1024), torch.randn(V, 1024), torch.zeros(V, requires_grad=True)
    ids = draw()[2]
    out = any_call(hidden, weight, ids, kept=kept, backend=backend, linear_bias=bias)
    with Live() as live:
        (d_bias,) = torch.autograd.grad(out.log_probs.sum(), bias)
    assert live.peak < weight.nbytes // 2
    torch.testing.assert_close(d_bias.sum(), torch.zeros(()), atol=1e-5, rtol=0)
    assert d_bias[28] == 1


def test_a_tokens_bits_do_not_depend_on_the_batch(kept: KeptIds) -> None:
    hidden, weight, ids = draw()
    whole = any_call(hidden, weight, ids, kept=kept, backend="triton", entropy=True, batch_invariant=True)
    alone = any_call(hidden[3:4], weight, ids[3:4], kept=lists(kept.ids[4:14].tolist()), backend="triton", entropy=True)
    for name in ("log_probs", "lse", "entropy"):
        assert torch.equal(getattr(whole, name)[3:4], getattr(alone, name))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_values_that_a_gpu_does_not_read(backend: str, monkeypatch: pytest.MonkeyPatch, kept: KeptIds) -> None:
    """An id that stands twice counts once, one outside the vocabulary is NaN, and no offsets lead outside of memory."""
    hidden, weight, ids = draw()
    monkeypatch.setattr("cce_dist.kept_ids.check_values", lambda *_: None)
    expected = any_call(hidden, weight, ids, kept=kept, backend=backend).log_probs
    twice = lists([3, 1, 20, 3, 20], [], [7, 7], kept.ids[4:14].tolist(), [2])
    out = any_call(hidden, weight, ids, kept=twice, backend=backend)
    assert torch.equal(out.log_probs, expected)
    again = torch.autograd.grad(any_call(hidden, weight, ids, kept=kept, backend=backend).log_probs.sum(), weight)[0]
    torch.testing.assert_close(torch.autograd.grad(out.log_probs.sum(), weight)[0], again)
    for offsets in ([3, 9, -5, 90, 2, 14], [0, 0, 0, 0, 0, 0], [15] * 6):
        with torch.no_grad():
            wrong = KeptIds(torch.tensor(offsets), kept.ids, torch.tensor([-7, 90, 2]))
            any_call(hidden, weight, ids, kept=wrong, backend=backend)


def test_ids_outside_are_nan_on_a_gpu() -> None:
    """The way that a GPU takes, of the tokens' ids alone: reading them waits for the device."""
    from cce_dist.kernels.kept_ids import token_of_entries

    kept = lists([3, V], [], [7], [-1, 2], [2])
    labels = mock.Mock(wraps=None, is_cuda=True)
    with mock.patch.object(dense, "label_ids", lambda *_: torch.tensor([1, 1, -1, 3, 28])):
        call: Any = mock.Mock(debug=False)
        call.spec.vocab_size = V
        found = kept_ids._ids_of_tokens(labels, kept, token_of_entries(kept.offsets, len(kept.ids)), call)
    assert found.tolist() == [-2, -1, -1, -2, 28]


def test_from_bits() -> None:
    """Bits in bytes, the lowest first, as words of xgrammar and vLLM have them."""
    mask = torch.rand(2, 3, 40, generator=torch.Generator().manual_seed(0)) < 0.2
    mask[0, 1], mask[1, 2] = False, True
    bits = (mask.view(2, 3, 5, 8).int() << torch.arange(8)).sum(-1).to(torch.uint8)
    kept = KeptIds.from_bits(bits)
    assert kept.offsets.tolist() == [0, *mask.view(6, -1).sum(1).cumsum(0).tolist()]
    assert kept.ids.tolist() == mask.view(6, -1).nonzero()[:, 1].tolist()
    with pytest.raises(TypeError, match=r"bits must be \[\.\.\., ceil\(V / 8\)\] uint8"):
        KeptIds.from_bits(bits.int())
    shorter = KeptIds.from_bits(bits, 35)  # the last five bits are padding
    assert shorter.ids.tolist() == mask.view(6, -1)[:, :35].nonzero()[:, 1].tolist()
    assert shorter.offsets.diff().tolist() == mask.view(6, -1)[:, :35].sum(1).tolist()
    with pytest.raises(ValueError, match="40 bits a token, fewer than vocab_size 41"):
        KeptIds.from_bits(bits, 41)


SAMPLED = torch.tensor([[-100, -100, 4, 9, 4], [-100, 8, 2, -100, -100]])  # shifted labels of two requests, padded
ROWS: list[Any] = [[4, 2], None, [1, 4, 5], [8], [7, 2]]
ENGINES: dict[str, list[Any]] = {
    "lists": ROWS,
    "arrays and tensors": [np.array(ROWS[0], np.int32), None, torch.tensor(ROWS[2]), np.array(ROWS[3]), ROWS[4]],
    "vLLM": [
        SimpleNamespace(token_ids=ROWS[0], offsets=[0, 2]), None,
        SimpleNamespace(token_ids=np.array([1, 4, 5, 8], np.int32), offsets=np.array([0, 3, 4])),
        SimpleNamespace(token_ids=[ROWS[4]]),
    ],
    "SGLang": [{"output_token_sampling_mask": ROWS[:3]}, {"output_token_sampling_mask": ROWS[3:], "id": "1"}],
}  # fmt: skip


@pytest.mark.parametrize("engine", ENGINES)
def test_from_lists(engine: str) -> None:
    """Padded, packed, and sharded as labels are. Catches a list that belongs to the token before the one that it predicts."""
    kept = KeptIds.from_lists(ENGINES[engine], SAMPLED)
    assert kept.whole is not None and kept.whole.tolist() == [3]
    assert kept.offsets.tolist() == [0, 0, 0, 2, 2, 5, 5, 6, 8, 8, 8] and kept.ids.tolist() == [4, 2, 1, 4, 5, 8, 7, 2]
    mine = torch.tensor([6, 3, 4, 0])  # as context parallelism does: two pieces of the sequence
    part = kept.take(mine)
    assert part.offsets.tolist() == [0, 1, 1, 4, 4] and part.ids.tolist() == [8, 1, 4, 5]
    assert part.whole is not None and part.whole.tolist() == [1]
    packed = KeptIds.from_lists(ENGINES[engine], SAMPLED[SAMPLED >= 0])
    assert all(map(torch.equal, packed, kept.take(SAMPLED.flatten() >= 0)))  # type: ignore[arg-type]
    assert all(map(torch.equal, packed, KeptIds.from_lists(ENGINES[engine])))  # type: ignore[arg-type]
    rows = torch.nn.utils.rnn.pad_sequence([torch.tensor(row or [-1]) for row in ROWS], True, -1)
    assert all(map(torch.equal, packed, KeptIds.from_padded(rows)))  # type: ignore[arg-type]


def test_from_lists_does_not_copy_and_checks_the_labels() -> None:
    """Catches a check of the wrong list, an id added to the next one, and a batch that is not shifted."""
    ids = np.array([4, 2, 1, 4], np.int32)
    mask = SimpleNamespace(token_ids=ids, offsets=[0, 2, 4])
    assert KeptIds.from_lists([mask], torch.tensor([2, 1])).ids.data_ptr() == ids.ctypes.data
    ids.flags.writeable = False  # as received over a wire
    assert KeptIds.from_lists([mask]).ids.tolist() == [4, 2, 1, 4]
    with pytest.raises(ValueError, match=r"labels\[2\] \(flattened\) is 5, which is not among the 2 ids of its list"):
        KeptIds.from_lists([mask], torch.tensor([2, -100, 5]))
    with pytest.warns(UserWarning, match="2 of 4 labels were not in their lists, and were added"):
        kept = KeptIds.from_lists([mask, [], None], torch.tensor([2, 5, 3, 7]), missing="add")
    assert kept.offsets.tolist() == [0, 2, 5, 6, 6] and kept.ids.tolist() == [4, 2, 1, 4, 5, 3]
    for offsets in ([0, 1], [1, 3], np.array([0, 2, 1], np.uint32), []):
        with refused("offsets in lists must rise from 0"):
            KeptIds.from_lists([SimpleNamespace(token_ids=[1, 2], offsets=offsets)], torch.tensor([1]))
    rows: list[tuple[dict[str, Any], type[Exception], str]] = [
        (dict(lists=[mask]), ValueError, "lists is for 2 tokens, labels has 1 other than ignore_index"),
        (dict(lists=[[1], [2**32 + 1]], labels=None), ValueError, "ids that fit in int32, got 4294967297"),
        (dict(lists=[{"meta_info": {}}]), ValueError, "lists has a request without a mask"),
        (dict(lists=[[[1, 2], None]]), TypeError, "a list of integer ids for each token"),
        (dict(labels=[1]), TypeError, "labels must be a tensor, got list"),
        (dict(labels=torch.tensor([1.5])), TypeError, "labels must be int64 or int32 ids, got torch.float32"),
        (dict(lists=None), TypeError, "lists must be a sequence, got NoneType"),
        (dict(lists=[[1.5]]), TypeError, "a list of integer ids for each token, got float64"),
        (dict(missing="drop"), ValueError, "missing must be"),
    ]
    assert_changes_refused(KeptIds.from_lists, {"lists": [[1]], "labels": torch.tensor([1])}, rows)
    assert not len(KeptIds.from_lists([]).ids) and KeptIds.from_lists([None]).whole is not None
    with pytest.raises(TypeError, match=r"ids must be \[\.\.\., K\] int64 or int32"):
        KeptIds.from_padded(torch.zeros(3))


def test_one_sweep_for_tokens_of_the_whole_vocabulary() -> None:
    """Catches a sweep of tokens that have lists, an empty list that is swept, and an ignored token with a mass."""
    hidden, weight, ids = draw()
    ids[4] = -100
    kept = KEPT.take(torch.tensor([0, 1, 1, 3, 1]))._replace(whole=torch.tensor([2, 4]))
    with mock.patch.object(dense, "statistics", wraps=dense.statistics) as sweep:
        out = any_call(hidden, weight, ids, kept=kept, backend="torch")
    assert [call.args[0].num_tokens for call in sweep.call_args_list] == [2]
    alone = any_call(hidden[2:3], weight, ids[2:3], backend="torch")
    torch.testing.assert_close(out.log_probs[2:3], alone.log_probs)
    assert not out.log_probs[[1, 4]].any()
    mass = any_call(hidden, weight, ids, kept=kept, kept_mass=True).kept_mass
    torch.testing.assert_close(mass[[1, 2, 4]], torch.tensor([0.0, 1.0, 0.0]))


NO_TOKENS: dict[str, Any] = dict(input=torch.zeros(0, D), ids=torch.zeros(0).long())
BAD = [
    (dict(kept=(KEPT.offsets, KEPT.ids)), TypeError, "kept must be a KeptIds"),
    (dict(kept=KEPT._replace(offsets=None)), TypeError, r"kept\.offsets must be a tensor, got NoneType"),
    (dict(kept=KEPT._replace(ids=KEPT.ids.float())), TypeError, r"kept\.ids must be a plain tensor of one dimension"),
    (dict(kept=KEPT._replace(offsets=KEPT.offsets[1:])), ValueError, r"kept\.offsets must be \[6\]"),
    (dict(kept=KEPT._replace(offsets=KEPT.offsets.flip(0))), ValueError, r"kept\.offsets must rise from 0 to 15"),
    (dict(kept=KEPT._replace(ids=KEPT.ids[1:])), ValueError, r"kept\.offsets must rise from 0 to 14"),
    (dict(kept=lists([3, V], [], [7], [1], [2])), IndexError, r"kept\.ids\[1\], of token 0, is 30: not in \[0, 30\)"),
    (dict(kept=lists([3], [], [7], [1, 4, 1], [2])), ValueError, "id 1 twice in the list of token 3"),
    *(
        (dict(kept=KEPT._replace(whole=torch.tensor(whole))), ValueError, r"kept\.whole must rise, and hold numbers of")
        for whole in ([0], [1, 1], [-1], [N])
    ),
    (dict(kept=KEPT._replace(whole=torch.zeros(6).long())), ValueError, r"kept\.whole has 6 tokens, the call has 5"),
    (dict(kept=KEPT._replace(whole=torch.zeros(1))), TypeError, r"kept\.whole must be a plain tensor of one dimension"),
    (NO_TOKENS | dict(kept=lists()._replace(ids=KEPT.ids)), ValueError, "no token"),
    (dict(ids=torch.full((N,), V)), IndexError, r"ids\[0\] \(flattened\) is 30"),
    (dict(ids=torch.zeros(N, 2).long()), ValueError, "ids must be one for each token with kept"),
    (dict(top_k=2), ValueError, "top_k is of the whole vocabulary"),
    (dict(kept=None, kept_mass=True), ValueError, "kept_mass is of lists of ids: pass kept"),
    (dict(argmax=True), ValueError, "argmax is of the whole vocabulary"),
]


def test_bad_input_is_one_line() -> None:
    hidden, weight, ids = draw()
    assert_changes_refused(any_call, {"input": hidden, "linear_weight": weight, "ids": ids, "kept": KEPT}, BAD)


def _on_ranks() -> None:
    group: Any = dist.group.WORLD
    (case,) = (case for case in KEPT_CASES if case.name == "kept-empty-shards")
    case = replace(case, problem=Gaussian(7, 20, 20))
    assert_holds(LOG_PROBS, case, group, "cpu", "torch" if GPU else "triton")  # interpreted where no GPU is
    hidden, weight, ids = draw()
    shard = VocabShard.even(V, group)
    local = weight.detach()[shard.start : shard.stop]
    whole = KEPT._replace(whole=torch.tensor([1]))  # one exchange, whether all tokens have lists or not
    for options, numbers in (({"kept": KEPT}, 3), ({"kept": whole, "entropy": True}, 4)):
        with mock.patch.object(merge, "_all_gather_into", wraps=merge._all_gather_into) as gather:
            any_call(hidden, local, ids, shard=shard, **options)
        assert [call.args[1].nbytes for call in gather.call_args_list] == [4 * numbers * N]


def test_two_ranks(ranks2: Callable[..., None]) -> None:
    """test_verify.py has more ranks."""
    ranks2(_on_ranks)
