"""Log-softmax over a list of ids per token: the entries of all lists, their gradients, and the backend in plain torch.

An entry is an id in a token's list. After the entries of all lists there is one more entry per token, for its own id (its
label), which is not used if the list holds the id. With z the logits, k the ids of a token's list, y its own id, and G, L and E
the gradients of ``log p_y = z_y - lse``, of ``lse = log sum_k exp z_k``, and of the entropy H over the list,

    dL/dz_k = (L - G) p_k + G [k = y] - E p_k (log p_k + H)        p_k = exp(z_k - lse); 0 for an own id outside its list

A shard has the entries whose ids it holds. One sort by column, then token, finds ids that a list repeats (they count once), and
gives each column its tokens in a fixed order, in which sums are made.

``kept_rows`` has both as Triton kernels. The versions here read the lengths of lists, so they wait for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from cce_dist.kernels import Gradients, Grads, Operands, ShardLogits, Softmax, Spec

LEAST_ELEMENTS = 1 << 16  # fewest elements of a block of rows, whatever the budget
LIVE_BYTES = 20  # per element of a block: weight and hidden states, both again in fp32, and products


class KeptLists(NamedTuple):
    """The entries of a shard: L entries of lists, then N of the tokens' own ids; M = L + N.

    Attributes:
        begin_N1: [N + 1] int32: index of the first entry of each token's list; the last number is L.
        token_M: [M] int32: the token of each entry.
        column_M: [M] int32: the shard's column; -1 if the shard does not hold the id, or an earlier entry of the token does.
        order_M: [M] int64: the entries sorted by column, then by token; entries without a column come last.
        first_V1: [columns + 1] int32: index in ``order_M`` of each column's first entry.
    """

    begin_N1: Tensor
    token_M: Tensor
    column_M: Tensor
    order_M: Tensor
    first_V1: Tensor

    @property
    def num_listed(self) -> int:
        return self.token_M.shape[0] - self.begin_N1.shape[0] + 1

    def is_own(self, x: Operands) -> Tensor:
        """Return whether each entry is its token's own id. -> [M] bool."""
        return (self.column_M >= 0) & (self.column_M + x.start == x.ids[self.token_M])


def rising(offsets_N1: Tensor, num_listed: int) -> Tensor:
    """Return the offsets with invalid values replaced, so that they rise from 0 to ``num_listed``."""
    inner = offsets_N1[1:-1].clamp(0, num_listed).cummax(0).values
    ends = torch.full_like(offsets_N1[:1], num_listed)
    return torch.cat((torch.zeros_like(ends), inner, ends))[: offsets_N1.shape[0]]


def token_of_entries(begin_N1: Tensor, num_listed: int) -> Tensor:
    """Return the token of each entry of the lists. [N + 1] -> [L] int64."""
    places = torch.arange(num_listed, dtype=begin_N1.dtype, device=begin_N1.device)
    return torch.searchsorted(begin_N1, places, right=True) - 1


def lists_of(begin_N1: Tensor, token_L: Tensor, kept_L: Tensor, ids_N: Tensor, logits: ShardLogits) -> KeptLists:
    """Return the entries of a shard. Tokens with a negative own id have no entries."""
    num_tokens = ids_N.shape[0]
    token_M = torch.cat((token_L, torch.arange(num_tokens, device=ids_N.device)))
    column_M = torch.cat((kept_L, ids_N)) - logits.start
    here_M = (ids_N[token_M] >= 0) & (column_M >= 0) & (column_M < logits.num_valid)
    key_M, order_M = (torch.where(here_M, column_M, logits.num_valid) * num_tokens + token_M).sort(stable=True)
    repeated_M = torch.zeros_like(here_M)
    repeated_M[order_M[1:]] = key_M[1:] == key_M[:-1]
    edges_V1 = torch.arange(logits.num_valid + 1, device=ids_N.device) * num_tokens
    first_V1 = torch.searchsorted(key_M, edges_V1, out_int32=True)
    column_M = torch.where(here_M & ~repeated_M, column_M, -1).int()
    return KeptLists(begin_N1.int(), token_M.int(), column_M, order_M, first_V1)


