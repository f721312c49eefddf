"""The two torch.library operators behind the loss, forward and backward: one shard's arithmetic, merged over the group.

They are opaque to torch.compile (fakes give the shapes) and differentiable once. All options travel as plain values, in
the order of ``Options``, which is also where their schema comes from.
"""

from __future__ import annotations

import functools
import types
from typing import Any, NamedTuple, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist import merge
from cce_dist.kernels import OUTSIDE, Filter, ShardLogits, torch_ops
from cce_dist.shard import even_rows


class Options(NamedTuple):
    """What forward and backward both need to know; see ``linear_cross_entropy`` and ``VocabShard``."""

    start: int
    num_valid: int
    vocab_size: int
    group_name: str
    sequence_parallel: bool
    partial_input_grad: bool
    reduce_dtype: str  # of dE's sum over the group; empty = dE's own
    ignore_index: int
    logit_scale: float
    softcap: float  # 0 = none
    want_uniform: bool
    want_entropy: bool
    want_grad: bool
    filter_eps: float  # 0 = exact
    filter_compensate: bool
    filter_hidden: bool
    filter_weight: bool
    backend: str
    workspace_bytes: int
    debug: bool

    @property
    def logits(self) -> ShardLogits:
        return ShardLogits(self.start, self.num_valid, self.logit_scale, self.softcap)

    @property
    def filter(self) -> Filter:
        return Filter(self.filter_eps, self.filter_compensate, self.filter_hidden, self.filter_weight)

    @property
    def by_lists(self) -> bool:
        """Whether the kernels of the filter run: what it drops of a uniform term under a softcap has no rank-1 stand-in."""
        filtering = self.filter_eps > 0 and (self.filter_hidden or self.filter_weight)
        return self.backend == "triton" and filtering and not (self.want_uniform and self.softcap > 0)

    def ops(self) -> types.ModuleType:
        """The module that computes; those of Triton are imported by their first use."""
        if self.backend == "torch":
            return torch_ops
        from cce_dist.kernels import filtered, triton_ops

        return filtered if self.by_lists else triton_ops

    def token_ops(self) -> types.ModuleType:
        """The module that computes with each token's numbers."""
        if self.backend == "torch":
            return torch_ops
        from cce_dist.kernels import per_token

        return per_token

    def num_cached(self, hidden: Tensor, num_tokens: int) -> int:
        """Columns of the shard whose exponentials forward keeps for backward, within the workspace."""
        if self.backend == "torch" or self.by_lists or not self.want_grad:
            return 0
        return self.ops().cache_columns(
            num_tokens, self.num_valid, hidden.shape[1], hidden.dtype, self.logits, self.want_uniform,
            self.want_entropy, self.workspace_bytes,
        )  # fmt: skip

    def rows_at_once(self, hidden: Tensor, num_tokens: int, num_ranks: int) -> int | None:
        """Tokens whose dE can be summed over the group while that of others is computed; None: all are final together.

        Every rank gets the same answer, right for even shards: what a rank really does depends on its own.
        """
        if self.backend == "torch":  # its outer loop is over the vocabulary
            return None
        if self._replace(num_valid=even_rows(self.vocab_size, 0, num_ranks)[1]).num_cached(hidden, num_tokens) > 0:
            return None
        from cce_dist.kernels import triton_ops

        return triton_ops.most_rows(hidden.shape[1], hidden.dtype, self.workspace_bytes)


