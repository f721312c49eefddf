"""Arithmetic of one shard: what a rank computes from its own rows of the head weight. No ranks, no collectives.

The logits of the shard are ``z = softcap * tanh(u / softcap)`` with ``u = logit_scale * (hidden @ weight.T + bias)``
(``z = u`` without a softcap). Rows of the weight at or past ``num_valid`` are padding: logit -inf, gradient exactly 0.

This file holds the records that travel between host functions. ``backends`` names the functions that each of the three
backends has: ``dense`` (plain torch, any device), ``exact`` (the kernels of this folder) and ``filter`` (the same with a
filter). ``memory`` is the arithmetic of ``workspace_bytes``. The table of kernels is in docs/kernels.md.

**Letters** at the end of a tensor's name are its dimensions:

======  ============================================================================================================
letter  counts
======  ============================================================================================================
N       tokens of the call
R       tokens of a group that is worked on together, those with a label first
S       tokens of a sample
D       hidden size
V       rows of the weight on this shard: columns of its logits
F       frequent columns: those that the filter keeps for every token
B       blocks: tiles side by side, of columns or of rows
W       words of 32 columns, a bit each
L       columns that a token's list has room for
M       entries: listed columns of all tokens together
K       numbers kept for a token: statistics, coefficients, planes of partial sums
I       ids of a token whose log-probabilities are asked for
P       parts that a sum is cut into
C       columns of a tile
T       shards of the group
2 to 4  as many rows
======  ============================================================================================================

**Statistics of a shard** are the rows of ``stats_KN`` (a maximum of -inf and zeros where the shard has no valid row):

====  ===========  ====================================================================================
row   name         value
====  ===========  ====================================================================================
0     MAX          m = max_j z_j
1     SUM_EXP      sum_j exp(z_j - m)
2     TARGET       z at the label if the label is a valid row of this shard, else 0
3     SUM_BELOW    sum_j (m - z_j); only where label smoothing is on
4     COUNT        the number of valid rows; only where label smoothing is on
last  SUM_MOMENT   sum_j exp(z_j - m) (z_j - m); only where the entropy is wanted
====  ===========  ====================================================================================

``linear_log_probs`` has up to four more kinds of rows behind these (``extras.py`` merges them), in this order: SUM_SQUARE, the
sum of exp(2 (z_j - m)); BEST, the bits of an int32, the smallest id whose logit is m; I rows with the logits of each token's
ids, 0 where the id is no valid row of this shard; and 2 k rows of bits, the keys of the k largest logits. TARGET is of no use
beside several ids.

**Gradient of a logit** comes from four coefficients per token (rows of ``coef_4N``: ``P``, ``LABEL``, ``UNIFORM``,
``ENTROPY``) and from the merged maximum M and logarithm of the sum L, so that p_j = exp(z_j - M - L) is exact next to any
offset:

    dL/dz_j = P * p_j + LABEL * [j = label] + UNIFORM - ENTROPY * p_j * (log p_j + H)

and dL/du_j is that times 1 - (z_j / softcap)^2.

**Several ids a token.** Then LABEL is 0, and the cells of the ids are overwritten with their whole gradient (``cells.py``),
which comes from the logit that forward saved: no cell is added to.

**Factors of a token** are two numbers, ``a`` and ``b``: ``u = a * (hidden @ weight.T + bias)`` and
``z = b * softcap * tanh(u / softcap)`` (``z = u`` without a softcap). ``logit_scale`` is 1 then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

_T = TypeVar("_T")
FAR_SOFTCAP = 64.0  # models have 30 to 50
IGNORED, OUTSIDE = -1, -2  # stand for a label that is the ignore_index, and for one that is not in the vocabulary


class ShardLogits(NamedTuple):
    """How logits come from hidden states on this shard, as plain values."""

    start: int  # First vocabulary id of the shard; row j of the weight is id ``start + j``
    num_valid: int  # Rows of the weight that are part of the vocabulary; rows from here on are padding
    logit_scale: float = 1.0  # Multiplies the logits
    softcap: float = 0.0  # Bound of the logits, ``softcap * tanh(u / softcap)``; 0 means none
    # Names of the tensors of ``Head`` that there are, with spaces between them. An operator takes these tensors as a list.
    tensors: str = ""

    def named(self, values: Sequence[Any]) -> dict[str, Any]:
        """Return what a list has for each of the head's tensors, by the tensor's name."""
        return dict(zip(self.tensors.split(), values, strict=True))

    def listed(self, **values: _T) -> list[_T | None]:
        """Return what belongs to each of the head's tensors, None where nothing is named, in the order of the list."""
        return [values.get(name) for name in self.tensors.split()]


