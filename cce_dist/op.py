"""The forward and backward operator behind loss and log-probabilities: one shard's arithmetic, merged over the group.

``run_forward`` and ``run_backward`` are the algorithm: a backend (``kernels/backends.py``) does the shard's arithmetic, and
``merge`` the communication. torch.compile and dispatch modes use torch.library (with fakes), ordinary calls do not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cce_dist.autograd import Operator, build, without_autocast
from cce_dist.call import Call
from cce_dist.debug_ranks import check_labels
from cce_dist.given import Given
from cce_dist.kernels import Cells, Gradients, Grads, Head, Operands, Softmax, Spec, Upstream, accumulator, dense
from cce_dist.kernels.backends import named
from cce_dist.kernels.dry_run import compile_ahead
from cce_dist.kernels.outputs import NUM_LOSSES, Outputs, any_id, cell_gradients, listed, merge_cells, merge_listed
from cce_dist.merge import Distributed


class Saved(NamedTuple):
    """What forward saves for backward besides the operands. Operators pass it on as a list of tensors."""

    max: Tensor  # [N] fp32, as in ``Softmax`` over the whole vocabulary
    log_sum: Tensor  # [N] fp32, as in ``Softmax``
    entropy: Tensor | None  # [N] fp32 if wanted
    ids: Tensor  # [N] as in ``Operands``
    count: Tensor | None  # [] number of labels that are not ignored, with the mean
    ids_NI: Tensor | None  # with several ids per token
    target_NI: Tensor | None  # logits of ids_NI
    of_backend: list[Tensor]  # what the backend saves

    def listed(self) -> list[Tensor]:
        return [tensor for tensor in (*self[:-1], *self.of_backend) if tensor is not None]

    @classmethod
    def of(cls, tensors: list[Tensor], spec: Spec) -> Saved:
        """Rebuild the record from its list. ``spec`` says which tensors exist."""
        rest = iter(tensors)
        exists = (True, True, spec.want.entropy, True, spec.want.mean, spec.several, spec.several)
        return cls(*(next(rest) if present else None for present in exists), list(rest))  # type: ignore[arg-type]


def _in_pass(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function without autocast, and as a ``passes.Pass`` unless it has collectives or reads labels."""

    @wraps(function)
    def run(*args: Any) -> Any:
        *given, call = args
        hidden = next(value for value in given if isinstance(value, Tensor))
        with without_autocast(hidden.device.type):
            if call.layout.group_name or call.debug:
                return function(*args)
            call = call.decided(hidden, hidden.shape[0], 1)
            return named(call.way.backend).run(function, *given, call)

    return run


@_in_pass
def run_forward(
    hidden: Tensor, weight: Tensor, head: list[Tensor], labels: Tensor, grad_weight_out: Tensor | None, call: Call
) -> tuple[Any, ...]:
    """Compute per-token statistics over the whole vocabulary: 0 for ignored labels, NaN for labels outside the vocabulary.

    ``head`` has the tensors that ``call`` names; labels are [N], or [N, I] with several ids per token. Return the losses of
    ``Outputs`` (None if not wanted), a list of its other wanted tensors, and ``Saved`` as a list.
    """
    ranks = Distributed(call.layout)
    call = call.decided(hidden, labels.shape[0], ranks.size)
    backend, spec = named(call.way.backend), call.spec
    x = Operands.of(hidden, weight, labels, spec.logits, **spec.logits.named(head))
    compile_ahead(backend, spec, x, grad_weight_out, ranks.size)
    flat_labels, cells = labels if labels.dim() == 1 else labels.view(-1), None
    # The order is one program's work. Several ids of each token have none, and are too many for it.
    ids, order = (dense if spec.several else backend).ordered_ids(flat_labels, spec.ignore_index, spec.vocab_size)
    check_labels(call, flat_labels, ids)
    if spec.several:
        cells = Cells(ids.view(-1, spec.num_ids))
        ids = any_id(cells.ids_NI)
    x = operands_of(ranks.whole(hidden), weight, head, ids, spec, cells, order)
    if ranks.size == 1:
        found, softmax, stats_TKN, saved = backend.run(backend.losses_alone, x, spec)
    else:
        stats_KN, saved = backend.run(backend.statistics, x, ranks.gather, spec)
        stats_TKN = ranks.gather(stats_KN)
        found, softmax = backend.run(backend.token_losses, stats_TKN, x, spec)
    *losses, count = found
    if not spec.want.tokens:
        losses[:3] = None, None, None
    ids_NI = target_NI = None
    if x.cells is not None and stats_TKN is not None:
        ids_NI = x.cells.ids_NI
        losses[0], target_NI = merge_cells(stats_TKN, softmax, ids_NI, spec)
    others = [*merge_listed(stats_TKN, softmax, x.ids, spec).values()]
    kept = Saved(softmax.max, softmax.log_sum, softmax.entropy, x.ids, count, ids_NI, target_NI, saved)
    return *losses, others, kept.listed()


def operands_of(
    hidden: Tensor, weight: Tensor, head: list[Tensor], ids: Tensor, spec: Spec, cells: Cells | None = None,
    order: list[Tensor] | None = None,
) -> Operands:  # fmt: skip
    """Return the operands of a shard, with 1 in place of the factors of ignored tokens, which may hold anything."""
    logits, tensors = spec.logits, spec.logits.named(head)
    if "factors" in tensors:
        tensors["factors"] = torch.where(ids[:, None] >= 0, tensors["factors"], 1.0)
    return Operands(hidden, weight, Head.of(logits, **tensors), ids, logits.start, logits.num_valid, cells, order)