def _forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, grad_weight_out: Tensor | None, *options
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """Per-token statistics of the whole vocabulary, 0 where the label is ignored, NaN where it is outside the vocabulary.

    Returns:
        nll, lse, target logit, nll of the uniform distribution, entropy: [N] fp32 each, the last two empty unless wanted. Then
        what backward needs or reports: merged [2 or 3, N] (maximum, log of the sum, entropy), filter statistics [3] if the
        entropy is wanted too, and whatever the backend saves.
    """
    o = Options(*options)
    group = merge.resolve(o.group_name)
    _check_labels(labels, o)
    if o.debug and group is not None:
        _assert_ranks_agree(hidden, weight, bias, labels, o, group)
    with torch.autocast(hidden.device.type, enabled=False):
        gather = merge.SequenceGather(hidden, group) if o.sequence_parallel and group is not None else None
        ids = o.token_ops().label_ids(labels, o.ignore_index, o.vocab_size)
        operands = (weight, bias, ids, o, o.num_cached(hidden, ids.numel()))
        stats_KN, *saved = _local_stats(hidden, *operands) if gather is None else _sequence_stats(gather, *operands)
        if gather is not None:
            hidden = gather.whole  # which has arrived
        if o.want_uniform:
            count_1N = torch.full_like(stats_KN[:1], o.num_valid)
            stats_KN = torch.cat((stats_KN[:4], count_1N, stats_KN[4:]))
        *losses, merged = o.token_ops().token_losses(
            merge.gather_stats(stats_KN, group), ids, o.vocab_size, o.want_uniform, o.want_entropy
        )

        filter_stats = merged.new_zeros(3 if o.want_entropy else 0)  # wanted: the aux outputs are asked for
        if o.want_entropy and o.filter_eps > 0:
            if o.by_lists:
                filter_stats = o.ops().filter_stats(
                    hidden, weight, bias, ids, o.logits, merged[0], merged[1], *saved, grad_filter=o.filter
                )
            elif o.backend == "torch":
                filter_stats = o.ops().filter_stats(*saved, merged[0], merged[1], ids, o.logits, o.filter_eps)
            else:
                filter_stats[:1].fill_(1.0)  # the exact path; an assignment would wait for the device
        if o.backend == "torch":
            saved = []  # statistics of tiles, for the line above; backward looks at the whole gradient instead
        return *losses, merged, filter_stats, saved


