"""The two torch.library operators behind ``linear_log_probs(..., kept=...)``: a shard's arithmetic, merged over the group."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from cce_dist import kept_ids
from cce_dist.autograd import Operator, build, head_rows
from cce_dist.call import Call
from cce_dist.debug_ranks import label_error
from cce_dist.kept_ids import KeptIds
from cce_dist.kernels import IGNORED, OUTSIDE, Grads, Operands, Softmax, Upstream, dense
from cce_dist.kernels import kept_ids as dense_lists
from cce_dist.kernels.kept_ids import KeptLists, entry_gradients, lists_of, rising, token_of_entries
from cce_dist.merge import Distributed
from cce_dist.op import operands_of
from cce_dist.operands import plain


class Saved(NamedTuple):
    """What forward saves for backward besides the operands."""

    merged: Tensor  # [2 or 3, N]: maximum, logarithm of the sum and entropy over the lists
    ids: Tensor  # [N] as in ``Operands``
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


def _run_forward(
    hidden: Tensor, weight: Tensor, head: list[Tensor], labels: Tensor, offsets: Tensor, kept: Tensor,
    grad_weight_out: Tensor | None, call: Call,
) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:  # fmt: skip
    """Return negative log-probability, log-sum-exp and entropy over the lists, [N] fp32, and ``Saved`` as a list."""
    spec, ranks = call.spec, Distributed(call.layout)
    with torch.autocast(hidden.device.type, enabled=False):
        kept = kept.long()
        begin = rising(offsets, kept.shape[0])
        token_L = token_of_entries(begin, kept.shape[0])
        ids = _ids_of_tokens(labels, KeptIds(offsets, kept), token_L, call)
        x = operands_of(ranks.whole(hidden), weight, head, ids, spec)
        lists = lists_of(begin, token_L, kept, ids, spec.logits)
        stats_KN, z_M = _backend(call).statistics(x, lists, spec)
        losses, softmax = dense.token_losses(ranks.gather(stats_KN), x, spec)
        merged = torch.stack([numbers_N for numbers_N in softmax if numbers_N is not None])
        return losses.nll, losses.lse, losses.entropy, [*Saved(merged, ids, *lists, z_M)]


def _ids_of_tokens(labels: Tensor, kept: KeptIds, token_L: Tensor, call: Call) -> Tensor:
    """Return one id per token: IGNORED if its list is empty, OUTSIDE if its id or a list entry is outside the vocabulary."""
    spec, size = call.spec, call.spec.vocab_size
    ids = dense.label_ids(labels, spec.ignore_index, size)
    empty = rising(kept.offsets, kept.ids.shape[0]).diff() == 0
    ids = torch.where(empty & (ids >= 0), IGNORED, ids)
    if call.debug or not labels.is_cuda:  # reading values would wait for a GPU, which returns NaN instead
        error = label_error(call.argument, labels, ids, size, spec.ignore_index)
        wrong = IndexError(error) if error else kept_ids.error(kept, token_L, ids, size)
        if wrong is not None:
            raise wrong
        return ids
    outside = torch.zeros_like(ids).index_add_(0, token_L, ((kept.ids < 0) | (kept.ids >= size)).long())
    return torch.where((outside > 0) & (ids >= 0), OUTSIDE, ids)


def _run_backward(
    d_losses: list[Tensor | None], hidden: Tensor, weight: Tensor, head: list[Tensor], saved: list[Tensor],
    grad_weight_out: Tensor | None, want: list[bool], call: Call,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return d_hidden, d_weight, and the head's gradients as rows; None if not wanted, or added to ``grad_weight_out``."""
    spec, ranks = call.spec, Distributed(call.layout)
    merged, ids, *of_lists, z_M = Saved(*saved)
    want_hidden, want_weight, *want_head = want
    d_nll, d_lse, d_entropy = d_losses
    with torch.autocast(hidden.device.type, enabled=False):
        x = operands_of(ranks.whole(hidden), weight, head, ids, spec)
        coef_4N = dense.coefficients(Upstream(nll=d_nll, lse=d_lse, entropy=d_entropy), ids, spec.vocab_size)
        softmax = Softmax(merged[0], merged[1], None if d_entropy is None else merged[2])
        lists = KeptLists(*of_lists)
        grad_M = entry_gradients(x, lists, z_M, softmax, coef_4N)
        hidden_sum = ranks.hidden_sum(x.num_tokens, None)
        start_sum = None if hidden_sum is None else hidden_sum.start
        want_bias = spec.logits.named(want_head).get("bias", False)
        grads = Grads(want_hidden, want_weight, want_bias, grad_weight_out, start_sum)
        d_hidden, d_weight, d_bias = _backend(call).gradients(x, lists, grad_M, grads, spec)
        if hidden_sum is not None and want_hidden:
            d_hidden = hidden_sum.wait()
        return d_hidden, d_weight, head_rows(spec.logits.listed(bias=d_bias), want_head)


def _forward_fake(hidden, weight, head, labels, offsets, kept, _, *flat):
    call, num_tokens, num_entries = build(Call, iter(flat)), labels.shape[0], kept.shape[0] + labels.shape[0]
    fp32, int32 = (
        lambda *shape, dtype=dtype: hidden.new_empty(shape, dtype=dtype) for dtype in (torch.float32, torch.int32)
    )
    saved = Saved(
        fp32(2 + call.spec.want.entropy, num_tokens), torch.empty_like(labels),
        int32(num_tokens + 1), int32(num_entries), int32(num_entries), labels.new_empty(num_entries),
        int32(call.spec.logits.num_valid + 1), fp32(num_entries),
    )  # fmt: skip
    return fp32(num_tokens), fp32(num_tokens), fp32(num_tokens if call.spec.want.entropy else 0), [*saved]


_OPERATOR = Operator(
    "linear_log_probs",
    _run_forward,
    _run_backward,
    "kept_log_probs",
    "kept_log_probs_backward",
    "Tensor hidden, Tensor weight, Tensor[] head, Tensor labels, Tensor offsets, Tensor kept, Tensor? grad_weight_out",
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
    tensors = (x.hidden, x.weight, head, x.ids, plain(kept.offsets), plain(kept.ids))
    return _OPERATOR.apply(*tensors, grad_weight_out, call=call, needs_grad=call.spec.want.grad, numbers=numbers)[:3]
