"""The arithmetic of one shard in plain torch, a bounded block of logits at a time: for CPUs, fp32, and GPUs without Triton.

The loop runs over blocks of the vocabulary (and of tokens, if all tokens do not fit), so that each row of d_weight is written
once and d_hidden is summed in fp32. Its filter is the definition of ``GradFilter``, element by element.

If a loss is computed one group of tokens after another (``cce_dist/groups.py``), forward saves the exponentials of the group's
logits, and backward turns them into gradients in place: three matmuls instead of four, and one block alive instead of several.

Source: mgmalek's efficient_cross_entropy and Liger-Kernel chunk tokens. The online softmax is Milakov & Gimelshein's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cce_dist.kernels import (
    IGNORED,
    OUTSIDE,
    Gradients,
    Grads,
    Head,
    Losses,
    Operands,
    Softmax,
    Spec,
    Upstream,
    accumulator,
    memory,
    widened,
)
from cce_dist.kernels.outputs import NO_ID, largest, merge_largest, normalised

FLOOR = torch.finfo(torch.float32).min  # replaces a maximum of -inf where -inf - -inf would be NaN


def run(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def label_ids(labels_N: Tensor, ignore_index: int, vocab_size: int) -> Tensor:
    inside = (labels_N >= 0) & (labels_N < vocab_size)
    return torch.where(inside, labels_N, OUTSIDE).masked_fill_(labels_N == ignore_index, IGNORED)


def ordered_ids(labels_N: Tensor, ignore_index: int, vocab_size: int) -> tuple[Tensor, list[Tensor] | None]:
    return label_ids(labels_N, ignore_index, vocab_size), None


def saved_like(x: Operands, spec: Spec) -> list[Tensor]:
    return []


def nothing_saved(x: Operands) -> list[Tensor]:
    return []


class Block(NamedTuple):
    """A block of logits: its tokens ``rows`` and columns ``cols``, their operands, and each label's position in it."""

    rows: slice
    cols: slice
    hidden_RD: Tensor
    weight_CD: Tensor
    head: Head  # Restricted to these tokens and columns
    column_R1: Tensor  # The label's column, [R, 1]; any if it is not in the block
    label_R1: Tensor  # Whether the label is in the block
    # Whether a token has no label. Its logits are set to 0, because its hidden state may hold anything, and so may the product
    # with a weight or bias that is not finite.
    unlabelled_R1: Tensor
    columns_RI: Tensor | None = None  # The same for several ids a token, [R, I] each
    ids_RI: Tensor | None = None

    def logits(self) -> Tensor:
        z, head = _matmul(self.hidden_RD, self.weight_CD.t()), self.head
        if head.bias is not None:
            z += head.bias.to(z.dtype)
        if head.factors is not None:
            z *= head.factors[:, :1]
        elif head.scale is not None:
            z *= head.scale
        if head.softcap is not None:
            z = z.div_(head.softcap).tanh_().mul_(head.softcap)
            if head.factors is not None:
                z *= head.factors[:, 1:]
        return z.masked_fill_(self.unlabelled_R1, 0.0)

    def slope(self, z: Tensor) -> Tensor | float:
        """Return the derivative of the logits z with respect to ``hidden @ weight.T + bias``."""
        head = self.head
        if head.softcap is None:
            return head.multiplier if head.factors is None else head.factors[:, :1]
        scale, bound = head.multiplier, head.softcap
        if head.factors is not None:
            scale, bound = head.factors.prod(1, keepdim=True), head.factors[:, 1:] * head.softcap
        return scale * (1 - (z / bound).square())


