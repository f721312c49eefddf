"""The two torch.library operators behind ``linear_log_probs(..., kept=...)``: a shard's arithmetic, merged over the group.

Tokens without a list (``KeptIds.whole``) are swept over the whole vocabulary by the backend of other log-probabilities. Their
statistics take the places of the empty lists' before the exchange, so that all further steps are the same for both.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cce_dist import kept_ids
from cce_dist.autograd import Operator, build, without_autocast
from cce_dist.call import Call
from cce_dist.debug_ranks import check_labels
from cce_dist.kept_ids import KeptIds
from cce_dist.kernels import IGNORED, OUTSIDE, Gradients, Grads, Operands, Softmax, Spec, Upstream, dense
from cce_dist.kernels import kept_ids as dense_lists
from cce_dist.kernels.backends import Backend, named
from cce_dist.kernels.kept_ids import KeptLists, entry_gradients, lists_of, rising, token_of_entries
from cce_dist.merge import Distributed
from cce_dist.op import operands_of, summed
from cce_dist.operands import plain


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
    """Return the backend's module for lists. Triton's module is imported at its first use."""
    if call.backend == "torch":
        return dense_lists
    from cce_dist.kernels import kept_rows

    return kept_rows


def _sweep(x: Operands, whole: Tensor, call: Call) -> tuple[Backend, Operands, Spec]:
    """Return backend, operands and spec of a pass over the vocabulary for the tokens ``whole`` alone."""
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
        whole = kept_ids.whole_tokens(all_lists)
        x = operands_of(ranks.whole(hidden), weight, head, ids, spec)
        listed_ids = ids.index_fill(0, whole, IGNORED)
        lists = lists_of(begin, token_L, kept, listed_ids, spec.logits)
        stats_KN, z_M = _backend(call).statistics(x._replace(ids=listed_ids), lists, spec)
        saved = []
        if whole.shape[0]:
            backend, x_whole, sweep = _sweep(x, whole, call)
            stats_KW, saved = backend.statistics(x_whole, sweep, ranks.gather)
            stats_KN.index_copy_(1, whole, stats_KW.to(stats_KN.dtype))
        losses, softmax = dense.token_losses(ranks.gather(stats_KN), x, spec)
        merged = torch.stack([numbers_N for numbers_N in softmax if numbers_N is not None])
        return losses.nll, losses.lse, losses.entropy, [*Saved(merged, ids, whole, *lists, z_M), *saved]


def _ids_of_tokens(labels: Tensor, kept: KeptIds, token_L: Tensor, call: Call) -> Tensor:
    """Return one id per token: IGNORED if its list is empty, OUTSIDE if its id or a list entry is outside the vocabulary."""
    spec, size = call.spec, call.spec.vocab_size
    ids = dense.label_ids(labels, spec.ignore_index, size)
    empty = kept_ids.is_empty(kept)
    ids = torch.where(empty & (ids >= 0), IGNORED, ids)
    check_labels(call, labels, ids)
    if call.debug or not labels.is_cuda:  # reading values would wait for a GPU, which returns NaN instead
        kept_ids.check_values(kept, token_L, ids, size)
        return ids
    outside = torch.zeros_like(ids).index_add_(0, token_L, ((kept.ids < 0) | (kept.ids >= size)).long())
    return torch.where((outside > 0) & (ids >= 0), OUTSIDE, ids)


def _run_backward(
    d_losses: list[Tensor | None], hidden: Tensor, weight: Tensor, head: list[Tensor], saved: list[Tensor],
    grad_weight_out: Tensor | None, want: list[bool], call: Call,
) -> Gradients:  # fmt: skip
    """Return d_hidden, d_weight and d_bias; None if not wanted, or added to ``grad_weight_out``."""
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
    """Call the operator for ``linear_log_probs``, and return the first three results of ``_run_forward``."""
    head = [*x.head.tensors.values()]
    whole = x.ids.new_empty(0) if kept.whole is None else plain(kept.whole)
    tensors = (x.hidden, x.weight, head, x.ids, plain(kept.offsets), plain(kept.ids), whole)
    return _OPERATOR.apply(*tensors, grad_weight_out, call=call, numbers=numbers)[:3]