def entry_gradients(x: Operands, lists: KeptLists, z_M: Tensor, softmax: Softmax, coef_4N: Tensor) -> Tensor:
    """Return the gradients of ``hidden @ weight.T + bias`` at the entries, 0 for entries without a column. -> [M] fp32."""
    head = x.head
    assert head.factors is not None
    token_M = lists.token_M.long()
    coef_4M = coef_4N[:, token_M]
    log_p = (z_M - softmax.max[token_M]).sub_(softmax.log_sum[token_M])
    log_p[lists.num_listed :] = -torch.inf
    p = log_p.exp()
    grad = coef_4M[0] * p
    grad += torch.where(lists.is_own(x), coef_4M[1], 0.0)
    if softmax.entropy is not None:
        # Avoid 0 * -inf = NaN where p underflows.
        grad -= coef_4M[3] * torch.where(p == 0, 0.0, p * (log_p + softmax.entropy[token_M]))
    before, after = head.factors[token_M].unbind(1)
    if head.softcap is not None:
        grad *= after * (1 - (z_M / (after * head.softcap)).square())
    return torch.where(lists.column_M >= 0, grad * before, 0.0)


def statistics(x: Operands, lists: KeptLists, spec: Spec) -> tuple[Tensor, Tensor]:
    """Return the loss's rows of ``stats_KN``, computed over the lists, and the entries' logits (-inf: no column)."""
    z_M = torch.full(lists.column_M.shape, -torch.inf, dtype=torch.float32, device=x.hidden.device)
    for block in _blocks(z_M.shape[0] if x.num_valid else 0, x, spec):
        z_M[block] = _logits(x, lists, block)
    z_L, z_N, own_M = z_M[: lists.num_listed], z_M[lists.num_listed :], lists.is_own(x)
    token_L = lists.token_M[: lists.num_listed]

    def over_lists(values_L: Tensor, reduce: str, initial: float) -> Tensor:
        return _reduced(values_L, reduce, lists.begin_N1, initial)

    max_N = over_lists(z_L, "max", -torch.inf)
    below_L = torch.where(z_L == -torch.inf, 0.0, z_L - max_N[token_L])
    exp_L = torch.where(z_L == -torch.inf, 0.0, below_L.exp())
    own_L, unlisted_N = own_M[: lists.num_listed], own_M[lists.num_listed :]
    target_N = over_lists(torch.where(own_L, z_L, 0.0), "sum", 0.0) + torch.where(unlisted_N, z_N, 0.0)
    rows = [max_N, over_lists(exp_L, "sum", 0.0), target_N]
    if spec.want.entropy:
        rows.append(over_lists(exp_L * below_L, "sum", 0.0))
    return torch.stack(rows), z_M


def _reduced(values: Tensor, reduce: str, offsets: Tensor, initial: float) -> Tensor:
    """Reduce the values of each segment between two offsets, in order. [M, ...], [S + 1] -> [S, ...]."""
    if offsets.shape[0] == 1 or values.shape[0] == 0:
        return values.new_full((offsets.shape[0] - 1, *values.shape[1:]), initial)
    return torch.segment_reduce(values, reduce, offsets=offsets.long(), initial=initial, unsafe=True)


