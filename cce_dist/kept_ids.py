"""KeptIds: the list of ids that a sampler kept for each token. And the operators of ``linear_log_probs(..., kept=...)``.

Tokens without a list (``KeptIds.whole``) are swept over the whole vocabulary by the backend of other log-probabilities. Their
statistics take the places of the empty lists' before the exchange, so that all further steps are the same for both.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cce_dist import checks
from cce_dist.autograd import Operator, build, without_autocast
from cce_dist.call import Call
from cce_dist.debug_ranks import check_labels
from cce_dist.kernels import IGNORED, OUTSIDE, Gradients, Grads, Operands, Softmax, Spec, Upstream, dense
from cce_dist.kernels import kept_ids as dense_lists
from cce_dist.kernels.backends import Backend, named
from cce_dist.kernels.kept_ids import KeptLists, entry_gradients, lists_of, rising, token_of_entries
from cce_dist.merge import Distributed
from cce_dist.op import operands_of, summed
from cce_dist.operands import plain


class KeptIds(NamedTuple):
    """The ids that a sampler kept for each token (top-k, top-p, a grammar), as the rows of a CSR matrix.

    With ``linear_log_probs(..., kept=...)`` the softmax of a token is over its list. A list may be empty, has each id once, and
    may have any order.

    Attributes:
        offsets: [N + 1] int64 or int32. Token i of the N flattened tokens has the ids ``ids[offsets[i] : offsets[i + 1]]``.
            The first offset is 0, the last one the number of ids.
        ids: [number of ids] int64 or int32 ids in the whole vocabulary. Identical on every rank of the group.
        whole: [W] int64 or int32, in ascending order: the tokens whose softmax is over the whole vocabulary, because their
            sampler cut nothing. Their lists are empty. None: no token.
    """

    offsets: Tensor
    ids: Tensor
    whole: Tensor | None = None

    @classmethod
    def from_lists(
        cls, lists: Sequence[Any], labels: Tensor | None = None, *, ignore_index: int = -100, missing: str = "error"
    ) -> KeptIds:
        """Convert what an inference engine returns. Works on the host, with numpy.

        One array of int32 ids, such as the ``SamplingMask`` of a single request, is not copied.

        Args:
            lists: One entry for each sampled token, in order: its ids as a list, an array or a tensor on the CPU. None: the
                sampler cut nothing, so the token takes the whole vocabulary. In place of its tokens a request may have one
                entry: vLLM's ``SamplingMask``, or SGLang's ``meta_info`` with ``output_token_sampling_mask``.
            labels: [...] ids of the call, padded or packed, and shifted so that each stands where it is predicted. The entries
                belong to the labels that are not ignore_index, in order; other tokens get an empty list. None: every token
                of the call has an entry.
            ignore_index: Label of prompts and padding.
            missing: What happens if a label is not in its own list: "error", or "add" to add it and warn with the count.

        Raises:
            TypeError: A list holds something else than integers.
            ValueError: The numbers of entries and labels differ, offsets do not fit, an id does not fit in int32, a request has
                no mask, or a label is not in its list.
        """
        import numpy as np

        checks.choice("missing", missing, ("error", "add"))
        if not hasattr(lists, "__iter__"):
            raise TypeError(f"lists must be a sequence, got {type(lists).__name__}")
        counts, ids = _flattened(lists)
        places, num_tokens = np.arange(len(counts)), len(counts)
        if labels is not None:
            checks.tensors({"labels": labels})
            if labels.dtype not in (torch.int64, torch.int32):
                raise TypeError(f"labels must be int64 or int32 ids, got {labels.dtype}")
            flat = labels.detach().cpu().numpy().ravel()
            places, num_tokens = np.flatnonzero(flat != ignore_index), len(flat)
            if len(places) != len(counts):
                raise ValueError(f"lists is for {len(counts)} tokens, labels has {len(places)} other than ignore_index")
            counts, ids = _with_labels(counts, ids, flat[places], places, missing)
        lengths = np.zeros(num_tokens + 1, dtype=np.int64)
        lengths[places + 1] = counts.clip(0)
        whole = places[counts < 0]
        ids = ids if ids.flags.writeable else ids.copy()  # torch warns of tensors that may not be written
        offsets = torch.from_numpy(lengths.cumsum())
        found = cls(offsets, torch.from_numpy(ids), torch.from_numpy(whole) if len(whole) else None)
        return found if labels is None else found.to(labels.device)

    @classmethod
    def from_padded(cls, ids: Tensor) -> KeptIds:
        """Convert rows of ids, [..., K] integers: negative ones are padding. Waits for their device.

        A row of padding alone is a token that takes the whole vocabulary.
        """
        checks.tensors({"ids": ids})
        if ids.dim() < 1 or ids.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"ids must be [..., K] int64 or int32, got {ids.dtype} {tuple(ids.shape)}")
        rows = ids.reshape(ids.shape[:-1].numel(), ids.shape[-1])
        is_id = rows >= 0
        counts = is_id.sum(1)
        whole = (counts == 0).nonzero()[:, 0]
        return cls(_offsets(counts), rows[is_id], whole if len(whole) else None)

    @classmethod
    def from_bits(cls, bits: Tensor, vocab_size: int | None = None) -> KeptIds:
        """Convert a bit mask of the vocabulary, as inference engines and grammars produce it. Waits for the mask's device.

        Args:
            bits: [..., ceil(V / 8)] uint8. Bit b of byte c, counted from the least significant bit, stands for id
                ``8 * c + b``. On a little-endian machine a mask of 32-bit words is ``words.view(torch.uint8)``.
            vocab_size: V. Bits of ids at or past V are padding and are ignored. None: every set bit is an id.

        Raises:
            TypeError: bits is not a uint8 tensor.
            ValueError: bits has fewer than vocab_size bits per token.
        """
        checks.tensors({"bits": bits})
        if bits.dtype != torch.uint8 or bits.dim() < 1:
            raise TypeError(f"bits must be [..., ceil(V / 8)] uint8, got {bits.dtype} {tuple(bits.shape)}")
        if vocab_size is not None and 8 * bits.shape[-1] < checks.integer("vocab_size", vocab_size, 1):
            raise ValueError(f"bits has {8 * bits.shape[-1]} bits a token, fewer than vocab_size {vocab_size}")
        rows = bits.reshape(-1, bits.shape[-1])
        row, byte = rows.nonzero(as_tuple=True)
        is_set = (rows[row, byte][:, None] >> torch.arange(8, device=bits.device)) & 1
        if vocab_size is not None:
            is_set &= 8 * byte[:, None] + torch.arange(8, device=bits.device) < vocab_size
        entry, bit = is_set.nonzero(as_tuple=True)
        counts = torch.bincount(row[entry], minlength=rows.shape[0])
        return cls(_offsets(counts), 8 * byte[entry] + bit)

    def to(self, device: torch.device | str) -> KeptIds:
        """Return the lists on a device."""
        return KeptIds(*(None if x is None else x.to(device) for x in self))  # type: ignore[arg-type]

    def take(self, tokens: Tensor | slice) -> KeptIds:
        """Return the lists of tokens by their numbers, of any shape, by a mask [N] or a slice. Waits for the device.

        To shard lists as context parallelism shards labels, shard ``torch.arange(N)`` as the labels, and pass the result.
        """
        num_tokens, device = self.offsets.shape[0] - 1, self.offsets.device
        tokens = torch.arange(num_tokens, device=device)[tokens].flatten()
        begin, counts = self.offsets[tokens], self.offsets.diff()[tokens]
        offsets = _offsets(counts)
        shift = (begin - offsets[:-1]).repeat_interleave(counts)
        whole = None
        if self.whole is not None:
            is_whole = torch.zeros(num_tokens, dtype=torch.bool, device=device).index_fill_(0, self.whole.long(), True)
            whole = is_whole[tokens].nonzero()[:, 0]
        return KeptIds(offsets, self.ids[torch.arange(len(shift), device=device) + shift], whole)


def _offsets(counts: Tensor) -> Tensor:
    return torch.cat((counts.new_zeros(1), counts.cumsum(0)))


def _flattened(lists: Sequence[Any]) -> tuple[Any, Any]:
    """Return the length of each token's list, -1 for None, and the ids of all lists, as arrays of numpy."""
    import numpy as np

    counts: list[int] = []
    chunks = [np.empty(0, np.int32)]

    def add(ids: Any) -> int:
        try:
            array = np.asarray(ids)
        except (TypeError, ValueError) as error:
            raise TypeError(f"lists must have a list of integer ids for each token: {error}") from None
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise TypeError(f"lists must have a list of integer ids for each token, got {array.dtype} {array.shape}")
        if array.size:
            chunks.append(array)
        return len(array)

    for entry in lists:
        rows = [entry]
        if isinstance(entry, Mapping):
            rows = entry.get("output_token_sampling_mask")
        elif hasattr(entry, "token_ids"):
            rows = entry.token_ids  # a list for each token, unless there are offsets
            if getattr(entry, "offsets", None) is not None:
                steps = np.diff(np.asarray(entry.offsets).astype(np.int64), prepend=0)
                if steps[:1].any() or (steps < 0).any() or steps.sum() != add(rows):
                    raise ValueError(f"offsets in lists must rise from 0 to {len(rows)}, the number of token_ids")
                counts += steps[1:].tolist()
                continue
        if rows is None:
            raise ValueError(
                "lists has a request without a mask: ask the engine for return_sampling_mask, and pass SGLang's meta_info"
            )
        counts += [-1 if row is None else add(row) for row in rows]
    wide = chunks[1] if len(chunks) == 2 else np.concatenate(chunks)
    ids = wide.astype(np.int32, copy=False)
    if ids is not wide and (ids != wide).any():
        raise ValueError(f"lists must have ids that fit in int32, got {wide[ids != wide][0]}")
    return np.asarray(counts, dtype=np.int64), ids


