"""The picture of a plan: the last stage's memory as stacked bars, and the stages as rows of blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cce_dist.tools import report
from cce_dist.tools.plan.cut import Cut
from cce_dist.tools.plan.planning import MIB, LossPlan, Plan

# By item: weights and optimizer in greys, activations in browns, the head in blues.
COLORS = {
    "weights": "#c9ced6",
    "main_grad": "#aab2bd",
    "gradients": "#aab2bd",
    "optimizer": "#8b95a3",
    "activations": "#d9b382",
    "hidden states": "#c98f52",
    "head's gradient": "#9ec5e8",
    "statistics": "#6ba7db",
    "lists": "#3f86c6",
    "workspace": report.OURS_COLOR,
}
HEAD_COLOR, LAYER_COLOR = report.OURS_COLOR, "#d9b382"


def draw(path: Path, plan: Plan, title: str) -> None:
    """Write the picture; needs matplotlib."""
    layout = plan.layout
    cut_rows = len(plan.losses) + 1 if layout.pp > 1 else 0
    height = 1.2 + 0.42 * len(plan.losses) + (0.8 + 0.42 * cut_rows if cut_rows else 0)
    heading = (
        f"{title}, {layout.num_tokens:,} tokens, tp {layout.tp}, pp {layout.pp}, dp {layout.dp}; {plan.device.name}"
    )
    with report.picture(path, heading, (9.5, height)) as figure:
        if not cut_rows:
            _memory(figure.subplots(), plan.losses)
            return
        above, below = figure.subplots(2, 1, height_ratios=[len(plan.losses), cut_rows])
        _memory(above, plan.losses)
        _stages(below, plan)


def _memory(axis: Any, losses: list[LossPlan]) -> None:
    names = [each.loss for each in losses]
    left = [0.0] * len(losses)
    for item, color in COLORS.items():
        widths = [each.last_stage.get(item, 0) / MIB / 1024 for each in losses]
        if any(widths):
            axis.barh(names, widths, left=left, color=color, height=0.7, label=item)
            left = [start + width for start, width in zip(left, widths, strict=True)]
    for position, total in enumerate(left):
        axis.text(total * 1.01, position, f"{total:.1f}", va="center", fontsize=7)
    axis.set_xlim(0, max(left) * 1.08)
    axis.invert_yaxis()
    axis.set_xlabel("last stage at its peak, GiB", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _stages(axis: Any, plan: Plan) -> None:
    """Draw a row for each cut, with the stages' times from left to right."""
    fused = next(each for each in plan.losses if each.loss == "fused")
    rows: list[tuple[str, LossPlan, Cut]] = [("fused, even cut", fused, fused.default_cut)]
    rows += [(f"{each.loss}, best cut", each, each.cut) for each in plan.losses]
    slot = 1.04 * max(max(cut.seconds) for _, _, cut in rows)
    pp = plan.layout.pp
    for position, (_, each, cut) in enumerate(rows):
        for rank, seconds in enumerate(cut.seconds):
            layers = sum(cut.layers[rank::pp])
            head = each.cost.seconds if rank == pp - 1 else 0.0
            start, body = rank * slot, seconds - head
            axis.barh(position, body, left=start, color=LAYER_COLOR, edgecolor="white", height=0.7)
            axis.text(start + body / 2, position, str(layers or ""), ha="center", va="center", fontsize=7)
            if head:
                axis.barh(position, head, left=start + body, color=HEAD_COLOR, edgecolor="white", height=0.7)
        # A line in each slot shows the slowest stage, for which all others wait.
        for rank in range(pp):
            end = rank * slot + max(cut.seconds)
            axis.plot([end, end], [position - 0.4, position + 0.4], color="black", linewidth=0.8)
        axis.text(pp * slot, position, f" mean + {cut.imbalance:.0%}", va="center", fontsize=7)
    axis.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axis.set_xticks([(rank + 0.5) * slot for rank in range(pp)], [f"stage {rank + 1}" for rank in range(pp)])
    axis.set_xlim(0, (pp + 0.35) * slot)
    axis.invert_yaxis()
    axis.tick_params(labelsize=8, length=0)
    axis.set_xlabel("time of a microbatch: layers (their number), then the head; lines: the slowest stage", fontsize=8)
    axis.spines[["top", "right", "bottom"]].set_visible(False)
