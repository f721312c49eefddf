"""What a memory budget (``workspace_bytes``) buys: tokens and columns that are worked on at a time, exponentials that are kept.

Pure arithmetic on sizes, so that the host code of the kernels and the fakes of torch.compile agree.

exact     A chunk is a part of the vocabulary. It finishes its rows of d_weight, the large output, and adds to d_hidden, the
          small one. Tokens are split too only where two bytes per element of d_hidden exceed the budget; d_weight is then added
          to in its own dtype. A larger budget keeps exponentials of the first columns.
filtered  The budget holds hidden states of a group of tokens, their marks and lists, and in backward the entries of all lists.
dense     At most LIVE_BLOCKS blocks of fp32 logits are alive at a time.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from cce_dist.kernels.waves import cdiv, fill_waves, usual_waves

if TYPE_CHECKING:
    from cce_dist.kernels.tiles import Tiles

LEAST_BYTES = 32 << 20  # below this budget the rows of a chunk would no longer fill a device
CHUNK_COST = 2500  # fixed cost of a chunk, in columns recomputed: 175 us at 55 to 100 ns each (H200, N 8,192, 2026-11)
LEAST_TILES = 16  # of kept exponentials, if not all are kept
# Bounds of the default budget. The upper one holds a group of 4,096 tokens at a vocabulary of 262,144 to 262,400 ids (Gemma 3):
# 2,048 MiB of exponentials and at most 42 MiB beside them for hidden sizes up to 8,192. With 2,048 MiB groups have half as many
# tokens, and Gemma-3-1b's head takes 27.6 ms in place of 23.9 (H200, 8,192 tokens, 2026-11).
LEAST_DEFAULT, MOST_DEFAULT = 256 << 20, 2100 << 20
ROWS = 128  # groups of tokens are cut at multiples of this
REFERENCE_BYTES = 4  # of a row's reference beside each tile of kept exponentials, while they are made
KEPT_ROWS = 16 * ROWS  # tokens, at least, whose exponentials are made at a time: row blocks that share the weight in L2
# Every 63rd column is a sample of 1.6 % of a product. Once in a million tokens, too few of the largest logits are below its
# threshold, or too many of all. A list has a place in eight columns at most, each of four logits and a column.
TOP_STEP, RARELY, LEAST_SPARSE, TOP_PLACE_BYTES = 63, 1e-6, 8, 20

FALLBACK = 128  # tokens, one tile of rows, that may be exact while others are listed; a power of 2
MOST_COVARIANCE = 1 << 25  # elements of the columns that ``covariance_columns`` counts: their noise falls with both sizes
SAMPLE = 256  # tokens that the shares of what is dropped are taken from; a power of 2

# Of a listed column in backward: column, token and gradient as they are made (12); while they are sorted also column and order,
# and the sort's own order and buffers (20); and forward's column, and token and gradient in their new order.
ENTRY_BYTES = 56
MOST_LISTED = 256  # columns of a token, on average, that there is room for: all of the room is sorted, used or not
# A listed column moves three rows of D numbers. One of the exact gradient takes three products of 2 D operations, and a GPU
# does 60 to 110 operations while it moves a byte.
COLUMNS_PER_ENTRY = 128  # columns of exact gradient that cost as much as a listed one

LIVE_BLOCKS = 8  # fp32 blocks of logits that the dense backend has alive at a time, at most
BLOCK_N, BLOCK_V = 128, 256  # its blocks are multiples of these

# Tokens of a group at least: groups of 768 took as long as logits computed twice at D 1,024. Groups at most after each of which
# dC is rounded to bf16: it is off by 2.9e-3 with one, 3.8e-3 with five, 6.9e-3 with sixteen, dense bf16's by 6.4e-3 to 8.1e-3
# (H200, 2026-11). More have 8 bits beside it, or, where these take over a third of the budget, are sixteen at most.
LEAST_GROUP, MOST_ROUNDED, MOST_GROUPS = 896, 5, 16
# Groups that are not even take less of the time that d_hidden takes with one more pass over d_weight for each group. That is
# counted in waves of d_hidden's tiles on the 132 programs of an H100 or H200: 1e-4 of a wave for each hidden unit.
FULLER, D_WEIGHT_WAVES = 0.95, 1e-4


class Sizes(NamedTuple):
    """A head on a shard."""

    num_tokens: int  # N, ignored tokens counted
    hidden_size: int  # D
    num_columns: int  # Columns of the logits: rows of the weight that are part of the vocabulary
    itemsize: int  # Bytes of an element of hidden states and weight
    teacher_size: int = 0  # D of a teacher, whose hidden states stand beside the student's; 0: there is none
    pair_bytes: int = 0  # Bytes of a cell of a chunk of both heads' logits (``pair_logits.py``), where there is a teacher
    alone: bool = False  # No sum over ranks waits for d_hidden (``Spec.alone``)

    @property
    def num_heads(self) -> int:
        """Heads whose logits stand beside one another."""
        return 2 if self.teacher_size else 1

    @property
    def cell_bytes(self) -> int:
        """Bytes of a cell of a chunk: of the logits' gradient, or of two heads' logits."""
        return self.pair_bytes or self.itemsize

    @property
    def hidden_bytes(self) -> int:
        """Bytes of one token's hidden state, a teacher's counted."""
        return (self.hidden_size + self.teacher_size) * self.itemsize

    @property
    def sum_bytes(self) -> int:
        """Bytes of one token's hidden state, and of the remainder that d_hidden cannot hold in 16 bits (``d_hidden.py``)."""
        return self.hidden_bytes + (2 * self.hidden_size if self.itemsize == 2 else 0)