def _with_labels(counts: Any, ids: Any, labels: Any, places: Any, missing: str) -> tuple[Any, Any]:
    """Return the lists with each label in its own. ``places``: the labels' tokens in the call."""
    import numpy as np

    lengths = counts.clip(0)
    is_label = np.repeat(labels.astype(np.int32), lengths) == ids
    listed = np.flatnonzero(lengths)
    found = counts < 0
    if len(listed):
        found[listed] = np.logical_or.reduceat(is_label, (lengths.cumsum() - lengths)[listed])
    absent = np.flatnonzero(~found)
    if not len(absent):
        return counts, ids
    if missing == "error":
        token = absent[0]
        raise ValueError(
            f"labels[{places[token]}] (flattened) is {labels[token]}, which is not among the {counts[token]} ids of its list: "
            'are labels shifted? missing="add" adds it'
        )
    warnings.warn(
        f"cce_dist: {len(absent)} of {len(labels)} labels were not in their lists, and were added", stacklevel=3
    )
    ids = np.insert(ids, lengths.cumsum()[absent], labels[absent])
    counts = counts.copy()
    counts[absent] += 1
    return counts, ids


def check(kept: KeptIds, x: Operands) -> None:
    """Raise unless dtypes, devices and shapes fit the call's tokens. Reads no values."""
    checks.kind("kept", kept, KeptIds)
    tensors = {f"kept.{name}": tensor for name, tensor in zip(kept._fields, kept, strict=True) if tensor is not None}
    checks.tensors({"kept.offsets": kept.offsets, "kept.ids": kept.ids} | tensors)
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.int64, torch.int32) or tensor.dim() != 1:
            raise TypeError(
                f"{name} must be a plain tensor of one dimension, int64 or int32, got {tensor.dtype} {tuple(tensor.shape)}"
            )
        if tensor.device != x.ids.device:
            raise ValueError(f"input is on {x.ids.device}, {name} on {tensor.device}")
    if kept.offsets.shape[0] != x.num_tokens + 1:
        raise ValueError(
            f"kept.offsets must be [{x.num_tokens + 1}], one more than tokens, got {[*kept.offsets.shape]}"
        )
    if kept.ids.shape[0] and not x.num_tokens:
        raise ValueError(f"kept has {kept.ids.shape[0]} ids, but the call has no tokens")
    if kept.whole is not None and kept.whole.shape[0] > x.num_tokens:
        raise ValueError(f"kept.whole has {kept.whole.shape[0]} tokens, the call has {x.num_tokens}")
    if kept.ids.shape[0] + x.num_tokens >= 2**31:
        raise ValueError(f"kept has {kept.ids.shape[0]} ids: ids and tokens together must be fewer than 2**31")