def blocks_of(x: Operands, spec: Spec, whole: bool = False) -> Iterator[tuple[slice, Iterator[Block]]]:
    """Yield each range of columns with an iterator over the blocks of all tokens. ``whole``: one block."""
    itemsize = accumulator(x.hidden.dtype).itemsize
    num_rows, num_cols = memory.dense_block(
        x.num_tokens, x.num_valid, spec.workspace_bytes, itemsize, on_cpu=x.hidden.is_cpu
    )
    if whole:
        num_rows, num_cols = max(1, x.num_tokens), max(1, x.num_valid)

    def of_columns(cols: slice) -> Iterator[Block]:
        for start in range(0, x.num_tokens, num_rows):
            rows = slice(start, min(start + num_rows, x.num_tokens))
            ids_R1 = x.ids[rows, None]
            hidden_RD = x.hidden[rows].masked_fill(ids_R1 < 0, 0.0)
            head = x.head.of_columns(cols).of_tokens(rows)
            of_ids = () if x.cells is None else columns_of(x.cells.ids_NI[rows], cols)
            yield Block(rows, cols, hidden_RD, x.weight[cols], head, *columns_of(ids_R1, cols), ids_R1 < 0, *of_ids)

    def columns_of(ids: Tensor, cols: slice) -> tuple[Tensor, Tensor]:
        """Return the position of each id in the columns, and whether it is there at all."""
        columns = torch.where(ids >= 0, ids - x.start - cols.start, -1)
        width = cols.stop - cols.start
        return columns.clamp(0, width - 1), (columns >= 0) & (columns < width)

    for start in range(0, x.num_valid, num_cols):
        cols = slice(start, min(start + num_cols, x.num_valid))
        yield cols, of_columns(cols)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b: operands in b's dtype, sums and result in fp32 (float64 for float64)."""
    if b.dtype in (torch.float32, torch.float64):
        return a.to(b.dtype) @ b
    if b.is_cuda:
        return torch.mm(a.to(b.dtype), b, out_dtype=torch.float32)
    return product_on_cpu(a, b) if b.dtype == torch.bfloat16 and b.is_cpu else a.float() @ b.float()


