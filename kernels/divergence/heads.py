"""Divergence of two heads: formulas, records, and the merge of statistics over shards.

p is the student's softmax and t the teacher's. The leading head is the one whose softmax the expectation is taken over.

kind       value of a token                     as sums                          gradient of a student's logit
forward    KL(t || p)                           E_t[z_t - z_s] - lse_t + lse_s   p_j - t_j
reverse    KL(p || t)                           E_p[z_s - z_t] - lse_s + lse_t   p_j (log p_j - log t_j - KL(p || t))
jsd        b KL(t || m) + (1 - b) KL(p || m)    two, once both lse are known     (1 - b) p_j (log p_j - log m_j - KL(p || m))
tv         1 - o                                sum_j max(t_j - p_j, 0), and u   u p_j - [p_j < t_j] p_j
lk         -log o                               log o, and log u                 (u / o) p_j - [p_j < t_j] p_j / o

with m = b t + (1 - b) p, as generalized knowledge distillation (Agarwal et al., 2023, equation 1) and TRL's GKDTrainer define
it; o = sum_j min(p_j, t_j), the probability that speculative decoding accepts a token of the student (*LK Losses*, Samarin et
al., 2026, arXiv:2602.23881); and u = sum_j [p_j < t_j] p_j. Where p_j = t_j, the gradient is the one of p_j > t_j. For nearly
equal heads 1 - o would be off by a rounding of 1, so "tv" sums the differences. For heads with little in common o and u
underflow, so "lk" takes log-sum-exps; its value is off by a rounding of 1 for equal heads. The teacher has no gradient.

**Statistics of a shard** are the rows of ``stats_5N``: for the student MAX_S, the maximum of its logits (-inf: no valid row),
and SUM_S, the sum of exp(z_sj - MAX_S); MAX_T and SUM_T for the teacher; and MOMENT, 0 for kinds with a second pass. MOMENT is
relative to both maxima, so large logits cost no precision: with a the leading head and b the other,
``sum_j exp(a_j - max_a) ((a_j - max_a) - (b_j - max_b))``. If maxima grow by ``drop``, ``merge`` and the kernels update it:

    MOMENT <- exp(-drop_a) (MOMENT - (drop_a - drop_b) SUM_a)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from cce_dist.kernels import Operands, ShardLogits
from cce_dist.kernels.memory import Sizes

KINDS = ("forward", "reverse", "jsd", "tv", "lk")
Merge = Callable[[Tensor], Tensor]  # merges the stats_5N of some tokens over all shards
Sums = tuple[Tensor, Tensor | None, list[Tensor]]  # merged stats_5N; this shard's sums_2N of a second pass; kept logits
# Bytes of two heads' logits at one token and column in ``PairLogits``, and of their gradient if it needs its own memory, by the
# dtype of hidden states; 8 for any other dtype.
PAIR_BYTES = {torch.bfloat16: 4, torch.float16: 10}


class Heads(NamedTuple):
    """The operands of both heads, whose shards hold the same ids. Tokens with a negative id do not count."""

    student: Operands
    teacher: Operands

    @property
    def sizes(self) -> Sizes:
        student = self.student
        return sizes_of(student.num_tokens, student.hidden, student.num_valid, self.teacher.hidden)


def sizes_of(num_tokens: int, hidden: Tensor, num_columns: int, teacher_hidden: Tensor) -> Sizes:
    return Sizes(
        num_tokens, hidden.shape[1], num_columns, hidden.itemsize, teacher_hidden.shape[1],
        PAIR_BYTES.get(hidden.dtype, 8),
    )  # fmt: skip


class Divergence(NamedTuple):
    """Options of one shard's computation, as plain values. Forward and backward take the same ones."""

    student: ShardLogits  # How the student's logits are computed from its hidden states
    teacher: ShardLogits  # How the teacher's logits are computed; ``num_valid`` equals the student's
    kind: str = "forward"  # One of KINDS
    beta: float = 0.5  # The teacher's weight in the mixture, for "jsd"; float64, so that 1 - beta is exact
    workspace_bytes: int = 256 << 20  # The budget; 0: chosen from the shapes
    grad: bool = True  # A backward pass may follow

    @property
    def rest(self) -> float:
        """The student's weight in the mixture. In fp32 ``1 - beta`` would lose the digits of a beta near 1."""
        return 1.0 - self.beta

    def can_keep(self, dtype: str) -> bool:
        """Whether logits can be saved from forward to backward: only in bf16."""
        return self.grad and dtype == "torch.bfloat16"

    @property
    def empty_sum(self) -> float | None:
        """Both sums of a second pass over no columns. None: the kind takes one pass over the logits."""
        return {"jsd": 0.0, "tv": 0.0, "lk": -torch.inf}.get(self.kind)


