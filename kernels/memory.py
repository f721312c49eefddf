"""What fits in a memory budget (``workspace_bytes``): how many tokens and columns at a time, and which exponentials are saved.

Pure arithmetic on sizes, so that the host code of the kernels and the fake tensors of torch.compile agree.

In the exact path a chunk is a part of the vocabulary. It finishes its rows of d_weight, the large output, and adds to d_hidden,
the small one. Tokens are split too if hidden states and remainder of all tokens exceed half of the budget; d_weight is then
accumulated in its own dtype. A larger budget keeps exponentials of the first columns.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from cce_dist.kernels.tiles import Tiles, cdiv, fill_waves, usual_waves

LEAST_BYTES = 32 << 20  # smaller budgets count as this when chunks are cut
CHUNK_COST = 2500  # fixed cost of a chunk, in recomputed columns
LEAST_TILES = 16  # keep exponentials of fewer tiles than this only if these are all tiles
# Bounds of the default budget. The upper one holds a group of 4,096 tokens at a vocabulary of 262,400 ids (Gemma 3).
LEAST_DEFAULT, MOST_DEFAULT = 256 << 20, 2100 << 20
ROWS = 128  # chunks of tokens are cut at multiples of this
# Fewest tokens of a group whose logits are read twice
LEAST_PAIR_ROWS = 256
TILE_COLS = 256  # columns of a tile whose exponentials are kept together
REFERENCE_BYTES = 4  # bytes of one row's reference in one tile, alive while exponentials are computed
SAVED_ROWS = 16 * ROWS  # fewest tokens whose exponentials are computed together, to share the weight in L2
# Bytes of a logit that is sorted, with its column and the buffers of torch.sort; most columns of a piece (``piece_columns``).
SORT_BYTES, MOST_PIECE = 40, 256

LEAST_LINEAR = 1 << 16  # fewest columns of a shard that is worth a linear correction of d_hidden
MOST_COVARIANCE = 1 << 25  # most elements of the rows that ``covariance_columns`` samples
SAMPLE = 256  # tokens sampled to estimate the shares of the dropped gradient; a power of 2

# Slots of a token's list at this eps or a larger one.
USUAL_SLOTS, USUAL_EPS = 256, 2.0**-10
SLOT_UNIT = 16  # a list has a multiple of this, and at least as many
SLOT_BYTES = 20  # of a slot: column, gradient and place; then token and gradient in sorted order
COLUMNS_PER_SLOT = 64  # columns of exact gradient that cost as much as a listed column

LIVE_BLOCKS = 8  # most blocks of logits that the dense backend has alive at a time
BLOCK_N, BLOCK_V = 128, 256  # groups of tokens are multiples of BLOCK_N, the dense backend's blocks of both
DENSE_N = 32  # the dense backend's groups of tokens are multiples of this
# Most tokens and columns of a block on a CPU
CPU_ROWS, CPU_COLUMNS = 1024, 2048

# LEAST_GROUP: fewest tokens of a group; groups of 768 took as long as computing logits twice. MOST_ROUNDED: most groups after
# each of which dC is rounded to bf16. With more groups dC has 8 extra bits. If these exceed a third of the budget, there are at
# most MOST_GROUPS.
LEAST_GROUP, MOST_ROUNDED, MOST_GROUPS = 896, 5, 16
# Uneven groups are taken if they need less than FULLER of even groups' time. Time counts d_hidden and one pass over d_weight
# per group (1e-4 of a wave for each hidden unit), in waves of d_hidden's tiles.
FULLER, D_WEIGHT_WAVES = 0.95, 1e-4


class Sizes(NamedTuple):
    """Sizes of a head on one shard."""

    num_tokens: int  # N, including ignored tokens
    hidden_size: int  # D
    num_columns: int  # Columns of the logits: rows of the weight that are part of the vocabulary
    itemsize: int  # Bytes of an element of hidden states and weight
    teacher_size: int = 0  # D of a divergence's teacher; 0: none
    pair_bytes: int = 0  # Bytes of both heads' logits at one position
    alone: bool = False  # No sum over ranks waits for d_hidden (``Spec.alone``)

    @property
    def num_heads(self) -> int:
        return 2 if self.teacher_size else 1

    @property
    def cell_bytes(self) -> int:
        """Bytes per token and column of a chunk: the logit's gradient, or the logits of two heads."""
        return self.pair_bytes or self.itemsize

    @property
    def hidden_bytes(self) -> int:
        """Bytes of one token's hidden states, including the teacher's."""
        return (self.hidden_size + self.teacher_size) * self.itemsize

    @property
    def sum_bytes(self) -> int:
        """Bytes of one token's hidden states plus d_hidden's remainder (``d_hidden.py``)."""
        return self.hidden_bytes + (2 * self.hidden_size if self.itemsize == 2 else 0)