def _blocks(count: int, x: Operands, spec: Spec) -> Iterator[slice]:
    """Cut ``count`` entries into blocks whose rows fit in the budget."""
    size = max(1, max(LEAST_ELEMENTS, spec.workspace_bytes // LIVE_BYTES) // x.hidden.shape[1])
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def _weight_rows(x: Operands, column: Tensor) -> Tensor:
    """Return the weight's row of each column in fp32; zeros for entries without a column."""
    return x.weight[column.clamp(min=0)].float().masked_fill_(column[:, None] < 0, 0.0)


def _logits(x: Operands, lists: KeptLists, block: slice) -> Tensor:
    head = x.head
    assert head.factors is not None
    token, column = lists.token_M[block], lists.column_M[block]
    z = (x.hidden[token].float() * _weight_rows(x, column)).sum(1)
    if head.bias is not None:
        z += head.bias[column.clamp(min=0)].float()
    before, after = head.factors[token].unbind(1)
    z *= before
    if head.softcap is not None:
        z = (z / head.softcap).tanh() * head.softcap * after
    return z.masked_fill_(column < 0, -torch.inf)


def gradients(x: Operands, lists: KeptLists, grad_M: Tensor, grads: Grads, spec: Spec) -> Gradients:
    """Return d_hidden, d_weight and d_bias from the entries' gradients."""
    d_hidden = d_weight = d_bias = None
    if grads.want_hidden:
        d_hidden = _d_hidden(x, lists, grad_M, spec).to(x.hidden.dtype)
        if grads.hidden_ready is not None:
            grads.hidden_ready(d_hidden)
    if grads.want_weight:
        d_weight = torch.zeros_like(x.weight) if grads.weight_out is None else grads.weight_out
        _add_d_weight(d_weight, x, lists, grad_M, spec)
    if grads.want_bias:
        d_bias = torch.zeros(x.weight.shape[0], dtype=torch.float32, device=grad_M.device)
        d_bias[: x.num_valid] = _reduced(grad_M[lists.order_M], "sum", lists.first_V1, 0.0)
    return d_hidden, d_weight if grads.weight_out is None else None, d_bias


def _d_hidden(x: Operands, lists: KeptLists, grad_M: Tensor, spec: Spec) -> Tensor:
    total = torch.zeros(x.hidden.shape, dtype=torch.float32, device=x.hidden.device)
    if x.num_valid == 0:
        return total
    for block in _blocks(lists.num_listed, x, spec):
        rows = _weight_rows(x, lists.column_M[block]).mul_(grad_M[block, None])
        first, last = int(lists.token_M[block.start]), int(lists.token_M[block.stop - 1])
        offsets = (lists.begin_N1[first : last + 2] - block.start).clamp(0, rows.shape[0])
        total[first : last + 1] += _reduced(rows, "sum", offsets, 0.0)
    for tokens in _blocks(x.num_tokens, x, spec):
        own = slice(lists.num_listed + tokens.start, lists.num_listed + tokens.stop)
        total[tokens] += _weight_rows(x, lists.column_M[own]).mul_(grad_M[own, None])
    return total


def _add_d_weight(d_weight: Tensor, x: Operands, lists: KeptLists, grad_M: Tensor, spec: Spec) -> None:
    """Add each column's sum to its row, rounded once: a block's last column may continue in the next block."""
    column, carried = -1, torch.zeros(x.hidden.shape[1], dtype=torch.float32, device=x.hidden.device)
    for block in _blocks(int(lists.first_V1[-1]), x, spec):
        entry = lists.order_M[block]
        rows = x.hidden[lists.token_M[entry]].float().mul_(grad_M[entry, None])
        places = torch.arange(block.start, block.stop, dtype=torch.int32, device=entry.device)
        columns, counts = torch.unique_consecutive(
            torch.searchsorted(lists.first_V1, places, right=True) - 1, return_counts=True
        )
        sums = _reduced(rows, "sum", torch.cat((counts.new_zeros(1), counts.cumsum(0))), 0.0)
        if int(columns[0]) == column:
            sums[0] += carried
        elif column >= 0:
            d_weight[column] += carried.to(d_weight.dtype)
        d_weight[columns[:-1]] += sums[:-1].to(d_weight.dtype)
        column, carried = int(columns[-1]), sums[-1]
    if column >= 0:
        d_weight[column] += carried.to(d_weight.dtype)