class Pair(NamedTuple):
    """Statistics of the whole vocabulary, [N] fp32 each. Log-sum-exps are ``max + log_sum``; their sums would round."""

    max_s: Tensor
    log_sum_s: Tensor
    max_t: Tensor
    log_sum_t: Tensor
    offset: Tensor  # KL(p || t) for "reverse", KL(p || m) for "jsd", u for "tv", u / o for "lk"
    log_overlap: Tensor | None = None  # log o for "lk", but 0 if o is 0; 0 for "tv"


def merge(stats_T5N: Tensor, spec: Divergence) -> Tensor:
    """Merge the statistics of shards in rank order, so that every rank computes the same bits. [T, 5, N] -> [5, N]."""
    max_T2N = stats_T5N[:, 0:3:2]
    max_2N = max_T2N.amax(0)
    # An empty shard or a row of -inf logits has a maximum of -inf, and -inf - -inf would be NaN.
    below_T2N = torch.where(max_T2N == max_2N, 0.0, max_T2N - max_2N)
    weight_T2N = below_T2N.exp()
    sum_T2N = stats_T5N[:, 1:4:2]
    sum_2N = (weight_T2N * sum_T2N).sum(0)
    lead = 0 if spec.kind == "reverse" else 1  # the leading head: 0 is the student
    between_TN = below_T2N[:, lead] - below_T2N[:, 1 - lead]
    moved_TN = weight_T2N[:, lead] * (stats_T5N[:, 4] + between_TN * sum_T2N[:, lead])
    # A shard that underflows or is empty adds 0, even if its moment is infinite.
    moved_TN = torch.where((weight_T2N[:, lead] == 0) | (sum_T2N[:, lead] == 0), 0.0, moved_TN)
    return torch.stack((max_2N[0], sum_2N[0], max_2N[1], sum_2N[1], moved_TN.sum(0)))


def pair_of(merged_5N: Tensor, spec: Divergence) -> Pair:
    """Return the statistics for a second pass or for backward. The offset is 0 if the second pass computes it."""
    max_s, sum_s, max_t, sum_t, moment = merged_5N
    log_sum_s, log_sum_t = sum_s.log(), sum_t.log()
    if spec.kind == "forward":
        value = moment / sum_t - log_sum_t + log_sum_s
    elif spec.kind == "reverse":
        value = moment / sum_s - log_sum_s + log_sum_t
    else:
        value = torch.zeros_like(moment)
    return Pair(max_s, log_sum_s, max_t, log_sum_t, value)


def complete(pair: Pair, sums_T2N: Tensor, spec: Divergence) -> tuple[Tensor, Pair]:
    """Return each token's value, and the statistics for backward, from all shards' sums of a second pass."""
    if spec.kind == "lk":
        log_o, log_u = sums_T2N.logsumexp(0)
        log_overlap = torch.where(log_o == -torch.inf, 0.0, log_o)
        return -log_o, pair._replace(offset=(log_u - log_overlap).exp(), log_overlap=log_overlap)
    first, offset = sums_T2N.sum(0)
    if spec.kind == "tv":
        # Rounding may lift the sum above 1.
        return first.clamp(max=1.0), pair._replace(offset=offset, log_overlap=torch.zeros_like(offset))
    return spec.beta * first + spec.rest * offset, pair._replace(offset=offset)


FARTHEST = 80.0  # nats: bound on log t - log p, beyond which the smaller one does not matter


def above_mixture(log_q: Tensor, log_other: Tensor, own: float, others: float) -> Tensor:
    """Return log q - log m for m = own * q + others * other, weights whose sum is 1.

    It is exactly 0 for q = other, and cannot overflow. Where m is much smaller than q, log1p would lose the digits of ``own``.
    """
    apart = (log_other - log_q).clamp(max=FARTHEST)
    change = others * torch.expm1(apart)
    return -torch.where(change > -0.5, change.log1p(), (own + others * apart.exp()).log())