class Chunks(NamedTuple):
    """Size of the block of logits' gradients that is alive at a time: ``rows`` tokens by ``cols`` columns."""

    rows: int
    cols: int


def bytes_of_all(sizes: Sizes) -> int:
    """Return the smallest budget that keeps the exponentials of all columns, beside hidden states and references.

    If no other rank waits for d_hidden (``alone``), these are one group's, and backward keeps hidden states in d_hidden.
    """
    num_tiles = cdiv(sizes.num_columns, TILE_COLS)
    row_bytes = _making_bytes(sizes, num_tiles)
    beside = sizes.num_tokens * row_bytes
    if sizes.alone:
        beside = min(beside, max(SAVED_ROWS * row_bytes, usual_waves(sizes.num_tokens, sizes.hidden_size)[1]))
    return sizes.num_tokens * num_tiles * TILE_COLS * sizes.cell_bytes + beside


def _making_bytes(sizes: Sizes, num_tiles: int) -> int:
    """Bytes per token beside exponentials: hidden states, and a reference per tile and head."""
    return sizes.hidden_bytes + num_tiles * REFERENCE_BYTES * sizes.num_heads


def default_workspace(sizes: Sizes, keeps: bool) -> int:
    """Return the default budget: enough for all exponentials if they can be saved at all, within two limits."""
    if not keeps:
        return LEAST_DEFAULT
    return max(LEAST_DEFAULT, min(bytes_of_all(sizes._replace(alone=False)), MOST_DEFAULT))


def saved_columns(sizes: Sizes, workspace_bytes: int) -> int:
    """Return how many of the first columns keep their exponentials within the budget: whole tiles."""
    num_tokens = sizes.num_tokens
    if num_tokens == 0 or sizes.num_columns == 0:
        return 0
    if bytes_of_all(sizes) <= workspace_bytes:
        return cdiv(sizes.num_columns, TILE_COLS) * TILE_COLS
    tiles = _part_kept(sizes, workspace_bytes)
    return tiles * TILE_COLS if tiles >= LEAST_TILES else 0


class Groups(NamedTuple):
    """How a loss is computed one group of tokens after another (``cce_dist/groups.py``)."""

    rows: int  # Tokens of a group
    low: bool = False  # d_weight has 8 extra bits while groups are added to it (``d_weight.py``)


@lru_cache(maxsize=1024)
def groups_of(sizes: Sizes, workspace_bytes: int, *, holds_weight: bool = False) -> Groups | None:
    """Return the groups of tokens if each group is to be finished before the next begins, else None.

    None: the exponentials of all tokens fit, groups would be too small to fill the device, or too many to add up in 16 bits.
    With ``holds_weight`` the budget also holds d_weight, which forward stores until backward adds it to a buffer.
    """
    num_tokens = sizes.num_tokens
    if num_tokens == 0 or sizes.num_columns == 0 or bytes_of_all(sizes) <= workspace_bytes:
        return None
    available = workspace_bytes - (sizes.num_columns * sizes.hidden_bytes if holds_weight else 0)
    rows = _rows_of_groups(sizes, available, MOST_GROUPS)
    if sizes.itemsize != 2 or (rows is not None and cdiv(num_tokens, rows) <= MOST_ROUNDED):
        return None if rows is None else Groups(rows)
    if low_bytes(sizes) <= available // 3:  # otherwise groups would be so small that two passes are faster
        exact = _rows_of_groups(sizes, available - low_bytes(sizes), num_tokens)
        if exact is not None:
            return Groups(exact, low=True)
    return None if rows is None else Groups(rows)


def low_bytes(sizes: Sizes) -> int:
    return sizes.num_columns * sizes.hidden_size