@lru_cache(maxsize=1)
def _multiplies_bf16() -> bool:
    """Return whether oneDNN multiplies bf16 numbers here. Torch before 2.9 has no setting for fp32 results."""
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    return hasattr(matmul, "fp32_precision") and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def product_on_cpu(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in fp32 by oneDNN, in half of MKL's time on an AMD EPYC. A CPU with AMX rounds elements to bf16.

    The setting is the process's: a matmul of fp32 that another thread starts in these moments is computed so, too.
    """
    if not _multiplies_bf16():
        return a.float() @ b.float()
    backends: Any = torch.backends
    matmul = backends.mkldnn.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        return a.float() @ b.float()
    finally:
        matmul.fp32_precision = before


def _zeros(*shape: int, like: Tensor) -> Tensor:
    return torch.zeros(shape, dtype=accumulator(like.dtype), device=like.device)


def statistics(
    x: Operands, gather: Callable[[Tensor], Tensor] | None, spec: Spec
) -> tuple[Tensor, list[Tensor]]:
    stats_KN = _zeros(spec.num_rows, x.num_tokens, like=x.hidden)
    stats_KN[0] = -torch.inf
    if spec.want.uniform:
        stats_KN[4] = x.num_valid
    saved, saves = [], _saves_exponentials(x, spec)
    for _, blocks in blocks_of(x, spec, saves):
        for block in blocks:
            z = block.logits()
            _add_block(stats_KN[:, block.rows], z, block, spec)
            if saves:
                saved = [z, stats_KN[0].clone()]
    if spec.want.top_k:
        _write_largest(x, spec, stats_KN[spec.first_top :])
    return stats_KN, saved


def _saves_exponentials(x: Operands, spec: Spec) -> bool:
    if not spec.once or x.num_tokens == 0 or not spec.can_keep_logits(str(x.hidden.dtype)):
        return False
    sizes = memory.Sizes(x.num_tokens, x.hidden.shape[1], x.num_valid, x.hidden.itemsize)
    most = memory.dense_rows(sizes, spec.workspace_bytes, spec.want.uniform)
    return x.num_tokens <= most


def _write_largest(x: Operands, spec: Spec, top_2KN: Tensor) -> None:
    z_NK = x.hidden.new_full((x.num_tokens, spec.want.top_k), -torch.inf, dtype=torch.float32)
    ids_NK = torch.full_like(z_NK, NO_ID, dtype=torch.int64)
    # ``largest`` may copy a block.
    for cols, blocks in blocks_of(x, spec._replace(workspace_bytes=spec.workspace_bytes // 2)):
        for block in blocks:
            z_RC, columns_RC = largest(block.logits(), min(spec.want.top_k, cols.stop - cols.start))
            z_RC = torch.cat((z_NK[block.rows], z_RC), 1)
            ids_RC = torch.cat((ids_NK[block.rows], columns_RC + (x.start + cols.start)), 1)
            z_NK[block.rows], ids_NK[block.rows] = merge_largest(z_RC, ids_RC, spec.want.top_k)
    top_2KN[:] = torch.cat((z_NK, ids_NK.int().view(torch.float32)), 1).t()


def _add_block(stats_KR: Tensor, z: Tensor, block: Block, spec: Spec) -> None:
    """Add a block of logits to the statistics of its rows (online softmax). Overwrites z by exponentials."""
    max_R, sum_R, target_R, *more = stats_KR[: spec.num_stats]
    target_R += torch.where(block.label_R1, z.gather(1, block.column_R1), 0.0)[:, 0]
    if block.columns_RI is not None:
        of_ids_RI = torch.where(block.ids_RI, z.gather(1, block.columns_RI), 0.0)
        stats_KR[spec.first_target : spec.first_top] += of_ids_RI.t()
    new_max = torch.maximum(max_R, z.amax(1))
    # The step is the old maximum minus the new one. If both are -inf (no finite logit yet) it is 0, not NaN.
    step = torch.where(max_R == new_max, 0.0, max_R - new_max)
    if spec.want.uniform:
        below_R, first = more[0], block.cols.start
        if first > 0:
            below_R += torch.where(step == 0, 0.0, -step * first)
        below_R += (new_max[:, None] - z).sum(1)
    scale = step.exp()
    if spec.want.best:
        best_R = stats_KR[spec.best_row].view(torch.int32)
        best_R.copy_(torch.where(new_max > max_R, z.argmax(1) + spec.logits.start + block.cols.start, best_R))
    z -= new_max.clamp(min=FLOOR)[:, None]
    if spec.want.entropy:
        moment_R = more[-1]
        shifted = torch.where(sum_R == 0, 0.0, step * sum_R)
        moment_R.copy_(torch.where(scale == 0, 0.0, scale * (moment_R + shifted)))
        moment_R += torch.where(z == -torch.inf, 0.0, z.exp() * z).sum(1)
    sum_R.copy_(sum_R * scale + z.exp_().sum(1))
    if spec.want.sum_p_squared:
        squares_R = stats_KR[spec.square_row]
        squares_R.copy_(squares_R * scale.square() + z.square_().sum(1))
    max_R.copy_(new_max)


def gradients(
    x: Operands, softmax: Softmax, upstream: Upstream, saved: list[Tensor], grads: Grads, spec: Spec
) -> Gradients:
    """Return d_hidden, d_weight and d_bias; see ``Backend.gradients``.

    A filter keeps ``P p`` at the label and where ``|P p| >= eps |LABEL|`` (``eps |P|`` if LABEL is 0). Elsewhere it drops this
    part of the gradient, but never the LABEL and UNIFORM terms. With compensation the dropped part R [N, V] (gradients with
    respect to ``hidden @ weight.T``) is replaced by ``r_i q_j``: r are R's row sums, q the column sums of |R| divided by their
    total. d_bias is exact. Nothing is dropped if the entropy is differentiated.
    """
    coef_4N = coefficients(upstream, x.ids, spec.vocab_size)
    if saved:
        return _of_exponentials(x, softmax, coef_4N, saved, grads, spec)
    x, coef_4N, divisor = normalised(x, coef_4N)
    gain = 1.0 if divisor is None else divisor
    # Row sums of the dropped R, and column sums of |R|
    dropped = _zeros(x.num_tokens, like=x.hidden), _zeros(x.weight.shape[0], like=x.hidden)

    def gradients_of(blocks: Iterator[Block]) -> Iterator[tuple[Block, Tensor, Tensor, Tensor]]:
        for block in blocks:
            of_ids = None if x.cells is None else x.cells.grad_NI[block.rows]
            whole, kept = _block_gradients(block, softmax, coef_4N, of_ids, spec, dropped)
            yield block, whole, kept if spec.filter.hidden else whole, kept if spec.filter.weight else whole

    parts = ((cols, gradients_of(blocks)) for cols, blocks in blocks_of(x, spec))
    d_hidden, d_weight, d_bias = sums_of_products(x, parts, grads, gain)
    if spec.filter.eps > 0 and spec.filter.compensate:
        _add_compensation(d_hidden, d_weight, dropped, x, grads, spec, gain)
    return wanted_of(x, d_hidden.mul_(gain), d_weight, d_bias.mul_(gain), grads)


def sums_of_products(
    x: Operands, parts: Iterable[tuple[slice, Iterable[tuple[Block, Tensor, Tensor, Tensor]]]], grads: Grads,
    gain: Tensor | float = 1.0, matmul: Callable[[Tensor, Tensor], Tensor] = _matmul,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return sums of d_hidden and d_bias in fp32 (float64), and gain * d_weight in its own dtype.

    ``parts`` yields each range of columns with its blocks; a block comes with its gradients for d_bias, d_hidden and d_weight.
    """
    d_hidden, d_bias = _zeros(*x.hidden.shape, like=x.hidden), _zeros(x.weight.shape[0], like=x.hidden)
    d_weight = torch.zeros_like(x.weight) if grads.weight_out is None else grads.weight_out
    for cols, blocks in parts:
        d_weight_CD = _zeros(*x.weight[cols].shape, like=x.hidden)
        for block, of_bias, of_hidden, of_weight in blocks:
            if grads.want_bias:
                d_bias[cols] += of_bias.sum(0)
            if grads.want_hidden:
                d_hidden[block.rows] += matmul(of_hidden, block.weight_CD)
            if grads.want_weight:
                d_weight_CD += matmul(of_weight.t(), block.hidden_RD)
        if grads.want_weight:
            d_weight[cols] += (d_weight_CD * gain).to(d_weight.dtype)
    return d_hidden, d_weight, d_bias


def wanted_of(x: Operands, d_hidden: Tensor, d_weight: Tensor, d_bias: Tensor, grads: Grads) -> Gradients:
    """Finish d_hidden, and return the gradients that are wanted and not in a buffer."""
    return (
        _finished(d_hidden.to(x.hidden.dtype), x, grads) if grads.want_hidden else None,
        d_weight if grads.want_weight and grads.weight_out is None else None,
        d_bias if grads.want_bias else None,
    )


def _finished(d_hidden: Tensor, x: Operands, grads: Grads) -> Tensor:
    """Write zeros for tokens without a label, store d_hidden where it is wanted, and say that it is ready."""
    d_hidden.masked_fill_(x.ids[:, None] < 0, 0.0)
    if grads.hidden_out is not None:
        d_hidden = grads.hidden_out.copy_(d_hidden)
    if grads.hidden_ready is not None:
        grads.hidden_ready(d_hidden)
    return d_hidden


def _of_exponentials(
    x: Operands, softmax: Softmax, coef_4N: Tensor, saved: list[Tensor], grads: Grads, spec: Spec
) -> Gradients:
    """Return the gradients of tokens whose exponentials exp(z - max) forward has saved. Overwrites them."""
    (_, blocks) = next(blocks_of(x, spec, whole=True))
    block, (grad, max_N) = next(blocks), saved
    slope_N = x.head.multiplier if x.head.factors is None else x.head.factors[:, 0]
    p_coef, label_coef, uniform_coef, _ = (coef_4N * slope_N)[:, :, None].unbind()
    grad.mul_(p_coef * (max_N - softmax.max - softmax.log_sum).exp()[:, None])
    if spec.want.uniform:
        grad += uniform_coef
    _add_to_label(grad, label_coef, block)
    d_hidden = d_weight = d_bias = None
    if grads.want_bias:
        d_bias = torch.zeros(len(x.weight), dtype=grad.dtype, device=grad.device)
        d_bias[block.cols] = grad.sum(0)
    if grads.want_hidden:
        d_hidden = _finished(_matmul(grad, block.weight_CD).to(x.hidden.dtype), x, grads)
    if grads.want_weight:
        d_weight = torch.zeros_like(x.weight) if grads.weight_out is None else grads.weight_out
        if d_weight.dtype == x.hidden.dtype:
            d_weight[block.cols].addmm_(grad.to(x.hidden.dtype).t(), block.hidden_RD)
        else:  # a buffer in fp32
            d_weight[block.cols] += _matmul(grad.t(), block.hidden_RD)
    return d_hidden, d_weight if grads.weight_out is None else None, d_bias


def _add_to_label(grad: Tensor, label_coef: Tensor, block: Block) -> None:
    grad.scatter_(1, block.column_R1, grad.gather(1, block.column_R1) + torch.where(block.label_R1, label_coef, 0.0))


def _block_gradients(
    block: Block, softmax: Softmax, coef_4N: Tensor, of_ids_RI: Tensor | None, spec: Spec,
    sums_of_dropped: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Return a block's gradients with respect to ``hidden @ weight.T + bias``: all, and with dropped ones as 0."""
    p_coef, label_coef, uniform_coef, _ = coef_4N[:, block.rows, None].unbind()
    grad, slope = _softmax_part(block, softmax, coef_4N)
    dropped = None
    if spec.filter.eps > 0 and softmax.entropy is None:
        threshold = spec.filter.eps * torch.where(label_coef != 0, label_coef, p_coef).abs()
        kept = ~(grad.abs() < threshold)  # NaN is kept
        kept.scatter_(1, block.column_R1, kept.gather(1, block.column_R1) | block.label_R1)
        dropped = (grad * slope).masked_fill_(kept, 0.0)
        sums_of_dropped[0][block.rows] += dropped.sum(1)
        sums_of_dropped[1][block.cols] += dropped.abs().sum(0)
    grad += uniform_coef
    _add_to_label(grad, label_coef, block)
    if of_ids_RI is not None:
        grad.scatter_add_(1, block.columns_RI, torch.where(block.ids_RI, of_ids_RI, 0.0))
    whole = grad.mul_(slope)
    return whole, whole if dropped is None else whole - dropped


def _softmax_part(block: Block, softmax: Softmax, coef_4N: Tensor) -> tuple[Tensor, Tensor | float]:
    """Return the P and ENTROPY terms of a block's gradient, and the logits' slope."""
    p_coef, _, _, entropy_coef = coef_4N[:, block.rows, None].unbind()
    z = block.logits()
    slope = block.slope(z)
    log_p = z.sub_(softmax.max[block.rows, None]).sub_(softmax.log_sum[block.rows, None])
    if softmax.entropy is None:
        return log_p.exp_().mul_(p_coef), slope
    p = log_p.exp()
    surprise = torch.where(p == 0, 0.0, p * (log_p + softmax.entropy[block.rows, None]))
    return p_coef * p - entropy_coef * surprise, slope


def _add_compensation(
    d_hidden: Tensor, d_weight: Tensor, dropped: tuple[Tensor, Tensor], x: Operands, grads: Grads, spec: Spec,
    gain: Tensor | float,
) -> None:
    """Add the rank-1 matrix that replaces the dropped gradients.

    Padding rows of the weight are not read: they may hold infinity, and 0 * inf is NaN.
    """
    dropped_N, dropped_V = dropped[0], dropped[1][: x.num_valid]
    total = dropped_V.sum()
    share_V = torch.where(total > 0, dropped_V / total, 0.0)
    if grads.want_hidden and spec.filter.hidden:
        d_hidden.addcmul_(dropped_N[:, None], share_V @ widened(x.weight[: x.num_valid]))
    if grads.want_weight and spec.filter.weight:
        hidden_ND = widened(x.hidden).masked_fill(x.ids[:, None] < 0, 0.0)
        rank_1_VD = share_V[:, None] * (dropped_N @ hidden_ND)
        d_weight[: x.num_valid].add_((rank_1_VD * gain).to(d_weight.dtype))


def losses_alone(x: Operands, spec: Spec) -> tuple[Losses, Softmax, Tensor, list[Tensor]]:
    stats_KN, saved = statistics(x, None, spec)
    return *token_losses(stats_KN[None], x, spec), stats_KN[None], saved


def token_losses(stats_TKN: Tensor, x: Operands, spec: Spec) -> tuple[Losses, Softmax]:
    want, ids_N, stats_TKN = spec.want, x.ids, stats_TKN[:, : spec.num_stats]
    max_TN, sum_TN, target_N = stats_TKN[:, 0], stats_TKN[:, 1], stats_TKN[:, 2].sum(0)
    max_N = max_TN.amax(0)
    # An empty shard or a row of -inf logits has a maximum of -inf, and -inf - -inf would be NaN.
    below_TN = torch.where(max_TN == max_N, 0.0, max_TN - max_N)
    weight_TN = below_TN.exp()
    sum_N = (weight_TN * sum_TN).sum(0)
    log_sum = sum_N.log()
    uniform = entropy = torch.zeros_like(max_N)
    if want.uniform:
        count_TN = stats_TKN[:, 4]
        shift_TN = torch.where(count_TN > 0, -below_TN * count_TN, 0.0)
        uniform = (stats_TKN[:, 3] + shift_TN).sum(0) / spec.vocab_size + log_sum
    if want.entropy:
        moment_TN = torch.where(weight_TN == 0, 0.0, weight_TN * (stats_TKN[:, -1] + below_TN * sum_TN))
        entropy = log_sum - moment_TN.sum(0) / sum_N
    losses = torch.stack((max_N - target_N + log_sum, max_N + log_sum, target_N, uniform, entropy))
    losses = losses.masked_fill_(ids_N == IGNORED, 0.0).masked_fill_(ids_N == OUTSIDE, torch.nan)
    wanted = (True, True, True, want.uniform, want.entropy)
    losses_N = [x.clone() if is_wanted else None for x, is_wanted in zip(losses, wanted, strict=True)]
    mean = count = None
    if want.mean:
        count = (ids_N != IGNORED).sum().clamp(min=1)
        mean = losses[0].sum() / count
    softmax = Softmax(max_N, log_sum, entropy if want.entropy else None)
    return Losses(*losses_N, mean, count), softmax  # type: ignore[arg-type]


def coefficients(upstream: Upstream, ids_N: Tensor, vocab_size: int) -> Tensor:
    *grads, d_mean, count = upstream
    like = next((d for d in (*grads, d_mean) if d is not None), ids_N)
    zeros = _zeros(*ids_N.shape, like=like)
    d_nll, d_lse, d_target, d_uniform, d_entropy = (
        zeros if d is None else d.masked_fill(ids_N < 0, 0.0) for d in grads
    )
    if d_mean is not None and count is not None:
        d_nll = d_nll + (d_mean / count).expand(ids_N.shape).masked_fill(ids_N < 0, 0.0)
    return torch.stack((d_nll + d_lse + d_uniform, d_target - d_nll, d_uniform / -vocab_size, d_entropy))
