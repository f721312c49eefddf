"""Arithmetic of one shard: what a rank computes from its own rows of the head weight. No ranks, no collectives.

The logits of the shard are ``z = softcap * tanh(u / softcap)`` with ``u = logit_scale * (hidden @ weight.T + bias)``
(``z = u`` without a softcap). Rows of the weight at or past ``num_valid`` are padding: logit -inf, gradient exactly 0.

``backends`` names the functions of the three backends: ``dense`` (plain torch, any device), ``exact`` (the kernels of this
folder, see docs/kernels.md) and ``filter`` (with a gradient filter). ``memory`` decides what fits in ``workspace_bytes``.

**Letters** at the end of a tensor's name are its dimensions:

N       tokens of the call
R       tokens of a group that is processed together, labelled tokens first
S       tokens of a sample
D       hidden size
V       rows of the weight on this shard: columns of its logits
F       frequent columns: the filter keeps them for every token
B       blocks of columns or of rows
W       words of 32 columns, a bit each
L       capacity of a token's list, in columns
M       entries: listed columns of all tokens together
K       numbers kept for a token: statistics, coefficients, planes of partial sums
I       ids of a token whose log-probabilities are asked for
P       parts that a sum is cut into
C       columns of a tile
T       shards of the group
2 to 4  that many rows

**Statistics of a shard** are the rows of ``stats_KN`` (a maximum of -inf and zeros where the shard has no valid row):

row   name         value
0     MAX          m = max_j z_j
1     SUM_EXP      sum_j exp(z_j - m)
2     TARGET       z at the label if the label is a valid row of this shard, else 0
3     SUM_BELOW    sum_j (m - z_j); only where label smoothing is on
4     COUNT        the number of valid rows; only where label smoothing is on
last  SUM_MOMENT   sum_j exp(z_j - m) (z_j - m); only where the entropy is wanted

``linear_log_probs`` appends up to four kinds of rows (``outputs.py`` merges them), in this order: SUM_SQUARE, the sum of
exp(2 (z_j - m)); BEST, the bits of an int32, the smallest id whose logit is m; I rows with the logits of each token's ids,
0 where the id is no valid row of this shard; and 2 k rows, the k largest logits and the bits of their ids, int32.

**Gradient of a logit** comes from four coefficients per token (rows of ``coef_4N``: ``P``, ``LABEL``, ``UNIFORM``,
``ENTROPY``), the merged maximum M and the logarithm L of the merged sum. M and L stay separate, so that
p_j = exp(z_j - M - L) is accurate however large the logits are:

    dL/dz_j = P * p_j + LABEL * [j = label] + UNIFORM - ENTROPY * p_j * (log p_j + H)

and dL/du_j is that times 1 - (z_j / softcap)^2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

_T = TypeVar("_T")
FAR_SOFTCAP = 64.0  # models have 30 to 50
IGNORED, OUTSIDE = -1, -2  # stand for the ignore_index, and for a label outside the vocabulary


class ShardLogits(NamedTuple):
    """How this shard turns hidden states into logits, as plain values."""

    start: int  # First vocabulary id of the shard; row j of the weight is id ``start + j``
    num_valid: int  # Rows of the vocabulary; rows of the weight from here on are padding
    logit_scale: float = 1.0  # Multiplies the logits
    softcap: float = 0.0  # Bound of the logits, ``softcap * tanh(u / softcap)``; 0 means none
    # Names of the tensors that ``Head`` has here, separated by spaces. An operator takes these tensors as a list.
    tensors: str = ""

    def named(self, values: Sequence[Any]) -> dict[str, Any]:
        if not self.tensors:
            return {}
        return dict(zip(self.tensors.split(), values, strict=True))

    def listed(self, **values: _T) -> list[_T | None]:
        """Return the values given by name in the order of ``tensors``; None for a name that is not given."""
        return [values.get(name) for name in self.tensors.split()]


class Head(NamedTuple):
    """The parameters that turn products ``hidden @ weight.T`` into logits. None means absent.

    Triton compiles a kernel again for each set of absent fields, so no flag says whether there is a bias.
    """

    bias: torch.Tensor | None = None  # [V] contiguous
    scale: float | None = None  # Multiplies the products and the bias
    softcap: float | None = None
    # 1 if the softcap is above FAR_SOFTCAP, else None. Logits may then be so far below the softcap that tanh must be exact for
    # small arguments: a logit is off by some 1e-7 softcaps otherwise.
    far: int | None = None
    # [N, 2] fp32 contiguous: each token's factors, before and after the softcap. ``scale`` is None then.
    factors: torch.Tensor | None = None

    @classmethod
    def of(cls, logits: ShardLogits, **tensors: torch.Tensor | None) -> Head:
        """Return the head with the scale and softcap of ``logits`` and these tensors."""
        scale = None if logits.logit_scale == 1.0 else logits.logit_scale
        softcap = logits.softcap if logits.softcap > 0.0 else None
        return cls(scale=scale, softcap=softcap, far=1 if logits.softcap > FAR_SOFTCAP else None, **tensors)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The fields that are tensors, by name."""
        return {name: x for name, x in zip(self._fields, self, strict=True) if isinstance(x, torch.Tensor)}

    @property
    def multiplier(self) -> float:
        """The scale, 1 if there is none."""
        return 1.0 if self.scale is None else self.scale

    def of_columns(self, columns: slice | torch.Tensor) -> Head:
        return self if self.bias is None else self._replace(bias=self.bias[columns].contiguous())

    def of_tokens(self, rows: slice) -> Head:
        return self if self.factors is None else self._replace(factors=self.factors[rows])