def _backward(
    d_nll: Tensor | None, d_lse: Tensor | None, d_target: Tensor | None, d_uniform: Tensor | None, d_entropy: Tensor | None,
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor,
    merged: Tensor, saved: list[Tensor], grad_weight_out: Tensor | None, want: list[bool], *options,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dE, dC and dbias; an empty tensor for what is not wanted (or went into ``grad_weight_out``)."""
    o = Options(*options)
    group = merge.resolve(o.group_name)
    want_hidden, want_weight, want_bias = want
    with torch.autocast(hidden.device.type, enabled=False):
        gather = merge.SequenceGather(hidden, group) if o.sequence_parallel and group is not None else None
        ids = o.token_ops().label_ids(labels, o.ignore_index, o.vocab_size)
        coef_4N = o.token_ops().coefficients([d_nll, d_lse, d_target, d_uniform, d_entropy], ids, o.vocab_size)
        entropy = None if d_entropy is None else merged[2]
        reduce_dtype = getattr(torch, o.reduce_dtype) if o.reduce_dtype else None
        sum_group = None if o.partial_input_grad else group
        rows = None if sum_group is None else o.rows_at_once(hidden, ids.numel(), sum_group.size())
        hidden_sum = merge.HiddenGradSum(sum_group, o.sequence_parallel, reduce_dtype, ids.numel(), rows)
        if gather is not None:
            hidden = gather.wait()
        how: dict[str, Any] = {"grad_filter": o.filter} if o.backend == "torch" or o.by_lists else {}
        if o.backend == "triton":
            how["ready_rows"] = rows
        _, d_weight, d_bias = o.ops().gradients(
            hidden, weight, bias, ids, o.logits, merged[0], merged[1], entropy, coef_4N, *saved, **how,
            want_hidden=want_hidden, want_weight=want_weight, want_bias=want_bias, d_weight_out=grad_weight_out,
            workspace_bytes=o.workspace_bytes, hidden_ready=hidden_sum.start,
        )  # fmt: skip
        nothing = hidden.new_empty(0)
        return (
            hidden_sum.wait() if want_hidden else nothing,
            nothing if d_weight is None else d_weight,
            nothing if d_bias is None or bias is None else d_bias.to(bias.dtype),
        )


def _local_stats(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, o: Options, num_cached: int
) -> tuple[Tensor, ...]:
    """This shard's statistics, and what its backend saves."""
    if o.by_lists:
        how = {"grad_filter": o.filter, "merge_bound": functools.partial(_merge_bound, o=o)}
    else:
        how = {"want_tiles": o.filter_eps > 0} if o.backend == "torch" else {"num_cached": num_cached}
    return o.ops().local_stats(
        hidden, weight, bias, ids, o.logits, want_uniform=o.want_uniform, want_entropy=o.want_entropy,
        workspace_bytes=o.workspace_bytes, **how,
    )  # fmt: skip


def _merge_bound(stats_3N: Tensor, o: Options) -> Tensor:
    """The log-sum-exp over what the shards' statistics cover: one more all-gather of 3 numbers a token. -> [N]."""
    return o.token_ops().merged_lse(merge.gather_stats(stats_3N, merge.resolve(o.group_name)))


def _sequence_stats(
    gather: merge.SequenceGather, weight: Tensor, bias: Tensor | None, ids: Tensor, o: Options, num_cached: int
) -> tuple[Tensor, ...]:
    """The same under sequence parallelism: of the slice that is here while the others arrive, then of those.

    Where something is kept of every token for backward (exponentials, the filter's tiles), all go together instead.
    """
    if num_cached > 0 or o.filter_eps > 0:
        return _local_stats(gather.wait(), weight, bias, ids, o, num_cached)
    here = gather.here
    before, after = slice(0, here.start), slice(here.stop, ids.numel())
    stats_KN = _local_stats(gather.local, weight, bias, ids[here], o, 0)[0]
    hidden = gather.wait()
    others = (_local_stats(hidden[rows], weight, bias, ids[rows], o, 0)[0] for rows in (before, after))
    return torch.cat((next(others), stats_KN, next(others)), 1), *_saved_like(hidden, ids.numel(), o)


def _assert_ranks_agree(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, o: Options, group: dist.ProcessGroup
) -> None:
    local = ("start", "num_valid")
    call = {name: value for name, value in o._asdict().items() if name not in local}
    call |= {"hidden": (tuple(hidden.shape), str(hidden.dtype)), "weight": (weight.shape[1], str(weight.dtype))}
    call |= {"number of tokens": labels.numel(), "bias": bias is not None}
    place = torch.arange(1, labels.numel() + 1, device=labels.device)
    call |= {"the labels (a checksum)": int((labels * place).sum())}
    merge.assert_ranks_agree(call, o.start, o.start + weight.shape[0], group, o.vocab_size)


def _check_labels(labels: Tensor, o: Options) -> None:
    if labels.is_cuda and not o.debug:
        return  # reading the labels would wait for the GPU; the token's loss is NaN instead
    outside = o.token_ops().label_ids(labels, o.ignore_index, o.vocab_size) == OUTSIDE
    if outside.any():
        position = int(outside.nonzero()[0])
        raise IndexError(
            f"target[{position}] (flattened) is {int(labels[position])}: neither in [0, {o.vocab_size}) "
            f"nor ignore_index {o.ignore_index}"
        )


def _saved_like(hidden: Tensor, num_tokens: int, o: Options) -> list[Tensor]:
    """What the backend saves, in shape and dtype; where nothing is to be found in it, the thing itself."""
    if o.backend != "triton":
        return []
    if o.by_lists:
        shapes = o.ops().saved_shapes(num_tokens, o.num_valid, o.filter_eps, o.workspace_bytes)
        return [hidden.new_empty(shape, dtype=dtype) for shape, dtype in shapes]
    num_cached = o.num_cached(hidden, num_tokens)
    return [
        hidden.new_empty(num_tokens, num_cached),
        hidden.new_empty(2, num_tokens if num_cached else 0, dtype=torch.float32),
    ]


def _forward_fake(hidden, weight, bias, labels, grad_weight_out, *options):
    o = Options(*options)
    num_tokens = labels.shape[0]

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return hidden.new_empty(shape, dtype=dtype)

    losses = (empty(num_tokens if wanted else 0) for wanted in (True, True, True, o.want_uniform, o.want_entropy))
    filter_stats = empty(3 if o.want_entropy else 0)
    return *losses, empty(2 + o.want_entropy, num_tokens), filter_stats, _saved_like(hidden, num_tokens, o)


def _backward_fake(
    d_nll, d_lse, d_target, d_uniform, d_entropy, hidden, weight, bias, labels, merged, saved, grad_weight_out, want, *options
):  # fmt: skip
    nothing = hidden.new_empty(0)
    return (
        torch.empty_like(hidden) if want[0] else nothing,
        torch.empty_like(weight) if want[1] and grad_weight_out is None else nothing.to(weight.dtype),
        torch.empty_like(bias) if want[2] else nothing,
    )


NUM_LOSSES = 5  # what forward returns first, all that is differentiable; then merged, filter_stats, and what is saved


def _save(ctx, inputs, output) -> None:
    hidden, weight, bias, labels, grad_weight_out, *ctx.options = inputs
    merged, filter_stats, saved = output[NUM_LOSSES:]
    ctx.save_for_backward(hidden, weight, bias, labels, merged, *saved)
    ctx.grad_weight_out = grad_weight_out
    ctx.mark_non_differentiable(merged, filter_stats, *saved)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, *grads):
    d_losses = grads[:NUM_LOSSES]
    nothing = (None,) * (5 + len(ctx.options))
    if all(d is None for d in d_losses):
        return nothing
    hidden, weight, bias, labels, merged, *saved = ctx.saved_tensors
    want = list(ctx.needs_input_grad[:3])
    twice = torch.is_grad_enabled()
    with torch.no_grad():
        grads = torch.ops.cce_dist.backward(
            *d_losses, hidden, weight, bias, labels, merged, saved, ctx.grad_weight_out, want, *ctx.options
        )
    if twice:
        grads = _Once.apply(torch.ones((), requires_grad=True), *grads)
    want[1] = want[1] and ctx.grad_weight_out is None
    chosen = (grad if wanted else None for grad, wanted in zip(grads, want, strict=True))
    return *chosen, *nothing[3:]


