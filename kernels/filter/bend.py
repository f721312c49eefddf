"""How a token's hidden state bends the tail that it drops, to first order: what that adds to d_hidden.

    d_hidden_i  +=  r_i * bend * (e_i - e) @ spread            spread [D, D]  =  1 / Q  sum_q away_q away_q^T

``stand_in.py`` says where that comes from. The Q columns are drawn by the shares, as those of ``drawn.py`` are, but they are
others. e is the mean hidden state of all tokens by what they drop. The drawn columns of ``drawn.py`` are a sample of the same
sum, so the linear part of theirs is taken off ``spread``, times their factor, and ``r_i * (e_i @ spread - e @ spread)`` is all
that the tokens need: a product of hidden states with a matrix of D x D.
"""

from __future__ import annotations

import torch

from cce_dist.kernels import Operands, Rows, ShardLogits
from cce_dist.kernels.d_weight import add_d_weight
from cce_dist.kernels.filter.drawn import Bent, Drawn, Factors, draw_away
from cce_dist.kernels.filter.shares import Dropped, Sample
from cce_dist.kernels.logits import logits_chunk
from cce_dist.kernels.tiles import Tiles
from cce_dist.kernels.tokens import sums_of_rows


def bend_sample(
    dropped: Dropped, size: int, at_once: int, center_D: torch.Tensor, drawn: Drawn, sample: Sample, x: Operands, tiles: Tiles
) -> Bent:  # fmt: skip
    """Draw ``size`` columns around ``center_D`` for the spread, some at a time, and multiply the sample by the drawn ones."""
    assert sample.away is not None
    away_SD, hidden_size, device = sample.away.rows_SD, x.weight.shape[1], x.weight.device
    index_S = torch.arange(away_SD.shape[0], dtype=torch.int32, device=device)
    spread_DD = x.weight.new_empty(hidden_size, hidden_size)
    gain = torch.full((), 1.0 / size, dtype=torch.float32, device=device)
    any_dropped = sample.size.clamp(max=1)  # else the spread is 0, and costs nothing
    for first in range(0, size, at_once):
        away_QD = draw_away(dropped, first, min(at_once, size - first), size, center_D, x)
        columns = Rows(index_S, any_dropped * len(away_QD), away_QD)
        add_d_weight(spread_DD, away_QD, columns, gain, tiles.grad_weight, add=first > 0)

    num_drawn = drawn.away_KD.shape[0]
    lines_SK = torch.empty(away_SD.shape[0], num_drawn, dtype=torch.float32, device=device)
    plain = Operands(away_SD, drawn.away_KD, None, x.ids, ShardLogits(0, num_drawn))
    logits_chunk(plain, Rows(index_S, sample.size, away_SD), 0, lines_SK, tiles)
    return Bent(spread_DD, size, lines_SK)


def less_drawn(
    bent: Bent, drawn: Drawn, sample: Sample, factors: Factors, shared_2D: torch.Tensor, tiles: Tiles
) -> torch.Tensor:
    """Take the drawn columns' linear part off the spread, and what the mean hidden state has of it off ``shared_2D``."""
    assert sample.mean_D is not None
    away_KD, spread_DD = drawn.away_KD, bent.spread_DD
    num_drawn = torch.full((1,), away_KD.shape[0], dtype=torch.int32, device=away_KD.device)
    columns = Rows(drawn.column_K, num_drawn, away_KD)
    add_d_weight(spread_DD, away_KD, columns, factors.lines, tiles.grad_weight, add=True)
    mean_2D = torch.stack((sample.mean_D, torch.zeros_like(sample.mean_D)))
    shared_2D[0].addcmul_(sums_of_rows(mean_2D, spread_DD)[0], factors.bend, value=-1)
    return spread_DD