class Chunks(NamedTuple):
    """The logits' gradients that are alive at a time: of ``rows`` tokens and ``cols`` columns."""

    rows: int
    cols: int


def bytes_of_all(sizes: Sizes, tile_cols: int = 256) -> int:
    """Return the least budget that keeps the exponentials of all columns.

    Beside them stand hidden states and references of all tokens. Where d_hidden is ``alone``, only a group's do: backward has
    its hidden states in d_hidden's own storage, beside the parts of d_hidden's last wave.
    """
    num_tiles = cdiv(sizes.num_columns, tile_cols)
    row_bytes = _making_bytes(sizes, num_tiles)
    beside = sizes.num_tokens * row_bytes
    if sizes.alone:
        beside = min(beside, max(KEPT_ROWS * row_bytes, usual_waves(sizes.num_tokens, sizes.hidden_size)[1]))
    return sizes.num_tokens * num_tiles * tile_cols * sizes.cell_bytes + beside


def _making_bytes(sizes: Sizes, num_tiles: int) -> int:
    """Bytes that stand beside a token's exponentials while they are made: hidden state, a reference in each tile and head."""
    return sizes.hidden_bytes + num_tiles * REFERENCE_BYTES * sizes.num_heads


def default_workspace(sizes: Sizes, keeps: bool) -> int:
    """Return the budget where none is given: enough for all exponentials if they can be kept at all, within the two limits."""
    if not keeps:
        return LEAST_DEFAULT
    return max(LEAST_DEFAULT, min(bytes_of_all(sizes._replace(alone=False)), MOST_DEFAULT))


def beside_lists(sizes: Sizes, top_k: int, workspace_bytes: int) -> int:
    """Return the budget less the lists of all tokens for the ``top_k`` largest logits."""
    plan = top_plan(sizes.num_columns, top_k) if top_k else None
    return workspace_bytes - (0 if plan is None else sizes.num_tokens * top_bytes(plan, top_k))