class Filter(NamedTuple):
    """Options of the gradient filter, documented at ``cce_dist.GradFilter``. eps = 0 drops nothing."""

    eps: float = 0.0
    compensate: bool = True
    hidden: bool = True
    weight: bool = True
    always: bool = False


class Want(NamedTuple):
    """The outputs of a call that are wanted."""

    grad: bool = True  # A backward pass may follow
    uniform: bool = False  # Nll of the uniform distribution, for label smoothing
    entropy: bool = False  # Entropy of the softmax
    largest: bool = False  # Largest logit
    sum_p_squared: bool = False  # Sum of the squared probabilities
    best: bool = False  # Id of the largest logit
    top_k: int = 0  # How many of the largest logits, with their ids
    mean: bool = False  # Mean of nll over the labels that are not ignored
    tokens: bool = True  # Nll, log-sum-exp and target logit of each token

    def of_tokens(self) -> Want:
        """Return the same outputs, but each token's loss in place of the mean."""
        return self._replace(mean=False, tokens=True)


class Spec(NamedTuple):
    """Sizes and options of one shard's computation, as plain values. Forward and backward take the same ones."""

    logits: ShardLogits
    vocab_size: int
    ignore_index: int = -100
    filter: Filter = Filter()
    want: Want = Want()
    workspace_bytes: int = 256 << 20
    num_ids: int = 1  # I, the number of ids per token; 1: its label
    invariant: bool = False  # A token's bits do not depend on the other tokens
    alone: bool = False  # No rank waits for d_hidden, because it is not summed over ranks
    once: bool = False  # One backward follows at once, so it may overwrite what forward saves

    @property
    def num_stats(self) -> int:
        """The number of statistics per token that the loss needs."""
        return 3 + 2 * self.want.uniform + self.want.entropy

    def can_keep(self, dtype: str) -> bool:
        """Whether exponentials can be kept for backward: only in bf16. fp16's exponent is too short; fp32 would lose digits."""
        want, has_slope = self.want, self.logits.softcap > 0.0
        has_other_terms = (want.uniform and (has_slope or self.factors)) or (want.entropy and has_slope)
        return want.grad and dtype == "torch.bfloat16" and not has_other_terms and not self.invariant

    def can_keep_logits(self, dtype: str) -> bool:
        """Whether plain torch can turn exponentials into gradients: not in fp16 (underflow), nor where logits are needed."""
        wide = dtype != "torch.float16"
        return self.want.grad and wide and not self.want.entropy and self.logits.softcap == 0.0 and self.filter.eps == 0

    @property
    def factors(self) -> bool:
        return "factors" in self.logits.tensors.split()

    @property
    def several(self) -> bool:
        """Whether a token has several ids instead of one label."""
        return self.num_ids > 1

    @property
    def square_row(self) -> int:
        return self.num_stats

    @property
    def best_row(self) -> int:
        return self.num_stats + self.want.sum_p_squared

    @property
    def first_target(self) -> int:
        return self.best_row + self.want.best

    @property
    def first_top(self) -> int:
        return self.first_target + (self.num_ids if self.several else 0)

    @property
    def num_rows(self) -> int:
        """K, the number of statistics per token, including the rows that ``linear_log_probs`` adds."""
        return self.first_top + 2 * self.want.top_k


class Rows(NamedTuple):
    """A group of tokens in compact order: labelled tokens first."""

    index: torch.Tensor  # [R] int32: indices of the tokens
    num_labelled: torch.Tensor  # int32: its first element counts those with a label
    hidden: torch.Tensor  # [R, D]: buffer for the hidden states of these tokens


class Cells(NamedTuple):
    """The logits of several ids of each token."""

    ids_NI: torch.Tensor  # int64, in the whole vocabulary; negative: no id. In backward no row repeats an id.
    target_NI: torch.Tensor | None = None  # In backward: the logits of the ids, fp32
    grad_NI: torch.Tensor | None = None  # In backward: gradients of log-probabilities, fp32