def whole_tokens(kept: KeptIds) -> Tensor:
    """Return ``kept.whole`` as int64. Numbers outside of the call are replaced: no read is out of bounds."""
    if kept.whole is None:
        return kept.offsets.new_empty(0, dtype=torch.int64)
    return kept.whole.long().clamp(0, max(0, kept.offsets.shape[0] - 2))


def is_empty(kept: KeptIds) -> Tensor:
    """Return whether a token has no ids and does not take the whole vocabulary. -> [N] bool."""
    empty = rising(kept.offsets, kept.ids.shape[0]).diff() == 0
    return empty.index_fill_(0, whole_tokens(kept), False)


def check_values(kept: KeptIds, token_L: Tensor, ids_N: Tensor, vocab_size: int) -> None:
    """Raise for wrong offsets or whole tokens, an id outside the vocabulary, or a repeated id.

    Waits for the device. Lists of ignored tokens are not checked.
    """
    offsets, ids, whole = kept
    if offsets[0] != 0 or offsets[-1] != ids.shape[0] or bool((offsets.diff() < 0).any()):
        raise ValueError(f"kept.offsets must rise from 0 to {ids.shape[0]}, the number of kept.ids")
    if whole is not None and whole.shape[0]:
        inside = whole[0] >= 0 and whole[-1] < ids_N.shape[0] and bool((whole.diff() > 0).all())
        if not inside or offsets.diff()[whole.long()].any():
            raise ValueError("kept.whole must rise, and hold numbers of tokens whose lists are empty")
    if not ids.shape[0]:
        return
    live = ids_N[token_L] >= 0
    outside = live & ((ids < 0) | (ids >= vocab_size))
    if outside.any():
        place = int(outside.nonzero()[0])
        raise IndexError(
            f"kept.ids[{place}], of token {int(token_L[place])}, is {int(ids[place])}: not in [0, {vocab_size}); "
            "KeptIds.from_bits(bits, vocab_size) leaves out a mask's padding"
        )
    key, order = torch.where(live, token_L * vocab_size + ids, -1).sort()
    twice = (key[1:] == key[:-1]) & (key[1:] >= 0)
    if twice.any():
        place = int(order[1:][twice][0])
        raise ValueError(f"kept.ids has id {int(ids[place])} twice in the list of token {int(token_L[place])}")