def columns_kept(sizes: Sizes, workspace_bytes: int, tile_cols: int = 256) -> int:
    """Return how many of the first columns keep their exponentials within the budget: a multiple of ``tile_cols``."""
    num_tokens = sizes.num_tokens
    if num_tokens == 0 or sizes.num_columns == 0:
        return 0
    if bytes_of_all(sizes, tile_cols) <= workspace_bytes:
        return cdiv(sizes.num_columns, tile_cols) * tile_cols
    tiles = _part_kept(sizes, workspace_bytes, tile_cols)
    return tiles * tile_cols if tiles >= LEAST_TILES else 0


class Groups(NamedTuple):
    """How a loss goes group by group of tokens (``cce_dist/groups.py``)."""

    rows: int  # Tokens of a group
    low: bool = False  # 8 bits of the sum of d_weight's groups stand beside it (``d_weight.py``)


@lru_cache(maxsize=1024)
def groups_of(sizes: Sizes, workspace_bytes: int, tile_cols: int = 256, *, holds_weight: bool = False) -> Groups | None:
    """Return the groups of tokens each of which is finished before the next begins.

    None: the exponentials of all tokens fit, groups would be too small to fill the device, or too many to add up in 16 bits.
    With ``holds_weight`` d_weight is no output, but waits for backward, which adds it to a buffer: the budget has room for it.
    """
    num_tokens = sizes.num_tokens
    if num_tokens == 0 or sizes.num_columns == 0 or bytes_of_all(sizes, tile_cols) <= workspace_bytes:
        return None
    room = workspace_bytes - (sizes.num_columns * sizes.hidden_bytes if holds_weight else 0)
    rows = _rows_of_groups(sizes, room, tile_cols, MOST_GROUPS)
    if sizes.itemsize != 2 or (rows is not None and cdiv(num_tokens, rows) <= MOST_ROUNDED):
        return None if rows is None else Groups(rows)
    if low_bytes(sizes) <= room // 3:  # else groups become so small that they are slower than what they replace
        exact = _rows_of_groups(sizes, room - low_bytes(sizes), tile_cols, num_tokens)
        if exact is not None:
            return Groups(exact, low=True)
    return None if rows is None else Groups(rows)


def low_bytes(sizes: Sizes) -> int:
    """Bytes of what stands beside d_weight while groups are added up in more than 16 bits."""
    return sizes.num_columns * sizes.hidden_size