def _rows_of_groups(sizes: Sizes, available: int, most: int) -> int | None:
    """Return the tokens of a group that fits in ``available`` bytes, for at most ``most`` groups, or None."""
    num_tokens = sizes.num_tokens
    largest = min(num_tokens, available // (sizes.num_columns * sizes.cell_bytes))
    fit = [
        rows
        for rows in range(LEAST_GROUP, largest + 1, BLOCK_N)
        if _bytes_of_group(sizes._replace(num_tokens=rows)) <= available
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


def _bytes_of_group(sizes: Sizes) -> int:
    """Return the bytes of a group: exponentials and the larger pass's other buffers."""
    num_tiles = cdiv(sizes.num_columns, TILE_COLS)
    made = min(sizes.num_tokens, SAVED_ROWS) * _making_bytes(sizes, num_tiles)
    parts = usual_waves(sizes.num_tokens, sizes.hidden_size)[1]
    return sizes.num_tokens * num_tiles * TILE_COLS * sizes.cell_bytes + max(made, parts)


def _part_kept(sizes: Sizes, workspace_bytes: int) -> int:
    """Return how many tiles keep their exponentials if the other columns are recomputed in chunks; negative if none fit."""
    # Wider chunks are cheaper (CHUNK_COST), until their memory would save more time if it held exponentials.
    width = math.isqrt(CHUNK_COST * sizes.num_columns)
    recompute = sizes.num_tokens * (2 * sizes.hidden_bytes + width * sizes.cell_bytes)
    tile_bytes = TILE_COLS * sizes.cell_bytes + REFERENCE_BYTES * sizes.num_heads  # per token, with references
    return (workspace_bytes - recompute) // (sizes.num_tokens * tile_bytes)


def forward_rows(sizes: Sizes, workspace_bytes: int, saved: int) -> int:
    """Return how many tokens the exact forward processes at a time: all, or equal groups, if ``saved`` columns are saved."""
    if not saved:
        return max(ROWS, max(workspace_bytes, LEAST_BYTES) // sizes.hidden_bytes // ROWS * ROWS)
    num_tokens = sizes.num_tokens
    fit = (workspace_bytes - num_tokens * saved * sizes.cell_bytes) // _making_bytes(sizes, saved // TILE_COLS)
    if fit >= num_tokens:
        return num_tokens
    groups = cdiv(num_tokens, max(SAVED_ROWS, fit // SAVED_ROWS * SAVED_ROWS))
    return cdiv(cdiv(num_tokens, groups), SAVED_ROWS) * SAVED_ROWS


def most_rows(sizes: Sizes, workspace_bytes: int) -> int:
    """Return the most tokens at a time if nothing is saved: their hidden states and remainder take half of the budget."""
    return max(ROWS, max(workspace_bytes, LEAST_BYTES) // (2 * sizes.sum_bytes) // ROWS * ROWS)


def exact_chunks(sizes: Sizes, workspace_bytes: int, saved_bytes: int, tiles: Tiles, at_once: int) -> Chunks:
    """Split the logits' gradients into chunks that fit in the budget with hidden states, remainder and saved exponentials.

    ``sizes.num_columns`` counts the columns that are recomputed. The device runs ``at_once`` programs at a time.
    """
    budget = max(workspace_bytes, LEAST_BYTES) - saved_bytes
    tile_cols = tiles.dlogits.cols
    rows = sizes.num_tokens
    if saved_bytes == 0:  # otherwise saved_columns left memory for all rows
        # Leave memory for two tiles of columns.
        rows = max(ROWS, budget // (sizes.sum_bytes + 2 * tile_cols * sizes.cell_bytes) // ROWS * ROWS)
        rows = min(sizes.num_tokens, rows, most_rows(sizes, workspace_bytes))
    cols = max(tile_cols, (budget - rows * sizes.sum_bytes) // (rows * sizes.cell_bytes) // tile_cols * tile_cols)
    return Chunks(rows, fill_waves(rows, sizes.num_columns, sizes.hidden_size, tiles, at_once, cols))


def pair_rows(sizes: Sizes, workspace_bytes: int, saved: int) -> int:
    """Return how many tokens' logits of both heads fit in 13/16 of the budget beside ``saved`` columns of all tokens.

    0 if fewer than ``LEAST_PAIR_ROWS`` fit, unless these are all: then it is faster to compute the logits twice.
    """
    one, saved = sizes._replace(num_tokens=1), min(saved, sizes.num_columns)
    saved_bytes = bytes_of_all(one._replace(num_columns=saved)) - sizes.hidden_bytes
    available = max(workspace_bytes, LEAST_BYTES) - sizes.num_tokens * saved_bytes
    rows = available * 13 // 16 // bytes_of_all(one._replace(num_columns=sizes.num_columns - saved))
    rows = max(1, rows // ROWS * ROWS or rows)
    return rows if rows >= min(sizes.num_tokens, LEAST_PAIR_ROWS) else 0


def sample_bytes(sizes: Sizes, workspace_bytes: int) -> int:
    """Return the bytes of the sampled tokens' dropped gradients: 0 for few tokens or columns, or for small budgets."""
    few = sizes.num_tokens < SAMPLE or sampled_columns(sizes.num_columns) == 0
    wanted = SAMPLE * cdiv(sizes.num_columns, ROWS) * ROWS * sizes.itemsize
    return 0 if few or wanted > max(workspace_bytes, LEAST_BYTES) // 2 else wanted


def list_slots(sizes: Sizes, eps: float, workspace_bytes: int) -> int:
    """Return L, the slots of a token's list: 256, more at an eps below 2^-10, fewer (at least 16) if they do not pay or fit."""
    available = max(workspace_bytes, LEAST_BYTES) - sample_bytes(sizes, workspace_bytes)
    fit = available // 2 // (SLOT_BYTES * max(1, sizes.num_tokens))
    wanted = min(round(USUAL_SLOTS * max(1, USUAL_EPS / eps)), sizes.num_columns // COLUMNS_PER_SLOT, fit)
    return max(SLOT_UNIT, wanted // SLOT_UNIT * SLOT_UNIT)


def filter_forward_rows(sizes: Sizes, num_words: int, workspace_bytes: int, tile_rows: int, group: int) -> tuple[int, int]:
    """Return the tokens per group of the filter's forward, over all columns (with marks) and for the bound."""
    budget = max(workspace_bytes, LEAST_BYTES)
    rows = budget * 3 // 4 // (sizes.hidden_bytes + 4 * num_words)
    unit = tile_rows * group if rows >= tile_rows * group else tile_rows
    rows = min(max(unit, rows // unit * unit), cdiv(sizes.num_tokens, tile_rows) * tile_rows)
    return rows, max(rows, budget // 2 // sizes.hidden_bytes // ROWS * ROWS)


def remainder_bytes(sizes: Sizes, workspace_bytes: int) -> int:
    """Return the bytes of d_hidden's remainder in the filter: 0 in fp32, or if a quarter of the budget is less."""
    wanted = sizes.num_tokens * (sizes.sum_bytes - sizes.hidden_bytes)
    return wanted if wanted <= max(workspace_bytes, LEAST_BYTES) // 4 else 0


def filter_backward_rows(sizes: Sizes, columns: int, slots: int, workspace_bytes: int, ready_rows: int) -> int:
    """Return the tokens per group of the filter's backward, with gradients of ``columns`` frequent and sampled columns.

    Lists of ``slots`` columns, samples, and rows of weight and d_weight count, too. ``ready_rows`` tokens get even groups.
    """
    budget = max(workspace_bytes, LEAST_BYTES)
    beside = sizes.num_tokens * slots * SLOT_BYTES + sample_bytes(sizes, workspace_bytes) + 2 * columns * sizes.hidden_bytes
    available = max(budget // 2, budget - beside) - remainder_bytes(sizes, workspace_bytes)
    rows = max(ROWS, available // (sizes.hidden_bytes + columns * sizes.itemsize) // ROWS * ROWS)
    return min(ready_rows, cdiv(cdiv(ready_rows, cdiv(ready_rows, rows)), ROWS) * ROWS)


def dense_block(
    num_tokens: int, num_columns: int, workspace_bytes: int, itemsize: int = 4, on_cpu: bool = False
) -> Chunks:
    """Return the size of the dense backend's blocks of logits: LIVE_BLOCKS of them fit in the budget."""
    elements = max(workspace_bytes // (itemsize * LIVE_BLOCKS), BLOCK_N * BLOCK_V)
    if on_cpu:
        num_tokens, num_columns = min(num_tokens, CPU_ROWS), min(num_columns, CPU_COLUMNS)
    rows = min(num_tokens, elements // BLOCK_V // BLOCK_N * BLOCK_N) or 1
    return Chunks(rows, min(num_columns, elements // rows // BLOCK_V * BLOCK_V) or 1)


def dense_rows(sizes: Sizes, workspace_bytes: int, uniform: bool) -> int:
    """Return the most tokens whose logits the dense backend keeps for backward: 0 if less than a unit."""
    return workspace_bytes // _dense_bytes(sizes, uniform) // DENSE_N * DENSE_N


def _dense_bytes(sizes: Sizes, uniform: bool) -> int:
    """Bytes of a token: logits, in bf16 a copy of their gradients, hidden states without NaN of ignored tokens, and d_hidden.

    Label smoothing (``uniform``) reads the logits once more, which takes a second block.
    """
    wide = max(4, sizes.itemsize)
    of_logit = wide * (1 + uniform) + (2 if sizes.itemsize == 2 else 0)
    return sizes.num_columns * of_logit + sizes.hidden_size * (wide + sizes.itemsize)


def default_dense(sizes: Sizes, uniform: bool) -> int:
    """Return the dense backend's default budget where exponentials can be kept: in bf16 enough for all."""
    rows = cdiv(sizes.num_tokens, DENSE_N) * DENSE_N
    wanted = rows * _dense_bytes(sizes, uniform) if sizes.itemsize == 2 else 0
    return wanted if LEAST_DEFAULT < wanted <= MOST_DEFAULT else LEAST_DEFAULT


def dense_groups(sizes: Sizes, workspace_bytes: int, uniform: bool, *, holds_weight: bool = False) -> Groups | None:
    """Return the groups of tokens of one pass of the dense backend, or None if no group fits. Sizes as in ``groups_of``."""
    if sizes.num_tokens == 0 or sizes.num_columns == 0:
        return None
    available = workspace_bytes - (sizes.num_columns * sizes.hidden_bytes if holds_weight else 0)
    rows = dense_rows(sizes, available, uniform)
    if rows <= 0:
        return None
    count = cdiv(sizes.num_tokens, rows)
    if sizes.itemsize == 2 and (holds_weight or count > 1):  # d_weight would be rounded after each group
        return None
    even = cdiv(sizes.num_tokens, count)
    return Groups(cdiv(even, DENSE_N) * DENSE_N)


def piece_columns(num_columns: int, top_k: int) -> int:
    """Return the columns of a piece, a power of 2, so that ``outputs.largest`` sorts about as many pieces as their columns."""
    return min(MOST_PIECE, 1 << math.isqrt(num_columns // top_k).bit_length())


def top_rows(sizes: Sizes, top_k: int, workspace_bytes: int) -> int:
    """Return the tokens per group whose hidden states, fp32 logits and sorts of logits fit in the budget."""
    piece = piece_columns(sizes.num_columns, top_k)
    sorted_columns = min(sizes.num_columns, max(cdiv(sizes.num_columns, piece), piece * top_k))
    num_copies = 1 if sizes.num_columns % piece == 0 else 2  # ``outputs.largest`` pads logits to whole pieces
    row_bytes = sizes.hidden_bytes + 4 * sizes.num_columns * num_copies + SORT_BYTES * sorted_columns
    rows = max(1, max(workspace_bytes, LEAST_BYTES) // row_bytes)
    return min(sizes.num_tokens, rows // ROWS * ROWS if rows >= ROWS else rows)


def bound_columns(num_outside: int, unit: int = 256) -> int:
    """Return how many infrequent columns are sampled for the bound: at most 1,024 or 1/32 of them, a multiple of ``unit``."""
    return min(num_outside, max(1, round(min(1024, num_outside / 32) / unit)) * unit)


def sampled_columns(num_columns: int) -> int:
    """Return K, the number of sampled columns that correct d_hidden: 32 per 1,024 columns, at most 1,024."""
    return min(1024, num_columns // 1024 * 32)


def covariance_columns(sizes: Sizes, workspace_bytes: int) -> int:
    """Return Q, the number of columns sampled for d_hidden's linear correction: 64 per 1,024, at most 2^25 elements; or 0."""
    available = max(workspace_bytes, LEAST_BYTES) // 4
    few = sizes.num_tokens < SAMPLE or sizes.num_columns < LEAST_LINEAR
    if few or sizes.hidden_size * sizes.hidden_bytes > available:
        return 0
    most = min(MOST_COVARIANCE // sizes.hidden_size, available // 2 // sizes.hidden_bytes)
    return min(sizes.num_columns // 1024 * 64, most)


def frequent_columns(num_columns: int, eps: float, unit: int = 256) -> int:
    """Return F, the number of columns kept for every token: at most 1,024, 1/eps or 1/16 of the shard, rounded to ``unit``."""
    return min(num_columns, max(1, round(min(1024, 1 / eps if eps else 1024, num_columns / 16) / unit)) * unit)