class Saved(NamedTuple):
    """What forward saves for backward besides the operands, and before what the sweep's backend saves."""

    merged: Tensor  # [2 or 3, N]: maximum, logarithm of the sum and entropy over the lists
    ids: Tensor  # [N] as in ``Operands``
    whole: Tensor  # [W] int64: the tokens without a list
    begin: Tensor  # this and the next four: the fields of ``KeptLists``
    token: Tensor
    column: Tensor
    order: Tensor
    first: Tensor
    z: Tensor  # [M] fp32 logits of the lists' entries


def _backend(call: Call) -> ModuleType:
    if call.backend == "torch":
        return dense_lists
    from cce_dist.kernels import kept_rows

    return kept_rows


def _sweep(x: Operands, whole: Tensor, call: Call) -> tuple[Backend, Operands, Spec]:
    call = call.decided(x.hidden, whole.shape[0], Distributed(call.layout).size)
    factors = None if x.head.factors is None else x.head.factors[whole]
    x = x._replace(hidden=x.hidden[whole], head=x.head._replace(factors=factors), ids=x.ids[whole])
    return named(call.way.backend), x, call.spec


def _run_forward(
    hidden: Tensor, weight: Tensor, head: list[Tensor], labels: Tensor, offsets: Tensor, kept: Tensor, whole: Tensor,
    grad_weight_out: Tensor | None, call: Call,
) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:  # fmt: skip
    """Return negative log-probability, log-sum-exp and entropy over the lists, [N] fp32, and ``Saved`` as a list."""
    spec, ranks = call.spec, Distributed(call.layout)
    with without_autocast(hidden.device.type):
        kept = kept.long()
        begin = rising(offsets, kept.shape[0])
        token_L = token_of_entries(begin, kept.shape[0])
        all_lists = KeptIds(offsets, kept, whole)
        ids = _ids_of_tokens(labels, all_lists, token_L, call)
        whole = whole_tokens(all_lists)
        x = operands_of(ranks.whole(hidden), weight, head, ids, spec)
        listed_ids = ids.index_fill(0, whole, IGNORED)
        lists = lists_of(begin, token_L, kept, listed_ids, spec.logits)
        stats_KN, z_M = _backend(call).statistics(x._replace(ids=listed_ids), lists, spec)
        saved = []
        if whole.shape[0]:
            backend, x_whole, sweep = _sweep(x, whole, call)
            stats_KW, saved = backend.statistics(x_whole, ranks.gather, sweep)
            stats_KN.index_copy_(1, whole, stats_KW.to(stats_KN.dtype))
        losses, softmax = dense.token_losses(ranks.gather(stats_KN), x, spec)
        merged = torch.stack([numbers_N for numbers_N in softmax if numbers_N is not None])
        return losses.nll, losses.lse, losses.entropy, [*Saved(merged, ids, whole, *lists, z_M), *saved]