class Operands(NamedTuple):
    """The tensors that logits are computed from, and the labels."""

    hidden: torch.Tensor  # [N, D] contiguous; fp32, bf16 or fp16
    weight: torch.Tensor  # [V, D] contiguous, the same dtype
    head: Head
    # [N] int64, label ids in the whole vocabulary; IGNORED and OUTSIDE are negative. With several ids a token: any valid one.
    ids: torch.Tensor
    start: int  # As in ``ShardLogits``
    num_valid: int  # As in ``ShardLogits``
    cells: Cells | None = None  # Several ids of each token, or None
    order: list[torch.Tensor] | None = None  # ``tokens.compact`` of ``ids``, if known

    @classmethod
    def of(
        cls, hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, logits: ShardLogits,
        **tensors: torch.Tensor | None,
    ) -> Operands:
        """Return the operands of a shard, with the options in ``logits`` and these tensors of the head."""
        return cls(hidden, weight, Head.of(logits, **tensors), ids, logits.start, logits.num_valid)

    @property
    def num_tokens(self) -> int:
        return self.ids.shape[0]

    @property
    def requires_grad(self) -> bool:
        return any(x.requires_grad for x in (self.hidden, self.weight, *self.head.tensors.values()))

    def of_tokens(self, rows: slice, hidden: torch.Tensor) -> Operands:
        """Return the operands of a slice of the tokens; ``hidden`` holds their hidden states."""
        cells = self.cells
        return self._replace(
            hidden=hidden, head=self.head.of_tokens(rows), ids=self.ids[rows],
            cells=None if cells is None else Cells(cells.ids_NI[rows]), order=None,
        )


class Softmax(NamedTuple):
    """Statistics of the whole vocabulary, [N] fp32 each. The log-sum-exp is ``max + log_sum``; their sum would round.

    ``entropy`` is None unless it is differentiated. Kernels take the record as one argument, and Triton compiles a kernel
    again if an address inside a record is not a multiple of 16. So each tensor is an allocation of its own, or a slice that
    starts at a multiple of four tokens.
    """

    max: torch.Tensor
    log_sum: torch.Tensor
    entropy: torch.Tensor | None = None


class Losses(NamedTuple):
    """What forward computes of each token, [N] fp32: 0 where a label is IGNORED, NaN where it is OUTSIDE. None: not wanted."""

    nll: torch.Tensor  # Negative log-likelihood of the label
    lse: torch.Tensor  # Log-sum-exp
    target: torch.Tensor  # Logit of the label; 0 with several ids a token
    uniform: torch.Tensor | None = None  # Nll of the uniform distribution
    entropy: torch.Tensor | None = None  # Entropy of the softmax
    mean: torch.Tensor | None = None  # [] fp32: mean of nll over the labels that are not IGNORED
    count: torch.Tensor | None = None  # [] int64: number of these labels, at least 1; with the mean


class Upstream(NamedTuple):
    """Gradients of the fields of ``Losses``, fp32, of any stride; None: 0. Those of ignored tokens do not matter."""

    nll: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    target: torch.Tensor | None = None
    uniform: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    mean: torch.Tensor | None = None  # [] fp32
    count: torch.Tensor | None = None  # As in ``Losses``: the divisor of the mean


class Grads(NamedTuple):
    """Which gradients backward computes, and where it writes them."""

    want_hidden: bool = True  # Compute d_hidden
    want_weight: bool = True  # Compute d_weight
    want_bias: bool = True  # Compute d_bias
    weight_out: torch.Tensor | None = None  # [V, D]: d_weight is added to it, and not returned
    # Called with d_hidden once all work that writes it is queued on the current stream
    hidden_ready: Callable[[torch.Tensor], None] | None = None
    # If tokens are split, ``hidden_ready`` is also called with the first ``ready_rows`` rows, then with the first
    # 2 * ``ready_rows`` rows, and so on, as soon as these rows are final. None: it is only called with all rows.
    ready_rows: int | None = None
    hidden_out: torch.Tensor | None = None  # [N, D]: d_hidden is written to it
    # Often no token has a label: kernels then return early and may leave d_weight unwritten. d_hidden of tokens without a label
    # stays unwritten.
    often_empty: bool = False
    # [V, D] int8: 8 more bits of a bf16 d_weight that several calls add to (``d_weight.py``), or None
    weight_low: torch.Tensor | None = None


Gradients = tuple["torch.Tensor | None", "torch.Tensor | None", "torch.Tensor | None"]  # d_hidden, d_weight, d_bias


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums and losses of operands in ``dtype``: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def widened(x: torch.Tensor) -> torch.Tensor:
    """Cast to ``accumulator`` of the tensor's dtype."""
    return x.to(accumulator(x.dtype))
