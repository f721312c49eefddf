"""How a token's hidden state bends the tail that it drops, to first order: what that adds to d_hidden.

    d_hidden_i  +=  r_i * bend * (e_i - e) @ spread            spread [D, D]  =  1 / Q  sum_q away_q away_q^T

``compensation.py`` says where that comes from. The Q columns are drawn by the shares, as those of ``sampling.py`` are, but
they are others. e is the mean hidden state of all tokens by what they drop. The columns of ``sampling.py`` sample the same sum,
so the linear part of theirs is taken off ``spread``, times their factor, and ``r_i * (e_i @ spread - e @ spread)`` is all
that the tokens need: a product of hidden states with a matrix of D x D.
"""

from __future__ import annotations

import torch

from cce_dist.kernels import Operands, Rows, ShardLogits
from cce_dist.kernels.d_weight import add_d_weight
from cce_dist.kernels.filter.sampling import Drawn, Factors, draw_away
from cce_dist.kernels.filter.shares import TILT, Dropped, Sample
from cce_dist.kernels.logits import logits_chunk
from cce_dist.kernels.tiles import Tiles
from cce_dist.kernels.tokens import sums_of_rows


def lines_of_sample(drawn: Drawn, sample: Sample, x: Operands, tiles: Tiles) -> torch.Tensor:
    """Return what the linear model says of the drawn columns: the sample times them, both less their means. -> [S, K] fp32"""
    assert sample.away is not None
    away_SD, num_drawn = sample.away.rows_SD, drawn.away_KD.shape[0]
    lines_SK = torch.empty(away_SD.shape[0], num_drawn, dtype=torch.float32, device=away_SD.device)
    plain = Operands(away_SD, drawn.away_KD, None, x.ids, ShardLogits(0, num_drawn))
    logits_chunk(plain, Rows(_places(away_SD), sample.size, away_SD), 0, lines_SK, tiles)
    return lines_SK


def spread_of(
    dropped: Dropped, size: int, at_once: int, drawn: Drawn, sample: Sample, factors: Factors, shared_2D: torch.Tensor,
    x: Operands, tiles: Tiles,
) -> torch.Tensor:  # fmt: skip
    """Return the spread, and take what the mean hidden state has of it off ``shared_2D``. -> [D, D]

    ``size`` columns are drawn, some at a time. Where the bend's factor is 0 the spread is 0, and the products cost nothing.
    """
    assert sample.mean_D is not None and sample.ahead_D is not None and dropped.center_D is not None
    hidden_size, device = x.weight.shape[1], x.weight.device
    bends = (factors.bend > 0).to(torch.int32)[None]
    spread_DD = x.weight.new_empty(hidden_size, hidden_size)
    gain = torch.full((), 1.0 / size, dtype=torch.float32, device=device)
    for first in range(0, size, at_once):
        away_QD = draw_away(dropped, first, min(at_once, size - first), size, dropped.center_D, x, factors.bend)
        columns = Rows(_places(away_QD), bends * len(away_QD), away_QD)
        add_d_weight(spread_DD, away_QD, columns, gain, tiles.grad_weight, add=first > 0)
    # The linear part of the drawn columns is in what they add.
    columns = Rows(drawn.column_K, bends * len(drawn.away_KD), drawn.away_KD)
    add_d_weight(spread_DD, drawn.away_KD, columns, factors.lines, tiles.grad_weight, add=True)
    # The shares lean towards the sample's mean, and were moved back by TILT. The bend says by how much it should have been.
    moved_2D = sums_of_rows(torch.stack((sample.mean_D, sample.ahead_D.float())), spread_DD)
    factors_2 = torch.stack((factors.bend, (factors.bend - TILT * x.logits.logit_scale).clamp(min=0.0)))
    shared_2D[0].sub_((factors_2[:, None] * moved_2D).sum(0))
    return spread_DD


def _places(rows: torch.Tensor) -> torch.Tensor:
    return torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