class _Eager(torch.autograd.Function):
    """The differentiable operator without what torch.library does about it on the host, half a millisecond a step."""

    @staticmethod
    def forward(ctx, *inputs):
        output = torch.ops.cce_dist.forward(*inputs)
        _save(ctx, inputs, output)
        return output[:-1]

    backward = staticmethod(_differentiate)


def forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    grad_weight_out: Tensor | None,
    options: Options,
) -> tuple[Tensor, ...]:
    """The operator as the loss calls it; see ``_forward``. The first NUM_LOSSES outputs are differentiable."""
    if torch.compiler.is_compiling() or not options.want_grad:
        return torch.ops.cce_dist.forward(hidden, weight, bias, labels, grad_weight_out, *options)
    return _Eager.apply(hidden, weight, bias, labels, grad_weight_out, *options)  # type: ignore[return-value]


class _Once(torch.autograd.Function):
    """Gradients that were asked for with create_graph=True: usable, but not differentiable."""

    @staticmethod
    def forward(ctx, anchor: Tensor, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(grad.clone() for grad in grads)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        raise RuntimeError("linear_cross_entropy is differentiable once: double backward is not supported")


_OPTIONS = ", ".join(f"{kind.__name__} {name}" for name, kind in get_type_hints(Options).items())
_LIBRARY = torch.library.Library("cce_dist", "DEF")
_LIBRARY.define(
    "forward(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, Tensor? grad_weight_out, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor[])"
)
_LIBRARY.define(
    "backward(Tensor? d_nll, Tensor? d_lse, Tensor? d_target, Tensor? d_uniform, Tensor? d_entropy, "
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, "
    "Tensor merged, Tensor[] saved, Tensor(a!)? grad_weight_out, bool[] want, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.impl("forward", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("cce_dist::forward", _forward_fake, lib=_LIBRARY)
torch.library.register_fake("cce_dist::backward", _backward_fake, lib=_LIBRARY)
torch.library.register_autograd("cce_dist::forward", _differentiate, setup_context=_save, lib=_LIBRARY)