def _rows_of_groups(sizes: Sizes, room: int, tile_cols: int, most: int) -> int | None:
    """Return the tokens of ``most`` groups or fewer, which fit the bytes of ``room``."""
    num_tokens = sizes.num_tokens
    largest = min(num_tokens, room // (sizes.num_columns * sizes.cell_bytes))
    # No sum over ranks waits for d_hidden of a group.
    fit = [
        rows
        for rows in range(LEAST_GROUP, largest + 1, BLOCK_N)
        if _bytes_of_group(sizes._replace(num_tokens=rows), tile_cols) <= room
    ]
    if not fit or cdiv(num_tokens, fit[-1]) > most:
        return None

    def waves(rows: int) -> float:
        passes = D_WEIGHT_WAVES * sizes.hidden_size
        return cdiv(num_tokens, rows) * (usual_waves(rows, sizes.hidden_size)[0] + passes)

    even = cdiv(cdiv(num_tokens, cdiv(num_tokens, fit[-1])), BLOCK_N) * BLOCK_N
    even = even if even < LEAST_GROUP or even in fit else fit[-1]
    fullest = min((rows for rows in fit if cdiv(num_tokens, rows) <= most), key=waves)
    return fullest if waves(fullest) < FULLER * waves(even) else even


def _bytes_of_group(sizes: Sizes, tile_cols: int) -> int:
    """Return the bytes of a group: exponentials, what stands beside them while they are made, parts of d_hidden's last wave."""
    num_tiles = cdiv(sizes.num_columns, tile_cols)
    made = min(sizes.num_tokens, KEPT_ROWS) * _making_bytes(sizes, num_tiles)
    parts = usual_waves(sizes.num_tokens, sizes.hidden_size)[1]
    return sizes.num_tokens * num_tiles * tile_cols * sizes.cell_bytes + max(made, parts)


def _part_kept(sizes: Sizes, workspace_bytes: int, tile_cols: int) -> int:
    """Return how many tiles keep their exponentials beside what the others' recomputation takes, which may be negative."""
    # A chunk of ``width`` recomputed columns costs CHUNK_COST, so it is widened until the next column would save more as a kept
    # one. Hidden states and remainder of every token stand beside it.
    width = math.isqrt(CHUNK_COST * sizes.num_columns)
    recompute = sizes.num_tokens * (2 * sizes.hidden_bytes + width * sizes.cell_bytes)
    tile_bytes = tile_cols * sizes.cell_bytes + REFERENCE_BYTES * sizes.num_heads  # of a token, its references counted
    return (workspace_bytes - recompute) // (sizes.num_tokens * tile_bytes)


def forward_rows(sizes: Sizes, workspace_bytes: int, kept: int, tile_cols: int = 256) -> int:
    """Return the tokens that the exact forward works on at a time; ``kept`` columns keep their exponentials.

    With kept exponentials that is all tokens, or even groups where ``bytes_of_all`` has room for a group alone.
    """
    if not kept:
        return max(ROWS, max(workspace_bytes, LEAST_BYTES) // sizes.hidden_bytes // ROWS * ROWS)
    num_tokens = sizes.num_tokens
    fit = (workspace_bytes - num_tokens * kept * sizes.cell_bytes) // _making_bytes(sizes, kept // tile_cols)
    if fit >= num_tokens:
        return num_tokens
    groups = cdiv(num_tokens, max(KEPT_ROWS, fit // KEPT_ROWS * KEPT_ROWS))
    return cdiv(cdiv(num_tokens, groups), KEPT_ROWS) * KEPT_ROWS


def most_rows(sizes: Sizes, workspace_bytes: int) -> int:
    """Return the tokens at a time, at most, where nothing is kept: hidden states and remainder take half of the budget."""
    return max(ROWS, max(workspace_bytes, LEAST_BYTES) // (2 * sizes.sum_bytes) // ROWS * ROWS)


def exact_chunks(sizes: Sizes, workspace_bytes: int, kept_bytes: int, tiles: Tiles, at_once: int) -> Chunks:
    """Split the logits' gradients so that they, hidden states and remainder fit the budget beside the exponentials kept.

    ``sizes.num_columns`` counts the columns that are recomputed. The device runs ``at_once`` programs at a time.
    """
    budget = max(workspace_bytes, LEAST_BYTES) - kept_bytes
    tile_cols = tiles.dlogits.cols
    rows = sizes.num_tokens
    if kept_bytes == 0:  # else every token has its row of exponentials, and columns_kept left room for all of them
        # At least one tile of columns stands beside the rows.
        rows = max(ROWS, budget // (sizes.sum_bytes + 2 * tile_cols * sizes.cell_bytes) // ROWS * ROWS)
        rows = min(sizes.num_tokens, rows, most_rows(sizes, workspace_bytes))
    cols = max(tile_cols, (budget - rows * sizes.sum_bytes) // (rows * sizes.cell_bytes) // tile_cols * tile_cols)
    return Chunks(rows, fill_waves(rows, sizes.num_columns, sizes.hidden_size, tiles, at_once, cols))


def keeps_sample(num_tokens: int, num_columns: int, itemsize: int, workspace_bytes: int) -> bool:
    """Return whether what the sampled tokens drop of every column is kept for d_weight: where half of the budget holds it."""
    sampled = num_tokens > SAMPLE and sampled_columns(num_columns) > 0
    return sampled and _sample_bytes(num_columns, itemsize) <= max(workspace_bytes, LEAST_BYTES) // 2


def _sample_bytes(num_columns: int, itemsize: int) -> int:
    return SAMPLE * cdiv(num_columns, ROWS) * ROWS * itemsize


def list_capacity(num_tokens: int, num_columns: int, workspace_bytes: int, itemsize: int = 2) -> int:
    """Return M, the columns that all lists have room for: as many as the budget holds, and no more than pay."""
    room = max(workspace_bytes, LEAST_BYTES)
    if keeps_sample(num_tokens, num_columns, itemsize, workspace_bytes):
        room -= _sample_bytes(num_columns, itemsize)
    return max(1, min(room // ENTRY_BYTES, num_tokens * min(MOST_LISTED, num_columns // COLUMNS_PER_ENTRY)))


def fallback_columns(num_columns: int, rows: int, itemsize: int, workspace_bytes: int, tile_cols: int) -> int:
    """Return the columns at a time of the exact gradient of a few tokens: a quarter of the budget."""
    most = max(workspace_bytes, LEAST_BYTES) // 4 // (rows * itemsize) // tile_cols * tile_cols
    return max(tile_cols, min(most, cdiv(num_columns, tile_cols) * tile_cols))


def filter_forward_rows(sizes: Sizes, num_words: int, workspace_bytes: int, tile_rows: int, group: int) -> Chunks:
    """Return the tokens at a time of the filter's passes over all columns (``rows``), whose marks take ``num_words`` words a
    token, and over frequent columns (``cols``)."""
    budget = max(workspace_bytes, LEAST_BYTES)
    rows = budget * 3 // 4 // (sizes.hidden_bytes + 4 * num_words)
    unit = tile_rows * group if rows >= tile_rows * group else tile_rows
    rows = min(max(unit, rows // unit * unit), cdiv(sizes.num_tokens, tile_rows) * tile_rows)
    return Chunks(rows, max(rows, budget // 2 // sizes.hidden_bytes // ROWS * ROWS))


def keeps_remainder(sizes: Sizes, workspace_bytes: int) -> bool:
    """Return whether the filter's backward has the remainder of d_hidden of all tokens at once: in a quarter of the budget."""
    return remainder_bytes(sizes) <= max(workspace_bytes, LEAST_BYTES) // 4


def remainder_bytes(sizes: Sizes) -> int:
    """Bytes of the remainder of all tokens."""
    return sizes.num_tokens * (sizes.sum_bytes - sizes.hidden_bytes)


def filter_backward_rows(sizes: Sizes, columns: int, workspace_bytes: int) -> int:
    """Return the tokens at a time of the filter's backward, whose gradients have so many frequent and sampled columns."""
    room, row_bytes = max(workspace_bytes, LEAST_BYTES) // 2, sizes.sum_bytes + columns * sizes.itemsize
    if keeps_remainder(sizes, workspace_bytes):
        room, row_bytes = room - remainder_bytes(sizes), sizes.hidden_bytes + columns * sizes.itemsize
    return min(sizes.num_tokens, max(ROWS, room // row_bytes // ROWS * ROWS))


def dense_block(num_tokens: int, num_columns: int, workspace_bytes: int) -> Chunks:
    """Return the block of logits of the dense backend: LIVE_BLOCKS of them in fp32 fit the budget."""
    elements = max(workspace_bytes // (4 * LIVE_BLOCKS), BLOCK_N * BLOCK_V)
    rows = min(num_tokens, elements // BLOCK_V // BLOCK_N * BLOCK_N) or 1
    return Chunks(rows, min(num_columns, elements // rows // BLOCK_V * BLOCK_V) or 1)


class TopPlan(NamedTuple):
    """How the candidates for the largest logits are found (``candidates.py``)."""

    step: int  # Every so-many-th column is in the sample
    nth: int  # The threshold is the sample's nth largest logit
    room: int  # Places of a token's list


@lru_cache(maxsize=64)
def top_plan(num_columns: int, top_k: int) -> TopPlan | None:
    """Return the plan for a shard; None: the lists would hold much of it, and the largest are looked for among all logits.

    How many of a row's top_k largest are in the sample, and of the sample's columns in a list, is taken for Poisson's.
    """
    if LEAST_SPARSE * top_k > num_columns:
        return None
    step = min(TOP_STEP, max(1, num_columns // 256))
    step -= 1 - step % 2  # odd: columns may have a structure of powers of 2
    nth = next(n for n in count(1) if _at_least(n, top_k / step) <= RARELY)
    spread = next(n for n in count(nth) if 1 - _at_least(nth, n) <= RARELY)
    room = cdiv(spread * step, 64) * 64
    return TopPlan(step, nth, room) if LEAST_SPARSE * room <= num_columns else None


def _at_least(least: int, mean: float) -> float:
    """Poisson's probability of so many."""
    below = sum(math.exp(n * math.log(mean) - mean - math.lgamma(n + 1)) for n in range(least))
    return max(0.0, 1.0 - below)


def top_bytes(plan: TopPlan, top_k: int) -> int:
    """Bytes of a token's list, and of its chosen keys."""
    return TOP_PLACE_BYTES * plan.room + 8 * top_k


def top_rows(sizes: Sizes, plan: TopPlan, top_k: int, workspace_bytes: int, unit: int) -> int:
    """Return the tokens whose lists and hidden states are there at a time, in even groups of whole ``unit``s."""
    most = max(ROWS, max(workspace_bytes, LEAST_BYTES) // (sizes.hidden_bytes + top_bytes(plan, top_k)) // ROWS * ROWS)
    unit = unit if most >= unit else ROWS
    most -= most % unit
    return cdiv(sizes.num_tokens, cdiv(max(1, sizes.num_tokens), most) * unit) * unit


def top_rows_of_all(sizes: Sizes, workspace_bytes: int) -> int:
    """Return the tokens all of whose logits are there at a time."""
    rows = max(1, max(workspace_bytes, LEAST_BYTES) // (sizes.hidden_bytes + 4 * sizes.num_columns))
    return min(sizes.num_tokens, rows // ROWS * ROWS if rows >= ROWS else rows)


def bound_columns(num_outside: int, unit: int = 256) -> int:
    """Return how many columns that are not frequent bound the others: 1,024 or a thirty-second if less, in whole ``unit``."""
    return min(num_outside, max(1, round(min(1024, num_outside / 32) / unit)) * unit)


def sampled_columns(num_columns: int) -> int:
    """Return K, the sampled columns that correct d_hidden: 32 of 1,024, at most 1,024."""
    return min(1024, num_columns // 1024 * 32)


def covariance_columns(num_columns: int, hidden_size: int) -> int:
    """Return Q, the sampled columns of d_hidden's linear correction: 64 of 1,024, at most 2^25 elements."""
    return min(num_columns // 1024 * 64, MOST_COVARIANCE // hidden_size)


def covariance_rows(sizes: Sizes, workspace_bytes: int) -> int:
    """Return how many of those are sampled at a time; 0: a quarter of the budget does not hold the matrix made of them."""
    room = max(workspace_bytes, LEAST_BYTES) // 4
    if sizes.num_tokens <= SAMPLE or sizes.hidden_size * sizes.hidden_bytes > room:
        return 0
    most = max(ROWS, room // 2 // sizes.hidden_bytes // ROWS * ROWS)
    return min(most, covariance_columns(sizes.num_columns, sizes.hidden_size))


def frequent_columns(num_columns: int, eps: float, unit: int = 256) -> int:
    """Return H, the columns kept for every token: 1,024, or 1/eps or 1/16 of the shard if less, in whole ``unit``."""
    return min(num_columns, max(1, round(min(1024, 1 / eps if eps else 1024, num_columns / 16) / unit)) * unit)
