"""KeptIds: the list of ids that a sampler kept for each token, from an engine's results, padded rows or a bit mask."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cce_dist import checks
from cce_dist.kernels import Operands
from cce_dist.kernels.kept_ids import rising


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
        if isinstance(tensor, DTensor) or tensor.dtype not in (torch.int64, torch.int32) or tensor.dim() != 1:
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