def _ids_of_tokens(labels: Tensor, kept: KeptIds, token_L: Tensor, call: Call) -> Tensor:
    """Return one id per token: IGNORED if its list is empty, OUTSIDE if its id or a list entry is outside the vocabulary."""
    spec, size = call.spec, call.spec.vocab_size
    ids = dense.label_ids(labels, spec.ignore_index, size)
    empty = is_empty(kept)
    ids = torch.where(empty & (ids >= 0), IGNORED, ids)
    check_labels(call, labels, ids)
    if call.debug or not labels.is_cuda:  # reading values would wait for a GPU, which returns NaN instead
        check_values(kept, token_L, ids, size)
        return ids
    outside = torch.zeros_like(ids).index_add_(0, token_L, ((kept.ids < 0) | (kept.ids >= size)).long())
    return torch.where((outside > 0) & (ids >= 0), OUTSIDE, ids)


def _run_backward(
    d_losses: list[Tensor | None], hidden: Tensor, weight: Tensor, head: list[Tensor], saved: list[Tensor],
    grad_weight_out: Tensor | None, want: list[bool], call: Call,
) -> Gradients:  # fmt: skip
    spec, ranks = call.spec, Distributed(call.layout)
    num_fields = len(Saved._fields)
    merged, ids, whole, *of_lists, z_M = Saved(*saved[:num_fields])
    d_nll, d_lse, d_entropy = d_losses
    with without_autocast(hidden.device.type):
        x = operands_of(ranks.whole(hidden), weight, head, ids, spec)
        upstream = Upstream(nll=d_nll, lse=d_lse, entropy=d_entropy)
        softmax = Softmax(merged[0], merged[1], None if d_entropy is None else merged[2])
        lists = KeptLists(*of_lists)
        coef_4N = dense.coefficients(upstream, ids, spec.vocab_size)
        grad_M = entry_gradients(x, lists, z_M, softmax, coef_4N)

        def gradients(grads: Grads) -> Gradients:
            if not whole.shape[0]:
                return _backend(call).gradients(x, lists, grad_M, grads, spec)
            backend, x_whole, sweep = _sweep(x, whole, call)
            of_whole: Any = [[None if x_N is None else x_N[whole] for x_N in record] for record in (softmax, upstream)]
            args = Softmax(*of_whole[0]), Upstream(*of_whole[1]), saved[num_fields:]
            d_whole, d_weight, d_bias = backend.gradients(x_whole, *args, grads._replace(hidden_ready=None), sweep)

            def ready(d_hidden: Tensor) -> None:
                assert d_whole is not None
                d_hidden.index_copy_(0, whole, d_whole)
                if grads.hidden_ready is not None:
                    grads.hidden_ready(d_hidden)

            weight_out = grads.weight_out if d_weight is None else d_weight
            of_lists = grads._replace(weight_out=weight_out, hidden_ready=ready)
            d_hidden, _, d_listed_bias = _backend(call).gradients(x, lists, grad_M, of_lists, spec)
            return d_hidden, d_weight, None if d_bias is None else d_bias + d_listed_bias

        return summed(gradients, want, grad_weight_out, ranks, x.num_tokens)