@_in_pass
def run_backward(
    d_losses: list[Tensor | None], hidden: Tensor, weight: Tensor, head: list[Tensor], saved: list[Tensor],
    grad_weight_out: Tensor | None, want: list[bool], call: Call,
) -> Gradients:  # fmt: skip
    """Return d_hidden, d_weight and d_bias; None if not wanted, or added to ``grad_weight_out``."""
    ranks = Distributed(call.layout)
    max_N, log_sum_N, entropy_N, ids, count, ids_NI, target_NI, saved = Saved.of(saved, call.spec)
    call = call.decided(hidden, ids.shape[0], ranks.size)
    backend, spec = named(call.way.backend), call.spec
    upstream, cells = Upstream(*d_losses, count), None  # pyright: ignore[reportCallIssue]
    if ids_NI is not None and target_NI is not None:
        # A token's log-sum-exp gets the sum of the gradients of its ids. Cells hold the gradient of each id.
        cells, d_sum = cell_gradients(upstream.nll, target_NI, ids_NI)
        upstream = upstream._replace(nll=None, lse=d_sum if upstream.lse is None else d_sum + upstream.lse)
    x = operands_of(ranks.whole(hidden), weight, head, ids, spec, cells)
    softmax = Softmax(max_N, log_sum_N, None if upstream.entropy is None else entropy_N)

    def gradients(grads: Grads) -> Gradients:
        return backend.run(backend.gradients, x, softmax, upstream, saved, grads, spec)

    return summed(gradients, want, grad_weight_out, ranks, ids.numel(), call.way.ready_rows or None)


def summed(
    gradients: Callable[[Grads], Gradients], want: list[bool], grad_weight_out: Tensor | None,
    ranks: Distributed, num_tokens: int, rows: int | None = None,
) -> Gradients:  # fmt: skip
    """Return the wanted gradients of ``num_tokens`` tokens, with d_hidden summed over the ranks as soon as it is final."""
    want_hidden, want_weight, *want_head = want
    hidden_sum = ranks.hidden_sum(num_tokens, rows)
    start_sum = None if hidden_sum is None else hidden_sum.start
    d_hidden, d_weight, d_bias = gradients(
        Grads(want_hidden, want_weight, any(want_head), grad_weight_out, start_sum, rows)
    )
    d_hidden = hidden_sum.wait() if hidden_sum is not None and want_hidden else d_hidden
    return d_hidden, d_weight, d_bias if any(want_head) else None


def _forward_fake(hidden, weight, head, labels, grad_weight_out, *flat):
    call = build(Call, iter(flat))
    want, num_tokens = call.spec.want, labels.shape[0]

    def empty(*shape: int) -> Tensor:
        return hidden.new_empty(shape, dtype=accumulator(hidden.dtype))

    nll = empty(*labels.shape) if want.tokens else empty(0)
    losses = (empty(num_tokens if wanted else 0) for wanted in (want.tokens, want.tokens, want.uniform, want.entropy))
    ids = labels.new_empty(num_tokens)
    call = call.decided(hidden, num_tokens, Distributed(call.layout).size)
    x = Operands.of(hidden, weight, ids, call.spec.logits, **call.spec.logits.named(head))
    others = [hidden.new_empty(shape, dtype=dtype) for shape, dtype in listed(want, num_tokens).values()]
    saved = Saved(
        empty(num_tokens),
        empty(num_tokens),
        empty(num_tokens) if want.entropy else None,
        ids,
        ids.new_empty(()) if want.mean else None,
        torch.empty_like(labels) if call.spec.several else None,
        empty(*labels.shape) if call.spec.several else None,
        named(call.way.backend).saved_like(x, call.spec),
    )
    return nll, *losses, empty() if want.mean else empty(0), others, saved.listed()


_OPERATOR = Operator(
    "linear_cross_entropy (or linear_log_probs)",
    run_forward,
    run_backward,
    "forward",
    "backward",
    "Tensor hidden, Tensor weight, Tensor[] head, Tensor labels, Tensor? grad_weight_out",
    f"({'Tensor, ' * NUM_LOSSES}Tensor[], Tensor[])",
    Call,
    NUM_LOSSES,
    3,
)
_forward, _backward = _OPERATOR.register(_forward_fake)


def forward(x: Operands, grad_weight_out: Tensor | None, call: Call, numbers: Tensor | None = None) -> Outputs:
    """Run the operator. Here ``x.ids`` are labels, [N] or [N, I]."""
    tensors = (x.hidden, x.weight, [*x.head.tensors.values()], x.ids, grad_weight_out)
    found = _OPERATOR.apply(*tensors, call=call, numbers=numbers)
    return Outputs.of(found, call.spec.want)


def two_passes(given: Given) -> tuple[Tensor, Outputs]:
    """Compute a loss whose backward is a pass of its own. Autograd differentiates the algebra on [N] numbers."""
    found = forward(given.x, given.grad_weight_out, given.call, given.numbers)
    return given.loss(found), found