class Head(NamedTuple):
    """What turns the products ``hidden @ weight.T`` into logits, beside the weight itself. None means absent.

    A kernel takes the record as one argument, and ``head.py`` alone reads it there. Triton compiles a kernel for what is
    absent, so nothing else tells a kernel whether there is a bias.
    """

    bias: torch.Tensor | None = None  # [V] contiguous
    scale: float | None = None  # Multiplies the products and the bias
    softcap: float | None = None
    # 1 if the softcap is above FAR_SOFTCAP, else None. Logits may then be so far below the softcap that tanh must be exact for
    # small arguments: a logit is off by some 1e-7 softcaps otherwise. The exact form takes 5 to 7 % of a step (H200, 2026-11).
    far: int | None = None
    # [N, 2] fp32 contiguous: each token's factors, before and after the softcap. There is no scale beside them.
    factors: torch.Tensor | None = None

    @classmethod
    def of(cls, logits: ShardLogits, **tensors: torch.Tensor | None) -> Head:
        """Return the head that has these tensors."""
        scale = None if logits.logit_scale == 1.0 else logits.logit_scale
        softcap = logits.softcap if logits.softcap > 0.0 else None
        return cls(scale=scale, softcap=softcap, far=1 if logits.softcap > FAR_SOFTCAP else None, **tensors)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that there are, by name."""
        return {name: x for name, x in zip(self._fields, self, strict=True) if isinstance(x, torch.Tensor)}

    @property
    def multiplier(self) -> float:
        """The scale, 1 if there is none."""
        return 1.0 if self.scale is None else self.scale

    def of_columns(self, columns: slice | torch.Tensor) -> Head:
        """Return the head of some columns."""
        return self if self.bias is None else self._replace(bias=self.bias[columns].contiguous())

    def of_tokens(self, rows: slice) -> Head:
        """Return the head of some tokens."""
        return self if self.factors is None else self._replace(factors=self.factors[rows])


class Filter(NamedTuple):
    """The part of the gradient that is dropped; eps = 0 drops nothing. The documented form is ``cce_dist.GradFilter``."""

    eps: float = 0.0
    compensate: bool = True
    hidden: bool = True
    weight: bool = True
    always: bool = False


class Want(NamedTuple):
    """The outputs that a call asks for beside nll, log-sum-exp and target logit, which cost nothing more; a bit each."""

    grad: bool = True  # A backward pass may follow
    uniform: bool = False  # Nll of the uniform distribution, for label smoothing
    entropy: bool = False  # Entropy of the softmax
    filter_stats: bool = False  # Share of logits and mass of the softmax that the filter keeps and drops
    largest: bool = False  # Largest logit
    sum_p_squared: bool = False  # Sum of the squared probabilities
    best: bool = False  # Id of the largest logit
    top_k: int = 0  # How many of the largest logits, with their ids
    mean: bool = False  # Mean of nll over the labels that are not ignored


class Spec(NamedTuple):
    """The task of a shard: plain numbers, the same in forward and backward."""

    logits: ShardLogits
    vocab_size: int
    ignore_index: int = -100
    filter: Filter = Filter()
    want: Want = Want()
    workspace_bytes: int = 256 << 20
    num_ids: int = 1  # I, the ids of a token; 1: its label
    invariant: bool = False  # A token's outputs have the same bits whichever other tokens are in the call
    alone: bool = False  # d_hidden is not summed over ranks, so nobody waits for it while d_weight is computed

    @property
    def num_stats(self) -> int:
        """The number of statistics of a token that the loss has."""
        return 3 + 2 * self.want.uniform + self.want.entropy

    def can_keep(self, dtype: str) -> bool:
        """Whether exponentials can be kept from forward to backward, for hidden states of this dtype.

        Not in fp16, whose exponent is too short, nor in fp32, whose precision they would cost. Not where the gradient is no
        multiple of exp(z) plus a number of the token: label smoothing or an entropy under a softcap, whose slope is another
        factor, and label smoothing of tokens with factors. Not where a token's bits may not depend on other tokens.
        """
        want, has_slope = self.want, self.logits.softcap > 0.0
        has_other_terms = (want.uniform and (has_slope or self.factors)) or (want.entropy and has_slope)
        return want.grad and dtype == "torch.bfloat16" and not has_other_terms and not self.invariant

    @property
    def factors(self) -> bool:
        """Whether each token has factors of its own."""
        return "factors" in self.logits.tensors.split()

    @property
    def several(self) -> bool:
        """Whether a token has more ids than its label."""
        return self.num_ids > 1

    @property
    def square_row(self) -> int:
        """The row of the statistics that is SUM_SQUARE, where that is wanted."""
        return self.num_stats

    @property
    def best_row(self) -> int:
        """The row of the statistics that is BEST, where that is wanted."""
        return self.num_stats + self.want.sum_p_squared

    @property
    def first_target(self) -> int:
        """The row of the statistics where the logits of several ids begin."""
        return self.best_row + self.want.best

    @property
    def first_top(self) -> int:
        """The row of the statistics where the keys of the largest logits begin."""
        return self.first_target + (self.num_ids if self.several else 0)

    @property
    def num_rows(self) -> int:
        """K, the number of statistics per token, including the rows that ``linear_log_probs`` adds."""
        return self.first_top + 2 * self.want.top_k


class Rows(NamedTuple):
    """A group of tokens in compact order: those with a label first."""

    index: torch.Tensor  # [R] int32: the tokens
    num_kept: torch.Tensor  # [1] int32: the number of them that have a label, on the device
    hidden: torch.Tensor  # [R, D]: their hidden states, where these have been gathered


class Cells(NamedTuple):
    """The logits of several ids of each token."""

    ids_NI: torch.Tensor  # int64, in the whole vocabulary; negative: none. In backward an id stands once in a row.
    target_NI: torch.Tensor | None = None  # In backward: their logits, fp32
    grad_NI: torch.Tensor | None = None  # In backward: the gradients of their log-probabilities, fp32


class Operands(NamedTuple):
    """The tensors that logits are made of, and the labels."""

    hidden: torch.Tensor  # [N, D] contiguous; fp32, bf16 or fp16
    weight: torch.Tensor  # [V, D] contiguous, the same dtype
    head: Head
    # [N] int64, label ids in the whole vocabulary; IGNORED and OUTSIDE are negative. With several ids a token: any one of
    # them that is in it.
    ids: torch.Tensor
    start: int  # As in ``ShardLogits``
    num_valid: int  # Likewise
    cells: Cells | None = None  # Several ids of each token, or None
    order: list[torch.Tensor] | None = None  # ``tokens.compact`` of ids, where that has been made with them

    @classmethod
    def of(
        cls, hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, logits: ShardLogits,
        **tensors: torch.Tensor | None,
    ) -> Operands:
        """Return the operands of a shard whose logits come as ``logits`` says, with these tensors of the head."""
        return cls(hidden, weight, Head.of(logits, **tensors), ids, logits.start, logits.num_valid)

    @property
    def num_tokens(self) -> int:
        return self.ids.shape[0]

    @property
    def requires_grad(self) -> bool:
        return any(x.requires_grad for x in (self.hidden, self.weight, *self.head.tensors.values()))

    def of_tokens(self, rows: slice, hidden: torch.Tensor) -> Operands:
        """Return the operands of some of the tokens, whose hidden states are given."""
        cells = self.cells
        return self._replace(
            hidden=hidden, head=self.head.of_tokens(rows), ids=self.ids[rows],
            cells=None if cells is None else Cells(cells.ids_NI[rows]), order=None,
        )


class Softmax(NamedTuple):
    """Statistics of the whole vocabulary, [N] fp32 each: the log-sum-exp is ``max + log_sum``, kept apart for exactness.

    ``entropy`` is None where it is not differentiated. Kernels take the record as one argument, and Triton compiles a kernel
    again if an address inside a record is not a multiple of 16. So each tensor is an allocation of its own, or a slice that
    starts at a multiple of four tokens.
    """

    max: torch.Tensor
    log_sum: torch.Tensor
    entropy: torch.Tensor | None = None


class Grads(NamedTuple):
    """The gradients that backward is asked for, and where they go."""

    want_hidden: bool = True  # Compute d_hidden
    want_weight: bool = True  # Compute d_weight
    want_bias: bool = True  # Compute d_bias
    weight_out: torch.Tensor | None = None  # [V, D] buffer that d_weight is added to instead of being returned, or None
    # Called with d_hidden as soon as it is whole on the current stream
    hidden_ready: Callable[[torch.Tensor], None] | None = None
    # Call ``hidden_ready`` before that with the first ``ready_rows`` rows, then with twice as many, and so on, each as soon
    # as they are final, if tokens are split. None: with all rows alone.
    ready_rows: int | None = None
    hidden_out: torch.Tensor | None = None  # [N, D] storage that d_hidden is written to and returned in, or None
    often_empty: bool = False  # Often no token has a label: launches then end at once, and d_weight need not be written
    # [V, D] int8: what d_weight in bf16 leaves of a sum that calls before began and others go on with, or None
    weight_low: torch.Tensor | None = None


Gradients = tuple["torch.Tensor | None", "torch.Tensor | None", "torch.Tensor | None"]  # of hidden, weight and bias