def _forward_fake(hidden, weight, head, labels, offsets, kept, whole, _, *flat):
    call, num_tokens, num_entries = build(Call, iter(flat)), labels.shape[0], kept.shape[0] + labels.shape[0]
    fp32, int32 = (
        lambda *shape, dtype=dtype: hidden.new_empty(shape, dtype=dtype) for dtype in (torch.float32, torch.int32)
    )
    saved = Saved(
        fp32(2 + call.spec.want.entropy, num_tokens), torch.empty_like(labels), torch.empty_like(whole, dtype=torch.int64),
        int32(num_tokens + 1), int32(num_entries), int32(num_entries), labels.new_empty(num_entries),
        int32(call.spec.logits.num_valid + 1), fp32(num_entries),
    )  # fmt: skip
    of_sweep = []
    if whole.shape[0]:
        x = Operands.of(hidden, weight, labels, call.spec.logits, **call.spec.logits.named(head))
        backend, x_whole, sweep = _sweep(x, saved.whole, call)
        of_sweep = backend.saved_like(x_whole, sweep)
    return fp32(num_tokens), fp32(num_tokens), fp32(num_tokens if call.spec.want.entropy else 0), [*saved, *of_sweep]


_OPERATOR = Operator(
    "linear_log_probs",
    _run_forward,
    _run_backward,
    "kept_log_probs",
    "kept_log_probs_backward",
    "Tensor hidden, Tensor weight, Tensor[] head, Tensor labels, Tensor offsets, Tensor kept, Tensor whole, "
    "Tensor? grad_weight_out",
    "(Tensor, Tensor, Tensor, Tensor[])",
    Call,
    num_outputs=3,
    num_saved=3,
)
_OPERATOR.register(_forward_fake)


def forward(
    x: Operands, kept: KeptIds, grad_weight_out: Tensor | None, call: Call, numbers: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    head = [*x.head.tensors.values()]
    whole = x.ids.new_empty(0) if kept.whole is None else plain(kept.whole)
    tensors = (x.hidden, x.weight, head, x.ids, plain(kept.offsets), plain(kept.ids), whole)
    return _OPERATOR.apply(*tensors, grad_weight_out, call=call, numbers=numbers)[:3]
